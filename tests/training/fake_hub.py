"""A hub on this machine: huggingface_hub's own client uploads to it, and it keeps the files of each
commit.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Commit = dict[str, bytes]
"""Path in the repository -> content."""


class _Handler(BaseHTTPRequestHandler):
    """Answers what ``create_repo`` and ``upload_folder`` ask; every file goes into the commit
    itself.
    """

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        url = f"http://127.0.0.1:{server.server_port}/me/run"
        if self.path.endswith("/create"):
            answer: dict[str, Any] = {"url": url}
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            answer = {"files": [{"path": path, **modes} for path in files]}
        else:
            rows = [json.loads(line) for line in body.splitlines()]
            values = [row["value"] for row in rows if row["key"] == "file"]
            server.commits.append({one["path"]: base64.b64decode(one["content"]) for one in values})
            answer = {
                "commitUrl": f"{url}/commit/{'0' * 40}",
                "commitOid": "0" * 40,
                "pullRequestUrl": None,
            }
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"sha": "0" * 40, "siblings": [], "id": "me/run"})

    def _answer(self, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def fake_hub() -> Iterator[tuple[str, list[Commit]]]:
    """Yield the address of a hub, and the commits that it gets."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.commits = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.commits
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

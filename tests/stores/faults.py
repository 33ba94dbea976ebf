"""A proxy between a client and a server of a store on the loopback address, which breaks the
requests it is told to.
"""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASSING = ("cut", "cut in the body", "500", "503", "late", "short")
"""Faults that pass by themselves when a request is sent again. "lost" is one, too: the server did
what it was asked.
"""

LASTING = ("gone", "500", "503", "expired", "denied", "short", "changed")
"""Faults that stay from a request on."""

LATE = 1.2  # seconds; more than a test's client waits
_CODES = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
    "changed": (
        412,
        "PreconditionFailed",
        "At least one of the pre-conditions you specified did not hold",
    ),
}

Choice = Callable[[int, str, str], str | None]
"""Takes the number of a request from 0 on, its method and its path with the query; returns a fault.
"""


class Proxy:
    """A proxy. ``endpoint``: its address; ``choose``: which requests break; ``asked``: all requests
    so far.
    """

    def __init__(self, target: str) -> None:
        self.choose: Choice = lambda number, method, path: None
        self.asked: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        place = urlsplit(target)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def setup(self) -> None:
                super().setup()
                self.server_side = http.client.HTTPConnection(
                    str(place.hostname), place.port, timeout=30
                )

            def finish(self) -> None:
                self.server_side.close()
                with suppress(OSError):
                    super().finish()

            def log_message(self, *arguments: object) -> None:
                pass

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy.lock:
                    number = len(proxy.asked)
                    proxy.asked.append((self.command, self.path))
                fault = proxy.choose(number, self.command, self.path)
                if fault in ("cut", "gone"):
                    self.close_connection = True
                    return
                if fault == "late":
                    time.sleep(LATE)
                    self.close_connection = True
                    return
                if fault in _CODES:
                    status, code, said = _CODES[fault]
                    text = (
                        "<?xml "
                        f'version="1.0"?><Error><Code>{code}</Code><Message>{said}</Message></Error>'
                    )
                    self.answer(status, [("Content-Type", "application/xml")], text.encode())
                    return
                self.server_side.request(self.command, self.path, body, dict(self.headers))
                reply = self.server_side.getresponse()
                data = reply.read()
                headers = [
                    (name, value)
                    for name, value in reply.getheaders()
                    if name.lower() not in ("transfer-encoding", "connection", "content-length")
                    or (name.lower() == "content-length" and self.command == "HEAD")
                ]
                if fault == "lost":
                    self.close_connection = True
                    return
                if fault == "short" and self.command == "GET" and "list-type" not in self.path:
                    data = data[: len(data) // 2]
                self.answer(reply.status, headers, data, cut=fault == "cut in the body")

            def answer(
                self,
                status: int,
                headers: list[tuple[str, str]],
                data: bytes,
                *,
                cut: bool = False,
            ) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that has given up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    proxy = Proxy(target)
    thread = threading.Thread(
        target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()

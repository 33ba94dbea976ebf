"""Azurite, where it is installed, behind a proxy that copies blocks for it, which Azurite cannot.

``npm install azurite`` and ``pip install adlfs``. Azurite checks the signature of every request,
then answers 501 to Put Block From URL. The proxy then does what Azure documents: it reads the range
of the source with the address and condition of the request, and sends it as a block.
"""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import pytest

from ckptfix.storage.stores import open_store
from tests.stores.faults import Proxy, Reply, proxied
from tests.stores.servers import free_port, missing, started

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's only account, which its documentation prints."""


def _variable(endpoint: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
        f"BlobEndpoint={endpoint}/{_ACCOUNT};"
    )


@contextmanager
def azurite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    """Start Azurite, which this process finds in its environment; yield the URL of a container, and
    the proxy.
    """
    program = shutil.which("azurite-blob")
    if program is None or missing("adlfs"):
        pytest.skip(
            "azurite-blob or adlfs is not installed: npm install azurite; pip install adlfs"
        )
    port = free_port()
    command = [
        program,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--inMemoryPersistence",
    ]
    with (
        started([*command, "--skipApiVersionCheck"], port, folder) as endpoint,
        proxied(endpoint) as proxy,
    ):
        proxy.stand_in = _Copies(endpoint)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _variable(proxy.endpoint))
        open_store("az://box/x")._files.mkdir("box")
        proxy.asked.clear()
        yield "az://box", proxy


class _Copies:
    """Answers Put Block From URL for Azurite. ``nbytes``: how many were copied."""

    def __init__(self, endpoint: str) -> None:
        from azure.storage.blob import BlobServiceClient

        self.endpoint = endpoint
        self.client = BlobServiceClient.from_connection_string(_variable(endpoint), retry_total=0)
        self.nbytes = 0

    def __call__(self, path: str, headers: Message, reply: Reply) -> Reply:
        source = headers.get("x-ms-copy-source")
        if reply[0] != 501 or source is None:
            return reply
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError
        from azure.storage.blob import BlobClient

        place, query = urlsplit(path), parse_qs(urlsplit(path).query)
        _, container, key = unquote(place.path).lstrip("/").split("/", 2)
        address = urlunsplit(urlsplit(source)._replace(netloc=urlsplit(self.endpoint).netloc))
        begin, _, end = str(headers["x-ms-source-range"]).removeprefix("bytes=").partition("-")
        words: dict[str, Any] = {"offset": int(begin), "length": int(end) + 1 - int(begin)}
        pinned = headers.get("x-ms-source-if-match")
        if pinned is not None:
            words |= {"etag": pinned, "match_condition": MatchConditions.IfNotModified}
        try:
            data = BlobClient.from_blob_url(address, retry_total=0).download_blob(**words).readall()
        except HttpResponseError as error:
            code = "SourceConditionNotMet" if error.status_code == 412 else "CannotVerifyCopySource"
            return error.status_code, [("x-ms-error-code", code)], b""
        self.nbytes += len(data)
        name = base64.b64decode(query["blockid"][0]).decode()
        self.client.get_blob_client(container, key).stage_block(name, data)
        return 201, [("x-ms-request-server-encrypted", "true")], b""


def access(permissions: Any, generate: Any) -> str:
    """Return a signature of a user for the container, made with the functions of the client
    library.
    """
    from datetime import datetime, timedelta, timezone

    granted = permissions(read=True, write=True, delete=True, list=True, create=True, add=True)
    until = datetime.now(timezone.utc) + timedelta(hours=1)
    return str(generate(_ACCOUNT, "box", account_key=_KEY, permission=granted, expiry=until))

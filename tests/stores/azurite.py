"""Azurite, where it is installed, behind a proxy that breaks requests.

``npm install azurite`` and ``pip install adlfs``.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptfix.storage.stores import open_store
from tests.stores.faults import Proxy, proxied
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
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _variable(proxy.endpoint))
        open_store("az://box/x")._files.mkdir("box")
        proxy.asked.clear()
        yield "az://box", proxy

"""Azure in memory, behind the one method through which ``AzureStore`` sends requests: for kills
without Azurite.

The objects are those of ``simulated_s3``: new bytes and stretches of patterns. Conditions, blocks,
sizes, ETags and metadata are those that Azure documents.
"""

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from ckptfix.storage.azure import AzureStore
from ckptfix.storage.stores import ABSENT, ANY, Expected
from tests.stores.simulated_s3 import Body, Cloud, Object, cut, length_of, read


class Refusal(Exception):
    """An error as the client of Azure raises it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status_code, self.error_code = status, code


class SimulatedAzure(AzureStore):
    """An ``AzureStore`` whose requests a ``Cloud`` answers."""

    cloud: Cloud

    def _opened(self) -> tuple[Any, str]:
        self._container, _, prefix = self.url.partition("://")[2].partition("/")
        return None, prefix

    def ask(
        self, method: str, path: str = "", *, up: int = 0, seconds: float | None = None,
        expected: str | Expected = ANY, **words: Any,
    ) -> Any:  # fmt: skip
        self.traffic.add(up=up)
        cloud = self.cloud
        with cloud.lock:
            cloud.requests += 1
            cloud.strike(method, path, False)
            if method in ("upload_blob", "commit_block_list"):
                self._ensure_condition(path, expected)
            elif expected is not ANY and self._object(path).etag != expected:
                raise Refusal(412, "ConditionNotMet")
            answer = getattr(self, f"_on_{method}")(path, **words)
            cloud.strike(method, path, True)
        if isinstance(answer, bytes):
            self.traffic.add(down=len(answer), requests=0)
        return answer

    def _object(self, path: str) -> Object:
        if path not in self.cloud.objects:
            raise Refusal(404, "BlobNotFound")
        return self.cloud.objects[path]

    def _ensure_condition(self, path: str, expected: str | Expected) -> None:
        now = self.cloud.objects.get(path)
        if expected is ABSENT and now is not None:
            raise Refusal(409, "BlobAlreadyExists")
        if not isinstance(expected, Expected) and (now is None or now.etag != expected):
            raise Refusal(412, "ConditionNotMet")

    def _facts(self, path: str) -> Any:
        one = self.cloud.objects[path]
        return SimpleNamespace(
            name=path, size=length_of(one.body), etag=f'"{one.etag}"', metadata=dict(one.metadata),
            last_modified=datetime.fromtimestamp(one.modified, timezone.utc),
        )  # fmt: skip

    def _on_list_blobs(
        self, path: str, name_starts_with: str, token: str = "", **words: Any
    ) -> Any:
        names = sorted(name for name in self.cloud.objects if name.startswith(name_starts_with))
        return [self._facts(name) for name in names], None

    def _on_get_blob_properties(self, path: str) -> Any:
        self._object(path)
        return self._facts(path)

    def _on_download_blob(self, path: str, offset: int, length: int) -> bytes:
        return read(cut(self._object(path).body, offset, length))

    def _save(self, path: str, body: Body, metadata: dict[str, str]) -> dict[str, str]:
        self.cloud.write(path, body, **metadata)
        for name in [name for name in self.cloud.uploads if name.startswith(f"{path}\0")]:
            del self.cloud.uploads[name]  # every write throws blocks away that no list has
        return {"etag": f'"{self.cloud.objects[path].etag}"'}

    def _on_upload_blob(
        self, path: str, data: bytes, metadata: dict[str, str], **words: Any
    ) -> dict[str, str]:
        return self._save(path, (data,), metadata)

    def _on_stage_block(self, path: str, block_id: str, data: bytes, **words: Any) -> None:
        assert data, "Azure refuses an empty block"
        self.cloud.uploads[f"{path}\0{block_id}"] = {"body": (bytes(data),)}

    def _on_commit_block_list(
        self, path: str, block_list: list[str], metadata: dict[str, str]
    ) -> dict[str, str]:
        if any(f"{path}\0{name}" not in self.cloud.uploads for name in block_list):
            raise Refusal(400, "InvalidBlockList")
        bodies = [self.cloud.uploads[f"{path}\0{name}"]["body"] for name in block_list]
        return self._save(path, tuple(piece for body in bodies for piece in body), metadata)

    def _on_delete_blob(self, path: str) -> None:
        self._object(path)
        del self.cloud.objects[path]


def open_simulated(cloud: Cloud, url: str) -> SimulatedAzure:
    """Return a store of the simulated container."""
    kind = type("SimulatedAzure", (SimulatedAzure,), {"cloud": cloud})
    store: SimulatedAzure = kind(url)
    return store

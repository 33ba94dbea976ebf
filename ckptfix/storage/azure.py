"""Azure: conditions on every write and pinned reads, by the client of azure-storage-blob in adlfs.

Account and credential are found as adlfs finds them: ``AZURE_STORAGE_...``, the login of the
machine; or as fsspec is configured (``FSSPEC_AZ_...``). Errors of that client are known by their
status and code. Objects are written whole: what is made of parts of others travels.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from ckptfix.errors import StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.parallel import Progress
from ckptfix.storage.parts import MARK, MIB
from ckptfix.storage.paths import shell_path
from ckptfix.storage.stores import (
    ABSENT,
    ANY,
    Abilities,
    Expected,
    ObjectInfo,
    Refused,
    Store,
    Temporary,
    nanoseconds,
    part_of_file,
    quoted,
    seconds_to_read,
    together,
)
from ckptfix.wording import escape

_PAGE = 5000  # names of a page of a listing: the store gives no more
_BLOCK = 16 * MIB  # of a large object, unless the next line's number of them would not hold it
_BLOCKS = 50_000
_BLOCKS_AT_ONCE = 8

_REFUSED = {
    "ConditionNotMet",
    "BlobAlreadyExists",
    "TargetConditionNotMet",
    "412",
}
_TEMPORARY = {"ServerBusy", "InternalError", "OperationTimedOut", "Md5Mismatch"}

_LOGIN = "next: export AZURE_STORAGE_ACCOUNT_NAME=NAME, then: az login"
_ADVICE = {
    "AuthenticationFailed": (
        f"the store does not accept this credential, or it has expired; {_LOGIN}"
    ),
    "AuthorizationFailure": (
        "this credential is not allowed to do this from here; next: az storage account show "
        "--name NAME"
    ),
    "AuthorizationPermissionMismatch": (
        "this credential is not allowed to do this; next: az role assignment list --all"
    ),
    "InvalidAuthenticationInfo": f"the store cannot read this credential; {_LOGIN}",
    "NoAuthenticationInformation": f"the store requires a credential; {_LOGIN}",
    "BlobArchived": "the object is archived; next: az storage blob set-tier --tier Hot",
    "LeaseIdMissing": (
        "another program holds a lease on this object; next: az storage blob lease break"
    ),
    "SnapshotsPresent": (
        "the object has snapshots, which would be deleted with it; next, if nobody needs them: az "
        "storage blob delete --delete-snapshots only"
    ),
    "InvalidBlobType": "the object is a page or append blob; next: copy it to a block blob",
    "InvalidBlobOrBlock": (
        "blocks of another, interrupted upload are in the way; next: upload the object again"
    ),
    "BlobImmutableDueToPolicy": (
        "a policy protects this object from changes; next: az storage container "
        "immutability-policy show"
    ),
}
_SAME = {
    "InvalidSasToken": "AuthenticationFailed",
    "401": "AuthenticationFailed",
    "403": "AuthorizationFailure",
    "AuthorizationSourceIPMismatch": "AuthorizationFailure",
    "AuthorizationServiceMismatch": "AuthorizationPermissionMismatch",
    "AuthorizationResourceTypeMismatch": "AuthorizationPermissionMismatch",
    "InsufficientAccountPermissions": "AuthorizationPermissionMismatch",
}


class AzureStore(Store):
    """One prefix of a container."""

    abilities: ClassVar[Abilities] = Abilities(conditions=True)

    def _opened(self) -> tuple[Any, str]:
        import fsspec

        scheme = self.url.partition("://")[0]
        kind = fsspec.get_filesystem_class(scheme)
        words = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            files = kind(**words, **kind._get_kwargs_from_urls(self.url))
        except Exception as error:
            raise StoreError(f"{self.name()}: {_said(error)}; {_LOGIN}") from error
        self._container, _, prefix = kind._strip_protocol(self.url).strip("/").partition("/")
        if not self._container:
            raise UsageError(f"{self.name()} has no container (expected {scheme}://CONTAINER/PATH)")
        return files, prefix

    def removal(self, below: str = "") -> str:
        """Return the command that deletes every object in a folder."""
        pattern = shell_path(f"{self._path(below.rstrip('/'))}/*")
        return (
            f"az storage blob delete-batch --source {shell_path(self._container)} --pattern "
            f"{pattern}"
        )

    def ask(
        self, method: str, path: str = "", *, up: int = 0, seconds: float | None = None,
        expected: str | Expected = ANY, **words: Any,
    ) -> Any:  # fmt: skip
        """Send one request about an object, or for a page of a listing, and return the answer; a
        body comes read.
        """
        from fsspec.asyn import sync

        patience = stores.PATIENCE
        token = words.pop("token", None)
        words |= _condition(expected)
        words["retry_total"] = 0  # _persist tries again, and counts
        words |= {"connection_timeout": patience.connect, "read_timeout": patience.answer}

        async def call() -> Any:
            service = self._files.service_client
            if method in ("list_blobs", "walk_blobs"):
                client = service.get_container_client(self._container)
                pages = getattr(client, method)(**words).by_page(token)
                async for page in pages:
                    return [one async for one in page], pages.continuation_token
                return [], None
            answer = await getattr(service.get_blob_client(self._container, path), method)(**words)
            return await answer.readall() if method == "download_blob" else answer

        async def in_time() -> Any:
            return await asyncio.wait_for(call(), seconds)

        self.traffic.add(up=up)
        answer = sync(self._files.loop, in_time)
        if isinstance(answer, bytes):
            self.traffic.add(down=len(answer), requests=0)
        return answer

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        start = len(self._base) + 1 if self._base else 0
        method = "list_blobs" if deep else "walk_blobs"
        words: dict[str, Any] = {"results_per_page": _PAGE, "include": ["metadata"]}
        words["name_starts_with"] = f"{self._base}/{below}" if self._base else below
        folders: set[str] = set()
        while True:
            # each page is asked for until it comes: a listing of a million names does not begin
            # anew
            found, words["token"] = self._persist(below, lambda: self.ask(method, **words))
            for one in found:
                key = one.name[start:].rstrip("/")
                is_folder = not hasattr(one, "etag") or _is_folder(one)
                if not is_folder:
                    yield one.name[start:], _info(one)
                elif not deep and key != below.rstrip("/") and key not in folders:
                    # A folder of its own is there twice: by its name, and as a prefix.
                    folders.add(key)
                    yield f"{key}/", None
            if not words["token"]:
                return

    def _stat(self, key: str) -> ObjectInfo | None:
        try:
            found = self.ask("get_blob_properties", self._path(key))
        except Exception as error:
            if isinstance(self._judge(error), FileNotFoundError):
                return None
            raise
        return None if _is_folder(found) else _info(found)

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        words: dict[str, Any] = {
            "offset": offset,
            "length": length,
            "seconds": seconds_to_read(length),
            "expected": etag or ANY,
        }
        data: bytes = self.ask("download_blob", self._path(key), **words)
        return data

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        token = secrets.token_hex(8)
        words: dict[str, Any] = {"data": data, "length": len(data), "metadata": {MARK: token}}

        def ask() -> Any:
            return self.ask(
                "upload_blob", self._path(key), up=len(data), expected=expected,
                overwrite=True, validate_content=True, **words,
            )  # fmt: skip

        return self._written(key, len(data), self._once(key, token, ask))

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _BLOCK:
                return self._upload_whole(key, file, expected, progress)
            token, step = secrets.token_hex(8), max(_BLOCK, -(-size // _BLOCKS))
            # equally long, and no other upload has blocks of these names
            blocks = [f"{token}-{number:05}" for number in range(-(-size // step))]

            def send(number: int) -> None:
                data = part_of_file(file, path, number * step, min(step, size - number * step))
                words: dict[str, Any] = {"block_id": blocks[number], "data": data}
                words |= {"length": len(data), "validate_content": True, "up": len(data)}
                self._persist(key, lambda: self.ask("stage_block", self._path(key), **words))
                if progress:
                    progress(len(data))

            together(range(len(blocks)), send, _BLOCKS_AT_ONCE)
        words: dict[str, Any] = {"block_list": blocks, "metadata": {MARK: token}}

        def ask() -> Any:
            return self.ask("commit_block_list", self._path(key), expected=expected, **words)

        return self._written(key, size, self._once(key, token, ask))

    def _once(self, key: str, token: str, ask: Callable[[], Any]) -> str:
        """Send a write until it is answered, and return the ETag; "" where an earlier attempt
        arrived, whose answer was lost: then the object has its token.
        """

        def attempt() -> str:
            try:
                return str(ask().get("etag", "")).strip('"')
            except Exception as error:
                # A write of another program throws away the blocks that no object has yet.
                is_gone = _code(error) == "InvalidBlockList"
                if not (is_gone or isinstance(self._judge(error), Refused)):
                    raise
                try:
                    found = self.ask("get_blob_properties", self._path(key))
                except Exception as second:
                    if not isinstance(self._judge(second), FileNotFoundError):
                        raise
                    raise Refused from error
                if (found.metadata or {}).get(MARK) != token:
                    raise Refused from error
                return ""

        return self._persist(key, attempt, has_condition=True)

    def _delete(self, key: str, expected: str | Expected) -> None:
        try:
            self.ask("delete_blob", self._path(key), expected=expected)
        except Exception as error:
            if not isinstance(self._judge(error), FileNotFoundError):
                raise
            if not isinstance(expected, Expected):
                raise Refused from error

    def _judge(self, error: Exception) -> Exception | None:
        is_of_client = type(error).__module__.startswith("azure.")
        if not is_of_client and not hasattr(error, "status_code"):
            return super()._judge(error)
        status, code = getattr(error, "status_code", None), _code(error)
        known = _SAME.get(code, code)
        if code in _REFUSED:
            return Refused()
        if code == "ContainerNotFound":
            where = escape(self._container)
            return UsageError(
                f"the container {where} does not exist; next: az storage container list"
            )
        if code in _TEMPORARY or status in (408, 429, 500, 502, 503, 504):
            return Temporary(f"{status} {code}")
        if status == 404:
            return FileNotFoundError(code)
        if known in _ADVICE:
            return StoreError(f"{code}: {_ADVICE[known]}")
        if type(error).__name__ in ("ClientAuthenticationError", "CredentialUnavailableError"):
            return StoreError(f"no credential was found; {_LOGIN}")
        if status is None or status < 300:  # no answer, or one that was cut
            return Temporary(_said(error))
        return StoreError(f"{code}: {_said(error)}; next: ckptfix help stores")


def _condition(expected: str | Expected) -> dict[str, Any]:
    if expected is ANY:
        return {}
    from azure.core import MatchConditions

    if expected is ABSENT:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": quoted(str(expected)), "match_condition": MatchConditions.IfNotModified}


def _info(found: Any) -> ObjectInfo:
    return ObjectInfo(found.size, found.etag.strip('"'), nanoseconds(found.last_modified))


def _is_folder(found: Any) -> bool:
    """Return whether a blob only marks a folder, as accounts with a hierarchical namespace have
    them.
    """
    return str((found.metadata or {}).get("hdi_isfolder", "")).lower() == "true"


def _code(error: BaseException) -> str:
    """Return the code of the store, or the status where an answer has none, as that to a HEAD."""
    code = getattr(error, "error_code", None)
    return str(
        getattr(code, "value", code) or getattr(error, "status_code", None) or type(error).__name__
    )


def _said(error: BaseException) -> str:
    """Return the first line of an error, without the signature of an address that it may quote."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return escape(re.sub(r"(?i)\b(sig|AccountKey)=[^&;\s'\"]*", r"\1=...", line))

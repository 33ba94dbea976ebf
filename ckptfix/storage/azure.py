"""Azure: conditions, blocks that the server copies, and pinned reads, by the client of
azure-storage-blob in adlfs.

Account and credential are found as adlfs finds them: ``AZURE_STORAGE_...``, the login of the
machine; or as fsspec is configured (``FSSPEC_AZ_...``). Errors of that client are known by their
status and code.
"""

import asyncio
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

from ckptfix.errors import StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.parts import MARK, MIB, ComposingStore, Upload
from ckptfix.storage.paths import shell_path
from ckptfix.storage.stores import (
    ABSENT,
    ANY,
    Abilities,
    Expected,
    ObjectInfo,
    ObjectRange,
    Refused,
    Temporary,
    nanoseconds,
    quoted,
    seconds_to_read,
)
from ckptfix.wording import escape

_PAGE = 5000  # names of a page of a listing: the store gives no more
_SCOPE = "https://storage.azure.com/.default"
_SIGNED = timedelta(hours=1)  # a copy of one block takes seconds

_SETTINGS = (
    "content_type",
    "content_encoding",
    "content_language",
    "content_disposition",
    "cache_control",
)
"""Properties that a composed object gets from the object that it is like, next to metadata, tags,
tier and scope.
"""

_REFUSED = {
    "ConditionNotMet",
    "BlobAlreadyExists",
    "SourceConditionNotMet",
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
        "this credential may not do that from here; next: az storage account show --name NAME"
    ),
    "AuthorizationPermissionMismatch": (
        "this credential may not do that; next: az role assignment list --all"
    ),
    "InvalidAuthenticationInfo": f"the store cannot read this credential; {_LOGIN}",
    "NoAuthenticationInformation": f"the store wants a credential; {_LOGIN}",
    "CannotVerifyCopySource": (
        "the store may not read the object that it is to copy; next: az role assignment list"
    ),
    "BlobArchived": "the object is archived; next: az storage blob set-tier --tier Hot",
    "LeaseIdMissing": (
        "another program holds a lease of this object; next: az storage blob lease break"
    ),
    "SnapshotsPresent": (
        "the object has snapshots, which would go with it; next: az storage blob delete "
        "--delete-snapshots only, if nobody needs them"
    ),
    "InvalidBlobType": "the object is a page or append blob; next: copy it to a block blob",
    "InvalidBlobOrBlock": (
        "blocks of another upload that was cut short are in the way; next: upload the object anew"
    ),
    "BlobImmutableDueToPolicy": (
        "a policy keeps this object as it is; next: az storage container immutability-policy show"
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


class AzureStore(ComposingStore):
    """One prefix of a container."""

    # A block may have 4,000 MiB; one of 256 MiB is copied within seconds, and 50,000 of them hold
    # 12 TiB.
    abilities: ClassVar[Abilities] = Abilities(
        composes=True, conditions=True, most_copied=256 * MIB, most_parts=50_000
    )

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
            raise UsageError(
                f"{self.name()} names no container: expected {scheme}://CONTAINER/PATH"
            )
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
        words = {**_converted(words), **_condition(expected)}
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

    def readable(self, path: str) -> tuple[str, dict[str, Any]]:
        """Return an address by which the store reads an object itself, and the words of a request
        that copies it.

        Both hold credentials: a token, or an access of an hour to this object, signed with the key
        of the account.
        """
        from fsspec.asyn import sync

        service = self._files.service_client
        address, credential = (
            service.get_blob_client(self._container, path).url,
            service.credential,
        )
        if hasattr(credential, "get_token"):
            token = sync(self._files.loop, credential.get_token, _SCOPE).token
            return address, {"source_authorization": f"Bearer {token}"}
        if hasattr(credential, "account_key"):
            from azure.storage.blob import BlobSasPermissions, generate_blob_sas

            signature = generate_blob_sas(
                credential.account_name, self._container, path, account_key=credential.account_key,
                permission=BlobSasPermissions(read=True),
                expiry=datetime.now(timezone.utc) + _SIGNED,
            )  # fmt: skip
            return f"{address}?{signature}", {}
        return (
            address,
            {},
        )  # a signature of the user's own is part of the address; a public container needs none

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

    def _put_whole(self, key: str, data: bytes, expected: str | Expected) -> str:
        words: dict[str, Any] = {
            "data": data,
            "length": len(data),
            "validate_content": True,
            "overwrite": True,
        }
        return _etag(
            self.ask("upload_blob", self._path(key), up=len(data), expected=expected, **words)
        )

    def _begin(self, key: str, words: Mapping[str, Any]) -> Upload:
        return Upload(key, secrets.token_hex(8), words)

    def _put_part(self, upload: Upload, number: int, data: bytes) -> str:
        if not data:  # an empty object has no block
            return ""
        name = _block(upload, number)
        words: dict[str, Any] = {
            "block_id": name,
            "data": data,
            "length": len(data),
            "validate_content": True,
        }
        self.ask("stage_block", self._path(upload.key), up=len(data), **words)
        return name

    def _copy_part(self, upload: Upload, number: int, copied: ObjectRange) -> str:
        name = _block(upload, number)
        address, words = self.readable(self._path(copied.key))
        if copied.etag:
            words["headers"] = {"x-ms-source-if-match": quoted(copied.etag)}
        words |= {"source_offset": copied.offset, "source_length": copied.length}
        self.ask(
            "stage_block_from_url",
            self._path(upload.key),
            block_id=name,
            source_url=address,
            **words,
        )
        return name

    def _complete(self, upload: Upload, parts: Sequence[str], expected: str | Expected) -> str:
        path, names = self._path(upload.key), [name for name in parts if name]

        def ask() -> str:
            words = {**upload.words, "block_list": names}
            try:
                return _etag(self.ask("commit_block_list", path, expected=expected, **words))
            except Exception as error:
                # An earlier attempt may have arrived, whose answer was lost: no other upload has
                # blocks of these names. A write of another program throws blocks away that are not
                # listed yet.
                if (
                    not isinstance(self._judge(error), Refused)
                    and _code(error) != "InvalidBlockList"
                ):
                    raise
                if not names or self._stat(upload.key) is None:
                    raise Refused from error
                if [one.id for one in self.ask("get_block_list", path)[0]] != names:
                    raise Refused from error
                return ""

        return self._persist(upload.key, ask, has_condition=True)

    def _words_of(self, like: str | None, mark: str) -> dict[str, Any]:
        words: dict[str, Any] = {}
        if like is not None:
            found = self._persist(like, lambda: self.ask("get_blob_properties", self._path(like)))
            settings = {
                name: value
                for name in _SETTINGS
                if (value := getattr(found.content_settings, name))
            }
            words = {"settings": settings, "metadata": dict(found.metadata or {})}
            words["tier"] = found.blob_tier if not found.blob_tier_inferred else None
            words["encryption_scope"] = found.encryption_scope
            if found.tag_count:
                words["tags"] = self._persist(
                    like, lambda: self.ask("get_blob_tags", self._path(like))
                )
        if mark:
            words["metadata"] = {**words.get("metadata", {}), MARK: mark}
        return {name: value for name, value in words.items() if value}

    def _mark(self, key: str) -> str:
        found = self.ask("get_blob_properties", self._path(key))
        return str((found.metadata or {}).get(MARK, ""))

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


def _converted(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of a request with the classes of the client."""
    words = dict(words)
    if "settings" in words or "tier" in words:
        from azure.storage.blob import ContentSettings, StandardBlobTier

        if "settings" in words:
            words["content_settings"] = ContentSettings(**words.pop("settings"))
        if "tier" in words:
            words["standard_blob_tier"] = StandardBlobTier(words.pop("tier"))
    return words


def _condition(expected: str | Expected) -> dict[str, Any]:
    if expected is ANY:
        return {}
    from azure.core import MatchConditions

    if expected is ABSENT:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": quoted(str(expected)), "match_condition": MatchConditions.IfNotModified}


def _block(upload: Upload, number: int) -> str:
    """Return the name of a block: those of an object are equally long, and no other upload has
    them.
    """
    return f"{upload.name}-{number:05}"


def _info(found: Any) -> ObjectInfo:
    return ObjectInfo(found.size, found.etag.strip('"'), nanoseconds(found.last_modified))


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("etag", "")).strip('"')


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

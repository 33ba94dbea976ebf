"""S3: conditions, parts that the server copies, and pinned reads, by the client underneath s3fs.

Credentials, region and endpoint are found as botocore finds them: variables, ``~/.aws``, the role
of the machine; or as fsspec is configured (``FSSPEC_S3_...``).
"""

import asyncio
import base64
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.parallel import Progress
from ckptfix.storage.parts import MARK, MIB, PART, plan_parts
from ckptfix.storage.paths import shell_path
from ckptfix.storage.stores import (
    ABSENT,
    ANY,
    Abilities,
    Contents,
    Expected,
    ObjectInfo,
    ObjectRange,
    Piece,
    Refused,
    Store,
    Temporary,
    md5,
    nanoseconds,
    part_of_file,
    quoted,
    seconds_to_read,
    together,
)

_PARTS_AT_ONCE = 8
_KEYS = 1000  # of a page of a listing: no server gives more

_PASSED_ON = (
    "CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType",
    "Expires", "Metadata", "StorageClass", "ServerSideEncryption", "SSEKMSKeyId",
    "BucketKeyEnabled", "WebsiteRedirectLocation",
)  # fmt: skip
"""Properties that a composed object gets from the object that it is like; it gets its tags, too."""

_TEMPORARY = {
    "InternalError", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "RequestTimeout", "RequestTimeoutException", "TooManyRequestsException", "RequestLimitExceeded",
    "BandwidthLimitExceeded", "OperationAborted", "ConditionalRequestConflict", "BadDigest",
    "XAmzContentSHA256Mismatch", "IncompleteBody", "500", "502", "503", "504", "408", "429",
}  # fmt: skip

_ADVICE = {
    "ExpiredToken": "the credential has expired; next: renew it (aws sso login), then run the same command again",
    "AccessDenied": "this credential is not allowed to do this ({action}); next: aws sts get-caller-identity",
    "InvalidAccessKeyId": "the store does not know this access key; next: aws sts get-caller-identity",
    "SignatureDoesNotMatch": "the secret key is wrong for this access key; next: aws configure list",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; next: timedatectl",
    "PermanentRedirect": "the bucket is in another region; next: export AWS_REGION=REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; next: export AWS_REGION=REGION",
    "InvalidObjectState": "the object is archived (Glacier); next: aws s3api restore-object",
}  # fmt: skip
_ADDRESS = "for a server other than Amazon's: export AWS_ENDPOINT_URL_S3=https://HOST:PORT"
_SAME = {
    "ExpiredTokenException": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken",
    "RequestExpired": "ExpiredToken",
    "InvalidToken": "ExpiredToken",
    "403": "AccessDenied",
    "Forbidden": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "401": "AccessDenied",
    "301": "PermanentRedirect",
}


class S3Store(Store):
    """One prefix of an S3 bucket."""

    abilities: ClassVar[Abilities] = Abilities(
        composes=True, conditions=True, least_part=5 * MIB, most_copied=5 << 30, most_parts=10_000
    )

    def _opened(self) -> tuple[Any, str]:
        import fsspec

        patience = stores.PATIENCE
        files = fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": patience.connect,
                "read_timeout": patience.answer,
                "retries": {"total_max_attempts": 1},  # _persist tries again, and counts
                "max_pool_connections": stores.CONCURRENT,
            },
        )
        self._connecting = threading.Lock()
        base = self.url.partition("://")[2]
        self._bucket, _, prefix = base.partition("/")
        return files, prefix.strip("/")

    def listed(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield every object, page by page."""
        for key, info in self._list("", deep=True):
            assert info is not None, "a deep listing has no folders"
            yield key, info

    def removal(self, below: str = "") -> str:
        """Return the command that deletes every object in a folder."""
        where = f"{self.url}/{below.rstrip('/')}".rstrip("/")
        return f"aws s3 rm --recursive {shell_path(f'{where}/')}"

    def ask(self, method: str, *, up: int = 0, seconds: float | None = None, **words: Any) -> Any:
        """Send a request to the bucket, and return the answer, its ``Body`` read."""
        self.traffic.add(up=up)
        answer = self._run(lambda: asyncio.wait_for(self._call(method, **words), seconds))
        if "Body" in answer:
            self.traffic.add(down=len(answer["Body"]), requests=0)
        return answer

    async def _call(self, method: str, **words: Any) -> Any:
        answer = await getattr(self._files.s3, method)(Bucket=self._bucket, **words)
        if "Body" in answer:
            async with answer["Body"] as body:
                answer["Body"] = await body.read()
        return answer

    def _run(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call in the thread of the client, and return its result."""
        from fsspec.asyn import sync

        async def called() -> Any:
            return await call()

        with self._connecting:  # two at once would make two clients
            self._files.connect()
        return sync(self._files.loop, called)

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        start = len(self._base) + 1 if self._base else 0
        prefix = f"{self._base}/{below}" if self._base else below
        words: dict[str, Any] = {"Prefix": prefix, "MaxKeys": _KEYS} | (
            {} if deep else {"Delimiter": "/"}
        )
        while True:
            # each page is asked for until it comes: a listing of a million keys does not begin anew
            page = self._persist(below, lambda: self.ask("list_objects_v2", **words))
            for one in page.get("Contents", ()):
                if key := one["Key"][start:]:
                    modified = nanoseconds(one["LastModified"])
                    yield key, ObjectInfo(one["Size"], one["ETag"].strip('"'), modified)
            yield from ((one["Prefix"][start:], None) for one in page.get("CommonPrefixes", ()))
            if not page.get("IsTruncated"):
                return
            words["ContinuationToken"] = page["NextContinuationToken"]

    def _stat(self, key: str) -> ObjectInfo | None:
        try:
            head = self.ask("head_object", Key=self._path(key))
        except Exception as error:
            if _code(error) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        return ObjectInfo(
            head["ContentLength"], head["ETag"].strip('"'), nanoseconds(head["LastModified"])
        )

    def read_many(self, ranges: Sequence[ObjectRange]) -> Contents:
        """Return the bytes of each range, as ``Store.read_many`` does.

        Measured: a thread for each costs as much again as a third of its request. The first
        attempts do without; what fails is sent again, and explained, by ``read``.
        """

        async def attempt(one: ObjectRange, limit: asyncio.Semaphore) -> bytes | None:
            async with limit:
                try:
                    words = self._words_to_read(*one)
                    answer = await asyncio.wait_for(
                        self._call("get_object", **words), seconds_to_read(one.length)
                    )
                    return self._body(answer, *one)
                except Exception:
                    return None

        async def attempt_all() -> list[bytes | None]:
            limit = asyncio.Semaphore(stores.CONCURRENT)
            return await asyncio.gather(*(attempt(one, limit) for one in ranges))

        if len(ranges) < 2:
            return super().read_many(ranges)
        found: list[bytes | None] = self._run(attempt_all)
        done = [data for data in found if data is not None]
        self.traffic.add(down=sum(map(len, done)), requests=len(ranges))
        failed = [
            number for number, one in enumerate(ranges) if len(found[number] or b"") != one.length
        ]
        again = super().read_many([ranges[number] for number in failed])
        for number, data in zip(failed, again, strict=True):
            found[number] = data
        return [data or b"" for data in found]

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        words = self._words_to_read(key, offset, length, etag)
        return self._body(
            self.ask("get_object", seconds=seconds_to_read(length), **words),
            key,
            offset,
            length,
            etag,
        )

    def _words_to_read(self, key: str, offset: int, length: int, etag: str) -> dict[str, Any]:
        pinned: dict[str, Any] = {"IfMatch": quoted(etag)} if etag else {}
        return {"Key": self._path(key), "Range": f"bytes={offset}-{offset + length - 1}", **pinned}

    def _body(
        self, answer: Mapping[str, Any], key: str, offset: int, length: int, etag: str
    ) -> bytes:
        """Return the bytes of an answer. Raises Refused (ETag), StoreError (another range)."""
        if etag and answer["ETag"].strip('"') != etag:
            raise Refused
        if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and offset:
            raise StoreError(
                f"{self.name(key)}: the store ignores ranges and sends the object from its "
                "beginning"
            )
        data: bytes = answer["Body"]
        return data[:length]

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        try:
            answer = self.ask(
                "put_object", up=len(data), Key=self._path(key), Body=data,
                ContentMD5=_base64(md5(data)), **_condition(expected),
            )  # fmt: skip
        except Exception as error:
            # An earlier attempt may have arrived, whose answer was lost: then our own object is
            # what is there. Its bytes say so: not every ETag is a digest.
            if (
                not isinstance(self._judge(error), Refused)
                or (now := self._stat(key)) is None
                or now.size != len(data)
                or (data and self._read(key, 0, now.size, now.etag) != data)
            ):
                raise
            return now
        return self._written(key, len(data), _etag(answer))

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PART:
                return self._upload_whole(key, file, expected, progress)
            step = max(PART, -(-size // self.abilities.most_parts))

            def send(number: int, upload: Mapping[str, Any]) -> str:
                data = part_of_file(file, path, number * step, min(step, size - number * step))
                name = self._persist(key, lambda: self._put_part(upload, number, data))
                if progress:
                    progress(len(data))
                return name

            return self._in_parts(key, size, -(-size // step), send, expected, {})

    def _compose(
        self,
        key: str,
        pieces: Sequence[Piece],
        expected: str | Expected,
        like: str | None,
        mark: str,
    ) -> ObjectInfo:
        parts = plan_parts(pieces, self.abilities)
        words = self._words_of(like, mark)

        def send(number: int, upload: Mapping[str, Any]) -> str:
            part = parts[number]
            if not part.is_copied:
                data = b"".join(map(self._bytes_of, part.pieces))
                return self._persist(key, lambda: self._put_part(upload, number, data))
            [copied] = part.pieces
            assert isinstance(copied, ObjectRange)
            try:
                return self._persist(
                    key, lambda: self._copy_part(upload, number, copied), has_condition=True
                )
            except Refused:
                raise self._changed(copied.key, copied.etag, "while it was copied") from None
            except FileNotFoundError:
                raise ChangedError(
                    f"{self.name(copied.key)}: it was deleted while it was copied; next: run the "
                    "same command again"
                ) from None

        if len(parts) == 1 and not parts[0].is_copied and not words:
            return self._put(key, b"".join(map(self._bytes_of, parts[0].pieces)), expected)
        size = sum(part.length for part in parts)
        return self._in_parts(key, size, len(parts), send, expected, words)

    def _in_parts(
        self, key: str, size: int, count: int, send: Callable[[int, Mapping[str, Any]], str],
        expected: str | Expected, words: Mapping[str, Any],
    ) -> ObjectInfo:  # fmt: skip
        """Write an object of parts, which ``send`` sends; the upload is aborted where one fails."""
        path = self._path(key)
        begun = self._persist(key, lambda: self.ask("create_multipart_upload", Key=path, **words))
        upload = {"Key": path, "UploadId": begun["UploadId"]}
        parts = [""] * count
        try:

            def one(number: int) -> None:
                parts[number] = send(number, upload)

            together(range(count), one, _PARTS_AT_ONCE)
            etag = self._complete(key, upload, parts, expected)
        except BaseException:
            # Parts that stay behind cost money, and nobody sees them. The error that led here is
            # the one to report.
            with suppress(Exception):
                self._persist(key, lambda: self.ask("abort_multipart_upload", **upload))
            raise
        return self._written(key, size, etag)

    def _bytes_of(self, piece: Piece) -> bytes:
        if isinstance(piece, bytes):
            return piece
        return self.read(piece.key, piece.offset, piece.length, etag=piece.etag or None)

    def _put_part(self, upload: Mapping[str, Any], number: int, data: bytes) -> str:
        answer = self.ask(
            "upload_part", up=len(data), PartNumber=number + 1, Body=data,
            ContentMD5=_base64(md5(data)), **upload,
        )  # fmt: skip
        return _etag(answer)

    def _copy_part(self, upload: Mapping[str, Any], number: int, copied: ObjectRange) -> str:
        """Have the store copy a part. Raises Refused, FileNotFoundError about its object."""
        source = {"Bucket": self._bucket, "Key": self._path(copied.key)}
        pinned: dict[str, Any] = {"CopySourceIfMatch": quoted(copied.etag)} if copied.etag else {}
        span = f"bytes={copied.offset}-{copied.offset + copied.length - 1}"
        answer = self.ask(
            "upload_part_copy", PartNumber=number + 1, CopySource=source, CopySourceRange=span,
            **pinned, **upload,
        )  # fmt: skip
        return _etag(answer["CopyPartResult"])

    def _complete(
        self, key: str, upload: Mapping[str, Any], parts: Sequence[str], expected: str | Expected
    ) -> str:
        """Put the parts together, and return the ETag of the object, "" after a lost answer.

        An attempt whose answer was lost has ended the upload, which a refused one leaves.
        """
        listed = {
            "Parts": [
                {"PartNumber": number, "ETag": quoted(etag)} for number, etag in enumerate(parts, 1)
            ]
        }
        may_be_done = had_conflict = False

        def ask() -> str:
            nonlocal may_be_done, had_conflict
            try:
                answer = self.ask(
                    "complete_multipart_upload",
                    MultipartUpload=listed,
                    **upload,
                    **_condition(expected),
                )
                return _etag(answer)
            except Exception as error:
                is_gone = _is_gone(error)
                if may_be_done and (
                    is_gone
                    or (isinstance(self._judge(error), Refused) and not self._has_parts(upload))
                ):
                    return ""
                if is_gone and had_conflict:
                    raise Refused from error
                # A conflict is an answer, and no lost one: another program writes there, and the
                # parts may go.
                is_conflict = _code(error) == "ConditionalRequestConflict"
                had_conflict |= is_conflict
                may_be_done |= not is_conflict
                raise

        return self._persist(key, ask, has_condition=True)

    def keeps_conditions(self, key: str) -> bool:
        """Return whether this server refuses to put parts together on a condition that does not
        hold.

        Amazon's does. Some others take the condition and ignore it, and so would replace what
        another program wrote.
        """
        try:
            self.compose(key, [b"no object has this ETag"], expected="0", mark="probe")
        except ChangedError:
            return True
        self.delete(key)
        return False

    def _has_parts(self, upload: Mapping[str, Any]) -> bool:
        """Return whether an upload goes on: it is neither complete nor aborted."""
        try:
            self.ask("list_parts", MaxParts=1, **upload)
        except Exception as error:
            if _is_gone(error):
                return False
            raise
        return True

    def _abandoned(self, below: str) -> int:
        prefix = self._path(f"{below}/")
        # 1,000 of them at most.
        found = self.ask("list_multipart_uploads", Prefix=prefix).get("Uploads", ())
        for one in found:
            with suppress(Exception):  # somebody else may have ended it
                self.ask("abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])
        return len(found)

    def _words_of(self, like: str | None, mark: str) -> dict[str, Any]:
        words: dict[str, Any] = {}
        if like is not None:
            head = self._persist(like, lambda: self.ask("head_object", Key=self._path(like)))
            words = {
                name: head[name] for name in _PASSED_ON if head.get(name) not in (None, "", {})
            }
            if head.get("TagCount") or "TagCount" not in head:
                found = self._persist(
                    like, lambda: self.ask("get_object_tagging", Key=self._path(like))
                )
                if tags := {one["Key"]: one["Value"] for one in found.get("TagSet", ())}:
                    words["Tagging"] = urlencode(tags)
        if mark:
            words["Metadata"] = {**words.get("Metadata", {}), MARK: mark}
        return words

    def _mark(self, key: str) -> str:
        head = self.ask("head_object", Key=self._path(key))
        return str(head.get("Metadata", {}).get(MARK, ""))

    def _delete(self, key: str, expected: str | Expected) -> None:
        self._ensure(key, expected)
        pinned: dict[str, Any] = (
            {} if isinstance(expected, Expected) else {"IfMatch": quoted(expected)}
        )
        self.ask("delete_object", Key=self._path(key), **pinned)

    def _judge(self, error: Exception) -> Exception | None:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,
            EndpointConnectionError,
            HTTPClientError,
            NoCredentialsError,
            ParamValidationError,
            PartialCredentialsError,
            ResponseStreamingError,
            SSLError,
        )

        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreError(
                "no credentials were found; next: aws configure, or export AWS_PROFILE=NAME"
            )
        if isinstance(error, EndpointConnectionError | SSLError):
            return Temporary(f"{' '.join(str(error).split())}; {_ADDRESS}")
        if isinstance(error, ConnectionError | HTTPClientError | ResponseStreamingError):
            return Temporary(" ".join(str(error).split()))
        if isinstance(error, ParamValidationError) and "bucket name" in str(error):
            return UsageError(f"{self._bucket} is not a valid bucket name; next, {_ADDRESS}")
        if isinstance(error, BotoCoreError):
            return StoreError(f"{' '.join(str(error).split())}; next: aws configure list")
        if not isinstance(error, ClientError):
            return super()._judge(error)
        code = _code(error)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = " ".join(str(error.response.get("Error", {}).get("Message", "")).split())
        if code in ("412", "PreconditionFailed"):
            return Refused()
        if code == "NoSuchBucket":
            return UsageError(
                f"{self.url.partition('://')[0]}://{self._bucket} does not exist in this store; "
                "next: aws s3 ls"
            )
        if code in _TEMPORARY or status in (500, 502, 503, 504):
            return Temporary(f"{status} {code}")
        if code in ("404", "NoSuchKey", "NotFound"):
            return FileNotFoundError(code)
        unknown = _ADVICE["AccessDenied"] if status in (401, 403) else ""
        advice = _ADVICE.get(_SAME.get(code, code), unknown).format(action=error.operation_name)
        return StoreError(f"{code}: {advice or f'{said}; next: ckptfix help stores'}")


def _condition(expected: str | Expected) -> dict[str, Any]:
    if expected is ABSENT:
        return {"IfNoneMatch": "*"}
    return (
        {} if expected is ANY or isinstance(expected, Expected) else {"IfMatch": quoted(expected)}
    )


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _is_gone(error: BaseException) -> bool:
    """Return whether an upload of parts no longer exists."""
    return _code(error) in ("NoSuchUpload", "404")


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    found = response.get("Error", {}) if isinstance(response, dict) else {}
    return str(found.get("Code", ""))

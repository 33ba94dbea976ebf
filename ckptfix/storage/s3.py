"""S3: conditions, parts that the server copies, and pinned reads, by the client underneath s3fs.

Credentials, region and endpoint are found as botocore finds them: variables, ``~/.aws``, the role of the machine; or as
fsspec is configured (``FSSPEC_S3_...``).
"""

import asyncio
import base64
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlencode

from ckptfix.errors import ChangedError, StoreError, UsageError
from ckptfix.storage import stores
from ckptfix.storage.parallel import Progress
from ckptfix.storage.stores import (
    ABSENT,
    ANY,
    Abilities,
    Expected,
    ObjectInfo,
    ObjectRange,
    Piece,
    Refused,
    Store,
    Temporary,
    md5,
    nanoseconds,
    together,
)

MIB = 1 << 20
_PART = 16 * MIB
"""Bytes of an uploaded part, unless 10,000 of them would not hold the object."""

_COPIED = 1 << 30
"""Bytes of a copied part, unless 10,000 of them would not hold the object: the store answers within seconds."""

_PARTS_AT_ONCE = 8
_KEYS = 1000  # of a page of a listing: no server gives more

_PASSED_ON = (
    "CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType", "Expires", "Metadata",
    "StorageClass", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled", "WebsiteRedirectLocation",
)  # fmt: skip
"""Properties that a composed object gets from the object that it is like; it gets its tags, too."""

_MARK = "ckptfix"
"""Name of the user metadata that holds the mark of an object."""

_TEMPORARY = {
    "InternalError", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "RequestTimeout",
    "RequestTimeoutException", "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded",
    "OperationAborted", "ConditionalRequestConflict", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody",
    "500", "502", "503", "504", "408", "429",
}  # fmt: skip

_ADVICE = {
    "ExpiredToken": "the credential has expired; next: renew it (aws sso login), then run the same command again",
    "AccessDenied": "this credential may not do that; next: aws sts get-caller-identity",
    "InvalidAccessKeyId": "the store does not know this access key; next: aws sts get-caller-identity",
    "SignatureDoesNotMatch": "the secret key is wrong for this access key; next: aws configure list",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; next: timedatectl",
    "PermanentRedirect": "the bucket lies in another region; next: export AWS_REGION=REGION",
    "AuthorizationHeaderMalformed": "the bucket lies in another region; next: export AWS_REGION=REGION",
    "InvalidObjectState": "the object is archived (Glacier); next: aws s3api restore-object",
}  # fmt: skip
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


class Part(NamedTuple):
    """One part of an object: a range that the store copies, or pieces that travel through this machine."""

    pieces: tuple[Piece, ...]
    is_copied: bool

    @property
    def length(self) -> int:
        """Its size in bytes."""
        return sum(map(_length, self.pieces))


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
        self._prefix = prefix.strip("/")
        return files, self._prefix

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if key and self._prefix else key or self._prefix

    def ask(self, method: str, *, up: int = 0, seconds: float | None = None, **words: Any) -> Any:
        """Send one request to the bucket, and return the answer; a body that comes back is in ``Body``, read."""
        from fsspec.asyn import sync

        async def call() -> Any:
            client = self._files.s3
            answer = await getattr(client, method)(Bucket=self._bucket, **words)
            if "Body" in answer:
                async with answer["Body"] as body:
                    answer["Body"] = await body.read()
            return answer

        async def in_time() -> Any:
            return await asyncio.wait_for(call(), seconds)

        with self._connecting:  # two at once would make two clients
            self._files.connect()
        self.traffic.add(up=up)
        answer = sync(self._files.loop, in_time)
        if "Body" in answer:
            self.traffic.add(down=len(answer["Body"]), requests=0)
        return answer

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        start = len(self._prefix) + 1 if self._prefix else 0
        prefix = f"{self._prefix}/{below}" if self._prefix else below
        words: dict[str, Any] = {"Prefix": prefix, "MaxKeys": _KEYS} | ({} if deep else {"Delimiter": "/"})
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
        return ObjectInfo(head["ContentLength"], head["ETag"].strip('"'), nanoseconds(head["LastModified"]))

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        pinned: dict[str, Any] = {"IfMatch": _quoted(etag)} if etag else {}
        span = f"bytes={offset}-{offset + length - 1}"
        # half a minute, and a MiB every four seconds: a connection that only trickles is as good as cut
        seconds = stores.PATIENCE.answer + length / (256 << 10)
        answer = self.ask("get_object", Key=self._path(key), Range=span, seconds=seconds, **pinned)
        if etag and answer["ETag"].strip('"') != etag:
            raise Refused
        if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and offset:
            raise StoreError(
                f"{self.name(key)}: the store ignores ranges, and sends the object from its beginning"
            )
        data: bytes = answer["Body"]
        return data[:length]

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        digest = md5(data)
        try:
            answer = self.ask(
                "put_object", up=len(data), Key=self._path(key), Body=data, ContentMD5=_base64(digest),
                **_condition(expected),
            )  # fmt: skip
        except Exception as error:
            # An earlier attempt may have arrived, whose answer was lost: then our own object is what is there. Its
            # bytes say so: the ETag of an encrypted object is no digest.
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
            if size <= _PART:
                data = file.read()
                answer = self._put(key, data, expected)
                if progress:
                    progress(len(data))
                return answer

            def part(number: int) -> tuple[int, Callable[[], bytes]]:
                begin = number * step
                length = min(step, size - begin)
                return length, lambda: os.pread(file.fileno(), length, begin)

            step = max(_PART, -(-size // self.abilities.most_parts))
            parts = [part(number) for number in range(-(-size // step))]

            def send(number: int, upload: Mapping[str, Any]) -> str:
                length, load = parts[number]
                data = load()
                if len(data) != length:
                    raise ChangedError(f"{path}: it became shorter while it was uploaded")
                etag = self._send_part(key, upload, number, data)
                if progress:
                    progress(length)
                return etag

            return self._multipart(key, size, len(parts), send, expected, {})

    def _compose(
        self, key: str, pieces: Sequence[Piece], expected: str | Expected, like: str | None, mark: str
    ) -> ObjectInfo:
        parts = plan_parts(pieces, self.abilities)
        words = self._words_of(like) if like is not None else {}
        if mark:
            words["Metadata"] = {**words.get("Metadata", {}), _MARK: mark}
        size = sum(part.length for part in parts)

        def send(number: int, upload: Mapping[str, Any]) -> str:
            part = parts[number]
            if not part.is_copied:
                return self._send_part(key, upload, number, b"".join(map(self._bytes_of, part.pieces)))
            [copied] = part.pieces
            assert isinstance(copied, ObjectRange)
            return self._copy_part(key, upload, number, copied)

        if len(parts) == 1 and not parts[0].is_copied and not words:
            return self._put(key, b"".join(map(self._bytes_of, parts[0].pieces)), expected)
        return self._multipart(key, size, len(parts), send, expected, words)

    def _multipart(
        self, key: str, size: int, count: int, send: Callable[[int, Mapping[str, Any]], str],
        expected: str | Expected, words: Mapping[str, Any],
    ) -> ObjectInfo:  # fmt: skip
        """Write an object of parts, which ``send`` sends; the upload is aborted where one fails."""
        path = self._path(key)
        begun = self._persist(key, lambda: self.ask("create_multipart_upload", Key=path, **words))
        upload = {"Key": path, "UploadId": begun["UploadId"]}
        etags = [""] * count
        try:

            def one(number: int) -> None:
                etags[number] = send(number, upload)

            together(range(count), one, _PARTS_AT_ONCE)
            listed = {
                "Parts": [
                    {"PartNumber": number, "ETag": _quoted(etag)} for number, etag in enumerate(etags, 1)
                ]
            }
            etag = self._complete(key, upload, listed, expected)
        except BaseException:
            self._abort(upload)
            raise
        return self._written(key, size, etag)

    def _complete(
        self, key: str, upload: Mapping[str, Any], listed: Mapping[str, Any], expected: str | Expected
    ) -> str:
        """Put the parts together, and return the ETag of the object, "" where the answer was lost.

        An attempt whose answer was lost has ended the upload, which a refused one leaves.
        """
        attempts = 0

        def ask() -> str:
            nonlocal attempts
            attempts += 1
            try:
                answer = self.ask(
                    "complete_multipart_upload", MultipartUpload=listed, **upload, **_condition(expected)
                )
                return _etag(answer)
            except Exception as error:
                if attempts == 1 or not (_is_gone(error) or isinstance(self._judge(error), Refused)):
                    raise
                if not _is_gone(error) and self._has_parts(upload):
                    raise
                return ""

        return self._persist(key, ask, has_condition=True)

    def _has_parts(self, upload: Mapping[str, Any]) -> bool:
        """Return whether an upload goes on: it is neither complete nor aborted."""
        try:
            self.ask("list_parts", MaxParts=1, **upload)
        except Exception as error:
            if _is_gone(error):
                return False
            raise
        return True

    def _abort(self, upload: Mapping[str, Any]) -> None:
        # Parts that stay behind cost money, and nobody sees them. The error that led here is the one to report.
        with suppress(Exception):
            self._persist(upload["Key"], lambda: self.ask("abort_multipart_upload", **upload))

    def _abandoned(self, below: str) -> int:
        prefix = self._path(f"{below}/")
        found = self.ask("list_multipart_uploads", Prefix=prefix).get("Uploads", ())  # 1,000 of them at most
        for one in found:
            self._abort({"Key": one["Key"], "UploadId": one["UploadId"]})
        return len(found)

    def _send_part(self, key: str, upload: Mapping[str, Any], number: int, data: bytes) -> str:
        digest = md5(data)

        def ask() -> str:
            answer = self.ask(
                "upload_part", up=len(data), PartNumber=number + 1, Body=data, ContentMD5=_base64(digest), **upload
            )  # fmt: skip
            return _etag(answer)

        return self._persist(key, ask)

    def _copy_part(self, key: str, upload: Mapping[str, Any], number: int, copied: ObjectRange) -> str:
        source = {"Bucket": self._bucket, "Key": self._path(copied.key)}
        pinned: dict[str, Any] = {"CopySourceIfMatch": _quoted(copied.etag)} if copied.etag else {}
        span = f"bytes={copied.offset}-{copied.offset + copied.length - 1}"

        def ask() -> str:
            answer = self.ask(
                "upload_part_copy", PartNumber=number + 1, CopySource=source, CopySourceRange=span, **pinned, **upload
            )  # fmt: skip
            return _etag(answer["CopyPartResult"])

        try:
            return self._persist(key, ask, has_condition=True)
        except Refused:
            raise self._changed(copied.key, copied.etag, "while it was copied") from None
        except FileNotFoundError:
            raise ChangedError(
                f"{self.name(copied.key)}: it was deleted while it was copied; next: run the same command again"
            ) from None

    def _bytes_of(self, piece: Piece) -> bytes:
        if isinstance(piece, bytes):
            return piece
        return self.read(piece.key, piece.offset, piece.length, etag=piece.etag or None)

    def _words_of(self, like: str) -> dict[str, Any]:
        """Return what the object passes on, as words of a new upload."""
        head = self._persist(like, lambda: self.ask("head_object", Key=self._path(like)))
        words = {name: head[name] for name in _PASSED_ON if head.get(name) not in (None, "", {})}
        if head.get("TagCount") or "TagCount" not in head:
            found = self._persist(like, lambda: self.ask("get_object_tagging", Key=self._path(like)))
            if tags := {one["Key"]: one["Value"] for one in found.get("TagSet", ())}:
                words["Tagging"] = urlencode(tags)
        return words

    def _mark(self, key: str) -> str:
        head = self.ask("head_object", Key=self._path(key))
        return str(head.get("Metadata", {}).get(_MARK, ""))

    def _delete(self, key: str, expected: str | Expected) -> None:
        self._ensure(key, expected)
        pinned: dict[str, Any] = {} if isinstance(expected, Expected) else {"IfMatch": _quoted(expected)}
        self.ask("delete_object", Key=self._path(key), **pinned)

    def _judge(self, error: Exception) -> Exception | None:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,
            HTTPClientError,
            NoCredentialsError,
            PartialCredentialsError,
            ResponseStreamingError,
        )

        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreError("no credentials were found; next: aws configure, or export AWS_PROFILE=NAME")
        if isinstance(error, ConnectionError | HTTPClientError | ResponseStreamingError):
            return Temporary(" ".join(str(error).split()))
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
                f"{self.url.partition('://')[0]}://{self._bucket} does not exist in this store; next: aws s3 ls"
            )
        if code in _TEMPORARY or status in (500, 502, 503, 504):
            return Temporary(f"{status} {code}")
        if code in ("404", "NoSuchKey", "NotFound"):
            return FileNotFoundError(code)
        known = _SAME.get(code, code)
        advice = _ADVICE.get(known) or ("AccessDenied" if status in (401, 403) else "")
        return StoreError(f"{code}: {advice or f'{said}; next: ckptfix help stores'}")


def plan_parts(pieces: Sequence[Piece], abilities: Abilities) -> list[Part]:
    """Return the parts of an object, none but the last smaller than the store allows; few bytes travel.

    A range that follows less than a part of new bytes gives its first bytes to that part. Parts are as few as
    10,000 of them hold.
    """
    pieces = [piece for piece in pieces if _length(piece)]
    total = sum(map(_length, pieces))
    least, most = abilities.least_part, abilities.most_parts // 2
    copied = min(max(_COPIED, -(-total // most)), abilities.most_copied)
    sent = max(_PART, -(-total // most))
    parts: list[Part] = []
    waiting: list[Piece] = []
    held = 0

    def flush() -> None:
        nonlocal held
        if waiting:
            parts.append(Part(tuple(waiting), is_copied=False))
            waiting.clear()
            held = 0

    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        rest: Piece | None = piece
        while rest is not None:
            length = _length(rest)
            can_copy = isinstance(rest, ObjectRange) and (held == 0 or held >= least)
            if can_copy and (length >= least or (is_last and (parts or held))):
                flush()
                take = length if length <= copied else copied
                if take < length and length - take < least and not is_last:
                    take = length - least  # what is left must be a part, too
                first, rest = _cut(rest, take)
                parts.append(Part((first,), is_copied=True))
                continue
            # to the bytes that travel: up to the smallest part before a range, and up to a full part of new bytes
            wanted = (
                least - held
                if isinstance(rest, ObjectRange) and 0 < least - held <= length - least
                else sent - held
            )
            first, rest = _cut(rest, min(length, wanted))
            waiting.append(first)
            held += _length(first)
            if held >= sent:
                flush()
    flush()
    return parts or [Part((), is_copied=False)]


def _cut(piece: Piece, length: int) -> tuple[Piece, Piece | None]:
    if length == _length(piece):
        return piece, None
    if isinstance(piece, bytes):
        return piece[:length], piece[length:]
    return piece._replace(length=length), piece._replace(
        offset=piece.offset + length, length=piece.length - length
    )


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.length


def _condition(expected: str | Expected) -> dict[str, Any]:
    if expected is ABSENT:
        return {"IfNoneMatch": "*"}
    return {} if expected is ANY or isinstance(expected, Expected) else {"IfMatch": _quoted(expected)}


def _quoted(etag: str) -> str:
    return f'"{etag}"'


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

"""S3 in memory, behind the one method through which ``S3Store`` sends requests: for kills, faults
and objects of 1 TB.

An object is a list of pieces, so that a copy of 5 GiB costs nothing: new bytes, and stretches of
patterns, whose bytes are computed where they are read. Conditions, sizes of parts, ETags and
metadata are those of S3. The real servers of ``servers`` prove that the requests themselves are
right; this one strikes thousands of points.
"""

import hashlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import cache
from typing import Any, NamedTuple

import pytest
from msgspec import Struct

from ckptfix.storage import stores
from ckptfix.storage.s3 import S3Store
from ckptfix.storage.stores import Contents, ObjectRange, Patience, Store

MOST_COPIED = 5 << 30
BUCKET = "simulated"
PERIOD = (1 << 12) + 7
PRIME = (1 << 127) - 1


class Killed(BaseException):
    """The process is dead: every later request of it fails, too."""


@cache
def pattern(seed: int) -> bytes:
    """Return the bytes that a stretch repeats; no power of two, so that a wrong offset shows."""
    return random.Random(seed).randbytes(PERIOD)


class Stretch(NamedTuple):
    """``length`` bytes from ``offset`` of the endless repetition of pattern ``seed``."""

    seed: int
    offset: int
    length: int

    def read(self) -> bytes:
        """Return the bytes."""
        begin, block = self.offset % PERIOD, pattern(self.seed)
        repeated = block * (-(-(begin + self.length) // PERIOD))
        return repeated[begin : begin + self.length]

    def hashed(self) -> "Hash":
        """Return the hash of the bytes, of 1 TB as fast as of 1 MB."""
        head = min(self.length, -self.offset % PERIOD)
        count, tail = divmod(self.length - head, PERIOD)
        found = hash_of(Stretch(self.seed, self.offset, head).read())
        power = _hash_of_pattern(self.seed)
        while count:
            found = found + power if count & 1 else found
            power, count = power + power, count >> 1
        return found + hash_of(pattern(self.seed)[:tail])


class Hash(NamedTuple):
    """The hash of some bytes as a number in base 256: that of a + b follows from those of a
    and b.
    """

    value: int
    length: int

    def __add__(self, other: "Hash") -> "Hash":  # type: ignore[override]
        shifted = self.value * pow(256, other.length, PRIME)
        return Hash((shifted + other.value) % PRIME, self.length + other.length)


def hash_of(data: bytes) -> Hash:
    """Return the hash of bytes."""
    return Hash(int.from_bytes(data, "big") % PRIME, len(data))


@cache
def _hash_of_pattern(seed: int) -> Hash:
    return hash_of(pattern(seed))


Body = tuple[bytes | Stretch, ...]


def length_of(body: Body) -> int:
    """Return the number of bytes of a body."""
    return sum(len(one) if isinstance(one, bytes) else one.length for one in body)


def cut(body: Body, offset: int, length: int) -> Body:
    """Return a part of a body."""
    found: list[bytes | Stretch] = []
    for one in body:
        size = len(one) if isinstance(one, bytes) else one.length
        begin, end = max(0, offset), min(size, offset + length)
        if begin < end:
            found.append(
                one[begin:end]
                if isinstance(one, bytes)
                else Stretch(one.seed, one.offset + begin, end - begin)
            )
        offset -= size
    return tuple(found)


def read(body: Body) -> bytes:
    """Return the bytes of a body."""
    return b"".join(one if isinstance(one, bytes) else one.read() for one in body)


def digest(body: Body) -> str:
    """Return what changes with the bytes of a body, however it is cut into pieces."""
    found = Hash(0, 0)
    for one in body:
        found = found + (hash_of(one) if isinstance(one, bytes) else one.hashed())
    return f"{found.value:032x}"


class Object(Struct, frozen=True):
    """One object of the bucket."""

    body: Body
    etag: str
    metadata: dict[str, str]
    words: dict[str, Any]
    modified: float


class Cloud:
    """A bucket. ``strike`` is called before and after each request and may raise: a kill, or a
    fault.

    ``is_encrypted``: as with the keys of SSE-KMS no ETag follows from bytes, and each write has
    another one.
    """

    def __init__(self, least_part: int = 5 << 20, *, is_encrypted: bool = False) -> None:
        self.least_part = least_part
        self.is_encrypted = is_encrypted
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()
        self.strike: Callable[[str, str, bool], None] = lambda method, key, is_after: None
        self.requests = 0
        self.copied = 0
        self.clock = time.time()

    def write(self, key: str, body: bytes | Body, **metadata: str) -> None:
        """Write an object as another program does."""
        body = (body,) if isinstance(body, bytes) else body
        with self.lock:
            self.clock += 1
            self.objects[key] = Object(body, self.etag(digest(body)), metadata, {}, self.clock)

    def etag(self, plain: str) -> str:
        """Return the ETag of a write that without encryption has the ETag ``plain``."""
        return secrets.token_hex(16) if self.is_encrypted else plain

    def names(self) -> dict[str, str]:
        """Return the digest of every object but those of the journal; the manifest is one of
        them.
        """
        return {
            key: digest(one.body)
            for key, one in self.objects.items()
            if "/.ckptfix/" not in f"/{key}" or key.endswith("manifest.json")
        }

    def journal(self) -> list[str]:
        """Return the keys of the journal."""
        return sorted(set(self.objects) - set(self.names()))


class SimulatedStore(S3Store):
    """An ``S3Store`` whose requests a ``Cloud`` answers."""

    cloud: Cloud

    def _opened(self) -> tuple[Any, str]:
        self._bucket, _, prefix = self.url.partition("://")[2].partition("/")
        return None, prefix.strip("/")

    def read_many(self, ranges: Sequence[ObjectRange]) -> Contents:
        return Store.read_many(self, ranges)  # each by ``ask``

    def ask(self, method: str, *, up: int = 0, seconds: float | None = None, **words: Any) -> Any:
        self.traffic.add(up=up)
        cloud, key = self.cloud, words.get("Key", words.get("Prefix", ""))
        with cloud.lock:
            cloud.requests += 1
            cloud.strike(method, key, False)
            answer = getattr(self, f"_on_{method}")(**words)
            cloud.strike(method, key, True)
        if "Body" in answer:
            self.traffic.add(down=len(answer["Body"]), requests=0)
        return answer

    def _refuse(self, status: int, code: str, method: str) -> Exception:
        return refusal(status, code, method)

    def _object(self, key: str, method: str = "get_object", *, head: bool = False) -> Object:
        if key not in self.cloud.objects:
            raise self._refuse(404, "404" if head else "NoSuchKey", method)
        return self.cloud.objects[key]

    def _ensure_condition(self, key: str, words: dict[str, Any], method: str) -> None:
        now = self.cloud.objects.get(key)
        if words.get("IfNoneMatch") == "*" and now is not None:
            raise self._refuse(412, "PreconditionFailed", method)
        if (wanted := words.get("IfMatch")) is not None:
            if now is None:
                raise self._refuse(404, "NoSuchKey", method)
            if wanted != f'"{now.etag}"':
                raise self._refuse(412, "PreconditionFailed", method)

    def _on_list_objects_v2(
        self, Prefix: str, Delimiter: str = "", ContinuationToken: str = "", MaxKeys: int = 1000
    ) -> Any:
        keys = sorted(
            key for key in self.cloud.objects if key.startswith(Prefix) and key > ContinuationToken
        )
        page: dict[str, Any] = {
            "Contents": [],
            "CommonPrefixes": [],
            "IsTruncated": len(keys) > 1000,
        }
        folders: set[str] = set()
        for key in keys[:1000]:
            rest = key[len(Prefix) :]
            if Delimiter and Delimiter in rest:
                folders.add(Prefix + rest.partition(Delimiter)[0] + Delimiter)
                continue
            one = self.cloud.objects[key]
            page["Contents"].append(
                {
                    "Key": key,
                    "Size": length_of(one.body),
                    "ETag": f'"{one.etag}"',
                    "LastModified": datetime.fromtimestamp(one.modified, timezone.utc),
                }
            )
        page["CommonPrefixes"] = [{"Prefix": one} for one in sorted(folders)]
        page["NextContinuationToken"] = keys[:1000][-1] if keys else ""
        return page

    def _on_head_object(self, Key: str) -> Any:
        one = self._object(Key, head=True)
        return {
            "ContentLength": length_of(one.body),
            "ETag": f'"{one.etag}"',
            "LastModified": datetime.fromtimestamp(one.modified, timezone.utc),
            "Metadata": dict(one.metadata),
            "TagCount": 0,
            **one.words,
        }

    def _on_get_object_tagging(self, Key: str) -> Any:
        return {"TagSet": []}

    def _on_get_object(self, Key: str, Range: str, IfMatch: str = "") -> Any:
        one = self._object(Key)
        if IfMatch and IfMatch != f'"{one.etag}"':
            raise self._refuse(412, "PreconditionFailed", "get_object")
        begin, _, end = Range.removeprefix("bytes=").partition("-")
        data = read(cut(one.body, int(begin), int(end) + 1 - int(begin)))
        return {"Body": data, "ETag": f'"{one.etag}"', "ResponseMetadata": {"HTTPStatusCode": 206}}

    def _on_put_object(self, Key: str, Body: bytes, ContentMD5: str, **words: Any) -> Any:
        self._ensure_condition(Key, words, "put_object")
        self.cloud.write(Key, Body)
        return {"ETag": f'"{self.cloud.objects[Key].etag}"'}

    def _on_create_multipart_upload(self, Key: str, **words: Any) -> Any:
        name = f"u{self.cloud.requests}"
        self.cloud.uploads[name] = {"key": Key, "words": words, "parts": {}}
        return {"UploadId": name}

    def _upload_of(self, name: str, method: str) -> dict[str, Any]:
        if name not in self.cloud.uploads:
            raise self._refuse(404, "NoSuchUpload", method)
        return self.cloud.uploads[name]

    def _on_upload_part(
        self, Key: str, UploadId: str, PartNumber: int, Body: bytes, ContentMD5: str
    ) -> Any:
        self._upload_of(UploadId, "upload_part")["parts"][PartNumber] = (bytes(Body),)
        return {"ETag": f'"{self.cloud.etag(digest((bytes(Body),)))}"'}

    def _on_list_multipart_uploads(self, Prefix: str) -> Any:
        below = {
            name: one for name, one in self.cloud.uploads.items() if one["key"].startswith(Prefix)
        }
        return {"Uploads": [{"Key": one["key"], "UploadId": name} for name, one in below.items()]}

    def _on_list_parts(self, Key: str, UploadId: str, MaxParts: int) -> Any:
        self._upload_of(UploadId, "list_parts")
        return {}

    def _on_upload_part_copy(
        self, Key: str, UploadId: str, PartNumber: int, CopySource: Any, CopySourceRange: str,
        CopySourceIfMatch: str = "",
    ) -> Any:  # fmt: skip
        one = self._object(CopySource["Key"], "upload_part_copy")
        if CopySourceIfMatch and CopySourceIfMatch != f'"{one.etag}"':
            raise self._refuse(412, "PreconditionFailed", "upload_part_copy")
        begin, _, end = CopySourceRange.removeprefix("bytes=").partition("-")
        body = cut(one.body, int(begin), int(end) + 1 - int(begin))
        if length_of(body) > MOST_COPIED:
            raise self._refuse(400, "InvalidRequest", "upload_part_copy")
        self.cloud.copied += length_of(body)
        self._upload_of(UploadId, "upload_part_copy")["parts"][PartNumber] = body
        return {"CopyPartResult": {"ETag": f'"{self.cloud.etag(digest(body))}"'}}

    def _on_complete_multipart_upload(
        self, Key: str, UploadId: str, MultipartUpload: Any, **words: Any
    ) -> Any:
        upload = self._upload_of(UploadId, "complete_multipart_upload")
        self._ensure_condition(Key, words, "complete_multipart_upload")
        listed = MultipartUpload["Parts"]
        bodies = [upload["parts"][one["PartNumber"]] for one in listed]
        if any(length_of(body) < self.cloud.least_part for body in bodies[:-1]):
            raise self._refuse(400, "EntityTooSmall", "complete_multipart_upload")
        assert 1 <= len(bodies) <= 10_000
        joined = "".join(one["ETag"].strip('"') for one in listed)
        plain = hashlib.md5(bytes.fromhex(joined), usedforsecurity=False).hexdigest()
        etag = f"{self.cloud.etag(plain)}-{len(listed)}"
        body = tuple(piece for one in bodies for piece in one)
        words = {name: value for name, value in upload["words"].items() if name != "Metadata"}
        self.cloud.clock += 1
        self.cloud.objects[Key] = Object(
            body, etag, dict(upload["words"].get("Metadata", {})), words, self.cloud.clock
        )
        del self.cloud.uploads[UploadId]
        return {"ETag": f'"{etag}"'}

    def _on_abort_multipart_upload(self, Key: str, UploadId: str) -> Any:
        self._upload_of(UploadId, "abort_multipart_upload")
        del self.cloud.uploads[UploadId]
        return {}

    def _on_delete_object(self, Key: str, IfMatch: str = "") -> Any:
        if IfMatch and Key in self.cloud.objects:
            self._ensure_condition(Key, {"IfMatch": IfMatch}, "delete_object")
        self.cloud.objects.pop(Key, None)
        return {}


def refusal(status: int, code: str, method: str = "put_object") -> Exception:
    """Return the error that the client library raises for an answer of the server."""
    from botocore.exceptions import ClientError

    answer: Any = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = ClientError(answer, method)
    return error


def open_simulated(cloud: Cloud, url: str) -> SimulatedStore:
    """Return a store of the simulated bucket."""
    abilities = S3Store.abilities._replace(least_part=cloud.least_part)
    kind = type("SimulatedStore", (SimulatedStore,), {"cloud": cloud, "abilities": abilities})
    store: SimulatedStore = kind(url)
    return store


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """Return an empty bucket; a request that fails is sent again at once."""
    pytest.importorskip(
        "botocore", reason="botocore is not installed: pip install 'ckptfix[test-stores]'"
    )
    monkeypatch.setattr(stores, "PATIENCE", Patience(attempts=3, first_wait=0, longest_wait=0))
    return Cloud()


class KillAt:
    """Kill the process at the request ``at``: before it, or after it so that its answer is lost."""

    def __init__(self, at: int, *, is_after: bool) -> None:
        self.at, self.is_after = at, is_after
        self.seen = 0
        self.is_dead = False

    def __call__(self, method: str, key: str, is_after: bool) -> None:
        if self.is_dead:
            raise Killed
        if is_after == self.is_after:
            self.seen += 1
            if self.seen == self.at:
                self.is_dead = True
                raise Killed

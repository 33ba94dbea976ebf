"""In-toto statements about a checkpoint: its files, as OpenSSF Model Signing v1.0 has them, and its
tensors.

A statement of files is what the reference implementation (``model_signing``) signs. One of tensors
is ckptfix's own. Its digests are those of the manifest, over dtype, shape and bytes: they stay the
same in other shards and formats.

Nothing in a statement is trusted, signed or not: a path outside of the folder, a name that occurs
twice, or a value of the wrong type is refused, and nothing is compared then.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.manifest import joined
from ckptfix.diagnosis.contents import Contents, TensorLocation
from ckptfix.errors import OperationError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.paths import JOURNAL, SIGNED, UNSIGNED, is_inside
from ckptfix.tensors.hashing import ALGORITHMS, WHOLE, Hashed, Scheme
from ckptfix.tensors.stored import Contiguous, Format, StoredTensor, Weights
from ckptfix.wording import Brief, count_of, shortened

ALONE = "."
"""The path of a file that was signed alone, without its folder."""

_IN_TOTO = "https://in-toto.io/Statement/v1"
_FILES = "https://model_signing/signature/v1.0"
_OLD_FILES = "https://model_signing/Digests/v0.1"  # model_signing 0.2, whose signatures are in use
_TENSORS = "https://ckptfix/tensor-digests/v1"

_OF_GIT = (".git", ".gitattributes", ".github", ".gitignore")
"""Left out by the reference implementation unless it is told otherwise: listed, they would be
missing to it.
"""

_OTHER_WEIGHTS = frozenset({
    ".dill", ".gguf", ".h5", ".joblib", ".keras", ".msgpack", ".npz", ".onnx", ".ot", ".pb",
    ".pickle", ".pkl", ".tflite",
})  # fmt: skip
"""Suffixes of weights of other libraries, and of pickles, which can be any model, and run code."""

_BITS = 1 << 63
_SHOWN = 80
_HEX = re.compile(r"[0-9a-f]{64}")
_LONG_HEX = re.compile(r"[0-9a-f]{128}")

_Value = TypeVar("_Value")


class Shard(NamedTuple):
    """The digest of the bytes of a file from ``start`` to ``end``; ``end`` is None for the whole
    file.
    """

    start: int
    end: int | None
    digest: str


class FileStatement(Brief, Struct, frozen=True, kw_only=True):
    """The digests of the files of a folder. ``name``: of the folder, as a hint.

    ``files``: relative path -> digest, or the digests of all shards, joined. ``ignored``: relative
    paths that are left out, each with everything below it. ``follows_links``: whether a file may be
    a symbolic link. ``sizes``: of the files, where they are cut into shards.
    """

    name: str
    files: Mapping[str, str]
    scheme: Scheme = WHOLE
    ignored: tuple[str, ...] = ()
    follows_links: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the statement as ``model_signing`` makes it with one sha256 of each file, or of
        each shard.
        """
        size = self.scheme.shard_size
        algorithm = (
            self.scheme.algorithm if size is None else f"{self.scheme.algorithm}-sharded-{size}"
        )
        resources = [
            {"name": name, "algorithm": algorithm, "digest": digest}
            for name, digest in self._resources()
        ]
        serialization: dict[str, Any] = {
            "method": "files" if size is None else "shards",
            "hash_type": self.scheme.algorithm,
            **({} if size is None else {"shard_size": size}),
            "allow_symlinks": self.follows_links,
            "ignore_paths": list(self.ignored),
        }
        root = _root(one["digest"] for one in resources)
        return _to_bytes(
            self.name, root, _FILES, {"serialization": serialization, "resources": resources}
        )

    def _resources(self) -> Iterator[tuple[str, str]]:
        """Yield name and digest of all files or shards, in the order of the reference
        implementation.
        """
        size = self.scheme.shard_size
        for path in sorted(self.files, key=PurePosixPath):
            if size is None:
                yield path, self.files[path]
                continue
            starts = range(0, self.sizes[path], size)
            for start, digest in zip(starts, self.files[path].split("-"), strict=bool(starts)):
                yield f"{path}:{start}:{min(start + size, self.sizes[path])}", digest

    def leaves_out(self, path: str) -> bool:
        """Return whether a path is one of ``ignored``, or below one."""
        return any(path == one or path.startswith(f"{one}/") for one in self.ignored)


class TensorStatement(Brief, Struct, frozen=True, kw_only=True):
    """The digests of the tensors of a checkpoint. ``name``: of the folder, as a hint.

    ``models``: as they were, with no bytes to read. ``digests``: of each tensor by its first name.
    ``uncovered``: files of weights that were there and are not covered, such as those of a second
    format.
    """

    name: str
    models: tuple[Weights, ...]
    digests: Mapping[TensorLocation, str]
    uncovered: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the statement. Its subject is the same whatever files, names and order the tensors
        have.
        """
        predicate = {
            "serialization": {"method": "tensors", "hash_type": "sha256"},
            "models": [_model(weights, self.digests) for weights in self.models],
            "not_covered": list(self.uncovered),
        }
        return _to_bytes(self.name, self.root, _TENSORS, predicate)

    @property
    def root(self) -> str:
        """The digest over the digests of all tensors, each once and in order."""
        return _root(sorted(set(self.digests.values())))

    def by_name(self, weights: Weights) -> dict[str, str]:
        """Return the digests of one of ``models`` by every name that a tensor has."""
        return {
            name: self.digests[TensorLocation(weights.label, weights.ties.get(name, name))]
            for name in weights.named()
        }


Statement = FileStatement | TensorStatement


def statement_of_files(
    name: str, digests: Mapping[str, str], journals: Iterable[str], sizes: Mapping[str, int], *,
    follows_links: bool, shard_size: int | None = None,
) -> FileStatement:  # fmt: skip
    """Return the statement of a folder's files. ``journals``: folders of ckptfix's own below other
    folders.

    ``shard_size``: None for one digest of each file; otherwise an empty file has none, as no shard
    has a byte of it.

    Raises OperationError for a name that no JSON can hold.
    """
    ignored = (*_OF_GIT, JOURNAL, *journals, *SIGNED, *UNSIGNED)
    statement = FileStatement(name=name, files={}, ignored=ignored, follows_links=follows_links)
    files = {path: digest for path, digest in digests.items() if not statement.leaves_out(path)}
    for path in (name, *files, *ignored):
        if not is_inside(path) or not _is_unicode(path):
            raise OperationError(
                f"{path}: its name is not UTF-8, so no statement can list it; next: rename it"
            )
    if shard_size is None:
        return replace(statement, files=files)
    files = {path: digest for path, digest in files.items() if sizes[path]}
    return replace(
        statement,
        files=files,
        scheme=Scheme(shard_size=shard_size),
        sizes={path: sizes[path] for path in files},
    )


def statement_of_tensors(
    name: str, contents: Contents, hashed: Mapping[str | TensorLocation, Hashed]
) -> TensorStatement:
    """Return the statement of the tensors of all models."""
    found = contents.weights
    digests = {
        place: hashed[place].digest
        for weights in found
        for tensor in weights.tensors
        for place in (TensorLocation(weights.label, tensor.fqn),)
    }
    return TensorStatement(
        name=name, models=found, digests=digests, uncovered=uncovered_weights(contents)
    )


def uncovered_weights(contents: Contents) -> tuple[str, ...]:
    """Return the files of weights that are in none of the models, in order: a loader may take them
    all the same.
    """
    others = (
        name
        for name, path in zip(contents.files, map(PurePosixPath, contents.files), strict=True)
        if path.suffix.lower() in _OTHER_WEIGHTS and parse_file_name(path.name) is None
    )
    return tuple(
        sorted({*contents.beside(), *contents.unsupported.keys() & contents.files.keys(), *others})
    )


def parse_statement(data: bytes, where: str) -> Statement:
    """Return the statement that bytes hold. ``where``: the file, for messages.

    Raises OperationError for anything else than a sound statement of a kind that is known.
    """
    try:
        return _statement(_object(strict_json(data), "the statement"))
    except _Refused as why:
        raise OperationError(
            f"{where}: refused, and nothing was compared: {why}; next: get the file again from "
            "whoever made it"
        ) from None


def strict_json(data: bytes) -> Any:
    """Return the value of a JSON document in which no key occurs twice: readers take different ones
    of two.

    Raises ValueError, also for a document that is nested too deep.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise _Refused("it is nested too deeply") from None
    except _Refused:
        raise
    except ValueError as error:
        raise _Refused(f"it is not JSON: {str(error)[:_SHOWN]}") from None


class _Refused(ValueError):
    """The reason why a statement is refused."""


def _to_bytes(name: str, root: str, kind: str, predicate: Mapping[str, Any]) -> bytes:
    document = {
        "_type": _IN_TOTO,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": kind,
        "predicate": predicate,
    }
    # 100,000 tensors take 19 MB.
    return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def _root(digests: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _model(weights: Weights, digests: Mapping[TensorLocation, str]) -> dict[str, Any]:
    others: dict[str, list[str]] = {}
    for other, kept in weights.ties.items():
        others.setdefault(kept, []).append(other)
    return {
        "name": weights.label,
        "format": weights.format.value,
        "folder": str(weights.home),
        "index": weights.index,
        "path": list(weights.path),
        "files": list(map(str, weights.files)),
        "tensors": [
            {
                "names": [tensor.fqn, *others.get(tensor.fqn, ())],
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "digest": digests[TensorLocation(weights.label, tensor.fqn)],
            }
            for tensor in weights.tensors
        ],
        **({"not_covered": list(weights.opaque)} if weights.opaque else {}),
    }


# Everything below reads what somebody else wrote.


def _statement(document: dict[str, Any]) -> Statement:
    if (kind := _get(document, "_type", _text)) != _IN_TOTO:
        raise _Refused(f"its type is {_shown(kind)}, expected {_IN_TOTO}")
    kind = _get(document, "predicateType", _text)
    subjects = [_object(one, "a subject") for one in _get(document, "subject", _list)]
    if kind == _OLD_FILES:
        return _old_files(subjects)
    if kind not in (_FILES, _TENSORS):
        raise _Refused(f"its predicate type is {_shown(kind)}, expected {_FILES} or {_TENSORS}")
    if len(subjects) != 1:
        raise _Refused(f"it has {count_of(len(subjects), 'subject')}, expected 1")
    name = _get(subjects[0], "name", _text)
    root = _digest(_get(subjects[0], "digest", _object), "sha256", "sha256")
    predicate = _get(document, "predicate", _object)
    statement: Statement
    if kind == _TENSORS:
        tensors = _tensors(name, predicate)
        statement, found = tensors, tensors.root
    else:
        statement, found = _files(name, predicate)
    if found != root:
        raise _Refused(f"its subject has the digest {root[:12]}, but its entries give {found[:12]}")
    return statement


def _files(name: str, predicate: dict[str, Any]) -> tuple[FileStatement, str]:
    """Return the statement, and the digest over all digests in their order."""
    how = _get(predicate, "serialization", _object)
    method, algorithm = _get(how, "method", _text), _get(how, "hash_type", _text)
    if method not in ("files", "shards"):
        raise _Refused(f"its method is {_shown(method)}, expected files or shards")
    if algorithm not in ALGORITHMS:
        raise _Refused(f"its digests are {_shown(algorithm)}, expected {', '.join(ALGORITHMS)}")
    size = _get(how, "shard_size", _whole) if method == "shards" else None
    if size == 0:
        raise _Refused("its shard size is 0 bytes")
    scheme = Scheme(algorithm=algorithm, shard_size=size)
    called = algorithm if size is None else f"{algorithm}-sharded-{size}"
    found: dict[str, list[Shard]] = {}
    digests = []
    for one in _get(predicate, "resources", _list):
        resource = _object(one, "a resource")
        if (own := _get(resource, "algorithm", _text)) != called:
            raise _Refused(f"the algorithm of a digest is {_shown(own)}, expected {called}")
        path, shard = _resource(_get(resource, "name", _text), size)
        digest = _digest(resource, "digest", algorithm)
        digests.append(digest)
        found.setdefault(path, []).append(shard._replace(digest=digest))
    ignored = [
        _text(path, "a path of ignore_paths")
        for path in _get(how, "ignore_paths", _list, default=())
    ]
    statement = FileStatement(
        name=name,
        files={path: _whole_file(path, shards, size) for path, shards in found.items()},
        scheme=scheme,
        sizes=(
            {}
            if size is None
            else {path: max(one.end or 0 for one in shards) for path, shards in found.items()}
        ),
        ignored=tuple(filter(is_inside, ignored)),  # others leave out nothing, so more is compared
        follows_links=_get(how, "allow_symlinks", _flag, default=False),
    )
    return statement, _root(digests)


def _old_files(subjects: list[dict[str, Any]]) -> FileStatement:
    """Return the statement of model_signing 0.2, which has each file as a subject."""
    files: dict[str, str] = {}
    for subject in subjects:
        path, _ = _resource(_get(subject, "name", _text), None)
        if path in files:
            raise _Refused(f"the file {_shown(path)} is listed twice")
        files[path] = _digest(_get(subject, "digest", _object), "sha256", "sha256")
    return FileStatement(name="", files=files)


def _resource(name: str, shard_size: int | None) -> tuple[str, Shard]:
    shard = Shard(0, None, "")
    path = name
    if shard_size is not None:
        path, *ends = name.rsplit(":", 2)
        if len(ends) != 2 or not all(re.fullmatch("0|[1-9][0-9]{0,18}", end) for end in ends):
            raise _Refused(f"the shard {_shown(name)} is not of the form FILE:START:END")
        shard = Shard(int(ends[0]), int(ends[1]), "")
    if path != ALONE and not is_inside(path):
        raise _Refused(f"the path {_shown(path)} is outside the folder")
    return path, shard


def _whole_file(path: str, shards: list[Shard], size: int | None) -> str:
    """Return the digests of a file's shards as one. Raises _Refused unless they cover the file
    once.
    """
    if size is None:
        if len(shards) > 1:
            raise _Refused(f"the file {_shown(path)} is listed twice")
        return shards[0].digest
    at = 0
    ordered = sorted(shards)
    for number, (start, end, _) in enumerate(ordered, 1):
        assert end is not None
        is_sound = start == at < end and (
            end - start == size or (number == len(ordered) and end - start < size)
        )
        if not is_sound:
            raise _Refused(
                f"a shard of {_shown(path)} has bytes {start} to {end}, expected {at} to "
                f"{at + size}"
            )
        at = end
    return joined(shard.digest for shard in ordered)


def _tensors(name: str, predicate: dict[str, Any]) -> TensorStatement:
    how = _get(predicate, "serialization", _object)
    words = [_get(how, key, _text) for key in ("method", "hash_type")]
    if words != ["tensors", "sha256"]:
        raise _Refused(f"its digests are {_shown(' '.join(words))}, expected tensors sha256")
    models: dict[str, Weights] = {}
    digests: dict[TensorLocation, str] = {}
    for one in _get(predicate, "models", _list):
        weights, own = _weights(_object(one, "a model"))
        if weights.label in models:
            raise _Refused(f"the model {_shown(weights.label)} is listed twice")
        models[weights.label] = weights
        digests |= {TensorLocation(weights.label, fqn): digest for fqn, digest in own.items()}
    uncovered = [
        _text(path, "a path of not_covered")
        for path in _get(predicate, "not_covered", _list, default=())
    ]
    return TensorStatement(
        name=name, models=tuple(models.values()), digests=digests, uncovered=tuple(uncovered)
    )


def _weights(model: dict[str, Any]) -> tuple[Weights, dict[str, str]]:
    """Return a model without bytes, and its digests."""
    label = _get(model, "name", _text)
    kind = _get(model, "format", _text)
    if kind not in {one.value for one in Format}:
        raise _Refused(f"the format of {_shown(label)} is {_shown(kind)}, which is not supported")
    folder = _get(model, "folder", _text)
    files = [_text(one, "a file") for one in _get(model, "files", _list)]
    for path in (*files, *([folder] if folder != "." else [])):
        if not is_inside(path):
            raise _Refused(f"the path {_shown(path)} is outside the folder")
    tensors: list[StoredTensor] = []
    ties: dict[str, str] = {}
    digests: dict[str, str] = {}
    for value in _get(model, "tensors", _list):
        one = _object(value, "a tensor")
        names = [_text(fqn, "the name of a tensor") for fqn in _get(one, "names", _list)]
        if not names:
            raise _Refused(f"a tensor of {_shown(label)} has no name")
        for fqn in names:
            if fqn in digests or fqn in ties:
                raise _Refused(f"the tensor {_shown(fqn)} of {_shown(label)} is listed twice")
            ties[fqn] = names[0]
        del ties[names[0]]
        digests[names[0]] = _digest(one, "digest", "sha256")
        tensors.append(StoredTensor(names[0], *_dtype_and_shape(one), Contiguous(())))
    weights = Weights(
        label=label,
        format=Format(kind),
        index=_get(model, "index", _whole),
        files=tuple(map(PurePosixPath, files)),
        tensors=tuple(tensors),
        ties=ties,
        path=tuple(_text(key, "a key") for key in _get(model, "path", _list)),
        home=PurePosixPath(folder),
        opaque=tuple(
            _text(fqn, "a name of not_covered")
            for fqn in _get(model, "not_covered", _list, default=())
        ),
    )
    return weights, digests


def _dtype_and_shape(tensor: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype = _get(tensor, "dtype", _text)
    if dtype not in DTYPE_BITS:
        raise _Refused(f"{_shown(dtype)} is not a dtype of safetensors")
    shape = tuple(_whole(length, "a length") for length in _get(tensor, "shape", _list))
    if prod(shape) * DTYPE_BITS[dtype] >= _BITS:
        raise _Refused(f"a tensor of shape {_shown(list(shape))} is larger than any file")
    return dtype, shape


def _get(
    document: dict[str, Any], key: str, read: Callable[[Any, str], _Value], *, default: Any = None
) -> _Value:
    if key not in document and default is None:
        raise _Refused(f"{key} is missing")
    return read(document.get(key, default), key)


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise _Refused(f"{what} is {_shown(value)}, expected text")
    if not _is_unicode(value):
        raise _Refused(f"{what} is {_shown(value)}, which is not Unicode")
    return value


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: half a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _flag(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise _Refused(f"{what} is {_shown(value)}, expected true or false")
    return value


def _whole(value: Any, what: str) -> int:
    """Return a whole number. The reference implementation writes 1000000000.0, as its JSON knows no
    integers.
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < _BITS:
        raise _Refused(f"{what} is {_shown(value)}, expected a whole number")
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _Refused(f"{what} is {_shown(value)}, expected a list")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _Refused(f"{what} is {_shown(value)}, expected an object")
    return value


def _digest(document: dict[str, Any], key: str, algorithm: str) -> str:
    value = _get(document, key, _text)
    if not (_LONG_HEX if algorithm == "blake2b" else _HEX).fullmatch(value):
        raise _Refused(f"{_shown(value)} is not a {algorithm} digest")
    return value


def _shown(value: Any) -> str:
    """Return a value of a file as a message shows it: a text of a megabyte would fill the
    terminal.
    """
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple) and len(value) > _SHOWN:
        return "a list"
    return shortened(repr(value[: _SHOWN + 1] if isinstance(value, str) else value), _SHOWN)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {_shown(twice)} occurs twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise _Refused(f"{text} is not JSON")

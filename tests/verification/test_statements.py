"""Statements that somebody else wrote: what is not sound is refused with a reason, and nothing is
compared then.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix import OperationError, UsageError, seal, verify
from ckptfix.checkpoint.manifest import MAX_MANIFEST
from ckptfix.storage.paths import UNSIGNED
from ckptfix.verification.statements import (
    FileStatement,
    TensorStatement,
    parse_statement,
    strict_json,
)
from ckptfix.verification.verify_report import Outcome
from tests.sampling import examples
from tests.verification.sealed import KINDS, flip, wrong

DIGEST = hashlib.sha256(b"").hexdigest()
Document = dict[str, Any]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def rooted(document: Document) -> Document:
    """Return a statement of files with the subject that its resources give."""
    digests = [one["digest"] for one in document["predicate"]["resources"]]
    root = hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    return {**document, "subject": [{"name": "model", "digest": {"sha256": root}}]}


def files(*resources: tuple[str, str], **serialization: object) -> Document:
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, **serialization}
    algorithm = how["hash_type"]
    if how["method"] == "shards":
        algorithm = f"{algorithm}-sharded-{int(str(how['shard_size']).partition('.')[0])}"
    listed = [
        {"name": name, "algorithm": algorithm, "digest": digest} for name, digest in resources
    ]
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": how, "resources": listed},
    }
    return rooted(document)


def tensors() -> Document:
    document: Document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "model", "digest": {"sha256": hashlib.sha256(bytes.fromhex(DIGEST)).hexdigest()}}],
        "predicateType": "https://ckptfix/tensor-digests/v1",
        "predicate": {
            "serialization": {"method": "tensors", "hash_type": "sha256"},
            "models": [
                {
                    "name": "model.safetensors", "format": "safetensors", "folder": ".", "index": 0, "path": [],
                    "files": ["model.safetensors"],
                    "tensors": [{"names": ["a", "b"], "dtype": "F32", "shape": [2, 3], "digest": DIGEST}],
                }
            ],
        },
    }  # fmt: skip
    return document


def parsed(document: object) -> FileStatement | TensorStatement:
    return parse_statement(json.dumps(document).encode(), "model.sig")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for kind, make in KINDS.items():
        folder = tmp_path / kind
        folder.mkdir()
        make(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "a file").write_text("x")
        torch.save({"a": torch.ones(2), "b": 3.0}, folder / "sub" / "pytorch_model.bin")
        assert seal(folder, oms=True).status == 0
        for name in UNSIGNED:
            data = (folder / name).read_bytes()
            assert parse_statement(data, name).to_bytes() == data


def change(path: str, value: object) -> Callable[[Document], None]:
    """Return what puts a value at a path such as ``predicate/resources/0/name``; ``...`` removes
    what is there.
    """

    def apply(document: Any) -> None:
        *above, last = path.split("/")
        for key in above:
            document = document[int(key)] if key.isdigit() else document[key]
        if value is ...:
            del document[last]
        else:
            document[int(last) if last.isdigit() else last] = value

    return apply


RESOURCE, SERIALIZATION, MODEL = (
    "predicate/resources/0",
    "predicate/serialization",
    "predicate/models/0",
)
HOSTILE_FILES = [
    (f"{RESOURCE}/name", "../secret", "the path '../secret' is outside the folder"),
    (f"{RESOURCE}/name", "/etc/passwd", "the path '/etc/passwd' is outside the folder"),
    (f"{RESOURCE}/name", "a/../../b", "is outside the folder"),
    (f"{RESOURCE}/name", "a\0b", "is outside the folder"),
    (f"{RESOURCE}/name", "", "is outside the folder"),
    (f"{RESOURCE}/name", "\ud800", "which is not Unicode"),
    (f"{RESOURCE}/name", 5, "name is 5, expected text"),
    (f"{RESOURCE}/name", "b.bin", "the file 'b.bin' is listed twice"),
    (f"{RESOURCE}/digest", "0" * 63, "is not a sha256 digest"),
    (f"{RESOURCE}/digest", "z" * 64, "is not a sha256 digest"),
    (f"{RESOURCE}/digest", ["0"], "expected text"),
    (f"{RESOURCE}/digest", "1" * 64, "its subject has the digest"),
    (f"{RESOURCE}/algorithm", "md5", "the algorithm of a digest is 'md5', expected sha256"),
    (f"{RESOURCE}/algorithm", ..., "algorithm is missing"),
    (RESOURCE, "a.bin", "a resource is 'a.bin', expected an object"),
    ("predicate/resources", {}, "resources is an object, expected a list"),
    (f"{SERIALIZATION}/method", "merkle", "its method is 'merkle', expected files or shards"),
    (f"{SERIALIZATION}/hash_type", "md5", "its digests are 'md5', expected sha256, blake2b, blake3"),
    (f"{SERIALIZATION}/allow_symlinks", "yes", "expected true or false"),
    (f"{SERIALIZATION}/ignore_paths", [7], "a path of ignore_paths is 7, expected text"),
    ("predicate", None, "predicate is None, expected an object"),
    ("subject", [], "it has 0 subjects, expected 1"),
    ("subject/0/digest", {"sha512": DIGEST}, "sha256 is missing"),
    ("predicateType", "https://slsa.dev/provenance/v1", "its predicate type is 'https://slsa.dev/provenance/v1'"),
    ("_type", "https://in-toto.io/Statement/v0.1", "its type is"),
    ("_type", "x" * 1000, f"its type is '{'x' * 79}..."),
]  # fmt: skip
HOSTILE_TENSORS = [
    (
        f"{MODEL}/tensors/0/names",
        ["a", "a"],
        "the tensor 'a' of 'model.safetensors' is listed twice",
    ),
    (f"{MODEL}/tensors/0/names", [], "has no name"),
    (f"{MODEL}/tensors/0/names", [1], "the name of a tensor is 1, expected text"),
    (f"{MODEL}/tensors/0/dtype", "F31", "'F31' is not a dtype of safetensors"),
    (f"{MODEL}/tensors/0/shape", [-1], "a length is -1, expected a whole number"),
    (f"{MODEL}/tensors/0/shape", [1.5], "a length is 1.5, expected a whole number"),
    (f"{MODEL}/tensors/0/shape", [True], "a length is True, expected a whole number"),
    (f"{MODEL}/tensors/0/shape", [1 << 62, 1 << 62], "is larger than any file"),
    (f"{MODEL}/tensors/0/shape", [10**400], "expected a whole number"),
    (f"{MODEL}/files", ["../x"], "the path '../x' is outside the folder"),
    (f"{MODEL}/folder", "..", "the path '..' is outside the folder"),
    (f"{MODEL}/format", "gguf", "is 'gguf', which is not supported"),
    (f"{MODEL}/index", -1, "index is -1, expected a whole number"),
    (f"{MODEL}/tensors", None, "tensors is None, expected a list"),
    ("predicate/serialization/hash_type", "md5", "its digests are 'tensors md5'"),
]


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE_FILES)
def test_a_statement_of_files_that_is_not_sound(path: str, value: object, words: str) -> None:
    document = files(("a.bin", DIGEST), ("b.bin", DIGEST))
    parsed(document)
    change(path, value)(document)
    with pytest.raises(OperationError) as raised:
        parsed(document)
    said = str(raised.value)
    assert said.startswith("model.sig: refused, and nothing was compared: ")
    assert words in said
    assert len(said) < 500


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE_TENSORS)
def test_a_statement_of_tensors_that_is_not_sound(path: str, value: object, words: str) -> None:
    document = tensors()
    parsed(document)
    change(path, value)(document)
    with pytest.raises(OperationError) as raised:
        parsed(document)
    assert words in str(raised.value)


def test_a_model_or_a_tensor_that_is_listed_twice() -> None:
    document = tensors()
    document["predicate"]["models"] *= 2
    with pytest.raises(OperationError, match=r"the model 'model.safetensors' is listed twice"):
        parsed(document)
    document = tensors()
    document["predicate"]["models"][0]["tensors"] *= 2
    with pytest.raises(OperationError, match="the tensor 'a' of"):
        parsed(document)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"_type": "x", "_type": "y"}', "the key '_type' occurs twice in one object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b"[]", "the statement is [], expected an object"),
        (b"{}", "_type is missing"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it is not JSON"),
    ],
)
def test_bytes_that_are_not_a_statement(data: bytes, words: str) -> None:
    with pytest.raises(OperationError) as raised:
        parse_statement(data, "model.sig")
    assert words in str(raised.value)


SHARDS = [
    ([], ""),
    ([("a:0:10", 1)], ""),
    ([("a:0:10", 1), ("a:10:17", 2)], ""),
    ([("a:10:17", 2), ("a:0:10", 1)], ""),
    ([("a:b:0:10", 1)], ""),
    ([("a:0:11", 1)], "a shard of 'a' has bytes 0 to 11, expected 0 to 10"),
    ([("a:1:10", 1)], "a shard of 'a' has bytes 1 to 10, expected 0 to 10"),
    ([("a:0:10", 1), ("a:0:10", 1)], "a shard of 'a' has bytes 0 to 10, expected 10 to 20"),
    ([("a:0:5", 1), ("a:5:10", 1)], "a shard of 'a' has bytes 0 to 5, expected 0 to 10"),
    ([("a:0:0", 1)], "a shard of 'a' has bytes 0 to 0"),
    ([("a:0:10", 1), ("a:20:30", 1)], "a shard of 'a' has bytes 20 to 30, expected 10 to 20"),
    ([("a:-1:10", 1)], "is not of the form FILE:START:END"),
    ([("a:0:1e9", 1)], "is not of the form FILE:START:END"),
    ([("a", 1)], "is not of the form FILE:START:END"),
    ([("../a:0:10", 1)], "is outside the folder"),
    ([("a:0:" + "9" * 30, 1)], "is not of the form FILE:START:END"),
]


@pytest.mark.parametrize(("names", "words"), SHARDS)
@pytest.mark.parametrize("size", [10, 10.0])
def test_shards(names: list[tuple[str, int]], words: str, size: float) -> None:
    document = files(
        *((name, f"{number:064x}") for name, number in names), method="shards", shard_size=size
    )
    if words:
        with pytest.raises(OperationError) as raised:
            parsed(document)
        assert words in str(raised.value)
        return
    statement = parsed(document)
    assert isinstance(statement, FileStatement)
    assert statement.scheme.shard_size == 10
    numbers = [f"{number:064x}" for _, number in sorted(names)]
    assert list(statement.files.values()) == (["-".join(numbers)] if names else [])


@pytest.mark.parametrize("size", [0, -1, 1.5, "10", None, 1e30])
def test_shards_of_an_impossible_size(size: object) -> None:
    document = files(("a:0:10", DIGEST), method="shards", shard_size=10)
    document["predicate"]["serialization"]["shard_size"] = size
    with pytest.raises(OperationError, match="refused"):
        parsed(document)


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from([tensors(), files(("a", DIGEST), ("b/c", DIGEST))]))
    document = copy.deepcopy(document)
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    with suppress(OperationError):
        assert parsed(document).to_bytes()


@given(st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(OperationError):
        parse_statement(data, "x")


@given(JSON)
def test_sound_json_is_read_as_it_is(value: object) -> None:
    assert strict_json(json.dumps(value).encode()) == json.loads(json.dumps(value))


def stated(folder: Path, document: object) -> Path:
    path = folder.with_name("statement.json")
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
@pytest.mark.parametrize("size", [None, 500])
def test_a_folder_is_compared_by_every_kind_of_digest(
    tmp_path: Path, algorithm: str, size: int | None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["sharded"](folder)
    (folder / "empty").write_bytes(b"")
    resources = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if size is None:
            resources.append((path.name, hashlib.new(algorithm, data).hexdigest()))
            continue
        for start in range(0, len(data), size):
            part = data[start : start + size]
            name = f"{path.name}:{start}:{start + len(part)}"
            resources.append((name, hashlib.new(algorithm, part).hexdigest()))
    how = {"method": "files"} if size is None else {"method": "shards", "shard_size": size}
    statement = stated(folder, files(*resources, hash_type=algorithm, **how))
    report = verify(folder, statements=[statement])
    assert report.status == 0, str(report)
    assert sum(item.outcome is Outcome.MATCH for item in report.items) == 4 - (size is not None)
    if size is not None:
        assert "empty: empty and not covered by" in str(report)
    name = "model-00002-of-00002.safetensors"
    for at in range(0, (folder / name).stat().st_size, 497):
        flip(folder / name, at)
        report = verify(folder, statements=[statement])
        assert report.status == 1
        assert wrong(report)[name][0] == "changed"
        flip(folder / name, at)
    os.truncate(folder / name, 1000)
    assert verify(folder, statements=[statement]).status == 1


def test_the_old_statements_of_model_signing_0_2_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "model.safetensors", "digest": {"sha256": digest}}],
        "predicateType": "https://model_signing/Digests/v0.1",
    }
    assert verify(folder, statements=[stated(folder, document)]).status == 0
    document["subject"] = [*document["subject"], *document["subject"]]
    with pytest.raises(OperationError, match="is listed twice"):
        verify(folder, statements=[stated(folder, document)])


def test_an_ignored_path_leaves_out_no_file_that_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    for ignored in ([".", "/", "..", ""], ["model.safetensors"], ["model"]):
        statement = stated(folder, files(("model.safetensors", digest), ignore_paths=ignored))
        assert verify(folder, statements=[statement]).status == 0
        flip(folder / "model.safetensors", 300)
        assert verify(folder, statements=[statement]).status == 1
        flip(folder / "model.safetensors", 300)
        (folder / "model2.py").write_text("")
        assert verify(folder, statements=[statement]).status == 1, (
            "a name that only begins like an ignored one"
        )
        (folder / "model2.py").unlink()


def test_a_file_that_was_signed_alone(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    path = tmp_path / "model.safetensors"
    statement = stated(tmp_path / "x", files((".", hashlib.sha256(path.read_bytes()).hexdigest())))
    assert verify(path, statements=[statement]).status == 0
    with pytest.raises(UsageError, match="is about a single file; name that file instead of"):
        verify(tmp_path, statements=[statement])
    flip(path, 300)
    assert verify(path, statements=[statement]).status == 1


def test_files_of_ckptfix_itself_that_another_tool_signed_are_compared(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    assert seal(folder).status == 0
    names = ["model.safetensors", ".ckptfix/manifest.json"]
    resources = [(name, hashlib.sha256((folder / name).read_bytes()).hexdigest()) for name in names]
    statement = stated(folder, files(*resources))
    assert verify(folder, statements=[statement]).status == 0
    (folder / ".ckptfix" / "more").write_text("")
    assert wrong(verify(folder, statements=[statement])) == {".ckptfix/more": ("extra", None)}
    (folder / names[1]).write_text("{}")
    assert wrong(verify(folder, statements=[statement]))[names[1]][0] == "changed"
    assert verify(folder / names[0], statements=[statement]).status == 0


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    path = tmp_path / "large.json"
    path.touch()
    os.truncate(path, MAX_MANIFEST + 1)
    for options in ({"statements": [path]}, {"sha256sums": [path]}):
        with pytest.raises(OperationError, match=f"limit {MAX_MANIFEST}"):
            verify(tmp_path, **options)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a named pipe"):
        verify(tmp_path, statements=[tmp_path / "pipe"])


def test_words_of_a_statement_cannot_move_the_cursor(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    report = verify(folder, statements=[stated(folder, files(("a\x1b[2Jb", DIGEST)))])
    assert "\x1b" not in str(report)
    assert "a\\x1b[2Jb: missing" in str(report)

"""The keys of every verb's JSON, in their order: scripts of users read them, and no refactoring may
change one.
"""

import json
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import pytest

from ckptfix.cli import run
from ckptfix.reports import Serialized, plain

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOUBLED = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
FINDING = ["code", "severity", "action", "message", "advice", "path"]
ITEM = ["kind", "name", "file", "outcome", "change", "message", "other"]

CHECKPOINT = [
    "path", "status", "verdict", "counts", "understood", "components", "sharded", "deepspeed",
    "findings", "not_checked", "unfinished",
]  # fmt: skip
COUNTS = ["files", "tensors", "bytes", "errors", "warnings", "notes", "not_checked"]
UNDERSTOOD = ["models", "optimizers", "processes", "processes_may_be_more", "problems"]
MODEL = ["path", "is_model", "files", "unread", "tensors", "bytes", "dtypes"]
OPTIMIZER = ["path", "class", "parameters", "states"]
REPAIR = [
    "path", "status", "dry_run", "output", "recovered", "transaction", "found", "steps",
    "unplanned", "left", "not_checked", "advice",
]  # fmt: skip
SEAL = [
    "path", "status", "written", "manifest", "files", "tensors", "ranges", "bytes", "findings",
    "differing", "unreadable", "special", "transaction", "statements", "signed_by",
]  # fmt: skip
VERIFY = [
    "path", "status", "sealed", "verified", "no_digest", "findings", "items", "crossed", "values",
    "not_checked", "unfinished", "statements", "notes",
]  # fmt: skip
SHARE = ["path", "share", "units", "resumed", "bytes", "unread", "status"]
SCRUB = [
    "path", "status", "verdict", "looked", "kept", "findings", "differences", "unfinished",
    "not_checked", "data",
]  # fmt: skip
SCRUB_DATA = [
    "files",
    "bytes",
    "read",
    "read_bytes",
    "before",
    "never",
    "due",
    "stopped",
    "oldest",
]
UNDO = ["path", "status", "transaction", "steps", "remaining", "recovered", "unproven"]
MIGRATE = [
    "path", "status", "output", "to", "dry_run", "verified", "bytes", "models", "carried",
    "left_out", "rewritten", "warnings", "removed", "not_checked", "state", "processes",
    "optimizers",
]  # fmt: skip
SALVAGE = [
    "source", "output", "saved", "copied", "lost", "doubtful", "damaged", "left_out", "notes",
    "next", "not_checked", "status",
]  # fmt: skip
DIFF = [
    "a", "b", "tolerance", "verdict", "summary", "models", "optimizers", "crossed", "one_sided",
    "notes", "not_compared", "status",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DOUBLED, tmp_path / "checkpoint"))


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    run([*map(str, arguments), "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document.pop("version") == 2
    return document


@pytest.mark.slow
def test_the_keys_of_every_verb_stay(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = asked(capsys, "check", folder)
    assert list(checked) == ["checkpoints", "status"]
    (checkpoint,) = checked["checkpoints"]
    assert list(checkpoint) == CHECKPOINT
    assert list(checkpoint["counts"]) == COUNTS
    understood = checkpoint["understood"]
    assert list(understood) == UNDERSTOOD
    assert (list(understood["models"][0]), list(understood["optimizers"][0])) == (MODEL, OPTIMIZER)
    assert all(list(one)[: len(FINDING)] == FINDING for one in checkpoint["findings"])
    assert list(checkpoint["components"][0]) == [
        "path",
        "role",
        "index",
        "rank",
        "bytes",
        "tensors",
    ]
    assert checkpoint["findings"][0]["path"] == "model_1.safetensors"

    planned = asked(capsys, "repair", folder, "--dry-run")
    assert list(planned) == [*REPAIR[:3], "digest", *REPAIR[3:]]
    repaired = asked(capsys, "repair", folder)
    assert list(repaired) == REPAIR
    assert list(repaired["steps"][0]) == ["action", "message", "fixes", "safety", "files"]
    assert list(asked(capsys, "undo", folder)) == UNDO
    assert list(asked(capsys, "seal", folder, "--force")) == SEAL
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    verified = asked(capsys, "verify", folder)
    assert list(verified) == VERIFY
    assert all(list(one) == ITEM for one in verified["items"])
    scrubbed = asked(capsys, "scrub", folder, "--state", tmp_path / "state.sqlite")
    assert list(scrubbed) == ["checkpoints", "summary", "status"]
    (checkpoint,) = scrubbed["checkpoints"]
    assert list(checkpoint) == SCRUB
    assert list(checkpoint["data"]) == list(scrubbed["summary"]["data"]) == SCRUB_DATA
    assert list(scrubbed["summary"]) == [
        "checkpoints", "damaged", "kept", "unknown", "gone", "without_digests", "complete",
        "subset", "since", "data",
    ]  # fmt: skip
    assert asked(capsys, "seal", folder, "--force", "--oms")["statements"] == [
        "model.oms.json",
        "tensors.oms.json",
    ]
    (statement,) = asked(capsys, "verify", folder, "--oms", folder / "tensors.oms.json")[
        "statements"
    ]
    assert list(statement) == ["file", "kind", "signed", "verified", "signer", "problem", "notes"]
    assert (
        list(asked(capsys, "migrate", DOUBLED, tmp_path / "new", "--to", "bin", "--allow-damage"))
        == MIGRATE
    )
    uploaded = asked(capsys, "upload", DOUBLED, f"memory://{tmp_path.name}/checkpoint")
    assert list(uploaded) == ["path", "url", "files", "bytes", "status"]
    salvaged = asked(
        capsys,
        "salvage",
        FIXTURES / "golden" / "truncated-file" / "checkpoint",
        tmp_path / "saved",
    )
    assert list(salvaged) == SALVAGE
    assert list(salvaged["saved"][0]) == ["path", "source", "bytes", "tensors"]
    assert list(salvaged["lost"][0]) == ["file", "name", "reason", "need", "have"]
    compared = asked(capsys, "diff", weights, DOUBLED / "model.safetensors")
    assert list(compared) == DIFF
    assert list(compared["models"][0]) == ["index", "a", "b", "names", "tensors"]
    assert list(asked(capsys, "doctor")) == ["advice", "not_checked", "environment", "status"]


class Kind(Enum):
    ONE = "one"


class Pair(NamedTuple):
    left: PurePosixPath
    right: int | None


class Part(Serialized):
    json_keys: ClassVar = "word=upper"

    def upper(self) -> str:
        return "WORD"

    def as_json(self, at: str = "") -> dict[str, Any]:
        return {**Serialized.as_json(self, at), "at": at}


class Whole(Serialized):
    json_keys: ClassVar = "kind pairs=many part numbers=by_path"

    path = Path("folder")
    kind = Kind.ONE
    many = (Pair(PurePosixPath("a/b"), 1), Pair(PurePosixPath("c"), None))
    part = Part()
    by_path: ClassVar[Mapping[PurePosixPath, float]] = {PurePosixPath("x"): 0.5}


def test_a_value_becomes_json_with_all_that_is_in_it() -> None:
    assert Whole().as_json() == {
        "kind": "one",
        "pairs": [{"left": "a/b", "right": 1}, {"left": "c", "right": None}],
        "part": {"word": "WORD", "at": "folder"},
        "numbers": {"x": 0.5},
    }
    with pytest.raises(TypeError, match="set is not a JSON value"):
        plain({1})


def test_a_share_and_what_ends_its_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"
    folder = Path(shutil.copytree(clean, tmp_path / "checkpoint"))
    assert list(asked(capsys, "seal", folder, "--shard", "0/1")) == SHARE
    assert list(asked(capsys, "seal", folder)) == SEAL

"""A statement of tensors stays true through repairs and migrations, and finds every flipped bit
after each of them.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptfix import (
    Keys,
    OperationError,
    Policy,
    UsageError,
    VerifyReport,
    check,
    migrate,
    repair,
    seal,
    undo,
    verify,
)
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.paths import MANIFEST, UNSIGNED
from ckptfix.storage.reading import Piece
from ckptfix.tensors.hashing import hash_all
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import Contiguous, Strided, Tiled
from ckptfix.verification.statements import FileStatement, TensorStatement, parse_statement
from ckptfix.verification.verify_report import Change, Kind, Outcome
from tests.sampling import is_exhaustive, sampled
from tests.storage.crash import Fault, points, strike
from tests.storage.folders import recover
from tests.stores.servers import upload_folder
from tests.verification.sealed import KINDS, flip, place, state, wrong

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
FILES, TENSORS = UNSIGNED


def of_fixture(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(
        shutil.copytree(FIXTURES / name / "checkpoint", folder, dirs_exist_ok=True)
    )


SOURCES: dict[str, Callable[[Path], Path]] = {
    **KINDS,
    "second prepare": of_fixture("wrapper-safetensors"),
    "student and teacher": of_fixture("student-teacher-wrapper-bin"),
    "nested": of_fixture("lone-nested-safetensors"),
    "nested zip": of_fixture("lone-nested-train"),
    "nested legacy": of_fixture("lone-nested-legacy"),
    "nested shards": of_fixture("sharded-gpt2-nested"),
}


def repaired(folder: Path, **options: Any) -> Path:
    repair(folder, policy=Policy(**options))
    return folder


def migrated(folder: Path, to: str, **options: Any) -> Path:
    new = folder.with_name(f"{folder.name} as {to}")
    migrate(folder, new, to=to, allow_damage=True, **options)
    return new


CHANGES: dict[str, Callable[[Path], Path]] = {
    "nothing": lambda folder: folder,
    "repair": repaired,
    "new files": lambda folder: repaired(folder, atomic=True),
    "rename": lambda folder: repaired(folder, keys=Keys.BARE),
    "reshard": lambda folder: migrated(folder, "safetensors", max_shard_size=3000),
    "reshard a save": lambda folder: migrated(folder, "dcp", max_shard_size=3000),
    "safetensors": lambda folder: migrated(folder, "safetensors"),
    "bin": lambda folder: migrated(folder, "bin"),
    "dcp": lambda folder: migrated(folder, "dcp"),
    "rename and dcp": lambda folder: migrated(repaired(folder, keys=Keys.BARE), "dcp", keys="ddp"),
    "there and back": lambda folder: migrated(migrated(folder, "dcp"), "safetensors"),
}


def stated(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Make a checkpoint with statements, and return the folder."""
    folder.mkdir()
    make(folder)
    assert seal(folder, force=True, oms=True).status == 0
    return folder


def compared(folder: Path, statement: Path) -> VerifyReport:
    return verify(folder, statements=[statement])


def differing(report: VerifyReport) -> set[str]:
    return {item.name for item in report.items if item.outcome is Outcome.DIFFER}


def pieces(layout: object) -> list[Piece]:
    if isinstance(layout, Tiled):
        return [piece for tile in layout.tiles for piece in pieces(tile.layout)]
    if isinstance(layout, Strided):
        start = layout.storage.offset + layout.first * layout.width
        return [Piece(layout.storage.path, start, layout.width)]
    assert isinstance(layout, Contiguous)
    return [piece for piece in layout.pieces if piece.length]


CASES = [
    (source, change)
    for source in SOURCES
    for change in CHANGES  # load_state reads one file a model, so that only DCP is cut for it
    if not (change == "reshard" and source in ("second prepare", "student and teacher"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "change"), CASES)
def test_the_tensors_are_those_that_were_stated_and_a_flipped_bit_is_found(
    tmp_path: Path, source: str, change: str
) -> None:
    folder = stated(tmp_path / "c", SOURCES[source])
    statement = tmp_path / TENSORS
    shutil.move(folder / TENSORS, statement)
    folder = CHANGES[change](folder)
    report = compared(folder, statement)
    assert differing(report) == set(), str(report)
    assert report.status == int(any(one.severity is not Severity.NOTE for one in report.findings))
    count = report.count(Kind.TENSOR)
    assert count[Outcome.MATCH] > 0
    assert count[Outcome.NOT_CHECKED] == 0
    tensors = [tensor for one in open_checkpoint(folder).weights for tensor in one.tensors]
    assert count[Outcome.MATCH] >= len(tensors)
    for number, tensor in enumerate(sampled(tensors)):
        parts = pieces(tensor.layout)
        for piece in {parts[0], parts[-1]} if parts else ():
            ends = [piece.offset, piece.offset + piece.length - 1]
            for at in ends if is_exhaustive() else ends[number % 2 :: 2]:
                flip(piece.path, at)
                report = compared(folder, statement)
                assert report.status == 1, tensor.fqn
                assert tensor.fqn in differing(report)
                flip(piece.path, at)
    assert differing(compared(folder, statement)) == set()


def test_a_second_prepare_is_compared_once_after_its_copy_went(tmp_path: Path) -> None:
    folder = stated(tmp_path / "c", SOURCES["second prepare"])
    statement = folder / TENSORS
    assert len(verify(folder, statements=[statement]).items) > 8
    repaired(folder)
    report = verify(folder, statements=[statement])
    assert report.status == 0
    assert (
        "model_1.safetensors: duplicate of model.safetensors in the statement (4 tensors)"
        in str(report)
    )
    undo(folder)
    assert differing(verify(folder, statements=[statement, folder / FILES])) == set()


def test_a_copy_that_was_not_signed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    of_fixture("wrapper-safetensors")(folder)
    repaired(folder)
    assert seal(folder, oms=True).status == 0
    shutil.copy(folder / TENSORS, tmp_path / TENSORS)
    undo(folder)  # the seal
    undo(folder)  # the repair
    report = compared(folder, tmp_path / TENSORS)
    assert report.status == 1
    assert {item.change for item in report.items if item.outcome is Outcome.DIFFER} == {
        Change.EXTRA
    }
    assert f"is not in {tmp_path / TENSORS}" in str(report)


def test_weights_in_another_file_are_a_difference_unless_they_were_there(tmp_path: Path) -> None:
    folder = stated(tmp_path / "c", KINDS["safetensors"])
    torch.save(state(), folder / "pytorch_model.bin")
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert wrong(report)["pytorch_model.bin"][0] == "extra"
    assert f"pytorch_model.bin: may hold weights and is not covered by {folder / TENSORS}" in str(
        report
    )
    assert seal(folder, force=True, oms=True).status == 0
    report = compared(folder, folder / TENSORS)
    assert "pytorch_model.bin" not in differing(report)
    assert (
        "not checked: pytorch_model.bin: may hold weights and is not covered by "
        f"{folder / TENSORS}" in str(report)
    )


@pytest.mark.parametrize("name", ["tf_model.h5", "sub/model.onnx", "model.GGUF", "model.pkl"])
def test_weights_of_a_kind_that_is_not_read_and_pickles_are_a_difference_too(
    folder: Path, name: str
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert differing(report) == {name}
    assert f"{name}: may hold weights and is not covered by {folder / TENSORS}" in str(report)
    assert seal(folder, oms=True).status == 0
    assert compared(folder, folder / TENSORS).status == 0
    (folder / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"a": 1}))
    assert differing(compared(folder, folder / TENSORS)) == set(), (
        "a state, which no statement of tensors is about"
    )


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stated(tmp_path / "c", KINDS["safetensors"])


def test_missing_additional_changed_and_renamed_tensors_are_named(folder: Path) -> None:
    one, two, three, four = state().values()
    saved(
        folder,
        {"layers.0.weight": two, "layers.1.weight": one, "other.weight": three, "more": four + 1},
    )
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert {name: change for name, (change, _) in wrong(report).items() if name not in (FILES, TENSORS)} == {
        "layers.0.weight": "swapped", "layers.1.weight": "swapped", "layers.2.weight": "renamed",
        "layers.3.weight": "missing", "more": "extra", "model.safetensors": "extra",
    }  # fmt: skip


def test_the_same_bytes_in_another_shape_or_dtype_are_another_tensor(folder: Path) -> None:
    tensors = state()
    saved(folder, {**tensors, "layers.1.weight": tensors["layers.1.weight"].reshape(24, 16)})
    assert wrong(compared(folder, folder / TENSORS))["layers.1.weight"][0] == "changed"
    saved(folder, {**tensors, "layers.1.weight": tensors["layers.1.weight"].view(torch.int32)})
    assert wrong(compared(folder, folder / TENSORS))["layers.1.weight"][0] == "changed"


def test_a_value_that_is_not_a_plain_tensor_is_a_difference_unless_it_was_there(
    tmp_path: Path,
) -> None:
    folder, path = tmp_path / "c", tmp_path / "c" / "pytorch_model.bin"
    folder.mkdir()
    extra = {"layers.0.extra": torch.eye(3).to_sparse()}
    torch.save(state(), path)
    assert seal(folder, oms=True).status == 0
    torch.save({**state(), **extra, "scale": 3.0}, path)
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert differing(report) == {"layers.0.extra", "scale"}
    assert (
        f"'scale' is not in {folder / TENSORS} and cannot be compared: it is not a plain tensor"
        in str(report)
    )
    assert seal(folder, force=True, oms=True).status == 0
    assert compared(folder, folder / TENSORS).status == 0
    wrapped = {f"module.{name}": value for name, value in {**state(), **extra}.items()}
    torch.save(wrapped, path)
    assert differing(compared(folder, folder / TENSORS)) == set(), (
        "the wrapper does not count, and neither does a loss"
    )


class _Hiding:
    """A dict of tensors, one of which is only in the dict that it is made from."""

    def __reduce__(self) -> Any:
        return OrderedDict, ({"layers.0.extra": torch.ones(2)},), None, None, iter(state().items())


@pytest.mark.parametrize("place", ["pytorch_model.bin", "optimizer.bin"])
def test_tensors_cannot_hide_in_what_a_dict_is_made_from(tmp_path: Path, place: str) -> None:
    folder = stated(tmp_path / "c", KINDS["bin"])
    value = _Hiding() if place == "pytorch_model.bin" else {"state": _Hiding(), "param_groups": []}
    torch.save(value, folder / place)
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert (
        f"{place} is malformed: an OrderedDict is made from something other than a list of pairs"
        in str(report)
    )


def exchange(folder: Path, one: str, other: str) -> None:
    (folder / one).rename(folder / "x")
    (folder / other).rename(folder / one)
    (folder / "x").rename(folder / other)


def assert_crossed(folder: Path) -> None:
    report = compared(folder, folder / TENSORS)
    assert report.status == 1
    assert "a load would mix up the models" in report.crossed


def test_models_in_each_others_place_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for name, seed in (("model.safetensors", 0), ("model_1.safetensors", 1)):
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"w{seed}": torch.randn(8, 8, generator=generator)}
        save_file(tensors, folder / name, {"format": "pt"})
    assert seal(folder, force=True, oms=True).status == 0
    assert compared(folder, folder / TENSORS).status == 0
    exchange(folder, "model.safetensors", "model_1.safetensors")
    assert_crossed(folder)


def test_models_in_the_folders_of_each_other_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for number, name in enumerate(("text_encoder", "text_encoder_2", "unet")):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        saved(folder / name, {key: tensor + number for key, tensor in state().items()})
    (folder / "model_index.json").write_text("{}")
    assert seal(folder, oms=True).status == 0
    assert compared(folder, folder / TENSORS).status == 0
    (folder / "unet").rename(folder / "transformer")
    assert compared(folder, folder / TENSORS).status == 0, "files do not count"
    exchange(folder, "text_encoder", "text_encoder_2")
    assert_crossed(folder)


def test_models_in_each_others_place_in_training_dicts_are_named(tmp_path: Path) -> None:
    one, other = state(), {name: tensor + 1 for name, tensor in state().items()}

    def made(first: dict[str, Any], second: dict[str, Any]) -> None:
        torch.save(first, tmp_path / "first.pt")
        torch.save(second, tmp_path / "second.pt")

    made({"model": one, "ema": other}, {"model": other})
    assert seal(tmp_path, oms=True).status == 0
    assert compared(tmp_path, tmp_path / TENSORS).status == 0
    for first, second in (
        ({"model": other, "ema": one}, {"model": other}),
        ({"model": other, "ema": other}, {"model": one}),
    ):
        made(first, second)
        report = compared(tmp_path, tmp_path / TENSORS)
        assert report.status == 1
        assert "a load would mix up the models" in report.crossed
    made({"ema": other, "net": one}, {"model": other})
    assert compared(tmp_path, tmp_path / TENSORS).status == 0, "labels do not count"


def test_a_tied_tensor_may_lose_a_name_and_get_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    weight = torch.randn(4, 4)
    torch.save({"a": weight, "b": weight, "c": torch.ones(3)}, folder / "pytorch_model.bin")
    assert seal(folder, oms=True).status == 0
    statement = folder / TENSORS
    parsed = parse_statement(statement.read_bytes(), "")
    assert isinstance(parsed, TensorStatement)
    assert dict(parsed.models[0].ties) == {"b": "a"}
    torch.save({"a": weight, "c": torch.ones(3)}, folder / "pytorch_model.bin")
    assert compared(folder, statement).status == 0
    torch.save({"a": weight, "b": weight.clone(), "c": torch.ones(3)}, folder / "pytorch_model.bin")
    assert compared(folder, statement).status == 0
    torch.save({"a": weight, "b": weight + 1, "c": torch.ones(3)}, folder / "pytorch_model.bin")
    assert wrong(compared(folder, statement))["b"][0] == "changed"
    torch.save({"c": torch.ones(3)}, folder / "pytorch_model.bin")
    assert wrong(compared(folder, statement))["a"][0] == "missing"
    torch.save({"a": weight, "also a": weight, "c": torch.ones(3)}, folder / "pytorch_model.bin")
    report = compared(folder, statement)
    assert report.status == 0, "another name of bytes that are compared"
    assert (
        "note: pytorch_model.bin: the statement lists these tensors only under other keys: "
        "'also a'" in str(report)
    )
    torch.save(
        {"a": weight, "also a": weight.clone(), "c": torch.ones(3)}, folder / "pytorch_model.bin"
    )
    assert wrong(compared(folder, statement))["also a"][0] == "extra"


def test_a_model_that_cannot_be_read_is_never_called_right(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert compared(folder, folder / TENSORS).status != 0
    path.unlink()
    assert wrong(compared(folder, folder / TENSORS))["layers.0.weight"][0] == "missing"


def test_a_file_is_compared_with_its_part_of_a_statement(tmp_path: Path) -> None:
    folder = stated(tmp_path / "c", KINDS["sharded"])
    name = "model-00001-of-00002.safetensors"
    for statement in (TENSORS, FILES):
        assert compared(folder / name, folder / statement).status == 0
        flip(folder / name, (folder / name).stat().st_size - 1)
        assert compared(folder / name, folder / statement).status == 1
        flip(folder / name, (folder / name).stat().st_size - 1)


def test_a_copy_in_the_dtype_of_training_is_said_to_be_not_covered(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(
        FIXTURES.parent / "deepspeed-0.18.2" / "accelerate-zero2" / "checkpoint", folder
    )
    assert seal(folder, oms=True).status == 0
    said = str(compared(folder, folder / TENSORS))
    assert f"{folder / TENSORS} covers only its fp32 weights, not copies with another dtype" in said


def test_a_lone_file_that_holds_a_whole_model_must_have_all_its_tensors(
    folder: Path, tmp_path: Path
) -> None:
    tensors = state()
    del tensors["layers.3.weight"]
    saved(folder, tensors)
    report = compared(folder / "model.safetensors", folder / TENSORS)
    assert report.status == 1
    assert wrong(report)["layers.3.weight"][0] == "missing"
    # As after a migration: the other one has the rest.
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(tensors, shard, {"format": "pt"})
    assert compared(shard, folder / TENSORS).status == 0
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": torch.ones(2)}, other / "one.safetensors", {"format": "pt"})
    save_file({"b": torch.ones(3)}, other / "two.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert seal(other, oms=True).status == 0
    assert compared(other / "one.safetensors", other / TENSORS).status == 0


def test_files_are_compared_one_by_one_and_what_is_not_covered_is_said(folder: Path) -> None:
    (folder / ".gitattributes").write_text("x")
    report = compared(folder, folder / FILES)
    assert report.status == 0
    said = str(report)
    assert (
        f"not checked: 2 files: each is not covered by {folder / FILES}, which excludes it" in said
    )
    assert "not checked: .ckptfix, ckptfix's own folder, which no loader reads" in said
    assert f"{folder / FILES}: files, not signed: anyone could have written it" in said
    (folder / "modeling.py").write_text("import os")
    report = compared(folder, folder / FILES)
    assert report.status == 1
    assert wrong(report)["modeling.py"][0] == "extra"
    assert f"modeling.py: not covered by {folder / FILES}" in str(report)
    (folder / "modeling.py").unlink()
    (folder / "model.safetensors").unlink()
    assert wrong(compared(folder, folder / FILES))["model.safetensors"][0] == "missing"


def test_an_added_link_or_pipe_is_an_added_file_for_a_statement_of_files(folder: Path) -> None:
    for name, leads_to in {
        "later.py": "/nonexistent",
        "above": "..",
        "here": ".",
        "pipe": None,
    }.items():
        if leads_to is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(leads_to)
        report = compared(folder, folder / FILES)
        assert report.status == 1, name
        assert wrong(report)[name][0] == "extra"
        assert f", not covered by {folder / FILES}" in str(report)
        assert compared(folder, folder / TENSORS).status == 0
        (folder / name).unlink()
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "pipe")
    assert compared(folder, folder / FILES).status == 0, "left out by the statement"


def test_a_link_to_the_statement_is_another_file(folder: Path) -> None:
    (folder / "config.json").symlink_to(FILES)
    assert differing(compared(folder, folder / FILES)) == {"config.json"}
    (folder / "config.json").unlink()
    (folder / FILES).rename(folder.parent / "x")
    (folder / FILES).symlink_to("../x")
    assert compared(folder, folder / FILES).status == 0
    (folder.parent / "linked").symlink_to(folder)
    assert compared(folder, folder.parent / "linked" / FILES).status == 0


def test_folders_of_ckptfix_in_sub_folders_are_said_to_be_not_compared(folder: Path) -> None:
    own = folder / "sub" / ".ckptfix"
    own.mkdir(parents=True)
    (own / "evil.py").write_text("import os")
    said = "not checked: '.ckptfix', 'sub/.ckptfix': ckptfix's own folders, which no loader reads"
    for statement in (FILES, TENSORS):
        assert said in str(compared(folder, folder / statement))


def test_a_statement_of_tensors_in_the_place_of_that_of_files_is_refused(folder: Path) -> None:
    shutil.copy(folder / TENSORS, folder / FILES)
    (folder / "modeling.py").write_text("import os")
    with pytest.raises(
        OperationError, match="refused, and nothing was compared: it lists only tensors"
    ):
        compared(folder, folder / FILES)


def test_what_a_repair_changed_is_a_difference_for_files_and_none_for_tensors(
    tmp_path: Path,
) -> None:
    folder = stated(tmp_path / "c", SOURCES["nested"])
    repaired(folder)
    assert compared(folder, folder / TENSORS).status == 0
    report = verify(folder, statements=[folder / FILES, folder / TENSORS])
    assert report.status == 1
    assert "every tensor in it matches, so the difference is in its header" in str(report)
    assert "compare only the tensors with the statement of tensors" in str(report)
    assert "notes" in report.as_json()


def test_an_unsigned_statement_is_said_to_be_unsigned(folder: Path, tmp_path: Path) -> None:
    said = str(seal(folder, oms=True))
    assert f"not signed, so anyone could have written this: {FILES}, {TENSORS}" in said
    assert "signed by" not in said
    (one,) = compared(folder, folder / TENSORS).statements
    assert (one.is_signed, one.is_verified, one.signer) == (False, False, "")


def test_statements_belong_to_the_manifest_and_are_undone_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    of_fixture("lone-nested-safetensors")(folder)
    repaired(folder)
    before = sorted(os.listdir(folder))
    receipt = seal(folder, oms=True)
    assert receipt.transaction is not None
    assert receipt.statements == UNSIGNED
    assert verify(folder).status == 0
    flip(folder / FILES, 100)
    assert wrong(verify(folder))[FILES][0] == "changed"
    flip(folder / FILES, 100)
    undo(folder)
    assert sorted(os.listdir(folder)) == before


def test_the_same_statement_is_not_written_again(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    assert seal(folder, oms=True).status == 0
    assert {
        path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()
    } == before
    parsed = parse_statement((folder / FILES).read_bytes(), "")
    assert isinstance(parsed, FileStatement)
    assert list(parsed.files) == ["model.safetensors"]


def test_what_no_statement_can_cover_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    before = sorted(os.listdir(folder))
    with pytest.raises(
        Exception, match="pipe: is not a regular file, which OpenSSF Model Signing cannot cover"
    ):
        seal(folder, oms=True)
    (folder / "pipe").unlink()
    odd = os.fsdecode(b"bad \xff name")
    (folder / odd).write_text("")
    with pytest.raises(Exception, match="its name is not UTF-8, so no statement can list it"):
        seal(folder, oms=True)
    assert sorted(os.listdir(folder)) == sorted([*(name for name in before if name != "pipe"), odd])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"statements": ["a", "a"]}, "is the second statement of tensors; pass only one"),
        ({"signatures": ["a"]}, "name the expected signer: --key PUBLIC_KEY"),
        ({"statements": ["f"], "sha256sums": ["s"]}, "both list files; pass only one"),
        ({"statements": ["gone"]}, "gone does not exist"),
        ({"statements": [TENSORS]}, "did you mean c/tensors.oms.json?"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("a").write_bytes((folder / TENSORS).read_bytes())
    Path("f").write_bytes((folder / FILES).read_bytes())
    Path("s").write_text("")
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        verify("c", **options)


def test_the_subject_of_tensors_stays_through_names_files_and_order(tmp_path: Path) -> None:
    subjects = set()
    for number, kind in enumerate(("safetensors", "bin", "sharded")):
        folder = stated(tmp_path / str(number), KINDS[kind])
        subjects.add(json.loads((folder / TENSORS).read_text())["subject"][0]["digest"]["sha256"])
    folder = tmp_path / "renamed"
    folder.mkdir()
    saved(folder, {f"module.{name}": tensor for name, tensor in reversed(state().items())})
    assert seal(folder, oms=True, force=True).status == 0
    subjects.add(json.loads((folder / TENSORS).read_text())["subject"][0]["digest"]["sha256"])
    assert len(subjects) == 1


def test_links_are_followed_and_said(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    KINDS["safetensors"](blobs)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blobs/model.safetensors")
    assert seal(folder, oms=True).status == 0
    assert (
        json.loads((folder / FILES).read_text())["predicate"]["serialization"]["allow_symlinks"]
        is True
    )
    assert compared(folder, folder / FILES).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_repaired", [False, True])
def test_killed_anywhere_statements_and_manifest_agree_after_the_next_seal(
    tmp_path: Path, is_repaired: bool
) -> None:
    source = tmp_path / "c"
    of_fixture("lone-nested-safetensors")(source)
    if is_repaired:
        repaired(source)
    else:
        assert seal(source, force=True).status == 0
    old = manifest_bytes(source)

    def sealing(folder: Path) -> Callable[[], None]:
        return lambda: (seal(folder, force=True, oms=True), None)[1]

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(source, tmp_path / name / "c"))

    total = len(points(sealing(fresh("whole"))))
    new = manifest_bytes(tmp_path / "whole" / "c")
    assert total > 9
    seen = set()
    for at in sampled(range(total)):
        for fault in (Fault.KILL_BEFORE, Fault.TORN):
            folder = fresh(f"{at}-{fault.name}")
            strike(sealing(folder), at, fault)
            if any(finding.code == "interrupted-repair" for finding in check(folder).findings):
                with folder_lock(folder):
                    recover(folder)
            now = manifest_bytes(folder)
            seen.add(now)
            assert now in (old, new), (at, fault)
            if now == new:
                assert differing(verify(folder)) == set(), (
                    "a manifest lists no statement that is not there"
                )
            assert seal(folder, force=True, oms=True).status == 0
            assert differing(verify(folder, statements=[folder / FILES, folder / TENSORS])) == set()
            assert manifest_bytes(folder) == new
            left = [
                name
                for _, _, names in os.walk(folder)
                for name in names
                if name.startswith(".ckptfix-")
            ]
            assert left == [], "temporary files"
            shutil.rmtree(folder.parent)
    assert old in seen


def manifest_bytes(folder: Path) -> bytes | None:
    path = folder / MANIFEST
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("where", ["in the store", "on this machine"])
def test_a_checkpoint_in_a_store_is_compared_with_a_statement(
    folder: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{os.urandom(6).hex()}"
    store = upload_folder(folder, url)
    statements = [f"{url if where == 'in the store' else folder}/{name}" for name in UNSIGNED]
    options = [word for one in statements for word in ("--oms", one)]
    assert run(["verify", url, *options]) == 0
    said = capsys.readouterr().out
    assert f"{statements[0]}: files, not signed" in said
    assert "tensors: 4 match" in said
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    store.put("model.safetensors", bytes(data))
    assert run(["verify", url, *options]) == 1
    said = capsys.readouterr().out
    assert "tensors: 3 match, 1 differ" in said
    assert f"ckptfix verify --oms {statements[0]}" in said


def test_a_folder_is_no_statement(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder), "--oms", str(folder)]) == 2
    assert "is a folder; name the file in it" in capsys.readouterr().err
    assert run(["verify", str(folder), "--oms", ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


def test_migrate_leaves_out_what_is_about_the_old_files(folder: Path, tmp_path: Path) -> None:
    """The reference verifier would refuse the new folder; the statement of the tensors is right
    there.
    """
    receipt = migrate(folder, tmp_path / "new", to="bin")
    assert [one.what for one in receipt.left_out] == ["model.oms.json"]
    assert "ckptfix seal" in receipt.left_out[0].reason
    assert run(["verify", str(tmp_path / "new"), "--oms", str(tmp_path / "new" / TENSORS)]) == 0


@pytest.mark.slow
def test_the_command_line_says_what_python_says(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    KINDS["safetensors"](folder)

    def said(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "ckptfix", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    assert said("seal", "c", "--oms")[0] == 0
    status, text = said("verify", "c", "--oms", f"c/{FILES}", "--oms", f"c/{TENSORS}")
    assert (status, text.count("match")) == (0, 2)
    status, text = said("verify", "c", "--signature", f"c/{FILES}")
    assert status == 2
    assert f"to compare without verifying the signature: ckptfix verify --oms c/{FILES} c" in text
    status, text = said("verify", "c", "--oms", f"c/{FILES}", "--device-map", "auto")
    assert status == 2
    status, text = said("seal", "c", "--sign", "key", "--sigstore")
    assert status == 2
    assert "choose one of them" in text


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=4),
    st.integers(min_value=1, max_value=9),
    st.sampled_from(["sha256", "blake2b"]),
)
def test_parts_of_files_are_hashed_as_the_parts_alone(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], size: int, algorithm: str
) -> None:
    import hashlib

    from ckptfix.tensors.hashing import FileJob, Scheme

    folder = tmp_path_factory.mktemp("parts")
    scheme = Scheme(algorithm=algorithm, shard_size=size)
    for number, data in enumerate(contents):
        path = folder / str(number)
        path.write_bytes(data)
        jobs = scheme.jobs(FileJob(path, len(data)))
        expected = [
            hashlib.new(algorithm, data[start : start + size]).hexdigest()
            for start in range(0, len(data) or 1, size)
        ]
        results = hash_all(jobs)
        assert [one.digest for one in results] == expected
        assert scheme.joined(results).digest == "-".join(expected)


def test_loaders_see_what_they_saw_before(folder: Path) -> None:
    assert load_file(folder / "model.safetensors").keys() == state().keys()
    assert place(folder, "layers.0.weight").path == folder / "model.safetensors"

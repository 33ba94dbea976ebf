"""The proof before a commit finds what a faulty edit would do, and what a repair would leave
undone.
"""

from pathlib import Path

import pytest

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.diagnose import diagnose
from ckptfix.diagnosis.policy import Policy
from ckptfix.errors import OperationError, RolledBackError
from ckptfix.repairs import repair, steps_to_edits
from ckptfix.repairs.plan import make_plan
from ckptfix.repairs.proof import prove_repair
from ckptfix.repairs.steps import Draft
from ckptfix.storage.edits import Patch
from tests.repairs.builders import snapshot, write_safetensors


def planned(folder: Path) -> tuple[Draft, steps_to_edits.Compiled]:
    plan = make_plan(diagnose(Case(scan_folder(folder), prove=True)), Policy())
    return plan, steps_to_edits.compile_plan(plan, new_files=False)


def prove(plan: Draft, compiled: steps_to_edits.Compiled) -> None:
    prove_repair(plan, tuple(compiled.steps), tuple(compiled.edits), ())


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    write_safetensors(
        tmp_path / "m.safetensors", {"module.module.a": b"12345678", "module.module.b": b"abcd"}
    )
    return tmp_path


def test_a_right_edit_is_proven(nested: Path) -> None:
    plan, compiled = planned(nested)
    (patch,) = compiled.edits
    assert isinstance(patch, Patch)
    data = bytearray((nested / "m.safetensors").read_bytes())
    data[patch.offset : patch.offset + len(patch.new)] = patch.new
    (nested / "m.safetensors").write_bytes(data)
    prove(plan, compiled)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"module.a": b"12345678"}, "keys"),
        ({"module.a": b"12345678", "module.c": b"abcd"}, "keys"),
        ({"module.b": b"12345678", "module.a": b"abcd"}, "keys"),
        ({"module.a": b"1234", "module.b": b"5678abcd"}, r"was F32 \(2,\), now F32 \(1,\)"),
        ({"module.module.a": b"12345678", "module.module.b": b"abcd"}, "keys"),
    ],
)
def test_a_wrong_result_is_found(nested: Path, tensors: dict[str, bytes], words: str) -> None:
    plan, compiled = planned(nested)
    write_safetensors(nested / "m.safetensors", tensors)
    with pytest.raises(OperationError, match=words):
        prove(plan, compiled)


def test_tensors_that_moved_are_found(nested: Path) -> None:
    """Right names, dtypes and shapes, but the bytes lie where the edits did not leave them."""
    plan, compiled = planned(nested)
    write_safetensors(nested / "m.safetensors", {"module.a": b"12345678", "module.b": b"abcd"})
    with pytest.raises(OperationError, match="are not at the expected offsets after the repair"):
        prove(plan, compiled)


def test_a_file_that_is_gone_is_found(nested: Path) -> None:
    plan, compiled = planned(nested)
    (nested / "m.safetensors").unlink()
    with pytest.raises(OperationError, match=r"m\.safetensors: missing \(after the repair\)"):
        prove(plan, compiled)


def test_what_a_repair_leaves_undone_takes_it_back(
    nested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(nested / "other.safetensors", {"module.module.x": b"1"})
    before = snapshot(nested)

    def forgetful(plan: Draft, *, new_files: bool) -> steps_to_edits.Compiled:
        compiled = steps_to_edits.compile_plan(plan, new_files=new_files)
        return steps_to_edits.Compiled(edits=compiled.edits[:1], steps=compiled.steps[:1])

    monkeypatch.setattr(repair, "compile_plan", forgetful)
    with pytest.raises(RolledBackError, match="the repair left something to repair"):
        repair.repair(nested)
    assert {
        name: data for name, data in snapshot(nested).items() if ".ckptfix" not in name
    } == before


def test_a_file_that_changes_after_the_plan_stops_the_repair(nested: Path) -> None:
    path = nested / "m.safetensors"

    plan = repair.plan_repair(nested)
    write_safetensors(path, {"module.module.a": b"newer!!!", "module.module.b": b"save"})
    with pytest.raises(OperationError, match="changed while it was read"):
        plan.execute()
    assert path.read_bytes().endswith(b"newer!!!save")

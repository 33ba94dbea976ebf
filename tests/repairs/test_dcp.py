"""DCP folders of real FSDP runs: renamed, a double dropped, loaded by torch and accelerate, and
taken back.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file

from ckptfix import Keys, Policy, check, repair, seal, undo, verify
from ckptfix.checkpoint.roles import Role
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.repairs.receipt import RepairReceipt
from ckptfix.storage.lock import folder_lock
from ckptfix.verification.verify_report import Kind, Outcome
from fixtures import golden_dcp
from fixtures.digests import tensor_digests
from tests.repairs.builders import RANDOM_STATES
from tests.repairs.dcp_folders import (
    FIXTURES,
    MODEL,
    ONCE,
    OPTIMIZER,
    change,
    copy,
    loaded,
    model_digests,
    prefixed,
    renaming,
    snapshot,
)
from tests.sampling import PARTS, sampled
from tests.storage.crash import Fault, points, strike
from tests.storage.folders import recover

COPIES = Policy(allow=frozenset({"identical-models"}))
"""FSDP adds no wrapper, so that nothing but the user's word says that an equal model is a second
``prepare``.
"""

ASKED = Policy(allow=COPIES.allow | ONCE.allow)

RENAMED = Policy(allow=frozenset({"mismatched-names"}))
"""The user says that the keys of a model or of its optimizer were renamed by hand."""

PREFIX = {Keys.AUTO: "module.", Keys.BARE: "", Keys.DDP: "module."}


def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FIXTURES / name / "run.json").read_text())
    return content


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in findings]


def repaired(folder: Path, policy: Policy | None = None) -> RepairReceipt:
    """Repair, and see that a second repair finds nothing to do."""
    receipt = repair(folder, policy=policy)
    after = snapshot(folder)
    again = repair(folder, policy=policy)
    assert (again.steps, again.transaction) == ((), None)
    assert snapshot(folder) == after
    return receipt


def optimizer_is(folder: Path, run: dict[str, Any], prefix: str) -> None:
    content = loaded(folder)["optimizer"]
    state = {name: tensor_digests(values) for name, values in content["state"].items()}
    assert state == prefixed(prefix, run["optimizer"])
    groups = [group["params"] for group in content["param_groups"]]
    assert groups == [[prefix + name for name in group] for group in run["param_groups"]]


def merged(folder: Path, target: Path) -> dict[str, str]:
    merge_fsdp_weights(str(folder), str(target))
    return tensor_digests(load_file(target / "model.safetensors"))


def test_a_clean_run_has_no_finding(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-clean")
    report = check(folder, data=True)
    assert report.findings == ()
    assert [str(state.path) for state in report.sharded] == [OPTIMIZER, MODEL]
    assert not any("not looked into" in words for words in report.not_checked)


@pytest.mark.parametrize("keys", Keys)
@pytest.mark.parametrize("name", ["fsdp2-nested", "fsdp1-nested"])
def test_renamed_it_loads_under_the_right_names(tmp_path: Path, name: str, keys: Keys) -> None:
    folder, run = copy(tmp_path, name), recorded(name)
    before = snapshot(folder)
    assert codes(check(folder).findings) == ["nested-prefix"] * 3
    assert snapshot(folder) == before, "check changed something"

    receipt = repaired(folder, renaming(keys))
    assert receipt.status == 0
    prefix = PREFIX[keys]
    expected = prefixed(prefix, run["models"]["0"])
    assert model_digests(folder / MODEL) == expected
    assert merged(folder / MODEL, tmp_path / "merged") == expected
    optimizer_is(folder / OPTIMIZER, run, prefix)
    assert codes(check(folder).findings) == (["wrapper-prefix"] if prefix else [])
    after = snapshot(folder)
    assert {path for path in before if after[path][0] != before[path][0]} == {
        f"{MODEL}/.metadata",
        f"{OPTIMIZER}/.metadata",
    }, "a byte of a tensor was written"

    undo(folder)
    assert snapshot(folder) == before


def test_a_second_rename_leaves_no_file_of_the_first(tmp_path: Path) -> None:
    folder, run = copy(tmp_path, "fsdp2-nested"), recorded("fsdp2-nested")
    before = snapshot(folder)
    repaired(folder, ONCE)
    between = snapshot(folder)
    repaired(folder, Policy(keys=Keys.BARE))
    assert check(folder).findings == ()
    optimizer_is(folder / OPTIMIZER, run, "")
    undo(folder)
    assert snapshot(folder) == between
    undo(folder)
    assert snapshot(folder) == before


def test_a_copy_is_dropped_on_request_and_later_models_move(tmp_path: Path) -> None:
    folder, run = copy(tmp_path, "fsdp2-doubled"), recorded("fsdp2-doubled")
    before = snapshot(folder)
    found = check(folder).findings
    assert codes(found) == ["identical-models", "wrapper-prefix"]
    assert str(found[0].path) == "pytorch_model_fsdp_1"
    assert repair(folder).steps == ()

    assert repaired(folder, COPIES).status == 0
    assert model_digests(folder / MODEL) == run["models"]["0"]
    assert model_digests(folder / "pytorch_model_fsdp_1") == run["models"]["2"]
    assert list((folder / "pytorch_model_fsdp_2").iterdir()) == []
    assert check(folder).findings == ()
    kept = sum(path.stat().st_size for path in (folder / ".ckptfix").rglob("*") if path.is_file())
    dropped = sum(
        len(before[path][0]) for path in before if path.startswith("pytorch_model_fsdp_1")
    )
    assert kept < dropped, "the journal holds the bytes of the double"

    undo(folder)
    assert snapshot(folder) == before


def test_an_undo_brings_back_a_folder_that_was_deleted_when_it_was_empty(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    before = snapshot(folder)
    repair(folder, policy=COPIES)
    (folder / "pytorch_model_fsdp_2").rmdir()
    undo(folder)
    assert snapshot(folder) == before


def test_one_other_byte_is_never_dropped(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    path = folder / "pytorch_model_fsdp_1" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    found = [(one.code, str(one.path)) for one in repair(folder, policy=COPIES).left]
    assert ("related-models", "pytorch_model_fsdp_1") in found
    assert path.read_bytes() == data


def test_equal_models_without_evidence_go_only_when_asked(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-clean")
    shutil.copytree(folder / MODEL, folder / "pytorch_model_fsdp_1")
    before = snapshot(folder)
    assert codes(check(folder).findings) == ["identical-models"]
    assert repair(folder).steps == ()
    assert repair(folder, policy=Policy(keep={Role.MODEL: 2})).status == 0
    assert snapshot(folder) == before
    receipt = repair(folder, policy=Policy(keep={Role.MODEL: 1}))
    assert (receipt.status, len(receipt.steps)) == (0, 1)
    assert check(folder).findings == ()
    assert set(model_digests(folder / MODEL)) == set(recorded("fsdp2-clean")["models"]["0"])
    undo(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("what", [MODEL, OPTIMIZER])
def test_half_a_repair_is_finished(tmp_path: Path, what: str) -> None:
    """The names of one folder were changed by its metadata alone."""
    folder, run = copy(tmp_path, "fsdp2-nested"), recorded("fsdp2-nested")
    change(folder / what, golden_dcp.rename_all(golden_dcp.without_wrapper))
    found = check(folder).findings
    assert "mismatched-names" in codes(found)
    if what == MODEL:
        # The optimizer agrees with itself, as where the script saved the module in its wrapper.
        assert repaired(folder).steps == ()
        assert repaired(folder, RENAMED).status == 0
    else:
        # Its groups, which are pickled, have other keys than its state: no script reads that.
        assert repaired(folder).status == 0
    assert model_digests(folder / MODEL) == run["models"]["0"]
    optimizer_is(folder / OPTIMIZER, run, "")
    assert check(folder).findings == ()


def test_an_optimizer_follows_a_model_with_one_wrapper(tmp_path: Path) -> None:
    folder, run = copy(tmp_path, "fsdp2-nested"), recorded("fsdp2-nested")
    change(
        folder / MODEL,
        golden_dcp.rename_all(lambda name: name.replace("module.module.", "module.")),
    )
    assert codes(check(folder).findings) == [
        "mismatched-names",
        "mismatched-names",
        "wrapper-prefix",
    ]
    assert repaired(folder).steps == ()
    assert repaired(folder, RENAMED).status == 0
    optimizer_is(folder / OPTIMIZER, run, "module.")
    assert codes(check(folder).findings) == ["wrapper-prefix"]


def test_an_optimizer_of_another_model_is_judged_alone(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    other = golden_dcp.rename_all(lambda name: name.replace("module.module.", "encoder."))
    change(folder / MODEL, other)
    assert codes(check(folder).findings) == ["nested-prefix", "nested-prefix"]


def test_every_way_to_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    own = folder / MODEL
    for path in (folder, own, own / ".metadata", own / "__0_0.distcp"):
        assert "nested-prefix" in codes(check(path).findings), path
    assert run(["check", "--recursive", "--json", str(tmp_path)]) == 0
    (document,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert document["path"] == str(folder)
    assert [one["path"] for one in document["sharded"]] == [OPTIMIZER, MODEL]

    shutil.rmtree(folder / OPTIMIZER)  # beside it the names would no longer fit
    before = snapshot(own)
    repaired(own / ".metadata", ONCE)
    assert "nested-prefix" not in codes(check(own).findings)
    assert model_digests(own) == prefixed("module.", recorded("fsdp2-nested")["models"]["0"])
    undo(own)
    assert snapshot(own) == before


@pytest.mark.parametrize("scenario", ["fsdp1-nested", "fsdp2-nested"])
def test_modules_of_that_name_in_a_save_of_fsdp_are_a_note(tmp_path: Path, scenario: str) -> None:
    """Two modules hold the net as ``self.module``. accelerate prepares no FSDP model twice, and
    FSDP adds no key.
    """
    folder = copy(tmp_path, scenario)
    assert {(finding.code, finding.severity.value) for finding in check(folder).findings} == {
        ("nested-prefix", "note")
    }
    assert check(folder).status == 0
    for own in (folder / MODEL, folder / OPTIMIZER):
        assert {finding.severity.value for finding in check(own).findings} == {"note"}
    # dcp.save() of ddp.state_dict() leaves its wrappers.
    (folder / MODEL).rename(folder / "by_a_script")
    assert check(folder / "by_a_script").status == 1


def test_a_folder_of_any_name_is_looked_into(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested", keep=(MODEL,))
    (folder / MODEL).rename(folder / "weights")
    assert codes(check(folder).findings) == ["nested-prefix"]
    assert run(["check", "--recursive", str(tmp_path)]) == 1
    assert repaired(folder, ONCE).status == 0


def test_inside_of_a_save_state_folder(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    stock = FIXTURES.parent / "accelerate-1.15.0" / "clean-bin" / "checkpoint"
    for name in ("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"):
        if (stock / name).exists():
            shutil.copyfile(stock / name, folder / name)
    assert check(folder).folder.is_save_state
    before = snapshot(folder)
    receipt = repaired(folder)
    assert (receipt.steps, receipt.status, snapshot(folder)) == ((), 1, before)
    assert {stay.code for stay in receipt.unplanned} == {"nested-prefix"}
    assert "--keys bare" in receipt.unplanned[0].reason
    assert {one.action.value for one in check(folder).findings if one.code == "nested-prefix"} == {
        "ask"
    }
    for policy in (ONCE, Policy(keys=Keys.BARE)):
        assert repaired(folder, policy).status == 0
        undo(folder)
        assert {
            name: one for name, one in snapshot(folder).items() if ".ckptfix" not in name
        } == before


def test_a_mismatched_optimizer_is_evidence_next_to_a_rank_count(tmp_path: Path) -> None:
    """The optimizer has the model's keys in fewer wrappers, so the model was wrapped once more than
    it.
    """
    folder = copy(tmp_path, "fsdp2-nested")
    change(
        folder / OPTIMIZER,
        golden_dcp.rename_all(lambda name: name.replace("module.module.", "module.")),
    )
    for rank in range(2):
        (folder / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    found = {one.code: one.action.value for one in check(folder).findings}
    assert (found["nested-prefix"], found["mismatched-names"]) == ("fix", "fix")


def test_a_dry_run_changes_nothing_and_a_copy_is_repaired(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    before = snapshot(folder)
    assert [
        type(step.action).__name__ for step in repair(folder, policy=COPIES, dry_run=True).steps
    ] == [
        "DropEntry",
        "Renumber",
    ]
    assert repair(folder, policy=COPIES, output=tmp_path / "other").status == 0
    assert snapshot(folder) == before
    assert (
        model_digests(tmp_path / "other" / "pytorch_model_fsdp_1")
        == recorded("fsdp2-doubled")["models"]["2"]
    )
    assert check(tmp_path / "other").findings == ()


@pytest.mark.parametrize("name", ["fsdp2-nested", "fsdp2-doubled"])
def test_a_manifest_stays_true(tmp_path: Path, name: str) -> None:
    folder = copy(tmp_path, name)
    seal(folder, force=True)
    before = snapshot(folder)
    repair(folder, policy=ASKED)
    report = verify(folder)
    assert {item.kind for item in report.items} == {Kind.FILE, Kind.TENSOR}
    assert [item for item in report.items if item.outcome is not Outcome.MATCH] == []
    assert seal(folder).status == 0
    undo(folder)
    assert snapshot(folder) == before


def new(folder: Path) -> dict[str, bytes]:
    repair(folder, policy=ASKED)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path: one[0] for path, one in snapshot(folder).items() if not path.startswith(".ckptfix")
    }


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["repair", "undo"])
@pytest.mark.parametrize("name", ["fsdp2-nested", "fsdp2-doubled"])
def test_killed_anywhere_it_is_old_or_new(tmp_path: Path, name: str, verb: str) -> None:
    keep = (
        (OPTIMIZER,)
        if name == "fsdp2-nested"
        else (MODEL, "pytorch_model_fsdp_1", "pytorch_model_fsdp_2")
    )
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        folder = copy(tmp_path / str(number), name, keep=keep)
        if verb == "undo":
            repair(folder, policy=ASKED)
        return folder

    def work(folder: Path) -> Any:
        return (lambda: undo(folder)) if verb == "undo" else (lambda: repair(folder, policy=ASKED))

    folder = fresh()
    before = contents(folder)
    total = len(points(work(folder)))
    after = contents(folder) if verb == "undo" else new(fresh())
    assert total > 10
    assert after != before
    for at in sampled(range(total)):
        folder = fresh()
        # tests/repairs/test_kill.py has every fault at each point
        fault = (Fault.KILL_BEFORE, Fault.TORN)[at // PARTS % 2]
        strike(work(folder), at, fault)
        with folder_lock(folder):
            recover(folder)
        assert contents(folder) in (before, after), (at, fault)
        shutil.rmtree(folder.parent)

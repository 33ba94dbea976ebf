"""Layouts of real scripts: flattened optimizers, several models in one folder, an optimizer's
groups in one item.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint._nested_dict as nested_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3

from ckptfix import Keys, Policy, check, repair, seal, undo, verify
from ckptfix.verification.verify_report import Outcome
from tests.repairs.dcp_folders import MODEL, ONCE, OPTIMIZER, change, loaded, renaming, snapshot
from tests.repairs.dcp_runs import Run, load_into, run_two, split
from tests.tensors.dcp_making import save

WRAPPERS = {Keys.AUTO: 1, Keys.BARE: 0, Keys.DDP: 1}
FOLDERS = {"one": ["all"], "two": [MODEL, OPTIMIZER], "mixed": ["all"]}


def save_run(tmp_path: Path, layout: str, state: dict[str, Any]) -> list[Path]:
    folders = [tmp_path / name for name in FOLDERS[layout]]
    for folder, part in zip(folders, split(state, layout), strict=True):
        save(folder, part)
    return folders


@pytest.mark.parametrize(
    ("layout", "flattened", "keys"),
    [
        *(("one", True, keys) for keys in Keys),
        *(("two", False, keys) for keys in Keys),
        ("one", False, Keys.AUTO),
        ("two", True, Keys.AUTO),
        ("mixed", True, Keys.AUTO),
    ],
)
def test_a_correct_script_loads_what_was_trained(
    tmp_path: Path, layout: str, flattened: bool, keys: Keys
) -> None:
    run = Run(2).train()
    folders = save_run(tmp_path, layout, run.state(flattened=flattened))
    before = snapshot(tmp_path)
    assert {finding.code for finding in check(tmp_path).findings} == {"nested-prefix"}
    assert snapshot(tmp_path) == before

    receipt = repair(tmp_path, policy=renaming(keys))
    assert (receipt.status, receipt.unplanned) == (0, ())
    script = Run(WRAPPERS[keys], seed=7)
    assert not torch.equal(next(script.model.parameters()), next(run.model.parameters()))
    load_into(script, folders, layout, flattened=flattened, no_dist=True)
    assert script.memory() == run.memory()

    after = snapshot(tmp_path)
    assert repair(tmp_path, policy=renaming(keys)).transaction is None
    assert snapshot(tmp_path) == after
    undo(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_two_processes_load_what_two_processes_trained(tmp_path: Path) -> None:
    """Each holds its shards of student, teacher and flattened optimizer, all in one folder."""
    folder, memory = tmp_path / "all", tmp_path / "memory.pt"
    run_two("save", folder, memory)
    before = snapshot(folder)
    assert repair(folder, policy=ONCE).status == 0
    run_two("load", folder, memory)
    undo(folder)
    assert snapshot(folder) == before


def test_a_state_whose_name_is_in_no_group_is_not_renamed(tmp_path: Path) -> None:
    """Where the name ends in ``state.a.b.c`` only the groups tell."""
    state = Run(2).train().state()
    state["optim"]["state.module.module.9.weight.exp_avg"] = torch.ones(2)
    save_run(tmp_path, "one", state)
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    words = "it is not clear which part of the key is the name"
    assert any(words in one.reason for one in receipt.unplanned)
    assert receipt.transaction is None
    assert snapshot(tmp_path) == before


def test_options_and_nested_states_keep_their_keys(tmp_path: Path) -> None:
    """Shampoo's states are dicts; and a parameter may be called as a wrapper, or as a key of an
    optimizer.
    """
    names = ("module.module.state.lr", "module.module.state", "module.module.0.module")
    optim: dict[str, Any] = {}
    for name in names:
        optim[f"state.{name}.precond.module.0"] = torch.ones(2)
        optim[f"state.{name}.exp_avg"] = torch.ones(2)
        optim[f"param_groups.{name}.lr"] = 0.5
    save(tmp_path / "all", {"model": {name: torch.zeros(2) for name in names}, "optim": optim})
    assert repair(tmp_path, policy=ONCE).status == 0
    content = loaded(tmp_path / "all")
    new = [name.replace("module.module.", "module.", 1) for name in names]
    assert set(content["model"]) == set(new)
    ends = (("state.", ".precond.module.0"), ("state.", ".exp_avg"), ("param_groups.", ".lr"))
    assert set(content["optim"]) == {begin + name + end for name in new for begin, end in ends}


@pytest.mark.parametrize("keys", Keys)
def test_a_manifest_follows_every_model(tmp_path: Path, keys: Keys) -> None:
    state = Run(2).train().state()
    models = {"student": state["model"], "teacher": state["teacher"]}
    save(tmp_path / "all", {**models, "optim": state["optim"]})
    folder = tmp_path / "all"
    seal(folder, force=True)
    assert repair(folder, policy=renaming(keys)).status == 0
    items = verify(folder).items
    assert len(items) > 12
    assert [item for item in items if item.outcome is not Outcome.MATCH] == []


def old_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch take an object without tensors as one item, as before 2.4."""
    monkeypatch.setattr(nested_dict, "traverse_state_dict", traverse_state_dict_v_2_3)


@pytest.mark.parametrize(
    ("layout", "keys"), [*(("one", keys) for keys in Keys), ("two", Keys.AUTO)]
)
def test_groups_in_one_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, keys: Keys
) -> None:
    run = Run(2).train()
    with monkeypatch.context() as patch:
        old_planner(patch)
        folders = save_run(tmp_path, layout, run.state(flattened=False))
    before = snapshot(tmp_path)
    receipt = repair(tmp_path, policy=renaming(keys))
    assert (receipt.status, receipt.unplanned) == (0, ())
    script = Run(WRAPPERS[keys], seed=7)
    with monkeypatch.context() as patch:
        old_planner(patch)
        load_into(script, folders, layout, flattened=False, no_dist=True)
    assert script.memory() == run.memory()
    undo(tmp_path)
    assert snapshot(tmp_path) == before


def momentumless(prefix: str) -> dict[str, Any]:
    groups = [{"params": [prefix + "0.weight"], "param_names": [prefix + "0.weight"], "lr": 0.1}]
    return {"state": {}, "param_groups": [*groups, {"params": [prefix + "0.bias"], "lr": 0.2}]}


def groups_of(folder: Path) -> Any:
    """Return the optimizer of a folder that is one item, as torch reads items."""
    content = pickle.loads((folder / ".metadata").read_bytes())
    ((index, place),) = [one for one in content.storage_data.items() if one[0].fqn == "optimizer"]
    assert index.offset is None
    data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    return torch.load(io.BytesIO(data), weights_only=True)


TWO = {"module.module.0.weight": torch.ones(3), "module.module.0.bias": torch.ones(2)}


def test_a_whole_optimizer_in_one_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of SGD without momentum holds no tensor."""
    old_planner(monkeypatch)
    save(tmp_path / "all", {"model": TWO, "optimizer": momentumless("module.module.")})
    before = snapshot(tmp_path)
    assert repair(tmp_path, policy=ONCE).status == 0
    assert groups_of(tmp_path / "all")["param_groups"] == momentumless("module.")["param_groups"]
    undo(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("where", ["key", "other", "object", "mixed"])
def test_groups_that_hold_more_than_lists_of_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    old_planner(monkeypatch)
    state = momentumless("module.module.")
    if where == "key":
        state["param_groups"][0]["scales"] = {"module.module.0.weight": 2.0}
    elif where == "other":
        state["param_groups"].append({"frozen": ["module.module.0.bias"], "params": []})
    elif where == "mixed":
        state["param_groups"][1]["params"] = ["module.module.0.bias", 3]
    else:
        state["param_groups"][0]["schedule"] = Path("a")
    save(tmp_path / "all", {"model": TWO, "optimizer": state})
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    of_object = "creates an object of class pathlib"
    reason = of_object if where == "object" else "would still contain the old key"
    assert any(reason in one.reason for one in receipt.unplanned), receipt.unplanned
    assert snapshot(tmp_path) == before


def test_half_a_repair_of_such_groups_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata was renamed by hand, which leaves the names in the item."""
    old_planner(monkeypatch)
    save(tmp_path / "all", {"model": TWO, "optimizer": momentumless("module.module.")})

    def by_hand(content: Any) -> None:
        for old in list(content.state_dict_metadata):
            new = old.replace("module.module.", "module.")
            content.state_dict_metadata[new] = content.state_dict_metadata.pop(old)
            path = content.planner_data.pop(old)
            content.planner_data[new] = tuple(
                str(one).replace("module.module.", "module.") for one in path
            )
        content.storage_data = {
            type(key)(key.fqn.replace("module.module.", "module."), key.offset, key.index): value
            for key, value in content.storage_data.items()
        }

    change(tmp_path / "all", by_hand)
    assert "mismatched-names" in [finding.code for finding in check(tmp_path).findings]
    # SGD without momentum has no state whose keys would show that its groups were not renamed.
    assert repair(tmp_path).steps == ()
    assert repair(tmp_path, policy=Policy(allow=frozenset({"mismatched-names"}))).status == 0
    assert groups_of(tmp_path / "all")["param_groups"] == momentumless("module.")["param_groups"]

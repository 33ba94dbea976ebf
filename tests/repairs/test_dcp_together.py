"""Layouts of DCP other than Accelerate's: all names that belong together change, or none and the
reason is told.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint._nested_dict as nested_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3

from ckptfix import Keys, Policy, check, repair, seal, undo, verify
from ckptfix.repairs.receipt import RepairReceipt
from ckptfix.verification.verify_report import Outcome
from tests.repairs.dcp_folders import (
    MODEL,
    ONCE,
    OPTIMIZER,
    change,
    copy,
    loaded,
    renaming,
    snapshot,
)
from tests.tensors.dcp_making import save

NAMES = ("0.weight", "0.bias", "1.weight")
KEYS = tuple(Policy(keys=keys) for keys in Keys)


def weights(prefix: str, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {prefix + name: torch.full((2, 3), value + number) for number, name in enumerate(NAMES)}


def optimizer(prefix: str) -> dict[str, Any]:
    names = [prefix + name for name in NAMES]
    return {
        "state": {name: {"exp_avg": torch.ones(2, 3), "step": torch.tensor(2.0)} for name in names},
        "param_groups": [{"params": names, "lr": 0.1}],
    }


def flattened(prefix: str) -> dict[str, Any]:
    """Return an optimizer as ``StateDictOptions(flatten_optimizer_state_dict=True)`` gives it."""
    found: dict[str, Any] = {}
    for name in NAMES:
        found[f"state.{prefix}{name}.exp_avg"] = torch.ones(2, 3)
        found[f"param_groups.{prefix}{name}.lr"] = 0.1
    return found


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


def refused(folder: Path, reason: str, policy: Policy | None = None) -> RepairReceipt:
    """See that nothing is changed, that the reason is in the plan, and that damage is still
    told.
    """
    before, found = snapshot(folder), codes(folder)
    receipt = repair(folder, policy=policy)
    assert any(reason in one.reason for one in receipt.unplanned), receipt.unplanned
    assert (receipt.transaction, receipt.steps, receipt.status) == (None, (), 1)
    assert snapshot(folder) == before
    assert codes(folder) == found
    return receipt


TWICE = "module.module."


@pytest.mark.parametrize(
    ("keys", "prefix"), [(Keys.AUTO, "module."), (Keys.BARE, ""), (Keys.DDP, "module.")]
)
def test_a_model_that_lies_flat_beside_other_things(
    tmp_path: Path, keys: Keys, prefix: str
) -> None:
    """As torchtitan saves: the names of the model, its optimizer and a number of steps in one
    dict.
    """
    folder = tmp_path / "step-5"
    extra = {f"{TWICE}0._extra_state": b"anything"}
    save(folder, {**weights(TWICE), **extra, "step": 5, "optimizer": optimizer(TWICE)})
    assert codes(folder) == ["nested-prefix"] * 3
    before = snapshot(folder)
    receipt = repair(folder, policy=renaming(keys))
    assert receipt.status == 0
    content = loaded(folder)
    assert set(content) == {prefix + name for name in (*NAMES, "0._extra_state")} | {
        "step",
        "optimizer",
    }
    assert content["step"] == 5
    assert set(content["optimizer"]["state"]) == {prefix + name for name in NAMES}
    assert content["optimizer"]["param_groups"][0]["params"] == [prefix + name for name in NAMES]
    undo(folder)
    assert snapshot(folder) == before


def test_a_module_of_the_model_that_torch_leaves_in_the_names_of_the_optimizer(
    tmp_path: Path,
) -> None:
    """As of ``DDP(Holder(net))``: ``get_optimizer_state_dict`` takes off the ``module.`` of DDP,
    and no other.
    """
    save(tmp_path, {"model": weights(TWICE), "optimizer": optimizer("module.")})
    before = snapshot(tmp_path)
    assert codes(tmp_path) == ["wrapper-prefix"]
    assert (check(tmp_path).status, repair(tmp_path).steps) == (0, ())
    assert snapshot(tmp_path) == before


def test_an_average_in_fewer_wrappers_shows_no_module_of_the_model(tmp_path: Path) -> None:
    state = {
        "model": weights(TWICE),
        "average": weights("module.", 5.0),
        "optimizer": optimizer(TWICE),
    }
    save(tmp_path, state)
    assert codes(tmp_path).count("nested-prefix") == 3


def test_a_flat_model_without_wrapper_gets_none_between_foreign_keys(tmp_path: Path) -> None:
    folder = tmp_path / "step-5"
    save(folder, {**weights(""), "step": 5, "optimizer": optimizer("")})
    assert codes(folder) == []
    refused(folder, "keys that do not belong to the model", Policy(keys=Keys.DDP))
    assert repair(folder, policy=Policy(keys=Keys.BARE)).status == 0


def test_an_optimizer_does_not_change_alone(tmp_path: Path) -> None:
    """A tensor of somebody's own beside the names: they no longer look wrapped, those of the
    optimizer do.
    """
    folder = tmp_path / "step-5"
    save(folder, {**weights(TWICE), "seen": torch.tensor(3), "optimizer": optimizer(TWICE)})
    refused(folder, "would still contain the old key")


def test_a_flattened_optimizer_is_no_model(tmp_path: Path) -> None:
    save(tmp_path / OPTIMIZER, {"optimizer": flattened("module.")})
    (state,) = check(tmp_path).sharded
    assert state.model is None


def test_parameter_groups_in_one_item_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nested_dict, "traverse_state_dict", traverse_state_dict_v_2_3)
    save(tmp_path / OPTIMIZER, {"optimizer": optimizer(TWICE)})
    save(tmp_path / MODEL, {"model": weights(TWICE)})

    def far_away(content: Any) -> None:
        for key, place in content.storage_data.items():
            if key.fqn == "optimizer.param_groups":
                place.relative_path = "__7_0.distcp"

    change(tmp_path / OPTIMIZER, far_away)
    refused(tmp_path, "cannot be read: the file is missing")


def test_the_users_own_keys_are_no_names(tmp_path: Path) -> None:
    state = {"student": weights(""), "teacher": weights("", 5.0), "epoch": 3}
    save(tmp_path / "two", state)
    refused(tmp_path, "several state dicts", Policy(keys=Keys.DDP))
    assert repair(tmp_path, policy=Policy(keys=Keys.BARE)).transaction is None
    (only,) = check(tmp_path).sharded
    assert [(scope.path, scope.names, scope.is_model) for scope in only.scopes] == [
        (("student",), NAMES, False),
        (("teacher",), NAMES, False),
    ]


def test_one_of_several_models_does_not_change_alone(tmp_path: Path) -> None:
    """The average of the prepared model is right as it is; what is not asked for is not renamed."""
    save(tmp_path / "all", {"model": weights("module."), "ema": weights(TWICE, 3.0)})
    assert codes(tmp_path) == ["wrapper-prefix", "wrapper-prefix"]
    assert repair(tmp_path).steps == ()


def test_several_models_do_not_get_different_wrappers(tmp_path: Path) -> None:
    compiled = "module.module._orig_mod."
    save(tmp_path / "all", {"model": weights(TWICE), "ema": weights(compiled, 3.0)})
    refused(tmp_path, "would get other wrappers")


def test_an_optimizer_that_fits_none_of_several_models_is_not_guessed_at(tmp_path: Path) -> None:
    """Half a repair by hand: whose the optimizer is, the names tell no more."""
    state = {
        "model": weights(""),
        "ema": weights("module._orig_mod."),
        "optimizer": optimizer("module."),
    }
    save(tmp_path / "all", state)
    refused(tmp_path, "it is unclear whether")


def test_an_optimizer_is_judged_by_the_model_whose_names_it_has(tmp_path: Path) -> None:
    """The teacher has fewer wrappers, and so has its optimizer: nothing is mismatched."""
    state = {"model": weights(TWICE), "teacher": weights("module.", 3.0)}
    save(tmp_path / "all", {**state, "optimizer": optimizer("module.")})
    assert codes(tmp_path) == ["nested-prefix", "wrapper-prefix"]
    assert repair(tmp_path, policy=ONCE).status == 0
    content = loaded(tmp_path / "all")
    assert set(content["model"]) == set(content["teacher"]) == {f"module.{name}" for name in NAMES}


def test_a_copy_under_other_keys_is_not_left_behind(tmp_path: Path) -> None:
    """An average whose names the scan does not take for wrapped: some carry a key of its own."""
    average = {f"shadow.{name}": value for name, value in weights(TWICE).items()}
    save(tmp_path / "all", {"model": weights(TWICE), "ema": average})
    refused(tmp_path, "would still contain the old key")


def test_other_tensors_beside_a_model_are_no_reason(tmp_path: Path) -> None:
    state = {
        "model": weights(TWICE),
        "optimizer": optimizer(TWICE),
        "seen": {"tokens": torch.tensor(3)},
    }
    save(tmp_path / "all", state)
    assert repair(tmp_path, policy=ONCE).status == 0
    content = loaded(tmp_path / "all")
    assert set(content["model"]) == {f"module.{name}" for name in NAMES}
    assert set(content["seen"]) == {"tokens"}


@pytest.mark.parametrize("damage", ["cut", "missing", "zeros"])
def test_an_optimizer_that_cannot_be_read_holds_its_model_back(tmp_path: Path, damage: str) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    path = folder / OPTIMIZER / ".metadata"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 20)
    else:
        path.write_bytes(bytes(300))
    refused(folder, f"{OPTIMIZER}/.metadata")
    refused(folder, f"{OPTIMIZER}/.metadata", Policy(keys=Keys.BARE))


def test_an_optimizer_of_another_number_does_not_hold_it_back(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    (folder / OPTIMIZER).rename(folder / "optimizer_4")
    (folder / "optimizer_4" / ".metadata").write_bytes(bytes(300))
    receipt = repair(folder, policy=ONCE)
    assert [str(step.action.path) for step in receipt.steps if hasattr(step.action, "path")] == [
        f"{MODEL}/.metadata"
    ]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("policy", KEYS)
def test_flat_parameters_in_a_file_are_refused(tmp_path: Path, suffix: str, policy: Policy) -> None:
    from safetensors.torch import save_file

    state = {f"module.module._fsdp_wrapped_module.{n}._flat_param": torch.ones(4) for n in "ab"}
    if suffix == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert {"flat-parameters", "nested-prefix"} <= set(codes(tmp_path))
    refused(tmp_path, "flattened parameters", policy)


@pytest.mark.parametrize("layout", ["flat", "beside", "lone"])
def test_a_manifest_follows(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "all"
    layouts: dict[str, Any] = {
        "flat": {**weights(TWICE), "step": 5, "optimizer": optimizer(TWICE)},
        "beside": {"model": weights(TWICE), "seen": {"tokens": torch.tensor(3)}},
        "lone": {"model": weights(TWICE)},
    }
    save(folder, layouts[layout])
    seal(folder, force=True)
    assert repair(folder, policy=ONCE).status == 0
    items = verify(folder).items
    assert len(items) >= len(NAMES)
    assert [item for item in items if item.outcome is not Outcome.MATCH] == []

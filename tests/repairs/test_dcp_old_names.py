"""Repairs of DCP folders that would leave an old name behind, or rename what is no name of a
parameter: refused.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from ckptfix import Keys, Policy, UsageError, repair, undo
from ckptfix.checkpoint.dcp import optimizers_in
from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.formats import dcp_items
from ckptfix.repairs import plan_dcp
from ckptfix.repairs.plan_dcp import OldNames
from tests.repairs.dcp_folders import ONCE, change, loaded, snapshot
from tests.repairs.test_dcp_together import TWICE, codes, flattened, optimizer, refused, weights
from tests.tensors.dcp_making import save

DDP, BARE = Policy(keys=Keys.DDP), Policy(keys=Keys.BARE)


def every_item(edit: Callable[[Any], object], *, of: str = "names") -> Callable[[Metadata], None]:
    def to_metadata(content: Metadata) -> None:
        for key, value in content.storage_data.items():
            if of in key.fqn:
                edit(value)

    return to_metadata


def compressed(place: Any) -> None:
    place.transform_descriptors = ["zstd"]


def cut(place: Any) -> None:
    place.length -= 10


def elsewhere(place: Any) -> None:
    place.relative_path = "gone.distcp"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (compressed, "does not read (zstd)"),
        (cut, "zip archive ends"),
        (elsewhere, "the file is missing"),
    ],
)
def test_an_item_that_cannot_be_read_may_hold_old_names(
    tmp_path: Path, edit: Callable[[Any], object], reason: str
) -> None:
    """Whatever it is called; here one does."""
    save(tmp_path / "all", {"model": weights(TWICE), "names": list(weights(TWICE))})
    change(tmp_path / "all", every_item(edit))
    receipt = refused(tmp_path, reason)
    assert any(
        "'names" in one.reason and "may contain old keys" in one.reason for one in receipt.unplanned
    )


def test_items_behind_some_that_lie_over_each_other_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    save(folder, {"aaa": 3, "model": weights(TWICE), "names": list(weights(TWICE))})

    def over_all(place: Any) -> None:
        place.offset, place.length = 0, (folder / place.relative_path).stat().st_size - 1

    change(folder, every_item(over_all, of="aaa"))
    refused(tmp_path, "may contain old keys")


@pytest.mark.parametrize("limit", [1000, 1 << 26])
def test_an_optimizer_in_one_item_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(dcp_items, "MAX_ITEM", limit)
    state = {**weights(TWICE), "optimizer": optimizer(TWICE)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(tmp_path / "all"),
            planner=planner,
            no_dist=True,
        )
    refused(
        tmp_path,
        f"over the limit of {limit}" if limit == 1000 else "would still contain the old key",
    )


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": {"module.module.0": 4}},
        {"targets": ["module.module.0"]},
        {"targets": ["module.module"]},
        {"ema": {f"ema_{name}": value for name, value in weights(TWICE).items()}},
        {"lrs": {"k": {(name, "x"): 1 for name in weights(TWICE)}}},
        {"config": '{"module.module.0.weight": 1}'},
        {"config": '["module", "module", "0", "weight"]'},
        {"note": "best: module.module.9.weight=3"},
        {"note": ["model/module.module.0.weight"]},
        {"note": ["module/module/0/weight"]},
        {"note": [r"^module\.module\.0\.weight$"]},
        {"note": [b"a module.module.0.weight"]},
        {"note": "module__module__0"},
        {"note": "module_module_0_weight"},
    ],
    ids=lambda other: repr(other)[:40],
)
def test_a_text_that_holds_an_old_name_stays_so_that_all_do(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    save(tmp_path / "all", {"model": weights(TWICE), **other})
    refused(tmp_path, "old key")


@pytest.mark.parametrize(
    "other",
    [
        {"note": "the module is called module.0.weight, in a submodule.module_list"},
        {"ema": weights("")},
        {"step": 3, "modules": {"module": 1}},
    ],
)
def test_other_texts_are_no_reason_to_stay(tmp_path: Path, other: dict[str, Any]) -> None:
    save(tmp_path / "all", {"model": weights(TWICE), **other})
    before = snapshot(tmp_path)
    assert repair(tmp_path, policy=ONCE).status == 0
    assert set(loaded(tmp_path / "all")["model"]) == set(weights("module."))
    undo(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("policy", "prefix", "other"),
    [
        (DDP, "", {"note": ["0.weight"]}),
        (DDP, "", {"note": ["ema_0.weight"]}),
        (DDP, "", {"note": ["model/0/weight"]}),
        (DDP, "", {"frozen": ["0"]}),
        (BARE, "module.", {"note": ["model/module/0/weight"]}),
        (BARE, "module.", {"note": ["module.9"]}),
        (BARE, "module.", {"note": ["module"]}),
        (BARE, "module._orig_mod.", {"note": ["x._orig_mod"]}),
    ],
)
def test_a_text_that_holds_a_name_with_one_wrapper_or_none(
    tmp_path: Path, policy: Policy, prefix: str, other: dict[str, Any]
) -> None:
    save(tmp_path / "all", {"model": weights(prefix), **other})
    refused(tmp_path, "old key", policy)


def test_a_text_too_long_to_be_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = NameScope(("model",), "state dict", ("0.weight",), (), True)
    old = OldNames([(scope, KeyMap(remove=(), insert=("module",)))])
    text = "a b " * 100
    assert old.in_text(text, is_name=False, is_key=False) is None
    monkeypatch.setattr(plan_dcp, "MAX_SLICES", 100)
    assert old.in_text(text, is_name=False, is_key=False) is not None


def nest(prefix: str) -> dict[str, Any]:
    return {"state": {"model": weights(prefix), "optim": optimizer(prefix)}}


def test_a_model_below_a_key_called_state(tmp_path: Path) -> None:
    save(tmp_path / "all", nest(TWICE))
    assert set(codes(tmp_path)) == {"nested-prefix"}
    assert repair(tmp_path, policy=DDP).status == 0
    save(tmp_path / "want", nest("module."))
    found, want = loaded(tmp_path / "all")["state"], loaded(tmp_path / "want")["state"]
    assert set(found) == {"model", "optim"}
    assert list(found["model"]) == list(want["model"])
    assert list(found["optim"]["state"]) == list(want["optim"]["state"])
    assert found["optim"]["param_groups"] == want["optim"]["param_groups"]


def test_a_model_alone_below_a_key_called_state(tmp_path: Path) -> None:
    save(tmp_path / "all", {"net": {"state": weights(TWICE)}})
    assert codes(tmp_path) == ["nested-prefix"]
    assert repair(tmp_path, policy=ONCE).status == 0
    assert set(loaded(tmp_path / "all")["net"]["state"]) == set(weights("module."))


def test_a_state_that_is_no_optimizers_is_not_renamed(tmp_path: Path) -> None:
    other = {"train": {"state": {"step": 1, "epoch": 2}}}
    save(tmp_path / "all", {"model": weights(""), "optimizer": optimizer(""), **other})
    assert repair(tmp_path, policy=DDP).transaction is not None
    found = loaded(tmp_path / "all")
    assert found["train"] == other["train"]
    assert set(found["model"]) == set(found["optimizer"]["state"]) == set(weights("module."))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"sampler": {"state": {"epoch": 3, "offset": torch.tensor(5)}}},
            "nothing shows that this is a model",
        ),
        (
            {"phases": {"param_groups": [{"params": ["warm.up", "decay"]}]}},
            "no model has 'warm.up'",
        ),
    ],
)
def test_what_may_be_no_names_of_parameters_gets_no_wrapper(
    tmp_path: Path, other: dict[str, Any], reason: str
) -> None:
    save(tmp_path / "all", {"model": weights(TWICE), **other})
    save(tmp_path / "ddp" / "all", {"model": weights(""), **other})
    refused(tmp_path / "ddp", reason, DDP)
    assert repair(tmp_path / "all", policy=ONCE).status == 0


def test_bare_models_below_a_key_called_state_get_no_wrapper(tmp_path: Path) -> None:
    """Nothing tells them from what an optimizer knows of a parameter."""
    save(tmp_path / "all", {"state": {"model": {"weight": torch.ones(2), "bias": torch.ones(2)}}})
    refused(tmp_path, "it is inside an optimizer", DDP)


def test_what_an_optimizer_is() -> None:
    def state(*names: str) -> list[tuple[str | int, ...]]:
        return [("o", "state", name, key) for name in names for key in ("step", "exp_avg")]

    model: list[tuple[str | int, ...]] = [("m", "module.a.w"), ("m", "module.a.b")]
    assert optimizers_in([*state("a.w", "module.a.b"), *model]) == (("o",),)
    assert optimizers_in([*state("c.w"), *model]) == ()
    assert optimizers_in([*state("c.w"), ("o", "param_groups", 0, "lr"), *model]) == (("o",),)
    assert optimizers_in([*state("c.w"), ("o", "param_groups", "fast", "lr"), *model]) == ()
    assert optimizers_in(state("c.w")) == (("o",),)
    assert optimizers_in(state("model", "ema")) == ()
    assert optimizers_in(state("0", "1")) == (("o",),)
    assert optimizers_in([*state("c.w"), ("o", "state", "epoch")]) == ()
    assert optimizers_in([("state", *path) for path in [*state("a.w"), ("o", "param_groups")]]) == (
        ("state", "o"),
    )


def test_a_module_called_state_beside_a_flattened_optimizer(tmp_path: Path) -> None:
    one = {f"{TWICE}state.weight": torch.ones(2), f"{TWICE}head.weight": torch.ones(2)}
    options = {f"param_groups.{name}.lr": 0.1 for name in one}
    save(
        tmp_path / "all",
        {**one, **{f"state.{name}.exp_avg": torch.ones(2) for name in one}, **options},
    )
    refused(
        tmp_path,
        "'state.weight' would no longer be recognized as a key of the model of all/.metadata",
        BARE,
    )
    assert repair(tmp_path, policy=ONCE).status == 0


def test_a_module_called_as_the_groups_of_an_optimizer(tmp_path: Path) -> None:
    one = {f"{TWICE}param_groups.weight": torch.ones(2), f"{TWICE}head.weight": torch.ones(2)}
    save(tmp_path / "all", {"model": one})
    refused(
        tmp_path, "'param_groups.weight' would no longer be recognized as a key of ['model']", BARE
    )
    assert repair(tmp_path, policy=ONCE).status == 0


def test_a_parameter_called_as_a_number(tmp_path: Path) -> None:
    name = f"{TWICE}0"
    groups = [{"params": [name], "lr": 0.1}]
    state = {"state": {name: {"exp_avg": torch.ones(2)}}, "param_groups": groups}
    save(
        tmp_path / "all",
        {"model": {name: torch.ones(2), f"{TWICE}w": torch.ones(2)}, "optimizer": state},
    )
    refused(tmp_path, "would look like the parameter number of an optimizer", BARE)
    assert repair(tmp_path, policy=ONCE).status == 0


def test_names_of_another_model_are_no_old_names() -> None:
    """The optimizer alone is wrong: its old names are how right ones end."""
    names = ("0.weight", "bias")
    bare = NameScope(("optimizer", "state"), "optimizer state", names, (), False)
    wrapped = NameScope(
        bare.path, bare.kind, tuple(f"module.{name}" for name in names), ("module",), False
    )
    to_ddp = OldNames([(bare, KeyMap(remove=(), insert=("module",)))])
    to_bare = OldNames([(wrapped, KeyMap(remove=("module",)))])
    for old, text, is_name, found in (
        (to_ddp, "module.0.weight", True, None),
        (to_ddp, "module.net.0.weight", True, None),
        (to_ddp, "x.module.0.weight", False, None),
        (to_ddp, "net.0.weight", False, "0.weight"),
        (to_ddp, "ema_0.weight", True, "0.weight"),
        (to_ddp, "10.weights", False, None),
        (to_ddp, "bias_correction", False, None),
        (to_ddp, "a bias", False, "bias"),
        (to_bare, "module.other.weight", True, None),
        (to_bare, "module.other.weight", False, "module."),
        (to_bare, "ema_module.0.weight", True, "module.0.weight"),
        (to_bare, "submodule.0.x", False, None),
        (to_bare, "0.weight", True, None),
    ):
        assert old.in_text(text, is_name=is_name, is_key=True) == found, text


def test_undo_of_a_repair_that_was_killed_before_it_began(tmp_path: Path) -> None:
    save(tmp_path / "all", {"model": weights(TWICE), "optimizer": flattened(TWICE)})
    before = snapshot(tmp_path)
    child = os.fork()
    if child == 0:
        from ckptfix.storage import folder_backend

        folder_backend.__dict__["Workspace"] = lambda *_: os._exit(9)
        repair(tmp_path, policy=ONCE)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / ".ckptfix").is_dir()
    with pytest.raises(UsageError, match=r"there is no repair to undo$"):
        undo(tmp_path)
    assert {
        path: one for path, one in snapshot(tmp_path).items() if ".ckptfix" not in path
    } == before

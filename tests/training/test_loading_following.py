"""Optimizers go where their models went, schedulers where their optimizers went: by the manifest."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import ckptfix
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, Status
from ckptfix.training.loading.load_state import load_state_tolerant
from fixtures.digests import state_digest
from tests.training.loading_runs import Run, reset, seeded


class Named(nn.Module):  # type: ignore[misc]
    """A model of one layer, under a name of its class."""

    layer, width = "", 3

    def __init__(self) -> None:
        super().__init__()
        self.add_module(self.layer, nn.Linear(4, self.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.layer)(x)


class Left(Named):
    """Shapes as in Right, under another name: models are told apart, states of their optimizers are
    not.
    """

    layer = "left"


class Right(Named):
    layer = "right"


class Wide(Named):
    """Other shapes, the same number of parameters."""

    layer, width = "wide", 9


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for model in models for parameter in model.parameters()], lr=0.1
    )


def step_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)


def prepared(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any] = (),
    *,
    guarded: bool = True,
) -> Run:
    """Prepare these, in this order, with an Accelerator of ckptfix, which records a manifest, or of
    accelerate.
    """
    kind = ckptfix.Accelerator if guarded else Accelerator
    run = Run(kind(cpu=True), list(models), list(optimizers), list(schedulers))
    run.accelerator.prepare(*models, *optimizers, *schedulers)
    return run


def run_of(models: Sequence[nn.Module], optimizers: Sequence[Any] = (), *, guarded: bool) -> Run:
    """Prepare models, each with an optimizer or with these, and a scheduler for each optimizer."""
    own = list(optimizers) or [adam(model) for model in models]
    return prepared(models, own, [step_of(one) for one in own], guarded=guarded)


def manifest_of(run: Run, folder: Path) -> Manifest:
    run.accelerator.save_state(str(folder))
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_the_manifest_says_whose_parameters_an_optimizer_holds(tmp_path: Path) -> None:
    one, two, three = seeded(Left, 1), seeded(Right, 2), seeded(Left, 3)
    optimizers = [
        adam(two),
        adam(three, one),
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
    ]
    schedulers = [step_of(optimizers[1]), step_of(optimizers[0])]
    manifest = manifest_of(prepared([one, two, three], optimizers, schedulers), tmp_path / "c")
    assert [entry.models for entry in manifest.optimizers] == [(1,), (0, 2), ()]
    assert [entry.optimizer for entry in manifest.schedulers] == [1, 0]
    assert {entry.models for entry in (*manifest.models, *manifest.schedulers)} == {()}


def test_wrappers_do_not_hide_what_is_held(tmp_path: Path) -> None:
    model = seeded(Left, 1)
    inner = adam(model)
    scheduler = step_of(inner)
    run = prepared([torch.compile(model, backend="eager")], [inner], [scheduler])
    manifest = manifest_of(run, tmp_path / "c")
    assert (manifest.optimizers[0].models, manifest.schedulers[0].optimizer) == ((0,), 0)


def test_a_hook_that_writes_models_itself_leaves_nothing_to_number(tmp_path: Path) -> None:
    run = prepared([seeded(Left, 1), other := seeded(Right, 2)], [adam(other)])
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    manifest = manifest_of(run, tmp_path / "c")  # the second model is model.safetensors now
    assert [entry.models for entry in manifest.optimizers] == [()]
    assert {entry.type for entry in manifest.models} == {""}


def saved(
    folder: Path, *, guarded: bool, kinds: Sequence[type[nn.Module]] = (Left, Right)
) -> dict[type, list[Any]]:
    """Save models, each with an optimizer and a scheduler; return by class what each of the three
    shall be.
    """
    run = run_of([seeded(kind, 1 + at) for at, kind in enumerate(kinds)], guarded=guarded)
    run.train()
    for number, scheduler in enumerate(run.schedulers):
        scheduler.last_epoch = 10 + number
    run.accelerator.save_state(str(folder))
    wanted = {kind: seen(run, index, index) for index, kind in enumerate(kinds)}
    reset()
    return wanted


def seen(run: Run, model: int, states: int) -> list[Any]:
    """Return a model, and an optimizer with its scheduler."""
    return [
        state_digest(run.models[model].state_dict()),
        state_digest(run.optimizers[states].state_dict()),
        run.schedulers[states].state_dict(),
    ]


def assert_seen(run: Run, *wanted: Any) -> None:
    for number, values in enumerate(wanted):
        assert seen(run, number, number) == values


def fresh(*kinds: type[nn.Module], guarded: bool = False) -> Run:
    return run_of([seeded(kind, 11 + at) for at, kind in enumerate(kinds)], guarded=guarded)


OTHER_ORDER = "the models of this run are in a different order than in the folder"


def refused(run: Run, folder: Path, match: str, **policy: Any) -> str:
    before = run.digest()
    with pytest.raises(LoadError, match=match) as caught:
        load_state_tolerant(run.accelerator, folder, policy=LoadPolicy(**policy))
    assert run.digest() == before
    assert not caught.value.modified
    return str(caught.value)


def test_models_in_another_order_take_optimizers_and_schedulers_along(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", guarded=True)
    run = fresh(Right, Left)
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert_seen(run, wanted[Right], wanted[Left])
    assert {component.status for component in report.of("optimizers")} == {Status.ADAPTED}
    first = report.of("optimizers")[0]
    assert first.files == ("optimizer_1.bin",)
    assert "moved from another position, with models 0 (Right)" in first.reason
    assert "with optimizers 0 (AdamW)" in report.of("schedulers")[0].reason
    assert not any(component.by_position for component in report)


def test_classes_of_one_name_are_told_apart_by_their_modules(tmp_path: Path) -> None:
    student, teacher = (
        type("Net", (Left,), {"__module__": name}) for name in ("student", "teacher")
    )
    wanted = saved(tmp_path / "c", guarded=True, kinds=(student, teacher))
    run = fresh(teacher, student)
    load_state_tolerant(run.accelerator, tmp_path / "c")
    assert_seen(run, wanted[teacher], wanted[student])


@pytest.mark.parametrize("guarded", [True, False])
def test_the_same_order_is_no_adaptation(tmp_path: Path, guarded: bool) -> None:
    wanted = saved(tmp_path / "c", guarded=guarded)
    run = fresh(Left, Right)
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert_seen(run, wanted[Left], wanted[Right])
    assert {component.status for component in report} == {Status.RESTORED}


def test_the_manifest_follows_optimizers_that_alone_are_in_another_order(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", guarded=True)
    models = [seeded(Left, 11), seeded(Right, 12)]
    run = run_of(models, [adam(models[1]), adam(models[0])], guarded=False)
    load_state_tolerant(run.accelerator, tmp_path / "c")
    assert seen(run, 0, 1) == wanted[Left]
    assert seen(run, 1, 0) == wanted[Right]


def test_an_optimizer_of_several_models(tmp_path: Path) -> None:
    kinds = (Left, Right, Left, Right)

    def run(order: Sequence[int]) -> tuple[Run, list[Any]]:
        models = [seeded(kind, index) for index, kind in enumerate(kinds)]
        both = [adam(models[0], models[1]), adam(models[2], models[3])]
        return prepared([models[index] for index in order], [both[0], both[1]]), both

    here, both = run((0, 1, 2, 3))
    here.train()
    here.accelerator.save_state(str(tmp_path / "c"))
    wanted = [state_digest(one.state_dict()) for one in both]
    reset()
    # Left 0 and Left 2 look alike and go by position: what was the second pair is the first one
    # here.
    here, both = run((2, 3, 0, 1))
    load_state_tolerant(here.accelerator, tmp_path / "c")
    assert [state_digest(one.state_dict()) for one in both] == wanted[::-1]


@pytest.mark.parametrize("frozen", [1, 2])
def test_what_cannot_be_followed_is_refused_and_not_given_by_position(
    tmp_path: Path, frozen: int
) -> None:
    kinds: tuple[type[nn.Module], ...] = (Left, Right, Wide)

    def run(*order: int) -> Run:
        reset()
        models = [seeded(kinds[index], index) for index in order]
        optimizers = [adam(model) for model in models if not isinstance(model, kinds[frozen])]
        return run_of(models, optimizers, guarded=False)

    # Nothing was trained, so no shapes tell the states apart.
    run(0, 1, 2).accelerator.save_state(str(tmp_path / "c"))
    assert load_state_tolerant(run(0, 1, 2).accelerator, tmp_path / "c").is_complete
    text = refused(run(2, 1, 0), tmp_path / "c", OTHER_ORDER)
    assert "optimizer.bin: " in text
    assert "optimizer_1.bin: " in text
    assert "next: prepare the models in the same order as the run that saved" in text
    here = run(2, 1, 0)
    policy = LoadPolicy(optimizers="warn", schedulers="warn")  # type: ignore[arg-type]
    said = "in a different order than|which is loaded into no object of this run"
    with pytest.warns(UserWarning, match=said):
        report = load_state_tolerant(here.accelerator, tmp_path / "c", policy=policy)
    for part in ("optimizers", "schedulers"):
        assert [component.status for component in report.of(part)[:2]] == [Status.FAILED] * 2
    assert not report.is_complete


def test_schedulers_are_not_given_by_position_when_their_optimizers_are_ignored(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "c", guarded=False)
    said = rf"schedulers 0 .*scheduler\.bin: {OTHER_ORDER}"
    refused(fresh(Right, Left), tmp_path / "c", said, optimizers="ignore")


def test_a_model_that_the_run_lacks_takes_its_optimizer_along(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", guarded=True)
    run = fresh(Right)
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert_seen(run, wanted[Right])
    left = [component.files[0] for component in report.with_status("skipped")]
    assert left == ["model.safetensors", "optimizer.bin", "scheduler.bin"]


def test_doubles_in_the_folder_do_not_shift_what_belongs_together(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", guarded=False, kinds=(Left, Right))
    folder = tmp_path / "c"
    for stem, suffix in (("model", "safetensors"), ("optimizer", "bin"), ("scheduler", "bin")):
        (folder / f"{stem}_1.{suffix}").rename(folder / f"{stem}_2.{suffix}")
        shutil.copy(folder / f"{stem}.{suffix}", folder / f"{stem}_1.{suffix}")
        shutil.copy(folder / f"{stem}_2.{suffix}", folder / f"{stem}_3.{suffix}")
    run = fresh(Left, Right)
    report = load_state_tolerant(run.accelerator, folder)
    assert_seen(run, wanted[Left], wanted[Right])
    skipped = {component.files[0]: component.reason for component in report.with_status("skipped")}
    assert skipped["optimizer_1.bin"] == "duplicate of optimizer.bin"
    assert all(component.is_duplicate for component in report.with_status("skipped"))


def test_doubles_in_the_folder_are_no_other_order(tmp_path: Path) -> None:
    def run() -> Run:
        models = [seeded(Left, 1), seeded(Right, 2), seeded(Wide, 3)]
        return prepared(models, [adam(models[0]), adam(models[2])], guarded=False)

    run().accelerator.save_state(str(tmp_path / "c"))
    for number in (2, 1):
        path = tmp_path / "c" / f"model_{number}.safetensors"
        path.rename(tmp_path / "c" / f"model_{number + 1}.safetensors")
    shutil.copy(tmp_path / "c" / "model.safetensors", tmp_path / "c" / "model_1.safetensors")
    reset()
    report = load_state_tolerant(run().accelerator, tmp_path / "c")
    assert {component.status for component in report.of("optimizers")} == {Status.RESTORED}


def test_an_optimizer_whose_parameters_are_no_models_cannot_be_followed(tmp_path: Path) -> None:
    saved(tmp_path / "c", guarded=True)
    models = [seeded(Right, 11), seeded(Left, 12)]
    loose = [nn.ParameterList([one.clone() for one in model.parameters()]) for model in models]
    run = prepared(models, [adam(one) for one in loose], guarded=False)
    said = rf"optimizers 0 .*optimizer\.bin: {OTHER_ORDER}"
    refused(run, tmp_path / "c", said, schedulers="ignore")


def test_a_model_that_a_hook_loads_leaves_the_others_where_they_were(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", guarded=False)
    run = fresh(Left, Right)
    run.accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert seen(run, 0, 0)[1:] == wanted[Left][1:]
    assert seen(run, 1, 1) == wanted[Right]
    by_index = {one.index: one for one in report.of("models") if one.index is not None}
    assert "by a hook" in by_index[0].reason
    assert by_index[1].files == ("model_1.safetensors",)
    assert {component.status for component in report.of("optimizers")} == {Status.RESTORED}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("optimizer_1.bin", r"optimizers 1 \(AdamW\)"),
        ("random_states_0.pkl", r"rng: .*random_states_0\.pkl"),
    ],
)
def test_hooks_that_load_models_themselves_see_nothing_when_a_state_is_not_there(
    tmp_path: Path, name: str, match: str
) -> None:
    saved(tmp_path / "c", guarded=False)
    run = fresh(Left, Right)
    calls: list[str] = []
    run.accelerator.register_load_state_pre_hook(lambda models, folder: calls.append(folder))
    (tmp_path / "c" / name).write_bytes(b"no file of torch")
    refused(run, tmp_path / "c", match, rng="require")
    assert calls == []


def test_an_optimizer_without_any_state_is_told_by_the_shapes_in_the_manifest(
    tmp_path: Path,
) -> None:
    def run(*kinds: type[nn.Module], guarded: bool = False) -> Run:
        reset()
        models = [seeded(kind, number) for number, kind in enumerate(kinds)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return prepared(models, optimizers, guarded=guarded)

    saving = run(Left, Wide, guarded=True)
    for number, optimizer in enumerate(saving.optimizers):
        optimizer.param_groups[0]["lr"] = number + 1.0
    saving.accelerator.save_state(str(tmp_path / "c"))
    here = run(Wide, Left)
    policy = LoadPolicy(models="ignore")  # type: ignore[arg-type]
    load_state_tolerant(here.accelerator, tmp_path / "c", policy=policy)
    assert [optimizer.param_groups[0]["lr"] for optimizer in here.optimizers] == [2.0, 1.0]
    said = "its parameter shapes differ from those of this run"
    refused(run(Wide, Wide), tmp_path / "c", said, models="ignore")


def test_a_manifest_of_files_that_were_renumbered_since_is_not_believed(tmp_path: Path) -> None:
    models = [seeded(Left, 1), seeded(Right, 2)]
    optimizers = [adam(model) for model in models]
    run = prepared(models, optimizers)
    run.train()
    run.accelerator._models.insert(1, models[0])
    manifest = manifest_of(run, tmp_path / "c")
    assert [entry.models for entry in manifest.optimizers] == [(0, 1), (2,)]
    wanted = run.digest()["optimizers"]
    reset()
    (tmp_path / "c" / "model_2.safetensors").replace(
        tmp_path / "c" / "model_1.safetensors"
    )  # as a repair does
    run = prepared([seeded(Left, 11), seeded(Right, 12)], [])
    run.optimizers = [adam(model) for model in run.models]
    run.accelerator.prepare(*run.optimizers)
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert {component.status for component in report} == {Status.RESTORED}
    assert run.digest()["optimizers"] == wanted

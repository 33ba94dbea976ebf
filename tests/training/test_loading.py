"""load_state_tolerant in one process: what is on disk arrives, however it was saved, and the disk
stays as it is.
"""

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, Status
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
from fixtures.models import ModuleOnly, Tied, TwoLayer
from tests.training.loading_runs import (
    FIXTURES,
    Loader,
    Run,
    files_of,
    make_run,
    reset,
    run_of_fixture,
    seeded,
)

SCENARIOS = sorted(
    path.parent
    for path in FIXTURES.glob("accelerate-*/*/run.json")
    if any((path.parent / "checkpoint").glob("random_states_*"))
)


@pytest.mark.parametrize("fixture", SCENARIOS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_folder_of_a_real_run_arrives(fixture: Path) -> None:
    run, wanted = run_of_fixture(fixture)
    before = files_of(fixture / "checkpoint")
    report = load_state_tolerant(run.accelerator, fixture / "checkpoint")
    have = run.digest()
    assert {part: have[part] for part in wanted} == wanted
    assert report.is_complete
    assert files_of(fixture / "checkpoint") == before


def pair(seed: int) -> list[nn.Module]:
    """Return models of two architectures."""
    return [seeded(TwoLayer, seed), seeded(lambda: nn.Linear(5, 3), seed + 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A save of a run with one of everything."""
    run = make_run(*pair(1), scheduler=True, custom=2)
    run.train()
    run.custom[1].samples = 7
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    return tmp_path / "c"


def fresh() -> Run:
    return make_run(*pair(8), scheduler=True, custom=2)


def of_stock(folder: Path) -> dict[str, Any]:
    """Return what stock accelerate loads from a folder."""
    run = fresh()
    run.accelerator.load_state(str(folder))
    reset()
    return run.digest()


def test_a_healthy_folder_gives_what_stock_load_state_gives(folder: Path) -> None:
    run = fresh()
    run.accelerator.load_state(str(folder))
    wanted = run.digest()
    reset()
    run = fresh()
    random.seed(77)
    numpy.random.seed(77)
    torch.manual_seed(77)
    report = load_state_tolerant(run.accelerator, folder)
    assert run.digest() == wanted
    assert {component.status for component in report} == {Status.RESTORED}
    assert report.is_complete


def test_state_dict_is_called_once_a_model(tmp_path: Path) -> None:
    class Counted(nn.Linear):  # type: ignore[misc]
        calls = 0

        def state_dict(self, *args: object, **kwargs: object) -> object:
            Counted.calls += 1
            return super().state_dict(*args, **kwargs)

    run = make_run(Counted(3, 2))
    run.accelerator.save_state(str(tmp_path / "c"))
    Counted.calls = 0
    load_state_tolerant(run.accelerator, tmp_path / "c")
    assert Counted.calls == 1


def test_a_registry_that_holds_a_model_twice_is_loaded_once() -> None:
    fixture = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors"
    run, wanted = run_of_fixture(fixture)
    run.accelerator._models.append(nn.parallel.DataParallel(run.models[0]))
    run.accelerator._optimizers.append(run.accelerator._optimizers[0])
    load_state_tolerant(run.accelerator, fixture / "checkpoint")
    assert run.digest()["models"] == wanted["models"]
    assert run.digest()["optimizers"] == wanted["optimizers"]


@pytest.mark.parametrize("wrap", ["compile", "data parallel"])
def test_the_models_own_wrappers_are_put_back(wrap: str) -> None:
    fixture = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors"
    model = TwoLayer()
    wrapped = torch.compile(model, backend="eager") if wrap == "compile" else nn.DataParallel(model)
    accelerator = Accelerator(cpu=True)
    accelerator._models.append(wrapped)
    report = load_state_tolerant(accelerator, fixture / "checkpoint")
    _, wanted = run_of_fixture(fixture)
    assert Run(accelerator, [model]).digest()["models"] == wanted["models"]
    assert report.of("models")[0].status is Status.ADAPTED or "double" in str(report)


def test_private_wrappers_inside_names_are_passed_over(tmp_path: Path) -> None:
    inner = TwoLayer()
    inner.fc1 = torch.compile(inner.fc1, backend="eager")  # names fc1._orig_mod.weight
    run = make_run(inner)
    run.accelerator.save_state(str(tmp_path / "c"))
    wanted = [inner.fc1._orig_mod.weight.clone(), inner.fc2.weight.clone()]
    reset()
    plain = make_run(seeded(TwoLayer, 4))
    report = load_state_tolerant(plain.accelerator, tmp_path / "c")
    assert torch.equal(plain.models[0].fc1.weight, wanted[0])
    assert torch.equal(plain.models[0].fc2.weight, wanted[1])
    assert report.of("models")[0].status is Status.ADAPTED


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "DataParallel"])
def test_versions_of_modules_follow_their_names(wrapped: bool) -> None:
    folder = FIXTURES / "accelerate-1.15.0" / "lone-nested-bin" / "checkpoint"
    state = torch.load(folder / "model.bin")
    assert "module.module.fc1" in state._metadata
    model = seeded(TwoLayer, 3)
    seen: list[dict[str, int]] = []
    model.fc1._register_load_state_dict_pre_hook(
        lambda state, prefix, metadata, *rest: seen.append(metadata)
    )
    load_checkpoint_tolerant(nn.DataParallel(model) if wrapped else model, folder / "model.bin")
    assert seen == [{"version": 1}]


def test_models_and_optimizers_are_told_apart_by_their_shapes_whatever_their_order(
    folder: Path,
) -> None:
    run = make_run(*pair(8)[::-1])
    policy = LoadPolicy(schedulers="ignore", custom="ignore")  # type: ignore[arg-type]
    report = load_state_tolerant(run.accelerator, folder, policy=policy)
    found = run.digest()
    reset()
    wanted = of_stock(folder)
    for part in ("models", "optimizers"):
        assert found[part] == wanted[part][::-1]
    assert [component.status for component in report.of("models")[:2]] == [Status.ADAPTED] * 2
    assert not any(component.by_position for component in report)


def test_equal_architectures_go_by_position_and_the_report_says_so() -> None:
    fixture = FIXTURES / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors"
    run, wanted = run_of_fixture(fixture)
    report = load_state_tolerant(run.accelerator, fixture / "checkpoint")
    assert run.digest()["models"] == wanted["models"]
    models = report.of("models")
    assert [component.by_position for component in models] == [True, True, False]
    assert models[1].files == ("model_2.safetensors",)
    assert "by position" in str(models[1])
    assert "model_1.safetensors skipped" in str(models[2])


def test_a_model_with_a_child_called_module_and_the_plain_one_are_two(tmp_path: Path) -> None:
    plain = seeded(TwoLayer, 3)
    own = ModuleOnly()
    # Equal bytes under module.: what a double looks like.
    own.module.load_state_dict(plain.state_dict())
    run = make_run(plain, own, optimizer=None)
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    again = make_run(seeded(ModuleOnly, 5), seeded(TwoLayer, 6), optimizer=None)
    report = load_state_tolerant(again.accelerator, tmp_path / "c")
    assert torch.equal(again.models[0].module.fc1.weight, plain.fc1.weight)
    assert torch.equal(again.models[1].fc1.weight, plain.fc1.weight)
    assert [component.files for component in report.of("models")] == [
        ("model_1.safetensors",),
        ("model.safetensors",),
    ]


def test_tied_weights_that_the_file_lacks_are_filled_by_their_ties(tmp_path: Path) -> None:
    run = make_run(seeded(Tied, 1), optimizer=None)
    run.accelerator.save_state(str(tmp_path / "c"))
    wanted = run.models[0].embed.weight.clone()
    reset()
    untied = seeded(Tied, 2)
    untied.lm_head.weight = nn.Parameter(torch.zeros(11, 6))
    with pytest.raises(LoadError, match=r"lm_head\.weight|embed\.weight"):
        load_state_tolerant(make_run(untied, optimizer=None).accelerator, tmp_path / "c")
    reset()
    tied = make_run(seeded(Tied, 2), optimizer=None)
    load_state_tolerant(tied.accelerator, tmp_path / "c")
    assert torch.equal(tied.models[0].lm_head.weight, wanted)


class Views(nn.Module):  # type: ignore[misc]
    """Two halves of one buffer, and with ``whole`` the buffer itself: a storage is shared, not
    every byte.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        base = torch.zeros(8)
        self.register_buffer("first", base[:4])
        self.register_buffer("second", base[4:])
        if whole:
            self.register_buffer("whole", base)


def test_views_that_share_a_storage_are_not_tied_where_no_byte_is_shared(tmp_path: Path) -> None:
    save_file({"first": torch.ones(4)}, tmp_path / "m.safetensors")
    with pytest.raises(LoadError, match=r"1 key is missing from the file: 'second'"):
        load_checkpoint_tolerant(Views(whole=False), tmp_path / "m.safetensors")
    save_file({"whole": torch.arange(8.0)}, tmp_path / "m.safetensors")
    model = Views(whole=True)
    load_checkpoint_tolerant(model, tmp_path / "m.safetensors")
    assert model.second.tolist() == [4, 5, 6, 7]


def test_custom_objects_come_last_as_in_stock(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(3)

    def accelerator() -> Any:
        reset()
        made = make_run(seeded(TwoLayer, 1))
        made.accelerator.register_for_checkpointing(Drawing())
        return made.accelerator

    accelerator().save_state(str(tmp_path / "c"))
    accelerator().load_state(str(tmp_path / "c"))
    wanted = torch.get_rng_state()
    load_state_tolerant(accelerator(), tmp_path / "c")
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_float_dtype_is_converted_and_said(tmp_path: Path) -> None:
    make_run(nn.Linear(3, 2), optimizer=None).accelerator.save_state(str(tmp_path / "c"))
    reset()
    run = make_run(nn.Linear(3, 2).to(torch.bfloat16), optimizer=None)
    report = load_state_tolerant(run.accelerator, tmp_path / "c")
    assert report.of("models")[0].status is Status.ADAPTED
    assert "float32 to bfloat16" in str(report)


def test_sharded_weights(tmp_path: Path) -> None:
    run = make_run(seeded(TwoLayer, 1))
    run.train()
    run.accelerator.save_state(str(tmp_path / "c"))
    (tmp_path / "c" / "model.safetensors").unlink()
    run.accelerator.save_model(run.models[0], tmp_path / "c", max_shard_size=200)
    wanted = run.digest()["models"]
    reset()
    again = make_run(seeded(TwoLayer, 2))
    report = load_state_tolerant(again.accelerator, tmp_path / "c")
    assert again.digest()["models"] == wanted
    assert len(report.of("models")[0].files) > 1
    shard = sorted((tmp_path / "c").glob("*-of-*"))[0]
    shard.unlink()
    before = again.digest()
    with pytest.raises(LoadError, match=shard.name):
        load_state_tolerant(again.accelerator, tmp_path / "c")
    assert again.digest() == before


def test_of_two_families_the_one_that_stock_takes(folder: Path) -> None:
    torch.save(seeded(TwoLayer, 77).state_dict(), folder / "pytorch_model.bin")
    wanted = of_stock(folder)
    run = fresh()
    load_state_tolerant(run.accelerator, folder)
    assert run.digest()["models"] == wanted["models"]


def test_fewer_ranks_saved_than_load(folder: Path) -> None:
    (folder / "random_states_0.pkl").rename(folder / "random_states_3.pkl")
    run = fresh()
    with pytest.warns(
        UserWarning,
        match=r"random_states_0\.pkl is missing: 1 rank saved random states, this run has 1 ",
    ):
        report = load_state_tolerant(run.accelerator, folder)
    assert report.of("rng")[0].status is Status.SKIPPED
    assert report.of("step")[0].status is Status.ADAPTED
    assert run.accelerator.step == 2
    assert not report.is_complete


def test_a_rank_for_which_migrate_wrote_the_step_alone(folder: Path) -> None:
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    run = fresh()
    with pytest.warns(UserWarning, match=r"random_states_0\.pkl contains only the step"):
        report = load_state_tolerant(run.accelerator, folder)
    assert report.of("rng")[0].status is Status.SKIPPED
    assert report.of("step")[0].status is Status.RESTORED
    assert run.accelerator.step == 2


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The names of files of random states that Python opens, once each time."""
    names: list[str] = []
    OPENINGS.append(names)
    yield names
    OPENINGS.remove(names)


OPENINGS: list[list[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and OPENINGS and "random_states" in (name := Path(str(arguments[0])).name):
        OPENINGS[-1].append(name)


sys.addaudithook(_note)  # a hook stays for as long as the process lives


@pytest.fixture
def of_many_ranks(folder: Path) -> Path:
    for rank in range(1, 50):
        shutil.copy(folder / "random_states_0.pkl", folder / f"random_states_{rank}.pkl")
    return folder


def test_a_rank_opens_its_own_random_states_alone(of_many_ranks: Path, opened: list[str]) -> None:
    run = fresh()
    opened.clear()
    report = load_state_tolerant(run.accelerator, of_many_ranks)
    assert set(opened) == {"random_states_0.pkl"}
    assert report.is_complete


@pytest.mark.parametrize("own", ["missing", "damaged"])
def test_a_rank_without_random_states_opens_one_other_for_the_step(
    of_many_ranks: Path, opened: list[str], own: str
) -> None:
    folder = of_many_ranks
    (folder / "random_states_0.pkl").unlink()
    if own == "damaged":
        (folder / "random_states_0.pkl").write_bytes(b"no pickle")
    run = fresh()
    opened.clear()
    with pytest.warns(UserWarning, match="rng"):
        report = load_state_tolerant(run.accelerator, folder)
    assert set(opened) - {"random_states_0.pkl"} == {"random_states_1.pkl"}
    assert run.accelerator.step == 2
    if own == "missing":
        assert "49 ranks saved random states, this run has 1 rank" in report.of("rng")[0].reason
    opened.clear()
    load_state_tolerant(run.accelerator, folder, policy=LoadPolicy(rng="ignore", step="ignore"))  # type: ignore[arg-type]
    assert opened == []


def test_states_without_a_step_send_no_rank_to_all_others(
    of_many_ranks: Path, opened: list[str]
) -> None:
    for path in of_many_ranks.glob("random_states_*"):
        # As no version of accelerate since 1.0 saves them.
        torch.save({"random_state": random.getstate()}, path)
    run = fresh()
    opened.clear()
    with pytest.warns(UserWarning, match="rng failed|step"):
        load_state_tolerant(run.accelerator, of_many_ranks)
    assert set(opened) == {"random_states_0.pkl"}


def test_a_folder_with_nothing_but_the_random_states_of_another_rank(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_state(str(tmp_path / "c"))
    (tmp_path / "c" / "random_states_0.pkl").rename(tmp_path / "c" / "random_states_5.pkl")
    with pytest.warns(UserWarning, match=r"random_states_0\.pkl is missing: 1 rank saved"):
        report = load_state_tolerant(Accelerator(cpu=True), tmp_path / "c")
    assert report.of("step")[0].files == ("random_states_5.pkl",)


def test_missing_and_extra_components_by_the_policys_word(folder: Path) -> None:
    (folder / "scheduler.bin").unlink()
    (folder / "scheduler_1.bin").unlink()
    run = make_run(*pair(8), scheduler=True)
    before = run.digest()
    with pytest.raises(LoadError, match=r"schedulers 0 \(StepLR\)"):
        load_state_tolerant(run.accelerator, folder)
    assert run.digest() == before
    with pytest.warns(UserWarning, match="schedulers") as seen:
        report = load_state_tolerant(run.accelerator, folder, policy=LoadPolicy(schedulers="warn"))  # type: ignore[arg-type]
    assert len(seen) == 2
    assert run.digest()["schedulers"] == before["schedulers"]
    assert run.digest()["models"] != before["models"]
    assert [component.files[0] for component in report.of("custom")] == [
        "custom_checkpoint_0.pkl",
        "custom_checkpoint_1.pkl",
    ]


def test_ignored_parts_are_left_alone(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(b"no file of torch")
    run = fresh()
    before = run.digest()
    report = load_state_tolerant(
        run.accelerator,
        folder,
        policy=LoadPolicy(optimizers="ignore", rng="ignore", step="ignore"),  # type: ignore[arg-type]
    )
    after = run.digest()
    assert [after[part] == before[part] for part in ("optimizers", "random", "step", "models")] == [
        True,
        True,
        True,
        False,
    ]
    assert {component.status for component in report.of("optimizers")} == {Status.SKIPPED}


def test_a_hook_that_takes_the_models_loads_them_itself(folder: Path) -> None:
    wanted = of_stock(folder)
    run = fresh()
    seen = []

    def hook(models: list[nn.Module], path: str) -> None:
        seen.append(path)
        models.pop(0)

    run.accelerator.register_load_state_pre_hook(hook)
    # What such a script saves.
    (folder / "model_1.safetensors").replace(folder / "model.safetensors")
    before = run.digest()["models"][0]
    report = load_state_tolerant(run.accelerator, folder)
    assert seen == [str(folder)]
    assert run.digest()["models"] == [before, wanted["models"][1]]
    assert "by a hook" in str(report.of("models"))


def test_what_a_hook_did_to_the_models_is_taken_back_when_the_load_fails(folder: Path) -> None:
    run = fresh()

    def hook(models: list[nn.Module], path: str) -> None:
        with torch.no_grad():
            models[0].fc1.weight.fill_(3.0)
        models[1].weight = nn.Parameter(torch.zeros(1, 1))  # fits nothing

    run.accelerator.register_load_state_pre_hook(hook)
    before = run.digest()
    with pytest.raises(
        LoadError, match=r"'weight' has shape \[3, 5\] in the file, \[1, 1\] in the model"
    ):
        load_state_tolerant(run.accelerator, folder)
    assert run.digest() == before


def test_scaler_and_dataloaders_as_stock(tmp_path: Path) -> None:
    def run() -> tuple[Any, list[Loader]]:
        reset()
        accelerator = make_run(seeded(TwoLayer, 1)).accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loaders = [Loader(), Loader()]
        accelerator._dataloaders += loaders
        return accelerator, loaders

    saving, loaders = run()
    loaders[1].state = {"batches": 5, "inner": {"position": [1, 2]}}
    saving.scaler.load_state_dict(saving.scaler.state_dict() | {"scale": 3.0})
    saving.save_state(str(tmp_path / "c"))
    stock, of_stock = run()
    stock.load_state(str(tmp_path / "c"))
    wanted = stock.scaler.state_dict(), [loader.state for loader in of_stock]
    here, loaders = run()
    report = load_state_tolerant(here, tmp_path / "c")
    assert (here.scaler.state_dict(), [loader.state for loader in loaders]) == wanted
    assert wanted[0]["scale"] == 3.0
    parts = [component.part.value for component in report]
    assert parts[2:5] == ["dataloaders", "dataloaders", "scaler"]
    (tmp_path / "c" / "dl_state_dict_1.bin").unlink()
    (tmp_path / "c" / "scaler.pt").unlink()
    with pytest.raises(LoadError, match=r"scaler: .*scaler\.pt is missing"):
        load_state_tolerant(here, tmp_path / "c")
    with pytest.warns(UserWarning, match=r"dl_state_dict_1\.bin is missing"):
        load_state_tolerant(here, tmp_path / "c", policy=LoadPolicy(scaler="ignore"))  # type: ignore[arg-type]


def numbered(folder: Path, kind: type = Accelerator, **config: Any) -> Any:
    """Return an accelerator with one model, and with automatic names."""
    reset()
    options = {"automatic_checkpoint_naming": True, **config}
    project = ProjectConfiguration(str(folder), **options)
    accelerator = kind(cpu=True, project_config=project)
    return make_run(nn.Linear(2, 2), accelerator=accelerator).accelerator


def test_automatic_naming_hints_at_the_checkpoints(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    accelerator.save_state()
    with pytest.raises(LoadError, match="checkpoint_0"):
        load_state_tolerant(accelerator, tmp_path / "checkpoints")
    assert load_state_tolerant(accelerator, tmp_path / "checkpoints" / "checkpoint_0").is_complete


@pytest.mark.parametrize(
    ("kind", "loaded"),
    [(Accelerator, 0), (ckptfix.Accelerator, 2)],
    ids=["stock, an older one", "guarded, the newest"],
)
def test_numbers_go_on_after_a_load(tmp_path: Path, kind: type, loaded: int) -> None:
    saving = numbered(tmp_path, kind)
    for _ in range(3):
        saving.save_state()
    again = numbered(tmp_path, kind)
    broken = tmp_path / "checkpoints" / "broken"
    broken.mkdir()
    with pytest.raises(LoadError):
        load_state_tolerant(again, broken)
    assert again.project_configuration.iteration == 0
    broken.rmdir()
    load_state_tolerant(again, f"{tmp_path}/checkpoints/checkpoint_{loaded}/")
    assert again.project_configuration.iteration == 3
    again.save_state()
    names = [f"checkpoint_{number}" for number in range(4)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names


def test_numbers_stay_as_they_are_where_nothing_is_numbered(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path, iteration=7)
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_7").rename(tmp_path / "mine")
    load_state_tolerant(accelerator, tmp_path / "mine")
    assert accelerator.project_configuration.iteration == 8
    plain = numbered(tmp_path, automatic_checkpoint_naming=False)
    (tmp_path / "mine").rename(tmp_path / "checkpoint_7")
    load_state_tolerant(plain, tmp_path / "checkpoint_7")
    assert plain.project_configuration.iteration == 0


def test_the_report_as_plain_values(folder: Path) -> None:
    report = load_state_tolerant(fresh().accelerator, folder)
    plain = report.as_json()
    assert report.to_dict() == plain  # its name until 0.4
    assert plain["complete"] is True
    assert plain["components"][0] == {
        "part": "models",
        "index": 0,
        "what": "TwoLayer",
        "status": "restored",
        "files": ["model.safetensors"],
        "by_position": False,
        "reason": "",
        "fresh": [],
        "unused": [],
        "mismatched": [],
    }
    assert str(report).splitlines()[1] == "  models 0 (TwoLayer) restored from model.safetensors"
    assert repr(report).startswith(f"<LoadReport {folder}: ")
    assert len(repr(report)) < len(str(folder)) + 60
    shutil.rmtree(folder)
    with pytest.raises(LoadError, match="does not exist"):
        load_state_tolerant(fresh().accelerator, folder)

"""What load_state_tolerant refuses, by name and with the next command, and that nothing was
modified by then.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix.checkpoint.manifest import Manifest, ManifestEntry
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, Requirement, Status
from ckptfix.training.loading.load_state import load_state_tolerant
from fixtures.models import Tied, TwoLayer
from tests.training.loading_runs import (
    FIXTURES,
    Run,
    files_of,
    make_run,
    reset,
    run_of_fixture,
    seeded,
)


def fresh() -> Run:
    return make_run(seeded(TwoLayer, 8), seeded(TwoLayer, 9), scheduler=True, custom=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy folder of two models of one class, with one of everything."""
    run = make_run(seeded(TwoLayer, 1), seeded(TwoLayer, 2), scheduler=True, custom=1)
    run.train()
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    return tmp_path / "c"


def refused(run: Run, folder: Path, match: str, policy: LoadPolicy | None = None) -> LoadError:
    """Load, expect the refusal, and check that neither memory nor disk changed."""
    before, disk = run.digest(), files_of(folder)
    with pytest.raises(LoadError, match=match) as caught:
        load_state_tolerant(run.accelerator, folder, policy=policy)
    assert run.digest() == before
    assert files_of(folder) == disk
    assert not caught.value.modified
    assert str(folder) in str(caught.value)
    return caught.value


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def replace(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


@pytest.mark.parametrize(
    ("name", "damage", "match"),
    [
        ("model_1.safetensors", Path.unlink, r"1 entry fits 2 objects"),
        ("model.safetensors", truncate, r"model.safetensors: truncated: .* the file has"),
        ("optimizer.bin", Path.unlink, r"1 entry fits 2 objects"),
        ("optimizer_1.bin", truncate, r"optimizers 1 \(AdamW\)"),
        (
            "scheduler_1.bin",
            replace([1, 2]),
            r"not a scheduler state dict \(expected a dict, found list\)",
        ),
        ("scheduler.bin", replace({"last_epoch": 3}), r"it lacks base_lrs, gamma, step_size"),
        ("custom_checkpoint_0.pkl", Path.unlink, r"custom 0 \(SampleCounter\)"),
        ("custom_checkpoint_0.pkl", truncate, r"custom_checkpoint_0\.pkl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_anywhere_and_nothing_is_modified(
    folder: Path, name: str, damage: Callable[[Path], None], match: str
) -> None:
    damage(folder / name)
    error = refused(fresh(), folder, match)
    assert error.report is not None
    assert error.report.with_status(Status.FAILED)


def test_wrong_generators_stop_only_whom_they_are_required_by(folder: Path) -> None:
    states = torch.load(folder / "random_states_0.pkl", weights_only=False)
    states["torch_manual_seed"] = states["torch_manual_seed"][:9]
    torch.save(states, folder / "random_states_0.pkl")
    refused(fresh(), folder, "torch_manual_seed cannot be set", LoadPolicy(rng=Requirement.REQUIRE))
    run = fresh()
    with pytest.warns(UserWarning, match="torch_manual_seed cannot be set"):
        report = load_state_tolerant(run.accelerator, folder)
    assert report.of("rng")[0].status is Status.FAILED
    assert run.accelerator.step == 2


def test_unequal_counts_that_nothing_tells_apart_name_the_entries(tmp_path: Path) -> None:
    run = make_run(*(seeded(TwoLayer, seed) for seed in (1, 2, 3)), optimizer=None)
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    again = make_run(seeded(TwoLayer, 8), seeded(TwoLayer, 9), optimizer=None)
    refused(
        again,
        tmp_path / "c",
        r"3 entries fit 2 objects, .*: model\.safetensors, model_1\.safetensors,"
        r" model_2\.safetensors "
        r"for models 0 \(TwoLayer\), 1 \(TwoLayer\); next: ckptfix check",
    )


DOUBLED = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors"


def test_a_proven_double_is_set_aside_before_order_decides() -> None:
    # Two, as the folder has files.
    run = make_run(seeded(TwoLayer, 8), seeded(TwoLayer, 9), optimizer=None)
    said = r"1 entry fits 2 objects, .*: model\.safetensors for models"
    refused(run, DOUBLED / "checkpoint", said)


def test_wrapped_names_with_other_bytes_are_no_double(tmp_path: Path) -> None:
    folder = shutil.copytree(DOUBLED / "checkpoint", tmp_path / "c")
    double = load_file(folder / "model_1.safetensors")
    double["module.fc1.bias"][0] += 1
    save_file(double, folder / "model_1.safetensors", metadata={"format": "pt"})
    said = "2 entries fit 1 object, and nothing shows which"
    refused(run_of_fixture(DOUBLED)[0], folder, said)


def test_a_broken_entry_is_not_passed_over_for_the_next_that_fits(folder: Path) -> None:
    truncate(folder / "optimizer.bin")
    truncate(folder / "model.safetensors")
    run = make_run(seeded(TwoLayer, 8))
    policy = LoadPolicy(custom=Requirement.IGNORE)
    error = refused(
        run,
        folder,
        r"model\.safetensors is at this position but cannot be read \(truncated",
        policy,
    )
    assert "optimizer.bin is at this position but cannot be read" in str(error)


def test_equal_entries_where_the_choice_matters(tmp_path: Path) -> None:
    models = [seeded(TwoLayer, seed) for seed in (1, 1, 2, 2)]
    make_run(*models, optimizer=None).accelerator.save_state(str(tmp_path / "c"))
    reset()
    three = make_run(*(seeded(TwoLayer, seed) for seed in (7, 8, 9)), optimizer=None)
    refused(three, tmp_path / "c", "4 entries fit 3 objects, and nothing shows which")
    reset()
    two = make_run(*(seeded(TwoLayer, seed) for seed in (7, 8)), optimizer=None)
    load_state_tolerant(two.accelerator, tmp_path / "c")
    assert torch.equal(two.models[0].fc1.weight, models[0].fc1.weight)
    assert torch.equal(two.models[1].fc1.weight, models[2].fc1.weight)


def test_names_that_do_not_fit_are_told_by_both_sides(folder: Path) -> None:
    class Other(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(6, 8)
            self.head = nn.Linear(8, 3)

    refused(
        make_run(Other(), optimizer=None),
        folder,
        r"2 keys are missing from the file: 'head\.weight', 'head\.bias'; "
        r"2 keys are not in the model: 'fc2\.bias', 'fc2\.weight'",
        LoadPolicy(custom=Requirement.IGNORE),
    )


def lone(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    """Save the weights of a Linear(3, 2), and more."""
    (tmp_path / "c").mkdir()
    state = {"weight": torch.ones(2, 3), "bias": torch.ones(2), **tensors}
    save_file(state, tmp_path / "c" / "model.safetensors")
    return tmp_path / "c"


def test_numbers_do_not_change_their_kind(tmp_path: Path) -> None:
    folder = lone(tmp_path, weight=torch.ones(2, 3, dtype=torch.int64))
    run = make_run(nn.Linear(3, 2), optimizer=None)
    refused(run, folder, "'weight': the dtype is int64 in the file")


def test_numbers_are_no_mask(tmp_path: Path) -> None:
    folder = lone(tmp_path, mask=torch.tensor([2, 0]))
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    said = "'mask': the dtype is int64 in the file, bool in the model"
    refused(make_run(model, optimizer=None), folder, said)


def small(folder: Path, optimizer: Callable[..., Any], *shapes: tuple[int, int]) -> Path:
    run = make_run(nn.Sequential(*(nn.Linear(*shape) for shape in shapes)), optimizer=optimizer)
    run.train()
    run.accelerator.save_state(str(folder))
    reset()
    return folder


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "here", "match"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "it lacks betas, eps, so it was not saved from AdamW"),
        (torch.optim.AdamW, momentum, "it lacks dampening, momentum, nesterov"),
        (
            torch.optim.AdamW,
            torch.optim.Adam,
            "decoupled_weight_decay is True in the checkpoint and False in this run",
        ),
    ],
    ids=["SGD-AdamW", "AdamW-SGD", "AdamW-Adam"],
)
def test_an_optimizer_of_another_class(
    tmp_path: Path, saved: Callable[..., Any], here: Callable[..., Any], match: str
) -> None:
    folder = small(tmp_path / "c", saved, (4, 3))
    refused(make_run(nn.Sequential(nn.Linear(4, 3)), optimizer=here), folder, match)


def test_an_optimizer_with_its_parameters_in_another_order(tmp_path: Path) -> None:
    folder = small(tmp_path / "c", torch.optim.AdamW, (4, 4), (4, 4))

    def backwards(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(reversed(list(parameters)), lr=lr)

    run = make_run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), optimizer=backwards)
    refused(
        run,
        folder,
        r"exp_avg of parameter 0 in param group 0 has shape \[4, 4\] in the checkpoint, but the "
        r"parameter has shape \[4\] in this run",
    )


def test_an_optimizer_with_other_groups(tmp_path: Path) -> None:
    folder = small(tmp_path / "c", torch.optim.AdamW, (4, 3))

    def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.AdamW([{"params": [weight]}, {"params": [bias]}], lr=lr)

    run = make_run(nn.Sequential(nn.Linear(4, 3)), optimizer=grouped)
    error = refused(run, folder, "1 param group in the checkpoint, 2 in this run")
    assert str(error).endswith(
        '; next: pass policy=LoadPolicy(optimizers="warn") to leave it unchanged'
    )


def test_the_next_step_of_a_model_that_fails_is_that_of_its_optimizer(tmp_path: Path) -> None:
    folder = small(tmp_path / "c", torch.optim.AdamW, (4, 4))
    run = make_run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    error = refused(run, folder, "2 parameters in the checkpoint, 4 in this run$")
    assert str(error).count("; next: ") == 1


def write_manifest(folder: Path, **entries: Any) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    (folder / ".ckptfix").mkdir(exist_ok=True)
    manifest = Manifest(versions={}, world_size=1, step=5, files=files, **entries)
    (folder / ".ckptfix" / "manifest.json").write_bytes(manifest.to_bytes())


class Student(TwoLayer):
    """Same names and shapes as a Teacher."""


class Teacher(TwoLayer):
    """Same names and shapes as a Student."""


ONLY_MODELS = LoadPolicy(
    optimizers=Requirement.IGNORE, schedulers=Requirement.IGNORE, custom=Requirement.IGNORE
)


def test_the_manifest_tells_models_apart_that_look_alike(folder: Path) -> None:
    module = Student.__module__
    entries = (
        ManifestEntry(index=0, file="model.safetensors", type=f"{module}.Student"),
        ManifestEntry(index=1, file="model_1.safetensors", type="__main__.Teacher"),
    )
    write_manifest(folder, models=entries)
    run = make_run(seeded(Teacher, 8), seeded(Student, 9), optimizer=None)
    load_state_tolerant(run.accelerator, folder, policy=ONLY_MODELS)
    for position, name in enumerate(("model_1.safetensors", "model.safetensors")):
        assert torch.equal(run.models[position].fc1.weight, load_file(folder / name)["fc1.weight"])
    reset()
    lone = make_run(seeded(Teacher, 8), optimizer=None)  # the other count, and still no doubt
    load_state_tolerant(lone.accelerator, folder, policy=ONLY_MODELS)
    teacher = load_file(folder / "model_1.safetensors")
    assert torch.equal(lone.models[0].fc1.weight, teacher["fc1.weight"])


def test_a_manifest_that_speaks_of_another_file_says_nothing(folder: Path) -> None:
    module = Student.__module__
    entries = (
        ManifestEntry(index=0, file="model.safetensors", type=f"{module}.Teacher", keys="0" * 64),
        ManifestEntry(index=1, file="model_2.safetensors", type=f"{module}.Student"),
    )
    write_manifest(folder, models=entries)
    run = make_run(seeded(Student, 8), seeded(Teacher, 9), optimizer=None)
    models = load_state_tolerant(run.accelerator, folder, policy=ONLY_MODELS).of("models")
    assert [one.files for one in models] == [("model.safetensors",), ("model_1.safetensors",)]
    assert all(component.by_position for component in models)


def test_what_the_manifest_says_was_tied_fills_a_model_that_does_not_tie(tmp_path: Path) -> None:
    saved = seeded(Tied, 1)
    make_run(saved, optimizer=None).accelerator.save_state(str(tmp_path / "c"))
    reset()
    have = load_file(tmp_path / "c" / "model.safetensors")
    lost = "lm_head.weight" if "embed.weight" in have else "embed.weight"
    kept = "embed.weight" if "embed.weight" in have else "lm_head.weight"
    entry = ManifestEntry(index=0, file="model.safetensors", type="", aliases={lost: kept})
    write_manifest(tmp_path / "c", models=(entry,))
    untied = seeded(Tied, 2)
    untied.lm_head.weight = nn.Parameter(torch.zeros(11, 6))
    run = make_run(untied, optimizer=None)
    load_state_tolerant(run.accelerator, tmp_path / "c")
    assert torch.equal(untied.lm_head.weight, saved.embed.weight)
    assert torch.equal(untied.embed.weight, saved.embed.weight)


def test_the_manifest_names_the_optimizers_class(folder: Path) -> None:
    entry = ManifestEntry(index=0, file="optimizer.bin", type="torch.optim.nadam.NAdam")
    write_manifest(folder, optimizers=(entry,))
    said = r"it was saved from torch\.optim\.nadam\.NAdam, but this run's optimizer is AdamW"
    refused(fresh(), folder, said)


def test_the_step_comes_from_the_manifest_when_no_rank_holds_it(folder: Path) -> None:
    write_manifest(folder)
    (folder / "random_states_0.pkl").unlink()
    run = fresh()
    with pytest.warns(UserWarning, match="no rank saved random states"):
        report = load_state_tolerant(run.accelerator, folder)
    assert run.accelerator.step == 5
    assert "from the manifest" in str(report.of("step")[0])


def test_a_file_that_changes_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.devices import torch_reading
    from ckptfix.training.loading import states

    read = torch_reading.read_pickle

    def touching(root: Path, component: Any, **arguments: Any) -> Any:
        result = read(root, component, **arguments)
        if component.path.name == "scheduler.bin":
            torch.save({"other": 1}, folder / "scheduler.bin")
        return result

    monkeypatch.setattr(states, "read_pickle", touching)
    run = fresh()
    before = run.digest()
    with pytest.raises(LoadError, match=r"scheduler\.bin changed during the load"):
        load_state_tolerant(run.accelerator, folder)
    assert run.digest() == before


def test_a_missing_optimizer_says_how_to_go_on_without(folder: Path) -> None:
    for path in folder.glob("optimizer*.bin"):
        path.unlink()
    said = r'has no file for it; next: pass policy=LoadPolicy\(optimizers="warn"\)'
    refused(fresh(), folder, said)
    run = fresh()
    with pytest.warns(UserWarning, match="optimizers [01]") as seen:
        load_state_tolerant(run.accelerator, folder, policy=LoadPolicy(optimizers=Requirement.WARN))
    assert len(seen) == 2

"""Resumes of a transformers Trainer: from the newest complete checkpoint, and from none that would
go on in silence.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from ckptfix import Policy, repair
from ckptfix.errors import UsageError
from ckptfix.training import LoadPolicy, Requirement
from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate
from ckptfix.training.resuming import run_state
from ckptfix.training.resuming.generators import capture
from tests.training.rank_cases import ROOT, run_python
from tests.training.trainer_kills import build, losses, transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("guarded"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without the guard: the folder with its checkpoints, and its losses."""
    folder = tmp_path_factory.mktemp("stock")
    trainer = build(folder, [], save_total_limit=None)
    trainer.train()
    return folder, losses(trainer)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of a guarded run."""
    folder = tmp_path_factory.mktemp("ours")
    patch_accelerate()
    build(folder, [], save_total_limit=None).train()
    unpatch_accelerate()
    return folder


@pytest.fixture(params=["stock", "ours"])
def run(request: pytest.FixtureRequest, stock: Any, ours: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints of either run."""
    made = stock[0] if request.param == "stock" else ours
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


of_stock = pytest.mark.parametrize("run", ["stock"], indirect=True)


WEIGHTS = "model.safetensors"
HALVES = (WEIGHTS, "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def in_words(name: str) -> str:
    return f"{name}|no model weights" if name == WEIGHTS else name


def damage(checkpoint: Path, name: str, *, is_cut: bool) -> str:
    """Remove a file, or cut it; return what is said of it."""
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).unlink()
    if is_cut:
        (checkpoint / name).write_bytes(data[: len(data) // 2])
    return rf"chose checkpoint-4 and passed over {checkpoint.name}: .*({in_words(name)})"


@pytest.mark.parametrize("is_cut", [False, True], ids=["gone", "half"])
@pytest.mark.parametrize("name", HALVES)
def test_the_newest_complete_one_is_named(run: Path, name: str, is_cut: bool) -> None:
    shutil.rmtree(run / "checkpoint-8")
    with pytest.warns(UserWarning, match=damage(run / "checkpoint-6", name, is_cut=is_cut)):
        last = transformers.trainer.get_last_checkpoint(run)
    assert last == str(run / "checkpoint-4")


def test_the_newest_complete_one_is_taken(run: Path, stock: Any) -> None:
    shutil.rmtree(run / "checkpoint-8")
    trainer = build(run, [])
    with pytest.warns(UserWarning, match=damage(run / "checkpoint-6", WEIGHTS, is_cut=True)):
        trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == stock[1]


def test_the_highest_number_of_an_older_run_is_not_taken(run: Path) -> None:
    with pytest.warns(UserWarning, match="contains checkpoint-8 from another run"):
        build(run, [], max_steps=4, learning_rate=1e-2, save_total_limit=None).train()
    said = (
        r"checkpoint-8 and checkpoint-4 come from different runs .*next:"
        r" trainer.train\(resume_from_checkpoint='"
    )
    with pytest.raises(UsageError, match=said):
        transformers.trainer.get_last_checkpoint(run)
    with pytest.raises(UsageError, match=said):
        build(run, []).train(resume_from_checkpoint=True)
    resumed = build(run, [], max_steps=5, learning_rate=1e-2, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert len(losses(resumed)) == 5
    for number in (2, 4):
        os.utime(run / f"checkpoint-{number}/trainer_state.json", (1e9, 1e9))
    assert transformers.trainer.get_last_checkpoint(run) == str(run / "checkpoint-8")


def test_weights_of_which_the_model_takes_none_are_refused(stock: Any, tmp_path: Path) -> None:
    """Saved from a compiled model by a script of its own, such as a callback."""
    folder, expected = tmp_path, stock[1]
    shutil.copytree(stock[0] / "checkpoint-6", folder / "checkpoint-6")
    weights = folder / "checkpoint-6" / WEIGHTS
    tensors = load_file(weights)
    save_file({f"_orig_mod.{key}": one for key, one in tensors.items()}, weights, {"format": "pt"})
    said = rf"no key of {WEIGHTS} matches the model \({len(tensors)} keys?, all with the prefix"
    with pytest.raises(UsageError, match=said):
        build(folder, []).train(resume_from_checkpoint=True)
    repair(folder / "checkpoint-6", policy=Policy(allow=frozenset({"dead-weights"})))
    trainer = build(folder, [])
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == expected


@of_stock
@pytest.mark.parametrize("name", HALVES)
def test_an_incomplete_path_is_refused(run: Path, name: str) -> None:
    (run / "checkpoint-6" / name).unlink()
    said = f"cannot resume from .*checkpoint-6: .*({in_words(name)}).*/checkpoint-8', which is"
    trainer = build(run, [])
    with pytest.raises(UsageError, match=said):
        trainer.train(resume_from_checkpoint=f"{run}/checkpoint-6/")


@of_stock
@pytest.mark.parametrize(
    ("name", "part"),
    [("optimizer.pt", "optimizers"), ("scheduler.pt", "schedulers"), ("rng_state.pth", "rng")],
)
def test_what_is_missing_may_be_allowed(
    run: Path, name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoint-8")
    (run / "checkpoint-6" / name).unlink()

    def resume(path: str | bool = str(run / "checkpoint-6")) -> None:
        build(run, [], save_strategy="no").train(resume_from_checkpoint=path)

    with pytest.raises(UsageError, match=r"missing_states='warn'|--missing-states warn"):
        resume()
    patch_accelerate(missing_states="warn")
    with pytest.warns(UserWarning, match=f"not bit-exact: {name} is missing"):
        resume()
    strict = LoadPolicy(rng=Requirement.REQUIRE)
    patch_accelerate(missing_states=replace(strict, **{part: Requirement.IGNORE}))
    resume(True)
    patch_accelerate(missing_states=strict)
    with pytest.raises(UsageError, match=name):
        resume()
    monkeypatch.setenv("CKPTFIX_MISSING_STATES", "ignore")
    patch_accelerate()
    resume()
    monkeypatch.setenv("CKPTFIX_MISSING_STATES", "wran")
    with pytest.raises(UsageError, match="CKPTFIX_MISSING_STATES='wran': expected"):
        patch_accelerate()


RUNS: dict[str, dict[str, Any]] = {
    "one epoch": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "in the second epoch": {"max_steps": 40, "save_steps": 35},
    "at the end of an epoch": {"max_steps": 40, "save_steps": 32},
    "accumulation in the third epoch": {
        "max_steps": 40,
        "save_steps": 37,
        "gradient_accumulation_steps": 2,
    },
    "evaluation between": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_data_that_are_drawn_at_random_go_on_as_well(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    given = {"augment": True, "dataloader_num_workers": 0, **arguments}
    trainer = build(tmp_path, [], **given)
    trainer.train()
    last = max(tmp_path.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    if str(trainer.state.global_step) == last.name.rpartition("-")[2]:
        shutil.rmtree(last)  # the Trainer saves at the end as well
    resumed = build(tmp_path, [], **given)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(trainer)
    assert all(
        value.equal(resumed.model.state_dict()[name])
        for name, value in trainer.model.state_dict().items()
    )


def test_between_epochs_a_run_state_of_0_5_0_leaves_the_generators_to_the_file_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {**RUNS["at the end of an epoch"], "augment": True}
    # 0.5.0 recorded them at the beginning of a save, so before what a method of the Trainer drew in
    # it.
    torch.manual_seed(123)
    before, collect = capture(), run_state.collect

    def collect_as_0_5_0(accelerator: Any, random: Any, states: Any) -> dict[str, Any]:
        return {**collect(accelerator, before, states), "version": 1}

    trainer = build(tmp_path, [], **given)
    with monkeypatch.context() as patch:
        patch.setattr(run_state, "collect", collect_as_0_5_0)
        trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-40")
    resumed = build(tmp_path, [], **given)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(trainer)


def test_what_transformers_saved_alone_is_said_not_to_go_on_with_such_data(
    stock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(stock[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer = build(tmp_path, [])
    trainer.train(resume_from_checkpoint=True)
    assert "was saved without ckptfix: a dataset" in caplog.text
    assert losses(trainer) == stock[1], "without such data"


def test_data_that_are_not_skipped_begin_anew(tmp_path: Path) -> None:
    trainer = build(tmp_path, [])
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = build(tmp_path, [], ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed)) == 8


def test_a_model_alone_is_not_resumed_from(tmp_path: Path) -> None:
    build(tmp_path, [], save_only_model=True).train()
    with pytest.raises(UsageError, match=r"no complete checkpoint in .*save_only_model=True"):
        build(tmp_path, []).train(resume_from_checkpoint=True)
    patch_accelerate(missing_states="warn")
    with pytest.warns(UserWarning, match="save_only_model=True"):
        build(tmp_path, [], max_steps=9).train(resume_from_checkpoint=True)


def test_another_number_of_processes_is_said(stock: Any, tmp_path: Path) -> None:
    shutil.copytree(stock[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    states = tmp_path / "checkpoint-4/rng_state.pth"
    shutil.copy(states, states.with_name("rng_state_0.pth"))
    states.rename(states.with_name("rng_state_1.pth"))
    with pytest.warns(UserWarning, match="not bit-exact: saved with 2 processes, now 1"):
        build(tmp_path, []).train(resume_from_checkpoint=True)


def test_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    last = transformers.trainer.get_last_checkpoint
    assert last(str(tmp_path)) is None
    with pytest.raises(ValueError, match="No valid checkpoint"):
        build(tmp_path, []).train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError):
        last(str(tmp_path / "none"))
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4/model.safetensors").write_bytes(b"")
    said = r"no complete checkpoint in .*checkpoint-4.*next: ckptfix check -r"
    with pytest.raises(UsageError, match=said):
        last(str(tmp_path))
    trainer = build(tmp_path / "new", [], max_steps=2)
    trainer.train(resume_from_checkpoint=False)
    assert len(losses(trainer)) == 2


def test_the_patch_is_undone(tmp_path: Path) -> None:
    ours = transformers.trainer.get_last_checkpoint
    assert transformers.trainer_utils.get_last_checkpoint is ours
    kept = transformers.Trainer.train
    unpatch_accelerate()
    stock = transformers.trainer_utils.get_last_checkpoint
    assert transformers.trainer.get_last_checkpoint is stock
    assert stock is not ours
    assert not hasattr(stock, "__wrapped__")
    for name in ("train", "_save_checkpoint"):
        assert not hasattr(getattr(transformers.Trainer, name), "__wrapped__")
    trainer = build(tmp_path, [])
    kept(trainer)  # a name that was taken before goes on to the Trainer's own
    assert not list(tmp_path.rglob(".ckptfix"))
    patch_accelerate()
    patch_accelerate()
    assert transformers.trainer.get_last_checkpoint.__wrapped__ is stock
    assert hasattr(transformers.Trainer.train, "__wrapped__")
    assert not hasattr(transformers.Trainer.train.__wrapped__, "__wrapped__")


BEFORE = """
import sys
from ckptfix import patch_accelerate
patch_accelerate()
assert "transformers" not in sys.modules, "it is the script's to import"
from transformers.trainer_utils import get_last_checkpoint
from transformers import Trainer
import transformers.trainer
assert transformers.trainer.get_last_checkpoint is get_last_checkpoint
assert hasattr(get_last_checkpoint, "__wrapped__")
assert hasattr(Trainer.train, "__wrapped__") and hasattr(Trainer._save_checkpoint, "__wrapped__")
"""
UNDER_RUN = """
import sys
assert not {"torch", "accelerate", "transformers", "numpy"} & set(sys.modules)
from transformers.trainer_utils import get_last_checkpoint as last
assert hasattr(last, "__wrapped__")
import transformers
assert hasattr(transformers.Trainer.train, "__wrapped__")
import transformers.trainer
assert transformers.trainer.get_last_checkpoint is last
"""
WITHOUT = "import sys, accelerate; assert 'transformers' not in sys.modules"


@pytest.mark.parametrize(
    ("code", "command"),
    [(BEFORE, ()), (UNDER_RUN, ("-m", "ckptfix", "run")), (WITHOUT, ("-m", "ckptfix", "run"))],
    ids=["patch", "run", "without"],
)
def test_transformers_is_patched_when_the_script_imports_it(
    tmp_path: Path, code: str, command: tuple[str, ...]
) -> None:
    (tmp_path / "script.py").write_text(code)
    run_python(*command, str(tmp_path / "script.py"), variables={"PYTHONPATH": str(ROOT)})

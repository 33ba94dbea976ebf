"""Weights and optimizers of the Trainer that differ from those of the checkpoints next to them: it
may resume anyway.

The oracle is a Trainer that resumes: the weights with which it begins are those of the save, or
others.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from ckptfix import Policy, check, latest_checkpoint, repair
from ckptfix.checkpoint.folder_names import TRAINER
from ckptfix.cli import run as run_command
from tests.diagnosis.test_changed_entries import Run, is_refused, of_model, saves
from tests.diagnosis.test_trainer_states import trainer_in, with_lora

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
ADAPTER = "adapter_model.safetensors"


class Begin(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights with which a run begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Copy them."""
        self.weights = {key: value.clone() for key, value in objects["model"].state_dict().items()}


def train(run: Path, steps: int = 4, *, start: Path | None = None, **options: Any) -> list[Path]:
    """Save a run after each of so many steps; return its checkpoints. ``dtype``: of the model."""
    dtype = options.pop("dtype", torch.float32)
    trainer = trainer_in(run, **options)
    trainer.model.to(dtype)
    trainer.args.save_steps, trainer.args.max_steps = 1, steps
    trainer.train(resume_from_checkpoint=str(start) if start is not None else None)
    return sorted(run.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("saved") / "run")[0].parent


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def told(root: Path) -> list[tuple[str, str]]:
    """Return severity and sentence of each finding about another content than next to it."""
    return [
        (one.severity.value, str(one)) for one in check(root).findings if one.code == "wrong-state"
    ]


def resumed(checkpoint: Path, weights: Tensors) -> str:
    """Return how the Trainer resumes from a checkpoint: with the "same" weights, with "others", or
    it "fails".
    """
    trainer, begin = trainer_in(checkpoint.parent.parent / "out"), Begin()
    trainer.add_callback(begin)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except (RuntimeError, ValueError):
        return "fails"
    return (
        "same"
        if all(torch.equal(begin.weights[key], weights[key]) for key in weights)
        else "others"
    )


def rounded(weights: Tensors) -> Tensors:
    return {key: value.half() for key, value in weights.items()}


def behind(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


def reshaped(weights: Tensors) -> Tensors:
    # Rows of embeddings are compared with the config.
    return {key: torch.cat((value, value), dim=-1) for key, value in weights.items()}


def changed(change: Callable[[Tensors], Tensors]) -> Change:
    """Return a change of the weights of a checkpoint."""
    return of_model(change)


def without_group(root: Path) -> None:
    state = torch.load(root / OPTIMIZER)
    first, *others = state["param_groups"]
    state["param_groups"] = [first]
    for group in others:
        for number in group["params"]:
            del state["state"][number]
    torch.save(state, root / OPTIMIZER)


DAMAGE: dict[str, tuple[Change, str, str]] = {
    "F16": (
        changed(rounded),
        "others",
        f"{WEIGHTS}: it holds 25 tensors in F16 (expected F32, as in 3 neighbouring checkpoints)",
    ),
    "shapes": (
        changed(reshaped),
        "fails",
        (
            f"{WEIGHTS}: it holds 25 tensors, 25 of them with different keys or shapes (expected "
            "25 tensors, as in 3 neighbouring checkpoints)"
        ),
    ),
    "groups": (
        without_group,
        "fails",
        (
            f"{OPTIMIZER}: it holds 1 param group with 11 parameters (expected 2 param groups with "
            "25 parameters (11, 14), as in 3 neighbouring checkpoints)"
        ),
    ),
}


def test_a_run_of_the_trainer_is_healthy(run: Path) -> None:
    checkpoints = sorted(run.iterdir())
    assert [told(root) for root in checkpoints] == [[]] * 4
    assert resumed(checkpoints[1], load_file(checkpoints[1] / WEIGHTS)) == "same"


def test_weights_alone_under_the_name_of_a_checkpoint(run: Path) -> None:
    """check said that load_state fails, and did not name the file on which the Trainer does."""
    root = run / "checkpoint-4"
    for path in root.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            path.unlink()
    (finding,) = check(root).findings
    assert str(finding).startswith("trainer_state.json, optimizer.pt, ")
    assert "the Trainer cannot resume without trainer_state.json" in finding.advice
    assert "load_state" not in finding.advice


@pytest.mark.parametrize("name", DAMAGE)
def test_another_content_between_two_checkpoints_is_told(run: Path, name: str) -> None:
    change, outcome, words = DAMAGE[name]
    root = run / "checkpoint-2"
    weights = load_file(root / WEIGHTS)
    change(root)
    assert told(root) == [("warning", words)]
    assert check(root).status == 1
    assert resumed(root, weights) == outcome
    assert [told(run / f"checkpoint-{number}") for number in (1, 3, 4)] == [[]] * 3


def test_rounded_weights_are_a_note_at_the_end_of_a_run(run: Path) -> None:
    root = run / "checkpoint-4"
    changed(rounded)(root)
    words = (
        f"{WEIGHTS}: it holds 25 tensors in F16 (expected F32, as in 2 neighbouring checkpoints)"
    )
    assert told(root) == [("note", words)]
    assert check(root).status == 0
    assert latest_checkpoint(run, pattern=TRAINER) == root


@pytest.mark.parametrize("prefix", ["model.", "module."])
@pytest.mark.parametrize("number", [2, 4])
def test_other_keys_are_told_by_the_class_of_the_model(run: Path, number: int, prefix: str) -> None:
    root = run / f"checkpoint-{number}"
    weights = load_file(root / WEIGHTS)
    changed(behind(prefix))(root)
    assert "dead-weights" in {finding.code for finding in check(root).findings}
    assert resumed(root, weights) == "others"
    if number == 4:
        with pytest.warns(UserWarning, match="passed over checkpoint-4"):
            assert latest_checkpoint(run, pattern=TRAINER) == run / "checkpoint-3"


def test_weights_of_higher_precision_lose_nothing(tmp_path: Path) -> None:
    checkpoints = train(tmp_path / "run", dtype=torch.bfloat16)
    changed(lambda weights: {key: value.float() for key, value in weights.items()})(checkpoints[1])
    assert [told(root) for root in checkpoints] == [[]] * 4


def test_a_run_that_goes_on_in_bf16_has_a_note_at_most(run: Path) -> None:
    """The first checkpoint in bf16 is the newest one then, and those after it show that the script
    changed.
    """
    for number in (3, 4):
        shutil.rmtree(run / f"checkpoint-{number}")
    *older, newest = train(run, 3, start=run / "checkpoint-2", dtype=torch.bfloat16)
    assert [told(root) for root in older] == [[], []]
    # Of the weights and of the moments.
    assert [severity for severity, _ in told(newest)] == ["note", "note"]
    checkpoints = train(run, 4, start=newest, dtype=torch.bfloat16)
    assert [told(root) for root in checkpoints] == [[]] * 4


@pytest.mark.parametrize(
    "options",
    [{"save_only_model": True}, {"save_total_limit": 2}, {"bf16": True}, {"optim": "adafactor"}],
)
def test_options_of_the_trainer_are_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoints = train(tmp_path / "run", **options)
    assert len(checkpoints) == options.get("save_total_limit", 4)
    assert [told(root) for root in checkpoints] == [[]] * len(checkpoints)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_changes_its_adapters_is_healthy(tmp_path: Path) -> None:
    for step, rank in enumerate((2, 4, 2), 1):
        modules = ["query", "key"][: rank // 2]
        trainer = with_lora(trainer_in(tmp_path / "run"), r=rank, target_modules=modules)
        trainer.args.save_steps, trainer.args.max_steps = step, step
        trainer.train()
    checkpoints = sorted((tmp_path / "run").iterdir())
    assert [told(root) for root in checkpoints] == [[]] * 3


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("adapted") / "run"
    with_lora(trainer_in(run)).train()
    return run


def without_prefix(root: Path) -> None:
    tensors = load_file(root / ADAPTER)
    bare = {key.removeprefix("base_model.model."): value for key, value in tensors.items()}
    save_file(bare, root / ADAPTER, {"format": "pt"})


def test_adapters_that_all_lost_their_prefix_are_repaired_alone(
    adapted: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(adapted, tmp_path / "run"))
    for root in run.iterdir():
        without_prefix(root)
    assert not any(map(told, run.iterdir()))
    for number in (3, 2):
        report = repair(
            run / f"checkpoint-{number}", policy=Policy(allow=frozenset({"dead-adapter"}))
        )
        assert report.status == 0
        assert not any(map(told, run.iterdir()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_next_to_the_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer takes ``model.safetensors``, and leaves the adapter as PEFT makes it."""
    peft = pytest.importorskip("peft")

    def adapted(output: Path) -> Any:
        trainer = with_lora(trainer_in(output))
        trainer.args.save_steps, trainer.args.max_steps = 2, 4
        return trainer

    def is_zero_after_resume(checkpoint: Path) -> bool:
        trainer, begin = adapted(tmp_path / "out"), Begin()
        trainer.add_callback(begin)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return not any(value.any() for key, value in begin.weights.items() if "lora_B" in key)

    adapted(tmp_path / "run").train()
    before, last = sorted((tmp_path / "run").iterdir())
    assert not is_zero_after_resume(last)
    base = trainer_in(tmp_path / "out").model
    merged = peft.PeftModel.from_pretrained(base, str(last)).merge_and_unload()
    merged.save_pretrained(last, max_shard_size="1KB")
    assert codes(before) == codes(last) == {"trainer-pickle"}
    assert not is_zero_after_resume(last)
    for path in last.glob("model*"):
        path.unlink()
    merged.save_pretrained(last)
    assert is_zero_after_resume(last)
    assert codes(last) == {"trainer-pickle", "incomplete-adapter"}
    assert codes(before) == {"trainer-pickle"}
    for name in ("config.json", "generation_config.json"):
        (last / name).unlink(missing_ok=True)
    assert is_zero_after_resume(last)
    assert codes(last) == {"trainer-pickle", "incomplete-adapter"}
    # With the keys that the adapted model has in memory the Trainer loads the adapter, too.
    kept = (last / "model.safetensors").read_bytes()
    in_memory = adapted(tmp_path / "out").model
    peft.set_peft_model_state_dict(in_memory, load_file(last / "adapter_model.safetensors"))
    save_file(in_memory.state_dict(), last / "model.safetensors", metadata={"format": "pt"})
    assert not is_zero_after_resume(last)
    assert "incomplete-adapter" not in codes(last)
    (last / "model.safetensors").write_bytes(kept)
    # The answer of PEFT is none about the Trainer.
    base.save_pretrained(tmp_path / "base")
    settings = json.loads((last / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (last / "adapter_config.json").write_text(json.dumps(settings))
    assert run_command(["check", "--load", str(last)])
    assert "the Trainer ignores it" in capsys.readouterr().out
    # A run of the whole model, to which a script added an adapter.
    shutil.rmtree(tmp_path / "run")
    trainer_in(tmp_path / "run").train()
    adapted(tmp_path / "out").model.save_pretrained(tmp_path / "run" / "checkpoint-4")
    assert "incomplete-adapter" not in codes(tmp_path / "run" / "checkpoint-4")


def codes(root: Path) -> set[str]:
    return {finding.code for finding in check(root).findings}


def test_save_state_loads_rounded_weights_without_an_error(tmp_path: Path) -> None:
    folders = saves(tmp_path, Run())
    exact = load_file(folders[1] / WEIGHTS)
    of_model(rounded)(folders[1])
    fresh = Run()
    fresh.accelerator.load_state(str(folders[1]))
    assert not all(torch.equal(value, exact[key]) for key, value in fresh.net.state_dict().items())
    words = f"{WEIGHTS}: it holds 4 tensors in F16 (expected F32, as in 2 neighbouring checkpoints)"
    assert told(folders[1]) == [("warning", words)]
    assert [told(root) for root in (folders[0], folders[2])] == [[], []]
    assert not is_refused(folders[1])

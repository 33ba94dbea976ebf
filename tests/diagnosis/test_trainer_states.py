"""Values of ``trainer_state.json``: the Trainer itself resumes from each, and ``check`` and a
resume agree with it.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix import check
from ckptfix.cli import run
from ckptfix.errors import UsageError
from tests.tensors.zero_making import make_zero

State = dict[str, Any]
Change = Callable[[State], object]


def trainer_in(output: Path, **options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
        "vocab_size": 20,
    }
    model = BertForSequenceClassification(
        BertConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    )
    data = [{"input_ids": torch.arange(6) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
    given = {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 2, **options}
    arguments = TrainingArguments(str(output), max_steps=4, save_steps=2, seed=1, **given)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def weights_after(output: Path, checkpoint: Path | None) -> list[torch.Tensor]:
    """Return the weights at the end of a run that resumes from a checkpoint."""
    trainer = trainer_in(output)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    return [value.clone() for value in trainer.model.state_dict().values()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    output = tmp_path_factory.mktemp("run")
    weights = weights_after(output, None)
    return output / "checkpoint-2", weights


@pytest.fixture
def checkpoint(saved: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run/checkpoint-2"))


def is_resumed(checkpoint: Path, weights: list[torch.Tensor]) -> bool:
    """Return whether a run that resumes from a checkpoint ends with the weights of the run that was
    not stopped.
    """
    try:
        resumed = weights_after(checkpoint.parent.parent / "out", checkpoint)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return False
    return all(map(torch.equal, resumed, weights))


def change(checkpoint: Path, edit: Change) -> None:
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


WRONG: dict[str, tuple[Change, str]] = {
    "no step": (
        lambda s: s.pop("global_step"),
        'no "global_step", so the Trainer starts again at step 0',
    ),
    "step 0": (
        lambda s: s.update(global_step=0),
        (
            '"global_step" is 0 (expected 2, as in the name of the folder), so the Trainer resumes '
            "from step 0"
        ),
    ),
    "another step": (
        lambda s: s.update(global_step=4),
        (
            '"global_step" is 4 (expected 2, as in the name of the folder), so the Trainer resumes '
            "from step 4"
        ),
    ),
    "a text as step": (lambda s: s.update(global_step="2"), '"global_step" is not a valid count'),
    "a float as step": (lambda s: s.update(global_step=2.0), '"global_step" is not a valid count'),
}
RIGHT: dict[str, Change] = {
    "as saved": lambda s: None,
    "no epoch": lambda s: s.update(epoch=None),
    "no history": lambda s: s.update(log_history=None),
}


def test_the_trainer_resumes_from_a_wrong_step(checkpoint: Path) -> None:
    """The words once were that it cannot resume."""
    change(checkpoint, lambda state: state.update(global_step=1))
    steps: list[int] = []

    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            steps.append(state.global_step)

    trainer = trainer_in(checkpoint.parent.parent / "out")
    trainer.add_callback(Recorder())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert steps[0] == 2
    (warning,) = (one for one in check(checkpoint).findings if one.severity.value == "warning")
    assert "(expected 2, as in the name of the folder), so the Trainer resumes from step 1" in str(
        warning
    )
    assert "cannot resume" not in f"{warning} {warning.advice}"


@pytest.mark.parametrize("case", WRONG)
def test_a_state_from_which_the_trainer_does_not_resume_is_a_warning(
    case: str,
    saved: tuple[Path, list[torch.Tensor]],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit, problem = WRONG[case]
    change(checkpoint, edit)
    assert not is_resumed(checkpoint, saved[1])
    report = check(checkpoint)
    assert report.status == 1
    (warning,) = (one for one in report.findings if one.severity.value != "note")
    assert (warning.code, str(warning)) == (
        "incomplete-checkpoint",
        f"trainer_state.json: {problem}",
    )
    assert report.understood.problems == ()
    with pytest.raises(UsageError, match=r"checkpoint-2: trainer_state\.json: "):
        ckptfix.latest_checkpoint(checkpoint.parent)
    assert run(["check", "-r", str(checkpoint.parent)]) == 1
    assert f"trainer_state.json: {problem}" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("case", RIGHT)
def test_a_state_from_which_the_trainer_resumes_is_passed(
    case: str, saved: tuple[Path, list[torch.Tensor]], checkpoint: Path
) -> None:
    change(checkpoint, RIGHT[case])
    assert is_resumed(checkpoint, saved[1])
    report = check(checkpoint)
    assert report.status == 0
    assert ckptfix.latest_checkpoint(checkpoint.parent) == checkpoint


def test_a_state_of_another_version_is_not_checked(
    saved: tuple[Path, list[torch.Tensor]], checkpoint: Path
) -> None:
    """Saves before transformers 4.41 have no callbacks, and transformers 5 fails at its next save."""
    change(checkpoint, lambda state: state.pop("stateful_callbacks"))
    assert not is_resumed(checkpoint, saved[1])
    report = check(checkpoint)
    assert report.status == 0
    assert (
        "fields of trainer_state.json other than its step; another version of transformers may "
        "refuse them"
    ) in report.not_checked


def test_a_state_of_a_script_is_not_judged(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    shutil.copy(checkpoint / "model.safetensors", folder)
    (folder / "trainer_state.json").write_text('{"step": 5}')
    report = check(folder)
    assert (report.status, report.findings) == (0, ())


def rename(name: str) -> Callable[[Path], object]:
    return lambda root: (root / "model.safetensors").rename(root / name)


@pytest.mark.parametrize(
    "name", ["model_old.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"]
)
def test_weights_under_a_name_that_the_trainer_does_not_read(
    name: str,
    saved: tuple[Path, list[torch.Tensor]],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rename(name)(checkpoint)
    assert not is_resumed(checkpoint, saved[1])
    report = check(checkpoint)
    assert report.status == 1
    (warning,) = (one for one in report.findings if one.severity.value != "note")
    assert (warning.code, str(warning)) == (
        "incomplete-checkpoint",
        (
            f"model.safetensors is missing: {name!r} exists, but the Trainer does not look for "
            "that name"
        ),
    )
    assert (
        warning.advice
        == f"if {name!r} is that file, rename it to model.safetensors; otherwise copy "
        "model.safetensors again, or ignore this if the script does not load it"
    )
    with pytest.raises(
        UsageError, match=r"checkpoint-2: no model\.safetensors: .* the Trainer does not look for"
    ):
        ckptfix.latest_checkpoint(checkpoint.parent)


@pytest.mark.parametrize(
    "names", [("weights.safetensors",), ("model_ema.safetensors", "policy.bin")]
)
def test_names_that_a_subclass_of_the_trainer_may_read_are_not_checked(
    checkpoint: Path, names: tuple[str, ...]
) -> None:
    """A subclass that keeps an average next to its policy had a warning in each of its
    checkpoints.
    """
    rename(names[0])(checkpoint)
    for name in names[1:]:
        torch.save({"weight": torch.ones(2)}, checkpoint / name)
    report = check(checkpoint)
    assert report.status == 0
    assert (
        f"weights: {names[0]!r} exists, but the Trainer does not look for that name"
        in report.not_checked
    )
    assert ckptfix.latest_checkpoint(checkpoint.parent) == checkpoint


def test_a_run_in_fp16_is_judged_by_the_names_of_the_trainer(tmp_path: Path) -> None:
    """It saves ``scaler.pt``, as ``save_state`` does: files of a script were taken for states of
    ``load_state``.
    """

    def scaled(output: Path) -> Any:
        trainer = trainer_in(output)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as with fp16 on a GPU
        return trainer

    scaled(tmp_path / "run").train()
    folder = tmp_path / "run/checkpoint-2"
    assert (folder / "scaler.pt").exists()
    shutil.copy(folder / "optimizer.pt", folder / "optimizer_01.bin")
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model_01.bin")
    torch.save({"step": 1}, folder / "custom_checkpoint_7.pkl")
    scaled(tmp_path / "out").train(resume_from_checkpoint=str(folder))
    assert [str(one) for one in check(folder).findings if one.severity.value != "note"] == []
    rename("model_old.safetensors")(folder)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        scaled(tmp_path / "out")._load_from_checkpoint(str(folder))
    assert [str(one) for one in check(folder).findings if one.severity.value != "note"] == [
        "model.safetensors is missing: 'model_old.safetensors' exists, but the Trainer does not "
        "look for that name"
    ]


def without_states(root: Path) -> None:
    rename("model.fp16.safetensors")(root)
    for path in (root / "optimizer.pt", root / "scheduler.pt", root / "rng_state.pth"):
        path.unlink()


def as_adapter(root: Path) -> None:
    rename("adapter_model.safetensors")(root)
    (root / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def in_subfolder(root: Path) -> None:
    (root / "default").mkdir()
    rename("default/adapter_model.safetensors")(root)
    (root / "default" / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def of_a_subclass(root: Path) -> None:
    (root / "config.json").unlink()
    rename("projector.safetensors")(root)


@pytest.mark.parametrize("edit", [without_states, as_adapter, in_subfolder, of_a_subclass])
def test_weights_that_another_loader_reads_are_no_finding(
    edit: Callable[[Path], object], checkpoint: Path
) -> None:
    edit(checkpoint)
    assert check(checkpoint).status == 0
    assert ckptfix.latest_checkpoint(checkpoint.parent) == checkpoint


def test_weights_in_shards_are_read_by_their_index(
    saved: tuple[Path, list[torch.Tensor]], checkpoint: Path
) -> None:
    (checkpoint / "model.safetensors").unlink()
    trainer = trainer_in(checkpoint.parent.parent / "shards")
    trainer._load_from_checkpoint(str(saved[0]))
    trainer.model.save_pretrained(checkpoint, max_shard_size="2KB")
    assert (checkpoint / "model.safetensors.index.json").exists()
    assert is_resumed(checkpoint, saved[1])
    assert check(checkpoint).status == 0


STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def test_weights_alone_next_to_complete_checkpoints_are_a_warning(
    saved: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    """The Trainer resumes from them with a new optimizer and schedule, and reports nothing."""
    run_ = Path(shutil.copytree(saved[0].parent, tmp_path / "run"))
    for name in STATES:
        (run_ / "checkpoint-2" / name).unlink()
    trainer = trainer_in(tmp_path / "out")
    trainer.train(resume_from_checkpoint=str(run_ / "checkpoint-2"))
    assert (trainer.state.global_step, trainer.lr_scheduler.last_epoch) == (4, 2)
    (finding,) = (
        one for one in check(run_ / "checkpoint-2").findings if one.severity.value == "warning"
    )
    assert (
        str(finding)
        == "optimizer.pt, scheduler.pt, rng_state.pth are missing: the neighbouring checkpoint "
        "has them"
    )
    assert (
        finding.advice
        == "the Trainer silently continues with a new optimizer and learning rate and new random "
        "states; copy them again, or resume from a complete checkpoint; ignore this if you keep "
        "the checkpoint only for its weights"
    )


def test_weights_alone_in_all_checkpoints_of_a_run_are_no_finding(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.args.save_only_model = True
    trainer.train()
    for name in ("checkpoint-2", "checkpoint-4"):
        assert not {*STATES}.intersection(path.name for path in (tmp_path / "run" / name).iterdir())
        assert check(tmp_path / "run" / name).status == 0


def with_lora(trainer: Any, **settings: Any) -> Any:
    """Put LoRA of rank 2 into the model of a Trainer, which saves at each step, and ends at 3."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["query"], **settings})
    with warnings.catch_warnings():
        # Peft 0.21 asks transformers 5.23 by an old name.
        warnings.simplefilter("ignore", FutureWarning)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, config)
    trainer.args.save_steps, trainer.args.max_steps = 1, 3
    return trainer


def lora_trainer_in(output: Path) -> Any:
    trainer = with_lora(trainer_in(output), init_lora_weights=False)
    trainer.args.save_steps = trainer.args.max_steps = 2
    return trainer


@pytest.fixture(scope="module")
def saved_lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        # Peft 0.21 asks transformers 5.23 by an old name.
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lora_trainer_in(tmp_path_factory.mktemp("lora"))
        trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return Path(trainer.args.output_dir, "checkpoint-2"), weights


@pytest.fixture
def lora_checkpoint(saved_lora: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_lora[0], tmp_path / "lora/checkpoint-2"))


def warning_of(root: Path) -> Any:
    report = check(root)
    assert report.status == 1
    (warning,) = (one for one in report.findings if one.severity.value != "note")
    return warning


EXPORTED = ("config.json", "adapter_config.json", "training_args.bin")


@pytest.mark.parametrize("is_export", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_a_checkpoint_or_an_export_without_weights(
    name: str,
    is_export: bool,
    checkpoint: Path,
    lora_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = checkpoint if name == "model.safetensors" else lora_checkpoint
    (root / name).unlink()
    (root / "runs").mkdir()
    (root / "runs/events.out.tfevents").write_bytes(b"log")
    if is_export:
        for path in list(root.iterdir()):
            if path.is_file() and path.name not in EXPORTED:
                path.unlink()
    else:
        with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
            trainer_in(tmp_path / "out")._load_from_checkpoint(str(root))
        with pytest.raises(UsageError, match="no model weights"):
            ckptfix.latest_checkpoint(root.parent)
    shown = "training_args.bin" if is_export else "optimizer.pt"
    warning = warning_of(root)
    assert (warning.code, str(warning)) == (
        "incomplete-checkpoint",
        f"{name} is missing: {shown} shows that the Trainer saved here, but no file has weights",
    )
    assert warning.advice.startswith(
        "the Trainer cannot resume without it, and no library can load the model;"
    )
    assert run(["check", "-r", str(root.parent)]) == 1
    assert "incomplete-checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    "place",
    [
        "pytorch_model_fsdp_0/__0_0.distcp",
        "global_step2/mp_rank_00_model_states.pt",
        "default/adapter_model.safetensors",
        "best/model.safetensors",
    ],
)
def test_weights_in_a_subfolder_are_not_missing(place: str, checkpoint: Path) -> None:
    (checkpoint / place).parent.mkdir()
    (checkpoint / "model.safetensors").rename(checkpoint / place)
    assert not [one for one in check(checkpoint).findings if "no file has weights" in str(one)]


@pytest.mark.parametrize("parameters", [(), ("base_model.lora_A.weight",)])
def test_the_empty_adapter_of_zero_3_without_gathered_weights(
    lora_checkpoint: Path, tmp_path: Path, parameters: tuple[str, ...]
) -> None:
    """The weights are in DeepSpeed's folder: each checkpoint of such a run was passed over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lora_trainer_in(tmp_path / "out")
    # As ``Trainer.save_model`` does, which removes empty weights of complete models alone.
    trainer._save(str(lora_checkpoint), state_dict={name: torch.empty(0) for name in parameters})
    for name in ("optimizer.pt", "scheduler.pt"):
        (lora_checkpoint / name).unlink()
    make_zero(lora_checkpoint / "global_step2", [{"a.weight": torch.ones(4, 3)}], stage=3, ranks=1)
    (lora_checkpoint / "latest").write_text("global_step2")
    report = check(lora_checkpoint)
    assert report.status == 0
    assert ckptfix.latest_checkpoint(lora_checkpoint.parent) == lora_checkpoint
    shutil.rmtree(lora_checkpoint / "global_step2")
    assert check(lora_checkpoint).status == 1
    if not parameters:
        (note,) = (one for one in report.findings if one.code == "incomplete-adapter")
        assert (
            str(note)
            == "adapter_model.safetensors: it holds no tensors; PEFT loads nothing, and only warns; "
            "a resume with DeepSpeed reads global_step2/"
        )
        with pytest.raises(UsageError, match=r"adapter_model\.safetensors holds no tensors"):
            ckptfix.latest_checkpoint(lora_checkpoint.parent)


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "rng_state_1.pth"])
def test_a_state_without_other_files_of_the_trainer_wants_no_weights(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "states").mkdir()
    shutil.copy(checkpoint / name.replace("_1", ""), tmp_path / "states" / name)
    assert check(tmp_path / "states").status == 0


def test_an_adapter_without_its_config_resumes_and_is_loaded_by_nothing_else(
    lora_checkpoint: Path, saved_lora: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    from peft import PeftModel

    (lora_checkpoint / "adapter_config.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lora_trainer_in(tmp_path / "out")
        for parameter in trainer.model.parameters():
            parameter.data.zero_()
        trainer._load_from_checkpoint(str(lora_checkpoint))
        loaded = trainer.model.state_dict()
        assert all(
            torch.equal(loaded[name], saved_lora[1][name]) for name in loaded if "lora" in name
        )
        with pytest.raises(ValueError, match="adapter_config"):
            PeftModel.from_pretrained(trainer.model.base_model.model, str(lora_checkpoint))
    warning = warning_of(lora_checkpoint)
    assert (
        str(warning)
        == "adapter_config.json is missing: PEFT needs it to load adapter_model.safetensors"
    )
    assert warning.advice.startswith(
        "the Trainer resumes without it, but PeftModel.from_pretrained fails; copy"
    )
    assert ckptfix.latest_checkpoint(lora_checkpoint.parent) == lora_checkpoint


def test_an_optimizer_under_the_name_of_accelerate(
    saved: tuple[Path, list[torch.Tensor]], checkpoint: Path
) -> None:
    (checkpoint / "optimizer.pt").rename(checkpoint / "optimizer.bin")
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt"):
        weights_after(checkpoint.parent.parent / "out", checkpoint)
    assert "rename it to optimizer.pt" in warning_of(checkpoint).advice
    with pytest.raises(
        UsageError,
        match=r"no optimizer\.pt: 'optimizer\.bin' exists, but the Trainer does not look for",
    ):
        ckptfix.latest_checkpoint(checkpoint.parent)


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_config_that_is_no_json_object(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises((ValueError, TypeError)):
        trainer_in(tmp_path / "out")._load_from_checkpoint(str(checkpoint))
    assert str(warning_of(checkpoint)).endswith("so the Trainer and from_pretrained fail")
    with pytest.raises(UsageError, match=r"config\.json: "):
        ckptfix.latest_checkpoint(checkpoint.parent)


def exchange(root: Path, first: str, second: str) -> None:
    (root / first).rename(root / "third")
    (root / second).rename(root / first)
    (root / "third").rename(root / second)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_state_that_was_exchanged_with_the_training_arguments_is_told(
    name: str, checkpoint: Path
) -> None:
    exchange(checkpoint, name, "training_args.bin")
    with pytest.raises(UnpicklingError, match="TrainingArguments"):
        weights_after(checkpoint.parent.parent / "out", checkpoint)
    report = check(checkpoint)
    (finding,) = (one for one in report.findings if one.severity.value != "note")
    assert finding.severity.value == "error"
    assert (
        str(finding)
        == f"{name}: it holds the Trainer's training arguments, saved as training_args.bin "
        f"(expected {NOUNS[name]}); swapped with training_args.bin"
    )
    assert finding.advice.startswith("the Trainer's resume fails: swap")


NOUNS = {
    "optimizer.pt": "an optimizer",
    "scheduler.pt": "a scheduler",
    "rng_state.pth": "the Trainer's random states",
}


@pytest.mark.parametrize("is_next_to_others", [True, False])
def test_random_states_that_got_a_rank_are_told(
    is_next_to_others: bool, saved: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    run_ = Path(shutil.copytree(saved[0].parent, tmp_path / "run"))
    if not is_next_to_others:
        shutil.rmtree(run_ / "checkpoint-4")
    checkpoint = run_ / "checkpoint-2"
    assert is_resumed(checkpoint, saved[1])
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    assert not is_resumed(checkpoint, saved[1])
    finding = warning_of(checkpoint)
    assert (
        str(finding)
        == "rng_state.pth is missing: a run of one process saved rng_state_0.pth under this "
        "name"
    )
    assert "rename it to rng_state.pth" in finding.advice
    (checkpoint / "rng_state_0.pth").rename(checkpoint / "rng_state.pth")
    assert check(checkpoint).status == 0
    # A node of a run of several processes has those of its own ranks.
    (checkpoint / "rng_state.pth").unlink()
    torch.save({"python": (3, (), None)}, checkpoint / "rng_state_0.pth")
    assert all("a run of one process saved" not in str(one) for one in check(checkpoint).findings)


@pytest.mark.parametrize(
    ("text", "fails"), [("", False), ('{"max_new_tokens": 7', False), ("[]", True), ("null", True)]
)
def test_a_generation_config_that_is_no_json_object(text: str, fails: bool, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 3}
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20, **tokens))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    assert GPT2LMHeadModel.from_pretrained(tmp_path).generation_config.max_new_tokens == 7
    assert check(tmp_path).status == 0
    (tmp_path / "generation_config.json").write_text(text)
    if fails:
        with pytest.raises(TypeError):
            GPT2LMHeadModel.from_pretrained(tmp_path)
    else:
        assert GPT2LMHeadModel.from_pretrained(tmp_path).generation_config.max_new_tokens is None
    effect = "fails" if fails else "takes default settings for generation without an error"
    assert str(warning_of(tmp_path)).endswith(f"so from_pretrained {effect}")

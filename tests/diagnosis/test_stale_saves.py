"""A save with the bytes of the one before it: told where a counter moved, and never in a healthy
run.

The runs are real ones of the Trainer and of accelerate. A test damages a run by copying files of an
earlier save over those of a later one, as a save does that reports success and writes an old
buffer.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix import check
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Severity
from tests.diagnosis.test_trainer_states import trainer_in, with_lora
from tests.stores.servers import bucket, ministack, ministack_process, upload_folder

__all__ = ["bucket", "ministack", "ministack_process"]

Tensors = dict[str, torch.Tensor]
Told = list[tuple[str, str]]
"""Severity and sentence of each finding."""


OPTIONS = pytest.mark.parametrize("options", [{}, {"data": True}], ids=["samples", "data"])


def told(folder: Path, **options: Any) -> Told:
    return [
        (finding.severity.value, str(finding))
        for finding in check(folder, siblings=folder.parent.iterdir(), **options).all_findings
        if finding.code == "stale-save"
    ]


def in_names(output: Path, **options: Any) -> dict[str, Told]:
    """Return the findings about each checkpoint that has any."""
    every = {folder.name: told(folder, **options) for folder in sorted(output.iterdir())}
    return {name: findings for name, findings in every.items() if findings}


def runs(output: Path, **options: Any) -> Path:
    """Train four steps, and save after each."""
    trainer = trainer_in(output, **options)
    trainer.args.save_steps = 1
    trainer.train()
    return output


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    runs(output, lr_scheduler_type="constant", learning_rate=1e-3)
    assert in_names(output) == in_names(output, data=True) == {}
    return output


@pytest.fixture
def run_of_trainer(constant: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(constant, tmp_path / "run"))


def copied(run_folder: Path, *names: str, source: int = 2, target: int = 3) -> Path:
    """Copy files of one save over those of a later one."""
    for name in names:
        shutil.copy(run_folder / f"checkpoint-{source}" / name, run_folder / f"checkpoint-{target}")
    return run_folder / f"checkpoint-{target}"


WEIGHTS, OPTIMIZER, SCHEDULER = "model.safetensors", "optimizer.pt", "scheduler.pt"
SAMPLED = "; the first bytes of each tensor are equal"

_MOVED = "went from {0} to {1} at a learning rate of 0.001)"
OLD_WEIGHTS = (
    f"{WEIGHTS}: weights as in checkpoint-{{0}} (expected different values: step in {OPTIMIZER} "
    f"{_MOVED}"
)
OLD_OPTIMIZER = (
    f"{OPTIMIZER}: optimizer state of checkpoint-{{0}} (expected new values: last_epoch in "
    f"{SCHEDULER} {_MOVED}"
)
NEW_OPTIMIZER = (
    f"{OPTIMIZER}: optimizer state of checkpoint-{{0}}, a later save: its step {{0}} matches "
    f"last_epoch in {SCHEDULER} = {{0}} (expected {{1}})"
)
OLD_SAVE = (
    f"{WEIGHTS}: weights and optimizer state of checkpoint-{{0}} (expected new values: "
    f"global_step in trainer_state.json {_MOVED}"
)


@pytest.mark.parametrize(
    ("names", "sentence", "source", "target"),
    [
        *(((WEIGHTS,), OLD_WEIGHTS, *pair) for pair in ((2, 3), (1, 3), (1, 4), (2, 4))),
        *(((OPTIMIZER,), OLD_OPTIMIZER, *pair) for pair in ((2, 3), (1, 3), (2, 4))),
        *(
            ((OPTIMIZER,), NEW_OPTIMIZER, *pair)
            for pair in ((2, 1), (3, 2), (4, 3), (3, 1), (4, 1))
        ),
        ((WEIGHTS, OPTIMIZER, SCHEDULER), OLD_SAVE, 2, 3),
    ],
)
def test_files_of_another_save_are_a_warning_there_alone(
    run_of_trainer: Path, names: tuple[str, ...], sentence: str, source: int, target: int
) -> None:
    """Only the neighbour was compared, and a file of two saves back was clean."""
    folder = copied(run_of_trainer, *names, source=source, target=target)
    words = sentence.format(source, target)
    expected = {folder.name: [("warning", words + SAMPLED)]}
    assert in_names(run_of_trainer) == expected
    expected = {folder.name: [("warning", f"{words}; every byte is equal")]}
    assert in_names(run_of_trainer, data=True) == expected
    is_newer = f"resume from checkpoint-{source}, or copy {OPTIMIZER} again"
    assert (is_newer in finding_of(folder).advice) == (source > target)
    if (source, target) == (2, 3):
        assert run(["check", "-r", str(run_of_trainer)]) == 1


def finding_of(folder: Path, *siblings: Path) -> Any:
    """Return the one finding about an old file, of its folder next to others or to these."""
    findings = check(folder, siblings=siblings or folder.parent.iterdir()).all_findings
    (finding,) = (each for each in findings if each.code == "stale-save")
    return finding


def test_the_run_is_not_resumed_from_the_other_of_two_saves_with_the_same_weights(
    run_of_trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 3 over step 2 and step 2 over step 3 look the same: neither is the one without problems."""
    copied(run_of_trainer, WEIGHTS, source=3, target=2)
    shutil.rmtree(run_of_trainer / "checkpoint-4")
    assert run(["check", "-r", str(run_of_trainer)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"resume from {run_of_trainer}/checkpoint-3, the newest candidate, but check found "
        f"problems in checkpoint-3; the newest one without problems: "
        f"{run_of_trainer}/checkpoint-1"
    )


def write_save(folder: Path, weights: Tensors, optimizer: Any, schedule: Any = None) -> Path:
    """Write files of ``save_state`` into a folder whose name ends in a number."""
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    if schedule is not None:
        torch.save(schedule.state_dict(), folder / "scheduler.bin")
    torch.save({"step": int(folder.name.rpartition("_")[2])}, folder / "random_states_0.pkl")
    return folder


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("at", [0, 7])
def test_the_saves_next_to_two_show_whose_optimizer_it_is(
    tmp_path: Path, processes: int, at: int
) -> None:
    """Accelerate moves a schedule once for each process, and an optimizer may come from before."""
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(times: int) -> None:
        for _ in range(times):
            model(torch.rand(2, 30)).sum().backward()
            optimizer.step()

    step(at)
    for number in range(4):
        step(2)
        for _ in range(2 * processes):
            schedule.step()
        write_save(tmp_path / f"checkpoint_{number}", model.state_dict(), optimizer, schedule)
    folders = [tmp_path / f"checkpoint_{number}" for number in range(4)]
    kept = [(folder / "optimizer.bin").read_bytes() for folder in folders]
    for source, target in ((1, 2), (2, 1)):
        (folders[target] / "optimizer.bin").write_bytes(kept[source])
        found = {folder.name: told(folder) for folder in folders}
        assert [name for name, findings in found.items() if findings] == [f"checkpoint_{target}"]
        assert f"optimizer state of checkpoint_{source}" in found[f"checkpoint_{target}"][0][1]
        (folders[target] / "optimizer.bin").write_bytes(kept[target])
    # Of two alone whose counters are unlike, nothing decides.
    for folder in (folders[0], folders[3]):
        shutil.rmtree(folder)
    (folders[1] / "optimizer.bin").write_bytes(kept[2])
    if processes > 1 or at:
        assert told(folders[1]) == []
        ((severity, words),) = told(folders[2])
        assert severity == "warning"
        expected = "optimizer state as in checkpoint_1 (expected different values: last_epoch in"
        assert expected in words
    else:
        assert [bool(told(folder)) for folder in folders[1:3]] == [True, False]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("source", "target"), [(3, 4), (2, 4), (2, 3)])
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_the_last_save_of_a_schedule_that_ends_at_0_is_compared(
    source: int, target: int, warmup_steps: int, tmp_path: Path
) -> None:
    """Its own rate is that of a step that nobody makes: the weights of step 3 were clean in it."""
    output = runs(
        tmp_path, lr_scheduler_type="linear", learning_rate=1e-3, warmup_steps=warmup_steps
    )
    if target - source > 1:
        shutil.rmtree(output / "checkpoint-3")
    assert told(output / f"checkpoint-{target}") == []
    folder = copied(output, WEIGHTS, source=source, target=target)
    ((severity, words),) = told(folder)
    assert severity == "warning"
    assert f"step in {OPTIMIZER} went from {source} to {target} at a learning rate of 0.00" in words


def test_bytes_behind_the_samples_are_compared_with_data(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"step_{number}"
        folder.mkdir()
        save_file(
            {"w": torch.cat([torch.ones(4000), torch.full((9,), float(number))])}, folder / WEIGHTS
        )
    assert [severity for severity, _ in told(folder)] == ["note"]
    assert told(folder, data=True) == []


def of_an_adapter(output: Path) -> Path:
    with_lora(trainer_in(output, learning_rate=1e-3)).train()
    return output


def of_a_head(output: Path) -> Path:
    """Train the head of a frozen model, which the file of the weights holds, too."""
    trainer = trainer_in(output, learning_rate=1e-3)
    for parameter in trainer.model.bert.parameters():
        parameter.requires_grad_(False)
    trainer.args.save_steps = 1
    trainer.train()
    return output


def with_copies(output: Path) -> Path:
    """Copy checkpoints as people do: the best one, the last one, and a backup."""
    runs(output, learning_rate=1e-3)
    for name in (
        "checkpoint-best",
        "checkpoint-last",
        "checkpoint-4-backup",
        "checkpoint-3.bak",
        "best",
    ):
        shutil.copytree(output / "checkpoint-3", output / name)
    return output


def with_skipped_steps(output: Path) -> Path:
    """Save as the Trainer does in fp16, whose scale of the gradients is too large for two of four
    steps.
    """
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for number in range(1, 5):
        loss = model(torch.ones(2, 3)).sum() * (float("inf") if number in (2, 3) else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        folder = output / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / OPTIMIZER)
        torch.save(schedule.state_dict(), folder / SCHEDULER)
        torch.save(scaler.state_dict(), folder / "scaler.pt")
        torch.save(torch.get_rng_state(), folder / "rng_state.pth")
        state = {
            "global_step": number,
            "train_batch_size": 2,
            "stateful_callbacks": {"TrainerControl": {}},
        }
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert (output / "checkpoint-2" / WEIGHTS).read_bytes() == (
        output / "checkpoint-3" / WEIGHTS
    ).read_bytes()
    return output


def with_a_schedule_that_moves_anyway(output: Path) -> Path:
    """Do the same with a script that moves its schedule, too, when a step is skipped."""
    with_skipped_steps(output)
    for number in range(1, 5):
        path = output / f"checkpoint-{number}" / SCHEDULER
        torch.save({**torch.load(path), "last_epoch": number, "_step_count": number + 1}, path)
    return output


def of_rows_at_the_end(output: Path) -> Path:
    """Train the last rows of an embedding, as for new tokens: its first ones stay unchanged."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Embedding(2000, 8)
    model, optimizer = accelerator.prepare(made, torch.optim.Adam(made.parameters(), lr=1e-2))
    for number in range(1, 4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.tensor([1999, 1998])).sum())
        optimizer.step()
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def of_textual_inversion(output: Path, rows: int = 500) -> Path:
    """Train one row as diffusers' textual_inversion.py does: all others are set back, also the
    first one, of the padding, which has moments.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Sequential(torch.nn.Embedding(rows, 64), torch.nn.LayerNorm(64))
    made[1].requires_grad_(False)
    old = made[0].weight.data.clone()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made[0].parameters(), lr=5e-3))
    for number in range(1, 4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.tensor([0, 5, rows - 20])).square().sum())
        optimizer.step()
        old[rows - 20] = made[0].weight.data[rows - 20]
        made[0].weight.data.copy_(old)
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    first, second = (load_file(output / f"checkpoint_{number}" / WEIGHTS) for number in (2, 3))
    assert not torch.equal(first["0.weight"], second["0.weight"])
    return output


def with_a_registered_head(output: Path) -> Path:
    """Train a head outside of the prepared model, which is frozen."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    encoder, head = torch.nn.Linear(32, 32).requires_grad_(False), torch.nn.Linear(32, 2)
    encoder, optimizer = accelerator.prepare(encoder, torch.optim.AdamW(head.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(head)
    for number in range(1, 4):
        accelerator.backward(head(encoder(torch.rand(4, 32))).sum())
        optimizer.step()
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def with_a_schedule_that_moves_after_the_save(output: Path) -> Path:
    """Train epochs at rates down to 0 and up again, each saved at the rate that it was trained
    at.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    model, optimizer, schedule = accelerator.prepare(made, optimizer, schedule)
    for number in range(4):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        accelerator.save_state(str(output / f"checkpoint_{number}"))
        schedule.step()
    assert torch.load(output / "checkpoint_2/scheduler.bin")["_last_lr"] == [0.0]
    assert (output / "checkpoint_1" / WEIGHTS).read_bytes() == (
        output / "checkpoint_2" / WEIGHTS
    ).read_bytes()
    return output


def with_warm_up_from_a_save_before_it(output: Path) -> Path:
    """Save before the first step, too, which is made at a rate of 0."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    model, optimizer, schedule = accelerator.prepare(made, optimizer, schedule)
    accelerator.save_state(str(output / "checkpoint_0"))
    for number in range(1, 4):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        schedule.step()
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def sharded_runs(output: Path, frozen: str = "-", **options: Any) -> Path:
    """Train three steps, and save each as shards. ``frozen``: in the names of the parameters that
    are not trained.
    """
    trainer = trainer_in(output, learning_rate=1e-3, max_grad_norm=0.0, **options)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    model = trainer.model
    save = model.save_pretrained
    model.save_pretrained = lambda *args, **kwargs: save(
        *args, **{**kwargs, "max_shard_size": "1KB"}
    )
    trainer.args.save_steps = 1
    trainer.train()
    assert len(list((output / "checkpoint-1").glob("model-*.safetensors"))) > 2
    return output


def with_a_schedule_of_epochs(output: Path, kind: Any = torch.optim.AdamW, **options: Any) -> Path:
    """Save after each second step, and again when the schedule has moved at the end of an epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Linear(8, 4)
    optimizer = kind(made.parameters(), lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, schedule = accelerator.prepare(made, optimizer, schedule)
    for number in range(1, 9):
        accelerator.backward(model(torch.rand(2, 8)).square().sum())
        optimizer.step()
        if number % 2 == 0:
            accelerator.save_state(str(output / f"checkpoint_{number * 10}"))
        if number % 4 == 0:
            schedule.step()
            accelerator.save_state(str(output / f"checkpoint_{number * 10 + 1}"))
    assert (output / "checkpoint_40" / WEIGHTS).read_bytes() == (
        output / "checkpoint_41" / WEIGHTS
    ).read_bytes()
    return output


HEALTHY: dict[str, Callable[[Path], Path]] = {
    "shards with a frozen base": partial(sharded_runs, frozen="bert"),
    "shards with frozen embeddings": partial(sharded_runs, frozen="embeddings"),
    "shards with a rate of 0": partial(sharded_runs, lr_scheduler_type="linear", warmup_steps=2),
    "a rate of 0": partial(runs, learning_rate=0.0),
    "a warm-up": partial(runs, warmup_steps=2, learning_rate=1e-3),
    "until a rate of 0": partial(runs, lr_scheduler_type="linear", learning_rate=1e-3),
    "SGD": partial(runs, optim="sgd", learning_rate=1e-2),
    "weights alone": partial(runs, save_only_model=True),
    "a large table": partial(of_textual_inversion, rows=5000),
    **{
        make.__name__: make
        for make in (
            with_a_schedule_that_moves_after_the_save, with_warm_up_from_a_save_before_it,
            of_an_adapter, of_a_head, with_copies, with_skipped_steps, of_rows_at_the_end,
            with_a_schedule_that_moves_anyway, with_a_registered_head, of_textual_inversion,
            with_a_schedule_of_epochs,
        )
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_schedule_next_to_no_count_of_steps_is_a_note(momentum: float, tmp_path: Path) -> None:
    output = with_a_schedule_of_epochs(tmp_path, torch.optim.SGD, momentum=momentum)
    assert [severity for severity, _ in told(output / "checkpoint_81")] == ["note"]
    assert told(output / "checkpoint_80") == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((WEIGHTS,), f"{WEIGHTS}: weights as in checkpoint_60 "),
        (("optimizer.bin",), "optimizer.bin: optimizer state of checkpoint_60 "),
        ((WEIGHTS, "optimizer.bin"), f"{WEIGHTS}: copy of checkpoint_60 "),
    ],
)
def test_old_bytes_next_to_a_schedule_of_epochs(
    names: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """Where weights and optimizer are both old, no count of steps is left: it looks like a copy."""
    output = with_a_schedule_of_epochs(tmp_path)
    copied_to = output / "checkpoint_80"
    for name in names:
        shutil.copy(output / "checkpoint_60" / name, copied_to)
    found = told(copied_to)
    assert len(found) == bool(expected)
    assert all(words.startswith(expected) for _, words in found)


@pytest.mark.parametrize(("number", "expected"), [(3, "warning"), (4, "note")])
def test_a_schedule_of_steps_shows_a_step(number: int, expected: str, run_of_trainer: Path) -> None:
    """A script may have skipped the last step: the newest save does not show it."""
    for folder in run_of_trainer.iterdir():
        (folder / "trainer_state.json").unlink()
    folder = copied(run_of_trainer, WEIGHTS, OPTIMIZER, source=number - 1, target=number)
    ((severity, words),) = told(folder)
    assert severity == expected
    assert f"last_epoch in {SCHEDULER} went from {number - 1} to {number} at" in words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "is_sampled"), [(500, 1), (5000, 0)])
def test_a_table_alone_is_compared_as_a_whole_or_not(
    rows: int, is_sampled: int, tmp_path: Path
) -> None:
    output = of_textual_inversion(tmp_path, rows)
    shutil.copy(output / "checkpoint_2" / WEIGHTS, output / "checkpoint_3" / WEIGHTS)
    for options, expected in (({}, is_sampled), ({"data": True}, 1)):
        found = told(output / "checkpoint_3", **options)
        assert [severity for severity, _ in found] == ["warning"] * expected
        assert all(words.endswith("; every byte is equal") for _, words in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_clean(name: str, tmp_path: Path) -> None:
    output = HEALTHY[name](tmp_path / "run")
    folders = sorted(
        path for path in output.iterdir() if path.is_dir() and "heckpoint" in path.name
    )
    assert len(folders) >= 3
    assert [told(folder) for folder in folders] == [[]] * len(folders)


def of_a_head_next_to_many_experts(output: Path) -> Path:
    """Train a head of two tensors next to 9,216 frozen ones."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Module()
    made.experts = torch.nn.ParameterList([torch.zeros(4) for _ in range(9216)])
    made.score = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.score.parameters()))
    for number in range(1, 4):
        accelerator.backward(model.score(torch.rand(2, 4)).sum())
        optimizer.step()
        accelerator.save_state(str(output / f"checkpoint_{number}"))
    return output


def in_many_items_of_dcp(output: Path) -> Path:
    """Save as FSDP does: the zip files of 1,600 items have equal beginnings. Few are trained."""
    weights = {f"{number}.w": torch.nn.Parameter(torch.ones(24, 24)) for number in range(1600)}
    trained = list(weights.values())[-5:]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for number in range(1, 4):
        for weight in trained:
            weight.grad = torch.rand(24, 24)
        optimizer.step()
        schedule.step()
        folder = output / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        in_dcp(folder, {key: value.data for key, value in weights.items()}, optimizer.state_dict())
        torch.save(schedule.state_dict(), folder / "scheduler.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    return output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("train", "path"),
    [
        (of_a_head_next_to_many_experts, WEIGHTS),
        (in_many_items_of_dcp, "pytorch_model_fsdp_0/__0_0.distcp"),
    ],
)
def test_old_bytes_of_many_tensors_are_a_warning_and_a_healthy_run_is_clean(
    train: Callable[[Path], Path], path: str, tmp_path: Path
) -> None:
    output = train(tmp_path)
    assert [told(output / f"checkpoint_{number}") for number in (2, 3)] == [[], []]
    shutil.copy(output / "checkpoint_2" / path, output / "checkpoint_3" / path)
    ((severity, words),) = told(output / "checkpoint_3")
    assert severity == "warning"
    assert words.startswith(f"{path}: weights as in checkpoint_2 ")


def in_sub_folder(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> str:
    """Save as hooks of diffusers' scripts do."""
    (folder / "unet").mkdir()
    save_file(weights, folder / "unet/diffusion_pytorch_model.safetensors")
    torch.save(optimizer, folder / "optimizer.bin")
    return "unet/diffusion_pytorch_model.safetensors"


def in_shards(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> str:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, key in zip(names, weights, strict=True):
        save_file({key: weights[key]}, folder / name)
    index = {"metadata": {}, "weight_map": dict(zip(weights, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(optimizer, folder / "optimizer.bin")
    return names[0]


def in_dcp(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> str:
    """Save as FSDP does."""
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [in_sub_folder, in_shards, in_dcp], ids=lambda save: save.__name__)
def test_every_layout_is_compared(save: Callable[..., str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    stale: Tensors = {}
    for number in range(1, 5):
        model(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        schedule.step()
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        folder = tmp_path / f"checkpoint_{number}"
        folder.mkdir()
        # The third save writes the weights of the second one.
        path = save(folder, stale if number == 3 else weights, optimizer.state_dict())
        stale = weights
        torch.save(schedule.state_dict(), folder / "scheduler.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    found = [told(tmp_path / f"checkpoint_{number}") for number in range(1, 5)]
    assert [len(findings) for findings in found] == [0, 0, 1, 0]
    ((severity, words),) = found[2]
    assert severity == "warning"
    assert words.startswith(f"{path}: weights as in checkpoint_2 (expected different values: ")
    assert "at a learning rate of 0.001" in words


def saved_by_hooks(
    output: Path, numbers: tuple[int, ...] = (1, 2, 3, 4), trained: str = "unet"
) -> Path:
    """Save the trained ``unet`` with its average, a frozen ``vae``, a frozen ``teacher`` of the
    same shapes, and a ``target`` that takes the values of the unet at every second save.
    """
    torch.manual_seed(0)
    unet, vae, teacher = torch.nn.Linear(30, 40), torch.nn.Linear(30, 20), torch.nn.Linear(30, 40)
    optimizer = torch.optim.Adam(unet.parameters(), lr=1e-3)
    average = {key: value.clone() for key, value in unet.state_dict().items()}
    target = average
    for number in range(1, 5):
        unet(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        weights = {key: value.clone() for key, value in unet.state_dict().items()}
        average = {key: 0.9 * value + 0.1 * weights[key] for key, value in average.items()}
        target = weights if number % 2 else target
        if number not in numbers:
            continue
        folder = output / f"checkpoint_{number}"
        models = {"vae": vae.state_dict(), "unet_ema": average}
        if trained == "unet":
            models["unet"] = weights
        else:
            save_model(folder, "", weights)
            models |= {"teacher": teacher.state_dict(), "target": target}
        for name, tensors in models.items():
            save_model(folder, name, tensors)
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    return output


def save_model(folder: Path, name: str, tensors: Tensors) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = "diffusion_pytorch_model.safetensors" if name else "model.safetensors"
    save_file(tensors, folder / name / file)
    if name:
        of_average = {"decay": 0.9, "optimization_step": 4} if name == "unet_ema" else {}
        config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.36.0", **of_average}
        (folder / name / "config.json").write_text(json.dumps(config))


@OPTIONS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("numbers", "source", "target", "severity"),
    [
        ((1, 2, 3, 4), 2, 3, "warning"),
        ((2, 3, 4), 2, 3, "warning"),
        ((1, 2, 3), 2, 3, "warning"),
        # Two alone do not show that the model changes.
        ((2, 3), 2, 3, "note"),
        # A script may have gone back to its best weights.
        ((1, 2, 3, 4), 1, 4, "note"),
    ],
)
def test_a_trained_model_of_an_earlier_save_in_a_sub_folder_is_told(
    numbers: tuple[int, ...],
    source: int,
    target: int,
    severity: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The average next to it was new, so that the weights differed, and the folder was clean."""
    output = saved_by_hooks(tmp_path, numbers)
    name = "unet/diffusion_pytorch_model.safetensors"
    shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}" / name)
    ((folder, ((level, words),)),) = in_names(output, **options).items()
    assert (folder, level) == (f"checkpoint_{target}", severity)
    assert words.startswith(f"{name}: weights as in checkpoint_{source} (expected different values")
    if severity == "warning":
        assert "step in optimizer.bin went from 2 to 3 at a learning rate of 0.001)" in words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trained", ["unet", ""], ids=["in a sub-folder", "in the root"])
@pytest.mark.parametrize("numbers", [(1, 2, 3, 4), (1, 2), (2, 4)])
def test_frozen_and_target_models_in_sub_folders_are_clean(
    trained: str, numbers: tuple[int, ...], tmp_path: Path
) -> None:
    output = saved_by_hooks(tmp_path, numbers, trained)
    assert [told(folder) for folder in sorted(output.iterdir())] == [[]] * len(numbers)


def with_two_optimizers(
    output: Path,
    trained: Callable[[int], tuple[bool, bool]] = lambda number: (True, True),
    kinds: tuple[Any, Any] = (torch.optim.Adam, torch.optim.Adam),
    *,
    average: bool = False,
) -> Path:
    """Save a generator and a discriminator as ``save_state`` does, each with its optimizer.

    ``trained``: which of the two make a step before the save of this number.
    """
    torch.manual_seed(0)
    models = [torch.nn.Linear(30, 40), torch.nn.Linear(40, 20)]
    optimizers = [
        kind(model.parameters(), lr=1e-3) for kind, model in zip(kinds, models, strict=True)
    ]
    averages = [value.clone() for value in models[1].state_dict().values()]
    for number in range(1, 5):
        for model, optimizer, is_trained in zip(models, optimizers, trained(number), strict=True):
            model(torch.rand(2, model.in_features)).sum().backward()
            if is_trained:
                optimizer.step()
            optimizer.zero_grad()
        folder = output / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        saved = [model.state_dict() for model in models]
        if average:
            now = saved[1].values()
            averages = [0.9 * old + 0.1 * new for old, new in zip(averages, now, strict=True)]
            saved.append(dict(zip(saved[1], averages, strict=True)))
        for index, tensors in enumerate(saved):
            save_file(tensors, folder / f"model{f'_{index}' if index else ''}.safetensors")
        for index, optimizer in enumerate(optimizers):
            name = f"optimizer{f'_{index}' if index else ''}.bin"
            torch.save(optimizer.state_dict(), folder / name)
        torch.save({"step": number}, folder / "random_states_0.pkl")
    return output


_STEPS_OF = "step in {} went from 2 to 3 at a learning rate of 0.001)"
BOTH = ("optimizer.bin", "optimizer_1.bin")
OF_TWO = [
    *(
        ((name,), 2, 3, "warning", f"{words} values: {_STEPS_OF.format(counter)}")
        for name, words, counter in (
            ("model.safetensors", "weights as in checkpoint_2 (expected different", BOTH[0]),
            ("model_1.safetensors", "weights as in checkpoint_2 (expected different", BOTH[0]),
            ("optimizer.bin", "optimizer state of checkpoint_2 (expected new", BOTH[1]),
            ("optimizer_1.bin", "optimizer state of checkpoint_2 (expected new", BOTH[0]),
        )
    ),
    # A script may have gone back to the best weights of a model.
    *(
        ((f"model{end}.safetensors",), *pair, "note", f"weights as in checkpoint_{pair[0]} ")
        for end in ("", "_1")
        for pair in ((1, 3), (2, 4), (1, 4))
    ),
    (BOTH[1:], 1, 4, "warning", "optimizer state of checkpoint_1 (expected"),
    (BOTH[1:], 3, 2, "warning", "optimizer state of checkpoint_3, a later save: its step"),
    # With their schedulers, or without any, no counter is left that moved.
    *(
        (BOTH, *pair, "warning", f"optimizer state of checkpoint_{pair[0]}{words}")
        for words, pairs in (
            (" (expected new values: the weights differ)", ((1, 2), (2, 3), (1, 4))),
            (", a later save: its step {} matches the number in the", ((3, 2), (4, 1))),
        )
        for pair in pairs
    ),
]  # fmt: skip
"""Files of a save -> severity and words where they are copied over those of another."""


@OPTIONS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("names", "source", "target", "severity", "words"), OF_TWO)
def test_files_of_another_save_among_several_are_found_there_alone(
    names: tuple[str, ...],
    source: int,
    target: int,
    severity: str,
    words: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """All optimizers, and all models, were compared as one: a GAN with one old file was clean."""
    output = with_two_optimizers(tmp_path)
    for name in names:
        shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}" / name)
    folder = output / f"checkpoint_{target}"
    ((name, ((level, sentence),)),) = in_names(output, **options).items()
    assert (name, level) == (folder.name, severity)
    which = names if "later" not in words else names[:1]
    assert sentence.startswith(f"{' and '.join(which)}: {words.format(source)}")
    if severity == "note":
        finding = finding_of(folder)
        assert finding.advice.startswith("if the script itself restored the values of checkpoint_")
        assert finding.differs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("is_skipped", [True, False])
def test_steps_that_a_script_skips_while_its_schedule_moves_are_a_note(
    is_skipped: bool, at: int, tmp_path: Path
) -> None:
    """The next save shows the steps that old bytes do not have."""
    output = with_two_optimizers(tmp_path, lambda number: (not is_skipped or number != at,) * 2)
    for number in range(1, 5):
        schedule = {"last_epoch": number, "_step_count": number + 1, "_last_lr": [1e-3]}
        folder = output / f"checkpoint_{number}"
        torch.save(schedule, folder / "scheduler.bin")
        if number == at and not is_skipped:
            for path in (output / f"checkpoint_{at - 1}").glob("[mo]*"):
                shutil.copy(path, folder)
    ((severity, words),) = told(output / f"checkpoint_{at}")
    assert severity == ("note" if is_skipped or at == 4 else "warning")
    assert f"last_epoch in scheduler.bin went from {at - 1} to {at}" in words


HEALTHY_OF_TWO: dict[str, dict[str, Any]] = {
    "both": {},
    "in phases": {"trained": lambda number: (number % 2 == 1, number % 2 == 0)},
    "a late discriminator": {"trained": lambda number: (True, number > 3)},
    "an average": {"trained": lambda number: (True, number == 1), "average": True},
    "an optimizer without states": {"kinds": (torch.optim.Adam, torch.optim.SGD)},
}


@OPTIONS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEALTHY_OF_TWO)
def test_an_optimizer_that_made_no_step_is_clean(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    output = with_two_optimizers(tmp_path, **HEALTHY_OF_TWO[name])
    assert in_names(output, **options) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_a_dcp_folder_prove_a_step(dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a schedule nothing else counts in a run of FSDP, and no rate is known: the metadata
    has no values.
    """
    for number, value in ((1, 0.0), (2, 1.0), (3, 1.0)):
        state = {
            "step": torch.tensor(8.0 * number, dtype=dtype),
            "exp_avg": torch.full((16,), number / 10),
            "exp_avg_sq": torch.full((16,), number / 100),
        }
        folder = tmp_path / f"checkpoint_{number}"
        optimizer = {"state": {"w": state}, "param_groups": [{"lr": 1e-3, "params": ["w"]}]}
        in_dcp(folder, {"w": torch.full((16,), value)}, optimizer)
    assert told(tmp_path / "checkpoint_2") == []
    ((severity, words),) = told(folder)
    assert severity == "note"
    assert "step in optimizer_0 went from 16 to 24" in words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("scale", "expected"), [(2.0**16, "warning"), (2.0**13, "warning"), (2.0**6, "")]
)
def test_a_scale_that_fell_less_often_than_steps_were_counted_proves_a_step(
    scale: float, expected: str, tmp_path: Path
) -> None:
    output = with_skipped_steps(tmp_path / "run")
    for name in ("checkpoint-2", "checkpoint-3"):
        shutil.rmtree(output / name)
    folder = output / "checkpoint-10"
    shutil.copytree(output / "checkpoint-1", folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 10}))
    scaler = torch.load(folder / "scaler.pt")
    torch.save({**scaler, "scale": scale}, folder / "scaler.pt")
    shutil.rmtree(output / "checkpoint-4")
    assert "".join(severity for severity, _ in told(folder)) == expected


@pytest.mark.filterwarnings("ignore")
def test_one_shard_of_an_earlier_save_is_found(tmp_path: Path) -> None:
    """The others were new, so that the weights differed, and the folder was clean."""
    run_folder = sharded_runs(tmp_path / "run")
    # The first one has an embedding alone, in which the words of the first rows were in no batch.
    _, *names = sorted(
        path.name for path in (run_folder / "checkpoint-2").glob("model-*.safetensors")
    )
    for name in names:
        new = (run_folder / "checkpoint-3" / name).read_bytes()
        folder = copied(run_folder, name)
        for options in ({}, {"data": True}):
            ((severity, words),) = told(folder, **options)
            assert severity == "warning"
            assert words.startswith(
                f"{name}: weights as in checkpoint-2 (expected different values: step in "
                f"{OPTIMIZER} went from 2 to 3"
            )
        (folder / name).write_bytes(new)
    for source in (2, 1):
        copied(run_folder, *names[:2], source=source)
        # They have one cause, and one finding.
        ((severity, words),) = told(folder)
        assert severity == "warning"
        assert words.startswith(f"{' and '.join(names[:2])}: weights as in checkpoint-{source} ")
        assert run(["check", "-r", str(run_folder)]) == 1
    words = "copy these files of both again from their source, or resume from"
    assert words in finding_of(folder).advice


@pytest.mark.filterwarnings("ignore")
def test_shards_without_an_optimizer_are_listed_as_not_checked(tmp_path: Path) -> None:
    """Weights that are frozen stay equal as well, so that it is no finding."""
    run_folder = sharded_runs(tmp_path / "run", save_only_model=True)
    folder = copied(run_folder, "model-00003-of-00004.safetensors")
    assert told(folder) == []
    assert any(
        words.startswith("whether all files belong to one save")
        for words in check(folder).not_checked
    )


def test_a_save_without_a_step_between_is_a_copy(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(made, torch.optim.Adam(made.parameters()))
    for number in (1, 2, 3):
        if number < 3:
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
        accelerator.save_state(str(tmp_path / f"checkpoint_{number}"))
    assert told(tmp_path / "checkpoint_2") == []
    assert told(tmp_path / "checkpoint_3") == [
        (
            "note",
            f"{WEIGHTS}: copy of checkpoint_2 (equal weights and optimizer state, and no counter "
            "moved)" + SAMPLED,
        )
    ]
    assert run(["check", "-r", str(tmp_path)]) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "is_old", "expected"),
    [
        (torch.bfloat16, False, "note"),
        (torch.float32, False, ""),
        (torch.float32, True, "warning"),
    ],
)
def test_weights_of_16_bits_may_stay(
    dtype: torch.dtype, is_old: bool, expected: str, tmp_path: Path
) -> None:
    """A norm begins with ones: in bfloat16 a step of 1e-3 changes none."""
    model = torch.nn.LayerNorm(32, bias=False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for number in (1, 2):
        model(torch.rand(2, 32, dtype=dtype)).square().sum().backward()
        optimizer.step()
        folder = write_save(tmp_path / f"checkpoint_{number}", model.state_dict(), optimizer)
    if is_old:
        shutil.copy(tmp_path / "checkpoint_1" / WEIGHTS, folder)
    assert "".join(severity for severity, _ in told(folder)) == expected


def test_weights_without_a_learning_rate_are_a_note(tmp_path: Path) -> None:
    output = runs(tmp_path / "run", save_only_model=True)
    folder = copied(output, WEIGHTS)
    assert [severity for severity, _ in told(folder)] == ["note"]


def test_another_format_or_a_missing_file_shows_nothing(run_of_trainer: Path) -> None:
    folder = copied(run_of_trainer, WEIGHTS)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    assert told(folder) == []
    (folder / "pytorch_model.bin").unlink()
    (run_of_trainer / "checkpoint-2" / WEIGHTS).unlink()
    assert told(folder) == []


def test_the_finding_has_json_and_advice(run_of_trainer: Path) -> None:
    folder = copied(run_of_trainer, WEIGHTS)
    assert "stale-save" not in [one.code for one in check(folder).findings]
    finding = finding_of(folder, run_of_trainer / "checkpoint-2")
    document = json.loads(json.dumps(finding.as_json(str(folder))))
    assert (document["save"], document["begin"], document["end"]) == ("checkpoint-2", 2, 3)
    assert finding.severity is Severity.WARNING
    assert ". Resume from a checkpoint before checkpoint-2, and" in finding.advice
    assert ckptfix.latest_checkpoint(run_of_trainer) == run_of_trainer / "checkpoint-4"


@pytest.mark.slow
def test_a_store_is_compared_by_the_checksums_of_its_listing(
    run_of_trainer: Path, bucket: str
) -> None:
    copied(run_of_trainer, WEIGHTS)
    upload_folder(run_of_trainer, f"{bucket}/run")
    urls = [f"{bucket}/run/checkpoint-{number}" for number in (2, 3, 4)]
    reports = [check(url, siblings=urls) for url in urls]
    assert [
        [one.severity.value for one in each.findings if one.code == "stale-save"]
        for each in reports
    ] == [
        [],
        ["warning"],
        [],
    ]
    assert run(["check", "-r", f"{bucket}/run"]) == 1

"""The run state of a rank: what a load does with it when it is whole, missing, damaged, or of
another run.
"""

import logging
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptfix
from ckptfix.checkpoint.filenames import parse_file_name, run_state_name
from ckptfix.checkpoint.roles import Role
from ckptfix.devices.nested_values import from_plain
from ckptfix.training import LoadPolicy
from ckptfix.training.loading.load_state import load_state_tolerant
from ckptfix.training.resuming import run_state
from tests.training.ranks import run_ranks


class Run:
    """A small run on one process: a shuffled loader, dropout, a scheduler that is not prepared."""

    def __init__(self, kind: Callable[..., Any] = ckptfix.Accelerator, **options: Any) -> None:
        accelerate.state.GradientState._reset_state()
        accelerate.utils.set_seed(1)
        self.accelerator = kind(cpu=True, **options)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        raw = torch.optim.AdamW(self.layers.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(raw, [3, 7], gamma=0.5)
        data = TensorDataset(torch.arange(48.0).reshape(12, 4))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.layers, raw, loader)
        self.seen: list[Any] = []

    def train(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch[0]).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.seen.append((batch[0].tolist(), loss.item(), self.scheduler.get_last_lr()))

    def save_at(self, folder: Path, at: int) -> list[Any]:
        """Train two epochs, save after batch ``at``; return what followed."""
        after = 0
        for _ in range(2):
            for batch in self.loader:
                self.train(batch)
                if len(self.seen) == at:
                    self.accelerator.save_state(str(folder))
                    after = at
        return self.seen[after:]

    def resume(self, folder: Path, load: Callable[..., Any] | None = None) -> list[Any]:
        (load or self.accelerator.load_state)(str(folder))
        for _ in range(self.loader.iteration, 2):
            for batch in self.accelerator.resume_dataloader(self.loader):
                self.train(batch)
        return self.seen


def as_0_5_0(value: Any) -> Any:
    """Return a part of a run state as 0.5.0 wrote it: the state of Python's generator is a tuple of
    integers.
    """
    if isinstance(value, dict):
        return {key: as_0_5_0(inside) for key, inside in value.items()}
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], dict):
        version, numbers, gauss = value
        return version, tuple(from_plain(numbers).tolist()), gauss
    return [as_0_5_0(inside) for inside in value] if isinstance(value, list) else value


def test_a_run_state_of_0_5_0_is_read(tmp_path: Path) -> None:
    expected = Run().save_at(tmp_path / "c", 4)
    path = tmp_path / "c" / run_state_name(0)
    state = torch.load(path, weights_only=True)
    numbers = as_0_5_0(state["random"])["python"][1]
    assert (len(numbers), type(numbers[0])) == (625, int)
    torch.save({**as_0_5_0(state), "version": 1}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Run().resume(tmp_path / "c") == expected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint that was saved after batch 4 of 6."""
    Run().save_at(tmp_path / "c", 4)
    return tmp_path / "c"


def heard(load: Callable[[], object]) -> list[str]:
    """Return the warnings of a load."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load()
    return [str(one.message) for one in said]


@pytest.mark.parametrize("at", [1, 4, 6, 8, 12])
def test_a_run_on_one_process_goes_on_bit_for_bit(tmp_path: Path, at: int) -> None:
    expected = Run().save_at(tmp_path / "c", at)
    assert Run().resume(tmp_path / "c") == expected


class Noisy(TensorDataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> Any:
        (value,) = super().__getitem__(index)
        return (value + torch.rand(4) + random.random(),)


@pytest.mark.parametrize("how", ["rest", "skip", "continue"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_twice_within_an_epoch_goes_on_bit_for_bit(
    tmp_path: Path, how: str, workers: int
) -> None:
    def made() -> Run:
        run = Run()
        run.accelerator._dataloaders.clear()
        data = Noisy(torch.arange(80.0).reshape(20, 4))
        run.loader = run.accelerator.prepare(
            DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
        )
        return run

    def train(run: Run, used: int, until: int) -> None:
        for epoch in range(2):
            loader: Any = run.loader
            if used and not epoch:
                loader = run.accelerator.resume_dataloader(loader) if how == "rest" else loader
                loader = accelerate.skip_first_batches(loader, used) if how == "skip" else loader
            for number, batch in enumerate(loader):
                if how == "continue" and not epoch and number < used:
                    continue
                run.train(batch)
                if used + len(run.seen) == until:
                    run.accelerator.save_state(str(tmp_path / str(until)))
                    return

    through = made()
    train(through, 0, 1000)
    train(made(), 0, 3)
    for start, end in ((3, 5), (5, 6), (6, 1000)):
        run = made()
        run.accelerator.load_state(str(tmp_path / str(start)))
        train(run, start, end)
        assert run.seen == through.seen[start:end]


def test_a_tolerant_load_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected = Run().save_at(tmp_path / "c", 4)
    run, reports = Run(), []

    def load(path: str) -> None:
        reports.append(load_state_tolerant(run.accelerator, path))

    assert run.resume(tmp_path / "c", load) == expected
    assert reports[0].inexact == ()
    assert reports[0].as_json()["inexact"] == []


def test_what_a_policy_ignores_stays_as_it_is(saved: Path) -> None:
    run = Run()
    torch.manual_seed(77)
    before = torch.get_rng_state()
    report = load_state_tolerant(run.accelerator, saved, policy=LoadPolicy(rng="ignore"))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert any("rng" in words for words in report.inexact)


def test_a_save_changes_nothing_that_the_run_draws(tmp_path: Path) -> None:
    without = Run().save_at(tmp_path / "c", 0)
    saving = Run()
    saving.save_at(tmp_path / "c", 4)
    assert saving.seen == without


def test_stock_accelerate_loads_the_folder(saved: Path) -> None:
    assert (saved / run_state_name(0)).stat().st_size < 1 << 18
    parsed = parse_file_name(run_state_name(0))
    assert parsed is not None
    assert parsed.role is Role.RUN_STATE
    Run(accelerate.Accelerator).accelerator.load_state(str(saved))
    assert ckptfix.check(saved).status == 0


def test_of_a_folder_of_stock_accelerate_the_log_says_what_is_not_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(accelerate.Accelerator).save_at(tmp_path / "c", 4)
    with caplog.at_level(logging.WARNING, "ckptfix"):
        Run().accelerator.load_state(str(tmp_path / "c"))
    assert [one.message for one in caplog.records if "not bit-exact: data order" in one.message]
    report = load_state_tolerant(Run().accelerator, tmp_path / "c")
    assert "saved without ckptfix" in report.inexact[0]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "noise": lambda content: random.Random(3).randbytes(4000),
    "flipped": (
        lambda content: content[:40] + bytes(byte ^ 255 for byte in content[40:400]) + content[400:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_state_is_named_and_the_rest_is_loaded(saved: Path, damage: str) -> None:
    path = saved / run_state_name(0)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    run = Run()
    with pytest.warns(UserWarning, match=r"not bit-exact: run_state_0\.pt"):
        run.accelerator.load_state(str(saved))
    assert run.optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    "value", ["of another kind", None, [{"x": 1}]], ids=["text", "none", "list"]
)
@pytest.mark.parametrize("field", ["version", "loaders", "random", "custom", "world", "parameters"])
def test_a_run_state_of_another_kind_never_fails_a_load(
    saved: Path, field: str, value: object
) -> None:
    state = torch.load(saved / run_state_name(0), weights_only=True)
    torch.save({**state, field: value}, saved / run_state_name(0))
    said = heard(lambda: Run().accelerator.load_state(str(saved)))
    if field in ("version", "random", "world"):
        assert any("not bit-exact" in words for words in said)


def test_a_state_that_is_not_what_was_loaded_is_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    monkeypatch.setattr(type(run.scheduler), "load_state_dict", lambda self, state: None)
    said = "unprepared scheduler: after loading, it differs from the checkpoint"
    with pytest.warns(UserWarning, match=said):
        run.accelerator.load_state(str(saved))


def test_a_script_that_skips_nothing_is_warned_once(saved: Path) -> None:
    run = Run()
    run.accelerator.load_state(str(saved))
    (said,) = heard(lambda: list(map(run.train, run.loader)))
    assert "batches 1 to 4 of this pass are used again" in said


def test_other_data_are_named(saved: Path) -> None:
    run = Run()
    run.accelerator._dataloaders.clear()
    run.accelerator.prepare(DataLoader(TensorDataset(torch.zeros(30, 4)), batch_size=2))
    with pytest.warns(UserWarning, match="expected TensorDataset of 12, found TensorDataset of 30"):
        run.accelerator.load_state(str(saved))


def test_only_prepared_loaders_can_go_on(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(
        ckptfix.UsageError, match="expected a data loader that this Accelerator has prepared"
    ):
        run.accelerator.resume_dataloader([1, 2])
    assert run.accelerator.resume_dataloader(run.loader) is run.loader


def test_gradients_of_a_cut_accumulation_are_in_the_file(tmp_path: Path) -> None:
    expected = Run(gradient_accumulation_steps=3).save_at(tmp_path / "c", 4)
    names = {f"0.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
    assert set(run_state.read(tmp_path / "c", 0)["gradients"]) == names
    assert Run(gradient_accumulation_steps=3).resume(tmp_path / "c") == expected


class Headed(torch.nn.Module):  # type: ignore[misc]
    """A model whose head can have another size, or another name."""

    def __init__(self, size: int = 2, head: str = "head") -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3)
        self.add_module(head, torch.nn.Linear(3, size))

    def forward(self, batch: torch.Tensor) -> Any:
        for layer in self.children():
            batch = layer(batch)
        return batch


def prepared_run(*models: torch.nn.Module) -> tuple[ckptfix.Accelerator, list[Any]]:
    """Return an accelerator and its models, each with an optimizer, that accumulates two
    batches.
    """
    accelerate.state.GradientState._reset_state()
    accelerator = ckptfix.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    return accelerator, list(accelerator.prepare(*models, *optimizers))[: len(models)]


def save_a_cut_accumulation(folder: Path, *models: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Save after the first of two batches; return the gradients."""
    accelerator, prepared = prepared_run(*models)
    with accelerator.accumulate(*prepared):
        for model in prepared:
            accelerator.backward(model(torch.ones(4, 3)).pow(2).sum())
    accelerator.save_state(str(folder))
    gradients = run_state.read(folder, 0)["gradients"]
    assert len(gradients) == 4 * len(models)
    return dict(gradients)


def gradients_of(accelerator: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in run_state._named_parameters(accelerator)
        if parameter.grad is not None
    }


def no_gradients(number: int, why: str, effect: str = "a new accumulation starts") -> str:
    return f"model {number}: the accumulated gradients were not restored, so {effect}: {why}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("size", "policy"),
    [
        # The next step of a new model used the old model's gradients.
        (2, {"models": "ignore", "optimizers": "ignore"}),
        (2, {"models": "ignore", "optimizers": "require"}),
        # torch refused the gradient of the head when others were set already, and all that a run
        # state restores after the gradients was left out.
        (5, {"models": "warn", "optimizers": "warn"}),
        (5, {"models": "partial", "optimizers": "warn"}),
    ],
)
def test_a_model_that_is_not_restored_gets_no_gradients(
    tmp_path: Path, size: int, policy: dict[str, Any]
) -> None:
    save_a_cut_accumulation(tmp_path / "c", Headed())
    random_state = torch.get_rng_state()
    accelerator, _ = prepared_run(Headed(size))
    torch.manual_seed(5)
    report = load_state_tolerant(accelerator, tmp_path / "c", policy=LoadPolicy(**policy))
    assert not gradients_of(accelerator)
    assert (accelerator.step, accelerator.sync_gradients) == (0, True)
    assert report.inexact[-1] == no_gradients(0, "the model was not restored in full")
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_swapped", [False, True])
def test_of_two_models_the_restored_one_gets_its_gradients(
    tmp_path: Path, is_swapped: bool
) -> None:
    """Also where the script prepares its models in another order now: names begin with numbers."""
    saved = save_a_cut_accumulation(tmp_path / "c", Headed(4), Headed(head="top"))
    now = [Headed(6), Headed(head="top")]
    accelerator, _ = prepared_run(*(reversed(now) if is_swapped else now))
    policy = LoadPolicy(models="warn", optimizers="warn")  # type: ignore[arg-type]
    report = load_state_tolerant(accelerator, tmp_path / "c", policy=policy)
    restored = gradients_of(accelerator)
    number = 0 if is_swapped else 1
    assert {f"1{name[1:]}" for name in restored} == {name for name in saved if name[0] == "1"}
    assert all(name[0] == str(number) for name in restored)
    assert all(torch.equal(grad, saved[f"1{name[1:]}"]) for name, grad in restored.items())
    assert (accelerator.step, accelerator.sync_gradients) == (1, False)
    effect = "its next step uses fewer batches"
    assert report.inexact[-1] == no_gradients(0, "the model was not restored in full", effect)


@pytest.mark.parametrize(
    ("name", "gradient", "why"),
    [
        (
            "head.bias",
            torch.ones(7),
            "the gradient of 'head.bias' has shape [7] in the checkpoint, expected [2]",
        ),
        (
            "head.bias",
            torch.ones(2).double(),
            "the gradient of 'head.bias' has dtype torch.float64 in the checkpoint, expected "
            "torch.float32",
        ),
        ("tail.bias", torch.ones(2), "this run has no such parameter: 'tail.bias'"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_gradients_that_do_not_fit_are_left_out_of_a_stock_load(
    tmp_path: Path, name: str, gradient: torch.Tensor, why: str
) -> None:
    save_a_cut_accumulation(tmp_path / "c", Headed())
    state = run_state.read(tmp_path / "c", 0)
    gradients = {**state["gradients"], f"0.{name}": gradient}
    torch.save({**state, "gradients": gradients}, tmp_path / "c" / run_state_name(0))
    accelerator, _ = prepared_run(Headed())
    (said,) = heard(lambda: accelerator.load_state(str(tmp_path / "c")))
    assert said == f"{tmp_path / 'c'}: not bit-exact: {no_gradients(0, why)}"
    assert not gradients_of(accelerator)
    assert (accelerator.step, accelerator.sync_gradients) == (0, True)


def test_another_accumulation_begins_with_a_complete_cycle(tmp_path: Path) -> None:
    """The symptom: the first step took 2 batches instead of 4, with a quarter of each one's
    gradient.
    """
    Run(gradient_accumulation_steps=2).save_at(tmp_path / "c", 2)
    run = Run(gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="saved with gradient_accumulation_steps=2, now 4"):
        run.accelerator.load_state(str(tmp_path / "c"))
    is_step = []
    for batch in run.accelerator.resume_dataloader(run.loader):
        run.train(batch)
        is_step.append(run.accelerator.sync_gradients)
    assert is_step == [False, False, False, True]


@pytest.mark.slow
def test_another_number_of_processes_uses_no_sample_twice(tmp_path: Path) -> None:
    Run().save_at(tmp_path / "c", 2)

    def work(rank: int) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        run = Run()
        said = heard(lambda: run.accelerator.load_state(str(tmp_path / "c")))
        assert run.accelerator.step == 0
        is_said = any("not bit-exact: saved with 1 process, now 2" in words for words in said)
        assert is_said == (rank == 0), said
        seeds = (torch.initial_seed(), random.random(), float(np.random.rand()))
        rest = list(run.accelerator.resume_dataloader(run.loader))
        torch.save((len(rest), seeds), tmp_path / f"{rank}.pt")

    assert run_ranks(2, work) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first[0] == second[0] == 2, (
        "4 of 12 samples were used: 2 batches of 2 are left for each of 2 processes"
    )
    assert first[1] != second[1]


@pytest.mark.slow
def test_fsdp2_with_a_scaler_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """torch steps the optimizer while it sets its state, and that step updates the scaler
    (accelerate#4289).
    """

    def work_of(*, resumes: bool) -> Callable[[int], None]:
        def work(rank: int) -> None:
            accelerate.state.AcceleratorState._reset_state(True)
            accelerate.utils.set_seed(1)
            plugin = accelerate.utils.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                cpu_ram_efficient_loading=False,
                state_dict_type="SHARDED_STATE_DICT",
            )
            accelerator = ckptfix.Accelerator(cpu=True, fsdp_plugin=plugin)
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
            )
            data = TensorDataset(torch.arange(160.0).reshape(40, 4) / 100)
            model, optimizer, loader = accelerator.prepare(
                layers,
                torch.optim.AdamW(layers.parameters(), lr=0.1),
                DataLoader(data, batch_size=2, shuffle=True),
            )
            accelerate.utils.set_seed(50 + rank)
            if resumes:
                accelerator.load_state(str(tmp_path / "c"))
            seen = []
            for _ in range(loader.iteration, 2):
                for (batch,) in accelerator.resume_dataloader(loader):
                    loss = model(batch).pow(2).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append((batch.tolist(), loss.item(), accelerator.scaler.state_dict()))
                    if len(seen) == 4 and not resumes:
                        accelerator.save_state(str(tmp_path / "c"))
            torch.save(seen, tmp_path / f"{'resumed' if resumes else 'through'}-{rank}.pt")

        return work

    assert run_ranks(2, work_of(resumes=False)) == [0, 0]
    assert run_ranks(2, work_of(resumes=True)) == [0, 0]
    for rank in range(2):
        through, resumed = (
            torch.load(tmp_path / f"{phase}-{rank}.pt", weights_only=False)
            for phase in ("through", "resumed")
        )
        assert len(resumed) == 16
        assert resumed == through[4:]


class TwoDecays(Run):
    """Two schedulers of one type drive one optimizer, neither is prepared."""

    def __init__(self) -> None:
        super().__init__()
        kind = torch.optim.lr_scheduler.ExponentialLR
        self.decays = [kind(self.scheduler.optimizer, gamma) for gamma in (0.9, 0.8, 0.7, 0.6)]


def test_unprepared_schedulers_of_one_type_get_their_own_states(tmp_path: Path) -> None:
    saved = TwoDecays()
    saved.accelerator.save_state(str(tmp_path / "c"))
    loaded = TwoDecays()
    loaded.accelerator.load_state(str(tmp_path / "c"))
    assert [one.gamma for one in loaded.decays] == [0.9, 0.8, 0.7, 0.6]


@pytest.mark.parametrize("is_tolerant", [False, True])
def test_a_run_state_is_left_out_when_accelerate_alone_saved_over_its_checkpoint(
    tmp_path: Path, is_tolerant: bool
) -> None:
    folder = tmp_path / "c"
    Run().save_at(folder, 2)
    Run(accelerate.Accelerator).save_at(folder, 4)
    assert (folder / run_state_name(0)).exists()
    stock, guarded = Run(accelerate.Accelerator), Run()
    stock.accelerator.load_state(str(folder))
    expected = torch.rand(3).tolist()
    said = (
        r"\w+\.(bin|pkl) has changed since run_state_0\.pt was written, for example by a save "
        r"without ckptfix or a copy; run_state_0\.pt was ignored"
    )
    tolerant = partial(load_state_tolerant, guarded.accelerator)
    load = tolerant if is_tolerant else guarded.accelerator.load_state
    with pytest.warns(UserWarning, match=said):
        load(str(folder))
    assert torch.rand(3).tolist() == expected
    assert guarded.accelerator.resume_dataloader(guarded.loader) is guarded.loader


def test_a_checkpoint_that_was_copied_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected = Run().save_at(tmp_path / "c", 4)
    shutil.copytree(tmp_path / "c", tmp_path / "copy", copy_function=shutil.copyfile)
    assert Run().resume(tmp_path / "copy") == expected


@pytest.mark.parametrize("between", ["fsdp", "fsdp-full", "zero2"])
def test_a_checkpoint_that_migrate_wrote_goes_on_bit_for_bit(tmp_path: Path, between: str) -> None:
    expected = Run().save_at(tmp_path / "c", 4)
    ckptfix.migrate(tmp_path / "c", tmp_path / "between", to=between, state="all")
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    assert Run().resume(tmp_path / "new") == expected


def test_a_damaged_run_state_of_another_number_of_processes_fails_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.accelerator.save_state(str(tmp_path / "c"))
    state = torch.load(tmp_path / "c" / run_state_name(0))
    state["world"], state["random"] = 2, {}
    torch.save(state, tmp_path / "c" / run_state_name(0))
    monkeypatch.setattr(type(run.accelerator), "process_index", 1)
    (problem,) = run_state.go_on(run.accelerator, tmp_path / "c")
    assert problem.startswith("run_state_1.pt: ValueError")


class Bare(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer whose state of a parameter is no dict."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for one in self.param_groups[0]["params"]:
            self.state[one] = torch.zeros(1)


def test_an_optimizer_with_states_of_its_own_kind_costs_no_run_state(tmp_path: Path) -> None:
    accelerator = ckptfix.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Bare(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(str(tmp_path / "c"))
    assert (tmp_path / "c" / run_state_name(0)).exists()


def test_a_sparse_tensor_of_the_script_has_a_size() -> None:
    """Asked for its nbytes, it raises RuntimeError, and no run state was saved."""
    assert run_state._size({"noise": torch.eye(4).to_sparse()}) == 16 * 4 + 8

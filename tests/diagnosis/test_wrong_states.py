"""State files that hold something else: what a loader refuses or misreads is found, and no healthy
state is blamed.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from ckptfix import check, latest_checkpoint
from tests.sampling import sampled

CODES = ("wrong-state", "unknown-state")

OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
RANDOM, CUSTOM, SCALER = "random_states_0.pkl", "custom_checkpoint_0.pkl", "scaler.pt"


class Counter:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """A training run of stock accelerate after some steps. Parts that a test does not name are the
    simplest ones.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        optimizer: Any = torch.optim.AdamW,
        scheduler: Any = None,
        custom: Any = None,
    ) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        made = optimizer(self.model.parameters(), lr=0.1)
        schedule = (scheduler or (lambda inner: lr_scheduler.StepLR(inner, 2)))(made)
        self.counter = custom or Counter()
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, made, schedule
        )
        self.accelerator.register_for_checkpointing(self.counter)
        for _ in range(steps):
            self.accelerator.backward(self.model(torch.randn(4, 3)).sum())
            self.optimizer.step()
            (
                self.scheduler.step(1.0)
                if isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
                else self.scheduler.step()
            )
            self.optimizer.zero_grad()
        self.accelerator.step = steps

    def save(self, root: Path) -> Path:
        self.accelerator.save_state(str(root))
        scaler = torch.amp.GradScaler("cpu")
        torch.save(scaler.state_dict(), root / SCALER)
        return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the objects in the files of a healthy checkpoint."""
    root = Run().save(tmp_path_factory.mktemp("run") / "checkpoint_0")
    return {
        path.name: torch.load(path, weights_only=False)
        for path in root.iterdir()
        if path.suffix != ".safetensors"
    }


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Run().save(tmp_path_factory.mktemp("run") / "checkpoint_0")
    assert told(root) == []
    assert loads(root) == "right"
    return root


@pytest.fixture
def root(healthy: Path, tmp_path: Path) -> Path:
    """Return a healthy checkpoint to damage."""
    return Path(shutil.copytree(healthy, tmp_path / "checkpoint_0"))


def told(root: Path, *codes: str) -> list[str]:
    report = check(root)
    findings = [finding for finding in report.all_findings if finding.code in (codes or CODES)]
    assert report.status == 1 or not findings
    return [f"{finding.code}: {finding}" for finding in findings]


def loads(root: Path) -> str:
    """Load with stock accelerate into a new run: "right", "wrong" where it says nothing, or the
    name of the error.
    """
    run = Run(steps=0)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        run.accelerator.load_state(str(root))
        if (root / SCALER).exists():
            torch.amp.GradScaler("cpu").load_state_dict(torch.load(root / SCALER))
    except Exception as error:
        return type(error).__name__
    is_restored = not torch.equal(before, torch.get_rng_state()) and run.accelerator.step == 3
    return "right" if is_restored and run.scheduler.scheduler.last_epoch == 3 else "wrong"


def model_state() -> Any:
    return Run(steps=0).model.state_dict()


CONTENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an optimizer": lambda saved: saved[OPTIMIZER],
    "a scheduler": lambda saved: saved[SCHEDULER],
    "a nested scheduler": lambda saved: {"_schedulers": [saved[SCHEDULER]], "_milestones": [1], "_last_lr": [0.1]},
    "a plateau scheduler": lambda saved: {"last_epoch": 3, "num_bad_epochs": 0, "patience": 10},
    "random states": lambda saved: saved[RANDOM],
    "a grad scaler": lambda saved: saved[SCALER],
    "a model": lambda saved: model_state(),
    "a custom object": lambda saved: saved[CUSTOM],
    "an empty dict": lambda saved: {},
    "nothing": lambda saved: None,
    "a tensor": lambda saved: torch.ones(2),
    "a list": lambda saved: [1, 2],
    "a number": lambda saved: 3,
    "a string": lambda saved: "state",
    "no state": lambda saved: {"param_groups": saved[OPTIMIZER]["param_groups"]},
    "no groups": lambda saved: {"state": saved[OPTIMIZER]["state"]},
    "a state of None": lambda saved: {**saved[OPTIMIZER], "state": None},
    "a state in a list": lambda saved: {**saved[OPTIMIZER], "state": []},
    "groups of None": lambda saved: {**saved[OPTIMIZER], "param_groups": None},
    "groups without parameters": lambda saved: {"state": {}, "param_groups": [{"lr": 0.1}]},
    "groups of a number": lambda saved: {
        **saved[OPTIMIZER],
        "param_groups": [{**saved[OPTIMIZER]["param_groups"][0], "params": 4}],
    },
    "groups of a text": lambda saved: {
        **saved[OPTIMIZER],
        "param_groups": [{**saved[OPTIMIZER]["param_groups"][0], "params": "01"}],
    },
    "groups of a dict": lambda saved: {
        **saved[OPTIMIZER],
        "param_groups": [{**saved[OPTIMIZER]["param_groups"][0], "params": {}}],
    },
    "no group": lambda saved: {**saved[OPTIMIZER], "param_groups": []},
    "an optimizer in a list": lambda saved: [saved[OPTIMIZER]],
    "an optimizer in a tuple": lambda saved: (saved[OPTIMIZER],),
    "an optimizer in a dict": lambda saved: {"optimizer": saved[OPTIMIZER]},
    "a scheduler in a list": lambda saved: [saved[SCHEDULER]],
    "a scheduler in a dict": lambda saved: {"scheduler": saved[SCHEDULER]},
}  # fmt: skip

JUDGED = (
    "an optimizer", "a scheduler", "a plateau scheduler", "random states", "a model",
    "a state of None", "a state in a list", "groups of None", "groups without parameters",
    "groups of a number", "groups of a text", "groups of a dict", "no group",
)  # fmt: skip
"""Contents that are no gradient scaler's. A disabled one saves an empty dict, and a script may use
its name.
"""

UNJUDGED = {
    # A dict of unknown keys may be a custom scheduler's, and the script may have another scheduler
    # than it had.
    SCHEDULER: (
        "a nested scheduler",
        "a custom object",
        "an empty dict",
        "no state",
        "no groups",
        "a state of None",
        "a state in a list",
        "groups of None",
        "groups without parameters",
        "an optimizer in a dict",
    ),
    SCALER: tuple(content for content in CONTENTS if content not in JUDGED),
}

CASES = [
    (name, content)
    for name in (OPTIMIZER, SCHEDULER, RANDOM, SCALER)
    for content in CONTENTS
    if content not in UNJUDGED.get(name, ())
]


@pytest.mark.parametrize("case", sampled(CASES), ids=" <- ".join)
def test_every_content_that_a_load_refuses_or_misreads_is_found(
    case: tuple[str, str], saved: dict[str, Any], root: Path
) -> None:
    name, content = case
    torch.save(CONTENTS[content](saved), root / name)
    if loads(root) == "right":
        assert told(root) == []
    else:
        assert len(told(root)) == 1
        assert f" {name}: it holds " in told(root)[0]


@pytest.mark.parametrize("names", [
    (OPTIMIZER, SCHEDULER), (OPTIMIZER, RANDOM), (SCHEDULER, RANDOM), (OPTIMIZER, SCALER),
    (SCHEDULER, SCALER), (RANDOM, SCALER),
], ids=" and ".join)  # fmt: skip
def test_two_files_that_were_exchanged_name_each_other(names: tuple[str, str], root: Path) -> None:
    exchanged(root, *names)
    assert loads(root) != "right"
    sentences = told(root, "wrong-state")
    assert len(sentences) == 2
    for name, partner in (names, names[::-1]):
        assert any(
            f" {name}: it holds " in one and one.endswith(f"swapped with {partner}")
            for one in sentences
        )


def scales(state: Any) -> bool:
    """Return whether a gradient scaler loads a state, steps and updates itself."""
    scaler = torch.amp.GradScaler("cpu")
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    try:
        scaler.load_state_dict(state)
        scaler.scale(layer(torch.ones(1, 1))).sum().backward()
        scaler.step(optimizer)
        scaler.update()
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    "state", [[1], None, 3, "x", {"growth_factor": 2.0}, {"scale": 1.0}], ids=repr
)
def test_contents_that_no_scaler_loads(state: Any, root: Path) -> None:
    torch.save(state, root / SCALER)
    assert not scales(state)
    (sentence,) = told(root)
    assert sentence.startswith(f"unknown-state: {SCALER}: it holds ")


@pytest.mark.parametrize(
    "state", [{"mean": torch.ones(3)}, (torch.ones(3), torch.ones(3)), torch.ones(3)]
)
def test_a_script_may_scale_its_data(state: Any, root: Path) -> None:
    """Only a run with fp16 loads ``scaler.pt``, and nothing in the folder shows one."""
    torch.save(state, root / SCALER)
    assert told(root) == []


@pytest.mark.parametrize("name", [OPTIMIZER, RANDOM, SCALER])
def test_a_custom_object_is_named_as_the_partner_alone(name: str, root: Path) -> None:
    exchanged(root, name, CUSTOM)
    assert loads(root) != "right"
    (sentence,) = told(root)
    assert sentence.startswith(f"unknown-state: {name}: it holds a dict without ")
    assert sentence.endswith(f"; swapped with {CUSTOM}")


def exchanged(root: Path, first: str, second: str) -> Path:
    (root / first).rename(root / "third")
    (root / second).rename(root / first)
    (root / "third").rename(root / second)
    return root


def test_the_second_optimizer_is_judged_and_the_nearest_partner_is_named(tmp_path: Path) -> None:
    run = Run()
    second = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    run.accelerator.prepare(second, lr_scheduler.StepLR(second, 2))
    root = run.save(tmp_path / "checkpoint_0")
    assert told(root) == []
    exchanged(root, OPTIMIZER, SCHEDULER)
    exchanged(root, "optimizer_1.bin", "scheduler_1.bin")
    sentences = told(root, "wrong-state")
    assert len(sentences) == 4
    assert any(
        " optimizer_1.bin: " in one and one.endswith("with scheduler_1.bin") for one in sentences
    )


def test_samplers_and_data_loaders_are_judged_by_other_states_alone(
    saved: dict[str, Any], root: Path
) -> None:
    torch.save({"position": 1}, root / "dl_state_dict.bin")
    assert told(root) == []
    for name in ("dl_state_dict.bin", "sampler.bin"):
        torch.save(saved[RANDOM], root / name)
    assert len(told(root, "wrong-state")) == 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("name", "workers"), [(SCHEDULER, 0), (SCHEDULER, 1), (OPTIMIZER, 0)])
def test_the_state_of_a_data_loader_in_place_of_another_is_told(
    name: str, workers: int, root: Path
) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")
    loader = loading.StatefulDataLoader(list(range(8)), num_workers=workers)
    next(iter(loader))
    torch.save(loader.state_dict(), root / "dl_state_dict.bin")
    assert told(root) == []
    shutil.copy(root / "dl_state_dict.bin", root / name)
    if name == SCHEDULER:
        assert Run().accelerator.load_state(str(root)) is None, "most schedulers take any dict"
    (words,) = told(root, "wrong-state")
    assert f"{name}: it holds a data loader's state" in words


# healthy twins


class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer around another one, whose state dict has no ``param_groups`` at its root."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "slow": {"k": 5},
            "base_optimizer": self.inner.state_dict(),
            "last_epoch": 1,
            "_last_lr": [0.1],
        }

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["base_optimizer"])


class Several(Lookahead):
    """An optimizer that saves a list of states."""

    def state_dict(self) -> Any:
        return [self.inner.state_dict(), self.inner.state_dict()]

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state[0])


class FlatLookahead(Lookahead):
    """An optimizer that saves its own state and that of another one next to the param groups."""

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state_dict()
        return {
            "fast_state": inner["state"],
            "slow_state": {},
            "param_groups": inner["param_groups"],
        }

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(
            {"state": state["fast_state"], "param_groups": state["param_groups"]}
        )


class Warmup(lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A scheduler with a state dict of its own."""

    def get_lr(self) -> list[float]:
        return list(self.base_lrs)

    def state_dict(self) -> Any:
        return {"warmup": 5, "phase": torch.ones(2)}

    def load_state_dict(self, state: Any) -> None:
        self.warmup = state["warmup"]


OWN_STATES: dict[str, Any] = {
    "tensor": {"warm.lr": torch.ones(1)},
    "tensors": {"warm.lr": torch.tensor(0.1), "warm.steps": torch.arange(3)},
    "matrix": {"warm.table": torch.ones(2, 3)},
    "a scale": {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10},
    "names of an optimizer": {"state": {}, "param_groups": []},
    "phases": {"state": "warmup", "param_groups": [{"lr": 0.1}]},
}


def own_state(name: str) -> Any:
    """Return a maker of a scheduler that saves one of ``OWN_STATES``."""

    class Own(Warmup):
        def state_dict(self) -> Any:
            return OWN_STATES[name]

        def load_state_dict(self, state: Any) -> None:
            assert state.keys() == OWN_STATES[name].keys()

    return Own


def cosine(optimizer: Any) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, 9)


# Those of torch are healthy in test_optimizer_steps.py.
OPTIMIZERS: list[Any] = [Lookahead, Several, FlatLookahead]
SCHEDULERS: dict[str, Any] = {
    "lambda": lambda inner: lr_scheduler.LambdaLR(inner, lambda epoch: 1.0),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda inner: lr_scheduler.SequentialLR(
        inner, [lr_scheduler.ConstantLR(inner), lr_scheduler.StepLR(inner, 2)], [2]
    ),
    "chained": lambda inner: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(inner), lr_scheduler.StepLR(inner, 2)], inner
    ),
    "transformers": cosine,
    "custom": Warmup,
    **{name: own_state(name) for name in OWN_STATES},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda make: make.__name__)
def test_no_optimizer_is_blamed(optimizer: Any, tmp_path: Path) -> None:
    root = Run(optimizer=optimizer).save(tmp_path / "checkpoint_0")
    assert told(root) == []
    Run(optimizer=optimizer, steps=0).accelerator.load_state(str(root))
    assert latest_checkpoint(tmp_path) == root


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_scheduler_is_blamed(scheduler: str, tmp_path: Path) -> None:
    root = Run(scheduler=SCHEDULERS[scheduler]).save(tmp_path / "checkpoint_0")
    assert told(root) == []
    Run(scheduler=SCHEDULERS[scheduler], steps=0).accelerator.load_state(str(root))
    assert latest_checkpoint(tmp_path) == root


@pytest.mark.parametrize("state", [[1], (1,), 3, None, torch.ones(1)], ids=repr)
def test_a_state_that_a_class_of_the_script_may_read_is_a_warning(
    state: Any, root: Path, tmp_path: Path
) -> None:
    for name, problem in (
        (SCHEDULER, "torch's schedulers cannot continue from it"),
        (OPTIMIZER, "torch's optimizers cannot load it"),
    ):
        torch.save(state, root / name)
        (finding,) = (one for one in check(root).findings if one.path.name == name)
        assert finding.code == "unknown-state"
        assert finding.advice.startswith(f"{problem}: ")
        assert finding.advice.endswith("If a class of your own reads it, ignore this")
    assert loads(root) != "right"
    assert latest_checkpoint(tmp_path) == root


def test_a_custom_object_may_be_anything(tmp_path: Path) -> None:
    registered = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for number, custom in enumerate(
        (registered, lr_scheduler.StepLR(registered, 2), torch.nn.Linear(2, 2))
    ):
        root = Run(custom=custom).save(tmp_path / f"checkpoint_{number}")
        assert told(root) == []


def test_a_disabled_scaler_saves_an_empty_dict(root: Path) -> None:
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    torch.save(disabled.state_dict(), root / SCALER)
    assert told(root) == []
    disabled.load_state_dict(torch.load(root / SCALER))


def test_files_of_a_script_are_judged_by_other_states_alone(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(model_state(), tmp_path / "pytorch_model.bin")
    torch.save({"mean": torch.zeros(3), "std": torch.ones(3)}, tmp_path / SCALER)
    torch.save({"step": 5}, tmp_path / "optimizer.pt")
    torch.save(
        {"epoch": 1, "optimizer": saved[OPTIMIZER], "model": model_state()}, tmp_path / OPTIMIZER
    )
    assert told(tmp_path) == []
    torch.save(saved[SCHEDULER], tmp_path / "optimizer.pt")
    assert told(tmp_path) == [
        "wrong-state: optimizer.pt: it holds a scheduler's state (expected an optimizer's state)"
    ]


# the Trainer


def trainer_folder(root: Path, saved: dict[str, Any]) -> Path:
    root.mkdir()
    torch.save(model_state(), root / "pytorch_model.bin")
    torch.save(saved[OPTIMIZER], root / "optimizer.pt")
    torch.save(saved[SCHEDULER], root / "scheduler.pt")
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save(states, root / "rng_state.pth")
    number = root.name.partition("-")[2]
    (root / "trainer_state.json").write_text(f'{{"epoch": 1.0, "global_step": {number}}}')
    return root


@pytest.mark.parametrize(
    "names",
    [
        ("optimizer.pt", "scheduler.pt"),
        ("optimizer.pt", "rng_state.pth"),
        ("scheduler.pt", "rng_state.pth"),
    ],
    ids=" and ".join,
)
def test_exchanged_files_of_the_trainer_name_each_other(
    names: tuple[str, str], saved: dict[str, Any], tmp_path: Path
) -> None:
    older = trainer_folder(tmp_path / "checkpoint-2", saved)
    root = trainer_folder(tmp_path / "checkpoint-4", saved)
    assert told(root) == []
    assert latest_checkpoint(tmp_path) == root
    exchanged(root, *names)
    assert len(told(root, "wrong-state")) == 2
    with pytest.warns(UserWarning, match=r"passed over checkpoint-4: .* holds .*, not "):
        assert latest_checkpoint(tmp_path) == older


@pytest.mark.parametrize("value", [{}, None, [], {"python": 1}], ids=repr)
def test_random_states_of_the_trainer_need_their_keys(
    value: Any, saved: dict[str, Any], tmp_path: Path
) -> None:
    root = trainer_folder(tmp_path / "checkpoint-2", saved)
    torch.save(value, root / "rng_state.pth")
    (sentence,) = told(root, "unknown-state")
    assert sentence.endswith("(expected the Trainer's random states)")


def test_random_states_without_a_step_are_a_note(
    saved: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """Measured: accelerate 0.34 to 1.15 load the random states and keep their own step, 0.33 raises
    a KeyError.
    """
    torch.save({key: value for key, value in saved[RANDOM].items() if key != "step"}, root / RANDOM)
    assert loads(root) == "wrong"
    report = check(root)
    (finding,) = report.findings
    assert (finding.code, finding.severity.value, report.status) == ("unknown-state", "note", 0)
    assert (
        str(finding)
        == f"{RANDOM}: it holds random states without 'step' (expected accelerate's random states)"
    )
    assert latest_checkpoint(tmp_path) == root


# the newest complete checkpoint


@pytest.mark.parametrize("name", [OPTIMIZER, SCHEDULER, RANDOM, CUSTOM, SCALER])
def test_a_cut_state_is_passed_over(name: str, root: Path, tmp_path: Path) -> None:
    newest = Path(shutil.copytree(root, tmp_path / "checkpoint_1"))
    assert latest_checkpoint(tmp_path) == newest
    os.truncate(newest / name, (newest / name).stat().st_size // 2)
    assert loads(newest) != "right"
    with pytest.warns(
        UserWarning, match=rf"chose checkpoint_0 and passed over checkpoint_1: {name}: "
    ):
        assert latest_checkpoint(tmp_path) == root

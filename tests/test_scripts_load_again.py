"""After the default repair the correct script loads what it saved, or the repair asks.

Folders are generated from scripts: what a script prepares and registers, healthy or some of it
twice. What a script loads is told by a small model of accelerate's ``load_state`` (by position, by
names, and all of them), which a slow test compares with the real one.
"""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfix import check, repair, undo
from tests.repairs.builders import (
    RANDOM_STATES,
    read_safetensors_bytes,
    snapshot,
    write_safetensors,
)
from tests.sampling import examples

Tensors = dict[str, bytes]
Pick = Callable[[Sequence[Any]], Any]
ARCHITECTURES = ({"fc.weight": 6, "fc.bias": 2}, {"out.weight": 5})


@dataclass(slots=True)
class Script:
    """What a correct script has, in the order in which it is registered, and what the run saved
    besides.
    """

    ranks: int
    models: list[Tensors] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    custom: list[dict[str, Any]] = field(default_factory=list)
    adapter: Tensors | None = None
    again: dict[str, list[int]] = field(default_factory=dict)
    """Role -> the position that each entry of the folder has in the script, where some are saved
    twice.
    """
    is_exempt: bool = False
    """It has an average that the manual names: nothing tells it from a second prepare()."""


def values(pick: Pick, architecture: dict[str, int]) -> Tensors:
    seed = pick(range(1, 200))
    return {
        name: bytes((seed * 7 + place) % 251 for place in range(4 * size))
        for name, size in architecture.items()
    }


def behind(chain: str, tensors: Tensors) -> Tensors:
    return {chain + name: data for name, data in tensors.items()}


def optimizer(pick: Pick, kind: str, model: Tensors, named: Sequence[str], steps: int) -> Any:
    parameters = [torch.nn.Parameter(torch.zeros(len(data) // 4)) for data in model.values()]
    options = {"momentum": 0.9} if kind == "Momentum" else {}
    given = list(zip(named, parameters, strict=True)) if named else parameters
    made = getattr(torch.optim, "SGD" if kind == "Momentum" else kind)(
        given, lr=pick([0.1, 0.2]), **options
    )
    for _ in range(steps):
        for parameter, data in zip(parameters, model.values(), strict=True):
            parameter.grad = torch.tensor(list(data[: len(parameter)])) / 100
        made.step()
    return made


def make_script(pick: Pick) -> Script:
    """Make a script; ``module.module.`` is of ``prepare(W(W(net)))`` or ``prepare(DDP(DDP(net)))``.

    Without ranks it is no folder of ``save_state``, and such keys are of a model that another
    library saved.
    """
    script = Script(ranks=pick([0, 1, 1, 2, 2, 3]))
    steps = pick([0, 1, 2])
    kind = pick(["AdamW", "Momentum", "SGD"])
    pairs: list[tuple[int, str]] = []  # position of each trained model, and its own chain
    used: set[bytes] = set()
    prepared_averages: list[int] = []
    for _ in range(pick([1, 2])):
        own = pick(["", "", "", "module."] + ["module.module."] * (script.ranks > 0))
        net = values(pick, pick(ARCHITECTURES))
        if b"".join(net.values()) in used:
            continue
        used.add(b"".join(net.values()))
        average = pick([None, None, "bare", "wrapper", "of the prepared"])
        is_equal = average is not None and pick([True, False])
        other = (
            net
            if is_equal
            else {name: bytes(255 - byte for byte in data) for name, data in net.items()}
        )
        wrapper = {"bare": "", "wrapper": "module.", None: ""}.get(average)
        if wrapper is None:  # prepare() wraps the model only beside other processes
            wrapper = "module.module." if script.ranks != 1 else "module."
        is_before = average in ("bare", "wrapper") and pick([True, False, False])
        entries = [behind(own, net)]
        if average is not None:
            entries.insert(0 if is_before else 1, behind(wrapper + own, other))
        pairs.append((len(script.models) + int(average is not None and is_before), own))
        script.models += entries
        # Without processes that are known, steps, or moments that show training, a repair asks.
        if is_equal and not is_before and script.ranks > 1 and steps > 0 and kind != "SGD":
            script.is_exempt |= wrapper == "module."
            prepared_averages.append(pairs[-1][0])
    for position, _ in pairs:
        named = list(script.models[position]) if pick([True, False]) else []
        made = optimizer(pick, kind, script.models[position], named, steps)
        script.optimizers.append(made.state_dict())
    if pick([True, False]):
        script.schedulers = [
            {"last_epoch": steps, "base_lrs": [pick([0.1, 0.2])]} for _ in script.optimizers
        ]
    if pick([True, False]):
        nested = {
            f"module.module.{name}": torch.ones(size) for name, size in pick(ARCHITECTURES).items()
        }
        script.custom = [pick([nested, {"samples": 3}]) for _ in range(pick([1, 2]))]
    if pick([True, False]):
        script.adapter = {f"base_model.model.fc.lora_{matrix}.weight": b"lora" for matrix in "AB"}
    roles = {
        "models": script.models,
        "optimizers": script.optimizers,
        "schedulers": script.schedulers,
    }
    for role, every in roles.items():
        script.again[role] = list(range(len(every)))
    if script.ranks != 1 and pick([True, False]):
        twice = [position for position, _ in pairs if pick([True, True, False])]
        at_end = pick([True, False])
        repeat(script.again["models"], twice, at_end)
        script.is_exempt |= not set(twice).isdisjoint(prepared_averages)
        numbers = [number for number, (position, _) in enumerate(pairs) if position in twice]
        for role in ("optimizers", "schedulers"):
            if pick([True, False]):
                repeat(
                    script.again[role],
                    [number for number in numbers if number < len(roles[role])],
                    at_end,
                )
    return script


def repeat(positions: list[int], twice: list[int], at_end: bool) -> None:
    for one in twice:
        positions.insert(len(positions) if at_end else positions.index(one) + 1, one)


def stem(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def save(folder: Path, script: Script) -> None:
    seen: set[int] = set()
    for index, position in enumerate(script.again["models"]):
        chain = "module." if position in seen else ""
        seen.add(position)
        write_safetensors(
            folder / f"{stem('model', index)}.safetensors", behind(chain, script.models[position])
        )
    for role, states in (("optimizers", script.optimizers), ("schedulers", script.schedulers)):
        for index, position in enumerate(script.again[role]):
            torch.save(states[position], folder / f"{stem(role[:-1], index)}.bin")
    for index, state in enumerate(script.custom):
        torch.save(state, folder / f"custom_checkpoint_{index}.pkl")
    for rank in range(script.ranks):
        (folder / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    if script.adapter is not None:
        write_safetensors(folder / "adapter_model.safetensors", script.adapter)


def load(folder: Path, script: Script) -> list[Any] | None:
    """Return what the script has after ``load_state``, None where that raises."""
    found: list[Any] = []
    for index, model in enumerate(script.models):
        path = folder / f"{stem('model', index)}.safetensors"
        tensors = read_safetensors_bytes(path) if path.exists() else {}
        if {name: len(data) for name, data in tensors.items()} != {
            name: len(data) for name, data in model.items()
        }:
            return None
        found.append(tensors)
    for role, states in (("optimizer", script.optimizers), ("scheduler", script.schedulers)):
        for index, own in enumerate(states):
            path = folder / f"{stem(role, index)}.bin"
            if not path.exists():
                return None
            state = torch.load(path, weights_only=True)
            if role == "optimizer" and [
                len(group["params"]) for group in state["param_groups"]
            ] != [len(group["params"]) for group in own["param_groups"]]:
                return None
            found.append(state)
    paths = sorted(folder.glob("custom_checkpoint_*.pkl"))
    if len(paths) != len(script.custom):
        return None
    for path, own in zip(paths, script.custom, strict=True):
        state = torch.load(path, weights_only=True)
        if state.keys() != own.keys():
            return None
        found.append(state)
    return found


def expected(script: Script) -> list[Any]:
    return [*script.models, *script.optimizers, *script.schedulers, *script.custom]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(torch.equal(left, right)) if isinstance(left, torch.Tensor) else bool(left == right)


@contextmanager
def scratch() -> Iterator[Path]:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(dir=base, prefix="ckptfix-scripts-"))
    try:
        yield root
    finally:
        shutil.rmtree(root)


@settings(
    deadline=None,
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_the_correct_script_loads_after_a_repair(data: st.DataObject) -> None:
    script = make_script(lambda options: data.draw(st.sampled_from(list(options))))
    if script.is_exempt:
        return
    with scratch() as folder:
        save(folder, script)
        before = snapshot(folder)
        is_healthy = all(
            positions == list(range(len(positions))) for positions in script.again.values()
        )
        could_load = same(load(folder, script) or [], expected(script))
        assert could_load or not is_healthy
        report = check(folder)
        receipt = repair(folder)
        loads = same(load(folder, script) or [], expected(script))
        assert loads or not could_load, "a repair broke what was healthy"
        assert loads or receipt.status == 1, "a repair that cannot decide must ask"
        if is_healthy:
            asked = [one for one in report.findings if one.severity.value != "note"]
            assert {one.code for one in asked} <= {"identical-models", "nested-prefix"}
            assert all(one.action.value == "ask" for one in asked)
            assert receipt.steps == ()
        for name in (
            "adapter_model.safetensors",
            *(f"custom_checkpoint_{index}.pkl" for index in range(2)),
        ):
            assert (folder / name).exists() == (name in before)
            assert not (folder / name).exists() or (folder / name).read_bytes() == before[name]
        assert repair(folder).steps == ()
        if receipt.transaction is not None:
            undo(folder)
        assert {
            name: one for name, one in snapshot(folder).items() if not name.startswith(".ckptfix")
        } == before


class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """A model with these names and shapes, whose values are other ones."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, data in tensors.items():
            *path, last = name.split(".")
            inner: Any = self
            for segment in path:
                if not hasattr(inner, segment):
                    inner.add_module(segment, torch.nn.Module())
                inner = getattr(inner, segment)
            inner.register_buffer(last, torch.zeros(len(data) // 4))


class Custom:
    """A custom object that takes a state with its own keys only, as a module does."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.state = dict.fromkeys(keys)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state.keys():
            raise ValueError("other keys")
        self.state = state


class Scheduler:
    """A scheduler of the script's own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def really_loaded(folder: Path, script: Script) -> list[Any] | None:
    """Return what stock accelerate loads, in the form of ``load``."""
    from accelerate.checkpointing import load_accelerator_state, load_custom_state

    models = [Net(tensors) for tensors in script.models]
    optimizers = []
    for state in script.optimizers:
        groups = [
            [torch.nn.Parameter(torch.zeros(1)) for _ in group["params"]]
            for group in state["param_groups"]
        ]
        optimizers.append(torch.optim.SGD([{"params": group} for group in groups]))
    schedulers = [Scheduler() for _ in script.schedulers]
    custom = [Custom(list(state)) for state in script.custom]
    try:
        load_accelerator_state(str(folder), models, optimizers, schedulers, [], 0)
        if len(list(folder.glob("custom_checkpoint_*.pkl"))) != len(custom):
            return None  # Accelerator.load_state compares the two numbers
        for index, thing in enumerate(custom):
            load_custom_state(thing, str(folder), index)
    except (FileNotFoundError, RuntimeError, ValueError):
        return None
    nets = [
        {name: one.numpy().tobytes() for name, one in model.state_dict().items()}
        for model in models
    ]
    return [*nets, *schedulers, *custom]


@pytest.mark.slow
def test_stock_accelerate_loads_as_the_model_of_it_says() -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    loaded = 0
    for seed in range(60):
        rnd = random.Random(seed)
        script = make_script(lambda options, rnd=rnd: rnd.choice(list(options)))  # type: ignore[misc]
        script.ranks = max(script.ranks, 1)
        with scratch() as folder:
            save(folder, script)
            for _ in range(2):  # before and after a repair
                told, real = load(folder, script), really_loaded(folder, script)
                assert (told is None) == (real is None), seed
                if told is not None and real is not None:
                    count = len(script.optimizers)
                    told = [*told[: len(script.models)], *told[len(script.models) + count :]]
                    states = [
                        one.state if isinstance(one, Scheduler | Custom) else one for one in real
                    ]
                    assert same(told, states), seed
                    loaded += 1
                repair(folder)
    assert loaded > 60

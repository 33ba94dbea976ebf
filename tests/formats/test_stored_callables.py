"""Callables that a pickle makes at load: harmless where it only stores them, unsafe where it can
call them.
"""

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import math
import operator
import pathlib
import pickle
import random
import zoneinfo
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers.trainer_pt_utils import safe_globals

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.devices.torch_reading import Unreadable, read_pickle
from ckptfix.diagnosis.check import check
from ckptfix.formats.pickle_globals import unsafe_globals
from ckptfix.formats.pickle_stream import parse
from tests.formats.making import read
from tests.formats.pickled_calls import Call, pickled


class Tracker:
    """A class of a script with classes and methods of its own."""

    class Phase(enum.Enum):
        """A nested enumeration."""

        WARM = 1

    @dataclasses.dataclass
    class Best:
        """A nested dataclass, with one that is nested deeper."""

        loss: float = 1.0

        class Kind(enum.Flag):
            """A class in a class in a class."""

            A = 1

    @staticmethod
    def fixed(value: float) -> float:
        return value

    @classmethod
    def of_class(cls) -> int:
        return 1

    def bound(self) -> int:
        return 2

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return 0


ORDINARY: dict[str, Callable[[], Any]] = {
    "generator": lambda: np.random.default_rng(0),
    "seeds": lambda: np.random.SeedSequence(3),
    "mt19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "philox": lambda: np.random.Generator(np.random.Philox(1)),
    "sfc64": lambda: np.random.Generator(np.random.SFC64(1)),
    "random state": lambda: np.random.RandomState(0),
    "nested enumeration": lambda: Tracker.Phase.WARM,
    "nested dataclass": Tracker.Best,
    "nested class": lambda: Tracker.Best.Kind,
    "nested flag": lambda: [Tracker.Best.Kind.A, Tracker.Best.Kind.A],
    "time zone": lambda: datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "torch function": lambda: torch.relu,
    "tensor method": lambda: torch.Tensor.relu,
    "static method": lambda: Tracker.fixed,
    "class method": lambda: Tracker.of_class,
    "bound method": lambda: Tracker().bound,
    "method of a list": lambda: [1].append,
    "method of a string": lambda: "a".join,
    "partial": lambda: functools.partial(math.pow, 2),
    "partial of a method": lambda: functools.partial(torch.relu, inplace=False),
    "partial of a partial": lambda: functools.partial(functools.partial(math.pow, 2)),
    "partial twice": lambda: [
        functools.partial(math.pow, 2),
        {"a": functools.partial(math.pow, 3)},
    ],
    "itemgetter": lambda: operator.itemgetter("a", 1),
    "attrgetter": lambda: operator.attrgetter("a.b"),
    "methodcaller": lambda: operator.methodcaller("x", 1),
    "attribute of an object": lambda: argparse.Namespace(
        key=operator.itemgetter(0), run=Tracker.fixed
    ),
    "deque": lambda: collections.deque([1, 2], maxlen=3),
}


class History:
    """A custom object that saves whatever it was made with."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_only_stored_is_no_alarm(name: str, tmp_path: Path) -> None:
    path = tmp_path / "custom_checkpoint_0.pkl"
    torch.save({"value": ORDINARY[name](), "step": 1}, path)
    assert torch.load(path, weights_only=False)["step"] == 1
    assert unsafe_globals(read(path).tree) == ()


def test_generators_and_time_zones_are_restored(tmp_path: Path) -> None:
    torch.save(ORDINARY["time zone"](), tmp_path / "custom.pkl")
    assert torch.load(tmp_path / "custom.pkl", weights_only=False) == ORDINARY["time zone"]()
    torch.save(ORDINARY["generator"](), tmp_path / "custom.pkl")
    restored = torch.load(tmp_path / "custom.pkl", weights_only=False)
    assert restored.random() == ORDINARY["generator"]().random()


def apply(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, as a function of any package may."""
    return function(*arguments)


MARKED = pathlib.PurePath("marked")
"""The file that an attack makes where its code runs."""
TARGET = Call(pathlib.PosixPath, (str(MARKED),))
TOUCH = Call(getattr, (pathlib.Path, "touch"))
BOUND = Call(getattr, (TARGET, "touch"))
PARTIAL = Call(functools.partial, (TOUCH,), ((TOUCH, (TARGET,), {}, None),))

ATTACKS: dict[str, Any] = {
    "a method is called": Call(TOUCH, (TARGET,)),
    "a bound method is called": Call(BOUND, ()),
    "a partial is called": Call(PARTIAL, ()),
    "a partial that was stored is called": [PARTIAL, Call(PARTIAL, ())],
    "a partial in a partial is called": Call(
        Call(functools.partial, (PARTIAL,), ((PARTIAL, (), {}, None),)), ()
    ),
    "a methodcaller is called": Call(Call(operator.methodcaller, ("touch",)), (TARGET,)),
    "an attrgetter is called": Call(Call(Call(operator.attrgetter, ("touch",)), (TARGET,)), ()),
    "an attrgetter is called on a class": Call(
        Call(Call(operator.attrgetter, ("touch",)), (Path,)), (TARGET,)
    ),
    "an itemgetter is called": Call(Call(Call(operator.itemgetter, (0,)), ([BOUND],)), ()),
    "a function calls its argument": Call(apply, (BOUND,)),
    "a function calls a member of its argument": Call(
        apply, (Call(operator.getitem, ([BOUND], 0)),)
    ),
    "a factory is asked": Call(operator.getitem, (Call(collections.defaultdict, (PARTIAL,)), 1)),
    "a tensor of a type is rebuilt": Call(
        torch._tensor._rebuild_from_type_v2, (BOUND, torch.Tensor, (), {})
    ),
    "a state is set by an attribute": Call(
        argparse.Namespace, (), ({"__setstate__": TOUCH}, TARGET)
    ),
    "a state of a partial is set by an attribute": Call(
        functools.partial, (TOUCH,), ((TOUCH, (), {}, {"__setstate__": TOUCH}), TARGET)
    ),
    "getattr is passed on": Call(apply, (Call(apply, (getattr, TARGET, "touch")),)),
    "partial is passed on": Call(Call(apply, (functools.partial, pathlib.Path.touch, TARGET)), ()),
}

OPCODES = {
    "a system call": b"c__builtin__\ngetattr\n(crandom\n_os\nVopen\ntR(Vmarked\nI64\ntR.",
    "an attribute of a system call": (
        b"c__builtin__\ngetattr\n(cos\nopen\nV__call__\ntR(Vmarked\nI64\ntR."
    ),
    "getattr of the builtins": b"c__builtin__\ngetattr\n(cargparse\n__builtins__\nVeval\ntR.",
    "a list of subclasses": (
        b"c__builtin__\ngetattr\n(cargparse\nNamespace\nV__subclasses__\ntR(tR."
    ),
    "an import": b"c__builtin__\n__import__\n(Vos\ntR.",
    "eval": b"c__builtin__\neval\n(V1\ntR.",
    "exec": b"c__builtin__\nexec\n(V1\ntR.",
    "a class whose method is replaced": (
        b"cargparse\nNamespace\n(N}V__eq__\nc__builtin__\ngetattr\n(cpathlib\nPath\nVtouch\ntRstb."
    ),
    "a class whose method is replaced and forgotten": (
        b"cargparse\nNamespace\n(N}Vextend\nc__builtin__\ngetattr\n(cpathlib\nPath\nVtouch\ntRstb0N."
    ),
    "a registry is filled": b"ccopyreg\ndispatch_table\nI1\ncoperator\nitemgetter\n(I0\ntRs0N.",
    "a list method is filled": b"c__builtin__\ngetattr\n(]Vappend\ntR(I1\ne.",
    "getattr with a default": b"c__builtin__\ngetattr\n(cargparse\nNamespace\nVx\nI1\ntR.",
    "getattr without a name": b"c__builtin__\ngetattr\n(cargparse\nNamespace\ntR.",
    "getattr by itself": b"(lc__builtin__\ngetattr\na.",
    "a partial of a system call": b"cfunctools\npartial\n(cos\nsystem\ntR.",
    "a partial by __new__": b"\x80\x02cfunctools\npartial\n(cmath\npow\nt\x81.",
    "classes nested too deep": (
        b"c__builtin__\ngetattr\n(" * 20 + b"cargparse\nNamespace\n" + b"VA\ntR" * 20 + b"."
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_load_calls_is_unsafe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickled(ATTACKS[name])
    assert unsafe_globals(parse(data))
    with suppress(Exception):
        pickle.load(io.BytesIO(data))
    assert Path(MARKED).exists()


@pytest.mark.parametrize("name", OPCODES)
def test_opcodes_that_no_pickler_writes_are_unsafe(name: str) -> None:
    assert unsafe_globals(parse(OPCODES[name]))


def test_a_save_with_custom_objects_is_clean(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    history = History({name: make() for name, make in ORDINARY.items()})
    accelerator.register_for_checkpointing(history)
    accelerator.save_state(str(tmp_path))
    history.values = {}
    accelerator.load_state(str(tmp_path))
    assert list(history.values) == list(ORDINARY)
    assert check(tmp_path).findings == ()


def test_weights_with_a_nested_class_are_refused_by_torch(tmp_path: Path) -> None:
    torch.save(
        {"weight": torch.ones(2), "phase": Tracker.Phase.WARM}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert [finding.code for finding in check(tmp_path).findings] == ["unloadable-pickle"]


@pytest.mark.parametrize("name", ["sampler.bin", "dl_state_dict.bin"])
def test_data_loaders_with_a_nested_class_are_refused_by_accelerate(
    name: str, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path))
    torch.save({"phase": Tracker.Phase.WARM}, tmp_path / name)
    with pytest.raises(pickle.UnpicklingError):
        accelerate.utils.load(tmp_path / name)
    assert [finding.code for finding in check(tmp_path).findings] == ["unloadable-pickle"]


def test_random_states_of_the_trainer_with_a_nested_class_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save({**states, "phase": Tracker.Phase.WARM}, tmp_path / "rng_state.pth")
    with safe_globals(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "rng_state.pth", weights_only=True)
    assert "unloadable-pickle" in [finding.code for finding in check(tmp_path).findings]


@pytest.mark.parametrize(
    "value", [frozenset((1,)), collections.deque((1,))], ids=["frozenset", "deque"]
)
def test_random_states_of_the_trainer_with_another_class_are_refused(
    value: object, tmp_path: Path
) -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save({**states, "extra": value}, tmp_path / "rng_state.pth")
    with safe_globals(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "rng_state.pth", weights_only=True)
    codes = [finding.code for finding in check(tmp_path).findings]
    assert "unloadable-pickle" in codes
    assert "trainer-pickle" not in codes


def test_a_custom_object_in_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(History({}))
    accelerator.save_state(str(tmp_path))
    (tmp_path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"a": 1}, 2))
    with pytest.raises(RuntimeError, match="Invalid magic number"):
        accelerator.load_state(str(tmp_path))
    assert [finding.code for finding in check(tmp_path).findings] == ["unloadable-pickle"]


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin"])
def test_a_guarded_load_calls_no_stored_class_code(name: str, tmp_path: Path) -> None:
    """It judges as ``check`` does, which finds no unsafe pickle here."""
    torch.save({"phase": Tracker.Phase.WARM}, tmp_path / name)
    assert "unsafe-pickle" not in [finding.code for finding in check(tmp_path / name).findings]
    (component,) = scan_folder(tmp_path).components
    with pytest.raises(
        Unreadable,
        match=r"builtins\.getattr, .*weights_only refuses; next: LoadPolicy\(trust=True\)$",
    ):
        read_pickle(tmp_path, component, trust=False)
    with pytest.warns(UserWarning, match="trust=True"):
        assert read_pickle(tmp_path, component, trust=True) == {"phase": Tracker.Phase.WARM}

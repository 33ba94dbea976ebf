"""Our ``dataclass`` against the standard one: the same classes, the same answers."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ckptfix.dataclass import dataclass

OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"frozen": True, "slots": True, "kw_only": True},
    {"frozen": True, "slots": True, "eq": False},
    {"slots": True},
    {"frozen": True, "order": True},
    {"frozen": True, "repr": False},
)


def classes(decorator: Callable[..., Any], options: dict[str, bool]) -> list[Any]:
    """Return a base, a class of it with fields that are not compared or shown, and classes without
    own fields.
    """

    @decorator(**options)
    class Base:
        number: int

    @decorator(**options)
    class Derived(Base):
        label: str = "a"
        hidden: int = dataclasses.field(default=0, repr=False)
        ignored: int = dataclasses.field(default=0, compare=False)

    @decorator(**options)
    class Own(Base):
        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

    @decorator(**options)
    class Empty:
        pass

    @decorator(**options)
    class Worded(Derived):
        def words(self) -> str:
            return self.label

    return [Base, Derived, Own, Empty, Worded]


def values(made: list[Any]) -> list[Any]:
    base, derived, own, empty, worded = made
    return [
        *(base(number=number) for number in (1, 1, 2)),
        *(derived(number=1, label=label, hidden=hidden) for label in "ab" for hidden in (0, 1)),
        *(derived(number=1, ignored=ignored) for ignored in (0, 1)),
        *(own(number=number) for number in (1, 2)),
        *(empty(), empty()),
        *(worded(number=1, label=label) for label in "aab"),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_class_behaves_as_a_standard_one(options: dict[str, bool]) -> None:
    ours, standard = (values(classes(one, options)) for one in (dataclass, dataclasses.dataclass))
    for mine, theirs in zip(ours, standard, strict=True):
        assert [mine == one for one in ours] == [theirs == one for one in standard]
        assert (type(mine).__hash__ is None) == (type(theirs).__hash__ is None)
        assert dataclasses.replace(mine) is not mine
        if options.get("repr", True):
            assert repr(mine) == repr(theirs)
        else:
            assert repr(mine) == "own" or repr(mine) == object.__repr__(mine)
    if options.get("frozen"):
        same, expected = (same_hashes(made) for made in (ours, standard))
        assert same == expected
        with pytest.raises(dataclasses.FrozenInstanceError):
            ours[0].number = 3


def same_hashes(made: list[Any]) -> list[bool]:
    hashed = [hash(one) for one in made if type(one).__hash__ is not None]
    return [one == other for one in hashed for other in hashed]


@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_a_value_that_holds_itself_is_shown(decorator: Callable[..., Any]) -> None:
    @decorator()
    class Node:
        next: Any = None

    node = Node()
    node.next = node
    assert repr(node) == f"{Node.__qualname__}(next=...)"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="compares field by field since 3.13")
@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_a_nan_in_the_only_field_equals_itself(decorator: Callable[..., Any]) -> None:
    one = decorator(frozen=True)(type("One", (), {"__annotations__": {"value": float}}))
    nan = float("nan")
    assert one(nan) == one(nan)
    assert hash(one(2.0)) == hash((2.0,))


def test_a_start_compiles_no_comparison_and_no_repr() -> None:
    """Three methods of 104 classes were a sixth of the start of ``check``."""
    code = (
        "import dataclasses, ckptfix.cli.check, ckptfix.diagnosis.check\nmade = [one for one in "
        "object.__subclasses__() if one.__module__.startswith('ckptfix')]\nmade = [one for one in "
        "made if dataclasses.is_dataclass(one) and '__lt__' not in vars(one)]\nassert len(made) > "
        "20\nfor one in made:\n    for name in ('__repr__', '__eq__', '__hash__'):\n        "
        "method = vars(one).get(name)\n        assert getattr(method, '__code__', None) is None "
        "or method.__code__.co_filename != '<string>', one\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)

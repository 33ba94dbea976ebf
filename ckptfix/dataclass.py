"""``dataclass`` of the standard library, without the methods that it compiles for every class to
compare and show it.

The standard one compiles ``__repr__``, ``__eq__`` and ``__hash__`` anew for each of the 104 classes
behind ``check``. That was a sixth of the instructions of its start. Here all classes share them.
"""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

_Class = TypeVar("_Class")


def _dataclass(
    *,
    repr: bool = True,
    eq: bool = True,
    order: bool = False,
    frozen: bool = False,
    **options: bool,
) -> Callable[[type[_Class]], type[_Class]]:
    """Return the decorator. Its options are those of the standard one, and the class behaves the
    same.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        if frozen and options.get("slots") and not order and _adds_nothing(cls):
            made = _without_dict(cls)
        else:
            made = dataclasses.dataclass(
                repr=False, eq=order, order=order, frozen=frozen, **options
            )(cls)
        methods: dict[str, Any] = {"__repr__": _repr} if repr else {}
        if eq and not order:
            values = _compared(made)
            methods |= {
                "__eq__": _equality(values),
                "__hash__": _hashing(values) if frozen else None,
            }
        for name, method in methods.items():
            if vars(cls).get(name) is None:  # the class has none of its own
                setattr(made, name, method)
        return made

    return decorate


def _adds_nothing(cls: type) -> bool:
    """Return whether a class takes its fields, and what is compiled for them, from a base that is
    as this one.

    A seventh of the classes behind ``check`` are such: findings that differ from another in their
    words.
    """
    base: Any = cls.__base__
    params: Any = getattr(base, "__dataclass_params__", None)
    own = vars(cls)
    return (
        len(cls.__bases__) == 1
        and params is not None
        and params.frozen
        and "__slots__" in vars(base)
        and not (cls.__annotations__ or {"__init__", "__post_init__"} & own.keys())
        and not any(each.name in own for each in dataclasses.fields(base))
    )


def _without_dict(cls: type[_Class]) -> type[_Class]:
    own = {
        name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")
    }
    kind: Any = type(cls)
    made: type[_Class] = kind(cls.__name__, cls.__bases__, own | {"__slots__": ()})
    made.__qualname__ = cls.__qualname__
    return made


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (
        f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr
    )
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compared(cls: Any) -> Callable[[Any], Any]:
    names = [one.name for one in dataclasses.fields(cls) if one.compare]
    if len(names) > 1:
        return attrgetter(*names)
    # Tuples find a NaN equal to itself.
    return lambda self: tuple(getattr(self, name) for name in names)


def _equality(values: Callable[[Any], Any]) -> Callable[[Any, object], bool]:
    def equal(self: Any, other: object) -> bool:
        return (
            bool(values(self) == values(other))
            if other.__class__ is self.__class__
            else NotImplemented
        )

    return equal


def _hashing(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda self: hash(values(self))


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass

"""Values that are made when they are first used: public names of a package, whose import then costs
nothing, and properties of an instance.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

_Of = TypeVar("_Of")
_Value = TypeVar("_Value")


class once(Generic[_Of, _Value]):
    """Property that is computed when it is first asked for, and kept in its instance.

    Before Python 3.12 ``functools.cached_property`` holds one lock for all instances while it
    computes. Threads that read a store in turn waited for each other in ``check -r URL``, for ever.
    Two threads that ask one instance at once may compute the same value twice here.
    """

    def __init__(self, function: Callable[[_Of], _Value]) -> None:
        """Take the function that computes the value from the instance."""
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type[_Of], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[_Of]) -> "once[_Of, _Value]": ...

    @overload
    def __get__(self, instance: _Of, owner: type[_Of]) -> _Value: ...

    def __get__(self, instance: _Of | None, owner: type[_Of]) -> "once[_Of, _Value] | _Value":
        if instance is None:
            return self
        value = self._function(instance)
        instance.__dict__[self._name] = value
        return value


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package. ``modules``: (module of it -> public
    names there, with spaces between).

    The first raises AttributeError for any other name.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve, lambda: names_in(modules)


def names_in(modules: Mapping[str, str]) -> list[str]:
    """Return the public names of a package in order, for its ``__all__`` and ``__dir__``."""
    return sorted(" ".join(modules.values()).split())

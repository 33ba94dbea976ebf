"""Public names of a package, each imported when it is first used: importing the package itself
costs nothing.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


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

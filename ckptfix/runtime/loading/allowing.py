"""Which globals of a pickle ``torch.load(weights_only=True)`` is told to allow: classes that can only hold data.

Nothing is imported because a file names it, numpy and omegaconf excepted; an enum counts only when its module is loaded
already.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy
import torch

from ckptfix.formats.pickle_globals import GlobalSafety, classify, python_3_name

Global = tuple[str, str]

_NUMPY_FUNCTIONS = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMPY_TYPES_TEXT = """
    ndarray dtype generic bool bool_ bytes_ str_ void float16 float32 float64 complex64 complex128 datetime64
    timedelta64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"""
_NUMPY_TYPES = frozenset(_NUMPY_TYPES_TEXT.split())
_PLAIN = frozenset(
    {("builtins", kind.__name__) for kind in (bool, dict, float, frozenset, int, list, str, tuple)}
    | {("collections", "defaultdict"), ("typing", "Any"), ("types", "NoneType")}
)
"""What omegaconf's containers refer to beside their own classes."""

_NODES_TEXT = "Any String Integer Float Boolean Bytes Path Enum InterpolationResult"
_OMEGACONF = frozenset(
    {("omegaconf.dictconfig", "DictConfig"), ("omegaconf.listconfig", "ListConfig")}
    | {("omegaconf.base", name) for name in ("ContainerMetadata", "Metadata")}
    | {("omegaconf.nodes", f"{kind}Node") for kind in _NODES_TEXT.split()}
)


def resolve(names: Iterable[Global]) -> tuple[list[Any], list[Global]]:
    """Return what to hand to ``torch.serialization.add_safe_globals``, and the globals that may not be allowed.

    Globals that torch reads anyway, and those that the user allowed before, need nothing.
    """
    allowed: list[Any] = []
    refused: list[Global] = []
    users = _allowed_by_user()
    with_numpy = False
    for pair in names:
        module, name = python_3_name(*pair)  # as torch reads the names of protocol 2
        safety = classify(module, name)
        if safety is GlobalSafety.SAFE or f"{module}.{name}" in users:
            continue
        value = None if safety is GlobalSafety.UNSAFE else _known(module, name)
        if value is None:
            refused.append((module, name))
            continue
        path = f"{module}.{name}"
        is_same = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}" == path
        allowed.append(value if is_same else (value, path))
        with_numpy = with_numpy or module.split(".")[0] == "numpy"
    if with_numpy:  # torch looks at the type of a dtype, and each dtype has its own
        allowed += [numpy.dtype, numpy.ndarray, *_dtype_classes()]
    return allowed, refused


@contextmanager
def allowing(values: list[Any]) -> Iterator[None]:
    """Allow these globals, beside those the user allowed, for a while."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(values)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _allowed_by_user() -> frozenset[str]:
    return frozenset(
        value[1] if isinstance(value, tuple) else f"{value.__module__}.{value.__qualname__}"
        for value in torch.serialization.get_safe_globals()
    )


def _known(module: str, name: str) -> Any:
    """Return the object that a global means, None for one that may not be allowed."""
    if module in _NUMPY_FUNCTIONS and name in ("_reconstruct", "scalar"):
        multiarray: Any = getattr(numpy, "_core", None) or numpy.core
        return getattr(multiarray.multiarray, name)
    if module == "numpy" and name in _NUMPY_TYPES:
        return getattr(numpy, name, None)
    if module == "numpy.dtypes":
        return next((kind for kind in _dtype_classes() if kind.__name__ == name), None)
    if (module, name) in _PLAIN:
        return getattr(sys.modules.get(module), name, None)
    if (module, name) in _OMEGACONF:
        try:
            return getattr(importlib.import_module(module), name, None)
        except ImportError:
            return None
    return _enum(module, name)


def _enum(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for step in name.split("."):
        value = getattr(value, step, None)
    is_enum = isinstance(value, type) and issubclass(value, Enum) and len(value.__members__) > 0
    return value if is_enum else None


def _dtype_classes() -> list[Any]:
    dtypes = getattr(numpy, "dtypes", None)  # since numpy 1.25
    return [getattr(dtypes, name) for name in getattr(dtypes, "__all__", ())]

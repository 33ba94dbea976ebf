"""Tensors and pickles read onto the CPU. No code of a file runs, unless the policy trusts it.

A pickle is read with ``torch.load(weights_only=True)``, which is told to allow the globals that can
only hold data. Nothing is imported because a file names it, numpy and omegaconf excepted; an enum
counts only when its module is loaded already.

What holds only plain containers, plain values and dense tensors is built from the opcodes, which
were parsed already to see that it is harmless: torch would parse them once more, in Python. With
both, a load of 600 MB with AdamW takes 1.2x of the time of stock's, with this 0.85x.
"""

import functools
import importlib
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ckptfix.checkpoint.entries import Entry
from ckptfix.checkpoint.folder import Component
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_globals import (
    GlobalSafety,
    can_be_allowed,
    classify,
    python_3_name,
    safe_globals_line,
    unsafe_globals,
)
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, is_dict_like, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import (
    TORCH_DTYPES,
    PickledStorage,
    is_tensor,
    read_tensor,
    storages,
)
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.paths import command

_DTYPES = {
    noun: getattr(torch, name) for name, noun in TORCH_DTYPES.items() if hasattr(torch, name)
}
_PLAIN_TYPES = (bool, int, float, bytes, type(None))
_MOST_LEVELS = 32
_NAMELESS = Text("", 0, 0)


class NotPlain(Exception):
    """Signal that the file holds objects that are not built here."""


def build(path: Path, file: TorchFile) -> Any:
    """Return what ``torch.load(path, map_location="cpu")`` would return, every storage read into
    memory of its own.

    Raises NotPlain for a file that torch has to read, OSError, FormatError for a file that has
    become shorter.
    """
    if not isinstance(file.container, TorchZip):
        raise NotPlain
    known = storages(file.tree)
    if known.keys() != file.storage_ranges.keys():
        raise NotPlain
    with path.open("rb") as opened:
        return _Builder(opened.fileno(), file.storage_ranges, known).make(file.tree.root, 0)


class _Builder:
    """Builds each object once, however often the pickle refers to it."""

    def __init__(
        self, fd: int, ranges: Mapping[str, tuple[int, int]], known: Mapping[str, PickledStorage]
    ) -> None:
        self._fd = fd
        self._ranges = ranges
        self._known = known
        self._made: dict[int, Any] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}

    def make(self, value: Any, level: int) -> Any:
        if type(value) is Text:
            return value.value
        if isinstance(value, _PLAIN_TYPES):
            return value
        if level > _MOST_LEVELS:
            raise NotPlain
        if type(value) is tuple:
            return tuple(self.make(item, level + 1) for item in value)
        if type(value) is not Node or value.states is not None:
            raise NotPlain
        if id(value) not in self._made:
            self._make(value, level + 1)
        return self._made[id(value)]

    def _make(self, node: Node, level: int) -> None:
        if node.kind is Kind.LIST and node.entries is None:
            items = self._made[id(node)] = []
            items += (self.make(item, level) for item in node.items or ())
        elif is_dict_like(node) and node.items is None:
            made: dict[Any, Any] = {} if node.kind is Kind.DICT else self._ordered(node)
            self._made[id(node)] = made
            for key, value in pairs(node):
                made[self._key(key)] = self.make(value, level)
        elif is_tensor(node):
            self._made[id(node)] = self._tensor(node)
        else:
            raise NotPlain

    @staticmethod
    def _ordered(node: Node) -> "OrderedDict[Any, Any]":
        head = node.head
        if node.kind is not Kind.CALL or type(head) is not Node or node.args != ():
            raise NotPlain
        if not head.is_global("collections", "OrderedDict"):
            raise NotPlain
        return OrderedDict()

    @staticmethod
    def _key(key: Any) -> Any:
        if type(key) is Text:
            return key.value
        if not isinstance(key, _PLAIN_TYPES):
            raise NotPlain
        return key

    def _tensor(self, node: Node) -> torch.Tensor:
        """Return a dense tensor without gradient and hooks, as ``torch._utils._rebuild_tensor_v2``
        makes it.
        """
        args = node.args
        if (
            not node.head.is_global("torch._utils", "_rebuild_tensor_v2")
            or type(args) is not tuple
            or len(args) != 6
            or args[4] is not False
            or next(pairs(args[5]), None) is not None
        ):
            raise NotPlain
        found = read_tensor(_NAMELESS, node, self._known)
        if found is None or found.dtype not in _DTYPES:
            raise NotPlain
        storage = self._storage(found.storage_key)
        empty = torch.empty(0, dtype=_DTYPES[found.dtype], device="cpu")
        return empty.set_(storage, found.storage_offset, found.shape, found.stride)  # type: ignore[call-overload, no-any-return, unused-ignore]

    def _storage(self, key: str) -> torch.UntypedStorage:
        if key not in self._storages:
            offset, length = self._ranges[key]
            memory = torch.empty(length, dtype=torch.uint8, device="cpu")
            view = memoryview(memory.numpy())
            while view:
                got = os.preadv(self._fd, [view], offset)
                if not got:
                    raise FormatError(
                        f"the file ends at byte {offset} (expected {offset + len(view)})"
                    )
                view, offset = view[got:], offset + got
            self._storages[key] = memory.untyped_storage()
        return self._storages[key]


Global = tuple[str, str]

_ADDED_MODULES = ("_codecs", "builtins")
"""Modules of the safe globals that torch 2.4 does not know."""

_NUMPY_FUNCTIONS = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMPY_TYPES_TEXT = """
    ndarray dtype generic bool bool_ bytes_ str_ void float16 float32 float64 complex64 complex128 datetime64
    timedelta64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"""
_NUMPY_TYPES = frozenset(_NUMPY_TYPES_TEXT.split())
_PLAIN = frozenset(
    {("builtins", kind.__name__) for kind in (bool, dict, float, frozenset, int, list, str, tuple)}
    | {("collections", "defaultdict"), ("typing", "Any"), ("types", "NoneType")}
)
"""Globals that omegaconf's containers refer to besides their own classes."""

_NODES_TEXT = "Any String Integer Float Boolean Bytes Path Enum InterpolationResult"
_OMEGACONF = frozenset(
    {("omegaconf.dictconfig", "DictConfig"), ("omegaconf.listconfig", "ListConfig")}
    | {("omegaconf.base", name) for name in ("ContainerMetadata", "Metadata")}
    | {("omegaconf.nodes", f"{kind}Node") for kind in _NODES_TEXT.split()}
)


class Unreadable(Exception):
    """A file that cannot be read, or may not; the message says why and what to do."""


def read_weights(root: Path, entry: Entry, *, trust: bool) -> "OrderedDict[str, Any]":
    """Return the tensors of a model's files by name, on the CPU, with ``_metadata`` where torch
    saved it.

    Tensors are mapped where the file allows it, not copied. Raises Unreadable.
    """
    weights: OrderedDict[str, Any] = OrderedDict()
    files: dict[str, PurePosixPath] = {}
    if entry.members and entry.members[0].name.is_of_parts:
        migrate = command("migrate", root, "", "--to", "safetensors")
        raise Unreadable(
            f"{root}: each file has only one rank's parts of the tensors; next: {migrate} "
            "NEW_FOLDER"
        )
    for member in entry.members:
        if member.name.suffix == ".safetensors" or not isinstance(member.content, TorchFile):
            try:
                part: Any = load_file(str(root / member.path), device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise Unreadable(
                    f"{root / member.path}: {error}; next: {command('check', root)}"
                ) from error
        else:
            part = read_pickle(root, member, trust=trust, mapped=True)
            for step in entry.path:
                part = part[int(step)] if isinstance(part, list | tuple) else part[step]
        if not isinstance(part, Mapping):
            raise Unreadable(
                f"{root / member.path} holds a {type(part).__name__}, not a state dict"
            )
        for name in sorted(weights.keys() & part.keys()):
            # Stock accelerate takes the last one, with or without the values that were trained.
            if not same_bits(weights[name], part[name]):
                raise Unreadable(
                    f"{root}: {name!r} is in {files[name]} and in {member.path} with different "
                    f"values; next: {command('check', root)}"
                )
        files |= dict.fromkeys(part, member.path)
        weights.update(part)
        if (metadata := getattr(part, "_metadata", None)) is not None:
            vars(weights).setdefault("_metadata", OrderedDict()).update(metadata)
    for name, source in entry.aliases.items():
        if source in weights:
            weights[name] = weights[source]
    return weights


def same_bits(left: object, right: object) -> bool:
    """Compare dtype, shape and bits of two dense tensors, for NaN equals nothing. Other values are
    never the same.
    """
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if any(each.layout is not torch.strided or each.is_quantized for each in (left, right)):
        return False
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return bool(torch.equal(*flat))


def read_pickle(root: Path, component: Component, *, trust: bool, mapped: bool = False) -> Any:
    """Return what a file of torch.save holds, its tensors on the CPU.

    ``weights_only=True``, with the globals allowed that its opcodes name and that can only hold
    data. Others raise Unreadable with the line that allows them; with ``trust`` they are executed,
    after a UserWarning. ``mapped``: tensors of a zip file are mapped, not copied, for values that
    will be copied anyway.
    """
    path = root / component.path
    if component.problem is not None or not isinstance(component.content, TorchFile):
        reason = component.problem.message if component.problem else "not a torch.save file"
        raise Unreadable(f"{path}: {reason}; next: {command('check', root)}")
    tree = component.content.tree
    allowed, refused = resolve(tree.globals)
    in_full = False
    if refused or tree.refused_opcodes:
        reason = _refusal(path, refused, tree)
        if not trust:
            raise Unreadable(reason)
        warnings.warn(
            f"running code from a pickle, because trust=True: {reason}",
            UserWarning,
            stacklevel=2,
        )
        in_full = True
    try:
        if not (allowed or in_full or mapped):
            with suppress(NotPlain):
                return build(path, component.content)
        with allowing(allowed):
            in_place = mapped and isinstance(component.content.container, TorchZip)
            return torch.load(path, map_location="cpu", weights_only=not in_full, mmap=in_place)
    except Exception as error:  # torch.load, and with trust the classes of a user, raise anything
        raise Unreadable(f"{path}: {type(error).__name__}: {error}") from error


def _refusal(path: Path, refused: list[tuple[str, str]], tree: PickleTree) -> str:
    named = ", ".join(f"{module}.{name}" for module, name in sorted(refused))
    opcodes = tree.refused_opcodes
    # As ``check`` judges: a ``getattr`` whose result is only stored, as of a nested class, runs no
    # code.
    unsafe = unsafe_globals(tree)
    if unsafe:
        runs = ", ".join(f"{module}.{name}" for module, name in sorted(unsafe))
        return (
            f"{path} calls {runs}, which can run any code; do not load it unless you know who "
            "wrote it"
        )
    if opcodes and not refused:
        return (
            f"{path} is pickled with {', '.join(opcodes)}, which weights_only refuses; next, if "
            "you trust the file: LoadPolicy(trust=True)"
        )
    line = safe_globals_line(refused) if all(can_be_allowed(*pair) for pair in refused) else ""
    next_step = (
        f"next, if you trust these classes: {line}" if line else "next: LoadPolicy(trust=True)"
    )
    return f"{path} needs {named}, which weights_only refuses; {next_step}"


def resolve(names: Iterable[Global]) -> tuple[list[Any], list[Global]]:
    """Return what to hand to ``torch.serialization.add_safe_globals``, and the globals that may not
    be allowed.

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
            # Generators of random numbers hold bytes, which only newer versions of torch allow.
            if module in _ADDED_MODULES and torch.__version__ < (2, 6):
                allowed.append(getattr(sys.modules[module], name))
            continue
        value = None if safety is GlobalSafety.UNSAFE else _known(module, name)
        if value is None:
            refused.append((module, name))
            continue
        path = f"{module}.{name}"
        is_same = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}" == path
        allowed.append(value if is_same else _renamed(value, path))
        with_numpy = with_numpy or module.split(".")[0] == "numpy"
    if with_numpy:  # torch looks at the type of a dtype, and each dtype has its own
        allowed += [numpy.dtype, numpy.ndarray, *_dtype_classes()]
    return allowed, refused


@contextmanager
def allowing(values: list[Any]) -> Iterator[None]:
    """Allow these globals inside the block, in addition to those the user allowed."""
    # A copy: until torch 2.5 this is torch's own list, which grows with the next line.
    before = list(torch.serialization.get_safe_globals())
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
        # Not by numpy's own modules: 1.26 has a `_core` too, which is nearly empty.
        sample: Any = numpy.empty(0) if name == "_reconstruct" else numpy.float64(0)
        return sample.__reduce__()[0]
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


def _renamed(value: Any, path: str) -> Any:
    """Return what allows a global under another name than its own."""
    if torch.__version__ >= (2, 6):
        return value, path

    # Older versions of torch ask the object for its name.
    @functools.wraps(value)
    def renamed(*arguments: Any) -> Any:
        return value(*arguments)

    renamed.__module__, _, renamed.__name__ = path.rpartition(".")
    return renamed


def _enum(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for step in name.split("."):
        value = getattr(value, step, None)
    is_enum = isinstance(value, type) and issubclass(value, Enum) and len(value.__members__) > 0
    return value if is_enum else None


def _dtype_classes() -> list[Any]:
    dtypes = getattr(numpy, "dtypes", None)
    if dtypes is None:  # before numpy 1.25
        return list({type(numpy.dtype(code)) for code in numpy.typecodes["All"]})
    return [getattr(dtypes, name) for name in dtypes.__all__]

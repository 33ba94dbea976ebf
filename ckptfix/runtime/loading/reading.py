"""Read tensors and pickles onto the CPU. No code of a file runs, unless the policy trusts it."""

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ckptfix.checkpoint.folder import Component
from ckptfix.formats.pickle_globals import GlobalSafety, classify, safe_globals_line
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.runtime.loading.allowing import allowing, resolve
from ckptfix.runtime.loading.entries import Entry


class Unreadable(Exception):
    """A file that cannot be read, or may not; the message says why and what to do."""


def read_weights(root: Path, entry: Entry, *, trust: bool) -> "OrderedDict[str, Any]":
    """Return the tensors of a model's files by name, on the CPU, with ``_metadata`` where torch saved it.

    Tensors are mapped where the file allows it, not copied. Raises Unreadable.
    """
    weights: OrderedDict[str, Any] = OrderedDict()
    for member in entry.members:
        if member.name.suffix == ".safetensors" or not isinstance(member.content, TorchFile):
            try:
                part: Any = load_file(str(root / member.path), device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise Unreadable(f"{root / member.path}: {error}; next: ckptfix check {root}") from error
        else:
            part = read_pickle(root, member, trust=trust, mapped=True)
            for step in entry.path:
                part = part[int(step)] if isinstance(part, list | tuple) else part[step]
        if not isinstance(part, Mapping):
            raise Unreadable(f"{root / member.path} holds no state dict but a {type(part).__name__}")
        weights.update(part)
        if (metadata := getattr(part, "_metadata", None)) is not None:
            vars(weights).setdefault("_metadata", OrderedDict()).update(metadata)
    for name, source in entry.aliases.items():
        if source in weights:
            weights[name] = weights[source]
    return weights


def read_pickle(root: Path, component: Component, *, trust: bool, mapped: bool = False) -> Any:
    """Return what a file of torch.save holds, its tensors on the CPU.

    ``weights_only=True``, with the globals allowed that its opcodes name and that can only hold data. Others raise
    Unreadable with the line that allows them; with ``trust`` they are executed, after a UserWarning. ``mapped``:
    tensors of a zip file are mapped, not copied, for values that will be copied anyway.
    """
    path = root / component.path
    if component.problem is not None or not isinstance(component.content, TorchFile):
        reason = component.problem.message if component.problem else "no file of torch.save"
        raise Unreadable(f"{path}: {reason}; next: ckptfix check {root}")
    tree = component.content.tree
    allowed, refused = resolve(tree.globals)
    in_full = False
    if refused or tree.refused_opcodes:
        reason = _refusal(path, refused, tree.refused_opcodes)
        if not trust:
            raise Unreadable(reason)
        warnings.warn(
            f"code in a pickle is executed, because trust=True: {reason}", UserWarning, stacklevel=2
        )
        in_full = True
    try:
        with allowing(allowed):
            in_place = mapped and isinstance(component.content.container, TorchZip)
            return torch.load(path, map_location="cpu", weights_only=not in_full, mmap=in_place)
    except Exception as error:  # torch.load, and with trust the classes of a user, raise anything
        raise Unreadable(f"{path}: {type(error).__name__}: {error}") from error


def _refusal(path: Path, refused: list[tuple[str, str]], opcodes: tuple[str, ...]) -> str:
    named = ", ".join(f"{module}.{name}" for module, name in sorted(refused))
    unsafe = [pair for pair in refused if classify(*pair) is GlobalSafety.UNSAFE]
    if unsafe:
        runs = ", ".join(f"{module}.{name}" for module, name in sorted(unsafe))
        return f"{path} calls {runs}, which can run any code; do not load it unless you know who wrote it"
    if opcodes and not refused:
        return (
            f"{path} is pickled with {', '.join(opcodes)}, which weights_only refuses; next, when you trust the file: "
            f"LoadPolicy(trust=True)"
        )
    line = safe_globals_line(refused)
    next_step = f"next, when you trust these classes: {line}" if line else "next: LoadPolicy(trust=True)"
    return f"{path} needs {named}, which weights_only refuses; {next_step}"

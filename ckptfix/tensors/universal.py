"""The files of a universal checkpoint of DeepSpeed, in which each trained parameter has a folder
with its states.

Facts from DeepSpeed 0.18 and 0.19 (``checkpoint/ds_to_universal.py``): ``zero/<fqn>/fp32.pt``,
``exp_avg.pt`` and ``exp_avg_sq.pt`` hold, of ZeRO-1 and 2, a dict with the tensor in its shape
under "param", and ``step.pt`` the step; of ZeRO-3 they hold the tensor alone, and flat, and there
is no step. ``zero/optimizer_state.pt`` has what all parameters share. Next to ``zero/`` lie the
model states of the checkpoint that it was made from.
"""

import os
from collections.abc import Mapping
from math import prod
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.deepspeed_files import AGAIN, UNIVERSAL
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_tree import Node, child, is_dict_like, text_keys
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import is_tensor, storages
from ckptfix.storage.files import AnyPath, names_in
from ckptfix.storage.reading import Piece
from ckptfix.tensors.single_files import record_checksums, tensor_of
from ckptfix.tensors.stored import Contiguous, StoredTensor, Weights
from ckptfix.tensors.zero_partitions import Shapes, read_states_file
from ckptfix.tensors.zero_tensors import state_fqn

WEIGHT, STEP = "fp32", "step"
GLOBAL_STATE = UNIVERSAL / "optimizer_state.pt"
"""The file of what all parameters share: the param groups, the loss scaler."""

_SUFFIX = ".pt"
_PARAM = "param"
_PLAIN = frozenset({_PARAM, "cat_dim"})


class UniversalFile(NamedTuple):
    """A state of a parameter: a tensor, or a number that the pickle itself holds. ``checksums``:
    record -> CRC-32.
    """

    path: PurePosixPath
    value: StoredTensor | int | float
    checksums: Mapping[Piece, int]


def universal_files(
    root: AnyPath, where: PurePosixPath, shapes: Shapes, *, only: str | None = None
) -> dict[str, dict[str, UniversalFile]]:
    """Return fqn -> state -> file of the trained parameters ``shapes``; the weight is the state
    "fp32".

    ``only``: the one state to read. Raises OperationError when a parameter has no folder or no
    weight, or a tensor of another size than its shape; OSError.
    """
    found: dict[str, dict[str, UniversalFile]] = {}
    for name, shape in shapes.items():
        folder = where / UNIVERSAL / name
        if os.path.isabs(name) or ".." in folder.parts:
            raise OperationError(
                f"{root / where}: {name!r:.200} is not a valid parameter name; {AGAIN}"
            )
        states = _states_in(root / folder) if only is None else [only]
        files = {
            state: _read(root, folder / f"{state}{_SUFFIX}", name, shape, state) for state in states
        }
        if WEIGHT not in files:
            raise OperationError(f"{root / folder}: {WEIGHT}{_SUFFIX} is missing; {AGAIN}")
        found[name] = files
    return found


def ensure_states(root: AnyPath, where: PurePosixPath, weights: Weights) -> None:
    """Raise OperationError when a parameter of a universal checkpoint lacks a state that the others
    have.

    And when the file of what they share is missing. ``weights``: of the checkpoint; any other is
    complete. What is frozen has no states at all.
    """
    top = where / UNIVERSAL
    found: dict[PurePosixPath, set[str]] = {}
    for file in weights.files:
        if file.is_relative_to(top) and file.parent != top:
            found.setdefault(file.parent, set()).add(file.name)
    if found and where / GLOBAL_STATE not in weights.files:
        raise OperationError(
            f"{root / where / GLOBAL_STATE}: missing, and every loader needs it; {AGAIN}"
        )
    every = set().union(*found.values())
    for folder, names in sorted(found.items()):
        if len(names) > 1 and (lacking := sorted(every - names)):
            raise OperationError(
                f"{root / folder / lacking[0]}: missing, although other parameters have this "
                f"state; {AGAIN}"
            )


def _states_in(folder: AnyPath) -> list[str]:
    try:
        names = names_in(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(folder) from None
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def _missing(path: AnyPath) -> OperationError:
    return OperationError(f"{path}: missing, although the model states list its parameter; {AGAIN}")


def _read(
    root: AnyPath, path: PurePosixPath, name: str, shape: tuple[int, ...], state: str
) -> UniversalFile:
    def understand(full: AnyPath, file: TorchFile) -> UniversalFile:
        node = file.tree.root
        if is_dict_like(node) and not is_tensor(node):
            others = text_keys(node) - _PLAIN
            if others:
                raise OperationError(
                    f"{full}: {', '.join(sorted(others))}: ckptfix does not read checkpoints saved "
                    "with tensor or expert parallelism; next: export the weights with the script "
                    "that saved them, and use the exported files"
                )
            node = child(node, _PARAM)
        value: StoredTensor | int | float
        if state == STEP and isinstance(node, int | float):
            value = node
        else:
            value = _shaped(
                full, file, node, state_fqn(name, "" if state == WEIGHT else state), shape, state
            )
        return UniversalFile(path, value, dict(record_checksums(full, file)))

    try:
        return read_states_file(root / path, understand)
    except FileNotFoundError:
        raise _missing(root / path) from None


def _shaped(
    path: AnyPath, file: TorchFile, node: object, fqn: str, shape: tuple[int, ...], state: str
) -> StoredTensor:
    """Return a tensor in the shape of its parameter, which it may have lost, or a step as it is."""
    tensor = tensor_of(path, file, node, fqn, storages(file.tree)) if type(node) is Node else None
    if tensor is None:
        raise FormatError(f"{fqn!r:.200} is not a plain tensor")
    if state == STEP or tensor.shape == shape:
        return tensor
    if prod(tensor.shape) != prod(shape) or not isinstance(tensor.layout, Contiguous):
        raise FormatError(
            f"{fqn!r:.200} has shape {list(tensor.shape)}, but the model states say {list(shape)}"
        )
    return tensor._replace(shape=shape)

"""Facts about an optimizer's training, read from its pickled ``state_dict()``: nothing is executed.

Facts from torch 2.13: ``torch/optim/optimizer.py`` (``state_dict``), ``adamw.py``, ``sgd.py``, ``adagrad.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import unpack
from typing import Any

from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, Text, child, is_dict_like, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import is_optimizer
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.storage.reading import FileReader

_STEP_FORMATS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer's state says of its training.

    ``names``: those of its ``param_names``, () without any. ``shapes``: of each parameter with a state, that of its
    largest moment. ``has_stepped``: True where moments show a step, False where there are none yet, None where the
    state cannot tell (plain SGD keeps nothing).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    has_stepped: bool | None


@paused_gc()
def read_optimizer(file: TorchFile, reader: FileReader) -> OptimizerFacts | None:
    """Return the facts of a file that holds one optimizer's state, None for any other file.

    Raises FormatError when a tensor does not lie inside its storage, OSError when the file cannot be read.
    """
    root = file.tree.root
    if not is_dict_like(root) or not is_optimizer(root):
        return None
    # Each node once: a hostile pickle can refer to one dict a million times.
    groups = list({id(one): one for one in _items(child(root, "param_groups")) if is_dict_like(one)}.values())
    states = list({id(one): one for _, one in pairs(child(root, "state")) if is_dict_like(one)}.values())
    known = storages(file.tree)
    shapes: list[tuple[int, ...]] = []
    steps: list[float | None] = []
    for state in states:
        tensors = {
            key.value: tensor
            for key, value in pairs(state)
            if type(key) is Text and is_tensor(value) and (tensor := read_tensor(key, value, known))
        }
        step = tensors.pop("step", None)
        moments = [tensor.shape for tensor in tensors.values()]
        if moments:
            shapes.append(max(moments, key=lambda shape: (len(shape), shape)))
        if step is None:
            number = child(state, "step")
            steps.append(float(number) if type(number) in (int, float) else None)
        else:
            steps.append(_scalar(file, reader, step.dtype, step.storage_key, step.begin))
    return OptimizerFacts(
        names=tuple(
            name.value
            for group in groups
            for name in _items(child(group, "param_names"))
            if type(name) is Text
        ),
        shapes=tuple(shapes),
        has_stepped=_has_stepped(groups, shapes, steps),
    )


def _has_stepped(groups: list[Any], shapes: list[Any], steps: list[float | None]) -> bool | None:
    if shapes:  # Adagrad makes its moments before the first step
        return not all(step == 0 for step in steps)
    return None if all(map(_is_plain_sgd, groups)) else False


def _is_plain_sgd(group: Any) -> bool:
    return child(group, "dampening") is not None and child(group, "momentum") in (0, None)


def _items(node: object) -> Iterator[Any]:
    if type(node) is Node and node.kind is Kind.LIST:
        yield from node.items or ()


def _scalar(file: TorchFile, reader: FileReader, dtype: str, storage: str, begin: int | None) -> float | None:
    place, code = file.storage_ranges.get(storage), _STEP_FORMATS.get(dtype)
    if place is None or code is None or begin is None:
        return None
    size = 8 if dtype.endswith("64") else 4
    if begin + size > place[1]:
        return None
    (value,) = unpack(code, reader.read(place[0] + begin, size))
    return float(value)

"""The meaning of the names in a DCP checkpoint: which of them are a model's, by the planner's paths.

Facts from torch 2.13, ``torch/distributed/checkpoint/_nested_dict.py``: nested dicts are flattened to names that
are their keys with dots between, and ``planner_data`` keeps the keys of each.
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from ckptfix.formats.dcp_metadata import DcpMetadata

MODEL_KEY = "model"
"""The key under which Accelerate saves a model's state dict (1.0 to 1.15, ``utils/fsdp_utils.py``)."""

STATE_KEY, GROUPS_KEY = "state", "param_groups"
"""The keys of what ``Optimizer.state_dict()`` gives."""

_OPTIMIZER_KEYS = frozenset({STATE_KEY, GROUPS_KEY})
_FLATTENED = (f"{STATE_KEY}.", f"{GROUPS_KEY}.")


class ModelNames(NamedTuple):
    """The part of a checkpoint that is a model: the keys that lead to it, and DCP's name -> name in its state dict."""

    prefix: tuple[str | int, ...]
    names: dict[str, str]


def model_names(metadata: DcpMetadata) -> ModelNames | None:
    """Return the model in a checkpoint, None when it has only an optimizer or nothing.

    Goes down through dicts whose values are dicts: into ``model`` where there is one, else into the only one that is no
    optimizer's. Where several are left, all are the model, and the names keep the keys.
    """
    tensors = dict.fromkeys(tensor.fqn for tensor in metadata.tensors)  # in their order, which a set has not
    if metadata.planned is None:
        every = [*tensors, *(item.fqn for item in metadata.items)]
        return ModelNames((), {fqn: fqn for fqn in every}) if tensors else None
    paths = {one.fqn: one.path for one in metadata.planned}
    known = {fqn: paths.get(fqn, (fqn,)) for fqn in (*tensors, *(item.fqn for item in metadata.items))}
    prefix: tuple[str | int, ...] = ()
    skipped: frozenset[str | int]
    while True:
        depth = len(prefix)
        inside = {fqn: path for fqn, path in known.items() if path[:depth] == prefix and len(path) > depth}
        skipped = _optimizers(inside, depth)
        flattened = flattened_keys(path[depth] for path in inside.values())
        steps = {path[depth] for fqn, path in inside.items() if fqn in tensors} - skipped - flattened
        if not steps:
            return None
        if any(len(path) == depth + 1 for fqn, path in inside.items() if fqn in tensors):
            break  # tensors by name: here is the state dict
        if MODEL_KEY not in steps and len(steps) > 1:
            break
        prefix += (MODEL_KEY if MODEL_KEY in steps else steps.pop(),)
    return ModelNames(
        prefix,
        {
            fqn: ".".join(map(str, path[depth:]))
            for fqn, path in inside.items()
            if path[depth] not in skipped or len(path) == depth + 1
        },
    )


def _optimizers(paths: Mapping[str, tuple[str | int, ...]], depth: int) -> frozenset[str | int]:
    """Return the keys at a depth below which lies what ``Optimizer.state_dict()`` gives."""
    below: dict[str | int, set[str | int]] = {}
    for path in paths.values():
        if len(path) > depth + 1:
            below.setdefault(path[depth], set()).add(path[depth + 1])
    return frozenset(
        step
        for step, keys in below.items()
        if keys and (keys <= _OPTIMIZER_KEYS or keys <= flattened_keys(keys))
    )


def flattened_keys(keys: Iterable[str | int]) -> frozenset[str | int]:
    """Return those keys of a dict that are an optimizer's in one string: ``state.<fqn>.exp_avg``.

    So does ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict`` (torch 2.4 to 2.13,
    ``distributed/checkpoint/state_dict.py``), which always leaves ``param_groups.<fqn>.<option>``; without one of those
    the dict is a model's with a module called "state".
    """
    found = frozenset(key for key in keys if isinstance(key, str) and key.startswith(_FLATTENED))
    return found if any(str(key).startswith(_FLATTENED[1]) for key in found) else frozenset()


def flattened_names(keys: Iterable[str | int]) -> tuple[str, ...]:
    """Return the names of the parameters that the flattened keys of a dict refer to: each has options in a group."""
    begin = _FLATTENED[1]
    names = (str(key)[len(begin) :].rpartition(".")[0] for key in keys if str(key).startswith(begin))
    return tuple(dict.fromkeys(name for name in names if name))


def flattened_parts(key: str, names: Set[str]) -> tuple[str, str, str] | None:
    """Cut ``state.<fqn>.exp_avg`` in front of and behind its name, the longest of ``names`` that fits, else None."""
    begin = next((begin for begin in _FLATTENED if key.startswith(begin)), None)
    name = key[len(begin) :].rpartition(".")[0] if begin is not None else ""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (begin, name, key[len(begin) + len(name) :]) if begin is not None and name else None


def keys_beside(metadata: DcpMetadata, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the first key of everything that is no part of the model."""
    paths = {one.fqn: one.path for one in metadata.planned or ()}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    others = (fqn for fqn in every if fqn not in names)
    return tuple(dict.fromkeys(str(paths.get(fqn, (fqn,))[0]) for fqn in others))

"""New names for the tensors of a model, as ``repair --keys`` gives them."""

from dataclasses import replace

from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    KeyMap,
    collapse,
    collisions,
    common_wrappers,
    is_nested,
    without_private_wrappers,
)
from ckptfix.errors import UsageError
from ckptfix.operations.policy import Keys
from ckptfix.weights.stored import Weights


def renamed(weights: Weights, keys: Keys | None) -> Weights:
    """Return the weights under the names asked for; ties and the versions of modules follow.

    Raises UsageError when two names would become one.
    """
    if keys is None:
        return weights
    names = [tensor.fqn for tensor in weights.tensors] + list(weights.ties)
    key_map = _key_map(names, keys)
    if key_map is None:
        return weights
    for first, second, new in collisions(names, key_map):
        raise UsageError(f"{weights.label}: {first!r} and {second!r} would both become {new!r}")
    if key_map.inner and common_wrappers(map(key_map, names)) != key_map.insert:
        raise UsageError(
            f"{weights.label}: without its inner wrappers every name would begin with a wrapper again: what is real is "
            "not clear; leave --keys out"
        )
    return replace(
        weights,
        tensors=tuple(tensor._replace(fqn=key_map(tensor.fqn)) for tensor in weights.tensors),
        ties={key_map(name): key_map(kept) for name, kept in weights.ties.items()},
        versions={key_map.module(name): version for name, version in weights.versions.items()},
    )


def _key_map(names: list[str], keys: Keys) -> KeyMap | None:
    if keys is Keys.AUTO:
        chain = common_wrappers(names)
        return KeyMap(remove=chain, insert=collapse(chain)) if is_nested(chain) else None
    inner = common_wrappers(map(without_private_wrappers, names))
    return KeyMap(remove=inner, insert=DDP_CHAIN if keys is Keys.DDP else (), inner=True)

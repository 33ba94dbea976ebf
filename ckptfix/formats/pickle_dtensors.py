"""Objects by which torch pickles what a DTensor is: its mesh, its placements, its layout.

Facts from torch 2.13: ``_dtensor_spec.py`` and ``placement_types.py`` in ``torch/distributed/tensor``,
``device_mesh.py`` and ``_mesh_layout.py`` in ``torch/distributed``. They are pickled as ``cls.__new__(cls)`` with a
dict of its attributes, and the two named tuples with their values. The placements read their attributes in C++.
"""

from typing import Any

from ckptfix.formats.pickle_kinds import MAPPINGS, kind_of, members
from ckptfix.formats.pickle_tree import Kind, Node, Text, pairs

_TUPLES = {"TensorMeta": 3, "ShardOrderEntry": 2}
"""Named tuples -> their values."""

_READ: dict[str, dict[str, tuple[str, ...]]] = {
    "Shard": {"dim": ("int", "bool")},
    "_StridedShard": {"dim": ("int", "bool"), "split_factor": ("int", "bool")},
    "Partial": {"reduce_op": ("str",)},
}
"""Classes -> the attributes that a load reads, and the kinds that these can have."""


def problem_of_dtensor(name: str, node: Node) -> str:
    """Return what is wrong with a call of a class that describes a DTensor, in words; "" for nothing."""
    if node.kind is Kind.NEW_EX or (type(node.args) is not tuple and not kind_of(node.args)):
        return ""
    expected = _TUPLES.get(name, 0)
    given = len(members(node.args))
    if node.kind is not Kind.NEW or given != expected:
        return f"with {given} argument{'' if given == 1 else 's'}, which torch does not write"
    if name in _TUPLES:
        return "and gives it a state, which it cannot have" if node.states else ""
    states = node.states or []
    if name in _READ and not states:
        return "and gives it no state"
    return (
        "" if all(_is_state(name, state) for state in states) else "and gives it a state that is not its own"
    )


def _is_state(name: str, state: Any) -> bool:
    if not kind_of(state):
        return True
    if kind_of(state) not in MAPPINGS or {*map(kind_of, members(state))} - {"str"}:
        return False
    values = {key.value: value for key, value in pairs(state) if type(key) is Text}
    read = _READ.get(name, {})
    if name == "DeviceMesh" and "_dim_group_names" in values:
        # A load asks for the process group of each.
        groups = values["_dim_group_names"]
        is_listed = kind_of(groups) in ("", "list", "tuple")
        return is_listed and {*map(kind_of, members(groups))} <= {"", "str"}
    return all(key in values and kind_of(values[key]) in ("", *kinds) for key, kinds in read.items())

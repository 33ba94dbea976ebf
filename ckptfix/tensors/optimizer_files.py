"""The state of an optimizer in one file of torch.save, and the values of such a pickle without
executing it.

Facts from torch 2.13 (``torch/optim/optimizer.py``, ``state_dict``): ``state`` leads from each
parameter to its states, ``param_groups`` lists hyperparameters and, under ``params``, the
parameters. DDP numbers them; FSDP's full state dicts have fqns. Accelerate 1.15
(``checkpointing.py``, ``utils/fsdp_utils.py``) calls both files ``optimizer.bin``, and the Trainer
has ``optimizer.pt``: the keys alone tell them apart.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Kind, Node, Text, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_tensors import is_tensor, kind_of_tensor, read_tensor, storages
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import command
from ckptfix.storage.reading import Piece, open_reader
from ckptfix.tensors.new_torch_files import Call, Global
from ckptfix.tensors.optimizers import OptimizerState, ParamGroup, StateValue, Strategy
from ckptfix.tensors.single_files import bounded_layout, record_checksums
from ckptfix.tensors.stored import StoredTensor

GROUPS, STATE, PARAMS = "param_groups", "state", "params"
"""Keys of ``Optimizer.state_dict()``, and of each of its param groups."""

_DEEPEST = 32
_LONGEST_NUMBER = 2040  # bits that a pickle of protocol 2 can hold
FLAT = "_flat_param"
"""Beginning of the name that FSDP1 gives a flat parameter."""


class Unread(NamedTuple):
    """A value that is not read. ``kind``: in words, "a set"."""

    kind: str


class PickledValues:
    """The values of a torch file as Python has them; nothing is executed.

    None, bool, int, float, str, tuples, lists and dicts are themselves. A tensor is a
    ``StoredTensor`` whose name is the keys that lead to it, with dots between. A class or a
    function is a ``Global``, and what one returned a ``Call``. Anything else is ``Unread``.
    """

    def __init__(self, path: AnyPath, file: TorchFile) -> None:
        """Prepare to read a parsed file. Raises FormatError when its storages are not torch's."""
        self.path = path
        self.file = file
        self.known = storages(file.tree)
        self._left = 4 * len(file.tree.data)  # a few bytes can refer to a long list again and again

    def tensor(self, name: str, node: Node) -> Any:
        """Return a tensor. Raises FormatError, and OperationError for one whose bytes cannot be
        read.
        """
        found = read_tensor(Text(name, 0, 0), node, self.known)
        if found is None:
            return Unread(kind_of_tensor(node))
        return StoredTensor(
            name, found.dtype, found.shape, bounded_layout(self.path, self.file, found)
        )

    def value(self, value: Any, name: str = "", depth: int = 0) -> Any:
        """Return a value with all that is in it. ``name``: the keys that lead to it. Raises as
        ``tensor`` does.
        """
        self._left -= 1
        if self._left < 0:
            raise FormatError(
                "the pickle refers to the same values over and over, which torch never does"
            )
        kind = type(value)
        if kind is Text:
            return value.value
        if value is None or kind is bool or kind is float:
            return value
        if kind is int and value.bit_length() < _LONGEST_NUMBER:
            return value
        if depth > _DEEPEST:
            return Unread(f"a value nested more than {_DEEPEST} levels deep")
        if kind is tuple:
            return tuple(
                [self.value(one, _below(name, place), depth + 1) for place, one in enumerate(value)]
            )
        return (
            self._node(value, name, depth + 1)
            if kind is Node
            else Unread(f"a value of type {kind.__name__}")
        )

    def _node(self, node: Node, name: str, depth: int) -> Any:
        if is_tensor(node):
            return self.tensor(name, node)
        if node.kind is Kind.GLOBAL:
            return Global(*node.head)
        if node.kind is Kind.LIST and not is_dict_like(node):
            return [
                self.value(one, _below(name, place), depth)
                for place, one in enumerate(items_of(node))
            ]
        if is_dict_like(node) and (not node.states or _is_ordered_dict(node)):
            return self._dict(node, name, depth)
        is_call = (
            node.kind in (Kind.CALL, Kind.NEW)
            and type(node.head) is Node
            and node.head.kind is Kind.GLOBAL
        )
        if (
            not is_call
            or type(node.args) is not tuple
            or node.items
            or node.entries
            or len(node.states or ()) > 1
        ):
            return Unread(
                f"an object of {'.'.join(node.head.head)}" if is_call else f"a {node.kind.value}"
            )
        return Call(
            function=Global(*node.head.head),
            args=self.value(node.args, name, depth),
            state=self.value(node.states[0], name, depth) if node.states else None,
            new=node.kind is Kind.NEW,
        )

    def _dict(self, node: Node, name: str, depth: int) -> Any:
        found = {}
        for key, value in pairs(node):
            word = self.value(key, name, depth)
            if word is not None and type(word) not in (str, int, float, bool):
                return Unread("a dict with keys that are neither strings nor numbers")
            found[word] = self.value(value, _below(name, word), depth)
        return found


def _is_ordered_dict(node: Node) -> bool:
    """Return whether a node is an OrderedDict, whose attributes are the versions of modules."""
    return type(node.head) is Node and node.head.is_global("collections", "OrderedDict")


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


@paused_gc()
def read_optimizer_file(root: AnyPath, path: PurePosixPath, index: int) -> OptimizerState:
    """Return the optimizer in a file, by opcodes. Raises OperationError when it cannot be read,
    OSError.
    """
    full = root / path
    try:
        with open_reader(full) as reader:
            file = read_torch_file(reader)
        return optimizer_state(
            PickledValues(full, file).value(file.tree.root),
            label=str(path),
            index=index,
            files=(path,),
            checksums=dict(record_checksums(full, file)),
        )
    except FormatError as error:
        raise OperationError(f"{full}: {error}; next: {command('check', root)}") from error


def optimizer_state(
    value: Any,
    *,
    label: str,
    index: int,
    files: tuple[PurePosixPath, ...],
    strategy: Strategy | None = None,
    world_size: int | None = None,
    checksums: Mapping[Piece, int],
) -> OptimizerState:
    """Return the optimizer whose ``state_dict()`` is ``value``, as ``PickledValues`` reads it.

    ``strategy``: None where the keys show it, DDP by numbers and FSDP by fqns. Raises FormatError
    for another value, and for parameters of FSDP1 that are pieces of flat ones.
    """
    if (
        not isinstance(value, dict)
        or not isinstance(value.get(GROUPS), list)
        or not isinstance(value.get(STATE), dict)
    ):
        raise FormatError(
            f"it is not an optimizer state dict (expected a dict with {STATE!r} and {GROUPS!r})"
        )
    unfit: dict[str, str] = {}
    extra = {_text(key): one for key, one in value.items() if key not in (STATE, GROUPS)}
    members: list[tuple[str | int, ...]] = []
    options: list[dict[str, Any]] = []
    for number, group in enumerate(value[GROUPS]):
        members.append(_members(number, group))
        options.append({key: one for key, one in group.items() if key != PARAMS})
        note_unread(f"{GROUPS}.{number}", options[-1], unfit)
    note_unread("", extra, unfit)
    listed = {one for names in members for one in names} or value[STATE].keys()
    is_named = not all(type(one) is int for one in listed) if listed else False
    states: dict[str, dict[str, StateValue]] = {}
    for key, state in value[STATE].items():
        is_number = type(key) is int or (
            type(key) is str and key.isdecimal()
        )  # a planner of DCP makes them text
        if not (type(key) is str if is_named else is_number) or not isinstance(state, dict):
            # Of the optimizer itself, and not of a parameter.
            extra[f"{STATE}.{_text(key)}"] = state
            unfit[f"{STATE}.{_text(key)}"] = "not the state of a parameter"
            continue
        states[str(key)] = dict(_flattened(str(key), state, unfit))
    groups = tuple(
        ParamGroup(names=tuple(map(str, names)), options=own)
        for names, own in zip(members, options, strict=True)
    )
    _ensure_whole_parameters([*states, *(name for group in groups for name in group.names)])
    return OptimizerState(
        label=label,
        strategy=strategy or (Strategy.FSDP_FULL if is_named else Strategy.DDP),
        index=index,
        files=files,
        is_named=is_named,
        groups=groups,
        states=states,
        world_size=world_size,
        extra=extra,
        unfit=unfit,
        checksums=checksums,
    )


def _members(number: int, group: Any) -> tuple[str | int, ...]:
    """Return the parameters of a param group, all numbers or all fqns."""
    if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
        raise FormatError(f"param group {number} is not a dict of hyperparameters")
    members = group.get(PARAMS, [])
    if (
        not isinstance(members, list | tuple)
        or len({type(one) for one in members} - {int, str}) > 0
    ):
        raise FormatError(f"the parameters of param group {number} are neither numbers nor names")
    if len({type(one) for one in members}) > 1:
        raise FormatError(f"the parameters of param group {number} mix numbers and names")
    return tuple(members)


def _text(key: object) -> str:
    return str(key)


def note_unread(name: str, value: Any, unfit: dict[str, str]) -> None:
    """Note the values in ``value`` that were not read: name -> kind in words."""
    if isinstance(value, Call):
        value = {"args": value.args, "items": value.items, "state": value.state}
    if isinstance(value, Unread):
        unfit[name] = value.kind
    elif isinstance(value, dict):
        for key, one in value.items():
            note_unread(_below(name, key), one, unfit)
    elif isinstance(value, list) or type(value) is tuple:
        for place, one in enumerate(value):
            note_unread(_below(name, place), one, unfit)


def _flattened(
    name: str, state: dict[Any, Any], unfit: dict[str, str], before: str = ""
) -> Iterator[tuple[str, StateValue]]:
    """Yield the states of a parameter. Those in a dict or list of one have the keys that lead to
    them in their name.
    """
    for key, value in state.items():
        own = f"{before}{key}"
        if isinstance(value, list) or type(value) is tuple:
            value = dict(enumerate(value))
        if isinstance(value, dict):
            unfit[f"{name}.{own}"] = f"a dict or list of {len(value)} values"
            yield from _flattened(name, value, unfit, f"{own}.")
        elif isinstance(value, Unread):
            unfit[f"{name}.{own}"] = value.kind
        elif isinstance(value, Global | Call):
            unfit[f"{name}.{own}"] = "neither a tensor nor a number"
        else:
            yield own, value


def _ensure_whole_parameters(names: list[str]) -> None:
    flat = next((name for name in names if name.rpartition(".")[2].startswith(FLAT)), None)
    if flat is not None:
        raise FormatError(flat_parameter(flat))


def flat_parameter(name: str) -> str:
    """Say why a flat parameter is not read."""
    return (
        f"{name!r:.200} is an FSDP1 flat parameter: it joins several parameters, and the "
        "checkpoint does not record where each of them is; save it again with "
        "state_dict_type='SHARDED_STATE_DICT'"
    )

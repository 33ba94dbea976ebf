"""The optimizers of two checkpoints paired parameter by parameter, whatever strategies saved them.

FSDP and DeepSpeed name parameters. DDP and the Trainer number them: numbers become names where the
checkpoint records them, or where the other side has names and a model says the order. Two
optimizers without names are compared by position in their param groups, as torch loads them, or by
number where torch refuses groups of other sizes. The places of parameters in the groups of two DDP
optimizers are compared, too. A state of one element, such as ``step``, is a
tensor with one strategy and a number with another, so its number is compared; so are
hyperparameters, for each parameter, as param groups are not the same in every strategy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.files import Openable
from ckptfix.storage.paths import existing
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.numbers import Tolerance, has_numbers, numbers_in
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import BY_TORCH, COUNTS, OptimizerState, StateValue, Strategy
from ckptfix.tensors.parameter_names import shape_of
from ckptfix.tensors.parameter_sources import name_optimizers, recorded_names
from ckptfix.tensors.stored import (
    Contiguous,
    StoredCheckpoint,
    StoredTensor,
    Weights,
    tensor_digest,
)
from ckptfix.verification.diff_report import ValueDiff
from ckptfix.verification.matching import Matched, match_names
from ckptfix.wording import list_names

MASTER = "fp32"
"""The key of a parameter's fp32 copy among its states, as DeepSpeed calls the file of one."""

_OF_DEEPSPEED = "optimizer_state_dict"  # the key of an optimizer in a file of DeepSpeed
_LISTED = "param group"
_IN_GROUP = {True: "listed", False: "not listed"}
_NAMES = "param_names"  # an option of param groups that torch 2.6 adds for scripts that give names


class Side(NamedTuple):
    """One side of a comparison. ``unread``: why its optimizers cannot be read, "" where they
    can.
    """

    checkpoint: StoredCheckpoint
    optimizers: tuple[OptimizerState, ...] = ()
    unread: str = ""


def open_side(path: Openable, *, lone_shard: bool = False) -> Side:
    """Return the contents of a path: models and optimizers, or a lone file of either.

    Raises UsageError when there is neither, and as ``open_checkpoint`` does; OSError.
    """
    try:
        checkpoint = open_checkpoint(path, lone_shard=lone_shard)
    except UsageError:
        given = existing(path)
        optimizers = open_optimizers(given)
        if not optimizers:
            raise
        is_folder = given.is_dir()
        checkpoint = StoredCheckpoint(
            root=given if is_folder else given.parent, only=None if is_folder else given.name
        )
        return Side(checkpoint, optimizers)
    try:
        return Side(checkpoint, open_optimizers(checkpoint.root / (checkpoint.only or "")))
    except OperationError as error:
        return Side(checkpoint, unread=str(error))


def left_of(weights: Weights, of_optimizers: Collection[PurePosixPath]) -> tuple[str, ...]:
    """Return what the files of a model hold next to it. ``of_optimizers``: files of optimizers that
    were compared.

    DeepSpeed's optimizers lie in files of the model, as its fp32 weights are theirs.
    """
    is_compared = not set(weights.files).isdisjoint(of_optimizers)
    return tuple(name for name in weights.left if not (is_compared and name == _OF_DEEPSPEED))


class OptimizerPair(Struct, frozen=True, kw_only=True):
    """An optimizer of each side, under the same names.

    ``matched``: the tensors that both or one of them has, by parameter and state; ``tensors`` finds
    them. ``words``: how names were matched, "" for as they are. ``values``: number of states of
    one element and of hyperparameters that were compared. ``differences``: those that differ.
    ``notes``: what was not compared, in words.
    """

    a: OptimizerState
    b: OptimizerState
    matched: tuple[Matched, ...]
    tensors: tuple[Mapping[str, StoredTensor], Mapping[str, StoredTensor]]
    words: str
    values: int
    differences: tuple[ValueDiff, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether every state of both could be read."""
        return not any(map(_unread, (self.a, self.b)))

    def of(self, one: Matched) -> tuple[StoredTensor | None, StoredTensor | None]:
        """Return the tensors of both sides that a matched key means."""
        return (
            self.tensors[0][one.a] if one.a is not None else None,
            self.tensors[1][one.b] if one.b is not None else None,
        )


class Pairing(NamedTuple):
    """The pairs of optimizers that can be compared, and in words those that cannot.

    ``is_complete``: every optimizer that both sides have is in a pair, and could be read.
    """

    pairs: tuple[OptimizerPair, ...] = ()
    notes: tuple[str, ...] = ()
    is_complete: bool = True


def pair_optimizers(
    left: Side,
    right: Side,
    *,
    model: str | Callable[[], Any] | None = None,
    tolerance: Tolerance | None = None,
) -> Pairing:
    """Return the pairs of optimizers that can be compared, and in words those that cannot.

    ``model``: "module:factory", or the function, that makes the models of the run, for parameters
    that are numbered. ``tolerance``: for values of one element.

    Raises UsageError for a factory that does not work, OSError.
    """
    notes = [
        f"optimizers in {side}: {one.unread}"
        for side, one in zip("AB", (left, right), strict=True)
        if one.unread
    ]
    if left.unread or right.unread:
        is_needed = all(side.optimizers or side.unread for side in (left, right))
        return Pairing(notes=tuple(notes), is_complete=not is_needed)
    pairs = []
    is_complete = True
    for a, b in _by_position(left.optimizers, right.optimizers):
        if a is None or b is None:
            one, (side, other) = (b, "BA") if a is None else (a, "AB")
            assert one is not None, "of one side at least"
            notes.append(
                f"optimizer {one.label} in {side}: {other} has no optimizer at this position"
            )
            continue
        try:
            pairs.append(_pair(*_named((left, a), (right, b), model), tolerance))
        except OperationError as error:
            notes.append(f"optimizer {a.label} in A and {b.label} in B: {error}")
            is_complete = False
    return Pairing(
        tuple(pairs), tuple(notes), is_complete and all(pair.is_complete for pair in pairs)
    )


def _by_position(
    left: Sequence[OptimizerState], right: Sequence[OptimizerState]
) -> Iterator[tuple[OptimizerState | None, OptimizerState | None]]:
    if len(left) == len(right) == 1:
        yield left[0], right[0]
        return
    ours, theirs = ({one.index: one for one in side} for side in (left, right))
    for index in sorted(ours.keys() | theirs.keys()):
        yield ours.get(index), theirs.get(index)


def _named(
    left: tuple[Side, OptimizerState],
    right: tuple[Side, OptimizerState],
    model: str | Callable[[], Any] | None,
) -> tuple[OptimizerState, OptimizerState, str]:
    """Return both optimizers under names, or both under numbers, and in words what that rests
    on.
    """
    (one, a), (other, b) = left, right
    if a.is_named and b.is_named:
        return a, b, ""
    try:
        both = a.is_named or b.is_named
        return (
            _with_names(one, a, model, may_build=both),
            _with_names(other, b, model, may_build=both),
            "",
        )
    except OperationError:
        if not (a.is_named or b.is_named):
            if _group_sizes(a) != _group_sizes(b):
                words = (
                    "parameters matched by number, because they have no names; loading one into "
                    "the other fails, because their param groups have different sizes"
                )
                return a, b, words
            return (
                a.by_position(),
                b.by_position(),
                "parameters matched by position, because they have no names",
            )
        named, numbered = (a, b) if a.is_named else (b, a)
        if (ordered := _in_order_of(named, numbered)) is None:
            raise
        words = (
            "parameters matched by order, because one side has only numbers; to match them by "
            "name: --model MODULE:FACTORY"
        )
        return (a, ordered, words) if a.is_named else (ordered, b, words)


def _in_order_of(named: OptimizerState, numbered: OptimizerState) -> OptimizerState | None:
    """Return an optimizer under the names of another one, param group by param group in their
    order.

    None where the groups have other numbers of parameters, or moments of other shapes.
    """
    if _group_sizes(named) != _group_sizes(numbered):
        return None
    names = {
        number: name
        for own, group in zip(numbered.groups, named.groups, strict=True)
        for number, name in zip(own.names, group.names, strict=True)
    }
    for number, name in names.items():
        shapes = [
            shape_of(one.states.get(key, {})) for one, key in ((numbered, number), (named, name))
        ]
        if None not in shapes and shapes[0] != shapes[1]:
            return None
    return numbered.named(names)


def _group_sizes(state: OptimizerState) -> list[int]:
    return [len(group.names) for group in state.groups]


def _with_names(
    side: Side, state: OptimizerState, model: str | Callable[[], Any] | None, *, may_build: bool
) -> OptimizerState:
    """Return an optimizer under names. ``may_build``: build the model that ``config.json`` names,
    which takes torch.
    """

    root = side.checkpoint.root
    is_built = model is not None or (may_build and (root / CONFIG).is_file())
    if not state.is_named and not is_built and recorded_names(root, state) is None:
        raise OperationError(
            "its parameters have no names; help: pass the models of this run with --model "
            "MODULE:FACTORY"
        )
    (named,) = name_optimizers(root, [state], weights=side.checkpoint.weights, model=model)
    return named


class _Values:
    """States of one element and hyperparameters, and which of them differ. ``count``: how many
    were compared.
    """

    def __init__(self, tolerance: Tolerance | None) -> None:
        self._tolerance = tolerance
        self._found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
        self.count = 0

    def note(self, files: OpenFiles, key: str, a: Any, b: Any, name: str) -> None:
        """Compare two values of a parameter."""
        self.count += 1
        one, other = _comparable(a, files), _comparable(b, files)
        if not _are_equal(one, other, self._tolerance):
            self._found.setdefault((key, repr(one), repr(other)), (one, other, []))[2].append(name)

    def differences(self) -> tuple[ValueDiff, ...]:
        """Return the values that differ."""
        return tuple(
            ValueDiff(name=key[0], a=a, b=b, parameters=tuple(names))
            for key, (a, b, names) in self._found.items()
        )


def _pair(
    a: OptimizerState,
    b: OptimizerState,
    words: str,
    tolerance: Tolerance | None,
) -> OptimizerPair:
    states = _states(a, b), _states(b, a)
    parameters, removed = match_names(
        *(dict.fromkeys(_parameters(one), _NOTHING) for one in (a, b))
    )
    options = _options(a), _options(b)
    matched: list[Matched] = []
    alone: dict[tuple[int, str], None] = {}
    begun: list[str] = []
    unlisted: list[str] = []
    values = _Values(tolerance)
    tensors: tuple[dict[str, StoredTensor], dict[str, StoredTensor]] = ({}, {})
    with OpenFiles() as files:
        note = partial(values.note, files)
        for one in parameters:
            ours = states[0].get(one.a or "", {})
            theirs = states[1].get(one.b or "", {})
            if (not ours and _is_at_begin(b, theirs, files)) or (
                not theirs and _is_at_begin(a, ours, files)
            ):
                begun.append(one.name)
                ours = theirs = {}
            for key in dict.fromkeys([*ours, *theirs]):
                x, y = ours.get(key), theirs.get(key)
                if _are_values(x, y):
                    if x is not None or y is not None:
                        note(key, x, y, one.name)
                    continue
                names = [
                    f"{name}.{key}" if isinstance(value, StoredTensor) else None
                    for name, value in ((one.a, x), (one.b, y))
                ]
                matched.append(Matched(name=f"{one.name}.{key}", a=names[0], b=names[1]))
                for side, name, value in zip(tensors, names, (x, y), strict=True):
                    if name is not None and isinstance(value, StoredTensor):
                        side[name] = value
            listed = one.a in options[0], one.b in options[1]
            if not all(listed):
                if ours or theirs:
                    note(_LISTED, _IN_GROUP[listed[0]], _IN_GROUP[listed[1]], one.name)
                elif any(listed):  # DeepSpeed leaves out frozen parameters that the script lists
                    unlisted.append(one.name)
                continue
            mine, others = options[0][one.a], options[1][one.b]
            for key in (key for key in mine if key in others):
                note(key, mine[key], others[key], one.name)
            alone |= dict.fromkeys((0, key) for key in mine if key not in others)
            alone |= dict.fromkeys((1, key) for key in others if key not in mine)
        for name, key, place, other_place in _places(a, b, parameters):
            note(key, place, other_place, name)
    return OptimizerPair(
        a=a,
        b=b,
        matched=tuple(matched),
        tensors=tensors,
        words="; ".join(filter(None, (words, removed))),
        values=values.count,
        differences=values.differences(),
        notes=tuple(_left_out((a, b), alone, begun, unlisted)),
    )


_NOTHING = StoredTensor("", "U8", (0,), Contiguous(()))  # names are matched as those of tensors are


def _parameters(state: OptimizerState) -> Iterator[str]:
    """Yield every parameter of an optimizer: in the order of its groups, then those of no group."""
    for group in state.groups:
        yield from group.names
    yield from state.states
    yield from state.masters


def _states(state: OptimizerState, other: OptimizerState) -> Mapping[str, Mapping[str, StateValue]]:
    """Return the states by parameter; with the masters where the other side has some, too.

    Else the weights of the other side are the masters, and are compared as such.
    """
    if not other.masters:
        return state.states
    names = dict.fromkeys([*state.states, *state.masters])
    return {
        name: {
            **state.states.get(name, {}),
            **({MASTER: state.masters[name]} if name in state.masters else {}),
        }
        for name in names
    }


def _options(state: OptimizerState) -> dict[str | None, Mapping[str, Any]]:
    """Return the hyperparameters of each parameter."""
    return {
        name: {key: value for key, value in group.options.items() if key != _NAMES}
        for group in state.groups
        for name in group.names
    }


def _places(
    a: OptimizerState, b: OptimizerState, parameters: Iterable[Matched]
) -> Iterator[tuple[str, str, object, object]]:
    """Yield parameter, what is meant, and both places, of the parameters that are at another place
    on the other side: in another param group, or else in another order.

    torch loads by position and not by number or name: it refuses groups of other sizes, or gives a
    parameter the moments of another. Saves of FSDP and DeepSpeed are by name.
    """
    if not a.strategy is b.strategy is Strategy.DDP:
        return
    ours, theirs = (
        {
            name: (number, place)
            for number, group in enumerate(state.groups, 1)
            for place, name in enumerate(group.names, 1)
        }
        for state in (a, b)
    )
    both = [
        (each.name, ours[each.a], theirs[each.b])
        for each in parameters
        if each.a in ours and each.b in theirs
    ]
    if not len(both) == len(ours) == len(theirs):
        return  # a parameter that only one side lists has a difference of its own
    moved = [
        (name, _LISTED, f"number {left[0]}", f"number {right[0]}")
        for name, left, right in both
        if left[0] != right[0]
    ]
    yield from moved or (
        (name, "position in the param group", left[1], right[1])
        for name, left, right in both
        if left != right
    )


def _are_values(a: StateValue, b: StateValue) -> bool:
    """Return whether two states are single values, at least one of them not a moment of a parameter
    of one element.
    """
    shapes = [value.shape if isinstance(value, StoredTensor) else () for value in (a, b)]
    return all(prod(shape) == 1 for shape in shapes) and () in shapes


def _comparable(value: Any, files: OpenFiles) -> Any:
    """Return a value as it is compared: the number in a tensor of one element, a list as a
    tuple.
    """
    if isinstance(value, StoredTensor):
        buffer = memoryview(bytearray(1 << 16))
        if prod(value.shape) != 1 or not has_numbers(value.dtype):
            return f"sha256 {tensor_digest(value, files, buffer)[:12]}"
        data = b"".join(bytes(block) for block in value.blocks(files, buffer))
        return numbers_in(memoryview(data), value.dtype)[0].item()
    if isinstance(value, list) or type(value) is tuple:
        return tuple(_comparable(one, files) for one in value)
    if isinstance(value, dict):
        return tuple(
            sorted((str(key), repr(_comparable(one, files))) for key, one in value.items())
        )
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _are_equal(a: Any, b: Any, tolerance: Tolerance | None) -> bool:
    if type(a) is type(b) is tuple and len(a) == len(b):
        return all(_are_equal(one, other, tolerance) for one, other in zip(a, b, strict=True))
    if a == b or (a != a and b != b):  # both are NaN
        return True
    if tolerance is None or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return False
    return abs(a - b) <= tolerance[1] + tolerance[0] * abs(a)


def _is_at_begin(state: OptimizerState, values: Mapping[str, StateValue], files: OpenFiles) -> bool:
    """Return whether the states of a parameter are those that it begins with.

    FSDP and DeepSpeed save zeros for a parameter that never had a gradient, DDP nothing: a load
    gives the same.
    """
    # DeepSpeed flattens the parameters of a group into one, which has one step: 3.0 after three
    # steps, for a parameter that never had a gradient, too.
    is_flat = state.strategy not in BY_TORCH
    moments = [value for key, value in values.items() if not (is_flat and key in COUNTS)]
    begun = moments or list(values.values())
    return bool(begun) and all(_is_zero(value, files) for value in begun)


def _is_zero(value: StateValue, files: OpenFiles) -> bool:
    if not isinstance(value, StoredTensor):
        return not value
    return not any(any(block) for block in value.blocks(files, memoryview(bytearray(1 << 20))))


def _left_out(
    states: tuple[OptimizerState, OptimizerState],
    alone: Iterable[tuple[int, str]],
    begun: Sequence[str],
    unlisted: Sequence[str],
) -> Iterator[str]:
    """Yield in words what was not compared of two optimizers.

    ``alone``: number of a side, and a hyperparameter. ``begun``: parameters that have zeros on one
    side, and nothing on the other. ``unlisted``: parameters without moments that only one side has
    in its param groups.
    """
    if unlisted:
        yield (
            f"hyperparameters of {list_names(unlisted)}: no moments, and listed in the param "
            "groups of only one side"
        )
    if begun:
        yield (
            f"moments of {list_names(begun)}: one side has none, the other only zeros, as for "
            "parameters that never had a gradient"
        )
    for number, state in enumerate(states):
        where = f"{state.label} in {'AB'[number]}"
        if keys := [key for side, key in alone if side == number]:
            yield f"hyperparameters only in {where}: {list_names(keys)}"
        if unread := _unread(state):
            yield f"states of {where} that cannot be read: {list_names(unread)}"
        if state.extra:
            yield (
                f"entries of {where} other than states and param groups: {list_names(state.extra)}"
            )


def _unread(state: OptimizerState) -> list[str]:
    """Return the states of an optimizer that cannot be read, as only executing the pickle would
    show them.
    """
    return [name for name in state.unfit if not _is_read(state, name)]


def _is_read(state: OptimizerState, name: str) -> bool:
    """Return whether a value that fits no other strategy is among the states nevertheless."""
    return any(
        name.startswith(f"{parameter}.")
        and any(
            f"{parameter}.{key}" == name or f"{parameter}.{key}".startswith(f"{name}.")
            for key in states
        )
        for parameter, states in state.states.items()
    )

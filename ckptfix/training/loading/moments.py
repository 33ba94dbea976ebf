"""Moments of optimizers whose models are loaded in part: each parameter that is loaded keeps its
own.

An optimizer's file numbers parameters in the order in which the run that saved gave them to it. A
layer that is new in the middle of a model shifts all numbers behind it. Names come from
``param_names`` where the file has them, else from the order of the keys that both runs have
(``certain_pairs``), where no other order agrees with the shapes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ckptfix.checkpoint.entries import Entry
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, without_private_wrappers
from ckptfix.formats.torch_file import TorchFile
from ckptfix.training.loading.assignment import Placement
from ckptfix.training.loading.checking import SHAPED, class_problem, options_problem
from ckptfix.training.loading.targets import Fit, ModelTarget, Target
from ckptfix.wording import count_of, list_names

Shape = tuple[int, ...]


class Expected(Struct, frozen=True, kw_only=True):
    """A member that the other sequence should have. ``optional``: it may lack it. ``shape``: None
    when unknown.
    """

    shape: Shape | None
    optional: bool = False


def certain_pairs(
    saved: Sequence[Shape | None], expected: Sequence[Expected], spare: Collection[Shape]
) -> dict[int, int] | None:
    """Return expected -> saved for the pairs that every alignment has; None when there is no
    alignment.

    An alignment pairs members of one shape in the order of both sequences; an unknown shape pairs
    with any. It leaves out only what is optional, and saved members whose shape is ``spare``.
    """
    width = len(expected)
    optional = _bits(number for number, one in enumerate(expected) if one.optional)
    known: dict[Shape | None, int] = {None: (1 << width) - 1}
    alike = []
    for shape in saved:
        if shape not in known:
            known[shape] = _bits(j for j, one in enumerate(expected) if one.shape in (None, shape))
        alike.append(known[shape])
    extra = [bool(spare) if shape is None else shape in spare for shape in saved]
    before = _reachable(alike, extra, optional)
    if not before[-1] >> width & 1:
        return None
    backward = _reachable(
        [_mirrored(bits, width) for bits in reversed(alike)],
        extra[::-1],
        _mirrored(optional, width),
    )
    after = [_mirrored(bits, width + 1) for bits in reversed(backward)]
    once = twice = left_out = 0
    possible = []
    for number, bits in enumerate(alike):
        pairs = before[number] & bits & after[number + 1] >> 1
        possible.append(pairs)
        once, twice = once | pairs, twice | once & pairs
    for reached, rest in zip(before, after, strict=True):
        left_out |= reached & optional & rest >> 1
    certain = once & ~twice & ~left_out
    return {
        place: number
        for number, pairs in enumerate(possible)
        for place in _members(pairs & certain)
    }


def _reachable(alike: Sequence[int], extra: Sequence[bool], optional: int) -> list[int]:
    """Return, for each number of saved members, the bit set of how many expected ones can be done
    with by then.

    Sets of numbers are bits of one int: 10,000 parameters on either side take a second, not
    minutes.
    """
    reached = [_past_optional(1, optional)]
    for bits, is_extra in zip(alike, extra, strict=True):
        now = reached[-1]
        reached.append(_past_optional((now & bits) << 1 | (now if is_extra else 0), optional))
    return reached


def _past_optional(reached: int, optional: int) -> int:
    """Add what is reached by leaving out optional members: the carry of an addition runs through a
    run of ones.
    """
    return reached | (optional + (reached & optional)) ^ optional


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _mirrored(bits: int, width: int) -> int:
    return int(f"{bits:0{width}b}"[::-1], 2) if width else 0


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of keys other than parameters; the file itself does not say."""

Number = tuple[int, int]
"""Group and position in the group of a parameter; or model and position in the model of a key."""


class CarriedMoments(Struct, frozen=True, kw_only=True):
    """A state for an optimizer's ``load_state_dict``, with the moments that belong to loaded
    parameters.

    ``count``: how many parameters get moments. ``fresh``: parameters whose moments start empty.
    ``unused``: saved parameters whose moments nobody gets.
    """

    state: Any
    count: int
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    reason: str


class _Own(Struct, frozen=True, kw_only=True):
    """A parameter of this run. ``place``: where its key is in the order of the file; ``here``: in
    that of the model.

    ``shape``: what it has in the file, None for one that is not in the file. ``is_loaded``: its
    weights are.
    """

    name: str
    shape: Shape | None
    place: Number | None = None
    here: Number | None = None
    is_loaded: bool = False


def carry(
    state: Any, entry: Entry, target: Target, models: Placement, held: Sequence[int]
) -> CarriedMoments | str:
    """Return what an optimizer gets of a state that was saved for other parameters, or why nothing.

    ``held``: the targets of ``models`` whose parameters the optimizer has.
    """
    if reason := class_problem(state, entry, target):
        return reason
    optimizer = target.inner
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return f"{target.what} does not keep its moments by parameter, so none can be loaded"
    known = _Known(models, held)
    own = known.groups(optimizer)
    saved = state["param_groups"]
    named = _named(saved)
    if named is not None:
        pairs = _by_name(named, _named(optimizer.param_groups), own)
    elif len(saved) == len(own):
        shapes = [
            [_shape_of(state["state"].get(key)) for key in group["params"]] for group in saved
        ]
        pairs = _by_order(shapes, own, known.outside(optimizer), known)
    else:
        return (
            f"{count_of(len(saved), 'param group')} without param_names in the checkpoint, "
            f"{len(own)} in this run: moments cannot be matched to parameters"
        )
    return _carried(state, optimizer, own, pairs, named)


class _Known:
    """The keys of models and of their files, as far as they are parameters of an optimizer.

    ``unused``: place and shape of the keys that only the files have. ``is_ordered``: places are
    those of the run that saved. Only a file of torch.save keeps the order of its keys: safetensors
    sorts them, and shards are merged.
    """

    def __init__(self, models: Placement, held: Sequence[int]) -> None:
        self.is_ordered = True
        self.unused: list[tuple[Number, Shape]] = []
        self._names: dict[int, list[tuple[int, str]]] = {}
        self._keys: dict[tuple[int, str], _Own] = {}
        for number in held:
            target, entry = models.targets[number], models.entries[models.pairs[number]]
            assert isinstance(target, ModelTarget)
            for name, parameter in target.thing.named_parameters(remove_duplicate=False):
                if name in target.state:
                    self._names.setdefault(id(parameter), []).append((number, name))
            self._add(number, target, entry, models.fits[number])

    def _add(self, number: int, target: ModelTarget, entry: Entry, fit: Fit) -> None:
        is_ordered = len(entry.members) == 1 and isinstance(entry.members[0].content, TorchFile)
        self.is_ordered &= is_ordered
        here = {name: (number, place) for place, name in enumerate(target.state)}
        there = {name: (number, place) for place, name in enumerate(entry.shapes)}
        in_file = {ours: name for name, ours in fit.names.items()}
        in_file |= {one.key: one.name for one in fit.mismatched}
        for ours in target.state:
            name = in_file.get(ours)
            self._keys[number, ours] = _Own(
                name=ours,
                shape=None if name is None else entry.shapes[name],
                place=None if name is None else there[name] if is_ordered else here[ours],
                here=here[ours],
                is_loaded=name in fit.names,
            )
        for name in fit.unused:
            shape = entry.shapes[name]
            if shape is not None and name.rpartition(".")[2] not in _BUFFERS:
                self.unused.append((there[name], shape))

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[_Own]]:
        """Return the parameters of an optimizer, by group."""
        return [
            [self._own(parameter, f"parameter {place} of group {number}")
             for place, parameter in enumerate(group["params"])]
            for number, group in enumerate(optimizer.param_groups)
        ]  # fmt: skip

    def outside(self, optimizer: torch.optim.Optimizer) -> list[_Own]:
        """Return the parameters that the files have and the optimizer lacks, as frozen ones."""
        inside = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        found = (self._best(names) for key, names in self._names.items() if key not in inside)
        return [one for one in found if one.shape is not None]

    def _own(self, parameter: torch.Tensor, otherwise: str) -> _Own:
        names = self._names.get(id(parameter))
        # A parameter that is of no model is in no file of weights, but the optimizer that was saved
        # had it as well.
        return self._best(names) if names else _Own(name=otherwise, shape=tuple(parameter.shape))

    def _best(self, names: Sequence[tuple[int, str]]) -> _Own:
        """Return what a parameter has under the best of its names; tied ones have several."""
        return max(
            (self._keys[name] for name in names),
            key=lambda one: (one.is_loaded, one.shape is not None),
        )


def _named(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the names that an optimizer was given for its parameters, None when it was given
    none.
    """
    found = [list(map(str, group.get("param_names") or ())) for group in groups]
    is_complete = all(
        len(names) == len(group["params"]) for names, group in zip(found, groups, strict=True)
    )
    return found if is_complete else None


def _by_name(
    saved: list[list[str]], given: list[list[str]] | None, own: list[list[_Own]]
) -> dict[Number, Number]:
    """Return own parameter -> saved one of the same name; wrappers do not count, and a name that
    two have is none.
    """
    claims: dict[str, set[Number]] = {}
    for names in (given, [[one.name for one in group] for group in own]):
        for name, number in _numbered(names or []):
            claims.setdefault(name, set()).add(number)
    sources: dict[str, list[Number]] = {}
    for name, number in _numbered(saved):
        sources.setdefault(name, []).append(number)
    found: dict[Number, set[Number]] = {}
    for name, numbers in sources.items():
        for target in (
            claims.get(name, ()) if len(numbers) == len(claims.get(name, ())) == 1 else ()
        ):
            found.setdefault(target, set()).add(numbers[0])
    return {target: numbers.pop() for target, numbers in found.items() if len(numbers) == 1}


def _numbered(groups: list[list[str]]) -> Iterator[tuple[str, Number]]:
    bare = [[without_private_wrappers(name) for name in names] for names in groups]
    strip = KeyMap(remove=common_wrappers(name for names in bare for name in names))
    for group, names in enumerate(bare):
        for place, name in enumerate(names):
            yield strip(name), (group, place)


def _by_order(
    saved: list[list[Shape | None]], own: list[list[_Own]], outside: list[_Own], known: _Known
) -> dict[Number, Number]:
    """Return own parameter -> saved one, of those whose order leaves no doubt.

    The numbers tell what the optimizer that was saved had: all parameters in the files, or those
    that this run's optimizer has and those that only the files have. Where neither adds up, any may
    have been left out.
    """
    count = sum(map(len, saved))
    here = sum(one.shape is not None for group in own for one in group) + len(known.unused)
    attempts = (
        [([], True)] if count == here else [(outside, True)] if count == here + len(outside) else []
    )
    for others, are_all in [*attempts, (outside, False)]:
        strangers = [
            (one.place, one.shape)
            for one in others
            if one.place is not None and one.shape is not None
        ]
        found: dict[Number, Number] = {}
        for number, (shapes, group) in enumerate(zip(saved, own, strict=True)):
            pairs = _in_group(
                shapes, group, strangers, known, are_all=are_all, is_alone=len(saved) == 1
            )
            if pairs is None:
                break
            found |= {(number, place): (number, source) for place, source in pairs.items()}
        else:
            return found
    return {}


def _in_group(
    saved: list[Shape | None], group: list[_Own], outside: list[tuple[Number, Shape]],
    known: _Known, *, are_all: bool, is_alone: bool,
) -> dict[int, int] | None:  # fmt: skip
    """Return own place -> saved place within one group, None when no order agrees with the shapes.

    ``outside``: parameters that the group may have had as well. ``are_all``: none of those was left
    out.
    """
    places = [place for place, one in enumerate(group) if one.shape is not None]
    line: list[tuple[Number, int | None, Expected]] = []
    last, order = (-1, -1), []
    for place in places:
        one = group[place]
        last = one.place or last
        order += [one.here] if one.here else []
        line.append((last, place, Expected(shape=one.shape, optional=not are_all)))
    spare = {shape for _, shape in known.unused}
    # As model.parameters() gives them: so were those of the run that saved.
    if order == sorted(order):
        strangers = outside + (known.unused if known.is_ordered else [])
        is_optional = not (are_all and is_alone)
        line += [
            (place, None, Expected(shape=shape, optional=is_optional)) for place, shape in strangers
        ]
        line.sort(key=lambda item: item[0])
        spare = set() if known.is_ordered else spare
    else:
        spare |= {shape for _, shape in outside}
    pairs = certain_pairs(saved, [expected for _, _, expected in line], spare)
    if pairs is None:
        return None
    found = {}
    for number, source in pairs.items():
        own = line[number][1]
        if own is not None and group[own].is_loaded:
            found[own] = source
    return found


def _carried(
    state: Any, optimizer: torch.optim.Optimizer, own: list[list[_Own]],
    pairs: Mapping[Number, Number], named: list[list[str]] | None,
) -> CarriedMoments | str:  # fmt: skip
    """Return the state of those pairs, in the numbers of this run."""
    saved, moments = state["param_groups"], state["state"]
    keys = {
        (g, place): key
        for g, group in enumerate(saved)
        for place, key in enumerate(group["params"])
    }
    known = set(keys.values())
    found: dict[Any, Any] = {key: value for key, value in moments.items() if key not in known}
    groups: list[dict[str, Any]] = []
    fresh: list[str] = []
    unsure: list[str] = []
    taken = set()
    total = 0
    for g, group in enumerate(optimizer.param_groups):
        sources = set()
        for place, parameter in enumerate(group["params"]):
            one, source = own[g][place], pairs.get((g, place))
            value = moments.get(keys[source]) if source is not None else None
            if one.is_loaded and source is not None:
                sources.add(source[0])
                if value and _shape_of(value) in (None, tuple(parameter.shape)):
                    found[total + place] = value
                    taken.add(source)
                elif value:
                    unsure.append(one.name)
            else:
                (unsure if one.is_loaded else fresh).append(one.name)
            if total + place not in found and isinstance(optimizer, torch.optim.Adagrad):
                # It makes its state when it is made.
                found[total + place] = dict(optimizer.state[parameter])
        theirs = g if len(saved) == len(own) else sources.pop() if len(sources) == 1 else None
        if theirs is not None and (reason := options_problem(saved[theirs], optimizer)):
            return f"param group {theirs}: {reason}"
        options = dict(group if theirs is None else saved[theirs])
        options["params"] = list(range(total, total + len(group["params"])))
        options.pop("param_names", None)
        if "param_names" in group:
            options["param_names"] = group["param_names"]
        groups.append(options)
        total += len(group["params"])
    unused = tuple(
        named[number[0]][number[1]] if named else f"parameter {number[1]} of group {number[0]}"
        for number, key in keys.items()
        if moments.get(key) and number not in taken
    )
    if not any(map(moments.get, known)):
        fresh, unsure = [], []
    how = "matched by name" if named else "matched by the order of the parameters"
    words = [f"moments of {len(taken)} of {count_of(total, 'parameter')} loaded, {how}"]
    if fresh:
        words.append(f"start empty because their weights are not loaded: {list_names(fresh)}")
    if unsure:
        words.append(
            "start empty because their moments cannot be identified with certainty: "
            f"{list_names(unsure)}"
        )
    if unused:
        words.append(f"moments of {count_of(len(unused), 'saved parameter')} unused")
    return CarriedMoments(
        state={"state": found, "param_groups": groups},
        count=len(taken),
        fresh=(*fresh, *unsure),
        unused=unused,
        reason="; ".join(words),
    )


def _shape_of(moments: Any) -> Shape | None:
    """Return the shape of the parameter that has these moments, None when they do not tell."""
    for name, value in moments.items() if isinstance(moments, Mapping) else ():
        if name in SHAPED and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None

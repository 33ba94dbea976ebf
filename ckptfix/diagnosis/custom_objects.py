"""Custom objects that a script registered for checkpointing, next to those of other checkpoints.

accelerate numbers them in the order of the script and writes whatever their ``state_dict`` returns.
So only the checkpoints next to this one show how many there are, and what an object holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.neighbours import (
    are_on_both_sides,
    next_to_it,
    parts_of,
    scanned,
)
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.compared_entries import is_float
from ckptfix.diagnosis.findings.misplaced import ChangedEntry, MisplacedEntry
from ckptfix.diagnosis.saved_optimizers import Shape
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import (
    Kind,
    PickleTree,
    Text,
    Visits,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import PickledStorage, is_tensor, read_tensor, storages
from ckptfix.wording import count_of, list_names


def surplus_objects(case: Case) -> Iterator[MisplacedEntry]:
    """Yield the custom objects that no checkpoint next to this one has: ``load_state`` refuses a
    file too many.

    A script that registers one more has it in all later checkpoints, so that at an end of the run
    it is a note. So it is where they have none: the script may have registered objects in this save
    alone.
    """
    components = case.folder.components
    own = {one.name.index: one.path for one in components if one.role is Role.CUSTOM}
    if not own or case.is_recorded:
        return
    before, after = case.neighbours.saves()
    near = [*before, *after]
    known = {index for sibling in near for role, index in sibling.parts if role is Role.CUSTOM}
    surplus = sorted(own.keys() - known)
    if surplus:
        # Somebody may have renamed theirs.
        every = parts_of(one.path for one in components)
        parts = [part for sibling in near for part in sibling.parts_as_saved(every)]
        known = {index for role, index in parts if role is Role.CUSTOM}
        surplus = sorted(own.keys() - known)
    if near and surplus and known <= own.keys():
        yield (MisplacedEntry if before and after and known else ChangedEntry)(
            path=own[surplus[0]],
            holds="a custom object" if len(own) == 1 else f"one of {len(own)} custom objects",
            expected=f"{len(known) or 'none'}, as in {next_to_it(len(near))}",
            effect="load_state counts these files and fails",
            remedy="move the file out of the folder if the save did not write it",
        )


_Keys = tuple[str, ...]
"""Keys of nested dicts that lead to a list."""

_MOST_KEYS = 8
"""A list deeper than this is not compared."""

_NO_KEY = Text("", 0, 0)


class _ListedTensor(NamedTuple):
    """A tensor in a list, which has a position in place of a key."""

    dtype: str
    shape: Shape


class _Structure(NamedTuple):
    """The keys of an object's dict, and its tensors under keys, with their shapes."""

    keys: frozenset[str]
    tensors: frozenset[tuple[str, Shape]]


class _Outline(NamedTuple):
    """A custom object without its values. ``dtypes``: of tensors under keys. ``lists``: those that
    hold only tensors, such as ``shadow_params`` of an EMA.
    """

    structure: _Structure
    dtypes: Mapping[str, str]
    lists: Mapping[_Keys, tuple[_ListedTensor, ...]]


def other_objects(case: Case) -> Iterator[MisplacedEntry]:
    """Yield the custom objects of another structure than in all checkpoints next to this one, which
    agree, and those whose tensors have other dtypes or whose lists of tensors differ.

    Of the later one of two checkpoints dtypes alone are told: no third one shows that an object has
    as many keys and tensors in each save.
    """
    own = _outlines(case.folder)
    if not own or case.is_recorded:
        return
    near: list[tuple[bool, dict[PurePosixPath, _Outline]]] = []
    for neighbour, there in scanned(case.neighbours.nearest(), Role.CUSTOM):
        near.append((neighbour.is_earlier, _outlines(there)))
        if near[-1][1] == own:
            return
    is_later_of_two = len(near) == 1 and near[0][0]
    for path, outline in own.items() if len(near) > 1 or is_later_of_two else ():
        known = [(is_earlier, outlines.get(path)) for is_earlier, outlines in near]
        of_path = [(is_earlier, there) for is_earlier, there in known if there is not None]
        if is_later_of_two:
            yield from _other_dtypes(path, outline.dtypes, of_path) if of_path else ()
        elif len(of_path) == len(near):
            yield from (*_other_structure(path, outline.structure, of_path),) or (
                *_other_dtypes(path, outline.dtypes, of_path),
                *_other_lists(path, outline.lists, of_path),
            )


def _other_structure(
    path: PurePosixPath, own: _Structure, near: Sequence[tuple[bool, _Outline]]
) -> Iterator[MisplacedEntry]:
    """Yield that an object has other keys or tensors than in all these checkpoints.

    An object may gain keys and tensors during a run, and be empty at first: the newest one that
    lost keys or tensors is a note. So only one with other keys than those on both sides have is
    another one.
    """
    known = {outline.structure for _, outline in near}
    expected = known.pop()
    is_newest = all(is_earlier for is_earlier, _ in near)
    # The tensors of a queue may differ in each save, its keys do not.
    has_lost_keys = (
        is_newest
        and own.keys < expected.keys
        and all(structure.keys == expected.keys for structure in known)
    )
    if (known and not has_lost_keys) or own == expected:
        return
    is_between = are_on_both_sides(is_earlier for is_earlier, _ in near)
    is_other = bool(own.keys and expected.keys) and own.keys.isdisjoint(expected.keys)
    is_partial = (
        is_newest
        and bool(own.tensors)
        and own.tensors < expected.tensors
        and own.keys == expected.keys
        and not _may_be_samples(shape for _, shape in expected.tensors)
    )
    if is_between or is_other or has_lost_keys or is_partial:
        yield (MisplacedEntry if is_between and is_other else ChangedEntry)(
            path=path,
            holds=f"an object with {_words(own, expected)}",
            expected=f"{_words(expected, own)}, as in {next_to_it(len(near))}",
            effect="load_state fails, or the run continues with the state of another object",
        )


def _may_be_samples(shapes: Iterable[Shape]) -> bool:
    """Return whether tensors may be a queue of any length, as all have one shape."""
    return len(set(shapes)) < 2


def _other_dtypes(
    path: PurePosixPath, own: Mapping[str, str], near: Sequence[tuple[bool, _Outline]]
) -> Iterator[ChangedEntry]:
    """Yield that tensors have another dtype than in all these checkpoints, which agree.

    A count of integers may become a mean: only what was a floating point number is compared.
    """
    expected = near[0][1].dtypes
    words = _converted(
        (dtype, wanted)
        for key, dtype in own.items()
        if is_float(wanted := expected.get(key, dtype))
        and all(outline.dtypes.get(key) == wanted for _, outline in near)
    )
    if words is not None:
        holds, former = words
        yield ChangedEntry(
            path=path,
            holds=holds,
            expected=f"{former}, as in {next_to_it(len(near))}",
            effect=_OF_TENSORS,
        )


def _converted(pairs_of_dtypes: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Return in words how many tensors have another dtype than they should, and which they should
    have; None where all have theirs.
    """
    differing = [(dtype, wanted) for dtype, wanted in pairs_of_dtypes if dtype != wanted]
    if not differing:
        return None
    dtype, wanted = differing[0]
    return f"{count_of(len(differing), 'tensor')} of {dtype}", wanted


_OF_TENSORS = "load_state fails, or the run continues with these tensors"


def _other_lists(
    path: PurePosixPath,
    own: Mapping[_Keys, tuple[_ListedTensor, ...]],
    near: Sequence[tuple[bool, _Outline]],
) -> Iterator[ChangedEntry]:
    """Yield the first list that lacks tensors, or has others, while all these checkpoints agree.

    diffusers' EMAModel loads three of four averages, or rounded ones, without an error.
    """
    is_between = are_on_both_sides(is_earlier for is_earlier, _ in near)
    is_oldest = not any(is_earlier for is_earlier, _ in near)
    for keys, tensors in own.items():
        known = {outline.lists.get(keys, ()) for _, outline in near}
        expected = known.pop()
        if known or tensors == expected:
            continue
        # A script may add parameters after its first save, and flush a list before its last one.
        may_be_shorter = is_oldest or not (tensors or is_between)
        if len(tensors) < len(expected) and may_be_shorter:
            continue
        if words := _changed(tensors, expected):
            holds, wanted = words
            name = repr(".".join(keys)) if keys else "its list"
            yield ChangedEntry(
                path=path,
                holds=f"{holds} in {name}",
                expected=f"{wanted}, as in {next_to_it(len(near))}",
                effect=_OF_TENSORS,
            )
            return


def _changed(
    own: Sequence[_ListedTensor], expected: Sequence[_ListedTensor]
) -> tuple[str, str] | None:
    """Return in words what a list holds and should hold, None where a healthy run may differ so.

    A first dimension may count samples.
    """
    if len(own) != len(expected):
        if len(own) > len(expected) or _may_be_samples(tensor.shape for tensor in expected):
            return None
        return count_of(len(own), "tensor"), f"{len(expected)}"
    for position, (tensor, wanted) in enumerate(zip(own, expected, strict=True)):
        have, shape = tensor.shape, wanted.shape
        if (len(have), have[1:]) != (len(shape), shape[1:]):
            return f"a tensor of shape {list(have)} at position {position}", f"{list(shape)}"
    return _converted(
        (tensor.dtype, wanted.dtype) for tensor, wanted in zip(own, expected, strict=True)
    )


def _outlines(folder: CheckpointFolder) -> dict[PurePosixPath, _Outline]:
    outlines = {}
    for one in folder.components:
        if one.role is Role.CUSTOM and isinstance(one.content, TorchFile):
            # Another finding is about a dict that no pickler writes.
            with suppress(FormatError):
                tensors = frozenset((tensor.fqn, tensor.shape) for tensor in one.tensors)
                tree = one.content.tree
                structure = _Structure(text_keys(tree.root), tensors)
                dtypes = {tensor.fqn: tensor.dtype for tensor in one.tensors}
                outlines[one.path] = _Outline(structure, dtypes, _lists_of_tensors(tree))
    return outlines


def _lists_of_tensors(tree: PickleTree) -> dict[_Keys, tuple[_ListedTensor, ...]]:
    """Return the lists and tuples that hold only tensors of plain dtypes, in nested dicts.

    A deque is left out: it holds the last samples. Raises FormatError as ``pairs``.
    """
    known = storages(tree)
    lists: dict[_Keys, tuple[_ListedTensor, ...]] = {}
    # A hostile pickle refers to one dict, list or tuple a million times.
    visits, tuples = Visits(), set[int]()
    waiting: list[tuple[_Keys, Any]] = [((), tree.root)]
    while waiting:
        keys, value = waiting.pop()
        if type(value) is tuple:
            is_first = id(value) not in tuples
            tuples.add(id(value))
        else:
            is_first = visits.first(value)
        if not is_first:
            continue
        if is_dict_like(value):
            members = [(key.value, member) for key, member in pairs(value) if type(key) is Text]
            is_deepest = len(keys) == _MOST_KEYS
            waiting += () if is_deepest else [((*keys, key), member) for key, member in members]
        elif type(value) is tuple or value.kind is Kind.LIST:
            tensors = _tensors_in(items_of(value), known)
            if tensors is not None:
                lists[keys] = tensors
    return lists


def _tensors_in(
    items: Sequence[Any], known: Mapping[str, PickledStorage]
) -> tuple[_ListedTensor, ...] | None:
    """Return the tensors of a list, None where it holds anything else or a broken tensor."""
    with suppress(FormatError):
        tensors = [read_tensor(_NO_KEY, one, known) if is_tensor(one) else None for one in items]
        plain = tuple(_ListedTensor(one.dtype, one.shape) for one in tensors if one is not None)
        return plain if len(plain) == len(tensors) else None
    return None


def _words(own: _Structure, expected: _Structure) -> str:
    """Return in words how an object differs from another one."""
    if own.keys == expected.keys:
        count = count_of(len(own.tensors), "tensor")
        if own.tensors <= expected.tensors or own.tensors >= expected.tensors:
            return count
        return f"{count}, {len(own.tensors - expected.tensors)} of them different"
    return (
        list_names(sorted(own.keys - expected.keys))
        or f"no {list_names(sorted(expected.keys - own.keys))}"
    )

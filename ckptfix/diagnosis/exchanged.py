"""Models and optimizers that differ from those of the same number in the checkpoints next to one.

Accelerate numbers what a script prepares, in the order of the script. So nothing in a folder shows
which model or optimizer belongs under a number, and the checkpoints next to it do.

Each file is compared with the nearest checkpoint by its size, and by the bytes of its header or the
sizes of its zip records. These are equal in all saves of a run (measured with accelerate 1.15,
safetensors 0.8 and torch 2.13), and the headers of up to four checkpoints are read only where they
differ.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import common_wrappers, leading_wrappers
from ckptfix.checkpoint.manifest import is_repaired
from ckptfix.checkpoint.neighbours import Neighbours, are_on_both_sides, next_to_it
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.misplaced import (
    ChangedEntry,
    LowerPrecision,
    MisplacedEntry,
    RoundedEntry,
    UndecidedEntry,
)
from ckptfix.diagnosis.optimizer_kinds import MOMENTS, OF_SCHEDULERS
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare, saved_optimizers
from ckptfix.errors import CkptfixError
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip, ZipRecord, read_end, read_entries
from ckptfix.storage.files import AnyPath, stat_of, store_of
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of, list_names

_ROLES = (Role.MODEL, Role.OPTIMIZER)

_BY_LOAD_STATE = {
    Role.MODEL: "load_state fails",
    Role.OPTIMIZER: "load_state or the next optimizer step fails",
}
_BY_TRAINER = {
    Role.MODEL: "the Trainer fails, or starts with new weights for the keys that it does not find",
    Role.OPTIMIZER: "the resume or the next optimizer step fails",
}
"""Effects of another entry on a resume. The Trainer only warns about other keys (transformers
5.23).
"""


class _Outline(NamedTuple):
    """A model or an optimizer by its headers: what all saves of a run have in common.

    ``shapes``: of a model by its keys, without wrappers that all of them begin with; of an optimizer
    by parameter and state. ``groups``: the sizes of its param groups, none of a model. ``options``:
    of these groups. ``dtypes``: of the weights, or the moments, which a load converts without a
    word. ``wrappers``: those that all keys begin with.
    """

    path: PurePosixPath
    shapes: Mapping[tuple[str, ...], Shape]
    groups: tuple[int, ...]
    options: frozenset[str]
    dtypes: Mapping[tuple[str, ...], str]
    wrappers: tuple[str, ...]

    def is_alike(self, other: "_Outline") -> bool:
        """Return whether two can be of one model or optimizer.

        An optimizer has states of a parameter from its first step on: a parameter that one of them
        has not trained yet decides nothing. LBFGS has other states after each step.
        """
        if not self.groups:
            return self.shapes == other.shapes
        if self.is_of_other_class(other):
            return False
        trained = {name for name, _ in self.shapes} & {name for name, _ in other.shapes}
        have, expected = (
            {
                (name, state): shape
                for (name, state), shape in outline.shapes.items()
                if name in trained and state in MOMENTS
            }
            for outline in (self, other)
        )
        return self.groups == other.groups and have == expected

    def is_of_other_class(self, other: "_Outline") -> bool:
        """Return whether each of two optimizers has options that the other one lacks. A newer torch
        only adds some.
        """
        return bool(self.options - other.options and other.options - self.options)

    def shows(self, other: "_Outline") -> bool:
        """Return whether this one shows what another one should be: an optimizer before its first
        step shows no moments.
        """
        has_moments = any(key[-1] in MOMENTS for key in self.shapes)
        return not self.groups or has_moments or self.is_of_other_class(other)

    def is_foreign(self, expected: "_Outline") -> bool:
        """Return whether a model is another one than the expected, and not a later form of it: that
        has most of its shapes, under whatever keys.
        """
        shapes, wanted = Counter(self.shapes.values()), Counter(expected.shapes.values())
        return 2 * (shapes & wanted).total() < wanted.total()

    def difference(self, expected: "_Outline") -> tuple[str, str]:
        """Return in words what this one has, and what the one of its number has elsewhere."""
        if not self.groups:
            strange = len(self.shapes.items() - expected.shapes.items())
            words = f", {strange} of them with different keys or shapes" if strange else ""
            tensors = [count_of(len(outline.shapes), "tensor") for outline in (self, expected)]
            return f"{tensors[0]}{words}", tensors[1]
        if self.groups != expected.groups:
            return _groups(self), _groups(expected)
        if self.is_of_other_class(expected):
            lacking = list_names(sorted(expected.options - self.options))
            return f"param groups without {lacking}", "param groups with them"
        strange = len({key[0] for key, _ in self.shapes.items() ^ expected.shapes.items()})
        return (
            f"different moments for {count_of(strange, 'parameter')}",
            "the moments of its parameters",
        )


class _Neighbour(NamedTuple):
    """A checkpoint with the same files as this one. ``is_repaired``: a repair changed it, and may
    have removed wrappers.
    """

    folder: CheckpointFolder
    is_earlier: bool
    is_of_same_run: bool
    is_repaired: bool


_Near = list[tuple[_Neighbour, list[_Outline]]]


def diagnose_exchanged(case: Case, damaged: frozenset[PurePosixPath]) -> Iterator[MisplacedEntry]:
    """Yield the models and optimizers that the checkpoints next to this one have under other
    numbers, or not at all.

    ``damaged``: files with an error. A checkpoint with a damaged file shows nothing about an intact
    one. An adapter of the Trainer is not compared: a script may train several in turn.
    """
    if case.is_file:
        return
    folder = case.folder
    is_of_trainer = folder.has_file(TRAINER_STATE) and not folder.is_save_state
    lists = [components for role in _ROLES for components in folder.entries(role)]
    if is_of_trainer and lists:
        if any(str(component.path).startswith("adapter_model.") for component in folder.components):
            return
        lists += [
            (component,)
            for component in folder.components
            if component.role is Role.OPTIMIZER and component.name.is_of_trainer
        ]
    lists = [
        components
        for components in lists
        if (len(components) > 1 or folder.is_save_state or is_of_trainer)
        and damaged.isdisjoint(component.path for component in components)
    ]
    files = {component.path: component for components in lists for component in components}
    near = _neighbours(case.neighbours, files) if lists else []
    effects = _BY_TRAINER if is_of_trainer else _BY_LOAD_STATE
    # A guarded load adds and removes wrappers, and so does a repair.
    has_own_wrappers = not (
        case.is_recorded
        or is_repaired(folder.root)
        or any(neighbour.is_repaired for neighbour in near)
    )
    compared = []
    for components in lists:
        paths = [component.path for component in components]
        own = _outlines(folder, paths)
        there = [(neighbour, _outlines(neighbour.folder, paths)) for neighbour in near]
        known = [(neighbour, outlines) for neighbour, outlines in there if outlines]
        if own and known:
            compared.append((components[0].role, own, known))
    optimizers = [
        entry.is_alike(expected)
        for role, own, known in compared
        if role is Role.OPTIMIZER
        for entry, expected in zip(own, known[0][1], strict=True)
    ]
    # No script exchanges its model, and goes on with the optimizer.
    is_of_another = bool(optimizers) and all(optimizers)
    for role, own, known in compared:
        effect = effects[role]
        for number, entry in enumerate(own):
            yield from _misplaced(
                number,
                own,
                known,
                effect,
                has_own_wrappers=has_own_wrappers,
                is_of_another=is_of_another,
            )
            yield from _rounded(number, entry, known)


def _neighbours(
    neighbours: Neighbours, files: Mapping[PurePosixPath, Component]
) -> list[_Neighbour]:
    """Return the nearest checkpoints with just these files, none where one has all of them in the
    same outline.
    """
    near = []
    roles = {component.role for component in files.values()}
    for neighbour in neighbours.nearest():
        names = {
            PurePosixPath(file) for (role, _), file in neighbour.parts.items() if role in roles
        }
        if names != files.keys():
            continue
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            if all(_has_outline(root / path, component) for path, component in files.items()):
                return []
            there = neighbour.scan(*roles, root=root)
            order = neighbour.is_earlier, neighbour.is_of_same_run
            near.append(_Neighbour(there, *order, is_repaired(root)))
    return near


def _has_outline(path: AnyPath, component: Component) -> bool:
    """Return whether a file has the size of a component, and its header, or records of the same
    sizes.

    The pickle of an optimizer has its learning rates, and a model's is the same in every save. In a
    store the size decides: a header costs as many requests as a whole check of a small folder.
    Raises CkptfixError, OSError.
    """
    content = component.content
    if stat_of(path).st_size != component.size:
        return False
    if store_of(path.parent) is not None:
        return True
    if isinstance(content, SafetensorsFile):
        with open_reader(path) as reader:
            return reader.read(8, len(content.raw)) == content.raw
    if not isinstance(content, TorchFile) or not isinstance(content.container, TorchZip):
        return True
    with open_reader(path) as reader:
        end = read_end(reader)
        directory = reader.read(end.directory_offset, end.directory_size)
    records = list(read_entries(directory, end.entries))
    own = content.container
    if component.role is Role.MODEL and own.pickle.crc not in (record.crc for record in records):
        return False
    return _record_sizes(records) == _record_sizes(own.records)


def _record_sizes(records: Sequence[ZipRecord]) -> list[tuple[str, int]]:
    return [(record.name, record.size) for record in records]


def _outlines(folder: CheckpointFolder, paths: Collection[PurePosixPath]) -> list[_Outline]:
    """Return the models or optimizers in these files, none where one cannot be read."""
    saved = {optimizer.path: optimizer for optimizer in saved_optimizers(folder, ())}
    outlines = []
    for component in folder.components:
        if component.path not in paths:
            continue
        if component.problem is not None:
            return []
        if component.role is not Role.OPTIMIZER:
            outlines.append(_outline_of_model(component))
        elif component.path in saved:
            outlines.append(_outline_of_optimizer(saved[component.path]))
    return outlines if len(outlines) == len(paths) else []


def _outline_of_model(component: Component) -> _Outline:
    fqns = [tensor.fqn for tensor in component.tensors]
    wrappers = common_wrappers(fqns)
    # Where only some keys have a wrapper, it is a difference.
    is_partly_wrapped = not wrappers and any(map(leading_wrappers, fqns))
    key = str if is_partly_wrapped or len(set(map(bare, fqns))) < len(fqns) else bare
    tensors = {(key(tensor.fqn),): tensor for tensor in component.tensors}
    return _Outline(
        component.path,
        {fqn: tensor.shape for fqn, tensor in tensors.items()},
        (),
        frozenset(),
        {fqn: tensor.dtype for fqn, tensor in tensors.items()},
        wrappers,
    )


def _outline_of_optimizer(saved: SavedOptimizer) -> _Outline:
    return _Outline(
        saved.path,
        {
            (name, state): shape
            for name, states in saved.states.items()
            for state, shape in states.items()
            if shape is not None
        },
        tuple(len(group) for group in saved.groups),
        saved.options - OF_SCHEDULERS,
        {
            (name, state): tensor.dtype
            for name, tensors in saved.tensors.items()
            for state, tensor in tensors.items()
            if state in MOMENTS
        },
        (),
    )


def _misplaced(
    number: int,
    own: Sequence[_Outline],
    near: _Near,
    effect: str,
    *,
    has_own_wrappers: bool,
    is_of_another: bool,
) -> Iterator[MisplacedEntry]:
    """Yield a finding about an entry that differs from those of its number in all of these
    checkpoints, which agree.

    Between two checkpoints it is wrong. At an end of the run the script may have changed, and of
    two checkpoints either may be the changed one: that is told of the later one alone.
    ``is_of_another``: a model with few shapes of the expected one cannot be that of its optimizer.
    """
    entry = own[number]
    if not all(near[0][1][number].is_alike(there[number]) for _, there in near):
        return
    near = [pair for pair in near if pair[1][number].shows(entry)] or near
    expected = near[0][1][number]
    known_by = next_to_it(len(near))
    is_between = are_on_both_sides(neighbour.is_earlier for neighbour, _ in near)
    if entry.is_alike(expected):
        has_other_wrappers = all(
            there[number].wrappers == expected.wrappers != entry.wrappers for _, there in near
        )
        # load_state of accelerate takes no other wrappers.
        if len(near) > 1 and has_own_wrappers and has_other_wrappers:
            yield (MisplacedEntry if is_between else ChangedEntry)(
                path=entry.path,
                holds=f"keys that begin with {_wrappers(entry)}",
                expected=f"{_wrappers(expected)}, as in {known_by}",
                effect=effect,
                remedy="" if expected.wrappers else "ckptfix repair DIR --keys bare",
            )
        return
    places = [
        place for place in range(len(own)) if all(entry.is_alike(there[place]) for _, there in near)
    ]
    exchanged = [place for place in places if own[place].is_alike(expected)]
    if exchanged and exchanged[0] < number:
        # It was reported with the other file.
        return
    holds, wanted = entry.difference(expected)
    if places:
        partner = str(own[(exchanged or places)[0]].path)
        what = "parameters" if entry.groups else "keys and shapes"
        holds, wanted = f"the {what} of {partner}", "its own"
    nearest = near[0][0]
    # No script empties a model and goes on to train it.
    is_emptied = not (entry.groups or entry.shapes)
    is_foreign = is_of_another and not entry.groups and entry.is_foreign(expected)
    if len(near) > 1 or is_emptied:
        is_wrong = is_between or places or is_emptied or is_foreign
        yield (MisplacedEntry if is_wrong else ChangedEntry)(
            path=entry.path,
            holds=holds,
            expected=f"{wanted}, as in {known_by}",
            effect=effect,
            exchanged_with=partner if exchanged else "",
        )
    elif nearest.is_earlier and (expected.groups or expected.shapes):
        yield UndecidedEntry.of(entry.path, holds, wanted, nearest.folder.root.name)


def _wrappers(outline: _Outline) -> str:
    return repr(".".join((*outline.wrappers, ""))) if outline.wrappers else "no wrapper"


def _groups(outline: _Outline) -> str:
    sizes = outline.groups
    each = f" ({', '.join(map(str, sizes[:8]))}{', ...' if len(sizes) > 8 else ''})"
    return (
        f"{count_of(len(sizes), 'param group')} with {count_of(sum(sizes), 'parameter')}"
        f"{each if len(sizes) > 1 else ''}"
    )


def _rounded(number: int, entry: _Outline, near: _Near) -> Iterator[MisplacedEntry]:
    """Yield a finding about a model or optimizer with tensors of a lower precision than in all of
    these checkpoints.

    No run lowers its precision for one save. At an end of the run the script may have changed it.
    """
    is_single, nearest = len(near) == 1, near[0][0]
    if is_single and not nearest.is_of_same_run:
        return
    is_newest = all(neighbour.is_earlier for neighbour, _ in near)
    expected, *others = (there[number].dtypes for _, there in near)
    lower = Counter(
        (dtype, expected[key])
        for key, dtype in entry.dtypes.items()
        if _is_rounded(dtype, expected.get(key, ""))
        and all(dtypes.get(key) == expected[key] for dtypes in others)
        # Of two checkpoints in F16 and BF16 the later one is told.
        and not (is_single and not is_newest and _is_rounded(expected[key], dtype))
    )
    if not lower:
        return
    (dtype, wanted), _ = lower.most_common(1)[0]
    holds = f"{count_of(lower.total(), 'tensor')} in {dtype}"
    if is_single and is_newest:
        yield UndecidedEntry.of(entry.path, holds, wanted, nearest.folder.root.name)
        return
    is_between = are_on_both_sides(neighbour.is_earlier for neighbour, _ in near)
    yield (RoundedEntry if is_between else LowerPrecision)(
        path=entry.path,
        holds=holds,
        expected=f"{wanted}, as in {next_to_it(len(near))}",
        effect="the load succeeds, with rounded values",
    )


def _is_rounded(dtype: str, expected: str) -> bool:
    """Return whether a conversion of a floating point type loses digits: also between F16 and BF16,
    and to integers.
    """
    if dtype == expected or not {dtype, expected} <= DTYPE_BITS.keys() or not _is_float(expected):
        return False
    return not _is_float(dtype) or DTYPE_BITS[dtype] <= DTYPE_BITS[expected]


def _is_float(dtype: str) -> bool:
    """Return whether a dtype is one of floating point numbers."""
    return dtype.startswith(("F", "BF"))

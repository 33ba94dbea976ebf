"""Models and optimizers under the file name of another one, or of another run.

Accelerate numbers what a script prepares, in the order of the script. So nothing in a folder shows
which model or optimizer belongs under a number, and the checkpoints next to it do. Neither does a
folder with one model show whether the model is that of the run: every key may have another name.

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
from ckptfix.checkpoint.keys import common_wrappers, inner_wrappers
from ckptfix.checkpoint.manifest import is_repaired
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, read_config, versions_of
from ckptfix.checkpoint.neighbours import Neighbours, are_on_both_sides, next_to_it
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.compared_entries import ComparedEntry, is_float, sizes_of_groups
from ckptfix.diagnosis.findings.misplaced import (
    BrokenKeys,
    ChangedEntry,
    DeeperModel,
    LowerPrecision,
    MisplacedEntry,
    RoundedEntry,
    UndecidedEntry,
)
from ckptfix.diagnosis.optimizer_kinds import MOMENTS
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, bare, saved_optimizers
from ckptfix.errors import CkptfixError
from ckptfix.formats.pickle_tree import Node, Text, child, items_of, pairs
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip, ZipRecord, read_end, read_entries
from ckptfix.storage.files import AnyPath, stat_of, store_of
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of

_ROLES = (Role.MODEL, Role.OPTIMIZER)

_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of PEFT, which the Trainer saves in place of the model."""


class _Neighbour(NamedTuple):
    """A checkpoint with the same files as this one. ``is_in_order``: its optimizers fit the models
    of their numbers.

    ``is_earlier``, ``is_of_same_run``: as of ``Neighbour``. ``versions``: of the libraries that saved
    it, by its configs. ``arguments``: the bytes of the Trainer's arguments.
    """

    folder: CheckpointFolder
    is_earlier: bool
    is_of_same_run: bool
    is_in_order: bool
    is_repaired: bool
    versions: tuple[tuple[str, str], ...]
    arguments: bytes

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.root.name


def diagnose_exchanged(
    case: Case, damaged: frozenset[PurePosixPath], *, is_contradicted: bool = False
) -> Iterator[MisplacedEntry]:
    """Yield the models and optimizers that the checkpoints next to this one have under other names,
    or not at all.

    ``damaged``: files with an error. ``is_contradicted``: a scheduler has learning rates of other
    param groups. A checkpoint with a damaged file, or whose optimizers contradict its models, shows
    nothing about an intact one.
    """
    if case.is_file:
        return
    folder = case.folder
    is_of_trainer = folder.has_file(TRAINER_STATE) and not folder.is_save_state
    every = [components for role in _ROLES for components in folder.entries(role)]
    # An optimizer of an adapter belongs to it, and a script may exchange both for a while.
    adapters = [(one,) for one in folder.components if str(one.path) in _ADAPTERS and is_of_trainer]
    if any(one.path in damaged for (one,) in adapters):
        return
    every += adapters
    if is_of_trainer and every:
        every += [
            (one,)
            for one in folder.components
            if one.role is Role.OPTIMIZER and one.name.is_of_trainer
        ]
    lists = [
        components
        for components in every
        if (len(components) > 1 or folder.is_save_state or is_of_trainer)
        and damaged.isdisjoint(component.path for component in components)
    ]
    files = {component.path: component for components in lists for component in components}
    near = _neighbours(case.neighbours, files, is_of_trainer=is_of_trainer) if lists else []
    is_in_order = not near or _is_in_order(folder)
    near = [neighbour for neighbour in near if neighbour.is_in_order or not is_in_order]
    if not near:
        return
    is_contradicted = is_contradicted or (not is_in_order and near[0].is_in_order)
    compared: list[_Compared] = []
    for components in lists:
        paths = [component.path for component in components]
        own = _entries(folder, paths)
        known = [
            (neighbour, entries)
            for neighbour in near
            if (entries := _entries(neighbour.folder, paths))
        ]
        if own and known:
            role = components[0].role
            compared.append((role if role in _ROLES else Role.MODEL, own, known))
    change = _Change(
        is_excluded=is_contradicted,
        has_same_optimizers=_are_alike(Role.OPTIMIZER, compared),
        has_same_models=_are_alike(Role.MODEL, compared),
        is_renamed_by_repair=is_repaired(folder.root)
        or any(neighbour.is_repaired for neighbour in near),
        is_recorded=case.is_recorded,
        is_of_another_run=not near[0].is_of_same_run,
        is_of_other_version=_versions(folder.root) != near[0].versions,
        has_same_arguments=is_of_trainer
        and {_arguments(folder.root)} == {neighbour.arguments for neighbour in near} != {b""},
    )
    if adapters and not (change.has_same_models or change.has_same_optimizers):
        return
    for role, own, known in compared:
        yield from _misplaced(
            role, own, known, change, (_BY_TRAINER if is_of_trainer else _BY_LOAD_STATE)[role]
        )
        yield from _rounded(own, known)


_Compared = tuple[Role, list[ComparedEntry], list[tuple[_Neighbour, list[ComparedEntry]]]]
"""A role, the own entries, and each checkpoint next to it with its entries."""


class _Change(NamedTuple):
    """Evidence on a change of the script that could explain a difference.

    ``is_excluded``: the folder contradicts itself, which no script does. ``has_same_optimizers``,
    ``has_same_models``: as the nearest checkpoint, so that the script did not change both.
    ``is_renamed_by_repair``: a repair may have renamed the keys. ``is_recorded``: a guarded save
    recorded its files, and a guarded load adds and removes wrappers. ``is_of_another_run``: the
    checkpoints next to it may be of other runs, as ``run_1`` and ``run_2``.
    ``is_of_other_version``: another version of a library saved the nearest one.
    ``has_same_arguments``: the Trainer saved all of them with the same arguments, one of which is
    the class of the optimizer.
    """

    is_excluded: bool
    has_same_optimizers: bool
    has_same_models: bool
    is_renamed_by_repair: bool
    is_recorded: bool
    is_of_another_run: bool
    is_of_other_version: bool
    has_same_arguments: bool

    def is_alone(self, role: Role) -> bool:
        """Return whether entries of this role alone differ: no script changes its models or its
        optimizers alone.
        """
        if self.is_of_another_run:
            return False
        return self.has_same_optimizers if role is Role.MODEL else self.has_same_models


def _are_alike(role: Role, compared: Sequence[_Compared]) -> bool:
    """Return whether the entries of a role are those of the nearest checkpoint. There must be an
    optimizer.
    """
    pairs = [
        (entry, expected)
        for role_here, own, known in compared
        if role_here is role
        for entry, expected in zip(own, known[0][1], strict=True)
    ]
    return all(entry.is_alike(expected) for entry, expected in pairs) and (
        role is Role.MODEL or any(role_here is role for role_here, _, _ in compared)
    )


def _neighbours(
    neighbours: Neighbours, files: Mapping[PurePosixPath, Component], *, is_of_trainer: bool
) -> list[_Neighbour]:
    """Return the nearest checkpoints with just these files, none where one has all of them in the
    same outline.
    """
    near = []
    roles = {component.role for component in files.values()}
    adapters = {path for path in files if str(path) in _ADAPTERS}
    for neighbour in neighbours.nearest():
        names = {
            PurePosixPath(file) for (role, _), file in neighbour.parts.items() if role in roles
        }
        names |= {path for path in adapters if str(path) in neighbour.names.every}
        if names != files.keys():
            continue
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            if all(_has_outline(root / path, component) for path, component in files.items()):
                return []
            there = neighbour.scan(*{*_ROLES, *roles}, root=root)
            order = neighbour.is_earlier, neighbour.is_of_same_run
            of_root = is_repaired(root), _versions(root)
            arguments = _arguments(root) if is_of_trainer else b""
            near.append(_Neighbour(there, *order, _is_in_order(there), *of_root, arguments))
    return near


def _arguments(root: AnyPath) -> bytes:
    """Return the bytes of the Trainer's arguments, b"" without any."""
    with suppress(OSError), open_reader(root / "training_args.bin") as reader:
        return reader.read(0, min(reader.size, _MOST_ARGUMENTS))
    return b""


_MOST_ARGUMENTS = 1 << 20
"""Bytes of the arguments that are compared: a save of transformers 5.23 has 5 KB of them."""


def _versions(root: AnyPath) -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that saved a checkpoint, by its configs."""
    configs = [read_config(root, name) for name in (CONFIG, ADAPTER)]
    return tuple(version for config in configs for version in versions_of(config))


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
    is_same_pickle = own.pickle.crc in (record.crc for record in records)
    if not is_same_pickle and (component.role is Role.MODEL or not _is_in_order_of_groups(content)):
        return False
    return _record_sizes(records) == _record_sizes(own.records)


def _is_in_order_of_groups(file: TorchFile) -> bool:
    """Return whether param groups count their numbers on from group to group, and states follow one
    another in this order: then the sizes of records show to which parameter each belongs.
    """
    root = file.tree.root
    if type(root) is not Node:
        return True
    members = [
        member
        for group in items_of(child(root, "param_groups"))
        for member in items_of(child(group, "params"))
    ]
    numbers = [member for member in members if type(member) is int]
    if numbers != sorted(numbers):
        return False
    places = {_key(member): place for place, member in enumerate(members)}
    states = [places.get(_key(key), -1) for key, _ in pairs(child(root, "state"))]
    return states == sorted(states)


def _key(value: object) -> object:
    return value.value if isinstance(value, Text) else value if type(value) is int else None


def _record_sizes(records: Sequence[ZipRecord]) -> list[tuple[str, int]]:
    return [(record.name, record.size) for record in records]


def _entries(folder: CheckpointFolder, paths: Collection[PurePosixPath]) -> list[ComparedEntry]:
    """Return the models or optimizers in these files, none where one cannot be read."""
    saved = {one.path: one for one in saved_optimizers(folder, ())}
    entries = [
        ComparedEntry(
            one.path,
            {tensor.fqn: tensor.shape for tensor in one.tensors},
            {bare(tensor.fqn): tensor.shape for tensor in one.tensors},
            (
                _dtypes_of_moments(saved[one.path])
                if one.role is Role.OPTIMIZER
                else {bare(tensor.fqn): tensor.dtype for tensor in one.tensors}
            ),
            saved.get(one.path),
        )
        for one in folder.components
        if one.path in paths
        and one.problem is None
        and (one.role is not Role.OPTIMIZER or one.path in saved)
    ]
    return entries if len(entries) == len(paths) else []


def _dtypes_of_moments(saved: SavedOptimizer) -> dict[str, str]:
    """Return the dtypes of moments. A load converts them to that of their parameter, without a
    word.
    """
    return {
        f"{name}.{state}": tensor.dtype
        for name, tensors in saved.tensors.items()
        for state, tensor in tensors.items()
        if state in MOMENTS
    }


def _is_in_order(folder: CheckpointFolder) -> bool:
    """Return whether the moments of each optimizer have shapes of the model of the same number.

    Others show nothing: Adafactor keeps rows and columns, LBFGS one long vector.
    """
    shapes = {
        one.name.index: Counter(tensor.shape for tensor in one.tensors)
        for one in folder.components
        if one.role is Role.MODEL
    }
    return all(
        Counter(
            shape
            for states in one.states.values()
            for shape in {shape for state, shape in states.items() if state in MOMENTS}
            - {
                None,
                (),
            }
        )
        <= shapes.get(one.index, Counter())
        for one in saved_optimizers(folder, ())
    )


def _misplaced(
    role: Role,
    own: Sequence[ComparedEntry],
    near: Sequence[tuple[_Neighbour, Sequence[ComparedEntry]]],
    change: _Change,
    effect: str,
) -> Iterator[MisplacedEntry]:
    """Yield the entries that differ from those of their number in all of these checkpoints, which
    agree.

    Of two checkpoints either may be the changed one: that is told of the later one alone.
    """
    known_by = next_to_it(len(near))
    is_between = are_on_both_sides(neighbour.is_earlier for neighbour, _ in near)
    is_newest = all(neighbour.is_earlier for neighbour, _ in near)
    for number, entry in enumerate(own):
        expected = near[0][1][number]
        # load_state of accelerate takes no other wrappers, so that a run begins and ends with the
        # same.
        is_unlike = (
            (is_between or not change.is_recorded)
            and not change.is_renamed_by_repair
            and all(there[number].keys == expected.keys for _, there in near)
            and entry.is_wrapped_unlike(expected)
        )
        is_wrapped = (
            is_unlike
            and (len(near) > 1 or entry.is_partly_wrapped(expected))
            and (is_between or change.is_alone(role))
        )
        has_other_keys = is_wrapped or (is_unlike and len(near) == 1)
        agree = all(expected.is_alike(there[number]) for _, there in near)
        if not agree or (
            not has_other_keys and any(entry.is_alike(there[number]) for _, there in near)
        ):
            continue
        places = [
            place
            for place in range(len(own))
            if not has_other_keys and all(entry.is_alike(there[place]) for _, there in near)
        ]
        exchanged = [place for place in places if own[place].is_alike(expected)]
        if exchanged and exchanged[0] < number:
            # It was reported with the other file.
            continue
        if places:
            partner = own[(exchanged or places)[0]].path
            what = "parameters" if role is Role.OPTIMIZER else "keys and shapes"
            yield MisplacedEntry(
                path=entry.path,
                holds=f"the {what} of {partner}",
                expected=f"its own, as in {known_by}",
                effect=effect,
                exchanged_with=str(partner) if exchanged else "",
            )
            continue
        is_other = change.is_alone(role) and (
            (entry.has_nothing_of(expected) or (is_newest and entry.is_of_another(expected)))
            if role is Role.MODEL
            else entry.is_shuffled(expected)
            or (change.has_same_arguments and entry.is_of_other_class(expected))
        )
        is_decided = is_wrapped or entry.is_reordered(expected)
        # No script empties a model and goes on training its parameters.
        is_emptied = role is Role.MODEL and change.has_same_optimizers and not entry.shapes
        is_new_alone = role is Role.MODEL and change.is_alone(role) and is_newest and len(near) > 1
        is_renamed = role is Role.MODEL and entry.is_renamed(expected)
        is_broken = (
            is_new_alone
            and not (change.is_renamed_by_repair or change.is_of_other_version)
            and (is_renamed or bool(entry.lost_part(expected)))
        )
        # PEFT saves embeddings by what it finds of the base at that moment, and other findings are
        # about lost matrices.
        if str(entry.path) in _ADAPTERS and (change.is_renamed_by_repair or not is_renamed):
            continue
        is_wrong = (
            is_emptied
            or is_decided
            or (len(near) > 1 and (is_between or change.is_excluded or is_other))
        )
        is_strippable = (
            is_wrapped and expected.keys == expected.shapes and _has_wrappers(entry.keys)
        )
        holds, wanted = entry.difference(expected)
        if len(near) == 1 and not (is_decided or is_emptied):
            is_wrong_there = (
                expected.is_partly_wrapped(entry)
                or expected.is_reordered(entry)
                or (role is Role.MODEL and not expected.shapes)
            )
            if is_newest and not is_wrong_there:
                yield UndecidedEntry.of(entry.path, holds, wanted, near[0][0].name)
            continue
        kind: type[MisplacedEntry] = MisplacedEntry
        facts = {}
        if is_broken:
            kind, facts = BrokenKeys, {"script": near[0][0].name}
        elif not is_wrong:
            kind = DeeperModel if is_new_alone and entry.is_deeper(expected) else ChangedEntry
        yield kind(
            path=entry.path,
            holds=holds,
            expected=f"{wanted}, as in {known_by}",
            effect=_effect(entry, expected, effect),
            remedy="ckptfix repair DIR --keys bare" if is_strippable else "",
            **facts,
        )


def _effect(entry: ComparedEntry, expected: ComparedEntry, effect: str) -> str:
    if entry.is_of_other_variant(expected):
        return _OF_VARIANT
    if entry.saved is None or expected.saved is None:
        return effect
    is_loaded = sizes_of_groups(entry.saved) == sizes_of_groups(expected.saved)
    return _OF_NUMBERS if is_loaded and entry.has_other_numbers(expected) else effect


_OF_NUMBERS = "a load gives moments to the wrong parameters, or the next optimizer step fails"
_OF_VARIANT = "the load succeeds, and the run continues with the optimizer variant of the file"
"""Effect of AMSGrad in a run without it, or the other way round: the load takes over the option."""

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


def _rounded(
    own: Sequence[ComparedEntry], near: Sequence[tuple[_Neighbour, Sequence[ComparedEntry]]]
) -> Iterator[MisplacedEntry]:
    nearest, _ = near[0]
    for number, entry in enumerate(own):
        there = [(neighbour.is_earlier, entries[number].dtypes) for neighbour, entries in near]
        yield from rounded(
            entry.path, entry.dtypes, there, nearest.name if nearest.is_of_same_run else ""
        )


def rounded(
    path: PurePosixPath,
    own: Mapping[str, str],
    near: Sequence[tuple[bool, Mapping[str, str]]],
    nearest: str,
) -> Iterator[MisplacedEntry]:
    """Yield a finding about a model or optimizer with tensors of a lower precision than in all of
    these checkpoints.

    ``own``: key -> dtype; ``near``: whether a checkpoint is an earlier one, and these of it.
    ``nearest``: the name of the first, "" where it may be of another run. No run lowers its
    precision for one save. At an end of the run the script may have changed it.
    """
    is_single = len(near) == 1
    if is_single and not nearest:
        return
    is_newest = all(is_earlier for is_earlier, _ in near)
    lower = Counter(
        (dtype, near[0][1][key])
        for key, dtype in own.items()
        if _is_rounded(dtype, near[0][1].get(key, ""))
        and len({dtypes.get(key) for _, dtypes in near}) == 1
        # Of two checkpoints in F16 and BF16 the later one is told.
        and not (is_single and not is_newest and _is_rounded(near[0][1][key], dtype))
    )
    if not lower:
        return
    (dtype, wanted), _ = lower.most_common(1)[0]
    holds = f"{count_of(lower.total(), 'tensor')} in {dtype}"
    if is_single and is_newest:
        yield UndecidedEntry.of(path, holds, wanted, nearest)
        return
    is_between = are_on_both_sides(is_earlier for is_earlier, _ in near)
    yield (RoundedEntry if is_between else LowerPrecision)(
        path=path,
        holds=holds,
        expected=f"{wanted}, as in {next_to_it(len(near))}",
        effect="the load succeeds, with rounded values",
    )


def _is_rounded(dtype: str, expected: str) -> bool:
    """Return whether a conversion of a floating point type loses digits: also between F16 and BF16,
    and to integers.
    """
    if dtype == expected or not {dtype, expected} <= DTYPE_BITS.keys() or not is_float(expected):
        return False
    return not is_float(dtype) or DTYPE_BITS[dtype] <= DTYPE_BITS[expected]


def _has_wrappers(keys: Collection[str]) -> bool:
    """Return whether a repair removes wrappers from keys: one that all begin with, or those of
    torch in the middle.
    """
    return bool(common_wrappers(keys) or inner_wrappers(keys))

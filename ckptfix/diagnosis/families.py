"""Families of files that hold one model, of which a loader takes one: safetensors or ``.bin``, one
file or shards.

A save never deletes the files of another format, so that an older model stays in the folder, and
which of the two is loaded depends on the loader. Families are compared only where one call of a
loader could take either: variants such as ``fp16`` are asked for by name, and adapters,
``consolidated.safetensors`` and FSDP's files have loaders of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import FileName, ModelName, parse_file_name
from ckptfix.checkpoint.keys import KeyMap, common_wrappers
from ckptfix.checkpoint.loading_order import (
    BIN_INDEX,
    IN_MODEL,
    SAFE_INDEX,
    ModelNames,
    first_loader,
    is_part,
    kind_of,
    loaders_of,
    loads,
    model_names,
)
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.pairing import Files
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.file_damage import Reading
from ckptfix.diagnosis.findings.base import Finding, Instead, as_kind
from ckptfix.diagnosis.findings.sharded import IndexMismatch, UndecidedIndex
from ckptfix.diagnosis.findings.stored_twice import PartialFamily, SecondFamily, StaleFamily
from ckptfix.formats.tensor import TensorInfo
from ckptfix.storage.comparing import (
    Run,
    first_difference,
    same_bytes_without_reading,
    sample_runs,
)
from ckptfix.storage.executor import THREADS
from ckptfix.storage.files import AnyPath, exists
from ckptfix.storage.reading import open_reader

_PAGES, _PAGE = 24, 4096
_MOST_TIES = 16


class _Stored(NamedTuple):
    """One tensor of a family, and its file."""

    info: TensorInfo
    path: PurePosixPath


class _Family(NamedTuple):
    """One family: its kind, the file or the index that a loader looks for, and the files of its
    tensors.
    """

    kind: str
    path: PurePosixPath
    group: ModelFiles

    @property
    def is_found(self) -> bool:
        """True where loaders find it: shards without their index are invisible to them."""
        return self.group.index_path is None or self.group.index is not None

    def tensors(self) -> dict[str, _Stored]:
        """Return its tensors by key, without the wrappers of all keys, which one save may have and
        the other not.
        """
        stored = [
            _Stored(tensor, member.path)
            for member in self.group.members
            for tensor in member.tensors
        ]
        bare = KeyMap(remove=common_wrappers(one.info.fqn for one in stored))
        return {bare(one.info.fqn): one for one in stored}


def diagnose_families(case: Case) -> Iterator[Finding | Instead]:
    """Find the models that a folder holds twice, and ask about each missing index that would change
    what a loader takes.

    Samples of the bytes are compared. With ``data`` all of them are, with ``prove`` those of shards
    without their index: it may be written only where the loaders that take it get the same weights.
    Raises OSError.
    """
    if case.is_file:
        return
    groups, damaged = case.groups, case.corrupt
    # After a repair, too: by samples alone a difference that it found before would be gone.
    prove = case.prove or case.known is not None
    models: dict[tuple[ModelName, int], list[_Family]] = {}
    for group in groups:
        name = _name(group)
        kind = kind_of(name) if name is not None else None
        if name is not None and name.model is not None and kind is not None:
            models.setdefault((name.model, name.index), []).append(_Family(kind, group.path, group))
    equals: dict[PurePosixPath, Collection[PurePosixPath]] = {}
    names = model_names(map(str, case.existing))
    # Loaders ask whether there is a file, and a broken link is none: they take the next family.
    # load_checkpoint_in_model lists the names.
    broken = {
        file.path
        for file in case.folder.components
        if file.problem is not None and file.is_linked and not exists(case.folder.root / file.path)
    }
    names_of_files = model_names(map(str, case.existing - broken))
    for (model, index), families in models.items():
        loaders = loaders_of(model, index)
        # The loader that knows most kinds decides which family the others are compared with.
        order = loaders.get(first_loader(model, index) or "", ())
        families = sorted(
            (family for family in families if family.kind in order),
            key=lambda family: order.index(family.kind),
        )
        now = loads(names, model, index)
        by_name = {str(family.path): family.path for family in families}
        taken = {**loads(names_of_files, model, index).taken}
        if IN_MODEL in now.taken:
            taken[IN_MODEL] = now.taken[IN_MODEL]
        paths = {
            loader: by_name[taken[loader]] for loader in loaders if taken.get(loader) in by_name
        }
        comparable = [family for family in families if _is_comparable(family.group, damaged)]
        equal = {family.path for family in comparable[:1]}
        for family in comparable[1:]:
            is_unlisted = not (family.is_found and comparable[0].is_found)
            reading = case.reading._replace(data=case.data or (prove and is_unlisted))
            of_pair = _compared(case.folder.root, comparable[0], family, paths, reading)
            # Of the model in the indexes, not of an adapter next to it.
            if {SAFE_INDEX, BIN_INDEX} >= {comparable[0].kind, family.kind} and not is_unlisted:
                of_pair = replace(of_pair, refused_by=" and ".join(now.refused_by))
            yield of_pair
            if isinstance(of_pair, SecondFamily) and of_pair.is_equal:
                equal.add(family.path)
        for family in families if comparable else ():
            if family.is_found and _is_damaged(family.group, damaged):
                yield SecondFamily(
                    path=family.path,
                    preferred=comparable[0].path,
                    loads=paths,
                    tensors=0,
                    is_damaged=True,
                )
        equals |= dict.fromkeys(equal, equal)
    switches = _switches(groups, names, equals)
    for finding in case.findings:
        changed = switches.get(finding.path)
        if changed and isinstance(finding, IndexMismatch) and finding.is_fixable and finding.absent:
            yield Instead(finding, as_kind(UndecidedIndex, finding, loads=changed))


def _switches(
    groups: Iterable[ModelFiles],
    names: ModelNames,
    equals: Mapping[PurePosixPath, Collection[PurePosixPath]],
) -> dict[PurePosixPath, dict[str, PurePosixPath]]:
    """Return the missing indexes with which a loader would take another complete model than now, or
    fail.

    ``equals``: file or index -> those with equal weights, between which a loader may switch.
    """
    by_name = {str(group.path): group for group in groups if group.members}
    switches: dict[PurePosixPath, dict[str, PurePosixPath]] = {}
    for group in groups:
        name = parse_file_name(group.path.name)
        if group.index_path is None or group.index is not None or group.is_left_over:
            continue
        if name is None or name.model is None:
            continue
        now = loads(names, name.model, name.index)
        after = loads(names, name.model, name.index, added=str(group.path))
        for loader, taken in now.taken.items():
            before, next_taken = by_name.get(taken), after.taken.get(loader)
            if before is None or not before.is_whole or next_taken == taken:
                continue
            is_equal = next_taken == str(group.path) and before.path in equals.get(group.path, ())
            if not is_equal:
                switches.setdefault(group.path, {})[loader] = before.path
    return switches


def _name(group: ModelFiles) -> FileName | None:
    """Return the parsed name of the file or the index that a loader looks for, None where no loader
    finds the group.
    """
    if group.is_left_over or not group.members:
        return None
    is_found = group.index_path is None or group.index is not None or group.rivals == 1
    return parse_file_name(group.path.name) if is_found else None


def _is_comparable(group: ModelFiles, damaged: Collection[PurePosixPath]) -> bool:
    """Return whether the files of a family hold one state dict, and all of their bytes.

    Nested keys and a broken index do not count: a repair fixes them, and must not be what shows a
    second family.
    """
    is_sound = group.is_whole and all(
        member.whole is not None and member.path not in damaged for member in group.members
    )
    return is_sound and any(member.tensors for member in group.members)


def _is_damaged(group: ModelFiles, damaged: Collection[PurePosixPath]) -> bool:
    """Return whether a finding names what is wrong with the files: they may be of a kind that is
    not read.
    """
    return bool(group.missing) or any(member.path in damaged for member in group.members)


def _compared(
    root: AnyPath,
    first: _Family,
    second: _Family,
    loads: Mapping[str, PurePosixPath],
    reading: Reading,
) -> StaleFamily | SecondFamily:
    """Compare two families of one model."""
    unlisted = tuple(family.path for family in (first, second) if not family.is_found)
    left, right = first.tensors(), second.tensors()
    shared = left.keys() & right.keys()
    changed = tuple(
        fqn for fqn in left if fqn in shared and left[fqn].info[1:3] != right[fqn].info[1:3]
    )
    # A save of safetensors leaves out all but one key of tied weights, and one of .bin keeps them
    # all.
    absent, own = (_untied(root, family, shared, data=reading.data) for family in (left, right))
    if changed or absent or own:
        second_family = SecondFamily(
            path=second.path,
            preferred=first.path,
            loads=loads,
            unlisted=unlisted,
            tensors=len(shared),
            own=own,
            absent=absent,
            changed=changed,
        )
        smaller = second.path if absent else first.path
        is_partial = not changed and not (own and absent) and smaller in loads.values()
        if is_partial and is_part(own or absent, left if absent else right):
            return as_kind(PartialFamily, second_family, partial=smaller)
        return second_family
    pairs = {fqn: (left[fqn], right[fqn]) for fqn in left if fqn in shared}
    runs = {fqn: run for fqn, pair in pairs.items() if (run := _run(*pair)) is not None}
    difference, sampled = _difference(root, pairs, runs, reading)
    if difference is not None:
        return StaleFamily(
            path=second.path,
            preferred=first.path,
            loads=loads,
            unlisted=unlisted,
            tensors=len(shared),
            difference=difference,
        )
    return SecondFamily(
        path=second.path,
        preferred=first.path,
        loads=loads,
        unlisted=unlisted,
        tensors=len(shared),
        uncompared=len(pairs) - len(runs),
        sampled=sampled,
    )


def _run(one: _Stored, other: _Stored) -> Run | None:
    """Return the bytes of two equal tensors, None where they are scattered: a transposed weight in
    a ``.bin`` file.
    """
    if one.info.data_offsets is None or other.info.data_offsets is None:
        return None
    begin, end = one.info.data_offsets
    other_begin, other_end = other.info.data_offsets
    return Run(begin, other_begin, end - begin) if end - begin == other_end - other_begin else None


def _difference(
    root: AnyPath,
    pairs: Mapping[str, tuple[_Stored, _Stored]],
    runs: Mapping[str, Run],
    reading: Reading,
) -> tuple[str | None, bool]:
    """Return the first key with other bytes, None for none, and whether only samples were
    compared.
    """
    by_files: dict[Files, list[str]] = {}
    for fqn in runs:
        by_files.setdefault((pairs[fqn][0].path, pairs[fqn][1].path), []).append(fqn)
    pages = max(2, _PAGES // max(1, len(by_files)))
    is_sampled = False
    for files, keys in by_files.items():
        every = tuple(runs[fqn] for fqn in keys)
        with open_reader(root / files[0]) as one, open_reader(root / files[1]) as other:
            if same_bytes_without_reading(one, other, every):
                continue
            some = sample_runs(every, pages=pages)
            for part in (some, every) if reading.data else (some,):
                found = first_difference(
                    one,
                    other,
                    part,
                    progress=None if part is some else reading.progress,
                    executor=THREADS if part is some else reading.executor,
                )
                if found is not None:
                    place = found.offset_a
                    return (
                        next(
                            fqn
                            for fqn in keys
                            if runs[fqn].offset_a <= place < runs[fqn].offset_a + runs[fqn].length
                        ),
                        False,
                    )
            is_sampled |= not reading.data and sum(run.length for run in some) < sum(
                run.length for run in every
            )
    return None, is_sampled


def _untied(
    root: AnyPath, tensors: Mapping[str, _Stored], shared: Collection[str], *, data: bool
) -> tuple[str, ...]:
    """Return the keys of a family that the other one lacks, without those of a tensor that it has
    under another key.

    A tie is one stretch of a file, or two with equal bytes, unless they begin with zeros: many
    biases do.
    """
    missing = [fqn for fqn in tensors if fqn not in shared]
    if len(missing) > _MOST_TIES:
        return tuple(missing)
    untied = []
    for fqn in missing:
        tensor = tensors[fqn]
        twins = [
            twin
            for key, twin in tensors.items()
            if key in shared and twin.info[1:3] == tensor.info[1:3]
        ]
        offsets = tensor.info.data_offsets
        if any(
            (twin.path, twin.info.data_offsets) == (tensor.path, offsets)
            for twin in twins
            if offsets
        ):
            continue
        if not any(_is_copy(root, tensor, twin, data=data) for twin in twins[:_MOST_TIES]):
            untied.append(fqn)
    return tuple(untied)


def _is_copy(root: AnyPath, tensor: _Stored, twin: _Stored, *, data: bool) -> bool:
    run = _run(tensor, twin)
    if (
        run is None
        or _difference(root, {"": (tensor, twin)}, {"": run}, Reading(data))[0] is not None
    ):
        return False
    with open_reader(root / tensor.path) as reader:
        return any(reader.read(run.offset_a, min(run.length, _PAGE)))

"""Production of the new checkpoint: a migration's plan carried out in the staging folder, and the
manifest.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.manifest import (
    MAX_MANIFEST,
    Manifest,
    ManifestEntry,
    key_fingerprint,
    read_manifest,
)
from ckptfix.conversion.checksums import Checksums, Digests, Part
from ckptfix.conversion.kept_files import Kept, state_of
from ckptfix.conversion.migration_plan import (
    MigrationPlan,
    Planned,
    PlannedExtra,
    PlannedModel,
    PlannedState,
)
from ckptfix.conversion.proving import state_tensors
from ckptfix.conversion.sources import SourceDigests, check_archive, check_record, sha256_of
from ckptfix.conversion.streaming import Convert, NewFile, Writer, copy_file, writing_threads
from ckptfix.diagnosis.contents import lasting_label, readable_manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.storage.atomic import DISK_FULL, create_file, sync_folder
from ckptfix.storage.copying import Pacer, supports_reflink
from ckptfix.storage.executor import Done, Executor
from ckptfix.storage.files import AnyPath, stat_of
from ckptfix.storage.parallel import Control, Progress, run_all
from ckptfix.storage.paths import JOURNAL, MANIFEST, command, shell_path
from ckptfix.storage.reading import Piece
from ckptfix.storage.recipes import Literal
from ckptfix.storage.results import Units
from ckptfix.storage.staged import ensure_space
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.new_files import OutputFile
from ckptfix.tensors.stored import Format, StoredTensor, Weights
from ckptfix.wording import human_size

_MODE = 0o777


class Produced(Struct, frozen=True):
    """Digests of new files. ``digests``: of each ``planned`` one, name of a tensor -> digest;
    ``sha256``: of the files.

    Both are empty if not requested.
    """

    digests: tuple[dict[str, str], ...]
    sha256: dict[str, str] = field(default_factory=dict)


def produce(
    plan: MigrationPlan,
    folder: Path,
    recorded: SourceDigests,
    *,
    with_sha256: bool,
    kept: Kept,
    progress: Progress | None,
    executor: Executor,
) -> Produced:
    """Write all planned files below ``folder``, durably, and compare the bytes read with the
    recorded digests.

    ``kept``: what is there of an earlier run. Raises OperationError when there is too little space
    or the source is damaged, ChangedError when it changed meanwhile, OSError.
    """
    root = plan.source.root
    shares = supports_reflink(folder) and os.stat(folder).st_dev == stat_of(root).st_dev
    new = sum(file.size for one in plan.planned for file in one.files)
    if executor.leads and executor.knows_all:  # the others come when files may be there already
        ensure_space(plan.output, (new if shares else plan.bytes_to_write) - kept.nbytes)
    tensors = _tensors_of(plan, has_digests=recorded.has_digests)
    digests = Digests(one._replace(fqn="") for named in tensors for one in named.values())
    records = {piece: crc for one in plan.planned for piece, crc in one.checksums.items()}
    checksums = Checksums(records, with_parts=plan.options.verify)
    sha256: dict[str, str] = {}
    work = _Work(
        plan=plan, folder=folder, recorded=recorded, sha256=sha256 if with_sha256 else None
    )
    with Pacer() as pacer:
        try:
            parts = list(_parts(plan, work, digests, checksums, shares=shares))
            for found in _run_shared("files", parts, pacer, progress, kept.run, executor):
                if found["sha256"]:
                    sha256[found["file"]] = found["sha256"]
                digests.take(found["digests"])
                checksums.take(found["checksums"])
                for number, name, count in found["overflowed"]:
                    work.convert(number, name).overflowed += count
            if plan.options.verify and not executor.is_share:
                left = list(_left(checksums))
                _run_shared("records", left, pacer, None, kept.run, executor.complete)
            pacer.finish()
        except OSError as error:
            if error.errno in DISK_FULL:
                raise _full(plan, error) from error
            raise
    if executor.is_share:
        return Produced(())
    if executor.leads:
        for path in plan.empty:
            (folder / path).mkdir(parents=True, exist_ok=True)
        _keep_modes(plan, folder)
    complete = partial(_complete, digests, executor.complete)
    found_all = tuple(map(complete, plan.planned, tensors))
    produced = Produced(found_all, dict(sorted(sha256.items())))
    recorded.compare(produced.digests[: len(plan.models)])
    for where, _, _ in os.walk(folder) if executor.leads else ():
        sync_folder(Path(where))
    return produced


def _tensors_of(plan: MigrationPlan, *, has_digests: bool) -> list[Mapping[str, StoredTensor]]:
    """Return what a proof asks for of each planned part: name -> tensor where its bytes are now.

    ``has_digests``: the source's manifest has digests of the models, which are compared in any
    case.
    """
    models = {
        id(one): (
            {name: source.tensor for name, source in one.sources.items()}
            | {
                key: one.data[key].tensor
                for names in one.modules.values()
                for key in names.values()
            }
        )
        for one in plan.models
        if plan.options.verify or has_digests
    }
    states = {id(one): state_tensors(one.state) for one in plan.states if plan.options.verify}
    return [(models | states).get(id(one), {}) for one in plan.planned]


def _complete(
    digests: Digests, executor: Executor, planned: Planned, tensors: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Return the digests of tensors by name; those that new files have in parts are read once
    more.
    """
    found = digests.of(tensors)
    left = {tensor._replace(fqn=""): name for name, tensor in tensors.items() if name not in found}
    read = hash_all([TensorJob(one) for one in left], keep_cached=False, executor=executor)
    for (tensor, name), one in zip(left.items(), read, strict=True):
        if one.problem:
            raise OperationError(
                f"{_label(planned)}: {name!r} cannot be read: {one.problem}; nothing was written"
            )
        digests.add(tensor, one.digest)
    return digests.of(tensors)


def _label(planned: Planned) -> str:
    return "" if isinstance(planned, PlannedExtra) else planned.label


_Task = Callable[[Writer], object]
"""A part of the work, with the means of the thread that does it."""


class _Part(NamedTuple):
    """The tasks of one file, which one process of a team does. ``source``: a file that is read,
    where it is one.

    ``path``: the file that is written, if it is one. ``found``: returns what has been found out
    once all is done.
    """

    what: str
    source: AnyPath | None
    size: int
    tasks: tuple[_Task, ...]
    path: Path | None = None
    found: Callable[[], dict[str, Any]] = dict


def _parts(
    plan: MigrationPlan, work: "_Work", digests: Digests, checksums: Checksums, *, shares: bool
) -> Iterator[_Part]:
    """Yield all that there is to do: large files first, so that no thread is left alone with one at
    the end.
    """
    sized = [
        (file, number, mode)
        for number, planned in enumerate(plan.planned)
        for mode in ([_mode_of(plan, planned)] if planned.files else [])
        for file in planned.files
    ]
    for file, number, mode in sorted(sized, key=lambda one: -one[0].size):
        new = NewFile(
            work.folder / file.path,
            file,
            plan.planned[number].data,
            digests,
            checksums,
            with_sha256=work.sha256 is not None,
            shares=shares,
            mode=mode,
            when_done=partial(work.keep, file),
        )
        tasks = tuple(partial(Writer.write, job=job) for job in new.jobs())
        found = partial(work.found, file.path, new, number)
        yield _Part(str(file.path), None, file.size, tasks, new.path, found)
    root = plan.source.root
    for path in plan.carried:
        what, size, tasks = f"copy {path}", 2 * _size(root / path), (partial(work.carry, path),)
        yield _Part(what, root / path, size, tasks, work.folder / path, partial(work.found, path))
    for path in plan.old_state_files:
        yield _Part(
            f"compare {path}", root / path, _size(root / path), (partial(work.compare, path),)
        )
    for file in plan.rewritten:
        found, tasks = partial(work.found, file.path), (partial(work.rewrite, file),)
        yield _Part(
            str(file.path), root / file.path, file.size, tasks, work.folder / file.path, found
        )


def _size(path: AnyPath) -> int:
    return stat_of(path).st_size if path.exists() else 0


def _left(checksums: Checksums) -> Iterator[_Part]:
    """Yield the reading of the records of which not every byte went into a new file as it is."""
    for piece, crc, parts in checksums.left():
        task = partial(_check_record, piece, crc, parts)
        yield _Part(f"record at byte {piece.offset}", piece.path, piece.length, (task,))


def _run_shared(
    what: str,
    parts: Sequence[_Part],
    pacer: Pacer,
    progress: Progress | None,
    run: str,
    executor: Executor,
) -> list[dict[str, Any]]:
    """Run the tasks of all parts; in a team, those of some of them, and none of those that an
    earlier run has done.

    Returns what was ``found`` of each part, as JSON values; nothing for one process alone. ``run``:
    as ``Kept`` has it.
    """
    if not executor.has_units:
        _run((task for part in parts for task in part.tasks), pacer, progress)
        return []

    def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        left = {number: len(parts[number].tasks) for number in numbers}
        lock = threading.Lock()

        def do(number: int, task: _Task, writer: Writer) -> None:
            task(writer)
            with lock:
                left[number] -= 1
                if left[number]:
                    return
            part = parts[number]
            found = part.found()
            if run and part.path is not None:
                pacer.finish()  # what the next run keeps must be on the disk
                found["kept"] = [run, found["file"], *(state_of(part.path) or ())]
            done(number, found)

        for path in (parts[number].path for number in numbers if run):
            if path is not None:
                path.unlink(missing_ok=True)  # of this share, when it was killed
        tasks = (partial(do, number, task) for number in numbers for task in parts[number].tasks)
        _run(tasks, pacer, progress)

    units = Units()
    every = [units.of((part.what, part.source, run), part.size) for part in parts]
    results = executor.map(what, every, share, lambda number: {}, progress)
    return [result for result in results if result]


def _check_record(piece: Piece, crc: int, parts: Mapping[int, Part], writer: Writer) -> None:
    check_record(piece, crc, parts, writer.control)


def _run(tasks: Iterable[_Task], pacer: Pacer, progress: Progress | None) -> None:
    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[_Task], object]]:
        with Writer(pacer, control) as writer:
            yield lambda task: task(writer)

    run_all(tasks, worker, threads=writing_threads(), progress=progress)


class _Work(Struct, frozen=True, kw_only=True):
    """The work on single files. ``sha256``: file -> its sha256, where that is needed."""

    plan: MigrationPlan
    folder: Path
    recorded: SourceDigests
    sha256: dict[str, str] | None

    def convert(self, number: int, name: str) -> Convert:
        """Return the conversion of a tensor, by the number of what is planned and its name."""
        convert = self.plan.planned[number].data[name].convert
        assert convert is not None
        return convert

    def found(
        self, path: PurePosixPath, new: NewFile | None = None, number: int = 0
    ) -> dict[str, Any]:
        """Return what has been found out about a complete file, as JSON values; the counts begin
        again.
        """
        overflowed = []
        for name, source in new.taken() if new is not None else ():
            if source.convert is not None and source.convert.overflowed:
                overflowed.append((number, name, source.convert.overflowed))
                source.convert.overflowed = 0
        return {
            "file": str(path),
            "sha256": (self.sha256 or {}).get(str(path), ""),
            "digests": new.digests.found(new.marks) if new is not None else [],
            "checksums": new.checksums.found(new.pieces) if new is not None else [],
            "overflowed": overflowed,
        }

    def keep(self, file: OutputFile, new: NewFile) -> None:
        """Note the sha256 of a complete file."""
        if self.sha256 is not None:
            self.sha256[str(file.path)] = new.sha256

    def compare(self, path: PurePosixPath, writer: Writer) -> None:
        """Compare a file that optimizers are read from with its recorded digest: moments have none
        of their own.
        """
        if self.recorded.lists(str(path)):
            found = sha256_of(self.plan.source.root / path, writer.control)
            self.recorded.compare_file(str(path), found)

    def carry(self, path: PurePosixPath, writer: Writer) -> None:
        """Copy one file with its permissions and its time; a symbolic link becomes the file behind
        it.
        """
        source, target = self.plan.source.root / path, self.folder / path
        copy_file(source, target, writer.control.go_on)
        if self.recorded.lists(str(path)):
            self.recorded.compare_file(str(path), sha256_of(target, writer.control))
        if self.plan.options.verify:
            check_archive(source, writer.control)

    def rewrite(self, file: OutputFile, writer: Writer) -> None:
        """Write a small file in place of one of the source."""
        source, target = self.plan.source.root / file.path, self.folder / file.path
        self.recorded.compare_file(str(file.path), sha256_of(source, writer.control))
        data = b"".join(part.data for part in file.parts if isinstance(part, Literal))
        # The thread that writes the weights may come later.
        target.parent.mkdir(parents=True, exist_ok=True)
        create_file(target, data)
        os.chmod(target, stat.S_IMODE(stat_of(source).st_mode) & _MODE)
        if self.sha256 is not None:
            self.sha256[str(file.path)] = hashlib.sha256(data).hexdigest()


def _keep_modes(plan: MigrationPlan, folder: Path) -> None:
    """Give the new folders the permissions of the old ones; the owner always keeps access."""
    if plan.is_file or plan.source.only is not None:
        return
    made = {parent for path in plan.carried for parent in path.parents}
    made |= {one for path in plan.empty for one in (path, *path.parents)}
    for path in made | {PurePosixPath(".")}:
        os.chmod(
            folder / path,
            stat.S_IMODE(stat_of(plan.source.root / path).st_mode) & _MODE | stat.S_IRWXU,
        )


def _mode_of(plan: MigrationPlan, planned: Planned) -> int:
    """Return the permissions of the first old file of a planned part, so that the same users can
    read the new one.

    Users without access to a folder around the old file, which is not made again, could not read
    that file.
    """
    first = plan.source.root / planned.old_files[0]
    mode = stat.S_IMODE(stat_of(first).st_mode) & 0o666
    folders = [plan.source.root / parent for parent in planned.old_files[0].parents]
    if not plan.is_file:
        folders.pop()  # the folder itself, whose permissions the new one gets
    for folder in folders if plan.source.only is None else ():
        entered = stat_of(folder).st_mode
        mode &= ~(0o060 if not entered & stat.S_IXGRP else 0) & ~(
            0o006 if not entered & stat.S_IXOTH else 0
        )
    return mode | stat.S_IRUSR


def _full(plan: MigrationPlan, error: OSError) -> OperationError:
    """Return the error about a disk that had enough room at first and that others filled
    meanwhile.
    """
    need = plan.bytes_to_write
    return OperationError(
        f"{plan.output}: {error}; the migration needs {need} bytes ({human_size(need)}) in total; "
        "nothing was written there; next: free up space on that disk or choose a path on another "
        "disk, then run the same command again"
    )


_Value = TypeVar("_Value")


def source_manifest(plan: MigrationPlan) -> Manifest | None:
    """Return the manifest of a source, None when it has none.

    Raises OperationError, with what to do, for an unreadable one, with which nothing could be
    compared.
    """
    path = plan.source.root / MANIFEST
    try:
        return readable_manifest(plan.source.root)
    except OSError as error:
        raise OperationError(
            f"{path} cannot be read: {error.strerror}; next: chmod u+rX "
            f"{' '.join(map(shell_path, (path.parent, path)))}"
        ) from error


def record(
    plan: MigrationPlan, old: Manifest, new: tuple[Weights, ...], folder: Path, produced: Produced
) -> tuple[str, ...]:
    """Write the manifest of the new checkpoint in ``folder``, durably.

    ``new``: its models as they were found in the new files.

    Digests of tensors are written when they are known: after a verified migration. Returns in words
    what was left out, as too long a manifest would not be read. Raises OperationError when the
    manifest is too long without them, too; OSError.
    """
    carried = set(map(str, plan.carried))
    sizes = {str(file.path): file.size for one in plan.planned for file in one.files}
    sizes |= {str(file.path): file.size for file in plan.rewritten if str(file.path) in old.files}
    manifest = replace(
        old,
        models=tuple(
            _entry(model, replace(weights, label=lasting_label(weights, folder)), digests, old)
            for model, weights, digests in zip(plan.models, new, produced.digests, strict=False)
        ),
        optimizers=tuple(_optimizer_entry(one, plan.states) for one in old.optimizers),
        world_size=plan.processes or old.world_size if old.is_of_a_save else old.world_size,
        files=_kept(old.files, carried) | sizes if old.is_of_a_save else {},
        sha256=_kept(old.sha256, carried) | produced.sha256 if old.digests else {},
        ranges=_kept(old.ranges, carried),
    )
    words: tuple[str, ...] = ()
    data = manifest.to_bytes()
    if len(data) > MAX_MANIFEST:
        data, words = _shortened(plan, manifest, len(data))
    (folder / JOURNAL).mkdir()
    create_file(folder / MANIFEST, data)
    sync_folder(folder / JOURNAL)
    sync_folder(folder)
    return words


def _shortened(
    plan: MigrationPlan, manifest: Manifest, length: int
) -> tuple[bytes, tuple[str, ...]]:
    """Return a manifest without the digests of tensors, and in words that it has none."""
    data = replace(
        manifest, models=tuple(replace(one, digests={}) for one in manifest.models)
    ).to_bytes()
    too_long = f"would have {length} bytes (limit: {MAX_MANIFEST})"
    if len(data) > MAX_MANIFEST:
        raise OperationError(
            f"{plan.output}: its manifest {too_long}, and {len(data)} without the digests of "
            "tensors; nothing was written; next, to migrate without a manifest: mv "
            f"{shell_path(plan.source.root / MANIFEST)} ELSEWHERE"
        )
    return data, (f"{plan.output / MANIFEST} has no digests of tensors: with them it {too_long}",)


def outdated(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words the manifests above the output that do not list the new files, and the command
    to seal again.
    """
    output = plan.output.absolute()
    names = (
        ["."] if plan.is_file else [str(file.path) for one in plan.planned for file in one.files]
    )
    for folder in output.parents:
        manifest = None
        with suppress(FormatError, OSError):  # its next reader reports it
            manifest = read_manifest(folder)
        if manifest is None:
            continue
        below = output.relative_to(folder)
        written = {str(below / name) for name in (*names, *plan.removed)}
        is_changed = not written.isdisjoint({*manifest.digests, *manifest.files})
        if manifest.digests or is_changed:
            verb = "describes the previous files" if is_changed else "does not list the files"
            yield (
                f"{folder / MANIFEST} {verb} in {below}; next, to update the manifest: "
                f"{command('seal', folder, '', *(['--force'] if is_changed else []))}"
            )


def _kept(recorded: Mapping[str, _Value], carried: set[str]) -> dict[str, _Value]:
    return {name: value for name, value in recorded.items() if name in carried}


def _entry(
    model: PlannedModel, new: Weights, digests: Mapping[str, str], old: Manifest
) -> ManifestEntry:
    """Return the manifest entry of one model. Its keys are those that a reader of the header
    sees.
    """
    is_apart = new.format is Format.SAFETENSORS
    names = {name: source.new for name, source in model.sources.items()}
    ties = dict(model.weights.ties)
    held = names if is_apart else names | {name: names[kept] for name, kept in ties.items()}
    return ManifestEntry(
        index=new.index,
        file=new.label,
        type=_type(model.weights, old),
        keys=key_fingerprint((name, one.dtype, one.shape) for name, one in held.items()),
        aliases=ties if is_apart else {},
        digests={name: digests[ties.get(name, name)] for name in held} if digests else {},
    )


def _optimizer_entry(old: ManifestEntry, states: Sequence[PlannedState]) -> ManifestEntry:
    """Return the manifest entry of an optimizer with the name of its new file; a guarded save names
    no folder.
    """
    for state in states:
        if state.state.index == old.index:
            names = [str(file.path) for file in state.files if len(file.path.parts) == 1]
            return replace(old, file=names[0] if names else "")
    return old


def _type(weights: Weights, old: Manifest) -> str:
    """Return the class of a model, "" when the old manifest does not list this one."""
    for entry in old.models:
        is_folder = weights.format in (Format.DCP, Format.DEEPSPEED)
        is_it = entry.file == weights.label or (is_folder and entry.file not in old.files)
        if entry.index == weights.index and is_it:
            return entry.type
    return ""

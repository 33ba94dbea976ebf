"""Production of the new checkpoint: a migration's plan carried out in the staging folder, and the manifest."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ckptfix.checkpoint.manifest import MAX_MANIFEST, Manifest, ManifestEntry, key_fingerprint, read_manifest
from ckptfix.conversion.migration_plan import MigrationPlan, Planned, PlannedModel, PlannedState
from ckptfix.conversion.sources import SourceDigests, check_archive, check_record, loose_records, sha256_of
from ckptfix.conversion.streaming import Stopped, copy_file, stopping, write_file
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.contents import lasting_label, readable_manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.storage.atomic import DISK_FULL, create_file, sync_folder
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.parallel import Progress, cores
from ckptfix.storage.paths import JOURNAL, MANIFEST, command, shell_path
from ckptfix.storage.recipes import Literal
from ckptfix.storage.staged import despite_interrupts, ensure_space
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.joined import Converted
from ckptfix.tensors.new_files import OutputFile
from ckptfix.tensors.stored import Format, Weights
from ckptfix.wording import human_size

_MOST_AT_ONCE = 4
"""Files that are written at a time; each takes 32 MiB of buffers."""

_MODE = 0o777


@dataclass(frozen=True, slots=True)
class Produced:
    """Digests of new files. ``digests``: of each ``planned`` one, key of ``Data`` -> digest; ``sha256``: of the files.

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
    progress: Progress | None,
) -> Produced:
    """Write all planned files below ``folder``, durably, and compare the bytes read with the recorded digests.

    Raises OperationError when there is too little space or the source is damaged, ChangedError when it
    changed meanwhile, OSError.
    """
    shares = supports_reflink(folder) and os.stat(folder).st_dev == os.stat(plan.source.root).st_dev
    new = sum(file.size for one in plan.planned for file in one.files)
    ensure_space(plan.output, new if shares else plan.bytes_to_write)
    produced = Produced(digests=tuple({} for _ in plan.planned))
    with _workers() as (pool, stop):
        work = _Work(
            plan=plan,
            folder=folder,
            recorded=recorded,
            with_digests=plan.options.verify or recorded.has_digests,
            with_sha256=with_sha256,
            shares=shares,
            stop=stop,
            report=one_at_a_time(progress),
        )
        sized = [(file.size, number, file) for number, one in enumerate(plan.planned) for file in one.files]
        sized.sort(
            key=lambda item: -item[0]
        )  # large files first, so that no thread is left alone with one at the end
        jobs = [pool.submit(work.produce, number, file, produced) for _, number, file in sized]
        jobs += [pool.submit(work.carry, path) for path in plan.carried]
        taken = dict.fromkeys(file for one in plan.states for file in one.old_files)
        jobs += [pool.submit(work.compare, path) for path in taken]
        for one in plan.planned if plan.options.verify else ():
            jobs += [pool.submit(check_record, piece, crc, stop) for piece, crc in loose_records(one)]
        jobs += [pool.submit(work.rewrite, file, produced) for file in plan.rewritten]
        try:
            _finish(jobs, stop)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise _full(plan, error) from error
            raise
    for path in plan.empty:
        (folder / path).mkdir(parents=True, exist_ok=True)
    _keep_modes(plan, folder)
    for model, digests in zip(plan.models, produced.digests, strict=False):
        if model.parts is not None and (plan.options.verify or recorded.has_digests):
            digests.clear()
            digests.update(_digests_of(model))
    recorded.compare(produced.digests[: len(plan.models)])
    for where, _, _ in os.walk(folder):
        sync_folder(Path(where))
    return produced


def _digests_of(model: PlannedModel) -> dict[str, str]:
    """Return the digests of the tensors of a model whose new files have them in parts, by their names."""
    tensors = {
        name: source.stored
        if source.convert is None
        else source.stored._replace(
            dtype=source.new.dtype,
            layout=Converted(source.stored.layout, source.stored.dtype, source.new.dtype),
        )
        for name, source in model.sources.items()
    }
    read = hash_all([TensorJob(one) for one in tensors.values()], keep_cached=False)
    for name, one in zip(tensors, read, strict=True):
        if one.problem:
            raise OperationError(
                f"{model.label}: {name!r} cannot be read: {one.problem}; nothing was written"
            )
    return {name: one.digest for name, one in zip(tensors, read, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The work of one thread. ``shares``: the disk can share blocks between files."""

    plan: MigrationPlan
    folder: Path
    recorded: SourceDigests
    with_digests: bool
    with_sha256: bool
    shares: bool
    stop: threading.Event
    report: Progress | None

    def produce(self, number: int, file: OutputFile, produced: Produced) -> None:
        """Write one file of a model, and note its digests."""
        planned = self.plan.planned[number]
        target = self.folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        written = write_file(
            target,
            file,
            planned.data,
            with_digests=self.with_digests,
            with_sha256=self.with_sha256,
            shares=self.shares,
            stop=self.stop,
            progress=self.report,
        )
        os.chmod(target, _mode_of(self.plan, planned))
        produced.digests[number].update(written.digests)
        if self.with_sha256:
            produced.sha256[str(file.path)] = written.sha256

    def compare(self, path: PurePosixPath) -> None:
        """Compare a file that optimizers are read from with its recorded digest: moments have none of their own."""
        if self.recorded.lists(str(path)):
            self.recorded.compare_file(str(path), sha256_of(self.plan.source.root / path, self.stop))

    def carry(self, path: PurePosixPath) -> None:
        """Copy one file with its permissions and its time; a symbolic link becomes the file behind it."""
        source, target = self.plan.source.root / path, self.folder / path
        copy_file(source, target, stopping(self.stop, self.report))
        if self.recorded.lists(str(path)):
            self.recorded.compare_file(str(path), sha256_of(target, self.stop))
        if self.plan.options.verify:
            check_archive(source, self.stop)

    def rewrite(self, file: OutputFile, produced: Produced) -> None:
        """Write a small file in place of one of the source."""
        source, target = self.plan.source.root / file.path, self.folder / file.path
        self.recorded.compare_file(str(file.path), sha256_of(source, self.stop))
        data = b"".join(part.data for part in file.parts if isinstance(part, Literal))
        target.parent.mkdir(parents=True, exist_ok=True)  # the thread that writes the weights may come later
        create_file(target, data)
        os.chmod(target, stat.S_IMODE(os.stat(source).st_mode) & _MODE)
        if self.with_sha256:
            produced.sha256[str(file.path)] = hashlib.sha256(data).hexdigest()


def _keep_modes(plan: MigrationPlan, folder: Path) -> None:
    """Give the new folders the permissions of the old ones; the owner always keeps access."""
    if plan.is_file or plan.source.only is not None:
        return
    made = {parent for path in plan.carried for parent in path.parents}
    made |= {one for path in plan.empty for one in (path, *path.parents)}
    for path in made | {PurePosixPath(".")}:
        os.chmod(folder / path, stat.S_IMODE(os.stat(plan.source.root / path).st_mode) & _MODE | stat.S_IRWXU)


def _mode_of(plan: MigrationPlan, planned: Planned) -> int:
    """Return the permissions of the first old file of a planned part, so that the same users can read the new one.

    Users without access to a folder around the old file, which is not made again, could not read that file.
    """
    first = plan.source.root / planned.old_files[0]
    mode = stat.S_IMODE(os.stat(first).st_mode) & 0o666
    folders = [plan.source.root / parent for parent in planned.old_files[0].parents]
    if not plan.is_file:
        folders.pop()  # the folder itself, whose permissions the new one gets
    for folder in folders if plan.source.only is None else ():
        entered = os.stat(folder).st_mode
        mode &= ~(0o060 if not entered & stat.S_IXGRP else 0) & ~(0o006 if not entered & stat.S_IXOTH else 0)
    return mode | stat.S_IRUSR


def _full(plan: MigrationPlan, error: OSError) -> OperationError:
    """Return the error about a disk that had enough room at first and that others filled meanwhile."""
    need = plan.bytes_to_write
    return OperationError(
        f"{plan.output}: {error}; {need} bytes ({human_size(need)}) are needed in all; nothing was written there; "
        "next: make room on that disk, or name a place on another one, and run it again"
    )


@contextmanager
def _workers() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Yield threads, and the event that stops them; they have ended when this returns."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, cores()))
    try:
        yield pool, stop
    finally:
        stop.set()
        despite_interrupts(lambda: pool.shutdown(wait=True, cancel_futures=True))


def _finish(jobs: list[Future[None]], stop: threading.Event) -> None:
    """Wait for all futures; raise the first error that is not only ``Stopped``."""
    wait(jobs, return_when=FIRST_EXCEPTION)
    failed = [job for job in jobs if job.done() and not job.cancelled() and job.exception() is not None]
    if failed:
        stop.set()
        for job in jobs:
            job.cancel()
        wait(jobs)
        errors = [job.exception() for job in jobs if not job.cancelled() and job.exception() is not None]
        raise next((error for error in errors if not isinstance(error, Stopped)), errors[0]) or Stopped()


def one_at_a_time(progress: Progress | None) -> Callable[[int], None] | None:
    """Return a function that may be called from any thread."""
    if progress is None:
        return None
    lock = threading.Lock()

    def report(count: int) -> None:
        with lock:
            progress(count)

    return report


_Value = TypeVar("_Value")


def source_manifest(plan: MigrationPlan) -> Manifest | None:
    """Return the manifest of a source, None when it has none.

    Raises OperationError, with what to do, for an unreadable one, with which nothing could be compared.
    """
    path = plan.source.root / MANIFEST
    try:
        return readable_manifest(plan.source.root)
    except OSError as error:
        raise OperationError(
            f"{path} cannot be read: {error.strerror}; next, to be allowed to: chmod u+rX "
            f"{' '.join(map(shell_path, (path.parent, path)))}"
        ) from error


def record(
    plan: MigrationPlan, old: Manifest, new: tuple[Weights, ...], folder: Path, produced: Produced
) -> tuple[str, ...]:
    """Write the manifest of the new checkpoint in ``folder``, durably.

    ``new``: its models as they were found in the new files.

    Digests of tensors are written when they are known: after a verified migration. Returns in words what was
    left out, as too long a manifest would not be read. Raises OperationError when the manifest is too long
    without them, too; OSError.
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
        sha256=_kept(old.sha256, carried) | produced.sha256 if old.sha256 else {},
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


def _shortened(plan: MigrationPlan, manifest: Manifest, length: int) -> tuple[bytes, tuple[str, ...]]:
    """Return a manifest without the digests of tensors, and in words that it has none."""
    data = replace(manifest, models=tuple(replace(one, digests={}) for one in manifest.models)).to_bytes()
    too_long = f"would take {length} bytes, {MAX_MANIFEST} are read at most"
    if len(data) > MAX_MANIFEST:
        raise OperationError(
            f"{plan.output}: its manifest {too_long}, and {len(data)} without the digests of tensors; nothing was "
            f"written; next, to migrate without it: mv {shell_path(plan.source.root / MANIFEST)} ELSEWHERE"
        )
    return data, (f"{plan.output / MANIFEST} has no digests of tensors: with them it {too_long}",)


def outdated(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words the manifests above the output that do not list the new files, and the command to seal again."""
    output = plan.output.absolute()
    names = ["."] if plan.is_file else [str(file.path) for one in plan.planned for file in one.files]
    for folder in output.parents:
        manifest = None
        with suppress(FormatError, OSError):  # its next reader reports it
            manifest = read_manifest(folder)
        if manifest is None:
            continue
        below = output.relative_to(folder)
        written = {str(below / name) for name in (*names, *plan.removed)}
        is_changed = not written.isdisjoint({*manifest.sha256, *manifest.files})
        if manifest.sha256 or is_changed:
            yield (
                f"{folder / MANIFEST} {'says otherwise of' if is_changed else 'does not list'} what is written to "
                f"{below}; next, to make it true: {command('seal', folder, '', *(['--force'] if is_changed else []))}"
            )


def _kept(recorded: Mapping[str, _Value], carried: set[str]) -> dict[str, _Value]:
    return {name: value for name, value in recorded.items() if name in carried}


def _entry(model: PlannedModel, new: Weights, digests: Mapping[str, str], old: Manifest) -> ManifestEntry:
    """Return the manifest entry of one model. Its keys are those that a reader of the header sees."""
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
    """Return the manifest entry of an optimizer with the name of its new file; a guarded save names no folder."""
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

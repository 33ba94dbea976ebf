"""``verify``: the structure of a checkpoint, then every digest that its manifest has. Changes
nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.contents import (
    Contents,
    Recorded,
    TensorLocation,
    read_contents,
    readable_manifest,
)
from ckptfix.diagnosis.file_damage import LeftRecord
from ckptfix.diagnosis.findings.base import Finding, Resume, Severity
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.diagnosis.findings.interrupted import InterruptedSave, SpareDownload, StagingFolder
from ckptfix.diagnosis.target import Target, ensure_checkpoint, find_target
from ckptfix.diagnosis.values import ValueFinding, judge_moment, judge_values, trained_for
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import Openable
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, SIGNED, command, described
from ckptfix.tensors.hashing import CRC, FileJob, Hashed, Job, Scheme, TensorJob, hash_all
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.stored import Format, StoredTensor
from ckptfix.verification.attested import (
    Attested,
    Evidence,
    from_upload,
    gather,
    own_folders,
    with_own_files,
)
from ckptfix.verification.digests import compare
from ckptfix.verification.download_digests import RecordedByHub, recorded_download
from ckptfix.verification.sha256sums import find_sums
from ckptfix.verification.signatures import Trust
from ckptfix.verification.statements import uncovered_weights
from ckptfix.verification.verify_report import VerifyReport
from ckptfix.wording import count_of, list_names, series

_COVERED = ("values of tensors", "digests in ", "other files next to it")
"""Beginnings of what ``check`` leaves to ``verify``: values, digests, and files that are not part
of a checkpoint.
"""


@takes_urls("path", "signatures", "statements", "sha256sums")
@paused_gc()
def verify(
    path: Openable,
    *,
    data: bool = False,
    against: Openable | None = None,
    signatures: Sequence[Openable] = (),
    statements: Sequence[Openable] = (),
    sha256sums: Sequence[Openable] = (),
    trust: Trust | None = None,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> VerifyReport:
    """Check a checkpoint, then compare every file and tensor with the digests in its manifest.

    ``data``: look at the values of all weights, in the same pass. ``against``: removed in 0.6.0; it
    raises UsageError. ``progress`` is called with numbers of bytes. ``executor``: shares the work.

    ``signatures``: compare with statements that ``trust`` must have signed, as OpenSSF Model
    Signing has them, instead of the manifest; ``statements``: with statements whoever wrote them;
    ``sha256sums``: with lists of ``sha256sum``. Where the manifest has no digests, a list that is
    called SHA256SUMS is found in the folder or next to it. Without such a list, a folder that was
    downloaded from the Hugging Face hub is compared with what its client recorded, and one that
    ckptfix uploaded with the commit marker of its upload.

    Raises UsageError when there is no checkpoint, or for a key that is none, OperationError when a
    manifest or a statement cannot be understood or a file changed meanwhile, OSError when a folder
    cannot be read. What cannot be read of a file is in the report, and so is a signature that is
    not right.
    """
    if against is not None:
        raise UsageError("verify(against=...) was removed in 0.6.0; use ckptfix.diff(path, other)")
    target = find_target(path)
    contents = read_contents(target)
    is_attested = bool(signatures or statements or sha256sums or trust)
    manifest = None if is_attested else readable_manifest(target.root)
    hub: RecordedByHub | None = None
    upload: Evidence | None = None
    if not is_attested and not has_digests(manifest):
        uncovered = uncovered_weights(contents)
        weights = {str(path) for one in contents.weights for path in one.files} | {*uncovered}
        found = find_sums(target.root, weights or contents.files)
        sha256sums = [] if found is None else [found]
        is_attested = bool(sha256sums)
        if found is None and (manifest is None or not manifest.is_of_a_save):
            hub = recorded_download(contents, target, uncovered)
        if found is None and hub is None:
            upload = from_upload(contents, manifest)
            is_attested = upload is not None
    evidence = upload or gather(
        target, signatures=signatures, statements=statements, sha256sums=sha256sums, trust=trust
    )
    if evidence.problems:
        return VerifyReport(
            path=target.path, root=target.root, nbytes=contents.nbytes, findings=(), items=(),
            no_digest=evidence.problems, statements=evidence.attestations,
        )  # fmt: skip
    contents = with_own_files(contents, evidence) if hub is None else hub.contents
    recorded = (
        Attested(evidence, contents, target) if is_attested else hub or Recorded(manifest, target)
    )
    try:
        shape = structure(
            contents,
            target,
            data=data,
            leaves_records=True,
            progress=progress,
            executor=executor,
        )
    except UsageError:
        if not (recorded.sha256 or recorded.sizes or is_attested or hub is not None):
            raise
        shape = Structure((), (), ())  # what it lists is missing, each file is named
    hashed, every = hash_recorded(
        contents, recorded, shape.records, data=data, progress=progress, executor=executor
    )
    shape = settled(every, shape, contents, target, progress, executor)
    if isinstance(recorded, Attested):
        recorded.place(hashed)
    # Without a statement of tensors, they are parts of files that are compared, and have no
    # verdict of their own.
    is_of_files = hub is not None or (is_attested and evidence.tensors is None)
    compared = replace(contents, weights=(), unreadable={}) if is_of_files else contents
    items = tuple(compare(compared, recorded, hashed))
    lost = tuple(_lost(compared, recorded, data=data))
    told = evidence.not_checked
    if not is_attested:
        told = (*told, *_unverified_signatures(target))
    downloaded, saved_over = None, ""
    if hub is not None:
        items, downloaded, saved_over = hub.judged(items)
        told = (*told, *hub.not_checked())
    crossed = ""
    notes: tuple[str, ...] = ()
    if isinstance(recorded, Attested):
        items, crossed = (*items, *recorded.added), recorded.crossed
        notes = tuple(recorded.notes)
        told = (*told, *_own_folders(contents, evidence))
    values: tuple[ValueFinding, ...] = ()
    read: frozenset[str] = frozenset()
    if data:
        moments = _Moments(contents, target, progress, executor)
        values = (*found_values(contents, hashed), *moments.findings())
        hashed, told, read = {**hashed, **moments.hashed}, (*told, *moments.unread), moments.files
    findings, unseen, refused, _ = shape
    report = VerifyReport(
        path=target.path,
        root=target.root,
        nbytes=contents.nbytes,
        findings=findings,
        items=items,
        values=values,
        sealed=manifest is not None,
        crossed=crossed,
        not_checked=(*told, *unseen, *_not_looked_at(contents, hashed, unseen, read, data=data)),
        unfinished=(*refused, *_not_hashed(hashed, refused), *lost),
        read_values=sum(one.scan is not None for one in hashed.values()),
        statements=evidence.attestations,
        again=evidence.command(target),
        notes=notes,
        hub=downloaded,
    )
    if report.is_compared:
        return report
    if is_attested:
        sources = series([str(one.path) for one in evidence.attestations])
        return replace(report, no_digest=f"nothing in this checkpoint is listed in {sources}")
    if saved_over:
        return replace(report, no_digest=f"{saved_over}{_to_seal(target, report)}")
    why = (
        "there is no manifest"
        if manifest is None
        else "no file or tensor has a digest in the manifest"
    )
    return replace(report, no_digest=f"{why}{_to_seal(target, report)}")


def has_digests(manifest: Manifest | None) -> bool:
    """Return whether a manifest has a digest of any file or tensor."""
    return manifest is not None and bool(
        manifest.digests or any(entry.digests for entry in manifest.models)
    )


def _own_folders(contents: Contents, evidence: Evidence) -> Iterator[str]:
    """Yield in words that ckptfix's own files in a folder were not compared, which no other program
    knows of.
    """
    folders = own_folders(contents, evidence, listed=False)
    if folders == [JOURNAL]:
        yield f"{JOURNAL}, ckptfix's own folder, which no loader reads"
    elif folders:
        yield f"{list_names(folders)}: ckptfix's own folders, which no loader reads"


def _unverified_signatures(target: Target) -> Iterator[str]:
    """Yield in words that the signatures in a folder were not verified."""
    names = [name for name in SIGNED if target.only is None and (target.root / name).is_file()]
    if names:
        parts = [part for name in names for part in ("--signature", str(target.root / name))]
        verifies = command("verify", target.root, "", *parts, "--key", "PUBLIC_KEY")
        yield f"who signed {' and '.join(names)}; to verify it: {verifies}"


def _not_hashed(
    hashed: Mapping[str | TensorLocation, Hashed], refused: tuple[str, ...]
) -> Iterator[str]:
    """Yield in words what could not be hashed, but for what ``refused`` names already."""
    for key, one in hashed.items():
        if one.problem and not any(words.startswith(f"{key}: ") for words in refused):
            yield f"{key}: {one.problem}"


def _to_seal(target: Target, report: VerifyReport) -> str:
    """Say what to type next where there is no manifest: a seal, or first what mends the damage that
    it refuses.
    """
    for name in SIGNED:
        if target.only is None and (target.root / name).is_file():
            path = str(target.root / name)
            return (
                "; next: "
                f"{command('verify', target.root, '', '--signature', path, '--key', 'PUBLIC_KEY')}"
            )
    if any(isinstance(one, StagingFolder) and not one.path.parts for one in report.findings):
        return ", and this is the staging folder of a save or another command, not a checkpoint"
    if report.unfinished:
        # A repair refuses it, too.
        return ", and seal refuses a folder that cannot be read completely"
    serious = [one for one in report.findings if one.severity is not Severity.NOTE]
    is_fixable = any(one.is_fixable for one in serious)
    repair = command("repair", target.root, target.only or "")
    if any(one.severity is not Severity.NOTE for one in report.values):
        mends = f"; next, to repair only the structure: {repair}" if is_fixable else ""
        return f", and a seal would record the damaged values as the original{mends}"
    if any(one.is_salvageable for one in serious):
        return f"; next: {command('salvage', target.root, target.only or '')} NEW_FOLDER"
    if is_fixable:
        return f"; next: {repair}"
    if target.only is None and (target.root / JOURNAL / UNFINISHED).exists():
        return "; the last save was interrupted: save again"
    if any(map(forbids_seal, serious)):
        return ", and seal refuses a damaged or incomplete folder"
    if target.only is not None:
        return f"; to seal its folder: {command('seal', target.root)}"
    return f"; next: {command('seal', target.root)}"


def forbids_seal(finding: Finding) -> bool:
    """Return whether a folder with this should not be sealed: an error, a cut save, or a file that
    a load needs.
    """
    is_incomplete = (
        isinstance(finding, IncompleteCheckpoint) and finding.resume is not Resume.SUCCEEDS
    )
    is_cut = isinstance(finding, InterruptedSave) and not isinstance(finding, SpareDownload)
    return is_incomplete or is_cut or finding.severity is Severity.ERROR


class Structure(NamedTuple):
    """The findings of ``check``, what it did not look at, and what may not be read.

    ``records``: those of torch's files whose CRC is still to be compared, by whoever reads all
    bytes next.
    """

    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    refused: tuple[str, ...]
    records: tuple[LeftRecord, ...] = ()


def structure(
    contents: Contents,
    target: Target,
    *,
    data: bool,
    leaves_records: bool = False,
    verb: str = "verify",
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> Structure:
    """Return the structure of a checkpoint. ``data``: it compares the CRC of every record.

    ``leaves_records``: but for those that it returns, where all processes know of all of them.
    ``verb``: the command to name for the checkpoints below.

    Raises UsageError when neither it nor ``contents`` knows of a checkpoint.
    """
    records: list[LeftRecord] = []
    left = records if leaves_records and data and executor.knows_all else None
    try:
        report = check(target.path, data=data, progress=progress, left=left, executor=executor)
    except UsageError:
        if contents.weights or contents.unreadable:
            return Structure(
                (), (), ()
            )  # a folder of DeepSpeed itself, whose structure was read to find the tensors
        ensure_checkpoint(scan_folder(target.root, target.only), verb)
        raise
    unseen = (words for words in report.not_checked if not words.startswith(_COVERED))
    return Structure(
        report.all_findings,
        tuple(unseen),
        report.all_unfinished,
        tuple(dict.fromkeys(records)),
    )


def settled(
    found: Mapping["FileDigest | TensorLocation | LeftRecord", Hashed], before: Structure,
    contents: Contents, target: Target, progress: Progress | None, executor: Executor,
) -> Structure:  # fmt: skip
    """Return the structure of a checkpoint after its bytes were read: as before, unless a record is
    not what it was.

    Then it is read again, for what that means.
    """
    if all(found[one].digest == f"{one.crc:08x}" for one in before.records):
        return before
    return structure(contents, target, data=True, progress=progress, executor=executor)


class FileDigest(NamedTuple):
    """A digest of a file: its path, relative to the checkpoint, and how it is taken."""

    name: str
    scheme: Scheme


Found = dict[FileDigest | TensorLocation | LeftRecord, Hashed]


def hash_recorded(
    contents: Contents, recorded: Recorded, records: Iterable[LeftRecord] = (), *,
    data: bool = False, progress: Progress | None = None, executor: Executor = THREADS,
) -> tuple[dict[str | TensorLocation, Hashed], Found]:  # fmt: skip
    """Hash what can be compared with something: file -> result, tensor -> result; and as
    ``hash_contents`` has it.

    Raises ChangedError when a file changed meanwhile.
    """
    has_tensors = bool(recorded.digests(contents.weights, ())) or (
        isinstance(recorded, Attested) and recorded.has_tensors
    )
    schemes = recorded_schemes(contents, recorded)
    found = hash_contents(
        contents,
        schemes,
        records=records,
        tensors=data or has_tensors,
        data=data,
        progress=progress,
        executor=executor,
    )
    return as_recorded(found, schemes), found


def recorded_schemes(contents: Contents, recorded: Recorded) -> dict[str, Scheme]:
    """Return how the files are hashed that can be compared: all, where one is gone that may have
    another name now.
    """
    gone = recorded.sha256.keys() - contents.files.keys()
    return {
        name: recorded.scheme_of(name, state.size)
        for name, state in contents.files.items()
        if name in recorded.sha256 or gone
    }


def hash_contents(
    contents: Contents, *schemes: Mapping[str, Scheme], records: Iterable[LeftRecord] = (),
    tensors: bool, data: bool = False, progress: Progress | None = None,
    executor: Executor = THREADS,
) -> Found:  # fmt: skip
    """Hash files, by each of their ``schemes`` once, and with ``tensors`` all tensors. ``data``:
    look at their values.

    ``records``: take their CRCs on the way, so that no byte is read from the disk for them alone.

    Raises ChangedError when a file changed meanwhile.
    """
    digests = dict.fromkeys(FileDigest(*one) for some in schemes for one in some.items())
    jobs: dict[FileDigest | TensorLocation | LeftRecord, Sequence[Job]] = {
        one: one.scheme.jobs(FileJob(contents.root / one.name, contents.files[one.name].size))
        for one in digests
    }
    for weights in contents.weights if tensors else ():
        jobs |= {
            TensorLocation(weights.label, tensor.fqn): [TensorJob(tensor, data)]
            for tensor in weights.tensors
        }
    jobs |= {one: [FileJob(one.path, one.size, one.offset, CRC)] for one in records}
    every = [job for parts in jobs.values() for job in parts]
    results = iter(hash_all(every, progress=progress, executor=executor))
    contents.check_unchanged()
    return {
        key: (
            key.scheme.joined([next(results) for _ in parts])
            if isinstance(key, FileDigest)
            else next(results)
        )
        for key, parts in jobs.items()
    }


def as_recorded(
    found: Mapping[FileDigest | TensorLocation | LeftRecord, Hashed], schemes: Mapping[str, Scheme]
) -> dict[str | TensorLocation, Hashed]:
    """Return what was found as it is compared: of each file the digest that was recorded of it."""
    return {
        key.name if isinstance(key, FileDigest) else key: one
        for key, one in found.items()
        if not isinstance(key, LeftRecord)
        and (not isinstance(key, FileDigest) or schemes.get(key.name) == key.scheme)
    }


def found_values(
    contents: Contents, hashed: Mapping[str | TensorLocation, Hashed]
) -> Iterator[ValueFinding]:
    """Yield what is wrong with the values of the models. Every tensor must have been scanned."""
    for weights in contents.weights:
        tensors = [
            (tensor, hashed[TensorLocation(weights.label, tensor.fqn)])
            for tensor in weights.tensors
        ]
        # Its weights come out of the optimizer's states.
        is_engine = weights.format is Format.DEEPSPEED
        yield from judge_values(
            weights.label, tensors, partial(trained_for, contents.root, int(is_engine))
        )


class _Moments:
    """The moments of a checkpoint's optimizers, and DeepSpeed's fp32 masters where they are not
    read as its weights.

    ``hashed``: each with its scan. ``files``: of the optimizers. ``unread``: what could not be
    opened, in words.
    """

    def __init__(
        self, contents: Contents, target: Target, progress: Progress | None, executor: Executor
    ) -> None:
        self.unread: tuple[str, ...] = ()
        self.hashed: dict[str | TensorLocation, Hashed] = {}
        self.files: frozenset[str] = frozenset()
        self._tensors: dict[TensorLocation, StoredTensor] = {}
        try:
            states = open_optimizers(target.path)
        except (CkptfixError, OSError) as error:
            self.unread = (f"values of optimizers: {described(error)}",)
            return
        self.files = frozenset(str(file) for state in states for file in state.files)
        is_engine = any(weights.format is Format.DEEPSPEED for weights in contents.weights)
        for state in states:
            for name, values in state.states.items():
                for key, value in values.items():
                    if isinstance(value, StoredTensor):
                        words = f"{key} of {name if state.is_named else f'parameter {name}'}"
                        self._tensors[TensorLocation(state.label, words)] = value
            for name, master in {} if is_engine else state.masters.items():
                self._tensors[TensorLocation(state.label, f"master of {name}")] = master
        jobs = [TensorJob(tensor, scan=True) for tensor in self._tensors.values()]
        self.hashed = dict(
            zip(self._tensors, hash_all(jobs, progress=progress, executor=executor), strict=True)
        )
        contents.check_unchanged()

    def findings(self) -> Iterator[ValueFinding]:
        """Yield the tensors that hold NaN or Inf. Zeros are not judged: many moments begin with
        zeros, and stay so.
        """
        for place, tensor in self._tensors.items():
            yield from judge_moment(place.label, tensor._replace(fqn=place.fqn), self.hashed[place])


def _lost(contents: Contents, recorded: Recorded, *, data: bool) -> Iterator[str]:
    """Yield in words which tensors were to be read, and cannot be found: those with a digest, with
    ``data`` any.
    """
    counts = Counter((place.label, why) for place, why in recorded.lost(contents))
    for (label, why), count in counts.items():
        yield f"{count_of(count, 'tensor')} of {label}: {why}"
    told = {why for _, why in counts}
    for label, why in contents.unreadable.items():
        if data and why not in told:
            yield f"values of {label}: {why}"


def _not_looked_at(
    contents: Contents,
    hashed: Mapping[str | TensorLocation, Hashed],
    told: tuple[str, ...],
    read: frozenset[str],
    *,
    data: bool,
) -> Iterator[str]:
    """Yield in words what was not looked at, but for the files of which ``told`` says so.

    ``read``: the files of optimizers that were looked at.
    """
    if not data:
        yield "values of tensors (NaN, Inf, zeros); ckptfix verify --data reads them"
    else:
        yield "values of states other than weights and moments, such as custom objects"
        beside = [
            name
            for name in contents.beside()
            if name not in read and not any(words.startswith(f"{name}: ") for words in told)
        ]
        if beside:
            files = count_of(len(beside), "weight file")
            yield f"values of {files} next to those that are loaded: {list_names(beside)}"
        spread = sum(one.scan is not None and one.scan.zero_runs is None for one in hashed.values())
        if spread:
            yield (
                f"lost pages in {count_of(spread, 'tensor')} whose elements are not contiguous in "
                "the file"
            )
    for weights in contents.weights:
        if weights.opaque:
            names = list_names(weights.opaque)
            yield f"values in {weights.label} that are not plain tensors: {names}"
    for label, why in contents.unreadable.items():
        yield f"tensors of {label}: {why}"

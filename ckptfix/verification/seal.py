"""``seal``: write the digest of every file and of every tensor into the manifest of a
checkpoint.
"""

import hashlib
import importlib.metadata
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.downloads import OF_THE_CLIENT
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.manifest import MAX_MANIFEST, RANGE, Manifest
from ckptfix.diagnosis.contents import (
    Contents,
    Recorded,
    TensorLocation,
    read_contents,
    readable_manifest,
    sealed_entry,
)
from ckptfix.diagnosis.findings.base import Finding, Severity, finding_lines
from ckptfix.diagnosis.target import find_target
from ckptfix.errors import OperationError, UsageError
from ckptfix.reports import Serialized
from ckptfix.storage.atomic import sync_folder
from ckptfix.storage.backends import locked
from ckptfix.storage.edits import Replace
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    etag_of,
    exists,
    is_symlink,
    lexists,
    on_disk,
    store_of,
)
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, MANIFEST, SIGNED, UNSIGNED, command, refusal
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Recipe
from ckptfix.storage.results import PartialResults, default_folder
from ckptfix.storage.staged import temporary_file
from ckptfix.storage.transactions import Backend, TransactionPlan, commit
from ckptfix.tensors.hashing import WHOLE, Hashed, Scheme
from ckptfix.verification.digests import compare
from ckptfix.verification.download_digests import recorded_download, without_client
from ckptfix.verification.signatures import Signing
from ckptfix.verification.statements import (
    statement_of_files,
    statement_of_tensors,
    uncovered_weights,
)
from ckptfix.verification.verify import (
    FileDigest,
    Structure,
    as_recorded,
    forbids_seal,
    has_digests,
    hash_contents,
    recorded_schemes,
    settled,
    structure,
)
from ckptfix.verification.verify_report import Change, Downloaded, Item, Outcome, differing_lines
from ckptfix.wording import Line, Printable, count_of, human_size, line

if TYPE_CHECKING:
    from ckptfix.storage.stores import Store


class SealReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Receipt of ``seal``. ``findings`` and ``differing`` say why nothing was written, where
    ``written`` is False.

    ``files``, ``tensors``: how many got a digest, a tensor once for each of its names. ``ranges``:
    how many ranges of long files got one. ``unreadable``: models whose tensors got none,
    ``special``: what is not a file and got none, with the reason. ``transaction``: its number for
    ``undo``, in a folder with repairs that can be undone. ``statements``: the names of the
    statements that were written, ``signed_by``: who signed them, "" where nobody did; ``trust``:
    the options of ``verify`` that name the signer. ``hub``: the download that the files were
    compared with, and ``proven``: how many are equal to it.
    """

    json_keys: ClassVar = (
        "path status written manifest files tensors ranges bytes=nbytes findings differing "
        "unreadable special transaction statements signed_by hub? proven?"
    )

    path: AnyPath
    written: bool
    findings: tuple[Finding, ...] = ()
    differing: tuple[Item, ...] = ()
    files: int = 0
    tensors: int = 0
    ranges: int = 0
    nbytes: int = 0
    unreadable: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    transaction: int | None = None
    statements: tuple[str, ...] = ()
    signed_by: str = ""
    trust: str = ""
    hub: Downloaded | None = None
    proven: int = 0

    @property
    def status(self) -> int:
        """Exit status: 0 when the manifest was written, else 1."""
        return int(not self.written)

    def lines(self) -> Iterator[Line]:
        """Yield why nothing was written, or what was, and the next command."""
        yield from finding_lines(self.findings, str(self.path))
        yield from differing_lines(self.differing)
        if not self.written:
            is_damaged = any(one.severity is Severity.ERROR for one in self.findings)
            what = "is damaged" if is_damaged else "is incomplete"
            if self.differing:
                what = (
                    "differs from its manifest"
                    if self.hub is None
                    else f"differs from {self.hub.name}"
                )
            yield line(f"{self.path} {what}: nothing was written", bold=True)
            yield line(f"next: {self._mend()}")
            force = command("seal", self.path, "", "--force")
            yield line(f"or seal it anyway, and verify will treat this as the original: {force}")
            return
        tensors = f" and {count_of(self.tensors, 'tensor')}" if self.tensors else ""
        ranges = f", long files in {count_of(self.ranges, 'range')} of 1 GB" if self.ranges else ""
        size = human_size(self.nbytes)
        yield line(
            f"sealed {self.path}: {count_of(self.files, 'file')}{tensors}, {size}{ranges}",
            bold=True,
        )
        if self.hub is not None:
            proven = count_of(self.proven, "file")
            yield line(
                f"proven by the hub's digests of {self.hub.name}: {proven}"
                if self.proven
                else f"not compared: {self.hub.lost_weights}"
            )
        yield line(f"written: {', '.join((MANIFEST, *self.statements))}")
        if self.signed_by:
            yield line(f"signed by {self.signed_by}: {', '.join(self.statements)}")
        elif self.statements:
            yield line(
                f"not signed, so anyone could have written this: {', '.join(self.statements)}",
                colour="yellow",
            )
        yield from (line(f"not sealed: tensors of {words}") for words in self.unreadable)
        yield from (line(f"not sealed: {words}") for words in self.special)
        if self.transaction is not None:
            undo = command("undo", self.path)
            yield line(f"to undo this seal (undo it before any earlier repair): {undo}")
        option = "--signature" if self.signed_by else "--oms"
        files = [part for name in self.statements for part in (option, str(self.path / name))]
        by_statements = f"{command('verify', self.path, '', *files)} {self.trust}".strip()
        if any(finding.severity is not Severity.NOTE for finding in self.findings):
            yield line("verify also reports these findings and exits with status 1")
        yield line(f"next: {by_statements if self.signed_by else command('verify', self.path)}")
        if self.signed_by:
            yield line(f"or, without verifying who signed: {command('verify', self.path)}")
        elif self.statements:
            yield line(f"or, without the manifest: {by_statements}")

    def _mend(self) -> str:
        """Return the command that mends what is in the way of a seal, or shows it."""
        if self.differing:
            return command("verify", self.path)
        if any(one.is_salvageable for one in self.findings):
            return f"{command('salvage', self.path)} NEW_FOLDER, to recover what is intact"
        if any(one.is_fixable for one in self.findings):
            return f"{command('repair', self.path)}, then: {command('seal', self.path)}"
        return command("check", self.path)

    @property
    def manifest(self) -> AnyPath | None:
        """The manifest that was written, None when nothing was."""
        return self.path / MANIFEST if self.written else None


@takes_urls("path")
def seal(
    path: Openable,
    *,
    force: bool = False,
    oms: bool = False,
    sign: Signing | None = None,
    ranges: bool = False,
    with_sha256: bool = False,
    tensors: bool = True,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> SealReceipt:
    """Write the sha256 of every file and tensor of a folder into its manifest, durably; its other
    entries stay.

    Without ``force`` some folders are not sealed: where ``check`` finds an error, or misses a file
    without which ``load_state`` fails; where the save was cut short; where something that the
    manifest lists is gone or changed. Added files are sealed. A download from the Hugging Face hub
    is compared with the records of its client, whose own files are left out. CRCs in files are
    compared, so that a flipped bit is not sealed as good. Where repairs can still be undone, the
    seal is a step that ``undo`` undoes before them.

    ``oms``: write statements as OpenSSF Model Signing v1.0 has them, too, of the files and of the
    tensors; ``sign``: sign them with a ``KeySigning`` or a ``SigstoreSigning``.

    ``ranges``: of a file longer than 1 GB write the sha256 of each 1 GB of it instead of its own,
    which is one chain from the first byte to the last; many threads and processes take those of
    ranges at once. Statements have them as shards. ``with_sha256``: write its own next to them.

    ``tensors``: off, write digests of files alone, which takes half of the hashing; ``verify`` then
    cannot name a tensor that changed, nor compare after a repair or in another format. Those that
    the manifest has are compared, and stay.

    ``executor``: shares the reading; its leader writes once all have read.

    Raises UsageError when no checkpoint folder is at ``path``, OperationError when it could not
    finish: nothing is changed then. OSError when the folder cannot be read or written.
    """
    target = find_target(path)
    if target.only is not None:
        raise UsageError(
            f"{target.path} is a file; to seal its folder: {command('seal', target.root)}"
        )
    contents = read_contents(target)
    if not oms and sign is None:  # a statement lists every file, or its own tools refuse the folder
        contents = without_client(contents)
    if (target.root / JOURNAL / UNFINISHED).exists() and not force:
        raise OperationError(
            f"{target.root} holds files of two saves: the last save was interrupted; next: save "
            f"again, or, to seal it anyway: {command('seal', target.root, '', '--force')}"
        )
    shape = structure(
        contents,
        target,
        data=True,
        leaves_records=True,
        verb="seal",
        progress=progress,
        executor=executor,
    )
    for words in shape.refused:
        if (
            words.partition("/ (")[0] not in contents.special
        ):  # a folder that cannot be listed is named as not sealed
            raise OperationError(f"{target.root}: nothing was written: {words}")
    findings = _serious(shape)
    if any(map(forbids_seal, findings)) and not force:
        return SealReceipt(path=target.path, written=False, findings=findings)
    with locked(target.root, "seal") if executor.leads else nullcontext() as backend:
        if any(one.state is State.PENDING for one in transactions(target.root)):
            raise OperationError(
                f"{target.root}: a repair was interrupted; next: {command('undo', target.root)}"
            )
        if backend is not None:
            backend.recover()  # what a run left that was killed before it changed anything
        old = readable_manifest(target.root)
        recorded = Recorded(old, target)
        hub = None
        if not has_digests(old) and (old is None or not old.is_of_a_save):
            hub = recorded_download(contents, target, uncovered_weights(contents))
            recorded = hub or recorded
        known, wanted = recorded_schemes(contents, recorded), _schemes(contents, ranges=ranges)
        # What is hashed to compare it with the hub's sha256 anyway is written, too: the hub shows
        # the same.
        own = contents.files if with_sha256 else hub.sha256_names if hub is not None else ()
        also = dict.fromkeys(own, WHOLE)
        tensors = tensors or bool(recorded.digests(contents.weights, ()))
        found = hash_contents(
            contents,
            known,
            wanted,
            also,
            records=shape.records,
            tensors=tensors,
            progress=progress,
            executor=executor,
        )
        for key, one in found.items():
            if one.problem:
                what = key.name if isinstance(key, FileDigest) else getattr(key, "path", key)
                raise OperationError(
                    f"{target.root}: {what} {refusal(one.problem)}; nothing was written"
                )
        findings = _serious(settled(found, shape, contents, target, progress, executor))
        if any(map(forbids_seal, findings)) and not force:
            return SealReceipt(path=target.path, written=False, findings=findings)
        items = tuple(compare(contents, recorded, as_recorded(found, known)))
        downloaded = None
        if hub is not None:
            items, downloaded, _ = hub.judged(items)
        differing = tuple(
            item
            for item in items
            if item.outcome is Outcome.DIFFER
            and item.change is not Change.EXTRA
            # Versions before 0.6.0 sealed the records of the hub's client, too.
            and not item.name.startswith(f"{OF_THE_CLIENT}/")
        )
        if differing and not force:
            return SealReceipt(path=target.path, written=False, differing=differing, hub=downloaded)
        hashed = contents if tensors else replace(contents, weights=())
        statements: dict[str, bytes] = {}
        if (oms or sign is not None) and executor.leads:
            statements = _statements(hashed, as_recorded(found, wanted), sign, ranges=ranges)
        new = {}
        for name, data in statements.items():
            before, now = (
                found.get(FileDigest(name, WHOLE)),
                Hashed(hashlib.sha256(data).hexdigest()),
            )
            found[FileDigest(name, WHOLE)], wanted[name] = now, WHOLE
            if before is None or before.digest != now.digest:
                new[name] = data
        manifest = _sealed(
            old, hashed, as_recorded(found, wanted), as_recorded(found, {**wanted, **also})
        )
        number = None
        with executor.as_one():  # nothing is written where one of several processes has failed
            contents.check_unchanged()
        if backend is not None:
            number = _write(backend, manifest, new) if new or manifest != old else None
            # Of several processes that were interrupted.
            if isinstance(target.root, Path):
                PartialResults(default_folder(target.root)).remove()
    return SealReceipt(
        path=target.path,
        written=True,
        findings=findings,
        differing=differing,
        files=len(contents.files.keys() - statements.keys()),
        tensors=sum(len(entry.digests.keys() | entry.aliases.keys()) for entry in manifest.models),
        ranges=sum(map(len, manifest.ranges.values())),
        nbytes=sum(one.size for name, one in contents.files.items() if name not in statements),
        unreadable=tuple(
            f"{label}: {why}"
            for label, why in {**contents.unreadable, **contents.unsupported}.items()
        ),
        special=tuple(f"{name}: {why}" for name, why in contents.special.items()),
        transaction=number,
        statements=tuple(statements),
        signed_by=sign.by if sign is not None else "",
        trust=sign.trust if sign is not None else "",
        hub=downloaded,
        proven=(
            sum(item.outcome is Outcome.MATCH for item in items) if downloaded is not None else 0
        ),
    )


def _serious(shape: Structure) -> tuple[Finding, ...]:
    return tuple(
        one for one in shape.findings if one.severity is not Severity.NOTE or forbids_seal(one)
    )


def _schemes(contents: Contents, *, ranges: bool) -> dict[str, Scheme]:
    """Return how each file is hashed for a new manifest. Of one that is not longer than a range,
    both are the same.
    """
    by_range = Scheme(shard_size=RANGE)
    return {
        name: by_range if ranges and state.size > RANGE else WHOLE
        for name, state in contents.files.items()
    }


def _statements(
    contents: Contents,
    hashed: Mapping[str | TensorLocation, Hashed],
    sign: Signing | None,
    *,
    ranges: bool,
) -> dict[str, bytes]:
    """Return the statements of files and of tensors, signed where somebody signs: name of the file
    -> bytes.

    Raises OperationError where the reference implementation would refuse the folder.
    """
    for name, why in contents.special.items():
        raise OperationError(
            f"{contents.root / name}: {why}, which OpenSSF Model Signing cannot cover; nothing was "
            "written; next: remove it, or write only the manifest: "
            f"{command('seal', contents.root)}"
        )
    name = contents.root.resolve().name or "checkpoint"
    digests = {path: hashed[path].digest for path in contents.files}
    folders = {str(parent) for path in contents.files for parent in PurePosixPath(path).parents}
    follows = any(is_symlink(contents.root / path) for path in (*contents.files, *folders - {"."}))
    sizes = {path: state.size for path, state in contents.files.items()}
    files = statement_of_files(
        name,
        digests,
        contents.journals,
        sizes,
        follows_links=follows,
        shard_size=RANGE if ranges else None,
    )
    made = [files.to_bytes()]
    if contents.weights:
        made.append(statement_of_tensors(name, contents, hashed).to_bytes())
    if sign is None:
        return dict(zip(UNSIGNED, made, strict=False))
    return dict(zip(SIGNED, sign.sign(made), strict=False))


def _sealed(
    old: Manifest | None,
    contents: Contents,
    hashed: Mapping[str | TensorLocation, Hashed],
    own: Mapping[str | TensorLocation, Hashed],
) -> Manifest:
    """Return the manifest with all digests. What a save recorded of what is still there stays.

    ``own``: the same, with the digest of each file itself where that is written next to those of
    its ranges.
    """
    digests = {
        key: one.digest for key, one in sorted(hashed.items(), key=str) if isinstance(key, str)
    }
    ranges = {name: tuple(digest.split("-")) for name, digest in digests.items() if "-" in digest}
    if old is None:
        versions = {}
        # Run from a folder that was never installed.
        with suppress(importlib.metadata.PackageNotFoundError):
            versions["ckptfix"] = importlib.metadata.version("ckptfix")
        old = Manifest(versions=versions, world_size=0, step=0)
    known = {entry.file: entry for entry in old.models}
    models = {
        weights.label: sealed_entry(
            known.get(weights.label),
            weights,
            {
                one.fqn: hashed[TensorLocation(weights.label, one.fqn)].digest
                for one in weights.tensors
            },
        )
        for weights in contents.weights
    }
    others = (replace(entry, digests={}) for entry in old.models if entry.file not in models)
    return replace(
        old,
        digests_of_save=False,
        models=tuple(
            sorted((*models.values(), *others), key=lambda entry: (entry.index, entry.file))
        ),
        files={name: contents.files[name].size for name in old.files if name in contents.files},
        sha256={name: own[name].digest for name in digests if "-" not in own[name].digest},
        range_size=RANGE if ranges else 0,
        ranges=ranges,
    )


def _put(root: AnyPath, store: "Store", files: Mapping[str, bytes]) -> None:
    """Put files next to the objects, the manifest last: it replaces only the one that was read.
    Raises ChangedError.
    """
    from ckptfix.storage.stores import ABSENT

    for name, data in files.items():
        expected = etag_of(root / name) if exists(root / name) else ABSENT
        store.put(name, data, expected=expected)


def _write(backend: Backend, manifest: Manifest, statements: Mapping[str, bytes]) -> int | None:
    """Put the statements in their places, then the manifest by one rename, which lists them.

    Returns the number of the transaction, if there has to be one.
    """
    root, data = backend.root, manifest.to_bytes()
    if len(data) > MAX_MANIFEST:
        raise OperationError(
            f"{root}: the manifest would be too large: {len(data)} bytes (limit {MAX_MANIFEST})"
        )
    files = {**statements, MANIFEST: data}
    store = store_of(root)
    if not transactions(root):
        if store is None:
            _rename(on_disk(root), files)
        else:
            _put(root, store, files)
        return None
    mode = 0o644 if store is not None else _mode_of_new(on_disk(root))
    # The files as they are before a repair need the manifest as it was then: an undo undoes this
    # one first.
    edits = [
        Replace(
            path=PurePosixPath(name),
            content=Recipe(pieces=(Literal(content),), mode=mode),
            previous=KEPT if lexists(root / name) else ABSENT,
        )
        for name, content in files.items()
    ]
    summary = [
        f"write the digests of {count_of(len(manifest.sha256), 'file')} to {', '.join(files)}"
    ]
    # Hundreds of KiB may travel to a store that cannot compose objects.
    plan = TransactionPlan(edits=edits, target="", summary=summary)
    return commit(backend, plan, lambda: None, transfer=True)


def _rename(root: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a folder by renames, the manifest last.

    They are written in the journal's folder: next to the files of the checkpoint, one that a kill
    left would be sealed as theirs.
    """
    with ExitStack() as waiting:
        new = {
            name: waiting.enter_context(
                temporary_file(root / JOURNAL / PurePosixPath(name).name, one)
            )
            for name, one in files.items()
        }
        for name, one in new.items():
            os.replace(one, root / name)
        sync_folder(root / JOURNAL)
        sync_folder(root)


def _mode_of_new(root: Path) -> int:
    """Return the mode bits of a new file in a folder, as the umask and the folder's own rules make
    them.
    """
    with temporary_file(root / JOURNAL / PurePosixPath(MANIFEST).name, b"") as probe:
        return stat.S_IMODE(probe.stat().st_mode)

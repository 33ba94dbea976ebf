"""The source of a migration: intact before it is read, and unchanged afterwards."""

import hashlib
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.folder_names import describe_folder_name, parse_folder_name
from ckptfix.checkpoint.keys import collapse, common_wrappers, dotted, is_nested
from ckptfix.checkpoint.manifest import Manifest, not_as_saved, unexplained
from ckptfix.conversion.checksums import Part, combined, damaged
from ckptfix.conversion.migration_plan import MigrationPlan, PlannedModel
from ckptfix.conversion.target_names import LeftOut
from ckptfix.diagnosis import contents
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.contents import lasting_label
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.catalogue import INCOMPLETE
from ckptfix.diagnosis.findings.damaged import CrcMismatch, TrailingBytes
from ckptfix.diagnosis.findings.duplicates import NestedPrefix
from ckptfix.diagnosis.findings.incomplete import FlatParameters
from ckptfix.diagnosis.findings.sharded import IndexMismatch
from ckptfix.diagnosis.policy import Keys
from ckptfix.diagnosis.resumable import mixed
from ckptfix.diagnosis.target import Target
from ckptfix.diagnosis.wrapped_keys import STATE_DICT
from ckptfix.errors import ChangedError, FormatError, OperationError, UsageError
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.storage.files import AnyPath, names_in
from ckptfix.storage.journal import transactions
from ckptfix.storage.parallel import Control
from ckptfix.storage.paths import MANIFEST, command, listed_files, shell_path
from ckptfix.storage.reading import ABSENT, OpenFiles, Piece, identity, open_reader, page_buffer
from ckptfix.tensors.stored import Format, StoredCheckpoint, Weights
from ckptfix.wording import count_of

_BLOCK = 1 << 20
_ZIP = b"PK\3\4"
_OTHER_BYTES = "does not match its digest in the manifest"


class SourceDigests:
    """The manifest of a source: tensor -> digest of each model, and file -> sha256.

    Raises OperationError when it lists other keys than the source has.
    """

    def __init__(self, plan: MigrationPlan, manifest: Manifest | None) -> None:
        root = plan.source.root
        self._plan = plan
        self._has_other_dtypes = plan.options.original
        recorded = contents.Recorded(manifest, Target(root, plan.source.only))
        self._sha256 = {name: one for name, one in recorded.sha256.items() if "-" not in one}
        labelled = [replace(one, label=lasting_label(one, root)) for one in plan.source.weights]
        self._digests: list[dict[str, str]] = [{} for _ in labelled]
        number = {one.label: position for position, one in enumerate(labelled)}
        # Other copies of the weights, which nothing reads.
        passed_over = set(map(str, plan.source.rivals))
        for place, digest in recorded.digests(labelled, ()).items():
            if place.label in passed_over:
                continue
            if place.label not in number:
                self._raise(f"{place.label} is listed in the manifest, but missing")
            self._digests[number[place.label]][place.fqn] = digest
        for one, digests in zip(labelled, self._digests, strict=True):
            for name in sorted(digests.keys() ^ one.named().keys()) if digests else ():
                what = (
                    "listed in the manifest, but missing"
                    if name in digests
                    else "not listed in the manifest"
                )
                self._raise(f"{one.label}: {name!r} is {what}")

    @property
    def has_digests(self) -> bool:
        """Return whether the manifest has a digest of a migrated tensor."""
        return any(self._digests) and not self._has_other_dtypes

    def not_checked(self) -> Iterator[str]:
        """Yield in words the digests that are not compared."""
        converted = sum(
            model.sources[new].convert is not None or self._has_other_dtypes
            for model, digests in zip(self._plan.models, self._digests, strict=True)
            for old, new in _new_names(model).items()
            if old in digests
        )
        if converted:
            yield (
                f"whether {count_of(converted, 'tensor')} with a new dtype matched the manifest of "
                f"the source; next: {command('verify', self._plan.source.root)}"
            )

    def compare(self, digests: tuple[Mapping[str, str], ...]) -> None:
        """Raise OperationError for a tensor whose bytes differ from its digest."""
        for model, recorded, read in zip(
            self._plan.models,
            self._digests,
            digests if self.has_digests else (),
            strict=self.has_digests,
        ):
            new = _new_names(model)
            for name, digest in recorded.items():
                source = new[model.before.ties.get(name, name)]
                if model.sources[source].convert is None and read[source] != digest:
                    self._raise(f"{model.label}: {name!r} {_OTHER_BYTES}")

    def compare_file(self, name: str, sha256: str) -> None:
        """Raise OperationError when a copied file differs from its digest."""
        if self._sha256.get(name, sha256) != sha256:
            self._raise(f"{name} {_OTHER_BYTES}")

    def lists(self, name: str) -> bool:
        """Return whether the manifest has the sha256 of a file."""
        return name in self._sha256

    def _raise(self, what: str) -> None:
        root = self._plan.source.root
        raise OperationError(
            f"{root}: {what}: damaged, or changed after it was sealed; nothing was written; next: "
            f"{command('verify', root)}, or, if the change is intended: "
            f"{command('seal', root, '', '--force')}"
        )


def _new_names(model: PlannedModel) -> dict[str, str]:
    """Return old key -> new key of the tensors of a model, whose new weights may end with copies of
    ties.
    """
    pairs = zip(model.before.tensors, model.weights.tensors, strict=False)
    return {before.fqn: after.fqn for before, after in pairs}


def check_record(piece: Piece, crc: int, parts: Mapping[int, Part], control: Control) -> None:
    """Read what is left of a record. ``parts``: offset -> a part that was read already.

    Raises OperationError when the record has another CRC-32, OSError, ``Stopped``.
    """
    found, place, end = 0, piece.offset, piece.offset + piece.length
    begins = sorted(parts)
    with OpenFiles() as files:
        while place < end:
            part = parts.get(place)
            if part is not None:
                found, place = combined(found, part.crc, part.length), place + part.length
                continue
            number = bisect_right(begins, place)
            stop = begins[number] if number < len(begins) else end
            for block in files.blocks(
                (Piece(piece.path, place, stop - place),), page_buffer(_BLOCK)
            ):
                control.go_on()
                found = zlib.crc32(block, found)
            place = stop
    if found != crc:
        raise damaged(piece, found, crc)


def check_archive(path: AnyPath, control: Control) -> None:
    """Read a file that is copied, if it is a zip file of torch.

    Raises OperationError when a record has another CRC-32, OSError, ``Stopped``.
    """
    with open_reader(path) as reader:
        if reader.size < len(_ZIP) or reader.read(0, len(_ZIP)) != _ZIP:
            return
        try:
            archive = read_zip(reader)
        except FormatError:
            return  # not an archive of torch: custom objects can be any zip file
        for record in crc_mismatches(archive, reader, every_record=True, progress=control.go_on):
            raise OperationError(
                f"{path}: CRC-32 mismatch in the record {record.name!r} (expected "
                f"{record.crc:08x}): the file is damaged; nothing was written; next: "
                f"{command('check', path, '', '--data')}"
            )


def sha256_of(path: AnyPath, control: Control) -> str:
    """Return the sha256 of a file, in hex. Raises OSError, ``Stopped``."""
    digest = hashlib.sha256()
    buffer = page_buffer(_BLOCK)
    with open_reader(path) as reader:
        for offset in range(0, reader.size, _BLOCK):
            control.go_on()
            view = buffer[: min(_BLOCK, reader.size - offset)]
            reader.fill(view, offset)
            digest.update(view)
    return digest.hexdigest()


_CALLED_SO = re.compile(
    r"(.+_)?config\.json|.*token.*\.(json|model)|vocab\.(json|txt)|merges\.txt|spiece\.model|"
    r"(model_)?index\.json|chat_template.*|README\.md|LICENSE.*|\.gitattributes|training_args\.bin|"
    r"trainer_state\.json|(scheduler|optimizer|rng_state.*)\.(pt|pth)|latest|zero_to_(fp32|torch)\.py|"
    r"(__[0-9]+|\.rank[0-9]+)?\.metadata(\.tmp)?|.+\.distcp"
)
"""Pattern of the names that libraries give to files next to weights, and of DCP's files; it may
match too many.
"""


class Watch:
    """Record of every file at a path before any was read, to be compared at the end.

    Raises OSError when a folder cannot be listed.
    """

    def __init__(self, path: AnyPath) -> None:
        self._is_folder = path.is_dir()
        self._root = path if self._is_folder else path.parent
        self._names = self._listed()
        looks = ((name, identity(self._root / name)) for name in self._names)
        self._before = {name: look for name, look in looks if look != ABSENT}
        self._folders = {PurePosixPath(name).parent for name in self._names} | {PurePosixPath(".")}

    def check(self, files: Iterable[str]) -> None:
        """Raise ChangedError when a file changed, as the result would mix two states, or when a
        file of a checkpoint was added, which the result would lack.
        """
        for name in files:
            now = identity(self._root / name)
            if now == ABSENT or self._before.setdefault(name, now) != now:
                raise self._changed(f"{self._root / name} changed while it was read")
        for name in self._listed() - self._names if self._is_folder else ():
            if self._belongs(PurePosixPath(name)):
                raise self._changed(f"{self._root / name} was added while the source was read")

    def _belongs(self, path: PurePosixPath) -> bool:
        """Return whether a file belongs to the scanned checkpoint; one in a new sub-folder does
        not.
        """
        is_part = bool(path.parts[:-1]) and describe_folder_name(path.parts[0]) is not None
        return is_part or (path.parent in self._folders and _is_called_as_a_part(path.name))

    def _changed(self, what: str) -> ChangedError:
        return ChangedError(
            f"{what}; nothing was written; run again when nothing writes to the source"
        )

    def _listed(self) -> frozenset[str]:
        if not self._root.is_dir():
            return frozenset()  # opening it raises the error
        return frozenset(listed_files(self._root) if self._is_folder else names_in(self._root))


def _is_called_as_a_part(name: str) -> bool:
    return parse_file_name(name) is not None or _CALLED_SO.fullmatch(name) is not None


def files_read(plan: MigrationPlan) -> Iterator[str]:
    """Yield every file that a plan reads, relative to the root of its source."""
    models = (file for model in plan.source.weights for file in model.files)
    yield from {str(file): None for file in (*models, *plan.old_state_files)}
    yield from map(str, plan.carried)
    yield from (str(file.path) for file in plan.rewritten)


def ensure_finished(source: StoredCheckpoint) -> None:
    """Raise OperationError, with what to type, when a repair or a save in the source's folder was
    interrupted.
    """
    root = source.root
    for one in transactions(root):
        if one.is_interrupted:
            raise OperationError(
                f"{root}: a repair was interrupted (transaction {one.number}) and left the files "
                f"partly changed; next: {command('undo', root)}"
            )
    if words := mixed(root):
        raise OperationError(f"{words}; next: {command('check', root)}")


def ensure_complete(root: AnyPath, manifest: Manifest) -> tuple[LeftOut, ...]:
    """Raise OperationError when files of the checkpoint that its manifest lists are missing, or
    have another size.

    Returns the other missing files of the manifest: the user's own. Repairs by old versions left
    the sizes of the save in the manifest: then only names are compared.
    """
    wrong = list(map(str, unexplained(root, not_as_saved(root, manifest), by_manifest=True)))
    gone = [
        name
        for name in manifest.digests
        if name not in manifest.files and not (root / name).exists()
    ]
    wrong += [f"{name} is missing" for name in gone if _is_of_a_checkpoint(PurePosixPath(name))]
    if wrong:
        raise OperationError(
            f"{root} does not match its manifest: {'; '.join(wrong[:3])}; next: "
            f"{command('verify', root)}, or, if the folder is correct: rm "
            f"{shell_path(root / MANIFEST)}"
        )
    return tuple(LeftOut(name, "listed in the manifest, but missing") for name in gone)


def _is_of_a_checkpoint(path: PurePosixPath) -> bool:
    """Return whether a file is part of a checkpoint, by its name or that of a folder around it."""
    if parse_file_name(path.name) is not None:
        return True
    return any(parse_folder_name(part) is not None for part in path.parts[:-1])


_DAMAGE = (*INCOMPLETE, CrcMismatch, FlatParameters, IndexMismatch)


def warnings_of_source(
    path: AnyPath, weights: Sequence[Weights], keys: Keys | None, *, allow_damage: bool = False
) -> tuple[str, ...]:
    """Return in words the problems of a source that its copy will have, too: duplicate models,
    nested keys.

    Models lie in sub-folders, too, into which ``check`` does not look from above. Raises
    OperationError for damage, UsageError where ``keys`` is ambiguous for this source.
    ``allow_damage``: go on with errors that a repair of the source would mend. Checksums of records
    are compared while they are read, not here.
    """
    homes = sorted({PurePosixPath(), *(one.home for one in weights)})
    findings = {home: _findings(path / home) for home in homes}
    for home in homes:
        _ensure_sound(path / home, findings[home], keys, allow_damage=allow_damage)
    words = tuple(
        words for home in homes for words in _warnings_of_folder(path / home, findings[home], keys)
    )
    if keys is Keys.AUTO:
        for one in weights:
            _ensure_decided(path, one, findings[one.home])
    return words


def _ensure_decided(path: AnyPath, weights: Weights, findings: Iterable[Finding]) -> None:
    """Raise UsageError where every key has nested wrappers, and a repair of the source would not
    collapse them.
    """
    chain = common_wrappers([tensor.fqn for tensor in weights.tensors] + list(weights.ties))
    if not is_nested(chain):
        return
    scope = str(NameScope(weights.path, STATE_DICT, (), ()))
    for finding in findings:
        if (
            isinstance(finding, NestedPrefix)
            and finding.is_fixable
            and weights.home / finding.path in weights.files
            and (finding.scope == scope or weights.format is Format.DCP)
            and finding.target == collapse(chain)
        ):
            return
    raise UsageError(
        f"{weights.label}: every key begins with {dotted(chain)!r}, and nothing in {path} shows "
        "which wrappers the script itself adds; nothing was written; next: use --keys bare if the "
        "model is not wrapped, --keys ddp if it is in DistributedDataParallel, or leave --keys out"
    )


def _findings(path: AnyPath) -> tuple[Finding, ...]:
    try:
        return check(path).findings
    except UsageError:
        return ()  # migrate has read what ``check`` skips, to find the tensors


def _ensure_sound(
    path: AnyPath, findings: tuple[Finding, ...], keys: Keys | None, *, allow_damage: bool
) -> None:
    """Raise OperationError for lost bytes, and for errors of which only the source shows how to
    repair them.
    """
    lost = [finding for finding in findings if isinstance(finding, _DAMAGE)]
    # Of a doubled save, a DCP folder keeps no trace of the second wrapper, so that a repair of the
    # copy has to ask.
    kept = [finding for finding in findings if _is_kept_error(finding, keys)]
    # Bytes that were inserted in the middle, too, leave a surplus at the end.
    surplus = [
        finding
        for finding in findings
        if isinstance(finding, TrailingBytes) and finding.severity is Severity.ERROR
    ]
    damage = lost or ([] if allow_damage else kept or surplus)
    if not damage:
        return
    more = f" (and {count_of(len(damage) - 1, 'more finding')})" if len(damage) > 1 else ""
    if lost:
        why, following = "the copy would look intact", f"next: {_next(path, damage[0])}"
    elif not kept:
        why = "the copy would look intact, although its values may be shifted"
        cut = command("repair", path, "", "--allow", TrailingBytes.code)
        following = f"next: {cut}, or migrate the values as they are: --allow-damage"
    else:
        why = "the copy would keep this error, with less evidence for a repair"
        following = f"next: {command('repair', path)}, or copy the error too: --allow-damage"
    raise OperationError(
        f"{path}: {damage[0].code}: {damage[0]}{more}; {why}; nothing was written; {following}"
    )


def _is_kept_error(finding: Finding, keys: Keys | None) -> bool:
    """Return whether a repair of the source fixes this error, and a migration with these ``keys``
    does not.
    """
    is_mended = isinstance(finding, NestedPrefix) and keys is not None
    return finding.severity is Severity.ERROR and finding.is_fixable and not is_mended


def _warnings_of_folder(
    path: AnyPath, findings: tuple[Finding, ...], keys: Keys | None
) -> Iterator[str]:
    for finding in findings:
        if _is_kept_error(finding, keys):
            yield (
                f"--allow-damage: the copy still has {finding.code}: {finding}; next, before you "
                f"migrate again: {command('repair', path)}"
            )
        elif finding.severity is not Severity.NOTE:
            yield f"the source has {finding.code}: {finding}; next: {command('check', path)}"


def _next(path: AnyPath, finding: Finding) -> str:
    if isinstance(finding, IndexMismatch) and finding.is_fixable:
        return command("repair", path)
    if isinstance(finding, FlatParameters):
        return (
            "save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT in the run that wrote it"
        )
    if finding.is_salvageable:
        return (
            f"{command('check', path)}, or, to recover what is intact: {command('salvage', path)} "
            "NEW_FOLDER"
        )
    return command("check", path)

"""Damage in single files, in shards, files of ranks and DeepSpeed.

Files of DeepSpeed are never renamed: each rank's file repeats their names in several places.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.deepspeed_files import (
    MissingRankError,
    OtherKindError,
    deepspeed_folders,
    deepspeed_paths,
    is_deepspeed_file,
    universal_paths,
)
from ckptfix.checkpoint.folder import (
    CheckpointFolder,
    Component,
    Problem,
    ProblemKind,
    as_damage,
    is_unreadable,
    scan_folder,
)
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import (
    FOLDER,
    FOUND_BY_TORCH,
    CompressedRecord,
    CrcMismatch,
    IgnoredBytes,
    MalformedFile,
    NoFormatMetadata,
    NotATensorFile,
    OtherFormat,
    TrailingBytes,
    TruncatedFile,
    UncheckedFile,
)
from ckptfix.diagnosis.findings.incomplete import MissingRank
from ckptfix.diagnosis.pickle_loaders import diagnose_pickle
from ckptfix.errors import CkptfixError, FormatError, OperationError
from ckptfix.formats.safetensors_file import COPIED_AS_TEXT, SafetensorsFile, has_converted_lines
from ckptfix.formats.torch_file import TorchFile, crc_mismatches
from ckptfix.formats.torch_zip import TorchZip, records_with_crc
from ckptfix.storage.executor import THREADS, Executor, each
from ckptfix.storage.files import AnyPath, names_in, stat_of
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import FileIdentity, open_reader
from ckptfix.tensors.deepspeed import deepspeed_weights
from ckptfix.tensors.stored import Weights
from ckptfix.tensors.universal import ensure_states
from ckptfix.tensors.zero_partitions import partition_count
from ckptfix.wording import Brief, list_names

_UNKNOWN_TO_TORCH = ("F6_E2M3", "F6_E3M2")
"""Dtypes of safetensors that its reader for torch refuses (``get_tensor`` of safetensors 0.8)."""


class LeftRecord(NamedTuple):
    """A record of a zip file of torch, by where its bytes are, and its CRC.

    A check with ``data`` appends each to ``left``, a list of the caller's, instead of reading it:
    ``verify`` and ``seal`` read all files anyway, and compare the CRC while they do.
    """

    path: AnyPath
    offset: int
    size: int
    crc: int


class Reading(NamedTuple):
    """The part of a checkpoint that is read, by default headers and a few pages of tensors.

    ``data``: the bytes of all look-alikes, and of all records with a CRC. ``progress`` is called
    with byte counts. ``left``: see ``LeftRecord``. ``executor``: shares the work of ``data``.
    """

    data: bool = False
    progress: Progress | None = None
    left: list[LeftRecord] | None = None
    executor: Executor = THREADS


HEADERS = Reading()
"""The reading of a check without options."""


def diagnose_files(
    folder: CheckpointFolder,
    reading: Reading = HEADERS,
    *,
    explained: frozenset[PurePosixPath] = frozenset(),
    crcs: "WrongCrcs | None" = None,
) -> list[Finding]:
    """Find the damage of each single file.

    With ``data`` the CRC of every record is compared, not only of small ones. ``explained``:
    unreadable files with another finding. ``crcs``: what is known of the CRCs already.
    """
    findings: list[Finding] = []
    # Next to the states of save_state, accelerate loads the model; weights alone are read by plain
    # torch.load.
    is_plain_model = not any(
        name.role not in (*NOT_STATES, Role.GRAD_SCALER) and not name.is_of_trainer
        for name in folder.file_names
    )
    # Without states of a library next to it, ``scaler.pt`` is what a script scales its data by.
    has_trainer = any(name.is_of_trainer for name in folder.file_names)
    contents = {one.path: one.content for one in folder.components if one.path not in explained}
    torch_files = {path: file for path, file in contents.items() if isinstance(file, TorchFile)}
    if crcs is None:
        crcs = _wrong_crcs(folder.root, torch_files, reading)
    for component in folder.components:
        if component.path in explained:
            continue
        if component.problem is not None:
            findings += problem_finding(component.path, component.problem)
        elif isinstance(component.content, SafetensorsFile):
            findings += _safetensors(folder.root, component, component.content)
        elif isinstance(component.content, TorchFile):
            is_of_data = component.role is Role.GRAD_SCALER and is_plain_model and not has_trainer
            findings += diagnose_pickle(
                component,
                component.content,
                is_plain_model=is_plain_model,
                is_of_script=component.name.is_of_script or is_of_data,
            )
            findings += _torch(component, component.content, crcs[component.path])
    return findings


WrongCrcs = Mapping[PurePosixPath, Sequence[tuple[str, str | None]]]
"""File -> name and storage key (or None) of each record whose bytes do not have their CRC."""

_AT_ONCE = 1 << 30
"""Bytes of records that are one unit of work for the processes of a team."""


def _wrong_crcs(
    root: AnyPath, files: Mapping[PurePosixPath, TorchFile], reading: Reading
) -> WrongCrcs:
    """Compare the CRC of the records of these files: with ``data`` of every record, which a team
    shares.
    """
    data, progress, left, executor = reading
    if not data:
        return {
            path: _read_crcs(root / path, file, slice(None), data, progress)
            for path, file in files.items()
        }
    if left is not None:
        left += (
            LeftRecord(root / path, record.data_offset, record.size, record.crc)
            for path, file in files.items()
            if isinstance(file.container, TorchZip)
            for record in records_with_crc(file.container)
        )
        return dict.fromkeys(files, ())
    parts = [
        (path, begin, end, size)
        for path, file in files.items()
        if isinstance(file.container, TorchZip)
        for begin, end, size in _stretches(file.container)
    ]

    def work(number: int, progress: Progress | None) -> list[tuple[str, str | None]]:
        path, begin, end, _ = parts[number]
        return _read_crcs(root / path, files[path], slice(begin, end), data, progress)

    units = [(root / path, (begin, end), size) for path, begin, end, size in parts]
    found: dict[PurePosixPath, list[tuple[str, str | None]]] = {path: [] for path in files}
    for (path, *_), pairs in zip(parts, each(executor, "crc", units, work, progress), strict=True):
        found[path] += [(name, key) for name, key in pairs]
    return found


def _stretches(archive: TorchZip) -> Iterator[tuple[int, int, int]]:
    """Cut the records of an archive: first and last number, and bytes, of at most 1 GiB but for a
    longer record.
    """
    begin = size = 0
    for number, record in enumerate(archive.records):
        if size and size + record.size > _AT_ONCE:
            yield begin, number, size
            begin, size = number, 0
        size += record.size
    yield begin, len(archive.records), size


def _read_crcs(
    path: AnyPath, file: TorchFile, among: slice, every_record: bool, progress: Progress | None
) -> list[tuple[str, str | None]]:
    with open_reader(path) as reader:
        return list(
            crc_mismatches(file, reader, every_record=every_record, among=among, progress=progress)
        )


def problem_finding(path: PurePosixPath, problem: Problem) -> list[Finding]:
    """Return the findings about a file that could not be parsed, none for one that may not be
    read.
    """
    match problem.kind:
        case ProblemKind.TRUNCATED:
            have, need, in_header = problem.have, problem.need, problem.in_header
            return [
                TruncatedFile(
                    path=path, have=have, need=need, detail=problem.message, in_header=in_header
                )
            ]
        case ProblemKind.NOT_A_TENSOR_FILE:
            return [NotATensorFile(path=path, content=problem.message)]
        case ProblemKind.MALFORMED:
            return [MalformedFile(path=path, detail=problem.message)]
        case ProblemKind.UNREADABLE:
            return []  # may be healthy: an unfinished check
        case ProblemKind.UNSUPPORTED:
            if problem.is_limit:
                return [UncheckedFile(path=path, detail=problem.message)]
            return []  # well formed, and listed under "not checked"


def _safetensors(root: AnyPath, component: Component, file: SafetensorsFile) -> list[Finding]:
    findings: list[Finding] = []
    if file.trailing and _was_copied_as_text(root / component.path, file):
        # Cut to its length, safetensors would load numbers out of shifted bytes, without an error.
        findings.append(MalformedFile(path=component.path, detail=COPIED_AS_TEXT))
    elif file.trailing:
        findings.append(TrailingBytes(path=component.path, end=file.data_end, extra=file.trailing))
    if "format" not in file.metadata:
        findings.append(NoFormatMetadata(path=component.path))
    elif file.metadata["format"] != "pt":
        findings.append(OtherFormat(path=component.path, format=file.metadata["format"]))
    refused = next((tensor for tensor in file.tensors if tensor.dtype in _UNKNOWN_TO_TORCH), None)
    # torch packs two of the 4-bit numbers into an element.
    odd = next(
        (tensor for tensor in file.tensors if tensor.dtype == "F4" and tensor.shape[-1] % 2), None
    )
    if refused is not None:
        detail = f"{refused.fqn!r} has dtype {refused.dtype}, which torch does not have"
        findings.append(MalformedFile(path=component.path, detail=detail))
    elif odd is not None:
        detail = (
            f"{odd.fqn!r} has dtype F4 and last dimension {odd.shape[-1]}: torch loads only even "
            "sizes"
        )
        findings.append(MalformedFile(path=component.path, detail=detail))
    return findings


def _was_copied_as_text(path: AnyPath, file: SafetensorsFile) -> bool:
    with suppress(OSError, CkptfixError), open_reader(path) as reader:
        return has_converted_lines(reader, file)
    return False


def _torch(
    component: Component, file: TorchFile, wrong: Sequence[tuple[str, str | None]]
) -> list[Finding]:
    findings: list[Finding] = []
    if file.trailing:
        end = component.size - file.trailing
        # A legacy file is read from its beginning.
        is_found = file.trailing <= FOUND_BY_TORCH or not isinstance(file.container, TorchZip)
        kind = IgnoredBytes if is_found else TrailingBytes
        findings.append(kind(path=component.path, end=end, extra=file.trailing))
    if isinstance(file.container, TorchZip):
        packed = tuple(record.name for record in file.container.records if not record.is_stored)
        prefix = f"{file.container.root}/data/"
        storages = sum(name.startswith(prefix) for name in packed)
        if packed:
            findings.append(
                CompressedRecord(path=component.path, records=packed, storages=storages)
            )
    for record, storage_key in wrong:
        tensors = (
            tuple(tensor.fqn for tensor in file.tensors_of(storage_key)) if storage_key else ()
        )
        findings.append(CrcMismatch(path=component.path, record=record, tensors=tensors))
    return findings


class DeepSpeedState(Brief, Struct, frozen=True, kw_only=True):
    """A DeepSpeed checkpoint in a folder, and its damage.

    ``files`` and ``size`` in bytes: 0 for the folder itself, whose components count anyway.
    ``tensors``: the number of its weights. ``unread``: the unread parts, in words; ``unfinished``:
    files that may not be read. ``has_checksums``: some files have checksums, which ``--data``
    compares. ``scanned``: the identity of each file. ``ranks``: the number of partitions by the
    first file of an optimizer that says it.
    """

    path: PurePosixPath
    findings: tuple[Finding, ...]
    files: int = 0
    size: int = 0
    tensors: int = 0
    unread: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    has_checksums: bool = False
    scanned: Mapping[PurePosixPath, FileIdentity] = field(default_factory=dict)
    ranks: int | None = None


def without_deepspeed(folder: CheckpointFolder) -> CheckpointFolder:
    """Return a folder without the files of DeepSpeed: the names in a single one of them prove
    nothing.
    """
    own = tuple(one for one in folder.components if not is_deepspeed_file(one.path.name))
    return replace(folder, components=own)


def diagnose_deepspeed(
    folder: CheckpointFolder, reading: Reading = HEADERS
) -> tuple[DeepSpeedState, ...]:
    """Diagnose each DeepSpeed checkpoint of a scanned folder.

    Raises OSError when a file that could be scanned can no longer be read.
    """
    if folder.only is not None:
        return ()
    return tuple(
        _state(folder, where, index, reading) for index, where in deepspeed_folders(folder)
    )


def _state(
    folder: CheckpointFolder, where: PurePosixPath, index: int, reading: Reading
) -> DeepSpeedState:
    if where.parts:
        paths = list(deepspeed_paths(folder.root, where))
    else:
        # The files of the folder itself are checked with the others of it, but not a folder that
        # has the name of one.
        paths = [path for path in folder.subfolders if is_deepspeed_file(path.name)]
        paths += universal_paths(folder.root, where)
    findings: list[Finding] = []
    unread: list[str] = []
    unfinished: list[str] = []
    has_checksums = False
    identities: dict[PurePosixPath, FileIdentity] = {}
    is_broken = not where.parts and any(one.problem is not None for one in folder.components)
    files = size = 0
    ranks: int | None = None
    crcs = None
    if reading.data and reading.executor.has_units and reading.left is None:
        crcs = _crcs_of_ranks(folder.root, paths, reading.progress, reading.executor)
    for path in paths:  # one by one: a thousand ranks have many names
        scanned = _scan_alone(folder.root, path)
        of_root = scanned.components
        findings += diagnose_files(scanned, reading, crcs=crcs)
        if scanned.subfolders:
            # An archive that was extracted into a folder of its name.
            findings.append(NotATensorFile(path=path, content=FOLDER))
            is_broken = True
        for one in of_root:
            files, size = files + 1, size + one.size
            identities[path] = one.fingerprint
            if isinstance(one.content, TorchFile):
                has_checksums = True
                with suppress(FormatError):
                    ranks = ranks or partition_count(one.content)
            is_broken |= one.problem is not None
            if one.problem is not None and one.problem.is_only_unchecked:
                unread.append(f"{path}: {one.problem.message}")
            elif one.problem is not None and is_unreadable(one):
                unfinished.append(f"{path}: {one.problem.message}")
    state = DeepSpeedState(
        path=where,
        findings=tuple(findings),
        files=files,
        size=size,
        unread=tuple(unread),
        unfinished=tuple(unfinished),
        has_checksums=has_checksums,
        scanned=identities,
        ranks=ranks,
    )
    return _whole(folder.root, where, index, is_broken, state)


def _scan_alone(root: AnyPath, path: PurePosixPath) -> CheckpointFolder:
    """Scan a file of DeepSpeed, whose names in a universal checkpoint are those of any states."""
    scanned = scan_folder(root / path.parent, path.name)
    components = tuple(
        replace(component, path=path, problem=as_damage(component.problem))
        for component in scanned.components
    )
    return replace(scanned, root=root, components=components)


def _crcs_of_ranks(
    root: AnyPath,
    every: Sequence[PurePosixPath],
    progress: Progress | None,
    executor: Executor,
) -> WrongCrcs:
    """Compare the CRC of every record in files that are parsed one by one; the processes of a team
    share the files.
    """

    def work(number: int, progress: Progress | None) -> list[tuple[str, str | None]]:
        contents = (one.content for one in _scan_alone(root, every[number]).components)
        files = (content for content in contents if isinstance(content, TorchFile))
        return [
            pair
            for file in files
            for pair in _read_crcs(root / every[number], file, slice(None), True, progress)
        ]

    units = [
        (root / path, "", stat_of(root / path).st_size if (root / path).exists() else 0)
        for path in every
    ]
    found = each(executor, "crc of ranks", units, work, progress)
    return {
        path: [(name, key) for name, key in pairs] for path, pairs in zip(every, found, strict=True)
    }


def _whole(
    root: AnyPath, where: PurePosixPath, index: int, is_broken: bool, state: DeepSpeedState
) -> DeepSpeedState:
    """Return the state with the findings about all files together. ``is_broken``: a single file has
    a finding.
    """
    try:
        weights = deepspeed_weights(root, where, index)
        ensure_states(root, where, weights)
        unread = (*state.unread, *_of_no_rank(root, where), *_without_optimizer(where, weights))
        return replace(state, tensors=len(weights.named()), unread=unread)
    except OtherKindError as error:
        words = f"{where}/ (a DeepSpeed folder), all ranks together: {_told(error, root, where)[1]}"
        return replace(state, unread=(*state.unread, words))
    except MissingRankError as error:
        why = _told(error, root, where)[1]
        finding: Finding = MissingRank(
            path=where / error.path.name,
            rank=error.rank,
            files=error.files,
            items=0,
            holds=(),
            detail=why,
        )
    except OperationError as error:
        if is_broken:
            return state
        path, why = _told(error, root, where)
        finding = MalformedFile(path=path, detail=why)
    except OSError:
        if is_broken:
            return state
        raise
    return replace(state, findings=(*state.findings, finding))


def _of_no_rank(root: AnyPath, where: PurePosixPath) -> Iterator[str]:
    """Yield in words the files of no rank, such as a copy, that ``zero_to_fp32`` reads for their
    ending (DeepSpeed 0.9 to 0.19).
    """
    others = [
        name
        for name in sorted(names_in(root / where))
        if name.endswith("_states.pt") and not is_deepspeed_file(name)
    ]
    # Those of the folder itself are listed among the files next to it.
    if others and where.parts:
        yield f"{where}/: {list_names(others)}, of no rank; zero_to_fp32 reads every *_states.pt"


def _without_optimizer(where: PurePosixPath, weights: Weights) -> Iterator[str]:
    """Yield in words that no optimizer was found: it may be lost, or the run saved none."""
    if not any(name in weights.left for name in ("optimizer_state_dict", "optimizer")):
        inside = f"{where}/: " if where.parts else ""
        yield (
            f"{inside}no optimizer states found; the model states do not say whether the run saved "
            "any"
        )


def _told(error: OperationError, root: AnyPath, where: PurePosixPath) -> tuple[PurePosixPath, str]:
    """Return the path of an error, relative to the root, and its sentence without path and
    advice.
    """
    text = str(error).partition("; next: ")[0]
    files = list(deepspeed_paths(root, where))
    for file in files:
        if text.startswith(f"{root / file}: "):
            return file, text.removeprefix(f"{root / file}: ")
    missing, _, why = text.partition(": ")
    if missing.startswith(f"{root / where}/"):
        return where / missing.removeprefix(f"{root / where}/"), why
    about = where if where.parts else files[0]
    return about, text.removeprefix(f"{root / where}: ")

"""Single files: what could not be read, what stands after the end, checksums, and what pickles name."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component, Problem, ProblemKind
from ckptfix.checkpoint.pairing import Progress
from ckptfix.formats.pickle_globals import GlobalSafety, can_be_allowed, classify, safe_globals_line
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile, crc_mismatches
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.operations.findings import (
    CompressedRecord,
    CrcMismatch,
    Finding,
    MalformedFile,
    NoFormatMetadata,
    NotATensorFile,
    TrailingBytes,
    TrainerPickle,
    TruncatedFile,
    UncheckedFile,
    UnloadablePickle,
    UnsafePickle,
)
from ckptfix.storage.reading import open_reader
from ckptfix.weights.deepspeed_files import is_deepspeed_file

_TRAINERS_PICKLES = (Role.RNG_STATE, Role.TRAINING_ARGUMENTS)
"""Roles of what transformers' Trainer pickles with classes (``trainer.py``, 4.57): it reads the first with a list of
them, and nothing reads the second but who asks for all of it."""

CUSTOM_CLASSES_ALLOWED = (Role.CUSTOM, Role.SAMPLER, Role.DATALOADER)
"""Roles whose honest files hold classes of their own: Accelerate pickles the sampler object, and loads custom
objects with ``weights_only=False``."""


def diagnose_files(
    folder: CheckpointFolder, *, data: bool, progress: Progress | None, explained: frozenset[PurePosixPath]
) -> list[Finding]:
    """Find what is wrong with each file by itself.

    ``data``: check the CRC of every record, not only small ones. ``explained``: unreadable files that another finding
    is about.
    """
    findings: list[Finding] = []
    for component in folder.components:
        if component.path in explained:
            continue
        if component.problem is not None:
            findings += problem_finding(component.path, component.problem)
        elif isinstance(component.content, SafetensorsFile):
            findings += _safetensors(component, component.content)
        elif isinstance(component.content, TorchFile):
            findings += _pickle(component, component.content)
            findings += _torch(folder.root, component, component.content, data, progress)
    return findings


def problem_finding(path: PurePosixPath, problem: Problem) -> list[Finding]:
    """Return what is wrong with a file that could not be parsed; nothing of one that nobody could look into."""
    match problem.kind:
        case ProblemKind.TRUNCATED:
            have, need, in_header = problem.have, problem.need, problem.in_header
            return [
                TruncatedFile(path=path, have=have, need=need, detail=problem.message, in_header=in_header)
            ]
        case ProblemKind.NOT_A_TENSOR_FILE:
            return [NotATensorFile(path=path, content=problem.message)]
        case ProblemKind.MALFORMED:
            return [MalformedFile(path=path, detail=problem.message)]
        case ProblemKind.UNREADABLE:
            return []  # perhaps healthy: a check that could not be finished
        case ProblemKind.UNSUPPORTED:
            if problem.is_limit:
                return [UncheckedFile(path=path, detail=problem.message)]
            return []  # well formed, and listed under "not checked"


def _safetensors(component: Component, file: SafetensorsFile) -> list[Finding]:
    findings: list[Finding] = []
    if file.trailing:
        findings.append(TrailingBytes(path=component.path, end=file.data_end, extra=file.trailing))
    if "format" not in file.metadata:
        findings.append(NoFormatMetadata(path=component.path))
    return findings


def _torch(
    root: Path, component: Component, file: TorchFile, data: bool, progress: Callable[[int], None] | None
) -> list[Finding]:
    findings: list[Finding] = []
    if file.trailing:
        end = component.size - file.trailing
        findings.append(TrailingBytes(path=component.path, end=end, extra=file.trailing))
    if isinstance(file.container, TorchZip):
        packed = tuple(record.name for record in file.container.records if not record.is_stored)
        prefix = f"{file.container.root}/data/"
        storages = sum(name.startswith(prefix) for name in packed)
        if packed:
            findings.append(CompressedRecord(path=component.path, records=packed, storages=storages))
    with open_reader(root / component.path) as reader:
        for record, storage_key in crc_mismatches(file, reader, every_record=data, progress=progress):
            tensors = tuple(tensor.fqn for tensor in file.tensors_of(storage_key)) if storage_key else ()
            findings.append(CrcMismatch(path=component.path, record=record, tensors=tensors))
    return findings


def _pickle(component: Component, file: TorchFile) -> list[Finding]:
    unsafe, unknown = [], []
    is_deepspeed = is_deepspeed_file(component.path.name)
    for module, name in file.tree.globals:
        match classify(module, name):
            case GlobalSafety.UNSAFE:
                unsafe.append(f"{module}.{name}")
            case GlobalSafety.UNKNOWN:
                if not (
                    is_deepspeed and module.startswith("deepspeed.")
                ):  # it loads its files without a list
                    unknown.append((module, name))
            case GlobalSafety.SAFE_IN_RNG_STATE:
                if (
                    component.role is Role.UNKNOWN or component.name.is_of_trainer
                ):  # accelerate allows these in the files that it loads itself
                    unknown.append((module, name))
            case GlobalSafety.SAFE:
                pass
    if unsafe:
        return [UnsafePickle(path=component.path, globals=tuple(unsafe))]
    opcodes = file.tree.refused_opcodes
    is_plain = file.container is None and component.role in (Role.MODEL, Role.OPTIMIZER, Role.UNKNOWN)
    if not (unknown or opcodes or is_plain) or component.role in CUSTOM_CLASSES_ALLOWED:
        return []
    names = tuple(f"{module}.{name}" for module, name in unknown)
    if component.name.is_of_trainer and component.role in _TRAINERS_PICKLES:
        return [TrainerPickle(path=component.path, globals=names or opcodes)]
    helps = not (opcodes or is_plain) and all(can_be_allowed(module, name) for module, name in unknown)
    return [
        UnloadablePickle(
            path=component.path,
            globals=names,
            opcodes=opcodes,
            plain=is_plain,
            remedy=safe_globals_line(unknown) if helps else "",
        )
    ]

"""Write what is whole beside the new folder's place, read it back, and put it there in one step."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.salvaged import REPORT
from ckptfix.errors import OperationError, UnsupportedFormat
from ckptfix.operations.migrate.copying import Source, write_file
from ckptfix.operations.migrate.staging import put_in_place, staging_for
from ckptfix.operations.salvage.found import PartOfModel, Sorted
from ckptfix.operations.salvage.receipt import SalvageReceipt
from ckptfix.storage.atomic import create_file, sync_tree
from ckptfix.storage.building import build
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.pieces import OpenFiles, page_buffer
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import Range, Recipe
from ckptfix.weights.digests import BLOCK, digest_head, tensor_digest
from ckptfix.weights.files.parts import NewTensor, OutputFile
from ckptfix.weights.files.safetensors_files import safetensors_files
from ckptfix.weights.files.torch_files import torch_files
from ckptfix.weights.opening import open_checkpoint
from ckptfix.wording import human_size

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file to write, and where its tensors come from by their names."""

    part: PartOfModel
    output: OutputFile = field(repr=False)
    sources: dict[str, Source] = field(repr=False)


def plan_file(part: PartOfModel) -> PlannedFile:
    """Return the file that a state dict becomes: safetensors, or one of torch where safetensors lacks a dtype.

    Raises OperationError when neither can hold it.
    """
    found, stems = part.found, part.stems
    new = [NewTensor(one.fqn, one.dtype, one.shape, one.nbytes) for one in found.tensors]
    kinds: list[Callable[[], tuple[OutputFile, ...]]] = [
        lambda: safetensors_files(stems.safetensors, new, found.ties, metadata=found.metadata),
        lambda: torch_files(stems.torch, new, found.ties, versions=found.versions),
    ]
    refused = []
    for make in reversed(kinds) if stems.is_torch else kinds:
        try:
            (output,) = make()
        except UnsupportedFormat as error:
            refused.append(str(error))
        else:
            sources = {one.fqn: Source(made, one) for made, one in zip(new, found.tensors, strict=True)}
            return PlannedFile(part=part, output=output, sources=sources)
    raise OperationError(f"{part.source}: no file can hold it: {'; '.join(refused)}")


def write_all_beside(
    found: Sorted,
    files: Sequence[PlannedFile],
    output: Path,
    receipt: SalvageReceipt,
    progress: Progress | None,
) -> None:
    """Write every file and the report, prove them, and move them to ``output``; whatever fails leaves nothing behind.

    Raises OperationError when something is not what was read, or too little space is left; OSError.
    """
    _check_space(found, files, output)
    with staging_for(output, is_file=False) as staging:
        for path in found.copied:
            _copy(found.root, path, staging.new, progress)
        for file in files:
            digests = write_file(
                staging.new / file.output.path,
                file.output,
                file.sources,
                with_digests=True,
                stop=threading.Event(),
                progress=progress,
            ).digests
            os.chmod(staging.new / file.output.path, 0o666 & ~_umask())
            _prove(file, staging.new, digests)
        document = json.dumps({"version": _VERSION, **receipt.as_json()}, indent=1) + "\n"
        create_file(staging.new / REPORT, document.encode())
        os.chmod(staging.new, 0o777 & ~_umask())
        sync_tree(staging.new)
        put_in_place(staging, overwrite=False)


def _copy(root: Path, path: PurePosixPath, new: Path, progress: Progress | None) -> None:
    """Copy a file and compare the copy with it."""
    source, copy = root / path, new / path
    copy.parent.mkdir(parents=True, exist_ok=True)
    size = os.stat(source).st_size
    build(
        Recipe.like(source, (Range(PurePosixPath(source.name), 0, size),) if size else ()),
        source.parent,
        copy,
        progress=progress,
    )
    with open_reader(source) as one, open_reader(copy) as other:
        if one.size != other.size or first_difference(one.fd, other.fd, [Run(0, 0, size)], progress=progress):
            raise OperationError(f"{source} and its copy differ: it changed meanwhile, or a disk is failing")


def _prove(file: PlannedFile, new: Path, digests: "dict[str, str]") -> None:
    """Open a new file as any checkpoint, and compare every tensor with what was read from the source."""
    path = new / file.output.path
    (weights,) = open_checkpoint(path).weights
    there = weights.named()
    wanted = {one.fqn: one for one in file.part.found.tensors}
    names = {**{name: name for name in wanted}, **file.part.found.ties}
    if there.keys() != names.keys():
        raise OperationError(f"{path.name} holds other names than were written; nothing was kept")
    buffer = page_buffer(BLOCK)
    with OpenFiles() as opened:
        for name, kept in names.items():
            one = wanted[kept]
            digest = digests.get(kept) or hashlib.sha256(digest_head(one.dtype, one.shape)).hexdigest()
            if name == kept and tensor_digest(there[name], opened, buffer) != digest:
                raise OperationError(f"{path.name}: {name!r} is not what was read; nothing was kept")


def _check_space(found: Sorted, files: Sequence[PlannedFile], output: Path) -> None:
    need = sum(file.output.size for file in files)
    need += sum(os.stat(found.root / path).st_size for path in found.copied)
    status = os.statvfs(output.absolute().parent)
    free = status.f_bavail * status.f_frsize
    if need > free:
        raise OperationError(
            f"{output}: {human_size(need)} of free space are needed, {human_size(free)} are free on this disk"
        )


def _umask() -> int:
    """Return the mask of new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

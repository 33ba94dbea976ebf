"""The receipt of a salvage, and the new folder that it describes."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.pairing import Progress
from ckptfix.conversion.proving import prove_copy, prove_model
from ckptfix.conversion.salvage_sources import PartOfModel, SalvagePlan
from ckptfix.conversion.streaming import Source, copy_file, write_file
from ckptfix.errors import OperationError, UnsupportedFormat
from ckptfix.reports import Serialized
from ckptfix.storage.atomic import create_file, sync_tree
from ckptfix.storage.paths import command
from ckptfix.storage.staged import ensure_space, put_in_place, staging_for
from ckptfix.tensors.new_files import NewTensor, OutputFile, safetensors_files
from ckptfix.tensors.new_torch_files import torch_files
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.salvaging import Lost
from ckptfix.wording import Line, Printable, collapse_layers, count_of, human_size, line, unchecked_line

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile(Serialized):
    """A new file. ``source``: where its tensors come from. ``names``: of them, ties too; ``nbytes``: each once."""

    json_keys: ClassVar = "path source bytes=nbytes tensors=names"

    path: str
    source: str
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SalvageReceipt(Printable, Serialized):
    """The receipt of a salvage. ``saved``: new files. ``copied``: intact files. ``damaged``: kept, as asked for.

    ``doubtful``: what was kept, has no checksum and ends in zeros, as the end of a file does that was not written
    before a crash, and a tensor that was never trained; and other files that are not as they were sealed.
    ``left_out``: what of the source is not meant for a new folder, in words. ``not_checked``: in words. ``notes``: how
    what was saved is called. ``unindexed``: folders in the new one with shards that no loader finds without an index.
    """

    json_keys: ClassVar = (
        "source output saved copied lost doubtful damaged left_out notes next=next_steps not_checked"
    )

    source: str
    output: str
    saved: tuple[SavedFile, ...]
    copied: tuple[str, ...]
    lost: tuple[Lost, ...]
    doubtful: tuple[Lost, ...]
    damaged: tuple[Lost, ...]
    not_checked: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unindexed: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """The exit status: 0 when everything was whole, 1 when something is lost or damaged."""
        return int(bool(self.lost or self.damaged))

    @property
    def verdict(self) -> str:
        """The summary when nothing is lost, "" when something is."""
        if self.status:
            return ""
        is_proven = not (self.not_checked or self.doubtful or self.unindexed)
        return "everything was intact" if is_proven else "nothing missing was found"

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The commands to run before the new folder can be loaded."""
        return tuple(command("repair", Path(self.output) / where) for where in self.unindexed)

    @property
    def tensors(self) -> int:
        """The number of keys in the new files."""
        return sum(len(file.names) for file in self.saved)

    def lines(self) -> Iterator[Line]:
        """Yield what was saved, what is lost and why, and what was not checked."""
        yield line(f"salvaged {self.source} to {self.output}:", bold=True)
        for file in self.saved:
            origin = f", from {file.source}" if file.source != "." else ""  # that is all of the source
            size = f"{count_of(len(file.names), 'tensor')}, {human_size(file.nbytes)}"
            yield line(f"  {file.path}: {size}{origin}")
        if self.copied:
            yield line(f"  {count_of(len(self.copied), 'file')} copied unchanged")
        yield from _lost_lines("kept although damaged", self.damaged, "yellow")
        yield from _lost_lines("lost", self.lost, "red")
        yield from _lost_lines("kept, but it may not be what was written", self.doubtful, "yellow")
        yield from (line(f"left out: {words}") for words in self.left_out)
        yield from (line(f"note: {words}") for words in self.notes)
        if self.verdict:
            yield line(self.verdict, colour="green")
        yield from map(unchecked_line, self.not_checked)
        yield from (line(f"next: {step}") for step in self.next_steps)


def _lost_lines(what: str, every: tuple[Lost, ...], colour: str) -> Iterator[Line]:
    """Yield what is lost, layers of one file with one reason in one line."""
    if not every:
        return
    groups: dict[tuple[str, str], list[Lost]] = {}
    for one in every:
        groups.setdefault((one.file, one.reason), []).append(one)
    texts = []
    for group in groups.values():
        by_name = {one.name: one for one in group}
        texts += [str(one) for one in group if one.name is None]
        for name in collapse_layers(one.name for one in group if one.name is not None):
            texts.append(str(by_name.get(name, group[0]._replace(name=name, need=None, have=None))))
    yield line(f"{what}: {len(every)}", colour=colour, bold=True)
    yield from (line(f"  {text}") for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        yield line(f"  and {len(texts) - _SHOWN} more lines; salvage.json and --json list all")


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


def write_salvage(
    found: SalvagePlan,
    files: Sequence[PlannedFile],
    output: Path,
    receipt: SalvageReceipt,
    progress: Progress | None,
) -> None:
    """Write every file and the report, prove them, and move them to ``output``; whatever fails leaves nothing behind.

    Raises OperationError when something is not what was read, or too little space is left; OSError.
    """
    copied = sum(os.stat(found.root / path).st_size for path in found.copied)
    ensure_space(output, copied + sum(file.output.size for file in files))
    with staging_for(output) as staging:
        for path in found.copied:
            copy_file(found.root / path, staging.new / path, progress)
            prove_copy(found.root / path, staging.new / path, progress)
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
            (weights,) = open_checkpoint(staging.new / file.output.path).weights
            prove_model(
                f"{output}: {file.output.path}",
                weights,
                sources=file.sources,
                ties=file.part.found.ties,
                digests=digests,
                progress=progress,
            )
        document = json.dumps({"version": _VERSION, **receipt.as_json()}, indent=1) + "\n"
        create_file(staging.new / REPORT, document.encode())
        os.chmod(staging.new, 0o777 & ~_umask())
        sync_tree(staging.new)
        put_in_place(staging)


def _umask() -> int:
    """Return the mask of new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""The weights in a checkpoint, read twice: by the library that loads them, and as the file's own
bytes.

The bytes are found by this package's parsers and read with ``pread``; the tensors come from
``safetensors`` and ``torch.load(weights_only=True)``. Neither way knows of the other, so that each
proves the other.
"""

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
from msgspec import Struct, field
from safetensors import SafetensorError, safe_open

from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.devices.torch_reading import Unreadable, read_pickle
from ckptfix.errors import OperationError, UsageError
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import on_disk
from ckptfix.storage.paths import command, existing
from ckptfix.storage.reading import OpenFiles, page_buffer
from ckptfix.tensors.single_files import is_expanded, recorded_ties, run, torch_layout
from ckptfix.tensors.stored import Layout
from ckptfix.wording import Brief

Bytes = Any
"""A one-dimensional numpy array of uint8."""


class FileTensor(Struct, frozen=True, kw_only=True):
    """A tensor in a file. ``layout``: where its bytes are; None for one in a compressed record.

    ``shares``: what tensors of one file have in common that are the same bytes: two names of one
    tensor.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    member: Component
    layout: Layout | None
    shares: object = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def has_bytes(self) -> bool:
        """True if its bytes can be read off the file."""
        return self.layout is not None


class Weights(Brief, Struct, frozen=True, kw_only=True):
    """One model's weights on disk.

    ``opaque``: names of values that are not plain tensors. Use as a context manager.

    ``aliases``: names that are in no file -> the name in it that they shared a storage with.
    ``prefix``: the prefix of names in reports, where a folder holds several models.
    """

    root: Path
    label: str
    entry: Entry
    tensors: Mapping[str, FileTensor]
    opaque: tuple[str, ...]
    aliases: Mapping[str, str]
    prefix: str = ""
    _open: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one tensor: two names of the same bytes, and names left out for
        another.
        """
        groups: dict[object, list[str]] = {}
        for fqn, tensor in self.tensors.items():
            is_shared = tensor.shares is not None and tensor.nbytes > 0
            groups.setdefault(tensor.shares if is_shared else fqn, []).append(fqn)
        of = {fqn: group for group in groups.values() for fqn in group}
        for name, kept in self.aliases.items():
            of[kept].append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def read(self, fqn: str) -> torch.Tensor:
        """Return a tensor as a loader reads it, on the CPU; mapped, not copied, where the file
        allows it.

        Raises OperationError when the library cannot read the file, or does not find the name in
        it.
        """
        member = self.tensors[fqn].member
        key = str(member.path)
        try:
            if key not in self._open:
                self._open[key] = self._opened(member)
            source = self._open[key]
            value = (
                source.get_tensor(fqn)
                if isinstance(member.content, SafetensorsFile)
                else source[fqn]
            )
        except (SafetensorError, Unreadable, OSError, KeyError) as error:
            says = str(error)
            where = "" if isinstance(error, Unreadable) else f"{self.root / member.path}: "
            step = "" if "next: " in says else f"; next: {command('check', self.root)}"
            raise OperationError(f"{where}{says}{step}") from error
        assert isinstance(value, torch.Tensor)
        return value.detach()

    def _opened(self, member: Component) -> Any:
        if isinstance(member.content, SafetensorsFile):
            return safe_open(str(self.root / member.path), framework="pt", device="cpu")
        part = read_pickle(self.root, member, trust=False, mapped=True)
        for step in self.entry.path:
            part = part[int(step)] if isinstance(part, list | tuple) else part[step]
        return part

    def problem(self) -> str:
        """Return why the files cannot be loaded, "" when they can. Opens each of them."""
        if self.entry.problem:
            return f"{self.label}: {self.entry.problem}; next: {command('check', self.root)}"
        first = {str(tensor.member.path): fqn for fqn, tensor in self.tensors.items()}
        try:
            for fqn in first.values():
                self.read(fqn)
        except OperationError as error:
            return str(error)
        finally:
            self.close()
        return ""

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_bytes(tensor: FileTensor, chunk: int) -> Iterator[Bytes]:
    """Yield the bytes of a tensor as its file holds them, about ``chunk`` at a time; each holds
    until the next one.

    Raises OSError, and ChangedError when the file has become shorter.
    """
    assert tensor.layout is not None, "asked of a tensor in a compressed record"
    room = (
        min(chunk, tensor.nbytes) + 15 & ~15
    )  # a buffer for a model's many small tensors must be small, too
    with OpenFiles() as files:
        for block in tensor.layout.blocks(files, page_buffer(max(room, 16))):
            yield numpy.frombuffer(block, dtype=numpy.uint8)


def find_weights(path: str | os.PathLike[str]) -> tuple[tuple[Weights, ...], CheckpointFolder]:
    """Return the weights of every model at a path, and the folder: a folder, one file, or an index.

    Of a folder those that ``load_state`` and ``from_pretrained`` look for; without any, every state
    dict of a module. Raises UsageError when nothing is there, OSError when the folder cannot be
    read.
    """
    given = existing(path)
    if given.is_dir():
        folder = scan_folder(given)
        entries = model_entries(folder, usable_manifest(given)) or all_state_dicts(folder)
    else:
        is_index = given.name.endswith(".json")
        folder = scan_folder(given.parent, None if is_index else given.name)
        entries = tuple(
            one for one in all_state_dicts(folder) if not is_index or one.label == given.name
        )
    if not entries:
        raise UsageError(f"{given} has no model weights; next: {command('check', given)}")
    if any(entry.members and entry.members[0].name.is_of_parts for entry in entries):
        raise UsageError(
            f"{given}: each file has only one rank's parts of the tensors, which only torch's "
            "own reader can load; next: "
            f"{command('migrate', folder.root, '', '--to', 'safetensors')} NEW_FOLDER"
        )
    return (
        tuple(_weights(on_disk(folder.root), entry, several=len(entries) > 1) for entry in entries),
        folder,
    )


def _weights(root: Path, entry: Entry, *, several: bool) -> Weights:
    tensors: dict[str, FileTensor] = {}
    aliases = dict(entry.aliases)
    for member in entry.members:
        content = member.content
        if isinstance(content, TorchFile):
            tensors.update(_of_torch(root, member, content, entry.path))
        elif isinstance(content, SafetensorsFile):
            for info in content.tensors:
                layout = run(root / member.path, info.data_offsets)
                tensors[info.fqn] = FileTensor(
                    fqn=info.fqn, dtype=info.dtype, shape=info.shape, member=member, layout=layout
                )
            aliases.update(recorded_ties(content))
    opaque = tuple(name for name in entry.shapes if name not in tensors and name not in aliases)
    return Weights(
        root=root, label=entry.label, entry=entry, tensors=tensors, opaque=opaque, aliases=aliases,
        prefix=f"{entry.label}: " if several else "",
    )  # fmt: skip


def _of_torch(
    root: Path, member: Component, content: TorchFile, path: tuple[str, ...]
) -> Iterator[tuple[str, FileTensor]]:
    for state_dict in content.state_dicts:
        for one in state_dict.tensors if state_dict.path == path else ():
            is_compressed = one.storage_key not in content.storage_ranges
            layout = None if is_compressed else torch_layout(root / member.path, content, one)
            if layout is not None and is_expanded(layout):
                continue  # a few bytes that claim to be terabytes would be written out
            shares = (member.path, one.view)
            yield (
                one.fqn,
                FileTensor(
                    fqn=one.fqn,
                    dtype=one.dtype,
                    shape=one.shape,
                    member=member,
                    layout=layout,
                    shares=shares,
                ),
            )

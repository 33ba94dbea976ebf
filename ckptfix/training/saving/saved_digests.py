"""Digests of what a process saves, taken in threads: of tensors while they are written, and of
files when all are, while the disk still writes them.

A digest is always of bytes that were written, as the file has them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ckptfix.checkpoint.manifest import RANGE, ManifestEntry, joined
from ckptfix.diagnosis.contents import lasting_label, sealed_entry
from ckptfix.errors import CkptfixError
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.executor import plan_shares
from ckptfix.storage.parallel import cores
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer
from ckptfix.storage.results import Units
from ckptfix.tensors.hashing import Hashed, TensorJob, first_place, hash_all
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import BLOCK, Format, Weights, digest_head

_MOST_THREADS = 8

_CUT = (Format.DCP, Format.DEEPSPEED)
"""Formats in which every process writes a part of the tensors. Their writers wait for each other at
the end.
"""

_LEFT = ".ckptfix-digests-"
"""Beginning of the names of the files with the digests of other processes."""


class _Shared(NamedTuple):
    """The tensors that several processes wrote together, and this one's share of their digests to
    come.
    """

    weights: tuple[Weights, ...]
    mine: list[tuple[str, str]]
    digests: Future[list[Hashed]]


class SavedDigests:
    """Digests of what one process saves: of its tensors, and of its files, long ones by ranges.

    hashlib lets the thread that writes go on meanwhile. The digests go to the process that writes
    the manifest through a file next to the others.
    """

    def __init__(self) -> None:
        # The processes of a node save at the same time, each with its share of the cores; its
        # writer has one of them.
        here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        self._threads = max(1, min(_MOST_THREADS, cores() // here - 1))
        self._pool = ThreadPoolExecutor(self._threads, "ckptfix-digests")
        self._tensors: dict[int, list[tuple[str, Future[str]]]] = {}
        self._files: dict[str, list[Future[str]]] = {}
        self._shared: _Shared | None = None
        self._left: dict[str, str] = {}
        self._left_tensors: dict[tuple[str, str], str] = {}

    def hash_tensors(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to hash the tensors of a model; nobody may change them until ``close``."""
        submit = self._pool.submit
        self._tensors[index] = [
            (name, submit(tensor_digest, value)) for name, value in tensors.items()
        ]

    def hash_files(self, folder: Path, names: Iterable[str]) -> None:
        """Begin to hash complete files of a folder, by ranges, the largest first."""
        sizes = {name: os.stat(folder / name).st_size for name in names}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            pieces = (
                Piece(folder / name, begin, min(RANGE, sizes[name] - begin))
                for begin in range(0, max(sizes[name], 1), RANGE)
            )
            self._files[name] = [self._pool.submit(_sha256, piece) for piece in pieces]

    def hash_shared(self, folder: Path, rank: int, count: int) -> None:
        """Begin to hash this process's share of the tensors that DCP or DeepSpeed cut among all
        processes.

        Those of other files are hashed by the first process, which has written them.
        """
        try:
            found = open_checkpoint(folder).weights
        except (CkptfixError, OSError):
            return  # nodes without a shared disk: nobody has all of the bytes
        weights = tuple(
            replace(one, label=lasting_label(one, folder))
            for one in found
            if one.format in _CUT or rank == 0
        )
        tensors = [
            (one.label, tensor) for one in weights for tensor in one.tensors if one.format in _CUT
        ]
        units = Units()
        every = [
            units.of((label, tensor.fqn), tensor.nbytes, first_place(tensor.layout)[1])
            for label, tensor in tensors
        ]
        mine = [tensors[number] for number in plan_shares(every, count)[rank]] if every else []
        mine += [
            (one.label, tensor)
            for one in weights
            for tensor in one.tensors
            if one.format not in _CUT
        ]
        digests = self._pool.submit(
            hash_all, [TensorJob(tensor) for _, tensor in mine], threads=self._threads
        )
        self._shared = _Shared(weights, [(label, tensor.fqn) for label, tensor in mine], digests)

    def leave_for_others(self, folder: Path, rank: int) -> None:
        """Leave the digests of this process for the one that writes the manifest."""
        tensors = [[*place, digest] for place, digest in self._own_of_shared().items()]
        (folder / f"{_LEFT}{rank}").write_text(
            json.dumps({"files": self.files(), "tensors": tensors})
        )

    def take(self, left: Mapping[str, str], left_tensors: Mapping[tuple[str, str], str]) -> None:
        """Take the digests of other processes, as ``take_left`` returns them."""
        self._left |= left
        self._left_tensors |= left_tensors

    def _own_of_shared(self) -> dict[tuple[str, str], str]:
        if self._shared is None:
            return {}
        pairs = zip(self._shared.mine, self._shared.digests.result(), strict=True)
        return {place: one.digest for place, one in pairs if one.digest}

    def complete(self, entries: Iterable[ManifestEntry]) -> tuple[ManifestEntry, ...]:
        """Return entries with the digests of their tensors, and those of what processes have
        written together.

        Raises what a thread raised.
        """
        done = [
            replace(
                entry,
                digests={name: one.result() for name, one in self._tensors.get(entry.index, [])},
            )
            for entry in entries
        ]
        shared = {**self._left_tensors, **self._own_of_shared()}
        for weights in () if self._shared is None else self._shared.weights:
            found = {
                tensor.fqn: digest
                for tensor in weights.tensors
                if (digest := shared.get((weights.label, tensor.fqn))) is not None
            }
            if found and len(found) == len(weights.tensors):
                done.append(sealed_entry(None, weights, found))
        return tuple(sorted(done, key=lambda entry: (entry.index, entry.file)))

    def files(self) -> dict[str, str]:
        """Return the digests of the files, those of long ones as one text. Raises what a thread
        raised.
        """
        mine = {
            name: joined(part.result() for part in parts) for name, parts in self._files.items()
        }
        return {**self._left, **mine}

    def close(self) -> None:
        """End the threads, with what is left undone."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def take_left(folder: Path) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Return the digests of files and of tensors that processes have left in a folder, and remove
    their files.
    """
    files: dict[str, str] = {}
    tensors: dict[tuple[str, str], str] = {}
    for path in sorted(folder.glob(f"{_LEFT}*")):
        left = json.loads(path.read_text())
        files |= left["files"]
        tensors |= {(label, fqn): digest for label, fqn, digest in left["tensors"]}
        path.unlink()
    return files, tensors


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the sha256 over dtype, shape and bytes: the same whatever the tensor's name, file or
    container.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(digest_head(TORCH_DTYPES.get(name, name), tuple(tensor.shape)))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _sha256(piece: Piece) -> str:
    digest = hashlib.sha256()
    with OpenFiles() as files:
        for block in files.blocks((piece,), page_buffer(BLOCK)):
            digest.update(block)
    return digest.hexdigest()

"""Digests of what a process saves, taken in threads while it writes: of tensors, and of each file
once it is written.

A digest is always of bytes that were written, as the file has them. One that is taken while the
save goes on counts only if the file is the same in the end: otherwise it is taken again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ckptfix.checkpoint.manifest import RANGE, ManifestEntry, joined
from ckptfix.diagnosis.contents import lasting_label, sealed_entry
from ckptfix.errors import ChangedError, CkptfixError
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.executor import plan_shares
from ckptfix.storage.parallel import cores
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer, read_start
from ckptfix.storage.results import Units
from ckptfix.tensors.hashing import Hashed, TensorJob, first_place, hash_all
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import BLOCK, Format, Weights, digest_head

_MOST_THREADS = 8

_LOOKS = 0.02
"""Seconds between two looks at a folder that is being written."""

_GROWS = 0.002
"""Seconds between two looks at a file that grows."""

_LONG = 8 << 20
"""Bytes from which on a file of torch is hashed while it grows; others are hashed when they are
written.
"""

_ZIP = b"PK\3\4"

_CUT = (Format.DCP, Format.DEEPSPEED)
"""Formats in which every process writes a part of the tensors. Their writers wait for each other at
the end.
"""

_QUIET = 0.05
"""Seconds for which a file must have stayed the same: a write after that shows in its time of
change.
"""

_SECOND = 10**9

_LEFT = ".ckptfix-digests-"
"""Beginning of the names of the files with the digests of other processes."""


class _State(NamedTuple):
    """A file as ``stat`` has it: one that is written again has another time of change."""

    size: int
    mtime_ns: int
    inode: int


class _File:
    """The digests of a file's ranges to come. ``state``: the file as it was when it was complete,
    None until then.

    ``size``: the largest that was seen.
    """

    def __init__(self, state: _State | None, seen: _State) -> None:
        self.state = state
        self.size, self.inode = seen.size, seen.inode
        self.parts: list[Future[str]] = []
        self.is_complete = Event()


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
        self._early: dict[str, _File] = {}
        self._files: dict[str, _File] = {}
        self._shared: _Shared | None = None
        self._left: dict[str, str] = {}
        self._left_tensors: dict[tuple[str, str], str] = {}

    def hash_tensors(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to hash the tensors of a model; nobody may change them until ``close``."""
        submit = self._pool.submit
        self._tensors[index] = [
            (name, submit(tensor_digest, value)) for name, value in tensors.items()
        ]

    @contextmanager
    def watching(self, folder: Path, wanted: Callable[[str], bool]) -> Iterator[None]:
        """Begin to hash files of a folder while they are written: each once the next is begun, a
        long one as it grows.

        ``wanted``: whether a name is that of a file which this process writes from its beginning to
        its end.
        """
        over = Event()
        watch = Thread(
            target=self._watch, args=(folder, wanted, over), name="ckptfix-watch", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _watch(self, folder: Path, wanted: Callable[[str], bool], over: Event) -> None:
        seen: dict[tuple[str, _State], float] = {}
        is_over = False
        while not is_over:
            is_over = over.wait(_LOOKS)
            with suppress(
                OSError
            ):  # a library may rename its files meanwhile; all are looked at again in the end
                now = dict(_states(folder))
                newest = max((one.mtime_ns for one in now.values()), default=0)
                for name, state in now.items():
                    if not wanted(name):
                        continue
                    # A file system that counts whole seconds does not show a second write in the
                    # same one.
                    is_old = state.mtime_ns < newest and state.mtime_ns % _SECOND
                    is_quiet = (
                        is_old
                        and monotonic() - seen.setdefault((name, state), monotonic()) >= _QUIET
                    )
                    self._look(
                        folder / name, name, state, is_written=bool(is_quiet), is_over=is_over
                    )

    def _look(
        self, path: Path, name: str, state: _State, *, is_written: bool, is_over: bool
    ) -> None:
        """Begin to hash a file that is written, or a long one of torch while it grows."""
        file = self._early.get(name)
        if file is not None and (state.size < file.size or state.inode != file.inode):
            file.is_complete.set()  # somebody writes it anew
            del self._early[name]
            file = None
        if file is None and is_written:
            self._early[name] = self._begin(path, state)
        elif file is None and state.size >= _LONG and not is_over and _only_grows(path):
            file = self._early[name] = _File(None, state)
            file.parts.append(self._pool.submit(_follow, path, 0, file.is_complete))
        elif file is not None and file.state is None:
            file.size = state.size
            for begin in range(len(file.parts) * RANGE, state.size, RANGE):
                file.parts.append(self._pool.submit(_follow, path, begin, file.is_complete))
            if is_written or is_over:
                file.state = state
                file.is_complete.set()

    def hash_files(self, folder: Path, names: Iterable[str]) -> None:
        """Begin to hash complete files of a folder, the largest first, but for those that are
        hashed already.
        """
        states = {name: _state_of(folder / name) for name in names}
        for name in sorted(states, key=lambda name: -states[name].size):
            file = self._early.get(name)
            if file is None or file.state != states[name]:
                file = self._begin(folder / name, states[name])
            self._files[name] = file

    def _begin(self, path: Path, state: _State) -> _File:
        file = _File(state, state)
        file.is_complete.set()
        for begin in range(0, max(state.size, 1), RANGE):
            file.parts.append(self._pool.submit(_follow, path, begin, file.is_complete))
        return file

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
            name: joined(part.result() for part in one.parts) for name, one in self._files.items()
        }
        return {**self._left, **mine}

    def close(self) -> None:
        """End the threads, with what is left undone."""
        for file in self._early.values():
            file.is_complete.set()
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


def _only_grows(path: Path) -> bool:
    """Return whether a file is one that torch writes from its beginning to its end, and nowhere
    twice.

    Its writer of zip files refuses to write anywhere but at the end. Other libraries first make
    room, then fill it.
    """
    return read_start(path, len(_ZIP)) == _ZIP


def _follow(path: Path, begin: int, is_complete: Event) -> str:
    """Return the sha256 of a range of a file; of one that grows once the range is full, or the file
    is complete.
    """
    digest, at, end = hashlib.sha256(), begin, begin + RANGE
    buffer = page_buffer(BLOCK)
    with OpenFiles() as files:
        while at < end:
            was_complete = is_complete.is_set()
            size = min(os.stat(path).st_size, end)
            if size <= at and was_complete:
                break
            if size < at:
                raise ChangedError(f"{path} shrank from {at} to {size} bytes")
            for block in files.blocks((Piece(path, at, size - at),), buffer):
                digest.update(block)
            if size == at:
                is_complete.wait(_GROWS)
            at = size
    return digest.hexdigest()


def _states(folder: Path) -> Iterator[tuple[str, _State]]:
    """Yield the files in and below a folder, by their relative names."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            yield str(path.relative_to(folder)), _state_of(path)


def _state_of(path: Path) -> _State:
    status = os.stat(path)
    return _State(status.st_size, status.st_mtime_ns, status.st_ino)

"""Every tensor against its file's bytes: as a library reads it, after the disk, on its device, one hop further."""

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import load_offloaded_weight, offload_weight

from ckptfix.errors import OperationError
from ckptfix.runtime.devices.pairs import Pair, device
from ckptfix.runtime.devices.reload.comparing import CHUNK, Bytes, first_mismatch, hop, host_bytes
from ckptfix.runtime.devices.reload.machine import answers, is_out_of_memory
from ckptfix.runtime.devices.reload.mapping import DISK, Device
from ckptfix.runtime.devices.reload.report import Outcome, Proof, Subject
from ckptfix.runtime.devices.reload.stored import StoredTensor, Weights, file_bytes
from ckptfix.runtime.devices.reload.tally import Tally

Progress = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class Hops:
    """Copies of this checkpoint's tensors from accelerator to accelerator.

    ``avoid``: pairs that hang or kill a process, which are not tried. ``made`` and ``wrong`` count tensors by pair.
    """

    count: int
    avoid: frozenset[Pair] = frozenset()
    made: Counter[Pair] = field(default_factory=Counter)
    wrong: Counter[Pair] = field(default_factory=Counter)
    tally: Tally = field(
        default_factory=lambda: Tally(
            subject=Subject.PEER_HOPS, what="tensors over one peer hop", is_transfer=True
        )
    )
    _dead: set[int] = field(default_factory=set)

    def make(self, name: str, tensor: torch.Tensor, expected: Callable[[], Iterator[Bytes]]) -> None:
        """Copy a tensor that is on an accelerator to another, each time to the next one, and compare it there."""
        if not tensor.nbytes:
            return
        source = int(tensor.device.index or 0)
        others = [(source, index) for index in range(self.count) if index != source]
        pairs = [pair for pair in others if pair not in self.avoid and not self._dead & set(pair)]
        if not pairs:
            if others:
                self.tally.skip(name, f"no copy from device {source} ends well enough to be tried again")
            return
        pair = min(pairs, key=lambda pair: self.made[pair])
        self.made[pair] += 1
        try:
            found = hop(tensor, expected(), device(pair[1]))
        except RuntimeError as error:
            self._failed(name, pair, error)
            return
        if found is None:
            self.tally.arrived(tensor.nbytes)
        else:
            self.wrong[pair] += 1
            self.tally.differs(name, f"{pair[0]} -> {pair[1]}: {found}")

    def proofs(self) -> list[Proof]:
        """Return the lines of the table; where there are several accelerators, there is always one."""
        found = self.tally.proofs()
        if not found and self.count > 1:
            text = f"{self.tally.what}: no tensor was on an accelerator"
            found = [
                Proof(subject=Subject.PEER_HOPS, outcome=Outcome.NOT_EXERCISED, text=text, is_transfer=True)
            ]
        return found

    def look_for_dead(self) -> None:
        """Find out which devices no longer answer, so that no pair is blamed for what happened before."""
        self._dead |= {index for index in range(self.count) if not answers(device(index))}

    def _failed(self, name: str, pair: Pair, error: RuntimeError) -> None:
        if is_out_of_memory(error):
            self.tally.skip(name, f"no room for it on device {pair[1]}")
            return
        self._dead |= {index for index in pair if not answers(device(index))}
        self.wrong[pair] += 1
        self.tally.differs(name, f"{pair[0]} -> {pair[1]} raised {type(error).__name__}: {error}")


@dataclass(slots=True, kw_only=True)
class FileProofs:
    """What is proven of the files themselves, model class or not."""

    read: Tally = field(
        default_factory=lambda: Tally(subject=Subject.FILE_BYTES, what="file bytes -> tensors")
    )
    offload: Tally = field(
        default_factory=lambda: Tally(subject=Subject.DISK_OFFLOAD, what="offload to disk and back")
    )
    placement: Tally = field(
        default_factory=lambda: Tally(
            subject=Subject.PLACEMENT, what="file -> device -> host", is_transfer=True
        )
    )

    def proofs(self) -> list[Proof]:
        """Return the lines of the table."""
        return [*self.read.proofs(), *self.offload.proofs(), *self.placement.proofs()]


def prove_files(
    weights: Weights,
    placed: Callable[[str], Device] | None,
    proofs: FileProofs,
    hops: Hops,
    progress: Progress,
) -> None:
    """Read every tensor, and compare it with its file: as read, after the disk, and where ``placed`` puts it.

    ``placed``: name -> device, None to leave devices out; tensors for the CPU and the disk go to device 0 and back,
    as every forward pass takes them there. One tensor is in memory at a time. Raises OperationError, OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix="ckptfix-verify-"))
    try:
        for name, stored in weights.tensors.items():
            shown = weights.prefix + name
            if not stored.has_bytes:
                proofs.read.skip(shown, "its bytes are compressed in the file")
                continue
            try:
                value = weights.read(name)
            except OperationError as error:
                proofs.read.differs(shown, error)
                continue
            if (found := first_mismatch(value, file_bytes(stored, CHUNK))) is not None:
                proofs.read.differs(shown, found)
                continue
            proofs.read.arrived(stored.nbytes)
            on_disk = placed is not None and placed(name) == DISK
            _through_the_disk(shown, value, folder, proofs.offload, must=on_disk)
            if placed is not None and hops.count:
                _onto_a_device(shown, value, placed(name), weights, stored, proofs.placement, hops)
            progress(stored.nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in weights.opaque:
        proofs.read.skip(weights.prefix + name, "no plain tensor")


def _through_the_disk(name: str, value: torch.Tensor, folder: Path, tally: Tally, *, must: bool) -> None:
    # A file that is mapped and grows beyond its disk ends the process, with SIGBUS; nothing is raised.
    if shutil.disk_usage(folder).free <= value.nbytes:
        tally.skip(name, f"no room for it in {folder.parent}; next: set TMPDIR to a folder that has it")
        return
    # The file's own name for the tensor is never used: it could lead out of the folder.
    try:
        index = offload_weight(value, "tensor", str(folder), index={})
        back = load_offloaded_weight(str(folder / "tensor.dat"), index["tensor"])
    except Exception as error:  # of accelerate's and numpy's, for a dtype that they do not know
        reason = f"accelerate cannot offload it: {error}"
        if must:
            tally.differs(name, reason)
        else:
            tally.skip(name, reason)
        return
    if (found := first_mismatch(back, host_bytes(value))) is None and back.shape == value.shape:
        tally.arrived(value.nbytes)
    else:
        tally.differs(name, found or f"its shape was {list(value.shape)}, now {list(back.shape)}")


def _onto_a_device(
    name: str, value: torch.Tensor, place: Device, weights: Weights, stored: StoredTensor, tally: Tally, hops: Hops
) -> None:  # fmt: skip
    index = place if isinstance(place, int) else 0
    if index >= hops.count:
        tally.skip(name, f"device {index} is not on this machine")
        return
    try:
        there = value.to(device(index))
        found = first_mismatch(there, file_bytes(stored, CHUNK))
    except RuntimeError as error:
        if is_out_of_memory(error):
            tally.skip(name, f"no room for it on device {index}")
        else:
            tally.differs(name, f"on device {index}: {type(error).__name__}: {error}")
        return
    if found is not None:
        tally.differs(name, f"on device {index}: {found}")
        return
    tally.arrived(stored.nbytes)
    hops.make(name, there, lambda: file_bytes(stored, CHUNK))


def bytes_on(devices: Mapping[str, Device], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return device -> bytes of the tensors on it, accelerators first."""
    found: dict[Device, int] = defaultdict(int)
    for name, place in devices.items():
        found[place] += sizes[name]
    order = sorted(found, key=lambda place: (isinstance(place, str), place))
    return {str(place): found[place] for place in order}

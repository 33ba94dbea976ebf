"""Tensors compared with their file's bytes: as read, after the disk, and on their device."""

import hashlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from accelerate.utils import load_offloaded_weight, offload_weight
from msgspec import Struct, field

from ckptfix.devices.offloaded import EmptySlot, Slot, find_slots
from ckptfix.devices.reload.device_maps import (
    CPU,
    DISK,
    Device,
    DeviceMap,
    device_of,
    is_out_of_memory,
)
from ckptfix.devices.reload.filling import holds, tensors_of
from ckptfix.devices.reload.outputs import CHUNK, Bytes, Mismatch, first_mismatch, host_bytes
from ckptfix.devices.reload.reload_report import Outcome, Proofs, Subject
from ckptfix.devices.reload.stored_weights import FileTensor, Weights, file_bytes
from ckptfix.devices.reload.user_model import Built
from ckptfix.devices.torch_devices import device
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.values import ADVICE, ValueFinding, judge_values, trained_for
from ckptfix.errors import OperationError
from ckptfix.tensors.hashing import Hashed
from ckptfix.tensors.scanning import Scan, Scanner
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.wording import count_of, human_size, list_names

_SHOWN = 3


class Tally(Struct, kw_only=True):
    """Tensors that went one way: how many arrived with equal bytes, which did not, and which were
    not sent, and why.

    ``what``: the way, in words. ``converted``: how many of the right ones are held in a wider dtype
    than the file's. ``wrong``: a sentence for each tensor that failed.
    """

    subject: Subject
    what: str
    is_transfer: bool = False
    right: int = 0
    converted: int = 0
    nbytes: int = 0
    wrong: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def arrived(self, nbytes: int, *, converted: bool = False) -> None:
        """Count a tensor that is equal in every byte, or was converted first and is then equal."""
        self.right += 1
        self.converted += converted
        self.nbytes += nbytes

    def differs(self, name: str, what: object) -> None:
        """Count a tensor that is not."""
        self.wrong.append(f"{name!r}: {what}")

    def skip(self, name: str, reason: str) -> None:
        """Count a tensor that could not be sent."""
        self.skipped.setdefault(reason, []).append(name)

    def proofs(self) -> Proofs:
        """Return a line for what failed, or else what arrived, and one for what was not sent."""
        found = Proofs()
        total = self.right + len(self.wrong)
        if self.wrong:
            some = "; ".join(self.wrong[:_SHOWN])
            more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
            text = (
                f"{self.what}: {len(self.wrong)} of {count_of(total, 'tensor')} differ: "
                f"{some}{more}"
            )
            found.add(self.subject, Outcome.FAILED, text, is_transfer=self.is_transfer)
        elif total:
            text = (
                f"{self.what}: {count_of(total, 'tensor')} ({human_size(self.nbytes)}), "
                f"{self._how()}"
            )
            found.add(
                self.subject,
                Outcome.PROVEN if self.nbytes else Outcome.NOT_EXERCISED,
                text,
                is_transfer=self.is_transfer,
            )
        for reason, names in self.skipped.items():
            text = f"{self.what}: {count_of(len(names), 'tensor')} ({list_names(names)}): {reason}"
            found.add(self.subject, Outcome.NOT_EXERCISED, text, is_transfer=self.is_transfer)
        return found

    def _how(self) -> str:
        if not self.nbytes:
            return "all empty: there are no bytes to compare"
        if not self.converted:
            return "equal in every byte"
        if self.converted == self.right:
            return "converted to a wider dtype"
        return f"{self.converted} converted to a wider dtype, the rest equal in every byte"


Progress = Callable[[int], None]


class ValueProofs(Struct, kw_only=True):
    """The values of the weights, judged as ``verify --data`` judges them.

    ``looked_at``: how many tensors with elements. ``has_nan``: one of them holds NaN. ``unread``:
    names of the others.
    """

    findings: list[ValueFinding] = field(default_factory=list)
    looked_at: int = 0
    has_nan: bool = False
    unread: list[str] = field(default_factory=list)

    def add(self, weights: Weights, scans: Mapping[str, Scan]) -> None:
        """Judge the values of one model. ``scans``: of the tensors that were read."""
        tensors = [
            (
                StoredTensor(name, stored.dtype, stored.shape, stored.layout or Contiguous(())),
                Hashed("", scan=scan),
            )
            for name, scan in scans.items()
            for stored in (weights.tensors[name],)
        ]
        self.findings += judge_values(weights.label, tensors, partial(trained_for, weights.root))
        self.looked_at += sum(0 not in tensor.shape for tensor, _ in tensors)
        self.has_nan = self.has_nan or any(scan.nan for scan in scans.values())
        self.unread += [
            weights.prefix + name
            for name in (*weights.tensors, *weights.opaque)
            if name not in scans
        ]

    def proofs(self) -> Proofs:
        """Return a line for each kind of problem, or that there is none, and one for what was not
        looked at.
        """
        proofs = Proofs()
        by_kind: dict[tuple[str, Severity], list[str]] = {}
        for finding in self.findings:
            by_kind.setdefault((finding.code, finding.severity), []).append(str(finding))
        for (code, severity), texts in by_kind.items():
            is_note = severity is Severity.NOTE
            more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            text = f"{code}: {'; '.join(texts[:_SHOWN])}{more}"
            outcome = Outcome.NOTE if is_note else Outcome.FAILED
            proofs.add(Subject.VALUES, outcome, text, advice="" if is_note else ADVICE[code])
        if self.looked_at and not any(proof.outcome is Outcome.FAILED for proof in proofs):
            what = (
                "values: no NaN, no Inf and no all-zero matrix in"
                if not by_kind
                else "values: read in"
            )
            proofs.add(
                Subject.VALUES, Outcome.PROVEN, f"{what} {count_of(self.looked_at, 'tensor')}"
            )
        if self.unread:
            text = f"values of {count_of(len(self.unread), 'tensor')}: {list_names(self.unread)}"
            proofs.add(Subject.VALUES, Outcome.NOT_EXERCISED, text)
        return proofs


class FileProofs(Struct, kw_only=True):
    """Proofs of the files themselves, with a model class or without."""

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
    values: ValueProofs = field(default_factory=lambda: ValueProofs())

    def proofs(self) -> Proofs:
        """Return the lines of the table."""
        tallies = (self.read, self.offload, self.placement)
        return Proofs(
            [*self.values.proofs(), *(proof for tally in tallies for proof in tally.proofs())]
        )


def prove_files(
    weights: Weights,
    placed: Callable[[str], Device] | None,
    proofs: FileProofs,
    progress: Progress,
    *,
    accelerators: int,
) -> None:
    """Read every tensor, and compare it with its file: as read, after the disk, and where
    ``placed`` puts it.

    The values are looked at in the bytes that are compared anyway. ``placed``: name -> device, None
    to leave devices out; tensors for the CPU and the disk go to device 0 and back, as every forward
    pass takes them there. ``accelerators``: how many this machine has. One tensor is in memory at a
    time. Raises OperationError, OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix="ckptfix-verify-"))
    scans: dict[str, Scan] = {}
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
            scanner = Scanner(stored.dtype)
            found = first_mismatch(value, _scanned(file_bytes(stored, CHUNK), scanner))
            if found is not None:
                proofs.read.differs(shown, found)
                continue
            proofs.read.arrived(stored.nbytes)
            scans[name] = scanner.result()
            on_disk = placed is not None and placed(name) == DISK
            _through_the_disk(shown, value, folder, proofs.offload, must=on_disk)
            if placed is not None and accelerators:
                _onto_a_device(shown, value, placed(name), stored, proofs.placement, accelerators)
            progress(stored.nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in weights.opaque:
        proofs.read.skip(weights.prefix + name, "not a plain tensor")
    proofs.values.add(weights, scans)


def _scanned(blocks: Iterable[Bytes], scanner: Scanner) -> Iterator[Bytes]:
    for block in blocks:
        scanner.feed(block)
        yield block


def _through_the_disk(
    name: str, value: torch.Tensor, folder: Path, tally: Tally, *, must: bool
) -> None:
    # A file that is mapped and grows beyond its disk ends the process, with SIGBUS; nothing is
    # raised.
    if shutil.disk_usage(folder).free <= value.nbytes:
        tally.skip(
            name,
            f"not enough space in {folder.parent}; next: set TMPDIR to a folder with more space",
        )
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
        tally.differs(name, found or f"shape was {list(value.shape)}, now {list(back.shape)}")


def _onto_a_device(
    name: str,
    value: torch.Tensor,
    place: Device,
    stored: FileTensor,
    tally: Tally,
    accelerators: int,
) -> None:
    index = place if isinstance(place, int) else 0
    if index >= accelerators:
        tally.skip(name, f"this machine has no device {index}")
        return
    try:
        there = value.to(device(index))
        found = first_mismatch(there, file_bytes(stored, CHUNK))
    except RuntimeError as error:
        if is_out_of_memory(error):
            tally.skip(name, f"not enough memory on device {index}")
        else:
            tally.differs(name, f"on device {index}: {type(error).__name__}: {error}")
        return
    if found is not None:
        tally.differs(name, f"on device {index}: {found}")
        return
    tally.arrived(stored.nbytes)


def bytes_on(devices: Mapping[str, Device], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return device -> bytes of the tensors on it, accelerators first."""
    found: dict[Device, int] = defaultdict(int)
    for name, place in devices.items():
        found[place] += sizes[name]
    order = sorted(found, key=lambda place: (isinstance(place, str), place))
    return {str(place): found[place] for place in order}


class PlacedTensor(NamedTuple):
    """A tensor of a model: its name there, and where its value is; None when no hook keeps one."""

    name: str
    value: torch.Tensor | None


Loaded = Mapping[str, bytes]
"""Name in the model -> sha256 of its bytes on the CPU, for the tensors without a name in the file.
"""


def remember_loaded(built: Built) -> Loaded:
    """Return the digests of a model on the CPU, before it is dispatched."""
    return {
        name: _digest(value)
        for name, value in tensors_of(built.model).items()
        if name not in built.filled.names and not value.is_meta
    }


def prove_model(
    built: Built,
    names: Iterable[str],
    device_map: DeviceMap,
    tally: Tally,
    *,
    main: Device,
    loaded: Loaded = MappingProxyType({}),
) -> None:
    """Compare tensors of a dispatched model with their file, or with ``loaded``, on the device that
    the map says.

    ``loaded``: digests of those that a loader renamed or merged, without a single source tensor in
    the file: a copy of them would double the memory. What is offloaded is compared on device
    ``main``.
    """
    for held in _held(built, names):
        wanted = device_of(held.name, device_map)
        value = held.value
        if value is None:
            tally.differs(held.name, f"expected on {wanted}, but its value is missing")
            continue
        if isinstance(wanted, int) and (value.device.type == CPU or value.device.index != wanted):
            tally.differs(held.name, f"expected on device {wanted}, found on {value.device}")
            continue
        if wanted in (CPU, DISK) and isinstance(main, int):
            value = value.to(device(main))
        found = _difference(built, held.name, value, loaded)
        if found is None:
            tally.arrived(value.nbytes, converted=held.name in built.filled.converted)
        else:
            tally.differs(held.name, f"on {wanted}: {found}")


def _difference(
    built: Built, name: str, value: torch.Tensor, loaded: Loaded
) -> Mismatch | str | None:
    if name in loaded:
        return None if _digest(value) == loaded[name] else "bytes differ from the loaded model"
    return first_mismatch(value, expected_bytes(built, name, value.dtype))


def _digest(value: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    for part in host_bytes(value):
        digest.update(part)
    return digest.digest()


def expected_bytes(built: Built, name: str, dtype: torch.dtype) -> Iterator[Bytes]:
    """Yield the bytes that a tensor of the model must have: the file's own, unless the model holds
    a wider dtype.

    Its loader may have widened it, or its own forward pass: routers of Switch Transformers do that.
    """
    stored = built.weights.tensors[built.filled.names[name]]
    value = built.weights.read(stored.fqn)
    if not stored.has_bytes or (value.dtype != dtype and holds(dtype, value.dtype)):
        return host_bytes(value.to(dtype), CHUNK)
    return file_bytes(stored, CHUNK)


def _held(built: Built, wanted: Iterable[str]) -> Iterator[PlacedTensor]:
    state = tensors_of(built.model)
    names = [name for name in wanted if name in state]
    meta = [name for name in names if state[name].is_meta]
    slots: Mapping[str, Slot] = find_slots(built.model, meta, torch.device(CPU))[0] if meta else {}
    for name in names:
        if not state[name].is_meta:
            yield PlacedTensor(name, state[name].detach())
        else:
            slot = slots.get(name)
            is_kept = slot is not None and not isinstance(slot, EmptySlot)
            yield PlacedTensor(name, slot.read() if is_kept and slot is not None else None)

"""The results of a verification of a reload: proofs, and the matrix of ordered pairs.

A proof has one of five outcomes, and "not exercised" is never shown as anything else.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from ckptfix.devices.probe.probe_report import matrix
from ckptfix.hardware import Pair
from ckptfix.reports import Serialized
from ckptfix.wording import (
    Line,
    Printable,
    collapse_layers,
    count_of,
    human_size,
    line,
)

_BLOCKS = 8  # names of blocks that are shown of a device


class Outcome(Enum):
    """PROVEN: equal in every bit. TOLERANCE: different bits, within the limit that the text states.

    NOTE: worth a look, and no failure.
    """

    PROVEN = "proven"
    TOLERANCE = "TOLERANCE"
    NOTE = "note"
    FAILED = "failed"
    NOT_EXERCISED = "not exercised"


_COLOURS = {
    Outcome.PROVEN: "green",
    Outcome.TOLERANCE: "yellow",
    Outcome.NOTE: "cyan",
    Outcome.FAILED: "red",
    Outcome.NOT_EXERCISED: None,
}


class Subject(Enum):
    """Subject of a proof. The value is a stable name for programs."""

    FILE_BYTES = "file-bytes"
    VALUES = "values"
    LOADING = "loading"
    NAMES = "names"
    DEVICE_MAP = "device-map"
    TIES = "ties"
    DISK_OFFLOAD = "disk-offload"
    PLACEMENT = "placement"
    PEER_PROBE = "peer-probe"
    SPLIT = "split"
    OUTPUTS = "outputs"
    BEYOND = "beyond"


class Proof(Serialized, Struct, frozen=True, kw_only=True):
    """One line of the table. ``is_transfer``: it is about bytes that move to or between
    accelerators.

    ``advice``: what to do about a failure, "" where the subject alone tells.
    """

    json_keys: ClassVar = "subject outcome is_transfer message=text"

    subject: Subject
    outcome: Outcome
    text: str
    is_transfer: bool = False
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.text}"


_ABOUT_TRANSFERS = (Subject.PEER_PROBE, Subject.SPLIT)


class Proofs(list[Proof]):
    """Lines of the table of proofs, in the order in which they came about."""

    def add(
        self,
        subject: Subject,
        outcome: Outcome,
        text: str,
        *,
        is_transfer: bool = False,
        advice: str = "",
    ) -> None:
        """Add a line; those about pairs of accelerators are about transfers in any case."""
        is_transfer = is_transfer or subject in _ABOUT_TRANSFERS
        self.append(
            Proof(
                subject=subject, outcome=outcome, text=text, is_transfer=is_transfer, advice=advice
            )
        )


class PairFacts(Serialized, Struct, frozen=True, kw_only=True):
    """Facts about the copies from one accelerator to another.

    ``probe``: the verdict of the probe ("healthy", "wrong", "hang", "inconclusive", "unusable"),
    None when it did not run; ``probe_kind``: of damage ("zeros", ...), ``probe_detail``: the
    probe's own words. ``moves``: copies in one forward pass of the split model. ``alone_wrong``: of
    ``alone_runs`` passes in which this pair alone copied directly, how many gave another output.
    """

    json_keys: ClassVar = (
        "source destination outcome probe probe_kind probe_detail moves alone_runs alone_wrong"
    )

    pair: Pair
    probe: str | None = None
    probe_kind: str = ""
    probe_detail: str = ""
    moves: int = 0
    alone_runs: int = 0
    alone_wrong: int = 0

    @property
    def outcome(self) -> Outcome:
        """FAILED when any copy was wrong or could not be made, PROVEN when some were right and none
        was wrong.
        """
        if self.alone_wrong or self.probe in ("wrong", "hang", "unusable"):
            return Outcome.FAILED
        if self.probe == "healthy":
            return Outcome.PROVEN
        return Outcome.NOT_EXERCISED

    @property
    def word(self) -> str:
        """The outcome in one word or two, for a matrix: of a failed pair the kind of damage, where
        it is known.
        """
        if self.outcome is not Outcome.FAILED:
            return str(self.outcome.value)
        stopped = self.probe if self.probe in ("hang", "unusable") else ""
        return self.probe_kind or stopped or "wrong"

    @property
    def source(self) -> int:
        """The accelerator from which was copied."""
        return self.pair[0]

    @property
    def destination(self) -> int:
        """The accelerator to which was copied."""
        return self.pair[1]


class Accelerators(Serialized, Struct, frozen=True, kw_only=True):
    """The accelerators here: their type ("cuda"), and the name that each reports."""

    json_keys: ClassVar = "accelerator devices=names"

    accelerator: str | None
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of accelerators."""
        return len(self.names)

    def __str__(self) -> str:
        if not self.count:
            return "CPU only"
        kinds = ", ".join(dict.fromkeys(self.names))
        number = "one" if self.count == 1 else str(self.count)
        return f"{number} {self.accelerator} device{'s' if self.count > 1 else ''} ({kinds})"


_PEERS = (
    "ckptfix doctor --peer-copies; until the copies are correct: dispatch_model(..., "
    "safe_transfers='always')"
)
_HARDWARE = "run it again; if it fails again, test the memory, disk and devices of this machine"
_ADVICE = {
    Subject.FILE_BYTES: "copy the file again from its source, or load an older checkpoint",
    Subject.LOADING: (
        "fix what from_pretrained reports, or pass --model a factory that builds the model"
    ),
    Subject.NAMES: "make --model or config.json match these weights and their dtype",
    Subject.DEVICE_MAP: "assign a device to every tensor in the map, or use --device-map auto",
    Subject.TIES: "change the map or config.json as described in that line",
    Subject.DISK_OFFLOAD: _HARDWARE,
    Subject.PLACEMENT: _HARDWARE,
    Subject.PEER_PROBE: _PEERS,
    Subject.SPLIT: _PEERS,
    Subject.OUTPUTS: "load the model onto one device, or try another --device-map",
}
"""The next step after a failure whose line names none."""


class ReloadReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Proofs of ``verify_reload``, failures, and what it did not exercise.

    ``model``: what was built, "" without a model class. ``device_map``: module or tensor name ->
    device, as text. ``device_bytes``: device -> bytes of weights on it. ``nbytes``: of all tensors.
    ``repeats``: runs asked for, ``ran``: runs made of a split each way; 0 where the model was not
    run.
    """

    json_keys: ClassVar = (
        "path machine model map_source device_map device_bytes tensors bytes=nbytes repeats proofs "
        "pairs require_transfer_proof ran verdict next=next_steps"
    )

    path: Path
    machine: Accelerators
    model: str
    map_source: str
    device_map: Mapping[str, str]
    device_bytes: Mapping[str, int]
    tensors: int
    nbytes: int
    repeats: int
    proofs: tuple[Proof, ...]
    pairs: tuple[PairFacts, ...] = ()
    require_transfer_proof: bool = False
    ran: int = 0

    @property
    def unproven_transfers(self) -> tuple[Proof, ...]:
        """The proofs about transfers that were not exercised."""
        return tuple(
            proof
            for proof in self.proofs
            if proof.is_transfer and proof.outcome is Outcome.NOT_EXERCISED
        )

    @property
    def is_empty(self) -> bool:
        """True if nothing was exercised at all."""
        return all(proof.outcome in (Outcome.NOT_EXERCISED, Outcome.NOTE) for proof in self.proofs)

    @property
    def status(self) -> int:
        """Exit status: 1 when anything failed, or transfers were to be proven and were not;
        else 0.
        """
        if any(proof.outcome is Outcome.FAILED for proof in self.proofs):
            return 1
        return int(self.require_transfer_proof and bool(self.unproven_transfers))

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.status == 0:
            return (
                "nothing was exercised, so nothing is proven"
                if self.is_empty
                else "no fault found in what was exercised"
            )
        reasons = []
        failed = [proof.subject.value for proof in self.proofs if proof.outcome is Outcome.FAILED]
        if failed:
            reasons.append(
                f"{count_of(len(failed), 'failed line')} ({', '.join(dict.fromkeys(failed))})"
            )
        if self.require_transfer_proof and self.unproven_transfers:
            lines = count_of(len(self.unproven_transfers), "line")
            reasons.append(f"{lines} about transfers not exercised (--require-transfer-proof)")
        return f"the reload is not proven: {', and '.join(reasons)}"

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The next step for each kind of failure, the first cause first."""
        steps = []
        for proof in self.proofs:
            if proof.outcome is Outcome.FAILED:
                is_about_peers = proof.subject in _ABOUT_TRANSFERS
                in_line = (
                    "" if is_about_peers else proof.text.partition("next: ")[2].partition("; ")[0]
                )
                steps.append(proof.advice or in_line or _ADVICE[proof.subject])
        if self.status and not steps:
            steps.append(
                "run it on a machine with the accelerators, or omit --require-transfer-proof"
            )
        return tuple(dict.fromkeys(steps))

    def lines(self) -> Iterator[Line]:
        """Yield the map, the table of proofs, the matrix of pairs, the verdict, and what to do."""
        size = f"{count_of(self.tensors, 'tensor')}, {human_size(self.nbytes)}"
        yield line(f"{self.path}: {size}; {self.machine}", bold=True)
        yield line(f"model: {self.model or 'no class'}; device map: {self.map_source}")
        yield from self._map_lines()
        for proof in self.proofs:
            is_open = proof.outcome is Outcome.NOT_EXERCISED
            label = proof.outcome.value.upper() if is_open else proof.outcome.value
            yield line(f"{label:>13}  {proof.text}", colour=_COLOURS[proof.outcome])
        if self.pairs:
            yield from map(line, matrix({facts.pair: facts.word for facts in self.pairs}))
        if self.status:
            yield line(self.verdict, colour="red", bold=True)
        else:
            yield line(self.verdict, colour=None if self.is_empty else "green", bold=self.is_empty)
        yield from (line(f"next: {step}") for step in self.next_steps)

    def _map_lines(self) -> Iterator[Line]:
        by_device: dict[str, list[str]] = {}
        for name, device in self.device_map.items():
            # With a dot behind it, the number at the end of a block's name counts, too.
            by_device.setdefault(device, []).append(f"{name}.")
        for device, names in by_device.items():
            blocks = [
                name.removesuffix(".") or "the whole model" for name in collapse_layers(names)
            ]
            more = f" and {len(blocks) - _BLOCKS} more" if len(blocks) > _BLOCKS else ""
            size = human_size(self.device_bytes.get(device, 0))
            yield line(f"  {device}: {size}: {', '.join(blocks[:_BLOCKS])}{more}")

"""Results of a probe, pair by pair: values, their JSON, and a matrix for people. Free of torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ckptfix.hardware import Pair
from ckptfix.wording import count_of

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

STRICTEST = "full"
"""Name of the plan that exercises most."""

SAMPLED = "sample"
"""Name of the plan that only looks whether a pair that was found healthy still is."""


class Verdict(Enum):
    """State of the copies of one ordered pair of devices.

    HEALTHY: every copy that the plan holds was made and arrived bit for bit; no more than that.
    WRONG: a copy delivered other bytes, delivered them late, raised, or killed the process. HANG: a
    copy did not end. INCONCLUSIVE: not all of the plan was done, so nothing is proven. UNUSABLE: a
    device of the pair fails in its own exchange with the host.
    """

    HEALTHY = "healthy"
    WRONG = "wrong"
    HANG = "hang"
    INCONCLUSIVE = "inconclusive"
    UNUSABLE = "unusable"


class Kind(Enum):
    """A kind of damage to the bytes of a copy. The value is the word used in reports."""

    ZEROS = "zeros"
    UNWRITTEN = "not written"  # the destination still holds what it held before
    STALE = "stale"  # what an earlier copy of this pair carried
    PARTIAL = "partial"  # one part is missing
    HOLES = "holes"  # several parts are missing
    BIT_FLIP = "bit flip"
    SHIFT = "shift"  # the right bytes at a displaced address
    SWAP = "swap"  # the two halves in each other's place
    LATE = "late"  # right after the host has waited, wrong for the kernel queued behind the copy
    OUTSIDE = "outside"  # memory next to the destination was written
    GARBAGE = "garbage"
    ERROR = "error"  # the copy raised
    CRASH = "crash"  # the process died in the copy


_PROVING = (Verdict.HEALTHY, Verdict.INCONCLUSIVE)
"""Verdicts of a pair without a known fault."""


def seconds_since_boot() -> float:
    """Return a time that can be compared with others of the same boot, whatever is done to the
    calendar.
    """
    return time.clock_gettime(_SINCE_BOOT)


class PairReport(Struct, frozen=True, kw_only=True):
    """One ordered pair of devices.

    ``kind``: of the damage, in words ("zeros", "late", ...); "" where there is none.
    ``first_offset``: its first wrong byte, from the start of the payload. ``trials``: copies made
    and compared, ``failures``: those that were wrong. ``seed``: of the whole probe; the same seed
    sends the same bits in the same order. ``detail``: what the verdict rests on. ``peer_access``:
    whether the driver offers it; None where torch cannot tell. ``plan``: the name of what was to be
    exercised, "full" for the strictest. ``blind``: something in the environment hid faults from the
    probe.

    ``done``: cases of each section that were done and need not be done again, by the section's
    name. ``tried``: the copies of each kind, by the seed of the probe that made them: probes with
    different seeds sent different bits, so their copies add up, and one that is counted twice is
    counted once. ``began`` and ``measured``: when the probe that gave the verdict began, and when
    copies were made last, in seconds since the boot; 0 where that is not known.
    """

    pair: Pair
    verdict: Verdict
    kind: str = ""
    first_offset: int | None = None
    trials: int = 0
    failures: int = 0
    seed: int
    detail: str = ""
    peer_access: bool | None = None
    plan: str = ""
    blind: bool = False
    done: Mapping[str, int] = field(default_factory=dict)
    tried: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    began: float = 0.0
    measured: float = 0.0

    def trials_by_kind(self) -> Mapping[str, int]:
        """Return how many copies of each kind were made and compared, in all probes that count."""
        total: Counter[str] = Counter()
        for counts in self.tried.values():
            total.update(counts)
        return total

    def over(self, older: PairReport | None) -> PairReport | None:
        """Return the report of a pair from now on, with ``older`` as the one so far (None: no
        report).

        What is proven stays: an inconclusive probe changes no verdict. What several probes did of a
        plan adds up, whatever the order in which they are taken in. Damage that was seen once, by
        chance perhaps, stays until a full plan that began later finds the pair healthy: of two
        probes that run at once and differ, the one that saw it is right. A blind probe proves
        nothing, and a sample nothing that was not proven before.
        """
        if older is not None and older._is_damage:
            if self.verdict in _PROVING:
                return self if self._is_strict_proof and self.began >= older.measured else older
            return self if self._is_damage and self.measured >= older.measured else older
        if (
            older is not None
            and self._is_damage
            and older._is_strict_proof
            and older.began > self.measured
        ):
            return older
        if self.verdict not in _PROVING:
            return self
        if self.plan == SAMPLED and (older is None or older.verdict not in _PROVING):
            return older
        if self.blind and (older is not None or self.verdict is Verdict.HEALTHY):
            return older
        return self._added_to(older) if older is not None and older.verdict in _PROVING else self

    @property
    def _is_damage(self) -> bool:
        return self.verdict in (Verdict.WRONG, Verdict.HANG)

    @property
    def _is_strict_proof(self) -> bool:
        return self.verdict is Verdict.HEALTHY and self.plan == STRICTEST and not self.blind

    def _added_to(self, older: PairReport) -> PairReport:
        best, other = (self, older) if self._weight >= older._weight else (older, self)
        tried = {
            seed: max(
                (one.tried.get(seed, {}) for one in (older, self)),
                key=lambda counts: sum(counts.values()),
            )
            for seed in {**older.tried, **self.tried}
        }
        done = {
            name: max(best.done.get(name, 0), other.done.get(name, 0))
            for name in {**best.done, **other.done}
        }
        measured = (
            max(best.measured, other.measured) if best.verdict is other.verdict else best.measured
        )
        began = max(best.began, other.began) if best._weight == other._weight else best.began
        trials = max(best.trials, other.trials)
        return replace(best, trials=trials, done=done, tried=tried, began=began, measured=measured)

    @property
    def _weight(self) -> tuple[bool, bool, bool]:
        return self.plan != SAMPLED, self.verdict is Verdict.HEALTHY, self.plan == STRICTEST

    def __str__(self) -> str:
        source, destination = self.pair
        kind = f": {self.kind}" if self.kind not in ("", self.verdict.value) else ""
        offset = f" from byte {self.first_offset}" if self.first_offset is not None else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{source} -> {destination} {self.verdict.value}{kind}{offset}{detail}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            **asdict(self),
            "pair": list(self.pair),
            "verdict": self.verdict.value,
            "began": round(self.began, 3),
            "measured": round(self.measured, 3),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PairReport:
        """Return the report that ``to_json`` gave. Raises KeyError, TypeError or ValueError for
        anything else.
        """
        source, destination = (int(index) for index in values["pair"])
        offset, access = values["first_offset"], values["peer_access"]
        return cls(
            pair=(source, destination),
            verdict=Verdict(values["verdict"]),
            kind=str(values["kind"]),
            first_offset=None if offset is None else int(offset),
            trials=int(values["trials"]),
            failures=int(values["failures"]),
            seed=int(values["seed"]),
            detail=str(values["detail"]),
            peer_access=None if access is None else bool(access),
            plan=str(values["plan"]),
            blind=bool(values["blind"]),
            done=_counts(values["done"]),
            tried={str(seed): _counts(counts) for seed, counts in values["tried"].items()},
            began=float(values["began"]),
            measured=float(values["measured"]),
        )


class ProbeReport(Struct, frozen=True, kw_only=True):
    """All ordered pairs. ``str()`` is a matrix, what is behind it, and what was not exercised.

    ``seconds``: of measuring; ``starting``: seconds that starting the worker took on top.
    ``devices``: their names, by index. ``identity``: hardware, driver, boot and torch that the
    verdicts hold for; empty where they cannot be told from others, so that nothing of it may be
    remembered. ``hosts``: devices whose own exchange with the host was proven, and when, in seconds
    since the boot.
    """

    pairs: Mapping[Pair, PairReport]
    seed: int
    seconds: float = 0.0
    starting: float = 0.0
    devices: tuple[str, ...] = ()
    exercised: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    hosts: Mapping[int, float] = field(default_factory=dict)

    def with_verdict(self, *verdicts: Verdict) -> frozenset[Pair]:
        """Return the pairs that got one of these verdicts."""
        return frozenset(pair for pair, report in self.pairs.items() if report.verdict in verdicts)

    @property
    def unproven(self) -> frozenset[Pair]:
        """The pairs that are anything but HEALTHY: those that a safe transfer takes through the
        host.
        """
        return frozenset(self.pairs) - self.with_verdict(Verdict.HEALTHY)

    def renewed_by(self, newer: ProbeReport) -> ProbeReport:
        """Return what is known with ``newer`` taken in: of each pair what ``PairReport.over``
        says.
        """
        pairs = dict(self.pairs)
        for pair, report in newer.pairs.items():
            now = report.over(pairs.get(pair))
            if now is not None:
                pairs[pair] = now
        failed = {index for pair in newer.with_verdict(Verdict.UNUSABLE) for index in pair}
        hosts = {
            index: max(self.hosts.get(index, 0.0), newer.hosts.get(index, 0.0))
            for index in sorted({**self.hosts, **newer.hosts})
            if index not in failed
        }
        return replace(
            newer,
            pairs=pairs,
            hosts=hosts,
            exercised=tuple(dict.fromkeys((*self.exercised, *newer.exercised))),
        )

    def only(self, pairs: Iterable[Pair]) -> ProbeReport:
        """Return this report without all pairs but these."""
        wanted = frozenset(pairs)
        return replace(
            self, pairs={pair: self.pairs[pair] for pair in self.pairs if pair in wanted}
        )

    def __repr__(self) -> str:
        counts = Counter(report.verdict.value for report in self.pairs.values())
        verdicts = ", ".join(f"{counts[one]} {one}" for one in counts)
        return (
            "<ProbeReport "
            f"{count_of(len(self.pairs), 'pair')}{f': {verdicts}' if verdicts else ''}>"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        if self.pairs:
            yield from matrix(
                {pair: one.kind or one.verdict.value for pair, one in self.pairs.items()}
            )
            yield from (
                str(report)
                for report in self.pairs.values()
                if report.verdict is not Verdict.HEALTHY
            )
        if self.with_verdict(Verdict.HEALTHY):
            yield "healthy: the copies listed below arrived bit for bit; nothing else is proven"
        yield from (f"exercised: {line}" for line in self.exercised)
        yield from (f"NOT exercised: {line}" for line in self.not_exercised)
        yield from (f"hint: {line}" for line in self.hints)
        yield f"seed {self.seed}; {self.seconds:.1f} s, and {self.starting:.1f} s to start"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, which ``from_json`` reads."""
        return {
            "pairs": [report.to_json() for report in self.pairs.values()],
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "starting": round(self.starting, 3),
            "devices": list(self.devices),
            "exercised": list(self.exercised),
            "not_exercised": list(self.not_exercised),
            "hints": list(self.hints),
            "identity": dict(self.identity),
            "hosts": [[index, round(when, 3)] for index, when in self.hosts.items()],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProbeReport:
        """Return the report that ``to_json`` gave. Raises KeyError, TypeError or ValueError for
        anything else.
        """
        reports = tuple(PairReport.from_json(item) for item in values["pairs"])
        return cls(
            pairs={report.pair: report for report in reports},
            seed=int(values["seed"]),
            seconds=float(values["seconds"]),
            starting=float(values["starting"]),
            devices=tuple(str(name) for name in values["devices"]),
            exercised=tuple(str(line) for line in values["exercised"]),
            not_exercised=tuple(str(line) for line in values["not_exercised"]),
            hints=tuple(str(line) for line in values["hints"]),
            identity=dict(values["identity"]),
            hosts={int(index): float(when) for index, when in values["hosts"]},
        )


def _counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in values.items()}


def matrix(words: Mapping[Pair, str]) -> Iterable[str]:
    """Yield the lines of a table of words for ordered pairs: rows copy to columns."""
    indexes = sorted({index for pair in words for index in pair})
    head = "from \\ to  "
    width = max(9, *(len(word) + 2 for word in words.values()))
    yield head + "".join(f"{index}".ljust(width) for index in indexes).rstrip()
    for source in indexes:
        cells = (words.get((source, index), "-").ljust(width) for index in indexes)
        yield f"{source}".ljust(len(head)) + "".join(cells).rstrip()

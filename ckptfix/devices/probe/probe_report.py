"""Results of a probe, pair by pair: values, their JSON, and a matrix for people. Free of torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, convert, field, to_builtins
from msgspec.structs import replace

from ckptfix.hardware import Pair
from ckptfix.wording import count_of

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


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


def seconds_since_boot() -> float:
    """Return a time that can be compared with others of the same boot, whatever is done to the
    calendar.
    """
    return time.clock_gettime(_SINCE_BOOT)


class PairReport(Struct, frozen=True, kw_only=True):
    """One ordered pair of devices.

    ``kind``: of the damage, in words ("zeros", "late", ...); "" where there is none.
    ``first_offset``: its first wrong byte, from the start of the destination. ``trials``: copies
    made and compared, ``failures``: those that were wrong. ``seed``: of the whole probe; the same
    seed sends the same bits in the same order. ``detail``: what the verdict rests on.
    ``peer_access``: whether the driver offers it; None where torch cannot tell. ``made``: the trials
    by size and engine.
    ``began`` and ``measured``: when the probe that gave the verdict began and ended, in seconds
    since the boot; 0 where that is not known.
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
    made: Mapping[str, int] = field(default_factory=dict)
    began: float = 0.0
    measured: float = 0.0

    def over(self, older: PairReport | None) -> PairReport:
        """Return the report of a pair from now on, with ``older`` as the one so far (None: no
        report).

        What is proven stays: an inconclusive probe changes no verdict. Damage that was seen once,
        by chance perhaps, stays until a probe that began later finds the pair healthy: of two
        probes that run at once and differ, the one that saw it is right.
        """
        if older is None or self.is_damage:
            return self
        if older.is_damage:
            is_later = self.verdict is Verdict.HEALTHY and self.began >= older.measured
            return self if is_later else older
        changes_nothing = self.verdict is Verdict.INCONCLUSIVE and older.verdict is Verdict.HEALTHY
        return older if changes_nothing else self

    @property
    def is_damage(self) -> bool:
        """True if a copy was wrong or hung."""
        return self.verdict in (Verdict.WRONG, Verdict.HANG)

    def __str__(self) -> str:
        source, destination = self.pair
        kind = f": {self.kind}" if self.kind not in ("", self.verdict.value) else ""
        offset = f" from byte {self.first_offset}" if self.first_offset is not None else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{source} -> {destination} {self.verdict.value}{kind}{offset}{detail}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values. ``blind``, ``plan``, ``done`` and ``tried`` are for
        readers of reports of 0.5.0.
        """
        return {
            **to_builtins(self),
            "began": round(self.began, 3),
            "measured": round(self.measured, 3),
            "blind": False,
            "plan": "full",
            "done": dict(self.made),
            "tried": {str(self.seed): dict(self.made)},
        }


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
        renewed = {pair: report.over(self.pairs.get(pair)) for pair, report in newer.pairs.items()}
        return replace(newer, pairs={**self.pairs, **renewed})

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
            **to_builtins(replace(self, pairs={}, hosts={})),
            "pairs": [report.to_json() for report in self.pairs.values()],
            "hosts": [[index, round(when, 3)] for index, when in self.hosts.items()],
            "seconds": round(self.seconds, 3),
            "starting": round(self.starting, 3),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProbeReport:
        """Return the report that ``to_json`` gave. Raises KeyError, TypeError or ValueError for
        anything else.
        """
        reports = convert(values["pairs"], tuple[PairReport, ...])
        pairs = {report.pair: report for report in reports}
        return convert({**values, "pairs": pairs, "hosts": dict(values["hosts"])}, cls)


def matrix(words: Mapping[Pair, str]) -> Iterable[str]:
    """Yield the lines of a table of words for ordered pairs: rows copy to columns."""
    indexes = sorted({index for pair in words for index in pair})
    head = "from \\ to  "
    width = max(9, *(len(word) + 2 for word in words.values()))
    yield head + "".join(f"{index}".ljust(width) for index in indexes).rstrip()
    for source in indexes:
        cells = (words.get((source, index), "-").ljust(width) for index in indexes)
        yield f"{source}".ljust(len(head)) + "".join(cells).rstrip()

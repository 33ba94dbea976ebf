"""What is known of each pair while a probe runs, and the verdict that follows from it."""

from collections import Counter
from dataclasses import dataclass, field

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.damage import Kind
from ckptfix.runtime.devices.probe.report import PairReport, Verdict
from ckptfix.runtime.devices.probe.task import Ending, Failure, Outcome

_TELLING = 4 * 4096
"""Bytes from which the kind of damage can be told for certain: in fewer, two lost pages are one."""

KILLED = "SIGKILL"
"""What the kernel ends a process with when the host has no memory left: no evidence against a pair."""


@dataclass(slots=True, kw_only=True)
class PairRecord:
    """One pair. ``sections``: those of the plan that were done; ``doubt``: why nothing can be proven."""

    pair: Pair
    trials: int = 0
    failures: list[Failure] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)
    ended: Verdict | None = None
    kind: str = ""
    why: str = ""
    doubt: str = ""
    unpoisoned: int = 0

    @property
    def open(self) -> bool:
        """Whether more copies over this pair would tell more."""
        return not self.failures and self.ended is None and not self.doubt

    def add(self, outcome: Outcome, section: int) -> None:
        """Take in what became of one section."""
        self.trials += outcome.trials
        self.failures += outcome.failures
        self.unpoisoned += outcome.unpoisoned
        match outcome.ending:
            case Ending.DONE if outcome.unusable < 0:
                self.sections.add(section)
            case Ending.NO_MEMORY:
                self.doubt = f"no memory for {outcome.stage or 'the copies'}: {outcome.message}"
            case Ending.RAISED | Ending.DIED | Ending.HUNG:
                self._ended_badly(outcome)

    def _ended_badly(self, outcome: Outcome) -> None:
        if not outcome.stage or KILLED in outcome.message:
            self.doubt = f"{outcome.stage or 'between two copies'}: {outcome.message}"
            return
        self.why = f"{outcome.stage}: {outcome.message}"
        if outcome.ending is Ending.HUNG:
            self.ended, self.kind = Verdict.HANG, "hang"
        else:
            kind = Kind.ERROR if outcome.ending is Ending.RAISED else Kind.CRASH
            self.ended, self.kind = Verdict.WRONG, kind.value

    def report(
        self, *, sections: int, seed: int, peer_access: bool | None, unusable: str, plan: str, blind: bool
    ) -> PairReport:
        """Return the verdict. ``sections``: how many the plan has; ``unusable``: what is wrong with a device of it."""
        verdict, kind, offset, detail = self._verdict(sections, unusable)
        return PairReport(
            pair=self.pair,
            verdict=verdict,
            kind=kind,
            first_offset=offset,
            trials=self.trials,
            failures=len(self.failures) + (self.ended is not None),
            seed=seed,
            detail=detail,
            peer_access=peer_access,
            plan=plan,
            blind=blind,
        )

    def _verdict(self, sections: int, unusable: str) -> tuple[Verdict, str, int | None, str]:
        if unusable:
            return Verdict.UNUSABLE, "", None, unusable
        if self.ended is not None:
            return self.ended, self.kind, None, self.why
        if self.failures:
            shown = self._most_telling()
            detail = f"{len(self.failures)} of {self.trials} copies; {shown.case}"
            return Verdict.WRONG, shown.kind, shown.first_offset, detail
        if self.doubt:
            return Verdict.INCONCLUSIVE, "", None, self.doubt
        if len(self.sections) < sections:
            return (
                Verdict.INCONCLUSIVE,
                "",
                None,
                f"only {self.trials} copies before the time was up, all right",
            )
        return Verdict.HEALTHY, "", None, f"{self.trials} copies, all right"

    def _most_telling(self) -> Failure:
        """Return the first failure of the kind that most failures are of, small payloads left aside."""
        told = [failure for failure in self.failures if failure.size >= _TELLING] or self.failures
        kind, _ = Counter(failure.kind for failure in told).most_common(1)[0]
        return next(failure for failure in told if failure.kind == kind)

"""What is known of each pair while a probe runs, and the verdict that follows from it."""

from collections import Counter
from dataclasses import dataclass, field

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.cases import Plan, Section
from ckptfix.runtime.devices.probe.damage import Kind
from ckptfix.runtime.devices.probe.report import SAMPLED, PairReport, Verdict
from ckptfix.runtime.devices.probe.task import Ending, Failure, Outcome

_TELLING = 4 * 4096
"""Bytes from which the kind of damage can be told for certain: in fewer, two lost pages are one."""

KILLED = "SIGKILL"
"""What the kernel ends a process with when the host has no memory left: no evidence against a pair."""


@dataclass(slots=True, kw_only=True)
class PairRecord:
    """One pair. ``done``: cases of each section that were done, by this probe or by ``earlier`` ones.

    ``doubt``: why nothing can be proven. ``tried``: the trials of this probe, by ``Case.kind``.
    """

    pair: Pair
    earlier: PairReport | None = None
    trials: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    ended: Verdict | None = None
    kind: str = ""
    why: str = ""
    doubt: str = ""
    unpoisoned: int = 0

    @property
    def open(self) -> bool:
        """Whether more copies over this pair would tell more."""
        return not self.failures and self.ended is None and not self.doubt

    def __post_init__(self) -> None:
        if self.earlier is not None:
            self.done.update(self.earlier.done)

    def left(self, section: Section) -> bool:
        """Return whether cases of a section are left to do."""
        return self.done.get(section.name, 0) < len(section.cases)

    def finished(self, plan: Plan) -> bool:
        """Return whether nothing of a plan is left to do."""
        return not any(self.left(section) for section in plan.sections)

    def is_enough(self, plan: Plan) -> bool:
        """Return whether the pair is proven if nothing speaks against it.

        A pair that was finished before, and is asked for again, was in doubt: without a copy more it still is.
        """
        return self.trials > 0 and self.finished(plan)

    def add(self, outcome: Outcome, section: Section) -> None:
        """Take in what became of one section."""
        self.add_failures(outcome)
        self.tried.update(outcome.tried)
        self.unpoisoned += outcome.unpoisoned
        if outcome.unusable < 0:
            done = len(section.cases) if outcome.ending is Ending.DONE else outcome.done
            self.done[section.name] = max(self.done.get(section.name, 0), done)
        match outcome.ending:
            case Ending.NO_MEMORY:
                self.doubt = f"no memory for {outcome.stage or 'the copies'}: {outcome.message}"
            case Ending.RAISED | Ending.DIED | Ending.HUNG:
                self._ended_badly(outcome)

    def add_failures(self, outcome: Outcome) -> None:
        """Take in the copies that this pair made in a task, and those of them that were wrong."""
        self.trials += outcome.trials
        self.failures += [failure for failure in outcome.failures if failure.pair == self.pair]

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
        self,
        *,
        plan: Plan,
        seed: int,
        peer_access: bool | None,
        unusable: str,
        blind: bool,
        began: float = 0.0,
        measured: float = 0.0,
    ) -> PairReport:
        """Return the verdict. ``unusable``: what is wrong with a device of the pair; the rest: see ``PairReport``."""
        verdict, kind, offset, detail = self._verdict(plan, unusable)
        proving = verdict in (Verdict.HEALTHY, Verdict.INCONCLUSIVE) and not blind
        before = dict(self.earlier.tried) if self.earlier is not None and proving else {}
        return PairReport(
            pair=self.pair,
            verdict=verdict,
            kind=kind,
            first_offset=offset,
            trials=self._all_trials if proving else self.trials,
            failures=len(self.failures) + (self.ended is not None),
            seed=seed,
            detail=detail,
            peer_access=peer_access,
            plan=plan.name,
            blind=blind,
            done=dict(self.done) if proving and plan.name != SAMPLED else {},
            tried={**before, str(seed): dict(self.tried)} if proving and self.tried else before,
            began=began,
            measured=measured if self.trials or self.earlier is None else self.earlier.measured,
        )

    @property
    def _all_trials(self) -> int:
        return self.trials + (self.earlier.trials if self.earlier is not None else 0)

    def _verdict(self, plan: Plan, unusable: str) -> tuple[Verdict, str, int | None, str]:
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
        if not self.is_enough(plan):
            return (
                Verdict.INCONCLUSIVE,
                "",
                None,
                f"only {self._all_trials} copies before the time was up, all right; the next probe goes on from there",
            )
        return Verdict.HEALTHY, "", None, f"{self._all_trials} copies, all right"

    def _most_telling(self) -> Failure:
        """Return the first failure of the kind that most failures are of, small payloads left aside."""
        told = [failure for failure in self.failures if failure.size >= _TELLING] or self.failures
        kind, _ = Counter(failure.kind for failure in told).most_common(1)[0]
        return next(failure for failure in told if failure.kind == kind)

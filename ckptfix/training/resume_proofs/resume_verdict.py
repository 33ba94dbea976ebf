"""Comparison of three recorded runs: without a resume first, then the resumed run with the
uninterrupted one.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ckptfix.reports import Serialized
from ckptfix.training.resume_proofs.causes import Cause, Evidence, Relation, cause_of
from ckptfix.training.resume_proofs.recorded_runs import (
    STATES,
    UNPREPARED,
    Batch,
    Entry,
    Named,
    RankRun,
    RankRuns,
    Save,
    Step,
)
from ckptfix.wording import count_of, list_names

_AT_ENTRY = (
    *("learning rate", "scheduler", "scaler", "weights", "moments", "gradients", "counters"),
    *("custom objects", UNPREPARED),
)
"""States that must be restored when the first loss of the resumed run arrives. The buffers have
seen a batch then.
"""

_OWN = ("generators", "custom objects", UNPREPARED)
"""States that a script may leave unseeded: where two uninterrupted runs differ in them alone, they
are left out.
"""

_NUMBERS = ("learning rate", "scheduler", "scaler", "counters")
"""States whose values are shown."""

_ROOTS = ("batch", "learning rate", "scheduler")
"""States that do not follow from other states in a few steps: worth a line where they differ later
than others.
"""

_HARMLESS = {"generators", "scheduler", "custom objects", "counters"}
"""States from which nothing follows until something uses them."""

_AFTER = " after the step"

Ignored = frozenset[tuple[str, str]]
"""State and name of what differs between two uninterrupted runs and is not compared."""


@dataclass(frozen=True)
class Difference(Serialized):
    """First difference of a rank in one state.

    ``expected``, ``found``: values by name, None where one is missing. ``is_restored``: a guarded
    run restores it.
    """

    step: int
    rank: int
    state: str
    words: str
    names: tuple[str, ...] = ()
    expected: Mapping[str, str | None] = field(default_factory=dict)
    found: Mapping[str, str | None] = field(default_factory=dict)
    relation: Relation = Relation.NONE
    cause: Cause | None = None
    is_restored: bool = False

    json_keys = (
        "step rank state message=words names expected found code cause=reason change "
        "guard=is_restored"
    )

    @property
    def code(self) -> str | None:
        """The code of the cause, None where it is not known."""
        return self.cause.code if self.cause else None

    @property
    def reason(self) -> str | None:
        """The cause in words, None where it is not known."""
        return self.cause.words if self.cause else None

    @property
    def change(self) -> str | None:
        """The line to change, None where the cause is not known."""
        return self.cause.change if self.cause else None


@dataclass(frozen=True)
class Comparison:
    """Result of comparing runs.

    ``control``: difference between two uninterrupted runs, None if there is none. ``differences``:
    those of the first step that differs, in the order in which one follows from another, and later
    ones that do not follow from them. ``first_steps``: state -> first step in which it differs.
    ``strips``: state -> for each compared step, whether it agrees, None where the state is not
    there.
    """

    saved_at: int
    steps: tuple[int, ...]
    ranks: int
    control: Difference | None = None
    differences: tuple[Difference, ...] = ()
    first_steps: Mapping[str, int] = field(default_factory=dict)
    strips: Mapping[str, tuple[bool | None, ...]] = field(default_factory=dict)
    ignored: Ignored = frozenset()
    passes_begun: int = 0


@dataclass(frozen=True)
class _Row:
    """One step as it is compared: every state with its names."""

    step: int
    states: Mapping[str, Named]
    batches: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, step: Step) -> "_Row":
        losses = {f"loss {at + 1}": one.value for at, one in enumerate(step.losses)}
        generators = {
            f"{name} at loss {at + 1}" if len(step.losses) > 1 else name: digest
            for at, one in enumerate(step.losses)
            for name, digest in one.generators.items()
        }
        after = {f"{name}{_AFTER}": one for name, one in step.states.get("generators", {}).items()}
        batches = {f"batch {at + 1}": repr(one.identity) for at, one in enumerate(step.batches)}
        states = {
            **step.states,
            "loss": losses,
            "generators": {**generators, **after},
            "batch": batches,
        }
        return cls(step.number, states, step.batches)


def control(a: RankRuns, b: RankRuns, last: int | None = None) -> tuple[Difference | None, Ignored]:
    """Compare two uninterrupted runs up to where the shorter one ends, or to the step ``last``.

    Return their first difference in what a training computes, and the generators and custom objects
    that differ alone.
    """
    ignored: set[tuple[str, str]] = set()
    found: list[Difference] = []
    for one, other in zip_longest(a, b):
        if one is None or other is None:
            rank = (one or other).rank
            return (
                Difference(0, rank, "batch", "only one of two uninterrupted runs has this rank"),
                frozenset(),
            )
        for row, again in zip(map(_Row.of, one.steps), map(_Row.of, other.steps), strict=False):
            if last is not None and row.step > last:
                break
            hard = [state for state in STATES if state not in _OWN and _differs(state, row, again)]
            if hard:
                names = _names(hard[0], row, again)
                words = _words(hard[0], row, again, names)
                found.append(Difference(row.step, one.rank, hard[0], words, names))
                break
            for state in _OWN:
                ignored |= {(state, _source(name)) for name in _names(state, row, again)}
    first = min(found, key=lambda one: (one.step, one.rank), default=None)
    return first, frozenset(ignored)


def compare(
    interrupted: RankRuns,
    reference: RankRuns,
    resumed: RankRuns,
    *,
    files: frozenset[str] | None = None,
    also_ignored: Ignored = frozenset(),
) -> Comparison:
    """Compare a resumed run with the uninterrupted one, after comparing this one with the one that
    was killed.

    ``files``: names in the checkpoint that was resumed. ``also_ignored``: what differs between
    other such runs.
    """
    saves = [_last_save(one) for one in interrupted]
    saved_at = max(one.number for one in saves if one is not None)
    nothing = Comparison(saved_at, (), len(reference))
    before = [replace(one, steps=one.steps[: _rows_before(one, saved_at)]) for one in interrupted]
    difference, ignored = control(before, reference)
    ignored |= also_ignored
    for one in reference:
        mine = next(
            (save for rank, save in zip(interrupted, saves, strict=False) if rank.rank == one.rank),
            None,
        )
        if difference is None and mine is not None and _save_at(one, saved_at) is None:
            words = f"only one of two uninterrupted runs saves after step {saved_at}"
            difference = Difference(saved_at, one.rank, "counters", words)
    if difference is not None:
        return replace(nothing, control=difference)
    if len(resumed) != len(reference):
        words = f"{count_of(len(resumed), 'rank')} trained (expected {len(reference)})"
        return replace(nothing, differences=(Difference(saved_at + 1, 0, "counters", words),))
    found: list[Difference] = []
    agreement: dict[str, dict[int, bool]] = {}
    begun = 0
    for rank, (killed, one, again) in enumerate(zip(interrupted, reference, resumed, strict=True)):
        pair = _Pair(
            saved_at,
            one,
            again,
            reference,
            _case(one, again, killed, saves, files, len(reference)),
        )
        found += pair.differences(ignored, agreement)
        if rank == 0:
            at = _rows_before(one, saved_at)
            before_save, after_save = (
                {batch.passing for step in steps for batch in step.batches}
                for steps in (one.steps[:at], one.steps[at:])
            )
            begun = len(after_save - before_save)
    found.sort(key=lambda one: (one.step, STATES.index(one.state), one.rank))
    steps = tuple(sorted({step for per_step in agreement.values() for step in per_step}))
    strips = {
        state: tuple(agreement[state].get(step) for step in steps)
        for state in STATES
        if state in agreement
    }
    first_steps = {
        state: steps[strip.index(False)] for state, strip in strips.items() if False in strip
    }
    at = found[0].step if found else 0
    roots = _roots([one for one in found if one.step == at])
    for later in found:
        if later.step > at and later.state not in {known.state for known in roots}:
            roots.append(later)
    return replace(
        nothing, steps=steps, differences=tuple(roots), first_steps=first_steps, strips=strips,
        ignored=ignored, passes_begun=begun,
    )  # fmt: skip


def _roots(found: list[Difference]) -> list[Difference]:
    """Return the differences that do not follow from one before them: one for each state, the first
    rank.
    """
    causes: dict[str, Difference] = {}
    for one in found:
        causes.setdefault(one.state, one)
    roots = list(causes.values())
    # Equal losses and weights make equal buffers, unless a buffer was not restored.
    hard = {"batch", "loss", "gradients", "weights"}.intersection(causes)
    own = ("batch", "generators") if hard else ("batch", "generators", "buffers")
    restored = [one for one in roots if one.found or one.expected or one.state in own]
    return restored or roots[:1]


def _case(
    one: RankRun,
    again: RankRun,
    killed: RankRun,
    saves: list[Save | None],
    files: frozenset[str] | None,
    world: int,
) -> Evidence:
    facts = next((save.facts for save in saves if save is not None), {})
    mine = _last_save(killed)
    return Evidence(
        "", rank=one.rank, world=world, saved=mine.facts if mine is not None else facts,
        files=files, was_loaded=bool(again.loads), loaded_other=_is_other(again, mine),
    )  # fmt: skip


def _is_other(again: RankRun, save: Save | None) -> bool:
    loaded = [one.folder for one in again.loads if one.folder]
    return bool(loaded and save is not None and save.folder) and all(
        os.path.basename(os.path.normpath(one)) != os.path.basename(save.folder)
        for one in loaded
        if save is not None
    )


def _last_save(run: RankRun) -> Save | None:
    return run.saves[-1] if run.saves else None


def _save_at(run: RankRun, number: int) -> Save | None:
    return next((one for one in reversed(run.saves) if one.number == number), None)


def _rows_before(run: RankRun, saved_at: int) -> int:
    save = _save_at(run, saved_at)
    if save is not None:
        return save.rows
    return sum(step.number <= saved_at for step in run.steps)


class _Pair:
    """One rank of the uninterrupted and of the resumed run, aligned at the save."""

    def __init__(
        self,
        saved_at: int,
        one: RankRun,
        again: RankRun,
        all_ranks: RankRuns,
        case: Evidence,
    ) -> None:
        self._saved_at = saved_at
        self._one = one
        self._again = again
        self._all = all_ranks
        self._case = case
        save = _save_at(one, saved_at)
        steps = list(one.steps[_rows_before(one, saved_at) :])
        if steps and save is not None:
            first = steps[0]
            steps[0] = replace(
                first, batches=first.batches[save.batches :], losses=first.losses[save.losses :]
            )
        after = list(again.steps)
        if steps and after:
            # A script may draw the batches that it skips itself, and do nothing with them.
            kept = after[0].batches[-len(steps[0].batches) :] if steps[0].batches else ()
            after[0] = replace(after[0], batches=kept)
        self._steps, self._after = steps, after
        self._entry = self._entry_of(one, save)

    def _entry_of(self, one: RankRun, save: Save | None) -> Entry | None:
        # Two optimizers count as one step: a loss of the second one may come after the step and
        # before the save.
        at = (_rows_before(one, self._saved_at), save.losses if save is not None else 0)
        entries = (entry for entry in one.entries if entry.number == self._saved_at)
        return next((entry for entry in entries if (entry.rows, entry.losses) >= at), None)

    def differences(
        self, ignored: Ignored, agreement: dict[str, dict[int, bool]]
    ) -> Iterator[Difference]:
        """Yield the differences of the first step that differs, and later ones that cannot follow
        from it.

        Notes in ``agreement`` in which steps each state agrees.
        """
        named: set[str] = set()
        has_spread = False
        if self._entry is not None and self._again.entries:
            for one in self._at_entry(self._entry, self._again.entries[0], ignored):
                if one.state == "gradients" and not self._are_used(one.names):
                    continue
                named.add(one.state)
                has_spread = has_spread or one.state not in _HARMLESS
                agreement.setdefault(one.state, {})[one.step] = False
                yield one
            both = (self._entry, self._again.entries[0])
            if UNPREPARED not in named and all(one.states.get(UNPREPARED) for one in both):
                agreement.setdefault(UNPREPARED, {}).setdefault(self._saved_at + 1, True)
        first = self._saved_at + 1 if named else None
        for at, (step, resumed) in enumerate(zip_longest(self._steps, self._after)):
            if step is None or resumed is None:
                if not has_spread:
                    yield self._ended(at)
                return
            row, other = _Row.of(step), _Row.of(resumed)
            differing = set()
            for state in STATES:
                # A state of which everything is ignored was not compared, and must not be called
                # so.
                if _kept(
                    state, (*row.states.get(state, ()), *other.states.get(state, ())), ignored
                ):
                    names = _kept(state, _names(state, row, other), ignored)
                    per_step = agreement.setdefault(state, {})
                    per_step[row.step] = per_step.get(row.step, True) and not names
                    if names:
                        differing.add(state)
            first = row.step if first is None and differing else first
            for state in STATES:
                is_new = state in differing and state not in named
                if is_new and (row.step == first or (state in _ROOTS and not has_spread)):
                    named.add(state)
                    yield self._at_step(at, state, row, other, ignored)
            has_spread = has_spread or bool(differing - _HARMLESS)

    def _are_used(self, names: Collection[str]) -> bool:
        """Return whether the first step of these parameters used the gradients that were left: it
        differs in them, and nothing else explains that.
        """
        for step, resumed in zip(self._steps, self._after, strict=False):
            row, again = _Row.of(step), _Row.of(resumed)
            own = {*row.states.get("gradients", ()), *again.states.get("gradients", ())}
            if any(_differs(state, row, again) for state in ("batch", "loss")):
                return False
            if not own.isdisjoint(names):
                return not set(_names("gradients", row, again)).isdisjoint(names)
            if _differs("weights", row, again):
                return False
        return False

    def _ended(self, at: int) -> Difference:
        ran_on = at < len(self._after)
        step = self._after[at].number if ran_on else self._steps[at].number
        relation = Relation.MORE if ran_on else Relation.FEWER
        number = len(self._steps) if ran_on else len(self._after)
        words = (
            f"the uninterrupted run ends after {count_of(number, 'step')}, but the resumed "
            "run continues"
            if ran_on
            else (
                f"the resumed run ends after {count_of(number, 'step')}, but the "
                "uninterrupted run continues"
            )
        )
        return self._explained(
            Difference(step, self._one.rank, "batch", words, relation=relation), at
        )

    def _at_entry(self, entry: Entry, again: Entry, ignored: Ignored) -> Iterator[Difference]:
        row, other = _Row(entry.number, entry.states), _Row(again.number, again.states)
        for state in _AT_ENTRY:
            names = _kept(state, _names(state, row, other), ignored)
            if state == UNPREPARED:
                # A script may make a model later, or only in one of the runs.
                both = row.states.get(state, {}).keys() & other.states.get(state, {}).keys()
                names = tuple(name for name in names if name in both)
            if names:
                words = f"{_words(state, row, other, names)}, before the first batch"
                yield self._explained(
                    self._difference(self._saved_at + 1, state, words, names, row, other),
                    0,
                    at_entry=True,
                )

    def _at_step(self, at: int, state: str, row: _Row, other: _Row, ignored: Ignored) -> Difference:
        names = _kept(state, _names(state, row, other), ignored)
        relation, words = Relation.NONE, ""
        if state == "batch":
            relation, words = self._relation(row, other)
        words = words or _words(state, row, other, names)
        one = self._difference(row.step, state, words, names, row, other)
        if state not in ("batch", "generators", "learning rate", "scheduler"):
            one = replace(one, expected={}, found={})
        transient = set(self._case.saved.get("unsaved_buffers", ()))
        unsaved = transient.intersection(_names("buffers", row, other))
        return self._explained(
            replace(one, relation=relation), at, lost_buffers=tuple(sorted(unsaved))
        )

    def _difference(
        self, step: int, state: str, words: str, names: tuple[str, ...], row: _Row, other: _Row
    ) -> Difference:
        was, now = row.states.get(state, {}), other.states.get(state, {})
        return Difference(
            step, self._one.rank, state, words, names, {name: was.get(name) for name in names},
            {name: now.get(name) for name in names},
        )  # fmt: skip

    def _explained(
        self, one: Difference, at: int, *, at_entry: bool = False,
        lost_buffers: tuple[str, ...] = (),
    ) -> Difference:  # fmt: skip
        """Return a difference with its cause. ``at_entry``: it is there before the first batch.

        ``lost_buffers``: those of the step that differ and that no checkpoint has.
        """
        before, after = (
            self._facts(self._one, self._steps, at),
            self._facts(self._again, self._after, at),
        )
        passes = [batch.passing for step in self._after[:1] for batch in step.batches]
        now = [batch.passing for step in self._after[at : at + 1] for batch in step.batches]
        rank_0 = self._entry_of(self._all[0], _save_at(self._all[0], self._saved_at))
        rank_0s = rank_0.states.get(one.state, {}) if rank_0 is not None and self._one.rank else {}
        changed = [value for value in one.found.values() if value is not None]
        evidence = replace(
            self._case,
            state=one.state,
            is_first=one.step == self._saved_at + 1,
            at_entry=at_entry,
            in_later_pass=bool(passes and now and now[-1] > passes[0]),
            relation=one.relation,
            before=before,
            after=after,
            lost_buffers=lost_buffers,
            is_swapped=len(changed) > 1 and Counter(changed) == Counter(one.expected.values()),
            is_rank_0s=bool(changed)
            and all(rank_0s.get(name) == value for name, value in one.found.items()),
        )
        cause = cause_of(evidence)
        # A Trainer that skips no data begins the epoch anew, guarded or not.
        is_restored = (
            cause is not None and cause.is_restored and not evidence.saved.get("skips_data")
        )
        return replace(one, cause=cause, is_restored=is_restored)

    def _facts(self, run: RankRun, steps: list[Step], at: int) -> Mapping[str, object]:
        for step in (*steps[at : at + 1], *steps[:1]):
            if step.batches:
                return run.facts_of(step.batches[-1])
        return run.passes[-1].facts if run.passes else {}

    def _relation(self, row: _Row, other: _Row) -> tuple[Relation, str]:
        """Return how the first other batch relates to the uninterrupted run, and the words for
        it.
        """
        pairs = list(zip_longest(row.batches, other.batches))
        at = next(
            at
            for at, (a, b) in enumerate(pairs)
            if a is None or b is None or a.identity != b.identity
        )
        was, now = pairs[at]
        micro = f"batch {at + 1} of the step: " if len(pairs) > 1 else ""
        if was is None or now is None:
            words = f"number of batches: {len(other.batches)} (expected {len(row.batches)})"
            return Relation.OTHER_RANK if was is None else Relation.FEWER, words
        used = _step_of(self._one, now)
        if used is not None:
            relation = Relation.EARLIER if used <= row.step else Relation.LATER
            return relation, f"{micro}the uninterrupted run used this batch at step {used}"
        for one in self._all:
            used = _step_of(one, now)
            if used is not None:
                words = f"rank {one.rank} of the uninterrupted run used this batch at step {used}"
                return Relation.OTHER_RANK, micro + words
        same = [path for path, digest in now.leaves.items() if was.leaves.get(path) == digest]
        if same:
            changed = [path or "the tensor" for path in now.leaves if path not in same]
            words = (
                f"same samples with different content in {list_names(changed)} "
                f"({list_names(same)} equal)"
            )
            return Relation.SAME_SAMPLES, micro + words
        known = {
            sample
            for one in self._all
            for step in one.steps
            for each in step.batches
            for sample in each.samples
        }
        if now.samples and known.issuperset(now.samples):
            return (
                Relation.REORDERED,
                f"{micro}the uninterrupted run used these samples in other batches",
            )
        return Relation.NEW, f"{micro}the uninterrupted run never used this batch"


def _step_of(run: RankRun, batch: Batch) -> int | None:
    return next(
        (step.number for step in run.steps for one in step.batches if one.leaves == batch.leaves),
        None,
    )


def _names(state: str, row: _Row, other: _Row) -> tuple[str, ...]:
    was, now = row.states.get(state, {}), other.states.get(state, {})
    return tuple(name for name in dict.fromkeys((*was, *now)) if was.get(name) != now.get(name))


def _differs(state: str, row: _Row, other: _Row) -> bool:
    return bool(_names(state, row, other))


def _kept(state: str, names: tuple[str, ...], ignored: Ignored) -> tuple[str, ...]:
    return tuple(name for name in names if (state, _source(name)) not in ignored)


def _source(name: str) -> str:
    """Return the name of a generator or object without the moment."""
    return name.partition(" at loss ")[0].removesuffix(_AFTER)


def _words(state: str, row: _Row, other: _Row, names: tuple[str, ...]) -> str:
    """Return what differs in a state, in words. ``names``: the values that do, without the ignored
    ones.
    """
    was, now = row.states.get(state, {}), other.states.get(state, {})
    if state == "generators":
        sources = dict.fromkeys(map(_source, names))
        differ = "state" if len(sources) == 1 else "states"
        verb = "differs" if len(sources) == 1 else "differ"
        return f"the random {differ} of {list_names(sources)} {verb}"
    if not now:
        return f"none (expected {count_of(len(was), 'value')}: {list_names(was)})"
    if state == "loss":
        name = names[0]
        return f"{now.get(name, 'none')} (expected {was.get(name, 'none')})"
    if state in _NUMBERS:
        name = names[0]
        more = f", and {count_of(len(names) - 1, 'more value')}" if len(names) > 1 else ""
        return f"{name}: {now.get(name, 'none')} (expected {was.get(name, 'none')}){more}"
    return f"{len(names)} of {len(was)} differ: {list_names(names)}"

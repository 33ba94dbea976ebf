"""The verdict on recorded runs, without any training: what differs, where, and why."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ckptfix.training.resume_proofs.causes import CAUSES, Cause, Evidence, Relation, cause_of
from ckptfix.training.resume_proofs.certificate import certificate_of, html_page
from ckptfix.training.resume_proofs.recorded_runs import (
    STATES,
    UNPREPARED,
    Batch,
    Entry,
    Load,
    Loss,
    Pass,
    RankRun,
    Save,
    Settings,
    Step,
    rank_run,
    read_run,
)
from ckptfix.training.resume_proofs.resume_verdict import Comparison, compare, control

TENSORS = (
    "weights",
    "buffers",
    "moments",
    "gradients",
    "scaler",
    "learning rate",
    "scheduler",
    "counters",
    "custom objects",
)
AT_ENTRY = set(TENSORS) - {"buffers"}
SAVED_AT, LAST = 3, 8


OF_STEPS = tuple(state for state in STATES if state != UNPREPARED)
"""The states of a step; unprepared models are compared before the first batch alone."""
ATTRIBUTES = (
    "objects that the script neither prepares nor registers (an EMA, counters), and attributes "
    "outside state_dict()"
)


def step(number: int, rank: int = 0) -> Step:
    batch = Batch(
        {"x": f"x{number}.{rank}", "at": f"at{number}.{rank}"},
        (f"s{number}.{rank}",),
        passing=number > 4,
    )
    states = {state: {f"a.{state}": f"{state}{number}", f"b.{state}": "same"} for state in TENSORS}
    states["generators"] = {"torch": f"after{number}"}
    loss = Loss(f"0.{number}", {"torch": f"g{number}.{rank}", "python": f"p{number}"})
    return Step(number, 0, (batch,), (loss,), states)


def entry(number: int) -> Entry:
    return Entry(
        number, {state: {f"a.{state}": f"{state}{number}"} for state in TENSORS}, rows=number
    )


def run(first: int, last: int, *, rank: int = 0, world: int = 1, end: str = "script") -> RankRun:
    steps = tuple(step(number, rank) for number in range(first, last + 1))
    saves = (
        (Save(SAVED_AT, "/c", rows=SAVED_AT, facts={"inside_pass": True}),)
        if first <= SAVED_AT
        else ()
    )
    entries = (entry(0), entry(SAVED_AT)) if first <= SAVED_AT else (entry(SAVED_AT),)
    passes = tuple(
        Pass(0, number, {"sampler": "SequentialSampler", "prepared": True}) for number in range(2)
    )
    return RankRun(rank, world, 1, {"torch": "2"}, steps, entries, saves, passes, (), (), end)


def three(world: int = 1) -> list[list[RankRun]]:
    """Return an interrupted, an uninterrupted and a resumed run that agree."""
    spans = ((1, SAVED_AT), (1, LAST), (SAVED_AT + 1, LAST))
    return [
        [run(first, last, rank=rank, world=world) for rank in range(world)] for first, last in spans
    ]


def altered(one: RankRun, number: int, change: Callable[[Step], Step]) -> RankRun:
    steps = tuple(change(each) if each.number == number else each for each in one.steps)
    return replace(one, steps=steps)


def everywhere(one: RankRun, change: Callable[[Step], Step]) -> RankRun:
    return replace(one, steps=tuple(map(change, one.steps)))


def drawn(one: Step, **generators: str) -> Step:
    """Return a step before whose loss these generators had other states."""
    states = {**one.losses[0].generators, **generators}
    return replace(one, losses=(replace(one.losses[0], generators=states),))


def with_other(state: str) -> Callable[[Step], Step]:
    """Return a change of one digest of a state."""

    def change(one: Step) -> Step:
        if state == "batch":
            batch = replace(one.batches[0], leaves={"x": "other", "at": "other"})
            return replace(one, batches=(batch,))
        if state == "loss":
            return replace(one, losses=(replace(one.losses[0], value="9"),))
        if state == "generators":
            return drawn(one, torch="other")
        values = {**one.states[state], f"a.{state}": "other"}
        return replace(one, states={**one.states, state: values})

    return change


@pytest.mark.parametrize("world", [1, 2])
def test_runs_that_agree_are_exact(world: int) -> None:
    found = compare(*three(world))
    assert (found.control, found.differences, found.first_steps) == (None, (), {})
    assert (found.saved_at, found.steps, found.ranks, found.passes_begun) == (
        SAVED_AT,
        (4, 5, 6, 7, 8),
        world,
        1,
    )
    assert set(found.strips) == set(OF_STEPS)
    assert {agrees for strip in found.strips.values() for agrees in strip} == {True}


@given(some.sampled_from(OF_STEPS), some.integers(SAVED_AT + 1, LAST), some.integers(0, 1))
def test_one_digest_that_is_another_one_is_found_at_its_step_and_rank(
    state: str, number: int, rank: int
) -> None:
    runs = three(2)
    runs[2][rank] = altered(runs[2][rank], number, with_other(state))
    found = compare(*runs)
    assert found.control is None
    assert [(one.step, one.rank, one.state) for one in found.differences] == [(number, rank, state)]
    assert found.first_steps == {state: number}


@given(
    some.sampled_from([one for one in OF_STEPS if one not in ("generators", "custom objects")]),
    some.integers(1, SAVED_AT),
    some.integers(0, 1),
)
def test_a_difference_before_the_save_is_never_blamed_on_the_resume(
    state: str, number: int, rank: int
) -> None:
    runs = three(2)
    runs[1][rank] = altered(runs[1][rank], number, with_other(state))
    found = compare(*runs)
    assert found.differences == ()
    assert found.control is not None
    assert (found.control.step, found.control.rank, found.control.state) == (number, rank, state)


@given(
    some.lists(
        some.tuples(some.sampled_from(OF_STEPS), some.integers(SAVED_AT + 1, LAST)),
        min_size=1,
        max_size=4,
    )
)
def test_the_first_of_several_differences_comes_first(changes: list[tuple[str, int]]) -> None:
    runs = three()
    for state, number in changes:
        runs[2][0] = altered(runs[2][0], number, with_other(state))
    found = compare(*runs)
    first = min(number for _, number in changes)
    assert found.differences[0].step == first
    assert found.differences[0].state in {state for state, number in changes if number == first}
    assert found.first_steps == {
        state: min(number for name, number in changes if name == state) for state, _ in changes
    }


@pytest.mark.parametrize("state", sorted(AT_ENTRY))
def test_a_state_that_is_not_restored_is_found_before_the_first_batch(state: str) -> None:
    runs = three()
    one = runs[2][0].entries[0]
    others = {name: values for name, values in one.states.items() if name != state}
    runs[2][0] = replace(runs[2][0], entries=(replace(one, states=others),))
    if state == "gradients":
        # Gradients that no step uses are zeroed by the script.
        assert compare(*runs).differences == ()
        runs[2][0] = altered(runs[2][0], SAVED_AT + 1, with_other(state))
    (difference,) = compare(*runs).differences
    assert (difference.step, difference.state) == (SAVED_AT + 1, state)
    assert difference.words.endswith("before the first batch")
    assert difference.found == {f"a.{state}": None}


def test_a_generator_that_nobody_seeds_is_left_out_and_named() -> None:
    runs = three()
    runs[1][0] = everywhere(runs[1][0], lambda one: drawn(one, python="own"))
    found = compare(*runs)
    assert (found.control, found.differences) == (None, ())
    assert found.ignored == {("generators", "python")}
    said = "not checked: the generator of python: also differs between two uninterrupted runs"
    assert said in shown(certificate(found, runs[1]))


def test_a_generator_that_is_left_out_is_not_named_as_differing() -> None:
    """The verdict said that it differs, and below that it was not checked."""
    runs = three()
    runs[1][0] = everywhere(runs[1][0], lambda one: drawn(one, python="own"))
    runs[2][0] = altered(runs[2][0], 5, lambda one: drawn(one, python="another", torch="other"))
    (difference,) = compare(*runs).differences
    assert (difference.state, difference.names) == ("generators", ("torch",))
    assert "'torch'" in difference.words
    assert "python" not in difference.words


def test_a_state_of_which_all_is_left_out_is_not_called_compared() -> None:
    runs = three()

    def own(one: Step) -> Step:
        states = {**one.states, "generators": {"torch": "own"}}
        return replace(drawn(one, torch="own", python="own"), states=states)

    runs[1][0] = everywhere(runs[1][0], own)
    found = compare(*runs)
    assert found.ignored == {("generators", "python"), ("generators", "torch")}
    assert "generators" not in found.strips
    made = certificate(found, runs[1])
    assert "generators" not in made.compared
    assert shown(made).count("not checked: the generator of ") == 2


def test_batches_that_the_script_draws_and_skips_do_not_count() -> None:
    runs = three()
    skipped = tuple(Batch({"x": f"x{number}.0"}) for number in range(1, SAVED_AT + 1))
    runs[2][0] = altered(runs[2][0], 4, lambda one: replace(one, batches=(*skipped, *one.batches)))
    assert compare(*runs).differences == ()


def test_a_save_inside_a_step_compares_what_follows_it() -> None:
    runs = three()
    first = Batch({"x": "before the save"})
    loss = Loss("5", {"torch": "before", "python": "before"})

    def longer(one: Step) -> Step:
        return replace(one, batches=(first, *one.batches), losses=(loss, *one.losses))

    for at in (0, 1):
        save = replace(runs[at][0].saves[0], batches=1, losses=1)
        early, late = replace(entry(SAVED_AT), states={}), replace(entry(SAVED_AT), losses=1)
        entries = (*runs[at][0].entries[:1], replace(early, rows=SAVED_AT - 1), early, late)
        runs[at][0] = replace(altered(runs[at][0], 4, longer), saves=(save,), entries=entries)
    assert compare(*runs).differences == ()


@pytest.mark.parametrize(
    ("other", "relation", "words"),
    [
        ({"x": "x2.0", "at": "at2.0"}, Relation.EARLIER, "the uninterrupted run used this batch at step 2"),
        ({"x": "x7.0", "at": "at7.0"}, Relation.LATER, "the uninterrupted run used this batch at step 7"),
        ({"x": "x5.1", "at": "at5.1"}, Relation.OTHER_RANK,
         "rank 1 of the uninterrupted run used this batch at step 5"),
        ({"x": "other", "at": "at5.0"}, Relation.SAME_SAMPLES,
         "same samples with different content in 'x' ('at' equal)"),
        ({"x": "?", "at": "?"}, Relation.REORDERED, "the uninterrupted run used these samples in other batches"),
    ],
)  # fmt: skip
def test_the_words_for_a_batch(other: dict[str, str], relation: Relation, words: str) -> None:
    runs = three(2)
    samples = ("s7.0",) if relation is Relation.REORDERED else ("new",)
    runs[2][0] = altered(runs[2][0], 5, lambda one: replace(one, batches=(Batch(other, samples),)))
    difference = compare(*runs).differences[0]
    assert difference.relation is relation
    assert difference.words.endswith(words)


@pytest.mark.parametrize(
    ("last", "words"),
    [(6, "the resumed run ends after 3 steps"), (9, "the uninterrupted run ends after 5 steps")],
)
def test_a_run_of_another_length(last: int, words: str) -> None:
    runs = three()
    runs[2] = [run(SAVED_AT + 1, last)]
    (difference,) = compare(*runs).differences
    assert words in difference.words
    assert difference.cause is not None


def test_other_ranks() -> None:
    runs = three(2)
    runs[2].pop()
    (difference,) = compare(*runs).differences
    assert difference.words == "1 rank trained (expected 2)"


def test_a_save_by_the_clock_is_not_deterministic() -> None:
    runs = three()
    runs[1][0] = replace(runs[1][0], saves=())
    found = compare(*runs)
    assert found.control is not None
    assert "saves after step 3" in found.control.words


def test_the_control_of_two_uninterrupted_runs_ends_where_it_is_told_to() -> None:
    one, other = [run(1, LAST)], [altered(run(1, LAST), 6, with_other("weights"))]
    difference, _ = control(one, other)
    assert difference is not None
    assert control(one, other, last=5) == (None, frozenset())


def certificate(found: Comparison, reference: list[RankRun], **about: Any) -> Any:
    settings: dict[str, Any] = {"stopped": False, "seconds": {"reference": 1.0}, **about}
    return certificate_of("train.py", found, reference, checkpoint="/c", guarded=False, **settings)


def shown(made: Any) -> str:
    return "\n".join(map(str, made.lines()))


def test_the_certificate_says_what_was_compared() -> None:
    runs = three(2)
    made = certificate(compare(*runs), runs[1], stopped=True)
    first, compared, *rest = shown(made).splitlines()
    assert (
        first == "EXACT: train.py: killed after step 3 and resumed, the run continues bit for bit"
    )
    assert compared.startswith(
        "  compared: steps 4 to 8, 2 ranks: batches, learning rates, schedulers, generators"
    )
    assert rest == [
        f"not checked: {ATTRIBUTES}",
        "not checked: steps after 8: --steps ended the runs there",
    ]
    assert made.status == 0
    assert json.loads(json.dumps(made.as_json()))["verdict"] == "exact"


def test_the_certificate_names_the_difference_its_cause_and_the_line() -> None:
    runs = three()
    passes = tuple(Pass(0, number, {"prepared": True}) for number in range(2))
    for at in (0, 1, 2):
        runs[at][0] = replace(runs[at][0], passes=passes)
    other: dict[str, Any] = {
        "batches": (Batch({"x": "x1.0", "at": "at1.0"}),),
        "losses": (Loss("7", {}),),
    }
    runs[2][0] = altered(runs[2][0], 4, lambda one: replace(one, **other))
    made = certificate(compare(*runs), runs[1])
    assert made.status == 1
    for words in (
        "step 4: batch: the uninterrupted run used this batch at step 1",
        "    cause: the script does not skip the batches used before the save",
        "    change: loader = accelerator.skip_first_batches(loader, n)",
        "also different: losses from step 4",
    ):
        assert words in shown(made)
    assert made.as_json()["differences"][0]["code"] == "not-skipped"
    page = html_page(made)
    assert page.count('class="apart first"') == 2  # the legend and the one cell
    assert "<script" not in page


def test_the_certificate_of_a_run_that_is_not_deterministic() -> None:
    runs = three()
    runs[1][0] = altered(runs[1][0], 2, with_other("loss"))
    made = certificate(compare(*runs), runs[1])
    assert made.status == 2
    begins = "NOT DETERMINISTIC: train.py: two uninterrupted runs already differ"
    assert shown(made).startswith(begins)
    assert "step 2: loss: 9 (expected 0.2)" in shown(made)


EVIDENCE = {
    "stateful-one-file": Evidence("batch", world=2, before={"stateful": True, "dispatched": True}),
    "scaler-stepped": Evidence("scaler", saved={"distributed": "FSDP"}),
    "generators-not-loaded": Evidence("generators", was_loaded=False),
    "state-in-no-checkpoint": Evidence("loss"),
}


def test_a_generator_of_the_script_is_a_cause_next_to_restored_ones() -> None:
    """prove-resume said "save between epochs" alone of a script with a generator of numpy."""
    found = cause_of(Evidence("generators", saved={"inside_pass": True}))
    assert found is not None
    assert "if losses still differ then, the script has a random generator" in found.change


@pytest.mark.parametrize("code", EVIDENCE)
def test_causes_that_no_script_shows_reliably(code: str) -> None:
    found = cause_of(EVIDENCE[code])
    assert found is not None
    assert found.code == code


def test_the_table_of_causes() -> None:
    codes = [cause.code for cause in CAUSES]
    assert len(set(codes)) == len(codes)
    for cause in CAUSES:
        assert len(cause.words.split()) <= 30, cause.code
        assert not cause.words.endswith(".")
        assert not cause.change.endswith(".")


OF_ACCELERATOR = re.compile(
    r"load_state|save_state|\baccelerator\.|prepare\(\)|_loader\(|_batches\(|Configuration\("
)


# The Trainer has no option for stateful dataloaders.
OF_TRAINER = [cause for cause in CAUSES if not cause.code.startswith("stateful-")]


@pytest.mark.parametrize("cause", OF_TRAINER, ids=lambda cause: cause.code)
def test_a_script_with_a_trainer_is_told_what_it_can_do(cause: Cause) -> None:
    shown = cause.of_trainer()
    assert (shown.code, shown.applies) == (cause.code, cause.applies)
    assert not OF_ACCELERATOR.search(
        f"{shown.words}; {shown.change.replace('self.accelerator.', '')}"
    )
    assert not shown.is_restored or cause.is_restored


@pytest.mark.parametrize(("facts", "is_restored"), [({}, True), ({"skips_data": True}, False)])
def test_what_the_guard_restores_of_a_trainer_is_offered(
    facts: dict[str, Any], is_restored: bool
) -> None:
    runs = three()
    for at in (0, 1):
        save = replace(runs[at][0].saves[0], facts={"inside_pass": True, "trainer": True, **facts})
        runs[at][0] = replace(runs[at][0], saves=(save,))
    loaded = replace(runs[2][0], loads=(Load(SAVED_AT, "/c"),))
    runs[2][0] = altered(loaded, 4, with_other("generators"))
    text = shown(certificate(compare(*runs), runs[1]))
    cause = "cause: the Trainer restores the random states only after it has fetched batches"
    assert cause in text
    offer = "or: ckptfix run SCRIPT, which saves and restores this; add --guard to prove it"
    assert (offer in text) is is_restored
    assert "load_state" not in text


def test_rows_of_a_file(tmp_path: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"row": "run", "rank": 1, "world": 2, "pid": 7, "versions": {}},
        {"row": "pass", "number": 0, "passing": 0, "facts": {}},
        {"row": "note", "words": "sampled"},
        {
            "row": "step", "number": 1, "optimizer": 0, "states": {"weights": {"a": "1"}},
            "batches": [{"leaves": {"x": "1"}, "samples": ["2"], "passing": 0}],
            "losses": [{"value": "1", "generators": {"torch": "3"}}],
        },
        {"row": "save", "number": 1, "folder": "/c", "rows": 1, "batches": 0, "losses": 0, "facts": {}},
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rank-1-7.jsonl").write_text(text + '{"row": "step", "numb')  # cut by the kill
    assert read_run(tmp_path) == [rank_run(rows)]
    (one,) = read_run(tmp_path)
    assert (one.rank, one.world, one.notes, one.end) == (1, 2, ("sampled",), "")
    assert one.steps[0].batches[0].samples == ("2",)
    settings = Settings("/c", 1, kill_at=4)
    assert Settings.from_variable(settings.as_variable()) == settings


def test_the_keys_of_the_json_stay() -> None:
    runs = three()
    runs[2][0] = altered(runs[2][0], 5, with_other("loss"))
    made = certificate(compare(*runs), runs[1]).as_json()
    assert list(made) == [
        "script", "verdict", "saved_at", "checkpoint", "ranks", "steps", "states", "differences",
        "first_steps", "not_compared", "versions", "guarded", "seconds", "kept", "commands",
    ]  # fmt: skip
    assert list(made["differences"][0]) == [
        "step", "rank", "state", "message", "names", "expected", "found", "code", "cause", "change",
        "guard",
    ]  # fmt: skip


def test_a_rank_without_a_record_is_not_called_compared() -> None:
    runs = [[replace(each, world=2) for each in one] for one in three()]
    made = certificate(compare(*runs), runs[1])
    assert "1 rank: no optimizer step was recorded" in made.not_compared


@pytest.mark.parametrize(
    ("folder", "is_other"),
    [("/c", False), ("relative/c/", False), ("", False), ("/older", True)],
)
def test_another_checkpoint_than_the_saved_one(folder: str, is_other: bool) -> None:
    runs = three()
    loaded = replace(runs[2][0], loads=(Load(0, folder),))
    runs[2][0] = altered(loaded, 4, with_other("batch"))
    cause = compare(*runs).differences[0].cause
    assert (cause is not None and cause.code == "other-checkpoint") == is_other


def test_what_a_recorder_could_not_see_is_said() -> None:
    runs = three()
    odd = "tensors of type Odd: their bytes cannot be read"
    runs[1][0] = replace(runs[1][0], notes=("sampled", odd))
    assert certificate(compare(*runs), runs[1]).not_compared == (
        ATTRIBUTES,
        "every byte of large tensors: only evenly spaced blocks and the sum of all bits were compared",
        odd,
    )


def test_names_of_files_that_are_not_utf_8_are_kept() -> None:
    settings = Settings("records-\udc80", 1)
    assert Settings.from_variable(settings.as_variable()) == settings

"""Saves after a loop that the script left by ``break``, and what the resumed script may ask for: the
rest of that pass, or a new one.
"""

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader

from tests.training.killing import in_child
from tests.training.rank_cases import ROOT, run_python
from tests.training.ranks import run_ranks
from tests.training.test_run_state import Noisy, Run
from tests.training.test_trainer_kills import ADAPTED, OLDEST

# torchdata calls a function of torch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")

AT = 4
BATCHES = 6


def made(
    *,
    workers: int = 0,
    persistent: bool = False,
    seedable: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> Run:
    """Return a run whose data are drawn at random, too."""
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable, **options)
    run = Run(dataloader_config=config, gradient_accumulation_steps=accumulate)
    run.accelerator._dataloaders.clear()
    data = Noisy(torch.arange(48.0).reshape(12, 4))
    how = {"num_workers": workers, "persistent_workers": persistent}
    loader = DataLoader(data, batch_size=2, shuffle=True, **how)
    run.loader = run.accelerator.prepare(loader)
    return run


def through(run: Run) -> list[Any]:
    """Return what two epochs see whose loops are not left."""
    for _ in range(2):
        for batch in run.loader:
            run.train(batch)
    return run.seen


def leave(run: Run, at: int = AT) -> None:
    """Train until a batch, and leave the loop."""
    for batch in run.loader:
        run.train(batch)
        if len(run.seen) == at:
            break


def save_after_break(run: Run, folder: Path, at: int = AT) -> None:
    leave(run, at)
    run.accelerator.save_state(str(folder))


def resumed(folder: Path, **options: Any) -> Run:
    """Return a run that has loaded a checkpoint."""
    run = made(**options)
    run.accelerator.load_state(str(folder))
    return run


def rest_of(run: Run, how: str = "rest", used: int = AT) -> Any:
    """Return what the script iterates over in the first epoch after a load."""
    if how == "rest":
        return run.accelerator.resume_dataloader(run.loader)
    return accelerate.skip_first_batches(run.loader, used)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yield the warnings of ckptfix in a block, which are there when it has ended."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    messages = (str(one.message) for one in caught if one.category is UserWarning)
    said += [message for message in messages if "set_vital" not in message]


@contextmanager
def silence(is_silent: bool = True) -> Iterator[None]:
    """Let a warning be an error, or allow all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_silent else "ignore")
        warnings.filterwarnings("ignore", "'set_vital'")
        yield


def finish(run: Run, first: Any) -> list[Any]:
    """Train over the rest of an epoch, and over another one."""
    for loader in (first, run.loader):
        for batch in loader:
            run.train(batch)
    return run.seen


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seedable": {"seedable": True},
    "dispatched": {"dispatch_batches": True, "split_batches": False},
    "stateful": {"use_stateful_dataloader": True},
    "accumulation": {"accumulate": 3},
}
WITH_WORKERS: dict[str, dict[str, Any]] = {
    "workers": {"workers": 2},
    "persistent workers": {"workers": 2, "persistent": True},
}
WAYS = [
    *((kind, how, AT) for kind in OPTIONS for how in ("rest", "skip")),
    *((kind, "skip", 1) for kind in OPTIONS),
    *((kind, "rest", BATCHES) for kind in OPTIONS),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in (
            ("workers", "skip", AT),
            ("workers", "rest", 1),
            ("persistent workers", "rest", AT),
            ("persistent workers", "skip", BATCHES),
        )
    ),
]
"""How the data loader is made, how the resumed script goes on, and the batches that were used."""


@pytest.mark.parametrize(("kind", "how", "at"), WAYS)
def test_the_rest_of_a_pass_that_was_left_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, how: str, at: int
) -> None:
    """The symptom: all used batches were trained on again, or with other dropout."""
    options = {**OPTIONS, **WITH_WORKERS}[kind]
    expected = through(made(**options))
    save_after_break(made(**options), tmp_path / "c", at)
    with heard() as said:
        run = resumed(tmp_path / "c", **options)
        assert finish(run, rest_of(run, how, at)) == expected[at:]
    if kind == "persistent workers":
        # Of a new pass, for which a break leaves these workers in a state that nobody knows.
        assert "not bit-exact: the data loader: the generators of its workers" in said.pop(0)
    continues = ["resume_dataloader() continues that pass" in one for one in said]
    assert continues == [True] * (how == "rest")


@pytest.mark.parametrize(("kind", "how", "at"), WAYS)
def test_a_batch_that_came_before_the_break_and_was_not_trained_on_is_not_used(
    tmp_path: Path, kind: str, how: str, at: int
) -> None:
    """The symptom: with ``if step >= max_steps: break`` at the top of the loop, one batch was left
    out.
    """

    def train(run: Run, loader: Any, limit: int) -> None:
        for batch in loader:
            if len(run.seen) >= limit:
                break
            run.train(batch)

    # In a pass of which all batches were used, there is none to come before the break.
    at = min(at, BATCHES - 1)
    options = {**OPTIONS, **WITH_WORKERS}[kind]
    expected = through(made(**options))
    run = made(**options)
    train(run, run.loader, at)
    run.accelerator.save_state(str(tmp_path / "c"))
    with silence(False):
        run = resumed(tmp_path / "c", **options)
    # Saved again by a run that has the same limit.
    train(run, rest_of(run, "skip", at), 0)
    run.accelerator.save_state(str(tmp_path / "again"))
    for name in ("c", "again"):
        with heard() as said:
            run = resumed(tmp_path / name, **options)
            assert finish(run, rest_of(run, how, at)) == expected[at:]
        assert len([one for one in said if "generators of its workers" not in one]) == (
            how == "rest"
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "dispatched"])
def test_two_processes_go_on_with_the_rest_of_a_pass(tmp_path: Path, kind: str) -> None:
    # 12 samples in batches of 2 for each of 2 processes.
    used = 2

    def work_of(phase: str) -> Callable[[int], None]:
        def work(rank: int) -> None:
            if phase == "resumed":
                run = resumed(tmp_path / "c", **OPTIONS[kind])
                finish(run, rest_of(run, "skip", used))
            else:
                run = made(**OPTIONS[kind])
                through(run) if phase == "through" else save_after_break(run, tmp_path / "c", used)
            torch.save(run.seen, tmp_path / f"{phase}-{rank}.pt")

        return work

    for phase in ("through", "left", "resumed"):
        assert run_ranks(2, work_of(phase)) == [0, 0]
    for rank in range(2):
        expected, found = (
            torch.load(tmp_path / f"{phase}-{rank}.pt", weights_only=False)
            for phase in ("through", "resumed")
        )
        assert len(found) == 4
        assert found == expected[used:]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_script_that_breaks_out_of_every_epoch_goes_on_with_a_new_pass(
    tmp_path: Path, kind: str
) -> None:
    def train(run: Run, epochs: int, *, saves: bool = False) -> list[Any]:
        for _ in range(epochs):
            for batch in itertools.islice(run.loader, AT):
                run.train(batch)
            if saves:
                run.accelerator.save_state(str(tmp_path / str(len(run.seen))))
        return run.seen

    expected = train(made(**OPTIONS[kind]), 3, saves=True)
    for used in (AT, 2 * AT):
        with heard() as said:
            run = resumed(tmp_path / str(used), **OPTIONS[kind])
            assert train(run, 3 - used // AT) == expected[used:]
        # A stateful loader would go on by itself without ckptfix. A pass that was left before shows
        # what the script does.
        is_said = kind == "stateful" and used == AT
        assert ["the script begins a new pass" in one for one in said] == [True] * is_said


def test_a_script_that_leaves_every_pass_gets_a_new_one_from_resume_dataloader(
    tmp_path: Path,
) -> None:
    """The symptom: the epoch after the resume had the 2 batches that were left of the last one."""

    def train(run: Run, loader: Any) -> None:
        for batch in itertools.islice(loader, AT):
            run.train(batch)

    first = made()
    for epoch in range(3):
        train(first, first.loader)
        first.accelerator.save_state(str(tmp_path / str(epoch)))
    (said,) = resumed_words(tmp_path / "0", rest_of)
    assert said == (
        "the data loader: the checkpoint was saved after the script left a pass early, after batch "
        "4 of 6; resume_dataloader() continues that pass; help: to begin the next pass instead, "
        "iterate over the loader itself"
    )
    # The same in the save of a run that was resumed.
    run = resumed(tmp_path / "0")
    train(run, run.loader)
    run.accelerator.save_state(str(tmp_path / "resumed"))
    for name in ("1", "resumed"):
        with silence():
            run = resumed(tmp_path / name)
            train(run, rest_of(run))
        assert run.seen == first.seen[2 * AT :]
    # The rest is there for a script that asks for it by number.
    run = resumed(tmp_path / "1")
    assert len(finish(run, rest_of(run, "skip"))) == 2 + BATCHES


def with_second(samples: int, **options: Any) -> tuple[Run, Any]:
    """Return a run and a second loader."""
    run = made(**options)
    data = Noisy(torch.arange(4.0 * samples).reshape(samples, 4))
    return run, run.accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_longer_of_two_loaders_in_a_zip_begins_a_new_pass(
    tmp_path: Path, kind: str, is_first: bool
) -> None:
    """The symptom: the epoch after the resume had the 2 batches that were left of the last one."""

    def epoch(run: Run, short: Any, long: Any) -> None:
        for first, second in zip(*((long, short) if is_first else (short, long)), strict=False):
            run.train((first[0] + second[0],))

    run, long = with_second(16, **OPTIONS[kind])
    epoch(run, run.loader, long)
    run.accelerator.save_state(str(tmp_path / "c"))
    epoch(run, run.loader, long)
    again, long = with_second(16, **OPTIONS[kind])
    with silence():
        again.accelerator.load_state(str(tmp_path / "c"))
        epoch(again, rest_of(again), again.accelerator.resume_dataloader(long))
    assert again.seen == run.seen[BATCHES:]


def test_a_pass_that_began_before_the_last_load_is_not_one_to_go_on_with(tmp_path: Path) -> None:
    """The symptom: a run that had gone back to an older checkpoint in its loop, and was saved
    after it, went on with the rest of the pass that it had given up.
    """
    run = made()
    for batch in run.loader:
        run.train(batch)
    run.accelerator.save_state(str(tmp_path / "good"))
    for batch in run.loader:
        run.train(batch)
        if len(run.seen) == BATCHES + 3:
            run.accelerator.load_state(str(tmp_path / "good"))
            break
    run.accelerator.save_state(str(tmp_path / "again"))
    expected = finish(run, ())[BATCHES + 3 :]
    with silence():
        again = resumed(tmp_path / "again")
        assert rest_of(again) is again.loader
        assert finish(again, ()) == expected


@pytest.mark.parametrize("seedable", [False, True])
def test_what_the_script_does_after_its_loop_is_not_repeated(
    tmp_path: Path, seedable: bool
) -> None:
    """A pass that goes on does so with the generators of the break; a new one with those of the
    save.
    """
    expected = through(made(seedable=seedable))
    run = made(seedable=seedable)
    leave(run)
    # As an evaluation on the training data.
    list(run.loader)
    torch.rand(3)
    run.accelerator.save_state(str(tmp_path / "c"))
    anew = finish(run, ())
    again = resumed(tmp_path / "c", seedable=seedable)
    assert finish(again, rest_of(again, "skip")) == expected[AT:]
    assert finish(resumed(tmp_path / "c", seedable=seedable), ()) == anew[AT:]


def test_an_exception_leaves_a_pass_as_break_does(tmp_path: Path) -> None:
    expected = through(made())
    run = made()

    def train() -> None:
        for batch in run.loader:
            run.train(batch)
            if len(run.seen) == AT:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    run.accelerator.save_state(str(tmp_path / "c"))
    again = resumed(tmp_path / "c")
    assert finish(again, rest_of(again, "skip")) == expected[AT:]


def test_a_rest_that_is_left_again_goes_on(tmp_path: Path) -> None:
    expected = through(made())
    save_after_break(made(), tmp_path / "2", 2)
    run = resumed(tmp_path / "2")
    for batch in rest_of(run, "skip", 2):
        run.train(batch)
        if len(run.seen) == 2:
            break
    run.accelerator.save_state(str(tmp_path / "4"))
    again = resumed(tmp_path / "4")
    assert finish(again, rest_of(again, "skip")) == expected[4:]


def saved(folder: Path, used: int, *, within: bool, **options: Any) -> list[Any]:
    """Save in a pass, or after one that was left; return what follows."""
    if within:
        return made(**options).save_at(folder, used)
    save_after_break(made(**options), folder, used)
    return through(made(**options))[used:]


@pytest.mark.parametrize("within", [True, False])
def test_a_checkpoint_that_is_saved_again_after_the_load_keeps_the_position(
    tmp_path: Path, within: bool
) -> None:
    expected = saved(tmp_path / "c", AT, within=within)
    run = resumed(tmp_path / "c")
    # The run itself goes on with the generators of the first save.
    torch.rand(3)
    run.accelerator.save_state(str(tmp_path / "again"))
    assert finish(run, rest_of(run, "skip")) == expected
    for name in ("again", "again and again"):
        run = resumed(tmp_path / name)
        torch.rand(2)
        run.accelerator.save_state(str(tmp_path / "again and again"))
        assert finish(run, rest_of(run, "skip")) == expected


@pytest.mark.parametrize("how", ["rest", "skip"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("within", "used"), [(True, 1), (False, AT)])
def test_a_batch_to_look_at_changes_nothing(
    tmp_path: Path, within: bool, used: int, workers: int, how: str
) -> None:
    """The symptom: ``next(iter(loader))`` after the load took the position, and the rest of the
    epoch was the epoch from its beginning.
    """
    if within:
        expected = made(workers=workers).save_at(tmp_path / "c", used)
    else:
        expected = through(made(workers=workers))[used:]
        run = made(workers=workers)
        leave(run, used)
        next(iter(run.loader))
        run.accelerator.save_state(str(tmp_path / "c"))
    run = resumed(tmp_path / "c", workers=workers)
    next(iter(run.loader))
    with silence(False):
        assert finish(run, rest_of(run, how, used)) == expected


@pytest.mark.parametrize("kind", ["plain", "seedable", "dispatched"])
@pytest.mark.parametrize("how", ["rest", "skip", "by itself"])
@pytest.mark.parametrize(("within", "used"), [(True, 1), (False, AT)])
def test_a_complete_pass_without_training_changes_nothing(
    tmp_path: Path, kind: str, within: bool, used: int, how: str
) -> None:
    """The symptom: an evaluation on the training data after the load took the position, and the
    rest of the epoch was the epoch from its beginning.
    """
    expected = saved(tmp_path / "c", used, within=within, **OPTIONS[kind])
    # The warning that is allowed is that of a pass that was left.
    with silence(within):
        run = resumed(tmp_path / "c", **OPTIONS[kind])
        list(run.loader)
        list(run.loader)
        is_asked = how != "by itself"
        rest = rest_of(run, how, used) if is_asked else itertools.islice(run.loader, used, None)
        seen = finish(run, rest)
    # Only a position within a pass is known to be that of a script that passes over batches itself.
    assert (seen == expected) == (within or is_asked)


def test_a_batch_to_look_at_is_not_a_pass_to_go_on_with(tmp_path: Path) -> None:
    run = made()
    for batch in run.loader:
        run.train(batch)
    next(iter(run.loader))
    run.accelerator.save_state(str(tmp_path / "c"))
    expected = finish(run, ())[BATCHES:]
    with silence():
        again = resumed(tmp_path / "c")
        assert rest_of(again) is again.loader
        assert finish(again, ()) == expected


def test_a_loader_that_is_prepared_after_the_load_goes_on_where_its_pass_was_left(
    tmp_path: Path,
) -> None:
    expected = through(made())
    save_after_break(made(), tmp_path / "c")
    run = made()
    base = run.accelerator._dataloaders.pop().base_dataloader
    run.accelerator.load_state(str(tmp_path / "c"))
    torch.rand(1)
    run.loader = run.accelerator.prepare(DataLoader(base.dataset, batch_size=2, shuffle=True))
    assert finish(run, rest_of(run, "skip")) == expected[AT:]


def test_two_loaders_whose_positions_are_saved_again_share_the_generators_of_the_first_save(
    tmp_path: Path,
) -> None:
    def train(run: Run, first: Any, second: Any, folder: Path | None = None) -> list[Any]:
        for left, right in zip(first, second, strict=False):
            run.train((left[0] + right[0],))
            if folder is not None and len(run.seen) == AT:
                run.accelerator.save_state(str(folder))
        return run.seen

    run, second = with_second(12)
    expected = train(run, run.loader, second, tmp_path / "c")[AT:]
    run, second = with_second(12)
    run.accelerator.load_state(str(tmp_path / "c"))
    torch.rand(3)
    run.accelerator.save_state(str(tmp_path / "again"))
    for name in ("c", "again"):
        run, second = with_second(12)
        run.accelerator.load_state(str(tmp_path / name))
        assert train(run, rest_of(run), run.accelerator.resume_dataloader(second)) == expected


def resumed_words(folder: Path, first: Callable[[Run], Any]) -> list[str]:
    with heard() as said:
        run = resumed(folder)
        for batch in first(run):
            run.train(batch)
    return said


def test_passing_over_used_batches_of_a_pass_that_was_left_is_said_not_to_be_exact(
    tmp_path: Path,
) -> None:
    save_after_break(made(), tmp_path / "c")
    (said,) = resumed_words(tmp_path / "c", lambda run: itertools.islice(run.loader, AT, None))
    assert said == (
        "the data loader: the checkpoint was saved after the script left a pass early, after "
        "batch 4 of 6, so this run, which passes over the first batches itself, does not continue "
        "that pass bit for bit; help: in the first epoch after load_state, iterate over "
        "accelerator.resume_dataloader(loader)"
    )


def test_skipping_another_number_of_batches_is_said(tmp_path: Path) -> None:
    def skip(run: Run) -> Any:
        return rest_of(run, "skip", 3)

    save_after_break(made(), tmp_path / "left")
    save_after_break(made(), tmp_path / "left at the end", BATCHES)
    made().save_at(tmp_path / "at the end", BATCHES)
    run = made()
    through(run)
    run.accelerator.save_state(str(tmp_path / "between"))
    for name, used in (("left", AT), ("left at the end", BATCHES), ("at the end", BATCHES)):
        (said,) = resumed_words(tmp_path / name, skip)
        assert f"skips to batch 4, but the checkpoint was saved after batch {used}" in said
    # Every epoch of the script may skip them.
    assert resumed_words(tmp_path / "between", skip) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_a_trainer_that_was_stopped_in_an_epoch_goes_on(tmp_path: Path, version: str) -> None:
    """The symptom: under transformers 4.44 the dropout was another one, without a word."""
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install ckptfix[transformers]"
    )
    if version == "newest":
        from tests.training import stopped_trainer

        assert in_child(lambda: stopped_trainer.main(tmp_path)) == 0
    elif not OLDEST.is_dir():
        pytest.skip(f"no {OLDEST}: installed there by the README's test command")
    else:
        folders = os.pathsep.join((str(OLDEST), str(ROOT)))
        run_python(
            *("-W", "ignore", "-m", "tests.training.stopped_trainer", str(tmp_path)),
            variables={"HF_HUB_OFFLINE": "1", **ADAPTED, "PYTHONPATH": folders},
        )
    number, through, resumed = json.loads((tmp_path / "seen.json").read_text())
    assert number.startswith("4.44.") == (version == "oldest")
    assert resumed == through

"""Positions of data loaders: how far a pass over a prepared loader has come, and what its next
batch depends on.

A pass of accelerate's loaders fetches one batch ahead. What it yields depends on the random
generators at three moments: when its iterator is made (the permutation, the seeds of workers),
before the batch that is ahead is fetched (augmentation), and at the save. A position holds all
three. On resume the same iterator is made, the batches that were used are passed over, and the
generators are set at the same moments again.

A loader that no watched accelerator holds is iterated by accelerate as before.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher

from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Method, Patch, Patches
from ckptfix.training.resuming.generators import (
    Generator,
    GeneratorStates,
    capture,
    generators_in,
    restore,
    set_state,
    state_of,
)
from ckptfix.training.resuming.prepared_loaders import (
    COPIES_ITERATION,
    FirstAndRest,
    clear_state,
    draw_first,
    fetches_batches,
    in_words,
    is_followable,
    is_rest_of,
    is_stateful,
    numbers,
    of_batches,
    per_batch,
    seedable_sampler,
    signature,
    skip_samplers,
)
from ckptfix.training.resuming.saved_positions import Moment, Position, SaveMoment
from ckptfix.training.resuming.worker_states import Workers

# Which loaders are followed.

WATCHED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Accelerators whose loaders are followed."""

FOLLOWED: "weakref.WeakKeyDictionary[Any, FollowedLoader]" = weakref.WeakKeyDictionary()
UNCLAIMED: "weakref.WeakKeyDictionary[Any, list[Position]]" = weakref.WeakKeyDictionary()
"""Of an accelerator, positions within a pass whose loader the script prepares only after the load.
"""

EXPECTING: set["FollowedLoader"] = set()
"""Loaders for which the next training step shows whether the script passes over the batches that
were used.
"""

_CLOCK = itertools.count(1)
"""Numbers the batches and the ends of passes of all loaders in their order."""


def watch(accelerator: Any) -> None:
    """Follow the loaders that an accelerator holds, from their next pass on."""
    WATCHED.add(accelerator)
    LOADERS.install()


def forget(accelerator: Any) -> None:
    """Follow the loaders of an accelerator no longer."""
    WATCHED.discard(accelerator)


def _following(original: Method) -> Method:
    def __iter__(self: Any) -> Iterator[Any]:
        followed = _followed_by(self)
        return original(self) if followed is None else _iterate(followed, self, original)

    return __iter__


def _noting(original: Method) -> Method:
    def __init__(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(
            "use_stateful_dataloader"
        ):  # the first iterator is made at once, and workers begin to draw
            names = ("generator", "collate_fn")
            sampler = kwargs.get("batch_sampler") or kwargs.get("sampler")
            roots = {
                "dataset": dataset,
                "sampler": sampler,
                **{name: kwargs.get(name) for name in names},
            }
            self.__dict__["_made_at"] = Moment(
                capture(), {path: state_of(one) for path, one in generators_in(roots)}
            )
        original(self, dataset, *args, **kwargs)

    return __init__


LOADERS = Patches(
    Patch("accelerate.data_loader:DataLoaderShard.__iter__", _following),
    Patch("accelerate.data_loader:DataLoaderDispatcher.__iter__", _following),
    Patch("accelerate.data_loader:DataLoaderAdapter.__init__", _noting),
)


def _made_at(loader: Any) -> Moment | None:
    """Return when the iterator of the next pass was made, None where the pass makes it."""
    is_made = getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False)
    made: Moment | None = loader.__dict__.get("_made_at") if is_made else None
    return made


def _followed_by(loader: Any) -> "FollowedLoader | None":
    """Return the followed loader that a loader is, or passes over batches of."""
    for accelerator in list(WATCHED):
        for registered in getattr(accelerator, "_dataloaders", ()):
            if registered is loader or is_rest_of(loader, registered):
                return follow(registered)
    return None


def followed_of(accelerator: Any) -> Iterator["FollowedLoader"]:
    """Yield the loaders of an accelerator that are followed by now."""
    for loader in accelerator._dataloaders:
        # Only those of accelerate can be keys.
        if is_followable(loader) and loader in FOLLOWED:
            yield FOLLOWED[loader]


def follow(loader: Any) -> "FollowedLoader":
    """Return what follows a loader, made when it is asked for first."""
    if loader not in FOLLOWED:
        FOLLOWED[loader] = FollowedLoader(loader)
    return FOLLOWED[loader]


class FollowedLoader:
    """A loader that a watched accelerator holds: its passes, and where it goes on after a load."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self.passes: list[Pass] = []
        self.resumed: Position | None = None
        # Where this run left its last pass that trained, and where the saved run did.
        self.left: Position | None = None
        self.left_at_save: Position | None = None
        # Whether the script left the last pass that trained, too, before the one under way.
        self.left_before = False
        # When the last complete pass that trained ended.
        self.completed_at = 0
        self.workers = Workers()
        self.name = "data loader"

    @property
    def loader(self) -> Any:
        """The loader; it exists as long as it is registered."""
        return self._loader()

    def generators(self) -> list[tuple[str, Generator]]:
        """Return the generators of which the batches of this loader depend, but for the global
        ones.
        """
        base = self.loader.base_dataloader
        roots = {
            "generator": base.generator,
            "sampler": base.batch_sampler if base.batch_sampler is not None else base.sampler,
            "dataset": base.dataset,
            "collate_fn": base.collate_fn,
        }
        return generators_in(roots)

    def position(self) -> Position:
        """Return where this loader is."""
        if not self.passes and self.resumed is not None:
            return self.resumed  # saved again before the pass goes on
        here = self._described()
        if len(self.passes) > 1:
            here.problem = "several passes over this loader were in progress"
        if self.passes:
            self.passes[-1].describe(here)
        else:
            here.workers = self.workers.between(self.loader.base_dataloader)
            here.left = self.left or self.left_at_save
        here.problem = here.problem or self.workers.problem(self.loader.base_dataloader)
        return here

    def _described(self) -> Position:
        loader = self.loader
        seedable = seedable_sampler(loader)
        held = {path: state_of(one) for path, one in self.generators()}
        here = Position(
            signature=signature(loader),
            iteration=int(loader.iteration),
            held=held,
            per_batch=per_batch(loader),
            seed=None if seedable is None else int(seedable.initial_seed),
            left_before=self.left_before,
        )
        if is_stateful(loader):
            here.is_fresh = bool(
                getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False)
            )
            here.stateful = loader.state_dict()
            here.made = _made_at(loader)
        return here

    def broken_off(self, one: "Pass") -> None:
        """Keep where the script left a pass by ``break``: a save after the loop records it.

        The generators are those of the moment: a script that goes on with the pass does not repeat
        what it did after its loop. A pass that did not train, as one for a single batch to look at,
        is not one to go on with, and leaves the position that it took to the next one.

        Batches that the script got after its last training step are not used: many look at the top
        of the loop whether it ends.
        """
        if one.is_before_load:
            return
        self._give_back(one)
        if not one.is_trained:
            if one.left is not None and self.left_at_save is None:
                self.left_at_save = one.left
                EXPECTING.add(self)
            return
        self.left = None
        if any(one.came_at < each.completed_at for each in FOLLOWED.values() if each is not self):
            # The other loader of a ``zip`` has ended this epoch.
            self.left_before = False
            return
        if not self.passes and self.loader is not None:
            left = self._described()
            self.left_before = True
            left.save = SaveMoment(one.describe_used(left))
            left.problem = left.problem or self.workers.problem(self.loader.base_dataloader)
            self.left = left

    def _give_back(self, one: "Pass") -> None:
        position = one.unskipped
        if position is None or self.resumed is not None:
            return
        if position.save is not None and one.resumed is None:
            position.save.is_reached = False
        self.resumed = position
        EXPECTING.add(self)

    def completed(self, one: "Pass") -> None:
        """Take note of the end of a pass; one that did not train gives the position back."""
        if one.is_trained:
            self.left, self.left_before = None, False
            self.completed_at = next(_CLOCK)
        elif one.unskipped is not None and not one.unskipped.is_at_end and not one.is_before_load:
            self._give_back(one)
            # Counted on by accelerate.
            self.loader.iteration = one.unskipped.iteration

    def go_on_from(self, position: Position) -> list[str]:
        """Let the next pass go on where a loader was; return in words what cannot be as it was."""
        loader, problems = self.loader, []
        if position.problem:
            problems.append(position.problem)
        mine = dict(self.generators())
        missing = [path for path in mine if path not in position.held]
        for path, state in position.held.items():
            if path in mine:
                set_state(mine[path], state)
        if missing:
            problems.append(f"generator {missing[0]} is not in the checkpoint")
        loader.iteration = position.iteration
        seedable = seedable_sampler(loader)
        if seedable is not None and position.seed is not None:
            seedable.initial_seed = position.seed
        is_within = position.fetched is not None and not position.is_at_end
        problems += self.workers.go_on_from(
            position.workers, loader.base_dataloader, is_within=is_within
        )
        if is_stateful(loader):
            self._load_stateful(position)
        self.left_at_save, self.left_before = position.left, position.left_before
        EXPECTING.add(self)
        if position.fetched is not None:
            self.resumed = position
            if position.is_at_end:
                loader.iteration = position.iteration + 1
        return problems

    def _load_stateful(self, position: Position) -> None:
        base = self.loader.base_dataloader
        if position.fetched is not None and not position.is_at_end:
            self.loader.load_state_dict(position.stateful)
            return
        clear_state(base)  # the next pass is a new one: a state would cost it one draw more
        if position.is_fresh:
            before = capture()
            for path, one in self.generators():
                if position.made is not None and path in position.made.held:
                    set_state(one, position.made.held[path])
            base.state_dict()  # makes the first iterator, as prepare() does
            restore(before)

    def begin(self, loader: Any) -> "Pass":
        """Return the pass that begins with a loader: this one, or one of ``skip_first_batches``."""
        parent = self.loader
        position, self.resumed = self.expected(), None
        if loader is not parent and not COPIES_ITERATION:
            loader.iteration = parent.iteration
        one = Pass(self, loader)
        if position is not None:
            one.go_on_from(position)
        elif (
            (left := self.left_at_save) is not None
            and loader is not parent
            and one.fetched_by_script
            # A script that leaves every pass may skip batches in every one of them.
            and not (left.left_before and one.fetched_by_script not in (left.yielded, left.fetched))
        ):
            self._go_on_from_left(one, left)
        if one.unskipped is None and self.left_at_save is None:
            EXPECTING.discard(self)
        return one

    def _go_on_from_left(self, one: "Pass", left: Position) -> None:
        """Let a pass over the rest go on from where the saved run left its pass by ``break``."""
        self.left_at_save = None
        self.left_before, one.left = left.left_before, left
        one.go_on_from(left)
        if left.problem:
            warn_caller(f"{self.name}: this run is not bit-exact: {left.problem}")
        if one.goes_on:
            one.set_iteration(left.iteration)
        if one.is_over:
            one.set_as_at_save(left)

    def ask_for_left(self) -> Position | None:
        """Return where the saved run left its pass by ``break``, for a script that asks for the rest
        of it; None where it left none, or leaves every pass.
        """
        left = self.left_at_save
        if left is None or left.left_before:
            return None
        warn_caller(
            f"{self._left_in_words(left)}; resume_dataloader() continues that pass; help: to begin "
            "the next pass instead, iterate over the loader itself"
        )
        self.loader.iteration = left.iteration
        if left.stateful is not None and is_stateful(self.loader) and not left.is_at_end:
            self.left_at_save, self.resumed, self.left_before = None, left, left.left_before
            self._load_stateful(left)
        return left

    def _left_in_words(self, left: Position) -> str:
        return (
            f"{self.name}: the checkpoint was saved after the script left a pass early, after "
            f"batch {left.yielded}{of_batches(self.loader)}"
        )

    def expected(self) -> Position | None:
        """Return the position from which the next pass goes on, None for a pass from the
        beginning.
        """
        if self.resumed is None:
            self._claim()
        return self.resumed

    def _claim(self) -> None:
        """Take the position of a loader that the checkpoint has and that was not there at the
        load.
        """
        for accelerator, waiting in list(UNCLAIMED.items()):
            if any(one is self.loader for one in accelerator._dataloaders):
                for position in waiting:
                    if position.signature == signature(self.loader):
                        waiting.remove(position)
                        if not waiting:
                            del UNCLAIMED[accelerator]
                        if position.fetched is not None:
                            self.go_on_from(position)
                        else:
                            self.left_at_save = position.left
                            EXPECTING.add(self)
                        return

    def training_goes_on(self) -> None:
        """Take note of a training step while the script has not passed over the batches that were
        used.
        """
        if self.left_at_save is not None:
            if self.passes:
                self._begin_anew(self.passes[-1], self.left_at_save)
            return
        EXPECTING.discard(self)
        running = next((one for one in self.passes if one.unskipped is not None), None)
        if running is not None and running.unskipped is not None:
            position = running.unskipped
            running.resumed, running.unskipped = None, None
            if running.fetched_by_script > (position.fetched or 0):
                return
            warn_caller(
                f"{self.name}: {numbers(position.yielded)} used again, although the "
                f"checkpoint was saved after batch {position.yielded}, so this run does not "
                "continue the saved pass; help: in the first epoch after load_state, iterate "
                "over accelerator.resume_dataloader(loader)"
            )
        elif self.resumed is not None:
            position, self.resumed = self.resumed, None
            if not position.is_at_end:
                warn_caller(
                    f"{self.name}: the checkpoint was saved after batch {position.yielded} of "
                    "a pass, but the script trains without finishing that pass; the next "
                    "pass starts from the beginning"
                )

    def _begin_anew(self, running: "Pass", left: Position) -> None:
        """Forget where the saved run left its pass: the script trains in a new one.

        Many scripts leave every epoch by ``break``, so a new pass alone gives no warning.
        """
        EXPECTING.discard(self)
        self.left_at_save, self.left_before = None, True
        words = self._left_in_words(left)
        advice = "iterate over accelerator.resume_dataloader(loader)"
        if left.left_before:
            advice = f"iterate over accelerator.skip_first_batches(loader, {left.yielded})"
        if is_stateful(self.loader) and not left.left_before:
            warn_caller(
                f"{words}, and the script begins a new pass; help: to continue that pass, {advice}"
            )
        elif running.fetched_by_script == (left.fetched or 0) + left.per_batch:
            warn_caller(
                f"{words}, so this run, which passes over the first batches itself, does not "
                "continue that pass bit for bit; help: in the first epoch after load_state, "
                f"{advice}"
            )


def training_goes_on(accelerator: Any) -> None:
    """Take note of a training step."""
    for followed in followed_of(accelerator):
        if followed.passes:
            followed.passes[-1].note_training()
    for followed in list(EXPECTING) if EXPECTING else ():
        loader = followed.loader
        if loader is None:
            EXPECTING.discard(followed)
        elif any(one is loader for one in accelerator._dataloaders):
            followed.training_goes_on()
    for position in UNCLAIMED.pop(accelerator, ()) if UNCLAIMED else ():
        if position.fetched is None:
            continue  # left by ``break``: the script trains in a new pass
        warn_caller(
            f"the checkpoint was saved after batch {position.yielded} of a pass over "
            f"{in_words(position.signature)}, but no data loader of this run continues that "
            "pass"
        )


class Pass:
    """One pass over a loader, from the making of its iterator to its end."""

    def __init__(self, followed: FollowedLoader, loader: Any) -> None:
        self.followed = followed
        self.resumed: Position | None = None
        # Set while the script may use the first batches again.
        self.unskipped: Position | None = None
        self.permutation: Moment | None = None
        self.before: GeneratorStates
        # After so many batches, the one with this number is fetched.
        self.leap: tuple[int, int] | None = None
        self.made: Moment | None = None
        self.is_over = False
        self.is_rest = False
        self.is_trained = False
        # The batches that were there at the last training step, what the one that was ahead then
        # depends on, and when the script asked for the next one.
        self.used = 0
        self.ahead_of_used: tuple[int, Moment] | None = None
        self.after_used: Moment | None = None
        # Where the saved run left this pass by ``break``.
        self.left: Position | None = None
        # Whether a checkpoint was loaded since: it is not a pass of the run that goes on.
        self.is_before_load = False
        # When the script got its last batch.
        self.came_at = 0
        # Whether it goes on from a position, so that it sets the generators.
        self.goes_on = False
        self.per_batch = per_batch(loader)
        skipped = sum(int(sampler.skip_batches) for sampler in skip_samplers(loader))
        self.first = skipped  # the first batch that the base loader fetches
        self.fetched = skipped
        self.fetched_by_script = skipped + self.per_batch * int(getattr(loader, "skip_batches", 0))
        self.start: Moment | None = None
        self.ahead: tuple[int, Moment] | None = None
        self.iteration = int(loader.iteration)
        self._loader = loader
        self._generators = followed.generators()

    def moment(self) -> Moment:
        """Return the states of all generators now."""
        return Moment(capture(), {path: state_of(one) for path, one in self._generators})

    def _set(self, moment: Moment) -> None:
        restore(moment.everywhere)
        for path, one in self._generators:
            if path in moment.held:
                set_state(one, moment.held[path])

    def go_on_from(self, position: Position) -> None:
        """Find out how the script passes over the batches that were used, and arrange the rest of
        the pass.
        """
        loader, parent, count = self._loader, self.followed.loader, position.fetched or 0
        is_rest = self.is_rest = loader is not parent and self.fetched_by_script > 0
        if position.is_at_end:
            if is_rest and self.fetched_by_script in (position.yielded, count):
                self._end_at_once(position)
            elif is_rest:
                self._warn_of_other_count(position)
            elif (
                not is_rest and loader.iteration == position.iteration
            ):  # the script has set this epoch itself
                if is_stateful(loader):
                    self._end_at_once(position)
                else:
                    self.resumed = self.unskipped = position
            return
        self.resumed = position
        if is_rest:
            if is_stateful(parent):
                clear_state(parent.base_dataloader)
            if (
                self.first == self.fetched_by_script == position.yielded
            ):  # of a dispatcher: too few base batches
                skip_samplers(loader)[0].skip_batches += count - self.first
                self.first = self.fetched = self.fetched_by_script = count
            if self.fetched_by_script == count:
                self._begin_with_first_batch(position)
            else:
                self.resumed, self.permutation = None, position.start
                self._warn_of_other_count(position)
        elif is_stateful(loader):
            self.first = self.fetched = self.fetched_by_script = count
        elif count:
            self.unskipped = position
        self.goes_on = self.resumed is not None

    def _begin_with_first_batch(self, position: Position) -> None:
        """Let a dispatcher fetch the first batch of the pass again: it completes the last one with
        samples of it.
        """
        samplers, loader = skip_samplers(self._loader), self._loader
        if not isinstance(loader, DataLoaderDispatcher) or loader._drop_last or not samplers:
            return
        if loader.base_dataloader.num_workers:
            if len(loader.dataset) % max(1, loader.state.num_processes):
                warn_caller(
                    f"{self.followed.name}: the last batch of this pass is not bit-exact: a "
                    "dispatcher with workers fills it up with samples from the first batch "
                    "after the resume"
                )
            return
        sampler = samplers[0]
        sampler.__class__ = FirstAndRest
        sampler.first = self.per_batch
        loader.skip_batches += 1  # fetched, and not handed to the script
        self.leap = (self.per_batch, position.fetched or 0)
        self.fetched = 0

    def _warn_of_other_count(self, position: Position) -> None:
        is_counted = isinstance(self._loader, DataLoaderDispatcher) and bool(
            skip_samplers(self._loader)
        )
        skipped = self.fetched_by_script // (1 if is_counted else self.per_batch)
        warn_caller(
            f"{self.followed.name}: the script skips to batch {skipped + 1}, but the "
            f"checkpoint was saved after batch {position.yielded}, so this run does not "
            "continue the saved pass; help: iterate over "
            "accelerator.resume_dataloader(loader), which skips exactly the used "
            f"batches{self._or_with_a_length()}"
        )

    def _or_with_a_length(self) -> str:
        """Return the help for transformers' Trainer, which takes all passes through such a dataset
        for one epoch.
        """
        dataset = self._loader.dataset
        if hasattr(dataset, "__len__"):
            return ""
        return f"; with transformers' Trainer, give {type(dataset).__name__} a __len__"

    def _end_at_once(self, position: Position) -> None:
        self.is_over = True
        self.followed.loader.iteration = position.iteration + 1

    def make_iterator(self, base: Any) -> Iterator[Any]:
        """Return the iterator of a base loader, made with the generators as they were when it was
        made first.
        """
        position = self.resumed
        self.before = before = capture()
        if position is not None and position.start is not None:
            self._set(position.made or position.start)
        elif self.permutation is not None:
            self._set(self.permutation)
        self.start = self.moment()
        self.made = _made_at(self._loader)
        if self._loader is not self.followed.loader and position is not None:
            seedable = seedable_sampler(self._loader)
            if seedable is not None:  # a dispatcher does not find it behind the sampler that skips
                seedable.set_epoch(self._loader.iteration)
        states = None if position is None else position.workers
        with self.followed.workers.reporting(base, self.first, self.per_batch, states=states):
            inner = type(base).__iter__(base)
        if position is not None and position.made is not None and position.start is not None:
            self._set(position.start)  # prepare() had drawn what the making of an iterator draws
            self.start, self.made = position.start, position.made
        if self.first and not base.num_workers:
            draw_first(inner)
        if self.permutation is not None:
            restore(before)
        if position is not None and not fetches_batches(self._loader):
            self._reach(position)
        return _Fetches(inner, self)

    def before_fetch(self) -> None:
        """Note the generators before the first batch of a group is fetched, or set them to what
        they were there.
        """
        position = self.resumed
        if position is not None and self.fetched == position.fetched and position.ahead is not None:
            self._set(position.ahead)
        if (self.fetched - self.first) % self.per_batch == 0:
            self.ahead = (self.fetched, self.moment())
            if self.is_trained and self.after_used is None:
                self.after_used = self.ahead[1]

    def after_fetch(self, *, is_end: bool) -> None:
        """Set the generators to those of the save when the batch that was ahead then has been
        fetched again.
        """
        position = self.resumed
        if position is None or position.fetched is None:
            return
        if self.fetched == position.fetched + position.per_batch or is_end:
            if self.fetched < position.fetched:
                self.resumed = None
                warn_caller(
                    f"{self.followed.name}: the pass ended after batch "
                    f"{self.fetched // self.per_batch}, but the checkpoint was saved after "
                    f"batch {position.yielded}, so the data are not the same"
                )
            else:
                self._reach(position)

    def _reach(self, position: Position) -> None:
        """Set the generators to those of the save, or of the loader that has reached it before this
        one.
        """
        self.resumed = None
        if position.save is not None:
            reached = self.before if position.save.is_reached else position.save.generators
            position.save.is_reached = True
            self._set(Moment(reached, position.held))

    def set_iteration(self, iteration: int) -> None:
        """Count this pass as the one that the saved run left: it may have made others since."""
        self.iteration = self._loader.iteration = iteration

    def set_as_at_save(self, position: Position) -> None:
        """Set the generators to those of a position that has no batch left."""
        if position.save is not None:
            self._set(Moment(position.save.generators, position.held))

    def unwrap(self, data: Any) -> Any:
        """Return a batch as the script expects it; what its worker reported is kept."""
        return self.followed.workers.unwrap(data, self.fetched)

    def describe(self, position: Position) -> None:
        """Add to a position where this pass is."""
        position.iteration = int(self._loader.iteration)
        position.fetched = self.fetched_by_script
        position.is_at_end = bool(self._loader.end_of_dataloader)
        position.start = self.start
        position.made = self.made
        if self.ahead is not None and self.ahead[0] == self.fetched_by_script:
            position.ahead = self.ahead[1]
        elif fetches_batches(self._loader):
            position.problem = position.problem or "its batches were not fetched one by one"
        base = self._loader.base_dataloader
        position.workers = self.followed.workers.within(base, self.fetched_by_script)

    def note_training(self) -> None:
        """Take note of a training step with the last batch."""
        self.is_trained = True
        self.used, self.ahead_of_used = self.fetched_by_script, self.ahead
        self.after_used = None

    def describe_used(self, position: Position) -> GeneratorStates:
        """Add to a position where this pass was when the last training step had been made; return
        the generators of that moment.
        """
        self.describe(position)
        unused = self.fetched_by_script - self.used
        if not unused:
            return capture()
        base = self._loader.base_dataloader
        position.fetched, position.is_at_end = self.used, False
        position.ahead, position.stateful = None, None
        position.workers = self.followed.workers.within(base, self.used)
        if unused > self.per_batch and base.num_workers:
            position.problem = position.problem or "the generators of its workers are not known"
        if self.ahead_of_used is not None and self.ahead_of_used[0] == self.used:
            position.ahead = self.ahead_of_used[1]
        if self.after_used is None:
            return capture()
        position.held = self.after_used.held
        return self.after_used.everywhere

    def end(self) -> None:
        """Let the loader that the accelerator holds know that its pass has ended: accelerate counts
        on another one.
        """
        parent, loader = self.followed.loader, self._loader
        is_resumed = loader is not parent and self.fetched_by_script > 0
        if is_resumed and loader.iteration == self.iteration:
            loader.iteration += 1  # accelerate returns early when no batch is left
        if loader is not parent:
            parent.iteration = loader.iteration


class _Fetches:
    """Iterator of a base loader that notes and sets generators around each fetch."""

    def __init__(self, inner: Iterator[Any], one: Pass) -> None:
        self._inner = inner
        self._pass = one

    def __iter__(self) -> "_Fetches":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __next__(self) -> Any:
        one = self._pass
        one.before_fetch()
        try:
            data = next(self._inner)
        except StopIteration:
            one.after_fetch(is_end=True)
            raise
        data = one.unwrap(data)
        one.fetched += 1
        if one.leap is not None and one.fetched == one.leap[0]:
            one.fetched, one.leap = one.leap[1], None
        one.after_fetch(is_end=False)
        return data


def _iterate(followed: FollowedLoader, loader: Any, original: Method) -> Iterator[Any]:
    one = followed.begin(loader)
    if one.is_over:
        return
    attributes = loader.base_dataloader.__dict__

    def make_iterator() -> Iterator[Any]:
        del attributes["__iter__"]
        return one.make_iterator(loader.base_dataloader)

    attributes["__iter__"] = make_iterator
    followed.passes.append(one)
    is_complete = False
    try:
        for batch in original(loader):
            one.fetched_by_script += one.per_batch
            one.came_at = next(_CLOCK)
            yield batch
        is_complete = True
    finally:
        attributes.pop("__iter__", None)
        followed.passes.remove(one)
        if not is_complete:
            # Also at the end of the process, where nothing may be said.
            with suppress(Exception):
                followed.broken_off(one)
        else:
            followed.completed(one)
        followed.workers.ended(loader.base_dataloader, is_complete=is_complete, is_rest=one.is_rest)
        if is_complete:
            one.end()

"""A pass over a prepared loader, and how it goes on from a position.

A pass of accelerate's loaders fetches one batch ahead. What it yields depends on the random
generators at three moments: when its iterator is made (the permutation, the seeds of workers),
before the batch that is ahead is fetched (augmentation), and at the save. A position holds all
three. On resume the same iterator is made, the batches that were used are passed over, and the
generators are set at the same moments again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher

from ckptfix.devices.callers import warn_caller
from ckptfix.devices.nested_values import Generator, set_state, state_of
from ckptfix.training.resuming.generators import GeneratorStates, capture, restore
from ckptfix.training.resuming.prepared_loaders import (
    FirstAndRest,
    clear_state,
    draw_first,
    fetches_batches,
    is_stateful,
    per_batch,
    seedable_sampler,
    skip_samplers,
)
from ckptfix.training.resuming.saved_positions import Moment, Position
from ckptfix.training.resuming.worker_states import Workers


def made_at(loader: Any) -> Moment | None:
    """Return when the iterator of the next pass was made, None where the pass makes it."""
    is_made = getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False)
    made: Moment | None = loader.__dict__.get("_made_at") if is_made else None
    return made


class Pass:
    """One pass over a loader, from the making of its iterator to its end.

    ``parent``: the loader that the accelerator holds; ``loader`` is the same one, or what
    ``skip_first_batches`` made of it. ``generators``: those of which its batches depend, but for the
    global ones.
    """

    def __init__(
        self,
        parent: Any,
        loader: Any,
        name: str,
        generators: Sequence[tuple[str, Generator]],
        workers: Workers,
    ) -> None:
        self._parent = parent
        self._loader = loader
        self._name = name
        self._generators = generators
        self._workers = workers
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
        loader, parent, count = self._loader, self._parent, position.fetched or 0
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
                    f"{self._name}: the last batch of this pass is not bit-exact: a "
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
            f"{self._name}: the script skips to batch {skipped + 1}, but the "
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
        self._parent.iteration = position.iteration + 1

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
        self.made = made_at(self._loader)
        if self._loader is not self._parent and position is not None:
            seedable = seedable_sampler(self._loader)
            if seedable is not None:  # a dispatcher does not find it behind the sampler that skips
                seedable.set_epoch(self._loader.iteration)
        states = None if position is None else position.workers
        with self._workers.reporting(base, self.first, self.per_batch, states=states):
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
        return Fetches(inner, self)

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
                    f"{self._name}: the pass ended after batch "
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
        return self._workers.unwrap(data, self.fetched)

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
        position.workers = self._workers.within(base, self.fetched_by_script)

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
        position.workers = self._workers.within(base, self.used)
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
        parent, loader = self._parent, self._loader
        is_resumed = loader is not parent and self.fetched_by_script > 0
        if is_resumed and loader.iteration == self.iteration:
            loader.iteration += 1  # accelerate returns early when no batch is left
        if loader is not parent:
            parent.iteration = loader.iteration


class Fetches:
    """Iterator of a base loader that notes and sets generators around each fetch."""

    def __init__(self, inner: Iterator[Any], one: Pass) -> None:
        self._inner = inner
        self._pass = one

    def __iter__(self) -> "Fetches":
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

"""Positions of data loaders: the loaders that are followed, how far each has come, and where it goes
on after a load.

A loader that no watched accelerator holds is iterated by accelerate as before.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ckptfix.devices.callers import warn_caller
from ckptfix.devices.nested_values import Generator, set_state, state_of
from ckptfix.devices.patching import Method, Patch, Patches
from ckptfix.training.resuming.generators import capture, generators_in, restore
from ckptfix.training.resuming.passes import Pass, made_at
from ckptfix.training.resuming.prepared_loaders import (
    COPIES_ITERATION,
    clear_state,
    in_words,
    is_followable,
    is_rest_of,
    is_stateful,
    numbers,
    of_batches,
    per_batch,
    seedable_sampler,
    signature,
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
            here.made = made_at(loader)
        return here

    def broken_off(self, one: Pass) -> None:
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

    def _give_back(self, one: Pass) -> None:
        position = one.unskipped
        if position is None or self.resumed is not None:
            return
        if position.save is not None and one.resumed is None:
            position.save.is_reached = False
        self.resumed = position
        EXPECTING.add(self)

    def completed(self, one: Pass) -> None:
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

    def begin(self, loader: Any) -> Pass:
        """Return the pass that begins with a loader: this one, or one of ``skip_first_batches``."""
        parent = self.loader
        position, self.resumed = self.expected(), None
        if loader is not parent and not COPIES_ITERATION:
            loader.iteration = parent.iteration
        one = Pass(parent, loader, self.name, self.generators(), self.workers)
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

    def _go_on_from_left(self, one: Pass, left: Position) -> None:
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

    def _begin_anew(self, running: Pass, left: Position) -> None:
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

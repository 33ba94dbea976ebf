"""Loaders of accelerate: which of them are followed, and how each kind counts, skips and shuffles its
batches.
"""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

COPIES_ITERATION = "iteration" in inspect.signature(DataLoaderShard.__init__).parameters
"""``skip_first_batches`` of older versions of accelerate begins to count passes anew."""


def is_followable(loader: Any) -> bool:
    """Return whether a loader is one of accelerate's that can be followed."""
    return type(loader) in (DataLoaderShard, DataLoaderDispatcher)


def is_rest_of(loader: Any, parent: Any) -> bool:
    """Return whether ``skip_first_batches`` made a loader of ``parent``, whichever copy of the
    function it was.
    """
    if type(loader) is not type(parent) or not hasattr(loader, "base_dataloader"):
        return False
    inner = skip_samplers(loader)
    if inner:
        source = inner[-1].batch_sampler
        return source is parent.batch_sampler or source is parent.sampler
    return bool(
        getattr(loader, "skip_batches", 0)
        and loader.dataset is parent.dataset
        and loader.batch_size == parent.batch_size
    )


def skip_samplers(loader: Any) -> list[Any]:
    """Return the samplers of ``skip_first_batches`` in a loader, outermost first."""
    sampler = (
        loader.batch_sampler
        if isinstance(loader.batch_sampler, SkipBatchSampler)
        else loader.sampler
    )
    found = []
    while isinstance(sampler, SkipBatchSampler):
        found.append(sampler)
        sampler = sampler.batch_sampler
    return found


def per_batch(loader: Any) -> int:
    """Return how many batches of the base loader make one that the script gets."""
    if (
        isinstance(loader, DataLoaderDispatcher)
        and not loader.split_batches
        and not getattr(loader, "submesh_tp", None)
    ):
        return int(loader.state.num_processes)
    return 1


def fetches_batches(loader: Any) -> bool:
    """Return whether this process fetches batches itself: a dispatcher's rank 0 does for all."""
    return not isinstance(loader, DataLoaderDispatcher) or loader.state.process_index == 0


def is_stateful(loader: Any) -> bool:
    """Return whether a loader keeps its position itself, as torchdata's does."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def clear_state(base: Any) -> None:
    """Let the next pass of a stateful loader be a new one."""
    base.load_state_dict({})
    base.next_iter_state = None


def signature(loader: Any) -> tuple[Any, ...]:
    """Return what a loader must have in common with the one that was saved."""
    size = None
    with suppress(Exception):  # of the script's own class
        size = len(loader.dataset)
    return (
        type(loader).__name__,
        type(loader.dataset).__name__,
        size,
        loader.batch_sampler is not None,
    )


def seedable_sampler(loader: Any) -> Any:
    """Return the sampler of accelerate that draws each permutation from a seed and the number of
    the pass.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(8):
        if sampler is None or isinstance(sampler, SeedableRandomSampler):
            return sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


class FirstAndRest(SkipBatchSampler):  # type: ignore[misc]
    """A sampler of ``skip_first_batches`` that yields the first batches of the pass, too."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        for index, samples in enumerate(self.batch_sampler):
            if index < self.first or index >= self.skip_batches:
                yield samples


def draw_first(iterator: Any) -> None:
    """Draw the first indices now: a permutation from the global generator is drawn where it was
    drawn first.
    """
    indices = getattr(iterator, "_sampler_iter", None)
    if indices is not None and not hasattr(indices, "state_dict"):
        first = list(itertools.islice(indices, 1))
        iterator._sampler_iter = itertools.chain(first, indices)


def in_words(signature: tuple[Any, ...]) -> str:
    """Return in words the data of a loader's signature."""
    size = "" if signature[2] is None else f" of {signature[2]}"
    return f"{signature[1]}{size}"


def of_batches(loader: Any) -> str:
    """Return in words how many batches a pass over a loader has, "" where it has no length."""
    # An iterable dataset need not have one.
    with suppress(Exception):
        return f" of {len(loader)}"
    return ""


def numbers(count: int) -> str:
    """Return in words the first batches of a pass, as the subject of a sentence."""
    return "batch 1 of this pass is" if count == 1 else f"batches 1 to {count} of this pass are"

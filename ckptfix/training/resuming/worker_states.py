"""Random generators of the worker processes of a loader: reported with each batch, and set again in
new workers.

A worker draws for augmentation, and no file holds what it has drawn. Each batch therefore carries
the generators of its worker as they are after it, 10 KB. On resume, a new worker goes on where an
old one was: the one that would have made the batch that the new one makes first.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import pin_memory
from torch.utils.data._utils.worker import _generate_state

from ckptfix.devices.nested_values import set_state, state_of
from ckptfix.devices.patching import replaced
from ckptfix.training.resuming.generators import generators_in

Report = dict[str, Any]
"""Generators of a worker after a batch, in arrays: a tensor in a queue would cost a file
descriptor.
"""


class WorkerStates(Struct, frozen=True):
    """The workers of a loader at a save.

    ``states``: of each worker, where it has made a batch, the generators before the first batch
    that the script has not got. ``begun``: those at the beginning of the pass, where workers lived
    on from the pass before. ``phase``: the number of the batch that worker 0 made first.
    ``is_reused``: the workers were older than the pass.
    """

    count: int
    states: Mapping[int, Report]
    begun: Mapping[int, Report] = field(default_factory=dict)
    phase: int = 0
    is_reused: bool = False


class Workers:
    """The workers of one loader, as the process that trains sees them."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, Report]] = deque(maxlen=1)
        self._begun: dict[int, Report] = {}
        self._phase = 0
        self._is_reused = False
        self._is_unknown = False
        self._is_handed_over = False
        self._expected: WorkerStates | None = None

    def problem(self, base: Any) -> str:
        """Return why the workers cannot go on as they were, "" when they can."""
        if not _has_workers(base):
            return ""
        if isinstance(base.dataset, IterableDataset):
            return "its workers stay alive between passes" if base.persistent_workers else ""
        if not getattr(base, "in_order", True):
            return "its workers return their batches in any order (in_order=False)"
        return "the generators of its workers are not known" if self._is_unknown else ""

    def go_on_from(self, states: WorkerStates | None, base: Any, *, is_within: bool) -> list[str]:
        """Expect these workers in the next pass; return in words what they cannot be given.

        ``is_within``: the states are of a pass that goes on, which hands them over itself.
        """
        self.__init__()  # type: ignore[misc]
        if states is not None and states.count != base.num_workers:
            return [f"saved with {states.count} workers, now {base.num_workers}"]
        if states is not None and not is_within and base.persistent_workers:
            self._expected = replace(states, begun=states.states, phase=0, is_reused=True)
        return []

    def between(self, base: Any) -> WorkerStates | None:
        """Return the states in which the next pass finds its workers; None where it starts new
        ones.
        """
        if not _is_reported(base) or not base.persistent_workers:
            return None
        if self._expected is not None:
            return self._expected
        states = self._latest(None)
        return WorkerStates(base.num_workers, states, states, is_reused=True) if states else None

    def within(self, base: Any, index: int) -> WorkerStates | None:
        """Return the states before the batch with this number is made."""
        if not _is_reported(base):
            return None
        return WorkerStates(
            base.num_workers,
            self._latest(index),
            self._begun,
            phase=self._phase,
            is_reused=self._is_reused,
        )

    def _latest(self, before: int | None) -> dict[int, Report]:
        found = dict(self._begun)
        for index, report in self._reports:
            if before is None or index < before:
                found[report["worker"]] = report
        return found

    @contextmanager
    def reporting(
        self, base: Any, first: int, per_batch: int, *, states: WorkerStates | None
    ) -> Iterator[None]:
        """Have the workers that are started meanwhile report, and begin where others were.

        ``first``: the number of the first batch that the base loader fetches. ``states``: of a pass
        that goes on.
        """
        expected, self._expected = self._expected, None
        if not _is_reported(base):
            yield
            return
        is_stateful = hasattr(base, "next_iter_state")
        is_made = getattr(base, "_iterator", None) is not None and (
            base.persistent_workers or getattr(base, "_initial_iter_for_state_dict", False)
        )
        begun = self._latest(None) if base.persistent_workers else {}
        self._reports = deque(maxlen=2 * (base.num_workers + per_batch))
        if is_made:
            self._begun, self._phase, self._is_reused = begun, first, True
            self._is_unknown = self._is_unknown or not begun
            yield
            return
        self._is_unknown = False
        goes_on = states if states is not None and states.count == base.num_workers else None
        wanted = goes_on or expected
        if wanted is None and self._is_handed_over:
            wanted = WorkerStates(base.num_workers, begun, begun, phase=first, is_reused=True)
        self._is_handed_over = False
        count = base.num_workers
        if wanted is None:
            ids, injected = list(range(count)), {}
            self._begun, self._phase, self._is_reused = {}, first, False
        else:
            phase = wanted.phase if goes_on is not None else first
            shift = 0 if is_stateful else (first - phase) % count
            ids = [(worker + shift) % count for worker in range(count)]
            is_replayed = goes_on is not None and first == phase and not is_stateful
            injected = dict(wanted.begun if is_replayed else wanted.states)
            self._begun = injected
            self._phase, self._is_reused = phase, wanted.is_reused
        meanwhile: dict[str, Any] = {
            "collate_fn": Reporting(base.collate_fn),
            "worker_init_fn": Starting(base.worker_init_fn, ids, injected),
        }
        if wanted is not None and wanted.is_reused:
            # The workers lived on: no seed was drawn for them in this pass.
            meanwhile["generator"] = torch.Generator()
        with replaced(base, **meanwhile):
            yield

    def unwrap(self, data: Any, index: int) -> Any:
        """Return a batch without the report that came with it, which is kept."""
        if not isinstance(data, ReportedBatch):
            return data
        self._reports.append((index, data.report))
        return data.batch

    def ended(self, base: Any, *, is_complete: bool, is_rest: bool) -> None:
        """Take note of the end of a pass: one that is broken off leaves batches that nobody sees.

        ``is_rest``: the pass went on from a checkpoint over a loader of its own, whose workers end
        with it.
        """
        if _is_reported(base) and base.persistent_workers:
            self._is_unknown = not is_complete
            self._is_handed_over = is_complete and is_rest


def _has_workers(base: Any) -> bool:
    return bool(getattr(base, "num_workers", 0))


def _is_reported(base: Any) -> bool:
    """Return whether batches carry a report; those of an iterable dataset are made again from its
    beginning.
    """
    return _has_workers(base) and not isinstance(base.dataset, IterableDataset)


class ReportedBatch:
    """A batch on its way from a worker, with the generators of the worker after it."""

    __slots__ = ("batch", "report")

    def __init__(self, batch: Any, report: Report) -> None:
        self.batch = batch
        self.report = report

    def pin_memory(self, device: Any = None) -> "ReportedBatch":
        """Return the batch in pinned memory, as torch asks of types that it does not know."""
        arguments = () if device is None else (device,)
        return ReportedBatch(pin_memory.pin_memory(self.batch, *arguments), self.report)


class Reporting:
    """The ``collate_fn`` of a loader; in a worker it adds a report to each batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._held: Sequence[tuple[str, Any]] | None = None

    def __call__(self, samples: Any) -> Any:
        """Return the batch; in a worker, together with its report."""
        batch = self._collate(samples)
        info = get_worker_info()
        if info is None:
            return batch
        if self._held is None:
            self._held = generators_in({"dataset": info.dataset, "collate_fn": self._collate})
        return ReportedBatch(batch, _report(info.id, self._held))


class Starting:
    """The ``worker_init_fn`` of a loader: a worker takes the part of an old one, and its
    generators.

    ``ids``: for each new worker the number of the old one. Without states of the old one, torch's
    seeds of it are used.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, ids: Sequence[int], states: Mapping[int, Report]
    ) -> None:
        self._init = init
        self._ids = ids
        self._states = states

    def __call__(self, worker: int) -> None:
        """Prepare a new worker."""
        info = get_worker_info()
        part = self._ids[worker]
        if part != worker and info is not None:
            base_seed = info.seed - worker
            object.__setattr__(info, "id", part)  # the class itself lets nobody
            object.__setattr__(info, "seed", base_seed + part)
            random.seed(base_seed + part)
            torch.manual_seed(base_seed + part)
            np.random.seed(_generate_state(base_seed, part))
        if self._init is not None:
            self._init(part)
        if part in self._states and info is not None:
            _set(self._states[part], generators_in({"dataset": info.dataset}))


def _report(worker: int, held: Sequence[tuple[str, Any]]) -> Report:
    return {
        "worker": worker,
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "held": {path: _as_array(state_of(one)) for path, one in held},
    }


def _set(report: Report, held: Sequence[tuple[str, Any]]) -> None:
    random.setstate(report["python"])
    np.random.set_state(report["numpy"])
    torch.set_rng_state(_as_tensor(report["torch"]))
    for path, one in held:
        if path in report["held"]:
            state = report["held"][path]
            set_state(one, _as_tensor(state) if isinstance(one, torch.Generator) else state)


def _as_array(state: Any) -> Any:
    return state.numpy() if isinstance(state, torch.Tensor) else state


def _as_tensor(state: Any) -> Any:
    return torch.from_numpy(np.array(state, dtype=np.uint8))

"""Plan the random number generators of this rank, and the step, which is not lost with them."""

import importlib
import importlib.util
import random
from typing import Any

import numpy
import torch

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.runtime.loading.checking import random_problem
from ckptfix.runtime.loading.draft import Draft, SetRandom, SetStep
from ckptfix.runtime.loading.entries import Entry, single_entry
from ckptfix.runtime.loading.policy import Need, Part
from ckptfix.runtime.loading.reading import Unreadable, read_pickle
from ckptfix.runtime.loading.report import ComponentReport, Status
from ckptfix.wording import count_of

_DEVICES = ("cuda", "xpu", "hpu", "mlu", "sdaa", "musa", "neuron")
"""Where else torch keeps generators; accelerate saves ``torch_<device>_manual_seed``."""


def plan_random(
    draft: Draft, folder: CheckpointFolder, manifest: Manifest | None, rank: int, world_size: int
) -> None:
    """Add generators and step. The step comes from this rank's file, another rank's, or the manifest."""
    by_rank = {
        component.name.rank: single_entry(component)
        for component in folder.components
        if component.role is Role.RNG_STATE and component.name.rank is not None
    }
    read: dict[int, tuple[Any, str]] = {}

    def states(of: int) -> tuple[Any, str]:
        if of not in read:
            try:
                read[of] = read_pickle(folder.root, by_rank[of].members[0], trust=draft.policy.trust), ""
            except Unreadable as error:
                read[of] = None, str(error)
        return read[of]

    if draft.policy.rng is Need.IGNORE:
        draft.ignore(Part.RNG, what=f"rank {rank}")
    elif rank not in by_rank:
        have = f"{count_of(len(by_rank), 'rank')} saved theirs" if by_rank else "no rank saved any"
        reason = f"there is no random_states_{rank}.pkl: {have}, this run has {count_of(world_size, 'rank')}"
        draft.cannot(Part.RNG, reason, what=f"rank {rank}", missing=True)
    else:
        _plan_generators(draft, by_rank[rank], *states(rank), rank)
    if draft.policy.step is Need.IGNORE:
        draft.ignore(Part.STEP, what="step")
        return
    for other in sorted(by_rank, key=lambda number: (number != rank, number)):
        found, _ = states(other)
        step = found.get("step") if isinstance(found, dict) else None
        if type(step) is int:
            _plan_step(draft, step, by_rank[other].files, "" if other == rank else f"from rank {other}")
            return
    if manifest is not None:
        _plan_step(draft, manifest.step, (), "from the manifest")
    else:
        draft.cannot(Part.STEP, "no readable file of a rank holds it", what="step", missing=True)


def set_random(states: Any) -> str:
    """Set the generators of Python, numpy, torch and its devices. Returns what was left out, in words."""
    random.setstate(states["random_state"])
    numpy.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    left = []
    for device in _DEVICES:
        module = getattr(torch, device, None)
        saved = states.get(f"torch_{device}_manual_seed")
        if saved is None or module is None or not module.is_available():
            continue
        if len(saved) > module.device_count():
            left.append(f"{device} has {module.device_count()} devices, {len(saved)} were saved")
            saved = saved[: module.device_count()]
        module.set_rng_state_all(saved)
    if "xm_seed" in states:
        left += _set_xla(states["xm_seed"])
    return ", ".join(left)


def _set_xla(seed: Any) -> list[str]:
    if importlib.util.find_spec("torch_xla") is None:
        return ["xla is not installed here"]
    importlib.import_module("torch_xla.core.xla_model").set_rng_state(seed)
    return []


def _plan_generators(draft: Draft, entry: Entry, states: Any, problem: str, rank: int) -> None:
    what = f"rank {rank}"
    if reason := problem or random_problem(states):
        draft.cannot(Part.RNG, reason, what=what, files=entry.files)
        return
    report = ComponentReport(part=Part.RNG, status=Status.RESTORED, what=what, files=entry.files)
    draft.do(report, SetRandom(states=states), entry)


def _plan_step(draft: Draft, step: int, files: tuple[str, ...], reason: str) -> None:
    status = Status.ADAPTED if reason else Status.RESTORED
    report = ComponentReport(part=Part.STEP, status=status, what="step", files=files, reason=reason)
    draft.do(report, SetStep(step=step))

"""Random number generators of this rank, and the step, which is not lost with them."""

import importlib
import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from ckptfix.checkpoint.entries import Entry, single_entry
from ckptfix.checkpoint.filenames import FileName, Role, parse_file_name, random_states_name
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.devices.torch_reading import Unreadable, read_pickle
from ckptfix.training.loading.checking import random_problem
from ckptfix.training.loading.draft import Draft, SetRandom, SetStep
from ckptfix.training.loading.load_report import LoadError, Part, Requirement
from ckptfix.wording import count_of

_DEVICES = ("cuda", "xpu", "hpu", "mlu", "sdaa", "musa", "neuron")
"""Devices on which torch keeps generators; accelerate saves ``torch_<device>_manual_seed``."""


def not_of_a_rank(name: FileName) -> bool:
    """Return whether a file concerns every rank.

    A scan by each of 1,000 ranks must not open 1,000 files of random states.
    """
    return name.role is not Role.RNG_STATE or name.is_of_trainer


def ranks_in(root: Path) -> list[int]:
    """Return the ranks whose random states a folder holds."""
    names = (parse_file_name(name) for name in os.listdir(root))
    found = (name for name in names if name is not None and not name.is_of_trainer)
    return sorted(name.rank for name in found if name.rank is not None)


def plan_random(draft: Draft, root: Path, manifest: Manifest | None, rank: int, world_size: int) -> None:
    """Add generators and step. The step comes from this rank's file, else from another rank's, or the manifest."""
    if draft.policy.rng is Requirement.IGNORE and draft.policy.step is Requirement.IGNORE:
        draft.ignore(Part.RNG, what=f"rank {rank}")
        draft.ignore(Part.STEP, what="step")
        return
    ranks = ranks_in(root)
    own = _read(draft, root, rank) if rank in ranks else None
    if draft.policy.rng is Requirement.IGNORE:
        draft.ignore(Part.RNG, what=f"rank {rank}")
    elif own is None:
        have = f"{count_of(len(ranks), 'rank')} saved theirs" if ranks else "no rank saved any"
        reason = (
            f"there is no {random_states_name(rank)}: {have}, this run has {count_of(world_size, 'rank')}"
        )
        draft.cannot(Part.RNG, reason, what=f"rank {rank}", missing=True)
    else:
        _plan_generators(draft, *own, rank)
    if draft.policy.step is Requirement.IGNORE:
        draft.ignore(Part.STEP, what="step")
        return
    for other in sorted(ranks, key=lambda number: (number != rank, number)):
        found = own if other == rank and own is not None else _read(draft, root, other)
        entry, states, problem = found
        step = states.get("step") if isinstance(states, dict) else None
        if type(step) is int:
            reason = "" if other == rank else f"from rank {other}"
            draft.do(Part.STEP, SetStep(step=step), what="step", entry=entry, reason=reason)
            return
        if not problem:
            break  # whoever wrote this one wrote the others
    if manifest is not None and manifest.is_of_a_save:
        draft.do(Part.STEP, SetStep(step=manifest.step), what="step", reason="from the manifest")
    else:
        draft.cannot(Part.STEP, "no readable file of a rank holds it", what="step", missing=True)


def _read(draft: Draft, root: Path, rank: int) -> tuple[Entry, Any, str]:
    """Return the entry of a rank with its states, or None and why they cannot be read."""
    name = random_states_name(rank)
    component = next(iter(scan_folder(root, name).components), None)
    if component is None:
        raise LoadError(f"{root / name} is a folder, or is gone since the folder was listed; load it again")
    try:
        return single_entry(component), read_pickle(root, component, trust=draft.policy.trust), ""
    except Unreadable as error:
        return single_entry(component), None, str(error)


def current_random() -> dict[str, Any]:
    """Return the states of the generators as ``save_state`` names them, of devices that are in use only."""
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    for device in _DEVICES:
        module = getattr(torch, device, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", bool)():
            states[f"torch_{device}_manual_seed"] = module.get_rng_state_all()
    return states


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
    draft.do(Part.RNG, SetRandom(states=states), what=what, entry=entry)

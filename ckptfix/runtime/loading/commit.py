"""The only module that modifies anything: it does what was planned, in the order of ``Accelerator.load_state``."""

import warnings
from typing import Any

import torch
from typing_extensions import assert_never

from ckptfix.runtime.loading.draft import (
    Action,
    Draft,
    LoadModel,
    LoadState,
    SetRandom,
    SetSampler,
    SetStep,
)
from ckptfix.runtime.loading.policy import Part
from ckptfix.runtime.loading.randomness import set_random
from ckptfix.runtime.loading.report import LoadError

_ORDER = (
    Part.MODELS,
    Part.OPTIMIZERS,
    Part.SCHEDULERS,
    Part.DATALOADERS,
    Part.SCALER,
    Part.RNG,
    Part.STEP,
    Part.CUSTOM,
)
"""The order of ``accelerate.checkpointing.load_accelerator_state``, then step and custom objects."""


def commit(draft: Draft, accelerator: Any) -> None:
    """Do every action of a draft. Raises LoadError, with ``modified`` set, when an object refuses its state."""
    done: list[str] = []
    for report, action in sorted(draft.planned, key=lambda pair: _ORDER.index(pair[0].part)):
        try:
            _do(action, accelerator)
        except Exception as error:  # load_state_dict of a user's class raises anything
            before = f"already loaded: {', '.join(done)}" if done else "nothing was loaded before it"
            raise LoadError(
                f"{draft.path}: {report.name} refused its state: {type(error).__name__}: {error}; {before}; the "
                f"run must not go on from here",
                report=draft.report(),
                modified=True,
            ) from error
        done.append(report.name)


def _do(action: Action, accelerator: Any) -> None:
    match action:
        case LoadModel():
            _load_model(action)
        case LoadState():
            action.thing.load_state_dict(action.state)
        case SetSampler():
            action.dataloader.set_sampler(action.sampler)
        case SetRandom():
            if left := set_random(action.states):
                warnings.warn(f"random number generators: {left}", UserWarning, stacklevel=2)
        case SetStep():
            accelerator.step = action.step
        case _:
            assert_never(action)


def _load_model(action: LoadModel) -> None:
    """Load a model's tensors, those on the meta device into their slots, and check that each name was taken."""
    state = action.state
    values = {name: state[name] for name in action.slots if name in state}
    for name in action.slots:
        if name not in values:  # tied to a tensor that is in the file, and may be kept apart from it
            tied = next(other for other in action.target.ties[name] if other in state)
            values[name] = state[tied]
    for name in values:
        state.pop(name, None)
    result = action.target.thing.load_state_dict(state, strict=False)
    if result is None:  # a model with a load_state_dict of its own
        result = torch.nn.modules.module._IncompatibleKeys([], [])
    missing = set(result.missing_keys) - set(action.fit.absent) - set(values)
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"missing names {sorted(missing)}, unexpected names {sorted(result.unexpected_keys)}"
        )
    for name, value in values.items():
        action.slots[name].write(value)
        arrived = action.slots[name].read()
        if not _same_bytes(arrived.to("cpu"), value.to("cpu", arrived.dtype)):
            raise RuntimeError(f"{name!r} is not what was written")


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, for NaN equals nothing."""
    if one.shape != other.shape:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*flat))

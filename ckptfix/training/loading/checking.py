"""Checks that a state suits the object that shall get it: each function returns the reason why it
does not, or "".
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from ckptfix.checkpoint.entries import Entry
from ckptfix.training.loading.assignment import same_class
from ckptfix.training.loading.targets import Target
from ckptfix.training.saving.save_manifest import parameter_shapes
from ckptfix.wording import count_of

_SHAPED_TEXT = """
    exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta grad_avg prev step_size sum ax"""
SHAPED = frozenset(_SHAPED_TEXT.split())
"""State of torch's own optimizers that has one element for each element of the parameter."""

_ADDED_LATER = frozenset(
    (
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "maximize",
        "decoupled_weight_decay",
        "amsgrad",
    )
)
"""Options that some version of torch added to an optimizer, so that an older file lacks them."""


def optimizer_problem(state: Any, entry: Entry, target: Target, *, is_ordered: bool = False) -> str:
    """Return why an optimizer cannot take a state: class, groups, options, shapes of parameters.

    Nothing of this stops torch, which then trains with another parameter's momentum.
    ``is_ordered``: names have put the state into the order of this run, which is not that of the
    manifest.
    """
    if reason := class_problem(state, entry, target):
        return reason
    if not isinstance(target.inner, torch.optim.Optimizer):
        return ""
    saved, own = state["param_groups"], target.inner.param_groups
    if len(saved) != len(own):
        return f"{count_of(len(saved), 'param group')} in the checkpoint, {len(own)} in this run"
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            return (
                f"param group {number}: {count_of(len(theirs['params']), 'parameter')} in the "
                f"checkpoint, {len(ours['params'])} in this run"
            )
        if reason := options_problem(theirs, target.inner):
            return f"param group {number}: {reason}"
        names, mine = theirs.get("param_names"), ours.get("param_names")
        if (
            names
            and mine
            and len(names) == len(mine)
            and list(names) != list(mine)
            and set(names) == set(mine)
        ):
            return (
                f"param group {number}: its parameter names are in a different order than "
                "in this run"
            )
    if reason := _shapes_problem(state, target.inner):
        return reason
    recorded = entry.recorded.keys if entry.recorded is not None else ""
    # All that tells where no state was saved.
    if recorded and not is_ordered and recorded != parameter_shapes(target.inner):
        return (
            "according to the manifest, its parameter shapes differ from those of this "
            "run's optimizer"
        )
    return ""


def class_problem(state: Any, entry: Entry, target: Target) -> str:
    """Return why a state is not that of an optimizer of this class, whatever its parameters are."""
    if not _is_dict(state, "state", "param_groups"):
        return "not an optimizer state dict (expected the keys 'state' and 'param_groups')"
    if not same_class(entry, target):
        assert entry.recorded is not None
        return f"it was saved from {entry.recorded.type}, but this run's optimizer is {target.what}"
    return ""


def options_problem(theirs: Mapping[str, Any], optimizer: Any) -> str:
    """Return why a parameter group was saved from another class of torch's optimizers, by the
    options that it has.
    """
    if not _is_torchs(optimizer):
        return ""  # others may fill in what is lacking
    lacking = sorted(optimizer.defaults.keys() - theirs.keys() - _ADDED_LATER)
    if lacking:
        return f"it lacks {', '.join(lacking)}, so it was not saved from {type(optimizer).__name__}"
    decoupled = optimizer.defaults.get("decoupled_weight_decay")
    saved = theirs.get("decoupled_weight_decay")
    if decoupled is not None and saved is not None and bool(decoupled) != bool(saved):
        return (
            f"decoupled_weight_decay is {saved} in the checkpoint and {decoupled} in this "
            f"run, so it was not saved from {type(optimizer).__name__}"
        )
    return ""


def _shapes_problem(state: Mapping[str, Any], optimizer: Any) -> str:
    """Compare shapes: of torch's own optimizers by name, of others with the state they have now."""
    is_torch = _is_torchs(optimizer)
    for number, (theirs, ours) in enumerate(
        zip(state["param_groups"], optimizer.param_groups, strict=True)
    ):
        for place, (key, parameter) in enumerate(
            zip(theirs["params"], ours["params"], strict=True)
        ):
            saved = state["state"].get(key)
            for name, value in saved.items() if isinstance(saved, Mapping) else ():
                if not isinstance(value, torch.Tensor):
                    continue
                known = optimizer.state.get(parameter, {}).get(name)
                if is_torch and name in SHAPED:
                    shape = tuple(parameter.shape)
                elif not is_torch and isinstance(known, torch.Tensor) and name in SHAPED:
                    shape = tuple(known.shape)
                else:
                    continue
                if tuple(value.shape) != shape:
                    return (
                        f"{name} of parameter {place} in param group {number} has shape "
                        f"{list(value.shape)} in the checkpoint, but the parameter has shape "
                        f"{list(shape)} in this run"
                    )
    return ""


def scheduler_problem(state: Any, entry: Entry, target: Target) -> str:
    """Return why a scheduler cannot take a state: another class, by the manifest or by the names it
    holds.
    """
    if not isinstance(state, Mapping):
        return f"not a scheduler state dict (expected a dict, found {type(state).__name__})"
    if not same_class(entry, target):
        assert entry.recorded is not None
        return f"it was saved from {entry.recorded.type}, but this run's scheduler is {target.what}"
    if not _is_torchs(target.inner):
        return ""
    own = target.inner.state_dict()
    # Private names and "verbose" came and went with versions of torch.
    theirs, ours = (
        {name for name in names if not str(name).startswith("_")} - {"verbose"}
        for names in (state, own)
    )
    if lacking := sorted(ours - theirs):
        return f"it lacks {', '.join(map(str, lacking))}, so it was not saved from {target.what}"
    rates, own_rates = (each.get("base_lrs") or () for each in (state, own))
    if rates and own_rates and len(rates) != len(own_rates):
        groups = count_of(len(rates), "param group")
        return f"it has rates for {groups}, this run's optimizer {len(own_rates)}"
    if extra := sorted(theirs - ours):
        return f"it also has {', '.join(map(str, extra))}, so it was not saved from {target.what}"
    return ""


def custom_problem(state: Any, entry: Entry, target: Target) -> str:
    """Return why a registered object cannot take a state, as far as its class is known: a scheduler
    of torch's.
    """
    is_scheduler = isinstance(target.inner, torch.optim.lr_scheduler.LRScheduler)
    return scheduler_problem(state, entry, target) if is_scheduler else ""


def scaler_problem(state: Any, scaler: Any) -> str:
    """Return why a gradient scaler cannot take a state. torch raises for an empty one, saved from a
    disabled scaler.
    """
    if not isinstance(state, Mapping):
        return f"not a GradScaler state dict (expected a dict, found {type(state).__name__})"
    if scaler.is_enabled():
        lacking = sorted(
            {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
            - set(state)
        )
        if lacking:
            return f"it lacks {', '.join(lacking)}"
    return ""


def random_problem(states: Any) -> str:
    """Return why generators cannot be set from the states of a rank: they are tried on generators
    of their own.
    """
    if not isinstance(states, Mapping):
        return f"not a dict of random states (expected a dict, found {type(states).__name__})"
    trials = (
        ("random_state", lambda value: random.Random().setstate(value)),
        ("numpy_random_seed", lambda value: numpy.random.RandomState().set_state(value)),
        ("torch_manual_seed", lambda value: torch.Generator().set_state(value)),
    )
    for name, attempt in trials:
        if name not in states:
            return f"it lacks {name}"
        try:
            attempt(states[name])
        except (
            TypeError,
            ValueError,
            RuntimeError,
            KeyError,
            IndexError,
            AttributeError,
        ) as error:
            return f"{name} cannot be set: {error}"
    return ""


def dtype_problem(value: torch.Tensor, own: torch.Tensor) -> str:
    """Return why values of one dtype must not go into another: numbers would change their kind."""
    if value.dtype == own.dtype or _kind(value.dtype) == _kind(own.dtype):
        return ""
    return f"the dtype is {_short(value.dtype)} in the file, {_short(own.dtype)} in the model"


def dtype_change(pairs: Sequence[tuple[torch.dtype, torch.dtype]]) -> str:
    """Return in words which dtypes are converted, "" for none; pairs are (in the file, in the
    model).
    """
    changes = dict.fromkeys(f"{_short(old)} to {_short(new)}" for old, new in pairs if old != new)
    return f"dtype {', '.join(changes)}" if changes else ""


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "int"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_dict(value: Any, *names: str) -> bool:
    return isinstance(value, Mapping) and all(name in value for name in names)


def _is_torchs(thing: object) -> bool:
    """Return whether a class is torch's own, so that what its state holds is known."""
    return type(thing).__module__.startswith("torch.optim")

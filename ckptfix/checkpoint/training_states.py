"""States of optimizers, schedulers, scalers, steps and data loaders that their own classes refuse.

Measured with torch 2.13, accelerate 1.15, transformers 5.23 and torchdata 0.11:

- ``Optimizer.load_state_dict`` refuses whatever has no ``state`` and no ``param_groups``. A class
  of a script's own may save another dict, as Lookahead does around another optimizer.
- ``LRScheduler.load_state_dict`` updates its ``__dict__`` with anything dict-like, and starts anew
  without an error. Its next step adds 1 to ``last_epoch`` and ``_step_count``, whatever they are.
  SequentialLR loads fewer states than it has schedulers, and starts the others anew.
- ``load_state`` catches every error about random states, and leaves the rest of the file: its step,
  then the states of Python, numpy, torch and its devices. The Trainer fails. The step becomes that
  of the Accelerator, whatever it is: ``accumulate`` adds 1 to it, and steps the optimizer where a
  division leaves no rest.
- ``GradScaler.load_state_dict`` refuses whatever lacks one of its five keys; a disabled one saves,
  and loads, an empty dict. It takes any values: the next ``scale`` or ``update`` fails.
- torchdata's ``StatefulDataLoader.load_state_dict`` takes anything. ``{}``, which it never saves,
  begins the epoch anew without an error. The first batch fails where a key is missing, or the state
  is of another number of workers. A loader of a script's own may save another dict.
"""

from math import prod
from typing import Any

from ckptfix.checkpoint.generator_states import is_int32, is_list
from ckptfix.checkpoint.state_kinds import SCALER_KEYS, Content, StateProblem, is_plain, noun_of
from ckptfix.formats.pickle_tree import (
    Node,
    PickleTree,
    Text,
    Visits,
    child,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.wording import count_of, list_names

_INT64 = 1 << 63
_FLOAT64 = 1 << 1023


def may_be_of_data(root: object) -> bool:
    """Return whether ``scaler.pt`` may be what a script scales its data by, such as a mean and a
    deviation.
    """
    if is_dict_like(root):
        return not any(type(key) is Text and key.value in SCALER_KEYS for key, _ in pairs(root))
    return is_tensor(root) or any(map(is_tensor, items_of(root)))


def problem_of_optimizer(root: object) -> str:
    """Return why no optimizer of torch loads a dict with both keys, "" for one that may be
    loaded.
    """
    state, groups = child(root, "state"), child(root, "param_groups")
    if not is_dict_like(state) and is_plain(state):
        return f"an optimizer whose 'state' is {noun_of(state)}"
    if not is_list(groups):
        return f"an optimizer whose 'param_groups' is {noun_of(groups)}" if is_plain(groups) else ""
    visits = Visits()
    lists_any = False
    for number, group in enumerate(items_of(groups)):
        # A few bytes can refer to one long group again and again.
        if type(group) is Node and not visits.first(group):
            continue
        if not is_plain(group):
            lists_any = True
            continue
        members = child(group, "params")
        if members is None:
            return f"an optimizer whose param group {number} has no 'params'"
        if is_plain(members) and not is_list(members):
            return f"an optimizer whose param group {number} has {noun_of(members)} as 'params'"
        lists_any = lists_any or not is_list(members) or bool(items_of(members))
    if not lists_any and any(type(key) is int for key, _ in pairs(state)):
        return (
            "an optimizer with moments but no "
            f"{'parameters in its ' if items_of(groups) else ''}param groups"
        )
    return ""


def problem_of_scheduler(root: object) -> str:
    """Return why no scheduler of torch continues from a state, "" where one may.

    States inside are not judged: a SequentialLR reads no more of those that are done, and starts
    later ones anew.
    """
    values = {key.value: value for key, value in pairs(root) if type(key) is Text}
    for key in _COUNTS:
        value = values.get(key, 0)
        if type(value) not in (int, float, bool) and is_plain(value) and not is_tensor(value):
            return f"a scheduler's state whose {key!r} is {noun_of(value)}"
    for keys in _PAIRS_OF_CYCLES if _OF_CYCLES in values else ():
        lengths = [len(items_of(values[key])) for key in keys if is_list(values.get(key))]
        if len(set(lengths)) > 1:
            return (
                f"a scheduler's state with {count_of(lengths[0], 'value')} in {keys[0]!r} and "
                f"{lengths[1]} in {keys[1]!r}"
            )
    # Their loads take these keys out of the state. torch 1.12 and older kept a function in
    # CyclicLR.
    if "_milestones" in values and "_schedulers" not in values:
        return "a scheduler's state with '_milestones' but no '_schedulers'"
    if _OF_CYCLES in values and not values.keys() & {"_scale_fn_custom", "scale_fn"}:
        return "a CyclicLR state without '_scale_fn_custom'"
    if "_schedulers" not in values:
        return ""
    parts, milestones = values["_schedulers"], len(items_of(values.get("_milestones")))
    if not is_list(parts):
        return (
            f"a scheduler's state whose '_schedulers' is {noun_of(parts)}"
            if is_plain(parts)
            else ""
        )
    for part in items_of(parts):
        if is_plain(part) and not is_dict_like(part):
            return f"a scheduler's state with {noun_of(part)} in '_schedulers'"
    if milestones >= max(len(items_of(parts)), 1):
        count = count_of(len(items_of(parts)), "scheduler")
        return f"a scheduler's state with {count} and {count_of(milestones, 'milestone')}"
    return ""


def lost_count(root: object) -> str:
    """Return the count that a scheduler of torch lost, "" where all are there or the scheduler is
    not of torch.
    """
    keys = text_keys(root)
    return next((name for name, signs in _COUNTED if name not in keys and signs <= keys), "")


_OF_PLATEAU = frozenset(("patience", "threshold_mode", "cooldown_counter"))
_COUNTED = (
    ("last_epoch", frozenset(("base_lrs", "_last_lr", "_step_count"))),
    ("last_epoch", frozenset(("_schedulers", "_milestones"))),
    ("T_cur", frozenset(("T_0", "T_i", "T_mult"))),
    ("num_bad_epochs", _OF_PLATEAU),
    ("best", _OF_PLATEAU),
)
"""Counts from which torch computes the next rates, and the keys next to which every class has them.

A new scheduler has a value for them, so that a load without them is silent. It has the right one
for any other key.
"""

_COUNTS = ("last_epoch", "_step_count")
"""Values to which each step of torch's schedulers adds 1."""

_OF_CYCLES = "step_ratio"
_PAIRS_OF_CYCLES = (("base_lrs", "max_lrs"), ("base_momentums", "max_momentums"))
"""A key of CyclicLR, and its lists that each step reads side by side. It has them from one state,
or from itself.

LambdaLR has ``base_lrs`` and ``lr_lambdas``. Their lengths show nothing: a MultiplicativeLR with
the state of a run that had fewer param groups loads, steps, and saves two lengths.
"""


_OF_LOADER = ("_num_yielded", "_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed",
    "dataset_state", "_iterator_finished")  # fmt: skip
_OF_LOADER_WITH_WORKERS = ("_snapshot", "_steps_since_snapshot", "_iterator_finished")
_OF_SNAPSHOT = ("_snapshot_step", "_last_yielded_worker_id", "_main_snapshot")
_OF_MAIN_SNAPSHOT = ("_num_workers", "_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed",
    "_base_seed")  # fmt: skip
"""Keys that torchdata's loaders look up, whatever the dataset and the sampler (0.11)."""


def problem_of_dataloader(root: object) -> StateProblem | None:
    """Return why torchdata's loader cannot continue from a state, None where it can, or another
    loader may.
    """
    if not is_plain(root):
        return None
    if not is_dict_like(root) or not any(True for _ in pairs(root)):
        is_nothing = is_dict_like(root) or root is None
        effect = (
            "the load succeeds, but the data loader starts the epoch again"
            if is_nothing
            else _NO_BATCH
        )
        return StateProblem(Content.DATALOADER, noun_of(root), None, effect=effect)
    if not is_of_torchdata(root):
        return None
    parts: list[tuple[str, object, tuple[str, ...]]] = [("", root, _OF_LOADER)]
    snapshot = child(root, "_snapshot")
    if snapshot is not None or child(root, "_steps_since_snapshot") is not None:
        parts = [
            ("", root, _OF_LOADER_WITH_WORKERS),
            ("_snapshot", snapshot, _OF_SNAPSHOT),
            ("_main_snapshot", child(snapshot, "_main_snapshot"), _OF_MAIN_SNAPSHOT),
        ]
    for key, part, wanted in parts:
        keys = (
            {name.value for name, _ in pairs(part) if type(name) is Text}
            if is_dict_like(part)
            else set()
        )
        lacking = [name for name in wanted if name not in keys]
        if lacking:
            where = f" in {key!r}" if key else ""
            holds = f"a data loader's state without {list_names(lacking)}{where}"
            return StateProblem(Content.DATALOADER, holds, None, effect=_NO_BATCH)
        for name in {*_COUNTS_OF_LOADER}.intersection(wanted):
            value = child(part, name)
            if is_plain(value) and type(value) is not int:
                holds = f"a data loader's state whose {name!r} is {noun_of(value)}"
                return StateProblem(Content.DATALOADER, holds, None, effect=_NO_BATCH)
    return None


_NO_BATCH = "the load succeeds, but the first batch fails"
_COUNTS_OF_LOADER = (
    "_num_yielded", "_sampler_iter_yielded", "_steps_since_snapshot", "_snapshot_step",
    "_num_workers",
)  # fmt: skip


def is_of_torchdata(root: object) -> bool:
    """Return whether a dict has a key that torchdata's loaders save, with or without workers."""
    return is_dict_like(root) and any(
        type(key) is Text and key.value in _SHOWING_TORCHDATA for key, _ in pairs(root)
    )


_SHOWING_TORCHDATA = (
    "_num_yielded",
    "_sampler_iter_yielded",
    "_iterator_finished",
    "_snapshot",
    "_steps_since_snapshot",
)


def workers_of_loader(root: object) -> int | None:
    """Return the number of workers of a state of torchdata's loader, None for a state of anything
    else.
    """
    if not is_of_torchdata(root) or problem_of_dataloader(root) is not None:
        return None
    main = child(child(root, "_snapshot"), "_main_snapshot")
    workers = child(main, "_num_workers") if main is not None else 0
    return workers if type(workers) is int else None


def problem_of_scaler(tree: PickleTree) -> StateProblem | None:
    """Return the problem of a value that ``GradScaler`` loads, and with which its next step or
    update fails.
    """
    for key, value in pairs(tree.root):
        if (
            type(key) is Text
            and key.value in SCALER_KEYS
            and not _is_of_scaler(key.value, value, tree)
        ):
            holds = f"a gradient scaler's state whose {key.value!r} is {noun_of(value)}"
            effect = "the load succeeds, but the first step of an fp16 run fails"
            if type(value) in (int, float):
                holds += " that torch refuses"
            return StateProblem(Content.GRAD_SCALER, holds, None, effect=effect)
    return None


def _is_of_scaler(name: str, value: Any, tree: PickleTree) -> bool:
    if type(value) is Node and is_tensor(value):
        tensor = read_tensor(Text("", 0, 0), value, storages(tree))
        return tensor is None or not tensor.shape
    if type(value) is Node and not is_plain(value):
        return True
    if name == "growth_interval":
        return type(value) is int and -_INT64 <= value < _INT64
    if name == "_growth_tracker":
        return is_int32(value)
    most = _INT64 if name == "scale" else _FLOAT64
    return type(value) in (bool, float) or (type(value) is int and -most <= value < most)


def problem_of_step(tree: PickleTree) -> StateProblem | None:
    """Return the problem of a step with which ``accumulate`` fails or never lets the optimizer
    step.
    """
    step = next(
        (value for key, value in pairs(tree.root) if type(key) is Text and key.value == "step"), 0
    )
    if type(step) is float:
        is_count = step.is_integer()
        noun = "not a whole number"
    elif type(step) is Node and is_tensor(step):
        tensor = read_tensor(Text("", 0, 0), step, storages(tree))
        is_count = tensor is None or prod(tensor.shape) == 1
        noun = "a tensor of several numbers"
    else:
        is_count = type(step) in (int, bool) or not is_plain(step)
        noun = noun_of(step)
    if is_count:
        return None
    holds = f"random states whose 'step' is {noun}"
    effect = "load_state accepts it, but accumulate() then fails or never steps the optimizer"
    return StateProblem(Content.RANDOM_STATES, holds, None, effect=effect)

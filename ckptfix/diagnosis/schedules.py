"""Schedules that disagree with the optimizer next to them, by headers alone.

Facts from torch 2.13 (``torch/optim/lr_scheduler.py``), and from runs of every schedule of torch and transformers: most
compute the next learning rate of a param group from its present one. LambdaLR, CosineAnnealingWarmRestarts and CyclicLR
compute it from ``base_lrs``, one for each group.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import MismatchedRates
from ckptfix.diagnosis.optimizer_states import SavedOptimizer
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile

_SHARED_KEYS = frozenset(
    (
        "base_lrs",
        "last_epoch",
        "_last_lr",
        "_step_count",
        "_get_lr_called_within_step",
        "_is_initial",
        "verbose",
    )
)
"""Keys of every schedule of torch: a class of a script with others has a step of its own."""

_BY_FUNCTION = "lr_lambdas"
_FROM_BASE_RATES = {
    _BY_FUNCTION: frozenset((_BY_FUNCTION,)),
    "T_cur": frozenset(("T_0", "T_i", "T_mult", "T_cur", "eta_min")),
    "max_lrs": frozenset(
        {
            *("max_lrs", "mode", "gamma", "scale_mode", "total_size", "step_ratio"),
            *("cycle_momentum", "use_beta1", "base_momentums", "max_momentums"),
            *("_scale_fn_ref", "_scale_fn_custom"),
        }
    ),
}
"""A key that only this schedule has -> all keys of its own. These schedules read ``base_lrs`` in each step."""

_MOST_NESTED = 16


def diagnose_schedules(
    folder: CheckpointFolder, optimizers: Sequence[SavedOptimizer], damaged: frozenset[PurePosixPath]
) -> Iterator[Finding]:
    """Yield the schedules that fit none of the folder's optimizers.

    ``damaged``: files whose content has another finding. Nothing is judged where an optimizer cannot be read, or where
    there are more schedulers than optimizers: then one may belong to an optimizer that is not saved.
    """
    files = [one for one in folder.components if one.role is Role.OPTIMIZER]
    schedulers = [one for one in folder.components if one.role is Role.SCHEDULER]
    read = {one.path: one for one in optimizers}
    if {one.path for one in files} != read.keys() - damaged or len(schedulers) > len(files):
        return
    groups = {one.name.index: len(read[one.path].groups) for one in files}
    for scheduler in schedulers:
        if not isinstance(scheduler.content, TorchFile) or scheduler.path in damaged:
            continue
        try:
            rates = list(_read_in_each_step(scheduler.content.tree.root))
        except FormatError:
            continue
        wrong = [count for count in rates if count not in groups.values()]
        if wrong:
            partner = next((one for one in files if one.name.index == scheduler.name.index), files[0])
            yield MismatchedRates(
                path=scheduler.path,
                rates=wrong[0],
                optimizer=str(partner.path),
                param_groups=len(read[partner.path].groups),
            )


def _read_in_each_step(state: Any) -> Iterator[int]:
    """Yield the numbers of base rates that the next steps of a scheduler take for all param groups."""
    if not is_dict_like(state):
        return
    nested = [one for one in items_of(child(state, "_schedulers"))[:_MOST_NESTED] if is_dict_like(one)]
    if nested:
        # SequentialLR is done with the schedules before the current one. ChainedScheduler has no milestones.
        milestones = [one for one in items_of(child(state, "_milestones")) if type(one) is int]
        moves = child(state, "last_epoch")
        done = bisect_right(milestones, moves + 1) if type(moves) is int else 0
        for part in nested[done:]:
            if child(part, "_schedulers") is None:
                yield from _read_in_each_step(part)
        return
    keys = frozenset(key.value for key, _ in pairs(state) if type(key) is Text)
    own = keys - _SHARED_KEYS
    if not any(key in own and own <= every for key, every in _FROM_BASE_RATES.items()):
        return
    rates, last = items_of(child(state, "base_lrs")), items_of(child(state, "_last_lr"))
    # MultiplicativeLR has the keys of LambdaLR. It steps without ``base_lrs``, and then has as many rates as groups.
    if rates and (_BY_FUNCTION not in own or len(rates) == len(last)):
        yield len(rates)

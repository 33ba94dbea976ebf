"""The commit of a load: all ranks load, or all roll back.

They agree, modify everything in the order of ``Accelerator.load_state``, or undo it. Only hooks of
the script, and loads that are delegated to accelerate, modify anything elsewhere.
"""

import copy
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_never

from ckptfix.checkpoint.folder_names import checkpoint_number
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.nested_values import first_difference
from ckptfix.devices.offloaded import EmptySlot, MemorySlot, Slot
from ckptfix.devices.torch_reading import same_bits
from ckptfix.training.loading.draft import (
    OF_A_RANK,
    Action,
    Draft,
    LoadModel,
    LoadState,
    SetRandom,
    SetSampler,
    SetStep,
    as_load_error,
)
from ckptfix.training.loading.load_report import LoadError, Part
from ckptfix.training.loading.moments import as_number, first_step
from ckptfix.training.loading.states import current_random, set_random
from ckptfix.training.loading.targets import distinct
from ckptfix.training.prepared import innermost, levels
from ckptfix.training.ranks import Ranks
from ckptfix.wording import count_of


def may_refuse(part: Part, action: Action) -> bool:
    """Return whether code of the script, or of another library, runs in an action, so that it can
    fail half way.

    Classes of torch and accelerate are given only what was found to suit them.
    """
    match action:
        case LoadModel(target=target):
            hooked = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
            return _loads_itself(target.thing) or any(
                getattr(module, name, None) for module in target.inner.modules() for name in hooked
            )
        case LoadState(thing=thing):
            is_unknown = part is Part.DATALOADERS or (
                part is Part.CUSTOM and not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
            )
            return is_unknown or _loads_itself(thing)
    return False


def _loads_itself(thing: Any) -> bool:
    for level in levels(thing):
        method = getattr(type(level), "load_state_dict", None)
        is_known = str(getattr(method, "__module__", "")).startswith(("torch.", "accelerate."))
        if not is_known or "load_state_dict" in getattr(level, "__dict__", {}):
            return True
        hooked = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        if any(getattr(level, name, None) for name in hooked):
            return True
    return False


class Tensors:
    """The parameters and buffers of models, copied to the CPU: both the objects in their places and
    their values.

    Changes of submodules, and of weights that are kept offloaded on a disk, are not undone.
    """

    def __init__(self, models: Sequence[Any], slots: Sequence[Slot] = ()) -> None:
        self._before: list[tuple[dict[str, Any], str, Any, torch.Tensor | None]] = []
        modules = {
            id(module): module for target in distinct(models) for module in target.thing.modules()
        }
        copies: dict[int, torch.Tensor | None] = {}
        for module in modules.values():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if id(tensor) not in copies:  # tied ones are kept once
                        is_here = tensor is not None and tensor.device.type != "meta"
                        copies[id(tensor)] = copied(tensor) if is_here else None
                    self._before.append((registry, name, tensor, copies[id(tensor)]))
        self._slots = [
            (slot, copied(slot.read())) for slot in slots if isinstance(slot, MemorySlot)
        ]

    def restore(self) -> None:
        """Put every tensor back in its place, with its value."""
        with torch.no_grad():
            for registry, name, tensor, value in self._before:
                registry[name] = tensor
                if value is not None:
                    tensor.copy_(value)
        for slot, value in self._slots:
            slot.write(value)


def can_be_kept(slots: Sequence[Slot]) -> bool:
    """Return whether ``Tensors`` covers these slots: what lies on a disk is there because memory is
    short.
    """
    return all(isinstance(slot, MemorySlot | EmptySlot) for slot in slots)


class State:
    """The attributes and the ``state_dict()`` of one object, tensors copied to the CPU."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._inner = innermost(thing)
        self._attributes = dict(getattr(self._inner, "__dict__", {}))
        # torch's optimizers make a new state of what they load, and let go of the old one
        # untouched.
        self._is_replaced = isinstance(self._inner, torch.optim.Optimizer) and not _loads_itself(
            thing
        )
        self._state: Any = None
        self._is_known = True
        if not self._is_replaced:
            try:
                self._state = copied(thing.state_dict())
            except Exception:  # of a class of the script; a load that works does not need it
                self._is_known = False

    def restore(self) -> bool:
        """Put back what was there; return whether it is there again."""
        self._restore_attributes()
        if self._is_replaced:
            return True
        if not self._is_known:
            return False
        for keeps_attributes in (True, False):
            if self._is_as_before():
                return True
            with suppress(Exception):  # it may refuse this as well, and be as it was all the same
                self._thing.load_state_dict(copied(self._state))
            if keeps_attributes:
                self._restore_attributes()
        return self._is_as_before()

    def _restore_attributes(self) -> None:
        own = getattr(self._inner, "__dict__", None)
        if own is not None:
            own.clear()
            own.update(self._attributes)

    def _is_as_before(self) -> bool:
        return first_difference(self._thing.state_dict(), self._state) is None


def copied(value: Any) -> Any:
    """Return a deep copy of a state, its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value)


Outline = tuple[str, ...]

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
"""The order of ``accelerate.checkpointing.load_accelerator_state``, then step and custom objects.
"""


class Commit:
    """The actions of a draft, and the way back from them where code of the script may stop it half
    way.

    Without such code nothing is kept: then only a failure of the machine can stop it. ``tensors``:
    what hooks of the script began to modify already. ``refused``: the part of the object that
    raised.
    """

    def __init__(self, draft: Draft, accelerator: Any, tensors: Tensors | None = None) -> None:
        """Keep what will be modified. Modifies nothing."""
        self._draft = draft
        self._accelerator = accelerator
        self._planned = sorted(draft.planned, key=lambda pair: _ORDER.index(pair[0].part))
        self._attempted = 0
        self.refused: Part | None = None
        self._random = current_random()
        self._step = getattr(accelerator, "step", None)
        self._tensors = tensors
        self._states: dict[int, State] = {}
        self._samplers: dict[int, Any] = {}
        self._is_kept = tensors is not None or any(
            may_refuse(report.part, action) for report, action in self._planned
        )
        if self._is_kept:
            try:
                self._keep()
            except (
                MemoryError,
                RuntimeError,
            ):  # torch's word for no memory; a load that works needs no way back
                self._is_kept = False

    def _keep(self) -> None:
        models = [action for _, action in self._planned if isinstance(action, LoadModel)]
        if self._tensors is None:
            slots = [slot for action in models for slot in action.slots.values()]
            self._tensors = Tensors([action.target.thing for action in models], slots)
        for number, (_, action) in enumerate(self._planned):
            if isinstance(action, LoadState):
                self._states[number] = State(action.thing)
            elif isinstance(action, SetSampler):
                self._samplers[number] = action.dataloader.get_sampler()

    def run(self) -> None:
        """Do every action. Raises LoadError when one fails; what was done until then is not undone
        here.
        """
        for report, action in self._planned:
            self._attempted += 1
            try:
                perform(action, self._accelerator)
            except Exception as error:  # load_state_dict of a class of the script raises anything
                self.refused = report.part
                raise LoadError(
                    f"{self._draft.path}: {report.name} could not load its state: "
                    f"{type(error).__name__}: {error}",
                    report=self._draft.report(),
                    modified=True,
                ) from error

    def undo(self) -> list[str]:
        """Put everything back as it was; return the names of what could not be."""
        attempted = self._planned[: self._attempted]
        lost = []
        for number, (report, action) in reversed(list(enumerate(attempted))):
            try:
                is_back = self._is_kept and self._restore(number, action)
            except Exception:  # of a class of the script, or no memory
                is_back = False
            if not is_back:
                lost.append(report.name)
        lost += [name for name in _lost_of(self._tensors) if name not in lost]
        if not self._is_kept:
            return lost[::-1]
        set_random(self._random)
        if self._accelerator is not None:
            self._accelerator.step = self._step
        return lost[::-1]

    def _restore(self, number: int, action: Action) -> bool:
        match action:
            case LoadModel():
                return can_be_kept(list(action.slots.values()))
            case LoadState():
                return self._states[number].restore()
            case SetSampler():
                action.dataloader.set_sampler(self._samplers[number])
        return True


def commit_on_all(
    ranks: Ranks, draft: Draft, accelerator: Any = None, tensors: Tensors | None = None
) -> None:
    """Do what was planned on every rank, or undo it on every rank and raise LoadError. ``tensors``:
    see ``Commit``.
    """
    error: Exception | None = None
    commit: Commit | None = None
    try:
        commit = Commit(draft, accelerator, tensors)
        commit.run()
    except Exception as problem:
        error = as_load_error(problem, draft)
    try:
        agree(ranks, error)
    except LoadError as failure:
        raise _undo_on_all(ranks, commit, tensors, failure) from failure.__cause__


def _lost_of(tensors: Tensors | None) -> list[str]:
    """Restore the tensors of models; return what to call them when that failed."""
    try:
        if tensors is not None:
            tensors.restore()
    except Exception:  # of a class of the script, or no memory
        return ["the weights of the models"]
    return []


def _undo_on_all(
    ranks: Ranks, commit: Commit | None, tensors: Tensors | None, failure: LoadError
) -> LoadError:
    """Undo a commit on every rank after it failed on any; return the error to raise, which says how
    that went.

    ``commit``: None on a rank that did not come to begin; hooks may have modified its models
    before.
    """
    everyone = ranks.gather((ranks.rank, _lost_of(tensors) if commit is None else commit.undo()))
    lost = [
        f"rank {rank}: {', '.join(names)}" if rank else ", ".join(names)
        for rank, names in everyone
        if names
    ]
    ending = "all changes were undone; nothing is modified"
    refused = None if commit is None else commit.refused
    if refused not in (None, Part.MODELS):  # optimizers need the weights of models
        ending += f'; next: pass policy=LoadPolicy({refused.value}="ignore") to leave it unchanged'
    if lost:
        ending = f"{'; '.join(lost)} could not be undone: do not continue this run"
    return LoadError(f"{failure}; {ending}", report=failure.report, modified=bool(lost))


def agree(ranks: Ranks, error: BaseException | None, outline: Outline = ()) -> None:
    """Raise on every rank when any rank failed, or when ranks would load different things.

    Every rank must call it, failed or not. A rank's own error is raised as it is, others see a
    LoadError that names the rank.
    """
    own = None if error is None else f"{type(error).__name__}: {error}"
    everyone = ranks.gather((ranks.rank, own, bool(getattr(error, "modified", False)), outline))
    if error is not None:
        raise error
    failed = [(other, text) for other, text, _, _ in everyone if text is not None]
    if failed:
        more = f" (and {count_of(len(failed) - 1, 'other rank')})" if len(failed) > 1 else ""
        raise LoadError(
            f"rank {failed[0][0]} failed{more}, so rank {ranks.rank} stops too: {failed[0][1]}",
            modified=any(flag for _, _, flag, _ in everyone),
        )
    first, _, _, mine = everyone[0]
    for other, _, _, theirs in everyone:
        if theirs != mine:
            pairs = zip(mine, theirs, strict=False)
            counts = f"{len(mine)} components versus {len(theirs)}"
            difference = next((f"{b} versus {a}" for a, b in pairs if a != b), counts)
            raise LoadError(
                f"rank {other} would load different data than rank {first}: {difference}; do all "
                "ranks see the same folder?"
            )


def outline(draft: Draft) -> Outline:
    """Return in words what must be the same on every rank: each component, its status, its files
    with their sizes, what is left, and how far an optimizer or a scheduler has come.
    """
    sizes = {str(member.path): member.size for entry in draft.used for member in entry.members}
    progress = {id(report): _progress(action) for report, action in draft.planned}
    lines = []
    for report in draft.report().components:
        if report.part not in OF_A_RANK:
            files = [f"{name} ({sizes.get(name, 0)} bytes)" for name in report.files]
            words = [report.name, report.status.value, *files, *progress.get(id(report), ())]
            if not report.is_in_full:
                words += map(str, (report.fresh, report.unused, report.mismatched))
            lines.append(" ".join(words))
    return tuple(lines)


def _progress(action: Action) -> tuple[str, ...]:
    """Return in words how far an optimizer or a scheduler has come: files of two saves of a run
    have the same names and sizes.
    """
    state = action.state if isinstance(action, LoadState) else None
    if not isinstance(state, Mapping):
        return ()
    if "param_groups" not in state:
        return (f"at step {state['last_epoch']}",) if "last_epoch" in state else ()
    rates = [
        as_number(group.get("lr")) for group in state["param_groups"] if isinstance(group, Mapping)
    ]
    step = as_number(first_step(state.get("state")))
    at = () if step is None else (f"at step {step:g}",)
    return (*at, f"with learning rates {rates}")


def go_on_numbering(accelerator: Any, path: Path) -> None:
    """Let automatic numbers go on after the checkpoint that was loaded, and after all that are
    there.

    Stock ``save_state`` refuses a number that is taken, and ``load_state`` leaves it at 0. Every
    rank must call it.
    """
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        return

    def following() -> int | None:
        loaded = checkpoint_number(Path(os.path.abspath(path)).name)
        if loaded is None:
            return None
        names: list[str] = []
        with suppress(OSError):  # everything is loaded by now
            names = os.listdir(Path(accelerator.project_dir or "") / "checkpoints")
        taken = [number for name in names if (number := checkpoint_number(name)) is not None]
        return 1 + max([loaded, *taken])

    number = Ranks(accelerator).on_main(following, f"load_state_tolerant {path}")
    if number is not None:
        config.iteration = number


def perform(action: Action, accelerator: Any) -> None:
    """Do one action."""
    match action:
        case LoadModel():
            _load_model(action)
        case LoadState():
            action.thing.load_state_dict(action.state)
        case SetSampler():
            action.dataloader.set_sampler(action.sampler)
        case SetRandom():
            if left := set_random(action.states):
                warn_caller(f"random number generators not fully restored: {left}")
        case SetStep():
            accelerator.step = action.step
        case _:
            assert_never(action)


def _load_model(action: LoadModel) -> None:
    """Load a model's tensors, those on the meta device into their slots, and check that each name
    was taken.
    """
    state = action.state
    values = {name: state[name] for name in action.slots if name in state}
    for name in action.slots:
        # Tied to a tensor that is in the file, and may be kept apart from it.
        if name not in values:
            tied = next(other for other in action.target.ties[name] if other in state)
            values[name] = state[tied]
    for name in values:
        state.pop(name, None)
    result = action.target.thing.load_state_dict(state, strict=False)
    if result is None:  # a model with a load_state_dict of its own
        result = torch.nn.modules.module._IncompatibleKeys([], [])
    missing = set(result.missing_keys) - action.fit.absent - action.fit.kept - set(values)
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"missing keys {sorted(missing)}, unexpected keys {sorted(result.unexpected_keys)}"
        )
    for name, value in values.items():
        action.slots[name].write(value)
        arrived = action.slots[name].read()
        if not same_bits(arrived.to("cpu"), value.to("cpu", arrived.dtype)):
            raise RuntimeError(f"{name!r} differs from the written value when read back")

"""All ranks load, or none: they agree, modify everything in the order of ``Accelerator.load_state``, or take it back.

Beside hooks of the script and loads that are delegated to accelerate, nothing is modified anywhere else.
"""

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_never

from ckptfix.checkpoint.latest import checkpoint_number
from ckptfix.runtime.loading.draft import (
    OF_A_RANK,
    Action,
    Draft,
    LoadModel,
    LoadState,
    SetRandom,
    SetSampler,
    SetStep,
)
from ckptfix.runtime.loading.randomness import current_random, set_random
from ckptfix.runtime.loading.report import LoadError, Part
from ckptfix.runtime.loading.rollback import State, Tensors, can_be_kept, may_refuse, same_bytes
from ckptfix.runtime.ranks import Ranks

Outline = tuple[tuple[object, ...], ...]

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


class Commit:
    """What a draft is going to do, and the way back from it where code of the script may stop it half way.

    Without such code nothing is kept: then only a failure of the machine can stop it. ``tensors``: what hooks of the
    script began to modify already. ``refused``: the part of the object that raised.
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
        """Do every action. Raises LoadError when one fails; what was done until then is not taken back here."""
        for report, action in self._planned:
            self._attempted += 1
            try:
                perform(action, self._accelerator)
            except Exception as error:  # load_state_dict of a class of the script raises anything
                self.refused = report.part
                raise LoadError(
                    f"{self._draft.path}: {report.name} refused its state: {type(error).__name__}: {error}",
                    report=self._draft.report(),
                    modified=True,
                ) from error

    def take_back(self) -> list[str]:
        """Put everything back as it was; return the names of what could not be."""
        attempted = self._planned[: self._attempted]
        if not self._is_kept:
            return [report.name for report, _ in attempted]
        lost = []
        for number, (report, action) in reversed(list(enumerate(attempted))):
            try:
                is_back = self._restore(number, action)
            except Exception:  # of a class of the script, or no memory
                is_back = False
            if not is_back:
                lost.append(report.name)
        try:
            if self._tensors is not None:
                self._tensors.restore()
        except Exception:
            lost += [report.name for report, action in attempted if isinstance(action, LoadModel)]
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


def take_back_on_all(accelerator: Any, commit: Commit | None, failure: LoadError) -> LoadError:
    """Take a commit back on every rank after it failed on any; return the error to raise, which says how that went.

    ``commit``: None on a rank that did not come to begin.
    """
    own = [] if commit is None else commit.take_back()
    everyone = (
        [(0, own)] if accelerator is None else Ranks(accelerator).gather((accelerator.process_index, own))
    )
    lost = [
        f"rank {rank}: {', '.join(names)}" if rank else ", ".join(names) for rank, names in everyone if names
    ]
    ending = "everything was undone, nothing is modified"
    refused = None if commit is None else commit.refused
    if refused not in (None, Part.MODELS):  # optimizers need the weights of models
        ending += f'; next: policy=LoadPolicy({refused.value}="ignore") leaves it as it is'
    if lost:
        ending = f"{'; '.join(lost)} could not be undone: the run must not go on from here"
    return LoadError(f"{failure}; {ending}", report=failure.report, modified=bool(lost))


def agree(accelerator: Any, error: BaseException | None, outline: Outline = ()) -> None:
    """Raise on every rank when any rank failed, or when ranks would load different things.

    Every rank must call it, failed or not. A rank's own error is raised as it is, others see a LoadError that names the
    rank.
    """
    rank = accelerator.process_index
    own = None if error is None else f"{type(error).__name__}: {error}"
    everyone = Ranks(accelerator).gather((rank, own, bool(getattr(error, "modified", False)), outline))
    if error is not None:
        raise error
    failed = [(other, text) for other, text, _, _ in everyone if text is not None]
    if failed:
        more = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise LoadError(
            f"rank {failed[0][0]} failed{more}, so rank {rank} stops too: {failed[0][1]}",
            modified=any(flag for _, _, flag, _ in everyone),
        )
    for other, _, _, theirs in everyone:
        if theirs != everyone[0][3]:
            raise LoadError(
                f"rank {other} would load something else than rank {everyone[0][0]}: "
                f"{_first_difference(everyone[0][3], theirs)}; do all ranks see the same folder?"
            )


def outline(draft: Draft) -> Outline:
    """Return what must be the same on every rank: component, status, files, their sizes in bytes, and what is left."""
    sizes = {str(member.path): member.size for entry in draft.used for member in entry.members}
    return tuple(
        (
            report.name,
            report.status.value,
            report.files,
            tuple(sizes.get(name, 0) for name in report.files),
            *(() if report.is_in_full else (report.fresh, report.unused, report.mismatched)),
        )
        for report in draft.report().components
        if report.part not in OF_A_RANK
    )


def go_on_numbering(accelerator: Any, path: Path) -> None:
    """Let automatic numbers go on after the checkpoint that was loaded, and after all that are there.

    Stock ``save_state`` refuses a number that is taken, and ``load_state`` leaves it at 0. Every rank must call it.
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
    missing = set(result.missing_keys) - action.fit.absent - action.fit.kept - set(values)
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"missing names {sorted(missing)}, unexpected names {sorted(result.unexpected_keys)}"
        )
    for name, value in values.items():
        action.slots[name].write(value)
        arrived = action.slots[name].read()
        if not same_bytes(arrived.to("cpu"), value.to("cpu", arrived.dtype)):
            raise RuntimeError(f"{name!r} is not what was written")


def _first_difference(one: Outline, other: Outline) -> str:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return f"{left} against {right}"
    return f"{len(one)} components against {len(other)}"

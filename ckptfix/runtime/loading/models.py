"""Plan what each model of a run gets: which entry, under which names, and whether it would really arrive."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ckptfix.checkpoint.entries import Entry
from ckptfix.runtime.loading.checking import dtype_change, dtype_problem
from ckptfix.runtime.loading.draft import Draft, LoadModel
from ckptfix.runtime.loading.following import Placed, went_elsewhere
from ckptfix.runtime.loading.matching import Assignment, hidden_by, misfits, settle, undecided
from ckptfix.runtime.loading.offloaded import find_slots
from ckptfix.runtime.loading.reading import Unreadable, read_weights
from ckptfix.runtime.loading.report import ComponentReport, Part, Status
from ckptfix.runtime.loading.targets import Fit, ModelTarget, distinct, fit
from ckptfix.storage.paths import command

Fits = list[list[Fit | str]]


def plan_models(
    draft: Draft, root: Path, entries: Sequence[Entry], targets: Sequence[ModelTarget], device: torch.device
) -> Placed:
    """Add to the draft what every model gets. Reads tensors onto the CPU, modifies nothing. Raises OSError.

    ``device``: where tensors go that are on the meta device and that no hook looks after.
    """
    fits: Fits = [[entry.problem or fit(entry.shapes, target) for target in targets] for entry in entries]
    reasons = [[found if isinstance(found, str) else "" for found in row] for row in fits]
    exact = [[isinstance(found, Fit) and found.is_exact for found in row] for row in fits]
    settled = settle(root, entries, targets, reasons, exact=exact)
    assignment = settled.assignment
    pairs: dict[int, int] = {}
    for number, target in enumerate(targets):
        position = assignment.pairs.get(number)
        if position is None:
            _nothing_for(draft, entries, targets, number, reasons, assignment)
            continue
        if hidden := hidden_by(entries, position, number, [entry.problem for entry in entries]):
            draft.cannot(Part.MODELS, hidden, target=target)
            continue
        found = fits[position][number]
        assert isinstance(found, Fit)
        moved = position != number
        if _load(
            draft, root, entries[position], target, found, device, number in assignment.by_position, moved
        ):
            pairs[number] = position
    for double, original in settled.aside.items():
        reason = f"the same model again as {entries[original].label}, equal in every byte"
        draft.leave(Part.MODELS, entries[double].files, reason)
    for number in assignment.left:
        draft.leave(
            Part.MODELS, entries[number].files, entries[number].problem or "it fits no model of this run"
        )
    return Placed(
        part=Part.MODELS,
        entries=entries,
        targets=targets,
        pairs=pairs,
        aside=settled.aside,
        is_moved=went_elsewhere(entries, targets, pairs, settled.aside),
    )


def run_hooks(accelerator: Any, path: str, draft: Draft) -> list[Any]:
    """Call the hooks with the list of models, as ``load_state`` does, and return the models they left in it."""
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, path)
    kept = {id(model) for model in models}
    for target in distinct(accelerator._models):
        if id(target.thing) not in kept:
            draft.others.append(
                ComponentReport(
                    part=Part.MODELS,
                    status=Status.RESTORED,
                    index=target.index,
                    what=target.what,
                    reason="by a hook of the script (register_load_state_pre_hook)",
                )
            )
    return models


def _nothing_for(
    draft: Draft, entries: Sequence[Entry], targets: Sequence[ModelTarget], number: int,
    reasons: Sequence[Sequence[str]], assignment: Assignment,
) -> None:  # fmt: skip
    """Say why a model gets nothing."""
    target = targets[number]
    if not entries:
        reason = f"{draft.path} holds no weights of a model; next: {command('check', draft.path)}"
        draft.cannot(Part.MODELS, reason, target=target, missing=True)
        return
    others = misfits(entries, [row[number] for row in reasons])
    if assignment.refusal is not None and number in assignment.refusal[0]:
        models = ", ".join(
            f"{targets[index].index} ({targets[index].what})" for index in assignment.refusal[0]
        )
        reason = undecided(entries, assignment.refusal, f"models {models}", others)
        reason += f"; next: {draft.advice or command('check', draft.path)}"
    else:
        reason = f"no entry of {draft.path} fits: {others or 'others took those that do'}"
    draft.cannot(Part.MODELS, reason, target=target)


def _load(
    draft: Draft, root: Path, entry: Entry, target: ModelTarget, found: Fit, device: torch.device,
    by_position: bool, moved: bool,
) -> bool:  # fmt: skip
    """Read an entry for a model, and add its loading or the reason against it. Return whether it is loaded."""
    try:
        weights = read_weights(root, entry, trust=draft.policy.trust)
    except Unreadable as error:
        draft.cannot(Part.MODELS, str(error), target=target, files=entry.files)
        return False
    changed = [name for name in weights if name not in found.names]
    state: OrderedDict[str, Any] = OrderedDict(
        (found.names[name], weights[name]) for name in weights if not changed
    )
    lost = [name for name in found.names if name not in weights]
    if changed or lost:
        text = f"{root / entry.label} changed while it was read: {(changed or lost)[0]!r}; load it again"
        draft.cannot(Part.MODELS, text, target=target, files=entry.files)
        return False
    _metadata(weights, state, found)
    pairs = []
    for name, value in state.items():
        own = target.state[name]
        if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
            continue
        shapes = (list(value.shape), list(own.shape))
        if type(own).__name__ == "DTensor":
            reason = "the model's tensor is sharded over ranks; next: accelerator.load_state(path)"
            draft.cannot(Part.MODELS, f"{name!r}: {reason}", target=target, files=entry.files)
            return False
        reason = dtype_problem(value, own)
        if shapes[0] != shapes[1]:
            reason = f"the shape is {shapes[0]} in the file, {shapes[1]} in the model"
        if reason:
            draft.cannot(Part.MODELS, f"{entry.label}: {name!r}: {reason}", target=target, files=entry.files)
            return False
        pairs.append((value.dtype, own.dtype))
    slots, wrong = find_slots(target.thing, target.meta, device)
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        draft.cannot(Part.MODELS, f"its weights would not arrive: {wrong[0]}{more}", target=target)
        return False
    reasons = [] if found.is_exact else [_renamed(entry, found)]
    if moved:
        reasons.append("from another position")
    if change := dtype_change(pairs):
        reasons.append(change)
    notes = [f"{len(slots)} tensors go to where accelerate keeps them offloaded"] if slots else []
    report = ComponentReport(
        part=Part.MODELS,
        status=Status.ADAPTED if reasons else Status.RESTORED,
        index=target.index,
        what=target.what,
        files=entry.files,
        reason=", ".join(reasons + notes),
        by_position=by_position,
    )
    draft.do(report, LoadModel(target=target, state=state, fit=found, slots=slots), entry)
    return True


def _metadata(weights: Any, state: Any, found: Fit) -> None:
    """Give a state dict the versions of modules, under the names that the model gives them."""
    metadata = getattr(weights, "_metadata", None)
    if metadata is not None:
        state._metadata = OrderedDict((found.modules.module(name), value) for name, value in metadata.items())


def _renamed(entry: Entry, found: Fit) -> str:
    old, new = next((old, new) for old, new in found.names.items() if old != new)
    count = sum(1 for old, new in found.names.items() if old != new)
    return f"{count} of {len(found.names)} names mapped ({old} -> {new})" if entry.shapes else ""

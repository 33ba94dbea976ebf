"""Plans of what each model of a run gets: which entry, under which names, and that it really
arrives.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptfix.checkpoint.entries import Entry
from ckptfix.devices.offloaded import EmptySlot, MemorySlot, Slot, find_slots
from ckptfix.devices.torch_reading import Unreadable, read_weights, same_bits
from ckptfix.storage.paths import command
from ckptfix.training.loading.assignment import (
    Assignment,
    Placement,
    Settlement,
    hidden_by,
    misfits,
    settle,
    settle_by_score,
    undecided,
    went_elsewhere,
)
from ckptfix.training.loading.checking import dtype_change, dtype_problem
from ckptfix.training.loading.draft import Draft, LoadModel
from ckptfix.training.loading.load_report import Mismatch, Part, Requirement, Status
from ckptfix.training.loading.targets import Fit, ModelTarget, distinct, fit, partial_fit, without
from ckptfix.wording import count_of, first_few, list_names

Fits = list[list[Fit | str]]


def plan_models(
    draft: Draft,
    root: Path,
    entries: Sequence[Entry],
    targets: Sequence[ModelTarget],
    device: torch.device,
) -> Placement:
    """Add to the draft what every model gets. Reads tensors onto the CPU, modifies nothing. Raises
    OSError.

    ``device``: where tensors go that are on the meta device and that no hook looks after.
    """
    fits: Fits = [
        [entry.problem or fit(entry.shapes, target) for target in targets] for entry in entries
    ]
    reasons = [[found if isinstance(found, str) else "" for found in row] for row in fits]
    exact = [[isinstance(found, Fit) and found.is_exact for found in row] for row in fits]
    settled = settle(root, entries, targets, reasons, exact=exact)
    if draft.policy.models is Requirement.PARTIAL and not settled.assignment.is_whole(len(targets)):
        fits = [[_as_far_as_it_goes(entry, target) for target in targets] for entry in entries]
        scores = _open_scores(fits, reasons, settled.assignment)
        settled = settle_by_score(root, entries, targets, scores, settled.aside)
    assignment = settled.assignment
    pairs: dict[int, int] = {}
    loaded: dict[int, Fit] = {}
    for number, target in enumerate(targets):
        position = assignment.pairs.get(number)
        if position is None:
            _nothing_for(draft, entries, targets, number, reasons, settled)
            continue
        if hidden := hidden_by(entries, position, number, [entry.problem for entry in entries]):
            draft.cannot(Part.MODELS, hidden, target=target)
            continue
        found = fits[position][number]
        assert isinstance(found, Fit)
        moved = position != number
        arrives = _load(
            draft,
            root,
            entries[position],
            target,
            found,
            device,
            number in assignment.by_position,
            moved,
        )
        if arrives is not None:
            pairs[number], loaded[number] = position, arrives
    for double, original in settled.aside.items():
        reason = f"duplicate of {entries[original].label} (equal in every byte)"
        draft.leave(Part.MODELS, entries[double].files, reason, is_duplicate=True)
    for number in assignment.left:
        draft.leave(
            Part.MODELS,
            entries[number].files,
            entries[number].problem or "it fits none of this run's models",
        )
    return Placement(
        part=Part.MODELS,
        entries=entries,
        targets=targets,
        pairs=pairs,
        aside=settled.aside,
        is_moved=went_elsewhere(entries, targets, pairs, settled.aside),
        fits=loaded,
    )


def run_hooks(accelerator: Any, path: str, draft: Draft) -> list[Any]:
    """Call the hooks with the list of models, as ``load_state`` does, and return the models they
    left in it.
    """
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, path)
    kept = {id(model) for model in models}
    for target in distinct(accelerator._models):
        if id(target.thing) not in kept:
            reason = "by a hook of the script (register_load_state_pre_hook)"
            draft.restored_by_others(Part.MODELS, target, "", reason)
    return models


def _nothing_for(
    draft: Draft, entries: Sequence[Entry], targets: Sequence[ModelTarget], number: int,
    reasons: Sequence[Sequence[str]], settled: Settlement,
) -> None:  # fmt: skip
    """Say why a model gets nothing."""
    target, assignment = targets[number], settled.assignment
    if not entries:
        reason = f"{draft.path} has no model weights; next: {command('check', draft.path)}"
        draft.cannot(Part.MODELS, reason, target=target, missing=True)
        return
    others = misfits(entries, [row[number] for row in reasons])
    if assignment.refusal is not None and number in assignment.refusal[0]:
        models = ", ".join(
            f"{targets[index].index} ({targets[index].what})" for index in assignment.refusal[0]
        )
        reason = undecided(entries, assignment.refusal, f"models {models}", others)
        if draft.policy.models is Requirement.PARTIAL and not draft.advice:
            reason += f"; {_LEAVE_IT}"
        else:
            reason += f"; next: {draft.advice or command('check', draft.path)}"
    else:
        reason = (
            f"no entry of {draft.path} fits: {others}"
            if others
            else f"every entry of {draft.path} that fits goes to another model"
        )
        reason += _partial_advice(draft, entries, targets, number, settled)
    draft.cannot(Part.MODELS, reason, target=target)


def _as_far_as_it_goes(entry: Entry, target: ModelTarget) -> Fit | str:
    """Return the fit of an entry, in full where there is one, or why it cannot be read."""
    if entry.problem:
        return entry.problem
    found = fit(entry.shapes, target)
    return found if isinstance(found, Fit) else partial_fit(entry.shapes, target)


def _open_scores(
    fits: Fits, reasons: Sequence[Sequence[str]], assignment: Assignment
) -> list[list[int]]:
    """Return how many keys match, 0 where a pair that fits in full excludes it.

    An entry that fits one model in full also matches a second model in part. Without the zeros the
    entry counts as one for two models, and neither of them gets it.
    """
    entries = set(assignment.pairs.values())
    return [
        [
            len(found.names)
            if isinstance(found, Fit)
            and (not reason if number in assignment.pairs else position not in entries)
            else 0
            for number, (found, reason) in enumerate(zip(row, why, strict=True))
        ]
        for position, (row, why) in enumerate(zip(fits, reasons, strict=True))
    ]


_LEAVE_IT = 'next: pass policy=LoadPolicy(models="warn", optimizers="warn") to leave it unchanged'
"""Advice for a model that no entry is for; its optimizer, if any, has no file either."""


def _partial_advice(
    draft: Draft,
    entries: Sequence[Entry],
    targets: Sequence[ModelTarget],
    number: int,
    settled: Settlement,
) -> str:
    """Return the policy that helps a model without an entry, "" where none is known.

    A partial load helps only where an entry matches that no other model gets.
    """
    target = targets[number]
    owners = {position: owner for owner, position in settled.assignment.pairs.items()}
    counts = {
        position: len(partial_fit(entry.shapes, target).names)
        for position, entry in enumerate(entries)
        if not entry.problem and position not in settled.aside
    }
    matching = {position: count for position, count in counts.items() if count}
    free = [count for position, count in matching.items() if position not in owners]
    is_partial = draft.policy.models is Requirement.PARTIAL
    if free and not is_partial:
        return (
            '; next: pass policy=LoadPolicy(models="partial") to load the keys that match in name '
            f"and shape ({max(free)} of {len(target.state)})"
        )
    if matching and not free:
        names = ", ".join(
            f"{entries[position].label} belongs to model {targets[owners[position]].index}"
            for position in matching
        )
        return f"; {names}; {_LEAVE_IT}"
    return f"; no key matches in name and shape; {_LEAVE_IT}" if is_partial else ""


def _read(
    draft: Draft, root: Path, entry: Entry, target: ModelTarget, found: Fit
) -> tuple[Fit, "OrderedDict[str, Any]", str] | str:
    """Return the fit with the values that arrive, in the model's names, and which dtypes change; or
    why none does.
    """
    try:
        weights = read_weights(root, entry, trust=draft.policy.trust)
    except Unreadable as error:
        return str(error)
    listed = {*found.names, *found.unused, *(one.name for one in found.mismatched)}
    if changed := weights.keys() ^ listed:
        return (
            f"{root / entry.label} changed during the load (at key {min(changed)!r}); load it again"
        )
    pairs = []
    mismatched = []
    for name, ours in found.names.items():
        value, own = weights[name], target.state[ours]
        if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
            continue
        if type(own).__name__ == "DTensor":
            return (
                f"{ours!r}: the model's tensor is sharded across ranks; next: "
                "accelerator.load_state(path)"
            )
        shapes = tuple(value.shape), tuple(own.shape)
        reason = dtype_problem(value, own)
        if not reason and shapes[0] == shapes[1]:
            pairs.append((value.dtype, own.dtype))
        elif draft.policy.models is Requirement.PARTIAL:
            mismatched.append(
                Mismatch(
                    key=ours, name=name, file_shape=shapes[0], model_shape=shapes[1], reason=reason
                )
            )
        else:
            reason = (
                reason
                or f"the shape is {list(shapes[0])} in the file, {list(shapes[1])} in the model"
            )
            return f"{entry.label}: {ours!r}: {reason}"
    if mismatched:
        found = without(found, mismatched, target)
        if not found.names:
            return f"{entry.label}: no key matches: {mismatched[0]}"
    state: OrderedDict[str, Any] = OrderedDict(
        (ours, weights[name]) for name, ours in found.names.items()
    )
    _metadata(weights, state, found)
    return found, state, dtype_change(pairs)


def _load(
    draft: Draft, root: Path, entry: Entry, target: ModelTarget, found: Fit, device: torch.device,
    by_position: bool, moved: bool,
) -> Fit | None:  # fmt: skip
    """Read an entry for a model, and add its loading or the reason against it. Return how it is
    loaded.
    """
    read = _read(draft, root, entry, target, found)
    if isinstance(read, str):
        draft.cannot(Part.MODELS, read, target=target, files=entry.files)
        return None
    found, state, change = read
    slots, wrong = find_slots(
        target.thing, [name for name in target.meta if name not in found.kept], device
    )
    kept_slots, _ = find_slots(
        target.thing, [name for name in target.meta if name in found.kept], device
    )
    wrong += [
        f"{name!r} is on the meta device, and neither the model nor the file has a value for it"
        for name, slot in kept_slots.items()
        if isinstance(slot, EmptySlot)
    ]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        draft.cannot(Part.MODELS, f"its weights cannot be loaded: {wrong[0]}{more}", target=target)
        return None
    torn = _torn(found, state, target, slots)
    if torn and draft.policy.models is Requirement.REQUIRE:
        advice = 'next: pass policy=LoadPolicy(models="partial") to load them all the same'
        draft.cannot(Part.MODELS, f"{torn}; {advice}", target=target, files=entry.files)
        return None
    reasons = [] if found.is_in_full else [_left_over(found, target)]
    if torn:
        reasons.append(torn)
    if not found.is_exact:
        reasons.append(_renamed(entry, found))
    if moved:
        reasons.append("moved from another position")
    if change:
        reasons.append(change)
    notes = (
        [f"{count_of(len(slots), 'tensor')} loaded into accelerate's offload storage"]
        if slots
        else []
    )
    status = Status.PARTIAL if found.kept else Status.ADAPTED if reasons else Status.RESTORED
    draft.do(
        Part.MODELS,
        LoadModel(target=target, state=state, fit=found, slots=slots),
        target=target,
        entry=entry,
        status=status,
        reason=", ".join(reasons + notes),
        by_position=by_position,
        fresh=found.fresh(target),
        unused=found.unused,
        mismatched=found.mismatched,
        is_told=bool(torn),
    )
    return found


def _torn(
    found: Fit, state: Mapping[str, Any], target: ModelTarget, slots: Mapping[str, Slot]
) -> str:
    """Say which keys differ in the file although the model has one tensor for them, and which of
    them it gets; "" for none.
    """
    files = {ours: name for name, ours in found.names.items()}
    # The order in which load_state_dict copies.
    order = {name: place for place, name in enumerate(target.state)}
    told = []
    for name in files:
        covering = max(
            files.keys() & target.ties.get(name, ()), key=order.__getitem__, default=name
        )
        # The last of several names of one tensor is what the others are compared with.
        is_last = order[covering] < order[name] and name in target.ties.get(covering, ())
        if is_last or covering == name:
            continue
        part, whole = (
            slot.read() if isinstance(slot := slots.get(each), MemorySlot) else target.state[each]
            for each in (name, covering)
        )
        # Weights that are made during the load are not one tensor any more.
        if part.device.type == "meta" or whole.device.type == "meta" or part.dtype != whole.dtype:
            continue
        value = state[covering].to(whole.dtype).contiguous()
        offset = value.storage_offset() + part.storage_offset() - whole.storage_offset()
        inside = value.as_strided(part.shape, part.stride(), offset)
        if not same_bits(inside, state[name].to(part.dtype)):
            first, last = sorted((name, covering), key=order.__getitem__)
            told.append(
                f"{files[first]!r} and {files[last]!r} differ in the file but are one tensor of "
                f"this run's model, {last!r}, which gets the values of {files[last]!r}"
            )
    return first_few(told)


def _left_over(found: Fit, target: ModelTarget) -> str:
    """Say how many keys are loaded, and list those that are not."""
    filled = len(target.state) - len(found.kept)
    words = [f"{filled} of {count_of(len(target.state), 'key')} loaded"]
    if fresh := found.fresh(target):
        words.append(f"not in the file, kept as initialized: {list_names(fresh)}")
    kept = [one for one in found.mismatched if one.key in found.kept]
    # A weight that is tied to a loaded one has the values of that one.
    tied = [one for one in found.mismatched if one.key not in found.kept]
    for result, wrong in (("kept as initialized", kept), ("filled through a tied key", tied)):
        if wrong:
            words.append(f"mismatched, {result}: {first_few(wrong)}")
    if found.unused:
        words.append(f"only in the file, unused: {list_names(found.unused)}")
    return "; ".join(words)


def _metadata(weights: Any, state: Any, found: Fit) -> None:
    """Give a state dict the versions of modules, under the names that the model gives them."""
    metadata = getattr(weights, "_metadata", None)
    if metadata is not None:
        state._metadata = OrderedDict(
            (found.modules.module(name), value) for name, value in metadata.items()
        )


def _renamed(entry: Entry, found: Fit) -> str:
    old, new = next((old, new) for old, new in found.names.items() if old != new)
    count = sum(1 for old, new in found.names.items() if old != new)
    return f"{count} of {len(found.names)} keys mapped ({old} -> {new})" if entry.shapes else ""

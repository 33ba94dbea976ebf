"""Plan what optimizers, schedulers, custom objects, dataloaders and the gradient scaler get."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.runtime.loading.checking import scaler_problem
from ckptfix.runtime.loading.draft import Draft, LoadState, SetSampler
from ckptfix.runtime.loading.entries import Entry, component_at, single_entry
from ckptfix.runtime.loading.policy import Need, Part
from ckptfix.runtime.loading.reading import Unreadable, read_pickle
from ckptfix.runtime.loading.report import ComponentReport, Status
from ckptfix.runtime.loading.settling import hidden_by, misfits, settle, undecided
from ckptfix.runtime.loading.targets import Target

Check = Callable[[Any, Entry, Target], str]
"""Returns why a state does not suit a target, "" when it does."""


def plan_states(
    draft: Draft, part: Part, root: Path, entries: Sequence[Entry], targets: Sequence[Target],
    check: Check | None = None,
) -> None:  # fmt: skip
    """Add to the draft what every object of a numbered part gets. Reads its files, modifies nothing. Raises OSError."""
    if draft.policy.need(part) is Need.IGNORE:
        for target in targets:
            draft.ignore(part, target)
        return
    states: list[Any] = []
    problems: list[str] = []
    reasons: list[list[str]] = []
    for entry in entries if targets else ():
        state, problem = _read(draft, root, entry)
        states.append(state)
        problems.append(problem)
        reasons.append([problem or (check(state, entry, target) if check else "") for target in targets])
    if not targets:
        for entry in entries:
            draft.leave(part, entry.files, "no object of this run is registered for it")
        return
    settled = settle(root, entries, targets, reasons)
    assignment = settled.assignment
    for number, target in enumerate(targets):
        position = assignment.pairs.get(number)
        if position is None:
            _nothing_for(
                draft, part, entries, target, [row[number] for row in reasons], assignment.refusal, number
            )
            continue
        if hidden := hidden_by(entries, position, number, problems):
            draft.cannot(part, hidden, target=target)
            continue
        entry, moved = entries[position], position != number
        report = ComponentReport(
            part=part,
            status=Status.ADAPTED if moved else Status.RESTORED,
            index=target.index,
            what=target.what,
            files=entry.files,
            reason="from another position" if moved else "",
            by_position=number in assignment.by_position,
        )
        draft.do(report, LoadState(thing=target.thing, state=states[position]), entry)
    for double, original in settled.aside.items():
        draft.leave(part, entries[double].files, f"the same state again as {entries[original].label}")
    for number in assignment.left:
        draft.leave(part, entries[number].files, next(iter(reasons[number]), ""))


def plan_scaler(draft: Draft, folder: CheckpointFolder, scaler: Any) -> None:
    """Add what the gradient scaler gets, when the run has one."""
    component = component_at(folder, "scaler.pt")
    if scaler is None:
        if component is not None:
            draft.leave(Part.SCALER, ("scaler.pt",), "this run scales no gradients")
        return
    what = type(scaler).__name__
    if draft.policy.scaler is Need.IGNORE:
        draft.ignore(Part.SCALER, what=what)
        return
    if component is None:
        draft.cannot(Part.SCALER, f"{folder.root / 'scaler.pt'} is missing", what=what, missing=True)
        return
    entry = single_entry(component)
    state, problem = _read(draft, folder.root, entry)
    if reason := problem or scaler_problem(state, scaler):
        draft.cannot(Part.SCALER, reason, what=what, files=entry.files)
        return
    report = ComponentReport(part=Part.SCALER, status=Status.RESTORED, what=what, files=entry.files)
    draft.do(report, LoadState(thing=scaler, state=state), entry)


def plan_dataloaders(draft: Draft, folder: CheckpointFolder, dataloaders: Sequence[Any]) -> None:
    """Add what the samplers and stateful dataloaders get; others save nothing. By position, as ``load_state`` does."""
    from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler

    for index, dataloader in enumerate(dataloaders):
        target = Target(index=index, thing=dataloader, inner=dataloader)
        has_sampler = isinstance(dataloader.dataset, IterableDatasetShard) and isinstance(
            dataloader.get_sampler(), SeedableRandomSampler
        )
        is_stateful = getattr(dataloader, "use_stateful_dataloader", False)
        if draft.policy.dataloaders is Need.IGNORE:
            if has_sampler or is_stateful:
                draft.ignore(Part.DATALOADERS, target)
            continue
        if has_sampler:
            _one(draft, folder, Role.SAMPLER, "sampler", target, _set_sampler)
        if is_stateful:
            _one(draft, folder, Role.DATALOADER, "dl_state_dict", target, _load_state)
    used = {file for report in (*(r for r, _ in draft.planned), *draft.others) for file in report.files}
    for component in folder.components:
        if component.role in (Role.SAMPLER, Role.DATALOADER) and str(component.path) not in used:
            draft.leave(
                Part.DATALOADERS, (str(component.path),), "no dataloader of this run saves such a state"
            )


def _set_sampler(target: Target, state: Any) -> SetSampler:
    return SetSampler(dataloader=target.thing, sampler=state)


def _load_state(target: Target, state: Any) -> LoadState:
    return LoadState(thing=target.thing, state=state)


def _one(
    draft: Draft, folder: CheckpointFolder, role: Role, stem: str, target: Target,
    action: Callable[[Target, Any], SetSampler | LoadState],
) -> None:  # fmt: skip
    name = f"{stem}_{target.index}.bin" if target.index else f"{stem}.bin"
    component = next(
        (one for one in folder.components if one.role is role and one.name.index == target.index), None
    )
    if component is None:
        reason = f"{folder.root / name} is missing"
        draft.cannot(Part.DATALOADERS, reason, target=target, missing=True)
        return
    entry = single_entry(component)
    state, problem = _read(draft, folder.root, entry)
    if problem:
        draft.cannot(Part.DATALOADERS, problem, target=target, files=entry.files)
        return
    report = ComponentReport(
        part=Part.DATALOADERS, status=Status.RESTORED, index=target.index, what=target.what, files=entry.files
    )
    draft.do(report, action(target, state), entry)


def _read(draft: Draft, root: Path, entry: Entry) -> tuple[Any, str]:
    """Return a state and "", or None and why it cannot be read."""
    try:
        return read_pickle(root, entry.members[0], trust=draft.policy.trust), ""
    except Unreadable as error:
        return None, str(error)


def _nothing_for(
    draft: Draft, part: Part, entries: Sequence[Entry], target: Target, reasons: Sequence[str],
    refusal: tuple[tuple[int, ...], tuple[int, ...]] | None, number: int,
) -> None:  # fmt: skip
    """Say why an object gets nothing."""
    if not entries:
        draft.cannot(part, f"{draft.path} has no file for it", target=target, missing=True)
        return
    others = misfits(entries, reasons)
    if refusal is not None and number in refusal[0]:
        count = f"{part.value} {', '.join(map(str, refusal[0]))}"
        reason = f"{undecided(entries, refusal, count, others)}; next: ckptfix check {draft.path}"
        draft.cannot(part, reason, target=target)
    else:
        draft.cannot(part, others or f"{draft.path} has no file left for it", target=target)

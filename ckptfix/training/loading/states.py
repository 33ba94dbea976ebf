"""Plans for optimizers, schedulers, custom objects, dataloaders, the gradient scaler and random
number generators.
"""

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.entries import Entry, single_entry
from ckptfix.checkpoint.filenames import FileName, parse_file_name, random_states_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.checkpoint.model_files import component_at
from ckptfix.checkpoint.roles import OF_ONE_RANK, Role
from ckptfix.devices.torch_reading import Unreadable, read_pickle
from ckptfix.storage.files import on_disk
from ckptfix.storage.paths import command
from ckptfix.training.loading.assignment import (
    Owners,
    Placement,
    follow,
    hidden_by,
    misfits,
    settle,
    undecided,
    went_elsewhere,
)
from ckptfix.training.loading.checking import (
    class_problem,
    optimizer_problem,
    random_problem,
    scaler_problem,
)
from ckptfix.training.loading.draft import Draft, LoadState, SetRandom, SetSampler, SetStep
from ckptfix.training.loading.load_report import LoadError, Part, Requirement, Status
from ckptfix.training.loading.moments import (
    CarriedMoments,
    Name,
    Named,
    Number,
    as_number,
    carry,
    in_own_order,
    own_names,
    saved_names,
    with_own_options,
)
from ckptfix.training.loading.targets import Target
from ckptfix.training.saving.save_manifest import driven_optimizer
from ckptfix.wording import Brief, count_of, first_few

# Plans of what optimizers, schedulers, custom objects, dataloaders and the gradient scaler get.

Check = Callable[[Any, Entry, Target], str]
"""Returns why a state does not suit a target, "" when it does."""


class SavedStates(Brief, Struct, frozen=True, kw_only=True):
    """The states of a numbered part, read. ``problems``: why an entry cannot be read, "" when it
    can.

    ``reasons``: why an entry does not fit a target. All three are empty where the policy ignores
    the part.

    Of optimizers: ``ordered`` and ``carried`` are the states to load instead of those that are
    saved, by entry and target; ``withheld`` says of a target why it gets nothing, whatever fits it;
    ``remark`` is added to what is said of all others.
    """

    part: Part
    entries: Sequence[Entry]
    targets: Sequence[Target]
    states: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reasons: list[list[str]] = field(default_factory=list)
    ordered: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    carried: Mapping[tuple[int, int], CarriedMoments] = field(default_factory=dict)
    withheld: Mapping[int, str] = field(default_factory=dict)
    remark: str = ""


def read_states(
    draft: Draft, part: Part, root: Path, entries: Sequence[Entry], targets: Sequence[Target],
    check: Check | None = None,
) -> SavedStates:  # fmt: skip
    """Read the states of a part, and hold each against every object."""
    offer = SavedStates(part=part, entries=entries, targets=targets)
    if draft.policy.requirement(part) is Requirement.IGNORE or not targets:
        return offer
    for entry in entries:
        state, problem = _read(draft, root, entry)
        offer.states.append(state)
        offer.problems.append(problem)
        offer.reasons.append(
            [problem or (check(state, entry, target) if check else "") for target in targets]
        )
    return offer


def is_hopeless(draft: Draft, offer: SavedStates) -> bool:
    """Return whether a part that is required lacks a state for some object, wherever the models
    will go.
    """
    if draft.policy.requirement(offer.part) is not Requirement.REQUIRE:
        return False
    fitting = [row for row in offer.reasons if "" in row]
    return len(fitting) < len(offer.targets) or any(
        all(column) for column in zip(*fitting, strict=True)
    )


def by_names(root: Path, offer: SavedStates, named: Named) -> SavedStates:
    """Return what optimizers may get where names tell the order of their parameters. Raises
    OSError.
    """
    ordered: dict[tuple[int, int], Any] = {}
    reasons = [list(row) for row in offer.reasons]
    own = own_names(named) if reasons else {}
    for position, row in enumerate(reasons):
        entry, saved = offer.entries[position], offer.states[position]
        names: Mapping[Number, Name] | None = None
        for number, target in enumerate(offer.targets if not offer.problems[position] else ()):
            optimizer = target.inner
            if class_problem(saved, entry, target) or not isinstance(
                optimizer, torch.optim.Optimizer
            ):
                continue
            names = saved_names(root, entry, saved["param_groups"]) if names is None else names
            state, reason = in_own_order(saved, names, optimizer, own)
            if reason or state is not saved:
                row[number] = reason or optimizer_problem(state, entry, target, is_ordered=True)
                ordered[position, number] = state
    return replace(offer, reasons=reasons, ordered=ordered)


def after_models(
    draft: Draft,
    root: Path,
    offer: SavedStates,
    models: Placement,
    owners: Callable[[], Owners],
) -> SavedStates:
    """Return what optimizers may get once it is known which weights are loaded.

    ``owners`` says which of the models each optimizer has parameters of; it is asked for only where
    some model is not loaded, or in part, or an optimizer fits no file. An optimizer of a model that
    is not loaded gets nothing: its moments belong to other weights. One that has other parameters
    than the run that saved, because the script froze some, gets moments by name.
    """
    if draft.policy.models is Requirement.IGNORE:
        return replace(offer, remark="the policy ignores the model weights")
    in_part = {number for number, found in models.fits.items() if not found.is_in_full}
    lacking = set(range(len(models.targets))) - models.pairs.keys()
    if not offer.reasons or (lacking and draft.policy.models is not Requirement.WARN):
        return offer
    misfit, held = follow(offer.reasons, offer.entries, models, owners)
    unfit = {number for number, column in enumerate(zip(*misfit, strict=True)) if all(column)}
    if not (in_part or lacking or unfit):
        return offer
    held = held or owners()
    names = {
        number: ", ".join(models.name(model) for model in sorted(lacking.intersection(owned)))
        for number, owned in enumerate(held)
    }
    withheld = {number: _withheld(draft, text) for number, text in names.items() if text}
    carried: dict[tuple[int, int], CarriedMoments] = {}
    reasons = [list(row) for row in offer.reasons]
    for number, owned in enumerate(held):
        is_in_part = bool(in_part.intersection(owned))
        if not (is_in_part or number in unfit) or number in withheld:
            continue
        found = {
            position: carry(
                root, offer.states[position], entry, offer.targets[number], models, owned
            )
            for position, entry in enumerate(offer.entries)
            if not offer.problems[position] and (is_in_part or all(misfit[position]))
        }
        if not is_in_part:
            found = {n: one for n, one in found.items() if not isinstance(one, str) and one.count}
        most = max(
            (one.count for one in found.values() if isinstance(one, CarriedMoments)), default=0
        )
        for position, one in found.items():
            if isinstance(one, str):
                reasons[position][number] = f"{one}{_next(draft, offer.part)}"
            elif one.count < most and not one.count:
                reasons[position][number] = "none of its moments match a loaded parameter"
            elif is_in_part or draft.policy.models is Requirement.PARTIAL:
                reasons[position][number] = ""
                carried[position, number] = one
            elif draft.is_required(offer.part):
                reasons[position][number] += (
                    '; next: pass policy=LoadPolicy(models="partial") to load the moments of '
                    f"{count_of(one.count, 'parameter')} by name"
                )
    return replace(offer, reasons=reasons, carried=carried, withheld=withheld)


def _withheld(draft: Draft, models: str) -> str:
    """Say why an optimizer of models that are not loaded gets nothing, and what to pass."""
    reason = (
        f"its moments belong to the weights of {models}, which are not loaded; "
        f'next: pass policy=LoadPolicy(models="partial") to load what matches'
    )
    if draft.policy.optimizers is Requirement.REQUIRE:
        reason += ', or policy=LoadPolicy(models="warn", optimizers="warn") to leave both unchanged'
    return reason


def plan_states(
    draft: Draft,
    root: Path,
    offer: SavedStates,
    before: Placement | None = None,
    owners: Callable[[], Owners] = tuple,
) -> Placement:
    """Add to the draft what every object of a numbered part gets. Modifies nothing. Raises OSError.

    ``before``: where the objects went that these belong to; ``owners`` says which of them each
    holds.
    """
    part, entries, targets = offer.part, offer.entries, offer.targets
    before = before or Placement(part=part)
    if draft.policy.requirement(part) is Requirement.IGNORE:
        for target in targets:
            draft.ignore(part, target)
        return Placement(part=before.part, is_moved=before.is_moved)
    if not targets:
        for entry in entries:
            draft.leave(part, entry.files, "no object of this run is registered for it")
        return Placement(part=part, is_moved=before.is_moved)
    misfit, held = follow(offer.reasons, entries, before, owners)
    settled = settle(root, entries, targets, misfit)
    assignment = settled.assignment
    pairs: dict[int, int] = {}
    for number, target in enumerate(targets):
        position = assignment.pairs.get(number)
        if number in offer.withheld:
            files = () if position is None else entries[position].files
            draft.cannot(part, offer.withheld[number], target=target, files=files)
            continue
        if position is None:
            row = [reasons[number] for reasons in misfit]
            _nothing_for(draft, offer, target, row, assignment.refusal, number)
            continue
        if hidden := hidden_by(entries, position, number, offer.problems):
            draft.cannot(part, hidden, target=target)
            continue
        entry, moved = entries[position], position != number
        pairs[number] = position
        carried = offer.carried.get((position, number))
        status = Status.ADAPTED if moved or carried else Status.RESTORED
        names = ", ".join(before.name(owned) for owned in (held[number] if held else ()))
        reasons = (
            carried.reason if carried else "",
            "moved from another position" + (f", with {names}" if names else "") if moved else "",
            offer.remark,
        )
        saved = offer.ordered.get((position, number), offer.states[position])
        state = carried.state if carried else saved
        if isinstance(target.inner, torch.optim.Optimizer) and part is Part.OPTIMIZERS:
            state = with_own_options(state, target.inner)
        draft.do(
            part,
            LoadState(thing=target.thing, state=state),
            target=target,
            entry=entry,
            status=Status.PARTIAL if carried and carried.fresh else status,
            reason=", ".join(filter(None, reasons)),
            by_position=number in assignment.by_position,
            fresh=carried.fresh if carried else (),
            unused=carried.unused if carried else (),
        )
    for double, original in settled.aside.items():
        reason = f"duplicate of {entries[original].label}"
        draft.leave(part, entries[double].files, reason, is_duplicate=True)
    for number in assignment.left:
        draft.leave(part, entries[number].files, next(iter(misfit[number]), ""))
    return Placement(
        part=part,
        entries=entries,
        targets=targets,
        pairs=pairs,
        aside=settled.aside,
        is_moved=went_elsewhere(entries, targets, pairs, settled.aside)
        or (before.is_moved and len(pairs) < len(targets)),
    )


def tell_of_rates(draft: Draft, optimizers: SavedStates, followers: Sequence[SavedStates]) -> None:
    """Say where a scheduler is loaded and the learning rates of its optimizer are not, or the
    other way round.

    torch computes most rates from those that the param groups have, so a wrong one stays wrong.
    """
    loads = {
        id(action.thing): (place, action.state)
        for place, (_, action) in enumerate(draft.planned)
        if isinstance(action, LoadState)
    }
    things = [target.thing for target in optimizers.targets]
    for part, target in [(offer.part, each) for offer in followers for each in offer.targets]:
        number = driven_optimizer(target.thing, things)
        is_known = isinstance(target.inner, torch.optim.lr_scheduler.LRScheduler)
        if number is None or not is_known:
            continue
        optimizer = optimizers.targets[number]
        own = optimizer.inner.param_groups
        scheduled, loaded = loads.get(id(target.thing)), loads.get(id(optimizer.thing))
        # Where both are loaded, they differed in the run that saved already: of two schedulers of
        # one optimizer, only the second knows its rates.
        if scheduled is not None and loaded is None:
            place, state = scheduled
            rates = [
                (group, "lr", mine.get("lr"), last)
                for group, (mine, last) in enumerate(
                    zip(own, state.get("_last_lr") or (), strict=False)
                )
            ]
            if groups := _unequal(rates, "in the saved schedule"):
                draft.tell(
                    place,
                    f"optimizers {optimizer.index} ({optimizer.what}) keeps the learning rates of "
                    f'this run: {groups}; next: set "lr" of its param groups to '
                    "scheduler.get_last_lr() to continue the saved schedule",
                )
        elif loaded is not None and scheduled is None:
            place, state = loaded
            rates = [
                (group, key, saved.get(key), mine.get(key))
                for group, (saved, mine) in enumerate(zip(state["param_groups"], own, strict=False))
                for key in ("lr", "initial_lr")
            ]
            if groups := _unequal(rates, "before the load"):
                draft.tell(
                    place,
                    f"{part.value} {target.index} ({target.what}) was not loaded, so the learning "
                    f"rates are those of the checkpoint: {groups}; next: set them back to begin "
                    "the schedule of this run",
                )


def _unequal(rates: Iterable[tuple[int, str, Any, Any]], when: str) -> str:
    """List the rates of param groups that differ from another number by more than rounding."""
    numbers = [(group, key, as_number(now), as_number(then)) for group, key, now, then in rates]
    return first_few(
        [
            f"param group {group} has {key} {now:g} ({then:g} {when})"
            for group, key, now, then in numbers
            if now is not None and then is not None and not math.isclose(now, then, rel_tol=1e-6)
        ]
    )


def plan_scaler(draft: Draft, folder: CheckpointFolder, scaler: Any) -> None:
    """Add what the gradient scaler gets, when the run has one."""
    component = component_at(folder, "scaler.pt")
    if scaler is None:
        if component is not None:
            draft.leave(Part.SCALER, ("scaler.pt",), "this run uses no gradient scaler")
        return
    what = type(scaler).__name__
    if draft.policy.scaler is Requirement.IGNORE:
        draft.ignore(Part.SCALER, what=what)
        return
    _plan_file(
        draft, folder, Part.SCALER, "scaler.pt", component,
        lambda state: LoadState(thing=scaler, state=state), what=what,
        check=lambda state: scaler_problem(state, scaler),
    )  # fmt: skip


def plan_dataloaders(draft: Draft, folder: CheckpointFolder, dataloaders: Sequence[Any]) -> None:
    """Add what the samplers and stateful dataloaders get; others save nothing. By position, as
    ``load_state`` does.
    """
    for index, dataloader in enumerate(dataloaders):
        target = Target(index=index, thing=dataloader, inner=dataloader)
        if draft.policy.dataloaders is Requirement.IGNORE:
            if has_sampler(dataloader) or is_stateful(dataloader):
                draft.ignore(Part.DATALOADERS, target)
            continue
        if has_sampler(dataloader):
            _plan_dataloader(draft, folder, Role.SAMPLER, "sampler", target)
        if is_stateful(dataloader):
            _plan_dataloader(draft, folder, Role.DATALOADER, "dl_state_dict", target)
    used = {
        file for report in (*(r for r, _ in draft.planned), *draft.others) for file in report.files
    }
    for component in folder.components:
        if component.role in (Role.SAMPLER, Role.DATALOADER) and str(component.path) not in used:
            draft.leave(
                Part.DATALOADERS,
                (str(component.path),),
                "no dataloader of this run has such a state",
            )


def has_sampler(dataloader: Any) -> bool:
    """Return whether ``save_state`` writes the sampler of a dataloader."""
    from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler

    is_sharded = isinstance(dataloader.dataset, IterableDatasetShard)
    return is_sharded and isinstance(dataloader.get_sampler(), SeedableRandomSampler)


def is_stateful(dataloader: Any) -> bool:
    """Return whether ``save_state`` writes the state of a dataloader."""
    return bool(getattr(dataloader, "use_stateful_dataloader", False))


def _plan_dataloader(
    draft: Draft, folder: CheckpointFolder, role: Role, stem: str, target: Target
) -> None:
    def action(state: Any) -> SetSampler | LoadState:
        if role is Role.SAMPLER:
            return SetSampler(dataloader=target.thing, sampler=state)
        return LoadState(thing=target.thing, state=state)

    name = f"{stem}_{target.index}.bin" if target.index else f"{stem}.bin"
    found = (
        one for one in folder.components if one.role is role and one.name.index == target.index
    )
    _plan_file(draft, folder, Part.DATALOADERS, name, next(found, None), action, target=target)


def _plan_file(
    draft: Draft, folder: CheckpointFolder, part: Part, name: str, component: Component | None,
    action: Callable[[Any], SetSampler | LoadState], *, target: Target | None = None,
    what: str = "", check: Callable[[Any], str] = lambda state: "",
) -> None:  # fmt: skip
    """Add what one object gets from the one file that is its own. ``name``: the file's, also where
    it is missing.
    """
    if component is None:
        draft.cannot(
            part, f"{folder.root / name} is missing", target=target, what=what, missing=True
        )
        return
    entry = single_entry(component)
    state, problem = _read(draft, on_disk(folder.root), entry)
    if reason := problem or check(state):
        draft.cannot(part, reason, target=target, what=what, files=entry.files)
        return
    draft.do(part, action(state), target=target, what=what, entry=entry)


def _read(draft: Draft, root: Path, entry: Entry) -> tuple[Any, str]:
    """Return a state and "", or None and why it cannot be read."""
    try:
        return read_pickle(root, entry.members[0], trust=draft.policy.trust), ""
    except Unreadable as error:
        return None, str(error)


def _nothing_for(
    draft: Draft, offer: SavedStates, target: Target, reasons: Sequence[str],
    refusal: tuple[tuple[int, ...], tuple[int, ...]] | None, number: int,
) -> None:  # fmt: skip
    """Say why an object gets nothing."""
    part, entries = offer.part, offer.entries
    if not entries:
        draft.cannot(
            part,
            f"{draft.path} has no file for it{_next(draft, part)}",
            target=target,
            missing=True,
        )
        return
    others = misfits(entries, reasons)
    if refusal is not None and number in refusal[0]:
        count = f"{part.value} {', '.join(map(str, refusal[0]))}"
        reason = undecided(entries, refusal, count, others)
        advice = _next(draft, part, instead_of=command("check", draft.path))
        draft.cannot(part, f"{reason}{advice}", target=target)
    else:
        reason = others or f"every matching file of {draft.path} goes to another object"
        # The advice about a model that fails leads to another load of its optimizer, too.
        has_advice = "; next: " in reason or draft.has_failed(Part.MODELS)
        draft.cannot(part, reason if has_advice else reason + _next(draft, part), target=target)


def _next(draft: Draft, part: Part, *, instead_of: str = "") -> str:
    """Return what to pass to go on without a part, "" where the policy says so already.
    ``instead_of``: a command that may help more.
    """
    advice = [instead_of] if instead_of else []
    if draft.is_required(part):
        advice.append(f'pass policy=LoadPolicy({part.value}="warn") to leave it unchanged')
    return f"; next: {', or '.join(advice)}" if advice else ""


# Random number generators of this rank, and the step, which is not lost with them.

_DEVICES = ("cuda", "xpu", "hpu", "mlu", "sdaa", "musa", "neuron")
"""Devices on which torch keeps generators; accelerate saves ``torch_<device>_manual_seed``."""


def not_of_a_rank(name: FileName) -> bool:
    """Return whether a file concerns every rank.

    A scan by each of 1,000 ranks must not open 1,000 files of random states.
    """
    return name.role not in OF_ONE_RANK or name.is_of_trainer


def ranks_in(root: Path) -> list[int]:
    """Return the ranks whose random states a folder holds."""
    names = (parse_file_name(name) for name in os.listdir(root))
    found = (name for name in names if name is not None and not name.is_of_trainer)
    return sorted(
        name.rank for name in found if name.rank is not None and name.role is Role.RNG_STATE
    )


def plan_random(
    draft: Draft, root: Path, manifest: Manifest | None, rank: int, world_size: int
) -> None:
    """Add generators and step. The step comes from this rank's file, else from another rank's, or
    the manifest.
    """
    if draft.policy.rng is Requirement.IGNORE and draft.policy.step is Requirement.IGNORE:
        draft.ignore(Part.RNG, what=f"rank {rank}")
        draft.ignore(Part.STEP, what="step")
        return
    ranks = ranks_in(root)
    own = _read_generators(draft, root, rank) if rank in ranks else None
    if draft.policy.rng is Requirement.IGNORE:
        draft.ignore(Part.RNG, what=f"rank {rank}")
    elif own is None:
        have = (
            f"{count_of(len(ranks), 'rank')} saved random states"
            if ranks
            else "no rank saved random states"
        )
        reason = (
            f"{random_states_name(rank)} is missing: {have}, this run has "
            f"{count_of(world_size, 'rank')}"
        )
        draft.cannot(Part.RNG, reason, what=f"rank {rank}", missing=True)
    else:
        _plan_generators(draft, *own, rank)
    if draft.policy.step is Requirement.IGNORE:
        draft.ignore(Part.STEP, what="step")
        return
    for other in sorted(ranks, key=lambda number: (number != rank, number)):
        found = own if other == rank and own is not None else _read_generators(draft, root, other)
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
        draft.cannot(
            Part.STEP, "no readable random_states file contains it", what="step", missing=True
        )


def _read_generators(draft: Draft, root: Path, rank: int) -> tuple[Entry, Any, str]:
    """Return the entry of a rank with its states, or None and why they cannot be read."""
    name = random_states_name(rank)
    component = next(iter(scan_folder(root, name).components), None)
    if component is None:
        raise LoadError(f"{root / name} is a folder, or disappeared during the load; load it again")
    try:
        return single_entry(component), read_pickle(root, component, trust=draft.policy.trust), ""
    except Unreadable as error:
        return single_entry(component), None, str(error)


def current_random() -> dict[str, Any]:
    """Return the states of the generators as ``save_state`` names them, of devices that are in use
    only.
    """
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    for device in _DEVICES:
        module = getattr(torch, device, None)
        if (
            module is not None
            and module.is_available()
            and getattr(module, "is_initialized", bool)()
        ):
            states[f"torch_{device}_manual_seed"] = module.get_rng_state_all()
    return states


def set_random(states: Any) -> str:
    """Set the generators of Python, numpy, torch and its devices. Returns what was left out, in
    words.
    """
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
            left.append(
                f"{device}: states of {count_of(len(saved), 'device')} saved, "
                f"{module.device_count()} available"
            )
            saved = saved[: module.device_count()]
        module.set_rng_state_all(saved)
    if "xm_seed" in states:
        left.append("the seed of torch_xla, which accelerator.load_state restores")
    return ", ".join(left)


def _plan_generators(draft: Draft, entry: Entry, states: Any, problem: str, rank: int) -> None:
    what = f"rank {rank}"
    # As migrate writes it for more processes.
    if isinstance(states, Mapping) and states.keys() == {"step"}:
        reason = (
            f"{random_states_name(rank)} contains only the step, because this rank took no "
            "part in the save"
        )
        draft.cannot(Part.RNG, reason, what=what, missing=True)
        return
    if reason := problem or random_problem(states):
        draft.cannot(Part.RNG, reason, what=what, files=entry.files)
        return
    draft.do(Part.RNG, SetRandom(states=states), what=what, entry=entry)

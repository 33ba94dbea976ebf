"""The proof with a model class: names, what the dispatched model holds, and the runs."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.devices.reload.arrivals import (
    Loaded,
    Tally,
    prove_model,
    remember_loaded,
)
from ckptfix.devices.reload.device_maps import (
    CPU,
    DISK,
    MOST,
    Device,
    DeviceMap,
    Spread,
    device_of,
    is_out_of_memory,
)
from ckptfix.devices.reload.dispatched import (
    MapPlan,
    ModelLost,
    Outputs,
    Trial,
    dispatched,
    map_model,
    places_of,
)
from ckptfix.devices.reload.filling import size_of, tensors_of
from ckptfix.devices.reload.outputs import ANYTHING, in_words, is_empty, nonfinite_places
from ckptfix.devices.reload.reload_report import Accelerators, Outcome, Proof, Proofs, Subject
from ckptfix.devices.reload.three_way import Baseline, Runs, baseline, compare_split
from ckptfix.devices.reload.user_model import Built, Inputs
from ckptfix.devices.torch_devices import device
from ckptfix.diagnosis.values import ADVICE
from ckptfix.hardware import Pair
from ckptfix.wording import count_of, human_size, list_names

_LOADED_FIRST = (
    "loading directly onto devices: verify fills the model on the CPU and then dispatches "
    "it, but from_pretrained(device_map=...) and load_checkpoint_and_dispatch read each "
    "tensor onto its device"
)

_OVERFLOWS = (
    "no weight contains NaN, so the computation produces it: check the inputs, or use "
    "--model to build the model in float32"
)


class ModelProof(Struct, kw_only=True):
    """Proofs of one model: lines of the table, and the runs of the split with P2P copies.

    ``ran``: how often the model ran each way, at most.
    """

    proofs: Proofs = field(default_factory=Proofs)
    runs: Runs = field(default_factory=Runs)
    ran: int = 0


def verify_model(
    built: Built, plan: MapPlan, machine: Accelerators, repeats: int, *,
    hangs: frozenset[Pair], has_nan: bool,
) -> ModelProof:  # fmt: skip
    """Prove what a model holds and computes: on the CPU, on its map, and against one device. Raises
    OSError.

    ``has_nan``: a weight in its file holds NaN.
    """
    proof = ModelProof()
    _prove_names(proof, built)
    in_memory = Tally(subject=Subject.PLACEMENT, what="file bytes -> the model's tensors")
    prove_model(built, built.filled.names, {"": CPU}, in_memory, main=CPU)
    proof.proofs += in_memory.proofs()
    for text in (*built.beyond, _LOADED_FIRST):
        proof.proofs.add(Subject.BEYOND, Outcome.NOT_EXERCISED, text)
    loaded = remember_loaded(built)
    trials = _trials(built, plan, machine)
    single = _one_device(proof, built, trials, machine, has_nan=has_nan)
    if not plan.is_sound:
        text = "the model on its map: the map is not usable"
        proof.proofs.add(Subject.PLACEMENT, Outcome.NOT_EXERCISED, text, is_transfer=True)
    try:
        for trial in trials:
            _on_a_map(proof, built, trial, single, loaded, machine, repeats, hangs)
    except ModelLost as error:
        if not any(one.outcome is Outcome.FAILED for one in proof.proofs):  # which would be why
            text = f"the model could not be read back from its devices: {error}"
            proof.proofs.add(Subject.PLACEMENT, Outcome.FAILED, text, is_transfer=True)
    return proof


def _one_device(
    proof: ModelProof,
    built: Built,
    trials: Sequence[Trial],
    machine: Accelerators,
    *,
    has_nan: bool,
) -> Outputs | None:
    """Return the output on the device where the maps begin, or add why there is none."""
    where = _begin(trials[0].main) if trials else torch.device(CPU)
    reason, outcome, advice = _no_runs(built), Outcome.NOT_EXERCISED, ""
    if not reason:
        single = baseline(built, where, seeks_nan=has_nan)
        if single.problem:
            is_given = isinstance(built.inputs, Inputs) and built.inputs.is_given
            outcome = Outcome.FAILED if is_given else Outcome.NOT_EXERCISED
            whose = "the factory's inputs" if is_given else "inputs generated from its config"
            reason = f"the model fails on {where} with {whose}: {single.problem}"
            reason += (
                f"; NaN first appears in the output of {single.nan_at}" if single.nan_at else ""
            )
            advice = (
                ADVICE["nonfinite"]
                if has_nan
                else "make the factory return inputs that the model accepts"
            )
        elif is_empty(single.output):
            reason = (
                "the forward pass returns no tensor with elements, so there is nothing to compare"
            )
        else:
            _say_unreached(proof, single.unreached)
            _say_nonfinite(proof, single, f"{where} alone", has_nan=has_nan)
            return single.output
    proof.proofs.add(Subject.OUTPUTS, outcome, f"outputs: {reason}", advice=advice)
    if machine.count > 1:
        text = "direct vs. staged copies: the model was not run"
        proof.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
    return None


def _say_unreached(proof: ModelProof, unreached: Sequence[str] | None) -> None:
    """Name the parts of a model that no input reached, as the vision tower of one that got tokens
    alone.
    """
    if unreached is None:
        text = (
            "parts of the model that no input reached: unknown, because its weights were "
            "loaded block by block"
        )
        proof.proofs.add(Subject.BEYOND, Outcome.NOT_EXERCISED, text)
    elif unreached:
        text = (
            f"parts of the model that no input reached: {list_names(unreached)}; next: pass "
            "--model a factory that returns (model, inputs)"
        )
        proof.proofs.add(Subject.BEYOND, Outcome.NOT_EXERCISED, text)


def _say_nonfinite(proof: ModelProof, single: Baseline, where: str, *, has_nan: bool) -> None:
    """Add what NaN and Inf the model computes on one device, and where NaN begins.

    Inf there is no fault of a split, which must only have the same: a model can return -inf for
    what it masks.
    """
    first = f"; NaN first appears in the output of {single.nan_at}" if single.nan_at else ""
    if places := nonfinite_places(single.output, torch.isnan):
        advice = ADVICE["nonfinite"] if has_nan else _OVERFLOWS
        text = f"the output on {where} contains NaN: {places}{first}"
        proof.proofs.add(Subject.OUTPUTS, Outcome.FAILED, text, advice=advice)
    elif has_nan:
        text = f"the output on {where} contains no NaN, although a weight does{first}"
        proof.proofs.add(Subject.OUTPUTS, Outcome.NOTE, text)
    if places := nonfinite_places(single.output, torch.isinf):
        text = f"the output on {where} contains Inf: {places}"
        proof.proofs.add(Subject.OUTPUTS, Outcome.NOTE, text)


def _on_a_map(
    proof: ModelProof, built: Built, trial: Trial, single: Outputs | None, loaded: Loaded,
    machine: Accelerators, repeats: int, hangs: frozenset[Pair],
) -> None:  # fmt: skip
    used = trial.accelerators
    with _room(built, trial) as (folder, needs):
        if folder is None:
            text = (
                f"the model offloaded to disk: not enough space in {tempfile.gettempdir()} "
                f"({human_size(needs)} needed); next: set TMPDIR to a folder with more space"
            )
            proof.proofs.add(
                Subject.DISK_OFFLOAD, Outcome.NOT_EXERCISED, text, is_transfer=bool(used)
            )
            return
        is_there = False
        try:
            with dispatched(built, trial, folder):
                is_there = True
                _prove_placed(proof, built, trial, loaded, machine)
                if single is not None:
                    runs = compare_split(built, trial, single, _begin(trial.main), repeats, hangs)
                    proof.proofs += [_named(one, trial) for one in runs.proofs]
                    proof.runs = runs if len(used) > 1 else proof.runs
                    proof.ran = max(proof.ran, repeats if used else 1)
        except ModelLost:
            raise
        except ANYTHING as error:  # no room on a device, most of all
            what = "cannot be verified on" if is_there else "cannot be placed on"
            text = f"the model {what} {trial}: {in_words(error)}"
            outcome = Outcome.FAILED if trial.is_asked else Outcome.NOT_EXERCISED
            advice = (
                "free memory on that device, or assign less to it with --max-memory"
                if is_out_of_memory(error)
                else ""
            )
            proof.proofs.add(
                Subject.PLACEMENT, outcome, text, is_transfer=bool(used), advice=advice
            )


def _prove_placed(
    proof: ModelProof, built: Built, trial: Trial, loaded: Loaded, machine: Accelerators
) -> None:
    """Compare what is where, and say which transfers this map cannot exercise."""
    used = trial.accelerators
    held = Tally(subject=Subject.PLACEMENT, what=f"file -> {trial} -> host", is_transfer=bool(used))
    prove_model(built, built.filled.names, trial.device_map, held, main=trial.main)
    proof.proofs += held.proofs()
    renamed = Tally(
        subject=Subject.PLACEMENT, what=f"loaded model -> {trial} -> host", is_transfer=bool(used)
    )
    prove_model(built, loaded, trial.device_map, renamed, main=trial.main, loaded=loaded)
    proof.proofs += renamed.proofs()
    if machine.count and not used:
        text = f"transfers to an accelerator: the map places the model only on {trial}"
        proof.proofs.add(Subject.PLACEMENT, Outcome.NOT_EXERCISED, text, is_transfer=True)
    elif machine.count > 1 and len(used) < 2:
        text = f"direct vs. staged copies: the map uses only one accelerator, {trial.main}"
        proof.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)


def _begin(main: Device) -> torch.device:
    return torch.device(CPU) if isinstance(main, str) else device(main)


def _trials(built: Built, plan: MapPlan, machine: Accelerators) -> list[Trial]:
    """Return the maps to try: the user's own, and on a machine with less than two accelerators one
    that offloads.
    """
    if any(value.is_meta for value in tensors_of(built.model).values()):
        # What was not filled cannot be placed; the names that are missing are a failure already.
        return []
    own = _trial(built, plan.device_map, is_asked=True)
    trials = [own] if plan.is_sound and not plan.absent else []
    if machine.count == 0:
        offloads = bool(trials) and DISK in own.places
        return trials if offloads else [_trial(built, {"": DISK}, is_asked=False)]
    if machine.count == 1 and trials and not {CPU, DISK} & own.places:
        split = _trial(built, _half(built), is_asked=False)
        if len(split.places) > 1:
            trials.append(split)
    return trials


def _half(built: Built) -> DeviceMap:
    """Return a map with half of a model in the host's memory; the whole on device 0 where
    accelerate makes none.
    """
    try:
        limits: dict[Device, int] = {0: size_of(built.model) // 2, CPU: MOST}
        return map_model(built.model, built.no_split, Spread.SEQUENTIAL, limits)
    except ANYTHING:
        return {"": 0}


def _trial(built: Built, device_map: DeviceMap, *, is_asked: bool) -> Trial:
    own = {str(name): place for name, place in device_map.items()}
    return Trial(device_map=own, places=places_of(built.model, own), is_asked=is_asked)


def _prove_names(proof: ModelProof, built: Built) -> None:
    filled, kind = built.filled, type(built.model).__name__
    for text in filled.differences:
        proof.proofs.add(Subject.NAMES, Outcome.FAILED, text)
    for one, other in filled.untied:
        text = (
            f"{one!r} and {other!r} are one tensor in {kind} but differ in the file: a loader "
            'that ties them loses one of them; if both are intended, set "tie_word_embeddings": '
            "false in config.json"
        )
        proof.proofs.add(Subject.TIES, Outcome.FAILED, text)
    for text in filled.unproven:
        proof.proofs.add(Subject.PLACEMENT, Outcome.NOT_EXERCISED, text)
    if not filled.differences:
        wider = f"; {len(filled.converted)} kept in another dtype" if filled.converted else ""
        names = len(tensors_of(built.model))
        text = (
            f"keys and shapes: {count_of(names, 'key')} of {kind} filled by "
            f"{count_of(len(built.weights.tensors), 'tensor')}, none missing, none left "
            f"over{wider}"
        )
        proof.proofs.add(Subject.NAMES, Outcome.PROVEN if names else Outcome.NOT_EXERCISED, text)


def _no_runs(built: Built) -> str:
    """Return why the model cannot be run, "" when it can."""
    if built.filled.differences:
        return "the weights do not fill the model"
    return built.inputs if isinstance(built.inputs, str) else ""


def _named(proof: Proof, trial: Trial) -> Proof:
    return replace(proof, text=proof.text.replace("split", f"split over {trial}", 1))


@contextmanager
def _room(built: Built, trial: Trial) -> Iterator[tuple[Path | None, int]]:
    """Yield a folder for what a map sends to the disk, None when there is no room for it, and the
    bytes it takes.

    accelerate maps the files that it writes, and a write beyond the disk ends the process. It
    writes tied tensors once for each name.
    """
    folder = Path(tempfile.mkdtemp(prefix="ckptfix-verify-"))
    try:
        needs = sum(
            value.nbytes
            for name, value in tensors_of(built.model).items()
            if device_of(name, trial.device_map) == DISK
        )
        yield (folder if not needs or shutil.disk_usage(folder).free > needs else None), needs
    finally:
        shutil.rmtree(folder, ignore_errors=True)

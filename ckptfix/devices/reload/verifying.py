"""``verify_reload``: the effects of loading a checkpoint onto a device map, proven as far as this
machine can.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.entries import all_state_dicts, changed_files
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.devices.probe import probe_peer_copies
from ckptfix.devices.probe.probe_report import ProbeReport, Verdict
from ckptfix.devices.reload.arrivals import FileProofs, bytes_on, prove_files
from ckptfix.devices.reload.device_maps import (
    Spread,
    find_accelerators,
    read_device_map,
    read_max_memory,
)
from ckptfix.devices.reload.dispatched import MapPlan, MapRequest, plan_for_model, plan_for_weights
from ckptfix.devices.reload.filling import tensors_of
from ckptfix.devices.reload.modelling import ModelProof, verify_model
from ckptfix.devices.reload.pretrained import LoaderRefuses, NoModel, build_from_config, unfound
from ckptfix.devices.reload.reload_report import (
    Accelerators,
    Outcome,
    PairFacts,
    Proof,
    Proofs,
    ReloadReport,
    Subject,
)
from ckptfix.devices.reload.stored_weights import Weights, find_weights
from ckptfix.devices.reload.three_way import Runs
from ckptfix.devices.reload.user_model import Built, Factory, build_from_factory
from ckptfix.devices.torch_devices import ordered_pairs
from ckptfix.errors import ChangedError, UsageError
from ckptfix.storage.files import on_disk
from ckptfix.storage.paths import command
from ckptfix.wording import count_of, list_names

_BROKEN = (Verdict.WRONG, Verdict.HANG, Verdict.UNUSABLE)
_NEXT = "next: ckptfix doctor --peer-copies"


def pair_facts(
    machine: Accelerators, probe: ProbeReport | None, runs: Runs
) -> tuple[PairFacts, ...]:
    """Return the known facts of every ordered pair of this machine."""
    facts = []
    for pair in ordered_pairs(machine.count):
        report = probe.pairs.get(pair) if probe is not None else None
        facts.append(
            PairFacts(
                pair=pair,
                probe=report.verdict.value if report is not None else None,
                probe_kind=report.kind if report is not None else "",
                probe_detail=str(report) if report is not None else "",
                moves=runs.moves.get(pair, 0),
                alone_runs=runs.alone_runs if pair in runs.alone_wrong else 0,
                alone_wrong=runs.alone_wrong.get(pair, 0),
            )
        )
    return tuple(facts)


def judge_pairs(machine: Accelerators, probe: ProbeReport | None) -> Proofs:
    """Return what the probe says, or that a machine like this one has no pair of accelerators."""
    proofs = Proofs()
    if probe is None:
        text = (
            "copies between accelerators: this machine has only one"
            if machine.count
            else "any device transfer: this machine has no accelerator"
        )
        proofs.add(Subject.PEER_PROBE, Outcome.NOT_EXERCISED, text)
        return proofs
    broken = [report for report in probe.pairs.values() if report.verdict in _BROKEN]
    unsure = [
        report.pair for report in probe.pairs.values() if report.verdict is Verdict.INCONCLUSIVE
    ]
    unsure += [pair for pair in ordered_pairs(machine.count) if pair not in probe.pairs]
    if broken:
        named = "; ".join(str(report) for report in broken)
        proofs.add(Subject.PEER_PROBE, Outcome.FAILED, f"P2P copies in the probe: {named}; {_NEXT}")
    if unsure:
        named = ", ".join(f"{source} -> {destination}" for source, destination in unsure)
        text = f"P2P copies {named}: the probe was inconclusive; {_NEXT} --budget 120"
        proofs.add(Subject.PEER_PROBE, Outcome.NOT_EXERCISED, text)
    if not broken and not unsure:
        many = count_of(len(probe.pairs), "ordered pair")
        text = (
            f"P2P copies: all data that the probe sent over {many} arrived bit for bit (seed "
            f"{probe.seed})"
        )
        proofs.add(Subject.PEER_PROBE, Outcome.PROVEN, text)
    return proofs


def beyond(runs: int, probe: ProbeReport | None) -> list[Proof]:
    """Return the sentence about checks that no machine makes. ``runs``: of the model, each way; 0
    for none.
    """
    if runs:
        text = f"backward passes, other inputs, and more than {count_of(runs, 'run')}"
    elif probe is not None:
        text = f"anything after the {probe.seconds:.0f} s of the probe"
    else:
        return []
    return [Proof(subject=Subject.BEYOND, outcome=Outcome.NOT_EXERCISED, text=text)]


Progress = Callable[[int], None]


class _Collected(Struct, kw_only=True):
    """The contents of a report, as far as they are known."""

    proofs: Proofs = field(default_factory=Proofs)
    device_map: dict[str, str] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    source: str = ""

    def take(self, plan: MapPlan, weights: Weights, sizes: Mapping[str, int]) -> None:
        """Add a plan. ``sizes``: name of a tensor that it places -> bytes; one with several names
        counts at one.
        """
        self.source = plan.source
        self.proofs += [replace(proof, text=weights.prefix + proof.text) for proof in plan.proofs]
        self.device_map.update(
            {weights.prefix + name: str(place) for name, place in plan.device_map.items()}
        )
        placed = {name: plan.devices[name] for name in sizes if name in plan.devices}
        for place, size in bytes_on(placed, sizes).items():
            self.device_bytes[place] = self.device_bytes.get(place, 0) + size


def verify_reload(
    path: str | os.PathLike[str] = ".",
    *,
    device_map: str | os.PathLike[str] | Mapping[str, Any] = "auto",
    max_memory: Mapping[Any, Any] | str | None = None,
    model: str | Factory | None = None,
    repeats: int = 8,
    require_transfer_proof: bool = False,
    progress: Progress | None = None,
) -> ReloadReport:
    """Load a checkpoint onto a device map, and prove what arrives: bytes, names, ties, transfers,
    outputs.

    ``device_map``: "auto", "balanced", "sequential", "balanced_low_0", a map, or the path of a JSON
    file with one. ``max_memory``: as accelerate takes it, or its JSON text. ``model``: a factory or
    "module:factory", which returns a model or (model, inputs); without one, the class that a
    transformers ``config.json`` next to the weights names; its code never comes from the folder.
    ``repeats``: runs of the split model each way. ``require_transfer_proof``: count transfers that
    were not exercised as failed. ``progress`` is called with numbers of bytes read.

    Damage is not looked for (``check`` does); files that cannot be read are failures in the report.
    Raises UsageError for wrong arguments, OperationError and OSError when it cannot finish.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: expected at least 1")
    given = read_device_map(device_map)
    named = given.value if isinstance(given, Spread) else _map_name(device_map)
    request = MapRequest(given=given, source=named, limits=read_max_memory(max_memory))
    if request.limits is not None and not isinstance(given, Spread):
        raise UsageError(
            f"max_memory limits a map that accelerate infers, but {named} is already a map"
        )
    weights, folder = find_weights(path)
    machine = find_accelerators()
    found = _Collected()
    readable = _readable(weights, folder, Path(path), found)
    facts: tuple[PairFacts, ...] = ()
    proof, what = ModelProof(), ""
    if readable:
        built = _built(model, on_disk(folder.root), Path(path), readable, found)
        if built is None and len(readable) > 1 and not isinstance(given, Spread):
            labels = list_names(one.label for one in readable)
            raise UsageError(
                f"{named} maps one model, but there are {len(readable)}; pass the path of "
                f"one: {labels}"
            )
        probe = probe_peer_copies() if machine.count > 1 else None
        read = progress or (lambda count: None)
        if built is None:
            _without_model(readable, request, machine, found, read)
            if machine.count > 1:
                text = "direct vs. staged copies: no model was run"
                found.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
        else:
            proof, what = (
                _with_model(built, request, machine, probe, found, repeats, read),
                built.what,
            )
        facts = pair_facts(machine, probe, proof.runs)
        found.proofs += [*judge_pairs(machine, probe), *beyond(proof.ran, probe)]
        if changed := changed_files(folder.root, [one.entry for one in readable]):
            raise ChangedError(
                f"{folder.root / changed[0]} changed during verification; verify it again"
            )
    used = readable if not what or built is None else [built.weights]
    return ReloadReport(
        path=Path(path),
        machine=machine,
        model=what,
        map_source=found.source or named,
        device_map=found.device_map,
        device_bytes=found.device_bytes,
        tensors=sum(len(one.tensors) for one in used),
        nbytes=sum(one.nbytes for one in used),
        repeats=repeats,
        proofs=tuple(sorted(found.proofs, key=_place_in_table)),
        pairs=facts,
        require_transfer_proof=require_transfer_proof,
        ran=proof.ran,
    )


def _readable(
    weights: Sequence[Weights], folder: CheckpointFolder, path: Path, found: _Collected
) -> list[Weights]:
    """Return the weights whose files can be loaded, and add what the others fail with."""
    whole = []
    for one in weights:
        if problem := one.problem():
            found.proofs.add(Subject.FILE_BYTES, Outcome.FAILED, problem)
        else:
            whole.append(one)
    taken = {one.label for one in weights}  # a folder's other weights: no loader looks for them
    for other in all_state_dicts(folder) if path.is_dir() else ():
        if other.label not in taken and not other.problem:
            found.proofs.add(
                Subject.FILE_BYTES,
                Outcome.NOT_EXERCISED,
                f"{other.label}: pass its path to verify it too",
            )
    for name, kind in folder.subfolders.items():
        if kind != PLAIN_FOLDER and folder.only is None:
            found.proofs.add(
                Subject.FILE_BYTES, Outcome.NOT_EXERCISED, f"{name}: {kind} is not verified"
            )
    return whole


def _built(
    model: str | Factory | None,
    root: Path,
    path: Path,
    weights: Sequence[Weights],
    found: _Collected,
) -> Built | None:
    try:
        if model is not None:
            return build_from_factory(model, weights)
        built = build_from_config(root, weights)
        if path.is_dir() and (why := unfound(root, built.weights.label)):
            found.proofs.add(
                Subject.LOADING, Outcome.FAILED, f"from_pretrained refuses {path}: {why}"
            )
        return built
    except (NoModel, LoaderRefuses) as reason:
        why = str(reason)
        if isinstance(reason, LoaderRefuses):
            found.proofs.add(
                Subject.LOADING, Outcome.FAILED, f"from_pretrained refuses {path}: {reason}"
            )
            why = "from_pretrained cannot build the model"
        next_step = f"; next: {command('verify', path)} --model module:factory"
        found.proofs.add(Subject.NAMES, Outcome.NOT_EXERCISED, f"keys: {why}")
        found.proofs.add(Subject.OUTPUTS, Outcome.NOT_EXERCISED, f"outputs: {why}{next_step}")
        return None


def _without_model(
    weights: Sequence[Weights],
    request: MapRequest,
    machine: Accelerators,
    found: _Collected,
    progress: Progress,
) -> None:
    files = FileProofs()
    for one in weights:
        plan = plan_for_weights(one, request, machine)
        found.take(plan, one, {name: stored.nbytes for name, stored in one.tensors.items()})
        with one:
            placed = plan.devices.__getitem__ if plan.is_sound else None
            prove_files(one, placed, files, progress, accelerators=machine.count)
        if not plan.is_sound and machine.count:
            text = "file -> device -> host: the map is not usable"
            found.proofs.add(Subject.PLACEMENT, Outcome.NOT_EXERCISED, text, is_transfer=True)
    found.proofs += files.proofs()


def _with_model(
    built: Built, request: MapRequest, machine: Accelerators, probe: ProbeReport | None,
    found: _Collected, repeats: int, progress: Progress,
) -> ModelProof:  # fmt: skip
    files = FileProofs()
    with built.weights as weights:
        prove_files(weights, None, files, progress, accelerators=machine.count)
        found.proofs += files.proofs()
        plan = plan_for_model(built, request, machine)
        found.take(plan, weights, _sizes(built))
        hangs = probe.with_verdict(Verdict.HANG) if probe is not None else frozenset()
        has_nan = files.values.has_nan
        proof = verify_model(built, plan, machine, repeats, hangs=hangs, has_nan=has_nan)
    found.proofs += proof.proofs
    return proof


def _sizes(built: Built) -> dict[str, int]:
    """Return name -> bytes of a model's tensors, tied ones at their first name."""
    state = tensors_of(built.model)
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: state[name].nbytes for name in state if first[id(state[name])] == name}


def _place_in_table(proof: Proof) -> tuple[bool, int]:
    return proof.outcome is Outcome.NOT_EXERCISED, list(Subject).index(proof.subject)


def _map_name(device_map: object) -> str:
    return (
        os.fspath(device_map)
        if isinstance(device_map, str | os.PathLike)
        else "the map passed as device_map"
    )

"""What is known of every ordered pair: from the probe, the hops of this checkpoint's tensors, and the runs."""

from ckptfix.runtime.devices.pairs import Pair, ordered_pairs
from ckptfix.runtime.devices.probe import ProbeReport, Verdict
from ckptfix.runtime.devices.reload.placing import Hops
from ckptfix.runtime.devices.reload.report import Machine, Outcome, PairFacts, Proof, Subject
from ckptfix.runtime.devices.reload.running import Runs
from ckptfix.wording import count_of

_BROKEN = (Verdict.WRONG, Verdict.HANG, Verdict.UNUSABLE)
_NEXT = "next: ckptfix doctor --peer-copies"


def untried(probe: ProbeReport | None) -> frozenset[Pair]:
    """Return the pairs over which no tensor is sent: they would hang this process, or cannot be used at all."""
    return frozenset() if probe is None else probe.with_verdict(Verdict.HANG, Verdict.UNUSABLE)


def pair_facts(machine: Machine, probe: ProbeReport | None, hops: Hops, runs: Runs) -> tuple[PairFacts, ...]:
    """Return what is known of every ordered pair of this machine."""
    facts = []
    for pair in ordered_pairs(machine.count):
        report = probe.pairs.get(pair) if probe is not None else None
        facts.append(
            PairFacts(
                pair=pair,
                probe=report.verdict.value if report is not None else None,
                probe_kind=report.kind if report is not None else "",
                probe_detail=str(report) if report is not None else "",
                hops=hops.made[pair],
                hops_wrong=hops.wrong[pair],
                moves=runs.moves.get(pair, 0),
                alone_runs=runs.alone_runs if pair in runs.alone_wrong else 0,
                alone_wrong=runs.alone_wrong.get(pair, 0),
            )
        )
    return tuple(facts)


def judge_pairs(machine: Machine, probe: ProbeReport | None) -> list[Proof]:
    """Return what the probe says, or that a machine like this one has no pair of accelerators."""
    if probe is None:
        text = (
            "copies between accelerators: this machine has one"
            if machine.count
            else "any device transfer: this machine has no accelerator"
        )
        return [_proof(Outcome.NOT_EXERCISED, text)]
    proofs = []
    broken = [report for report in probe.pairs.values() if report.verdict in _BROKEN]
    unsure = [report.pair for report in probe.pairs.values() if report.verdict is Verdict.INCONCLUSIVE]
    unsure += [pair for pair in ordered_pairs(machine.count) if pair not in probe.pairs]
    if broken:
        named = "; ".join(str(report) for report in broken)
        proofs.append(_proof(Outcome.FAILED, f"P2P copies in the probe: {named}; {_NEXT}"))
    if unsure:
        named = ", ".join(f"{source} -> {destination}" for source, destination in unsure)
        text = f"P2P copies {named}: the probe could not decide; {_NEXT} --budget 120"
        proofs.append(_proof(Outcome.NOT_EXERCISED, text))
    if not broken and not unsure:
        many = count_of(len(probe.pairs), "ordered pair")
        text = f"P2P copies: what the probe sent over {many} arrived bit for bit (seed {probe.seed})"
        proofs.append(_proof(Outcome.PROVEN, text))
    return proofs


def beyond(runs: int, probe: ProbeReport | None) -> list[Proof]:
    """Return what no machine exercises. ``runs``: of the model, each way; 0 for none."""
    if runs:
        text = f"backward passes, other inputs, and time beyond {count_of(runs, 'run')}"
    elif probe is not None:
        text = f"time beyond the {probe.seconds:.0f} s of the probe"
    else:
        return []
    return [Proof(subject=Subject.BEYOND, outcome=Outcome.NOT_EXERCISED, text=text)]


def _proof(outcome: Outcome, text: str) -> Proof:
    return Proof(subject=Subject.PEER_PROBE, outcome=outcome, text=text, is_transfer=True)

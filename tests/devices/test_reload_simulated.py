"""Reloads on simulated devices: healthy is exact, every fault gives wrong outputs and is caught by
its pair's name.

The probe is answered "healthy" here, except where a test says otherwise: what is shown is that the
reload itself finds what a probe missed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.reload import dispatched as dispatching
from ckptfix.devices.reload import three_way as running
from ckptfix.devices.reload import verifying
from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import ordered_pairs
from ckptfix.devices.transfers import safe_transfers, staged_pairs
from ckptfix.hardware import Pair
from tests.devices.reload_models import save_tied, save_transformer
from tests.simulated.library import Kind
from tests.simulated.models import THREE, Transformer, gpt2, qwen2, t5
from tests.simulated.simulator import Simulator

pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]

SPLIT = "tests.devices.reload_models:split"
TIED = "tests.devices.reload_models:tied"
DAMAGES: tuple[dict[str, Any], ...] = (
    *(
        {"kind": kind}
        for kind in Kind
        if kind not in (Kind.PAGES, Kind.HANG, Kind.ERROR, Kind.ASSERT)
    ),
    {"kind": "pages", "page": 256},
    {"kind": "zeros", "every": 2},
    {"kind": "zeros", "min_bytes": 1024},
    {"kind": "zeros", "engine": "memcpy"},
    {"kind": "zeros", "dtype": torch.float32},
)


def answering(verdicts: dict[Pair, Verdict] | None = None) -> Any:
    def probe() -> ProbeReport:
        return ProbeReport(
            pairs={
                pair: PairReport(
                    pair=pair, verdict=(verdicts or {}).get(pair, Verdict.HEALTHY), seed=1
                )
                for pair in ordered_pairs()
            },
            seed=1,
        )

    return probe


@pytest.fixture(autouse=True)
def _probe_misses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "probe_peer_copies", answering())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_transformer(tmp_path / "checkpoint")


def proofs(report: ReloadReport, outcome: Outcome) -> dict[Subject, str]:
    return {proof.subject: proof.text for proof in report.proofs if proof.outcome is outcome}


def alone(report: ReloadReport) -> set[Pair]:
    """Return the pairs that changed the output when they alone copied directly."""
    return {facts.pair for facts in report.pairs if facts.alone_wrong}


def verified(folder: Path, **options: Any) -> ReloadReport:
    options = {"model": SPLIT, "device_map": THREE, "repeats": 4, **options}
    report = verify_reload(folder, **options)
    assert staged_pairs() == frozenset(), "staging ends with the runs"
    return report


def test_a_healthy_split_is_exact(simulator: Simulator, folder: Path) -> None:
    report = verified(folder)
    assert report.status == 0, str(report)
    assert report.require_transfer_proof is False
    assert set(proofs(report, Outcome.NOT_EXERCISED)) == {Subject.BEYOND}
    proven = proofs(report, Outcome.PROVEN)
    assert (
        proven[Subject.SPLIT]
        == "direct split over 0, 1, 2 == staged split: 4 runs with 7 copies between "
        "accelerators each, equal in every bit"
    )
    assert proven[Subject.OUTPUTS] == "split over 0, 1, 2 == cuda:0 alone: equal in every bit"
    assert {facts.outcome for facts in report.pairs} == {Outcome.PROVEN}
    assert {facts.pair for facts in report.pairs if facts.moves} >= {
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 0),
    }
    assert verified(folder, require_transfer_proof=True).status == 0


@pytest.mark.parametrize("make", [qwen2, gpt2, t5])
def test_models_of_transformers_are_exact(simulator: Simulator, tmp_path: Path, make: Any) -> None:
    make().save_pretrained(tmp_path / "model")
    report = verified(tmp_path / "model", model=None, device_map="auto")
    assert report.status == 0, str(report)
    assert {"0", "1", "2"} == set(report.device_map.values())
    proven = proofs(report, Outcome.PROVEN)
    assert {Subject.NAMES, Subject.PLACEMENT, Subject.SPLIT, Subject.OUTPUTS} <= set(proven)
    assert (Subject.TIES in proven) == (make is not qwen2)


@pytest.mark.parametrize(
    "damage", DAMAGES, ids=lambda damage: "-".join(str(part) for part in damage.values())
)
def test_every_fault_is_caught_and_its_pair_named(
    simulator: Simulator, folder: Path, damage: dict[str, Any]
) -> None:
    simulator.fault(0, 1, **damage)
    report = verified(folder)
    assert report.status == 1
    failed = proofs(report, Outcome.FAILED)
    assert failed[Subject.SPLIT].startswith("transfer fault: ")
    assert proofs(report, Outcome.PROVEN)[Subject.OUTPUTS].endswith("equal in every bit"), (
        "staged is right"
    )
    assert alone(report) == {(0, 1)}
    assert "wrong when only this pair copies directly: 0 -> 1" in failed[Subject.SPLIT]
    assert {facts.pair for facts in report.pairs if facts.outcome is Outcome.FAILED} == {(0, 1)}


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2), (2, 0)])
def test_each_pair_of_the_forward_pass_is_told_from_the_others(
    simulator: Simulator, folder: Path, pair: Pair
) -> None:
    simulator.fault(*pair, "zeros")
    assert alone(verified(folder)) == {pair}


@pytest.mark.parametrize("make", [qwen2, gpt2, t5])
@pytest.mark.parametrize("kind", ["zeros", "bitflip", "late"])
def test_faults_in_models_of_transformers(
    simulator: Simulator, tmp_path: Path, make: Any, kind: str
) -> None:
    make().save_pretrained(tmp_path / "model")
    simulator.fault(0, 1, kind)
    report = verified(tmp_path / "model", model=None, device_map="auto", repeats=2)
    assert report.status == 1
    assert alone(report) == {(0, 1)}
    assert Subject.OUTPUTS in proofs(report, Outcome.PROVEN)


def test_all_six_pairs_faulty(simulator: Simulator, folder: Path) -> None:
    for pair in ordered_pairs(3):
        simulator.fault(*pair, "zeros")
    report = verified(folder)
    assert alone(report) == {facts.pair for facts in report.pairs if facts.moves}
    assert proofs(report, Outcome.PROVEN)[Subject.OUTPUTS].endswith("equal in every bit"), (
        "staged is right"
    )
    assert proofs(report, Outcome.PROVEN)[Subject.PLACEMENT], "from the host all arrives"


def test_direct_runs_are_direct_where_the_process_stages_already(
    simulator: Simulator, folder: Path
) -> None:
    simulator.fault(0, 1, "zeros")
    with safe_transfers("always"):
        report = verify_reload(folder, model=SPLIT, device_map=THREE, repeats=2)
        assert staged_pairs() == frozenset(ordered_pairs(3))
    failed = proofs(report, Outcome.FAILED)
    assert set(failed) == {Subject.SPLIT}


def test_a_pair_that_hangs_is_never_tried(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "probe_peer_copies", answering({(0, 1): Verdict.HANG}))
    simulator.fault(0, 1, "hang")
    report = verified(folder)
    assert report.status == 1
    assert "0 -> 1 hang" in proofs(report, Outcome.FAILED)[Subject.PEER_PROBE]
    assert "copies 0 -> 1 hang in the probe" in proofs(report, Outcome.NOT_EXERCISED)[Subject.SPLIT]
    assert Subject.OUTPUTS in proofs(report, Outcome.PROVEN), "staged copies never use the pair"


def test_what_the_probe_could_not_decide_is_not_exercised(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "probe_peer_copies", answering({(2, 1): Verdict.INCONCLUSIVE}))
    report = verified(folder)
    assert report.status == 0
    assert (
        "2 -> 1: the probe was inconclusive"
        in proofs(report, Outcome.NOT_EXERCISED)[Subject.PEER_PROBE]
    )
    assert [facts.pair for facts in report.pairs if facts.outcome is Outcome.NOT_EXERCISED] == [
        (2, 1)
    ]
    assert verified(folder, require_transfer_proof=True).status == 1


@pytest.mark.parametrize("kind", ["error", "assert"])
def test_a_copy_that_raises_is_a_transfer_fault(
    simulator: Simulator, folder: Path, kind: str
) -> None:
    simulator.fault(0, 1, kind)
    report = verified(folder)
    assert report.status == 1
    assert "direct run 1 raised" in proofs(report, Outcome.FAILED)[Subject.SPLIT]
    assert Subject.OUTPUTS in proofs(report, Outcome.PROVEN), "the staged runs came before"


def test_tensors_on_another_device_than_the_map_says_are_found(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(model: Any, device_map: Any, **options: Any) -> Any:
        return dispatch(model, {**device_map, "layers.2": 2}, **options)

    dispatch = vars(dispatching)["dispatch_model"]
    monkeypatch.setattr(dispatching, "dispatch_model", elsewhere)
    report = verified(folder)
    assert report.status == 1
    says = proofs(report, Outcome.FAILED)[Subject.PLACEMENT]
    assert (
        "12 of 76 tensors differ: 'layers.2.before.weight': expected on device 1, found on "
        "cuda:2" in says
    )


def test_a_device_without_room_fails_and_leaves_an_answer(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(dispatching, "dispatch_model", full)
    report = verified(folder)
    assert report.status == 1
    assert "cannot be placed on 0, 1, 2" in proofs(report, Outcome.FAILED)[Subject.PLACEMENT]
    assert (
        report.next_steps[0] == "free memory on that device, or assign less to it with --max-memory"
    )


def test_tied_weights_that_a_map_splits_are_refused(simulator: Simulator, tmp_path: Path) -> None:
    folder = save_tied(tmp_path / "checkpoint")
    report = verified(folder, model=TIED, device_map={"embed": 0, "mixer": 1, "lm_head": 2})
    assert report.status == 1
    assert (
        "'embed.weight' is on 0 and 'lm_head.weight' on 2"
        in proofs(report, Outcome.FAILED)[Subject.TIES]
    )
    assert "the map is not usable" in proofs(report, Outcome.NOT_EXERCISED)[Subject.PLACEMENT]
    assert (
        verified(folder, model=TIED, device_map={"embed": 0, "mixer": 1, "lm_head": 0}).status == 0
    )


def test_weights_offloaded_from_a_split_model_are_proven(
    simulator: Simulator, tmp_path: Path
) -> None:
    qwen2().save_pretrained(tmp_path / "model")
    blocks = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 1, "lm_head": "cpu"}
    layers = {
        f"model.layers.{number}": place
        for number, place in enumerate([0, "cpu", 1, "disk", 1, "disk"])
    }
    report = verified(tmp_path / "model", model=None, device_map=blocks | layers)
    assert report.status == 0, str(report)
    assert list(report.device_bytes) == ["0", "1", "cpu", "disk"]
    assert "0, 1, cpu, disk == cuda:0 alone" in proofs(report, Outcome.PROVEN)[Subject.OUTPUTS]


def test_a_map_may_begin_with_another_device(simulator: Simulator, folder: Path) -> None:
    report = verified(folder, device_map={name: (place + 1) % 3 for name, place in THREE.items()})
    assert report.status == 0, str(report)
    report = verified(folder, device_map={name: min(place + 1, 2) for name, place in THREE.items()})
    assert proofs(report, Outcome.PROVEN)[Subject.OUTPUTS].startswith(
        "split over 1, 2 == cuda:1 alone"
    )


def test_a_baseline_that_does_not_fit_comes_block_by_block(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "has_room", lambda where, nbytes: False)
    report = verified(folder)
    assert report.status == 0
    assert proofs(report, Outcome.PROVEN)[Subject.OUTPUTS].endswith(
        "cuda:0 alone: equal in every bit"
    )


def test_a_model_that_draws_other_numbers_each_time_is_no_transfer_fault(
    simulator: Simulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(self: Transformer, input_ids: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return forward(self, input_ids) * (1 + 1e-5 * len(seen))

    seen: list[int] = []
    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", noisy)
    report = verified(folder)
    assert report.status == 0
    assert "non-determinism" in proofs(report, Outcome.NOT_EXERCISED)[Subject.SPLIT]
    assert "non-determinism" in proofs(report, Outcome.TOLERANCE)[Subject.OUTPUTS]
    assert verified(folder, require_transfer_proof=True).status == 1
    simulator.fault(0, 1, "zeros")
    report = verified(folder)
    assert "beyond the noise" in proofs(report, Outcome.FAILED)[Subject.SPLIT]


@pytest.mark.parametrize(
    ("difference", "outcome"), [(1e-6, Outcome.TOLERANCE), (1e-2, Outcome.FAILED)]
)
def test_other_kernels_are_no_transfer_fault(
    simulator: Simulator,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    difference: float,
    outcome: Outcome,
) -> None:
    def otherwise(self: Transformer, input_ids: torch.Tensor) -> torch.Tensor:
        is_split = hasattr(self, "hf_device_map")
        return forward(self, input_ids) * (1 + difference * is_split)

    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", otherwise)
    report = verified(folder)
    assert Subject.SPLIT in proofs(report, Outcome.PROVEN), (
        "direct and staged have the same kernels"
    )
    assert "max |difference|" in proofs(report, outcome)[Subject.OUTPUTS]


def test_a_device_that_is_not_there_is_not_exercised(simulator: Simulator, folder: Path) -> None:
    report = verified(folder, device_map={**THREE, "head": 3}, require_transfer_proof=True)
    assert report.status == 1
    assert (
        "this machine has no device 3, which the map uses: "
        in proofs(report, Outcome.NOT_EXERCISED)[Subject.PLACEMENT]
    )


def test_a_map_on_which_the_model_does_not_run_fails(simulator: Simulator, folder: Path) -> None:
    parts = {"before": 0, "attention": 1, "after": 2, "widen": 1, "narrow": 2}
    inside = {f"layers.0.{part}": place for part, place in parts.items()}
    report = verified(
        folder,
        device_map={**inside, **{name: THREE[name] for name in THREE if name != "layers.0"}},
    )
    assert report.status == 1
    failed = proofs(report, Outcome.FAILED)
    assert "the model does not run on this map" in failed[Subject.OUTPUTS]

"""Every known cause of a run that diverges, in a script that has it; and scripts that have none.

A pair of ranks runs all scripts one after the other. Of the scripts without a fault a run has an
eighth, once each; ``--exhaustive`` has all of them, with 50 seeds.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfix.training.resume_proofs.causes import CAUSES
from ckptfix.training.resume_proofs.resume_verdict import Comparison
from tests import sampling
from tests.training.recorded import Script, comparison, record_on_ranks, record_three
from tests.training.resumed_script import Variant, train

pytestmark = pytest.mark.slow

FAULTY = {
    "augmentation": Variant(augment=True),
    "augmentation-in-workers": Variant(augment=True, workers=1),
    "custom-objects-of-rank-0": Variant(custom="own", save=-1),
    "cut-accumulation": Variant(accumulate=4, save=6),
    "dispatcher-skips-too-few": Variant(dispatch=True),
    "epoch-forgotten-by-skip": Variant(shuffle=True, seedable=True, reseed=True),
    "epoch-not-set": Variant(shuffle=True, seedable=True, save=12),
    "generator-file-missing": Variant(forget="random_states_1.pkl", save=-1),
    "generators-drawn-from": Variant(save=-1, draws=True),
    "generators-drawn-from ": Variant(save=-1, late=True),
    "generators-restored-too-early": Variant(dropout=0.5),
    "gradients-left-over": Variant(gradients="left", two=True, scheduler="none", save=-1),
    "iterable-order": Variant(iterable="own", save=12),
    "loader-not-prepared": Variant(loader="raw", skip="nothing", shuffle=True),
    "model-not-prepared": Variant(target=True, save=-1),
    "not-skipped": Variant(skip="nothing"),
    "nothing-loaded": Variant(loads="model", save=-1),
    "optimizer-not-prepared": Variant(optimizer="raw", scheduler="none", save=-1),
    "order-not-saved": Variant(shuffle=True, save=12),
    "order-not-saved ": Variant(shuffle=True, save=-1),
    "other-length": Variant(save=-1, epochs_more=1),
    "other-number-skipped": Variant(skip="more"),
    "parameter-order": Variant(order="turned", save=-1),
    "scheduler-not-prepared": Variant(scheduler="raw", save=-1),
    "scheduler-of-rank-0": Variant(schedule="plateau", local=True, save=-1),
    "stateful-order": Variant(stateful=True, skip="nothing", shuffle=True, save=12),
    "stateful-repeats-epoch": Variant(stateful=True, skip="nothing", shuffle=True, save=8),
    "stateful-workers": Variant(stateful=True, skip="nothing", shuffle=True, workers=1, save=12),
    "transient-buffer": Variant(transient=True, save=-1),
}
"""Code of a cause -> a script that has it."""

HEALTHY = {
    "plain": Variant(save=-1),
    "gradients of two optimizers, zeroed before each backward": Variant(
        save=-1, two=True, gradients="in turn", scheduler="none"
    ),
    "dropout": Variant(save=-1, dropout=0.3),
    "augmentation between epochs": Variant(save=-1, augment=True),
    "seeded at every step": Variant(reseed=True, dropout=0.3),
    "batches skipped by continue": Variant(reseed=True, skip="continue"),
    "shuffled by the epoch": Variant(save=-2, shuffle=True, seedable=True, set_epoch=True),
    "shuffled by the epoch, cut": Variant(
        save=12, shuffle=True, seedable=True, set_epoch=True, reseed=True
    ),
    "accumulation": Variant(save=-1, accumulate=4),
    "sgd": Variant(save=-1, kind="sgd"),
    "adagrad": Variant(save=-1, kind="adagrad"),
    "two optimizers": Variant(save=-1, two=True),
    "two optimizers in turns": Variant(save=-1, two=True, turns=True),
    "cosine": Variant(save=-1, schedule="cosine"),
    "one cycle": Variant(save=-1, schedule="cycle"),
    "warm restarts": Variant(save=-1, schedule="warm"),
    "sequence of schedules": Variant(save=-1, schedule="sequence"),
    "compiled": Variant(save=-1, compiled=True, dropout=0.3),
    "plateau": Variant(save=-1, schedule="plateau"),
    "no scheduler": Variant(save=-1, scheduler="none"),
    "custom object": Variant(save=-1, custom="same"),
    "scaler": Variant(save=-1, scaler=True),
    "batch norm": Variant(save=-1, normalize=True),
    "clipping": Variant(save=-1, clip=True),
    "evaluation": Variant(evaluate=True, reseed=True),
    "evaluation between epochs": Variant(save=-1, evaluate=True, dropout=0.3),
    "gradients of zeros": Variant(save=-1, zeros=True),
    "loss.backward": Variant(save=-1, direct=True),
    "bf16": Variant(save=-1, bf16=True),
    "python and numpy not seeded": Variant(save=-1, seeds=False),
    "workers": Variant(save=-1, workers=1),
    "dispatcher": Variant(save=-1, dispatch=True),
    "stream": Variant(save=-1, iterable="plain"),
    "stateful": Variant(stateful=True, skip="nothing", reseed=True),
}
REPEATS = 50 if sampling.is_exhaustive() else 1
HAS_STATEFUL = importlib.util.find_spec("torchdata") is not None


def scripts(variants: Mapping[str, Variant]) -> dict[str, Script]:
    def as_script(variant: Variant) -> Script:
        return lambda folder, resume: train(variant, folder, resume=resume)

    return {
        name: as_script(variant)
        for name, variant in variants.items()
        if HAS_STATEFUL or not variant.stateful
    }


def seeded() -> dict[str, Variant]:
    return {
        f"{name} {number}": replace(variant, seed=number)
        for name, variant in sampling.sampled(HEALTHY.items())
        for number in range(REPEATS)
    }


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    record_on_ranks(scripts(FAULTY), folder, 2)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    record_on_ranks(scripts(seeded()), folder, 2, patience=300.0 * REPEATS)
    return folder


@pytest.mark.parametrize("name", FAULTY)
def test_a_script_with_a_fault_is_caught_and_its_cause_named(name: str, faulty: Path) -> None:
    if not (faulty / name).exists():
        pytest.skip("torchdata is not installed")
    found = comparison(faulty / name)
    assert found.control is None
    assert all(one.words for one in found.differences)
    assert name.strip() in {one.cause.code for one in found.differences if one.cause}
    assert (
        False in {agrees for strip in found.strips.values() for agrees in strip}
        or name == "other-length"
    )


@pytest.mark.parametrize("name", seeded())
def test_a_script_without_a_fault_is_exact(name: str, healthy: Path) -> None:
    if not (healthy / name).exists():
        pytest.skip("torchdata is not installed")
    found = comparison(healthy / name)
    assert (found.control, found.differences) == (None, ())
    assert {"loss", "batch", "weights", "gradients", "generators", "moments"} - set(found.strips) <= {
        "loss" if "loss.backward" in name else "", "generators", "moments"
    }  # fmt: skip
    assert len(found.steps) >= 4


RESTORED = {cause.code for cause in CAUSES if cause.is_restored}
GUARDED = dict(
    sampling.sampled([(name, one) for name, one in FAULTY.items() if name.strip() in RESTORED])
)


@pytest.fixture(scope="module")
def under_guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    record_on_ranks(scripts(GUARDED), folder, 2, guard=True)
    return folder


@pytest.mark.parametrize("name", GUARDED)
def test_the_guard_makes_a_script_exact_whose_fault_it_restores(
    name: str, under_guard: Path
) -> None:
    if not (under_guard / name).exists():
        pytest.skip("torchdata is not installed")
    found = comparison(under_guard / name)
    assert (found.control, found.differences) == (None, ())


def test_a_script_that_no_seed_repeats_is_not_blamed_on_its_resume(tmp_path: Path) -> None:
    record_on_ranks(scripts({"unsteady": Variant(unsteady=True, seeds=False, save=4)}), tmp_path, 1)
    found = comparison(tmp_path / "unsteady")
    assert found.control is not None
    assert (found.control.step, found.differences) == (1, ())


TRAINER = {
    "exact": {},
    "exact with accumulation": {"accumulate": 2, "steps": 13},
    "augmentation": {"augment": True},
    "augmentation-in-workers": {"augment": True, "workers": 1},
    "iterable-order": {"stream": "sized", "save": 20},
    "order-not-saved": {"seedable": False, "save": 20},
    "parameter-order": {"turned": True},
    "data-not-skipped-by-trainer": {"ignore_skip": True},
    "generator-file-missing": {"forget": "rng_state.pth"},
    "optimizer-file-missing": {"forget": "optimizer.pt"},
    "scheduler-file-missing": {"forget": "scheduler.pt"},
}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def trained(name: str, folder: Path) -> Comparison:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.training import resumed_trainer

    variant = resumed_trainer.TrainerVariant(**TRAINER[name])  # type: ignore[arg-type]
    record_three(lambda place, resume: resumed_trainer.train(variant, place), folder)
    return comparison(folder)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", TRAINER)
def test_trainer(name: str, tmp_path: Path) -> None:
    found = trained(name, tmp_path)
    assert found.control is None
    codes = {one.cause.code for one in found.differences if one.cause}
    assert (not codes and not found.differences) if name.startswith("exact") else name in codes
    restored = {
        one.is_restored for one in found.differences if one.cause and one.cause.code == name
    }
    assert restored == ({name in RESTORED} if codes else set())


@pytest.mark.usefixtures("one_process", "guarded")
@pytest.mark.parametrize("name", [name for name in TRAINER if name in RESTORED])
def test_the_guard_makes_a_trainer_exact_whose_fault_it_restores(name: str, tmp_path: Path) -> None:
    found = trained(name, tmp_path)
    assert (found.control, found.differences) == (None, ())


@pytest.mark.usefixtures("one_process", "guarded")
def test_a_trainer_that_cannot_find_its_place_in_a_stream_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRAINER, "unsized", {"stream": "unsized", "save": 20})
    with pytest.warns(
        UserWarning,
        match="skips to batch 21, but .* with transformers' Trainer, give Stream a __len__",
    ):
        found = trained("unsized", tmp_path)
    assert found.differences


def test_every_cause_that_can_be_had_on_two_processes_has_a_script() -> None:
    # A race, FSDP, a part of nothing-loaded, a folder with several checkpoints, and a loss alone.
    rare = {
        "stateful-one-file", "scaler-stepped", "generators-not-loaded", "other-checkpoint",
        "state-in-no-checkpoint",
    }  # fmt: skip
    assert {cause.code for cause in CAUSES} - {name.strip() for name in (*FAULTY, *TRAINER)} == rare


def test_a_large_tensor_is_compared_by_blocks_and_the_sum_of_its_bits() -> None:
    import torch

    from ckptfix.training.resume_proofs.recorded_values import sampled_digest as _sampled

    large = torch.arange(1 << 20, dtype=torch.float32)
    known = _sampled(large, 1 << 16)
    assert _sampled(large.clone(), 1 << 16) == known
    for place in (0, 777_777, (1 << 20) - 1):
        other = large.clone()
        other[place] += 1
        assert _sampled(other, 1 << 16) != known, place
    assert _sampled(large.to(torch.bfloat16)[1:], 1 << 16) != known, (
        "a view with an odd offset can be read"
    )

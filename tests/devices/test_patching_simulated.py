"""The patch of accelerate's own dispatch, on simulated devices: code that knows nothing of ckptfix
is covered.
"""

import gc
import warnings
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import accelerate
import accelerate.big_modeling
import pytest
import torch
from accelerate import dispatch_model as imported_before

from ckptfix.devices import dispatching, probe, transfers
from ckptfix.devices.dispatching import remove_safe_transfers
from ckptfix.devices.transfers import staged_pairs
from ckptfix.errors import UsageError
from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate
from tests.simulated.models import THREE, generated, logits_of, qwen2, t5, transformer
from tests.simulated.simulator import Simulator

pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]

ALL = frozenset(permutations(range(3), 2))


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> Iterator[None]:
    """ "auto" finds all six links broken, as they are."""
    before = vars(accelerate.big_modeling).copy()
    monkeypatch.delenv(transfers.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "unproven_pairs", lambda budget: ALL)
    transfers._told.update({ALL})  # said elsewhere
    yield
    unpatch_accelerate()
    assert vars(accelerate.big_modeling) == before
    gc.collect()
    assert staged_pairs() == frozenset()


def break_links(simulator: Simulator) -> None:
    for pair in ALL:
        simulator.fault(*pair, "zeros")


def on_one_device(model: Any) -> Any:
    return accelerate.dispatch_model(model, {"": 0}, force_hooks=True)


@pytest.mark.parametrize("model_class", ["Qwen2ForCausalLM", "T5ForConditionalGeneration"])
def test_from_pretrained_is_covered(simulator: Simulator, tmp_path: Path, model_class: str) -> None:
    import transformers

    make = qwen2 if model_class.startswith("Qwen2") else t5
    right = generated(on_one_device(make())), generated(on_one_device(make()), num_beams=3)
    make().save_pretrained(tmp_path)
    break_links(simulator)
    patch_accelerate()
    model = getattr(transformers, model_class).from_pretrained(tmp_path, device_map="auto").eval()
    assert set(model.hf_device_map.values()) == {0, 1, 2}
    assert staged_pairs() == ALL
    assert torch.equal(generated(model), right[0])
    assert torch.equal(generated(model, num_beams=3), right[1])
    assert simulator.count() == 0
    remove_safe_transfers(model)
    assert staged_pairs() == frozenset()


def test_whatever_name_the_function_was_imported_under(simulator: Simulator) -> None:
    right = logits_of(on_one_device(transformer()))
    break_links(simulator)
    patch_accelerate(safe_transfers="auto")
    model = imported_before(transformer(), dict(THREE))
    assert torch.equal(logits_of(model), right)
    assert simulator.count() == 0


def test_it_is_taken_back_and_models_keep_what_they_hold(simulator: Simulator) -> None:
    patch_accelerate(safe_transfers="always")
    patch_accelerate(safe_transfers="auto")
    model = imported_before(transformer(), dict(THREE))
    unpatch_accelerate()
    assert staged_pairs() == ALL
    logits_of(model)
    assert simulator.count() == 0
    del model
    gc.collect()
    imported_before(transformer(), dict(THREE))
    assert staged_pairs() == frozenset()


def test_one_accelerator_and_offloading_alone_ask_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(budget: float) -> frozenset[Any]:
        raise AssertionError("it measured")

    monkeypatch.setattr(probe, "unproven_pairs", fail)
    patch_accelerate()
    imported_before(transformer(), {"": 1}, force_hooks=True)
    imported_before(transformer(), {"embed": 2, "layers": 2, "norm": "cpu", "head": 2})
    accelerate.cpu_offload(transformer(), execution_device=torch.device("cuda:0"))
    accelerate.disk_offload(
        transformer(), str(tmp_path / "offload"), execution_device=torch.device("cuda:0")
    )
    assert staged_pairs() == frozenset()


@pytest.mark.parametrize(
    ("said", "staged"), [("always", ALL), ("never", frozenset()), ("auto", ALL)]
)
def test_the_environment_says_what_auto_means(
    monkeypatch: pytest.MonkeyPatch, said: str, staged: frozenset[Any]
) -> None:
    monkeypatch.setenv("CKPTFIX_SAFE_TRANSFERS", said)
    patch_accelerate()
    model = imported_before(transformer(), dict(THREE))
    assert staged_pairs() == staged
    del model


def test_never_is_for_the_patch_alone() -> None:
    patch_accelerate(safe_transfers="never")
    model = imported_before(transformer(), dict(THREE))
    assert staged_pairs() == frozenset()
    model = dispatching.dispatch_model(model, THREE, safe_transfers="always")
    assert staged_pairs() == ALL
    patch_accelerate(safe_transfers="always")
    dispatching.dispatch_model(model, THREE, safe_transfers="never")
    assert staged_pairs() == frozenset(), "the call says more than the patch"


def test_what_the_user_asked_for_stays_when_a_library_dispatches_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "unproven_pairs", lambda budget: frozenset())
    patch_accelerate(safe_transfers="auto")
    model = dispatching.dispatch_model(transformer(), THREE, safe_transfers="always")
    for mode in ("auto", "always", "never"):
        patch_accelerate(safe_transfers=mode)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "safe transfers stay on")
            imported_before(model, dict(THREE))
        assert staged_pairs() == ALL
    remove_safe_transfers(model)
    assert staged_pairs() == frozenset()
    patch_accelerate(safe_transfers="always")
    imported_before(model, dict(THREE))
    patch_accelerate(safe_transfers="auto")
    imported_before(model, dict(THREE))
    assert staged_pairs() == frozenset(), "what the patch gave it, the patch may take away"


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_a_model_that_is_moved_as_a_whole(simulator: Simulator, mode: str) -> None:
    """It gets no hooks: its weights went directly."""
    model = transformer().to("cuda:0")
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    break_links(simulator)
    patch_accelerate(safe_transfers=mode)
    imported_before(model, {"": 1})
    assert all(
        torch.equal(tensor.cpu(), weights[name]) for name, tensor in model.state_dict().items()
    )
    assert {tensor.device.index for tensor in model.parameters()} == {1}
    assert simulator.count() == 0
    assert staged_pairs() == ALL
    remove_safe_transfers(model)
    with pytest.raises(ValueError, match="norm"):
        imported_before(transformer().to("cuda:0"), {"embed": 1, "layers": 1})
    assert staged_pairs() == frozenset()


def test_a_wrong_word_patches_nothing() -> None:
    before = accelerate.Accelerator.prepare
    with pytest.raises(UsageError, match="'sometimes'"):
        patch_accelerate(safe_transfers="sometimes")
    assert accelerate.Accelerator.prepare is before
    imported_before(transformer(), dict(THREE))
    assert staged_pairs() == frozenset()


def test_what_others_patched_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_accelerate()
    ours = accelerate.big_modeling.attach_align_device_hook_on_blocks
    seen = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ours(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(accelerate.big_modeling, "attach_align_device_hook_on_blocks", theirs)
        unpatch_accelerate()
        imported_before(transformer(), dict(THREE))
        assert seen == [1]
        assert staged_pairs() == frozenset()
        assert accelerate.big_modeling.attach_align_device_hook_on_blocks is theirs
    accelerate.big_modeling.attach_align_device_hook_on_blocks = ours.__wrapped__

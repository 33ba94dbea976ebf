"""Models split over simulated devices by accelerate: exact when healthy, wrong where a link is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    Accelerator,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.utils import get_max_memory

from tests.simulated.library import Kind
from tests.simulated.models import (
    THREE,
    Transformer,
    balanced_map,
    generated,
    gpt2,
    gradients_of,
    logits_of,
    qwen2,
    t5,
    transformer,
)
from tests.simulated.simulator import Simulator

pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]

TRANSFORMERS = pytest.mark.parametrize("make", [qwen2, gpt2, t5])
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


def on_one_device(make: Callable[[], Any]) -> Any:
    """The baseline: one device and the same hooks, so that the same kernels run."""
    return dispatch_model(make(), {"": 0}, force_hooks=True)


def split(make: Callable[[], Any] = transformer, device_map: Any = None) -> Any:
    return dispatch_model(make(), device_map or THREE)


def differing(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> set[str]:
    assert found.keys() == right.keys()
    return {name for name, value in found.items() if not torch.equal(value, right[name])}


def test_accelerate_sees_the_memory_of_each_device(simulator: Simulator) -> None:
    memory = get_max_memory()
    assert set(memory) == {0, 1, 2, "cpu"}
    assert all((8 << 30) - 4096 < memory[device] <= 8 << 30 for device in range(3))


def test_accelerator_takes_a_device(simulator: Simulator) -> None:
    prepared = Accelerator().prepare(transformer())
    assert {str(parameter.device) for parameter in prepared.parameters()} == {"cuda:0"}


@pytest.mark.parametrize("spelt", [int, "cuda:{}".format], ids=["int", "str"])
def test_a_split_model_equals_one_device(simulator: Simulator, spelt: Callable[[int], Any]) -> None:
    logits, gradients = gradients_of(on_one_device(transformer))
    assert simulator.count() == 0
    model = split(device_map={name: spelt(device) for name, device in THREE.items()})
    assert {str(parameter.device) for parameter in model.parameters()} == {
        "cuda:0",
        "cuda:1",
        "cuda:2",
    }
    assert simulator.count() == 0, "placed from the host"
    split_logits, split_gradients = gradients_of(model)
    assert simulator.count(0, 1) > 0
    assert simulator.count(1, 0) > 0
    assert torch.equal(split_logits, logits)
    assert not differing(split_gradients, gradients)


def test_a_checkpoint_is_dispatched_over_all_devices(simulator: Simulator, tmp_path: Path) -> None:
    torch.save(transformer().state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        empty = Transformer().eval()
    model = load_checkpoint_and_dispatch(
        empty, str(tmp_path), device_map="auto", no_split_module_classes=["Block"]
    )
    assert set(model.hf_device_map.values()) == {0, 1, 2}
    assert torch.equal(logits_of(model), logits_of(on_one_device(transformer)))


@pytest.mark.parametrize("fault", DAMAGES, ids=lambda fault: "-".join(map(str, fault.values())))
def test_every_damage_changes_the_logits(simulator: Simulator, fault: dict[str, Any]) -> None:
    model = split()
    with torch.no_grad():
        right = logits_of(model).cpu()
        simulator.fault(0, 1, **fault)
        wrong = logits_of(model).cpu()
        hit = {
            pair for pair, copies in simulator.log().items() if any(copy.fault for copy in copies)
        }
        simulator.clear()
        assert torch.equal(logits_of(model).cpu(), right)
    assert not torch.equal(wrong, right)
    assert hit == {(0, 1)}


def test_a_fault_on_the_way_back_spares_the_logits_and_spoils_gradients(
    simulator: Simulator,
) -> None:
    model = split()
    logits, gradients = gradients_of(model)
    simulator.fault(1, 0, "bitflip")
    same_logits, wrong = gradients_of(model)
    assert torch.equal(same_logits, logits)
    spoilt = differing(wrong, gradients)
    assert spoilt
    assert {
        THREE[next(module for module in THREE if name.startswith(f"{module}."))] for name in spoilt
    } == {0}


def test_a_fault_elsewhere_changes_nothing(simulator: Simulator) -> None:
    right, _ = gradients_of(
        split(device_map={name: 1 - device % 2 for name, device in THREE.items()})
    )
    simulator.fault(0, 2, "zeros")
    simulator.fault(2, 1, "zeros")
    found, _ = gradients_of(
        split(device_map={name: 1 - device % 2 for name, device in THREE.items()})
    )
    assert torch.equal(found, right)


@TRANSFORMERS
def test_transformers_split_equals_one_device(
    simulator: Simulator, make: Callable[[], Any]
) -> None:
    baseline = on_one_device(make)
    logits, gradients = gradients_of(baseline)
    model = split(make, balanced_map(make()))
    assert set(model.hf_device_map.values()) == {0, 1, 2}
    split_logits, split_gradients = gradients_of(model)
    assert torch.equal(split_logits, logits)
    if make is t5:
        # Each decoder block moves the encoder's output for itself, so its keys' and values'
        # gradients are summed before the blocks' are; on one device all six are summed one by one.
        # The same numbers, in another order.
        torch.testing.assert_close(split_gradients, gradients)
        # The tied weight is used on three devices, whose threads of the backward pass add to its
        # gradient in the order in which they finish; every other gradient is the same again each
        # time.
        assert differing(gradients_of(model)[1], split_gradients) <= {"shared.weight"}
        with torch.autograd.set_multithreading_enabled(False):  # one thread adds in one order
            assert not differing(gradients_of(model)[1], gradients_of(model)[1])
    else:
        assert not differing(split_gradients, gradients)
    assert torch.equal(generated(model), generated(baseline))
    assert torch.equal(generated(model, num_beams=2), generated(baseline, num_beams=2))


@TRANSFORMERS
def test_transformers_generate_wrongly_over_a_broken_link(
    simulator: Simulator, make: Callable[[], Any]
) -> None:
    model = split(make, balanced_map(make()))
    right = generated(model)
    simulator.fault(0, 1, "zeros", dtype=torch.float32)
    assert not torch.equal(generated(model), right)


def test_from_pretrained_places_on_all_devices(simulator: Simulator, tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    qwen2().save_pretrained(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path, device_map="auto").eval()
    assert set(model.hf_device_map.values()) == {0, 1, 2}
    assert torch.equal(generated(model), generated(on_one_device(qwen2)))

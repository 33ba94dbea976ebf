"""A torch that hands out no kernels, on simulated devices: accelerate's own moves are staged, the
rest is named.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from ckptfix.devices import interception, probe, transfers
from ckptfix.devices.dispatching import dispatch_model, remove_safe_transfers
from ckptfix.devices.routing import bypassed
from ckptfix.devices.transfers import acquire, safe_transfers, staged_pairs
from tests.simulated.models import (
    THREE,
    balanced_map,
    generated,
    gpt2,
    gradients_of,
    logits_of,
    qwen2,
    transformer,
)
from tests.simulated.simulator import Simulator

pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]

ALL = frozenset(permutations(range(3), 2))


@pytest.fixture(autouse=True)
def older_torch(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> Iterator[None]:
    monkeypatch.delattr(torch.library, "get_kernel")
    monkeypatch.delenv(transfers.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "cached_report", lambda: None)
    monkeypatch.setattr(probe, "unproven_pairs", lambda budget: ALL)
    monkeypatch.setattr(transfers, "_told", {ALL, interception.NOT_COVERED_BY_FALLBACK})
    before = {
        name: getattr(accelerate.hooks, name)
        for name in ("send_to_device", "set_module_tensor_to_device")
    }
    yield
    assert staged_pairs() == frozenset()
    assert before == {name: getattr(accelerate.hooks, name) for name in before}


def break_links(simulator: Simulator, *pairs: tuple[int, int]) -> None:
    for pair in pairs or ALL:
        simulator.fault(*pair, "zeros")


def on_one_device(model: Any) -> Any:
    return accelerate.dispatch_model(model, {"": 0}, force_hooks=True)


@pytest.mark.parametrize("make", [transformer, qwen2, gpt2])
def test_forward_and_backward_of_a_dispatched_model(simulator: Simulator, make: Any) -> None:
    logits, gradients = gradients_of(on_one_device(make()))
    simulator.clear_log()
    break_links(simulator)
    counted = acquire("never", holder="a test")
    model = dispatch_model(make(), THREE if make is transformer else balanced_map(make()))
    found_logits, found = gradients_of(model)
    assert torch.equal(found_logits, logits)
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert simulator.count() == 0
    assert counted.counters()[0, 1].staged > 0
    remove_safe_transfers(model)


@pytest.mark.parametrize("broken", [(0, 1), (1, 0)])
def test_a_gradient_comes_back_the_way_its_tensor_went(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, broken: tuple[int, int]
) -> None:
    _, gradients = gradients_of(on_one_device(transformer()))
    break_links(simulator, broken)
    monkeypatch.setattr(probe, "unproven_pairs", lambda budget: frozenset({broken}))
    monkeypatch.setattr(transfers, "warn_caller", lambda message: None)
    model = dispatch_model(transformer(), THREE)
    found = gradients_of(model)[1]
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert simulator.count(*broken) == 0
    assert simulator.count(1, 2) > 0
    remove_safe_transfers(model)


def test_weights_of_a_model_that_is_on_a_device_already(simulator: Simulator) -> None:
    model = gpt2().to("cuda:1")
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    break_links(simulator)
    dispatch_model(model, balanced_map(gpt2()))
    assert all(
        torch.equal(tensor.cpu(), weights[name]) for name, tensor in model.state_dict().items()
    )
    assert model.lm_head.weight is model.transformer.wte.weight, "still tied"
    assert simulator.count() == 0
    remove_safe_transfers(model)


def test_structures_that_hold_tensors(simulator: Simulator) -> None:
    from transformers import BatchEncoding

    break_links(simulator)
    here = torch.arange(3, device="cuda:0")
    given = {
        "list": [here, (here, 1)],
        "text": "words",
        "skip": here,
        "batch": BatchEncoding({"ids": here}),
    }
    with safe_transfers("always"):
        there = accelerate.hooks.send_to_device(given, 1, skip_keys={"skip"})
        assert there["skip"] is here
        assert there["text"] == "words"
        moved = (there["list"][0], there["list"][1][0], there["batch"]["ids"])
        assert all(
            str(tensor.device) == "cuda:1" and tensor.tolist() == [0, 1, 2] for tensor in moved
        )
        assert accelerate.hooks.send_to_device(here, 0) is here
        with bypassed():
            assert accelerate.hooks.send_to_device(here, "cuda:1").tolist() == [0, 0, 0]


def test_hooks_that_are_added_later(simulator: Simulator) -> None:
    break_links(simulator)
    model = dispatch_model(transformer(), THREE)
    add_hook_to_module(model.embed, AlignDevicesHook(execution_device=0, io_same_device=True))
    with torch.no_grad():
        logits_of(model)
    assert simulator.count() == 0
    remove_safe_transfers(model)


def test_what_is_not_covered_is_said_and_so(simulator: Simulator) -> None:
    class Moves(nn.Module):  # type: ignore[misc]
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given.to("cuda:1")

    with safe_transfers("always") as held:
        assert held.not_covered == interception.NOT_COVERED_BY_FALLBACK
        assert any(".to(device) in a model's code" in words for words in held.not_covered)
        Moves()(torch.ones(2, device="cuda:0"))
    assert simulator.count() == 1


def test_generate(simulator: Simulator) -> None:
    right = generated(on_one_device(qwen2()))
    break_links(simulator)
    model = dispatch_model(qwen2(), balanced_map(qwen2()))
    assert torch.equal(generated(model), right)
    remove_safe_transfers(model)


def test_it_leaves_in_place_what_others_put_there_since(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    with monkeypatch.context() as patch:
        with safe_transfers("always"):
            patch.setattr(accelerate.hooks, "send_to_device", theirs)
        assert accelerate.hooks.send_to_device is theirs
        # What it replaced is ours, and asks nobody any more.
    ours = accelerate.hooks.send_to_device
    assert torch.equal(ours(torch.ones(2, device="cuda:0"), 1).cpu(), torch.ones(2))
    accelerate.hooks.send_to_device = accelerate.utils.send_to_device


def test_what_is_not_covered_is_said_once_by_whoever_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "_told", {ALL})
    with pytest.warns(
        UserWarning, match=r"not staged: everything except the moves of accelerate's hooks.*NCCL"
    ) as said:
        models = [dispatch_model(transformer(), THREE) for _ in range(2)]
    assert len(said) == 1
    assert said[0].filename == __file__
    for model in models:
        remove_safe_transfers(model)
    monkeypatch.setattr(transfers, "_told", {ALL})
    with safe_transfers("never"):
        pass

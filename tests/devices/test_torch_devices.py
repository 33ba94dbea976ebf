"""Ordered pairs of devices, where there may be no device at all; and safe transfers on such a
machine.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from ckptfix.devices import interception, transfers
from ckptfix.devices.dispatching import dispatch_model, remove_safe_transfers
from ckptfix.devices.torch_devices import device, device_count, device_type, ordered_pairs
from ckptfix.devices.transfers import Mode, safe_transfers, staged_pairs

no_accelerator = pytest.mark.skipif(device_count() > 0, reason="this machine has an accelerator")


def test_pairs_are_ordered() -> None:
    assert ordered_pairs(3) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert ordered_pairs(1) == ordered_pairs(0) == ()


@no_accelerator
def test_without_an_accelerator() -> None:
    assert device_type() is None
    assert device_count() == 0
    assert ordered_pairs() == ()
    with pytest.raises(RuntimeError, match="no accelerator on this machine"):
        device(0)
    with pytest.raises(RuntimeError, match="cannot be overridden"):
        interception.Override(lambda *_: False)


def test_a_torch_older_than_its_accelerator_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    )
    assert device_type() == "cuda"
    assert ordered_pairs() == ((0, 1), (1, 0))
    assert device(1) == torch.device("cuda", 1)


@no_accelerator
@pytest.mark.parametrize("mode", [*Mode, "auto", "always", "never"])
def test_safe_transfers_stage_nothing_where_nothing_can_be_staged(mode: Any) -> None:
    with safe_transfers(mode) as held:
        assert held.pairs == staged_pairs() == frozenset()
        assert held.counters() == {}
        assert torch.ones(2).to("cpu").sum() == 2


@no_accelerator
def test_models_are_dispatched_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    right = model(torch.ones(2))
    for mode in Mode:
        dispatched = dispatch_model(model, {"": "cpu"}, force_hooks=True, safe_transfers=mode)
        assert torch.equal(dispatched(torch.ones(2)), right)
        remove_safe_transfers(dispatched)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert not transfers._references


@pytest.mark.parametrize("number", [True, 3, -(2**53) - 1, 2.5, float("inf"), 1e-300, 2 - 1j])
def test_numbers_that_torch_hands_to_the_override(
    monkeypatch: pytest.MonkeyPatch, number: Any
) -> None:
    """On the CPU's key, where they are easily had; a GPU's composite operators meet them too."""
    tensors = [
        torch.tensor([0, 1, 2, 3], dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64)
    ]
    right = [tensor.ne(number) for tensor in tensors], [tensor + number for tensor in tensors]
    asked: list[Any] = []

    def ask(*arguments: Any) -> bool:
        asked.append(arguments)
        return False

    monkeypatch.setattr(interception, "device_type", lambda: "cpu")
    override = interception.Override(ask)
    try:
        found = [tensor.ne(number) for tensor in tensors], [tensor + number for tensor in tensors]
    finally:
        override.remove()
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    assert not asked


@pytest.mark.slow
def test_importing_is_light() -> None:
    """Neither accelerate nor the probe is imported for safe transfers alone."""
    code = (
        "import sys, ckptfix.devices\n"
        "with ckptfix.devices.safe_transfers('never'): pass\n"
        "print(*(name for name in ('accelerate', 'ckptfix.devices.probe') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs_torch"),
    [
        ("Verdict", False),
        ("ProbeReport", False),
        ("probe_peer_copies", False),
        ("safe_transfers", True),
    ],
)
def test_public_names_import_torch_only_where_they_need_it(name: str, needs_torch: bool) -> None:
    code = f"import sys; from ckptfix.devices import {name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{needs_torch}\n"


def test_public_names_are_the_objects_and_not_modules_of_that_name() -> None:
    import ckptfix.devices

    assert dir(ckptfix.devices) == sorted(ckptfix.devices.__all__)
    for name in ckptfix.devices.__all__:
        assert getattr(ckptfix.devices, name).__name__ == name
    with pytest.raises(AttributeError):
        ckptfix.devices.no_such_name  # noqa: B018

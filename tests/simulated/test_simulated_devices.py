"""The simulated devices as torch sees them: tensors, memory, streams and errors like those of
CUDA.
"""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.simulated.simulator import HOST, Simulator, simulate

pytestmark = pytest.mark.simulated(3)


def test_devices_are_visible(simulator: Simulator) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == simulator.devices == 3
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert [torch.cuda.get_device_properties(index).pci_bus_id for index in range(3)] == [1, 2, 3]
    assert len({torch.cuda.get_device_properties(index).uuid for index in range(3)}) == 3


def test_a_process_has_one_simulator(simulator: Simulator) -> None:
    assert simulate(3) is simulator
    with pytest.raises(RuntimeError, match="simulates 3 devices already, not 2"):
        simulate(2)


def test_a_device_that_is_not_there_is_refused(simulator: Simulator) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 3"):
        torch.empty(1, device="cuda:3")


def test_tensors_of_two_devices_do_not_meet(simulator: Simulator) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    assert (torch.ones(2, device="cuda:1") + torch.tensor(1.0)).device == torch.device("cuda:1")


def test_the_current_device(simulator: Simulator) -> None:
    with torch.cuda.device(2):
        assert torch.empty(1, device="cuda").device.index == torch.cuda.current_device() == 2
        with torch.accelerator.device_index(1):
            assert torch.empty(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0


def test_views_share_memory(simulator: Simulator) -> None:
    whole = torch.zeros(4, 4, device="cuda:1")
    whole[1:3].t()[0].view(2, 1).unfold(0, 1, 1).fill_(5)
    assert whole.sum() == 10
    numbers = torch.zeros(3, dtype=torch.complex64, device="cuda:1")
    torch.view_as_real(numbers)[:, 1] = 2
    assert torch.equal(numbers.conj().cpu(), torch.full((3,), -2j))


@pytest.mark.parametrize(
    "move", [lambda x: x.conj(), lambda x: x.imag, lambda x: x.conj().imag, lambda x: x.mT, lambda x: x[:, ::2]]
)  # fmt: skip
def test_a_move_keeps_values(simulator: Simulator, move: "object") -> None:
    assert callable(move)
    here = torch.randn(4, 6, dtype=torch.complex64)
    there = move(here.to("cuda:0")).to("cuda:1")
    assert simulator.count(0, 1) == 1
    assert torch.equal(there.cpu(), move(here))
    target = torch.empty_like(there).conj()
    for source in (there.to("cuda:2"), there.clone(), there.cpu()):
        assert torch.equal(target.zero_().copy_(source).cpu(), move(here))
        assert torch.equal(torch.empty_like(move(here)).conj().copy_(source), move(here))


def test_gradients_cross_devices(simulator: Simulator) -> None:
    start = torch.ones(3, device="cuda:0", requires_grad=True)
    (start.to("cuda:1") * 2).to("cuda:2").sum().backward()
    assert start.grad is not None
    assert torch.equal(start.grad.cpu(), torch.full((3,), 2.0))
    assert list(simulator.log()) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_all_ways_to_copy_pass_the_link(simulator: Simulator) -> None:
    source = [torch.randn(3, device="cuda:0") for _ in range(3)]
    target = [torch.empty(3, device="cuda:1") for _ in range(3)]
    torch._foreach_copy_(target, source)
    target[0].untyped_storage().copy_(source[0].untyped_storage())
    target[0][1:2] = source[0][1:2]
    torch.compile(lambda tensor: tensor.to("cuda:1") + 1, backend="eager")(source[0])
    torch.eye(3).to_sparse().to("cuda:0").to("cuda:1")
    assert simulator.count(0, 1) == simulator.count() == 3 + 1 + 1 + 1 + 2


def test_the_kernel_of_copy_can_be_overridden(simulator: Simulator) -> None:
    original = torch.library.get_kernel("aten::copy_", "CUDA")
    library = torch.library.Library("aten", "IMPL")
    seen = []

    def copy_(
        keys: torch.DispatchKeySet,
        self: torch.Tensor,
        source: torch.Tensor,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        if source.is_cuda and self.is_cuda:  # the kernels' own way through the CPU comes here, too
            seen.append((source.device.index, self.device.index))
        result: torch.Tensor = original.call_boxed(keys, self, source, non_blocking)
        return result

    library.impl("copy_", copy_, "CUDA", with_keyset=True)
    there = torch.ones(3, device="cuda:0").to("cuda:1")
    library._destroy()
    there.to("cuda:2")
    assert seen == [(0, 1)]
    assert simulator.count() == 2


def test_files_load_onto_a_device(simulator: Simulator, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = io.BytesIO()
    torch.save(torch.arange(4, device="cuda:1"), file)
    for wanted, map_location in (("cuda:1", None), ("cuda:2", "cuda:2"), ("cpu", "cpu")):
        file.seek(0)
        assert str(torch.load(file, map_location=map_location).device) == wanted
    save_file({"a": torch.arange(4)}, tmp_path / "a.safetensors")
    for device in (2, "cuda:2"):
        assert load_file(tmp_path / "a.safetensors", device=device)["a"].device.index == 2
    assert copy.deepcopy(torch.ones(2, device="cuda:1")).device.index == 1


def test_memory_is_counted(simulator: Simulator) -> None:
    before = torch.cuda.memory_allocated(1)
    kept = torch.empty(1000, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == torch.accelerator.memory_allocated(1) == before + 1024
    assert torch.cuda.mem_get_info(1)[0] == (8 << 30) - before - 1024
    del kept
    assert torch.cuda.memory_allocated(1) == before
    assert torch.cuda.max_memory_allocated(1) >= before + 1024
    with pytest.raises(torch.OutOfMemoryError, match="on device 2"):
        torch.empty(9 << 30, dtype=torch.uint8, device="cuda:2")


def test_fresh_memory_is_poisoned_and_kept_memory_is_not(simulator: Simulator) -> None:
    assert bool((torch.empty(64, dtype=torch.uint8, device="cuda:0") == 0xCD).all())
    simulator.keep_freed_memory()
    ones = torch.ones(64, dtype=torch.uint8, device="cuda:0")
    del ones
    assert bool((torch.empty(64, dtype=torch.uint8, device="cuda:0") == 1).all())


def test_pinned_memory(simulator: Simulator) -> None:
    assert torch.empty(10, pin_memory=True)[3:].is_pinned()
    assert torch.ones(10).pin_memory().is_pinned()
    assert not torch.empty(10).is_pinned()


def test_streams_and_events(simulator: Simulator) -> None:
    stream, start, end = (
        torch.Stream("cuda:1"),
        *(torch.Event("cuda:1", enable_timing=True) for _ in range(2)),
    )
    start.record(stream)
    with stream:
        assert torch.accelerator.current_stream(1) == stream
    stream.wait_event(start)
    end.record(stream)
    end.synchronize()
    assert stream.query()
    assert start.elapsed_time(end) >= 0
    with torch.cuda.stream(torch.cuda.Stream(2)) as _:
        assert torch.cuda.current_stream(2) != torch.cuda.default_stream(2)
    assert torch.cuda.current_stream(2) == torch.cuda.default_stream(2)
    assert torch.accelerator.current_device_index() == 0


def test_host_copies_have_a_log_of_their_own(simulator: Simulator) -> None:
    torch.ones(4).to("cuda:1", non_blocking=True).cpu()
    assert simulator.log() == {}
    sent, received = simulator.host_log()[HOST, 1], simulator.host_log()[1, HOST]
    assert [(each.bytes, each.non_blocking) for each in (*sent, *received)] == [
        (16, True),
        (16, False),
    ]


def test_children_simulate_the_same(simulator: Simulator, tmp_path: Path) -> None:
    simulator.fault(0, 2, "zeros")
    simulator.peer_access(1, 0, False)
    code = """if True:
        import torch
        print(torch.ones(2, device="cuda:0").to("cuda:2").sum().item(), torch.cuda.can_device_access_peer(1, 0))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True,
        cwd=tmp_path
    )  # fmt: skip
    assert printed.stdout == "0.0 False\n"

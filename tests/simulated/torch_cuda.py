"""`torch.cuda` on simulated devices: what its Python side would ask the CUDA runtime is answered
here.
"""

from typing import Any

import torch
from torch import accelerator

from tests.simulated.library import Library

NAME = "Simulated CUDA device"
CAPABILITY = (8, 0)


class Properties:
    """What `torch.cuda.get_device_properties` returns, as far as programs ask."""

    def __init__(self, index: int, memory: int) -> None:
        self.name = NAME
        self.major, self.minor = CAPABILITY
        self.total_memory = memory
        self.multi_processor_count = 1
        self.is_integrated = False
        self.is_multi_gpu_board = False
        self.gcnArchName = ""
        self.uuid = f"00000000-0000-0000-0000-{index:012d}"
        self.pci_domain_id = 0
        self.pci_bus_id = index + 1
        self.pci_device_id = 0
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.max_threads_per_multi_processor = 2048
        self.shared_memory_per_block = 48 << 10


class SimulatedStream(torch.Stream):  # type: ignore[misc]
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if device is None and not kwargs:
            device = torch.device("cuda", accelerator.current_device_index())
        return super().__new__(cls, device, priority=priority, **kwargs)


class SimulatedEvent(torch.Event):  # type: ignore[misc]
    """`torch.cuda.Event`."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)


def _new_storage(kind: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """`torch.UntypedStorage(size, device="cuda:1")`: the CPU build refuses the word "cuda" here,
    and only here.
    """
    size = args[0] if args else kwargs.get("size", 0)
    if device is None or torch.device(device).type != "cuda" or not isinstance(size, int):
        return _make_storage(
            kind, *args, **kwargs, **({} if device is None else {"device": device})
        )
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


_make_storage = torch.UntypedStorage.__new__


class Runtime:
    """What takes the place of functions in `torch.cuda`: every public method, under its own name.

    `torch.accelerator` needs nothing: it asks the devices themselves, and so do these where they
    can.
    """

    def __init__(self, library: Library, devices: int) -> None:
        self._library = library
        self._devices = devices

    def install(self) -> None:
        """Put all of it into `torch.cuda`; there is no way back in this process."""
        for name in dir(type(self)):
            if not name.startswith("_") and name != "install":
                setattr(torch.cuda, name, getattr(self, name))
        torch.cuda._lazy_init = self.init
        torch.cuda._is_in_bad_fork = lambda: False
        torch.cuda._exchange_device = torch._C._accelerator_exchangeDevice
        torch.cuda._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
        torch.cuda.Stream = SimulatedStream
        torch.cuda.Event = SimulatedEvent
        torch.UntypedStorage.__new__ = _new_storage

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else int(index)

    def init(self) -> None: ...

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return int(accelerator.current_device_index())

    def set_device(self, device: Any) -> None:
        accelerator.set_device_index(self._index(device))

    def synchronize(self, device: Any = None) -> None:
        accelerator.synchronize(self._index(device))

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return self._library.peer_access(self._index(device), self._index(peer_device))

    def get_device_name(self, device: Any = None) -> str:
        return NAME

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def get_device_properties(self, device: Any = None) -> Properties:
        index = self._index(device)
        return Properties(index, accelerator.get_memory_info(index)[1])

    def get_arch_list(self) -> list[str]:
        return ["sm_80"]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return False

    # ---- memory, in bytes

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free, total = accelerator.get_memory_info(self._index(device))
        return free, total

    def memory_allocated(self, device: Any = None) -> int:
        return int(accelerator.memory_allocated(self._index(device)))

    def memory_reserved(self, device: Any = None) -> int:
        return int(accelerator.memory_reserved(self._index(device)))

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(accelerator.max_memory_allocated(self._index(device)))

    def max_memory_reserved(self, device: Any = None) -> int:
        return int(accelerator.max_memory_reserved(self._index(device)))

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        return dict(accelerator.memory_stats(self._index(device)))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        accelerator.reset_peak_memory_stats(self._index(device))

    def empty_cache(self) -> None:
        accelerator.empty_cache()

    def ipc_collect(self) -> None: ...

    # ---- random numbers: the CPU's own, which `torch.manual_seed` has seeded already

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in range(self._devices)]

    def set_rng_state_all(self, new_states: Any) -> None:
        for state in new_states:
            torch.set_rng_state(state)

    # ---- streams

    def current_stream(self, device: Any = None) -> torch.Stream:
        return accelerator.current_stream(self._index(device))

    def default_stream(self, device: Any = None) -> torch.Stream:
        # Its number is 0 on every device, and torch.Stream takes these three words for "that very
        # stream".
        index = self._index(device)
        type_number = accelerator.current_stream(index).device_type
        return torch.Stream(stream_id=0, device_index=index, device_type=type_number)

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            accelerator.set_stream(stream)

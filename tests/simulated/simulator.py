"""`simulate`: N CUDA devices in this process, links that can be made faulty, and a log of what
crossed them.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulated import building
from tests.simulated.library import (
    DTYPES,
    ENGINES,
    KINDS,
    CopyFields,
    Engine,
    FaultFields,
    Kind,
    Library,
)

Pair = tuple[int, int]
"""Ordered: (source, destination)."""

HOST = -1
"""The host, where a pair of the log has no device."""

MEMORY = 8 << 30
"""Bytes that each simulated device says it has."""

VARIABLE = "CKPTFIX_SIMULATED"
"""Environment variable: what a child process is to simulate, as JSON. See
inherited/sitecustomize.py.
"""

ROOT = Path(__file__).resolve().parents[2]
INHERITED = Path(__file__).resolve().parent / "inherited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy of the log. `bytes` are those that crossed the link, of type `dtype` (a name in
    `torch`).
    """

    source: int
    destination: int
    bytes: int
    engine: Engine
    dtype: str
    fault: Kind | None
    non_blocking: bool


class Simulator:
    """The devices of this process. Get it from `simulate`; there is one."""

    def __init__(self, library: Library, library_path: Path, devices: int, memory: int) -> None:
        self.devices = devices
        """How many there are."""
        self._library = library
        self._settings: dict[str, Any] = {
            "library": str(library_path),
            "devices": devices,
            "memory": memory,
        }
        self._faults: dict[Pair, dict[str, Any]] = {}
        self._no_peer_access: set[Pair] = set()
        self._keeps_freed = False
        self._hand_down()

    # ---- faults

    def fault(
        self,
        source: int,
        destination: int,
        kind: Kind | str,
        *,
        engine: Engine | str = Engine.ANY,
        dtype: Any = None,
        min_bytes: int = 0,
        every: int = 1,
        kernels: int = 4,
        offset: int = 16,
        page: int = 4096,
        seconds: float | None = None,
    ) -> None:
        """Make the copies from `source` to `destination` faulty; it takes the place of this pair's
        earlier fault.

        Only copies by `engine`, of `dtype` (a torch.dtype or its name), of at least `min_bytes`,
        and of those every `every`-th. `late` arrives before the `kernels`-th kernel of the
        destination, or when the host synchronises; `shift` displaces by `offset` bytes; `pages`
        loses every second `page` bytes; `hang` ends after `seconds` (None: never). ValueError for
        what cannot be meant.
        """
        options = {
            "kind": Kind(kind).value, "engine": Engine(engine).value,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "min_bytes": min_bytes, "every": every, "kernels": kernels, "offset": offset,
            "page": page, "seconds": seconds,
        }  # fmt: skip
        self._check_pair(source, destination)
        for name, number in (
            ("every", every),
            ("kernels", kernels),
            ("offset", offset),
            ("page", page),
        ):
            if number < 1:
                raise ValueError(f"{name}={number}: at least 1")
        self._library.set_fault(_fault_fields(source, destination, options))
        self._faults[source, destination] = options
        self._hand_down()

    def clear(self) -> None:
        """Be healthy again: no fault, peer access everywhere, lost devices alive, hangs over, an
        empty log.

        Late copies arrive, and memory is fresh again for each tensor.
        """
        self._library.clear_faults()
        self._library.clear_copies()
        self._library.keep_freed_blocks(False)
        self._faults.clear()
        self._no_peer_access.clear()
        self._keeps_freed = False
        self._hand_down()

    def peer_access(self, source: int, destination: int, allowed: bool) -> None:
        """Say whether kernels of `source` may write to `destination`; without it, every copy is a
        memcpy.
        """
        self._check_pair(source, destination)
        self._library.set_peer_access(source, destination, allowed)
        (self._no_peer_access.discard if allowed else self._no_peer_access.add)(
            (source, destination)
        )
        self._hand_down()

    def keep_freed_memory(self, on: bool = True) -> None:
        """Hand freed blocks out again with what they held, as the CUDA caching allocator does.

        Off, which is how it starts, every new tensor holds 0xCD in each byte.
        """
        self._library.keep_freed_blocks(on)
        self._keeps_freed = on
        self._hand_down()

    # ---- what happened

    def log(self) -> dict[Pair, tuple[Copy, ...]]:
        """Return the copies from device to device since the log was cleared, by ordered pair, each
        in its order.
        """
        return self._copies(host=False)

    def host_log(self) -> dict[Pair, tuple[Copy, ...]]:
        """Return the copies between device and host, where `HOST` stands for the host."""
        return self._copies(host=True)

    def count(self, source: int | None = None, destination: int | None = None) -> int:
        """Return how many copies from device to device the log holds: of one pair, of one end, or
        of all.
        """
        return sum(
            len(copies)
            for pair, copies in self.log().items()
            if source in (None, pair[0]) and destination in (None, pair[1])
        )

    def clear_log(self) -> None:
        """Empty the log; faults stay."""
        self._library.clear_copies()

    def late(self) -> int:
        """Return how many late copies have not arrived yet."""
        return self._library.late_copies()

    def kernels(self) -> int:
        """Return how many kernels the devices have run."""
        return self._library.kernel_count()

    def _copies(self, host: bool) -> dict[Pair, tuple[Copy, ...]]:
        found: dict[Pair, list[Copy]] = {}
        for fields in self._library.copies():
            if (HOST in (fields.source, fields.destination)) == host:
                found.setdefault((fields.source, fields.destination), []).append(_copy(fields))
        return {pair: tuple(copies) for pair, copies in sorted(found.items())}

    def _check_pair(self, source: int, destination: int) -> None:
        if source == destination or not {source, destination} <= set(range(self.devices)):
            raise ValueError(
                f"({source}, {destination}): no ordered pair of {self.devices} devices"
            )

    # ---- child processes

    def _hand_down(self) -> None:
        """Let child processes simulate the same: any Python that they start imports
        inherited/sitecustomize.py.
        """
        os.environ[VARIABLE] = json.dumps(
            {
                **self._settings,
                "faults": [[*pair, options] for pair, options in self._faults.items()],
                "no_peer_access": sorted(self._no_peer_access),
                "keeps_freed": self._keeps_freed,
            }
        )
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        for folder in (str(ROOT), str(INHERITED)):
            if folder not in folders:
                folders.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


_simulator: Simulator | None = None


def simulate(count: int, *, memory: int = MEMORY) -> Simulator:
    """Make `count` CUDA devices of `memory` bytes each in this process, and in the Python processes
    it starts.

    Once for each process, before anything of CUDA was used; asked again, it returns the same.
    RuntimeError on a torch that is built for CUDA, without a compiler, and when there are other
    devices already.
    """
    global _simulator
    if _simulator is not None:
        if _simulator.devices != count:
            raise RuntimeError(
                f"this process simulates {_simulator.devices} devices already, not {count}"
            )
        return _simulator
    wrong = building.why_not()
    if wrong:
        raise RuntimeError(wrong)
    _simulator = _begin(building.built(), count, memory)
    return _simulator


def simulate_as_told(settings: Mapping[str, Any]) -> Simulator:
    """Simulate what the parent process does: the content of the environment variable."""
    global _simulator
    if _simulator is None:
        _simulator = _begin(Path(settings["library"]), settings["devices"], settings["memory"])
        for source, destination, options in settings["faults"]:
            _simulator.fault(source, destination, **options)
        for source, destination in settings["no_peer_access"]:
            _simulator.peer_access(source, destination, False)
        _simulator.keep_freed_memory(settings["keeps_freed"])
    return _simulator


def running() -> Simulator | None:
    """Return the simulator of this process, if it has one."""
    return _simulator


def _begin(library_path: Path, count: int, memory: int) -> Simulator:
    import torch

    from tests.simulated.torch_cuda import Runtime

    if torch.backends.cuda.is_built():
        raise RuntimeError(building.why_not())
    if not 1 <= count <= 16:
        raise ValueError(f"{count} devices: from 1 to 16 can be simulated")
    library = Library(library_path)
    library.set_devices(count, memory)
    Runtime(library, count).install()
    return Simulator(library, library_path, count, memory)


def _fault_fields(source: int, destination: int, options: Mapping[str, Any]) -> FaultFields:
    numbers = {name: number for number, name in DTYPES.items()}
    dtype = options["dtype"]
    if dtype is not None and dtype not in numbers:
        raise ValueError(
            f"{dtype}: no type that the simulator knows; it knows {', '.join(numbers)}"
        )
    return FaultFields(
        source=source,
        destination=destination,
        kind=KINDS.index(Kind(options["kind"])),
        engine=ENGINES.index(Engine(options["engine"])),
        dtype=-1 if dtype is None else numbers[dtype],
        min_bytes=options["min_bytes"],
        every=options["every"],
        kernels=options["kernels"],
        offset=options["offset"],
        page=options["page"],
        seconds=options["seconds"] or 0.0,
    )


def _copy(fields: CopyFields) -> Copy:
    return Copy(
        source=fields.source,
        destination=fields.destination,
        bytes=fields.bytes,
        engine=ENGINES[fields.engine],
        dtype=DTYPES.get(fields.dtype, f"type {fields.dtype}"),
        fault=None if fields.fault < 0 else KINDS[fields.fault],
        non_blocking=bool(fields.non_blocking),
    )

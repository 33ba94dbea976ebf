"""The library of simulated devices as Python calls it: the functions of device/interface.cpp,
typed.
"""

import ctypes
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any


class Kind(str, Enum):
    """What happens to a copy. The order is that of `Kind` in device/faults.h, which says what each
    does.
    """

    ZEROS = "zeros"
    UNWRITTEN = "unwritten"
    STALE = "stale"
    PARTIAL = "partial"
    PAGES = "pages"
    BITFLIP = "bitflip"
    SHIFT = "shift"
    SWAP = "swap"
    LATE = "late"
    HANG = "hang"
    ERROR = "error"
    ASSERT = "assert"


class Engine(str, Enum):
    """What makes a copy. The order is that of `Engine` in device/faults.h."""

    ANY = "any"
    MEMCPY = "memcpy"
    KERNEL = "kernel"


KINDS = tuple(Kind)
ENGINES = tuple(Engine)

DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 8: "complex32", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16",
    23: "float8_e5m2", 24: "float8_e4m3fn",
}  # fmt: skip
"""c10::ScalarType -> the name in `torch`. Files and ABIs depend on these numbers, so they do not
change.
"""


class FaultFields(ctypes.Structure):
    """`Fault` of device/faults.h."""

    _fields_ = (
        ("source", ctypes.c_int32),
        ("destination", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("engine", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("min_bytes", ctypes.c_int64),
        ("every", ctypes.c_int64),
        ("kernels", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("passed", ctypes.c_int64),
    )


class CopyFields(ctypes.Structure):
    """`Copy` of device/devices.h."""

    source: int
    destination: int
    engine: int
    dtype: int
    fault: int
    non_blocking: int
    bytes: int
    _fields_ = (
        ("source", ctypes.c_int32),
        ("destination", ctypes.c_int32),
        ("engine", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("fault", ctypes.c_int32),
        ("non_blocking", ctypes.c_int32),
        ("bytes", ctypes.c_int64),
    )


_INT, _LONG, _BOOL = ctypes.c_int, ctypes.c_int64, ctypes.c_bool
_SIGNATURES: dict[str, tuple[type | None, Sequence[type]]] = {
    "set_devices": (None, (_INT, _LONG)),
    "keep_freed_blocks": (None, (_BOOL,)),
    "set_peer_access": (None, (_INT, _INT, _BOOL)),
    "peer_access": (_BOOL, (_INT, _INT)),
    "set_fault": (None, (ctypes.POINTER(FaultFields),)),
    "clear_faults": (None, ()),
    "copy_count": (_LONG, ()),
    "read_copies": (_LONG, (ctypes.POINTER(CopyFields), _LONG)),
    "clear_copies": (None, ()),
    "late_copies": (_LONG, ()),
    "kernel_count": (_LONG, ()),
}
"""Name -> (what it returns, what it takes)."""


class Library:
    """The loaded library. Loading it registers the devices with torch, which cannot be undone."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._call: dict[str, Any] = {}
        for name, (returned, taken) in _SIGNATURES.items():
            function = library[f"simulated_{name}"]
            function.restype, function.argtypes = returned, tuple(taken)
            self._call[name] = function

    def set_devices(self, count: int, memory: int) -> None:
        self._call["set_devices"](count, memory)

    def keep_freed_blocks(self, on: bool) -> None:
        self._call["keep_freed_blocks"](on)

    def set_peer_access(self, source: int, destination: int, allowed: bool) -> None:
        self._call["set_peer_access"](source, destination, allowed)

    def peer_access(self, source: int, destination: int) -> bool:
        return bool(self._call["peer_access"](source, destination))

    def set_fault(self, fault: FaultFields) -> None:
        self._call["set_fault"](ctypes.byref(fault))

    def clear_faults(self) -> None:
        self._call["clear_faults"]()

    def copies(self) -> list[CopyFields]:
        most = int(self._call["copy_count"]())
        fields = (CopyFields * most)()
        count = int(self._call["read_copies"](fields, most))
        return list(fields[:count])

    def clear_copies(self) -> None:
        self._call["clear_copies"]()

    def late_copies(self) -> int:
        return int(self._call["late_copies"]())

    def kernel_count(self) -> int:
        return int(self._call["kernel_count"]())

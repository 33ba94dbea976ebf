"""Arrays whose objects are bytes of the file: ``weights_only`` loads them, and the process dies or
runs any code.
"""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptfix import check
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.devices.torch_reading import Unreadable, read_pickle
from ckptfix.formats.pickle_arrays import RAW_OBJECTS
from tests.formats.test_pickle_calls import multiarray

ADDRESS = b"AAAAAAAA"
OBJECT = np.dtype("O")


class Call:
    """A call that a pickle makes, with the state that it gives to the result."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def dtype(name: Any, *state: Any) -> Call:
    return Call(np.dtype, name, False, True, state=state or None)


def array(of: Any) -> Call:
    return Call(
        multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), of, False, ADDRESS)
    )


FIELDS = {"a": (OBJECT, 0)}
WITHOUT_FLAGS = {
    "objects": dtype("O8", 3, "|", None, None, None, -1, -1, 0),
    "a field": dtype("V8", 3, "|", None, ("a",), FIELDS, 8, 1, 0),
    "an array in an element": dtype("V8", 3, "|", (OBJECT, (1,)), None, None, 8, 1, 0),
    "a list": dtype(list, 3, "|", None, None, None, -1, -1, 0),
    "an OrderedDict": dtype(OrderedDict, 3, "|", None, None, None, -1, -1, 0),
    "an ndarray": dtype(np.ndarray, 3, "|", None, None, None, -1, -1, 0),
    "a class": dtype(object, 3, "|", None, None, None, -1, -1, 0),
}
HOSTILE = {
    **{f"{name} without flags": array(of) for name, of in WITHOUT_FLAGS.items()},
    "a scalar": Call(multiarray.scalar, WITHOUT_FLAGS["a field"], ADDRESS),
    "a buffer": Call(np.ndarray, (1,), OBJECT, ADDRESS),
    "a buffer of a plain name": Call(np.ndarray, (1,), dtype("O"), ADDRESS),
    "a buffer of fields": Call(np.ndarray, (1,), Call(np.dtype, [("a", "O")]), ADDRESS),
    "a buffer of a class": Call(np.ndarray, (1,), object, ADDRESS),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_an_error_and_no_load_makes_it(tmp_path: Path, name: str) -> None:
    for file in ("optimizer.bin", "custom_checkpoint_0.pkl"):
        torch.save({"state": HOSTILE[name]}, tmp_path / file)
        (finding,) = (
            one for one in check(tmp_path / file).findings if one.code == "malformed-file"
        )
        assert RAW_OBJECTS in str(finding)
        assert "can run any code" in str(finding)
    for component in scan_folder(tmp_path).components:
        with pytest.raises(Unreadable, match="can run any code"):
            read_pickle(tmp_path, component, trust=False)


@pytest.mark.parametrize("name", ["a buffer of a plain name", "a buffer of fields"])
def test_stock_accelerate_loads_it_and_dies(tmp_path: Path, name: str) -> None:
    torch.save({"state": HOSTILE[name]}, tmp_path / "optimizer.bin")
    code = (
        "import accelerate; "
        f"repr(accelerate.utils.load({str(tmp_path / 'optimizer.bin')!r})['state'])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        < 0
    )


@pytest.mark.parametrize(
    "value",
    [
        np.array([None, 1, "a"], dtype=object),
        np.array([(None, 1.0)], dtype=[("a", "O"), ("b", "f8")]),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i8", (2,))]),
        np.array([("x", b"y")], dtype=[("a", "U3"), ("b", "S2")]),
        np.zeros(2, dtype=[("a", [("b", "O")])]),
        np.array(["a"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.float64(1),
        np.zeros(1, dtype=[("a", "f4")])[0],
        np.dtype("O"),
        np.dtype([("a", "O")]),
        np.zeros(3, dtype=bool),
        np.random.default_rng(0),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        np.zeros(2).view(np.recarray),
        Call(np.ndarray, (1,), np.dtype("f8"), ADDRESS),
        Call(np.ndarray, (1,), OBJECT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arrays_of_numpy_are_sound(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "custom_checkpoint_0.pkl"
    torch.save({"state": value}, path)
    torch.load(path, weights_only=False)
    assert check(path).findings == ()

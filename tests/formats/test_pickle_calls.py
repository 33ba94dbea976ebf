"""Calls of a pickle in zip files whose checksums are correct: ``torch.load`` itself says which of
them it makes.
"""

import _codecs
import codecs
import importlib
import io
import pickle
import random
import re
import zipfile
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import _utils as rebuild

from ckptfix.diagnosis.check import check
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_arrays import RAW_OBJECTS
from tests.formats.making import parsed, saved
from tests.formats.pickled_calls import Call, Entries, Storage, pickled, zipped
from tests.sampling import sampled

FLOATS, INTEGERS = Storage(torch.FloatStorage, "0"), Storage(torch.LongStorage, "1")
QUANTIZED = Storage(torch.QInt8Storage, "2", "cpu", 24)


def tensor(storage: Storage, *shape: int) -> Call:
    strides = torch.empty(shape).stride()
    return Call(rebuild._rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict()))


TENSOR, NUMBERS = tensor(FLOATS, 2, 3), tensor(INTEGERS, 2, 3)
PARAMETER = Call(rebuild._rebuild_parameter, (TENSOR, True, OrderedDict()))
SIZE = Call(torch.Size, ((2, 3),))
COO = Call(torch.serialization._get_layout, ("torch.sparse_coo",))
SCHEME = (torch.per_tensor_affine, 0.1, 0)
SPARSE = (tensor(INTEGERS, 2, 2), tensor(FLOATS, 2), SIZE, True)
ATTRIBUTES = {"note": 1}

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a tensor of torch 0.3": (rebuild._rebuild_tensor, (FLOATS, 0, (2, 3), (3, 1))),
    "a tensor": (rebuild._rebuild_tensor_v2, TENSOR.args),
    "an empty tensor": (
        rebuild._rebuild_tensor_v2,
        (FLOATS, 0, (0, 3), (3, 1), False, OrderedDict()),
    ),
    "a tensor with metadata": (rebuild._rebuild_tensor_v2, (*TENSOR.args, {"neg": False})),
    "integers": (rebuild._rebuild_tensor_v2, NUMBERS.args),
    "a tensor with its dtype": (rebuild._rebuild_tensor_v3, (*TENSOR.args, torch.float32)),
    "a parameter": (rebuild._rebuild_parameter, PARAMETER.args),
    "a frozen parameter of integers": (
        rebuild._rebuild_parameter,
        (NUMBERS, False, OrderedDict()),
    ),
    "a parameter with attributes": (
        rebuild._rebuild_parameter_with_state,
        (*PARAMETER.args, ATTRIBUTES),
    ),
    "a quantized tensor": (
        rebuild._rebuild_qtensor,
        (QUANTIZED, 0, (2, 3), (3, 1), SCHEME, False, OrderedDict()),
    ),
    "a sparse tensor": (rebuild._rebuild_sparse_tensor, (COO, SPARSE)),
    "a meta tensor": (
        rebuild._rebuild_meta_tensor_no_storage,
        (torch.float32, SIZE, (3, 1), False),
    ),
    "a tensor of a device": (
        rebuild._rebuild_device_tensor_from_cpu_tensor,
        (TENSOR, torch.float32, "cpu", False),
    ),
    "a tensor with attributes": (
        torch._tensor._rebuild_from_type_v2,
        (rebuild._rebuild_tensor_v2, torch.Tensor, TENSOR.args, ATTRIBUTES),
    ),
    "sizes": (torch.Size, ((2, 3),)),
    "a device": (torch.device, ("cuda", 1)),
    "a layout": (torch.serialization._get_layout, ("torch.strided",)),
    "bytes": (_codecs.encode, ("a", "latin1")),
    "a bytearray": (bytearray, ("ab", "latin1")),
    "a set": (set, ([1, 2],)),
    "a complex": (complex, (1.0, 2.0)),
    "an OrderedDict": (OrderedDict, ([("a", 1)],)),
    "a Counter": (Counter, ({"a": 1},)),
    "a Parameter": (torch.nn.Parameter, (TENSOR, True)),
}
"""Every function that a pickle of torch calls -> arguments that torch writes."""

NOT_CALLED = {
    "a dtype": torch.float32,
    "a storage": torch.FloatStorage,
    "a scheme": torch.per_tensor_affine,
}

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "3": 3,
    "-1": -1,
    "2**70": 1 << 70,
    "1.5": 1.5,
    "'text'": "text",
    "'cpu'": "cpu",
    "'latin1'": "latin1",
    "bytes": b"\xff",
    "()": (),
    "(2,)": (2,),
    "(-1,)": (-1,),
    "('a',)": ("a",),
    "(1.5,)": (1.5,),
    "(True,)": (True,),
    "(None,)": (None,),
    "(1, 2)": (1, 2),
    "(0, 2**63 - 1)": (0, (1 << 63) - 1),
    "(0, 2**63)": (0, 1 << 63),
    "[0, 2**63]": [0, 1 << 63],
    "(-2**62, 1)": (-(1 << 62), 1),
    "(-2**62 - 1, 1)": (-(1 << 62) - 1, 1),
    "[]": [],
    "[2]": [2],
    "['a']": ["a"],
    "[[]]": [[]],
    "[('a', 1)]": [("a", 1)],
    "[([], 1)]": [([], 1)],
    "{}": {},
    "{'a': 1}": {"a": 1},
    "{1: 2}": {1: 2},
    "({}, {})": ({}, {}),
    "a set": {1},
    "OrderedDict": OrderedDict(),
    "Counter": Counter("a"),
    "sizes": SIZE,
    "complex": 1 + 2j,
    "bytearray": bytearray(b"x"),
    "a device": torch.device("cpu"),
    "a layout": COO,
    "a scheme": torch.per_tensor_affine,
    "a quantizer": SCHEME,
    "float32": torch.float32,
    "int64": torch.int64,
    "qint8": torch.qint8,
    "a tensor": TENSOR,
    "integers": NUMBERS,
    "a parameter": PARAMETER,
    "floats": FLOATS,
    "numbers": INTEGERS,
    "torch.FloatStorage": torch.FloatStorage,
    "Parameter": torch.nn.Parameter,
    "a function": rebuild._rebuild_tensor_v2,
    "the class OrderedDict": OrderedDict,
}

UNJUDGED = {
    # The numbers in a tensor or a storage are data, which the calls do not show.
    *(
        (call, value)
        for call in ("sizes", "a bytearray")
        for value in ("a tensor", "integers", "a parameter")
    ),
    *((call, value) for call in ("sizes", "a bytearray") for value in ("floats", "numbers")),
    *(("a sparse tensor", value) for value in ("(1, 2)",)),
    # Strides on the meta device may be any, and the file is reported as one without numbers.
    *(("a meta tensor", value) for value in ("(-2**62, 1)", "(-2**62 - 1, 1)")),
}
NEVER_WRITTEN = {
    # torch makes an OrderedDict of these, too; the tree refuses them, as no pickler writes them.
    *(
        ("an OrderedDict", value)
        for value in ("()", "{}", "{'a': 1}", "{1: 2}", "OrderedDict", "Counter")
    ),
}


def cases() -> Iterator[tuple[str, Any]]:
    for name, (function, args) in CALLS.items():
        yield name, Call(function, args)
        for count in range(len(args)):
            yield f"{name} with {count} arguments", Call(function, args[:count])
        yield f"{name} with an argument more", Call(function, (*args, None))
        yield f"{name} with two arguments more", Call(function, (*args, None, None))
        yield f"{name} with arguments that are no tuple", Call(function, 3)
        yield f"{name} as a class", Call(function, args, (), pickle.NEWOBJ)
        for value_name, value in VALUES.items():
            if (name, value_name) in UNJUDGED | NEVER_WRITTEN:
                continue
            for place in range(len(args)):
                changed = Call(function, (*args[:place], value, *args[place + 1 :]))
                yield f"{name} with {value_name} as argument {place + 1}", changed
    for name, function in NOT_CALLED.items():
        yield f"a call of {name}", Call(function, (1,))
    for name, value in VALUES.items():
        yield f"{name} as a key", Entries(((value, 1),))
        yield f"({name},) as a key", Entries((((value,), 1),))
        yield f"a set of {name}", Call(set, ([value],))
        yield f"a call of {name}", Call(value, ())
        yield f"an OrderedDict with the state {name}", Call(OrderedDict, (), (value,))
        if value is not None:
            # torch leaves out a state of None, and no pickler writes one.
            for target in ("sizes", "a device", "bytes", "a set", "a complex", "a layout"):
                yield f"{target} with the state {name}", Call(*CALLS[target], (value,))


CASES = dict(cases())


def refusal(data: bytes) -> str:
    """Return why torch refuses a file, with or without ``weights_only``: no pickler writes what
    divides the two.
    """
    for weights_only in (True, False):
        try:
            torch.load(io.BytesIO(data), weights_only=weights_only)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
@pytest.mark.parametrize("name", sampled(CASES))
def test_a_call_is_refused_where_torch_refuses_it(tmp_path: Path, name: str) -> None:
    data = zipped(pickled({"x": CASES[name], "w": TENSOR}))
    said = refusal(data)
    try:
        opcodes = parsed(tmp_path, data).tree.refused_opcodes
    except FormatError as error:
        opcodes = (str(error),)
    assert bool(opcodes) == bool(said), f"torch says {said!r}, the reader says {opcodes}"


multiarray: Any = importlib.import_module("numpy._core.multiarray")
NUMPY_SAFE = [
    numpy.ndarray,
    numpy.dtype,
    multiarray._reconstruct,
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    multiarray.scalar,
    *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__),
]
BYTES = Call(_codecs.encode, ("b", "latin1"))
DTYPE_STATE = (3, "<", None, None, None, -1, -1, 0)
UINT32 = Call(numpy.dtype, ("u4", False, True), (DTYPE_STATE,))
OBJECT = Call(numpy.dtype, ("O8", False, True), ((3, "|", None, None, None, -1, -1, 63),))
CONTENT = Call(_codecs.encode, ("\0" * 8, "latin1"))
ARRAY_STATE = (1, (2,), UINT32, False, CONTENT)
ARRAY = Call(multiarray._reconstruct, (numpy.ndarray, (0,), BYTES), (ARRAY_STATE,))
NUMPY_CALLS = {
    "a dtype": UINT32,
    "an array": ARRAY,
    "an array without a version": Call(ARRAY.function, ARRAY.args, (ARRAY_STATE[1:],)),
    "a scalar": Call(multiarray.scalar, (UINT32, CONTENT)),
    "a class of dtypes": Call(numpy.dtypes.UInt32DType, ()),
    "an ndarray": Call(numpy.ndarray, ((0,), BYTES)),
}
NUMPY_VALUES = VALUES | {
    "'u4'": "u4",
    "'foo'": "foo",
    "'float64'": "float64",
    "('u4', 2)": ("u4", 2),
    "('foo', 2)": ("foo", 2),
    "(('u4', 2), 3)": (("u4", 2), 3),
    "(a function, 2)": (_codecs.encode, 2),
    "b'b'": BYTES,
    "8 bytes": CONTENT,
    "a dtype": UINT32,
    "a dtype of objects": OBJECT,
    "an array": ARRAY,
    "numpy.ndarray": numpy.ndarray,
    "the class UInt32DType": numpy.dtypes.UInt32DType,
}


NUMPY_UNJUDGED = re.compile(
    # What describes a dtype in full is not looked into.
    r"a dtype with (?:\[\('a'|\[\(\[|\{'a'|\{1|Counter).* as argument 1"
    r"|an array.* with (?:\[\('a'|\[\(\[|\{'a'|\{1|Counter).* as argument 3"
    r"|an ndarray with (?:\[\('a'|\[\(\[|\{'a'|\{1|Counter).* as argument 2"
    r"|a dtype with (?:a tensor|integers|a parameter|an array) as argument [23]"
    r"|a call of a scalar"
    # numpy takes the bytes of a buffer as sizes, and no pickler writes one.
    r"|an? (?:nd)?array.* with (?:bytes|bytearray|numbers|floats|b'b'|8 bytes|an array) as"
    r" argument [12]"
)


def numpy_cases() -> Iterator[tuple[str, Any]]:
    objects = (1, (2,), OBJECT, False, [1, 2])
    for name, data in {
        "objects": [1, 2],
        "bytes": CONTENT,
        "a tuple": (1, 2),
        "None": None,
    }.items():
        state = (*objects[:-1], data)
        yield f"an array of objects from {name}", ARRAY._replace(states=(state,))
    for name, call in NUMPY_CALLS.items():
        yield name, call
        for count in range(len(call.args) + 1):
            yield f"{name} with {count} arguments", call._replace(args=call.args[:count])
        yield f"{name} with four arguments more", call._replace(args=(*call.args, *(None,) * 4))
        yield f"{name} with arguments that are no tuple", call._replace(args=3)
        yield f"{name} as a class", call._replace(opcode=pickle.NEWOBJ)
        yield f"a call of {name}", Call(call, ())
        yield f"{name} as a key", Entries(((call, 1),))
        (state,) = call.states or ((),)
        for count in range(len(state)):
            shorter = (*state[:count], *state[count + 1 :])
            yield f"{name} without value {count} of its state", call._replace(states=(shorter,))
            longer = (*state[:count], state[count], *state[count:])
            yield f"{name} with value {count} of its state twice", call._replace(states=(longer,))
        for value_name, value in NUMPY_VALUES.items():
            for place in range(len(call.args)):
                changed = (*call.args[:place], value, *call.args[place + 1 :])
                yield (
                    f"{name} with {value_name} as argument {place + 1}",
                    call._replace(args=changed),
                )
            if call.states:
                yield f"{name} with the state {value_name}", call._replace(states=(value,))
            for place in range(len(state)):
                changed = (*state[:place], value, *state[place + 1 :])
                yield (
                    f"{name} with {value_name} in its state at {place}",
                    call._replace(states=(changed,)),
                )


NUMPY_CASES = {name: case for name, case in numpy_cases() if not NUMPY_UNJUDGED.match(name)}


def numpy_refusal(data: bytes) -> str:
    with torch.serialization.safe_globals(NUMPY_SAFE):
        return refusal(data)


@pytest.mark.filterwarnings("ignore")  # what numpy deprecates it still takes
@pytest.mark.parametrize("name", sampled(NUMPY_CASES))
def test_a_call_of_numpy_is_refused_where_numpy_refuses_it(tmp_path: Path, name: str) -> None:
    data = zipped(pickled({"x": NUMPY_CASES[name], "w": TENSOR}))
    said = numpy_refusal(data)
    try:
        opcodes = parsed(tmp_path, data).tree.refused_opcodes
    except FormatError as error:
        if RAW_OBJECTS in str(error):
            return  # numpy loads it, and the process dies when an element is used
        opcodes = (str(error),)
    assert bool(opcodes) == bool(said), f"torch says {said!r}, the reader says {opcodes}"


class Made:
    """A class of the user's."""


MADE = Call(Made, (), ({"a": 1},), pickle.NEWOBJ)
OF_OTHERS: dict[str, Any] = {
    "an object": MADE,
    "an object with a number": (MADE, 2),
    "a class": Made,
    "a class with a number": (Made, 2),
    "a dict of a class": {"a": Made},
    "a class without slots": (Made, None),
    "slots of a class": (None, Made),
}


def cases_of_others() -> Iterator[tuple[str, Any]]:
    for value_name, value in OF_OTHERS.items():
        for name, (function, args) in CALLS.items():
            for place in range(len(args)):
                # No pickler makes an OrderedDict of a dict: ``pairs`` refuses it, as its items
                # would not be seen.
                if name == "an OrderedDict" and type(value) is dict:
                    continue
                # Which of the user's functions and classes make a tensor does not show.
                if name != "a tensor with attributes" or value is not Made or place > 1:
                    changed = (*args[:place], value, *args[place + 1 :])
                    yield (
                        f"{name} with {value_name} as argument {place + 1}",
                        Call(function, changed),
                    )
            yield f"{name} with {value_name} as its arguments", Call(function, value)
            yield f"{name} with the state {value_name}", Call(function, args, (value,))
        if type(value) is not tuple:
            yield f"a class of the user's with {value_name} as its arguments", Call(Made, value)
            yield (
                f"a new object with {value_name} as its arguments",
                Call(Made, value, (), pickle.NEWOBJ),
            )
    yield "a call of an object", Call(MADE, ())
    yield "a new object of an object", Call(MADE, (), (), pickle.NEWOBJ)
    yield "a call of a class", Call(Made, ())


CASES_OF_OTHERS = dict(cases_of_others())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(CASES_OF_OTHERS))
def test_an_object_of_the_users_is_refused_where_it_cannot_be(tmp_path: Path, name: str) -> None:
    """Custom objects and DeepSpeed's files have any classes, and are read with
    ``weights_only=False``.
    """
    data = zipped(pickled({"x": CASES_OF_OTHERS[name], "w": TENSOR}))
    said = ""
    try:
        torch.load(io.BytesIO(data), weights_only=False)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    try:
        parsed(tmp_path, data)
        refused = ""
    except FormatError as error:
        refused = str(error)
    assert bool(refused) == bool(said), f"torch says {said!r}, the reader says {refused!r}"


ANY_PROTOCOL = {
    "an item of a set": b"\x8fK\x01K\x02s",
    "items of a set": b"\x8f(K\x01K\x02u",
    "an item of a class of storages": b"ctorch\nFloatStorage\nK\x01K\x02s",
    "an item of a layout": (
        b"ctorch.serialization\n_get_layout\nX\x0d\0\0\0torch.strided\x85RK\x01K\x02s"
    ),
    "a value more in a dict": b"}K\x01a",
    "values more in a dict": b"}(K\x01e",
    "a value more in a set": b"\x8fK\x01a",
    "a member of a list": b"](K\x01\x90",
    "a member of a dict": b"}(K\x01\x90",
    "a list in a set": b"\x8f(]\x90",
    "a state of a list": b"]}X\1\0\0\0aK\x01sb",
    "a state of a dict": b"}}X\1\0\0\0aK\x01sb",
    "members of a set": b"\x8f(K\x01\x90",
    "items of a Counter": b"ccollections\nCounter\n)R(K\x01K\x02u",
    "values in a deque": b"ccollections\ndeque\n)R(K\x01e",
}


@pytest.mark.parametrize("name", ANY_PROTOCOL)
def test_what_no_unpickler_fills_is_refused(tmp_path: Path, name: str) -> None:
    """In a custom object, too, which accelerate loads with ``weights_only=False``."""
    data = zipped(b"\x80\x04" + ANY_PROTOCOL[name] + b".")
    try:
        torch.load(io.BytesIO(data), weights_only=False)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    path = tmp_path / "custom_checkpoint_0.pkl"
    path.write_bytes(data)
    assert (check(path).status == 1) == bool(said), said


FOUND: dict[str, tuple[Any, str]] = {
    "a flag that is a number": (
        Call(rebuild._rebuild_tensor_v2, (*TENSOR.args[:4], 1, OrderedDict())),
        (
            "calls torch._utils._rebuild_tensor_v2 with a wrong argument 5 (expected a bool, found "
            "an int)"
        ),
    ),
    "a parameter without arguments": (
        Call(rebuild._rebuild_parameter, ()),
        "calls torch._utils._rebuild_parameter with 0 arguments (expected 3)",
    ),
    "a list as a key": (Entries((([], 1),)), "has an unhashable key, such as a list"),
    "a device that does not exist": (
        Call(torch.device, ("foo",)),
        ("calls torch.device with a wrong argument 1 (expected a torch device, found a str)"),
    ),
    "a tensor out of its storage, in a list": (
        [Call(rebuild._rebuild_tensor_v2, (FLOATS, 4, (2, 3), (3, 1), False, OrderedDict()))],
        "reaches beyond its storage of 24 bytes",
    ),
    "gradients of integers": (
        Call(rebuild._rebuild_parameter, (NUMBERS, True, OrderedDict())),
        "calls torch._utils._rebuild_parameter with requires_grad=True for integers",
    ),
    "a tensor without strides that is larger than its storage": (
        Call(rebuild._rebuild_tensor_v2, (FLOATS, 0, (2, 4), (), False, OrderedDict())),
        "reaches beyond its storage of 24 bytes",
    ),
    "a size of 64 bits": (
        Call(
            rebuild._rebuild_tensor_v2,
            (FLOATS, 0, Call(torch.Size, ((1 << 63,),)), (0,), False, OrderedDict()),
        ),
        (
            "calls torch._utils._rebuild_tensor_v2 with a wrong argument 3 (expected a tuple of "
            "non-negative 64-bit ints"
        ),
    ),
    "a stride of 64 bits": (
        Call(rebuild._rebuild_tensor_v2, (FLOATS, 0, (1,), (1 << 66,), False, OrderedDict())),
        (
            "calls torch._utils._rebuild_tensor_v2 with a wrong argument 4 (expected a tuple of "
            "64-bit ints"
        ),
    ),
    "a stride that torch multiplies beyond 63 bits": (
        Call(rebuild._rebuild_tensor_v2, (FLOATS, 0, (2,), ((1 << 63) - 1,), False, OrderedDict())),
        "reaches beyond its storage of 24 bytes",
    ),
    "an attribute that cannot be set": (
        Call(
            torch._tensor._rebuild_from_type_v2,
            (rebuild._rebuild_tensor_v2, torch.Tensor, TENSOR.args, {"shape": 3}),
        ),
        (
            "calls torch._tensor._rebuild_from_type_v2 with a wrong argument 4 (expected a dict of "
            "attributes"
        ),
    ),
    "a dtype that is called": (
        Call(torch.float32, (1,)),
        "calls torch.float32 as a function, but it is not one",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_call_that_torch_cannot_make_is_damage_in_a_file_with_checksums(
    tmp_path: Path, name: str
) -> None:
    value, words = FOUND[name]
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(zipped(pickled({"x": value, "w": TENSOR})))
    assert refusal(path.read_bytes())
    report = check(path)
    assert [finding.code for finding in report.findings] == ["malformed-file"]
    assert words in str(report.findings[0])
    assert report.status == 1


def test_a_changed_pickle_with_its_old_checksum_stays_a_wrong_checksum(tmp_path: Path) -> None:
    data = saved({"a": torch.arange(4.0)})
    assert data.count(b"\x89") == 1
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data.replace(b"\x89", b"N"))
    assert [finding.code for finding in check(path).findings] == ["crc-mismatch"]


@pytest.mark.parametrize("key", [0, 7])
def test_a_storage_whose_key_is_a_number_is_read(tmp_path: Path, key: int) -> None:
    """torch names the record ``data/7`` after the key, whatever its type."""
    value = Call(
        rebuild._rebuild_tensor_v2,
        (Storage(torch.FloatStorage, key), 0, (2, 3), (3, 1), False, OrderedDict()),
    )
    data = zipped(pickled({"x": value}), **{"data/7": torch.arange(6.0).numpy().tobytes()})
    assert torch.load(io.BytesIO(data))["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    report = check(path)
    assert (report.status, report.findings) == (0, ())
    (state_dict,) = parsed(tmp_path, data).state_dicts
    assert [one.storage_key for one in state_dict.tensors] == [str(key)]


@pytest.mark.parametrize("encoding", ["latin1", "ascii", "utf-8"])
def test_an_encoding_that_picklers_write_needs_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """A user who may not read Python's folder cannot import ``encodings.latin_1``, and torch needs
    no such module.
    """

    def missing(name: str) -> None:
        raise LookupError(name)

    data = zipped(pickled({"x": Call(_codecs.encode, ("a", encoding))}))
    monkeypatch.setattr(codecs, "lookup", missing)
    assert torch.load(io.BytesIO(data)) == {"x": b"a"}
    parsed(tmp_path, data)


@pytest.mark.parametrize("text", [b"x", b"", b"6 4", b"64", b" 64\n", b"-1", b"6_4"])
def test_an_alignment_is_refused_where_torch_refuses_it(tmp_path: Path, text: bytes) -> None:
    data = zipped(pickled({"x": TENSOR}), **{".storage_alignment": text})
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    assert (check(path).status == 1) == bool(refusal(data))


def test_gradients_of_a_dtype_without_a_class_of_storages_are_damage(tmp_path: Path) -> None:
    """torch.save writes such a tensor, and torch.load fails: it sets the storage of a leaf with
    gradients in place.
    """
    data = saved({"x": torch.zeros(2, dtype=torch.float8_e4m3fn).requires_grad_()})
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch.load(io.BytesIO(data))
    with pytest.raises(FormatError, match="with requires_grad=True for a tensor of float8_e4m3fn"):
        parsed(tmp_path, data)


def test_long_sizes_that_many_tensors_share_take_no_time_of_their_product(tmp_path: Path) -> None:
    """Each tensor refers to the same tuple by few bytes; to look at it each time took minutes."""
    from ckptfix.formats.pickle_calls import ensure_calls
    from ckptfix.formats.pickle_stream import parse
    from ckptfix.formats.torch_tensors import storages

    sizes = (1,) * 100_000
    call = Call(rebuild._rebuild_tensor_v2, (FLOATS, 0, sizes, sizes, False, OrderedDict()))
    tree = parse(pickled([call] * 1000))
    with pytest.raises(FormatError, match="share long arguments"):
        ensure_calls(tree, storages(tree), has_checksum=True)


def test_a_key_of_tuples_is_looked_into_however_deep_it_nests(tmp_path: Path) -> None:
    from ckptfix.formats.pickle_calls import ensure_calls
    from ckptfix.formats.pickle_stream import parse

    deep = b"\x80\x02}" + b"]" + b"\x85" * 100_000 + b"K\x01s."
    with pytest.raises(FormatError, match="an unhashable key"):
        ensure_calls(parse(deep), {})
    doubled = b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
    ensure_calls(parse(doubled), {})


@dataclass
class Note:
    text: str
    tensor: torch.Tensor


class Rebuilt:
    """An object that is made by a function of torch in lower case."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.tensor, ([1, 2],)


class Plain(torch.Tensor):  # type: ignore[misc]
    pass


class WithState(torch.Tensor):  # type: ignore[misc]
    def __getstate__(self) -> str:
        return "any state"

    def __setstate__(self, state: Any) -> None:
        self.state = state


def trained(cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    net = torch.nn.Linear(3, 2)
    optimizer = cls(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def healthy() -> dict[str, Any]:
    """Return objects of every kind that people save, of which torch loads each one way or the
    other.
    """
    schedulers = torch.optim.lr_scheduler
    with_attribute, hooked = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    with_attribute.note = "kept"
    hooked.register_hook(lambda gradient: gradient)
    ordered: Any = OrderedDict(a=torch.ones(2))
    ordered._metadata = OrderedDict({"": {"version": 1}})
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])
    pair = [torch.ones(2), torch.ones(3)]
    layouts = {
        "csr": torch.eye(4).to_sparse_csr(),
        "csc": torch.eye(4).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
    }
    dtypes = (
        "float64 bfloat16 int32 bool complex64 complex32 float8_e4m3fn float4_e2m1fn_x2 uint16 "
        "uint64 bits8"
    )
    return {
        **{dtype: torch.empty(4, dtype=getattr(torch, dtype)) for dtype in dtypes.split()},
        **layouts,
        "optimizers": [
            trained(cls).state_dict()
            for cls in (
                torch.optim.SGD,
                torch.optim.AdamW,
                torch.optim.Adagrad,
                torch.optim.Adafactor,
            )
        ],
        "LambdaLR": (
            schedulers.LambdaLR(trained(torch.optim.SGD), lambda step: 0.9**step).state_dict()
        ),
        "OneCycleLR": (
            schedulers.OneCycleLR(trained(torch.optim.SGD, momentum=0.9), 0.1, 10).state_dict()
        ),
        "ReduceLROnPlateau": schedulers.ReduceLROnPlateau(trained(torch.optim.SGD)).state_dict(),
        "MultiStepLR": schedulers.MultiStepLR(trained(torch.optim.SGD), [1, 2]).state_dict(),
        "GradScaler": torch.amp.GradScaler("cpu").state_dict(),
        "random states": {
            "random_state": random.getstate(),
            "numpy_random_seed": numpy.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        },
        "numpy": [
            numpy.float64(1.5),
            numpy.array(["a"]),
            numpy.random.default_rng(),
            numpy.zeros(1 << 18),
        ],
        "dtypes": [
            numpy.dtype(text)
            for text in ("f2", ">f8", "U3", "S2", "O", "M8", "m8[25s]", "V5", "?", "G")
        ],
        "structured dtypes": [
            numpy.dtype([("a", "i4"), ("b", "O")]),
            numpy.dtype([("a", "<f8", (2,))]),
            numpy.dtype([("a", "i1"), ("b", "f8")], align=True),
            numpy.dtype((numpy.record, [(("title", "a"), "i4")])),
            numpy.dtype([]),
            numpy.dtype("i4", metadata={"x": 1}),
            numpy.dtypes.StringDType(),
            numpy.dtypes.UInt32DType,
        ],
        "arrays": [
            numpy.arange(6.0).reshape(2, 3).T,
            numpy.asfortranarray(numpy.ones((2, 3))),
            numpy.array(5),
            numpy.zeros((0, 3)),
            numpy.array(["", "\u20ac"]),
            numpy.array([b"", b"\xff"]),
            numpy.array([], "S"),
            numpy.array([None, {"a": [1]}, "text"]),
            numpy.array("2020-01-01", "M8[ns]"),
            numpy.array([1, 2], ">i2"),
            numpy.array([(1, "a")], "i4,O"),
            numpy.array([(1, 2)], "i4,i4").view(numpy.recarray),
            numpy.ma.masked_array([1, 2], [True, False]),
            numpy.array(["a"], numpy.dtypes.StringDType()),
            numpy.array([True, False]),
        ],
        "scalars": [
            numpy.str_("ab"),
            numpy.bytes_(b"a"),
            numpy.bool_(True),
            numpy.datetime64("2020"),
            numpy.timedelta64(3, "D"),
            numpy.array([(1, "a")], "i4,O")[0],
            numpy.array([(1, 2)], "i4,i4")[0],
            numpy.longdouble(1),
            numpy.complex64(1),
            numpy.float16(1),
        ],
        "numpy's random states": [
            numpy.random.RandomState(0),
            numpy.random.RandomState(0).get_state(legacy=False),
            numpy.random.Generator(numpy.random.Philox(1)),
            numpy.random.default_rng(0).bit_generator.state,
            numpy.random.MT19937(1).state,
            numpy.random.SeedSequence(3),
        ],
        "bytes": [
            b"",
            b"\xff\x00",
            bytes(range(256)) * 8192,
            bytearray(b"xy"),
            bytearray(b"\xff" * (2 << 20)),
        ],
        "numbers": [1 << 100, -5, float("nan"), 1 + 2j, "\ud800", None],
        "collections": [
            Counter("aab"),
            defaultdict(list, {1: [2]}),
            deque([1]),
            frozenset({1}),
            {1, (2, 3)},
        ],
        "keys": {
            (1, "a"): 2,
            None: 3,
            1.5: 4,
            b"k": 5,
            frozenset([1]): 6,
            torch.float32: 7,
            Note: 8,
        },
        "objects": [
            Note("a", torch.ones(2)),
            Rebuilt(),
            zoneinfo.ZoneInfo("UTC"),
            Path("/a"),
            Exception("x"),
        ],
        "OrderedDict": ordered,
        "attributes": [
            with_attribute,
            torch.ones(2).as_subclass(Plain),
            torch.ones(2).as_subclass(WithState),
        ],
        "gradients": [torch.ones(2, requires_grad=True), hooked, torch.nn.Buffer(torch.ones(2))],
        "integers": torch.nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
        "modules": [torch.nn.ParameterList([torch.ones(2)]), torch.nn.LSTM(2, 2)],
        "quantized": [
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)[1:],
            torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.quint8),
            torch.quantize_per_channel(torch.ones(2, 3), scales, zeros.float(), 0, torch.quint4x2),
        ],
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor(pair),
        "jagged": torch.nested.nested_tensor(pair, layout=torch.jagged),
        "meta": [
            torch.empty(2, 3, device="meta").t(),
            torch.nn.Parameter(torch.empty(2, device="meta")),
        ],
        "lazy": [
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.ones(2, dtype=torch.complex64).conj().imag,
        ],
        "views": [
            torch.empty(0, 3)[:, 1:],
            torch.tensor(1),
            torch.ones(1).expand(5, 0),
            torch.arange(12.0).reshape(3, 4).t()[1:],
            torch.arange(6.0).as_strided((3, 3), (1, 1)),
            torch.ones([1] * 65),
        ],
        "torch": [
            torch.device("cuda:1"),
            torch.Size([]),
            torch.strided,
            torch.per_tensor_affine,
            torch.bfloat16,
        ],
    }


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_what_torch_loads_is_read(tmp_path: Path, protocol: int, has_checksums: bool) -> None:
    torch.serialization.set_crc32_options(has_checksums)
    try:
        for name, value in healthy().items():
            for wrapped in (value, {"value": value, "weight": torch.ones(2)}):
                data = saved(wrapped, pickle_protocol=protocol)
                torch.load(io.BytesIO(data), weights_only=False)
                assert parsed(tmp_path, data).trailing == 0, name
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.fixture
def dtensor() -> Iterator[Any]:
    """Yield a function that makes a DTensor of a simulated group of four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        yield lambda *placements: DTensor.from_local(
            torch.ones(2, 3), mesh, placements, run_check=False
        )
    finally:
        torch.distributed.destroy_process_group()


def test_dtensors_that_torch_saves_are_read(tmp_path: Path, dtensor: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placements in (
        (Shard(0), Replicate()),
        (Replicate(), Partial("avg")),
        (_StridedShard(0, split_factor=2), Shard(0)),
    ):
        for protocol in (2, 4, 5):
            data = saved({"x": dtensor(*placements)}, pickle_protocol=protocol)
            torch.load(io.BytesIO(data), weights_only=protocol == 2)
            parsed(tmp_path, data)


def test_what_describes_a_dtensor_is_refused_where_torch_refuses_it(
    tmp_path: Path, dtensor: Any
) -> None:
    from torch.distributed.tensor import DeviceMesh, Partial, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    new = pickle.NEWOBJ
    cases = {
        "a shard": Call(Shard, (), ({"dim": 0},), new),
        "a shard of a wrong attribute": Call(Shard, (), ({"foo": 0},), new),
        "a shard of a text": Call(Shard, (), ({"dim": "a"},), new),
        "a shard with the state 3": Call(Shard, (), (3,), new),
        "a shard without arguments": Call(Shard, 3, ({"dim": 0},), new),
        "a sum": Call(Partial, (), ({"reduce_op": "sum"},), new),
        "a sum of nothing": Call(Partial, (), ({},), new),
        "a spec": Call(DTensorSpec, (), ({"mesh": None},), new),
        "a spec that is called": Call(DTensorSpec, (), ({"mesh": None},)),
        "sizes": Call(TensorMeta, (SIZE, (3, 1), torch.float32), (), new),
        "sizes without a dtype": Call(TensorMeta, (SIZE, (3, 1)), (), new),
        "a mesh": Call(DeviceMesh, (), ({"_dim_group_names": ["1"]},), new),
        "a mesh of a number": Call(DeviceMesh, (), ({"_dim_group_names": [1]},), new),
        "a call of a shard": Call(Call(Shard, (), ({"dim": 0},), new), ()),
    }
    for name, case in cases.items():
        data = zipped(pickled({"x": case, "w": TENSOR}))
        said = refusal(data)
        try:
            parsed(tmp_path, data)
            refused = False
        except FormatError:
            refused = True
        assert refused == bool(said), (name, said)


def test_attributes_of_a_dtensor_are_refused_where_torch_cannot_use_them(
    tmp_path: Path, dtensor: Any
) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = Call(DTensorSpec, (), ({"mesh": None},), pickle.NEWOBJ)
    slots = {"_local_tensor": TENSOR, "_spec": spec}
    strided = Call(torch.serialization._get_layout, ("torch.strided",))
    args = (
        DTensor,
        torch.float32,
        (2, 3),
        (3, 1),
        0,
        strided,
        Call(torch.device, ("cpu",)),
        False,
    )

    def made(*state: Any, cls: Any = DTensor) -> Call:
        function = rebuild._rebuild_wrapper_subclass
        return Call(torch._tensor._rebuild_from_type_v2, (function, cls, args, state))

    cases = {
        "slots": made(None, slots),
        "attributes": made({"note": 1}, slots),
        "a number": made(1, slots),
        "a tuple": made((2,), slots),
        "a class": made(torch.FloatStorage, slots),
        "another class": made(DTensor, slots),
        "a tensor of another class": made(None, slots, cls=torch.Tensor),
        "a parameter": made(None, slots, cls=torch.nn.Parameter),
        "a shape": made({"shape": 1}, slots),
        "placements": made({"placements": 1}, slots),
        "no part": made(None, {"_spec": spec}),
        "no slots": made(None, None),
        "sizes of a class": (
            made(None, slots)._replace(
                args=(
                    *made(None, slots).args[:2],
                    (*args[:2], (DTensor, 3), *args[3:]),
                    (None, slots),
                )
            )
        ),
        "a call of the class": Call(DTensor, ()),
        "a new object": Call(DTensor, (), (), pickle.NEWOBJ),
        "arguments that are the class": Call(OrderedDict, DTensor),
    }
    for name, case in cases.items():
        data = zipped(pickled({"x": case, "w": TENSOR}))
        try:
            torch.load(io.BytesIO(data))["x"].to_local()
            said = ""
        except Exception as error:
            said = str(error)
        try:
            parsed(tmp_path, data)
            refused = ""
        except FormatError as error:
            refused = str(error)
        assert bool(refused) == bool(said), (name, said, refused)


SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
ADDRESS = b"cdeepspeed.utils.tensor_fragment\nfragment_address\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
STATE = b"}X\1\0\0\0aK\x01sb"

OF_DEEPSPEED = {
    "a scaler": (SCALER + b")\x81" + STATE, True),
    "a scaler without a state": (SCALER + b")\x81", True),
    "a scaler that is called": (SCALER + b")R", False),
    "a scaler with an argument": (SCALER + b"K\x01\x85\x81", False),
    "a scaler with a state of numbers": (SCALER + b")\x81}K\x02K\x01sb", False),
    "an address": (ADDRESS + b")\x81" + STATE, True),
    "an address as a key": (b"}" + ADDRESS + b")\x81" + STATE + b"K\x01s", False),
    "an address in a key": (b"}" + ADDRESS + b")\x81" + STATE + b"\x85K\x01s", False),
    "a stage": (STAGE + b"K\x02\x85R", True),
    "a stage as a key": (b"}" + STAGE + b"K\x02\x85RK\x01s", True),
    "a stage that does not exist": (STAGE + b"K\x04\x85R", False),
    "a stage without a number": (STAGE + b")R", False),
    "a stage of a dict": (STAGE + b"}\x85R", False),
    "a call of a stage": (STAGE + b"K\x02\x85R)R", False),
}
"""Objects in the optimizer states of DeepSpeed, whether it makes them."""


@pytest.mark.parametrize("name", OF_DEEPSPEED)
def test_an_object_that_deepspeed_cannot_make_is_refused(tmp_path: Path, name: str) -> None:
    data, is_right = OF_DEEPSPEED[name]
    archive = zipped(b"\x80\x02" + data + b".")
    if is_right:
        parsed(tmp_path, archive)
    else:
        with pytest.raises(FormatError, match="the pickle"):
            parsed(tmp_path, archive)


@pytest.mark.parametrize(("count", "is_refused"), [(2, True), (4, False)])
def test_a_dtype_of_none_is_the_default_of_torch(
    tmp_path: Path, count: int, is_refused: bool
) -> None:
    """Of 4 bytes torch makes no two numbers of float32: `check` called the file clean."""
    whole, cut = tmp_path / "whole.bin", tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(count, dtype=torch.uint16)[:2]}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(cut, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry).replace(b"ctorch\nuint16\n", b"N"))
    if is_refused:
        with pytest.raises(RuntimeError, match="not resizable"):
            torch.load(cut, weights_only=True)
    else:
        assert torch.load(cut, weights_only=True)["w"].dtype is torch.float32
    assert bool(check(cut).status) is is_refused

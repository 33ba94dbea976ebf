"""Pickles that are written here: Python's pickle reads the values again."""

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind
from ckptfix.tensors.new_torch_files import Call, Global, Persistent, PickleWriter
from tests.sampling import examples

ORDERED_DICT = Global("collections", "OrderedDict")


def pickled(value: Any) -> bytes:
    writer = PickleWriter()
    writer.value(value)
    return writer.finish()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=examples(200))
@given(value=plain)
def test_plain_values_are_what_pickle_loads_again(value: Any) -> None:
    data = pickled(value)
    assert pickle.loads(data) == value
    assert repr(pickle.loads(data)) == repr(value)
    pickletools.dis(data, out=io.StringIO())  # checks the stack and the memo as well


@pytest.mark.parametrize(
    "value",
    [
        *(
            0,
            255,
            256,
            65535,
            65536,
            -1,
            -(1 << 31),
            (1 << 31) - 1,
            1 << 31,
            -(1 << 31) - 1,
            127 << 56,
            128 << 56,
        ),
        *(1 << 63, -(1 << 63), -(1 << 64), 1 << 2000),
        *(
            (),
            (1,),
            (1, 2),
            (1, 2, 3),
            (1, 2, 3, 4),
            [],
            [7],
            {},
            {"a": 1},
            {"a": 1, "b": [2.5, None, True]},
        ),
        {str(number): number for number in range(1001)},
        [[number] for number in range(300)],  # the memo outgrows a byte
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:20]}",
)
def test_numbers_and_containers_of_every_length(value: Any) -> None:
    assert pickle.loads(pickled(value)) == value


def test_equal_strings_are_pushed_once() -> None:
    text = "".join(["te", "xt"])
    data = pickled({"one": text, "two": ("text", "text"), "text": "".join(["te", "xt"])})
    assert pickle.loads(data) == {"one": "text", "two": ("text", "text"), "text": "text"}
    assert data.count(b"text") == 1


def test_objects_of_classes() -> None:
    items = {"a": Call(function=Global("torch", "Size"), args=((2, 3),))}
    made = Call(function=ORDERED_DICT, items=items, state={"extra": Global("torch", "float32")})
    loaded = pickle.loads(pickled([made, made]))
    assert loaded == [OrderedDict(a=torch.Size([2, 3]))] * 2
    assert loaded[0].extra is torch.float32


class Slotless:
    def __init__(self) -> None:
        self.kept = [1]


def test_an_object_that_is_made_by_new_and_given_its_state() -> None:
    made = Call(function=Global(__name__, "Slotless"), state={"kept": [1]}, new=True)
    assert pickle.loads(pickled(made)).kept == [1]


def test_a_persistent_id_is_pushed_and_named() -> None:
    tree = parse(pickled([Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 4))]))
    assert tree.root.items[0].kind is Kind.PERSISTENT
    storage, cls, *rest = tree.root.items[0].head
    assert storage.value == "storage"
    assert cls.is_global("torch", "FloatStorage")
    assert [getattr(one, "value", one) for one in rest] == ["0", "cpu", 4]


def test_what_has_no_place_in_a_pickle() -> None:
    with pytest.raises(TypeError, match="cannot write a bytes to a pickle"):
        pickled(b"bytes")
    with pytest.raises(UnsupportedFormat, match="an integer of 313 bytes"):
        pickled(1 << 2500)

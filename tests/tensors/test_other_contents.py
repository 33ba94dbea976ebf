"""What a pickle holds beside its state dicts: named once, at any depth and under any kind of
key.
"""

import io
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ckptfix.formats.pickle_stream import parse
from ckptfix.tensors.single_files import held_beside, leads_to

M: "dict[Any, Any]" = {"a.w": torch.ones(1), "a.b": torch.ones(1)}


def tree_of(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return parse(zipfile.ZipFile(file).read("archive/data.pkl"))


@pytest.mark.parametrize(
    ("value", "taken", "beside"),
    [
        (M, [()], ()),
        ({**M, 5: torch.ones(1), None: 1, (1, 2): 3, 2.5: 4, True: 5}, [()], ("5", "None", "<a tuple>", "2.5", "True")),
        ({"model": M, "step": 1, 7: 2}, [("model",)], ("step", "7")),
        ({"c": {"model": M, "optimizer": {"state": {}}}, "epoch": 3}, [("c", "model")], ("c.optimizer", "epoch")),
        ([M, {"x": 1}, M.copy()], [("0",), ("2",)], ("1",)),
        ({"model": M, "ema": M.copy()}, [("model",), ("ema",)], ()),
        (OrderedDict(M, ema={"w": torch.ones(1), "lr": 2}), [(), ("ema",)], ()),
        ({"a": [{"m": M}, 4]}, [("a", "0", "m")], ("a.1",)),
        ({10**60: 1, "m": M}, [("m",)], ("<a long number>",)),
    ],
)  # fmt: skip
def test_what_is_beside(
    value: Any, taken: "list[tuple[str, ...]]", beside: "tuple[str, ...]"
) -> None:
    assert held_beside(tree_of(value), taken) == beside


def test_what_leads_to_a_state_dict() -> None:
    assert leads_to(("a",), [("a", "b")])
    assert leads_to(("a", "b"), [("a", "b")])
    assert not leads_to(("b",), [("a", "b")])
    assert not leads_to(("a", "b", "c"), [("a", "b")])

"""What torch pickles say: state dicts, names, storages."""

import copy
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.torch_file import same_structure
from ckptfix.formats.torch_pickle import name_lists, state_dicts, tensor_infos
from ckptfix.formats.torch_tensors import storages
from tests.formats.making import Strip, model, nested_state_dict, parsed, saved, wrapped

DTYPES = [
    (torch.float32, "F32"), (torch.float64, "F64"), (torch.float16, "F16"),
    (torch.bfloat16, "BF16"), (torch.int64, "I64"), (torch.int32, "I32"), (torch.int16, "I16"),
    (torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.complex64, "C64"),
    (torch.complex128, "C128"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"),
    (torch.uint16, "U16"), (torch.uint32, "U32"), (torch.uint64, "U64"),
    (torch.float8_e8m0fnu, "F8_E8M0"),
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_dtypes_shapes_and_offsets(tmp_path: Path, options: dict[str, Any]) -> None:
    value = {noun: torch.zeros(2, 3, dtype=dtype) for dtype, noun in DTYPES}
    data = saved(value, **options)
    file = parsed(tmp_path, data)
    infos = {info.fqn: info for info in tensor_infos(file)}
    assert {name: info.dtype for name, info in infos.items()} == {noun: noun for _, noun in DTYPES}
    for info in infos.values():
        assert info.shape == (2, 3)
        assert info.data_offsets is not None
        begin, end = info.data_offsets
        assert end - begin == value[info.fqn].element_size() * 6


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_the_bytes_at_the_offsets_are_the_tensor(tmp_path: Path, options: dict[str, Any]) -> None:
    base = torch.arange(24, dtype=torch.int32)
    value = {
        "view": base[4:10].view(2, 3),
        "across": base.view(4, 6).t(),
        "empty": base[:0],
        "scalar": base[3],
        "w": base,
    }
    data = saved(value, **options)
    infos = {info.fqn: info for info in tensor_infos(parsed(tmp_path, data))}
    for name, tensor in value.items():
        offsets = infos[name].data_offsets
        if name == "across":
            assert offsets is None
            continue
        assert offsets is not None
        assert data[slice(*offsets)] == tensor.contiguous().numpy().tobytes()


def test_state_dicts_at_the_root_and_under_names() -> None:
    state = nested_state_dict()
    for path, value in {
        (): state,
        ("model",): {"model": state, "epoch": 3},
        ("a", "b"): {"a": {"b": state}},
    }.items():
        (found,) = state_dicts(parse(data_pkl(value)))
        assert found.path == path
        assert [tensor.fqn for tensor in found.tensors] == list(state)


def data_pkl(value: Any, **options: Any) -> bytes:
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(saved(value, **options))) as archive:
        return archive.read("archive/data.pkl")


def test_parameters_extra_state_and_unknown_values() -> None:
    value = {
        "weight": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.ones(2, 2).to_sparse(),
        "layer._extra_state": {"amax": torch.ones(3)},
        "text": "x",
    }
    (found,) = state_dicts(parse(data_pkl(value)))
    assert [tensor.fqn for tensor in found.tensors] == ["weight"]
    assert found.opaque_keys == ("sparse", "layer._extra_state", "text")
    (names,) = name_lists(parse(data_pkl(value)))
    assert [name for name, _ in names.names] == list(value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_of_a_model(protocol: int) -> None:
    tree = parse(data_pkl({"state_dict": nested_state_dict()}, pickle_protocol=protocol))
    keys, metadata = name_lists(tree)
    assert (keys.kind, metadata.kind) == ("state dict", "metadata")
    assert keys.path == metadata.path == ("state_dict",)
    assert [name for name, _ in keys.names] == list(nested_state_dict())
    assert [name for name, _ in metadata.names] == list(nested_state_dict()._metadata)  # type: ignore[attr-defined]


def test_names_of_optimizers() -> None:
    net = wrapped(model(), 1)
    optimizer = torch.optim.Adam(net.named_parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    value = {"optimizer": optimizer.state_dict(), "others": [optimizer.state_dict()]}
    tree = parse(data_pkl(value))
    assert state_dicts(tree) == ()
    places = name_lists(tree)
    assert [(place.path, place.kind) for place in places] == [
        (("optimizer", "param_groups", "0"), "param_names"),
        (("others", "0", "param_groups", "0"), "param_names"),
    ]
    assert [name for name, _ in places[0].names] == [name for name, _ in net.named_parameters()]


def test_names_of_an_fsdp_optimizer() -> None:
    value = {
        "state": {"module.a": {"exp_avg": torch.ones(1)}, "module.b": {"exp_avg": torch.ones(1)}},
        "param_groups": [{"lr": 1, "params": ["module.a", "module.b"]}],
    }
    places = name_lists(parse(data_pkl(value)))
    assert [(place.path, place.kind) for place in places] == [
        (("param_groups", "0"), "params"),
        (("state",), "optimizer state"),
    ]
    assert all([name for name, _ in place.names] == ["module.a", "module.b"] for place in places)
    assert state_dicts(parse(data_pkl(value))) == ()


def test_an_ordered_dict_of_python_2() -> None:
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x02tQ"
    tensor = b"".join([b"ctorch._utils\n_rebuild_tensor\n(", storage, b"K\x00(K\x02t(K\x01ttR"])
    data = b"\x80\x02ccollections\nOrderedDict\n](](U\x08module.a" + tensor + b"ee\x85R."
    tree = parse(data)
    (found,) = state_dicts(tree)
    assert [(t.fqn, t.dtype, t.shape) for t in found.tensors] == [("module.a", "F32", (2,))]
    assert name_lists(tree)[0].names == (("module.a", data.index(b"U\x08module")),)


def test_storages() -> None:
    (storage,) = storages(parse(data_pkl({"a": torch.ones(3, dtype=torch.float64)}))).values()
    assert storage == ("DoubleStorage", "cpu", 3, 24)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x00K\x02K\x03\x86", b"K\x07K\x02K\x03\x86"),
        (b"K\x02K\x03\x86", b"K\xffK\xff\x86"),
        (b"K\x03K\x01\x86", b"K\xffK\x01\x86"),
    ],
)
def test_a_tensor_beyond_its_storage_is_malformed(old: bytes, new: bytes) -> None:
    data = data_pkl({"a": torch.ones(2, 3)})
    assert old in data
    with pytest.raises(FormatError, match="beyond its storage"):
        state_dicts(parse(data.replace(old, new)))


def test_hostile_persistent_ids() -> None:
    for data in (b"X\x01\0\0\0aQ.", b"NQ.", b"Pabc\n.", b"(NNNNNtQ.", b"K\x01Q."):
        with pytest.raises(FormatError, match="not a torch storage"):
            storages(parse(data))


def pair(depth_one: int, depth_other: int, **changes: Any) -> object:
    one, other = nested_state_dict(depth_one), nested_state_dict(depth_other)
    other.update(changes)
    strips = Strip("module." * depth_one), Strip("module." * depth_other)
    return same_structure(parse(data_pkl(one)), parse(data_pkl(other)), *strips)


@pytest.mark.parametrize("depths", [(0, 0), (0, 1), (0, 2), (2, 0), (1, 3)])
def test_a_wrapped_double_has_the_same_structure(depths: tuple[int, int]) -> None:
    pairs = pair(*depths)
    assert isinstance(pairs, tuple)
    assert len(pairs) == len(set(pairs)) == 8  # the tied weight shares one storage


def test_structures_that_differ() -> None:
    assert pair(0, 1, **{"module.0.bias": torch.ones(4, dtype=torch.float64)}) is None
    assert pair(0, 1, **{"module.0.bias": torch.ones(5)}) is None
    assert pair(0, 1, **{"module.2.weight": torch.ones(4, 3)}) is None  # no longer tied
    assert pair(0, 1, **{"module.more": 1}) is None
    assert pair(0, 1, **{"module.0.bias": torch.nn.Parameter(torch.ones(4))}) is None
    one, other = nested_state_dict(0), nested_state_dict(0)
    other._metadata["1"]["version"] = 1  # type: ignore[attr-defined]
    assert (
        same_structure(parse(data_pkl(one)), parse(data_pkl(other)), Strip(""), Strip("")) is None
    )


def test_equal_optimizers_have_the_same_structure() -> None:
    def optimizer(learning_rate: float) -> dict[str, Any]:
        net = model()
        result = torch.optim.Adam(net.parameters(), lr=learning_rate)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        result.step()
        state: dict[str, Any] = result.state_dict()
        return state

    trees = [parse(data_pkl(optimizer(rate))) for rate in (0.1, 0.1, 0.2)]
    assert same_structure(trees[0], trees[1], Strip(""), Strip("")) is not None
    assert same_structure(trees[0], trees[2], Strip(""), Strip("")) is None


def test_a_dict_met_twice_is_reported_once() -> None:
    state = OrderedDict(a=torch.ones(1))
    assert [found.path for found in state_dicts(parse(data_pkl({"x": state, "y": state})))] == [
        ("x",)
    ]


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x10tQ"


def tensor(
    shape: bytes = b"K\4\x85", stride: bytes = b"K\1\x85", storage: bytes = STORAGE
) -> bytes:
    end = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + shape + stride + end


MANY = 4000
KEYS = b"(" + b"".join(text(f"k{number}") + b"N" for number in range(MANY)) + b"u"
DIMENSIONS = b"(" + b"K\1" * MANY + b"tq\1"
QUADRATIC = {
    "one group many times": b"}(" + text("state") + b"}" + text("param_groups") + b"](}" + KEYS + b"q\1"
    + b"h\1" * MANY + b"eu.",
    "one list of names in many groups": b"}(" + text("state") + b"}" + text("param_groups") + b"](](" + text("a")
    + b"e(" + (text("a") + b"q\2") * MANY + b"1" + b"](" + b"h\2" * MANY + b"eq\1"
    + (b"}" + text("params") + b"h\1s") * MANY + b"eu.",
    "one state set many times": b"}(" + text("x") + b"ccollections\nOrderedDict\n)R(" + text("w") + tensor() + b"u}"
    + KEYS + b"q\1b" + b"h\1b" * MANY + b"u.",
    "one state of many dicts": tensor() + b"q\2}" + KEYS + b"q\1}(" + b"".join(
        text(f"d{number}") + b"ccollections\nOrderedDict\n)R" + text("w") + b"h\2sh\1b" for number in range(MANY)
    ) + b"u.",
    "one shape in many tensors": DIMENSIONS + b"0}(" + b"".join(
        text(f"k{number}") + tensor(b"h\1", b"h\1") for number in range(MANY)
    ) + b"u.",
    "one list of pairs in many dicts": b"](" + b"".join(
        b"](" + text(f"k{number}") + b"Ne" for number in range(MANY)
    ) + b"eq\1}(" + b"".join(
        text(f"d{number}") + b"ccollections\nOrderedDict\nh\1\x85R" for number in range(MANY)
    ) + b"u.",
}  # fmt: skip


@pytest.mark.parametrize("what", QUADRATIC)
def test_what_is_shared_a_thousand_times_is_looked_into_once(what: str) -> None:
    tree = parse(b"\x80\x02" + QUADRATIC[what])
    begin = time.process_time()
    with suppress(FormatError):
        name_lists(tree)
    with suppress(FormatError):
        state_dicts(tree)
    assert time.process_time() - begin < 20


def test_copies_of_a_state_dict_may_share_their_metadata() -> None:
    state = nested_state_dict()
    tree = parse(data_pkl({"model": state, "ema": copy.copy(state)}))
    assert [(place.path, place.kind) for place in name_lists(tree)] == [
        (("model",), "state dict"),
        (("model",), "metadata"),
        (("ema",), "state dict"),
        (("ema",), "metadata"),
    ]


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        (b"(" + text("boo") + b"K\0\x8a\x0a" + bytes(9) + b"\1t", b"(K\1K\1K\1t"),
        (b"K\0\x8a\x0a" + bytes(9) + b"\1" + text("boo") + b"\x87", b"K\1K\1K\1\x87"),
        (b"K\0\x8b\x00\x10\0\0" + b"\x7f" * 4096 + b"\x86", b"K\1K\1\x86"),
        (b"K\0K\2\x86", b"K\1\x8b\x00\x10\0\0" + b"\x7f" * 4096 + b"\x86"),
        (b"K\0K\2\x86", b"K\1" + text("boo") + b"\x86"),
        (b"K\0K\2\x86", b"K\1J\xff\xff\xff\xff\x86"),
        (b"(" + b"K\1" * 65 + b"t", b"(" + b"K\1" * 65 + b"t"),
    ],
)
def test_shapes_that_are_no_sizes_are_no_tensors(shape: bytes, stride: bytes) -> None:
    tree = parse(b"\x80\x02}" + text("w") + tensor(shape, stride) + b"s.")
    (found,) = state_dicts(tree)
    assert (found.tensors, found.opaque_keys) == ((), ("w",))


def test_an_empty_tensor_of_huge_dimensions_is_empty() -> None:
    huge = b"\x8a\x08" + bytes(7) + b"\x10"
    (found,) = state_dicts(
        parse(
            b"\x80\x02}" + text("w") + tensor(b"(" + huge * 3 + b"K\0t", b"(K\1K\1K\1K\1t") + b"s."
        )
    )
    assert found.tensors[0][2:4] == ((1 << 60,) * 3 + (0,), (1,) * 4)
    assert (found.tensors[0].begin, found.tensors[0].end) == (0, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x10", b"\x8b\x00\x10\0\0" + b"\x7f" * 4096),
        (b"K\x10", b"\x8a\x08" + bytes(7) + b"\x40"),
        (text("0"), text("0" * 2000)),
        (text("cpu"), text("cpu" * 2000)),
    ],
)
def test_storages_that_cannot_be(old: bytes, new: bytes) -> None:
    tree = parse(b"\x80\x02}" + text("w") + tensor(storage=STORAGE.replace(old, new)) + b"s.")
    with pytest.raises(FormatError, match="not a torch storage"):
        state_dicts(tree)


def test_numbers_that_are_still_to_be_conjugated_or_negated_are_opaque(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    lazy = {"conjugated": numbers.conj(), "negated": numbers.clone().conj().imag, "plain": numbers}
    (found,) = parsed(tmp_path, saved(lazy)).state_dicts
    assert [tensor.fqn for tensor in found.tensors] == ["plain"]
    assert found.opaque_keys == ("conjugated", "negated")


class Made:
    """A value that is pickled as a call, and a state for what the call returns."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


GOOD, OTHER = torch.ones(4), torch.zeros(4)
REBUILD, ARGUMENTS = GOOD.__reduce_ex__(2)
STORAGE_OF_OTHER = OTHER.__reduce_ex__(2)[1][0]
WITH_STATE = torch._utils._rebuild_parameter_with_state
FROM_TYPE = torch._tensor._rebuild_from_type_v2


@pytest.mark.parametrize(
    "value",
    [
        Made(REBUILD, ARGUMENTS, (STORAGE_OF_OTHER, 0, torch.Size([4]), (1,))),
        Made(FROM_TYPE, (REBUILD, torch.Tensor, ARGUMENTS, {"data": OTHER})),
        Made(FROM_TYPE, (REBUILD, torch.nn.Parameter, ARGUMENTS, ({}, {"data": OTHER}))),
        Made(WITH_STATE, (GOOD, False, OrderedDict(), {"data": OTHER})),
        Made(
            REBUILD,
            (*ARGUMENTS[:5], Made(WITH_STATE, (GOOD, False, OrderedDict(), {"real": OTHER}))),
        ),
        Made(WITH_STATE, (GOOD, False, OrderedDict(), Counter({"data": OTHER}))),
    ],
    ids=[
        "state",
        "data",
        "data in slots",
        "data of a parameter",
        "real of another one in the storage",
        "counter",
    ],
)
def test_numbers_that_are_set_after_a_tensor_was_made_are_malformed(
    tmp_path: Path, value: object
) -> None:
    data = saved({"w": value, "good": GOOD})
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    assert torch.equal(torch.load(path)["w"], OTHER), "torch loads what is not in the storage"
    with pytest.raises(FormatError, match="then replaces the tensor's numbers"):
        storages(parsed(tmp_path, data).tree)


@pytest.mark.parametrize(
    "made_from", [{"x": OTHER}, (("x", OTHER),), OrderedDict(x=OTHER), [{"x": 1, OTHER: 2}]]
)
def test_a_dict_that_is_made_from_no_list_of_pairs_is_malformed(made_from: object) -> None:
    data = data_pkl(Made(OrderedDict, (made_from,), None, None, iter([("good", GOOD)])))
    with pytest.raises(
        FormatError, match="an OrderedDict is made from something other than a list of pairs"
    ):
        state_dicts(parse(data))


def test_attributes_of_parameters_are_read_over(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.tensor_parallel = True
    data = saved({"weight": weight, "data": {"real": 1}})
    found, *_ = parsed(tmp_path, data).state_dicts
    assert [tensor.fqn for tensor in found.tensors] == ["weight"]

"""What a pickle of torch says: its state dicts, its tensors, its storages, and every place where names live.

Facts from torch 2.13: ``torch/_utils.py`` (``_rebuild_*``), ``torch/serialization.py`` (``persistent_id``),
``torch/optim/optimizer.py`` (``state_dict``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, attribute, child, is_dict_like, pairs
from ckptfix.formats.tensor import DTYPE_BITS, TensorInfo

MAX_NESTING = 4
"""How many dicts deep a state dict is looked for: ``checkpoint["state"]["model"]`` is 2."""

MAX_LIST = 64
"""Longest list that is looked into: a few optimizers, not a data set."""

STORAGE_DTYPES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128",
}  # fmt: skip
"""Typed storage classes -> dtype in safetensors' nouns."""

TORCH_DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "complex128": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""``torch.dtype`` names -> dtype in safetensors' nouns. Types below a byte have none here."""

_OTHER_SIZES = {
    "UntypedStorage": 1, "QUInt8Storage": 1, "QInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}  # fmt: skip
_PLAIN_TENSOR_TYPES = frozenset(
    {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}
)
_MAX_WRAPPED = 8


class PickledTensor(NamedTuple):
    """A tensor under a string key.

    ``stride`` and ``storage_offset`` count elements, ``begin`` and ``end`` bytes from the start of the storage: what
    the tensor spans when it is contiguous, else both None. ``site`` is where the key was pushed.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_key: str
    storage_offset: int
    begin: int | None
    end: int | None
    site: int


class PickledStorage(NamedTuple):
    """A storage: its class (``FloatStorage``), where it lived (``cpu``), its elements and its bytes."""

    type: str
    location: str
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PickledStateDict:
    """A dict with tensors under string keys. ``path``: the keys that lead to it. ``opaque_keys``: other values."""

    path: tuple[str, ...]
    tensors: tuple[PickledTensor, ...]
    opaque_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NameList:
    """A place where names live.

    ``kind``: "state dict" (its keys), "metadata" (module names without trailing dot in the ``_metadata`` of the state
    dict of the same path, "" is the root), or of an optimizer "param_names", "params" (FSDP) and "optimizer state"
    (its string keys). ``names``: each name with the site that pushed it. ``node``: the dict or list itself.
    """

    path: tuple[str, ...]
    kind: str
    names: tuple[tuple[str, int], ...]
    node: Node = field(repr=False, compare=False)


class HasTensors(Protocol):
    """A file of a torch pickle: its state dicts, and storage key -> offset in the file and length, in bytes."""

    @property
    def state_dicts(self) -> tuple[PickledStateDict, ...]:
        """The state dicts of the pickle."""

    @property
    def storage_ranges(self) -> Mapping[str, tuple[int, int]]:
        """Where the storages are."""


def state_dicts(tree: PickleTree) -> tuple[PickledStateDict, ...]:
    """Return every state dict, at the root or under string keys.

    Raises FormatError when a tensor does not lie inside its storage, or as ``storages`` does.
    """
    known = storages(tree)
    found = []
    for path, node in _dicts(tree):
        if is_optimizer(node):
            continue
        tensors: list[PickledTensor] = []
        opaque: list[str] = []
        any_tensor = False
        for key, value in pairs(node):
            if type(key) is not Text:
                continue
            tensor = _tensor(key, value, known) if type(value) is Node else None
            if tensor is not None:
                tensors.append(tensor)
            else:
                opaque.append(key.value)
                any_tensor = any_tensor or is_tensor(value)
        if tensors or any_tensor:
            found.append(PickledStateDict(path, tuple(tensors), tuple(opaque)))
    return tuple(found)


def name_lists(tree: PickleTree) -> tuple[NameList, ...]:
    """Return every place where names live, with the sites to rewrite."""
    found: list[NameList] = []
    for path, node in _dicts(tree):
        if is_optimizer(node):
            found += _optimizer_names(path, node)
        elif any(type(key) is Text and is_tensor(value) for key, value in pairs(node)):
            found.append(NameList(path, "state dict", _keys(node), node))
            metadata = attribute(node, "_metadata")
            if is_dict_like(metadata):
                found.append(NameList(path, "metadata", _keys(metadata), metadata))
    return tuple(found)


def storages(tree: PickleTree) -> dict[str, PickledStorage]:
    """Return every storage that the pickle refers to, by its key.

    Raises FormatError for a persistent id that is none of torch's, or a key with two meanings.
    """
    found: dict[str, PickledStorage] = {}
    for node in tree.persistent:
        key, storage = read_storage(node)
        if found.setdefault(key, storage) != storage:
            raise FormatError(f"the storage {key!r} is {found[key]} in one place and {storage} in another")
    return found


def read_storage(node: Node) -> tuple[str, PickledStorage]:
    """Return the key and the storage of a persistent id ``("storage", class, key, location, numel)``.

    Legacy files add a sixth value, the view into a larger storage, which no torch since 0.4 writes.
    Raises FormatError for anything else.
    """
    pid = node.head
    if type(pid) is tuple and len(pid) in (5, 6) and type(pid[0]) is Text and pid[0][0] == "storage":
        _, cls, key, location, numel = pid[:5]
        if type(cls) is Node and cls.kind is Kind.GLOBAL and type(key) is Text and type(location) is Text:
            name = cls.head[1]
            size = _element_size(name)
            if size and type(numel) is int and numel >= 0 and pid[5:] in ((), (None,)):
                return key[0], PickledStorage(name, location[0], numel, numel * size)
    raise FormatError("the pickle holds a persistent id that is no storage of torch's")


def tensor_infos(file: HasTensors) -> tuple[TensorInfo, ...]:
    """Return the tensors of every state dict with the offsets of their bytes in the file."""
    infos = []
    ranges = file.storage_ranges
    for state_dict in file.state_dicts:
        for fqn, dtype, shape, _, key, _, begin, end, _ in state_dict.tensors:
            storage = ranges.get(key)
            offsets = None
            if storage is not None and begin is not None and end is not None:
                offsets = (storage[0] + begin, storage[0] + end)
            infos.append(TensorInfo(fqn, dtype, shape, offsets))
    return tuple(infos)


def is_optimizer(node: Node) -> bool:
    """Whether a dict is an optimizer's ``state_dict()``: it has ``state`` and ``param_groups``, and few keys more."""
    if len(node.entries or ()) > 2 * MAX_LIST:
        return False
    keys = {key.value for key, _ in pairs(node) if type(key) is Text}
    return keys >= {"state", "param_groups"}


def is_tensor(value: object) -> bool:
    """Whether a value is made by one of torch's rebuild functions, known here or not."""
    if type(value) is not Node or value.kind is not Kind.CALL:
        return False
    head = value.head
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    module, name = head.head
    return module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild_")


def _dicts(tree: PickleTree) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Iterate over the dicts that can be state dicts, each once, with the keys that lead to it."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree.root)]
    while waiting:
        path, node = waiting.pop()
        if type(node) is not Node or id(node) in seen:
            continue
        seen.add(id(node))
        if is_dict_like(node):
            yield path, node
            if len(path) < MAX_NESTING and not is_optimizer(node):
                waiting += reversed(_children(path, node))
        elif node.kind is Kind.LIST and len(path) < MAX_NESTING and len(node.items or ()) <= MAX_LIST:
            items = enumerate(node.items or ())
            waiting += reversed([((*path, str(index)), value) for index, value in items])


def _children(path: tuple[str, ...], node: Node) -> list[tuple[tuple[str, ...], Any]]:
    # What a module keeps as its extra state is the module's own affair, dict or not.
    return [
        ((*path, key.value), value)
        for key, value in pairs(node)
        if type(value) is Node
        and (value.kind is Kind.LIST or is_dict_like(value))
        and type(key) is Text
        and not key.value.endswith("_extra_state")
    ]


def _keys(node: Node) -> tuple[tuple[str, int], ...]:
    return tuple([(key.value, key.site) for key, _ in pairs(node) if type(key) is Text])


def _optimizer_names(path: tuple[str, ...], node: Node) -> Iterator[NameList]:
    groups = child(node, "param_groups")
    for index, group in enumerate((groups.items or ()) if type(groups) is Node else ()):
        for kind in ("param_names", "params"):
            names = child(group, kind)
            if type(names) is Node and names.kind is Kind.LIST:
                texts = tuple([(item.value, item.site) for item in names.items or () if type(item) is Text])
                if texts:
                    yield NameList((*path, "param_groups", str(index)), kind, texts, names)
    state = child(node, "state")
    if is_dict_like(state) and _keys(state):
        yield NameList((*path, "state"), "optimizer state", _keys(state), state)


def _tensor(key: Text, node: Node, known: Mapping[str, PickledStorage]) -> PickledTensor | None:
    """Return the tensor that a call makes, None when it is no plain tensor or of a type without a noun."""
    function, args = _unwrapped(node)
    storage_node = args[0] if args else None
    if type(storage_node) is not Node or storage_node.kind is not Kind.PERSISTENT:
        return None
    storage_key = storage_node.head[2].value  # read_storage has checked its form
    storage = known[storage_key]
    dtype = STORAGE_DTYPES.get(storage.type)
    if function == "_rebuild_tensor_v3":
        dtype = _dtype(args[6]) if len(args) > 6 else None
    elif function != "_rebuild_tensor_v2" and function != "_rebuild_tensor":
        return None
    if dtype is None or len(args) < 4:
        return None
    offset, shape, stride = args[1], _integers(args[2]), _integers(args[3])
    if type(offset) is not int or shape is None or stride is None or len(shape) != len(stride):
        return None
    begin, end = _span(key, dtype, offset, shape, stride, storage.nbytes)
    return PickledTensor(key.value, dtype, shape, stride, storage_key, offset, begin, end, key.site)


def _unwrapped(node: Node) -> tuple[str, tuple[Any, ...]]:
    """Return the rebuild function and its arguments, out of a Parameter or a tensor with attributes."""
    for _ in range(_MAX_WRAPPED):
        args = node.args
        if not is_tensor(node) or type(args) is not tuple:
            break
        name = node.head.head[1]
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and args and type(args[0]) is Node:
            node = args[0]
        elif name == "_rebuild_from_type_v2" and len(args) == 4 and _is_plain(args[1]):
            node = Node(Kind.CALL, args[0], args[2])
        else:
            return name, args
    return "", ()


def _is_plain(cls: object) -> bool:
    return type(cls) is Node and cls.kind is Kind.GLOBAL and cls.head in _PLAIN_TENSOR_TYPES


def _dtype(value: object) -> str | None:
    if type(value) is Node and value.kind is Kind.GLOBAL and value.head[0] == "torch":
        return TORCH_DTYPES.get(value.head[1])
    return None


def _integers(value: Any) -> tuple[int, ...] | None:
    if type(value) is Node and value.kind is Kind.CALL and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0] if type(value.head) is Node and value.head.is_global("torch", "Size") else None
    if type(value) is not tuple:
        return None
    for item in value:
        if type(item) is not int or item < 0:
            return None
    return value


def _span(
    key: Text, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int
) -> tuple[int | None, int | None]:
    """Return the bytes of its storage that a tensor spans, (None, None) when it is not contiguous."""
    size = DTYPE_BITS[dtype] // 8
    last, count, contiguous = offset, 1, True
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != count:
            contiguous = False
        count *= length
        last += (length - 1) * step
        if count > nbytes or last * size > nbytes:  # also keeps the numbers small, however many dimensions
            break
    else:
        if 0 in shape:
            return offset * size, offset * size
        if offset >= 0 and (last + 1) * size <= nbytes:
            return (offset * size, (offset + count) * size) if contiguous else (None, None)
    if 0 in shape:
        return 0, 0
    raise FormatError(f"the tensor {key.value!r} reaches beyond its storage of {nbytes} bytes")


def _element_size(storage_type: str) -> int:
    dtype = STORAGE_DTYPES.get(storage_type)
    return DTYPE_BITS[dtype] // 8 if dtype else _OTHER_SIZES.get(storage_type, 0)

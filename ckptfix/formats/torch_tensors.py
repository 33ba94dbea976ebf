"""Tensors and storages as a pickle of torch names them.

Facts from torch 2.13: ``torch/_utils.py`` (``_rebuild_*``), ``torch/serialization.py``
(``persistent_id``).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, every_node, pairs
from ckptfix.formats.tensor import DTYPE_BITS

STORAGE_DTYPES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
}  # fmt: skip
"""Typed storage classes -> dtype in safetensors' nouns."""

TORCH_DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""``torch.dtype`` names -> dtype in safetensors' nouns. Types below a byte have none here."""

_OTHER_SIZES = {
    "UntypedStorage": 1, "QUInt8Storage": 1, "QInt8Storage": 1, "QInt32Storage": 4,
    "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip
_PLAIN_TENSOR_TYPES = frozenset(
    {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}
)
_MAX_WRAPPED = 8
_MANY = 1 << 62
_MOST = (1 << 63) - 1
"""The largest size, stride or number of elements that torch takes."""

# Of which torch can make a tensor; a million tensors can share one longer shape.
_MAX_DIMENSIONS = 64
_MAX_KEY = 1024
_WITH_STATE = {
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._tensor", "_rebuild_from_type_v2"),
}
_SETTERS = ("data", "real", "imag", "__class__")
"""Names of torch's own attributes of a tensor that change its numbers when they are set."""
_REBUILD_V2 = ("torch._utils", "_rebuild_tensor_v2")


class PickledTensor(NamedTuple):
    """A tensor under a string key.

    ``stride`` and ``storage_offset`` count elements, ``begin`` and ``end`` bytes from the start of
    the storage: what the tensor spans when it is contiguous, else both None. ``site`` is where the
    key was pushed.
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

    @property
    def view(self) -> tuple[object, ...]:
        """Common identity of two names of one tensor: the same elements of one storage, in one
        shape and dtype.
        """
        return self.storage_key, self.storage_offset, self.dtype, self.shape, self.stride


class PickledStorage(NamedTuple):
    """A storage: its class (``FloatStorage``), where it lived (``cpu``), its elements and its
    bytes.
    """

    type: str
    location: str
    numel: int
    nbytes: int


def storages(tree: PickleTree) -> dict[str, PickledStorage]:
    """Return every storage that the pickle refers to, by its key.

    Raises FormatError for a persistent id that is none of torch's, a key with two meanings, or a
    pickle that sets the numbers of a tensor itself.
    """
    _ensure_not_set(tree)
    found: dict[str, PickledStorage] = {}
    for node in tree.persistent:
        key, storage = read_storage(node)
        if found.setdefault(key, storage) != storage:
            raise FormatError(
                f"the storage {key!r:.80} is {found[key]} in one place and {storage} in another"
            )
    return found


def _ensure_not_set(tree: PickleTree) -> None:
    """Raise FormatError where the numbers of a tensor are set after it was made, as no torch writes
    it.

    Loads would give these numbers, with ``weights_only``, too, and everything here those of the
    storage.
    """
    if not any(is_rebuild(*name) for name in tree.built):
        if not _WITH_STATE & tree.globals.keys() or not any(
            text.value in _SETTERS for text in tree.texts
        ):
            return
        if not tree.leftover and not any(map(_sets_numbers, every_node(tree.root))):
            return
    raise FormatError(
        "the pickle makes a tensor from its storage and then replaces the tensor's numbers"
    )


def _sets_numbers(node: Node) -> bool:
    """Return whether a call makes a tensor with attributes that are not its own."""
    head, args = node.head, node.args
    is_made = node.kind is Kind.CALL and type(head) is Node and head.kind is Kind.GLOBAL
    if not is_made or head.head not in _WITH_STATE:
        return False
    state = args[3] if type(args) is tuple and len(args) == 4 else ()
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        is_plain = type(part) is Node and part.kind is Kind.DICT
        if part is not None and not is_plain:
            return True
        if any(type(key) is not Text or key.value in _SETTERS for key, _ in pairs(part)):
            return True
    return False


def read_storage(node: Node) -> tuple[str, PickledStorage]:
    """Return the key and the storage of a persistent id ``("storage", class, key, location,
    numel)``.

    Legacy files add a sixth value, the view into a larger storage, which no torch since 0.4 writes.
    Raises FormatError for anything else.
    """
    pid = node.head
    if (
        type(pid) is tuple
        and len(pid) in (5, 6)
        and type(pid[0]) is Text
        and pid[0][0] == "storage"
    ):
        _, cls, key, location, numel = pid[:5]
        if (
            type(cls) is Node
            and cls.kind is Kind.GLOBAL
            and type(key) is Text
            and type(location) is Text
        ):
            name = cls.head[1]
            size = _element_size(name)
            if (
                size
                and type(numel) is int
                and 0 <= numel < _MANY
                and (len(pid) == 5 or pid[5] is None)
                and len(key[0]) + len(location[0]) <= _MAX_KEY
            ):
                values = (name, location[0], numel, numel * size)
                storage: PickledStorage = tuple.__new__(PickledStorage, values)  # as in read_tensor
                return key[0], storage
        if type(key) is int and len(pid) == 5 and 0 <= key < _MANY:
            # torch names the record of a zip file after the key, whatever its type.
            node.head = (*pid[:2], Text(str(key), 0, 0), *pid[3:])
            return read_storage(node)
    raise FormatError("the pickle has a persistent id that is not a torch storage")


def is_tensor(value: object) -> bool:
    """Return whether a value is made by one of torch's rebuild functions, known here or not."""
    if type(value) is not Node or value.kind is not Kind.CALL:
        return False
    head = value.head
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    return is_rebuild(*head.head)


def is_rebuild(module: str, name: str) -> bool:
    """Return whether a global is one of torch's rebuild functions, known here or not."""
    return name.startswith("_rebuild_") and module in ("torch._utils", "torch._tensor")


META_TENSOR = ("torch._utils", "_rebuild_meta_tensor_no_storage")
"""The function that makes a tensor on the meta device: it has a dtype and a shape, and no numbers.
"""

SPARSE = "a sparse tensor"
"""The words of ``kind_of_tensor`` for every sparse layout."""

_KINDS = {
    "_rebuild_sparse_tensor": SPARSE,
    "_rebuild_sparse_csr_tensor": SPARSE,
    "_rebuild_nested_tensor": "a nested tensor",
    META_TENSOR[1]: "a tensor on the meta device, which has no data",
    "_rebuild_device_tensor_from_numpy": "a tensor on a device without storages",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor on a device without storages",
}


def kind_of_tensor(node: Node) -> str:
    """Return the kind of a tensor that ``read_tensor`` does not read, in words: "a quantized tensor
    (torch.qint8)".
    """
    name, args = _unwrapped(node)
    if name in _KINDS:
        return _KINDS[name]
    storage = (
        args[0].head if args and type(args[0]) is Node and args[0].kind is Kind.PERSISTENT else None
    )
    # read_storage has checked its form.
    storage_type = storage[1].head[1] if storage is not None else ""
    if name == "_rebuild_qtensor":
        dtype = storage_type.removesuffix("Storage").lower()
        return f"a quantized tensor (torch.{dtype})" if dtype else "a quantized tensor"
    if name in ("_rebuild_from_type_v2", "_rebuild_wrapper_subclass"):
        cls = next(
            (one.head[1] for one in args[:2] if type(one) is Node and one.kind is Kind.GLOBAL), ""
        )
        return f"a tensor of class {cls}" if cls else "a tensor of an unknown class"
    if name == "_rebuild_tensor_v3" and len(args) > 6 and _dtype(args[6]) is None:
        dtype = args[6].head[1] if type(args[6]) is Node and args[6].kind is Kind.GLOBAL else ""
        return f"a tensor of torch.{dtype}" if dtype else "a tensor of an unknown dtype"
    plain = 7 if name == "_rebuild_tensor_v3" else 6
    if (
        name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
        and len(args) > plain
        and _is_lazy(args[plain])
    ):
        return "a conjugated or negated tensor, whose bytes differ from its values"
    return f"a tensor of an unknown kind ({name})" if name else "a tensor of an unknown kind"


def read_tensor(key: Text, node: Node, known: Mapping[str, PickledStorage]) -> PickledTensor | None:
    """Return the tensor that a call makes, None for other kinds of tensors or a dtype without a
    noun.

    A conjugated or negated view is not plain: its bytes are not its numbers.
    """
    head, args = node.head, node.args
    function = "_rebuild_tensor_v2"  # nearly every tensor: no detour for it
    if (
        node.kind is not Kind.CALL
        or type(head) is not Node
        or head.head != _REBUILD_V2
        or type(args) is not tuple
    ):
        function, args = _unwrapped(node)
    storage_node = args[0] if len(args) >= 4 else None
    if type(storage_node) is not Node or storage_node.kind is not Kind.PERSISTENT:
        return None
    storage_key = storage_node.head[2].value  # read_storage has checked its form
    storage = known[storage_key]
    dtype = STORAGE_DTYPES.get(storage.type)
    plain = 6
    if function == "_rebuild_tensor_v3":
        dtype = _dtype(args[6]) if len(args) > 6 else None
        plain = 7
    elif function != "_rebuild_tensor_v2" and function != "_rebuild_tensor":
        return None
    if len(args) > plain and _is_lazy(args[plain]):
        return None
    offset, shape, stride = args[1], _sizes(args[2]), _sizes(args[3])
    dimensions = len(shape)
    if (
        dtype is None
        or type(offset) is not int
        or offset < 0
        or dimensions != len(stride)
        or dimensions > _MAX_DIMENSIONS
        or (span := _span(DTYPE_BITS[dtype] // 8, offset, shape, stride, storage.nbytes)) is None
    ):
        if all(type(number) is int for number in (offset, *shape, *stride)) and (
            min(offset, *shape, 0) < 0
            or (stride and dimensions != len(stride))
            # Without strides torch makes a contiguous tensor, which no pickler leaves to it.
            # It ignores the stride of a dimension of length 1, and all strides of an empty tensor.
            or (
                0 not in shape
                and any(
                    step < 0 and length > 1 for length, step in zip(shape, stride, strict=False)
                )
            )
        ):
            # Tensor.set_() of torch raises a RuntimeError; read as "no plain tensor" it was left
            # out, and nothing said.
            raise FormatError(
                f"the tensor {key.value!r:.200} has an offset, sizes or strides that torch refuses"
            )
        return None
    begin, end = span
    if end is not None and end > storage.nbytes:
        raise FormatError(
            f"the tensor {key.value!r:.200} reaches beyond its storage of {storage.nbytes} bytes"
        )
    made: PickledTensor = tuple.__new__(  # half the time of a call of the class
        PickledTensor, (key.value, dtype, shape, stride, storage_key, offset, begin, end, key.site)
    )
    return made


def _unwrapped(node: Node) -> tuple[str, tuple[Any, ...]]:
    """Return the rebuild function and its arguments, out of a Parameter or a tensor with
    attributes.
    """
    for _ in range(_MAX_WRAPPED):
        args = node.args
        if not is_tensor(node) or type(args) is not tuple:
            break
        name = node.head.head[1]
        if (
            name in ("_rebuild_parameter", "_rebuild_parameter_with_state")
            and args
            and type(args[0]) is Node
        ):
            node = args[0]
        elif name == "_rebuild_from_type_v2" and len(args) == 4 and _is_plain(args[1]):
            node = Node(Kind.CALL, args[0], args[2])
        else:
            return name, args
    return "", ()


def _is_plain(cls: object) -> bool:
    return type(cls) is Node and cls.kind is Kind.GLOBAL and cls.head in _PLAIN_TENSOR_TYPES


def _is_lazy(metadata: object) -> bool:
    """Return whether the numbers are still to be conjugated or negated
    (``torch._utils.get_tensor_metadata``).
    """
    return (
        type(metadata) is not Node or metadata.kind is not Kind.DICT or metadata.entries is not None
    )


def _dtype(value: object) -> str | None:
    if type(value) is Node and value.kind is Kind.GLOBAL and value.head[0] == "torch":
        return TORCH_DTYPES.get(value.head[1])
    return None


def _sizes(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, or the one inside a ``torch.Size``."""
    if (
        type(value) is Node
        and value.kind is Kind.CALL
        and type(value.args) is tuple
        and len(value.args) == 1
    ):
        value = (
            value.args[0]
            if type(value.head) is Node and value.head.is_global("torch", "Size")
            else None
        )
    return value if type(value) is tuple else (None,)


def _span(
    size: int, offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...], nbytes: int
) -> tuple[int | None, int | None] | None:
    """Return the bytes of its storage that a tensor spans.

    (None, None) when it is not contiguous, None when shape or stride are not sizes. An end beyond
    ``nbytes`` marks any tensor, contiguous or not, that needs more than its storage has.
    """
    count, last, contiguous, empty, huge = 1, offset, True, False, False
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if type(length) is not int or type(step) is not int or length < 0 or step < 0:
            return None
        if length > 1:
            if step != count:
                contiguous = False
            count *= length
            last += (length - 1) * step
            # Hostile, unless empty: the numbers must not grow without bound.
            if count > _MOST or last > _MOST:
                if length > _MOST or step > _MOST:
                    return None
                huge, count, last = True, 1, offset
        elif length == 0:
            empty = True
    if empty:  # a view of an empty tensor may begin behind its storage: x[1:] of shape (2, 0)
        begin = min(offset * size, nbytes)
        return begin, begin
    if huge or (last + 1) * size > nbytes:
        return 0, nbytes + 1
    return (offset * size, (offset + count) * size) if contiguous else (None, None)


def _element_size(storage_type: str) -> int:
    dtype = STORAGE_DTYPES.get(storage_type)
    return DTYPE_BITS[dtype] // 8 if dtype else _OTHER_SIZES.get(storage_type, 0)

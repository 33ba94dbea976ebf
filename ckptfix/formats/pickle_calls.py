"""Calls of a pickle that ``torch.load`` cannot make, found without making any.

A changed byte can leave a pickle readable as opcodes, and turn a number of a call into a string, or
drop an argument. No checksum shows that where the file has none, or was packed again. Each call of
a function that torch allows by default, or that numpy pickles by, is compared with the parameters
of that function; no other call is judged.

Facts from torch 2.13: ``torch/_weights_only_unpickler.py`` (what may be called, built and filled),
``torch/_utils.py`` and ``torch/_tensor.py`` (parameters of ``_rebuild_*``),
``torch/serialization.py`` (``persistent_load``, the devices). Both unpicklers refuse what is
refused here, with and without ``weights_only``, but for states and arguments of kinds that no
pickler writes: there, one of them does.
"""

import codecs
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_arrays import (
    ARRAY_RULES,
    INT64,
    RAW_OBJECTS,
    problem_of_array_states,
    problem_of_instance,
)
from ckptfix.formats.pickle_globals import DTENSOR, OF_INSTANCES, ZERO_STAGE, misspelt
from ckptfix.formats.pickle_kinds import (
    ITERABLE,
    KNOWN_GLOBAL,
    MAPPINGS,
    OF_RESULTS,
    OTHER_GLOBAL,
    Parameter,
    Pickle,
    Rule,
    count,
    function_of,
    is_hashable,
    kind_of,
    members,
    noun,
)
from ckptfix.formats.pickle_parameters import (
    ATTRIBUTES,
    DEVICE,
    DEVICES,
    DTYPE,
    FLAG,
    FLAG_OR_NONE,
    HOOKS,
    LAYOUT,
    MADE_OF,
    METADATA,
    NUMBER,
    OFFSET,
    PLAIN_DTYPE,
    SIZES,
    STORAGE,
    STRIDES,
    TENSOR,
    TENSOR_OR_NONE,
    TEXT,
    are_pairs,
    can_be_a_tuple,
    is_class_of_tensors,
    is_device,
    is_dtensor,
    is_empty,
    is_layout,
    is_quantizer,
    make_a_size,
    make_bytes,
)
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, pairs
from ckptfix.formats.torch_tensors import PickledStorage, read_storage, read_tensor

_CALLED_STORAGES = frozenset(
    {("torch.storage", "TypedStorage"), ("torch.storage", "UntypedStorage")}
)
"""Classes of storages that torch calls; it replaces the others by an object that has a dtype and
nothing else.
"""

_FILLED_LATER = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("builtins", "set"),
        ("builtins", "bytearray"),
    }
)
"""Classes whose ``__new__`` takes any arguments and looks at none."""

_WITH_GRADIENTS = frozenset(
    f"{name}Storage"
    for name in ("Double", "Float", "Half", "BFloat16", "ComplexFloat", "ComplexDouble")
)
_MANY_DIMENSIONS = 65
_LOOKS = 8
"""Most looks at a member of an argument for each byte of the pickle, which only shared ones reach.
"""

_FEW = 16

_ENCODINGS = frozenset({"latin1", "latin-1", "iso-8859-1", "utf-8", "utf8", "ascii"})
"""Encodings that are tried, those which picklers write: others take time that grows with the square
of a text.
"""

_MAX_WRAPPED = 8

_REBUILD_V2 = ("torch._utils", "_rebuild_tensor_v2")
_REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")
_REBUILD_V3 = ("torch._utils", "_rebuild_tensor_v3")
_FROM_TYPE = ("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = ("torch._utils", "_rebuild_wrapper_subclass")
_ORDERED_DICT = ("collections", "OrderedDict")


def ensure_calls(
    tree: PickleTree, known: Mapping[str, PickledStorage], *, has_checksum: bool = False
) -> None:
    """Raise FormatError where torch cannot make what a pickle says.

    ``known``: its storages. ``has_checksum``: nothing is only suspicious, as whoever wrote the
    pickle wrote it so.
    """
    if not has_checksum:
        if tree.leftover:
            raise FormatError("the pickle leaves unused values on its stack, which no pickler does")
        for node in tree.persistent:
            _, storage = read_storage(node)
            if not DEVICES.fullmatch(storage.location):
                raise FormatError(
                    f"a storage was saved on {storage.location!r:.80}, which is not a torch device"
                )
        for module, name in tree.globals:
            if meant := misspelt(module, name):
                raise FormatError(
                    f"the pickle needs {module}.{name}, which does not exist "
                    f"(expected {meant}), so torch.load fails"
                )
    if "BUILD on global" in tree.refused_opcodes:
        raise FormatError("the pickle gives a state to a function or a class, so torch.load fails")
    if tree.impossible:
        raise FormatError(f"the pickle {tree.impossible[0]}, so torch.load fails")
    pickle = Pickle(known, set())
    if not all(is_hashable(key, pickle.hashable) for key in tree.keys):
        raise FormatError("the pickle has an unhashable key, such as a list, so torch.load fails")
    left = _LOOKS * len(tree.data)
    for node in _unusual(tree):
        left -= _weight(node.args)
        if left < 0:
            raise FormatError("calls in the pickle share long arguments, which no pickler writes")
        problem = _problem(node, pickle)
        if problem:
            effect = "which can run any code" if problem == RAW_OBJECTS else "so torch.load fails"
            raise FormatError(f"the pickle calls {_name(node.head)} {problem}, {effect}")


def _unusual(tree: PickleTree) -> Sequence[Node]:
    """Return the calls of a pickle without those that are right at first sight: tensors,
    parameters, their hooks.

    Written flat, as a model has 100,000s of them: their rules would take two thirds of the time of
    reading the file, and this takes a twentieth.
    """
    # All references to a global share its name, so that identity will do.
    names = {name: name for name in tree.globals}
    tensor, parameter, hooks = (
        names.get(name, name) for name in (_REBUILD_V2, _REBUILD_PARAMETER, _ORDERED_DICT)
    )
    unusual: list[Node] = []
    numbers: list[Any] = []
    for node in tree.calls:
        head, args = node.head, node.args
        function = head.head if type(head) is Node else None
        if node.kind is not Kind.CALL or node.states is not None or type(args) is not tuple:
            pass
        elif function is hooks:
            if not args:
                continue
        elif function is tensor:
            if len(args) == 6:
                storage, offset, shape, stride, has_gradients, _ = args
                if (
                    has_gradients is False
                    and type(storage) is Node
                    and storage.kind is Kind.PERSISTENT
                    and type(offset) is int
                    and type(shape) is type(stride) is tuple
                    and len(shape) == len(stride) < _MANY_DIMENSIONS
                ):
                    numbers += shape
                    numbers += stride
                    numbers.append(offset)
                    try:
                        end = offset + sum(map(mul, shape, stride)) - sum(stride)
                    except TypeError:
                        return tree.calls
                    if end < storage.head[4]:
                        continue
        elif function is parameter and len(args) == 3:
            data, has_gradients, _ = args
            if (
                type(data) is Node
                and type(data.head) is Node
                and data.head.head is tensor
                and type(has_gradients) is bool
                and _can_have_gradients(data)
            ):
                continue
        unusual.append(node)
    is_plain = {*map(type, numbers)} <= {int}
    is_plain = is_plain and min(numbers, default=0) >= 0 and max(numbers, default=0) < INT64
    return unusual if is_plain else tree.calls


def _weight(args: Any) -> int:
    """Return how many members of its arguments the rule of a call looks at."""
    if type(args) is not tuple:
        return count(args)
    parts = sum(map(count, args))
    nested = sum(
        count(part) for arg in args if type(arg) is tuple and len(arg) < _FEW for part in arg
    )
    return len(args) + parts + nested


def _name(head: object) -> str:
    if type(head) is Node and head.kind is Kind.GLOBAL:
        return f"{'.'.join(head.head):.200}"
    return noun(kind_of(head))


def _problem(node: Node, pickle: Pickle, depth: int = 0) -> str:
    """Return what is wrong with a call, in words that follow its name; "" for one that torch can
    make.
    """
    function, args = function_of(node.head), node.args
    if node.kind is not Kind.NEW_EX and not can_be_a_tuple(args):
        return "with arguments that are not a tuple"
    if function is None:
        is_instance = type(node.head) is Node and node.head.kind is Kind.NEW
        is_wrong = is_instance or kind_of(node.head) not in ("", OTHER_GLOBAL)
        return "as a function, but it is not one" if is_wrong else ""
    name = function[1]
    is_storage = name.endswith("Storage") and function not in _CALLED_STORAGES
    if is_storage or function == DTENSOR or kind_of(node.head) != KNOWN_GLOBAL:
        return "as a function, but it is not one"
    if function in OF_INSTANCES:
        return problem_of_instance(name, node)
    problem = problem_of_array_states(function, node) or _problem_of_states(
        function, node.states or []
    )
    if problem:
        return problem
    if node.kind is Kind.NEW_EX:
        return ""
    if node.kind is Kind.NEW and (name.startswith("_") or name in ("encode", "scalar")):
        return "as a class, but it is not one"
    if type(args) is not tuple:
        if not kind_of(args):
            return ""
        args = members(args)
    if name.endswith("Tensor"):
        return _problem_of_class(args, is_sparse="sparse" in function[0])
    rule = _RULES.get(function)
    if rule is None or (node.kind is Kind.NEW and function in _FILLED_LATER):
        return ""
    most = len(rule.parameters)
    if not rule.least <= len(args) <= most:
        expected = f"{most}" if rule.least == most else f"{rule.least} to {most}"
        return f"with {len(args)} argument{'' if len(args) == 1 else 's'} (expected {expected})"
    # A class of the user's can take any state.
    is_of_users = function == _FROM_TYPE and kind_of(args[1]) in ("", OTHER_GLOBAL)
    judged = args[:3] if is_of_users else args
    for number, (value, parameter) in enumerate(zip(judged, rule.parameters, strict=False), 1):
        if not parameter.fits(value):
            found = noun(kind_of(value))
            return f"with a wrong argument {number} (expected {parameter.words}, found {found})"
    if function == _FROM_TYPE and depth < _MAX_WRAPPED:
        problem = _problem(Node(Kind.CALL, args[0], args[2]), pickle, depth + 1)
        if problem:
            return f"to call {_name(args[0])} {problem}"
    return rule.problem(args, pickle) if rule.problem is not None else ""


def _problem_of_states(function: tuple[str, str], states: list[Any]) -> str:
    kinds = {kind_of(state) for state in states}
    if function == _ORDERED_DICT:
        return "" if kinds <= MAPPINGS else "and gives it a state that is not a dict"
    if function == ("collections", "Counter"):
        of_slots = [part for state in states if type(state) is tuple for part in state]
        is_right = kinds <= MAPPINGS | {"None", "tuple"} and {
            *map(kind_of, of_slots)
        } <= MAPPINGS | {"None"}
        return "" if is_right else "and gives it a state that is not a dict"
    if function in OF_RESULTS:
        return "" if kinds <= {"None"} else "and gives it a state, but it takes none"
    if function[1] == "Parameter" or function[1].endswith("Tensor"):
        # As torch wrote tensors before 0.4: made empty, and filled by their state.
        is_right = kinds <= {"tuple", "list"} and all(
            3 <= len(members(state)) <= 5 for state in states
        )
        return "" if is_right else "and gives it a state that a tensor cannot have"
    return ""


def _problem_of_class(args: tuple[Any, ...], *, is_sparse: bool) -> str:
    """Compare the arguments of a class of tensors, as torch wrote some before 0.4, with sizes and
    data.
    """
    kinds = [kind_of(value) for value in args]
    data = (
        {"torch.Size"}
        if is_sparse
        else {"tuple", "list", "torch.Size", "tensor", "storage", "bytearray"}
    )
    is_sized = all(
        kind == "int" and 0 <= value < INT64 for kind, value in zip(kinds, args, strict=True)
    )
    is_right = is_sized or "" in kinds or (len(args) == 1 and kinds[0] in data)
    return "" if is_right else "with something other than sizes or data"


def _can_have_gradients(tensor: Any) -> bool:
    """Return whether a tensor, as far as it shows, is one of floats."""
    if type(tensor) is not Node or type(tensor.head) is not Node or tensor.head.head != _REBUILD_V2:
        return True
    storage = tensor.args[0] if type(tensor.args) is tuple and tensor.args else None
    if type(storage) is not Node or storage.kind is not Kind.PERSISTENT:
        return True
    # read_storage has checked the form of the persistent id.
    return storage.head[1].head[1] in _WITH_GRADIENTS


def _is_of_floats(dtype: Any) -> bool:
    # None is the default dtype of torch.
    return type(dtype) is not Node or dtype.head[1].startswith(("float", "bfloat", "complex"))


def _problem_of_metadata(metadata: Any, is_complex: bool) -> str:
    if is_complex or type(metadata) is not Node:
        return ""
    is_conjugated = any(type(flag) is Text and flag.value == "conj" for flag in members(metadata))
    return "to conjugate numbers that are not complex" if is_conjugated else ""


def _problem_of_sizes(shape: Any, stride: Any) -> str:
    sizes, strides = len(members(shape)), len(members(stride))
    return "" if sizes == strides else f"with {sizes} sizes and {strides} strides"


def _with_strides(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a tensor with the strides that torch takes where there are none: as
    contiguous.
    """
    sizes = members(args[2])
    if not is_empty(args[3]) or len(sizes) >= _MANY_DIMENSIONS:
        return args
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return (*args[:3], tuple(strides), *args[4:])


def _of_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    """Compare the parameters of a plain tensor with its storage.

    Raises FormatError, as ``read_tensor`` does, where the tensor reaches out of the storage.
    """
    call = Node(Kind.CALL, Node(Kind.GLOBAL, _REBUILD_V2), args)
    if len(args) > 4 and args[4] is True and not _can_have_gradients(call):
        return "with requires_grad=True for integers"
    args = _with_strides(args)
    problem = _problem_of_sizes(*args[2:4])
    if not problem:
        is_complex = args[0].head[1].head[1].startswith("Complex")
        problem = _problem_of_metadata(args[6] if len(args) > 6 else None, is_complex)
        # Metadata do not change where the numbers are.
        read_tensor(Text("", 0, 0), Node(Kind.CALL, call.head, args[:6]), pickle.known)
    return problem


def _of_tensor_v3(args: tuple[Any, ...], pickle: Pickle) -> str:
    # For None torch takes its default, and refuses a storage that is too small for that.
    named = args[6] if type(args[6]) is Node else Node(Kind.GLOBAL, ("torch", "float32"))
    dtype = named.head[1]
    if args[4] is True:
        # torch.save writes it, and torch.load then sets the storage in place: "a leaf Variable that
        # requires grad".
        return f"with requires_grad=True for a tensor of {dtype}"
    args = _with_strides(args)
    problem = _problem_of_sizes(*args[2:4])
    if not problem:
        problem = _problem_of_metadata(
            args[7] if len(args) > 7 else None, dtype.startswith("complex")
        )
        read_tensor(
            Text("", 0, 0),
            Node(Kind.CALL, Node(Kind.GLOBAL, _REBUILD_V3), (*args[:6], named)),
            pickle.known,
        )
    return problem


def _of_quantized_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    storage, offset, shape, stride, _, has_gradients, _ = args
    if has_gradients is True:
        return "with requires_grad=True for integers"
    if type(storage) is Node and storage.kind is Kind.PERSISTENT:
        # read_storage has checked the form of the persistent id.
        _, cls, _, _, numel = storage.head[:5]
        if not cls.head[1].startswith("Q"):
            return "with a storage that is not quantized"
        # Types below a byte keep several numbers in one of their storage.
        is_packed = cls.head[1] in ("QUInt4x2Storage", "QUInt2x4Storage")
        is_plain = (
            type(shape) is type(stride) is tuple and len(shape) == len(stride) and 0 not in shape
        )
        if (
            is_plain
            and not is_packed
            and offset + sum(map(mul, shape, stride)) - sum(stride) >= numel
        ):
            return "for more elements than its storage has"
    return _problem_of_sizes(shape, stride)


def _of_parameter(args: tuple[Any, ...], pickle: Pickle) -> str:
    has_gradients = args[1] if len(args) > 1 else bool(args)
    is_right = has_gradients is not True or _can_have_gradients(args[0])
    return "" if is_right else "with requires_grad=True for integers"


def _of_meta_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    dtype, shape, stride, has_gradients = args
    if has_gradients is True and not _is_of_floats(dtype):
        return "with requires_grad=True for integers"
    return _problem_of_sizes(shape, stride)


def _of_device_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    return (
        "with requires_grad=True for integers"
        if args[3] is True and not _is_of_floats(args[1])
        else ""
    )


def _of_type(args: tuple[Any, ...], pickle: Pickle) -> str:
    """Say why a tensor is not of its class, or attributes are not those of a DTensor."""
    if function_of(args[0]) == _WRAPPER:
        # torch makes the tensor of the class in the arguments, and cannot turn it into one of
        # another class.
        named = members(args[2])[:1]
        both = [
            one.head for one in (args[1], *named) if type(one) is Node and one.kind is Kind.GLOBAL
        ]
        if len(both) == 2 and both[0] != both[1]:
            return f"to turn a {both[1][1]:.80} into a {both[0][1]:.80}"
    if not is_dtensor(args[1]):
        return ""
    parts = args[3] if type(args[3]) is tuple else (args[3],)
    attributes = {
        key.value: value for part in parts for key, value in pairs(part) if type(key) is Text
    }
    is_right = (
        kind_of(attributes.get("_local_tensor")) in ("", "tensor")
        and kind_of(attributes.get("_spec")) in ("", "DTensorSpec")
        and attributes.keys().isdisjoint(("device_mesh", "placements"))  # they cannot be set
    )
    return "" if is_right else "for a DTensor without a valid local tensor and spec"


def _of_sparse_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    layout, data = args[0], members(args[1])
    name = (
        layout.args[0]
        if type(layout) is Node and type(layout.args) is tuple and layout.args
        else None
    )
    if type(name) is not Text:
        return ""
    if not name.value.startswith("torch.sparse_"):
        return f"for the layout {name.value:.40}, which is not sparse"
    is_coo = name.value == "torch.sparse_coo"
    kinds = {kind_of(part) for part in data[: 2 if is_coo else 3]}
    is_right = len(data) in ((3, 4) if is_coo else (4,)) and kinds <= {"", "tensor"}
    return "" if is_right else "with something other than the tensors of its layout"


def _of_nested_tensor(args: tuple[Any, ...], pickle: Pickle) -> str:
    for number, (tensor, dimensions) in enumerate(zip(args, (1, 2, 2, None), strict=True), 1):
        if (
            type(tensor) is not Node
            or type(tensor.head) is not Node
            or tensor.head.head != _REBUILD_V2
        ):
            # A parameter has gradients, which the numbers of sizes cannot have.
            if kind_of(tensor) == "tensor" and function_of(tensor.head) == _REBUILD_PARAMETER:
                return f"with a parameter as argument {number}"
            continue
        storage, _, shape, *_ = tensor.args
        is_of_sizes = storage.head[1].head[1] == "LongStorage"
        if (number > 1 and not is_of_sizes) or (dimensions and len(members(shape)) != dimensions):
            return f"with a tensor of the wrong dtype or shape as argument {number}"
    return ""


def _of_encoded(args: tuple[Any, ...], pickle: Pickle) -> str:
    """Say why a text cannot be encoded; rare encodings, and what handles errors, are not tried."""
    encoding = args[1].value if len(args) > 1 and type(args[1]) is Text else "utf-8"
    try:
        if encoding not in _ENCODINGS:
            codecs.lookup(encoding)
        elif len(args) < 3 and type(args[0]) is Text:
            args[0].value.encode(encoding)
    except LookupError:
        return f"with the unknown encoding {encoding!r:.40}"
    except ValueError:
        return f"with characters that {encoding!r:.40} cannot encode"
    return ""


def _of_members(args: tuple[Any, ...], pickle: Pickle) -> str:
    values = members(args[0]) if args and kind_of(args[0]) in ITERABLE else ()
    is_right = all(is_hashable(value, pickle.hashable) for value in values)
    return "" if is_right else "with an unhashable member, such as a list"


def _of_pairs(args: tuple[Any, ...], pickle: Pickle) -> str:
    pairs = members(args[0]) if args and kind_of(args[0]) not in MAPPINGS else ()
    keys = [members(pair)[0] for pair in pairs if kind_of(pair) in ("tuple", "list")]
    is_right = all(is_hashable(key, pickle.hashable) for key in keys)
    return "" if is_right else "with an unhashable key, such as a list"


def _of_bytearray(args: tuple[Any, ...], pickle: Pickle) -> str:
    kind = kind_of(args[0]) if args else ""
    if kind and (kind == "str") != (len(args) > 1):
        return "with a str but no encoding" if kind == "str" else "with an encoding but no str"
    return _of_encoded(args, pickle) if len(args) > 1 else ""


def _of_complex(args: tuple[Any, ...], pickle: Pickle) -> str:
    if not args or type(args[0]) is not Text:
        return ""
    try:
        complex(args[0].value)
    except ValueError:
        return "with a str that is not a number"
    return "with a str and a second argument" if len(args) > 1 else ""


def _of_device(args: tuple[Any, ...], pickle: Pickle) -> str:
    name, index = args if len(args) == 2 else (args[0], None)
    if len(args) == 2 and kind_of(name) in ("int", "torch.device"):
        return f"with a wrong argument 1 (expected a str, found {noun(kind_of(name))})"
    is_indexed = type(name) is Text and ":" in name.value
    is_wrong = type(index) is int and (is_indexed or not 0 <= index < INT64)
    return "with an invalid index" if is_wrong else ""


_TENSOR_PARAMETERS = (STORAGE, OFFSET, SIZES, STRIDES, FLAG, HOOKS)
_PARAMETER_PARAMETERS = (TENSOR_OR_NONE, FLAG, HOOKS)
_DEVICE_PARAMETERS = (PLAIN_DTYPE, DEVICE, FLAG)

_RULES: Mapping[tuple[str, str], Rule] = {
    ("collections", "OrderedDict"): Rule((Parameter("pairs", ITERABLE, are_pairs),), 0, _of_pairs),
    ("collections", "Counter"): Rule((Parameter("an iterable", MADE_OF),), 0, _of_members),
    ("builtins", "set"): Rule((Parameter("an iterable", MADE_OF[1:]),), 0, _of_members),
    ("builtins", "bytearray"): Rule(
        (
            Parameter("bytes", ("int", "bool", *MADE_OF[1:]), make_bytes),
            Parameter("an encoding", ("str",)),
            TEXT,
        ),
        0,
        _of_bytearray,
    ),
    ("builtins", "complex"): Rule(
        (Parameter("a number", ("int", "float", "bool", "complex", "str")), NUMBER),
        0,
        _of_complex,
    ),
    ("_codecs", "encode"): Rule((TEXT, TEXT, TEXT), 1, _of_encoded),
    ("torch", "Size"): Rule((Parameter("numbers", MADE_OF[1:], make_a_size),), 0),
    ("torch", "device"): Rule(
        (
            # torch takes the number of a device of the machine, too, and writes none.
            Parameter("a torch device", ("str", "torch.device"), is_device),
            Parameter("an index", ("int", "None")),
        ),
        1,
        _of_device,
    ),
    ("torch.serialization", "_get_layout"): Rule(
        (Parameter("the name of a layout", ("str",), is_layout),), 1
    ),
    ("torch.nn.parameter", "Parameter"): Rule((TENSOR_OR_NONE, FLAG), 0, _of_parameter),
    ("torch._utils", "_rebuild_tensor"): Rule(_TENSOR_PARAMETERS[:4], 4, _of_tensor),
    _REBUILD_V2: Rule((*_TENSOR_PARAMETERS, METADATA), 6, _of_tensor),
    _REBUILD_V3: Rule(
        (*_TENSOR_PARAMETERS[:4], FLAG_OR_NONE, HOOKS, DTYPE, METADATA), 7, _of_tensor_v3
    ),
    _REBUILD_PARAMETER: Rule(_PARAMETER_PARAMETERS, 3, _of_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Rule(
        (*_PARAMETER_PARAMETERS, ATTRIBUTES), 4, _of_parameter
    ),
    ("torch._utils", "_rebuild_qtensor"): Rule(
        (
            *(STORAGE, OFFSET, SIZES, SIZES),
            Parameter("a quantization scheme with its numbers", ("tuple", "list"), is_quantizer),
            *(FLAG, HOOKS),
        ),
        7,
        _of_quantized_tensor,
    ),
    ("torch._utils", "_rebuild_sparse_tensor"): Rule(
        (LAYOUT, Parameter("a tuple of tensors", ("tuple", "list"))), 2, _of_sparse_tensor
    ),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Rule(
        (PLAIN_DTYPE, SIZES, SIZES, FLAG_OR_NONE), 4, _of_meta_tensor
    ),
    ("torch._utils", "_rebuild_nested_tensor"): Rule((TENSOR,) * 4, 4, _of_nested_tensor),
    _WRAPPER: Rule(
        (
            Parameter("the class DTensor", (KNOWN_GLOBAL,), is_dtensor, (Kind.GLOBAL, Kind.CALL)),
            DTYPE,
            SIZES,
            STRIDES,
            OFFSET,
            LAYOUT,
            DEVICE,
            FLAG,
        ),
        8,
    ),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): Rule(
        (Parameter("a numpy array", ("numpy.ndarray",)), *_DEVICE_PARAMETERS),
        4,
        _of_device_tensor,
    ),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Rule(
        (TENSOR, *_DEVICE_PARAMETERS), 4, _of_device_tensor
    ),
    _FROM_TYPE: Rule(
        (
            Parameter("a function", (KNOWN_GLOBAL,), None, (Kind.GLOBAL, Kind.CALL)),
            Parameter(
                "a tensor class",
                (KNOWN_GLOBAL,),
                is_class_of_tensors,
                (Kind.GLOBAL, Kind.CALL),
            ),
            Parameter("a tuple", ("tuple", "list", "torch.Size")),
            ATTRIBUTES,
        ),
        4,
        _of_type,
    ),
    ZERO_STAGE: Rule((Parameter("a stage of ZeRO", ("int",), lambda value: 0 <= value <= 3),), 1),
    **ARRAY_RULES,
}
"""Each function whose calls are judged -> its parameters."""

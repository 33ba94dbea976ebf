"""States of the generators of random numbers: those that Python, numpy and torch take (torch 2.13,
numpy 2).
"""

from collections.abc import Container, Mapping
from math import prod

from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, child, is_dict_like, items_of
from ckptfix.formats.torch_tensors import PickledStorage, is_tensor, read_tensor, storages

_VERSIONS_OF_PYTHON = (2, 3)
_WORDS_OF_PYTHON = 625
_WORDS_OF_NUMPY = 624
_INT32 = 1 << 31
_UINT32 = 1 << 32
_UINT64 = 1 << 64
_SIZES_OF_TORCH = (5048, 5056)
"""torch 2.13 refuses a state of the CPU's generator with other than 5056 bytes; older ones wrote
5048.
"""

_SIZES_OF_CUDA = (8, 16, 808, 816)
"""A CUDA generator takes a seed with or without an offset; up to torch 1.13 it wrote 800 unused
bytes before them.
"""


def problem_of_random_states(tree: PickleTree, python: str, numpy: str, cpu: str, cuda: str) -> str:
    """Return which generator cannot take its state under one of these keys, "" where all can."""
    if not _is_of_python(child(tree.root, python)):
        return f"random states whose {python!r} is not a state of Python's generator"
    if not _is_of_numpy(child(tree.root, numpy)):
        return f"random states whose {numpy!r} is not a state of numpy's generator"
    known = storages(tree)
    if not _has_bytes(child(tree.root, cpu), _SIZES_OF_TORCH, known):
        return f"random states whose {cpu!r} is not a state of torch's generator"
    # The Trainer saves a single device's state without a list.
    devices = child(tree.root, cuda)
    members = items_of(devices) if is_list(devices) else () if devices is None else (devices,)
    if not all(_has_bytes(member, _SIZES_OF_CUDA, known) for member in members):
        return f"random states whose {cuda!r} is not a state of CUDA generators"
    return ""


def _is_of_python(state: object) -> bool:
    """Return whether ``random.setstate`` takes a state, and ``random.gauss`` can go on with it."""
    values = items_of(state)
    if len(values) != 3 or type(values[0]) is not int or values[0] not in _VERSIONS_OF_PYTHON:
        return False
    version, words, gauss = values
    if (
        type(words) is not tuple
        or len(words) != _WORDS_OF_PYTHON
        or any(type(word) is not int for word in words)
    ):
        return False
    # Version 2 cuts every number to 32 bits. The last one is the position.
    is_in_range = version == 2 or all(0 <= word < _UINT64 for word in words)
    position = words[-1] % _UINT32 if version == 2 else words[-1]
    return (
        is_in_range
        and 0 <= position < _WORDS_OF_PYTHON
        and (gauss is None or type(gauss) in (int, float))
    )


def _is_of_numpy(state: object) -> bool:
    """Return whether ``numpy.random.set_state`` takes a state."""
    # A script that replaced numpy's global bit generator saves a dict.
    if child(state, "bit_generator") is not None:
        return True
    values = items_of(state)
    if (
        not (len(values) == 3 or len(values) >= 5)
        or type(values[0]) is not Text
        or values[0].value != "MT19937"
    ):
        return False
    return (
        _are_words_of_numpy(values[1])
        and all(map(is_int32, (values[2], *values[3:4])))
        and all(type(gauss) in (bool, int, float, Node) for gauss in values[4:5])
    )


def _are_words_of_numpy(value: object) -> bool:
    """Return whether numpy reads its words from a value, or cannot be known to refuse it."""
    if is_list(value):
        words = items_of(value)
        return len(words) >= _WORDS_OF_NUMPY and all(
            type(word) not in (int, float) or 0 <= word < _UINT32 for word in words
        )
    if type(value) is not Node:
        return False
    state = items_of(value.states[0]) if is_of_numpy_module(value) and value.states else ()
    shape = items_of(state[1]) if len(state) > 1 else ()
    if any(type(size) is not int for size in shape) or not state:
        return True
    return len(shape) == 1 and shape[0] >= _WORDS_OF_NUMPY


def is_int32(value: object) -> bool:
    """Return whether C code takes a value as a number of 32 bits, or cannot be known to refuse
    it.
    """
    if type(value) in (int, float):
        return -_INT32 <= value < _INT32  # type: ignore[operator]
    return type(value) in (bool, Node) and not (is_list(value) or is_dict_like(value))


def _has_bytes(value: object, sizes: Container[int], known: Mapping[str, PickledStorage]) -> bool:
    """Return whether a value is a tensor of one of these numbers of bytes, or of a kind that is not
    known here.
    """
    if type(value) is not Node or not is_tensor(value):
        return False
    tensor = read_tensor(Text("", 0, 0), value, known)
    return tensor is None or (tensor.dtype == "U8" and prod(tensor.shape) in sizes)


def is_list(value: object) -> bool:
    """Return whether a value is a list or a tuple."""
    return type(value) is tuple or (type(value) is Node and value.kind is Kind.LIST)


def is_of_numpy_module(value: object) -> bool:
    """Return whether a value is an object of numpy."""
    head = value.head if type(value) is Node and value.kind is Kind.CALL else None
    return (
        type(head) is Node
        and head.kind is Kind.GLOBAL
        and head.head[0].partition(".")[0] == "numpy"
    )

"""The run state of a guarded save as far as it can be read without torch: the names of the
optimizers' parameters.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from ckptfix.checkpoint.filenames import run_state_name
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Text, child, items_of, pairs
from ckptfix.formats.torch_file import read_torch_file
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import open_reader

_END = 1 << 16
_DIGITS = 9

ParameterNames = tuple[tuple[tuple[int, str], ...], ...]
"""The position of the model and the name there of an optimizer's parameters, by param group, in its
order.
"""


def digest_of_end(path: AnyPath) -> str:
    """Return a digest of a file's end, where torch writes the checksums of all it has written.
    Raises OSError.
    """
    with open_reader(path) as reader:
        end = reader.read(max(0, reader.size - _END), min(_END, reader.size))
        return hashlib.sha1(end, usedforsecurity=False).hexdigest()


def parameter_names(folder: AnyPath, file: str, index: int) -> ParameterNames | None:
    """Return the names of the parameters of the optimizer that a guarded save wrote to ``file``,
    None if not known.

    ``index``: the optimizer's position. A save without ckptfix may have written over the optimizer
    since, and leaves the run state where it is: then the names are of an older save, and not
    returned. Raises OSError.
    """
    try:
        with open_reader(folder / run_state_name(0)) as reader:
            root = read_torch_file(reader).tree.root
    except (FileNotFoundError, FormatError):
        return None
    if _texts(child(root, "beside")).get(file) != digest_of_end(folder / file):
        return None
    optimizers = items_of(child(root, "parameters"))
    if index >= len(optimizers):
        return None
    names = tuple(
        tuple(_name(name) for name in items_of(group)) for group in items_of(optimizers[index])
    )
    every = [name for group in names for name in group]
    return names if all(fqn for _, fqn in every) and len(set(every)) == len(every) else None


def _texts(node: Any) -> Mapping[str, str]:
    return {
        key.value: value.value
        for key, value in pairs(node)
        if type(key) is Text and type(value) is Text
    }


def _name(value: Any) -> tuple[int, str]:
    """Return the position of the model and the name of ``0.fc.weight``, the name "" for anything
    else.
    """
    number, _, fqn = (value.value if type(value) is Text else "").partition(".")
    return (int(number), fqn) if number.isdecimal() and len(number) < _DIGITS else (0, "")

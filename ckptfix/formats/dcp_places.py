"""The parts of a DCP checkpoint by the hundred thousand: chunks of tensors, and where each is stored."""

from pathlib import PurePosixPath
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of a tensor that was saved in one piece: its first index and its length in every dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class StoredItem(NamedTuple):
    """Where a chunk or a bytes item lies: ``length`` bytes from ``offset`` of the file ``path`` of the folder.

    ``offsets``: the first index of the chunk, None for a bytes item. ``hint``: the place in the list of chunks,
    which torch looks at first. ``transforms``: the stream extensions its bytes went through, such as ``zstd``. ``site``
    is where the name was pushed.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    hint: int | None
    path: PurePosixPath
    offset: int
    length: int
    transforms: tuple[str, ...]
    site: int


class _Packed:
    """The type of ``PACKED``."""


PACKED = _Packed()
"""What stands in ``storage_data`` as the value of a ``StoredItem``, which says all of key and value."""

MATCHED = frozenset({Chunk, StoredItem, _Packed})
"""The types of what was matched as a whole in a tree of ``dcp_stream``."""

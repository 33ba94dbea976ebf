"""Parts of tensors in the safetensors files that torch's
``HuggingFaceStorageWriter(save_distributed=True)`` writes.

Each rank saves its parts in files of its own, ``shard-00001-model-00001-of-00002.safetensors`` and
so on. The header has the first index of every part; the shape of a complete tensor and the number
of ranks are recorded nowhere. torch's own reader takes the box around all parts for the tensor, and
leaves what no part covers as it was in memory.

Facts from torch 2.13: ``distributed/checkpoint/hf_storage.py`` and ``_hf_utils.py``. A part that
several ranks have is saved by one of them, and a rank without any part writes no file: even a gap
in the ranks can be healthy.
"""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.folder import Component
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_items import coverage_problem
from ckptfix.formats.dcp_metadata import DcpTensor
from ckptfix.formats.dcp_stream import Chunk
from ckptfix.formats.safetensors_file import DCP_SHARDING_INFO, SafetensorsFile
from ckptfix.formats.tensor import TensorInfo
from ckptfix.wording import count_of, series

_OVERLAP = re.compile(r" overlap\b")
"""Words of ``coverage_problem``."""


class Part(NamedTuple):
    """One rank's part of a tensor: its place in the tensor, and in the file."""

    chunk: Chunk
    file: Component
    tensor: TensorInfo


class PartedTensor(Struct, frozen=True, kw_only=True):
    """A tensor as its parts show it. ``shape``: of the box around them. ``problem``: why it is
    incomplete, or "".
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    problem: str = ""

    @property
    def has_overlap(self) -> bool:
        """Return whether two parts have an element in common."""
        return _OVERLAP.search(self.problem) is not None

    @property
    def has_gap(self) -> bool:
        """Return whether the parts have fewer elements than the box around them."""
        return sum(prod(part.chunk.lengths) for part in self.parts) < prod(self.shape)


def parts_problem(member: Component) -> str:
    """Return why torch cannot find the places of the parts in a file, "" where it can."""
    try:
        _parts(member)
    except FormatError as error:
        return str(error)
    return ""


def begins_inside(member: Component) -> TensorInfo | None:
    """Return a tensor of a file whose first index is not that of a complete tensor, None without
    one.
    """
    if (
        not isinstance(member.content, SafetensorsFile)
        or DCP_SHARDING_INFO not in member.content.metadata
    ):
        return None
    try:
        return next((one.tensor for one in _parts(member) if any(one.chunk.offsets)), None)
    except FormatError:
        return None


def joined_parts(members: Iterable[Component]) -> tuple[PartedTensor, ...]:
    """Return the tensors whose parts are in these files, without the files that have a problem."""
    found: dict[str, list[Part]] = {}
    for member in members:
        with suppress(FormatError):
            for part in _parts(member) if member.problem is None else ():
                found.setdefault(part.tensor.fqn, []).append(part)
    return tuple(_joined(fqn, parts) for fqn, parts in found.items())


def absent_files(members: Sequence[Component]) -> tuple[PurePosixPath, ...]:
    """Return the files that a rank lacks and another one has, by the numbers in their names; any
    may be as saved.
    """
    names = [member.name for member in members]
    last = max(name.rank or 0 for name in names)
    files = {name.shard: name for name in names}
    present = {member.path for member in members}
    every = (
        PurePosixPath(str(name.of_rank(rank)))
        for rank in range(last + 1)
        for _, name in sorted(files.items(), key=lambda pair: pair[0] or (0, 0))
    )
    return tuple(path for path in every if path not in present)


def _parts(member: Component) -> list[Part]:
    content = member.content
    if not isinstance(content, SafetensorsFile):
        return []
    places = _places(content)
    return [
        Part(Chunk(_offsets(places, tensor), tensor.shape), member, tensor)
        for tensor in content.tensors
    ]


def _places(content: SafetensorsFile) -> dict[str, Any] | None:
    """Return what the header has about each part, None where it has nothing: then every tensor is
    complete.
    """
    text = content.metadata.get(DCP_SHARDING_INFO)
    if not text:
        return None
    try:
        places = json.loads(text)
    except (ValueError, RecursionError):
        places = None
    if not isinstance(places, dict):
        raise FormatError(
            f"its {DCP_SHARDING_INFO} is not a JSON object, so torch cannot read its parts"
        )
    return places


def _offsets(places: dict[str, Any] | None, tensor: TensorInfo) -> tuple[int, ...]:
    if places is None:
        return (0,) * len(tensor.shape)
    place = places.get(tensor.fqn)
    offsets = place.get("saved_offsets") if isinstance(place, dict) else None
    if not isinstance(offsets, list) or not all(
        type(one) is int and 0 <= one < 1 << 62 for one in offsets
    ):
        raise FormatError(f"its {DCP_SHARDING_INFO} has no saved_offsets for {tensor.fqn!r:.200}")
    if len(offsets) != len(tensor.shape):
        raise FormatError(
            f"{tensor.fqn!r:.200} has {count_of(len(tensor.shape), 'dimension')}, but "
            f"{len(offsets)} saved_offsets"
        )
    return tuple(offsets)


def _joined(fqn: str, parts: Sequence[Part]) -> PartedTensor:
    dtypes = list(dict.fromkeys(part.tensor.dtype for part in parts))
    dimensions = sorted({len(part.tensor.shape) for part in parts})
    shape: tuple[int, ...] = ()
    if len(dimensions) > 1:
        numbers = series([str(count) for count in dimensions])
        problem = f"its parts differ in their number of dimensions ({numbers})"
    else:
        ends = ([sum(pair) for pair in zip(*part.chunk, strict=True)] for part in parts)
        shape = tuple(map(max, zip(*ends, strict=True)))
        chunks = tuple(part.chunk for part in parts)
        problem = coverage_problem(DcpTensor(fqn, dtypes[0], "", shape, chunks, 0)) or ""
        problem = problem.replace("chunk", "part")
        if _OVERLAP.search(problem):
            problem += ": files of an earlier save may be left in the folder"
    if len(dtypes) > 1:
        problem = f"its parts have different dtypes ({series(dtypes)})"
    return PartedTensor(fqn=fqn, dtype=dtypes[0], shape=shape, parts=tuple(parts), problem=problem)

"""The index of a sharded model: a JSON object with ``metadata`` and ``weight_map`` (fqn -> file name)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfix.errors import BeyondLimits, FormatError
from ckptfix.formats.safetensors_file import MAX_VALUES, finite, json_values

MAX_INDEX = 128 << 20
"""Longest index that is read, in bytes; a million names take about 100 MB."""


@dataclass(frozen=True, slots=True)
class WeightsIndex:
    """A parsed index: ``weight_map`` from fqn to a plain file name in the same folder."""

    document: Mapping[str, Any]
    weight_map: Mapping[str, str]


def parse_index(data: bytes) -> WeightsIndex:
    """Parse the bytes of an index file.

    Raises FormatError, also for a file name that leaves the folder (``../../x``, ``/x``): such a name is never
    followed.
    """
    if json_values(data) > MAX_VALUES:
        raise BeyondLimits(f"the index holds more than {MAX_VALUES} values")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_float=finite)
    except FormatError:
        raise
    except UnicodeDecodeError as error:
        raise FormatError(f"the index is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise FormatError("the index is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"the index is not JSON: {error}") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError("the index has no weight_map")
    plain: set[str] = set()  # 100,000 names lie in a few files
    for fqn, name in weight_map.items():
        if isinstance(name, str) and (name in plain or is_plain_name(name)):
            plain.add(name)
        else:
            raise FormatError(
                f"the weight_map sends {fqn!r} to {name!r}, which is not a file name in this folder"
            )
    if b"\\u" in data:
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FormatError("a name in the index holds half of a surrogate pair") from None
    return WeightsIndex(document, weight_map)


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can only mean a file directly in the folder at hand."""
    return name not in ("", ".", "..") and not any(char in name for char in "/\\\0")


def format_index(index: WeightsIndex | None, weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return the bytes of an index with this weight map, laid out as transformers and accelerate write it.

    Other entries of ``index`` stay. ``total_size`` (bytes of all tensors) goes into the metadata.
    """
    document: dict[str, Any] = dict(index.document) if index else {}
    metadata = document.get("metadata")
    document["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total_size}
    document["weight_map"] = dict(weight_map)
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormatError("the index holds a key more than once")
    return result

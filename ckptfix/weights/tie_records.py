"""Ties in the metadata of a safetensors file: the name left out -> the name kept, as ``save_model`` records them.

Metadata is also where users keep words of their own, and a word can be the name of a tensor: ``{"best": "w"}``. What is
taken for a tie ends as the name of a tensor does; the others that ckptfix writes are listed under a key of its own.
"""

import json
from collections.abc import Collection, Mapping

LISTED = "ckptfix.ties"
"""Metadata key: a JSON list of the names left out that do not look like names of tensors."""


def ties_in(metadata: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the ties that a file records. ``names``: of its tensors."""
    endings = _endings(names)
    listed = _listed(metadata)
    return {
        other: kept
        for other, kept in metadata.items()
        if kept in names and other not in names and (other in listed or _looks_tied(other, kept, endings))
    }


def metadata_of(ties: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the metadata that records ties, so that ``ties_in`` finds them again."""
    endings = _endings(names)
    odd = [other for other, kept in ties.items() if not _looks_tied(other, kept, endings)]
    return {**ties, **({LISTED: json.dumps(odd)} if odd else {})}


def unwritable(metadata: Mapping[str, str], ties: Mapping[str, str], names: Collection[str]) -> set[str]:
    """Return the words that cannot stand beside these tensors: they would be read as ties, or a tie has their key."""
    return {
        *ties_in(metadata, names),
        *(key for key, text in metadata.items() if ties.get(key, text) != text),
    }


def _endings(names: Collection[str]) -> set[str]:
    return {_ending(name) for name in names}


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _looks_tied(other: str, kept: str, endings: Collection[str]) -> bool:
    return _ending(other) == _ending(kept) or ("." in other and _ending(other) in endings)


def _listed(metadata: Mapping[str, str]) -> set[str]:
    try:
        found = json.loads(metadata.get(LISTED, "[]"))
    except (ValueError, RecursionError):
        return set()
    return {name for name in found if type(name) is str} if isinstance(found, list) else set()

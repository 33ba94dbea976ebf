"""Put the state dicts of shards together: a name that the index lists comes from the file that it lists, or is lost."""

from collections.abc import Mapping, Sequence

from ckptfix.formats.safetensors_file import METADATA_KEY
from ckptfix.weights.salvaging import Lost, SavedDict
from ckptfix.weights.stored import StoredTensor


def joined(
    dicts: Sequence[tuple[str, SavedDict]], listed: Mapping[str, str]
) -> tuple[SavedDict, dict[str, str]]:
    """Return the state dict that shards make up, each given with the name of its file, and name -> file of each copy.

    ``listed``: name -> its file. A copy is what another file than that one holds, and not saved. A name that no index
    lists is saved when one file alone holds it.
    """
    twice = _in_two(dicts, listed)
    tensors: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    lost: list[Lost] = []
    copies: dict[str, str] = {}
    for file, one in dicts:
        held = {tensor.fqn: tensor for tensor in one.tensors}
        first: dict[str, str] = {}  # a tensor of this file -> the first of its names that is taken from here
        for name, kept in {**{name: name for name in held}, **one.ties}.items():
            if listed.get(name, file) != file:
                copies.setdefault(name, file)
            elif name in twice:
                lost.append(
                    Lost(file, name, f"{' and '.join(twice[name])} hold it, and no index says which counts")
                )
            elif first.setdefault(kept, name) == name:
                tensors[name] = held[kept]._replace(fqn=name)
            else:
                ties[name] = first[kept]
        lost += (gone for gone in one.lost if gone.name is None or listed.get(gone.name, file) == file)
    metadata = {key: text for _, one in dicts for key, text in one.metadata.items()}
    for file, one in dicts:
        for key in [key for key, text in one.metadata.items() if metadata.get(key, text) != text]:
            del metadata[key]
            reason = f"what it says of {key!r} is not what other files of the model say"
            lost.append(Lost(file, METADATA_KEY, reason))
    whole = SavedDict(
        tensors=tuple(tensors.values()),
        ties=ties,
        versions={name: version for _, one in dicts for name, version in one.versions.items()},
        lost=tuple(_with_copy(gone, copies) for gone in lost),
        unchecked=frozenset(name for _, one in dicts for name in one.unchecked),
        metadata=metadata,
        damaged=tuple(
            damaged
            for file, one in dicts
            for damaged in one.damaged
            if listed.get(damaged.name or "", file) == file
        ),
    )
    return whole, copies


def of_copy(name: str | None, copies: Mapping[str, str]) -> str:
    """Say where another copy of a lost tensor is, "" when nowhere."""
    file = copies.get(name or "")
    return f"; {file} holds another copy, which may be of another save" if file is not None else ""


def _in_two(dicts: Sequence[tuple[str, SavedDict]], listed: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that no index lists and several files hold, with these."""
    holders: dict[str, list[str]] = {}
    for file, one in dicts:
        gone = (lost.name for lost in one.lost if lost.name is not None)
        for name in (*(tensor.fqn for tensor in one.tensors), *one.ties, *gone):
            if name not in listed:
                holders.setdefault(name, []).append(file)
    return {name: files for name, files in holders.items() if len(files) > 1}


def _with_copy(gone: Lost, copies: Mapping[str, str]) -> Lost:
    return gone._replace(reason=gone.reason + of_copy(gone.name, copies))

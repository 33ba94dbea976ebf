"""A checkpoint folder and a device map, as far as the doctor needs them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.diagnosis.file_damage import diagnose_files
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import UnloadablePickle, UnsafePickle
from ckptfix.diagnosis.target import ensure_checkpoint, find_target
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.files import on_disk
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import Weights

_EMBEDDINGS = ("embed_tokens", "wte", "shared", "word_embeddings", "embed_in", "tok_embeddings")
HEAD = "lm_head.weight"
"""Key of the weight of a language model's output layer in transformers."""

_MAX_CONFIG = 16 << 20


class Tie(Struct, frozen=True, kw_only=True):
    """Keys of one tensor. ``proof``: the evidence. ``is_proven``: by the bytes, not by the keys
    alone.
    """

    names: tuple[str, ...]
    proof: str
    is_proven: bool = True


class Folder(Struct, frozen=True, kw_only=True):
    """A checkpoint folder. ``names``: keys of its first model, ties included, without wrappers.
    ``config``: its ``config.json``.
    """

    path: str
    refused: tuple[Finding, ...] = ()
    names: tuple[str, ...] = ()
    model: str = ""
    ties: tuple[Tie, ...] = ()
    config: "dict[str, object] | None" = None
    unread: tuple[str, ...] = ()


def read_folder(path: str) -> Folder:
    """Scan a folder or a file: headers and opcodes, no tensor bytes, nothing unpickled.

    Raises UsageError when no checkpoint is there, OSError when it cannot be listed.
    """
    target = find_target(path)
    with paused_gc():
        folder = scan_folder(target.root, target.only)
        ensure_checkpoint(folder)
        found = diagnose_files(folder)
    weights = None
    with suppress(CkptfixError, OSError):  # a finding of ``check``, and ``unread`` here
        weights = next(iter(open_checkpoint(target.path).weights), None)
    names = _bare(weights.named()) if weights is not None else {}
    return Folder(
        path=path,
        refused=tuple(
            finding for finding in found if isinstance(finding, UnloadablePickle | UnsafePickle)
        ),
        names=tuple(names.values()),
        model=weights.label if weights is not None else "",
        ties=_ties(weights, names) if weights is not None else (),
        config=_config(on_disk(target.root)),
        unread=(
            *(
                f"{item.path}: {item.problem.message}"
                for item in folder.components
                if item.problem is not None
            ),
            *(f"{sub} is {what}" for sub, what in folder.subfolders.items()),
        ),
    )


def embeds(name: str) -> bool:
    """Return whether a tensor is an input embedding, by the names that transformers gives them."""
    return name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS


def _bare(names: Iterable[str]) -> dict[str, str]:
    """Return key -> key without the wrappers that all of them begin with."""
    every = tuple(names)
    width = sum(len(segment) + 1 for segment in common_wrappers(every))
    return {name: name[width:] for name in every}


def _ties(weights: Weights, names: Mapping[str, str]) -> tuple[Tie, ...]:
    """Return the ties that the files show, and the one that a missing head betrays."""
    same: dict[str, list[str]] = {}
    for name, kept in weights.ties.items():
        same.setdefault(kept, [names[kept]]).append(names[name])
    proof = f"{weights.label} stores them as one tensor"
    found = [Tie(names=tuple(tied), proof=proof) for tied in same.values()]
    bare = tuple(names.values())
    embeddings = [name for name in bare if embeds(name)]
    if embeddings and HEAD not in bare and not _is_encoder(bare):
        proof = f"no file contains {HEAD}, so a model with a head takes it from the embedding"
        found.append(Tie(names=(*embeddings, HEAD), proof=proof, is_proven=False))
    return tuple(found)


def _is_encoder(names: tuple[str, ...]) -> bool:
    """Return whether another head is there, so that a missing ``lm_head`` means nothing."""
    return any(
        name.split(".")[0] in ("classifier", "score", "pooler", "cls", "qa_outputs")
        for name in names
    )


def _config(root: Path) -> "dict[str, object] | None":
    path = root / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG:
            return None
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


_MAX_FILE = 16 << 20


class DeviceMap(Struct, frozen=True, kw_only=True):
    """A device map. ``source``: the file or argument that holds it.

    ``entries``: module name -> device, in the map's own spelling. The name "" means the model
    itself. A device is a number, "cpu", "disk", or a type with or without a number.
    """

    source: str
    entries: Mapping[str, int | str]

    def device_of(self, name: str) -> int | str | None:
        """Return the device of a tensor: that of the nearest module above it, as accelerate looks
        it up, or None.
        """
        while True:
            if name in self.entries:
                return normal(self.entries[name])
            if not name:
                return None
            name = name.rpartition(".")[0]

    def devices(self) -> tuple[int | str, ...]:
        """Return each device once, in the order of the map."""
        return tuple(dict.fromkeys(normal(device) for device in self.entries.values()))


def normal(device: int | str) -> int | str:
    """Return one spelling for a device: the number of an accelerator, or "cpu", "disk", "meta"."""
    if isinstance(device, int) or device in ("cpu", "disk", "meta"):
        return device
    index = device.rpartition(":")[2]
    # "cuda" alone is the current device, the first one.
    return int(index) if index.isdecimal() else 0


def read_map(path: str) -> DeviceMap:
    """Read a device map from a JSON file.

    Raises UsageError when it holds none, OSError when it cannot be read.
    """
    file = Path(path)
    if file.stat().st_size > _MAX_FILE:
        raise UsageError(f"{path} is too large for a device map: {file.stat().st_size} bytes")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error!s:.100}") from None
    found = parse_map(values, path)
    if found is None:
        raise UsageError(
            f"{path} is not a device map (expected a JSON object of module names and devices)"
        )
    return found


def parse_map(values: object, source: str) -> DeviceMap | None:
    """Return the device map that JSON values hold, None when they are none."""
    if not isinstance(values, dict) or not values:
        return None
    if not all(
        isinstance(device, int | str) and not isinstance(device, bool) for device in values.values()
    ):
        return None
    return DeviceMap(source=source, entries={str(name): device for name, device in values.items()})

"""What stands where a new checkpoint is to go: what one checkpoint consists of, and what is of nobody's checkpoint.

Only the first may be replaced: files that a checkpoint has at its top, and in the sub-folders that it has. A folder of
checkpoints, a file of the user's and a device are never such.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import Role, describe_folder_name, parse_file_name
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.paths import JOURNAL
from ckptfix.weights.deepspeed_files import deepspeed_below, is_deepspeed_file

_BESIDE_WEIGHTS = re.compile(
    r"(.+_)?config\.json|.*token.*\.(json|model)|vocab\.(json|txt)|merges\.txt|spiece\.model|"
    r"(model_)?index\.json|chat_template.*|README\.md|LICENSE.*|\.gitattributes|training_args\.bin|"
    r"trainer_state\.json|(scheduler|optimizer|rng_state.*)\.(pt|pth)|latest|zero_to_fp32\.py"
)
"""Files of other kinds that libraries put beside weights: transformers, peft, DeepSpeed."""

_SHARDED = re.compile(r"(__[0-9]+|\.rank[0-9]+)?\.metadata(\.tmp)?|.+\.distcp")
"""The files of a DCP folder, and what a save leaves there that was cut short."""

_USUAL = ("model", "pytorch_model", "pytorch_model_fsdp", "adapter_model", "diffusion_pytorch_model")
"""What the weights of a checkpoint are called, without their numbers; another name is that of another model."""


class Standing(NamedTuple):
    """Something at the place, relative to it; a folder that is not looked into ends in "/".

    ``is_ours``: a part of a checkpoint, or a copy of what comes again.
    """

    name: str
    is_ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """What the new checkpoint brings. ``copied``: relative path -> the file that it is a copy of.

    ``folders``: those that are made, with all above them. ``stems``: what its weights are called, without suffixes.
    """

    copied: dict[PurePosixPath, Path]
    folders: frozenset[PurePosixPath]
    stems: frozenset[str]


NOTHING = Coming(copied={}, folders=frozenset(), stems=frozenset())


def is_part_of_a_checkpoint(name: str) -> bool:
    """Whether a file is called as one that a checkpoint has, of any library."""
    return parse_file_name(name) is not None or any(
        pattern.fullmatch(name) for pattern in (_BESIDE_WEIGHTS, _SHARDED)
    )


def standing_in(folder: Path, coming: Coming) -> Iterator[Standing]:
    """Yield all that is in a folder, in order; what is no part of a checkpoint is not looked into.

    Raises OSError for what cannot be listed.
    """
    top = sorted(os.scandir(folder), key=lambda entry: entry.name)
    names = [entry.name for entry in top if not entry.is_dir(follow_symlinks=False)]
    others = _other_models(names, coming.stems)
    tags = {
        path for _, path in deepspeed_below(folder, [PurePosixPath(one.name) for one in top if one.is_dir()])
    }
    for entry in top:
        path = PurePosixPath(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            known = is_part_of_a_checkpoint(entry.name) and entry.name not in others
            yield Standing(entry.name, _is_ordinary(entry) and (known or _is_copied(entry, path, coming)))
        elif entry.name == JOURNAL:
            yield from _below(entry.path, path, coming, is_journal=True)
        elif path in tags or describe_folder_name(entry.name) is not None:
            yield from _below(entry.path, path, coming, is_part=True)
        else:
            yield from _below(entry.path, path, coming)


def _below(
    folder: str, path: PurePosixPath, coming: Coming, *, is_part: bool = False, is_journal: bool = False
) -> Iterator[Standing]:
    """Yield what is in a sub-folder; ``is_part``: of a checkpoint."""
    if not (is_part or is_journal or path in coming.folders):
        yield Standing(f"{path}/", False)
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        yield Standing(str(path), True)
    for entry in entries:
        inner = path / entry.name
        if entry.is_dir(follow_symlinks=False):
            below_journal = is_journal or (is_part and entry.name == JOURNAL)
            yield from _below(entry.path, inner, coming, is_journal=below_journal)
        else:
            known = is_journal or (is_part and _is_in_a_part(entry.name))
            yield Standing(str(inner), _is_ordinary(entry) and (known or _is_copied(entry, inner, coming)))


def _is_in_a_part(name: str) -> bool:
    return _SHARDED.fullmatch(name) is not None or is_deepspeed_file(name)


def _other_models(names: Collection[str], stems: Collection[str]) -> set[str]:
    """Return the weights among some names that are not of the one checkpoint: of a model with a name of its own.

    One such may be all that is there. ``stems``: what the weights are called that take their place; those are the same
    models in another format.
    """
    found: dict[str, set[str]] = defaultdict(set)
    is_usual = False
    for name in names:
        parsed = parse_file_name(name)
        if parsed is None or _BESIDE_WEIGHTS.fullmatch(name) or is_deepspeed_file(name):
            continue
        if parsed.role in (Role.UNKNOWN, Role.MODEL, Role.WEIGHTS_INDEX):
            stem = parsed.stem.partition(".")[0]  # model.fp16
            is_usual |= stem in _USUAL
            if stem not in _USUAL and parsed.stem not in stems:
                found[parsed.stem].add(name)
    return set().union(*found.values()) if is_usual or len(found) > 1 else set()


def _is_ordinary(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file or a link; never a pipe, a socket or a device."""
    return entry.is_symlink() or entry.is_file(follow_symlinks=False)


def _is_copied(entry: "os.DirEntry[str]", path: PurePosixPath, coming: Coming) -> bool:
    """Whether a file holds the same bytes as the one that will be copied to its place, so that nothing is lost."""
    original = coming.copied.get(path)
    if original is None or not entry.is_file():
        return False
    one, other = os.stat(original), entry.stat()
    if one.st_size != other.st_size:
        return False
    if (
        one.st_mtime_ns == other.st_mtime_ns or not one.st_size
    ):  # copies get the time of what they are copied from
        return True
    first, second = (os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in (original, entry.path))
    try:
        return first_difference(first, second, [Run(0, 0, one.st_size)]) is None
    finally:
        os.close(first)
        os.close(second)

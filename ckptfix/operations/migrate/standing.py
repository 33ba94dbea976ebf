"""What stands where a new checkpoint is to go: what one checkpoint consists of, and what is of nobody's checkpoint.

Only the first may be replaced: files that a library calls so at the top of a checkpoint, and in the sub-folders that it
has. A folder of checkpoints, another model, a file of the user's and a device are never such.
"""

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import ModelName, Role, describe_folder_name, parse_folder_name
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile
from ckptfix.operations.migrate.parts import (
    MODEL,
    family_of,
    is_beside_weights,
    is_of_ckptfix,
    is_of_dcp,
    is_of_deepspeed,
    is_state,
    needs_a_look,
)
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.paths import JOURNAL
from ckptfix.weights.deepspeed_files import deepspeed_below


class Standing(NamedTuple):
    """Something at the place, relative to it; a folder that is not looked into ends in "/".

    ``is_ours``: a part of a checkpoint, or a copy of what comes again. ``is_weights``: it holds tensors of a model.
    """

    name: str
    is_ours: bool
    is_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """What the new checkpoint brings. ``copied``: relative path -> the file that it is a copy of.

    ``folders``: those that are made, with all above them. ``families``: the models; None when that is not known yet.
    """

    copied: dict[PurePosixPath, Path]
    folders: frozenset[PurePosixPath]
    families: frozenset[ModelName] | None


NOTHING = Coming(copied={}, folders=frozenset(), families=None)


def tensor_files(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Return which of some files hold tensors, by what is in them. Raises OSError when the folder cannot be listed."""
    found = scan_folder(folder, wanted=lambda name: str(name) in names).components if names else ()
    return frozenset(
        one.path.name
        for one in found
        if isinstance(one.content, SafetensorsFile) or (isinstance(one.content, TorchFile) and one.tensors)
    )


def standing_in(folder: Path, coming: Coming) -> Iterator[Standing]:
    """Yield all that is in a folder, in order; what is no part of a checkpoint is not looked into.

    Raises OSError for what cannot be listed.
    """
    top = sorted(os.scandir(folder), key=lambda entry: entry.name)
    names = [entry.name for entry in top if not entry.is_dir(follow_symlinks=False)]
    tags = {
        path for _, path in deepspeed_below(folder, [PurePosixPath(one.name) for one in top if one.is_dir()])
    }
    families = _families(names, coming)
    is_model = MODEL in families
    is_dcp = is_model and any(is_of_dcp(name, data=True) for name in names)
    doubtful = [name for name in names if needs_a_look(name) and family_of(name) in families]
    with_tensors: frozenset[str] | None = None
    for entry in top:
        path = PurePosixPath(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            is_weights = family_of(entry.name) in families
            if is_weights and entry.name in doubtful:
                with_tensors = tensor_files(folder, doubtful) if with_tensors is None else with_tensors
                is_weights = entry.name in with_tensors
            is_data = is_weights and not entry.name.endswith(".json")
            is_data |= is_dcp and is_of_dcp(entry.name, data=True)
            known = is_weights or is_beside_weights(entry.name) or is_state(entry.name)
            known |= is_dcp and is_of_dcp(entry.name)
            is_ours = (known and _leads_to_a_file(entry)) or _is_copied(entry, path, coming)
            yield Standing(entry.name, is_ours, is_ours and is_data)
        elif entry.name == JOURNAL:
            yield from _below_journal(entry.path, path, path)
        else:
            is_part = path in tags or describe_folder_name(entry.name) is not None
            holds_model = not _is_of_optimizer(entry.name)
            yield from _below(
                entry.path,
                path,
                coming,
                is_part=is_part and (is_model or not holds_model),
                is_model=holds_model,
            )


def _families(names: Collection[str], coming: Coming) -> frozenset[ModelName]:
    """Return the models that may go: those that come again; while that is not known, the one that is there."""
    if coming.families is not None:
        return coming.families
    found = frozenset(family for name in names if (family := family_of(name)) is not None)
    if not found:
        return frozenset([MODEL])
    return found if len(found) == 1 else frozenset()


def _is_of_optimizer(folder: str) -> bool:
    parsed = parse_folder_name(folder)
    return parsed is not None and parsed.role is Role.OPTIMIZER


def _below(
    folder: str, path: PurePosixPath, coming: Coming, *, is_part: bool, is_model: bool
) -> Iterator[Standing]:
    """Yield what is in a sub-folder; ``is_part``: of a checkpoint; ``is_model``: its weights are there."""
    if not (is_part or path in coming.folders):
        yield Standing(f"{path}/", False)
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        yield Standing(str(path), True)
    for entry in entries:
        inner = path / entry.name
        if entry.is_dir(follow_symlinks=False):
            if is_part and entry.name == JOURNAL:
                yield from _below_journal(entry.path, inner, inner)
            else:
                yield from _below(entry.path, inner, coming, is_part=False, is_model=False)
            continue
        known = is_part and (is_of_dcp(entry.name) or is_of_deepspeed(entry.name)) and _leads_to_a_file(entry)
        is_data = is_model and (is_of_dcp(entry.name, data=True) or is_of_deepspeed(entry.name))
        yield Standing(str(inner), known or _is_copied(entry, inner, coming), known and is_data)


def _below_journal(folder: str, path: PurePosixPath, journal: PurePosixPath) -> Iterator[Standing]:
    """Yield what is in the folder that ckptfix keeps, which may hold more than it wrote."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        yield Standing(str(path), True)
    for entry in entries:
        inner = path / entry.name
        is_own = is_of_ckptfix(inner.relative_to(journal))
        if not entry.is_dir(follow_symlinks=False):
            is_regular = entry.is_file(follow_symlinks=False)
            yield Standing(str(inner), is_own and is_regular)
        elif is_own:
            yield from _below_journal(entry.path, inner, journal)
        else:
            yield Standing(f"{inner}/", False)


def _leads_to_a_file(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file, or a link to one; never a folder, a pipe, a socket or a device, nor a link to nothing."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return False


def _is_copied(entry: "os.DirEntry[str]", path: PurePosixPath, coming: Coming) -> bool:
    """Whether a file holds the same bytes as the one that will be copied to its place, so that nothing is lost."""
    original = coming.copied.get(path)
    if original is None or not _leads_to_a_file(entry):
        return False
    size = os.stat(original).st_size
    if size != entry.stat().st_size:
        return False
    first, second = (os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in (original, entry.path))
    try:
        return not size or first_difference(first, second, [Run(0, 0, size)]) is None
    finally:
        os.close(first)
        os.close(second)

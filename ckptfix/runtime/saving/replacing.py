"""Which files of a folder a new save replaces: those of our last save there, and those of any older ``save_state``.

Left behind, ``model_1.safetensors`` of a run that doubled its model makes two saves of one folder. All else is the
user's, whatever its name.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.sharded import belongs
from ckptfix.errors import FormatError
from ckptfix.storage.paths import JOURNAL
from ckptfix.weights.deepspeed_files import BESIDE, is_deepspeed_file

_STEMS = ("model", "pytorch_model", "pytorch_model_fsdp")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_DEEPSPEED = "pytorch_model"
_FIRST, _FALLBACK = "model.safetensors", "pytorch_model.bin"


def replaced_files(target: Path) -> set[str]:
    """Return the files, relative, that the next save into a folder replaces or removes."""
    existing = files_in(target)
    known = _recorded(target)
    components = set(_components(target, existing))
    if known or _is_save_state(components):
        known |= components - _of_the_user(components, known)
    return known


def files_in(folder: Path) -> set[str]:
    """Return all files, links and empty folders, relative, but for the journal."""
    found: set[str] = set()
    if not folder.is_dir():
        return found
    for root, folders, files in os.walk(folder):
        if root == str(folder) and JOURNAL in folders:
            folders.remove(JOURNAL)
        inside = os.path.relpath(root, folder)
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        found.update(os.path.normpath(os.path.join(inside, name)) for name in (*files, *links))
        if not files and not folders and inside != ".":
            found.add(inside)
    return found


def rank_of_states(name: str) -> int | None:
    """Return the rank whose random states a file holds, None for any other file."""
    parsed = parse_file_name(name)
    is_accelerates = parsed is not None and parsed.role is Role.RNG_STATE and not parsed.is_of_trainer
    return parsed.rank if parsed is not None and is_accelerates else None


def role_of(name: str) -> Role | None:
    """Return the role of a file that ``save_state`` or ``save_model`` writes by this name, None for any other."""
    parsed = parse_file_name(name)
    if parsed is None or parsed.is_of_trainer or rank_of_states(name) is not None:
        return None if rank_of_states(name) is None else Role.RNG_STATE
    if parsed.role is Role.MODEL:
        return Role.MODEL if parsed.stem in _STEMS and not parsed.variant else None
    if parsed.role is Role.WEIGHTS_INDEX:
        return Role.WEIGHTS_INDEX if name in _INDEXES else None
    return None if parsed.role in (Role.UNKNOWN, Role.RNG_STATE) else parsed.role


def _components(target: Path, existing: set[str]) -> Iterator[str]:
    """Yield what Accelerate's own names are: files, the files of DCP and DeepSpeed folders, and such empty folders."""
    has_deepspeed = False
    for name in existing:
        path = PurePosixPath(name)
        if len(path.parts) == 1:
            is_folder = (target / name).is_dir()
            if is_folder and parse_folder_name(name) is not None:
                yield name  # one of DCP that is empty
            elif not is_folder and role_of(name) is not None:
                yield name
            continue
        above, below = path.parts[0], path.parts[1]
        is_deepspeed = _is_deepspeed_folder(above) and is_deepspeed_file(below)
        has_deepspeed |= is_deepspeed
        is_dcp = parse_folder_name(above) is not None and (belongs(below) or below == JOURNAL)
        if is_dcp or (is_deepspeed and len(path.parts) == 2):
            yield name
    if has_deepspeed:
        yield from existing.intersection(map(str, BESIDE))


def _of_the_user(components: set[str], recorded: set[str]) -> set[str]:
    """Return the components that cannot be of the last save: best weights that a script keeps next to it must stay.

    ``load_state`` takes model.safetensors first, so pytorch_model.bin next to it is not of that save. After a save of
    ours, whose manifest lists its files, an unlisted one is of a later run of stock accelerate only if it is numbered.
    Nothing stays that ``load_state`` would take in place of a file of the new save.
    """
    if not recorded:
        return {_FALLBACK} & components if _FIRST in components else set()
    return {
        name
        for name in components - recorded - {_FIRST}
        if (parsed := parse_file_name(name)) is not None
        and not parsed.index
        and parsed.role is not Role.RNG_STATE
    }


def _is_save_state(components: set[str]) -> bool:
    """Whether components are of a ``save_state``: random states, a model with its optimizer, or numbered models.

    Weights alone may be the user's, as those of ``save_pretrained``.
    """
    roles = {role_of(name) for name in components}
    above = {PurePosixPath(name).parts[0] for name in components if "/" in name}
    roles |= {folder.role for name in above if (folder := parse_folder_name(name)) is not None}
    numbers = {parsed.index for name in components if (parsed := parse_file_name(name)) is not None
               and parsed.role is Role.MODEL and parsed.shard is None}  # fmt: skip
    return (
        Role.RNG_STATE in roles
        or {Role.MODEL, Role.OPTIMIZER} <= roles
        or {0, 1} <= numbers
        or any(map(_is_deepspeed_folder, above))
    )


def _is_deepspeed_folder(name: str) -> bool:
    number = name.removeprefix(f"{_DEEPSPEED}_")
    return name == _DEEPSPEED or (number != name and number.isdecimal())


def _recorded(target: Path) -> set[str]:
    """Return the files that our last save there wrote, by its manifest or by what an interrupted one left."""
    names: set[str] = set()
    with suppress(FormatError, OSError):
        manifest = read_manifest(target)
        if manifest is not None:  # and what other processes may have added
            names = {*manifest.files, *(f"random_states_{rank}.pkl" for rank in range(manifest.world_size))}
    with suppress(OSError, ValueError, TypeError):  # not there: no save was interrupted here
        names.update(str(name) for name in json.loads((target / JOURNAL / UNFINISHED).read_text()))
    return names

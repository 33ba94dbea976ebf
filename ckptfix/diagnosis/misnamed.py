"""States and weights that a loader does not find by their names: a folder instead of a file, or nearly the right name.

``load_state`` of accelerate 1.15 asks for each file by its exact name (``checkpointing.py``), and counts custom objects
by a pattern that takes leading zeros and folders, too (``accelerator.py``).
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import (
    NOT_STATES,
    TRAINER_STATE,
    FileName,
    Role,
    nearly_state,
    parse_deepspeed_folder_name,
    parse_file_name,
    parse_folder_name,
)
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.model_configs import CONFIG, library_of
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import FOLDER, NotATensorFile
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint

_COUNTED = re.compile(r"custom_checkpoint_\d+\.pkl")
"""Names of which ``load_state`` wants as many as there are registered objects."""


def misnamed(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield a finding for each state that a loader does not find by its name."""
    for path in folder.subfolders:
        name = parse_file_name(path.name)
        if name is not None and name.is_state_file:
            yield NotATensorFile(path=path, content=FOLDER)
    if any(one.role not in NOT_STATES and not one.name.is_of_trainer for one in folder.components):
        yield from _nearly_named(folder)
        yield from _miscounted(folder)


_STEMS = {
    "transformers": {".safetensors": "model", ".bin": "pytorch_model"},
    "diffusers": dict.fromkeys((".safetensors", ".bin"), "diffusion_pytorch_model"),
}
"""Library -> suffix of weights -> the stem under which its ``from_pretrained`` looks for them, and for their index.

transformers 5.23: ``_get_resolved_checkpoint_files``; diffusers 0.42: ``ModelMixin.from_pretrained``.
"""


def named_for_another_library(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield the weights that ``from_pretrained`` does not find, as they have the name of another library.

    The library is that of ``config.json``. ``load_state`` and the Trainer do not go by that file.
    """
    if PurePosixPath(CONFIG) not in folder.strays or PurePosixPath(TRAINER_STATE) in folder.strays:
        return
    weights = {one.path.name: one.name.stem.partition(".")[0] for one in folder.components if _is_found(one)}
    stems = {stem for of_library in _STEMS.values() for stem in of_library.values()}
    misplaced = [name for name, stem in weights.items() if stem in stems]
    library = library_of(folder.root / CONFIG) if misplaced else ""
    if not library or not {*_STEMS[library].values()}.isdisjoint(weights.values()):
        return
    name = misplaced[0]
    suffix = ".safetensors" if ".safetensors" in name else ".bin"
    wanted = _STEMS[library][suffix] + name.removeprefix(weights[name])
    yield IncompleteCheckpoint(
        path=PurePosixPath(wanted),
        missing=(wanted,),
        known_by=f"{CONFIG} is of {library}, which does not look for {name!r}",
        misnamed=name,
    )


def _is_found(component: Component) -> bool:
    """Return whether a library finds a file by its name: weights in one file, or the index of shards."""
    return component.name.is_of_library and component.name.shard is None


def _nearly_named(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield the missing states of which a file nearly has the name.

    A file with the keys and shapes of a model next to it may be a script's export of that model, such as
    ``model_01.safetensors`` after an epoch. It counts as a second model only if an optimizer has no model.
    """
    existing = {_part(one.name) for one in folder.components if not one.name.is_of_trainer}
    for path in folder.subfolders:
        state = parse_folder_name(path.name) or parse_deepspeed_folder_name(path.name)
        if state is not None:
            existing.add((state.role, state.index))
        if state is not None and state.is_deepspeed:
            existing.add((Role.OPTIMIZER, state.index))
    count = Counter(role for role, _ in existing)
    layouts = [_layout(one) for one in folder.components if one.role is Role.MODEL]
    unknown = {one.path: one for one in folder.components if one.role is Role.UNKNOWN}
    for path in (*unknown, *folder.strays):
        meant = nearly_state(path.name)
        if meant is None or _COUNTED.fullmatch(path.name):
            continue
        role, number = _part(meant)
        if (role, number) in existing or number > count[role]:
            continue
        if (
            path in unknown
            and _layout(unknown[path]) in layouts
            and count[Role.OPTIMIZER] <= count[Role.MODEL]
        ):
            continue
        yield IncompleteCheckpoint(
            path=PurePosixPath(str(meant)),
            missing=(str(meant),),
            known_by=f"{str(path)!r} is there, and load_state does not look for that name",
            misnamed=str(path),
        )


def _miscounted(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield the custom objects that ``load_state`` looks for, as it counts files with other numbers."""
    paths = (*(one.path for one in folder.components), *folder.strays, *folder.subfolders)
    counted = {path.name for path in paths if _COUNTED.fullmatch(path.name)}
    extra = sorted(name for name in counted if parse_file_name(name) is None)
    wanted = [
        str(FileName(role=Role.CUSTOM, stem="custom_checkpoint", suffix=".pkl", index=i))
        for i in range(len(counted))
    ]
    missing = tuple(name for name in wanted if name not in counted)
    if extra and missing:
        yield IncompleteCheckpoint(
            path=PurePosixPath(missing[0]),
            missing=missing,
            known_by=f"load_state counts {extra[0]!r}, and looks for the numbers in turn",
            misnamed=extra[0],
        )


def _part(name: FileName) -> tuple[Role, int]:
    """Return the role of a state, and its position or its rank."""
    return name.role, name.index if name.rank is None else name.rank


def _layout(component: Component) -> list[tuple[str, tuple[int, ...]]]:
    """Return the keys and shapes of a file."""
    return sorted((tensor.fqn, tensor.shape) for tensor in component.tensors)

"""Parts that a folder without an error lacks to resume a run, if it may not be meant to.

A model in shards is one: ``load_state`` reads one file a model, and never an index. A save hook
that removes the weights and calls ``save_pretrained`` leaves such a folder, and its load hook reads
it. Configs next to the shards show that, or the other checkpoints of the run.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName, model_file
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.manifest import read_migrated
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, GENERATION, PIPELINE
from ckptfix.checkpoint.neighbours import is_loaded_model, neighbours_have, parts_of
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint, UnreadShards
from ckptfix.diagnosis.saved_optimizers import saved_optimizers

FOREIGN = (CONFIG, ADAPTER, PIPELINE, TRAINER_STATE)
"""Files next to weights that a library exported on purpose, so that the folder is not a
``save_state`` one.
"""


def unresumable(folder: CheckpointFolder, *, has_optimizer: bool) -> Iterator[str]:
    """Yield in words what a folder without an error lacks to resume a run, if it may not be meant
    to.

    ``has_optimizer``: DeepSpeed's own checkpoint holds it, or a file of another name may.
    """
    roles = {role for role, _ in parts_of(paths_of_states(folder))}
    if has_optimizer or Role.OPTIMIZER in roles:
        return
    if Role.MODEL in roles and roles & {Role.RNG_STATE, Role.SCHEDULER}:
        yield "optimizers: none saved; load_state fails in a script that prepares one"
    elif Role.MODEL in roles and not _is_foreign(folder):
        yield (
            "whether a run can resume: the folder has only weights; load_state also needs the "
            "states of the run"
        )
    elif Role.RNG_STATE in roles:
        yield STATES_ALONE


def _unread_index(folder: CheckpointFolder) -> FileName | None:
    """Return the index of a model of which ``load_state`` finds no file (accelerate 1.15), None
    without one.

    FSDP and DeepSpeed keep the model in a folder.
    """
    if not folder.is_save_state or any(kind != PLAIN_FOLDER for kind in folder.subfolders.values()):
        return None
    names = [one.name for one in folder.components]
    single = {name.index for name in names if is_loaded_model(name)}
    indexes = (name for name in names if name.role is Role.WEIGHTS_INDEX)
    return next(
        (name for name in indexes if name.load_order and name.load_order[0] not in single), None
    )


def unchecked_shards(folder: CheckpointFolder) -> Iterator[str]:
    """Yield in words that nothing but the script can load the shards of a folder."""
    index = _unread_index(folder)
    if index is not None:
        yield (
            "whether the script loads the shards: load_state reads one file per model, not "
            f"{index}; a load hook can read it"
        )


def diagnose_unread_shards(case: Case) -> Iterator[UnreadShards]:
    """Yield the file of a model that a folder has in shards alone, but where a hook of the script
    saves it so.
    """
    index = _unread_index(case.folder) if not case.is_file else None
    if index is None or index.load_order is None or case.is_recorded:
        return
    near = case.neighbours.nearest()
    position = index.load_order[0]
    if any(position not in save.names.single for save in near):
        return
    is_pretrained = any(case.folder.has_file(name) for name in (CONFIG, ADAPTER, GENERATION))
    if is_pretrained and not near:
        return
    wanted = str(model_file(".safetensors", position))
    there = f", and {neighbours_have(len(near), len(near))} one file" if near else ""
    yield UnreadShards(
        path=PurePosixPath(wanted),
        missing=(wanted,),
        known_by=f"{index} exists, but load_state does not read it{there}",
        may_be_dropped=is_pretrained,
    )


def only_for_fsdp(folder: CheckpointFolder) -> Iterator[IncompleteCheckpoint]:
    """Yield a finding for each model that ``load_state`` finds with FSDP alone, next to optimizers
    of a run without it.

    With FSDP, accelerate saves every optimizer by the keys of its parameters (1.0 to 1.15,
    ``save_fsdp_optimizer``).
    """
    names = [one.name for one in folder.components if one.name.load_order is not None]
    others = {name.index for name in names if name.stem != _FSDP_STEM}
    alone = [name for name in names if name.stem == _FSDP_STEM and name.index not in others]
    if not (alone and folder.is_save_state):
        return
    optimizers = [one for one in saved_optimizers(folder, ()) if any(one.groups)]
    if not optimizers or any(one.is_named for one in optimizers):
        return
    for name in alone:
        wanted = str(model_file(".safetensors", name.index))
        read = f"{name} exists, but load_state reads it only with FSDP"
        words = f"{read}, and {optimizers[0].path} comes from a run without FSDP"
        yield IncompleteCheckpoint(path=PurePosixPath(wanted), missing=(wanted,), known_by=words)


_FSDP_STEM = "pytorch_model_fsdp"


def only_empty_tensors(folder: CheckpointFolder) -> Iterator[str]:
    """Yield in words that a model with one tensor without elements may have had more of them.

    accelerate takes them for tensors that share their memory, which begins at address 0, and saves
    the first of them in safetensors alone (1.0 to 1.15, ``clean_state_dict_for_safetensors``).
    ``load_state`` misses the others.
    """
    for component in folder.components if folder.is_save_state else ():
        if component.name.suffix == ".safetensors" and component.name.load_order is not None:
            empty = [tensor.fqn for tensor in component.tensors if 0 in tensor.shape]
            if len(empty) == 1:
                yield (
                    f"tensors without elements: {component.path} has {empty[0]!r}; if there were "
                    "several, save_state kept only the first in safetensors, and load_state fails "
                    "(safe_serialization=False keeps all)"
                )


def keys_lost_by_migration(folder: CheckpointFolder) -> Iterator[str]:
    """Yield in words that a migrated model may lack the second key of tied weights.

    A ``.bin`` of one key opens as any other, and stock ``load_state`` fails with a missing key.
    """
    if folder.only is None and read_migrated(folder.root).may_lack_keys:
        yield (
            "tied weights: migrate wrote this model from safetensors files, which leave out the "
            "second key; load_state fails if the model ties weights"
        )


def lost_step(folder: CheckpointFolder) -> str | None:
    """Return in words that a ``save_state`` folder has no random states, which it always writes,
    None for others.
    """
    roles = {role for role, _ in parts_of(paths_of_states(folder))}
    if not {Role.MODEL, Role.OPTIMIZER} <= roles or Role.RNG_STATE in roles or _is_foreign(folder):
        return None
    return (
        "random states: none saved; load_state restores neither the random "
        "generators nor accelerator.step"
    )


STATES_ALONE = (
    "weights: the folder has only per-rank states, as on a node that saves to its own disk"
)
"""Said of a folder without the files of rank 0, unless a checkpoint next to it has them."""


def _is_foreign(folder: CheckpointFolder) -> bool:
    return any(path.name in FOREIGN for path in folder.strays)


def paths_of_states(folder: CheckpointFolder) -> list[PurePosixPath]:
    """Return the paths of all files and folders of states."""
    return [*(component.path for component in folder.components), *folder.subfolders]

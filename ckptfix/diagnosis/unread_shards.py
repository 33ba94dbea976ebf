"""Models in shards in a folder of ``save_state``: ``load_state`` reads one file a model, and never
an index.

A save hook that removes the weights and calls ``save_pretrained`` leaves such a folder, and its
load hook reads it. Configs next to the shards show that, or the other checkpoints of the run.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import FileName, model_file
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, GENERATION
from ckptfix.checkpoint.neighbours import is_loaded_model, neighbours_have
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.incomplete import UnreadShards


def unread_index(folder: CheckpointFolder) -> FileName | None:
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
    index = unread_index(folder)
    if index is not None:
        yield (
            "whether the script loads the shards: load_state reads one file per model, not "
            f"{index}; a load hook can read it"
        )


def diagnose_unread_shards(case: Case) -> Iterator[UnreadShards]:
    """Yield the file of a model that a folder has in shards alone, but where a hook of the script
    saves it so.
    """
    index = unread_index(case.folder) if not case.is_file else None
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

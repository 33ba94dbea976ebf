"""The manifest of a migrated checkpoint: what the source's says, made true of the new files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint, read_manifest
from ckptfix.errors import FormatError
from ckptfix.operations.migrate.beside import LeftOut
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.migrate.producing import Produced
from ckptfix.operations.sealing.contents import lasting_label
from ckptfix.storage.atomic import create_file, sync_folder
from ckptfix.storage.paths import JOURNAL, MANIFEST
from ckptfix.weights.stored import Format, Weights

_Value = TypeVar("_Value")


def source_manifest(plan: MigrationPlan) -> tuple[Manifest | None, LeftOut | None]:
    """Return the manifest that the new checkpoint's is made from, or why one that is there cannot be."""
    if plan.source.only is not None or plan.is_file:
        return None, None
    try:
        return read_manifest(plan.source.root), None
    except (FormatError, OSError) as error:
        return None, LeftOut(MANIFEST, f"it cannot be read: {error}")


def record(
    plan: MigrationPlan, old: Manifest, new: tuple[Weights, ...], folder: Path, produced: Produced
) -> None:
    """Write the manifest of the new checkpoint in ``folder``, durably. ``new``: its models as they were found there.

    Digests of tensors are written when they are known: after a verified migration. Raises OSError.
    """
    carried = set(map(str, plan.carried))
    sizes = {str(file.path): file.size for model in plan.models for file in model.files}
    sizes |= {str(file.path): file.size for file in plan.rewritten if str(file.path) in old.files}
    manifest = replace(
        old,
        models=tuple(
            _entry(model, replace(weights, label=lasting_label(weights, folder)), digests, old)
            for model, weights, digests in zip(plan.models, new, produced.digests, strict=True)
        ),
        files=_kept(old.files, carried) | sizes if old.is_of_a_save else {},
        sha256=_kept(old.sha256, carried) | produced.sha256 if old.sha256 else {},
    )
    (folder / JOURNAL).mkdir()
    create_file(folder / MANIFEST, manifest.to_bytes())
    sync_folder(folder / JOURNAL)
    sync_folder(folder)


def _kept(recorded: Mapping[str, _Value], carried: set[str]) -> dict[str, _Value]:
    return {name: value for name, value in recorded.items() if name in carried}


def _entry(model: PlannedModel, new: Weights, digests: Mapping[str, str], old: Manifest) -> ManifestEntry:
    """Return what is recorded of one model. Names that the file holds are those that a reader of its header sees."""
    is_apart = new.format is Format.SAFETENSORS
    names = {name: source.new for name, source in model.sources.items()}
    ties = dict(model.weights.ties)
    held = names if is_apart else names | {name: names[kept] for name, kept in ties.items()}
    return ManifestEntry(
        index=new.index,
        file=new.label,
        type=_type(model.weights, old),
        keys=key_fingerprint((name, one.dtype, one.shape) for name, one in held.items()),
        aliases=ties if is_apart else {},
        digests={name: digests[ties.get(name, name)] for name in held} if digests else {},
    )


def _type(weights: Weights, old: Manifest) -> str:
    """Return the class of a model, "" when the old manifest does not speak of this one."""
    for entry in old.models:
        is_folder = weights.format in (Format.DCP, Format.DEEPSPEED)
        is_it = entry.file == weights.label or (is_folder and entry.file not in old.files)
        if entry.index == weights.index and is_it:
            return entry.type
    return ""

"""Folders whose entries are not those of this run, because the run that saved them registered objects twice.

A guarded run registers each object once. Stock ``load_state`` goes by number: after a duplicate it would load the
student into the teacher. And keys that a repair made bare do not fit a model that a script wraps by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptfix.checkpoint.entries import Entry, doubles, model_entries, state_entries
from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.runtime.loading.randomness import not_of_a_rank
from ckptfix.runtime.loading.report import ComponentReport, LoadReport, Need, Status
from ckptfix.runtime.ranks import SHARDED

_STATES = ((Role.OPTIMIZER, "_optimizers"), (Role.SCHEDULER, "_schedulers"), (Role.CUSTOM, "_custom_objects"))


def is_shifted(accelerator: Any, root: Path) -> bool:
    """Whether stock ``load_state`` would take wrong entries of a folder, or fail for nothing but a wrapper's name.

    Reads headers; bytes only where entries look alike and there are more of them than objects. Raises OSError.
    """
    if accelerator.distributed_type in SHARDED or not root.is_dir():
        return False
    folder = scan_folder(root, wanted=not_of_a_rank)
    models = model_entries(folder, usable_manifest(folder.root))
    if _has_duplicates(root, models, len(accelerator._models)):
        return True
    if any(
        _has_duplicates(root, state_entries(folder, role, ()), len(getattr(accelerator, registry)), of=role)
        for role, registry in _STATES
    ):
        return True
    by_index = {entry.index: entry for entry in models}
    return any(
        index in by_index and not by_index[index].problem and not _is_wrapped_as(model, by_index[index].chain)
        for index, model in enumerate(accelerator._models)
    )


def dataloaders_need(accelerator: Any, root: Path) -> Need:
    """Return what to insist on for data loaders: nothing where more states than loaders lie there, and they differ.

    Of a loader that was prepared twice one state moved on and one did not, and nothing says which is which.
    """
    folder = scan_folder(root, wanted=not_of_a_rank)
    for role in (Role.DATALOADER, Role.SAMPLER):
        entries = state_entries(folder, role, ())
        if len(entries) > len(accelerator._dataloaders) > 0 and len(entries) > 1 + len(
            doubles(root, entries, wrapped=False)
        ):
            return Need.IGNORE
    return Need.WARN


def moved(report: LoadReport) -> list[str]:
    """Return in words what went elsewhere than its number says, and what was left out."""
    return [str(one) for one in report.components if one.status is Status.ADAPTED or _is_duplicate(one)]


def _is_duplicate(component: ComponentReport) -> bool:
    return component.status is Status.SKIPPED and " again as " in component.reason


def _has_duplicates(root: Path, entries: Sequence[Entry], objects: int, *, of: Role = Role.MODEL) -> bool:
    """Whether duplicates move later entries: of one object none is moved, but custom objects must agree in number."""
    fewest = 1 if of is Role.CUSTOM else 2
    return len(entries) > objects >= fewest and bool(doubles(root, entries, wrapped=False))


def _is_wrapped_as(model: Any, chain: tuple[str, ...]) -> bool:
    named = (name for names in (model.named_parameters(), model.named_buffers()) for name, _ in names)
    if common_wrappers(tuple(named)) == chain:
        return True
    # Asked last, as it may copy: its own state_dict(), or a buffer that is not saved, can make other names of them.
    return common_wrappers(model.state_dict()) == chain

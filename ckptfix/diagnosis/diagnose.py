"""Diagnosis of a scanned folder. Reads tensor bytes only where two entries agree in keys, dtypes
and shapes.
"""

from collections.abc import Iterator

from ckptfix.checkpoint.load_inputs import (
    adapters_without_config,
    loads_of,
    lora_of_diffusers,
)
from ckptfix.checkpoint.trainer_folders import trainer_progress
from ckptfix.diagnosis.case import DAMAGED_CONTENT, DAMAGED_HEADERS, Case, Rule
from ckptfix.diagnosis.completeness import diagnose_save
from ckptfix.diagnosis.dcp_folders import diagnose_dcp_folders, diagnose_items
from ckptfix.diagnosis.equal_entries import (
    diagnose_gaps,
    diagnose_models,
    diagnose_states,
)
from ckptfix.diagnosis.families import diagnose_families
from ckptfix.diagnosis.file_damage import diagnose_files
from ckptfix.diagnosis.findings.base import Finding, Told
from ckptfix.diagnosis.findings.damaged import CrcMismatch, TrailingBytes
from ckptfix.diagnosis.findings.sharded import IndexMismatch, LeftoverIndex
from ckptfix.diagnosis.indexes import diagnose_shards
from ckptfix.diagnosis.left_out import (
    unchecked_bundles,
    unchecked_dcp,
    unchecked_files,
    unchecked_folders,
    unchecked_loaders,
    unchecked_objects,
    unchecked_of_save,
    unchecked_pipeline,
    unchecked_scalers,
    unknown_files,
    unread_bytes,
    unreadable_files,
)
from ckptfix.diagnosis.loads import JUDGED, diagnose_loads
from ckptfix.diagnosis.optimizer_states import diagnose_optimizers
from ckptfix.diagnosis.optimizer_values import (
    diagnose_empty_optimizers,
    diagnose_optimizer_values,
    trained_steps,
)
from ckptfix.diagnosis.rank_damage import (
    diagnose_parts,
    diagnose_rank_files,
    diagnose_world_ranks,
    unchecked_parts,
)
from ckptfix.diagnosis.schedules import (
    diagnose_other_schedules,
    diagnose_progress,
    diagnose_schedules,
    unread_schedules,
)
from ckptfix.diagnosis.trainer_completeness import broken_trainer_state
from ckptfix.diagnosis.wrapped_keys import diagnose_names
from ckptfix.diagnosis.wrong_states import (
    diagnose_dead_scalers,
    diagnose_keys,
    diagnose_lost_steps,
    diagnose_meta_tensors,
    diagnose_placeholders,
    diagnose_renamed,
    diagnose_wrong_folders,
    diagnose_wrong_states,
    unchecked_weights,
    unread_weights,
)
from ckptfix.storage.reading import unchanged


def damaged_files(case: Case) -> list[Finding]:
    """Find the damage of each single file, but for what another finding explains."""
    rebuilt = (
        one.path
        for one in case.findings
        if isinstance(one, LeftoverIndex) or (isinstance(one, IndexMismatch) and one.is_fixable)
    )
    return diagnose_files(case.folder, case.reading, explained=frozenset(rebuilt))


def of_deepspeed(case: Case) -> Iterator[Finding]:
    """Yield the damage of each checkpoint of DeepSpeed."""
    for state in case.deepspeed:
        yield from state.findings


def judged_optimizers(case: Case) -> Iterator[Finding | str]:
    """Compare the optimizers in files of their own with the weights."""
    yield from diagnose_optimizers(
        case.folder,
        case.sharded,
        case.unreliable,
        case.optimizers,
        has_deepspeed=bool(case.deepspeed),
    )


def judged_bundles(case: Case) -> Iterator[Finding]:
    """Judge the optimizers in files of scripts, each alone."""
    for bundle in case.bundles:
        yield from bundle.findings


def judged_loads(case: Case) -> Iterator[Told]:
    """Judge what each library that loads the folder does with its configs and keys."""

    def count_steps() -> int:
        step = trainer_progress(case.folder.root).step if case.is_file else case.trainer.step
        return trained_steps(case.folder.root, step, case.optimizers)

    has_optimizer = bool(case.every_optimizer)
    loads = [
        *loads_of(
            case.folder,
            case.groups,
            libraries=JUDGED,
            data=case.data,
            has_optimizer=has_optimizer,
            count_steps=count_steps,
        )
    ]
    loads += adapters_without_config(case.folder, case.groups, loads)
    loads += lora_of_diffusers(case.folder, case.groups, has_optimizer=has_optimizer)
    # Those with FSDP, whose weights the Trainer loads in another way, have other names.
    trained = sum(
        len(group)
        for saved in case.optimizers
        for group in saved.groups
        if saved.path.suffix == ".pt"
    )
    yield from diagnose_loads(loads, trained, case.folder.components)


OF_FILES: tuple[Rule, ...] = (
    unreadable_files,
    # An index that will be rebuilt explains why it cannot be parsed.
    diagnose_shards,
    diagnose_parts,
    damaged_files,
)
"""Rules about the bytes of single files, and of the files of one model."""

OF_CONTENTS: tuple[Rule, ...] = (
    # A file that lost bytes is related to another one, never equal.
    diagnose_models,
    diagnose_states,
    diagnose_gaps,
    # The keys of a duplicate are not judged: it goes.
    diagnose_names,
    of_deepspeed,
    diagnose_rank_files,
    diagnose_world_ranks,
    diagnose_lost_steps,
    diagnose_placeholders,
    diagnose_wrong_states,
    diagnose_dead_scalers,
    diagnose_renamed,
    diagnose_meta_tensors,
    diagnose_keys,
)
"""Rules about what a file holds, by its name and by the files next to it."""

OF_DCP: tuple[Rule, ...] = (diagnose_dcp_folders, diagnose_items, diagnose_wrong_folders)
"""Rules about DCP folders."""

OF_STATES: tuple[Rule, ...] = (
    judged_optimizers,
    judged_bundles,
    diagnose_optimizer_values,
    diagnose_schedules,
    diagnose_other_schedules,
    diagnose_progress,
    diagnose_empty_optimizers,
    # After the optimizers: they are compared with intact weights, and both families of a model are.
    diagnose_families,
    broken_trainer_state,
    judged_loads,
    # Last: what is damaged is not missing.
    diagnose_save,
)
"""Rules that compare intact files with each other, and with what a load and a save know of them."""

LEFT_OUT: tuple[Rule, ...] = (
    unchecked_parts,
    unchecked_folders,
    unchecked_dcp,
    unchecked_files,
    unread_bytes,
    unchecked_of_save,
    unknown_files,
    unchecked_bundles,
    unchecked_objects,
    unchecked_loaders,
    unchecked_scalers,
    unread_schedules,
    unread_weights,
    unchecked_weights,
    unchecked_pipeline,
)
"""Rules that tell in words what nothing in a folder shows, or what only a slower check reads."""


def diagnose(case: Case) -> Case:
    """Find every kind of damage in a scanned folder, and return the case with the findings.

    Raises FileChangedError when a file changed since it was scanned, OSError when it can no longer
    be read.
    """
    with unchanged(case.folder.root, case.scanned):
        for state in case.deepspeed:
            case.scanned.update(state.scanned)
        case.ask(OF_FILES)
        # Bytes behind the end harm no tensor.
        of_bytes = (kind for kind in DAMAGED_CONTENT if kind is not TrailingBytes)
        case.corrupt = case.paths(*of_bytes, CrcMismatch)
        case.ask(OF_CONTENTS)
        if case.sharded:
            case.ask(OF_DCP)
        case.damaged, case.unreliable = case.paths(*DAMAGED_CONTENT), case.paths(*DAMAGED_HEADERS)
        case.ask(OF_STATES)
        case.close()
    told, case.not_checked = case.not_checked, []
    case.ask(LEFT_OUT)
    case.not_checked += told
    return case

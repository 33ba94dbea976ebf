"""The manifest of a migrated checkpoint: what the source's says, made true of the new files."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckptfix.checkpoint.manifest import MAX_MANIFEST, Manifest, ManifestEntry, key_fingerprint, read_manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.migrate.producing import Produced
from ckptfix.operations.sealing.contents import lasting_label
from ckptfix.operations.sealing.recorded import readable_manifest
from ckptfix.storage.atomic import create_file, sync_folder
from ckptfix.storage.paths import JOURNAL, MANIFEST, command, shell_path
from ckptfix.weights.stored import Format, Weights

_Value = TypeVar("_Value")


def source_manifest(plan: MigrationPlan) -> Manifest | None:
    """Return the manifest beside a source, None when there is none.

    Raises OperationError, with what to do, for one that cannot be read: nothing could be compared with it.
    """
    path = plan.source.root / MANIFEST
    try:
        return readable_manifest(plan.source.root)
    except OSError as error:
        raise OperationError(
            f"{path} cannot be read: {error.strerror}; next, to be allowed to: chmod u+rX "
            f"{' '.join(map(shell_path, (path.parent, path)))}"
        ) from error


def record(
    plan: MigrationPlan, old: Manifest, new: tuple[Weights, ...], folder: Path, produced: Produced
) -> tuple[str, ...]:
    """Write the manifest of the new checkpoint in ``folder``, durably. ``new``: its models as they were found there.

    Digests of tensors are written when they are known: after a verified migration. Returns in words what was left out,
    as a manifest that long would not be read. Raises OperationError when nothing that could be would help; OSError.
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
    words: tuple[str, ...] = ()
    data = manifest.to_bytes()
    if len(data) > MAX_MANIFEST:
        data, words = _shortened(plan, manifest, len(data))
    (folder / JOURNAL).mkdir()
    create_file(folder / MANIFEST, data)
    sync_folder(folder / JOURNAL)
    sync_folder(folder)
    return words


def _shortened(plan: MigrationPlan, manifest: Manifest, length: int) -> tuple[bytes, tuple[str, ...]]:
    """Return a manifest without the digests of tensors, and in words that it has none."""
    data = replace(manifest, models=tuple(replace(one, digests={}) for one in manifest.models)).to_bytes()
    too_long = f"would take {length} bytes, {MAX_MANIFEST} are read at most"
    if len(data) > MAX_MANIFEST:
        raise OperationError(
            f"{plan.output}: its manifest {too_long}, and {len(data)} without the digests of tensors; nothing was "
            f"written; next, to migrate without it: mv {shell_path(plan.source.root / MANIFEST)} ELSEWHERE"
        )
    return data, (f"{plan.output / MANIFEST} has no digests of tensors: with them it {too_long}",)


def outdated(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words which manifests above the output do not speak of what is written there, and what to type."""
    output = plan.output.absolute()
    names = ["."] if plan.is_file else [str(file.path) for model in plan.models for file in model.files]
    for folder in output.parents:
        manifest = None
        with suppress(FormatError, OSError):  # who reads it next says so
            manifest = read_manifest(folder)
        if manifest is None:
            continue
        below = output.relative_to(folder)
        written = {str(below / name) for name in (*names, *plan.removed)}
        is_changed = not written.isdisjoint({*manifest.sha256, *manifest.files})
        if manifest.sha256 or is_changed:
            yield (
                f"{folder / MANIFEST} {'says otherwise of' if is_changed else 'does not list'} what is written to "
                f"{below}; next, to make it true: {command('seal', folder, '', *(['--force'] if is_changed else []))}"
            )


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
    """Return the class of a model, "" when the old manifest does not list this one."""
    for entry in old.models:
        is_folder = weights.format in (Format.DCP, Format.DEEPSPEED)
        is_it = entry.file == weights.label or (is_folder and entry.file not in old.files)
        if entry.index == weights.index and is_it:
            return entry.type
    return ""

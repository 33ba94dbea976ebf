"""``migrate``: the same tensors in another format. Plan, show, write beside, prove, and one rename.

``options`` are the user's words, ``planning`` what will happen (with ``naming`` and ``renaming``), ``producing`` writes
it (with ``copying``, ``filling`` and ``hashing``), ``proving`` reads it back, ``recording`` keeps the manifest true,
``staging`` puts it in its place.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.operations.migrate.checking import Recorded
from ckptfix.operations.migrate.options import make_options
from ckptfix.operations.migrate.placing import check_paths, ensure_apart, ensure_as_planned, removed_at
from ckptfix.operations.migrate.planning import MigrationPlan, make_plan
from ckptfix.operations.migrate.producing import produce
from ckptfix.operations.migrate.proving import open_new, prove
from ckptfix.operations.migrate.receipt import MigrateReceipt, receipt_of
from ckptfix.operations.migrate.recording import outdated, record, source_manifest
from ckptfix.operations.migrate.remarks import not_checked_of, unfit_optimizers
from ckptfix.operations.migrate.soundness import passed_on
from ckptfix.operations.migrate.sources import Watch, ensure_complete, ensure_finished, files_read
from ckptfix.operations.migrate.staging import put_in_place, staging_for
from ckptfix.operations.policy import Keys
from ckptfix.storage.paths import existing
from ckptfix.weights.opening import open_checkpoint
from ckptfix.weights.stored import Format

__all__ = ["MigrateReceipt", "MigrationPlan", "migrate"]

OnPlan = Callable[[MigrateReceipt], None]
"""Called with the receipt of a dry run, before anything is written."""


def migrate(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | Format,
    max_shard_size: int | str | None = None,
    keys: str | Keys | None = None,
    dtype: str | None = None,
    drop_opaque: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_plan: OnPlan | None = None,
) -> MigrateReceipt:
    """Write the checkpoint ``src`` to ``dst`` in the format ``to``: ``safetensors``, ``bin`` or ``dcp``.

    ``src`` is not changed, and ``dst`` is there whole or not at all. ``max_shard_size``: bytes, or ``"5GB"``. ``keys``:
    new names, as ``repair`` gives them; None leaves them alone. ``dtype``: ``"bf16"`` and the like, of floating point
    tensors; ``"original"``: of DeepSpeed, the weights as in training and not the fp32 ones of its optimizer.
    ``verify``: read everything back and compare digests. ``progress`` gets byte counts.

    Raises UsageError for words and paths that make no sense, OperationError when it could not finish, OSError; nothing
    is left behind then.
    """
    options = make_options(
        to=to,
        max_shard_size=max_shard_size,
        keys=keys,
        dtype=dtype,
        drop_opaque=drop_opaque,
        verify=verify,
        overwrite=overwrite,
    )
    path, output = existing(src), Path(dst)
    with paused_gc():
        check_paths(path, output, options)
        watch = Watch(path)
        source = open_checkpoint(path, original=options.original)
        if options.original and all(one.format is not Format.DEEPSPEED for one in source.weights):
            raise UsageError(f"--dtype original: {path} holds no weights of DeepSpeed; leave it out")
        ensure_finished(source)
        plan = make_plan(source, path, output, options)
        warnings = (*passed_on(path, source.weights, options.keys), *unfit_optimizers(plan))
    ensure_apart(plan)
    plan = replace(plan, removed=removed_at(plan))
    beside = source_manifest(plan)
    manifest = (
        None if source.only is not None or plan.is_file else beside
    )  # what is written beside the new files
    if manifest is not None:
        plan = replace(plan, left_out=(*plan.left_out, *ensure_complete(source.root, manifest)))
    watch.check(files_read(plan))
    recorded = Recorded(plan, beside)
    is_guarded = manifest is not None and manifest.is_of_a_save
    not_checked = (*not_checked_of(plan, is_guarded=is_guarded), *recorded.not_checked())
    warnings = (*warnings, *outdated(plan))
    planned = receipt_of(plan, warnings=warnings, not_checked=not_checked, dry_run=True)
    if on_plan is not None:
        on_plan(planned)
    if dry_run:
        return planned
    with staging_for(output, is_file=plan.is_file) as staging:
        with_sha256 = manifest is not None and bool(manifest.sha256)
        produced = produce(plan, staging.new, recorded, with_sha256=with_sha256, progress=progress)
        new = open_new(plan, staging.whole)
        if options.verify:
            prove(plan, new, staging.new, produced, progress)
        if manifest is not None:
            warnings += record(plan, manifest, new, staging.new, produced)
        watch.check(files_read(plan))
        if options.overwrite:
            ensure_as_planned(plan)
        put_in_place(staging, overwrite=options.overwrite)
    return receipt_of(plan, warnings=warnings, not_checked=not_checked, verified=options.verify)

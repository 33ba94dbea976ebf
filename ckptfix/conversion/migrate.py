"""Migration of a checkpoint to another format: plan, show, write, prove, one rename, and the
receipt.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import FileName, is_file_of_parts, parse_file_name
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.loading_order import needs_option
from ckptfix.checkpoint.roles import Role
from ckptfix.conversion.destination import (
    check_paths,
    ensure_apart,
    ensure_unchanged,
    files_replaced,
    write_receipt,
)
from ckptfix.conversion.kept_files import doubted, shared_staging
from ckptfix.conversion.migration_plan import (
    ALL,
    WEIGHTS,
    MigrationPlan,
    PlannedModel,
    PlannedState,
    make_options,
    make_plan,
)
from ckptfix.conversion.producing import Produced, outdated, produce, record, source_manifest
from ckptfix.conversion.proving import (
    prove_copies,
    prove_files,
    prove_model,
    prove_modules,
    prove_states,
)
from ckptfix.conversion.sources import (
    SourceDigests,
    Watch,
    ensure_complete,
    ensure_finished,
    files_read,
    warnings_of_source,
)
from ckptfix.conversion.state_plan import plan_states
from ckptfix.conversion.target_names import LeftOut
from ckptfix.conversion.uploading import open_output
from ckptfix.diagnosis.policy import Keys
from ckptfix.errors import CkptfixError, OperationError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.reports import Serialized
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import AnyPath, Openable
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command, existing
from ckptfix.storage.staged import Staging, put_in_place
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizers import Strategy
from ckptfix.tensors.parameter_sources import Factory
from ckptfix.tensors.stored import Format, StoredTensor, Weights
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    few,
    human_size,
    line,
    list_names,
    unchecked_line,
)


class MigratedModel(NamedTuple):
    """One migrated model: its old label, its tensors (each tie once), their bytes as written, and
    its new files.
    """

    label: str
    tensors: int
    nbytes: int
    ties: int
    files: tuple[str, ...]


class MigratedOptimizer(NamedTuple):
    """One migrated optimizer: old label, numbers of parameters and param groups, bytes of its
    states, new files.
    """

    label: str
    parameters: int
    groups: int
    nbytes: int
    files: tuple[str, ...]


class MigrateReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """The receipt of a migration, done or, in a dry run, only planned.

    ``carried``: files that were copied unchanged. ``left_out``: parts of the source that the new
    checkpoint lacks. ``rewritten``: files that were copied with changes: a config that names the
    dtype. ``warnings``: problems of the source and so of its copy, and losses of the conversion, in
    words. ``removed``: old files of the output that were replaced, relative to it.
    ``bytes_to_write``: the size of all of it. ``verified``: every tensor was read back and its
    digest compared. ``state``: the word of ``--state``; ``optimizers``: those that were written
    anew; ``processes``: that will load the state, None for weights alone.
    """

    json_keys: ClassVar = (
        "path status output to dry_run verified bytes=bytes_to_write models carried left_out "
        "rewritten warnings removed not_checked state processes optimizers"
    )

    path: AnyPath
    output: Path | str
    to: str
    models: tuple[MigratedModel, ...]
    carried: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    rewritten: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    bytes_to_write: int = 0
    not_checked: tuple[str, ...] = ()
    verified: bool = False
    dry_run: bool = False
    state: str = WEIGHTS
    processes: int | None = None
    optimizers: tuple[MigratedOptimizer, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: always 0, as a failed migration raises."""
        return 0

    def lines(self) -> Iterator[Line]:
        """Yield the plan, the outcome, and what was not checked."""
        yield from self.plan_lines()
        yield from self.outcome_lines()

    def plan_lines(self) -> Iterator[Line]:
        """Yield the new files of each model, and the copied, rewritten and omitted files."""
        yield line(f"plan for {self.path}:", bold=True)
        for model in self.models:
            ties = f" and {count_of(model.ties, 'tie')}" if model.ties else ""
            tensors = f"{count_of(model.tensors, 'tensor')}{ties}, {human_size(model.nbytes)}"
            yield line(f"  {model.label}: {tensors} -> {_files(model.files)}")
        for optimizer in self.optimizers:
            parameters = count_of(optimizer.parameters, "parameter")
            groups = count_of(optimizer.groups, "param group")
            yield line(
                f"  {optimizer.label}: {parameters} in {groups}, {human_size(optimizer.nbytes)} -> "
                f"{_files(optimizer.files)}"
            )
        if self.processes is not None:
            yield line(f"  to be loaded by {count_of(self.processes, 'process')} with {self.to}")
        if self.carried:
            yield line(f"  copied unchanged: {_files(self.carried)}")
        if self.rewritten:
            yield line(f"  updated with the new dtype: {_files(self.rewritten)}")
        if self.removed:
            yield line(
                f"  to be replaced in {self.output}: {_files(self.removed)}", colour="yellow"
            )
        left_out = [f"  left out: {one.what}: {one.reason}" for one in self.left_out]
        yield from few(left_out, "that are left out", colour="yellow")

    def outcome_lines(self) -> Iterator[Line]:
        """Yield the outcome, and what was not checked."""
        parts = [count_of(len(self.models), "model")]
        if self.optimizers:
            parts.append(count_of(len(self.optimizers), "optimizer"))
        what = f"{', '.join(parts)}, {human_size(self.bytes_to_write)} in {self.output}"
        if self.dry_run:
            yield line(f"dry run: nothing was written; a real run would write {what}")
        else:
            done = "done and verified" if self.verified else "done"
            yield line(f"{done}: {what}", colour="green")
        yield from (line(f"warning: {words}", colour="yellow") for words in self.warnings)
        yield from map(unchecked_line, self.not_checked)


def receipt_of(
    plan: MigrationPlan,
    *,
    warnings: tuple[str, ...] = (),
    not_checked: tuple[str, ...],
    verified: bool = False,
    dry_run: bool = False,
) -> MigrateReceipt:
    """Return the receipt of a plan that was carried out, or, in a dry run, was not. ``warnings``:
    of the source.
    """
    return MigrateReceipt(
        path=plan.path,
        output=plan.output,
        to=plan.options.target,
        state=WEIGHTS if plan.options.strategy is None else ALL,
        processes=plan.processes,
        optimizers=tuple(
            MigratedOptimizer(
                label=one.label,
                parameters=sum(len(group.names) for group in one.state.groups),
                groups=len(one.state.groups),
                nbytes=one.state.nbytes,
                files=tuple(str(file.path) for file in one.files or _with_model(plan, one).files),
            )
            for one in plan.states
        ),
        models=tuple(
            MigratedModel(
                label=model.label,
                tensors=len(model.sources),
                nbytes=model.nbytes,
                ties=len(model.weights.ties),
                files=tuple(str(file.path) for file in model.files),
            )
            for model in plan.models
        ),
        carried=tuple(map(str, plan.carried)),
        left_out=plan.left_out,
        rewritten=tuple(str(file.path) for file in plan.rewritten),
        warnings=(*warnings, *plan.warnings, *(() if dry_run else _overflows(plan))),
        removed=plan.removed,
        bytes_to_write=plan.bytes_to_write,
        not_checked=not_checked,
        verified=verified,
        dry_run=dry_run,
    )


def _with_model(plan: MigrationPlan, state: PlannedState) -> PlannedModel:
    """Return the model in whose files an optimizer is, too."""
    return next(model for model in plan.models if model.weights.index == state.state.index)


def _overflows(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words the tensors with numbers that are too large for the new dtype."""
    for model in plan.models:
        counts = {
            name: source.convert.overflowed
            for name, source in model.sources.items()
            if source.convert is not None and source.convert.overflowed
        }
        if counts:
            yield (
                f"{model.label}: {count_of(sum(counts.values()), 'finite number')} overflowed "
                f"{plan.options.dtype} and became infinite in {list_names(list(counts))}"
            )


def _files(names: tuple[str, ...]) -> str:
    """Return names in words: their number, the first and the last of them."""
    if len(names) == 1:
        return names[0]
    between = " and " if len(names) == 2 else " ... "
    return f"{count_of(len(names), 'file')} ({names[0]}{between}{names[-1]})"


def not_checked_of(plan: MigrationPlan) -> tuple[str, ...]:
    """Return in words what a plan does not check."""
    words = []
    if not plan.options.verify:
        words.append("whether the new files match the source (--no-verify)")
    words += (
        f"{one.label}: whether the files of the last ranks are missing; no file records how many "
        "ranks saved it"
        for one in plan.source.weights
        if one.files and is_file_of_parts(one.files[0].name)
    )
    if plan.options.strategy is not None:
        return (*words, *plan.not_checked)
    names = [
        parse_folder_name(path.parts[0]) or parse_file_name(str(path)) for path in plan.carried
    ]
    roles = {parsed.role for parsed in names if parsed is not None}
    if plan.options.keys is not None and Role.OPTIMIZER in roles:
        words.append(
            "keys of parameters in optimizers, which are copied unchanged; next: "
            f"{command('repair', plan.output, '', '--keys', plan.options.keys.value)}"
        )
    if plan.may_lack_keys:
        reader = (
            "dcp.load" if plan.options.to is Format.DCP else "load_state with pytorch_model.bin"
        )
        words.append(
            "whether tied weights lack their second key: safetensors files leave it out, no "
            f"manifest of a guarded save lists it, and {reader} needs every key; if a key is "
            "missing, save the source again with ckptfix.Accelerator, or load it into its model "
            "and save the model"
        )
    return tuple(words)


def loaded_by_option(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words the new indexes that diffusers loads only with an option."""
    for path in [file.path for planned in plan.planned for file in planned.files]:
        if needs_option(path.name):
            yield (
                f"{path}: from_pretrained of diffusers loads these shards only with "
                "use_safetensors=False; next, for a model that loads without it: --to safetensors"
            )


def unfit_optimizers(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words the optimizers whose layout does not fit the loader of the new models."""
    if plan.options.strategy is not None or any(
        one.format is Format.DEEPSPEED for one in plan.source.weights
    ):
        return
    to_dcp = plan.options.to is Format.DCP
    found = sorted(
        {
            path.parts[0]
            for path in plan.carried
            for parsed in (parse_folder_name(path.parts[0]) or parse_file_name(path.parts[0]),)
            if parsed is not None
            and parsed.role is Role.OPTIMIZER
            and (len(path.parts) == 1) is to_dcp
            and not (isinstance(parsed, FileName) and parsed.is_of_trainer)
        }
    )
    if found:
        looks = (
            "load_state under FSDP expects optimizer_0/"
            if to_dcp
            else "load_state expects optimizer.bin"
        )
        yield (
            f"{', '.join(found[:3])}: copied unchanged, but with these models {looks}, so only the "
            "models can be loaded; next, to convert the optimizer too: add --state all --to "
            f"{'fsdp' if to_dcp else 'ddp'}"
        )


def open_new(plan: MigrationPlan, whole: AnyPath) -> tuple[Weights, ...]:
    """Return the models of the new checkpoint as ``open_checkpoint`` finds them, in the order of
    the plan.

    Raises OperationError when a model is not found in the files that were written for it.
    """
    try:
        found = open_checkpoint(whole).weights
    except CkptfixError as error:
        words = str(error).replace(str(whole), str(plan.output))
        raise OperationError(
            f"{plan.output}: the new files cannot be opened, so nothing was written there: {words}"
        ) from error
    new = []
    for model in plan.models:
        written = {file.path for file in model.files}
        mine = [one for one in found if written.issuperset(one.files)]
        if len(mine) != 1:
            raise OperationError(
                f"{plan.output}: {model.label} was converted to {min(map(str, written))}, but "
                "loaders would pick different files; nothing was written there"
            )
        new.append(mine[0])
    return tuple(new)


OnPlan = Callable[[MigrateReceipt], None]
"""Function that is called with the receipt of a dry run, before anything is written."""


@takes_urls("src")
def migrate(
    src: Openable,
    dst: str | os.PathLike[str],
    *,
    to: str | Format | Strategy,
    state: str = WEIGHTS,
    processes: int | None = None,
    model: str | Factory | None = None,
    frozen: str | None = None,
    max_shard_size: int | str | None = None,
    keys: str | Keys | None = None,
    dtype: str | None = None,
    drop_opaque: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    allow_damage: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_plan: OnPlan | None = None,
    executor: Executor = THREADS,
) -> MigrateReceipt:
    """Write the checkpoint ``src`` to ``dst`` in the format ``to``: ``safetensors``, ``bin`` or
    ``dcp``.

    With ``state="all"`` the optimizers become those of another strategy, too, and everything else
    goes along; ``to`` is then ``ddp``, ``fsdp``, ``fsdp-full``, ``zero1``, ``zero2``, ``zero3`` or
    ``universal``, and ``processes`` the number of those that will load it, None for as many as
    saved it. DDP numbers parameters and other strategies name them: ``model``, ``"module:factory"``
    or a function that returns the run's model, and ``frozen``, a regular expression of the names
    that no optimizer has, decide where the checkpoint itself does not.

    ``src`` is not changed, and ``dst`` is complete or absent. ``max_shard_size``: bytes, or
    ``"5GB"``. ``keys``: new keys, as in ``repair``; None changes no key. ``dtype``: ``"bf16"`` and
    the like, for floating point tensors; ``"original"``, for DeepSpeed: the weights in the dtype of
    training instead of the fp32 ones of the optimizer. ``verify``: read everything back and compare
    digests. ``overwrite``: replace the folder that an earlier migration wrote to ``dst``; anything
    else there is refused. ``allow_damage``: go on with errors that ``repair`` would fix in ``src``,
    and name them in the receipt. ``progress`` gets byte counts. ``executor``: shares
    the work; all but its leader return before anything is put in place.

    Raises UsageError for invalid words and paths, OperationError when it could not finish, OSError;
    nothing is left behind then. Where a launcher kills a process that writes, the next migration to
    a path next to ``dst`` removes its files.
    """
    options = make_options(
        to=to,
        state=state,
        processes=processes,
        model=model,
        frozen=frozen,
        max_shard_size=max_shard_size,
        keys=keys,
        dtype=dtype,
        drop_opaque=drop_opaque,
        verify=verify,
        overwrite=overwrite,
    )
    with open_output(dst, overwrite=overwrite, executor=executor) as new:
        path, output = existing(src), new.path
        with paused_gc():
            check_paths(path, output, options)
            watch = Watch(path)
            source = open_checkpoint(path, original=options.original)
            if options.original and all(
                one.format is not Format.DEEPSPEED for one in source.weights
            ):
                raise UsageError(
                    f"--dtype original: {path} has no DeepSpeed weights; leave the option out"
                )
            ensure_finished(source)
            # Before the plan: an optimizer that was saved twice fails there, with a message about names
            # of parameters.
            of_source = warnings_of_source(
                path, source.weights, options.keys, allow_damage=allow_damage
            )
            make = make_plan if options.strategy is None else plan_states
            plan = make(source, path, output, options)
            warnings = (*of_source, *unfit_optimizers(plan), *loaded_by_option(plan))
        ensure_apart(plan)
        plan = replace(plan, removed=files_replaced(output))
        recorded_by = source_manifest(plan)
        # The manifest is not copied with a single file: it lists the other files of the folder, too.
        manifest = None if source.only is not None or plan.is_file else recorded_by
        if manifest is not None:
            plan = replace(plan, left_out=(*plan.left_out, *ensure_complete(source.root, manifest)))
        watch.check(files_read(plan))
        recorded = SourceDigests(plan, recorded_by)
        is_guarded = manifest is not None and manifest.is_of_a_save
        # The manifest of a guarded save lists the keys of ties.
        plan = replace(plan, may_lack_keys=plan.may_lack_keys and not is_guarded)
        not_checked = (*not_checked_of(plan), *recorded.not_checked())
        warnings = (*warnings, *outdated(plan))
        receipt = new.told(
            receipt_of(plan, warnings=warnings, not_checked=not_checked, dry_run=True)
        )
        if on_plan is not None:
            on_plan(receipt)
        if dry_run:
            return receipt
        with shared_staging(plan, executor) as (staging, kept):
            with_sha256 = manifest is not None and bool(manifest.digests)
            produced = produce(
                plan,
                staging.new,
                recorded,
                with_sha256=with_sha256,
                kept=kept,
                progress=progress,
                executor=executor,
            )
            if executor.is_share:
                watch.check(files_read(plan))
                return receipt
            with doubted(executor):
                written = open_new(plan, staging.complete)
                if options.verify:
                    _prove(plan, staging, written, produced, progress, executor.complete)
            # Nothing appears at its place where one of several processes has failed.
            with executor.as_one():
                watch.check(files_read(plan))
            if not executor.leads:
                return receipt
            if manifest is not None:
                warnings += record(plan, manifest, written, staging.new, produced)
            watch.check(files_read(plan))
            if not plan.is_file:
                write_receipt(staging.new, plan)
            if options.overwrite:
                ensure_unchanged(plan)
            put_in_place(
                staging,
                overwrite=options.overwrite,
                check=lambda folder: ensure_unchanged(plan, folder),
            )
        return new.told(
            receipt_of(plan, warnings=warnings, not_checked=not_checked, verified=options.verify)
        )


def _prove(
    plan: MigrationPlan, staging: Staging, new: tuple[Weights, ...], produced: Produced,
    progress: Progress | None, executor: Executor
) -> None:  # fmt: skip
    """Read everything back, and compare it with what was read from the source. Raises
    OperationError.
    """
    whole = staging.complete
    proven: dict[StoredTensor, str] = {}
    for planned, weights, digests in zip(plan.models, new, produced.digests, strict=False):
        proven |= prove_model(
            f"{plan.output}: {planned.label}",
            weights,
            sources=planned.sources,
            ties=planned.weights.ties,
            digests=digests,
            progress=progress,
            executor=executor,
        )
        label = f"{plan.output}: {planned.label}"
        prove_modules(label, whole, planned, digests, proven, progress, executor)
    states = produced.digests[len(plan.models) :]
    prove_states(plan, whole, states, proven, progress, executor)
    prove_copies(plan.source.root, staging.new, plan.carried, progress, executor)
    prove_files(plan, whole)

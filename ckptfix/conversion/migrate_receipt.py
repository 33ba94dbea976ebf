"""The receipt of a migration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from ckptfix.conversion.migration_plan import MigrationPlan
from ckptfix.conversion.target_names import LeftOut
from ckptfix.reports import Serialized
from ckptfix.wording import Line, Printable, count_of, few, human_size, line, list_names, unchecked_line


class MigratedModel(NamedTuple):
    """One model: what it was called, its tensors (each tie once), their bytes as written, and its new files."""

    label: str
    tensors: int
    nbytes: int
    ties: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MigrateReceipt(Printable, Serialized):
    """The receipt of a migration, or, of a dry run, of what it would do.

    ``carried``: files that were copied unchanged. ``left_out``: what is in the source and not in the new checkpoint.
    ``rewritten``: files that were copied with changes: a config that names the dtype. ``warnings``: what is wrong with
    the source and so with its copy, and what was lost in converting, in words. ``removed``: files that were at the
    output and are not any more, relative to it. ``bytes_to_write``: the size of all of it.
    ``verified``: every tensor was read back and its digest compared.
    """

    json_keys: ClassVar = (
        "path status output to dry_run verified bytes=bytes_to_write models carried left_out rewritten "
        "warnings removed not_checked"
    )

    path: Path
    output: Path
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

    @property
    def status(self) -> int:
        """Exit status: 0, as a migration that could not be done raises."""
        return 0

    def lines(self) -> Iterator[Line]:
        """Yield the plan, what was done, and what was not looked at."""
        yield from self.plan_lines()
        yield from self.outcome_lines()

    def plan_lines(self) -> Iterator[Line]:
        """Yield what becomes of each model and of every other file."""
        yield line(f"plan for {self.path}:", bold=True)
        for model in self.models:
            ties = f" and {count_of(model.ties, 'tie')}" if model.ties else ""
            tensors = f"{count_of(model.tensors, 'tensor')}{ties}, {human_size(model.nbytes)}"
            yield line(f"  {model.label}: {tensors} -> {_files(model.files)}")
        if self.carried:
            yield line(f"  copied unchanged: {_files(self.carried)}")
        if self.rewritten:
            yield line(f"  with the new dtype: {_files(self.rewritten)}")
        if self.removed:
            yield line(f"  to be replaced in {self.output}: {_files(self.removed)}", colour="yellow")
        left_out = [f"  left out: {one.what}: {one.reason}" for one in self.left_out]
        yield from few(left_out, "that are left out", colour="yellow")

    def outcome_lines(self) -> Iterator[Line]:
        """Yield what was done, and what was not looked at."""
        what = f"{count_of(len(self.models), 'model')}, {human_size(self.bytes_to_write)} in {self.output}"
        if self.dry_run:
            yield line(f"dry run: nothing was written; it would be {what}")
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
    """Return the receipt of a plan that was carried out, or, in a dry run, was not. ``warnings``: of the source."""
    return MigrateReceipt(
        path=plan.path,
        output=plan.output,
        to=plan.options.to.value,
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
        warnings=(*warnings, *(() if dry_run else _overflows(plan))),
        removed=plan.removed,
        bytes_to_write=plan.bytes_to_write,
        not_checked=not_checked,
        verified=verified,
        dry_run=dry_run,
    )


def _overflows(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words which tensors held numbers that the new dtype has no place for."""
    for model in plan.models:
        counts = {
            name: source.convert.overflowed
            for name, source in model.sources.items()
            if source.convert is not None and source.convert.overflowed
        }
        if counts:
            yield (
                f"{model.label}: {count_of(sum(counts.values()), 'finite number')} became infinite, too large for "
                f"{plan.options.dtype}: in {list_names(list(counts))}"
            )


def _files(names: tuple[str, ...]) -> str:
    """Return a few names in words: how many there are, and the first and the last of them."""
    if len(names) == 1:
        return names[0]
    between = " and " if len(names) == 2 else " ... "
    return f"{count_of(len(names), 'file')} ({names[0]}{between}{names[-1]})"

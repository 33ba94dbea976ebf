"""Plan of a load: its actions are collected before anything is modified, and judged by the
policy.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.entries import Entry, changed_files
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.offloaded import Slot
from ckptfix.training.loading.load_report import (
    ComponentReport,
    LoadError,
    LoadPolicy,
    LoadReport,
    Part,
    Requirement,
    Status,
)
from ckptfix.training.loading.targets import Fit, ModelTarget, Target


class LoadModel(Struct, frozen=True, kw_only=True):
    """Load ``state``, in the model's own names, into a model; ``slots`` are its tensors on the meta
    device.
    """

    target: ModelTarget
    state: Any
    fit: Fit
    slots: dict[str, Slot]


class LoadState(Struct, frozen=True, kw_only=True):
    """Call ``thing.load_state_dict(state)``."""

    thing: Any
    state: Any


class SetSampler(Struct, frozen=True, kw_only=True):
    """Call ``dataloader.set_sampler(sampler)``."""

    dataloader: Any
    sampler: Any


class SetRandom(Struct, frozen=True, kw_only=True):
    """Set the random number generators from what ``save_state`` wrote for this rank."""

    states: Any


class SetStep(Struct, frozen=True, kw_only=True):
    """Set ``accelerator.step``."""

    step: int


OF_A_RANK = (Part.RNG, Part.STEP, Part.DATALOADERS)
"""The parts with a per-rank state."""

Action = LoadModel | LoadState | SetSampler | SetRandom | SetStep


class Draft(Struct):
    """The actions in their order with their reports, and why they may not be done.

    ``advice``: what to do where entries cannot be told apart, when that is not ``ckptfix check``.
    """

    path: Path
    policy: LoadPolicy
    advice: str = ""
    planned: list[tuple[ComponentReport, Action]] = field(default_factory=list)
    others: list[ComponentReport] = field(default_factory=list)
    failures: dict[str, list[ComponentReport]] = field(default_factory=dict)
    used: list[Entry] = field(default_factory=list)

    def do(
        self, part: Part, action: Action, *, target: Target | None = None, what: str = "",
        entry: Entry | None = None, status: Status | None = None, reason: str = "", **details: Any,
    ) -> None:  # fmt: skip
        """Add what will be done, from the files of an entry. ``details``: see ``ComponentReport``.

        ``status``: by default ADAPTED where there is a reason, else RESTORED.
        """
        status = status or (Status.ADAPTED if reason else Status.RESTORED)
        details["files"] = entry.files if entry is not None else ()
        self.planned.append((_report(part, status, target, what, reason, **details), action))
        self.used += [entry] if entry is not None else []

    def tell(self, place: int, reason: str) -> None:
        """Add a reason to what is said of a planned action, and warn of it."""
        report, action = self.planned[place]
        reason = ", ".join(filter(None, (report.reason, reason)))
        self.planned[place] = replace(report, reason=reason, is_told=True), action

    def cannot(
        self, part: Part, reason: str, *, target: Target | None = None, files: tuple[str, ...] = (),
        what: str = "", missing: bool = False,
    ) -> None:  # fmt: skip
        """Record that an object gets nothing: SKIPPED where nothing is there for it, FAILED where
        that is wrong.

        A required part then fails the whole load.
        """
        required = self.is_required(part)
        status = Status.SKIPPED if missing and not required else Status.FAILED
        report = _report(part, status, target, what, reason, files=files)
        self.others.append(report)
        if required:
            self.failures.setdefault(reason, []).append(report)

    def is_required(self, part: Part) -> bool:
        """Return whether the load fails if an object of this part gets nothing."""
        return self.policy.requirement(part) in (Requirement.REQUIRE, Requirement.PARTIAL)

    def has_failed(self, part: Part) -> bool:
        """Return whether an object of this part fails the load."""
        return any(reports[0].part is part for reports in self.failures.values())

    def ignore(self, part: Part, target: Target | None = None, what: str = "") -> None:
        """Record that the policy ignores an object."""
        self.others.append(_report(part, Status.SKIPPED, target, what, "ignored by the policy"))

    def restored_by_others(self, part: Part, target: Target | None, what: str, reason: str) -> None:
        """Record an object that accelerate or a hook of the script loads, as the reason says."""
        self.others.append(_report(part, Status.RESTORED, target, what, reason))

    def leave(
        self, part: Part, files: tuple[str, ...], reason: str, *, is_duplicate: bool = False
    ) -> None:
        """Record files that no object gets."""
        self.others.append(
            ComponentReport(
                part=part,
                status=Status.SKIPPED,
                files=files,
                reason=reason,
                is_duplicate=is_duplicate,
            )
        )

    def to_warn_of(self) -> tuple[ComponentReport, ...]:
        """Return the objects that were left as they were, or in part, although the policy did not
        say ignore, and those of which the user must know more.
        """
        return tuple(
            report for report, _ in self.planned if report.is_told or not report.is_in_full
        ) + tuple(
            report
            for report in self.others
            if self.policy.requirement(report.part) is Requirement.WARN
            and report.status in (Status.SKIPPED, Status.FAILED)
            and not (report.index is None and not report.what)
        )

    def report(self) -> LoadReport:
        """Return the report, ordered by part."""
        order = list(Part)
        components = [report for report, _ in self.planned] + self.others
        components.sort(key=lambda component: order.index(component.part))
        return LoadReport(path=self.path, components=tuple(components))


def _report(
    part: Part, status: Status, target: Target | None, what: str, reason: str, **details: Any
) -> ComponentReport:
    if target is not None:
        details["index"], what = target.index, target.what
    return ComponentReport(part=part, status=status, what=what, reason=reason, **details)


def stop_if_failed(draft: Draft, root: Path) -> None:
    """Raise LoadError when something required is not there, or a file is not what was scanned."""
    if draft.failures:
        order = list(Part)
        failures = sorted(
            draft.failures.items(), key=lambda failure: order.index(failure[1][0].part)
        )
        lines = [
            f"{', '.join(report.name for report in reports)}: {reason}"
            for reason, reports in failures
        ]
        raise LoadError(
            f"{draft.path} was not loaded; nothing was modified:\n  " + "\n  ".join(lines),
            report=draft.report(),
        )
    changed = changed_files(root, draft.used)
    if changed:
        raise LoadError(
            f"{draft.path}: {', '.join(changed)} changed during the load; load the checkpoint again"
        )


def as_load_error(problem: Exception, draft: Draft) -> LoadError:
    """Return any failure before the commit as a LoadError with the report so far."""
    if isinstance(problem, LoadError):
        return problem
    found = LoadError(f"{draft.path}: {type(problem).__name__}: {problem}", report=draft.report())
    found.__cause__ = problem
    return found


def warn_of(draft: Draft, *, is_main: bool) -> None:
    """Emit one UserWarning for each object that was left as it was, or in part.

    For an object that all ranks share only the main one does.
    """
    for report in draft.to_warn_of():
        if is_main or report.part in OF_A_RANK:
            warn_caller(f"{draft.path}: {report}")

"""Report of a check: the verdict on a checkpoint, its findings, and what was not checked."""

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.roles import OF_ONE_RANK
from ckptfix.diagnosis.file_damage import DeepSpeedState
from ckptfix.diagnosis.findings.base import Finding, Severity, finding_lines, salvage_lines
from ckptfix.diagnosis.findings.interrupted import LeftoverSave, StagingFolder
from ckptfix.diagnosis.left_out import OF_ONE_SAVE
from ckptfix.diagnosis.loads.outcome import LoadOutcome
from ckptfix.diagnosis.trainer_completeness import OTHER_FIELDS
from ckptfix.diagnosis.understood import Understood
from ckptfix.diagnosis.wrong_states import OF_KEYS
from ckptfix.reports import Serialized, items
from ckptfix.storage.files import AnyPath, absolute, is_symlink, relative
from ckptfix.storage.paths import command
from ckptfix.storage.staged import target_of
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    few,
    human_size,
    line,
    unchecked_line,
    unchecked_lines,
)

GENERIC = (
    "values of tensors",
    "checksums of ",
    "local headers of ",
    OF_ONE_SAVE,
    OF_KEYS,
    OTHER_FIELDS,
)
"""Beginnings of the sentences about checks that no folder gets; reported once per run."""

_DAMAGED, _WARNED, UNFINISHED, _BARE, _STAGING, _NOT_RESUMABLE, DIFFERENT, CLEAN = VERDICTS = (
    "damaged", "with warnings", "not finished", "without weights", "staging", "not resumable",
    "with differences", "clean",
)  # fmt: skip
"""The verdicts on one of several checkpoints, the worst first."""


class CheckReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Report of ``check``.

    ``not_checked``: the omitted checks, in words. ``unfinished``: files that may not be read, which
    may be healthy or damaged, with the command that allows it. ``below``: the reports of the
    sub-folders that hold models of the checkpoint, such as ``unet``. ``not_resumable``: why
    ``latest_checkpoint`` passes over a numbered checkpoint, where no finding says it. ``load``: the
    answers of the libraries that load it, where they were asked.
    """

    json_keys: ClassVar = (
        "path status verdict counts understood components=_components sharded=_sharded "
        "deepspeed=_deepspeed findings not_checked below? unfinished not_resumable? load?=_load"
    )

    path: AnyPath
    folder: CheckpointFolder
    sharded: tuple[DcpFolder, ...]
    deepspeed: tuple[DeepSpeedState, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    unfinished: tuple[str, ...] = ()
    below: tuple["CheckReport", ...] = ()
    understood: Understood = field(default_factory=Understood)
    not_resumable: str = ""
    load: tuple[LoadOutcome, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 3 where a file may not be read, or no library says what it loads, else 1 for
        any error or warning, or a load that is not the model that was saved. Notes do not change
        it.
        """
        return max((self.known, *(outcome.status for outcome in self.all_load)))

    @property
    def known(self) -> int:
        """The status without the loads that no library answers for: they speak for no checkpoint
        and against none.
        """
        is_lost = any(outcome.status == 1 for outcome in self.all_load)
        return 3 if self.all_unfinished else max(status_of(self.all_findings), int(is_lost))

    @property
    def all_load(self) -> tuple[LoadOutcome, ...]:
        """The outcomes of the folder and of the models below, by their paths from the folder."""
        return self.load + tuple(
            outcome._replace(path=f"{relative(report.path, self.path)}/{outcome.path}")
            for report in self.below
            for outcome in report.all_load
        )

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings of the folder and of the models below, by their paths from the folder."""
        return self.findings + tuple(
            replace(finding, path=relative(report.path, self.path) / finding.path)
            for report in self.below
            for finding in report.all_findings
        )

    @property
    def all_unfinished(self) -> tuple[str, ...]:
        """The unreadable files of the folder and of the models below, by paths from the folder."""
        return self.unfinished + tuple(
            f"{relative(report.path, self.path)}/{words}"
            for report in self.below
            for words in report.all_unfinished
        )

    @property
    def all_understood(self) -> Understood:
        """Facts about the folder and the models below, by their paths from the folder."""
        facts = self.understood
        for report in self.below:
            below = relative(report.path, self.path)
            facts = facts.joined(report.all_understood, below)
        return facts

    @property
    def verdict(self) -> str:
        """The verdict in a word: one of ``VERDICTS``, by which checkpoints are counted."""
        if self.status == 0:
            if any(isinstance(finding, LeftoverSave) for finding in self.findings):
                return _BARE
            if self.is_staging:
                return _STAGING
            if self.not_resumable:
                return _NOT_RESUMABLE
            return DIFFERENT if any(one.differs for one in self.all_findings) else CLEAN
        if any(finding.severity is Severity.ERROR for finding in self.all_findings):
            return _DAMAGED
        if any(outcome.status == 1 for outcome in self.all_load):
            return _DAMAGED
        return _WARNED if status_of(self.all_findings) else UNFINISHED

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of files, tensors and bytes that were read, of findings, and of what was not
        checked.
        """
        components = self.folder.components
        tensors = sum(
            len(component.tensors) for component in components if component.role not in OF_ONE_RANK
        )
        tensors += sum(
            len(state.metadata.tensors) for state in self.sharded if state.metadata is not None
        )
        tensors += sum(state.tensors for state in self.deepspeed if state.files)
        files = len(components) + sum(len(state.files) for state in self.sharded)
        files += sum(state.files for state in self.deepspeed)
        nbytes = sum(component.size for component in components)
        nbytes += sum(state.size for state in self.sharded) + sum(
            state.size for state in self.deepspeed
        )
        found = Counter(f"{finding.severity.value}s" for finding in self.findings)
        own = {
            "files": files, "tensors": tensors, "bytes": nbytes,
            **{f"{severity.value}s": found[f"{severity.value}s"] for severity in Severity},
        }  # fmt: skip
        inside = [report.counts for report in self.below]
        sums = {key: sum((own[key], *(counts[key] for counts in inside))) for key in own}
        return {**sums, "not_checked": len(self.not_checked)}

    def headline(self, *, with_codes: bool = False, is_below: bool = False) -> Line:
        """Return the verdict in a line. ``with_codes``: of the findings, where nothing else names
        them.

        ``is_below``: the numbers of findings alone, as the folder above has the verdict.
        """
        counts = self.counts
        codes = Counter(finding.code for finding in self.all_findings if with_codes)
        told = [f"{codes[code]} {code}" if codes[code] > 1 else code for code in sorted(codes)]
        after = f": {', '.join(told)}" if told else ""
        if self.is_staging:
            target = target_of(absolute(self.path)).name
            text = f"{self.path}: staging folder of {target}, not a checkpoint; not read{after}"
            return line(text, bold=True)
        found = [
            count_of(counts[f"{severity.value}s"], severity.value)
            for severity in Severity
            if counts[f"{severity.value}s"]
        ]
        of_loads = [outcome.headline for outcome in (self.load if is_below else self.all_load)]
        if self.all_unfinished:
            found.insert(0, "could not finish")
        elif not (counts["errors"] or counts["warnings"] or is_below or any(of_loads)):
            found.insert(0, "no error found")
        found += dict.fromkeys(filter(None, of_loads))
        is_lost = any(outcome.status == 1 for outcome in self.all_load)
        colour = "red" if counts["errors"] or is_lost else "yellow" if self.status else "green"
        numbers = "no checkpoint files"
        if counts["files"]:
            tensors, size = count_of(counts["tensors"], "tensor"), human_size(counts["bytes"])
            numbers = f"{count_of(counts['files'], 'file')}, {tensors}, {size}"
        verdict = f"{', '.join(found)} ({numbers})" if found else numbers
        return line(f"{self.path}: {verdict}{after}", colour=colour, bold=True)

    @property
    def is_staging(self) -> bool:
        """True for the staging folder of a save or another writer, in which nothing is read."""
        return any(isinstance(one, StagingFolder) and not one.path.parts for one in self.findings)

    def alone(self) -> "CheckReport":
        """Return the report without the folders below, where each checkpoint in them gets a report
        of its own.
        """
        below = tuple(
            f"{name}/ ({PLAIN_FOLDER}): not looked into"
            for name in self.folder.subfolders
            if not is_symlink(self.folder.root / name)
        )
        told = tuple(words for words in self.not_checked if not words.startswith(below))
        return replace(self, not_checked=told, below=())

    def lines(self, *, is_verbose: bool = False) -> Iterator[Line]:
        """Yield the verdict, the problems and what to do, what was understood, and what was not
        checked.

        ``is_verbose``: every model, and every sentence about what was not checked.
        """
        yield from self.verdict_lines()
        yield from self.all_understood.lines(is_verbose=is_verbose)
        details = "" if is_verbose else command("check", self.path, "", "-v")
        yield from unchecked_lines(self.not_checked, details=details)

    def unchecked(self) -> Iterator[Line]:
        """Yield every sentence about what was not checked, for a list of those about several
        checkpoints.
        """
        yield from map(unchecked_line, (*self.not_checked, *self.all_understood.problems))

    def verdict_lines(self, *, is_below: bool = False) -> Iterator[Line]:
        """Yield the verdict, the problems, and what to do. ``is_below``: as of ``headline``."""
        yield self.headline(is_below=is_below)
        yield from finding_lines(self.findings, str(self.path))
        if self.not_resumable:
            yield line(
                f"  not resumable: latest_checkpoint skips it: {self.not_resumable}",
                colour="yellow",
            )
        for outcome in self.load:
            yield from outcome.lines()
        for report in self.below:
            if report.all_findings or report.all_unfinished or report.all_load:
                yield from report.verdict_lines(is_below=True)
        salvages = list(salvage_lines(self.findings, str(self.path)))
        if any(finding.is_fixable for finding in self.findings) and not self.unfinished:
            # A repair brings no data back, and can delete a duplicate: first what is intact gets
            # out.
            salvages.append(
                line(f"{'then' if salvages else 'next'}: {command('repair', self.path)}")
            )
        yield from unfinished_lines(self.unfinished)
        yield from salvages

    @property
    def _load(self) -> list[dict[str, object]]:
        return [{**outcome._asdict(), "status": outcome.status} for outcome in self.load]

    def _components(self) -> list[dict[str, object]]:
        keys = "path role index=name.index rank=name.rank bytes=size tensors=tensors.__len__"
        return [dict(items(component, keys)) for component in self.folder.components]

    def _sharded(self) -> list[dict[str, object]]:
        keys = "path bytes=size files=files.__len__"
        return [
            {
                **dict(items(state, keys)),
                "tensors": len(state.metadata.tensors) if state.metadata else 0,
            }
            for state in self.sharded
        ]

    def _deepspeed(self) -> list[dict[str, object]]:
        return [dict(items(state, "path bytes=size files tensors")) for state in self.deepspeed]


def unfinished_lines(unfinished: tuple[str, ...]) -> Iterator[Line]:
    """Yield a line for each file or folder that may not be read, so that nothing is known
    about it.
    """
    yield from few([f"could not finish: {words}" for words in unfinished], "files", colour="yellow")


def status_of(findings: tuple[Finding, ...]) -> int:
    """Return 1 when any finding is an error or a warning, else 0."""
    return int(any(finding.severity is not Severity.NOTE for finding in findings))

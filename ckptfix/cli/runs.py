"""``ckptfix check -r``: from which checkpoint of each run to resume, and what speaks against it."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from threading import Lock
from time import time as now
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.completion_markers import run_of, tracker_problem
from ckptfix.checkpoint.folder_names import FAMILIES, family_of, split_number
from ckptfix.checkpoint.latest import (
    Candidate,
    judge,
    numbered,
    problems_in,
    taken_instead,
    time_of,
)
from ckptfix.cli.report import FAILURES, ending_of
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.diagnosis.other_runs import DAY, History, days_between, history_of
from ckptfix.diagnosis.resumable import choose, examine
from ckptfix.diagnosis.run_page import Answer, Cell, run_page, run_place
from ckptfix.errors import CkptfixError
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath, absolute, is_of_listing
from ckptfix.storage.opened import open_files
from ckptfix.wording import count_of, line, series

_AT_ONCE = 60
"""Seconds within which a copy writes small checkpoints, in any order."""


class Resume(Serialized, Struct, frozen=True, kw_only=True):
    """The checkpoint of one run folder to resume from, as ``latest_checkpoint`` chooses it; None
    where it finds none.

    ``problem``: why there is none, or what speaks against it. ``is_doubted``: check found problems in
    it. ``clean``: the newest complete one in
    which check found no problem, where that is another one. ``passed_over``: incomplete ones that
    are newer. ``taken_instead``: another entry of the folder that stock ``load_state()`` takes, or
    for which it fails, in words. ``unexplained``: the incomplete ones in which check found nothing,
    each with what it lacks. ``other_run``: what shows that the highest number is of an older run,
    in words. ``saved_later``: a lower number with newer files, in words: a copy explains minutes.
    ``not_checked``: whether the highest number is of the same run, where nothing decides.
    ``pattern``: that of saves under other names, with which ``latest_checkpoint`` chooses one.
    """

    json_keys: ClassVar = (
        "run checkpoint problem clean? passed_over taken_instead? other_run? saved_later? "
        "not_checked? pattern?"
    )

    run: AnyPath
    checkpoint: AnyPath | None
    problem: str = ""
    is_doubted: bool = False
    clean: AnyPath | None = None
    passed_over: tuple[str, ...] = ()
    taken_instead: str = ""
    unexplained: tuple[str, ...] = ()
    other_run: str = ""
    saved_later: str = ""
    not_checked: str = ""
    pattern: str = ""

    @property
    def text(self) -> str:
        """The answer as a sentence."""
        if self.pattern:
            call = f"ckptfix.latest_checkpoint({str(self.run)!r}, pattern={self.pattern!r})"
            return f"{self.run}: no checkpoint was chosen: {self.problem}; next, in Python: {call}"
        if self.checkpoint is None:
            return f"{self.run}: no checkpoint to resume from: {self.problem}"
        but = f", but {self.problem}" if self.problem else ""
        if self.clean is not None:
            but += f"; the newest one without problems: {self.clean}"
        if self.unexplained:
            but += f"; newer but incomplete: {'; '.join(self.unexplained)}"
        by = f" by number ({self.saved_later})" if self.saved_later else ""
        # What check found may be that a file is missing.
        kind = "candidate" if self.is_doubted else "complete one"
        return f"resume from {self.checkpoint}, the newest {kind}{by}{but}"


def newest_sound(run: str, names: Collection[str]) -> str:
    """Return the newest complete one of the named checkpoints of a run, by its place; "" where
    there is none.
    """

    def look(path: AnyPath, number: int) -> Candidate:
        if path.name in names:
            return judge(path, number)
        return Candidate(path=path, number=number, problem="not asked for")

    with suppress(CkptfixError, OSError), open_files(run, complete=False) as folder:
        choice = choose(folder, look=look)
        if choice is not None and choice.best is not None:
            return f"{run}/{choice.best.path.name}"
    return ""


class Page:
    """The page of ``check -r --html``. Of 100,000 reports it keeps what it shows."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []

    def add(self, report: CheckReport) -> None:
        """Show a checkpoint."""
        lines = tuple(report.verdict_lines())[1:]
        self._cells.append(
            Cell(str(report.path), report.verdict, report.counts["bytes"], lines=lines)
        )

    def add_failed(self, document: Mapping[str, object]) -> None:
        """Show one that could not be checked, by its JSON values."""
        lines = (line(str(document["error"])),)
        self._cells.append(Cell(str(document["path"]), "failed", lines=lines))

    def text(self, answers: Iterable[Resume]) -> str:
        """Return the page, with the checkpoint of each run to resume from marked."""
        of_runs = {}
        for answer in answers:
            sound = answer.clean or (None if answer.is_doubted else answer.checkpoint)
            of_runs[str(answer.run)] = Answer(answer.text, str(sound or ""))
        return run_page("check", now(), sorted(self._cells, key=run_place), of_runs)


class Runs:
    """The run folders below several places. Several threads check their checkpoints one by one.

    What is kept of a run are its folder and the names of its checkpoints that are not clean: a
    fleet may have 100,000.
    """

    def __init__(self, places: Iterable[AnyPath]) -> None:
        self._places = frozenset(str(absolute(place)) for place in places)
        self._unclean: dict[AnyPath, set[str]] = {}
        self._doubted: set[AnyPath] = set()
        self._different: set[AnyPath] = set()
        self._runs: dict[AnyPath, None] = {}
        self._newest: dict[AnyPath, frozenset[AnyPath]] = {}
        self._compared: dict[AnyPath, frozenset[AnyPath]] = {}
        self._histories: dict[AnyPath, History | None] = {}
        self._known: dict[AnyPath, Candidate] = {}
        self._saved_last: dict[tuple[AnyPath, str], tuple[float, int, str]] = {}
        self._unnamed: dict[tuple[AnyPath, str], list[tuple[int, str]]] = {}
        self._lock = Lock()

    def begin(self, path: AnyPath) -> None:
        """Remember a checkpoint of a run, which is not clean before ``end`` says so."""
        home = run_of(path)
        with self._lock:
            self._runs[home] = None
        run = absolute(path.parent)
        if family_of(path.name) is not None and not self._places.isdisjoint(
            map(str, (run, *run.parents))
        ):
            with self._lock:
                self._unclean.setdefault(path.parent, set()).add(path.name)

    def end(
        self,
        path: AnyPath,
        place: AnyPath,
        status: int,
        doubted: Iterable[str] = (),
        *,
        differs: bool = False,
        counts_saves: bool = False,
    ) -> None:
        """Take the exit status of a checkpoint. ``place``: the same, opened where a store has it.
        ``doubted``: names of checkpoints next to it that its findings put in doubt. ``differs``: a
        note tells how it differs from those. ``counts_saves``: it is a save of a run, by whatever
        name, that has others next to it.

        There the newest one is looked at now, and the histories that ``other_run`` compares first
        are read: what was read of these checkpoints is in memory still, and costs no second
        request.
        """
        run, family = path.parent, family_of(path.name)
        stem, number = split_number(path.name) or ("", 0)
        if counts_saves and family is None:
            with self._lock:
                ends = sorted([*self._unnamed.get((run, stem), ()), (number, path.name)])
                self._unnamed[run, stem] = [ends[0], *ends[1:][-1:]]
        time = time_of(place)
        with self._lock:
            if run not in self._unclean or family is None:
                return
            if time is not None:
                key, saved = (run, family[0]), (time, family[1], path.name)
                self._saved_last[key] = max(saved, self._saved_last.get(key, saved))
            if not status:
                self._unclean[run].discard(path.name)
            self._doubted.update(run / name for name in doubted)
            if differs:
                self._different.add(path)
            if not is_of_listing(path):
                return
            if run not in self._newest:
                families = numbered(run).values()
                self._newest[run] = frozenset(folders[0][1] for folders in families)
                self._compared[run] = frozenset(
                    folders[place][1]
                    for folders in families
                    for place in (0, min(1, len(folders) - 1), -1)
                )
            is_newest, is_compared = path in self._newest[run], path in self._compared[run]
        if is_compared:
            self._histories[path] = history_of(place, counts_steps=True)
        if is_newest:
            look = examine if status else judge
            self._known[path] = replace(look(place, family[1]), path=path)

    def tracker_problems(self) -> list[str]:
        """Return in words what is wrong with the trackers of the runs, as of
        ``tracker_problem``.
        """
        problems = []
        for run in self._runs:
            with suppress(CkptfixError, OSError):
                if words := tracker_problem(run):
                    problems.append(f"{run}: {words}")
        return problems

    def answers(self) -> list[Resume]:
        """Return the answer for each run, by the function behind ``latest_checkpoint``."""
        answers = []
        for run in self._unclean:
            answer = self._answer(run)
            if self._is_copied_into_itself(run, answer):
                continue
            taken = ""
            # stock accelerate loads from a disk alone
            with suppress(OSError):
                taken = taken_instead(run)
            answers.append(replace(answer, taken_instead=taken))
        known = ", ".join(pattern.format("N") for pattern in FAMILIES)
        for (run, stem), ends in sorted(self._unnamed.items(), key=str):
            if run not in self._unclean and len(ends) > 1:
                names = " to ".join(name for _, name in ends)
                problem = f"{names} have other names than the usual ones ({known})"
                answers.append(
                    Resume(run=run, checkpoint=None, problem=problem, pattern=f"{stem}{{}}")
                )
        return answers

    def _is_copied_into_itself(self, run: AnyPath, answer: Resume) -> bool:
        """Return whether a run is only a complete checkpoint that holds a copy of itself, as after
        ``cp -r checkpoint-8 other/checkpoint-8`` where the destination existed.

        The outer one has its answer in the run around it; a second answer looks like a second run.
        """
        family, unclean = family_of(run.name), self._unclean.get(run.parent)
        if family is None or unclean is None or run.name in unclean:
            return False
        names = {path.name for folders in numbered(run).values() for _, path in folders}
        if names != {run.name} or answer.checkpoint is None or answer.other_run:
            return False
        with suppress(CkptfixError, OSError):
            return judge(run, family[1]).problem is None
        return False

    def _answer(self, run: AnyPath) -> Resume:
        def look(path: AnyPath, number: int) -> Candidate:
            # Of a checkpoint in which check found nothing, the rest is told by its names and
            # headers.
            is_clean = path.name not in self._unclean[run] and not path.is_symlink()
            return self._known.get(path) or (judge if is_clean else examine)(path, number)

        copies: set[AnyPath] = set()

        def look_for_clean(path: AnyPath, number: int) -> Candidate:
            if self._has_problems(run, path) or path in copies or path in self._different:
                return Candidate(path=path, number=number, problem="check found problems")
            return look(path, number)

        def read(path: AnyPath) -> History | None:
            return self._histories[path] if path in self._histories else history_of(path)

        try:
            choice = choose(run, look=look, read=read)
        except FAILURES as error:
            return Resume(run=run, checkpoint=None, problem=ending_of(error).message)
        if choice is None:
            return Resume(run=run, checkpoint=None, problem="the checkpoints no longer exist")
        passed_over = tuple(one.path.name for one in choice.passed_over)
        told = choice.told
        other_run = not_checked = ""
        if told is not None:
            not_checked = told.question
        if told is not None and told.proof:
            other_run = f"{run}: {told.proof}" + (f"; next: {told.advice}" if told.advice else "")
        if choice.best is None:
            problem = problems_in(choice.passed_over)
            names = series([one.path.name for one in choice.rivals])
            if choice.proof:
                problem = f"{names} are complete but contradict each other"
            elif choice.rivals:
                problem = f"{names} are complete, but their times do not show which is newer"
            return Resume(
                run=run, checkpoint=None, problem=problem, passed_over=passed_over,
                other_run=other_run,
            )  # fmt: skip
        best, problem = choice.best.path, ""
        clean: AnyPath | None = None
        is_doubted, is_different = self._has_problems(run, best), best in self._different
        if is_doubted:
            problem = f"check found problems in {best.name}"
        elif told is not None and told.copied:
            problem = f"{best.name} is {told.copied} an earlier checkpoint"
        elif is_different:
            problem = f"{best.name} differs from its neighbours"
        elif best.is_symlink():
            problem = f"{best.name} is a symbolic link, which check -r does not follow"
        if is_doubted or is_different or (told is not None and told.copied):
            while (sound := choose(run, look=look_for_clean, read=read)) and sound.best:
                if sound.told is None or not sound.told.copied:
                    clean = sound.best.path
                    break
                copies.add(sound.best.path)
        unexplained = tuple(
            f"{one.path.name}: {one.problem}"
            for one in choice.passed_over
            if one.path.name not in self._unclean[run]
        )
        saved_later = ""
        name, seconds = self._saved_later(run, choice.best)
        if seconds > DAY and not other_run:
            other_run = (
                f"{run}: {name} was saved {days_between(0, seconds)} after {best.name}, which may "
                "belong to an older run; next: move the older run out of the folder, or ignore "
                "this if the files were copied"
            )
        # Uploads of many files at once have times in any order.
        elif seconds > _AT_ONCE and not other_run and not is_of_listing(run):
            saved_later = (
                f"the files of {name} are {count_of(int(seconds // 60), 'minute')} newer; likely "
                "causes: a second run in this folder, or a copy"
            )
        return Resume(
            run=run, checkpoint=best, problem=problem, is_doubted=is_doubted, clean=clean,
            passed_over=passed_over, unexplained=unexplained[:3], other_run=other_run, saved_later=saved_later,
            not_checked=not_checked,
        )  # fmt: skip

    def _has_problems(self, run: AnyPath, path: AnyPath) -> bool:
        """Return whether a finding is about a checkpoint: its own, or one of a checkpoint next to
        it.
        """
        return path.name in self._unclean[run] or path in self._doubted

    def _saved_later(self, run: AnyPath, best: Candidate) -> tuple[str, float]:
        """Return the lower number that was saved last, and how many seconds after the highest one;
        0 where that was saved last.
        """
        family = family_of(best.path.name)
        saved = self._saved_last.get((run, family[0])) if family is not None else None
        if saved is None or best.time is None or saved[1] >= best.number:
            return "", 0
        return saved[2], saved[0] - best.time

"""One verb over several paths, and the state in which an interrupt left each folder."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from pathlib import Path
from typing import Protocol, TypeVar

from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import FAILURES, Interrupted, Report, ending_of, interruptible
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.target import find_target
from ckptfix.errors import CkptfixError, TeamError, UsageError
from ckptfix.storage import teams
from ckptfix.storage.doors import looks_like_url, opened
from ckptfix.storage.markers import upload_problem
from ckptfix.storage.paths import MANIFEST, command, shell_path
from ckptfix.storage.transactions import State, transactions
from ckptfix.wording import Line, count_of, line, unchecked_line

# One verb over several paths: each on its own, what was not checked once, and a summary of all.

_FAILED = "failed"
_NOT_REACHED = "not reached"
_COUNTED = re.compile(r"(\d+) ([a-z]+?)s?\b(.*)", re.DOTALL)
_NAMES = re.compile(r"'[^']*'(?:, '[^']*')*(?: and \d+ more)?|\d+")


class Result(Protocol):
    """Result of a verb for one path."""

    @property
    def status(self) -> int:
        """The exit status of this path alone."""

    def as_json(self) -> Mapping[str, object]:
        """Return the result as JSON values."""

    def lines(self) -> Iterator[Line]:
        """Yield what a person should read."""


R = TypeVar("R", bound=Result)
StateAfter = Callable[[str], Callable[[], str]]
"""Takes a path before the work on it, and returns what describes the state in which an interrupt left it."""


@dataclass(kw_only=True)
class Batch:
    """The results of a verb. ``status``: the worst of all paths, which is the highest: 130, then 3, 2, 1, 0.

    ``words``: how many paths came to what. ``unchecked``: path -> what was not checked there.
    """

    documents: list[Mapping[str, object]] = field(default_factory=list)
    status: int = 0
    words: Counter[str] = field(default_factory=Counter)
    unchecked: dict[str, list[str]] = field(default_factory=dict)

    def add(self, document: Mapping[str, object], status: int, word: str) -> None:
        """Add the result of one path. ``word``: what became of it, for the summary."""
        self.documents.append(document)
        self.status = max(self.status, status)
        self.words[word] += 1

    def lines(self, order: Sequence[str]) -> Iterator[Line]:
        """Yield what was not checked, and how many paths came to what, in this order."""
        yield from map(unchecked_line, folded(self.unchecked))
        words = [word for word in (*order, _FAILED, _NOT_REACHED) if self.words[word]]
        counts = ", ".join(f"{self.words[word]} {word}" for word in words)
        total = count_of(self.words.total(), "checkpoint")
        yield line(f"{total}: {counts}", colour="red" if self.status else "green", bold=True)


def visit(
    report: Report,
    paths: Sequence[str],
    work: Callable[[str], R],
    *,
    word: Callable[[R], str],
    lines: Callable[[R], Iterable[Line]] | None = None,
    annotations: Callable[[R], Iterable[Annotation]] = lambda result: (),
    state_after: StateAfter | None = None,
) -> Batch:
    """Do the work on each path, and print its lines or annotations. After a failure the next path follows.

    Of a lone path, a failure is raised. An interrupt ends the work on all of them.
    """
    batch = Batch()
    for number, path in enumerate(paths):
        try:
            with interruptible(state_after(path)) if state_after is not None else nullcontext():
                with teams.as_one():
                    result = work(path)
                if report.is_annotated:
                    report.annotate(annotations(result))
                for one in result.lines() if lines is None else lines(result):
                    if one.unchecked and len(paths) > 1:
                        batch.unchecked.setdefault(path, []).append(one.unchecked)
                    else:
                        report.show([one])
        except FAILURES as error:
            if len(paths) == 1 or isinstance(error, TeamError):
                raise
            message, status = ending_of(error)
            report.message(f"ckptfix: {message}")
            batch.add({"path": path, "status": status, "error": message}, status, _FAILED)
            if isinstance(error, Interrupted):
                batch.words[_NOT_REACHED] = len(paths) - number - 1
                break
        else:
            batch.add(result.as_json() if report.as_json else {}, result.status, word(result))
    return batch


def run_each(
    report: Report,
    paths: Sequence[str],
    work: Callable[[str], R],
    *,
    word: Callable[[R], str],
    order: Sequence[str],
    lines: Callable[[R], Iterable[Line]] | None = None,
    annotations: Callable[[R], Iterable[Annotation]] = lambda result: (),
    state_after: StateAfter | None = None,
) -> int:
    """Do the work on each path, print the summary of several, and return the worst exit status.

    The JSON object is that of the path; of several, its ``reports`` are those of all.
    """
    batch = visit(
        report, paths, work, word=word, lines=lines, annotations=annotations, state_after=state_after
    )
    if len(paths) == 1:
        return report.finish(batch.documents[0], batch.status)
    report.show(batch.lines(order))
    return report.finish({"reports": batch.documents}, batch.status)


def folded(unchecked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what was not checked, once for all paths: words that differ in a number, a path or names are one."""
    groups: dict[object, dict[str, str]] = {}
    for path, every in unchecked.items():
        for words in every:
            counted = _COUNTED.fullmatch(words)
            about, _, pasted = words.partition("ckptfix ")
            general = about + pasted.replace(shell_path(path if looks_like_url(path) else Path(path)), "")
            key = counted.groups()[1:] if counted else _NAMES.sub("", general)
            groups.setdefault(key, {})[path] = words
    for same in groups.values():
        first, *others = same.values()
        counted = _COUNTED.fullmatch(first)
        if others and counted is not None:
            total = sum(int(words.split()[0]) for words in same.values())
            yield f"{count_of(total, counted[2])}{counted[3]}"
        elif any(words != first for words in others):
            yield f"{first} (and {count_of(len(others), 'more checkpoint')})"
        else:
            yield first


# The state in which an interrupt left a folder: looked up once the cleaning up is done, never guessed.


def state_after_repair(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a repair was interrupted that begins now."""
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            what = "finish" if looks_like_url(path) else "roll back"
            return f"run {_command('repair', path)} again to {what}"
        if _repairs(path) > before:
            return f"{path} is fully repaired; to undo: {_command('undo', path)}"
        return f"{path} is unchanged"

    return describe


def state_after_undo(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after an undo was interrupted that begins now."""
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            return f"run {_command('undo', path)} again to finish"
        return f"the repair of {path} is undone" if _repairs(path) < before else f"{path} is unchanged"

    return describe


def state_after_seal(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a seal was interrupted that begins now."""
    before = _identity(Path(path, MANIFEST))

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('undo', Path(path))} to roll back"
        is_old = _identity(Path(path, MANIFEST)) == before
        return (
            f"{path} is unchanged" if is_old else f"{path} is sealed; next: {command('verify', Path(path))}"
        )

    return describe


def state_after_writing(source: str, output: str) -> Callable[[], str]:
    """Return what describes the state after an interrupt of a verb that begins now and writes a new ``output``."""
    if looks_like_url(output):
        return lambda: f"{source} is unchanged, and {_state_of_upload(output)}"
    before = _identity(Path(output))

    def describe() -> str:
        now = _identity(Path(output))
        if now == before:
            what = f"nothing was written at {output}" if before is None else f"so is {output}"
        elif now is None:
            what = f"the old {output} was moved aside: run the same command again to bring it back"
        else:
            what = f"{output} is complete"
        return f"{source} is unchanged, and {what}"

    return describe


def _state_of_upload(url: str) -> str:
    """Return in words what is at a URL to which something was to be written."""
    try:
        with opened(url, complete=False) as place:
            problem = upload_problem(place)
    except UsageError:
        return f"nothing was written at {url}"
    except (CkptfixError, OSError) as error:
        return f"{url} could not be looked at: {error}"
    return f"{url} is complete" if problem is None else f"{url} is not: {problem}"


def _command(verb: str, path: str) -> str:
    return f"ckptfix {verb} {shell_path(path)}" if looks_like_url(path) else command(verb, Path(path))


def _repairs(path: str) -> int:
    """Return how many repairs can be undone; 0 where that cannot be known, as of a path that does not exist."""
    try:
        with opened(path, complete=False) as place:
            return sum(one.state is State.DONE for one in transactions(find_target(place).root))
    except (CkptfixError, OSError):
        return 0


def _is_pending(path: str) -> bool:
    try:
        with opened(path, complete=False) as place:
            return any(one.state is State.PENDING for one in transactions(find_target(place).root))
    except (CkptfixError, OSError):
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

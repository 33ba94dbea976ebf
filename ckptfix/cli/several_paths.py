"""One verb over several paths, and the state in which an interrupt left each folder."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.cli.annotations import Annotation
from ckptfix.cli.report import FAILURES, Interrupted, Report, ending_of, interruptible
from ckptfix.diagnosis.save_progress import are_saves_of_one_run
from ckptfix.diagnosis.target import find_checkpoints, find_target
from ckptfix.errors import CkptfixError, TeamError, UsageError
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import AnyPath, StorePath, absolute, etag_of, is_url, unheld_below
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.opened import open_files
from ckptfix.storage.parallel import in_turn
from ckptfix.storage.paths import MANIFEST, command, shell_path
from ckptfix.storage.reading import identity
from ckptfix.wording import Line, count_of, line, unchecked_lines

# One verb over several paths: each on its own, what was not checked once, and a summary of all.

_OF_DISK, _OF_STORE = 4, 16
"""Checkpoints that are looked at at once: more wait for the same disk; a store answers many, each
after a while.
"""

_PASTED = 4
"""A shell makes ``checkpoint-*`` hundreds of paths: a line with more than these is not printed."""

_FAILED = "failed"
_NOT_REACHED = "not reached"
_COUNTED = re.compile(r"(\d+) ([a-z]+?)s?\b(.*)", re.DOTALL)
_NAMES = re.compile(r"'[^']*'(?:, '[^']*')*(?: and \d+ more)?|\d+")


def threads_for(paths: Sequence[str]) -> int:
    """Return how many checkpoints to look at at once: more of a store than of a disk."""
    is_of_store = any(is_url(path) and not path.startswith("file:") for path in paths)
    return _OF_STORE if is_of_store else _OF_DISK


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
"""Takes a path before the work on it, and returns what describes the state in which an interrupt
left it.
"""


class Batch(Struct, kw_only=True):
    """The results of a verb. ``status``: the worst of all paths, which is the highest: 130, then 3,
    2, 1, 0.

    ``words``: how many paths came to what. ``unchecked``: what was not checked.
    """

    status: int = 0
    words: Counter[str] = field(default_factory=Counter)
    unchecked: "Unchecked" = field(default_factory=lambda: Unchecked())

    def add(self, status: int, word: str) -> None:
        """Add the result of one path. ``word``: what became of it, for the summary."""
        self.status = max(self.status, status)
        self.words[word] += 1

    @property
    def is_of_many(self) -> bool:
        """Return whether there was more than one path."""
        return self.words.total() > 1

    def summary(self, order: Sequence[str]) -> dict[str, int]:
        """Return the number of paths, then how many came to what, in this order."""
        words = [word for word in (*order, _FAILED, _NOT_REACHED) if self.words[word]]
        return {"checkpoints": self.words.total(), **{word: self.words[word] for word in words}}

    def lines(self, order: Sequence[str], *, details: str = "") -> Iterator[Line]:
        """Yield what was not checked, and how many paths came to what, in this order.

        ``details``: as of ``unchecked_lines``.
        """
        yield from unchecked_lines(list(self.unchecked.sentences()), details=details)
        total, *words = self.summary(order).items()
        counts = ": " + ", ".join(f"{count} {word}" for word, count in words) if words else ""
        colour = "red" if self.status else "green"
        yield line(f"{count_of(total[1], 'checkpoint')}{counts}", colour=colour, bold=True)


def visit(
    report: Report,
    paths: Iterable[str | AnyPath],
    work: Callable[[Any], R],
    *,
    word: Callable[[R], str],
    keep: Callable[[Mapping[str, object]], object],
    lines: Callable[[R, bool], Iterable[Line]] = lambda result, is_alone: result.lines(),
    annotations: Callable[[R], Iterable[Annotation]] = lambda result: (),
    state_after: StateAfter | None = None,
    threads: int = 1,
    stop: Callable[[], None] = lambda: None,
    executor: Executor = THREADS,
) -> Batch:
    """Do the work on each path, and print its lines or annotations. After a failure the next path
    follows, unless one of several processes has failed alone: then all of them stop.

    Of a lone path, a failure is raised. An interrupt ends the work on all of them. ``keep`` is
    called with the JSON values of each, ``lines`` with a result and whether it is the only one.
    Several threads work on paths ahead of the one that is printed; ``stop`` ends their work early.
    """
    batch = Batch()
    left = iter(paths)
    first = [*islice(left, 2)]
    left, is_alone = chain(first, left), len(first) == 1
    if executor.has_units:
        from ckptfix.storage.launched_ranks import ensure_same_files, ensure_same_names

        every = [*left]
        with executor.as_one():
            ensure_same_names(executor, [*map(str, every)])
        left = iter(every)

    def attempt(path: str | AnyPath) -> R | Exception:
        try:
            around = (
                interruptible(state_after(path))
                if state_after is not None and isinstance(path, str)
                else nullcontext()
            )
            if executor.has_units and isinstance(path, Path):
                with executor.as_one():
                    ensure_same_files(executor, [path])
            with around, executor.as_one():
                return work(path)
        # Also one that nobody has foreseen: the rest of the fleet continues.
        except Exception as error:
            return error

    for path, result in in_turn(
        left, attempt, threads=1 if is_alone else threads, stop=stop, of_store=threads == _OF_STORE
    ):
        if isinstance(result, Exception):
            if is_alone or isinstance(result, TeamError):
                raise result
            message, status = ending_of(result)
            if not isinstance(result, FAILURES):
                message = f"{path}: {message}"
            if executor.has_ended and not isinstance(result, Interrupted):
                raise TeamError(f"rank 0 failed, so all ranks stop: {message}") from result
            report.message(f"ckptfix: {message}")
            keep({"path": str(path), "status": status, "error": message})
            batch.add(status, _FAILED)
            if isinstance(result, Interrupted):
                batch.words[_NOT_REACHED] = sum(1 for _ in left)
                break
            continue
        if report.is_annotated:
            report.annotate(annotations(result))
        for text in lines(result, is_alone):
            if text.unchecked and not is_alone:
                batch.unchecked.add(str(path), text.unchecked)
            else:
                report.show([text])
        if report.as_json:
            keep(result.as_json())
        batch.add(result.status, word(result))
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
    details: str = "",
    executor: Executor = THREADS,
) -> int:
    """Do the work on each path, print the summary of several, and return the worst exit status.

    The JSON object is that of the path; of several, its ``reports`` are those of all. ``details``:
    as of ``Batch.lines``.
    """
    documents: list[Mapping[str, object]] = []
    batch = visit(
        report, paths, work, word=word, keep=documents.append, annotations=annotations,
        state_after=state_after, executor=executor, lines=lambda result,
        is_alone: result.lines() if lines is None else lines(result),
    )  # fmt: skip
    if len(paths) == 1:
        return report.finish(documents[0] if documents else {}, batch.status)
    report.show(batch.lines(order, details=details))
    return report.finish({"reports": documents}, batch.status)


def check_verbosely(paths: Sequence[str], *options: str) -> str:
    """Return the command that lists everything that a check of these paths leaves out; of many
    paths in words.
    """
    if len(paths) > _PASTED:
        return "the same command with -v"
    return " ".join(("ckptfix check -v", *options, *map(shell_path, paths)))


def place_named(path: str) -> str:
    """Return a path or URL as two command lines have it in common, however they write it."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


class Below:
    """The checkpoints at or below several paths, found one by one: there may be 100,000 of them.

    ``opened``: keeps the listings of URLs open; each is listed once. ``places``: the folder of each
    path. A path that cannot be listed is yielded, too, and is in ``failures``. A checkpoint that
    two of the paths lead to comes once.
    """

    def __init__(
        self, paths: Sequence[str], opened: ExitStack, *, is_thrifty: bool = False
    ) -> None:
        self._paths = [*{place_named(path): path for path in reversed(paths)}.values()][::-1]
        names = [place_named(path) for path in self._paths]
        self._overlap = any(
            inner != outer and inner.startswith(f"{outer}/") for inner in names for outer in names
        )
        self.failures: dict[str, Exception] = {}
        self.places: dict[str, AnyPath] = {}
        for path in self._paths:
            try:
                self.places[path] = opened.enter_context(
                    open_files(path, complete=False, lists=True, is_thrifty=is_thrifty)
                )
            except FAILURES as error:
                if len(self._paths) == 1:
                    raise
                self.failures[path] = error
        self._unheld = [
            lost for place in self.places.values() for lost in unheld_below(place) if lost.size
        ]

    def __iter__(self) -> Iterator[str | AnyPath]:
        seen: set[str] = set()
        for path in self._paths:
            if path not in self.places:
                yield path
                continue
            try:
                for place in find_checkpoints(self.places[path]):
                    if isinstance(place, StorePath):  # its check reports them
                        self._unheld[:] = (
                            lost for lost in self._unheld if not lost.home.is_relative_to(place)
                        )
                    if self._overlap:
                        name = str(absolute(place))
                        if name in seen:
                            continue
                        seen.add(name)
                    yield place
            except FAILURES as error:
                self.failures[path] = error
                yield path

    def siblings(self) -> Siblings:
        """Return the runs of the checkpoints."""
        places = self.places.values()
        return Siblings(places, is_recursive=True, is_one_run=are_saves_of_one_run)

    def listed(self, path: str | AnyPath) -> AnyPath:
        """Return the path of a checkpoint; raise why there is nothing to work on at a path of a
        command line.
        """
        if isinstance(path, str):
            raise self.failures[path]
        return path

    def report_unheld(self, report: Report, batch: Batch) -> None:
        """Print what no folder can hold and no checkpoint has reported, at the end."""
        for lost in self._unheld:
            report.message(f"ckptfix: {lost.home}: could not finish: {lost.key!r}: {lost}")
            batch.status = max(batch.status, 3)


_MOST_SENTENCES = 200


class Unchecked:
    """Sentences about what was not checked, each once: those that differ in a number, a path or
    names are one.
    """

    def __init__(self) -> None:
        self._sentences: dict[object, _Sentence] = {}
        self._others = 0

    def add(self, path: str, words: str) -> None:
        """Add a sentence about a path."""
        counted = _COUNTED.fullmatch(words)
        about, _, pasted = words.partition("ckptfix ")
        general = about + pasted.replace(shell_path(path if is_url(path) else Path(path)), "")
        key = counted.groups()[1:] if counted else _NAMES.sub("", general)
        if key not in self._sentences and len(self._sentences) >= _MOST_SENTENCES:
            self._others += 1
        else:
            self._sentences.setdefault(key, _Sentence(words, counted)).add(path, words)

    def sentences(self) -> Iterator[str]:
        """Yield each sentence."""
        yield from map(str, self._sentences.values())
        if self._others:
            others = count_of(self._others, "more item")
            yield f"{others} like these; --json lists all"


class _Sentence:
    """A sentence about several paths. A path that has it twice, with other numbers, counts once."""

    def __init__(self, words: str, counted: "re.Match[str] | None") -> None:
        self._first, self._counted = words, counted
        self._paths, self._total, self._differs = 0, 0, False
        self._path = ""  # the path that came first
        self._last = ("", 0)  # the path that came last, and its number

    def add(self, path: str, words: str) -> None:
        number = int(words.split()[0]) if self._counted else 0
        is_again = path == self._last[0]
        self._total += number - (self._last[1] if is_again else 0)
        self._paths += not is_again
        self._first = words if self._paths == 1 else self._first
        self._path = self._path or path
        self._differs |= words != self._first
        self._last = (path, number)

    def __str__(self) -> str:
        if self._paths > 1 and self._counted is not None:
            return f"{count_of(self._total, self._counted[2])}{self._counted[3]}"
        # Without the place, a file of one checkpoint looks as if it were in those that a finding
        # says lack it.
        where = (
            self._path if self._paths == 1 or self._differs else count_of(self._paths, "checkpoint")
        )
        first = self._first.replace(" next to it: ", f" in {where}: ")
        if self._differs:
            return f"{first} (and {count_of(self._paths - 1, 'more checkpoint')})"
        return first


# The state in which an interrupt left a folder: looked up once the cleaning up is done, never
# guessed.


def state_after_repair(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a repair was interrupted that begins
    now.
    """
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            what = "finish" if is_url(path) else "roll back"
            return f"run {command('repair', path)} again to {what}"
        if _repairs(path) > before:
            return f"{path} is fully repaired; to undo: {command('undo', path)}"
        return f"{path} is unchanged"

    return describe


def state_after_undo(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after an undo was interrupted that begins now."""
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('undo', path)} again to finish"
        return (
            f"the repair of {path} is undone" if _repairs(path) < before else f"{path} is unchanged"
        )

    return describe


def state_after_seal(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a seal was interrupted that begins now."""
    before = _manifest_at(path)

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('undo', path)} to roll back"
        if _manifest_at(path) == before:
            return f"{path} is unchanged"
        return f"{path} is sealed; next: {command('verify', path)}"

    return describe


def state_after_writing(source: str, output: str) -> Callable[[], str]:
    """Return what describes the state after an interrupt of a verb that begins now and writes a new
    ``output``.
    """
    if is_url(output):
        return lambda: f"{source} is unchanged, and {_state_of_upload(output)}"
    before = _identity(Path(output))

    def describe() -> str:
        now = _identity(Path(output))
        if now == before:
            what = f"nothing was written to {output}" if before is None else f"so is {output}"
        elif now is None:
            what = f"the old {output} was moved aside: run the same command again to restore it"
        else:
            what = f"{output} is complete"
        return f"{source} is unchanged, and {what}"

    return describe


def state_after_upload(folder: str, url: str) -> Callable[[], str]:
    """Return what describes the state after an interrupt of an upload to ``url`` that begins
    now.
    """
    before = _upload_at(url)

    def describe() -> str:
        try:
            now = _upload_at(url, is_strict=True)
        except (CkptfixError, OSError) as error:
            return f"{folder} is unchanged, and {url} could not be read: {error}"
        if now is None:
            return f"nothing was written to {url}"
        if not now[1]:
            return f"{url} is not complete: run the same command again to finish"
        return f"{url} is unchanged" if now == before else f"{url} is complete"

    return describe


def _upload_at(url: str, *, is_strict: bool = False) -> tuple[str, bool] | None:
    """Return the number of the upload at a URL, and whether it is complete; None where none has
    begun.

    ``is_strict``: raise what makes it unknown, which is None otherwise.
    """
    from ckptfix.storage.markers import read_begun, read_commit

    try:
        with open_files(url, complete=False) as place:
            begun, commit = read_begun(place), read_commit(place)
    except UsageError:
        return None
    except (CkptfixError, OSError):
        if is_strict:
            raise
        return None
    if commit is not None and (begun is None or begun.upload == commit.upload):
        return commit.upload, True
    return (begun.upload, False) if begun is not None else None


def _state_of_upload(url: str) -> str:
    """Return in words what is at a URL to which something was to be written."""
    # For an interrupt alone: check must start quickly.
    from ckptfix.storage.markers import upload_problem

    try:
        with open_files(url, complete=False) as place:
            problem = upload_problem(place)
    except UsageError:
        return f"nothing was written to {url}"
    except (CkptfixError, OSError) as error:
        return f"{url} could not be read: {error}"
    return f"{url} is complete" if problem is None else f"{url} is not complete: {problem}"


def _repairs(path: str) -> int:
    """Return how many repairs can be undone; 0 where that cannot be known, as of a path that does
    not exist.
    """
    try:
        with open_files(path, complete=False) as place:
            return sum(
                transaction.state is State.DONE
                for transaction in transactions(find_target(place).root)
            )
    except (CkptfixError, OSError):
        return 0


def _is_pending(path: str) -> bool:
    try:
        with open_files(path, complete=False) as place:
            return any(
                transaction.state is State.PENDING
                for transaction in transactions(find_target(place).root)
            )
    except (CkptfixError, OSError):
        return False


def _manifest_at(path: str) -> object:
    """Return what tells the manifest of a folder from a later one, None where there is none."""
    try:
        with open_files(path, complete=False) as folder:
            return etag_of(folder / MANIFEST) or identity(folder / MANIFEST)
    except (CkptfixError, OSError):
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

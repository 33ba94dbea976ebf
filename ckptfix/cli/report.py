"""The only module that prints. Results go to stdout, messages and progress to stderr, JSON as one
object.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import click

from ckptfix.cli.annotations import Annotation, github_line, sarif
from ckptfix.diagnosis.findings.base import Finding, Severity, finding_lines
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.manual import wrap
from ckptfix.reports import Serialized, holds_many, plain
from ckptfix.storage import staged
from ckptfix.storage.atomic import DISK_FULL
from ckptfix.storage.files import AnyPath, is_url
from ckptfix.storage.paths import cause, described, shell_path
from ckptfix.wording import Line, escape, line

INTERRUPTED = 130


class Interrupted(Exception):
    """An interrupt of the user; the message names the state in which it left the folder."""


FAILURES = (Interrupted, CkptfixError, OSError, MemoryError)
"""All that ends the work on one path. The next path follows, but not after an interrupt."""


class Ending(NamedTuple):
    """Message about a failure, and its exit status."""

    message: str
    status: int


def ending_of(error: Exception) -> Ending:
    """Return how a verb ends with one of ``FAILURES``, or with an error that nobody has
    foreseen.
    """
    if isinstance(error, Interrupted):
        return Ending(str(error), INTERRUPTED)
    if isinstance(error, CkptfixError):
        return Ending(str(error), 2 if isinstance(error, UsageError) else 3)
    if isinstance(error, MemoryError):
        return Ending("out of memory; nothing was changed", 3)
    if not isinstance(error, OSError):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        code = (
            f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
            if trace
            else ""
        )
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return Ending(
            f"{why}{code}: this is a bug in ckptfix, so the outcome is unknown; please report it", 3
        )
    remedy = ""
    if error.errno in DISK_FULL:
        remedy = "; next: free up space on that disk, then run the command again"
    elif error.errno == errno.EROFS:
        remedy = "; next: choose a folder on a writable disk"
    if isinstance(error.filename, str) and not is_url(error.filename):
        error.filename = str(staged.target_of(Path(error.filename)))
    return Ending(f"{described(error)}{remedy}", 3)


@contextmanager
def interruptible(describe: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt into ``Interrupted``, with the state that ``describe`` finds once the
    cleaning up is done.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {describe()}") from None


def wants_colour(variables: Mapping[str, str]) -> bool | None:
    """Return whether the environment asks for colours or against them; None leaves it to what
    stdout is.

    ``NO_COLOR`` (no-color.org) goes before ``FORCE_COLOR`` and ``CLICOLOR_FORCE``, and those before
    ``CLICOLOR=0`` and ``TERM=dumb``.
    """
    if variables.get("NO_COLOR"):
        return False
    if any(variables.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return False if variables.get("CLICOLOR") == "0" or variables.get("TERM") == "dumb" else None


def can_redraw() -> bool:
    """Return whether stderr is a terminal that can go back to the start of a line, as a progress
    bar does.
    """
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _choose(context: click.Context, parameter: click.Parameter, value: str) -> None:
    # click.echo asks the current context whether to strip colours, so that no caller has to pass
    # them on.
    context.color = wants_colour(os.environ) if value == "auto" else value == "always"


COLOUR = click.Option(
    ["--color"],
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    expose_value=False,
    callback=_choose,
    help="When to use colours. auto: on a terminal, unless NO_COLOR is set or TERM is dumb.",
)
"""The option of every verb that reports; it sets the colours of the context, and no verb sees it.
"""


JSON_VERSION = 2
_ESCAPED = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|u(?P<lone>d[89a-f]..)|.)")
"""One escape of JSON, so that a backslash which is itself escaped begins no other."""

_BLOCK = 1 << 16  # characters of JSON that are printed at a time


class Form(Enum):
    """Format of a printed result."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"
    SARIF = "sarif"
    GITHUB = "github"


class Report:
    """Output of a verb: lines for a person, or one document at the end.

    ``quiet``: print no lines and no progress; a document, a path that was asked for and a failure
    are printed still. ``is_silent``: print nothing at all, because another process does.
    """

    def __init__(self, form: Form = Form.TEXT, *, quiet: bool = False) -> None:
        self.form = form
        self.quiet = quiet
        self.is_silent = False
        self._annotations: list[Annotation] = []
        self._list = ""  # the key of the list whose elements are printed as they come

    @property
    def as_json(self) -> bool:
        """Return whether stdout gets JSON and nothing else: one object, or one a line."""
        return self.form in (Form.JSON, Form.JSONL)

    @property
    def is_annotated(self) -> bool:
        """Return whether findings are printed as annotations, each with its file."""
        return self.form in (Form.SARIF, Form.GITHUB)

    def annotate(self, annotations: Iterable[Annotation]) -> None:
        """Print annotations, or keep them for the document; no other format has any."""
        if self.form is Form.GITHUB:
            for annotation in annotations:
                self.put(github_line(annotation))
        elif self.form is Form.SARIF:
            self._annotations += annotations

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines of the result; click drops their colours where stdout is not a terminal.

        Where annotations are asked for, only what was not checked is taken from them.
        """
        if self.quiet or self.as_json:
            return
        if self.is_annotated:
            self.annotate(Annotation(Severity.NOTE, str(text)) for text in lines if text.unchecked)
            return
        for text in lines:
            styled = (
                click.style(escape(span.text), fg=span.colour, bold=span.bold or None)
                for span in text.spans
            )
            self.put("".join(styled))

    def line(self, text: str = "", *, colour: str | None = None, bold: bool = False) -> None:
        """Print one line of the result."""
        self.show([line(text, colour=colour, bold=bold)])

    def findings(self, findings: Sequence[Finding], at: str) -> None:
        """Print findings about the checkpoint ``at``."""
        self.show(finding_lines(findings, at))

    def path(self, path: AnyPath, *, null: bool) -> None:
        """Print a path for xargs: quoted in a line, or, with ``null``, as it is and with a NUL
        behind it.
        """
        if self.form is not Form.TEXT:
            return
        if null:
            text = str(path)
            self.put(
                os.fsencode(f"./{text}" if text.startswith("-") else text) + b"\0", newline=False
            )
        else:
            self.put(shell_path(path))

    def message(self, text: str) -> None:
        """Print a message that is not a result: to stderr, or as an annotation of the run."""
        self.annotate([Annotation(Severity.ERROR, text.removeprefix("ckptfix: "))])
        if self.form is Form.TEXT:
            self.put(escape(text), err=True)

    @property
    def has_begun(self) -> bool:
        """Return whether a part of the document was printed, which only ``finish`` can complete."""
        return bool(self._list)

    def element(self, key: str, document: Mapping[str, object]) -> None:
        """Print one element of the list ``key`` of the document, or a line of its own, as soon as
        it is there.

        ``finish`` prints the rest of the document. So nobody holds the results of 100,000
        checkpoints.
        """
        if self.form is Form.JSONL:
            self.put(json_text(document))
        elif self.form is Form.JSON:
            head = ", " if self._list else f'{{"version": {JSON_VERSION}, {json_text(key)}: ['
            self.put(head + json_text(document), newline=False)
            self._list = key

    def finish(self, document: Serialized | Mapping[str, object], status: int) -> int:
        """Print the document that was asked for, and return the exit status.

        A list of reports in it becomes text one by one: the values of 100,000 tensors together take
        90 MB. The key of a list whose elements were printed before is left out.
        """
        if self._list:
            pairs = document.items() if isinstance(document, Mapping) else document.json_items()
            rest = {key: value for key, value in pairs if key != self._list}
            self.put(
                "]"
                + "".join(_json_object({**rest, "status": status}.items(), "")).replace(
                    "{", ", ", 1
                )
            )
            self._list = ""
        elif self.as_json:
            at = str(getattr(document, "path", ""))
            pairs = (
                document.json_items(at) if isinstance(document, Serialized) else document.items()
            )
            text = ""
            for part in _json_object(
                {"version": JSON_VERSION, **dict(pairs), "status": status}.items(), at
            ):
                text += part
                if len(text) >= _BLOCK:
                    self.put(text, newline=False)
                    text = ""
            self.put(text)
        elif self.form is Form.SARIF:
            self.put(json_text(sarif(self._annotations, status)))
        return status

    def break_off(self, error: Exception) -> int:
        """Complete a document that was begun, for an error that ends the run. Raises the error
        where none was.
        """
        if not self.has_begun:
            raise error
        message, status = ending_of(error)
        self.put(f"ckptfix: {escape(message)}", err=True)
        return self.finish({"error": message}, status)

    def put(self, text: str | bytes, *, newline: bool = True, err: bool = False) -> None:
        """Print text as ``put`` does, unless another process prints for this one."""
        if not self.is_silent:
            put(text, newline=newline, err=err)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to be called with byte counts; a bar is drawn only on a terminal, and
        only if used.
        """
        if self.is_silent or self.quiet or self.form is not Form.TEXT or not can_redraw():
            yield lambda count: None
            return
        bar: Any = None
        lock = Lock()  # several checkpoints are read at once

        def advance(count: int) -> None:
            nonlocal bar
            with lock:
                if bar is None:
                    from tqdm import tqdm

                    bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=what, leave=False)
                bar.update(count)

        try:
            yield advance
        finally:
            if bar is not None:
                bar.close()


def put(text: str | bytes, *, newline: bool = True, err: bool = False) -> None:
    """Print text to stdout or stderr; click drops the colour unless that is a terminal.

    A failure to print stops no verb: `ckptfix repair DIR | head -1` closes the pipe, and the repair
    continues. Any other failure, such as a full disk, is reported on stderr.
    """
    try:
        click.echo(text, nl=newline, err=err)
    except OSError as error:
        _silence(err=err)
        if error.errno != errno.EPIPE and not err:
            put(
                f"ckptfix: stdout: {error.strerror}; the work continues, but the result is not "
                "printed",
                err=True,
            )


def put_page(text: str) -> None:
    """Print a page of the manual: wrapped on a terminal, through the pager if it is longer than the
    terminal.
    """
    if not sys.stdout.isatty():
        put(text, newline=False)
        return
    import shutil  # drags in bz2 and lzma, which a check does without

    size = shutil.get_terminal_size()
    text = wrap(text, min(size.columns, 100))
    if sys.stdin.isatty() and text.count("\n") >= size.lines:
        click.echo_via_pager(text)
    else:
        put(text, newline=False)


def _silence(*, err: bool) -> None:
    """Send what a stream has buffered, and all that follows, to the null device: a later flush must
    not fail again.
    """
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _json(value: object, at: str) -> Iterator[str]:
    """Yield the text of a value as ``json.dumps`` writes it. ``at``: the checkpoint for the
    commands in it.
    """
    if not holds_many(value):
        yield json_text(plain(value, at))
    elif isinstance(value, Serialized):
        at = str(getattr(value, "path", at))
        yield from _json_object(value.json_items(at), at)
    else:
        assert isinstance(value, tuple | list)
        before = "["
        for item in value:
            yield before
            yield from _json(item, at)
            before = ", "
        yield "]"


def _json_object(pairs: Iterable[tuple[str, object]], at: str) -> Iterator[str]:
    before = "{"
    for key, value in pairs:
        yield f"{before}{json_text(key)}: "
        yield from _json(value, at)
        before = ", "
    yield "}"


def json_text(value: Any) -> str:
    """Return the text of a value as ``json.dumps`` writes it, but in Unicode that every parser
    takes.

    Half a surrogate pair means a byte of a file's name that is not UTF-8: it becomes the text
    ``\\xff``.
    """
    text = json.dumps(value)
    return _ESCAPED.sub(_sound, text) if "\\ud" in text else text


def _sound(match: re.Match[str]) -> str:
    lone = match["lone"]
    return match[0] if lone is None else f"\\{escape(chr(int(lone, 16)))}"


_BEGINS = b"<!DOCTYPE html>\n"
_TITLE = b"<title>ckptfix "
_HEAD = 1024  # bytes within which every page has its title


def ensure_writable(report: Report, html: str, inputs: Sequence[str]) -> None:
    """Find out before the work of minutes whether the page can be written; an existing file stays
    as it is.

    ``inputs``: files and folders that it must not change. Raises UsageError when it cannot be
    written.
    """
    if report.is_silent:
        return
    page = Path(os.path.realpath(html))
    for given in inputs:
        if page.is_relative_to(os.path.realpath(given)):
            raise UsageError(f"--html {html} would write into {given}; choose a file outside it")
    try:
        if os.path.lexists(page) and not _is_ours(page):
            raise UsageError(
                f"--html: {html} exists and is not a ckptfix report; choose another path"
            )
        staged.ensure_writable(page)
    except OSError as error:
        raise UsageError(f"--html {html} cannot be written: {cause(Path(html), error)}") from error


def publish(report: Report, html: str, text: str) -> str:
    """Write a page, complete or not at all, and name it; return in words why it could not be
    written, "" where it was.
    """
    if report.is_silent:
        return ""
    page = Path(os.path.realpath(html))
    try:
        if os.path.lexists(page) and not _is_ours(page):
            raise FileExistsError(errno.EEXIST, "a file that is not a ckptfix report has appeared")
        staged.write_file(page, text.encode("utf-8"))
    except OSError as error:
        problem = f"--html {html}: {error.strerror}; no page was written"
        report.message(f"ckptfix: {problem}")
        return problem
    report.line(f"page: {html}")
    return ""


def _is_ours(page: Path) -> bool:
    """Return whether a file begins as our pages do, or is empty, as mktemp makes it."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        head = file.read(_HEAD)
    return not head or (head.startswith(_BEGINS) and _TITLE in head)

"""The only module that prints. Results to stdout, messages and progress to stderr, JSON as one object."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import click

from ckptfix.cli.annotations import Annotation, github_line, sarif
from ckptfix.cli.terminal import can_redraw
from ckptfix.manual import wrap
from ckptfix.operations.findings import Finding, Severity, finding_lines
from ckptfix.storage.paths import shell_path
from ckptfix.wording import Line, escape, line

JSON_VERSION = 1
_ESCAPED = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|u(?P<lone>d[89a-f]..)|.)")
"""One escape of JSON, so that a backslash which is itself escaped begins no other."""

_BLOCK = 1 << 16  # characters of JSON that are printed at a time


class Form(Enum):
    """How a result is printed."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


class Report:
    """Where a verb's results go: lines for a person, or one document at the end.

    ``quiet``: print no lines and no progress; a document, a path that was asked for and a failure are printed still.
    """

    def __init__(self, form: Form = Form.TEXT, *, quiet: bool = False) -> None:
        self.form = form
        self.quiet = quiet
        self._annotations: list[Annotation] = []

    @property
    def as_json(self) -> bool:
        """Whether stdout gets one JSON object and nothing else."""
        return self.form is Form.JSON

    @property
    def is_annotated(self) -> bool:
        """Whether findings are printed as annotations, each with its file."""
        return self.form in (Form.SARIF, Form.GITHUB)

    def annotate(self, annotations: Iterable[Annotation]) -> None:
        """Print annotations, or keep them for the document; no other format has any."""
        if self.form is Form.GITHUB:
            for one in annotations:
                put(github_line(one))
        elif self.form is Form.SARIF:
            self._annotations += annotations

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines of the result; click drops their colours where stdout is not a terminal.

        Where annotations are asked for, only what was not checked is taken from them.
        """
        if self.quiet or self.form is Form.JSON:
            return
        if self.is_annotated:
            self.annotate(Annotation(Severity.NOTE, str(one)) for one in lines if one.unchecked)
            return
        for one in lines:
            styled = (
                click.style(escape(span.text), fg=span.colour, bold=span.bold or None) for span in one.spans
            )
            put("".join(styled))

    def line(self, text: str = "", *, colour: str | None = None, bold: bool = False) -> None:
        """Print one line of the result."""
        self.show([line(text, colour=colour, bold=bold)])

    def findings(self, findings: Sequence[Finding], at: str) -> None:
        """Print findings about the checkpoint ``at``."""
        self.show(finding_lines(findings, at))

    def path(self, path: Path, *, null: bool) -> None:
        """Print a path for xargs: quoted in a line, or, with ``null``, as it is and with a NUL behind it."""
        if self.form is not Form.TEXT:
            return
        if null:
            put(os.fsencode(f"./{path}" if str(path).startswith("-") else path) + b"\0", newline=False)
        else:
            put(shell_path(path))

    def message(self, text: str) -> None:
        """Print a message that is not a result: to stderr, or as an annotation of the run."""
        self.annotate([Annotation(Severity.ERROR, text.removeprefix("ckptfix: "))])
        if self.form is Form.TEXT:
            put(escape(text), err=True)

    def finish(self, document: Mapping[str, Any], status: int) -> int:
        """Print the document that was asked for, and return the exit status.

        An iterator in the document is printed as a list, of which one value at a time is in memory.
        """
        if self.as_json:
            text = ""
            for part in _json({"version": JSON_VERSION, **document, "status": status}):
                text += part
                if len(text) >= _BLOCK:
                    put(text, newline=False)
                    text = ""
            put(text)
        elif self.form is Form.SARIF:
            put(json_text(sarif(self._annotations, status)))
        return status

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to be called with byte counts; a bar is drawn only on a terminal, and only if used."""
        if self.quiet or self.form is not Form.TEXT or not can_redraw():
            yield lambda count: None
            return
        bar: Any = None

        def advance(count: int) -> None:
            nonlocal bar
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
    """Print text to stdout or stderr; click drops the colour where that is no terminal.

    A failure to print stops no verb: `ckptfix repair DIR | head -1` closes the pipe, and the repair goes on. A failure
    other than a closed pipe, such as a full disk, is reported on stderr.
    """
    try:
        click.echo(text, nl=newline, err=err)
    except OSError as error:
        _silence(err=err)
        if error.errno != errno.EPIPE and not err:
            put(f"ckptfix: stdout: {error.strerror}; the work goes on, its result is not printed", err=True)


def put_page(text: str) -> None:
    """Print a page of the manual: wrapped on a terminal, through the pager if it is longer than the terminal."""
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
    """Send what a stream has buffered, and all that follows, to the null device: a later flush must not fail again."""
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _json(value: Any) -> Iterator[str]:
    """Yield the text of a value as ``json.dumps`` writes it; of an iterator as that of a list."""
    if isinstance(value, Iterator):
        before = "["
        for one in value:
            yield before
            yield from _json(one)
            before = ", "
        yield "]" if before == ", " else "[]"
    elif isinstance(value, dict) and any(isinstance(one, Iterator) for one in value.values()):
        before = "{"
        for key, one in value.items():
            yield f"{before}{json_text(key)}: "
            yield from _json(one)
            before = ", "
        yield "}"
    else:
        yield json_text(value)


def json_text(value: Any) -> str:
    """Return the text of a value as ``json.dumps`` writes it, but in Unicode that every parser takes.

    Half a surrogate pair stands for a byte of a file's name that is not UTF-8: it becomes the text ``\\xff``.
    """
    text = json.dumps(value)
    return _ESCAPED.sub(_sound, text) if "\\ud" in text else text


def _sound(match: re.Match[str]) -> str:
    lone = match["lone"]
    return match[0] if lone is None else f"\\{escape(chr(int(lone, 16)))}"

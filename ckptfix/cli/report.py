"""The only module that prints. Results to stdout, messages and progress to stderr, JSON as one object."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from ckptfix.operations.findings import Finding
from ckptfix.storage.paths import command

JSON_VERSION = 1
_SHOWN = 3
_BLOCK = 1 << 16  # characters of JSON that are printed at a time
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Report:
    """Where a verb's results go: lines for a person, or one JSON object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def line(self, text: str = "", *, colour: str | None = None, bold: bool = False) -> None:
        """Print one line of the result; click drops the colour where stdout is no terminal."""
        if not self.as_json:
            click.secho(escape(text), fg=colour, bold=bold)

    def finding(self, severity: str, code: str, message: str) -> None:
        """Print one finding: severity, code and sentence."""
        if self.as_json:
            return
        label = click.style(f"{severity:>7}", fg=_COLOURS[severity], bold=True)
        click.echo(f"{label} {click.style(code, bold=True)}: {escape(message)}")

    def few(self, lines: Sequence[str], what: str, *, colour: str | None = None) -> None:
        """Print lines that say the same of many files: only the first few, and how many more there are."""
        shown = lines if len(lines) <= _SHOWN + 1 else lines[:_SHOWN]
        for line in shown:
            self.line(line, colour=colour)
        if len(shown) < len(lines):
            self.line(f"  and {len(lines) - len(shown)} more {what}; --json lists all", colour=colour)

    def findings(self, findings: Sequence[Finding], at: str) -> None:
        """Print findings about the checkpoint ``at``; of one code in many files, as of shards, only the first few."""
        for (_, advice), group in groupby(
            findings, key=lambda finding: (finding.code, finding.advice_at(at))
        ):
            same = list(group)
            shown = same if len(same) <= _SHOWN + 1 else same[:_SHOWN]
            for finding in shown:
                self.finding(finding.severity.value, finding.code, str(finding))
            if advice:
                self.line(f"        {advice}")
            if len(shown) < len(same):
                self.line(
                    f"        and {len(same) - len(shown)} more files with {same[0].code}; --json lists all"
                )

    def salvage(self, findings: Sequence[Finding], at: str) -> None:
        """Print how to get out of ``at`` what is whole, when no repair helps and that is more than nothing."""
        if any(finding.is_salvageable for finding in findings):
            salvage = command("salvage", Path(at))
            self.line(f"next, to get out what is whole: {salvage} NEW_FOLDER")

    def message(self, text: str) -> None:
        """Print a message that is no result, to stderr."""
        if not self.as_json:
            click.echo(escape(text), err=True)

    def finish(self, document: Mapping[str, Any], status: int) -> int:
        """Print the JSON object when JSON was asked for, and return the exit status.

        An iterator in the document is printed as a list, of which one value at a time is in memory.
        """
        if self.as_json:
            text = ""
            for part in _json({"version": JSON_VERSION, **document, "status": status}):
                text += part
                if len(text) >= _BLOCK:
                    click.echo(text, nl=False)
                    text = ""
            click.echo(text)
        return status

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to be called with byte counts; a bar is drawn only on a terminal, and only if used."""
        if self.as_json or not sys.stderr.isatty():
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
            yield f"{before}{json.dumps(key)}: "
            yield from _json(one)
            before = ", "
        yield "}"
    else:
        yield json.dumps(value)


def escape(text: str) -> str:
    """Make text from a file safe to print: control and invisible characters become backslash escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)

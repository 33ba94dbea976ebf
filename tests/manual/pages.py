"""The generated parts of the manual and the README: ``python -m tests.manual.pages`` writes them
again.

Two kinds of parts are compared with what ckptfix says today. ``<!-- generated: WHAT -->`` begins a
text that comes from a catalogue, a command or a golden folder; ``<!-- end -->`` ends it. ``<!--
run: FIXTURE -->`` stands before a console block: its commands run in a folder with a copy
``checkpoint`` of that golden folder. Output that is written with ``...`` matches any text there,
and is never written again. ``<!-- run: FIXTURE needs NAME... -->``: only where these modules and
programs are installed.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

import click
import torch
from safetensors.torch import save_file

from ckptfix import check, verify
from ckptfix.cli import cli, run
from ckptfix.diagnosis.findings.base import Action, Finding, finding_lines
from ckptfix.diagnosis.findings.catalogue import CODES
from ckptfix.diagnosis.findings.damaged import InterruptedRepair
from ckptfix.diagnosis.findings.interrupted import StagingFolder
from ckptfix.diagnosis.findings.stale import StaleSave
from ckptfix.environment.doctor import CODES as TOPICS
from ckptfix.environment.doctor import diagnose_environment
from ckptfix.training.resume_proofs.causes import CAUSES
from tests.environment.cases import CASES

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "fixtures" / "golden"
PAGES = sorted((ROOT / "ckptfix" / "manual").glob("*.md"))
DOCUMENTS = [*PAGES, ROOT / "README.md"]

_GENERATED = re.compile(r"(<!-- generated: (\S+) ?(\S*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_RUN = re.compile(r"(<!-- run: (\S+)(?: needs ([^\n]+))? -->\n```console\n)(.*?)(```\n)", re.DOTALL)
_HOW = {Action.FIX: "repaired by default", Action.TELL: "never repaired"}
_COLUMN = {Action.FIX: "fix", Action.TELL: "manual"}


UNFILED: dict[str, Finding] = {
    "interrupted-repair": InterruptedRepair(path=PurePosixPath(".ckptfix"), transaction=1),
    "stale-save": StaleSave(
        path=PurePosixPath("model.safetensors"),
        save="checkpoint-90",
        state="weights",
        counter="step in optimizer.pt",
        begin=90,
        end=110,
        rate=5e-5,
        sampled=True,
    ),
    "staging-folder": StagingFolder(
        path=PurePosixPath(".ckptfix/.ckptfix-saving+node7+4711+0123456789abcdef+checkpoint"),
        is_running=False,
        pid=4711,
        host="node7",
        same_machine=True,
    ),
}
"""Examples that no golden folder gives: a killed repair has none, and the age of a staging folder
changes.
"""


def generated(text: str) -> str:
    """Return a page with all that is generated in it as it is today."""
    text = _GENERATED.sub(lambda part: part[1] + WRITERS[part[2]](part[3]) + part[5], text)
    return _RUN.sub(
        lambda part: part[0] if absent(part[3]) else part[1] + _played(part[2], part[4]) + part[5],
        text,
    )


def absent(needs: str | None) -> list[str]:
    """Return the modules and programs of a list that are not installed here."""
    return [
        name
        for name in (needs or "").split()
        if find_spec(name) is None and shutil.which(name) is None
    ]


def not_played(text: str) -> list[str]:
    """Return what the console blocks of a page need that is not installed here, without which they
    are not run.
    """
    return sorted({name for part in _RUN.finditer(text) for name in absent(part[3])})


def _table_of_findings(_: str) -> str:
    rows = (
        f"| `{kind.code}` | {kind.severity.value} | {_action(kind)} | {kind.meaning} |"
        for kind in CODES.values()
    )
    return "\n".join(["| code | severity | action | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _action(kind: type[Finding]) -> str:
    return f"ask: `{kind.option}`" if kind.action is Action.ASK else _COLUMN[kind.action]


def _what(code: str) -> str:
    kind = CODES[code]
    how = f"repaired with `{kind.option}`" if kind.action is Action.ASK else _HOW[kind.action]
    return f"{_sentence(kind.meaning)}\n({kind.severity.value}; {how})\n"


def _example(code: str) -> str:
    findings: list[Finding]
    if code in UNFILED:
        findings = [UNFILED[code]]
    else:
        folder = GOLDEN / code
        case = folder if folder.is_dir() else min(GOLDEN.glob(f"{code}-*"))
        report = check(case / "checkpoint", data=True)
        findings = [finding for finding in report.findings if finding.code == code]
    return _block(
        "text", "\n".join(str(line) for line in finding_lines(findings[:1], "checkpoint"))
    )


_LOST: dict[str, dict[str, list[Any]]] = {
    "nonfinite": {"fc.weight": [1.0] * 9 + [math.nan]},
    "large-values": {"fc.weight": [[0.0, 1e30], [-3e27, 0.0]]},
    "zero-pages": {"fc.weight": [1.0] * 5000},
    "all-zero": {f"layers.{number}.fc.weight": [float(number != 2)] * 8 for number in range(4)},
    "empty-tensor": {"q_proj.lora_A.weight": []},
    "untrained-lora": {"q_proj.lora_A.weight": [1.0] * 8, "q_proj.lora_B.weight": [0.0] * 8},
}
"""Code of ``verify --data`` -> the tensors of a model that has it; of zero pages they lose one."""


def _example_of_values(code: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save_file(
            {name: torch.tensor(values) for name, values in _LOST[code].items()},
            file,
            {"format": "pt"},
        )
        if code == "untrained-lora":
            Path(folder, "trainer_state.json").write_text('{"global_step": 400}')
        if code == "zero-pages":
            data = file.read_bytes()
            file.write_bytes(data[:8192] + bytes(4096) + data[12288:])
        report = verify(folder, data=True)
        return _block("text", "\n".join(text for text in map(str, report.lines()) if code in text))


def _table_of_topics(_: str) -> str:
    rows = (topic.row for topic in TOPICS.values())
    return "\n".join(["| topic | severity | meaning |", "|---|---|---|", *rows]) + "\n"


def _topic(code: str) -> str:
    topic = TOPICS[code]
    return (
        f"{_sentence(topic.meaning)}\n({' or '.join(level.value for level in topic.severities)})\n"
    )


def _advice(code: str) -> str:
    severity = TOPICS[code].severities[0]
    facts = next(case.facts for case in CASES if case.code == code and case.severity is severity)
    advice = next(one for one in diagnose_environment(facts).advice if one.code == code)
    return _block("text", "\n".join(str(line) for line in advice.lines()))


def _causes(_: str) -> str:
    rows = (
        f"| `{one.code}` | {one.words} | {one.change} | {'yes' if one.is_restored else ''} |"
        for one in CAUSES
    )
    return (
        "\n".join(
            ["| code | cause | change | restored by `ckptfix run` |", "|---|---|---|---|", *rows]
        )
        + "\n"
    )


def _verbs(_: str) -> str:
    rows = [
        f"| `ckptfix {verb}` | {_short(verb)} |" for verb in cli.list_commands(click.Context(cli))
    ]
    return "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"


def _short(verb: str) -> str:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return command.get_short_help_str(200)


WRITERS: dict[str, Callable[[str], str]] = {
    "findings": _table_of_findings,
    "finding": _what,
    "example": _example,
    "value": _example_of_values,
    "topics": _table_of_topics,
    "topic": _topic,
    "advice": _advice,
    "verbs": _verbs,
    "causes": _causes,
}


def _sentence(text: str) -> str:
    text = text.strip()
    begun = text if text.startswith("`") else text[:1].upper() + text[1:]
    return begun if begun.endswith(".") else begun + "."


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```\n"


def _played(fixture: str, script: str) -> str:
    """Run the commands of a console block and return the block as it is today."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(GOLDEN / fixture / "checkpoint", Path(folder) / "checkpoint", symlinks=True)
        parts = []
        for command, written in split_commands(script):
            said = _said(command, Path(folder))
            parts.append(f"$ {command}\n{written if matches(written, said) else said}")
        return "".join(parts)


def split_commands(script: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, and the output that is written below it."""
    for part in re.split(r"^\$ ", script, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(written: str, said: str) -> bool:
    """Return whether a command printed what is written, where ``...`` stands for any text."""
    if "..." not in written:
        return written == said
    pattern = re.escape(written).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, said, re.DOTALL) is not None


def _said(command: str, folder: Path) -> str:
    words = shlex.split(command, comments=True)
    if words[0] == "model_signing":  # its script may be in no folder of PATH
        command = f"{shlex.quote(sys.executable)} -m {command}"
    if words[0] != "ckptfix":
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout
    output = StringIO()
    with _inside(folder), redirect_stdout(output), redirect_stderr(output):
        run(words[1:])
    return output.getvalue()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    """Write every generated part of the manual and the README again."""
    for document in DOCUMENTS:
        text = document.read_text()
        new = generated(text)
        if new != text:
            document.write_text(new)


if __name__ == "__main__":
    main()

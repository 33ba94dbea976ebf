"""Every next step that a message names works: it is no wrong usage, no circle, and no dead end."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commanding import Said, said

__all__ = ["said"]

GOLDEN = sorted(Path("fixtures/golden").resolve().iterdir())
COMMAND = re.compile(r"\bckptfix (?!run\b)[a-z-]+ [^;,)\n]*[^;,)\n ]")
NEXT = re.compile(r"\b(?:next|or)\b[^:\n]*: (?=ckptfix)")
PLACEHOLDER = re.compile(r"\b(?:NEW_FOLDER|COPY)\b")
HELP = re.compile(r"^ {8}\S|\bnext\b|\bto undo: ", re.MULTILINE)
"""Advice below a finding, a next step in words or as a command, or the way back."""

STARTS = (
    "check CK", "check CK --data", "repair CK", "undo CK", "seal CK", "verify CK",
    "verify CK --data", "salvage CK NEW", "migrate CK NEW --to safetensors", "diff CK OTHER",
)  # fmt: skip
FEW = (
    "truncated-file",
    "truncated-file-zip",
    "missing-shard",
    "not-a-tensor-file-lfs",
    "doubled-model",
)
STARTS_OF_FEW = (
    "verify CK --device-map auto", "diff CK EMPTY", "check EMPTY",
    "verify EMPTY", "check -r RUN", "check RUN", "repair RUN", "undo RUN", "seal RUN", "verify RUN",
    "salvage RUN NEW",
)  # fmt: skip
PLACES = {"CK": "run/checkpoint", "RUN": "run", "OTHER": "other", "EMPTY": "empty", "NEW": "new"}


class Step(NamedTuple):
    """A command of a chain of next steps, and what it said."""

    command: str
    status: int
    text: str


def steps_after(text: str) -> list[str]:
    """Return the commands that a message names as the next step. Others, such as a command to undo,
    are no step.
    """
    return [
        command[0] for place in NEXT.finditer(text) if (command := COMMAND.match(text, place.end()))
    ]


def chains(said: Said, home: Path, start: str, depth: int = 3) -> Iterator[list[Step]]:
    """Run a command and every next step after it, each in the state that the one before left; yield
    each chain.
    """

    def follow(command: str, before: list[Step]) -> Iterator[list[Step]]:
        status, out, err = said(*shlex.split(PLACEHOLDER.sub(f"{home}/new", command))[1:])
        chain = [*before, Step(command, status, out + err)]
        # What the step before said alike is a circle, however often it is walked.
        is_again = any(step.text == chain[-1].text for step in before)
        steps = steps_after(out + err) if len(chain) < depth and not is_again else []
        if not steps:
            yield chain
        for step in steps:
            state = home.with_name(f"{home.name}{len(chain)}")
            shutil.copytree(home, state, symlinks=True)
            yield from follow(step, chain)
            shutil.rmtree(home)
            state.rename(home)

    words = (f"{home}/{PLACES[word]}" if word in PLACES else word for word in start.split())
    yield from follow(f"ckptfix {' '.join(words)}", [])


def problems(chain: list[Step]) -> Iterator[str]:
    first, last = chain[0], chain[-1]
    if len(chain) > 1 and last.status == 2:
        yield "wrong usage"
    if last.status and any(step.text == last.text for step in chain[:-1]):
        yield "the same message again"
    # That two checkpoints differ is what `diff` was asked for.
    if (
        last.status in (1, 3)
        and not last.command.startswith("ckptfix diff")
        and not HELP.search(last.text)
    ):
        yield "no next step"
    if first.status == 2 and "next" not in first.text and "to check them" not in first.text:
        assert first.command.startswith(
            ("ckptfix undo", "ckptfix check empty", "ckptfix verify empty")
        ), first


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_every_next_step_leads_on(tmp_path: Path, golden: Path, said: Said) -> None:
    starts = [*STARTS, *(STARTS_OF_FEW if golden.name in FEW else ())]
    dead: list[str] = []
    for number, start in enumerate(starts):
        home = tmp_path / f"home-{number}"
        for place in ("run/checkpoint", "other"):
            shutil.copytree(golden / "checkpoint", home / place, symlinks=True)
        (home / "empty").mkdir()
        for chain in chains(said, home, start):
            commands = " -> ".join(step.command.replace(f"{home}/", "") for step in chain)
            dead += (f"{problem}: {commands}\n{chain[-1].text}" for problem in problems(chain))
    assert not dead, "\n".join(dead)

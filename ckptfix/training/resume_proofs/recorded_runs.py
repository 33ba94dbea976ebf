"""Rows that a recorder writes, one JSON object a line, and the runs that are read from them.

A run of several processes has one file for each rank. The rows are in the order in which things
happened: the passes through a dataloader, the entries (states when the first loss of the process
arrives), optimizer steps, saves, loads.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ckptfix.errors import OperationError

SETTINGS = "CKPTFIX_PROVING"
"""Environment variable with the settings of a recorder."""

UNPREPARED = "unprepared models"
"""The state of models that no ``prepare`` got and no optimizer steps: a target net, an average."""

STATES = (
    *("batch", "learning rate", "scheduler", "generators", UNPREPARED, "loss", "gradients"),
    *("scaler", "weights", "buffers", "moments", "counters", "custom objects"),
)
"""Everything that is compared, in the order in which one follows from another within a step."""

Named = Mapping[str, str]
"""Name -> digest of a tensor's bytes, or a number as text."""


@dataclass(frozen=True)
class Settings:
    """Settings of the recorder of one run.

    ``folder``: where the rows go. ``base``: optimizer steps before the checkpoint that is resumed.
    ``kill_at``: stop at the first batch after the first save at this step or later; None to save
    without an end. ``entry_at``: the step after which every loss is an entry. ``last_step``: stop
    after it. ``parent``: process that starts and ends the run.
    """

    folder: str
    parent: int
    base: int = 0
    kill_at: int | None = None
    entry_at: int | None = None
    last_step: int | None = None
    guard: bool = False
    whole_bytes: int = 256 << 20

    def as_variable(self) -> str:
        """Return the settings as the value of the environment variable."""
        # Not msgspec's own JSON, which refuses names of files that are not UTF-8.
        return json.dumps(asdict(self))

    @classmethod
    def from_variable(cls, text: str) -> "Settings":
        """Return the settings that the environment variable holds."""
        return msgspec.convert(json.loads(text), cls)


@dataclass(frozen=True)
class Batch:
    """A batch as the script got it.

    ``leaves``: path of each tensor or value in it -> digest. ``samples``: digests of its first
    samples, each over all tensors. ``passing``: number of the pass through the dataloader.
    """

    leaves: Named
    samples: tuple[str, ...] = ()
    passing: int = 0

    @property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """Return what two equal batches have in common."""
        return tuple(sorted(self.leaves.items()))


@dataclass(frozen=True)
class Loss:
    """A loss that was given to ``backward``, and the global generators at that moment."""

    value: str
    generators: Named


@dataclass(frozen=True)
class Step:
    """One step of one optimizer, with all that led to it.

    ``number``: steps of the run so far. ``states``: state -> names -> digests, for the states other
    than the batch, the loss and the generators.
    """

    number: int
    optimizer: int = 0
    batches: tuple[Batch, ...] = ()
    losses: tuple[Loss, ...] = ()
    states: Mapping[str, Named] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """States of a process when a loss arrives, before its ``backward``.

    ``rows``: steps before it; ``losses``: those before it in the same step.
    """

    number: int
    states: Mapping[str, Named]
    rows: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Save:
    """A save. ``rows``: steps before it; ``batches``, ``losses``: those of the step that it
    interrupts.

    ``facts``: what explains a difference, such as objects that the save leaves out.
    """

    number: int
    folder: str = ""
    rows: int = 0
    batches: int = 0
    losses: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One pass of the training loop through a dataloader. ``facts``: its kind, sampler and
    settings.
    """

    number: int
    passing: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """A checkpoint that was loaded by accelerate or transformers."""

    number: int
    folder: str = ""


@dataclass(frozen=True)
class RankRun:
    """Everything that one process of a run recorded. ``end``: why the recording ended, "" if it was
    cut off.
    """

    rank: int = 0
    world: int = 1
    pid: int = 0
    versions: Named = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    entries: tuple[Entry, ...] = ()
    saves: tuple[Save, ...] = ()
    passes: tuple[Pass, ...] = ()
    loads: tuple[Load, ...] = ()
    notes: tuple[str, ...] = ()
    end: str = ""

    def facts_of(self, batch: Batch) -> Mapping[str, Any]:
        """Return the facts of the dataloader that a batch came from."""
        return next((one.facts for one in self.passes if one.passing == batch.passing), {})


RankRuns = Sequence[RankRun]
"""The processes of one run, by rank."""


def read_run(folder: Path) -> list[RankRun]:
    """Return the processes of a run by rank; raises OperationError if two of them trained as the
    same rank.
    """
    runs = [rank_run(_rows(path)) for path in sorted(folder.glob("rank-*.jsonl"))]
    runs = sorted(
        (one for one in runs if one.steps or one.saves or one.entries), key=lambda one: one.rank
    )
    if len({one.rank for one in runs}) < len(runs):
        raise OperationError(
            f"{folder}: two processes trained as the same rank; pass a command that trains "
            "only once, without restarts"
        )
    return runs


def _rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]  # a line without its end was cut by the kill
    return [json.loads(one) for one in lines]


def rank_run(rows: Iterable[Mapping[str, Any]]) -> RankRun:
    """Return what rows say about one process."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    about: dict[str, Any] = {}
    for row in rows:
        if row["row"] in ("run", "end"):
            about |= row
        else:
            kinds[row["row"]].append(row)
    names = {
        "steps": "step",
        "entries": "entry",
        "saves": "save",
        "passes": "pass",
        "loads": "load",
    }
    values = {name: kinds[kind] for name, kind in names.items()}
    notes = list(dict.fromkeys(row["words"] for row in kinds["note"]))
    return msgspec.convert({**about, **values, "notes": notes}, RankRun)


def settings_of_process() -> Settings | None:
    """Return the settings that the environment of this process asks for, None if it is not to be
    recorded.
    """
    text = os.environ.get(SETTINGS)
    return Settings.from_variable(text) if text else None

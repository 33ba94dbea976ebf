"""Prove each pair of strategies of ``migrate --state all`` by stock loaders.

    python -m tests.conversion.state_matrix [--case C] [--from A] [--to B] [--processes M] [--saved-by N] [--verbose]

Stock accelerate trains and saves with every strategy (A) on N processes; ``ckptfix.migrate`` writes
the checkpoint for every strategy (B) and M processes; stock accelerate loads it there, and
``state_training`` says what it finds. Each option may be repeated; without any the whole table is
proven, 3,000 cells in one to two hours on two cores.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import ckptfix
from ckptfix.errors import CkptfixError
from tests.conversion.state_training import (
    ALTERATIONS,
    CASES,
    ENDED,
    FACTORIES,
    FSDP1,
    LOADERS,
    SOURCES,
)
from tests.deepspeed_library import has_deepspeed, variables

ROOT = Path(__file__).parents[2]
PROCESSES = (1, 2, 4)
NEAR = 1e-5
"""Relative difference of losses that sums in another order explain."""

UNIVERSAL_FROM = "zero2"
PATIENCE = 150
"""Seconds for one job: twice what the processes of a group wait for each other."""


class Cell(NamedTuple):
    """A strategy's checkpoint for another strategy and number of processes."""

    case: str
    source: str
    target: str
    saved_by: int
    processes: int

    @property
    def is_native(self) -> bool:
        """The stock control: nothing is converted."""
        return self.source == self.target and self.saved_by == self.processes

    def __str__(self) -> str:
        return f"{self.case}: {self.source} of {self.saved_by} -> {self.target} of {self.processes}"


@dataclass
class Proof:
    """What the stock loaders made of a cell."""

    cell: Cell
    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    control: float = 0.0
    source: float = 0.0
    altered: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_proven(self) -> bool:
        return not self.wrong and not self.refused

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        if self.wrong:
            return "FAILED: " + "; ".join(self.wrong)
        control = "bitwise" if not self.control else f"{self.control:.1e}"
        source = "bitwise" if not self.source else f"{self.source:.1e}"
        found = ", ".join(f"{how} {off:.0e}" for how, off in self.altered.items())
        return f"memory bitwise; losses {control}; source trained on {source}; noticed: {found}"

    @property
    def short(self) -> str:
        if self.refused:
            return "refused"
        if self.wrong:
            return "FAILED"
        control, source = (f"{one:.0e}" if one else "=" for one in (self.control, self.source))
        return f"{control} ({source})"


def can_hold(case: str, strategy: str, processes: int = 2) -> bool:
    """DeepSpeed's engine takes one model, and a universal checkpoint no numbers of NAdam and ASGD.

    FSDP1's flat parameters are all trained and of one param group: a case of its own, with one
    strategy of each kind. In one process FSDP1 of torch 2.13.0 fails at the first step of a model
    with frozen ties.
    """
    if case.startswith("plain"):
        return strategy in (*FSDP1, "ddp", "zero2")
    if case.startswith("lora") and processes == 1 and strategy in FSDP1:
        return False
    if "-flat" in strategy:
        return False
    if case.startswith(("nadam", "asgd")):
        return strategy != "universal"
    return not case.startswith("two") or not is_deepspeed(strategy)


def can_load(case: str, strategy: str, processes: int = 2) -> bool:
    """As ``can_hold``; of FSDP2 stock accelerate 1.15.0 restores no scale of fp16: its loader
    counts a step (#4289).
    """
    is_fsdp2 = strategy in ("fsdp", "fsdp-full")
    return can_hold(case, strategy, processes) and not (case.endswith("fp16") and is_fsdp2)


def is_deepspeed(strategy: str) -> bool:
    return strategy.startswith("zero") or strategy == "universal"


def cells_of(
    cases: Sequence[str],
    sources: Sequence[str],
    targets: Sequence[str],
    saved_by: Sequence[int],
    processes: Sequence[int],
) -> list[Cell]:
    every = (Cell(*cell) for cell in product(cases, sources, targets, saved_by, processes))
    return [
        cell for cell in every
        if can_hold(cell.case, cell.source, cell.saved_by) and can_load(cell.case, cell.target, cell.processes)
    ]  # fmt: skip


# The rank processes.


class Ranks:
    """Groups of ranks, forked one after another by a process that has imported what they need."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="state-jobs-")
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.kill()  # it waits for a line; at a usual exit its libraries take seconds
            self._server.communicate()
        self._folder.cleanup()

    def run(self, processes: int, jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the result of each job. Ranks that end in the midst of one are started again for
        those that follow.
        """
        while jobs:
            done = 0
            said = Path(self._folder.name, "stderr")
            before = said.stat().st_size if said.exists() else 0
            for line in self._lines(processes, jobs):
                yield json.loads(line)
                done += 1
            if done < len(jobs):
                words = [line for line in said.read_text()[before:].splitlines() if "rror" in line][
                    -3:
                ]
                yield {
                    "job": jobs[done],
                    "error": f"the ranks ended: {' / '.join(words)}",
                    "seconds": 0.0,
                }
                done += 1
            jobs = jobs[done:]

    def _lines(self, processes: int, jobs: list[dict[str, Any]]) -> Iterator[str]:
        """Yield the lines of the results as they are written, until the ranks end, or are silent
        for too long.
        """
        folder = Path(self._folder.name)
        listed, results = folder / "jobs", folder / "results"
        ended = results.with_suffix(ENDED)
        listed.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        results.write_text("")
        ended.unlink(missing_ok=True)
        server = self._started(folder)
        assert server.stdin is not None
        print(processes, listed, results, file=server.stdin, flush=True)
        last = time.monotonic()
        with results.open() as file:
            while True:
                is_over = ended.exists() or server.poll() is not None
                rest = file.read()
                while rest and not rest.endswith("\n"):
                    rest += file.read()
                yield from rest.splitlines()
                if is_over:
                    return
                if rest:
                    last = time.monotonic()
                elif time.monotonic() - last > PATIENCE:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()
                time.sleep(0.05)

    def _started(self, folder: Path) -> "subprocess.Popen[str]":
        if self._server is None or self._server.poll() is not None:
            with (folder / "stderr").open("a") as stderr:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "tests.conversion.state_training"],
                    stdin=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL, stderr=stderr,
                    cwd=ROOT, env=variables(), start_new_session=True,
                )  # fmt: skip
        return self._server


def sources_folder(folder: Path, case: str, saved_by: int) -> Path:
    return folder / "sources" / f"{case}-{saved_by}"


def make_sources(ranks: Ranks, folder: Path, cells: Iterable[Cell]) -> list[str]:
    """Make the sources of all cells that are not there yet; return what failed."""
    wanted: dict[int, dict[tuple[str, str], None]] = {}
    for cell in cells:
        names = [UNIVERSAL_FROM, cell.source] if cell.source == "universal" else [cell.source]
        for name in names:
            where = sources_folder(folder, cell.case, cell.saved_by)
            if not (where / f"{name}.expected").exists():
                where.mkdir(parents=True, exist_ok=True)
                wanted.setdefault(cell.saved_by, {})[cell.case, name] = None
    failed = []
    for saved_by, made in wanted.items():
        jobs = [
            (
                {"do": "universal", "origin": UNIVERSAL_FROM}
                if name == "universal"
                else {"do": "make"} | {"strategy": name, "case": case}
            )
            for case, name in made
        ]
        for job, (case, _) in zip(jobs, made, strict=True):
            job["folder"] = str(sources_folder(folder, case, saved_by))
        failed += [
            f"{one['job']}: {one['error']}" for one in ranks.run(saved_by, jobs) if "error" in one
        ]
    return failed


# The cells.


def migrated(folder: Path, cell: Cell) -> dict[str, str]:
    """Return the folders for stock to load: the cell's, under "", and those of the altered
    sources.
    """
    found = {}
    where = sources_folder(folder, cell.case, cell.saved_by)
    for how in ("", *ALTERATIONS):
        source = where / (f"{cell.source}-{how}" if how else cell.source)
        if cell.is_native:
            found[how] = str(source)
            continue
        target = (
            folder
            / "migrated"
            / f"{cell.case}-{cell.saved_by}-{cell.processes}"
            / f"{source.name}-to-{cell.target}"
        )
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        migrate(source, target, cell)
        found[how] = str(target)
    return found


def migrate(source: Path, target: Path, cell: Cell) -> None:
    options: dict[str, Any] = {
        "to": cell.target.replace("fsdp1-flat", "fsdp").replace("fsdp1", "fsdp"),
        "state": "all",
        "processes": cell.processes,
        "model": FACTORIES[cell.case.split("-")[0]],  # as a function: no process is started for it
    }
    precision = cell.case.rpartition("-")[2]
    if precision != "fp32" and is_deepspeed(cell.target):
        options["dtype"] = precision
    ckptfix.migrate(source, target, **options)


def prove(ranks: Ranks, folder: Path, cells: Sequence[Cell]) -> Iterator[Proof]:
    """Prove cells, those of one number of processes together."""
    yield from (
        Proof(Cell("", "", "", 0, 0), [line]) for line in make_sources(ranks, folder, cells)
    )
    for processes in sorted({cell.processes for cell in cells}):
        jobs, waiting = [], []
        for cell in (cell for cell in cells if cell.processes == processes):
            try:
                folders = migrated(folder, cell)
            except CkptfixError as error:
                yield Proof(cell, refused=str(error))
                continue
            except Exception as error:
                yield Proof(cell, [f"migrate: {type(error).__name__}: {error}"])
                continue
            expected = sources_folder(folder, cell.case, cell.saved_by) / f"{cell.source}.expected"
            waiting.append(cell)
            jobs.append({
                "do": "prove", "strategy": cell.target, "case": cell.case,
                "expected": str(expected), "checkpoint": folders.pop(""), "altered": folders,
            })  # fmt: skip
        for cell, result in zip(waiting, ranks.run(processes, jobs), strict=True):
            yield judged(cell, result)


def judged(cell: Cell, result: dict[str, Any]) -> Proof:
    """Return the proof that the numbers of a job are, or what is wrong with them."""
    proof = Proof(cell, seconds=result["seconds"])
    if "error" in result:
        proof.wrong.append(result["error"].replace("\n", " ")[:300])
        return proof
    for what, lines in (("memory", result["differs"]), ("control", result["planted"])):
        if lines:
            proof.wrong.append(f"{what}: {len(lines)} differ, first {lines[0]}")
    proof.control = off(result["losses"], result["control"])
    proof.source = off(result["losses"], result["source"])
    if result["trained"] and not proof.control:
        proof.wrong.append(
            f"after the steps {len(result['trained'])} differ, first {result['trained'][0]}"
        )
    if proof.control > NEAR:
        proof.wrong.append(
            f"losses differ from the control by {proof.control:.1e}: {result['losses']} "
            f"{result['control']}"
        )
    if proof.source > NEAR and cell.case.endswith("fp32"):
        proof.wrong.append(f"losses differ from the source that trained on by {proof.source:.1e}")
    for how, found in result["altered"].items():
        proof.altered[how] = off(found["losses"], result["control"])
        if not found["differs"]:
            proof.wrong.append(f"{how}: the memory is that of the intact source")
        is_seen = proof.altered[how] > 10 * proof.control if proof.control else found["trained"]
        if not is_seen:
            proof.wrong.append(f"{how}: the run trains on as the intact source does")
    return proof


def off(losses: list[list[float]], others: list[list[float]]) -> float:
    """Return the largest relative difference."""
    pairs = [
        pair
        for one, other in zip(losses, others, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


# The command.


def table(proofs: Sequence[Proof]) -> str:
    """Return the matrices, one for each case and pair of process counts."""
    lines = []
    for case, saved_by, processes in dict.fromkeys(
        (p.cell.case, p.cell.saved_by, p.cell.processes) for p in proofs
    ):
        shown = {(p.cell.source, p.cell.target): p for p in proofs
                 if (p.cell.case, p.cell.saved_by, p.cell.processes) == (case, saved_by, processes)}  # fmt: skip
        lines += ["", f"{case}, saved by {saved_by}, loaded by {processes}"]
        lines.append("".join(f"{word:>14}" for word in ("from \\ to", *LOADERS)))
        for source in SOURCES:
            row = [
                shown[source, target].short if (source, target) in shown else "-"
                for target in LOADERS
            ]
            if set(row) != {"-"}:
                lines.append("".join(f"{word:>14}" for word in (source, *row)))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--from", dest="sources", action="append", choices=SOURCES)
    parser.add_argument("--to", dest="targets", action="append", choices=LOADERS)
    parser.add_argument("--processes", action="append", type=int, choices=PROCESSES)
    parser.add_argument("--saved-by", action="append", type=int, choices=PROCESSES)
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the sources and results there; sources there are used again",
    )
    parser.add_argument("--sources-only", action="store_true", help="make the sources, and stop")
    parser.add_argument(
        "--native", action="store_true", help="only what stock alone does: nothing is converted"
    )
    parser.add_argument("--verbose", action="store_true", help="print each cell as it is proven")
    chosen = parser.parse_args()
    if not has_deepspeed():
        print("DeepSpeed is not installed: its strategies are left out", file=sys.stderr)
    known = [one for one in SOURCES if has_deepspeed() or not is_deepspeed(one)]
    cells = cells_of(
        chosen.case or CASES, [one for one in chosen.sources or known if one in known],
        [one for one in chosen.targets or LOADERS if one in known],
        chosen.saved_by or (2,), chosen.processes or PROCESSES,
    )  # fmt: skip
    if chosen.native:
        cells = [cell for cell in cells if cell.is_native]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="state-matrix-") as temporary, Ranks() as ranks:
        folder = chosen.folder or Path(temporary)
        if chosen.sources_only:
            failed = make_sources(ranks, folder, cells)
            print("\n".join(failed))
            return 1 if failed else 0
        proofs = []
        for proof in prove(ranks, folder, cells):
            proofs.append(proof)
            if chosen.verbose or proof.wrong:
                print(f"{proof.cell}: {proof}", flush=True)
    print(table(proofs))
    counts = {"proven": sum(p.is_proven for p in proofs), "refused": sum(bool(p.refused) for p in proofs),
              "FAILED": sum(bool(p.wrong) for p in proofs)}  # fmt: skip
    print(
        f"\n{', '.join(f'{count} {word}' for word, count in counts.items())} in "
        f"{time.perf_counter() - begin:.0f} s"
    )
    return 0 if counts["proven"] == len(proofs) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A differential fuzzer: changed saves that stock readers refuse, and ``check`` does not tell of.

    python -m tests.fuzz --seconds 600 --seed 1
    python -m tests.fuzz --seed 1 --only 4711 --folder /tmp/mutant

It changes real small saves near their metadata, and fails where a reader refuses one without an
error or a warning of ``check``, where ``check`` raises, takes more than 2 s or 200 MB, or imports
torch. Mutant N of a seed is always the same. ``--only`` writes one mutant to a folder and says what
both make of it.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.errors import CkptfixError
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed
from tests.fuzz.mutations import format_of, mutant
from tests.fuzz.seeds import Seed, read_seeds

SECONDS = 2.0
MEMORY = 200 << 20
PATIENCE = 30.0
"""Seconds of CPU time that a reader may take for one mutant, before it counts as refused.

By the wall clock, a busy machine refused 2 of 797,082 mutants that load.
"""

_STUCK = 1200.0
"""Seconds without an answer after which the run fails: the judge waits for something, and that is
no verdict.
"""

SAMPLE = 0.05
"""Share of the mutants with a finding that the judge loads, too: some of them load the same as the
seed.
"""

_FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(slots=True)
class Tally:
    """The numbers of one format."""

    mutants: int = 0
    told: int = 0
    passed: int = 0
    unchecked: int = 0
    sampled: int = 0
    harmless: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the numbers of another run."""
        for name in ("mutants", "told", "passed", "unchecked", "sampled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.harmless += other.harmless
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)
        self.failures += other.failures


class Court:
    """The process of the judge, started anew when a file kills or stops it. ``patience``: in
    seconds of CPU time.
    """

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "tests.fuzz.judge"),
        patience: float = PATIENCE,
    ) -> None:
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> tuple[str, str]:
        """Return the verdict, and why a file was refused."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "DS_ACCELERATOR": "cpu",
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "{}\n":
                raise RuntimeError("the judge did not start")
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        end, stop = _cpu_seconds(process.pid) + self._patience, time.monotonic() + _STUCK
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        is_answered = False
        # A process that ended can be read, too: its pipe is at the end.
        while not is_answered and _cpu_seconds(process.pid) < end:
            if time.monotonic() > stop:
                raise RuntimeError(f"the judge gives no answer, and does not work: {request}")
            is_answered = bool(select.select([process.stdout], [], [], 1)[0])
        answer = process.stdout.readline() if is_answered else ""
        if not answer:
            self.close()
            return (
                "refused",
                (
                    "the reader crashed"
                    if is_answered
                    else f"the reader took more than {self._patience:g} s of CPU time"
                ),
            )
        reply = json.loads(answer)
        if reply["verdict"] == "broken":
            raise RuntimeError(f"the seed cannot be read: {request}: {reply['why']}")
        return reply["verdict"], reply["why"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process: Linux makes the number of its clock from
    that of the process.
    """
    return time.clock_gettime((~pid << 3) | 2)


class Bench:
    """The seeds in a folder of their own, where one mutant after the other is put."""

    def __init__(
        self,
        seeds: Sequence[Seed],
        originals: Path,
        folder: Path,
        seed: int,
        sample: float = SAMPLE,
    ) -> None:
        self.seeds, self.originals, self.folder, self.seed, self.sample = (
            seeds,
            originals,
            folder,
            seed,
            sample,
        )
        self.court = Court()
        for one in seeds:
            self._write(one, one.files)
            report = check(self._root(one))
            if report.status:
                raise RuntimeError(f"the seed {one.format}/{one.name} has findings: {report}")

    def try_mutant(self, number: int, tally: Tally) -> str:
        """Check one mutant, ask the judge where that is needed, and return what both say."""
        mutated = mutant(self.seeds, self.seed, number)
        source = self.seeds[mutated.seed]
        tally.mutants += 1
        if not mutated.files:
            tally.passed += 1
            return "equal to the seed"
        self._write(source, mutated.files)
        try:
            return self._compare(source, list(mutated.files), number, tally)
        finally:
            self._write(source, {name: source.files[name] for name in mutated.files})

    def _compare(self, source: Seed, names: list[str], number: int, tally: Tally) -> str:
        begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        told = failure = unchecked = ""
        try:
            report = check(self._root(source))
            told, unchecked = _told(report), " ".join(filter(_is_of_others, report.not_checked))
        except CkptfixError as error:
            told = f"{type(error).__name__}: {error}"
        except Exception:
            failure = f"exception: {traceback.format_exc(limit=-3)}"
        seconds, peak = (
            time.thread_time() - begin,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        tally.slowest, tally.memory = max(tally.slowest, seconds), max(tally.memory, peak << 10)
        tally.told += bool(told)
        if seconds > SECONDS:
            failure = failure or f"slow: {seconds:.1f} s"
        if (peak - before) << 10 > MEMORY:
            failure = failure or f"memory: {(peak - before) >> 10} MB"
            Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is counted anew
        if "torch" in sys.modules:
            failure = failure or "check imported torch"
        verdict = ""
        if not told or Random(number).random() < self.sample:
            request = {
                "kind": source.format,
                "folder": str(self._root(source)),
                "seed": str(self.originals / source.format / source.name),
                "files": names,
            }
            verdict, why = self.court.ask(**request)
            if not told and verdict == "refused" and repr(why.partition(":")[0]) not in unchecked:
                # A pickle can change the process that reads it: after 129,000 mutants a judge
                # refused one that every new judge loads.
                self.court.close()
                verdict, why = self.court.ask(**request)
            if not told and verdict == "refused" and repr(why.partition(":")[0]) in unchecked:
                tally.unchecked += 1
            elif not told and verdict == "refused":
                failure = failure or f"wrong ok: {why}"
            tally.passed += not told and verdict != "refused"
            tally.sampled += bool(told)
            if told and verdict == "same":
                tally.harmless[told] += 1
        if failure:
            tally.failures.append((number, failure))
        return failure or f"{told or 'no finding'}; readers: {verdict or 'not asked'}"

    def _root(self, source: Seed) -> Path:
        return self.folder / source.format / source.name

    def _write(self, source: Seed, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            path = self._root(source) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _is_of_others(words: str) -> bool:
    """Return whether a line about what was not checked names files that ``check`` does not read at
    all.
    """
    return words.startswith("other files next to it: ")


def _told(report: CheckReport) -> str:
    """Return the first finding that makes ``check`` fail, as one of its kind: without names and
    numbers.
    """
    findings = [one for one in report.all_findings if one.severity.value != "note"]
    if not findings:
        return ""
    sentence = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", str(findings[0]))
    return re.sub(r"[0-9]+", "N", f"{findings[0].code}: {sentence}")[:150]


def make_seeds(folder: Path) -> list[Seed]:
    """Write the seeds to a folder, by another process as that imports torch, and read them."""
    subprocess.run(
        [sys.executable, "-m", "tests.fuzz.seeds", str(folder)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return read_seeds(folder)


def _work(
    seeds: list[Seed],
    originals: Path,
    folder: Path,
    options: argparse.Namespace,
    place: int,
    queue: "Queue[Any]",
) -> None:
    end = time.monotonic() + options.seconds
    last = sys.maxsize if options.mutants is None else options.first + options.mutants
    number = options.first + place
    formats = sorted({one.format for one in seeds})
    skipped = () if has_deepspeed() else ("DeepSpeed",)
    try:
        bench = Bench(seeds, originals, folder / f"worker-{place}", options.seed)
        while time.monotonic() < end and number < last:
            tallies = {kind: Tally() for kind in formats}
            pause = min(end, time.monotonic() + 1)
            while time.monotonic() < pause and number < last:
                kind = format_of(formats, number)
                if options.format in (None, kind) and kind not in skipped:
                    bench.try_mutant(number, tallies[kind])
                number += options.processes
            queue.put(tallies)
        bench.court.close()
    finally:
        queue.put(None)


def run(options: argparse.Namespace) -> dict[str, Tally]:
    """Try mutants in several processes, print failures as they come, and return the numbers of each
    format.
    """
    total: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="ckptfix-fuzz-", dir=_FOLDERS) as name:
        originals = Path(name) / "seeds"
        seeds = make_seeds(originals)
        queue: Queue[Any] = multiprocessing.Queue()
        workers = [
            multiprocessing.Process(
                target=_work,
                args=(seeds, originals, Path(name), options, place, queue),
                daemon=False,
            )
            for place in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        running, printed = len(workers), time.monotonic()
        while running:
            tallies = queue.get()
            if tallies is None:
                running -= 1
                continue
            for kind, tally in tallies.items():
                total.setdefault(kind, Tally()).add(tally)
                for number, failure in tally.failures:
                    print(f"mutant {number} ({kind}): {failure}", flush=True)
            if time.monotonic() - printed > 30:
                printed = time.monotonic()
                counted = sum(one.mutants for one in total.values())
                print(
                    f"{counted} mutants, {sum(len(one.failures) for one in total.values())} "
                    "failures",
                    flush=True,
                )
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a process of the fuzzer failed: see above")
    return total


def print_table(total: dict[str, Tally]) -> None:
    """Print the numbers of each format, and the kinds of findings about files that load the
    same.
    """
    titles = "".join(f"{title:>9}" for title in ("mutants", "told", "passed", "unread", "wrong ok"))
    print(f"{'format':14}{titles}{'other':>7}{'harmless':>16}  slowest   peak")
    everything = Tally()
    for one in total.values():
        everything.add(one)
    for kind, one in [*sorted(total.items()), ("all", everything)]:
        wrong = sum(failure.startswith("wrong ok") for _, failure in one.failures)
        same = one.harmless.total()
        print(
            f"{kind:14}{one.mutants:9}{one.told / max(1, one.mutants):9.1%}"
            f"{one.passed / max(1, one.mutants):9.1%}{one.unchecked / max(1, one.mutants):9.1%}"
            f"{wrong:9}{len(one.failures) - wrong:7}{f'{same} of {one.sampled}':>16}"
            f"{one.slowest:7.2f} s {one.memory >> 20:4} MB"
        )
    if not has_deepspeed():
        print(f"not tried: DeepSpeed: {NO_DEEPSPEED}")
    for kind, one in sorted(total.items()):
        for words, count in one.harmless.most_common(8):
            print(f"loads the same, called damaged: {count:5} {kind}: {words}")


def main() -> int:
    """Read the options, and return 1 where a mutant failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--mutants", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--format", help="try mutants of this format alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--untimed", action="store_true", help="slow mutants are no failures")
    parser.add_argument(
        "--only", type=int, help="write the mutant of this number, and say what is made of it"
    )
    parser.add_argument("--folder", type=Path, help="where --only writes")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory(dir=_FOLDERS) as name:
            seeds = make_seeds(Path(name) / "seeds")
            made = mutant(seeds, options.seed, options.only)
            source = seeds[made.seed]
            bench = Bench(
                seeds, Path(name) / "seeds", Path(name) / "bench", options.seed, sample=1.0
            )
            print(f"{source.format}/{source.name}", *made.changes, sep="\n  ")
            print(bench.try_mutant(options.only, Tally()))
            bench.court.close()
            if options.folder is not None:
                for path, data in (source.files | made.files).items():
                    (options.folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (options.folder / path).write_bytes(data)
        return 0
    begin = time.monotonic()
    total = run(options)
    print_table(total)
    print(
        f"seed {options.seed}: {sum(one.mutants for one in total.values())} mutants in "
        f"{time.monotonic() - begin:.0f} s"
    )
    failures = [failure for one in total.values() for _, failure in one.failures]
    return int(any(not (options.untimed and failure.startswith("slow")) for failure in failures))


if __name__ == "__main__":
    raise SystemExit(main())

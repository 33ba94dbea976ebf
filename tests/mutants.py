"""Ten faults and more that the tests must find: each is put into a copy of the package, and its
tests run there.

    python -m tests.mutants [WORD ...]

Only mutants whose name has one of the words, if there are any. Exit status 1: a mutant was missed,
or the tests fail without one. A mutant is found by its text, so that it follows code that moves; a
text that is gone is an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600.0
FAILED = 1
"""Exit status of pytest where a test failed; any other is a mistake in this table or in the copy.
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: one piece of text in its place of another, and the tests of which one has to
    fail.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    """``test_file.py`` or ``test_file.py::test_name``, wherever below ``tests/`` the file lies."""


MUTANTS = (
    Mutant(
        "journal: a failed repair is not rolled back",
        "                _roll_back(self._root, self._pending, self._progress, keeps_newer=True)\n",
        "                pass\n",
        ("test_journal.py::test_a_failed_verify_rolls_back",),
    ),
    Mutant(
        "journal: an edit is done before it is noted",
        "            add_note(self._pending, note)\n            self._notes.append(note)\n            "
        "try:\n                act(work, index, edit, note)\n",
        "            self._notes.append(note)\n            try:\n                act(work, index, "
        "edit, note)\n                add_note(self._pending, note)\n",
        ("test_crashes.py::test_repair_killed_at_every_call",),
    ),
    Mutant(
        # A move looks twice, so that neither look alone is missed.
        "journal: a file that was saved in the meantime is appended to all the same",
        "                _check_same(fd, work.at(edit.path), note.old)\n                _append(fd, "
        "edit)\n",
        "                _append(fd, edit)\n",
        ("test_applying.py::test_a_save_between_looking_and_writing_is_kept",),
    ),
    Mutant(
        "pairing: models of equal names are duplicates, whatever their bytes",
        "                return _key_at(pairing.kept, files[0], difference.offset_a)\n",
        "                continue\n",
        ("test_entries.py",),
    ),
    Mutant(
        "pairing: a file is dropped after a look at samples",
        "    for quick in (True, False) if full else (True,):\n",
        "    for quick in (True,):\n",
        ("test_entries.py::test_a_byte_between_the_samples_stops_a_repair",),
    ),
    Mutant(
        "key maps: a wrapper that is applied twice is not seen",
        "    return len(set(chain)) < len(chain)\n",
        "    return len(set(chain)) + 1 < len(chain)\n",
        ("test_keys.py",),
    ),
    Mutant(
        "key maps: a wrapper goes wherever its name occurs",
        "        return dotted(self.insert) + fqn[len(prefix) :]",
        '        return dotted(self.insert) + fqn.replace(prefix, "")',
        ("test_keys.py", "test_laws.py"),
    ),
    Mutant(
        "guard: one model twice in a call is prepared twice",
        "if entries[i] is None and twins[i] == i]",
        "if entries[i] is None]",
        ("test_guard.py::test_twice_in_one_call",),
    ),
    Mutant(
        "guard: what a failed prepare registered stays",
        "            getattr(accelerator, name)[:] = things\n",
        "            getattr(accelerator, name)\n",
        ("test_guard.py", "test_guard_anew.py"),
    ),
    Mutant(
        "transfers: a piece leaves its slot before it is in it",
        "        engine.wait(engine.mark(Queue.SOURCE))\n",
        "        engine.mark(Queue.SOURCE)\n",
        ("test_staged_copies_order.py::test_every_schedule_delivers",),
    ),
    Mutant(
        "transfers: a copy of an unproven pair goes directly",
        "        if not self._is_staged(pair):\n",
        "        if self._is_staged(pair):\n",
        ("test_transfers_simulated.py::test_always_stages_every_pair",),
    ),
    Mutant(
        "migrate: a folder is replaced although a file in it changed since",
        "(name not in _REWRITTEN and written.get(name) != state)",
        "(name not in _REWRITTEN and name not in written)",
        (
            "test_destination.py::test_a_folder_with_anything_that_migrate_did_not_write_is_never_replaced",
        ),
    ),
    Mutant(
        "migrate: what the source reads through a link is replaced",
        "        if _is_in(home, place):",
        "        if False:",
        ("test_destination.py::test_what_the_source_reads_there_is_not_replaced",),
    ),
)


def main(words: Sequence[str]) -> int:
    """Run the tests once without a fault and once with each; return the exit status."""
    chosen = [
        mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)
    ]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="ckptfix-mutants-") as folder:
        copy = Path(folder) / "copy"
        _copy_tracked(copy)
        places = {mutant: _place(copy, mutant.old) for mutant in chosen}
        status, seconds = _run(
            copy, dict.fromkeys(test for mutant in chosen for test in mutant.tests)
        )
        if status:
            print(f"the tests fail without a mutant: pytest ended with status {status}")
            return 1
        print(f"ok      {seconds:4.0f} s  without a mutant", flush=True)
        for mutant, place in places.items():
            text = place.read_text()
            place.write_text(text.replace(mutant.old, mutant.new))
            status, seconds = _run(copy, mutant.tests)
            place.write_text(text)
            word = "caught" if status == FAILED else "missed" if status == 0 else f"error {status}"
            print(
                f"{word:7} {seconds:4.0f} s  {mutant.name} ({place.relative_to(copy)})", flush=True
            )
            missed += status != FAILED
    print(f"{len(chosen)} mutants: {len(chosen) - missed} caught, {missed} missed")
    return 1 if missed else 0


def _copy_tracked(copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _place(copy: Path, old: str) -> Path:
    """Return the one file of the package that has this text, once."""
    found = [
        path
        for path in (copy / "ckptfix").rglob("*.py")
        for _ in range(path.read_text().count(old))
    ]
    if len(found) != 1:
        raise SystemExit(f"found {len(found)} times in ckptfix/, expected once:\n{old}")
    return found[0]


def _run(copy: Path, tests: Sequence[str] | dict[str, None]) -> tuple[int, float]:
    named = []
    for test in tests:
        name, colons, case = test.partition("::")
        found = list((copy / "tests").rglob(name))
        if len(found) != 1:
            raise SystemExit(f"{name}: found {len(found)} times in tests/, expected once")
        named.append(f"{found[0].relative_to(copy)}{colons}{case}")
    # A run takes over a second, so the bytecode of one mutant is never taken for that of the next.
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--exhaustive", *named],
        cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    if done.returncode not in (0, FAILED):
        print(done.stdout[-3000:] + done.stderr[-3000:])
    return done.returncode, time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

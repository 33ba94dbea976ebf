"""Fifty faults and more that the tests must find: each is put into a copy of the package, and its
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
    Mutant(
        "manifest: a file that grew since the save counts as saved",
        "        if have != size:\n            yield NotAsSaved",
        "        if have is None or have < size:\n            yield NotAsSaved",
        ("test_manifest.py::test_missing_files_are_named_with_both_sizes",),
    ),
    Mutant(
        "run state: names of an older save are given to an optimizer that was written over",
        ".get(file) != digest_of_end(folder / file):",
        ".get(file) is None:",
        ("test_parameter_sources.py::test_the_run_state_of_an_older_save_is_not_believed",),
    ),
    Mutant(
        "parts of ranks: parts of two dtypes make a tensor",
        '    if len(dtypes) > 1:\n        problem = f"its parts',
        '    if len(dtypes) > 2:\n        problem = f"its parts',
        ("test_rank_parts.py::test_halves_of_two_dtypes_are_no_tensor",),
    ),
    Mutant(
        "several paths: the exit status is that of the last path",
        "        self.status = max(self.status, status)\n        self.words[word] += 1",
        "        self.status = status\n        self.words[word] += 1",
        ("test_several_paths.py::test_warnings_and_failures_have_words_of_their_own",),
    ),
    Mutant(
        "scrub: checkpoints that could not be listed are forgotten",
        "        forget = 0.0 if below.failures else begun\n",
        "        forget = begun\n",
        ("test_scrub.py::test_what_is_not_mounted_is_not_forgotten",),
    ),
    Mutant(
        "scrub: a round of a clock that was wrong goes on",
        "            if subset in subsets and max(begun, ended or 0.0) <= now\n",
        "            if subset in subsets\n",
        ("test_scrub.py::test_a_round_of_a_clock_that_was_wrong_begins_anew",),
    ),
    Mutant(
        "migrate: steps in the new files are not compared with those of the source",
        "        _compare_numbers(where, _steps(planned.state), _steps(state))\n",
        "",
        ("test_state_plan.py::test_the_proof_finds_what_differs",),
    ),
    Mutant(
        "migrate: the last byte of a copied file is not compared",
        "runs = [Run(0, 0, one.size)] if one.size else []",
        "runs = [Run(0, 0, one.size - 1)] if one.size else []",
        ("test_safety.py::test_a_copy_of_another_run_is_proven_again",),
    ),
    Mutant(
        "reload: empty tensors alone prove an arrival",
        "                Outcome.PROVEN if self.nbytes else Outcome.NOT_EXERCISED,\n",
        "                Outcome.PROVEN,\n",
        ("test_reload_vacuous.py::test_tensors_without_an_element_prove_nothing",),
    ),
    Mutant(
        "reload: bytes behind those of the file do not count",
        "return Mismatch(position, None, None) if position != len(raw) else None",
        "return None",
        ("test_reload_stored_weights.py::test_other_lengths_are_found",),
    ),
    Mutant(
        "reload: NaN in the place of a number is no difference of outputs",
        "    if not bool((finite | is_same).all()):\n",
        "    if False:\n",
        ("test_reload_outputs.py::test_what_is_not_finite_is_far_from_all_but_itself",),
    ),
    Mutant(
        "probe: verdicts of another boot or driver are believed",
        "    return report if same else None\n",
        "    return report\n",
        (
            "test_probe_cache.py::test_any_change_of_the_key_makes_it_unknown",
            "test_probe_cache.py::test_a_new_boot_takes_the_same_file",
        ),
    ),
    Mutant(
        "values: NaN in a mask is only noted",
        "is_meant = not scan.nan and _is_mask(tensor.fqn)",
        "is_meant = _is_mask(tensor.fqn)",
        ("test_values.py::test_infinity_in_a_mask_is_only_noted",),
    ),
    Mutant(
        "values: Inf in a moment is passed over",
        'problem = _nonfinite(scan) if scan.nan or scan.inf else ""',
        'problem = _nonfinite(scan) if scan.nan else ""',
        ("test_values.py::test_infinity_in_a_moment_is_as_bad_as_nan",),
    ),
    Mutant(
        "values: minus infinity is not seen",
        "        if high < inf and top < inf | sign:\n",
        "        if high < inf:\n",
        ("test_scanning.py::test_every_pattern_of_a_small_dtype",),
    ),
    Mutant(
        "check: a file of a model below that may not be read leaves the status 0",
        "return 3 if self.all_unfinished else max(",
        "return 3 if self.unfinished else max(",
        ("test_unreadable.py::test_a_file_of_a_model_below",),
    ),
    Mutant(
        "doctor: processes of all machines count for this one",
        "    here = max(total // machines, 1)\n",
        "    here = max(total, 1)\n",
        ("test_checks.py::test_it_speaks_exactly_where_it_must",),
    ),
    Mutant(
        "doctor: a map may name one device more than there are",
        "device >= facts.torch.count\n",
        "device > facts.torch.count\n",
        ("test_checks.py::test_it_speaks_exactly_where_it_must",),
    ),
    Mutant(
        "legacy files: a file that lacks its last bytes is whole",
        "sum(8 + storage.nbytes for storage in known.values())",
        "sum(storage.nbytes for storage in known.values())",
        ("test_torch_legacy.py::test_every_truncation_is_a_format_error",),
    ),
    Mutant(
        "safetensors: a line end that two reads cut is not seen",
        'begin, last = begin + len(piece), piece[-1:].replace(b"\\n", b"")',
        'begin, last = begin + len(piece), b""',
        ("test_text_copies.py::test_pieces_of_any_length_find_the_same",),
    ),
    Mutant(
        "safetensors: tensors may overlap",
        "        if begin != position:\n            kind",
        "        if begin > position:\n            kind",
        ("test_safetensors_file.py::test_the_reference_decides",),
    ),
    Mutant(
        "digests of plans: a file that was rewritten in its old size is as planned",
        "etag_of(root / path) or status.mtime_ns",
        "etag_of(root / path)",
        ("test_plan_digests.py::test_a_folder_that_changed_is_refused",),
    ),
    Mutant(
        "repaired manifest: the digest of a patched file stays",
        "            case Patch():\n                change(edit.path, None)\n",
        "            case Patch():\n                pass\n",
        (
            "test_following.py::test_after_a_repair_every_tensor_matches_and_no_file_is_called_right_that_was_not_read",
        ),
    ),
    Mutant(
        "repaired manifest: an optimizer leads to the old place of its model",
        "new[entry.index] = new[position[kept]]",
        "new[entry.index] = position[kept]",
        ("test_following.py::test_an_optimizer_follows_a_duplicate_to_the_new_place_of_its_model",),
    ),
    Mutant(
        "undo: a change between the ends of a file does not count",
        "        if samples.get(path, digest) != digest:\n",
        "        if False:\n",
        ("test_undoable.py::test_a_newer_save_with_frozen_ends_is_no_copy",),
    ),
    Mutant(
        "recipes: each part of a long range gets the digest of the first",
        "parts.append(Part(piece.path, piece.offset + start, position + start, length))",
        "parts.append(Part(piece.path, piece.offset + start, position, length))",
        ("test_undoable.py::test_a_range_of_several_parts_comes_back",),
    ),
    Mutant(
        "recipes: a source that ends too early makes a shorter file",
        "                        if len(data) != piece.length:\n",
        "                        if not data:\n",
        ("test_journal.py::test_what_does_not_fit_changes_nothing",),
    ),
    Mutant(
        "comparing: the last page is no sample",
        "position = last * number // max(1, pages - 1)",
        "position = last * number // pages",
        ("test_comparing.py::test_samples_reach_from_the_first_byte_to_the_last",),
    ),
    Mutant(
        "ZeRO: a full sub-group takes one more parameter",
        "        if filled >= size:\n",
        "        if filled > size:\n",
        ("test_new_zero.py::test_sub_groups_are_those_of_deepspeed",),
    ),
    Mutant(
        "tiles: a piece of a tile is read from its start, wherever the part begins",
        "        skip = max(0, skip - length)\n",
        "        skip = 0\n",
        ("test_layouts.py::test_tiles_in_buffers_of_any_size",),
    ),
    Mutant(
        "joint saves: ranks do not wait for the files of the others",
        "        with self._on_all():\n            yield self._staging\n",
        "        yield self._staging\n",
        ("test_saving.py::test_one_rank_that_fails_fails_all",),
    ),
    Mutant(
        "tolerant load: numbers go into a mask",
        '    return "bool" if dtype is torch.bool else "int"\n',
        '    return "int"\n',
        ("test_loading_refusals.py::test_numbers_are_no_mask",),
    ),
    Mutant(
        "tolerant load: an entry that fits as well is left out without a word",
        "        if found.is_whole(targets) and not any(any(loosest[entry]) for entry in "
        "found.left):\n",
        "        if found.is_whole(targets):\n",
        ("test_loading_matching.py::test_an_entry_that_fits_loosely_is_not_left_over_in_silence",),
    ),
    Mutant(
        "workers: a resume takes the generators behind the next batch",
        "            if before is None or index < before:\n",
        "            if before is None or index <= before:\n",
        ("test_generators.py::test_the_generators_of_workers_are_those_before_the_next_batch",),
    ),
    Mutant(
        "sha256sums: a folder whose name begins alike is in the checkpoint",
        'if not full.startswith(os.path.join(home, "")):',
        "if not full.startswith(home):",
        ("test_sha256sums.py::test_a_list_that_was_made_inside_and_lies_elsewhere_leads_on",),
    ),
    Mutant(
        "verify: a report about nothing is a success",
        "return 3 if self.unfinished or not self.is_verified else 0",
        "return 3 if self.unfinished else 0",
        ("test_verdicts.py::test_what_to_type_where_nothing_is_sealed",),
    ),
    Mutant(
        "check: a warning about what a resume takes leaves the status 0",
        "return report.finish(summary, batch.status or int(bool(warnings)))",
        "return report.finish(summary, batch.status)",
        ("test_taken_instead.py::test_an_entry_that_load_state_takes_is_reported",),
    ),
    Mutant(
        "partial results: they are removed although a file could not be read",
        "if executor.leads and (status in (0, 1) or results.oldest() is None):",
        "if executor.leads and (status in (0, 1, 3) or results.oldest() is None):",
        ("test_teamwork.py::test_results_stay_where_a_file_could_not_be_read",),
    ),
    Mutant(
        "partial results: a new file that somebody changed is left out",
        "    if kept != files:  # somebody was there: nothing is certain\n",
        "    if not kept:\n",
        ("test_safety.py::test_a_new_file_that_somebody_changed_meanwhile_is_written_again",),
    ),
    Mutant(
        "verify: crossed models are no difference",
        "            or self.crossed\n            or any(one.problem",
        "            or any(one.problem",
        ("test_verdicts.py::test_models_in_each_others_place_are_one_line",),
    ),
    Mutant(
        "doctor: processes on the CPU want devices",
        "start.count <= count or facts.torch.problem or _on_cpu(facts):",
        "start.count <= count or facts.torch.problem:",
        ("test_checks.py::test_it_speaks_exactly_where_it_must",),
    ),
    Mutant(
        "migrate: options that only the new optimizer has are not compared",
        "            for key in (*one.options, *other.options):\n",
        "            for key in one.options:\n",
        ("test_state_plan.py::test_the_proof_finds_what_differs",),
    ),
    Mutant(
        "undo: a file that was written while it was deleted comes back as if it were whole",
        "        if old is not None and _ends_of(rebuilt) != old.sha256:\n",
        "        if False:\n",
        ("test_dropped.py::test_an_undo_decides_before_it_moves_a_file",),
    ),
    Mutant(
        "universal: a tensor of any size takes the shape of its parameter",
        "    if prod(tensor.shape) != prod(shape) or not isinstance(tensor.layout, Contiguous):\n",
        "    if not isinstance(tensor.layout, Contiguous):\n",
        ("test_zero_states.py::test_a_tensor_of_another_size",),
    ),
    Mutant(
        "universal: frozen parameters of ZeRO-3 are not put together",
        "        placed |= frozen_shares(models) if files.by_rank else {}\n",
        "",
        ("test_zero_states.py::test_universal_checkpoints",),
    ),
    Mutant(
        "tolerant load: the moments of Adam go into AdamW",
        "    if decoupled is not None and saved is not None and bool(decoupled) != bool(saved):\n",
        "    if False:\n",
        ("test_loading_refusals.py::test_an_optimizer_of_another_class",),
    ),
    Mutant(
        "saved digests: some digests of a model count as all",
        "            if found and len(found) == len(weights.tensors):\n",
        "            if found:\n",
        ("test_saving_digests.py::test_processes_share_the_tensors_that_deepspeed_cuts",),
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

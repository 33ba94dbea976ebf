"""Staging folders that outlive an interrupted migration: the next run keeps their complete files,
and writes the rest.

``--partial`` names a folder for the results of the files, as other verbs have it, and for a note
about the staging folder. A new file counts as complete once it is durable and its result is noted.
It is kept for a run of the same command with the same source, files and version of ckptfix, and
while it is as it was noted. A proof still reads it all.

The shares of a job array write in one staging folder, whose note the first of them leaves;
the last run proves the files.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.conversion.migration_plan import MigrationPlan
from ckptfix.conversion.sources import files_read
from ckptfix.errors import OperationError, TeamError
from ckptfix.storage.atomic import read_file, rename_to_free, sync_folder
from ckptfix.storage.executor import Executor
from ckptfix.storage.launched_ranks import in_folder_of_leader
from ckptfix.storage.paths import JOURNAL, shell_path
from ckptfix.storage.recipes import Literal
from ckptfix.storage.results import PartialResults, Units
from ckptfix.storage.staged import (
    Staging,
    discard,
    keep_while,
    owner_of,
    staging_for,
    temporary_file,
)
from ckptfix.storage.staged import write_file as write_note
from ckptfix.tensors.new_files import Computed, Data

NOTE = "staging.json"
"""File in the folder of partial results that names the staging folder. Without it, that folder is
nobody's.
"""


class Kept(NamedTuple):
    """Files that an earlier run left in the staging folder. ``run``: a part of each result's key,
    "" to keep none.

    ``nbytes``: of the complete files.
    """

    run: str = ""
    nbytes: int = 0


@contextmanager
def shared_staging(plan: MigrationPlan, executor: Executor) -> Iterator[tuple[Staging, Kept]]:
    """Yield a folder to write the output of a plan in, as ``staging_for`` does; in a team, that of
    the leader.

    With partial results it stays when the work is interrupted, and is that of the run before.
    """
    output, name = plan.output, plan.output.name if plan.is_file else None
    results = executor.partial
    if results is not None and not executor.knows_all:
        with _of_shares(plan, name, results, is_share=executor.is_share) as staging:
            yield staging
        return
    if not executor.leads:
        folder, *kept = executor.told(list)
        remedy = "next: write to a folder that all nodes see"
        with in_folder_of_leader(executor, Path(folder), remedy):
            yield Staging(Path(folder), output.absolute(), name), Kept(*kept)
        return
    planned = "" if results is None else _fingerprint(plan)
    begun = (
        staging_for(output, name=name)
        if results is None
        else _lasting(output, name, planned, results)
    )
    with begun as staging:
        kept = Kept() if results is None else _kept(planned, staging, results)
        executor.told(lambda: [str(staging.folder), *kept])
        # No other writes any more when the folder is removed, unless this one has failed alone.
        with executor.as_one():
            yield staging, kept


@contextmanager
def _of_shares(
    plan: MigrationPlan, name: str | None, results: PartialResults, *, is_share: bool
) -> Iterator[tuple[Staging, Kept]]:
    """Yield the folder in which the shares of a job array write, each its own files; the last
    run removes it.
    """
    note, planned = results.folder / NOTE, _fingerprint(plan)
    if not note.exists():
        _begin(plan.output, name, planned, results)
    old = _noted(results)
    again = f"next: rm -r {shell_path(results.folder)}, and start every share again"
    if old is None or old["plan"] != planned or not Path(old["folder"]).is_dir():
        raise OperationError(
            f"{results.folder}: the source, its plan or the version of ckptfix changed since the "
            f"first share; {again}"
        )
    staging = Staging(Path(old["folder"]), plan.output.absolute(), name)
    if is_share:
        yield staging, Kept(old["run"])
        return
    for path, identity in _identities(results, old["run"]).items():
        if state_of(staging.new / path) != identity:
            raise OperationError(f"{staging.new / path}: changed since its share wrote it; {again}")
    try:
        yield staging, Kept(old["run"])
        note.unlink(missing_ok=True)
    finally:
        if not note.exists():
            discard(staging)


def _begin(output: Path, name: str | None, planned: str, results: PartialResults) -> None:
    """Make a staging folder for the shares, unless another one of them is first to note its own."""
    note, is_ours = results.folder / NOTE, False
    results.folder.mkdir(parents=True, exist_ok=True)
    with staging_for(output, name=name, stays=lambda: is_ours) as staging:
        keep_while(staging.folder, note)
        document = {"folder": str(staging.folder), "plan": planned, "run": os.urandom(8).hex()}
        with temporary_file(note, json.dumps(document).encode()) as new, suppress(FileExistsError):
            rename_to_free(new, note)
            is_ours = True
    sync_folder(results.folder)


@contextmanager
def _lasting(
    output: Path, name: str | None, planned: str, results: PartialResults
) -> Iterator[Staging]:
    """Yield the staging folder of the run before, or a new one, that stays while its note does.

    ``planned``: the fingerprint of the plan, which must be that of the run before.
    """
    note = results.folder / NOTE
    old = _noted(results)
    before = Path(old["folder"]) if old is not None and old["plan"] == planned else None
    owner = owner_of(before) if before is not None else None
    if owner is not None and owner.is_same_machine and owner.is_running:
        raise OperationError(
            f"{results.folder}: process {owner.pid} is writing {output} with these partial "
            "results; next: wait until it has ended, then run the same command again"
        )
    if before is None or not before.is_dir():
        before = None
        note.unlink(missing_ok=True)  # the next sweep removes the folder that it names
    with staging_for(output, name=name, before=before, stays=note.exists) as staging:
        if before is None:
            keep_while(staging.folder, note)
        yield staging
        note.unlink(missing_ok=True)


def _kept(planned: str, staging: Staging, results: PartialResults) -> Kept:
    """Note the staging folder; remove from it what is not complete."""
    old = _noted(results)
    run = old["run"] if old is not None else os.urandom(8).hex()
    files = _identities(results, run)
    kept = {
        name: identity
        for name, identity in files.items()
        if state_of(staging.new / name) == identity
    }
    if kept != files:  # somebody was there: nothing is certain
        run, kept = os.urandom(8).hex(), {}
    for root, _, names in os.walk(staging.new):
        for name in names:
            path = Path(root, name)
            if str(path.relative_to(staging.new)) not in kept:
                path.unlink()
    shutil.rmtree(staging.new / JOURNAL, ignore_errors=True)
    document = {"folder": str(staging.folder), "plan": planned, "run": run}
    results.folder.mkdir(parents=True, exist_ok=True)
    write_note(results.folder / NOTE, json.dumps(document).encode())
    return Kept(run, sum(size for size, *_ in kept.values()))


def _identities(results: PartialResults, run: str) -> dict[str, list[int]]:
    """Return the complete files of a run, each as it was noted: name -> size, time and inode."""
    noted = [one["kept"] for one in results.all() if isinstance(one, dict) and "kept" in one]
    return {name: identity for noted_by, name, *identity in noted if noted_by == run}


def state_of(path: Path) -> list[int] | None:
    """Return size, time and inode of a file that was written, None when it is not there."""
    with suppress(OSError):
        status = os.stat(path)
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None


@contextmanager
def doubted(executor: Executor) -> Iterator[None]:
    """Keep nothing when what is inside this block finds that a new file is wrong: the next run
    begins again.
    """
    try:
        yield
    except OperationError as error:
        results = executor.partial
        if results is not None and executor.leads and not isinstance(error, TeamError):
            # The staging folder, which the note names, goes with the end of this run.
            (results.folder / NOTE).unlink(missing_ok=True)
        raise


def _noted(results: PartialResults) -> dict[str, Any] | None:
    try:
        document = json.loads(read_file(results.folder / NOTE))
        return document if document.keys() >= {"folder", "plan", "run"} else None
    except (OSError, ValueError, AttributeError):
        return None


def _fingerprint(plan: MigrationPlan) -> str:
    """Return a digest of what decides about the bytes of the new files: the source's files, and
    what is planned.
    """
    root = plan.source.root
    source = Units().of(tuple(root / name for name in sorted(set(files_read(plan)))), 0).files
    digest = hashlib.sha256(
        json.dumps([version("ckptfix"), str(plan.output.absolute()), source]).encode(
            "utf-8", "surrogateescape"
        )
    )
    for planned in plan.planned:
        for file in planned.files:
            digest.update(os.fsencode(str(file.path)) + b"\0")
            for part in file.parts:
                if isinstance(part, Literal):
                    digest.update(hashlib.sha256(part.data).digest())
                elif isinstance(part, Data):
                    one = planned.data[part.fqn]
                    words = repr((part.fqn, part.length, one.new, one.stored.layout))
                    digest.update(words.encode("utf-8", "surrogateescape"))
                else:
                    assert isinstance(part, Computed)
                    digest.update(str(part.length).encode())
    return digest.hexdigest()

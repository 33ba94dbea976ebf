"""The checkpoint of a run to resume from: the newest that is complete and in which ``check`` finds
no error.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial

from msgspec import Struct

from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder_names import FAMILIES, family_of
from ckptfix.checkpoint.latest import (
    HALF_REPAIRED,
    UNFINISHED,
    Candidate,
    cut_upload,
    incomplete,
    judge,
    numbered,
    partly_repaired,
    unfinished_files,
)
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.diagnosis.check import resume_problem
from ckptfix.diagnosis.other_runs import History, OtherRun, history_of, other_run
from ckptfix.storage.files import AnyPath, StorePath, lexists, names_in
from ckptfix.storage.paths import JOURNAL, command, shell_path
from ckptfix.storage.staged import SAVING, outside_checkpoints


def examine(path: AnyPath, number: int, siblings: Siblings | None = None) -> Candidate:
    """Return a numbered checkpoint, with the reason why no run resumes from it as its problem.

    ``siblings``: what is known of others; each is read once for all of them.
    """
    return judge(path, number, partial(resume_problem, siblings=siblings))


def newest_complete(found: Iterable[Candidate]) -> Candidate | None:
    """Return the first complete one of candidates that are ordered newest first."""
    return next((candidate for candidate in found if candidate.problem is None), None)


class Choice(Struct, frozen=True, kw_only=True):
    """The checkpoint of a folder that a resume takes. ``best``: None where none is complete, or
    nothing decides.

    ``passed_over``: the incomplete ones that are newer, and those of families without a complete
    one. ``rivals``: the newest complete one of each family where there are several: their numbers
    cannot be compared, so the time of the save decides. ``told``: what is told of a lower number of
    the same family; without a ``best`` the two are the ``rivals``.
    """

    best: Candidate | None
    passed_over: tuple[Candidate, ...] = ()
    rivals: tuple[Candidate, ...] = ()
    told: OtherRun | None = None

    @property
    def proof(self) -> str:
        """The evidence that of two rivals of one family the higher number need not be the newer
        one, "" for none.
        """
        return self.told.proof if self.told is not None and self.best is None else ""


def choose(
    folder: AnyPath,
    patterns: Collection[str] = FAMILIES,
    look: Callable[[AnyPath, int], Candidate] | None = None,
    read: Callable[[AnyPath], History | None] = history_of,
) -> Choice | None:
    """Return the newest complete checkpoint of a folder, None where no folder in it is named as a
    checkpoint is.

    ``look``: returns one with its problem, by default ``examine``. It is called for as few as it
    takes, as a run may have 100,000: newest first, until one is complete. ``read``: returns the
    history of one. Raises OSError.
    """
    look = look or partial(examine, siblings=Siblings())
    families: list[tuple[list[Candidate], Candidate | None]] = []
    every_family = numbered(folder, patterns)
    for family in every_family.values():
        broken: list[Candidate] = []
        complete: Candidate | None = None
        for number, path in family:
            candidate = look(path, number)
            if candidate.problem is None:
                complete = candidate
                break
            broken.append(candidate)
        families.append((broken, complete))
    newest = tuple(complete for _, complete in families if complete is not None)
    if not newest:
        every = tuple(one for broken, _ in families for one in broken)
        return Choice(best=None, passed_over=every) if families else None
    best = max(newest, key=lambda one: one.time or 0.0)
    times = [one.time for one in newest]
    is_certain = len(newest) == 1 or (None not in times and times.count(best.time) == 1)
    passed_over = [one for broken, complete in families if complete is best for one in broken]
    passed_over += [broken[0] for broken, complete in families if complete is None]
    told: OtherRun | None = None
    if is_certain:
        (of_best,) = (
            family for family in every_family.values() if (best.number, best.path) in family
        )
        lower = [numbered_folder for numbered_folder in of_best if numbered_folder[0] < best.number]
        told = other_run(best, lower, look, read)
        if told is not None and not told.is_older:
            is_certain, newest = False, (best, told.candidate)
    return Choice(
        best=best if is_certain else None,
        passed_over=tuple(passed_over),
        rivals=newest if len(newest) > 1 else (),
        told=told,
    )


def contradicted(folder: AnyPath, choice: Choice) -> str:
    """Return the message about a choice with a ``proof``."""
    higher, lower = choice.rivals
    is_of_trainer = (higher.path / TRAINER_STATE).exists()
    call = "trainer.train(resume_from_checkpoint=" if is_of_trainer else "accelerator.load_state("
    calls = [f"{call}{str(rival.path)!r})" for rival in (lower, higher)]
    return (
        f"{folder}: {choice.proof}, so the higher number may not be the newer one; next: "
        f"{calls[0]} or {calls[1]}"
    )


def mixed(checkpoint: AnyPath) -> str | None:
    """Return the message about a folder whose last save or repair was interrupted between its
    files, None for others.

    Its files may be of two saves, partly repaired, or not all be there.
    """
    return mixed_save(checkpoint) or _mixed_repair(checkpoint)


def _mixed_repair(checkpoint: AnyPath) -> str | None:
    folder = partly_repaired(checkpoint)
    return (
        f"{folder}: {HALF_REPAIRED}; next: {command('repair', folder)}"
        if folder is not None
        else None
    )


def mixed_save(checkpoint: AnyPath) -> str | None:
    """Return the message about a folder whose last save was interrupted between its files, None for
    any other.
    """
    if (checkpoint / JOURNAL / UNFINISHED).exists():
        why = "holds files of two saves: the last one was interrupted"
    elif (problem := cut_upload(checkpoint)) is not None:
        why = f"is not a complete checkpoint: {problem}"
    else:
        return None
    return f"{checkpoint} {why}; next: {instead_of(checkpoint)}"


def instead_of(checkpoint: AnyPath) -> str:
    """Return advice on the checkpoint to load instead of a mix of two saves: the new save, the
    nearest complete one, or none.
    """
    with suppress(OSError, ValueError):
        if (staged := _intact_staging(checkpoint)) is not None:
            return f"load the interrupted save, which is intact in {shell_path(staged)}"
    if (family := family_of(checkpoint.name)) is not None:
        with suppress(OSError):
            siblings = Siblings()
            others = (
                examine(path, number, siblings)
                for number, path in numbered(checkpoint.parent, (family[0],)).get(family[0], ())
                if path.name != checkpoint.name
            )
            if (other := newest_complete(others)) is not None:
                return f"load {shell_path(other.path)}, which is complete, or save again"
    return "save again; there is no complete checkpoint next to it"


def _intact_staging(checkpoint: AnyPath) -> AnyPath | None:
    """Return the staging folder of the interrupted save while none of its files has been moved.
    Raises OSError.
    """
    journal = checkpoint / JOURNAL
    recorded = unfinished_files(checkpoint)
    folders = [journal / name for name in names_in(journal) if name.startswith(SAVING)]
    if not isinstance(checkpoint, StorePath):  # no save stages in a store
        parent = outside_checkpoints(checkpoint)
        folders += [
            parent / name
            for name in names_in(parent)
            if name.startswith(SAVING) and name.endswith(f"+{checkpoint.name}")
        ]
    for folder in folders:
        # A recorded file of the checkpoint that is not in the staging folder was moved, or is of
        # the older save.
        if incomplete(folder) is None and not any(
            lexists(checkpoint / name) and not lexists(folder / name) for name in recorded
        ):
            return folder
    return None

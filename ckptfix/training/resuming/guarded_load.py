"""``load_state`` of a guarded Accelerator, and ``latest_checkpoint``.

A guarded run registers each object once. Stock ``load_state`` goes by number: after a duplicate it
would load the student into the teacher. And keys that a repair made bare do not fit a model that a
script wraps by hand. Folders whose entries are not those of this run are therefore matched with its
objects, by content.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from accelerate import Accelerator
from msgspec.structs import replace

from ckptfix.checkpoint.entries import Entry, doubles, model_entries, state_entries
from ckptfix.checkpoint.filenames import FileName
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.folder_names import ACCELERATE, FAMILIES, checkpoint_number
from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.checkpoint.latest import Candidate, checkpoints_folder, numbered, problems_in
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.checkpoint.roles import Role
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Method
from ckptfix.diagnosis.resumable import choose, contradicted, examine, mixed
from ckptfix.errors import ChangedError, UsageError
from ckptfix.storage.files import AnyPath, names_in, on_disk
from ckptfix.storage.opened import open_files
from ckptfix.storage.paths import JOURNAL, command, existing
from ckptfix.storage.stores import is_url
from ckptfix.training.guard import guard_of
from ckptfix.training.loading.fetching import fetched
from ckptfix.training.loading.load_report import (
    LoadPolicy,
    LoadReport,
    Requirement,
    Status,
)
from ckptfix.training.loading.load_state import load_here, loaded_by
from ckptfix.training.loading.states import not_of_a_rank
from ckptfix.training.ranks import SHARDED, Ranks
from ckptfix.training.resuming import run_state

_STATES = (
    (Role.OPTIMIZER, "_optimizers"),
    (Role.SCHEDULER, "_schedulers"),
    (Role.CUSTOM, "_custom_objects"),
)
_LISTINGS = 3
"""Times that a run in a store is listed, where checkpoints are deleted or written while they are
looked at.
"""


def is_shifted(accelerator: Any, root: Path) -> bool:
    """Return whether stock ``load_state`` takes wrong entries of a folder, or fails for a wrapper's
    name alone.

    Reads headers; bytes only where entries look alike and there are more of them than objects.
    Raises OSError.
    """
    if accelerator.distributed_type in SHARDED or not root.is_dir():
        return False
    folder = scan_folder(root, wanted=not_of_a_rank)
    models = model_entries(folder, usable_manifest(folder.root))
    if _has_duplicates(root, models, len(accelerator._models)):
        return True
    if any(
        _has_duplicates(
            root, state_entries(folder, role, ()), len(getattr(accelerator, registry)), of=role
        )
        for role, registry in _STATES
    ):
        return True
    by_index = {entry.index: entry for entry in models}
    return any(
        index in by_index
        and not by_index[index].problem
        and not _is_wrapped_as(model, by_index[index].chain)
        for index, model in enumerate(accelerator._models)
    )


def dataloaders_requirement(accelerator: Any, root: Path) -> Requirement:
    """Return what to insist on for data loaders: nothing where more states than loaders lie there,
    and they differ.

    Of a loader that was prepared twice one state moved on and one did not, and nothing says which
    is which.
    """
    folder = scan_folder(root, wanted=not_of_a_rank)
    for role in (Role.DATALOADER, Role.SAMPLER):
        entries = state_entries(folder, role, ())
        if len(entries) > len(accelerator._dataloaders) > 0 and len(entries) > 1 + len(
            doubles(root, entries, wrapped=False)
        ):
            return Requirement.IGNORE
    return Requirement.WARN


def moved(report: LoadReport) -> list[str]:
    """Return in words what went elsewhere than its number says, and what was left out."""
    return [
        str(one) for one in report.components if one.status is Status.ADAPTED or one.is_duplicate
    ]


def _has_duplicates(
    root: Path, entries: Sequence[Entry], objects: int, *, of: Role = Role.MODEL
) -> bool:
    """Return whether duplicates move later entries.

    Of one object none is moved, but custom objects must agree in number.
    """
    fewest = 1 if of is Role.CUSTOM else 2
    return len(entries) > objects >= fewest and bool(doubles(root, entries, wrapped=False))


def _is_wrapped_as(model: Any, chain: tuple[str, ...]) -> bool:
    named = (
        name for names in (model.named_parameters(), model.named_buffers()) for name, _ in names
    )
    if common_wrappers(tuple(named)) == chain:
        return True
    # Asked last, as it may copy: its own state_dict(), or a buffer that is not saved, can make
    # other names of them.
    return common_wrappers(model.state_dict()) == chain


def load_state(
    accelerator: Accelerator,
    method: Method,
    input_dir: str | os.PathLike[str] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Guard ``Accelerator.load_state``: without a path the newest complete checkpoint; numbering
    goes on.

    A folder that an unguarded run doubled is loaded by content, repaired or not, and a warning says
    what went where. Warns of every newer folder that is passed over. Raises UsageError when no
    checkpoint is complete.
    """
    config = accelerator.project_configuration
    project = accelerator.project_dir
    if is_url(input_dir) or (
        input_dir is None and config.automatic_checkpoint_naming and is_url(str(project))
    ):
        url = str(input_dir or _choose(accelerator, f"{str(project).rstrip('/')}/checkpoints"))
        together = (
            guard_of(accelerator).settings.save_together or accelerator.distributed_type in SHARDED
        )
        with fetched(url, Ranks(accelerator, together=together)) as copy:
            return load_state(accelerator, method, copy, *args, **kwargs)
    with guard_of(accelerator).entered() as is_outermost:
        if is_outermost and input_dir is None and config.automatic_checkpoint_naming:
            folder = Path(project) / "checkpoints"
            input_dir = _choose(accelerator, folder)
        elif (
            is_outermost
            and input_dir
            and (problem := mixed(Path(os.path.expanduser(str(input_dir)))))
        ):
            raise UsageError(problem)
        report = (
            _undoubled(accelerator, input_dir, *args, **kwargs)
            if is_outermost and input_dir
            else None
        )
        result = method(input_dir, *args, **kwargs) if report is None else None
        if is_outermost and input_dir:
            root = Path(os.path.expanduser(str(input_dir)))
            loaded = run_state.BY_STOCK if report is None else loaded_by(report)
            run_state.go_on_and_report(accelerator, root, loaded)
        if is_outermost and input_dir is not None and config.automatic_checkpoint_naming:
            number = checkpoint_number(Path(input_dir).name)
            if number is not None:
                config.iteration = number + 1
        return result


def _undoubled(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str],
    load_kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    map_location: object = None,
    **kwargs: Any,
) -> LoadReport | None:
    """Load a folder that an unguarded run doubled, or whose names a repair changed; None for any
    other folder.

    ``strict=False`` and arguments that nobody here knows are left to accelerate, whatever comes of
    it.
    """
    root = Path(os.path.expanduser(str(input_dir)))
    if not strict or kwargs or not is_shifted(accelerator, root):
        return None
    dataloaders = dataloaders_requirement(accelerator, root)
    trust = (load_kwargs or {}).get("weights_only") is False
    report = load_here(accelerator, root, LoadPolicy(dataloaders=dataloaders, trust=trust))
    elsewhere = moved(report)
    if not elsewhere and dataloaders is not Requirement.IGNORE:
        # A tie that the file lacks looked like another wrapper: all is where its number says.
        return report
    left = "; data loaders start over, because their current state cannot be identified"
    warn_caller(
        f"{root}: the numbered files do not match the objects of this run: objects were "
        "prepared twice before the save, or a repair renamed keys. Loaded by content "
        f"instead: {'; '.join(elsewhere)}{left if dataloaders is Requirement.IGNORE else ''}; "
        f"next: {command('check', root)}"
    )
    return report


def _choose(accelerator: Accelerator, folder: Path | str) -> str:
    """Return the newest complete checkpoint. Some scripts load on some processes only: then each
    looks for itself.
    """
    ranks = Ranks(accelerator, together=guard_of(accelerator).settings.save_together)
    chosen: str = ranks.on_main(
        lambda: str(
            latest_checkpoint(folder, pattern=ACCELERATE)
            if is_url(folder)
            else _latest(Path(folder), look=partial(_examined, accelerator, Siblings()))
        ),
        "load_state",
    )
    return chosen


def _examined(accelerator: Any, siblings: Siblings, path: AnyPath, number: int) -> Candidate:
    """Return a checkpoint, with what this run registers and it lacks as its problem: ``load_state``
    fails without it.
    """
    candidate = examine(path, number, siblings)
    if candidate.problem is not None or accelerator.distributed_type in SHARDED:
        return candidate
    there = names_in(path)
    wanted = (
        str(FileName(role=role, stem=stem, suffix=".bin", index=index))
        for role, stem in ((Role.OPTIMIZER, "optimizer"), (Role.SCHEDULER, "scheduler"))
        for index in range(len(getattr(accelerator, f"_{stem}s")))
    )
    lost = [name for name in wanted if name not in there]
    problem = f"no {' and no '.join(lost)}, which this run needs" if lost else None
    return replace(candidate, problem=problem)


@overload
def latest_checkpoint(path: os.PathLike[str], *, pattern: str | None = None) -> Path: ...


@overload
def latest_checkpoint(path: str, *, pattern: str | None = None) -> Path | str: ...


def latest_checkpoint(path: str | os.PathLike[str], *, pattern: str | None = None) -> Path | str:
    """Return the newest complete checkpoint of a project folder, or of its ``checkpoints`` folder.

    Of a URL the URL of a checkpoint is returned, as text. An upload without its commit marker is
    not complete.

    By number, in folders called ``checkpoint_N``, ``checkpoint-N``, ``step_N`` or ``epoch_N``, or
    as ``pattern`` says, with ``{}`` for the number: ``"run-{}"``. Numbers of two families cannot be
    compared: of their newest complete ones the one is taken whose save ended last, by the time of
    ``random_states_0.pkl`` or ``trainer_state.json``.

    Warns of every newer one that is passed over, with the reason, and where the time decided.
    Raises UsageError when none is complete, when not even the times say which is newer, or when
    ``trainer_state.json`` proves that the highest number is of another run than lower ones, or the
    times and the steps of all optimizers that two folders were exchanged.
    """
    if pattern is not None and (pattern.count("{}") != 1 or "/" in pattern):
        raise UsageError(
            f"pattern={pattern!r}: expected a folder name with {{}} in place of the number, "
            f"such as 'step_{{}}'"
        )
    if is_url(path):
        return _latest_in_store(str(path), pattern)
    return on_disk(_latest_of_run(Path(path), pattern))


def _latest_of_run(run: AnyPath, pattern: str | None) -> AnyPath:
    folder = checkpoints_folder(existing(run))
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    patterns = FAMILIES if pattern is None else (pattern,)
    if folder != run and not numbered(folder, patterns):
        folder = run  # step_N and the like lie in the project folder itself
    return _latest(folder, patterns)


def _latest_in_store(url: str, pattern: str | None) -> str:
    """Return it by a listing that nobody changes meanwhile: a run that trains deletes its oldest
    checkpoints.
    """
    for attempt in range(_LISTINGS):
        try:
            with open_files(url) as run:
                return str(_latest_of_run(run, pattern))
        except ChangedError:
            if attempt + 1 == _LISTINGS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _latest(
    folder: AnyPath,
    patterns: Sequence[str] = (ACCELERATE,),
    look: Callable[[AnyPath, int], Candidate] | None = None,
) -> AnyPath:
    choice = choose(folder, patterns, look)
    if choice is None or (choice.best is None and not choice.rivals):
        broken = choice.passed_over if choice is not None else ()
        said = problems_in(broken)
        raise UsageError(
            f"no complete checkpoint in {folder} ({said or _what_is_there(folder, patterns)})"
        )
    best = choice.best
    if choice.proof:
        raise UsageError(contradicted(folder, choice))
    if best is None:
        names = ", ".join(one.path.name for one in choice.rivals)
        raise UsageError(
            f"{folder}: {names} follow different naming patterns, and their times do not show "
            f"which is newer; next: latest_checkpoint({str(folder)!r}, "
            f"pattern={FAMILIES[0]!r}) or another pattern"
        )
    words = ""
    if choice.passed_over:
        words += f" and passed over {problems_in(choice.passed_over)}"
    if others := [one.path.name for one in choice.rivals if one is not best]:
        words += f"; saved earlier: {', '.join(others)}; to choose one kind, pass pattern="
    if words:
        warn_caller(f"{folder}: chose {best.path.name}{words}")
    return best.path


def _what_is_there(folder: AnyPath, patterns: Sequence[str]) -> str:
    others = sorted(
        name for name in names_in(folder) if (folder / name).is_dir() and name != JOURNAL
    )
    there = f"; found {', '.join(others[:3])}" if others else ""
    kinds = ", ".join(pattern.replace("{}", "<number>") for pattern in patterns)
    return f"expected folders named {kinds}{there}"

"""Resumes of transformers' Trainer: from the newest complete checkpoint, with all states that the
run needs.

The Trainer takes the highest number, fails for a folder that a killed save left, and starts an
optimizer, a scheduler or random states anew, in silence, when their file is missing.
"""

import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from msgspec.structs import replace

from ckptfix.checkpoint.entries import model_entries
from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name, run_state_name
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.folder_names import TRAINER, checkpoint_number
from ckptfix.checkpoint.latest import (
    NO_WEIGHTS,
    Candidate,
    holds_weights,
    judge,
    numbered,
    problems_in,
)
from ckptfix.checkpoint.manifest import not_as_saved, usable_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import (
    NO_OPTIMIZER,
    MissingState,
    is_model_alone,
    missing_states,
    other_processes,
)
from ckptfix.devices.callers import warn_caller
from ckptfix.devices.patching import Method
from ckptfix.diagnosis.check import resume_problem
from ckptfix.diagnosis.resumable import choose, contradicted, examine, mixed, newest_complete
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.files import AnyPath, on_disk
from ckptfix.storage.paths import command, described
from ckptfix.training.loading.load_report import LoadPolicy, Part, Requirement
from ckptfix.training.ranks import SHARDED, Ranks, cannot_agree
from ckptfix.training.resuming import loader_positions, run_state
from ckptfix.training.resuming.generators import GeneratorStates, capture, restore
from ckptfix.training.running import as_given
from ckptfix.wording import count_of

VARIABLE = "CKPTFIX_MISSING_STATES"

_NO_STATE = f"no {TRAINER_STATE}, which the Trainer writes last"

_PARTS = {
    Role.OPTIMIZER: Part.OPTIMIZERS,
    Role.SCHEDULER: Part.SCHEDULERS,
    Role.RNG_STATE: Part.RNG,
}
_settings: dict[str, LoadPolicy] = {}
_exact: "weakref.WeakKeyDictionary[Any, GeneratorStates | None]" = weakref.WeakKeyDictionary()
"""Trainers that go on from a run state, with the generators at the end of their save.

None: 0.5.0 recorded the generators at the beginning of the save, so the Trainer's own file has
later ones.
"""

_log = logging.getLogger("ckptfix")


def require_states(requirement: Requirement | str | LoadPolicy | None) -> None:
    """Set what a resume insists on: one requirement for all states, or a policy that has one for
    each.

    None: what the environment variable CKPTFIX_MISSING_STATES says, else "require". Raises
    UsageError for other words.
    """
    if isinstance(requirement, LoadPolicy):
        _settings["policy"] = requirement
        return
    word = (
        requirement if requirement is not None else os.environ.get(VARIABLE) or Requirement.REQUIRE
    )
    what = "missing_states" if requirement is not None else VARIABLE
    known = [one for one in Requirement if one is not Requirement.PARTIAL]
    found = next((one for one in known if word in (one, one.value)), None)
    if found is None:
        raise UsageError(f"{what}={word!r}: expected 'require', 'warn' or 'ignore'")
    _settings["policy"] = LoadPolicy(optimizers=found, schedulers=found, rng=found)


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of the Trainer in a folder, None where there is no
    checkpoint at all.

    Warns of every newer one that is passed over. Raises UsageError when none is complete, or the
    highest number and others are of two runs, OSError.
    """
    found = _candidates(Path(folder))
    if not found:
        return None
    best = _newest(Path(folder), found)
    return os.path.join(folder, best.path.name)


def train(
    trainer: Any, method: Method, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Guard ``Trainer.train``: every process resumes from one checkpoint, which is complete on
    each.

    Raises UsageError for a path that is incomplete, and where the processes name different ones.
    """
    accelerator = trainer.accelerator
    given = None if resume_from_checkpoint is False else resume_from_checkpoint
    if cannot_agree(accelerator) or trainer.args.world_size != accelerator.num_processes:
        return method(resume_from_checkpoint, *args, **kwargs)
    folder = Path(trainer.args.output_dir)
    # Every process looks at its own disk, and all hear what the others found.
    own = _found(folder, given)
    wanted = "none" if given is None else "the newest" if given is True else Path(given).name
    ranks = Ranks(accelerator)
    views = ranks.gather((wanted, own))
    if len({name for name, _ in views}) > 1:
        said = ", ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(views))
        raise UsageError(
            f"the processes resume from different checkpoints ({said}); next: pass "
            "resume_from_checkpoint=True, which picks the newest checkpoint that is complete "
            "on all of them"
        )
    if not own:
        return method(resume_from_checkpoint, *args, **kwargs)
    together = [_together(one, [view for _, view in views]) for one in own]
    if given is True:
        error: Exception | None = None
        try:
            best = _newest(folder, together)
            given = os.path.join(trainer.args.output_dir, best.path.name)
        except (CkptfixError, OSError) as raised:
            error = raised
        # What proves two runs may lie on the disk of one node. Without any checkpoint on a disk all
        # others fail.
        if all(view for _, view in views):
            ranks.agree(error, "choosing a checkpoint")
        elif error is not None:
            raise error
    elif (problem := together[0].problem) is not None:
        raise UsageError(
            f"cannot resume from {together[0].path}: {problem}; next: "
            f"{_instead(on_disk(together[0].path))}"
        )
    _ensure_weights_fit(trainer, Path(str(given)))
    _warn_of_inexact(Path(str(given)))
    return method(given, *args, **kwargs)


def _ensure_weights_fit(trainer: Any, path: Path) -> None:
    """Raise UsageError where no key of the weights is one of the model, behind a wrapper's name: the
    Trainer would warn, and train on from random weights.
    """
    if trainer.accelerator.distributed_type in SHARDED:
        return
    own = trainer.model.state_dict().keys()
    for entry in model_entries(scan_folder(path), None):
        if entry.chain and own and own.isdisjoint(entry.shapes):
            raise UsageError(
                f"cannot resume from {path}: no key of {entry.label} matches the model "
                f"({count_of(len(entry.shapes), 'key')}, all with the prefix "
                f"{'.'.join(entry.chain)}); next: {command('check', path)}"
            )


def load_states(trainer: Any, method: Method, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Guard ``Trainer._load_optimizer_and_scheduler``: restore the run state of this process after
    them.
    """
    result = method(checkpoint, *args, **kwargs)
    _exact.pop(trainer, None)
    if checkpoint is not None:
        _go_on(trainer, Path(checkpoint))
    return result


def load_random_states(
    trainer: Any, method: Method, checkpoint: Any, *args: Any, **kwargs: Any
) -> Any:
    """Guard ``Trainer._load_rng_state``: in an epoch that goes on from its position in the run state,
    this has brought the generators further already.

    The Trainer sets them when a whole group of batches has been fetched. A dataset that draws
    random numbers would draw those of all but the first of them again. Between two epochs the file
    of the Trainer is too old: it is written before the states of callbacks are asked for, which may
    draw.
    """
    if trainer not in _exact:
        return method(checkpoint, *args, **kwargs)
    if loader_positions.is_going_on(trainer.accelerator):
        return None
    if (at_end := _exact[trainer]) is None:
        return method(checkpoint, *args, **kwargs)
    restore(at_end)
    return None


def _go_on(trainer: Any, checkpoint: Path) -> None:
    accelerator = trainer.accelerator
    if other_processes(checkpoint, _processes()[0]) is not None or not accelerator._dataloaders:
        return  # ``train`` has said so
    if (
        not (checkpoint / run_state_name(0)).exists()
        and not (checkpoint / run_state_name(accelerator.process_index)).exists()
    ):
        if _is_first():
            _log.warning(
                "%s was saved without ckptfix: a dataset that draws random numbers "
                "will draw different ones",
                checkpoint,
            )
        return
    skips = not trainer.args.ignore_data_skip
    left = {Part.SCHEDULERS.value}  # the Trainer prepares none, and has loaded its own
    if not skips:
        left.add(Part.DATALOADERS.value)
    loaded = run_state.Loaded(frozenset(left))
    if not run_state.go_on_and_report(accelerator, checkpoint, loaded) and skips:
        is_of_end = run_state.read(checkpoint, accelerator.process_index)["version"] > 1
        _exact[trainer] = capture() if is_of_end else None


def _found(folder: Path, given: Any) -> list[Candidate]:
    """Return the checkpoints that a resume can take: those of the folder, or the one that was asked
    for.
    """
    if given is None:
        return []
    if given is True:
        return list(_candidates(folder)) if folder.is_dir() else []
    path = Path(given)
    if not path.is_dir():
        return []  # the Trainer's own error says what is not there
    number = checkpoint_number(path.name, TRAINER) or 0
    problem = resume_problem(path) if (path / TRAINER_STATE).exists() else _NO_STATE
    return [_for_this_run(Candidate(path=path, number=number, problem=problem), _siblings(path))]


def _candidates(folder: Path) -> tuple[Candidate, ...]:
    """Return the checkpoints in a folder, newest first; what this process must have and lacks is a
    problem, too.

    Older ones than the newest without a problem are judged by their names and headers: only where
    another process lacks it is one of them taken, and a run may have a thousand.
    """
    named = numbered(folder, (TRAINER,)).get(TRAINER, ())
    paths = [on_disk(path) for _, path in named]
    found: list[Candidate] = []
    for number, path in named:
        look = judge if any(one.problem is None for one in found) else examine
        found.append(_for_this_run(look(path, number), paths))
    return tuple(found)


def _siblings(path: Path) -> list[Path]:
    """Return the numbered checkpoints in the folder of one of them, newest first."""
    return [
        on_disk(other) for _, other in numbered(path.absolute().parent, (TRAINER,)).get(TRAINER, ())
    ]


def _for_this_run(candidate: Candidate, siblings: Sequence[Path]) -> Candidate:
    """Return a checkpoint with what this run lacks in it; states that were removed since the save
    may be allowed.
    """
    problem, path = candidate.problem, on_disk(candidate.path)
    if problem == NO_OPTIMIZER or (problem is not None and _lacks_states_alone(path)):
        problem = None
    problem = problem or _without_weights(path) or _lacking(path, siblings)
    return replace(candidate, problem=problem)


def _without_weights(path: Path) -> str | None:
    """Return the problem of a node's own disk, where the Trainer has written no more than states of
    its ranks.
    """
    try:
        return None if holds_weights(path, os.listdir(path)) else f"{NO_WEIGHTS} on this disk"
    except OSError as error:
        return described(error)


def _lacks_states_alone(path: Path) -> bool:
    """Return whether all that is missing of a save are states that the Trainer can start anew."""
    manifest = usable_manifest(path)
    if manifest is None or not manifest.is_of_a_save or mixed(path):
        return False
    gone = [(one, parse_file_name(one.name)) for one in not_as_saved(path, manifest)]
    return all(one.have is None and name is not None and name.role in _PARTS for one, name in gone)


def _lacking(path: Path, siblings: Sequence[Path]) -> str | None:
    """Return in words the required states that are missing, None when there are none."""
    required = [one for one in _missing(path, siblings) if _requirement(one) is Requirement.REQUIRE]
    if not required:
        return None
    return f"{_in_words(required)} (to allow it: {_option()})"


def _option() -> str:
    """Return what to type to start states anew that a checkpoint lacks."""
    return as_given(
        "patch_accelerate(missing_states='warn')", "ckptfix run --missing-states warn SCRIPT"
    )


def _missing(path: Path, siblings: Sequence[Path]) -> tuple[MissingState, ...]:
    processes, ranks = _processes()
    try:
        return missing_states(path, processes=processes, ranks=ranks, siblings=siblings)
    except OSError:  # removed meanwhile: no longer a checkpoint
        return ()


def _requirement(state: MissingState) -> Requirement:
    if not _settings:
        require_states(None)
    return _settings["policy"].requirement(_PARTS[state.role])


def _in_words(missing: Sequence[MissingState]) -> str:
    if is_model_alone(missing):
        return (
            "it contains only the model, as with save_only_model=True, and everything else "
            "would start over"
        )
    are = "is" if len(missing) == 1 and " " not in missing[0].name else "are"
    return (
        f"{', '.join(one.name for one in missing)} {are} missing, and the Trainer would "
        "silently reset that state"
    )


def _together(own: Candidate, views: Sequence[Sequence[Candidate]]) -> Candidate:
    """Return a checkpoint with its first problem on any process."""
    for rank, view in enumerate(views):
        other = next((one for one in view if one.path.name == own.path.name), None)
        problem = "it is not on this disk" if other is None else other.problem
        if problem is not None:
            where = f"rank {rank}: " if problem != own.problem else ""
            return replace(own, problem=f"{where}{problem}")
    return own


def _newest(folder: Path, found: Sequence[Candidate]) -> Candidate:
    known = {candidate.path.name: candidate for candidate in found}

    def look(path: AnyPath, number: int) -> Candidate:
        return known.get(path.name) or Candidate(
            path=path, number=number, problem="it was saved in the meantime"
        )

    choice = choose(folder, (TRAINER,), look)
    if choice is not None and choice.proof:
        raise UsageError(contradicted(folder, choice))
    best = choice.best if choice is not None else None
    if best is None:
        # check knows no policy: to it a checkpoint without random states is complete.
        is_allowed = any(_option() in (one.problem or "") for one in found)
        step = _option() if is_allowed else command("check", folder, "", "-r")
        raise UsageError(
            f"no complete checkpoint in {folder} ({problems_in(found)}); next: {step}; to "
            "start from scratch, move these folders away"
        )
    broken = [one for one in found if one.number > best.number]
    if broken and _is_first():
        warn_caller(f"{folder}: chose {best.path.name} and passed over {problems_in(broken)}")
    return best


def _instead(path: Path) -> str:
    folder = path.absolute().parent
    others = [one for one in _candidates(folder) if one.path.name != path.name]
    other = newest_complete(others)
    if other is None:
        return command("check", path)
    return f"resume_from_checkpoint={str(folder / other.path.name)!r}, which is complete"


def _warn_of_inexact(path: Path) -> None:
    """Warn of what makes a resumed run another one, though the policy allows it."""
    if not _is_first():
        return
    warned = [
        one for one in _missing(path, _siblings(path)) if _requirement(one) is Requirement.WARN
    ]
    reasons = [_in_words(warned)] if warned else []
    if (other := other_processes(path, _processes()[0])) is not None:
        reasons.append(other)
    if reasons:
        warn_caller(f"{path}: the resumed run is not bit-exact: {'; '.join(reasons)}")


def _processes() -> tuple[int, range]:
    """Return the number of processes, and the ranks of this node: their random states must lie on
    its disk.
    """
    if PartialState._shared_state:
        state = PartialState()
        processes, rank, local = (
            state.num_processes,
            state.process_index,
            state.local_process_index,
        )
    else:
        processes, rank, local = (_number(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
        processes = max(1, processes)
    if processes == 1:
        return 1, range(1)
    here = _number("LOCAL_WORLD_SIZE")
    first = rank - local
    return processes, (
        range(first, min(first + here, processes)) if here > local else range(rank, rank + 1)
    )


def _is_first() -> bool:
    if PartialState._shared_state:
        return bool(PartialState().is_main_process)
    return _number("RANK") == 0


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0

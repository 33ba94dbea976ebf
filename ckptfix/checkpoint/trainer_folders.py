"""The checkpoint folders of transformers' Trainer: what it writes last, and the states that it goes
on without.

The Trainer loads an optimizer only together with a scheduler, and random states only where their
file exists. Without them it starts new ones and says nothing, so the resumed run is another one.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name, weights_names
from ckptfix.checkpoint.folder_names import TRAINER, checkpoint_number, parse_folder_name
from ckptfix.checkpoint.hidden_files import hidden_from_trainer
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, broken_config
from ckptfix.checkpoint.roles import Role
from ckptfix.storage.files import AnyPath, absolute, names_in
from ckptfix.storage.paths import JOURNAL, leads_nowhere, unreadable
from ckptfix.storage.reading import read_start
from ckptfix.wording import count_of, first_few, human_size

_MAX_STATE = 256 << 20
_HEAD = 64 << 10
_HISTORY = b'"log_history"'
"""The first long value of the file. The Trainer sorts the keys, so ``epoch`` and ``global_step``
come before it.
"""
_JSON_SPACES = " \t\n\r"
_AT_CUT = 16
"""Characters before a cut where json complains of the cut word, unless it complains of a string
that stays open.
"""
_OF_DEEPSPEED = re.compile("global_step[0-9]+")
"""Folder of DeepSpeed's own checkpoint, which holds optimizer and scheduler."""

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"

NO_OPTIMIZER = f"{_SCHEDULER} without {_OPTIMIZER}, which the Trainer writes first"
"""The problem of a folder that lacks nothing but a state which the Trainer can start anew."""


class MissingState(NamedTuple):
    """A state that a checkpoint lacks: its role, and the name of its file, or of several."""

    role: Role
    name: str


def trainer_problem(checkpoint: AnyPath, *, complete: bool = True) -> str | None:
    """Return why the Trainer did not finish a checkpoint, None for a complete one.

    ``complete``: as of ``trainer_progress``. Raises FileNotFoundError when there is no
    ``trainer_state.json``, which it writes last.
    """
    names = set(names_in(checkpoint))
    if TRAINER_STATE not in names:
        raise FileNotFoundError(TRAINER_STATE)
    if problem := trainer_progress(checkpoint, complete=complete).problem:
        return f"{TRAINER_STATE}: {problem}"
    has_folders = any(path.is_dir() and path.name != JOURNAL for path in checkpoint.iterdir())
    if _SCHEDULER in names and not names & {_OPTIMIZER, "optimizer.bin"} and not has_folders:
        return NO_OPTIMIZER
    if CONFIG in names and (broken := broken_config(checkpoint / CONFIG)):
        return f"{CONFIG}: {broken}"
    for file in hidden_from_trainer(checkpoint, names):
        if file.is_certain:
            return f"no {file.wanted}: {file.known_by}"
    return None


def adapter_without_config(names: Collection[str]) -> str | None:
    """Return the weights of an adapter in a Trainer's folder without ``adapter_config.json``, None
    for none.

    The Trainer resumes, as it has the config in memory; ``PeftModel.from_pretrained`` fails (peft
    0.21).
    """
    if {ADAPTER, CONFIG}.isdisjoint(names):
        return min(set(weights_names("peft")).intersection(names), default=None)
    return None


def lost_weights(names: Collection[str]) -> str:
    """Return the name of the weights of a Trainer's folder that has none, as its config shows it.

    ``_load_from_checkpoint`` (transformers 5.23) ends with "Can't find a valid checkpoint".
    """
    is_adapter = ADAPTER in names and CONFIG not in names
    return weights_names("peft" if is_adapter else "transformers")[0]


def missing_states(
    checkpoint: AnyPath,
    *,
    processes: int,
    ranks: Collection[int],
    siblings: Collection[AnyPath] = (),
) -> tuple[MissingState, ...]:
    """Return the states that a complete checkpoint lacks for the same number of processes to go on
    exactly.

    ``processes``: of the run that loads it. ``ranks``: those whose random states must be on this
    disk. ``siblings``: other checkpoints of the run, newest first. Files that only another number
    of processes needs are not missing. Raises OSError.
    """
    names = names_in(checkpoint)
    lost = [
        random_states(rank if processes > 1 else None)
        for rank in _lost_ranks(checkpoint, processes, ranks, siblings)
    ]
    return missing_among(names, lost, has_deepspeed=any(map(_OF_DEEPSPEED.fullmatch, names)))


def missing_among(
    names: Collection[str], lost: Sequence[str], *, has_deepspeed: bool
) -> tuple[MissingState, ...]:
    """Return the states that a folder with these names lacks. ``lost``: the missing files of random
    states.

    ``has_deepspeed``: DeepSpeed's own checkpoint holds the optimizer, and its scheduler.
    """
    found = []
    if not has_deepspeed and not any(map(_is_optimizer, names)):
        found.append(MissingState(Role.OPTIMIZER, _OPTIMIZER))
    if not has_deepspeed and _SCHEDULER not in names:
        found.append(MissingState(Role.SCHEDULER, _SCHEDULER))
    if lost:
        found.append(MissingState(Role.RNG_STATE, first_few(lost)))
    return tuple(found)


def _is_optimizer(name: str) -> bool:
    """Return whether a file or folder holds an optimizer, by whichever of the Trainer's strategies
    it was saved.
    """
    parsed = parse_file_name(name) or parse_folder_name(name)
    if parsed is not None and parsed.role is Role.OPTIMIZER:
        return True
    return "optimizer" in name and name.endswith((".pt", ".bin"))


def trainer_step(checkpoint: AnyPath) -> int:
    """Return the step of a checkpoint, by its ``trainer_state.json``. Raises as ``json`` and files
    do.
    """
    # The Trainer reads UTF-8 alone; of bytes json takes UTF-16 and UTF-32, too.
    text = (read_start(checkpoint / TRAINER_STATE, _MAX_STATE) or b"").decode()
    return int(json.loads(text)["global_step"])


class TrainerProgress(NamedTuple):
    """The step and the epoch of a checkpoint; None where they are not recorded. ``problem``: why,
    in words.

    ``is_broken``: the Trainer's resume cannot read the file. ``is_wrong``: it reads the file, and
    fails or resumes at another step. ``unchecked``: the part that was not read, in words.
    """

    step: int | None = None
    epoch: float | None = None
    problem: str = ""
    is_broken: bool = False
    is_wrong: bool = False
    unchecked: tuple[str, ...] = ()


def trainer_progress(checkpoint: AnyPath, *, complete: bool = False) -> TrainerProgress:
    """Return what the head of ``trainer_state.json`` records; its history can have a million lines.

    ``complete``: read all of it.
    """
    limit = _MAX_STATE if complete else _HEAD
    try:
        data = read_start(checkpoint / TRAINER_STATE, limit) or b""
    except OSError as error:
        lost = leads_nowhere(checkpoint / TRAINER_STATE)
        return TrainerProgress(
            problem=lost or unreadable(checkpoint / TRAINER_STATE, error), is_broken=bool(lost)
        )
    is_cut = len(data) == limit
    help_ = "" if complete else "; ckptfix check --data reads the rest"
    unread = (f"{TRAINER_STATE} after its first {human_size(limit)}{help_}",) if is_cut else ()
    state, broken = _object_in(data, is_cut=is_cut)
    if broken:
        return TrainerProgress(problem=broken, is_broken=True, unchecked=unread)
    if state is None:
        head = data.partition(_HISTORY)[0].rstrip().removesuffix(b",") + b"}"
        try:
            state = json.loads(head)
        except ValueError:
            return TrainerProgress(
                problem=f'no "global_step" in its first {human_size(limit)}', unchecked=unread
            )
    problem = _wrong_step(state, checkpoint_number(absolute(checkpoint).name, TRAINER))
    step, epoch = state.get("global_step"), state.get("epoch")
    is_epoch = (
        isinstance(epoch, int | float) and not isinstance(epoch, bool) and 0 <= epoch < 1 << 53
    )
    return TrainerProgress(
        step=step if _is_count(step) else None,
        epoch=epoch if is_epoch else None,
        problem=problem,
        is_wrong=bool(problem),
        unchecked=unread,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _wrong_step(state: Mapping[str, Any], number: int | None) -> str:
    """Return why the Trainer's resume fails or begins at another step, "" where it does not.

    ``number``: the step in the name of the folder.
    """
    if "global_step" not in state:
        return 'no "global_step", so the Trainer starts again at step 0'
    step = state["global_step"]
    if not _is_count(step):
        return '"global_step" is not a valid count'
    if number is not None and step != number:
        return (
            f'"global_step" is {step} (expected {number}, as in the name of the folder), so the '
            f"Trainer resumes from step {step}"
        )
    return ""


def _object_in(data: bytes, *, is_cut: bool) -> tuple[dict[str, Any] | None, str]:
    """Return the object in a ``trainer_state.json``, None where the cut hides it; and why the
    Trainer cannot read it.

    ``TrainerState.load_from_json`` (transformers 5.23) takes an object in UTF-8, and nothing else.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(data) - _AT_CUT:
            return None, f"not UTF-8 at byte {error.start}"
        text = data[: error.start].decode()
    if not text.lstrip(_JSON_SPACES).startswith("{"):
        return None, "not a JSON object" if text else "empty"
    try:
        return json.loads(text), ""
    except RecursionError:
        return None, "nested too deeply"
    except json.JSONDecodeError as error:
        is_of_cut = error.msg.startswith("Unterminated string") or error.pos > len(text) - _AT_CUT
        return None, (
            "" if is_cut and is_of_cut else f"not JSON at line {error.lineno}, column {error.colno}"
        )
    except ValueError:
        # int() of Python takes up to 4300 digits.
        return None, "a number is too long"


def is_model_alone(missing: Collection[MissingState]) -> bool:
    """Return whether a checkpoint lacks what one saved with ``save_only_model=True`` lacks."""
    return {one.role for one in missing} == {Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE}


def other_processes(checkpoint: AnyPath, processes: int) -> str | None:
    """Return in words that another number of processes saved a checkpoint, None when it was as many
    or is not known.
    """
    saved = _processes_of(checkpoint)
    if saved in (None, processes):
        return None
    return f"saved with {count_of(saved or 0, 'process')}, now {processes}"


def _processes_of(checkpoint: AnyPath) -> int | None:
    manifest = usable_manifest(checkpoint)
    if manifest is not None and manifest.is_of_a_save:
        return manifest.world_size
    ranks = _ranks_in(checkpoint)
    numbers = [rank for rank in ranks if rank is not None]
    return max(numbers) + 1 if numbers else 1 if ranks else None


def _lost_ranks(
    checkpoint: AnyPath, processes: int, ranks: Collection[int], siblings: Collection[AnyPath]
) -> list[int]:
    """Return the ranks whose random states are lost; another number of processes at the save
    explains their absence.
    """
    own = _ranks_in(checkpoint)
    if processes == 1:
        return [] if own else [0]
    lost = [rank for rank in ranks if rank not in own]
    manifest = usable_manifest(checkpoint)
    if manifest is not None and manifest.is_of_a_save:
        return lost if manifest.world_size == processes else []
    numbers = {rank for rank in own if rank is not None}
    if not lost or (own and not numbers):  # of a single process
        return []
    # One alone has no number, and none is left out.
    if len(numbers) < 2 or min(lost) < max(numbers):
        return lost
    before = next((one for one in siblings if _is_older(one, checkpoint)), None)
    return lost if before is not None and set(ranks) <= _ranks_in(before) else []


def _is_older(one: AnyPath, other: AnyPath) -> bool:
    numbers = (checkpoint_number(one.name, TRAINER), checkpoint_number(other.name, TRAINER))
    return numbers[0] is not None and numbers[1] is not None and numbers[0] < numbers[1]


def _ranks_in(checkpoint: AnyPath) -> set[int | None]:
    """Return the ranks whose random states exist; None is for a run of one process."""
    parsed = filter(None, map(parse_file_name, names_in(checkpoint)))
    return {one.rank for one in parsed if one.role is Role.RNG_STATE and one.is_of_trainer}


def random_states(rank: int | None) -> str:
    """Return the name of the Trainer's file with the random states of a rank; None: of a run of one
    process.
    """
    return "rng_state.pth" if rank is None else f"rng_state_{rank}.pth"

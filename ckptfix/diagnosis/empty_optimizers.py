"""Optimizers without a single moment in runs that made steps, by the files next to them.

Measured with torch 2.13: all optimizers but SGD without momentum make states in their first step, and never drop them.
A save before the first step has none, as has one after steps that fp16 skipped. The Trainer moves its scheduler with
each step that is not skipped. A script may move a scheduler by itself, so that this is a sign and no proof. An earlier
checkpoint with moments shows that the optimizer made steps, unless the script began another one since then.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import TRAINER_STATE, Role
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.neighbours import neighbours
from ckptfix.diagnosis.findings.inconsistent import EmptyOptimizer, LostMoments
from ckptfix.diagnosis.optimizer_kinds import kind_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.formats.pickle_tree import child, is_dict_like
from ckptfix.formats.torch_file import TorchFile
from ckptfix.wording import count_of

_MOST_MOVES = 1 << 53
"""Python refuses to print the largest numbers that a pickle can hold."""


def diagnose_empty_optimizers(
    folder: CheckpointFolder,
    optimizers: Sequence[SavedOptimizer],
    damaged: frozenset[PurePosixPath],
    home: Path,
    step: int | None,
) -> Iterator[EmptyOptimizer]:
    """Yield the optimizers without states that made steps by the files next to them.

    ``damaged``: files with another finding. ``home``: where the checkpoints next to this one are. ``step``: of
    ``trainer_state.json``, None in a folder of accelerate.
    """
    empty = {
        saved.index: saved
        for saved in optimizers
        if saved.path not in damaged and saved.values and _keeps_states(saved) and not _has_states(saved)
    }
    if not empty:
        return
    earlier = _with_states(empty, home)
    moves = _moves(folder)
    for index, saved in empty.items():
        kind, evidence = EmptyOptimizer, ""
        if index in earlier:
            kind, evidence = LostMoments, f"{earlier[index]} before it has them"
        elif step and moves:
            kind, evidence = LostMoments, f"{TRAINER_STATE} is of step {step}"
        elif step:
            evidence = f"{TRAINER_STATE} is of step {step}"
        elif moves and len(optimizers) == 1:
            evidence = f"its scheduler made {count_of(moves, 'step')}"
        if evidence:
            yield kind(path=saved.path, names=(), parameters=len(set(saved.parameters)), evidence=evidence)


def _keeps_states(saved: SavedOptimizer) -> bool:
    """Return whether all param groups are of one of torch's optimizers that needs states after its first step."""
    kinds = [kind_of(options, ()) for options in saved.values]
    return bool(saved.parameters) and all(
        kind is not None and kind.has_exact(options) and bool(kind.scalars or kind.moments_with(options))
        for kind, options in zip(kinds, saved.values, strict=True)
    )


def _has_states(saved: SavedOptimizer) -> bool:
    """Return whether a parameter has a state, or has something else in its place, which is another finding."""
    return any(saved.states.values()) or bool(saved.strangers or saved.unusable)


def _with_states(empty: dict[int, SavedOptimizer], home: Path) -> dict[int, str]:
    """Return the earlier checkpoints in which the optimizers of these positions have states."""
    having: dict[int, str] = {}
    for name, is_earlier, path in neighbours(home):
        # A run may delete it now.
        with suppress(OSError):
            if not is_earlier:
                continue
            there = scan_folder(path, wanted=lambda file: file.role is Role.OPTIMIZER)
            for saved in saved_optimizers(there, ()):
                own = empty.get(saved.index)
                is_same = own is not None and saved.options == own.options and saved.groups == own.groups
                if is_same and any(saved.states.values()):
                    having.setdefault(saved.index, name)
    return having


def _moves(folder: CheckpointFolder) -> int:
    """Return how often the only scheduler of a folder was moved, 0 where that is not known."""
    schedulers = [one for one in folder.components if one.role is Role.SCHEDULER]
    if len(schedulers) != 1 or not isinstance(schedulers[0].content, TorchFile):
        return 0
    state = schedulers[0].content.tree.root
    moves = child(state, "last_epoch") if is_dict_like(state) else None
    return moves if type(moves) is int and 0 < moves < _MOST_MOVES else 0

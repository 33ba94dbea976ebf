"""Optimizers without a single moment in runs that made steps, by the files next to them.

Measured with torch 2.13: all optimizers but SGD without momentum make states in their first step,
and never drop them. A save before the first step has none, as has one after steps that fp16
skipped. The Trainer moves its scheduler with each step that is not skipped. A script may move a
scheduler by itself, so that this is a sign and no proof. An earlier checkpoint with moments shows
that the optimizer made steps, unless the script began another one since then.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import counts_saves
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.inconsistent import EmptyOptimizer, LostMoments
from ckptfix.diagnosis.findings.misplaced import PerhapsUncounted, UncountedSteps
from ckptfix.diagnosis.optimizer_kinds import kind_of
from ckptfix.diagnosis.optimizer_values import FEW_STEPS, made_no_step
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.errors import CkptfixError
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.wording import count_of

_MOST_MOVES = 1 << 53
"""Python refuses to print the largest numbers that a pickle can hold."""


def diagnose_empty_optimizers(case: Case) -> Iterator[EmptyOptimizer]:
    """Yield the optimizers without states that made steps by the files next to them.

    The options of a DCP folder have no values there, so that only an earlier checkpoint shows that
    its optimizer keeps states.
    """
    if case.is_file:
        return
    optimizers, damaged, step = case.optimizers, case.damaged, case.step
    counts = Counter(saved.path for saved in optimizers)
    in_dcp = {state.path for state in case.sharded}
    empty = {
        saved.path: saved
        for saved in optimizers
        if saved.path not in damaged
        and counts[saved.path] == 1
        and (saved.path in in_dcp or _keeps_states(saved))
        and not _has_states(saved)
    }
    if not empty:
        return
    earlier = _with_states(empty, case.neighbours)
    moves = _moves(case.folder)
    for path, saved in empty.items():
        kind, evidence, parameters = EmptyOptimizer, "", len(set(saved.parameters))
        if path in earlier:
            name, trained = earlier[path]
            kind, evidence = LostMoments, f"the earlier {name} has them"
            parameters = parameters or len(trained.states)
        elif path in in_dcp:
            continue
        elif step and moves:
            kind, evidence = LostMoments, f"{TRAINER_STATE} is at step {step}"
        elif step:
            evidence = f"{TRAINER_STATE} is at step {step}"
        elif moves and len(optimizers) == 1:
            evidence = f"its scheduler took {count_of(moves, 'step')}"
        if evidence:
            yield kind(
                path=path,
                names=(),
                parameters=parameters,
                evidence=evidence,
                is_in_dcp=path in in_dcp,
            )


def diagnose_uncounted_steps(case: Case) -> Iterator[UncountedSteps]:
    """Yield the optimizers that made no step by their own count, next to the ``step`` of
    ``trainer_state.json``.

    All but Adagrad make states in their first step, and count it. Of an Adagrad fp16 may have
    skipped every step.
    """
    step = case.step or 0
    if case.is_file or step <= FEW_STEPS:
        return
    kind = UncountedSteps if _moves(case.folder) else PerhapsUncounted
    for saved in case.optimizers:
        is_known = _keeps_states(saved) and any(saved.states.values())
        if is_known and saved.path not in case.damaged and made_no_step(case.folder.root, saved):
            yield kind(path=saved.path, partner=TRAINER_STATE, moves=0, step=step)


def diagnose_empty_bundles(case: Case) -> Iterator[EmptyOptimizer]:
    """Yield the optimizers without states inside files that made steps by a scheduler there, or by
    an earlier file.

    A file whose name differs in another number than those of saves, as ``client_1.pt`` and
    ``fold_1.pt``, may be of another run, which shows nothing for sure.
    """
    bundles = case.bundles
    files = {component.path: component.content for component in case.folder.components}
    trained: defaultdict[tuple[str, str], list[tuple[list[_Number], SavedOptimizer]]] = defaultdict(
        list
    )
    for bundle in bundles:
        for saved in bundle.optimizers:
            if _has_states(saved):
                trained[_DIGITS.sub("#", str(saved.path)), saved.key].append(
                    (_numbers(saved.path), saved)
                )
    for of_name in trained.values():
        of_name.sort(key=itemgetter(0), reverse=True)
    for bundle in bundles:
        for saved in bundle.optimizers:
            if _has_states(saved) or not _keeps_states(saved):
                continue
            numbers = _numbers(saved.path)
            before = [
                (_are_of_one_run(numbers_there, numbers), str(there.path))
                for numbers_there, there in trained[_DIGITS.sub("#", str(saved.path)), saved.key]
                if numbers_there != numbers
                and all(
                    first <= second for first, second in zip(numbers_there, numbers, strict=True)
                )
                and (saved.options, saved.groups) == (there.options, there.groups)
            ]
            earlier = next((path for is_of_run, path in before if is_of_run), "")
            file = files[saved.path]
            moves = (
                _moves_inside(file)
                if isinstance(file, TorchFile) and len(bundle.optimizers) == 1
                else 0
            )
            if earlier:
                evidence = f"the earlier {earlier} has them"
            elif moves:
                evidence = f"its scheduler took {count_of(moves, 'step')}"
            elif before:
                evidence = f"{before[0][1]} has them"
            else:
                continue
            yield (LostMoments if earlier else EmptyOptimizer)(
                path=saved.path,
                key=saved.key,
                names=(),
                parameters=len(set(saved.parameters)),
                evidence=evidence,
            )


_DIGITS = re.compile(r"\d+")

_Number = tuple[int, bool]
"""A number in a name, and whether it counts saves."""


def _numbers(path: PurePosixPath) -> list[_Number]:
    """Return the numbers in a name such as ``epoch=3-step=120.ckpt``: a later file has none that is
    smaller.

    A number that is the whole name of a file counts saves, too.
    """
    text = str(path)
    return [
        (
            int(match[0][:_MOST_DIGITS]),
            counts_saves(text[: match.start()]) or match[0] == path.stem,
        )
        for match in _DIGITS.finditer(text)
    ]


def _are_of_one_run(numbers: Sequence[_Number], later: Sequence[_Number]) -> bool:
    """Return whether two names differ in numbers alone that count saves."""
    return all(first == second or first[1] for first, second in zip(numbers, later, strict=True))


_MOST_DIGITS = 18


def _keeps_states(saved: SavedOptimizer) -> bool:
    """Return whether all param groups are of one of torch's optimizers that needs states after its
    first step.
    """
    kinds = [kind_of(options, ()) for options in saved.values]
    return bool(saved.parameters) and all(
        kind is not None
        and kind.has_exact(options)
        and bool(kind.scalars or kind.moments_with(options))
        for kind, options in zip(kinds, saved.values, strict=True)
    )


def _has_states(saved: SavedOptimizer) -> bool:
    """Return whether a parameter has a state, or has something else in its place, which is another
    finding.
    """
    return any(saved.states.values()) or bool(saved.strangers or saved.unusable)


def _with_states(
    empty: Mapping[PurePosixPath, SavedOptimizer], neighbours: Neighbours
) -> dict[PurePosixPath, tuple[str, SavedOptimizer]]:
    """Return the earlier checkpoints in which the optimizers of these paths have states, by their
    names.
    """
    having: dict[PurePosixPath, tuple[str, SavedOptimizer]] = {}
    for neighbour in neighbours.spread():
        if not neighbour.is_earlier:
            continue
        # A run may delete it now.
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            there = neighbour.scan(Role.OPTIMIZER, root=root)
            for saved in saved_optimizers(there, scan_dcp_folders(there)):
                own = empty.get(saved.path)
                is_same = (
                    own is not None and saved.options == own.options and _sets(saved) == _sets(own)
                )
                if is_same and any(saved.states.values()):
                    having.setdefault(saved.path, (neighbour.name, saved))
    return having


def _sets(saved: SavedOptimizer) -> list[frozenset[str]]:
    """Return the parameters of each param group. DCP has no order of them in flattened keys."""
    return [frozenset(group) for group in saved.groups]


def _moves(folder: CheckpointFolder) -> int:
    """Return how often the only scheduler of a folder was moved, 0 where that is not known."""
    schedulers = [one for one in folder.components if one.role is Role.SCHEDULER]
    if len(schedulers) != 1 or not isinstance(schedulers[0].content, TorchFile):
        return 0
    return _moves_of(schedulers[0].content.tree.root)


def _moves_inside(file: TorchFile) -> int:
    """Return how often the only scheduler in a file was moved, 0 where that is not known."""
    root = file.tree.root
    values = [
        value for key, value in pairs(root) if type(key) is Text and "sched" in key.value.lower()
    ]
    schedulers = [
        part for value in values for part in items_of(value) or (value,) if is_dict_like(part)
    ]
    return _moves_of(schedulers[0]) if len(schedulers) == 1 else 0


def _moves_of(state: Any) -> int:
    moves = child(state, "last_epoch") if is_dict_like(state) else None
    return moves if type(moves) is int and 0 < moves < _MOST_MOVES else 0

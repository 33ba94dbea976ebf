"""States that the script alone can judge: of data loaders, those that no library reads, and those
of a loader with another number of workers; of a gradient scaler, the one that is off.

torchdata's loader asks for other keys with workers than without, and refuses another number of them
at the first batch (torchdata 0.11). Nothing in a folder shows how many workers a loader has: the
checkpoints next to it do.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.neighbours import Neighbours, are_on_both_sides, next_to_it, scanned
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import content_of, state_problem
from ckptfix.checkpoint.training_states import is_of_torchdata, workers_of_loader
from ckptfix.checkpoint.weights_contents import holds_no_tensor
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.misplaced import ChangedEntry, MisplacedEntry
from ckptfix.formats.torch_file import TorchFile
from ckptfix.wording import count_of


def unjudged_loaders(case: Case) -> Iterator[str]:
    """Yield in words the states that only a data loader of the script can read."""
    for component in case.folder.components:
        content = component.content
        if (
            component.role is Role.DATALOADER
            and isinstance(content, TorchFile)
            and content_of(content) is None
            and not is_of_torchdata(content.tree.root)
            and state_problem(component.name, content) is None
        ):
            yield (
                f"{component.path}: not a state of torchdata's StatefulDataLoader; a load of it "
                "fails at its first batch"
            )


def unjudged_scalers(case: Case) -> Iterator[str]:
    """Yield in words the states of gradient scalers that were off: one that is on refuses them
    (``GradScaler.load_state_dict``, torch 2.13).
    """
    for component in case.folder.components:
        content = component.content
        if component.role is not Role.GRAD_SCALER or not isinstance(content, TorchFile):
            continue
        if holds_no_tensor(content):
            yield (
                f"{component.path}: empty, like the state of a disabled gradient scaler; "
                "load_state fails in a run that enables the scaler"
            )


def exchanged_loaders(folder: CheckpointFolder, neighbours: Neighbours) -> Iterator[MisplacedEntry]:
    """Yield the states of loaders with another number of workers than in all checkpoints next to
    this one.

    At an end of the run the script may have changed the number: a note, unless two files were
    exchanged.
    """
    own = _workers(folder)
    if not own or folder.only is not None:
        return
    saves = neighbours.nearest()
    near: list[Mapping[PurePosixPath, int]] = []
    for _, saved in scanned(saves, Role.DATALOADER):
        there = _workers(saved)
        if there.keys() == own.keys():
            near.append(there)
        if there == own:
            return
    if not near:
        return
    for path, workers in own.items():
        expected = near[0][path]
        if any(there[path] != expected for there in near) or workers == expected:
            continue
        partners = [
            other
            for other in own
            if own[other] == expected and all(there[other] == workers for there in near)
        ]
        if partners and min(partners) < path:
            # It was reported with the other file.
            continue
        if len(near) == 1 and not partners:
            continue
        is_between = are_on_both_sides(save.is_earlier for save in saves)
        is_wrong = bool(partners) or is_between
        yield (MisplacedEntry if is_wrong else ChangedEntry)(
            path=path,
            holds=f"the state of a data loader with {count_of(workers, 'worker')}",
            expected=f"{count_of(expected, 'worker')}, as in {next_to_it(len(near))}",
            effect="the load succeeds, but the first batch fails",
            exchanged_with=str(min(partners)) if partners else "",
        )


def _workers(folder: CheckpointFolder) -> dict[PurePosixPath, int]:
    """Return the number of workers of each loader whose state torchdata's loader reads."""
    states = {
        component.path: workers_of_loader(component.content.tree.root)
        for component in folder.components
        if component.role is Role.DATALOADER and isinstance(component.content, TorchFile)
    }
    return {path: workers for path, workers in states.items() if workers is not None}

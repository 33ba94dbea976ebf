"""Optimizers inside a file with more, as ``torch.save({"model": ..., "optimizer": ...})`` and
Lightning write it.

Each is judged alone. Nothing says which weights are its own: a file has several models, or an
average alone, and those of HiFi-GAN's optimizer are in another file.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import PurePosixPath

from msgspec import Struct

from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import Content, is_surely_of_optimizer, problem_of_optimizer
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.misplaced import EFFECTS_ON_TORCH, UnknownState
from ckptfix.diagnosis.optimizer_kinds import lacking_parts
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, optimizers_in_file
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Node
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import MAX_LIST, optimizers
from ckptfix.wording import list_names

_ROLES = (Role.MODEL, Role.UNKNOWN, Role.CUSTOM)
"""Roles of files whose content a script chooses. Every other role is judged by what its name
promises.
"""


class Bundle(Struct, frozen=True, kw_only=True):
    """A file that is not an optimizer's by its name, and its optimizers.

    ``findings``: what is wrong with them. ``unread``: the number of those that are not judged.
    """

    path: PurePosixPath
    optimizers: tuple[SavedOptimizer, ...]
    findings: tuple[Finding, ...]
    unread: int


def bundles_of(
    folder: CheckpointFolder, unreliable: Iterable[PurePosixPath] = ()
) -> Iterator[Bundle]:
    """Yield the files of a scanned folder that have optimizers, and are not an optimizer's by their
    name.

    ``unreliable``: files whose headers do not show what they were saved with.
    """
    for component in folder.components:
        file = component.content
        if (
            component.role not in _ROLES
            or component.path in unreliable
            or not isinstance(file, TorchFile)
        ):
            continue
        try:
            places = list(islice(optimizers(file.tree.root), MAX_LIST + 1))
        except FormatError:
            # Another finding is about it.
            continue
        if places:
            yield _bundle(component, file, places)


def unchecked_bundles(bundles: Sequence[Bundle]) -> Iterator[str]:
    """Yield in words what the optimizers of these files are not judged by."""
    if bundles:
        yield f"optimizers inside {_names(bundles)} against the weights, the scheduler and other saves"
    unread = [bundle for bundle in bundles if bundle.unread]
    if unread:
        words = f"some differ from torch's state_dict(), or there are more than {MAX_LIST} of them"
        yield f"optimizers inside {_names(unread)}: {words}"


def _names(bundles: Iterable[Bundle]) -> str:
    return list_names(str(bundle.path) for bundle in bundles)


def _bundle(
    component: Component, file: TorchFile, places: Sequence[tuple[tuple[str, ...], Node]]
) -> Bundle:
    malformed: list[Finding] = []
    sound = []
    for keys, node in places[:MAX_LIST]:
        problem = problem_of_optimizer(node) if is_surely_of_optimizer(node) else ""
        if problem:
            malformed.append(
                UnknownState(
                    path=component.path,
                    key=".".join(keys),
                    holds=problem,
                    expected=Content.OPTIMIZER.value,
                    effect=EFFECTS_ON_TORCH[Content.OPTIMIZER],
                )
            )
        else:
            sound.append((keys, node))
    saved = tuple(optimizers_in_file(component, file, sound))
    return Bundle(
        path=component.path,
        optimizers=saved,
        findings=(
            *malformed,
            *chain.from_iterable(map(lacking_parts, saved)),
        ),
        unread=len(places) - len(saved) - len(malformed),
    )

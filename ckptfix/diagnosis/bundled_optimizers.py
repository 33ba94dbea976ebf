"""Optimizers inside a file with more, as ``torch.save({"model": ..., "optimizer": ...})`` and Lightning write it.

Each is judged as the file of an optimizer is. It is compared with the weights of its own file alone: a folder often has
the files of many epochs. Where a file has several models, all of them count as its weights, because nothing says which
of them an optimizer trains.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice
from math import prod
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.state_contents import Content, is_surely_of_optimizer, problem_of_optimizer
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.file_damage import EFFECTS_ON_TORCH
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import UnknownState
from ckptfix.diagnosis.optimizer_states import Weights, judge
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare, optimizers_in_file
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Node, Text, every_node
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import MAX_LIST, NameList, PickledStateDict, name_lists, optimizers
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.tensors.parameter_names import SHAPED
from ckptfix.wording import list_names

_ROLES = (Role.MODEL, Role.UNKNOWN, Role.CUSTOM)
"""Roles of files whose content a script chooses. Every other role is judged by what its name promises."""

_NO_WEIGHTS = Weights(shapes={}, counts=Counter(), every=frozenset(), tensors=0, is_complete=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A file that is not an optimizer's by its name, and its optimizers.

    ``malformed``: the keys of those that no optimizer of torch loads, and what they are. ``unread``: the number of
    those that are not judged. ``models``: how many models of other keys or shapes are in it. ``weights``: all of
    them, None where they cannot be compared.
    """

    path: PurePosixPath
    optimizers: tuple[SavedOptimizer, ...]
    malformed: Mapping[str, str]
    unread: int
    models: int
    weights: Weights | None = field(repr=False)


def bundles_of(folder: CheckpointFolder) -> Iterator[Bundle]:
    """Yield the files of a scanned folder that have optimizers, and are not an optimizer's by their name."""
    for component in folder.components:
        if component.role in _ROLES and isinstance(component.content, TorchFile):
            try:
                places = list(islice(optimizers(component.content.tree.root), MAX_LIST + 1))
                if places:
                    yield _bundle(component, component.content, places)
            except FormatError:
                continue  # another finding is about it


def _bundle(component: Component, file: TorchFile, places: Sequence[tuple[tuple[str, ...], Node]]) -> Bundle:
    malformed = {
        ".".join(keys): problem
        for keys, node in places[:MAX_LIST]
        if is_surely_of_optimizer(node) and (problem := problem_of_optimizer(node))
    }
    sound = [(keys, node) for keys, node in places[:MAX_LIST] if ".".join(keys) not in malformed]
    saved = tuple(optimizers_in_file(component, file, sound))
    models = _models(file)
    return Bundle(
        path=component.path,
        optimizers=saved,
        malformed=malformed,
        unread=len(places) - len(saved) - len(malformed),
        models=len({_form(model) for model, _ in models}),
        weights=_weights(file, [node for _, node in places], models),
    )


def diagnose_bundles(bundles: Iterable[Bundle]) -> Iterator[Finding]:
    """Yield what is wrong with the optimizers of these files."""
    for bundle in bundles:
        for key, holds in bundle.malformed.items():
            yield UnknownState(
                path=bundle.path,
                key=key,
                holds=holds,
                expected=Content.OPTIMIZER.value,
                effect=EFFECTS_ON_TORCH[Content.OPTIMIZER],
            )
        for saved in bundle.optimizers:
            weights = bundle.weights
            if weights is None or _is_flat(saved, weights):
                weights = _NO_WEIGHTS
            names = {name: name for name in saved.states} if saved.is_named else saved.names
            yield from judge(saved, weights, names)


def unchecked_bundles(bundles: Sequence[Bundle]) -> Iterator[str]:
    """Yield in words what the optimizers of these files are not judged by."""
    unread = [bundle for bundle in bundles if bundle.unread]
    if unread:
        words = f"some are not of the form of torch's state_dict(), or more than {MAX_LIST}"
        yield f"optimizers inside {_names(unread)}: {words}"
    alone = [bundle for bundle in bundles if bundle.optimizers and bundle.weights is None]
    if alone:
        yield f"optimizers inside {_names(alone)} against weights: the file has no model's state dict that can be read"
    flat = [
        bundle
        for bundle in bundles
        if bundle.weights is not None and any(_is_flat(saved, bundle.weights) for saved in bundle.optimizers)
    ]
    if flat:
        yield f"optimizers inside {_names(flat)} against weights: their moments are flattened or cut"
    several = [bundle for bundle in bundles if bundle.weights is not None and bundle.models > 1]
    if several:
        yield f"which model each optimizer inside {_names(several)} trains: the file has several"


def _names(bundles: Iterable[Bundle]) -> str:
    return list_names(str(bundle.path) for bundle in bundles)


def _models(file: TorchFile) -> list[tuple[PickledStateDict, bool]]:
    """Return the state dicts that look like a module's, each with whether it surely has all of the module's keys.

    A dict comprehension that leaves some out leaves ``_metadata`` out, too.
    """
    places = name_lists(file.tree)
    in_metadata = {place.path for place in places if place.kind == "metadata"}
    paths = {place.path for place in places if _is_of_model(place)}
    return [(one, one.path in in_metadata) for one in file.state_dicts if one.path in paths and one.tensors]


def _is_of_model(place: NameList) -> bool:
    return place.kind == "state dict" and place.is_model


def _weights(
    file: TorchFile, without: Sequence[Node], models: Sequence[tuple[PickledStateDict, bool]]
) -> Weights | None:
    """Return the weights of a file's models, None where no model is there or something in the file may hold others.

    Tensors next to the models count as weights, too: they may be parameters of a loss. Two dicts of the same keys and
    shapes count twice: they may be a model and its average, or the two generators of one optimizer in CycleGAN.
    """
    shapes: dict[str, set[Shape]] = {}
    for model, _ in models:
        if any(not key.endswith("_extra_state") for key in model.opaque_keys):
            return None
        for tensor in model.tensors:
            shapes.setdefault(bare(tensor.fqn), set()).add(tensor.shape)
    counts = _shapes(file, without) if models else None
    if counts is None:
        return None
    complete = {_form(model) for model, is_whole in models if is_whole}
    return Weights(
        shapes=shapes,
        counts=counts,
        every=frozenset(counts),
        tensors=counts.total(),
        is_complete=True,
        are_of_file=True,
        are_trained=any(_form(model) not in complete for model, _ in models),
    )


def _form(model: PickledStateDict) -> frozenset[tuple[str, Shape]]:
    """Return the keys and shapes of a model, which an average of it has, too."""
    return frozenset((bare(tensor.fqn), tensor.shape) for tensor in model.tensors)


def _shapes(file: TorchFile, without: Sequence[Node]) -> Counter[Shape] | None:
    """Return how often each shape occurs among the tensors outside of these nodes, None where one cannot be read."""
    known = storages(file.tree)
    shapes: Counter[Shape] = Counter()
    for node in every_node(file.tree.root, callees=False, without=without):
        if is_tensor(node):
            tensor = read_tensor(_NO_KEY, node, known)
            if tensor is None:
                return None
            shapes[tensor.shape] += 1
    return shapes


_NO_KEY = Text("", 0, 0)


def _is_flat(saved: SavedOptimizer, weights: Weights) -> bool:
    """Return whether the moments are of parameters that were flattened, as those of FSDP and of fairseq's fp16."""
    moments = [
        shape
        for states in saved.states.values()
        for state, shape in states.items()
        if state in SHAPED and shape is not None and prod(shape) != 1
    ]
    dimensions = max(map(len, weights.every), default=0)
    return max(map(len, moments), default=2) < 2 <= dimensions and not weights.every.issuperset(moments)

"""Optimizers inside a file with more, as ``torch.save({"model": ..., "optimizer": ...})`` and
Lightning write it.

Each is judged as the file of an optimizer is, and compared with the tensors of its own file: a
folder often has the files of many epochs. Where a file has several models, all of them count,
because nothing says which of them an optimizer trains. Its weights may as well be in another file,
as those of HiFi-GAN's generator, or nowhere: scripts save an average alone, fold ``weight_norm``
into the weights, or leave out what is frozen. So matrices decide whether weights belong to an
optimizer at all: vectors of one length are in every model.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_kinds import Content, is_surely_of_optimizer
from ckptfix.checkpoint.training_states import problem_of_optimizer
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import MismatchedMoments, UnsavedParameters
from ckptfix.diagnosis.findings.misplaced import EFFECTS_ON_TORCH, UnknownState
from ckptfix.diagnosis.optimizer_contradictions import without_reduced
from ckptfix.diagnosis.optimizer_states import Weights, judge
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare, optimizers_in_file
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_arrays import is_array, shape_of_array
from ckptfix.formats.pickle_tree import Node, Text, every_node
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import (
    MAX_LIST,
    NameList,
    PickledStateDict,
    name_lists,
    optimizers,
)
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.lazy import once
from ckptfix.wording import list_names

_ROLES = (Role.MODEL, Role.UNKNOWN, Role.CUSTOM)
"""Roles of files whose content a script chooses. Every other role is judged by what its name
promises.
"""

_WITHOUT_WEIGHTS = (
    ".csv", ".jpg", ".json", ".jsonl", ".log", ".md", ".png", ".py", ".toml", ".txt", ".yaml",
    ".yml", "last_checkpoint",
)  # fmt: skip
"""Endings of files that hold no weights. Any other may: HiFi-GAN's ``g_00010000`` has no ending.

Detectron2 writes the name of the last checkpoint into ``last_checkpoint``.
"""

_UNREAD = "the file has tensors of a kind that ckptfix does not read"
_ALONE = "the file has no weight matrices"
_WITHOUT_MOMENTS = "they have no moments with shapes to compare"
_OF_OTHER_SHAPES = "their class may keep moments of different shapes"
_FLAT = "their moments are vectors, like flattened moments"
_FOREIGN = (
    "few of their moments have the shape of a tensor in the file, so their weights may be elsewhere"
)
_INCOMPLETE = (
    "no tensor in the file has the shape of some moments, so those weights may be elsewhere"
)
_UNTRAINED = "some weights have no moments: they are frozen or belong to another model"
_NOT_COMPARED = (_UNREAD, _ALONE, _WITHOUT_MOMENTS, _OF_OTHER_SHAPES, _FLAT, _FOREIGN, _INCOMPLETE)


class Bundle(Struct, frozen=True, kw_only=True):
    """A file that is not an optimizer's by its name, and its optimizers.

    ``findings``: what is wrong with them. ``unread``: the number of those that are not judged.
    ``uncompared``: why an optimizer is not compared with the tensors of the file -> the keys that
    lead to it. ``models``: the number of models in the file.
    """

    path: PurePosixPath
    optimizers: tuple[SavedOptimizer, ...]
    findings: tuple[Finding, ...]
    unread: int
    uncompared: Mapping[str, Sequence[str]]
    models: int


def bundles_of(
    folder: CheckpointFolder, unreliable: Iterable[PurePosixPath] = ()
) -> Iterator[Bundle]:
    """Yield the files of a scanned folder that have optimizers, and are not an optimizer's by their
    name.

    ``unreliable``: files whose headers do not show what they were saved with.
    """
    files = _Files(folder)
    for component in folder.components:
        if component.role in _ROLES and component.path not in unreliable:
            contents = files.contents(component)
            if contents is not None and contents.optimizers:
                yield _bundle(files, component, contents)


def unchecked_bundles(bundles: Sequence[Bundle]) -> Iterator[str]:
    """Yield in words what the optimizers of these files are not judged by."""
    unread = [bundle for bundle in bundles if bundle.unread]
    if unread:
        words = f"some differ from torch's state_dict(), or there are more than {MAX_LIST} of them"
        yield f"optimizers inside {_names(unread)}: {words}"
    for why in dict.fromkeys(why for bundle in bundles for why in bundle.uncompared):
        places = [
            f"{bundle.path}: {key}" if key else str(bundle.path)
            for bundle in bundles
            for key in bundle.uncompared.get(why, ())
        ]
        yield f"optimizers inside {list_names(places)} against weights: {why}"
    several = [bundle for bundle in bundles if bundle.models > 1]
    if several:
        yield (
            f"which model each optimizer inside {_names(several)} trains: the file has several "
            "models"
        )


def _names(bundles: Iterable[Bundle]) -> str:
    return list_names(str(bundle.path) for bundle in bundles)


def _bundle(files: "_Files", component: Component, contents: "_Contents") -> Bundle:
    malformed: list[Finding] = []
    sound = []
    for keys, node in contents.optimizers[:MAX_LIST]:
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
    saved = tuple(optimizers_in_file(component, contents.file, sound))
    findings = malformed.copy()
    uncompared: dict[str, list[str]] = {}
    for optimizer in saved:
        comparison = _compare(files, optimizer, contents)
        shapes = {} if comparison.why in _NOT_COMPARED else contents.shapes_by_key
        names = {name: name for name in optimizer.states} if optimizer.is_named else optimizer.names
        weights = Weights(
            shapes=shapes, counts=Counter(), every=frozenset(), tensors=0, is_complete=False
        )
        own = list(judge(optimizer, weights, names))
        findings += own
        # Moments that are known to be wrong would be reported again, as those of parameters without
        # weights.
        if any(isinstance(finding, MismatchedMoments) for finding in own):
            continue
        if comparison.finding is not None:
            findings.append(comparison.finding)
        elif comparison.why:
            uncompared.setdefault(comparison.why, []).append(optimizer.key)
    return Bundle(
        path=component.path,
        optimizers=saved,
        findings=tuple(findings),
        unread=len(contents.optimizers) - len(saved) - len(malformed),
        uncompared=uncompared,
        models=len(contents.models),
    )


class _Contents:
    """A file of torch, and its tensors outside of its optimizers.

    ``optimizers``: their dicts, with the keys that lead to them. Raises FormatError where they
    cannot be read.
    """

    def __init__(self, file: TorchFile) -> None:
        self.file = file
        self.optimizers = list(islice(optimizers(file.tree.root), MAX_LIST + 1))

    @once
    def models(self) -> list[PickledStateDict]:
        """The state dicts that look like a module's."""
        paths = {
            place.path for place in self._places if place.kind == "state dict" and place.is_model
        }
        return [model for model in self.file.state_dicts if model.path in paths and model.tensors]

    @once
    def counts(self) -> Counter[Shape] | None:
        """Count the shapes of all tensors and arrays. None where one is of an unknown kind.

        A script may save a module as arrays of numpy, as a list of tensors, or as a pickled object.
        """
        try:
            return _shapes(self.file, [node for _, node in self.optimizers])
        except FormatError:
            return None

    @once
    def _places(self) -> tuple[NameList, ...]:
        return name_lists(self.file.tree)

    @once
    def forms(self) -> list[frozenset[tuple[str, Shape]]]:
        """The keys and shapes of each model, which its average and the file of another epoch have,
        too.
        """
        return [
            frozenset((bare(tensor.fqn), tensor.shape) for tensor in model.tensors)
            for model in self.models
        ]

    @once
    def hashes(self) -> frozenset[int]:
        """The hashes of the forms. Each epoch is compared with every other one."""
        return frozenset(map(hash, self.forms))

    @once
    def shapes_by_key(self) -> dict[str, set[Shape]]:
        """The shapes of each key in the models, without wrappers."""
        shapes: dict[str, set[Shape]] = {}
        for model in self.models:
            for tensor in model.tensors:
                shapes.setdefault(bare(tensor.fqn), set()).add(tensor.shape)
        return shapes

    @once
    def matrices(self) -> Counter[Shape]:
        """Count the shapes of matrices in the models. Buffers of indices are left out."""
        return Counter(
            tensor.shape
            for model in self.models
            for tensor in model.tensors
            if _is_matrix(tensor.shape) and not tensor.dtype.startswith(("I", "U", "BOOL"))
        )

    @once
    def is_whole(self) -> bool:
        """Return whether the models surely have all keys of their modules.

        A dict comprehension that leaves some out leaves ``_metadata`` out, too. ``del`` keeps it,
        with the modules. An average may have the trained parameters alone.
        """
        metadata = {place.path: place.names for place in self._places if place.kind == "metadata"}
        complete = [
            form
            for model, form in zip(self.models, self.forms, strict=True)
            if model.path in metadata
            and _has_modules(model, [name for name, _ in metadata[model.path]])
        ]
        return bool(complete) and all(
            any(form <= larger for larger in complete) for form in self.forms
        )


def _has_modules(model: PickledStateDict, names: Iterable[str]) -> bool:
    """Return whether a state dict has a tensor of each of these modules that has submodules."""
    keys = sorted(tensor.fqn for tensor in model.tensors)
    for parent in {name.rpartition(".")[0] for name in names} - {""}:
        place = bisect_left(keys, f"{parent}.")
        if place == len(keys) or not keys[place].startswith(f"{parent}."):
            return False
    return True


class _Files:
    """The files of a folder, of which each is read once: the optimizer of each epoch may ask for
    all of them.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._contents: dict[PurePosixPath, _Contents | None] = {}

    def contents(self, component: Component) -> _Contents | None:
        """Return what a file of torch has, None where it cannot be read: then another finding is
        about it.
        """
        if component.path not in self._contents:
            self._contents[component.path] = None
            if isinstance(component.content, TorchFile):
                with suppress(FormatError):
                    self._contents[component.path] = _Contents(component.content)
        return self._contents[component.path]

    def may_have(self, path: PurePosixPath, lost: Iterable[Shape]) -> bool:
        """Return whether files other than this one have these shapes, or may have them.

        The file of another epoch has the weights of this one again.
        """
        folder = self._folder
        strays = (*folder.unscanned, *map(str, folder.strays))
        if folder.subfolders or any(map(_may_hold_weights, strays)):
            return True
        own = self._contents[path]
        elsewhere: set[Shape] = set()
        for component in folder.components:
            if component.path == path or not _may_hold_weights(str(component.path)):
                continue
            contents = self.contents(component)
            if contents is None:
                if component.problem is not None or isinstance(component.content, TorchFile):
                    return True
                elsewhere.update(tensor.shape for tensor in component.tensors)
            elif contents.counts is None:
                return True
            elif not contents.optimizers or own is None or own.hashes != contents.hashes:
                elsewhere.update(contents.counts)
        return elsewhere.issuperset(lost)


class _Comparison(NamedTuple):
    """The reason why an optimizer is not fully compared with its file, or the finding about it."""

    why: str = ""
    finding: UnsavedParameters | None = None


def _compare(files: _Files, saved: SavedOptimizer, contents: _Contents) -> _Comparison:
    """Compare the shapes of an optimizer's moments with the tensors of its file.

    A script may save a single number, such as SAC's log_alpha, as a plain number: parameters of one
    are left out.
    """
    counts = contents.counts
    shapes_of = without_reduced(saved).shapes
    moments = Counter(
        shape for shapes in shapes_of.values() for shape in shapes if prod(shape) != 1
    )
    if counts is None:
        return _Comparison(_UNREAD)
    if not any(map(_is_matrix, counts)):
        return _Comparison(_ALONE)
    if not saved.is_plain:
        return _Comparison(_OF_OTHER_SHAPES)
    if not moments:
        return _Comparison("" if any(shapes_of.values()) else _WITHOUT_MOMENTS)
    lost = moments - counts
    if not lost:
        is_of_all = len(contents.models) > 1 or contents.matrices <= moments
        return _Comparison("" if is_of_all else _UNTRAINED)
    matrices = {shape for shape in moments if _is_matrix(shape)}
    if not matrices:
        return _Comparison(_FLAT)
    ordered = [shapes_of.get(name, set()) for name in saved.parameters]
    is_in_order = any(_fits_but_for_a_layer(ordered, model) for model in contents.models)
    # Two models of one width share the shapes of most layers, which are few different ones.
    if not is_in_order and 2 * len(matrices & counts.keys()) <= len(matrices):
        return _Comparison(_FOREIGN)
    lost_matrices = {shape for shape in lost if _is_matrix(shape)}
    dimensions = {len(shape) for shape in counts if _is_matrix(shape) and shape not in moments}
    is_resized = {len(shape) for shape in lost_matrices} <= dimensions
    if lost_matrices:
        has_place = is_in_order or is_resized or contents.is_whole
        is_certain = has_place and not files.may_have(saved.path, lost_matrices)
    else:
        # ``weight_norm`` adds vectors.
        is_certain = is_in_order
    if not is_certain:
        return _Comparison(_INCOMPLETE)
    decisive = sorted(lost_matrices or lost)
    surplus = [(shape, moments[shape], counts[shape]) for shape in decisive if counts[shape]]
    is_surplus = len(surplus) == len(decisive)
    return _Comparison(
        finding=UnsavedParameters(
            path=saved.path,
            key=saved.key,
            parameters=sum(
                1 for shapes in shapes_of.values() if any(prod(shape) != 1 for shape in shapes)
            ),
            tensors=counts.total(),
            shapes=() if is_surplus else tuple(sorted(moments.keys() - counts.keys())),
            moments=tuple(sorted(moments)),
            weights=tuple(sorted(counts)),
            is_foreign=bool(contents.matrices.keys() - moments.keys()),
            surplus=tuple(surplus) if is_surplus else (),
        )
    )


def _fits_but_for_a_layer(moments: Sequence[set[Shape]], model: PickledStateDict) -> bool:
    """Return whether parameters and tensors have equal shapes one by one, but for the weight and
    bias of one layer.
    """
    if len(moments) != len(model.tensors):
        return False
    pairs = zip(moments, model.tensors, strict=True)
    differing = [
        place for place, (shapes, tensor) in enumerate(pairs) if not shapes <= {tensor.shape}
    ]
    return (
        bool(differing) and differing[-1] - differing[0] <= 1 and 2 * len(differing) < len(moments)
    )


def _is_matrix(shape: Shape) -> bool:
    """Return whether a shape has two sizes or more above 1."""
    return prod(shape) > max(shape, default=1)


def _may_hold_weights(name: str) -> bool:
    if name.startswith(".") or name.lower().endswith(_WITHOUT_WEIGHTS) or "tfevents" in name:
        return False
    parsed = parse_file_name(name)
    return parsed is None or parsed.role in (*_ROLES, Role.WEIGHTS_INDEX)


def _shapes(file: TorchFile, without: Sequence[Node]) -> Counter[Shape] | None:
    """Return how often each shape occurs among the tensors and arrays outside of these nodes, None
    for unknown ones.
    """
    known = storages(file.tree)
    shapes: Counter[Shape] = Counter()
    inside: set[int] = set()
    for node in every_node(file.tree.root, callees=False, without=without):
        if is_tensor(node) and id(node) not in inside:
            tensor = read_tensor(_NO_KEY, node, known)
            if tensor is None:
                return None
            shapes[tensor.shape] += 1
            # A parameter is made of a tensor.
            inside.update(map(id, node.args if type(node.args) is tuple else ()))
        elif is_array(node):
            shape = shape_of_array(node)
            if shape is None:
                return None
            shapes[shape] += 1
    return shapes


_NO_KEY = Text("", 0, 0)

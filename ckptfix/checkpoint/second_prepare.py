"""Evidence that two entries are equal because a script passed one model to prepare() twice, and for no other reason.

Part of the evidence is an optimizer's training, read from its pickled ``state_dict()`` (facts from torch 2.13:
``torch/optim/optimizer.py``, ``adamw.py``, ``sgd.py``, ``adagrad.py``); nothing is executed.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import PurePosixPath
from struct import unpack
from typing import Any

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, is_wrapped_again
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint
from ckptfix.dataclass import dataclass
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.safetensors_file import read_safetensors
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_partial import read_partial
from ckptfix.formats.torch_pickle import is_optimizer, state_dicts
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.storage.reading import FileReader, open_reader

_STEP_FORMATS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Facts in an optimizer's state about its training.

    ``names``: its ``param_names``, () without any. ``shapes``: for each parameter with a state, the shape of its
    largest moment. ``has_stepped``: True where moments show a step, False where there are none yet, None where the
    state does not show it (plain SGD keeps nothing).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    has_stepped: bool | None


@paused_gc()
def read_optimizer(file: TorchFile, reader: FileReader) -> OptimizerFacts | None:
    """Return the facts of a file that holds one optimizer's state, None for any other file.

    Raises FormatError when a tensor does not lie inside its storage, OSError when the file cannot be read.
    """
    root = file.tree.root
    if not is_dict_like(root) or not is_optimizer(root):
        return None
    # Each node once: a hostile pickle can refer to one dict a million times.
    groups = list(
        {id(one): one for one in items_of(child(root, "param_groups")) if is_dict_like(one)}.values()
    )
    states = list({id(one): one for _, one in pairs(child(root, "state")) if is_dict_like(one)}.values())
    known = storages(file.tree)
    shapes: list[tuple[int, ...]] = []
    steps: list[float | None] = []
    for state in states:
        tensors = {
            key.value: tensor
            for key, value in pairs(state)
            if type(key) is Text and is_tensor(value) and (tensor := read_tensor(key, value, known))
        }
        step = tensors.pop("step", None)
        moments = [tensor.shape for tensor in tensors.values()]
        if moments:
            shapes.append(max(moments, key=lambda shape: (len(shape), shape)))
        if step is None:
            number = child(state, "step")
            steps.append(float(number) if type(number) in (int, float) else None)
        else:
            steps.append(_scalar(file, reader, step.dtype, step.storage_key, step.begin))
    return OptimizerFacts(
        names=tuple(
            name.value
            for group in groups
            for name in items_of(child(group, "param_names"))
            if type(name) is Text
        ),
        shapes=tuple(shapes),
        has_stepped=_has_stepped(groups, shapes, steps),
    )


def _has_stepped(groups: list[Any], shapes: list[Any], steps: list[float | None]) -> bool | None:
    if shapes:  # Adagrad makes its moments before the first step
        return not all(step == 0 for step in steps)
    return None if all(map(_is_plain_sgd, groups)) else False


def _is_plain_sgd(group: Any) -> bool:
    return child(group, "dampening") is not None and child(group, "momentum") in (0, None)


def _scalar(file: TorchFile, reader: FileReader, dtype: str, storage: str, begin: int | None) -> float | None:
    place, code = file.storage_ranges.get(storage), _STEP_FORMATS.get(dtype)
    if place is None or code is None or begin is None:
        return None
    size = 8 if dtype.endswith("64") else 4
    if begin + size > place[1]:
        return None
    (value,) = unpack(code, reader.read(place[0] + begin, size))
    return float(value)


_FSDP_STEM = "pytorch_model_fsdp"


class Evidence:
    """Evidence in a folder and its manifest about the run that saved them."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest | None) -> None:
        """Store the folder without reading files; ``manifest`` counts only when a save wrote it."""
        self.folder = folder
        self.manifest = manifest if manifest is not None and manifest.is_of_a_save else None

    def is_second_prepare(self, original: Component, links: Iterable[Component], entry: Component) -> bool:
        """Return whether an entry with the bytes of ``original`` is what a second ``prepare`` registers.

        That takes two processes (one alone is never wrapped), an entry behind the original with one wrapper more than
        the original or one of ``links``, its earlier duplicates, the same class in the manifest, and no optimizer that
        has yet to step or cannot be read: until the first step an average rightly equals its model.
        """
        return (
            self.folder.processes != 1
            and entry.name.stem != _FSDP_STEM  # FSDP adds no "module."
            and any(
                one.name.index < entry.name.index and is_wrapped_again(_chain(entry), _chain(one))
                for one in (original, *links)
            )
            and not self._are_two_classes(original, entry)
            and not self.may_be_untrained
        )

    @property
    def may_be_untrained(self) -> bool:
        """Return whether an optimizer has made no step, or cannot be read; it may belong to any model here."""
        saved = (one for entries in self.folder.entries(Role.OPTIMIZER) for one in entries)
        return any(one.problem is not None for one in saved) or any(
            facts.has_stepped is False for facts in self.optimizers.values()
        )

    def foreign(self, entry: Component) -> str:
        """Return why an entry is not from the save that wrote the manifest, "" without such evidence."""
        if unlisted := self.unlisted(entry.path):
            return unlisted
        recorded = self._recorded(entry)
        if recorded is not None and recorded.keys and recorded.keys != _fingerprint(entry):
            return f"the manifest of the save lists {entry.path} with other keys or shapes"
        return ""

    def is_registered(self, entry: Component) -> bool:
        """Return whether a guarded save recorded an entry with these keys; a second ``prepare`` registers no entry."""
        recorded = self._recorded(entry)
        return recorded is not None and bool(recorded.keys) and recorded.keys == _fingerprint(entry)

    def unlisted(self, path: PurePosixPath) -> str:
        """Return the words for a file missing in the manifest of the save, "" if listed or without a manifest."""
        if self.manifest is None or str(path) in self.manifest.files:
            return ""
        return f"the manifest of the save does not list {path}"

    def names_left(self, damaged: Component) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a damaged model from the existing part of its header or pickle, else {}."""
        try:
            with open_reader(self.folder.root / damaged.path) as reader:
                if damaged.name.suffix == ".safetensors":
                    return {one.fqn: one.shape for one in read_safetensors(reader, cut=True).tensors}
                partial = read_partial(reader)
                return {
                    tensor.fqn: tensor.shape
                    for state_dict in state_dicts(partial.tree, partial.storages, {})
                    for tensor in state_dict.tensors
                    if not state_dict.path
                }
        except (FormatError, OSError):
            return {}

    @cached_property
    def optimizers(self) -> dict[PurePosixPath, OptimizerFacts]:
        """The optimizers whose state can be read, in order."""
        found: dict[PurePosixPath, OptimizerFacts] = {}
        for entries in self.folder.entries(Role.OPTIMIZER):
            for component in entries:
                if isinstance(component.content, TorchFile):
                    try:
                        with open_reader(self.folder.root / component.path) as reader:
                            facts = read_optimizer(component.content, reader)
                    except FormatError:
                        continue  # the optimizer's own finding reports its damage
                    if facts is not None:
                        found[component.path] = facts
        return found

    def _are_two_classes(self, one: Component, other: Component) -> bool:
        classes = {
            recorded.type
            for entry in (one, other)
            if (recorded := self._recorded(entry)) is not None and recorded.type
            if not recorded.keys or recorded.keys == _fingerprint(entry)
        }
        return len(classes) == 2

    def _recorded(self, entry: Component) -> ManifestEntry | None:
        models = self.manifest.models if self.manifest is not None else ()
        return next((recorded for recorded in models if recorded.file == str(entry.path)), None)


def fits(facts: OptimizerFacts, models: Iterable[Component]) -> bool:
    """Return whether an optimizer's parameters match one of the models, by name, else by shape."""
    return any(_fits(facts, model) for model in models)


def _fits(facts: OptimizerFacts, model: Component) -> bool:
    if not facts.names:
        return not Counter(facts.shapes) - Counter(tensor.shape for tensor in model.tensors)
    strip = KeyMap(remove=_chain(model))
    known = {strip(tensor.fqn) for tensor in model.tensors}
    return known.issuperset(map(KeyMap(remove=common_wrappers(facts.names)), facts.names))


def _chain(model: Component) -> tuple[str, ...]:
    return model.whole.chain if model.whole is not None else ()


def _fingerprint(model: Component) -> str:
    return key_fingerprint((tensor.fqn, tensor.dtype, tensor.shape) for tensor in model.tensors)

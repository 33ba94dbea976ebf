"""Evidence that a script passed one model to prepare() twice, and that nothing else explains two equal entries."""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, is_wrapped_again
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint
from ckptfix.errors import FormatError
from ckptfix.formats.safetensors_file import read_safetensors
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_optimizer import OptimizerFacts, read_optimizer
from ckptfix.formats.torch_partial import read_partial
from ckptfix.formats.torch_pickle import state_dicts
from ckptfix.storage.reading import open_reader

_FSDP_STEM = "pytorch_model_fsdp"


class Evidence:
    """What a folder and its manifest say of the run that saved them."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest | None) -> None:
        """Look at nothing yet; ``manifest``: only one that a save wrote counts."""
        self.folder = folder
        self.manifest = manifest if manifest is not None and manifest.is_of_a_save else None

    def is_second_prepare(self, original: Component, links: Iterable[Component], entry: Component) -> bool:
        """Whether an entry with the bytes of ``original`` is what a second ``prepare`` registers.

        That takes two processes (one alone is never wrapped), an entry behind the original with one wrapper more than
        the original or one of ``links``, its earlier doubles, the same class in the manifest, and no optimizer that
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
        """Whether an optimizer has made no step, or cannot be read: it may be the one of any model here."""
        saved = (one for entries in self.folder.entries(Role.OPTIMIZER) for one in entries)
        return any(one.problem is not None for one in saved) or any(
            facts.has_stepped is False for facts in self.optimizers.values()
        )

    def foreign(self, entry: Component) -> str:
        """Return why an entry is not of the save that wrote the manifest, "" when nothing says so."""
        if unlisted := self.unlisted(entry.path):
            return unlisted
        recorded = self._recorded(entry)
        if recorded is not None and recorded.keys and recorded.keys != _fingerprint(entry):
            return f"the manifest of the save lists {entry.path} with other keys or shapes"
        return ""

    def is_registered(self, entry: Component) -> bool:
        """Whether a guarded save recorded an entry with these keys: ``prepare`` twice registers no model there."""
        recorded = self._recorded(entry)
        return recorded is not None and bool(recorded.keys) and recorded.keys == _fingerprint(entry)

    def unlisted(self, path: PurePosixPath) -> str:
        """Return that the manifest of the save does not list a file, "" when it does, or there is none."""
        if self.manifest is None or str(path) in self.manifest.files:
            return ""
        return f"the manifest of the save does not list {path}"

    def names_left(self, damaged: Component) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a damaged model as far as its header or pickle is there, else {}."""
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
                        continue  # its own finding says what is wrong with it
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
    """Whether an optimizer's parameters can be those of one of the models: by their names, else by their shapes."""
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

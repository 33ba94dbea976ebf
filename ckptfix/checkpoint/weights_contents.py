"""Contents of weights files: state dicts of modules, and what is none.

Measured with torch 2.13, accelerate 1.15 and transformers 5.23:

- ``Module.load_state_dict`` refuses whatever is not a dict with strings as keys, and keys that the
  module lacks. ``from_pretrained`` and the Trainer pass over unknown keys, and leave the weights
  random without an error. A module saves tensors, extra states of any kind, and what its own hooks
  add: quantized modules of torch add dtypes, pairs, and a ``bias`` of None. A module without
  parameters saves an empty dict.
- Tensors on the meta device have a shape and no numbers: ``load_state_dict`` of modules and
  optimizers refuses them.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.generator_states import is_of_numpy_module
from ckptfix.checkpoint.model_configs import is_pretrained
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_kinds import (
    Content,
    StateProblem,
    is_plain,
    is_text,
    noun_of,
    state_by_keys,
)
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import (
    CALLS,
    Kind,
    Node,
    Text,
    Visits,
    every_node,
    is_dict_like,
    pairs,
)
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import name_lists, optimizers
from ckptfix.formats.torch_tensors import META_TENSOR, is_tensor
from ckptfix.wording import count_of, list_names

NO_TENSORS = StateProblem(Content.MODEL, "no tensors", None)
"""The problem of a weights file without a tensor, where something shows that its model has some."""


def is_weights_file(name: FileName) -> bool:
    """Return whether ``load_state``, transformers, diffusers or PEFT reads a file by its name as
    one state dict.

    Loaders of LoRA weights accept other layouts, and no library writes or looks for ``model.bin``.
    """
    stem = name.stem.partition(".")[0]
    is_weights = name.is_of_library and name.role is not Role.WEIGHTS_INDEX
    return (
        is_weights and stem != "pytorch_lora_weights" and (stem, name.suffix) != ("model", ".bin")
    )


def holds_no_tensor(file: TorchFile | SafetensorsFile) -> bool:
    """Return whether a file is an empty state dict."""
    if isinstance(file, SafetensorsFile):
        return not file.tensors
    try:
        return is_dict_like(file.tree.root) and not any(True for _ in pairs(file.tree.root))
    except FormatError:
        return False


def may_hide_weights(file: TorchFile) -> bool:
    """Return whether a file has values that may be weights and cannot be read, such as quantized
    tensors or a list.

    Numbers and texts next to tensors are not weights, and the moments of an optimizer are its own.
    """
    try:
        known: list[Any] = [node for _, node in optimizers(file.tree.root)]
        nodes = {
            place.path: place.node for place in name_lists(file.tree) if place.kind == "state dict"
        }
        met: set[int] = set()
        for state_dict in file.state_dicts:
            opaque = frozenset(state_dict.opaque_keys)
            for key, value in pairs(nodes[state_dict.path]):
                is_read = type(key) is Text and key.value not in opaque
                if is_read or (type(key) is Text and key.value.endswith("_extra_state")):
                    known.append(value)
                elif any(
                    part.kind in CALLS and not is_dict_like(part)
                    for part in every_node(value, met=met)
                ):
                    return True
    except FormatError:
        return True
    return any(map(is_tensor, every_node(file.tree.root, callees=False, without=known)))


def weights_without_tensors(folder: CheckpointFolder) -> Iterator[Component]:
    """Yield the weights files without a tensor of models that surely have one.

    ``save_state`` leaves such a file for a module without parameters, such as a loss. The models of
    the Trainer and of ``from_pretrained`` have weights, and so has one that is stored in other
    files, too. A file of torch next to ``model.safetensors`` of its model is not read by any of
    them (accelerate 1.15, transformers 5.23).
    """
    empty = [
        component
        for component in folder.components
        if isinstance(component.content, SafetensorsFile | TorchFile)
        and is_weights_file(component.name)
        and component.name.shard is None
        and holds_no_tensor(component.content)
    ]
    if not empty:
        return
    has_weights = folder.has_file(TRAINER_STATE) or is_pretrained(folder.root)
    for component in empty:
        of_model = (component.name.model, component.name.index)
        same_model = [
            file
            for file in folder.components
            if (file.name.model, file.name.index) == of_model and file.tensors
        ]
        is_read = component.name.suffix == ".safetensors" or not any(
            file.name.suffix == ".safetensors" for file in same_model
        )
        if is_read and (has_weights or same_model):
            yield component


def problem_of_model(root: Any) -> StateProblem | None:
    """Return what is wrong with a dict as ``Module.state_dict()``, whatever its hooks; None for an
    empty one.
    """
    if not is_dict_like(root):
        return StateProblem(Content.MODEL, noun_of(root), None) if is_plain(root) else None
    if _is_state_dict(root):
        return None
    if (content := state_by_keys(root)) is not None:
        return StateProblem(Content.MODEL, content.value, content)
    entries = list(pairs(root))
    visits = Visits()
    inner = [
        key.value
        for key, value in entries
        if type(key) is Text
        and is_dict_like(value)
        and visits.first(value)
        and _is_state_dict(value)
    ]
    if inner:
        what = "a state dict" if len(inner) == 1 else "state dicts"
        remedy = (
            "load the file with torch, then torch.save() only the value under "
            f"{list_names(inner[:1])}"
            if len(inner) == 1
            else "torch.save() the state dict of the complete model, model.state_dict()"
        )
        return StateProblem(
            Content.MODEL, f"a dict with {what} under {list_names(inner)}", None, remedy
        )
    if any(not is_text(key) for key, _ in entries):
        return StateProblem(Content.MODEL, "a dict with a key that is not a string", None)
    if entries and all(is_plain(value) and not is_tensor(value) for _, value in entries):
        return StateProblem(Content.MODEL, "a dict whose values are not tensors", None)
    for key, value in entries:
        name = key.value.rpartition(".")[2] if type(key) is Text else ""
        if name not in _ALWAYS_TENSORS or is_tensor(value) or (name == "bias" and value is None):
            continue
        if is_plain(value) or is_of_numpy_module(value):
            noun = noun_of(value) if is_plain(value) else "a numpy array"
            return StateProblem(Content.MODEL, f"{noun} under {key.value!r:.200}", None)
    return None


_ALWAYS_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
"""Names in torch's own modules under which a state dict has a tensor. Hooks save other values under
other names.
"""


def _is_state_dict(node: object) -> bool:
    """Return whether a dict has strings as keys, and tensors or extra states of modules as
    values.
    """
    entries = [(key, value) for key, value in pairs(node)]
    return bool(entries) and all(
        is_text(key)
        and (is_tensor(value) or (type(key) is Text and key.value.endswith("_extra_state")))
        for key, value in entries
    )


def without_numbers(expected: Content, file: TorchFile) -> StateProblem | None:
    """Return the problem of a file with tensors on the meta device, None without one."""
    count = count_meta([file.tree.root], set()) if META_TENSOR in file.tree.globals else 0
    return of_meta(expected, count) if count else None


def count_meta(values: Iterable[object], met: set[int]) -> int:
    """Return the number of tensors on the meta device that some values refer to. ``met``: as
    ``every_node`` has it.
    """
    nodes = chain.from_iterable(every_node(value, met=met) for value in values)
    calls = (node.head for node in nodes if node.kind is Kind.CALL)
    return sum(type(head) is Node and head.is_global(*META_TENSOR) for head in calls)


def of_meta(expected: Content, count: int) -> StateProblem:
    """Return the problem of ``count`` tensors on the meta device."""
    holds = f"{count_of(count, 'tensor')} on the meta device, without values"
    remedy = (
        "the weights were offloaded when the script saved them; save them again with "
        "accelerator.save_model(model, FOLDER), or torch.save() accelerator.get_state_dict(model)"
        if expected is Content.MODEL
        else ""
    )
    return StateProblem(expected, holds, Content.WITHOUT_NUMBERS, remedy)

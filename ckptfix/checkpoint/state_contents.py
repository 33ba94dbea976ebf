"""Contents of state files: the kind of state that a file holds, against the kind that its name
promises.

Loaders trust the name. Each kind is known by keys that its loader asks for; ``bundled_states``
judges states under the keys of a script. Values inside a state of the right kind are left to its
load.

Measured with torch 2.13, accelerate 1.15, transformers 5.23 and torchdata 0.11:

- ``Module.load_state_dict`` refuses whatever is not a dict with strings as keys, and keys that the
  module lacks. ``from_pretrained`` and the Trainer pass over unknown keys, and leave the weights
  random without an error. A module saves tensors, extra states of any kind, and what its own hooks
  add: quantized modules of torch add dtypes, pairs, and a ``bias`` of None. A module without
  parameters saves an empty dict.
- Tensors on the meta device have a shape and no numbers: ``load_state_dict`` of modules and
  optimizers refuses them.
- ``Optimizer.load_state_dict`` refuses whatever has no ``state`` and no ``param_groups``. A class
  of a script's own may save another dict, as Lookahead does around another optimizer.
- ``LRScheduler.load_state_dict`` updates its ``__dict__`` with anything dict-like, and starts anew
  without an error.
- ``load_state`` catches every error about random states, and leaves the rest of the file. The
  Trainer fails.
- ``GradScaler.load_state_dict`` refuses whatever lacks one of its five keys; a disabled one saves,
  and loads, an empty dict.
- torchdata's ``StatefulDataLoader.load_state_dict`` takes anything. ``{}``, which it never saves,
  begins the epoch anew without an error. A loader of a script's own may save another dict.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.model_configs import is_pretrained
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import (
    CALLS,
    Kind,
    Node,
    Text,
    Visits,
    attribute,
    child,
    every_node,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import name_lists, optimizers
from ckptfix.formats.torch_tensors import META_TENSOR, is_tensor, read_tensor, storages
from ckptfix.wording import count_of, list_names


class Content(Enum):
    """A kind of state, by its keys. The value is the noun in messages."""

    OPTIMIZER = "an optimizer's state"
    SCHEDULER = "a scheduler's state"
    GRAD_SCALER = "a gradient scaler's state"
    RANDOM_STATES = "accelerate's random states"
    TRAINER_RANDOM_STATES = "the Trainer's random states"
    MODEL = "a model's weights"
    SAMPLER = "a sampler"
    DATALOADER = "a data loader's state"
    WITHOUT_NUMBERS = "tensors on the meta device, which have no values"
    PLACEHOLDERS = "ZeRO-3 placeholders"


_SCALER_KEYS = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)

_STATE_KEYS = (
    (Content.OPTIMIZER, frozenset(("state", "param_groups"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "_last_lr"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "_step_count"))),
    (Content.SCHEDULER, frozenset(("_schedulers", "_last_lr"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "num_bad_epochs"))),
    (Content.GRAD_SCALER, _SCALER_KEYS),
    (Content.RANDOM_STATES, frozenset(("random_state", "numpy_random_seed", "torch_manual_seed"))),
    (Content.TRAINER_RANDOM_STATES, frozenset(("python", "numpy", "cpu"))),
    # torchdata's StatefulDataLoader without workers, and with them.
    (Content.DATALOADER, frozenset(("_num_yielded", "_sampler_iter_yielded"))),
    (Content.DATALOADER, frozenset(("_snapshot", "_steps_since_snapshot"))),
)
"""Keys that a state has, whatever else is in it; the loaders ask for them."""


class StateProblem(NamedTuple):
    """The content of a state file that is not what its name promises.

    ``holds``: the content in words. ``content``: its kind, None for one that a class of a script's
    own might load. ``remedy``: how to save the right content, "" where only another file helps.
    ``effect``: the consequence for a load, "" where it is that of any other wrong content.
    ``may_be_of_script``: scripts use the name of the file, too.
    """

    expected: Content
    holds: str
    content: Content | None
    remedy: str = ""
    effect: str = ""
    may_be_of_script: bool = False


def is_list(value: object) -> bool:
    """Return whether a value is a list or a tuple."""
    return type(value) is tuple or (type(value) is Node and value.kind is Kind.LIST)


def _is_text(value: object) -> bool:
    """Return whether a value is a string, also one too long to be kept."""
    return type(value) is Text or (type(value) is Node and value.kind is Kind.LONG_TEXT)


def of_another_kind(expected: Content, content: Content, root: object) -> StateProblem | None:
    """Return the problem of a state of another kind than expected, None where a scheduler of a
    script may hold such keys.
    """
    if (
        expected is Content.SCHEDULER
        and content is Content.OPTIMIZER
        and not is_surely_of_optimizer(root)
    ):
        return None
    return StateProblem(expected, content.value, content)


def state_by_keys(node: object) -> Content | None:
    """Return the kind of state whose keys a dict has, None for anything else."""
    if not is_dict_like(node):
        return None
    keys = text_keys(node)
    return next((content for content, wanted in _STATE_KEYS if wanted <= keys), None)


def is_inside(content: Content, root: object) -> bool:
    """Return whether a dict anywhere inside a value is a state of this kind."""
    visits = Visits()
    return any(
        state_by_keys(node) is content
        for node in every_node(root)
        if is_dict_like(node) and visits.first(node)
    )


def _wrapper_of(content: Content, root: object) -> str:
    """Return in words a list or dict that has a state as its only item, "" for anything else.

    Classes of scripts that wrap states add something of their own, or have several.
    """
    values = list(items_of(root)) if is_list(root) else [value for _, value in pairs(root)]
    if len(values) != 1 or state_by_keys(values[0]) is not content:
        return ""
    return f"{_noun_of(root)} with {content.value} as its only item"


def is_surely_of_optimizer(root: object) -> bool:
    """Return whether a dict with both keys is an optimizer's: a script may have other values under
    them.

    Every optimizer has a param group, and numbers its moments.
    """
    return any(type(key) is int for key, _ in pairs(child(root, "state"))) or any(
        child(group, "params") is not None for group in items_of(child(root, "param_groups"))
    )


def _is_plain(value: object) -> bool:
    """Return whether a value is a container, a tensor or a constant, and not an object of a
    class.
    """
    return (
        type(value) is not Node
        or is_dict_like(value)
        or is_tensor(value)
        or value.kind is Kind.LIST
    )


def _without_keys(expected: Content, root: object) -> str:
    """Return in words a dict that lacks keys of the expected state."""
    wanted = next(keys for content, keys in _STATE_KEYS if content is expected)
    lacking = sorted(wanted - text_keys(root))
    return f"a dict without {list_names(lacking)}"


def _noun_of(value: object) -> str:
    """Return a value in words, without what is in it."""
    if value is None or type(value) is bool:
        return str(value)
    if _is_text(value):
        return "a string"
    if is_tensor(value):
        return "a tensor"
    if is_dict_like(value):
        return "a dict" if any(True for _ in pairs(value)) else "an empty dict"
    if type(value) is tuple:
        return "a tuple"
    if type(value) is Node:
        return "a list"
    return "bytes" if type(value) is bytes else "a number"


_NESTED = (Content.OPTIMIZER, Content.SCHEDULER)
"""States that classes of scripts wrap in another dict or list. Loaders look for the others at the
root alone.
"""

_BY_ROLE = {
    Role.OPTIMIZER: Content.OPTIMIZER,
    Role.SCHEDULER: Content.SCHEDULER,
    Role.GRAD_SCALER: Content.GRAD_SCALER,
    Role.SAMPLER: Content.SAMPLER,
    Role.DATALOADER: Content.DATALOADER,
    Role.RNG_STATE: Content.RANDOM_STATES,
}


def content_of(file: TorchFile) -> Content | None:
    """Return the kind of state at the root of a file, None for anything else."""
    try:
        return _content(file)
    except FormatError:
        # No pickler writes such dicts, and nothing is known of their keys.
        return None


def state_problem(name: FileName, file: TorchFile) -> StateProblem | None:
    """Return what is wrong with the content of a state file, None for a right one or one that
    cannot be judged.
    """
    expected = _BY_ROLE.get(name.role)
    if expected is Content.RANDOM_STATES and name.is_of_trainer:
        expected = Content.TRAINER_RANDOM_STATES
    root = file.tree.root
    try:
        if is_weights_file(name):
            problem = _problem_of_model(root)
            return problem or _without_numbers(Content.MODEL, file)
        if expected is None:
            return None
        problem = _judged(expected, file)
        if problem is None and expected is Content.OPTIMIZER:
            return _without_numbers(expected, file)
        return problem
    except FormatError:
        return None


def has_kind_of(role: Role, file: TorchFile) -> bool:
    """Return whether a file holds a state of the kind that a role has; of a custom object or a run
    state any file may be.
    """
    if role is Role.SAMPLER:
        # accelerate pickles the object itself.
        return not _is_plain(file.tree.root)
    return role not in _BY_ROLE or content_of(file) is _BY_ROLE[role]


def _judged(expected: Content, file: TorchFile) -> StateProblem | None:
    root = file.tree.root
    content = _content(file)
    if content is expected:
        problem = problem_of_optimizer(root) if expected is Content.OPTIMIZER else ""
        return StateProblem(expected, problem, None) if problem else None
    if expected in _NESTED and (wrapper := _wrapper_of(expected, root)):
        return StateProblem(expected, wrapper, None)
    if expected in _NESTED and is_inside(expected, root):
        return None
    if content is not None:
        return of_another_kind(expected, content, root)
    is_dict = is_dict_like(root)
    keys = [key.value if type(key) is Text else "" for key, _ in pairs(root)]
    is_empty = is_dict and not keys
    if (
        # What an object of a class is, its class alone knows.
        not _is_plain(root)
        or expected is Content.SAMPLER
        or (expected is Content.SCHEDULER and is_dict)
        or (expected is Content.DATALOADER and is_dict and not is_empty)
        # Lookahead saves "fast_state" and "slow_state" with the groups.
        or (expected is Content.OPTIMIZER and "param_groups" in keys and len(keys) > 1)
        or (expected is Content.GRAD_SCALER and is_empty)
        # ``migrate`` gives a process that the saving run did not have the step alone, and no random
        # states.
        or (expected is Content.RANDOM_STATES and keys == ["step"])
    ):
        return None
    holds = _without_keys(expected, root) if is_dict and not is_empty else _noun_of(root)
    may_be_of_script = expected is Content.GRAD_SCALER and _may_be_of_data(root)
    return StateProblem(expected, holds, None, may_be_of_script=may_be_of_script)


def _content(file: TorchFile) -> Content | None:
    root = file.tree.root
    if (content := state_by_keys(root)) is not None:
        return content
    entries = [(key, value) for key, value in pairs(root)]
    if not entries or any(
        type(key) is not Text or not (is_tensor(value) or key.value.endswith("_extra_state"))
        for key, value in entries
    ):
        return None
    if is_dict_like(attribute(root, "_metadata")):
        # A module's state dict has the versions of its submodules.
        return Content.MODEL
    # A scheduler may keep tensors under such names, too: numbers, or one list. Models have a matrix
    # and more.
    known = storages(file.tree)
    tensors = [read_tensor(key, value, known) for key, value in entries if "." in key.value]
    dimensions = [len(tensor.shape) for tensor in tensors if tensor is not None and tensor.shape]
    return Content.MODEL if len(dimensions) > 1 and max(dimensions) > 1 else None


def _may_be_of_data(root: object) -> bool:
    """Return whether ``scaler.pt`` may be what a script scales its data by, such as a mean and a
    deviation.
    """
    if is_dict_like(root):
        return not any(type(key) is Text and key.value in _SCALER_KEYS for key, _ in pairs(root))
    return is_tensor(root) or any(map(is_tensor, items_of(root)))


def problem_of_optimizer(root: object) -> str:
    """Return why no optimizer of torch loads a dict with both keys, "" for one that may be
    loaded.
    """
    state, groups = child(root, "state"), child(root, "param_groups")
    if not is_dict_like(state) and _is_plain(state):
        return f"an optimizer whose 'state' is {_noun_of(state)}"
    if not is_list(groups):
        return (
            f"an optimizer whose 'param_groups' is {_noun_of(groups)}" if _is_plain(groups) else ""
        )
    visits = Visits()
    lists_any = False
    for number, group in enumerate(items_of(groups)):
        # A few bytes can refer to one long group again and again.
        if type(group) is Node and not visits.first(group):
            continue
        if not _is_plain(group):
            lists_any = True
            continue
        members = child(group, "params")
        if members is None:
            return f"an optimizer whose param group {number} has no 'params'"
        if _is_plain(members) and not is_list(members):
            return f"an optimizer whose param group {number} has {_noun_of(members)} as 'params'"
        lists_any = lists_any or not is_list(members) or bool(items_of(members))
    if not lists_any and any(type(key) is int for key, _ in pairs(state)):
        return (
            "an optimizer with moments but no "
            f"{'parameters in its ' if items_of(groups) else ''}param groups"
        )
    return ""


def is_of_torchdata(root: object) -> bool:
    """Return whether a dict has a key that torchdata's loaders save, with or without workers."""
    return is_dict_like(root) and any(
        type(key) is Text and key.value in _SHOWING_TORCHDATA for key, _ in pairs(root)
    )


_SHOWING_TORCHDATA = (
    "_num_yielded",
    "_sampler_iter_yielded",
    "_iterator_finished",
    "_snapshot",
    "_steps_since_snapshot",
)


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


def _problem_of_model(root: Any) -> StateProblem | None:
    """Return what is wrong with a dict as ``Module.state_dict()``, whatever its hooks; None for an
    empty one.
    """
    if not is_dict_like(root):
        return StateProblem(Content.MODEL, _noun_of(root), None) if _is_plain(root) else None
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
    if any(not _is_text(key) for key, _ in entries):
        return StateProblem(Content.MODEL, "a dict with a key that is not a string", None)
    if entries and all(_is_plain(value) and not is_tensor(value) for _, value in entries):
        return StateProblem(Content.MODEL, "a dict whose values are not tensors", None)
    for key, value in entries:
        name = key.value.rpartition(".")[2] if type(key) is Text else ""
        if name not in _ALWAYS_TENSORS or is_tensor(value) or (name == "bias" and value is None):
            continue
        if _is_plain(value) or _is_of_numpy(value):
            noun = _noun_of(value) if _is_plain(value) else "a numpy array"
            return StateProblem(Content.MODEL, f"{noun} under {key.value!r:.200}", None)
    return None


_ALWAYS_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
"""Names in torch's own modules under which a state dict has a tensor. Hooks save other values under
other names.
"""


def _is_of_numpy(value: object) -> bool:
    """Return whether a value is an object of numpy."""
    head = value.head if type(value) is Node and value.kind is Kind.CALL else None
    return (
        type(head) is Node
        and head.kind is Kind.GLOBAL
        and head.head[0].partition(".")[0] == "numpy"
    )


def _is_state_dict(node: object) -> bool:
    """Return whether a dict has strings as keys, and tensors or extra states of modules as
    values.
    """
    entries = [(key, value) for key, value in pairs(node)]
    return bool(entries) and all(
        _is_text(key)
        and (is_tensor(value) or (type(key) is Text and key.value.endswith("_extra_state")))
        for key, value in entries
    )


def _without_numbers(expected: Content, file: TorchFile) -> StateProblem | None:
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

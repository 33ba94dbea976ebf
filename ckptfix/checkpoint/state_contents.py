"""Contents of state files: the kind of state that a file holds, against the kind that its name
promises.

Loaders trust the name. Measured with torch 2.13, accelerate 1.15 and transformers 5.23:

- ``Optimizer.load_state_dict`` refuses whatever has no ``state`` and no ``param_groups``. A class
  of a script's own may save another dict, as Lookahead does around another optimizer.
- ``LRScheduler.load_state_dict`` updates its ``__dict__`` with anything dict-like, and starts anew
  without an error. Its next step adds 1 to ``last_epoch`` and ``_step_count``, whatever they are.
  SequentialLR loads fewer states than it has schedulers, and starts the others anew.
- ``load_state`` catches every error about random states, and leaves the rest of the file: its step,
  then the states of Python, numpy, torch and its devices. The Trainer fails. The step becomes that
  of the Accelerator, whatever it is: ``accumulate`` adds 1 to it, and steps the optimizer where a
  division leaves no rest.
- ``GradScaler.load_state_dict`` refuses whatever lacks one of its five keys; a disabled one saves,
  and loads, an empty dict. It takes any values: the next ``scale`` or ``update`` fails.
- ``Module.load_state_dict`` refuses whatever is not a dict with strings as keys, and keys that the
  module lacks. ``from_pretrained`` and the Trainer pass over unknown keys, and leave the weights
  random without an error. A module saves tensors, extra states of any kind, and what its own hooks
  add: quantized modules of torch add dtypes, pairs, and a ``bias`` of None. A module without
  parameters saves an empty dict.
- torchdata's ``StatefulDataLoader.load_state_dict`` takes anything. ``{}``, which it never saves,
  begins the epoch anew without an error. The first batch fails where a key is missing, or the state
  is of another number of workers (torchdata 0.11). A loader of a script's own may save another
  dict.
- Tensors on the meta device have a shape and no numbers: ``load_state_dict`` of modules and
  optimizers refuses them.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName, Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.generator_states import (
    is_int32,
    is_list,
    is_of_numpy_module,
    problem_of_random_states,
)
from ckptfix.checkpoint.model_configs import is_pretrained
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import (
    CALLS,
    Kind,
    Node,
    PickleTree,
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
    WITHOUT_NUMBERS = "tensors on the meta device, which have no numbers"
    PLACEHOLDERS = "placeholders of ZeRO-3"


_SCALER_KEYS = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)

_KEYS = (
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

_NESTED = (Content.OPTIMIZER, Content.SCHEDULER)
"""States that classes of scripts wrap in another dict or list. Loaders look for the others at the
root alone.
"""

_GENERATORS = {
    Content.RANDOM_STATES: (
        "random_state",
        "numpy_random_seed",
        "torch_manual_seed",
        "torch_cuda_manual_seed",
    ),
    Content.TRAINER_RANDOM_STATES: ("python", "numpy", "cpu", "cuda"),
}
"""Keys under which random states have those of Python, numpy, and torch on the CPU and on CUDA
devices.
"""

_INT64 = 1 << 63
_FLOAT64 = 1 << 1023

_BY_ROLE = {
    Role.OPTIMIZER: Content.OPTIMIZER,
    Role.SCHEDULER: Content.SCHEDULER,
    Role.GRAD_SCALER: Content.GRAD_SCALER,
    Role.SAMPLER: Content.SAMPLER,
    Role.DATALOADER: Content.DATALOADER,
    Role.RNG_STATE: Content.RANDOM_STATES,
}


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


NO_TENSORS = StateProblem(Content.MODEL, "no tensors", None)
"""The problem of a weights file without a tensor, where something shows that its model has some."""


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


def may_be_state(name: FileName, file: TorchFile) -> bool:
    """Return whether a file may hold a state of the role that a name has, right or damaged."""
    return content_of(file) is _BY_ROLE.get(name.role, file) or state_problem(name, file) is None


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
        return StateProblem(Content.MODEL, _noun(root), None) if _is_plain(root) else None
    if _is_state_dict(root):
        return None
    if (content := _by_keys(root)) is not None:
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
            f"load the file with torch, and torch.save() the value under {list_names(inner[:1])} "
            "alone"
            if len(inner) == 1
            else "torch.save() the state dict of the whole model, model.state_dict()"
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
        if _is_plain(value) or is_of_numpy_module(value):
            noun = _noun(value) if _is_plain(value) else "a numpy array"
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
        _is_text(key)
        and (is_tensor(value) or (type(key) is Text and key.value.endswith("_extra_state")))
        for key, value in entries
    )


def _is_text(value: object) -> bool:
    return type(value) is Text or (type(value) is Node and value.kind is Kind.LONG_TEXT)


def _without_numbers(expected: Content, file: TorchFile) -> StateProblem | None:
    count = _count_meta([file.tree.root], set()) if META_TENSOR in file.tree.globals else 0
    return _of_meta(expected, count) if count else None


def _count_meta(values: Iterable[object], met: set[int]) -> int:
    """Return the number of tensors on the meta device that some values refer to. ``met``: as
    ``every_node`` has it.
    """
    nodes = chain.from_iterable(every_node(value, met=met) for value in values)
    calls = (node.head for node in nodes if node.kind is Kind.CALL)
    return sum(type(head) is Node and head.is_global(*META_TENSOR) for head in calls)


def _of_meta(expected: Content, count: int) -> StateProblem:
    holds = f"{count_of(count, 'tensor')} on the meta device, without numbers"
    remedy = (
        "the weights were offloaded when the script saved them; save them again with "
        "accelerator.save_model(model, FOLDER), or torch.save() accelerator.get_state_dict(model)"
        if expected is Content.MODEL
        else ""
    )
    return StateProblem(expected, holds, Content.WITHOUT_NUMBERS, remedy)


def problems_inside(file: TorchFile) -> Iterator[tuple[str, StateProblem]]:
    """Yield the state dicts and optimizers in a file of any name that lack numbers, each with its
    keys.

    A tensor that several of them share counts in the first: 5,000 optimizers can share a state of
    500 tensors.
    """
    if META_TENSOR not in file.tree.globals:
        return
    met: set[int] = set()
    try:
        for place in name_lists(file.tree):
            if place.kind == "state dict":
                values = [value for _, value in pairs(place.node) if is_tensor(value)]
                if count := _count_meta(values, met):
                    yield ".".join(place.path), _of_meta(Content.MODEL, count)
        for path, node in optimizers(file.tree.root):
            if count := _count_meta([node], met):
                yield ".".join(path), _of_meta(Content.OPTIMIZER, count)
    except FormatError:
        return


def _judged(expected: Content, file: TorchFile) -> StateProblem | None:
    root = file.tree.root
    content = _content(file)
    if expected is Content.DATALOADER and content in (expected, None):
        return _problem_of_dataloader(root)
    if (
        expected is Content.SCHEDULER
        and content in (expected, None)
        and (lost := _lost_count(root))
    ):
        holds, effect = (
            f"a scheduler's state without {lost!r}",
            f"the load succeeds, and {lost} begins anew",
        )
        return StateProblem(expected, holds, None, effect=effect)
    if content is expected:
        problem = ""
        if expected is Content.OPTIMIZER:
            problem = problem_of_optimizer(root)
        elif expected is Content.SCHEDULER:
            problem = _problem_of_scheduler(root)
        elif expected is Content.GRAD_SCALER:
            return _problem_of_scaler(file.tree)
        elif expected in _GENERATORS:
            problem = problem_of_random_states(file.tree, *_GENERATORS[expected])
        if problem:
            return StateProblem(expected, problem, None)
        return _problem_of_step(file.tree) if expected is Content.RANDOM_STATES else None
    if expected in _NESTED and (wrapper := _wrapper_of(expected, root)):
        return StateProblem(expected, wrapper, None)
    if expected in _NESTED and _is_inside(expected, root):
        return None
    if content is not None:
        return _of_another_kind(expected, content, root)
    is_dict = is_dict_like(root)
    keys = [key.value if type(key) is Text else "" for key, _ in pairs(root)]
    is_empty = is_dict and not keys
    if expected is Content.RANDOM_STATES and keys == ["step"]:
        # ``migrate`` gives a process that the saving run did not have the step alone, and no random
        # states.
        return _problem_of_step(file.tree)
    if (
        # What an object of a class is, its class alone knows.
        not _is_plain(root)
        or expected is Content.SAMPLER
        or (expected is Content.SCHEDULER and is_dict)
        # Lookahead saves "fast_state" and "slow_state" with the groups.
        or (expected is Content.OPTIMIZER and "param_groups" in keys and len(keys) > 1)
        or (expected is Content.GRAD_SCALER and is_empty)
    ):
        return None
    holds = _in_words(expected, root) if is_dict and not is_empty else _noun(root)
    may_be_of_script = expected is Content.GRAD_SCALER and _may_be_of_data(root)
    return StateProblem(expected, holds, None, may_be_of_script=may_be_of_script)


def _of_another_kind(expected: Content, content: Content, root: object) -> StateProblem | None:
    if (
        expected is Content.SCHEDULER
        and content is Content.OPTIMIZER
        and not is_surely_of_optimizer(root)
    ):
        return None
    return StateProblem(expected, content.value, content)


def states_under_other_keys(file: TorchFile) -> Iterator[tuple[tuple[str, ...], StateProblem]]:
    """Yield the states in a file of any name whose key promises another kind, each with the keys
    that lead to it.

    A state is judged where no other key on the way promises something: a script may save
    ``{"schedulers": {"optimizer_0": ...}}``, or ``{"optim": {"lr": ...}}`` and ``{"optim": [...]}``
    with an optimizer and a scheduler.
    """
    visits = Visits()
    # A few bytes can refer to one long dict again and again.
    contents: dict[int, Content | None] = {}
    waiting: list[tuple[object, tuple[str, ...], frozenset[Content]]] = [
        (file.tree.root, (), frozenset())
    ]
    try:
        while waiting:
            value, keys, before = waiting.pop()
            if not is_dict_like(value) or not visits.first(value) or len(keys) > _MOST_KEYS:
                continue
            for key, node in pairs(value):
                if type(key) is not Text:
                    continue
                promised = before | _promised_by(key.value)
                is_several = type(node) is Node and is_list(node)
                if is_several and not visits.first(node):
                    continue
                states = [
                    state
                    for state in (items_of(node) if is_several else (node,))
                    if is_dict_like(state)
                ]
                for state in states:
                    if id(state) not in contents:
                        contents[id(state)] = _by_keys(state) or _of_module(state)
                kinds = [contents[id(state)] for state in states]
                for number, (state, content) in enumerate(zip(states, kinds, strict=True)):
                    path = (*keys, key.value, str(number)) if is_several else (*keys, key.value)
                    if content is None:
                        waiting.append((state, path, promised))
                    elif len(promised) == 1 and not before and promised.isdisjoint(kinds):
                        (expected,) = promised
                        problem = _of_another_kind(expected, content, state)
                        # "optimized_model" promises no optimizer, and a noise scheduler may be a
                        # module with buffers: only a copy of the model is another state.
                        is_named = content is not Content.MODEL or (
                            _names_state(key.value)
                            and _is_elsewhere(file.tree.root, path[0], state)
                        )
                        if (
                            visits.first(state)
                            and problem is not None
                            and is_named
                            and not _is_inside(expected, state)
                        ):
                            yield path, problem
    except FormatError:
        return


_MOST_KEYS = 4


def _promised_by(key: str) -> frozenset[Content]:
    """Return the kinds of states that a key of a script names."""
    word = key.lower()
    kinds = {content for part, content in _IN_KEYS.items() if part in word}
    return frozenset({*kinds, Content.MODEL} if word in _OF_MODELS else kinds)


_IN_KEYS = {"optim": Content.OPTIMIZER, "sched": Content.SCHEDULER, "scaler": Content.GRAD_SCALER}
_OF_MODELS = ("model", "model_state_dict")
"""Keys under which scripts and libraries save a model; above them, parts of keys of other states.
Under ``state_dict`` may be any object's.
"""


_STATE = re.compile(r"(lr_?)?(optim(izer)?|sched(uler)?)s?(_?\d+|_states?(_dict)?)?")


def _names_state(key: str) -> bool:
    """Return whether a key of a script is that of an optimizer or a scheduler and of nothing
    else.
    """
    return _STATE.fullmatch(key.lower()) is not None


def _of_module(node: object) -> Content | None:
    """Return the content of the state dict of a module, which has the versions of its submodules;
    None for any other dict.
    """
    if not is_dict_like(node) or not is_dict_like(attribute(node, "_metadata")):
        return None
    entries = list(pairs(node))
    return Content.MODEL if entries and all(is_tensor(value) for _, value in entries) else None


def _is_elsewhere(root: object, place: str, state: object) -> bool:
    """Return whether a key at the root of a file, other than ``place``, leads to a state dict with
    the same keys.
    """
    keys = text_keys(state)
    return any(
        type(key) is Text
        and key.value != place
        and is_dict_like(value)
        and text_keys(value) == keys
        for key, value in pairs(root)
    )


def states_without_content(file: TorchFile) -> Iterator[tuple[str, str]]:
    """Yield each key at the root of a file of a script that is a model's, an optimizer's or a
    scheduler's and has nothing that torch could load, with that in words. A script may have meant
    it.
    """
    with suppress(FormatError):
        root = file.tree.root
        for key, value in pairs(root) if is_dict_like(root) else ():
            if type(key) is not Text or not (
                _names_state(key.value) or key.value.lower() in _OF_MODELS
            ):
                continue
            if is_dict_like(value) and not list(pairs(value)):
                yield key.value, "an empty dict"
            elif value is None:
                yield key.value, "None"
            elif is_list(value) and any(
                child(item, "params") is not None for item in items_of(value)[:1]
            ):
                yield key.value, "a list of param groups"
            elif _names_state(key.value) and _of_module(value) is not None:
                yield key.value, "the state dict of a module"


def _may_be_of_data(root: object) -> bool:
    """Return whether ``scaler.pt`` may be what a script scales its data by, such as a mean and a
    deviation.
    """
    if is_dict_like(root):
        return not any(type(key) is Text and key.value in _SCALER_KEYS for key, _ in pairs(root))
    return is_tensor(root) or any(map(is_tensor, items_of(root)))


def _content(file: TorchFile) -> Content | None:
    root = file.tree.root
    if (content := _by_keys(root)) is not None:
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


def _by_keys(node: object) -> Content | None:
    if not is_dict_like(node):
        return None
    keys = text_keys(node)
    return next((content for content, wanted in _KEYS if wanted <= keys), None)


def _is_inside(content: Content, root: object) -> bool:
    visits = Visits()
    return any(
        _by_keys(node) is content
        for node in every_node(root)
        if is_dict_like(node) and visits.first(node)
    )


def _wrapper_of(content: Content, root: object) -> str:
    """Return in words a list or dict that has a state as its only item, "" for anything else.

    Classes of scripts that wrap states add something of their own, or have several.
    """
    values = list(items_of(root)) if is_list(root) else [value for _, value in pairs(root)]
    if len(values) != 1 or _by_keys(values[0]) is not content:
        return ""
    return f"{_noun(root)} around {content.value}"


def problem_of_optimizer(root: object) -> str:
    """Return why no optimizer of torch loads a dict with both keys, "" for one that may be
    loaded.
    """
    state, groups = child(root, "state"), child(root, "param_groups")
    if not is_dict_like(state) and _is_plain(state):
        return f"an optimizer whose 'state' is {_noun(state)}"
    if not is_list(groups):
        return f"an optimizer whose 'param_groups' are {_noun(groups)}" if _is_plain(groups) else ""
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
            return f"an optimizer whose param group {number} has {_noun(members)} as 'params'"
        lists_any = lists_any or not is_list(members) or bool(items_of(members))
    if not lists_any and any(type(key) is int for key, _ in pairs(state)):
        return (
            "an optimizer with moments and no "
            f"{'parameter in its ' if items_of(groups) else ''}param groups"
        )
    return ""


def is_surely_of_optimizer(root: object) -> bool:
    """Return whether a dict with both keys is an optimizer's: a script may have other values under
    them.

    Every optimizer has a param group, and numbers its moments.
    """
    return any(type(key) is int for key, _ in pairs(child(root, "state"))) or any(
        child(group, "params") is not None for group in items_of(child(root, "param_groups"))
    )


def _problem_of_scheduler(root: object) -> str:
    """Return why no scheduler of torch continues from a state, "" where one may.

    States inside are not judged: a SequentialLR reads no more of those that are done, and starts
    later ones anew.
    """
    values = {key.value: value for key, value in pairs(root) if type(key) is Text}
    for key in _COUNTS:
        value = values.get(key, 0)
        if type(value) not in (int, float, bool) and _is_plain(value) and not is_tensor(value):
            return f"a scheduler's state whose {key!r} is {_noun(value)}"
    for keys in _PAIRS_OF_CYCLES if _OF_CYCLES in values else ():
        lengths = [len(items_of(values[key])) for key in keys if is_list(values.get(key))]
        if len(set(lengths)) > 1:
            return f"a scheduler's state with {lengths[0]} {keys[0]!r} and {lengths[1]} {keys[1]!r}"
    # Their loads take these keys out of the state. torch 1.12 and older kept a function in
    # CyclicLR.
    if "_milestones" in values and "_schedulers" not in values:
        return "a scheduler's state with '_milestones' and without '_schedulers'"
    if _OF_CYCLES in values and not values.keys() & {"_scale_fn_custom", "scale_fn"}:
        return "a scheduler's state of CyclicLR without '_scale_fn_custom'"
    if "_schedulers" not in values:
        return ""
    parts, milestones = values["_schedulers"], len(items_of(values.get("_milestones")))
    if not is_list(parts):
        return (
            f"a scheduler's state whose '_schedulers' is {_noun(parts)}" if _is_plain(parts) else ""
        )
    for part in items_of(parts):
        if _is_plain(part) and not is_dict_like(part):
            return f"a scheduler's state with {_noun(part)} in '_schedulers'"
    if milestones >= max(len(items_of(parts)), 1):
        count = count_of(len(items_of(parts)), "scheduler")
        return f"a scheduler's state with {count} and {count_of(milestones, 'milestone')}"
    return ""


def _lost_count(root: object) -> str:
    """Return the count that a scheduler of torch lost, "" where all are there or the scheduler is
    not of torch.
    """
    keys = text_keys(root)
    return next((name for name, signs in _COUNTED if name not in keys and signs <= keys), "")


_OF_PLATEAU = frozenset(("patience", "threshold_mode", "cooldown_counter"))
_COUNTED = (
    ("last_epoch", frozenset(("base_lrs", "_last_lr", "_step_count"))),
    ("last_epoch", frozenset(("_schedulers", "_milestones"))),
    ("T_cur", frozenset(("T_0", "T_i", "T_mult"))),
    ("num_bad_epochs", _OF_PLATEAU),
    ("best", _OF_PLATEAU),
)
"""Counts from which torch computes the next rates, and the keys next to which every class has them.

A new scheduler has a value for them, so that a load without them is silent. It has the right one
for any other key.
"""

_COUNTS = ("last_epoch", "_step_count")
"""Values to which each step of torch's schedulers adds 1."""

_OF_CYCLES = "step_ratio"
_PAIRS_OF_CYCLES = (("base_lrs", "max_lrs"), ("base_momentums", "max_momentums"))
"""A key of CyclicLR, and its lists that each step reads side by side. It has them from one state,
or from itself.

LambdaLR has ``base_lrs`` and ``lr_lambdas``. Their lengths show nothing: a MultiplicativeLR with
the state of a run that had fewer param groups loads, steps, and saves two lengths.
"""


_OF_LOADER = ("_num_yielded", "_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed",
    "dataset_state", "_iterator_finished")  # fmt: skip
_OF_LOADER_WITH_WORKERS = ("_snapshot", "_steps_since_snapshot", "_iterator_finished")
_OF_SNAPSHOT = ("_snapshot_step", "_last_yielded_worker_id", "_main_snapshot")
_OF_MAIN_SNAPSHOT = ("_num_workers", "_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed",
    "_base_seed")  # fmt: skip
"""Keys that torchdata's loaders look up, whatever the dataset and the sampler (0.11)."""


def _problem_of_dataloader(root: object) -> StateProblem | None:
    """Return why torchdata's loader cannot continue from a state, None where it can, or another
    loader may.
    """
    if not _is_plain(root):
        return None
    if not is_dict_like(root) or not any(True for _ in pairs(root)):
        is_nothing = is_dict_like(root) or root is None
        effect = (
            "the load succeeds, and the data loader begins the epoch anew"
            if is_nothing
            else _NO_BATCH
        )
        return StateProblem(Content.DATALOADER, _noun(root), None, effect=effect)
    if not is_of_torchdata(root):
        return None
    parts: list[tuple[str, object, tuple[str, ...]]] = [("", root, _OF_LOADER)]
    snapshot = child(root, "_snapshot")
    if snapshot is not None or child(root, "_steps_since_snapshot") is not None:
        parts = [
            ("", root, _OF_LOADER_WITH_WORKERS),
            ("_snapshot", snapshot, _OF_SNAPSHOT),
            ("_main_snapshot", child(snapshot, "_main_snapshot"), _OF_MAIN_SNAPSHOT),
        ]
    for key, part, wanted in parts:
        keys = (
            {name.value for name, _ in pairs(part) if type(name) is Text}
            if is_dict_like(part)
            else set()
        )
        lacking = [name for name in wanted if name not in keys]
        if lacking:
            where = f" in {key!r}" if key else ""
            holds = f"a data loader's state without {list_names(lacking)}{where}"
            return StateProblem(Content.DATALOADER, holds, None, effect=_NO_BATCH)
        for name in {*_COUNTS_OF_LOADER}.intersection(wanted):
            value = child(part, name)
            if _is_plain(value) and type(value) is not int:
                holds = f"a data loader's state whose {name!r} is {_noun(value)}"
                return StateProblem(Content.DATALOADER, holds, None, effect=_NO_BATCH)
    return None


_NO_BATCH = "the load succeeds, and the first batch fails"
_COUNTS_OF_LOADER = (
    "_num_yielded", "_sampler_iter_yielded", "_steps_since_snapshot", "_snapshot_step",
    "_num_workers",
)  # fmt: skip


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


def workers_of_loader(root: object) -> int | None:
    """Return the number of workers of a state of torchdata's loader, None for a state of anything
    else.
    """
    if not is_of_torchdata(root) or _problem_of_dataloader(root) is not None:
        return None
    main = child(child(root, "_snapshot"), "_main_snapshot")
    workers = child(main, "_num_workers") if main is not None else 0
    return workers if type(workers) is int else None


def _problem_of_scaler(tree: PickleTree) -> StateProblem | None:
    """Return the problem of a value that ``GradScaler`` loads, and with which its next step or
    update fails.
    """
    for key, value in pairs(tree.root):
        if (
            type(key) is Text
            and key.value in _SCALER_KEYS
            and not _is_of_scaler(key.value, value, tree)
        ):
            holds = f"a gradient scaler's state whose {key.value!r} is {_noun(value)}"
            effect = "the load succeeds, and the first step of a run with fp16 fails"
            if type(value) in (int, float):
                holds += " that torch does not take"
            return StateProblem(Content.GRAD_SCALER, holds, None, effect=effect)
    return None


def _is_of_scaler(name: str, value: Any, tree: PickleTree) -> bool:
    if type(value) is Node and is_tensor(value):
        tensor = read_tensor(Text("", 0, 0), value, storages(tree))
        return tensor is None or not tensor.shape
    if type(value) is Node and not _is_plain(value):
        return True
    if name == "growth_interval":
        return type(value) is int and -_INT64 <= value < _INT64
    if name == "_growth_tracker":
        return is_int32(value)
    most = _INT64 if name == "scale" else _FLOAT64
    return type(value) in (bool, float) or (type(value) is int and -most <= value < most)


def _problem_of_step(tree: PickleTree) -> StateProblem | None:
    """Return the problem of a step with which ``accumulate`` fails or never lets the optimizer
    step.
    """
    step = next(
        (value for key, value in pairs(tree.root) if type(key) is Text and key.value == "step"), 0
    )
    if type(step) is float:
        is_count = step.is_integer()
        noun = "not a whole number"
    elif type(step) is Node and is_tensor(step):
        tensor = read_tensor(Text("", 0, 0), step, storages(tree))
        is_count = tensor is None or prod(tensor.shape) == 1
        noun = "a tensor of several numbers"
    else:
        is_count = type(step) in (int, bool) or not _is_plain(step)
        noun = _noun(step)
    if is_count:
        return None
    holds = f"random states whose 'step' is {noun}"
    effect = "load_state takes it, and accumulate() then fails or never steps the optimizer"
    return StateProblem(Content.RANDOM_STATES, holds, None, effect=effect)


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


def _in_words(expected: Content, root: object) -> str:
    wanted = next(keys for content, keys in _KEYS if content is expected)
    lacking = sorted(wanted - text_keys(root))
    return f"a dict without {list_names(lacking)}"


def _noun(value: object) -> str:
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

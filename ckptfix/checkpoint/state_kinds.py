"""Kinds of states, each known by keys that its loader asks for, and values of a pickle in words."""

from enum import Enum
from typing import NamedTuple

from ckptfix.checkpoint.generator_states import is_list
from ckptfix.formats.pickle_tree import (
    Kind,
    Node,
    Text,
    Visits,
    child,
    every_node,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.torch_tensors import is_tensor
from ckptfix.wording import list_names


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


SCALER_KEYS = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)

STATE_KEYS = (
    (Content.OPTIMIZER, frozenset(("state", "param_groups"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "_last_lr"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "_step_count"))),
    (Content.SCHEDULER, frozenset(("_schedulers", "_last_lr"))),
    (Content.SCHEDULER, frozenset(("last_epoch", "num_bad_epochs"))),
    (Content.GRAD_SCALER, SCALER_KEYS),
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


def is_text(value: object) -> bool:
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
    return next((content for content, wanted in STATE_KEYS if wanted <= keys), None)


def is_inside(content: Content, root: object) -> bool:
    """Return whether a dict anywhere inside a value is a state of this kind."""
    visits = Visits()
    return any(
        state_by_keys(node) is content
        for node in every_node(root)
        if is_dict_like(node) and visits.first(node)
    )


def wrapper_of(content: Content, root: object) -> str:
    """Return in words a list or dict that has a state as its only item, "" for anything else.

    Classes of scripts that wrap states add something of their own, or have several.
    """
    values = list(items_of(root)) if is_list(root) else [value for _, value in pairs(root)]
    if len(values) != 1 or state_by_keys(values[0]) is not content:
        return ""
    return f"{noun_of(root)} with {content.value} as its only item"


def is_surely_of_optimizer(root: object) -> bool:
    """Return whether a dict with both keys is an optimizer's: a script may have other values under
    them.

    Every optimizer has a param group, and numbers its moments.
    """
    return any(type(key) is int for key, _ in pairs(child(root, "state"))) or any(
        child(group, "params") is not None for group in items_of(child(root, "param_groups"))
    )


def is_plain(value: object) -> bool:
    """Return whether a value is a container, a tensor or a constant, and not an object of a
    class.
    """
    return (
        type(value) is not Node
        or is_dict_like(value)
        or is_tensor(value)
        or value.kind is Kind.LIST
    )


def without_keys(expected: Content, root: object) -> str:
    """Return in words a dict that lacks keys of the expected state."""
    wanted = next(keys for content, keys in STATE_KEYS if content is expected)
    lacking = sorted(wanted - text_keys(root))
    return f"a dict without {list_names(lacking)}"


def noun_of(value: object) -> str:
    """Return a value in words, without what is in it."""
    if value is None or type(value) is bool:
        return str(value)
    if is_text(value):
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

"""States under the keys of a script, in a file of any name: of another kind than their key promises,
without numbers, or empty.
"""

import re
from collections.abc import Iterator

from ckptfix.checkpoint.state_contents import (
    Content,
    StateProblem,
    count_meta,
    is_inside,
    is_list,
    of_another_kind,
    of_meta,
    state_by_keys,
)
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import (
    Node,
    Text,
    Visits,
    attribute,
    is_dict_like,
    items_of,
    pairs,
    text_keys,
)
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import name_lists, optimizers
from ckptfix.formats.torch_tensors import META_TENSOR, is_tensor


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
                if count := count_meta(values, met):
                    yield ".".join(place.path), of_meta(Content.MODEL, count)
        for path, node in optimizers(file.tree.root):
            if count := count_meta([node], met):
                yield ".".join(path), of_meta(Content.OPTIMIZER, count)
    except FormatError:
        return


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
                        contents[id(state)] = state_by_keys(state) or _of_module(state)
                kinds = [contents[id(state)] for state in states]
                for number, (state, content) in enumerate(zip(states, kinds, strict=True)):
                    path = (*keys, key.value, str(number)) if is_several else (*keys, key.value)
                    if content is None:
                        waiting.append((state, path, promised))
                    elif len(promised) == 1 and not before and promised.isdisjoint(kinds):
                        (expected,) = promised
                        problem = of_another_kind(expected, content, state)
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
                            and not is_inside(expected, state)
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

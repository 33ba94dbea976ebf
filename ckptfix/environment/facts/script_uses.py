"""Names and calls that a script uses, and what a variable holds by what made it and by its name."""

import ast
import re
from collections.abc import Collection, Iterable

from msgspec import Struct

_MODEL_NAME = re.compile(
    r"(^|_)(model|net|network|teacher|student|generator|discriminator|actor|critic|unet|vae|policy)(_|\d|$)",
    re.I,
)
_OPTIMIZER_NAME = re.compile(r"(^|_)opt(im(izer)?)?(_|\d|$)", re.I)
_NO_MODEL_NAME = re.compile(
    r"(loader|data|dl|sched|sampler|warmup|batch|tokenizer|processor|iter|lr)", re.I
)
_MODEL_CLASS = re.compile(r"(Model|Net|Network|Module|ForCausalLM|For[A-Z]\w+|LMHeadModel)$")


def is_module_class(name: str, modules: Collection[str]) -> bool:
    """Return whether a class is one of modules. ``modules``: those of the script's own classes that
    are.
    """
    return name in modules or name.startswith("torch.nn.") or bool(_MODEL_CLASS.search(name))


def is_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Return whether a variable holds a model. ``maker``: the full name of the called maker, "" for
    unknown.
    """
    owner, _, last = maker.rpartition(".")
    if is_optimizer(variable, maker) or maker.startswith(("torch.optim.", "torch.utils.data.")):
        return False
    if maker in modules or maker.startswith("torch.nn.") or _MODEL_CLASS.search(last):
        return True
    if last in ("from_pretrained", "from_config"):
        return bool(_MODEL_CLASS.search(owner) or re.search(r"AutoModel", owner))
    return bool(_MODEL_NAME.search(variable.rpartition(".")[2]))


def may_be_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Return whether a variable can hold a model: it does, or nothing says that it holds anything
    else.
    """
    if is_model(variable, maker, modules):
        return True
    is_other = is_optimizer(variable, maker) or maker.startswith(
        ("torch.optim.", "torch.utils.data.")
    )
    return not is_other and not _NO_MODEL_NAME.search(variable.rpartition(".")[2])


def is_optimizer(variable: str, maker: str) -> bool:
    """Return whether a variable holds an optimizer."""
    if maker.startswith("torch.optim.lr_scheduler."):
        return False
    return maker.startswith("torch.optim.") or bool(
        _OPTIMIZER_NAME.search(variable.rpartition(".")[2])
    )


_MISSING = frozenset(
    {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
)
"""Whoever catches one of these, or asks one of the following, knows that a name may not be there.
"""

_ASKS = ("version", "TYPE_CHECKING", "hasattr", "available", "find_spec")


def catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches what a missing name raises."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(error is None or _last_name(error) in _MISSING for error in caught)


def suppresses(context: ast.expr) -> bool:
    """Return whether a ``with`` is one of ``contextlib.suppress`` for what a missing name
    raises.
    """
    if not isinstance(context, ast.Call) or _last_name(context.func) != "suppress":
        return False
    return any(_last_name(error) in _MISSING for error in context.args)


def asks_first(test: ast.expr) -> bool:
    """Return whether an ``if`` asks for a version, or for what is there."""
    return any(word in ast.unparse(test) for word in _ASKS)


def constant(node: ast.expr | None, default: object = None) -> object:
    """Return the value that an expression spells out, ``default`` for any other."""
    return node.value if isinstance(node, ast.Constant) else default


def texts(nodes: Iterable[ast.expr]) -> list[str]:
    """Return the texts among expressions."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def device_of(words: dict[str, ast.expr]) -> list[ast.expr]:
    """Return the argument ``device`` of a call, if it is given by name."""
    return [words["device"]] if "device" in words else []


def variable(node: ast.expr) -> str:
    """Return a variable or an attribute as it is written, "" for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _last_name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


class SourceLine(Struct, frozen=True, kw_only=True):
    """A line of a script. ``order``: sorts places. ``where``: in words. ``text``: the line."""

    order: tuple[int, int]
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class Prepared(Struct, frozen=True, kw_only=True):
    """A call of ``prepare``: the name of the accelerator, and the names of models and optimizers in
    its arguments.
    """

    place: SourceLine
    accelerator: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]


class PreparedTwice(Struct, frozen=True, kw_only=True):
    """A model that is passed to ``prepare`` twice: the name in the second call, and both calls."""

    name: str
    first: SourceLine
    second: SourceLine


class WrappedEarly(Struct, frozen=True, kw_only=True):
    """A model that is wrapped in DDP or DataParallel, and then passed to ``prepare``."""

    name: str
    wrapped: SourceLine
    prepared: SourceLine


class Uses(Struct, frozen=True, kw_only=True):
    """Names and calls that a script uses, each with its places.

    ``taken``: names taken from accelerate. ``made_early`` and ``touched_early``: accelerators and
    devices at module level. ``launches``: ``notebook_launcher`` with more than one process.
    ``backwards``: ``loss.backward()``. ``deepspeed``: that it is used, ``plugin_choices``:
    ``select_deepspeed_plugin``. ``device_maps``: calls with that argument. ``builds``: what needs a compiler.
    ``options``: the script's own, without dashes, with underscores; None when it reads its command
    line in a way that is not followed. ``twice`` and ``wrapped``: models that are prepared again,
    or wrapped before. ``is_guarded``: its Accelerator is the one of ckptfix. ``saves`` and
    ``loads``: of a whole state; ``loads_otherwise``: a checkpoint is read in another way.
    ``schedulers``: those that are stepped and never prepared. ``resume_options``: its own that are
    about resuming.
    """

    taken: tuple[tuple[str, SourceLine], ...] = ()
    accelerators: tuple[SourceLine, ...] = ()
    made_early: tuple[SourceLine, ...] = ()
    touched_early: tuple[SourceLine, ...] = ()
    launches: tuple[SourceLine, ...] = ()
    backwards: tuple[SourceLine, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    deepspeed: tuple[SourceLine, ...] = ()
    plugin_choices: tuple[SourceLine, ...] = ()
    device_maps: tuple[SourceLine, ...] = ()
    builds: tuple[SourceLine, ...] = ()
    options: frozenset[str] | None = frozenset()
    twice: tuple[PreparedTwice, ...] = ()
    wrapped: tuple[WrappedEarly, ...] = ()
    is_guarded: bool = False
    saves: tuple[SourceLine, ...] = ()
    loads: tuple[SourceLine, ...] = ()
    loads_otherwise: bool = False
    schedulers: tuple[SourceLine, ...] = ()
    resume_options: tuple[SourceLine, ...] = ()

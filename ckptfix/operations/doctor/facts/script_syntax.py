"""Single expressions and blocks of a syntax tree: what they hold, and whether they reckon with a missing name."""

import ast
from collections.abc import Iterable

_MISSING = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})
"""Whoever catches one of these, or asks one of the following, knows that a name may not be there."""

_ASKS = ("version", "TYPE_CHECKING", "hasattr", "available", "find_spec")


def catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches what a missing name raises."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(error is None or _last_name(error) in _MISSING for error in caught)


def suppresses(context: ast.expr) -> bool:
    """Whether a ``with`` is one of ``contextlib.suppress`` for what a missing name raises."""
    if not isinstance(context, ast.Call) or _last_name(context.func) != "suppress":
        return False
    return any(_last_name(error) in _MISSING for error in context.args)


def asks_first(test: ast.expr) -> bool:
    """Whether an ``if`` asks for a version, or for what is there."""
    return any(word in ast.unparse(test) for word in _ASKS)


def constant(node: ast.expr | None, default: object = None) -> object:
    """Return the value that an expression spells out, ``default`` for any other."""
    return node.value if isinstance(node, ast.Constant) else default


def texts(nodes: Iterable[ast.expr]) -> list[str]:
    """Return the texts among expressions."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def device_of(words: dict[str, ast.expr]) -> list[ast.expr]:
    """Return the argument ``device`` of a call, if it is given by name."""
    return [words["device"]] if "device" in words else []


def variable(node: ast.expr) -> str:
    """Return a variable or an attribute as it is written, "" for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

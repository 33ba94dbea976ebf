"""The one serializer of reports: the values of a verb as ``--json`` prints them, declared as a list
of keys.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any, ClassVar


class Serialized:
    """Base of every value that ``--json`` prints.

    ``json_keys``: the keys in their order, separated by spaces. A key is the name of an attribute,
    or it is ``key=attribute``. A method is called. A key that ends in ``?`` is left out where its
    value is empty.
    """

    __slots__ = ()
    json_keys: ClassVar[str]

    def json_items(self, at: str = "") -> Iterator[tuple[str, object]]:
        """Yield every key with its value, which is not JSON yet: a subclass may add or replace
        some.
        """
        return items(self, self.json_keys)

    def as_json(self, at: str = "") -> dict[str, Any]:
        """Return the value as JSON values. ``at``: the checkpoint for the commands in it; a report
        names its own.
        """
        at = str(getattr(self, "path", at))
        return {key: plain(one, at) for key, one in self.json_items(at)}


def items(value: object, keys: str) -> Iterator[tuple[str, object]]:
    """Yield keys, written as in ``Serialized.json_keys``, with the attributes of any value."""
    for key, attribute in _attributes(keys):
        one = attribute(value)
        if one or not key.endswith("?"):
            yield key.removesuffix("?"), one


def holds_many(value: object) -> bool:
    """Return whether a value is a list of reports, or a report with one: such values are large."""
    if isinstance(value, Serialized):
        return any(holds_many(one) for _, one in value.json_items())
    return isinstance(value, tuple | list) and bool(value) and isinstance(value[0], Serialized)


def plain(value: object, at: str = "") -> Any:
    """Return a value as JSON values: a path as its text, an enum as its value, infinity as "inf".

    ``at``: the checkpoint for the commands in it.
    """
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Serialized):
        return value.as_json(at)
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(one, at) for key, one in value.items()}
    if isinstance(value, tuple | list):
        if hasattr(value, "_asdict"):
            return plain(value._asdict(), at)
        return [plain(one, at) for one in value]
    if callable(value):
        return plain(value(), at)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


@cache
def _attributes(keys: str) -> tuple[tuple[str, Callable[[Any], object]], ...]:
    pairs = (one.partition("=") for one in keys.split())
    return tuple(
        (key, attrgetter(attribute or key.removesuffix("?"))) for key, _, attribute in pairs
    )

"""What a pickle's globals may do. (Being filled in; the signatures stand.)"""

from collections.abc import Iterable
from enum import Enum


class GlobalSafety(Enum):
    """How far a global can be trusted."""

    SAFE = "safe"
    SAFE_IN_RNG_STATE = "safe in rng state"
    UNKNOWN = "unknown"
    UNSAFE = "unsafe"


def classify(module: str, name: str) -> GlobalSafety:
    """Return how far ``module.name`` can be trusted."""
    raise NotImplementedError


def safe_globals_line(names: Iterable[tuple[str, str]]) -> str:
    """Return the line of Python that allows these globals."""
    raise NotImplementedError

"""Load whatever is on disk into what is in memory: all of it, or nothing, and say which.

``state`` is the entry for a whole run, ``single`` for one model, ``delegated`` for runs that accelerate must load.
``entries`` are what a folder offers, ``targets`` what a run holds, ``matching`` and ``following`` decide who gets what.
What is planned is a ``draft``, filled by ``models``, ``states`` and ``randomness``, which ``reading`` and ``checking``
serve. ``commit`` makes all ranks agree and does it; ``rollback`` is the way back. ``report`` is what the caller sees.
"""

from ckptfix.training.loading.load_report import (
    ComponentReport,
    LoadError,
    LoadPolicy,
    LoadReport,
    Need,
    Part,
    Status,
)
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant

__all__ = [
    "ComponentReport",
    "LoadError",
    "LoadPolicy",
    "LoadReport",
    "Need",
    "Part",
    "Status",
    "load_checkpoint_tolerant",
    "load_state_tolerant",
]

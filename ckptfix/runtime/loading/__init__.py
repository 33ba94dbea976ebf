"""Load whatever is on disk into what is in memory: all of it, or nothing, and say which.

``state`` is the entry for a whole run, ``single`` for one model. What they plan is a ``draft``, filled by ``models``,
``states`` and ``randomness``; ``agreeing`` makes all ranks agree; ``commit`` alone modifies anything.
"""

from ckptfix.runtime.loading.policy import LoadPolicy, Need, Part
from ckptfix.runtime.loading.report import ComponentReport, LoadError, LoadReport, Status
from ckptfix.runtime.loading.single import load_checkpoint_tolerant
from ckptfix.runtime.loading.state import load_state_tolerant

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

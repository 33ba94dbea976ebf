"""``doctor``: problems of this environment, why they matter, and what to do.

``facts`` gathers, ``checks`` judge, ``catalogue`` lists them. Nothing here imports torch: what it says of itself and of
its devices is handed over by the command line.
"""

from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.doctor import Diagnosis, diagnose_environment
from ckptfix.environment.facts import Facts, gather
from ckptfix.environment.facts.machine import Torch, parse_torch

__all__ = [
    "Advice",
    "Diagnosis",
    "Facts",
    "Topic",
    "Torch",
    "diagnose_environment",
    "gather",
    "parse_torch",
]

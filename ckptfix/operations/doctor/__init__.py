"""``doctor``: problems of this environment, why they matter, and what to do.

``facts`` gathers, ``checks`` judge, ``catalogue`` lists them. Nothing here imports torch: what it says of itself and of
its devices is handed over by the command line.
"""

from ckptfix.operations.doctor.advice import Advice, Topic
from ckptfix.operations.doctor.diagnosis import Diagnosis, diagnose_environment
from ckptfix.operations.doctor.facts import Facts, gather
from ckptfix.operations.doctor.facts.devices import Torch, parse_torch
from ckptfix.operations.doctor.facts.pci import Bus, parse_bus

__all__ = [
    "Advice",
    "Bus",
    "Diagnosis",
    "Facts",
    "Topic",
    "Torch",
    "diagnose_environment",
    "gather",
    "parse_bus",
    "parse_torch",
]

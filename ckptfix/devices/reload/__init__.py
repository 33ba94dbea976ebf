"""Reload a checkpoint onto a device map and prove what arrives, three ways.

``verifying`` is the entry. ``stored`` reads the files twice, ``planning`` and ``mapping`` decide where tensors go,
``placing`` sends them there, ``building`` and ``filling`` make the model, ``modelling`` and ``running`` run it,
``localising`` names the pair and the block at fault, ``report`` holds the outcome and ``page`` shows it.

>>> report = verify_reload("./checkpoint", device_map="auto", model="mypkg.models:build")
>>> report.status, [str(proof) for proof in report.proofs]
"""

from ckptfix.devices.reload.reload_report import Divergence, Outcome, PairFacts, Proof, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload

__all__ = ["Divergence", "Outcome", "PairFacts", "Proof", "ReloadReport", "Subject", "verify_reload"]

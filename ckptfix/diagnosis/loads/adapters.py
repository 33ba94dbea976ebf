"""Adapters of PEFT against their config: which of the tensors a load brings to life."""

from ckptfix.checkpoint.load_inputs import Load
from ckptfix.diagnosis.loads.verdict import LoadVerdict


def judge_adapter(load: Load) -> LoadVerdict:
    """Return the verdict on an adapter."""
    return LoadVerdict()

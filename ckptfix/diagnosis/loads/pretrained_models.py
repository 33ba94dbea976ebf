"""Models for ``from_pretrained`` against their config: which of their tensors a load leaves random."""

from ckptfix.checkpoint.load_inputs import Load
from ckptfix.diagnosis.loads.verdict import LoadVerdict


def judge_model(load: Load) -> LoadVerdict:
    """Return the verdict on a model of transformers or diffusers."""
    return LoadVerdict()

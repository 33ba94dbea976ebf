"""What the tests of the guard share: accelerators, models, and what to look at."""

from typing import Any

import accelerate
import torch
from torch import nn

from ckptfix.training.accelerator import Accelerator


def accelerator(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, **arguments)


def model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(10, 2)


def counts(made: accelerate.Accelerator) -> tuple[int, int, int, int, int]:
    return (
        len(made._models),
        len(made._optimizers),
        len(made._schedulers),
        len(made._dataloaders),
        len(made._custom_objects),
    )


def computes_in_bf16(module: nn.Module) -> bool:
    """Whether autocast is on in forward: the outputs are float32 again, but of bfloat16's few
    bits.
    """
    result = module(torch.full((1, 10), 1.2345678))
    return bool((result.to(torch.bfloat16).to(torch.float32) == result).all())

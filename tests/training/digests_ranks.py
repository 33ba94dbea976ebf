"""Two processes save as one, with digests: ``torchrun digests_ranks.py FOLDER``."""

import sys

import torch

from ckptfix.training.accelerator import Accelerator

accelerator = Accelerator(cpu=True, tensor_digests=True)
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
accelerator.save_state(sys.argv[1])
accelerator.end_training()

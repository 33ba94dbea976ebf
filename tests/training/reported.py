"""The script of accelerate #3967: prepare, look at the hooks, save_state, load_state. It knows
nothing of ckptfix.

    torchrun --nproc_per_node 2 reported.py FOLDER PREPARES

Each rank writes what it prints into FOLDER/rank-N.txt.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

folder, prepares = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
accelerator = Accelerator()
lines: list[str] = []
calls = {"gradient": 0, "state_dict": 0}


def count(name: str) -> None:
    calls[name] += 1


linear = nn.Linear(10, 2)
linear.register_state_dict_pre_hook(lambda *_: count("state_dict"))
for parameter in linear.parameters():
    parameter.register_hook(lambda gradient: count("gradient"))
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

model = linear
for _ in range(prepares):
    model = accelerator.prepare(model)
optimizer = accelerator.prepare(optimizer)

lines.append(f"TOTAL MODELS {len(accelerator._models)}")
inside, chain = model, [type(model).__name__]
while hasattr(inside, "module"):
    inside = inside.module
    chain.append(repr(inside) if inside is linear else type(inside).__name__)
lines.append(" -> ".join(chain))
lines.append(f"unwrapped: {accelerator.unwrap_model(model) is linear}, at depth {len(chain) - 1}")
lines.append(f"keys {list(model.state_dict())}")


def loss_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
    inputs, targets = (
        torch.randn(4, 10, generator=generator),
        torch.randn(4, 2, generator=generator),
    )
    return nn.functional.mse_loss(model(inputs), targets)


def train(first: int, last: int) -> None:
    for step in range(first, last):
        loss = loss_of(step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {loss.item():.9f}")


train(0, 3)
lines.append(f"gradient hooks x{calls['gradient']}")
calls["state_dict"] = 0
accelerator.save_state(str(folder / "checkpoint"))
accelerator.wait_for_everyone()
lines.append(f"state_dict on save x{calls['state_dict']}")
train(3, 5)
calls["state_dict"] = 0
accelerator.load_state(str(folder / "checkpoint"))
lines.append(f"state_dict on load x{calls['state_dict']}")
train(3, 5)
accelerator.wait_for_everyone()
files = sorted(
    path.name for path in (folder / "checkpoint").iterdir() if not path.name.startswith(".")
)
lines.append(f"files {files}")
(folder / f"rank-{accelerator.process_index}.txt").write_text("\n".join(lines) + "\n")
accelerator.wait_for_everyone()
# At a usual exit gloo's threads abort now and then ("terminate called without an active exception",
# torch 2.13, with ckptfix and without): that is not what is tested.
os._exit(0)

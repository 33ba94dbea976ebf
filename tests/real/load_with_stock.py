"""Load checkpoints as a correct script does, with stock accelerate, and print what is in memory
afterwards.

    python -m tests.real.load_with_stock < jobs.json > results.json

One process loads many checkpoints, because importing torch and accelerate takes longer than all of
them together. A job names a checkpoint folder and the `run.json` that says which objects the script
has. ckptfix has no part here.
"""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator

from fixtures.digests import state_digest, tensor_digests
from fixtures.models import SampleCounter, build_model


def load(checkpoint: str, run: dict[str, Any]) -> dict[str, Any]:
    """Prepare every object once, load, and return the values in the form that run.json has."""
    accelerator = Accelerator()
    # Other seeds than the run had: what does not come out of the checkpoint is wrong.
    models = [
        build_model(entry["class"], seed=900 + index) for index, entry in enumerate(run["models"])
    ]
    optimizers = [
        torch.optim.AdamW(models[entry["model"]].parameters(), lr=0.5)
        for entry in run["optimizers"]
    ]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizers[entry["optimizer"]], step_size=9)
        for entry in run["schedulers"]
    ]
    custom = [SampleCounter() for _ in run["custom"]]
    accelerator.prepare(*models, *optimizers, *schedulers)
    accelerator.register_for_checkpointing(*custom)
    try:
        accelerator.load_state(checkpoint)
    except Exception as error:  # a stock script would end here; the test wants to see why
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": None,
        "models": [tensor_digests(model.state_dict()) for model in models],
        "optimizers": [state_digest(optimizer.state_dict()) for optimizer in optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "custom": [item.state_dict() for item in custom],
    }


def main() -> None:
    results = []
    for job in json.load(sys.stdin):
        with open(job["run"], encoding="utf-8") as file:
            results.append(load(job["checkpoint"], json.load(file)))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

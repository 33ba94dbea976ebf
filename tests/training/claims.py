"""What the guard's warning claims, beside what the stock accelerate of this process really does.

    python -m tests.training.claims FOLDER

prints one JSON list: for each kind of object, form and verb the claim, the stock's count and the
files that it saves.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.lr_scheduler import StepLR

from ckptfix.training.accelerator import Accelerator
from tests.training.loading_runs import reset

VERBS = {
    "_models": "prepare_model",
    "_optimizers": "prepare_optimizer",
    "_schedulers": "prepare_scheduler",
    "_dataloaders": "prepare_data_loader",
}


def again(made: Any, registry: str, form: str, verb: str) -> None:
    """Prepare one object, and then give it to a verb once more."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    things: dict[str, Any] = {
        "_models": model,
        "_optimizers": optimizer,
        "_schedulers": StepLR(optimizer, 1),
        "_dataloaders": torch.utils.data.DataLoader(torch.arange(4.0)),
    }
    thing = things[registry]
    prepared = made.prepare(thing)
    method = getattr(made, VERBS[registry] if verb == "special" else verb)
    method(thing if form == "raw" else prepared)


def claims(folder: Path) -> list[dict[str, Any]]:
    """Return the claim and the truth of every case."""
    found = []
    for registry in VERBS:
        for form in ("raw", "prepared"):
            for verb in ("prepare", "special"):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    reset()
                    again(Accelerator(cpu=True), registry, form, verb)
                    said = [
                        str(one.message)
                        for one in seen
                        if "this Accelerator already has" in str(one.message)
                    ]
                    reset()
                    stock = accelerate.Accelerator(cpu=True)
                    again(stock, registry, form, verb)
                    target = folder / f"{registry}-{form}-{verb}"
                    stock.save_state(str(target))
                    stock.wait_for_everyone()
                found.append(
                    {
                        "case": target.name,
                        "said": said,
                        "count": len(getattr(stock, registry)),
                        "files": sorted(path.name for path in target.iterdir()),
                    }
                )
    return found


if __name__ == "__main__":
    print(json.dumps(claims(Path(sys.argv[1]))))

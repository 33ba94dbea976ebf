"""Healthy scripts with an average of the weights, for `test_averages_load.py`.

    torchrun --nproc_per_node 2 -m tests.real.averages save FOLDER
    torchrun --nproc_per_node 2 -m tests.real.averages load FOLDER

saves FOLDER/<case> for each case, or loads it into new objects with stock accelerate. Both print by
case the digests of what the main process then has. ckptfix has no part here.
"""

import copy
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from fixtures.digests import state_digest, tensor_digests
from fixtures.models import batch_loss, build_model
from tests.timm_library import FOLDER


def timm_averages() -> Any:
    """Return timm's module of averages; without torchvision ``import timm`` fails, and the module
    needs none of it.
    """
    spec = importlib.util.spec_from_file_location(
        "timm_model_ema", FOLDER / "timm/utils/model_ema.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """One script: a model, its optimizer, and an average that is prepared or registered as the case
    says.
    """

    def __init__(self, case: str, seed: int) -> None:
        timm = timm_averages()
        self.accelerator = Accelerator()
        self.name = "GPT2LMHeadModel" if case == "transformers" else "TwoLayer"
        self.model = build_model(self.name, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        make: Callable[[Any], Any] = lambda model: timm.ModelEmaV2(model, decay=0.5)  # noqa: E731
        if case == "v3":
            make = lambda model: timm.ModelEmaV3(model, decay=0.5)  # noqa: E731
        elif case == "transformers":
            make = copy.deepcopy
        prepare = self.accelerator.prepare
        if case == "average first":
            self.average = make(self.model)
            self.average, self.prepared, self.handle = prepare(
                self.average, self.model, self.optimizer
            )
        elif case in ("of the prepared model", "custom object"):
            self.prepared, self.handle = prepare(self.model, self.optimizer)
            self.average = make(self.prepared)
            if case == "custom object":
                self.accelerator.register_for_checkpointing(self.average)
            else:
                prepare(self.average)
        else:
            self.average = make(self.model)
            self.prepared, self.average, self.handle = prepare(
                self.model, self.average, self.optimizer
            )

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.accelerator.process_index)
        for _ in range(2):
            self.handle.zero_grad()
            self.accelerator.backward(batch_loss(self.prepared, self.name, generator))
            self.handle.step()
            with torch.no_grad():
                for mean, own in zip(
                    self.average.parameters(), self.model.parameters(), strict=True
                ):
                    mean.lerp_(own, 0.5)

    def digests(self) -> list[Any]:
        states = [
            self.model.state_dict(),
            self.accelerator.unwrap_model(self.average).state_dict(),
        ]
        return [*map(tensor_digests, states), state_digest(self.optimizer.state_dict())]


CASES = {  # whether it is trained before the save
    "average first": False,
    "step 0": False,
    "v2": True,
    "v3": True,
    "of the prepared model": True,
    "custom object": True,
    "transformers": True,
}


def main() -> None:
    verb, folder = sys.argv[1], Path(sys.argv[2])
    found: dict[str, Any] = {}
    for case, is_trained in CASES.items():
        run = Run(case, seed=1 if verb == "save" else 2)
        if verb == "save":
            if is_trained:
                run.train()
            run.accelerator.save_state(str(folder / case))
            run.accelerator.wait_for_everyone()
        else:
            try:
                run.accelerator.load_state(str(folder / case))
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
                continue
        found[case] = run.digests()
    if Accelerator().is_main_process:
        (folder / f"{verb}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

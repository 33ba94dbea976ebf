"""A Trainer that a callback stops in the middle of an epoch, saved at the end of it, and resumed.

    python -m tests.training.stopped_trainer FOLDER

With ``save_strategy="epoch"`` the Trainer saves after its loop. transformers 4.44 has left the pass
over the data then; 5.23 holds its iterator. Writes the version, and the losses of a run that was not
stopped and of the one that was resumed, as JSON into FOLDER/seen.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ckptfix.training.accelerator import patch_accelerate
from tests.training.trainer_kills import build, losses, transformers

AT = 5


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == AT


def main(folder: Path) -> None:
    patch_accelerate()
    given: dict[str, Any] = {
        "save_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "augment": True,
    }
    through = build(folder / "through", [], **given)
    through.train()
    build(folder / "stopped", [Stops()], **given).train()
    resumed = build(folder / "stopped", [], **given)
    resumed.train(resume_from_checkpoint=str(folder / f"stopped/checkpoint-{AT}"))
    seen = [transformers.__version__, losses(through), losses(resumed)]
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

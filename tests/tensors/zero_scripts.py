"""What stock DeepSpeed makes of the files of ZeRO: its own scripts, in a process that may import
it.

    python -m tests.tensors.zero_scripts FOLDER

``FOLDER`` has checkpoints ``zero1``, ``zero2`` and ``zero3``. Their fp32 weights go to
``<name>.fp32``; ZeRO-2 and 3 become universal checkpoints ``<name>-universal``; the pickled objects
of ``zero3`` are described in ``objects.json``.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint.ds_to_universal import main as make_universal
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def main(folder: Path) -> None:
    for path in sorted(folder.glob("zero?")):
        torch.save(
            dict(get_fp32_state_dict_from_zero_checkpoint(str(path))), folder / f"{path.name}.fp32"
        )
    for name in ("zero2", "zero3"):
        arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        make_universal(
            Namespace(
                input_folder=str(folder / name / "pytorch_model"),
                output_folder=str(folder / f"{name}-universal" / "pytorch_model"),
                strict=True,
                inject_missing_state=True,
                **arguments,
            )
        )
    path, *_ = sorted((folder / "zero3" / "pytorch_model").glob("*_rank_0_*_optim_states.pt"))
    saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
    settings = {"init_scale": 65536, "scale_window": 1000, "delayed_shift": 2, "min_scale": 1}
    settings["consecutive_hysteresis"] = False
    new = CreateLossScaler(torch.half, 0, True, settings)
    described = {
        "stage": repr(saved["zero_stage"]),
        "class": type(saved["loss_scaler"]) is type(new),
        "saved": {key: str(value) for key, value in vars(saved["loss_scaler"]).items()},
        "new": {key: str(value) for key, value in vars(new).items()},
    }
    (folder / "objects.json").write_text(json.dumps(described))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

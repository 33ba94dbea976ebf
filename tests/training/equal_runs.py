"""Training loops whose saves, evaluations and data draw random numbers: guarded, their losses are
those of stock.

    python -m tests.training.equal_runs FOLDER PROCESSES [NAME ...]

PROCESSES is a number, or several with commas. Each loop is run by stock accelerate, by
``patch_accelerate`` (which ``ckptfix run`` calls) and by the guarded Accelerator, and one of these
is resumed from its first save. Prints one line of JSON for each: the ways in which it went, and the
first record of each way that is not that of stock. Trainers of transformers are run with the patch.
"""

import importlib
import json
import os
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import set_seed

from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate
from tests.training.ranks import run_ranks
from tests.training.resume_matrix import (
    BATCH,
    DRAWING,
    DRAWS,
    EPOCHS,
    SAMPLES,
    Mapped,
    Run,
    digest,
    generators,
    gpt2,
)


@dataclass(frozen=True)
class TrainerRun:
    """A run of a Trainer. ``draws``: the method of a callback, or of the Trainer itself, that
    draws.

    ``at``: the step of its first save; 10 with one process, and 5 with two, is the end of an epoch.
    ``resumes``: a resume goes on with the numbers of the uninterrupted run.
    """

    draws: str
    augment: str = ""
    workers: int = 0
    accumulate: int = 1
    at_end: bool = False
    resumes: bool = True


TRAINERS = {
    "Trainer, on_step_end": TrainerRun("on_step_end"),
    "Trainer, on_evaluate": TrainerRun("on_evaluate", augment="all"),
    "Trainer, on_log": TrainerRun("on_log", accumulate=2),
    "Trainer, state": TrainerRun("state", augment="all"),
    "Trainer, state at the end of an epoch": TrainerRun("state", augment="all", at_end=True),
    "Trainer, _save": TrainerRun("_save", augment="all", workers=2),
    # The checkpoint is complete, and in its place, when on_save is called: what is drawn there is
    # not in it.
    "Trainer, on_save": TrainerRun("on_save", resumes=False),
}
"""Trainers of transformers."""

IMPORTS = {
    "diffusers": "diffusers.training_utils",
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
}


def first_save(name: str, processes: int) -> int:
    """Return the step of the first save."""
    if name in DRAWING:
        return DRAWING[name].at
    return SAMPLES // BATCH // processes if TRAINERS[name].at_end else 4


class Tokens(Mapped):
    def __getitem__(self, index: int) -> Any:
        tokens = (10 * super().__getitem__(index)[1]).long().clamp(0, 49)
        return {"input_ids": tokens, "labels": tokens}


def train_loop(name: str, folder: Path, mode: str, *, resume: bool) -> list[str]:
    """Run a loop on this rank, and return what its steps were."""
    steps = Run(name, folder, resumes=resume, stock=mode != "guarded").run()
    return [json.dumps(step) for step in steps.values()]


def train_trainer(name: str, folder: Path, mode: str, *, resume: bool) -> list[str]:
    """Run a Trainer on this rank, and return what its steps were."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    variant, records = TRAINERS[name], []
    first = first_save(name, int(os.environ["WORLD_SIZE"]))

    def draw(*_: Any, **__: Any) -> None:
        DRAWS["model"](), DRAWS["numpy"]()

    class Draws(TrainerCallback, ExportableState):  # type: ignore[misc]
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            records.append(generators())

        def state(self) -> dict[str, Any]:
            if variant.draws == "state":
                draw()
            return {"args": {}, "attributes": {}}

    class Saves(Trainer):  # type: ignore[misc]
        def _save(self, *arguments: Any, **options: Any) -> None:
            if variant.draws == "_save":
                draw()
            super()._save(*arguments, **options)

    if variant.draws.startswith("on_"):
        setattr(Draws, variant.draws, draw)
    accelerate.state.AcceleratorState._reset_state(False)
    accelerate.state.GradientState._reset_state()
    set_seed(3)
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        save_strategy="steps", save_steps=first, eval_strategy="steps", eval_steps=3, report_to=[],
        use_cpu=True, logging_steps=1, disable_tqdm=True, dataloader_num_workers=variant.workers,
        gradient_accumulation_steps=variant.accumulate,
    )  # fmt: skip
    trainer = Saves(
        gpt2(0.1),
        arguments,
        train_dataset=Tokens(SAMPLES, variant.augment),
        eval_dataset=Tokens(SAMPLES, ""),
        callbacks=[Draws()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{first}") if resume else None)
    losses = [repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    begin = first if resume else 0  # a resumed run has the losses of the first one, too
    return [
        *map(" ".join, zip(losses[begin:], records, strict=True)),
        digest(*trainer.model.state_dict().values()),
    ]


def compare(name: str, folder: Path, processes: int) -> dict[str, Any]:
    """Run a loop or a Trainer in every way, and return what differs from stock."""
    is_loop = name in DRAWING
    train = train_loop if is_loop else train_trainer
    # Once, in the process that all others are forked from: an import takes seconds.
    if library := IMPORTS.get(DRAWING[name].model if is_loop else "gpt2"):
        importlib.import_module(library)
    modes = ["stock", "patched", "guarded"] if is_loop else ["stock", "patched"]
    resumed = random.choice(modes[1:])

    def work(rank: int, ways: dict[str, str]) -> None:
        for way, mode in ways.items():
            if mode == "patched":
                patch_accelerate()
            records = train(name, folder / mode, mode, resume=way == "resumed")
            unpatch_accelerate()
            (folder / f"{way}.{rank}.json").write_text(json.dumps(records))

    for mode in modes:
        (folder / mode).mkdir()
    parts = ({mode: mode for mode in modes}, {"resumed": resumed})
    statuses = [run_ranks(processes, partial(work, ways=ways)) for ways in parts]
    differences = {}
    for rank in range(processes) if not any(map(any, statuses)) else ():
        stock, *others = (
            json.loads((folder / f"{way}.{rank}.json").read_text()) for way in (*modes, "resumed")
        )
        for way, records in zip((*modes[1:], "resumed"), others, strict=True):
            wanted = stock[first_save(name, processes) :] if way == "resumed" else stock
            if records != wanted:
                same = [one == two for one, two in zip(wanted, records, strict=False)]
                at = same.index(False) if False in same else len(same)
                differences[f"{way}, rank {rank}"] = f"record {at} of {len(wanted)}"
    return {"name": name, "mode": resumed, "statuses": statuses, "differences": differences}


def main(folder: Path, counts: list[int], *names: str) -> None:
    """Run loops and Trainers on so many processes, and print what differs."""
    for name in names or (*DRAWING, *TRAINERS):
        for processes in counts:
            place = folder / name.replace(" ", "-") / str(processes)
            place.mkdir(parents=True)
            line = {"processes": processes, **compare(name, place, processes)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2].split(","))), *sys.argv[3:])

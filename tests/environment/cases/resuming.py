"""What a script's text shows of the way it resumes."""

import textwrap

from tests.environment.building import facts, script
from tests.environment.cases.case import WARNING, Case

TRAIN = """
    import argparse
    import torch
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup
    from {library} import Accelerator{imports}
    parser = argparse.ArgumentParser()
    parser.add_argument("{option}")
    args = parser.parse_args()
    accelerator = Accelerator()
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    {scheduler}
    {prepare}
    {load}
    for epoch in range(3):
        for batch in loader:
            {step}
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
            if step % 100 == 0:
                accelerator.save_state("out")
    """
GOOD = {
    "library": "accelerate",
    "option": "--resume_from_checkpoint",
    "imports": "",
    "scheduler": "scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)",
    "prepare": (
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, "
        "scheduler)"
    ),
    "load": "accelerator.load_state(args.resume_from_checkpoint)",
    "step": "pass",
}
TORCHS = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)"
UNPREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
BY_NAME = 'setattr(self, "scheduler", accelerator.prepare(getattr(self, "scheduler")))'


def case(code: str, name: str, *, found: bool, **changes: str) -> Case:
    given = facts(script=script(textwrap.dedent(TRAIN).format(**{**GOOD, **changes})))
    return Case(code, name, given, WARNING if found else None)


SAVED = "torch.save(scheduler.state_dict(), path)"
REGISTERED = f"{UNPREPARED}; accelerator.register_for_checkpointing(scheduler)"
TOLERANT = {
    "library": "ckptfix",
    "imports": ", load_state_tolerant",
    "load": "load_state_tolerant(accelerator, path)",
}
OF_SELF = {
    "scheduler": "self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
    "prepare": BY_NAME,
    "step": "self.scheduler.step()",
}

RESUMING = (
    case("scheduler-not-prepared", "transformers'", found=True, prepare=UNPREPARED),
    case("scheduler-not-prepared", "torch's", found=True, prepare=UNPREPARED, scheduler=TORCHS),
    case("scheduler-not-prepared", "prepared", found=False),
    case("scheduler-not-prepared", "saved by the script", found=False, prepare=UNPREPARED, step=SAVED),
    case("scheduler-not-prepared", "handed on", found=False, prepare=f"{UNPREPARED}; scheduler = setup(scheduler)"),
    case("scheduler-not-prepared", "registered", found=False, prepare=REGISTERED),
    case("scheduler-not-prepared", "prepared by name", found=False, **OF_SELF),
    case("resume-never-loads", "option alone", found=True, load=""),
    case("resume-never-loads", "tolerant", found=False, **TOLERANT),
    case("resume-never-loads", "a tracker's", found=False, load="", option="--wandb_resume_id"),
    case("resume-never-loads", "own loader", found=False, load="model.load_state_dict(torch.load(path))"),
)  # fmt: skip

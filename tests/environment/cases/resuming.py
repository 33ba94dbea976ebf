"""What a script's text shows of the way it resumes."""

import textwrap

from tests.environment.building import facts, launch, script
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
    accelerator = Accelerator({arguments})
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    {scheduler}
    {prepare}
    {load}
    for epoch in range(3):
        {epoch}
        for batch in {loop}:
            {skip}
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
            if {asked}step % 100 == 0:
                accelerator.save_state("out")
    """
GOOD = {
    "library": "accelerate",
    "option": "--resume_from_checkpoint",
    "imports": "",
    "arguments": "",
    "scheduler": "scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)",
    "prepare": (
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, "
        "scheduler)"
    ),
    "load": "accelerator.load_state(args.resume_from_checkpoint)",
    "epoch": "active = accelerator.skip_first_batches(loader, done) if epoch == first else loader",
    "loop": "active",
    "skip": "pass",
    "asked": "",
}
ACCUMULATES = "gradient_accumulation_steps=args.steps"
SEEDABLE = "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)"
TORCHS = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)"
UNPREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
NO_LOADER = "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)"
BY_NAME = (
    'for name in ("loader", "scheduler"): setattr(self, name, accelerator.prepare(getattr(self, '
    "name)))"
)
NO_SKIP = {"epoch": "pass", "loop": "enumerate(loader)"}


def case(code: str, name: str, *, found: bool, command: str = "", **changes: str) -> Case:
    given = facts(script=script(textwrap.dedent(TRAIN).format(**{**GOOD, **changes})))
    if command:
        given = facts(script=given.script, launch=launch(command))
    return Case(code, name, given, WARNING if found else None)


SAVED = "torch.save(scheduler.state_dict(), path)"
REGISTERED = f"{UNPREPARED}; accelerator.register_for_checkpointing(scheduler)"
STATEFUL = "dataloader_config=C(use_stateful_dataloader=True)"
ASKED = "accelerator.sync_gradients and "
MAIN = "accelerator.is_main_process and "
BELOW = "if accelerator.is_main_process: accelerator.save_state(path)"
LATEST = "import ckptfix; newest = ckptfix.latest_checkpoint(path)"
OTHERWISE = """if accelerator.is_main_process: print(step)
        else: accelerator.save_state(path)"""
TOLERANT = {
    "library": "ckptfix",
    "imports": ", load_state_tolerant",
    "load": "load_state_tolerant(accelerator, path)",
}
OF_SELF = {
    "scheduler": "self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
    "prepare": "self.loader = DataLoader(dataset)\n" + BY_NAME,
    "epoch": "pass",
    "loop": "self.loader",
    "skip": "self.scheduler.step()",
}

RESUMING = (
    case("scheduler-not-prepared", "transformers'", found=True, prepare=UNPREPARED),
    case("scheduler-not-prepared", "torch's", found=True, prepare=UNPREPARED, scheduler=TORCHS),
    case("scheduler-not-prepared", "prepared", found=False),
    case("scheduler-not-prepared", "saved by the script", found=False, prepare=UNPREPARED, skip=SAVED),
    case("scheduler-not-prepared", "handed on", found=False, prepare=f"{UNPREPARED}; scheduler = setup(scheduler)"),
    case("scheduler-not-prepared", "registered", found=False, prepare=REGISTERED),
    case("loader-not-prepared", "trained on", found=True, prepare=NO_LOADER, **NO_SKIP),
    case("loader-not-prepared", "prepared", found=False, **NO_SKIP),
    case("loader-not-prepared", "skipped", found=False),
    case("loader-not-prepared", "prepared by name", found=False, **OF_SELF),
    case("scheduler-not-prepared", "prepared by name", found=False, **OF_SELF),
    case("batches-not-skipped", "saved inside the epoch", found=True, **NO_SKIP),
    case("batches-not-skipped", "skipped", found=False),
    case("batches-not-skipped", "passed over", found=False, skip="if step < done: continue", **NO_SKIP),
    case("batches-not-skipped", "stateful", found=False, arguments=STATEFUL, **NO_SKIP),
    case("batches-not-skipped", "streamed", found=False, **{**NO_SKIP, "epoch": "data = data.skip(done)"}),
    case("batches-not-skipped", "torchdata's", found=False, skip="StatefulDataLoader(data)", **NO_SKIP),
    case("batches-not-skipped", "never loaded", found=False, load="", **NO_SKIP),
    case("epoch-not-set", "seedable", found=True, arguments=SEEDABLE),
    case("epoch-not-set", "set", found=False, arguments=SEEDABLE, skip="loader.set_epoch(epoch)"),
    case("epoch-not-set", "guarded", found=False, arguments=SEEDABLE, library="ckptfix"),
    case("epoch-not-set", "plain sampler", found=False),
    case("save-inside-accumulation", "any batch", found=True, arguments=ACCUMULATES),
    case("save-inside-accumulation", "asked", found=False, arguments=ACCUMULATES, asked=ASKED),
    case("save-inside-accumulation", "one step", found=False, arguments="gradient_accumulation_steps=1"),
    case("save-inside-accumulation", "guarded run", found=False, arguments=ACCUMULATES, command="ckptfix run train.py"),
    case("save-by-main-process", "ckptfix's", found=True, library="ckptfix", asked=MAIN),
    case("save-by-main-process", "together", found=True, library="ckptfix", asked=MAIN, arguments="save_together=True"),
    case("save-by-main-process", "below it", found=True, library="ckptfix", skip=BELOW),
    case("save-by-main-process", "alone", found=False, library="ckptfix", asked=MAIN, arguments="save_together=False"),
    case("save-by-main-process", "settings", found=False, library="ckptfix", asked=MAIN, arguments="**settings"),
    case("save-by-main-process", "accelerate's", found=False, asked=MAIN),
    case("save-by-main-process", "every process", found=False, library="ckptfix"),
    case("save-by-main-process", "not the main one", found=False, library="ckptfix", asked=f"not {MAIN}"),
    case("save-by-main-process", "its other branch", found=False, library="ckptfix", skip=OTHERWISE),
    case("save-by-main-process", "names alone", found=False, asked=MAIN, skip=LATEST),
    case("resume-never-loads", "option alone", found=True, load=""),
    case("resume-never-loads", "tolerant", found=False, **TOLERANT),
    case("resume-never-loads", "a tracker's", found=False, load="", option="--wandb_resume_id"),
    case("resume-never-loads", "own loader", found=False, load="model.load_state_dict(torch.load(path))"),
)  # fmt: skip

"""The steps that ``tests.versions`` takes in an environment with other versions.

    python version_steps.py STEP FOLDER

It is copied out of the sources and run by that environment's Python, which has the installed wheel
and none of the modules of the tests. A step that fails raises. The folder is that of all steps of
one row; the first two find a damaged checkpoint in it, and need no torch.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DAMAGED = "damaged"
SAVED = "saved"


def ckptfix(*arguments: object, status: int = 0) -> str:
    """Run the installed command, and return its output; fail at another exit status."""
    command = [str(Path(sys.executable).with_name("ckptfix")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, (
        f"{command}: exit status {done.returncode}, expected {status}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a checkpoint, without the journals of its repairs."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".ckptfix" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def findings(folder: Path, status: int) -> set[str]:
    """Return the codes of what `check` finds."""
    report = json.loads(ckptfix("check", "--json", folder, status=status))
    (checkpoint,) = report["checkpoints"]
    return {finding["code"] for finding in checkpoint["findings"]}


def repaired(folder: Path, copy: Path) -> None:
    """Check, repair, undo and repair a copy of a checkpoint that has a model twice."""
    shutil.copytree(folder, copy)
    before = contents(copy)
    assert "doubled-model" in findings(copy, 1)
    ckptfix("repair", copy)
    assert "doubled-model" not in findings(copy, 0)
    assert contents(copy) != before
    ckptfix("undo", copy)
    assert contents(copy) == before
    ckptfix("repair", copy)


def repair(work: Path) -> None:
    """Check, repair and undo a checkpoint that the project ships."""
    repaired(work / DAMAGED, work / "repaired")


def seal(work: Path) -> None:
    """Write a manifest, and find a changed byte with it."""
    folder = work / "repaired"
    ckptfix("seal", folder)
    ckptfix("verify", folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ckptfix("verify", folder, status=1)


def _save(folder: Path) -> None:
    """Save a model that was prepared twice, on each process of a launch."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = _made()
    prepared = accelerator.prepare(accelerator.prepare(model))
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(prepared(torch.ones(3, 4)).square().mean())
    optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=True)
    accelerator.end_training()


def _made() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save(work: Path) -> None:
    """Have stock accelerate save in two processes what `repair` then repairs."""
    folder = work / "doubled"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([sys.executable, *launch, __file__, "_save", folder], check=True)
    repaired(folder, work / SAVED)


def load(work: Path) -> None:
    """Load the repaired checkpoint with stock accelerate, strictly and with tolerance."""
    import torch
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from ckptfix import load_state_tolerant

    accelerator = Accelerator(cpu=True)
    expected = load_file(work / SAVED / "model.safetensors")
    model, optimizer = accelerator.prepare(*_made())
    report = load_state_tolerant(accelerator, work / SAVED)
    assert report.is_complete, report
    assert _equal(model.state_dict(), expected)
    assert optimizer.state_dict()["state"][0]["step"] == 1

    with torch.no_grad():
        model[0].weight.zero_()
    # Each process has its own random states, and this is another number of processes.
    accelerator.load_state(str(work / SAVED))
    assert _equal(model.state_dict(), expected)


def _equal(tensors: Any, expected: Any) -> bool:
    import torch

    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )


def guard(work: Path) -> None:
    """Save and resume with the guarded Accelerator, which prepares no model twice."""
    import torch
    from accelerate.utils import ProjectConfiguration

    from ckptfix import Accelerator

    project = ProjectConfiguration(str(work / "guarded"), automatic_checkpoint_naming=True)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=torch.Generator()))

    def begin() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True, project_config=project)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(*_made(), loader)
        assert accelerator.prepare(model) is model
        return accelerator, model, optimizer, loader

    def train(batches: Iterable[Any], accelerator: Any, model: Any, optimizer: Any) -> list[float]:
        losses = []
        for (batch,) in batches:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 2 and not (work / "guarded").exists():
                accelerator.save_state()
        return losses

    accelerator, model, optimizer, loader = begin()
    losses = train(loader, accelerator, model, optimizer)
    assert not findings(work / "guarded" / "checkpoints" / "checkpoint_0", 0)

    accelerator, model, optimizer, loader = begin()
    accelerator.load_state()
    rest = accelerator.resume_dataloader(loader)
    assert train(rest, accelerator, model, optimizer) == losses[2:]


def migrate(work: Path) -> None:
    """Migrate the weights to .bin, DCP and back, and read each with torch's own functions."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    expected = load_file(work / SAVED / "model.safetensors")
    ckptfix("migrate", work / SAVED, work / "bin", "--to", "bin")
    assert _equal(torch.load(work / "bin" / "pytorch_model.bin", weights_only=True), expected)
    ckptfix("migrate", work / "bin", work / "dcp", "--to", "dcp")
    (metadata,) = (work / "dcp").rglob(".metadata")
    dcp_to_torch_save(metadata.parent, work / "dcp.pt")
    assert _equal(torch.load(work / "dcp.pt", weights_only=True)["model"], expected)
    ckptfix("migrate", work / "dcp", work / "back", "--to", "safetensors")
    assert _equal(load_file(work / "back" / "model.safetensors"), expected)


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )


def weights(work: Path) -> None:
    """Ask the installed transformers and PEFT whether a model and an adapter load as saved."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_config())
    model.save_pretrained(work / "base")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    adapted.peft_config["default"].base_model_name_or_path = str(work / "base")
    adapted.save_pretrained(str(work / "adapter"))
    for name in ("base", "adapter"):
        ckptfix("check", "--load", work / name)

    path = work / "base" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    assert "model.norm.weight" in ckptfix("check", "--load", work / "base", status=1)


def _train(folder: Path) -> None:
    """Train, or resume where a checkpoint exists, with transformers' Trainer."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    data = [{"input_ids": [n, n + 1, n + 2], "labels": [n, n + 1, n + 2]} for n in range(8)]
    trainer = Trainer(LlamaForCausalLM(_config()), arguments, train_dataset=data)
    resumes = (folder / "checkpoint-2").exists()
    trainer.train(resume_from_checkpoint=resumes or None)
    assert trainer.state.global_step == 4


def trainer(work: Path) -> None:
    """Train under `ckptfix run`, then resume from the middle: the weights must be the same."""
    folder = work / "trained"
    ckptfix("run", __file__, "_train", folder)
    first = (folder / "checkpoint-4" / "model.safetensors").read_bytes()
    findings(folder / "checkpoint-4", 0)
    shutil.rmtree(folder / "checkpoint-4")
    ckptfix("run", __file__, "_train", folder)
    assert (folder / "checkpoint-4" / "model.safetensors").read_bytes() == first


if __name__ == "__main__":
    step: Callable[[Path], None] = globals()[sys.argv[1]]
    step(Path(sys.argv[2]))

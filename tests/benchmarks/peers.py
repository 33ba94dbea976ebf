"""Broken folders and healthy twins of "will it load?", as ckptfix, its peers and the loaders
themselves see them.

``python -m tests.benchmarks.peers [--bin FOLDER]`` makes the folders with PEFT, transformers and
accelerate, and prints a table. ``--bin``: the folder with ``sft``, ``modelaudit``
and ``peft-doctor`` of a virtual environment of their own; one that is not there is "not installed".
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny_adapters as tiny
from tests.tiny_adapters import peft

Tensors = Mapping[str, Any]
WEIGHTS = "model.safetensors"
PEERS = ("sft", "modelaudit", "peft-doctor")


class Case(NamedTuple):
    """A folder: its name in the table, its kind, and what makes it."""

    name: str
    kind: str
    make: Callable[[Path], None]


# --- adapters
# ---------------------------------------------------------------------------------------------------


def adapter(config: Any = None, **settings: Any) -> Callable[[Path], None]:
    """Return what saves an adapter with random numbers."""

    def make(root: Path) -> None:
        lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]} | settings
        tiny.saved(root, config or peft.LoraConfig(**lora))

    return make


def broken_adapter(
    change: Callable[[Tensors], Tensors], config: dict[str, Any] | None = None, step: int = 0
) -> Any:
    """Return what saves an adapter with other tensors, or other values in its config."""

    def make(root: Path) -> None:
        tensors = tiny.lora(root)
        tiny.write(root, change(tensors))
        path = root / "adapter_config.json"
        document = json.loads(path.read_text()) | (config or {})
        path.write_text(
            json.dumps({key: value for key, value in document.items() if value is not ...})
        )
        if step:
            state = {"global_step": step, "epoch": 1.0, "log_history": []}
            (root / "trainer_state.json").write_text(json.dumps(state))

    return make


def same(tensors: Tensors) -> Tensors:
    return tensors


def without_training(tensors: Tensors) -> Tensors:
    return {
        key: torch.zeros_like(value) if "lora_B" in key else value for key, value in tensors.items()
    }


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return tiny.renamed(lambda key: prefix + key)


def adapter_called_lora(root: Path) -> None:
    """Save an adapter called lora, at the top of its folder."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(tiny.llama(), config, adapter_name="lora").save_pretrained(root)
    for path in (root / "lora").iterdir():
        shutil.move(path, root / path.name)
    (root / "lora").rmdir()


# --- models
# -----------------------------------------------------------------------------------------------------


def model(make_model: Callable[[], Any] = tiny.llama) -> Callable[[Path], None]:
    """Return what saves a model of transformers."""
    return lambda root: make_model().save_pretrained(root)


def broken_model(
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any] | None = None,
    make_model: Callable[[], Any] = tiny.llama,
) -> Callable[[Path], None]:
    """Return what saves a model with other tensors, or other values in its config."""

    def make(root: Path) -> None:
        make_model().save_pretrained(root)
        tensors = change(load_file(root / WEIGHTS))
        save_file(
            {key: value.clone() for key, value in tensors.items()},
            root / WEIGHTS,
            {"format": "pt"},
        )
        path = root / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))

    return make


def resized(root: Path) -> None:
    """Save a model with a vocabulary that was padded."""
    padded = tiny.llama()
    padded.resize_token_embeddings(11, pad_to_multiple_of=8)
    padded.save_pretrained(root)


def two_families(root: Path) -> None:
    """Leave the index and shards of one save next to the single file of another."""
    tiny.llama().save_pretrained(root, max_shard_size="1KB")
    later = {key: value + 1 for key, value in tiny.llama().state_dict().items()}
    save_file(later, root / WEIGHTS, {"format": "pt"})


def unwritten(tensors: Tensors) -> Tensors:
    """Return tensors of which one was saved before its values arrived."""
    lost = torch.zeros_like(tensors["lm_head.weight"])
    lost[0, 0], lost[1, 1] = 1.7e30, -4.1e25
    return {**tensors, "lm_head.weight": lost}


def equal_merge(root: Path) -> None:
    """Save a base and a merge that changed nothing."""
    base = tiny.llama()
    base.save_pretrained(root / "base")
    merged = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj"])
    ).merge_and_unload()
    merged.save_pretrained(root / "merged")


def merge(root: Path) -> None:
    """Save a base and a merge that changed it."""
    equal_merge(root)
    broken_model(lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1})(
        root / "merged"
    )


# --- checkpoints
# ------------------------------------------------------------------------------------------------


def checkpoint(change: Callable[[Path], None] = lambda root: None) -> Callable[[Path], None]:
    """Return what saves a checkpoint of accelerate after 20 steps, and changes it."""

    def make(root: Path) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())
        net, optimizer = accelerator.prepare(net, optimizer)
        for _ in range(20):
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        accelerator.save_state(str(root))
        change(root)

    return make


def resaved(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a damage that changes the object in a file of torch."""

    def damage(root: Path) -> None:
        value = torch.load(root / name, weights_only=False)
        change(value)
        torch.save(value, root / name)

    return damage


def states(value: dict[str, Any]) -> list[dict[str, Any]]:
    return list(value["state"].values())


def long_run_in_bf16(value: dict[str, Any]) -> None:
    for state in states(value):
        state["step"].fill_(9999)
        state.update({name: tensor.bfloat16() for name, tensor in state.items()})


def moments_in_bf16(value: dict[str, Any]) -> None:
    for state in states(value):
        state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})


def zero_moments(value: dict[str, Any]) -> None:
    for state in states(value):
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()


def one_rank_of_two(root: Path) -> None:
    """Save what verl saves, of rank 0 alone."""
    root.mkdir()
    for kind in ("model", "optim", "extra_state"):
        torch.save({"a": torch.ones(4)}, root / f"{kind}_world_size_2_rank_0.pt")


def run(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return what saves a run of three checkpoints of the Trainer, and changes it."""

    def make(root: Path) -> None:
        for step in (100, 200, 300):
            folder = root / f"checkpoint-{step}"
            net = tiny.llama()
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter))
            net.save_pretrained(folder)
            history = [{"step": number, "loss": 1 / number} for number in range(100, step + 1, 100)]
            state = {"global_step": step, "epoch": 1.0, "max_steps": 300, "log_history": history}
            (folder / "trainer_state.json").write_text(json.dumps(state))
            optimizer = torch.optim.AdamW(net.parameters())
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            for moments in optimizer.state.values():
                moments["step"].fill_(step)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            torch.save(
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0).state_dict(),
                folder / "scheduler.pt",
            )
        change(root)

    return make


def old_bytes(root: Path) -> None:
    shutil.copy(root / "checkpoint-200" / WEIGHTS, root / "checkpoint-300" / WEIGHTS)


def older_run(root: Path) -> None:
    """Leave the last checkpoint of an older run of 700 steps."""
    older = root / "checkpoint-700"
    shutil.copytree(root / "checkpoint-300", older)
    weights = {key: value + 1 for key, value in load_file(older / WEIGHTS).items()}
    save_file(weights, older / WEIGHTS, {"format": "pt"})
    history = [{"step": number, "loss": 2 / number} for number in range(100, 701, 100)]
    state = {"global_step": 700, "epoch": 1.0, "max_steps": 700, "log_history": history}
    (older / "trainer_state.json").write_text(json.dumps(state))
    for path in older.iterdir():
        os.utime(path, (1.7e9, 1.7e9))


BROKEN = (
    Case(
        "adapter: `_orig_mod.` before the keys", "adapter", broken_adapter(prefixed("_orig_mod."))
    ),
    Case("adapter: `module.` before the keys", "adapter", broken_adapter(prefixed("module."))),
    Case(
        "adapter: its name in the keys",
        "adapter",
        broken_adapter(tiny.renamed(tiny.with_name("default_0"))),
    ),
    Case("adapter: no tensors", "adapter", broken_adapter(lambda tensors: {})),
    Case(
        "adapter: tensors of shape `[0]` (ZeRO-3)",
        "adapter",
        broken_adapter(lambda tensors: dict.fromkeys(tensors, torch.empty(0))),
    ),
    Case(
        "adapter: no tensors of a target module",
        "adapter",
        broken_adapter(
            lambda tensors: {key: value for key, value in tensors.items() if "v_proj" not in key}
        ),
    ),
    Case("adapter: another rank in its config", "adapter", broken_adapter(same, {"r": 8})),
    Case(
        "adapter: `lora_B` zero after 500 steps",
        "adapter",
        broken_adapter(without_training, step=500),
    ),
    Case(
        "adapter: config without `peft_type`", "adapter", broken_adapter(same, {"peft_type": ...})
    ),
    Case("model: `module.` before the keys", "model", broken_model(prefixed("module."))),
    Case("model: `_orig_mod.` before the keys", "model", broken_model(prefixed("_orig_mod."))),
    Case(
        "model: `base_model.model.` before the keys",
        "model",
        broken_model(prefixed("base_model.model.")),
    ),
    Case(
        "model: a layer more in its config", "model", broken_model(same, {"num_hidden_layers": 3})
    ),
    Case(
        "model: another vocabulary in its config", "model", broken_model(same, {"vocab_size": 16})
    ),
    Case(
        "model: tied, and two unequal tensors",
        "model",
        broken_model(same, {"tie_word_embeddings": True}),
    ),
    Case(
        "model: head not tied, and missing",
        "model",
        broken_model(
            lambda tensors: {key: value for key, value in tensors.items() if "lm_head" not in key}
        ),
    ),
    Case(
        "model: quantized by its config alone",
        "model",
        broken_model(same, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ),
    Case("model: index and single file of two saves", "model", two_families),
    Case("model: zeros next to 1e30", "values", broken_model(unwritten)),
    Case("model: a merge that changed nothing", "merge", equal_merge),
    Case(
        "checkpoint: `step` in bf16",
        "checkpoint",
        checkpoint(resaved("optimizer.bin", long_run_in_bf16)),
    ),
    Case(
        "checkpoint: moments of zeros",
        "checkpoint",
        checkpoint(resaved("optimizer.bin", zero_moments)),
    ),
    Case(
        "checkpoint: random states without `step`",
        "checkpoint",
        checkpoint(resaved("random_states_0.pkl", lambda value: value.pop("step"))),
    ),
    Case("checkpoint: one rank of two (verl)", "ranks", one_rank_of_two),
    Case("run: weights of an earlier step", "run", run(old_bytes)),
    Case("run: the highest number is of another run", "run", run(older_run)),
)
HEALTHY = (
    Case("LoRA", "adapter", adapter()),
    Case("LoRA with `rank_pattern`", "adapter", adapter(rank_pattern={"v_proj": 2})),
    Case("LoRA of `all-linear`", "adapter", adapter(target_modules="all-linear")),
    Case("LoRA of a regular expression", "adapter", adapter(target_modules=r".*\.(q|v)_proj")),
    Case("DoRA", "adapter", adapter(use_dora=True)),
    Case("LoRA with `modules_to_save`", "adapter", adapter(modules_to_save=["lm_head"])),
    Case("LoRA named lora", "adapter", adapter_called_lora),
    Case(
        "IA3",
        "adapter",
        adapter(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
    ),
    Case(
        "prompt tuning",
        "adapter",
        adapter(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    ),
    Case("Llama", "model", model()),
    Case("Llama with tied weights", "model", model(tiny.tied_llama)),
    Case("GPT-2", "model", model(tiny.gpt2)),
    Case("BERT", "model", model(tiny.bert)),
    Case("Mixtral", "model", model(tiny.mixtral)),
    Case("T5", "model", model(tiny.t5)),
    Case("padded vocabulary", "model", resized),
    Case(
        "shards with an index",
        "model",
        lambda root: tiny.llama().save_pretrained(root, max_shard_size="1KB"),
    ),
    Case("values", "values", model()),
    Case("a merge that changed the base", "merge", merge),
    Case("accelerate", "checkpoint", checkpoint()),
    Case("moments in bf16", "checkpoint", checkpoint(resaved("optimizer.bin", moments_in_bf16))),
    Case("a run of the Trainer", "run", run(lambda root: None)),
)


# --- verdicts
# ---------------------------------------------------------------------------------------------------


def of_ckptfix(root: Path, kind: str) -> str:
    """Return what ckptfix says: "told" by exit status 1, "note", or ""."""
    command = {
        "run": ["check", "-r", str(root)],
        "values": ["verify", "--data", str(root)],
        "merge": ["diff", str(root / "base"), str(root / "merged")],
    }.get(kind, ["check", str(root)])
    ended = subprocess.run(
        [sys.executable, "-m", "ckptfix", *command], capture_output=True, text=True
    )
    if kind == "merge":
        return "note" if "changed nothing" in ended.stdout else ""
    return "told" if ended.returncode == 1 else "note" if " note " in ended.stdout else ""


_OF_PEFT_DOCTOR = {
    "adapter": "adapter-integrity",
    "run": "checkpoint-list",
    "checkpoint": "checkpoint-check",
    "ranks": "checkpoint-check",
}


def of_peer(tool: Path, root: Path, kind: str, base: Path) -> str:
    """Return what a peer says of a folder, by the command that it has for the kind."""
    if not tool.exists():
        return "not installed"
    if tool.name == "sft":
        files = sorted(root.rglob("*.safetensors"))
        commands = [["check", str(file)] for file in files]
        commands += [
            ["lora", "compat", str(base / WEIGHTS), str(file)]
            for file in files
            if kind == "adapter"
        ]
    elif tool.name == "modelaudit":
        commands = [["scan", "--format", "text", "--no-cache", str(root)]]
    else:
        verb = {
            "adapter": "adapter-integrity",
            "run": "checkpoint-list",
            "checkpoint": "checkpoint-check",
        }.get(kind)
        commands = [[verb, str(root)]] if verb else []
    environment = os.environ | {
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    said = ""
    for command in commands:
        ended = subprocess.run(
            [str(tool), *command], capture_output=True, text=True, env=environment
        )
        # peft-doctor ends with 0 whatever it prints.
        if ended.returncode == 1 or "ERROR" in ended.stdout:
            return "told"
        said = "note" if "WARN" in ended.stdout else said
    return said


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def of_loader(root: Path, kind: str) -> str:
    """Return what the loader itself says: the class of its error, "warns", or ""."""
    if kind == "ranks":
        return "not run"
    heard = _Heard()
    logger = logging.getLogger("transformers")
    logger.addHandler(heard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            if kind == "adapter":
                peft.PeftModel.from_pretrained(tiny.llama(), str(root))
            elif kind == "checkpoint":
                accelerator = accelerate.Accelerator(cpu=True)
                net = torch.nn.Linear(4, 4)
                accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
                accelerator.load_state(str(root))
            else:
                folder = root / {"merge": "merged"}.get(kind, "")
                if kind == "run":
                    folder = Path(transformers.trainer_utils.get_last_checkpoint(str(root)))
                name = json.loads((folder / "config.json").read_text())["architectures"][0]
                getattr(transformers, name).from_pretrained(folder)
        except Exception as error:
            return type(error).__name__
        finally:
            logger.removeHandler(heard)
    signs = ("LOAD REPORT", "newly initialized", "NOT tie")
    relevant = [text for text in heard.said if any(sign in text for sign in signs)]
    return "warns" if relevant or any("adapter keys" in str(one.message) for one in caught) else ""


def main() -> None:
    """Make the folders, ask every tool, and print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    options = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    heads = ("folder", "the loader itself", "ckptfix", "sft-cli", "modelaudit", "peft-doctor")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "base")
        tiny.llama().save_pretrained(base)
        for title, cases in (("broken", BROKEN), ("healthy", HEALTHY)):
            print(f"| {title} {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n")
            counts: list[Counter[str]] = [Counter() for _ in heads[1:]]
            for number, case in enumerate(cases):
                root = Path(scratch, f"{title}-{number}")
                case.make(root)
                verdicts = [of_ckptfix(root, case.kind)]
                verdicts += [of_peer(options.bin / tool, root, case.kind, base) for tool in PEERS]
                verdicts.insert(0, of_loader(root, case.kind))
                for count, verdict in zip(counts, verdicts, strict=True):
                    count[verdict] += 1
                print(
                    f"| {case.name} | {' | '.join(verdict or '-' for verdict in verdicts)} |",
                    flush=True,
                )
            loader, *tools = counts
            fails = sum(
                count
                for verdict, count in loader.items()
                if verdict not in ("", "warns", "not run")
            )
            words = [f"{fails} fail, {loader['warns']} warn"]
            words += [f"{count['told']} told, {count['note']} noted" for count in tools]
            print(f"| of {len(cases)} | {' | '.join(words)} |\n")


if __name__ == "__main__":
    main()

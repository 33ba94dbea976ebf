"""Repairs of adapters whose keys PEFT does not look for: proven by what PEFT loads, and undone byte
for byte.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import Policy, check, repair, undo
from ckptfix.checkpoint.keys import adapter_name, without_adapter_name
from ckptfix.cli import run
from tests.diagnosis.test_adapters import DAMAGES, and_another, behind, several
from tests.tiny_adapters import (
    NAME,
    Tensors,
    copied,
    live,
    llama,
    lora,
    peft,
    renamed,
    saved,
    with_name,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZER = torch.optim.AdamW([torch.ones(1)]).state_dict()
ALLOWED = Policy(allow=frozenset({"dead-adapter"}))


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.is_file()}


def damaged(root: Path, damage: Callable[[Tensors], Tensors]) -> dict[str, torch.Tensor]:
    tensors = lora(root, modules_to_save=["lm_head"], use_dora=True)
    write(root, damage(tensors))
    return tensors


@pytest.mark.parametrize(
    "name",
    [
        "behind _orig_mod",
        "behind module",
        "behind both",
        "behind module twice",
        "behind _forward_module",
        "in part behind module",
    ],
)
def test_wrappers_before_the_keys(name: str, tmp_path: Path) -> None:
    tensors = damaged(tmp_path, DAMAGES[name][0])
    assert live(tmp_path, tensors) != "13 of 13"
    before = contents(tmp_path)
    assert repair(tmp_path).status == 0
    assert live(tmp_path, tensors) == "13 of 13"
    assert check(tmp_path).findings == ()
    undo(tmp_path)
    assert contents(tmp_path) == before


def in_memory(root: Path, name: str, *, is_dora: bool) -> dict[str, torch.Tensor]:
    """Replace an adapter by its state dict as PEFT has it in memory, and return the tensors as PEFT
    saves them.
    """
    torch.manual_seed(0)
    targets = ["embed_tokens" if is_dora else "v_proj", "q_proj"]
    kind = {"use_dora": True} if is_dora else {"lora_bias": True}
    config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["lm_head"], **kind)
    tensors = saved(root, config)
    model = peft.PeftModel.from_pretrained(llama(), str(root), adapter_name=name)
    wanted = (".lora_", ".modules_to_save.")
    write(
        root,
        {
            key: each
            for key, each in model.state_dict().items()
            if any(part in key for part in wanted)
        },
    )
    return {key: each for key, each in tensors.items() if ".base_layer." not in key}


@pytest.mark.parametrize("is_dora", [True, False])
@pytest.mark.parametrize("name", ["default_0", "default", "main"])
def test_a_name_in_the_keys_of_every_kind_of_parameter(
    name: str, is_dora: bool, tmp_path: Path
) -> None:
    """The adapter's state dict was saved as PEFT has it in memory: DoRA's vectors, biases,
    embeddings and heads too.
    """
    tensors = in_memory(tmp_path, name, is_dora=is_dora)
    keys = load_file(tmp_path / NAME).keys()
    assert {adapter_name(key) for key in keys} == {name}
    assert {without_adapter_name(key, name) for key in keys} == tensors.keys()
    if name != "default":
        # PEFT asks for the head in modules_to_save, and finds the rest under no key.
        assert live(tmp_path, tensors) == "KeyError"
    before = contents(tmp_path)
    assert repair(tmp_path).status == 0
    assert live(tmp_path, tensors) == f"{len(tensors)} of {len(tensors)}"
    undo(tmp_path)
    assert contents(tmp_path) == before


def test_a_name_and_a_wrapper_in_a_file_of_torch(tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    (tmp_path / NAME).unlink()
    keys = {f"_orig_mod.{with_name('x')(key)}": each for key, each in tensors.items()}
    torch.save(keys, tmp_path / "adapter_model.bin")
    before = contents(tmp_path)
    assert repair(tmp_path).status == 0
    assert live(tmp_path, tensors) == "8 of 8"
    assert torch.load(tmp_path / "adapter_model.bin").keys() == tensors.keys()
    undo(tmp_path)
    assert contents(tmp_path) == before


def test_several_adapters_need_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = lora(tmp_path)
    other = {key: each + 1 for key, each in tensors.items()}
    write(tmp_path, {**renamed(with_name("main"))(tensors), **renamed(with_name("draft"))(other)})
    before = contents(tmp_path)
    assert run(["repair", str(tmp_path)]) == 1
    assert "ckptfix repair" in (said := capsys.readouterr().out)
    assert "--adapter NAME" in said
    assert run(["repair", str(tmp_path), "--allow", "dead-adapter"]) == 1
    assert "choose one with --adapter NAME" in capsys.readouterr().out
    assert run(["repair", str(tmp_path), "--adapter", "third"]) == 1
    assert (
        "no key has the adapter name 'third'; the file has 'draft', 'main'"
        in capsys.readouterr().out
    )
    assert contents(tmp_path) == before
    for name, values in (("main", tensors), ("draft", other)):
        folder = copied(tmp_path, name)
        assert run(["repair", str(folder), "--adapter", name]) == 0
        assert live(folder, values) == "8 of 8"
        assert [(each.code, each.severity.value) for each in check(folder).findings] == [
            ("dead-adapter", "note")
        ]
        assert run(["undo", str(folder)]) == 0
        assert contents(folder) == before


def test_a_name_that_no_adapter_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora(tmp_path)
    assert run(["repair", str(tmp_path), "--adapter", "main"]) == 1
    assert "no key has the adapter name 'main'" in capsys.readouterr().out


def test_keys_that_would_become_one_stay(tmp_path: Path) -> None:
    """A rename would drop one of two tensors."""
    tensors = lora(tmp_path)
    for damage, policy in (
        (and_another, Policy(adapter="main")),
        (and_another, ALLOWED),
        (twice, Policy()),
    ):
        write(tmp_path, damage(tensors))
        before = contents(tmp_path)
        receipt = repair(tmp_path, policy=policy)
        assert receipt.steps == ()
        assert "would both become" in str(receipt.unplanned[0])
        assert contents(tmp_path) == before


def twice(tensors: Tensors) -> Tensors:
    return {**tensors, **behind("module.")(tensors)}


@pytest.mark.parametrize("file", ["random_states_0.pkl", "optimizer.pt"])
def test_next_to_states_of_a_training_a_repair_asks(file: str, tmp_path: Path) -> None:
    """The script's load hook can look for the keys that its save hook wrote, and a script that has
    no hooks for those that it saved itself.
    """
    tensors = lora(tmp_path)
    write(tmp_path, behind("_orig_mod.")(tensors))
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    states = {"step": 0, "random_state": (3, (1, 2), None)}
    torch.save(OPTIMIZER if file == "optimizer.pt" else states, tmp_path / file)
    (finding,) = (each for each in check(tmp_path).findings if each.code == "dead-adapter")
    assert (finding.severity.value, finding.action.value) == ("warning", "ask")
    assert repair(tmp_path).steps == ()
    repair(tmp_path, policy=ALLOWED)
    assert live(tmp_path, tensors) == "8 of 8"


def test_keys_that_transformers_loads_stay_unless_asked_for(tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    write(tmp_path, DAMAGES["with the prefix twice"][0](tensors))
    assert repair(tmp_path).steps == ()
    repair(tmp_path, policy=ALLOWED)
    assert live(tmp_path, tensors) == "8 of 8"
    assert check(tmp_path).findings == ()


RESTORED = [
    "with DDP around the base model",
    "with a compiled base model",
    "with module before the base",
]


@pytest.mark.parametrize("name", RESTORED)
def test_a_repair_restores_what_peft_loads(name: str, tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    write(tmp_path, DAMAGES[name][0](tensors))
    repair(tmp_path, policy=ALLOWED)
    assert live(tmp_path, tensors) == "8 of 8"
    assert check(tmp_path).findings == ()


@pytest.mark.parametrize("begin", ["", "model.", "_base_model.model."])
def test_keys_without_the_prefix_are_told_and_never_repaired(begin: str, tmp_path: Path) -> None:
    """With the prefix of another base PEFT would load nothing, and ``check`` would be clean."""
    tensors = lora(tmp_path)
    write(tmp_path, {key.replace("base_model.model.", begin, 1): tensors[key] for key in tensors})
    (finding,) = check(tmp_path).findings
    assert "load_adapter of transformers may load them (expected keys like" in str(finding)
    assert "'base_model.model.MODULE.lora_A.weight'" in str(finding)
    assert finding.severity.value == "note"
    assert "rename the keys to 'base_model.model.'" in finding.advice
    assert not repair(tmp_path, policy=ALLOWED).steps


class _FabricModule(torch.nn.Module):  # type: ignore[misc]
    """What ``setup`` of Lightning's Fabric puts around a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._forward_module = model

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._forward_module(*args, **options)


def with_compiled_layers(model: Any) -> Any:
    model.model.layers = torch.nn.ModuleList(map(torch.compile, model.model.layers))
    return model


WRAPS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "base_model.model.module.model.": torch.nn.DataParallel,
    "base_model.model._orig_mod.model.": torch.compile,
    "base_model.model._forward_module.model.": _FabricModule,
    "base_model.model.model.layers.0._orig_mod.": with_compiled_layers,
    "base_model.model.module._orig_mod.model.": lambda model: torch.nn.DataParallel(
        torch.compile(model)
    ),
}


def trained(root: Path, model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(str(root))
    return dict(load_file(root / NAME))


@pytest.mark.parametrize("begin", [begin for begin in WRAPS if "layers" not in begin])
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_base_that_was_wrapped_after_it_was_adapted(
    begin: str, task: str | None, tmp_path: Path
) -> None:
    """PEFT and whatever loads the base by its name find none of these keys."""
    base: Any = llama()
    base.name_or_path = "somebody/llama"
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    )
    model.base_model.model = WRAPS[begin](base)
    tensors = trained(tmp_path, model)
    assert next(iter(tensors)).startswith(begin)
    assert live(tmp_path, tensors) == "0 of 8"
    assert [(each.code, each.severity.value) for each in check(tmp_path).findings] == [
        ("dead-adapter", "error")
    ]
    before = contents(tmp_path)
    assert repair(tmp_path).status == 0
    model.base_model.model = base
    assert live(tmp_path, peft.get_peft_model_state_dict(model)) == "8 of 8"
    assert check(tmp_path).findings == ()
    undo(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("begin", WRAPS)
def test_a_base_that_was_wrapped_before_it_was_adapted(begin: str, tmp_path: Path) -> None:
    """A script that wraps it again finds these keys."""

    def wrapped() -> Any:
        base: Any = llama()
        base.name_or_path = "somebody/llama"
        return WRAPS[begin](base)

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    tensors = trained(tmp_path, peft.get_peft_model(wrapped(), config))
    assert live(tmp_path, tensors) == "0 of 8"
    assert live(tmp_path, tensors, wrapped) == "8 of 8"
    assert [(each.code, each.severity.value) for each in check(tmp_path).findings] == [
        ("dead-adapter", "note")
    ]
    assert repair(tmp_path).steps == ()
    repair(tmp_path, policy=ALLOWED)
    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path))
    values = peft.get_peft_model_state_dict(loaded).values()
    assert all(map(torch.equal, values, tensors.values()))
    assert check(tmp_path).findings == ()


class Own(torch.nn.Module):  # type: ignore[misc]
    """A model of a script whose own module has the name of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = llama()


def test_a_module_of_the_script_itself_is_no_wrapper(tmp_path: Path) -> None:
    tensors = saved(tmp_path, peft.LoraConfig(r=4, target_modules=["q_proj"]), Own)
    assert next(iter(tensors)).startswith("base_model.model.module.model.")
    assert live(tmp_path, tensors, Own) == "4 of 4"
    assert check(tmp_path).findings == ()


def test_shards_with_their_index(tmp_path: Path) -> None:
    """transformers loads adapters in shards, PEFT does not."""
    tensors = lora(tmp_path)
    (tmp_path / NAME).unlink()
    half = list(tensors)[:4]
    weight_map: dict[str, str] = {}
    for number, keys in ((1, half), (2, [key for key in tensors if key not in half])):
        shard = f"adapter_model-0000{number}-of-00002.safetensors"
        new = {f"_orig_mod.{with_name('x')(key)}": tensors[key].clone() for key in keys}
        save_file(new, tmp_path / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(new, shard)
    size = sum(each.nbytes for each in tensors.values())
    index = tmp_path / f"{NAME}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    before = contents(tmp_path)
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding.path)) == ("dead-adapter", index.name)
    receipt = repair(tmp_path)
    assert {step.fixes for step in receipt.steps} == {("dead-adapter",)}
    assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
    assert all(
        load_file(tmp_path / shard).keys() <= tensors.keys() for shard in set(weight_map.values())
    )
    assert check(tmp_path).findings == ()
    undo(tmp_path)
    assert contents(tmp_path) == before


def test_the_command_of_a_dry_run_keeps_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "adapter"
    tensors = lora(root)
    write(root, several(tensors))
    assert run(["repair", str(root), "--adapter", "main", "--dry-run"]) == 1
    command = capsys.readouterr().out.rpartition("this plan: ckptfix ")[2]
    assert "--adapter main --expect " in command
    assert run(shlex.split(command)) == 0
    assert live(root, tensors) == "8 of 8"


def test_a_script_that_loads_the_keys_itself_is_told_before_and_after_a_repair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in the folder tells it from an adapter that PEFT is to load, and its load with
    ``strict=False`` would take nothing, and say nothing.
    """
    tensors = lora(tmp_path)
    write(tmp_path, renamed(with_name("main"))(tensors))
    before = contents(tmp_path)
    (finding,) = check(tmp_path).findings
    assert "loads the file itself with load_state_dict needs the old keys" in finding.advice
    for options, status in ((["--dry-run"], 1), ([], 0)):
        assert run(["repair", str(tmp_path), *options]) == status
        assert "undo this repair if a script loads the file itself" in capsys.readouterr().out
    assert live(tmp_path, tensors) == "8 of 8"
    undo(tmp_path)
    assert contents(tmp_path) == before

"""Checks after guarded saves: real saves of transformers, PEFT and accelerate, and what the log of
the run says.
"""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file, save_file

from ckptfix import check
from ckptfix.errors import UsageError
from ckptfix.storage.staged import SAVING
from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from ckptfix.training.guard import DEFAULTS
from ckptfix.training.saving import checked_saves
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed
from tests.deepspeed_library import variables as deepspeed_variables
from tests.stores.servers import bucket, ministack, ministack_process
from tests.tiny_adapters import NAME, live, llama, peft, renamed, write
from tests.training.loading_runs import reset
from tests.training.rank_cases import turn_on_fsdp
from tests.training.ranks import run_ranks
from tests.training.test_saving import own_disk
from tests.training.trainer_kills import build, transformers

__all__ = ["bucket", "ministack", "ministack_process"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a busy machine take its time, and forget the run."""
    for limit in ("_SECONDS", "_FIRST_SECONDS"):
        monkeypatch.setattr(checked_saves, limit, 60.0)
    yield
    unpatch_accelerate()
    reset()


class Run:
    """A LoRA, or another model, in training."""

    def __init__(
        self,
        model: Any = None,
        kind: Any = torch.optim.AdamW,
        accelerator: Any = accelerate.Accelerator,
        **optimizer: Any,
    ) -> None:
        self.accelerator = accelerator(cpu=True)
        self.model = adapted() if model is None else model
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = self.accelerator.prepare(kind(trained, **{"lr": 0.1} | optimizer))
        self.accelerator.prepare_model(self.model)

    def step(self, *, counts: bool = True) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter) if parameter.requires_grad else None
        if counts:
            self.optimizer.step()


def adapted(**settings: Any) -> Any:
    return peft.get_peft_model(
        llama(), peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | settings)
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ckptfix"]


def compiled_state(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = torch.compile(model, backend="eager").state_dict()
    return state


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("model", "options", "expected", "alive"),
    [
        pytest.param(adapted, lambda model: {}, None, "8 of 8", id="healthy"),
        pytest.param(lambda: adapted(use_dora=True), lambda model: {}, None, "12 of 12", id="DoRA"),
        pytest.param(two_adapters, lambda model: {}, None, "8 of 8", id="two adapters"),
        # PEFT 0.21 finds no key of its own in the state of a wrapper, and saves an empty adapter.
        pytest.param(
            adapted,
            lambda model: {"state_dict": compiled_state(model)},
            "incomplete-adapter",
            "0 of 0",
            id="compiled",
        ),
        pytest.param(
            adapted,
            lambda model: {"state_dict": torch.nn.DataParallel(model).state_dict()},
            "incomplete-adapter",
            "0 of 0",
            id="DataParallel",
        ),
        # Simulated: ZeRO-3 without a gather gives the main process such states.
        pytest.param(
            adapted, lambda model: {"state_dict": {}}, "incomplete-adapter", "0 of 0",
            id="simulated ZeRO-3"
        ),
        pytest.param(
            adapted,
            lambda model: {
                "state_dict": {key: torch.zeros(0) if "lora" in key else value
                               for key, value in model.state_dict().items()}
            },
            "incomplete-adapter",
            "RuntimeError",
            id="simulated ZeRO-3, tensors without elements",
        ),
    ],
)  # fmt: skip
def test_an_adapter_is_told_at_its_save(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: Callable[[], Any],
    options: Callable[[Any], dict[str, Any]],
    expected: str | None,
    alive: str,
) -> None:
    run = Run(model())
    for number in range(3):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"adapter-{number}"), **options(run.model))
    assert live(tmp_path / "adapter-2", load_file(tmp_path / "adapter-2" / NAME)) == alive
    assert check(tmp_path / "adapter-0").status == (0 if expected is None else 1)
    messages = warnings(caplog)
    if expected is None:
        assert messages == []
        return
    (message,) = messages
    assert message.startswith(f"{tmp_path / 'adapter-0'} (step 1): {NAME}: ")
    assert "; next: " in message
    assert message.endswith(f"ckptfix explain {expected}")


@pytest.mark.usefixtures("guarded")
def test_an_adapter_in_a_sub_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT saves one with a name of its own there; what else lies below the folder is of other
    saves.
    """
    model = two_adapters()
    model.save_pretrained(str(tmp_path / "old/checkpoint-1"), state_dict={})
    checked_saves.forget()
    caplog.clear()
    model.save_pretrained(str(tmp_path / "old"))
    assert warnings(caplog) == []
    state = {key: value for key, value in model.state_dict().items() if "other" not in key}
    model.save_pretrained(str(tmp_path / "new"), state_dict=state)
    (message,) = warnings(caplog)
    assert message.startswith(f"{tmp_path / 'new/other'}: {NAME}: ")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_for_from_pretrained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    run = Run(llama())
    for number in range(2):
        run.step()
        state = {f"{prefix}{key}": value for key, value in run.model.state_dict().items()}
        run.model.save_pretrained(str(tmp_path / f"{number}"), state_dict=state)
    _, loaded = type(run.model).from_pretrained(str(tmp_path / "0"), output_loading_info=True)
    assert bool(loaded["missing_keys"]) is bool(prefix)
    messages = warnings(caplog)
    assert len(messages) == bool(prefix), messages
    assert all(
        message.startswith(f"{tmp_path / '0'} (step 1): model.safetensors: ")
        for message in messages
    )


@pytest.mark.usefixtures("guarded")
def test_a_change_after_clean_saves_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(llama())
    for number in range(3):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"))
    assert warnings(caplog) == []
    run.model.config.num_hidden_layers += 1
    run.model.save_pretrained(str(tmp_path / "layers"))
    run.model.config.num_hidden_layers -= 1
    state = {f"module.{key}": value for key, value in run.model.state_dict().items()}
    run.model.save_pretrained(str(tmp_path / "keys"), state_dict=state)
    assert [message.partition(" (step 3): ")[0] for message in warnings(caplog)] == [
        str(tmp_path / "layers"),
        str(tmp_path / "keys"),
    ]


@pytest.mark.usefixtures("guarded")
def test_an_adapter_that_became_zeros_after_clean_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(adapted())
    for _ in range(25):
        run.step()
    for number in range(2):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"))
    assert warnings(caplog) == []
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    run.model.save_pretrained(str(tmp_path / "zeros"))
    (message,) = warnings(caplog)
    assert message.startswith(f"{tmp_path / 'zeros'} (step 27): ")
    assert message.endswith("ckptfix explain untrained-adapter")


class WrappedKeys(transformers.Trainer):  # type: ignore[misc]
    """Saves the tensors that a compiled model has for its adapter, as trainers of scripts do."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(str(output_dir))
        self.model.save_pretrained(str(folder))
        state = compiled_state(self.model)
        write(folder, {key: value for key, value in state.items() if "lora_" in key})


class Ungathered(transformers.Trainer):  # type: ignore[misc]
    """Simulates ZeRO-3 without stage3_gather_16bit_weights_on_model_save: no weights, and a folder
    of DeepSpeed.
    """

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict={})
        states = Path(str(output_dir)) / f"global_step{self.state.global_step}"
        states.mkdir()
        torch.save({"module": {}}, states / "zero_pp_rank_0_mp_rank_00_model_states.pt")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (transformers.Trainer, None),
        (WrappedKeys, "dead-adapter"),
        (Ungathered, "incomplete-adapter"),
    ],
)
def test_a_trainer_is_told_at_its_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, code: str | None
) -> None:
    trainer = build(tmp_path, [])
    model = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    trainer = kind(model=model, args=trainer.args, train_dataset=trainer.train_dataset)
    trainer.train()
    messages = [message for message in warnings(caplog) if "ckptfix explain" in message]
    assert len(messages) == (code is not None), messages
    assert SAVING not in "".join(messages)
    if code is not None:
        assert messages[0].startswith(f"{tmp_path / 'checkpoint-2'} (step 2): {NAME}: ")
        assert messages[0].endswith(f"ckptfix explain {code}")
    if code == "dead-adapter":
        assert "unwrap_model" in messages[0]
        assert f"ckptfix repair {tmp_path / 'checkpoint-2'}" in messages[0]


def hook_of(model: Any) -> Callable[..., None]:
    """Return a hook of ``save_state`` that saves an adapter as a DistributedDataParallel model has
    it.
    """

    def save(models: Any, weights: Any, folder: str) -> None:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / NAME)
        write(Path(folder), renamed(lambda key: f"module.{key}")(tensors))
        weights.clear()

    return save


@pytest.mark.parametrize("kind", [accelerate.Accelerator, Accelerator])
def test_a_hook_of_save_state(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    if kind is accelerate.Accelerator:
        patch_accelerate()
    run = Run(accelerator=kind)
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    for number in range(2):
        run.step()
        run.accelerator.save_state(str(tmp_path / f"c{number}"))
    (message,) = warnings(caplog)
    assert message.startswith(f"{tmp_path / 'c0'} (step 1): {NAME}: ")
    assert message.endswith("ckptfix explain dead-adapter")


@pytest.mark.parametrize("way", ["argument", "environment", "no guard"])
def test_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "environment":
        monkeypatch.setenv(checked_saves.VARIABLE, "0")
    if way != "no guard":
        patch_accelerate(check_saves=False if way == "argument" else None)
    run = Run()
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    run.step()
    run.model.save_pretrained(str(tmp_path / "a"), state_dict={})
    run.accelerator.save_state(str(tmp_path / "c"))
    assert warnings(caplog) == []


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checked_saves.VARIABLE, "0")
    assert [checked_saves.checks_saves(given) for given in (None, True, False)] == [
        False,
        True,
        False,
    ]
    monkeypatch.setenv(checked_saves.VARIABLE, "no")
    for make in (patch_accelerate, lambda: Accelerator(cpu=True)):
        with pytest.raises(UsageError, match="CKPTFIX_CHECK_SAVES=no: expected 0 or 1"):
            make()


def test_the_patch_leaves_no_trace() -> None:
    classes = (transformers.PreTrainedModel, peft.PeftModel)
    before = [kind.save_pretrained for kind in classes]
    patch_accelerate()
    assert all(
        kind.save_pretrained.__wrapped__ is one for kind, one in zip(classes, before, strict=True)
    )
    patch_accelerate()
    unpatch_accelerate()
    assert [kind.save_pretrained for kind in classes] == before


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("config", ["[]", "{", "[" * 5000, '{"peft_type": "LORA", "r": "8"}', "\0"])
def test_a_config_that_no_one_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setattr(
        peft.LoraConfig, "save_pretrained", lambda self, folder,
        **_: (Path(folder) / "adapter_config.json") .write_text(config),
    )  # fmt: skip
    adapted().save_pretrained(str(tmp_path))
    assert "not checked" not in "".join(warnings(caplog))


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RuntimeError("a bug"), RecursionError()]
)
def test_a_check_that_fails_ends_no_save(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fails(*given: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(checked_saves, "scan_folder", fails)
    run = Run()
    for number in range(2):
        run.model.save_pretrained(str(tmp_path / "a"))
        run.accelerator.save_state(str(tmp_path / f"c{number}"))
    (message,) = warnings(caplog)
    assert f"{tmp_path / 'a'}: the check after the save failed: {type(error).__name__}" in message
    assert check(tmp_path / "c1").status == 0


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("limit", "words"), [("_SECONDS", "took more than"), ("_BYTES", "would read more than")]
)
def test_a_check_that_takes_long_stops(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    words: str,
) -> None:
    model = adapted()
    model.save_pretrained(str(tmp_path / "first"))
    usual = getattr(checked_saves, limit)
    monkeypatch.setattr(checked_saves, limit, 0)
    model.save_pretrained(str(tmp_path / "a"), state_dict={})
    # Each later one would take as long.
    monkeypatch.setattr(checked_saves, limit, usual)
    model.save_pretrained(str(tmp_path / "b"), state_dict={})
    (message,) = warnings(caplog)
    assert words in message
    assert message.endswith(f"next: ckptfix check {tmp_path / 'a'}")
    adapted().save_pretrained(str(tmp_path / "of another model"), state_dict={})
    assert warnings(caplog)[-1].endswith("ckptfix explain incomplete-adapter")


@pytest.mark.usefixtures("guarded")
def test_the_first_check_of_each_model_has_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another library imports other rules: 8 shards of Llama after an adapter took more
    than 50 ms, and none of its saves was checked.
    """
    monkeypatch.setattr(checked_saves, "_SECONDS", 0.0)
    adapter, model = adapted(), llama()
    adapter.save_pretrained(str(tmp_path / "adapter"))
    model.save_pretrained(str(tmp_path / "model"))
    assert warnings(caplog) == []
    model.save_pretrained(str(tmp_path / "model"))
    (message,) = warnings(caplog)
    assert (
        f"{tmp_path / 'model'}: neither this save nor later saves are checked: the check took more "
        "than 0 ms" in message
    )


@pytest.mark.usefixtures("guarded")
def test_no_collection_counts_for_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes 200 ms in a process with transformers, and no later save was checked."""
    enabled: list[bool] = []
    monkeypatch.setattr(checked_saves, "_check", lambda *given: enabled.append(gc.isenabled()))
    adapted().save_pretrained(str(tmp_path / "a"))
    assert (enabled, gc.isenabled()) == ([False], True)


def stale(run: Run) -> None:
    """Let saves write the weights of the first one, as those do that copy to the CPU once."""
    kept: dict[str, torch.Tensor] = {}

    def old(models: Any, weights: Any, folder: str) -> None:
        if not kept:
            kept.update({key: value.clone() for key, value in weights[0].items()})
        weights[0].update({key: value.clone() for key, value in kept.items()})

    run.accelerator.register_save_state_pre_hook(old)


def linear(dtype: torch.dtype = torch.float32) -> Any:
    return torch.nn.Linear(8, 8).to(dtype)


def of_ones(dtype: torch.dtype) -> Any:
    """Return a norm, whose weights are 1 at the beginning: in bf16 the next number below is 4e-3
    away.
    """
    return torch.nn.LayerNorm(8, bias=False).to(dtype)


def of_one_row() -> Any:
    """Return a table of which only the last row is used, as textual inversion trains it."""
    table = torch.nn.Embedding(2000, 8)
    table.weight.register_hook(lambda gradient: torch.cat([torch.zeros(1999, 8), gradient[1999:]]))
    return table


class Mixed(torch.nn.Module):  # type: ignore[misc]
    """A frozen base with a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.part = torch.nn.Linear(64, 64), torch.nn.Linear(2, 2)
        self.base.requires_grad_(False)


class ManyExperts(Mixed):
    """A head next to more frozen tensors than a save can read samples of."""

    def __init__(self) -> None:
        super().__init__()
        experts = [torch.nn.Parameter(torch.zeros(4), requires_grad=False) for _ in range(5000)]
        self.experts, self.score = torch.nn.ParameterList(experts), self.part
        del self.part


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("run", "is_stale", "counts", "told"),
    [
        pytest.param(lambda: Run(linear()), True, True, True, id="old values"),
        pytest.param(lambda: Run(Mixed()), True, True, True, id="old values of a part"),
        pytest.param(
            lambda: Run(linear(torch.bfloat16)), True, True, False, id="bf16, which may stay"
        ),
        pytest.param(lambda: Run(linear()), False, True, False, id="healthy"),
        pytest.param(lambda: Run(Mixed()), False, True, False, id="frozen base"),
        pytest.param(lambda: Run(ManyExperts()), False, True, False, id="frozen experts"),
        pytest.param(
            lambda: Run(linear()), True, False, False, id="no step, or one that fp16 skips"
        ),
        pytest.param(lambda: Run(linear(), lr=0.0), False, True, False, id="learning rate 0"),
        pytest.param(
            lambda: Run(of_ones(torch.bfloat16), lr=1e-3, weight_decay=0.0),
            False,
            True,
            False,
            id="bf16 stays",
        ),
        pytest.param(
            lambda: Run(of_ones(torch.float32), lr=1e-3, weight_decay=0.0),
            True,
            True,
            True,
            id="the same in fp32",
        ),
        pytest.param(
            lambda: Run(linear(), kind=torch.optim.SGD), True, True, False, id="SGD: no count"
        ),
    ],
)
def test_equal_weights(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    run: Callable[[], Run],
    is_stale: bool,
    counts: bool,
    told: bool,
) -> None:
    made = run()
    if is_stale:
        stale(made)
    made.step()
    for number in range(4):
        made.accelerator.save_state(str(tmp_path / f"c{number}"))
        made.step(counts=counts)
        made.step(counts=counts)
    messages = warnings(caplog)
    assert len(messages) == told, messages
    if told:
        assert messages[0].startswith(
            f"{tmp_path / 'c1'} (step 3): model.safetensors: weights as in c0 (expected different values: "
            "the step of AdamW went from 1 to 3 at a learning rate of "
            f"{made.optimizer.param_groups[0]['lr']:g})"
        )


def of_rows_set_back() -> Any:
    """Return a table that sets back all rows but the last, as textual inversion does after each
    step, when the first one has moments.
    """
    table = torch.nn.Embedding(2000, 8)
    old = table.weight.data.clone()

    def set_back(module: Any, *given: Any) -> None:
        module.weight.data[:1999] = old[:1999]

    table.register_state_dict_pre_hook(set_back)
    return table


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("make", [of_one_row, of_rows_set_back])
def test_a_table_of_which_one_row_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    table = make()
    accelerator = accelerate.Accelerator(cpu=True)
    table, optimizer = accelerator.prepare(
        table, torch.optim.AdamW(table.parameters(), weight_decay=0.0)
    )
    for number in range(3):
        table(torch.tensor([0, 1999])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / f"c{number}"))
    assert warnings(caplog) == []


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("way", ["save_model", "save_pretrained"])
def test_the_best_weights_are_loaded_again_before_the_last_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """One save of equal weights is a habit of scripts, two in a row are none."""
    run = Run()

    def save(name: str) -> None:
        folder = str(tmp_path / name)
        (
            run.model.save_pretrained(folder)
            if way == "save_pretrained"
            else run.accelerator.save_model(run.model, folder)
        )

    run.step()
    best = {key: value.clone() for key, value in run.model.state_dict().items()}
    save("best")
    for name in ("final", "again"):
        assert warnings(caplog) == []
        run.step()
        run.model.load_state_dict(best)
        save(name)
    (message,) = warnings(caplog)
    assert message.startswith(f"{tmp_path / 'again'} (step 3): ")
    assert message.endswith("ckptfix explain stale-save")


@pytest.mark.usefixtures("guarded")
def test_a_reference_adapter_and_a_teacher_stay_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, teacher = Run(two_adapters()), adapted()
    for number in range(4):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"), selected_adapters=["other"])
        teacher.save_pretrained(str(tmp_path / f"teacher-{number}"))
    assert warnings(caplog) == []


@pytest.mark.slow
def test_a_save_to_a_store(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is checked on this machine, before the upload: nothing is read from the store."""
    run = Run(accelerator=Accelerator)
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    for number in range(2):
        run.step()
        run.accelerator.save_state(f"{bucket}/c{number}")
    (message,) = warnings(caplog)
    assert message.startswith(f"{bucket}/c0 (step 1): {NAME}: ")
    assert f"ckptfix repair {bucket}/c0" in message


ZERO = """
import logging, sys
from importlib import import_module
from pathlib import Path
import torch
import_module("deepspeed")
vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
from ckptfix import patch_accelerate
from ckptfix.training.guard import DEFAULTS
from ckptfix.training.saving import checked_saves
from tests.tiny_adapters import peft
from tests.training import trainer_kills
from tests.training.rank_cases import turn_on_fsdp
from tests.training.ranks import run_ranks
folder, plain = Path(sys.argv[1]), trainer_kills.GPT2LMHeadModel

def adapted(config):
    return peft.get_peft_model(plain(config), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

def work(rank):
    logging.getLogger("ckptfix").addHandler(logging.FileHandler(folder / f"log-{rank}"))
    checked_saves._SECONDS = checked_saves._FIRST_SECONDS = 60.0
    patch_accelerate()
    settings = trainer_kills.turn_on_deepspeed(3)
    settings["deepspeed"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    trainer = trainer_kills.build(folder / "out", [], **settings)
    trainer.train()
    trainer.model.save_pretrained(str(folder / "adapter"), is_main_process=rank == 0)
    torch.distributed.barrier()

trainer_kills.GPT2LMHeadModel = adapted
assert run_ranks(2, work, patience=300.0) == [0, 0]
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
def test_an_adapter_that_zero_3_did_not_gather(tmp_path: Path) -> None:
    """The Trainer's own saves gather it, save_pretrained of the script does not."""
    done = subprocess.run(
        [sys.executable, "-c", ZERO, str(tmp_path)],
        capture_output=True,
        text=True,
        env=deepspeed_variables(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"log-{rank}").read_text() for rank in range(2))
    assert first.startswith(
        f"{tmp_path / 'adapter'} (step 8): {NAME}: empty tensors, like those that ZeRO-3 leaves "
        "on each rank, for 2 of 2 keys"
    ), first
    assert first.count("\n") == 1
    assert second == ""


SCRIPT = """
import sys
from pathlib import Path
import torch
import accelerate
from tests.tiny_adapters import llama, peft
model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
model.save_pretrained(sys.argv[1], state_dict={})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "lines"),
    [(["-m", "ckptfix", "run"], 1), (["-m", "ckptfix", "run", "--no-check-saves"], 0), ([], 0)],
)
def test_a_script(tmp_path: Path, command: list[str], lines: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "script.py"), str(tmp_path / "adapter")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("incomplete-adapter") == lines, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has_own_disk", [False, True], ids=["one disk", "a disk for each node"])
@pytest.mark.parametrize("way", ["save_state", "save_pretrained"])
def test_two_processes(tmp_path: Path, way: str, has_own_disk: bool) -> None:
    """Of one node: rank 0 alone. Of nodes with disks of their own: the first process of each that
    writes there.
    """
    disk = tmp_path / "disk"
    disk.mkdir()

    def work(rank: int) -> None:
        if has_own_disk:
            os.environ["LOCAL_RANK"] = "0"
            if rank and not own_disk(disk):
                (tmp_path / "not allowed").touch()
        logging.getLogger("ckptfix").addHandler(logging.FileHandler(tmp_path / f"log-{rank}"))
        checked_saves._SECONDS = checked_saves._FIRST_SECONDS = 60.0
        patch_accelerate(save_together=True)
        model = adapted()
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare_model(torch.nn.Linear(2, 2))
        accelerator.register_save_state_pre_hook(hook_of(model))
        state = PartialState()
        writes = state.is_local_main_process if has_own_disk else state.is_main_process
        for number in range(2):
            if way == "save_state":
                accelerator.save_state(str(disk / f"c{number}"))
            else:
                model.save_pretrained(str(disk / "a"), state_dict={}, is_main_process=writes)
            accelerator.wait_for_everyone()

    assert run_ranks(2, work, patience=300.0) == [0, 0]
    if (tmp_path / "not allowed").exists():
        pytest.skip("no mount namespace for this user")
    lines = [(tmp_path / f"log-{rank}").read_text().count("ckptfix explain") for rank in range(2)]
    assert lines == [1, int(has_own_disk)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED", "FULL"])
def test_the_check_of_one_process_waits_for_no_other(tmp_path: Path, kind: str) -> None:
    """FSDP2 shards the moments, too: an operation on one of them would wait for all processes."""

    def work(rank: int) -> None:
        logging.getLogger("ckptfix").addHandler(logging.FileHandler(tmp_path / f"log-{rank}"))
        checked_saves._SECONDS = checked_saves._FIRST_SECONDS = 60.0
        accelerator = Accelerator(cpu=True)
        turn_on_fsdp(accelerator, fsdp_version=2, state_dict_type=f"{kind}_STATE_DICT")
        raw = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.1))
        old = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
        for number in range(3):
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(str(tmp_path / f"c{number}"))
        assert (tmp_path / f"log-{rank}").read_text() == ""
        for number in range(2):
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            if rank == 0:
                folder = tmp_path / f"old-{number}"
                folder.mkdir()
                save_file(old, folder / "model.safetensors")
                checked_saves.check_save(DEFAULTS, folder, folder, accelerator, accelerator._models)
        accelerator.wait_for_everyone()

    assert run_ranks(2, work, patience=60.0) == [0, 0]
    first, second = ((tmp_path / f"log-{rank}").read_text() for rank in range(2))
    assert first.startswith(
        f"{tmp_path / 'old-1'} (step 5): model.safetensors: weights as in old-0 "
    ), first
    assert first.count("\n") == 1
    assert second == ""

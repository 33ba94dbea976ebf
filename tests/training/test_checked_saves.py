"""Checks after guarded saves: real saves of transformers, PEFT and accelerate, and what the log of
the run says.
"""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
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
from tests.training.rank_cases import run_python, turn_on_fsdp
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


class Log:
    """What the log of a run has said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def lines(self) -> list[str]:
        return [one.getMessage() for one in self._caplog.records if one.name == "ckptfix"]

    def clear(self) -> None:
        self._caplog.clear()

    def only(self, begins: str, code: str) -> str:
        """Return the one warning, which begins with a folder and ends with a finding."""
        (message,) = self.lines()
        assert message.startswith(begins), message
        assert message.endswith(f"ckptfix explain {code}"), message
        return message


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def compiled_state(model: Any) -> dict[str, Any]:
    return dict(torch.compile(model, backend="eager").state_dict())


def parallel_state(model: Any) -> dict[str, Any]:
    return dict(torch.nn.DataParallel(model).state_dict())


def emptied_state(model: Any) -> dict[str, Any]:
    state = model.state_dict()
    return {key: torch.zeros(0) if "lora" in key else value for key, value in state.items()}


def prefixed(model: Any, prefix: str = "module.") -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in model.state_dict().items()}


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("model", "state", "expected", "alive"),
    [
        pytest.param(adapted, None, None, "8 of 8", id="healthy"),
        pytest.param(lambda: adapted(use_dora=True), None, None, "12 of 12", id="DoRA"),
        pytest.param(two_adapters, None, None, "8 of 8", id="two adapters"),
        # PEFT 0.21 finds no key of its own in the state of a wrapper, and saves an empty adapter.
        pytest.param(adapted, compiled_state, "incomplete-adapter", "0 of 0", id="compiled"),
        pytest.param(adapted, parallel_state, "incomplete-adapter", "0 of 0", id="DataParallel"),
        # Simulated: ZeRO-3 without a gather gives the main process such states.
        pytest.param(adapted, lambda model: {}, "incomplete-adapter", "0 of 0", id="ZeRO-3"),
        pytest.param(
            adapted, emptied_state, "incomplete-adapter", "RuntimeError", id="ZeRO-3, no elements"
        ),
    ],
)
def test_an_adapter_is_told_at_its_save(
    tmp_path: Path,
    log: Log,
    model: Callable[[], Any],
    state: Callable[[Any], dict[str, Any]] | None,
    expected: str | None,
    alive: str,
) -> None:
    run = Run(model())
    for number in range(3):
        run.step()
        given = {} if state is None else {"state_dict": state(run.model)}
        run.model.save_pretrained(str(tmp_path / f"adapter-{number}"), **given)
    assert live(tmp_path / "adapter-2", load_file(tmp_path / "adapter-2" / NAME)) == alive
    assert check(tmp_path / "adapter-0").status == (0 if expected is None else 1)
    if expected is None:
        assert log.lines() == []
    else:
        assert "; next: " in log.only(f"{tmp_path / 'adapter-0'} (step 1): {NAME}: ", expected)


@pytest.mark.usefixtures("guarded")
def test_an_adapter_in_a_sub_folder(tmp_path: Path, log: Log) -> None:
    """PEFT saves one with a name of its own there; what else lies below the folder is of other
    saves.
    """
    model = two_adapters()
    model.save_pretrained(str(tmp_path / "old/checkpoint-1"), state_dict={})
    checked_saves.forget()
    log.clear()
    model.save_pretrained(str(tmp_path / "old"))
    assert log.lines() == []
    state = {key: value for key, value in model.state_dict().items() if "other" not in key}
    model.save_pretrained(str(tmp_path / "new"), state_dict=state)
    (message,) = log.lines()
    assert message.startswith(f"{tmp_path / 'new/other'}: {NAME}: ")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_for_from_pretrained(tmp_path: Path, log: Log, prefix: str) -> None:
    run = Run(llama())
    for number in range(2):
        run.step()
        run.model.save_pretrained(
            str(tmp_path / f"{number}"), state_dict=prefixed(run.model, prefix)
        )
    _, loaded = type(run.model).from_pretrained(str(tmp_path / "0"), output_loading_info=True)
    assert bool(loaded["missing_keys"]) is bool(prefix)
    said = [one.partition(" (step 1): model.safetensors: ")[0] for one in log.lines()]
    assert said == ([str(tmp_path / "0")] if prefix else [])


@pytest.mark.usefixtures("guarded")
def test_a_change_after_clean_saves_is_told(tmp_path: Path, log: Log) -> None:
    run = Run(llama())
    for number in range(3):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"))
    assert log.lines() == []
    run.model.config.num_hidden_layers += 1
    run.model.save_pretrained(str(tmp_path / "layers"))
    run.model.config.num_hidden_layers -= 1
    run.model.save_pretrained(str(tmp_path / "keys"), state_dict=prefixed(run.model))
    said = [message.partition(" (step 3): ")[0] for message in log.lines()]
    assert said == [str(tmp_path / "layers"), str(tmp_path / "keys")]


@pytest.mark.usefixtures("guarded")
def test_an_adapter_that_became_zeros_after_clean_saves(tmp_path: Path, log: Log) -> None:
    run = Run(adapted())
    for _ in range(25):
        run.step()
    for number in range(2):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"))
    assert log.lines() == []
    for name, parameter in run.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    run.model.save_pretrained(str(tmp_path / "zeros"))
    log.only(f"{tmp_path / 'zeros'} (step 27): ", "untrained-adapter")


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
    [(WrappedKeys, "dead-adapter"), (Ungathered, "incomplete-adapter"), (transformers.Trainer, "")],
)
def test_a_trainer_is_told_at_its_first_save(
    tmp_path: Path, log: Log, kind: Any, code: str
) -> None:
    trainer = build(tmp_path, [])
    model = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    kind(model=model, args=trainer.args, train_dataset=trainer.train_dataset).train()
    messages = [message for message in log.lines() if "ckptfix explain" in message]
    assert len(messages) == bool(code), messages
    assert SAVING not in "".join(messages)
    for message in messages:
        assert message.startswith(f"{tmp_path / 'checkpoint-2'} (step 2): {NAME}: ")
        assert message.endswith(f"ckptfix explain {code}")
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
def test_a_hook_of_save_state(tmp_path: Path, log: Log, kind: Any) -> None:
    if kind is accelerate.Accelerator:
        patch_accelerate()
    run = Run(accelerator=kind)
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    for number in range(2):
        run.step()
        run.accelerator.save_state(str(tmp_path / f"c{number}"))
    log.only(f"{tmp_path / 'c0'} (step 1): {NAME}: ", "dead-adapter")


@pytest.mark.parametrize("way", ["argument", "environment", "no guard"])
def test_off(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "environment":
        monkeypatch.setenv(checked_saves.VARIABLE, "0")
    if way != "no guard":
        patch_accelerate(check_saves=False if way == "argument" else None)
    run = Run()
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    run.step()
    run.model.save_pretrained(str(tmp_path / "a"), state_dict={})
    run.accelerator.save_state(str(tmp_path / "c"))
    assert log.lines() == []


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
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setattr(
        peft.LoraConfig, "save_pretrained", lambda self, folder,
        **_: (Path(folder) / "adapter_config.json") .write_text(config),
    )  # fmt: skip
    adapted().save_pretrained(str(tmp_path))
    assert "not checked" not in "".join(log.lines())


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RuntimeError("a bug"), RecursionError()]
)
def test_a_check_that_fails_ends_no_save(
    tmp_path: Path,
    log: Log,
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
    (message,) = log.lines()
    assert f"{tmp_path / 'a'}: the check after the save failed: {type(error).__name__}" in message
    assert check(tmp_path / "c1").status == 0


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("limit", "words"), [("_SECONDS", "took more than"), ("_BYTES", "would read more than")]
)
def test_a_check_that_takes_long_stops(
    tmp_path: Path,
    log: Log,
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
    (message,) = log.lines()
    assert words in message
    assert message.endswith(f"next: ckptfix check {tmp_path / 'a'}")
    adapted().save_pretrained(str(tmp_path / "of another model"), state_dict={})
    assert log.lines()[-1].endswith("ckptfix explain incomplete-adapter")


@pytest.mark.usefixtures("guarded")
def test_the_first_check_of_each_model_has_a_second(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another library imports other rules: 8 shards of Llama after an adapter took more
    than 50 ms, and none of its saves was checked.
    """
    monkeypatch.setattr(checked_saves, "_SECONDS", 0.0)
    adapter, model = adapted(), llama()
    adapter.save_pretrained(str(tmp_path / "adapter"))
    model.save_pretrained(str(tmp_path / "model"))
    assert log.lines() == []
    model.save_pretrained(str(tmp_path / "model"))
    (message,) = log.lines()
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


BF16, FP32 = torch.bfloat16, torch.float32


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


NORM = {"lr": 1e-3, "weight_decay": 0.0}


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("run", "is_stale", "counts", "told"),
    [
        pytest.param(lambda: Run(linear()), True, True, True, id="old values"),
        pytest.param(lambda: Run(Mixed()), True, True, True, id="old values of a part"),
        pytest.param(lambda: Run(linear(BF16)), True, True, False, id="bf16, which may stay"),
        pytest.param(lambda: Run(linear()), False, True, False, id="healthy"),
        pytest.param(lambda: Run(Mixed()), False, True, False, id="frozen base"),
        pytest.param(lambda: Run(ManyExperts()), False, True, False, id="frozen experts"),
        # Or one that fp16 skips.
        pytest.param(lambda: Run(linear()), True, False, False, id="no step"),
        pytest.param(lambda: Run(linear(), lr=0.0), False, True, False, id="learning rate 0"),
        pytest.param(lambda: Run(of_ones(BF16), **NORM), False, True, False, id="bf16 stays"),
        pytest.param(lambda: Run(of_ones(FP32), **NORM), True, True, True, id="the same in fp32"),
        # Which has no count of steps.
        pytest.param(lambda: Run(linear(), torch.optim.SGD), True, True, False, id="SGD"),
    ],
)
def test_equal_weights(
    tmp_path: Path, log: Log, run: Callable[[], Run], is_stale: bool, counts: bool, told: bool
) -> None:
    made = run()
    if is_stale:
        stale(made)
    made.step()
    for number in range(4):
        made.accelerator.save_state(str(tmp_path / f"c{number}"))
        made.step(counts=counts)
        made.step(counts=counts)
    messages = log.lines()
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
    tmp_path: Path, log: Log, make: Callable[[], Any]
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
    assert log.lines() == []


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("way", ["save_model", "save_pretrained"])
def test_the_best_weights_are_loaded_again_before_the_last_save(
    tmp_path: Path, log: Log, way: str
) -> None:
    """One save of equal weights is a habit of scripts, two in a row are none."""
    run = Run()
    to_model = partial(run.accelerator.save_model, run.model)
    save = run.model.save_pretrained if way == "save_pretrained" else to_model
    run.step()
    best = {key: value.clone() for key, value in run.model.state_dict().items()}
    save(str(tmp_path / "best"))
    for name in ("final", "again"):
        assert log.lines() == []
        run.step()
        run.model.load_state_dict(best)
        save(str(tmp_path / name))
    log.only(f"{tmp_path / 'again'} (step 3): ", "stale-save")


@pytest.mark.usefixtures("guarded")
def test_a_reference_adapter_and_a_teacher_stay_equal(tmp_path: Path, log: Log) -> None:
    run, teacher = Run(two_adapters()), adapted()
    for number in range(4):
        run.step()
        run.model.save_pretrained(str(tmp_path / f"{number}"), selected_adapters=["other"])
        teacher.save_pretrained(str(tmp_path / f"teacher-{number}"))
    assert log.lines() == []


@pytest.mark.slow
def test_a_save_to_a_store(bucket: str, log: Log) -> None:
    """It is checked on this machine, before the upload: nothing is read from the store."""
    run = Run(accelerator=Accelerator)
    run.accelerator.register_save_state_pre_hook(hook_of(run.model))
    for number in range(2):
        run.step()
        run.accelerator.save_state(f"{bucket}/c{number}")
    (message,) = log.lines()
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
    run_python("-c", ZERO, str(tmp_path), variables=deepspeed_variables())
    first, second = logs(tmp_path)
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
    [(["-m", "ckptfix", "run"], 1), (["-m", "ckptfix", "run", "--no-check-saves"], 0)],
)
def test_a_script(tmp_path: Path, command: list[str], lines: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "script.py"), str(tmp_path / "adapter")],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("incomplete-adapter") == lines, done.stderr


def logged(folder: Path, rank: int) -> None:
    """Log into a file, on a rank that may take its time."""
    logging.getLogger("ckptfix").addHandler(logging.FileHandler(folder / f"log-{rank}"))
    checked_saves._SECONDS = checked_saves._FIRST_SECONDS = 60.0


def logs(folder: Path) -> list[str]:
    return [(folder / f"log-{rank}").read_text() for rank in range(2)]


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
        logged(tmp_path, rank)
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
    lines = [text.count("ckptfix explain") for text in logs(tmp_path)]
    assert lines == [1, int(has_own_disk)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED", "FULL"])
def test_the_check_of_one_process_waits_for_no_other(tmp_path: Path, kind: str) -> None:
    """FSDP2 shards the moments, too: an operation on one of them would wait for all processes."""

    def work(rank: int) -> None:
        logged(tmp_path, rank)
        accelerator = Accelerator(cpu=True)
        turn_on_fsdp(accelerator, fsdp_version=2, state_dict_type=f"{kind}_STATE_DICT")
        raw = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.1))
        old = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}

        def step() -> None:
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()

        for number in range(3):
            step()
            optimizer.zero_grad()
            accelerator.save_state(str(tmp_path / f"c{number}"))
        assert (tmp_path / f"log-{rank}").read_text() == ""
        for number in range(2):
            step()
            if rank == 0:
                folder = tmp_path / f"old-{number}"
                folder.mkdir()
                save_file(old, folder / "model.safetensors")
                checked_saves.check_save(DEFAULTS, folder, folder, accelerator, accelerator._models)
        accelerator.wait_for_everyone()

    assert run_ranks(2, work, patience=60.0) == [0, 0]
    first, second = logs(tmp_path)
    begins = f"{tmp_path / 'old-1'} (step 5): model.safetensors: weights as in old-0 "
    assert first.startswith(begins), first
    assert first.count("\n") == 1
    assert second == ""

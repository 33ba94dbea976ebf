"""What a check understands of a checkpoint, and hostile files in the place of its three small JSON
files.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptfix import check, migrate, seal
from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry
from ckptfix.cli import run
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.diagnosis.understood import Understood
from ckptfix.formats.dcp_metadata import model_names
from ckptfix.storage.paths import MANIFEST
from ckptfix.storage.stores import open_store
from tests.benchmarks.storing import counted
from tests.repairs.builders import TRAINER_RANDOM_STATES

FIXTURES = Path(__file__).parents[2] / "fixtures"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CLEAN, tmp_path / "checkpoint"))


def understood(path: Path) -> list[str]:
    """Return the lines of a report between its verdict and what was not checked."""
    report = check(path)
    assert report.status == 0, str(report)
    lines = str(report).splitlines()
    assert lines[0].startswith(f"{path}: no error found")
    assert lines[-1].startswith("not checked: ")
    return lines[1:-1]


def save_model(path: Path, names: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(names, path, metadata={"format": "pt"})


def save_optimizer(path: Path, kind: Any, *, steps: int = 1, **options: Any) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = kind(parameters, **options)
    for _ in range(steps):
        sum(one.sum() for one in parameters).backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), path)


def test_a_healthy_save_of_one_model(folder: Path) -> None:
    assert (
        str(check(folder))
        == f"{folder}: no error found (4 files, 4 tensors, 33.8 KiB)\n  model      "
        "model.safetensors: 4 tensors, F32, 332 B\n  optimizer  optimizer.bin (Adam or "
        "AdamW): 4 parameters\n  saved by   at least 2 processes\nnot checked: values of tensors, "
        "checksums of tensor records in torch zip files, whether all files belong to one save "
        "and none is missing, whether tensors and param groups match the script; "
        f"for details: ckptfix check -v {folder}"
    )


def test_verbose_lists_what_was_not_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", "-v", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        (
            "not checked: values of tensors (NaN, zeros, flipped bits); ckptfix verify --data "
            "reads them, but not other values in states (counters, random states)"
        ),
        (
            "not checked: checksums of tensor records in torch zip files; ckptfix check --data "
            "checks them"
        ),
        (
            "not checked: whether all files belong to one save and none is missing: no file "
            "records which save it is from, and without another checkpoint of the run nothing shows "
            "how many ranks, models and states the run has; only a seal right after each save proves it"
        ),
        (
            "not checked: whether tensors and param groups match the script: keys, shapes, dtypes "
            "and order; the load compares keys and shapes"
        ),
    ]
    assert run(["repair", str(folder)]) == 0
    assert capsys.readouterr().out.count("not checked") == 1
    assert run(["repair", "-v", str(folder)]) == 0
    assert capsys.readouterr().out.count("not checked") == 4
    assert run(["check", "-v", "-q", str(folder)]) == 2
    assert "--verbose and --quiet contradict each other" in capsys.readouterr().err


def test_two_models_and_optimizers_each(tmp_path: Path) -> None:
    root = tmp_path / "gan"
    save_model(
        root / "model.safetensors", {"a": torch.ones(4), "b": torch.ones(2, dtype=torch.bfloat16)}
    )
    save_model(root / "model_1.safetensors", {"a": torch.rand(8)})
    save_optimizer(root / "optimizer.bin", torch.optim.SGD, lr=0.1, momentum=0.9)
    save_optimizer(root / "optimizer_1.bin", torch.optim.NAdam, steps=0)
    assert understood(root) == [
        "  model      model.safetensors: 2 tensors, 1 F32 and 1 BF16, 20 B",
        "  model      model_1.safetensors: 1 tensor, F32, 32 B",
        "  optimizer  optimizer.bin (SGD): 2 parameters",
        "  optimizer  optimizer_1.bin (NAdam): 2 parameters",
        (
            "  random states: none saved; load_state restores neither the random "
            "generators nor accelerator.step"
        ),
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Adam", "Adam or AdamW"), ("AdamW", "Adam or AdamW"), ("SGD", "SGD"), ("NAdam", "NAdam"),
        ("RMSprop", "RMSprop"), ("Adagrad", "Adagrad"), ("Adadelta", "Adadelta"),
        ("RAdam", "states step, exp_avg, exp_avg_sq"), ("Adamax", "states step, exp_avg, exp_inf"),
        ("ASGD", "states step, eta, mu, ax"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [0, 1])
def test_only_an_optimizer_that_is_known_by_its_keys_gets_a_name(
    kind: str, name: str, steps: int, tmp_path: Path
) -> None:
    save_optimizer(tmp_path / "optimizer.bin", getattr(torch.optim, kind), steps=steps)
    (one,) = check(tmp_path / "optimizer.bin").understood.optimizers
    if name.startswith("states ") and not steps:
        name = "no states"
    assert str(one) == f"optimizer.bin ({name}): 2 parameters"


def test_the_step_of_an_old_optimizer_is_in_its_pickle(tmp_path: Path) -> None:
    state = {"step": 7, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": [0]}]
    torch.save({"state": {0: state}, "param_groups": groups}, tmp_path / "optimizer.bin")
    (one,) = check(tmp_path / "optimizer.bin").understood.optimizers
    assert str(one) == "optimizer.bin (Adam or AdamW): 1 parameter, step 7"
    assert one.as_json()["step"] == 7
    state["step"] = 10**5000
    torch.save({"state": {0: state}, "param_groups": groups}, tmp_path / "optimizer.bin")
    (one,) = check(tmp_path / "optimizer.bin").understood.optimizers
    assert "step" not in one.as_json()


def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint-500"
    save_model(
        root / "model.safetensors", {"lm_head.weight": torch.ones(3), "norm.weight": torch.ones(3)}
    )
    save_optimizer(root / "optimizer.pt", torch.optim.AdamW)
    torch.save({"last_epoch": 500}, root / "scheduler.pt")
    (root / "rng_state.pth").write_bytes(TRAINER_RANDOM_STATES)
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 22, "vocab_size": 32000,
        "transformers_version": "4.44.2",
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    history = [{"loss": 0.5, "step": step} for step in range(30_000)]
    progress = {"epoch": 1.25, "global_step": 500, "log_history": history, "max_steps": 1000}
    (root / "trainer_state.json").write_text(json.dumps(progress, indent=2, sort_keys=True))
    assert (root / "trainer_state.json").stat().st_size > 1 << 20
    # The first two lines are the note about the Trainer's random states.
    assert understood(root)[2:] == [
        (
            "  model      model.safetensors (LlamaForCausalLM, 22 layers, vocabulary 32000): 2 "
            "tensors, F32, 24 B"
        ),
        "  optimizer  optimizer.pt (Adam or AdamW): 2 parameters",
        "  run        step 500, epoch 1.25",
        "  saved by   1 process, transformers 4.44.2",
    ]
    facts = check(root).as_json()
    assert (facts["verdict"], facts["counts"]["files"], facts["counts"]["errors"]) == (
        "clean",
        4,
        0,
    )
    assert facts["understood"]["step"] == 500
    assert facts["understood"]["libraries"] == {"transformers": "4.44.2"}
    assert facts["understood"]["models"][0]["vocabulary"] == 32000


def test_numbers_of_a_language_model_inside_another(folder: Path) -> None:
    config = {
        "model_type": "llava",
        "vocab_size": None,
        "text_config": {"num_layers": 3, "vocab_size": 9},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert (
        understood(folder)[0]
        == "  model      model.safetensors (llava, 3 layers, vocabulary 9): 4 tensors, F32, 332 B"
    )


def test_an_adapter(tmp_path: Path) -> None:
    pair = {f"base_model.model.a.lora_{matrix}.weight": torch.ones(8, 8) for matrix in "AB"}
    save_model(tmp_path / "adapter_model.safetensors", pair)
    config = {
        "peft_type": "LORA",
        "r": 8,
        "base_model_name_or_path": "gpt2",
        "peft_version": "0.18.0",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert understood(tmp_path) == [
        (
            "  model      adapter_model.safetensors (LORA adapter, rank 8, of gpt2): 2 tensors, "
            "F32, 512 B"
        ),
        "  saved by   peft 0.18.0",
    ]


def test_a_config_next_to_several_models_is_not_given_to_one(folder: Path) -> None:
    save_model(folder / "model_1.safetensors", {"x": torch.ones(1)})
    (folder / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    lines = understood(folder)
    assert "  config     config.json (UNet2DModel)" in lines
    assert not any("UNet2DModel" in text for text in lines if text.startswith("  model"))


def test_many_models_are_folded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 9):
        save_model(folder / f"model_{number}.safetensors", {f"x{number}": torch.ones(number)})
    assert understood(folder)[3] == "  and 6 more models; --json lists all"
    assert run(["check", "-v", str(folder)]) == 0
    assert capsys.readouterr().out.count("\n  model ") == 9


def test_the_manifest_of_a_save_names_the_classes_of_files_that_did_not_change(
    folder: Path,
) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = Manifest(
        versions={"accelerate": "1.15.0"}, world_size=2, step=3, files=files,
        models=(ManifestEntry(index=0, file="model.safetensors", type="torch.nn.Linear"),),
        optimizers=(ManifestEntry(index=0, file="optimizer.bin", type="torch.optim.adamw.AdamW"),),
    )  # fmt: skip
    (folder / MANIFEST).parent.mkdir()
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    assert understood(folder) == [
        "  model      model.safetensors (Linear): 4 tensors, F32, 332 B",
        "  optimizer  optimizer.bin (AdamW): 4 parameters",
        "  saved by   2 processes, accelerate 1.15.0",
    ]
    save_model(folder / "model.safetensors", {"other": torch.ones(1)})
    assert check(folder).understood.models[0].kind == "", (
        "the file is not the one that was recorded"
    )


def test_a_seal_of_a_stock_save_counts_no_processes(folder: Path) -> None:
    before = [line for line in understood(folder) if line.startswith("  saved by")]
    seal(folder)
    assert [line for line in understood(folder) if line.startswith("  saved by")] == before


def test_folders_of_fsdp_and_deepspeed() -> None:
    assert understood(FIXTURES / "dcp-2.13.0" / "fsdp2-clean" / "checkpoint") == [
        "  model      pytorch_model_fsdp_0/ (DCP): 8 tensors, 7 F32 and 1 I64, 216 B, 2 files",
        "  optimizer  optimizer_0/ (DCP, SGD): 5 parameters",
        (
            "  random states: none saved; load_state restores neither the random "
            "generators nor accelerator.step"
        ),
    ]
    assert understood(FIXTURES / "deepspeed-0.18.2" / "accelerate-zero3" / "checkpoint") == [
        "  model      pytorch_model/ (DeepSpeed): 14 tensors, 4 files",
        "  saved by   at least 2 processes",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "step", [torch.tensor(3), torch.tensor([0.5]), 3], ids=["a tensor", "a loss", "a number"]
)
def test_a_dcp_folder_with_a_step_next_to_model_and_optimizer(tmp_path: Path, step: Any) -> None:
    folder = tmp_path / "dcp"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states, "step": step}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    assert understood(folder)[:2] == [
        "  model      ./ (DCP): 2 tensors, F32, 60 B",
        "  optimizer  ./ (DCP, Adam or AdamW): 2 parameters",
    ]
    assert check(folder).status == 0
    report = migrate(folder, tmp_path / "weights", to="safetensors")
    assert report.status == 0
    assert sorted(load_file(tmp_path / "weights" / "model.safetensors")) == ["bias", "weight"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_single_numbers_of_a_model_without_a_dict_of_that_name_are_its_weights(
    tmp_path: Path,
) -> None:
    state = {
        "scale": torch.ones(()),
        "encoder": {"weight": torch.ones(2, 2)},
        "model": torch.ones(1),
    }
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    (metadata,) = [one.metadata for one in scan_dcp_folders(scan_folder(tmp_path))]
    assert metadata is not None
    names = model_names(metadata)
    assert names is not None
    assert sorted(names.names.values()) == ["encoder.weight", "model", "scale"]


def test_shards_and_tied_weights_are_counted_once(tmp_path: Path) -> None:
    sharded = FIXTURES / "accelerate-1.15.0" / "sharded-qwen2" / "checkpoint"
    assert understood(sharded) == [
        "  model      model.safetensors.index.json: 27 tensors, F32, 8.8 KiB, 3 files"
    ]
    weight = torch.ones(10)
    torch.save({"a": weight, "b": weight}, tmp_path / "pytorch_model.bin")
    assert check(tmp_path).understood.models[0].nbytes == 40


def test_a_model_with_a_lost_shard_is_not_told_as_complete(tmp_path: Path) -> None:
    sharded = FIXTURES / "accelerate-1.15.0" / "sharded-qwen2" / "checkpoint"
    root = Path(shutil.copytree(sharded, tmp_path / "checkpoint"))
    (root / "model-00002-of-00003.safetensors").unlink()
    report = check(root)
    assert report.status == 1
    (model,) = report.understood.models
    assert str(model).startswith("model.safetensors.index.json: ")
    assert str(model).endswith(", 2 files, 1 not read")
    assert 0 < model.tensors < 27


def test_an_optimizer_around_another_has_no_name_before_its_first_step(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "rho": 0.05, "adaptive": False, "params": [0, 1]}]
    torch.save({"state": {}, "param_groups": groups}, tmp_path / "optimizer.bin")
    (one,) = check(tmp_path / "optimizer.bin").understood.optimizers
    assert str(one) == "optimizer.bin (no states): 2 parameters"


def test_a_damaged_folder_begins_with_its_errors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    lines = str(check(folder)).splitlines()
    assert lines[0] == f"{folder}: 1 error (4 files, 0 tensors, 33.8 KiB)"
    assert lines[1].startswith("  error truncated-file: model.safetensors")
    assert lines[2:-2] == [
        "        copy the file again from its source, or use an older checkpoint",
        f"next, to recover what is intact: ckptfix salvage {folder} NEW_FOLDER",
        "  optimizer  optimizer.bin (Adam or AdamW): 4 parameters",
    ]


NOT_OBJECTS = {
    "empty": (b"", "empty"),
    "cut": (b'{"architectures": ["Llama', "not JSON"),
    "not UTF-8": (b'{"a": "\xff\xfe"}', "not JSON"),
    "a list": (b"[1, 2]", "not a JSON object"),
    "a number of 5000 digits": (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
    "nested": (b"[" * 200_000, "nested too deeply"),
    "100 MB": (None, "longer than 1.0 MiB, so it was not read"),
}
WRONG_VALUES = {
    "numbers as text": (b'{"vocab_size": "32000"}', '"vocab_size" is not a valid count'),
    "a negative number": (b'{"num_hidden_layers": -1}', '"num_hidden_layers" is not a valid count'),
    "infinity": (b'{"n_layer": Infinity}', '"n_layer" is not a valid count'),
    "true": (b'{"n_layer": true}', '"n_layer" is not a valid count'),
    "a dict of classes": (b'{"architectures": {"a": 1}}', '"architectures" is not a valid name'),
    "an escape": (b'{"architectures": ["\\u001b[2J"]}', '"architectures" is not a valid name'),
    "half a surrogate pair": (b'{"model_type": "\\ud800"}', '"model_type" is not a valid name'),
    "a long name": (
        b'{"_class_name": "' + b"x" * 1000 + b'"}',
        '"_class_name" is not a valid name',
    ),
}


BROKEN = {
    **{("config.json", case): value for case, value in (NOT_OBJECTS | WRONG_VALUES).items()},
    ("adapter_config.json", "cut"): NOT_OBJECTS["cut"],
    ("adapter_config.json", "a text"): (b'{"r": "8", "peft_type": 1}', '"r" is not a valid count'),
}


@pytest.mark.parametrize("case", BROKEN, ids=" ".join)
def test_a_broken_config_is_told_and_the_report_goes_on(
    case: tuple[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, (content, problem) = case[0], BROKEN[case]
    with open(folder / name, "wb") as file:
        file.write(content or b"")
        file.truncate(len(content) if content is not None else 100_000_000)
    lines = understood(folder)
    assert f"  {name}: {problem}" in lines
    assert lines[0].startswith("  model      model.safetensors: 4 tensors")
    assert run(["check", str(folder), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert f"{name}: {problem}" in document["understood"]["problems"]
    shutil.copytree(folder, folder.parent / "second")
    assert run(["check", "-r", "-v", str(folder.parent)]) == 0
    assert f"  {name}: {problem}\n" in capsys.readouterr().out
    assert run(["check", "-r", str(folder.parent)]) == 0
    assert name in capsys.readouterr().out.splitlines()[-2], "what was not checked"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"[]", "not a JSON object"),
        (b"{}", 'no "global_step", so the Trainer starts again at step 0'),
        (b'{"global_step": "5"}', '"global_step" is not a valid count'),
        (b'{"global_step": true}', '"global_step" is not a valid count'),
        (b"[" * 60_000, "not a JSON object"),
        (b'{"a": ' * 60_000, "nested too deeply"),
        (b"\0" * 100_000, "not a JSON object"),
        (b'{"a": "' + b"b" * 100_000, 'no "global_step" in its first 64.0 KiB'),
    ],
)
def test_a_broken_state_of_the_trainer(content: bytes, problem: str, folder: Path) -> None:
    (folder / "trainer_state.json").write_bytes(content)
    assert f"  trainer_state.json: {problem}" in understood(folder)
    assert check(folder).as_json()["understood"].keys().isdisjoint({"step", "epoch"})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"[]", "not a JSON object"),
        (b'\xef\xbb\xbf{"global_step": 2}', "not a JSON object"),
        (b'{"global_step": 2,}', "not JSON at line 1, column 19"),
        (b'{"global_step": 2}\0', "not JSON at line 1, column 19"),
        (b'{"global_step": 2, "log_history": ["a\xff"]}', "not UTF-8 at byte 37"),
        ('{"global_step": 2}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b'{"global_step": ' + b"1" * 5000 + b"}", "a number is too long"),
        (b'{"global_step": 2, "a": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "nested too deeply"),
        (
            b'{"global_step": 2, "log_history": [\0' + b" " * 100_000,
            "not JSON at line 1, column 36",
        ),
    ],
)
def test_a_state_that_the_trainer_cannot_read_is_a_warning(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    from transformers.trainer_callback import TrainerState

    of_trainer = tmp_path / "checkpoint-2"
    of_trainer.mkdir()
    shutil.copy(CLEAN / "model.safetensors", of_trainer)
    (of_trainer / "trainer_state.json").write_bytes(content)
    with pytest.raises((ValueError, TypeError, RecursionError)):
        TrainerState.load_from_json(str(of_trainer / "trainer_state.json"))
    report = check(of_trainer)
    assert report.status == 1
    (warning,) = report.findings
    assert (warning.code, str(warning)) == (
        "incomplete-checkpoint",
        f"trainer_state.json: {problem}",
    )
    assert warning.advice.startswith("the Trainer cannot resume without it; copy it again")
    assert report.understood.problems == ()


def test_a_state_of_the_trainer_that_is_longer_than_its_head(tmp_path: Path) -> None:
    """The end of the head is inside a word, a character or a list: it is not an error of the
    file.
    """
    of_trainer = tmp_path / "checkpoint-2"
    of_trainer.mkdir()
    shutil.copy(CLEAN / "model.safetensors", of_trainer)
    path = of_trainer / "trainer_state.json"
    for size in range(65_400, 65_560):
        history = [{"loss": "x" * size, "ü": -1.5e-7, "b": [True, None, "\u20ac\n"]}]
        path.write_text(json.dumps({"global_step": 2, "log_history": history}, ensure_ascii=False))
        report = check(of_trainer)
        assert (report.status, report.understood.step) == (0, 2)
    beyond = "trainer_state.json after its first 64.0 KiB; ckptfix check --data reads the rest"
    assert beyond in report.not_checked
    path.write_bytes(path.read_bytes()[:-1])
    assert check(of_trainer).status == 0
    assert check(of_trainer, data=True).status == 1


def test_something_else_under_the_name_of_a_config(folder: Path) -> None:
    os.mkfifo(folder / "config.json")
    (folder / "adapter_config.json").symlink_to("adapter_config.json")
    (folder / "trainer_state.json").mkdir()
    lines = understood(folder)
    assert "  config.json: not a regular file" in lines
    assert any(text.startswith("  adapter_config.json: cannot be read: ") for text in lines)


def test_a_store_gets_one_request_for_each_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings of the files behind the first one are read together anyway, that of
    trainer_state.json, too.
    """
    small = b'{"model_type": "x", "global_step": 1}'

    def requests() -> tuple[dict[str, int], CheckReport]:
        url = f"memory://{os.urandom(6).hex()}/checkpoint"
        store = open_store(url)
        for path in CLEAN.iterdir():
            store.put(path.name, path.read_bytes())
        for name in ("config.json", "adapter_config.json"):
            store.put(name, small)
        store.put("trainer_state.json", b'{"a": "' + b" " * (2 << 20))
        with counted() as reads:
            report = check(url)
        return {key: count for key, (count, _) in reads.items()}, report

    found, report = requests()
    assert report.understood.models[0].kind == "x"
    assert report.understood.problems == (
        'trainer_state.json: no "global_step" in its first 64.0 KiB',
    )
    monkeypatch.setattr("ckptfix.diagnosis.check.understand", lambda diagnosis: Understood())
    assert found == {"config.json": 1, "adapter_config.json": 1, **requests()[0]}


def test_a_model_in_a_sub_folder_and_its_broken_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(folder / "unet" / "diffusion_pytorch_model.safetensors", {"x": torch.ones(3)})
    (folder / "unet" / "config.json").write_text(
        '{"_class_name": "UNet2DModel", "_diffusers_version": "0.35"}'
    )
    lines = understood(folder)
    assert (
        "  model      unet/diffusion_pytorch_model.safetensors (UNet2DModel): 1 tensor, F32, 12 B"
        in lines
    )
    assert "  saved by   at least 2 processes, diffusers 0.35" in lines
    (folder / "unet" / "config.json").write_text("{")
    (finding,) = check(folder / "unet").findings
    assert str(finding) == "config.json: not JSON, so the Trainer and from_pretrained fail"
    assert run(["check", "--format", "sarif", str(folder)]) == 1
    assert "not checked: unet/config.json: not JSON" in capsys.readouterr().out


def test_a_config_is_said_not_to_be_compared_with_the_weights(folder: Path) -> None:
    """A check of another model's config in the folder ends with 0: its sizes are printed, and
    compared by nothing.
    """
    words = "config.json against the weights: its sizes are read but not compared"
    assert words not in check(folder).not_checked
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 99}')
    report = check(folder)
    assert (report.status, words in report.not_checked) == (0, True)
    assert ", config.json against the weights, " in str(report)
    assert words not in check(folder / "model.safetensors").not_checked

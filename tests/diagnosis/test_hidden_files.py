"""Files that a loader needs and does not find by their names: each loader itself decides, and
``check`` agrees.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix import check
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.errors import UsageError
from tests.diagnosis.builders import (
    NOWHERE,
    Change,
    as_broken_link,
    edit_json,
    new_accelerator,
    problems,
)
from tests.diagnosis.test_names_of_libraries import LIBRARIES
from tests.diagnosis.test_trainer_states import lora_trainer_in
from tests.stores.servers import upload_folder


def moved(name: str, to: str) -> Change:
    return lambda folder: (folder / name).rename(folder / to)


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


# The exports of transformers, diffusers and PEFT.


def _of_peft(path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    LIBRARIES["transformers"](path.parent / "base")
    base = LlamaForCausalLM.from_pretrained(path.parent / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(path))


EXPORTS: Mapping[str, Change] = {**LIBRARIES, "peft": _of_peft}
WRITTEN = {
    "transformers": "model.safetensors",
    "diffusers": "diffusion_pytorch_model.safetensors",
    "peft": "adapter_model.safetensors",
}
CONFIGS = {
    "transformers": "config.json", "diffusers": "config.json", "peft": "adapter_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    for library, save in EXPORTS.items():
        save(root / library)
    return {library: root / library for library in EXPORTS}


@pytest.fixture
def copied(exports: Mapping[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return what copies an export."""
    return lambda library: Path(shutil.copytree(exports[library], tmp_path / "export"))


def is_loaded(folder: Path, library: str, base: Path) -> bool:
    """Return whether ``from_pretrained`` of a library takes a folder."""
    from transformers import AutoModelForCausalLM

    try:
        if library == "diffusers":
            import diffusers

            kind: Any = diffusers.UNet2DModel
            kind.from_pretrained(folder)
        elif library == "peft":
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
        else:
            AutoModelForCausalLM.from_pretrained(folder)
    except (OSError, ValueError):
        return False
    return True


def warned(folder: Path) -> Finding:
    """Return the only finding that is more than a note."""
    (finding,) = (one for one in check(folder).findings if one.severity.value != "note")
    return finding


def _others(name: str) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    ends = (" (1).", "_old.", "-copy.")
    return [name.capitalize(), *(f"{stem}{end}{suffix}" for end in ends)]


RENAMED = [
    *(("transformers", "model.safetensors", other) for other in _others("model.safetensors")),
    ("transformers", "model.safetensors", "pytorch_model.safetensors"),
    *(
        (library, WRITTEN[library], _others(WRITTEN[library])[1])
        for library in ("diffusers", "peft")
    ),
]


@pytest.mark.parametrize(("library", "name", "other"), RENAMED)
def test_the_only_weights_of_an_export_have_another_name(
    exports: Mapping[str, Path],
    copied: Callable[[str], Path],
    library: str,
    name: str,
    other: str,
) -> None:
    folder = copied(library)
    assert is_loaded(folder, library, exports["transformers"])
    assert problems(folder) == []
    (folder / name).rename(folder / other)
    assert not is_loaded(folder, library, exports["transformers"])
    warning = warned(folder)
    assert warning.code == "incomplete-checkpoint"
    assert str(warning).startswith(f"{name} is missing: ")
    assert warning.advice.startswith(
        f"if {other!r} is that file, rename it to {name}; otherwise copy {name} again"
    )
    url = f"memory://{os.urandom(6).hex()}/export"
    upload_folder(folder, url)
    assert problems(url) == [str(warning)]
    shutil.copy(folder / other, folder / name)
    assert is_loaded(folder, library, exports["transformers"])
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("library", "end"),
    [
        *(("transformers", f".json{end}") for end in (".tmp", ".1", "~")),
        *(("peft", end) for end in ("_old.json", ".JSON")),
        *((library, " (1).json") for library in CONFIGS),
    ],
)
def test_the_config_of_an_export_has_another_name(
    exports: Mapping[str, Path], copied: Callable[[str], Path], library: str, end: str
) -> None:
    folder, name = copied(library), CONFIGS[library]
    other = f"{name.removesuffix('.json')}{end}"
    (folder / name).rename(folder / other)
    assert not is_loaded(folder, library, exports["transformers"])
    warning = warned(folder)
    words = f"{other!r} exists, but from_pretrained does not look for that name"
    assert str(warning) == f"{name} is missing: {words}"
    assert f"rename it to {name}" in warning.advice
    (folder / other).rename(folder / name)
    assert is_loaded(folder, library, exports["transformers"])
    assert problems(folder) == []


def test_the_config_is_lost_next_to_that_of_generation(copied: Callable[[str], Path]) -> None:
    folder = copied("transformers")
    (folder / "config.json").unlink()
    assert not is_loaded(folder, "transformers", folder)
    warning = warned(folder)
    words = "config.json is missing: save_pretrained writes it with generation_config.json"
    assert str(warning) == words
    assert warning.advice.startswith("from_pretrained fails without it; copy it again")


def _with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def _with_file(name: str) -> Change:
    return lambda folder: save_file({"w": torch.ones(2, 2)}, folder / name)


def _with_config(*removed: str, **changes: object) -> Change:
    return lambda folder: edit_json(folder / "config.json", *removed, **changes)


def _copied_file(name: str, to: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / to)


def _without(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return change


def _in_subfolder(folder: Path) -> None:
    for name in ("default", "second"):
        shutil.copytree(folder, folder.parent / name)
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("default", "second"):
        shutil.move(folder.parent / name, folder / name)


def _of_a_custom_class(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.pth")
    (folder / "model.safetensors").unlink()


def _as_links(folder: Path) -> None:
    """Link each file to a blob, as the cache of the hub does."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")


MODEL, OF_OPEN_CLIP = "model.safetensors", "open_clip_model.safetensors"
OF_GENERATION = "generation_config.json"
OF_TRANSFORMERS = ("architectures", "transformers_version")

HEALTHY: Mapping[str, tuple[str, Change]] = {
    "an older copy next to the weights": ("transformers", _with_file("model_old.safetensors")),
    "averages next to the weights": ("transformers", _with_file("ema.safetensors")),
    "an older copy of an adapter": ("peft", _with_file("adapter_model_old.safetensors")),
    "an older config": ("transformers", _with_text("config_old.json", "{}")),
    "links of the cache": ("transformers", _as_links),
    "weights for llama.cpp": ("transformers", moved(MODEL, "model-Q4_K_M.gguf")),
    "weights for onnxruntime": ("transformers", moved(MODEL, "model_quantized.onnx")),
    "quantized by another library": (
        "transformers", moved(MODEL, "gptq_model-4bit-128g.safetensors"),
    ),
    "weights of MLX": ("transformers", moved(MODEL, "weights.00.safetensors")),
    "a state of one rank of vLLM": (
        "transformers", moved(MODEL, "model-rank-0-part-0.safetensors"),
    ),
    "weights in 8 bits": ("transformers", moved(MODEL, "model_int8.safetensors")),
    "the models of an ensemble": ("transformers", both(
        moved(MODEL, "model_0.safetensors"),
        _copied_file("model_0.safetensors", "model_1.safetensors"),
    )),
    "configs of two parts": ("transformers", both(
        _without(OF_GENERATION), _copied_file("config.json", "config_encoder.json"),
        moved("config.json", "config_decoder.json"),
    )),
    "weights of exllama": ("transformers", moved(MODEL, "output.safetensors")),
    "a checkpoint of a custom class": ("transformers", _of_a_custom_class),
    "open_clip": ("transformers", both(
        moved(MODEL, OF_OPEN_CLIP), moved("config.json", "open_clip_config.json"),
        _without(OF_GENERATION),
    )),
    "open_clip next to the config of transformers": ("transformers", moved(MODEL, OF_OPEN_CLIP)),
    "timm": ("transformers", _with_config(*OF_TRANSFORMERS, architecture="vit")),
    "another framework's config": ("transformers", both(
        _with_config(*OF_TRANSFORMERS), moved(MODEL, "model_part.safetensors"),
    )),
    "a config that names the file": ("transformers", both(
        _with_config(transformers_weights="model_other.safetensors"),
        moved(MODEL, "model_other.safetensors"),
    )),
    "adapters in sub-folders": ("peft", _in_subfolder),
    "LoRA weights of diffusers": (
        "peft", moved("adapter_model.safetensors", "pytorch_lora_weights.safetensors"),
    ),
    "weights alone": ("transformers", _without("config.json", OF_GENERATION)),
    "weights of diffusers alone": ("diffusers", _without("config.json")),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_a_folder_of_another_loader_is_clean(copied: Callable[[str], Path], case: str) -> None:
    library, edit = HEALTHY[case]
    folder = copied(library)
    edit(folder)
    with suppress(UsageError):  # a folder without a file of a checkpoint
        assert problems(folder) == []


@pytest.mark.parametrize("name", ["output.safetensors", "pytorch_model.pth"])
def test_weights_that_only_another_loader_finds_are_listed_as_not_checked(
    copied: Callable[[str], Path], name: str
) -> None:
    folder = copied("transformers")
    if name.endswith(".pth"):
        _of_a_custom_class(folder)
    else:
        moved(MODEL, name)(folder)
    assert not is_loaded(folder, "transformers", folder)
    words = f"config.json belongs to transformers, which does not look for {name!r}"
    assert any(words in sentence for sentence in check(folder).not_checked)


# The Trainer.


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        # Peft 0.21 asks transformers 5.23 by an old name.
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lora_trainer_in(tmp_path_factory.mktemp("lora"))
        trainer.train()
    return Path(trainer.args.output_dir, "checkpoint-2")


@pytest.mark.parametrize(
    ("other", "has_logs", "has_config"),
    [
        ("adapter_model (1).safetensors", True, True),
        ("adapter_model_old.safetensors", True, False),
        ("adapter_model_old.safetensors", False, False),
    ],
)
def test_the_adapter_of_a_trainer_has_another_name(
    lora_run: Path, tmp_path: Path, other: str, has_logs: bool, has_config: bool
) -> None:
    folder = Path(shutil.copytree(lora_run, tmp_path / "run/checkpoint-2"))
    if has_logs:
        (folder / "runs").mkdir()
        (folder / "runs/events.out.tfevents").write_bytes(b"x")
    if not has_config:
        (folder / "adapter_config.json").unlink()
    (folder / "adapter_model.safetensors").rename(folder / other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lora_trainer_in(tmp_path / "out")
        with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
            trainer._load_from_checkpoint(str(folder))
    name = "adapter_model.safetensors"
    assert problems(folder) == [
        f"{name} is missing: {other!r} exists, but the Trainer does not look for that name"
    ]
    with pytest.raises(UsageError, match=r"checkpoint-2: no adapter_model\.safetensors"):
        ckptfix.latest_checkpoint(folder.parent)


def test_adapters_of_a_trainer_in_sub_folders(lora_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(lora_run, tmp_path / "run/checkpoint-2"))
    for name in ("default", "second"):
        (folder / name).mkdir()
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(folder / file, folder / name / file)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model_old.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        lora_trainer_in(tmp_path / "out")._load_from_checkpoint(str(folder))
    assert problems(folder) == []
    assert ckptfix.latest_checkpoint(folder.parent) == folder


# load_state.


def _prepared(*, is_optimizer_of_script: bool) -> tuple[Accelerator, torch.optim.Optimizer]:
    accelerator = new_accelerator()
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model = accelerator.prepare(model)
    if not is_optimizer_of_script:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer, _ = accelerator.prepare(optimizer, scheduler)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return accelerator, optimizer


def _saved_run(path: Path, *, is_optimizer_of_script: bool) -> Path:
    for number in (3, 6, 9):
        accelerator, optimizer = _prepared(is_optimizer_of_script=is_optimizer_of_script)
        folder = path / f"checkpoint_{number}"
        accelerator.save_state(str(folder))
        if is_optimizer_of_script:
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return path / "checkpoint_9"


def _is_resumed(folder: Path, *, is_optimizer_of_script: bool) -> bool:
    accelerator, _ = _prepared(is_optimizer_of_script=is_optimizer_of_script)
    try:
        accelerator.load_state(str(folder))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("renamed", [("optimizer",), ("scheduler",), ("optimizer", "scheduler")])
def test_states_under_the_names_of_the_trainer(tmp_path: Path, renamed: tuple[str, ...]) -> None:
    folder = _saved_run(tmp_path / "run", is_optimizer_of_script=False)
    assert problems(folder) == []
    for stem in renamed:
        (folder / f"{stem}.bin").rename(folder / f"{stem}.pt")
    assert not _is_resumed(folder, is_optimizer_of_script=False)
    warned = [one for one in check(folder).findings if one.severity.value != "note"]
    assert [str(one.path) for one in warned] == [f"{stem}.bin" for stem in renamed]
    for stem, one in zip(renamed, warned, strict=True):
        assert str(one).startswith(f"{stem}.bin is missing: ")
        assert (
            one.advice
            == f"if '{stem}.pt' is that file, rename it to {stem}.bin; otherwise copy {stem}.bin "
            "again, or ignore this if the script does not load it"
        )
    with pytest.warns(UserWarning, match="passed over checkpoint_9"):
        assert ckptfix.latest_checkpoint(folder.parent) == folder.parent / "checkpoint_6"
    for stem in renamed:
        (folder / f"{stem}.pt").rename(folder / f"{stem}.bin")
    assert _is_resumed(folder, is_optimizer_of_script=False)
    assert problems(folder) == []


def test_without_neighbours_the_optimizer_may_be_of_the_script(tmp_path: Path) -> None:
    folder = _saved_run(tmp_path / "run", is_optimizer_of_script=False)
    for number in (3, 6):
        shutil.rmtree(tmp_path / f"run/checkpoint_{number}")
    for stem in ("optimizer", "scheduler"):
        (folder / f"{stem}.bin").rename(folder / f"{stem}.pt")
    assert problems(folder) == []
    words = (
        "optimizers: load_state does not look for 'optimizer.pt' and fails in a script that "
        "needs optimizer.bin"
    )
    of_scheduler = words.replace("optimizer", "scheduler")
    assert {words, of_scheduler} <= {*check(folder).not_checked}
    (folder / "scheduler.pt").rename(folder / "scheduler.bin")
    assert problems(folder) == []
    assert words in check(folder).not_checked
    (folder / "optimizer.pt").unlink()
    assert problems(folder) == [
        "optimizer.bin is missing: scheduler.bin shows that the run had an optimizer"
    ]


def test_a_script_that_saves_its_optimizer_itself(tmp_path: Path) -> None:
    folder = _saved_run(tmp_path / "run", is_optimizer_of_script=True)
    assert not (folder / "optimizer.bin").exists()
    assert _is_resumed(folder, is_optimizer_of_script=True)
    assert problems(folder) == []
    assert ckptfix.latest_checkpoint(folder.parent) == folder


def test_a_script_that_prepares_its_scheduler_and_not_its_optimizer(tmp_path: Path) -> None:
    for number in (3, 6, 9):
        accelerator, optimizer = _prepared(is_optimizer_of_script=True)
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2))
        folder = tmp_path / f"run/checkpoint_{number}"
        accelerator.save_state(str(folder))
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    accelerator.load_state(str(folder))
    assert (folder / "scheduler.bin").exists()
    assert problems(folder) == []
    assert ckptfix.latest_checkpoint(folder.parent) == folder


def test_a_script_that_saves_its_optimizer_twice(tmp_path: Path) -> None:
    folder = _saved_run(tmp_path / "run", is_optimizer_of_script=False)
    for number in (3, 6, 9):
        shutil.copy(folder / "optimizer.bin", tmp_path / f"run/checkpoint_{number}/optimizer.pt")
    assert _is_resumed(folder, is_optimizer_of_script=False)
    assert problems(folder) == []


# Names that lead nowhere.


@pytest.mark.parametrize(
    ("library", "case"),
    [*(("transformers", case) for case in NOWHERE), *((name, "a folder") for name in CONFIGS)],
)
def test_a_config_that_leads_nowhere(
    exports: Mapping[str, Path], copied: Callable[[str], Path], library: str, case: str
) -> None:
    folder, name = copied(library), CONFIGS[library]
    edit, words = NOWHERE[case]
    edit(folder / name)
    assert not is_loaded(folder, library, exports["transformers"])
    assert [problem.partition(", so ")[0] for problem in problems(folder)] == [f"{name}: {words}"]
    assert "from_pretrained fails" in problems(folder)[0]


@pytest.mark.parametrize("case", ["a broken link", "a link to itself"])
def test_the_state_of_a_trainer_leads_nowhere(lora_run: Path, tmp_path: Path, case: str) -> None:
    from transformers import TrainerState

    folder = Path(shutil.copytree(lora_run, tmp_path / "run/checkpoint-2"))
    edit, words = NOWHERE[case]
    edit(folder / "trainer_state.json")
    with pytest.raises(OSError, match="trainer_state"):
        TrainerState.load_from_json(str(folder / "trainer_state.json"))
    report = check(folder)
    assert problems(folder) == [f"trainer_state.json: {words}"]
    assert report.understood.problems == ()
    with pytest.raises(UsageError, match=r"trainer_state\.json: "):
        ckptfix.latest_checkpoint(folder.parent)


def test_the_trainer_resumes_without_a_config_that_leads_nowhere(
    lora_run: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(lora_run, tmp_path / "run/checkpoint-2"))
    as_broken_link(folder / "adapter_config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        lora_trainer_in(tmp_path / "out")._load_from_checkpoint(str(folder))
    (problem,) = problems(folder)
    assert (
        problem == "adapter_config.json: a broken link: ../blobs/gone does not exist, so "
        "PeftModel.from_pretrained fails"
    )
    assert ckptfix.latest_checkpoint(folder.parent) == folder

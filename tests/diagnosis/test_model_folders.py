"""Models that hooks of diffusers' training scripts save in sub-folders of a checkpoint, compared
with other saves.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import save_file

from ckptfix import check, latest_checkpoint, salvage
from ckptfix.storage import stores
from tests.diagnosis.test_models_of_hooks import WEIGHTS, Script
from tests.diagnosis.test_passed_over import written
from tests.stores.servers import QUICK, upload_folder

Change = Callable[[Path], object]


small = partial(Script, "unet", average="unet_ema", channels=(4,))


def loads(checkpoint: Path) -> bool:
    """Return whether load_state of the script loads a checkpoint."""
    try:
        small().loads(checkpoint)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    script = small()
    for number in (10, 20, 30):
        script.saved(run / f"checkpoint-{number}")
    assert [check(root).status for root in run.iterdir()] == [0, 0, 0]
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def emptied(name: str) -> Change:
    def change(root: Path) -> None:
        for file in (root / name).iterdir():
            file.unlink()

    return change


DAMAGED: dict[str, tuple[Change, set[str]]] = {
    "no unet": (
        lambda root: shutil.rmtree(root / "unet"),
        {"unet/config.json", f"unet/{WEIGHTS}"},
    ),
    "empty unet": (emptied("unet"), {"unet/config.json", f"unet/{WEIGHTS}"}),
    "empty average": (emptied("unet_ema"), {"unet_ema/config.json", f"unet_ema/{WEIGHTS}"}),
    "no config": (lambda root: (root / "unet/config.json").unlink(), {"unet/config.json"}),
    "no config of the average": (
        lambda root: (root / "unet_ema/config.json").unlink(),
        {"unet_ema/config.json"},
    ),
    "empty object": (written("unet_ema/config.json", "{}"), {"config.json"}),
    "half a config": (written("unet_ema/config.json", '{"_class'), {"config.json"}),
}


@pytest.mark.filterwarnings("ignore:.*passed over", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "at"),
    [*((name, 30) for name in DAMAGED), *(("no unet", at) for at in (10, 20)), ("no config", 20)],
)
def test_a_checkpoint_without_a_model_of_its_hook(run: Path, name: str, at: int) -> None:
    """The newest was clean and taken, load_state failed, and two intact checkpoints were next to
    it.
    """
    change, lost = DAMAGED[name]
    root = run / f"checkpoint-{at}"
    change(root)
    assert at < 30 or not loads(root)
    report = check(root)
    assert report.status == 1
    (finding,) = report.all_findings
    assert (finding.code, {*getattr(finding, "missing", ())}) == ("incomplete-checkpoint", lost)
    assert latest_checkpoint(run) == run / f"checkpoint-{20 if at == 30 else 30}"
    assert [check(other).status for other in run.iterdir() if other != root] == [0, 0]


def test_a_salvage_lists_the_lost_model(run: Path, tmp_path: Path) -> None:
    """It said that nothing missing was found."""
    shutil.rmtree(run / "checkpoint-30/unet_ema")
    receipt = salvage(run / "checkpoint-30", tmp_path / "salvaged")
    assert {lost.file for lost in receipt.lost} == {"unet_ema/config.json", f"unet_ema/{WEIGHTS}"}


def test_a_model_that_the_script_no_longer_saves(run: Path) -> None:
    """A lost folder looks the same, so check warns. The unet is needed: an average and an optimizer
    of it are there.
    """
    shutil.rmtree(run / "checkpoint-30/unet_ema")
    (finding,) = check(run / "checkpoint-30").findings
    assert (
        str(finding)
        == f"unet_ema/config.json, unet_ema/{WEIGHTS} are missing: 2 of 2 neighbouring checkpoints "
        "have them"
    )
    assert "no longer saves this model" in finding.advice
    assert latest_checkpoint(run) == run / "checkpoint-30"


@pytest.mark.parametrize("first", [20, 30])
def test_an_average_that_begins_later(run: Path, first: int) -> None:
    for number in range(10, first, 10):
        shutil.rmtree(run / f"checkpoint-{number}/unet_ema")
    assert [check(root).status for root in sorted(run.iterdir())] == [0, 0, 0]
    findings = check(run / "checkpoint-10").findings
    assert [finding.severity.value for finding in findings] == (["note"] if first == 20 else [])


def pipeline(root: Path) -> None:
    for name in ("vae", "text_encoder"):
        shutil.copytree(root / "unet", root / name)
    index = {"_class_name": "P", "vae": ["diffusers", "V"], "text_encoder": ["diffusers", "T"]}
    (root / "model_index.json").write_text(json.dumps(index))


def logs(root: Path) -> None:
    for name in ("logs", "samples", "tokenizer"):
        (root / name).mkdir()
        (root / name / "config.json").write_text('{"tokenizer_class": "T"}')
        (root / name / "0.png").write_bytes(b"png")


def adapter(root: Path) -> None:
    (root / "unet_lora").mkdir()
    save_file({"w": torch.ones(2)}, root / "unet_lora/pytorch_lora_weights.safetensors")


def average_of_script(root: Path) -> None:
    (root / "ema").mkdir()
    torch.save({"w": torch.ones(2)}, root / "ema/ema.pt")


@pytest.mark.parametrize(
    ("extra", "without"),
    [*((pipeline, number) for number in (10, 20, 30)), (logs, 30), (average_of_script, 30)],
)
def test_what_a_script_saves_now_and_then(run: Path, extra: Change, without: int) -> None:
    for root in run.iterdir():
        if root.name != f"checkpoint-{without}":
            extra(root)
    assert [check(root).status for root in run.iterdir()] == [0, 0, 0]
    assert latest_checkpoint(run) == run / "checkpoint-30"


def test_an_adapter_without_a_config(run: Path) -> None:
    for root in run.iterdir():
        adapter(root)
    assert [check(root).findings for root in run.iterdir()] == [(), (), ()]
    shutil.rmtree(run / "checkpoint-20/unet_lora")
    assert check(run / "checkpoint-20").status == 1


def test_a_model_of_a_class_without_arguments(tmp_path: Path) -> None:
    """PyTorchModelHubMixin writes {} as its config."""

    class Model(torch.nn.Module, PyTorchModelHubMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

    Model().save_pretrained(tmp_path / "model", config={})
    assert json.loads((tmp_path / "model/config.json").read_text()) == {}
    assert check(tmp_path / "model").status == 0


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_a_run_in_a_store(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    shutil.rmtree(run / "checkpoint-30/unet")
    (run / "checkpoint-20/unet_ema/config.json").unlink()
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(run, url)
    found = [
        {
            name
            for finding in check(f"{url}/checkpoint-{number}").findings
            for name in finding.as_json()["missing"]
        }
        for number in (10, 20, 30)
    ]
    assert found == [set(), {"unet_ema/config.json"}, {"unet/config.json", f"unet/{WEIGHTS}"}]
    assert latest_checkpoint(url) == f"{url}/checkpoint-10"

"""Configs with other settings than those next to them: from_pretrained loads another model, or none,
though a resume is as before.
"""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint.neighbours import Siblings
from tests.commanding import Said, said
from tests.diagnosis.test_configs_of_hooks import Run
from tests.diagnosis.test_trainer_neighbours import train
from tests.diagnosis.test_trainer_states import trainer_in
from tests.stores.servers import upload_folder

__all__ = ["said"]

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def edit(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=2))


def told(root: Path | str) -> list[tuple[str, str]]:
    """Return the severity of each finding about another config, and its sentence."""
    return [
        (one.severity.value, str(one))
        for one in check(root).all_findings
        if "neighbouring" in str(one)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("saved") / "run", 3)[0].parent


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("adapted")
    trainer = trainer_in(root / "run", learning_rate=0.1)
    trainer.model.save_pretrained(root / "base")
    config = peft.LoraConfig(r=2, target_modules=["query", "key"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, config)
    trainer.args.save_steps, trainer.args.max_steps = 1, 3
    trainer.train()
    return root / "run"


def loaded(root: Path, base: Path) -> torch.Tensor | None:
    """Return what the model that a library loads makes of a batch, None where the load fails."""
    import transformers

    adapter = root / ADAPTER
    place = base if adapter.exists() else root
    torch.manual_seed(1)
    try:
        model: Any = transformers.BertForSequenceClassification.from_pretrained(place)
        if adapter.exists():
            import peft

            model = peft.PeftModel.from_pretrained(model, str(root))
    except (RuntimeError, ValueError):
        return None
    result: torch.Tensor = model.eval()(torch.arange(6)[None]).logits.detach()
    return result


SIZES: list[dict[str, Any]] = [
    {"num_hidden_layers": 2},
    {"num_attention_heads": 2},
    {"vocab_size": 30},
    {"intermediate_size": 16},
    {"max_position_embeddings": 64},
]
SCALES: list[dict[str, Any]] = [{"hidden_act": "relu"}, {"layer_norm_eps": 0.5}]
OF_ADAPTERS: list[dict[str, Any]] = [{"lora_alpha": 64}, {"use_rslora": True}]


def is_another(kept: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    assert kept is not None
    return now is None or not torch.equal(kept, now)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [*SIZES, *SCALES, *OF_ADAPTERS], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_config_with_another_setting_than_those_next_to_it_is_told(
    settings: dict[str, Any], number: int, saved: Path, adapted: Path, tmp_path: Path
) -> None:
    """At an end of the run a script may have changed some of them since."""
    is_of_adapter = settings in OF_ADAPTERS
    run = Path(shutil.copytree(adapted if is_of_adapter else saved, tmp_path / "run"))
    root = run / f"checkpoint-{number}"
    name = ADAPTER if is_of_adapter else CONFIG
    kept = loaded(root, adapted.parent / "base")
    ((setting, value),) = settings.items()
    former = json.loads((root / name).read_text())[setting]
    edit(root / name, **settings)
    assert is_another(kept, loaded(root, adapted.parent / "base"))
    ((severity, sentence),) = told(root)
    assert severity == ("warning" if number == 2 or settings in SIZES else "note")
    assert sentence.startswith(
        f"{name}: {setting} is {json.dumps(value)} (expected {json.dumps(former)}, as in 2 "
        "neighbouring checkpoints, whose tensors have the same shapes); from_pretrained "
    )
    assert [told(each) for each in sorted(run.iterdir()) if each != root] == [[], []]
    assert latest_checkpoint(run, pattern="checkpoint-{}") == run / "checkpoint-3"
    if number == 3:
        url = f"memory://{os.urandom(6).hex()}/run"
        upload_folder(run, url)
        assert told(f"{url}/checkpoint-3") == [(severity, sentence)]


@pytest.mark.parametrize("number", [2, 3])
def test_settings_that_decide_nothing_or_mean_the_same(
    number: int, run: Path, adapted: Path, tmp_path: Path
) -> None:
    """A newer library writes more settings, and PEFT modules in any order."""
    root = run / f"checkpoint-{number}"
    edit(root / CONFIG, use_cache=False, attention_probs_dropout_prob=0.5)
    assert told(root) == []
    edit(root / CONFIG, transformers_version="5.24.0", rope_parameters={"rope_theta": 1e4})
    assert told(root) == []
    adapters = Path(shutil.copytree(adapted, tmp_path / "adapters"))
    root = adapters / f"checkpoint-{number}"
    for modules in (["key", "query"], ["query", "key"], ".*(query|key)"):
        edit(root / ADAPTER, target_modules=modules, inference_mode=False)
        assert told(root) == []


@pytest.mark.parametrize("settings", [SIZES[0], SCALES[0], OF_ADAPTERS[0]], ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_the_later_of_two_checkpoints_with_different_configs_is_a_note(
    settings: dict[str, Any], number: int, saved: Path, adapted: Path, tmp_path: Path
) -> None:
    is_of_adapter = settings in OF_ADAPTERS
    run = Path(shutil.copytree(adapted if is_of_adapter else saved, tmp_path / "run"))
    shutil.rmtree(run / "checkpoint-3")
    edit(run / f"checkpoint-{number}" / (ADAPTER if is_of_adapter else CONFIG), **settings)
    first, second = (check(run / f"checkpoint-{each}").all_findings for each in (1, 2))
    assert not any(one.differs for one in first)
    (finding,) = [one for one in second if one.differs]
    assert finding.severity.value == "note"
    assert ", as in checkpoint-1, whose tensors have the same shapes)" in str(finding)
    assert finding.advice.startswith("if the script did not change it after checkpoint-1, copy ")


def test_a_setting_that_a_script_changed_is_a_note_for_its_first_save(
    adapted: Path, tmp_path: Path, said: Said
) -> None:
    run = Path(shutil.copytree(adapted, tmp_path / "run"))
    edit(run / "checkpoint-3" / ADAPTER, lora_alpha=32)
    status, words, _ = said("check", "-r", str(run))
    assert status == 0
    assert "3 checkpoints: 1 with differences, 2 clean" in words
    assert words.endswith(
        f"resume from {run}/checkpoint-3, the newest complete one, which differs from its "
        f"neighbours (see above); the newest one without problems: {run}/checkpoint-2\n"
    )
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-4")
    assert [told(root) for root in sorted(run.iterdir())] == [[]] * 4
    # The third one has the setting of the first one again.
    edit(run / "checkpoint-1" / ADAPTER, lora_alpha=32)
    edit(run / "checkpoint-4" / ADAPTER, lora_alpha=8)
    assert told(run / "checkpoint-3") == []


def test_runs_of_a_sweep_have_other_settings(adapted: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"sweep/run_{number}" for number in range(1, 4)]
    for number, root in enumerate(folders):
        shutil.copytree(adapted / "checkpoint-3", root)
        edit(root / ADAPTER, lora_alpha=8 if number == 1 else 16)
    siblings = Siblings([tmp_path], is_recursive=True)
    assert [check(root, siblings=siblings).status for root in folders] == [0] * 3


@pytest.mark.parametrize("number", [5, 10, 15])
@pytest.mark.parametrize("folders", [("unet",), ("unet", "unet_ema")])
def test_a_config_of_a_hook(folders: tuple[str, ...], number: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for count in (5, 10, 15):
        Run(*folders).accelerator.save_state(str(run / f"checkpoint-{count}"))
    root = run / f"checkpoint-{number}"
    Run(*folders).accelerator.load_state(str(root))
    edit(root / folders[-1] / CONFIG, block_out_channels=[8])
    with pytest.raises(ValueError, match="expected shape"):
        Run(*folders).accelerator.load_state(str(root))
    ((severity, sentence),) = told(root)
    assert severity == "warning"
    assert sentence.startswith(
        f"{folders[-1]}/config.json: block_out_channels is [8] (expected [4], as in 2 "
    )
    if number == 15:
        with pytest.warns(UserWarning, match="passed over checkpoint-15"):
            assert latest_checkpoint(run, pattern="checkpoint-{}") == run / "checkpoint-10"

"""Optimizers inside one file with weights: torch decides, and every healthy bundle stays silent."""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.torch_pickle import optimizers
from ckptfix.storage import stores
from tests.diagnosis.test_optimizer_states import step
from tests.diagnosis.test_optimizer_steps import MAKERS, fails, net
from tests.stores.servers import QUICK, upload_folder

Pack = Callable[[Any, Any], Any]

PACKS: dict[str, Pack] = {
    "a loop": lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3},
    "a tutorial": lambda model, optimizer: {
        "epoch": 1, "model_state_dict": model, "optimizer_state_dict": optimizer,
        "loss": torch.tensor(0.3),
    },
    "Lightning": lambda model, optimizer: {
        "state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": [], "global_step": 4,
        "loops": {"fit_loop": {"epoch_loop.optim_progress": {"optimizer": {"step": {"total": 3}}}}},
    },
    "one deeper": lambda model, optimizer: {
        "nets": {"model": model}, "states": {"optimizers": {"main": optimizer}},
        "rng": torch.get_rng_state(),
    },
    "seven deeper": lambda model, optimizer: {
        "model": model, "a": {"b": {"c": {"d": {"e": {"f": {"optimizer": optimizer}}}}}},
    },
    "a tuple": lambda model, optimizer: (3, model, optimizer),
    "an average": lambda model, optimizer: {
        "model": model, "ema": {f"module.{key}": value for key, value in model.items()},
        "optimizer": optimizer,
    },
    "half precision": lambda model, optimizer: {
        "model": {key: value.half() for key, value in model.items()}, "optimizer": optimizer,
    },
    "no model": lambda model, optimizer: {"optimizer": optimizer, "history": torch.ones(4, 4)},
}  # fmt: skip


def trained(model: Any, optimizer: Any) -> Any:
    step(model, optimizer)
    return optimizer.state_dict()


def found(path: Path, bundle: Any, **options: Any) -> list[str]:
    """Return what changes the status of a file with this content, of which file and folder must say
    the same.
    """
    torch.save(bundle, path, **options)
    findings = [
        f"{one.code}: {one}"
        for one in check(path).all_findings
        if one.severity is not Severity.NOTE
    ]
    assert findings == [
        f"{one.code}: {one}"
        for one in check(path.parent).all_findings
        if one.severity is not Severity.NOTE
    ]
    return findings


def unchecked(path: Path) -> list[str]:
    return [words for words in check(path).not_checked if " inside " in words]


@pytest.mark.parametrize("words", PACKS)
def test_every_optimizer_of_torch_is_healthy_in_every_bundle(tmp_path: Path, words: str) -> None:
    for make in MAKERS.values():
        for is_trained in (True, False):
            model = net()
            optimizer = make(model)
            state = trained(model, optimizer) if is_trained else optimizer.state_dict()
            assert found(tmp_path / "last.ckpt", PACKS[words](model.state_dict(), state)) == []


def spoiled(change: Callable[[dict[str, Any]], object]) -> tuple[Any, dict[str, Any]]:
    """Return the weights of a model, and the state of its optimizer after a change."""
    model = net()
    state = copy.deepcopy(trained(model, torch.optim.AdamW(model.parameters())))
    change(state)
    return model.state_dict(), state


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no betas": (
        lambda state: state["param_groups"][0].pop("betas"),
        "inconsistent-groups: last.pt: optimizer: param group 0 has no usable 'betas'",
    ),
    "no group": (
        lambda state: state["param_groups"].clear(),
        (
            "unknown-state: last.pt: optimizer: it holds an optimizer with moments but no param "
            "groups (expected an optimizer's state)"
        ),
    ),
    "a list of states": (
        lambda state: state.update(state=[1]),
        (
            "unknown-state: last.pt: optimizer: it holds an optimizer whose 'state' is a list "
            "(expected an optimizer's state)"
        ),
    ),
}


@pytest.mark.parametrize("words", SPOILED)
def test_what_is_said_names_the_file_and_the_key(tmp_path: Path, words: str) -> None:
    change, sentence = SPOILED[words]
    weights, state = spoiled(change)
    assert fails(lambda model: torch.optim.AdamW(model.parameters()), state)
    assert found(tmp_path / "last.pt", {"model": weights, "optimizer": state}) == [sentence]
    elsewhere = sentence.replace("last.pt: optimizer:", "last.pt: optimizer_states.0:")
    bundle = {"state_dict": weights, "optimizer_states": [state]}
    assert found(tmp_path / "last.pt", bundle) == [elsewhere]
    assert found(tmp_path / "last.pt", bundle, _use_new_zipfile_serialization=False) == [elsewhere]


def test_a_file_in_a_store_is_judged_as_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    weights, state = spoiled(SPOILED["no betas"][0])
    torch.save({"model": weights, "optimizer": state}, tmp_path / "last.pt")
    url = f"memory://{os.urandom(6).hex()}"
    upload_folder(tmp_path, url)
    for path in (url, f"{url}/last.pt"):
        (finding,) = check(path).findings
        assert (finding.code, str(finding.path), finding.as_json()["key"]) == (
            "inconsistent-groups", "last.pt", "optimizer",
        )  # fmt: skip


def layers(*widths: int) -> Any:
    return torch.nn.Sequential(*map(torch.nn.Linear, widths, widths[1:]))


def test_no_optimizer_is_compared_with_the_weights(tmp_path: Path) -> None:
    other = layers(4, 6, 6, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    bundle = {"model": layers(4, 5, 5, 3).state_dict(), "optimizer": trained(other, optimizer)}
    assert found(tmp_path / "last.pt", bundle) == []
    assert unchecked(tmp_path / "last.pt") == [
        "optimizers inside 'last.pt' against the weights, the scheduler and other saves"
    ]


def test_optimizers_beyond_the_limit_are_listed(tmp_path: Path) -> None:
    model = layers(2, 2)
    state = trained(model, torch.optim.AdamW(model.parameters()))
    bundle = {"model": model.state_dict(), "optimizers": [copy.deepcopy(state) for _ in range(66)]}
    torch.save(bundle, tmp_path / "last.pt")
    assert unchecked(tmp_path) == [
        "optimizers inside 'last.pt' against the weights, the scheduler and other saves",
        "optimizers inside 'last.pt': some differ from torch's state_dict(), or there are more "
        "than 64 of them",
    ]


def test_the_summary_names_each_optimizer_by_its_key(tmp_path: Path) -> None:
    model = layers(2, 2)
    bundle = {
        "model": model.state_dict(),
        "optimizer": trained(model, torch.optim.AdamW(model.parameters())),
    }
    torch.save(bundle, tmp_path / "last.pt")
    understood = check(tmp_path).as_json()["understood"]
    assert [(one["path"], one["key"], one["parameters"]) for one in understood["optimizers"]] == [
        ("last.pt", "optimizer", 2)
    ]


def test_a_pickle_that_refers_to_one_dict_again_and_again_takes_little_time() -> None:
    # 40 tuples of which each holds the next one twice, and 20000 dicts in each other.
    shared = b"\x80\x02" + b"}" + b"2\x86" * 40 + b"."
    deep = b"\x80\x02" + b"}" + b"X\x01\0\0\0a}" * 20_000 + b"s" * 20_000 + b"."
    start = time.perf_counter()
    for data in (shared, deep):
        assert list(optimizers(parse(data).root)) == []
    assert time.perf_counter() - start < 5

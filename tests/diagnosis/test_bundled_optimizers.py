"""Optimizers inside one file with weights: torch decides, and every healthy bundle stays silent."""

import copy
import os
import time
from collections.abc import Callable, Iterator
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
from tests.diagnosis.test_optimizer_steps import MAKERS, damaged, fails, net
from tests.sampling import sampled
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


@pytest.mark.parametrize("name", MAKERS)
def test_torch_fails_where_an_error_is_reported_and_nowhere_else(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = MAKERS[name](model)
    # RAdam reads ``eps`` from its sixth step.
    step(model, optimizer, 6)
    healthy = trained(model, optimizer)
    # In a tuple no state dict is looked for, so that nothing is compared with it.
    packs = [pack for words, pack in PACKS.items() if words not in ("no model", "a tuple")]
    for number, (words, state) in enumerate(sampled(damaged(healthy))):
        findings = found(
            tmp_path / "last.pt", packs[number % len(packs)](model.state_dict(), state)
        )
        if fails(MAKERS[name], state):
            # torch's Adafactor keeps other states for a vector than for a matrix: they are not
            # judged. SGD rightly has a sparse momentum from the gradients of an
            # Embedding(sparse=True).
            is_unknown = (
                name == "adafactor" and "_var" in words
            ) or words == "momentum_buffer: sparse"
            assert findings or is_unknown, words
        else:
            assert findings == [], words


def spoiled(change: Callable[[dict[str, Any]], object]) -> tuple[Any, dict[str, Any]]:
    """Return the weights of a model, and the state of its optimizer after a change."""
    model = net()
    state = copy.deepcopy(trained(model, torch.optim.AdamW(model.parameters())))
    change(state)
    return model.state_dict(), state


def of_moments(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(9, 6)


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "moments of two shapes": (
        of_moments,
        (
            "mismatched-moments: last.pt: optimizer: 'exp_avg_sq' of parameter 0 has shape [5, "
            "6] (expected [9, 6], like its 'exp_avg')"
        ),
    ),
    "moments of a parameter in no group": (
        lambda state: state["param_groups"][0]["params"].pop(),
        (
            "inconsistent-groups: last.pt: optimizer: parameter 5 has moments but is in no param "
            "group"
        ),
    ),
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
    weights, state = spoiled(of_moments)
    torch.save({"model": weights, "optimizer": state}, tmp_path / "last.pt")
    url = f"memory://{os.urandom(6).hex()}"
    upload_folder(tmp_path, url)
    for path in (url, f"{url}/last.pt"):
        (finding,) = check(path).findings
        assert (finding.code, str(finding.path), finding.as_json()["key"]) == (
            "mismatched-moments", "last.pt", "optimizer",
        )  # fmt: skip


def layers(*widths: int) -> Any:
    return torch.nn.Sequential(*map(torch.nn.Linear, widths, widths[1:]))


@pytest.mark.parametrize("pack", ["a loop", "Lightning", "one deeper"])
@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_of_another_model_is_told(tmp_path: Path, pack: str, is_named: bool) -> None:
    model = layers(4, 5, 5, 3)
    optimizers_of_others: dict[str, tuple[Any, list[str]]] = {
        "a resized layer": (
            layers(4, 5, 5, 7),
            ["mismatched-moments" if is_named else "unsaved-parameters"],
        ),
        "a layer more": (
            layers(4, 5, 5, 5, 3),
            ["mismatched-moments" if is_named else "unsaved-parameters"],
        ),
        "another width": (layers(4, 6, 6, 3), []),
        "a layer less": (layers(4, 5, 3), ["mismatched-moments"] if is_named else []),
    }
    path = tmp_path / "last.pt"
    for other, expected in optimizers_of_others.values():
        optimizer = torch.optim.AdamW(other.named_parameters() if is_named else other.parameters())
        fresh = PACKS[pack](model.state_dict(), optimizer.state_dict())
        # Before the first step nothing shows the model: frozen weights may have been left out of
        # the file.
        assert found(path, fresh) == []
        assert "no moments" in unchecked(path)[0]
        bundle = PACKS[pack](model.state_dict(), trained(other, optimizer))
        assert [words.partition(":")[0] for words in found(path, bundle)] == expected
        assert bool(unchecked(path)) is not bool(expected)


def test_an_optimizer_of_another_model_next_to_several_models(tmp_path: Path) -> None:
    generator, critic, other = layers(4, 5, 6, 3), layers(3, 7, 1), layers(4, 5, 6, 2)
    states = [
        trained(model, torch.optim.Adam(model.parameters())) for model in (generator, critic, other)
    ]
    models = {"G": generator.state_dict(), "D": critic.state_dict()}
    path = tmp_path / "gan.pt"
    assert found(path, {**models, "opt_G": states[0], "opt_D": states[1]}) == []
    assert unchecked(path) == [
        "which model each optimizer inside 'gan.pt' trains: the file has several models"
    ]
    assert found(path, {**models, "opt_G": states[2], "opt_D": states[1]}) == [
        "unsaved-parameters: gan.pt: opt_G: does not match the weights (expected parameters for "
        "10 weight tensors of shapes [1], [1, 7], [3] and 7 more; found 6 parameters of shapes "
        "[2], [2, 6], [5] and 3 more)"
    ]
    # Exchanged optimizers fit the models of the file.
    assert found(path, {**models, "opt_G": states[1], "opt_D": states[0]}) == []


def test_a_module_without_weights_in_the_file_is_told(tmp_path: Path) -> None:
    model, loss = layers(4, 5, 3), torch.nn.Bilinear(7, 9, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    step(loss, optimizer)
    state = trained(model, optimizer)
    path = tmp_path / "last.pt"
    assert found(path, {"model": model.state_dict(), "optimizer": state}) == [
        "unsaved-parameters: last.pt: optimizer: moments of shapes [2], [2, 7, 9], which no "
        "weights have (6 parameters in the optimizer, 4 weight tensors)"
    ]
    trained_alone = {
        "shadow": {f"module.{name}": value.detach() for name, value in model.named_parameters()}
    }
    assert (
        len(found(path, {"model": model.state_dict(), "optimizer": state, "ema": trained_alone}))
        == 1
    )
    assert "also save the state_dict() of that module" in check(path).findings[0].advice
    for bundle in ({"loss": loss.state_dict()}, {"tensors": [loss.weight, loss.bias]}):
        assert found(path, {"model": model.state_dict(), "optimizer": state, **bundle}) == []


def with_frozen(make: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield a bundle of which the weights are the trained ones alone."""
    model = net()
    model[0].requires_grad_(False)
    kept = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = trained(model, make(model.parameters()))
    yield {
        "model": {key: value for key, value in model.state_dict().items() if key in kept},
        "optimizer": state,
    }


def healthy() -> Iterator[Any]:
    for make in (torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        yield from with_frozen(make)
    model = net()
    state = trained(model, torch.optim.AdamW(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [{**group, "params": names} for group in state["param_groups"]],
    }
    for prefix in ("", "module.", "_orig_mod.", "model."):
        yield {
            "model": {prefix + key: value for key, value in model.state_dict().items()},
            "optimizer": named,
        }
    # An optimizer of names that were recorded before the model was wrapped.
    labelled = trained(model, torch.optim.AdamW(model.named_parameters()))
    yield {"model": torch.nn.DataParallel(model).state_dict(), "optimizer": labelled}
    # SAC's temperature as a plain number, with an optimizer of its own.
    temperature = torch.zeros(1, requires_grad=True)
    temperature.grad = torch.ones(1)
    alone = torch.optim.Adam([temperature])
    alone.step()
    yield {
        "actor": model.state_dict(),
        "optimizer": state,
        "log_alpha": 0.0,
        "alpha_optimizer": alone.state_dict(),
    }
    # One flat parameter, as fairseq's fp16 has, and shards of flat parameters, as FSDP has.
    for sizes in (
        [sum(one.numel() for one in model.parameters())],
        [one.numel() // 2 for one in model.parameters()],
    ):
        flat = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        yield {
            "model": model.state_dict(),
            "last_optimizer_state": trained(flat, torch.optim.Adam(flat)),
        }
    # CycleGAN: one optimizer of two generators of the same keys and shapes.
    generators = [layers(4, 5, 3), layers(4, 5, 3)]
    both = torch.optim.Adam([one for model in generators for one in model.parameters()])
    step(generators[1], both)
    yield {
        "A2B": generators[0].state_dict(),
        "B2A": generators[1].state_dict(),
        "optimizer_G": trained(generators[0], both),
    }
    tied = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    tied[1].weight = tied[0].weight
    yield {
        "model": tied.state_dict(),
        "optimizer": trained(tied, torch.optim.AdamW(tied.parameters())),
    }
    two = torch.optim.SGD([*model.parameters(), *tied.parameters()], lr=0.1, momentum=0.9)
    step(tied, two)
    yield {"models": [model.state_dict(), tied.state_dict()], "optimizer": trained(model, two)}
    normed = torch.nn.BatchNorm1d(3)
    biases = trained(normed, torch.optim.AdamW(normed.parameters()))
    yield {
        "model": torch.nn.Sequential(normed, torch.nn.Linear(3, 3)).state_dict(),
        "optimizer": biases,
    }


@pytest.mark.parametrize("number", range(len(list(healthy()))))
def test_healthy_bundles(tmp_path: Path, number: int) -> None:
    assert found(tmp_path / "last.pt", list(healthy())[number]) == []


def test_flat_moments_and_files_without_a_model_are_not_compared(tmp_path: Path) -> None:
    flat = torch.nn.ParameterList([torch.zeros(53)])
    state = trained(flat, torch.optim.Adam(flat))
    torch.save({"model": net().state_dict(), "optimizer": state}, tmp_path / "last.pt")
    torch.save({"optimizer": state, "epoch": 3}, tmp_path / "alone.pt")
    torch.save(net().state_dict(), tmp_path / "weights.pt")
    assert unchecked(tmp_path) == [
        "optimizers inside 'alone.pt: optimizer' against weights: the file has no weight matrices",
        (
            "optimizers inside 'last.pt: optimizer' against weights: their moments are vectors, "
            "like flattened moments"
        ),
    ]


def test_optimizers_beyond_the_limit_are_listed(tmp_path: Path) -> None:
    model = layers(2, 2)
    state = trained(model, torch.optim.AdamW(model.parameters()))
    bundle = {"model": model.state_dict(), "optimizers": [copy.deepcopy(state) for _ in range(66)]}
    torch.save(bundle, tmp_path / "last.pt")
    assert unchecked(tmp_path) == [
        "optimizers inside 'last.pt': some differ from torch's state_dict(), or there are more "
        "than 64 of them"
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

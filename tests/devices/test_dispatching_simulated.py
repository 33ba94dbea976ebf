"""Models split over simulated devices whose links are broken: wrong without safe transfers, exact
with them.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from ckptfix.devices import probe, transfers
from ckptfix.devices.dispatching import (
    dispatch_model,
    load_checkpoint_and_dispatch,
    remove_safe_transfers,
)
from ckptfix.devices.probe.probe_report import Verdict
from ckptfix.devices.transfers import acquire, release, staged_pairs
from ckptfix.errors import UsageError
from tests.simulated.models import (
    THREE,
    Transformer,
    balanced_map,
    generated,
    gpt2,
    gradients_of,
    logits_of,
    qwen2,
    t5,
    transformer,
)
from tests.simulated.simulator import Simulator

pytestmark = [pytest.mark.simulated(3), pytest.mark.usefixtures("each_accelerate")]

ALL = frozenset(permutations(range(3), 2))


@pytest.fixture(autouse=True)
def nothing_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, simulator: Simulator
) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_measured_here", {})
    monkeypatch.delenv(transfers.VARIABLE, raising=False)
    transfers._told.clear()
    yield
    gc.collect()
    assert staged_pairs() == frozenset()


def break_links(simulator: Simulator, *pairs: tuple[int, int]) -> None:
    for pair in pairs or ALL:
        simulator.fault(*pair, "zeros")


def on_one_device(make: Callable[[], Any] = transformer) -> Any:
    """The baseline: one device and the same hooks, so that the same kernels run."""
    return accelerate.dispatch_model(make(), {"": 0}, force_hooks=True)


def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(budget: float = 0.0) -> frozenset[tuple[int, int]]:
        raise AssertionError("it measured")

    monkeypatch.setattr(probe, "unproven_pairs", fail)


def found_broken(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[int, int]) -> None:
    monkeypatch.setattr(probe, "unproven_pairs", lambda budget: frozenset(pairs))


def max_abs_diff(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.cpu() - right.cpu()).abs().max())


# ---- as reported


def test_the_scenario_of_the_report(simulator: Simulator) -> None:
    baseline = logits_of(on_one_device()).detach()
    break_links(simulator, (0, 1))
    model = accelerate.dispatch_model(transformer(), dict(THREE))
    assert max_abs_diff(logits_of(model).detach(), baseline) > 0.1, "wrong, and no error"
    model = dispatch_model(model, THREE, safe_transfers="always")
    assert max_abs_diff(logits_of(model).detach(), baseline) == 0.0
    remove_safe_transfers(model)
    assert max_abs_diff(logits_of(model).detach(), baseline) > 0.1


@pytest.mark.filterwarnings("ignore:.* not proven")
@pytest.mark.parametrize("broken", [(), ((0, 1),)], ids=["healthy", "broken"])
def test_auto_measures_for_itself(
    simulator: Simulator, broken: tuple[tuple[int, int], ...]
) -> None:
    """The probe as it ships. On a slow machine its budget proves less, and then more is staged."""
    baseline = logits_of(on_one_device()).detach()
    for pair in broken:
        break_links(simulator, pair)
    model = dispatch_model(transformer(), THREE)
    report = probe.cached_report()
    assert report is not None, "it is remembered"
    assert staged_pairs() == report.unproven >= set(broken)
    assert report.with_verdict(Verdict.WRONG) <= set(broken)
    simulator.clear_log()
    assert max_abs_diff(logits_of(model).detach(), baseline) == 0.0
    assert not simulator.log().keys() & staged_pairs()


def test_auto_on_healthy_links_installs_nothing(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_broken(monkeypatch)
    model = dispatch_model(transformer(), THREE)
    assert staged_pairs() == frozenset()
    assert "RegisterCompositeExplicitAutograd" in repr(
        torch.library.get_kernel("aten::copy_", "CUDA")
    )
    logits_of(model)
    assert simulator.count(0, 1) > 0


@pytest.mark.parametrize("make", [transformer, qwen2, gpt2, t5])
def test_exact_with_all_six_links_broken(simulator: Simulator, make: Callable[[], Any]) -> None:
    device_map = THREE if make is transformer else balanced_map(make())
    logits, gradients = gradients_of(on_one_device(make))
    # T5's gradients are sums whose order depends on which device's thread comes first: up to 8e-6
    # apart, broken or not.
    tolerance = 2e-5 if make is t5 else 0.0
    break_links(simulator)
    counted = acquire("never", holder="a test")
    model = dispatch_model(make(), device_map, safe_transfers="always")
    assert {tensor.device.index for tensor in model.parameters()} == {0, 1, 2}
    split_logits, split_gradients = gradients_of(model)
    assert max_abs_diff(split_logits, logits) == 0.0
    assert split_gradients.keys() == gradients.keys()
    assert all(
        max_abs_diff(split_gradients[name], gradients[name]) <= tolerance for name in gradients
    )
    assert simulator.count() == 0
    assert sum(count.staged for count in counted.counters().values()) > 0


@pytest.mark.parametrize("make", [qwen2, gpt2, t5])
def test_generate_is_exact_with_all_six_links_broken(
    simulator: Simulator, make: Callable[[], Any]
) -> None:
    baseline = on_one_device(make)
    right = generated(baseline), generated(baseline, num_beams=3)
    break_links(simulator)
    model = dispatch_model(make(), balanced_map(make()), safe_transfers="always")
    assert torch.equal(generated(model), right[0])
    assert torch.equal(generated(model, num_beams=3), right[1])
    assert simulator.count() == 0


def test_a_link_broken_on_the_way_back(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gradients = gradients_of(on_one_device())
    break_links(simulator, (1, 0))
    found_broken(monkeypatch, (1, 0))
    with pytest.warns(UserWarning, match="1 -> 0"):
        model = dispatch_model(transformer(), THREE)
    found = gradients_of(model)[1]
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert simulator.count(1, 0) == 0
    assert simulator.count(0, 1) > 0


# ---- who holds, and for how long


def test_a_model_holds_until_it_is_removed(simulator: Simulator) -> None:
    model = dispatch_model(transformer(), THREE, safe_transfers="always")
    assert staged_pairs() == ALL
    remove_safe_transfers(model)
    assert staged_pairs() == frozenset()
    remove_safe_transfers(model)
    remove_safe_transfers(nn.Linear(2, 2))
    logits_of(model)
    assert simulator.count() > 0, "accelerate's hooks stay"


def test_a_model_holds_until_it_is_collected() -> None:
    model = dispatch_model(transformer(), THREE, safe_transfers="always")
    logits_of(model).sum().backward()
    assert staged_pairs() == ALL
    del model
    gc.collect()
    assert staged_pairs() == frozenset()


def test_a_model_inside_of_another_is_found() -> None:
    outer = nn.ModuleDict({"inner": dispatch_model(transformer(), THREE, safe_transfers="always")})
    remove_safe_transfers(outer)
    assert staged_pairs() == frozenset()


def test_each_model_holds_for_itself() -> None:
    models = [dispatch_model(transformer(), THREE, safe_transfers="always") for _ in range(2)]
    remove_safe_transfers(models[0])
    assert staged_pairs() == ALL
    with pytest.warns(
        UserWarning, match=r"stay on .* while they are in use \(a dispatched Transformer\)"
    ):
        dispatch_model(transformer(), THREE, safe_transfers="never")
    remove_safe_transfers(models[1])
    assert staged_pairs() == frozenset()


def test_dispatched_again_it_holds_what_the_last_call_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer()
    found_broken(monkeypatch, (0, 2))
    dispatch_model(model, THREE, safe_transfers="always")
    with pytest.warns(UserWarning, match="0 -> 2"):
        dispatch_model(model, THREE)
    assert staged_pairs() == {(0, 2)}
    dispatch_model(model, THREE, safe_transfers="never")
    assert staged_pairs() == frozenset()


def test_a_dispatch_that_fails_changes_nothing() -> None:
    model = dispatch_model(transformer(), THREE, safe_transfers="always")
    other = transformer()
    for mode in ("never", "always"):
        for refused in (model, other):
            with pytest.raises(ValueError, match="layers"):
                dispatch_model(refused, {"embed": 0}, safe_transfers=mode)
    remove_safe_transfers(model)
    assert staged_pairs() == frozenset()


def test_a_word_that_means_nothing() -> None:
    with pytest.raises(UsageError, match="'sometimes'"):
        dispatch_model(transformer(), THREE, safe_transfers="sometimes")


ONE = (
    {"": 0},
    {"": "cpu"},
    {"embed": 1, "layers": 1, "norm": "cpu", "head": 1},
    {"embed": "cuda:1", "layers": torch.device("cuda", 1), "norm": 1, "head": "cpu"},
)


@pytest.mark.parametrize("device_map", ONE, ids=str)
def test_one_accelerator_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, device_map: dict[str, Any]
) -> None:
    no_probe(monkeypatch)
    dispatch_model(transformer(), device_map)
    assert staged_pairs() == frozenset()


def test_a_model_that_is_on_another_device_is_on_two(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformer().to("cuda:1")
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    break_links(simulator)
    found_broken(monkeypatch, *ALL)
    with pytest.warns(UserWarning, match="6 of 6"):
        dispatch_model(model, {"": 2})
    assert all(
        torch.equal(tensor.cpu(), weights[name]) for name, tensor in model.state_dict().items()
    )
    assert staged_pairs() == ALL


@pytest.mark.parametrize("by_place", [False, True])
def test_a_main_device_is_one_more(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, by_place: bool
) -> None:
    baseline = logits_of(on_one_device()).detach()
    break_links(simulator)
    found_broken(monkeypatch, *ALL)
    device_map = {"embed": "cpu", "layers": 0, "norm": 0, "head": 0}
    arguments: tuple[Any, ...] = (1,) if by_place else ()
    named: dict[str, Any] = {} if by_place else {"main_device": 1}
    with pytest.warns(UserWarning, match="6 of 6"):
        model = dispatch_model(transformer(), device_map, *arguments, **named)
    assert staged_pairs() == ALL
    with torch.no_grad():
        assert max_abs_diff(logits_of(model), baseline) == 0.0


def test_so_is_the_device_of_a_given_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    found_broken(monkeypatch, (1, 0))
    state = {
        name: tensor.to("cuda:1")
        for name, tensor in transformer().norm.state_dict(prefix="norm.").items()
    }
    device_map = {"embed": 0, "layers": 0, "norm": "cpu", "head": 0}
    with pytest.warns(UserWarning, match="1 -> 0"):
        dispatch_model(transformer(), device_map, None, state)


def test_arguments_of_accelerate_by_place(tmp_path: Path, saved: Path) -> None:
    folder = tmp_path / "offload"
    model = dispatch_model(
        transformer(), {**THREE, "norm": "disk"}, 0, None, folder, safe_transfers="never"
    )
    assert any(folder.iterdir())
    load_checkpoint_and_dispatch(empty(), saved, "auto", None, ("Block",), safe_transfers="never")
    with pytest.raises(TypeError, match="no_such_argument"):
        dispatch_model(model, {"": 0}, no_such_argument=1)


@pytest.mark.parametrize("dispatch", [dispatch_model, load_checkpoint_and_dispatch])
def test_the_environment_means_what_the_argument_means(
    monkeypatch: pytest.MonkeyPatch, saved: Path, dispatch: Any
) -> None:
    monkeypatch.setenv(transfers.VARIABLE, "always")
    given = () if dispatch is dispatch_model else (saved,)
    model = dispatch(transformer(), *given, {"": 1})
    assert staged_pairs() == ALL, "for a model on one device, too"
    remove_safe_transfers(model)


# ---- loading


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.save(transformer().state_dict(), folder / "pytorch_model.bin")
    return folder


def empty() -> Transformer:
    with accelerate.init_empty_weights():
        model = Transformer()
    model.eval()
    return model


@pytest.mark.parametrize("names", [list, set, tuple])
def test_load_checkpoint_and_dispatch(
    simulator: Simulator, saved: Path, names: Callable[[Any], Any]
) -> None:
    baseline = logits_of(on_one_device()).detach()
    break_links(simulator)
    model = load_checkpoint_and_dispatch(
        empty(),
        str(saved),
        "auto",
        safe_transfers="always",
        no_split_module_classes=names(["Block"]),
    )
    assert set(model.hf_device_map.values()) == {0, 1, 2}
    assert not any(name.count(".") > 1 for name in model.hf_device_map), "blocks stay whole"
    assert max_abs_diff(logits_of(model).detach(), baseline) == 0.0
    assert simulator.count() == 0
    remove_safe_transfers(model)
    assert staged_pairs() == frozenset()


def test_load_checkpoint_and_dispatch_measures_where_it_may_be_split(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_probe(monkeypatch)
    load_checkpoint_and_dispatch(empty(), saved, {"": 1})
    load_checkpoint_and_dispatch(transformer(), saved)
    found_broken(monkeypatch, (0, 1))
    with pytest.warns(UserWarning, match="0 -> 1"):
        model = load_checkpoint_and_dispatch(
            empty(), saved, device_map="balanced", no_split_module_classes=["Block"]
        )
    assert staged_pairs() == {(0, 1)}
    model = load_checkpoint_and_dispatch(model, saved, THREE)
    assert staged_pairs() == {(0, 1)}


def test_offloaded_weights(simulator: Simulator, tmp_path: Path) -> None:
    device_map = {**THREE, "norm": "cpu", "head": "disk"}
    baseline = logits_of(on_one_device()).detach()
    break_links(simulator)
    model = dispatch_model(
        transformer(),
        device_map,
        safe_transfers="always",
        offload_dir=str(tmp_path / "offload"),
        main_device=0,
    )
    with torch.no_grad():
        assert max_abs_diff(logits_of(model), baseline) == 0.0
    assert simulator.count() == 0


# ---- skip_keys


def test_keys_to_skip_may_be_a_set(simulator: Simulator) -> None:
    seen: list[torch.device] = []

    class Takes(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, given: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
            seen.append(left.device)
            out: torch.Tensor = self.inner(given)
            return out

    model = nn.ModuleDict({"a": Takes(), "b": Takes()})
    dispatch_model(model, {"a": 0, "b": 1}, safe_transfers="always", skip_keys={"left"})
    model["b"](torch.ones(2), left=torch.ones(2, device="cuda:2"))
    assert seen == [torch.device("cuda:2")]


# ---- tied weights


class Tied(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 64)
        self.middle = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for linear in self.middle:
            hidden = linear(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def addresses(model: nn.Module) -> set[int]:
    tables = (getattr(module._hf_hook, "tied_params_map", None) or {} for module in model.modules())
    return {address for table in tables for address in table}


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_no_address_of_a_freed_tied_weight_is_kept(place: str, tmp_path: Path) -> None:
    """Where accelerate keeps one, a weight read from disk to that address is replaced by the tied
    weight.
    """
    device_map = {"embed": 0, "middle": place, "head": 0 if place == "disk" else "cpu"}
    offload: dict[str, Any] = {"offload_dir": str(tmp_path / "offload")} if place == "disk" else {}
    stock = accelerate.dispatch_model(Tied(), device_map, **offload)
    assert addresses(stock)
    model = dispatch_model(Tied(), device_map, **offload)
    live = {
        tensor.data_ptr()
        for module in model.modules()
        for weights in [getattr(module._hf_hook, "weights_map", None)]
        if weights is not None
        for tensor in weights.dataset.state_dict.values()
    }
    assert addresses(model) <= live
    assert bool(addresses(model)) == (place == "cpu"), "what lives is still shared"
    ids = torch.arange(64, device="cuda:0")
    right = accelerate.dispatch_model(Tied(), {"": 0}, force_hooks=True)(ids)
    for _ in range(10):
        assert torch.equal(model(ids), right)


def test_a_weight_at_the_address_of_a_tied_one(tmp_path: Path) -> None:
    """Bring the collision about that memory brings about by chance."""
    device_map = {"embed": 0, "middle": "disk", "head": 0}
    wrong = {}
    for name, dispatch in {
        "accelerate": accelerate.dispatch_model,
        "ckptfix": dispatch_model,
    }.items():
        model = Tied()
        # Kept alive, so that its address cannot be anything else's meanwhile.
        tied = model.embed.weight
        dispatch(model, device_map, offload_dir=str(tmp_path / name))
        hook = model.middle[0]._hf_hook
        right = hook.weights_map["weight"]

        class AtThatAddress(dict[str, torch.Tensor]):
            def __getitem__(
                self, key: str, tied: torch.Tensor = tied, right: torch.Tensor = right
            ) -> torch.Tensor:
                with torch.no_grad():
                    return tied.detach().copy_(right)

        hook.weights_map = AtThatAddress()
        hook.pre_forward(model.middle[0], torch.ones(64))
        wrong[name] = not torch.equal(model.middle[0].weight.cpu(), right)
    assert wrong == {"accelerate": True, "ckptfix": False}


def test_references_of_others_stay(simulator: Simulator) -> None:
    other = acquire("always", holder="a test")
    model = dispatch_model(transformer(), THREE, safe_transfers="always")
    remove_safe_transfers(model)
    assert staged_pairs() == ALL
    release(other)


def test_a_model_that_holds_data_parallel_is_told_what_is_not_staged(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_broken(monkeypatch, (0, 1))
    model = nn.Sequential(nn.Linear(3, 3), nn.DataParallel(nn.Linear(3, 3), device_ids=[1]))
    with pytest.warns(
        UserWarning, match=r"Sequential contains a torch.nn.DataParallel: .*NCCL.*not stage"
    ):
        dispatch_model(model, {"0": 0, "1": 1}, safe_transfers="always")
    remove_safe_transfers(model)


def test_auto_measures_before_weights_fill_the_devices(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The probe needs room for large copies, and leaves out what does not fit."""
    held: list[int] = []

    def found(budget: float) -> frozenset[tuple[int, int]]:
        gc.collect()
        held.append(sum(torch.cuda.memory_allocated(index) for index in range(3)))
        return frozenset()

    monkeypatch.setattr(probe, "unproven_pairs", found)
    gc.collect()
    before = sum(torch.cuda.memory_allocated(index) for index in range(3))
    torch.save(transformer().state_dict(), tmp_path / "pytorch_model.bin")
    model = load_checkpoint_and_dispatch(transformer(), tmp_path, dict(THREE))
    assert sum(torch.cuda.memory_allocated(index) for index in range(3)) > before
    del model
    gc.collect()
    dispatch_model(transformer(), THREE)
    assert held == [before, before]

"""Every way in which a tensor goes from device to device, on simulated devices: with safe
transfers, none is direct.

Each way is taken over healthy links, which shows that it does copy from device to device; with all
six links broken, which shows that it matters; and with all six broken and staged, which must give
what healthy ones give.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from torch import nn

from ckptfix.devices.transfers import safe_transfers
from tests.simulated.models import (
    THREE,
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

pytestmark = pytest.mark.simulated(3)

Results = Mapping[str, torch.Tensor]
WAYS: dict[str, Callable[[], Results]] = {}


def way(function: Callable[[], Results]) -> Callable[[], Results]:
    WAYS[function.__name__.replace("_", " ").strip()] = function
    return function


def numbers(
    *shape: int, device: str = "cuda:0", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


LARGE = (600, 1000)
"""2.4 MB: through the pinned slots."""


def split(make: Callable[[], Any] = transformer, device_map: Any = None) -> Any:
    return accelerate.dispatch_model(
        make(), device_map or (THREE if make is transformer else balanced_map(make()))
    )


class Moves(nn.Module):  # type: ignore[misc]
    """Moves its tensors itself, there and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, 8).to("cuda:0")
        self.second = nn.Linear(8, 8).to("cuda:1")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        middle = self.second(self.first(hidden).to("cuda:1"))
        out: torch.Tensor = middle.to("cuda:2", non_blocking=True).square().cuda(0)
        return out


# ---- models


@way
def dispatched_forward() -> Results:
    with torch.no_grad():
        return {"logits": logits_of(split())}


@way
def dispatched_forward_and_backward() -> Results:
    logits, gradients = gradients_of(split())
    return {"logits": logits, **gradients}


@way
def to_in_model_code() -> Results:
    with torch.no_grad():
        return {"out": Moves()(numbers(4, 8))}


@way
def backward_of_to_in_model_code() -> Results:
    model = Moves()
    given = numbers(4, 8).requires_grad_()
    model(given).sum().backward()
    return {
        "given": given.grad,
        **{name: tensor.grad for name, tensor in model.named_parameters()},
    }


@way
def double_backward() -> Results:
    given = numbers(5).requires_grad_()
    (slope,) = torch.autograd.grad(given.to("cuda:1").pow(3).sum(), given, create_graph=True)
    slope.to("cuda:2").square().sum().backward()
    return {"second": given.grad}


@way
def dispatching_a_model_that_is_on_a_device_already() -> Results:
    model = accelerate.dispatch_model(transformer().to("cuda:0"), THREE)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@way
def dispatching_it_again_in_another_order() -> Results:
    model = split()
    for module in model.modules():
        remove_hook_from_module(module)
    model = accelerate.dispatch_model(
        model, {name: (device + 1) % 3 for name, device in THREE.items()}
    )
    return {"logits": logits_of(model)}


@way
def module_to() -> Results:
    torch.manual_seed(1)
    return dict(nn.Linear(300, 1000).to("cuda:1").to("cuda:2").state_dict())


@way
def set_module_tensor() -> Results:
    torch.manual_seed(1)
    module = nn.Linear(4, 4).to("cuda:0")
    set_module_tensor_to_device(module, "weight", "cuda:1")
    set_module_tensor_to_device(module, "bias", 2, value=numbers(4, device="cuda:0"))
    return dict(module.state_dict())


@way
def load_state_dict() -> Results:
    torch.manual_seed(1)
    module = nn.Linear(600, 1000).to("cuda:1")
    module.load_state_dict({"weight": numbers(1000, 600), "bias": numbers(1000, device="cuda:2")})
    return dict(module.state_dict())


@way
def load_state_dict_by_assignment_and_to() -> Results:
    module = nn.Linear(600, 1000, device="meta")
    module.load_state_dict({"weight": numbers(1000, 600), "bias": numbers(1000)}, assign=True)
    return dict(module.to("cuda:1").state_dict())


# ---- tensors


@way
def copy_() -> Results:
    there = torch.zeros(LARGE, device="cuda:1")
    there.copy_(numbers(*LARGE))
    small = torch.zeros(3, device="cuda:2")
    small.copy_(numbers(3), non_blocking=True)
    return {"large": there, "small": small}


@way
def converting_copy_() -> Results:
    there = torch.zeros(LARGE, device="cuda:1", dtype=torch.float64)
    there.copy_(numbers(*LARGE))
    return {"there": there, "to": numbers(*LARGE).to("cuda:2", torch.bfloat16)}


@way
def slices() -> Results:
    there = torch.zeros(4, 3, device="cuda:1")
    there[1:3] = numbers(2, 3)
    wide = torch.zeros(LARGE, device="cuda:2")
    wide[:, ::2] = numbers(600, 500)
    wide[torch.tensor([3, 5], device="cuda:2")] = numbers(2, 1000).to("cuda:2")
    return {"there": there, "wide": wide}


@way
def strided_and_transposed() -> Results:
    base = numbers(*LARGE)
    return {
        "t": base.t().to("cuda:1"),
        "strided": base[:, ::3].to("cuda:1"),
        "row": base[7].to("cuda:1"),
    }


@way
def storages() -> Results:
    there = torch.zeros(LARGE, device="cuda:1")
    there.untyped_storage().copy_(numbers(*LARGE).untyped_storage())
    return {"there": there}


@way
def foreach_copy() -> Results:
    there = [torch.zeros(3, device="cuda:1"), torch.zeros(LARGE, device="cuda:2")]
    torch._foreach_copy_(there, [numbers(3), numbers(*LARGE)])
    return {"small": there[0], "large": there[1]}


@way
def another_thread() -> Results:
    found: dict[str, torch.Tensor] = {}
    thread = threading.Thread(target=lambda: found.update(there=numbers(*LARGE).to("cuda:1")))
    thread.start()
    thread.join()
    return found


@way
def vmap_and_forward_gradients() -> Results:
    def away(row: torch.Tensor) -> torch.Tensor:
        return row.to("cuda:1").square().sum().to("cuda:0")

    return {
        "vmap": torch.func.vmap(away)(numbers(4, 5)),
        "jvp": torch.func.jvp(away, (numbers(5),), (numbers(5),))[1],
    }


@way
def inference_mode() -> Results:
    with torch.inference_mode():
        there = numbers(*LARGE).to("cuda:1").square().to("cuda:2")
    return {"there": there}


class Tagged(torch.Tensor):  # type: ignore[misc]
    """A subclass that would notice what is done with it."""

    seen: list[str]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


@way
def subclasses() -> Results:
    Tagged.seen = []
    here = numbers(*LARGE).as_subclass(Tagged)
    Tagged.seen.clear()
    there = here.to("cuda:1")
    assert Tagged.seen == ["to"]
    assert type(there) is Tagged
    return {"there": there.as_subclass(torch.Tensor)}


@way
def sparse_tensors() -> Results:
    host = numbers(6, 6, device="cpu").relu().to_sparse()
    here = torch.sparse_coo_tensor(
        host.indices().to("cuda:0"), host.values().to("cuda:0"), (6, 6), check_invariants=False
    )
    there = here.to("cuda:1")
    return {"indices": there._indices(), "values": there._values()}


@way
def lazy_conjugates() -> Results:
    lazy = numbers(40, 30, dtype=torch.complex64).conj()
    return {
        "there": lazy.to("cuda:1").resolve_conj(),
        "imaginary": lazy.imag.to("cuda:1").resolve_neg(),
    }


@way
def default_device() -> Results:
    with torch.device("cuda:2"):
        return {"there": numbers(*LARGE).to("cuda:1")}


# ---- compiled code, and transformers


@way
def compiled_code() -> Results:
    torch._dynamo.reset()

    def away(given: torch.Tensor) -> torch.Tensor:
        return given.to("cuda:1").square().to("cuda:2")

    found: dict[str, torch.Tensor] = {}
    for backend in ("eager", "aot_eager"):
        given = numbers(*LARGE).requires_grad_()
        out = torch.compile(away, backend=backend)(given)
        out.sum().backward()
        found |= {backend: out, f"{backend} gradient": given.grad}
    return found


@way
def a_compiled_dispatched_model() -> Results:
    torch._dynamo.reset()
    torch.manual_seed(5)
    with torch.no_grad():
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model = accelerate.dispatch_model(layers, {"0": 0, "1": 1, "2": 2})
        return {"out": torch.compile(model, backend="aot_eager")(numbers(4, 8))}


@way
def qwen2_forward_backward_and_generate() -> Results:
    model = split(qwen2)
    logits, gradients = gradients_of(model)
    return {"logits": logits, **gradients, "ids": generated(model)}


@way
def gpt2_with_tied_weights() -> Results:
    model = split(gpt2)
    logits, gradients = gradients_of(model)
    return {"logits": logits, **gradients, "ids": generated(model)}


@way
def t5_whose_generate_hooks_later() -> Results:
    model = split(t5)
    logits, gradients = gradients_of(model)
    return {"logits": logits, **gradients, "ids": generated(model)}


@way
def beam_search_that_moves_the_cache() -> Results:
    found = {make.__name__: generated(split(make), num_beams=3) for make in (qwen2, t5)}
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(3):
        cache.update(
            numbers(2, 4, 3, 5, device=f"cuda:{layer}"),
            numbers(2, 4, 3, 5, device=f"cuda:{layer}"),
            layer,
        )
    cache.reorder_cache(torch.tensor([1, 0], device="cuda:0"))
    return found


# ---- the table


ACCELERATE = [
    name for name in WAYS if "dispatch" in name or "split" in inspect.getsource(WAYS[name])
]
"""Ways of which accelerate is a part."""


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    # torch.compile and forward gradients import parts of torch that warn of themselves.
    warned = "compiled" in name or "forward gradients" in name
    return (pytest.mark.filterwarnings("ignore::DeprecationWarning"),) if warned else ()


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks(name)) for name in names]
    )


_SUMS = {"shared.weight"}
"""Gradients of what several devices use: autograd adds the parts as its threads come, so the last
bit is chance.
"""


def on_the_host(results: Results) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def differing(found: Results, right: Results) -> set[str]:
    assert found.keys() == right.keys()
    return {
        name
        for name in right
        if not (torch.allclose if name in _SUMS else torch.equal)(found[name], right[name])
    }


def break_all(simulator: Simulator) -> None:
    for pair in permutations(range(3), 2):
        simulator.fault(*pair, "zeros")


def check_that_no_direct_copy_is_left(simulator: Simulator, take: Callable[[], Results]) -> None:
    right = on_the_host(take())
    assert simulator.count() > 0, "this way does not go from device to device at all"
    simulator.clear_log()
    break_all(simulator)
    with safe_transfers("always") as transfers:
        found = on_the_host(take())
        counted = transfers.counters()
    assert not differing(found, right)
    assert simulator.count() == 0
    assert sum(count.staged for count in counted.values()) > 0
    assert sum(count.direct for count in counted.values()) == 0


@each(name for name in WAYS if name not in ACCELERATE)
def test_no_direct_copy_is_left(simulator: Simulator, name: str) -> None:
    check_that_no_direct_copy_is_left(simulator, WAYS[name])


@pytest.mark.usefixtures("each_accelerate")
@each(ACCELERATE)
def test_no_direct_copy_is_left_of_accelerate(simulator: Simulator, name: str) -> None:
    check_that_no_direct_copy_is_left(simulator, WAYS[name])


@each(WAYS)
def test_without_it_each_way_goes_wrong(simulator: Simulator, name: str) -> None:
    right = on_the_host(WAYS[name]())
    break_all(simulator)
    try:
        wrong = on_the_host(WAYS[name]())
    except (RuntimeError, IndexError, ValueError):
        return  # zeros for ids and masks can be more than wrong numbers
    assert differing(wrong, right)

"""The guard in two processes on gloo: DistributedDataParallel and both kinds of FSDP."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from tests.training.guard_making import computes_in_bf16
from tests.training.loading_runs import reset
from tests.training.rank_cases import Cases, Failures, run_cases, turn_on_fsdp

pytestmark = pytest.mark.slow

CASES: Cases = {}


def case(work: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[work.__name__] = work
    return work


class Counted(nn.Linear):  # type: ignore[misc]
    """Counts its state_dict calls."""

    calls = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().state_dict(*args, **kwargs)


def model(seed: int = 0) -> Counted:
    torch.manual_seed(seed)
    return Counted(10, 2)


def is_wrapped_once(prepared: Any) -> bool:
    return type(prepared) is DistributedDataParallel and type(prepared.module) is Counted


def gradients_agree(accelerator: Any, prepared: Any) -> bool:
    """Whether a backward pass with other data on each rank leaves the same gradients on both."""
    prepared(torch.full((1, 10), 1.0 + accelerator.process_index)).sum().backward()
    everyone = accelerator.gather(next(iter(prepared.parameters())).grad.flatten()[None])
    return bool((everyone[0] == everyone[-1]).all())


def prepared_again(*calls: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """Return what calls of prepare() return, and the files that their warnings name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [call() for call in calls]
    said = [one for one in caught if "prepare" in str(one.message)]
    return results, [Path(one.filename).name for one in said]


@case
def without_the_guard_the_model_is_registered_twice(_: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    raw = model()
    accelerator.prepare(raw)
    accelerator.prepare(raw)
    assert len(accelerator._models) == 2


@case
def the_wrapper_of_the_first_prepare_comes_back(_: Path) -> None:
    accelerator = Accelerator(cpu=True)
    raw = model()
    first = accelerator.prepare(raw)
    forms = {
        "raw": raw,
        "prepared": first,
        "own DDP": DistributedDataParallel(raw),
        "DDP around the prepared": DistributedDataParallel(first),
        "DataParallel": DataParallel(raw),
        "compiled": torch.compile(first, backend="eager"),
    }
    for name, form in forms.items():
        for verb in ("prepare", "prepare_model"):
            (result,), files = prepared_again(lambda: getattr(accelerator, verb)(form))  # noqa: B023
            assert result is first, (name, verb)
            assert files == [Path(__file__).name], (name, verb)
    del forms
    assert len(accelerator._models) == 1
    assert is_wrapped_once(first)
    assert gradients_agree(accelerator, first)


@case
def a_stale_flag_skips_no_preparation(_: Path) -> None:
    prepared = accelerate.Accelerator(cpu=True).prepare(model())
    reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    second = accelerator.prepare(prepared)
    assert is_wrapped_once(second)
    assert computes_in_bf16(second)
    assert len(accelerator._models) == 1
    assert gradients_agree(accelerator, second)


@case
def after_free_memory_it_is_prepared_anew(_: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    raw = model()
    optimizer = torch.optim.SGD(raw.parameters())
    first = accelerator.prepare(raw, optimizer)
    accelerator.free_memory()
    second, again = accelerator.prepare(*first)
    assert is_wrapped_once(second)
    assert computes_in_bf16(second)
    assert len(accelerator._models) == 1
    assert again.optimizer is optimizer
    assert gradients_agree(accelerator, second)


@case
def evaluation_first_and_training_later(_: Path) -> None:
    accelerator = Accelerator(cpu=True)
    raw = model()
    assert accelerator.prepare_model(raw, evaluation_mode=True) is raw
    trained = accelerator.prepare(raw)
    assert is_wrapped_once(trained)
    assert len(accelerator._models) == 1
    assert gradients_agree(accelerator, trained)


@case
def a_deepcopy_is_a_model_of_its_own(_: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    first = accelerator.prepare(model())
    twin = accelerator.prepare(copy.deepcopy(first.module))
    assert is_wrapped_once(twin)
    assert computes_in_bf16(twin)
    assert len(accelerator._models) == 2


@case
def prepared_before_the_patch(_: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    raw = model()
    first = accelerator.prepare(raw)
    patch_accelerate()
    try:
        results, said = prepared_again(
            lambda: accelerator.prepare(raw), lambda: accelerator.prepare(first)
        )
    finally:
        unpatch_accelerate()
    assert [result is first for result in results] == [True, True]
    assert len(said) == 2
    assert len(accelerator._models) == 1


@case
def state_dict_is_called_once_and_what_one_process_saved_is_loaded(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    raw = model(7)
    optimizer = torch.optim.AdamW(raw.parameters())
    first, prepared = accelerator.prepare(raw, optimizer)
    prepared_again(lambda: accelerator.prepare(raw, optimizer, first, prepared))
    gradients_agree(accelerator, first)
    prepared.step()
    raw.calls = 0
    accelerator.save_state(str(folder / "two"))
    accelerator.wait_for_everyone()
    assert raw.calls == 1
    names = sorted(path.name for path in (folder / "two").iterdir())
    weights = [name for name in names if name.startswith(("model", "optimizer"))]
    assert weights == ["model.safetensors", "optimizer.bin"]
    accelerator.load_state(str(folder / "two"))
    assert raw.calls == 2
    accelerator.load_state(str(folder / "one"))
    assert values_of(raw) == json.loads((folder / "one.json").read_text())


def fully_sharded(version: int) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    turn_on_fsdp(accelerator, fsdp_version=version)
    return accelerator, nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))


@case
def fsdp1(_: Path) -> None:
    accelerator, raw = fully_sharded(1)
    first = accelerator.prepare(raw)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    prepared = accelerator.prepare(optimizer)
    results, said = prepared_again(
        lambda: accelerator.prepare(first, prepared), lambda: accelerator.prepare(raw, optimizer)
    )
    assert [a is first and b is prepared for a, b in results] == [True, True]
    assert len(said) == 2
    first(torch.ones(1, 10)).sum().backward()
    prepared.step()
    assert type(first).__name__ == "FullyShardedDataParallel"
    assert len(accelerator._models) == 1


@case
def fsdp2(_: Path) -> None:
    accelerator, raw = fully_sharded(2)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    first, prepared = accelerator.prepare(raw, optimizer)
    other = torch.optim.AdamW(first.parameters(), lr=0.1)
    ((a, b), (c, d)), said = prepared_again(
        lambda: accelerator.prepare(first, prepared), lambda: accelerator.prepare(first, other)
    )
    assert (a is first, b is prepared, c is first, d.optimizer is other) == (True,) * 4
    assert len(said) == 2
    before = [parameter.full_tensor().clone() for parameter in first.parameters()]
    first(torch.ones(1, 10)).sum().backward()
    d.step()
    for old, new in zip(before, first.parameters(), strict=True):
        assert bool((old != new.full_tensor()).any())
    with pytest.raises(ValueError, match=r"^Only one model is supported when using FSDP2$"):
        accelerator.prepare(first, nn.Linear(1, 1), optimizer)
    assert type(first).__name__ == "FSDPSequential"
    assert (len(accelerator._models), len(accelerator._optimizers)) == (1, 2)


def of_one_process() -> tuple[Any, Any, Any]:
    """Return a stock accelerator, and its model and optimizer."""
    reset()
    torch.manual_seed(3)
    raw = nn.Linear(10, 2)
    accelerator = accelerate.Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(raw, torch.optim.AdamW(raw.parameters()))


def values_of(module: Any) -> list[float]:
    values: list[float] = module.weight.detach().flatten().tolist()
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of one process, for the ranks to load."""
    made = tmp_path_factory.mktemp("ranks")
    accelerator, raw, optimizer = of_one_process()
    raw(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(made / "one"))
    (made / "one.json").write_text(json.dumps(values_of(raw)))
    reset()
    return made


@pytest.fixture(scope="module")
def failures(folder: Path) -> Failures:
    return run_cases(CASES, folder)


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(failures: Failures, name: str) -> None:
    for wrong in failures[name]:
        assert not wrong, wrong


@pytest.mark.usefixtures("failures")
def test_one_process_loads_what_two_saved(folder: Path) -> None:
    accelerator, raw, _ = of_one_process()
    before = values_of(raw)
    accelerator.load_state(str(folder / "two"))
    loaded = values_of(raw)
    assert loaded not in (before, json.loads((folder / "one.json").read_text()))

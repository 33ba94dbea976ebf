"""LoadPolicy(models="partial"): what matches is loaded bit for bit, all else is untouched, and the
report lists it.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, init_empty_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ckptfix.checkpoint.filenames import run_state_name
from ckptfix.training.loading.load_report import (
    LoadError,
    LoadPolicy,
    LoadReport,
    Requirement,
    Status,
)
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
from fixtures.models import Tied
from tests.sampling import examples
from tests.training.loading_runs import Names, Run, make_run, reset, seeded

PARTIAL = LoadPolicy(models=Requirement.PARTIAL)

pytestmark = pytest.mark.usefixtures("guarded")  # whose saves record the names of parameters


class Old(nn.Module):  # type: ignore[misc]
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.last(self.norm(self.first(x))))


class New(nn.Module):  # type: ignore[misc]
    """The old model with a layer in the middle and a head of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.classifier = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.classifier(self.last(self.middle(self.norm(self.first(x)))))


def values(thing: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in thing.state_dict().items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same: bool = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return same


def load(run: Run, folder: Path, policy: LoadPolicy = PARTIAL) -> LoadReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_state_tolerant(run.accelerator, folder, policy=policy)


def save(run: Run, folder: Path, *, safe: bool = True) -> Run:
    """Train a run, save it, and forget accelerate's state."""
    run.train()
    run.accelerator.save_state(str(folder), safe_serialization=safe)
    reset()
    return run


names = st.sampled_from(
    ["a.weight", "a.bias", "b.weight", "b.bias", "c.0.weight", "c.1.weight", "d"]
)
shapes = st.sampled_from([(2,), (3,), (2, 3), (3, 2), ()])
tensors = st.dictionaries(names, shapes, min_size=1)
prefixes = st.sampled_from(["", "module.", "_orig_mod."])
kinds = st.sampled_from(["safetensors", "bin", "sharded"])


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(file=tensors, model=tensors, prefix=prefixes, own=prefixes, kind=kinds)
def test_what_is_loaded_is_exactly_the_intersection(
    tmp_path: Path, file: dict[str, tuple[int, ...]], model: dict[str, tuple[int, ...]],
    prefix: str, own: str, kind: str,
) -> None:  # fmt: skip
    state = {prefix + name: torch.randn(shape) for name, shape in file.items()}
    path = stored(tmp_path, state, kind)
    net = Names({own + name: torch.randn(shape) for name, shape in model.items()})
    before = values(net)
    common = [name for name in model if file.get(name) == model[name]]
    if not common:
        with pytest.raises(LoadError, match="no key matches"):
            load_checkpoint_tolerant(net, path, policy=PARTIAL)
        assert all(equal(value, before[name]) for name, value in values(net).items())
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (report,) = load_checkpoint_tolerant(net, path, policy=PARTIAL)
    for name, value in values(net).items():
        bare = name.removeprefix(own)
        assert equal(value, state[prefix + bare] if bare in common else before[name])
    assert set(report.fresh) == {own + name for name in model.keys() - file.keys()}
    assert set(report.unused) == {prefix + name for name in file.keys() - model.keys()}
    assert {
        (one.key.removeprefix(own), one.file_shape, one.model_shape) for one in report.mismatched
    } == {
        (name, file[name], model[name])
        for name in model.keys() & file.keys()
        if file[name] != model[name]
    }
    assert (report.status is Status.PARTIAL) == (len(common) < len(model))
    assert len(caught) == (not report.is_in_full)


def stored(folder: Path, state: dict[str, torch.Tensor], kind: str) -> Path:
    """Write a state dict, and return the path to load."""
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    parts = {
        f"model-0000{number}-of-00002.safetensors": dict(list(state.items())[number - 1 :: 2])
        for number in (1, 2)
    }
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {
        "metadata": {},
        "weight_map": {key: name for name, part in parts.items() for key in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW, sgd, torch.optim.RMSprop, torch.optim.Adagrad]


def moments(run: Run, number: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of each parameter of a model's optimizer, by its name."""
    inner = run.optimizers[number]
    named = {id(parameter): name for name, parameter in run.models[number].named_parameters()}
    return {
        named[id(parameter)]: {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in inner.state.get(parameter, {}).items()
        }
        for group in inner.param_groups
        for parameter in group["params"]
    }


def step(run: Run) -> None:
    """Step with gradients that depend on the name of a parameter alone."""
    for name, parameter in run.models[0].named_parameters():
        torch.manual_seed(sum(map(ord, name)))
        parameter.grad = torch.randn(parameter.shape) if parameter.requires_grad else None
    run.optimizers[0].step()


def goes_on_as(saved: Run, run: Run, carried: list[str]) -> None:
    """Train both on, and compare weights and moments of the parameters that were carried over."""
    before = moments(saved), moments(run)
    for name, state in before[1].items():
        assert bool(state) or name not in carried
        for key, value in state.items() if name in carried else ():
            assert torch.equal(value, before[0][name][key]), (name, key)
    for _ in range(3):
        step(saved)
        step(run)
    after = moments(saved), moments(run)
    weights = values(saved.models[0]), values(run.models[0])
    for name in carried:
        assert equal(weights[0][name], weights[1][name])
        assert after[0][name].keys() == after[1][name].keys()
        for key, value in after[0][name].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[1][name][key])), (
                name,
                key,
            )


BODY = [f"{layer}.{part}" for layer in ("first", "norm", "last") for part in ("weight", "bias")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_moments_follow_their_parameters_past_an_inserted_layer(
    tmp_path: Path, optimizer: Any
) -> None:
    saved = save(make_run(seeded(Old, 1), optimizer=optimizer), tmp_path / "c")
    run = make_run(seeded(New, 2), optimizer=optimizer)
    run.optimizers[0].param_groups[0]["lr"] = 7.0
    before = values(run.models[0])
    report = load(run, tmp_path / "c")
    model, state = report.of("models")[0], report.of("optimizers")[0]
    assert (model.status, state.status) == (Status.PARTIAL, Status.PARTIAL)
    assert not report.is_complete
    fresh = ("middle.weight", "middle.bias", "classifier.weight", "classifier.bias")
    assert (model.fresh, state.fresh, model.mismatched) == (fresh, fresh, ())
    assert set(model.unused) == {"head.weight", "head.bias"}
    assert len(state.unused) == 2
    assert "moments of 6 of 10 parameters loaded, matched by name" in state.reason
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1
    for name in fresh:
        assert equal(values(run.models[0])[name], before[name])
        if optimizer is not torch.optim.Adagrad:  # which makes its state when it is made
            assert moments(run)[name] == {}
    goes_on_as(saved, run, BODY)


def test_a_head_of_another_size(tmp_path: Path) -> None:
    saved = save(make_run(seeded(Old, 1)), tmp_path / "c")
    run = make_run(seeded(lambda: Old(classes=9), 2))
    report = load(run, tmp_path / "c")
    model = report.of("models")[0]
    assert {str(one) for one in model.mismatched} == {
        "'head.weight' ([5, 4] in the file, [9, 4] in the model)",
        "'head.bias' ([5] in the file, [9] in the model)",
    }
    assert (model.fresh, model.unused) == ((), ())
    assert report.of("optimizers")[0].fresh == ("head.weight", "head.bias")
    goes_on_as(saved, run, BODY)


def grouped(model: nn.Module, lr: float, *, names: bool = False) -> Run:
    """Return a run with the optimizer of the usual scripts: weight decay for matrices alone."""
    named = list(model.named_parameters())
    halves = [
        [one for one in named if (one[1].ndim > 1) == is_matrix] for is_matrix in (True, False)
    ]
    groups = [
        {
            "params": half if names else [one for _, one in half],
            "weight_decay": decay,
            "lr": lr * (decay + 1),
        }
        for half, decay in zip(halves, (0.1, 0.0), strict=True)
    ]
    return run_of(model, torch.optim.AdamW(groups, lr=lr))


def run_of(model: nn.Module, optimizer: Any) -> Run:
    run = Run(Accelerator(cpu=True), [model])
    run.optimizers = [optimizer]
    run.accelerator.prepare(model, optimizer)
    return run


@pytest.mark.parametrize("named", [False, True], ids=["run state", "param_names"])
def test_two_groups(tmp_path: Path, named: bool) -> None:
    saved = save(grouped(seeded(Old, 1), 0.3, names=named), tmp_path / "c")
    run = grouped(seeded(New, 2), 0.9, names=named)
    report = load(run, tmp_path / "c")
    assert "by name" in report.of("optimizers")[0].reason
    options = [(group["lr"], group["weight_decay"]) for group in run.optimizers[0].param_groups]
    assert options == [(pytest.approx(0.33), 0.1), (0.3, 0.0)]
    if named:
        matrices = ["first.weight", "middle.weight", "last.weight", "classifier.weight"]
        assert run.optimizers[0].param_groups[0]["param_names"] == matrices
    goes_on_as(saved, run, BODY)


@pytest.mark.parametrize("is_known", [True, False])
def test_another_number_of_groups(tmp_path: Path, is_known: bool) -> None:
    """Without names the moments start empty: any number could be any parameter's."""
    saved = save(make_run(seeded(Old, 1)), tmp_path / "c")
    if not is_known:
        (tmp_path / "c" / run_state_name(0)).unlink()
    run = grouped(seeded(New, 2), 0.9)
    report = load(run, tmp_path / "c")
    reason = report.of("optimizers")[0].reason
    assert ("no names of parameters" in reason) == (not is_known)
    for name in BODY if is_known else ():
        assert torch.equal(moments(run)[name]["exp_avg"], moments(saved)[name]["exp_avg"])
    assert is_known or not run.optimizers[0].state


def test_frozen_parameters(tmp_path: Path) -> None:
    def frozen(model: nn.Module) -> Run:
        model.first.requires_grad_(False)
        return run_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    saved = save(frozen(seeded(Old, 1)), tmp_path / "c")
    run = frozen(seeded(New, 2))
    load(run, tmp_path / "c")
    assert equal(values(run.models[0])["first.weight"], values(saved.models[0])["first.weight"])
    goes_on_as(saved, run, [name for name in BODY if not name.startswith("first")])


class Row(nn.Module):  # type: ignore[misc]
    """Layers of one shape, by these names."""

    def __init__(self, *layers: str) -> None:
        super().__init__()
        for layer in layers:
            self.add_module(layer, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.children():
            x = layer(x)
        return x


def test_a_parameter_that_was_frozen_before_takes_no_moments_of_another(tmp_path: Path) -> None:
    def of(layers: list[str], model: nn.Module) -> Run:
        chosen = [one for name, one in model.named_parameters() if name.partition(".")[0] in layers]
        return run_of(model, torch.optim.AdamW(chosen, lr=0.1))

    save(of(["three"], seeded(lambda: Row("one", "two", "three"), 1)), tmp_path / "c")
    run = of(["two", "three", "new"], seeded(lambda: Row("one", "two", "three", "new"), 2))
    report = load(run, tmp_path / "c")
    assert {name for name, state in moments(run).items() if state} == {"three.weight", "three.bias"}
    assert "no moments that are certainly theirs: 'two.weight'" in report.of("optimizers")[0].reason


def test_a_model_that_matches_in_full_is_loaded_as_always(tmp_path: Path) -> None:
    wanted = save(make_run(seeded(Old, 1)), tmp_path / "c").digest()
    run = make_run(seeded(Old, 2))
    report = load_state_tolerant(run.accelerator, tmp_path / "c", policy=PARTIAL)
    assert report.is_complete
    assert [one.status for one in report.of("models")] == [Status.RESTORED]
    for part in ("models", "optimizers"):
        assert run.digest()[part] == wanted[part]


def test_two_models_of_which_one_changed(tmp_path: Path) -> None:
    saved = save(make_run(seeded(Old, 1), seeded(Old, 2)), tmp_path / "c")
    run = make_run(seeded(New, 3), seeded(Old, 4))
    report = load(run, tmp_path / "c")
    assert [one.status for one in report.of("models")] == [Status.PARTIAL, Status.RESTORED]
    for part, first, second in (
        ("models", "model.safetensors", "model_1.safetensors"),
        ("optimizers", "optimizer.bin", "optimizer_1.bin"),
    ):
        assert [one.files for one in report.of(part)] == [(first,), (second,)]
    for number, name in ((0, "last.weight"), (1, "head.weight")):
        found, wanted = (moments(one, number)[name]["exp_avg"] for one in (run, saved))
        assert torch.equal(found, wanted)


WARN = LoadPolicy(models=Requirement.WARN, optimizers=Requirement.WARN)
LEAVE = r'next: pass policy=LoadPolicy\(models="warn", optimizers="warn"\) to leave it unchanged'


def test_a_model_without_any_match_names_the_policy_that_leaves_it(tmp_path: Path) -> None:
    saved = save(make_run(seeded(Old, 1)), tmp_path / "c")
    run = make_run(seeded(Old, 2), seeded(lambda: Row("other"), 3))
    with pytest.raises(LoadError, match=LEAVE):
        load(run, tmp_path / "c")
    report = load(run, tmp_path / "c", WARN)
    assert [one.status for one in report.of("models")] == [Status.RESTORED, Status.FAILED]
    found, wanted = (moments(one)["last.weight"]["exp_avg"] for one in (run, saved))
    assert torch.equal(found, wanted)


def test_a_model_that_fits_exactly_keeps_its_entry_next_to_a_new_model(tmp_path: Path) -> None:
    save(make_run(seeded(Old, 1)), tmp_path / "c")
    run = make_run(seeded(Old, 2), seeded(lambda: Old(classes=7), 3))
    with pytest.raises(LoadError, match=LEAVE) as strict:
        load_state_tolerant(run.accelerator, tmp_path / "c")
    assert "partial" not in str(strict.value)
    with pytest.raises(LoadError, match=LEAVE) as partial:
        load(run, tmp_path / "c")
    assert "\n  models 0" not in str(partial.value)
    assert "model.safetensors belongs to model 0" in str(partial.value)
    report = load(run, tmp_path / "c", WARN)
    assert [one.status for one in report.of("models")] == [Status.RESTORED, Status.FAILED]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_exact_fit_comes_before_a_partial_one(tmp_path: Path, order: tuple[int, int]) -> None:
    """Both entries match both models in part; one of them fits one model in full."""
    both = seeded(Old, 1), seeded(lambda: Old(classes=7), 2)
    saved = save(make_run(*both, optimizer=None), tmp_path / "c")
    models = [seeded(Old, 3), seeded(lambda: Old(classes=9), 4)]
    run = make_run(*(models[number] for number in order), optimizer=None)
    statuses = [one.status for one in load(run, tmp_path / "c").of("models")]
    exact = order.index(0)
    assert statuses[1 - exact] is Status.PARTIAL
    assert torch.equal(run.models[exact].head.weight, saved.models[0].head.weight)
    assert torch.equal(run.models[1 - exact].last.weight, saved.models[1].last.weight)


def test_an_entry_that_matches_two_models_in_part_names_the_policy(tmp_path: Path) -> None:
    save(make_run(seeded(Old, 1), optimizer=None), tmp_path / "c")
    models = [seeded(lambda classes=classes: Old(classes), classes) for classes in (7, 9)]  # type: ignore[misc]
    with pytest.raises(LoadError, match=r'next: pass policy=LoadPolicy\(models="warn"') as caught:
        load(make_run(*models, optimizer=None), tmp_path / "c")
    assert "ckptfix check" not in str(caught.value)


def test_one_optimizer_for_two_that_fit_names_the_policy(tmp_path: Path) -> None:
    save(make_run(seeded(Old, 1), seeded(Old, 2)), tmp_path / "c")
    (tmp_path / "c" / "optimizer_1.bin").unlink()
    run = make_run(seeded(New, 3), seeded(Old, 4))
    with pytest.raises(
        LoadError, match=r'or pass policy=LoadPolicy\(optimizers="warn"\) to leave it unchanged'
    ):
        load(run, tmp_path / "c")
    policy = LoadPolicy(models=Requirement.PARTIAL, optimizers=Requirement.WARN)
    assert load(run, tmp_path / "c", policy).of("models")


def test_a_doubled_checkpoint_counts_once(tmp_path: Path) -> None:
    saved = save(make_run(seeded(Old, 1)), tmp_path / "c")
    state = {f"module.{name}": value for name, value in saved.models[0].state_dict().items()}
    save_file(state, tmp_path / "c" / "model_1.safetensors")
    run = make_run(seeded(New, 2))
    load(run, tmp_path / "c")
    assert torch.equal(run.models[0].last.weight, saved.models[0].last.weight)


def test_buffers_and_other_dtypes(tmp_path: Path) -> None:
    old = seeded(Old, 1).to(torch.bfloat16)
    old.norm.running_mean.fill_(3.0)
    state = old.state_dict()
    state["last.bias"] = torch.arange(4)
    torch.save(state, tmp_path / "m.bin")
    new = seeded(New, 2)
    before = values(new)
    with pytest.warns(UserWarning, match="mismatched"):
        (report,) = load_checkpoint_tolerant(new, tmp_path / "m.bin", policy=PARTIAL)
    assert torch.equal(new.norm.running_mean, torch.full((4,), 3.0))
    assert torch.equal(new.first.weight, old.first.weight.float())
    assert new.first.weight.dtype is torch.float32
    assert equal(new.last.bias, before["last.bias"])
    assert "'last.bias' (the dtype is int64 in the file, float32 in the model)" in report.reason
    assert "dtype bfloat16 to float32" in report.reason


def test_tied_weights(tmp_path: Path) -> None:
    old = seeded(Tied, 1)
    state = dict(old.state_dict())
    first, *others = state
    tied = next(name for name in others if state[name].data_ptr() == state[first].data_ptr())
    del state[tied]
    state["gone"] = torch.ones(3)
    save_file(state, tmp_path / "m.safetensors")
    new = seeded(Tied, 2)
    with pytest.warns(UserWarning, match="only in the file, unused: 'gone'"):
        (report,) = load_checkpoint_tolerant(new, tmp_path / "m.safetensors", policy=PARTIAL)
    assert (report.status, report.fresh) == (Status.ADAPTED, ())
    assert all(equal(value, old.state_dict()[name]) for name, value in new.state_dict().items())


def test_a_mismatched_weight_that_is_tied_to_a_loaded_one(tmp_path: Path) -> None:
    """The symptom: it was "kept as initialized", but had the values of the other one."""
    old = {name: value.clone() for name, value in seeded(Tied, 1).state_dict().items()}
    old["lm_head.weight"] = torch.ones(7, 6)
    del old["mixer.bias"]
    save_file(old, tmp_path / "m.safetensors")
    new = seeded(Tied, 2)
    with pytest.warns(UserWarning, match="filled through a tied key"):
        (report,) = load_checkpoint_tolerant(new, tmp_path / "m.safetensors", policy=PARTIAL)
    assert equal(new.lm_head.weight, old["embed.weight"])
    assert report.reason == (
        "3 of 4 keys loaded; not in the file, kept as initialized: 'mixer.bias'; mismatched, "
        "filled through a tied key: 'lm_head.weight' ([7, 6] in the file, [11, 6] in the model)"
    )


def test_weights_that_are_offloaded_or_on_the_meta_device(tmp_path: Path) -> None:
    old = seeded(Old, 1)
    save_file(dict(old.state_dict()), tmp_path / "m.safetensors")
    new = seeded(New, 2)
    wanted = {
        **values(new),
        **{name: value for name, value in values(old).items() if name in new.state_dict()},
    }
    plain = seeded(New, 2)
    plain.load_state_dict(wanted)
    offloaded = cpu_offload(new.eval(), execution_device="cpu")
    with pytest.warns(UserWarning, match="kept as initialized"):
        load_checkpoint_tolerant(offloaded, tmp_path / "m.safetensors", policy=PARTIAL)
    x = torch.randn(3, 4)
    assert torch.equal(offloaded(x), plain.eval()(x))
    with init_empty_weights():
        empty = New()
    with pytest.raises(
        LoadError,
        match=r"'middle\.weight' is on the meta device, and neither the model nor the file",
    ) as caught:
        load_checkpoint_tolerant(empty, tmp_path / "m.safetensors", policy=PARTIAL)
    assert not caught.value.modified


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(make_run(seeded(Old, 1), custom=1), tmp_path / "c")
    return tmp_path / "c"


def test_the_strict_policy_names_this_one(folder: Path) -> None:
    run = make_run(seeded(New, 2), custom=1)
    before = run.digest()
    match = (
        r'policy=LoadPolicy\(models="partial"\) to load the keys that match in name and shape '
        r"\(9 of 13\)"
    )
    with pytest.raises(LoadError, match=match):
        load_state_tolerant(run.accelerator, folder)
    with pytest.raises(LoadError, match=match):
        load_checkpoint_tolerant(run.models[0], folder / "model.safetensors")
    assert run.digest() == before


def test_no_optimizer_is_restored_over_weights_that_are_not_loaded(folder: Path) -> None:
    run = make_run(seeded(lambda: Old(classes=9), 2), custom=1)
    before = run.digest()
    with pytest.raises(
        LoadError, match=r"belong to the weights of models 0 \(Old\), which are not loaded"
    ):
        load(run, folder, LoadPolicy(models=Requirement.WARN))
    assert run.digest() == before
    report = load(run, folder, WARN)
    assert [one.status for one in report.of("optimizers")] == [Status.FAILED, Status.SKIPPED]
    assert not run.optimizers[0].state
    assert run.accelerator.step == 2  # all else is loaded
    reset()
    run = make_run(seeded(Old, 2), custom=1)
    # The optimizer fits, and the model does not.
    run.models[0].norm.register_buffer("more", torch.zeros(1))
    report = load(run, folder, WARN)
    assert [(one.status, one.files) for one in report.of("optimizers")] == [
        (Status.FAILED, ("optimizer.bin",))
    ]
    assert not run.optimizers[0].state
    reset()
    run = make_run(seeded(Old, 2), custom=1)
    report = load(run, folder, LoadPolicy(models=Requirement.IGNORE))
    assert run.optimizers[0].state
    assert "the policy ignores the model weights" in str(report)


def test_nothing_is_modified_when_an_object_refuses(folder: Path) -> None:
    run = make_run(seeded(New, 2), custom=1)
    run.train(1)

    def refuse(state: Any) -> None:
        raise KeyError("colour")

    run.custom[0].load_state_dict = refuse
    before = run.digest()
    with pytest.raises(LoadError, match="all changes were undone") as caught:
        load(run, folder)
    assert run.digest() == before
    assert not caught.value.modified


def test_a_hook_is_heeded_and_taken_back(folder: Path) -> None:
    run = make_run(seeded(New, 2), custom=1)

    def hook(models: list[nn.Module], _: str) -> None:
        with torch.no_grad():
            models[0].first.weight.fill_(1.0)

    run.accelerator.register_load_state_pre_hook(hook)
    before = run.digest()
    (folder / "custom_checkpoint_0.pkl").write_bytes(b"")
    with pytest.raises(LoadError):
        load(run, folder)
    assert run.digest() == before
    assert (
        load(run, folder, LoadPolicy(models=Requirement.PARTIAL, custom=Requirement.WARN))
        .of("optimizers")[0]
        .fresh
    )


def test_an_optimizer_whose_moments_are_of_no_parameter(tmp_path: Path) -> None:
    model = seeded(Old, 1)
    run_of(model, torch.optim.LBFGS(model.parameters())).accelerator.save_state(tmp_path / "c")
    reset()
    model = seeded(New, 2)
    run = run_of(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(LoadError, match="LBFGS does not keep its moments by parameter"):
        load(run, tmp_path / "c")


POLICY_WORDS = "expected 'require', 'warn' or 'ignore'$"


@pytest.mark.parametrize(
    ("part", "word", "said"),
    [
        ("models", "wran", r"models='wran'\): expected 'require', 'warn', 'partial' or 'ignore'$"),
        ("rng", "partial", rf"rng='partial'\): {POLICY_WORDS}"),
        ("rng", ["warn"], rf"rng=\['warn'\]\): {POLICY_WORDS}"),
        ("rng", None, rf"rng=None\): {POLICY_WORDS}"),
        ("trust", "False", r"trust='False'\): expected True or False$"),
    ],
)
def test_words_that_are_no_policy(part: str, word: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^LoadPolicy\({said}"):
        LoadPolicy(**{part: word})


def test_words_that_a_report_does_not_have(tmp_path: Path) -> None:
    report = LoadReport(path=tmp_path, components=())
    with pytest.raises(ValueError, match=r"^of\('model'\): expected 'models', 'optimizers', "):
        report.of("model")
    with pytest.raises(ValueError, match=r"^with_status\('ok'\): expected 'restored', "):
        report.with_status("ok")


class Layers(nn.Module):  # type: ignore[misc]
    """Layers by name and width, in this order."""

    def __init__(self, layers: list[tuple[str, int]]) -> None:
        super().__init__()
        for name, width in layers:
            self.add_module(name, nn.Linear(width, width))


widths = {name: 2 + number % 2 for number, name in enumerate("abcdef")}
layers = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1).map(sorted)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    old=layers,
    new=layers,
    frozen=st.sets(st.sampled_from("abcdef"), max_size=2),
    groups=st.booleans(),
    named=st.booleans(),
    safe=st.booleans(),
)
def test_no_moment_is_given_to_another_parameter(
    tmp_path: Path, old: list[str], new: list[str], frozen: set[str], groups: bool, named: bool, safe: bool
) -> None:  # fmt: skip
    def of(names: list[str]) -> Run:
        model = Layers([(name, widths[name]) for name in names])
        chosen = [(name, one) for name, one in model.named_parameters() if name[0] not in frozen]
        split = [[pair for pair in chosen if pair[1].ndim == ndim] for ndim in (2, 1)]
        given = [
            {"params": part if named else [one for _, one in part]}
            for part in (split if groups else [chosen])
        ]
        return run_of(model, torch.optim.Adam(given))

    common = [name for name in new if name in old]
    if not common or not set(old) - frozen or not set(new) - frozen:
        return
    reset()
    saved = of(old)
    step(saved)
    saved.accelerator.save_state(str(tmp_path / "c"), safe_serialization=safe)
    reset()
    run = of(new)
    load(run, tmp_path / "c")
    wanted, found = moments(saved), moments(run)
    for name, state in found.items():
        if name[0] not in common:
            assert state == {}
        else:
            assert state.keys() == wanted[name].keys()
            assert all(torch.equal(value, wanted[name][key]) for key, value in state.items())
    (tmp_path / "c" / ("model.safetensors" if safe else "pytorch_model.bin")).unlink()

"""Optimizers side by side, whatever strategies saved them: moments, steps and hyperparameters of
each parameter.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from ckptfix import UsageError
from ckptfix.cli import run
from ckptfix.conversion.migrate import migrate
from ckptfix.verification.diff import diff
from ckptfix.verification.diff_page import html_page
from ckptfix.verification.diff_report import DiffReport, Outcome
from tests.tensors.optimizer_ranks import Net, groups, save_all
from tests.training.ranks import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    assert run_ranks(2, lambda rank: save_all(root)) == [0, 0]
    for number in (1, 2):
        shutil.rmtree(root / f"sharded/optimizer_{number}")
    return root


def make_ddp(
    folder: Path, saved: Path, change: Callable[[dict[str, Any]], object] = lambda state: None
) -> Path:
    """Write the model and the optimizer of ``saved`` as DDP has them, changed."""
    folder.mkdir(exist_ok=True)
    shutil.copy(saved / "full/pytorch_model_fsdp.bin", folder / "pytorch_model.bin")
    state = torch.load(saved / "full/optimizer.bin", weights_only=True)
    names = [name for group in state["param_groups"] for name in group["params"]]
    state["state"] = {names.index(name): one for name, one in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names.index(name) for name in group["params"]]
    change(state)
    torch.save(state, folder / "optimizer.bin")
    return folder


def with_names(state: dict[str, Any]) -> None:
    """Record the names in the param groups, as torch does where a script gives them."""
    model = Net()
    for group, own in zip(state["param_groups"], groups(model), strict=True):
        named = {parameter: name for name, parameter in model.named_parameters()}
        group["param_names"] = [named[parameter] for parameter in own["params"]]


def changed(report: DiffReport) -> list[tuple[str, Outcome]]:
    (one,) = report.optimizers
    return [
        (tensor.name, tensor.outcome)
        for tensor in one.tensors
        if tensor.outcome is not Outcome.EQUAL
    ]


@pytest.mark.parametrize("name", ["sharded", "ranks", "flattened"])
def test_strategies_do_not_matter(saved: Path, name: str) -> None:
    report = diff(saved / "full", saved / name)
    (found,) = report.optimizers
    assert (found.strategy_a, found.strategy_b, found.names) == ("fsdp-full", "fsdp", "")
    assert (len(found.tensors), changed(report), found.differences) == (12, [], ())
    assert found.values == 6 + 6 * 11  # the steps, and the hyperparameters of each
    if name != "flattened":  # which has no model
        assert (report.status, report.verdict) == (0, "equal")
        assert (
            report.summary
            == "model tensors: 8 with equal bytes; optimizers: 12 with equal bytes, 72 of 72 values equal"
        )


def test_ddp_is_compared_by_recorded_names(saved: Path, tmp_path: Path) -> None:
    report = diff(saved / "sharded", make_ddp(tmp_path / "ddp", saved, with_names))
    assert (report.status, len(report.optimizers[0].tensors)) == (0, 12)
    assert report.optimizers[0].tensors[0].name == "embed.weight.exp_avg"


def test_ddp_is_compared_by_the_names_of_a_model(saved: Path, tmp_path: Path) -> None:
    folder = make_ddp(tmp_path / "ddp", saved)
    report = diff(saved / "sharded", folder, model=Net)
    assert (report.status, len(report.optimizers[0].tensors), changed(report)) == (0, 12, [])
    assert report.optimizers[0].names == ""


def test_ddp_is_compared_by_its_order_where_nothing_names_it(saved: Path, tmp_path: Path) -> None:
    folder = make_ddp(tmp_path / "ddp", saved)
    for sides in ((saved / "sharded", folder), (folder, saved / "sharded")):
        report = diff(*sides)
        assert (report.status, len(report.optimizers[0].tensors), changed(report)) == (0, 12, [])
        assert "parameters matched by order" in report.optimizers[0].names
    state = torch.load(folder / "optimizer.bin", weights_only=True)
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][1:]
    torch.save(state, folder / "optimizer.bin")
    report = diff(saved / "sharded", folder)
    assert (report.status, report.verdict, report.optimizers) == (1, "not proven equal", ())
    assert "--model MODULE:FACTORY" in report.not_compared[0]


def test_numbers_are_compared_with_numbers(saved: Path, tmp_path: Path) -> None:
    a, b = make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved)
    report = diff(a, b)
    assert (report.status, report.optimizers[0].names) == (
        0,
        "parameters matched by position, because they have no names",
    )
    torch.save(torch.load(b / "optimizer.bin", weights_only=True), b / "optimizer.bin")
    assert diff(a / "optimizer.bin", b / "optimizer.bin").verdict == "equal"


def test_numbers_in_another_order_are_compared_as_torch_loads_them(
    saved: Path, tmp_path: Path
) -> None:
    def renumber(state: dict[str, Any]) -> None:
        last = sum(len(group["params"]) for group in state["param_groups"]) - 1
        state["state"] = {last - number: states for number, states in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [last - number for number in group["params"]]

    def reverse(state: dict[str, Any]) -> None:
        state["param_groups"][0]["params"].reverse()

    a = make_ddp(tmp_path / "a", saved)
    assert diff(a, make_ddp(tmp_path / "same", saved, renumber)).verdict == "equal"
    moved = make_ddp(tmp_path / "moved", saved, reverse)
    first = [torch.load(folder / "optimizer.bin", weights_only=True) for folder in (a, moved)]
    moments = []
    for state in first:
        model = Net()
        optimizer = torch.optim.AdamW(groups(model))
        optimizer.load_state_dict(state)
        moments.append(optimizer.state[groups(model)[0]["params"][0]]["exp_avg"])
    assert moments[0].shape != moments[1].shape or not torch.equal(*moments)
    assert diff(a, moved).status == 1


def test_groups_at_other_positions_are_different(saved: Path, tmp_path: Path) -> None:
    """torch refuses the load, as it goes by position, while each number had its own values."""

    def regroup(state: dict[str, Any]) -> None:
        moved_on = state["param_groups"][0]["params"][1:]
        state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:1]
        state["param_groups"][1]["params"] = [*moved_on, *state["param_groups"][1]["params"]]

    def reverse(state: dict[str, Any]) -> None:
        regroup(state)
        state["param_groups"].reverse()

    a = make_ddp(tmp_path / "a", saved, regroup)
    b = make_ddp(tmp_path / "b", saved, reverse)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(6)]
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(torch.load(b / "optimizer.bin", weights_only=True))
    report = diff(a, b)
    assert (report.status, report.verdict) == (1, "different")
    (found,) = report.optimizers
    assert "loading one into the other fails" in found.names
    assert [(each.name, each.a, each.b, each.parameters) for each in found.differences] == [
        ("param group", "number 1", "number 2", ("0",)),
        ("param group", "number 2", "number 1", ("1", "2", "3", "4", "5")),
    ]
    assert found.values_in_words.endswith("72 of 78 values equal")


def test_named_parameters_at_other_places_of_their_group_are_different(
    saved: Path, tmp_path: Path
) -> None:
    """torch loads by position, also where the names are recorded."""

    def reverse(state: dict[str, Any]) -> None:
        with_names(state)
        for key in ("params", "param_names"):
            state["param_groups"][1][key].reverse()

    a = make_ddp(tmp_path / "a", saved, with_names)
    report = diff(a, make_ddp(tmp_path / "b", saved, reverse))
    assert (report.status, changed(report)) == (1, [])
    places = [(each.name, each.a, each.b) for each in report.optimizers[0].differences]
    name = "position in the param group"
    assert places == [(name, 1, 3), (name, 3, 1)]


def moment(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg_sq"][2, 3] += 1


def step(state: dict[str, Any]) -> None:
    state["state"][1]["step"] += 1


def lost(state: dict[str, Any]) -> None:
    del state["state"][1]


def one_lost(state: dict[str, Any]) -> None:
    del state["state"][1]["exp_avg"]


def hyperparameter(state: dict[str, Any]) -> None:
    state["param_groups"][1]["betas"] = (0.8, 0.91)


def moved(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].append(state["param_groups"][0]["params"].pop())


@pytest.mark.parametrize(
    ("change", "tensors", "values"),
    [
        (moment, [("1.exp_avg_sq", Outcome.VALUES)], {}),
        (step, [], {"step": (2.0, 3.0, ("1",))}),
        (
            lost,
            [("1.exp_avg", Outcome.ONLY_A), ("1.exp_avg_sq", Outcome.ONLY_A)],
            {"step": (2.0, None, ("1",))},
        ),
        (one_lost, [("1.exp_avg", Outcome.ONLY_A)], {}),
        (hyperparameter, [], {"betas": ((0.8, 0.9), (0.8, 0.91), ("3", "4", "5"))}),
        (
            moved,
            [],
            {
                "weight_decay": (0.1, 0.0, ("2",)),
                "param group": ("number 1", "number 2", ("2",)),
            },
        ),
    ],
)
def test_every_difference_is_found(
    saved: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    tensors: list[tuple[str, Outcome]],
    values: dict[str, tuple[Any, ...]],
) -> None:
    report = diff(make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved, change))
    assert changed(report) == tensors
    assert {
        one.name: (one.a, one.b, one.parameters) for one in report.optimizers[0].differences
    } == values
    assert (report.status, report.verdict) == (1, "different")
    found = report.as_json()["optimizers"][0]
    assert found["values"] == 72 + ("param group" in values)
    assert len(found["differences"]) == len(values)


def test_a_tolerance_holds_for_values_too(saved: Path, tmp_path: Path) -> None:
    def nearly(state: dict[str, Any]) -> None:
        state["param_groups"][0]["lr"] *= 1 + 1e-9
        state["state"][0]["exp_avg"] += 1e-9

    a, b = make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved, nearly)
    assert diff(a, b).status == 1
    assert diff(a, b, rtol=1e-6, atol=1e-8).status == 0
    assert (
        diff(a, make_ddp(tmp_path / "c", saved, hyperparameter), rtol=1e-6, atol=1e-8).status == 1
    )


@pytest.mark.parametrize("has_moments", [True, False])
def test_a_parameter_that_only_one_side_has_in_a_group(
    saved: Path, tmp_path: Path, has_moments: bool
) -> None:
    for name in ("listed", "unlisted"):
        shutil.copytree(saved / "full", tmp_path / name)
        state = torch.load(tmp_path / name / "optimizer.bin", weights_only=True)
        last = state["param_groups"][0]["params"][-1]
        if name == "unlisted":
            state["param_groups"][0]["params"].pop()
        if not has_moments:  # a frozen one, which DeepSpeed does not list
            del state["state"][last]
        torch.save(state, tmp_path / name / "optimizer.bin")
    report = diff(tmp_path / "listed", tmp_path / "unlisted")
    (found,) = report.optimizers
    if has_moments:
        assert report.status == 1
        assert [(one.name, one.a, one.b, one.parameters) for one in found.differences] == [
            ("param group", "listed", "not listed", (last,))
        ]
    else:
        assert report.status == 0
        assert any(f"hyperparameters of {last!r}" in words for words in report.not_compared)


def test_moments_that_never_began(saved: Path, tmp_path: Path) -> None:
    """DDP has no states for a parameter that never had a gradient, FSDP zeros: a load gives the
    same.
    """

    def zeros(state: dict[str, Any]) -> None:
        for value in state["state"][1].values():
            value.zero_()

    a, b = make_ddp(tmp_path / "a", saved, lost), make_ddp(tmp_path / "b", saved, zeros)
    report = diff(a, b)
    assert (report.status, len(report.optimizers[0].tensors)) == (0, 10)
    assert any("moments of '1'" in words for words in report.not_compared)


class Scaled(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.proj(x) * self.logit_scale


def scaled_run() -> tuple[Scaled, torch.optim.Optimizer]:
    model = Scaled()
    return model, torch.optim.AdamW(model.named_parameters())


@pytest.fixture(scope="module")
def never_began(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a DDP save for each parameter with zeros as its moments, and without its states."""
    root = tmp_path_factory.mktemp("began")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*scaled_run())
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(root / "saved"))
    for number, (name, _) in enumerate(Scaled().named_parameters()):
        for kind in ("zeros", "none"):
            folder = shutil.copytree(root / "saved", root / f"{name}-{kind}")
            state = torch.load(folder / "optimizer.bin", weights_only=True)
            if kind == "none":
                del state["state"][number]
            else:
                for moment in ("exp_avg", "exp_avg_sq"):
                    state["state"][number][moment].zero_()
            torch.save(state, folder / "optimizer.bin")
    return root


@pytest.mark.parametrize("name", ["logit_scale", "proj.weight"])
@pytest.mark.parametrize("to", ["zero1", "zero3", "universal"])
def test_a_step_of_zero_is_not_of_one_parameter(
    never_began: Path, tmp_path: Path, name: str, to: str
) -> None:
    """ZeRO counts the steps of a param group, also for a parameter that never had a gradient."""
    none, zeros = never_began / f"{name}-none", never_began / f"{name}-zeros"
    migrate(zeros, tmp_path / "new", to=to, state="all", processes=1, model=scaled_run)
    for report in (diff(none, tmp_path / "new"), diff(tmp_path / "new", none)):
        assert (report.status, report.optimizers[0].differences) == (0, ())
        assert any(f"moments of {name!r}" in words for words in report.not_compared)
    # Moments other than zero are those of a parameter that had gradients.
    migrate(
        never_began / "saved",
        tmp_path / "saved",
        to=to,
        state="all",
        processes=1,
        model=scaled_run,
    )
    report = diff(none, tmp_path / "saved")
    assert report.status == 1
    assert (name,) in [value.parameters for value in report.optimizers[0].differences]


@pytest.mark.parametrize("name", ["logit_scale", "proj.weight"])
def test_a_step_of_one_parameter_is_compared(never_began: Path, tmp_path: Path, name: str) -> None:
    """A parameter with steps had gradients, even if all of them were zero."""
    none, zeros = never_began / f"{name}-none", never_began / f"{name}-zeros"
    migrate(zeros, tmp_path / "new", to="fsdp", state="all", processes=1, model=scaled_run)
    for folder in (zeros, tmp_path / "new"):
        (optimizer,) = diff(none, folder).optimizers
        assert ("step", None, 3.0) in [
            (value.name, value.a, value.b) for value in optimizer.differences
        ]


def test_what_cannot_be_compared_is_said(saved: Path, tmp_path: Path) -> None:
    def odd(state: dict[str, Any]) -> None:
        state["param_groups"][0]["mine"] = 3
        state["state"][0]["factors"] = {"left": torch.ones(2)}
        state["state"][0]["sparse"] = torch.eye(2).to_sparse()
        state["more"] = 1

    report = diff(make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved, odd))
    assert changed(report) == [("0.factors.left", Outcome.ONLY_B)]
    said = "; ".join(report.not_compared)
    assert "hyperparameters only in optimizer.bin in B: 'mine'" in said
    assert "states of optimizer.bin in B that cannot be read: '0.sparse'" in said
    assert "entries of optimizer.bin in B other than states and param groups: 'more'" in said


def test_a_state_of_an_optimizer_that_cannot_be_read_proves_nothing(
    saved: Path, tmp_path: Path
) -> None:
    def odd(state: dict[str, Any]) -> None:
        state["state"][0]["sparse"] = torch.eye(2).to_sparse()

    report = diff(make_ddp(tmp_path / "a", saved, odd), make_ddp(tmp_path / "b", saved, odd))
    assert changed(report) == []
    assert (report.status, report.verdict) == (1, "not proven equal")


def test_models_alone_are_equal_to_models_with_optimizers(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(saved / "full/pytorch_model_fsdp.bin", tmp_path / "model")
    report = diff(saved / "full", tmp_path / "model")
    assert (report.status, report.verdict, report.optimizers) == (
        0,
        "equal in what was compared",
        (),
    )
    assert (
        "optimizer optimizer.bin in A: B has no optimizer at this position" in report.not_compared
    )


def test_a_damaged_optimizer_proves_nothing_where_the_other_side_has_one(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "full", tmp_path / "cut")
    data = (tmp_path / "cut/optimizer.bin").read_bytes()
    (tmp_path / "cut/optimizer.bin").write_bytes(data[: len(data) // 2])
    report = diff(saved / "full", tmp_path / "cut")
    assert (report.status, report.verdict, report.optimizers) == (1, "not proven equal", ())
    assert report.not_compared[0].startswith("optimizers in B: ")
    (tmp_path / "model").mkdir()
    shutil.copy(saved / "full/pytorch_model_fsdp.bin", tmp_path / "model")
    report = diff(tmp_path / "model", tmp_path / "cut")
    assert (report.status, report.verdict) == (0, "equal in what was compared")


def test_the_command_line_says_it(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved, hyperparameter)
    assert run(["diff", str(a), str(b)]) == 1
    said = capsys.readouterr().out
    assert (
        "optimizer optimizer.bin (ddp) against optimizer.bin (ddp); parameters matched by position"
        in said
    )
    assert "betas of 3 parameters: (0.8, 0.9) in A, (0.8, 0.91) in B ('3', '4', '5')" in said
    assert (
        "different: model tensors: 8 with equal bytes; optimizers: 12 with equal bytes, 69 of 72 values equal"
        in said
    )


@pytest.mark.slow
def test_a_factory_that_does_not_work_is_an_error(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no_such_module"):
        diff(
            saved / "sharded",
            make_ddp(tmp_path / "ddp", saved),
            model="tests.no_such_module:model",
        )


@pytest.mark.slow
def test_the_command_line_names_numbers_by_a_model(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_ddp(tmp_path / "ddp", saved)
    command = ["diff", str(folder), str(saved / "full")]
    assert run(command) == 0
    assert "(fsdp-full); parameters matched by order" in capsys.readouterr().out
    assert run([*command, "--model", "tests.tensors.optimizer_ranks:Net"]) == 0
    assert "(fsdp-full):\n" in capsys.readouterr().out


def test_the_page_shows_optimizers(saved: Path, tmp_path: Path) -> None:
    def both(state: dict[str, Any]) -> None:
        moment(state)
        hyperparameter(state)

    page = html_page(diff(make_ddp(tmp_path / "a", saved), make_ddp(tmp_path / "b", saved, both)))
    assert (
        "<h2>optimizer optimizer.bin (ddp) against optimizer.bin (ddp); parameters matched by "
        "position" in page
    )
    assert "1.exp_avg_sq" in page
    assert "<li>betas of 3 parameters: (0.8, 0.9) in A, (0.8, 0.91) in B" in page
    assert "steps and hyperparameters: 69 of 72 values equal" in page


@pytest.mark.parametrize("name", ["ranks", "tiled-ranks", "copies-ranks", "tiled"])
@pytest.mark.parametrize("to", ["fsdp", "fsdp-full", "zero2", "zero3"])
def test_what_migrate_writes_is_equal(saved: Path, tmp_path: Path, name: str, to: str) -> None:
    migrate(saved / name, tmp_path / "new", to=to, state="all", processes=3)
    report = diff(saved / name, tmp_path / "new")
    # Files such as DeepSpeed's "latest" are compared by nothing.
    others = " in what was compared" if report.not_compared else ""
    assert (report.status, report.verdict) == (0, f"equal{others}")
    assert [(one.strategy_b, len(one.tensors), one.values) for one in report.optimizers] == [
        (to, 12, 72)
    ]
    assert not any("optimizer_state_dict" in words for words in report.not_compared)

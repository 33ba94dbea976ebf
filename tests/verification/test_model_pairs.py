"""Pairs of models that ``diff`` compares."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from ckptfix import diff
from ckptfix.verification.diff_page import html_page
from ckptfix.verification.diff_report import Outcome

State = dict[str, torch.Tensor]


def model(name: str, seed: int = 0, prefix: str = "") -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"{prefix}{name}.{i}.w": torch.randn(4, 4, generator=generator) for i in range(3)}


def folder(path: Path, *models: State) -> Path:
    path.mkdir(parents=True)
    for number, state in enumerate(models):
        save_file(state, path / (f"model_{number}.safetensors" if number else "model.safetensors"))
    return path


def positions(one: Path, other: Path) -> "list[tuple[str | None, str | None]]":
    return [(found.a, found.b) for found in diff(one, other).models]


def test_models_at_other_positions_are_paired_by_their_names(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", model("student"), model("teacher"))
    other = folder(tmp_path / "b", model("teacher"), model("student"))
    assert positions(one, other) == [
        ("model.safetensors", "model_1.safetensors"),
        ("model_1.safetensors", "model.safetensors"),
    ]
    found = diff(one, other)
    assert (found.status, found.verdict) == (
        1,
        "different",
    ), "load_state would load the wrong models"
    assert (
        found.positions
        == "positions of models differ: model.safetensors in A matches model_1.safetensors in B, "
        "model_1.safetensors in A matches model.safetensors in B: a load would mix up the models"
    )
    assert not found.not_compared
    assert found.as_json()["crossed"] in html_page(found)
    assert found.count(Outcome.EQUAL) == 6
    lone = folder(tmp_path / "c", model("teacher"))
    assert positions(one, lone) == [
        ("model.safetensors", None),
        ("model_1.safetensors", "model.safetensors"),
    ]
    alone = diff(lone, one)
    assert alone.count(Outcome.EQUAL) == 3
    assert not alone.crossed, "one side has no second position"
    assert "model_1.safetensors in B, because their keys match" in " ".join(alone.not_compared)


def test_models_of_one_kind_stay_at_their_positions(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", model("w", 1), model("w", 2))
    other = folder(tmp_path / "b", model("w", 2), model("w", 1))
    assert positions(one, other) == [
        ("model.safetensors", "model.safetensors"),
        ("model_1.safetensors", "model_1.safetensors"),
    ]
    assert not diff(one, one).not_compared
    assert diff(one, other).count(Outcome.VALUES) == 6


def test_a_wrapped_copy_is_not_taken_for_the_model_that_moved_up(tmp_path: Path) -> None:
    doubled = folder(tmp_path / "a", model("s"), model("s", prefix="module."), model("t"))
    repaired = folder(tmp_path / "b", model("s"), model("t"))
    assert positions(doubled, repaired) == [
        ("model.safetensors", "model.safetensors"),
        ("model_1.safetensors", None),
        ("model_2.safetensors", "model_1.safetensors"),
    ]


def test_other_shapes_are_paired_by_position(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", model("s"), model("t"))
    other = folder(tmp_path / "b", {"s.0.w": torch.ones(2)}, {"t.0.w": torch.ones(2)})
    assert positions(one, other) == [
        ("model.safetensors", "model.safetensors"),
        ("model_1.safetensors", "model_1.safetensors"),
    ]


def test_files_without_a_position_are_crossed_by_their_names(tmp_path: Path) -> None:
    """``a.pt`` that comes before ``b.pt`` moves every number; nothing loads such files by a
    number.
    """
    for name, files in {"one": ("a", "b"), "other": ("b", "c"), "crossed": ("b", "a")}.items():
        (tmp_path / name).mkdir()
        for file, content in zip(files, ("a", "b") if name != "other" else ("b", "c"), strict=True):
            torch.save(model(content), tmp_path / name / f"{file}.pt")
    assert not diff(tmp_path / "one", tmp_path / "other").crossed
    assert diff(tmp_path / "one", tmp_path / "crossed").crossed.startswith(
        "a.pt in A matches b.pt in B"
    )

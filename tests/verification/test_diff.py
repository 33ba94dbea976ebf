"""Two checkpoints side by side: what is matched, what is said of each tensor, and what was not
compared.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file, save_model

from ckptfix import UsageError, diff
from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.reading import Piece
from ckptfix.tensors.stored import Contiguous
from ckptfix.verification import compare as comparing
from ckptfix.verification import compare as reading
from ckptfix.verification.diff_report import DiffReport, Outcome, TensorDiff, rows
from ckptfix.verification.matching import match_names
from tests.repairs.builders import write_safetensors
from tests.tiny_adapters import llama

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


def by_name(report: DiffReport) -> "dict[str, TensorDiff]":
    (model,) = report.models
    return {one.name: one for one in model.tensors}


def outcomes(report: DiffReport) -> "dict[str, Outcome]":
    return {name: one.outcome for name, one in by_name(report).items()}


def weights() -> "dict[str, Any]":
    torch.manual_seed(0)
    return {
        **{f"layers.{i}.w": torch.randn(7, 5) for i in range(4)},
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "int": torch.arange(9),
        "flag": torch.tensor([True, False]),
    }


def test_formats_do_not_matter(tmp_path: Path) -> None:
    tensors = weights()
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "b.bin")
    torch.save(tensors, tmp_path / "c.bin", _use_new_zipfile_serialization=False)
    torch.save({"model": tensors, "step": 3}, tmp_path / "d.pt")
    for other in ("b.bin", "c.bin", "d.pt"):
        report = diff(tmp_path / "a.safetensors", tmp_path / other)
        assert report.status == 0
        assert report.count(Outcome.EQUAL) == 8
    assert any("step" in words for words in report.not_compared)


def test_every_outcome(tmp_path: Path) -> None:
    a = weights()
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["layers.1.w"][2, 3] += 0.5
    b["layers.2.w"] = b["layers.2.w"].half()
    b["int"] = b["int"].reshape(3, 3)
    b["new"] = b.pop("flag")
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.status == 1
    found = outcomes(report)
    assert found == {
        "layers.0.w": Outcome.EQUAL,
        "layers.1.w": Outcome.VALUES,
        "layers.2.w": Outcome.DTYPE,
        "layers.3.w": Outcome.EQUAL,
        "scalar": Outcome.EQUAL,
        "empty": Outcome.EQUAL,
        "int": Outcome.SHAPE,
        "flag": Outcome.ONLY_A,
        "new": Outcome.ONLY_B,
    }
    tally = by_name(report)["layers.1.w"].tally
    assert tally is not None
    assert (tally.elements, tally.differing) == (35, 1)
    assert tally.largest == pytest.approx(0.5, rel=1e-6)
    expected = float((a["layers.1.w"] - b["layers.1.w"]).norm() / a["layers.1.w"].norm())
    assert tally.relative == pytest.approx(expected, rel=1e-6)
    tolerant = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=0.001, atol=0.01)
    assert outcomes(tolerant)["layers.2.w"] is Outcome.WITHIN
    assert outcomes(tolerant)["layers.1.w"] is Outcome.VALUES
    assert "2 only in" not in report.summary
    assert "4 with equal bytes" in report.summary
    assert "compared as float64" in report.notes[0]
    document = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert document["notes"] == list(report.notes)
    assert document["summary"]["shape differs"] == 1
    entry = next(one for one in document["models"][0]["tensors"] if one["name"] == "int")
    assert (entry["a"]["shape"], entry["b"]["shape"]) == ([9], [3, 3])


CHANGED_NOTHING = (
    (
        "both models have the same weights: if one was merged with an adapter or trained "
        "further, the merge or the training changed nothing"
    ),
)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_merge_that_changed_nothing(tmp_path: Path, is_trained: bool) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name and is_trained:
            torch.nn.init.normal_(parameter)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    report = diff(tmp_path / "base", tmp_path / "merged")
    assert report.status == is_trained
    assert report.notes == (() if is_trained else CHANGED_NOTHING)
    # Two files, and two folders of a run, may be copies on purpose.
    for name in ("base", "merged"):
        (tmp_path / name / "config.json").unlink()
    assert diff(tmp_path / "base", tmp_path / "merged").notes == ()


def test_a_difference_within_the_tolerance_is_equal_and_said(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(4) * 1.001}, tmp_path / "b.safetensors")
    save_file({"w": torch.ones(4).bfloat16()}, tmp_path / "c.safetensors")
    assert diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=1e-4).status == 1
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=1e-2)
    assert report.status == 0
    assert report.summary == "model tensors: 1 within tolerance"
    assert diff(tmp_path / "a.safetensors", tmp_path / "c.safetensors").status == 1
    assert diff(tmp_path / "a.safetensors", tmp_path / "c.safetensors", atol=0).status == 0
    for bad in (-1.0, math.nan):
        with pytest.raises(UsageError, match="tolerance"):
            diff(tmp_path / "a.safetensors", tmp_path / "c.safetensors", rtol=bad)


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ("module.", "", "without 'module.' in A"),
        ("", "module.module.", "without 'module.module.' in B"),
        ("_orig_mod.", "module.", "without '_orig_mod.' in A, without 'module.' in B"),
        ("module.", "module.", ""),
    ],
)
def test_wrapped_names_are_matched(tmp_path: Path, left: str, right: str, words: str) -> None:
    names = {"a.weight": b"1234", "b.weight": b"567"}
    for file, prefix in (("a.safetensors", left), ("b.safetensors", right)):
        write_safetensors(tmp_path / file, {prefix + name: data for name, data in names.items()})
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.status == 0
    assert report.models[0].names == words
    shown = {prefix_free.removeprefix("module.") for prefix_free in by_name(report)}
    assert shown == set(names)
    assert {one.a for one in report.models[0].tensors} == {left + name for name in names}


def test_a_module_of_the_users_own_is_no_wrapper() -> None:
    tensor: Any = None
    # All of B's names begin with "module.", and one of A's names equals one of B's, as wrapped it
    # is another tensor.
    matched, words = match_names(
        dict.fromkeys(["w", "module.w"], tensor),
        dict.fromkeys(["module.w", "module.module.w"], tensor),
    )
    assert {one.name: (one.a, one.b) for one in matched} == {
        "w": ("w", "module.w"),
        "module.w": ("module.w", "module.module.w"),
    }
    assert words == "without 'module.' in B"
    # Only some names are wrapped: nothing is taken off.
    matched, words = match_names(
        dict.fromkeys(["w", "v"], tensor), dict.fromkeys(["module.w", "v"], tensor)
    )
    assert words == ""
    assert [(one.a, one.b) for one in matched] == [("w", None), ("v", "v"), (None, "module.w")]
    matched, words = match_names(
        dict.fromkeys(["l.w"], tensor), dict.fromkeys(["l._checkpoint_wrapped_module.w"], tensor)
    )
    assert [(one.name, one.b) for one in matched] == [("l.w", "l._checkpoint_wrapped_module.w")]
    assert words == "without the wrappers inside keys in B"


def test_models_are_paired_by_position() -> None:
    folder = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"
    report = diff(folder, folder)
    assert report.status == 0
    assert [(model.index, model.a) for model in report.models] == [
        (0, "model.safetensors"),
        (1, "model_1.safetensors"),
        (2, "model_2.safetensors"),
    ]
    assert [(one.a, one.is_different) for one in report.optimizers] == [("optimizer.bin", False)]
    assert any("random_states_0.pkl" in words for words in report.not_compared)
    other = diff(folder, FIXTURES / "clean-safetensors" / "checkpoint")
    assert [model.b for model in other.models] == ["model.safetensors", None, None]
    assert {one.outcome for one in other.models[1].tensors} == {Outcome.ONLY_A}
    lone = diff(folder / "model_1.safetensors", folder / "model.safetensors")
    assert [(model.a, model.b, model.names) for model in lone.models] == [
        ("model_1.safetensors", "model.safetensors", "without 'module.' in A")
    ]
    assert lone.status == 0


class Tied(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tie_counts_under_each_name(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, tmp_path / "a.safetensors")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state["head.weight"][0, 0] += 1
    torch.save(state, tmp_path / "b.bin")
    assert outcomes(diff(tmp_path / "a.safetensors", tmp_path / "b.bin")) == {
        "embed.weight": Outcome.EQUAL,
        "head.weight": Outcome.VALUES,
    }
    torch.save(model.state_dict(), tmp_path / "c.bin")
    report = diff(tmp_path / "a.safetensors", tmp_path / "c.bin")
    assert report.count(Outcome.EQUAL) == 2


def test_other_layouts(tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = torch.randn(300, 400)
    torch.save(
        {"t": base.t(), "row": base[::2], "wide": base[:1].expand(9, 400)}, tmp_path / "a.bin"
    )
    plain = {
        "t": base.t().contiguous(),
        "row": base[::2].contiguous(),
        "wide": base[:1].repeat(9, 1),
    }
    save_file(plain, tmp_path / "b.safetensors")
    assert diff(tmp_path / "a.bin", tmp_path / "b.safetensors").status == 0
    plain["t"][399, 299] += 2
    save_file(plain, tmp_path / "b.safetensors")
    report = diff(tmp_path / "a.bin", tmp_path / "b.safetensors")
    assert report.summary == "model tensors: 2 with equal bytes, 1 with different values"
    tally = by_name(report)["t"].tally
    assert tally is not None
    assert (tally.differing, tally.elements) == (1, 120_000)
    assert tally.largest == pytest.approx(2)


def test_parts_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_SEGMENT", 1 << 18)
    monkeypatch.setattr(reading, "threads_for", lambda *_: 3)
    monkeypatch.setattr(comparing, "threads_for", lambda *_: 3)
    torch.manual_seed(4)
    a = torch.randn(3_000_001)
    b = a.clone()
    changed = random.Random(4).sample(range(a.numel()), 50)
    b[changed] += 1
    save_file({"w": a, "same": a.half()}, tmp_path / "a.safetensors")
    save_file({"w": b, "same": a.half()}, tmp_path / "b.safetensors")
    seen: list[int] = []
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", progress=seen.append)
    tally = by_name(report)["w"].tally
    assert tally is not None
    assert (tally.elements, tally.differing) == (3_000_001, 50)
    assert tally.distance == pytest.approx(math.sqrt(50), rel=1e-5)
    assert report.count(Outcome.EQUAL) == 1
    assert sum(seen) >= 2 * 6_000_002
    save_file({"w": b.bfloat16(), "same": a.half()}, tmp_path / "c.safetensors")
    mixed = by_name(diff(tmp_path / "a.safetensors", tmp_path / "c.safetensors"))["w"]
    assert mixed.outcome is Outcome.DTYPE
    assert mixed.tally is not None
    expected = (a.double() - b.bfloat16().double()).norm() / a.double().norm()
    assert mixed.tally.relative == pytest.approx(float(expected), rel=1e-9)


def test_numbers_of_less_than_a_byte_are_compared_by_bytes(tmp_path: Path) -> None:
    def write(name: str, data: bytes) -> Path:
        header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
        return tmp_path / name

    a, b = write("a.safetensors", b"\x12\x34"), write("b.safetensors", b"\x12\x35")
    assert diff(a, a).status == 0
    report = diff(a, b)
    assert report.status == 1
    assert by_name(report)["w"].tally is None
    assert any("smaller than a byte" in words for words in report.not_compared)


def test_values_that_are_no_tensors_are_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "extra": {"step": 1}}, tmp_path / "a.bin")
    report = diff(tmp_path / "a.bin", tmp_path / "a.bin")
    assert any("'extra'" in words for words in report.not_compared)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(9)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:-3])
    with pytest.raises(OperationError, match="salvage"):
        diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="does not exist"):
        diff(tmp_path / "a.safetensors", tmp_path / "none")


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    layout = Contiguous((Piece(tmp_path / "x", 0, 200),))
    with pytest.raises(ChangedError):
        reading.read_all(
            iter([lambda sides: list(sides.blocks(layout, layout, (1, 1), reading.BUFFER))]),
            2,
            None,
        )
    short = Contiguous((Piece(tmp_path / "x", 0, 50),))
    whole = Contiguous((Piece(tmp_path / "x", 0, 100),))
    with pytest.raises(ChangedError, match="shorter than the other"):
        reading.read_all(
            iter([lambda sides: list(sides.blocks(short, whole, (1, 1), reading.BUFFER))]), 1, None
        )


def test_parts_of_pieces(tmp_path: Path) -> None:
    data = bytes(range(200))
    (tmp_path / "x").write_bytes(data)
    pieces = (
        Piece(tmp_path / "x", 10, 20),
        Piece(tmp_path / "x", 50, 5),
        Piece(tmp_path / "x", 100, 40),
    )
    joined = b"".join(data[offset : offset + length] for _, offset, length in pieces)
    for begin in range(65):
        for end in range(begin, 66):
            part = reading.part_of(Contiguous(pieces), begin, end)
            assert (
                b"".join(data[offset : offset + length] for _, offset, length in part.pieces)
                == joined[begin:end]
            )


def test_rows_collapse_layers_and_put_the_worst_first(tmp_path: Path) -> None:
    a = weights()
    b = {name: tensor.clone() for name, tensor in a.items()}
    for number in (0, 1, 3):
        b[f"layers.{number}.w"] += 0.1 * number + 0.01
    b["scalar"] *= 100
    del b["int"]
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    found = rows(
        one
        for one in diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors()
        if one.outcome is not Outcome.EQUAL
    )
    assert [(row.outcome, row.names) for row in found] == [
        (Outcome.ONLY_A, "int"),
        (Outcome.VALUES, "scalar"),
        (Outcome.VALUES, "layers.{0...1,3}.w"),
    ]
    assert found[2].largest == pytest.approx(0.31, rel=1e-5)
    assert (found[2].differing, found[2].elements) == (105, 105)
    assert found[2].kind == "F32 [7, 5]"

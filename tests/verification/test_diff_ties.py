"""Tied weights against safetensors files, which store one key of a tie: no difference where the
other side proves the tie.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from ckptfix import diff, migrate
from ckptfix.cli import run
from ckptfix.pages import html_text
from ckptfix.verification.diff_page import html_page
from ckptfix.verification.diff_report import DiffReport, Outcome
from tests.tensors import dcp_making

State = dict[str, torch.Tensor]
EMBEDDING = torch.arange(12.0).reshape(4, 3)
NORM = torch.ones(3)
KEPT = {"embed.weight": EMBEDDING, "norm.weight": NORM}
TIED = {**KEPT, "head.weight": EMBEDDING}
NOTE = (
    "tied weights in b.bin: 'head.weight' is only in B, where it is the same tensor as "
    "'embed.weight'; safetensors files store only one key of tied weights"
)


class Tied(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(tokens)))


def run_parts() -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied()
    return model, torch.optim.AdamW(model.named_parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one run twice with stock Accelerate: in safetensors files, and in files of torch."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*run_parts())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(root / "safetensors"))
    accelerator.save_state(str(root / "bin"), safe_serialization=False)
    return root


def write(folder: Path, right: State, left: State = KEPT) -> tuple[Path, Path]:
    save_file(left, folder / "a.safetensors", {"format": "pt"})
    torch.save(right, folder / "b.bin")
    return folder / "a.safetensors", folder / "b.bin"


def outcomes(report: DiffReport) -> dict[str, Outcome]:
    return {tensor.name: tensor.outcome for tensor in report.tensors()}


def test_saves_of_one_run_are_equal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved / "safetensors", saved / "bin"
    assert run(["diff", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert "only in B  " not in shown
    assert "note: tied weights in pytorch_model.bin: 'head.weight' is only in B" in shown
    assert (diff(a, b).status, diff(b, a).status) == (0, 0)
    assert "is only in A" in diff(b, a).notes[0]
    assert "same tensor as 'embed.weight'" in diff(a, b).notes[0]


@pytest.mark.parametrize("to", ["fsdp", "fsdp-full", "zero1", "zero3", "universal"])
def test_what_migrate_writes_is_equal(saved: Path, tmp_path: Path, to: str) -> None:
    a, b = saved / "safetensors", tmp_path / "new"
    migrate(a, b, to=to, state="all", processes=2, model=run_parts)
    report = diff(a, b)
    assert (report.status, len(report.notes)) == (0, 1)


def test_it_is_a_note_in_every_report(tmp_path: Path) -> None:
    a, b = write(tmp_path, TIED)
    report = diff(a, b)
    assert (report.status, report.verdict, report.notes) == (0, "equal", (NOTE,))
    assert outcomes(report) == dict.fromkeys(KEPT, Outcome.EQUAL)
    read = json.loads(json.dumps(report.as_json()))
    assert read["notes"] == [NOTE]
    assert read["models"][0]["ties"] == [
        {"name": "head.weight", "side": "B", "tied_to": "embed.weight"}
    ]
    assert html_text(NOTE) in html_page(report)


def test_keys_with_wrappers_and_several_ties(tmp_path: Path) -> None:
    more = {**TIED, "tail.weight": EMBEDDING}
    wrapped = {f"module.{name}": tensor for name, tensor in more.items()}
    # The safetensors file keeps a key that is not the first of the other file.
    kept = {"head.weight": EMBEDDING, "norm.weight": NORM}
    report = diff(*write(tmp_path, wrapped, kept))
    assert (report.status, outcomes(report)) == (0, dict.fromkeys(kept, Outcome.EQUAL))
    assert [(tie.name, tie.tied_to) for tie in report.models[0].ties] == [
        ("embed.weight", "head.weight"),
        ("tail.weight", "head.weight"),
    ]
    assert "are only in B, where they are the same tensors as 'head.weight'" in report.notes[0]


def test_a_header_that_records_a_tie_proves_it(tmp_path: Path) -> None:
    for name, words in (("a", {}), ("b", {"head.weight": "embed.weight"})):
        save_file(KEPT, tmp_path / f"{name}.safetensors", words)
    assert diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").status == 0
    # A DCP folder stores both keys: the header says that they are one tensor.
    dcp_making.save(tmp_path / "dcp", {**KEPT, "head.weight": EMBEDDING.clone()})
    assert diff(tmp_path / "b.safetensors", tmp_path / "dcp").count(Outcome.EQUAL) == 3
    alone = diff(tmp_path / "a.safetensors", tmp_path / "dcp")
    assert outcomes(alone)["head.weight"] is Outcome.ONLY_B


def copied(state: State) -> None:
    state["head.weight"] = EMBEDDING.clone()


def transposed(state: State) -> None:
    state["head.weight"] = EMBEDDING.T


def part(state: State) -> None:
    state["head.weight"] = EMBEDDING[1:]


def untied(state: State) -> None:
    state["head.weight"] = EMBEDDING + 1


@pytest.mark.parametrize("change", [copied, transposed, part, untied])
def test_what_nothing_proves_is_a_difference(
    tmp_path: Path, change: Callable[[State], object]
) -> None:
    state = dict(TIED)
    change(state)
    a, b = write(tmp_path, state)
    report = diff(a, b)
    assert (report.status, report.notes) == (1, ())
    assert outcomes(report)["head.weight"] is Outcome.ONLY_B


def test_a_tie_of_a_tensor_that_differs_hides_nothing(tmp_path: Path) -> None:
    a, b = write(tmp_path, TIED, {**KEPT, "embed.weight": EMBEDDING + 1})
    assert outcomes(diff(a, b)) == {
        "embed.weight": Outcome.VALUES,
        "norm.weight": Outcome.EQUAL,
    }
    a, b = write(tmp_path, TIED, {"head.weight": EMBEDDING + 1, "norm.weight": NORM})
    assert outcomes(diff(b, a)) == {
        "head.weight": Outcome.VALUES,
        "norm.weight": Outcome.EQUAL,
    }
    # None of the keys of the tie is on the other side.
    a, b = write(tmp_path, TIED, {"norm.weight": NORM})
    assert [
        name for name, outcome in outcomes(diff(a, b)).items() if outcome is Outcome.ONLY_B
    ] == [
        "embed.weight",
        "head.weight",
    ]


def test_a_file_of_torch_stores_every_key_of_a_tie(tmp_path: Path) -> None:
    """torch.save leaves no key out, so a load of the file without it fails."""
    _, b = write(tmp_path, TIED)
    torch.save(KEPT, tmp_path / "a.bin")
    report = diff(tmp_path / "a.bin", b)
    assert (report.status, outcomes(report)["head.weight"]) == (1, Outcome.ONLY_B)

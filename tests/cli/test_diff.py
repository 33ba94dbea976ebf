"""``ckptfix diff``: exit status, table, JSON, page."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click
import pytest
import torch
from safetensors.torch import save_file

from ckptfix import diff
from ckptfix.cli import report, run
from ckptfix.reports import Serialized, plain

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


@pytest.fixture
def files(tmp_path: Path) -> "tuple[str, str]":
    a = {f"layers.{i}.w": torch.ones(8) for i in range(6)} | {"old": torch.ones(1)}
    b = {f"module.{name}": tensor.clone() for name, tensor in a.items() if name != "old"}
    for i in (1, 2, 3):
        b[f"module.layers.{i}.w"] += 0.25
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


def test_the_table(files: "tuple[str, str]", capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", *files]) == 1
    out = capsys.readouterr().out
    assert "keys matched without 'module.' in B" in out
    (row,) = [line for line in out.splitlines() if "layers.{1...3}.w" in line]
    assert row.split() == [
        "values",
        "differ",
        "layers.{1...3}.w",
        "F32",
        "[8]",
        "0.25",
        "0.25",
        "24",
        "of",
        "24",
    ]
    assert "only in A" in out
    assert "bytes equal  " not in out
    assert (
        "different: model tensors: 3 with equal bytes, 3 with different values, 1 only in A" in out
    )
    assert run(["diff", *files, "--all"]) == 1
    assert "layers.{0,4...5}.w" in capsys.readouterr().out
    assert run(["diff", files[0], files[0]]) == 0
    assert "equal: model tensors: 7 with equal bytes" in capsys.readouterr().out


def test_json_is_one_object_at_every_status(
    files: "tuple[str, str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", *files, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["status"], len(document["models"][0]["tensors"])) == (
        2,
        1,
        7,
    )
    assert run(["diff", *files, "--rtol", "0.5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["summary"]["within tolerance"] == 3
    assert run(["diff", files[0], str(tmp_path / "none"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == 2
    assert run(["diff", *files, "--atol", "-1", "--json"]) == 2
    assert "tolerance" in json.loads(capsys.readouterr().out)["error"]
    (tmp_path / "cut.safetensors").write_bytes(Path(files[0]).read_bytes()[:-2])
    assert run(["diff", files[0], str(tmp_path / "cut.safetensors"), "--json"]) == 3
    assert "truncated" in json.loads(capsys.readouterr().out)["error"]


def test_within_tolerance_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(3) + 1e-6}, tmp_path / "b.safetensors")
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert run(["diff", *paths, "--atol", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert "equal: model tensors: 1 within tolerance" in out
    assert "tolerance: |a - b| <= 1e-05 + 0 * |a|" in out


def test_the_page(
    files: "tuple[str, str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(["diff", *files, "--html", str(page)]) == 1
    assert f"page: {page}" in capsys.readouterr().out
    assert "layers.*" in page.read_text()
    assert run(["diff", *files, "--html", str(tmp_path / "none" / "page.html")]) == 2


def test_folders_say_what_was_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(FIXTURES / "wrapper-safetensors" / "checkpoint")
    assert run(["diff", folder, str(FIXTURES / "clean-bin" / "checkpoint")]) == 1
    out = capsys.readouterr().out
    assert "model_1.safetensors against (none)" in out
    assert (
        "optimizer optimizer.bin (ddp) against optimizer.bin (ddp); parameters matched by position"
        in out
    )
    assert "not compared: 2 other files in B: " in out


def test_equal_is_said_of_what_was_compared_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Random states of two folders were not compared, and the verdict was "equal"."""
    folder = FIXTURES / "clean-bin" / "checkpoint"
    assert run(["diff", str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\nequal in what was compared: model tensors: 4 with equal bytes; " in out
    assert "not compared: 2 other files in A: 'random_states_0.pkl', 'random_states_1.pkl'" in out
    assert run(["diff", str(folder), str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "equal in what was compared"
    assert run(["diff", *[str(folder / "pytorch_model.bin")] * 2]) == 0
    assert "\nequal: model tensors: 4 with equal bytes\n" in capsys.readouterr().out


def test_a_page_never_replaces_what_is_compared_or_another_file(
    files: "tuple[str, str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    (tmp_path / "link").symlink_to(files[0])
    (tmp_path / "notes.html").write_text("<!DOCTYPE html>\n<title>mine</title>")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for page in (
        files[0],
        files[1],
        str(tmp_path / "link"),
        str(folder / "new.html"),
        str(folder),
    ):
        assert run(["diff", files[0], str(folder), "--html", page]) == 2
    for other in ("notes.html", "b.safetensors"):
        assert run(["diff", files[0], str(folder), "--html", str(tmp_path / other)]) == 2
        assert "exists and is not a ckptfix report; choose another path" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_page_replaces_an_older_one_whole(
    files: "tuple[str, str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.touch()
    assert run(["diff", *files, "--html", str(page)]) == 1
    first = page.read_bytes()
    assert run(["diff", files[0], files[0], "--html", str(page)]) == 0
    second = page.read_bytes()
    assert first != second

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert run(["diff", *files, "--html", str(page)]) == 3
    assert page.read_bytes() == second
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.safetensors",
        "b.safetensors",
        "page.html",
    }


def test_a_model_of_values_that_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(
        {
            "a": {"x.w": torch.ones(2), "x.b": torch.ones(2)},
            "b": {"x.w": torch.eye(2).to_sparse()},
        },
        tmp_path / "m.pt",
    )
    assert run(["diff", str(tmp_path / "m.pt"), str(tmp_path / "m.pt")]) == 1
    out = capsys.readouterr().out
    assert "  2 tensors, bytes equal\n" in out
    assert "  no tensors to compare\n" in out
    assert "not proven equal: model tensors: 2 with equal bytes" in out


def test_json_is_printed_tensor_by_tensor(
    files: "tuple[str, str]", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = diff(*files)
    whole = json.dumps({"version": 2, **result.as_json(), "status": 1}) + "\n"
    monkeypatch.setattr(report, "_BLOCK", 100)
    printed: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text, **options: printed.append(text))
    assert run(["diff", *files, "--json"]) == 1
    assert "".join(printed) + "\n" == whole
    assert max(map(len, printed)) < 1000, "one tensor at a time is in memory"


class Part(Serialized):
    json_keys: ClassVar = "inside"

    def __init__(self, *inside: "Part") -> None:
        self.inside = inside

    def json_items(self, at: str = "") -> Iterator[tuple[str, object]]:
        yield from Serialized.json_items(self, at)
        yield "at", at


@pytest.mark.parametrize("many", [(), (Part(),), (Part(), Part(Part(), Part(Part())))])
def test_reports_within_reports_are_printed_as_they_are(
    many: "tuple[Part, ...]", capsys: pytest.CaptureFixture[str]
) -> None:
    report.Report(report.Form.JSON).finish({"many": many, "inside": Part(*many), "c": 1}, 0)
    expected = {"version": 2, **plain({"many": many, "inside": Part(*many), "c": 1}), "status": 0}
    assert capsys.readouterr().out == json.dumps(expected) + "\n"


def test_a_file_that_comes_to_the_place_of_a_page_meanwhile_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place is looked at before the work of minutes."""
    page = tmp_path / "page.html"
    output = report.Report()
    report.ensure_writable(output, str(page), ())
    page.write_text("mine")
    assert "is not a ckptfix report" in report.publish(output, str(page), "<!DOCTYPE html>")
    assert "no page was written" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [page]

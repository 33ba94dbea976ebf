"""``check -r --html``: runs as a page of cells, from left to right in time."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from ckptfix.cli import run
from ckptfix.storage.stores import open_store
from tests.html_pages import Page

ROOT = Path(__file__).parents[2] / "fixtures"
SOUND = ROOT / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint"
DOUBLED = ROOT / "golden" / "doubled-model" / "checkpoint"


class Cells(Page):
    """Keeps the class and the text of each cell, with what a click shows."""

    def __init__(self, document: str) -> None:
        self.cells: list[tuple[str, str]] = []
        super().__init__(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        css = dict(attrs).get("class") or ""
        if css.startswith("cell "):
            self.cells.append((css, ""))

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if self.cells:
            css, text = self.cells[-1]
            self.cells[-1] = css, text + data


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number in (2, 10, 1):
        shutil.copytree(SOUND, tmp_path / "runs" / "a" / f"checkpoint_{number}")
    shutil.copytree(DOUBLED, tmp_path / "runs" / "a" / "checkpoint_11")
    shutil.copytree(SOUND, tmp_path / "runs" / "<b>" / "checkpoint_3")
    return tmp_path / "runs"


def test_a_run_is_a_row_with_its_checkpoints_in_time(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(["check", "-r", str(runs), "--html", str(page)]) == 1
    text = page.read_text()
    shown = Cells(text)
    names = [re.match(r"checkpoint_\d+(?=\d\d\.\d KiB)", words) for _, words in shown.cells]
    assert [name[0] for name in names if name] == [
        "checkpoint_3", "checkpoint_1", "checkpoint_2", "checkpoint_10", "checkpoint_11",
    ]  # fmt: skip
    assert [css for css, _ in shown.cells] == [
        "cell clean newest", "cell clean", "cell clean", "cell clean newest", "cell damaged",
    ]  # fmt: skip
    damaged = shown.cells[-1][1]
    assert "error doubled-model: " in damaged
    assert f"next: ckptfix repair {runs}/a/checkpoint_11" in damaged
    assert "KiB" in damaged
    assert f"the newest one without problems: {runs}/a/checkpoint_10" in shown.text
    assert "5 checkpoints: 4 clean, 1 damaged" in shown.text
    assert "&lt;b&gt;" in text
    assert "<script" not in text


def test_the_page_is_of_runs_and_overwrites_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(["check", str(runs / "a" / "checkpoint_1"), "--html", str(page)]) == 2
    assert "--html shows the checkpoints of runs; add -r" in capsys.readouterr().err
    page.write_text("mine")
    assert run(["check", "-r", str(runs), "--html", str(page)]) == 2
    assert page.read_text() == "mine"
    assert run(["check", "-r", str(runs), "--html", str(runs / "page.html")]) == 2
    assert not (runs / "page.html").exists()


def test_the_page_of_a_store_names_urls(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    url = f"memory://{os.urandom(6).hex()}/run"
    for name in ("checkpoint_1", "checkpoint_2"):
        store = open_store(f"{url}/{name}")
        for path in SOUND.iterdir():
            is_cut = (name, path.name) == ("checkpoint_2", "model.safetensors")
            store.put(path.name, path.read_bytes()[: -4 if is_cut else None])
    assert run(["check", "-r", url, "--html", str(page)]) == 1
    shown = Cells(page.read_text())
    assert [css for css, _ in shown.cells] == ["cell clean newest", "cell damaged"]
    assert "truncated-file" in shown.text
    assert f"resume from {url}/checkpoint_1" in shown.text


@pytest.mark.parametrize("verb", [["check", "-r"], ["scrub"]])
def test_a_checkpoint_that_differs_is_marked_only_where_no_clean_one_exists(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pages answer alike: scrub marked one with which load_state fails in the same script."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in range(3):
        shutil.copytree(SOUND, tmp_path / "run" / f"checkpoint_{number}")
    newest = tmp_path / "run/checkpoint_2/optimizer.bin"
    optimizer = torch.load(newest)
    (last,) = optimizer["param_groups"][0]["params"][-1:]
    optimizer["param_groups"][0]["params"].remove(last)
    del optimizer["state"][last]
    torch.save(optimizer, newest)
    page = tmp_path / "page.html"
    assert run([*verb, str(tmp_path / "run"), "--html", str(page)]) == 0
    shown = Cells(page.read_text())
    assert [css for css, _ in shown.cells] == ["cell clean", "cell clean newest", "cell warned"]
    assert "wrong-state" in shown.text

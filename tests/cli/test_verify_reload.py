"""``ckptfix verify --device-map``: user code that ends the process, pages that cannot be written, what a page says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ckptfix import cli
from ckptfix.cli import run, verify
from ckptfix.devices.reload import verifying
from ckptfix.devices.torch_devices import device_count
from ckptfix.storage import staged
from tests.cli.test_verify import MODEL, damaged, folder, printed
from tests.devices.test_reload_page import Page
from tests.repairs.builders import write_safetensors

__all__ = ["damaged", "folder"]

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_module_that_ends_the_process_gets_an_answer(folder: Path) -> None:
    (folder.parent / "leaving.py").write_text("import sys\ndef build(): ...\nsys.exit(0)\n")
    command = [sys.executable, "-m", "ckptfix", "verify", "checkpoint", "--model", "leaving:build", "--json"]
    done = subprocess.run(
        command, cwd=folder.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "SystemExit: 0" in json.loads(done.stdout)["error"]


def test_a_verb_that_is_ended_from_below_is_never_status_0(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves(*_: Any, **__: Any) -> None:
        sys.exit(0)

    monkeypatch.setattr(verifying, "verify_reload", leaves)
    assert run(["verify", str(folder), "--device-map", "auto", "--json"]) == 3
    assert "sys.exit(0)" in printed(capsys)["error"]


def test_a_verb_without_a_status_is_never_status_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def forgets() -> None:
        pass

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: forgets)
    assert run(["check"]) == 3
    assert "ended without a status" in capsys.readouterr().err
    assert run(["--help"]) == 0


def test_a_page_that_cannot_be_written_is_said_before_anything_is_verified(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    page = str(folder.parent / "page.html")
    monkeypatch.setattr(staged, "create_file", refused)
    monkeypatch.setattr(verify, "check", None)  # not called
    assert run(["verify", str(folder), "--device-map", "auto", "--html", page, "--json"]) == 2
    assert f"--html {page} cannot be written: Permission denied" in printed(capsys)["error"]


def test_a_page_that_cannot_be_written_after_all_costs_no_result(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    arguments = ["verify", str(folder), "--device-map", "auto", "--html", str(folder.parent / "page.html")]
    assert run([*arguments, "--json"]) == 3
    document = printed(capsys)
    assert "No space left on device" in document["error"]
    assert document["reload"]["proofs"]
    assert run(arguments) == 3
    out, err = capsys.readouterr()
    assert "equal in every byte" in out
    assert "No space left on device" in err


def test_trying_the_page_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = folder.parent / "page.html"
    arguments = ["verify", str(folder), "--model", "nothing", "--html", str(page)]
    assert run(arguments) == 2
    assert not page.exists()
    page.write_text("an earlier one")
    assert run(arguments) == 2
    assert page.read_text() == "an earlier one"


def test_the_page_of_a_damaged_checkpoint_has_the_findings(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = damaged.parent / "page.html"
    assert run(["verify", str(damaged), "--device-map", "auto", "--html", str(page)]) == 1
    assert f"report: {page}" in capsys.readouterr().out
    text = Page(page.read_text(encoding="utf-8")).text
    assert "doubled-model" in text
    assert "reload skipped: the checkpoint is damaged" in text
    assert f"next: ckptfix repair {damaged}" in text


def test_a_checkpoint_without_a_tensor_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {})
    page = tmp_path.parent / f"{tmp_path.name}.html"
    assert run(["verify", str(tmp_path), "--device-map", "auto", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "nothing was exercised, and nothing is proven" in out
    assert "no fault found" not in out + page.read_text()
    assert "nothing was exercised" in page.read_text()


def test_the_page_says_why_it_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.html"
    assert run(["verify", str(folder), "--require-transfer-proof", "--html", str(page)]) == 1
    text = Page(page.read_text(encoding="utf-8")).text
    assert "failed: --require-transfer-proof, and 1 line about transfers not exercised" in text
    assert (
        run(["verify", str(folder), "--model", f"{MODEL.rpartition(':')[0]}:half", "--html", str(page)]) == 1
    )
    assert "failed: 1 failed line" not in Page(page.read_text(encoding="utf-8")).text, "there are several"
    assert "failed lines" in Page(page.read_text(encoding="utf-8")).text

"""``ckptfix verify --device-map``: user code that ends the process, pages that cannot be written,
what a page says.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from ckptfix import cli
from ckptfix.cli import run, verify
from ckptfix.devices.reload import verifying
from ckptfix.devices.torch_devices import device_count
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.storage import staged
from ckptfix.verification import verify as verification
from tests.cli.test_verify import MODEL, damaged, folder, printed
from tests.html_pages import Page
from tests.repairs.builders import write_safetensors

__all__ = ["damaged", "folder"]

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_module_that_ends_the_process_gets_an_answer(folder: Path) -> None:
    (folder.parent / "leaving.py").write_text("import sys\ndef build(): ...\nsys.exit(0)\n")
    command = [
        sys.executable,
        "-m",
        "ckptfix",
        "verify",
        "checkpoint",
        "--model",
        "leaving:build",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=folder.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
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
    assert "ended without an exit status" in capsys.readouterr().err
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
    arguments = [
        "verify",
        str(folder),
        "--device-map",
        "auto",
        "--html",
        str(folder.parent / "page.html"),
    ]
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
    assert f"page: {page}" in capsys.readouterr().out
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
    assert "nothing was exercised, so nothing is proven" in out
    assert "no fault found" not in out + page.read_text()
    assert "nothing was exercised" in page.read_text()


def test_the_page_says_why_it_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.html"
    assert run(["verify", str(folder), "--require-transfer-proof", "--html", str(page)]) == 1
    text = Page(page.read_text(encoding="utf-8")).text
    verdict = (
        "the reload is not proven: 1 line about transfers not exercised (--require-transfer-proof)"
    )
    assert verdict in text
    assert (
        run(
            [
                "verify",
                str(folder),
                "--model",
                f"{MODEL.rpartition(':')[0]}:half",
                "--html",
                str(page),
            ]
        )
        == 1
    )
    text = Page(page.read_text(encoding="utf-8")).text
    assert "the reload is not proven: 3 failed lines (names)" in text
    assert "next: make --model or config.json match these weights and their dtype" in text


def poisoned(folder: Path) -> Path:
    """Write a NaN into the last weight, and a manifest that knows it."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    assert run(["seal", str(folder)]) == 0
    return folder


def test_a_failed_reload_ends_with_its_verdict_and_the_next_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder.parent / "page.html"
    arguments = ["verify", str(poisoned(folder)), "--device-map", "auto"]
    capsys.readouterr()
    assert run([*arguments, "--html", str(page)]) == 1
    *_, verdict, step, report = capsys.readouterr().out.splitlines()
    assert verdict == "the reload is not proven: 1 failed line (values)"
    assert step.startswith("next: resume from a checkpoint saved before the NaN or Inf appeared")
    assert report == f"page: {page}"
    text = Page(page.read_text(encoding="utf-8")).text
    assert verdict in text
    assert step in text
    assert run([*arguments, "--json"]) == 1
    reload = printed(capsys)["reload"]
    assert reload["verdict"] == verdict
    assert [f"next: {one}" for one in reload["next"]] == [step]
    assert [one["outcome"] for one in reload["proofs"] if one["subject"] == "values"] == ["failed"]


def test_data_and_a_device_map_do_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.html"
    arguments = ["verify", str(folder), "--data", "--device-map", "auto"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert out.index("values: no problem in 16 tensors") < out.index(
        "proven  file bytes -> tensors"
    )
    assert out.splitlines()[-1] == "no fault found in what was exercised"
    assert run(["verify", str(folder), "--data", "--json"]) == 0
    alone = printed(capsys)
    del alone["version"]
    assert run([*arguments, "--json"]) == 0
    document = printed(capsys)
    assert list(document) == ["version", "path", "findings", "data", "reload", "status"]
    assert document["data"] == alone
    assert document["reload"]["verdict"] == "no fault found in what was exercised"
    assert run([*arguments, "--html", str(page)]) == 0
    text = Page(page.read_text(encoding="utf-8")).text
    assert "values: no problem in 16 tensors" in text


@pytest.mark.parametrize("options", [(), ("--data",)])
def test_the_structure_is_checked_once(
    folder: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --data it was checked twice, which costs a large folder seconds, and a store its
    requests.
    """
    calls: list[Any] = []

    def counted(*given: Any, **named: Any) -> CheckReport:
        calls.append(given)
        return check(*given, **named)

    for module in (verify, verification):
        monkeypatch.setattr(module, "check", counted)
    assert run(["verify", str(folder), "--device-map", "auto", *options]) == 0
    assert len(calls) == 1


def test_what_data_finds_fails_although_the_reload_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The moments of an optimizer are on no device map."""
    page = folder.parent / "page.html"
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.tensor([1.0, float("nan")])}
    torch.save({"state": {0: moments}, "param_groups": [{"params": [0]}]}, folder / "optimizer.bin")
    arguments = ["verify", str(folder), "--device-map", "auto"]
    assert run(arguments) == 0
    assert run([*arguments, "--data", "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "warning nonfinite: optimizer.bin: 'exp_avg of parameter 0'" in out
    assert (
        out.splitlines()[-2]
        == "--data found problems; they are listed above the results of the reload"
    )
    text = Page(page.read_text(encoding="utf-8")).text
    assert "--data found problems; they are listed above the results of the reload" in text
    assert "optimizer.bin: 'exp_avg of parameter 0'" in text
    assert run([*arguments, "--data", "--json"]) == 1
    assert printed(capsys)["reload"]["verdict"] == "no fault found in what was exercised"


def test_data_finds_a_changed_byte_before_the_reload_is_proven(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["seal", str(folder)]) == 0
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x3f")
    capsys.readouterr()
    assert run(["verify", str(folder), "--data", "--device-map", "auto"]) == 1
    out = capsys.readouterr().out
    assert "differ model.safetensors" in out
    assert "proven  file bytes -> tensors" in out


def test_data_of_a_damaged_checkpoint_is_read_and_its_reload_skipped(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = damaged.parent / "page.html"
    assert run(["verify", str(damaged), "--data", "--device-map", "auto", "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "values: no problem in " in out
    assert out.count("error doubled-model") == 1
    assert "reload skipped: the checkpoint is damaged" in out
    assert "values: no problem in " in Page(page.read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("size", "step"),
    [
        (300, "next: copy the file again from its source, or use an older checkpoint"),
        (600, "next, to recover what is intact: ckptfix salvage {0} NEW_FOLDER"),
    ],
)
def test_a_damaged_checkpoint_is_not_sent_to_check_which_repeats_it(
    folder: Path, capsys: pytest.CaptureFixture[str], size: int, step: str
) -> None:
    os.truncate(folder / "model.safetensors", size)
    assert run(["verify", str(folder), "--device-map", "auto"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "reload skipped: the checkpoint is damaged",
        step.format(folder),
    ]


def test_the_page_says_how_often_the_model_ran(folder: Path) -> None:
    page = folder.parent / "page.html"
    arguments = ["verify", str(folder), "--model", MODEL, "--html", str(page)]
    assert run(arguments) == 0
    text = Page(page.read_text(encoding="utf-8")).text
    assert "and more than 1 run\n" in text, (
        "without an accelerator one run is made, of 8 that may be"
    )
    assert "and more than 1 run" in text
    assert "each way" not in text

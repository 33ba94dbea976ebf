"""``ckptfix verify --device-map`` from the command line: what it prints, its status, its JSON and
its page.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfix.cli import run
from ckptfix.devices.torch_devices import device_count
from tests.html_pages import Page
from tests.repairs.builders import write_safetensors

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = sorted((FIXTURES / "golden").iterdir())
ROOT = Path(__file__).parents[2]
MODEL = "tests.devices.reload_models:two_layer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(
        FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint",
        tmp_path / "checkpoint",
    )
    return tmp_path / "checkpoint"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    shutil.copytree(
        FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint", tmp_path / "damaged"
    )
    return tmp_path / "damaged"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["version"] == 2
    return document


def test_what_was_not_exercised_is_printed_and_never_ok(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(folder), "--model", MODEL]) == 0
    out = capsys.readouterr().out
    assert "4 tensors, 332 B; CPU only" in out
    assert "proven  file bytes -> tensors: 4 tensors (332 B), equal in every byte" in out
    assert "proven  split over disk == cpu alone" in out
    assert "NOT EXERCISED  any device transfer: this machine has no accelerator" in out
    assert out.splitlines()[-1] == "no fault found in what was exercised"


def test_the_folder_is_the_one_at_hand_by_default(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(["verify", "--json"]) == 3
    document = printed(capsys)
    assert document["path"] == "."
    assert not document["verified"]
    assert "ckptfix seal ." in document["no_digest"]
    assert run(["verify", "--json", "--repeats", "2"]) == 0
    assert printed(capsys)["reload"]["path"] == "."


def test_options_come_in_the_order_of_the_manual(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "verify", str(folder), "--device-map", "auto", "--max-memory", '{"0":"4GiB","cpu":"8GiB"}',
        "--model", MODEL, "--repeats", "8", "--json",
    ]  # fmt: skip
    assert run(arguments) == 0
    reload = printed(capsys)["reload"]
    assert reload["repeats"] == 8
    assert reload["model"] == f"TwoLayer from {MODEL}"
    assert reload["machine"] == {"accelerator": None, "devices": []}
    assert set(reload["device_map"].values()) == {"0"}
    assert {proof["outcome"] for proof in reload["proofs"]} == {"proven", "not exercised"}


def test_proof_of_transfers_can_be_required(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(folder), "--require-transfer-proof"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == [
        (
            "the reload is not proven: 1 line about transfers not exercised "
            "(--require-transfer-proof)"
        ),
        "next: run it on a machine with the accelerators, or omit --require-transfer-proof",
    ]
    assert "no fault found" not in out
    assert run(["verify", str(folder), "--require-transfer-proof", "--json"]) == 1
    assert printed(capsys)["status"] == 1


def test_damage_is_said_with_the_next_command_and_the_repaired_folder_is_proven(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(damaged), "--model", MODEL]) == 1
    out = capsys.readouterr().out
    assert "error doubled-model" in out
    assert "reload skipped: the checkpoint is damaged" in out
    assert f"next: ckptfix repair {damaged}" in out
    assert run(["verify", str(damaged), "--device-map", "auto", "--json"]) == 1
    document = printed(capsys)
    assert document["reload"] is None
    assert [finding["code"] for finding in document["findings"]] == ["doubled-model"]
    assert run(["repair", str(damaged)]) == 0
    assert run(["verify", str(damaged), "--model", MODEL]) == 0


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_every_golden_folder_gets_an_answer(
    tmp_path: Path, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case: dict[str, Any] = json.loads((golden / "case.json").read_text())
    shutil.copytree(golden / "checkpoint", tmp_path / "checkpoint")
    status = run(["verify", str(tmp_path / "checkpoint"), "--device-map", "auto", "--json"])
    document = printed(capsys)
    severities = {finding["severity"] for finding in document.get("findings", ())}
    if "error" in severities:
        assert status == 1
        assert document["reload"] is None
    elif status != 2:
        failed = [proof for proof in document["reload"]["proofs"] if proof["outcome"] == "failed"]
        assert status == int(bool(failed))
    is_sharded = case["made_from"].startswith("dcp-")  # of which nothing can be put on a device map
    if case["repair_args"] is not None and case["after_status"] == 0 and not is_sharded:
        assert run(["repair", str(tmp_path / "checkpoint"), *case["repair_args"], "--json"]) == 0
        capsys.readouterr()
        assert (
            run(["verify", str(tmp_path / "checkpoint"), "--device-map", "auto", "--json"]) == 0
        ), capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nonexistent"],
        [".", "--device-map", "nonsense"],
        [".", "--max-memory", "nonsense"],
        [".", "--model", "nonsense"],
        [".", "--repeats", "0"],
        [".", "--device-map", "auto", "--html", "/nonexistent/report.html"],
        [".", "--html", "report.html"],
        ["--no-such-option"],
    ],
)
def test_wrong_usage_is_status_2(
    arguments: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert run(["verify", *arguments, "--json"]) == 2
    assert printed(capsys)["error"]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["a", "--against", "b c"], "ckptfix diff a 'b c'"),
        (["--against", "b"], "ckptfix diff . b"),
        (
            ["s3://bucket/a", "c", "--against", "-b", "--data"],
            "ckptfix diff s3://bucket/a ./-b; ckptfix diff c ./-b",
        ),
        (["a", "--against", "b", "--model", "m:f"], "ckptfix diff --model m:f a b"),
    ],
)
def test_the_old_comparison_says_what_to_type(
    arguments: list[str], steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", *arguments]) == 2
    expected = f"ckptfix: --against was removed in 0.6.0; next: {steps}\n"
    assert capsys.readouterr().err == expected
    assert run(["verify", "--help", "--all"]) == 0
    assert "--against" not in capsys.readouterr().out


def test_what_could_not_be_finished_is_status_3(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.devices.reload import arrivals

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(arrivals, "file_bytes", fails)
    assert run(["verify", str(folder), "--device-map", "auto", "--json"]) == 3
    assert "Input/output error" in printed(capsys)["error"]


def test_the_page_says_what_was_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "report.html"
    assert run(["verify", str(folder), "--device-map", "auto", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"page: {page}" in out
    parsed = Page(page.read_text(encoding="utf-8"))
    assert "equal in every byte" in parsed.text
    assert "any device transfer" in parsed.text


def test_names_from_files_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_safetensors(
        folder / "model.safetensors", {"\x1b[2J<b>.weight": b"1234", "\u202eb.weight": b"5"}
    )
    page = tmp_path / "page.html"
    device_map = tmp_path / "map.json"
    device_map.write_text(json.dumps({"\x1b[2J<b>": "cpu", "\u202eb": "cpu"}))
    assert run(["verify", str(folder), "--device-map", str(device_map), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\u202e" not in out
    assert "\\x1b[2J<b>" in out
    assert "b" not in Page(page.read_text()).tags


@pytest.mark.slow
def test_a_model_beside_the_user_is_found_by_the_installed_command(folder: Path) -> None:
    (folder.parent / "mine.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n    "
        "def __init__(self):\n        "
        "super().__init__()\n        "
        "self.fc1, self.fc2 = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)\n    "
        "def forward(self, x):\n        "
        "print('the model prints')\n        "
        "return self.fc2(self.fc1(x))\n"
        "def build():\n    "
        "return Two(), {'x': torch.ones(2, 6)}\n"
    )
    command = [
        str(Path(sys.executable).parent / "ckptfix"),
        "verify",
        "checkpoint",
        "--model",
        "mine:build",
    ]
    done = subprocess.run(
        [*command, "--json"], cwd=folder.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["reload"]["model"] == "Two from mine:build"

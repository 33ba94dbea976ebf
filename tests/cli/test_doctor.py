"""``ckptfix doctor``: exit statuses, JSON, what is printed, and what is never done."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix.cli import run
from ckptfix.devices import environment_of_torch, probe
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.hardware import Machine
from tests.repairs.builders import snapshot, write_safetensors

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "fixtures" / "golden"
Say = Callable[..., None]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests are not theirs."""
    for name in (
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setattr("ckptfix.environment.doctor.read_machine", Machine)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Make torch say this, without asking it."""

    def make(count: int = 0, **changes: Any) -> None:
        devices = [{"index": index, "name": "NVIDIA L4", "pci": ""} for index in range(count)]
        said = {
            "version": "2.13.0", "builds": [], "kind": "cuda" if count else None,
            "devices": devices, "warnings": [], "stage": "done", "problem": "", "verdicts": None,
            **changes,
        }  # fmt: skip
        monkeypatch.setattr(environment_of_torch, "look", lambda *, in_process: said)

    make()
    return make


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON object on stdout."""
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    assert document["version"] == 2
    return document


def codes(document: dict[str, Any]) -> set[str]:
    return {advice["code"] for advice in document["advice"]}


def test_a_machine_without_a_gpu(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "no GPU" in out.splitlines()[0]
    assert "note no-accelerator: torch has no GPU to use" in out
    assert "no problems found in what was checked" in out
    assert "not checked: copies between devices: torch sees 0 devices" in out


def test_json_is_one_object_with_every_part(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    document = printed(capsys)
    assert document.keys() == {"version", "advice", "not_checked", "environment", "status"}
    for advice in document["advice"]:
        assert advice.keys() == {"code", "severity", "message", "evidence", "fix"}
    assert document["environment"]["packages"]["accelerate"]
    assert document["status"] == 0


def test_what_bites_is_status_1(
    say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(2)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert run(["doctor", "--json"]) == 1
    document = printed(capsys)
    assert {"nccl-hides-peer-copies", "no-accelerate-config", "pairs-unproven"} <= codes(document)
    assert document["status"] == 1
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "warning nccl-hides-peer-copies: NCCL_P2P_DISABLE=1" in out
    assert "        NCCL_P2P_DISABLE=1 in the environment\n" in out
    assert "        to do: " in out
    assert "nothing found" not in out


def test_a_broken_driver_is_said_and_no_error(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say(
        stage="devices",
        problem="no answer in 120 s, so it was killed (while torch looked for its devices)",
    )
    assert run(["doctor", "--json"]) == 1
    document = printed(capsys)
    assert "driver-unusable" in codes(document)
    assert any(words.startswith("devices: no answer in 120 s") for words in document["not_checked"])


@pytest.mark.parametrize("case", ["unloadable-pickle-class", "unsafe-pickle"])
def test_a_folder_is_looked_into_and_left_alone(
    case: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = GOLDEN / case / "checkpoint"
    before = snapshot(folder)
    assert run(["doctor", str(folder), "--json"]) == 1
    assert case.removesuffix("-class") in codes(printed(capsys))
    assert snapshot(folder) == before


def test_the_line_for_the_users_script_is_printed_whole(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(GOLDEN / "unloadable-pickle-class" / "checkpoint")]) == 1
    line = (
        "import fixtures.models, torch; "
        "torch.serialization.add_safe_globals([fixtures.models.RunSettings])"
    )
    assert f"to do: if you trust the file: {line}\n" in capsys.readouterr().out


def test_a_script_and_a_command(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "my train.py"
    script.write_text(f"from accelerate import PartialSate\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    assert run(["doctor", "--script", str(script), "--json"]) == 1
    assert "unknown-accelerate-name" in codes(printed(capsys))
    assert run(["doctor", "--launch", f"accelerate launch --lr 1 '{script}'", "--json"]) == 1
    assert {"unknown-accelerate-name", "flags-before-script"} <= codes(printed(capsys))
    assert not (tmp_path / "ran").exists()


def test_a_command_names_the_script_that_is_read(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    command = f"accelerate launch {script}"
    assert run(["doctor", "--launch", command, "--json"]) == 1
    document = printed(capsys)
    assert "unusable-launch-file" in codes(document)
    assert "the training script (--script SCRIPT)" in document["not_checked"]
    script.write_text(
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model = accelerator.prepare(model)\nmodel = accelerator.prepare(model)\n"
    )
    assert run(["doctor", "--launch", command, "--json"]) == 1
    document = printed(capsys)
    (advice,) = (one for one in document["advice"] if one["code"] == "prepared-twice")
    assert advice["evidence"] == [
        "line 3: model = accelerator.prepare(model)",
        "line 4: model = accelerator.prepare(model)",
    ]


def test_the_variables_of_the_command_are_those_that_count(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is asked in the command's environment, and the config is looked for where it says."""
    seen: list[str | None] = []

    def look(*, in_process: bool) -> dict[str, Any]:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {
            "kind": "cuda",
            "stage": "done",
            "devices": [{"index": 0}],
            "version": "2.13.0",
        }

    monkeypatch.setattr(environment_of_torch, "look", look)
    config = tmp_path / "own" / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n")
    command = (
        f"CUDA_VISIBLE_DEVICES=0 HF_HOME={tmp_path}/own NCCL_P2P_DISABLE=1 accelerate launch "
        "train.py"
    )
    run(["doctor", "--launch", command, "--json"])
    document = printed(capsys)
    assert seen == ["0"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert document["environment"]["variables"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert document["environment"]["accelerate_config"] == str(config)
    assert "idle-devices" not in codes(document)


def test_a_misspelt_name_below_accelerate(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with the source of the installed one."""
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate.state import PartialSate\nfrom accelerate.utils import set_seed\n"
    )
    assert run(["doctor", "--script", str(script), "--json"]) == 1
    (advice,) = (
        one for one in printed(capsys)["advice"] if one["code"] == "unknown-accelerate-name"
    )
    assert advice["message"] == "accelerate.state has no PartialSate; did you mean PartialState?"


def test_a_device_map_with_and_without_its_folder(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    alias = {"format": "pt", "head.weight": "embed.weight"}
    write_safetensors(
        folder / "model.safetensors",
        {"embed.weight": b"1", "layers.0.weight": b"2"},
        metadata=alias,
    )
    (tmp_path / "map.json").write_text(json.dumps({"embed": 0, "head": 1}))
    assert run(["doctor", str(folder), "--device-map", str(tmp_path / "map.json"), "--json"]) == 1
    document = printed(capsys)
    assert {"device-map-splits-tie", "device-map-incomplete"} <= codes(document)
    assert any("whether its devices exist" in words for words in document["not_checked"])
    assert run(["doctor", "--device-map", str(tmp_path / "map.json"), "--json"]) == 0
    assert any("tied weights and keys" in words for words in printed(capsys)["not_checked"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nonexistent"],
        ["--script", "/nonexistent"],
        ["--device-map", "/nonexistent"],
        ["--launch", "accelerate launch 'train.py"],
        ["--launch", ""],
        ["--budget", "3"],
        ["--seed", "3"],
        ["--peer-copies", "--budget", "0"],
        ["--peer-copies", "--budget", "nan"],
        ["--peer-copies", "--budget", "inf"],
        ["--peer-copies", "--budget", "soon"],
        ["--peer-copies", "--seed", "-1"],
        ["--peer-copies", "."],
        ["--peer-copies", "--launch", "accelerate launch train.py"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_is_status_2(
    arguments: list[str], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments, "--json"]) == 2
    assert printed(capsys)["error"]


@pytest.mark.parametrize("name", ["my train.py", "nb.ipynb"])
def test_a_script_in_the_place_of_a_folder_names_the_option(
    name: str, say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / name
    script.write_text("x = 1\n")
    assert run(["doctor", str(script), "--json"]) == 2
    next_command = f"ckptfix doctor --script {shlex.quote(str(script))}"
    assert (
        f"is a training script, not a checkpoint; next: {next_command}" in printed(capsys)["error"]
    )


def test_a_folder_without_a_checkpoint_is_status_2(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["doctor", str(tmp_path / "empty"), "--json"]) == 2
    assert "has no checkpoint files" in printed(capsys)["error"]


def test_what_cannot_be_read_is_status_3(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": b"1"})

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", refuse)
        assert run(["doctor", str(tmp_path), "--json"]) == 3
    assert "Permission denied" in printed(capsys)["error"]


def test_names_from_files_are_escaped(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"\x1b[31mlayers": "disk"}))
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\nAccelerator()\nloss.backward()  # \x1b]0;title\x07\n"
    )
    assert run(["doctor", "--device-map", str(tmp_path / "map.json"), "--script", str(script)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31mlayers" in out


@pytest.mark.parametrize("count", [0, 1])
def test_peer_copies_take_two_devices(
    count: int, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not measured is said, and neither an error nor a success of the copies."""
    say(count)
    assert run(["doctor", "--peer-copies", "--json"]) == 0
    document = printed(capsys)
    assert document["pairs"] == []
    assert document["not_exercised"]
    assert run(["doctor", "--peer-copies"]) == 0
    out = capsys.readouterr().out
    assert "nothing was tested, so nothing is proven" in out
    assert "NOT exercised: copies between devices" in out


def test_peer_copies_of_a_broken_driver_are_status_3(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(stage="devices", problem="it was killed by SIGSEGV")
    assert run(["doctor", "--peer-copies", "--json"]) == 3
    assert "SIGSEGV" in printed(capsys)["error"]


@pytest.mark.slow
def test_the_command_itself_asks_a_real_torch_and_imports_none() -> None:
    code = (
        "import sys; from ckptfix.cli import run; run(['doctor', '--json']); print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    document, imported = done.stdout.splitlines()
    assert json.loads(document)["environment"]["packages"]["torch"]
    assert imported == "False"
    assert done.stderr == ""


def test_damage_that_is_remembered_from_before_is_said(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(began: float, verdict: Verdict) -> None:
        pair = PairReport(pair=(0, 1), verdict=verdict, seed=1, began=began, measured=began + 9.0)
        report = ProbeReport(pairs={(0, 1): pair}, seed=1, identity={"boot": "b"})
        monkeypatch.setattr(probe, "probe_peer_copies", lambda **_: report)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    say(2)
    said = "kept until a complete --peer-copies run finds the pair healthy: 0 -> 1 wrong"
    for began, verdict, status in (
        (10.0, Verdict.WRONG, 1),
        (15.0, Verdict.HEALTHY, 0),
        (20.0, Verdict.HEALTHY, 0),
    ):
        found(began, verdict)
        assert run(["doctor", "--peer-copies"]) == status
        assert (said in capsys.readouterr().out) == (began == 15.0)

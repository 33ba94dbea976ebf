"""Exit statuses, JSON, and what is printed of names that nobody should trust."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.cli import run
from ckptfix.storage.lock import folder_lock
from ckptfix.wording import escape
from tests.repairs.builders import write_safetensors

FIXTURES = Path(__file__).parents[2] / "fixtures"
FIXTURE = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON object on stdout."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["version"] == 2
    return document


def test_status_0_1_2_3_with_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(folder), "--json"]) == 1
    document = printed(capsys)
    assert [finding["code"] for finding in document["checkpoints"][0]["findings"]] == [
        "doubled-model"
    ]
    with folder_lock(folder):
        assert run(["repair", str(folder), "--json"]) == 3
    assert str(folder) in printed(capsys)["error"]
    assert run(["repair", str(folder), "--json"]) == 0
    assert printed(capsys)["transaction"] == 1
    assert run(["check", str(folder), "--json"]) == 0
    assert printed(capsys)["status"] == 0
    assert run(["undo", str(folder), "--json"]) == 0
    assert printed(capsys)["steps"]
    assert run(["undo", str(folder), "--json"]) == 2
    assert "no repair to undo" in printed(capsys)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "/nonexistent", "--json"],
        ["repair", "--json"],
        ["repair", ".", "--allow", "no-such-code", "--json"],
        ["repair", ".", "--allow", "truncated-file", "--json"],
        ["repair", ".", "--keep", "models", "--json"],
        ["repair", ".", "--models", "1", "--keep", "models=2", "--json"],
        ["repair", ".", "--models", "0", "--json"],
        ["nonsense", "--json"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert printed(capsys)["error"]


def test_many_paths_and_recursive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, folder.parent / "deep" / "er" / "second")
    assert run(["check", str(folder), str(folder), "--json"]) == 1
    assert len(printed(capsys)["checkpoints"]) == 2
    assert run(["check", "--recursive", str(folder.parent), "--json"]) == 1
    assert len(printed(capsys)["checkpoints"]) == 2


def test_a_folder_without_a_checkpoint_is_no_healthy_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = folder.parent / "with space"
    empty.mkdir()
    for verb in ("check", "repair"):
        assert run([verb, str(empty), "--json"]) == 2
        assert "has no checkpoint files" in printed(capsys)["error"]
        assert run([verb, str(folder.parent), "--json"]) == 2
        next_step = (
            f"check --recursive {folder.parent}"
            if verb == "check"
            else f"next: ckptfix repair {folder}"
        )
        assert next_step in printed(capsys)["error"]
    assert run(["check", "--recursive", str(empty), "--json"]) == 2
    assert "no checkpoint found" in printed(capsys)["error"]


def test_one_bad_folder_does_not_stop_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = folder.parent / "broken"
    shutil.copytree(folder, broken)
    (broken / ".ckptfix").write_text("a file where the journal should be")
    last = folder.parent / "last"
    shutil.copytree(folder, last)
    assert run(["check", str(folder), str(broken), str(last), "--json"]) == 3
    checked = printed(capsys)["checkpoints"]
    assert [one["status"] for one in checked] == [1, 3, 1]
    assert str(broken) in checked[1]["error"]
    assert run(["check", str(folder), str(broken), str(last)]) == 3
    out, err = capsys.readouterr()
    assert f"{last}: " in out
    assert str(broken) in err


def test_commands_can_be_pasted_into_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my checkpoint"
    shutil.copytree(FIXTURE, folder)
    assert run(["check", str(folder)]) == 1
    assert f"next: ckptfix repair '{folder}'" in capsys.readouterr().out
    assert run(["repair", str(folder)]) == 0
    assert f"ckptfix undo '{folder}'" in capsys.readouterr().out
    (folder / "optimizer.bin").unlink()
    write_safetensors(folder / "model.safetensors", {"module.a": b"1"})
    assert run(["check", str(folder), "--json"]) == 0
    (note,) = printed(capsys)["checkpoints"][0]["findings"]
    assert f"ckptfix repair '{folder}' --keys bare" in note["advice"]


def test_next_is_not_a_repair_that_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = "model-00001-of-00001.safetensors"
    write_safetensors(tmp_path / shard, {"a": b"1"})
    index = {"metadata": {}, "weight_map": {"a": shard, "lost": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(["check", str(tmp_path)]) == 1
    assert "next:" not in capsys.readouterr().out


def test_every_advice_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "optimizer.bin",
        "optimizer_1.bin",
        "custom_checkpoint_0.pkl",
        "custom_checkpoint_1.pkl",
    ):
        torch.save({"state": {}, "param_groups": []}, tmp_path / name)
    write_safetensors(tmp_path / "model.safetensors", {"a": b"1"})
    assert run(["check", str(tmp_path)]) == 1  # two equal optimizers for one model
    out = capsys.readouterr().out
    assert "--keep optimizers=N" in out
    assert "--keep custom=N" in out


def test_each_output_says_once_when_a_deletion_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run said it twice, and a repaired copy was to be undone, which no verb can."""
    copy = str(shutil.copytree(FIXTURE, tmp_path / "checkpoint"))
    for words, count in (
        (["check", copy], 1),
        (["repair", "--dry-run", copy], 1),
        (["repair", copy, "--output", str(tmp_path / "copy")], 0),
        (["repair", copy], 1),
    ):
        run(words)
        assert capsys.readouterr().out.count("prepares an identical model on purpose") == count, (
            words
        )


@pytest.mark.parametrize(
    ("fixture", "failure"),
    [
        ("1.15.0/wrapper-safetensors", "looks for pytorch_model_1.bin"),
        ("1.12.0/triple-bin", "looks for pytorch_model_1.bin"),
        (
            "1.15.0/student-teacher-wrapper-safetensors",
            "finds the wrong model in model_1.safetensors",
        ),
        ("1.15.0/lone-nested-safetensors", "looks for the old keys"),
    ],
)
def test_a_repair_says_that_the_unchanged_script_no_longer_resumes(
    fixture: str, failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / f"accelerate-{fixture}" / "checkpoint", copy)
    assert run(["check", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "a second prepare()" in out or "twice" in out
    assert "start the script with: ckptfix run SCRIPT" in out
    assert run(["repair", str(copy), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    said, todo, *wrong = document["advice"]
    is_deleted = not fixture.startswith("1.15.0/lone-nested")
    assert [words.startswith("undo the repair if ") for words in wrong] == [True] * is_deleted
    assert f"until that is fixed, it {failure}" in said
    assert all("ckptfix run SCRIPT" in text for text in (todo, document["found"][0]["advice"]))
    assert run(["undo", str(copy)]) == 0
    capsys.readouterr()
    assert run(["repair", str(copy)]) == 0
    assert said in (out := capsys.readouterr().out)
    assert todo in out
    assert run(["repair", str(copy)]) == 0
    assert "ckptfix run" not in capsys.readouterr().out, "nothing was dropped this time"


def test_a_long_plan_is_collapsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 31):
        name = f"model-{number:05}-of-00030.safetensors"
        write_safetensors(tmp_path / name, {f"module.module.{number}": b"1"})
    assert run(["repair", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 20
    assert "27 more steps" in out
    assert run(["undo", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 10


def test_output_says_where_the_copy_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["repair", str(folder)]) == 0
    capsys.readouterr()
    assert run(["repair", str(folder), "--output", str(folder.parent / "copy")]) == 0
    assert f"an unchanged copy is in {folder.parent / 'copy'}" in capsys.readouterr().out


def test_an_undo_that_is_refused_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["repair", str(folder)]) == 0
    write_safetensors(folder / "model.safetensors", {"newer": b"save"})
    capsys.readouterr()
    assert run(["undo", str(folder)]) == 3
    (folder / ".ckptfix/manifest.json").write_text("{}")
    (advice,) = re.findall(
        r"as they are now: (rm -r .*?)(?:;|$)", capsys.readouterr().err, re.MULTILINE
    )
    subprocess.run(["sh", "-c", advice], check=True)
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]
    assert run(["undo", str(folder)]) == 2


def test_what_is_to_be_typed_begins_with_no_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x").mkdir()
    write_safetensors(Path("-x/model.safetensors"), {"a": b"1"})
    assert run(["verify", "--", "-x"]) == 3
    assert "next: ckptfix seal ./-x" in capsys.readouterr().out
    assert run(["seal", "./-x"]) == 0
    write_safetensors(Path("-x/model.safetensors"), {"module.module.a": b"1"})
    assert run(["check", "--", "-x"]) == 1
    assert "next: ckptfix repair ./-x" in capsys.readouterr().out
    assert run(["repair", "./-x"]) == 0


def test_output_refuses_what_stands_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["repair", str(folder), "--output", str(folder.parent)]) == 2
    assert "exists" in capsys.readouterr().err


def test_names_from_files_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"module.module.\x1b[2J\u202eevil\n": b"1"})
    assert run(["repair", str(tmp_path), "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "evil" in out


def test_a_dry_run_changes_nothing_and_shows_the_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert run(["repair", str(folder), "--dry-run"]) == 1
    assert "delete model_1.safetensors" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == names


def test_escape_leaves_plain_text_alone() -> None:
    assert escape("layers.0.größe.重み") == "layers.0.größe.重み"
    assert escape("a\ud800b\x00") == "a\\ud800b\\x00"


def test_quiet_prints_only_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--quiet", str(folder)]) == 1
    assert capsys.readouterr().out == f"{folder}\n"
    assert run(["repair", str(folder)]) == 0
    capsys.readouterr()
    assert run(["check", "--quiet", str(folder)]) == 0
    assert capsys.readouterr().out == ""


def test_the_worst_of_many_is_the_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, folder.parent / "whole")
    assert run(["repair", str(folder.parent / "whole")]) == 0
    capsys.readouterr()
    assert run(["check", str(folder.parent / "whole"), str(folder), "--json"]) == 1
    assert [checked["status"] for checked in printed(capsys)["checkpoints"]] == [0, 1]


def test_recursive_finds_nothing_in_a_journal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["repair", str(folder)]) == 0
    capsys.readouterr()
    assert run(["check", "-r", str(folder.parent), "--json"]) == 0
    assert len(printed(capsys)["checkpoints"]) == 1
    assert run(["check", "-r", str(folder / "model.safetensors"), "--json"]) == 2
    assert printed(capsys)["error"]


@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_an_interrupt_is_130_and_the_folder_is_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    if verb == "undo":
        assert run(["repair", str(folder)]) == 0
    before = files(folder)
    capsys.readouterr()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", interrupt)
        assert run([verb, str(folder), "--json"]) == 130
    assert printed(capsys)["status"] == 130
    assert files(folder) == before
    assert run([verb, str(folder)]) == 0


def test_only_restricts_and_reports_what_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    assert run(["repair", str(folder), "--only", "nested-prefix", "--json"]) == 1
    document = printed(capsys)
    assert (document["steps"], document["transaction"]) == ([], None)
    assert [finding["code"] for finding in document["left"]] == ["doubled-model"]
    assert files(folder) == before


def test_messages_and_json_never_mix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["check"],
        ["repair", "--dry-run"],
        ["repair"],
        ["repair"],
        ["undo"],
        ["undo"],
    ):
        run([arguments[0], str(folder), *arguments[1:], "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        json.loads(out)


def test_the_plan_says_what_to_type_to_take_it_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["repair", str(folder)])
    out = capsys.readouterr().out
    assert f"ckptfix undo {folder}" in out
    run(["undo", str(folder)])
    assert "undone: delete model_1.safetensors" in capsys.readouterr().out


def test_undo_of_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    assert run(["undo", str(folder)]) == 2
    assert "no repair to undo" in capsys.readouterr().err
    assert files(folder) == before


def test_undo_refuses_a_file_that_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["repair", str(folder)]) == 0
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    before = files(folder)
    for force in ([], ["--force"]):
        capsys.readouterr()
        assert run(["undo", str(folder), *force, "--json"]) == 3
        assert "model.safetensors" in printed(capsys)["error"]
        assert files(folder) == before


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    """``ckptfix check | head -0``: whoever reads has gone, and that is all that happened."""
    for option in ([], ["--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run(
            [sys.executable, "-m", "ckptfix", "check", folder, *option],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        os.close(writer)
        assert "Traceback" not in result.stderr
        assert result.returncode != 0


def test_the_module_is_the_command(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ckptfix", "check", folder, "--json"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 1
    assert json.loads(result.stdout)["version"] == 2


def test_no_colour_and_no_bar_without_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["repair", str(folder)])
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert err == ""


def test_many_broken_files_are_collapsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 31):
        (tmp_path / f"model-{number:05}-of-00030.safetensors").write_bytes(b"")
    assert run(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 15
    assert "27 more files" in out
    assert run(["check", str(tmp_path), "--json"]) == 1
    assert len(printed(capsys)["checkpoints"][0]["findings"]) == 30


def test_a_lost_layer_range_is_collapsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = "model-00001-of-00001.safetensors"
    write_safetensors(tmp_path / shard, {"head": b"1"})
    lost = {f"layers.{layer}.w": shard for layer in range(48)}
    index = {"metadata": {}, "weight_map": {"head": shard, **lost}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(["check", str(tmp_path)]) == 1
    assert "48 tensors that no shard holds: 'layers.{0...47}.w'" in capsys.readouterr().out


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent == folder
    }


@pytest.mark.parametrize(
    "arguments",
    [["check"], ["repair"], ["undo"], ["verify"], ["seal"], ["salvage", "NEW"], ["migrate", "NEW", "--to", "bin"],
     ["diff", "."], ["doctor"]],
    ids=lambda arguments: "-".join(arguments[::2]),
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/null", "/dev/null is a character device: expected a folder or a regular file"),
        ("", "the path is empty"),
        ("nowhere", "nowhere does not exist"),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(
    arguments: list[str], path: str, words: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert run([arguments[0], path, *arguments[1:]]) == 2
    assert words in capsys.readouterr().err


def test_a_broken_link_is_damage_of_that_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "model.safetensors"
    model.unlink()
    model.symlink_to("../blobs/abc")
    assert run(["check", str(model)]) == 1
    assert (
        "model.safetensors is a broken link: ../blobs/abc does not exist" in capsys.readouterr().out
    )


def test_an_empty_folder_is_called_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(tmp_path)]) == 2
    assert f"{tmp_path} has no checkpoint files: the folder is empty" in capsys.readouterr().err
    (tmp_path / "README.md").write_text("")
    assert run(["check", str(tmp_path)]) == 2
    assert "has no checkpoint files: only 'README.md'" in capsys.readouterr().err


NOT_UTF8 = os.fsdecode(b"a\xff '\n1")


def test_a_name_that_is_not_utf8_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / NOT_UTF8
    shutil.copytree(FIXTURE, folder)
    assert run(["check", str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}/a\\xff '\\n1: ")
    (pasted,) = re.findall("next: ckptfix repair (.*)", out)
    echoed = subprocess.run(
        ["bash", "-c", f"printf %s {pasted}"], capture_output=True, check=True
    ).stdout
    assert os.fsdecode(echoed) == str(folder)
    assert run(["repair", str(folder)]) == 0
    assert f"ckptfix undo {pasted}" in capsys.readouterr().out


def test_json_of_a_name_that_is_not_utf8_is_unicode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / NOT_UTF8
    shutil.copytree(FIXTURE, folder)
    shutil.copy(folder / "optimizer.bin", folder / os.fsdecode(b"\xfe\\udcff\xf0\x9f\x98\x80.bin"))
    for arguments in (["check"], ["verify"], ["seal", "--force"], ["repair"], ["undo"], ["undo"]):
        run([arguments[0], str(folder), *arguments[1:], "--json"])
        document = printed(capsys)
        json.dumps(document, ensure_ascii=False).encode()  # what no lone surrogate survives
        if arguments == ["check"]:
            (checked,) = document["checkpoints"]
            assert checked["path"] == f"{tmp_path}/a\\xff '\n1"
            assert "\\xfe\\udcff\N{GRINNING FACE}.bin" in {
                one["path"] for one in checked["components"]
            }


@pytest.mark.parametrize("url", ["file://", "file://checkpoint"])
@pytest.mark.parametrize("verb", ["check", "repair", "undo", "verify"])
def test_a_url_without_a_path_is_never_the_current_folder(
    verb: str,
    url: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert run([verb, url]) == 2
    assert (
        f"{url} is not a file URL of this machine (expected file:///PATH)"
        in capsys.readouterr().err
    )


def test_a_folder_may_be_called_like_the_scheme_of_a_url(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a:" / "b")
    assert run(["check", f"{tmp_path}/a://b"]) == run(["check", str(folder)])


@pytest.mark.parametrize(
    "words",
    [
        ["scrub", "runs", "--html"],
        ["scrub", "runs", "--state"],
        ["diff", "a", "b", "--html"],
        ["verify", "a", "--html"],
        ["prove-resume", "--html"],
    ],
)
def test_a_file_to_write_is_no_url(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would be written to a folder called s3: in the working directory, and missed in the
    bucket.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "runs"):
        (tmp_path / name).mkdir()
    assert run([*words, "s3://bucket/file"]) == 2
    assert "s3://bucket/file is a URL: expected a local file" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["a", "b", "runs"]


def test_an_empty_path_is_not_the_working_directory_after_a_url(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run(["check", ""]) == 2
    assert "the path is empty" in capsys.readouterr().err

"""``ckptfix migrate`` from outside: the plan, the result, the exit status, the JSON object."""

import json
import os
from pathlib import Path

import pytest
import torch

from ckptfix.cli import run
from tests.conversion.making import digests_at, names_below, write_safetensors
from tests.repairs.builders import RANDOM_STATES

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    path.mkdir()
    shared = torch.randn(4, 4)
    torch.save({"x": shared, "y": shared, "z": torch.zeros(8)}, path / "pytorch_model.bin")
    write_safetensors(path / "model_1.safetensors", {"w": torch.zeros(2)})
    (path / "pytorch_model_1.bin").write_bytes((path / "pytorch_model.bin").read_bytes())
    (path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    torch.save({"state": {}, "param_groups": []}, path / "optimizer.bin")
    return path


def test_it_shows_its_plan_and_what_it_did(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder.parent / "b"
    assert run(["migrate", str(folder), str(target), "--to", "safetensors"]) == 0
    size = sum((target / name).stat().st_size for name in names_below(target))
    assert capsys.readouterr().out.splitlines() == [
        f"plan for {folder}:",
        "  pytorch_model.bin: 2 tensors and 1 tie, 96 B -> model.safetensors",
        "  model_1.safetensors: 1 tensor, 8 B -> model_1.safetensors",
        "  copied unchanged: 2 files (optimizer.bin and random_states_0.pkl)",
        "  left out: pytorch_model_1.bin: weights of a model that is converted from other files",
        f"done and verified: 2 models, {size / 1024:.1f} KiB in {target}",
        (
            "warning: the source has identical-models: pytorch_model_1.bin has the "
            "same keys as pytorch_model.bin and the same sampled bytes (3 tensors, 96 B); next: "
            f"ckptfix check {folder}"
        ),
    ]
    assert names_below(target) == {
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
    }


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder.parent / "b"
    assert run(["migrate", str(folder), str(target), "--to", "bin", "--json", "--no-verify"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == 2
    assert document["status"] == 0
    assert document["verified"] is False
    assert document["models"][0] == {
        "label": "pytorch_model.bin", "tensors": 2, "nbytes": 96, "ties": 1,
        "files": ["pytorch_model.bin"],
    }  # fmt: skip
    assert document["left_out"] == [
        {
            "what": "pytorch_model_1.bin",
            "reason": "weights of a model that is converted from other files",
        }
    ]
    assert document["not_checked"][0] == "whether the new files match the source (--no-verify)"


def test_a_duplicate_model_is_refused_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(GOLDEN / "doubled-model" / "checkpoint"), tmp_path / "b"
    arguments = ["migrate", source, str(target), "--to", "dcp"]
    assert run(arguments) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(
        f"next: ckptfix repair {source}, or copy the error too: --allow-damage\n"
    )
    assert run([*arguments, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["status"] == 3
    shares = [*arguments, "--partial", str(tmp_path / "partial"), "--shard"]
    assert [run([*shares, share]) for share in ("0/2", "1/2")] == [3, 3]
    capsys.readouterr()
    assert not target.exists()
    assert run([*arguments, "--allow-damage", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["warnings"][0].startswith("--allow-damage: the copy still has doubled-model: ")


def test_a_dry_run_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", str(folder), str(folder.parent / "b"), "--to", "dcp", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "pytorch_model_fsdp_0/__0_0.distcp" in out
    assert "dry run: nothing was written; a real run would write 2 models" in out
    assert os.listdir(folder.parent) == ["a"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--to", "gguf"], 2, "gguf"),
        ([], 2, "--to"),
        (["--to", "bin", "--dtype", "int8"], 2, "int8"),
        (["--to", "bin", "--max-shard-size", "5 apples"], 2, "expected a size such as 5GB"),
        (["--to", "bin", "--max-shard-size", "5GB"], 2, "load_state reads one file per model"),
        (["--to", "bin", "--keys", "short"], 2, "short"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_usage(
    folder: Path,
    arguments: list[str],
    status: int,
    words: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [
        "migrate",
        str(folder),
        str(folder.parent / "b"),
        *arguments,
        *(["--json"] if as_json else []),
    ]
    assert run(given) == status
    captured = capsys.readouterr()
    if as_json:
        document = json.loads(captured.out)
        assert document["status"] == status
        assert words in document["error"]
    else:
        assert words in captured.err
    assert os.listdir(folder.parent) == ["a"]


def test_what_cannot_be_done_says_what_to_type(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (folder / "model_1.safetensors").read_bytes()
    (folder / "model_1.safetensors").write_bytes(data[:-1])
    assert run(["migrate", str(folder), str(folder.parent / "b"), "--to", "bin"]) == 3
    err = capsys.readouterr().err
    assert "model_1.safetensors" in err
    assert "next: ckptfix check" in err
    assert os.listdir(folder.parent) == ["a"]


@pytest.mark.parametrize("target", ["memory://nowhere/b", "a/inside"])
def test_a_refused_run_leaves_no_folder_for_results(folder: Path, target: str) -> None:
    target = target if "://" in target else str(folder.parent / target)
    partial = folder.parent / "partial"
    arguments = ["migrate", str(folder), target, "--to", "dcp", "--partial", str(partial)]
    assert run(arguments) == 2
    assert not partial.exists()


def test_overwrite_replaces_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(folder.parent / "b")
    assert run(["migrate", str(folder), target, "--to", "bin"]) == 0
    assert run(["migrate", str(folder), target, "--to", "safetensors"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(["migrate", str(folder), target, "--to", "safetensors", "--overwrite"]) == 0
    assert "model.safetensors" in names_below(Path(target))
    assert "pytorch_model.bin" not in names_below(Path(target))
    assert sorted(os.listdir(folder.parent)) == ["a", "b"]


def test_names_and_dtype(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "a.safetensors", {"module.w": torch.ones(3), "module.n": torch.arange(3)}
    )
    given = ["migrate", str(tmp_path / "a.safetensors"), str(tmp_path / "b.bin"), "--to", "bin"]
    assert run([*given, "--keys", "bare", "--dtype", "bf16"]) == 0
    loaded = torch.load(tmp_path / "b.bin", weights_only=True)
    assert {name: value.dtype for name, value in loaded.items()} == {
        "w": torch.bfloat16,
        "n": torch.int64,
    }


def test_a_hostile_name_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(1), "\x1b[2Jx": {"a": 1}}, tmp_path / "a.bin")
    assert run(["migrate", str(tmp_path / "a.bin"), str(tmp_path / "b.bin"), "--to", "bin"]) == 3
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err + captured.out
    assert digests_at(tmp_path / "a.bin").keys() == {"w"}


def test_an_interruption_says_what_is_at_dst(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", interrupt)
    assert run(["migrate", str(folder), str(folder.parent / "b"), "--to", "bin"]) == 130
    target = folder.parent / "b"
    assert f"{folder} is unchanged, and nothing was written to {target}" in capsys.readouterr().err
    assert os.listdir(folder.parent) == ["a"]


def test_what_is_replaced_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder.parent / "b"
    assert (
        run(["migrate", str(folder / "model_1.safetensors"), str(target), "--to", "safetensors"])
        == 0
    )
    assert (
        run(["migrate", str(folder), str(target), "--to", "bin", "--overwrite", "--dry-run"]) == 0
    )
    assert f"  to be replaced in {target}: model.safetensors" in capsys.readouterr().out

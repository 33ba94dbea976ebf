"""``undo`` gives back exactly the bytes that a repair took away, or says why it cannot and touches
nothing.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptfix import repair, undo
from ckptfix.cli import run
from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage import recipes
from tests.repairs.builders import write_safetensors, write_trained_optimizer
from tests.repairs.refused import nobody_may_read

BODY = bytes(range(253)) * 9_000
MIDDLE = 1_050_000
NESTED = Path("fixtures/accelerate-1.15.0/lone-nested-safetensors/checkpoint")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A student that was prepared twice, and its teacher, which the repair moves."""
    root = tmp_path / "checkpoint"
    root.mkdir()
    write_safetensors(root / "model.safetensors", {"a": BODY, "b": b"12345678"})
    write_safetensors(root / "model_1.safetensors", {"module.a": BODY, "module.b": b"12345678"})
    write_safetensors(root / "model_2.safetensors", {"a": BODY[::-1], "c": b"1234"})
    write_trained_optimizer(root / "optimizer.bin", {"a": BODY, "b": b"12345678"})
    for rank in range(2):
        shutil.copy(
            Path("fixtures/accelerate-1.15.0/wrapper-safetensors/checkpoint")
            / f"random_states_{rank}.pkl",
            root,
        )
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[MIDDLE] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_undo_refuses_a_flipped_byte(
    folder: Path, force: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["repair", str(folder)]) == 0
    flip(folder / "model.safetensors")
    before = contents(folder)
    capsys.readouterr()
    assert run(["undo", str(folder), *force]) == 3
    said = capsys.readouterr().err
    assert f"{folder / 'model.safetensors'}: changed since repair 1" in said
    assert "would restore model_1.safetensors with wrong bytes" in said
    assert f"ckptfix undo {folder}" in said
    assert contents(folder) == before


def test_a_copy_with_new_times_needs_no_force(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    assert run(["repair", str(folder)]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copy)
    for path in copy.iterdir():
        os.utime(path)
    assert run(["undo", str(copy)]) == 0
    assert contents(copy) == before


def test_a_proof_is_hashed_in_the_pass_that_compares(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of a double is read to compare it; the digests for the undo cost no second
    read.
    """
    again: list[object] = []
    real = recipes.hash_parts

    def counting(parts: list[recipes.Bytes]) -> list[bytes]:
        again.extend(parts)
        return real(parts)

    monkeypatch.setattr(recipes, "hash_parts", counting)
    assert repair(folder).transaction == 1
    assert again == []
    undo(folder)
    assert again


def test_the_receipt_names_what_force_accepted_without_a_proof(folder: Path) -> None:
    repair(folder)
    as_of_0_4_0(folder)
    os.utime(folder / "model.safetensors", ns=(5, 5))
    with pytest.raises(ChangedError, match=r"0\.4\.0 or older, has no digest"):
        undo(folder)
    receipt = undo(folder, force=True)
    assert receipt.as_json()["unproven"] == ["model.safetensors"]


def as_of_0_4_0(folder: Path) -> None:
    """Make the journal one of 0.4.0: without samples, and recipes without digests."""
    done = folder / ".ckptfix" / "0001.done"
    (done / "samples.json").unlink()
    body = json.loads((done / "plan.json").read_bytes().partition(b"\n")[2])
    for edit in body["edits"]:
        if isinstance(edit[-1], dict):
            del edit[-1]["digests"]
    plan = json.dumps(body, separators=(",", ":")).encode()
    (done / "plan.json").write_bytes(
        f"{hashlib.sha256(plan).hexdigest()}\n".encode() + plan + b"\n"
    )


def test_sizes_are_said_as_people_read_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.repairs.repair.free_space", lambda root: (1000, 4096))
    with pytest.raises(
        OperationError,
        match=r"needs [0-9.]+ KiB of free space, but only 1000 B is free on this disk",
    ):
        repair(folder)


def test_one_key_is_one_key(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"module.module.a": b"1"})
    receipt = repair(tmp_path, dry_run=True)
    assert str(receipt.steps[0]).startswith("rename 1 key in model.safetensors: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as somebody else")
def test_a_file_of_somebody_else_in_a_folder_of_all_is_no_interrupted_repair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its write was refused, then each rollback: only the owner of the file could end that."""
    folder = Path(shutil.copytree(NESTED, tmp_path / "checkpoint"))
    before = contents(folder)
    folder.chmod(0o777)
    (folder / "model.safetensors").chmod(0o644)
    (elsewhere := tmp_path / "file").touch()
    with nobody_may_read(elsewhere):
        assert run(["repair", str(folder)]) == 3
        assert "next: add --atomic, which replaces it with a new file" in capsys.readouterr().err
        assert contents(folder) == before
        assert run(["repair", "--atomic", str(folder)]) == 0
        assert run(["undo", str(folder)]) == 0
    assert contents(folder) == before

"""Damage of every kind, at every class of byte offset, is found and named; what is whole
matches.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import ChangedError, OperationError, UsageError, seal, verify
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.storage.files import on_disk
from ckptfix.storage.paths import MANIFEST
from ckptfix.tensors.hashing import Hashed, hash_all
from ckptfix.verification.verify_report import Change, Item, Kind, Outcome
from tests.verification.sealed import KINDS, flip, place, sealed, state, wrong

FQN = "layers.1.weight"
SIZE = 16 * 24 * 4


def of(items: tuple[Item, ...], name: str) -> Item:
    return next(item for item in items if item.name == name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_folder_matches(tmp_path: Path, kind: str) -> None:
    folder = sealed(tmp_path, kind)
    for data in (False, True):
        report = verify(folder, data=data)
        assert wrong(report) == {}
        assert report.status == 0
        assert report.sealed
        assert report.values == ()
        assert report.count(Kind.TENSOR)[Outcome.MATCH] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_manifest_nothing_is_compared_and_that_is_said(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path)
    report = verify(tmp_path)
    assert report.status == 3, "nothing was compared, so nothing is known to be damaged"
    assert not report.sealed
    assert not report.is_verified
    assert {item.outcome for item in report.items} == {Outcome.NOT_CHECKED}
    assert f"nothing was verified: there is no manifest; next: ckptfix seal {tmp_path}" in str(
        report
    )
    values = verify(tmp_path, data=True)
    assert values.status == 0
    assert values.is_verified
    assert "values: no problem in 4 tensors" in str(values)
    last = str(values).splitlines()[-1]
    assert last.startswith(
        "only values were verified; the bytes were not compared: there is no manifest"
    )
    assert last.endswith(f"; next: ckptfix seal {tmp_path}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 1, SIZE // 2, SIZE - 1])
def test_a_flipped_bit_names_tensor_and_file(tmp_path: Path, kind: str, at: int) -> None:
    folder = sealed(tmp_path, kind)
    piece = place(folder, FQN)
    name = piece.path.name
    flip(piece.path, piece.offset + at)
    report = verify(folder)
    assert report.status == 1
    assert wrong(report) == {FQN: ("changed", name), name: ("changed", None)}
    item = of(report.items, FQN)
    assert f"the digest of {name} also differs" in item.text
    assert "sha256" in item.text


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_file_is_watched(tmp_path: Path, kind: str) -> None:
    """Header, padding, directory of a zip, between tensors: the file differs even where no tensor
    does.
    """
    folder = sealed(tmp_path, kind)
    path = place(folder, FQN).path
    inside = 0
    for offset in range(0, path.stat().st_size, 61):
        flip(path, offset)
        report = verify(folder)
        assert report.status == 1, offset
        item = of(report.items, path.name)
        assert item.outcome is Outcome.DIFFER, offset
        tensors = [
            one
            for one in report.items
            if one.kind is Kind.TENSOR and one.outcome is not Outcome.MATCH
        ]
        inside += bool(tensors)
        if not tensors:
            assert "every tensor in it matches" in item.text, offset
        flip(path, offset)
    assert verify(folder).status == 0
    assert inside > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_tail_is_named(tmp_path: Path, kind: str) -> None:
    folder = sealed(tmp_path, kind)
    piece = place(folder, FQN)
    with on_disk(piece.path).open("r+b") as file:
        file.seek(piece.offset + SIZE - 512)
        file.write(bytes(512))
    report = verify(folder)
    assert wrong(report)[FQN] == ("zero-tail", piece.path.name)
    assert "its last 512 bytes are zero" in of(report.items, FQN).text


def test_a_zeroed_end_of_a_file_is_named(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "safetensors")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - SIZE - 100)
    os.truncate(path, size)
    report = verify(folder)
    assert wrong(report) == {
        "model.safetensors": ("zero-tail", None),
        "layers.2.weight": ("zero-tail", "model.safetensors"),
        "layers.3.weight": ("zero-tail", "model.safetensors"),
    }
    assert f"its last {SIZE + 100} bytes are zero" in of(report.items, "model.safetensors").text


def test_swapped_files_are_named(tmp_path: Path) -> None:
    for name, seed in (("model.safetensors", 0), ("model_1.safetensors", 1)):
        save_file({"w": torch.full((9,), float(seed))}, tmp_path / name, {"format": "pt"})
    assert seal(tmp_path, force=True).status == 0
    (tmp_path / "model.safetensors").rename(tmp_path / "x")
    (tmp_path / "model_1.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "x").rename(tmp_path / "model_1.safetensors")
    report = verify(tmp_path)
    assert [item.change for item in report.items] == [Change.SWAPPED] * 4
    assert report.items[0].text.startswith("swapped with model_1.safetensors: each has")


def test_a_renamed_missing_and_added_tensor(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "safetensors")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.9.weight"] = tensors.pop(FQN)
    del tensors["layers.0.weight"]
    tensors["new"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    report = verify(folder)
    assert wrong(report) == {
        FQN: ("renamed", "model.safetensors"),
        "layers.0.weight": ("missing", "model.safetensors"),
        "new": ("extra", "model.safetensors"),
        "model.safetensors": ("changed", None),
    }
    assert "layers.9.weight" in of(report.items, FQN).text
    assert report.status == 1


def test_missing_extra_and_renamed_files(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "sharded")
    (folder / "sub").mkdir()
    (folder / "README.md").rename(folder / "sub" / "notes.md")
    (folder / "extra.txt").write_text("more")
    (folder / "nowhere").symlink_to("gone")
    report = verify(folder)
    assert wrong(report) == {
        "README.md": ("renamed", None),
        "extra.txt": ("extra", None),
        "nowhere": ("not checked", None),
    }
    (folder / "sub" / "notes.md").unlink()
    assert wrong(verify(folder))["README.md"] == ("missing", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_damage_and_its_tensors_are_not_ok(tmp_path: Path, kind: str) -> None:
    folder = sealed(tmp_path, kind)
    path = on_disk(place(folder, "layers.3.weight").path)
    os.truncate(path, path.stat().st_size - 700)
    report = verify(folder)
    assert report.status == 1
    assert any(finding.code == "truncated-file" for finding in report.findings)
    found = wrong(report)
    assert found[path.name][0] == "changed"
    assert found["layers.3.weight"][0] == "not checked"


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "sharded")
    (folder / "model-00001-of-00002.safetensors").unlink()
    report = verify(folder)
    assert report.status == 1
    assert wrong(report)["model-00001-of-00002.safetensors"] == ("missing", None)
    lost, left = list(state())[:2], list(state())[2:]
    assert [wrong(report)[name][0] for name in lost] == ["not checked"] * 2
    assert all(of(report.items, name).outcome is Outcome.MATCH for name in left)


def test_one_file_alone_is_compared_with_the_manifest_beside_it(tmp_path: Path) -> None:
    folder = sealed(tmp_path, "sharded")
    shard = folder / "model-00001-of-00002.safetensors"
    report = verify(shard)
    assert wrong(report) == {}
    assert report.count(Kind.TENSOR)[Outcome.MATCH] == 2
    flip(place(folder, FQN).path, place(folder, FQN).offset)
    assert wrong(verify(shard)) == {FQN: ("changed", shard.name), shard.name: ("changed", None)}
    assert verify(folder / "model-00002-of-00002.safetensors").status == 0


def test_a_file_that_cannot_be_read_is_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sealed(tmp_path, "safetensors")
    real = os.preadv

    def fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 1000:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    report = verify(folder)
    assert report.status == 3
    assert "Input/output error" in report.unfinished[0]
    assert "cannot be read: Input/output error" in of(report.items, FQN).text
    with pytest.raises(OperationError, match="Input/output error"):
        seal(folder)


def test_a_file_that_changes_while_it_is_read_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sealed(tmp_path, "safetensors")
    before = (folder / MANIFEST).read_bytes()

    def meanwhile(*arguments: object, **options: object) -> list[Hashed]:
        done: list[Hashed] = hash_all(*arguments, **options)  # type: ignore[arg-type]
        os.utime(folder / "model.safetensors", ns=(1, 1))
        return done

    monkeypatch.setattr("ckptfix.verification.verify.hash_all", meanwhile)
    for verb in (verify, seal):
        with pytest.raises(ChangedError, match=r"model\.safetensors changed while it was read"):
            verb(folder)
        os.utime(folder / "model.safetensors")
    assert (folder / MANIFEST).read_bytes() == before


def test_a_hostile_manifest_is_refused_and_opens_nothing_outside(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "c", "safetensors")
    (tmp_path / "secret").write_text("1")
    document = json.loads((folder / MANIFEST).read_text())
    for name in ("../secret", "/etc/passwd", "a/../../secret"):
        (folder / MANIFEST).write_text(json.dumps({**document, "sha256": {name: "0" * 64}}))
        with pytest.raises(OperationError, match="cannot be understood"):
            verify(folder)
    deep = "a/" * 3000 + "b"
    (folder / MANIFEST).write_text(json.dumps({**document, "sha256": {deep: "0" * 64}}))
    assert verify(folder).status == 1
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(OperationError, match="not a regular file"):
        verify(folder)


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path / "gone")
    with pytest.raises(UsageError):
        verify(tmp_path)
    with pytest.raises(UsageError, match=r"removed in 0\.6\.0; use ckptfix\.diff\(path, other\)"):
        verify(sealed(tmp_path / "c", "bin"), against=tmp_path / "other")


def test_a_manifest_that_has_no_digest_of_what_is_there(tmp_path: Path) -> None:
    """Sizes alone, as a guarded save records them, are no digests."""
    KINDS["safetensors"](tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / MANIFEST).write_bytes(
        Manifest(versions={}, world_size=1, step=1, files=sizes).to_bytes()
    )
    report = verify(tmp_path)
    assert report.status == 3
    assert (
        "nothing was verified: no file or tensor has a digest in the manifest; next: ckptfix seal"
        in str(report)
    )
    assert "no difference found" not in str(report)


def test_a_difference_says_what_to_do(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    seal(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = str(verify(tmp_path))
    for words in (
        "copy the differing files again",
        f"ckptfix verify {tmp_path}",
        f"ckptfix salvage {tmp_path} NEW_FOLDER",
    ):
        assert words in said
    assert "ckptfix.latest_checkpoint(" in said
    assert f"ckptfix seal --force {tmp_path}" in said


def test_an_added_file_is_simply_sealed(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    seal(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    said = str(verify(tmp_path))
    assert f"next, if you added this on purpose: ckptfix seal {tmp_path}" in said
    assert "copy the differing files" not in said

"""Where a new checkpoint may go, and what it may take the place of."""

import os
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, OperationError, UsageError, migrate
from tests.operations.migrate.making import digests_at, names_below, write_safetensors


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "a.bin"
    torch.save({"w": torch.ones(3)}, path)
    return path


@pytest.fixture
def models(lone: Path) -> Path:
    """A folder of the user's, in which weights lie too."""
    folder = lone.parent / "models"
    folder.mkdir()
    write_safetensors(folder / "other.safetensors", {"z": torch.zeros(2)})
    (folder / "src").mkdir()
    (folder / "src" / "train.py").write_text("code")
    (folder / "data.csv").write_text("1")
    return folder


def test_a_folder_of_the_user_is_never_replaced(lone: Path, models: Path) -> None:
    before = names_below(models)
    with pytest.raises(
        UsageError, match=r"exists; it is a folder; name a new place in it: .*models/a\.safeten"
    ) as one:
        migrate(lone, models, to="safetensors")
    assert "--overwrite" not in str(one.value)
    with pytest.raises(UsageError, match=r"would be lost: 'data\.csv', 'src/'"):
        migrate(lone, models, to="safetensors", overwrite=True)
    assert names_below(models) == before
    (lone.parent / "folder").mkdir()
    write_safetensors(lone.parent / "folder" / "model.safetensors", {"z": torch.zeros(2)})
    with pytest.raises(UsageError, match="it holds more than a checkpoint; name a place where nothing is"):
        migrate(lone.parent / "folder", models, to="bin")
    assert names_below(models) == before


def test_what_goes_away_is_in_the_plan(lone: Path) -> None:
    target = lone.parent / "b"
    target.mkdir()
    write_safetensors(target / "other.safetensors", {"z": torch.zeros(2)})
    (target / "config.json").write_text("{}")
    (target / "pytorch_model_fsdp_0").mkdir()
    (target / "pytorch_model_fsdp_0" / ".metadata.tmp").write_text("")
    planned = migrate(lone, target, to="safetensors", overwrite=True, dry_run=True)
    assert planned.removed == ("config.json", "other.safetensors", "pytorch_model_fsdp_0/.metadata.tmp")
    assert planned.as_json()["removed"] == list(planned.removed)
    assert migrate(lone, target, to="safetensors", overwrite=True).removed == planned.removed
    assert names_below(target) == {"model.safetensors"}
    write_safetensors(lone.parent / "c.safetensors", {"z": torch.zeros(2)})
    assert migrate(lone, lone.parent / "c.safetensors", to="safetensors", overwrite=True).removed == (".",)


def test_what_comes_into_a_folder_that_is_replaced_stays(lone: Path) -> None:
    target = lone.parent / "b"
    migrate(lone, target, to="safetensors")

    def write(count: int) -> None:
        (target / "train.py").write_text("code")

    with pytest.raises(ChangedError, match="changed meanwhile"):
        migrate(lone, target, to="safetensors", overwrite=True, progress=write)
    assert names_below(target) == {"model.safetensors", "train.py"}


def test_a_file_of_the_user_that_comes_along_again_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(tmp_path / "a" / "model.safetensors", {"z": torch.zeros(2)})
    (tmp_path / "a" / "notes.txt").write_text("mine")
    migrate(tmp_path / "a", tmp_path / "b", to="bin")
    migrate(tmp_path / "a", tmp_path / "b", to="safetensors", overwrite=True)
    assert names_below(tmp_path / "b") == {"model.safetensors", "notes.txt"}


def test_an_empty_folder_is_taken(lone: Path) -> None:
    target = lone.parent / "b"
    target.mkdir()
    migrate(lone, target, to="safetensors")
    assert names_below(target) == {"model.safetensors"}
    (lone.parent / "c.safetensors").mkdir()
    with pytest.raises(UsageError, match="is a folder, and a file would take its place"):
        migrate(lone, lone.parent / "c.safetensors", to="safetensors")
    (lone.parent / "d").symlink_to(lone.parent / "c.safetensors")
    with pytest.raises(UsageError, match="exists"):
        migrate(lone, lone.parent / "d", to="safetensors")
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "b", "c.safetensors", "d"]


def test_the_root_of_the_disk_is_refused_without_walking_it(
    lone: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.scandir

    def scandir(path: str) -> object:
        seen.append(str(path))
        return real(path)

    (models.parent / "a").mkdir()
    write_safetensors(models.parent / "a" / "model.safetensors", {"z": torch.zeros(2)})
    monkeypatch.setattr("ckptfix.operations.migrate.standing.os.scandir", scandir)
    monkeypatch.setattr("ckptfix.operations.migrate.placing.os.walk", None)
    for place in (Path("/"), models):
        with pytest.raises(UsageError, match="exists; it holds more than a checkpoint; name a place"):
            migrate(models.parent / "a", place, to="bin")
    assert seen == ["/", str(models)]


@pytest.mark.parametrize("kind", ["a shard", "through a link", "the folder"])
def test_what_is_read_through_a_link_is_not_replaced(tmp_path: Path, kind: str) -> None:
    source, real = tmp_path / "src", tmp_path / "real"
    source.mkdir()
    real.mkdir()
    if kind != "the folder":
        write_safetensors(tmp_path / "a.safetensors", {"a": torch.ones(300), "b": torch.ones(300)})
        migrate(tmp_path / "a.safetensors", real, to="safetensors", max_shard_size=1300)
        place = real / "model-00002-of-00002.safetensors"
        for path in real.iterdir():
            (source / path.name).symlink_to(path)
        given = (real if kind == "a shard" else source) / "model.safetensors.index.json"
    else:
        write_safetensors(real / "model.safetensors", {"a": torch.ones(3)})
        (source / "model.safetensors").symlink_to("../real/model.safetensors")
        given, place = source, real
    before = {path: path.read_bytes() for path in real.iterdir()}
    to = "bin" if place == real else "safetensors"
    with pytest.raises(UsageError, match="is to be migrated; name another place"):
        migrate(given, place, to=to, dtype="bf16", overwrite=True)
    assert {path: path.read_bytes() for path in real.iterdir()} == before


def test_what_is_carried_or_left_out_through_a_link_is_not_replaced(tmp_path: Path) -> None:
    source, real = tmp_path / "src", tmp_path / "real"
    for folder in (source, real):
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", {"a": torch.ones(3)})
    for name in ("config.json", "pytorch_model.bin"):
        (real / name).write_text("{}")
        (source / name).symlink_to(real / name)
        if name != "config.json":
            (source / name).unlink()
            torch.save({"b": torch.ones(3)}, real / name)
            (source / name).symlink_to(real / name)
            (source / "config.json").unlink()
        before = names_below(real)
        with pytest.raises(
            UsageError, match=f"would be replaced, and .*real/{name}, which .*src/{name} leads to"
        ):
            migrate(source, real, to="safetensors", overwrite=True)
        assert names_below(real) == before


def test_nothing_is_written_into_a_folder_that_is_carried_through_a_link(tmp_path: Path) -> None:
    source, data = tmp_path / "src", tmp_path / "data"
    source.mkdir()
    data.mkdir()
    (data / "notes.txt").write_text("mine")
    write_safetensors(source / "model.safetensors", {"a": torch.ones(3)})
    (source / "data").symlink_to(data)
    with pytest.raises(UsageError, match=r"data/new lies inside .*src/data, which is to be migrated"):
        migrate(source, data / "new", to="bin")
    assert names_below(data) == {"notes.txt"}
    (source / "data").unlink()
    (source / "one.txt").symlink_to(data / "notes.txt")  # of a file alone its folder is not the source's
    migrate(source, data / "new", to="bin")
    assert names_below(data / "new") == {"pytorch_model.bin", "one.txt"}


@pytest.mark.parametrize(("link", "real"), [("checkpoints", "store"), ("ck", "disk/checkpoints")])
def test_checkpoints_behind_a_link_are_staged_beside_what_is_linked(
    lone: Path, link: str, real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lone.parent / "elsewhere" / real
    folder.mkdir(parents=True)
    (lone.parent / link).symlink_to(folder)
    seen: list[tuple[list[str], list[str]]] = []

    def look(count: int) -> None:
        seen.append((os.listdir(folder), os.listdir(folder.parent)))

    migrate(lone, lone.parent / link / "x", to="safetensors", progress=look)
    assert seen[0][0] == []
    assert any("ckptfix-migrating" in name for name in seen[0][1])
    assert digests_at(folder / "x") == digests_at(lone)
    assert os.listdir(folder.parent) == [folder.name]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second disk")
def test_checkpoints_that_are_a_disk_of_their_own_are_refused_before_anything_is_written(
    lone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = lone.parent / "checkpoints"
    checkpoints.mkdir()
    real = os.stat

    def stat(path: object, *args: object, **kwargs: object) -> os.stat_result:
        return real("/dev/shm" if path == checkpoints else path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.operations.migrate.staging.os.stat", stat)
    with pytest.raises(
        OperationError, match=r"work/checkpoints, where .*/work is on another disk.*nothing was"
    ):
        migrate(lone, checkpoints / "x", to="safetensors")
    monkeypatch.undo()
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "checkpoints"]
    assert os.listdir(checkpoints) == []

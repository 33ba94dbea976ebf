"""Where a new checkpoint may go, and what it may take the place of."""

import json
import os
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, OperationError, UsageError, migrate
from tests.conversion.making import digests_at, names_below, write_safetensors


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
    with pytest.raises(UsageError, match=r"would be lost: 'data\.csv', 'other\.safetensors', 'src/'"):
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
    write_safetensors(target / "model_1.safetensors", {"z": torch.zeros(2)})
    (target / "config.json").write_text("{}")
    (target / "pytorch_model_fsdp_0").mkdir()
    (target / "pytorch_model_fsdp_0" / ".metadata.tmp").write_text("")
    planned = migrate(lone, target, to="safetensors", overwrite=True, dry_run=True)
    assert planned.removed == ("config.json", "model_1.safetensors", "pytorch_model_fsdp_0/.metadata.tmp")
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
    monkeypatch.setattr("ckptfix.conversion.placing.os.scandir", scandir)
    monkeypatch.setattr("ckptfix.conversion.placing.os.walk", None)
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


@pytest.mark.skipif(not os.access("/proc", os.R_OK), reason="no second file system")
def test_checkpoints_that_are_a_disk_of_their_own_are_refused_before_anything_is_written(
    lone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = lone.parent / "checkpoints"
    checkpoints.mkdir()
    real = os.stat

    def stat(path: object, *args: object, **kwargs: object) -> os.stat_result:
        return real("/proc" if path == checkpoints else path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptfix.conversion.staged_folder.os.stat", stat)
    with pytest.raises(
        OperationError, match=r"work/checkpoints, where .*/work is on another disk.*nothing was"
    ):
        migrate(lone, checkpoints / "x", to="safetensors")
    monkeypatch.undo()
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "checkpoints"]
    assert os.listdir(checkpoints) == []


CHAINS = [
    "a file",
    "the source",
    "a lone file",
    "a link at the output",
    "a link at the output, of the source",
]


@pytest.mark.parametrize("kind", CHAINS)
def test_no_link_on_the_way_to_what_is_read_is_replaced(tmp_path: Path, kind: str) -> None:
    source, target, real = tmp_path / "src", tmp_path / "dst", tmp_path / "real"
    real.mkdir()
    write_safetensors(real / "model.safetensors", {"a": torch.ones(3)})
    if kind == "a file":
        source.mkdir()
        target.mkdir()
        (target / "model.safetensors").symlink_to("../real/model.safetensors")
        (source / "model.safetensors").symlink_to("../dst/model.safetensors")
    elif kind == "the source":
        target.mkdir()
        write_safetensors(target / "model.safetensors", {"a": torch.zeros(3)})
        (target / "pytorch_model.bin").symlink_to("../real")
        source.symlink_to("dst/pytorch_model.bin")
    elif kind == "a lone file":
        target = tmp_path / "dst.safetensors"
        target.symlink_to("real/model.safetensors")
        source = tmp_path / "in.safetensors"
        source.symlink_to("dst.safetensors")
    else:
        target.symlink_to("real")
        if kind == "a link at the output":
            source.mkdir()
            (source / "model.safetensors").symlink_to("../dst/model.safetensors")
        else:
            source.symlink_to("dst")
    before = digests_at(source)
    with pytest.raises(UsageError, match=r"which .* leads to, is to be migrated|is what is to be migrated"):
        migrate(
            source, target, to="safetensors" if kind == "a lone file" else "bin", dtype="bf16", overwrite=True
        )
    assert digests_at(source) == before
    assert target.is_symlink() == (kind not in ("a file", "the source"))


def test_links_that_lead_through_other_places_are_followed(tmp_path: Path) -> None:
    source, target, blobs = tmp_path / "src", tmp_path / "dst", tmp_path / "blobs"
    for folder in (source, target, blobs):
        folder.mkdir()
    write_safetensors(blobs / "1", {"a": torch.ones(3)})
    write_safetensors(target / "model.safetensors", {"a": torch.zeros(3)})
    (tmp_path / "hop").symlink_to("blobs/../blobs")
    (source / "model.safetensors").symlink_to("../hop/1")
    migrate(source, target, to="bin", overwrite=True)
    assert digests_at(target) == digests_at(source)


@pytest.mark.parametrize("named", ["../dst", "absolute", "../hop", "from the working directory"])
def test_the_model_that_an_adapter_needs_is_never_replaced(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "src", tmp_path / "dst"
    source.mkdir()
    target.mkdir()
    write_safetensors(source / "adapter_model.safetensors", {"l.lora_A.weight": torch.ones(2, 2)})
    write_safetensors(target / "adapter_model.safetensors", {"l.lora_A.weight": torch.ones(2, 2)})
    (tmp_path / "hop").symlink_to("dst")
    if named == "from the working directory":
        monkeypatch.chdir(tmp_path)
    name = {"absolute": str(target), "from the working directory": "dst"}.get(named, named)
    (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    with pytest.raises(
        UsageError, match=r"adapter_config\.json in .*src names it as the model that the adapter"
    ):
        migrate(source, target, to="bin", overwrite=True)
    assert names_below(target) == {"adapter_model.safetensors"}
    for other in ("bigscience/bloom", "\0", "\ud800", "x" * 5000, 7, ""):
        (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": other}))
        assert migrate(source, target, to="bin", overwrite=True, dry_run=True).removed


@pytest.mark.parametrize(
    "content", [b"my thesis" * 10, b"", b'{"text": 1}', b"\x80\x02}q\x00.", b"PK\x03\x04"], ids=len
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_lone_file_without_tensors_is_never_replaced(lone: Path, content: bytes, is_link: bool) -> None:
    target = lone.parent / "thesis.bin"
    (lone.parent / "text").write_bytes(content)
    if is_link:
        target.symlink_to("text")
    else:
        target.write_bytes(content)
    for overwrite, words in (
        (False, "name a place where nothing is$"),
        (True, "is not a bin file that holds tens"),
    ):
        with pytest.raises(UsageError, match=words):
            migrate(lone, target, to="bin", overwrite=overwrite)
    assert target.read_bytes() == content
    assert target.is_symlink() == is_link


def test_a_link_to_nothing_is_never_replaced(lone: Path) -> None:
    target = lone.parent / "b.bin"
    target.symlink_to("nowhere")
    with pytest.raises(UsageError, match="is not a bin file"):
        migrate(lone, target, to="bin", overwrite=True)
    assert os.readlink(target) == "nowhere"


@pytest.mark.parametrize("name", ["b", "thesis.docx", "b.safetensors"])
def test_a_lone_file_is_never_replaced_by_a_folder(lone: Path, name: str) -> None:
    target = lone.parent / name
    write_safetensors(target, {"z": torch.zeros(2)})
    before = target.read_bytes()
    with pytest.raises(UsageError, match=r"and a folder would take its place|is not of the format 'dcp'"):
        migrate(lone, target, to="dcp", overwrite=True)
    assert target.read_bytes() == before

"""Where a new checkpoint may go, and which old one it may replace: a folder that migrate wrote, as
it left it.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, OperationError, UsageError, migrate, repair, salvage, seal, undo
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.policy import Policy
from ckptfix.storage import staged
from ckptfix.storage.atomic import rename_to_free
from ckptfix.storage.paths import RECEIPT
from tests.conversion.making import digests_at, names_below, write_safetensors


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "a.bin"
    torch.save({"w": torch.ones(3)}, path)
    return path


@pytest.fixture
def old(lone: Path) -> Path:
    """A folder that an earlier migration wrote."""
    earlier = lone.parent.parent / "earlier"
    earlier.mkdir()
    write_safetensors(earlier / "model.safetensors", {"z": torch.zeros(2)})
    (earlier / "sub").mkdir()
    (earlier / "sub" / "notes.txt").write_text("mine")
    (earlier / "empty").mkdir()
    migrate(earlier, lone.parent / "b", to="bin")
    return lone.parent / "b"


def test_what_migrate_wrote_is_replaced_and_listed(lone: Path, old: Path) -> None:
    with pytest.raises(UsageError, match=r"b exists; .*, or replace it with --overwrite$"):
        migrate(lone, old, to="safetensors")
    planned = migrate(lone, old, to="safetensors", overwrite=True, dry_run=True)
    assert planned.removed == ("pytorch_model.bin", "sub/notes.txt")
    assert planned.as_json()["removed"] == list(planned.removed)
    assert migrate(lone, old, to="safetensors", overwrite=True).removed == planned.removed
    assert names_below(old) == {"model.safetensors"}
    assert digests_at(old) == digests_at(lone)
    assert migrate(lone, old, to="dcp", overwrite=True).removed == ("model.safetensors",)
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "b"]


def test_a_copy_that_keeps_times_and_a_sealed_one_are_replaced(lone: Path, old: Path) -> None:
    shutil.copytree(old, lone.parent / "c")
    assert seal(lone.parent / "c").written
    removed = migrate(lone, lone.parent / "c", to="safetensors", overwrite=True).removed
    assert removed == (".ckptfix/manifest.json", "pytorch_model.bin", "sub/notes.txt")


def rewrite(path: Path) -> None:
    path.write_bytes(b"M" * path.stat().st_size)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda b: (b / "train.py").write_text("code"), "'train.py'"),
    (lambda b: (b / "sub" / "more.txt").write_text("more"), "'sub/more.txt'"),
    (lambda b: rewrite(b / "sub" / "notes.txt"), "'sub/notes.txt'"),
    (lambda b: rewrite(b / "pytorch_model.bin"), "'pytorch_model.bin'"),
    (lambda b: os.truncate(b / "pytorch_model.bin", 10), "'pytorch_model.bin'"),
    (lambda b: os.utime(b / "pytorch_model.bin", ns=(1, 1)), "'pytorch_model.bin'"),
    (lambda b: replace_by_link(b / "pytorch_model.bin"), "'pytorch_model.bin'"),
    (lambda b: (b / "data").symlink_to(b / "sub"), "'data'"),
    (lambda b: (b / "gone").symlink_to("nowhere"), "'gone'"),
    (lambda b: os.mkfifo(b / "pipe"), "'pipe'"),
    (lambda b: (b / ".ckptfix" / "mine.txt").write_text("mine"), "'.ckptfix/mine.txt'"),
    (lambda b: (b / ".ckptfix" / "lock").symlink_to("nowhere"), "'.ckptfix/lock'"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=[str(n) for n in range(len(CHANGES))])
def test_a_folder_with_anything_that_migrate_did_not_write_is_never_replaced(
    lone: Path, old: Path, change: Callable[[Path], object], named: str
) -> None:
    change(old)
    before = names_below(old)
    with pytest.raises(UsageError) as error:
        migrate(lone, old, to="safetensors", overwrite=True)
    assert (
        f"added or changed after ckptfix migrate wrote it: {named}; --overwrite replaces only"
        in str(error.value)
    )
    assert str(error.value).endswith(f"remove it yourself: rm -r {old}")
    with pytest.raises(
        UsageError,
        match=r"exists; it is a folder, so choose a path in it, such as .*b/a\.safetensors$",
    ):
        migrate(lone, old, to="safetensors")
    assert names_below(old) == before


@pytest.mark.parametrize(
    "receipt",
    [None, "", "[]", "{}", '{"version": 2, "files": {}}', '{"version": 1, "files": 3}', "link"],
)
def test_a_checkpoint_that_migrate_did_not_write_is_never_replaced(
    lone: Path, receipt: str | None
) -> None:
    target = lone.parent / "b"
    (target / ".ckptfix").mkdir(parents=True)
    write_safetensors(target / "model.safetensors", {"z": torch.zeros(2)})
    if receipt == "link":
        (lone.parent / "r.json").write_text('{"version": 1, "files": {}}')
        (target / RECEIPT).symlink_to(lone.parent / "r.json")
    elif receipt is not None:
        (target / RECEIPT).write_text(receipt)
    for overwrite, words in (
        (True, "ckptfix migrate did not write it; .*: rm -r"),
        (False, "exists; .*safetensors$"),
    ):
        with pytest.raises(UsageError, match=words):
            migrate(lone, target, to="safetensors", overwrite=overwrite)
    assert names_below(target) == {"model.safetensors"}


def test_what_was_repaired_or_salvaged_is_never_replaced(lone: Path) -> None:
    source = lone.parent / "s"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {"w": torch.ones(3)})
    write_safetensors(source / "model_1.safetensors", {"module.w": torch.ones(3)})
    target = lone.parent / "b"
    migrate(source, target, to="safetensors", allow_damage=True)
    assert repair(target, policy=Policy(keep={Role.MODEL: 1})).status == 0
    with pytest.raises(UsageError, match=r"added or changed after .*0001\.done"):
        migrate(lone, target, to="bin", overwrite=True)
    undo(target)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-4])
    salvage(source, lone.parent / "c")
    with pytest.raises(UsageError, match="ckptfix migrate did not write it"):
        migrate(lone, lone.parent / "c", to="bin", overwrite=True)


def test_a_receipt_below_is_copied_with_its_folder_and_stays_true(lone: Path, old: Path) -> None:
    source = lone.parent / "s"
    (source / "sub").mkdir(parents=True)
    write_safetensors(source / "model.safetensors", {"z": torch.zeros(2)})
    shutil.copytree(old / "sub", source / "sub" / "x")
    migrate(source, lone.parent / "c", to="bin")
    shutil.copytree(lone.parent / "c", source / "kept")
    assert not [
        one
        for one in migrate(source, lone.parent / "d", to="dcp").left_out
        if ".ckptfix" in one.what
    ]


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing", "pipe"])
def test_what_is_not_a_folder_is_never_replaced(lone: Path, old: Path, kind: str) -> None:
    target = lone.parent / "t.safetensors"
    if kind == "file":
        write_safetensors(target, {"z": torch.zeros(2)})
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to("b" if kind == "link to a folder" else "nowhere")
    before = os.lstat(target)
    with pytest.raises(UsageError, match=r"t\.safetensors exists; .*") as error:
        migrate(lone, target, to="safetensors")
    assert "--overwrite" not in str(error.value)
    what = "a symbolic link" if kind.startswith("link") else "not a folder"
    with pytest.raises(
        UsageError, match=rf"is {what}; .*; choose another path, or remove it yourself: rm /"
    ):
        migrate(lone, target, to="safetensors", overwrite=True)
    now = os.lstat(target)
    # All but st_atime: following a link is an access.
    assert (now[:7], now[8:]) == (before[:7], before[8:])


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_is_taken(lone: Path, overwrite: bool) -> None:
    target = lone.parent / "b"
    target.mkdir()
    assert migrate(lone, target, to="safetensors", overwrite=overwrite).removed == ()
    assert names_below(target) == {"model.safetensors"}
    (lone.parent / "c.safetensors").mkdir()
    with pytest.raises(UsageError, match=r"is a folder \(expected a path for a new file\)"):
        migrate(lone, lone.parent / "c.safetensors", to="safetensors", overwrite=overwrite)
    (lone.parent / "d").symlink_to(lone.parent / "c.safetensors")
    with pytest.raises(UsageError, match=r"exists|is a symbolic link"):
        migrate(lone, lone.parent / "d", to="safetensors", overwrite=overwrite)
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "b", "c.safetensors", "d"]


def test_a_folder_that_migrate_wrote_is_not_replaced_by_a_file(lone: Path, old: Path) -> None:
    old.rename(lone.parent / "b.bin")
    with pytest.raises(UsageError, match=r"is a folder \(expected a path for a new file\)"):
        migrate(lone, lone.parent / "b.bin", to="bin", overwrite=True)
    assert "pytorch_model.bin" in names_below(lone.parent / "b.bin")


def test_the_root_of_the_disk_is_refused_without_walking_it(
    lone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lone.parent / "s"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {"z": torch.zeros(2)})
    monkeypatch.setattr("ckptfix.conversion.destination.os.walk", None)
    with pytest.raises(UsageError, match="is inside /; choose another path"):
        migrate(source, "/", to="bin", overwrite=True)


def test_a_folder_in_use_is_not_replaced(
    lone: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(old / "sub")
    with pytest.raises(UsageError, match="is a mount point, or it contains the current folder"):
        migrate(lone, old, to="bin", overwrite=True)


@pytest.mark.parametrize("change", ["comes", "goes", "changes"])
def test_what_happens_meanwhile_in_a_folder_that_is_replaced_is_seen(
    lone: Path, old: Path, change: str
) -> None:
    def write(count: int) -> None:
        if change == "goes":
            (old / "sub" / "notes.txt").unlink(missing_ok=True)
        else:
            (old / ("train.py" if change == "comes" else "sub/notes.txt")).write_text("code")

    with pytest.raises(
        ChangedError, match="changed during the migration; nothing was written there"
    ):
        migrate(lone, old, to="safetensors", overwrite=True, progress=write)
    assert "pytorch_model.bin" in names_below(old)
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "b"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_that_comes_after_the_last_look_is_not_deleted(
    lone: Path, old: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(staged, "exchange", lambda one, other: False)

    def late(source: Path, target: Path) -> None:
        if target.exists():
            (old / "mine.txt").write_text("mine")
        rename_to_free(source, target)

    monkeypatch.setattr(staged, "rename_to_free", late)
    with pytest.raises(
        ChangedError, match="changed during the migration; nothing was written there"
    ):
        migrate(lone, old, to="safetensors", overwrite=True)
    assert (old / "mine.txt").read_text() == "mine"
    assert (old / "pytorch_model.bin").exists()
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "b"]


def test_a_pipe_that_takes_the_place_meanwhile_stays(lone: Path, old: Path) -> None:
    def swap(count: int) -> None:
        if old.is_dir():
            shutil.rmtree(old)
            os.mkfifo(old)

    with pytest.raises(ChangedError, match="changed during the migration; nothing was written"):
        migrate(lone, old, to="safetensors", overwrite=True, progress=swap)
    assert old.is_fifo()


@pytest.mark.parametrize(
    "kind", ["a shard", "a file", "a folder", "through other places", "an index"]
)
def test_what_the_source_reads_there_is_not_replaced(lone: Path, kind: str) -> None:
    source, real = lone.parent / "src", lone.parent / "b"
    source.mkdir()
    write_safetensors(lone.parent / "m.safetensors", {"a": torch.ones(300), "b": torch.ones(300)})
    migrate(lone.parent / "m.safetensors", real, to="safetensors", max_shard_size=1300)
    if kind == "a folder":
        write_safetensors(source / "model.safetensors", {"a": torch.ones(3)})
        (source / "data").symlink_to(real)
    else:
        (lone.parent / "hop").symlink_to("b/../b")
        for name in names_below(real):
            (source / name).symlink_to(
                lone.parent / ("hop" if kind == "through other places" else "b") / name
            )
        if kind == "a file":
            for name in names_below(real) - {"model-00001-of-00002.safetensors"}:
                (source / name).unlink()
                shutil.copy(real / name, source / name)
    before = {name: (real / name).read_bytes() for name in names_below(real)}
    given = (real if kind == "an index" else source) / "model.safetensors.index.json"
    with pytest.raises(
        UsageError,
        match=r"of the source, resolves to a path inside it; choose another|is inside .*; choose",
    ):
        migrate(
            given if kind in ("a shard", "an index") else source, real, to="bin", overwrite=True
        )
    assert {name: (real / name).read_bytes() for name in names_below(real)} == before


@pytest.mark.parametrize("end", ["", "/b"])
def test_the_source_by_another_name_is_not_replaced(lone: Path, old: Path, end: str) -> None:
    (lone.parent / "link").symlink_to("b" if not end else ".")
    before = names_below(old)
    for path, output in ((lone.parent / f"link{end}", old), (old, lone.parent / f"link{end}")):
        with pytest.raises(UsageError, match="is the source of the migration"):
            migrate(path, output, to="safetensors", overwrite=True)
    assert names_below(old) == before


def test_nothing_is_written_into_a_folder_that_is_carried_through_a_link(tmp_path: Path) -> None:
    source, data = tmp_path / "src", tmp_path / "data"
    source.mkdir()
    data.mkdir()
    (data / "notes.txt").write_text("mine")
    write_safetensors(source / "model.safetensors", {"a": torch.ones(3)})
    (source / "data").symlink_to(data)
    with pytest.raises(
        UsageError, match=r"data/new is inside .*src/data, which is part of the source"
    ):
        migrate(source, data / "new", to="bin")
    assert names_below(data) == {"notes.txt"}
    (source / "data").unlink()
    # Of a file alone its folder is not the source's.
    (source / "one.txt").symlink_to(data / "notes.txt")
    migrate(source, data / "new", to="bin")
    assert names_below(data / "new") == {"pytorch_model.bin", "one.txt"}


@pytest.mark.parametrize("named", ["../b", "absolute", "../hop", "from the working directory"])
def test_the_model_that_an_adapter_needs_is_never_replaced(
    old: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = old.parent / "src"
    source.mkdir()
    write_safetensors(source / "adapter_model.safetensors", {"l.lora_A.weight": torch.ones(2, 2)})
    (old.parent / "hop").symlink_to("b")
    if named == "from the working directory":
        monkeypatch.chdir(old.parent)
    name = {"absolute": str(old), "from the working directory": "b"}.get(named, named)
    (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    with pytest.raises(
        UsageError, match=r"contains the base model that adapter_config\.json in .*src refers to"
    ):
        migrate(source, old, to="bin", overwrite=True)
    assert "pytorch_model.bin" in names_below(old)
    for other in ("bigscience/bloom", "\0", "\ud800", "x" * 5000, 7, ""):
        (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": other}))
        assert migrate(source, old, to="bin", overwrite=True, dry_run=True).removed


@pytest.mark.parametrize("write", [partial(migrate, to="safetensors"), salvage])
def test_a_link_that_leads_to_itself_is_named(lone: Path, write: Callable[..., object]) -> None:
    (lone.parent / "loop").symlink_to("loop")
    with pytest.raises(
        UsageError, match=r"work/loop is a symbolic link that leads to itself; next: ls -l "
    ):
        write(lone, lone.parent / "loop" / "b")


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
    assert any("ckptfix-writing" in name for name in seen[0][1])
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

    monkeypatch.setattr("ckptfix.storage.staged.os.stat", stat)
    with pytest.raises(
        OperationError, match=r"in .*work/checkpoints, .*/work is on another disk; nothing was"
    ):
        migrate(lone, checkpoints / "x", to="safetensors")
    monkeypatch.undo()
    assert sorted(os.listdir(lone.parent)) == ["a.bin", "checkpoints"]
    assert os.listdir(checkpoints) == []

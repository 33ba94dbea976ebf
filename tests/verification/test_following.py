"""The manifest stays true through every repair, its undo, and a kill in between."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ckptfix import ChangedError, Keys, Policy, check, repair, seal, undo, verify
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, missing_files, read_manifest
from ckptfix.storage.lock import folder_lock
from ckptfix.storage.paths import MANIFEST
from ckptfix.verification.verify_report import Kind, Outcome
from tests.repairs.builders import write_safetensors
from tests.sampling import PARTS, sampled
from tests.storage.crash import Fault, points, strike
from tests.storage.folders import recover

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
SCENARIOS: dict[str, tuple[str, Policy]] = {
    "drop": ("wrapper-safetensors", Policy()),
    "drop and renumber": ("student-teacher-wrapper-bin", Policy()),
    "rename in place": ("lone-nested-safetensors", Policy()),
    "new file": ("lone-nested-safetensors", Policy(atomic=True)),
    "append to a zip": ("lone-nested-train", Policy()),
    "bare zip": ("single-level-bin", Policy(keys=Keys.BARE)),
    "patch a legacy file": ("lone-nested-legacy", Policy()),
    "shards and index": ("sharded-gpt2-nested", Policy()),
}


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def make(folder: Path, fixture: str, *, saved: bool = False) -> Path:
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder)
    seal(folder, force=True)
    if saved:  # as if the guarded save_state had written it
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"] = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
        }
        manifest["world_size"] = 2
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("saved", [False, True], ids=["sealed", "saved"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_repair_every_tensor_matches_and_no_file_is_called_right_that_was_not_read(
    tmp_path: Path, name: str, saved: bool
) -> None:
    fixture, policy = SCENARIOS[name]
    folder = make(tmp_path / "c", fixture, saved=saved)
    before, sealed = (folder / MANIFEST).read_bytes(), verify(folder)
    assert sealed.count(Kind.TENSOR)[Outcome.DIFFER] == 0
    old = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    if saved and fixture.startswith(
        "lone-nested"
    ):  # the keys are those that the save recorded: its script's own
        policy = replace(policy, keys=Keys.BARE)
    assert repair(folder, policy=policy).steps
    manifest = manifest_of(folder)
    assert set(manifest.sha256) == {path.name for path in folder.iterdir() if path.is_file()}
    assert missing_files(folder, manifest) == []
    report = verify(folder)
    assert report.status == 0, [item for item in report.items if item.outcome is not Outcome.MATCH]
    tensors = report.count(Kind.TENSOR)
    assert tensors[Outcome.MATCH] > 0
    assert tensors[Outcome.NOT_CHECKED] == 0
    for item in report.items:
        if item.kind is Kind.FILE and item.outcome is Outcome.NOT_CHECKED:
            assert (folder / item.name).read_bytes() != old.get(item.name)
            assert "since a repair changed it" in item.text
    assert seal(folder).status == 0
    assert verify(folder).count(Kind.FILE)[Outcome.NOT_CHECKED] == 0
    if manifest_of(folder) != manifest:
        undo(folder)
    undo(folder)
    assert (folder / MANIFEST).read_bytes() == before
    assert verify(folder).items == sealed.items
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


def test_what_a_save_recorded_follows(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "student-teacher-wrapper-bin" / "checkpoint", folder)
    models = tuple(
        ManifestEntry(index=index, file=f"pytorch_model{end}.bin", type=kind)
        for index, (end, kind) in enumerate((("", "S"), ("_1", "S"), ("_2", "T")))
    )
    optimizer = ManifestEntry(index=0, file="optimizer.bin", type="AdamW", models=(1, 2))
    schedulers = (ManifestEntry(index=0, file="scheduler.bin", type="StepLR", optimizer=0),)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = Manifest(
        versions={},
        world_size=2,
        step=5,
        models=models,
        optimizers=(optimizer,),
        schedulers=schedulers,
        files=files,
    )
    (folder / ".ckptfix").mkdir()
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    repair(folder)
    after = manifest_of(folder)
    assert [(one.index, one.file, one.type) for one in after.models] == [
        (0, "pytorch_model.bin", "S"),
        (1, "pytorch_model_1.bin", "T"),
    ]
    assert after.optimizers[0].models == (0, 1)
    assert after.schedulers == schedulers
    assert after.sha256 == {}
    assert after.files == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
    }


def test_an_optimizer_follows_a_duplicate_to_the_new_place_of_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "student-teacher-wrapper-bin" / "checkpoint", folder)
    shutil.copy(folder / "pytorch_model_2.bin", folder / "pytorch_model_3.bin")
    models = tuple(
        ManifestEntry(index=index, file=f"pytorch_model{end}.bin", type="")
        for index, end in enumerate(("", "_1", "_2", "_3"))
    )
    optimizer = ManifestEntry(index=0, file="optimizer.bin", type="AdamW", models=(1, 3))
    manifest = Manifest(
        versions={}, world_size=2, step=5, models=models, optimizers=(optimizer,),
        files={path.name: path.stat().st_size for path in folder.iterdir()},
    )  # fmt: skip
    (folder / ".ckptfix").mkdir()
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    repair(folder, policy=Policy(allow=frozenset({"identical-models"})))
    after = manifest_of(folder)
    assert [entry.file for entry in after.models] == ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert after.optimizers[0].models == (0, 1)


def test_names_keys_and_aliases_follow_a_rename(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", {"module.module.a": b"1234", "module.module.b": b"56"}
    )
    seal(tmp_path, force=True)
    document = json.loads((tmp_path / MANIFEST).read_text())
    document["models"][0]["aliases"] = {"module.module.c": "module.module.a"}
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    old = manifest_of(tmp_path).models[0]
    repair(tmp_path)
    new = manifest_of(tmp_path).models[0]
    assert list(new.digests) == ["module.a", "module.b"]
    assert list(new.digests.values()) == list(old.digests.values())
    assert new.aliases == {"module.c": "module.a"}
    assert new.keys != old.keys
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shutil.copy(tmp_path / "model.safetensors", fresh)
    seal(fresh)
    assert manifest_of(fresh).models[0].keys == new.keys


def test_a_file_that_changed_before_the_repair_still_differs_after_it(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", {"module.module.a": b"1234", "module.module.b": b"56"}
    )
    seal(tmp_path, force=True)
    write_safetensors(
        tmp_path / "model.safetensors", {"module.module.a": b"1294", "module.module.b": b"56"}
    )
    repair(tmp_path)
    report = verify(tmp_path)
    assert report.status == 1
    assert [item.name for item in report.items if item.outcome is Outcome.DIFFER] == ["module.a"]


def test_a_lone_file_that_is_repaired_changes_the_manifest_of_its_folder(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        write_safetensors(
            tmp_path / name, {"module.module.a": name.encode(), "module.module.b": b"56"}
        )
    seal(tmp_path, force=True)
    before = (tmp_path / MANIFEST).read_bytes()
    repair(tmp_path / "one.safetensors", policy=Policy(allow=frozenset({"nested-prefix"})))
    assert verify(tmp_path).count(Kind.TENSOR) == {
        Outcome.MATCH: 4,
        Outcome.DIFFER: 0,
        Outcome.NOT_CHECKED: 0,
    }
    seal(tmp_path, force=True)
    with pytest.raises(ChangedError, match="undo 2 first"):
        undo(tmp_path / "one.safetensors")
    undo(tmp_path)
    undo(tmp_path / "one.safetensors")
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_a_seal_after_a_repair_goes_before_the_repair_does(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "one.safetensors", {"module.module.a": b"1234", "module.module.b": b"56"}
    )
    repair(tmp_path / "one.safetensors")
    seal(tmp_path)
    with pytest.raises(ChangedError, match="undo 2 first"):
        undo(tmp_path / "one.safetensors")
    undo(tmp_path)
    undo(tmp_path / "one.safetensors")
    assert not (tmp_path / ".ckptfix").exists()


def test_a_copy_gets_a_manifest_that_is_true_of_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", "student-teacher-wrapper-safetensors")
    before = (folder / MANIFEST).read_bytes()
    repair(folder, output=tmp_path / "copy")
    assert (folder / MANIFEST).read_bytes() == before
    report = verify(tmp_path / "copy")
    assert report.status == 0
    assert report.count(Kind.TENSOR)[Outcome.MATCH] == 8
    assert [path.name for path in (tmp_path / "copy" / ".ckptfix").iterdir()] == ["manifest.json"]


def test_a_manifest_that_cannot_be_understood_is_left_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", "wrapper-safetensors")
    (folder / MANIFEST).write_text("{}")
    assert repair(folder).status == 0
    assert (folder / MANIFEST).read_text() == "{}"


def test_a_manifest_behind_a_link_is_replaced_and_put_back(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", "wrapper-safetensors")
    (folder / MANIFEST).rename(tmp_path / "kept.json")
    before = (tmp_path / "kept.json").read_bytes()
    (folder / MANIFEST).symlink_to("../../kept.json")
    repair(folder)
    assert (tmp_path / "kept.json").read_bytes() == before
    assert verify(folder).status == 0
    undo(folder)
    assert (folder / MANIFEST).is_symlink()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_anywhere_folder_and_manifest_are_old_or_new_together(
    tmp_path: Path, verb: str
) -> None:
    source = make(tmp_path / "source", "student-teacher-wrapper-safetensors")
    if verb == "undo":
        repair(source)

    def acting(folder: Path) -> Callable[[], None]:
        def run() -> None:
            repair(folder) if verb == "repair" else undo(folder)

        return run

    def fresh(name: str) -> Path:
        shutil.copytree(source, tmp_path / name)
        for path in (tmp_path / name).rglob("*"):  # times tell whether an undo is allowed
            status = (source / path.relative_to(tmp_path / name)).stat()
            assert path.stat().st_mtime_ns == status.st_mtime_ns
        return tmp_path / name

    def seen(folder: Path) -> dict[str, bytes]:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return {**files, MANIFEST: (folder / MANIFEST).read_bytes()}

    before, whole = seen(source), fresh("whole")
    total = len(points(acting(whole)))
    after = seen(whole)
    assert total > 10
    assert before != after
    for at in sampled(range(total)):
        folder = fresh(str(at))
        strike(acting(folder), at, Fault.KILL_AFTER if at // PARTS % 2 else Fault.TORN)
        with folder_lock(folder):
            recover(folder)
        assert seen(folder) in (before, after), at
        report = verify(folder)
        assert all(item.outcome is not Outcome.DIFFER for item in report.items), at
        assert "interrupted-repair" not in {finding.code for finding in check(folder).findings}
        shutil.rmtree(folder)

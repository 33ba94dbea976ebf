"""A checkpoint that was repaired in one place and is looked at in another: in its store, among its
neighbours, in the folder to which it was downloaded.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.conversion.uploading import upload
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.policy import Keys, Policy
from ckptfix.errors import JournalError, OperationError, UsageError
from ckptfix.storage import object_backend, stores
from ckptfix.storage.paths import COMMITTED
from ckptfix.storage.stores import Store, open_store
from tests.stores.servers import QUICK
from tests.training.killing import in_child

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
DOUBLED = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"
PAIRS = FIXTURES / "pairs-twice" / "checkpoint"
DCP = FIXTURES.parent / "dcp-2.13.0" / "fsdp2-doubled" / "checkpoint"
ONE = Policy(keep={Role.MODEL: 1})
SHARDED = FIXTURES / "sharded-gpt2" / "checkpoint"


@pytest.fixture
def run_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new prefix in the memory of this process, for checkpoints of a run."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return f"memory://{os.urandom(6).hex()}/run"


def put(folder: Path, url: str) -> str:
    store = open_store(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())
    return url


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.read(key, 0, info.size) for key, info in store.list().items()}


def download(url: str, folder: Path) -> Path:
    for key, data in contents(open_store(url)).items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return folder


def without_journal(url: str) -> None:
    """Delete the records of repairs, as the messages of an undo that is refused advise."""
    store = open_store(url)
    for key in store.list():
        if key.startswith(".ckptfix/0"):
            store.delete(key)


def errors(path: object) -> list[str]:
    return [
        finding.code
        for finding in ckptfix.check(str(path)).findings
        if finding.severity is not Severity.NOTE
    ]


def repaired_and_downloaded(run_url: str, target: Path) -> Path:
    """Repair the second of three checkpoints in a store, download all, and return its folder."""
    for number in range(3):
        put(DOUBLED, f"{run_url}/checkpoint_{number}")
    ckptfix.repair(f"{run_url}/checkpoint_1", transfer=True)
    for number in range(3):
        download(f"{run_url}/checkpoint_{number}", target / f"checkpoint_{number}")
    return target / "checkpoint_1"


def test_a_repair_in_a_store_among_neighbours(run_url: str, tmp_path: Path) -> None:
    for number in range(3):
        put(DOUBLED, f"{run_url}/checkpoint_{number}")
    middle = f"{run_url}/checkpoint_1"
    receipt = ckptfix.repair(middle, transfer=True)
    assert receipt.status == 0, str(receipt)
    assert ckptfix.check(middle).status == 0
    assert ckptfix.repair(middle, policy=ONE, transfer=True).steps == ()
    for number in range(3):
        download(f"{run_url}/checkpoint_{number}", tmp_path / f"checkpoint_{number}")
    assert ckptfix.check(tmp_path / "checkpoint_1").status == 0
    # What no repair took away is missing.
    open_store(middle).delete("optimizer.bin")
    assert ckptfix.check(middle).status == 1


def test_what_a_repair_did_not_change_is_missed(tmp_path: Path) -> None:
    for number in range(3):
        shutil.copytree(PAIRS, tmp_path / f"checkpoint_{number}")
    middle = tmp_path / "checkpoint_1"
    receipt = ckptfix.repair(middle)
    changed = {str(path) for path in middle.iterdir()}
    assert receipt.steps
    assert ckptfix.check(middle).status == receipt.status
    kept = sorted(name for name in changed if Path(name).name.startswith("scheduler"))[-1]
    Path(kept).unlink()
    assert "incomplete-checkpoint" in [finding.code for finding in ckptfix.check(middle).findings]


def test_a_file_that_a_repair_left_is_missed(run_url: str, tmp_path: Path) -> None:
    """The corrected script fails without it, and no other file shows that it was there."""
    lone = shutil.copytree(DOUBLED, tmp_path / "lone")
    assert ckptfix.repair(lone).status == 0
    assert ckptfix.check(lone).status == 0
    (lone / "model_1.safetensors").unlink()
    (finding,) = ckptfix.check(lone).findings
    assert str(finding) == "model_1.safetensors is missing: repair 1 left it in the folder"
    url = put(DOUBLED, f"{run_url}/lone")
    ckptfix.repair(url, transfer=True)
    open_store(url).delete("model_1.safetensors")
    assert [str(one) for one in ckptfix.check(url).findings] == [str(finding)]


@pytest.mark.parametrize("has_journal", [True, False])
def test_an_upload_that_was_repaired_lacks_nothing(
    run_url: str, tmp_path: Path, has_journal: bool
) -> None:
    url = f"{run_url}/checkpoint_1"
    upload(DOUBLED, url)
    before = contents(open_store(url))
    assert ckptfix.repair(url, transfer=True).status == 0
    if not has_journal:
        without_journal(url)
    assert ckptfix.check(url).status == 0
    folder = download(url, tmp_path / "checkpoint_1")
    assert ckptfix.check(folder).status == 0
    assert ckptfix.latest_checkpoint(tmp_path) == folder
    assert ckptfix.seal(folder).written
    os.unlink(folder / "model_1.safetensors")
    assert ckptfix.check(folder).status == 1
    if has_journal:
        with pytest.raises(UsageError, match=r"changed objects in a store .* only be undone there"):
            ckptfix.undo(download(url, tmp_path / "again"))
        ckptfix.undo(url, transfer=True)
        assert contents(open_store(url)) == before


def test_a_repaired_copy_of_an_upload_in_its_store(run_url: str) -> None:
    url, copy = f"{run_url}/checkpoint_1", f"{run_url}-repaired/checkpoint_1"
    upload(DOUBLED, url)
    assert ckptfix.repair(url, output=copy, transfer=True).status == 0
    assert ckptfix.check(copy).status == 0
    objects = json.loads(contents(open_store(copy))[COMMITTED])["objects"]
    assert not objects, "the marker of the copy is its own"


def test_a_file_that_goes_after_a_repair_is_missing(tmp_path: Path) -> None:
    accelerator = ckptfix.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for number in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        accelerator.save_state(str(tmp_path / f"checkpoint_{number}"))
    folder = tmp_path / "checkpoint_2"
    assert ckptfix.repair(folder, policy=Policy(keys=Keys.DDP)).status == 0
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.is_of_a_save
    assert errors(folder) == []
    assert ckptfix.latest_checkpoint(tmp_path) == folder
    for name in ("scheduler.bin", "model.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        assert "missing-file" in errors(folder), name
        with pytest.warns(UserWarning, match=f"{name} is missing"):
            assert ckptfix.latest_checkpoint(tmp_path) == tmp_path / "checkpoint_1"
        (folder / name).write_bytes(data)


@pytest.fixture
def half_done(run_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, Path]:
    """URL of a checkpoint whose repair was killed after its first name, and a download of it."""
    url = put(PAIRS, f"{run_url}/checkpoint_1")
    place, placed = object_backend._place, []

    def killed(*words: object) -> object:
        placed.append(words)
        if len(placed) > 1:
            raise KeyboardInterrupt
        return place(*words)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(object_backend, "_place", killed)
        patched.setattr(object_backend, "_AT_ONCE", 1)
        with pytest.raises(KeyboardInterrupt):
            ckptfix.repair(url, transfer=True)
    return url, download(url, tmp_path / "run" / "checkpoint_1")


def test_a_download_of_a_repair_that_was_cut_short(half_done: tuple[str, Path]) -> None:
    url, folder = half_done
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert errors(url)[0] == errors(folder)[0] == "interrupted-repair"
    (finding,) = (
        finding
        for finding in ckptfix.check(folder).findings
        if finding.code == "interrupted-repair"
    )
    assert "in that store" in finding.advice
    with pytest.raises(UsageError, match="a repair was interrupted"):
        ckptfix.latest_checkpoint(folder.parent)
    for verb in (ckptfix.repair, ckptfix.undo):
        with pytest.raises(JournalError, match="downloaded from a store in which repair"):
            verb(folder)
    assert not ckptfix.seal(folder).written
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # There it is finished.
    assert ckptfix.repair(url, transfer=True).recovered
    assert "interrupted-repair" not in errors(url)


def test_a_pipe_in_a_downloaded_journal(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_1"
    shutil.copytree(DOUBLED, folder)
    journal = folder / ".ckptfix" / "0001.objects"
    journal.mkdir(parents=True)
    os.mkfifo(journal / "state.json")
    assert "doubled-model" in errors(folder)


def test_an_index_of_shards_next_to_the_prefix(run_url: str, tmp_path: Path) -> None:
    """safetensors reads the shards that it lists; a repair took those in the folder."""
    base, folder = tmp_path / "base", tmp_path / "ck"
    shutil.copytree(SHARDED, base)
    shutil.copytree(SHARDED, folder)
    for path in folder.glob("*.safetensors"):
        stale = {key: value * 0 - 7 for key, value in load_file(path).items()}
        save_file(stale, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {key: f"../base/{name}" for key, name in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    put(base, f"{run_url}/base")
    url = put(folder, f"{run_url}/ck")
    before = contents(open_store(url))
    for place in (folder, url):
        assert ckptfix.check(str(place)).status == 3, place
        with pytest.raises(OperationError, match=r"in another folder \('\.\./base'\)"):
            ckptfix.repair(str(place), transfer=True)
    assert contents(open_store(url)) == before
    # Here it is known that none is there.
    shutil.rmtree(base)
    assert errors(folder) == ["index-mismatch"]


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_an_index_of_shards_that_may_not_be_looked_at(tmp_path: Path) -> None:
    folder, base = tmp_path / "ck", tmp_path / "base"
    shutil.copytree(SHARDED, folder)
    shutil.copytree(SHARDED, base)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {key: f"../base/{name}" for key, name in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    base.chmod(0o700)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    # Imports what a check needs: the other user may not read our modules.
    ckptfix.check(folder)

    def look() -> None:
        os.setuid(65534)
        os._exit(ckptfix.check(folder).status)

    # An error in a bare fork went on with the tests in the child, and the test waited for ever.
    assert os.waitstatus_to_exitcode(in_child(look)) == 3


def test_a_downloaded_journal_without_the_plan_of_a_complete_repair(
    run_url: str, tmp_path: Path
) -> None:
    """What it changed is not known then, and nothing is missed."""
    folder = repaired_and_downloaded(run_url, tmp_path)
    journal = folder / ".ckptfix" / "0001.objects"
    (journal / "plan").unlink()
    assert errors(folder) == []
    assert ckptfix.repair(folder).status == 0
    (journal / "state.json").write_bytes(b"{}")
    assert errors(folder)[0] == "interrupted-repair"
    report = "\n".join(map(str, ckptfix.check(folder).lines()))
    assert "*.objects" in report
    assert "ckptfix repair" not in report
    (journal / "state.json").unlink()
    with pytest.raises(UsageError, match="there is no repair to undo"):
        ckptfix.undo(folder)


def test_a_folder_that_a_repair_took_away_among_neighbours(run_url: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(DCP, save)
    for path in DOUBLED.glob("random_states_*.pkl"):
        shutil.copy(path, save)
    two = Policy(keep={Role.MODEL: 2})
    for number in range(3):
        put(save, f"{run_url}/checkpoint_{number}")
        shutil.copytree(save, tmp_path / "run" / f"checkpoint_{number}")
    middle = f"{run_url}/checkpoint_1"
    assert ckptfix.repair(middle, policy=two, transfer=True).steps
    assert "incomplete-checkpoint" not in errors(middle)
    folder = tmp_path / "run" / "checkpoint_1"
    assert ckptfix.repair(folder, policy=two).steps
    assert "incomplete-checkpoint" not in errors(folder)
    for path in folder.iterdir():
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    assert "incomplete-checkpoint" not in errors(folder)
    shutil.rmtree(folder / "optimizer_0")
    assert "incomplete-checkpoint" in errors(folder)


def test_a_repair_of_a_download_follows_that_of_its_store(run_url: str, tmp_path: Path) -> None:
    """The store moves model_2 to the name that the folder then takes away."""
    folder = repaired_and_downloaded(run_url, tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "model_1.safetensors")
    receipt = ckptfix.repair(folder, policy=ONE)
    assert "delete model_1.safetensors" in "".join(map(str, receipt.steps))
    assert receipt.status == 0, str(receipt)
    assert ckptfix.undo(folder).transaction == 1


def test_a_seal_in_a_store_hides_no_repair_of_the_uploaded_folder(
    run_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint_1"
    shutil.copytree(DOUBLED, folder)
    ckptfix.repair(folder)
    for number in (0, 2):
        put(DOUBLED, f"{run_url}/checkpoint_{number}")
    url = put(folder, f"{run_url}/checkpoint_1")
    assert ckptfix.check(url).status == 0
    ckptfix.repair(url, policy=Policy(keys=Keys.DDP), transfer=True)
    assert ckptfix.check(url).status == 0
    assert ckptfix.undo(url, transfer=True).transaction == 1
    with pytest.raises(UsageError, match="changed the folder before the upload"):
        ckptfix.undo(url, transfer=True)

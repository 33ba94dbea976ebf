"""Indexes that list paths, and not only names of files: transformers and accelerate follow them,
diffusers does not.

Paths that lead to files in the folder are read. Those that lead elsewhere are not, and the check is
not finished.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import check, latest_checkpoint, repair, salvage
from ckptfix.errors import OperationError, UsageError
from tests.diagnosis.test_families import values, write
from tests.repairs.builders import snapshot
from tests.stores.servers import upload_folder
from tests.weight_loaders import REAL, net

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards in a sub-folder, with the index above."""
    root = tmp_path / "model"
    (root / "shards").mkdir(parents=True)
    write(root / "shards" / INDEX, values(3))
    (root / "shards" / INDEX).rename(root / INDEX)
    document = json.loads((root / INDEX).read_text())
    point(root, {key: f"shards/{name}" for key, name in document["weight_map"].items()})
    return root


def point(root: Path, weight_map: dict[str, str]) -> None:
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map(root: Path) -> dict[str, str]:
    return dict(json.loads((root / INDEX).read_text())["weight_map"])


def test_an_index_of_shards_below_is_not_damaged_and_its_check_not_finished(folder: Path) -> None:
    before = snapshot(folder)
    report = check(folder)
    assert (report.findings, report.status) == ((), 3)
    (words,) = report.unfinished
    assert (
        words == f"{INDEX}: it lists 2 shards in a sub-folder ('shards'): ckptfix does not "
        "read these shards, but transformers and accelerate load them"
    )
    assert "next:" not in "\n".join(map(str, report.lines()))
    with pytest.raises(OperationError, match="nothing was changed"):
        repair(folder)
    assert snapshot(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["transformers", "load_checkpoint_in_model"])
def test_loaders_take_it(folder: Path, loader: str) -> None:
    assert REAL[loader](folder) == 3


def rename_for_diffusers(folder: Path) -> None:
    for path in (folder / INDEX, *(folder / "shards").iterdir()):
        path.rename(path.with_name(f"diffusion_pytorch_{path.name}"))
    index = folder / f"diffusion_pytorch_{INDEX}"
    index.write_text(index.read_text().replace("shards/model", "shards/diffusion_pytorch_model"))


def test_an_index_of_diffusers_with_shards_below_is_malformed(folder: Path) -> None:
    rename_for_diffusers(folder)
    (finding,) = check(folder).findings
    assert (finding.code, str(finding)) == (
        "malformed-file",
        (
            f"diffusion_pytorch_{INDEX} is malformed: it lists 2 shards in a sub-folder "
            "('shards'), which diffusers refuses to load"
        ),
    )


@pytest.mark.slow
def test_diffusers_refuses_it(folder: Path) -> None:
    pytest.importorskip("diffusers")
    rename_for_diffusers(folder)
    with pytest.raises((OSError, ValueError, RuntimeError)):
        REAL["diffusers"](folder)


def lose_a_shard(root: Path) -> None:
    (root / "shards" / "model-00001-of-00002.safetensors").unlink()


def link_the_folder(root: Path) -> None:
    (root / "shards").rename(root.parent / "elsewhere")
    (root / "shards").symlink_to(root.parent / "elsewhere")


def repoint(root: Path, path_of: Callable[[str], str]) -> None:
    """Change the paths in the index. ``path_of``: takes one, and returns the new one."""
    point(root, {key: path_of(path) for key, path in weight_map(root).items()})


def point_above(root: Path) -> None:
    shutil.copytree(root / "shards", root.parent / "shards")
    repoint(root, lambda path: f"../{path}")


ELSEWHERE: dict[str, Callable[[Path], None]] = {
    "through a link": link_the_folder,
    "above": point_above,
    "from the top": lambda root: repoint(root, lambda path: str(root / path)),
    "through the folder": lambda root: repoint(root, lambda path: f"shards/../{path}"),
    "with a dot": lambda root: repoint(root, lambda path: f"./{path}"),
}


@pytest.mark.parametrize("how", ELSEWHERE)
def test_an_index_that_leads_to_files_elsewhere_is_not_damaged(folder: Path, how: str) -> None:
    ELSEWHERE[how](folder)
    assert REAL["load_checkpoint_in_model"](folder) == 3
    report = check(folder)
    assert (report.findings, report.status) == ((), 3)
    (words,) = report.unfinished
    assert words.endswith("these shards, but transformers and accelerate load them")


def test_a_resume_takes_a_checkpoint_of_the_trainer_with_such_an_index(
    tmp_path: Path, folder: Path
) -> None:
    from transformers.trainer_utils import load_sharded_checkpoint

    path = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(folder, path)
    (path / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    model = net()
    load_sharded_checkpoint(model, str(path))
    assert float(model["a"].weight.detach().mean()) == 3
    assert latest_checkpoint(tmp_path / "run") == path
    lose_a_shard(path)
    with pytest.raises(FileNotFoundError):
        load_sharded_checkpoint(net(), str(path))
    with pytest.raises(UsageError, match="which does not exist"):
        latest_checkpoint(tmp_path / "run")


NOWHERE: dict[str, Callable[[Path], None]] = {
    "a lost shard": lose_a_shard,
    "through an absent folder": lambda root: repoint(root, lambda path: f"absent/../{path}"),
    "an absent folder": lambda root: repoint(root, lambda path: f"/absent/{path}"),
}


@pytest.mark.parametrize("how", NOWHERE)
def test_an_index_that_leads_nowhere_is_malformed(folder: Path, how: str) -> None:
    NOWHERE[how](folder)
    with pytest.raises(OSError, match="No such file or directory"):
        REAL["load_checkpoint_in_model"](folder)
    (finding,) = check(folder).findings
    assert finding.code == "malformed-file"
    assert "not exist" in str(finding)


# --- paths to files in the folder itself
# ----------------------------------------------------------------------

INDEXES = [
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
]
SPELLED: dict[str, Callable[[Path, str], str]] = {
    "./x": lambda root, name: f"./{name}",
    ".//x": lambda root, name: f".//{name}",
    "/folder/x": lambda root, name: str(root / name),
    "../folder/x": lambda root, name: f"../{root.name}/{name}",
}


def spelled(root: Path, index: str, how: str) -> Path:
    """Write two shards, and an index with a path to each of them."""
    root.mkdir(exist_ok=True)
    write(root / index, values(3))
    document = json.loads((root / index).read_text())
    paths = {key: SPELLED[how](root, name) for key, name in document["weight_map"].items()}
    (root / index).write_text(json.dumps({**document, "weight_map": paths}))
    return root


def loaders_of(index: str) -> tuple[str, ...]:
    library = "diffusers" if index.startswith("diffusion") else "transformers"
    return "load_checkpoint_in_model", library


@pytest.mark.parametrize("how", SPELLED)
@pytest.mark.parametrize("index", INDEXES)
def test_paths_to_files_in_the_folder_are_judged_as_their_loader_does(
    tmp_path: Path, index: str, how: str
) -> None:
    root = spelled(tmp_path, index, how)
    before = snapshot(root)
    findings = check(root).all_findings
    assert {one.code for one in findings} <= {"index-mismatch"}
    severities = [one.severity.value for one in findings]
    if index.startswith("diffusion"):
        assert severities == ["error"]
        assert "diffusers accepts only plain file names" in str(findings[0])
        assert repair(root).status == 0
        assert check(root).all_findings == ()
        assert list(json.loads((root / index).read_text())["weight_map"].values()) == [
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model-00002-of-00002.safetensors",
        ]
    else:
        assert severities == ([] if how in ("./x", ".//x") else ["note"])
        assert repair(root).steps == ()
        assert snapshot(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", SPELLED)
@pytest.mark.parametrize("index", INDEXES)
def test_loaders_follow_paths_to_files_in_the_folder_but_for_diffusers(
    tmp_path: Path, index: str, how: str
) -> None:
    root = spelled(tmp_path, index, how)
    for loader in loaders_of(index):
        if loader == "diffusers":
            pytest.importorskip("diffusers")
            with pytest.raises(ValueError, match="contains a path separator"):
                REAL[loader](root)
            repair(root)
        assert REAL[loader](root) == 3


@pytest.mark.parametrize("how", SPELLED)
def test_a_salvaged_copy_leads_to_its_own_files(tmp_path: Path, how: str) -> None:
    root, copy = spelled(tmp_path / "model", INDEX, how), tmp_path / "copy"
    assert not salvage(root, copy).lost
    repair(copy)
    shutil.rmtree(root)
    assert check(copy).all_findings == ()
    assert REAL["load_checkpoint_in_model"](copy) == 3


def test_paths_of_the_place_before_a_move_are_an_error_that_a_repair_ends(tmp_path: Path) -> None:
    root = spelled(tmp_path / "model", INDEX, "/folder/x").rename(tmp_path / "moved")
    with pytest.raises(OSError, match="No such file or directory"):
        REAL["load_checkpoint_in_model"](root)
    (finding,) = check(root).findings
    assert (finding.code, finding.severity.value) == ("index-mismatch", "error")
    assert repair(root).status == 0
    assert check(root).all_findings == ()
    assert REAL["load_checkpoint_in_model"](root) == 3


@pytest.mark.parametrize(("how", "status"), [("./x", 0), ("/folder/x", 1)])
def test_in_a_store(tmp_path: Path, how: str, status: int) -> None:
    root = spelled(tmp_path / "model", INDEX, how)
    url = f"memory://{os.urandom(6).hex()}/model"
    upload_folder(root, url)
    shutil.rmtree(root)
    assert check(url).status == status

"""Indexes that list shards in sub-folders: transformers and accelerate load them, and ckptfix does not read them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import check, repair
from ckptfix.errors import OperationError
from tests.diagnosis.test_families import values, write
from tests.repairs.builders import snapshot
from tests.weight_loaders import REAL

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
    assert words == (
        f"{INDEX}: it lists 2 shards in a sub-folder ('shards'), which were not read; "
        "transformers and accelerate load them"
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
        f"diffusion_pytorch_{INDEX} is malformed: it lists 2 shards in a sub-folder ('shards'), "
        "which diffusers refuses",
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


def point_above(root: Path) -> None:
    shutil.copytree(root / "shards", root.parent / "shards")
    point(root, {key: f"../{name}" for key, name in weight_map(root).items()})


def point_from_the_top(root: Path) -> None:
    point(root, {key: str(root / name) for key, name in weight_map(root).items()})


def point_through(root: Path) -> None:
    point(root, {key: f"shards/../{name}" for key, name in weight_map(root).items()})


@pytest.mark.parametrize(
    "damage", [lose_a_shard, link_the_folder, point_above, point_from_the_top, point_through]
)
def test_an_index_that_leads_elsewhere_or_nowhere_is_malformed(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    assert [finding.code for finding in check(folder).findings] == ["malformed-file"]

"""Files that stay and are symbolic links to files that would go or move: nothing is lost by a
repair.
"""

import os
import shutil
from pathlib import Path, PurePosixPath

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import Policy, check, repair, undo
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import OperationError
from ckptfix.repairs import plan
from ckptfix.repairs.steps import links_below
from tests.repairs.dcp_folders import FIXTURES, MODEL, copy, model_digests, snapshot
from tests.tensors.dcp_making import save

SECOND, THIRD = "pytorch_model_fsdp_1", "pytorch_model_fsdp_2"


def refused(folder: Path, reason: str, policy: Policy | None = None) -> None:
    before = snapshot(folder)
    receipt = repair(folder, policy=policy)
    assert any(reason in one.reason for one in receipt.unplanned), receipt.unplanned
    assert receipt.transaction is None
    assert snapshot(folder) == before


def broken(link: str, target: str) -> str:
    return f"the symbolic link {link} would break, because it points to {target}"


COPIES = Policy(allow=frozenset({"identical-models"}))


def linked(folder: Path, path: str, target: str) -> None:
    (folder / path).unlink(missing_ok=True)
    (folder / path).symlink_to(target)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_a_kept_folder_with_links_into_its_double(tmp_path: Path, name: str) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    linked(folder, f"{MODEL}/{name}", f"../{SECOND}/{name}")
    digests = model_digests(folder / MODEL)
    assert check(folder).findings[0].code == "identical-models"
    refused(folder, broken(f"{MODEL}/{name}", f"{SECOND}/{name}"), COPIES)
    assert model_digests(folder / MODEL) == digests


def test_a_kept_folder_with_links_into_one_that_would_move(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    (folder / "mine").mkdir()
    linked(folder, "mine/best", f"../{THIRD}")
    refused(folder, broken("mine/best", THIRD), COPIES)
    os.unlink(folder / "mine/best")
    linked(folder, "mine/step", f"../{THIRD}/.metadata")
    refused(folder, broken("mine/step", f"{THIRD}/.metadata"), COPIES)


def test_a_link_through_a_link(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    (folder / "elsewhere").symlink_to(SECOND)
    linked(folder, f"{MODEL}/__0_0.distcp", "../elsewhere/__0_0.distcp")
    assert links_below(folder)[PurePosixPath(MODEL, "__0_0.distcp")] == {
        PurePosixPath(SECOND, "__0_0.distcp")
    }
    refused(folder, broken("elsewhere", SECOND), COPIES)


def test_a_linked_folder_does_not_move(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    outside = tmp_path / "outside"
    (folder / THIRD).rename(outside)
    (folder / THIRD).symlink_to(outside)
    before = snapshot(outside)
    refused(folder, "would have to move", COPIES)
    assert snapshot(outside) == before


def test_links_into_what_stays_are_no_reason(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    linked(folder, f"{SECOND}/__1_0.distcp", f"../{MODEL}/__1_0.distcp")
    (folder / "first").symlink_to(MODEL)
    before = snapshot(folder)
    assert repair(folder, policy=COPIES).status == 0
    undo(folder)
    assert snapshot(folder) == before
    assert os.readlink(folder / SECOND / "__1_0.distcp") == f"../{MODEL}/__1_0.distcp"


def test_what_is_kept_elsewhere_does_not_rebuild_a_double(tmp_path: Path) -> None:
    """The blobs of a cache may be deleted any time: the journal then holds the double itself."""
    folder = copy(tmp_path, "fsdp2-doubled")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in (folder / MODEL).glob("*.distcp"):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    before = snapshot(folder / SECOND)
    assert repair(folder, policy=COPIES).status == 0
    shutil.rmtree(blobs)
    undo(folder)
    assert snapshot(folder / SECOND) == before


def test_a_link_to_a_double_that_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES.parents[0] / "golden" / "doubled-model" / "checkpoint", folder)
    (folder / "best.safetensors").symlink_to("model_1.safetensors")
    assert "doubled-model" in [finding.code for finding in check(folder).findings]
    refused(folder, broken("best.safetensors", "model_1.safetensors"))


def test_equal_model_files_of_which_the_first_is_a_link(tmp_path: Path) -> None:
    weights = {"w": torch.arange(64.0)}
    save_file(weights, tmp_path / "model_1.safetensors", metadata={"format": "pt"})
    linked(tmp_path, "model.safetensors", "model_1.safetensors")
    before = snapshot(tmp_path)
    receipt = repair(tmp_path, policy=Policy(keep={Role.MODEL: 1}))
    assert receipt.transaction is None
    assert snapshot(tmp_path) == before


def test_a_gap_with_a_link_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES.parents[0] / "golden" / "entry-gap" / "checkpoint", folder)
    policy = Policy(allow=frozenset({"entry-gap"}))
    assert "entry-gap" in [finding.code for finding in check(folder).findings]
    (folder / "best").symlink_to("model_2.safetensors")
    refused(folder, broken("best", "model_2.safetensors"), policy)
    (folder / "best").unlink()
    assert repair(folder, policy=policy).status == 0


def test_the_proof_sees_it_without_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        linked(folder, f"{MODEL}/{name}", f"../{SECOND}/{name}")
    before = snapshot(folder)
    monkeypatch.setattr(plan, "drop_objection", lambda draft, path: None)
    with pytest.raises(OperationError, match="rolled back"):
        repair(folder, policy=COPIES)
    assert {path: one for path, one in snapshot(folder).items() if ".ckptfix" not in path} == before


def test_loops_and_links_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save(folder / MODEL, {"model": {"w": torch.ones(2)}})
    (folder / "loop").symlink_to("loop")
    (folder / "out").symlink_to("..")
    (folder / "gone").symlink_to("nothing/there")
    (folder / "self").symlink_to(".")
    (folder / ".ckptfix").mkdir()
    (folder / ".ckptfix" / "x").symlink_to("../loop")
    found = {str(path): sorted(map(str, places)) for path, places in links_below(folder).items()}
    assert found == {"loop": ["loop"], "out": [], "gone": ["nothing/there"], "self": []}

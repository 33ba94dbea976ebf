"""DCP folders found by the scan: where names stand, which files are there."""

from pathlib import Path, PurePosixPath

import pytest
import torch

from ckptfix.checkpoint.dcp import DcpFolder, belongs, optimizers_in, rank_of, scan_dcp_folders
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.pairing import first_unequal, pair_up
from ckptfix.checkpoint.roles import Role
from tests.tensors.dcp_making import save


def scanned(root: Path) -> tuple[CheckpointFolder, tuple[DcpFolder, ...]]:
    folder = scan_folder(root)
    return folder, scan_dcp_folders(folder)


def only(root: Path) -> DcpFolder:
    (state,) = scan_dcp_folders(scan_folder(root))
    return state


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "pytorch_model_fsdp_12", "optimizer_3"])
def test_the_name_of_a_folder_is_read_and_written(name: str) -> None:
    parsed = parse_folder_name(name)
    assert parsed is not None
    assert str(parsed) == name
    assert str(parsed.at(0)) == f"{parsed.stem}_0"
    assert parsed.role is (Role.OPTIMIZER if name.startswith("opt") else Role.MODEL)


@pytest.mark.parametrize(
    "name", ["pytorch_model_fsdp", "optimizer_01", "optimizer_x", "optimizer.bin", "model_1"]
)
def test_other_names_are_no_folder_of_accelerates(name: str) -> None:
    assert parse_folder_name(name) is None


@pytest.mark.parametrize(
    ("name", "whether"),
    [
        (".metadata", True),
        (".metadata.tmp", True),
        ("__3.metadata", True),
        ("__0_0.distcp", True),
        ("model.safetensors.metadata", False),
        ("metadata", False),
        (".distcp", False),
    ],
)
def test_which_files_a_save_leaves(name: str, whether: bool) -> None:
    assert belongs(name) is whether


def test_the_rank_of_a_file() -> None:
    assert rank_of(PurePosixPath("a/__12_3.distcp")) == 12
    assert rank_of(PurePosixPath("__ckptfix_0.distcp")) is None


def test_where_names_stand(tmp_path: Path) -> None:
    names = ["module.a", "module.b"]
    state = {
        "model": {name: torch.ones(2) for name in names},
        "optimizer": {
            "state": {name: {"step": torch.tensor(1.0)} for name in names},
            "param_groups": [
                {"params": names[:1], "lr": 0.1},
                {"params": names[1:], "param_names": ["x"]},
            ],
        },
    }
    save(tmp_path / "all", state)
    found = only(tmp_path)
    assert [(str(scope), scope.names, scope.chain) for scope in found.scopes] == [
        ("['model']", ("module.a", "module.b"), ("module",)),
        ("the optimizer state at ['optimizer']['state']", ("module.a", "module.b"), ("module",)),
        ("the params at ['optimizer']['param_groups']['0']", ("module.a",), ("module",)),
        ("the params at ['optimizer']['param_groups']['1']", ("module.b",), ("module",)),
        ("the param_names at ['optimizer']['param_groups']['1']", ("x",), ()),
    ]
    assert (found.name, found.problem, found.unread, found.broken) == (None, None, {}, {})


def test_numbers_instead_of_names_are_no_names(tmp_path: Path) -> None:
    """What ``Optimizer.state_dict()`` gives by itself."""
    inner = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
    save(tmp_path / "optimizer_0", {"optimizer": inner})
    assert [scope.names for scope in only(tmp_path).scopes] == [()]


def test_a_model_whose_modules_are_called_state(tmp_path: Path) -> None:
    """Not every dict with a key "state" is an optimizer's."""
    assert optimizers_in([("m", "state", "w"), ("m", "other", "w")]) == ()
    assert optimizers_in([("o", "state", "w", "step"), ("o", "param_groups", 0, "lr")]) == (("o",),)


def test_the_checkpoint_itself_may_be_one(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2)}})
    (tmp_path / "notes.txt").write_text("mine")
    folder, (state,) = scanned(tmp_path)
    assert state.path == PurePosixPath(".")
    assert state.metadata_path == PurePosixPath(".metadata")
    assert set(map(str, state.files)) == {".metadata", "__0_0.distcp"}
    assert PurePosixPath("notes.txt") in folder.strays


def test_one_file_alone_has_none(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2)}})
    (tmp_path / "x.bin").write_bytes(b"")
    assert scan_dcp_folders(scan_folder(tmp_path, "x.bin")) == ()


def test_a_loop_of_links_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "optimizer_0").symlink_to("optimizer_0")
    (tmp_path / "pytorch_model_fsdp_0").mkdir(mode=0o000)
    assert scan_dcp_folders(scan_folder(tmp_path)) == ()


def test_models_that_were_cut_otherwise_are_not_compared(tmp_path: Path) -> None:
    weights = {"a": torch.ones(4), "b": torch.zeros(3)}
    save(tmp_path / "pytorch_model_fsdp_0", {"model": weights})
    save(tmp_path / "pytorch_model_fsdp_1", {"model": weights}, single_file_per_rank=False)
    save(tmp_path / "pytorch_model_fsdp_2", {"model": weights | {"a": torch.ones(5)}})
    save(
        tmp_path / "pytorch_model_fsdp_3",
        {"model": weights | {"b": torch.tensor([0.0, 1.0, 0.0])}},
    )
    one, files, shape, value = scan_dcp_folders(scan_folder(tmp_path))
    assert pair_up(one, shape) is None
    for other, difference in ((files, None), (value, "model.b")):
        pairing = pair_up(one, other)
        assert pairing is not None
        assert first_unequal(tmp_path, pairing, full=True) == difference

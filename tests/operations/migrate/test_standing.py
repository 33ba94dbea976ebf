"""What of a folder is one checkpoint, which may be replaced, and what never is."""

import os
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, UsageError, migrate
from tests.operations.migrate.making import names_below, write_safetensors


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(3)}, path)
    return path


def fill(folder: Path, names: list[str]) -> Path:
    """Make files of these names; what is in them does not matter, as they are known by their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


ONE_CHECKPOINT = [
    [
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        ".ckptfix/manifest.json",
    ],
    ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__1_0.distcp"],
    ["pytorch_model_fsdp_0/.metadata.tmp", "pytorch_model_fsdp_0/.ckptfix/0001.done/plan.json"],
    [
        "pytorch_model/mp_rank_00_model_states.pt",
        "pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    ["latest", "global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
    ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    [
        "model.fp16.safetensors",
        "config.json",
        "training_args.bin",
        "tokenizer.json",
        ".ckptfix/0001.done/2.kept",
    ],
    ["llama-00001-of-00002.safetensors", "llama-00002-of-00002.safetensors", "llama.safetensors.index.json"],
    [".metadata", "__0_0.distcp"],
]


@pytest.mark.parametrize("names", ONE_CHECKPOINT, ids=lambda names: names[0])
def test_one_checkpoint_is_replaced(lone: Path, names: list[str]) -> None:
    target = fill(lone.parent / "b", names)
    if "latest" in names:
        (target / "latest").write_text("global_step10")
    assert migrate(lone, target, to="safetensors", overwrite=True).removed == tuple(sorted(names))
    assert names_below(target) == {"model.safetensors"}


MORE_THAN_ONE = [
    (
        ["checkpoint_0/model.safetensors", "checkpoint_1/model.safetensors"],
        "'checkpoint_0/', 'checkpoint_1/'",
    ),
    (["model.safetensors", "epoch_1/model.safetensors"], "'epoch_1/'"),
    (
        ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/old/__0_0.distcp"],
        "'pytorch_model_fsdp_0/old/'",
    ),
    (["pytorch_model/model.safetensors", "model.safetensors"], "'pytorch_model/model.safetensors'"),
    (["optimizer_0/notes.txt", "optimizer_0/.metadata"], "'optimizer_0/notes.txt'"),
    (["bert.pt", "llama.pt"], "'bert.pt', 'llama.pt'"),
    (["model.safetensors", "embeddings.pt"], "'embeddings.pt'"),
    (["latest", "global_step10/mp_rank_00_model_states.pt"], "'global_step10/'"),
]


@pytest.mark.parametrize(("names", "lost"), MORE_THAN_ONE, ids=lambda value: value[0])
def test_what_is_of_another_checkpoint_stays(lone: Path, names: list[str], lost: str) -> None:
    target = fill(lone.parent / "b", names)
    before = names_below(target)
    with pytest.raises(UsageError) as error:
        migrate(lone, target, to="safetensors", overwrite=True)
    assert f"no part of one checkpoint and would be lost: {lost}; --overwrite" in str(error.value)
    assert names_below(target) == before


def test_the_same_models_in_another_format_are_replaced(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for name in ("bert", "llama"):
        write_safetensors(source / f"{name}.safetensors", {"w": torch.ones(3)})
    migrate(source, tmp_path / "b", to="bin")
    receipt = migrate(source, tmp_path / "b", to="safetensors", overwrite=True)
    assert receipt.removed == ("bert.bin", "llama.bin")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_a_pipe_or_a_device_is_never_replaced(lone: Path, make: "os.PathLike[str]") -> None:
    target = lone.parent / "b.safetensors"
    make(target)  # type: ignore[operator]
    before = os.lstat(target)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is no file and no folder, and never replaced") as error:
            migrate(lone, target, to="safetensors", overwrite=overwrite)
        assert "--overwrite" not in str(error.value)
    assert os.path.samestat(os.lstat(target), before)


def test_a_pipe_in_a_checkpoint_is_never_replaced(lone: Path) -> None:
    target = fill(lone.parent / "b", ["model.safetensors"])
    os.mkfifo(target / "model_1.safetensors")
    with pytest.raises(UsageError, match=r"would be lost: 'model_1\.safetensors'"):
        migrate(lone, target, to="safetensors", overwrite=True)
    assert names_below(target) == {"model.safetensors", "model_1.safetensors"}


def test_a_pipe_that_takes_the_place_meanwhile_stays(lone: Path) -> None:
    target = lone.parent / "b.safetensors"
    target.write_bytes(b"old")

    def swap(count: int) -> None:
        if target.is_file():
            target.unlink()
            os.mkfifo(target)

    with pytest.raises(ChangedError, match="changed meanwhile"):
        migrate(lone, target, to="safetensors", overwrite=True, progress=swap)
    assert target.is_fifo()


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A checkpoint with files of the user's, and what it was migrated to."""
    fill(tmp_path / "src", ["sub/notes.txt", "todo.txt"])
    (tmp_path / "src" / "empty").mkdir()
    write_safetensors(tmp_path / "src" / "model.safetensors", {"w": torch.ones(3)})
    migrate(tmp_path / "src", tmp_path / "b", to="bin")
    return tmp_path / "b"


@pytest.mark.parametrize("is_touched", [False, True])
def test_a_copy_of_what_comes_again_is_replaced(noted: Path, is_touched: bool) -> None:
    if is_touched:  # another time, the same bytes
        os.utime(noted / "sub" / "notes.txt", ns=(1, 1))
    receipt = migrate(noted.parent / "src", noted, to="bin", overwrite=True)
    assert receipt.removed == ("empty", "pytorch_model.bin", "sub/notes.txt", "todo.txt")


@pytest.mark.parametrize("text", ["other", "sub/NOTES.txt"])
def test_a_file_of_the_user_that_has_other_bytes_than_what_comes_stays(noted: Path, text: str) -> None:
    (noted / "sub" / "notes.txt").write_text(text)
    with pytest.raises(UsageError, match=r"would be lost: 'sub/notes\.txt'"):
        migrate(noted.parent / "src", noted, to="bin", overwrite=True)
    assert (noted / "sub" / "notes.txt").read_text() == text


def test_a_link_to_nothing_in_the_place_of_a_copy_stays(noted: Path) -> None:
    (noted / "todo.txt").unlink()
    (noted / "todo.txt").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"would be lost: 'todo\.txt'"):
        migrate(noted.parent / "src", noted, to="bin", overwrite=True)

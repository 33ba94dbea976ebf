"""What of a folder is one checkpoint, which may be replaced, and what never is."""

import os
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, UsageError, migrate
from tests.conversion.making import names_below, write_safetensors


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(3)}, path)
    return path


def fill(folder: Path, names: list[str]) -> Path:
    """Make files of these names; safetensors files and those of torch.save are what their names say."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            write_safetensors(path, {"w": torch.zeros(2)})
        elif path.suffix in (".bin", ".pt"):
            torch.save({"w": torch.zeros(2)}, path)
        else:
            path.write_bytes(name.encode())
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
    [
        "pytorch_model_fsdp_0/.metadata.tmp",
        "pytorch_model_fsdp_0/__0_1.distcp",
        "pytorch_model_fsdp_0/.ckptfix/0001.done/plan.json",
    ],
    [
        "pytorch_model/mp_rank_00_model_states.pt",
        "pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    ["latest", "global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
    ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "training_args.bin",
        "tokenizer.json",
        "rng_state.pth",
        "rng_state_7.pth",
        ".ckptfix/lock",
        ".ckptfix/unfinished",
        ".ckptfix/0001.done/2.kept",
    ],
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
    (["pytorch_model_fsdp_0/__0_0.distcp", "adapter_model.safetensors"], "'adapter_model.safetensors'"),
    (["model.safetensors", "diffusion_pytorch_model.bin"], "'diffusion_pytorch_model.bin'"),
    (["model.safetensors", "model.fp16.safetensors"], "'model.fp16.safetensors'"),
    (["llama-00001-of-00001.safetensors"], "'llama-00001-of-00001.safetensors'"),
    (["features.safetensors", "config.json"], "'features.safetensors'"),
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
    assert f"not part of one checkpoint and would be lost: {lost}; --overwrite" in str(error.value)
    assert names_below(target) == before


NOT_OF_A_LIBRARY = [
    "train_config.json", "my_experiment_config.json", "secret_token.json", "my_token_counts.json", "wandb_token.json",
    "tokens_of_my_corpus.model", "token_labels_handmade.json", "LICENSES_I_BOUGHT.docx", "README.md",
    "rng_state_notes.pt", "rng_state_1_2.pth", "chat_template_mine.txt", "corpus.distcp", "thesis.metadata",
    "__0_0.distcp.bak", "data.bin", "corpus.pt", "layer_3-model_of_my_thesis.pt", ".git/config", ".ckptfix/mine.txt",
    ".ckptfix/sub/mine.txt", ".ckptfix/0001.done/mine.txt", ".ckptfix/0001.done/sub/1.kept", ".ckptfix/1.done/1.kept",
    "pytorch_model_fsdp_0/my.distcp", "pytorch_model_fsdp_0/.ckptfix/mine.txt",
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_OF_A_LIBRARY)
def test_what_is_only_called_alike_stays(lone: Path, name: str) -> None:
    target = fill(lone.parent / "b", ["model.safetensors", name])
    before = (target / name).read_bytes()
    with pytest.raises(UsageError, match="not part of one checkpoint and would be lost"):
        migrate(lone, target, to="safetensors", overwrite=True)
    with pytest.raises(
        UsageError, match="it holds more than a checkpoint; name a place where nothing is"
    ) as one:
        migrate(fill(lone.parent / "s", ["model.safetensors"]), target, to="safetensors")
    assert "--overwrite" not in str(one.value)
    assert (target / name).read_bytes() == before


@pytest.mark.parametrize(
    "names",
    [["config.json", "vocab.txt"], ["optimizer.pt"], ["optimizer_0/__0_0.distcp"], [".metadata.tmp", "latest"],
     ["model.safetensors.index.json"], [".ckptfix/manifest.json"]],
)  # fmt: skip
def test_a_folder_without_weights_stays(lone: Path, names: list[str]) -> None:
    target = fill(lone.parent / "b", names)
    for overwrite in (False, True):
        with pytest.raises(
            UsageError, match=r"holds no weights|not part of one checkpoint|more than a checkpoint"
        ):
            migrate(
                lone if overwrite else fill(lone.parent / "s", ["model.safetensors"]),
                target,
                to="safetensors",
                overwrite=overwrite,
            )
    assert names_below(target) == set(names)


@pytest.mark.parametrize("content", [b"tokens" * 100, b"\x80\x02}q\x00."])
def test_a_file_of_the_name_of_own_weights_without_tensors_stays(tmp_path: Path, content: bytes) -> None:
    source = fill(tmp_path / "src", ["train.safetensors"])
    target = tmp_path / "b"
    target.mkdir()
    (target / "train.bin").write_bytes(content)
    with pytest.raises(UsageError, match=r"would be lost: 'train\.bin'"):
        migrate(source, target, to="safetensors", overwrite=True)
    assert (target / "train.bin").read_bytes() == content
    torch.save({"w": torch.zeros(2)}, target / "train.bin")
    assert migrate(source, target, to="safetensors", overwrite=True).removed == ("train.bin",)


@pytest.mark.parametrize("to", ["bin", "dcp"])
@pytest.mark.parametrize(
    "there",
    [
        ["model.safetensors", "adapter_model.safetensors"],
        ["pytorch_model_fsdp_0/__0_0.distcp"],
        [".metadata", "__0_0.distcp"],
    ],
    ids=len,
)
def test_an_adapter_never_replaces_a_model(tmp_path: Path, there: list[str], to: str) -> None:
    source = fill(tmp_path / "src", ["adapter_model.safetensors"])
    target = fill(tmp_path / "b", there)
    for given in (source, source / "adapter_model.safetensors"):
        with pytest.raises(UsageError, match="not part of one checkpoint and would be lost"):
            migrate(given, target, to=to, overwrite=True)
    assert names_below(target) == set(there)


def test_an_adapter_and_a_variant_are_replaced_by_their_like(tmp_path: Path) -> None:
    for name in ("adapter_model", "model.fp16"):
        source = fill(tmp_path / f"{name}.src", [f"{name}.safetensors"])
        migrate(source, tmp_path / name, to="bin")
        receipt = migrate(source, tmp_path / name, to="safetensors", overwrite=True)
        assert receipt.removed == (f"{name.replace('model.', 'pytorch_model.')}.bin",)


@pytest.mark.parametrize("leads_to", ["nowhere", "folder"])
def test_a_link_that_leads_to_no_file_is_no_part_of_a_checkpoint(lone: Path, leads_to: str) -> None:
    (lone.parent / "folder").mkdir()
    target = fill(lone.parent / "b", ["model.safetensors"])
    (target / "model_1.safetensors").symlink_to(lone.parent / leads_to)
    with pytest.raises(UsageError, match=r"would be lost: 'model_1\.safetensors'"):
        migrate(lone, target, to="safetensors", overwrite=True)


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
        with pytest.raises(UsageError, match="is neither a file nor a folder, and never replaced") as error:
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
    write_safetensors(target, {"w": torch.zeros(2)})

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


def test_the_same_size_and_time_are_not_the_same_bytes(noted: Path) -> None:
    mine = noted / "todo.txt"
    status = mine.stat()
    mine.write_bytes(b"M" * status.st_size)
    os.utime(mine, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError, match=r"would be lost: 'todo\.txt'"):
        migrate(noted.parent / "src", noted, to="bin", overwrite=True)
    assert mine.read_bytes() == b"M" * status.st_size


def test_a_readme_is_replaced_only_when_it_comes_again(tmp_path: Path) -> None:
    source = fill(tmp_path / "src", ["model.safetensors", "README.md"])
    migrate(source, tmp_path / "b", to="bin")
    assert "README.md" in migrate(source, tmp_path / "b", to="safetensors", overwrite=True).removed
    (tmp_path / "b" / "README.md").write_text("README-mine")
    with pytest.raises(UsageError, match=r"would be lost: 'README\.md'"):
        migrate(source, tmp_path / "b", to="bin", overwrite=True)


def test_a_link_to_nothing_in_the_place_of_a_copy_stays(noted: Path) -> None:
    (noted / "todo.txt").unlink()
    (noted / "todo.txt").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"would be lost: 'todo\.txt'"):
        migrate(noted.parent / "src", noted, to="bin", overwrite=True)

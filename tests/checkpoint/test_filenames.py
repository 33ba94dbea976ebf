"""Accelerate's file names: parsed, formatted, and left alone when they are somebody else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.checkpoint.filenames import (
    WEIGHT_SUFFIXES,
    FileName,
    Role,
    describe_folder_name,
    parse_file_name,
)

KNOWN = [
    ("model.safetensors", Role.MODEL, 0),
    ("model_1.safetensors", Role.MODEL, 1),
    ("model_12.safetensors", Role.MODEL, 12),
    ("pytorch_model.bin", Role.MODEL, 0),
    ("pytorch_model_3.bin", Role.MODEL, 3),
    ("pytorch_model_fsdp.bin", Role.MODEL, 0),
    ("pytorch_model_fsdp_1.bin", Role.MODEL, 1),
    ("optimizer.bin", Role.OPTIMIZER, 0),
    ("optimizer_1.bin", Role.OPTIMIZER, 1),
    ("scheduler_2.bin", Role.SCHEDULER, 2),
    ("sampler.bin", Role.SAMPLER, 0),
    ("dl_state_dict_1.bin", Role.DATALOADER, 1),
    ("custom_checkpoint_0.pkl", Role.CUSTOM, 0),
    ("custom_checkpoint_11.pkl", Role.CUSTOM, 11),
    ("scaler.pt", Role.GRAD_SCALER, 0),
]


@pytest.mark.parametrize(("name", "role", "index"), KNOWN)
def test_what_accelerate_writes(name: str, role: Role, index: int) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert (parsed.role, parsed.index, parsed.shard, parsed.rank) == (role, index, None, None)
    assert str(parsed) == name
    assert parsed.is_numbered is (role is not Role.GRAD_SCALER)


@pytest.mark.parametrize(("name", "role", "index"), KNOWN)
def test_every_entry_can_be_moved_to_0_and_back(name: str, role: Role, index: int) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    if parsed.is_numbered:
        first = parse_file_name(str(parsed.at(0)))
        assert first is not None
        assert first.family == parsed.family
        assert str(first.at(index)) == name


def test_ranks_and_shards_are_no_positions() -> None:
    rng = parse_file_name("random_states_7.pkl")
    assert rng is not None
    assert (rng.role, rng.rank, rng.is_numbered) == (Role.RNG_STATE, 7, False)
    shard = parse_file_name("model-00002-of-00012.safetensors")
    assert shard is not None
    assert (shard.stem, shard.shard, shard.is_numbered) == ("model", (2, 12), False)
    index = parse_file_name("pytorch_model.bin.index.json")
    assert index is not None
    assert (index.role, index.stem, str(index)) == (
        Role.WEIGHTS_INDEX,
        "pytorch_model",
        "pytorch_model.bin.index.json",
    )


@pytest.mark.parametrize(
    "name",
    [
        "model_0.safetensors",
        "model_01.safetensors",
        "model_-1.safetensors",
        "model_١.safetensors",  # a digit, though not to Accelerate
        "model_1.safetensors\n",
        "Model.safetensors",
        "model_1234567890.safetensors",
        "pytorch_model_00.bin",
    ],
)
def test_names_that_only_look_like_entries(name: str) -> None:
    parsed = parse_file_name(name)
    assert parsed is None or parsed.role is Role.UNKNOWN


@pytest.mark.parametrize(
    "name",
    ["config.json", "README.md", "", ".", ".bin", ".safetensors", "model", "random_states_0.pkl.bak",
     "random_states_01.pkl", "custom_checkpoint_.pkl", "weights.npz", "latest", "index.json", "model.index.json"],
)  # fmt: skip
def test_what_is_no_part_of_a_checkpoint(name: str) -> None:
    assert parse_file_name(name) is None


@pytest.mark.parametrize("suffix", WEIGHT_SUFFIXES)
def test_every_weight_file_is_a_component_whatever_its_name(suffix: str) -> None:
    parsed = parse_file_name(f"my weights{suffix}")
    assert parsed == FileName(role=Role.UNKNOWN, stem="my weights", suffix=suffix)


PARTS = st.sampled_from(
    ["model", "pytorch_model", "optimizer", "custom_checkpoint", "random_states", "scaler", "_", "-", "of", "0",
     "00001", "1", "12", ".", ".safetensors", ".bin", ".pkl", ".pt", ".index.json", "\n", "fsdp"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=8).map("".join) | st.text(max_size=20))
def test_a_parsed_name_is_the_name_again(name: str) -> None:
    parsed = parse_file_name(name)
    if parsed is not None:
        assert str(parsed) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model_fsdp_0", "DCP"),
        ("optimizer_1", "DCP"),
        ("pytorch_model", "DeepSpeed"),
        ("pytorch_model_1", "DeepSpeed"),
    ],
)
def test_folders_that_accelerate_writes(name: str, words: str) -> None:
    assert words in (describe_folder_name(name) or "")


def test_other_folders() -> None:
    assert describe_folder_name("runs") is None
    assert describe_folder_name("pytorch_model_fsdp_x") is None

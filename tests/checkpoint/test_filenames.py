"""Accelerate's file names: parsed, formatted, and left alone when they are somebody else's."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.checkpoint.filenames import (
    WEIGHT_SUFFIXES,
    FileName,
    ModelName,
    model_file,
    parse_file_name,
)
from ckptfix.checkpoint.folder_names import (
    FAMILIES,
    FolderName,
    checkpoint_number,
    counts_saves,
    describe_folder_name,
    is_one_of_several,
    parse_deepspeed_folder_name,
    parse_folder_name,
)
from ckptfix.checkpoint.rank_names import (
    DcpFileName,
    DcpPart,
    DeepSpeedName,
    DeepSpeedPart,
    parse_dcp_name,
    parse_deepspeed_name,
)
from ckptfix.checkpoint.roles import Role

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


@pytest.mark.parametrize(
    ("name", "role", "rank"),
    [
        ("optimizer.pt", Role.OPTIMIZER, None),
        ("scheduler.pt", Role.SCHEDULER, None),
        ("training_args.bin", Role.TRAINING_ARGUMENTS, None),
        ("rng_state.pth", Role.RNG_STATE, None),
        ("rng_state_0.pth", Role.RNG_STATE, 0),
        ("rng_state_12.pth", Role.RNG_STATE, 12),
    ],
)
def test_the_trainers_states_are_what_their_names_say(
    name: str, role: Role, rank: int | None
) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert (parsed.role, parsed.rank, parsed.model, str(parsed)) == (role, rank, None, name)
    assert parsed.is_of_trainer
    assert not parsed.is_numbered


@pytest.mark.parametrize(
    ("name", "stem", "variant"),
    [
        ("model.safetensors", "model", ""),
        ("pytorch_model.bin", "model", ""),
        ("pytorch_model_fsdp.bin", "model", ""),
        ("model.fp16.safetensors", "model", "fp16"),
        ("pytorch_model.fp16.bin", "model", "fp16"),
        ("model.fp16-00001-of-00002.safetensors", "model", "fp16"),
        ("model-00001-of-00002.fp16.safetensors", "model", "fp16"),
        ("model.safetensors.index.json", "model", ""),
        ("model.safetensors.index.fp16.json", "model", "fp16"),
        ("adapter_model.safetensors", "adapter_model", ""),
        ("adapter_model.bin", "adapter_model", ""),
        ("adapter_model-00001-of-00002.safetensors", "adapter_model", ""),
        ("pytorch_lora_weights.safetensors", "pytorch_lora_weights", ""),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model", ""),
        ("diffusion_pytorch_model.non_ema.bin", "diffusion_pytorch_model", "non_ema"),
        (
            "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
            "diffusion_pytorch_model",
            "fp16",
        ),
        (
            "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
            "diffusion_pytorch_model",
            "fp16",
        ),
        ("diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model", "fp16"),
        ("diffusion_pytorch_model.safetensors.fp16.index.json", "diffusion_pytorch_model", "fp16"),
    ],
)
def test_the_names_of_libraries_say_which_model_and_variant(
    name: str, stem: str, variant: str
) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert parsed.model == ModelName(stem, variant)
    assert parsed.is_of_library
    assert str(parsed) == name


@pytest.mark.parametrize(
    "name", ["model.pt", "adapter_model.ckpt", "student.safetensors", "pytorch_model.pth.tar"]
)
def test_a_scripts_own_weights_are_of_no_library(name: str) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert not parsed.is_of_library


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("shard-00001-model-00001-of-00002.safetensors", 0),
        ("shard-00012-model-00002-of-00002.safetensors", 11),
        ("shard-00000-model-00001-of-00002.safetensors", None),  # torch counts from 1
        ("shard-00001-model-00001-of-00002.bin", None),
        ("model-00001-of-00002.safetensors", None),
    ],
)
def test_the_parts_of_a_rank(name: str, rank: int | None) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert (str(parsed), parsed.rank, parsed.is_of_parts) == (name, rank, rank is not None)
    assert parsed.load_order is None
    assert not (parsed.is_of_parts and (parsed.is_of_library or parsed.is_numbered))


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        ("student.v2-00001-of-00002.bin", "student.v2.bin.index.json"),
        ("pytorch_model.fp16-00001-of-00002.bin", "pytorch_model.bin.index.fp16.json"),
        (
            "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
            "diffusion_pytorch_model.safetensors.index.fp16.json",
        ),
        ("model-00001-of-00002.fp16.safetensors", "model.safetensors.index.fp16.json"),
        ("pytorch_model-00001-of-00002.fp16.bin", "pytorch_model.bin.index.fp16.json"),
        ("unet-00001-of-00002.fp16.safetensors", "unet.safetensors.fp16.index.json"),
    ],
)
def test_a_shard_names_its_index(shard: str, index: str) -> None:
    parsed, of_index = parse_file_name(shard), parse_file_name(index)
    assert parsed is not None
    assert of_index is not None
    assert parsed.index_name == index
    assert parsed.model == of_index.model or not parsed.is_of_library


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
     "00001", "1", "12", ".", ".safetensors", ".bin", ".pkl", ".pt", ".pth", ".tar", ".index.json", ".index", ".json",
     "fp16", "\n", "fsdp", "rng_state", "training_args"]
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


RANKS = st.integers(0, 999_999_999)
STEMS = st.sampled_from(
    ["model", "student", "model.fp16", "diffusion_pytorch_model", "my weights", "a.b"]
)
STATES = [
    ("optimizer", ".bin", Role.OPTIMIZER),
    ("scheduler", ".bin", Role.SCHEDULER),
    ("sampler", ".bin", Role.SAMPLER),
    ("dl_state_dict", ".bin", Role.DATALOADER),
    ("custom_checkpoint", ".pkl", Role.CUSTOM),
]


@st.composite
def file_names(draw: st.DrawFn) -> FileName:
    kind = draw(st.sampled_from(["model", "state", "rank", "trainer", "shard", "index", "own"]))
    if kind == "model":
        return model_file(draw(st.sampled_from([".safetensors", ".bin"])), draw(RANKS))
    if kind == "state":
        stem, suffix, role = draw(st.sampled_from(STATES))
        return FileName(role=role, stem=stem, suffix=suffix, index=draw(RANKS))
    if kind == "rank":
        return FileName(role=Role.RNG_STATE, stem="random_states", suffix=".pkl", rank=draw(RANKS))
    if kind == "trainer":
        return FileName(
            role=Role.RNG_STATE, stem="rng_state", suffix=".pth", rank=draw(st.none() | RANKS)
        )
    suffix = draw(st.sampled_from([".safetensors", ".bin"]))
    if kind == "shard":
        shard = (draw(st.integers(1, 99_999)), draw(st.integers(1, 99_999)))
        variant = draw(st.sampled_from(["", "fp16", "non_ema"]))
        return FileName(
            role=Role.MODEL, stem=draw(STEMS), suffix=suffix, shard=shard, variant=variant
        )
    if kind == "index":
        return FileName(role=Role.WEIGHTS_INDEX, stem=draw(STEMS), suffix=f"{suffix}.index.json")
    return FileName(
        role=Role.UNKNOWN, stem="my weights", suffix=draw(st.sampled_from(WEIGHT_SUFFIXES))
    )


@given(file_names())
def test_a_formatted_file_name_is_parsed_as_what_it_means(name: FileName) -> None:
    assert parse_file_name(str(name)) == name


@given(
    st.builds(FolderName, role=st.just(Role.MODEL), stem=st.just("pytorch_model_fsdp"), index=RANKS)
    | st.builds(FolderName, role=st.just(Role.OPTIMIZER), stem=st.just("optimizer"), index=RANKS)
)
def test_a_formatted_name_of_a_dcp_folder_is_parsed_as_what_it_means(name: FolderName) -> None:
    assert parse_folder_name(str(name)) == name
    assert parse_deepspeed_folder_name(str(name)) is None


@given(RANKS)
def test_a_formatted_name_of_a_deepspeed_folder_is_parsed_as_what_it_means(index: int) -> None:
    name = FolderName(role=Role.MODEL, stem="pytorch_model", index=index)
    assert parse_deepspeed_folder_name(str(name)) == name
    assert parse_folder_name(str(name)) is None


@given(
    st.builds(DcpFileName, part=st.just(DcpPart.DATA), rank=RANKS, number=RANKS)
    | st.builds(
        DcpFileName,
        part=st.just(DcpPart.DATA),
        stem=st.sampled_from(["__ckptfix_0", "weights", "__1"]),
    )
    | st.builds(
        DcpFileName,
        part=st.sampled_from([DcpPart.METADATA, DcpPart.UNFINISHED_METADATA]),
        rank=st.none() | RANKS,
    )
)
def test_a_formatted_name_of_a_dcp_file_is_parsed_as_what_it_means(name: DcpFileName) -> None:
    assert parse_dcp_name(str(name)) == name


@given(
    st.builds(
        DeepSpeedName,
        part=st.just(DeepSpeedPart.MODEL),
        rank=st.none() | st.integers(0, 999_999),
        model_rank=st.integers(0, 999_999),
    )
    | st.builds(
        DeepSpeedName,
        part=st.just(DeepSpeedPart.OPTIMIZER),
        rank=st.integers(0, 999_999),
        model_rank=st.integers(0, 999_999),
        before=st.sampled_from(["", "bf16_"]),
        between=st.sampled_from(["", "_"]),
    )
    | st.builds(
        DeepSpeedName,
        part=st.just(DeepSpeedPart.EXPERT),
        other=st.sampled_from(
            ["layer_0_expert_3_mp_rank_00_model_states.pt", "expp_rank_0_optim_states.pt"]
        ),
    )
    | st.builds(
        DeepSpeedName,
        part=st.just(DeepSpeedPart.LAYER),
        other=st.just("layer_01-model_00-model_states.pt"),
    )
)
def test_a_formatted_name_of_deepspeed_is_parsed_as_what_it_means(name: DeepSpeedName) -> None:
    assert parse_deepspeed_name(str(name)) == name


@given(RANKS, st.sampled_from(FAMILIES))
def test_a_formatted_name_of_a_checkpoint_has_its_number(number: int, pattern: str) -> None:
    name = pattern.format(number)
    assert checkpoint_number(name, pattern) == number
    assert is_one_of_several(name)
    assert [other for other in FAMILIES if checkpoint_number(name, other) is not None] == [pattern]


@pytest.mark.parametrize(
    "before",
    [
        "checkpoint-",
        "ckpt",
        "epoch=",
        "epoch=3-step=",
        "global_step",
        "model_iter_",
        "runs/run2/Epoch_",
        "save ",
    ],
)
def test_numbers_that_count_saves(before: str) -> None:
    assert counts_saves(before)


@pytest.mark.parametrize(
    "before", ["", "run_", "fold", "client_", "stage", "timestep", "unit", "model_", "step_of_"]
)
def test_numbers_that_may_tell_one_run_from_another(before: str) -> None:
    assert not counts_saves(before)


FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVED = re.compile(r"(\.metadata.*|.*\.(safetensors|bin|pkl|pt|pth|distcp|index\.json))")


def test_every_saved_file_of_the_fixtures_has_a_meaning_and_that_gives_its_name() -> None:
    names = {
        path.name for path in FIXTURES.rglob("*") if path.is_file() and SAVED.fullmatch(path.name)
    }
    assert len(names) > 40
    for name in names:
        meanings = [
            parse(name) for parse in (parse_file_name, parse_dcp_name, parse_deepspeed_name)
        ]
        assert any(meanings), name
        assert {str(meaning) for meaning in meanings if meaning is not None} == {name}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("model.safetensors", (0, 0)),
        ("model.safetensors.index.json", (0, 1)),
        ("pytorch_model.bin", (0, 2)),
        ("model_3.safetensors", (3, 0)),
        ("pytorch_model_fsdp_2.bin", (2, 4)),
        ("pytorch_model_fsdp_2.bin.index.json", (2, 5)),
        ("model.fp16.safetensors", None),
        ("model.safetensors.index.fp16.json", None),
        ("model-00001-of-00002.safetensors", None),
        ("optimizer.bin", None),
        ("optimizer.bin.index.json", None),
        ("student.pt", None),
    ],
)
def test_load_state_looks_for_models_in_this_order(
    name: str, order: tuple[int, int] | None
) -> None:
    parsed = parse_file_name(name)
    assert parsed is not None
    assert parsed.load_order == order

"""DeepSpeed checkpoints: real ones of every ZeRO stage, made ones of any shape, and damaged
ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix import check
from ckptfix.checkpoint.deepspeed_files import MissingRankError
from ckptfix.errors import CkptfixError, OperationError, UsageError
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.opening import open_checkpoint, other_files
from ckptfix.tensors.stored import Contiguous, Format, StoredTensor, Weights
from fixtures import digests as fixture_digests
from fixtures.make_deepspeed import SCENARIOS
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed, variables
from tests.sampling import examples, one_of
from tests.tensors.writing import digests, torch_digest
from tests.tensors.zero_making import make_zero

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspeed-0.18.2"
DTYPES = {noun: getattr(torch, name) for name, noun in TORCH_DTYPES.items()}
BY_RANK = [name for name, one in SCENARIOS.items() if one.config["zero_optimization"]["stage"] == 3]
WHOLE = [name for name in SCENARIOS if name not in BY_RANK]


def loaded(tensor: StoredTensor) -> torch.Tensor:
    with OpenFiles() as files:
        data = b"".join(
            bytes(block) for block in tensor.blocks(files, memoryview(bytearray(1 << 16)))
        )
    made = torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype])
    made.reshape(-1).view(torch.uint8)[:] = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    )
    return made


def the_weights(path: Path, *, original: bool = False) -> Weights:
    (weights,) = open_checkpoint(path, original=original).weights
    return weights


def run_digests(weights: Weights) -> dict[str, str]:
    """Return digests in the form of ``run.json``."""
    return fixture_digests.tensor_digests(
        {name: loaded(tensor) for name, tensor in weights.named().items()}
    )


def recorded(name: str) -> dict[str, dict[str, str]]:
    document: dict[str, dict[str, str]] = json.loads((FIXTURES / name / "run.json").read_text())
    return document


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the fixture that the test names."""
    return Path(shutil.copytree(FIXTURES / request.param / "checkpoint", tmp_path / "checkpoint"))


def test_the_fixtures_are_those_of_the_script() -> None:
    assert sorted(path.name for path in FIXTURES.iterdir()) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_weights_are_those_of_the_run(name: str) -> None:
    weights = the_weights(FIXTURES / name / "checkpoint")
    assert run_digests(weights) == recorded(name)["fp32"]
    assert weights.format is Format.DEEPSPEED
    assert weights.ties == {"head.weight": "embed.weight"}
    assert weights.versions["block.norm"] == 2
    assert SCENARIOS[name].accelerate or "epoch" in weights.left
    assert all(isinstance(tensor.layout, Contiguous) for tensor in weights.tensors)
    trained = {
        tensor.dtype
        for tensor in weights.tensors
        if tensor.fqn.startswith(("embed", "block.up", "scale"))
    }
    assert trained == {"BF16" if name == "zero1-no-masters" else "F32"}


@pytest.mark.parametrize("name", WHOLE)
def test_the_weights_in_the_dtype_of_training(name: str) -> None:
    weights = the_weights(FIXTURES / name / "checkpoint", original=True)
    assert run_digests(weights) == recorded(name)["original"]


@pytest.mark.parametrize("name", [name for name in WHOLE if "bf16" in SCENARIOS[name].config])
def test_fp32_weights_round_to_those_of_training(name: str) -> None:
    # This needs no other reader: a partition in a wrong order would round to another parameter's
    # values.
    path = FIXTURES / name / "checkpoint"
    masters, trained = the_weights(path).named(), the_weights(path, original=True).named()
    for fqn, tensor in trained.items():
        assert torch.equal(loaded(masters[fqn]).to(DTYPES[tensor.dtype]), loaded(tensor)), fqn


@pytest.mark.parametrize("name", BY_RANK)
def test_zero3_has_no_weights_in_the_dtype_of_training(name: str) -> None:
    dtype = "BF16" if "bf16" in SCENARIOS[name].config else "F32"
    with pytest.raises(
        OperationError, match=rf"in fp32 only \(training used {dtype}\); next: name"
    ):
        open_checkpoint(FIXTURES / name / "checkpoint", original=True)


def test_files_and_others(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "zero3" / "checkpoint", tmp_path / "checkpoint"))
    (root / "zero_to_fp32.py").touch()
    opened = open_checkpoint(root)
    (weights,) = opened.weights
    assert (weights.label, weights.index) == ("pytorch_model", 0)
    folder = PurePosixPath("pytorch_model")
    kinds = ("model_states", "optim_states")
    assert set(weights.files) == {
        folder / f"zero_pp_rank_{rank}_mp_rank_00_{kind}.pt" for rank in (0, 1) for kind in kinds
    }
    assert other_files(opened) == (PurePosixPath("latest"), PurePosixPath("zero_to_fp32.py"))
    assert opened.rivals == ()
    inside = open_checkpoint(root / "pytorch_model")
    assert digests(inside.weights[0]) == digests(weights)
    assert other_files(inside) == ()


def test_several_models_of_save_state(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path / "state")
    shutil.copytree(
        FIXTURES / "zero3" / "checkpoint" / "pytorch_model", tmp_path / "state" / "pytorch_model_1"
    )
    torch.save({}, tmp_path / "state" / "random_states_0.pkl")
    (tmp_path / "state" / "latest").write_text("pytorch_model_1")
    opened = open_checkpoint(tmp_path / "state")
    assert opened.is_save_state
    assert [(one.index, one.label) for one in opened.weights] == [
        (0, "pytorch_model"),
        (1, "pytorch_model_1"),
    ]
    assert [run_digests(one) for one in opened.weights] == [
        recorded("zero2")["fp32"],
        recorded("zero3")["fp32"],
    ]


def test_latest_leads_to_a_folder_of_any_name(tmp_path: Path) -> None:
    for step in (5, 10):
        shutil.copytree(
            FIXTURES / f"zero{step // 5}" / "checkpoint" / "pytorch_model",
            tmp_path / f"global_step{step}",
        )
    (tmp_path / "latest").write_text("global_step10\n")
    assert the_weights(tmp_path).label == "global_step10"
    assert run_digests(the_weights(tmp_path)) == recorded("zero2")["fp32"]


@pytest.mark.parametrize(
    "tag", ["../outside", "/etc", "", ".", "..", "\0", "gone", "inside/deeper", "\udcff"]
)
def test_latest_leads_nowhere_else(tmp_path: Path, tag: str) -> None:
    shutil.copytree(FIXTURES / "zero1" / "checkpoint" / "pytorch_model", tmp_path / "outside")
    root = tmp_path / "root"
    shutil.copytree(tmp_path / "outside", root / "inside" / "deeper")
    (root / "latest").write_bytes(tag.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match="has no model weights"):
        open_checkpoint(root)


def test_a_model_beside_it_comes_first(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path, dirs_exist_ok=True)
    torch.save(OrderedDict({"a.weight": torch.ones(3)}), tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(b"broken")
    opened = open_checkpoint(tmp_path)
    assert [weights.format for weights in opened.weights] == [Format.TORCH]
    folder = tmp_path / "pytorch_model"
    assert opened.rivals == tuple(
        PurePosixPath("pytorch_model") / name for name in sorted(os.listdir(folder))
    )


# What is missing, mixed or of a kind that is not read


@pytest.mark.parametrize("copied", ["zero1", "zero2-round-robin", *BY_RANK], indirect=True)
def test_a_missing_rank_is_an_error(copied: Path) -> None:
    for path in sorted((copied / "pytorch_model").iterdir()):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(OperationError) as caught:
            open_checkpoint(copied)
        many = len(list((copied / "pytorch_model").glob("*_optim_states.pt")))
        if "zero_pp_rank" in path.name:
            rank = path.name.split("rank_")[1][0]
            kind = "optimizer states" if "optim" in path.name else "model states"
            have = many if "optim" in path.name else many - 1
            assert f" of {kind} (expected {have + 1}, one per rank); " in str(caught.value)
            assert f": {have} file" in str(caught.value)
            assert f"first missing rank: {rank}; next: " in str(caught.value)
        else:
            assert f"{many} optimizer files, but no model states; next: " in str(caught.value)
        path.write_bytes(data)
    assert the_weights(copied).tensors


@pytest.mark.parametrize("copied", ["zero1"], indirect=True)
def test_a_rank_too_many_is_an_error(copied: Path) -> None:
    folder = copied / "pytorch_model"
    shutil.copy(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(
        OperationError, match=r"3 files of optimizer states \(expected 2, one per rank\)"
    ):
        open_checkpoint(copied)


@pytest.mark.parametrize("copied", ["zero2"], indirect=True)
def test_weights_without_their_masters_are_not_taken_for_them(copied: Path) -> None:
    for path in (copied / "pytorch_model").glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(
        MissingRankError,
        match=r"0 files of .*; mp_rank_00_model_states.pt still has the weights, in the dtype.*; next",
    ):
        open_checkpoint(copied)


REFUSED = [
    ("mp_rank_01_model_states.pt", "split into 2 parts for tensor parallelism"),
    ("zero_pp_rank_0_mp_rank_03_optim_states.pt", "split into 4 parts for tensor parallelism"),
    ("layer_01-model_00-model_states.pt", "split into 1 layer file for pipeline"),
    (
        "layer_0_expert_3_mp_rank_00_model_states.pt",
        "its MoE experts are in 1 file, which only the ranks that saved them can merge",
    ),
    (
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "its MoE experts are in 1 file, which only the ranks that saved them can merge",
    ),
    ("zero_pp_rank_0_mp_rank_00_model_states.pt", "the files come from two saves"),
    (
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "both belong to rank 1: the files come from two saves",
    ),
]


@pytest.mark.parametrize(("name", "why"), REFUSED)
@pytest.mark.parametrize("copied", ["zero2"], indirect=True)
def test_other_kinds_are_refused_with_the_reason(copied: Path, name: str, why: str) -> None:
    path = copied / "pytorch_model" / name
    path.touch()
    with pytest.raises(OperationError, match=f"{why}.*; next: "):
        open_checkpoint(copied)


@pytest.mark.parametrize("copied", ["zero2"], indirect=True)
def test_a_folder_named_zero_next_to_the_optimizers_changes_nothing(copied: Path) -> None:
    """``ds_to_universal`` can write into the folder that it reads, and can be stopped."""
    (copied / "pytorch_model" / "zero").mkdir()
    assert run_digests(the_weights(copied)) == recorded("zero2")["fp32"]


def test_the_states_of_another_save_are_refused(tmp_path: Path) -> None:
    for name in ("zero2", "zero3"):
        shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name)
    folder = tmp_path / "zero2" / "pytorch_model"
    for path in (tmp_path / "zero3" / "pytorch_model").glob("*_optim_states.pt"):
        shutil.copy(path, folder)
    with pytest.raises(
        OperationError,
        match=r"it is from ZeRO-3, but mp_rank_00_model_states\.pt is from ZeRO-1 or ZeRO-2",
    ):
        open_checkpoint(tmp_path / "zero2")


def trained(*shapes: tuple[int, ...], first: str = "p") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {
        f"{first}{number}.weight": torch.randn(shape, generator=generator)
        for number, shape in enumerate(shapes)
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"param_shapes": [OrderedDict({"p0.weight": torch.Size([9, 9])})]},
        "elements.* take (81|41);",
    ),
    ({"param_shapes": [OrderedDict({"p0.weight": torch.Size([1])})]}, "elements.* take 1;"),
    (
        {"param_shapes": [OrderedDict({"p0.weight": (-3, 5)})]},
        "the shape of 'p0.weight' is invalid",
    ),
    (
        {"param_shapes": [OrderedDict({"p0.weight": (1 << 70, 0)})]},
        "the shape of 'p0.weight' is invalid",
    ),
    (
        {"param_shapes": [OrderedDict({"p0.weight": (1 << 40, 1 << 40)})]},
        "the shape of 'p0.weight' is invalid",
    ),
    (
        {"param_shapes": [OrderedDict({"p0.weight": "text"})]},
        "the shape of 'p0.weight' is invalid",
    ),
    (
        {"param_shapes": [OrderedDict({"p0.weight": (1,) * 65})]},
        "the shape of 'p0.weight' is invalid",
    ),
    ({"param_shapes": [OrderedDict()] * 2}, "two of its groups are the same dict"),
    ({"buffer_names": None}, "no DeepSpeed model states"),
    ({"module": None}, "no DeepSpeed model states"),
    ({"mp_world_size": 4}, "split into 4 parts for tensor parallelism"),
    ({"param_shapes": [OrderedDict({"p0.weight": torch.Size([5, 3])})]}, "take (15|8);"),
    ({"shared_params": {"tied": "gone"}}, "'tied' is tied to 'gone', which is missing"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_states_say_is_not_believed(
    tmp_path: Path, changed: dict[str, Any], message: str, stage: int
) -> None:
    shared = {"tied": "p0.weight"}
    make_zero(
        tmp_path, [trained((5, 3), (7,))], stage=stage, ranks=2, shared=shared, changed=changed
    )
    with pytest.raises(OperationError, match=f"(?s){message}.*next: "):
        open_checkpoint(tmp_path)


def test_a_frozen_parameter_left_out_under_zero3(tmp_path: Path) -> None:
    frozen = {"base.weight": torch.ones(3, dtype=torch.bfloat16)}
    left_out = {"frozen_param_shapes": None, "frozen_param_fragments": None}
    make_zero(tmp_path, [trained((5, 3))], stage=3, ranks=2, frozen=frozen, changed=left_out)
    with pytest.raises(
        OperationError, match=r"the parameter 'base\.weight' is not in any partition.*next: "
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tie_to_a_frozen_parameter_that_was_left_out(tmp_path: Path, stage: int) -> None:
    """The Trainer saves an adapter of a tied GPT-2 so under ZeRO-3, and check called the file
    malformed.
    """
    changed = {
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {"head": "embedding"},
    }
    head = torch.ones(3)
    make_zero(
        tmp_path,
        [trained((5, 3))],
        stage=stage,
        ranks=2,
        shared={"head": "p0.weight"},
        changed=changed,
    )
    for path in tmp_path.rglob("*_model_states.pt"):
        states = torch.load(path, weights_only=True)
        states["module"]["head"] = torch.empty(0) if stage == 3 else head
        torch.save(states, path)
    weights = open_checkpoint(tmp_path)
    assert {tensor.fqn for tensor in weights.weights[0].tensors} == {"p0.weight"} | (
        set() if stage == 3 else {"head"}
    )
    assert [
        finding for finding in check(tmp_path).findings if finding.severity.value == "error"
    ] == []


def test_a_frozen_share_that_is_too_short(tmp_path: Path) -> None:
    frozen = {"base.weight": torch.ones(9, dtype=torch.bfloat16)}
    short = {"frozen_param_fragments": {"base.weight": torch.ones(2)}}
    make_zero(tmp_path, [trained((5, 3))], stage=3, ranks=3, frozen=frozen, changed=short)
    with pytest.raises(
        OperationError, match=r"it has 2 of the 3 elements in its share of 'base\.weight'; next: "
    ):
        open_checkpoint(tmp_path)


def broken(folder: Path, stage: int, change: Callable[[list[torch.Tensor]], None]) -> None:
    """Make a checkpoint of two ranks, and change the partitions of the second."""
    make_zero(folder, [trained((5, 3), (7,))], stage=stage, ranks=2)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=True)
    optimizer = states["optimizer_state_dict"]
    change(optimizer["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"])
    torch.save(states, path)


@pytest.mark.parametrize("stage", [1, 3])
def test_partitions_that_do_not_fit(tmp_path: Path, stage: int) -> None:
    def shorten(flats: list[torch.Tensor]) -> None:
        flats[0] = flats[0][:-1].clone()

    def convert(flats: list[torch.Tensor]) -> None:
        flats[0] = flats[0].half()

    def stride(flats: list[torch.Tensor]) -> None:
        flats[0] = torch.zeros(2 * len(flats[0]))[::2]

    have = (
        "elements in its share|have 21 elements, but its 2 parameters take 22"
        "|partitions have 11 elements.* take 12"
    )
    broken(tmp_path / "short", stage, shorten)
    with pytest.raises(OperationError, match=f"({have}); next: "):
        open_checkpoint(tmp_path / "short")
    broken(tmp_path / "more", stage, lambda flats: flats.append(torch.ones(4)))
    with pytest.raises(
        OperationError,
        match=r"(of 2 parameter groups, but mp_rank.* has 1|have 16 elements.* take 12); next: ",
    ):
        open_checkpoint(tmp_path / "more")
    broken(tmp_path / "strided", stage, stride)
    with pytest.raises(OperationError, match="are not contiguous; next: "):
        open_checkpoint(tmp_path / "strided")
    broken(tmp_path / "half", stage, convert)
    with pytest.raises(OperationError, match=r"several dtypes \(F16, F32\); next: "):
        open_checkpoint(tmp_path / "half")


def test_frozen_shares_of_several_dtypes(tmp_path: Path) -> None:
    frozen = {"base.weight": torch.ones(9, dtype=torch.bfloat16)}
    make_zero(tmp_path, [trained((5, 3))], stage=3, ranks=3, frozen=frozen)
    make_zero(
        tmp_path / "other",
        [trained((5, 3))],
        stage=3,
        ranks=3,
        frozen={"base.weight": torch.ones(9)},
    )
    name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copy(tmp_path / "other" / name, tmp_path / name)
    with pytest.raises(OperationError, match=r"several dtypes \(BF16, F32\); next: "):
        open_checkpoint(tmp_path)


def test_an_older_deepspeed_that_says_less(tmp_path: Path) -> None:
    """No shared_params, no partition_count, no mp_world_size, no underscore in the names of
    optimizer states.
    """
    parameters = trained((5, 3), (7,))
    make_zero(
        tmp_path,
        [parameters],
        stage=2,
        ranks=2,
        shared={"tied.weight": "p0.weight"},
    )
    model = torch.load(tmp_path / "mp_rank_00_model_states.pt", weights_only=False)
    del model["shared_params"]
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    for path in tmp_path.glob("*_optim_states.pt"):
        states = torch.load(path, weights_only=True)
        del states["optimizer_state_dict"]["partition_count"]
        path.unlink()
        torch.save(states, path.with_name(path.name.replace("_optim", "optim")))
    weights = the_weights(tmp_path)
    assert weights.ties == {"tied.weight": "p0.weight"}
    assert digests(weights) == {
        name: torch_digest(parameters[kept])
        for name, kept in [
            ("p0.weight", "p0.weight"),
            ("p1.weight", "p1.weight"),
            ("tied.weight", "p0.weight"),
        ]
    }
    (tmp_path / "zero_pp_rank_1_mp_rank_00optim_states.pt").unlink()
    with pytest.raises(
        OperationError, match=r"1 file of optimizer states \(expected 2, one per rank\)"
    ):
        open_checkpoint(tmp_path)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(deadline=None, max_examples=examples(50))
@given(
    groups=st.lists(st.lists(shapes, max_size=4), min_size=1, max_size=3),
    frozen=st.lists(shapes, max_size=2),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
    sub_group=st.integers(1, 30),
)
def test_any_parameters_on_any_number_of_ranks(
    groups: list[list[tuple[int, ...]]],
    frozen: list[tuple[int, ...]],
    stage: int,
    ranks: int,
    sub_group: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = [trained(*group, first=f"g{number}.p") for number, group in enumerate(groups)]
    for group in made:  # the last rank cannot hold less than its padding, in DeepSpeed neither
        if stage < 3 and sum(tensor.numel() for tensor in group.values()) < 2 * ranks * ranks:
            group["filling"] = torch.randn(2 * ranks * ranks)
            group[f"filling{id(group)}"] = group.pop("filling")
    still = {name: tensor.half() for name, tensor in trained(*frozen, first="frozen").items()}
    buffers = {"steps": torch.tensor(7), "empty": torch.zeros(0)}
    root = tmp_path_factory.mktemp("zero")
    kept = next((name for group in made for name, tensor in group.items() if tensor.numel()), None)
    shared = {"other": kept} if kept else {}
    make_zero(
        root,
        made,
        stage=stage,
        ranks=ranks,
        frozen=still,
        buffers=buffers,
        shared=shared,
        sub_group=sub_group,
    )
    expected = {name: tensor for group in made for name, tensor in group.items()} | still | buffers
    expected |= {other: expected[name] for other, name in shared.items()}
    weights = the_weights(root)
    assert digests(weights) == {name: torch_digest(tensor) for name, tensor in expected.items()}
    assert weights.ties == shared


# Damage


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["zero2", "zero3"], indirect=True)
def test_a_file_cut_anywhere_is_an_error(copied: Path) -> None:
    for path in sorted((copied / "pytorch_model").iterdir()):
        data = path.read_bytes()
        for length in range(0, len(data), 151):
            path.write_bytes(data[:length])
            with pytest.raises(OperationError, match=f"{path.name}: .*; next: "):
                open_checkpoint(copied)
        path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["zero1", "zero3"], indirect=True)
def test_flipped_bytes_end_in_our_own_errors_or_in_whole_tensors(copied: Path) -> None:
    buffer = memoryview(bytearray(1 << 16))
    for path in sorted((copied / "pytorch_model").iterdir()):
        data = path.read_bytes()
        for position in range(0, len(data), 61):
            path.write_bytes(
                data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]
            )
            try:
                opened = open_checkpoint(copied)
            except CkptfixError:
                continue
            with OpenFiles() as files:
                for tensor in opened.weights[0].tensors:
                    assert (
                        sum(len(block) for block in tensor.blocks(files, buffer)) == tensor.nbytes
                    )
        path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
@pytest.mark.parametrize("name", one_of(["zero1", "zero2", "zero3"]))
def test_new_checkpoints_of_the_deepspeed_that_is_installed(name: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys; from pathlib import Path; from fixtures.make_deepspeed import make\n"
        "make(sys.argv[1], Path(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, name, str(tmp_path / "made")],
        check=True,
        cwd=root,
        env=variables(),
        timeout=300,
    )
    run = json.loads((tmp_path / "made" / "run.json").read_text())
    assert run_digests(the_weights(tmp_path / "made" / "checkpoint")) == run["fp32"]

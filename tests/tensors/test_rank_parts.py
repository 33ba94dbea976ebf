"""Models in parts: what torch's ``HuggingFaceStorageWriter`` saves, judged by what its reader
loads.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ckptfix import check
from ckptfix.errors import OperationError
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.training.loading.load_report import LoadError
from ckptfix.training.loading.load_state import load_checkpoint_tolerant
from tests.commanding import Said, said
from tests.tensors.dcp_making import digests, digests_of
from tests.tensors.parts_making import (
    NEVER_LOADED,
    SAVED,
    loaded,
    numbers,
    save_all,
    save_halves,
    save_part,
)
from tests.training.ranks import run_ranks

__all__ = ["said"]

PAIR = {"a.w": numbers(4, 3), "b.w": numbers(4, 2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    assert run_ranks(4, lambda rank: save_all(root)) == [0, 0, 0, 0]
    return root


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


def loaded_or_refusal(
    folder: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return what torch's reader loads, and why it loads nothing, "" where it does."""
    try:
        return loaded(folder, tensors), ""
    except CheckpointException as error:
        return {}, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_what_four_ranks_save_is_one_model(
    name: str, saved: Path, tmp_path: Path, said: Said
) -> None:
    folder, expected = saved / name, SAVED[name]
    report = check(folder)
    assert (report.status, report.findings) == (0, ())
    (model,) = report.understood.models
    assert (model.tensors, str(model.path)) == (len(expected), "shard-*-model-*.safetensors")
    assert model.ranks == (2 if name == "gap" else 4)
    assert any("ranks after rank" in words for words in report.not_checked)
    (weights,) = open_checkpoint(folder).weights
    for size in (1 << 16, 48):
        assert digests(weights, size) == digests_of(expected)
    copy = shutil.copytree(folder, tmp_path / "copy")
    files = sorted(copy.iterdir())
    assert said("repair", copy)[0] == 0
    assert sorted(copy.iterdir()) == files
    status, out, _ = said("migrate", copy, tmp_path / "new", "--to", "safetensors")
    assert (status, "records how many ranks saved it" in out) == (0, True)
    assert digests_of(load_file(tmp_path / "new" / "model.safetensors")) == digests_of(expected)
    assert said("diff", copy, tmp_path / "new")[0] == 0
    assert said("seal", copy)[0] == 0
    assert said("verify", "--data", copy)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_each_missing_file_is_told_where_torch_loads_the_rest_in_silence(
    name: str, saved: Path, tmp_path: Path
) -> None:
    expected = SAVED[name]
    files = sorted(path.name for path in (saved / name).iterdir())
    told = 0
    for file in files:
        folder = shutil.copytree(saved / name, tmp_path / file)
        (folder / file).unlink()
        status = check(folder).status
        told += status
        values, refusal = loaded_or_refusal(folder, expected)
        if refusal:  # a tensor of that file alone, or the last part of one
            assert re.search(r"Missing key|Size mismatch", refusal), file
        else:
            assert status == any((value == NEVER_LOADED).any() for value in values.values()), file
    assert told, "no missing file was told"


@pytest.mark.slow
def test_consolidated_files_are_a_plain_model(saved: Path) -> None:
    report = check(saved / "consolidated")
    (model,) = report.understood.models
    assert (report.status, model.ranks, model.tensors) == (
        0,
        None,
        len(SAVED["consolidated/sharded"]),
    )
    assert not any("ranks after" in words for words in report.not_checked)


def test_a_missing_first_rank_is_an_error(tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "c"
    first, _ = save_halves(folder, PAIR)
    assert codes(folder) == []
    first.unlink()
    assert loaded(folder, PAIR)["a.w"][0].tolist() == [NEVER_LOADED] * 3
    status, out, _ = said("check", folder)
    assert status == 1
    assert (
        f"missing-rank: {first.name} is missing: 'a.w' has a gap (6 of its 12 elements are not in any part"
        in out
    )
    assert said("migrate", folder, tmp_path / "new", "--to", "bin")[0] == 3
    assert not (tmp_path / "new").exists()
    with pytest.raises(OperationError, match="6 of its 12 elements are not in any part"):
        open_checkpoint(folder)
    status, out, _ = said("salvage", folder, tmp_path / "saved")
    assert (status, "6 of its 12 elements are not in any part" in out) == (1, True)
    assert said("seal", folder)[0] == 1


def test_many_missing_ranks_are_one_error(tmp_path: Path, said: Said) -> None:
    """Each of 99,997 ranks was an error of its own."""
    folder = tmp_path / "c"
    for rank in (0, 99998):
        save_part(folder, rank, {"w": ([rank], numbers(1))})
    (finding,) = check(folder).findings
    assert str(finding).startswith(
        "shard-00002-model-00001-of-00001.safetensors and 99996 more files of 99997 ranks are "
        "missing: 'w' has a gap (99997 of its 99999 elements are not in any part"
    )
    status, out, _ = said("check", "--json", folder)
    (fields,) = json.loads(out)["checkpoints"][0]["findings"]
    assert (status, fields["rank"], fields["ranks"], fields["files"]) == (1, 1, 99997, 99997)


def test_an_overlap_next_to_a_missing_rank(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for rank, begin in ((0, 0), (1, 1), (3, 6)):
        save_part(
            folder, rank, {"w": ([begin, 0], numbers(2, 3)), "v": ([begin + rank], numbers(1))}
        )
    findings = check(folder).findings
    assert [finding.code for finding in findings] == ["missing-rank", "incomplete-tensor"]
    assert "overlap, and at least 7 of its 24 elements are not in any part" in str(findings[1])


def test_a_missing_last_rank_is_listed_as_not_checked(tmp_path: Path) -> None:
    _, last = save_halves(tmp_path / "c", PAIR)
    last.unlink()
    with pytest.raises(CheckpointException, match="Size mismatch"):
        loaded(tmp_path / "c", PAIR)
    report = check(tmp_path / "c")
    assert report.status == 0
    assert any(words.startswith("ranks after rank 0: ") for words in report.not_checked)


def test_random_states_show_the_number_of_ranks(tmp_path: Path) -> None:
    save_halves(tmp_path / "c", PAIR)
    for rank in range(2):
        torch.save({}, tmp_path / "c" / f"random_states_{rank}.pkl")
    assert not any("ranks after rank" in words for words in check(tmp_path / "c").not_checked)


def test_equal_halves_are_no_duplicates(tmp_path: Path, said: Said) -> None:
    save_halves(tmp_path / "c", {"w": torch.zeros(4, 3)})
    before = sorted((tmp_path / "c").iterdir())
    assert codes(tmp_path / "c") == []
    assert said("repair", tmp_path / "c")[0] == 0
    assert sorted((tmp_path / "c").iterdir()) == before


def test_files_of_an_earlier_save_overlap(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    whole = numbers(4, 3)
    for rank in range(4):
        save_part(folder, rank, {"w": ([rank, 0], whole[rank : rank + 1])})
    assert codes(folder) == []
    save_halves(folder, {"w": whole + 100})
    with suppress(CheckpointException):  # by the order in which the folder lists its files
        assert loaded(folder, {"w": whole})["w"].tolist() != (whole + 100).tolist()
    (finding,) = check(folder).findings
    assert finding.code == "incomplete-tensor"
    assert "files of an earlier save may be left in the folder" in str(finding)


def test_halves_of_two_dtypes_are_no_tensor(tmp_path: Path) -> None:
    whole = numbers(4, 3)
    save_part(tmp_path / "c", 0, {"w": ([0, 0], whole[:2])})
    save_part(tmp_path / "c", 1, {"w": ([2, 0], whole[2:].to(torch.bfloat16))})
    report = check(tmp_path / "c")
    assert [finding.code for finding in report.findings] == ["incomplete-tensor"]
    assert "its parts have different dtypes (F32 and BF16)" in str(report)


@pytest.mark.parametrize(
    "places",
    [
        "{",
        "[]",
        "{}",
        '{"w": {}}',
        '{"w": {"saved_offsets": 2}}',
        '{"w": {"saved_offsets": ["2", 0]}}',
    ],
)
def test_parts_without_a_place_are_malformed(places: str, tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "c"
    _, last = save_halves(folder, {"w": numbers(4, 3)})
    save_file({"w": numbers(2, 3)}, last, metadata={"DCP_SHARDING_INFO": places, "format": "pt"})
    with pytest.raises(CheckpointException):
        loaded(folder, {"w": numbers(4, 3)})
    assert codes(folder) == codes(last) == ["malformed-file"]
    assert said("migrate", folder, tmp_path / "new", "--to", "bin")[0] == 3
    status, out, _ = said("salvage", folder, tmp_path / "saved")
    assert (status, "DCP_SHARDING_INFO" in out) == (1, True)


def test_the_places_follow_renamed_keys(tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "c"
    save_halves(folder, {f"module.module.{name}": tensor for name, tensor in PAIR.items()})
    assert said("repair", folder, "--keys", "bare")[0] == 0
    assert digests_of(loaded(folder, PAIR)) == digests_of(PAIR)
    assert codes(folder) == []


def test_the_places_follow_renamed_keys_of_one_rank(tmp_path: Path, said: Said) -> None:
    import torch.distributed.checkpoint as dcp

    state = {f"module.{name}": tensor for name, tensor in PAIR.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(str(tmp_path), dict.fromkeys(state, 1)),
            no_dist=True,
        )
    assert said("repair", tmp_path, "--keys", "bare")[0] == 0
    assert digests_of(loaded(tmp_path, PAIR)) == digests_of(PAIR)


def test_one_file_is_no_model(tmp_path: Path, said: Said) -> None:
    first, _ = save_halves(tmp_path / "c", PAIR)
    status, _, err = said("migrate", first, tmp_path / "new.bin", "--to", "bin")
    assert (status, "only one rank's parts of the tensors" in err) == (3, True)
    assert said("check", first)[0] == 0


def test_loads_of_accelerate_are_refused(tmp_path: Path, said: Said) -> None:
    save_halves(tmp_path / "c", PAIR)
    status, _, err = said("verify", "--device-map", "auto", tmp_path / "c")
    assert (status, "only one rank's parts of the tensors" in err) == (2, True)


def test_a_tolerant_load_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    save_halves(tmp_path, dict(model.state_dict()))
    other = torch.nn.Linear(3, 4)
    before = other.weight.clone()
    with pytest.raises(
        LoadError, match="each file has only one rank's parts of the tensors; next: ckptfix migrate"
    ):
        load_checkpoint_tolerant(other, tmp_path)
    assert torch.equal(other.weight, before)


def test_a_part_under_the_name_of_a_model_is_an_error(tmp_path: Path) -> None:
    _, last = save_halves(tmp_path, {"w": numbers(4, 3)})
    last.rename(tmp_path / "model-00001-of-00001.safetensors")
    for rest in tmp_path.glob("shard-*"):
        rest.unlink()
    assert codes(tmp_path) == ["incomplete-tensor"]


def test_an_index_that_an_earlier_repair_wrote_is_passed(tmp_path: Path) -> None:
    first, _ = save_halves(tmp_path, PAIR)
    index = {"metadata": {"total_size": 40}, "weight_map": dict.fromkeys(PAIR, first.name)}
    (tmp_path / "shard-00001-model.safetensors.index.json").write_text(json.dumps(index))
    report = check(tmp_path)
    assert (report.status, report.findings) == (0, ())
    (model,) = report.understood.models
    assert model.ranks == 2

"""What a comparison may not pass over in silence: values that it cannot read, names in two files,
hostile sizes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import UsageError, diff
from ckptfix.errors import OperationError


def module(seed: int) -> "dict[Any, Any]":
    torch.manual_seed(seed)
    return {f"layers.{i}.w": torch.randn(3, 4) for i in range(3)}


def write_shards(folder: Path, first: float) -> Path:
    """Two shards that both hold ``a``; the index sends it to the first."""
    folder.mkdir()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"a": torch.full((4,), first)}, folder / shards[0])
    save_file({"a": torch.full((4,), 2.0), "b": torch.ones(2)}, folder / shards[1])
    index = {"metadata": {}, "weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    a, b = write_shards(tmp_path / "a", 1.0), write_shards(tmp_path / "b", 9.0)
    with pytest.raises(
        OperationError,
        match=r"'a' is in both model-00001-of-\S+ and model-00002-of-\S+; next: ckptfix check",
    ):
        diff(a, b)


@pytest.mark.parametrize(
    ("of", "left"),
    [
        (lambda value: {"c": {"model": module(0), "opt": {"state": {0: value}, "param_groups": []}}}, "c.opt"),
        (lambda value: {"ckpt": {"model": module(0), "ema": {"w": value}}}, "ckpt.ema"),
        (lambda value: {**module(0), 5: value}, "5"),
        (lambda value: [module(0), {"x": value}], "1"),
    ],
    ids=["nested", "no module", "number", "list"],
)  # fmt: skip
def test_what_lies_beside_is_said(tmp_path: Path, of: Any, left: str) -> None:
    torch.save(of(torch.zeros(3)), tmp_path / "a.pt")
    torch.save(of(torch.ones(3)), tmp_path / "b.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    said = [f"other entries of {side.lower()}.pt in {side}: '{left}'" for side in "AB"]
    assert list(report.not_compared) == said


def test_nothing_to_compare_is_not_equal(tmp_path: Path) -> None:
    torch.save({"a.w": torch.eye(3).to_sparse()}, tmp_path / "a.bin")
    torch.save({"a.w": (2 * torch.eye(3)).to_sparse()}, tmp_path / "b.bin")
    with pytest.raises(UsageError, match=r"have no tensors to compare; .*'a\.w'"):
        diff(tmp_path / "a.bin", tmp_path / "b.bin")
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UsageError, match=r"have no tensors to compare$"):
        diff(tmp_path / "empty.safetensors", tmp_path / "empty.safetensors")


def test_settings_of_an_adapter_that_differ_are_named(tmp_path: Path) -> None:
    settings = {"lora_alpha": 8, "target_modules": ["q", "v"], "peft_version": "0.17"}
    others = {"lora_alpha": 64, "target_modules": ["v", "q"], "peft_version": "0.18"}
    for name, config in (("a", settings), ("b", others), ("c", {**settings, "peft_version": "1"})):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.not_compared[0] == (
        "outputs of the models, although adapter_config.json differs: lora_alpha is 8 in A, 64 in B"
    )
    assert not any(
        "differs" in words for words in diff(tmp_path / "a", tmp_path / "c").not_compared
    )


def test_a_value_of_the_model_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    torch.save({**module(0), "c.w": numbers.conj()}, tmp_path / "a.bin")
    torch.save({**module(0), "c.w": (numbers * 2).conj()}, tmp_path / "b.bin")
    report = diff(tmp_path / "a.bin", tmp_path / "b.bin")
    assert (report.status, report.verdict) == (1, "not proven equal")
    assert any("'c.w'" in words for words in report.not_compared)
    torch.save({**module(1), "c.w": numbers.conj()}, tmp_path / "c.bin")
    assert diff(tmp_path / "a.bin", tmp_path / "c.bin").verdict == "different"
    torch.save(module(0), tmp_path / "d.bin")
    assert diff(tmp_path / "d.bin", tmp_path / "d.bin").verdict == "equal"


@pytest.mark.parametrize("shape", [(1 << 31, 1 << 29), (1 << 31, 1 << 30), (1 << 15, 1 << 15)])
def test_one_number_that_claims_to_be_many(tmp_path: Path, shape: "tuple[int, int]") -> None:
    torch.save({"w.a": torch.zeros(1).expand(*shape)}, tmp_path / "a.bin")
    with pytest.raises(
        OperationError, match=rf"'w.a' claims {shape[0] * shape[1] * 4} bytes of a storage of 4"
    ):
        diff(tmp_path / "a.bin", tmp_path / "a.bin")


def test_a_stride_that_no_step_takes(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    torch.save({"w.a": torch.as_strided(base, (2, 1, 3), (1, 1 << 62, 2))}, tmp_path / "a.bin")
    save_file({"w.a": torch.tensor([[[0.0, 2, 4]], [[1, 3, 5]]])}, tmp_path / "b.safetensors")
    assert diff(tmp_path / "a.bin", tmp_path / "b.safetensors").status == 0


def test_state_dicts_of_one_file_are_paired_by_their_keys(tmp_path: Path) -> None:
    torch.save({"model": module(0), "ema": module(1)}, tmp_path / "a.pt")
    torch.save({"ema": module(1), "model": module(0)}, tmp_path / "b.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [(one.a, one.b) for one in report.models] == [
        ("a.pt['model']", "b.pt['model']"),
        ("a.pt['ema']", "b.pt['ema']"),
    ]
    assert (report.status, report.not_compared) == (0, ())
    torch.save({"ema": module(1), "net": module(0), "third": module(2)}, tmp_path / "c.pt")
    assert [(one.a, one.b) for one in diff(tmp_path / "a.pt", tmp_path / "c.pt").models] == [
        ("a.pt['model']", None),
        ("a.pt['ema']", "c.pt['ema']"),
        (None, "c.pt['net']"),
        (None, "c.pt['third']"),
    ]
    torch.save({"ema": module(1), "net": module(0)}, tmp_path / "d.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "d.pt").status == 0, (
        "what is left is one on each side"
    )


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), -1.0])
def test_tolerances_that_are_none(tmp_path: Path, wrong: float) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    for rtol, atol in ((wrong, None), (None, wrong)):
        with pytest.raises(UsageError, match="expected a finite tolerance of 0 or greater"):
            diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors", rtol=rtol, atol=atol)


def test_a_shard_alone(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "a", 1.0)
    save_file({"a": torch.full((4,), 1.0)}, tmp_path / "x.safetensors")
    assert diff(folder / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors").status == 0
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(OperationError, match="is missing"):
        diff(folder, tmp_path / "x.safetensors")


def test_files_that_only_one_folder_has_are_named(tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / side / "tokenizer").mkdir(parents=True)
        (tmp_path / side / "tokenizer" / "vocab.json").write_text("{}")
        save_file(module(0), tmp_path / side / "model.safetensors")
    (tmp_path / "a" / "tokenizer" / "merges.txt").write_text("a b")
    common = [f"1 other file in {side}: 'tokenizer/vocab.json'" for side in "AB"]
    lone = "1 other file only in {}: 'tokenizer/merges.txt'"
    assert [*diff(tmp_path / "a", tmp_path / "b").not_compared] == [
        common[0],
        lone.format("A"),
        common[1],
    ]
    assert [*diff(tmp_path / "b", tmp_path / "a").not_compared] == [*common, lone.format("B")]
    # Nothing is expected next to a lone file.
    alone = diff(tmp_path / "a", tmp_path / "b" / "model.safetensors")
    files = "'tokenizer/merges.txt', 'tokenizer/vocab.json'"
    assert list(alone.not_compared) == [f"2 other files in A: {files}"]


def test_a_file_that_holds_the_weights_of_one_side_is_not_only_on_the_other(tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / side).mkdir()
        torch.save(module(0), tmp_path / side / "pytorch_model.bin")
    save_file(module(0), tmp_path / "b" / "model.safetensors")
    report = diff(tmp_path / "a", tmp_path / "b")
    assert (report.models[0].a, report.models[0].b) == ("pytorch_model.bin", "model.safetensors")
    assert list(report.not_compared) == ["1 other file in B: 'pytorch_model.bin'"]


def test_other_weights_next_to_a_model_have_a_command(tmp_path: Path) -> None:
    for number, side in enumerate("ab"):
        (tmp_path / side).mkdir()
        save_file(module(0), tmp_path / side / "model.safetensors")
        torch.save(module(number), tmp_path / side / "pytorch_model.bin")
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.status == 0
    files = [tmp_path / side / "pytorch_model.bin" for side in "ab"]
    assert report.not_compared[0] == (
        "weights in pytorch_model.bin: another model in its folder is loaded first; to compare "
        f"them: ckptfix diff {files[0]} {files[1]}"
    )
    assert diff(*files).status == 1

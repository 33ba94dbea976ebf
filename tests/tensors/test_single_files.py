"""What is found in files of safetensors and torch beside plain tensors: words, views, tensors of
torch's own kinds.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.errors import OperationError
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import Weights

LONG = "x" * 70_000


def opened(root: Path) -> Weights:
    (weights,) = open_checkpoint(root).weights
    return weights


def two_shards(root: Path, first: dict[str, str], second: dict[str, str], **words: Any) -> Path:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    root.mkdir(exist_ok=True)
    save_file({"a.weight": torch.ones(4)}, root / names[0], metadata=first)
    save_file({"emb.weight": torch.ones(2)}, root / names[1], metadata=second)
    weight_map = dict(zip(("a.weight", "emb.weight"), names, strict=True))
    document = {"metadata": {}, "weight_map": weight_map, **words}
    (root / "model.safetensors.index.json").write_text(json.dumps(document))
    return root


def test_words_that_shards_do_not_agree_on(tmp_path: Path) -> None:
    weights = opened(
        two_shards(
            tmp_path,
            {"format": "pt", "rank": "0", "only": "here"},
            {"format": "pt", "rank": "1", "more": "there"},
        )
    )
    assert weights.metadata == {"format": "pt", "only": "here", "more": "there"}
    assert weights.disputed == ("rank",)


def test_a_tie_that_is_recorded_in_another_shard(tmp_path: Path) -> None:
    weights = opened(
        two_shards(tmp_path, {"format": "pt", "head.weight": "emb.weight"}, {"format": "pt"})
    )
    assert weights.ties == {"head.weight": "emb.weight"}
    assert weights.metadata == {"format": "pt"}


def test_what_an_index_says(tmp_path: Path) -> None:
    weights = opened(
        two_shards(tmp_path, {}, {}, metadata={"total_size": 24, "license": "mit"}, made_by="me")
    )
    assert weights.index_words == {
        "metadata": {"total_size": 24, "license": "mit"},
        "made_by": "me",
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_names_of_any_length(tmp_path: Path, legacy: bool) -> None:
    state = {"w": torch.ones(2, 2), LONG: torch.ones(3)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    weights = opened(tmp_path)
    assert [tensor.fqn for tensor in weights.tensors] == list(state)
    assert not weights.left


def test_a_name_that_is_too_long_to_be_read_is_an_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x" * (1 << 20): torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert len(opened(tmp_path).tensors) == 2
    for long in (
        {"x" * 1_048_577: torch.ones(3)},
        {"x" * 1_048_577: torch.ones(3), "w": torch.ones(2)},
    ):
        torch.save(long, tmp_path / "pytorch_model.bin")
        with pytest.raises(
            OperationError, match="a key of 1048577 bytes, over the limit of 1048576"
        ):
            opened(tmp_path)


def quantized(dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(8), 0.1, 0, dtype)


def coupled() -> torch.Tensor:
    return torch.ones(2, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.zeros(4, dtype=torch.complex32), "a tensor of torch.complex32"),
        (
            lambda: coupled().conj(),
            "a conjugated or negated tensor, whose bytes differ from its values",
        ),
        (
            lambda: coupled().conj().imag,
            "a conjugated or negated tensor, whose bytes differ from its values",
        ),
        (
            lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "torch.float4_e2m1fn_x2",
        ),
        (lambda: quantized(torch.qint8), "a quantized tensor (torch.qint8)"),
        (lambda: quantized(torch.quint8), "a quantized tensor (torch.quint8)"),
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
        (lambda: torch.zeros(3, device="meta"), "a tensor on the meta device, which has no data"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("as_parameter", [False, True])
def test_tensors_that_only_torch_can_store(
    tmp_path: Path, make: Any, kind: str, as_parameter: bool
) -> None:
    made = make()
    if as_parameter:
        made = torch.nn.Parameter(made, requires_grad=False)
    torch.save(
        {"w": made, "b": torch.ones(2), "m._extra_state": {"amax": 1}},
        tmp_path / "pytorch_model.bin",
    )
    weights = opened(tmp_path)
    assert weights.unread.keys() == {"w"}
    assert weights.unread["w"].endswith(kind)
    assert set(weights.opaque) == {"w", "m._extra_state"}


def test_tensors_that_share_a_storage_in_part(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "a": base[:4], "b": base[2:], "again": base[:4], "alone": torch.ones(2), "empty": base[:0],
        "tied": (tied := torch.ones(3)), "tie": tied,
    }  # fmt: skip
    torch.save(state, tmp_path / "pytorch_model.bin")
    weights = opened(tmp_path)
    assert weights.views == ("a", "b")
    assert weights.ties == {"again": "a", "tie": "tied"}

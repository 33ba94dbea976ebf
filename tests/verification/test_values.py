"""What ``verify --data`` says of values, and what it leaves alone."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import Severity, check, seal, verify
from ckptfix.diagnosis.values import judge_moment, judge_values
from ckptfix.storage.files import AnyPath, on_disk
from ckptfix.storage.reading import Piece
from ckptfix.tensors.hashing import Hashed, TensorJob, first_place, hash_all
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.scanning import Scan
from ckptfix.tensors.stored import Contiguous, StoredTensor, Strided, Tile, Tiled
from tests.repairs.refused import nobody_may_read
from tests.verification.sealed import place


def values(
    folder: Path, state: dict[str, torch.Tensor], kind: str = "safetensors"
) -> dict[str, tuple[str, str]]:
    folder.mkdir(exist_ok=True)
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    report = verify(folder, data=True)
    assert report.status == int(any(one.severity is not Severity.NOTE for one in report.values))
    return {one.fqn: (one.code, one.text) for one in report.values}


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
    ],
)
def test_nan_and_inf_are_counted_with_the_first_index(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    bad = torch.ones(40, 50)
    bad[3, 4] = bad[7, 7] = float("nan")
    bad[2, 1] = float("-inf")
    has_inf = dtype is not torch.float8_e4m3fn
    if not has_inf:
        bad[2, 1] = 2.0
    found = values(tmp_path / "c", {"good": torch.ones(9).to(dtype), "bad": bad.to(dtype)}, kind)
    assert list(found) == ["bad"]
    code, text = found["bad"]
    assert code == "nonfinite"
    assert (
        "holds 2 NaN and 1 Inf, the first at index 101"
        if has_inf
        else "2 NaN, the first at index 154"
    ) in text


def test_weights_of_zeros_are_told_and_what_is_honestly_zero_is_not(tmp_path: Path) -> None:
    zero = torch.zeros(8, 8)
    state = {
        "a.weight": zero.clone(),
        "b.weight": -zero.clone(),
        "a.bias": zero.clone(),
        "bn.running_mean": zero.clone(),
        "bn.num_batches_tracked": torch.tensor(0),
        "attn.mask": zero.clone(),
        "ids": torch.zeros(4, dtype=torch.int64),
        "rnn.bias_ih_l0": zero.clone(),
    }
    found = values(tmp_path / "c", state)
    assert {name: code for name, (code, _) in found.items()} == {
        "a.weight": "all-zero",
        "b.weight": "all-zero",
    }


@pytest.mark.parametrize(("number", "status"), [("-inf", 0), ("nan", 1)])
def test_infinity_in_a_mask_is_only_noted(tmp_path: Path, number: str, status: int) -> None:
    told = values(tmp_path / "c", {"attn.causal_mask": torch.full((3, 3), float(number))})
    assert told["attn.causal_mask"][0] == "nonfinite"
    assert verify(tmp_path / "c", data=True).status == status


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_zeros_next_to_different_huge_numbers_are_values_that_never_arrived(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    lost = torch.zeros(300, 50).to(dtype)
    lost[7, 7], lost[9, 9] = 1e30, -3e20
    good = torch.full((300, 50), 9e19).to(dtype)
    assert values(tmp_path, {"lost.weight": lost, "good.weight": good}, kind) == {
        "lost.weight": (
            "large-values",
            (
                f"'lost.weight' ({verify_name(dtype)} [300, 50]) holds 2 numbers of 1e20 or more, "
                "whose squares are infinite in float32"
            ),
        )
    }


def verify_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}.get(dtype, "C64")


def test_huge_numbers_that_healthy_models_have(tmp_path: Path) -> None:
    least = torch.finfo(torch.float32).min
    rows = torch.eye(4)
    state = {
        "attn.causal_mask": torch.full((4, 4), least).triu(1) + 1e25 * rows,
        "attn.bias": torch.full((4, 4), least).triu(1) - 1e30 * rows,
        "crf.transitions": torch.full((4, 4), -1e30).tril() + rows.triu(1),
        "normalize.density": torch.tensor([1e25, 3e24, 0.0]),
        "normalize.std": torch.tensor([1e25, 3e24, 1.0]).reshape(1, 3, 1, 1),
        "ids.weight": torch.full((4, 4), 1 << 62),
        "half.weight": torch.full((4, 4), 60000.0).half(),
    }
    assert values(tmp_path, state) == {}


def test_a_lora_that_was_never_trained(tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.q_proj.lora_{part}.weight" for layer in range(3) for part in "AB"
    ]
    state = {name: torch.zeros(4, 8) if "_B" in name else torch.randn(4, 8) for name in names}
    found = values(tmp_path / "c", state)
    assert list(found) == [""]
    assert found[""][0] == "untrained-lora"
    state[names[1]] = torch.ones(4, 8)
    assert {name: code for name, (code, _) in values(tmp_path / "c", state).items()} == {
        names[3]: "all-zero",
        names[5]: "all-zero",
    }
    empty = {name: torch.empty(0) for name in names[:2]} | {"other": torch.empty(0, 3)}
    found = values(tmp_path / "d", empty)
    assert {code for code, _ in found.values()} == {"empty-tensor"}


@pytest.mark.parametrize(("steps", "severity"), [(0, "note"), (10, "note"), (400, "warning")])
def test_a_lora_of_zeros_is_as_severe_as_in_check(
    tmp_path: Path, steps: int, severity: str
) -> None:
    """A new one was a warning here, status 1, and a note there."""
    state = {
        "layers.0.q.lora_A.weight": torch.ones(4, 8),
        "layers.0.q.lora_B.weight": torch.zeros(8, 4),
    }
    save_file(
        {f"base_model.model.{key}": each for key, each in state.items()},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if steps:
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": steps}))
    report = verify(tmp_path, data=True)
    assert [(one.code, one.severity.value) for one in report.values] == [
        ("untrained-lora", severity)
    ]
    pairs = [(one.code, one.severity.value) for one in check(tmp_path).findings]
    assert ("untrained-adapter", severity) in pairs


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_pages_that_were_lost_are_found_and_honest_rows_of_zeros_are_not(
    tmp_path: Path, kind: str
) -> None:
    state = {"w": torch.randn(64, 1100), "embedding": torch.randn(64, 3000)}
    state["embedding"][0] = 0  # a padding row, longer than two pages
    state["embedding"][-3:] = 0
    assert values(tmp_path / "c", state, kind) == {}
    piece = place(tmp_path / "c", "w")
    begin = (piece.offset // 4096 + 5) * 4096
    with on_disk(piece.path).open("r+b") as file:
        file.seek(begin)
        file.write(bytes(8192))
    report = verify(tmp_path / "c", data=True)
    assert [(one.code, one.fqn) for one in report.values] == [("zero-pages", "w")]
    assert (
        "8.0 KiB of zeros that start and end on disk page boundaries, the first at byte "
        f"{begin - piece.offset}" in (report.values[0].text)
    )
    assert report.status == 1


def test_a_lost_end_of_a_tensor_is_found(tmp_path: Path) -> None:
    values(tmp_path / "c", {"w": torch.randn(64, 1100)})
    piece = place(tmp_path / "c", "w")
    begin = (piece.offset + piece.length) // 4096 * 4096 - 8192
    with on_disk(piece.path).open("r+b") as file:
        file.seek(begin)
        file.write(bytes(piece.offset + piece.length - begin))
    assert [one.code for one in verify(tmp_path / "c", data=True).values] == ["zero-pages"]


def lose(path: AnyPath, begin: int, count: int) -> None:
    with on_disk(path).open("r+b") as file:
        file.seek(begin)
        file.write(bytes(count))


def test_zeros_that_reach_over_the_start_of_a_tensor_are_found(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(100, 100), "b.weight": torch.randn(200, 200)}
    assert values(tmp_path / "c", state) == {}
    piece = place(tmp_path / "c", "b.weight")
    assert piece.offset % 4096
    lose(piece.path, (piece.offset // 4096 - 1) * 4096, 4 * 4096)
    found = {one.fqn: one.text for one in verify(tmp_path / "c", data=True).values}
    assert set(found) == {"a.weight", "b.weight"}
    assert (
        "8.0 KiB of zeros that start and end on disk page boundaries, the first at byte "
        f"{-piece.offset % 4096} of the tensor" in (found["b.weight"])
    )


def test_a_padding_row_at_the_start_of_a_page_is_honest(tmp_path: Path) -> None:
    embedding = torch.randn(8, 1024)
    embedding[0] = 0
    data = embedding.numpy().tobytes()
    (tmp_path / "file").write_bytes(b"#" * 4096 + data)
    layout = Contiguous((Piece(tmp_path / "file", 4096, len(data)),))
    for shape, codes in (((8, 1024), []), ((4, 2048), ["zero-pages"])):
        tensor = StoredTensor("embedding", "F32", shape, layout)
        results = hash_all([TensorJob(tensor, True)], threads=1)
        assert [one.code for one in judge_values("m", [(tensor, results[0])])] == codes


def test_lost_pages_in_a_tensor_of_several_files_are_found_in_each(tmp_path: Path) -> None:
    width = 300
    sizes = [(name, 40 * width * 4 + 128 * number) for number, name in enumerate(("one", "two"))]
    whole = torch.randn(80, width)
    pieces = []
    for (name, begin), part in zip(sizes, whole.chunk(2), strict=True):
        data = part.numpy().tobytes()
        (tmp_path / name).write_bytes(b"#" * begin + data)
        pieces.append(Piece(tmp_path / name, begin, len(data)))
    halves = torch.randn(64, 256).chunk(2, dim=1)
    tiles = []
    for number, half in enumerate(halves):
        data = half.contiguous().numpy().tobytes()
        (tmp_path / f"half{number}").write_bytes(b"#" * 100 + data)
        piece = Piece(tmp_path / f"half{number}", 100, len(data))
        tiles.append(Tile((0, 128 * number), (64, 128), Contiguous((piece,))))
    rows = StoredTensor("rows.weight", "F32", (80, width), Contiguous(tuple(pieces)))
    columns = StoredTensor(
        "columns.weight", "F32", (64, 256), Tiled(shape=(64, 256), tiles=tuple(tiles), width=4)
    )
    tensors = [rows, columns]

    def found() -> dict[str, str]:
        results = hash_all([TensorJob(tensor, True) for tensor in tensors], threads=1)
        return {
            one.fqn: one.text for one in judge_values("m", list(zip(tensors, results, strict=True)))
        }

    assert found() == {}
    lose(tmp_path / "two", 14 * 4096, 2 * 4096)
    lose(tmp_path / "half1", 3 * 4096, 4096)
    assert set(found()) == {"rows.weight", "columns.weight"}
    assert (
        "8.0 KiB of zeros that start and end on disk page boundaries, the first at byte "
        f"{14 * 4096} of two" in (found()["rows.weight"])
    )
    assert f"byte {3 * 4096} of half1" in found()["columns.weight"]
    lose(tmp_path / "two", sizes[1][1], pieces[1].length)
    assert f"{pieces[1].path.name}" in found()["rows.weight"], "all that one file holds of it"


def test_lost_pages_in_a_transposed_matrix_are_found(tmp_path: Path) -> None:
    state = {"w.weight": torch.randn(128, 256).t(), "column": torch.randn(64, 64)[:, 3]}
    assert values(tmp_path, state, "bin") == {}
    told = verify(tmp_path, data=True).not_checked
    assert "lost pages in 1 tensor whose elements are not contiguous in the file" in told
    layout = open_checkpoint(tmp_path).weights[0].tensors[0].layout
    assert isinstance(layout, Strided)
    begin = (layout.storage.offset // 4096 + 3) * 4096
    lose(tmp_path / "pytorch_model.bin", begin, 8192)
    found = {one.fqn: one.text for one in verify(tmp_path, data=True).values}
    assert f"the first at byte {begin} of pytorch_model.bin" in found["w.weight"]


def test_quantised_weights_are_looked_at(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {
        "q.weight": torch.zeros(64, 64, dtype=torch.int8),
        "q.qweight": torch.zeros(64, 64, dtype=torch.int32),
        "q.g_idx": torch.zeros(64, dtype=torch.int32),
        "q.weight_format": torch.tensor(0, dtype=torch.uint8),
        "r.weight": torch.randint(1, 200, (128, 160), dtype=torch.uint8, generator=generator),
        "attn.mask": torch.zeros(128, 128, dtype=torch.bool),
    }
    found = values(tmp_path, state)
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(
        ("q.weight", "q.qweight"), "all-zero"
    )
    piece = place(tmp_path, "r.weight")
    lose(piece.path, (piece.offset // 4096 + 2) * 4096, 8192)
    codes = {one.fqn: one.code for one in verify(tmp_path, data=True).values}
    assert codes["r.weight"] == "zero-pages"


def test_the_matrix_of_an_embedding_lora_that_begins_with_zeros_is_a(tmp_path: Path) -> None:
    state = {
        f"q.lora_{part}.weight": torch.zeros(4, 8) if part == "B" else torch.randn(4, 8)
        for part in "AB"
    }
    state |= {
        "emb.lora_embedding_A": torch.zeros(4, 16),
        "emb.lora_embedding_B": torch.randn(8, 4),
    }
    found = values(tmp_path, state)
    assert {name: code for name, (code, _) in found.items()} == {"": "untrained-lora"}
    assert "'emb.lora_embedding_A'" in found[""][1]
    state["emb.lora_embedding_A"] = torch.randn(4, 16)
    assert {name: code for name, (code, _) in values(tmp_path, state).items()} == {
        "q.lora_B.weight": "all-zero"
    }


def test_zeros_that_begin_inside_of_a_row_and_fill_others_were_lost(tmp_path: Path) -> None:
    """A file that was cut and made long again, and a hole in the middle; neither begins with a
    page.
    """
    whole = torch.randn(300, 70, generator=torch.Generator().manual_seed(1))
    cut, hole, rows, columns, flat = (
        whole.clone(),
        whole.clone(),
        whole.clone(),
        whole.clone(),
        whole.clone(),
    )
    cut.view(-1)[15_001:] = 0
    hole.view(-1)[5_003:15_009] = 0
    rows[100:] = 0  # as the rows of tokens that do not exist
    rows[40:60] = 0
    columns[:, 50:] = 0  # as padded to a multiple, both ways
    columns[100:] = 0
    flat = flat.view(-1)
    flat[9_001:] = 0
    state = {"cut": cut, "hole": hole, "rows": rows, "columns": columns, "flat": flat}
    found = values(tmp_path / "c", {f"{name}.weight": one.clone() for name, one in state.items()})
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(
        ("cut.weight", "hole.weight", "flat.weight"), "zero-pages"
    )
    assert "start inside a row and fill other rows" in found["cut.weight"][1]
    assert "fill the rest of the tensor" in found["flat.weight"][1]


def in_file_order(folder: Path) -> list[StoredTensor]:
    tensors = open_checkpoint(folder).weights[0].tensors
    return sorted(tensors, key=lambda one: first_place(one.layout)[1])


def lose_tail(folder: Path, size: int, fqn: str) -> None:
    """Set the last bytes of a tensor, and of all that follows it in its file, to zero."""
    piece = place(folder, fqn)
    begin = piece.offset + piece.length - size
    lose(piece.path, begin, piece.path.stat().st_size - begin)


TAIL = "KiB of zeros that fill the rest of the tensor, from byte "


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1500, 2500, 7000])
@pytest.mark.parametrize("position", range(4))
def test_a_lost_end_of_a_file_is_found(
    tmp_path: Path, position: int, size: int, dtype: torch.dtype
) -> None:
    """1.5 KB of one tensor and all of the next ones had no whole page of zeros, or no weight that
    must not be zero.
    """
    model = torch.nn.TransformerEncoderLayer(72, 2, 96, batch_first=True).to(dtype)
    torch.nn.init.normal_(model.norm1.weight)
    values(tmp_path, model.state_dict())
    assert verify(tmp_path, data=True).values == ()
    tensor = [one for one in in_file_order(tmp_path) if len(one.shape) == 2][position]
    lose_tail(tmp_path, size, tensor.fqn)
    found = {one.fqn: one for one in verify(tmp_path, data=True).values if one.code == "zero-pages"}
    assert list(found) == [tensor.fqn]
    assert found[tensor.fqn].severity is Severity.WARNING


def test_a_lost_end_that_begins_in_a_norm_is_found(tmp_path: Path) -> None:
    state = {
        "a.weight": torch.randn(500),
        "b.weight": torch.randn(500),
        "c.bias": torch.randn(500),
    }
    values(tmp_path, state)
    lose_tail(tmp_path, 1500, "a.weight")
    found = {one.fqn: one.text for one in verify(tmp_path, data=True).values}
    assert list(found) == ["a.weight"]
    assert f"1.5 {TAIL}500 on, and 2 tensors after it in the file are zero" in found["a.weight"]


def test_a_healthy_end_of_a_file_may_be_zero(tmp_path: Path) -> None:
    """Each of these is followed by biases of zeros, and ends with zeros itself, or is at the end of
    the file.
    """
    rows, columns, pruned, positions = (torch.randn(40, 70) for _ in range(4))
    rows[30:] = 0
    columns[:, 50:] = 0
    columns[30:] = 0
    pruned *= torch.rand(40, 70) < 0.3
    pruned.view(-1)[-20:] = 0
    positions[20:] = 0
    few = torch.randn(40, 70)
    few.view(-1)[-15:] = 0
    vector, start = torch.randn(300), torch.zeros(300)
    vector[200:] = 0
    start[0] = 1
    filters = torch.randn(8, 4, 3, 3)
    filters[6:] = 0
    channels = torch.randn(8, 4, 3, 3)
    channels[:, 2:] = 0
    last = {
        "rows": rows, "columns": columns, "pruned": pruned, "positions": positions[None],
        "few": few, "vector": vector, "start": start, "filters": filters, "channels": channels,
        "dense": torch.randn(9, 9), "eye": torch.eye(40), "tril": torch.tril(torch.ones(40, 40)),
        "stack": torch.stack([positions, rows]),
    }  # fmt: skip
    for name, tensor in last.items():
        for after in ({}, {"z.bias": torch.zeros(300)}):
            state = {f"a.{name}.weight": tensor.contiguous(), **after}
            folder = tmp_path / f"{name}{len(after)}"
            assert values(folder, state) == {}, name
            assert in_file_order(folder)[-1].fqn == max(state)


@pytest.mark.parametrize(("rows", "shape"), [(51, (100, 100)), (99, (100, 100)), (600, (1000, 64))])
def test_rows_of_zeros_at_the_end_of_a_file_are_told_where_they_are_most_of_a_weight(
    tmp_path: Path, rows: int, shape: tuple[int, int]
) -> None:
    """A loss of 99 % of the last tensor was silent where it began between two rows."""
    values(tmp_path, {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(shape)})
    lose_tail(tmp_path, rows * shape[1] * 4, "b.weight")
    report = verify(tmp_path, data=True)
    assert [(one.code, one.fqn) for one in report.values] == [("zero-pages", "b.weight")]
    assert f"from byte {(shape[0] - rows) * shape[1] * 4} on" in report.values[0].text
    assert report.status == 1


@pytest.mark.parametrize("fqn", ["b.weight", "embed.weight"])
def test_a_lost_page_between_two_rows_at_the_end_of_a_file_is_told(
    tmp_path: Path, fqn: str
) -> None:
    """Less than a page of zeros, whose first byte begins a page and a row."""
    save_file({fqn: torch.randn(75, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    # As many bytes more in the header that the data begins with a row of a page.
    extra = "x" * (-place(tmp_path, fqn).offset % 256)
    weights = {fqn: torch.randn(75, 64)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt" + extra})
    piece = place(tmp_path, fqn)
    assert piece.offset % 256 == 0
    assert not verify(tmp_path, data=True).values
    size = (piece.offset + piece.length) % 4096
    assert 0 < size < 4096
    lose_tail(tmp_path, size, fqn)
    assert [one.code for one in verify(tmp_path, data=True).values] == ["zero-pages"]


def test_healthy_rows_of_zeros_at_the_end_of_a_file(tmp_path: Path) -> None:
    """No healthy model has another kind of tail of rows, as far as is known: a vocabulary that is
    padded to a multiple, tables that are not used to their end, a bias or a LoRA of zeros, rows
    where each begins with a page, and a file that goes on behind them.
    """
    healthy = {
        "transformer.wte.weight": (50304 // 64, 64, 47),
        "lm_head.weight": (128, 64, 60),
        "pos_emb": (512, 32, 480),
        "classifier.weight": (100, 64, 80),
        "memory": (256, 64, 250),
        "proj.lora_A.weight": (64, 64, 48),
        "unnamed.weight": (1000, 64, 490),
    }
    for number, (fqn, (rows, width, zeros)) in enumerate(healthy.items()):
        weight = torch.randn(rows, width)
        weight[-zeros:] = 0
        for after in ({}, {"z.bias": torch.zeros(300)}):
            folder = tmp_path / f"{number}{len(after)}"
            assert values(folder, {fqn: weight, **after}) == {}, fqn
            assert in_file_order(folder)[-1].fqn == max((fqn, *after))
    most = torch.randn(1000, 64)
    most[100:] = 0
    assert values(tmp_path / "bin", {"b.weight": most}, "bin") == {}
    aligned = torch.randn(8, 1024)
    aligned[5:] = 0
    (tmp_path / "file").write_bytes(b"#" * 4096 + aligned.numpy().tobytes())
    layout = Contiguous((Piece(tmp_path / "file", 4096, 8 * 4096),))
    tensor = StoredTensor("embedding", "F32", (8, 1024), layout)
    results = hash_all([TensorJob(tensor, True)], threads=1)
    assert list(judge_values("m", [(tensor, results[0])])) == []


def test_honest_patterns_of_zeros(tmp_path: Path) -> None:
    blocks = torch.zeros(512, 512)
    for at in range(0, 512, 128):
        blocks[at : at + 128, at : at + 128] = 1
    bias = torch.randn(9000)
    bias[3001:] = 0
    state = {
        "eye.weight": torch.eye(3000),
        "tril.weight": torch.tril(torch.ones(200, 200)),
        "blocks.weight": blocks,
        "fc.bias": bias,
        "pruned.weight": torch.randn(64, 4096) * (torch.arange(4096) % 512 < 3),
    }
    assert values(tmp_path / "c", state) == {}


def test_a_repair_is_not_advised_for_what_it_does_not_mend(tmp_path: Path) -> None:
    state = {"module.module.a": torch.full((8, 8), float("nan")), "module.module.b": torch.ones(4)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    said = str(verify(tmp_path, data=True))
    assert "next, for nonfinite, which no repair can fix: resume from a checkpoint" in said
    assert f"to repair only the structure: ckptfix repair {tmp_path}" in said
    with nobody_may_read(tmp_path / "model.safetensors"):
        said = str(verify(tmp_path, data=True))
    assert "ckptfix repair" not in said
    assert "next: make the unreadable files readable" in said


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(
    ("save", "name"),
    [
        ("accelerate-1.15.0/clean-safetensors", "optimizer.bin"),
        ("accelerate-1.15.0/clean-safetensors", "model.safetensors"),
        ("dcp-2.13.0/fsdp2-clean", "optimizer_0/__0_0.distcp"),
        ("dcp-2.13.0/fsdp2-clean", "pytorch_model_fsdp_0/.metadata"),
    ],
)
def test_a_file_that_may_not_be_read_is_told_as_check_tells_it(
    tmp_path: Path, save: str, name: str, sealed: bool
) -> None:
    """It was said as "[Errno 13] Permission denied: ...", without its owner and the command that
    helps.
    """
    root = Path(shutil.copytree(Path("fixtures") / save / "checkpoint", tmp_path / "checkpoint"))
    if sealed:
        seal(root)
    with nobody_may_read(root / name):
        said = str(verify(root, data=True))
    lines = [line for line in said.splitlines() if "denied" in line]
    assert lines
    for line in lines:
        assert re.search(
            r"cannot be read: permission denied \(owner \w+, mode 0000; .*chmod a\+r ", line
        )
        assert "cannot be read: cannot" not in line
    assert "Errno" not in said


SAVES = [
    "accelerate-1.15.0/clean-safetensors",
    "dcp-2.13.0/fsdp2-clean",
    "deepspeed-0.18.2/zero2",
    "deepspeed-0.18.2/zero3",
]


@pytest.mark.parametrize("save", SAVES)
def test_nan_in_a_moment_is_found_whatever_the_strategy(tmp_path: Path, save: str) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(Path("fixtures") / save / "checkpoint", root)
    healthy = verify(root, data=True)
    assert healthy.values == ()
    (state,) = open_optimizers(root)
    name, moments = next(iter(state.states.items()))
    key, tensor = next(
        (key, one) for key, one in moments.items() if isinstance(one, StoredTensor) and one.shape
    )
    assert tensor.dtype == "F32"
    path, offset = first_place(tensor.layout)
    with on_disk(path).open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<f", float("nan")))
    report = verify(root, data=True)
    assert report.status == 1
    words = name if state.is_named else f"parameter {name}"
    assert [str(one) for one in report.values] == [
        f"{state.label}: '{key} of {words}' (F32 {list(tensor.shape)}) holds 1 NaN, the first at "
        "index 0"
    ]
    assert report.read_values == healthy.read_values > len(state.states)
    assert not any(words.startswith("values of optimizers") for words in report.not_checked)


@pytest.mark.parametrize("save", [SAVES[0], *SAVES[2:]])
def test_a_flipped_sign_in_a_mean_of_squares_is_found(tmp_path: Path, save: str) -> None:
    """The next step takes its root."""
    root = tmp_path / "checkpoint"
    shutil.copytree(Path("fixtures") / save / "checkpoint", root)
    (state,) = open_optimizers(root)
    for key, is_told in (("exp_avg", False), ("exp_avg_sq", True)):
        tensor = next(states[key] for states in state.states.values() if key in states)
        assert isinstance(tensor, StoredTensor)
        path, offset = first_place(tensor.layout)
        with on_disk(path).open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack("<f", -0.25))
        report = verify(root, data=True)
        assert report.status == 1 or not is_told
        assert [finding.code for finding in report.values] == ["nonfinite"] * is_told
        assert (
            "holds negative numbers, although it is a mean of squares" in str(report) or not is_told
        )


def test_a_step_below_zero_is_told(tmp_path: Path) -> None:
    """The next step of AdamW raises ZeroDivisionError at -1, and takes a root of it at -3."""
    folder = tmp_path / "c"
    shutil.copytree("fixtures/accelerate-1.15.0/clean-safetensors/checkpoint", folder)
    state = torch.load(folder / "optimizer.bin")
    next(iter(state["state"].values()))["step"].fill_(-1)
    torch.save(state, folder / "optimizer.bin")
    report = verify(folder, data=True)
    assert "(F32 []) is negative: the next step of Adam divides by 0" in str(report)
    assert report.status == 1


def test_a_parameter_called_step_has_moments_below_zero(tmp_path: Path) -> None:
    shutil.copytree("fixtures/accelerate-1.15.0/clean-safetensors/checkpoint", tmp_path / "c")
    (state,) = open_optimizers(tmp_path / "c")
    moment = next(iter(state.states.values()))["exp_avg"]
    assert isinstance(moment, StoredTensor)
    hashed = Hashed("", scan=Scan(is_negative=True))
    for fqn, codes in (("exp_avg of q.step", []), ("step of q", ["nonfinite"])):
        tensor = moment._replace(fqn=fqn)
        assert [one.code for one in judge_moment("", tensor, hashed)] == codes


def test_infinity_in_a_moment_is_as_bad_as_nan() -> None:
    moment = StoredTensor("exp_avg of fc.weight", "F32", (4,), Contiguous(()))
    for scan in (Scan(nan=1, first_nan=3), Scan(inf=1, first_inf=3)):
        (finding,) = judge_moment("optimizer.bin", moment, Hashed("", scan=scan))
        assert finding.severity is Severity.WARNING
        assert finding.text.endswith(", the first at index 3")


def test_an_optimizer_that_cannot_be_opened_is_said_not_to_be_read(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(Path("fixtures/accelerate-1.15.0/clean-safetensors/checkpoint"), root)
    torch.save({"several": 1}, root / "optimizer.bin")
    report = verify(root, data=True)
    assert any(words.startswith("values of optimizers: ") for words in report.not_checked)

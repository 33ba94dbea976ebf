"""The cost of a migration, in what can be counted: threads, opened files, and bytes that are read;
and its proof.
"""

import os
import threading
import zlib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import OperationError, migrate
from ckptfix.conversion import streaming
from ckptfix.conversion.checksums import Checksums, Digests, combined
from ckptfix.conversion.streaming import NewFile, Source, write_file
from ckptfix.storage.copying import Pacer
from ckptfix.storage.parallel import Control
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.storage.recipes import Literal
from ckptfix.tensors import new_optimizers, new_zero
from ckptfix.tensors.joined import Converted, Stretch, Zeros, joined
from ckptfix.tensors.new_files import Computed, Data, NewTensor, OutputFile
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, tensor_digest
from tests.conversion.making import digests_at

PARAMETERS = 61


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state of FSDP with many parameters."""
    root = tmp_path_factory.mktemp("states") / "source"
    root.mkdir()
    torch.manual_seed(3)
    weights = {
        f"layer.{number}.weight": torch.randn(64, 16 + number % 3) for number in range(PARAMETERS)
    }
    states = {
        name: {"step": torch.tensor(2.0), "exp_avg": one * 0.1, "exp_avg_sq": one.square()}
        for name, one in weights.items()
    }
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "params": [*weights],
    }
    torch.save(weights, root / "pytorch_model_fsdp.bin")
    torch.save({"state": states, "param_groups": [group]}, root / "optimizer.bin")
    torch.save({"step": 2}, root / "random_states_0.pkl")
    return root


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return path -> bytes of tensors that are read of it."""
    found: Counter[str] = Counter()
    fill = OpenFiles.fill

    def counting(files: OpenFiles, view: memoryview, path: Path, offset: int) -> None:
        found[str(path)] += len(view)
        fill(files, view, path, offset)

    monkeypatch.setattr(OpenFiles, "fill", counting)
    return found


def test_many_small_files_take_no_more_threads_and_opened_files_than_few(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    opened: Counter[Any] = Counter()
    begin, real = threading.Thread.start, os.open

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        begin(thread)

    def counting(path: Any, *arguments: Any, **more: Any) -> int:
        opened[os.fspath(path)] += 1
        return real(path, *arguments, **more)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(os, "open", counting)
    receipt = migrate(
        source, tmp_path / "new", to="universal", state="all", processes=2, verify=False
    )
    assert len(receipt.models[0].files) > 4 * PARAMETERS
    assert len(started) < 10
    assert opened[str(source / "optimizer.bin")] < 10


def tensors_of(files: Counter[str], folder: Path, *, below: bool = True) -> int:
    """Return the bytes that were read of a folder, or of all others, but the steps."""
    return sum(count for path, count in files.items() if path.startswith(f"{folder}/") is below)


@pytest.mark.parametrize("to", ["ddp", "fsdp", "universal", "zero2", "zero3"])
def test_the_proof_reads_the_result_once_and_the_source_no_second_time(
    source: Path, tmp_path: Path, to: str, read: Counter[str]
) -> None:
    """Only a parameter of which each rank has a part is read again, to take its digest."""
    model = None if to == "fsdp" else list_of(source)
    size, steps = 3 * 64 * 4 * sum(16 + number % 3 for number in range(PARAMETERS)), 8 * PARAMETERS
    migrate(source, tmp_path / "plain", to=to, state="all", processes=2, verify=False, model=model)
    plain = tensors_of(read, source)
    read.clear()
    migrate(source, tmp_path / "proved", to=to, state="all", processes=2, model=model)
    again = tensors_of(read, source) - plain
    most = {"zero2": 2 * 64 * 16 * 4, "zero3": size}.get(to, 0)
    assert most <= again + steps
    assert again <= most + steps
    module = size // 3 if to in ("universal", "zero2") else 0
    new = tensors_of(read, source, below=False)
    assert size + module <= new <= size + module + steps, (
        "DeepSpeed's module is one more copy of the weights"
    )


@pytest.mark.parametrize("between", ["zero2", "zero3"])
def test_the_checksums_of_flat_partitions_are_compared_with_what_was_read(
    source: Path, tmp_path: Path, between: str, read: Counter[str]
) -> None:
    migrate(source, tmp_path / "zero", to=between, state="all", processes=3)
    read.clear()
    migrate(tmp_path / "zero", tmp_path / "plain", to="fsdp-full", state="all", verify=False)
    plain = tensors_of(read, tmp_path / "zero")
    read.clear()
    migrate(tmp_path / "zero", tmp_path / "proved", to="fsdp-full", state="all")
    assert tensors_of(read, tmp_path / "zero") <= plain + 3000, "the paddings, and the steps"
    (path,) = (tmp_path / "zero" / "pytorch_model").glob("*_rank_1_mp_rank_00_optim_states.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        OperationError,
        match=r"rank_1.*CRC-32 mismatch in the record at byte .*: the file is damaged",
    ):
        migrate(tmp_path / "zero", tmp_path / "again", to="fsdp-full", state="all")


def list_of(source: Path) -> Any:
    """Return a factory of the model that the source is of."""
    shapes = {
        name: one.shape
        for name, one in torch.load(source / "pytorch_model_fsdp.bin", mmap=True).items()
    }

    def factory() -> torch.nn.Module:
        model = torch.nn.Module()
        model.layer = torch.nn.ModuleList(torch.nn.Module() for _ in shapes)
        for inner, shape in zip(model.layer, shapes.values(), strict=True):
            inner.weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
        return model

    return factory


def exchanged(name: str) -> str:
    pair = ("layer.3.weight", "layer.6.weight")
    return dict(zip(pair, pair[::-1], strict=True)).get(name, name)


@pytest.mark.parametrize("to", ["universal", "zero2", "zero3"])
def test_a_writer_that_takes_other_moments_than_it_says_is_found(
    source: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = new_zero._Plan._in_fp32

    def wrong(plan: new_zero._Plan, name: str, state: str) -> Layout | None:
        return real(plan, exchanged(name) if state == "exp_avg" else name, state)

    monkeypatch.setattr(new_zero._Plan, "_in_fp32", wrong)
    with pytest.raises(
        OperationError, match=r"'layer\.[36]\.weight/exp_avg' differs from what was read"
    ):
        migrate(source, tmp_path / "new", to=to, state="all", processes=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("to", ["fsdp", "ddp"])
def test_a_writer_of_torch_that_takes_other_moments_than_it_says_is_found(
    source: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = new_optimizers._New._value

    def wrong(new: new_optimizers._New, key: str, value: Any, name: str) -> Any:
        found = real(new, key, value, name)
        pair = [f"layer.{number}.weight/exp_avg" for number in (3, 6)]
        if name == pair[1]:
            new.sources[pair[0]], new.sources[pair[1]] = new.sources[pair[1]], new.sources[pair[0]]
        return found

    monkeypatch.setattr(new_optimizers._New, "_value", wrong)
    with pytest.raises(
        OperationError, match=r"'layer\.[36]\.weight/exp_avg' differs from what was read"
    ):
        migrate(source, tmp_path / "new", to=to, state="all", processes=2, model=list_of(source))
    assert not (tmp_path / "new").exists()


def written(name: str, crcs: Mapping[str, int]) -> bytes:
    return b"%010d" % crcs[name]


def new_file(path: Path, sizes: dict[str, int]) -> tuple[OutputFile, dict[str, Source]]:
    """Return a file of tensors, each followed by its CRC-32, and all of these at its end."""
    data = os.urandom(sum(sizes.values()))
    path.write_bytes(data)
    sources: dict[str, Source] = {}
    parts: list[Any] = [Literal(b"head")]
    offset = 0
    for name, size in sizes.items():
        stored = StoredTensor(name, "U8", (size,), Contiguous((Piece(path, offset, size),)))
        sources[name] = Source(NewTensor(name, "U8", (size,), size), stored)
        parts += [Data(name, size), Computed(10, partial(written, name), of=name)]
        offset += size
    parts.append(
        Computed(10 * len(sizes), lambda crcs: b"".join(b"%010d" % crcs[name] for name in sizes))
    )
    return OutputFile(path=Path("new"), parts=tuple(parts)), sources  # type: ignore[arg-type]


def test_a_file_that_several_threads_write_is_as_its_parts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_JOB", 1 << 16)
    monkeypatch.setattr(streaming, "_BUFFER", 1 << 14)
    monkeypatch.setattr(streaming, "writing_threads", lambda: 4)
    sizes = {"a": 7, "b": 300_001, "c": 65_536, "d": 1 << 17, "e": 3}
    file, sources = new_file(tmp_path / "old", sizes)
    assert len(NewFile(tmp_path / "x", file, sources, Digests([]), Checksums({})).jobs()) == 4
    digests = write_file(tmp_path / "new", file, sources)
    data = (tmp_path / "old").read_bytes()
    expected, tail, offset = b"head", b"", 0
    for name, size in sizes.items():
        one = data[offset : offset + size]
        expected += one + b"%010d" % zlib.crc32(one)
        tail += b"%010d" % zlib.crc32(one)
        offset += size
        with OpenFiles() as files:
            assert digests[name] == tensor_digest(
                sources[name].stored, files, memoryview(bytearray(1 << 16))
            )
    assert (tmp_path / "new").read_bytes() == expected + tail


def test_digests_of_tensors_that_lie_within_the_parts_of_a_file(tmp_path: Path) -> None:
    """Flat partitions: a tensor of two pieces, one of bf16, one that is cut, zeros between them."""
    path = tmp_path / "old"
    path.write_bytes(os.urandom(4096))

    def at(offset: int, length: int, *more: Piece) -> Contiguous:
        return Contiguous((Piece(path, offset, length), *more))

    two = StoredTensor("", "F32", (5, 10), at(0, 80, Piece(path, 1000, 120)))
    half = StoredTensor("", "F32", (16,), Converted(at(400, 32), "BF16", "F32"))
    cut = StoredTensor("", "F32", (20,), at(2000, 80))
    empty = StoredTensor("", "F32", (0,), Contiguous(()))
    layout = joined(
        [
            Stretch(two.layout, 0, 200),
            Zeros(12),
            Stretch(half.layout, 0, 64),
            Stretch(cut.layout, 0, 40),
            Zeros(4),
        ]
    )
    flat = StoredTensor("flat", "F32", (80,), layout)
    source = Source(NewTensor("flat", "F32", (80,), 320), flat)
    digests = Digests([two, half, cut, empty])
    file = OutputFile(path=Path("new"), parts=(Data("flat", 320),))  # type: ignore[arg-type]
    with Pacer() as pacer:
        control = Control(None)
        with streaming.Writer(pacer, control) as writer:
            for job in NewFile(
                tmp_path / "new", file, {"flat": source}, digests, Checksums({})
            ).jobs():
                writer.write(job)
        pacer.finish()
    found = digests.of({"two": two, "half": half, "cut": cut, "empty": empty})
    assert found.keys() == {"two", "half", "empty"}
    with OpenFiles() as files:
        for name, tensor in (("two", two), ("half", half), ("empty", empty)):
            assert found[name] == tensor_digest(tensor, files, memoryview(bytearray(1 << 16))), name
    other = two._replace(layout=at(0, 80, Piece(path, 1004, 120)))
    assert not Digests([other]).marks(flat), "its first piece alone is no tensor"


def test_a_thread_that_fails_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_JOB", 1 << 12)
    file, sources = new_file(tmp_path / "old", {str(number): 1 << 12 for number in range(200)})
    os.truncate(tmp_path / "old", 100)
    written: list[int] = []
    with pytest.raises(OperationError, match="changed while it was read"):
        write_file(tmp_path / "new", file, sources, progress=written.append)
    assert len(written) < 100


def test_it_digests_what_the_readers_of_the_new_files_find(source: Path, tmp_path: Path) -> None:
    migrate(source, tmp_path / "new", to="universal", state="all", processes=2)
    migrate(tmp_path / "new", tmp_path / "back", to="fsdp-full", state="all", processes=2)
    assert digests_at(tmp_path / "back" / "pytorch_model_fsdp.bin") == digests_at(
        source / "pytorch_model_fsdp.bin"
    )


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 7), (1, 1), (3, 4096), (100_003, 1 << 17)])
def test_the_checksum_of_two_runs_of_bytes_is_that_of_both_together(
    sizes: tuple[int, int],
) -> None:
    one, other = map(os.urandom, sizes)
    assert combined(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)

"""The pipeline: the digests are those of hashlib and of the guarded save, in any order, with any
number of threads.
"""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptfix.tensors import hashing
from ckptfix.tensors.hashing import FileJob, Hashed, Job, TensorJob, _zeros_at_end, hash_all
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.training.saving.saved_digests import tensor_digest


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_digests_are_right(tmp_path: Path, threads: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(700, 1000, generator=generator)
    state = {
        "big": big,
        "t": big.T,
        "row": big[:, 3],
        "s": torch.tensor(3),
        "none": torch.empty(0, 4),
    }
    state["half"] = torch.arange(5).to(torch.bfloat16)
    if kind == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(
            {name: value.contiguous().clone() for name, value in state.items()},
            tmp_path / "model.safetensors",
        )
    (weights,) = open_checkpoint(tmp_path).weights
    path = next(tmp_path.iterdir())
    size = path.stat().st_size
    jobs: list[Job] = [
        *(TensorJob(tensor, True) for tensor in weights.tensors),
        FileJob(path, size),
    ]
    told: list[int] = []
    results = hash_all(jobs, threads=threads, progress=told.append)
    assert results[-1].digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for tensor, result in zip(weights.tensors, results, strict=False):
        assert result.digest == tensor_digest(state[tensor.fqn]), tensor.fqn
        assert result.scan is not None
        assert result.scan.zero_runs == (None if tensor.fqn == "row" and kind == "bin" else ())
    assert sum(told) == size + weights.nbytes


def test_zeros_at_the_end_are_counted_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for head, zeros in (
        (b"", 3 << 20),
        (b"1" * 100, (2 << 20) + 17),
        (b"1" * (1 << 20), 5),
        (b"12", 0),
        (b"", 0),
    ):
        path.write_bytes(head + bytes(zeros))
        assert hash_all([FileJob(path, len(head) + zeros)])[0].zeros == zeros


def test_what_cannot_be_read_is_a_value_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12")
    (tmp_path / "good").write_bytes(b"12")
    jobs = [
        FileJob(tmp_path / "gone", 1),
        FileJob(tmp_path / "short", 9),
        FileJob(tmp_path / "good", 2),
    ]
    gone, short, good = hash_all(jobs)
    assert (gone.digest, gone.problem) == ("", "No such file or directory")
    assert short.digest == ""
    assert "found 2" in short.problem
    assert good == Hashed(hashlib.sha256(b"12").hexdigest())
    assert hash_all([]) == []


def test_an_interrupt_stops_all_threads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    os.truncate(tmp_path / "file", 1 << 36)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hash_all([FileJob(tmp_path / "file", 1 << 36)] * 4, progress=interrupt)


def test_jobs_of_a_file_stand_together_large_files_first(tmp_path: Path) -> None:
    for name, length in (("a", 10), ("b", 40)):
        save_file(
            {f"{number}": torch.full((length,), number) for number in range(3)},
            tmp_path / f"{name}.safetensors",
        )
    weights = open_checkpoint(tmp_path).weights
    jobs: list[Job] = [TensorJob(tensor) for one in weights for tensor in one.tensors]
    jobs += [FileJob(path, path.stat().st_size) for path in sorted(tmp_path.iterdir())]
    order = [jobs[number] for number in hashing._reading_order(jobs, range(len(jobs)))]
    kinds = ["file" if isinstance(job, FileJob) else job.tensor.shape[0] for job in order]
    assert kinds == ["file", 40, 40, 40, "file", 10, 10, 10]


@given(
    st.lists(st.tuples(st.integers(0, 90), st.binary(max_size=3)), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_zeros_at_the_end_of_any_blocks(parts: list[tuple[int, bytes]], before: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_STRETCH", 20)
        _compare_zeros(parts, before)


def _compare_zeros(parts: list[tuple[int, bytes]], before: int) -> None:
    data = b"".join(bytes(count) + other for count, other in parts) + bytes(before)
    zeros = len(data) - len(data.rstrip(b"\0"))
    for size in (1, 7, 16, 64, len(data) or 1):
        found = 0
        for begin in range(0, len(data), size):
            found = _zeros_at_end(memoryview(data)[begin : begin + size], found)
        assert found == zeros

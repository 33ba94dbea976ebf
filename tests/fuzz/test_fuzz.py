"""A run of the fuzzer, bounded by a number and not by time: no changed save that readers refuse is
passed.
"""

import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch

from ckptfix.diagnosis.check import check
from ckptfix.storage.stores import open_store
from tests.deepspeed_library import has_deepspeed
from tests.fuzz.__main__ import Bench, Court, Tally, make_seeds
from tests.fuzz.mutations import edited_pickle, metadata, mutant
from tests.fuzz.seeds import Seed

ROOT = Path(__file__).parents[2]
MUTANTS = 1600
"""About 20 seconds of one quiet core, with the imports of the readers."""


@pytest.mark.slow
def test_no_changed_save_that_readers_refuse_is_passed() -> None:
    options = [
        "--mutants",
        str(MUTANTS),
        "--seed",
        "24",
        "--seconds",
        "1200",
        "--processes",
        "1",
        "--untimed",
    ]
    made = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"seed 24: {MUTANTS} mutants" in made.stdout or not has_deepspeed()


_SLOW_JUDGE = """
import sys, time
print("{}", flush=True)
sys.stdin.readline()
begin = time.process_time()
while time.process_time() - begin < WORK:
    pass
time.sleep(PAUSE)
print('{"verdict": "same", "why": ""}', flush=True)
"""


@pytest.mark.parametrize(
    ("work", "pause", "verdict"),
    [(0, 1.5, ("same", "")), (60, 0, ("refused", "the reader took more than 1 s of CPU time"))],
    ids=["waits", "works"],
)
def test_a_reader_may_wait_for_a_busy_machine_and_not_work_longer(
    work: float, pause: float, verdict: tuple[str, str]
) -> None:
    source = _SLOW_JUDGE.replace("WORK", str(work)).replace("PAUSE", str(pause))
    court = Court([sys.executable, "-c", source], patience=1)
    assert court.ask() == verdict
    court.close()


def test_a_reader_that_a_file_kills_has_refused_it() -> None:
    court = Court([sys.executable, "-c", "print('{}', flush=True); input(); raise SystemExit(1)"])
    assert court.ask() == ("refused", "the reader crashed")


def test_a_refusal_counts_if_a_new_judge_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = make_seeds(tmp_path / "seeds")
    bench = Bench(seeds, tmp_path / "seeds", tmp_path / "bench", 0, sample=0)
    asked = []

    def ask(**request: object) -> tuple[str, str]:
        asked.append(request)
        return ("refused", "name: it was changed") if len(asked) % 2 else ("same", "")

    monkeypatch.setattr(bench.court, "ask", ask)
    tally = Tally()
    numbers = iter(range(400))
    while not asked:
        bench.try_mutant(next(numbers), tally)
    assert len(asked) == 2
    # In this process torch is imported, which is a failure of its own.
    assert not any("wrong ok" in failure for _, failure in tally.failures)


def test_a_mutant_is_the_same_each_time_and_others_differ() -> None:
    data = torch_bytes()
    seeds = [Seed("torch zip", "one", {"a.bin": data, "b.bin": data[::-1]}, ("a.bin",))]
    made = [mutant(seeds, 7, number) for number in range(200)]
    assert made == [mutant(seeds, 7, number) for number in range(200)]
    assert len({tuple(one.files.items()) for one in made}) > 150
    assert made != [mutant(seeds, 8, number) for number in range(200)]
    assert all(one.changes and one.seed == 0 for one in made)


def test_an_edited_pickle_has_correct_checksums() -> None:
    edited = [edited_pickle(Random(number), torch_bytes()) for number in range(60)]
    for data, words in filter(None, edited):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == b"\x77" * 5000
        assert "of the pickle" in words
    assert len({data for data, _ in filter(None, edited)}) > 40
    assert edited_pickle(Random(0), b"12345") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [(8, 1), (10, 8), (10, 12), (10, 14), (10, 99)],
    ids=lambda value: f"{value}",
)
def test_a_pickle_that_an_earlier_change_made_unreadable_is_not_edited(
    field: int, value: int
) -> None:
    """The directory marks it as encrypted, or as compressed in some way."""
    data = bytearray(torch_bytes())
    data[data.index(b"PK\1\2") + field] = value
    assert edited_pickle(Random(0), bytes(data)) is None


def test_tensors_are_left_out_of_the_metadata() -> None:
    data = torch_bytes()
    at = data.index(b"\x77" * 4000)
    assert not any(begin <= at + 2000 < end for begin, end in metadata("a.bin", data))
    assert metadata("unknown", b"12345") == [(0, 5)]


def torch_bytes() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.full((5000,), 0x77, dtype=torch.uint8)}, stream)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_items_that_are_not_read_in_a_store_are_said() -> None:
    """Each item would cost a request: what is left out is a line of the report, and ``--data``
    reads it.
    """
    import torch.distributed.checkpoint as dcp

    name = f"memory://{os.urandom(6).hex()}/run"
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": {"a": torch.arange(8.0)}}, checkpoint_id=folder, no_dist=True)
        files = {path.name: bytearray(path.read_bytes()) for path in Path(folder).iterdir()}
        at = files["__0_0.distcp"].rindex(b"PK\5\6")
        files["__0_0.distcp"][at : at + 4] = b"none"
        (Path(folder) / "__0_0.distcp").write_bytes(files["__0_0.distcp"])
        assert check(folder).status == 1
    for path, data in files.items():
        open_store(name).put(path, bytes(data))
    report = check(name)
    assert report.status == 0
    assert [one for one in report.not_checked if one.startswith("local headers of records")]
    assert check(name, data=True).status == 1

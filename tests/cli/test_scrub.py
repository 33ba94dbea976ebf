"""``scrub``: every checkpoint of a fleet is looked at, the data over many runs, and what was left
out is in numbers.
"""

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ckptfix import check
from ckptfix.cli import run
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.errors import OperationError
from ckptfix.storage import stores
from ckptfix.storage.parallel import Control
from ckptfix.storage.stores import ObjectInfo, Store, open_store
from ckptfix.tensors.hashing import Hashed
from ckptfix.verification import scrub
from ckptfix.verification.scrub_state import State
from ckptfix.verification.seal import seal
from tests.diagnosis.test_completeness import give_own_values
from tests.repairs.builders import write_safetensors
from tests.stores.servers import QUICK, upload_folder

CLEAN = (
    Path(__file__).parents[2]
    / "fixtures"
    / "accelerate-1.15.0"
    / "clean-single-process"
    / "checkpoint"
)
DOUBLED = (
    Path(__file__).parents[2]
    / "fixtures"
    / "accelerate-1.15.0"
    / "wrapper-safetensors"
    / "checkpoint"
)
FILES = 3
"""Files of a checkpoint that a seal has digests of."""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("ckptfix.cli.scrub.threads_for", lambda paths: 1)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of five sealed checkpoints."""
    for number in range(1, 6):
        folder = Path(shutil.copytree(CLEAN, tmp_path / "runs" / "one" / f"checkpoint_{number}"))
        give_own_values(folder)
        assert seal(folder).status == 0
    return tmp_path / "runs"


def scrubbed(
    capsys: Capture, *arguments: object, status: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scrub, and return the checkpoints by their names and the summary."""
    capsys.readouterr()
    assert run(["scrub", *map(str, arguments), "--format", "jsonl"]) == status
    *ones, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["status"] == status
    return {Path(one["path"]).name: one for one in ones}, last["summary"]


def rot(file: Path) -> None:
    """Change one byte, and nothing that a listing shows."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_everything_is_looked_at_and_read(runs: Path, capsys: Capture) -> None:
    shutil.copytree(DOUBLED, runs / "other")
    rot(runs / "one" / "checkpoint_3" / "model.safetensors")
    ones, summary = scrubbed(capsys, runs, status=1)
    assert {name: one["verdict"] for name, one in ones.items()} == {
        **{f"checkpoint_{number}": "clean" for number in (1, 2, 4, 5)},
        "checkpoint_3": "damaged", "other": "damaged",
    }  # fmt: skip
    assert list(ones["checkpoint_3"]["differences"]) == ["model.safetensors"]
    assert [one["code"] for one in ones["other"]["findings"]] == ["doubled-model"]
    assert summary["data"]["files"] == summary["data"]["read"] == 5 * FILES
    assert (summary["without_digests"], summary["kept"], summary["complete"]) == (1, 0, True)
    run(["scrub", str(runs)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "6 checkpoints: 2 damaged, 4 clean"
    assert any(line.startswith("not checked: values of tensors") for line in lines)
    assert not any("digests in" in line for line in lines)
    assert run(["scrub", str(runs), "-q"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        str(runs / "one" / "checkpoint_3"),
        str(runs / "other"),
    ]


def test_five_nights_of_a_fifth_read_everything_once(runs: Path, capsys: Capture) -> None:
    subsets, read = [], 0
    for _ in range(5):
        _, summary = scrubbed(capsys, runs, "--read-data-subset", "20%")
        subsets.append(summary["subset"])
        read += summary["data"]["read"]
        assert summary["data"]["before"] + summary["data"]["read"] == read
        assert summary["data"]["never"] == 5 * FILES - read
    # A fifth is chosen by hashes of paths, and this one lies in a folder of chance: one of 28 times
    # the last fifth of 15 files is empty, so that nothing is said of the nights before it.
    assert read == 5 * FILES
    assert sorted(subsets) == [f"{number}/5" for number in range(5)]
    assert scrubbed(capsys, runs, "--read-data-subset", "20%")[1]["subset"] == subsets[0]


def test_a_difference_is_remembered_until_the_file_is_another(runs: Path, capsys: Capture) -> None:
    file = runs / "one" / "checkpoint_2" / "model.safetensors"
    original = file.read_bytes()
    rot(file)
    scrubbed(capsys, runs, status=1)
    ones, summary = scrubbed(capsys, runs, "--read-data-subset", "0%", status=1)
    assert summary["data"]["read"] == 0
    assert ones["checkpoint_2"]["verdict"] == "damaged"
    assert list(ones["checkpoint_2"]["differences"]) == ["model.safetensors"]
    os.utime(file)
    ones, _ = scrubbed(capsys, runs, "--read-data-subset", "0%")
    assert ones["checkpoint_2"]["data"]["never"] == 1, (
        "it is another file, and nothing is known of it"
    )
    file.write_bytes(original)
    assert scrubbed(capsys, runs)[0]["checkpoint_2"]["verdict"] == "clean"


def test_what_is_missing_or_more_than_was_sealed_differs_unread(
    runs: Path, capsys: Capture
) -> None:
    (runs / "one" / "checkpoint_1" / "random_states_0.pkl").unlink()
    (runs / "one" / "checkpoint_2" / "notes.txt").write_text("by hand")
    ones, _ = scrubbed(capsys, runs, "--read-data-subset", "0%", status=1)
    assert "is missing" in ones["checkpoint_1"]["differences"]["random_states_0.pkl"]
    assert ones["checkpoint_2"]["differences"] == {"notes.txt": "is not in the manifest"}


def test_what_is_unchanged_is_not_looked_at_again_in_a_time(runs: Path, capsys: Capture) -> None:
    scrubbed(capsys, runs)
    ones, summary = scrubbed(capsys, runs, "--max-age", "1d")
    assert summary["kept"] == 5
    assert summary["data"]["before"] == 5 * FILES
    assert all(one["kept"] and one["verdict"] == "clean" and one["looked"] for one in ones.values())
    (runs / "one" / "checkpoint_4" / "model.safetensors").write_bytes(b"")
    ones, summary = scrubbed(capsys, runs, "--max-age", "1d", status=1)
    assert summary["kept"] == 4
    assert ones["checkpoint_4"]["verdict"] == "damaged"
    assert scrubbed(capsys, runs, "--max-age", "0s", status=1)[1]["kept"] == 0
    run(["scrub", str(runs), "--max-age", "1d"])
    assert "skipped: 5 checkpoints, unchanged, and checked after 2" in capsys.readouterr().out


def set_clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the clock be ahead by each of these in turn, and by the last one from then on."""
    left = list(seconds)

    def now() -> float:
        return time.time() + (left.pop(0) if len(left) > 1 else left[0])

    for module in (
        "ckptfix.cli.scrub",
        "ckptfix.verification.scrub",
        "ckptfix.verification.scrub_state",
    ):
        monkeypatch.setattr(f"{module}.time", now)


@pytest.mark.parametrize("options", [(), ("--max-age", "30d"), ("--read-data-subset", "50%")])
def test_what_was_read_by_a_clock_that_was_wrong_is_read_again(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """A machine that starts before its clock is set: its readings would count for years, and its
    subset be the last.
    """
    set_clock(monkeypatch, 10 * 365 * 86400)
    scrubbed(capsys, runs, *options)
    scrubbed(capsys, runs, *options)
    set_clock(monkeypatch, 0)
    for number in range(1, 6):
        rot(runs / "one" / f"checkpoint_{number}" / "model.safetensors")
    run(["scrub", str(runs), *options])
    ones, summary = scrubbed(capsys, runs, *options, status=1)
    assert [one["verdict"] for one in ones.values()] == ["damaged"] * 5
    assert summary["kept"] == (5 if options[:1] == ("--max-age",) else 0)
    set_clock(monkeypatch, -86400)
    scrubbed(capsys, runs, *options, status=1)


def test_a_round_of_a_clock_that_was_wrong_begins_anew(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each run would begin with the same files, and those behind them be read no more."""
    set_clock(monkeypatch, 10 * 365 * 86400)
    scrubbed(capsys, runs, "--max-duration", "0s")
    set_clock(monkeypatch, 0)
    with monkeypatch.context() as stopping:
        stopping.setattr(State, "end", lambda *arguments: 0)
        scrubbed(capsys, runs)
    assert scrubbed(capsys, runs)[1]["kept"] == 5


def test_nothing_is_forgotten_where_the_clock_is_set_back_meanwhile(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, 3600, 3600, 0)
    scrubbed(capsys, runs)
    set_clock(monkeypatch, 7200)
    assert scrubbed(capsys, runs, "--max-age", "30d")[1]["kept"] == 5


def test_a_checkpoint_without_digests_that_changed_is_looked_at_again(
    runs: Path, capsys: Capture
) -> None:
    folder = Path(shutil.copytree(CLEAN, runs / "two"))
    scrubbed(capsys, runs)
    os.truncate(folder / "model.safetensors", 100)
    ones, summary = scrubbed(capsys, runs, "--max-age", "1d", status=1)
    assert (ones["two"]["verdict"], summary["kept"]) == ("damaged", 5)


def test_the_next_run_goes_on_where_the_time_was_over(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looked = [0.0], []

    def slow(path: Path, **options: Any) -> Any:
        clock[0] += 100
        looked.append(path.name)
        return check(path, **options)

    monkeypatch.setattr(scrub, "check", slow)
    for module in ("ckptfix.cli.scrub", "ckptfix.verification.scrub"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock[0])
    ones, summary = scrubbed(capsys, runs, "--max-duration", "3m20s")
    assert looked == ["checkpoint_1", "checkpoint_2"]
    assert [one["verdict"] for one in ones.values()] == ["clean"] * 2 + ["not reached"] * 3
    assert ones["checkpoint_2"]["data"]["due"] == FILES, "its structure alone was looked at"
    assert (summary["not reached"], summary["complete"], summary["data"]["due"]) == (
        3,
        False,
        FILES,
    )
    assert summary["unknown"] == 3
    run(["scrub", str(runs), "--max-duration", "0s"])
    said = capsys.readouterr().out
    assert (
        "time limit reached; remaining: 5 checkpoints (3 never checked); to continue, run the same "
        "command again\n" in said
    )
    ones, summary = scrubbed(capsys, runs)
    assert looked == [f"checkpoint_{number}" for number in range(1, 6)], "each once"
    assert (summary["complete"], summary["data"]["never"]) == (True, 0)
    assert summary["data"]["read"] == 4 * FILES
    scrubbed(capsys, runs)
    assert len(looked) == 10, "the round was complete, and a new one begins"


@pytest.fixture
def long(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 4 MiB in a fleet of one checkpoint; each MiB that is read takes 100 s of each
    run.
    """
    clock = [0.0]
    begin = scrub.Scrub.__init__

    def beginning(self: scrub.Scrub, **options: Any) -> None:
        begin(self, **{**options, "until": options["until"] - clock[0]})
        clock[0] = 0.0

    def counting(self: Control, count: int = 0) -> None:
        clock[0] += 100 if count == 1 << 20 else 0

    monkeypatch.setattr(scrub.Scrub, "__init__", beginning)
    monkeypatch.setattr(Control, "go_on", counting)
    for module in ("ckptfix.cli.scrub", "ckptfix.verification.scrub"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock[0])
    monkeypatch.setattr("ckptfix.verification.seal.RANGE", 1 << 20)
    for number in range(2, 6):
        shutil.rmtree(runs / "one" / f"checkpoint_{number}")
    file = runs / "one" / "checkpoint_1" / "big.dat"
    file.write_bytes(os.urandom(4 << 20))
    return file


def test_a_file_that_was_begun_is_read_to_its_end(long: Path, runs: Path, capsys: Capture) -> None:
    seal(long.parent)
    options = (runs, "--max-age", "1d", "--max-duration")
    _, summary = scrubbed(capsys, *options, "2m30s")
    assert (summary["data"]["read"], summary["data"]["due"], summary["complete"]) == (1, 3, False)
    assert summary["data"]["read_bytes"] > 4 << 20 - 1
    _, summary = scrubbed(capsys, *options, "2m30s")
    assert (summary["data"]["read"], summary["data"]["before"], summary["complete"]) == (3, 1, True)


@pytest.mark.parametrize("damaged", [None, 0, 3])
def test_a_file_with_digests_of_ranges(
    damaged: int | None, long: Path, runs: Path, capsys: Capture
) -> None:
    seal(long.parent, ranges=True)
    data = bytearray(long.read_bytes())
    if damaged is not None:
        data[damaged << 20] ^= 1
        before = long.stat()
        long.write_bytes(data)
        os.utime(long, ns=(before.st_atime_ns, before.st_mtime_ns))
    ones, _ = scrubbed(capsys, runs, status=int(damaged is not None))
    differences = ones["checkpoint_1"]["differences"]
    assert (differences.get("big.dat") or "").startswith(
        "" if damaged is None else f"differs: range {damaged} of "
    )
    assert list(differences) == ["big.dat"] * (damaged is not None)


def test_a_save_that_knew_the_digests_of_its_tensors_alone(
    long: Path, runs: Path, capsys: Capture
) -> None:
    """It is one unit, which `verify` reads."""
    long.unlink()
    write_safetensors(long.parent / "model.safetensors", {"weight": os.urandom(4 << 20)})
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (long.parent / name).unlink()
    assert seal(long.parent, force=True).status == 0
    manifest = long.parent / ".ckptfix" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"] = {"model.safetensors": (long.parent / "model.safetensors").stat().st_size}
    del document["sha256"]
    manifest.write_text(json.dumps(document))
    _, summary = scrubbed(capsys, runs, "--max-age", "1d")
    assert (summary["data"]["files"], summary["data"]["read"]) == (1, 1)


def test_damage_that_is_known_counts_where_the_time_is_over(runs: Path, capsys: Capture) -> None:
    rot(runs / "one" / "checkpoint_3" / "model.safetensors")
    scrubbed(capsys, runs, status=1)
    ones, _ = scrubbed(capsys, runs, "--max-duration", "0s", status=1)
    assert ones["checkpoint_3"]["verdict"] == "damaged"
    assert ones["checkpoint_3"]["data"] is None
    assert ones["checkpoint_1"]["verdict"] == "not reached"
    run(["scrub", str(runs), "--max-duration", "0s"])
    assert "checkpoint_3: damaged (on 2" in (said := capsys.readouterr().out)
    assert "not reached in this run" in said


@pytest.mark.slow
def test_a_killed_run_loses_nothing_that_it_has_printed(runs: Path, capsys: Capture) -> None:
    for number in range(6, 40):
        shutil.copytree(runs / "one" / "checkpoint_1", runs / "one" / f"checkpoint_{number}")
    program = (
        "import sys; from ckptfix.verification import scrub_state; scrub_state._SECONDS = 0; "
        "from ckptfix.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "scrub", str(runs), "--format", "jsonl"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        # So that it cannot have ended before the kill.
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        done = [json.loads(process.stdout.readline()) for _ in range(10)]
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ones, summary = scrubbed(capsys, runs)
    assert all(ones[Path(one["path"]).name]["kept"] for one in done)
    assert 10 <= summary["kept"] < 39
    assert (summary["data"]["never"], summary["complete"]) == (0, True)


def test_an_interrupted_run_goes_on(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, **options: Any) -> Any:
        if path.name == "checkpoint_3":
            raise KeyboardInterrupt
        return check(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "check", interrupted)
        for threads in (1, 4):
            patch.setattr("ckptfix.cli.scrub.threads_for", lambda paths, threads=threads: threads)
            assert run(["scrub", str(runs)]) == 130
            assert (
                "nothing was changed; to continue, run the same command again"
                in capsys.readouterr().err
            )
    assert scrubbed(capsys, runs)[1]["kept"] >= 2


def test_a_checkpoint_that_changes_meanwhile_is_not_known(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saving(path: Path, **options: Any) -> Any:
        report = check(path, **options)
        if path.name == "checkpoint_5":
            (path / "random_states_1.pkl").write_bytes(b"more")
        return report

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "check", saving)
        ones, summary = scrubbed(capsys, runs, status=3)
    assert "changed while it was checked" in ones["checkpoint_5"]["error"]
    assert (summary["failed"], summary["clean"]) == (1, 4)
    (runs / "one" / "checkpoint_5" / "random_states_1.pkl").unlink()
    ones, summary = scrubbed(capsys, runs, "--max-age", "1d")
    assert summary["kept"] == 4, "what failed is looked at again"


def test_a_checkpoint_that_is_removed_meanwhile_is_counted(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotating(path: Path, **options: Any) -> Any:
        if path.name == "checkpoint_2":
            shutil.rmtree(path)
        return check(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "check", rotating)
        ones, summary = scrubbed(capsys, runs)
    assert ones["checkpoint_2"]["verdict"] == "removed"
    assert (summary["removed"], summary["gone"]) == (1, 0)
    shutil.rmtree(runs / "one" / "checkpoint_1")
    assert scrubbed(capsys, runs)[1]["gone"] == 1
    assert scrubbed(capsys, runs)[1]["gone"] == 0


def test_what_cannot_be_read_is_not_ok_and_read_again(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            scrub, "hash_all", lambda jobs, **options: [Hashed("", problem="Input/output error")]
        )
        ones, summary = scrubbed(capsys, runs, status=3)
    assert summary["not finished"] == 5
    assert "could not be read: Input/output error" in ones["checkpoint_1"]["differences"].values()
    ones, summary = scrubbed(capsys, runs, "--max-age", "1d")
    assert (summary["clean"], summary["data"]["read"]) == (5, 5 * FILES)


def test_shards_are_disjoint_and_cover_all(runs: Path, capsys: Capture, tmp_path: Path) -> None:
    names: list[str] = []
    for number in range(3):
        ones, _ = scrubbed(capsys, runs, "--shard", f"{number}/3")
        names += ones
    assert sorted(names) == [f"checkpoint_{number}" for number in range(1, 6)]
    files = {path.name for path in (tmp_path / "state" / "ckptfix").iterdir()}
    assert files == {f"scrub-{number}-of-3.sqlite" for number in range(3)}


def test_a_share_without_a_checkpoint_says_so(runs: Path, capsys: Capture) -> None:
    for number in range(64):
        assert run(["scrub", str(runs), "--read-data-subset", "0%", "--shard", f"{number}/64"]) == 0
        said = capsys.readouterr().out
        empty = (
            f"nothing to do: share {number}/64 has no checkpoints (the path of a checkpoint decides "
            "its share)\n"
        )
        if "checkpoint_" not in said:
            assert said == f"{empty}0 checkpoints\n"
            return
    raise AssertionError("five checkpoints are in 64 shares")


@pytest.mark.parametrize("verb", ["check", "scrub"])
def test_a_checkpoint_that_two_paths_lead_to_comes_once(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(runs.parent)
    paths = [str(runs), f"{runs.name}/", f"{runs}/one/checkpoint_1", f"./{runs.name}/one"]
    words = ["check", "-r"] if verb == "check" else ["scrub", "--read-data-subset", "0%"]
    assert run([*words, *paths]) == 0
    assert "\n5 checkpoints: 5 clean\n" in capsys.readouterr().out


def test_every_shard_says_what_cannot_be_listed(runs: Path, capsys: Capture) -> None:
    for number in range(3):
        assert run(["scrub", str(runs), str(runs / "nowhere"), "--shard", f"{number}/3"]) == 2
        assert f"{runs}/nowhere does not exist" in capsys.readouterr().err


def test_what_is_not_mounted_is_not_forgotten(runs: Path, capsys: Capture) -> None:
    other = Path(shutil.copytree(runs / "one", runs.parent / "other"))
    scrubbed(capsys, runs, other)
    other.rename(runs.parent / "away")
    _, summary = scrubbed(capsys, runs, other, status=2)
    assert (summary["failed"], summary["gone"], summary["complete"]) == (1, 0, False)
    assert scrubbed(capsys, runs, other, status=2)[1]["data"]["read"] == 5 * FILES, (
        "a round of its own"
    )
    (runs.parent / "away").rename(other)
    _, summary = scrubbed(capsys, runs, other, "--max-age", "1d")
    assert (summary["kept"], summary["data"]["read"]) == (10, 0)


def test_what_check_could_not_read_is_looked_at_again(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **options: Any) -> CheckReport:
        report = check(path, **options)
        return replace(report, unfinished=("model.safetensors: Permission denied",))

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "check", refused)
        ones, summary = scrubbed(capsys, runs, status=3)
    assert (summary["not finished"], ones["checkpoint_1"]["status"]) == (5, 3)
    assert scrubbed(capsys, runs, "--max-age", "1d")[1]["kept"] == 0


def test_the_tensors_of_a_save_without_digests_of_files_are_read(
    runs: Path, capsys: Capture
) -> None:
    folder = runs / "one" / "checkpoint_1"
    manifest = folder / ".ckptfix" / "manifest.json"
    document = json.loads(manifest.read_text())
    assert any(entry["digests"] for entry in document["models"])
    document["files"] = {name: (folder / name).stat().st_size for name in document.pop("sha256")}
    manifest.write_text(json.dumps(document))
    ones, _ = scrubbed(capsys, folder)
    assert ones["checkpoint_1"]["data"]["read"] == 1
    rot(folder / "model.safetensors")
    ones, _ = scrubbed(capsys, folder, status=1)
    assert "model.safetensors" in ones["checkpoint_1"]["differences"]["tensors of all models"]


def test_the_page_has_every_checkpoint_and_what_was_found(
    runs: Path, capsys: Capture, tmp_path: Path
) -> None:
    shutil.copytree(DOUBLED, runs / "one" / "checkpoint_<b>10")
    page = tmp_path / "fleet.html"
    assert run(["scrub", str(runs), "--html", str(page)]) == 1
    text = page.read_text()
    assert text.count('<span class="cell clean"') == 4
    assert text.count('<span class="cell clean newest"') == 1
    assert text.count('<details class="cell damaged"') == 1
    assert text.count("clean; files with digests: 3 of 3 read since 2") == 5
    assert "damaged; no digests, so the data cannot be checked" in text
    assert '<span class="bold">doubled-model</span>: model_1.safetensors: duplicate of' in text
    assert "checkpoint_&lt;b&gt;10" in text
    assert "<script" not in text
    assert run(["scrub", str(runs), "--html", str(page), "--max-duration", "0s"]) == 1
    assert page.read_text().count('<span class="cell clean old') == 5
    shutil.rmtree(tmp_path / "state")
    assert run(["scrub", str(runs), "--html", str(page), "--max-duration", "0s"]) == 0
    assert "not yet checked by any run, so not shown: 6 checkpoints" in page.read_text()
    page.write_text("mine")
    assert run(["scrub", str(runs), "--html", str(page)]) == 2
    assert page.read_text() == "mine"


def test_the_cells_are_in_the_order_of_their_numbers(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "one" / "checkpoint_1", runs / "one" / "checkpoint_10")
    shutil.copytree(runs / "one" / "checkpoint_1", runs / "one" / "checkpoint_1²")
    page = tmp_path / "fleet.html"
    run(["scrub", str(runs), "--html", str(page)])
    text = page.read_text()
    assert text.index(">checkpoint_5<") < text.index(">checkpoint_10<")


def test_a_run_is_one_row_even_where_runs_lie_in_a_checkpoint(runs: Path, tmp_path: Path) -> None:
    for name in ("checkpoint_1/checkpoint_7", "checkpoint_1-old"):
        shutil.copytree(runs / "one" / "checkpoint_2", runs / "one" / name)
    page = tmp_path / "fleet.html"
    run(["scrub", str(runs), "--html", str(page)])
    text = page.read_text()
    assert text.count('<th scope="row">') == 2
    assert text.count(">checkpoint_1<") == text.count(">checkpoint_7<") == 1


def test_a_state_that_cannot_be_written_is_said(
    runs: Path, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "state.sqlite"
    assert run(["scrub", str(runs), "--state", str(file)]) == 0
    state = State(file)
    state._file.execute("PRAGMA query_only = 1")
    with pytest.raises(OperationError, match=r"state\.sqlite cannot be used: .*read"):
        state.begin("another", ["0/1"])
    state._file.close()
    (tmp_path / "file").write_text("")
    assert run(["scrub", str(runs), "--state", str(tmp_path / "file" / "state")]) == 2
    assert "cannot create its folder" in capsys.readouterr().err


def test_a_file_that_is_no_state_is_refused_as_it_is(
    runs: Path, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "mine"
    file.write_text("notes of mine, which are not a database")
    assert run(["scrub", str(runs), "--state", str(file)]) == 2
    assert f"--state {file} cannot be used" in capsys.readouterr().err
    assert file.read_text() == "notes of mine, which are not a database"
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (one)")
    database.close()
    assert run(["scrub", str(runs), "--state", str(other)]) == 2
    assert "(a database of another program)" in capsys.readouterr().err
    state = tmp_path / "state.sqlite"
    assert run(["scrub", str(runs), "--state", str(state)]) == 0
    with sqlite3.connect(state) as database:
        database.execute("PRAGMA user_version = 2")
    database.close()
    assert run(["scrub", str(runs), "--state", str(state)]) == 2
    assert "(state version 2, expected " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-duration", "6"], "expected a time such as 6h"),
        (["--max-age", "3 weeks"], "expected a time such as 6h, 30d or 1h30m"),
        (["--read-data-subset", "120%"], "expected a percentage such as 5%"),
        (["--read-data-subset", "5"], "expected a percentage such as 5%"),
        (["--read-data-subset", "0.0001%"], "0.01% to 100%"),
        (["--read-data-subset", "7/7"], "0/7 to 6/7"),
        (["--shard", "4"], "expected I/N"),
    ],
)
def test_options_that_cannot_be_understood_lead_on(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run(["scrub", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_json_object_has_all(runs: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run(["scrub", str(runs), str(runs / "nowhere"), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["version", "checkpoints", "summary", "status"]
    assert len(document["checkpoints"]) == 6
    assert document["summary"]["failed"] == 1


def test_a_url_is_as_good_as_a_folder(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    url = f"memory://{os.urandom(6).hex()}/runs"
    upload_folder(runs, url)
    listed = Store.list

    def timeless(store: Store, below: str = "") -> dict[str, ObjectInfo]:
        return {key: one._replace(modified_ns=0) for key, one in listed(store, below).items()}

    monkeypatch.setattr(Store, "list", timeless)  # only the ETag says that an object is another one
    ones, summary = scrubbed(capsys, url)
    assert {one["path"] for one in ones.values()} == {
        f"{url}/one/checkpoint_{number}" for number in range(1, 6)
    }
    assert (summary["clean"], summary["data"]["read"]) == (5, 5 * FILES)
    assert scrubbed(capsys, url, "--max-age", "1d")[1]["kept"] == 5
    data = bytearray((runs / "one" / "checkpoint_2" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    open_store(url).put("one/checkpoint_2/model.safetensors", bytes(data))
    ones, summary = scrubbed(capsys, url, "--max-age", "1d", status=1)
    assert list(ones["checkpoint_2"]["differences"]) == ["model.safetensors"]
    assert summary["kept"] == 4

"""The plan is balanced and the same everywhere; a failure of one ends all; results outlive their
process.
"""

import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from ckptfix.errors import OperationError, TeamError
from ckptfix.storage import launched_ranks
from ckptfix.storage.executor import THREADS, Do, Done, Remembering, Sharded, plan_shares
from ckptfix.storage.launched_ranks import Exchange, LaunchedRanks
from ckptfix.storage.parallel import Progress, Share
from ckptfix.storage.results import Identity, PartialResults, Request, Unit, Units
from tests.storage.listings import long_files, saved_by_ranks

RANGE = 1_000_000_000


class MemoryGroup:
    """Exchanges bytes within one process, as ``rendezvous.Group`` does between several."""

    def __init__(self, count: int) -> None:
        self.answers: list[tuple[int, bytes]] = [(0, b"")] * count
        self.barrier = threading.Barrier(count)

    def of(self, rank: int) -> Exchange:
        def exchange(
            kind: int, data: bytes, patience: float | None = None
        ) -> list[tuple[int, bytes]] | None:
            self.answers[rank] = (kind, data)
            try:
                self.barrier.wait(patience or 20)
                answers = [*self.answers]
                self.barrier.wait(20)
            except threading.BrokenBarrierError:
                if patience is None:
                    raise TeamError("another process has ended") from None
                return None
            return answers

        return exchange


def units_of(sizes: Sequence[int], files: int = 3) -> list[Unit]:
    identities = [Identity(f"file{number}", 100, 7, number) for number in range(files)]
    return [
        Unit(f"unit {number}", size, (identities[number % files],), number)
        for number, size in enumerate(sizes)
    ]


def loads(units: Sequence[Unit], shares: Sequence[Sequence[int]]) -> list[int]:
    return [sum(units[number].size for number in share) for share in shares]


@given(
    sizes=strategies.lists(strategies.integers(0, 10**13), max_size=60),
    files=strategies.integers(1, 8),
    count=strategies.integers(1, 70),
)
def test_every_unit_has_one_process_and_the_plan_is_always_the_same(
    sizes: list[int], files: int, count: int
) -> None:
    units = units_of(sizes, files)
    shares = plan_shares(units, count)
    assert len(shares) == count
    assert sorted(number for share in shares for number in share) == list(range(len(units)))
    assert shares == plan_shares(units, count)


@given(
    sizes=strategies.lists(strategies.integers(0, 10**13), min_size=1, max_size=60),
    count=strategies.integers(1, 70),
)
def test_no_share_is_larger_than_a_mean_and_the_largest_unit(sizes: list[int], count: int) -> None:
    units = units_of(sizes)
    overhead = 1 << 16
    mean = sum(size + overhead for size in sizes) / count
    assert max(loads(units, plan_shares(units, count))) <= 1.02 * mean + max(sizes) + overhead


def test_the_units_of_a_file_stay_together_where_that_is_balanced() -> None:
    units = units_of([10**9] * 1200, files=120)
    for share in plan_shares(units, 4):
        names = {units[number].files[0].name for number in share}
        assert len(names) == 30
        assert len(share) == 300


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 1024])
def test_a_folder_of_10_terabytes_is_shared_within_5_percent(count: int) -> None:
    for units in (saved_by_ranks(), long_files(part=RANGE), long_files(10**13, 1, part=RANGE)):
        each = loads(units, plan_shares(units, count))
        assert sum(each) > 12e12
        assert max(each) <= 1.05 * sum(each) / count


def test_a_long_file_without_ranges_bounds_a_plan() -> None:
    units = long_files()
    each = loads(units, plan_shares(units, 1024))
    assert max(each) == 50_000_000_000  # one chain of sha256: no plan is better
    assert max(each) > 2 * sum(each) / 1024


def doing(work: Callable[[int], Any]) -> Do:
    def do(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        for number in numbers:
            result = work(number)
            progress(1)
            done(number, result)

    return do


def noting(done: list[int]) -> Do:
    def work(number: int) -> int:
        done.append(number)
        return number

    return doing(work)


def in_team(count: int, work: Callable[[LaunchedRanks], Any], **options: Any) -> list[Any]:
    """Return what each process of a team returns or raises; here they are threads."""
    group = MemoryGroup(count)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        team = LaunchedRanks(rank, count, group.of(rank), **options)
        try:
            results[rank] = work(team)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_go_on_with_the_same_results(count: int) -> None:
    units = units_of(range(40))
    done: list[int] = []

    def each(number: int) -> list[Any]:
        done.append(number)
        return [number, "é"]

    def work(team: LaunchedRanks) -> list[Any]:
        first = team.map("a", units, doing(each), None, None)
        second = team.map("b", units[:3], doing(lambda number: -number), None, None)
        told = team.told(lambda: {"rank": team.rank})
        team.agree(None)
        return [first, second, told]

    everyone = in_team(count, work)
    assert everyone == [[[[number, "é"] for number in range(40)], [0, -1, -2], {"rank": 0}]] * count
    assert sorted(done) == list(range(40))


def test_the_units_may_come_in_another_order_in_each_process() -> None:
    units = units_of(range(30))

    def work(team: LaunchedRanks) -> list[Any]:
        mine = units[:]
        random.Random(team.rank).shuffle(mine)
        results = team.map("a", mine, doing(lambda number: mine[number].key), None, None)
        return [unit.key == result for unit, result in zip(mine, results, strict=True)]

    assert in_team(3, work) == [[True] * 30] * 3


def test_an_error_of_one_ends_the_work_of_all() -> None:
    def work(team: LaunchedRanks) -> None:
        def each(number: int) -> int:
            if team.rank == 1:
                raise OSError(5, "Input/output error", "model.safetensors")
            return number

        try:
            team.map("a", units_of([1] * 200), doing(each), None, None)
        except Exception as error:
            team.agree(error)
            raise
        raise AssertionError("it went on")

    for error in in_team(3, work):
        assert isinstance(error, TeamError)
        assert "rank 1 (process" in str(error)
        assert "Input/output error: 'model.safetensors'" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Its launcher must learn of it, and not after hours in which the others read."""
    monkeypatch.setattr(launched_ranks, "_PATIENCE", 0.1)
    ended = threading.Event()
    printed: list[str] = []

    def work(team: LaunchedRanks) -> str:
        if team.rank != rank:
            ended.wait(20)
            team.agree(None)
            return "it went on"
        try:
            team.agree(OSError(5, "Input/output error"))
        finally:
            ended.set()
            assert team.is_lost
            assert team.finish(3) == 3
        return "raised by the caller"

    everyone = in_team(2, work, shout=lambda error: printed.append(str(error)))
    assert isinstance(everyone[1 - rank], TeamError)
    if rank == 0:
        assert everyone[0] == "raised by the caller"
        assert printed == ["another process has ended"]
    else:
        assert printed == [str(everyone[1])]
        assert "rank 1 (process" in str(everyone[1])
        assert "Input/output error" in str(everyone[1])


def test_an_error_that_all_have_is_that_of_each() -> None:
    def work(team: LaunchedRanks) -> str:
        team.agree(OperationError("there is no checkpoint"))
        team.agree(None)
        return "the next path"

    assert in_team(3, work) == ["the next path"] * 3


def test_the_leaders_own_error_is_raised_on_the_leader() -> None:
    def work(team: LaunchedRanks) -> str:
        team.agree(OSError(28, "No space left on device") if team.leads else None)
        return "raised by the caller"

    leader, follower = in_team(2, work)
    assert leader == "raised by the caller"
    assert isinstance(follower, TeamError)
    assert "No space left" in str(follower)


@pytest.mark.parametrize("is_lost", [False, True])
def test_nothing_is_exchanged_after_the_ranks_have_ended_apart(
    monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """It would meet another operation of the others, or nobody."""
    if is_lost:
        monkeypatch.setattr(launched_ranks, "_PATIENCE", 0.1)
    over = threading.Event()

    def work(team: LaunchedRanks) -> list[bool]:
        before = team.has_ended
        if is_lost and not team.leads:
            over.wait(20)
        with suppress(TeamError):
            team.agree(OSError(28, "No space left on device") if team.leads else None)
        over.set()
        with pytest.raises(TeamError, match="the ranks no longer work together"):
            team.told(lambda: 1)
        return [before, team.has_ended, team.finish(3) == 3]

    assert in_team(2, work) == [[False, True, True]] * 2


def test_processes_that_see_different_folders_do_not_go_on() -> None:
    def work(team: LaunchedRanks) -> None:
        file = Identity("model.safetensors", 100 + team.rank, 7, 1)
        units = [Unit("[]", 5, (Identity("same", 1, 2, 3),)), Unit("[]", 5, (file,))]
        try:
            team.map("a", units, doing(lambda number: 0), None, None)
        except Exception as error:
            team.agree(error)
            raise

    for error in in_team(2, work):
        assert isinstance(error, TeamError)
        assert "sees a different folder than rank 0" in str(error)
        assert "; next: mount the same folder" in str(error)


@pytest.mark.parametrize("early", [0, 1])
def test_a_process_that_ends_without_the_others_does_not_let_them_wait(early: int) -> None:
    """As one does that finds an error in a file which the others see in another state."""

    def work(team: LaunchedRanks) -> str:
        if team.rank != early:
            team.map("a", units_of([1, 2]), doing(lambda number: number), None, None)
        team.agree(None)
        return "ended"

    for error in in_team(2, work):
        assert isinstance(error, TeamError)
        assert "rank 1 (process" in str(error)
        assert "sees a different folder than rank 0" in str(error)


def test_the_next_run_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    units = units_of([5] * 30)
    told: list[str] = []
    for number in {*range(12)} - {3}:
        PartialResults(tmp_path / "partial").add("a", units[number], number)

    def work(team: LaunchedRanks) -> tuple[list[Any], list[int]]:
        done: list[int] = []
        results = team.map("a", units, noting(done), None, None)
        return results, done

    everyone = in_team(4, work, partial=PartialResults(tmp_path / "partial"), say=told.append)
    assert [results for results, _ in everyone] == [list(range(30))] * 4
    assert sorted(number for _, done in everyone for number in done) == [3, *range(12, 30)]
    assert told == [told[0]]
    assert told[0].startswith("resuming: 11 of 30 units (55 B) done by an earlier run")


def test_lines_that_were_cut_short_are_ignored(tmp_path: Path) -> None:
    units = units_of([5] * 4)
    results = PartialResults(tmp_path)
    for number, unit in enumerate(units[:3]):
        results.add("a", unit, number)
    results.close()
    (path,) = tmp_path.glob("*.results.jsonl")
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        known = PartialResults(tmp_path).known("a", units)
        whole = data[:length].count(b"\n")
        assert known == dict(enumerate(range(whole)))
    # As a file system leaves it after a loss of power.
    path.write_bytes(data[:80] + bytes(500) + b"\n")
    assert PartialResults(tmp_path).known("a", units).keys() <= {0}
    # Another number, and the JSON is as good as it was.
    path.write_bytes(data.replace(b", 1]", b", 7]"))
    assert PartialResults(tmp_path).known("a", units).keys() == {0, 2}


def test_a_unit_of_a_file_that_changed_is_another_unit(tmp_path: Path) -> None:
    results, unit = PartialResults(tmp_path), Unit("key", 5, (Identity("file", 1, 2, 3),))
    results.add("a", unit, "old")
    assert results.known("a", [unit])[0] == "old"
    for change in (
        {"size": 9},
        {"mtime_ns": 9},
        {"inode": 9},
        {"changed_ns": 9},
        {"name": "other"},
    ):
        assert not results.known("a", [unit._replace(files=(unit.files[0]._replace(**change),))])
    assert not results.known("b", [unit])
    assert not results.known("a", [unit._replace(key="other")])


def test_a_file_that_was_copied_over_with_its_time_is_another_unit(tmp_path: Path) -> None:
    """As ``cp -p`` of a backup over a damaged file does: name, size, time and inode are those of
    before.
    """
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    before, status = Units().of(path, 5), path.stat()
    path.write_bytes(b"54321")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = Units().of(path, 5)
    assert after.files[0][:4] == before.files[0][:4]
    assert after != before


def test_units_name_files_by_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    unit = Units().of(("word", 3, (tmp_path / "file", 7), tmp_path / "file", tmp_path / "none"), 5)
    assert json.loads(unit.key) == ["word", 3, [{"file": 0}, 7], {"file": 0}, {"file": 1}]
    assert [file.size for file in unit.files] == [5, -1]


def test_results_of_another_command_are_not_mixed(tmp_path: Path) -> None:
    request = Request("seal", {"paths": ["a"], "force": False}, "/", 2, ["a"])
    PartialResults(tmp_path / "partial").begin(request)
    PartialResults(tmp_path / "partial").begin(request._replace(shares=3))
    with pytest.raises(OperationError, match=r"another command: ckptfix seal a in /;.*rm -r"):
        PartialResults(tmp_path / "partial").begin(
            request._replace(params={"paths": ["b"], "force": False})
        )
    PartialResults(tmp_path / "older").begin(request._replace(version="0.4.9"))
    with pytest.raises(OperationError, match=r"seal a in / by version 0\.4\.9 \(this is "):
        PartialResults(tmp_path / "older").begin(request)
    for name in ("mine.txt", "mine.results.jsonl"):
        (tmp_path / "partial" / name).write_text("stays")
    PartialResults(tmp_path / "partial").remove()
    assert {path.name for path in (tmp_path / "partial").iterdir()} == {
        "mine.txt",
        "mine.results.jsonl",
    }


def test_a_command_that_left_no_results_is_in_nobodys_way(tmp_path: Path) -> None:
    mistaken = Request("verify", {"paths": ["a"]}, "/", 0, ["a"])
    PartialResults(tmp_path).begin(mistaken)
    meant = mistaken._replace(params={"paths": ["b"]})
    results = PartialResults(tmp_path)
    results.begin(meant)
    assert results.request() == meant
    results.add("a", units_of([1])[0], 1)
    with pytest.raises(OperationError, match="another command"):
        PartialResults(tmp_path).begin(mistaken)


def test_the_work_of_a_job_array_is_finished(tmp_path: Path) -> None:
    units = units_of(range(1, 20))
    results = PartialResults(tmp_path)
    said: list[str] = []
    finisher = Remembering(PartialResults(tmp_path), said.append, 3)
    for number in (0, 2):
        share = Sharded(Share(number, 3), results)
        got = share.map("a", units, doing(lambda number: number), lambda number: "assumed", None)
        assert share.units == sum(value != "assumed" for value in got) > 0
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    assert finisher.map("a", units, doing(make), lambda number: 0, None) == list(range(19))
    (words,) = said
    assert words.endswith("results of share 1/3 are missing, so this process does that share too")
    assert made
    nothing = doing(lambda number: pytest.fail("all is known"))
    assert finisher.map("a", units, nothing, lambda number: 0, None) == list(range(19))
    assert len(said) == 1


def test_one_process_goes_on_too(tmp_path: Path) -> None:
    units = units_of([1] * 10)
    worker = Remembering(PartialResults(tmp_path), lambda words: None)

    def fail(number: int) -> int:
        if number == 6:
            raise OSError("interrupted here")
        return number

    with pytest.raises(OSError, match="interrupted here"):
        worker.map("a", units, doing(fail), None, None)
    done: list[int] = []
    worker = Remembering(PartialResults(tmp_path), lambda words: None)
    assert worker.map("a", units, noting(done), None, None) == list(range(10))
    assert done == [6, 7, 8, 9]


def test_a_node_that_does_not_see_the_folder_of_the_leader_is_named(tmp_path: Path) -> None:
    with launched_ranks.in_folder_of_leader(THREADS, tmp_path, "next: this"):
        pass
    words = r"staging: .* cannot see this folder, .*; next: this"
    with (
        pytest.raises(OperationError, match=words),
        launched_ranks.in_folder_of_leader(THREADS, tmp_path / "staging", "next: this"),
    ):
        pass

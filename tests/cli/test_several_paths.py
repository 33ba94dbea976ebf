"""Several paths in one call: each on its own, the worst exit status, one JSON object, a summary,
and pipelines.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check
from ckptfix.cli import run
from ckptfix.cli.several_paths import Unchecked
from ckptfix.diagnosis.check_report import CheckReport
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.lock import folder_lock
from tests.repairs.builders import snapshot, write_safetensors

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
DOUBLED = FIXTURES / "wrapper-safetensors" / "checkpoint"
CLEAN = FIXTURES / "clean-single-process" / "checkpoint"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a clean checkpoint, two that are doubled, one of them with a name to be quoted,
    and one cut short.
    """
    for name, source in (("1", CLEAN), ("2", DOUBLED), ("my 'third'", DOUBLED), ("4", CLEAN)):
        shutil.copytree(source, tmp_path / "runs" / name)
    cut = tmp_path / "runs" / "4" / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 5)
    return tmp_path / "runs"


def printed(capsys: Capture) -> dict[str, Any]:
    """The one JSON object on stdout."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def last_line(capsys: Capture) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_check_ends_with_a_summary_and_says_once_what_it_did_not_check(
    runs: Path, capsys: Capture
) -> None:
    write_safetensors(runs / "1" / "lone.safetensors", {"module.x": b"1"})
    assert run(["check", "-r", str(runs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 checkpoints: 3 damaged, 1 clean"
    assert (
        lines[-2]
        == "not checked: values of tensors, checksums of tensor records in torch zip files, "
        "whether all files belong to one save and none is missing, whether tensors and "
        "param groups match the script, 2 pairs of equal files in full; for details: ckptfix check -v -r "
        f"{runs}"
    )
    assert sum(line.startswith("not checked") for line in lines) == 1
    (clean,) = (line for line in lines if line.startswith(f"{runs}/1: "))
    assert (
        clean == f"{runs}/1: no error found, 1 note (4 files, 5 tensors, 19.8 KiB): wrapper-prefix"
    )
    assert not any(line.startswith("  model") for line in lines), (
        "of each checkpoint only what is wrong"
    )

    assert run(["check", "-r", "-v", str(runs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    unchecked = [line for line in lines if line.startswith("not checked")]
    assert lines[-1 - len(unchecked) : -1] == unchecked
    assert (
        "not checked: 2 pairs of equal files in full: only samples were compared; ckptfix "
        "check --data reads all" in unchecked
    )
    assert len({line.split(";")[0].split("(")[0] for line in unchecked}) == len(unchecked)
    assert "  model      lone.safetensors: 1 tensor, U8, 1 B" in lines


@pytest.mark.parametrize(
    "words",
    [
        "check {2}",
        "check {1} {2}",
        "check -r {}",
        "repair {2}",
        "repair {1} {2}",
        "repair {2} --output {}/copy",
    ],
)
def test_the_command_for_details_can_be_pasted(words: str, tmp_path: Path, capsys: Capture) -> None:
    """It lists every topic of the line that it ends, also of a path with a space."""
    root = tmp_path / "my runs"
    for name in ("1", "2"):
        shutil.copytree(DOUBLED, root / name)
    run([part.format(root, root / "1", root / "2") for part in words.split()])
    (line,) = (
        one for one in capsys.readouterr().out.splitlines() if one.startswith("not checked: ")
    )
    topics, _, command = line.removeprefix("not checked: ").partition("; for details: ")
    run(shlex.split(command)[1:])
    details = capsys.readouterr().out
    assert all(topic in details for topic in topics.split(", "))
    assert details.count("not checked: ") == len(topics.split(", "))


def test_of_many_paths_the_command_for_details_is_described(
    tmp_path: Path, capsys: Capture
) -> None:
    paths = [str(shutil.copytree(CLEAN, tmp_path / str(number))) for number in range(5)]
    assert run(["check", *paths]) == 0
    assert "; for details: the same command with -v\n" in capsys.readouterr().out


def test_warnings_and_failures_have_words_of_their_own(runs: Path, capsys: Capture) -> None:
    equal = Path(shutil.copytree(CLEAN, runs / "5"))
    shutil.copy(equal / "model.safetensors", equal / "model_1.safetensors")
    (runs / "1" / ".ckptfix").write_text("a file where the journal should be")
    assert run(["check", *(str(runs / name) for name in ("1", "2", "5", "nowhere"))]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "4 checkpoints: 1 damaged, 1 with warnings, 2 failed"
    assert f"{runs}/nowhere does not exist" in err
    assert run(["check", "-r", str(runs / "nowhere"), str(runs / "2"), "--json"]) == 2
    assert [one["status"] for one in printed(capsys)["checkpoints"]] == [2, 1]


def test_one_path_has_no_summary(runs: Path, capsys: Capture) -> None:
    for arguments in (["check"], ["check", "-r"], ["repair"], ["undo"], ["verify"], ["seal"]):
        run([arguments[0], *arguments[1:], str(runs / "2")])
        assert "1 checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["-q", "--null", "-0"])
def test_quiet_prints_paths_alone(option: str, runs: Path, capsys: Capture) -> None:
    damaged = sorted(str(runs / name) for name in ("2", "4", "my 'third'"))
    assert run(["check", "-r", str(runs), option]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    if option == "-q":
        assert out.splitlines() == [*damaged[:2], f"""'{runs}/my '"'"'third'"'"''"""]
    else:
        assert out.split("\0") == [*damaged, ""]
    assert run(["check", "-r", option, str(runs / "1")]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("listing", "taking"), [("-q", "xargs"), ("-0", "xargs -0")])
def test_damaged_paths_can_be_piped_to_repair(listing: str, taking: str, runs: Path) -> None:
    odd = (
        Path(shutil.copytree(DOUBLED, runs / os.fsdecode(b"-a\xff b\n")))
        if listing == "-0"
        else runs / "2"
    )
    shutil.rmtree(runs / "4")
    ckptfix = f"{sys.executable} -m ckptfix"
    pipeline = (
        f"{ckptfix} check -r . {listing} | (cd {Path.cwd()}; cd {runs}; {taking} {ckptfix} repair)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["sh", "-c", pipeline], cwd=runs, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert [check(path).status for path in (runs / "2", runs / "my 'third'", odd)] == [0, 0, 0]


def test_repair_and_undo_go_on_after_a_failure(runs: Path, capsys: Capture) -> None:
    before = snapshot(runs / "2")
    paths = [str(runs / name) for name in ("1", "2", "nowhere", "my 'third'", "4")]
    with folder_lock(runs / "my 'third'"):
        assert run(["repair", *paths]) == 3
    out, err = capsys.readouterr()
    assert (
        out.splitlines()[-1] == "5 checkpoints: 1 still damaged, 1 repaired, 1 undamaged, 2 failed"
    )
    assert f"{runs}/nowhere does not exist" in err
    assert out.count("not checked: values of tensors") == 1
    assert check(runs / "2").status == 0
    assert run(["undo", *paths]) == 2
    assert last_line(capsys) == "5 checkpoints: 1 undone, 4 failed"
    assert snapshot(runs / "2") == before


def test_a_dry_run_of_several_counts_what_is_to_be_repaired(runs: Path, capsys: Capture) -> None:
    before = snapshot(runs)
    assert run(["repair", "--dry-run", *map(str, sorted(runs.iterdir()))]) == 1
    assert last_line(capsys) == "4 checkpoints: 1 still damaged, 2 to repair, 1 undamaged"
    assert snapshot(runs) == before


def test_seal_and_verify_take_several(runs: Path, capsys: Capture) -> None:
    paths = [str(runs / name) for name in ("1", "2", "4")]
    assert run(["seal", *paths]) == 1
    assert last_line(capsys) == "3 checkpoints: 2 refused, 1 sealed"
    assert run(["verify", *paths]) == 1
    assert last_line(capsys) == "3 checkpoints: 2 with problems, 1 verified"
    (sealed,) = (path for path in map(Path, paths) if (path / ".ckptfix").exists())
    bare = Path(shutil.copytree(sealed, runs.parent / "bare"))
    shutil.rmtree(bare / ".ckptfix")
    assert run(["verify", str(sealed), str(bare)]) == 3, "nothing of the second was compared"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "2 checkpoints: 1 verified, 1 without checksums"
    assert f"nothing was verified: there is no manifest; next: ckptfix seal {bare}" in printed
    shutil.rmtree(sealed / ".ckptfix")
    assert run(["verify", "--data", str(sealed), str(sealed)]) == 0
    assert last_line(capsys) == "2 checkpoints: 2 verified by values only"


@pytest.mark.parametrize("verb", ["repair", "undo", "verify", "seal"])
def test_json_of_several_is_one_object(verb: str, runs: Path, capsys: Capture) -> None:
    alone = Path(shutil.copytree(runs, runs.parent / "alone"))
    names = ("1", "2", "nowhere")
    expected = []
    for name in names:
        run([verb, str(alone / name), "--json"])
        one = printed(capsys)
        if "error" in one:
            one["path"] = str(alone / name)
        del one["version"]
        expected.append(json.loads(json.dumps(one).replace(str(alone), str(runs))))
    status = run([verb, *(str(runs / name) for name in names), "--json"])
    document = printed(capsys)
    assert document == {"version": 2, "reports": expected, "status": status}
    worst = {"verify": 3}.get(verb, 2)
    assert status == max(one["status"] for one in expected) == worst, (
        "verify compared nothing of the second"
    )


def test_one_copy_of_several_is_refused(runs: Path, capsys: Capture) -> None:
    paths = [str(runs / "1"), str(runs / "2")]
    assert run(["repair", *paths, "--output", str(runs.parent / "copy")]) == 2
    assert "one folder cannot hold copies of 2 checkpoints" in capsys.readouterr().err
    assert run(["verify", *paths, "--device-map", "auto"]) == 2
    assert "name one DIR instead of 2" in capsys.readouterr().err


def test_an_interrupt_ends_all_and_says_what_became_of_each(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(runs / name) for name in ("2", "my 'third'", "1")]
    rename = os.rename

    def interrupt(source: str | Path, target: str | Path, **options: Any) -> None:
        if "third" in str(source):
            raise KeyboardInterrupt
        rename(source, target, **options)

    monkeypatch.setattr("os.rename", interrupt)
    assert run(["repair", *paths, "--json"]) == 130
    repaired, interrupted = printed(capsys)["reports"]
    assert repaired["transaction"] == 1
    assert interrupted["error"] == f"interrupted: {paths[1]} is unchanged"
    assert run(["repair", *reversed(paths)]) == 130
    assert last_line(capsys) == "3 checkpoints: 1 undamaged, 1 failed, 1 not reached"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["repair", "undo", "seal"])
def test_what_an_interrupt_says_is_so(
    verb: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(CLEAN if verb == "seal" else DOUBLED, tmp_path / "source"))
    if verb == "undo":
        assert run(["repair", str(source)]) == 0
    done = Path(shutil.copytree(source, tmp_path / "done"))
    assert run([verb, str(done)]) == 0
    said = set()
    for point in range(200):
        folder = Path(shutil.copytree(source, tmp_path / str(point)))
        capsys.readouterr()
        with monkeypatch.context() as patch:
            calls = interrupt_at(point, patch)
            status = run([verb, str(folder)])
        if len(calls) <= point // 2:
            break
        if (
            status == 0
        ):  # the call failed by itself, as of a file that is not there, and was not followed by one
            continue
        assert status == 130
        words = (
            capsys.readouterr()
            .err.strip()
            .removeprefix("ckptfix: interrupted: ")
            .replace(str(folder), "DIR")
        )
        said.add(words)
        is_pending = any(one.state is State.PENDING for one in transactions(folder))
        assert is_pending == words.startswith("run ckptfix ")
        if words == "DIR is unchanged":
            assert content(folder) == content(source)
        elif not is_pending:
            assert content(folder) == content(done)
    else:
        pytest.fail("the work never came to its end")
    assert "DIR is unchanged" in said
    assert len(said) > 1


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those of the journal; of the manifest, that it is there."""
    files = snapshot(folder)
    kept = {name: data for name, data in files.items() if not name.startswith(".ckptfix/")}
    return kept | {name: b"" for name in files if name == ".ckptfix/manifest.json"}


def interrupt_at(point: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interrupt at one of the calls that change what is in a folder: the odd points once it is
    done.
    """
    calls: list[str] = []

    def interrupting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(real.__name__)
            is_here = len(calls) - 1 == point // 2
            if is_here and point % 2 == 0:
                raise KeyboardInterrupt
            result = real(*args, **options)
            if is_here:
                raise KeyboardInterrupt
            return result

        return call

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "truncate", "fsync"):
        monkeypatch.setattr(os, name, interrupting(getattr(os, name)))
    return calls


SENTENCES = {
    "a": ["1 pair in full: samples only", "values", "see: ckptfix verify a", "files: 'x', 'y'"],
    "b b": ["2 pairs in full: samples only", "values", "see: ckptfix verify 'b b'", "files: 'z'"],
    "c": ["values", "optimizer.bin: cut at 5", "other"],
    "d": ["optimizer.bin: cut at 7"],
    "values": ["values"],
}


def test_what_was_not_checked_is_folded() -> None:
    unchecked = Unchecked()
    for path, sentences in SENTENCES.items():
        for words in sentences:
            unchecked.add(path, words)
    assert list(unchecked.sentences()) == [
        "3 pairs in full: samples only",
        "values",
        "see: ckptfix verify a (and 1 more checkpoint)",
        "files: 'x', 'y' (and 1 more checkpoint)",
        "optimizer.bin: cut at 5 (and 1 more checkpoint)",
        "other",
    ]


def test_sentences_without_end_are_counted() -> None:
    unchecked = Unchecked()
    for number in range(1000):
        unchecked.add("a", "x" * number)
    *_, last = unchecked.sentences()
    assert last == "800 more items like these; --json lists all"


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_results_are_printed_as_they_come(
    form: str, runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["check", "-r", str(runs), "--json"])
    expected = printed(capsys)["checkpoints"]
    monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths: 1)
    seen: list[str] = []
    real = check

    def watching(path: str, **options: Any) -> Any:
        seen.append(capsys.readouterr().out)
        return real(path, **options)

    monkeypatch.setattr("ckptfix.cli.check.check", watching)
    assert run(["check", "-r", str(runs), "--format", form]) == 1
    parts = [*seen[1:], capsys.readouterr().out]
    assert seen[0] == ""
    if form == "json":
        assert json.loads("".join(parts)) == {
            "version": 2,
            "checkpoints": expected,
            "resume": [],
            "status": 1,
        }
        assert all(path in part for path, part in zip("124", parts, strict=False))
        return
    *ones, summary = map(json.loads, "".join(parts).splitlines())
    assert ones == expected
    assert [len(part.splitlines()) for part in parts] == [1, 1, 1, 2]
    assert summary == {
        "version": 2,
        "summary": {"checkpoints": 4, "damaged": 3, "clean": 1},
        "resume": [],
        "status": 1,
    }


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_an_interrupt_leaves_documents_that_can_be_read(
    form: str, runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths: 1)
    real = check

    def interrupted(path: str, **options: Any) -> Any:
        if str(path).endswith("2"):
            raise KeyboardInterrupt
        return real(path, **options)

    monkeypatch.setattr("ckptfix.cli.check.check", interrupted)
    assert run(["check", "-r", str(runs), "--format", form]) == 130
    first, *others = capsys.readouterr().out.splitlines()
    last = json.loads(others[0] if others else first)
    assert (last["error"], last["status"]) == ("interrupted: nothing was changed", 130)
    done = [json.loads(first)] if others else last["checkpoints"]
    assert [one["path"] for one in done] == [str(runs / "1")]


@pytest.mark.parametrize("verb", ["check", "scrub"])
@pytest.mark.parametrize("form", ["json", "jsonl", "text"])
def test_an_error_that_nobody_has_foreseen_ends_one_checkpoint_alone(
    form: str,
    verb: str,
    runs: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options = ["--state", str(tmp_path / "state.sqlite")] if verb == "scrub" else ["-r"]
    module = "ckptfix.verification.scrub" if verb == "scrub" else "ckptfix.cli.check"

    def faulty(path: str | Path, **options: Any) -> CheckReport:
        if Path(path).name == "2":
            raise RuntimeError("a fault\nof ours")
        return check(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.check", faulty)
        assert run([verb, *options, str(runs), "--format", form]) == 3
        out, err = capsys.readouterr()
        words = "RuntimeError: a fault of ours (test_several_paths.py, line"
        if form == "text":
            assert f"{runs}/2: {words}" in err
            assert "this is a bug in ckptfix, so the outcome is unknown; please report it" in err
            assert out.splitlines()[-1] == "4 checkpoints: 2 damaged, 1 clean, 1 failed"
        else:
            documents = [json.loads(line) for line in out.splitlines()]
            ones = documents[:-1] if form == "jsonl" else documents[0]["checkpoints"]
            assert [one["status"] for one in ones] == [0, 3, 1, 1]
            assert words in ones[1]["error"]
            assert documents[-1]["status"] == 3
        assert run([verb, *options, str(runs / "2"), "--format", form]) == 3
        out, err = capsys.readouterr()
        if form == "text":
            assert "Traceback" in err
            assert words in err
        else:
            assert words in json.loads(out.splitlines()[-1])["error"]
    assert (
        run([verb, *options, str(runs), "-q", *(["--max-age", "1d"] if verb == "scrub" else [])])
        == 1
    )


def test_an_error_between_two_checkpoints_leaves_a_document(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(path: Any) -> Any:
        yield runs / "1"
        yield runs / "2"
        yield runs / "4"
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("ckptfix.cli.several_paths.find_checkpoints", ending)
    monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths: 1)
    assert run(["check", "-r", str(runs), "--json"]) == 3
    document = printed(capsys)
    assert [one["status"] for one in document["checkpoints"]] == [0, 1, 1]
    assert "RuntimeError: a fault of ours" in document["error"]


def test_threads_print_in_the_order_of_the_paths(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        shutil.copytree(runs / "1", runs / f"more-{number:02}")
    outputs = []
    for threads in (1, 4):
        monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths, threads=threads: threads)
        assert run(["check", "-r", str(runs)]) == 1
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    assert outputs[0].out.splitlines()[-1] == "24 checkpoints: 3 damaged, 21 clean"


def test_an_interrupt_does_not_wait_for_checkpoints_read_ahead(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, read = threading.Barrier(2), list[Path]()

    def slow(path: Path, *, progress: Callable[[int], None], **options: Any) -> CheckReport:
        if path == runs / "1":
            time.sleep(0.2)  # as on a slow disk: the others are read in threads
            return check(path, **options)
        if ahead.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(20_000):
            progress(1)
            time.sleep(0.001)
        read.append(path)
        return check(path, **options)

    monkeypatch.setattr("ckptfix.cli.check.check", slow)
    monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths: 2)
    assert run(["check", "-r", "--json", str(runs)]) == 130
    assert read == []
    document = printed(capsys)
    assert [one["path"] for one in document["checkpoints"]] == [str(runs / "1")]
    assert document["status"] == 130

"""Several processes of torchrun, Slurm or a job array do what one does, byte for byte; one that
fails ends all.
"""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
from safetensors.numpy import save_file

from ckptfix import seal
from ckptfix.cli import run as run_here
from tests.repairs.refused import nobody_may_read
from tests.sampling import is_exhaustive, one_of

pytestmark = pytest.mark.slow

MANIFEST = ".ckptfix/manifest.json"
STRUCK = str(Path(__file__).with_name("struck_rank.py"))
ROOT = Path(__file__).parents[2]
PORTS = iter(range(random.randrange(30000, 45000), 65000))


def checkpoint(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = numpy.random.default_rng(seed)
    weights: dict[str, str] = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        tensors = {
            f"layer.{number}.{one}.weight": rng.standard_normal((64, 64)).astype("float32")
            for one in range(8)
        }
        save_file(tensors, folder / name, {"format": "pt"})
        weights |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": len(weights) * 64 * 64 * 4}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def with_a_large_number(folder: Path) -> Path:
    """Put a number into a checkpoint that is infinite in fp16."""
    path = folder / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = numpy.float32(1e9).tobytes()
    path.write_bytes(data)
    return folder


def variables(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHELASTIC"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **own, **more}


def run(*arguments: object, at: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run ckptfix in one process. ``at``: its working directory."""
    command = [sys.executable, "-m", "ckptfix", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=variables(**more),
        cwd=at or None,
    )


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"),
    "accelerate launch": (
        "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1",
        "--main_process_ip=127.0.0.1",
    ),
}  # fmt: skip


def launched(
    launcher: str, *arguments: object, script: tuple[object, ...] = ("-m", "ckptfix"), **more: str
) -> "subprocess.Popen[str]":
    """Start ckptfix, or a script, in two processes of a launcher."""
    module, *options = LAUNCHERS[launcher]
    port = "--master_port" if launcher == "torchrun" else "--main_process_port"
    command = [
        sys.executable, "-m", module, *options, f"{port}={next(PORTS)}", *map(str, script),
        *map(str, arguments),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables(**more)
    )


def torchrun(
    *arguments: object, script: tuple[object, ...] = ("-m", "ckptfix")
) -> subprocess.CompletedProcess[str]:
    """Run ckptfix, or a script, in two processes of torchrun."""
    with launched("torchrun", *arguments, script=script) as process:
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ranks(
    *arguments: object, at: tuple[Path, ...] = (), last: tuple[str, ...] = (), torch: bool = False,
    strike: tuple[object, ...] = (0, 0, "none"), **more: str,
) -> list[subprocess.CompletedProcess[str]]:  # fmt: skip
    """Run ckptfix in two tasks as Slurm starts them, without its own help when one dies.

    ``at``: the working folder of each, as two nodes have other files below one path. ``last``: the
    last word of each. ``strike``: rank, units and how. ``torch``: over Gloo, which takes long.
    """
    port = next(PORTS)
    started = []
    with TemporaryDirectory() as store:
        for rank in range(2):
            slurm = {
                "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "12",
                "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": str(rank), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "RANK": str(rank),
            }  # fmt: skip
            command = [
                sys.executable,
                STRUCK,
                *map(str, strike),
                "torch" if torch else store,
                *map(str, arguments),
            ]
            started.append(
                subprocess.Popen(
                    [*command, *last[rank : rank + 1]],
                    cwd=at[rank] if at else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=variables(**slurm, **more),
                )
            )
        if str(strike[2]).startswith("stop"):
            struck, other = (started[int(str(strike[0])) ^ turn] for turn in (0, 1))
            other.wait(120)
            struck.kill()
        try:
            ended = [(one, *one.communicate(timeout=120)) for one in started]
        finally:
            for process in started:  # where the other has hung
                process.kill()
    return [
        subprocess.CompletedProcess(one.args, one.returncode, out, err) for one, out, err in ended
    ]


def test_torchrun_seals_as_one_process_does(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a" / "checkpoint")
    alone = Path(shutil.copytree(folder, tmp_path / "b" / "checkpoint"))
    one, two = run("seal", alone), torchrun("seal", folder)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert two.stdout == one.stdout.replace(str(alone), str(folder))
    assert (folder / MANIFEST).read_bytes() == (alone / MANIFEST).read_bytes()
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a sealed checkpoint, and a copy with a tensor changed since."""
    folder = checkpoint(tmp_path_factory.mktemp("pair") / "good")
    assert run("seal", folder).returncode == 0
    changed = Path(shutil.copytree(folder, folder.with_name("changed")))
    path = changed / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return folder, changed


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--data"),
        ("verify", "--json"),
        ("check", "--data", "--json"),
    ],
    ids=" ".join,
)
def test_slurm_prints_what_one_process_prints(
    pair: tuple[Path, Path], arguments: tuple[str, ...]
) -> None:
    _, changed = pair
    one, two = run(*arguments, changed), ranks(*arguments, changed)
    assert two[0].stdout == one.stdout, two[0].stderr
    assert two[1].stdout == ""
    assert [process.returncode for process in two] == [one.returncode] * 2


def test_two_processes_compare_as_one_does_and_go_on_after_what_all_refuse(
    pair: tuple[Path, Path],
) -> None:
    for arguments in (("diff", "--json", *pair), ("verify", "nowhere", *pair)):
        one, two = run(*arguments), ranks(*arguments)
        assert (two[0].stdout, two[0].stderr, two[0].returncode) == (
            one.stdout,
            one.stderr,
            one.returncode,
        )
        assert (two[1].stdout, two[1].stderr, two[1].returncode) == ("", "", one.returncode)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and bytes of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "safetensors", "--dtype", "fp16", "--max-shard-size", "40KB"),
        ("--to", "dcp", "--dtype", "fp16"),
        ("--to", "bin", "--max-shard-size", "40KB", "--json"),
    ],
    ids=lambda options: options[1],
)
def test_two_processes_migrate_as_one_does(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = checkpoint(tmp_path / "source")
    with_a_large_number(source)
    (source / "config.json").write_text("{}")
    assert run("seal", source).returncode == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = run("migrate", source, tmp_path / "a" / "new", *options)
    two = ranks("migrate", source, tmp_path / "b" / "new", *options)
    assert [process.returncode for process in two] == [0, 0], two[0].stderr
    assert two[0].stdout == one.stdout.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "became infinite" in one.stdout or "--json" in options
    names = {
        name
        for name in contents(tmp_path / "a")
        if "/.ckptfix/migrated" not in name and ".metadata" not in name
    }
    mine, theirs = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert mine.keys() == theirs.keys()
    assert {name for name in mine if mine[name] != theirs[name]}.isdisjoint(names)
    assert run("verify", tmp_path / "b" / "new").returncode == 0


def test_two_processes_migrate_a_complete_state_as_one_does(tmp_path: Path) -> None:
    source = ROOT / "fixtures" / "deepspeed-0.18.2" / "accelerate-zero2" / "checkpoint"
    options = ("--state", "all", "--to", "fsdp", "--processes", "2")
    one = run("migrate", source, tmp_path / "a", *options)
    two = ranks("migrate", source, tmp_path / "b", *options)
    assert [process.returncode for process in two] == [0, 0], two[0].stderr
    assert two[0].stdout == one.stdout.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    mine, theirs = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {name for name in mine | theirs if mine.get(name) != theirs.get(name)} <= {
        ".ckptfix/migrated.json"
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_migration_that_one_rank_fails_writes_nothing(tmp_path: Path, rank: int) -> None:
    source = checkpoint(tmp_path / "source")
    ended = ranks(
        "migrate", source, tmp_path / "new", "--to", "dcp", strike=(rank, 1, "error-in-files")
    )
    assert [process.returncode for process in ended] == [3, 3]
    assert "Input/output error" in ended[0].stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_stays_of_a_migration_whose_ranks_have_lost_each_other(
    tmp_path: Path, rank: int
) -> None:
    """The first rank has removed what the other one still writes in, or the other way round."""
    source = checkpoint(tmp_path / "source")
    command = ("migrate", source, tmp_path / "new", *MIGRATE)
    ended = ranks(*command, strike=(rank, 0, "late-in-files"))
    assert [process.returncode for process in ended] == [3, 3]
    assert "Input/output error" in ended[rank].stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


MIGRATE = ("--to", "safetensors", "--dtype", "fp16", "--max-shard-size", "20KB")
"""Nine files of four tensors or so each, and their index."""


@pytest.mark.parametrize(
    ("rank", "units"), one_of([(0, 0), (1, 1), (0, 2), (1, 3), (0, 3), (1, 2), (0, 1), (1, 0)])
)
def test_a_migration_goes_on_from_the_complete_files_of_the_run_before(
    tmp_path: Path, rank: int, units: int
) -> None:
    source = with_a_large_number(checkpoint(tmp_path / "source"))
    assert run("seal", source).returncode == 0
    one = run("migrate", source, tmp_path / "alone", *MIGRATE)
    assert "became infinite" in one.stdout
    command = ("migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial")
    ended = ranks(*command, strike=(rank, units, "kill"), CKPTFIX_TEAM_TIMEOUT="4")
    assert ended[rank].returncode == -9
    assert ended[1 - rank].returncode == 3
    assert (
        "next: run the same command again to continue where this run stopped"
        in ended[1 - rank].stderr
    )
    (staging,) = tmp_path.glob(".ckptfix-*")
    noted = [
        line
        for path in (tmp_path / "partial").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    files = [json.loads(line.partition("\t")[0])[1]["file"] for line in noted]
    kept = {(staging / "new" / file).stat().st_ino for file in files}
    assert len(kept) == len(noted) >= units
    assert run("check", source).returncode == 0  # nothing sweeps the folder away
    resumed = run(*command)
    assert (resumed.returncode, resumed.stdout) == (
        0,
        one.stdout.replace("/alone", "/new"),
    ), resumed.stderr
    assert not noted or f"resuming: {len(noted)} of " in resumed.stderr
    assert kept <= {path.stat().st_ino for path in (tmp_path / "new").iterdir()}
    mine, theirs = contents(tmp_path / "new"), contents(tmp_path / "alone")
    assert {name for name in mine | theirs if mine.get(name) != theirs.get(name)} <= {
        ".ckptfix/migrated.json"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "new", "source"]
    assert run("verify", tmp_path / "new").returncode == 0


@pytest.mark.parametrize("change", ["source", "kept file", "other options", "folder removed"])
def test_a_migration_keeps_no_file_of_another_source_or_of_unknown_bytes(
    tmp_path: Path, change: str
) -> None:
    source = checkpoint(tmp_path / "source")
    command = ["migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial"]
    ranks(*command, strike=(1, 2, "error"))
    (staging,) = tmp_path.glob(".ckptfix-*")
    if change == "source":
        path = source / "model-00001-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-4:] = numpy.float32(7).tobytes()
        path.write_bytes(data)
    elif change == "kept file":
        for path in (staging / "new").iterdir():
            path.write_bytes(path.read_bytes()[:-1] + b"!")
    elif change == "other options":
        refused = run(*("bf16" if word == "fp16" else word for word in command))
        assert refused.returncode == 3
        assert "holds partial results of another command: ckptfix migrate" in refused.stderr
        assert staging.exists()
    else:
        shutil.rmtree(tmp_path / "partial")
    resumed = run(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert ("resuming" in resumed.stderr) == (change == "other options")
    assert run("migrate", source, tmp_path / "alone", *MIGRATE).returncode == 0
    mine, theirs = contents(tmp_path / "new"), contents(tmp_path / "alone")
    assert {name for name in mine | theirs if mine.get(name) != theirs.get(name)} <= {
        ".ckptfix/migrated.json"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "new", "source"]


def test_a_proof_reads_what_was_kept_and_a_wrong_byte_begins_all_again(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    command = ["migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial"]
    ranks(*command, strike=(1, 2, "error"))
    (staging,) = tmp_path.glob(".ckptfix-*")
    for path in (staging / "new").iterdir():  # as a disk changes a byte: the time stays
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    refused = ranks(*command)
    assert [process.returncode for process in refused] == [3, 3]
    assert "differs from what was read from the source" in refused[0].stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "partial") == ["source"]
    assert run(*command).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]


def test_a_migration_of_one_file_goes_on_too(tmp_path: Path) -> None:
    source = tmp_path / "one.safetensors"
    (checkpoint(tmp_path / "source") / "model-00001-of-00002.safetensors").rename(source)
    command = (
        "migrate",
        source,
        tmp_path / "new.bin",
        "--to",
        "bin",
        "--partial",
        tmp_path / "partial",
    )
    # The first result is that of the file, the next one of its proof.
    killed = ranks(*command, strike=(0, 1, "kill"), CKPTFIX_TEAM_TIMEOUT="4")
    assert [process.returncode for process in killed] == [-9, 3]
    (staging,) = tmp_path.glob(".ckptfix-*")
    inode = (staging / "new" / "new.bin").stat().st_ino
    resumed = run(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming: 1 of 1 unit" in resumed.stderr
    assert (tmp_path / "new.bin").stat().st_ino == inode
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "new.bin",
        "one.safetensors",
        "source",
    ]


def test_a_migration_in_one_process_goes_on_after_an_error_of_the_disk(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    command = ("migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial")
    script = [sys.executable, STRUCK, "0", "3", "error", "none", *map(str, command)]
    env = variables(RANK="0", CKPTFIX_TEAM="0")
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (
        3,
        f"plan for {source}:",
    ), ended.stderr
    resumed = run(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming: 3 of " in resumed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]


def test_after_ctrl_c_a_verb_that_reads_says_that_it_goes_on(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    command = ("verify", "--data", pair[0], "--partial", tmp_path / "partial")
    script = [sys.executable, STRUCK, "0", "3", "interrupt", "none", *map(str, command)]
    env = variables(RANK="0", CKPTFIX_TEAM="0")
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert ended.returncode == 130
    assert ended.stderr.endswith(
        "interrupted: nothing was changed; run the same command again to continue where this run stopped\n"
    )
    assert "resuming: 3 of " in run(*command).stderr


def strikes() -> Sequence[tuple[int, int]]:
    """Return ranks, and after how many of their nine units or so each is struck."""
    if is_exhaustive():
        return [(rank, units) for rank in range(2) for units in range(9)]
    return one_of([(0, 0), (1, 1), (0, 2), (1, 3), (0, 5), (1, 6), (0, 7), (1, 8)])


@pytest.mark.parametrize(("rank", "units"), strikes())
def test_a_killed_rank_ends_all_and_the_next_run_goes_on(
    tmp_path: Path, rank: int, units: int
) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    ended = torchrun(rank, units, "kill", "torch", "seal", folder, script=(STRUCK,))
    assert ended.returncode != 0
    assert not (folder / MANIFEST).exists()
    left = sum(
        len(path.read_text().splitlines())
        for path in (folder / ".ckptfix" / "partial").glob("*.jsonl")
    )
    assert left >= units
    resumed = run("seal", folder, "--partial", folder / ".ckptfix" / "partial")
    assert resumed.returncode == 0, resumed.stderr
    assert not units or f"resuming: {left} of 19 units" in resumed.stderr
    again = checkpoint(tmp_path / "again" / "checkpoint")
    assert run("seal", again).returncode == 0
    assert (folder / MANIFEST).read_bytes() == (again / MANIFEST).read_bytes()
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("rank", one_of([0, 1]))
def test_a_rank_that_dies_without_a_launcher_ends_the_other(tmp_path: Path, rank: int) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    two = ranks("seal", folder, strike=(rank, 2, "kill"), torch=True)
    other = two[1 - rank]
    assert two[rank].returncode == -9
    assert other.returncode == 3
    assert "another process, or its node, stopped before it was done" in other.stderr
    assert "next: run the same command again to continue where this run stopped" in other.stderr
    assert not (folder / MANIFEST).exists()


def test_a_rank_that_is_stopped_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    two = ranks("seal", folder, strike=(0, 2, "stop"), torch=True, CKPTFIX_TEAM_TIMEOUT="5")
    assert two[1].returncode == 3
    assert "did not respond for 5 s (CKPTFIX_TEAM_TIMEOUT)" in two[1].stderr
    assert "next: run the same command again to continue where this run stopped" in two[1].stderr
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize(
    ("rank", "launcher"), one_of([(rank, name) for rank in (0, 1) for name in LAUNCHERS])
)
def test_the_error_of_a_rank_is_the_first_thing_on_stderr(
    tmp_path: Path, rank: int, launcher: str
) -> None:
    """The other rank reads on for minutes, and the launcher ends it."""
    folder = checkpoint(tmp_path / "checkpoint")
    strike = (rank, 2, "alone", "torch", "seal", folder)
    with launched(launcher, *strike, script=(STRUCK,)) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    first = err.splitlines()[0]
    assert first.startswith("ckptfix: ")
    assert "Input/output error" in first
    assert rank == 0 or "rank 1 (process" in first
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("launcher", one_of(LAUNCHERS))
def test_a_launcher_ends_the_ranks_that_one_was_killed_of(tmp_path: Path, launcher: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    strike = (1, 2, "kill", "torch", "seal", folder)
    with launched(launcher, *strike, script=(STRUCK,)) as process:
        process.communicate(timeout=120)
    assert process.returncode != 0
    assert not (folder / MANIFEST).exists()
    assert run("seal", folder).returncode == 0


@pytest.mark.parametrize(
    ("launcher", "ends"), one_of([(name, ends) for name in LAUNCHERS for ends in (False, True)])
)
def test_nothing_is_written_while_a_rank_is_stopped(
    tmp_path: Path, launcher: str, ends: bool
) -> None:
    """It is stopped until it goes on, or until the launcher ends all."""
    folder, note = checkpoint(tmp_path / "checkpoint"), tmp_path / "stopped"
    strike = (1, 2, "stop", "torch", "seal", folder)
    with launched(launcher, *strike, script=(STRUCK,), STOPPED=str(note)) as process:
        while not (note.exists() and note.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        stopped = int(note.read_text())
        time.sleep(3)  # the other rank has read its share
        assert process.poll() is None
        assert not (folder / MANIFEST).exists()
        if ends:  # both launchers kill after 30 s what does not end
            process.terminate()
        else:
            os.kill(stopped, signal.SIGCONT)
        process.communicate(timeout=120)
    assert (folder / MANIFEST).exists() != ends
    assert (process.returncode == 0) != ends
    if not ends:
        assert run("verify", "--data", folder).returncode == 0


def test_the_first_rank_may_end_before_the_others_hear_of_it(tmp_path: Path) -> None:
    """A leader that works for all and dies leaves no status: the others end with 3, and say what to
    do.
    """
    folder = checkpoint(tmp_path / "checkpoint")
    two = ranks("repair", folder, strike=(0, 0, "stop-in-repair"), CKPTFIX_TEAM_TIMEOUT="4")
    assert two[1].returncode == 3
    assert f"did not respond for 4 s; next: CKPTFIX_TEAM=0 ckptfix repair {folder}" in two[1].stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_all_at_once_and_names_it(tmp_path: Path, rank: int) -> None:
    """No rank waits until another counts as lost, which takes an hour here."""
    folder = checkpoint(tmp_path / "checkpoint")
    ended = ranks("seal", folder, strike=(rank, 2, "error"), CKPTFIX_TEAM_TIMEOUT="3600")
    assert [one.returncode for one in ended] == [3, 3]
    assert "Input/output error" in ended[0].stderr
    assert rank == 0 or "rank 1 (process" in ended[0].stderr
    assert ended[1].stderr == ""
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("how", ["late", "alike"])
@pytest.mark.parametrize("rank", one_of([0, 1]))
def test_ranks_that_have_lost_each_other_go_to_no_further_checkpoint(
    tmp_path: Path, rank: int, how: str
) -> None:
    """The exchange is over by then: a rank that went on would wait for the others for a day."""
    folders = [checkpoint(tmp_path / name) for name in ("first", "second")]
    options = ("--data", "--partial", tmp_path / "partial")
    ended = ranks("verify", *options, *folders, torch=True, strike=(rank, 0, how))
    assert [process.returncode for process in ended] == [3, 3]
    assert "Input/output error" in ended[rank].stderr
    assert f"rank {rank}" in ended[rank].stderr
    assert "failed, so all ranks stop: " in ended[rank].stderr
    assert "sees a different folder" not in "".join(process.stderr for process in ended)
    assert "second" not in "".join(process.stdout for process in ended)


def test_a_launcher_ends_after_a_rank_that_failed_with_more_checkpoints_to_come(
    tmp_path: Path,
) -> None:
    folders = [checkpoint(tmp_path / name) for name in ("first", "second")]
    options = ("--data", "--partial", tmp_path / "partial")
    strike = (0, 0, "alone", "torch", "verify", *options, *folders)
    with launched("torchrun", *strike, script=(STRUCK,)) as process:
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.terminate()
    assert process.returncode == 1
    assert err.startswith("ckptfix: rank 0 failed, so all ranks stop: ")
    assert "Input/output error" in err.splitlines()[0]


def test_an_error_that_the_leader_alone_has_stops_all_ranks(tmp_path: Path) -> None:
    first, second = (checkpoint(tmp_path / name) for name in ("first", "second"))
    (first / ".ckptfix").mkdir()
    with open(first / ".ckptfix" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = ranks("seal", first, second, CKPTFIX_TEAM_TIMEOUT="3600")
    assert [process.returncode for process in ended] == [3, 3]
    (line,) = ended[0].stderr.splitlines()
    assert line.startswith("ckptfix: rank 0 failed, so all ranks stop: ")
    assert str(first) in line
    assert ended[1].stderr == ""
    assert not (first / MANIFEST).exists()
    assert not (second / MANIFEST).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_one_rank_comes_with_its_traceback(tmp_path: Path, rank: int) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    ended = ranks("seal", folder, strike=(rank, 2, "fault"))
    assert [one.returncode for one in ended] == [3, 3]
    assert "ValueError: a fault of ckptfix" in ended[0].stderr
    assert "Traceback" in ended[rank].stderr
    assert "Traceback" not in ended[1 - rank].stderr
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("rank", one_of([0, 1]))
def test_nodes_with_another_version_are_refused(tmp_path: Path, rank: int) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    ended = ranks("seal", folder, strike=(rank, 0, "older"))
    assert [one.returncode for one in ended] == [3, 3]
    assert "rank 1 (process " in ended[0].stderr
    assert "runs a different version of ckptfix than rank 0 (" in ended[0].stderr
    assert "0.4.9" in ended[0].stderr
    assert "next: install the same version on all nodes" in ended[0].stderr
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("verb", ["seal", "migrate"])
def test_nothing_is_written_where_one_rank_sees_a_change_in_the_end(
    tmp_path: Path, verb: str
) -> None:
    """The first rank saw none, and would have written by the time that the other one looks."""
    folder = checkpoint(tmp_path / "checkpoint")
    options = () if verb == "seal" else (tmp_path / "new", *MIGRATE)
    # seal: the look after the digests, which are all there by then; migrate: the first one is
    # before the work.
    looks = 1 if verb == "seal" else 2
    ended = ranks(verb, folder, *options, strike=(1, looks, "change-in-the-end"))
    assert [one.returncode for one in ended] == [3, 3], ended[0].stdout
    assert "rank 1 (process " in ended[0].stderr
    assert "changed while it was read" in ended[0].stderr
    assert not (folder / MANIFEST).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the disks of two nodes: the files have the same names and sizes, and one file is
    another one.
    """
    place = tmp_path_factory.mktemp("nodes")
    folder = checkpoint(place / "a" / "run" / "checkpoint_1")
    assert run("seal", folder).returncode == 0
    shutil.copytree(place / "a", place / "b")
    os.utime(place / "b" / "run" / "checkpoint_1" / "model-00002-of-00002.safetensors", ns=(1, 1))
    return place / "a", place / "b"


@pytest.mark.parametrize(
    "arguments",
    [
        ("seal", "run/checkpoint_1"),
        ("check", "-r", "run"),
        ("diff", "run/checkpoint_1", "run/checkpoint_1"),
        ("migrate", "run/checkpoint_1", "new", "--to", "bin"),
        ("repair", "run/checkpoint_1"),
    ],
    ids=" ".join,
)
def test_nodes_with_disks_of_their_own_are_told_apart(
    nodes: tuple[Path, Path], arguments: tuple[str, ...]
) -> None:
    before = [contents(node) for node in nodes]
    ended = ranks(*arguments, at=nodes)
    assert [process.returncode for process in ended] == [3, 3]
    assert "sees a different folder than rank 0" in ended[0].stderr
    assert "run/checkpoint_1/model-00002-of-00002.safetensors: expected " in ended[0].stderr
    assert "next: mount the same folder on all nodes" in ended[0].stderr
    assert ended[0].stderr.count("next: ") == 1
    assert ended[0].stdout == ended[1].stdout == ended[1].stderr == ""
    assert [contents(node) for node in nodes] == before


def test_nodes_with_copies_of_one_checkpoint_are_told_apart(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each would read its share of its own copy, and the rest of both copies nobody."""
    shutil.copytree(nodes[0], tmp_path / "copy")  # with the times, as rsync does
    ended = ranks("verify", "run/checkpoint_1", at=(nodes[0], tmp_path / "copy"))
    assert [process.returncode for process in ended] == [3, 3]
    assert (
        "is a different file with the same size and time, on another disk; next: "
        in ended[0].stderr
    )
    (tmp_path / "link").symlink_to(nodes[0])
    ended = ranks("verify", "run/checkpoint_1", at=(nodes[0], tmp_path / "link"))
    assert [process.returncode for process in ended] == [0, 0]


def test_nodes_whose_runs_have_other_checkpoints_are_told_apart(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(nodes[0], tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copytree(
        tmp_path / "a" / "run" / "checkpoint_1", tmp_path / "b" / "run" / "checkpoint_2"
    )
    for at in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")):
        ended = ranks("check", "-r", "run", at=at)
        assert [process.returncode for process in ended] == [3, 3]
        assert "finds different checkpoints than rank 0" in ended[0].stderr
        assert "run/checkpoint_2" in ended[0].stderr


def test_ranks_with_other_arguments_are_refused(nodes: tuple[Path, Path]) -> None:
    ended = ranks("verify", nodes[0] / "run" / "checkpoint_1", last=("--data", "--quiet"))
    assert [process.returncode for process in ended] == [3, 3]
    assert "runs a different command than rank 0" in ended[0].stderr
    assert f"(expected ckptfix verify {nodes[0]}/run/checkpoint_1 --data)" in ended[0].stderr


def test_the_first_rank_alone_repairs_and_undoes(tmp_path: Path) -> None:
    source = (
        ROOT
        / "fixtures"
        / "accelerate-1.15.0"
        / "student-teacher-wrapper-safetensors"
        / "checkpoint"
    )
    folder, alone = (Path(shutil.copytree(source, tmp_path / name)) for name in ("a", "b"))
    for verb in ("repair", "undo"):
        one, two = run(verb, alone), ranks(verb, folder)
        assert two[0].stdout == one.stdout.replace(str(alone), str(folder)), two[0].stderr
        assert (two[1].stdout, two[1].stderr) == ("", "")
        assert [process.returncode for process in two] == [one.returncode] * 2 == [0, 0]
        assert {
            name: data for name, (_, data) in contents(folder).items() if ".ckptfix" not in name
        } == {name: data for name, (_, data) in contents(alone).items() if ".ckptfix" not in name}
    assert contents(folder) == contents(source)
    refused = ranks("undo", folder)
    assert [process.returncode for process in refused] == [run("undo", folder).returncode] * 2
    assert refused[0].stderr == run("undo", folder).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor",), "doctor examines only the machine that it runs on"),
        (("scrub", "runs"), "divides a fleet among processes only with --shard I/N"),
        (("prove-resume", "--", "train.py"), "the launcher belongs in COMMAND"),
    ],
    ids=str,
)
def test_what_one_process_cannot_do_for_all_is_refused(
    arguments: tuple[str, ...], words: str
) -> None:
    ended = ranks(*arguments)
    assert [process.returncode for process in ended] == [2, 2]
    assert words in ended[0].stderr
    assert (
        "next: run it in one process, without the launcher, or with CKPTFIX_TEAM=0"
        in ended[0].stderr
    )


def test_shares_of_a_job_array_become_one_result(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a" / "checkpoint")
    alone = Path(shutil.copytree(folder, tmp_path / "b" / "checkpoint"))
    one = run("seal", alone)
    first = run("seal", folder, "--shard", "0/2")
    assert first.returncode == 0, first.stderr
    assert not (folder / MANIFEST).exists()
    assert first.stdout.endswith(f"next, when all shares are done: ckptfix seal {folder}\n")
    assert run("seal", folder, "--shard", "1/2").returncode == 0
    again = json.loads(run("seal", folder, "--shard", "1/2", "--json").stdout)
    assert again["resumed"] == again["units"]
    last = run("seal", folder)
    assert (last.returncode, last.stderr) == (0, "")
    assert last.stdout == one.stdout.replace(str(alone), str(folder))
    assert (folder / MANIFEST).read_bytes() == (alone / MANIFEST).read_bytes()
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


def test_the_last_command_does_what_shares_have_not_done(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a" / "checkpoint")
    alone = Path(shutil.copytree(folder, tmp_path / "b" / "checkpoint"))
    assert run("seal", alone).returncode == 0
    assert run("seal", folder, "--shard", "0/3").returncode == 0
    last = run("seal", folder)
    assert last.returncode == 0
    missing = re.findall(r"results of share (\d/\d) are missing, so this", last.stderr)
    assert missing == ["1/3", "2/3"]
    assert (folder / MANIFEST).read_bytes() == (alone / MANIFEST).read_bytes()
    assert [path.name for path in (folder / ".ckptfix").iterdir()] == ["manifest.json"]


def test_results_stay_where_a_file_could_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    seal(folder)
    tmp_path.chmod(0o777)
    arguments = ["verify", str(folder), "--partial", str(tmp_path / "partial")]
    with nobody_may_read(folder / "model-00001-of-00002.safetensors"):
        assert run_here(arguments) == 3
    assert run_here(arguments) == 0
    assert "ckptfix: resuming: " in capsys.readouterr().err
    assert not (tmp_path / "partial").exists()


@pytest.mark.parametrize("where", ["the results", "the checkpoint", "nothing"])
def test_the_old_verb_says_what_to_type(tmp_path: Path, where: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    results = tmp_path / "results"
    if where == "the checkpoint":
        assert run("seal", folder, "--shard", "0/2").returncode == 0
        refused, step = run("merge", folder), f"ckptfix seal {folder}"
    elif where == "the results":
        share = ("verify", folder, "--partial", "results")
        assert run(*share, "--shard", "0/2", at=str(tmp_path)).returncode == 0
        refused = run("merge", results)
        step = f"cd {tmp_path} && ckptfix verify {folder} --partial {results}"
    else:
        refused, step = (
            run("merge", folder),
            "run the same command as for the shares, without --shard",
        )
    assert refused.returncode == 2
    assert refused.stderr.endswith(f"to combine the results of the shares: {step}\n")
    assert "merge" not in run("--help").stdout


@pytest.mark.parametrize(
    "arguments", [("verify", "--data"), ("check", "--data"), ("diff",)], ids=" ".join
)
def test_other_verbs_have_shares_too(
    pair: tuple[Path, Path], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    paths = pair if arguments[0] == "diff" else pair[1:]
    refused = run(*arguments, *paths, "--shard", "0/2")
    assert refused.returncode == 2
    assert "add --partial FOLDER" in refused.stderr
    slip = run(
        *arguments,
        *(f"{path}x" for path in paths),
        "--shard",
        "0/2",
        "--partial",
        tmp_path / "partial",
    )
    assert (slip.returncode, (tmp_path / "partial").exists()) == (2, False), slip.stderr
    for number in range(2):
        share = run(*arguments, *paths, "--shard", f"{number}/2", "--partial", tmp_path / "partial")
        assert share.returncode == 0, share.stderr
    one = run(*arguments, *paths, "--json")
    last = run(*arguments, *paths, "--json", "--partial", tmp_path / "partial")
    assert (last.stdout, last.returncode, last.stderr) == (one.stdout, one.returncode, "")
    assert not (tmp_path / "partial").exists()


@pytest.mark.parametrize("has_all", [True, False], ids=["all shares", "one is missing"])
def test_a_migration_has_shares_too(tmp_path: Path, has_all: bool) -> None:
    source = with_a_large_number(checkpoint(tmp_path / "source"))
    assert run("seal", source).returncode == 0
    one = run("migrate", source, tmp_path / "alone", *MIGRATE)
    command = ("migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial")
    killed = [
        sys.executable,
        STRUCK,
        "0",
        "2",
        "kill",
        "none",
        *map(str, command),
        "--shard",
        "2/3",
    ]
    env = variables(RANK="0", CKPTFIX_TEAM="0")
    assert (
        subprocess.run(killed, capture_output=True, timeout=60, check=False, env=env).returncode
        == -9
    )
    for number in (2, 0):
        share = run(*command, "--shard", f"{number}/3")
        assert share.returncode == 0, share.stderr
        assert ("(2 from an earlier run)" in share.stdout) == (number == 2)
    assert run("check", source).returncode == 0  # nothing sweeps the folder away
    assert not (tmp_path / "new").exists()
    if has_all:
        assert run(*command, "--shard", "1/3").returncode == 0
    last = run(*command)
    assert (last.returncode, last.stdout) == (0, one.stdout.replace("/alone", "/new")), last.stderr
    assert ("results of share 1/3 are missing" in last.stderr) != has_all
    mine, theirs = contents(tmp_path / "new"), contents(tmp_path / "alone")
    assert {name for name in mine | theirs if mine.get(name) != theirs.get(name)} <= {
        ".ckptfix/migrated.json"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "new", "source"]


@pytest.mark.parametrize("change", ["source", "new file", "byte of a new file"])
def test_shares_of_a_migration_are_of_one_source_and_proven(tmp_path: Path, change: str) -> None:
    source = checkpoint(tmp_path / "source")
    command = ("migrate", source, tmp_path / "new", *MIGRATE, "--partial", tmp_path / "partial")
    assert run(*command, "--shard", "0/2").returncode == 0
    (staging,) = tmp_path.glob(".ckptfix-*")
    first = next((staging / "new").glob("*.safetensors"))
    status = first.stat()
    if change == "source":
        os.utime(source / "model-00001-of-00002.safetensors", ns=(1, 1))
        refused = run(*command, "--shard", "1/2")
        words = "changed since the first share; next: rm -r"
    else:
        assert run(*command, "--shard", "1/2").returncode == 0
        first.write_bytes(first.read_bytes()[:-1] + b"!")
        words = "changed since its share wrote it; next: rm -r"
        if change == "byte of a new file":  # as a disk changes it: the time stays
            os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
            words = "differs from what was read from the source"
        refused = run(*command)
    assert refused.returncode == 3
    assert words in refused.stderr
    assert not (tmp_path / "new").exists()
    shutil.rmtree(tmp_path / "partial")
    assert run("migrate", source, tmp_path / "new", *MIGRATE).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]


def test_a_file_that_changed_makes_its_share_missing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    for number in range(2):
        assert run("seal", folder, "--shard", f"{number}/2").returncode == 0
    path = folder / "model-00001-of-00002.safetensors"
    os.utime(path, ns=(1, 1))
    last = run("seal", folder)
    assert last.returncode == 0
    assert "are missing, so this process does that share too" in last.stderr
    assert run("verify", "--data", folder).returncode == 0


def test_a_child_of_a_rank_works_alone(tmp_path: Path) -> None:
    """A training script that calls ckptfix hands its own rank on; the other ranks would never
    come.
    """
    folder = checkpoint(tmp_path / "checkpoint")
    code = (
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'ckptfix', "
        "'check', sys.argv[1]]))"
    )
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(next(PORTS)),
    }
    child = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True, text=True, timeout=60, check=False, env=variables(**place),
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert (
        child.stderr
        == "ckptfix: working alone, because the parent process has the same rank (0 of 2); to share "
        "the work among 2 processes: export CKPTFIX_TEAM=1; to work alone without this message: "
        "export CKPTFIX_TEAM=0\n"
    )
    alone = run("check", folder, **place, CKPTFIX_TEAM="0")
    assert (alone.returncode, alone.stderr) == (0, "")
    refused = run("check", folder, CKPTFIX_TEAM="maybe", **place)
    assert (refused.returncode, refused.stderr) == (
        2,
        "ckptfix: CKPTFIX_TEAM=maybe: expected 1 or 0\n",
    )


@pytest.mark.parametrize("is_missing", ["torch", "MASTER_ADDR"])
def test_tasks_that_cannot_meet_say_how_to_work_as_shares(tmp_path: Path, is_missing: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    if is_missing == "torch":
        hidden = "import sys; sys.modules['torch'] = None; import importlib.util as util; "
        hidden += "find = util.find_spec; "
        hidden += "util.find_spec = lambda name: None if name == 'torch' else find(name); "
        task |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(PORTS))}
    else:
        hidden = ""
    script = f"{hidden}from ckptfix.cli import main; main()"

    def start(*arguments: object, rank: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
            timeout=60, check=False, env=variables(**{**task, "SLURM_PROCID": str(rank)}),
        )  # fmt: skip

    refused = start("verify", folder)
    assert refused.returncode == 2
    assert f"{is_missing}" in refused.stderr
    share = "--partial FOLDER --shard $SLURM_PROCID/$SLURM_NTASKS"
    assert refused.stderr.endswith(
        f"start each process as a share: bash -c 'ckptfix verify {folder} {share}'\n"
    )
    assert start("verify", folder, rank=1).stderr == ""
    assert "in process 0 of 2" in start("seal", folder, "--shard", "1/2").stderr
    for rank in range(2):
        done = start("seal", folder, "--shard", f"{rank}/2", rank=rank)
        assert done.returncode == 0, done.stderr
    last = run("seal", folder)
    assert (last.returncode, last.stderr) == (0, "")


def test_a_verb_whose_work_has_no_shares_is_refused(pair: tuple[Path, Path]) -> None:
    ended = ranks("verify", pair[0], "--device-map", "auto")
    assert [one.returncode for one in ended] == [2, 2]
    assert "the reload test uses the devices of one process" in ended[0].stderr


@pytest.mark.parametrize("partial", ["", "s3://bucket/results"])
def test_results_go_into_a_folder_of_this_machine(tmp_path: Path, partial: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    refused = run("seal", folder, "--partial", partial, at=str(tmp_path))
    assert refused.returncode == 2
    assert "expected a local folder for the results" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("below", ["", "partial", "link"])
def test_results_do_not_go_into_the_checkpoint(tmp_path: Path, below: str) -> None:
    """There they would be sealed with it, and be missed by the next verify: they are removed in the
    end.
    """
    folder = checkpoint(tmp_path / "checkpoint")
    (tmp_path / "link").symlink_to(folder)
    partial = tmp_path / "link" / "partial" if below == "link" else folder / below
    before = sorted(folder.iterdir())
    for verb in (("seal", folder), ("migrate", folder, tmp_path / "new", *MIGRATE)):
        refused = run(*verb, "--partial", partial)
        assert refused.returncode == 2, refused.stdout
        assert (
            f"--partial {partial} is inside {folder}, where its files would count" in refused.stderr
        )
    assert sorted(folder.iterdir()) == before


def test_a_copy_of_a_checkpoint_takes_no_results_of_the_other(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    assert run("seal", folder, "--shard", "0/1").returncode == 0
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    request = copy / ".ckptfix" / "partial" / "request.json"
    assert json.loads(request.read_text())["params"]["paths"] == [str(folder)]
    assert run("seal", copy).returncode == 0
    assert [path.name for path in (copy / ".ckptfix").iterdir()] == ["manifest.json"]
    request = folder / ".ckptfix" / "partial" / "request.json"
    request.write_text(json.dumps({**json.loads(request.read_text()), "version": "0.4.9"}))
    assert run("seal", folder).returncode == 0
    assert (folder / MANIFEST).read_bytes() == (copy / MANIFEST).read_bytes()
    results = tmp_path / "results"
    share = ("verify", folder, "--partial", results)
    assert run(*share, "--shard", "0/1").returncode == 0
    refused = run("verify", copy, "--partial", results)
    assert refused.returncode == 3
    assert f"partial results of another command: ckptfix verify {folder} in" in refused.stderr


def test_the_work_of_shares_ends_where_they_were_started(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = ("diff", *pair, "--rtol", "0.0", "--all")
    share = run(*arguments, "--shard", "0/2", "--partial", "parts", at=str(tmp_path))
    assert share.returncode == 0, share.stderr
    own = tmp_path / "parts" / "eval.results.jsonl"
    own.write_text("mine\n")
    refused = run(*arguments, "--partial", tmp_path / "parts")
    assert refused.returncode == 3
    assert f"partial results of another command: ckptfix diff {pair[0]}" in refused.stderr
    last = run(*arguments, "--partial", "parts", at=str(tmp_path))
    assert last.returncode in (0, 1), last.stderr
    assert last.stdout == run(*arguments).stdout
    assert list((tmp_path / "parts").iterdir()) == [own]

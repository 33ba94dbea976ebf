"""``ckptfix prove-resume``: the runs of the user's own command, and what is said where nothing can
be proven.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptfix.cli import run
from tests.sampling import is_exhaustive, one_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "training" / "resumed_script.py")
HEALTHY = '{"save": -1, "dropout": 0.3, "epochs": 2}'


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = run(["prove-resume", *arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--", "train.py"],
            "write {dir} where the command names the folder (-- train.py --output_dir {dir})",
        ),
        (
            ["--output", "taken", "--", "train.py"],
            "taken already exists, and the runs would write into it",
        ),
        (
            ["--steps", "4", "--save-at", "4", "--", "train.py", "{dir}"],
            "expected more than --save-at 4",
        ),
        (["--resume-args", "'", "--", "train.py", "{dir}"], "No closing quotation"),
        (
            ["--keep", "taken", "--", "train.py", "{dir}"],
            "taken exists and is not an empty folder",
        ),
        (["--html", "none/page.html", "--", "train.py", "{dir}"], "cannot be written"),
        (["--", "no-such-program", "{dir}"], "no-such-program: cannot be run"),
    ],
)
def test_wrong_usage_says_what_to_write(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    status, text = said(capsys, *arguments)
    assert status == 2
    assert words in text
    assert (tmp_path / "taken" / "file").exists()


def test_an_option_of_the_script_is_not_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "--", "train.py", "--json")
    assert text.startswith("ckptfix: train.py: each run needs its own output folder")


def test_a_script_that_fails_or_never_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text(
        "import sys\nraise ValueError('no data in ' + sys.argv[1][:0])"
    )
    status, text = said(capsys, "--", "fails.py", "{dir}")
    assert status == 3
    assert "fails.py: the interrupted run failed with status 1: ValueError: no data in" in text
    (tmp_path / "idle.py").write_text("print('done')")
    status, text = said(capsys, "--", "idle.py", "{dir}")
    assert status == 2
    assert "idle.py: no optimizer step of an Accelerator was recorded" in text
    (tmp_path / "hangs.py").write_text(
        "import pathlib, time\ntime.sleep(60)\npathlib.Path('late').touch()"
    )
    status, text = said(capsys, "--timeout", "1", "--", "hangs.py", "{dir}")
    assert status == 3
    assert "a run took longer than 1 seconds (--timeout)" in text
    assert not (tmp_path / "late").exists(), "nobody ended it"


def test_an_interrupt_ends_every_process_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)"
    )
    command = [
        sys.executable,
        "-m",
        "ckptfix",
        "prove-resume",
        "--keep",
        "kept",
        "--",
        "hangs.py",
        "{dir}",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        end = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert _left(tmp_path)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "interrupted" in text
    assert not _left(tmp_path)


def test_the_script_sees_what_it_sees_without_a_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = (
        "import json, os, sys\nwhere = os.environ.get('CKPTFIX_RUN_DIR')\nseen = [sys.argv[1:], "
        "sys.path, '__main__' == __name__, sorted({'torch', 'accelerate'} & "
        "set(sys.modules))]\njson.dump(seen, open('plain.json' if where is None else "
        "'proof.json', 'w'))\n"
    )
    (tmp_path / "looks.py").write_text(looks)
    subprocess.run([sys.executable, "looks.py", "--json", "a b"], check=True)
    said(capsys, "--", "looks.py", "--json", "a b")
    assert json.loads((tmp_path / "proof.json").read_text()) == json.loads(
        (tmp_path / "plain.json").read_text()
    )


def test_the_recorder_starts_from_a_path_with_a_link(tmp_path: Path) -> None:
    """The symptom: it imported itself until RecursionError, and no step was recorded."""
    (tmp_path / "link").symlink_to(ROOT)
    startup = tmp_path / "link" / "ckptfix" / "training" / "resume_proofs" / "startup"
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; print('sitecustomize' in sys.modules, *sys.path)"],
        env={**os.environ, "PYTHONPATH": f"{startup}{os.pathsep}{tmp_path / 'link'}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    assert str(tmp_path / "link") in ended.stdout
    assert str(startup) not in ended.stdout


@pytest.mark.slow
def test_two_ranks_under_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", SCRIPT, HEALTHY, "{dir}"]
    options = ["--json", "--keep", "kept", "--html", "page.html", "--resume-args=--resume"]
    status, text = said(capsys, *options, "--", *command)
    made = json.loads(text)
    assert (status, made["verdict"], made["status"]) == (0, "exact", 0), text
    assert (made["saved_at"], made["ranks"], made["steps"]) == (8, 2, list(range(9, 17)))
    assert set(made["seconds"]) == {"interrupted", "resumed", "reference"}
    assert made["checkpoint"] == str(tmp_path / "kept" / "interrupted" / "checkpoint")
    assert {"batch", "loss", "gradients", "weights", "moments", "generators", "scheduler"} <= set(
        made["states"]
    )
    assert 'class="eq"' in (tmp_path / "page.html").read_text()
    assert not _left(tmp_path), "no process of the runs may be left"
    # One digest of the record that is another one is found: the certificate does not come from
    # nowhere.
    from ckptfix.training.resume_proofs.recorded_runs import read_run
    from ckptfix.training.resume_proofs.resume_verdict import compare

    (record,) = (tmp_path / "kept" / "records-resumed").glob("rank-1-*.jsonl")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    row = next(row for row in rows if row["row"] == "step" and row["number"] == 12)
    row["states"]["moments"]["exp_avg of 3.weight"] = "0" * 12
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [
        read_run(tmp_path / "kept" / f"records-{name}")
        for name in ("interrupted", "reference", "resumed")
    ]
    (difference,) = compare(*runs).differences
    assert (difference.step, difference.rank, difference.state) == (12, 1, "moments")
    assert difference.names == ("exp_avg of 3.weight",)


LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--nproc_per_node", "2"),
    "accelerate launch": (
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ),
}
SCRIPTS = {
    "accelerator": {
        "healthy": ('{"save": -1, "dropout": 0.3, "epochs": 2}', None),
        "fault": ('{"skip": "nothing"}', "not-skipped"),
        "restored": ('{"dropout": 0.5, "shuffle": true}', "generators-restored-too-early"),
        "guarded": ('{"dropout": 0.5, "shuffle": true}', None),
    },
    "trainer": {
        "healthy": ("{}", None),
        "fault": ('{"ignore_skip": true}', "data-not-skipped-by-trainer"),
        "restored": ('{"augment": true}', "augmentation"),
        "guarded": ('{"augment": true}', None),
    },
}
"""Kind of a script -> case -> the script's variant, and the code of the cause that is found."""


def starts() -> Sequence[tuple[str, str, str]]:
    """Return launchers with the scripts that each starts.

    A launcher has no part in what a script does. So a run that is not exhaustive draws from the
    scripts, and each kind and each case of them has both launchers.
    """
    every = [(kind, case) for kind in SCRIPTS for case in SCRIPTS[kind]]
    if is_exhaustive():
        return [(launcher, *script) for launcher in LAUNCHERS for script in every]
    first, second = LAUNCHERS
    turns = (second, first, second, first, first, second, first, second)
    return one_of([(launcher, *script) for launcher, script in zip(turns, every, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "kind", "case"), starts())
def test_two_processes(
    launcher: str,
    kind: str,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "trainer":
        pytest.importorskip("transformers", reason="transformers is not installed")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    variant, code = SCRIPTS[kind][case]
    options = ["--json", "--steps", "24" if case == "healthy" else "8", "--timeout", "300"]
    options += ["--resume-args=--resume"] if kind == "accelerator" else []
    options += ["--guard"] if case == "guarded" else []
    script = SCRIPT if kind == "accelerator" else SCRIPT.replace("script", "trainer")
    status, text = said(capsys, *options, "--", *LAUNCHERS[launcher], script, variant, "{dir}")
    made = json.loads(text)
    assert made["ranks"] == 2, text
    assert (status, made["verdict"]) == ((0, "exact") if code is None else (1, "not exact")), text
    assert code in {one["code"] for one in made["differences"]} or code is None, text
    assert all(one["guard"] for one in made["differences"]) or case == "fault", text


def _left(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(f"{folder}/kept") in (
                entry / "environ"
            ).read_bytes() and entry.name != str(os.getpid()):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


FIXED = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from resumed_script import Variant, train
out = Path("out")
out.mkdir(exist_ok=True)
train(Variant(skip="nothing", epochs=1), out, resume=(out / "checkpoint").exists())
"""


@pytest.mark.slow
def test_a_script_with_a_fixed_folder_that_resumes_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fixed.py").write_text(FIXED.format(folder=str(Path(SCRIPT).parent)))
    status, text = said(capsys, "--output", "out", "--", "fixed.py")
    assert status == 1, text
    assert (
        "NOT EXACT: fixed.py: killed after step 4 and resumed, the run diverges from the "
        "uninterrupted one" in text
    )
    assert "step 5: batch: the uninterrupted run used this batch at step 1" in text
    assert "cause: the script does not skip the batches used before the save" in text
    assert "not checked: the order of the next epoch" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixed.py"]


@pytest.mark.slow
def test_the_guard_makes_a_cut_epoch_exact(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--guard", "--resume-args=--resume", "--steps", "8"]
    status, text = said(
        capsys, *options, "--", SCRIPT, '{"dropout": 0.5, "shuffle": true}', "{dir}"
    )
    assert status == 0, text
    assert "EXACT: " in text
    assert "not checked: steps after 8: --steps ended the runs there" in text


OF_NUMBERS = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
first = 1
if len(sys.argv) > 2:
    accelerator.load_state(sys.argv[2])
    first = 3
for step in range(first, 9):
    accelerator.backward(model(torch.randn(4, 2)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        accelerator.save_state(f"{sys.argv[1]}/step_{step}")
"""


@pytest.mark.slow
def test_a_script_without_a_loader_whose_scheduler_is_older_than_its_accelerator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_numbers.py").write_text(OF_NUMBERS)
    command = ("--resume-args", "{checkpoint}", "--", "of_numbers.py", "{dir}")
    status, text = said(capsys, *command)
    assert status == 1, text
    assert "killed after step 2 and resumed, the run diverges" in text
    assert "last_epoch of StepLR" in text
    status, text = said(capsys, "--guard", *command)
    assert status == 0, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "options", "words"),
    [
        (
            '{"save": 0, "epochs": 1}',
            [],
            "no save at step 1 or later in 16 steps (it never saves)",
        ),
        (
            '{"save": -1, "epochs": 1}',
            [],
            "the script ends after the save at step 16, so nothing is left to compare",
        ),
        (
            '{"save": 4, "epochs": 1}',
            [],
            "the resumed run started from scratch and loaded no checkpoint; pass the script's option",
        ),
    ],
)
def test_a_script_that_gives_nothing_to_prove(
    variant: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, *options, "--", SCRIPT, variant, "{dir}")
    assert status == 2, text
    assert words in text

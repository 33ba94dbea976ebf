"""accelerate #3967 as reported: with the guard its output is that of the run that prepares once.

On the accelerate of this environment and on two older ones, which are kept in pytest's cache.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import one_of
from tests.simulated.versions import accelerate_folder

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("installed", "1.12.0", "1.6.0")
GUARDED = ("--module", "ckptfix", "run")

pytestmark = pytest.mark.slow


@pytest.fixture(params=one_of(VERSIONS))
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables with which `import accelerate` gives one version."""
    made = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    assert request.config.cache is not None
    if request.param != "installed":
        made["PYTHONPATH"] = str(
            accelerate_folder(
                request.param, Path(request.config.cache.mkdir(f"accelerate-{request.param}"))
            )
        )
    imported = subprocess.run(
        [sys.executable, "-c", "import accelerate; print(accelerate.__version__)"],
        env=made, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert request.param in ("installed", imported.stdout.strip())
    return made


def reported(
    folder: Path, variables: dict[str, str], prepares: int, *guard: str
) -> tuple[list[list[str]], str]:
    """Run the script in two processes; return the lines of each rank, and stderr."""
    folder.mkdir()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    script = (str(ROOT / "tests/training/reported.py"), str(folder), str(prepares))
    done = subprocess.run(
        [sys.executable, *launcher, *guard, *script],
        capture_output=True, text=True, cwd=ROOT, env=variables, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in range(2)]
    return lines, done.stderr


def test_with_the_guard_it_is_the_correct_run(variables: dict[str, str], tmp_path: Path) -> None:
    correct, silence = reported(tmp_path / "correct", variables, 1)
    guarded, warning = reported(tmp_path / "guarded", variables, 2, *GUARDED)
    own = "".join(f", 'run_state_{each}.pt'" for each in range(2))
    for rank, lines in enumerate(guarded):
        assert [line.replace(own, "") for line in lines] == correct[rank]
        assert lines[:4] == [
            "TOTAL MODELS 1",
            "DistributedDataParallel -> Linear(in_features=10, out_features=2, bias=True)",
            "unwrapped: True, at depth 1",
            "keys ['module.weight', 'module.bias']",
        ]
        losses = [line for line in lines if line.startswith("step ")]
        assert losses[3:5] == losses[5:7], "after load_state the same steps give the same losses"
        assert {
            "state_dict on save x1",
            "state_dict on load x1",
            "gradient hooks x6",
            "files ['model.safetensors', 'optimizer.bin', 'random_states_0.pkl', "
            f"'random_states_1.pkl'{own}]",
        } <= set(lines)
    assert "prepare()" not in silence
    assert warning.count("UserWarning: prepare() at") == 2, "one for each process"

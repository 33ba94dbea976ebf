"""Command lines, split where the training script stands."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix.environment.doctor import diagnose_environment, doctor
from ckptfix.environment.facts.launch import missing_script, read_launch, script_of, variables_of
from ckptfix.errors import UsageError
from tests.environment.building import OPTIONS, facts, launch, script


def test_options_before_and_behind_the_script() -> None:
    found = launch(
        "CUDA_VISIBLE_DEVICES=0 accelerate launch --num-processes 2 --multi_gpu train.py --lr 1e-3 "
        "-v --x=1 -5"
    )
    assert [(option.name, option.value) for option in found.before] == [
        ("num_processes", "2"),
        ("multi_gpu", None),
    ]
    assert found.script == "train.py"
    assert [option.name for option in found.after] == ["lr", "v", "x"]
    assert found.given("num_processes") == "2"
    assert found.given("multi_gpu") == ""
    assert found.given("config_file") is None


@pytest.mark.parametrize(
    ("command", "launcher", "name"),
    [
        ("accelerate launch -m pkg.train --lr 1", "accelerate launch", "pkg.train"),
        ("accelerate-launch train.py", "accelerate launch", "train.py"),
        ("python3 -m accelerate.commands.launch train.py", "accelerate launch", "train.py"),
        (
            "python -m accelerate.commands.accelerate_cli launch train.py",
            "accelerate launch",
            "train.py",
        ),
        ("torchrun --nproc_per_node 2 train.py", "torchrun", "train.py"),
        ("python train.py --num_processes 2", "python", "train.py"),
        ("/env/bin/accelerate launch train.py", "accelerate launch", "train.py"),
        ("accelerate launch", "accelerate launch", ""),
        ("nohup accelerate launch train.py", "accelerate launch", "train.py"),
        ("env A=1 accelerate launch train.py", "accelerate launch", "train.py"),
        ("A=1 nohup nice -n 5 accelerate launch train.py", "accelerate launch", "train.py"),
        ("uv run --with tqdm accelerate launch train.py", "accelerate launch", "train.py"),
        ("uv run --python python3.11 accelerate launch train.py", "accelerate launch", "train.py"),
        ("srun --ntasks 1 accelerate launch train.py", "accelerate launch", "train.py"),
        ("nohup python train.py", "python", "train.py"),
        ("nohup torchrun train.py", "torchrun", "train.py"),
        ("nohup ./start.sh", "nohup", ""),
        ("python3 -u -m accelerate.commands.launch train.py", "accelerate launch", "train.py"),
        (
            "python3.11 -X dev -W error -m accelerate.commands.launch a.py",
            "accelerate launch",
            "a.py",
        ),
        ("python -c 1 -m accelerate.commands.launch train.py", "python", "train.py"),
        ("python -u train.py -m accelerate.commands.launch", "python", "train.py"),
    ],
)
def test_launchers(command: str, launcher: str, name: str) -> None:
    found = launch(command)
    assert (found.launcher, found.script) == (launcher, name)


def test_the_value_of_an_unknown_option_is_not_the_script() -> None:
    found = launch("accelerate launch --lr 1e-3 --mixed_precision bf16 --name=x train.py data")
    assert [option.text for option in found.unknown] == ["--lr", "--name"]
    assert [option.name for option in found.before] == ["mixed_precision"]
    assert found.script == "train.py"


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0,1 A= accelerate launch a.py",
            {"CUDA_VISIBLE_DEVICES": "0,1", "A": ""},
        ),
        ("env -i A=1 B='x y' accelerate launch a.py", {"A": "1", "B": "x y"}),
        ("A=1 nohup env B=2 accelerate launch a.py", {"A": "1", "B": "2"}),
        ("srun X=1 accelerate launch a.py", {}),
        ("accelerate launch a.py lr=1", {}),
    ],
)
def test_variables_that_a_command_sets(command: str, variables: dict[str, str]) -> None:
    assert variables_of(command) == launch(command).variables == variables


@pytest.mark.parametrize("command", ["accelerate launch 'train.py", "", "A=1"])
def test_no_command_line(command: str) -> None:
    with pytest.raises(UsageError, match="--launch"):
        launch(command)


def test_without_accelerates_options_nothing_is_judged() -> None:
    found = read_launch("accelerate launch --lr 1 train.py", {})
    assert (found.unknown, found.before, found.script) == ((), (), "train.py")


def test_the_script_is_found_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert script_of(f"accelerate launch -m ckptfix run {path}") is None
    path.touch()
    assert script_of(f"accelerate launch -m ckptfix run {path}") == str(path)
    assert script_of("accelerate launch -m pkg.train") is None


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("accelerate launch nope.py", "nope.py"),
        ("accelerate launch --num_processes 2 nope.py --data here.py", "nope.py"),
        ("accelerate launch here.py nope.py", ""),
        ("accelerate launch ~/nope.py", "~/nope.py"),
        ("accelerate launch ~/here.py", ""),
        ("accelerate launch $HOME/here.py", ""),
        ("accelerate launch $UNSET_HERE/nope.py", ""),
        ("accelerate launch 'jobs/*.py'", ""),
        ("accelerate launch -m nope.py", ""),
        ("accelerate launch --module pkg.train --file nope.py", ""),
        ("accelerate launch --no_python nope.py", ""),
        ("accelerate launch --lr 1 nope.py", ""),
        ("accelerate launch", ""),
        ("torchrun --nproc_per_node 2 nope.py", "nope.py"),
        ("torchrun --nproc_per_node 2 --module ckptfix run nope.py", ""),
        ("torchrun --nproc_per_node 2 here.py nope.py", ""),
        ("python -u nope", "nope"),
        ("python folder nope.py", ""),
        ("python -m torch.distributed.run nope.py", ""),
        ("python -m ckptfix run nope.py", ""),
        ("python -c 1 nope.py", ""),
        ("nohup python nope.py", "nope.py"),
        ("conda run -n env accelerate launch nope.py", "nope.py"),
        ("env -C elsewhere accelerate launch nope.py", ""),
        ("env -C elsewhere accelerate launch /nope.py", "/nope.py"),
        ("srun --chdir=elsewhere accelerate launch nope.py", ""),
        ("srun --container-image=a/b accelerate launch nope.py", ""),
        ("./start.sh nope.py", ""),
    ],
)
def test_a_script_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("here.py").touch()
    Path("folder").mkdir()
    assert missing_script(launch(command)) == missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--config_file nope.yaml", "nope.yaml does not exist: accelerate launch ends with"),
        ("--config_file=folder", "folder does not exist"),
        ("--config_file list.yaml", "list.yaml: it contains no settings"),
        ("--config_file broken.json", "cannot use its config broken.json: JSONDecodeError"),
        ("--config_file bare.yaml", "bare.yaml: it has no distributed_type"),
        ("--config_file good.yaml", ""),
        ("--config_file $UNSET_HERE/nope.yaml", ""),
    ],
)
def test_a_config_that_accelerate_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    """The symptom: no problems found, and accelerate launch raised FileNotFoundError."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("train.py").touch()
    Path("list.yaml").write_text("- 1\n")
    Path("broken.json").write_text("{")
    Path("bare.yaml").write_text("num_processes: 1\n")
    Path("good.yaml").write_text("distributed_type: 'NO'\n")
    command = f"accelerate launch {options} train.py"
    found = doctor(launch=command)
    said = [str(advice) for advice in found.advice if advice.code == "unusable-launch-file"]
    assert len(said) == bool(words)
    assert all(words in one for one in said)
    assert not words or found.status == 1
    stock = subprocess.run(
        (sys.executable, "-m", "accelerate.commands.launch", *options.split(), "train.py"),
        capture_output=True,
        check=False,
    )
    assert (stock.returncode != 0) == ("good" not in options)


@pytest.mark.parametrize(
    ("command", "fixed"),
    [
        (
            "accelerate launch --lr 1e-3 --num_processes 2 train.py --steps 5",
            "accelerate launch --num_processes 2 train.py --lr 1e-3 --steps 5",
        ),
        ("accelerate launch --fast train.py", "accelerate launch train.py --fast"),
        (
            "A='b c' nohup accelerate launch --fast train.py",
            "A='b c' nohup accelerate launch train.py --fast",
        ),
        ("accelerate launch --name='a b' train.py", "accelerate launch train.py '--name=a b'"),
    ],
)
def test_the_repaired_command_is_printed(command: str, fixed: str) -> None:
    found = diagnose_environment(facts(launch=launch(command)))
    (advice,) = (advice for advice in found.advice if advice.code == "flags-before-script")
    assert advice.fix.endswith(f": {fixed}")
    assert launch(fixed).unknown == ()


def test_the_real_launcher_refuses_and_takes_as_said() -> None:
    """The installed ``accelerate launch`` itself, its parser alone."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr", "1e-3", "train.py"])
    taken = parser.parse_args(["--mixed_precision", "bf16", "train.py", "--num_processes", "2"])
    assert (taken.mixed_precision, taken.num_processes) == ("bf16", None)
    assert taken.training_script_args == ["--num_processes", "2"]


def test_own_options_are_no_lost_ones() -> None:
    given = facts(
        launch=launch("accelerate launch train.py --debug"),
        script=script("p.add_argument('--debug', type=bool)"),
    )
    assert "launch-flags-behind-script" not in {
        advice.code for advice in diagnose_environment(given).advice
    }
    assert "debug" in OPTIONS

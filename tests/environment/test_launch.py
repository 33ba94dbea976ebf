"""Command lines, split where the training script stands."""

from pathlib import Path

import pytest

from ckptfix.environment.doctor import diagnose_environment
from ckptfix.environment.facts.launch import read_launch, script_of, variables_of
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

"""Command lines, split where the training script stands."""

from pathlib import Path

import pytest

from ckptfix.environment.doctor import diagnose_environment, doctor
from ckptfix.environment.facts import gather
from ckptfix.environment.facts.launch import (
    LAUNCHERS,
    missing_script,
    read_launch,
    script_of,
    variables_of,
)
from ckptfix.environment.facts.machine import Torch
from ckptfix.errors import UsageError
from ckptfix.hardware import Machine
from tests.environment.building import OPTIONS, facts, launch, script
from tests.training.killing import in_child


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


CERTAIN = (
    ("accelerate launch nope.py", "nope.py"),
    ("accelerate launch \\\n  --num_processes 2 \\\n  nope.py --lr 1\n", "nope.py"),
    ("accelerate launch --num_processes 2 nope.py --data here.py", "nope.py"),
    ("accelerate launch --multi_gpu --mixed_precision=bf16 nope.py", "nope.py"),
    ("accelerate-launch nope.py", "nope.py"),
    ("python3 -m accelerate.commands.launch --cpu nope.py", "nope.py"),
    ("accelerate launch ~/nope.py", "~/nope.py"),
    ("accelerate launch /nope/nope.py", "/nope/nope.py"),
    ("torchrun nope.py", "nope.py"),
    ("torchrun --nproc_per_node 2 nope.py", "nope.py"),
    ("torchrun --standalone --nproc-per-node=2 --log-dir a.py nope.py", "nope.py"),
    ("deepspeed --num_gpus 2 nope.py --deepspeed", "nope.py"),
    ("python nope.py", "nope.py"),
    ("python3.11 -u -X dev -Werror -OO nope.py", "nope.py"),
    ("python --check-hash-based-pycs always nope.py", "nope.py"),
    ("nohup python nope.py", "nope.py"),
    ("A=1 env B=2 time python nope.py", "nope.py"),
)
WORKING = (
    "accelerate launch here.py nope.py",
    "accelerate launch ~/here.py",
    "accelerate launch -m nope.py",
    "accelerate launch --module pkg.train --file nope.py",
    "accelerate launch --no_python nope.py",
    "accelerate launch --lr 1 nope.py",
    "accelerate launch --lr nope.py here.py",
    "accelerate launch --config_file conf.py here.py",
    "accelerate launch -- nope.py",
    "accelerate launch --help nope.py",
    "accelerate launch",
    "accelerate launch ... nope.py",
    "torchrun --nproc_per_node 2 --module ckptfix run nope.py",
    "torchrun --nproc_per_node 2 here.py nope.py",
    "torchrun --log-dir a.py here.py",
    "torchrun --nproc 2 nope.py",
    "torchrun --no-python nope.py",
    "torchrun --run-path nope.py",
    "torchrun tools/train configs/new.py",
    "PET_MODULE=1 torchrun nope.py",
    "deepspeed --hostfile hosts.py here.py",
    "deepspeed --hostfile hosts nope.py",
    "deepspeed --include worker-0:0,1 nope.py",
    "python folder nope.py",
    "python -u nope",
    "python -um train",
    "python -um nope.py",
    "python -uX nope.py here.py",
    "python -W nope.py here.py",
    "python --check-hash-based-pycs always here.py",
    "python --check-hash-based-pycs nope.py here.py",
    "python -m torch.distributed.run nope.py",
    "python -m ckptfix run nope.py",
    "python -c 1 nope.py",
    "python - nope.py",
    "python --version nope.py",
    "./start.sh nope.py",
    "/elsewhere/bin/python nope.py",
)
"""Commands that start nothing that is missing, or of which no word is certainly the script."""

OF_SHELLS = (
    "accelerate launch \\\n  --num_processes 2 \\\n  here.py --lr 1",
    "accelerate launch \\\r\n  here.py",
    "accelerate launch '\n' nope.py",
    "accelerate launch \\n nope.py",
    "accelerate launch \\ --num_processes 2 \\ nope.py",
    "accelerate launch\n  nope.py",
    "python here.py\npython nope.py",
    "python here.py; python eval.py",
    "python nope.py; python eval.py",
    "python -u here.py>log 2>&1",
    "python nope.py <answers",
    "python nope.py|tee log",
    "python nope.py&",
    "cd elsewhere && python nope.py",
    "(python nope.py)",
    "accelerate launch `which nope.py`",
    "accelerate launch $HOME/here.py",
    "accelerate launch $UNSET_HERE/nope.py",
    "accelerate launch ${UNSET_HERE}/nope.py",
    "accelerate launch jobs/*.py",
    "accelerate launch jobs/nop?.py",
    "accelerate launch jobs/{a,b}.py",
    "accelerate launch jobs/[ab].py",
    "accelerate launch ~+/nope.py",
    "accelerate launch ~nobody_here/nope.py",
    "accelerate launch <script>.py",
    "accelerate launch %HERE%/nope.py",
)
ELSEWHERE = (
    "srun --container-image=nvcr.io/x --container-mounts=/data:/workspace",
    "srun --chdir=elsewhere",
    "srun singularity exec --nv img.sif",
    "srun -N 2",
    "apptainer exec img.sif",
    "docker run --gpus all img",
    "sudo docker run --gpus all img",
    "nohup docker run img",
    "time podman run img",
    "timeout 9h docker run img",
    "kubectl exec pod --",
    "ssh node",
    "nohup ssh node",
    "enroot start img",
    "conda run -n env --cwd elsewhere",
    "conda run -n env",
    "uv run --directory elsewhere",
    "pdm run -p elsewhere",
    "hatch run",
    "poetry run -C elsewhere",
    "sudo -i",
    "exec -a train",
    "env -C elsewhere",
    "env --chdir=elsewhere",
)


@pytest.mark.parametrize(
    ("command", "missing"),
    [*CERTAIN, *((command, "") for command in (*WORKING, *OF_SHELLS))],
)
def test_a_script_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str
) -> None:
    """The symptom: an error for commands that work, such as ``python a.py; python b.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("here.py").touch()
    Path("folder").mkdir()
    assert missing_script(launch(command)) == missing


@pytest.mark.parametrize("prefix", ELSEWHERE)
@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch nope.py",
        "accelerate launch /nope/nope.py",
        "accelerate launch --config_file /nope/nope.yaml nope.py",
        "python /nope/nope.py",
        "torchrun nope.py",
    ],
)
def test_a_command_for_another_folder_or_machine_is_not_judged(prefix: str, command: str) -> None:
    """The symptom: an error for each path in a container."""
    given = launch(f"{prefix} {command}")
    assert not missing_script(given)
    assert not given.is_plain
    found = gather(Torch(), Machine(), {}, launch=f"{prefix} {command}")
    assert not found.missing


@pytest.mark.parametrize(
    ("config", "is_told"),
    [
        ("distributed_type: 'NO'", True),
        ("distributed_type: XLA\ntpu_use_cluster: true", False),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'", False),
    ],
)
def test_a_script_that_a_config_sends_to_other_machines_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, is_told: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(config)
    given = gather(
        Torch(), Machine(), {}, launch="accelerate launch --config_file config.yaml nope.py"
    )
    told = {advice.code for advice in diagnose_environment(given).advice}
    assert ("unusable-launch-file" in told) == is_told


def test_the_real_torchrun_takes_these_options() -> None:
    """A value that is taken for the script is a false alarm."""
    from torch.distributed.run import get_args_parser

    known = {
        text.lstrip("-").replace("-", "_"): action.nargs != 0
        for action in get_args_parser()._actions
        for text in action.option_strings
    }
    ours = LAUNCHERS["torchrun"]
    # An older torch lacks some.
    assert {name: known.get(name, ours[name]) for name in ours} == ours
    assert "nproc_per_node" in known


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
    from accelerate.commands.launch import launch_command, launch_command_parser

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
    stock = launch_command_parser().parse_args([*options.split(), "train.py"])
    assert (in_child(lambda: launch_command(stock)) != 0) == ("good" not in options)


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

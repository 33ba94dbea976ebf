"""Where settings stand, and which of them counts."""

import json
from pathlib import Path

import pytest

from ckptfix.environment.facts.installed import find_source
from ckptfix.environment.facts.launch import (
    default_config_path,
    read_config,
    read_variables,
)


def test_the_default_path_is_that_of_accelerate() -> None:
    """Compared with the source of the installed accelerate, which reads the environment when it is
    imported.
    """
    package = find_source("accelerate")
    assert package is not None
    source = package / "commands/config/config_args.py"
    lines = [
        line
        for line in source.read_text().splitlines()
        if "HF_HOME" in line or "default_config" in line
    ]
    assert any(
        '"HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")'
        in line
        for line in lines
    )
    for environment, folder in (
        ({"HF_HOME": "/hf"}, "/hf"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface"),
        ({"HOME": "/home/user"}, "/home/user/.cache/huggingface"),
    ):
        assert default_config_path(environment) == f"{folder}/accelerate/default_config.yaml"


def test_a_config_in_yaml_and_in_json(tmp_path: Path) -> None:
    values = {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 2}
    for name, text in (
        ("config.json", json.dumps(values)),
        ("config.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\n"),
    ):
        (tmp_path / name).write_text(text)
        config = read_config({}, str(tmp_path / name))
        assert (config.exists, config.asked, config.problem) == (True, True, "")
        assert config.distributed_type == "MULTI_GPU"
        assert config.values == values


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- only\n- a list",
        "",
        "a: !!python/object/apply:os.system ['false']",
        "\0",
        "[" * 5000,
    ],
)
def test_a_broken_config_is_a_problem_and_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    config = read_config({}, str(tmp_path / "config.yaml"))
    assert config.exists
    assert config.problem
    assert config.is_broken
    assert not config.values


def test_a_large_config_is_not_the_fault_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# \n" * (1 << 19))
    config = read_config({}, str(tmp_path / "config.yaml"))
    assert config.problem.startswith("it is too large")
    assert not config.is_broken


def test_a_config_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("num_processes: 2\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/config.yaml", "$HOME/config.yaml", "${HOME}/config.yaml"):
        assert read_config({}, path).values == {"num_processes": 2}


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    config = read_config({"HF_HOME": str(tmp_path)})
    assert (config.exists, config.asked) == (False, False)
    assert config.path == f"{tmp_path}/accelerate/default_config.yaml"


def test_only_listed_variables_are_read() -> None:
    found = read_variables(
        {"HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "secret"}
    )
    assert found == {"CUDA_VISIBLE_DEVICES": "0"}

"""Saves with the bytes of the one before: told in each accident, and never in a healthy run.

The runs are real ones of the Trainer and of accelerate. A test damages a run by copying files of
one save over those of another, as a save does that reports success and writes an old buffer, and a
merge of two folders.
"""

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix import check
from ckptfix.cli import run
from ckptfix.diagnosis import stale_saves
from ckptfix.storage.reading import open_reader
from tests.diagnosis.stale_runs import (
    HEALTHY,
    OF_TRAINER,
    OPTIMIZER,
    OPTIMIZER_1,
    RUNS,
    SCHEDULER,
    UNET,
    WEIGHTS,
    WEIGHTS_1,
    Script,
    net,
    of_norms,
    of_rows,
    runs,
    with_skipped_steps,
)
from tests.stores.servers import upload_folder

pytestmark = pytest.mark.filterwarnings("ignore")

Told = list[tuple[str, str]]
"""Severity and sentence of each finding."""


def told(folder: Path, **options: Any) -> Told:
    return [
        (finding.severity.value, str(finding))
        for finding in check(folder, siblings=folder.parent.iterdir(), **options).all_findings
        if finding.code == "stale-save"
    ]


def in_names(output: Path, **options: Any) -> dict[str, Told]:
    """Return the findings about each checkpoint that has any."""
    every = {folder.name: told(folder, **options) for folder in sorted(output.iterdir())}
    return {name: findings for name, findings in every.items() if findings}


def finding_of(folder: Path, *siblings: Path) -> Any:
    """Return the one finding about an old file, of its folder next to others or to these."""
    findings = check(folder, siblings=siblings or folder.parent.iterdir()).all_findings
    (finding,) = (each for each in findings if each.code == "stale-save")
    return finding


def save_of(output: Path, number: int) -> Path:
    """Return the folder of a save, of the Trainer or of accelerate."""
    (folder,) = output.glob(f"checkpoint[-_]{number}")
    return folder


def copied(output: Path, *names: str, source: int = 2, target: int = 3) -> Path:
    """Copy files of one save over those of another."""
    folder = save_of(output, target)
    for name in names:
        path = save_of(output, source) / name
        if path.is_dir():
            shutil.copytree(path, folder / name, dirs_exist_ok=True)
        else:
            shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a healthy run, which is trained once."""

    @cache
    def make(name: str) -> Path:
        return RUNS[name](tmp_path_factory.mktemp("run"))

    return make


@pytest.fixture
def copy_of(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made(name), tmp_path / "run"))


class Accident(NamedTuple):
    """Files of a save of a run over those of another -> the finding about the later of both.

    ``why``: the counter that moved, and its values.
    """

    run: str
    names: tuple[str, ...]
    source: int
    target: int
    severity: str
    state: str
    why: str


def shard(number: int) -> str:
    return f"model-0000{number}-of-00004.safetensors"


_STEP, _STEP_1, _OF_TRAINER = (
    f"step in {name} went" for name in (OPTIMIZER, OPTIMIZER_1, OF_TRAINER)
)
_GLOBAL, _MOVES = "global_step in trainer_state.json went", f"last_epoch in {SCHEDULER} went"
_WEIGHTS, _STATE, _BOTH = "weights", "optimizer state", "weights and optimizer state"
_NO_STEP = "the weights differ"
_1E3 = "at a learning rate of 0.001"

ACCIDENTS = [
    Accident("trainer", (WEIGHTS,), 2, 3, "warning", _WEIGHTS, f"{_OF_TRAINER} from 2 to 3 {_1E3}"),
    Accident("trainer", (WEIGHTS,), 3, 2, "warning", _WEIGHTS, f"{_OF_TRAINER} from 2 to 3 {_1E3}"),
    Accident("trainer", (OF_TRAINER,), 3, 4, "warning", _STATE, f"{_GLOBAL} from 3 to 4 {_1E3}"),
    Accident("trainer", (OF_TRAINER,), 4, 3, "warning", _STATE, f"{_GLOBAL} from 3 to 4 {_1E3}"),
    Accident("trainer", (WEIGHTS, OF_TRAINER), 3, 4, "warning", _BOTH, f"{_GLOBAL} from 3 to 4 {_1E3}"),
    Accident("trainer", (WEIGHTS, OF_TRAINER, "scheduler.pt"), 3, 4, "warning", _BOTH, _GLOBAL),
    # The rate of the last save is that of a step that nobody makes.
    Accident("linear", (WEIGHTS,), 3, 4, "warning", _WEIGHTS, f"{_OF_TRAINER} from 3 to 4 at a learning rate of 0.00"),
    Accident("lora", ("adapter_model.safetensors",), 2, 3, "warning", _WEIGHTS, _OF_TRAINER),
    Accident("scheduled", (WEIGHTS,), 3, 4, "warning", _WEIGHTS, f"{_STEP} from 6 to 8 {_1E3}"),
    Accident("scheduled", (OPTIMIZER,), 3, 4, "warning", _STATE, f"{_MOVES} from 6 to 8 {_1E3}"),
    # A script may skip all steps, and move its schedule.
    Accident("scheduled", (WEIGHTS, OPTIMIZER), 2, 3, "note", _BOTH, f"{_MOVES} from 4 to 6 {_1E3}"),
    # An average may replace the weights at the end of a run, without a step.
    Accident("scheduled", (OPTIMIZER, SCHEDULER), 3, 4, "note", _STATE, _NO_STEP),
    Accident("unscheduled", (OPTIMIZER,), 3, 4, "note", _STATE, _NO_STEP),
    Accident("unscheduled", (OPTIMIZER,), 2, 3, "warning", _STATE, _NO_STEP),
    Accident("torch", ("pytorch_model.bin",), 2, 3, "warning", _WEIGHTS, _STEP),
    Accident("torch", (OPTIMIZER,), 2, 3, "warning", _STATE, _NO_STEP),
    Accident("sgd", (WEIGHTS,), 2, 3, "note", _WEIGHTS, f"{_MOVES} from 4 to 6 at a learning rate of 0.1"),
    Accident("momentum", (WEIGHTS,), 2, 3, "note", _WEIGHTS, _MOVES),
    Accident("bf16", (WEIGHTS,), 2, 3, "note", _WEIGHTS, f"{_STEP} from 4 to 6 at a learning rate of 1e-05"),
    Accident("norms", (WEIGHTS,), 2, 3, "warning", _WEIGHTS, _STEP),
    Accident("two", (WEIGHTS,), 3, 4, "warning", _WEIGHTS, f"{_STEP} from 6 to 8 {_1E3}"),
    Accident("two", (WEIGHTS_1,), 2, 3, "warning", _WEIGHTS, _STEP),
    Accident("two", (OPTIMIZER,), 2, 3, "warning", _STATE, f"{_STEP_1} from 4 to 6 {_1E3}"),
    Accident("two", (OPTIMIZER_1,), 3, 4, "warning", _STATE, f"{_STEP} from 6 to 8 {_1E3}"),
    Accident("two", (OPTIMIZER, OPTIMIZER_1), 2, 3, "warning", _STATE, _NO_STEP),
    Accident("two equal", (WEIGHTS_1,), 2, 3, "warning", _WEIGHTS, _STEP),
    Accident("two equal", (OPTIMIZER_1,), 3, 4, "warning", _STATE, _STEP),
    Accident("two equal", (OPTIMIZER, OPTIMIZER_1), 3, 4, "note", _STATE, _NO_STEP),
    Accident("two in torch", ("pytorch_model_1.bin",), 2, 3, "warning", _WEIGHTS, _STEP),
    Accident("two in torch", (OPTIMIZER_1,), 2, 3, "warning", _STATE, _STEP),
    Accident("shards", (shard(3),), 2, 3, "warning", _WEIGHTS, f"{_OF_TRAINER} from 2 to 3 {_1E3}"),
    Accident("shards", (shard(2), shard(3)), 2, 3, "warning", _WEIGHTS, _OF_TRAINER),
    Accident("hooks", (UNET,), 3, 4, "warning", _WEIGHTS, f"{_STEP} from 3 to 4 {_1E3}"),
    Accident("hooks", (OPTIMIZER,), 2, 3, "warning", _STATE, _NO_STEP),
    # The metadata of DCP have no rate.
    Accident("fsdp", ("pytorch_model_fsdp_0",), 2, 3, "note", _WEIGHTS, "step in optimizer_0 went from 2 to 3)"),
]  # fmt: skip


@pytest.mark.parametrize(
    "accident", ACCIDENTS, ids=lambda accident: f"{accident.run}-{accident[1]}"
)
def test_files_of_another_save_are_told_at_the_later_one_alone(
    accident: Accident, copy_of: Callable[[str], Path]
) -> None:
    output = copy_of(accident.run)
    copied(output, *accident.names, source=accident.source, target=accident.target)
    first, later = (save_of(output, at).name for at in sorted((accident.source, accident.target)))
    path = f"{accident.names[0]}/__0_0.distcp" if accident.run == "fsdp" else accident.names[0]
    paths = accident.names if accident.state != _BOTH and len(accident.names) > 1 else (path,)
    if SCHEDULER in paths:
        paths = paths[:1]
    beginning = (
        f"{' and '.join(paths)}: {accident.state} as in {first} (expected different values: "
    )
    for options, end in (
        ({}, "the first bytes of each tensor are"),
        ({"data": True}, "every byte is"),
    ):
        ((name, ((severity, words),)),) = in_names(output, **options).items()
        assert (name, severity) == (later, accident.severity)
        assert words.startswith(f"{beginning}{accident.why}")
        assert words.endswith(f"; {end} equal")
    finding = finding_of(save_of(output, int(later[-1])))
    assert (finding.doubted, finding.differs) == (first, severity == "note")


@pytest.mark.parametrize("name", [*RUNS, *HEALTHY])
def test_healthy_runs_are_silent(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    output = HEALTHY[name](tmp_path / "run") if name in HEALTHY else made(name)
    folders = sorted(
        path for path in output.iterdir() if path.is_dir() and "checkpoint" in path.name
    )
    assert len(folders) >= 3
    for folder in folders:
        assert (folder.name, told(folder), told(folder, data=True)) == (folder.name, [], [])


# Severities, and what is not compared.


def test_a_save_without_a_step_between_is_a_copy(tmp_path: Path) -> None:
    output = Script(net(), trained=lambda number: (0,) if number < 3 else ()).save(
        tmp_path, 1, 2, 3
    )
    words = (
        f"{WEIGHTS}: copy of checkpoint_2 (equal weights and optimizer state, and no counter moved)"
    )
    expected = {"checkpoint_3": [("note", f"{words}; the first bytes of each tensor are equal")]}
    assert in_names(output) == expected
    assert finding_of(output / "checkpoint_3").doubted == ""
    assert run(["check", "-r", str(output)]) == 0
    shutil.rmtree(output / "checkpoint_3")
    shutil.copytree(output / "checkpoint_2", output / "checkpoint_3")
    assert in_names(output) == expected


def test_weights_that_a_script_changes_once_more_at_its_end_are_a_note(tmp_path: Path) -> None:
    """An average that replaces the weights makes no step."""

    def halve(script: Script, number: int) -> None:
        for weight in script.models[0].parameters() if number == 4 else ():
            weight.data *= 0.5

    trained = lambda number: (0,) if number < 4 else ()  # noqa: E731
    output = Script(net(), trained=trained, before_save=halve).save(tmp_path)
    ((name, ((severity, words),)),) = in_names(output).items()
    assert (name, severity) == ("checkpoint_4", "note")
    assert words.startswith(f"{OPTIMIZER}: optimizer state as in checkpoint_3 ")


def test_weights_of_16_bits_may_stay(tmp_path: Path) -> None:
    output = of_norms(torch.bfloat16)(tmp_path)
    found = in_names(output)
    assert [severity for findings in found.values() for severity, _ in findings] == ["note"] * 3


def test_weights_without_a_learning_rate_are_a_note(tmp_path: Path) -> None:
    output = runs(tmp_path, save_only_model=True)
    assert [severity for severity, _ in told(copied(output, WEIGHTS))] == ["note"]


@pytest.mark.parametrize(
    ("scale", "expected"), [(2.0**16, "warning"), (2.0**13, "warning"), (2.0**6, "")]
)
def test_a_scale_that_fell_less_often_than_steps_were_counted_proves_a_step(
    scale: float, expected: str, tmp_path: Path
) -> None:
    output = with_skipped_steps(tmp_path)
    for number in (2, 3, 4):
        shutil.rmtree(output / f"checkpoint-{number}")
    folder = Path(shutil.copytree(output / "checkpoint-1", output / "checkpoint-10"))
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 10}))
    scaler = torch.load(folder / "scaler.pt")
    torch.save({**scaler, "scale": scale}, folder / "scaler.pt")
    assert "".join(severity for severity, _ in told(folder)) == expected


@pytest.mark.parametrize(("size", "is_sampled"), [(500, 1), (5000, 0)])
def test_a_table_alone_is_compared_as_a_whole_or_not(
    size: int, is_sampled: int, tmp_path: Path
) -> None:
    output = of_rows(tmp_path, size=size, frozen=0)
    copied(output, WEIGHTS)
    for options, expected in (({}, is_sampled), ({"data": True}, 1)):
        found = told(output / "checkpoint_3", **options)
        assert [severity for severity, _ in found] == ["warning"] * expected
        assert all(words.endswith("; every byte is equal") for _, words in found)


def test_bytes_behind_the_samples_are_compared_with_data(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"step_{number}"
        folder.mkdir()
        weights = torch.cat([torch.ones(4000), torch.full((9,), float(number))])
        save_file({"w": weights}, folder / WEIGHTS)
    assert [severity for severity, _ in told(folder)] == ["note"]
    assert told(folder, data=True) == []


def test_another_format_or_a_missing_file_shows_nothing(copy_of: Callable[[str], Path]) -> None:
    output = copy_of("trainer")
    folder = copied(output, WEIGHTS)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    assert told(folder) == []
    (folder / "pytorch_model.bin").unlink()
    (save_of(output, 2) / WEIGHTS).unlink()
    assert told(folder) == []


def test_shards_without_an_optimizer_are_listed_as_not_checked(tmp_path: Path) -> None:
    """Weights that are frozen stay equal as well, so that it is no finding."""
    folder = copied(runs(tmp_path, shards=True, save_only_model=True), shard(3))
    assert told(folder) == []
    words = "whether all files belong to one save"
    assert any(omitted.startswith(words) for omitted in check(folder).not_checked)


@pytest.mark.parametrize(
    ("name", "files", "status", "newest"),
    [
        ("trainer", (WEIGHTS,), 1, "newest candidate, but check found problems in {}"),
        ("unscheduled", (OPTIMIZER,), 0, "newest complete one, but {} differs from its neighbours"),
    ],
)
def test_neither_of_two_saves_with_the_same_files_is_recommended(
    name: str,
    files: tuple[str, ...],
    status: int,
    newest: str,
    copy_of: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 4 over step 3 and step 3 over step 4 look the same."""
    output = copy_of(name)
    folder = copied(output, *files, source=3, target=4)
    assert ckptfix.latest_checkpoint(output) == folder
    assert run(["check", "-r", str(output)]) == status
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"resume from {folder}, the {newest.format(folder.name)}; the newest one without problems: "
        f"{save_of(output, 2)}"
    )


def test_the_finding_has_json_and_advice(copy_of: Callable[[str], Path]) -> None:
    output = copy_of("trainer")
    folder = copied(output, WEIGHTS)
    assert "stale-save" not in [finding.code for finding in check(folder).findings]
    finding = finding_of(folder, output / "checkpoint-2")
    document = json.loads(json.dumps(finding.as_json(str(folder))))
    assert (document["save"], document["begin"], document["end"]) == ("checkpoint-2", 2, 3)
    assert ". Resume from a checkpoint before checkpoint-2, or copy model.saf" in finding.advice


# Costs.


def test_one_sample_of_each_healthy_file_is_read(made: Callable[[str], Path]) -> None:
    folder = save_of(made("two"), 3)
    with patch("ckptfix.checkpoint.samples.open_reader", wraps=open_reader) as opened:
        assert told(folder) == []
    paths = [Path(call.args[0]) for call in opened.mock_calls if len(call.args) == 1]
    assert sorted(path.name for path in paths) == sorted(
        2 * [WEIGHTS, WEIGHTS_1, OPTIMIZER, OPTIMIZER_1]
    )


def in_a_store(output: Path) -> str:
    """Copy a run to ``memory://``, where the time of an object is its ETag."""
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(output, url)
    for key, file in fsspec.filesystem("memory").store.items():
        if key.startswith(url.removeprefix("memory:/")):
            seconds = 1.8e9 + crc32(file.getvalue()) / 1e6
            file.created = datetime.fromtimestamp(seconds, timezone.utc)
    return url


@pytest.mark.parametrize("name", ["two", "batch norm"])
def test_a_store_is_compared_without_more_requests(
    name: str, made: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The ETags of all checkpoints are in its listing, and steps are not read."""
    from ckptfix.storage.stores import Store

    url = in_a_store(made(name))
    requests = []
    for options in ({"return_value": ()}, {"wraps": stale_saves.diagnose_stale_saves}):
        with (
            patch.object(stale_saves, "diagnose_stale_saves", **options) as diagnosed,
            patch.object(Store, "read", autospec=True, side_effect=Store.read) as read,
        ):
            assert run(["check", "-r", url]) == 0
        assert diagnosed.called
        requests.append(len(read.mock_calls))
    assert "stale-save" not in capsys.readouterr().out
    assert name != "two" or requests[0] == requests[1]


@pytest.mark.parametrize("name", [WEIGHTS_1, OPTIMIZER_1])
def test_old_files_in_a_store_are_told(
    name: str, copy_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = copy_of("two")
    copied(output, name)
    assert run(["check", "-r", in_a_store(output)]) == 1
    out = capsys.readouterr().out
    assert out.count("warning stale-save: ") == 1
    assert f"warning stale-save: {name}: " in out

"""Costs of checks: they grow with the bytes of a file, however it nests and shares its objects."""

import json
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptfix import check
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.model_files import ModelFiles, group_files
from ckptfix.checkpoint.pairing import Pairing, equal_entries, first_unequal
from ckptfix.checkpoint.roles import Role
from ckptfix.storage.files import AnyPath, names_in

ONE = torch.zeros(1)
RANDOM_STATES = {"step": 1, "random_state": (3, (1,) * 625, None)}


def save_optimizer(path: Path, moment: torch.Tensor = ONE, second: torch.Tensor = ONE) -> None:
    state = {0: {"step": ONE, "exp_avg": moment, "exp_avg_sq": second}}
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, path)


def save_random_states(folder: Path, ranks: int = 1) -> None:
    for rank in range(ranks):
        torch.save(RANDOM_STATES, folder / f"random_states_{rank}.pkl")


def calls(action: Callable[[], object]) -> int:
    """Return how many Python functions an action calls, and how often it resumes generators."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def optimizers_of_one_state(folder: Path, count: int) -> None:
    state = {number: {"exp_avg": torch.empty(2, device="meta")} for number in range(count)}
    torch.save(
        {str(i): {"state": state, "param_groups": []} for i in range(count)}, folder / "states.pt"
    )


def state_dicts(folder: Path, count: int) -> None:
    torch.save({f"a{i}": {"w": ONE, "l.b": ONE} for i in range(count)}, folder / "model.pth")


def nested_state_dicts(folder: Path, count: int) -> None:
    dicts = {f"a{i}": {"module.module.w": ONE, f"module.module.{i}": ONE} for i in range(count)}
    torch.save(dicts, folder / "m.pth")
    save_file({"w": ONE}, folder / "model.safetensors")
    save_random_states(folder, 2)


def values_that_share_a_list(folder: Path, count: int) -> None:
    """Values next to weights, in which quantized weights may hide."""
    shared = [{"number": number} for number in range(count)]
    save_file({"w": ONE}, folder / "model.safetensors")
    dicts = {f"m{i}": {"w": ONE, "o": [shared]} for i in range(count)}
    torch.save(dicts, folder / "extra.pth")
    group = {"lr": 0.1, "params": [0, 1, 2]}
    state = {number: {"step": ONE, "exp_avg": ONE, "exp_avg_sq": ONE} for number in range(3)}
    torch.save({"state": state, "param_groups": [group]}, folder / "optimizer.bin")
    save_random_states(folder)


def duplicates(folder: Path, count: int) -> None:
    for number in range(count):
        end = f"_{number}" if number else ""
        tensors = {"module." * (number % 2) + f"{number // 2}.w": ONE}
        save_file(tensors, folder / f"model{end}.safetensors")
        save_optimizer(folder / f"optimizer{end}.bin")
    save_random_states(folder, 2)


def different_states(folder: Path, count: int) -> None:
    """Optimizers whose moments differ, and schedulers, which have no tensor, with different
    learning rates.
    """
    save_file({"w": ONE}, folder / "model.safetensors")
    for number in range(count):
        end = f"_{number}" if number else ""
        save_optimizer(folder / f"optimizer{end}.bin", torch.full((1,), float(number)))
        schedule = {"step_size": 1, "gamma": 0.5, "base_lrs": [float(number)], "last_epoch": 1}
        torch.save(schedule, folder / f"scheduler{end}.bin")
    save_random_states(folder)


def nested_in_dcp(folder: Path, count: int) -> None:
    models = {f"m{i}": {"module.module.w": ONE, "module.module.b": ONE} for i in range(count)}
    dcp.save(models, checkpoint_id=folder / "all", no_dist=True)
    save_random_states(folder, 2)


def shards_with_another_ending(folder: Path, count: int) -> None:
    shards = {f"w{i}": f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards.values():
        (folder / f"{shard}.bak").write_bytes(b"cut")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "count"), [
    (optimizers_of_one_state, 50), (state_dicts, 100), (nested_state_dicts, 80),
    (values_that_share_a_list, 50), (duplicates, 70), (different_states, 40), (nested_in_dcp, 60),
    (shards_with_another_ending, 300),
])  # fmt: skip
def test_twice_the_objects_cost_twice_the_calls(
    tmp_path: Path, make: Callable[[Path, int], None], count: int
) -> None:
    folders = [tmp_path / str(times) for times in (1, 2, 4)]
    for folder, times in zip(folders, (1, 2, 4), strict=True):
        folder.mkdir()
        make(folder, count * times)
    check(folders[0])  # imports modules
    first, second, third = (calls(partial(check, folder)) for folder in folders)
    assert third - second < 3 * (second - first), (first, second, third)


@pytest.mark.parametrize(("kinds", "count"), [(1, 8), (2, 64), (1, 256), (256, 256)])
def test_states_are_compared_with_equal_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, kinds: int
) -> None:
    paths = [tmp_path / f"optimizer{f'_{number}' if number else ''}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        save_optimizer(path, torch.full((1,), float(number % kinds)))
    compared: list[Pairing] = []

    def compare(pairing: Pairing) -> bool | None:
        compared.append(pairing)
        return first_unequal(tmp_path, pairing, full=True) is None or None

    equal = [
        (original.name.index, entry.name.index)
        for original, entry, _ in equal_entries(
            scan_folder(tmp_path).entries(Role.OPTIMIZER)[0], compare
        )
    ]
    assert equal == [(number % kinds, number) for number in range(kinds, count)]
    # Each with each: 28, 2,016 and 32,640 comparisons of optimizers that all differ.
    assert len(compared) == max(0, count - kinds)


@pytest.mark.parametrize("has_crc", [True, False])
def test_a_byte_that_changed_under_its_checksum_makes_a_state_another_one(
    tmp_path: Path, has_crc: bool
) -> None:
    """The group is only where an equal state can be: what is equal is decided by the bytes."""
    torch.serialization.set_crc32_options(has_crc)
    try:
        for name in ("optimizer.bin", "optimizer_1.bin", "optimizer_2.bin"):
            save_optimizer(tmp_path / name, torch.full((4,), 0.25))
    finally:
        torch.serialization.set_crc32_options(True)
    changed = tmp_path / "optimizer_1.bin"
    moments, other = (struct.pack("<4f", 0.25, 0.25, 0.25, last) for last in (0.25, 0.5))
    assert changed.read_bytes().count(moments) == 1
    changed.write_bytes(changed.read_bytes().replace(moments, other))
    entries = scan_folder(tmp_path).entries(Role.OPTIMIZER)[0]
    equal = equal_entries(
        entries, lambda pair: first_unequal(tmp_path, pair, full=True) is None or None
    )
    assert [(str(original.path), str(entry.path)) for original, entry, _ in equal] == [
        ("optimizer.bin", "optimizer_2.bin")
    ]


def test_states_that_differ_between_the_samples_are_not_called_equal(tmp_path: Path) -> None:
    """Their checksums differ; the samples of a check were equal."""
    save_file({"w": ONE}, tmp_path / "model.safetensors")
    for number, end in enumerate(("", "_1")):
        moments = torch.ones(1 << 20)
        moments[5000] = float(number)
        save_optimizer(tmp_path / f"optimizer{end}.bin", moments, moments)
    save_random_states(tmp_path)
    codes = {finding.code for finding in check(tmp_path).findings}
    assert not codes & {"identical-states", "surplus-states", "doubled-states"}, codes


@pytest.mark.parametrize(("missing", "groupings"), [(0, 0), (1, 1), (8, 1)])
def test_a_resume_groups_the_files_of_a_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, groupings: int
) -> None:
    """Once for each index cost 66 s in a folder with 400 variants of a model."""
    folder = tmp_path / "checkpoint-9"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 9, "log_history": []}')
    save_file({"w": ONE}, folder / "model.safetensors", {"format": "pt"})
    for number in range(8):
        variant = f".v{number}" if number else ""
        shard = folder / f"model{variant}-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": {"w": shard.name}}
        (folder / f"model.safetensors.index{variant}.json").write_text(json.dumps(index))
        if number >= missing:
            save_file({"w": ONE}, shard, {"format": "pt"})
    grouped: list[AnyPath] = []

    def group(scanned: CheckpointFolder) -> tuple[ModelFiles, ...]:
        grouped.append(scanned.root)
        return group_files(scanned)

    monkeypatch.setattr("ckptfix.checkpoint.latest.group_files", group)
    problem = incomplete(folder)
    assert (problem is None) == (missing < 2), problem
    assert len(grouped) == groupings


@pytest.mark.parametrize("missing", [1, 30])
@pytest.mark.parametrize("variants", [1, 4])
def test_sub_folders_are_listed_once_for_all_missing_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, variants: int
) -> None:
    """4,000 missing shards next to 100 sub-folders took 8 s."""
    for number in range(variants):
        variant = f".v{number}" if number else ""
        shards = {
            f"w{i}": f"model{variant}-{i + 1:05}-of-{missing:05}.safetensors"
            for i in range(missing)
        }
        index = tmp_path / f"model.safetensors.index{variant}.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    for number in range(5):
        (tmp_path / f"f{number}").mkdir()
    save_file({"w0": ONE}, tmp_path / f"f3/model-00001-of-{missing:05}.safetensors")
    listed: list[Path] = []

    def names(path: Path) -> list[str]:
        listed.append(path)
        return names_in(path)

    monkeypatch.setattr("ckptfix.diagnosis.indexes.names_in", names)
    findings = [one for one in check(tmp_path).findings if one.code == "missing-shard"]
    assert len(findings) == variants
    assert ["'f3/model-" in str(one) for one in findings].count(True) == 1
    assert len(listed) == 5

"""Lists of tensors in custom objects are compared with those of the checkpoints next to them."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from ckptfix import check
from tests.stores.servers import upload_folder

HEALTHY = Path("fixtures/accelerate-1.15.0/clean-safetensors/checkpoint")
OBJECT = "custom_checkpoint_0.pkl"
Tensors = list[torch.Tensor]
SHADOW = [torch.ones(3, 2), torch.ones(3), torch.ones(1, 3), torch.ones(1)]
NEIGHBOURS = "as in 2 neighbouring checkpoints"


def run_of(root: Path, states: list[object]) -> list[Path]:
    """Write a run whose checkpoints have these states of its custom object."""
    checkpoints = [root / f"checkpoint_{number}" for number in range(len(states))]
    for path, state in zip(checkpoints, states, strict=True):
        shutil.copytree(HEALTHY, path)
        torch.save(state, path / OBJECT)
    return checkpoints


def told(checkpoint: Path) -> list[str]:
    findings = check(checkpoint).findings
    return [f"{finding.severity.value} {finding}" for finding in findings]


CHANGED: dict[str, tuple[Tensors, str]] = {
    "a lost tensor": (SHADOW[:3], "3 tensors in 'shadow_params' (expected 4"),
    "half precision": (
        [tensor.half() for tensor in SHADOW],
        "4 tensors of F16 in 'shadow_params' (expected F32",
    ),
    "one in half precision": (
        [*SHADOW[:3], SHADOW[3].half()],
        "1 tensor of F16 in 'shadow_params' (expected F32",
    ),
    "another order": (
        SHADOW[::-1],
        "a tensor of shape [1] at position 0 in 'shadow_params' (expected [3, 2]",
    ),
}
"""Averages of an EMA as somebody changed them -> the words of the note."""


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("kind", CHANGED)
def test_a_list_of_tensors_that_differs_is_a_note(kind: str, at: int, tmp_path: Path) -> None:
    """check called an EMA with three of four averages clean: diffusers loads it silently."""
    tensors, words = CHANGED[kind]
    ensure_told(tmp_path, at, "shadow_params", SHADOW, tensors, words)


def ensure_told(
    root: Path, at: int, key: str, healthy: object, changed: object, words: str
) -> None:
    """Ensure that one of three checkpoints, whose object differs, has this note alone."""
    states: list[object] = [{"decay": 0.9, key: healthy} for _ in range(3)]
    states[at] = {"decay": 0.9, key: changed}
    checkpoints = run_of(root, states)
    assert told(checkpoints[at]) == [f"note {OBJECT}: it holds {words}, {NEIGHBOURS})"]
    assert [told(path) for path in checkpoints if path != checkpoints[at]] == [[], []]


NAMED = {"1.weight": SHADOW[0], "1.bias": SHADOW[1], "2.weight": SHADOW[2]}
NAMED_CHANGED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a lost tensor": (
        {key: NAMED[key] for key in ("1.weight", "1.bias")},
        "an object with 2 tensors (expected 3 tensors",
    ),
    "half precision": (
        {key: tensor.half() for key, tensor in NAMED.items()},
        "3 tensors of F16 (expected F32",
    ),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("kind", NAMED_CHANGED)
def test_named_tensors_that_differ_are_a_note(kind: str, at: int, tmp_path: Path) -> None:
    tensors, words = NAMED_CHANGED[kind]
    ensure_told(tmp_path, at, "shadow", NAMED, tensors, words)


def test_the_newest_object_without_a_key_of_all_earlier_ones(tmp_path: Path) -> None:
    """It was clean; load_state_dict of the script raises a KeyError, or takes its default."""
    states: list[object] = [
        {"best": 0.5, "queue": torch.ones(count, 2), "step": count} for count in (1, 2, 3)
    ]
    states.append({"queue": torch.ones(4, 2), "step": 4})
    checkpoints = run_of(tmp_path / "run", states)
    expected = f"note {OBJECT}: it holds an object with no 'best' (expected 'best', {NEIGHBOURS})"
    assert [told(path) for path in checkpoints] == [[], [], [], [expected]]
    (finding,) = check(checkpoints[3]).findings
    assert finding.advice.startswith(
        "with the script that saved its neighbours, load_state fails, or "
    )
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(tmp_path / "run", url)
    (finding,) = check(f"{url}/checkpoint_3").findings
    assert f"note {finding}" == expected


def test_lists_are_compared_wherever_they_are(tmp_path: Path) -> None:
    half = [tensor.half() for tensor in SHADOW]
    nested = run_of(tmp_path / "nested", [{"ema": {"s": one}} for one in (SHADOW, SHADOW, half)])
    (note,) = told(nested[2])
    assert "4 tensors of F16 in 'ema.s'" in note
    plain = run_of(tmp_path / "plain", [tuple(one) for one in (SHADOW, SHADOW, half)])
    (note,) = told(plain[2])
    assert "4 tensors of F16 in its list" in note


def test_only_a_list_between_two_checkpoints_may_not_be_empty(tmp_path: Path) -> None:
    """A script flushes collected gradients before its last save."""
    states: list[object] = [{"grads": SHADOW}, {"grads": []}, {"grads": SHADOW}, {"grads": SHADOW}]
    (note,) = told(run_of(tmp_path / "between", states)[1])
    assert "0 tensors in 'grads' (expected 4" in note
    last = run_of(tmp_path / "last", [states[0], states[0], states[1]])
    assert [told(path) for path in last] == [[]] * 3


def rows(*counts: int) -> Tensors:
    """Return tensors with these first dimensions."""
    return [torch.ones(count, 2) for count in counts]


HEALTHY_LISTS: dict[str, list[object]] = {
    "losses": [rows(*[1] * count) for count in (1, 2, 3, 4)],
    "losses without a dimension": [[torch.tensor(1.0)] * count for count in (2, 2, 1, 2)],
    "a queue": [rows(*[3] * count) for count in (4, 4, 2, 4)],
    "a replay buffer": [[torch.ones(count, 2), torch.ones(count)] for count in (2, 2, 4, 2)],
    "the last batch": [rows(8, 8, 4), rows(8, 8, 4), rows(8, 4, 8), rows(8, 8, 4)],
    "parameters that are added": [SHADOW[:2], SHADOW, SHADOW, SHADOW],
    "parameters that are added last": [SHADOW[:2], SHADOW[:2], SHADOW[:2], SHADOW],
    "a list of no tensors": [[1], [SHADOW[0], 1], [SHADOW[0], 1], SHADOW],
    "nothing yet": [None, SHADOW, SHADOW, SHADOW],
    "a mean of counts": [{"mean": torch.tensor(at if at < 3 else 0.5)} for at in range(4)],
    "named losses": [{str(key): torch.ones(1) for key in range(count)} for count in (3, 3, 3, 2)],
    "named parameters that are added": [{}, {}, NAMED, NAMED],
    "named parameters that are added last": [{}, {}, {}, NAMED],
    "a key that only some saves have": [{"a": 1, "b": 1}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1}],
    "two precisions": [SHADOW, [tensor.half() for tensor in SHADOW]] * 2,
}


@pytest.mark.parametrize("kind", HEALTHY_LISTS)
def test_a_list_that_changes_during_a_run_is_healthy(kind: str, tmp_path: Path) -> None:
    checkpoints = run_of(tmp_path, [{"kept": value} for value in HEALTHY_LISTS[kind]])
    assert [told(path) for path in checkpoints] == [[]] * 4


def test_two_checkpoints_show_nothing_about_lists(tmp_path: Path) -> None:
    """Either of the two may be the changed one."""
    checkpoints = run_of(tmp_path, [{"kept": SHADOW}, {"kept": SHADOW[:2]}])
    assert [told(path) for path in checkpoints] == [[], []]


@pytest.mark.parametrize("at", [0, 1])
def test_the_later_of_two_checkpoints_names_tensors_of_another_precision(
    at: int, tmp_path: Path
) -> None:
    states: list[object] = [dict(NAMED), dict(NAMED)]
    states[at] = {key: tensor.half() for key, tensor in NAMED.items()}
    first, second = run_of(tmp_path, states)
    assert told(first) == []
    (note,) = told(second)
    words = ("3 tensors of F32 (expected F16", "3 tensors of F16 (expected F32")[at]
    assert f"{words}, as in the neighbouring checkpoint)" in note
    assert check(second).status == 0

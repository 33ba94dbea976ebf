"""A Trainer without the guard is killed in a save: check names the folder that it would take, and a
better one.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix.cli import run
from tests.training.trainer_kills import build, losses, transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

LAST = 6
"""The step of the save that is killed, after those of steps 2 and 4."""


class KilledError(BaseException):
    """The end of a process, which nothing catches."""


def config(trainer: Any, folder: str) -> None:
    Path(folder).mkdir()
    trainer.model.config.save_pretrained(folder)


POINTS: dict[str, tuple[str, Callable[..., object]]] = {
    "empty": ("save_model", lambda trainer, real, folder, *given, **options: Path(folder).mkdir()),
    "config": ("save_model", lambda trainer, real, folder, *given, **options: config(trainer, folder)),
    "weights": ("_save_optimizer_and_scheduler", lambda trainer, real, *given: None),
    "optimizer": ("_save_rng_state", lambda trainer, real, *given: None),
    "random states": ("_save_rng_state", lambda trainer, real, *given: real(*given)),
}  # fmt: skip
"""The method in which the save after step 6 ends, and what it does before: the files that were
written by then stay.
"""


def kill_at(trainer: Any, point: str) -> None:
    name, before = POINTS[point]
    real = getattr(trainer, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if trainer.state.global_step != LAST:
            return real(*arguments, **options)
        before(trainer, real, *arguments, **options)
        raise KilledError

    setattr(trainer, name, call)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses of a run that nothing kills."""
    trainer = build(tmp_path_factory.mktemp("complete"), [])
    trainer.train()
    return losses(trainer)


@pytest.mark.parametrize("point", POINTS)
def test_check_leads_past_what_a_killed_save_left(
    tmp_path: Path, point: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(tmp_path, [], save_total_limit=None)
    kill_at(trainer, point)
    with pytest.raises(KilledError):
        trainer.train()
    left = tmp_path / f"checkpoint-{LAST}"
    assert transformers.trainer_utils.get_last_checkpoint(tmp_path) == str(left)
    for one in (left, *left.iterdir()):
        os.utime(one, (1, 1))
    capsys.readouterr()
    assert run(["check", "-r", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    verdicts = {Path(one["path"]).name: one["status"] for one in document["checkpoints"]}
    assert verdicts == {"checkpoint-2": 0, "checkpoint-4": 0, left.name: 1}
    (answer,) = document["resume"]
    assert answer["checkpoint"] == str(tmp_path / "checkpoint-4")
    with pytest.raises((OSError, ValueError), match=r"find a valid checkpoint|No such file"):
        build(tmp_path, []).train(resume_from_checkpoint=str(left))
    shutil.rmtree(left)
    resumed = build(tmp_path, [], save_total_limit=None)
    resumed.train(resume_from_checkpoint=answer["checkpoint"])
    assert losses(resumed) == expected

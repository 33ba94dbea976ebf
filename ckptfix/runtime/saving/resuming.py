"""``load_state`` of a guarded Accelerator: without a path, the newest whole checkpoint."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ckptfix.checkpoint.latest import candidates, checkpoint_number, checkpoints_folder, mixed, newest_whole
from ckptfix.errors import UsageError
from ckptfix.runtime.callers import calling_line
from ckptfix.runtime.guard import guard_of
from ckptfix.runtime.ranks import Ranks
from ckptfix.storage.paths import JOURNAL

Method = Callable[..., Any]


def load_state(
    accelerator: Accelerator,
    method: Method,
    input_dir: str | os.PathLike[str] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.load_state``: without a path the newest whole checkpoint; numbering goes on.

    Warns of every newer folder that is passed over. Raises UsageError when no checkpoint is whole.
    """
    config = accelerator.project_configuration
    with guard_of(accelerator).entered() as is_outermost:
        if is_outermost and input_dir is None and config.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir) / "checkpoints"
            input_dir = _choose(accelerator, folder)
        elif is_outermost and input_dir and (problem := mixed(Path(os.path.expanduser(str(input_dir))))):
            raise UsageError(problem)
        result = method(input_dir, *args, **kwargs)
        if is_outermost and input_dir is not None and config.automatic_checkpoint_naming:
            number = checkpoint_number(Path(input_dir).name)
            if number is not None:
                config.iteration = number + 1
        return result


def _choose(accelerator: Accelerator, folder: Path) -> str:
    """Return the newest whole checkpoint. Some scripts load on some processes only: then each looks for itself."""
    if guard_of(accelerator).settings.save_together:
        chosen: str = Ranks(accelerator).on_main(lambda: str(_latest(folder)), "load_state")
        return chosen
    return str(_latest(folder))


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the newest whole checkpoint of a project folder, or of its ``checkpoints`` folder.

    Warns of every newer one that is passed over, with the reason. Raises UsageError when none is whole.
    """
    folder = checkpoints_folder(Path(path))
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    return _latest(folder)


def _latest(folder: Path) -> Path:
    found = candidates(folder)
    best = newest_whole(found)
    skipped = [candidate for candidate in found if best is None or candidate.number > best.number]
    said = "; ".join(f"{candidate.path.name}: {candidate.problem}" for candidate in skipped)
    if best is None:
        raise UsageError(f"no whole checkpoint in {folder} ({said or _what_is_there(folder)})")
    if skipped:
        line = calling_line()
        message = f"{folder}: took {best.path.name} and passed over {said}"
        warnings.warn_explicit(message, UserWarning, line.path, line.number)
    return best.path


def _what_is_there(folder: Path) -> str:
    others = sorted(name for name in os.listdir(folder) if (folder / name).is_dir() and name != JOURNAL)
    there = f"; there are {', '.join(others[:3])}" if others else ""
    return f"only folders called checkpoint_<number> are looked at{there}"

"""``load_state`` of a guarded Accelerator: without a path, the newest whole checkpoint."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ckptfix.checkpoint.latest import candidates, checkpoint_number, checkpoints_folder, mixed, newest_whole
from ckptfix.errors import UsageError
from ckptfix.runtime.callers import calling_line
from ckptfix.runtime.guard import guard_of
from ckptfix.runtime.loading.report import LoadPolicy, Need
from ckptfix.runtime.loading.state import load_here
from ckptfix.runtime.loading.undoubling import dataloaders_need, is_shifted, moved
from ckptfix.runtime.ranks import Ranks
from ckptfix.storage.paths import JOURNAL, command

Method = Callable[..., Any]


def load_state(
    accelerator: Accelerator,
    method: Method,
    input_dir: str | os.PathLike[str] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.load_state``: without a path the newest whole checkpoint; numbering goes on.

    A folder that an unguarded run doubled is loaded by content, repaired or not, and a warning says what went where.
    Warns of every newer folder that is passed over. Raises UsageError when no checkpoint is whole.
    """
    config = accelerator.project_configuration
    with guard_of(accelerator).entered() as is_outermost:
        if is_outermost and input_dir is None and config.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir) / "checkpoints"
            input_dir = _choose(accelerator, folder)
        elif is_outermost and input_dir and (problem := mixed(Path(os.path.expanduser(str(input_dir))))):
            raise UsageError(problem)
        result = None
        if not is_outermost or not input_dir or not _undoubled(accelerator, input_dir, *args, **kwargs):
            result = method(input_dir, *args, **kwargs)
        if is_outermost and input_dir is not None and config.automatic_checkpoint_naming:
            number = checkpoint_number(Path(input_dir).name)
            if number is not None:
                config.iteration = number + 1
        return result


def _undoubled(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str],
    load_kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    map_location: object = None,
    **kwargs: Any,
) -> bool:
    """Load a folder that an unguarded run doubled, or whose names a repair changed; False for any other folder.

    ``strict=False`` and arguments that nobody here knows are left to accelerate, whatever comes of it.
    """
    root = Path(os.path.expanduser(str(input_dir)))
    if not strict or kwargs or not is_shifted(accelerator, root):
        return False
    dataloaders = dataloaders_need(accelerator, root)
    trust = (load_kwargs or {}).get("weights_only") is False
    report = load_here(accelerator, root, LoadPolicy(dataloaders=dataloaders, trust=trust))
    line = calling_line()
    left = "; data loaders start anew: which of their states is current, nothing tells"
    warnings.warn_explicit(
        f"{root} does not hold what this run registers, number by number: objects were prepared twice when it was "
        f"saved, or a repair renamed keys. Loaded by content: {'; '.join(moved(report))}"
        f"{left if dataloaders is Need.IGNORE else ''}; next: {command('check', root)}",
        UserWarning,
        line.path,
        line.number,
    )
    return True


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

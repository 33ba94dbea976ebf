"""``save_state``, ``load_state`` and ``save_model`` of a guarded Accelerator: whole or absent, newest whole first."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.checkpoint.latest import candidates, checkpoints_folder, mixed, newest_whole
from ckptfix.checkpoint.manifest import ManifestEntry
from ckptfix.errors import UsageError
from ckptfix.runtime.guard import guard_of
from ckptfix.runtime.ranks import agree, on_main
from ckptfix.runtime.recording import make_manifest, model_entries, separate_views
from ckptfix.runtime.staging import Staging, abandon, begin, commit, plan_staging, rotate

Method = Callable[..., Any]

_NUMBER = re.compile(r"checkpoint_([0-9]+)")


def save_state(
    accelerator: Accelerator,
    method: Method,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.save_state``: write beside, make durable, rename, then rotate.

    Raises on every process what any of them raised; the target is then as it was.
    """
    guard = guard_of(accelerator)
    config = accelerator.project_configuration
    with guard.entered() as is_outermost:
        if not is_outermost or (output_dir is None and not config.automatic_checkpoint_naming):
            return method(output_dir, safe_serialization, **kwargs)
        staging = _plan(accelerator, output_dir)
        models: list[tuple[ManifestEntry, ...]] = []
        with _on_all(accelerator, staging, "save_state"):
            if accelerator.is_main_process:
                begin(staging)
        with _on_all(accelerator, staging, "save_state"):
            if accelerator.is_local_main_process:  # a node may have a disk of its own
                staging.folder.mkdir(parents=True, exist_ok=True)
        with (
            _on_all(accelerator, staging, "save_state"),
            _unnamed(accelerator),
            _recorded(accelerator, models, safe_serialization),
        ):
            method(str(staging.folder), safe_serialization, **kwargs)
        entries = models[-1] if models else ()
        with _on_all(accelerator, staging, "save_state"):
            if accelerator.is_main_process:
                commit(staging, make_manifest(accelerator, staging.folder, entries).to_bytes())
        with _on_all(accelerator, staging, "save_state"):
            # A node with a disk of its own still has its part.
            if (
                accelerator.is_local_main_process
                and not accelerator.is_main_process
                and staging.folder.is_dir()
            ):
                commit(staging, make_manifest(accelerator, staging.folder, entries).to_bytes())
            if (
                accelerator.is_main_process
                and config.automatic_checkpoint_naming
                and config.total_limit is not None
            ):
                rotate(staging.target.parent, config.total_limit)
        accelerator.wait_for_everyone()
        return staging.target


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
            input_dir = on_main(accelerator, lambda: str(_latest(folder)), "load_state")
        elif is_outermost and input_dir and (problem := mixed(Path(os.path.expanduser(str(input_dir))))):
            raise UsageError(problem)
        result = method(input_dir, *args, **kwargs)
        if is_outermost and input_dir is not None and config.automatic_checkpoint_naming:
            match = _NUMBER.fullmatch(Path(input_dir).name)
            if match:
                config.iteration = int(match[1]) + 1
        return result


def save_model(
    accelerator: Accelerator,
    method: Method,
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.save_model``: shards and index of an earlier save there do not stay behind."""
    with guard_of(accelerator).entered() as is_outermost:
        if not is_outermost:
            return method(model, save_directory, *args, **kwargs)
        safetensors = bool(kwargs.get("safe_serialization", args[1] if len(args) > 1 else True))
        before = _weights_in(Path(save_directory), safetensors)
        with _separated(accelerator):
            result = method(model, save_directory, *args, **kwargs)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path, status in _weights_in(Path(save_directory), safetensors).items():
                if before.get(path) == status:
                    path.unlink()
        accelerator.wait_for_everyone()
        return result


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
        raise UsageError(f"no whole checkpoint in {folder}" + (f" ({said})" if said else ""))
    if skipped:
        warnings.warn(f"{folder}: took {best.path.name} and passed over {said}", UserWarning, stacklevel=3)
    return best.path


def _plan(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Staging:
    """Return what the save becomes and where it is staged; the main process decides for all."""
    config = accelerator.project_configuration
    decided: Staging = on_main(
        accelerator, lambda: plan_staging(_target(accelerator, output_dir)), "save_state"
    )
    if config.automatic_checkpoint_naming:
        config.iteration = int(decided.target.name.removeprefix("checkpoint_"))
    return decided


def _target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of a save. Automatic numbers go on after the highest that is there, whatever was loaded."""
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        return Path(os.path.abspath(os.path.expanduser(str(output_dir))))
    folder = Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []  # files and dangling links take a number, too
    taken = [int(match[1]) + 1 for name in names if (match := _NUMBER.fullmatch(name))]
    return folder / f"checkpoint_{max([config.iteration, *taken])}"


@contextmanager
def _on_all(accelerator: Accelerator, staging: Staging, what: str) -> Iterator[None]:
    """Run a part of the save on every process; when one fails, all raise, and nothing stays behind."""
    error: BaseException | None = None
    config = accelerator.project_configuration
    iteration = config.iteration
    try:
        yield
    except Exception as raised:
        error = raised
    except BaseException:  # interrupted: the others may be gone as well, so nobody is waited for
        if accelerator.is_local_main_process:
            abandon(staging)
        raise
    try:
        agree(accelerator, error, what)
    except BaseException:
        config.iteration = iteration
        if accelerator.is_local_main_process:
            abandon(staging)
        raise


@contextmanager
def _unnamed(accelerator: Accelerator) -> Iterator[None]:
    """Let accelerate write into the folder it is given; names, numbers and rotation are done here."""
    config = accelerator.project_configuration
    automatic, config.automatic_checkpoint_naming = config.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        config.automatic_checkpoint_naming = automatic


@contextmanager
def _recorded(
    accelerator: Accelerator, models: list[tuple[ManifestEntry, ...]], safetensors: bool
) -> Iterator[None]:
    """See the state dicts after all hooks of the user's, just before they are written."""
    digests = guard_of(accelerator).settings.tensor_digests

    def record(prepared: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        if safetensors:
            for state in weights:
                separate_views(state)
        if accelerator.is_main_process:
            models.append(
                model_entries(accelerator, prepared, weights, safetensors=safetensors, digests=digests)
            )

    handle = accelerator.register_save_state_pre_hook(record)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _separated(accelerator: Accelerator) -> Iterator[None]:
    original = accelerator.get_state_dict

    def get_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        if state is not None:
            separate_views(state)
        return state

    accelerator.get_state_dict = get_state_dict
    try:
        yield
    finally:
        del accelerator.get_state_dict


def _weights_in(folder: Path, safetensors: bool) -> dict[Path, tuple[int, int, int]]:
    """Return the files of ``save_model`` in a folder with what tells whether they were written since."""
    if not folder.is_dir():
        return {}
    stem, suffix = ("model", ".safetensors") if safetensors else ("pytorch_model", ".bin")
    names = os.listdir(folder)
    is_save_state = any(parsed.role is Role.RNG_STATE for name in names if (parsed := parse_file_name(name)))
    found = {}
    for name in names:
        parsed = parse_file_name(name)
        if parsed is None or parsed.stem != stem or parsed.index:
            continue
        is_single = name == f"{stem}{suffix}"
        if (
            (is_single and not is_save_state)
            or (parsed.shard and parsed.suffix == suffix)
            or (name == f"{stem}{suffix}.index.json")
        ):
            status = (folder / name).stat()
            found[folder / name] = (status.st_mtime_ns, status.st_ino, status.st_size)
    return found

"""``save_model`` of a guarded Accelerator: nothing of an earlier save stays behind."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.runtime.guard import guard_of
from ckptfix.runtime.saving.recording import separate_views

Method = Callable[..., Any]


def save_model(
    accelerator: Accelerator,
    method: Method,
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.save_model``: shards and index of an earlier save there do not stay behind.

    The main process writes and cleans up; it waits for no other, as accelerate does not.
    """
    with guard_of(accelerator).entered() as is_outermost:
        if not is_outermost:
            return method(model, save_directory, *args, **kwargs)
        safetensors = bool(kwargs.get("safe_serialization", args[1] if len(args) > 1 else True))
        before = _weights_in(Path(save_directory), safetensors) if accelerator.is_main_process else {}
        with _separated(accelerator):
            result = method(model, save_directory, *args, **kwargs)
        if before:
            now = _weights_in(Path(save_directory), safetensors)
            for path in before.keys() & now.keys():
                if before[path] == now[path]:
                    path.unlink()
        return result


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

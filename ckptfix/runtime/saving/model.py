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
        before = _weights_in(Path(save_directory), safetensors) if accelerator.is_main_process else set()
        written: set[str] = set()
        with _watched(accelerator, written):
            result = method(model, save_directory, *args, **kwargs)
        if len(written) > 1:
            written.add(_index_name(safetensors))  # accelerate writes it itself, when there are several files
        for name in before - written if written else ():
            (Path(save_directory) / name).unlink()
        return result


@contextmanager
def _watched(accelerator: Accelerator, written: set[str]) -> Iterator[None]:
    """Give views storages of their own, and collect the names of the files that are written."""
    before = dict(vars(accelerator))
    get_state_dict, save = accelerator.get_state_dict, accelerator.save

    def separated(*args: Any, **kwargs: Any) -> Any:
        state = get_state_dict(*args, **kwargs)
        if state is not None:
            separate_views(state)
        return state

    def noted(state: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        written.add(os.path.basename(path))
        return save(state, path, *args, **kwargs)

    accelerator.get_state_dict, accelerator.save = separated, noted
    try:
        yield
    finally:
        for name in ("get_state_dict", "save"):
            if name in before:
                setattr(accelerator, name, before[name])
            else:
                delattr(accelerator, name)


def _index_name(safetensors: bool) -> str:
    return "model.safetensors.index.json" if safetensors else "pytorch_model.bin.index.json"


def _weights_in(folder: Path, safetensors: bool) -> set[str]:
    """Return the names of the files of ``save_model`` in a folder."""
    if not folder.is_dir():
        return set()
    stem, suffix = ("model", ".safetensors") if safetensors else ("pytorch_model", ".bin")
    parts = {name: parsed for name in os.listdir(folder) if (parsed := parse_file_name(name)) is not None}
    is_save_state = any(one.role is Role.RNG_STATE and not one.is_of_trainer for one in parts.values())
    found = set()
    for name, parsed in parts.items():
        if parsed.stem != stem or parsed.index:
            continue
        is_single = name == f"{stem}{suffix}"
        if (
            (is_single and not is_save_state)
            or (parsed.shard and parsed.suffix == suffix)
            or name == _index_name(safetensors)
        ):
            found.add(name)
    return found

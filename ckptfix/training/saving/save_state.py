"""``save_state`` and ``save_model`` of a guarded Accelerator: complete or absent.

Accelerate's own ``save_state`` needs no other process when it is given a folder under
DistributedDataParallel, and many scripts call it on the main process alone. Such a save waits for
nobody: the main process commits its files as a whole, any other adds its own. Where accelerate's
own waits for all, and where the script says so, all processes save as one.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from ckptfix.checkpoint.dcp import rank_of
from ckptfix.checkpoint.filenames import FileName, index_name, model_file, parse_file_name
from ckptfix.checkpoint.folder_names import checkpoint_number
from ckptfix.checkpoint.manifest import ManifestEntry
from ckptfix.checkpoint.rank_names import parse_deepspeed_name
from ckptfix.checkpoint.roles import Role
from ckptfix.devices.patching import Method, replaced
from ckptfix.errors import UsageError
from ckptfix.storage.atomic import sync_file
from ckptfix.storage.stores import is_url, open_store
from ckptfix.training.guard import guard_of
from ckptfix.training.ranks import SHARDED, cannot_agree
from ckptfix.training.resuming import run_state
from ckptfix.training.resuming.generators import capture, restore
from ckptfix.training.saving.checked_saves import check_save
from ckptfix.training.saving.joint_saves import JointSave
from ckptfix.training.saving.save_manifest import make_manifest, model_entries, separate_views
from ckptfix.training.saving.saved_digests import SavedDigests, take_left
from ckptfix.training.saving.staged_saves import (
    StagedSave,
    abandon,
    add,
    begin,
    commit,
    files_in,
    plan_staging,
    rank_of_states,
    role_of,
    rotate,
    rotate_in_store,
)

WHAT = "save_state"

_SHARING = {DistributedType.FSDP: sys.maxsize, DistributedType.DEEPSPEED: 32}
"""Number of processes that hash the tensors that all of them write. With DeepSpeed each of these
reads the files of all ranks to find them: it has no list.
"""


def save_state(
    accelerator: Accelerator,
    method: Method,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    **kwargs: Any,
) -> Any:
    """Stand in front of ``Accelerator.save_state``: write to a staging folder, make durable,
    rename, then rotate.

    Raises what the method raises, on every process that saves as one. The target is then as it was;
    where it had to be replaced file by file, OSError says so when it is not.
    """
    guard = guard_of(accelerator)
    with guard.entered() as is_outermost:
        if not is_outermost or _is_left_to_accelerate(accelerator, output_dir):
            return method(output_dir, safe_serialization, **kwargs)
        save = _Save(
            accelerator,
            lambda folder: method(folder, safe_serialization, **kwargs),
            safe_serialization,
        )
        joint = JointSave(accelerator, WHAT, undo=save.renumber)
        target = _target(accelerator, output_dir)
        try:
            if _together(accelerator) and _is_of_all(joint, accelerator, target):
                with joint.staged(lambda: plan_staging(target)) as staging:
                    save.write_own(staging)
                joint.put_in_place(save.manifest, save.rotate)
            else:
                staging = save.alone(target)
        finally:
            save.end()
            restore(save.random)
        if is_url(target):
            return target
        if accelerator.project_configuration.automatic_checkpoint_naming:
            return Path(accelerator.project_dir) / "checkpoints" / staging.target.name
        return Path(str(output_dir))


def _together(accelerator: Accelerator) -> bool:
    """Return whether every process takes part in a save."""
    is_wanted = _must_be_together(accelerator) or guard_of(accelerator).settings.save_together
    # After end_training no process can wait for another.
    return accelerator.num_processes == 1 or (is_wanted and torch.distributed.is_initialized())


def _must_be_together(accelerator: Accelerator) -> bool:
    """Return whether accelerate's own ``save_state`` needs every process."""
    return (
        accelerator.project_configuration.automatic_checkpoint_naming
        or accelerator.distributed_type in SHARDED
    )


def _is_of_all(joint: JointSave, accelerator: Accelerator, target: Path | str) -> bool:
    """Return whether all processes save to one folder; some scripts have one for each."""
    is_asked = guard_of(accelerator).settings.save_together
    can_save_alone = is_asked and not _must_be_together(accelerator)
    return len(set(joint.meet(os.path.dirname(target), can_save_alone=can_save_alone))) == 1


def _is_left_to_accelerate(accelerator: Accelerator, output_dir: object) -> bool:
    """Return whether a save goes through as it is: one that accelerate refuses, or whose processes
    cannot agree.
    """
    if not accelerator.project_configuration.automatic_checkpoint_naming and output_dir in (
        None,
        "",
    ):
        return True
    return cannot_agree(accelerator)


class _Save:
    """One save. ``write`` is accelerate's part of it: all its files into a folder.

    A guarded run must have the numbers of a stock one. So the random generators go on where
    accelerate's part leaves them: hooks and custom objects draw (EMAModel.save_pretrained of
    diffusers makes a model), and our part does not.
    """

    def __init__(
        self, accelerator: Accelerator, write: Callable[[str], Any], safetensors: bool
    ) -> None:
        self._accelerator = accelerator
        self._safetensors = safetensors
        self.random = capture()
        self._write = write
        self._config = accelerator.project_configuration
        self._iteration = self._config.iteration
        self._models: tuple[ManifestEntry, ...] = ()
        self._digests = SavedDigests() if guard_of(accelerator).settings.tensor_digests else None
        self._staging: StagedSave

    def alone(self, target: Path | str) -> StagedSave:
        """Save what this process writes, and wait for no other: the main one as a whole, another
        one file by file.
        """
        accelerator = self._accelerator
        leads = _leads(accelerator)
        self._staging = plan_staging(target, processes=accelerator.num_processes)
        owns = False
        try:
            owns = begin(self._staging)
            self._write_all()
            if leads:
                commit(self._staging, self.manifest(is_whole=accelerator.num_processes == 1))
                self.rotate()
            else:
                for name in _of_the_last_writer(accelerator):
                    (self._staging.folder / name).unlink(missing_ok=True)
                add(self._staging)
        except BaseException:
            self.renumber()
            if owns:
                abandon(self._staging)
            raise
        return self._staging

    def write_own(self, staging: StagedSave) -> None:
        """Write this process's part of a save of all processes."""
        self._staging = staging
        self._write_all()
        if self._accelerator.num_processes > 1:
            self._finish_own(staging.folder)

    def _write_all(self) -> None:
        if self._config.automatic_checkpoint_naming:
            self._config.iteration = int(self._staging.target.name.removeprefix("checkpoint_"))
        accelerator = self._accelerator
        folder = self._staging.folder
        with (
            # Accelerate writes into the folder it is given; names, numbers and rotation are done
            # here.
            replaced(self._config, automatic_checkpoint_naming=False),
            _recorded(accelerator, self._record, self._safetensors),
            run_state.seen_states() as states,
        ):
            restore(self.random)
            try:
                self._write(str(folder))
            finally:
                self.random = capture()
        run_state.save(accelerator, folder, self.random, states)

    def _finish_own(self, folder: Path) -> None:
        """Make this process's files durable, which no other node can, and leave their digests for
        the main one.
        """
        names = [name for name in files_in(folder) if self._is_mine(name)]
        digests, rank = self._digests, int(self._accelerator.process_index)
        if digests is not None:
            digests.hash_files(folder, names)
            self._hash_shared(folder)
        for name in names:
            with open(folder / name, "rb") as file:
                sync_file(file.fileno())
        if digests is not None:
            digests.leave_for_others(folder, rank)

    def _hash_shared(self, folder: Path) -> None:
        accelerator = self._accelerator
        count = min(accelerator.num_processes, _SHARING.get(accelerator.distributed_type, 0))
        if self._digests is not None and accelerator.process_index < count:
            self._digests.hash_shared(folder, accelerator.process_index, count)

    def _record(self, models: Sequence[Any], weights: Sequence[Any], *, safetensors: bool) -> None:
        if self._accelerator.is_local_main_process:
            self._models = model_entries(
                models, weights, safetensors=safetensors, digests=self._digests
            )

    def _is_mine(self, name: str) -> bool:
        """Return whether a file bears the rank of this process; others may be written by another
        one just now.
        """
        rank = _rank_of(name)
        return rank is not None and rank == int(self._accelerator.process_index)

    def manifest(self, *, is_whole: bool = True) -> Callable[[], bytes]:
        """Complete the files that every process writes, and return what makes the manifest of all
        that is staged.

        ``is_whole``: no other process adds files later. Otherwise files that a hook may have each
        of them write get no digest: the last one stays.
        """
        accelerator, folder, digests = self._accelerator, self._staging.folder, self._digests
        several = accelerator.num_processes > 1
        name = self._staging.url or self._staging.target
        check_save(guard_of(accelerator).settings, folder, name, accelerator, accelerator._models)
        if several:
            for file, state in _of_the_last_writer(accelerator).items():
                torch.save(state(), folder / file)
        left, left_tensors = take_left(folder) if several else ({}, {})
        if digests is not None:
            digests.take(left, left_tensors)
            files = (file for file in files_in(folder) - left.keys() if (folder / file).is_file())
            digests.hash_files(
                folder, (file for file in files if is_whole or role_of(file) is not None)
            )
            if not several:
                self._hash_shared(folder)

        def make() -> bytes:
            entries = self._models if digests is None else digests.complete(self._models)
            sha256 = {} if digests is None else digests.files()
            return make_manifest(accelerator, folder, entries, sha256).to_bytes()

        return make

    def end(self) -> None:
        """End the threads that hash what is saved."""
        if self._digests is not None:
            self._digests.close()

    def rotate(self) -> None:
        """Remove old checkpoints beyond the limit of automatic naming."""
        if self._config.automatic_checkpoint_naming and self._config.total_limit is not None:
            if self._staging.url:
                rotate_in_store(os.path.dirname(self._staging.url), self._config.total_limit)
            else:
                rotate(self._staging.target.parent, self._config.total_limit)

    def renumber(self) -> None:
        """Set the number of the next save to what it was before this one."""
        self._config.iteration = self._iteration


def _leads(accelerator: Accelerator) -> bool:
    """Return whether accelerate has this process write what is one for all ranks of a disk."""
    on_each_node = accelerator.project_configuration.save_on_each_node
    return bool(accelerator.is_main_process or (accelerator.is_local_main_process and on_each_node))


def _rank_of(name: str) -> int | None:
    """Return the rank that a file's name has: of random states, a run state, or a part of a DCP or
    DeepSpeed folder.
    """
    rank = rank_of_states(name)
    if rank is None:
        rank = rank_of(PurePosixPath(name))
    if rank is None and (states := parse_deepspeed_name(PurePosixPath(name).name)) is not None:
        rank = states.rank
    return rank


def _of_the_last_writer(accelerator: Accelerator) -> dict[str, Callable[[], Any]]:
    """Return the files that accelerate has every process write, with the state that each of them
    writes.

    Of a dispatcher only the main process knows the position (accelerate#4165): what it writes must
    stay.
    """
    found: dict[str, Callable[[], Any]] = {
        str(
            FileName(role=Role.DATALOADER, stem="dl_state_dict", suffix=".bin", index=number)
        ): one.state_dict
        for number, one in enumerate(accelerator._dataloaders)
        if getattr(one, "use_stateful_dataloader", False)
    }
    if accelerator.scaler is not None:
        found[str(FileName(role=Role.GRAD_SCALER, stem="scaler", suffix=".pt"))] = (
            accelerator.scaler.state_dict
        )
    return found


def _target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path | str:
    """Return the folder or the URL of a save.

    Automatic numbers go on after the highest that is there, whatever was loaded.
    """
    config = accelerator.project_configuration
    automatic = config.automatic_checkpoint_naming
    given = str(accelerator.project_dir if automatic else output_dir)
    if is_url(given):
        if not automatic:
            # A URL that no verb reads is refused before anything is saved.
            return open_store(given).url
        place = open_store(f"{given.rstrip('/')}/checkpoints")
        objects, folders = place.children()
        taken = [
            number + 1
            for name in (*objects, *folders)
            if (number := checkpoint_number(name)) is not None
        ]
        return f"{place.url}/checkpoint_{max([config.iteration, *taken])}"
    if mangled := re.match(r"([a-z][a-z0-9]*):/(?!/)", given):
        raise UsageError(
            f"{given}: a URL in a Path loses a slash, so this would create a folder named "
            f"{mangled[1]}:; pass the URL as a string: {mangled[1]}://{given[mangled.end() :]}"
        )
    if not automatic:
        return Path(os.path.abspath(os.path.expanduser(given)))
    folder = Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"
    # Files and dangling links take a number, too.
    names = os.listdir(folder) if folder.is_dir() else []
    taken = [number + 1 for name in names if (number := checkpoint_number(name)) is not None]
    return folder / f"checkpoint_{max([config.iteration, *taken])}"


@contextmanager
def _recorded(
    accelerator: Accelerator, record: Callable[..., None], safetensors: bool
) -> Iterator[None]:
    """See the state dicts after all hooks of the user's, just before they are written."""

    def see(models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        if safetensors:
            for state in weights:
                separate_views(state)
        record(models, weights, safetensors=safetensors)

    handle = accelerator.register_save_state_pre_hook(see)
    try:
        yield
    finally:
        handle.remove()


def save_model(
    accelerator: Accelerator,
    method: Method,
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Guard ``Accelerator.save_model``: shards and index of an earlier save there do not stay
    behind.

    The main process writes and cleans up; it waits for no other, as accelerate does not.
    """
    with guard_of(accelerator).entered() as is_outermost:
        if not is_outermost:
            return method(model, save_directory, *args, **kwargs)
        safetensors = bool(kwargs.get("safe_serialization", args[1] if len(args) > 1 else True))
        before = (
            _weights_in(Path(save_directory), safetensors) if accelerator.is_main_process else set()
        )
        written: set[str] = set()
        with _watched(accelerator, written):
            result = method(model, save_directory, *args, **kwargs)
        if len(written) > 1:
            # Accelerate writes it itself, when there are several files.
            written.add(_index_name(safetensors))
        for name in before - written if written else ():
            (Path(save_directory) / name).unlink()
        if _leads(accelerator):
            folder, settings = (
                Path(os.path.abspath(save_directory)),
                guard_of(accelerator).settings,
            )
            # A script loads its best weights again before the last save.
            check_save(settings, folder, folder, model, [model], below=(), repeats=2)
        return result


@contextmanager
def _watched(accelerator: Accelerator, written: set[str]) -> Iterator[None]:
    """Give views storages of their own, and collect the names of the files that are written."""
    get_state_dict, save = accelerator.get_state_dict, accelerator.save

    def separated(*args: Any, **kwargs: Any) -> Any:
        state = get_state_dict(*args, **kwargs)
        if state is not None:
            separate_views(state)
        return state

    def noted(state: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        written.add(os.path.basename(path))
        return save(state, path, *args, **kwargs)

    with replaced(accelerator, get_state_dict=separated, save=noted):
        yield


def _index_name(safetensors: bool) -> str:
    return index_name(*_model_name(safetensors))


def _model_name(safetensors: bool) -> tuple[str, str]:
    name = model_file(".safetensors" if safetensors else ".bin")
    return name.stem, name.suffix


def _weights_in(folder: Path, safetensors: bool) -> set[str]:
    """Return the names of the files of ``save_model`` in a folder."""
    if not folder.is_dir():
        return set()
    stem, suffix = _model_name(safetensors)
    parts = {
        name: parsed for name in os.listdir(folder) if (parsed := parse_file_name(name)) is not None
    }
    is_save_state = any(name.is_of_save_state for name in parts.values())
    whole = set() if is_save_state else {f"{stem}{suffix}"}
    return {
        name
        for name, parsed in parts.items()
        if parsed.stem == stem and not parsed.index
        if name in {*whole, _index_name(safetensors)} or (parsed.shard and parsed.suffix == suffix)
    }

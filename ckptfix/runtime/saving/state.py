"""``save_state`` of a guarded Accelerator: whole or absent."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType

from ckptfix.checkpoint.latest import NUMBERED
from ckptfix.checkpoint.manifest import ManifestEntry
from ckptfix.runtime.guard import guard_of
from ckptfix.runtime.ranks import Ranks
from ckptfix.runtime.saving.meeting import Company, meeting
from ckptfix.runtime.saving.recording import make_manifest, model_entries, separate_views
from ckptfix.runtime.saving.rotation import rotate
from ckptfix.runtime.saving.staging import Staging, abandon, begin, commit, plan_staging

Method = Callable[..., Any]

WHAT = "save_state"

_NEEDS_ALL = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Where accelerate's own save_state is a collective operation."""


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
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    with guard.entered() as is_outermost:
        if not is_outermost or _is_left_to_accelerate(accelerator, output_dir):
            return method(output_dir, safe_serialization, **kwargs)
        if automatic or accelerator.distributed_type in _NEEDS_ALL:
            return _Save(accelerator, Ranks(accelerator), method, output_dir).run(safe_serialization, kwargs)
        with meeting(accelerator, f"{WHAT} {output_dir}", guard.settings.wait_for_ranks) as company:
            if company is Company.LATE:
                return method(output_dir, safe_serialization, **kwargs)
            ranks = Ranks(accelerator, together=company is Company.TOGETHER)
            return _Save(accelerator, ranks, method, output_dir).run(safe_serialization, kwargs)


def _is_left_to_accelerate(accelerator: Accelerator, output_dir: object) -> bool:
    """Whether a save goes through as it is: what accelerate refuses, and XLA, whose processes cannot agree here."""
    if output_dir is None and not accelerator.project_configuration.automatic_checkpoint_naming:
        return True
    return accelerator.distributed_type is DistributedType.XLA and accelerator.num_processes > 1


class _Save:
    """One save: who takes part, where it is staged, and who answers for a disk.

    The main process answers for the disk of the target, the first process of another node for its own, if it has one.
    """

    def __init__(self, accelerator: Accelerator, ranks: Ranks, method: Method, output_dir: Any) -> None:
        self._accelerator = accelerator
        self._ranks = ranks
        self._method = method
        self._config = accelerator.project_configuration
        self._iteration = self._config.iteration
        self._owns = False
        self._staging: Staging = ranks.on_main(lambda: plan_staging(_target(accelerator, output_dir)), WHAT)

    def run(self, safe_serialization: bool, kwargs: dict[str, Any]) -> Path:
        """Do it; return the checkpoint."""
        accelerator, staging = self._accelerator, self._staging
        automatic = self._config.automatic_checkpoint_naming
        if automatic:
            self._config.iteration = int(staging.target.name.removeprefix("checkpoint_"))
        models: list[tuple[ManifestEntry, ...]] = []
        is_main = accelerator.is_main_process
        with self._on_all():
            if is_main:
                self._owns = begin(staging)
        with self._on_all():  # the first comes first: on one disk, nobody else can make the folder now
            if accelerator.is_local_main_process and not is_main:
                self._owns = begin(staging)
        with (
            self._on_all(),
            _unnamed(accelerator),
            _recorded(accelerator, models, safe_serialization),
        ):
            self._method(str(staging.folder), safe_serialization, **kwargs)
        entries = models[-1] if models else ()
        with self._on_all():
            if is_main:
                commit(staging, make_manifest(accelerator, staging.folder, entries).to_bytes())
        with self._on_all():
            if self._owns and not is_main:
                commit(staging, make_manifest(accelerator, staging.folder, entries).to_bytes())
            if self._owns and automatic and self._config.total_limit is not None:
                rotate(staging.target.parent, self._config.total_limit)
        self._ranks.wait()
        return staging.target

    @contextmanager
    def _on_all(self) -> Iterator[None]:
        """Run a part of the save on every process; when one fails, all raise, and nothing stays behind."""
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        except BaseException:  # interrupted: the others may be gone as well, so nobody is waited for
            self._abandon()
            raise
        try:
            self._ranks.agree(error, WHAT)
        except BaseException:
            self._config.iteration = self._iteration
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._owns:
            abandon(self._staging)


def _target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of a save. Automatic numbers go on after the highest that is there, whatever was loaded."""
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        return Path(os.path.abspath(os.path.expanduser(str(output_dir))))
    folder = Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []  # files and dangling links take a number, too
    taken = [int(match[1]) + 1 for name in names if (match := NUMBERED.fullmatch(name))]
    return folder / f"checkpoint_{max([config.iteration, *taken])}"


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

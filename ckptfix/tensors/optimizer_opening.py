"""A checkpoint's optimizers, whatever strategy saved them."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.dcp import belongs
from ckptfix.checkpoint.deepspeed_files import deepspeed_below
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.roles import Role
from ckptfix.storage.files import AnyPath, Openable, names_in
from ckptfix.storage.paths import existing
from ckptfix.tensors.dcp_optimizers import dcp_optimizers
from ckptfix.tensors.optimizer_files import read_optimizer_file
from ckptfix.tensors.optimizers import OptimizerState
from ckptfix.tensors.rank_files import rank_files, rank_optimizer
from ckptfix.tensors.zero_states import zero_optimizer


def open_optimizers(path: Openable) -> tuple[OptimizerState, ...]:
    """Return the optimizers in a checkpoint folder, or in a file, by their positions; nothing is
    unpickled.

    Of DDP and the Trainer they are numbered and not named. Where a position has several,
    ``load_state`` without FSDP decides: the file comes before the folder. Raises UsageError when
    nothing is at ``path``, OperationError when an optimizer cannot be read, OSError.
    """
    given = existing(path)
    if not given.is_dir():
        return tuple(_of_file(given))
    found: dict[int, OptimizerState] = {}
    names = sorted(names_in(given))
    for name in names:
        parsed = parse_file_name(name)
        if parsed is None or parsed.role is not Role.OPTIMIZER or not (given / name).is_file():
            continue
        # In this order: optimizer.bin, then the Trainer's optimizer.pt.
        if parsed.index not in found:
            found[parsed.index] = read_optimizer_file(given, PurePosixPath(name), parsed.index)
    for index, where in _dcp_folders(given, names):
        if index not in found:
            found |= {one.index: one for one in dcp_optimizers(given, where, index)}
    for index, where in deepspeed_below(given, [PurePosixPath(name) for name in names]):
        if index not in found and (state := zero_optimizer(given, where, index)) is not None:
            found[index] = state
    for (role, index), files in rank_files(given, names).items():
        if role is Role.OPTIMIZER and index not in found:
            found[index] = rank_optimizer(given, index, files)
    return tuple(found[index] for index in sorted(found))


def _of_file(path: AnyPath) -> Iterator[OptimizerState]:
    """Yield the optimizer in a file, nothing for a file of another kind."""
    parsed = parse_file_name(path.name)
    if parsed is not None and parsed.role is Role.OPTIMIZER:
        yield read_optimizer_file(path.parent, PurePosixPath(path.name), parsed.index)


def _dcp_folders(root: AnyPath, names: list[str]) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DCP folder of an optimizer, or of the folder itself as
    ``.``.
    """
    if any(map(belongs, names)):
        yield 0, PurePosixPath(".")
    for name in names:
        parsed = parse_folder_name(name)
        if parsed is None or parsed.role is not Role.OPTIMIZER or not (root / name).is_dir():
            continue
        if any(map(belongs, names_in(root / name))):
            yield parsed.index, PurePosixPath(name)

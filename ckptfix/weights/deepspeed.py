"""The weights in a DeepSpeed checkpoint."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.weights.stored import Weights


def deepspeed_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a scanned folder, or of the folder itself as ``.``."""
    yield from ()


def deepspeed_weights(root: Path, where: PurePosixPath, index: int) -> Weights:
    """Return the weights of a DeepSpeed checkpoint."""
    raise NotImplementedError

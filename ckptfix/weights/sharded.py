"""The weights in a DCP checkpoint."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.weights.stored import Weights


def dcp_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DCP checkpoint in a scanned folder, or of the folder itself as ``.``."""
    yield from ()


def dcp_weights(root: Path, where: PurePosixPath, index: int) -> Weights:
    """Return the weights of a DCP checkpoint."""
    raise NotImplementedError

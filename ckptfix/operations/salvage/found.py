"""What was found in a damaged checkpoint: files that are whole, models of which a part is, and what is lost."""

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.operations.salvage.naming import Stems
from ckptfix.weights.salvaging import Lost, SavedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfModel:
    """One state dict that is not whole: where its tensors come from, and what the new file is called."""

    source: str
    stems: Stems
    found: SavedDict


@dataclass(slots=True)
class Sorted:
    """``copied``: files that are whole or none of ours, relative to the root. ``components``: how many are ours.

    ``doubtful``: what is kept and ends in zeros, or is no longer as it was sealed and may be so on purpose.
    ``left_out``: what is in the source and not meant for the new folder, in words. ``notes``: how what was saved is
    called, in words. ``unindexed``: where the index of whole shards is missing, or cannot be used. ``advice``: what to
    do when nothing is as the manifest says, "" else. ``unchecked``: whether something was kept that has no checksum.
    """

    root: Path
    copied: list[PurePosixPath] = field(default_factory=list)
    components: int = 0
    parts: list[PartOfModel] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    doubtful: list[Lost] = field(default_factory=list)
    damaged: list[Lost] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unindexed: list[PurePosixPath] = field(default_factory=list)
    advice: str = ""
    unchecked: bool = False

    def copy(self, path: PurePosixPath) -> None:
        """Take a file over as it is."""
        self.copied.append(path)
        self.components += 1

"""What was found in a damaged checkpoint: files that are whole, models of which a part is, and what is lost."""

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.weights.salvaging import Lost, SavedDict

REPORT = "salvage.json"
"""Where the new folder says what was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfModel:
    """One state dict that is not whole: where its tensors come from, and the stem of the file to write."""

    source: str
    stem: str
    found: SavedDict


@dataclass(slots=True)
class Sorted:
    """``copied``: files that are whole or none of ours, relative to the root. ``components``: how many are ours.

    ``doubtful``: what is kept and ends in zeros. ``unchecked``: whether something was kept that has no checksum.
    """

    root: Path
    copied: list[PurePosixPath] = field(default_factory=list)
    components: int = 0
    parts: list[PartOfModel] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    doubtful: list[Lost] = field(default_factory=list)
    damaged: list[Lost] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    unchecked: bool = False

    def copy(self, path: PurePosixPath) -> None:
        """Take a file over as it is."""
        self.copied.append(path)
        self.components += 1

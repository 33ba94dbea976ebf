"""What a salvage did: what is saved, what is lost, and why."""

import os
from dataclasses import dataclass
from typing import Any

from ckptfix.weights.salvaging import Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A new file. ``source``: where its tensors come from. ``names``: of them, ties too; ``nbytes``: each once."""

    path: str
    source: str
    names: tuple[str, ...]
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"path": self.path, "source": self.source, "bytes": self.nbytes, "tensors": list(self.names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvageReceipt:
    """``saved``: new files. ``copied``: files that were whole, untouched. ``damaged``: kept all the same, as asked for.

    ``doubtful``: what was kept, has no checksum and ends in zeros, as the end of a file does that was not written
    before a crash, and a tensor that was never trained. ``not_checked``: in words.
    """

    source: str
    output: str
    saved: tuple[SavedFile, ...]
    copied: tuple[str, ...]
    lost: tuple[Lost, ...]
    doubtful: tuple[Lost, ...]
    damaged: tuple[Lost, ...]
    not_checked: tuple[str, ...]

    @property
    def status(self) -> int:
        """The exit status: 0 when everything was whole, 1 when something is lost or damaged."""
        return int(bool(self.lost or self.damaged))

    @property
    def verdict(self) -> str:
        """What can be said when nothing is lost, "" when something is."""
        if self.status:
            return ""
        return "nothing missing was found" if self.not_checked or self.doubtful else "everything was whole"

    @property
    def tensors(self) -> int:
        """How many names of tensors are in the new files."""
        return sum(len(file.names) for file in self.saved)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints, and what ``salvage.json`` holds."""
        return {
            "source": os.fspath(self.source),
            "output": os.fspath(self.output),
            "saved": [file.as_json() for file in self.saved],
            "copied": list(self.copied),
            "lost": [one._asdict() for one in self.lost],
            "doubtful": [one._asdict() for one in self.doubtful],
            "damaged": [one._asdict() for one in self.damaged],
            "not_checked": list(self.not_checked),
        }

"""What the manifest of the source says: which files and tensors are still those that were sealed.

A flipped bit in a safetensors file shows in no other way: the format has no checksums.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import FormatError
from ckptfix.operations.sealing.hashing import FileJob, Hashed, TensorJob, first_place, hash_all
from ckptfix.operations.sealing.recorded import Recorded
from ckptfix.operations.target import Target
from ckptfix.weights.salvaging import Lost, SavedDict
from ckptfix.weights.stored import StoredTensor

OTHER = "its sha256 is not that of the manifest"


class Sealed:
    """The digests that the manifest has, none without one. ``problem``: why it cannot be understood, "" if it can.

    ``equal``, ``unequal``: how many files and tensors had their digest, and had another one, up to now.
    """

    def __init__(self, target: Target, progress: Progress | None) -> None:
        """Read the manifest. ``progress`` gets bytes that are hashed."""
        self._root = target.root
        self._progress = progress
        self.problem = ""
        self.equal = self.unequal = 0
        manifest = None
        try:
            manifest = read_manifest(target.root)
        except (FormatError, OSError) as error:  # damaged, too: all else is saved as without one
            self.problem = str(error)
        self._recorded = Recorded(manifest, target)

    def files(self, paths: Iterable[PurePosixPath]) -> dict[PurePosixPath, str]:
        """Return file -> "" when it has its sha256, else why it has not; files that were not sealed are left out."""
        found: dict[PurePosixPath, str] = {}
        jobs: list[FileJob] = []
        sealed: list[PurePosixPath] = []
        for path in paths:
            if str(path) in self._recorded.sha256:
                try:
                    jobs.append(FileJob(self._root / path, os.stat(self._root / path).st_size))
                    sealed.append(path)
                except OSError as error:
                    found[path] = f"cannot be read: {error.strerror or error}"
        for path, one in zip(sealed, hash_all(jobs, progress=self._progress), strict=True):
            found[path] = self._unlike(one, self._recorded.sha256[str(path)])
        return found

    def is_sealed(self, paths: Iterable[PurePosixPath]) -> bool:
        """Whether one of these files has a digest."""
        return any(str(path) in self._recorded.sha256 for path in paths)

    def digests(self, label: str) -> Mapping[str, str]:
        """Return name -> digest of the tensors of one model."""
        return self._recorded.tensors.get(label, {})

    def models(self, *labels: str) -> dict[str, Mapping[str, str]]:
        """Return what models are called that a file, index or folder holds -> name -> digest of each tensor."""
        return {
            label: digests
            for label, digests in self._recorded.tensors.items()
            if digests and (label in labels or label.startswith(tuple(f"{one}[" for one in labels)))
        }

    def expected(self, label: str) -> frozenset[str]:
        """Return the names that were in the files of a model, without those of ties that are only in the manifest."""
        return frozenset(self._recorded.tensors[label].keys() - self._recorded.aliases[label])

    def changed(self, digests: Mapping[str, str], tensors: Iterable[StoredTensor]) -> dict[str, str]:
        """Return name -> why, for the tensors that are not what was sealed. Reads all that have a digest."""
        sealed = [one for one in tensors if one.fqn in digests]
        hashed = hash_all([TensorJob(one) for one in sealed], progress=self._progress)
        words = {
            one.fqn: self._unlike(found, digests[one.fqn]) for one, found in zip(sealed, hashed, strict=True)
        }
        return {name: why for name, why in words.items() if why}

    def judged(self, found: SavedDict, digests: Mapping[str, str], *, keep_damaged: bool) -> SavedDict:
        """Return a state dict without what is not as it was sealed, or with that among the damaged."""
        known = {one.name for one in found.damaged}
        changed = self.changed(digests, (one for one in found.tensors if one.fqn not in known))
        sound = frozenset(digests.keys() - changed.keys())
        found = replace(found, unchecked=found.unchecked - sound)
        if not changed:
            return found
        wrong = tuple(
            Lost(self._home(one), one.fqn, changed[one.fqn]) for one in found.tensors if one.fqn in changed
        )
        if keep_damaged:
            return replace(found, damaged=(*found.damaged, *wrong))
        files = {one.name: one.file for one in wrong}
        gone = (
            Lost(files[kept], name, f"it is tied to {kept!r}, which is lost")
            for name, kept in found.ties.items()
            if kept in changed
        )
        return replace(
            found,
            tensors=tuple(one for one in found.tensors if one.fqn not in changed),
            ties={name: kept for name, kept in found.ties.items() if kept not in changed},
            lost=(*found.lost, *wrong, *gone),
        )

    def missing(self) -> Iterator[str]:
        """Yield the files that the manifest lists and that are not there."""
        recorded = self._recorded
        for name in sorted(recorded.sha256.keys() | recorded.sizes.keys() | recorded.repaired):
            if not os.path.lexists(self._root / name):
                yield name

    def _home(self, tensor: StoredTensor) -> str:
        path = first_place(tensor.layout)[0]
        return os.path.relpath(path, self._root) if path != Path() else ""

    def _unlike(self, found: Hashed, recorded: str) -> str:
        """Return why something is not what was recorded, "" when it is."""
        if found.problem:
            return f"it cannot be read: {found.problem}"
        is_equal = found.digest == recorded
        self.equal += is_equal
        self.unequal += not is_equal
        return "" if is_equal else OTHER

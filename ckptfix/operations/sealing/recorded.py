"""What a manifest says of a checkpoint, as far as it can be compared with what is there."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckptfix.checkpoint.filenames import NOT_STATES, parse_file_name
from ckptfix.checkpoint.manifest import MANIFEST, Manifest, ManifestEntry, read_manifest
from ckptfix.errors import FormatError, OperationError
from ckptfix.operations.sealing.contents import Contents, Place
from ckptfix.operations.target import Target
from ckptfix.storage.paths import shell_path
from ckptfix.weights.stored import Weights


def readable_manifest(root: Path) -> Manifest | None:
    """Return the manifest of a folder. Raises OperationError, with what to do, for one that cannot be understood."""
    try:
        return read_manifest(root)
    except FormatError as error:
        raise OperationError(f"{error}; to go on without it: rm {shell_path(root / MANIFEST)}") from error


class Recorded:
    """What a manifest says of a folder, or of the one file in it that was asked for.

    ``repaired``: files that were sealed and changed by a repair since.
    """

    def __init__(self, manifest: Manifest | None, target: Target) -> None:
        self.manifest = manifest
        self.is_sealed = manifest is not None and bool(manifest.sha256)
        models = manifest.models if manifest is not None else ()
        entries = [entry for entry in models if not _is_state(entry.file)]
        self.tensors: dict[str, Mapping[str, str]] = {entry.file: _by_every_name(entry) for entry in entries}
        by_the_save = manifest is not None and manifest.is_of_a_save  # others saw them in the files' headers
        self.aliases = {
            entry.file: (entry.aliases.keys() if by_the_save else set()) - entry.digests.keys()
            for entry in entries
        }
        self.sha256 = dict(manifest.sha256) if manifest is not None else {}
        self.sizes = dict(manifest.files) if manifest is not None else {}
        self.only = target.only
        if self.only is not None:
            self.sha256 = {name: value for name, value in self.sha256.items() if name == self.only}
            self.sizes = {name: value for name, value in self.sizes.items() if name == self.only}
        self.repaired = {name for name, digest in self.sha256.items() if not digest}
        self.sha256 = {name: digest for name, digest in self.sha256.items() if digest}

    def digests(self, weights: Iterable[Weights], unreadable: Iterable[str]) -> dict[Place, str]:
        """Return the digests of tensors that can be compared: those of models that can be read."""
        if self.only is None:
            lost = tuple(unreadable)
            readable = {Place(one.label, fqn) for one in weights if lost for fqn in one.named()}
            return {
                place: digest
                for label, digests in self.tensors.items()
                for is_lost in (any(label == one or label.startswith(f"{one}[") for one in lost),)
                for fqn, digest in digests.items()
                for place in (Place(label, fqn),)
                if not is_lost or place in readable
            }
        found: dict[Place, str] = {}
        for one in weights:
            if one.label in self.tensors:
                absent = (
                    self.aliases[one.label] - one.ties.keys()
                )  # known from the manifest of the folder alone
                found |= {
                    Place(one.label, fqn): digest
                    for fqn, digest in self.tensors[one.label].items()
                    if fqn not in absent
                }
                continue
            for label, digests in self.tensors.items():  # a shard, of which the model's entry speaks
                if label.endswith(".json"):
                    names = digests.keys() & one.named().keys()
                    found |= {Place(one.label, fqn): digests[fqn] for fqn in names}
        return found

    def lost(self, contents: Contents) -> Iterator[tuple[Place, str]]:
        """Yield the tensors that have a digest and cannot be found, as their model cannot be read, with the reason."""
        known = self.digests(contents.weights, contents.unreadable)
        for label, why in contents.unreadable.items():
            for entry, digests in self.tensors.items():
                if entry == label or entry.startswith(f"{label}["):
                    places = (Place(entry, fqn) for fqn in digests)
                    yield from ((place, why) for place in places if place not in known)


def _is_state(label: str) -> bool:
    """Whether what is recorded as a model is a state by its name, as seals before 0.5.0 had ``rng_state.pth``.

    Its file has a digest of its own.
    """
    name = parse_file_name(label.partition("[")[0])
    return name is not None and name.role not in NOT_STATES


def _by_every_name(entry: ManifestEntry) -> dict[str, str]:
    """Return the digests of a model, those of names that are not in its file, too."""
    digests = entry.digests
    return {name: digests[kept] for name, kept in entry.aliases.items() if kept in digests} | dict(digests)

"""Sort single files: whole ones are copied, others are lost, or kept although damaged."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component, ProblemKind
from ckptfix.checkpoint.pairing import Progress
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile, crc_mismatches
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.operations.salvage.found import Sorted
from ckptfix.operations.salvage.sealed import Sealed
from ckptfix.storage.reading import open_reader
from ckptfix.weights.salvaging import BEHIND, Lost
from ckptfix.weights.zero_ends import Place, zero_ends


class Files:
    """What is known of single files, and where it is noted."""

    def __init__(self, found: Sorted, sealed: Sealed, keep_damaged: bool, progress: Progress | None) -> None:
        """Note in ``found``. ``keep_damaged``: copy what is all there and fails its checksum, too."""
        self.found = found
        self.sealed = sealed
        self.keep_damaged = keep_damaged
        self.progress = progress

    def state(self, member: Component) -> None:
        """Sort a file that is no model of this folder: it is copied whole, or lost."""
        problem = self.problem(member)
        if problem is not None and member.path in self.found.unindexed:
            self.found.left_out.append(
                f"{problem}; its shards are intact, and repair writes it anew from them"
            )
            return
        proven = False
        if problem is None and (why := self.sealed.files([member.path]).get(member.path)) is not None:
            problem = Lost(str(member.path), None, why) if why else None
            proven = not why
        if problem is None:
            self.whole(member, proven=proven)
        else:
            self.damaged(member, problem)

    def damaged(self, member: Component, problem: Lost) -> None:
        """Note a file that is not whole: lost, or kept when that was asked for and all of it is there."""
        if self.keep_damaged and member.problem is None:
            self.found.copy(member.path)
            self.found.damaged.append(problem)
        else:
            self.found.lost.append(problem)

    def whole(self, member: Component, *, proven: bool) -> None:
        """Take a whole file over. ``proven``: it has its sha256, or all its tensors have."""
        self.found.copy(member.path)
        if not proven and not _has_checksums(member):
            places = (
                Place(one.fqn, *one.data_offsets) for one in member.tensors if one.data_offsets is not None
            )
            self.unchecked(member.path, places)
        if member.problem is not None:
            self.found.not_checked.append(f"{member.path}, copied as it is: {member.problem.message}")

    def unchecked(self, path: PurePosixPath, places: Iterable[Place]) -> None:
        """Note what is kept of a file that has no checksums, and which of its tensors end in zeros."""
        self.found.unchecked = True
        for name, zeros in zero_ends(self.found.root / path, places).items():
            self.found.doubtful.append(Lost(str(path), name, f"it ends in {zeros} bytes of zeros"))

    def problem(self, member: Component) -> Lost | None:
        """Return what is wrong with a file, None for a whole one, and for one of a kind that is not read."""
        if isinstance(member.content, SafetensorsFile) and member.content.trailing:
            return Lost(str(member.path), None, f"{member.content.trailing} {BEHIND}")
        if member.problem is not None:
            if member.problem.kind is ProblemKind.UNSUPPORTED:
                return None
            message = f"{member.problem.kind.value}: {member.problem.message}"
            return Lost(str(member.path), None, message, member.problem.need, _have(member))
        if not isinstance(member.content, TorchFile):
            return None
        with open_reader(self.found.root / member.path) as reader:
            mismatches = crc_mismatches(member.content, reader, every_record=True, progress=self.progress)
            wrong = [name for name, _ in mismatches]
        if not wrong:
            return None
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Lost(str(member.path), None, f"the record {wrong[0]!r}{more} does not have its CRC-32")


def _has_checksums(member: Component) -> bool:
    """Whether every record of a file has a checksum, or it holds nothing whose values could change unseen."""
    if isinstance(member.content, TorchFile):
        container = member.content.container
        return isinstance(container, TorchZip) and all(one.crc or not one.size for one in container.records)
    return not isinstance(member.content, SafetensorsFile)


def _have(member: Component) -> int | None:
    return member.problem.have if member.problem is not None and member.problem.need is not None else None

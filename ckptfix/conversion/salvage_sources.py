"""Intact and damaged files of a checkpoint, sorted one by one.

New files get the names that stock loaders look for: ``load_state`` and ``from_pretrained`` take
``model.safetensors`` and ``pytorch_model.bin``, ``load_state`` of FSDP with full state dicts
``pytorch_model_fsdp.bin`` alone (accelerate 1.15, ``checkpointing.py``, ``fsdp_utils.py``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import index_name, model_file, parse_file_name
from ckptfix.checkpoint.folder import Component, ProblemKind
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import Content, state_problem
from ckptfix.diagnosis.contents import Recorded
from ckptfix.diagnosis.target import Target
from ckptfix.errors import FormatError
from ckptfix.formats.safetensors_file import SafetensorsFile, WeightsIndex
from ckptfix.formats.torch_file import UNTYPED, TorchFile, crc_mismatches
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import AnyPath, FileReader, lexists, names_in, relative, stat_of
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, RECEIPT
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.hashing import FileJob, Hashed, Scheme, TensorJob, first_place, hash_all
from ckptfix.tensors.salvaging import BEHIND, SHIFTED, Lost, SavedDict
from ckptfix.tensors.stored import StoredTensor
from ckptfix.wording import count_of


class Stems(NamedTuple):
    """The name of a new file without its suffix, as safetensors and as a torch file. ``is_torch``:
    the latter.

    It is a torch file, too, where safetensors lacks a dtype.
    """

    safetensors: str
    torch: str
    is_torch: bool = False


def stems_of(stem: str, taken: Collection[str], *, is_folder: bool = False) -> Stems:
    """Return the new names for the weights of a file ``stem``, or of a DCP folder of this name.

    ``taken``: names of files that exist already, or will. A user's own name stays, and so does any
    name when the one that loaders look for is taken.
    """
    folder = parse_folder_name(stem) if is_folder else None
    if folder is not None and folder.role is Role.MODEL:
        return Stems(
            _free(_stem(".safetensors", folder.index), ".safetensors", taken, stem),
            _free(_stem(".bin", folder.index), ".bin", taken, stem),
        )
    name = None if is_folder else parse_file_name(f"{stem}.bin")
    wanted = stem
    if (
        name is not None
        and name.stem.partition(".")[0] == model_file(".bin").stem
        and name.model is not None
    ):
        variant = f".{name.model.variant}" if name.model.variant else ""
        wanted = _stem(".safetensors", name.index) + variant
    return Stems(
        _free(wanted, ".safetensors", taken, stem),
        _free(stem, ".bin", taken, stem),
        is_torch=name is not None
        and name.load_order is not None
        and name.stem != model_file(".bin").stem,
    )


def _stem(suffix: str, index: int) -> str:
    return str(model_file(suffix, index)).removesuffix(suffix)


def _free(wanted: str, suffix: str, taken: Collection[str], own: str) -> str:
    """Return the wanted name if it is free, else the own one if that is free, else a new one."""
    for stem in (wanted, own):
        if not _names(stem, suffix) & set(taken):
            return stem
    while _names(own, suffix) & set(taken):
        own += "-salvaged"
    return own


def _names(stem: str, suffix: str) -> set[str]:
    """Return the names of one model: its file, and the index of its shards, which loaders may read
    instead.
    """
    return {f"{stem}{suffix}", index_name(stem, suffix)}


class PartOfModel(Struct, frozen=True, kw_only=True):
    """One damaged state dict: where its tensors come from, and the name of the new file."""

    source: str
    stems: Stems
    found: SavedDict


class SalvagePlan(Struct):
    """Plan of a salvage.

    ``copied``: intact and other files. ``components``: the number of components of the checkpoint.

    ``doubtful``: kept data that ends in zeros, that may be shifted, or that changed since it was
    sealed, perhaps on purpose. ``left_out``: parts of the source that do not belong in the new
    folder, in words. ``notes``: the names of the saved files, in words. ``unindexed``: folders of
    intact shards whose index is missing or unusable. ``absent``: the files among ``lost`` that the
    source lacks. ``advice``: what to do when nothing matches the manifest, else "".
    ``unchecked``: whether data without a checksum was kept.
    """

    root: AnyPath
    copied: list[PurePosixPath] = field(default_factory=list)
    components: int = 0
    parts: list[PartOfModel] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    doubtful: list[Lost] = field(default_factory=list)
    damaged: list[Lost] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unindexed: list[PurePosixPath] = field(default_factory=list)
    advice: str = ""
    unchecked: bool = False

    def copy(self, path: PurePosixPath) -> None:
        """Copy a file unchanged."""
        self.copied.append(path)
        self.components += 1

    def leave_journal(self, where: PurePosixPath) -> None:
        """Note that ckptfix's own files in a folder stay behind; the receipt of a migration is not
        mentioned.
        """
        if set(names_in(self.root / where / JOURNAL)) != {PurePosixPath(RECEIPT).name}:
            subject = "it describes" if where.parts else "its manifest and journal describe"
            self.left_out.append(f"{where / JOURNAL}: {subject} the source, not the new folder")


OTHER = "its sha256 differs from the manifest"


class Sealed:
    """The digests of the manifest; only they show flipped bits in safetensors files, which have no
    checksums.

    ``problem``: why it cannot be understood, "" if it can. ``equal``, ``unequal``: the number of
    files and tensors with the same and with another digest, up to now.
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
        # The manifest is damaged: salvage goes on without it.
        except (FormatError, OSError) as error:
            self.problem = str(error)
        self._recorded = Recorded(manifest, target)

    def files(self, paths: Iterable[PurePosixPath]) -> dict[PurePosixPath, str]:
        """Return sealed file -> "" when its sha256 matches, else the reason."""
        found: dict[PurePosixPath, str] = {}
        jobs: dict[PurePosixPath, list[FileJob]] = {}
        schemes: dict[PurePosixPath, Scheme] = {}
        for path in paths:
            if str(path) in self._recorded.sha256:
                try:
                    size = stat_of(self._root / path).st_size
                    schemes[path] = self._recorded.scheme_of(str(path), size)
                    jobs[path] = schemes[path].jobs(FileJob(self._root / path, size))
                except OSError as error:
                    found[path] = f"cannot be read: {error.strerror or error}"
        results = iter(
            hash_all([job for parts in jobs.values() for job in parts], progress=self._progress)
        )
        for path, parts in jobs.items():
            one = schemes[path].joined([next(results) for _ in parts])
            found[path] = self._unlike(one, self._recorded.sha256[str(path)])
        return found

    def is_sealed(self, paths: Iterable[PurePosixPath]) -> bool:
        """Return whether one of these files has a digest."""
        return any(str(path) in self._recorded.sha256 for path in paths)

    def digests(self, label: str) -> Mapping[str, str]:
        """Return name -> digest of the tensors of one model."""
        return self._recorded.tensors.get(label, {})

    def models(self, *labels: str) -> dict[str, Mapping[str, str]]:
        """Return label -> key -> digest for the models in a file, an index or a folder."""
        return {
            label: digests
            for label, digests in self._recorded.tensors.items()
            if digests and (label in labels or label.startswith(tuple(f"{one}[" for one in labels)))
        }

    def expected(self, label: str) -> frozenset[str]:
        """Return the keys that the files of a model had, without ties that only the manifest
        lists.
        """
        return frozenset(self._recorded.tensors[label].keys() - self._recorded.aliases[label])

    def changed(
        self, digests: Mapping[str, str], tensors: Iterable[StoredTensor]
    ) -> dict[str, str]:
        """Return key -> reason for the tensors that differ from their digest. Reads all that have
        one.
        """
        sealed = [one for one in tensors if one.fqn in digests]
        hashed = hash_all([TensorJob(one) for one in sealed], progress=self._progress)
        words = {
            one.fqn: self._unlike(found, digests[one.fqn])
            for one, found in zip(sealed, hashed, strict=True)
        }
        return {name: why for name, why in words.items() if why}

    def judged(
        self, found: SavedDict, digests: Mapping[str, str], *, keep_damaged: bool
    ) -> SavedDict:
        """Return a state dict without the tensors that differ from their digest, or with them among
        the damaged.
        """
        known = {one.name for one in found.damaged}
        changed = self.changed(digests, (one for one in found.tensors if one.fqn not in known))
        sound = frozenset(digests.keys() - changed.keys())
        found = replace(found, unchecked=found.unchecked - sound)
        if not changed:
            return found
        wrong = tuple(
            Lost(self._home(one), one.fqn, changed[one.fqn])
            for one in found.tensors
            if one.fqn in changed
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
        """Yield the missing files that the manifest lists."""
        recorded = self._recorded
        for name in sorted(recorded.sha256.keys() | recorded.sizes.keys() | recorded.repaired):
            if not lexists(self._root / name):
                yield name

    def _home(self, tensor: StoredTensor) -> str:
        path = first_place(tensor.layout)[0]
        return str(relative(path, self._root)) if path != Path() else ""

    def _unlike(self, found: Hashed, recorded: str) -> str:
        """Return why a tensor differs from its digest, "" when it matches."""
        if found.problem:
            return f"it cannot be read: {found.problem}"
        is_equal = found.digest == recorded
        self.equal += is_equal
        self.unequal += not is_equal
        return "" if is_equal else OTHER


PAGE = 4096
"""Bytes of a page, which a file system writes or loses as one."""

_BLOCK = 1 << 20


class TensorLocation(NamedTuple):
    """A contiguous tensor: the bytes from ``begin`` to ``end`` of its file."""

    name: str
    begin: int
    end: int


_LEAST = 64
"""Bytes: fewer zeros at the end of a file may be a small bias that was never trained."""


def zero_ends(path: AnyPath, places: Iterable[TensorLocation]) -> dict[str, int]:
    """Return key -> number of zero bytes at the end of a tensor: a page or more, or up to the end
    of the file, whose last page may be a short one.

    After a crash the last pages of a file are often zeros that were never written. Reads the last
    page of every tensor, and more of it while the bytes are zero. Raises OSError, FormatError.
    """
    found = {}
    with open_reader(path) as reader:
        tail = _zeros_before(reader, 0, reader.size)
        last_page = max(_LEAST, reader.size % PAGE or PAGE)
        limit = reader.size - tail if tail >= last_page else reader.size
        for name, begin, end in places:
            zeros = end - begin if begin >= limit else _zeros_before(reader, begin, end)
            if zeros >= PAGE or end > max(begin, limit):
                found[name] = zeros
    return found


def _zeros_before(reader: FileReader, begin: int, end: int) -> int:
    """Return the number of zero bytes right before ``end``, at most back to ``begin``."""
    position, length = end, PAGE
    while position > begin:
        block = reader.read(max(begin, position - length), min(length, position - begin))
        kept = len(block.rstrip(b"\0"))
        position -= len(block) - kept
        if kept:
            break
        length = _BLOCK
    return end - position


class Files:
    """Single files: intact ones are copied, others are lost, or kept although damaged."""

    def __init__(
        self, found: SalvagePlan, sealed: Sealed, keep_damaged: bool, progress: Progress | None
    ) -> None:
        """Collect the results in ``found``. ``keep_damaged``: also copy data of full length that
        fails its checksum.
        """
        self.found = found
        self.sealed = sealed
        self.keep_damaged = keep_damaged
        self.progress = progress

    def state(self, member: Component) -> None:
        """Sort a file that is not a model of this folder: copy it if it is intact, else note the
        loss.
        """
        problem = self.problem(member)
        if problem is not None and member.path in self.found.unindexed:
            self.found.left_out.append(
                f"{problem}; its shards are intact, and repair rebuilds it from them"
            )
            return
        proven = False
        if (
            problem is None
            and (why := self.sealed.files([member.path]).get(member.path)) is not None
        ):
            problem = Lost(str(member.path), None, why) if why else None
            proven = not why
        if problem is None:
            self.whole(member, proven=proven)
        else:
            self.damaged(member, problem)

    def damaged(self, member: Component, problem: Lost) -> None:
        """Note a damaged file: lost, or kept when that was requested and its length is right."""
        if self.keep_damaged and member.problem is None:
            self.found.copy(member.path)
            self.found.damaged.append(problem)
        else:
            self.found.lost.append(problem)

    def whole(self, member: Component, *, proven: bool) -> None:
        """Copy an intact file. ``proven``: its sha256 matches, or the digests of all its tensors
        do.
        """
        self.found.copy(member.path)
        if not proven and not _has_checksums(member):
            places = (
                TensorLocation(one.fqn, *one.data_offsets)
                for one in member.tensors
                if one.data_offsets is not None
            )
            self.unchecked(member.path, places)
            if isinstance(member.content, TorchFile) and member.content.trailing:
                extra = count_of(member.content.trailing, "extra byte")
                reason = f"{SHIFTED}: {extra} after its end"
                self.found.doubtful.append(Lost(str(member.path), None, reason))
        if isinstance(member.content, TorchFile):
            self._wrong_content(member, member.content)
        if member.problem is not None:
            self.found.not_checked.append(
                f"{member.path}, copied unchanged: {member.problem.message}"
            )

    def _wrong_content(self, member: Component, content: TorchFile) -> None:
        """Note a copied file whose content is not what its name promises: what belongs there is
        lost.
        """
        wrong = state_problem(member.name, content)
        if wrong is None:
            return
        said = Lost(
            str(member.path),
            None,
            f"it holds {wrong.holds}, not {wrong.expected.value}; copied unchanged",
        )
        if wrong.content is not None:
            self.found.lost.append(said)
        elif wrong.expected is Content.MODEL:
            # A script may load it by a class of its own.
            self.found.doubtful.append(said)

    def unchecked(self, path: PurePosixPath, places: Iterable[TensorLocation]) -> None:
        """Note a kept file without checksums, and its tensors that end in zeros."""
        self.found.unchecked = True
        for name, zeros in zero_ends(self.found.root / path, places).items():
            self.found.doubtful.append(Lost(str(path), name, f"its last {zeros} bytes are zeros"))

    def problem(self, member: Component) -> Lost | None:
        """Return the problem of a file, None for an intact one and for one of a kind that is not
        read.
        """
        if isinstance(member.content, SafetensorsFile) and member.content.trailing:
            return Lost(str(member.path), None, f"{member.content.trailing} {BEHIND}")
        if member.problem is not None:
            if member.problem.kind is ProblemKind.UNSUPPORTED:
                return None
            message = f"{member.problem.kind.value}: {member.problem.message}"
            return Lost(str(member.path), None, message, member.problem.need, _have(member))
        if not isinstance(member.content, TorchFile):
            return None
        if UNTYPED in member.content.tree.refused_opcodes:
            return Lost(str(member.path), None, "torch cannot load a legacy file of this dtype")
        with open_reader(self.found.root / member.path) as reader:
            mismatches = crc_mismatches(
                member.content, reader, every_record=True, progress=self.progress
            )
            wrong = [name for name, _ in mismatches]
        if not wrong:
            return None
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Lost(str(member.path), None, f"CRC-32 mismatch in the record {wrong[0]!r}{more}")


def _has_checksums(member: Component) -> bool:
    """Return whether checksums cover every value of a file."""
    if isinstance(member.content, TorchFile):
        container = member.content.container
        return isinstance(container, TorchZip) and all(
            one.crc or not one.size for one in container.records
        )
    # An index has no values of its own.
    return isinstance(member.content, WeightsIndex)


def _have(member: Component) -> int | None:
    return (
        member.problem.have
        if member.problem is not None and member.problem.need is not None
        else None
    )

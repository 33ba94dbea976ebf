"""The intact part of a damaged file: the tensors all of whose bytes are there, and the lost ones,
with the reasons.
"""

import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.safetensors_file import COPIED_AS_TEXT, has_converted_lines, read_safetensors
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_partial import PartialTorchFile, StorageLocation, read_partial
from ckptfix.formats.torch_pickle import PickledStateDict, name_lists, state_dicts
from ckptfix.formats.torch_tensors import PickledTensor
from ckptfix.storage.files import AnyPath, FileReader
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.single_files import (
    LISTED,
    bounded_layout,
    held_beside,
    leads_to,
    module_versions,
    recorded_ties,
    run,
)
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor
from ckptfix.wording import count_of

_BLOCK = 1 << 20
_BESIDE = "salvage keeps only the state dicts of modules, and this is outside them"
SHIFTED = "its values may be shifted"
"""The doubt about a tensor of a file with extra or missing bytes."""
BEHIND = "bytes are left out: they follow the last tensor, and safetensors readers refuse that"
"""The words that follow the number of bytes at the end of a safetensors file."""


class Lost(NamedTuple):
    """A loss: a tensor or value by its name (None: the file), and why.

    ``need`` and ``have``: bytes of the tensor or the file, from its first one on; None where there
    is nothing to count.
    """

    file: str
    name: str | None
    reason: str
    need: int | None = None
    have: int | None = None

    def __str__(self) -> str:
        sizes = f" ({self.have} of {self.need} bytes are there)" if self.need is not None else ""
        where = (
            [self.file] if self.file != "." or self.name is None else []
        )  # a DCP folder that is itself the source
        return ": ".join(
            [*where, *([] if self.name is None else [repr(self.name)]), f"{self.reason}{sizes}"]
        )


class SavedDict(Struct, frozen=True, kw_only=True):
    """A state dict of a damaged file: the keys that lead to it, and its intact tensors.

    ``ties``: other name -> name in ``tensors``. ``damaged``: tensors kept on request although they
    are damaged. ``unchecked``: the names of the tensors that have no checksum. ``doubtful``: those
    of them whose bytes may not be where they were written. ``metadata``: the words in the header of
    a safetensors file, without the ties.
    """

    path: tuple[str, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    damaged: tuple[Lost, ...] = ()
    unchecked: frozenset[str] = frozenset()
    doubtful: tuple[Lost, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@paused_gc()
def salvage_safetensors(path: AnyPath) -> SavedDict:
    """Return the tensors of a safetensors file that end inside of it.

    Raises FormatError for a file that was copied as text, and for one without a complete header.
    """
    with open_reader(path) as reader:
        file = read_safetensors(reader, cut=True)
        if file.trailing > 0 and has_converted_lines(reader, file):
            raise FormatError(COPIED_AS_TEXT)
    tensors, lost = [], []
    for one in file.tensors:
        assert one.data_offsets is not None, "a tensor of safetensors is one run"
        begin, end = one.data_offsets
        if end > max(begin, file.size):
            have = max(0, file.size - begin)
            lost.append(
                Lost(path.name, one.fqn, f"the file ends at byte {file.size}", end - begin, have)
            )
        else:
            tensors.append(StoredTensor(one.fqn, one.dtype, one.shape, run(path, one.data_offsets)))
    names = {tensor.fqn for tensor in tensors}
    recorded = recorded_ties(file)
    ties = {name: kept for name, kept in recorded.items() if kept in names}
    gone = (
        Lost(path.name, name, f"it is tied to {kept!r}, which is lost")
        for name, kept in recorded.items()
        if kept not in names
    )
    doubtful: tuple[Lost, ...] = ()
    if file.trailing > 0:
        lost.append(Lost(path.name, None, f"{file.trailing} {BEHIND}"))
        reason = f"{SHIFTED}: {count_of(file.trailing, 'extra byte')} in the file"
        doubtful = tuple(Lost(path.name, one.fqn, reason) for one in tensors if 0 not in one.shape)
    return SavedDict(
        tensors=tuple(tensors),
        ties=ties,
        lost=(*lost, *gone),
        unchecked=frozenset(names),
        doubtful=doubtful,
        metadata={
            key: text
            for key, text in file.metadata.items()
            if key not in recorded and key != LISTED
        },
    )


@paused_gc()
def salvage_torch(
    path: AnyPath, *, keep_damaged: bool = False, progress: Progress | None = None
) -> tuple[SavedDict, ...]:
    """Return the intact part of each state dict of a module in a file of torch.save, of others if
    there is none.

    Reads every storage that has a checksum. ``keep_damaged``: keep tensors whose checksum
    disagrees, or whose storage does not end as it should, when their bytes are all there.
    ``progress`` gets bytes read. Other contents of the file are lost with the first. Raises
    FormatError when nothing can be read, or it holds no state dict.
    """
    with open_reader(path) as reader:
        file = read_partial(reader)
        problems = {
            key: problem
            for key, place in file.places.items()
            if (
                problem := place.problem
                or _checksum_problem(reader, place, file.storages[key].nbytes, progress)
            )
        }
    broken: dict[tuple[tuple[str, ...], str], str] = {}
    every = state_dicts(file.tree, file.storages, broken)
    models = {
        names.path
        for names in name_lists(file.tree)
        if names.kind == "state dict" and names.is_model
    }
    wanted = [one for one in every if one.path in models] or list(every)
    if not wanted:
        raise FormatError("it holds no state dict")
    found = _TorchSalvage(path, file, problems, broken, keep_damaged)
    paths = [one.path for one in wanted]
    first, *others = (found.of(one, paths) for one in wanted)
    beside = (Lost(path.name, name, _BESIDE) for name in held_beside(file.tree, paths))
    return replace(first, lost=(*first.lost, *beside)), *others


def _checksum_problem(
    reader: FileReader, place: StorageLocation, nbytes: int, progress: Progress | None
) -> str:
    """Return in words that a complete storage does not have its CRC-32; "" when it has, or none was
    written.
    """
    if not place.crc or place.have < nbytes:
        return ""
    crc = 0
    for done in range(0, nbytes, _BLOCK):
        block = reader.read(place.offset + done, min(_BLOCK, nbytes - done))
        crc = zlib.crc32(block, crc)
        if progress is not None:
            progress(len(block))
    if crc == place.crc:
        return ""
    return f"CRC-32 mismatch in its storage (expected {place.crc:08x}, found {crc:08x})"


class _TorchSalvage:
    """Sorts the tensors of one file."""

    def __init__(
        self,
        path: AnyPath,
        file: PartialTorchFile,
        problems: Mapping[str, str],
        broken: Mapping[tuple[tuple[str, ...], str], str],
        keep_damaged: bool,
    ) -> None:
        self._path = path
        self._file = file
        self._problems = problems
        self._broken = broken
        self._keep_damaged = keep_damaged
        ranges = {key: (place.offset, place.have) for key, place in file.places.items()}
        # With lengths that end where the file does: a tensor in what is there of a storage is
        # intact.
        self._as_file = TorchFile(None, file.tree, (), ranges, 0)

    def of(self, state_dict: PickledStateDict, saved: Collection[tuple[str, ...]]) -> SavedDict:
        """Return the intact part of one state dict; ``saved``: the paths of all that are saved,
        which may lie in it.
        """
        first: dict[object, str] = {}
        tensors: list[StoredTensor] = []
        ties: dict[str, str] = {}
        lost: list[Lost] = []
        damaged: list[Lost] = []
        doubtful: list[Lost] = []
        for one in state_dict.tensors:
            problem = self._problem(one)
            if problem is not None:
                is_there = problem.have is not None and problem.have == problem.need
                if not (self._keep_damaged and is_there):
                    lost.append(problem)
                    continue
                damaged.append(problem)
            elif sign := self._doubt(one):
                doubtful.append(Lost(self._path.name, one.fqn, f"{SHIFTED}: {sign}"))
            layout = self._layout(one)
            if isinstance(layout, Lost):
                lost.append(layout)
                continue
            if 0 not in one.shape and (kept := first.setdefault(one.view, one.fqn)) != one.fqn:
                ties[one.fqn] = kept
            else:
                tensors.append(StoredTensor(one.fqn, one.dtype, one.shape, layout))
        for name in state_dict.opaque_keys:
            if not leads_to((*state_dict.path, name), saved):
                reason = self._broken.get(
                    (state_dict.path, name), "it is not a tensor of a state dict"
                )
                lost.append(Lost(self._path.name, name, reason))
        return SavedDict(
            path=state_dict.path,
            tensors=tuple(tensors),
            ties=ties,
            versions=module_versions(self._as_file, state_dict.path),
            lost=tuple(lost),
            damaged=tuple(damaged),
            unchecked=frozenset(one.fqn for one in state_dict.tensors if self._is_unchecked(one)),
            doubtful=tuple(doubtful),
        )

    def _is_unchecked(self, one: PickledTensor) -> bool:
        place = self._file.places.get(one.storage_key)
        return place is not None and not place.crc

    def _doubt(self, one: PickledTensor) -> str:
        place = self._file.places.get(one.storage_key)
        return place.doubt if place is not None and 0 not in one.shape else ""

    def _layout(self, one: PickledTensor) -> Layout | Lost:
        """Return the location of a tensor whose bytes are there, or the reason not to write it
        out.
        """
        if 0 in one.shape:
            return Contiguous(())
        try:
            return bounded_layout(self._path, self._as_file, one)
        except OperationError as error:
            reason = str(error).removeprefix(f"{self._path}: {one.fqn!r} ").partition("; next:")[0]
            return Lost(self._path.name, one.fqn, f"it {reason}")

    def _problem(self, one: PickledTensor) -> Lost | None:
        """Return why a tensor is not intact, with all its bytes needed and those there; None when
        it is.
        """
        width = DTYPE_BITS[one.dtype] // 8
        need = _last(one) * width
        if need == 0:
            reason = self._file.names_problem
            return Lost(self._path.name, one.fqn, reason, 0, 0) if reason else None
        begin = one.storage_offset * width
        place = self._file.places.get(one.storage_key)
        if place is None:
            return Lost(
                self._path.name,
                one.fqn,
                self._file.reason or "its storage is missing",
                need - begin,
                0,
            )
        have = max(0, min(place.have, need) - begin)
        problem = self._file.names_problem or self._problems.get(one.storage_key, "")
        if have < need - begin:
            problem = (
                place.problem or f"its storage ends at byte {place.offset + place.have} of the file"
            )
        return Lost(self._path.name, one.fqn, problem, need - begin, have) if problem else None


def _last(one: PickledTensor) -> int:
    """Return where a tensor ends in its storage, in elements; 0 for one without any."""
    if 0 in one.shape:
        return 0
    reach = sum((length - 1) * step for length, step in zip(one.shape, one.stride, strict=True))
    return one.storage_offset + reach + 1

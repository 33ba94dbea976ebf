"""What is whole in a folder of torch.distributed.checkpoint: every item there, in its length, with its checksums."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_coverage import dcp_problems
from ckptfix.formats.dcp_metadata import DcpMetadata, StoredItem
from ckptfix.formats.dcp_names import model_names
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.storage.reading import open_reader
from ckptfix.weights.salvaging import Lost, SavedDict
from ckptfix.weights.sharded import dcp_weights, read_metadata_of, whole_tensors

_BESIDE = "it is beside the model, which alone is saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFolder:
    """``reason``: why it cannot be copied as it is, "" for a whole one. ``found``: what is whole of its model, if so.

    ``damaged``: what is kept in a copy although it is damaged, as was asked for. ``unchecked``: whether there are items
    without a checksum.
    """

    reason: str = ""
    found: SavedDict | None = field(default=None, repr=False)
    damaged: tuple[Lost, ...] = ()
    unchecked: bool = False


def judge(root: Path, where: PurePosixPath, *, keep_damaged: bool, progress: Progress | None) -> JudgedFolder:
    """Look at every item of a DCP folder; reads what has a checksum."""
    folder = root / where
    try:
        metadata = read_metadata_of(folder)
    except OperationError as error:
        return JudgedFolder(reason=_said(error))
    items = _Items(folder, metadata, progress)
    wrong = items.gone if keep_damaged else {**items.changed, **items.gone}
    reason = next((f"{fqn!r}: {words}" for fqn, words in wrong.items()), "")
    damaged = (
        tuple(Lost(str(where), fqn, words) for fqn, words in items.changed.items()) if keep_damaged else ()
    )
    if model_names(metadata) is None:
        return JudgedFolder(reason=reason, damaged=damaged, unchecked=items.unchecked)
    if not reason:
        try:
            dcp_weights(root, where, 0)
        except OperationError as error:
            reason = _said(error)
    found = _whole_part(folder, str(where), metadata, wrong, items.changed) if reason else None
    return JudgedFolder(reason=reason, found=found, damaged=damaged, unchecked=items.unchecked)


def _whole_part(
    folder: Path, where: str, metadata: DcpMetadata, wrong: "dict[str, str]", changed: "dict[str, str]"
) -> SavedDict:
    """Return what is whole of the model; all that is beside it is lost, as the new file holds only the model."""
    model = model_names(metadata)
    assert model is not None, "it was looked for"
    tensors, lost = whole_tensors(folder)
    by_name = {name: fqn for fqn, name in model.names.items()}
    wrong = wrong.copy()
    for tensor in metadata.tensors:
        if 0 in tensor.shape:  # nothing of its item is needed
            wrong.pop(tensor.fqn, None)
    lost |= {name: wrong[fqn] for name, fqn in by_name.items() if fqn in wrong and name not in lost}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    beside = {fqn: wrong.get(fqn, _BESIDE) for fqn in every if fqn not in model.names}
    kept = tuple(tensor for tensor in tensors if tensor.fqn not in lost)
    return SavedDict(
        tensors=kept,
        lost=tuple(Lost(where, name, words) for name, words in (*lost.items(), *beside.items())),
        damaged=tuple(
            Lost(where, one.fqn, changed[by_name[one.fqn]]) for one in kept if by_name[one.fqn] in changed
        ),
    )


class _Items:
    """What is wrong with items: name -> words. ``gone``: not there. ``changed``: there, without its checksum."""

    def __init__(self, folder: Path, metadata: DcpMetadata, progress: Progress | None) -> None:
        self.gone = {problem.fqn: problem.message for problem in dcp_problems(metadata)}
        self.changed: dict[str, str] = {}
        self.unchecked = False
        by_file: dict[PurePosixPath, list[StoredItem]] = {}
        for item in metadata.stored.values():
            by_file.setdefault(item.path, []).append(item)
        for path, items in sorted(by_file.items()):
            try:
                for item, problem, is_there in self._of_file(folder / path, items, progress):
                    (self.changed if is_there else self.gone).setdefault(item.fqn, f"{path}: {problem}")
            except OSError as error:
                words = f"{path}, which holds parts of it, cannot be read: {error.strerror or error}"
                self.gone |= {item.fqn: words for item in items if item.fqn not in self.gone}

    def _of_file(
        self, path: Path, items: "list[StoredItem]", progress: Progress | None
    ) -> Iterator[tuple[StoredItem, str, bool]]:
        """Yield the items that are not whole, why, and whether all their bytes are there."""
        with open_reader(path) as reader:
            for item in sorted(items, key=lambda one: one.offset):
                end = item.offset + item.length
                if end > reader.size:
                    yield item, f"it has {reader.size} bytes, {end} are needed", False
                    continue
                window = reader.window(item.offset, item.length)
                if item.transforms or window.read(0, min(4, item.length)) != b"PK\3\4":
                    self.unchecked = True
                    continue
                try:
                    archive = read_zip(window)
                    self.unchecked |= not all(record.crc or not record.size for record in archive.records)
                    wrong = next(crc_mismatches(archive, window, every_record=True, progress=progress), None)
                except FormatError as error:
                    yield item, f"the item at byte {item.offset}: {error}", False
                    continue
                if wrong is not None:
                    yield (
                        item,
                        f"the record {wrong.name!r} at byte {item.offset} does not have its CRC-32",
                        True,
                    )


def _said(error: OperationError) -> str:
    return str(error).partition("; next:")[0]

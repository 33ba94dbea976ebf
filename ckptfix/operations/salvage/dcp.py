"""What is whole in a folder of torch.distributed.checkpoint: every item there, in its length, with its checksums."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.sharded import belongs
from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_coverage import dcp_problems
from ckptfix.formats.dcp_metadata import METADATA_NAME, DcpMetadata, StoredItem
from ckptfix.formats.dcp_names import model_names
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.operations.salvage.sealed import Sealed
from ckptfix.storage.reading import open_reader
from ckptfix.weights.salvaging import Lost, SavedDict
from ckptfix.weights.sharded import dcp_weights, read_metadata_of, whole_tensors
from ckptfix.wording import count_of

_BESIDE = "it is next to the model, which alone is saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFolder:
    """``reason``: why it cannot be copied as it is, "" for a whole one. ``found``: what is whole of its model, if so.

    ``damaged``: what is kept in a copy although it is damaged, as was asked for. ``doubtful``: files that are not as
    they were sealed, while all tensors of the model are. ``unchecked``: whether there are items without a checksum.
    ``unnamed``: files of a save that no item is in.
    """

    reason: str = ""
    found: SavedDict | None = field(default=None, repr=False)
    damaged: tuple[Lost, ...] = ()
    doubtful: tuple[Lost, ...] = ()
    unchecked: bool = False
    unnamed: tuple[str, ...] = ()


def judge(
    root: Path, where: PurePosixPath, sealed: Sealed, *, keep_damaged: bool, progress: Progress | None
) -> JudgedFolder:
    """Look at every item of a DCP folder; reads what has a checksum, or a digest in the manifest."""
    folder = root / where
    try:
        metadata = read_metadata_of(folder)
    except OperationError as error:
        return JudgedFolder(reason=_said(error))
    items = _Items(folder, metadata, progress)
    own = [where / name for name in sorted(os.listdir(folder)) if belongs(name)]
    of_files = sealed.files(path for path in own if (root / path).is_file())
    unlike = tuple(Lost(str(path), None, why) for path, why in of_files.items() if why)
    model = model_names(metadata)
    digests = {name: one for found in sealed.models(str(where)).values() for name, one in found.items()}
    unchecked = items.unchecked and not (len(of_files) == len(own) and not unlike)
    if model is None or (unlike and not digests):  # which item it is cannot be told
        reason = items.reason(keep_damaged) or ("" if keep_damaged or not unlike else str(unlike[0]))
        if reason:
            many = count_of(len(metadata.tensors) + len(metadata.items), "item")
            reason = f"none of its {many} is saved, as not all of them are intact: {reason}"
        damaged = (*items.kept(str(where)), *unlike) if keep_damaged else ()
        return JudgedFolder(reason=reason, damaged=damaged, unchecked=unchecked)
    if unlike or len(of_files) < len(own):
        changed = sealed.changed(digests, whole_tensors(folder)[0]) if digests else {}
        items.changed |= {fqn: changed[name] for fqn, name in model.names.items() if name in changed}
        unchecked &= not digests.keys() >= set(model.names.values())
    reason = items.reason(keep_damaged)
    if not reason:
        try:
            dcp_weights(root, where, 0)
        except OperationError as error:
            reason = _said(error)
    wrong = items.wrong(keep_damaged)
    return JudgedFolder(
        reason=reason,
        found=_whole_part(folder, str(where), metadata, wrong, items.changed) if reason else None,
        damaged=items.kept(str(where)) if keep_damaged else (),
        doubtful=unlike if not items.changed else (),
        unchecked=unchecked,
        unnamed=tuple(
            str(path.relative_to(where)) for path in own if not _is_used(path.relative_to(where), metadata)
        ),
    )


def _is_used(path: PurePosixPath, metadata: DcpMetadata) -> bool:
    return path.name == METADATA_NAME or path in metadata.files


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
    """What is wrong with items: name -> words. ``gone``: not there. ``changed``: not with its checksum or digest."""

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

    def wrong(self, keep_damaged: bool) -> dict[str, str]:
        """Return what is not to be kept."""
        return self.gone if keep_damaged else {**self.changed, **self.gone}

    def reason(self, keep_damaged: bool) -> str:
        """Return why the folder cannot be copied as it is, "" when it can."""
        return next((f"{fqn!r}: {words}" for fqn, words in self.wrong(keep_damaged).items()), "")

    def kept(self, where: str) -> tuple[Lost, ...]:
        """Return what a copy holds although it is damaged."""
        return tuple(Lost(where, fqn, words) for fqn, words in self.changed.items())

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

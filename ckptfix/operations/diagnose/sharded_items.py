"""The items of DCP folders: does each tensor begin as one, and do the bytes of all have their checksums?

Only the first bytes of a tensor are read, or with ``data`` all bytes of every item. What may stand there: a zip archive
of ``torch.save``, or for a tensor safetensors (``formats.dcp_items``).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_metadata import StoredItem
from ckptfix.formats.safetensors_file import looks_like_safetensors
from ckptfix.formats.sniff import describe_content
from ckptfix.formats.torch_zip import crc_mismatches, read_zip
from ckptfix.operations.findings import CrcMismatch, Finding, MalformedFile, NotATensorFile
from ckptfix.storage.permission import unreadable
from ckptfix.storage.reading import FileReader, open_reader
from ckptfix.wording import count_of, list_names

_ZIP = b"PK\3\4"
_HEAD = 9  # what tells safetensors: a length of 8 bytes, and the brace behind it


def diagnose_items(
    root: Path, states: Iterable[ShardedState], *, data: bool, progress: Progress | None = None
) -> tuple[list[Finding], dict[PurePosixPath, str]]:
    """Find the files whose tensors are none, and with ``data`` those of which a byte has changed.

    Returns these and the files that may not be read, with the reason. ``progress`` is called with byte counts. What
    is cut short or missing is left to ``diagnose_shard_files``.
    """
    findings: list[Finding] = []
    refused: dict[PurePosixPath, str] = {}
    for state in states:
        for path, items in _by_file(state, data=data).items():
            if path in state.broken or path in state.unreadable:
                continue
            try:
                with open_reader(root / path) as reader:
                    findings += _of_file(reader, path, items, data, progress)
            except OSError as error:
                refused[path] = unreadable(root / path, error)
    return findings, refused


def _by_file(state: ShardedState, *, data: bool) -> Mapping[PurePosixPath, list[StoredItem]]:
    """Return the items in each file that is there, in the order in which they lie: all with ``data``, else tensors."""
    found: dict[PurePosixPath, list[StoredItem]] = {}
    by_file = state.metadata.items_by_file() if state.metadata is not None else {}
    for name, items in by_file.items():
        path = state.path / name
        file = state.files.get(path)
        size = -1 if file is None else file.size
        held = [
            item
            for item in items
            if (data or item.offsets is not None)
            and item.offset + item.length <= size
            and item.length
            and not item.transforms
        ]
        if held:
            found[path] = sorted(held, key=lambda item: item.offset)
    return found


def _of_file(
    reader: FileReader, path: PurePosixPath, items: list[StoredItem], data: bool, progress: Progress | None
) -> Iterator[Finding]:
    begins: dict[int, bytes] = {}
    for item in items:
        if item.offset not in begins:
            begins[item.offset] = reader.read(item.offset, min(_HEAD, reader.size - item.offset))
    tensors = [item for item in items if item.offsets is not None]
    bad = [item for item in tensors if not _begins_as_one(begins[item.offset])]
    if bad:
        yield _no_tensors(reader, path, tensors, bad)
    if data and not bad:
        yield from _changed(reader, path, items, begins, progress)


def _begins_as_one(head: bytes) -> bool:
    return head.startswith(_ZIP) or looks_like_safetensors(head)


def _no_tensors(
    reader: FileReader, path: PurePosixPath, items: list[StoredItem], bad: list[StoredItem]
) -> Finding:
    words = describe_content(reader, json=True)
    if len(bad) == len(items) and words is not None and words != "a zip archive":
        return NotATensorFile(path=path, content=words)
    names = list_names(dict.fromkeys(item.fqn for item in bad))
    detail = (
        f"{len(bad)} of {count_of(len(items), 'item')} with tensors {'begins' if len(bad) == 1 else 'begin'} as "
        f"nothing that torch writes, the first at byte {bad[0].offset}: {names}"
    )
    return MalformedFile(path=path, detail=detail)


def _changed(
    reader: FileReader,
    path: PurePosixPath,
    items: list[StoredItem],
    begins: Mapping[int, bytes],
    progress: Progress | None,
) -> Iterator[Finding]:
    """Check the CRC of every record of every item. Bytes that several items claim are read once."""
    end = 0
    for item in items:
        if not begins[item.offset].startswith(_ZIP) or item.offset < end:
            continue
        end = item.offset + item.length
        window = reader.window(item.offset, item.length)
        try:
            archive = read_zip(window)
        except FormatError as error:
            detail = f"the item {item.fqn!r:.200} at byte {item.offset}: {error}"
            yield MalformedFile(path=path, detail=detail)
            continue
        for record in crc_mismatches(archive, window, every_record=True, progress=progress):
            yield CrcMismatch(path=path, record=record.name, tensors=(item.fqn,))

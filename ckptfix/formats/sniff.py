"""Kinds of files by their first bytes, for a file whose name is wrong."""

import re

from ckptfix.errors import FormatError
from ckptfix.formats.safetensors_file import looks_like_safetensors
from ckptfix.formats.torch_file import MAGIC_NUMBER
from ckptfix.formats.torch_zip import read_records
from ckptfix.storage.files import FileReader

_HEAD = 512
_ZIP = b"PK\x03\x04"
_POINTER = b"version https://git-lfs.github.com/spec"
_OTHERS = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"BZh", "bzip2 data"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"GGUF", "a GGUF model"),
    *((magic[::-1], "a GGML model") for magic in (b"ggml", b"ggmf", b"ggjt", b"ggla")),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "an ELF program"),
    (b"\x00\x05\x16\x07", "a macOS AppleDouble file"),
)


_ONNX = re.compile(rb"\x08[\x03-\x20](\x12[\x01-\x40][ -~]|[\x1a\x22\x32\x3a\x42])")
"""The first fields of a protobuf ``ModelProto``, which has no magic: the version of the format, the
producer's name.
"""

_CTRANSLATE2 = re.compile(rb"[\x01-\x0f]\0{3}[\x05-\x40]\0[A-Za-z0-9]{1,60}Spec\0")
"""The version of the format and the name of the model's specification (``serialize`` of
CTranslate2's converters).
"""

_IDENTIFIERS = (
    (b"TFL3", "a TensorFlow Lite model"),
    (b"ORTM", "an onnxruntime model"),
    (b"ET1", "an ExecuTorch program"),
)
"""Identifiers of flatbuffers, which follow the first 4 bytes."""

_OF_TORCH = re.compile(r"[^/]+/(data\.pkl|data/[0-9]+|byteorder|version|\.data/serialization_id)")
_OF_EXPORT = re.compile(r"([^/]+/)?(archive_format|serialized_exported_program\.json)")
_JSON = re.compile(rb"""\s*(\{\s*("|\}|\Z)|\[\s*(["{\[\]\-0-9tfn]|\Z))""")


def describe_content(reader: FileReader, *, json: bool = False) -> str | None:
    """Return the kind of the content in words, None when the first bytes do not show it.

    ``json``: name a JSON file as well; leave it out for a file that should be one.
    """
    if reader.size == 0:
        return "an empty file"
    head = reader.read(0, min(_HEAD, reader.size))
    if head.startswith(_POINTER):
        return "a git-LFS pointer: the real file was never downloaded"
    if head.startswith(_ZIP):
        return "a zip archive"
    if (words := _other(head)) is not None:
        return words
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "an HTML or XML page, probably from a failed download"
    if json and looks_like_json(head):
        return "a JSON file"
    if not any(head) and not any(reader.read(reader.size - len(head), len(head))):
        return "zeros instead of a header, as after a lost write"
    return None


def other_format(reader: FileReader) -> str | None:
    """Return the kind of an intact file of another program, None for a file that may be torch's."""
    head = reader.read(0, min(_HEAD, reader.size))
    if not head.startswith(_ZIP):
        return _other(head)
    try:
        _, _, records = read_records(reader)
    except FormatError:
        return None  # a damaged archive, whatever it was
    names = [record.name for record in records]
    if all(name.endswith(".npy") for name in names):
        return "a numpy npz archive"
    if any(map(_OF_EXPORT.fullmatch, names)):
        return "a torch.export program"
    return None if any(map(_OF_TORCH.fullmatch, names)) else "a zip archive from another program"


def _other(head: bytes) -> str | None:
    if _ONNX.match(head):
        return "an ONNX model"
    if _CTRANSLATE2.match(head):
        return "a CTranslate2 model"
    for identifier, words in _IDENTIFIERS:
        if head.startswith(identifier, 4):
            return words
    return next((words for signature, words in _OTHERS if head.startswith(signature)), None)


_END_OF_ZIP = b"PK\5\6"

_FIRST_RECORD = b"/data.pkl"
"""torch.save writes this record first: its name ends within the first bytes, whatever became of the
magic before.
"""

_OF_TENSORS = b"torch._utils\n_rebuild_"
"""Name of what makes a tensor, in the pickle that a first record holds: where even its name is gone."""

_LEGACY = b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little")
"""The magic number of torch's old format as a pickle has it, behind two bytes."""


def may_be_of_torch(reader: FileReader) -> bool:
    """Return whether a file is a damaged one of torch or safetensors by its first bytes, or those
    of a zip's end.
    """
    size = min(_HEAD, reader.size)
    head = reader.read(0, size)
    # One byte may be all that a cut left of a zip file, and one of the first four may be wrong.
    is_zip = sum(map(int.__eq__, head, _ZIP)) >= 3
    if is_zip or head.startswith((b"PK", b"\x80")) or head == b"P" or looks_like_safetensors(head):
        return True
    return any(
        part in head for part in (_ZIP, _FIRST_RECORD, _OF_TENSORS, _LEGACY)
    ) or _END_OF_ZIP in reader.read(reader.size - size, size)


def text_format(reader: FileReader) -> str | None:
    """Return the kind of a text file, None for any other and for what a failed download leaves."""
    head = reader.read(0, min(_HEAD, reader.size))
    words = describe_content(reader, json=True)
    if words is not None:
        return words if looks_like_json(head) else None
    is_text = all(byte >= 0x20 or byte in b"\t\n\r" for byte in head) and 0x7F not in head
    return "a text file" if is_text and _is_utf8(head) else None


def looks_like_json(head: bytes) -> bool:
    """Return whether the first bytes of a file begin a JSON object or list: no header of a tensor
    file is pure text.
    """
    head = head.removeprefix(b"\xef\xbb\xbf")
    if not _JSON.match(head) or any(byte < 0x20 and byte not in b"\t\n\r" for byte in head):
        return False
    return _is_utf8(head)


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # a character that the window cuts
    return True

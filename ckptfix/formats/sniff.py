"""What a file really is, by its first bytes, when it is not what its name says."""

import re

from ckptfix.storage.reading import FileReader

_HEAD = 512
_SIGNATURES = (
    (b"version https://git-lfs.github.com/spec", "a git-LFS pointer: the real file was never downloaded"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"BZh", "bzip2 data"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"GGUF", "a GGUF model"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "an ELF program"),
)


_JSON = re.compile(rb"""\s*(\{\s*("|\}|\Z)|\[\s*(["{\[\]\-0-9tfn]|\Z))""")


def describe_content(reader: FileReader, *, json: bool = False) -> str | None:
    """Return what the content is, in words, or None when the first bytes tell nothing.

    ``json``: name a JSON file as well; leave it out for a file that should be one.
    """
    if reader.size == 0:
        return "an empty file"
    head = reader.read(0, min(_HEAD, reader.size))
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "an HTML or XML page, probably the answer of a failed download"
    if json and looks_like_json(head):
        return "a JSON file"
    if not any(head) and not any(reader.read(reader.size - len(head), len(head))):
        return "all zeros where a header should be, as after a lost write"
    return None


def looks_like_json(head: bytes) -> bool:
    """Whether the first bytes of a file begin a JSON object or list: no header of a tensor file is pure text."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    if not _JSON.match(head) or any(byte < 0x20 and byte not in b"\t\n\r" for byte in head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # a character that the window cuts
    return True

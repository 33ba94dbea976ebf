"""What a file really is, by its first bytes, when it is not what its name says."""

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


def describe_content(reader: FileReader) -> str | None:
    """Return what the content is, in words, or None when the first bytes tell nothing."""
    if reader.size == 0:
        return "an empty file"
    head = reader.read(0, min(_HEAD, reader.size))
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "an HTML or XML page, probably the answer of a failed download"
    if not any(head) and not any(reader.read(reader.size - len(head), len(head))):
        return "all zeros where a header should be, as after a lost write"
    return None

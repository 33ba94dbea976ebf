"""Random reads of one open file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptfix.errors import FormatError


@dataclass(frozen=True, slots=True)
class FileReader:
    """An open file, or a window of one: its descriptor, its size in bytes when it was opened, and where it starts."""

    fd: int
    size: int
    start: int = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``.

        Raises FormatError when the range is not inside the file.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(f"bytes {offset} to {offset + length} are needed, the file has {self.size}")
        data = os.pread(self.fd, length, self.start + offset)
        while len(data) < length:  # one read returns at most 2 GiB, and less on some network file systems
            more = os.pread(self.fd, length - len(data), self.start + offset + len(data))
            if not more:
                raise FormatError(f"the file ends at byte {offset + len(data)}, it had {self.size} bytes")
            data += more
        return data

    def fill(self, view: memoryview, offset: int) -> None:
        """Read bytes from ``offset`` on until ``view`` is full. Any thread may. Raises FormatError as ``read`` does."""
        if offset < 0 or offset + len(view) > self.size:
            raise FormatError(f"bytes {offset} to {offset + len(view)} are needed, the file has {self.size}")
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], self.start + offset + done)
            if not got:
                raise FormatError(f"the file ends at byte {offset + done}, it had {self.size} bytes")
            done += got

    def window(self, offset: int, length: int) -> "FileReader":
        """Return a reader of ``length`` bytes from ``offset``, in which offsets count from there.

        Raises FormatError when the range is not inside the file.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(f"bytes {offset} to {offset + length} are needed, the file has {self.size}")
        return FileReader(self.fd, length, self.start + offset)


@contextmanager
def open_reader(path: Path) -> Iterator[FileReader]:
    """Open ``path`` for reading. Raises OSError as ``open`` does."""
    # O_NONBLOCK: a FIFO that happens to be called model.bin must not hang the scan.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield FileReader(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)

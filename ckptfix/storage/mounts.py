"""File systems that are object stores inside: gcsfuse, s3fs, goofys, Mountpoint, rclone and
blobfuse.

The rename of a folder does not commit it there. gcsfuse (without a hierarchical namespace), s3fs,
goofys and blobfuse copy one object after the other and delete the old ones; a kill in between
leaves both halves. Mountpoint refuses it. Two names cannot be exchanged, and locks are not those of
other machines.
"""

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = "/proc/self/mountinfo"
"""File in which the kernel lists the mounts of this process; another one in tests."""

_PROGRAMS = {
    "gcsfuse": "gcsfuse",
    "s3fs": "s3fs",
    "goofys": "goofys",
    "geesefs": "geesefs",
    "mountpoint-s3": "mountpoint-s3",
    "rclone": "rclone mount",
    "blobfuse": "blobfuse",
    "blobfuse2": "blobfuse2",
}
"""Name in the kernel's list -> name of the program in messages."""

_LOCAL = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "jfs",
        "tmpfs",
        "vfat",
        "exfat",
        "ntfs3",
    }
)
"""Types of disks that one machine has for itself, so that one inode there is one file."""

UNNAMED = "an unnamed FUSE program, such as goofys"
"""goofys before 2022 mounts with the type ``fuse`` and the bucket as its source."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")


class ObjectMount(NamedTuple):
    """A mount of an object store. ``source``: the bucket, or what the program calls itself."""

    point: str
    program: str
    source: str


def object_mount_of(
    path: str | os.PathLike[str], mountinfo: str | None = None
) -> ObjectMount | None:
    """Return the mount of an object store on which a path lies, also one that does not exist yet;
    None for a disk.

    Of two mounts on one place the later one counts, as for the kernel.
    """
    real = os.path.realpath(path)
    best: _Mount | None = None
    for one in _mounts(mountinfo):
        inside = one.point == "/" or real == one.point or real.startswith(f"{one.point}/")
        if inside and (best is None or len(one.point) >= len(best.point)):
            best = one
    return None if best is None else _object_mount(best.point, best.kind, best.source)


def local_devices(mountinfo: str | None = None) -> frozenset[int]:
    """Return the devices, as ``os.stat`` has them, of file systems that no other machine can have
    mounted, too.
    """
    return frozenset(one.device for one in _mounts(mountinfo) if one.kind in _LOCAL)


class _Mount(NamedTuple):
    """A line of the kernel's list."""

    device: int
    point: str
    kind: str
    source: str


def _mounts(mountinfo: str | None) -> tuple[_Mount, ...]:
    """Return every mount, in the kernel's order."""
    try:
        return _parsed(Path(mountinfo or MOUNTINFO).read_bytes())
    except OSError:
        return ()


@functools.lru_cache(1)
def _parsed(text: bytes) -> tuple[_Mount, ...]:
    """Return the mounts of the kernel's list. Twenty of them take 0.2 ms, which every save of a run
    would pay.
    """
    found: list[_Mount] = []
    for line in text.splitlines():
        # ID, parent, device, root, place, options, optional fields, "-", type, source, options
        # (proc(5))
        before, _, after = line.partition(b" - ")
        words, rest = before.split(b" "), after.split(b" ")
        if len(words) < 6 or len(rest) < 2:
            continue
        major, _, minor = words[2].partition(b":")
        device = os.makedev(int(major), int(minor)) if major.isdigit() and minor.isdigit() else -1
        found.append(_Mount(device, _text(words[4]), _text(rest[0]), _text(rest[1])))
    return tuple(found)


def _object_mount(point: str, kind: str, source: str) -> ObjectMount | None:
    if kind == "fuse":
        known = _PROGRAMS.get(source.partition("#")[0])
        is_path = source.startswith("/")  # a device, or the folder that an overlay is of
        return None if known is None and is_path else ObjectMount(point, known or UNNAMED, source)
    program = _PROGRAMS.get(kind.removeprefix("fuse."))
    return None if program is None else ObjectMount(point, program, source)


def _text(word: bytes) -> str:
    """Return a word of the list as text: spaces and the like are written in octal digits there."""
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 255]), word))

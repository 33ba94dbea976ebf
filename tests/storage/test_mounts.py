"""Mounts of object stores, and of disks, as the kernel lists them."""

import os
from pathlib import Path

import pytest

from ckptfix.storage.mounts import UNNAMED, local_devices, object_mount_of

LIST = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
44 22 0:43 / /mnt/gcs rw,nosuid,nodev,relatime shared:49 - fuse.gcsfuse my-bucket rw,user_id=2001
45 22 0:44 / /mnt/s3\040fs rw,nosuid,nodev,relatime - fuse.s3fs s3fs rw,user_id=0
46 22 0:45 / /mnt/goofys rw,relatime - fuse.goofys my-bucket rw
47 22 0:46 / /mnt/old rw,relatime - fuse my-bucket rw
48 22 0:47 / /mnt/mountpoint rw,relatime shared:1 master:2 - fuse mountpoint-s3 rw
49 22 0:48 / /mnt/rclone rw - fuse.rclone remote:bucket rw
50 44 0:49 / /mnt/gcs/scratch rw - tmpfs tmpfs rw
51 22 0:50 / /mnt/ssh rw - fuse.sshfs host:/ rw
52 22 0:51 / /mnt/device rw - fuse /dev/fuse rw
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> str:
    (tmp_path / "mountinfo").write_text(LIST)
    return str(tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("path", "program"),
    [
        ("/mnt/gcs/runs/new", "gcsfuse"),
        ("/mnt/gcs", "gcsfuse"),
        ("/mnt/gcs2", None),
        ("/mnt/s3 fs", "s3fs"),
        ("/mnt/goofys", "goofys"),
        ("/mnt/old", UNNAMED),
        ("/mnt/mountpoint", "mountpoint-s3"),
        ("/mnt/rclone", "rclone mount"),
        ("/mnt/device/x", None),
        ("/mnt/gcs/scratch/x", None),
        ("/mnt/ssh/x", None),
        ("/home", None),
    ],
)
def test_the_nearest_mount_counts(mountinfo: str, path: str, program: str | None) -> None:
    found = object_mount_of(path, mountinfo)
    assert (found.program if found is not None else None) == program


def test_disks_of_one_machine_are_told_from_what_machines_share(mountinfo: str) -> None:
    assert local_devices(mountinfo) == {os.makedev(8, 1), os.makedev(0, 49)}
    assert local_devices("/nowhere") == frozenset()

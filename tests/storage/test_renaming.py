"""A rename onto a name that must be free, with the kernel's help and without it."""

import errno
import os
from pathlib import Path

import pytest

from ckptfix.storage import atomic
from ckptfix.storage.atomic import put_back, rename_to_free


@pytest.mark.parametrize("code", [None, errno.EINVAL, errno.ENOSYS])
def test_a_taken_name_is_never_taken(
    tmp_path: Path, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        assert code is not None
        raise OSError(code, os.strerror(code))

    if code is not None:
        monkeypatch.setattr(atomic, "renameat2", refuse)
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        rename_to_free(tmp_path / "a", tmp_path / "b")
    rename_to_free(tmp_path / "a", tmp_path / os.fsdecode(b"c\xff"))
    assert sorted(os.listdir(os.fsencode(tmp_path))) == [b"b", b"c\xff"]
    with pytest.raises(FileNotFoundError):
        rename_to_free(tmp_path / "a", tmp_path / "d")


def test_other_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EIO, "ill")

    monkeypatch.setattr(atomic, "renameat2", refuse)
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(OSError, match="ill"):
        rename_to_free(tmp_path / "a", tmp_path / "b")


def test_putting_back_over_another_name_of_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    os.link(tmp_path / "a", tmp_path / "kept")
    put_back(tmp_path / "kept", tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    put_back(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]

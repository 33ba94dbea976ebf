"""Paths as a shell takes them, and what a user may name."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import UsageError
from ckptfix.storage.paths import existing, shell_path
from ckptfix.wording import escape
from tests.sampling import examples

BYTES = st.binary(min_size=1, max_size=12) | st.text(min_size=1, max_size=12).map(
    lambda text: text.encode("utf-8", "replace")
)
NAMES = st.lists(BYTES.map(lambda name: name.replace(b"\0", b"'")), min_size=30, max_size=30)


@given(NAMES)
@settings(max_examples=examples(25), deadline=None)
def test_bash_reads_back_every_name(names: list[bytes]) -> None:
    words = " ".join(shell_path(os.fsdecode(name)) for name in names)
    assert escape(words) == words
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True
    ).stdout
    expected = [b"./" + name if name.startswith(b"-") else name for name in names]
    assert read.split(b"\0")[:-1] == expected


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        (b"runs/step_1", "runs/step_1"),
        (b"my run", "'my run'"),
        (b"-x", "./-x"),
        (b"a\xff1", "$'a\\3771'"),
        (b"tab\there", "$'tab\\011here'"),
        ("größe".encode(), "'größe'"),
        ("\u202e".encode(), "$'\\342\\200\\256'"),
    ],
)
def test_a_plain_name_stays_plain(name: bytes, quoted: str) -> None:
    assert shell_path(os.fsdecode(name)) == quoted


def test_what_is_neither_a_folder_nor_a_file_is_called_by_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
    for name, words in (
        ("pipe", "is a named pipe: expected a folder or a regular file"),
        ("socket", "is a socket: expected"),
        ("device", "is a character device: expected"),
        ("link", "is a broken link: gone does not exist"),
        ("nothing", "does not exist"),
        ("pipe/below", "does not exist"),
    ):
        with pytest.raises(UsageError) as refused:
            existing(tmp_path / name)
        assert str(refused.value).startswith(f"{tmp_path / name} {words}")
    with pytest.raises(UsageError, match="the path is empty"):
        existing("")
    assert existing(tmp_path) == tmp_path

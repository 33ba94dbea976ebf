"""The records of an upload: what ckptfix writes is read, and no other value passes."""

import json
from typing import Any

import pytest

from ckptfix.errors import FormatError
from ckptfix.storage.markers import Begun, Commit, Uploaded, parse_begun, parse_commit

BEGUN = Begun("x", 1.0, "h", 1, {"model.safetensors": 3, ".ckptfix/manifest.json": 0})
COMMIT = Commit("x", 2.0, {"sub/a.bin": Uploaded(3, "ab", "e"), "b\udcff": Uploaded(0, "ab")})


def test_what_is_written_is_read() -> None:
    assert parse_begun(BEGUN.to_bytes()) == BEGUN
    assert parse_commit(COMMIT.to_bytes()) == COMMIT


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/../x", "/x", "a//b", "a/", "a\0b", "\ud800"]
)
def test_a_name_that_no_folder_can_hold_is_refused(name: str) -> None:
    begun = Begun("x", 1.0, "h", 1, {name: 3})
    with pytest.raises(FormatError, match="upload record is malformed: invalid file"):
        parse_begun(begun.to_bytes())
    with pytest.raises(FormatError, match="commit marker is malformed: invalid file"):
        parse_commit(Commit("x", 2.0, {name: Uploaded(3, "ab")}).to_bytes())


@pytest.mark.parametrize("size", [-1, 1 << 63, 10**400, True, None, "3", "\ud800", 1.5, []])
def test_a_size_that_no_file_has_is_refused(size: Any) -> None:
    begun, commit = json.loads(BEGUN.to_bytes()), json.loads(COMMIT.to_bytes())
    begun["files"]["model.safetensors"] = size
    commit["objects"]["sub/a.bin"][0] = size
    with pytest.raises(FormatError, match="is malformed"):
        parse_begun(json.dumps(begun).encode())
    with pytest.raises(FormatError, match="is malformed"):
        parse_commit(json.dumps(commit).encode())

"""What a file really is, by its first bytes."""

from pathlib import Path

import pytest

from ckptfix.formats.sniff import describe_content
from ckptfix.storage.reading import open_reader


def described(folder: Path, data: bytes, **options: bool) -> str | None:
    path = folder / "file"
    path.write_bytes(data)
    with open_reader(path) as reader:
        return describe_content(reader, **options)


@pytest.mark.parametrize(
    "text",
    ['{"error": "not found"}', '\n  {\r\n\t"a": 1}', "[1, 2]", "[]", "{}", "\ufeff{}", '{"a": "' + "ß" * 400 + '"}'],
)  # fmt: skip
def test_a_json_file(tmp_path: Path, text: str) -> None:
    for shift in ("", " "):  # so that the window cuts a character
        assert (
            described(
                tmp_path,
                (shift + text).encode() if text[0] != "\ufeff" else text.encode(),
                json=True,
            )
            == "a JSON file"
        )
    assert described(tmp_path, text.encode()) is None  # an index should be one


@pytest.mark.parametrize(
    "data",
    [b"{\0\0\0\0\0\0\0{}", b'[\0\0\0\0\0\0\0{"a":1}', b"{a: 1}", b"[x]", b'{"\xff\xfe": 1}' + b" " * 600,
     b"text", b"{\x01"],
)  # fmt: skip
def test_no_json_file(tmp_path: Path, data: bytes) -> None:
    assert described(tmp_path, data, json=True) is None

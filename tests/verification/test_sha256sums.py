"""Lists of checksums: the grammar of coreutils, whatever the names, and checkpoints compared with
such a list.
"""

import codecs
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix import OperationError, UsageError, seal, verify
from ckptfix.verification.sha256sums import Sums, parse_sums
from ckptfix.verification.verify_report import Kind, Outcome
from tests.verification.sealed import KINDS, flip, place, wrong

DIGEST = hashlib.sha256(b"").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
NAMES = st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name)
"""Any name that a path on Linux can have, slashes included."""

NASTY = [
    b"plain.bin", b"two words", b" leading", b"trailing ", b"*star", b"(bracket) = x",
    b"back\\slash", b"new\nline", b"carriage\rreturn", b"ends\r", b"\\leading", b"\\n", b"tab\t",
    b"#hash", b"caf\xc3\xa9", b"not utf-8 \xff", b"-dash", b"SHA256 (x) = y", b"a" * 200,
]  # fmt: skip


def escaped(name: bytes) -> tuple[bytes, bytes]:
    """Return the backslash before a line, and the name, as coreutils 9 writes them."""
    if not any(one in name for one in b"\\\n\r"):
        return b"", name
    return b"\\", name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def plain(name: bytes, digest: str = DIGEST, mode: bytes = b" ") -> bytes:
    mark, text = escaped(name)
    return mark + digest.encode() + b" " + mode + text + b"\n"


def tagged(name: bytes, digest: str = DIGEST) -> bytes:
    mark, text = escaped(name)
    return mark + b"SHA256 (" + text + b") = " + digest.encode() + b"\n"


@given(
    st.lists(NAMES, min_size=1, max_size=5, unique=True),
    st.sampled_from([b" ", b"*"]),
    st.booleans(),
)
def test_every_name_comes_back(names: list[bytes], mode: bytes, is_tagged: bool) -> None:
    lines = [tagged(name) if is_tagged else plain(name, mode=mode) for name in names]
    expected = {os.fsdecode(name): DIGEST for name in names}
    assert parse_sums(b"".join(lines), "list") == Sums(expected, 0)
    without_end = b"".join(lines)[:-1]
    assert parse_sums(without_end, "list") == Sums(expected, 0)
    with_dos_ends = b"".join(lines).replace(b"\n", b"\r\n")
    assert parse_sums(with_dos_ends, "list") == Sums(expected, 0)
    with_bom = codecs.BOM_UTF8 + b"".join(lines)
    assert parse_sums(with_bom, "list") == Sums(expected, 0)


@given(st.lists(NAMES, min_size=1, max_size=5, unique=True))
def test_every_name_comes_back_from_a_list_with_nul_bytes(names: list[bytes]) -> None:
    data = b"".join(DIGEST.encode() + b"  " + name + b"\0" for name in names)
    assert parse_sums(data, "list") == Sums({os.fsdecode(name): DIGEST for name in names}, 0)


@given(st.binary(max_size=300))
def test_no_bytes_stop_the_parser(data: bytes) -> None:
    sums = parse_sums(data, "list")
    assert sums.digests == {}, "a random line of 64 hexadecimal digits does not happen"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--text", "--binary", "--tag", "--zero"])
def test_lists_of_coreutils_itself(tmp_path: Path, option: str) -> None:
    expected = {}
    for number, name in enumerate(NASTY):
        (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).write_bytes(str(number).encode())
        expected[f"./{os.fsdecode(name)}"] = hashlib.sha256(str(number).encode()).hexdigest()
    arguments = [
        os.fsencode("sha256sum"),
        option.encode(),
        b"--",
        *(b"./" + name for name in NASTY),
    ]
    made = subprocess.run(arguments, cwd=tmp_path, capture_output=True, check=True).stdout
    assert parse_sums(made, "list") == Sums(expected, 0)
    if option != "--zero":  # coreutils cannot check those
        done = subprocess.run(
            ["sha256sum", "--check", "--strict"], cwd=tmp_path, input=made, capture_output=True
        )
        assert done.returncode == 0


@pytest.mark.parametrize(
    ("data", "names", "unread"),
    [
        (f"{DIGEST} name\n", [], 1),  # an old BSD
        (f"{DIGEST}  a\n{DIGEST} b\n", ["a"], 1),
        (f"{DIGEST.upper()}  a\n", ["a"], 0),
        (f"  {DIGEST}  a\n", ["a"], 0),
        (f"SHA256(a)= {DIGEST}\n", ["a"], 0),  # openssl dgst
        (f"# a comment\n\n{DIGEST}  a\n", ["a"], 0),
        (f"MD5 (a) = {DIGEST[:32]}\nSHA512 (a) = {DIGEST * 2}\n", [], 2),
        (f"{DIGEST[:-1]}  a\n{DIGEST}0  a\n{DIGEST}\n{DIGEST} \n", [], 4),
        (f"\\{DIGEST}  a\\tb\n\\{DIGEST}  a\\\n", [], 2),  # escapes that there are not
        ("-----BEGIN PGP SIGNED MESSAGE-----\n", [], 1),
        (f"SHA256 (a) = {DIGEST} b\nSHA256 (a = {DIGEST}\n", [], 2),
    ],
)  # fmt: skip
def test_lines_that_are_none_are_counted(data: str, names: list[str], unread: int) -> None:
    sums = parse_sums(data.encode(), "list")
    assert list(sums.digests) == names
    assert set(sums.digests.values()) <= {DIGEST}
    assert sums.unread == unread


def test_two_checksums_of_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"list: refused.*'a' is listed with two checksums"):
        parse_sums(plain(b"a") + tagged(b"a", OTHER), "list")
    assert parse_sums(plain(b"a") + tagged(b"a"), "list").digests == {"a": DIGEST}
    KINDS["safetensors"](tmp_path)
    (tmp_path / "SHA256SUMS").write_bytes(
        plain(b"model.safetensors") + plain(b"./model.safetensors", OTHER)
    )
    with pytest.raises(OperationError, match=r"'model.safetensors' is listed with two checksums"):
        verify(tmp_path)


def listed(folder: Path, *, at: Path | None = None, option: str = "--text") -> Path:
    """Write the list of every file in a folder, as ``sha256sum`` does in the folder ``at``."""
    at = at or folder
    names = sorted(os.path.relpath(path, at) for path in folder.rglob("*") if path.is_file())
    made = subprocess.run(
        ["sha256sum", option, *names], cwd=at, capture_output=True, check=True
    ).stdout
    (at / "SHA256SUMS").write_bytes(made)
    return at / "SHA256SUMS"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["inside", "next to it"])
def test_a_list_is_found_where_there_is_no_manifest(tmp_path: Path, kind: str, where: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS[kind](folder)
    sums = listed(folder, at=folder if where == "inside" else tmp_path)
    report = verify(folder)
    assert report.status == 0
    assert report.count(Kind.FILE)[Outcome.MATCH] == len(list(folder.iterdir())) - (
        where == "inside"
    )
    assert f"{sums}: sha256sums, not signed: anyone could have written it" in str(report)
    piece = place(folder, "layers.1.weight")
    flip(piece.path, piece.offset)
    report = verify(folder)
    assert report.status == 1
    assert {name: what for name, what in wrong(report).items() if what[0] != "extra"} == {
        piece.path.name: ("changed", None)
    }
    assert (
        "next: get the differing files again from their source, then: ckptfix verify --sha256sums "
        f"{sums}" in str(report)
    )


def test_a_manifest_goes_before_a_list(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    (tmp_path / "SHA256SUMS").write_bytes(plain(b"model.safetensors", OTHER))
    assert verify(tmp_path).status == 1
    assert seal(tmp_path).status == 0
    assert verify(tmp_path).status == 0
    assert verify(tmp_path, sha256sums=[tmp_path / "SHA256SUMS"]).status == 1


def test_what_a_list_does_not_cover_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    sums = listed(folder)
    with sums.open("a") as file:
        file.write(f"{OTHER}  ../outside\n{OTHER}  /etc/passwd\nnot a line\n{OTHER}  SHA256SUMS\n")
    (folder / "added.py").write_text("")
    report = verify(folder)
    assert report.status == 0
    said = str(report)
    assert f"not checked: added.py: not covered by {sums}" in said
    assert f"not checked: 2 checksums in {sums} for files outside the checkpoint" in said
    assert f"not checked: 1 line in {sums} without a sha256 and a file name" in said
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    report = verify(folder, sha256sums=[sums])
    assert report.status == 1
    assert wrong(report)["model.safetensors"][0] == "renamed"


def test_a_list_about_other_files_verifies_nothing(tmp_path: Path) -> None:
    KINDS["safetensors"](tmp_path)
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{OTHER}  ../outside\n")
    assert verify(tmp_path).status == 3  # it is not even taken for the list of this checkpoint
    assert "there is no manifest" in str(verify(tmp_path))
    with pytest.raises(UsageError, match=r"SHA256SUMS lists no file in .*the list's own folder$"):
        verify(tmp_path, sha256sums=[sums])


def test_a_list_that_was_made_inside_and_lies_elsewhere_leads_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    sums = listed(folder).rename(tmp_path / "model.sums")
    with pytest.raises(
        UsageError, match=f"next, if it was created in {folder}: mv {sums} {folder}$"
    ):
        verify(folder, sha256sums=[sums])


def test_a_list_without_the_weights_is_not_taken_by_itself(tmp_path: Path) -> None:
    KINDS["sharded"](tmp_path)
    (tmp_path / "README.md").write_text("x")
    sums = listed(tmp_path)
    assert verify(tmp_path).status == 0
    sums.write_text(
        "".join(line for line in sums.read_text().splitlines(True) if "-00002-of" not in line)
    )
    assert "nothing was verified: there is no manifest" in str(verify(tmp_path))
    report = verify(tmp_path, sha256sums=[sums])
    assert report.status == 0
    assert f"not checked: model-00002-of-00002.safetensors: not covered by {sums}" in str(report)


def test_a_list_must_have_all_that_may_hold_weights_to_be_taken_by_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    listed(tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(b"weights of a kind that is not read")
    with pytest.raises(UsageError, match="has no checkpoint files"):
        verify(tmp_path)
    listed(tmp_path)
    assert verify(tmp_path).status == 0
    KINDS["safetensors"](tmp_path)
    listed(tmp_path)
    assert verify(tmp_path).status == 0
    KINDS["bin"](tmp_path)
    assert "nothing was verified: there is no manifest" in str(verify(tmp_path)), (
        "a loader may take this one"
    )


def test_one_file_is_compared_with_its_line(tmp_path: Path) -> None:
    KINDS["sharded"](tmp_path)
    sums = listed(tmp_path)
    name = "model-00001-of-00002.safetensors"
    report = verify(tmp_path / name, sha256sums=[sums])
    assert report.status == 0
    assert [(item.name, item.outcome) for item in report.items] == [(name, Outcome.MATCH)]

"""Hostile and broken input, through the public functions and the command line.

Whatever a file says: check answers with findings, repair with one JSON object, soon; nothing but a
CkptfixError is raised, and what a repair changes after all, undo gives back.
"""

import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptfix import (
    CheckReport,
    CkptfixError,
    Keys,
    Policy,
    UsageError,
    check,
    diff,
    latest_checkpoint,
    migrate,
    repair,
    salvage,
    seal,
    undo,
    verify,
)
from ckptfix.cli import run
from ckptfix.conversion.uploading import upload
from tests.repairs.builders import snapshot, write_safetensors
from tests.sampling import sampled

FIXTURES = Path(__file__).parents[1] / "fixtures" / "accelerate-1.15.0"
SEEDS = {
    "safetensors": FIXTURES / "lone-nested-safetensors" / "checkpoint" / "model.safetensors",
    "zip": FIXTURES / "lone-nested-bin" / "checkpoint" / "model.bin",
    "legacy": FIXTURES / "lone-nested-legacy" / "checkpoint" / "legacy.pt",
}
TOO_LONG = 20.0
"""Seconds of the processor; each takes milliseconds to three seconds, and what is quadratic takes
minutes.
"""

MEMORY = 1 << 30
"""Address space in bytes of the process that reads bombs; Python and click alone take about 60 MB.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c").mkdir()
    return tmp_path / "c"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs where there is one: thousands of repairs flush to disk thousands of
    times.
    """
    base = Path("/dev/shm")
    root = Path(
        f"{base if base.is_dir() and os.access(base, os.W_OK) else '/tmp'}/ckptfix-test-{os.getpid()}"
    )
    root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(root)


def examined(path: Path) -> CheckReport | None:
    """Check a file or folder, soon and without changing it; None for a CkptfixError."""
    root = path if path.is_dir() else path.parent
    before = snapshot(root)
    begin = time.process_time()
    try:
        report = check(path, data=True)
    except CkptfixError:
        return None
    finally:
        assert time.process_time() - begin < TOO_LONG
        assert snapshot(root) == before
    json.dumps(report.as_json())
    return report


def codes(path: Path) -> set[str]:
    report = examined(path)
    assert report is not None
    return {finding.code for finding in report.findings}


def repaired_and_back(root: Path, path: Path, **options: Any) -> None:
    """Repair; what changed must come back with undo, and what did not change must not have."""
    before = snapshot(root)
    try:
        receipt = repair(path, **options)
    except CkptfixError:
        assert snapshot(root) == before
        return
    if receipt.transaction is None:
        assert snapshot(root) == before
    else:
        undo(path)
        assert snapshot(root) == before


def cli(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run the command line with --json: one object, at every status."""
    status = run([*arguments, "--json"])
    out, _ = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)  # refuses anything after the first object
    assert status in (0, 1, 2, 3)
    assert document["status"] == status
    return document


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_truncation_at_every_length(in_memory: Path, seed: str) -> None:
    data = SEEDS[seed].read_bytes()
    path = in_memory / SEEDS[seed].name
    for length in range(len(data)):
        path.write_bytes(data[:length])
        report = examined(path)
        assert report is not None
        assert report.status == 1, length
        found = {finding.code for finding in report.findings if finding.severity.value == "error"}
        assert found & {"truncated-file", "not-a-tensor-file", "malformed-file"}, (length, found)
        receipt = repair(path)
        assert (receipt.steps, receipt.status) == ((), 1), length
    assert [entry.name for entry in in_memory.iterdir()] == [path.name]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_whose_first_byte_is_flipped_is_damaged(in_memory: Path, seed: str) -> None:
    """No magic number begins it, and yet it is no file of another program."""
    data = SEEDS[seed].read_bytes()
    path = in_memory / SEEDS[seed].name
    path.write_bytes(bytes([data[0] ^ 0x20]) + data[1:])
    assert codes(path) & {"not-a-tensor-file", "malformed-file", "truncated-file"}


@pytest.mark.slow
@pytest.mark.parametrize("flip", [0xFF, 0x01, 0x20])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_flipped(in_memory: Path, seed: str, flip: int) -> None:
    data = SEEDS[seed].read_bytes()
    path = in_memory / SEEDS[seed].name
    end = len(data)
    if seed == "safetensors":
        end = 8 + struct.unpack_from("<Q", data)[0]
    for place in sampled(range(end)):
        path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        assert examined(path) is not None
        repaired_and_back(in_memory, path)
        shutil.rmtree(in_memory / ".ckptfix", ignore_errors=True)


def test_every_flip_of_a_zip_data_record_is_found_by_its_checksum(in_memory: Path) -> None:
    """The bytes of tensors and of the pickle have a CRC: no flip in them may pass ``check
    --data``.
    """
    data = SEEDS["zip"].read_bytes()
    path = in_memory / "model.bin"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if "/data" in info.filename]
    assert len(records) > 3
    for info in records:
        name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
        begin = info.header_offset + 30 + name_length + extra_length
        for place in range(begin, begin + info.file_size, 7):
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            report = examined(path)
            assert report is not None
            assert report.status == 1, (info.filename, place - begin)


def raw_safetensors(
    path: Path, header: bytes, data: bytes = b"", length: int | None = None
) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(
    begin: object = 0, end: object = 4, dtype: object = "U8", shape: object = (4,)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LYING_HEADERS: dict[str, bytes | Mapping[str, object]] = {
    "overlap": {"a": entry(), "b": entry(2, 6)},
    "same range": {"a": entry(), "b": entry()},
    "hole": {"a": entry(), "b": entry(5, 9)},
    "hole at the start": {"a": entry(1, 5)},
    "backwards": {"a": entry(4, 0)},
    "negative": {"a": entry(-4, 0)},
    "beyond 2^63": {"a": entry(0, 2**63, shape=(2**63,))},
    "beyond 2^64": {"a": entry(0, 2**70, shape=(2**70,))},
    "floats": {"a": entry(0.0, 4.0)},
    "booleans": {"a": entry(False, True, shape=(1,))},
    "strings": {"a": entry("0", "4")},
    "shape that overflows": {"a": entry(0, 4, shape=(2**33, 2**33, 2**33))},
    "shape of many dimensions": {"a": entry(0, 4, shape=[2**62] * 20_000)},
    "shape of strings": {"a": entry(shape="four")},
    "shape that is an empty string": {"a": entry(0, 1, shape="")},
    "shape that is an object": {"a": entry(0, 1, shape={})},
    "shape of nulls": {"a": entry(shape=[None])},
    "shape not there": {"a": {"dtype": "U8", "data_offsets": [0, 4]}},
    "three offsets": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}},
    "dtype nobody knows": {"a": entry(dtype="U3")},
    "dtype that cannot be hashed": {"a": entry(dtype={})},
    "entry is a list": {"a": []},
    "entry is a string": {"a": "x"},
    "entry is null": {"a": None},
    "metadata is a list": {"__metadata__": [], "a": entry()},
    "metadata of numbers": {"__metadata__": {"format": 1}, "a": entry()},
    "the same name twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "the same key twice in an entry": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "metadata twice": (
        b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "a number of 100,000 digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,4]}}'
    ),
    "not a number": b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}',
    "deep objects": b'{"a":' * 200_000,
    "deep lists": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep metadata": b'{"__metadata__":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "not UTF-8": b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "UTF-8 of a surrogate": b'{"\xed\xa0\x80":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "a NUL in the JSON": b'{"a\0":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "a list": b"[]",
    "something after the object": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}} x',
    "a byte order mark": b'\xef\xbb\xbf{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("what", LYING_HEADERS)
def test_headers_that_lie(folder: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    header = LYING_HEADERS[what]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = raw_safetensors(folder / "model.safetensors", raw, bytes(9))
    assert codes(path) & {"malformed-file", "truncated-file", "not-a-tensor-file"}
    before = snapshot(folder)
    document = cli(["repair", str(folder)], capsys)
    assert (document["status"], document["steps"]) == (1, [])
    assert snapshot(folder) == before


@pytest.mark.parametrize("claim", [0, 1, 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_header_lengths_that_lie(
    folder: Path, capsys: pytest.CaptureFixture[str], claim: int
) -> None:
    header = json.dumps({"a": entry()}).encode()
    path = raw_safetensors(folder / "model.safetensors", header, bytes(4), length=claim)
    assert codes(path) & {"malformed-file", "truncated-file", "not-a-tensor-file"}
    assert cli(["repair", str(path)], capsys)["status"] == 1


def test_a_name_that_comes_twice_among_many_is_found_soon(folder: Path) -> None:
    one = '":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f'"layers.{number}.weight{one}' for number in range(100_000)]
    raw_safetensors(
        folder / "model.safetensors", ("{" + ",".join([*names, names[-1]]) + "}").encode()
    )
    assert "malformed-file" in codes(folder)


def test_a_header_of_zero_bytes_everywhere(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(4096))
    (folder / "pytorch_model.bin").write_bytes(bytes(4096))
    assert codes(folder) == {"not-a-tensor-file"}


@pytest.mark.parametrize(
    "target",
    [
        "../../x",
        "../outside.safetensors",
        "/etc/passwd",
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "a\0b",
        5,
        None,
        ["x"],
    ],
)
def test_an_index_that_leaves_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], target: object
) -> None:
    outside = write_safetensors(folder.parent / "outside.safetensors", {"module.module.w": b"1"})
    before = outside.read_bytes()
    index = {"metadata": {}, "weight_map": {"module.module.w": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # Loaders follow a path to a file that exists. It is looked for, and never read or changed.
    leads_to_a_file = target in ("../outside.safetensors", "/etc/passwd")
    assert codes(folder) == (set() if leads_to_a_file else {"malformed-file"})
    assert cli(["repair", str(folder), "--keys", "bare"], capsys)["status"] == (
        3 if leads_to_a_file else 1
    )
    assert outside.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["model.safetensors.index.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "x", "a": "y"}}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map":' + "[" * 200_000,
        '{"weight_map": {}, "metadata":' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"weight_map": {}, "n": ' + "9" * 100_000 + "}",
        '{"weight_map": {"a": "\\ud800"}}',
        '{"weight_map": {"\\udfff": "model-00001-of-00001.safetensors"}}',
        '{"weight_map": {"a": "' + "x" * 100_000 + '"}}',
    ],
    ids=lambda text: text[:40] or "empty",
)
def test_an_index_that_is_no_index(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write_safetensors(folder / "model-00001-of-00001.safetensors", {"w": b"1"})
    (folder / "model.safetensors.index.json").write_text(text)
    assert examined(folder) is not None
    repaired_and_back(folder, folder)
    shutil.rmtree(folder / ".ckptfix", ignore_errors=True)
    cli(["check", str(folder)], capsys)
    cli(["repair", str(folder)], capsys)


def torch_zip(
    path: Path, pickled: bytes, names: Mapping[str, bytes] | None = None, root: str = "archive"
) -> Path:
    """Write a zip as torch.save does, as far as a reader looks."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", pickled)
        archive.writestr(f"{root}/version", b"3\n")
        archive.writestr(f"{root}/byteorder", b"little")
        for name, data in (names or {}).items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/evil",
        "archive/../../evil",
        "archive/data/../../../evil",
        "archive\\..\\evil",
        "..",
        "",
    ],
)
def test_a_zip_name_that_escapes(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = folder / "model.bin"
    # Same length, put in afterwards: zipfile itself would turn some of them into something
    # harmless.
    if name:
        torch_zip(path, b"\x80\x02}.", {"X" * len(name): b"x"})
        path.write_bytes(path.read_bytes().replace(b"X" * len(name), name.encode()))
    else:
        torch_zip(path, b"\x80\x02}.", root="")
    names = sorted(folder.parent.rglob("*"))
    assert codes(folder) & {"malformed-file", "not-a-tensor-file"}
    assert cli(["repair", str(path), "--keys", "bare"], capsys)["status"] == 1
    assert sorted(folder.parent.rglob("*")) == names


def memo_chain(levels: int) -> bytes:
    """A tuple of the tuple before, twice, so that 2 ** levels leaves hang on a few bytes."""
    parts = [b"\x80\x02)q\x00"]
    for level in range(levels):
        parts.append(b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]))
    return b"".join(parts) + b"."


def dict_chain(levels: int) -> bytes:
    """A dict with the dict before under two names: 2 ** levels paths lead to a tensor's name."""
    parts = [b"\x80\x02}q\x00"]
    for level in range(levels):
        get = b"h" + bytes([level])
        parts.append(b"}(X\x01\0\0\0a" + get + b"X\x01\0\0\0b" + get + b"uq" + bytes([level + 1]))
    return b"".join(parts) + b"."


BOMBS: dict[str, bytes] = {
    "tuples doubled by DUP": b"\x80\x02K\x01" + b"2\x86" * 100 + b".",
    "tuples doubled by the memo": memo_chain(200),
    "dicts doubled by the memo": dict_chain(200),
    "a dict in itself": b"\x80\x02}q\x00X\x01\0\0\0ah\x00s.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "LONG4 of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "LONG4 of less than nothing": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "string of 2^63": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "bytes of 2^63": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"x.",
    "bytearray of 2^63": b"\x80\x05\x96" + struct.pack("<Q", 2**63) + b"x.",
    "string of 4 GiB": b"\x80\x02X\xff\xff\xff\xffx.",
    "bytes of 2 GiB": b"\x80\x03B\xff\xff\xff\x7fx.",
    "frame of 2^63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
    "memo at 2^32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo at 10^18": b"\x80\x02Np999999999999999999\n.",
    "memo at a number of 10^6 digits": b"\x80\x02Np" + b"9" * 10**6 + b"\n.",
    "a number of 10^6 digits": b"\x80\x02I" + b"9" * 10**6 + b"\n.",
    "a long of 10^6 digits": b"\x80\x02L" + b"9" * 10**6 + b"L\n.",
    "20,000 tuples in tuples": b"\x80\x02)" + b"\x85" * 20_000 + b".",
    "20,000 lists in lists": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "20,000 dicts in dicts": (
        b"\x80\x02" + b"}X\x05\0\0\0model" * 20_000 + b"}" + b"s" * 20_000 + b"."
    ),
    "100,000 marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "POP of nothing": b"\x80\x020.",
    "GET of nothing": b"\x80\x02h\x00.",
    "no STOP": b"\x80\x02N",
    "nothing": b"\x80\x02.",
    "a protocol of the future": b"\x80\xff.",
    "a name that is a lone surrogate": b"\x80\x02}X\x03\0\0\0\xed\xa0\x80K\x01s.",
    "a global with line feeds": b"\x80\x04\x8c\x04a\nb\x1b\x8c\x02c\n\x93.",
    "EXT opcodes": b"\x80\x02\x82\x01.",
    "BUILD on a number": b"\x80\x02K\x01}b.",
    "REDUCE of a number": b"\x80\x02K\x01)R.",
    "persistent id that is a bomb": b"\x80\x02K\x01" + b"2\x86" * 100 + b"Q.",
}


@pytest.mark.parametrize("container", ["zip", "plain"])
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[pytest.mark.slow] * what.startswith("100,000")) for what in BOMBS],
)
def test_pickle_bombs(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str, container: str
) -> None:
    """Each lies there twice, as two models and as two optimizers, so that they are compared as
    well.
    """
    for name in ("pytorch_model.bin", "pytorch_model_1.bin", "optimizer.bin", "optimizer_1.bin"):
        if container == "zip":
            torch_zip(folder / name, BOMBS[what])
        else:
            (folder / name).write_bytes(BOMBS[what])
    (folder / "random_states_0.pkl").write_bytes(BOMBS[what])
    (folder / "custom_checkpoint_0.pkl").write_bytes(BOMBS[what])
    assert examined(folder) is not None
    begin = time.process_time()
    document = cli(["repair", str(folder), "--dry-run", "--models", "1", "--keys", "bare"], capsys)
    assert document["status"] in (0, 1)
    assert time.process_time() - begin < TOO_LONG
    repaired_and_back(folder, folder, policy=Policy(keys=Keys.BARE))


@pytest.mark.slow
def test_claims_of_gigabytes_take_no_memory(tmp_path: Path) -> None:
    """All bombs and all lies in a process with little address space: none runs into its end."""
    for number, bomb in enumerate(BOMBS.values()):
        (tmp_path / str(number)).mkdir()
        torch_zip(tmp_path / str(number) / "pytorch_model.bin", bomb)
        (tmp_path / str(number) / "custom_checkpoint_0.pkl").write_bytes(bomb)
        (tmp_path / str(number) / "custom_checkpoint_1.pkl").write_bytes(bomb)
    for number, claim in enumerate((2**31, 2**63)):
        raw_safetensors(tmp_path / "0" / f"{number}.safetensors", b"{}", length=claim)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "ckptfix",
            "check",
            "--data",
            "--json",
            *sorted(tmp_path.iterdir()),
        ],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert result.stderr == ""
    assert result.returncode == 1
    assert len(json.loads(result.stdout)["checkpoints"]) == len(BOMBS)


NAMES = [
    "a\nb",
    "\x1b[31mred",
    "tab\there",
    "nul\\u0000",
    "\\ud800",
    "x\\udfffy",
    "\u202eltr",
    "é",
    "重み",
    ".",
    "..w",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_kind(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The names stand in JSON as given here, so a backslash begins an escape that only JSON
    knows.
    """
    tensor = '":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    quoted = json.dumps(name, ensure_ascii=False)[1:-1].replace("\\\\u", "\\u")
    header = f'{{"module.module.{quoted}{tensor % (0, 1)},"module.module.w{tensor % (1, 2)}}}'
    raw_safetensors(folder / "model.safetensors", header.encode(), b"12")
    assert examined(folder) is not None
    for arguments in (["check"], ["repair", "--dry-run"], ["repair"], ["check"], ["undo"]):
        assert run([arguments[0], str(folder), *arguments[1:]]) in (0, 1, 2)
        out, err = capsys.readouterr()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", out + err)
    repaired_and_back(folder, folder)
    cli(["repair", str(folder)], capsys)


def test_file_names_of_any_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = b"\xff\x1b[2J\nmodel.safetensors"
    write_safetensors(folder / os.fsdecode(raw), {"module.module.w": b"1"})
    before = snapshot(folder)
    assert run(["check", str(folder)]) == 1
    assert run(["repair", str(folder)]) == 0
    out, _ = capsys.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", out)
    assert cli(["check", str(folder)], capsys)["status"] == 0
    assert cli(["undo", str(folder)], capsys)["status"] == 0
    shutil.rmtree(folder / ".ckptfix", ignore_errors=True)
    assert snapshot(folder) == before


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_folder_with_the_name(path: Path) -> None:
    path.mkdir()


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "make",
    [make_fifo, make_dangling, make_loop, make_folder_with_the_name, make_device],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"]
)
def test_what_is_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], name: str
) -> None:
    make(folder / name)
    begin = time.process_time()
    if make is make_folder_with_the_name:
        with pytest.raises(UsageError, match="has no checkpoint files"):
            check(folder)
    else:
        assert check(folder).status == 1
    for target in (folder, folder / name):
        for verb in (["check"], ["repair"], ["repair", "--atomic"], ["undo"]):
            cli([verb[0], str(target), *verb[1:]], capsys)
    assert time.process_time() - begin < TOO_LONG
    assert os.listdir(folder) == [name]


@pytest.mark.slow
def test_a_huge_claim_of_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_safetensors(folder / "model-00001-of-99999.safetensors", {"w": b"1"})
    begin = time.process_time()
    assert run(["check", str(folder)]) == 1
    assert time.process_time() - begin < TOO_LONG
    assert len(capsys.readouterr().out) < 5000
    assert run(["repair", str(folder)]) == 1


@pytest.mark.parametrize("shard", ["00000-of-00000", "00005-of-00003", "00000-of-00001"])
def test_shard_numbers_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], shard: str
) -> None:
    write_safetensors(folder / f"model-{shard}.safetensors", {"module.module.w": b"1"})
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"module.module.w": b"1"})
    assert examined(folder) is not None
    repaired_and_back(folder, folder)
    cli(["repair", str(folder)], capsys)


@pytest.mark.parametrize("depth", [100, 300, 450, 600, 800, *range(880, 1000, 8)])
def test_json_that_can_be_read_and_hardly_written(
    folder: Path, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    """Writing nests deeper than reading: what was read a moment ago may be too deep for the way
    back.
    """
    deep = '{"a":' * depth + '"\\u00e9"' + "}" * depth
    write_safetensors(folder / "model-00001-of-00001.safetensors", {"w": b"1"})
    index = f'{{"metadata": {deep}, "weight_map": {{}}}}'  # so that it has to be written again
    (folder / "model.safetensors.index.json").write_text(index)
    header = (
        f'{{"module.module.w":{{"dtype":"U8","shape":[0],"data_offsets":[0,0],"later":{deep}}}}}'
    )
    raw_safetensors(folder / "ema.safetensors", header.encode())
    assert examined(folder) is not None
    repaired_and_back(folder, folder)
    assert cli(["repair", str(folder)], capsys)["status"] in (0, 1, 3)


@pytest.mark.parametrize(
    "path",
    [
        "x" * 5000, "x/" * 4000, "file:///" + "x" * 5000, "a\0b", "\ud800", "file:///\ud800",
        "memory://b/\ud800", "memory://\ud800/x", "s3://b/\udc80", "memory://b/" + "x" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", [check, repair, undo, verify, seal, latest_checkpoint, upload])
def test_a_path_that_nothing_can_have_is_wrong_usage(verb: Callable[..., Any], path: str) -> None:
    with pytest.raises(UsageError):
        verb(path, "memory://x/y") if verb is upload else verb(path)


@pytest.mark.parametrize("verb", [partial(migrate, to="safetensors"), salvage, diff])
def test_a_path_of_two_that_nothing_can_have_is_wrong_usage(verb: Callable[..., Any]) -> None:
    for path in ("x" * 5000, "memory://b/\ud800"):
        with pytest.raises(UsageError):
            verb(path, SEEDS["zip"].parent if verb is diff else "new")

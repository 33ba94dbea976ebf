"""``seal`` and ``verify --data`` compare the CRCs of torch's records in the pass that hashes, not
in one before it.
"""

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptfix.diagnosis.dcp_folders
import ckptfix.diagnosis.file_damage
from ckptfix import check, seal, verify
from ckptfix.diagnosis.file_damage import LeftRecord
from ckptfix.diagnosis.findings.damaged import CrcMismatch
from ckptfix.storage.files import on_disk
from tests.verification.sealed import flip

FIXTURES = Path(__file__).parents[2] / "fixtures"
KINDS = {
    "bin": "accelerate-1.15.0/clean-bin/checkpoint",
    "dcp": "dcp-2.13.0/fsdp2-clean/checkpoint",
    "deepspeed": "deepspeed-0.18.2/accelerate-zero2/checkpoint",
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / KINDS[request.param], tmp_path / "c"))


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each separate comparison of CRCs: whether it is one of every
    record.
    """
    found: list[bool] = []
    for module in (ckptfix.diagnosis.file_damage, ckptfix.diagnosis.dcp_folders):
        real = module.crc_mismatches

        def counted(*words: Any, every_record: bool, real: Any = real, **more: Any) -> Any:
            found.append(every_record)
            return real(*words, every_record=every_record, **more)

        monkeypatch.setattr(module, "crc_mismatches", counted)
    return found


def storages(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield each file that has storages, and a byte in the middle of its largest one."""
    found: list[LeftRecord] = []
    check(folder, data=True, left=found)
    for path in sorted({one.path for one in found}):
        sizes = {}
        for one in found:
            data = on_disk(path).read_bytes()[one.offset : one.offset + one.size]
            if one.path == path and not data.startswith(b"\x80"):  # a pickle
                assert zlib.crc32(data) == one.crc
                sizes[one.offset] = one.size
        offset = max(sizes, key=lambda offset: sizes[offset])
        if sizes[offset] > 16:
            yield on_disk(path), offset + sizes[offset] // 2


def test_an_intact_checkpoint_is_read_in_one_pass(folder: Path, comparisons: list[bool]) -> None:
    assert seal(folder, force=True).written
    assert verify(folder, data=True).status == check(folder).status
    assert True not in comparisons
    check(folder, data=True)
    assert True in comparisons


def test_a_flipped_bit_is_found_as_check_finds_it(folder: Path) -> None:
    places = list(storages(folder))
    assert len(places) > 1
    for path, at in places:
        flip(path, at)
        expected = [
            one for one in check(folder, data=True).all_findings if isinstance(one, CrcMismatch)
        ]
        assert expected, path
        receipt = seal(folder)
        assert not receipt.written
        assert [one for one in receipt.findings if isinstance(one, CrcMismatch)] == expected
        found = verify(folder, data=True).findings
        assert [one for one in found if isinstance(one, CrcMismatch)] == expected
        flip(path, at)
    assert not (folder / ".ckptfix").exists()

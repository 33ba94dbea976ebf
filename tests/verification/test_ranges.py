"""Digests of ranges of long files: written, compared, followed through repairs, and shared by
processes.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptfix import migrate, repair, salvage, seal, undo, verify
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.errors import FormatError
from ckptfix.storage.paths import MANIFEST, UNSIGNED
from ckptfix.verification.statements import FileStatement, parse_statement
from ckptfix.verification.verify_report import Kind, Outcome
from tests.commanding import Said, said
from tests.verification.sealed import flip, make_sharded, wrong

__all__ = ["said"]

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
RANGE = 1000
LONG = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.verification.seal.RANGE", RANGE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    folder.mkdir()
    make_sharded(folder)
    (folder / "notes.txt").write_text("mine")
    return folder


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def in_ranges(path: Path) -> tuple[str, ...]:
    data = path.read_bytes()
    return tuple(
        hashlib.sha256(data[begin : begin + RANGE]).hexdigest()
        for begin in range(0, len(data), RANGE)
    )


def test_long_files_have_digests_of_their_ranges_and_short_ones_their_own(folder: Path) -> None:
    receipt = seal(folder, ranges=True)
    manifest = manifest_of(folder)
    long = list(folder.glob("*.safetensors"))
    assert manifest.ranges == {path.name: in_ranges(path) for path in long}
    assert manifest.range_size == RANGE
    assert set(manifest.sha256) == {"notes.txt", "model.safetensors.index.json"}
    assert receipt.ranges == sum(map(len, manifest.ranges.values())) == 8
    assert "long files in 8 ranges of 1 GB" in str(receipt)
    report = verify(folder)
    assert report.status == 0
    assert report.count(Kind.FILE)[Outcome.MATCH] == 4
    before = (folder / MANIFEST).stat()
    assert seal(folder, ranges=True).written
    assert (folder / MANIFEST).stat() == before, "nothing changed, so nothing is written"


def test_every_flipped_byte_is_found_and_its_range_is_named(folder: Path) -> None:
    seal(folder, ranges=True)
    for at in range(0, (folder / LONG).stat().st_size, 397):
        flip(folder / LONG, at)
        report = verify(folder)
        assert report.status == 1
        assert wrong(report)[LONG][0] == "changed"
        assert f"{LONG}: range {at // RANGE} of 4, counted from 0" in str(report)
        assert not seal(folder, ranges=True).written
        assert not seal(folder).written, "the old digests are compared before others are written"
        flip(folder / LONG, at)
    with (folder / LONG).open("ab") as file:
        file.write(b"more")
    assert wrong(verify(folder))[LONG][0] == "changed"


@pytest.mark.parametrize("is_stated", [False, True])
def test_a_file_that_lost_all_its_bytes_differs(
    folder: Path, tmp_path: Path, said: Said, is_stated: bool
) -> None:
    (folder / "notes.txt").write_text("mine" * RANGE)
    seal(folder, ranges=True, oms=is_stated)
    os.truncate(folder / "notes.txt", 0)
    report = verify(folder, statements=[folder / UNSIGNED[0]] if is_stated else [])
    assert report.status == 1
    assert wrong(report)["notes.txt"][0] == "changed"
    assert said("scrub", folder, "--state", tmp_path / "scrub.db")[0] == 1
    assert not seal(folder, ranges=True).written


def test_a_file_can_have_its_own_digest_too_and_either_replaces_the_other(folder: Path) -> None:
    seal(folder, ranges=True, with_sha256=True)
    both = manifest_of(folder)
    assert both.sha256[LONG] == hashlib.sha256((folder / LONG).read_bytes()).hexdigest()
    assert both.ranges[LONG] == in_ranges(folder / LONG)
    assert verify(folder).status == 0
    seal(folder)
    plain = manifest_of(folder)
    assert (plain.sha256, plain.ranges, plain.range_size) == (both.sha256, {}, 0)
    assert b"range" not in (folder / MANIFEST).read_bytes()
    seal(folder, ranges=True)
    assert manifest_of(folder).ranges == both.ranges
    assert LONG not in manifest_of(folder).sha256


def test_a_statement_has_the_ranges_as_shards(folder: Path) -> None:
    (folder / "empty").touch()
    seal(folder, ranges=True, oms=True)
    data = (folder / UNSIGNED[0]).read_bytes()
    statement = parse_statement(data, "it")
    assert isinstance(statement, FileStatement)
    assert statement.to_bytes() == data
    assert statement.scheme.shard_size == RANGE
    assert "empty" not in statement.files
    assert verify(folder, statements=[folder / UNSIGNED[0]]).status == 0
    resources = json.loads(data)["predicate"]["resources"]
    assert [one["digest"] for one in resources if one["name"].startswith(LONG)] == list(
        in_ranges(folder / LONG)
    )
    assert resources[0]["algorithm"] == f"sha256-sharded-{RANGE}"


def test_a_renamed_file_is_recognized_by_its_ranges(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine" * RANGE)
    seal(folder, ranges=True)
    (folder / "notes.txt").rename(folder / "other.txt")
    assert wrong(verify(folder))["notes.txt"][0] == "renamed"


@pytest.mark.parametrize(
    ("fixture", "is_changed"), [("wrapper-safetensors", False), ("lone-nested-safetensors", True)]
)
def test_repair_and_undo_keep_what_is_true(
    tmp_path: Path, fixture: str, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.verification.seal.RANGE", 100)
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder)
    (folder / "notes.txt").write_text("mine" * RANGE)
    seal(folder, ranges=True, force=True)
    before = manifest_of(folder)
    assert len(before.ranges) > 1
    assert repair(folder).steps
    after = manifest_of(folder)
    there = {path.name for path in folder.iterdir() if path.is_file()}
    assert after.sha256.keys() | after.ranges.keys() == there
    changed = {name for name, digest in after.sha256.items() if not digest}
    assert bool(changed) == is_changed
    assert after.ranges == {
        name: digests for name, digests in before.ranges.items() if name in there - changed
    }
    assert verify(folder).count(Kind.TENSOR)[Outcome.DIFFER] == 0
    assert not any(item.outcome is Outcome.DIFFER for item in verify(folder).items)
    undo(folder)
    assert manifest_of(folder) == before
    assert verify(folder).count(Kind.FILE)[Outcome.MATCH] == len(before.ranges) + len(before.sha256)


def test_migrate_carries_the_ranges_of_what_it_copies(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("mine" * RANGE)
    seal(folder, ranges=True)
    migrate(folder, tmp_path / "new", to="bin")
    new = manifest_of(tmp_path / "new")
    assert set(new.ranges) == {"notes.txt"}
    assert any(name.endswith(".bin") for name in new.sha256)
    assert verify(tmp_path / "new").status == 0


def test_scrub_and_salvage_compare_ranges(folder: Path, tmp_path: Path, said: Said) -> None:
    seal(folder, ranges=True)
    assert said("scrub", folder, "--state", tmp_path / "scrub.db")[0] == 0
    flip(folder / LONG, (folder / LONG).stat().st_size - 1)
    status, out, _ = said("scrub", folder, "--state", tmp_path / "other.db")
    assert status == 1
    assert "range 3 of 4" in out
    receipt = salvage(folder, tmp_path / "out")
    assert len(receipt.lost) == 1


def test_shares_without_a_network_write_what_one_process_writes(folder: Path, said: Said) -> None:
    assert said("seal", folder, "--ranges")[0] == 0
    alone = (folder / MANIFEST).read_bytes()
    shutil.rmtree(folder / ".ckptfix")
    for number in range(2):
        status, out, _ = said("seal", folder, "--ranges", "--shard", f"{number}/2")
        assert status == 0, out
    assert said("seal", folder, "--ranges")[0] == 0
    assert (folder / MANIFEST).read_bytes() == alone


def test_the_option_for_both_needs_ranges(folder: Path, said: Said) -> None:
    status, _, err = said("seal", folder, "--with-sha256")
    assert status == 2
    assert "--with-sha256 requires --ranges" in err
    assert said("seal", folder, "--ranges", "--with-sha256")[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"range_size": 0}, {"range_size": -1}, {"range_size": "1000"}, {"range_size": True},
        {"ranges": {"a": []}}, {"ranges": {"a": "0" * 64}}, {"ranges": {"a": ["0"]}},
        {"ranges": {"../a": ["0" * 64]}}, {"ranges": ["a"]}, {"ranges": {"a": [1]}},
    ],
)  # fmt: skip
def test_a_manifest_with_unsound_ranges_is_refused(folder: Path, change: dict[str, object]) -> None:
    seal(folder, ranges=True)
    document = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps({**document, **change}))
    with pytest.raises(FormatError, match="cannot be understood"):
        read_manifest(folder)

"""Damaged, hostile and odd DCP folders: each thing found and named, nothing repaired that must not
be.
"""

import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckptfix import Keys, OperationError, Policy, UsageError, check, repair, salvage
from ckptfix.diagnosis.findings.base import Finding, Resume
from ckptfix.diagnosis.findings.damaged import TruncatedFile
from ckptfix.diagnosis.findings.incomplete import MissingRank
from ckptfix.diagnosis.findings.sharded import MissingShard
from fixtures import golden_dcp
from tests.repairs.dcp_folders import MODEL, ONCE, OPTIMIZER, change, copy, snapshot
from tests.sampling import sampled
from tests.tensors.dcp_making import save

BARE = Policy(keys=Keys.BARE)


def clean(tmp_path: Path) -> Path:
    """Return a whole folder of one model alone."""
    return copy(tmp_path, "fsdp2-clean", keep=(MODEL,))


def nested(tmp_path: Path) -> Path:
    return copy(tmp_path, "fsdp2-nested")


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


def only_finding(folder: Path) -> Finding:
    (finding,) = check(folder).findings
    return finding


def stays(folder: Path, reason: str, policy: Policy | None = None) -> None:
    """See that a repair leaves a folder as it is, and says why."""
    before = snapshot(folder)
    receipt = repair(folder, policy=policy)
    assert any(reason in one.reason for one in receipt.unplanned), receipt.unplanned
    assert receipt.transaction is None
    assert receipt.status == 1
    assert snapshot(folder) == before


def test_a_missing_file_of_several_of_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / MODEL
    save(folder, {"model": {f"w{i}": torch.ones(3) for i in range(3)}}, single_file_per_rank=False)
    assert check(tmp_path).findings == ()
    (folder / "__0_1.distcp").unlink()
    finding = only_finding(tmp_path)
    assert isinstance(finding, MissingShard)
    assert str(finding.path) == f"{MODEL}/__0_1.distcp"
    assert finding.tensors == 1
    assert finding.holds[0] in str(finding)
    for path in folder.glob("*.distcp"):
        path.unlink()
    finding = only_finding(tmp_path)
    assert isinstance(finding, MissingRank)
    assert (finding.rank, finding.files, finding.items) == (0, 3, 3)


def test_a_rank_that_is_missing_names_what_it_held(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    (folder / MODEL / "__1_0.distcp").unlink()
    finding = only_finding(folder)
    assert isinstance(finding, MissingRank)
    assert finding.rank == 1
    assert "model.2.weight" in finding.holds


@pytest.mark.parametrize("cut", [1, 2000, 12000])
def test_a_short_file(tmp_path: Path, cut: int) -> None:
    folder = clean(tmp_path)
    path = folder / MODEL / "__1_0.distcp"
    size = path.stat().st_size
    os.truncate(path, size - cut)
    finding = only_finding(folder)
    assert isinstance(finding, TruncatedFile)
    assert (finding.have, finding.need) == (size - cut, size)


def chunk(offset: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([offset, 0]), torch.Size([length, 5]))


@pytest.mark.parametrize(("chunks", "words"), [
    ([chunk(0, 2)], "10 of its 20 elements are not in any chunk"),
    ([chunk(0, 2), chunk(1, 3)], "overlap"),
    ([chunk(0, 2), chunk(1, 1)], "overlap, and at least 6 of its 20 elements are not in any chunk"),
    ([chunk(0, 2), chunk(2, 1), chunk(3, 1)], "is not stored in any file"),
])  # fmt: skip
def test_chunks_that_do_not_make_up_a_tensor(tmp_path: Path, chunks: list[Any], words: str) -> None:
    folder = clean(tmp_path)

    def edit(content: Metadata) -> None:
        tensor: Any = content.state_dict_metadata["model.0.weight"]
        tensor.chunks = chunks

    change(folder / MODEL, edit)
    found = [finding for finding in check(folder).findings if finding.code == "incomplete-tensor"]
    assert any(words in str(finding) for finding in found)
    assert all("'model.0.weight'" in str(finding) for finding in found)


def test_an_interrupted_save(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    own = folder / MODEL
    shutil.copyfile(own / ".metadata", own / ".metadata.tmp")
    finding = only_finding(folder)
    assert (finding.code, str(finding.path)) == ("interrupted-save", f"{MODEL}/.metadata.tmp")
    assert "a save over an older checkpoint was interrupted" in str(finding)
    (own / ".metadata").unlink()
    assert "is still named .metadata.tmp" in str(only_finding(folder))
    (own / ".metadata.tmp").unlink()
    assert "is missing (found 2 .distcp files of 2 ranks)" in str(only_finding(folder))
    (own / "__0_0.distcp").unlink()
    assert "1 lower-numbered rank has none" in str(only_finding(folder))
    assert codes(own) == ["interrupted-save"]
    assert check(folder).status == 1


def test_metadata_that_a_copy_left_out(tmp_path: Path) -> None:
    """The shell's * skips it, and some download tools store it without its dot."""
    folder = clean(tmp_path)
    own = folder / MODEL
    (own / ".metadata").rename(own / "metadata")
    finding = only_finding(folder)
    assert str(finding).endswith("of 2 ranks): the file metadata in the folder is this file")
    assert finding.advice.startswith("rename metadata to .metadata")
    with pytest.raises(OperationError, match=r"; next: rename metadata to \.metadata"):
        salvage(own, tmp_path / "new")
    (own / "metadata").write_bytes(b"other")
    finding = only_finding(folder)
    assert str(finding).endswith("): a copy left it out, or the save was interrupted")
    assert finding.advice.startswith("copy .metadata again from the source, with cp -a SRC/. DST")
    with pytest.raises(OperationError, match=r"; next: copy \.metadata again from the source"):
        salvage(own, tmp_path / "new")


def test_metadata_of_each_rank_is_not_read_and_no_damage(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    (folder / MODEL / ".metadata").rename(folder / MODEL / "__0.metadata")
    report = check(folder)
    assert report.findings == ()
    assert any("__0.metadata" in words for words in report.not_checked)


CONTENTS = {
    "empty": (b"", "not-a-tensor-file"),
    "zeros": (bytes(4000), "not-a-tensor-file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "not-a-tensor-file"),
    "dict": (b"\x80\x04}.", "malformed-file"),
    "call": (pickle.dumps(golden_dcp.SystemCall()), "unsafe-pickle"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTENTS)
def test_metadata_that_is_something_else(tmp_path: Path, kind: str) -> None:
    folder = clean(tmp_path)
    content, code = CONTENTS[kind]
    (folder / MODEL / ".metadata").write_bytes(content)
    assert code in codes(folder)
    assert check(folder).status == 1


def test_truncated_metadata(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    path = folder / MODEL / ".metadata"
    os.truncate(path, path.stat().st_size // 2)
    assert codes(folder) == ["truncated-file"]


def test_metadata_that_is_no_file(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    path = folder / MODEL / ".metadata"
    path.unlink()
    os.mkfifo(path)
    assert codes(folder) == ["not-a-tensor-file"]


def test_a_bytes_item_that_would_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    groups = [{"params": ["module.module.w"], "lr": Call()}]
    save(tmp_path / OPTIMIZER, {"optimizer": {"state": {}, "param_groups": groups}})
    save(tmp_path / MODEL, {"model": {"module.module.w": torch.zeros(2)}})
    marker.unlink(missing_ok=True)
    found = check(tmp_path).findings
    assert {finding.code for finding in found} == {"unsafe-pickle", "nested-prefix"}
    stays(tmp_path, "unsafe pickle")
    assert not marker.exists()


def test_a_broken_bytes_item(tmp_path: Path) -> None:
    folder = nested(tmp_path)
    content = pickle.loads((folder / OPTIMIZER / ".metadata").read_bytes())
    info = next(
        value
        for key, value in content.storage_data.items()
        if key.fqn == "optimizer.param_groups.0.params"
    )
    path = folder / OPTIMIZER / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + info.length] = bytes(info.length)
    path.write_bytes(data)
    assert "malformed-file" in codes(folder)
    stays(folder, "cannot be read")


def test_flat_parameters_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = nested(tmp_path)
    change(folder / MODEL, golden_dcp.rename_all(golden_dcp.flattened))
    assert "flat-parameters" in codes(folder)
    stays(folder, "flattened parameters")
    stays(folder, "flattened parameters", BARE)


def test_private_wrappers_inside_of_names(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    wrap = golden_dcp.rename_all(lambda name: name.replace("0.", "0._fsdp_wrapped_module.", 1))
    change(folder / MODEL, wrap)
    assert codes(folder) == ["wrapper-prefix"]
    assert repair(folder, policy=BARE).status == 0
    assert check(folder).findings == ()


def test_names_that_would_become_one(tmp_path: Path) -> None:
    inner = {"module.module.w": torch.ones(2), "module.module._orig_mod.w": torch.ones(2)}
    save(tmp_path / MODEL, {"model": inner})
    stays(tmp_path, "would both become", BARE)


def test_names_inside_of_safetensors_are_refused(tmp_path: Path) -> None:
    state = {"model": {"module.module.w": torch.ones(2), "module.module.v": torch.ones(3)}}
    save(tmp_path / MODEL, state, serialization_format=SerializationFormat.SAFETENSORS)
    assert codes(tmp_path) == ["nested-prefix"]
    stays(tmp_path, "safetensors", ONCE)


def test_a_script_of_somebodys_own_may_save_a_model_as_ddp_names_it(tmp_path: Path) -> None:
    """``ddp.state_dict()`` and ``get_optimizer_state_dict`` in one dict: nothing is wrong with
    that.
    """
    optimizer = {"state": {"w": {"step": torch.ones(1)}}, "param_groups": [{"params": ["w"]}]}
    save(tmp_path / "mine", {"model": {"module.w": torch.ones(2)}, "optimizer": optimizer})
    assert codes(tmp_path) == ["wrapper-prefix"]
    optimizer["param_groups"] = [{"params": ["module.module.w"]}]
    save(tmp_path / "mine", {"model": {"module.w": torch.ones(2)}, "optimizer": optimizer})
    assert codes(tmp_path) == ["mismatched-names", "wrapper-prefix", "missing-moments"]


@pytest.mark.parametrize(
    ("moments", "groups", "loads"), [("module.", "", False), ("", "module.module.", True)]
)
def test_a_resume_finds_moments_by_key_and_the_parameters_of_a_group_by_position(
    tmp_path: Path, moments: str, groups: str, loads: bool
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trained = get_optimizer_state_dict(model, optimizer)
    renamed = {
        "state": {f"{moments}{fqn}": states for fqn, states in trained["state"].items()},
        "param_groups": [
            {**group, "params": [f"{groups}{fqn}" for fqn in group["params"]]}
            for group in trained["param_groups"]
        ],
    }
    save(tmp_path / MODEL, {"model": model.state_dict()})
    save(tmp_path / OPTIMIZER, {"optimizer": renamed})
    # torch makes the moments of a new optimizer only where no gradient is left.
    model.zero_grad()
    wanted = {"optimizer": get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))}
    with catch_warnings(), nullcontext() if loads else pytest.raises(CheckpointException):
        simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=tmp_path / OPTIMIZER)
    found = [one for one in check(tmp_path).findings if one.code == "mismatched-names"]
    assert {one.resume is Resume.SUCCEEDS for one in found} == {loads}


def test_a_script_may_give_its_folders_the_names_of_accelerate(tmp_path: Path) -> None:
    """Accelerate saves a model under the key ``model``; ``dcp.save(ddp.state_dict())`` has none."""
    optimizer = {"state": {"w": {"step": torch.ones(1)}}, "param_groups": [{"params": ["w"]}]}
    save(tmp_path / OPTIMIZER, optimizer)
    save(tmp_path / MODEL, {"module.w": torch.ones(2)})
    assert "mismatched-names" not in codes(tmp_path)
    assert repair(tmp_path).steps == ()
    save(tmp_path / MODEL, {"model": {"module.w": torch.ones(2)}})
    assert "mismatched-names" in codes(tmp_path)


def test_a_linked_folder_is_repaired_where_it_is(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested", keep=(MODEL,))
    other = tmp_path / "other"
    other.mkdir()
    (other / MODEL).symlink_to(folder / MODEL)
    stays(other, "symbolic link")
    assert repair(folder, policy=ONCE).status == 0
    assert codes(other) == ["wrapper-prefix"]


def test_linked_files_are_replaced_and_their_targets_stay(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-nested")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if path.is_file():
            path.rename(blobs / str(number))
            path.symlink_to(blobs / str(number))
    before = snapshot(blobs)
    assert repair(folder, policy=ONCE).status == 0
    assert snapshot(blobs) == before
    assert codes(folder) == ["wrapper-prefix"]


def test_a_double_with_a_file_of_somebody_is_not_dropped(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    (folder / "pytorch_model_fsdp_1" / "README.md").write_text("mine")
    policy = Policy(allow=frozenset({"identical-models"}))
    stays(folder, "which its .metadata does not list", policy)


def test_a_short_double_is_no_double(tmp_path: Path) -> None:
    folder = copy(tmp_path, "fsdp2-doubled")
    path = folder / "pytorch_model_fsdp_1" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    assert "doubled-model" not in codes(folder)
    assert "truncated-file" in codes(folder)


def test_metadata_files_of_a_download_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "download").mkdir()
    (tmp_path / "download" / "model.safetensors.metadata").write_text("etag")
    with pytest.raises(UsageError):
        check(tmp_path / "download")


def test_items_over_each_other_are_read_once(tmp_path: Path) -> None:
    folder = nested(tmp_path)

    def edit(content: Metadata) -> None:
        stored: Any = content.storage_data
        place = stored[MetadataIndex("optimizer.param_groups.0.params")]
        for number in range(50):
            name = f"optimizer.param_groups.{number}.params"
            content.state_dict_metadata[name] = content.state_dict_metadata[
                "optimizer.param_groups.0.params"
            ]
            stored[MetadataIndex(name)] = place

    change(folder / OPTIMIZER, edit)
    assert any("items overlap" in str(finding) for finding in check(folder).findings)


def escape(content: Metadata) -> None:
    stored: Any = content.storage_data
    next(iter(stored.values())).relative_path = "../../outside.distcp"


def huge(content: Metadata) -> None:
    stored: Any = content.storage_data
    next(iter(stored.values())).offset = 1 << 61


def twice(content: Metadata) -> None:
    """Let one name's path be another's."""
    paths: Any = content.planner_data
    paths["model.module.module.0.weight"] = paths["model.module.module.0.bias"]


def no_planner(content: Metadata) -> None:
    content.planner_data = None


def no_storage(content: Metadata) -> None:
    content.storage_data = {}


def other_keys(content: Metadata) -> None:
    stored: Any = content.storage_data
    content.storage_data = {
        MetadataIndex(key.fqn.replace("model", "lodem"), key.offset): value
        for key, value in stored.items()
    }


@pytest.mark.parametrize("edit", [escape, huge, twice, no_planner, no_storage, other_keys])
def test_lies_in_the_metadata(tmp_path: Path, edit: Callable[[Metadata], None]) -> None:
    folder = nested(tmp_path)
    change(folder / MODEL, edit)
    outside = tmp_path / "outside.distcp"
    outside.write_bytes(b"mine")
    before = check(folder).findings
    assert before
    receipt = repair(folder, policy=BARE)
    assert outside.read_bytes() == b"mine"
    if receipt.transaction is not None:
        assert len(check(folder).findings) <= len(before)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [MODEL, OPTIMIZER])
def test_mutated_metadata_never_stops_a_check(tmp_path: Path, folder: str) -> None:
    root = copy(tmp_path, "fsdp2-nested")
    path = root / folder / ".metadata"
    whole = path.read_bytes()
    said = set()
    for number in sampled(range(152)):
        dice, data = random.Random(number), bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 8))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.2:
            begin = dice.randrange(len(data))
            del data[begin : begin + dice.randrange(1, 60)]
        path.write_bytes(data)
        report = check(root)
        report.as_json()
        said |= {finding.code for finding in report.findings}
        repair(root, dry_run=True, policy=BARE)
    assert {"malformed-file", "nested-prefix"} <= said

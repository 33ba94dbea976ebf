"""A tensor under two names is sealed and judged under both."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import repair, seal, verify
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, read_manifest
from ckptfix.storage.paths import MANIFEST
from ckptfix.verification.verify_report import Kind, Outcome
from tests.verification.sealed import wrong

EMBEDDING, MIDDLE = torch.full((4, 4), 1.5), torch.full((4, 4), 2.5)


def write(folder: Path, names: dict[str, torch.Tensor], prefix: str = "module.") -> None:
    torch.save(
        {prefix + name: value for name, value in names.items()}, folder / "pytorch_model.bin"
    )


def write_apart(folder: Path, ties: dict[str, str]) -> None:
    save_file(
        {"emb": EMBEDDING, "mid": MIDDLE}, folder / "model.safetensors", {"format": "pt", **ties}
    )


def entry_of(folder: Path) -> ManifestEntry:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.models[0]


@pytest.mark.parametrize("repaired", [False, True])
def test_the_other_name_of_a_tie_is_judged(tmp_path: Path, repaired: bool) -> None:
    tied = {"emb": EMBEDDING, "mid": MIDDLE, "head": EMBEDDING}
    prefix = "module.module." if repaired else "module."
    write(tmp_path, tied, prefix)
    assert seal(tmp_path, force=True).tensors == 3
    if repaired:
        repair(tmp_path)
    assert verify(tmp_path).count(Kind.TENSOR)[Outcome.MATCH] == 3
    file = set() if repaired else {"pytorch_model.bin"}  # after a repair its digest is not known
    for changed, what in (
        ({**tied, "head": MIDDLE}, "changed"),
        ({"emb": EMBEDDING, "mid": MIDDLE}, "missing"),
        ({**tied, "head": EMBEDDING + 7}, "changed"),
    ):
        write(tmp_path, changed)
        report = verify(tmp_path)
        assert report.status == 1
        assert wrong(report)["module.head"][0] == what
        differing = {item.name for item in report.items if item.outcome is Outcome.DIFFER}
        assert differing == {"module.head", *file}
    write(tmp_path, {**tied, "head": EMBEDDING.clone()})
    assert verify(tmp_path).count(Kind.TENSOR)[Outcome.MATCH] == 3, "the same values, of their own"


def test_a_tie_in_the_header_is_judged(tmp_path: Path) -> None:
    write_apart(tmp_path, {"head.emb": "emb"})
    assert seal(tmp_path).tensors == 3
    entry = entry_of(tmp_path)
    assert (set(entry.digests), entry.aliases) == ({"emb", "mid"}, {"head.emb": "emb"})
    assert verify(tmp_path).count(Kind.TENSOR)[Outcome.MATCH] == 3
    assert verify(tmp_path / "model.safetensors").count(Kind.TENSOR)[Outcome.MATCH] == 3
    write_apart(tmp_path, {"head.emb": "mid"})
    assert wrong(verify(tmp_path))["head.emb"] == ("changed", "model.safetensors")
    assert wrong(verify(tmp_path / "model.safetensors"))["head.emb"] == (
        "changed",
        "model.safetensors",
    )


def test_a_tie_that_only_the_manifest_of_a_save_knows(tmp_path: Path) -> None:
    write_apart(tmp_path, {})
    entry = ManifestEntry(
        index=0, file="model.safetensors", type="my.Model", aliases={"head": "emb"}
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    saved = Manifest(
        versions={}, world_size=1, step=1, models=(entry,), files={"model.safetensors": size}
    )
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / MANIFEST).write_bytes(saved.to_bytes())
    assert seal(tmp_path).tensors == 3
    assert entry_of(tmp_path).aliases == {"head": "emb"}
    for where in (tmp_path, tmp_path / "model.safetensors"):
        report = verify(where)
        assert (report.status, wrong(report)) == (0, {})
    (tmp_path / "model_1.safetensors").write_bytes(b"torn")
    assert "head" not in wrong(verify(tmp_path)), "another model's damage is not this one's"


def test_without_a_manifest_every_name_is_listed(tmp_path: Path) -> None:
    write(tmp_path, {"emb": EMBEDDING, "head": EMBEDDING})
    for data in (False, True):
        report = verify(tmp_path, data=data)
        assert [item.text for item in report.items] == ["no digest was recorded"] * 3

"""``verify --against``: files of models count by their tensors, and what else they hold is said,
not compared.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckptfix import verify
from ckptfix.verification.verify_report import Kind, Outcome, VerifyReport
from tests.tensors import dcp_making
from tests.verification.sealed import make_sharded, state


def files(report: VerifyReport) -> dict[str, Outcome]:
    return {item.name: item.outcome for item in report.items if item.kind is Kind.FILE}


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_header_with_other_metadata_is_no_difference_of_the_models(tmp_path: Path) -> None:
    for name, words in (("a", {"format": "pt"}), ("b", {"format": "pt", "step": "12345"})):
        save_file(state(), folder(tmp_path / name) / "model.safetensors", words)
        (tmp_path / name / "config.json").write_text("{}")
    report = verify(tmp_path / "a", against=tmp_path / "b")
    assert report.status == 0
    assert files(report) == {
        "config.json": Outcome.MATCH,
        "model.safetensors": Outcome.NOT_CHECKED,
    }
    text = next(item.text for item in report.items if item.name == "model.safetensors")
    assert text == "differs; only its tensors are compared, one by one"
    assert report.count(Kind.TENSOR)[Outcome.MATCH] == 4
    (tmp_path / "b" / "config.json").write_text("[]")
    assert verify(tmp_path / "a", against=tmp_path / "b").status == 1, "it is not a model's file"


def test_an_index_in_other_bytes_is_no_difference(tmp_path: Path) -> None:
    for name in "ab":
        make_sharded(folder(tmp_path / name))
    index = tmp_path / "b" / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), indent=4))
    assert verify(tmp_path / "a", against=tmp_path / "b").status == 0


def test_a_dcp_folder_in_other_chunks_matches_by_its_tensors(tmp_path: Path) -> None:
    names = list(state())
    for where, epoch, order in (("a", 1, names), ("b", 2, names[::-1])):
        saved = {"model": {name: state()[name] for name in order}, "epoch": epoch}
        dcp_making.save(tmp_path / where, saved)
    report = verify(tmp_path / "a", against=tmp_path / "b")
    assert report.status == 0
    assert files(report)[".metadata"] is Outcome.NOT_CHECKED
    assert report.count(Kind.TENSOR)[Outcome.MATCH] == 4
    told = " ".join(report.not_checked)
    assert "other entries of .['model']: 'epoch'" in told
    assert f"other entries of {tmp_path / 'b'}/.['model']: 'epoch'" in told
    same = verify(tmp_path / "a", against=tmp_path / "a")
    assert "other entries" not in " ".join(same.not_checked), "all bytes are the same"


def test_what_a_training_dict_holds_beside_its_model_is_said(tmp_path: Path) -> None:
    for name, epoch in (("a", 3), ("b", 4)):
        torch.save({"model": state(), "epoch": epoch}, folder(tmp_path / name) / "train.pt")
    report = verify(tmp_path / "a", against=tmp_path / "b")
    assert (report.status, files(report)) == (0, {"train.pt": Outcome.NOT_CHECKED})
    assert "other entries of train.pt['model']: 'epoch'" in " ".join(report.not_checked)


def test_a_model_in_another_format_beside_it_is_compared_by_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save_file(state(), folder(tmp_path / name) / "model.safetensors")
        torch.save(state() if name == "a" else state(3), tmp_path / name / "pytorch_model.bin")
    report = verify(tmp_path / "a", against=tmp_path / "b")
    assert report.status == 1, "no loader takes it, so its tensors are not compared"
    assert files(report)["pytorch_model.bin"] is Outcome.DIFFER

"""What ``ckptfix verify`` prints: one line for what happened once, what to type next, and how much
is wrong.
"""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import ChangedError, check, repair, undo
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.cli import run
from ckptfix.verification import verify
from tests.repairs.builders import RANDOM_STATES, write_safetensors
from tests.verification.sealed import make_sharded, sealed

FIXTURES = Path(__file__).parents[2] / "fixtures"
Capture = pytest.CaptureFixture[str]


def two_models(folder: Path) -> Path:
    """Two sealed models with the same names and other values; each has zeros, and two equal
    tensors.
    """
    folder.mkdir()
    for number, name in enumerate(("model.safetensors", "model_1.safetensors")):
        tensors = {f"l.{i}.weight": bytes([10 * number + i, 7]) * 40 for i in range(4)}
        zeros = {f"l.{i}.bias": bytes(24) for i in range(3)}
        same = dict.fromkeys(("a.scale", "b.scale"), bytes([9, number]) * 8)
        write_safetensors(folder / name, {**tensors, **zeros, **same})
    assert run(["seal", str(folder)]) == 0
    return folder


def out(capsys: Capture) -> str:
    return capsys.readouterr().out


def test_swapped_files_are_named(tmp_path: Path, capsys: Capture) -> None:
    folder = two_models(tmp_path / "c")
    os.rename(folder / "model.safetensors", tmp_path / "t")
    os.rename(folder / "model_1.safetensors", folder / "model.safetensors")
    os.rename(tmp_path / "t", folder / "model_1.safetensors")
    out(capsys)
    assert run(["verify", str(folder)]) == 1
    said = [line for line in out(capsys).splitlines() if "differ " in line]
    words = "each has the content recorded for the other"
    assert said[0] == f" differ model.safetensors: swapped with model_1.safetensors: {words}"
    assert len(verify.verify(folder).items) == 2 + 18


def test_a_renamed_file_is_named(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    write_safetensors(folder / "a.safetensors", {"x": b"12345678", "y": bytes(8)})
    assert run(["seal", str(folder)]) == 0
    os.rename(folder / "a.safetensors", folder / "b.safetensors")
    out(capsys)
    assert run(["verify", str(folder)]) == 1
    printed = out(capsys)
    assert " differ a.safetensors: renamed to b.safetensors\n" in printed
    assert printed.splitlines()[-1] == "wrong: 1 file that differs, 2 tensors that differ"
    moved = [item for item in verify.verify(folder).items if item.name == "x"]
    assert [(item.text, item.other) for item in moved] == [
        ("renamed to 'x' in b.safetensors", "b.safetensors")
    ]


def test_a_tensor_that_became_zeros_is_not_called_another(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    tensors = {"ln.weight": b"\1" * 16, "zero.bias": bytes(16)}
    write_safetensors(folder / "model.safetensors", tensors)
    assert run(["seal", str(folder)]) == 0
    write_safetensors(folder / "model.safetensors", {**tensors, "ln.weight": bytes(16)})
    out(capsys)
    assert run(["verify", str(folder)]) == 1
    printed = out(capsys)
    assert "'ln.weight' changed: sha256 " in printed
    assert "zero.bias" not in printed


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "; next: ckptfix salvage {0} NEW_FOLDER"),
        ("index", "; next: ckptfix repair {0}"),
        ("", "; next: ckptfix seal {0}"),
        ("half", "; the last save was interrupted: save again"),
    ],
)
def test_what_to_type_where_nothing_is_sealed(
    tmp_path: Path, capsys: Capture, damage: str, words: str
) -> None:
    make_sharded(tmp_path)
    if damage == "cut":
        os.truncate(tmp_path / "model-00002-of-00002.safetensors", 2000)
    elif damage == "index":
        (tmp_path / "model.safetensors.index.json").unlink()
    elif damage:
        (tmp_path / ".ckptfix").mkdir()
        (tmp_path / ".ckptfix" / UNFINISHED).touch()
    assert run(["verify", str(tmp_path)]) == (1 if damage else 3)
    line = f"nothing was verified: there is no manifest{words.format(tmp_path)}"
    assert line in out(capsys).splitlines()
    if damage in ("", "index"):
        assert run(words.format(tmp_path).partition("ckptfix ")[2].split()) == 0


def test_an_interrupted_dcp_save_is_not_sent_to_seal(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(FIXTURES / "dcp-2.13.0" / "fsdp2-clean" / "checkpoint", tmp_path / "c")
    (tmp_path / "c" / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert run(["verify", str(tmp_path / "c")]) == 1
    printed = out(capsys)
    assert (
        "nothing was verified: there is no manifest, and seal refuses a damaged or incomplete "
        "folder" in printed
    )
    assert "ckptfix seal" not in printed


def test_a_lone_file_says_what_a_seal_would_seal(tmp_path: Path, capsys: Capture) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": b"1"})
    assert run(["verify", str(tmp_path / "a.safetensors")]) == 3
    assert f"; to seal its folder: ckptfix seal {tmp_path}\n" in out(capsys)


def test_the_last_line_counts_what_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    """All digests match, and the structure alone is why the status is 1."""
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("model.safetensors", "model_1.safetensors"):
        write_safetensors(folder / name, {"x": b"1234"})
    (folder / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert run(["seal", str(folder)]) == 0
    out(capsys)
    assert run(["verify", str(folder)]) == 1
    lines = out(capsys).splitlines()
    assert "files: 3 match" in lines
    assert lines[-1] == "wrong: 1 warning in the structure"


def test_a_sealed_folder_without_its_files(tmp_path: Path, capsys: Capture) -> None:
    folder = sealed(tmp_path / "c", "safetensors")
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    assert run(["verify", str(folder)]) == 1
    printed = out(capsys)
    assert " differ model.safetensors: missing\n" in printed
    assert printed.splitlines()[-1] == "wrong: 2 files that differ, 4 tensors that differ"
    assert run(["salvage", str(folder), str(tmp_path / "new")]) == 2
    assert (
        f"although its manifest lists 2 files; to see which: ckptfix verify {folder}"
        in capsys.readouterr().err
    )


def test_several_things_that_were_not_checked_are_many(tmp_path: Path, capsys: Capture) -> None:
    folder = sealed(tmp_path / "c", "safetensors")
    for name in ("notes.txt", "log.txt"):
        (folder / name).symlink_to("gone")
    assert run(["verify", str(folder)]) == 0
    assert "not checked: 2 files: each is a broken symbolic link\n" in out(capsys)


def test_models_in_each_others_place_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    for side, order in (("a", "st"), ("b", "ts")):
        folder = tmp_path / side
        folder.mkdir()
        for name, which in zip(("model.safetensors", "model_1.safetensors"), order, strict=True):
            write_safetensors(folder / name, {which: which.encode()})
    assert run(["seal", str(tmp_path / "a"), "--oms"]) == 0
    statement = str(tmp_path / "a" / "tensors.oms.json")
    out(capsys)
    assert run(["verify", str(tmp_path / "b"), "--oms", statement]) == 1
    lines = out(capsys).splitlines()
    (said,) = [line for line in lines if line.startswith(" differ positions of models: ")]
    assert said.startswith(" differ positions of models: model.safetensors in the statement ")
    assert lines[-1] == "wrong: models in different positions"
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert (
        "\npositions of models differ: model.safetensors in A matches model_1.safetensors in B, "
        in out(capsys)
    )


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("verify", "interrupted: nothing was changed"),
        ("seal", "interrupted: {} is unchanged"),
    ],
)
def test_an_interrupted_verb_says_what_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, verb: str, words: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    make_sharded(tmp_path)
    monkeypatch.setattr(
        f"ckptfix.cli.{'seal.seal' if verb == 'seal' else 'report.Report.progress'}", stop
    )
    assert run([verb, str(tmp_path)]) == 130
    assert capsys.readouterr().err.lstrip() == f"ckptfix: {words.format(tmp_path)}\n"


def test_a_value_that_is_no_plain_tensor_is_called_so(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "q.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors go out of use
        packed = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        torch.save({"w": torch.ones(2), "q": packed}, path)
    assert run(["verify", str(path)]) == 3
    assert "not checked: values in q.pt that are not plain tensors: 'q'\n" in out(capsys)


def test_equal_sizes_are_no_reason_of_an_undo_that_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"module.module.x": b"1234"})
    assert repair(tmp_path).status == 0
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(
        ChangedError,
        match=r"changed since repair 1 \(.*sha256 of its first and last bytes: expected",
    ):
        undo(tmp_path)


def test_notes_of_a_clean_checkpoint_are_counted_by_their_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("policy", "reference"):
        (tmp_path / name).mkdir()
        for end in ("", "_1"):
            weights = {f"w{end}": torch.rand(4), f"b{end}": torch.rand(4)}
            save_file(weights, tmp_path / name / f"model{end}.safetensors", {"format": "pt"})
            torch.save(weights, tmp_path / name / f"pytorch_model{end}.bin")
    assert run(["check", "-r", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(": 2 second-family")


def test_a_folder_below_without_findings_has_its_numbers_alone(tmp_path: Path) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    headline = str(check(tmp_path).headline(is_below=True))
    assert headline.startswith(f"{tmp_path}: 1 file, 1 tensor, ")


def test_after_a_repair_the_model_that_is_loaded_instead_is_named(tmp_path: Path) -> None:
    student, teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(student.parameters())
    student(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    own, other = student.state_dict(), teacher.state_dict()
    wrapper = torch.nn.Module()
    wrapper.module = student
    for name, weights in (("", own), ("_1", wrapper.state_dict()), ("_2", other)):
        torch.save(weights, tmp_path / f"pytorch_model{name}.bin")
    for name, weights in (("", own), ("_1", other)):
        save_file(weights, tmp_path / f"model{name}.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    for rank in range(2):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    receipt = repair(tmp_path)
    assert any("finds the wrong model in model_1.safetensors" in words for words in receipt.advice)

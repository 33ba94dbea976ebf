"""Repairs of folders with two families of one model: the user says which stays, and an undo brings
every byte back.
"""

import json
import shlex
import shutil
from itertools import permutations
from pathlib import Path

import pytest

from ckptfix import Policy, check, repair, undo
from ckptfix.cli import run
from tests.diagnosis.test_families import PAIRS, values, write
from tests.weight_loaders import REAL

KINDS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
LIBRARIES = ("transformers", "diffusers")
CODES = {"stale-family", "second-family", "index-mismatch"}


def name_of(library: str, kind: str) -> str:
    if library == "diffusers":
        return f"diffusion_pytorch_model{kind}"
    return f"{'pytorch_model' if kind.startswith('.bin') else 'model'}{kind}"


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.is_file()}


def keeping(*names: str) -> Policy:
    return Policy(families=frozenset(names))


def codes(root: Path) -> set[str]:
    return {finding.code for finding in check(root).findings}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("pair", [*permutations(KINDS, 2)], ids=" ".join)
@pytest.mark.parametrize("add", [0, 1])
def test_a_loader_takes_the_family_that_was_kept(
    library: str, pair: tuple[str, str], add: int, tmp_path: Path
) -> None:
    kept, aside = (name_of(library, kind) for kind in pair)
    for name, number in ((kept, 1), (aside, 1 + add)):
        write(tmp_path / name, values(number))
    before = contents(tmp_path)
    assert codes(tmp_path) == {"stale-family" if add else "second-family"}
    receipt = repair(tmp_path, policy=keeping(kept))
    assert receipt.status == 0
    assert len(receipt.steps) == 1
    assert contents(tmp_path).keys() < before.keys()
    assert codes(tmp_path) == set()
    options = {"use_safetensors": False} if (library, pair[0]) == ("diffusers", KINDS[3]) else {}
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns(".ckptfix", "copy"))
    assert REAL[library](copy, **options) == 1
    shutil.rmtree(copy)
    undo(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
@pytest.mark.parametrize("number", [0, 1])
def test_each_pair_of_names(pair: tuple[str, str], number: int, tmp_path: Path) -> None:
    for value, name in enumerate(pair):
        write(tmp_path / name, values(value))
    before = contents(tmp_path)
    repair(tmp_path, policy=keeping(pair[number]))
    assert (tmp_path / pair[number]).exists()
    assert not (tmp_path / pair[1 - number]).exists()
    assert codes(tmp_path).isdisjoint(CODES)
    undo(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("index", "file"), [(KINDS[2], KINDS[0]), (KINDS[2], KINDS[1]), (KINDS[3], KINDS[1])]
)
def test_an_index_without_its_shards_goes(
    library: str, index: str, file: str, tmp_path: Path
) -> None:
    stale, kept = name_of(library, index), name_of(library, file)
    write(tmp_path / stale, values(0))
    for shard in tmp_path.glob("*-of-*"):
        shard.unlink()
    write(tmp_path / kept, values(1))
    before = contents(tmp_path)
    (finding,) = check(tmp_path).all_findings
    if finding.severity.value == "error":
        with pytest.raises(OSError, match=r"No such file|does not appear"):
            REAL[library](tmp_path)
    for path in {*contents(tmp_path)} - {*before}:
        (tmp_path / path).unlink()
    refused = repair(tmp_path, policy=keeping(stale))
    assert (refused.steps, len(refused.unplanned)) == ((), 1)
    assert repair(tmp_path, policy=keeping(kept)).status == 0
    assert contents(tmp_path).keys() == {kept}
    undo(tmp_path)
    assert contents(tmp_path) == before
    repair(tmp_path, policy=keeping(kept))
    assert REAL[library](tmp_path) == 1


@pytest.mark.parametrize("keeps_shards", [True, False])
def test_shards_whose_index_was_not_written(keeps_shards: bool, tmp_path: Path) -> None:
    index, file = tmp_path / "model.safetensors.index.json", tmp_path / "pytorch_model.bin"
    write(index, values(0))
    index.unlink()
    write(file, values(1))
    before = contents(tmp_path)
    assert codes(tmp_path) == {"index-mismatch", "stale-family"}
    receipt = repair(tmp_path, policy=keeping(index.name if keeps_shards else file.name))
    assert receipt.status == 0
    assert codes(tmp_path) == set()
    assert file.exists() is not keeps_shards
    if keeps_shards:
        assert json.loads(index.read_text())["weight_map"].keys() == values(0).keys()
    undo(tmp_path)
    assert contents(tmp_path) == before
    repair(tmp_path, policy=keeping(index.name if keeps_shards else file.name))
    assert REAL["transformers"](tmp_path) == int(not keeps_shards)


def test_variants_adapters_and_other_models_stay(tmp_path: Path) -> None:
    names = (
        "model.safetensors",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "consolidated.safetensors",
    )
    for number, name in enumerate((*names, "model_1.safetensors", "pytorch_model_1.bin")):
        write(tmp_path / name, values(number))
    (tmp_path / "pytorch_model_1.bin").unlink()
    assert repair(tmp_path, policy=keeping("model.safetensors")).status == 0
    assert {*names} - {"pytorch_model.bin"} | {"model_1.safetensors"} == contents(tmp_path).keys()


REFUSED = {
    "models": "or the name of a file",
    "model.fp16.safetensors": (
        "no finding says that its model is also stored in another file or index"
    ),
    "consolidated.safetensors": (
        "no finding says that its model is also stored in another file or index"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_family_is_not_kept(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, file in enumerate(
        ("model.safetensors", "pytorch_model.bin", "model.fp16.safetensors")
    ):
        write(tmp_path / file, values(number))
    before = contents(tmp_path)
    assert run(["repair", str(tmp_path), "--keep", name]) != 0
    assert REFUSED[name] in "".join(capsys.readouterr())
    assert contents(tmp_path) == before


def test_both_of_two_and_a_damaged_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safe, other = tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin"
    write(safe, values(0))
    write(other, values(1))
    (tmp_path / "latest").symlink_to(other.name)
    for names, words in (
        ([safe.name, other.name], "--keep also names"),
        (
            [safe.name],
            "the symbolic link latest would break, because it points to pytorch_model.bin",
        ),
    ):
        assert (
            run(["repair", str(tmp_path), *(word for name in names for word in ("--keep", name))])
            == 1
        )
        assert words in capsys.readouterr().out
    (tmp_path / "latest").unlink()
    assert run(["repair", str(tmp_path), "--allow", "stale-family"]) == 1
    assert "choose what to keep with --keep FILE" in capsys.readouterr().out
    safe.write_bytes(safe.read_bytes()[:-4])
    assert run(["repair", str(tmp_path), "--keep", safe.name]) == 1
    assert "it is damaged or incomplete" in capsys.readouterr().out
    assert safe.exists()
    assert other.exists()
    assert run(["repair", str(tmp_path), "--keep", other.name]) == 0
    assert not safe.exists()


def test_a_copy_has_one_family_and_the_command_of_a_dry_run_keeps_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "model"
    root.mkdir()
    write(root / "model.safetensors.index.json", values(0))
    write(root / "model.safetensors", values(1))
    before = contents(root)
    repair(root, policy=keeping("model.safetensors"), output=tmp_path / "copy")
    assert contents(root) == before
    assert contents(tmp_path / "copy").keys() == {"model.safetensors"}
    run(["repair", str(root), "--keep", "model.safetensors.index.json", "--dry-run"])
    command = capsys.readouterr().out.rpartition("this plan: ckptfix ")[2]
    assert "--keep model.safetensors.index.json --expect " in command
    assert run(shlex.split(command)) == 0
    assert not (root / "model.safetensors").exists()

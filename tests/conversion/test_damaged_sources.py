"""Damaged sources, and sources that differ from their manifest: neither may become a checkpoint
that looks intact.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import Policy, check, repair, seal, verify
from ckptfix.conversion.migrate import migrate
from ckptfix.errors import OperationError, UsageError
from ckptfix.tensors.optimizers import Strategy
from tests.conversion.making import FORMATS
from tests.repairs.builders import RANDOM_STATES

FIXTURES = Path(__file__).parents[2] / "fixtures"
_STATE = {
    "a.weight": torch.randn(4, 4),
    "b.weight": torch.randn(4, 4),
    "c.weight": torch.randn(2, 2),
}


def write(path: Path, state: dict[str, torch.Tensor], **ties: str) -> None:
    if path.suffix == ".bin":
        torch.save({**state, **{name: state[kept] for name, kept in ties.items()}}, path)
    else:
        save_file(state, path, {"format": "pt", **ties})


def without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key != name}


_TIE = {"head.weight": "a.weight"}
_LATER: dict[str, tuple[Callable[[Path], None], str]] = {
    "lost": (lambda path: write(path, without(_STATE, "b.weight"), **_TIE), "'b.weight' is listed in the manifest"),
    "added": (lambda path: write(path, {**_STATE, "z": torch.ones(2)}, **_TIE), "'z' is not listed in the manifest"),
    "renamed": (
        lambda path: write(path, {**without(_STATE, "c.weight"), "x": _STATE["c.weight"]}, **_TIE),
        "'c.weight' is listed in the manifest, but missing",
    ),
    "untied": (lambda path: write(path, _STATE), "'head.weight' is listed in the manifest, but missing"),
    "retied": (lambda path: write(path, _STATE, **{"head.weight": "b.weight"}), "'head.weight' does not match its"),
}  # fmt: skip


@pytest.mark.parametrize("change", _LATER)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_changed_since_the_seal_is_refused(tmp_path: Path, name: str, change: str) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write(source / name, _STATE, **_TIE)
    seal(source)
    migrate(source, tmp_path / "b", to="dcp")
    later, words = _LATER[change]
    later(source / name)
    assert verify(source).status == 1
    with pytest.raises(OperationError, match=f"{words}.*ckptfix verify"):
        migrate(source, tmp_path / "c", to="dcp")
    assert not (tmp_path / "c").exists()


def test_a_tie_that_a_seal_saw_is_not_its_own_proof(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write(source / "model.safetensors", {f"module.module.{key}": one for key, one in _STATE.items()},
          **{f"module.module.{key}": f"module.module.{kept}" for key, kept in _TIE.items()})  # fmt: skip
    seal(source, force=True)
    repair(source)
    assert verify(source).status == 0
    write(source / "model.safetensors", load_file(source / "model.safetensors"))
    differing = [
        (one.name, one.text) for one in verify(source).items if one.outcome.value == "differ"
    ]
    assert differing == [("module.head.weight", "is missing")]


def test_a_model_that_is_gone_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write(source / "model.safetensors", _STATE)
    write(source / "model_1.safetensors", _STATE)
    seal(source)
    (source / "model_1.safetensors").unlink()
    with pytest.raises(OperationError, match="model_1"):
        migrate(source, tmp_path / "b", to="bin")


def test_a_repaired_folder_is_no_damaged_one(tmp_path: Path) -> None:
    """Of a file that a repair changed, no digest is known any more."""
    source = tmp_path / "a"
    source.mkdir()
    names = ("module.module.w", "module.module.v")
    parameters = [(name, torch.nn.Parameter(torch.ones(3))) for name in names]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for _, parameter in parameters).backward()
    optimizer.step()
    write(source / "model.safetensors", {name: one.detach().clone() for name, one in parameters})
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    for rank in range(2):
        torch.save({}, source / f"random_states_{rank}.pkl")
    seal(source, force=True)
    repair(source, policy=Policy(allow=frozenset({"nested-prefix"})))
    assert "" in json.loads((source / ".ckptfix/manifest.json").read_text())["sha256"].values()
    migrate(source, tmp_path / "b", to="bin")
    assert list(torch.load(tmp_path / "b" / "pytorch_model.bin")) == ["module.v", "module.w"]


def test_deepspeed_weights_as_in_training_are_not_those_that_were_sealed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "deepspeed-0.18.2" / "zero1-bf16" / "checkpoint", tmp_path / "a")
    seal(tmp_path / "a")
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="safetensors", dtype="original")
    assert any(
        "with a new dtype matched the manifest of the source" in words
        for words in receipt.not_checked
    )
    migrate(tmp_path / "a", tmp_path / "c", to="safetensors")


def test_a_folder_behind_a_link_is_that_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", _STATE)
    migrate(tmp_path / "a.safetensors", tmp_path / "real", to="dcp")
    (tmp_path / "link").symlink_to("real")
    seal(tmp_path / "link")
    assert verify(tmp_path / "real").status == verify(tmp_path / "link").status == 0


def flipped(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(needle) + len(needle) // 2] ^= 1
    path.write_bytes(data)


def test_damage_that_check_finds_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a"
    shutil.copytree(FIXTURES / "dcp-2.13.0" / "fsdp2-clean" / "checkpoint", source)
    for path in (source / "optimizer_0").glob("__1_*.distcp"):
        path.unlink()
    with pytest.raises(OperationError, match=r"missing-rank.*next: ckptfix check"):
        migrate(source, tmp_path / "b", to="safetensors")


def test_an_index_that_cannot_be_read_or_is_not_there(tmp_path: Path) -> None:
    for number in (1, 2):
        write(
            tmp_path / f"model-0000{number}-of-00002.safetensors",
            {f"{number}.weight": torch.ones(3)},
        )
    with pytest.raises(OperationError, match=r"index-mismatch.*next: ckptfix repair"):
        migrate(tmp_path, tmp_path.parent / "b", to="bin")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"1.we')
    with pytest.raises(OperationError, match="ckptfix repair"):
        migrate(tmp_path, tmp_path.parent / "b", to="bin")
    repair(tmp_path)
    migrate(tmp_path, tmp_path.parent / "b", to="bin")


_TO_REPAIR = {
    "doubled-model": "doubled-model",
    "doubled-model-bin": "doubled-model",
    "doubled-states": "doubled-model",
    "shifted-entries": "doubled-model",
    "nested-prefix": "nested-prefix",
}
"""Golden folder -> the code of its first error, which a default repair fixes."""


@pytest.mark.parametrize("case", _TO_REPAIR)
@pytest.mark.parametrize("to", [*FORMATS, *Strategy])
def test_an_error_that_a_repair_fixes_is_refused(tmp_path: Path, case: str, to: str) -> None:
    source = FIXTURES / "golden" / case / "checkpoint"
    state = "all" if to in [*Strategy] else "weights"
    for dry_run in (False, True):
        with pytest.raises(OperationError) as refusal:
            migrate(source, tmp_path / "b", to=to, state=state, dry_run=dry_run)
        words = str(refusal.value)
        assert words.startswith(f"{source}: {_TO_REPAIR[case]}: ")
        assert words.endswith(
            f"nothing was written; next: ckptfix repair {source}, or copy the error too: "
            "--allow-damage"
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("to", FORMATS)
def test_allowed_damage_is_named_and_carried_over(tmp_path: Path, to: str) -> None:
    source = FIXTURES / "golden" / "shifted-entries" / "checkpoint"
    for dry_run in (True, False):
        receipt = migrate(source, tmp_path / "b", to=to, allow_damage=True, dry_run=dry_run)
        words, *_ = receipt.warnings
        assert words.startswith(
            "--allow-damage: the copy still has doubled-model: model_1.safetensors: "
        )
        assert words.endswith(f"next, before you migrate again: ckptfix repair {source}")
    assert check(tmp_path / "b").status == 1


def test_allowed_damage_is_not_lost_bytes(tmp_path: Path) -> None:
    """Of what is cut or missing, a copy would look intact, whatever is allowed."""
    source = tmp_path / "a"
    shutil.copytree(FIXTURES / "golden" / "doubled-model" / "checkpoint", source)
    cut = source / "model_1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(OperationError, match="truncated: "):
        migrate(source, tmp_path / "b", to="bin", allow_damage=True)


def test_a_model_in_a_folder_below_is_refused_with_its_own_command(tmp_path: Path) -> None:
    below = tmp_path / "a" / "unet"
    below.mkdir(parents=True)
    write(
        below / "diffusion_pytorch_model.safetensors",
        {f"module.module.{key}": one for key, one in _STATE.items()},
    )
    (below / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    (tmp_path / "a" / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DModel"]}')
    with pytest.raises(
        OperationError,
        match=rf"nested-prefix.*next: ckptfix repair {below}, or copy the error too: "
        r"--allow-damage$",
    ):
        migrate(tmp_path / "a", tmp_path / "b", to="bin")
    migrate(tmp_path / "a", tmp_path / "b", to="bin", keys="auto")
    assert not [
        one for one in check(tmp_path / "b" / "unet").findings if one.severity.value == "error"
    ]


def test_a_repaired_source_is_migrated(tmp_path: Path) -> None:
    source = tmp_path / "a"
    shutil.copytree(FIXTURES / "golden" / "doubled-model" / "checkpoint", source)
    repair(source)
    assert (
        migrate(source, tmp_path / "b", to="dcp")
        .warnings[0]
        .startswith("optimizer.bin: copied unchanged")
    )


def test_what_only_the_user_can_judge_is_passed_on_with_a_word(tmp_path: Path) -> None:
    source = FIXTURES / "golden" / "identical-models" / "checkpoint"
    for dry_run in (True, False):
        receipt = migrate(source, tmp_path / "b", to="bin", dry_run=dry_run)
        assert [words.split(":")[0] for words in receipt.warnings][:1] == [
            "the source has identical-models"
        ]


def test_the_checksums_of_carried_archives_are_compared(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write(source / "model.safetensors", _STATE)
    moments = torch.randn(100)
    torch.save({"state": {0: {"exp_avg": moments}}, "param_groups": []}, source / "optimizer.bin")
    flipped(source / "optimizer.bin", moments.numpy().tobytes())
    with pytest.raises(OperationError, match=r"optimizer\.bin.*CRC-32"):
        migrate(source, tmp_path / "b", to="bin")
    migrate(source, tmp_path / "b", to="bin", verify=False)


def test_the_checksums_of_dcp_items_are_compared(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", _STATE)
    migrate(tmp_path / "a.safetensors", tmp_path / "a", to="dcp")
    flipped(tmp_path / "a" / "__0_0.distcp", _STATE["b.weight"].numpy().tobytes())
    with pytest.raises(OperationError, match="CRC-32"):
        migrate(tmp_path / "a", tmp_path / "b", to="bin")


def test_an_optimizer_in_a_layout_that_its_loader_does_not_look_for_is_told(
    tmp_path: Path,
) -> None:
    source = FIXTURES / "dcp-2.13.0" / "fsdp2-clean" / "checkpoint"
    (words,) = migrate(source, tmp_path / "a", to="safetensors").warnings
    assert words.startswith("optimizer_0: copied unchanged, but")
    assert "load_state expects optimizer.bin, so only the models can be loaded" in words
    assert migrate(source, tmp_path / "b", to="dcp").warnings == ()
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain" / "model.safetensors", _STATE)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "plain" / "optimizer.bin")
    (tmp_path / "plain" / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    (words,) = migrate(tmp_path / "plain", tmp_path / "c", to="dcp").warnings
    assert words.startswith("optimizer.bin: copied")


def test_names_that_safetensors_may_lack_are_told(tmp_path: Path) -> None:
    """transformers leaves the second name of a tie out of its files, and dcp.load looks for it."""
    write(tmp_path / "model.safetensors", _STATE)
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path.parent / f"{tmp_path.name}-out"
    out.mkdir()
    told = {
        to: migrate(tmp_path, out / to, to=to).not_checked for to in ("safetensors", "bin", "dcp")
    }
    assert [any("whether tied weights lack their second key" in one for one in words) for words in told.values()] == [
        False, False, True,
    ]  # fmt: skip


def test_the_dtype_of_training_is_deepspeeds_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", _STATE)
    with pytest.raises(UsageError, match="has no DeepSpeed weights"):
        migrate(tmp_path / "a.safetensors", tmp_path / "b", to="bin", dtype="original")


def test_a_surplus_that_safetensors_refuses_is_migrated_only_on_request(tmp_path: Path) -> None:
    """Bytes that were inserted into a tensor leave it, too, and the copy would look intact."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.arange(9.0)}, source / "model.safetensors", {"format": "pt"})
    with (source / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(OperationError, match="its values may be shifted; nothing was written"):
        migrate(source, tmp_path / "new", to="bin")
    assert not (tmp_path / "new").exists()
    receipt = migrate(source, tmp_path / "new", to="bin", allow_damage=True)
    assert "trailing-bytes" in receipt.warnings[0]
    assert torch.load(tmp_path / "new" / "pytorch_model.bin")["w"].tolist() == [*range(9)]

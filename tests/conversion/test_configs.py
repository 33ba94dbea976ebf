"""What a config says of its weights: which are tied, of what dtype they are, whether they are
codes.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import OperationError, check, migrate, seal
from ckptfix.cli import run
from ckptfix.verification.verify import verify
from tests.conversion.making import digests_at, names_below, write_safetensors
from tests.diagnosis.builders import NOWHERE


def folder_with(tmp_path: Path, config: object, state: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(("says", "copied"), [(False, True), (True, False), (None, False)])
def test_a_model_that_ties_nothing_gets_both_names(
    tmp_path: Path, says: bool | None, copied: bool
) -> None:
    shared = torch.randn(4, 4)
    config = {} if says is None else {"tie_word_embeddings": says}
    folder = folder_with(tmp_path, config, {"embed.weight": shared, "lm_head.weight": shared})
    assert seal(folder).written
    receipt = migrate(folder, tmp_path / "b", to="safetensors")
    names = load_file(tmp_path / "b" / "model.safetensors").keys()
    assert names == ({"embed.weight", "lm_head.weight"} if copied else {"embed.weight"})
    assert receipt.models[0].ties == (0 if copied else 1)
    assert digests_at(tmp_path / "b") == digests_at(folder)
    assert verify(tmp_path / "b").status == 0


@pytest.mark.slow
def test_transformers_finds_every_weight_of_a_model_tied_by_hand(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=20, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight = model.model.embed_tokens.weight
    (tmp_path / "a").mkdir()
    config.save_pretrained(tmp_path / "a")
    torch.save(model.state_dict(), tmp_path / "a" / "pytorch_model.bin")
    migrate(tmp_path / "a", tmp_path / "b", to="safetensors")
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_save_state_whose_ties_nobody_knows_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(tmp_path / "a" / "model.safetensors", {"w": torch.ones(2)})
    torch.save({}, tmp_path / "a" / "random_states_0.pkl")
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="bin")
    assert any(
        "whether tied weights lack their second key" in words for words in receipt.not_checked
    )
    assert migrate(tmp_path / "a", tmp_path / "c", to="safetensors").not_checked == ()


@pytest.mark.parametrize("to", ["bin", "safetensors"])
def test_check_of_a_migrated_bin_lists_the_unknown_ties(tmp_path: Path, to: str) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(tmp_path / "a" / "model.safetensors", {"w": torch.ones(2)})
    torch.save({}, tmp_path / "a" / "random_states_0.pkl")
    migrate(tmp_path / "a", tmp_path / "b", to=to)
    unchecked = [words for words in check(tmp_path / "b").not_checked if "tied weights" in words]
    assert len(unchecked) == (to == "bin")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_names_the_new_dtype(tmp_path: Path, key: str) -> None:
    config = {"a": 1.50, key: "float32", "text_config": {key: "float32"}, "x": "float32"}
    folder = folder_with(tmp_path, config, {"w": torch.ones(2)})
    os.chmod(folder / "config.json", 0o600)
    assert seal(folder).written
    receipt = migrate(folder, tmp_path / "b", to="safetensors", dtype="bf16")
    new = (tmp_path / "b" / "config.json").read_text()
    assert new == (folder / "config.json").read_text().replace(
        f'"{key}": "float32"', f'"{key}": "bfloat16"'
    )
    assert (tmp_path / "b" / "config.json").stat().st_mode & 0o777 == 0o600
    assert (receipt.rewritten, receipt.carried) == (("config.json",), ())
    assert receipt.bytes_to_write == sum(
        (tmp_path / "b" / n).stat().st_size for n in ("config.json", "model.safetensors")
    )
    assert verify(tmp_path / "b").status == 0
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("1.5", "2.5"))
    with pytest.raises(
        OperationError, match=r"config\.json does not match its digest in the manifest"
    ):
        migrate(folder, tmp_path / "c", to="safetensors", dtype="bf16")


@pytest.mark.parametrize("text", ["", "[", "[]", '{"dtype": 3}', "\xff"])
def test_a_config_that_makes_no_sense_is_carried_as_it_is(tmp_path: Path, text: str) -> None:
    folder = folder_with(tmp_path, {}, {"w": torch.ones(2)})
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert migrate(folder, tmp_path / "b", to="safetensors", dtype="bf16").carried == (
        "config.json",
    )
    assert (tmp_path / "b" / "config.json").read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize("kind", NOWHERE)
def test_a_config_that_leads_nowhere_is_none(tmp_path: Path, kind: str) -> None:
    folder = folder_with(tmp_path, {}, {"w": torch.ones(2)})
    edit, _ = NOWHERE[kind]
    edit(folder / "config.json")
    migrate(folder, tmp_path / "b", to="safetensors", allow_damage=True)
    assert list(load_file(tmp_path / "b" / "model.safetensors")) == ["w"]


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_codes_are_not_converted_without_their_scales(tmp_path: Path, config: object) -> None:
    state = {"l.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    if not config:
        state["l.weight_scale_inv"] = torch.rand(1)
    folder = folder_with(tmp_path, config, state)
    with pytest.raises(OperationError, match=r"'l\.weight' has dtype F8_E4M3.*leave --dtype out"):
        migrate(folder, tmp_path / "b", to="bin", dtype="bf16")
    migrate(folder, tmp_path / "b", to="safetensors")
    assert digests_at(tmp_path / "b") == digests_at(folder)


def test_numbers_that_become_infinite_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "w": torch.tensor([1e6, 2.0, torch.inf, torch.nan, -1e9]),
        "b": torch.ones(2),
        "x": torch.full((3,), 7e4),
    }
    save_file(state, tmp_path / "a.safetensors")
    receipt = migrate(tmp_path / "a.safetensors", tmp_path / "b.bin", to="bin", dtype="fp16")
    words = "a.safetensors: 5 finite numbers overflowed F16 and became infinite in 'w', 'x'"
    assert receipt.warnings == (words,)
    given = [
        "migrate",
        str(tmp_path / "a.safetensors"),
        str(tmp_path / "c.bin"),
        "--to",
        "bin",
        "--dtype",
        "fp16",
    ]
    assert run(given) == 0
    assert f"warning: {words}" in capsys.readouterr().out
    assert (
        migrate(tmp_path / "a.safetensors", tmp_path / "d.bin", to="bin", dtype="bf16").warnings
        == ()
    )
    torch.save({"w": torch.tensor([torch.inf, 4.0]).to(torch.float8_e5m2)}, tmp_path / "e.bin")
    assert migrate(tmp_path / "e.bin", tmp_path / "f.bin", to="bin", dtype="fp16").warnings == ()


@pytest.mark.parametrize("most", ["1KB", "5GB"])
def test_a_variant_keeps_its_name(tmp_path: Path, most: str) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(
        tmp_path / "a" / "model.fp16.safetensors", {f"w{n}": torch.ones(200) for n in range(3)}
    )
    migrate(tmp_path / "a", tmp_path / "b", to="bin", max_shard_size=most)
    if most == "5GB":
        assert names_below(tmp_path / "b") == {"pytorch_model.fp16.bin"}
    else:
        assert "pytorch_model.bin.index.fp16.json" in names_below(tmp_path / "b")
        assert "pytorch_model.fp16-00001-of-00003.bin" in names_below(tmp_path / "b")
    migrate(tmp_path / "b", tmp_path / "c", to="safetensors")
    assert names_below(tmp_path / "c") == {"model.fp16.safetensors"}
    assert digests_at(tmp_path / "c") == digests_at(tmp_path / "a")


def test_a_variant_that_a_folder_cannot_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(tmp_path / "a" / "model.fp16.safetensors", {"w": torch.ones(2)})
    (left_out,) = migrate(tmp_path / "a", tmp_path / "b", to="dcp").left_out
    assert left_out.what == "model.fp16.safetensors: variant 'fp16'"
    assert "add .fp16 to the name" in left_out.reason
    assert migrate(tmp_path / "b", tmp_path / "c", to="safetensors").left_out == ()


def test_names_in_a_sharded_optimizer_are_said_to_stay(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write_safetensors(tmp_path / "x" / "model.safetensors", {"module.w": torch.ones(2)})
    torch.save({}, tmp_path / "x" / "random_states_0.pkl")
    migrate(tmp_path / "x", tmp_path / "a", to="dcp")
    write_safetensors(tmp_path / "o.safetensors", {"optimizer.state.w.exp_avg": torch.ones(2)})
    migrate(tmp_path / "o.safetensors", tmp_path / "a" / "optimizer_0", to="dcp")
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="safetensors", keys="bare")
    assert any("in optimizers" in words for words in receipt.not_checked)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    target = tmp_path / os.fsdecode(b"caf\xe9.bin")
    migrate(tmp_path / "a.safetensors", target, to="bin")
    assert torch.equal(torch.load(target)["w"], torch.ones(2))

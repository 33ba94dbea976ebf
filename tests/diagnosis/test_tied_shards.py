"""Listed keys that no shard holds and that are tied to others: the Hub converts ``.bin`` shards and
keeps their index, which lists each key of a tie.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import check
from tests.stores.servers import upload_folder

T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
LLAMA = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


def build(name: str, **more: Any) -> Any:
    import transformers

    config = {"T5": T5, "GPT2": GPT2, "Llama": LLAMA}[name]
    heads = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel", "Llama": "ForCausalLM"}
    kind = getattr(transformers, f"{name}{heads[name]}")
    torch.manual_seed(0)
    return kind(getattr(transformers, f"{name}Config")(**config, **more))


def convert(model: Any, path: Path, *, records: bool = False, drop: str = "") -> list[str]:
    """Write two shards as the Hub converts them; return the listed keys that no shard holds.

    ``drop``: a key that is taken out, too.
    """
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    state = model.state_dict()
    keys = list(state)
    tied: dict[int, list[str]] = {}
    for key in keys:
        tied.setdefault(state[key].data_ptr(), []).append(key)
    dropped = {key: same[0] for same in tied.values() for key in same[1:]}
    dropped |= {drop: ""} if drop else {}
    kept = [key for key in keys if key not in dropped]
    weight_map: dict[str, str] = {}
    for number, part in ((1, kept[::2]), (2, kept[1::2])):
        name = f"model-{number:05}-of-00002.safetensors"
        metadata = {key: first for key, first in dropped.items() if records and first in part}
        tensors = {key: state[key].clone() for key in part}
        save_file(tensors, path / name, {"format": "pt", **metadata})
        weight_map |= dict.fromkeys(part, name)
        weight_map |= {key: name for key, first in dropped.items() if first in (*part, "")}
    size = sum(state[same[0]].nbytes for same in tied.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(dropped)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("name", "more"), [("T5", {}), ("GPT2", {}), ("Llama", {"tie_word_embeddings": True})]
)
def test_a_listed_key_that_is_tied_to_a_stored_one_is_a_note(
    tmp_path: Path, name: str, more: dict[str, Any], records: bool
) -> None:
    model = build(name, **more)
    dropped = convert(model, tmp_path, records=records)
    assert dropped
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    state = loaded.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    (note,) = check(tmp_path).all_findings
    count = "1 tensor" if len(dropped) == 1 else f"{len(dropped)} tensors"
    sentence = f"lists {count} that no shard holds and that loaders tie to others: "
    assert str(note).startswith(f"model.safetensors.index.json {sentence}{dropped[0]!r}")
    assert check(tmp_path).status == 0
    url = f"memory://{os.urandom(6).hex()}/model"
    upload_folder(tmp_path, url)
    assert list(map(str, check(url).all_findings)) == [str(note)]


def test_a_recorded_tie_needs_no_config(tmp_path: Path) -> None:
    convert(build("GPT2"), tmp_path, records=True)
    (tmp_path / "config.json").unlink()
    assert check(tmp_path).status == 0


def test_a_config_of_transformers_4_that_leaves_the_flag_out_ties(tmp_path: Path) -> None:
    convert(build("GPT2"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps({**config, "transformers_version": "4.30.0"}))
    assert check(tmp_path).status == 0


@pytest.mark.parametrize(
    ("name", "more", "drop"),
    [
        ("Llama", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("Llama", {"tie_word_embeddings": True}, "model.embed_tokens.weight"),
        ("GPT2", {}, "transformer.wte.weight"),
        ("GPT2", {}, "transformer.h.0.ln_1.weight"),
        ("T5", {}, "shared.weight"),
    ],
)
def test_a_key_that_is_tied_to_nothing_stored_is_lost(
    tmp_path: Path, name: str, more: dict[str, Any], drop: str
) -> None:
    model = build(name, **more)
    convert(model, tmp_path, drop=drop)
    (finding,) = (one for one in check(tmp_path).findings if one.code == "index-mismatch")
    assert (finding.severity.value, check(tmp_path).status) == ("error", 1)
    assert repr(drop) in str(finding)

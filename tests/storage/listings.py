"""Folders of 10 TB as lists of units: the shapes of DeepSeek-V3, saved by 1,024 ranks, and files of
50 GB.
"""

from ckptfix.storage.results import Identity, Unit

_LAYERS, _DENSE, _EXPERTS = 61, 3, 256
_HIDDEN, _WIDE, _NARROW, _VOCABULARY = 7168, 18432, 2048, 129280
_RANKS = 1024
_FLOAT = 4


def shapes() -> dict[str, int]:
    """Return the parameters of the model: name -> number of elements, 671 billion in all."""
    found = {
        "embed_tokens": _VOCABULARY * _HIDDEN,
        "lm_head": _VOCABULARY * _HIDDEN,
        "norm": _HIDDEN,
    }
    attention = {
        "q_a_proj": 1536 * _HIDDEN, "q_b_proj": 24576 * 1536, "kv_a_proj": 576 * _HIDDEN,
        "kv_b_proj": 32768 * 512, "o_proj": _HIDDEN * 16384, "input_layernorm": _HIDDEN,
        "post_attention_layernorm": _HIDDEN, "q_a_layernorm": 1536, "kv_a_layernorm": 512,
    }  # fmt: skip
    for layer in range(_LAYERS):
        found |= {f"layers.{layer}.{name}": size for name, size in attention.items()}
        if layer < _DENSE:
            found |= {
                f"layers.{layer}.mlp.{name}": _WIDE * _HIDDEN for name in ("gate", "up", "down")
            }
            continue
        found[f"layers.{layer}.mlp.gate"] = _EXPERTS * _HIDDEN
        for expert in (*range(_EXPERTS), "shared"):
            for name in ("gate", "up", "down"):
                found[f"layers.{layer}.experts.{expert}.{name}"] = _NARROW * _HIDDEN
    return found


def saved_by_ranks() -> list[Unit]:
    """Return the units of a seal: weights and their average in fp32 with tensors, two moments
    without.
    """
    parameters = shapes()
    total = sum(parameters.values()) * _FLOAT
    units = []
    for folder, copies in (
        ("pytorch_model_fsdp_0", 1),
        ("pytorch_model_fsdp_1", 1),
        ("optimizer_0", 2),
    ):
        files = [
            Identity(f"{folder}/__{rank}_0.distcp", copies * total // _RANKS, 0, rank)
            for rank in range(_RANKS)
        ]
        units += [Unit(file.name, file.size, (file,), -1) for file in files]
        if copies == 1:
            units += [
                Unit(f"{folder}/{name}", size * _FLOAT, (files[0],), place)
                for place, (name, size) in enumerate(parameters.items())
            ]
    return units


def long_files(each: int = 50_000_000_000, count: int = 200, part: int | None = None) -> list[Unit]:
    """Return the units of long safetensors files; ``part``: cut each into ranges of so many
    bytes.
    """
    units = []
    for number in range(count):
        file = Identity(f"model-{number:05}.safetensors", each, 0, number)
        begins = range(0, each, part or each)
        units += [
            Unit(f"{file.name}:{begin}", min(part or each, each - begin), (file,), begin)
            for begin in begins
        ]
        tensors = each // 500_000_000
        units += [
            Unit(f"{file.name}#{tensor}", 500_000_000, (file,), tensor * 500_000_000)
            for tensor in range(tensors)
        ]
    return units

"""Folders put together at random: entries, shards, indexes, wrappers, trailing bytes, in two
containers at once.

Whatever is in them, a repair makes no new error, hides no lost tensor, has nothing left to do the
second time, and can be undone byte for byte. It fails only where an option of the user would add a
finding, and then changes nothing.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import Keys, Policy, check, repair, undo
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.sharded import IndexMismatch
from ckptfix.errors import RolledBackError
from tests.repairs.builders import RANDOM_STATES, snapshot, write_safetensors
from tests.weight_loaders import assert_none_switched, loaded

CHAINS = (
    "",
    "",
    "module.",
    "module.module.",
    "module.module.module.",
    "_orig_mod.",
    "module._orig_mod.",
)
MODELS = ({"a": b"1" * 8, "b.c": b"2" * 4}, {"a": b"9" * 8, "b.c": b"2" * 4}, {"x": b"5"})


def write(path: Path, tensors: dict[str, bytes], tail: bytes) -> None:
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, tail=tail)
        return
    torch.save(
        {name: torch.tensor(list(data), dtype=torch.uint8) for name, data in tensors.items()}, path
    )
    with path.open("ab") as file:
        file.write(tail)


def write_entries(folder: Path, rnd: random.Random, stem: str, suffix: str) -> None:
    for index in sorted(rnd.sample(range(5), rnd.randint(1, 4))):
        chain, tail = rnd.choice(CHAINS), rnd.choice([b""] * 6 + [bytes(10)])
        tensors = {chain + name: data for name, data in rnd.choice(MODELS).items()}
        write(folder / f"{stem}{f'_{index}' if index else ''}{suffix}", tensors, tail)


def write_shards(folder: Path, rnd: random.Random) -> None:
    suffix, stem = rnd.choice([".safetensors", ".bin"]), rnd.choice(["model", "unet"])
    total, chain = rnd.randint(1, 3), rnd.choice(CHAINS)
    listed_chain = rnd.choice([chain, chain, "", None])
    weight_map: dict[str, str] = {}
    for number in range(1, total + 1):
        own = chain if rnd.random() < 0.85 else rnd.choice(CHAINS)
        name = f"{stem}-{number:05}-of-{total:05}{suffix}"
        if rnd.random() < 0.9:
            tail = rnd.choice([b""] * 6 + [bytes(10)])
            write(folder / name, {f"{own}{number}.{end}": bytes([number, 7]) for end in "pq"}, tail)
        weight_map |= {f"{listed_chain}{number}.{end}": name for end in "pq" if rnd.random() < 0.95}
        if rnd.random() < 0.05:
            weight_map[f"{listed_chain}lost"] = name
    if listed_chain is not None:
        path = folder / f"{stem}{suffix}.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def any_policy(rnd: random.Random) -> Policy:
    allow = ["entry-gap", "trailing-bytes", "identical-models"]
    return Policy(
        keys=rnd.choice([Keys.AUTO] * 3 + [Keys.BARE, Keys.DDP]),
        atomic=rnd.random() < 0.2,
        keep=rnd.choice([{}, {}, {Role.MODEL: 2}]),
        allow=frozenset(rnd.sample(allow, rnd.choice([0, 0, 1, 2]))),
        only=frozenset(
            rnd.choice([(), (), (), ("doubled-model",), ("nested-prefix",), ("index-mismatch",)])
        ),
    )


def errors(folder: Path) -> set[str]:
    return {finding.code for finding in check(folder).findings if finding.severity.value == "error"}


def lost_names(findings: Any) -> set[str]:
    return {
        name for finding in findings if isinstance(finding, IndexMismatch) for name in finding.lost
    }


@pytest.mark.parametrize("seed", range(300))
def test_any_folder(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    for rank in range(rnd.randint(0, 2)):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if rnd.random() < 0.6:
            write_entries(tmp_path, rnd, stem, suffix)
    if rnd.random() < 0.4 or not any(tmp_path.iterdir()):
        write_shards(tmp_path, rnd)
    if not any(tmp_path.iterdir()):
        write_entries(tmp_path, rnd, "model", ".safetensors")
    policy = any_policy(rnd)
    before, found, taken = snapshot(tmp_path), errors(tmp_path), loaded(tmp_path)
    try:
        receipt = repair(tmp_path, policy=policy)
    except RolledBackError as error:
        # Only what the user allowed moves a file next to one of another format, which loaders would
        # take instead.
        if "the repair caused a new finding" not in str(error) or not (policy.allow or policy.keep):
            raise
        assert {
            name: data for name, data in snapshot(tmp_path).items() if ".ckptfix" not in name
        } == before
        repair(tmp_path)
        return
    if policy == Policy():
        assert_none_switched(taken, loaded(tmp_path))
    left = errors(tmp_path)
    assert left <= found, "a repair made an error that was not there"
    if lost_names(receipt.found):
        assert "index-mismatch" in left, "lost tensors were hidden"
    once = snapshot(tmp_path)
    assert repair(tmp_path, policy=policy).steps == ()
    assert snapshot(tmp_path) == once
    if receipt.transaction is not None:
        undo(tmp_path)
    assert {
        name: data for name, data in snapshot(tmp_path).items() if ".ckptfix" not in name
    } == before

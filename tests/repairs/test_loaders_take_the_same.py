"""After the default repair every loader takes the weights that it took before, or it failed
before.
"""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import check, repair, undo
from ckptfix.diagnosis.findings.sharded import IndexMismatch, UndecidedIndex
from tests.diagnosis.test_families import values, write
from tests.repairs.builders import RANDOM_STATES, snapshot
from tests.weight_loaders import REAL, assert_none_switched, loaded, tensors_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDERS = sorted((FIXTURES / "golden").iterdir()) + sorted(FIXTURES.glob("accelerate-*/*"))

NAMES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json", "unet.safetensors.index.json",
    "adapter_model.safetensors", "adapter_model.bin", "model_1.safetensors", "model_2.safetensors",
    "pytorch_model_1.bin", "model.fp16.safetensors", "model.safetensors.index.fp16.json",
)  # fmt: skip


def has_next_repair(root: Path) -> bool:
    return any(
        line.startswith(("next: ckptfix repair", "then: ckptfix repair")) for line in words(root)
    )


def words(root: Path) -> list[str]:
    return [str(line) for line in check(root).lines()]


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_of_golden_folders(tmp_path: Path, golden: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden / "checkpoint", folder)
    before, advised = loaded(folder), has_next_repair(folder)
    receipt = repair(folder)
    assert_none_switched(before, loaded(folder))
    assert bool(receipt.steps) == advised


def any_folder(root: Path, rnd: random.Random, names: Sequence[str] = NAMES) -> None:
    """Write families of one or several saves, of which some lost their index or have wrapped
    keys.
    """
    for name in rnd.sample(names, rnd.randint(1, min(4, len(names)))):
        number = rnd.choice([0, 0, 1, 2])
        chain = rnd.choice(["", "", "", "module.", "module.module."])
        write(root / name, {chain + key: tensor for key, tensor in values(number).items()})
        if name.endswith(".json") and rnd.random() < 0.6:
            (root / name).unlink()
        elif rnd.random() < 0.1:
            data = (root / name).read_bytes()
            (root / name).write_bytes(rnd.choice([data[: len(data) // 2], b""]))
    for rank in range(rnd.choice([0, 0, 1, 2])):
        (root / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)


@pytest.mark.parametrize("seed", range(300))
def test_of_folders_with_several_families(tmp_path: Path, seed: int) -> None:
    any_folder(tmp_path, random.Random(seed))
    before, files, advised = loaded(tmp_path), snapshot(tmp_path), has_next_repair(tmp_path)
    for finding in check(tmp_path).findings:
        for loader, path in getattr(finding, "loads", {}).items():
            if loader in before and "_1" not in path.name:
                assert before[loader] == tensors_of(tmp_path / path), (
                    f"{loader} takes another file: {finding}"
                )
    receipt = repair(tmp_path)
    assert_none_switched(before, loaded(tmp_path))
    assert bool(receipt.steps) == advised
    assert repair(tmp_path).steps == ()
    if receipt.transaction is not None:
        undo(tmp_path)
    assert {
        name: data for name, data in snapshot(tmp_path).items() if ".ckptfix" not in name
    } == files


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_real_loaders_take_what_their_model_says(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    rnd = random.Random(seed)
    loader = sorted(REAL)[seed % len(REAL)]
    # Each family has another value, so that the mean of a weight names the family.
    for number, name in enumerate(rnd.sample(NAMES[:11], rnd.randint(1, 4))):
        write(tmp_path / name, values(number))
        if name.endswith(".json") and rnd.random() < 0.4:
            (tmp_path / name).unlink()
    expected = loaded(tmp_path).get(loader)
    try:
        value = REAL[loader](tmp_path)
    except (OSError, ValueError, RuntimeError):
        assert expected is None
        return
    assert expected is not None
    assert value == torch.frombuffer(bytearray(expected["a.weight"]), dtype=torch.float32).mean()


# --- the missing index next to another family
# -----------------------------------------------------------------

STALE = [
    ("model.safetensors.index.json", "pytorch_model.bin", "transformers"),
    ("model.safetensors.index.json", "pytorch_model.bin.index.json", "transformers"),
    (
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
        "diffusers",
    ),
    ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.bin", "diffusers"),
    ("pytorch_model.bin.index.json", "model.safetensors.index.json", "load_checkpoint_in_model"),
    ("unet.safetensors.index.json", "model.safetensors.index.json", "load_checkpoint_in_model"),
]
"""A missing index, the family that a loader takes now, and that loader."""


def index_findings(root: Path) -> list[IndexMismatch]:
    return [finding for finding in check(root).findings if isinstance(finding, IndexMismatch)]


@pytest.mark.parametrize(("index", "taken", "loader"), STALE)
def test_no_index_is_written_that_would_switch_a_loader(
    tmp_path: Path, index: str, taken: str, loader: str
) -> None:
    write(tmp_path / index, values(1))
    (tmp_path / index).unlink()
    write(tmp_path / taken, values(2))
    before = loaded(tmp_path)
    (finding,) = index_findings(tmp_path)
    assert isinstance(finding, UndecidedIndex)
    assert str(finding.loads[loader]) == taken
    assert f" {taken} now, and a rebuilt index would change that" in str(finding)
    assert "next: ckptfix repair" not in "\n".join(words(tmp_path))
    receipt = repair(tmp_path)
    assert (receipt.steps, receipt.status) == ((), 1)
    assert loaded(tmp_path) == before
    # As the advice says: without the other family the index is written.
    for path in tmp_path.glob(f"{taken.partition('.')[0]}*"):
        if path.name == taken or taken.endswith(".json"):
            path.unlink()
    repair(tmp_path)
    assert (tmp_path / index).exists()


def test_the_index_of_equal_weights_is_written(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(index, values(1))
    index.unlink()
    write(tmp_path / "pytorch_model.bin", values(1))
    assert has_next_repair(tmp_path)
    repair(tmp_path)
    assert index.exists()
    assert check(tmp_path).status == 0


def test_a_repair_compares_every_byte_before_it_writes_the_index(tmp_path: Path) -> None:
    """Samples show no difference; a wrapped adapter gives the repair another step, after which it
    looks again.
    """
    tensors = {"a": torch.zeros(1 << 16), "b": torch.zeros(1 << 16)}
    index = tmp_path / "model.safetensors.index.json"
    write(index, tensors)
    index.unlink()
    tensors["b"][2000] = 1
    write(tmp_path / "pytorch_model.bin", tensors)
    save_file({"module.module.x": torch.ones(2)}, tmp_path / "lone.safetensors", {"format": "pt"})
    assert repair(tmp_path).status == 1
    assert not index.exists()


def test_a_file_that_no_loader_can_read_is_no_reason_to_ask(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(index, values(1))
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    repair(tmp_path)
    assert index.exists()

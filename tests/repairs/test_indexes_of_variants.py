"""The index of a variant's shards has the name under which the libraries look for it."""

import json
from pathlib import Path

import pytest

from ckptfix import check, repair
from tests.diagnosis.test_families import values, write
from tests.weight_loaders import by_diffusers, by_transformers

OF_OLD_DIFFUSERS = "{stem}-0000{number}-of-00002.fp16.safetensors"
OF_OTHERS = "{stem}.fp16-0000{number}-of-00002.safetensors"


def write_shards(root: Path, stem: str, form: str) -> dict[str, str]:
    """Write two shards without an index, and return its weight map."""
    root.mkdir()
    weight_map = {}
    for number, (key, tensor) in enumerate(values(3).items(), 1):
        weight_map[key] = form.format(stem=stem, number=number)
        write(root / weight_map[key], {key: tensor})
    (root / "config.json").write_text('{"_class_name": "Model"}' if "diffusion" in stem else "{}")
    return weight_map


@pytest.mark.parametrize("form", [OF_OLD_DIFFUSERS, OF_OTHERS])
@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_the_library_loads_the_variant_after_a_repair(tmp_path: Path, stem: str, form: str) -> None:
    loads = by_transformers if stem == "model" else by_diffusers
    # Diffusers cuts the name of the old index at the first dots of the path.
    root = tmp_path / "v1.0"
    write_shards(root, stem, form)
    assert [finding.code for finding in check(root).findings] == ["index-mismatch"]
    repair(root)
    assert (root / f"{stem}.safetensors.index.fp16.json").exists()
    assert check(root).status == 0
    assert loads(root, variant="fp16") == 3


def test_an_index_under_the_old_name_stays_where_it_is(tmp_path: Path) -> None:
    stem = "diffusion_pytorch_model"
    root = tmp_path / "unet"
    weight_map = write_shards(root, stem, OF_OLD_DIFFUSERS)
    index = root / f"{stem}.safetensors.fp16.index.json"
    document = json.dumps({"metadata": {}, "weight_map": weight_map})
    index.write_text(document)
    assert check(root).findings == ()
    index.write_text(document[:40])
    repair(root)
    assert json.loads(index.read_text())["weight_map"] == weight_map
    assert not (root / f"{stem}.safetensors.index.fp16.json").exists()

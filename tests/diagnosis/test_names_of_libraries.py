"""Weights with the name of another library than their config's: transformers and diffusers
themselves decide.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptfix import check
from tests.diagnosis.test_misnamed import Small
from tests.diagnosis.test_odd_indexes import Diffusers, Library, Transformers
from tests.sampling import sampled
from tests.stores.servers import upload_folder

KINDS: Mapping[str, type[Library]] = {"transformers": Transformers, "diffusers": Diffusers}
LIBRARIES: Mapping[str, Callable[[Path], None]] = {
    name: lambda path, kind=kind: kind().model.save_pretrained(path)  # type: ignore[misc]
    for name, kind in KINDS.items()
}
WRITTEN = {"transformers": "model.safetensors", "diffusers": "diffusion_pytorch_model.safetensors"}
FORMS = [".safetensors", ".fp16.safetensors", ".bin", ".safetensors.index.json", ".bin.index.json"]
STEMS = ["model", "pytorch_model", "diffusion_pytorch_model"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for name, save in LIBRARIES.items():
        save(root / name)
    return {name: root / name for name in LIBRARIES}


def write(folder: Path, library: str, name: str) -> None:
    """Move the weights of a model to another name: to one file, or to a shard with its index."""
    written, at = folder / WRITTEN[library], folder / name
    tensors = load_file(written)
    if name.endswith(".json"):
        stem, suffix = name.removesuffix(".index.json").split(".")
        at = folder / f"{stem}-00001-of-00001.{suffix}"
        weight_map = dict.fromkeys(tensors, at.name)
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if at.suffix == ".bin":
        torch.save(tensors, at)
        written.unlink()
    else:
        written.rename(at)


def is_found(folder: Path, library: str, name: str) -> bool:
    """Return whether ``from_pretrained`` finds the weights of a model."""
    options: dict[str, Any] = {"variant": "fp16"} if ".fp16." in name else {}
    if library == "diffusers":
        options |= {"use_safetensors": ".safetensors" in name}
    try:
        type(KINDS[library]().model).from_pretrained(folder, **options)
    except OSError:
        return False
    return True


def verdict(path: Path | str) -> list[tuple[str, str]]:
    findings = check(path).all_findings
    return [(one.code, str(one)) for one in findings if one.severity.value != "note"]


CASES = [
    (library, f"{stem}{form}")
    for library in LIBRARIES
    for stem in STEMS
    for form in FORMS
    if (stem != "model" or ".bin" not in form) and (stem != "pytorch_model" or ".bin" in form)
]


@pytest.mark.parametrize(("library", "name"), sampled(CASES))
def test_weights_are_misnamed_if_the_library_of_their_config_does_not_find_them(
    saved: Mapping[str, Path], tmp_path: Path, library: str, name: str
) -> None:
    folder = Path(shutil.copytree(saved[library], tmp_path / "unet"))
    write(folder, library, name)
    problems = verdict(folder)
    assert [code for code, _ in problems] == (
        [] if is_found(folder, library, name) else ["incomplete-checkpoint"]
    )
    url = f"memory://{os.urandom(6).hex()}/unet"
    upload_folder(folder, url)
    assert verdict(url) == problems
    for one in check(folder).findings:
        if one.code == "incomplete-checkpoint":
            (folder / name).rename(folder / one.path)
            assert is_found(folder, library, name)
            assert verdict(folder) == []


def test_the_sentence_names_the_library_and_the_advice_the_name(
    saved: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved["diffusers"], tmp_path / "unet"))
    write(folder, "diffusers", "model.safetensors")
    (finding,) = check(folder).findings
    assert (
        str(finding)
        == "diffusion_pytorch_model.safetensors is missing: config.json belongs to diffusers, which "
        "does not look for 'model.safetensors'"
    )
    assert finding.advice.startswith(
        "if 'model.safetensors' is that file, rename it to diffusion_pytorch_model.safetensors"
    )


def test_save_state_writes_its_names_next_to_any_config(
    saved: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = Small().saved(tmp_path / "checkpoint-10")
    for library, source in saved.items():
        shutil.copy(source / "config.json", folder)
        shutil.copytree(source, folder / f"{library}_ema")
        assert verdict(folder) == []


@pytest.mark.parametrize("below", ["unet", "unet_ema", "controlnet", "text_encoder"])
@pytest.mark.parametrize("is_save_state", [True, False])
def test_a_config_that_cannot_be_read_is_told_of_a_folder_below(
    saved: Mapping[str, Path], tmp_path: Path, below: str, is_save_state: bool
) -> None:
    folder = tmp_path / "checkpoint-10"
    library = "transformers" if below == "text_encoder" else "diffusers"
    if is_save_state:
        Small().saved(folder)
    shutil.copytree(saved[library], folder / below)
    where = folder if is_save_state else folder / below
    assert verdict(where) == []
    (folder / below / "config.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    ((code, words),) = verdict(where)
    assert code == "incomplete-checkpoint"
    assert words.removeprefix(f"{below}/").startswith("config.json: a git-LFS pointer")

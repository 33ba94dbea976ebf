"""The file that each loader takes, by the names in a folder: the answer is compared with the real
loaders.
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from ckptfix.checkpoint.filenames import ModelName
from ckptfix.checkpoint.loading_order import first_loader, loads, model_names
from tests.diagnosis.test_families import values, write
from tests.sampling import sampled
from tests.weight_loaders import REAL

FAMILIES = {
    "model": (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    "diffusion_pytorch_model": (
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.bin.index.json",
    ),
    "adapter_model": ("adapter_model.safetensors", "adapter_model.bin"),
}
LOADERS = {
    "model": ("load_state", "transformers", "load_checkpoint_in_model"),
    "diffusion_pytorch_model": ("diffusers", "load_checkpoint_in_model"),
    "adapter_model": ("PEFT",),
}


def folders() -> Iterator[tuple[str, tuple[str, ...]]]:
    for stem, names in FAMILIES.items():
        for number in range(1, len(names) + 1):
            yield from ((stem, some) for some in combinations(names, number))


@pytest.mark.parametrize(("stem", "names"), sampled(list(folders())))
def test_each_loader_takes_the_name_of_the_answer(
    tmp_path: Path, stem: str, names: tuple[str, ...]
) -> None:
    for number, name in enumerate(names):
        write(tmp_path / name, values(number))
    answer = loads(model_names(path.name for path in tmp_path.iterdir()), ModelName(stem))
    for loader in LOADERS[stem]:
        if loader in ("diffusers", "PEFT"):
            pytest.importorskip(loader.lower())
        if loader in answer.taken:
            assert REAL[loader](tmp_path) == names.index(answer.taken[loader]), loader
        else:
            with pytest.raises((OSError, ValueError)):
                REAL[loader](tmp_path)


OPTIONAL = ["diffusion_pytorch_model.bin.index.json"]


def test_an_option_of_diffusers_takes_the_index_of_bin_files() -> None:
    answer = loads(model_names(OPTIONAL), ModelName("diffusion_pytorch_model"))
    assert answer.by_option == {"diffusers": OPTIONAL[0]}
    assert "diffusers" not in answer.taken


def test_two_indexes_of_any_models_are_refused_by_one_loader() -> None:
    names = ["model.safetensors.index.json", "net.safetensors.index.json"]
    assert loads(model_names(names), ModelName("model")).refused_by == ("load_checkpoint_in_model",)
    assert loads(model_names([*names, "model.safetensors"]), ModelName("net")).refused_by == ()
    assert loads(model_names(names[1:]), ModelName("model")).taken == {
        "load_checkpoint_in_model": names[1]
    }


@pytest.mark.parametrize("names", [names for stem, names in folders() if stem != "adapter_model"])
def test_an_index_that_is_added_or_removed_counts_like_one_of_the_folder(
    names: tuple[str, ...],
) -> None:
    for stem in FAMILIES:
        model = ModelName(stem)
        for index in (name for name in names if name.endswith(".json")):
            others = [name for name in names if name != index]
            is_own = index in FAMILIES[stem]
            assert loads(model_names(names), model, removed=index) == loads(
                model_names(others), model
            )
            if is_own:
                assert loads(model_names(others), model, added=index) == loads(
                    model_names(names), model
                )


def test_a_second_model_of_a_folder_is_for_load_state_alone() -> None:
    names = ["model.safetensors", "model_1.safetensors", "pytorch_model_1.bin"]
    assert loads(model_names(names), ModelName("model"), 1).taken == {
        "load_state": "model_1.safetensors"
    }
    assert first_loader(ModelName("model"), 1) == "load_state"
    assert first_loader(ModelName("net")) is None

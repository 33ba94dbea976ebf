"""Families of files that hold one model: which are compared, what is said of them, and which one
each loader takes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckptfix import check, repair
from ckptfix.diagnosis.findings.stored_twice import SecondFamily, StaleFamily
from tests.repairs.builders import RANDOM_STATES
from tests.weight_loaders import REAL

FIXTURES = Path(__file__).parents[2] / "fixtures"
Tensors = Mapping[str, torch.Tensor]


def values(number: float, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 3), float(number)) for name in names or ("a.weight", "b.weight")}


def write(path: Path, tensors: Tensors) -> None:
    """Write a file, or an index with a shard for each tensor where the name is that of an index."""
    suffix = ".bin" if ".bin" in path.name else ".safetensors"
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save(dict(tensors), path)
        return
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path, {"format": "pt"})
        return
    stem, shards = path.name.partition(suffix)[0], {}
    variant = path.name.partition(".index")[2].removesuffix(".json")
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        shards[name] = f"{stem}{variant}-{number:05}-of-{len(tensors):05}{suffix}"
        write(path.with_name(shards[name]), {name: tensor})
    path.write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def families(root: Path, *, data: bool = False) -> list[StaleFamily | SecondFamily]:
    """Return the findings about families, after a look that there are no others."""
    findings = check(root, data=data).all_findings
    # These adapters have no config, because transformers would load them together with the model.
    others = {"unloadable-pickle", "incomplete-checkpoint"}
    assert {one.code for one in findings} <= {"stale-family", "second-family"} | others
    return [one for one in findings if isinstance(one, StaleFamily | SecondFamily)]


PAIRS = [
    ("model.safetensors", "pytorch_model.bin"),
    ("model.safetensors", "model.safetensors.index.json"),
    ("model.safetensors", "pytorch_model.bin.index.json"),
    ("model.safetensors.index.json", "pytorch_model.bin"),
    ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("model_1.safetensors", "pytorch_model_1.bin"),
    ("model.fp16.safetensors", "pytorch_model.fp16.bin"),
    ("model.fp16.safetensors", "model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    ("adapter_model.safetensors", "adapter_model.bin"),
    ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin"),
]
"""Two families of which a loader takes one, the first of them first."""


@pytest.mark.parametrize(
    ("pair", "data"), [*((pair, False) for pair in PAIRS), *((pair, True) for pair in PAIRS[:2])]
)
def test_other_values_in_two_families_are_a_warning(
    tmp_path: Path, pair: tuple[str, str], data: bool
) -> None:
    for number, name in enumerate(pair):
        write(tmp_path / name, values(number))
    (finding,) = families(tmp_path, data=data)
    assert isinstance(finding, StaleFamily)
    assert (str(finding.path), str(finding.preferred)) == (pair[1], pair[0])
    assert finding.difference == "a.weight"
    assert check(tmp_path).status == 1
    write(tmp_path / pair[1], values(0))
    (note,) = families(tmp_path, data=data)
    assert isinstance(note, SecondFamily)
    assert "(2 keys, bytes equal)" in str(note)
    assert check(tmp_path, data=data).status == int(pair[0].startswith("adapter_model"))


ONE = "model.safetensors"
HEALTHY: dict[str, dict[str, Tensors]] = {
    name: {file: values(number) for number, file in enumerate(files)}
    for name, files in {
        "a variant": (ONE, "model.fp16.safetensors"),
        "a variant in the other format": (ONE, "pytorch_model.fp16.bin"),
        "weights before an EMA": (
            "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.non_ema.safetensors",
        ),
        "a variant in shards": (
            "model.safetensors.index.json", "model.safetensors.index.fp16.json",
        ),
        "consolidated": ("model.safetensors.index.json", "consolidated.safetensors"),
        "consolidated in a folder": (ONE, "original/consolidated.00.pth"),
        "an index and its shards": ("model.safetensors.index.json",),
        "an adapter": (ONE, "adapter_model.safetensors"),
        "an adapter in the other format": (ONE, "adapter_model.bin"),
        "another model": (ONE, "pytorch_model_1.bin"),
        "names of a script": ("w.safetensors", "w.bin"),
        "a full save of FSDP": (ONE, "pytorch_model_fsdp.bin"),
        "names that no loader tries": (ONE, "model.bin"),
    }.items()
}  # fmt: skip
HEALTHY["names of a script"]["model.pt"] = values(2, "c.weight")
"""What a folder holds in which no loader chooses."""


@pytest.mark.parametrize("what", HEALTHY)
def test_files_among_which_no_loader_chooses_are_not_compared(tmp_path: Path, what: str) -> None:
    for name, tensors in HEALTHY[what].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, tensors)
    assert families(tmp_path) == families(tmp_path, data=True) == []


def test_optimizers_and_single_files_are_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint", folder)
    assert families(folder) == []
    write(
        folder / "pytorch_model.bin",
        {name: one + 1 for name, one in load_file(folder / "model.safetensors").items()},
    )
    assert [one.code for one in families(folder)] == ["stale-family"]
    assert families(folder / "pytorch_model.bin") == []


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("is_kept", ["head.weight", "embed.weight"])
def test_tied_weights_that_safetensors_leaves_out(
    tmp_path: Path, is_shared: bool, is_kept: str
) -> None:
    def again(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_shared else tensor.clone()

    embedding, bias = torch.randn(5, 3), torch.randn(3)
    tied = {"embed.weight": embedding, "head.weight": again(embedding)}
    # As in BERT, whose decoder has the bias of its head; with more tensors of that shape than are
    # compared.
    tied["decoder.bias"] = again(bias)
    norm = {f"norm.{number}": torch.ones(3) for number in range(20 if is_shared else 9)}
    norm["bias"] = bias
    write(tmp_path / "pytorch_model.bin", {**tied, **norm})
    write(tmp_path / "model.safetensors", {is_kept: embedding, **norm})
    (note,) = families(tmp_path)
    assert isinstance(note, SecondFamily)
    assert not note.own
    assert note.tensors == len(norm) + 1
    write(tmp_path / "model.safetensors", {is_kept: embedding + 1, **norm})
    assert [one.code for one in families(tmp_path)] == ["stale-family"]


def test_other_keys_dtypes_and_shapes_are_a_note(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {**values(0, "a", "b", "c"), "d": torch.zeros(2)})
    write(
        tmp_path / "pytorch_model.bin",
        {**values(1, "a"), **values(2, "x"), "b": torch.ones(12), "c": torch.ones(4, 3).half()},
    )
    (note,) = families(tmp_path)
    assert isinstance(note, SecondFamily)
    assert (note.own, note.absent, note.changed) == (("x",), ("d",), ("b", "c"))
    assert (
        str(note) == "pytorch_model.bin: 1 key not in model.safetensors: 'x'; 1 key only in "
        "model.safetensors: 'd'; 2 keys with a different dtype or shape: 'b', 'c'; values were "
        "not compared; load_state and transformers load model.safetensors, "
        "load_checkpoint_in_model loads pytorch_model.bin"
    )
    assert check(tmp_path).status == 0


@pytest.mark.parametrize("pair", PAIRS[:6], ids=" ".join)
@pytest.mark.parametrize("number", [0, 1])
def test_a_family_that_lacks_many_keys_and_is_loaded_is_a_warning(
    tmp_path: Path, pair: tuple[str, str], number: int
) -> None:
    small, large = pair[number], pair[1 - number]
    write(tmp_path / small, values(0, "b.weight"))
    write(tmp_path / large, values(0))
    (finding,) = families(tmp_path)
    assert isinstance(finding, SecondFamily)
    assert finding.severity.value == (
        "warning" if small in map(str, finding.loads.values()) else "note"
    )
    for loader, path in finding.loads.items():
        try:
            is_loaded = taken(loader, tmp_path) == 0
        except RuntimeError:  # load_state loads strictly
            is_loaded = False
        assert is_loaded is (str(path) == large), loader


def taken(loader: str, root: Path) -> float:
    """Return what a loader takes of a copy of a folder, which some loaders write into."""
    copy = root / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("copy"))
    try:
        return REAL[loader](copy)
    finally:
        shutil.rmtree(copy)


def test_a_few_keys_that_library_versions_differ_in_are_a_note(tmp_path: Path) -> None:
    keys = [f"h.{number}.weight" for number in range(10)]
    write(tmp_path / "model.safetensors", values(0, *keys))
    masks = {"h.0.attn.bias": torch.ones(3), "h.0.attn.masked_bias": torch.ones(1)}
    write(tmp_path / "pytorch_model.bin", {**values(0, *keys), **masks})
    (note,) = families(tmp_path)
    assert note.severity.value == "note"


def test_a_difference_between_the_samples_is_found_with_data(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1 << 16), "b": torch.zeros(1 << 16)}
    write(tmp_path / "model.safetensors", tensors)
    tensors["b"][2000] = 1
    write(tmp_path / "pytorch_model.bin", tensors)
    (note,) = families(tmp_path)
    assert isinstance(note, SecondFamily)
    assert note.sampled
    assert (
        "1 pair of equal files in full: only samples were compared; ckptfix check --data "
        "reads all" in check(tmp_path).not_checked
    )
    (finding,) = families(tmp_path, data=True)
    assert isinstance(finding, StaleFamily)
    assert finding.difference == "b"


def test_a_tensor_in_scattered_bytes_is_said_not_to_be_compared(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.ones(3, 4), "b": torch.ones(2)})
    write(tmp_path / "pytorch_model.bin", {"a": torch.zeros(4, 3).t(), "b": torch.ones(2)})
    (note,) = families(tmp_path, data=True)
    assert "bytes equal; 1 tensor not compared" in str(note)
    assert "ckptfix diff" in note.advice


@pytest.mark.parametrize(("broken", "sound"), [PAIRS[0], PAIRS[0][::-1]])
def test_a_broken_link_is_passed_over_by_loaders_that_look_for_a_file(
    tmp_path: Path, broken: str, sound: str
) -> None:
    """``load_checkpoint_in_model`` lists the folder, and takes the link where it is the first."""
    write(tmp_path / sound, values(1))
    (tmp_path / broken).symlink_to(tmp_path / "nowhere")
    (note,) = (each for each in check(tmp_path).findings if isinstance(each, SecondFamily))
    for loader, path in note.loads.items():
        if str(path) == sound:
            assert REAL[loader](tmp_path) == 1
        else:
            assert loader == "load_checkpoint_in_model"
            with pytest.raises(OSError, match=r"nowhere|No such file"):
                REAL[loader](tmp_path)
    assert {"load_state", "transformers"} <= {
        loader for loader, path in note.loads.items() if str(path) == sound
    }


def test_a_damaged_family_is_damaged_and_not_another_save(tmp_path: Path) -> None:
    for number, name in enumerate(PAIRS[0]):
        write(tmp_path / name, values(number))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    error, note = check(tmp_path).findings
    assert error.code == "truncated-file"
    assert (note.severity.value, note.code) == ("note", "second-family")
    assert str(note) == (
        "model.safetensors: damaged, so not compared with pytorch_model.bin; load_state and "
        "transformers load model.safetensors, load_checkpoint_in_model loads pytorch_model.bin"
    )
    assert note.advice == (
        "if pytorch_model.bin is the save that you want: ckptfix repair DIR --keep "
        "pytorch_model.bin"
    )
    assert REAL["load_checkpoint_in_model"](tmp_path) == 1
    for loader in ("load_state", "transformers"):
        with pytest.raises(SafetensorError):
            REAL[loader](tmp_path)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.module."])
def test_wrappers_of_one_family_are_no_other_keys(tmp_path: Path, wrapper: str) -> None:
    write(tmp_path / "model.safetensors", values(0))
    for number, code in enumerate(("second-family", "stale-family")):
        tensors = {f"{wrapper}{name}": tensor for name, tensor in values(number).items()}
        write(tmp_path / "pytorch_model.bin", tensors)
        assert code in {one.code for one in check(tmp_path).findings}
        assert {one.code for one in check(tmp_path).findings}.isdisjoint(
            {"stale-family", "second-family"} - {code}
        )


def test_a_repair_of_the_index_or_of_keys_shows_no_family_that_was_not_shown_before(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "model.safetensors.index.json",
        {f"module.module.{name}": one for name, one in values(0).items()},
    )
    (tmp_path / "model.safetensors.index.json").unlink()
    write(tmp_path / "pytorch_model.bin", values(1))
    before = [one.code for one in check(tmp_path).findings]
    assert before == ["nested-prefix", "nested-prefix", "index-mismatch", "stale-family"]
    repair(tmp_path)
    left = [one.code for one in check(tmp_path).findings if one.code != "wrapper-prefix"]
    assert left == ["index-mismatch", "stale-family"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_three_families_are_compared_with_the_first(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    ):
        write(tmp_path / name, values(number))
    assert [(str(one.path), str(one.preferred)) for one in families(tmp_path)] == [
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin", "model.safetensors"),
    ]


def test_a_model_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    (tmp_path / "unet" / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    for number, name in enumerate(PAIRS[9]):
        write(tmp_path / "unet" / name, values(number))
    assert [str(one.path) for one in families(tmp_path)] == [
        "unet/diffusion_pytorch_model.safetensors"
    ]


# --- the loaders themselves
# -----------------------------------------------------------------------------------


TWO_INDEXES = [
    ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.bin.index.json"),
]


@pytest.mark.parametrize("pair", TWO_INDEXES, ids=" ".join)
@pytest.mark.parametrize("number", [0, 1])
def test_a_loader_that_refuses_two_indexes_is_named(
    tmp_path: Path, pair: tuple[str, str], number: int
) -> None:
    write(tmp_path / pair[0], values(0))
    write(tmp_path / pair[1], values(number))
    (finding,) = families(tmp_path)
    words = "load_checkpoint_in_model refuses a folder with two indexes"
    assert str(finding).endswith(f", {words}")
    assert check(tmp_path).status == number
    with pytest.raises(ValueError, match=r"more than one `\.index\.json` file"):
        REAL["load_checkpoint_in_model"](tmp_path)
    write(tmp_path / "pytorch_model.bin", values(0))
    assert words not in "".join(map(str, families(tmp_path)))
    assert REAL["load_checkpoint_in_model"](tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [pair for pair in PAIRS if not any(word in pair[0] for word in ("fp16", "_1", "lora"))],
    ids=" ".join,
)
def test_each_loader_takes_the_file_that_the_warning_names(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    for number, name in enumerate(pair):
        write(tmp_path / name, values(number))
    (finding,) = families(tmp_path)
    assert isinstance(finding, StaleFamily)
    assert finding.loads
    for loader, path in finding.loads.items():
        assert taken(loader, tmp_path) == pair.index(str(path)), (loader, path)

"""load_checkpoint_tolerant: one model, out of any file or folder; and models whose tensors are on
the meta device.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.hooks import attach_align_device_hook
from accelerate.utils import OffloadedWeightsLoader
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix.devices import offloaded
from ckptfix.training.loading.load_report import LoadError, Status
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
from fixtures.digests import tensor_digests
from fixtures.models import Tied, TwoLayer
from tests.training.loading_runs import FIXTURES, Names, files_of, make_run, reset, seeded

LONE = sorted(path.parent for path in FIXTURES.glob("*/lone-*/run.json")) + sorted(
    path.parent for path in FIXTURES.glob("*/single-level-*/run.json")
)
SHARDED = sorted(path.parent for path in FIXTURES.glob("*/sharded-*/run.json"))


@pytest.mark.parametrize("fixture", LONE, ids=lambda path: f"{path.parent.name}/{path.name}")
@pytest.mark.parametrize("of", ["file", "folder"])
def test_every_lone_file_of_a_real_run_arrives(fixture: Path, of: str) -> None:
    (file,) = (fixture / "checkpoint").iterdir()
    wanted = json.loads((fixture / "run.json").read_text())["models"][0]["tensors"]
    before = files_of(fixture)
    model = seeded(TwoLayer, 5)
    report = load_checkpoint_tolerant(model, file if of == "file" else file.parent)
    assert tensor_digests(model.state_dict()) == wanted
    assert report.is_complete
    assert files_of(fixture) == before


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_key_in_two_shards_is_refused_unless_its_values_are_equal(
    tmp_path: Path, is_changed: bool
) -> None:
    state = seeded(TwoLayer, 5).state_dict()
    first, *rest = state
    copy = state[first] + is_changed
    shards = {
        "model-00001-of-00002.safetensors": {first: state[first]},
        "model-00002-of-00002.safetensors": {**{key: state[key] for key in rest}, first: copy},
    }
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name, {"format": "pt"})
    weight_map = {key: name for name, tensors in reversed(shards.items()) for key in tensors}
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = seeded(TwoLayer, 6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if not is_changed:
        assert load_checkpoint_tolerant(model, tmp_path).is_complete
        assert tensor_digests(model.state_dict()) == tensor_digests(state)
        return
    with pytest.raises(LoadError, match="with different values; next: ckptfix check") as error:
        load_checkpoint_tolerant(model, tmp_path)
    assert all(f"{word!r}"[1:-1] in str(error.value) for word in (first, *shards))
    assert tensor_digests(model.state_dict()) == tensor_digests(before)


@pytest.mark.parametrize("fixture", SHARDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_sharded_model_of_a_real_run_arrives(fixture: Path) -> None:
    folder = fixture / "checkpoint"
    wanted = json.loads((fixture / "run.json").read_text())["models"][0]["tensors"]
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*-of-*")):
        part = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
        state.update({name.replace("module.", ""): value for name, value in part.items()})
    pair = ("lm_head.weight", "transformer.wte.weight")
    ties = {one: other for one, other in (pair, pair[::-1]) if one in wanted and one not in state}
    for path in (folder, next(folder.glob("*.index.json"))):
        model = Names({name: torch.zeros_like(state[name]) for name in state}, ties)
        load_checkpoint_tolerant(model, path)
        assert tensor_digests(model.state_dict()) == wanted


def test_a_training_dict_with_two_models_that_fit(tmp_path: Path) -> None:
    student, teacher = seeded(TwoLayer, 1), seeded(TwoLayer, 2)
    torch.save(
        {"student": student.state_dict(), "teacher": teacher.state_dict()}, tmp_path / "t.pt"
    )
    model = seeded(TwoLayer, 3)
    before = tensor_digests(model.state_dict())
    with pytest.raises(
        LoadError, match=r"t\.pt\['student'\], t\.pt\['teacher'\] .*pass the path of one file"
    ):
        load_checkpoint_tolerant(model, tmp_path / "t.pt")
    assert tensor_digests(model.state_dict()) == before


def test_one_of_two_models_fits(tmp_path: Path) -> None:
    heads = [{"a.weight": nn.Linear(5, 3).weight}]
    net = seeded(TwoLayer, 1).state_dict()
    torch.save({"net": net, "heads": heads}, tmp_path / "t.pt")
    model = seeded(TwoLayer, 3)
    report = load_checkpoint_tolerant(model, tmp_path / "t.pt")
    assert tensor_digests(model.state_dict()) == tensor_digests(net)
    assert report.of("models")[0].status is Status.RESTORED


def test_a_save_state_folder_of_one_model_doubled(tmp_path: Path) -> None:
    source = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors"
    model = seeded(TwoLayer, 3)
    load_checkpoint_tolerant(model, source / "checkpoint")
    assert (
        tensor_digests(model.state_dict())
        == json.loads((source / "run.json").read_text())["models"][0]["tensors"]
    )
    shutil.copytree(source / "checkpoint", tmp_path / "c")
    torch.save(seeded(TwoLayer, 4).state_dict(), tmp_path / "c" / "other.pt")
    with pytest.raises(LoadError, match=r"model\.safetensors.*other\.pt"):
        load_checkpoint_tolerant(model, tmp_path / "c")


def test_a_wrapped_model_takes_bare_names(file: Path) -> None:
    model = seeded(TwoLayer, 3)
    load_checkpoint_tolerant(nn.DataParallel(model), file)
    assert tensor_digests(model.state_dict()) == tensor_digests(seeded(TwoLayer, 1).state_dict())


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        load_checkpoint_tolerant(TwoLayer(), tmp_path / "m.safetensors")
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(LoadError, match="no model weights"):
        load_checkpoint_tolerant(TwoLayer(), tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(seeded(TwoLayer, 1).state_dict(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def on_cpu(model: nn.Module) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


def forward(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.ones(2, 6))
    return result


def in_memory(model: nn.Module, _: Path) -> nn.Module:
    """As dispatch_model keeps what a GPU has no room for."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(
        model,
        execution_device=torch.device("cpu"),
        offload=True,
        weights_map=OffloadedWeightsLoader(state_dict=state),
    )
    return model


OFFLOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu offload": lambda model, folder: on_cpu(model),
    "disk offload": lambda model, folder: disk_offload(
        model, str(folder), execution_device=torch.device("cpu")
    ),
    "a loader in memory": in_memory,
    "dispatched": lambda model, folder: dispatch_model(
        model, {"fc1": "cpu", "fc2": "disk"}, main_device="cpu", offload_dir=str(folder)
    ),
}


@pytest.mark.filterwarnings("ignore:.*meta.*:UserWarning")
@pytest.mark.parametrize("how", OFFLOADS)
def test_offloaded_weights_really_arrive(tmp_path: Path, how: str) -> None:
    wanted = seeded(TwoLayer, 1)
    make_run(wanted, optimizer=None).accelerator.save_state(str(tmp_path / "c"))
    reset()
    (tmp_path / "offload").mkdir()
    model = OFFLOADS[how](seeded(TwoLayer, 2), tmp_path / "offload")
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    accelerator = Accelerator(cpu=True)
    accelerator._models.append(model)
    report = load_state_tolerant(accelerator, tmp_path / "c")
    assert torch.equal(forward(model), forward(wanted))
    assert "loaded into accelerate's offload storage" in report.of("models")[0].reason
    before = forward(model)
    torch.save({"fc1.weight": 1}, tmp_path / "broken.bin")
    with pytest.raises(LoadError):
        load_checkpoint_tolerant(model, tmp_path / "broken.bin")
    assert torch.equal(forward(model), before)


def test_offloaded_tied_weights_arrive_in_both_places(tmp_path: Path) -> None:
    wanted = seeded(Tied, 1)
    make_run(wanted, optimizer=None).accelerator.save_state(str(tmp_path / "c"))
    model = on_cpu(seeded(Tied, 2))
    load_checkpoint_tolerant(model, tmp_path / "c")
    ids = torch.arange(5).reshape(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids), wanted(ids))


def test_empty_weights_are_made(file: Path) -> None:
    with init_empty_weights():
        model = TwoLayer()
    load_checkpoint_tolerant(model, file)
    assert torch.equal(forward(model), forward(seeded(TwoLayer, 1)))


def test_weights_that_do_not_arrive_are_noticed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_cpu(seeded(TwoLayer, 2))
    monkeypatch.setattr(offloaded.MemorySlot, "write", lambda slot, value: None)
    said = r"'fc1\.(weight|bias)' differs from the written value when read back"
    with pytest.raises(LoadError, match=said) as caught:
        load_checkpoint_tolerant(model, file)
    assert caught.value.modified


def test_offloaded_weights_that_cannot_be_written_stop_the_load(file: Path) -> None:
    model = on_cpu(seeded(TwoLayer, 2))
    before = forward(model)
    kept, model.fc2._hf_hook.weights_map = model.fc2._hf_hook.weights_map, None
    said = r"'fc2\.(weight|bias)' is on the meta device, and its hook has no writable weights"
    with pytest.raises(LoadError, match=said):
        load_checkpoint_tolerant(model, file)
    model.fc2._hf_hook.weights_map = kept
    assert torch.equal(forward(model), before)

"""Pickles: data of numpy, omegaconf and enums loads, anything else is refused with the line that
allows it.
"""

import codecs
import enum
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from torch.torch_version import TorchVersion

from ckptfix.devices.torch_reading import allowing, resolve
from ckptfix.training.loading.load_report import LoadError, LoadPolicy
from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
from fixtures.models import RunSettings
from tests.training.loading_runs import reset


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    reset()
    before = list(torch.serialization.get_safe_globals())
    yield
    after = torch.serialization.get_safe_globals()
    assert set(before) <= set(after), "the allow-list of the process lost something"
    assert not {RunSettings, Colour, numpy.ndarray} & set(after), (
        "the allow-list of the process grew"
    )
    reset()


class Colour(enum.Enum):
    RED = "red"


class Holder:
    """A registered object whose state is anything."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved(tmp_path: Path, state: Any) -> Path:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Holder(state))
    accelerator.save_state(str(tmp_path / "c"))
    reset()
    return tmp_path / "c"


def load(folder: Path, **policy: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    holder = Holder()
    accelerator.register_for_checkpointing(holder)
    load_state_tolerant(accelerator, folder, policy=LoadPolicy(**policy))
    return holder.state


@pytest.mark.parametrize(
    "state",
    [
        {"loss": numpy.float64(0.5), "count": numpy.int64(3), "flag": numpy.bool_(True)},
        {
            "array": numpy.arange(6.0).reshape(2, 3),
            "complex": numpy.ones(2, dtype=numpy.complex64),
        },
        {"text": numpy.array(["a", "bc"]), "when": numpy.datetime64("2024-01-02")},
        {"colour": Colour.RED},
        {"plain": [1, 2.5, None, (True, "x")], "set": {1, 2}},
    ],
    ids=["scalars", "arrays", "text", "enum", "plain"],
)
def test_data_loads(tmp_path: Path, state: dict[str, Any]) -> None:
    result = load(saved(tmp_path, state))
    assert repr(result) == repr(state)


def test_names_of_numpy_1_load_under_numpy_2(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"loss": numpy.float64(0.5), "array": numpy.arange(3)})
    path = folder / "custom_checkpoint_0.pkl"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    assert any(b"numpy._core.multiarray" in data for data in records.values())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(
                name, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
            )
    result = load(folder)
    assert repr(result["loss"]) == "np.float64(0.5)"
    assert result["array"].tolist() == [0, 1, 2]


def test_data_of_numpy_are_known_in_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # numpy 1.26 has a `_core` that is nearly empty, and 1.24 has no `dtypes`.
    monkeypatch.setattr(numpy, "_core", types.ModuleType("numpy._core"))
    monkeypatch.setattr(numpy, "dtypes", None)
    module = "numpy.core.multiarray"
    allowed, refused = resolve([(module, "scalar"), (module, "_reconstruct"), ("numpy", "dtype")])
    assert not refused
    assert (numpy.float64(0).__reduce__()[0], f"{module}.scalar") in allowed
    assert type(numpy.dtype("float64")) in allowed


def test_torch_forgets_what_a_load_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = [Colour]
    # As until torch 2.5: the list itself is returned, and a new one is made when it is cleared.
    monkeypatch.setattr(torch.serialization, "get_safe_globals", lambda: known)
    monkeypatch.setattr(torch.serialization, "add_safe_globals", lambda more: known.extend(more))

    def clear() -> None:
        nonlocal known
        known = []

    monkeypatch.setattr(torch.serialization, "clear_safe_globals", clear)
    with allowing([numpy.dtype]):
        assert known == [Colour, numpy.dtype]
    assert known == [Colour]


def test_a_torch_that_asks_objects_for_their_names_gets_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.4.0"))
    names = [("numpy.core.multiarray", "scalar"), ("_codecs", "encode"), ("builtins", "set")]
    (scalar, encode, the_set, *_), refused = resolve(names)
    assert not refused
    assert (encode, the_set) == (codecs.encode, set)
    assert f"{scalar.__module__}.{scalar.__name__}" == "numpy.core.multiarray.scalar"
    assert scalar(numpy.dtype("float32"), bytes(4)) == numpy.float32(0)


def test_containers_of_omegaconf_are_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [("omegaconf.listconfig", "ListConfig"), ("omegaconf.base", "ContainerMetadata")]
    for module, name in names:
        made = types.ModuleType(module)
        setattr(made, name, type(name, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, made)
    package = types.ModuleType("omegaconf")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "omegaconf", package)
    allowed, refused = resolve(
        [*names, ("typing", "Any"), ("collections", "defaultdict"), ("omegaconf.x", "Y")]
    )
    assert len(allowed) == 4
    assert refused == [("omegaconf.x", "Y")]


def test_real_omegaconf(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    state = {"config": omegaconf.OmegaConf.create({"lr": 0.1, "sizes": [1, 2], "name": "x"})}
    assert load(saved(tmp_path, state))["config"] == state["config"]


def test_a_class_of_the_users_is_refused_with_the_line_that_allows_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"settings": RunSettings(0.1)})
    with pytest.raises(LoadError) as caught:
        load(folder)
    line = (
        "import fixtures.models, torch; "
        "torch.serialization.add_safe_globals([fixtures.models.RunSettings])"
    )
    assert line in str(caught.value)
    assert "custom_checkpoint_0.pkl needs fixtures.models.RunSettings" in str(caught.value)


def test_what_the_user_allowed_loads(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"settings": RunSettings(0.25)})
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([RunSettings])
    try:
        assert load(folder)["settings"].learning_rate == 0.25
        assert RunSettings in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_trust_is_said_aloud(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"settings": RunSettings(0.25)})
    with pytest.warns(
        UserWarning, match=r"running code from a pickle, because trust=True: .*RunSettings"
    ):
        assert load(folder, trust=True)["settings"].learning_rate == 0.25


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# As an error, the warning of trust=True would hide that code runs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "random_states_0.pkl"])
def test_code_is_never_run(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, {})
    torch.save({"x": Evil(tmp_path / "hit")}, folder / name)
    with pytest.raises(LoadError, match=r"mkdir, which can run any code") as caught:
        load(folder, rng="require")
    assert "add_safe_globals" not in str(caught.value)
    assert not (tmp_path / "hit").exists()


@pytest.mark.filterwarnings("ignore")
def test_code_in_weights_is_never_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "bias": Evil(tmp_path / "hit")}, tmp_path / "model.bin")
    with pytest.raises(LoadError, match="mkdir"):
        load_checkpoint_tolerant(torch.nn.Linear(3, 2), tmp_path / "model.bin")
    assert not (tmp_path / "hit").exists()


def test_an_enum_of_a_module_that_is_not_loaded_is_not_imported() -> None:
    assert "antigravity" not in sys.modules
    assert resolve([("unheard_of", "Colour"), ("enum", "Enum")]) == (
        [],
        [("unheard_of", "Colour"), ("enum", "Enum")],
    )

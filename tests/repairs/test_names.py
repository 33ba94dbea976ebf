"""What ``--keys``, ``--only`` and ``--allow`` do to names, and to which files they do nothing."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import Keys, Policy, check, repair, undo
from ckptfix.checkpoint.roles import Role
from tests.repairs.builders import (
    RANDOM_STATES,
    read_safetensors_bytes,
    snapshot,
    write_safetensors,
    write_trained_optimizer,
)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("keys", [Keys.BARE, Keys.DDP])
def test_only_models_are_renamed_on_request(tmp_path: Path, keys: Keys) -> None:
    """Renamed, ``random_states_0.pkl`` loads without a word and the step and the generators are
    lost.
    """
    write_safetensors(tmp_path / "model.safetensors", {"fc": b"1"})
    others = {
        "random_states_0.pkl": {"step": 41, "torch_manual_seed": torch.get_rng_state()},
        "custom_checkpoint_0.pkl": {"x": torch.ones(2), "_orig_mod.y": torch.ones(1)},
        "scaler.pt": {"scale": torch.ones(1)},
        "scheduler.bin": {"last": torch.ones(1)},
    }
    for name, value in others.items():
        torch.save(value, tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in others}
    repair(tmp_path, policy=Policy(keys=keys))
    assert {name: (tmp_path / name).read_bytes() for name in others} == before
    assert list(read_safetensors_bytes(tmp_path / "model.safetensors")) == (
        ["module.fc"] if keys is Keys.DDP else ["fc"]
    )


def test_a_training_dict_keeps_what_is_no_model(tmp_path: Path) -> None:
    """A tensor that lies beside the model does not make the whole dict a model."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng_state": torch.get_rng_state(),
        "rng": {"cpu": torch.get_rng_state()},
        "best": torch.tensor(1.0),
        "epoch": 3,
    }
    path = tmp_path / "train.pt"
    torch.save(value, path)
    before = path.read_bytes()
    assert repair(path, policy=Policy(keys=Keys.DDP)).status == 0
    after = load(path)
    assert list(after) == list(value)
    assert list(after["model"]) == ["module.weight", "module.bias"]
    assert list(after["rng"]) == ["cpu"]
    undo(path)
    assert path.read_bytes() == before


def test_a_state_dict_with_a_number_in_it_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"weight": torch.ones(2), "bias": torch.ones(1), "epoch": 3}, path)
    assert repair(path, policy=Policy(keys=Keys.DDP)).steps == ()
    assert list(load(path)) == ["weight", "bias", "epoch"]


def test_names_in_an_fsdp_optimizer_follow_its_model(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    inner = "l.0._checkpoint_wrapped_module.w"
    optimizer = {
        "state": {inner: {"step": torch.ones(1)}},
        "param_groups": [{"lr": 0.1, "params": [inner]}],
    }
    torch.save({"model": OrderedDict({inner: torch.ones(2)}), "optimizer": optimizer}, path)
    for keys, name in ((Keys.BARE, "l.0.w"), (Keys.DDP, "module.l.0.w")):
        repair(path, policy=Policy(keys=keys))
        after = load(path)
        assert list(after["model"]) == [name]
        assert list(after["optimizer"]["state"]) == [name]
        assert after["optimizer"]["param_groups"][0]["params"] == [name]


def test_a_double_is_not_renamed_instead_of_dropped(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"fc": b"12"})
    write_safetensors(tmp_path / "model_1.safetensors", {"module.fc": b"12"})
    write_trained_optimizer(tmp_path / "optimizer.bin", {"fc": b"12"})
    for rank in range(2):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    before = snapshot(tmp_path)
    policy = Policy(keys=Keys.BARE, only=frozenset({"wrapper-prefix"}))
    receipt = repair(tmp_path, policy=policy)
    assert "remove the duplicate first" in receipt.unplanned[0].reason
    assert snapshot(tmp_path) == before


def test_only_is_obeyed_by_keys(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "nested.safetensors", {"module.module.fc": b"1"})
    write_safetensors(tmp_path / "single.safetensors", {"module.fc": b"1"})
    for only, changed in (("wrapper-prefix", "single"), ("nested-prefix", "nested")):
        receipt = repair(tmp_path, policy=Policy(keys=Keys.BARE, only=frozenset({only})))
        assert [step.fixes for step in receipt.steps] == [(only,)]
        assert list(read_safetensors_bytes(tmp_path / f"{changed}.safetensors")) == ["fc"]


def test_only_says_which_option_is_missing(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"module.fc": b"1"}, tail=b"x")
    for code, option in (
        ("trailing-bytes", "--allow trailing-bytes"),
        ("wrapper-prefix", "--keys bare"),
    ):
        receipt = repair(tmp_path, policy=Policy(only=frozenset({code})))
        assert receipt.status == 1
        assert option in receipt.unplanned[0].reason


def test_a_request_that_cannot_be_met_is_status_1(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"fc": b"1"})
    for keep in ({Role.OPTIMIZER: 1}, {Role.MODEL: 2}):
        receipt = repair(tmp_path, policy=Policy(keep=keep))
        assert (receipt.status, receipt.steps) == (1, ())
    assert repair(tmp_path, policy=Policy(keep={Role.MODEL: 1})).status == 0


def test_entries_of_one_architecture_are_renamed_together(tmp_path: Path) -> None:
    """One that must stay keeps the other: renamed in part, they would look like a conflict or a
    double.
    """
    for name, value, tail in (
        ("pytorch_model.bin", 1.0, b""),
        ("pytorch_model_1.bin", 2.0, b"\0" * 9),
    ):
        torch.save({"module.module.fc": torch.full((4,), value)}, tmp_path / name)
        with (tmp_path / name).open("ab") as file:
            file.write(tail)
    before = snapshot(tmp_path)
    for policy in (Policy(), Policy(keys=Keys.BARE)):
        receipt = repair(tmp_path, policy=policy)
        assert (receipt.status, receipt.steps) == (1, ())
        assert snapshot(tmp_path) == before


def test_nested_entries_get_one_target(tmp_path: Path) -> None:
    """The other container speaks for all entries or for none; else equal ones would look like
    doubles afterwards.
    """
    for name in ("model.safetensors", "model_1.safetensors"):
        write_safetensors(tmp_path / name, {"module.module.fc": b"same"})
    torch.save({"fc": torch.ones(4, dtype=torch.uint8)}, tmp_path / "pytorch_model.bin")
    receipt = repair(tmp_path)
    assert [step.fixes for step in receipt.steps] == [("nested-prefix",)] * 2
    for name in ("model.safetensors", "model_1.safetensors"):
        assert list(read_safetensors_bytes(tmp_path / name)) == ["fc"]
    assert repair(tmp_path).steps == ()


def test_an_unsafe_file_is_not_trimmed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, ("true",)

    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(1), "x": Evil()}, path)
    with path.open("ab") as file:
        file.write(b"\0" * 9)
    before = path.read_bytes()
    receipt = repair(path, policy=Policy(allow=frozenset({"trailing-bytes"})))
    assert receipt.steps == ()
    assert path.read_bytes() == before


def test_a_trim_is_done_where_the_rename_is_not(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a.w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 9)
    receipt = repair(path, policy=Policy(keys=Keys.DDP, allow=frozenset({"trailing-bytes"})))
    assert [step.fixes for step in receipt.steps] == [("trailing-bytes",)]
    assert path.read_bytes() == whole
    assert receipt.status == 1  # the rename was asked for and refused


def test_models_n_drops_the_last_of_one_run_only(tmp_path: Path) -> None:
    for index in range(13):
        name = f"model{f'_{index}' if index else ''}.safetensors"
        write_safetensors(tmp_path / name, {"fc": b"same"})
    repair(tmp_path, policy=Policy(keep={Role.MODEL: 12}))
    assert not (tmp_path / "model_12.safetensors").exists()
    assert (tmp_path / "model_9.safetensors").exists()


def test_models_n_does_not_guess_which_copy_is_the_ema(tmp_path: Path) -> None:
    for name, data in (("model", b"S"), ("model_1", b"S"), ("model_2", b"T"), ("model_3", b"S")):
        write_safetensors(tmp_path / f"{name}.safetensors", {"fc": data * 8})
    receipt = repair(tmp_path, policy=Policy(keep={Role.MODEL: 3}))
    assert receipt.steps == ()
    assert "unclear" in receipt.unplanned[0].reason


def test_a_difference_between_the_samples_does_not_stop_other_repairs(tmp_path: Path) -> None:
    """The proof after a repair goes by the comparison that read everything, not by samples of its
    own.
    """
    size = 8 << 20
    other = bytearray(size)
    other[size * 3 // 7] = 1
    for rank in range(2):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    write_safetensors(tmp_path / "model.safetensors", {"fc": bytes(size), "b": b"1"})
    write_trained_optimizer(tmp_path / "optimizer.bin", {"b": b"1"})
    write_safetensors(
        tmp_path / "model_1.safetensors", {"module.fc": bytes(other), "module.b": b"1"}
    )
    write_safetensors(tmp_path / "model_2.safetensors", {"module.module.out": b"12"})
    receipt = repair(tmp_path, policy=Policy(allow=frozenset({"nested-prefix"})))
    assert [step.fixes for step in receipt.steps] == [("nested-prefix",)]
    assert "related-models" in [finding.code for finding in receipt.left]
    # Check reads samples.
    assert "doubled-model" in [finding.code for finding in check(tmp_path).findings]

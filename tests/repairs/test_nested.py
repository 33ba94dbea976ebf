"""Nested wrappers: which are damage, and which are modules of the script's own."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from ckptfix import Keys, Policy, check, migrate, repair, undo
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Action, Severity
from ckptfix.errors import UsageError
from ckptfix.storage.paths import MANIFEST
from tests.repairs.builders import (
    RANDOM_STATES,
    layout_of,
    read_safetensors_bytes,
    snapshot,
    write_safetensors,
)

NET = {"fc.weight": b"weights!" * 4, "fc.bias": b"bias"}
AVERAGE = {name: data[::-1] for name, data in NET.items()}


def wrapped(tensors: Mapping[str, bytes], chain: str) -> dict[str, bytes]:
    return {chain + name: data for name, data in tensors.items()}


def ranks(folder: Path, count: int) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(count):
        (folder / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    return folder


def codes(path: Path) -> list[str]:
    return [finding.code for finding in check(path).findings]


NESTED = {"module.module.fc.weight": torch.ones(1, 3), "module.module.fc.bias": torch.ones(1)}


@pytest.mark.parametrize("keys", Keys)
@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    ["custom_checkpoint_0.pkl", "sampler.bin", "scheduler.bin", "dl_state_dict.bin", "scaler.pt"],
)
def test_only_models_have_wrappers(tmp_path: Path, name: str, processes: int, keys: Keys) -> None:
    """``register_for_checkpointing(ModelEmaV2(prepared))``: renamed, load_state raises."""
    folder = ranks(tmp_path, processes)
    write_safetensors(folder / "model.safetensors", NET)
    torch.save(NESTED, folder / name)
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    before = (folder / name).read_bytes()
    # A custom object can be a model; the other files have other states by their names.
    expected = [] if name == "custom_checkpoint_0.pkl" else ["wrong-state"]
    assert codes(folder) == expected
    repair(folder, policy=Policy(keys=keys))
    assert (folder / name).read_bytes() == before
    assert codes(folder / name) == expected
    assert repair(folder / name, policy=Policy(keys=keys)).steps == ()


@pytest.mark.parametrize(("processes", "status"), [(0, 1), (1, 0)])
def test_one_process_wraps_nothing(tmp_path: Path, processes: int, status: int) -> None:
    """Two nested only-children called ``module``; ``--keys`` renames them for who asks."""
    folder = ranks(tmp_path, processes)
    path = write_safetensors(folder / "model.safetensors", wrapped(NET, "module.module."))
    before = snapshot(folder)
    report = check(folder)
    assert report.status == status
    assert codes(folder) == (["nested-prefix"] if status else ["wrapper-prefix"])
    receipt = repair(folder)
    if status:
        assert "nothing shows how many processes" in str(report.findings[0])
        assert read_safetensors_bytes(path) == wrapped(NET, "module.")
        assert "If a module of the model is itself called 'module'" in report.findings[0].advice
        assert (
            "the keys now match a model wrapped once in DistributedDataParallel"
            in receipt.advice[0]
        )
        assert (
            "if a module of the model is itself named 'module', undo this repair"
            in receipt.advice[0]
        )
        undo(folder)
        assert read_safetensors_bytes(path) == wrapped(NET, "module.module.")
    else:
        assert "--keys bare" in report.findings[0].advice
        assert (receipt.status, snapshot(folder)) == (0, before)
        repair(folder, policy=Policy(keys=Keys.BARE))
        assert read_safetensors_bytes(path) == NET


@pytest.mark.parametrize(
    ("options", "chain"),
    [
        (["--keys", "bare"], ""),
        (["--keys", "ddp"], "module."),
        (["--allow", "nested-prefix"], "module."),
    ],
)
def test_a_rank_count_alone_asks(tmp_path: Path, options: list[str], chain: str) -> None:
    """``prepare(DDP(DDP(net)))`` and ``prepare(Holder(Holder(net)))`` look for these keys; only the
    user knows them.
    """
    folder = ranks(tmp_path, 2)
    own = wrapped(NET, "module.module.")
    path = write_safetensors(folder / "model.safetensors", own)
    before = snapshot(folder)
    report = check(folder)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.action) == (
        "nested-prefix",
        Severity.WARNING,
        Action.ASK,
    )
    assert finding.as_json()["assumed"] is True
    assert (report.status, finding.is_fixable) == (1, False)
    assert "2 processes" in str(finding)
    assert "next: ckptfix repair" not in str(report)
    for receipt in (
        repair(folder),
        repair(folder, policy=Policy(only=frozenset({"nested-prefix"}))),
    ):
        assert (receipt.status, receipt.steps, snapshot(folder)) == (1, (), before)
        (stay,) = receipt.unplanned
        assert stay.code == "nested-prefix"
        assert "the unchanged script would not find its keys" in stay.reason
        assert "--keys bare" in stay.reason
        assert "--allow nested-prefix" in stay.reason
    command = f"ckptfix repair {folder} {' '.join(options)}"
    assert command in str(report) or options[1] == "ddp"
    assert run(["repair", str(folder), *options]) == 0
    assert read_safetensors_bytes(path) == wrapped(NET, chain)
    undo(folder)
    assert read_safetensors_bytes(path) == own


def test_migrate_asks_as_repair_does(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "ckpt", 2)
    write_safetensors(folder / "model.safetensors", wrapped(NET, "module.module."))
    with pytest.raises(UsageError, match="--keys bare"):
        migrate(folder, tmp_path / "copy", to="safetensors", keys=Keys.AUTO)
    migrate(folder, tmp_path / "copy", to="safetensors")
    assert read_safetensors_bytes(tmp_path / "copy" / "model.safetensors") == wrapped(
        NET, "module.module."
    )


def test_evidence_for_an_entry_decides_for_its_list(tmp_path: Path) -> None:
    """Renamed in part, two models of one architecture would look like a model and its average."""
    first = write_safetensors(tmp_path / "model.safetensors", wrapped(NET, "module.module."))
    second = write_safetensors(tmp_path / "model_1.safetensors", wrapped(AVERAGE, "module.module."))
    bare = {name: torch.ones(len(data)) for name, data in NET.items()}
    torch.save(bare, tmp_path / "pytorch_model.bin")
    assert {one.action for one in check(tmp_path).findings if one.code == "nested-prefix"} == {
        Action.FIX
    }
    repair(tmp_path)
    assert read_safetensors_bytes(first) == NET
    assert read_safetensors_bytes(second) == AVERAGE


def fingerprinted(data: bytes) -> tuple[str, tuple[int]]:
    dtype, count = layout_of(data)
    return dtype, (count,)


def zeros(data: bytes) -> torch.Tensor:
    dtype, count = layout_of(data)
    return torch.zeros(count, dtype=torch.float32 if dtype == "F32" else torch.uint8)


def test_what_a_guarded_save_recorded_is_the_scripts_own(tmp_path: Path) -> None:
    """The guard registers no model twice: ``prepare(DDP(Holder(net)))`` wrote these keys, and reads
    them.
    """
    folder = ranks(tmp_path, 2)
    own = wrapped(NET, "module.module.")
    path = write_safetensors(folder / "model.safetensors", own)
    files = {one.name: one.stat().st_size for one in folder.iterdir()}
    for keys, code in (
        (
            key_fingerprint((name, *fingerprinted(data)) for name, data in own.items()),
            "wrapper-prefix",
        ),
        ("of other keys", "nested-prefix"),
    ):
        model = ManifestEntry(index=0, file="model.safetensors", type="Holder", keys=keys)
        manifest = Manifest(versions={}, world_size=2, step=0, models=(model,), files=files)
        (folder / ".ckptfix").mkdir(exist_ok=True)
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        assert codes(folder) == [code]
    assert [stay.code for stay in repair(folder).unplanned] == ["nested-prefix"]
    assert read_safetensors_bytes(path) == own


@pytest.mark.parametrize(("chain", "target"), [("", ""), ("module.", "module.")])
def test_the_other_container_of_an_entry_is_evidence(
    tmp_path: Path, chain: str, target: str
) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", wrapped(NET, "module.module."))
    torch.save(
        {f"{chain}{name}": torch.ones(len(data)) for name, data in NET.items()},
        tmp_path / "pytorch_model.bin",
    )
    assert "pytorch_model.bin has these keys" in str(check(tmp_path).findings[0])
    receipt = repair(tmp_path)
    assert read_safetensors_bytes(path) == wrapped(NET, target)
    assert "itself called 'module'" not in str(receipt)  # proven, not assumed


def test_an_export_of_the_inner_model_is_no_evidence(tmp_path: Path) -> None:
    """A right script: ``save_state`` of two holders, and the weights of the bare model for
    inference next to them.
    """
    accelerator = Accelerator(cpu=True)
    net = model = torch.nn.Linear(3, 2)
    for _ in range(2):
        outer = torch.nn.Module()
        outer.module, model = model, outer
    accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    before = snapshot(tmp_path)
    assert (check(tmp_path).status, repair(tmp_path).steps) == (0, ())
    assert snapshot(tmp_path) == before
    accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("processes", [0, 2])
def test_an_average_of_the_prepared_model_is_left_alone(tmp_path: Path, processes: int) -> None:
    """As an entry, as a file of a hook beside the model, and in a training dict."""
    folder = ranks(tmp_path, processes)
    write_safetensors(folder / "model.safetensors", NET)
    average = {name: zeros(data) for name, data in NET.items()}
    nested = {f"module.module.{name}": tensor for name, tensor in average.items()}
    write_safetensors(folder / "model_1.safetensors", wrapped(AVERAGE, "module.module."))
    torch.save(nested, folder / "ema.pt")
    single = {f"module.{name}": torch.ones_like(tensor) for name, tensor in average.items()}
    torch.save({"model": single, "ema": nested, "epoch": 3}, folder / "last.pt")
    before = snapshot(folder)
    assert check(folder).status == 0
    assert (repair(folder).steps, snapshot(folder)) == ((), before)
    assert repair(folder / "last.pt").steps == ()


def test_an_optimizer_follows_its_model(tmp_path: Path) -> None:
    """Its names alone are no damage: torch does not compare them."""
    allowed = Policy(allow=frozenset({"nested-prefix"}))
    for processes, steps in ((1, 0), (2, 2)):
        folder = ranks(tmp_path / str(processes), processes)
        net = torch.nn.Sequential()
        net.add_module("fc", torch.nn.Linear(3, 2))
        for _ in range(2):
            outer = torch.nn.Module()
            outer.module, net = net, outer
        torch.save(net.state_dict(), folder / "pytorch_model.bin")
        torch.save(torch.optim.AdamW(net.named_parameters()).state_dict(), folder / "optimizer.bin")
        assert codes(folder).count("nested-prefix") == steps
        receipt = repair(folder)
        assert (len(receipt.steps), len(receipt.unplanned)) == (0, steps)
        assert len(repair(folder, policy=allowed).steps) == steps
        bare = ranks(tmp_path / f"bare{processes}", processes)
        torch.save(net.module.module.state_dict(), bare / "pytorch_model.bin")
        torch.save(torch.optim.AdamW(net.named_parameters()).state_dict(), bare / "optimizer.bin")
        assert codes(bare) == []


def test_findings_whose_advice_alternates_are_folded(tmp_path: Path) -> None:
    """Equal models, every second one in a wrapper: 1,500 of them gave 2,410 lines."""
    folder = ranks(tmp_path, 2)
    for number in range(20):
        chain = "module." if number % 2 else ""
        write_safetensors(
            folder / f"model{f'_{number}' * bool(number)}.safetensors", wrapped(NET, chain)
        )
    lines = str(check(folder)).splitlines()
    assert sum("identical-models:" in text for text in lines) == 6
    assert sum("more files with identical-models" in text for text in lines) == 2


def test_one_entry_alone_is_not_renamed(tmp_path: Path) -> None:
    """It may be the average of another entry, which a repair of this file does not look at."""
    folder = ranks(tmp_path, 2)
    write_safetensors(folder / "model.safetensors", NET)
    path = write_safetensors(folder / "model_1.safetensors", wrapped(AVERAGE, "module.module."))
    receipt = repair(path)
    assert receipt.steps == ()
    assert "repair the folder" in receipt.unplanned[0].reason

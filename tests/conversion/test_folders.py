"""Whole folders: of save_state, of save_pretrained, of FSDP, and training dicts; loaded again by
stock accelerate.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from msgspec.structs import replace
from torch import nn

from ckptfix import OperationError, UsageError, migrate
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, read_manifest
from ckptfix.conversion.migrate import MigrateReceipt
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import StoredCheckpoint
from tests.conversion.making import (
    FORMATS,
    digests,
    digests_at,
    names_below,
    ties_at,
    write_safetensors,
)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(folder: Path, *, safe: bool) -> tuple[Accelerator, list[nn.Module]]:
    """Save a folder with two models, their optimizers and a scheduler, as a script does."""
    accelerator = Accelerator(cpu=True)
    models = [net(3), net(5)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 10)
    prepared = accelerator.prepare(*models, *optimizers, scheduler)
    for model, optimizer, width in zip(prepared[:2], prepared[2:4], (3, 5), strict=True):
        accelerator.backward(model(torch.randn(4, width)).sum())
        optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=safe)
    return accelerator, list(prepared[:2])


def differences(models: list[nn.Module], states: list[dict[str, torch.Tensor]]) -> list[str]:
    return [
        f"{number}.{name}"
        for number, (model, state) in enumerate(zip(models, states, strict=True))
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, state[name])
    ]


@pytest.mark.parametrize("safe", [True, False])
def test_stock_accelerate_loads_a_migrated_save_state(tmp_path: Path, safe: bool) -> None:
    accelerator, models = trained(tmp_path / "a", safe=safe)
    states = [
        {name: value.clone() for name, value in model.state_dict().items()} for model in models
    ]
    to, names = ("bin", {"pytorch_model.bin", "pytorch_model_1.bin"}) if safe else (
        "safetensors", {"model.safetensors", "model_1.safetensors"}
    )  # fmt: skip
    receipt = migrate(tmp_path / "a", tmp_path / "b", to=to)
    others = {"optimizer.bin", "optimizer_1.bin", "scheduler.bin", "random_states_0.pkl"}
    assert names_below(tmp_path / "b") == names | others
    assert set(receipt.carried) == others
    for name in others:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    for model in models:
        for value in model.state_dict().values():
            value.zero_()
    assert differences(models, states)
    accelerator.load_state(str(tmp_path / "b"))
    assert not differences(models, states)


def test_a_save_state_becomes_dcp_folders_and_comes_back(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    migrate(tmp_path / "a", tmp_path / "b", to="dcp")
    assert {name.split("/")[0] for name in names_below(tmp_path / "b") if "/" in name} == {
        "pytorch_model_fsdp_0", "pytorch_model_fsdp_1",
    }  # fmt: skip
    migrate(tmp_path / "b", tmp_path / "c", to="safetensors")
    assert names_below(tmp_path / "c") == names_below(tmp_path / "a")
    for name in ("model.safetensors", "model_1.safetensors"):
        assert digests_at(tmp_path / "c" / name) == digests_at(tmp_path / "a" / name)
    migrate(tmp_path / "b" / "pytorch_model_fsdp_1", tmp_path / "one.safetensors", to="safetensors")
    assert digests_at(tmp_path / "one.safetensors") == digests_at(
        tmp_path / "a" / "model_1.safetensors"
    )


def test_a_model_of_save_state_stays_one_file(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    with pytest.raises(UsageError, match="load_state reads one file per model"):
        migrate(tmp_path / "a", tmp_path / "b", to="bin", max_shard_size="1KB")
    migrate(tmp_path / "a", tmp_path / "b", to="dcp", max_shard_size=100)
    assert len([name for name in names_below(tmp_path / "b") if name.endswith(".distcp")]) > 2


def test_the_same_model_in_a_second_format_is_named_and_left(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    torch.save({"old": torch.zeros(1)}, tmp_path / "a" / "pytorch_model.bin")
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="dcp")
    assert [one.what for one in receipt.left_out] == ["pytorch_model.bin"]
    assert "pytorch_model.bin" not in names_below(tmp_path / "b")


def test_files_of_the_user_come_along_and_links_become_files(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    (tmp_path / "a" / "notes").mkdir()
    (tmp_path / "a" / "notes" / "é.txt").write_text("mine")
    os.chmod(tmp_path / "a" / "notes" / "é.txt", 0o640)
    os.utime(tmp_path / "a" / "notes" / "é.txt", ns=(10**18, 10**18))
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "blob")
    (tmp_path / "a" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a" / "pipe")
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="bin")
    copied = tmp_path / "b" / "notes" / "é.txt"
    assert copied.read_text() == "mine"
    assert copied.stat().st_mode & 0o777 == 0o640
    assert copied.stat().st_mtime_ns == 10**18
    assert not (tmp_path / "b" / "linked").is_symlink()
    assert (tmp_path / "b" / "linked").read_bytes() == (tmp_path / "blob").read_bytes()
    assert {one.what: one.reason for one in receipt.left_out} == {
        "dangling": "a broken symbolic link",
        "pipe": "not a regular file",
    }


def test_a_linked_checkpoint_is_read_through_its_links(tmp_path: Path) -> None:
    """As the cache of the Hugging Face hub has it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_safetensors(blobs / "1f", {"w": torch.randn(3)})
    (snapshot / "model.safetensors").symlink_to("../blobs/1f")
    (snapshot / "config.json").write_text("{}")
    migrate(snapshot, tmp_path / "b", to="bin")
    assert names_below(tmp_path / "b") == {"pytorch_model.bin", "config.json"}
    assert digests_at(tmp_path / "b") == digests_at(snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "bin"])
@pytest.mark.parametrize("most", ["30KB", "5GB"])
def test_transformers_loads_a_migrated_folder(tmp_path: Path, to: str, most: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=99, n_positions=32)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    migrate(tmp_path / "a", tmp_path / "dcp", to="dcp")
    receipt = migrate(tmp_path / "dcp", tmp_path / "b", to=to, max_shard_size=most)
    assert (len(receipt.models[0].files) > 2) == (most == "30KB")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "b").eval()
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (tmp_path / "b" / "config.json").read_bytes() == (
        tmp_path / "a" / "config.json"
    ).read_bytes()


def test_a_file_gives_a_folder_that_can_be_loaded_or_a_file(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(3)}, tmp_path / "weights.pt")
    migrate(tmp_path / "weights.pt", tmp_path / "folder", to="safetensors")
    migrate(tmp_path / "weights.pt", tmp_path / "other.pth", to="bin")
    assert names_below(tmp_path / "folder") == {"model.safetensors"}
    assert (
        digests_at(tmp_path / "folder")
        == digests_at(tmp_path / "other.pth")
        == digests_at(tmp_path / "weights.pt")
    )
    with pytest.raises(
        UsageError,
        match=(
            r"ends in \.safetensors, which does not match the format 'bin'; name a file that ends"
            r" in \.bin"
        ),
    ):
        migrate(tmp_path / "weights.pt", tmp_path / "x.safetensors", to="bin")
    with pytest.raises(UsageError, match="the output is a single file"):
        migrate(tmp_path / "weights.pt", tmp_path / "x.bin", to="bin", max_shard_size=5)
    with pytest.raises(UsageError, match=r"will be a folder too: name it without \.bin"):
        migrate(tmp_path / "folder", tmp_path / "x.bin", to="bin")


@pytest.mark.parametrize("to", FORMATS)
def test_the_models_of_a_training_dict(tmp_path: Path, to: str) -> None:
    models = [net(3), net(5)]
    torch.save(
        {
            "model": models[0].state_dict(),
            "ema": models[1].state_dict(),
            "optimizer": torch.optim.AdamW(models[0].parameters()).state_dict(),
            "epoch": 3,
        },
        tmp_path / "ckpt.pt",
    )
    with pytest.raises(UsageError, match="holds 2 models"):
        migrate(
            tmp_path / "ckpt.pt",
            tmp_path / f"x{'.safetensors' if to == 'safetensors' else '.bin'}",
            to=to if to != "dcp" else "bin",
        )
    receipt = migrate(tmp_path / "ckpt.pt", tmp_path / "b", to=to)
    assert [model.label for model in receipt.models] == ["ckpt.pt['model']", "ckpt.pt['ema']"]
    (left,) = receipt.left_out
    assert "'optimizer'" in left.what
    assert "'epoch'" in left.what
    for one, model in zip(open_checkpoint(tmp_path / "b").weights, models, strict=True):
        torch.save(model.state_dict(), tmp_path / "alone.bin")
        assert digests(one) == digests_at(tmp_path / "alone.bin")


@pytest.mark.parametrize("beside", [{"loss": torch.tensor(0.3)}, {"rng": torch.get_rng_state()}])
@pytest.mark.parametrize("inside_folder", [True, False])
def test_a_tensor_beside_the_model_in_a_training_dict_is_not_the_model(
    tmp_path: Path, beside: dict[str, torch.Tensor], inside_folder: bool
) -> None:
    (tmp_path / "a").mkdir()
    model = net(3)
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer, **beside},
        tmp_path / "a" / "epoch1.pt",
    )
    receipt = migrate(
        tmp_path / "a" / ("" if inside_folder else "epoch1.pt"), tmp_path / "b", to="safetensors"
    )
    (new,) = open_checkpoint(tmp_path / "b").weights
    assert {tensor.fqn for tensor in new.tensors} == model.state_dict().keys()
    assert [one.what for one in receipt.left_out] == [
        f"epoch1.pt: 'optimizer', {str([*beside])[1:-1]}"
    ]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize(
    "inner",
    [{"weight": torch.ones(2), "steps": 3}, {0: [{"exp_avg": torch.ones(2)}]}],
    ids=["odd", "deep"],
)
def test_a_dict_of_tensors_is_never_dropped_as_no_tensor(
    tmp_path: Path, drop: bool, inner: object
) -> None:
    torch.save({"model": inner, "loss": torch.tensor(0.3)}, tmp_path / "a.pt")
    with pytest.raises(OperationError, match=r"'model': nested dicts of tensors") as caught:
        migrate(tmp_path / "a.pt", tmp_path / "b", to="bin", drop_opaque=drop)
    assert "--drop-opaque" not in str(caught.value)


def test_a_name_that_only_the_script_knows_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_safetensors(
        tmp_path / "a" / "adapter_model.safetensors", {"lora_A.weight": torch.randn(2)}
    )
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    migrate(tmp_path / "a", tmp_path / "b", to="bin")
    assert names_below(tmp_path / "b") == {"adapter_model.bin", "adapter_config.json"}


@pytest.mark.parametrize("to", FORMATS)
def test_a_missing_shard_is_refused(tmp_path: Path, to: str) -> None:
    (tmp_path / "a").mkdir()
    for number in (1, 2):
        write_safetensors(
            tmp_path / "a" / f"model-{number:05}-of-00003.safetensors",
            {f"w{number}": torch.randn(2)},
        )
    document = {
        "metadata": {},
        "weight_map": {f"w{n}": f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)},
    }
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(
        OperationError, match=r"model-00003-of-00003\.safetensors is missing.*ckptfix check"
    ):
        migrate(tmp_path / "a", tmp_path / "b", to=to)
    assert os.listdir(tmp_path) == ["a"]


def test_shards_are_made_in_parallel_and_indexed(tmp_path: Path) -> None:
    shared = torch.randn(50)
    torch.save(
        {f"w{n}": torch.randn(100) for n in range(20)} | {"x": shared, "y": shared},
        tmp_path / "a.bin",
    )
    receipt = migrate(tmp_path / "a.bin", tmp_path / "b", to="safetensors", max_shard_size=1000)
    assert len(receipt.models[0].files) > 8
    assert digests_at(tmp_path / "b") == digests_at(tmp_path / "a.bin")
    migrate(tmp_path / "b", tmp_path / "c", to="bin", max_shard_size="2KiB")
    assert digests_at(tmp_path / "c") == digests_at(tmp_path / "a.bin")
    assert ties_at(tmp_path / "c") == ties_at(tmp_path / "b") == {frozenset("xy")}
    migrate(
        tmp_path / "c" / "pytorch_model.bin.index.json",
        tmp_path / "d.safetensors",
        to="safetensors",
    )
    assert digests_at(tmp_path / "d.safetensors") == digests_at(tmp_path / "a.bin")


ZERO = Path(__file__).parents[2] / "fixtures" / "deepspeed-0.18.2"


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeed_becomes_files_that_anybody_loads(tmp_path: Path, stage: str, to: str) -> None:
    source = ZERO / stage / "checkpoint"
    receipt = migrate(source, tmp_path / "b", to=to)
    assert digests_at(tmp_path / "b") == digests_at(source)
    assert ties_at(tmp_path / "b") == ties_at(source)
    left = {one.what.split(": ")[-1] for one in receipt.left_out}
    assert "latest" in left
    assert any("optimizer_state_dict" in what for what in left)
    migrate(source / "pytorch_model", tmp_path / "one.safetensors", to="safetensors")
    assert digests_at(tmp_path / "one.safetensors") == digests_at(source)


def test_deepspeed_in_the_dtype_of_training(tmp_path: Path) -> None:
    source = ZERO / "zero1-bf16" / "checkpoint"
    migrate(source, tmp_path / "original", to="bin", dtype="original")
    migrate(source, tmp_path / "rounded", to="bin", dtype="bf16")
    dtypes = {tensor.dtype for tensor in open_checkpoint(tmp_path / "original").weights[0].tensors}
    assert dtypes == {"BF16", "I64"}
    assert digests_at(tmp_path / "rounded") == digests_at(tmp_path / "original"), (
        "rounded as DeepSpeed rounds"
    )
    (whole,) = open_checkpoint(source, original=True).weights
    assert digests_at(tmp_path / "original") == digests(whole) != digests_at(source)
    with pytest.raises(OperationError, match="ZeRO-3"):
        migrate(ZERO / "zero3" / "checkpoint", tmp_path / "x", to="bin", dtype="original")


def manifested(folder: Path, **more: object) -> Manifest:
    """Save a folder and its manifest, as the guarded save_state leaves it."""
    trained(folder, safe=True)
    manifest = Manifest(
        versions={"torch": "2"},
        world_size=1,
        step=4,
        models=tuple(
            ManifestEntry(index=index, file=name, type="script.Net", keys="x")
            for index, name in enumerate(("model.safetensors", "model_1.safetensors"))
        ),
        optimizers=(ManifestEntry(index=0, file="optimizer.bin", type="AdamW", models=(0,)),),
        files={name: (folder / name).stat().st_size for name in names_below(folder)},
        **more,  # type: ignore[arg-type]
    )
    (folder / ".ckptfix").mkdir()
    (folder / ".ckptfix" / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest


@pytest.mark.parametrize("to", FORMATS)
def test_the_manifest_stays_true(tmp_path: Path, to: str) -> None:
    from ckptfix.checkpoint.latest import incomplete
    from ckptfix.checkpoint.manifest import missing_files

    old = manifested(tmp_path / "a")
    (tmp_path / "a" / "mine.txt").write_text("no file of the save")
    migrate(tmp_path / "a", tmp_path / "b", to=to)
    new = read_manifest(tmp_path / "b")
    assert new is not None
    assert (new.step, new.optimizers, new.sha256) == (4, old.optimizers, {})
    assert set(new.files) == names_below(tmp_path / "b") - {".ckptfix/manifest.json", "mine.txt"}
    assert missing_files(tmp_path / "b", new) == []
    assert incomplete(tmp_path / "b") is None
    opened = open_checkpoint(tmp_path / "b").weights
    assert [entry.file for entry in new.models] == [one.label for one in opened]
    assert [entry.type for entry in new.models] == ["script.Net", "script.Net"]
    assert [dict(entry.digests) for entry in new.models] == [digests(one) for one in opened]


def test_a_sealed_folder_stays_sealed(tmp_path: Path) -> None:
    import hashlib

    trained(tmp_path / "x", safe=True)
    names = names_below(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "a")
    sums = {
        name: hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest() for name in names
    }
    manifest = Manifest(versions={}, world_size=0, step=0, sha256=sums)
    (tmp_path / "a" / ".ckptfix").mkdir()
    (tmp_path / "a" / ".ckptfix" / "manifest.json").write_bytes(manifest.to_bytes())
    migrate(tmp_path / "a", tmp_path / "b", to="bin", verify=False)
    new = read_manifest(tmp_path / "b")
    assert new is not None
    assert new.files == {}
    assert new.sha256 == {
        name: hashlib.sha256((tmp_path / "b" / name).read_bytes()).hexdigest()
        for name in names_below(tmp_path / "b") - {".ckptfix/manifest.json"}
    }


def test_a_manifest_speaks_of_the_ties(tmp_path: Path) -> None:
    from ckptfix.checkpoint.entries import model_entries
    from ckptfix.checkpoint.folder import scan_folder

    manifest = manifested(tmp_path / "a")
    shared = torch.randn(3)
    os.unlink(tmp_path / "a" / "model.safetensors")
    path = tmp_path / "a" / "pytorch_model.bin"
    torch.save({"x": shared, "y": shared}, path)
    sizes = {name: size for name, size in manifest.files.items() if name != "model.safetensors"}
    manifest = replace(manifest, files={**sizes, path.name: path.stat().st_size})
    (tmp_path / "a" / ".ckptfix" / "manifest.json").write_bytes(manifest.to_bytes())
    migrate(tmp_path / "a", tmp_path / "b", to="safetensors")
    new = read_manifest(tmp_path / "b")
    assert new is not None
    assert new.models[0].type == "", "the manifest spoke of another file"
    assert new.models[0].aliases == {"y": "x"}
    assert new.models[1].type == manifest.models[1].type
    assert all(
        entry.recorded is not None for entry in model_entries(scan_folder(tmp_path / "b"), new)
    )


def test_what_is_shown_before_is_what_is_done(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    shown: list[MigrateReceipt] = []
    done = migrate(tmp_path / "a", tmp_path / "b", to="bin", on_plan=shown.append)
    (plan,) = shown
    assert plan.dry_run
    assert not plan.verified
    assert (plan.models, plan.carried, plan.bytes_to_write) == (
        done.models,
        done.carried,
        done.bytes_to_write,
    )
    assert done.bytes_to_write == sum(
        (tmp_path / "b" / name).stat().st_size for name in names_below(tmp_path / "b")
    )
    before = names_below(tmp_path)
    assert migrate(tmp_path / "a", tmp_path / "c", to="bin", dry_run=True).models == done.models
    assert names_below(tmp_path) == before


def test_names_inside_of_optimizers_are_said_to_stay(tmp_path: Path) -> None:
    trained(tmp_path / "a", safe=True)
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="bin", keys="ddp")
    assert [words for words in receipt.not_checked if "--keys ddp" in words]


def test_what_hangs_on_links_and_in_empty_folders_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "empty" / "inner").mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", {"w": torch.ones(2)})
    (tmp_path / "tok" / "deep").mkdir(parents=True)
    (tmp_path / "tok" / "deep" / "vocab.json").write_text("v")
    (tmp_path / "tok" / "again").symlink_to(tmp_path / "tok")
    (folder / "tokenizer").symlink_to("../tok")
    (folder / "circle").symlink_to("circle")
    (folder / "below").symlink_to("model.safetensors/x")
    (folder / "up").symlink_to("..")
    receipt = migrate(folder, tmp_path / "b", to="bin")
    assert names_below(tmp_path / "b") == {"pytorch_model.bin", "tokenizer/deep/vocab.json"}
    assert not (tmp_path / "b" / "tokenizer").is_symlink()
    assert (tmp_path / "b" / "empty" / "inner").is_dir()
    assert {one.what: one.reason for one in receipt.left_out} == {
        "below": "a broken symbolic link",
        "circle": "a symbolic link that leads to itself",
        "tokenizer/again": "is a link to tokenizer",
        "up": "is a link to a folder that contains it",
    }


def test_a_folder_that_fails_while_it_is_listed_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "tok").mkdir(parents=True)
    write_safetensors(tmp_path / "a" / "model.safetensors", {"w": torch.ones(2)})
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("a/tok"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OperationError, match="a/tok cannot be listed: Permission denied"):
        migrate(tmp_path / "a", tmp_path / "b", to="bin")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "model.fp16.safetensors", "epoch1.pt"]
)
def test_weights_that_only_their_script_knows_become_a_numbered_dcp_folder(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / name
    if path.suffix == ".pt":
        torch.save({"model": net(3).state_dict(), "epoch": 1}, path)
    else:
        write_safetensors(path, {"lora_A.weight": torch.randn(2)})
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="dcp")
    assert receipt.models[0].files[-1] == "pytorch_model_fsdp_0/.metadata"
    (one,) = open_checkpoint(tmp_path / "a").weights
    assert digests_at(tmp_path / "b") == digests(one)


def test_a_new_checkpoint_that_does_not_open_is_told_without_the_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.conversion import migrate as migrating

    write_safetensors(tmp_path / "a.safetensors", {"w": torch.randn(2)})

    real = open_checkpoint

    def fail(path: Path, *, original: bool = False) -> StoredCheckpoint:
        if path.name == "a.safetensors":
            return real(path, original=original)
        raise UsageError(f"{path} holds no weights of a model")

    monkeypatch.setattr(migrating, "open_checkpoint", fail)
    with pytest.raises(OperationError, match=f"{tmp_path}/b holds no weights") as caught:
        migrate(tmp_path / "a.safetensors", tmp_path / "b", to="bin")
    assert "ckptfix-writing" not in str(caught.value)


@pytest.mark.parametrize("to", FORMATS)
def test_a_sealed_dcp_folder_stays_true(tmp_path: Path, to: str) -> None:
    from ckptfix import seal
    from ckptfix.verification.verify import verify

    write_safetensors(tmp_path / "a.safetensors", {"w": torch.randn(2)})
    migrate(tmp_path / "a.safetensors", tmp_path / "dcp", to="dcp")
    assert seal(tmp_path / "dcp").written
    migrate(tmp_path / "dcp", tmp_path / "b", to=to)
    report = verify(tmp_path / "b")
    assert (report.status, report.sealed) == (0, True)
    manifest = read_manifest(tmp_path / "b")
    assert manifest is not None
    names = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin", "dcp": "."}
    assert [entry.file for entry in manifest.models] == [names[to]]


def test_a_file_that_only_ends_as_one_of_dcp_does_is_carried(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {"w": torch.ones(3)})
    (source / "run.metadata").write_text("mine")
    receipt = migrate(source, tmp_path / "b", to="bin")
    assert (receipt.carried, receipt.left_out) == (("run.metadata",), ())
    assert (tmp_path / "b" / "run.metadata").read_text() == "mine"

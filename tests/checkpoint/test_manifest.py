"""The manifest: written and read back, refused when it is odd, and in nobody's way."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from ckptfix import check, repair, undo
from ckptfix.checkpoint.latest import UNFINISHED, candidates, checkpoints_folder, incomplete
from ckptfix.checkpoint.manifest import (
    Manifest,
    ManifestEntry,
    key_fingerprint,
    missing_files,
    read_manifest,
)
from ckptfix.diagnosis.resumable import newest_complete
from ckptfix.errors import FormatError
from ckptfix.storage.paths import MANIFEST
from tests.repairs.builders import RANDOM_STATES, write_safetensors

WEIGHTS = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
FIXTURE = WEIGHTS / "wrapper-safetensors" / "checkpoint"
ENTRY = ManifestEntry(
    index=0, file="model.safetensors", type="torch.nn.Linear", keys="ab", aliases={"b": "a"}
)


def make(**changes: Any) -> Manifest:
    files = {"model.safetensors": 4, "sub/part.bin": 2}
    return Manifest(
        **{
            "versions": {"torch": "2"},
            "world_size": 2,
            "step": 7,
            "models": (ENTRY,),
            "files": files,
            **changes,
        }
    )


ODD_NAMES = ("", ".", "./a", "a//b", "a/", "..", "\ud800", "a/\udbffb")
ODD_VERSIONS: tuple[Any, ...] = (True, None, "", [], {"torch": 2}, {"torch": None})
ODD_LISTS: tuple[Any, ...] = ("", {}, None)
OPTIMIZER = ManifestEntry(index=0, file="optimizer.bin", type="torch.optim.AdamW", models=(0, 2))
SCHEDULER = ManifestEntry(index=0, file="scheduler.bin", type="torch.optim.StepLR", optimizer=0)


def write(folder: Path, data: bytes) -> None:
    (folder / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(data)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    manifest = make(optimizers=(OPTIMIZER,), schedulers=(SCHEDULER,))
    write(tmp_path, manifest.to_bytes())
    assert read_manifest(tmp_path) == manifest


def test_a_manifest_from_before_objects_were_linked_is_read(tmp_path: Path) -> None:
    document = json.loads(make(optimizers=(OPTIMIZER,), schedulers=(SCHEDULER,)).to_bytes())
    for entry in (*document["models"], *document["optimizers"], *document["schedulers"]):
        entry.pop("models", None)
        entry.pop("optimizer", None)
    write(tmp_path, json.dumps(document).encode())
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.optimizers[0].models, manifest.schedulers[0].optimizer) == ((), None)
    assert manifest.models == (ENTRY,)


def test_links_are_written_only_where_there_are_any() -> None:
    document = json.loads(make(optimizers=(OPTIMIZER,), schedulers=(SCHEDULER,)).to_bytes())
    links = [
        {name for name in ("models", "optimizer") if name in entry}
        for kind in ("models", "optimizers", "schedulers")
        for entry in document[kind]
    ]
    assert links == [set(), {"models"}, {"optimizer"}]


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: None,
        lambda document: [],
        lambda document: {**document, "version": 2},
        lambda document: (
            {key: value for key, value in document.items() if key != "files"} | {"files": []}
        ),
        lambda document: {**document, "unknown": 1},
        lambda document: {**document, "world_size": "2"},
        *(lambda document, odd=odd: {**document, "versions": odd} for odd in ODD_VERSIONS),
        *(lambda document, odd=odd: {**document, "models": odd} for odd in ODD_LISTS),
        lambda document: {**document, "step": 10**400},
        lambda document: {**document, "files": {"a": 10**400}},
        lambda document: {key: each for key, each in document.items() if key != "custom"},
        lambda document: {**document, "models": [{"index": 0}]},
        lambda document: {**document, "models": [{**document["models"][0], "aliases": {"b": 1}}]},
        *(
            lambda document, wrong=wrong: {
                **document,
                "models": [{**document["models"][0], **wrong}],
            }
            for wrong in (
                {"models": 0},
                {"models": ["0"]},
                {"models": [-1]},
                {"models": [True]},
                {"models": [0, 0]},
                {"models": {"0": 0}},
                {"optimizer": "0"},
                {"optimizer": -1},
                {"optimizer": False},
            )
        ),
        lambda document: {**document, "files": {"../../etc/passwd": 1}},
        lambda document: {**document, "files": {"/etc/passwd": 1}},
        lambda document: {**document, "files": {"a": "1"}},
        lambda document: {**document, "sha256": {"a": "1"}},
        lambda document: {**document, "sha256": {"a": "A" * 64}},
        lambda document: {**document, "sha256": {"../a": "a" * 64}},
        lambda document: {**document, "sha256": {"a\0": "a" * 64}},
        lambda document: {**document, "sha256": ["a"]},
        *(
            lambda document, name=name: {**document, "sha256": {name: "a" * 64}}
            for name in ODD_NAMES
        ),
        *(lambda document, name=name: {**document, "files": {name: 1}} for name in ODD_NAMES),
        lambda document: {**document, "files": {"a": -1}},
        lambda document: {**document, "world_size": -1},
        lambda document: {**document, "world_size": 1 << 60},
        lambda document: {
            **document,
            "models": [{**document["models"][0], "digests": {"a": "no hex"}}],
        },
        lambda document: {**document, "models": [{**document["models"][0], "digests": {"a": ""}}]},
    ],
)
def test_an_odd_manifest_is_refused(tmp_path: Path, damage: Any) -> None:
    document = damage(json.loads(make().to_bytes()))
    write(tmp_path, b"{" if document is None else json.dumps(document).encode())
    with pytest.raises(FormatError, match="manifest"):
        read_manifest(tmp_path)
    assert incomplete(tmp_path) is not None


def test_a_name_of_odd_bytes_is_a_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.bin")
    write(tmp_path, make(files={name: 2}).to_bytes())
    (tmp_path / name).write_bytes(b"12")
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert missing_files(tmp_path, manifest) == []


def test_a_manifest_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(FormatError, match="not a regular file"):
        read_manifest(tmp_path)
    assert "not a regular file" in str(incomplete(tmp_path))


@pytest.mark.parametrize("size", [3, 5])
def test_missing_files_are_named_with_both_sizes(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    assert missing_files(tmp_path, make()) == [
        f"model.safetensors has {size} bytes (expected 4, as saved)",
        "sub/part.bin is missing",
    ]


def test_a_key_fingerprint_ignores_the_order_alone() -> None:
    one, other = ("a", "F32", (2, 3)), ("b", "F32", (3,))
    assert key_fingerprint([one, other]) == key_fingerprint([other, one])
    different = [("a", "F32", (3, 2)), ("a", "F16", (2, 3)), ("c", "F32", (2, 3))]
    assert len({key_fingerprint([tensor, other]) for tensor in [one, *different]}) == 4


def test_a_manifest_follows_a_repair_and_its_undo(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURE, folder)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    data = make(files=files).to_bytes()
    write(folder, data)
    assert incomplete(folder) is None
    assert repair(folder).status == 0
    assert incomplete(folder) is None
    followed = read_manifest(folder)
    assert followed is not None
    assert set(followed.files) == {path.name for path in folder.iterdir() if path.is_file()}
    assert missing_files(folder, followed) == []
    undo(folder)
    assert (folder / MANIFEST).read_bytes() == data
    assert [path.name for path in (folder / MANIFEST).parent.iterdir()] == ["manifest.json"]
    assert [finding.code for finding in check(folder).findings] == ["doubled-model"]


def test_digests_of_files_are_written_only_where_there_are_any(tmp_path: Path) -> None:
    assert "sha256" not in json.loads(make().to_bytes())
    sealed = make(sha256={"model.safetensors": "0" * 64, "sub/part.bin": ""})
    write(tmp_path, sealed.to_bytes())
    assert read_manifest(tmp_path) == sealed


def test_what_was_sealed_beside_a_save_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    sealed = make(
        files={"model.safetensors": 4},
        sha256=dict.fromkeys(("model.safetensors", "n.txt"), "0" * 64),
    )
    write(tmp_path, sealed.to_bytes())
    assert missing_files(tmp_path, sealed) == []
    assert incomplete(tmp_path) is None, "the notes are the user's, who took them away"
    (tmp_path / "model.safetensors").unlink()
    assert incomplete(tmp_path) == "model.safetensors is missing"


def test_a_sealed_folder_that_no_save_wrote_is_judged_as_stock_accelerate_leaves_it(
    tmp_path: Path,
) -> None:
    shutil.copyfile(
        WEIGHTS / "clean-safetensors/checkpoint/model.safetensors", tmp_path / "model.safetensors"
    )
    write(tmp_path, make(files={}, sha256={"model.safetensors": "0" * 64}).to_bytes())
    assert "random_states_0.pkl" in str(incomplete(tmp_path))
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert incomplete(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()  # as by a save in the other format
    shutil.copyfile(
        WEIGHTS / "clean-bin/checkpoint/pytorch_model.bin", tmp_path / "pytorch_model.bin"
    )
    assert incomplete(tmp_path) is None
    (tmp_path / "pytorch_model.bin").unlink()
    assert incomplete(tmp_path) == "no model weights"


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "pytorch_lora_weights.safetensors", "model.fp16.safetensors"],
)
def test_an_adapter_that_a_hook_saved_is_weights_of_a_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    write_safetensors(tmp_path / name, {"a": b"x"})
    assert incomplete(tmp_path) is None
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    assert name in str(incomplete(tmp_path))


def test_candidates_are_ordered_by_number_and_others_are_passed_over(tmp_path: Path) -> None:
    for name in ("checkpoint_9", "checkpoint_10", "checkpoint_x", "notes", "checkpoint_010"):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", {"a": b"x"})
        (tmp_path / name / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    (tmp_path / "checkpoint_11").write_text("a file")
    assert [candidate.number for candidate in candidates(tmp_path)] == [10, 10, 9]
    best = newest_complete(candidates(tmp_path))
    assert best is not None
    assert best.path.name == "checkpoint_10"
    assert newest_complete(()) is None


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("checkpoint_4", "checkpoint_008"), "checkpoint_008"),
        (("checkpoint_010", "checkpoint_008", "checkpoint_9"), "checkpoint_010"),
        (("checkpoint_4", "checkpoint_03"), "checkpoint_4"),
    ],
)
def test_zeros_in_front_of_a_number_count_as_accelerate_counts_them(
    tmp_path: Path, names: tuple[str, ...], newest: str
) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    for name in names:
        shutil.copytree(tmp_path / "checkpoints" / "checkpoint_0", tmp_path / "checkpoints" / name)
    loaded: list[str] = []
    accelerator.register_load_state_pre_hook(
        lambda models, folder: loaded.append(Path(folder).name)
    )
    accelerator.load_state()
    best = newest_complete(candidates(tmp_path / "checkpoints"))
    assert best is not None
    assert [best.path.name] == loaded == [newest]


def test_a_folder_into_which_a_save_was_under_way_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert incomplete(tmp_path) == "no model weights"
    write_safetensors(tmp_path / "model.safetensors", {"a": b"x"})
    assert incomplete(tmp_path) is None
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / ".ckptfix" / UNFINISHED).touch()
    assert "interrupted" in str(incomplete(tmp_path))


def test_the_folder_of_checkpoints_is_found_from_the_project(tmp_path: Path) -> None:
    assert checkpoints_folder(tmp_path) == tmp_path
    (tmp_path / "checkpoints").mkdir()
    assert checkpoints_folder(tmp_path) == tmp_path / "checkpoints"
    assert checkpoints_folder(tmp_path / "checkpoints") == tmp_path / "checkpoints"

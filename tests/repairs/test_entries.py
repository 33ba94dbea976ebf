"""Which entries are doubled, identical, in conflict, moved or missing, and what a repair makes of
them.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from msgspec.structs import replace

from ckptfix import Finding, Keys, Policy, check, latest_checkpoint, plan_repair, repair, undo
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.errors import OperationError
from ckptfix.storage.paths import JOURNAL, MANIFEST
from tests.repairs.builders import (
    RANDOM_STATES,
    read_safetensors_bytes,
    snapshot,
    write_safetensors,
    write_trained_optimizer,
)

STUDENT = {"fc.weight": b"student!" * 40, "fc.bias": b"s" * 8}
TEACHER = {"fc.weight": b"teacher?" * 40, "fc.bias": b"t" * 8}


def wrapped(tensors: Mapping[str, bytes], chain: str = "module.") -> dict[str, bytes]:
    return {chain + name: data for name, data in tensors.items()}


def save_state(
    folder: Path,
    *models: Mapping[str, bytes],
    ranks: int = 2,
    trained: Sequence[Mapping[str, bytes]] = (),
) -> Path:
    """Save models, and an optimizer for each that was ``trained``."""
    folder.mkdir()
    for index, tensors in enumerate(trained):
        write_trained_optimizer(folder / f"optimizer{f'_{index}' if index else ''}.bin", tensors)
    for index, tensors in enumerate(models):
        write_safetensors(folder / f"model{f'_{index}' if index else ''}.safetensors", tensors)
    for rank in range(ranks):
        (folder / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    return folder


def models_of(folder: Path) -> dict[str, dict[str, bytes]]:
    return {
        path.name: read_safetensors_bytes(path) for path in sorted(folder.glob("*.safetensors"))
    }


def codes_of(findings: Iterable[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def codes(folder: Path) -> list[str]:
    return codes_of(check(folder).findings)


@pytest.mark.parametrize("chain", ["module.", "_orig_mod.module.", "module._orig_mod."])
def test_a_wrapped_copy_is_dropped(tmp_path: Path, chain: str) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT, chain), trained=[STUDENT])
    before = snapshot(folder)
    assert codes(folder) == ["doubled-model"]
    assert repair(folder).status == 0
    assert models_of(folder) == {"model.safetensors": STUDENT}
    undo(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("chain", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_a_script_may_compile_one_of_two_equal_models(tmp_path: Path, chain: str) -> None:
    """A target network just synchronised, not compiled: both entries belong there, and only the
    user can tell.
    """
    folder = save_state(tmp_path / "c", wrapped(STUDENT, chain), STUDENT)
    before = snapshot(folder)
    assert codes(folder) == ["identical-models", "wrapper-prefix"]
    assert "apart from a wrapper" in str(check(folder).findings[0])
    assert repair(folder).steps == ()
    assert snapshot(folder) == before


@pytest.mark.parametrize("chain", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_a_compiled_student_and_a_plain_teacher_are_no_conflict(tmp_path: Path, chain: str) -> None:
    folder = save_state(tmp_path / "c", wrapped(STUDENT, chain), TEACHER)
    assert codes(folder) == ["wrapper-prefix"]
    assert check(folder).status == 0


def test_one_process_alone_wraps_nothing(tmp_path: Path) -> None:
    """``self.module = copy`` of an EMA: without a second rank, ``module.`` is the model's own
    name.
    """
    folder = save_state(tmp_path / "c", STUDENT, wrapped(TEACHER), ranks=1)
    assert codes(folder) == ["wrapper-prefix"]
    two = save_state(tmp_path / "d", STUDENT, wrapped(TEACHER), ranks=2)
    assert codes(two) == ["wrapper-prefix", "related-models"]
    assert check(two).status == 0


def test_models_without_parameters_are_not_compared(tmp_path: Path) -> None:
    assert codes(save_state(tmp_path / "c", STUDENT, {}, {})) == []


@pytest.mark.parametrize(
    ("models", "ranks"),
    [
        ((STUDENT, wrapped(STUDENT)), 1),  # one process alone wraps nothing
        ((wrapped(STUDENT), STUDENT), 2),  # ema, model = prepare(ema, model)
        ((STUDENT, wrapped(STUDENT, "module.module.")), 2),  # an average of the prepared model
        (
            (STUDENT, wrapped(STUDENT), wrapped(STUDENT)),
            2,
        ),  # a second prepare registers one of them, but which?
    ],
)
def test_an_average_that_equals_its_model_is_kept(
    tmp_path: Path, models: tuple[dict[str, bytes], ...], ranks: int
) -> None:
    folder = save_state(tmp_path / "c", *models, ranks=ranks)
    before = snapshot(folder)
    assert set(codes(folder)) == {"identical-models", "wrapper-prefix"}
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (1, ())
    assert snapshot(folder) == before
    kept = min(models, key=lambda tensors: min(map(len, tensors)))
    assert repair(folder, policy=Policy(keep={Role.MODEL: 1})).status == 0
    assert models_of(folder) == {"model.safetensors": kept}


def test_two_modules_that_share_their_weights_are_named(tmp_path: Path) -> None:
    """An embedding and its head, prepared one by one, leave the bytes of one module twice."""
    folder = save_state(tmp_path / "c", STUDENT, STUDENT)
    finding = check(folder).findings[0]
    assert finding.code == "identical-models"
    assert "ignore this for" in finding.advice
    assert "modules that share their weights" in finding.advice


def test_a_rank_whose_state_is_missing_counts(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT), trained=[STUDENT])
    (folder / "random_states_0.pkl").unlink()
    assert codes(folder) == ["doubled-model", "incomplete-checkpoint"]


def test_full_states_of_fsdp_have_no_second_prepare(tmp_path: Path) -> None:
    """FSDP adds no wrapper to names: the one that is there is the script's own."""
    folder = save_state(tmp_path / "c")
    for name, chain in (("pytorch_model_fsdp.bin", ""), ("pytorch_model_fsdp_1.bin", "module.")):
        torch.save({f"{chain}fc.weight": torch.ones(3)}, folder / name)
    assert codes(folder) == ["identical-models", "wrapper-prefix"]


def test_an_average_of_the_prepared_model_is_not_damaged(tmp_path: Path) -> None:
    """After training it has other values; its wrappers are its own and that of ``prepare``."""
    folder = save_state(tmp_path / "c", STUDENT, wrapped(TEACHER, "module.module."))
    before = snapshot(folder)
    assert check(folder).status == 0
    assert codes(folder) == ["wrapper-prefix", "related-models"]
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (0, ())
    assert snapshot(folder) == before


def test_an_own_submodule_called_module_is_no_wrapper(tmp_path: Path) -> None:
    own = wrapped(STUDENT)
    folder = save_state(tmp_path / "c", own, wrapped(own), trained=[own])
    assert repair(folder).status == 0
    assert models_of(folder) == {"model.safetensors": own}


def test_teacher_and_student_are_two_models(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, TEACHER)
    assert codes(folder) == []
    receipt = repair(folder)
    assert (receipt.status, receipt.steps) == (0, ())
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_1.safetensors": TEACHER}


def test_one_byte_makes_a_conflict_not_a_double(tmp_path: Path) -> None:
    other = dict(STUDENT, **{"fc.bias": b"s" * 7 + b"!"})
    folder = save_state(tmp_path / "c", STUDENT, wrapped(other))
    before = snapshot(folder)
    assert codes(folder) == ["related-models", "wrapper-prefix"]
    nearly, _ = check(folder).findings
    assert nearly.severity is Severity.WARNING
    assert "1 of 2 tensors differs: 'fc.bias'; the other is equal in every sampled byte" in str(
        nearly
    )
    assert repair(folder).status == 1
    assert snapshot(folder) == before


def manifest(folder: Path, **changes: Any) -> None:
    """Write the manifest of a save that made the folder as it is."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    content = Manifest(versions={}, world_size=2, step=0, files=sizes)
    (folder / MANIFEST).parent.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(replace(content, **changes).to_bytes())


def test_a_manifest_proves_that_two_saves_are_mixed(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT)
    manifest(folder)
    write_safetensors(folder / "model_1.safetensors", wrapped(TEACHER))
    conflict, *_ = check(folder).findings
    assert conflict.code == "conflicting-models"
    assert "does not list model_1.safetensors" in str(conflict)
    assert (
        f"ckptfix diff {folder}/model.safetensors {folder}/model_1.safetensors"
        in conflict.advice_at(str(folder))
    )
    manifest(folder)  # the save wrote both: an average
    assert check(folder).status == 0


def test_the_classes_in_a_manifest_tell_an_average_from_a_second_prepare(tmp_path: Path) -> None:
    for kind, code in (("ema.Average", "identical-models"), ("net.Net", "doubled-model")):
        folder = save_state(tmp_path / code, STUDENT, wrapped(STUDENT), trained=[STUDENT])
        entries = (
            ManifestEntry(index=0, file="model.safetensors", type="net.Net"),
            ManifestEntry(index=1, file="model_1.safetensors", type=kind),
        )
        manifest(folder, models=entries)
        assert codes(folder)[0] == code


@pytest.mark.parametrize("cut", [4, 200])
def test_a_truncated_original_is_no_conflict(tmp_path: Path, cut: int) -> None:
    """The other entry is said to hold the same names, intact."""
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    assert codes(folder) == ["truncated-file", "wrapper-prefix", "related-models"]
    assert "model.safetensors is damaged, model_1.safetensors is not" in str(
        check(folder).findings[-1]
    )
    assert repair(folder).steps == ()


@pytest.mark.parametrize("whole", [False, True])
def test_a_damaged_torch_file_is_no_conflict(tmp_path: Path, whole: bool) -> None:
    folder = save_state(tmp_path / "c")
    for name, chain in (("pytorch_model.bin", ""), ("pytorch_model_1.bin", "module.")):
        torch.save({f"{chain}fc.weight": torch.arange(4096.0)}, folder / name)
    path = folder / "pytorch_model.bin"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(4096.0).numpy().tobytes()) + 12] ^= 1
    path.write_bytes(data if whole else data[:-60])
    codes = [finding.code for finding in check(folder, data=True).findings]
    assert codes[1:] == ["wrapper-prefix", "related-models"]
    assert "pytorch_model.bin is damaged" in str(check(folder, data=True).findings[-1])


@pytest.mark.slow
def test_a_byte_between_the_samples_stops_a_repair(tmp_path: Path) -> None:
    weight = bytearray(64 << 20)
    one = {"w": bytes(weight), "b": b"12345678"}
    weight[(64 << 20) * 3 // 7] = 1
    folder = save_state(
        tmp_path / "c", one, wrapped({**one, "w": bytes(weight)}), trained=[{"b": b"12345678"}]
    )
    assert codes(folder) == ["doubled-model"]  # sampled, and the report says so
    assert "sampled" in str(check(folder).findings[0])
    assert "related-models" in codes_of(check(folder, data=True).findings)
    receipt = repair(folder)
    assert "related-models" in codes_of(receipt.found)
    assert receipt.status == 1
    assert len(models_of(folder)) == 2


@pytest.mark.parametrize(
    ("models", "keep", "left"),
    [
        ((STUDENT, STUDENT, TEACHER), 2, (STUDENT, TEACHER)),
        ((STUDENT, STUDENT, STUDENT), 1, (STUDENT,)),
        ((STUDENT, STUDENT, STUDENT), 2, (STUDENT, STUDENT)),
        ((STUDENT, TEACHER, STUDENT), 2, (STUDENT, TEACHER)),
        ((STUDENT, wrapped(STUDENT), STUDENT), 1, (STUDENT,)),
        ((STUDENT, wrapped(STUDENT), TEACHER), 2, (STUDENT, TEACHER)),
        # One is an average.
        ((STUDENT, wrapped(STUDENT), wrapped(STUDENT)), 2, (STUDENT, wrapped(STUDENT))),
    ],
)
def test_models_n_drops_proven_copies(
    tmp_path: Path,
    models: tuple[dict[str, bytes], ...],
    keep: int,
    left: tuple[dict[str, bytes], ...],
) -> None:
    folder = save_state(tmp_path / "c", *models)
    before = snapshot(folder)
    policy = Policy(keep={Role.MODEL: keep})
    repair(folder, policy=policy)
    assert list(models_of(folder).values()) == list(left)
    assert repair(folder, policy=policy).steps == ()
    undo(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("models", "keep", "reason"),
    [
        ((STUDENT, TEACHER), 1, "the folder has 2 with 0 removable duplicates"),
        ((STUDENT, STUDENT, TEACHER, TEACHER), 3, "it is unclear which"),
        ((STUDENT,), 2, "the folder has 1"),
        (
            (STUDENT, wrapped(STUDENT)),
            2,
            ("2 models requested, but only 1 of 2 would remain without duplicates"),
        ),
        (
            (STUDENT, wrapped(STUDENT), TEACHER, wrapped(TEACHER)),
            3,
            "3 models requested, but only 2 of 4 would remain without duplicates",
        ),
    ],
)
def test_models_n_refuses_what_it_cannot_prove(
    tmp_path: Path, models: tuple[dict[str, bytes], ...], keep: int, reason: str
) -> None:
    trained = [one for one in (STUDENT, TEACHER) if one in models]
    folder = save_state(tmp_path / "c", *models, trained=trained)
    before = snapshot(folder)
    receipt = repair(folder, policy=Policy(keep={Role.MODEL: keep}))
    assert reason in receipt.unplanned[0].reason
    assert snapshot(folder) == before


def test_a_gap_is_closed_only_when_allowed(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, STUDENT, TEACHER)
    (folder / "model_1.safetensors").unlink()
    assert codes(folder) == ["entry-gap"]
    (gap,) = check(folder).findings
    first, *rest = gap.advice.splitlines()
    assert first.startswith("copy ")
    assert "only if the script no longer has that object" in rest[0]
    assert repair(folder).status == 1
    assert set(models_of(folder)) == {"model.safetensors", "model_2.safetensors"}
    assert repair(folder, policy=Policy(allow=frozenset({"entry-gap"}))).status == 0
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_1.safetensors": TEACHER}


def in_format(folder: Path, kinds: str, *models: torch.nn.Module) -> None:
    """Save models with ``save_state``, each in the format of its letter: s, b, or - for a lost
    one.
    """
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*models)
    accelerator.save_state(str(folder), safe_serialization=True)
    accelerator.save_state(str(folder), safe_serialization=False)
    for number, kind in enumerate(kinds):
        at = f"_{number}" if number else ""
        if kind in "b-":
            (folder / f"model{at}.safetensors").unlink()
        if kind in "s-":
            (folder / f"pytorch_model{at}.bin").unlink()


@pytest.mark.parametrize(
    "kinds", ["bs", "sb", "bsb", "sbb", "-s", "s-b", "b-s", "*s", "s*b", "*-s"]
)
def test_models_in_two_formats_have_a_gap_only_where_load_state_finds_neither(
    tmp_path: Path, kinds: str
) -> None:
    folder = tmp_path / "checkpoint_0"
    models = [torch.nn.Linear(2, 3 + number) for number in range(len(kinds))]
    in_format(folder, kinds, *models)
    accelerator = Accelerator(cpu=True)
    again = [torch.nn.Linear(2, 3 + number) for number in range(len(kinds))]
    accelerator.prepare(*again)
    if "-" in kinds:
        with pytest.raises(FileNotFoundError):
            accelerator.load_state(str(folder))
    else:
        accelerator.load_state(str(folder))
        for model, other in zip(models, again, strict=True):
            assert torch.equal(model.weight, other.weight)
    gaps = [one for one in check(folder).findings if one.code == "entry-gap"]
    assert bool(gaps) is ("-" in kinds)
    if not gaps:
        assert latest_checkpoint(tmp_path) == folder
    if kinds == "-s":
        assert repair(folder, policy=Policy(allow=frozenset({"entry-gap"}))).status == 0
        kept = [model for model, kind in zip(models, kinds, strict=True) if kind != "-"]
        accelerator = Accelerator(cpu=True)
        again = [torch.nn.Linear(2, model.weight.shape[0]) for model in kept]
        accelerator.prepare(*again)
        accelerator.load_state(str(folder))
        assert all(
            torch.equal(one.weight, other.weight) for one, other in zip(kept, again, strict=True)
        )
    elif gaps:
        before = snapshot(folder)
        receipt = repair(folder, policy=Policy(allow=frozenset({"entry-gap"})))
        assert "two formats with different numbers" in receipt.unplanned[0].reason
        assert snapshot(folder) == before


def test_a_drop_moves_the_later_models_of_both_formats(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT), trained=[STUDENT])
    torch.save({"fc.weight": torch.ones(3)}, folder / "pytorch_model_2.bin")
    assert repair(folder).status == 0
    assert sorted(path.name for path in folder.glob("*model*")) == [
        "model.safetensors",
        "pytorch_model_1.bin",
    ]


def test_a_drop_keeps_a_gap_that_was_there(tmp_path: Path) -> None:
    folder = save_state(
        tmp_path / "c", STUDENT, wrapped(STUDENT), TEACHER, TEACHER, trained=[STUDENT]
    )
    (folder / "model_2.safetensors").unlink()
    assert repair(folder).status == 1
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_2.safetensors": TEACHER}


def test_a_pipe_in_the_place_of_a_later_model_is_refused(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT), trained=[STUDENT])
    pipe = folder / "model_2.safetensors"
    os.mkfifo(pipe)
    words = re.escape(
        f"{pipe}: not a regular file, so a repair cannot move it; nothing was changed; next: rm "
        f"{pipe}, and copy"
    )
    for act in (plan_repair, repair):
        with pytest.raises(OperationError, match=words):
            act(folder)
    assert not (folder / JOURNAL).exists()


def test_a_chain_counts_only_if_every_shard_carries_it(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"module.module.a": b"1"})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"module.head": b"2"})
    before = snapshot(folder)
    # Writes the missing index, and leaves the user's submodules called module alone.
    receipt = repair(folder)
    after = snapshot(folder)
    after.pop("model.safetensors.index.json")
    assert {name: data for name, data in after.items() if not name.startswith(".ckptfix")} == before
    assert [step.fixes for step in receipt.steps] == [("index-mismatch",)]


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a._orig_mod.w": b"1", "a.w": b"2"})
    receipt = repair(path, policy=Policy(keys=Keys.BARE))
    assert "'a._orig_mod.w' and 'a.w' would both become 'a.w'" in receipt.unplanned[0].reason
    assert read_safetensors_bytes(path) == {"a._orig_mod.w": b"1", "a.w": b"2"}


@pytest.mark.parametrize("keys", [Keys.BARE, Keys.DDP])
@pytest.mark.parametrize("chain", ["", "module.", "module.module.", "_orig_mod.module."])
def test_keys_says_what_the_names_become(tmp_path: Path, keys: Keys, chain: str) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", wrapped(STUDENT, chain))
    original = path.read_bytes()
    receipt = repair(path, policy=Policy(keys=keys))
    want = STUDENT if keys is Keys.BARE else wrapped(STUDENT)
    assert read_safetensors_bytes(path) == want
    if receipt.transaction is not None:
        undo(path)
    assert path.read_bytes() == original


def test_alias_records_in_the_metadata_follow(tmp_path: Path) -> None:
    metadata = {"format": "pt", "module.module.head": "module.module.emb"}
    path = write_safetensors(
        tmp_path / "m.safetensors", {"module.module.emb": b"1"}, metadata=metadata
    )
    repair(path)
    assert b'"module.head":"module.emb"' in path.read_bytes()


def test_a_linked_file_is_replaced_and_its_other_name_keeps_its_bytes(tmp_path: Path) -> None:
    blob = write_safetensors(tmp_path / "blob", wrapped(STUDENT, "module.module."))
    before = blob.read_bytes()
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "a.safetensors").symlink_to("../blob")
    (folder / "b.safetensors").hardlink_to(blob)
    assert repair(folder).status == 0
    assert blob.read_bytes() == before
    for name in ("a.safetensors", "b.safetensors"):
        assert read_safetensors_bytes(folder / name) == wrapped(STUDENT)
    undo(folder)
    assert (folder / "a.safetensors").is_symlink()
    assert (folder / "b.safetensors").samefile(blob)


def test_lone_files_of_one_folder_are_undone_one_by_one(tmp_path: Path) -> None:
    paths = [
        write_safetensors(tmp_path / f"{name}.safetensors", wrapped(STUDENT, "module.module."))
        for name in "ab"
    ]
    before = snapshot(tmp_path)
    for path in paths:
        repair(path, policy=Policy(allow=frozenset({"nested-prefix"})))
    undo(paths[0])
    assert paths[0].read_bytes() == before["a.safetensors"]
    assert paths[1].read_bytes() != before["b.safetensors"]
    undo(paths[1])
    assert snapshot(tmp_path) == before

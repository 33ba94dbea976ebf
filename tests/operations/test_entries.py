"""Which entries are doubled, identical, in conflict, moved or missing, and what a repair makes of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from ckptfix import Finding, Keys, Policy, check, repair, undo
from ckptfix.checkpoint.filenames import Role
from tests.operations.builders import read_safetensors_bytes, snapshot, write_safetensors

STUDENT = {"fc.weight": b"student!" * 40, "fc.bias": b"s" * 8}
TEACHER = {"fc.weight": b"teacher?" * 40, "fc.bias": b"t" * 8}


def wrapped(tensors: Mapping[str, bytes], chain: str = "module.") -> dict[str, bytes]:
    return {chain + name: data for name, data in tensors.items()}


def save_state(folder: Path, *models: Mapping[str, bytes], ranks: int = 2) -> Path:
    folder.mkdir()
    for index, tensors in enumerate(models):
        write_safetensors(folder / f"model{f'_{index}' if index else ''}.safetensors", tensors)
    for rank in range(ranks):
        (folder / f"random_states_{rank}.pkl").write_bytes(b"\x80\x02}q\x00.")  # an empty dict
    return folder


def models_of(folder: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: read_safetensors_bytes(path) for path in sorted(folder.glob("*.safetensors"))}


def codes_of(findings: Iterable[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def codes(folder: Path) -> list[str]:
    return codes_of(check(folder).findings)


@pytest.mark.parametrize("chain", ["module.", "module.module.", "module._orig_mod."])
def test_a_wrapped_copy_is_dropped(tmp_path: Path, chain: str) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT, chain))
    before = snapshot(folder)
    assert codes(folder) == ["doubled-model"]
    assert repair(folder).status == 0
    assert models_of(folder) == {"model.safetensors": STUDENT}
    undo(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("chain", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_a_script_may_compile_one_of_two_equal_models(tmp_path: Path, chain: str) -> None:
    """A target network just synchronised, not compiled: both entries belong there, and only the user can tell."""
    folder = save_state(tmp_path / "c", wrapped(STUDENT, chain), STUDENT)
    before = snapshot(folder)
    assert codes(folder) == ["identical-models", "wrapper-prefix"]
    assert "but for the wrapper" in str(check(folder).findings[0])
    assert repair(folder).steps == ()
    assert snapshot(folder) == before


@pytest.mark.parametrize("chain", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_a_compiled_student_and_a_plain_teacher_are_no_conflict(tmp_path: Path, chain: str) -> None:
    folder = save_state(tmp_path / "c", wrapped(STUDENT, chain), TEACHER)
    assert codes(folder) == ["wrapper-prefix"]
    assert check(folder).status == 0


def test_one_process_alone_wraps_nothing(tmp_path: Path) -> None:
    """``self.module = copy`` of an EMA: without a second rank, ``module.`` is the model's own name."""
    folder = save_state(tmp_path / "c", STUDENT, wrapped(TEACHER), ranks=1)
    assert codes(folder) == ["wrapper-prefix"]
    assert codes(save_state(tmp_path / "d", STUDENT, wrapped(TEACHER), ranks=2))[0] == "conflicting-models"


def test_models_without_parameters_are_not_compared(tmp_path: Path) -> None:
    assert codes(save_state(tmp_path / "c", STUDENT, {}, {})) == []


def test_the_least_wrapped_entry_stays_wherever_it_is(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", wrapped(STUDENT), STUDENT, TEACHER)
    assert repair(folder).status == 0
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_1.safetensors": TEACHER}


def test_an_own_submodule_called_module_is_no_wrapper(tmp_path: Path) -> None:
    own = wrapped(STUDENT)
    folder = save_state(tmp_path / "c", own, wrapped(own))
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
    assert codes(folder)[0] == "conflicting-models"
    assert repair(folder).status == 1
    assert snapshot(folder) == before


def test_a_byte_between_the_samples_stops_a_repair(tmp_path: Path) -> None:
    weight = bytearray(64 << 20)
    one = {"w": bytes(weight)}
    weight[(64 << 20) * 3 // 7] = 1
    folder = save_state(tmp_path / "c", one, wrapped({"w": bytes(weight)}))
    assert codes(folder) == ["doubled-model"]  # sampled, and the report says so
    assert "sampled" in str(check(folder).findings[0])
    assert codes_of(check(folder, data=True).findings)[0] == "conflicting-models"
    receipt = repair(folder)
    assert codes_of(receipt.found)[0] == "conflicting-models"
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
    ],
)
def test_models_n_drops_proven_copies(
    tmp_path: Path, models: tuple[dict[str, bytes], ...], keep: int, left: tuple[dict[str, bytes], ...]
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
        ((STUDENT, TEACHER), 1, "of which 0 equal another"),
        ((STUDENT, STUDENT, TEACHER, TEACHER), 3, "which is not clear"),
        ((STUDENT,), 2, "the folder has 1"),
    ],
)
def test_models_n_refuses_what_it_cannot_prove(
    tmp_path: Path, models: tuple[dict[str, bytes], ...], keep: int, reason: str
) -> None:
    folder = save_state(tmp_path / "c", *models)
    before = snapshot(folder)
    receipt = repair(folder, policy=Policy(keep={Role.MODEL: keep}))
    assert reason in receipt.unplanned[0].reason
    assert snapshot(folder) == before


def test_a_gap_is_closed_only_when_allowed(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, STUDENT, TEACHER)
    (folder / "model_1.safetensors").unlink()
    assert codes(folder) == ["entry-gap"]
    assert repair(folder).status == 1
    assert set(models_of(folder)) == {"model.safetensors", "model_2.safetensors"}
    assert repair(folder, policy=Policy(allow=frozenset({"entry-gap"}))).status == 0
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_1.safetensors": TEACHER}


def test_a_drop_keeps_a_gap_that_was_there(tmp_path: Path) -> None:
    folder = save_state(tmp_path / "c", STUDENT, wrapped(STUDENT), TEACHER, TEACHER)
    (folder / "model_2.safetensors").unlink()
    assert repair(folder).status == 1
    assert models_of(folder) == {"model.safetensors": STUDENT, "model_2.safetensors": TEACHER}


def test_a_chain_counts_only_if_every_shard_carries_it(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"module.module.a": b"1"})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"module.head": b"2"})
    before = snapshot(folder)
    receipt = repair(folder)  # writes the missing index, and leaves the user's submodules called module alone
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
    path = write_safetensors(tmp_path / "m.safetensors", {"module.module.emb": b"1"}, metadata=metadata)
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
        repair(path)
    undo(paths[0])
    assert paths[0].read_bytes() == before["a.safetensors"]
    assert paths[1].read_bytes() != before["b.safetensors"]
    undo(paths[1])
    assert snapshot(tmp_path) == before

"""The states that transformers' Trainer starts anew in silence, as a table of folders."""

import json
from pathlib import Path

import pytest

from ckptfix.checkpoint.latest import candidates, incomplete
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import is_model_alone, missing_states, other_processes
from ckptfix.diagnosis.resumable import newest_complete
from ckptfix.storage.paths import MANIFEST

FULL = ("optimizer.pt", "scheduler.pt")
OPTIMIZER, SCHEDULER, RANDOM = Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE


def folder(root: Path, step: int, *names: str, processes: int = 0) -> Path:
    """Make a folder of a Trainer; with ``processes`` it has the manifest of a save."""
    made = root / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in names:
        if name.endswith("/"):
            (made / name).mkdir()
        else:
            (made / name).write_bytes(b"x")
    if processes:
        files = dict.fromkeys((name for name in names if not name.endswith("/")), 1)
        (made / MANIFEST).parent.mkdir()
        manifest = Manifest(versions={}, world_size=processes, step=0, files=files)
        (made / MANIFEST).write_bytes(manifest.to_bytes())
    return made


@pytest.mark.parametrize(
    ("names", "processes", "missing"),
    [
        ((*FULL, "rng_state.pth"), 1, []),
        (("scheduler.pt", "rng_state.pth"), 1, [OPTIMIZER]),
        (("optimizer.pt", "rng_state.pth"), 1, [SCHEDULER]),
        (FULL, 1, [RANDOM]),
        ((), 1, [OPTIMIZER, SCHEDULER, RANDOM]),
        ((*FULL, "rng_state_0.pth", "rng_state_1.pth"), 2, []),
        ((*FULL, "rng_state_0.pth"), 2, [RANDOM]),
        ((*FULL, "rng_state_1.pth"), 2, [RANDOM]),
        ((*FULL, "rng_state_0.pth", "rng_state_2.pth"), 3, [RANDOM]),
        (("optimizer.bin", "scheduler.pt", "rng_state.pth"), 1, []),  # FSDP, full
        (("optimizer_0/", "scheduler.pt", "rng_state.pth"), 1, []),  # FSDP, sharded
        (("global_step4/", "rng_state.pth"), 1, []),  # DeepSpeed has both
        (("rank0-of-2-optimizer.pt", "scheduler.pt", "rng_state.pth"), 1, []),  # FSDP under XLA
        # another number of processes now:
        ((*FULL, "rng_state.pth"), 2, []),
        ((*FULL, "rng_state_0.pth", "rng_state_1.pth"), 1, []),
        ((*FULL, "rng_state_0.pth", "rng_state_1.pth"), 4, []),
        ((*FULL, *(f"rng_state_{rank}.pth" for rank in range(4))), 2, []),
    ],
)
def test_states(
    tmp_path: Path, names: tuple[str, ...], processes: int, missing: list[Role]
) -> None:
    found = missing_states(folder(tmp_path, 4, *names), processes=processes, ranks=range(processes))
    assert [one.role for one in found] == missing
    assert is_model_alone(found) == (names == ())


def test_the_manifest_knows_how_many_processes_there_were(tmp_path: Path) -> None:
    states = ("rng_state_0.pth", "rng_state_1.pth")
    made = folder(tmp_path, 4, *FULL, *states, processes=4)
    (lost,) = missing_states(made, processes=4, ranks=range(4))
    assert lost.name == "rng_state_2.pth, rng_state_3.pth"
    assert other_processes(made, 4) is None
    two = folder(tmp_path, 6, *FULL, *states, processes=2)
    assert missing_states(two, processes=4, ranks=range(4)) == ()
    assert other_processes(two, 4) == "saved with 2 processes, now 4"


def test_only_the_ranks_of_this_node_are_on_its_disk(tmp_path: Path) -> None:
    made = folder(tmp_path, 4, *FULL, "rng_state_2.pth", "rng_state_3.pth")
    assert missing_states(made, processes=4, ranks=range(2, 4)) == ()
    (lost,) = missing_states(made, processes=4, ranks=range(4))
    assert lost.name == "rng_state_0.pth, rng_state_1.pth"


def test_two_of_four_ranks_are_lost_when_the_checkpoint_before_has_all(tmp_path: Path) -> None:
    before = folder(tmp_path, 2, *FULL, *(f"rng_state_{rank}.pth" for rank in range(4)))
    made = folder(tmp_path, 4, *FULL, "rng_state_0.pth", "rng_state_1.pth")
    (lost,) = missing_states(made, processes=4, ranks=range(4), siblings=[made, before])
    assert lost.name == "rng_state_2.pth, rng_state_3.pth"
    (before / "rng_state_2.pth").unlink()
    assert missing_states(made, processes=4, ranks=range(4), siblings=[made, before]) == ()


def test_weights_of_a_subclass_have_a_name_of_their_own(tmp_path: Path) -> None:
    made = folder(tmp_path, 4, "mm_projector.bin")
    assert incomplete(made) is None
    (made / "trainer_state.json").unlink()
    assert incomplete(made) is not None


def test_a_torn_state_makes_a_checkpoint_incomplete(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for step in (2, 4):
        made = folder(tmp_path, step, "projector.bin")
        for name in (*FULL, "rng_state.pth"):
            torch.save({"a": torch.zeros(100)}, made / name)
    whole = (made / "rng_state.pth").read_bytes()
    (made / "rng_state.pth").write_bytes(whole[: len(whole) // 2])
    found = candidates(tmp_path, "checkpoint-{}")
    best = newest_complete(found)
    assert best is not None
    assert best.number == 2
    assert "rng_state.pth" in (found[0].problem or "")

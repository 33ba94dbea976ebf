"""A guarded save that records digests can be verified, sealed, repaired, and saved over."""

from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from msgspec.structs import replace

from ckptfix import LoadPolicy, load_state_tolerant, repair, seal, verify
from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.training.accelerator import Accelerator
from ckptfix.training.loading.load_report import Requirement
from ckptfix.training.saving.save_state import _rank_of, _Save
from ckptfix.training.saving.saved_digests import SavedDigests, take_left
from ckptfix.training.saving.staged_saves import _was_saved
from ckptfix.verification.verify_report import Kind, Outcome
from tests.training.loading_runs import reset
from tests.training.rank_cases import turn_on_fsdp
from tests.training.ranks import run_ranks
from tests.verification.sealed import flip, place, wrong

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Tied(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(3))


def save(folder: Path, *, safetensors: bool = True) -> Accelerator:
    accelerator = Accelerator(cpu=True, tensor_digests=True)
    model = Tied()
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(folder), safe_serialization=safetensors)
    del prepared
    return accelerator


def manifest_in(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def matches(report: Any, kind: Kind) -> int:
    """Return the number of matches, of which all are."""
    counts = report.count(kind)
    assert (counts[Outcome.DIFFER], counts[Outcome.NOT_CHECKED]) == (0, 0)
    return int(counts[Outcome.MATCH])


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_save_with_digests_verifies(tmp_path: Path, safetensors: bool) -> None:
    folder = tmp_path / "c"
    save(folder, safetensors=safetensors)
    report = verify(folder, data=True)
    assert report.status == 0
    manifest = manifest_in(folder)
    assert matches(report, Kind.TENSOR) == 5
    assert matches(report, Kind.FILE) == len(manifest.files)
    assert report.is_verified
    assert seal(folder).status == 0
    # A tolerant load believes an entry by its keys and aliases.
    assert manifest_in(folder) == replace(manifest, digests_of_save=False), "it was born sealed"
    assert matches(verify(folder), Kind.FILE) == len(manifest.files)
    assert incomplete(folder) is None
    assert repair(folder).steps == ()
    piece = place(folder, "first.bias")
    flip(piece.path, piece.offset)
    assert set(wrong(verify(folder))) == {"first.bias", piece.path.name}


def test_a_file_that_another_process_adds_later_is_no_difference_and_a_model_is(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    save(folder)
    (folder / "random_states_1.pkl").write_bytes((folder / "random_states_0.pkl").read_bytes())
    (folder / "notes.txt").write_text("mine")
    assert verify(folder).status == 0
    (folder / "optimizer_1.bin").write_bytes((folder / "optimizer.bin").read_bytes())
    report = verify(folder)
    assert report.status == 1
    assert wrong(report)["optimizer_1.bin"] == ("extra", None)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the saves of two processes: as one, each for itself, and as FSDP
    does.
    """
    folder = tmp_path_factory.mktemp("ranks")

    def work(rank: int) -> None:
        for name in ("together", "alone", "fsdp", "fsdp-full"):
            reset()
            accelerator = Accelerator(cpu=True, tensor_digests=True, save_together=name != "alone")
            if name.startswith("fsdp"):
                kind = "FULL" if name == "fsdp-full" else "SHARDED"
                turn_on_fsdp(accelerator, fsdp_version=2, state_dict_type=f"{kind}_STATE_DICT")
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            accelerator.register_save_state_pre_hook(
                lambda models, weights, place: (Path(place) / "of_all.json").write_text(str(rank))
            )
            accelerator.save_state(str(folder / name))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder / name))

    assert run_ranks(2, work) == [0, 0]
    return folder


def counts(folder: Path) -> tuple[set[str], set[str], int]:
    """Return the files whose digest matches, those that were not compared, and the number of
    matching tensors.
    """
    report = verify(folder)
    assert report.status == 0, str(report)
    assert seal(folder).status == 0, "its own digests agree"
    files = {item.name: item.outcome for item in report.items if item.kind is Kind.FILE}
    matching = {name for name, outcome in files.items() if outcome is Outcome.MATCH}
    return matching, files.keys() - matching, report.count(Kind.TENSOR)[Outcome.MATCH]


@pytest.mark.slow
def test_a_save_of_two_processes_is_born_sealed(of_two: Path) -> None:
    matching, others, tensors = counts(of_two / "together")
    files = "random_states_0.pkl", "random_states_1.pkl", "run_state_1.pt", "model.safetensors"
    assert set(files) <= matching
    assert (others, tensors) == (set(), 4)
    assert not [path.name for path in of_two.rglob(".ckptfix-digests-*")]


@pytest.mark.slow
def test_a_process_that_saves_for_itself_leaves_the_digests_of_what_no_other_writes(
    of_two: Path,
) -> None:
    matching, others, tensors = counts(of_two / "alone")
    own = {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "run_state_0.pt"}
    assert matching == own
    assert others == {"of_all.json", "random_states_1.pkl", "run_state_1.pt"}
    assert tensors == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "fsdp-full"])
def test_a_save_of_fsdp_is_born_sealed_too(of_two: Path, name: str) -> None:
    manifest = manifest_in(of_two / name)
    matching, others, tensors = counts(of_two / name)
    if name == "fsdp":
        assert {"pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__0_0.distcp"} <= matching
    assert (others, tensors) == (set(), 4)
    assert manifest_in(of_two / name) == replace(manifest, digests_of_save=False)
    (piece,) = list(of_two.glob(f"{name}/pytorch_model_fsdp*/__0_0.distcp")) or [
        of_two / name / "pytorch_model_fsdp.bin"
    ]
    flip(piece, piece.stat().st_size // 3)
    assert verify(of_two / name).status == 1
    flip(piece, piece.stat().st_size // 3)


def test_processes_share_the_tensors_that_deepspeed_cuts(tmp_path: Path) -> None:
    """Each hashes some of them, and the main process has them all, as seal would."""
    folder = tmp_path / "c"
    copytree(FIXTURES / "deepspeed-0.18.2" / "accelerate-zero3" / "checkpoint", folder)
    ranks = [SavedDigests(), SavedDigests()]
    for rank, digests in enumerate(ranks):
        digests.hash_shared(folder, rank, 2)
        if rank:
            digests.leave_for_others(folder, rank)
    left, left_tensors = take_left(folder)
    assert 0 < len(left_tensors) < 13
    assert ranks[0].complete(()) == (), "some digests are none: verify would call the rest extra"
    ranks[0].take(left, left_tensors)
    (entry,) = ranks[0].complete(())
    for digests in ranks:
        digests.close()
    assert seal(folder).status == 0
    assert (entry,) == manifest_in(folder).models


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [
        (DistributedType.FSDP, 999, [(999, 1024)]),
        (DistributedType.DEEPSPEED, 31, [(31, 32)]),
        (DistributedType.DEEPSPEED, 32, []),
        (DistributedType.MULTI_CPU, 0, []),
    ],
)
def test_of_1024_processes_few_read_the_files_of_all_ranks(
    kind: DistributedType,
    rank: int,
    expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed has no list of its tensors: a thousand processes would read a million files."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        SavedDigests, "hash_shared", lambda self, folder, *share: asked.append(share)
    )
    save = _Save.__new__(_Save)
    save._digests = SavedDigests()
    save._accelerator = SimpleNamespace(
        distributed_type=kind, process_index=rank, num_processes=1024
    )
    save._hash_shared(Path("c"))
    save.end()
    assert asked == expected


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("pytorch_model/mp_rank_00_model_states.pt", None),
        ("pytorch_model/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1),
        ("optimizer_0/__3_0.distcp", 3),
        ("random_states_2.pkl", 2),
        ("model.safetensors", None),
    ],
)
def test_each_process_makes_the_files_of_its_rank_durable(name: str, rank: int | None) -> None:
    assert _rank_of(name) == rank


def test_long_files_of_a_save_have_digests_of_their_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("saved_digests", "save_manifest"):
        monkeypatch.setattr(f"ckptfix.training.saving.{module}.RANGE", 600)
    save(tmp_path / "c")
    manifest = manifest_in(tmp_path / "c")
    assert "optimizer.bin" in manifest.ranges.keys() - manifest.sha256.keys()
    assert manifest.range_size == 600
    assert matches(verify(tmp_path / "c"), Kind.FILE) == len(manifest.files)
    flip(tmp_path / "c" / "optimizer.bin", 1300)
    assert "range 2 of" in str(verify(tmp_path / "c"))


def test_a_save_into_a_sealed_folder_keeps_what_is_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    accelerator = save(folder)
    (folder / "notes.txt").write_text("mine")
    seal(folder)
    accelerator.save_state(str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
    manifest = manifest_in(folder)
    assert manifest.sha256.keys() == manifest.files.keys()
    assert verify(folder).status == 0
    other = tmp_path / "checkpoints" / "checkpoint_0"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    seal(other)
    assert not _was_saved(other), "rotation removes what a save wrote, and a seal is no save"


def test_a_loaded_step_is_never_that_of_a_manifest_that_no_save_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    accelerator = save(folder)
    (folder / ".ckptfix" / "manifest.json").unlink()
    (folder / "random_states_0.pkl").unlink()
    seal(folder)
    accelerator.step = 17
    with pytest.warns(UserWarning, match="step"):
        report = load_state_tolerant(accelerator, folder, policy=LoadPolicy(rng=Requirement.IGNORE))
    assert accelerator.step == 17
    assert "from the manifest" not in str(report)

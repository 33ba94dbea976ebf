"""Files that a save leaves and that are gone: by the ranks, the manifest, and the other checkpoints
of the run.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check, seal
from ckptfix.checkpoint import neighbours as runs
from ckptfix.cli import run
from ckptfix.storage.files import names_in
from tests.diagnosis.builders import edit_json
from tests.repairs.builders import TRAINER_RANDOM_STATES
from tests.stores.servers import upload_folder
from tests.tensors import dcp_making

FIXTURES = Path("fixtures/accelerate-1.15.0")


def give_own_values(root: Path) -> None:
    """Give a numbered save weights and moments that no other save of its run has. Copies in it stay
    copies.
    """
    number = re.search("[0-9]+$", root.name)
    if number is None:
        return
    for path in root.glob("model*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= int(number[0]) % 256
        path.write_bytes(content)
    for path in (*root.glob("optimizer.pt"), *root.glob("optimizer*.bin")):
        optimizer = torch.load(path)
        for state in optimizer["state"].values():
            state["exp_avg"] += int(number[0])
        torch.save(optimizer, path)


def make(root: Path, source: str = "clean-safetensors", without: Iterable[str] = ()) -> Path:
    shutil.copytree(FIXTURES / source / "checkpoint", root)
    give_own_values(root)
    for name in without:
        (root / name).unlink()
    return root


def numbered(root: Path, count: int, source: str = "clean-safetensors") -> list[Path]:
    """Make the checkpoints of a run, or of several runs where ``root`` has another name."""
    return [make(root.with_name(f"{root.name}_{number}"), source) for number in range(count)]


def drop(root: Path, *names: str) -> None:
    for name in names:
        (root / name).unlink()


def incomplete(root: Path, siblings: Iterable[Path] = ()) -> list[str]:
    report = check(root, siblings=siblings)
    return [str(finding) for finding in report.findings if finding.code == "incomplete-checkpoint"]


STATES = ("random_states_0.pkl", "random_states_1.pkl")
OTHERS = ("optimizer.bin", *STATES)
SECOND_PROCESS = (
    "random_states_0.pkl is missing: random_states_1.pkl shows that at least 2 processes saved"
)


@pytest.mark.parametrize(
    "source", ["clean-safetensors", "clean-bin", "clean-teacher-student", "clean-single-process"]
)
def test_a_complete_checkpoint_has_nothing_to_say(tmp_path: Path, source: str) -> None:
    report = check(make(tmp_path / "checkpoint", source))
    assert report.status == 0
    assert not any(
        words.startswith(("resuming", "optimizers", "weights:")) for words in report.not_checked
    )


def test_a_rank_is_missing(tmp_path: Path) -> None:
    root = make(tmp_path / "checkpoint", without=STATES[:1])
    assert incomplete(root) == [SECOND_PROCESS]
    shutil.copy(root / "random_states_1.pkl", root / "random_states_3.pkl")
    assert incomplete(root) == [
        "random_states_0.pkl, random_states_2.pkl are missing: random_states_3.pkl shows that at "
        "least 4 processes saved"
    ]


@pytest.mark.parametrize(("scheduler", "hint", "why"), [
    (None, "whether 0 schedulers are enough for 1 optimizer that had one",
     "a script may prepare its optimizer alone"),
    ("scheduler_1.bin", "whether 1 optimizer is enough for 2 schedulers",
     "a script may use several schedulers for one optimizer"),
])  # fmt: skip
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_lone_folder_may_have_lost_its_last_files(
    tmp_path: Path, scheduler: str | None, hint: str, why: str, is_stored: bool
) -> None:
    """check said "saved by 1 process" of a folder without the states of rank 1, and nothing else."""
    make(tmp_path / "run/checkpoint_0", without=["random_states_1.pkl"])
    folder = tmp_path / "run/checkpoint_0"
    optimizer = torch.load(folder / "optimizer.bin")
    for group in optimizer["param_groups"]:
        group["initial_lr"] = group["lr"]
    torch.save(optimizer, folder / "optimizer.bin")
    if scheduler is not None:
        for name in ("scheduler.bin", scheduler):
            torch.save({"last_epoch": 1, "_last_lr": [0.1]}, folder / name)
    place: Any = f"memory://{os.urandom(6).hex()}/run/checkpoint_0" if is_stored else folder
    if is_stored:
        upload_folder(folder, place)
    report = check(place)
    (words,) = (words for words in report.not_checked if "belong to one save" in words)
    assert words.startswith("whether all files belong to one save and none is missing: ")
    assert f"{hint}: {why}" in report.not_checked
    assert f", {hint}" in str(report), "without -v"
    assert "  saved by   at least 1 process" in str(report)
    if is_stored:
        return
    shutil.copytree(folder, tmp_path / "run/checkpoint_1")
    assert not any("none is missing" in words for words in check(folder).not_checked)


def test_a_node_that_has_only_its_own_ranks_is_not_damaged(tmp_path: Path) -> None:
    """Without a shared disk the main process alone writes models: another node has states of ranks,
    and no more.
    """
    (tmp_path / "node").mkdir()
    for rank in (4, 5):
        shutil.copy(
            FIXTURES / "clean-safetensors/checkpoint/random_states_0.pkl",
            tmp_path / f"node/random_states_{rank}.pkl",
        )
    report = check(tmp_path / "node")
    assert report.status == 0
    assert (
        "weights: the folder has only per-rank states, as on a node that saves to its own disk"
        in report.not_checked
    )


def test_a_scheduler_without_an_optimizer(tmp_path: Path) -> None:
    root = make(tmp_path / "checkpoint", "custom-object", without=["optimizer.bin"])
    assert incomplete(root) == [
        "optimizer.bin is missing: scheduler.bin shows that the run had an optimizer"
    ]


def test_a_seal_says_what_a_scheduler_was_sealed_without_and_hides_no_rank(tmp_path: Path) -> None:
    root = make(tmp_path / "a", "custom-object", without=["optimizer.bin"])
    assert seal(root, force=True).written
    assert incomplete(root) == []
    assert any(words.startswith("optimizers: none saved") for words in check(root).not_checked)
    ranks = make(tmp_path / "b", without=STATES[:1])
    assert seal(ranks).written
    assert incomplete(ranks) == [SECOND_PROCESS]


def test_what_a_load_does_without_each_lost_file_is_told(tmp_path: Path) -> None:
    """All were said to stop it, and a line below that it restores all but the random states."""
    root = numbered(tmp_path / "checkpoint", 3, "custom-object")[2]
    custom, states = "custom_checkpoint_1.pkl", ", ".join(STATES)
    drop(root, custom)
    (alone,) = (one for one in check(root).findings if one.code == "incomplete-checkpoint")
    assert alone.advice.startswith("load_state fails without this file; copy it again, or ")
    drop(root, *STATES)
    report = check(root)
    (finding,) = (one for one in report.findings if one.code == "incomplete-checkpoint")
    assert str(finding).startswith(f"{states}, {custom} are missing: 2 of 2 ")
    assert finding.advice.startswith(
        f"load_state fails without {custom}, and without {states} only logs that it restores "
        "neither random states nor accelerator.step; copy them again, or resume from a complete "
        "checkpoint; if the script has no such object, "
    )
    assert report.understood.problems == (NO_STATES,)


NO_STATES = (
    "random states: none saved; load_state restores neither the random generators nor "
    "accelerator.step"
)


def test_what_nothing_tells_is_said(tmp_path: Path) -> None:
    """A script without an optimizer, and an export of weights, are healthy: but they resume no
    other run.
    """
    report = check(make(tmp_path / "a", without=["optimizer.bin"]))
    assert report.status == 0
    words = "optimizers: none saved; load_state fails"
    assert any(sentence.startswith(words) for sentence in report.not_checked)
    report = check(make(tmp_path / "c", without=STATES))
    assert report.status == 0
    assert report.understood.problems == (NO_STATES,)
    assert not any(words.startswith("random states") for words in report.not_checked)
    weights = make(tmp_path / "b", without=OTHERS)
    report = check(weights)
    assert report.status == 0
    assert any("only weights" in words for words in report.not_checked)
    (weights / "config.json").write_text("{}")
    assert not any("only weights" in words for words in check(weights).not_checked)


def test_a_sealed_file_is_missing(tmp_path: Path) -> None:
    root = make(tmp_path / "checkpoint")
    seal(root)
    (root / "optimizer.bin").unlink()
    assert incomplete(root) == ["optimizer.bin is missing: .ckptfix/manifest.json lists it"]


@pytest.mark.parametrize("lost", ["optimizer.bin", "random_states_1.pkl", "model.safetensors"])
def test_a_sibling_has_it(tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    roots = numbered(tmp_path / "checkpoint", 3)
    assert run(["check", "-r", str(tmp_path)]) == 0
    drop(roots[1], lost)
    capsys.readouterr()
    assert run(["check", "-r", str(tmp_path), "--json"]) == 1
    documents = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [document["status"] for document in documents] == [0, 1, 0]
    # The three have one optimizer, which is a note.
    (finding,) = (one for one in documents[1]["findings"] if one["code"] != "stale-save")
    if lost != "model.safetensors":  # missing-model says that already
        assert finding["code"] == "incomplete-checkpoint"
        assert finding["missing"] == [lost]
        assert "2 of 2 neighbouring checkpoints have it" in finding["message"]


def test_neighbours_are_compared_wherever_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = numbered(tmp_path / "run" / "checkpoint", 3)
    (roots[1] / "optimizer.bin").unlink()
    (tmp_path / "run" / "checkpoint_3").symlink_to(roots[1])
    for paths, statuses in (
        ([roots[1]], [1]),
        (roots[:2], [0, 1]),
        ([tmp_path], [0, 1, 0]),
        ([roots[1], tmp_path / "run"], [1, 0, 0]),  # once, though two paths lead to it
    ):
        run(["check", "-r", *map(str, paths), "--json"])
        documents = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [document["status"] for document in documents] == statuses


def test_folders_that_only_end_in_a_number_are_compared_if_they_are_named(tmp_path: Path) -> None:
    """Two runs, ``x_1`` and ``x_2``, may have different objects."""
    roots = numbered(tmp_path / "x", 3, "custom-object")
    drop(roots[1], "custom_checkpoint_0.pkl")
    assert incomplete(roots[1]) == []
    assert incomplete(roots[1], roots) == [
        "custom_checkpoint_0.pkl is missing: 2 of 2 neighbouring checkpoints have it"
    ]


def test_each_folder_of_a_run_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = numbered(tmp_path / "checkpoint", 7)
    listed: list[str] = []

    def listing(folder: Path) -> list[str]:
        listed.append(folder.name)
        return names_in(folder)

    monkeypatch.setattr(runs, "names_in", listing)
    siblings = runs.Siblings([tmp_path], is_recursive=True)
    before, after = siblings.of(roots[3]).saves()
    assert [save.name for save in before] == ["checkpoint_2", "checkpoint_1"]
    assert [save.name for save in after] == ["checkpoint_4", "checkpoint_5"]
    assert len({id(save.parts) for save in (*before, *after)}) == 1
    assert len(listed) == 4
    for root in roots:
        siblings.of(root).saves()
    assert sorted(listed) == [root.name for root in roots]


def test_runs_that_were_compared_are_forgotten(tmp_path: Path) -> None:
    siblings = runs.Siblings([tmp_path], is_recursive=True)
    for number in range(1000):
        siblings.of(tmp_path / f"run{number}" / "checkpoint_1").saves()
    assert len(siblings._runs) == runs._MOST_RUNS


def test_a_checkpoint_given_twice_counts_once(tmp_path: Path) -> None:
    roots = numbered(tmp_path / "checkpoint", 2, "custom-object")
    drop(roots[1], "custom_checkpoint_0.pkl")
    assert incomplete(roots[1], [*roots, roots[1], *roots]) == [
        "custom_checkpoint_0.pkl is missing: the neighbouring checkpoint has it"
    ]


def test_an_export_next_to_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    roots = numbered(tmp_path / "checkpoint", 2)
    final = make(tmp_path / "final", without=OTHERS)
    assert incomplete(final, [*roots, final]) == []


def test_a_run_that_went_on_with_fewer_processes(tmp_path: Path) -> None:
    """From checkpoint 2 on there is one process: nothing is missing in what follows."""
    roots = numbered(tmp_path / "checkpoint", 4)
    for root in roots[2:]:
        drop(root, "random_states_1.pkl")
    assert [incomplete(root, roots) for root in roots] == [[], [], [], []]


@pytest.mark.parametrize("prefix", ["checkpoint", "x"])
@pytest.mark.parametrize("processes", [(2, 1), (1, 2), (2, 2, 2, 1), (1, 2, 2, 2)])
def test_one_neighbour_with_more_processes_is_no_evidence(
    tmp_path: Path, prefix: str, processes: tuple[int, ...]
) -> None:
    """A run resumed with fewer or more processes, or two runs next to each other: nothing is
    missing.
    """
    roots = numbered(tmp_path / prefix, len(processes))
    drop(roots[processes.index(1)], "random_states_1.pkl")
    reports = [check(root, siblings=roots) for root in roots]
    assert [report.status for report in reports] == [0] * len(roots)
    every = [finding for report in reports for finding in report.findings]
    (finding,) = (one for one in every if one.code != "stale-save")
    assert (finding.code, finding.severity.value) == ("incomplete-checkpoint", "note")
    assert "ignore this if the run now has fewer processes" in finding.advice


def test_the_newest_may_lack_a_rank_and_certainly_lacks_its_optimizer(tmp_path: Path) -> None:
    roots = numbered(tmp_path / "checkpoint", 2)
    drop(roots[1], "random_states_1.pkl", "optimizer.bin")
    report = check(roots[1], siblings=roots)
    assert [(one.severity.value, str(one)) for one in report.findings] == [
        ("warning", "optimizer.bin is missing: the neighbouring checkpoint has it"),
        ("note", "random_states_1.pkl is missing: the neighbouring checkpoint has it"),
    ]


def test_a_guarded_save_is_believed(tmp_path: Path) -> None:
    """Its manifest lists what it wrote: a script may have dropped its optimizer."""
    roots = numbered(tmp_path / "checkpoint", 2)
    drop(roots[1], "optimizer.bin")
    seal(roots[1], force=True)
    path = roots[1] / ".ckptfix" / "manifest.json"
    names = json.loads(path.read_text())["sha256"]
    edit_json(path, files={name: (roots[1] / name).stat().st_size for name in names})
    assert incomplete(roots[1], roots) == []


RANDOM = ["rng_state_0.pth", "rng_state_1.pth"]
TRAINER = ["optimizer.pt", "scheduler.pt", *RANDOM, "trainer_state.json"]


def make_of_trainer(root: Path, without: Iterable[str] = ()) -> Path:
    """Make a folder as the Trainer saves it on two processes."""
    clean = FIXTURES / "custom-object/checkpoint"
    root.mkdir()
    shutil.copy(clean / "model.safetensors", root)
    for name in TRAINER[:2]:
        shutil.copy(clean / name.replace(".pt", ".bin"), root / name)
    for rank in range(2):
        (root / f"rng_state_{rank}.pth").write_bytes(TRAINER_RANDOM_STATES)
    shutil.copy(clean / "scheduler.bin", root / "training_args.bin")
    (root / "trainer_state.json").write_text('{"global_step": 4}')
    give_own_values(root)
    for name in without:
        (root / name).unlink()
    return root


SHOWN = "missing: rng_state_1.pth shows that the Trainer saved its states here"
NEW_OPTIMIZER = (
    "the Trainer silently continues with a new optimizer and learning rate; copy it again"
)


@pytest.mark.parametrize(("without", "missing", "advice"), [
    (["trainer_state.json"], f"trainer_state.json is {SHOWN}",
     "the Trainer cannot resume without it; copy it again, or"),
    (["scheduler.pt"], f"scheduler.pt is {SHOWN}", NEW_OPTIMIZER),
    (["optimizer.pt"], "optimizer.pt is missing: scheduler.pt shows that the run had an optimizer",
     NEW_OPTIMIZER),
    (["optimizer.pt", "scheduler.pt"], f"optimizer.pt, scheduler.pt are {SHOWN}", ""),
    (RANDOM[:1], f"rng_state_0.pth is {SHOWN}", ""),
    (RANDOM, "rng_state.pth is missing: optimizer.pt shows that the Trainer saved its states here",
     "the Trainer silently continues with new random states;"),
    (["trainer_state.json", "optimizer.pt", "scheduler.pt"],
     f"trainer_state.json, optimizer.pt, scheduler.pt are {SHOWN}",
     "the Trainer cannot resume without trainer_state.json; without the other files, it silently "
     "continues with a new optimizer and learning rate; copy them again, or"),
])  # fmt: skip
def test_the_trainer_says_nothing_of_states_that_are_gone(
    tmp_path: Path, without: list[str], missing: str, advice: str
) -> None:
    report = check(make_of_trainer(tmp_path / "checkpoint-4", without))
    (finding,) = (one for one in report.findings if one.code == "incomplete-checkpoint")
    assert str(finding) == missing
    assert finding.advice.startswith(advice)


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer_0"])
def test_a_scheduler_that_is_gone_from_a_sharded_run_of_the_trainer(
    tmp_path: Path, optimizer: str
) -> None:
    root = make_of_trainer(tmp_path / "checkpoint-4")
    if optimizer == "optimizer_0":
        (root / "optimizer.pt").unlink()
        dcp_making.save(root / optimizer, {"optimizer": {"x": torch.ones(4)}})
    else:
        (root / "optimizer.pt").rename(root / optimizer)
        shutil.copy(root / "model.safetensors", root / "pytorch_model_fsdp.bin")
    assert incomplete(root) == []
    (root / "scheduler.pt").unlink()
    assert incomplete(root) == [f"scheduler.pt is {SHOWN}"]


@pytest.mark.parametrize(
    "kept", [["training_args.bin"], ["training_args.bin", "trainer_state.json"]]
)
def test_weights_that_the_trainer_exports_alone_are_complete(
    tmp_path: Path, kept: list[str]
) -> None:
    root = make_of_trainer(tmp_path / "export", [name for name in TRAINER if name not in kept])
    assert incomplete(root) == []


def test_arguments_of_a_trainer_next_to_a_save_state_prove_no_trainer(tmp_path: Path) -> None:
    """Scripts save their arguments under this name, too. Only Accelerate writes
    random_states_0.pkl.
    """
    root = make(tmp_path / "checkpoint", "custom-object")
    shutil.copy(root / "scheduler.bin", root / "training_args.bin")
    assert incomplete(root) == []


def test_a_node_of_the_trainer_has_only_its_own_ranks(tmp_path: Path) -> None:
    root = make_of_trainer(tmp_path / "checkpoint-4")
    for rank in range(2):
        (root / f"rng_state_{rank}.pth").rename(root / f"rng_state_{rank + 8}.pth")
    (gap,) = (one for one in check(root).findings if one.code == "incomplete-checkpoint")
    assert str(gap).startswith(
        "rng_state_0.pth, rng_state_1.pth, rng_state_2.pth and 5 more are missing"
    )
    assert "ignore this if each node saves to its own disk" in gap.advice
    for path in root.iterdir():
        if not path.name.startswith("rng_state"):
            path.unlink()
    assert incomplete(root) == []


def test_an_optimizer_next_to_a_model_that_is_the_dcp_folder_itself(tmp_path: Path) -> None:
    """It was told that there are no weights of a model."""
    dcp_making.save(tmp_path, {"model": {"a": torch.ones(3)}})
    dcp_making.save(tmp_path / "optimizer_0", {"x": torch.ones(4)})
    assert check(tmp_path).findings == ()


@pytest.mark.parametrize("name", ["accelerate-zero2", "accelerate-zero3"])
def test_a_partition_of_deepspeed_shows_a_rank_without_random_states(
    tmp_path: Path, name: str
) -> None:
    source = Path(__file__).parents[2] / "fixtures/deepspeed-0.18.2" / name / "checkpoint"
    root = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    assert incomplete(root) == []
    last = max(root.glob("random_states_*.pkl"))
    last.unlink()
    (words,) = incomplete(root)
    assert words.startswith(f"{last.name} is missing: pytorch_model/")
    assert words.endswith(" shows that at least 2 processes saved")

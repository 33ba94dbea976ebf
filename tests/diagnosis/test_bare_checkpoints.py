"""Numbered folders that a killed save left without files of a checkpoint, and the checkpoint to
resume from.
"""

import json
import os
import random
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix import check, latest_checkpoint
from ckptfix.checkpoint.latest import Candidate, incomplete
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.cli.runs import Runs
from ckptfix.diagnosis import completeness
from ckptfix.diagnosis.resumable import choose, examine
from ckptfix.errors import UsageError
from ckptfix.storage import stores
from ckptfix.storage.files import AnyPath
from ckptfix.storage.stores import TRAFFIC
from tests.commanding import Said, said
from tests.diagnosis.test_completeness import FIXTURES, make_of_trainer
from tests.sampling import sampled
from tests.stores.servers import QUICK, upload_folder

__all__ = ["said"]

CLEAN = FIXTURES / "clean-single-process" / "checkpoint"
DOUBLED = FIXTURES / "wrapper-safetensors" / "checkpoint"
NESTED = "diffusion_pytorch_model.safetensors"

Make = Callable[[Path], object]


def save(path: Path) -> Path:
    """Make a complete checkpoint: of the Trainer where the name is one of its own, else of
    save_state.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.name.startswith("checkpoint-"):
        return Path(shutil.copytree(CLEAN, path))
    make_of_trainer(path)
    step = int(path.name.rpartition("-")[2])
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def leave(path: Path, *files: str, age: float = 3600.0) -> Path:
    """Make what a killed save leaves: a folder with these files, whose last change is so many
    seconds ago.
    """
    path.mkdir(parents=True)
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{"a": 1}')
        if name.endswith(NESTED):
            shutil.copy(CLEAN / "model.safetensors", path / name)
    then = time.time() - age
    for one in (path, *path.rglob("*")):
        os.utime(one, (then, then))
    return path


def documents(said: Said, *arguments: object, status: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run with --format jsonl; return the checkpoints by their names, and the last line."""
    code, out, _ = said(*arguments, "--format", "jsonl")
    *ones, last = map(json.loads, out.splitlines())
    assert code == last["status"] == status
    return {Path(one["path"]).name: one for one in ones}, last


def found(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The code and the severity of each finding, but for notes about pickles of the Trainer."""
    pairs = [(one["code"], one["severity"]) for one in document["findings"]]
    return [pair for pair in pairs if pair[0] != "trainer-pickle"]


def checked(said: Said, path: Path | str) -> list[tuple[str, str]]:
    """The same of a checkpoint that is named alone."""
    (document,) = json.loads(said("check", path, "--json")[1])["checkpoints"]
    return found(document)


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("checkpoint-", ()),
        ("checkpoint-", ("config.json", "vocab.txt", "unet/config.json")),
        *((family, ("config.json",)) for family in ("checkpoint_", "step_", "epoch_")),
    ],
)
def test_the_newest_checkpoint_without_weights_is_an_interrupted_save(
    tmp_path: Path, family: str, files: tuple[str, ...], said: Said
) -> None:
    for number in (5, 10):
        save(tmp_path / "run" / f"{family}{number}")
    bare = leave(tmp_path / "run" / f"{family}15", *files)
    by_name, last = documents(said, "check", "-r", tmp_path / "run", status=1)
    assert last["summary"] == {"checkpoints": 3, "with warnings": 1, "clean": 2}
    assert found(by_name[bare.name]) == [("interrupted-save", "warning")]
    (one,) = by_name[bare.name]["findings"]
    assert (one["bare"], one["newest"]) == (True, f"{family}10")
    status, out, _ = said("check", bare)
    assert status == 1
    assert f"{bare}: 1 warning (no checkpoint files)\n" in out
    assert (
        "interrupted-save: this checkpoint has no weights: its save was interrupted before it"
        in out
    )
    assert f"resume from {family}10, the newest complete one" in out
    assert "0 files" not in out
    assert said("check", "-qr", tmp_path)[1] == f"{bare}\n"
    assert said("scrub", "-q", "--state", tmp_path / "state", tmp_path / "run")[:2] == (
        1,
        f"{bare}\n",
    )


def test_the_path_of_the_folder_may_be_relative(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoint-5")
    leave(tmp_path / "checkpoint-10")
    monkeypatch.chdir(tmp_path)
    for path in ("checkpoint-10", "./checkpoint-10/"):
        assert said("check", path)[0] == 1
    status, out, _ = said("check", "-r", ".")
    assert status == 1
    assert out.endswith("\nresume from checkpoint-5, the newest complete one\n")


@pytest.mark.parametrize("files", [(), ("config.json",)])
def test_nothing_of_it_can_be_salvaged(tmp_path: Path, files: tuple[str, ...], said: Said) -> None:
    """As ``salvage`` of any other checkpoint without an intact tensor: exit 3, and no wrong
    usage.
    """
    save(tmp_path / "checkpoint-5")
    old, new = (
        leave(tmp_path / "checkpoint-10", *files),
        leave(tmp_path / "checkpoint-15", *files, age=0.0),
    )
    status, _, error = said("salvage", old, tmp_path / "new")
    assert status == 3
    assert (
        "checkpoint-10: nothing to salvage: this checkpoint has no weights: its save was "
        "interrupted" in error
    )
    assert "resume from checkpoint-5" in error
    status, _, error = said("salvage", new, tmp_path / "new")
    assert status == 3
    assert "a save may be running" in error
    assert not (tmp_path / "new").exists()
    assert said("salvage", leave(tmp_path / "notes", *files), tmp_path / "new")[0] == 2


@pytest.mark.parametrize("age", [0.0, 1700.0, -1700.0])
def test_a_save_may_be_running(tmp_path: Path, age: float, said: Said) -> None:
    save(tmp_path / "checkpoint-5")
    bare = leave(tmp_path / "checkpoint-10", age=age)
    status, out, _ = said("check", bare)
    assert status == 3
    assert "could not finish: checkpoint-10 changed in the last 30 minutes" in out
    assert "a save may be running; next: check it again after" in out
    assert "no error found" not in out
    _, last = documents(said, "check", "-r", tmp_path, status=3)
    assert last["summary"] == {"checkpoints": 2, "not finished": 1, "clean": 1}
    assert last["resume"][0]["checkpoint"] == str(tmp_path / "checkpoint-5")
    state = ("--state", tmp_path / "state", "--max-age", "1d")
    assert documents(said, "scrub", tmp_path, *state, status=3)[0]["checkpoint-10"]["unfinished"]
    os.utime(bare, (1, 1))  # nothing was written there: the listing of its files is unchanged
    assert found(documents(said, "scrub", tmp_path, *state, status=1)[0]["checkpoint-10"]) == [
        ("interrupted-save", "warning")
    ]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize(("age", "status"), [(3600.0, 1), (0.0, 3)])
def test_a_repair_says_of_it_what_check_says(
    tmp_path: Path, age: float, status: int, options: tuple[str, ...], said: Said, url: str
) -> None:
    """It ended with 2, as for a folder that is no checkpoint, also while a save was running."""
    save(tmp_path / "checkpoint-5")
    bare = leave(tmp_path / "checkpoint-10", "config.json", age=age)
    upload_folder(tmp_path, url)
    assert said("check", bare)[0] == status
    for place in (bare, f"{url}/checkpoint-10"):
        before, told, _ = said("check", place)
        (problem,) = re.findall(r"(?:could not finish|interrupted-save): (.+)", told)
        after, out, err = said("repair", place, *options)
        assert (after, problem in out + err) == (before, True)
        assert ("nothing was changed: " in err) == (before == 3)
        assert "values of tensors" not in out


def test_a_clock_that_is_far_ahead_makes_no_save_that_runs_for_years(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5")
    assert check(leave(tmp_path / "checkpoint-10", age=-1e6)).status == 1


def test_one_that_is_older_than_a_complete_one_is_a_note(tmp_path: Path, said: Said) -> None:
    bare = leave(tmp_path / "checkpoint-5", age=0)
    newer = leave(tmp_path / "checkpoint-20")
    save(tmp_path / "checkpoint-10")
    assert checked(said, bare) == [("interrupted-save", "note")]
    assert said("check", bare)[0] == 0
    by_name, last = documents(said, "check", "-r", tmp_path, status=1)
    counts = {"checkpoints": 3, "with warnings": 1, "without weights": 1, "clean": 1}
    assert last["summary"] == counts
    assert found(by_name["checkpoint-20"]) == [("interrupted-save", "warning")]
    shutil.rmtree(newer)
    _, out, _ = said("check", "-r", tmp_path)
    assert "\n2 checkpoints: 1 without weights, 1 clean\n" in out


def test_scrub_judges_it_again_when_a_newer_one_is_complete(tmp_path: Path, said: Said) -> None:
    save(tmp_path / "run" / "checkpoint-5")
    leave(tmp_path / "run" / "checkpoint-10")
    options = ("scrub", tmp_path / "run", "--state", tmp_path / "state", "--max-age", "1d")
    assert documents(said, *options, status=1)[1]["summary"]["with warnings"] == 1
    save(tmp_path / "run" / "checkpoint-15")
    by_name, last = documents(said, *options, status=0)
    assert found(by_name["checkpoint-10"]) == [("interrupted-save", "note")]
    assert last["summary"]["without weights"] == 1


def test_a_first_save_that_was_killed_is_named(tmp_path: Path, said: Said) -> None:
    save(tmp_path / "a" / "checkpoint-5")
    bare = leave(tmp_path / "b" / "checkpoint-5", "config.json")
    by_path, last = documents(said, "check", "-r", tmp_path, status=1)
    assert last["summary"] == {"checkpoints": 2, "with warnings": 1, "clean": 1}
    assert len(by_path) == 1  # two of one name
    assert last["resume"][1] == {
        "run": str(tmp_path / "b"), "checkpoint": None,
        "problem": "checkpoint-5: no model weights", "passed_over": ["checkpoint-5"],
    }  # fmt: skip
    assert said("check", bare)[0] == 1


@pytest.mark.parametrize("family", ["step_", "epoch_"])
def test_folders_of_pictures_and_of_finished_models_are_none(
    tmp_path: Path, family: str, said: Said
) -> None:
    """Scripts write samples, and pipelines that they export, into folders of these names."""
    save(tmp_path / f"{family}5")
    pictures = leave(tmp_path / f"{family}6", "sample.png")
    for number in (1, 2):
        export = tmp_path / "exports" / f"{family}{number}"
        leave(export, "model_index.json", f"unet/{NESTED}", "unet/config.json")
    by_name, last = documents(said, "check", "-r", tmp_path, status=0)
    assert sorted(by_name) == [f"{family}5", "unet"]
    assert last["summary"] == {"checkpoints": 3, "clean": 3}
    with pytest.raises(UsageError, match=r"has no checkpoint files: only 'sample\.png'"):
        check(pictures)
    leave(tmp_path / "logs" / f"{family}7")
    assert "logs" not in said("check", "-r", tmp_path)[1]


def test_damaged_checkpoints_next_to_bare_ones_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bare one asked about all damaged ones: 10 of either were checked 100 times."""
    for number in range(1, 5):
        os.truncate(save(tmp_path / f"checkpoint_{number}") / "model.safetensors", 100)
        leave(tmp_path / f"checkpoint_{number + 4}")
    looks: Counter[str] = Counter()

    def counting(checkpoint: Path, *, reads_files: bool = True, **options: Any) -> str | None:
        looks[checkpoint.name] += reads_files
        return incomplete(checkpoint, reads_files=reads_files, **options)

    monkeypatch.setattr("ckptfix.diagnosis.check.incomplete", counting)
    siblings = Siblings()
    for number in range(1, 9):
        assert check(tmp_path / f"checkpoint_{number}", siblings=siblings).status == 1
    assert looks.keys() == {f"checkpoint_{number}" for number in range(1, 9)}
    assert max(looks.values()) == 1


def test_pictures_make_no_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5")
    assert check(leave(tmp_path / "checkpoint-10", "sample.png")).status == 1


def test_weights_in_a_sub_folder_alone_are_no_complete_save(tmp_path: Path, said: Said) -> None:
    """A hook of diffusers saves unet/ before save_state writes the rest."""
    for number in (5, 10):
        leave(save(tmp_path / f"checkpoint_{number}") / "unet", NESTED, "config.json")
    cut = leave(tmp_path / "checkpoint_15", f"unet/{NESTED}")
    by_name, last = documents(said, "check", "-r", tmp_path, status=1)
    assert found(by_name["checkpoint_15"]) == [("interrupted-save", "warning")]
    assert last["summary"]["with warnings"] == 1
    assert (
        "this checkpoint has only 'unet': its save was interrupted before the rest"
        in said("check", cut)[1]
    )


def test_a_run_in_a_folder_with_a_number_is_no_checkpoint(tmp_path: Path, said: Said) -> None:
    save(tmp_path / "step_1")
    save(tmp_path / "step_2" / "checkpoint-5")
    by_name, _ = documents(said, "check", "-r", tmp_path, status=0)
    assert sorted(by_name) == ["checkpoint-5", "step_1"]


def test_a_marker_of_a_folder_in_a_store_is_an_empty_checkpoint(
    tmp_path: Path, url: str, said: Said
) -> None:
    """Consoles of stores, and mounts, make an empty object with a slash at its end for a folder."""
    save(tmp_path / "run" / "checkpoint-5")
    store = upload_folder(tmp_path / "run", url)
    store.put("marker", b"")
    store._files.store[f"{store._base}/checkpoint-10/"] = store._files.store.pop(
        f"{store._base}/marker"
    )
    by_name, last = documents(said, "check", "-r", url, status=1)
    assert found(by_name["checkpoint-10"]) == [("interrupted-save", "warning")]
    assert last["resume"][0]["checkpoint"] == f"{url}/checkpoint-5"


def test_random_states_of_other_ranks_alone(tmp_path: Path, said: Said) -> None:
    """Rank 1 writes its own while rank 0 still writes the weights; or its node has a disk of its
    own.
    """
    words = "weights: the folder has only per-rank states, as on a node that saves to its own disk"
    for number in (5, 10, 15):
        root = make_of_trainer(tmp_path / f"checkpoint-{number}")
        for path in root.iterdir():
            if path.name != "rng_state_1.pth":
                path.unlink()
    for report in [check(path, siblings=tmp_path.iterdir()) for path in tmp_path.iterdir()]:
        assert (report.status, words in report.not_checked) == (0, True)
    by_name, last = documents(said, "check", "-r", tmp_path, status=0)
    assert last["summary"] == {"checkpoints": 3, "not resumable": 3}
    assert {one["not_resumable"] for one in by_name.values()} == {"no model weights"}
    shutil.rmtree(tmp_path / "checkpoint-5")
    save(tmp_path / "checkpoint-5")
    by_name, _ = documents(said, "check", "-r", tmp_path, status=1)
    assert found(by_name["checkpoint-15"]) == [("incomplete-checkpoint", "warning")]
    assert words not in by_name["checkpoint-15"]["not_checked"]
    assert checked(said, tmp_path / "checkpoint-15") == [("incomplete-checkpoint", "warning")]


def test_nobody_seals_it(tmp_path: Path, said: Said) -> None:
    old = leave(tmp_path / "checkpoint-5", "config.json")
    save(tmp_path / "checkpoint-10")
    new, young = leave(tmp_path / "checkpoint-15"), leave(tmp_path / "checkpoint-20", age=0)
    for path in (old, new, young):
        assert said("seal", path)[0] in (1, 3)
        assert not (path / ".ckptfix").exists()
        assert said("verify", path)[0] in (1, 3)


# The checkpoint to resume from.


def answers(out: str) -> list[str]:
    return [line for line in out.splitlines() if "resume from" in line and not line.startswith(" ")]


def test_a_check_of_a_run_ends_with_the_checkpoint_to_resume_from(
    tmp_path: Path, said: Said
) -> None:
    for number in (5, 10, 9):
        save(tmp_path / "run" / f"checkpoint-{number}")
    answer = f"resume from {tmp_path}/run/checkpoint-10, the newest complete one"
    status, out, err = said("check", "-r", tmp_path / "run")
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == ["3 checkpoints: 3 clean", answer]
    for quiet in ("-q", "-0"):
        assert said("check", "-r", quiet, tmp_path / "run") == (0, "", "")
    for form in ("github", "sarif"):
        assert answer not in said("check", "-r", "--format", form, tmp_path / "run")[1]
    assert not answers(said("check", tmp_path / "run" / "checkpoint-10")[1])
    # Nobody asked about the others.
    assert not answers(said("check", "-r", *(tmp_path / "run").iterdir())[1])
    document = json.loads(said("check", "-r", tmp_path / "run", "--json")[1])
    assert document["resume"] == [
        {
            "run": str(tmp_path / "run"), "checkpoint": str(tmp_path / "run" / "checkpoint-10"),
            "problem": "", "passed_over": [],
        }
    ]  # fmt: skip
    assert "resume" not in json.loads(said("check", tmp_path / "run" / "checkpoint-5", "--json")[1])


def test_each_run_has_an_answer_and_a_damaged_one_says_so(tmp_path: Path, said: Said) -> None:
    save(tmp_path / "a" / "checkpoints" / "checkpoint_0")
    shutil.copytree(DOUBLED, tmp_path / "b" / "checkpoint_3")
    (save(tmp_path / "c" / "checkpoint-7") / "trainer_state.json").unlink()
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 1
    assert answers(out) == [
        f"resume from {tmp_path}/a/checkpoints/checkpoint_0, the newest complete one",
        (
            f"resume from {tmp_path}/b/checkpoint_3, the newest candidate, but check found "
            "problems in checkpoint_3"
        ),
        (
            f"{tmp_path}/c: no checkpoint to resume from: checkpoint-7: neither "
            "random_states_0.pkl, which save_state writes near the end, nor the Trainer's "
            "trainer_state.json"
        ),
    ]


def test_a_damaged_newest_checkpoint_is_not_the_one_to_resume_from(
    tmp_path: Path, said: Said
) -> None:
    """Complete by its headers, and load_state fails for all but a custom optimizer."""
    for number in (1, 2, 3):
        shutil.copytree(CLEAN, tmp_path / f"checkpoint_{number}")
    newest = tmp_path / "checkpoint_3"
    torch.save({"moments": torch.ones(1)}, newest / "optimizer.bin")
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 1
    assert answers(out) == [
        f"resume from {newest}, the newest candidate, but check found problems in checkpoint_3; "
        f"the newest one without problems: {tmp_path}/checkpoint_2"
    ]
    (resume,) = json.loads(said("check", "-r", tmp_path, "--json")[1])["resume"]
    assert resume["checkpoint"] == str(newest) == str(latest_checkpoint(tmp_path))
    assert resume["problem"] == "check found problems in checkpoint_3"
    assert resume["clean"] == str(tmp_path / "checkpoint_2")


def test_a_checkpoint_that_was_copied_into_itself_is_one_run(tmp_path: Path, said: Said) -> None:
    """``cp -r checkpoint_2 elsewhere/checkpoint_2``, where the destination exists."""
    for number in (1, 2):
        shutil.copytree(CLEAN, tmp_path / f"checkpoint_{number}")
    shutil.copytree(CLEAN, tmp_path / "checkpoint_2" / "checkpoint_2")
    _, out, _ = said("check", "-r", tmp_path)
    assert answers(out) == [f"resume from {tmp_path}/checkpoint_2, the newest complete one"]
    # A checkpoint of another name may be of a run that was started inside.
    (tmp_path / "checkpoint_2" / "checkpoint_2").rename(tmp_path / "checkpoint_2" / "checkpoint_7")
    assert len(answers(said("check", "-r", tmp_path)[1])) == 2


@pytest.mark.parametrize("damage", ["cut", "exchanged"])
def test_a_checkpoint_that_load_state_refuses_is_passed_over(
    damage: str, tmp_path: Path, url: str, said: Said
) -> None:
    """The optimizer lost its last bytes in a copy, or was exchanged with the random states."""
    for number in (1, 2, 3):
        shutil.copytree(CLEAN, tmp_path / f"checkpoint_{number}")
    optimizer, states = (
        tmp_path / "checkpoint_3" / name for name in ("optimizer.bin", "random_states_0.pkl")
    )
    if damage == "cut":
        os.truncate(optimizer, optimizer.stat().st_size - 10)
    else:
        contents = optimizer.read_bytes(), states.read_bytes()
        states.write_bytes(contents[0])
        optimizer.write_bytes(contents[1])
    upload_folder(tmp_path, url)
    for place in (str(tmp_path), url):
        status, out, _ = said("check", "-r", place)
        assert status == 1
        assert answers(out) == [f"resume from {place}/checkpoint_2, the newest complete one"]
        (resume,) = json.loads(said("check", "-r", place, "--json")[1])["resume"]
        assert resume["passed_over"] == ["checkpoint_3"]
        with pytest.warns(
            UserWarning, match=r"chose checkpoint_2 and passed over checkpoint_3: optimizer\.bin"
        ):
            assert str(latest_checkpoint(place)) == resume["checkpoint"]


def test_a_link_that_is_newest_is_not_called_checked(tmp_path: Path, said: Said) -> None:
    save(tmp_path / "run" / "checkpoint-5")
    (tmp_path / "run" / "checkpoint-6").symlink_to(save(tmp_path / "checkpoint-6"))
    assert answers(said("check", "-r", tmp_path / "run")[1]) == [
        f"resume from {tmp_path}/run/checkpoint-6, the newest complete one, but checkpoint-6 is "
        "a symbolic link, which check -r does not follow"
    ]


def test_numbers_of_two_families_without_times_are_not_compared(tmp_path: Path, said: Said) -> None:
    for name in ("checkpoint_3", "step_4"):
        os.utime(save(tmp_path / name) / "random_states_0.pkl", (5, 5))
    assert answers(said("check", "-r", tmp_path)[1]) == [
        f"{tmp_path}: no checkpoint to resume from: checkpoint_3 and step_4 are complete, but "
        "their times do not show which is newer"
    ]


KINDS: dict[str, Make] = {
    "complete": save,
    "empty": leave,
    "config": lambda path: leave(path, "config.json"),
    "nested": lambda path: leave(path, f"unet/{NESTED}"),
    "cut": lambda path: os.truncate(save(path) / "model.safetensors", 300),
    "unfinished": lambda path: (save(path) / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("seed", sampled(range(80)))
def test_the_answer_is_that_of_latest_checkpoint(tmp_path: Path, seed: int, said: Said) -> None:
    chance = random.Random(seed)
    families = chance.sample(
        ["checkpoint-", "checkpoint_", "step_", "epoch_"], chance.choice([1, 1, 2])
    )
    for number in range(chance.randrange(1, 6)):
        kind = chance.choice([*KINDS, "complete"])
        KINDS[kind](tmp_path / "run" / f"{chance.choice(families)}{number}")
    choice = choose(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            newest = str(ckptfix.latest_checkpoint(tmp_path / "run"))
        except UsageError:
            newest = None
    assert choice is not None
    assert (None if choice.best is None else str(choice.best.path)) == newest
    _, out, _ = said("check", "-r", tmp_path / "run", "--json")
    answered = [one["checkpoint"] for one in json.loads(out).get("resume", ())]
    assert answered == [newest] or (newest is None and not answered)


def test_only_the_newest_are_looked_into(tmp_path: Path) -> None:
    for number in range(1, 9):
        save(tmp_path / f"checkpoint-{number}")
    leave(tmp_path / "checkpoint-9")
    looked: list[str] = []

    def looking(path: AnyPath, number: int) -> Candidate:
        looked.append(path.name)
        return examine(path, number)

    assert choose(tmp_path, look=looking) is not None
    assert looked == ["checkpoint-9", "checkpoint-8"]


def test_a_run_of_many_keeps_the_names_of_those_that_are_not_clean_alone(tmp_path: Path) -> None:
    runs = Runs([tmp_path])
    for number in range(1000):
        path = tmp_path / f"checkpoint-{number}"
        runs.begin(path)
        runs.end(path, path, int(number == 7))
    assert runs._unclean == {tmp_path: {"checkpoint-7"}}
    assert not runs._known
    assert not runs._newest


# In stores.


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new prefix in the memory of this process."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return f"memory://{os.urandom(6).hex()}/run"


def test_configs_alone_in_a_store(
    tmp_path: Path, url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (5, 10):
        save(tmp_path / "run" / f"checkpoint-{number}")
    for number in (1, 15):
        leave(tmp_path / "run" / f"checkpoint-{number}", "config.json")
    upload_folder(tmp_path / "run", url)
    _, last = documents(said, "check", "-r", url, status=3)
    counts = {"checkpoints": 4, "not finished": 1, "without weights": 1, "clean": 2}
    assert last["summary"] == counts
    monkeypatch.setattr(completeness, "SAVE_TIME", 0)
    for verb in (["check", "-r"], ["scrub", "--state", tmp_path / "state"]):
        by_name, last = documents(said, *verb, url, status=1)
        assert found(by_name["checkpoint-15"]) == [("interrupted-save", "warning")]
        assert found(by_name["checkpoint-1"]) == [("interrupted-save", "note")]
        assert by_name["checkpoint-15"]["findings"][0]["newest"] == "checkpoint-10"
        assert last["summary"]["with warnings"] == 1
        assert last["summary"]["without weights"] == 1
    assert checked(said, f"{url}/checkpoint-15") == [("interrupted-save", "warning")]
    assert answers(said("check", "-r", url)[1]) == [
        f"resume from {url}/checkpoint-10, the newest complete one"
    ]
    with pytest.warns(UserWarning, match="passed over checkpoint-15: no model weights"):
        assert ckptfix.latest_checkpoint(url) == f"{url}/checkpoint-10"


def test_the_answer_costs_no_request(
    tmp_path: Path, url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (5, 10):
        save(tmp_path / "run" / f"checkpoint-{number}")
    upload_folder(tmp_path / "run", url)
    monkeypatch.setattr("ckptfix.cli.check.threads_for", lambda paths: 1)
    requests = []
    for choosing in (True, False):
        with monkeypatch.context() as patch:
            if not choosing:
                patch.setattr(Runs, "begin", lambda self, path: None)
            before = TRAFFIC.requests
            _, out, _ = said("check", "-r", url)
            requests.append(TRAFFIC.requests - before)
            assert bool(answers(out)) == choosing
    assert requests[0] == requests[1]


# A verb of one checkpoint that is given a run.


@pytest.mark.parametrize("verb", ["seal", "verify", "repair", "salvage"])
def test_the_command_for_each_checkpoint_of_a_run_is_named(
    tmp_path: Path, verb: str, said: Said, url: str
) -> None:
    for number in (5, 10):
        save(tmp_path / "run" / f"checkpoint-{number}")
    leave(tmp_path / "run" / "checkpoint-15")
    upload_folder(tmp_path / "run", url)
    more, after = ([tmp_path / "new"], " NEW_FOLDER") if verb == "salvage" else ([], "")
    for place in (tmp_path / "run", url):
        status, _, err = said(verb, place, *more)
        assert status == 2
        assert err.rstrip().endswith(
            f"name the one that is a checkpoint; next: ckptfix {verb} {place}/checkpoint-5{after}; "
            f"ckptfix {verb} {place}/checkpoint-10{after}"
        )
        assert not (tmp_path / "new").exists()
    for number in (20, 25, 30):
        save(tmp_path / "run" / f"checkpoint-{number}")
    words = f"/checkpoint-20{after}; and the same for 2 more checkpoints"
    assert said(verb, tmp_path / "run", *more)[2].rstrip().endswith(words)


def test_undo_of_a_run_names_the_checkpoints_with_a_repair(tmp_path: Path, said: Said) -> None:
    run_folder = tmp_path / "run"
    for number in (1, 2, 3):
        shutil.copytree(DOUBLED, run_folder / f"checkpoint_{number}")
    none = f"ckptfix: {run_folder}: there is no repair to undo\n"
    assert said("undo", run_folder) == (2, "", none)
    for number in (1, 3):
        assert said("repair", run_folder / f"checkpoint_{number}")[0] == 0
    status, _, err = said("undo", run_folder)
    assert status == 2
    assert err == (
        f"ckptfix: {run_folder}: there is no repair to undo in this folder, only in folders below "
        f"it; next: ckptfix undo {run_folder}/checkpoint_1; ckptfix undo {run_folder}/checkpoint_3\n"
    )
    for number in (1, 3):
        assert said("undo", run_folder / f"checkpoint_{number}")[0] == 0
    assert said("undo", run_folder)[2] == none


def test_what_one_checkpoint_alone_holds_is_said_of_it(tmp_path: Path, said: Said) -> None:
    (save(tmp_path / "checkpoint-5") / "log.txt").write_text("step 5")
    (save(tmp_path / "checkpoint-10") / "trainer_state.json").unlink()
    out = said("check", "-rv", tmp_path)[1]
    assert "incomplete-checkpoint: trainer_state.json is missing" in out
    assert f"not checked: other files in {tmp_path}/checkpoint-5: 'log.txt'\n" in out
    assert "trainer_state.json'" not in out
    (save(tmp_path / "checkpoint-15") / "log.txt").write_text("step 15")
    assert (
        "not checked: other files in 2 checkpoints: 'log.txt'\n"
        in said("check", "-rv", tmp_path)[1]
    )

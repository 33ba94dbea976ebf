"""Saves of a transformers Trainer, in one process: what they leave, replace, remove and push."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check, verify
from ckptfix.checkpoint.folder_names import TRAINER
from ckptfix.checkpoint.latest import candidates
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.errors import OperationError
from ckptfix.storage.files import on_disk
from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate
from tests.training.fake_hub import Commit, fake_hub
from tests.training.trainer_kills import build, transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("guarded"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def problems(folder: Path) -> list[str | None]:
    return [one.problem for one in candidates(folder, TRAINER)]


def stock(output: Path, callbacks: list[Any], **arguments: Any) -> Any:
    """Train without the guard."""
    unpatch_accelerate()
    trainer = build(output, callbacks, **arguments)
    trainer.train()
    patch_accelerate()
    return trainer


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return state


def test_a_save_has_all_files_of_a_stock_save_and_a_manifest(tmp_path: Path) -> None:
    stock(tmp_path / "stock", [])
    build(tmp_path / "guarded", []).train()
    for name in ("guarded", "stock"):
        assert names(tmp_path / name) == ["checkpoint-6", "checkpoint-8"]
    theirs, made = tmp_path / "stock/checkpoint-8", tmp_path / "guarded/checkpoint-8"
    assert names(made) == sorted([".ckptfix", "run_state_0.pt", *names(theirs)])
    manifest = read_manifest(made)
    assert manifest is not None
    assert sorted(manifest.files) == sorted(["run_state_0.pt", *names(theirs)])
    assert manifest.versions["transformers"] == transformers.__version__
    assert manifest.world_size == 1
    assert [one.file for one in manifest.optimizers] == ["optimizer.pt"]
    assert check(made).status == check(theirs).status
    first, second = state_of(theirs), state_of(made)
    for state in (first, second):  # times and speeds differ
        state["log_history"] = [entry.get("loss") for entry in state["log_history"]]
    assert first == second


class Adds(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds a file to each checkpoint, as callbacks do that export adapters."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = Path(arguments.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append(names(checkpoint))
        (checkpoint / "notes").mkdir(exist_ok=True)
        (checkpoint / "notes/mine.txt").write_text(str(state.global_step))


def test_callbacks_see_the_final_folder_and_may_add_files(tmp_path: Path) -> None:
    adds = Adds()
    build(tmp_path, [adds]).train()
    assert all("trainer_state.json" in seen and ".ckptfix" in seen for seen in adds.seen)
    assert len(adds.seen) == 4
    for one in candidates(tmp_path, TRAINER):
        assert one.problem is None
        assert check(one.path).status == 0
        assert "differ" not in str(verify(one.path))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_same_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        exchange = "ckptfix.training.saving.staged_saves.exchange"
        monkeypatch.setattr(exchange, lambda one, other: False)
    trainer = build(tmp_path, [Adds()])
    trainer.train()
    made = tmp_path / "checkpoint-8"
    strays = ("rng_state_3.pth", "model-00001-of-00002.safetensors")
    for name in (*strays, "config.json"):
        (made / name).write_text("old")
    trainer._save_checkpoint(trainer.model, None)
    assert (made / "notes/mine.txt").read_text() == "8"
    assert not any((made / name).exists() for name in strays)
    assert (made / "config.json").read_text() != "old"
    assert problems(tmp_path)[0] is None
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


def test_a_stock_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    stock(tmp_path, [Adds()])
    (tmp_path / "checkpoint-8/trainer_state.json").unlink()
    build(tmp_path, []).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert problems(tmp_path)[0] is None
    assert (tmp_path / "checkpoint-8/notes/mine.txt").read_text() == "8"


@pytest.mark.parametrize("point", ["_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    trainer = build(tmp_path, [])
    trainer.train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trainer.state.best_model_checkpoint = "best"

    def fails(folder: str) -> None:
        (Path(folder) / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, point, fails)
    for step in (8, 10):
        trainer.state.global_step = step
        with pytest.raises(OSError, match="No space left"):
            trainer._save_checkpoint(trainer.model, None)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert trainer.state.best_model_checkpoint == "best"
    assert "_get_output_dir" not in vars(trainer)
    assert trainer._get_output_dir(None) == str(tmp_path)


def scoring(scores: list[float], limit: int) -> dict[str, Any]:
    """Return the arguments of a run whose evaluations have these scores."""
    left = list(scores)

    class Scores(transformers.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, a: Any, s: Any, c: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_score"] = left.pop(0)

    return {
        "callbacks": [Scores()], "metric_for_best_model": "score", "greater_is_better": True,
        "load_best_model_at_end": True, "eval_steps": 2, "eval_strategy": "steps",
        "save_total_limit": limit,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "limit", "left", "best"),
    [
        ([1.0, 4.0, 2.0, 3.0], 2, [4, 8], 4),
        ([1.0, 2.0, 3.0, 4.0], 2, [6, 8], 8),
        # The Trainer itself removes the last one at the end, as it does in stock.
        ([4.0, 1.0, 2.0, 3.0], 1, [2], 2),
    ],
)
def test_the_best_model_is_found_at_its_final_path_and_kept(
    tmp_path: Path, scores: list[float], limit: int, left: list[int], best: int
) -> None:
    theirs, ours = tmp_path / "stock", tmp_path / "guarded"
    stock(theirs, **scoring(scores, limit))
    trainer = build(ours, **scoring(scores, limit))
    trainer.train()
    expected = [f"checkpoint-{step}" for step in left]
    assert names(ours) == expected == names(theirs)
    assert trainer.state.best_model_checkpoint == str(ours / f"checkpoint-{best}")
    for name in expected:
        said, of_stock = (state_of(root / name)["best_model_checkpoint"] for root in (ours, theirs))
        assert said == of_stock.replace(str(theirs), str(ours))


def test_old_checkpoints_go_by_step_and_incomplete_ones_neither_count_nor_go(
    tmp_path: Path,
) -> None:
    build(tmp_path, [], save_total_limit=None).train()
    (tmp_path / "checkpoint-4/trainer_state.json").unlink()
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100/trainer_state.json").write_text('{"global_step": 100}')
    shutil.rmtree(tmp_path / "checkpoint-100/.ckptfix")
    trainer = build(tmp_path, [], max_steps=10)
    with pytest.warns(UserWarning, match="checkpoint-100 from another run") as seen:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert len([one for one in seen if "from another run" in str(one.message)]) == 1
    expected = {"checkpoint-4", "checkpoint-8", "checkpoint-10", "checkpoint-100"}
    assert set(names(tmp_path)) == expected, (
        "4 is incomplete, 100 of another run, and two complete ones are left"
    )


def test_a_push_begins_when_the_checkpoint_is_in_its_place(tmp_path: Path) -> None:
    trainer = build(tmp_path, [])
    trainer.args.push_to_hub = True
    pushed, staged = [], []
    save = trainer._save_rng_state

    def push(folder: str) -> None:
        pushed.append((folder, names(Path(folder))))

    def look_and_save(folder: str) -> None:
        staged.append(Path(folder).relative_to(tmp_path))
        save(folder)

    trainer._push_from_checkpoint, trainer._save_rng_state = push, look_and_save
    trainer.state.global_step = 3
    trainer.create_optimizer_and_scheduler(8)
    trainer._save_checkpoint(trainer.model, None)
    ((folder, files),) = pushed
    assert folder == str(tmp_path / "checkpoint-3")
    assert {".ckptfix", "trainer_state.json", "model.safetensors"} <= set(files)
    assert staged[0].parts[:2] == (
        ".cache",
        "huggingface",
    ), "what is half written is never part of an upload"
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS  # type: ignore[attr-defined]

    assert ".cache/huggingface/*" in DEFAULT_IGNORE_PATTERNS


def pushed(folder: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> list[Commit]:
    """Train with pushes to a hub, and return its commits of checkpoints."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub() as (url, commits):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: HfApi(endpoint=url))
        trainer = build(
            folder, [], push_to_hub=True, hub_model_id="me/run", hub_token="hf_none",
            hub_strategy=strategy, hub_always_push=True, save_total_limit=None,
        )  # fmt: skip
        trainer.train()
        return sorted(commits, key=lambda commit: sorted(commit))


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_the_hub_gets_the_files_of_a_stock_run(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(transformers.trainer, "hf_api"):
        pytest.skip("this version of transformers takes the hub's address when it is imported")
    unpatch_accelerate()
    stock = pushed(tmp_path / "stock", strategy, monkeypatch)
    patch_accelerate()
    guarded = pushed(tmp_path / "guarded", strategy, monkeypatch)
    paths = [[path for path in commit if not _of_ckptfix(path)] for commit in guarded]
    assert sorted(map(sorted, paths)) == sorted(map(sorted, stock))
    roots = {path.split("/")[0] for commit in guarded for path in commit if "/" in path}
    steps = {f"checkpoint-{step}" for step in (2, 4, 6, 8)}
    assert roots == ({"last-checkpoint"} if strategy == "checkpoint" else steps)
    for commit in guarded:
        root = next((path.split("/")[0] for path in commit if "/" in path), None)
        if root is not None:  # the complete checkpoint, with the manifest that verifies it
            state = json.loads(commit[f"{root}/trainer_state.json"])
            assert state["global_step"] in (2, 4, 6, 8)
            made = tmp_path / "guarded" / f"checkpoint-{state['global_step']}"
            files = {
                str(path.relative_to(made)): path for path in made.rglob("*") if path.is_file()
            }
            assert {path.removeprefix(f"{root}/") for path in commit} == files.keys()
            for name, path in files.items():
                assert commit[f"{root}/{name}"] == path.read_bytes(), name


def _of_ckptfix(path: str) -> bool:
    return "/.ckptfix/" in path or "/run_state_" in path


def test_only_the_model(tmp_path: Path) -> None:
    build(tmp_path, [], save_only_model=True).train()
    assert problems(tmp_path) == [None, None]
    there = names(tmp_path / "checkpoint-8")
    assert not [name for name in there if name.startswith(("optimizer", "r"))]


def test_a_subclass_rotates_by_its_own_rules(tmp_path: Path) -> None:
    trainer = build(tmp_path, [])
    told = []

    class Keeps(type(trainer)):  # type: ignore[misc]
        def _rotate_checkpoints(
            self, use_mtime: bool = False, output_dir: str | None = None
        ) -> None:
            told.append(output_dir)

    trainer.__class__ = Keeps
    trainer.train()
    if not hasattr(transformers.Trainer, "_rotate_checkpoints"):
        assert told == [str(tmp_path)] * 4
    assert len(names(tmp_path)) == 4


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = build(tmp_path / "none", [])
    model = peft.get_peft_model(
        trainer.model, peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    )
    trainer = transformers.Trainer(
        model=model, args=trainer.args, train_dataset=trainer.train_dataset
    )
    trainer.args.output_dir = str(tmp_path / "out")
    trainer.train()
    assert problems(tmp_path / "out") == [None, None]
    found = candidates(tmp_path / "out", TRAINER)
    assert "adapter_model.safetensors" in names(on_disk(found[0].path))
    after = {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}
    trainer.train(resume_from_checkpoint=str(found[1].path))
    assert all(value.equal(model.state_dict()[name]) for name, value in after.items())


def test_processes_that_save_different_steps_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ckptfix.training.saving.joint_saves import JointSave
    from ckptfix.training.trainer import trainer_saves

    trainer = build(tmp_path, [])
    monkeypatch.setattr(JointSave, "meet", lambda *_: ["checkpoint-4", "checkpoint-6"])
    monkeypatch.setattr(trainer_saves, "_is_left_to_transformers", lambda trainer: False)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(OperationError, match="rank 0: checkpoint-4, rank 1: checkpoint-6"):
        trainer._save_checkpoint(trainer.model, None)

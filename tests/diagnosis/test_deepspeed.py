"""check, repair, verify and salvage of folders in which DeepSpeed saved, by itself or for
accelerate.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import Keys, Policy, check, repair, salvage, seal
from ckptfix.checkpoint.deepspeed_files import MissingRankError
from ckptfix.conversion.migrate import migrate
from ckptfix.diagnosis.target import find_checkpoints
from ckptfix.errors import OperationError
from ckptfix.verification.verify import verify
from fixtures.make_deepspeed import SCENARIOS
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed, variables
from tests.diagnosis.builders import NOWHERE
from tests.repairs.builders import RANDOM_STATES, snapshot
from tests.tensors.test_zero_states import make_universal, moments_of
from tests.tensors.zero_making import make_zero

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspeed-0.18.2"
SAVED = ["accelerate-zero2", "accelerate-zero3"]
NO_OPTIMIZER = "no optimizer states found; the model states do not say whether the run saved any"
SECOND_RANK = "pytorch_model/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a whole folder of save_state, with the script that DeepSpeed leaves in
    it.
    """
    root = Path(shutil.copytree(FIXTURES / request.param / "checkpoint", tmp_path / "saved"))
    (root / "zero_to_fp32.py").touch()
    return root


JOBS = """
import contextlib, io, json, sys
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from fixtures.digests import tensor_digests
for line in sys.stdin:
    edit, *paths = json.loads(line)
    answers = []
    for path in paths:
        if edit:
            states = torch.load(path, weights_only=False)
            exec(edit)
            torch.save(states, path)
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answers.append(tensor_digests(get_fp32_state_dict_from_zero_checkpoint(path)))
        except Exception as error:
            answers.append(repr(error))
    print("done", json.dumps(answers), flush=True)
"""
"""Edits files of states, in which objects of DeepSpeed are, or loads checkpoints as the script does
that DeepSpeed leaves next to them.
"""


class DeepSpeed:
    """One process that imports DeepSpeed, for all tests: an import takes seconds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOBS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=FIXTURES.parents[1], env=variables(),
        )  # fmt: skip

    def _run(self, edit: str, paths: Iterable[Path]) -> list[Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([edit, *map(str, paths)]) + "\n")
        self.process.stdin.flush()
        answer = next(line for line in self.process.stdout if line.startswith("done "))
        loaded: list[Any] = json.loads(answer.removeprefix("done "))
        return loaded

    def loads(self, *roots: Path) -> list[Any]:
        """Return the digests of the weights that DeepSpeed finds in each folder, or its error."""
        return self._run("", roots)

    def edit(self, root: Path, files: str, edit: str) -> None:
        """Change the states in some files of a checkpoint."""
        self._run(edit, root.glob(f"*/{files}"))


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[DeepSpeed]:
    if not has_deepspeed():
        pytest.skip(NO_DEEPSPEED)
    library = DeepSpeed()
    with library.process:
        yield library
        library.process.kill()


def codes(path: Path, *, data: bool = False) -> list[tuple[str, str]]:
    return [(one.code, str(one.path)) for one in check(path, data=data).findings]


def flip(path: Path) -> str:
    """Flip a bit in the largest record of a file, and return the record's name."""
    with zipfile.ZipFile(path) as archive:
        tail = max(
            (one for one in archive.infolist() if "/data/" in one.filename),
            key=lambda one: one.file_size,
        )
    data = bytearray(path.read_bytes())
    name, extra = (int.from_bytes(data[tail.header_offset + at :][:2], "little") for at in (26, 28))
    data[tail.header_offset + 30 + name + extra + 9] ^= 4
    path.write_bytes(data)
    return tail.filename


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_healthy_folder_has_no_finding(name: str) -> None:
    root = FIXTURES / name / "checkpoint"
    for path in (root, root / "pytorch_model"):
        assert codes(path, data=True) == []
    report = check(root)
    (state,) = report.deepspeed
    unread = (f"pytorch_model/: {NO_OPTIMIZER}",) if name == "zero1-no-masters" else ()
    assert (str(state.path), state.tensors, state.unread) == ("pytorch_model", 14, unread)
    assert state.size == sum(path.stat().st_size for path in (root / "pytorch_model").iterdir())
    assert not any(
        "not looked into" in words or "next to it" in words for words in report.not_checked
    )
    assert report.as_json()["deepspeed"] == [
        {
            "path": "pytorch_model",
            "bytes": state.size,
            "files": len(list((root / "pytorch_model").iterdir())),
            "tensors": 14,
        }
    ]


def test_a_file_of_another_save_shows_no_process(saved: Path) -> None:
    """The files hold the number of ranks. The symptom: ``random_states_2.pkl`` was missing, too."""
    shutil.copy(saved / SECOND_RANK, saved / SECOND_RANK.replace("_rank_1_", "_rank_2_"))
    assert codes(saved) == [("malformed-file", "pytorch_model")]
    (saved / "random_states_1.pkl").unlink()
    assert ("incomplete-checkpoint", "random_states_1.pkl") in codes(saved)
    assert not any("random_states_2" in path for _, path in codes(saved))


def test_a_rank_that_is_missing(saved: Path, tmp_path: Path) -> None:
    (saved / SECOND_RANK).unlink()
    assert codes(saved) == [("missing-rank", SECOND_RANK)]
    (finding,) = check(saved).findings
    assert (
        str(finding)
        == f"{SECOND_RANK} is missing: 1 file of optimizer states (expected 2, one per rank); "
        "first missing rank: 1"
    )
    assert "from its node into this folder" in finding.advice
    assert codes(saved / "pytorch_model") == [("missing-rank", Path(SECOND_RANK).name)]
    assert verify(saved).status == 1
    assert not seal(saved).written
    receipt = salvage(saved, tmp_path / "new")
    assert receipt.status == 1
    assert [one.file for one in receipt.lost] == [SECOND_RANK]


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_optimizer_states_that_are_missing(name: str, tmp_path: Path) -> None:
    """Such as those that ``rsync --exclude '*optim*'`` leaves out."""
    root = Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "saved"))
    lost = sorted(root.glob("*/*_optim_states.pt"))
    for path in lost:
        path.unlink()
    report = check(root)
    assert [(one.code, str(one.path)) for one in report.findings] == [
        ("missing-rank", str(path.relative_to(root))) for path in lost[:1]
    ]
    assert repair(root).steps == ()
    # Without ZeRO, they are in the model states.
    is_unknown = not lost and name != "zero0"
    assert is_unknown == any(words.endswith(NO_OPTIMIZER) for words in report.not_checked)
    if lost:
        assert f"0 files of optimizer states (expected {len(lost)}, one per rank)" in str(
            report.findings[0]
        )
        for state in ("weights", "all"):
            with pytest.raises(MissingRankError, match="0 files of optimizer states"):
                migrate(root, tmp_path / "new", to="ddp" if state == "all" else "bin", state=state)
    if lost and "zero3" not in name:
        # The weights in the dtype of training are complete.
        (file,) = root.glob("*/mp_rank_00_model_states.pt")
        assert migrate(file, tmp_path / "trained", to="safetensors").verified


def test_a_file_that_was_cut(saved: Path, tmp_path: Path) -> None:
    data = (saved / SECOND_RANK).read_bytes()
    (saved / SECOND_RANK).write_bytes(data[:3000])
    assert codes(saved) == [("truncated-file", SECOND_RANK)]
    assert verify(saved).status == 1
    assert [one.file for one in salvage(saved, tmp_path / "new").lost] == [SECOND_RANK]


@pytest.mark.parametrize("kind", NOWHERE)
@pytest.mark.parametrize("file", [SECOND_RANK, "a file of model states"])
def test_a_file_that_leads_nowhere(file: str, kind: str, saved: Path, tmp_path: Path) -> None:
    """Such as an archive that was extracted into a folder of its name."""
    if file != SECOND_RANK:
        file = f"pytorch_model/{min(path.name for path in saved.glob('*/*_model_states.pt'))}"
    edit, words = NOWHERE[kind]
    edit(saved / file)
    for root, path in ((saved, file), (saved / "pytorch_model", Path(file).name)):
        assert codes(root) == [("not-a-tensor-file", path)]
        assert str(check(root).findings[0]) == f"{path} is {words}"
        assert repair(root).steps == ()
        assert not seal(root).written
        assert verify(root).status == 1
        for state in ("weights", "all"):
            with pytest.raises(OperationError, match=rf"{Path(file).name}: {words}; next: copy"):
                migrate(root, tmp_path / "new", to="ddp" if state == "all" else "bin", state=state)
        lost = salvage(root, tmp_path / f"new-{root.name}").lost
        assert [one.file for one in lost] == [path]


def test_a_flipped_bit_is_found_with_data(saved: Path) -> None:
    record = flip(saved / SECOND_RANK)
    assert codes(saved) == []
    assert any("ckptfix check --data checks them" in words for words in check(saved).not_checked)
    assert codes(saved, data=True) == [("crc-mismatch", SECOND_RANK)]
    (finding,) = check(saved, data=True).findings
    assert repr(record) in str(finding)
    assert verify(saved, data=True).status == 1


def test_files_of_two_saves(tmp_path: Path) -> None:
    for stage in (2, 3):
        make_zero(tmp_path / str(stage), [{"a.weight": torch.ones(4, 3)}], stage=stage, ranks=2)
    for path in (tmp_path / "3").glob("*_optim_states.pt"):
        shutil.copy(path, tmp_path / "2")
    (finding,) = check(tmp_path / "2").findings
    assert (finding.code, str(finding.path)) == (
        "malformed-file",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    assert str(finding).endswith(
        "it is from ZeRO-3, but mp_rank_00_model_states.pt is from ZeRO-1 or ZeRO-2: the files "
        "come from two saves"
    )


def test_a_kind_that_is_not_read_is_not_damage(saved: Path) -> None:
    states = next(iter((saved / "pytorch_model").glob("*_optim_states.pt")))
    shutil.copy(states, states.with_name("layer_01-model_00-model_states.pt"))
    report = check(saved)
    assert report.findings == ()
    assert (
        "pytorch_model/ (a DeepSpeed folder), all ranks together: the model is split into 1 layer "
        "file for pipeline parallelism" in report.not_checked
    )


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    """Return a universal checkpoint of two parameters in a folder of accelerate."""
    named = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(5)}
    moments = moments_of(named, 3.0)
    make_zero(
        tmp_path / "zero2",
        [named],
        stage=2,
        ranks=2,
        moments=moments,
        buffers={"m": torch.ones(2)},
    )
    root = tmp_path / "universal"
    root.mkdir()
    make_universal(root / "pytorch_model", tmp_path / "zero2", moments, is_flat=False)
    (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    return root


def test_universal_checkpoints(universal: Path) -> None:
    report = check(universal)
    assert report.findings == ()
    (state,) = report.deepspeed
    assert (state.tensors, state.files) == (3, 10)
    states = universal / "pytorch_model" / "zero" / "b.weight"
    data = (states / "exp_avg.pt").read_bytes()
    (states / "exp_avg.pt").write_bytes(data[:-30])
    assert codes(universal) == [("truncated-file", "pytorch_model/zero/b.weight/exp_avg.pt")]
    assert codes(universal / "pytorch_model") == [("truncated-file", "zero/b.weight/exp_avg.pt")]
    (states / "exp_avg.pt").unlink()
    (finding,) = check(universal).findings
    assert str(finding.path) == "pytorch_model/zero/b.weight/exp_avg.pt"
    assert "missing, although other parameters have this state" in str(finding)
    (universal / "pytorch_model" / "zero" / "optimizer_state.pt").unlink()
    (finding,) = check(universal).findings
    assert str(finding.path) == "pytorch_model/zero/optimizer_state.pt"


def test_a_universal_checkpoint_of_a_run_that_dealt_parameters(universal: Path) -> None:
    (path,) = universal.glob("*/*_model_states.pt")
    states = torch.load(path, weights_only=False)
    frozen = {"still.weight": torch.ones(2)}
    states["module"] |= frozen
    states["frozen_param_shapes"] = {"still.weight": torch.Size([2])}
    states["frozen_param_fragments"] = frozen
    states["ds_config"] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    torch.save(states, path)
    report = check(universal)
    assert report.findings == ()
    assert not any(words.endswith(NO_OPTIMIZER) for words in report.not_checked)


def test_bytes_of_a_universal_checkpoint_that_changed(universal: Path) -> None:
    path = universal / "pytorch_model" / "zero" / "b.weight" / "exp_avg_sq.pt"
    moment = torch.load(path, weights_only=True)["param"]
    data = bytearray(path.read_bytes())
    data[data.index(moment.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert codes(universal) == []
    assert codes(universal, data=True) == [
        ("crc-mismatch", "pytorch_model/zero/b.weight/exp_avg_sq.pt")
    ]


@pytest.mark.parametrize("keys", [Keys.AUTO, Keys.BARE, Keys.DDP])
def test_names_are_never_changed(tmp_path: Path, keys: Keys) -> None:
    """They are in the model states, in its shapes, and in the states of every rank's optimizer."""
    state = {"module.module.a.weight": torch.randn(4, 3), "module.module.b.weight": torch.randn(5)}
    make_zero(tmp_path / "pytorch_model", [state], stage=2, ranks=2)
    for rank in range(2):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    (tmp_path / "latest").write_text("pytorch_model")
    before = snapshot(tmp_path)
    for path in (
        tmp_path,
        tmp_path / "pytorch_model",
        tmp_path / "pytorch_model" / "mp_rank_00_model_states.pt",
    ):
        assert codes(path) == []
        assert repair(path, policy=Policy(keys=keys)).steps == ()
    assert snapshot(tmp_path) == before


def test_the_folder_that_latest_names(tmp_path: Path) -> None:
    for step in (5, 10):
        make_zero(
            tmp_path / f"global_step{step}", [{"a.weight": torch.ones(4, 3)}], stage=2, ranks=2
        )
    assert codes(tmp_path) == [("incomplete-checkpoint", "latest")]
    assert [*find_checkpoints(tmp_path)] == [tmp_path, tmp_path / "global_step5"]
    (tmp_path / "latest").write_text("global_step10")
    assert codes(tmp_path) == []
    assert [str(state.path) for state in check(tmp_path).deepspeed] == ["global_step10"]
    assert any(words.startswith("global_step5/") for words in check(tmp_path).not_checked)
    assert [*find_checkpoints(tmp_path)] == [tmp_path, tmp_path / "global_step5"]
    (tmp_path / "global_step10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert [code for code, _ in codes(tmp_path)] == ["missing-rank"]


def test_a_folder_of_accelerate_is_one_checkpoint(saved: Path) -> None:
    assert [*find_checkpoints(saved.parent)] == [saved]


def test_what_only_code_could_load_is_still_told(saved: Path) -> None:
    path = saved / "pytorch_model" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Keys.BARE}, path)
    assert ("unloadable-pickle", f"pytorch_model/{path.name}") in codes(saved)


WITH_RANKS = [name for name in SCENARIOS if any((FIXTURES / name).rglob("*_rank_1_*"))]


def rank_file(root: Path, rank: int, part: str = "optim") -> Path:
    (path,) = (root / "pytorch_model").glob(f"*_rank_{rank}_*_{part}_states.pt")
    return path


def exchange(first: Path, second: Path) -> None:
    first.rename(first.with_suffix(".tmp"))
    second.rename(first)
    first.with_suffix(".tmp").rename(second)


@pytest.fixture(scope="module")
def misplaced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """Return copies of all checkpoints with files of ranks in wrong places -> the file that is
    reported, its rank.
    """
    folder, made = tmp_path_factory.mktemp("misplaced"), {}
    for name in WITH_RANKS:
        for part in ("optim", "model") if "zero3" in name else ("optim",):
            copied, exchanged = (
                Path(
                    shutil.copytree(FIXTURES / name / "checkpoint", folder / f"{name}-{part}-{how}")
                )
                for how in ("copied", "exchanged")
            )
            shutil.copy(rank_file(copied, 0, part), rank_file(copied, 1, part))
            made[str(copied)] = (str(rank_file(copied, 1, part)), 0)
            exchange(rank_file(exchanged, 0, part), rank_file(exchanged, 1, part))
            made[str(exchanged)] = (str(rank_file(exchanged, 0, part)), 1)
    return made


def test_the_partition_of_another_rank(misplaced: dict[str, tuple[str, int]]) -> None:
    for root, (path, rank) in misplaced.items():
        (finding,) = check(root).findings
        kind = "partition" if "optim_states" in path else "model states"
        assert (finding.code, str(finding)) == (
            "malformed-file",
            (
                f"{Path(path).relative_to(root)} is malformed: it holds the {kind} of rank {rank} "
                f"(expected rank {1 - rank})"
            ),
        )


@pytest.mark.slow
def test_deepspeed_loads_the_partition_of_another_rank_as_other_weights(
    misplaced: dict[str, tuple[str, int]], deepspeed: DeepSpeed
) -> None:
    """Without an error, or the sizes of the last rank betray it."""
    healthy = {name: FIXTURES / name / "checkpoint" for name in WITH_RANKS}
    loaded = deepspeed.loads(*healthy.values(), *map(Path, misplaced))
    right = dict(zip(healthy, loaded, strict=False))
    assert all(type(weights) is dict for weights in right.values())
    for root, weights in zip(misplaced, loaded[len(healthy) :], strict=True):
        assert weights != right[Path(root).name.rsplit("-", 2)[0]]
    assert sum(type(weights) is dict for weights in loaded[len(healthy) :]) >= len(misplaced) - 4


def test_migrate_refuses_the_partition_of_another_rank(saved: Path, tmp_path: Path) -> None:
    exchange(rank_file(saved, 0), rank_file(saved, 1))
    with pytest.raises(OperationError, match="it holds the partition of rank 1"):
        migrate(saved, tmp_path / "new", to="safetensors")


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_have_parts_of_one_parameter_alone(stage: int, tmp_path: Path) -> None:
    """Their fragments are equal; the name that each file was saved under tells them apart, then the
    tensors do.
    """
    weights = {"a.weight": torch.arange(4000.0).view(40, 100)}
    make_zero(tmp_path, [weights], stage=stage, ranks=4, moments=moments_of(weights, 3.0))
    assert codes(tmp_path) == []
    first, second = (
        tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2)
    )
    healthy = first.read_bytes(), second.read_bytes()
    exchange(first, second)
    assert [str(finding) for finding in check(tmp_path).findings] == [
        f"{first.name} is malformed: it holds the partition of rank 2 (expected rank 1)"
    ]
    first.write_bytes(healthy[0])
    second.write_bytes(healthy[1])
    # Saved again, without its name.
    states = torch.load(first, weights_only=False)
    for path in (first, second):
        with path.open("wb") as file:
            torch.save(states, file)
    assert [str(finding) for finding in check(tmp_path).findings] == [
        f"{second.name} is malformed: it holds the partition of rank 1 (expected rank 2)"
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_nothing_but_padding_are_no_copies(stage: int, tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(3)}
    make_zero(tmp_path, [weights], stage=stage, ranks=8, moments=moments_of(weights, 3.0))
    for path in tmp_path.glob("*_optim_states.pt"):
        states = torch.load(path, weights_only=False)
        with path.open("wb") as file:
            torch.save(states, file)
    assert codes(tmp_path) == []


@pytest.mark.parametrize("name", ["Copy of {}", "notes_model_states.pt"])
def test_a_file_of_no_rank_is_listed_as_not_checked(name: str, saved: Path) -> None:
    """``zero_to_fp32`` globs ``*_optim_states.pt`` and ``*_model_states.pt``: a copy of a file is
    one rank more.
    """
    own = min((saved / "pytorch_model").glob("*_optim_states.pt"))
    shutil.copyfile(own, own.with_name(name.format(own.name)))
    report = check(saved)
    assert report.findings == ()
    words = f"pytorch_model/: '{name.format(own.name)}', of no rank; zero_to_fp32 reads every *_states.pt"
    assert words in report.not_checked


BACKWARDS = (
    "states['param_shapes'] = [type(group)(reversed(group.items())) for group in "
    "states['param_shapes']]"
)
REVERSED = "states['optimizer_state_dict']['fp32_flat_groups'].reverse()"
OF_MODEL, OF_OPTIMIZERS = "zero_pp_rank_0_*_model_states.pt", "*_optim_states.pt"
ROUNDED = """
optimizer = states["optimizer_state_dict"]
for key in optimizer.keys() & {"single_partition_of_fp32_groups", "fp32_flat_groups"}:
    optimizer[key] = [flat.detach().bfloat16() for flat in optimizer[key]]
"""
ROUNDS = "states['ds_config']['bf16'] = {'enabled': True, 'bf16_master_weights_and_grads': True}"
OF_RANKS = "mp_rank_00_model_states.pt"
OTHER_WEIGHTS = [
    ("zero1-bf16", OF_RANKS, BACKWARDS, "param_shapes of group 0 differ in order or size"),
    ("zero2", OF_RANKS, BACKWARDS, "param_shapes of group 0 differ in order or size"),
    ("zero2-round-robin", OF_RANKS, BACKWARDS, "param_shapes of group 0 differ in order or size"),
    ("zero3", OF_MODEL, BACKWARDS, "param_shapes differ from those of zero_pp_rank_0"),
    ("zero3-groups", OF_MODEL, BACKWARDS, "param_shapes differ from those of zero_pp_rank_0"),
    # The sum of the partitions is right, and zero_to_fp32 cuts parameters across them.
    ("zero3", OF_OPTIMIZERS, REVERSED, "the partition of sub-group 0 has "),
    ("zero3-groups", OF_OPTIMIZERS, REVERSED, "the partition of sub-group 0 has "),
    (
        "zero2", OF_OPTIMIZERS, ROUNDED,
        "its partitions are BF16, but the run kept its trained weights in F32",
    ),
    ("zero3-groups", OF_OPTIMIZERS, ROUNDED, "its partitions are BF16"),
]  # fmt: skip
"""Checkpoint, files of it that are edited, the edit, and what check says."""


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "files", "edit", "words"), OTHER_WEIGHTS)
def test_states_that_zero_to_fp32_loads_as_other_weights(
    scenario: str, files: str, edit: str, words: str, deepspeed: DeepSpeed, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(FIXTURES / scenario / "checkpoint", tmp_path / "saved"))
    deepspeed.edit(root, files, edit)
    weights, healthy = deepspeed.loads(root, FIXTURES / scenario / "checkpoint")
    assert weights != healthy
    is_loaded = type(weights) is dict and edit != REVERSED
    assert is_loaded or "is invalid for input of size" in weights
    (finding,) = check(root).findings
    assert (finding.code, finding.severity.value) == ("malformed-file", "error")
    assert words in str(finding)


DEALS = "states['ds_config']['zero_optimization']['round_robin_gradients'] = True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "edits"),
    [
        ("zero2", {OF_OPTIMIZERS: ROUNDED, "*_model_states.pt": ROUNDS}),
        ("zero3-groups", {OF_OPTIMIZERS: ROUNDED, "*_model_states.pt": ROUNDS}),
        # A former version deals no parameters under ZeRO-1.
        ("zero1-bf16", {"*_model_states.pt": DEALS}),
    ],
)
def test_states_that_the_configuration_explains(
    scenario: str, edits: dict[str, str], deepspeed: DeepSpeed, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(FIXTURES / scenario / "checkpoint", tmp_path / "saved"))
    for files, edit in edits.items():
        deepspeed.edit(root, files, edit)
    assert codes(root) == []


def edits(
    states: dict[str, Any], *, is_cut_in_groups: bool
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a name, model states that DeepSpeed cannot load or loads in part, and what check says
    of them.
    """
    module, buffer = states["module"], states["buffer_names"][0]
    frozen = {"frozen_param_shapes", "frozen_param_fragments"}
    empty: list[dict[str, Any] | None] = [{}, None]
    for value in ([], [1], 3, "x"):
        yield f"module {value!r}", {**states, "module": value}, "module is not a dict"
        for key in ("shared_params", *sorted(frozen)):
            yield f"{key} {value!r}", {**states, key: value}, f"{key} is not a dict"
    yield "no module", {**states, "module": {}}, "but module has none of them"
    yield "a buffer", {**states, "module": {**module, buffer: 3}}, f"{buffer!r} is not a tensor"
    yield "names", {**states, "buffer_names": [1]}, "buffer_names has a name that is not a string"
    yield "one name", {**states, "buffer_names": "x"}, "buffer_names is not a list"
    old = {key: value for key, value in states.items() if key != "shared_params"}
    yield "no shared", {**old, "ds_version": "0.18.2"}, "shared_params is missing"
    (shapes,), frozen_shapes = states["param_shapes"], states["frozen_param_shapes"]
    kinds: list[Any] = [set, torch.ones] if is_cut_in_groups else [set, torch.ones, tuple, list]
    for kind in kinds:
        made = [{name: kind(shape) for name, shape in shapes.items()}]
        words = "the shape of 'a.weight' is invalid"
        yield f"shapes {kind.__name__}", {**states, "param_shapes": made}, words
    mixed: list[Any] = [OrderedDict, shapes]
    yield "of a class", {**states, "param_shapes": mixed}, "param_shapes is not a list of dicts"
    tuples = {name: tuple(shape) for name, shape in frozen_shapes.items()}
    words = "the shape of 'frozen.bias' is invalid"
    yield "frozen", {**states, "frozen_param_shapes": tuples}, words
    words = "shared_params is not a dict of names"
    yield "shared None", {**states, "shared_params": None}, words
    yield "shared name 3", {**states, "shared_params": {"head.weight": 3}}, words
    for key in sorted(frozen):
        for nothing in empty:
            words = "only one of frozen_param_shapes and"
            yield f"{key} {nothing}", {**states, key: nothing}, words
    fragments = {**states["frozen_param_fragments"], "frozen.bias": [1]}
    words = "'frozen.bias' is not a tensor"
    yield "a fragment", {**states, "frozen_param_fragments": fragments}, words


class Made:
    """What is pickled as a call of a function with a number, as DeepSpeed's enum of the stage
    is.
    """

    def __init__(self, function: Callable[[int], object], number: int) -> None:
        self.call = function, (number,)

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return self.call

    def __repr__(self) -> str:
        function, (number,) = self.call
        return f"{function.__name__}({number})"


def optimizer_edits(states: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a name, optimizer states of rank 0 that DeepSpeed cannot load, and what check says of
    them.
    """
    optimizer = states["optimizer_state_dict"]
    (flats,) = optimizer.keys() & {"single_partition_of_fp32_groups", "fp32_flat_groups"}
    right = 2 if flats.startswith("single") else 3
    words = "its zero_stage does not match its partitions"
    for stage in (None, "x", 4, 5 - right, Made(bytearray, right)):
        yield f"stage {stage}", {**optimizer, "zero_stage": stage}, words
    yield "no stage", {k: v for k, v in optimizer.items() if k != "zero_stage"}, words
    words = "partition_count is not a number of ranks"
    for count in ([], [0], 0, "x", {2}, (2,)):
        yield f"count {count}", {**optimizer, "partition_count": count}, words
    without = {key: value for key, value in optimizer.items() if key != "partition_count"}
    yield "no count", without, "partition_count is missing"
    words = "2 files of optimizer states (expected 1, one per rank)"
    yield "fewer", {**optimizer, "partition_count": [1]}, words
    itself = dict(optimizer)
    itself["optimizer_state_dict"] = itself
    yield "itself", itself, "its optimizer_state_dict refers to itself"
    rows = [flat.detach().view(1, -1) for flat in optimizer[flats]]
    yield "rows", {**optimizer, flats: rows}, "is not a plain one-dimensional tensor"


@pytest.fixture(params=[2, 3], scope="module")
def edited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, str]:
    """Return copies of a checkpoint in which a file of rank 0 holds something else -> what check
    says of them.
    """
    folder = tmp_path_factory.mktemp("edited")
    source = folder / "source"
    make_zero(
        source / "pytorch_model",
        [{"a.weight": torch.randn(6, 4)}],
        stage=request.param,
        ranks=2,
        frozen={"frozen.bias": torch.randn(6)},
        buffers={"mean": torch.randn(4)},
        shared={"head.weight": "a.weight"},
    )
    (source / "latest").write_text("pytorch_model")
    assert codes(source) == []
    made = {source: ""}
    model_edits = partial(edits, is_cut_in_groups=request.param < 3)
    for part, make_edits in (("model", model_edits), ("optim", optimizer_edits)):
        first = min((source / "pytorch_model").glob(f"*{part}_states.pt"))
        states = torch.load(first, weights_only=False)
        for name, value, words in make_edits(states):
            root = Path(shutil.copytree(source, folder / part / name))
            is_whole = part == "model" or "optimizer_state_dict" in value
            changed = value if is_whole else {**states, "optimizer_state_dict": value}
            torch.save(changed, root / "pytorch_model" / first.name)
            made[root] = words
    return made


def test_states_that_deepspeed_cannot_load(edited: dict[Path, str]) -> None:
    for root, words in list(edited.items())[1:]:
        (finding,) = check(root).findings
        assert finding.code in ("malformed-file", "missing-rank"), root
        assert words in str(finding), root


@pytest.mark.slow
def test_deepspeed_cannot_load_them(edited: dict[Path, str], deepspeed: DeepSpeed) -> None:
    right, *loaded = deepspeed.loads(*edited)
    assert type(right) is dict
    for root, weights in zip(list(edited)[1:], loaded, strict=True):
        assert weights != right, root


@pytest.mark.parametrize("key", ["shared_params", "frozen_param_shapes", "frozen_param_fragments"])
def test_states_of_older_deepspeed_that_lack_a_key(key: str, tmp_path: Path) -> None:
    make_zero(tmp_path, [{"a.weight": torch.randn(6, 4)}], stage=2, ranks=2)
    path = tmp_path / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    del states[key]
    torch.save(states, path)
    assert codes(tmp_path) == []


def test_the_other_model_states_of_zero_3_are_read(tmp_path: Path) -> None:
    make_zero(tmp_path, [{"a.weight": torch.randn(6, 4)}], stage=3, ranks=2)
    path = tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    torch.save({**states, "param_shapes": None}, path)
    (finding,) = check(tmp_path).findings
    assert str(finding).startswith(
        f"{path.name} is malformed: its param_shapes differ from those of"
    )


def test_padding_between_parameters_is_not_read(tmp_path: Path) -> None:
    make_zero(
        tmp_path, [{"a.weight": torch.randn(6, 4), "b.bias": torch.ones(8)}], stage=2, ranks=2
    )
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=False)
    for padding in (0, 4):
        states["optimizer_state_dict"]["param_alignment_paddings"] = [[padding, 0]]
        torch.save(states, path)
        report = check(tmp_path)
        assert report.findings == ()
        assert any("parameter_alignment" in words for words in report.not_checked) == bool(padding)


def replace_latest(root: Path, content: str | None) -> Path:
    """Give a folder this ``latest``, none for None, a folder of that name for "/"."""
    (root / "latest").unlink()
    if content == "/":
        (root / "latest").mkdir()
    elif content is not None:
        (root / "latest").write_text(content)
    return root


LOST_TAGS = {
    None: "latest is missing: {tag}/ exists",
    "": "latest: it is empty",
    "\ufeffpytorch_model": (
        r"latest: it points to '\ufeffpytorch_model', which is not a DeepSpeed folder"
    ),
    " \n": "latest: it is empty",
    "/": "latest: it is not a text file",
    "global_step99": "latest: it points to 'global_step99', which is not a DeepSpeed folder",
}


@pytest.fixture
def of_trainer(tmp_path: Path) -> Path:
    """Return a checkpoint of the Trainer with DeepSpeed's folder."""
    root = tmp_path / "checkpoint-500"
    root.mkdir()
    make_zero(root / "global_step500", [{"a.weight": torch.ones(4, 3)}], stage=2, ranks=2)
    (root / "latest").write_text("global_step500")
    save_file({"a.weight": torch.ones(4, 3)}, root / "model.safetensors", metadata={"format": "pt"})
    (root / "trainer_state.json").write_text(
        '{"epoch": 1.0, "global_step": 500, "log_history": []}'
    )
    return root


@pytest.mark.parametrize("content", LOST_TAGS)
def test_a_latest_that_names_no_checkpoint(
    content: str | None, of_trainer: Path, tmp_path: Path
) -> None:
    native = Path(shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path / "native"))
    bare = tmp_path / "bare"
    for tag in ("global_step3", "global_step12"):
        shutil.copytree(native / "pytorch_model", bare / tag)
    (bare / "latest").write_text("global_step12")
    for root, tag in (
        (native, "pytorch_model"), (of_trainer, "global_step500"), (bare, "global_step12")
    ):  # fmt: skip
        assert codes(root) == []
        report = check(replace_latest(root, content))
        (finding,) = report.findings
        assert (finding.code, str(finding)) == (
            "incomplete-checkpoint",
            LOST_TAGS[content].format(tag=tag),
        )
        assert finding.advice.endswith(
            f"; write the name of a checkpoint folder, such as {tag}, into the file"
        )
        assert report.status == 1


@pytest.mark.parametrize("content", LOST_TAGS)
def test_accelerate_never_reads_latest(content: str | None, saved: Path) -> None:
    """Its load_state gives DeepSpeed the tag; ``zero_to_fp32`` fails."""
    report = check(replace_latest(saved, content))
    assert [(one.code, one.severity.value, str(one.path)) for one in report.findings] == [
        ("incomplete-checkpoint", "note", "latest")
    ]
    assert report.status == 0
    assert "such as pytorch_model" in report.findings[0].advice


def test_latest_that_is_written_otherwise(of_trainer: Path) -> None:
    (of_trainer / "latest").write_text("  global_step500\n")
    assert codes(of_trainer) == []
    make_zero(of_trainer / "global_step400", [{"a.weight": torch.ones(4, 3)}], stage=2, ranks=2)
    (of_trainer / "latest").write_text("global_step400")
    assert codes(of_trainer) == []
    (of_trainer / "latest").rename(of_trainer / "latest_universal")
    assert codes(of_trainer) == []


@pytest.mark.slow
def test_deepspeed_finds_no_checkpoint_then(tmp_path: Path, deepspeed: DeepSpeed) -> None:
    changed = [
        replace_latest(
            Path(shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path / str(number))),
            content,
        )
        for number, content in enumerate(LOST_TAGS)
    ]
    assert all(type(loaded) is str for loaded in deepspeed.loads(*changed))

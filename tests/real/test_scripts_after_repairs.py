"""Real scripts of two processes save, and load after a repair, tensor by tensor, what they have
trained.

An uncorrected script passes something to prepare() twice, the corrected one does not. A script that
needs no correction must load after the default repair, too, so that nothing of it may be deleted.
"""

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ckptfix.cli import run
from tests.repairs.builders import snapshot
from tests.sampling import one_of
from tests.simulated.versions import accelerate_folder
from tests.training.rank_cases import run_python

ASKS = {"warning identical-models"}
DOUBLED = {"error doubled-model"}
STATES = {"error doubled-model", "error doubled-states"}


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "model_1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose_the_random_states(checkpoint: Path) -> None:
    for path in checkpoint.glob("random_states_*.pkl"):
        path.unlink()


class Scenario(NamedTuple):
    """A script, the warnings and errors in each checkpoint that it saved, and the files that
    repairs delete.

    A checkpoint with an error loses ``deleted`` by a plain repair, any other loses nothing.
    ``option``: what a person who knows the script says, and what is deleted then.
    """

    script: str
    why: str
    finds: Mapping[int, set[str]] = MappingProxyType({3: ASKS})
    deleted: tuple[str, ...] = ()
    option: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    is_correct: bool = False
    variant: str = ""
    safe: bool = True
    is_resumed: bool = False
    harm: Callable[[Path], None] | None = None

    @property
    def name(self) -> str:
        return self.script + (f"-{self.variant}" if self.variant else "")


SECOND = ("model_1.safetensors",)
PAIRS = tuple(
    f"{name}_{number}.{suffix}"
    for name, suffix in (("model", "safetensors"), ("optimizer", "bin"), ("scheduler", "bin"))
    for number in (1, 3)
)
ONE_MODEL = ("--models", "1")

CORRECT = (
    # Nothing of these is doubled: the unchanged script must load after the default repair.
    Scenario(
        "twin_towers_of_one_optimizer",
        "the optimizer has states for the parameters of both entries",
    ),
    Scenario("normalisers", "no optimizer fits entries of buffers alone"),
    Scenario("empty_tensors", "not one byte was compared"),
    Scenario("one_frozen_parameter", "no optimizer fits the entries"),
    Scenario("backbone_beside_its_extractor", "no optimizer fits the entries"),
    Scenario(
        "backbone_beside_its_extractor",
        "equal in every checkpoint of the run, but nothing ever trains them",
        {1: ASKS, 2: ASKS, 3: ASKS},
        variant="neighbours",
    ),
    Scenario(
        "backbone_beside_its_extractor_and_a_like_head",
        "the optimizer is that of the head, though its shapes are in the backbone, too",
    ),
    Scenario(
        "copy_beside_a_trained_model_of_its_class", "the moments may be those of the other model"
    ),
    Scenario(
        "average_of_a_generator_that_waits",
        "one of two optimizers that fit has moments of zeros, and it may be that of the two "
        "entries",
    ),
    Scenario(
        "average_of_a_generator_that_waits_for_the_first_optimizer",
        "optimizers are not prepared in the order of their models",
    ),
    Scenario("fresh_layer_norms", "no optimizer fits the entries"),
    Scenario("bare_and_wrapped_without_training", "no optimizer fits the entries"),
    Scenario("average_during_warm_up", "the learning rate was 0 in every step"),
    Scenario(
        "average_with_copied_buffers_during_warm_up",
        "checkpoint-1 has other running statistics, and the same weights",
        {1: ASKS, 3: ASKS},
    ),
    Scenario(
        "average_after_the_first_step_of_a_warm_up",
        "the learning rate is above 0 since the save, it was 0 in the only step",
        {1: ASKS},
    ),
    Scenario(
        "reference_beside_its_bf16_student",
        "updates below the last place of bf16 are lost, so that the student still equals its "
        "reference",
    ),
    Scenario("reference_beside_its_slow_student", "updates below the last place of fp32 are lost"),
    Scenario(
        "reference_beside_a_student_that_waits",
        "the learning rate is above 0 since the save, a function held it at 0 in every step",
    ),
    Scenario(
        "average_until_a_delay_ends",
        "the learning rate is above 0 since the save, a function held it at 0 in every step",
        {1: ASKS, 2: ASKS, 3: ASKS},
    ),
    Scenario(
        "average_until_a_sequence_begins",
        "the learning rate is above 0 since the save, ConstantLR held it at 0 in every step",
    ),
    Scenario(
        "average_after_the_first_epoch_of_a_warm_up",
        "the scheduler moved once, after three steps at a learning rate of 0",
    ),
    Scenario(
        "average_until_an_unsaved_schedule_begins",
        "the script keeps its scheduler from prepare(), and nothing shows which rates it has set",
    ),
    Scenario(
        "average_until_a_partial_ends",
        "a partial() of the script held the learning rate at 0, and leaves {} as those of "
        "transformers do",
    ),
    Scenario("average_without_gradients", "every moment is 0"),
    Scenario("sgd_copy", "plain SGD has no states that show training"),
    Scenario("no_optimizer_copy", "no optimizer"),
    Scenario("slow_average", "an average differs from its model", {3: set()}),
    Scenario(
        "target_network",
        "they differ in checkpoint-1 and checkpoint-2, so that checkpoint-3 shows a copy",
        {1: set(), 2: set(), 3: ASKS},
    ),
    Scenario(
        "average_after_a_hard_copy",
        "they differ in checkpoint-5 and in none before, so that checkpoint-3 shows them at first",
        {3: set(), 5: set()},
        variant="neighbours",
    ),
    # The same bytes as those of a model prepared twice: the words say what would make this wrong,
    # and `undo` helps.
    Scenario(
        "model_beside_its_loss",
        "the bytes of a model prepared twice in each checkpoint, as both entries are one model",
        {1: DOUBLED, 3: DOUBLED},
        SECOND,
    ),
    Scenario(
        "average_after_a_hard_copy",
        "the bytes of a model prepared twice, without a neighbour that differs",
        {1: DOUBLED, 3: DOUBLED},
        SECOND,
    ),
    Scenario(
        "twin_towers_with_own_optimizers",
        "the bytes of a model and an optimizer prepared twice",
        {3: STATES},
        (*SECOND, "optimizer_1.bin"),
    ),
)
UNCLEAR = (
    # Something is prepared twice, and all or a part of it has no evidence: only a person can say
    # it.
    Scenario(
        "gan_before_its_discriminators",
        "three optimizers for three remaining models: their equality is of moments that are all 0",
        {3: DOUBLED},
        SECOND,
    ),
    Scenario(
        "gan_of_one_class_before_its_discriminators",
        "two of three optimizers that fit have moments of zeros, and one of these may be that of "
        "the two entries",
        option=("--models", "3"),
        chosen=SECOND,
    ),
    Scenario(
        "gan_with_schedulers_before_its_discriminators",
        "three optimizers and schedulers for three remaining models",
        {3: DOUBLED},
        SECOND,
    ),
    Scenario(
        "towers_with_own_optimizers",
        "the optimizer that would remain has no state for half of the model",
        {3: {*DOUBLED, "warning surplus-states"}},
        SECOND,
    ),
    Scenario(
        "lora_adapters_at_step_1",
        "the optimizers that would remain have no state for one of the adapters",
        {1: {*DOUBLED, "warning surplus-states"}},
        SECOND,
    ),
    Scenario(
        "student_and_teacher_with_optimizer_twice",
        "two optimizers for two remaining models",
        {3: {*DOUBLED, "warning surplus-states"}},
        SECOND,
        option=("--keep", "optimizers=1"),
        chosen=(*SECOND, "optimizer_1.bin"),
    ),
    Scenario(
        "student_and_teacher_both_twice",
        "one optimizer for two pairs that it fits",
        {3: {*DOUBLED, *ASKS}},
        SECOND,
        option=("--models", "2"),
        chosen=(*SECOND, "model_3.safetensors"),
    ),
    Scenario(
        "sgd_doubled", "plain SGD has no states that show training", option=ONE_MODEL, chosen=SECOND
    ),
    Scenario(
        "with_scheduler_twice",
        "two schedulers for one optimizer",
        {3: {*DOUBLED, "warning surplus-states"}},
        SECOND,
        option=("--keep", "schedulers=1"),
        chosen=(*SECOND, "scheduler_1.bin"),
    ),
    Scenario(
        "with_a_function",
        "a function that is not saved sets the learning rate, and may have held it at 0",
        option=ONE_MODEL,
        chosen=SECOND,
    ),
    Scenario(
        "with_warm_up",
        "nothing proves that the function of the schedule is one of transformers",
        option=ONE_MODEL,
        chosen=SECOND,
    ),
    Scenario("bf16", "a step may have changed no weight in bf16", option=ONE_MODEL, chosen=SECOND),
    Scenario("at_the_end_of_a_schedule", "the learning rate is 0", option=ONE_MODEL, chosen=SECOND),
    Scenario("no_optimizer_doubled", "no optimizer", option=ONE_MODEL, chosen=SECOND),
    Scenario(
        "adamw_doubled",
        "no file shows how many processes saved",
        option=ONE_MODEL,
        chosen=SECOND,
        variant="without-random-states",
        harm=lose_the_random_states,
    ),
    Scenario(
        "adamw_doubled",
        "nearly equal: all tensors but one, as after a flipped bit",
        {3: {"warning related-models"}},
        variant="flipped-bit",
        harm=flip_a_bit,
    ),
)
CLEAR = (
    Scenario("adamw_doubled", "", {3: DOUBLED}, SECOND),
    Scenario(
        "adamw_doubled",
        "equal in each",
        {1: DOUBLED, 2: DOUBLED, 3: DOUBLED},
        SECOND,
        variant="neighbours",
    ),
    Scenario(
        "adamw_doubled", "", {1: DOUBLED, 3: DOUBLED}, SECOND, variant="resumed", is_resumed=True
    ),
    Scenario("student_and_teacher", "the teacher moves to number 1", {3: DOUBLED}, SECOND),
    Scenario("two_students_twice", "", {3: DOUBLED}, (*SECOND, "model_3.safetensors")),
    Scenario("student_in_wrappers_twice", "", {3: DOUBLED}, (*SECOND, "model_3.safetensors")),
    Scenario("prepared_three_times", "", {3: DOUBLED}, (*SECOND, "model_2.safetensors")),
    Scenario("with_scheduler", "", {3: DOUBLED}, SECOND),
    Scenario(
        "with_optimizer_twice",
        "two optimizers for one remaining model",
        {3: STATES},
        (*SECOND, "optimizer_1.bin"),
    ),
    Scenario("pairs_twice", "four optimizers for two remaining models", {3: STATES}, PAIRS),
    Scenario(
        "bf16", "other values in checkpoint-1", {1: ASKS, 3: DOUBLED}, SECOND, variant="neighbours"
    ),
    Scenario(
        "with_a_function",
        "other values in checkpoint-1",
        {1: ASKS, 3: DOUBLED},
        SECOND,
        variant="neighbours",
    ),
    Scenario("with_a_function_of_epochs", "the scheduler has not moved", {3: DOUBLED}, SECOND),
    Scenario("with_scheduler_of_epochs", "StepLR begins above 0", {3: DOUBLED}, SECOND),
    Scenario(
        "with_warm_up",
        "other values in checkpoint-2",
        {2: ASKS, 3: DOUBLED},
        SECOND,
        variant="neighbours",
    ),
    Scenario("with_a_sequence", "", {3: DOUBLED}, SECOND),
    Scenario("momentum", "", {3: DOUBLED}, SECOND),
    Scenario("two_groups", "", {3: DOUBLED}, SECOND),
    Scenario("with_custom_objects", "", {3: DOUBLED}, SECOND),
    Scenario(
        "adamw_doubled",
        "untrained in checkpoint-0, which is no reason against checkpoint-2",
        {0: ASKS, 2: DOUBLED},
        SECOND,
        variant="first-step",
    ),
    Scenario(
        "batch_norm_with_optimizer_twice",
        "buffers have no states",
        {3: STATES},
        (*SECOND, "optimizer_1.bin"),
    ),
    Scenario("batch_norm_by_sgd", "other weights in checkpoint-1", {1: ASKS, 3: DOUBLED}, SECOND),
    Scenario(
        "tied_weights_with_optimizer_twice",
        "two names have one state",
        {3: STATES},
        ("pytorch_model_1.bin", "optimizer_1.bin"),
        safe=False,
    ),
    Scenario("named_parameters", "", {3: DOUBLED}, SECOND),
    Scenario("rmsprop", "", {3: DOUBLED}, SECOND),
    Scenario("adagrad", "", {3: DOUBLED}, SECOND),
    Scenario("frozen_layer", "", {3: DOUBLED}, SECOND),
    Scenario("gan_in_training", "", {3: DOUBLED}, (*SECOND, "model_3.safetensors")),
)
SCENARIOS = (*(row._replace(is_correct=True) for row in CORRECT), *UNCLEAR, *CLEAR)
VERSIONS = one_of(("installed", "1.12.0", "1.6.0"))


class Played(NamedTuple):
    """Results of two runs of two processes, and of the repairs between them.

    ``folder``: for each scenario its checkpoints as ``saved``, as ``repaired``, and as ``chosen``
    with the option.
    """

    folder: Path
    trained: dict[str, dict[str, Any]]
    receipts: dict[Path, tuple[int, dict[str, Any]]]
    loaded: dict[tuple[Path, bool], dict[str, Any]]
    """Folder, and whether the corrected script loads it -> by checkpoint the digests, or the error.
    """


def play(
    jobs: list[dict[str, Any]], file: Path, variables: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all jobs in two new processes; return the results of each."""
    file.write_text(json.dumps(jobs), encoding="utf-8")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run_python(*launcher, "-m", "tests.real.scripts", str(file), variables=variables)
    main, second = (
        json.loads(file.with_name(f"{file.name}.{rank}").read_text()) for rank in range(2)
    )
    return main, second


def ckptfix(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run the command line in this process; return its status and its JSON document."""
    with redirect_stdout(io.StringIO()) as printed:
        status = run([*map(str, arguments), "--json"])
    return status, json.loads(printed.getvalue())


def problems(findings: list[dict[str, Any]]) -> list[str]:
    """Return the severities and codes of all warnings and errors."""
    return [f"{one['severity']} {one['code']}" for one in findings if one["severity"] != "note"]


@pytest.fixture(scope="module", params=VERSIONS)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Save with all scripts, repair, and load with all scripts, uncorrected and corrected."""
    folder = tmp_path_factory.mktemp("scripts")
    variables = {}
    if request.param != "installed":
        assert request.config.cache is not None
        kept = Path(request.config.cache.mkdir(f"accelerate-{request.param}"))
        variables["PYTHONPATH"] = str(accelerate_folder(request.param, kept))
    saves = [
        {
            "script": row.script,
            "folder": str(folder / row.name / "saved"),
            "steps": list(row.finds),
            "safe": row.safe,
            "resumed": row.is_resumed,
        }
        for row in SCENARIOS
    ]
    # Buffers are those of the main process, which saves them.
    trained, _ = play(saves, folder / "saves.json", variables)

    receipts: dict[Path, tuple[int, dict[str, Any]]] = {}
    loads: list[dict[str, Any]] = []
    for row in SCENARIOS:
        saved = folder / row.name / "saved"
        if row.harm is not None:
            for checkpoint in saved.iterdir():
                row.harm(checkpoint)
        options = {"repaired": (), "chosen": row.option} if row.option else {"repaired": ()}
        for kind, option in options.items():
            shutil.copytree(saved, saved.with_name(kind))
            for step in row.finds:
                checkpoint = saved.with_name(kind) / f"checkpoint-{step}"
                receipts[checkpoint] = ckptfix("repair", checkpoint, *option)
        loads += [
            {
                "script": row.script,
                "folder": str(saved.with_name(kind)),
                "is_corrected": is_corrected,
            }
            for kind in ("saved", *options)
            for is_corrected in ((False,) if row.is_correct else (False, True))
        ]
    loaded, loaded_by_second = play(loads, folder / "loads.json", variables)
    assert loaded == loaded_by_second
    return Played(
        folder,
        dict(zip((row.name for row in SCENARIOS), trained, strict=True)),
        receipts,
        {
            (Path(job["folder"]), job["is_corrected"]): result
            for job, result in zip(loads, loaded, strict=True)
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", SCENARIOS, ids=lambda row: row.name)
def test_scripts_load_after_a_repair_what_they_trained(row: Scenario, played: Played) -> None:
    kinds = (
        {"repaired": row.deleted, "chosen": row.chosen} if row.option else {"repaired": row.deleted}
    )
    for step, finds in row.finds.items():
        name = f"checkpoint-{step}"
        saved = played.folder / row.name / "saved"
        trained, before = played.trained[row.name][name], snapshot(saved / name)

        status, report = ckptfix("check", saved / name)
        findings = report["checkpoints"][0]["findings"]
        assert (set(problems(findings)), status) == (finds, int(bool(finds))), row.why
        if row.is_correct or row.harm is None:
            assert played.loaded[saved, False][name] == trained

        for kind, deleted in kinds.items():
            folder = saved.with_name(kind)
            status, receipt = played.receipts[folder / name]
            dropped = {one["files"][0] for one in receipt["steps"] if one["action"] == "DropEntry"}
            is_changed = kind == "chosen" or any(find.startswith("error") for find in finds)
            # accelerate 1.12.0 registers a model that is prepared three times once more.
            assert dropped == (set(deleted) & before.keys() if is_changed else set())
            is_asked = kind == "repaired" and any(find.startswith("warning") for find in finds)
            assert status == int(is_asked)

            after = snapshot(folder / name)
            assert is_changed or after == before
            again = problems(ckptfix("check", folder / name)[1]["checkpoints"][0]["findings"])
            assert not Counter(again) - Counter(problems(findings))

            if is_changed and not row.is_correct:
                assert played.loaded[folder, True][name] == trained
                # Without an entry behind the duplicates the corrected script needs no repair.
                moved = [one for one in receipt["steps"] if one["action"] == "Renumber"]
                assert (played.loaded[saved, True][name] != trained) == bool(moved)
            if dropped:
                # A wrong number of entries must be an error, never other weights.
                error = played.loaded[folder, False][name]
                assert isinstance(error, str)
                advice = " ".join(receipt["advice"])
                if error.startswith("FileNotFoundError"):
                    assert f"looks for {Path(error[:-1]).name}" in advice
                else:
                    assert error.startswith("RuntimeError: Error(s) in loading state_dict")
                    assert "finds the wrong model in " in advice
                assert "load_state fails" in advice
                is_default = any("doubled-model" in one["fixes"] for one in receipt["steps"])
                assert ("undo the repair if" in advice) == is_default
            elif row.is_correct:
                assert played.loaded[folder, False][name] == trained

            if is_changed:
                assert ckptfix("undo", folder / name)[0] == 0
            assert snapshot(folder / name) == before
        for finding in findings:
            if finding["code"] == "doubled-model":
                assert "ckptfix undo" in finding["message"] + finding["advice"]

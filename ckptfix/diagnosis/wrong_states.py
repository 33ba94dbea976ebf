"""States that are intact, and not what the names of their files promise, or of no use to a run."""

from collections.abc import Collection, Iterator
from math import isfinite
from pathlib import PurePosixPath

from ckptfix.checkpoint.bundled_states import problems_inside, states_under_other_keys
from ckptfix.checkpoint.dcp import flattened_optimizers, optimizers_in
from ckptfix.checkpoint.deepspeed_files import deepspeed_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, is_pretrained
from ckptfix.checkpoint.placeholders import remedy_for_placeholders
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import (
    NO_TENSORS,
    Content,
    StateProblem,
    content_of,
    holds_no_tensor,
    is_weights_file,
    may_hide_weights,
    state_problem,
    weights_without_tensors,
)
from ckptfix.diagnosis.case import DAMAGED_CONTENT, Case
from ckptfix.diagnosis.findings.base import Explained, Severity
from ckptfix.diagnosis.findings.damaged import UnloadablePickle
from ckptfix.diagnosis.findings.inconsistent import DeadScaler
from ckptfix.diagnosis.findings.misplaced import (
    EFFECTS_ON_LIBRARIES,
    EFFECTS_ON_TORCH,
    CopiedRandomStates,
    EmptyExport,
    RenamedState,
    StatesWithoutStep,
    UnknownState,
    WrongState,
)
from ckptfix.formats.dcp_metadata import MODEL_KEY
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.formats.pickle_tree import child, text_keys
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.wording import list_names


def diagnose_lost_steps(case: Case) -> Iterator[StatesWithoutStep]:
    """Yield the random states of accelerate without the step of the run."""
    for component in case.folder.components:
        file, name = component.content, component.name
        if (
            name.role is Role.RNG_STATE
            and not name.is_of_trainer
            and isinstance(file, TorchFile)
            and _lacks_step(file)
        ):
            yield StatesWithoutStep(
                path=component.path,
                holds="random states without 'step'",
                expected=Content.RANDOM_STATES.value,
                effect=(
                    "gradient accumulation does not continue at the saved batch (accelerate before "
                    "0.34 fails with KeyError: 'step')"
                ),
            )


def diagnose_placeholders(case: Case) -> Iterator[UnknownState]:
    """Yield the state dicts of placeholders in files of scripts, whose names no loader knows."""
    for component, key, problem in case.placeholders:
        if not is_weights_file(component.name):
            yield UnknownState(
                path=component.path,
                key=key,
                holds=problem.holds,
                expected=problem.expected.value,
                effect="load_state_dict of a model fails",
                remedy=remedy_for_placeholders(case.folder),
            )


def diagnose_wrong_states(case: Case) -> Iterator[WrongState | UnknownState]:
    """Yield the files of a folder that hold something else than their names promise."""
    folder = case.folder
    problems = _problems(case)
    if not problems:
        return
    names = {component.path: component.name for component in folder.components}
    contents = {
        component.path: content_of(component.content)
        for component in folder.components
        if isinstance(component.content, TorchFile)
    }
    is_pretrained_model = _is_pretrained(folder)
    # Scripts give such names to files of their own: an unknown content is judged where a library
    # wrote the folder.
    is_of_library = (
        bool(folder.ranks)
        or folder.has_file(TRAINER_STATE)
        or any(name.is_of_trainer and name.role is Role.RNG_STATE for name in folder.file_names)
    )
    tag = next((str(where) for _, where in deepspeed_folders(folder)), "")
    partners: dict[tuple[Content, Content | None], dict[int, str]] = {}
    """First file that can be exchanged with a problem of a kind, by its number: 3,000 problems can
    have as many.
    """
    for path, problem in problems.items():
        is_placeholder = problem.content is Content.PLACEHOLDERS
        # The Trainer leaves it with ZeRO-3 and stage3_gather_16bit_weights_on_model_save off
        # (transformers 5.23).
        if tag and (problem is NO_TENSORS or is_placeholder):
            effect = problem.effect or "from_pretrained leaves the weights random"
            yield EmptyExport(
                path=path,
                holds=problem.holds,
                expected=problem.expected.value,
                effect=f"a resume with DeepSpeed reads {tag}/, but {effect}",
                remedy=(
                    f"to export the weights, merge the states in {tag}/ with DeepSpeed's "
                    "zero_to_fp32.py"
                ),
            )
            continue
        kind = problem.expected, problem.content
        if kind not in partners:
            partners[kind] = {
                names[partner].index: str(partner)
                for partner in sorted(contents, reverse=True)
                if contents[partner] is problem.expected
                and _can_be_exchanged(names[partner], problems.get(partner), problem)
            }
        exchanged_with = partners[kind].get(names[path].index) or min(
            partners[kind].values(), default=""
        )
        is_judged = (
            problem is NO_TENSORS
            or (is_of_library and not problem.may_be_of_script)
            or (is_pretrained_model and problem.expected is Content.MODEL)
        )
        finding: type[WrongState | UnknownState]
        if problem.content is not None:
            finding, effects = WrongState, EFFECTS_ON_LIBRARIES
        elif exchanged_with or is_judged:
            finding, effects = UnknownState, EFFECTS_ON_TORCH
        else:
            continue
        is_of_save_state = problem.expected is Content.MODEL and folder.is_save_state
        yield finding(
            path=path,
            holds=problem.holds,
            expected=problem.expected.value,
            effect=problem.effect
            or ("load_state fails" if is_of_save_state else effects[problem.expected]),
            exchanged_with=exchanged_with,
            remedy=remedy_for_placeholders(folder) if is_placeholder else problem.remedy,
        )


def _problems(case: Case) -> dict[PurePosixPath, StateProblem]:
    """Return the files whose content is not what their name promises, with what is wrong."""
    problems = {
        component.path: problem
        for component in case.folder.components
        if isinstance(component.content, TorchFile)
        and (problem := state_problem(component.name, component.content)) is not None
    }
    problems |= {component.path: NO_TENSORS for component in weights_without_tensors(case.folder)}
    return problems | {
        component.path: problem
        for component, _, problem in case.placeholders
        if is_weights_file(component.name)
    }


def _can_be_exchanged(
    partner: FileName, of_partner: StateProblem | None, problem: StateProblem
) -> bool:
    """Return whether a file with the expected state was exchanged with the file of a problem.

    ``of_partner``: what is wrong with it, too. The file of a custom object may rightly hold
    anything. It is often a module: its weights prove no exchange.
    """
    if of_partner is not None and of_partner.expected is problem.content:
        return True
    return (
        partner.role is Role.CUSTOM
        and (problem.content is None or problem.expected is Content.RANDOM_STATES)
        and problem.expected is not Content.MODEL
    )


def diagnose_dead_scalers(case: Case) -> Iterator[DeadScaler]:
    """Yield the gradient scalers with which a run goes on without an error, and trains nothing.

    Measured with torch 2.13. With a scale of 0 the gradients are finite, so that the step is made;
    divided by 0 they are NaN, and so are all weights. With NaN or infinity every step is skipped.
    ``backoff_factor`` leaves such a scale. The product with ``growth_factor`` counts where it
    is finite, so that NaN and infinity do no harm. Nor does a negative number: it is divided out.
    """
    for component in case.folder.components:
        file = component.content
        if (
            component.role is not Role.GRAD_SCALER
            or not isinstance(file, TorchFile)
            or content_of(file) is not Content.GRAD_SCALER
        ):
            continue
        for name in ("scale", "backoff_factor", "growth_factor"):
            value = child(file.tree.root, name)
            # Whole numbers of a pickle can be too large for a float.
            is_zero = type(value) in (bool, int, float) and value == 0
            is_endless = type(value) is float and not isfinite(value)
            if is_zero or (is_endless and name != "growth_factor"):
                yield DeadScaler(path=component.path, name=name, value=value)
                break


def diagnose_wrong_folders(case: Case) -> Iterator[WrongState]:
    """Yield the DCP folders under a name of accelerate that plainly hold the state of the other
    role, as after a copy of the wrong folder.

    Accelerate saves ``{"model": ...}`` and ``{"optimizer": ...}``, and loads only these keys
    (``utils/fsdp_utils.py``, 1.0 to 1.15). Other tools use the names with other keys, and may save
    both states in a folder.
    """
    for state in case.sharded:
        # Of most folders no key is looked at.
        if (
            state.name is None
            or state.metadata is None
            or (state.name.role is Role.MODEL) is (state.model is not None)
        ):
            continue
        paths = set(paths_of(state.metadata).values())
        optimizers = {*optimizers_in(paths), *flattened_optimizers(paths)}
        if state.name.role is Role.OPTIMIZER:
            is_wrong = not optimizers and all(path[:1] == (MODEL_KEY,) for path in paths)
            holds, expected = Content.MODEL, Content.OPTIMIZER
        else:
            is_wrong = bool(paths) and all(
                any(path[: len(prefix)] == prefix for prefix in optimizers) for path in paths
            )
            holds, expected = Content.OPTIMIZER, Content.MODEL
        if is_wrong:
            yield WrongState(
                path=state.path,
                holds=holds.value,
                expected=expected.value,
                effect="the load fails",
                remedy="copy the folder again from its source, or use an older checkpoint",
            )


_NOUNS = {
    Role.MODEL: "a model",
    Role.OPTIMIZER: "an optimizer",
    Role.SCHEDULER: "a scheduler",
    Role.SAMPLER: "a sampler",
    Role.DATALOADER: "a data loader",
    Role.GRAD_SCALER: "a gradient scaler",
    Role.RNG_STATE: Content.RANDOM_STATES.value,
    Role.CUSTOM: "a custom object",
    Role.TRAINING_ARGUMENTS: "the Trainer's training arguments",
}
"""The states that accelerate and the Trainer save in files of torch."""

_ON_RENAMED = "load_state fails, or gives an object the state of another object"
_ON_RENAMED_BY_TRAINER = "the Trainer's resume fails"
_ON_EXCHANGED_RANKS = "the Trainer gives a process the random states of another process"


def diagnose_renamed(case: Case) -> Iterator[WrongState | UnknownState | Explained]:
    """Yield the states under the name of another file that is there."""
    for finding in _renamed(case.folder, case.paths(*DAMAGED_CONTENT)):
        yield finding
        # To allow the classes of a file that was exchanged would load the wrong state.
        yield Explained(UnloadablePickle, finding.path)


def _renamed(
    folder: CheckpointFolder, known: Collection[PurePosixPath]
) -> Iterator[WrongState | UnknownState]:
    """Yield the states of ``save_state`` or the Trainer that were saved under the name of another
    file that is there.

    ``torch.save`` names the folder in its zip file after the file (torch 2.13):
    ``random_states_0/data.pkl``. The name stays when the file is copied, renamed or repaired. In
    420 saves of accelerate 1.6 to 1.15 each state has its own. So the files of registered objects
    can be judged, though a class may save anything: one that keeps its own random states has them
    under its own name. A file that was written to a stream has ``archive``.

    A renamed file is healthy where a script has an object less, so that all later ones moved up,
    and where it prepares what it registered before. Then the name in the file is that of no file
    which is still there. ``known``: files whose content has another finding.
    """
    components = {
        component.path: component
        for component in folder.components
        if component.role in _NOUNS and component.name.is_state_file
    }
    is_of_accelerate = folder.is_save_state or any(
        one.role is Role.CUSTOM for one in components.values()
    )
    # Next to states of accelerate the names of the Trainer are a script's, and without them those
    # of accelerate are.
    components = {
        path: one
        for path, one in components.items()
        if one.name.is_of_trainer is not is_of_accelerate
    }
    files = {
        path: one.content for path, one in components.items() if isinstance(one.content, TorchFile)
    }
    saved_as = {
        path: file.container.root
        for path, file in files.items()
        if isinstance(file.container, TorchZip)
    }
    by_stem = {path.stem: path for path in saved_as}
    effect = _ON_RENAMED if is_of_accelerate else _ON_RENAMED_BY_TRAINER
    for path, file in files.items():
        role, name = components[path].role, saved_as.get(path, "")
        if path in known or name == path.stem:
            continue
        partner = by_stem.get(name)
        if partner is not None:
            is_exchanged = saved_as[partner] == path.stem
            is_copy = saved_as[partner] == name
            is_reported = is_exchanged and (partner in known or partner < path)
            is_same_role = role is components[partner].role
            # A copy of another state of its role is compared with it elsewhere: it is a duplicate.
            # A registered module may be exported: its copy is under a model's name. No resume reads
            # training arguments.
            is_free = role in (Role.MODEL, Role.TRAINING_ARGUMENTS)
            is_judged = is_exchanged or (role is Role.CUSTOM if is_same_role else not is_free)
            if is_copy and role is Role.RNG_STATE:
                yield CopiedRandomStates(
                    path=path,
                    holds=f"the random states of {partner}, so two processes draw the same numbers",
                    expected="its own",
                    effect="the load succeeds",
                )
            elif (is_exchanged or is_copy) and is_judged and not is_reported:
                yield (RenamedState if is_same_role else WrongState)(
                    path=path,
                    holds=f"{_noun_of(components[partner])}, saved as {partner}",
                    expected="its own state" if is_same_role else _noun_of(components[path]),
                    effect=effect if is_of_accelerate or not is_same_role else _ON_EXCHANGED_RANKS,
                    exchanged_with=str(partner) if is_exchanged else "",
                )
        elif role is Role.CUSTOM and _has_random_states(file):
            parsed = parse_file_name(f"{name}.pkl")
            is_certain = parsed is not None and parsed.role is Role.RNG_STATE
            yield (WrongState if is_certain else UnknownState)(
                path=path, holds=_NOUNS[Role.RNG_STATE], expected=_NOUNS[role], effect=_ON_RENAMED
            )


def _noun_of(component: Component) -> str:
    if component.role is Role.RNG_STATE and component.name.is_of_trainer:
        return Content.TRAINER_RANDOM_STATES.value
    return _NOUNS[component.role]


def _has_random_states(file: TorchFile) -> bool:
    """Return whether a file has all keys of accelerate's random states, with its step."""
    return content_of(file) is Content.RANDOM_STATES and not _lacks_step(file)


def _lacks_step(file: TorchFile) -> bool:
    """Return whether a file has random states of accelerate without the step of the Accelerator."""
    if content_of(file) is not Content.RANDOM_STATES:
        return False
    return "step" not in text_keys(file.tree.root)


def diagnose_meta_tensors(case: Case) -> Iterator[UnknownState]:
    """Yield the states without numbers in files whose content a script chooses. No loader knows
    their names.
    """
    for path, file in _files_of_scripts(case.folder):
        for key, problem in problems_inside(file):
            yield UnknownState(
                path=path,
                key=key,
                holds=problem.holds,
                expected=problem.expected.value,
                effect="load_state_dict fails, unless the model is on the meta device too",
                remedy=problem.remedy,
            )


def unread_weights(case: Case) -> Iterator[str]:
    """Yield in words what no library reads in weights under a name that libraries look for: only a
    script can.
    """
    if case.is_file:
        return
    folder = case.folder
    told = {finding.path for finding in case.findings if finding.severity is not Severity.NOTE}
    for component in folder.components:
        file, path = component.content, component.path
        if not isinstance(file, TorchFile) or not is_weights_file(component.name) or path in told:
            continue
        problem = state_problem(component.name, file)
        hidden = [key for state_dict in file.state_dicts for key in state_dict.opaque_keys]
        if problem is not None:
            yield (
                f"whether a script reads {path} itself: it holds {problem.holds}, but libraries "
                "expect a state dict in a file of this name"
            )
        elif hidden and may_hide_weights(file):
            yield f"values of {path} that are not plain tensors: {list_names(hidden)}"
        elif holds_no_tensor(file) and not folder.is_save_state:
            yield f"whether {path} lost its tensors: it has none"


OF_KEYS = "whether tensors and param groups match the script"
"""Beginning of the sentence about what no file of a checkpoint shows."""


def unchecked_weights(case: Case) -> Iterator[str]:
    """Yield in words what of weights and optimizers only the script that loads them shows."""
    folder = case.folder
    is_loaded = folder.is_save_state and any(
        component.name.load_order is not None for component in folder.components
    )
    is_loaded |= any(file.state_dicts for _, file in _files_of_scripts(folder))
    if is_loaded or case.every_optimizer:
        # A layer whose keys alone begin with "module.", or without one of its buffers. Param groups
        # in another order, whose moments a load gives to other parameters.
        yield f"{OF_KEYS}: keys, shapes, dtypes and order; the load compares keys and shapes"
    if case.is_file or not folder.is_save_state:
        return
    has_optimizer = any(component.role is Role.OPTIMIZER for component in folder.components)
    for component in folder.components:
        file = component.content
        if component.name.load_order is None or not isinstance(file, SafetensorsFile | TorchFile):
            continue
        if holds_no_tensor(file) and not has_optimizer:
            yield (
                f"whether {component.path} lost its tensors: it has none, like a module without "
                "parameters"
            )


def diagnose_keys(case: Case) -> Iterator[UnknownState]:
    """Yield the states in files of scripts that lie under the key of another kind, as two exchanged
    ones do.

    The script chooses the keys, and reads them: no name that a library looks for is wrong.
    """
    for path, file in _files_of_scripts(case.folder):
        problems = list(states_under_other_keys(file))
        for keys, problem in problems:
            partner = next(
                (
                    ".".join(there)
                    for there, reverse in problems
                    if (reverse.expected, reverse.content) == (problem.content, problem.expected)
                ),
                "",
            )
            name = ".".join(keys)
            exchange = (
                f"load the file with torch, swap the values under {name} and {partner}, and save it"
            )
            yield UnknownState(
                path=path,
                key=name,
                holds=problem.holds,
                expected=problem.expected.value,
                effect=_EFFECTS_OF_KEYS[problem.expected],
                exchanged_with=partner,
                remedy=exchange if partner else "",
            )


_EFFECTS_OF_KEYS = EFFECTS_ON_TORCH | {Content.MODEL: "load_state_dict of a model fails"}

_FREE = (Role.MODEL, Role.UNKNOWN, Role.CUSTOM)


def _files_of_scripts(folder: CheckpointFolder) -> Iterator[tuple[PurePosixPath, TorchFile]]:
    """Yield the files whose content a script chooses."""
    for component in folder.components:
        is_free = component.role in _FREE and not is_weights_file(component.name)
        if is_free and isinstance(component.content, TorchFile):
            yield component.path, component.content


def _is_pretrained(folder: CheckpointFolder) -> bool:
    return any(map(folder.has_file, (CONFIG, ADAPTER))) and is_pretrained(folder.root)

"""State files that hold something else than their names promise, and what their loaders do with them."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import TRAINER_STATE, Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, is_pretrained
from ckptfix.checkpoint.state_contents import (
    NO_TENSORS,
    Content,
    content_of,
    holds_no_tensor,
    is_weights_file,
    state_problem,
)
from ckptfix.diagnosis.findings.inconsistent import UnknownState, WrongState
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile

_EFFECTS = {
    Content.OPTIMIZER: "the load fails",
    Content.SCHEDULER: "the load fails, or the scheduler starts anew without an error",
    Content.GRAD_SCALER: "the load fails in a run with fp16",
    Content.RANDOM_STATES: "load_state leaves random states as they are, and reports no error",
    Content.TRAINER_RANDOM_STATES: "the Trainer's resume fails",
    Content.SAMPLER: "the data loader cannot use it",
    Content.DATALOADER: "the data loader cannot use it",
    Content.MODEL: "from_pretrained and the Trainer fail, or leave the weights random without an error",
}
"""Consequences of a wrong content for a load, by the content that the name of the file promises."""

EFFECTS_ON_TORCH = _EFFECTS | {
    Content.OPTIMIZER: "torch's optimizers cannot load it",
    Content.SCHEDULER: "torch's schedulers cannot load it",
}
"""Consequences of an unknown content, which a class of the script may read."""


def diagnose_wrong_states(folder: CheckpointFolder) -> Iterator[WrongState | UnknownState]:
    """Yield the files of a folder that hold something else than their names promise."""
    components = folder.components
    files = {item.path: item.content for item in components if isinstance(item.content, TorchFile)}
    names = {item.path: item.name for item in components}
    judged = {path: state_problem(names[path], file) for path, file in files.items()}
    problems = {path: problem for path, problem in judged.items() if problem is not None}
    problems |= dict.fromkeys(_without_tensors(folder), NO_TENSORS)
    if not problems:
        return
    contents = {path: content_of(file) for path, file in files.items()}
    is_pretrained_model = _is_pretrained(folder)
    # Scripts give such names to files of their own: an unknown content is judged where a library wrote the folder.
    is_of_library = (
        bool(folder.ranks)
        or folder.has_file(TRAINER_STATE)
        or any(name.is_of_trainer and name.role is Role.RNG_STATE for name in folder.file_names)
    )
    for path, problem in problems.items():
        # The right state is where this one belongs. The file of a custom object may rightly hold anything.
        partners = [
            (names[partner].index != names[path].index, str(partner))
            for partner, content in contents.items()
            if content is problem.expected
            and (
                (partner in problems and problems[partner].expected is problem.content)
                or (
                    names[partner].role is Role.CUSTOM
                    and (problem.content is None or content is Content.RANDOM_STATES)
                    # A custom object is often a module: its weights prove no exchange.
                    and content is not Content.MODEL
                )
            )
        ]
        exchanged_with = min(partners)[1] if partners else ""
        is_judged = (
            problem is NO_TENSORS
            or (is_of_library and problem.expected is not Content.GRAD_SCALER)
            or (is_pretrained_model and problem.expected is Content.MODEL)
        )
        finding: type[WrongState | UnknownState]
        if problem.content is not None:
            finding, effects = WrongState, _EFFECTS
        elif exchanged_with or is_judged:
            finding, effects = UnknownState, EFFECTS_ON_TORCH
        else:
            continue
        is_of_save_state = problem.expected is Content.MODEL and folder.is_save_state
        yield finding(
            path=path,
            holds=problem.holds,
            expected=problem.expected.value,
            effect="load_state fails" if is_of_save_state else effects[problem.expected],
            exchanged_with=exchanged_with,
            remedy=problem.remedy,
        )


def _is_pretrained(folder: CheckpointFolder) -> bool:
    return any(map(folder.has_file, (CONFIG, ADAPTER))) and is_pretrained(folder.root)


def _without_tensors(folder: CheckpointFolder) -> Iterator[PurePosixPath]:
    """Yield the weights files without a tensor of models that surely have one.

    ``save_state`` leaves such a file for a module without parameters, such as a loss. The models of the Trainer and of
    ``from_pretrained`` have weights, and so has one that is stored in other files, too.
    """
    empty = [
        component
        for component in folder.components
        if isinstance(component.content, SafetensorsFile | TorchFile)
        and is_weights_file(component.name)
        and component.name.shard is None
        and holds_no_tensor(component.content)
    ]
    if not empty:
        return
    has_weights = folder.has_file(TRAINER_STATE) or _is_pretrained(folder)
    for component in empty:
        is_stored_elsewhere = any(
            file.tensors
            and (file.name.model, file.name.index) == (component.name.model, component.name.index)
            for file in folder.components
        )
        if has_weights or is_stored_elsewhere:
            yield component.path

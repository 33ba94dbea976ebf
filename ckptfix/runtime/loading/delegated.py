"""FSDP, DeepSpeed and Megatron-LM: accelerate loads, after every file was looked at."""

import warnings
from pathlib import Path
from typing import Any

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_globals import GlobalSafety, classify
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.runtime.loading.agreeing import agree
from ckptfix.runtime.loading.allowing import resolve
from ckptfix.runtime.loading.draft import Draft
from ckptfix.runtime.loading.policy import LoadPolicy, Part
from ckptfix.runtime.loading.report import ComponentReport, LoadError, LoadReport, Status
from ckptfix.storage.reading import open_reader

_PICKLES = (".pt", ".bin", ".pkl", ".pth", ".metadata")


def load_delegated(accelerator: Any, root: Path, policy: LoadPolicy) -> LoadReport:
    """Refuse damaged files and pickles that can run code, on all ranks alike; then call ``accelerator.load_state``.

    Of the policy ``trust`` alone counts. What sharded loading itself does cannot be staged: when it fails, parts may be
    modified. Raises LoadError.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    error: Exception | None = None
    draft = Draft(path=root, policy=policy)
    try:
        if not root.is_dir():
            raise LoadError(f"{root} is no folder")
        damage, code = _look(scan_folder(root))
        if wrong := damage + ([] if policy.trust else code):
            raise LoadError(f"{root} was not loaded, nothing was modified:\n  " + "\n  ".join(wrong))
        for text in code:
            warnings.warn(
                f"code in a pickle is executed, because trust=True: {text}", UserWarning, stacklevel=3
            )
    except LoadError as problem:
        error = problem
    except Exception as problem:  # told to the other ranks first: they would wait for ever
        error = LoadError(f"{root}: {type(problem).__name__}: {problem}")
        error.__cause__ = problem
    agree(accelerator, error)
    try:
        accelerator.load_state(str(root))
    except Exception as problem:  # whatever the engine raises; parts of it may be loaded
        error = LoadError(f"{root}: {kind} could not load it: {problem}", modified=True)
        error.__cause__ = problem
    agree(accelerator, error)
    reason = f"by accelerator.load_state ({kind}); its files were looked at, its names were not mapped"
    registries = (
        (Part.MODELS, accelerator._models),
        (Part.OPTIMIZERS, accelerator._optimizers),
        (Part.SCHEDULERS, accelerator._schedulers),
        (Part.CUSTOM, accelerator._custom_objects),
    )
    for part, things in registries:
        for index, thing in enumerate(things):
            draft.others.append(
                ComponentReport(
                    part=part, status=Status.RESTORED, index=index, what=type(thing).__name__, reason=reason
                )
            )
    return draft.report()


def _look(folder: CheckpointFolder) -> tuple[list[str], list[str]]:
    """Return in words which files are damaged, and which need code: stock accelerate unpickles some of them in full."""
    damage, code = [], []
    for component in folder.components:
        if component.role is Role.UNKNOWN:
            continue  # a file that load_state never reads
        if component.problem is not None:
            damage.append(f"{component.path}: {component.problem.kind.value}: {component.problem.message}")
        elif isinstance(component.content, TorchFile):
            _, refused = resolve(component.content.tree.globals)
            named = ", ".join(f"{module}.{name}" for module, name in sorted(refused))
            if named:
                code.append(
                    f"{component.path} needs {named}; next, when you trust it: LoadPolicy(trust=True)"
                )
    for name, what in folder.subfolders.items():
        if what == PLAIN_FOLDER:
            continue
        for file in sorted((folder.root / name).rglob("*")):
            if file.is_file() and file.name.endswith(_PICKLES):
                try:
                    code += _unsafe(file)
                except FormatError as error:
                    damage.append(f"{file}: {error}")
    return damage, code


def _unsafe(file: Path) -> list[str]:
    """Look for code in a file of DCP or DeepSpeed, whose own classes are fine. Raises FormatError."""
    with open_reader(file) as reader:
        found = read_torch_file(reader).tree.globals
    unsafe = [f"{module}.{name}" for module, name in found if classify(module, name) is GlobalSafety.UNSAFE]
    return [f"{file} calls {', '.join(unsafe)}, which can run any code"] if unsafe else []

"""The globals that the loader of each pickle reads beyond torch's ``weights_only`` list, and the
files it refuses.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec import Struct

from ckptfix.checkpoint.deepspeed_files import UNIVERSAL, is_deepspeed_file
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.damaged import (
    ScriptPickle,
    TrainerPickle,
    UnloadablePickle,
    UnsafePickle,
)
from ckptfix.formats.pickle_globals import (
    SAFE_IN_FSDP,
    GlobalSafety,
    can_be_allowed,
    classify,
    refused_arrays,
    safe_globals_line,
    unsafe_globals,
)
from ckptfix.formats.torch_file import TorchFile


class _Arrays(Enum):
    """The numpy arrays that a loader reads, by their dtypes."""

    NONE = "none"
    UINT32 = "uint32 alone, as the states of numpy's generator need"
    EVERY = "every dtype"


class _Objects(Enum):
    """The objects that a loader makes."""

    LISTED = "of the classes on its list"
    OF_CLASSES = "of every class, and nothing made by getattr or its like"
    EVERY = "everything: weights_only=False"


class _Loader(Struct, frozen=True, kw_only=True):
    """A loader, by what it reads beyond the globals on torch's ``weights_only`` list.

    ``globals``, ``packages``: single ones, and all of a package. ``is_plain_read``: whether a
    pickle outside of the containers of ``torch.save`` is nobody's problem. ``has_note``: the
    library pickles its own classes here, so that what plain ``torch.load`` refuses is worth a note.
    """

    arrays: _Arrays = _Arrays.NONE
    objects: _Objects = _Objects.LISTED
    globals: frozenset[tuple[str, str]] = frozenset()
    packages: tuple[str, ...] = ()
    is_plain_read: bool = False
    has_note: bool = False


# torch 2.13, _weights_only_unpickler.py. Weights without states of accelerate next to them, and
# files of scripts.
_TORCH = _Loader()

# accelerate 1.15, utils/other.py: load() adds ndarray, dtype, _reconstruct and the dtype of uint32.
_ACCELERATE = _Loader(arrays=_Arrays.UINT32)

# accelerate 1.15, utils/fsdp_utils.py: torch.load(weights_only=True). torch 2.13 adds classes as
# FSDP2 is imported.
_FSDP_RANK = _Loader(globals=SAFE_IN_FSDP)

# deepspeed 0.18, torch_checkpoint_engine.py: torch.load(weights_only=False). Its own classes are no
# problem.
_DEEPSPEED = _Loader(packages=("deepspeed.",))

_OF_ACCELERATE: Mapping[Role, _Loader] = {
    Role.MODEL: _ACCELERATE,
    Role.OPTIMIZER: _ACCELERATE,
    Role.SCHEDULER: _ACCELERATE,
    Role.DATALOADER: _ACCELERATE,
    Role.GRAD_SCALER: _ACCELERATE,
    Role.RNG_STATE: _ACCELERATE,
    # accelerate 1.15, checkpointing.py: save() pickles the sampler object, and load_state() never
    # reads the file, because it asks for the sampler of an iterable dataset.
    Role.SAMPLER: _Loader(arrays=_Arrays.UINT32, objects=_Objects.OF_CLASSES, is_plain_read=True),
    # accelerate 1.15, checkpointing.py: load_custom_state() sets weights_only=False. torch.load
    # refuses plain pickles with "Invalid magic number" all the same.
    Role.CUSTOM: _Loader(objects=_Objects.EVERY),
    # The guarded Accelerator reads its own files, with every dtype.
    Role.RUN_STATE: _Loader(arrays=_Arrays.EVERY),
}

_OF_TRAINER: Mapping[Role, _Loader] = {
    # transformers 5.23, trainer.py: torch.load(weights_only=True).
    Role.OPTIMIZER: _TORCH,
    Role.SCHEDULER: _TORCH,
    # transformers 5.23, trainer_pt_utils.py: safe_globals() adds what accelerate's load() adds.
    Role.RNG_STATE: _Loader(arrays=_Arrays.UINT32, has_note=True),
    # transformers 5.23, trainer.py: _save() pickles the object; only scripts read it, with
    # weights_only=False.
    Role.TRAINING_ARGUMENTS: _Loader(objects=_Objects.EVERY, has_note=True),
}


def _loader_of(component: Component, *, is_plain_model: bool) -> _Loader:
    name = component.path.name
    if is_deepspeed_file(name) or component.path.parent.name == str(UNIVERSAL):
        return _DEEPSPEED
    if parse_rank_file_name(name) is not None:
        return _FSDP_RANK
    if component.name.is_of_trainer:
        return _OF_TRAINER[component.role]
    # The Trainer reads its ``scaler.pt`` so, too (transformers 5.23, trainer.py).
    if component.role in (Role.MODEL, Role.GRAD_SCALER) and is_plain_model:
        return _TORCH
    return _OF_ACCELERATE.get(component.role, _TORCH)


def diagnose_pickle(
    component: Component, file: TorchFile, *, is_plain_model: bool, is_of_script: bool
) -> list[Finding]:
    """Find what the loader of a file refuses.

    ``is_plain_model``: no state of accelerate is next to the weights. ``is_of_script``: no library
    looks for the file.
    """
    tree = file.tree
    unsafe = unsafe_globals(tree)
    if unsafe:
        return [UnsafePickle(path=component.path, globals=_dotted(unsafe))]
    loader = _loader_of(component, is_plain_model=is_plain_model)
    levels = {pair: classify(*pair) for pair in tree.globals}
    beyond_torch = [pair for pair, level in levels.items() if level is not GlobalSafety.SAFE]
    # ``getattr`` and its like are left, which this pickle stores and never calls. Nobody can allow
    # them for torch.
    has_makers = GlobalSafety.UNSAFE in levels.values()
    reads_objects = loader.objects is _Objects.EVERY or (
        loader.objects is _Objects.OF_CLASSES and not has_makers
    )
    arrays = refused_arrays(tree) if loader.arrays is _Arrays.UINT32 and not reads_objects else {}
    # The advice about arrays names all that torch needs for them.
    reads_numpy = loader.arrays is not _Arrays.NONE and not arrays
    refused = [
        (module, name)
        for module, name in beyond_torch
        if not reads_objects
        and not (reads_numpy and levels[module, name] is GlobalSafety.SAFE_IN_RNG_STATE)
        and not module.startswith(loader.packages)
        and (module, name) not in loader.globals
    ]
    opcodes = () if reads_objects else tree.refused_opcodes
    is_plain = file.container is None and not loader.is_plain_read
    if not (refused or opcodes or is_plain):
        listed = _dotted(beyond_torch) or tree.refused_opcodes
        return (
            [TrainerPickle(path=component.path, globals=listed)]
            if loader.has_note and listed
            else []
        )
    is_allowable = not (opcodes or is_plain) and all(can_be_allowed(*pair) for pair in refused)
    # A file of torch.save that lost its container, or its head, is no file of pickle.dump.
    is_complete = not (file.tree.persistent or file.trailing)
    kind = ScriptPickle if is_plain and is_of_script and is_complete else UnloadablePickle
    return [
        kind(
            path=component.path,
            globals=_dotted(refused),
            opcodes=opcodes,
            plain=is_plain,
            remedy=safe_globals_line(refused) if is_allowable else "",
            arrays=arrays,
        )
    ]


def _dotted(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module, name in pairs)

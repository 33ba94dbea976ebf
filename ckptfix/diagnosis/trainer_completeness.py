"""Completeness of a checkpoint of transformers' Trainer: states that it starts anew in silence, lost
weights, and a ``trainer_state.json`` from which it cannot resume.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import STEMS_OF_LIBRARIES, TRAINER_STATE, weights_names
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import TRAINER, checkpoint_number
from ckptfix.checkpoint.hidden_files import HiddenFile, has_weights_of
from ckptfix.checkpoint.latest import holds_weights
from ckptfix.checkpoint.manifest import read_migrated
from ckptfix.checkpoint.model_configs import (
    ADAPTER,
    CONFIG,
    GENERATION,
    NO_OBJECT,
    PIPELINE,
    broken_config,
    broken_lists,
    components_of_other_classes,
    is_empty_config,
    library_of,
    read_config,
)
from ckptfix.checkpoint.neighbours import parts_of
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import (
    MissingState,
    adapter_without_config,
    lost_weights,
    missing_among,
    random_states,
)
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.config_faults import LostAdapter
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint, RandomStatesLeftOut
from ckptfix.diagnosis.unresumable import FOREIGN, paths_of_states
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import AnyPath, absolute
from ckptfix.storage.paths import leads_nowhere

_RESUMED = (Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE)
"""Roles that the Trainer starts anew in silence when their file is missing (``_load_rng_state`` and
the like).
"""

_ADAPTER_WEIGHTS, *_ = weights_names("peft")
_DEFAULTS = "from_pretrained takes default settings for generation without an error"

_READ_BY = {
    CONFIG: ("from_pretrained fails", "the Trainer and from_pretrained fail"),
    ADAPTER: ("PeftModel.from_pretrained fails", "PeftModel.from_pretrained fails"),
    GENERATION: (_DEFAULTS, _DEFAULTS),
}
"""The loads that fail without a config, and with one that is not JSON (transformers 5.23, peft
0.21).
"""


def _lacks_type(config: AnyPath) -> bool:
    """Return whether an object in a config does not say of which type an adapter is. PEFT raises
    KeyError, also for a name in small letters: all 45 of PEFT 0.21 are in capitals.
    """
    values = read_config(config.parent, config.name)
    kind = values.get("peft_type")
    return is_empty_config(config) or (
        bool(values) and (not isinstance(kind, str) or kind != kind.upper())
    )


def incomplete_of_trainer(
    folder: CheckpointFolder, hidden: Sequence[HiddenFile], *, has_deepspeed: bool
) -> Iterator[Finding]:
    """Yield the states that transformers' Trainer writes together with those that exist
    (``Trainer._save_checkpoint``).

    Weights and ``training_args.bin`` alone are an export, or a checkpoint of ``save_only_model``:
    nothing is missing. Nor is it from the states of ranks alone that a node other than the first
    has on a disk of its own.
    """
    # Also the names of sub-folders.
    names = [path.name for path in (*paths_of_states(folder), *folder.strays)]
    is_of_library = any(
        one.name.is_of_library or one.name.is_of_trainer for one in folder.components
    )
    of_diffusers = STEMS_OF_LIBRARIES["diffusers"][".bin"]
    models = (one.name.model for one in folder.components)
    stems = {model.stem for model in models if model is not None}
    is_of_diffusers = not stems.isdisjoint(of_diffusers)
    is_of_peft = not stems.isdisjoint(STEMS_OF_LIBRARIES["peft"][".bin"])
    for name, (without, with_wrong) in _READ_BY.items() if is_of_library else ():
        nowhere = leads_nowhere(folder.root / name) if name in names else ""
        broken = nowhere or (broken_config(folder.root / name) if name in names else "")
        effect = without if nowhere else with_wrong
        # diffusers always writes the class. PyTorchModelHubMixin writes {} for a model without
        # arguments.
        if (
            not broken
            and name == CONFIG in names
            and is_of_diffusers
            and is_empty_config(folder.root / name)
        ):
            broken, effect = (
                "an empty JSON object",
                "from_pretrained makes a model of the default sizes",
            )
        if name == GENERATION and broken == NO_OBJECT:
            effect = "from_pretrained fails"
        # Other libraries write a config of that name, too, next to weights of another name.
        if (
            not broken
            and name == ADAPTER in names
            and is_of_peft
            and _lacks_type(folder.root / name)
        ):
            broken = "no 'peft_type' that PEFT knows"
        if broken:
            yield IncompleteCheckpoint(
                path=PurePosixPath(name),
                missing=(name,),
                known_by="it cannot be read",
                of_trainer=True,
                problem=f"{broken}, so {effect}",
                is_wrong=True,
            )
    wrong_lists = list(broken_lists(folder.root))
    if PIPELINE in names:
        wrong_lists += [(PIPELINE, why) for why in components_of_other_classes(folder.root)]
    for name, why in wrong_lists:
        path = PurePosixPath(name)
        yield IncompleteCheckpoint(
            path=path, missing=(name,), known_by=why, problem=why, is_wrong=True
        )
    is_hidden = any(file.wanted in (CONFIG, ADAPTER) for file in hidden)
    own = {one.name.role: one.path.name for one in folder.components if one.name.is_of_trainer}
    parts = parts_of(paths_of_states(folder))
    weights = _weights_lost_by_trainer(folder, own, names)
    if weights is not None:
        yield weights
    elif (own or not parts) and (adapter := adapter_without_config(names)) and not is_hidden:
        yield IncompleteCheckpoint(
            path=PurePosixPath(ADAPTER),
            missing=(ADAPTER,),
            known_by=f"PEFT needs it to load {adapter}",
            of_trainer=bool(own),
        )
    # The weights of an adapter that was merged are often deleted without its config.
    if (
        {CONFIG, ADAPTER} <= set(names)
        and has_weights_of(CONFIG, names)
        and not has_weights_of(ADAPTER, names)
        and library_of(read_config(folder.root, ADAPTER)) == "peft"
        and not is_hidden
        and not any(_ADAPTER_WEIGHTS in name for name in names)
    ):
        yield LostAdapter(
            path=PurePosixPath(_ADAPTER_WEIGHTS),
            missing=(_ADAPTER_WEIGHTS,),
            known_by=f"{ADAPTER} describes an adapter",
        )
    # PEFT finds no adapter in the file, and transformers 5.23's Trainer resumes with new weights.
    if (
        {TRAINER_STATE, ADAPTER} <= set(names)
        and CONFIG not in names
        and not has_weights_of(ADAPTER, names)
        and library_of(read_config(folder.root, ADAPTER)) == "peft"
        and not is_hidden
        and (misnamed := _adapter_as_model(folder)) is not None
    ):
        yield IncompleteCheckpoint(
            path=PurePosixPath(_ADAPTER_WEIGHTS),
            missing=(_ADAPTER_WEIGHTS,),
            known_by=f"{ADAPTER} exists, and the keys in {misnamed} are those of an adapter",
            of_trainer=bool(own),
        )
    # ``save_pretrained`` writes both configs.
    if (
        GENERATION in names
        and CONFIG not in names
        and has_weights_of(CONFIG, names)
        and not is_hidden
    ):
        yield IncompleteCheckpoint(
            path=PurePosixPath(CONFIG),
            missing=(CONFIG,),
            known_by=f"save_pretrained writes it with {GENERATION}",
        )
    states = {role: name for (role, _), name in parts.items() if role in _RESUMED}
    if not states or not own.keys() & {Role.RNG_STATE, Role.TRAINING_ARGUMENTS}:
        return
    there = own.get(Role.RNG_STATE) or next(iter(states.values()))
    ranks = {one.name.rank for one in folder.components if one.name.role is Role.RNG_STATE}
    numbered = {rank for rank in ranks if rank is not None}
    if (
        ranks
        and not ranks & {None, 0}
        and states.keys() == {Role.RNG_STATE}
        and (Role.MODEL, 0) not in parts
    ):
        return
    gap = tuple(
        random_states(rank) for rank in range(max(numbered, default=0)) if rank not in ranks
    )
    if gap:
        yield _lost_by_trainer(gap, there, by_rank=True)
    if renamed := _renamed_random_states(folder):
        yield IncompleteCheckpoint(
            path=PurePosixPath(random_states(None)),
            missing=(random_states(None),),
            known_by=f"a run of one process saved {renamed} under this name",
            of_trainer=True,
            misnamed=renamed,
        )
    lost = () if Role.RNG_STATE in states else (random_states(None),)
    found = missing_among(names, lost, has_deepspeed=has_deepspeed)
    # A scheduler without its optimizer is no sign of the Trainer alone, and has been reported.
    known = {Role.OPTIMIZER} if Role.SCHEDULER in states else set()
    if not ranks and read_migrated(folder.root).lacks_random_states:
        known.add(Role.RNG_STATE)
        name = random_states(None)
        yield RandomStatesLeftOut(
            path=PurePosixPath(name),
            missing=(name,),
            known_by="ckptfix migrate left it out, because the number of processes changed",
            of_trainer=True,
        )
    missing = [one.name for one in sorted(found, key=_as_said) if one.role not in known]
    if all(path.name != TRAINER_STATE for path in folder.strays):
        missing.insert(0, TRAINER_STATE)
    if missing:
        yield _lost_by_trainer(tuple(missing), there)


def _renamed_random_states(folder: CheckpointFolder) -> str:
    """Return the only random states of the Trainer where they are those of a single process with a
    rank, else "".

    ``torch.save`` writes the name of the file into it. With one process the Trainer reads
    ``rng_state.pth`` alone, and without it goes on with new random states
    (``Trainer._load_rng_state``, transformers 5.23).
    """
    states = [
        one for one in folder.components if one.role is Role.RNG_STATE and one.name.is_of_trainer
    ]
    if len(states) != 1 or states[0].name.rank is None:
        return ""
    content = states[0].content
    container = content.container if isinstance(content, TorchFile) else None
    is_of_one = isinstance(container, TorchZip) and f"{container.root}.pth" == random_states(None)
    return str(states[0].path) if is_of_one else ""


def _adapter_as_model(folder: CheckpointFolder) -> PurePosixPath | None:
    """Return the file of a model in which every key is that of an adapter."""
    return next(
        (
            file.path
            for file in folder.components
            if file.role is Role.MODEL
            and file.tensors
            and all(tensor.fqn.startswith("base_model.") for tensor in file.tensors)
        ),
        None,
    )


def _weights_lost_by_trainer(
    folder: CheckpointFolder, own: Mapping[Role, str], names: Collection[str]
) -> IncompleteCheckpoint | None:
    """Return the finding about a checkpoint or an export of the Trainer without weights, None for
    any other folder.

    ``own``: the states that the Trainer alone writes. It saves its arguments together with the
    weights, even in an export; a script may keep arguments of its own under that name, and an
    optimizer away from its model.
    """
    ranks = {one.name.rank for one in folder.components if one.name.role is Role.RNG_STATE}
    if own.keys() == {Role.RNG_STATE} and not ranks & {None, 0}:
        return None  # the states of ranks on the disk of another node
    is_saved_by_trainer = len(own) > 1 or (own and not {*FOREIGN}.isdisjoint(names))
    if not is_saved_by_trainer or holds_weights(folder.root, names):
        return None
    shown = next(role for role in (*_RESUMED, Role.TRAINING_ARGUMENTS) if role in own)
    lost = lost_weights(names)
    return IncompleteCheckpoint(
        path=PurePosixPath(lost),
        missing=(lost,),
        known_by=f"{own[shown]} shows that the Trainer saved here, but no file has weights",
        of_trainer=True,
    )


OTHER_FIELDS = f"fields of {TRAINER_STATE} other than its step"
"""Beginning of the sentence about what only the Trainer reads."""


def broken_trainer_state(case: Case) -> Iterator[Finding | str]:
    """Yield a ``trainer_state.json`` from which the Trainer cannot resume, though all weights may
    be intact.

    Next to random states of Accelerate it is a file of a script, whatever it holds. Its step is
    only judged where the name of the folder or another file is the Trainer's.
    """
    folder, trainer = case.folder, case.trainer
    yield from trainer.unchecked
    if trainer.step is not None:
        yield f"{OTHER_FIELDS}; another version of transformers may refuse them"
    name = absolute(folder.root).name
    is_of_trainer = checkpoint_number(name, TRAINER) is not None or any(
        one.name.is_of_trainer for one in folder.components
    )
    if not folder.is_save_state and (trainer.is_broken or (trainer.is_wrong and is_of_trainer)):
        yield IncompleteCheckpoint(
            path=PurePosixPath(TRAINER_STATE),
            missing=(TRAINER_STATE,),
            known_by="it cannot be read" if trainer.is_broken else "its step is wrong",
            of_trainer=True,
            problem=trainer.problem,
            is_wrong=trainer.is_wrong,
        )


def _as_said(state: MissingState) -> int:
    return (Role.RNG_STATE, Role.OPTIMIZER, Role.SCHEDULER).index(state.role)


def _lost_by_trainer(
    missing: tuple[str, ...], there: str, *, by_rank: bool = False
) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        path=PurePosixPath(missing[0]),
        missing=missing,
        known_by=f"{there} shows that the Trainer saved its states here",
        by_rank=by_rank,
        of_trainer=True,
    )

"""Files that a loader needs and does not find, because they have another name than the one that it
looks for.

One rule for every loader: the folder shows which loader reads it, no name that the loader looks for
exists, and a file holds what belongs under that name. The names are exact:

- ``load_state`` of accelerate 1.15 (``checkpointing.py``).
- ``Trainer._load_from_checkpoint`` of transformers 5.23: six names, and folders of FSDP and of
  adapters.
- ``from_pretrained`` of transformers 5.23 (``_get_resolved_checkpoint_files``), diffusers 0.42
  (``ModelMixin``) and PEFT 0.21: a config, and weights by the library of the config.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from enum import Enum
from typing import NamedTuple

from ckptfix.checkpoint.filenames import (
    MARK_OF_COPY,
    MODEL_STEMS,
    STEMS_OF_LIBRARIES,
    TRAINER_STATE,
    WEIGHT_KINDS,
    FileName,
    Stems,
    copied_state,
    is_copy_of,
    nearly_state,
    parse_file_name,
)
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name, parse_folder_name
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, library_of_names, may_hold_weights
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.checkpoint.state_contents import content_of, may_be_state
from ckptfix.checkpoint.state_kinds import Content
from ckptfix.formats.safetensors_file import WeightsIndex
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath, is_dir
from ckptfix.storage.paths import JOURNAL


class Loader(Enum):
    """A loader that knows files by their names. The value is its name in messages."""

    LOAD_STATE = "load_state"
    TRAINER = "the Trainer"
    FROM_PRETRAINED = "from_pretrained"


class HiddenFile(NamedTuple):
    """A file that a loader needs and does not find: its name, the name that the loader looks for,
    and the evidence.

    ``is_certain``: off for a file of a name that a script or another loader may look for on
    purpose. ``content``: its content in words.
    """

    name: str
    wanted: str
    loader: Loader
    known_by: str
    is_certain: bool = True
    content: str = "weights"


_COUNTED = re.compile(r"custom_checkpoint_\d+\.pkl")
"""Names of which ``load_state`` wants as many as there are registered objects (``accelerator.py``).
"""

_OPTIMIZER, _FSDP = "optimizer.pt", "pytorch_model_fsdp.bin"
_OF_TRANSFORMERS, _OF_ADAPTERS = STEMS_OF_LIBRARIES["transformers"], STEMS_OF_LIBRARIES["peft"]


def hidden_files(folder: CheckpointFolder, neighbours: Neighbours) -> Iterator[HiddenFile]:
    """Yield the files of a folder that its loader does not find by their names, one for each name
    it looks for.

    Random states of accelerate show that ``save_state`` wrote the folder, whatever else a script
    put there.
    """
    hidden: dict[str, HiddenFile] = {}
    # The Trainer's ``scaler.pt`` (fp16) and ``optimizer.bin`` (FSDP) have names of accelerate's
    # states.
    is_of_trainer = folder.has_file(TRAINER_STATE) and not folder.is_save_state
    if not is_of_trainer and _is_of_accelerate(folder):
        misnamed = _hidden_from_load_state(folder, neighbours)
        for file in sorted((*misnamed, *_miscounted(folder)), key=lambda file: not file.is_certain):
            hidden.setdefault(file.wanted, file)
    if not folder.is_save_state:
        paths = (*(one.path for one in folder.components), *folder.strays, *folder.subfolders)
        names = [path.name for path in paths]
        for file in (
            *hidden_from_trainer(folder.root, names),
            *_hidden_from_pretrained(folder.root, names),
            *hidden_configs(folder.root, names),
        ):
            hidden.setdefault(file.wanted, file)
    yield from hidden.values()


def hidden_from_trainer(root: AnyPath, names: Collection[str]) -> Iterator[HiddenFile]:
    """Yield the optimizer and the weights that the Trainer does not find by their names. ``names``:
    all of the folder.

    A subclass may write and read weights under names of its own: a name is certain that a library
    gives to weights, or that has the mark of a copy.
    """
    if TRAINER_STATE not in names:
        return
    if _OPTIMIZER not in names:
        # FSDP alone reads ``optimizer.bin``, and saves it together with its own weights or with
        # folders.
        is_whole = {"optimizer.bin", "scheduler.pt"} <= set(names) and _FSDP not in names
        if is_whole and not _has_folder_of_weights(root, names):
            yield _hidden("optimizer.bin", _OPTIMIZER, Loader.TRAINER)
        return
    has_config = CONFIG in names
    stems = _OF_TRANSFORMERS
    # A resume reads an adapter without its config; a model of transformers has a config of its own.
    if ADAPTER in names and not has_config:
        stems = _joined(_OF_ADAPTERS, _OF_TRANSFORMERS)
    elif ADAPTER in names or not has_config:
        stems = _joined(_OF_TRANSFORMERS, _OF_ADAPTERS)
    if any(_finds(stems, name, takes_variants=False) for name in names) or _has_folder_of_weights(
        root, names
    ):
        return

    file = _hidden_weights(root, names, stems, of_libraries=True, keeps_variant=False)
    if file is not None:
        name, wanted, certain = file
        yield _hidden(name, wanted, Loader.TRAINER, is_certain=certain)


def _hidden_from_pretrained(root: AnyPath, names: Collection[str]) -> Iterator[HiddenFile]:
    """Yield the weights that the library of a config does not find by their name.

    Other programs take a config of transformers and weights of a name of their own, such as
    ``output.safetensors``.
    """
    config = next((name for name in (CONFIG, ADAPTER) if name in names), None)
    library = library_of_names(root / config) if config else ""
    if not library:
        return
    stems = STEMS_OF_LIBRARIES[library]
    known = stems
    if ADAPTER in names:
        known = _joined(known, _OF_ADAPTERS)
    if TRAINER_STATE in names:
        known = _joined(known, _OF_TRANSFORMERS)
    if any(_finds(known, name, takes_variants=True) for name in names):
        return
    file = _hidden_weights(root, names, stems, of_libraries=False, keeps_variant=True)
    if file is not None:
        name, wanted, certain = file
        words = f"{config} belongs to {library}, which does not look for {name!r}"
        yield HiddenFile(name, wanted, Loader.FROM_PRETRAINED, words, is_certain=certain)


def _hidden_weights(
    root: AnyPath,
    names: Collection[str],
    stems: Stems,
    *,
    of_libraries: bool,
    keeps_variant: bool,
) -> tuple[str, str, bool] | None:
    """Return a file with weights, the name that belongs to them, and whether they surely are the
    ones looked for.

    The mark of a copy is certain (``model_old.safetensors``, ``Model (1).bin``). Other additions
    have a meaning for the program that wrote them: ``model-rank-0-part-0.safetensors`` is read by
    vLLM, ``model_ema.safetensors`` by a script. ``of_libraries``: so is every name that a library
    gives to weights.
    """
    parsed = {
        name: meaning for name in sorted(names) if (meaning := parse_file_name(name)) is not None
    }
    has_index = any(meaning.role is Role.WEIGHTS_INDEX for meaning in parsed.values())
    if not has_index and any(meaning.shard for meaning in parsed.values()):
        return None  # the missing index of shards has a finding
    known = {*MODEL_STEMS, *(stem for of_kind in stems.values() for stem in of_kind)}
    # ``model_0.bin`` next to ``model_1.bin`` are the models of an ensemble, not copies.
    alike = Counter(_COUNT.sub("#", name) for name in parsed)

    def is_copy(name: str, kind: str) -> bool:
        return alike[_COUNT.sub("#", name)] == 1 and any(
            _is_copy(name, stem, kind) for stem in known
        )

    uncertain: tuple[str, str, bool] | None = None
    for name, meaning in parsed.items():
        if meaning.role not in NOT_STATES or meaning.shard:
            continue
        kind = next((kind for kind in WEIGHT_KINDS if meaning.suffix.startswith(kind)), None)
        # ``model.fp16.safetensors`` is a variant that only the library of this stem looks for.
        stem, _, variant = meaning.stem.partition(".")
        is_variant = bool(variant) and meaning.is_of_library and stem in known
        is_sure = kind is not None and (
            is_variant or is_copy(name, kind) or (of_libraries and meaning.is_of_library)
        )
        # Of uncertain files the first is named: a folder may have hundreds, and the others need not
        # be read.
        if (uncertain and not is_sure) or not _holds_weights(root, name):
            continue
        of_kind = stems[kind or ".bin"]
        stem = next((stem for stem in of_kind if _is_copy(name, stem, kind or "")), of_kind[0])
        rest = (kind or ".bin") + (".index.json" if meaning.role is Role.WEIGHTS_INDEX else "")
        if keeps_variant and meaning.is_of_library:
            rest = name.removeprefix(meaning.stem.partition(".")[0])
        if is_sure:
            return name, stem + rest, True
        uncertain = name, stem + rest, False
    return uncertain


def hidden_configs(root: AnyPath, names: Collection[str]) -> Iterator[HiddenFile]:
    """Yield the configs of models that ``from_pretrained`` does not find: ``config.json.tmp``,
    ``config (1).json``.
    """
    for wanted in (CONFIG, ADAPTER):
        if wanted in names or not has_weights_of(wanted, names):
            continue
        stem = wanted.removesuffix(".json")
        libraries = ("peft",) if wanted == ADAPTER else ("transformers", "diffusers")
        for name in sorted(names):
            if _is_copy(name, stem, ".json") and library_of_names(root / name) in libraries:
                yield _hidden(name, wanted, Loader.FROM_PRETRAINED)
                break


def has_weights_of(config: str, names: Collection[str]) -> bool:
    """Return whether weights are among names that a library writes together with a config of this
    name.
    """
    stems = ("adapter_model",) if config == ADAPTER else MODEL_STEMS
    parsed = filter(None, map(parse_file_name, names))
    return any(
        meaning.is_of_library and meaning.stem.partition(".")[0] in stems
        for meaning in parsed
        if not meaning.index
    )


def _hidden(name: str, wanted: str, loader: Loader, *, is_certain: bool = True) -> HiddenFile:
    words = f"{name!r} exists, but {loader.value} does not look for that name"
    return HiddenFile(name, wanted, loader, words, is_certain)


def _joined(first: Stems, second: Stems) -> Stems:
    return {kind: (*first[kind], *second[kind]) for kind in first}


def _finds(stems: Stems, name: str, *, takes_variants: bool) -> bool:
    """Return whether a loader of these stems reads a file by its name: weights in one file, or the
    index of shards.

    The Trainer and FSDP's loader find ``pytorch_model_fsdp.bin``.
    """
    meaning = parse_file_name(name)
    if meaning is None or meaning.shard or meaning.index or meaning.role not in NOT_STATES:
        return False
    if name == _FSDP:
        return True
    kind = next((kind for kind in stems if meaning.suffix.startswith(kind)), None)
    stem, _, variant = meaning.stem.partition(".")
    if kind is None or stem not in stems[kind]:
        return False
    return takes_variants or (not variant and meaning.suffix in (kind, f"{kind}.index.json"))


_BETWEEN = r"[\s._-]"
_MARK = (
    rf"(?:{MARK_OF_COPY}|{_BETWEEN}+(?:old|backup|bak|orig|tmp|new))?"
    rf"(?:{_BETWEEN}*\([0-9]{{1,2}}\)|{_BETWEEN}+[0-9]{{1,2}}|~)?"
)
"""Marks of copies: of browsers (`` (1)``), file managers (`` - Copy (2)``), wget (``.1``), editors
and people.
"""

_COUNT = re.compile(r"(?<![(0-9])[0-9]+")


def _is_copy(name: str, stem: str, suffix: str) -> bool:
    """Return whether a name differs from a stem and a suffix by case or by marks of a copy:
    ``Model_old (1).bin``.
    """
    pattern = rf"{stem}{_MARK}{re.escape(suffix)}(?:\.index\.json)?{_MARK}"
    return re.fullmatch(pattern, re.sub(r"[-\s]", "_", name.casefold())) is not None


def _holds_weights(root: AnyPath, name: str) -> bool:
    """Return whether a file has tensors of a model, and not the state of an optimizer or the like,
    or is unreadable.
    """
    for component in scan_folder(root, name).components:
        content = component.content
        if isinstance(content, WeightsIndex):
            return bool(content.weight_map)
        if isinstance(content, TorchFile) and content_of(content) not in (None, Content.MODEL):
            return False
        problem = component.problem
        return bool(component.tensors) or (problem is not None and not problem.is_foreign)
    return False


def _has_folder_of_weights(root: AnyPath, names: Collection[str]) -> bool:
    folders = (root / name for name in names if name != JOURNAL and is_dir(root / name))
    return any(map(may_hold_weights, folders))


def _hidden_from_load_state(
    folder: CheckpointFolder, neighbours: Neighbours
) -> Iterator[HiddenFile]:
    """Yield the files that nearly have the name of a missing state of ``save_state``, and may be
    that state.

    Scripts use such names for files of their own: ``model_01.safetensors`` for an export,
    ``Scaler.pt`` for the mean of their data. So the content must fit, and the other files, or the
    checkpoints next to it, must show that a state is missing. A file that all of these checkpoints
    have by this name is not certain. Nor is one that nothing shows.
    """
    existing = {_part(one.name) for one in folder.components if not one.name.is_of_trainer}
    for path in folder.subfolders:
        state = parse_folder_name(path.name) or parse_deepspeed_folder_name(path.name)
        if state is not None:
            existing.add((state.role, state.index))
        if state is not None and state.is_deepspeed:
            existing.add((Role.OPTIMIZER, state.index))
    count = Counter(role for role, _ in existing)
    reach = Counter(count)
    marked = _marked(folder, existing)
    near: list[frozenset[str]] | None = None
    told: set[str] = set()
    for name, meant, mark in _near_names(folder):
        role, number = _part(meant)
        wanted = str(meant)
        if (
            name in told
            or (role, number) in existing
            or number > reach[role]
            or not _may_be(folder.root, name, meant)
        ):
            continue
        # ``model-1.safetensors`` may be of an epoch, ``model_1_1.safetensors`` of its step, and
        # people make a copy of a model before they delete it. Browsers and file managers give one
        # mark to all files.
        is_mark_of_others = len(marked[mark, number]) > 1 and not mark.startswith("_")
        is_shown = (
            number < count[role]
            or role in _NAMED_BY_ACCELERATE
            or is_mark_of_others
            or (number == 0 and not mark.strip(" _-").isdigit())
            or is_copy_of(wanted, name)
            or any(
                count[more] > count[role] for more in _SHOWN_BY.get(role, ()) if number or not mark
            )
        )
        if near is None:
            near = [
                save.names.every for save in neighbours.folders() if save.names.is_of_save_state
            ]
        is_of_all = bool(near) and all(name in names and wanted not in names for names in near)
        is_of_others = any(wanted in names and name not in names for names in near)
        if is_of_others or (is_shown and not is_of_all):
            told.add(name)
            existing.add((role, number))
            reach[role] = max(reach[role], number + 1)
            yield _hidden(name, wanted, Loader.LOAD_STATE)
        elif is_shown or not is_of_all:
            words = (
                f"load_state does not look for {name!r} and fails in a script that needs {wanted}"
            )
            yield HiddenFile(name, wanted, Loader.LOAD_STATE, words, False, role.value)


def _is_of_accelerate(folder: CheckpointFolder) -> bool:
    """Return whether a state of ``save_state`` is in a folder, or its random states are under
    nearly their name.
    """
    if any(one.name.is_of_accelerate for one in folder.components):
        return True
    return any(meant.is_of_save_state for _, meant, _ in _near_names(folder))


def _near_names(folder: CheckpointFolder) -> list[tuple[str, FileName, str]]:
    """Return the names that are nearly those of states, with the states and the mark of a copy, by
    their numbers.

    ``model-1.safetensors`` may be either of two.
    """
    unknown = (one.path for one in folder.components if one.role is Role.UNKNOWN)
    names: list[tuple[str, FileName, str]] = []
    for path in (*unknown, *folder.strays):
        if _COUNTED.fullmatch(path.name):
            continue
        meant, copied = nearly_state(path.name), copied_state(path.name)
        if meant is not None:
            names.append((path.name, meant, ""))
        if copied is not None and copied[0] != meant:
            names.append((path.name, *copied))
    return sorted(names, key=lambda near: _part(near[1])[1])


def _marked(
    folder: CheckpointFolder, existing: Collection[tuple[Role, int]]
) -> dict[tuple[str, int], set[Role]]:
    """Return the roles of missing states of which copies have one mark: they were copied
    together.
    """
    marked: dict[tuple[str, int], set[Role]] = defaultdict(set)
    for _, meant, mark in _near_names(folder):
        part = _part(meant)
        if mark and part not in existing:
            marked[mark, part[1]].add(part[0])
    return marked


_NAMED_BY_ACCELERATE = (Role.CUSTOM, Role.RNG_STATE)
"""Roles whose names no script gives to files of its own."""

_SHOWN_BY = {
    Role.MODEL: (Role.OPTIMIZER, Role.SCHEDULER),
    Role.OPTIMIZER: (Role.MODEL, Role.SCHEDULER),
    Role.SCHEDULER: (Role.OPTIMIZER, Role.MODEL),
}
"""Role -> the roles of which a run has no more entries than of this one, mostly."""


def _may_be(root: AnyPath, name: str, meant: FileName) -> bool:
    """Return whether a file may hold the state that it nearly has the name of; a damaged one
    may.
    """
    if meant.role is Role.MODEL:
        return _holds_weights(root, name)
    for component in scan_folder(root, name).components:
        if isinstance(component.content, TorchFile):
            return may_be_state(meant, component.content)
        return component.problem is not None and not component.problem.is_foreign
    return False


def _miscounted(folder: CheckpointFolder) -> Iterator[HiddenFile]:
    """Yield the files with other numbers that ``load_state`` counts as custom objects, and does not
    look for.
    """
    paths = (*(one.path for one in folder.components), *folder.strays, *folder.subfolders)
    counted = {path.name for path in paths if _COUNTED.fullmatch(path.name)}
    extra = sorted(name for name in counted if parse_file_name(name) is None)
    wanted = (f"custom_checkpoint_{number}.pkl" for number in range(len(counted)))
    missing = [name for name in wanted if name not in counted]
    for name, lost in zip(extra, missing, strict=False):
        words = f"load_state also counts {name!r}, and expects consecutive numbers"
        yield HiddenFile(name, lost, Loader.LOAD_STATE, words)


def _part(name: FileName) -> tuple[Role, int]:
    """Return the role of a state, and its position or its rank."""
    return name.role, name.index if name.rank is None else name.rank

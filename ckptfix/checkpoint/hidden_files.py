"""Files that a loader needs and does not find, because they have another name than the one that it
looks for.

One rule for every loader: the folder shows which loader reads it, no name that the loader looks for
exists, and a file holds what belongs under that name. The name of a copy shows that the file is
wanted, or the other states do; the names that a loader looks for are exact:

- ``load_state`` of accelerate 1.15 (``checkpointing.py``).
- ``Trainer._load_from_checkpoint`` of transformers 5.23: six names, and folders of FSDP and of
  adapters.
- ``from_pretrained`` of transformers 5.23 (``_get_resolved_checkpoint_files``), diffusers 0.42
  (``ModelMixin``) and PEFT 0.21: a config, and weights by the library of the config.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import NamedTuple

from ckptfix.checkpoint.filenames import (
    MODEL_STEMS,
    NUMBER_ALONE,
    STEMS_OF_LIBRARIES,
    TRAINER_STATE,
    WEIGHT_KINDS,
    FileName,
    Stems,
    copied_name,
    copied_state,
    parse_file_name,
    without_marks,
)
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name, parse_folder_name
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, library_of_names, may_hold_weights
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.checkpoint.state_contents import Content, content_of, has_kind_of
from ckptfix.formats.safetensors_file import WeightsIndex
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath, is_dir
from ckptfix.storage.paths import JOURNAL
from ckptfix.wording import first_few


class Loader(Enum):
    """A loader that knows files by their names. The value is its name in messages."""

    LOAD_STATE = "load_state"
    TRAINER = "the Trainer"
    FROM_PRETRAINED = "from_pretrained"


class HiddenFile(NamedTuple):
    """A file that a loader needs and does not find: the name that the loader looks for, the files
    that may be it, and the evidence.

    ``is_certain``: off for a file of a name that a script or another loader may look for on
    purpose. ``content``: its content in words.
    """

    wanted: str
    names: tuple[str, ...]
    loader: Loader
    known_by: str
    is_certain: bool = True
    content: str = "weights"

    @property
    def candidate(self) -> str:
        """The only file that may be it, "" where there are several."""
        return _only(self.names)


_COUNTED = re.compile(r"custom_checkpoint_\d+\.pkl")
"""Names of which ``load_state`` wants as many as there are registered objects (``accelerator.py``).
"""

_OPTIMIZER, _FSDP = "optimizer.pt", "pytorch_model_fsdp.bin"
_OF_TRANSFORMERS, _OF_ADAPTERS = STEMS_OF_LIBRARIES["transformers"], STEMS_OF_LIBRARIES["peft"]


def candidate(role: Role, files: Iterable[Component]) -> str:
    """Return the name of the only file that holds content of a role or is damaged, "" for none or
    several.
    """
    return _only([file.path.name for file in files if _may_hold(role, file)])


def hidden_files(folder: CheckpointFolder) -> Iterator[HiddenFile]:
    """Yield the files of a folder that its loader does not find by their names, one for each name
    it looks for.

    Random states of accelerate show that ``save_state`` wrote the folder, whatever else a script
    put there.
    """
    hidden: dict[str, HiddenFile] = {}
    # The Trainer's ``scaler.pt`` (fp16) and ``optimizer.bin`` (FSDP) have names of accelerate's
    # states.
    is_of_trainer = folder.has_file(TRAINER_STATE) and not folder.is_save_state
    if not is_of_trainer:
        for file in _hidden_from_load_state(folder):
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

    A subclass may write and read weights under names of its own, which are not certain.
    """
    if TRAINER_STATE not in names:
        return
    if _OPTIMIZER not in names:
        # FSDP alone reads ``optimizer.bin``, and saves it together with its own weights or with
        # folders.
        is_whole = {"optimizer.bin", "scheduler.pt"} <= set(names) and _FSDP not in names
        if is_whole and not _has_folder_of_weights(root, names):
            yield _hidden(_OPTIMIZER, ["optimizer.bin"], Loader.TRAINER)
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

    file = _hidden_weights(root, names, stems, Loader.TRAINER)
    if file is not None:
        yield file


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
    file = _hidden_weights(root, names, stems, Loader.FROM_PRETRAINED)
    if file is not None:
        words = f"{config} belongs to {library}, which does not look for {_quoted(file.names)}"
        yield file._replace(known_by=words)


def _hidden_weights(
    root: AnyPath, names: Collection[str], stems: Stems, loader: Loader
) -> HiddenFile | None:
    """Return the files with weights that may be those that a loader looks for.

    A name of a library is certain, and a copy of one (``model_old.safetensors``, ``Model (1).bin``).
    Other additions have a meaning for the program that wrote them:
    ``model-rank-0-part-0.safetensors`` is read by vLLM, ``model_ema.safetensors`` by a script.
    """
    parsed = {
        name: meaning for name in sorted(names) if (meaning := parse_file_name(name)) is not None
    }
    has_index = any(meaning.role is Role.WEIGHTS_INDEX for meaning in parsed.values())
    if not has_index and any(meaning.shard for meaning in parsed.values()):
        return None  # the missing index of shards has a finding
    odd = {
        name: parse_file_name(without_marks(name)) or meaning
        for name, meaning in parsed.items()
        if meaning.role in NOT_STATES and not meaning.shard
    }
    known = {*MODEL_STEMS, *(stem for of_kind in stems.values() for stem in of_kind)}
    if loader is Loader.TRAINER:
        known |= {*_OF_ADAPTERS[".bin"]}
    of_libraries = [
        name
        for name, meaning in odd.items()
        if meaning.is_of_library and not meaning.index and meaning.stem.partition(".")[0] in known
    ]
    certain = [name for name in of_libraries if _holds_weights(root, name)]
    # Of uncertain files the first is named: a folder may have hundreds, and the others need not be
    # read.
    rest = (name for name in odd if name not in of_libraries)
    files = certain or [*islice((name for name in rest if _holds_weights(root, name)), 1)]
    if not files:
        return None
    meaning = odd[files[0]]
    kind = next((kind for kind in WEIGHT_KINDS if meaning.suffix.startswith(kind)), ".bin")
    stem, _, variant = meaning.stem.partition(".")
    ending = f"{kind}.index.json" if meaning.role is Role.WEIGHTS_INDEX else kind
    if loader is Loader.FROM_PRETRAINED and meaning.is_of_library:
        ending = f".{variant}{meaning.suffix}" if variant else meaning.suffix
    wanted = (stem if stem in stems[kind] else stems[kind][0]) + ending
    return _hidden(wanted, files, loader, is_certain=bool(certain))


def hidden_configs(root: AnyPath, names: Collection[str]) -> Iterator[HiddenFile]:
    """Yield the configs of models that ``from_pretrained`` does not find: ``config.json.tmp``,
    ``config (1).json``.
    """
    for wanted in (CONFIG, ADAPTER):
        if wanted in names or not has_weights_of(wanted, names):
            continue
        libraries = ("peft",) if wanted == ADAPTER else ("transformers", "diffusers")
        copies = [
            name
            for name in sorted(names)
            if without_marks(name) == wanted and library_of_names(root / name) in libraries
        ]
        if copies:
            yield _hidden(wanted, copies, Loader.FROM_PRETRAINED)


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


def _hidden(
    wanted: str, names: Collection[str], loader: Loader, *, is_certain: bool = True
) -> HiddenFile:
    does = "exists" if len(names) == 1 else "exist"
    that = "that name" if len(names) == 1 else "those names"
    words = f"{_quoted(names)} {does}, but {loader.value} does not look for {that}"
    return HiddenFile(wanted, tuple(names), loader, words, is_certain)


def _only(names: Collection[str]) -> str:
    return next(iter(names)) if len(names) == 1 else ""


def _quoted(names: Iterable[str]) -> str:
    return first_few([repr(name) for name in names])


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


def _holds_weights(root: AnyPath, name: str) -> bool:
    return any(_may_hold(Role.MODEL, file) for file in scan_folder(root, name).components)


def _may_hold(role: Role, file: Component) -> bool:
    """Return whether a file holds content of a role: tensors of a model and not the state of an
    optimizer or the like, or a state of this kind. A damaged file may.
    """
    content = file.content
    if role is Role.MODEL and isinstance(content, WeightsIndex):
        return bool(content.weight_map)
    if isinstance(content, TorchFile) and role is not Role.MODEL:
        return has_kind_of(role, content)
    if isinstance(content, TorchFile) and content_of(content) not in (None, Content.MODEL):
        return False
    is_damaged = file.problem is not None and not file.problem.is_foreign
    return is_damaged or (role is Role.MODEL and bool(file.tensors))


def _has_folder_of_weights(root: AnyPath, names: Collection[str]) -> bool:
    folders = (root / name for name in names if name != JOURNAL and is_dir(root / name))
    return any(map(may_hold_weights, folders))


def _hidden_from_load_state(folder: CheckpointFolder) -> Iterator[HiddenFile]:
    """Yield the files that are copies, by their names, of a missing state of ``save_state``, and
    hold a state of this kind; and the only weights, which ``load_state`` may not look for.

    Copies of a later entry are shown by the other states of that entry: people set a file aside
    that they had saved twice. A number alone is the mark of a copy where several states have it.
    """
    copies = _copies(folder)
    is_of_accelerate = any(one.name.is_of_accelerate for one in folder.components)
    if not is_of_accelerate and all(role is not Role.RNG_STATE for role, _ in copies):
        return
    existing = {_part(one.name) for one in folder.components if not one.name.is_of_trainer}
    for path in folder.subfolders:
        state = parse_folder_name(path.name) or parse_deepspeed_folder_name(path.name)
        if state is not None:
            existing.add((state.role, state.index))
        if state is not None and state.is_deepspeed:
            existing.add((Role.OPTIMIZER, state.index))
    yield from _miscounted(folder)
    missing = {part: files for part, files in copies.items() if part not in existing}
    saved = {*existing, *missing}
    last = Counter(dict(sorted(existing, key=lambda part: part[1])))
    numbered = {
        part
        for part, files in missing.items()
        if any(NUMBER_ALONE.search(file.path.name) for _, file in files)
    }
    for (role, number), files in missing.items():
        names = [file.path.name for _, file in files if _may_hold(role, file)]
        is_shown = role not in _OF_ONE_ENTRY or (
            numbered != {(role, number)}
            and (
                number == 0
                or number < last[role]
                or any((more, number) in saved for more in _OF_ONE_ENTRY if more is not role)
            )
        )
        if names and is_shown:
            yield _hidden(str(files[0][0]), names, Loader.LOAD_STATE)
    unknown = [
        one
        for one in folder.components
        if one.name.is_of_trainer or (one.role is Role.UNKNOWN and not one.name.is_of_library)
    ]
    for role, wanted in _OF_ONE_ENTRY.items():
        is_shown = any((more, 0) in saved for more in _OF_ONE_ENTRY)
        if is_shown and (role, 0) not in existing and (name := candidate(role, unknown)):
            words = (
                f"load_state does not look for {name!r} and fails in a script that needs {wanted}"
            )
            yield HiddenFile(wanted, (name,), Loader.LOAD_STATE, words, False, role.value)


def _copies(
    folder: CheckpointFolder,
) -> Mapping[tuple[Role, int], list[tuple[FileName, Component]]]:
    """Return the files that are copies of states by their names, by the role and the number of the
    state.

    An unfinished copy has a finding of its own.
    """
    copies: dict[tuple[Role, int], list[tuple[FileName, Component]]] = defaultdict(list)
    unknown = [one.path for one in folder.components if one.role is Role.UNKNOWN]
    for path in sorted((*unknown, *folder.strays)):
        meant = copied_state(path.name)
        if meant is None or copied_name(path.name) or _COUNTED.fullmatch(path.name):
            continue
        for file in scan_folder(folder.root, path.name).components:
            copies[_part(meant)].append((meant, file))
    return copies


_OF_ONE_ENTRY = {
    Role.MODEL: "model.safetensors",
    Role.OPTIMIZER: "optimizer.bin",
    Role.SCHEDULER: "scheduler.bin",
}
"""Roles of which a run mostly has as many entries as of the others -> the name of the first.

Scripts give such names to files of their own, with numbers.
"""


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
        yield HiddenFile(lost, (name,), Loader.LOAD_STATE, words)


def _part(name: FileName) -> tuple[Role, int]:
    """Return the role of a state, and its position or its rank."""
    return name.role, name.index if name.rank is None else name.rank

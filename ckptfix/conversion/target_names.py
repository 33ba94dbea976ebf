"""Names of the files in a migrated checkpoint, and the files that are copied unchanged.

``load_state`` reads ``model.safetensors`` and ``model_<i>.safetensors``, else ``pytorch_model.bin``
and ``pytorch_model_<i>.bin``, one file a model; for FSDP ``pytorch_model_fsdp_<i>/`` (accelerate
1.15, ``checkpointing.py``).
"""

import errno
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct, field

from ckptfix.checkpoint.deepspeed_files import BESIDE, is_deepspeed_file
from ckptfix.checkpoint.filenames import (
    FileName,
    is_file_of_parts,
    model_file,
    parse_file_name,
    random_states_name,
)
from ckptfix.checkpoint.folder_names import dcp_model_folder, parse_folder_name
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.checkpoint.trainer_folders import trainer_step
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.files import AnyPath, is_file, is_symlink, relative, stat_of, walk
from ckptfix.storage.lock import LOCK
from ckptfix.storage.paths import JOURNAL, OF_FILES, RECEIPT, list_folder
from ckptfix.storage.reading import read_start
from ckptfix.tensors.optimizers import Strategy
from ckptfix.tensors.stored import Format, StoredCheckpoint, Weights
from ckptfix.wording import Brief

SUFFIXES = {
    Format.SAFETENSORS: (".safetensors",),
    Format.TORCH: (".bin", ".pt", ".pth", ".ckpt", ".th"),
    Format.DCP: (),
}
"""The suffixes of a format; the first is the default. DCP has folders."""

_STEMS = {
    Format.SAFETENSORS: model_file(".safetensors").stem,
    Format.TORCH: model_file(".bin").stem,
    Format.DCP: dcp_model_folder(0).stem,
}
_FOLDERS = (Format.DCP, Format.DEEPSPEED)
_ADAPTERS = {"adapter_model": "PEFT", "pytorch_lora_weights": "diffusers"}
"""Name of an adapter -> its library, which looks for one file and not for shards."""


def is_lone(source: StoredCheckpoint) -> bool:
    """Return whether a path is a file of weights, or a DCP or DeepSpeed folder itself, not a folder
    around it.
    """
    if source.only is not None:
        return True
    return any(_fills(one, source.root) for one in source.weights)


def _fills(weights: Weights, root: AnyPath) -> bool:
    """Return whether a folder is a checkpoint of DCP or DeepSpeed itself, not a folder around
    one.
    """
    if weights.format is Format.DCP:
        return any(len(path.parts) == 1 for path in weights.files)
    return weights.format is Format.DEEPSPEED and not (root / weights.label).is_dir()


def becomes_file(source: StoredCheckpoint, output: AnyPath, to: Format) -> bool:
    """Return whether the new checkpoint is one file. Raises UsageError when its name does not
    fit.
    """
    every = {suffix: target for target, suffixes in SUFFIXES.items() for suffix in suffixes}
    if output.suffix not in every:
        return False
    if every[output.suffix] is not to:
        wanted = (
            f"; name a file that ends in {SUFFIXES[to][0]}, or a folder"
            if SUFFIXES[to]
            else "; name a folder"
        )
        raise UsageError(
            f"{output} ends in {output.suffix}, which does not match the format {to.value!r}"
            f"{wanted}"
        )
    if not is_lone(source):
        raise UsageError(
            f"{source.root} is a folder, so {output} will be a folder too: name it without "
            f"{output.suffix}"
        )
    if len(source.weights) > 1:
        raise UsageError(
            f"{source.root / (source.only or '')} holds {len(source.weights)} models, but {output} "
            "can hold only one; name a folder"
        )
    return True


def stems(
    source: StoredCheckpoint,
    to: Format,
    output: AnyPath,
    known: Mapping[PurePosixPath, str | None],
    *,
    is_file: bool,
) -> list[str]:
    """Return the stem of each model's files; for DCP its folder, "." for the checkpoint itself.

    ``known``: folder -> the library's name for weights, by its config, as a DCP folder has
    Accelerate's name. Raises UsageError when two models would get the same name.
    """
    if is_file:
        return [output.stem]
    lone = is_lone(source)
    if lone and to is Format.DCP and len(source.weights) == 1:
        return ["."]
    if to is Format.DCP:
        _ensure_one_save(source.weights)
    found = []
    for number, one in enumerate(source.weights):
        name = name_of(one)
        if lone and not (name is not None and name.is_of_library):
            found.append(_numbered(to, number))
        elif (
            to is not Format.DCP
            and _is_sharded(one)
            and not one.index
            and (stem := known[one.home])
        ):
            found.append(stem)
        elif to is Format.DCP or _is_loaded(one):  # a folder of DCP is known by its name alone
            found.append(_numbered(to, one.index))
        else:
            found.append(_own_stem(one, source.weights, to))
    places = [(one.home, stem) for one, stem in zip(source.weights, found, strict=True)]
    for number, (_, stem) in enumerate(places):
        if places[number] in places[:number]:
            first, second = (
                source.weights[places.index(places[number])].label,
                source.weights[number].label,
            )
            raise UsageError(
                f"{first} and {second} would both become {stem}; name one of them instead of the "
                "folder"
            )
    return found


def _ensure_one_save(all_weights: Sequence[Weights]) -> None:
    """Raise UsageError for files such as ``epoch=3.ckpt`` and ``last.ckpt``: they hold one model at
    two times, and as two folders of DCP they would be two models of one save.
    """
    seen: dict[tuple[object, ...], Weights] = {}
    for one in all_weights:
        name = name_of(one)
        if one.format is Format.DCP or (name is not None and name.is_of_library):
            continue
        shapes = frozenset((tensor.fqn, tensor.shape) for tensor in one.tensors)
        if (first := seen.setdefault((one.home, one.path, shapes), one)) is not one:
            raise UsageError(
                f"{first.label} and {one.label} have the same keys, and would become two models "
                "of one checkpoint; name one of them instead of the folder"
            )


def _is_loaded(weights: Weights) -> bool:
    """Return whether ``load_state`` or ``from_pretrained`` finds a model by its name."""
    label = weights.label.removeprefix(f"{weights.home}/")
    name = parse_file_name(label)
    return _is_sharded(weights) or (name is not None and name.load_order is not None)


def _is_sharded(weights: Weights) -> bool:
    """Return whether ranks saved a model together: in a folder, or in a file for each rank."""
    file = weights.files[0].name
    is_of_ranks = parse_rank_file_name(file) is not None or is_file_of_parts(file)
    return weights.format in _FOLDERS or is_of_ranks


def why_one_file(source: StoredCheckpoint, weights: Weights) -> str:
    """Return why the loader of a model reads only one file; "" where it can read shards."""
    name = name_of(weights)
    model = name.model if name is not None and name.is_of_library else None
    if model is not None and model.stem in _ADAPTERS:
        return (
            f"{weights.label} is an adapter, and {_ADAPTERS[model.stem]} reads one file per adapter"
        )
    if source.is_save_state and not weights.home.parts and (model is None or _is_loaded(weights)):
        return f"{source.root} is a folder of save_state, and load_state reads one file per model"
    return ""


def name_of(weights: Weights) -> FileName | None:
    """Return the parsed name of a model's index, else of its file."""
    is_index = weights.label.endswith(".json")
    return parse_file_name(PurePosixPath(weights.label).name if is_index else weights.files[0].name)


def _numbered(to: Format, index: int) -> str:
    if to is Format.DCP:
        return str(dcp_model_folder(index))
    suffix = SUFFIXES[to][0]
    return str(model_file(suffix, index)).removesuffix(suffix)


def _own_stem(weights: Weights, all_weights: Sequence[Weights], to: Format) -> str:
    """Return the name of an adapter, a variant or a script's own file, without the parts for its
    format.

    ``from_pretrained(variant="fp16")`` looks for ``model.fp16.safetensors`` and
    ``pytorch_model.fp16.bin``.
    """
    path = weights.files[0]
    name = name_of(weights)
    if name is not None and name.is_of_library and (model := name.model) is not None:
        stem = _STEMS[to] if model.stem == _STEMS[Format.SAFETENSORS] else model.stem
        return f"{stem}.{model.variant}" if model.variant else stem
    stem = name.stem if name is not None else path.name
    # Several in one training dict.
    if sum(1 for other in all_weights if other.files == weights.files) > 1:
        stem += "." + ".".join(re.findall(r"[\w-]+", weights.label.removeprefix(str(path))))
    return stem


_NOWHERE = {
    errno.ENOENT: "a broken symbolic link",
    errno.ENOTDIR: "a broken symbolic link",
    errno.ELOOP: "a symbolic link that leads to itself",
}


def _is_dcp_model(name: str) -> bool:
    """Return whether FSDP keeps a model in a folder of this name; a file left there belongs to a
    converted model.
    """
    folder = parse_folder_name(name)
    return folder is not None and folder.stem == _STEMS[Format.DCP]


class LeftOut(NamedTuple):
    """A part of the source that the new checkpoint will not have, with the reason."""

    what: str
    reason: str


class OtherFiles(Struct, frozen=True, kw_only=True):
    """Files without weights. ``carried``: those to copy; ``empty``: folders to make; relative to
    the source.
    """

    carried: tuple[PurePosixPath, ...] = ()
    empty: tuple[PurePosixPath, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def other_files(source: StoredCheckpoint, new: frozenset[PurePosixPath]) -> OtherFiles:
    """Sort the files without weights of the source. ``new``: the files that are written.

    Folders behind links are copied as folders. ckptfix's own files in a sub-folder are copied if
    every file of that folder is.

    Raises OperationError for a folder that cannot be listed: its files would be lost silently.
    """
    if source.only is not None:
        return OtherFiles()
    used = {str(file) for one in source.weights for file in one.files}
    listing = list_folder(source.root)
    listed = {PurePosixPath(name): why for name, why in listing.files.items() if name not in used}
    if is_lone(source):
        reason = "not weights of a model, and only weights are migrated here"
        return OtherFiles(
            left_out=tuple(LeftOut(str(path), reason) for path in (*listed, *listing.journals))
        )
    homes = {folder for one in source.weights for folder in (one.home, *one.home.parents)}
    folders = frozenset(parent for one in new for parent in one.parents) - {
        PurePosixPath("."),
        *homes,
    }
    taken = partial(
        _taken, source=source, rivals=frozenset(source.rivals), new=new, folders=folders
    )
    carried: list[PurePosixPath] = []
    left: list[LeftOut] = []
    for path, unlisted in listed.items():
        why = taken(path) or unlisted or _not_a_file(source.root / path)
        if why is None:
            carried.append(path)
        elif unlisted and why is unlisted and not (source.root / path).is_symlink():
            raise OperationError(
                f"{source.root / path} {unlisted}, so its contents would be lost; nothing was "
                "written; allow access to it, or move it away"
            )
        else:
            left.append(LeftOut(str(path), why))
    changed = {
        parent
        for name in {*listing.files} - set(map(str, carried))
        for parent in PurePosixPath(name).parents
    }
    for journal in map(PurePosixPath, listing.journals):
        files = _journal_files(source.root, journal)
        if files is not None and journal.parent not in changed and taken(journal) is None:
            carried += files
        elif files != [journal.parent / RECEIPT]:
            why = "it describes the old files of its folder, and the migration changes them"
            left.append(
                LeftOut(
                    str(journal),
                    why
                    if files is not None
                    else "it contains files that ckptfix did not write, or that are not regular "
                    "files",
                )
            )
    empty = [path for path in _empty_folders(source.root) if taken(path) is None]
    return OtherFiles(carried=tuple(carried), empty=tuple(empty), left_out=tuple(left))


def _taken(
    path: PurePosixPath,
    *,
    source: StoredCheckpoint,
    rivals: frozenset[PurePosixPath],
    new: frozenset[PurePosixPath],
    folders: frozenset[PurePosixPath],
) -> str | None:
    """Return why a file has no place in the new checkpoint, None when it has one."""
    if path in rivals or _is_dcp_model(path.parts[0]):
        return "weights of a model that is converted from other files"
    if path in new or path in folders or not new.isdisjoint(path.parents):
        return "a new file replaces it"
    if folders.intersection(path.parents):
        return "a new folder replaces it"
    if path.name in OF_FILES:
        return "it describes the old files; to write one for the new files: ckptfix seal"
    if path in BESIDE and any(one.format is Format.DEEPSPEED for one in source.weights):
        return "it belongs to the DeepSpeed folder, which is converted"
    if path in BESIDE and any(is_deepspeed_file(one.name) for one in rivals):
        return "it belongs to the DeepSpeed folder, which is not copied"
    return None


def _not_a_file(path: AnyPath) -> str | None:
    try:
        mode = stat_of(path).st_mode
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise
        return _NOWHERE[error.errno]
    return None if stat.S_ISREG(mode) else "not a regular file"


def _journal_files(root: AnyPath, journal: PurePosixPath) -> list[PurePosixPath] | None:
    """Return ckptfix's own files in a sub-folder except a lock; None when others wrote some of
    them.

    With them ``undo`` and ``verify`` work in a copy of that folder. Raises OSError for a folder
    that cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    if (root / journal).is_symlink():
        return None
    found = []
    for where, folders, names in walk(root / journal, onerror=fail):
        if any(is_symlink(where / name) for name in folders):
            return None
        paths = [relative(where / name, root) for name in sorted(names)]
        if not all(stat.S_ISREG((root / path).lstat().st_mode) for path in paths):
            return None
        found += [path for path in paths if path != journal / LOCK]
    return found


def _empty_folders(root: AnyPath) -> Iterator[PurePosixPath]:
    for where, folders, names in walk(root):
        folders[:] = sorted(name for name in folders if name != JOURNAL)
        if not folders and not names and (path := relative(where, root)).parts:
            yield path


NAME = PurePosixPath("config.json")

_LONGEST = 16 << 20
_DTYPE = re.compile(
    rb'("(?:torch_)?dtype"\s*:\s*")(?:float64|float32|float16|bfloat16|float8_\w+)(")'
)
_WORDS = {"BF16": b"bfloat16", "F16": b"float16", "F32": b"float32", "F64": b"float64"}


class Config(Brief, Struct, frozen=True):
    """The config.json of a folder. ``data``: its content, empty if it cannot be understood."""

    data: bytes = b""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ties_nothing(self) -> bool:
        """Return whether the model looks for both names of shared weights: transformers ties them
        only if the config asks for it.

        The default is to tie (``PretrainedConfig.tie_word_embeddings`` is True; transformers 5
        always writes it).
        """
        return self.values.get("tie_word_embeddings") is False

    @property
    def is_quantized(self) -> bool:
        """Return whether weights are codes that need their scales."""
        return bool(self.values.get("quantization_config"))

    def with_dtype(self, dtype: str) -> bytes:
        """Return the file with another dtype of its weights, in safetensors' nouns; every other
        byte stays.
        """
        return _DTYPE.sub(lambda match: match[1] + _WORDS[dtype] + match[2], self.data)


def read_config(source: StoredCheckpoint, home: PurePosixPath) -> Config:
    """Return the config of a folder, or of a model in its sub-folder; an empty one where its name
    is that of a folder or a broken link. Raises OSError when it cannot be read.
    """
    path = source.root / home / NAME
    if source.only is not None or is_lone(source) or not is_file(path):
        return Config()
    found = json_object(path)
    return Config(*found) if found is not None else Config()


def library_stem(source: StoredCheckpoint, home: PurePosixPath, config: Config) -> str | None:
    """Return the library's name for the weights next to its config;

    None for the name that ``load_state`` finds.

    None also where other weights have that name: the Trainer saves an adapter next to the folder of
    DeepSpeed.
    """
    folder = source.root / home
    if "_diffusers_version" in config.values:
        stem = "diffusion_pytorch_model"
    elif not config.data and (folder / "adapter_config.json").exists():
        stem = "adapter_model"
    else:
        return None
    return (
        None
        if any((folder / f"{stem}{suffix}").exists() for suffix in (".safetensors", ".bin"))
        else stem
    )


def json_object(path: AnyPath) -> tuple[bytes, dict[str, Any]] | None:
    """Return a small JSON file and its object;

    None if it is not a regular file, too long, or not a JSON object.

    Raises OSError when it cannot be read.
    """
    data = read_start(path, _LONGEST + 1)
    if data is None:
        return None
    try:
        values = json.loads(data) if len(data) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    return (data, values) if isinstance(values, dict) else None


class StateNames(NamedTuple):
    """Names of the files of a complete state that the loader of a strategy looks for."""

    strategy: Strategy
    is_trainer: bool

    def model_stem(self, index: int) -> str:
        """Return the name of a model's file without its suffix, or of its folder."""
        if self.strategy is Strategy.FSDP:
            return str(dcp_model_folder(index))
        if self.strategy is Strategy.FSDP_FULL:
            return str(dcp_model_folder(0).at(index)) if index else dcp_model_folder(0).stem
        return str(model_file(".safetensors", index)).removesuffix(".safetensors")

    def optimizer(self, index: int) -> PurePosixPath:
        """Return the path of an optimizer's file or folder."""
        if self.strategy is Strategy.FSDP:
            return PurePosixPath(f"optimizer_{index}")
        if self.is_trainer and self.strategy is Strategy.DDP:
            return PurePosixPath("optimizer.pt")
        return PurePosixPath(f"optimizer_{index}.bin" if index else "optimizer.bin")

    def engine(self, index: int, root: AnyPath) -> PurePosixPath:
        """Return the folder of a model and its optimizer of DeepSpeed."""
        if self.is_trainer:
            return PurePosixPath(f"global_step{trainer_step(root)}")
        return PurePosixPath(f"pytorch_model_{index}" if index else "pytorch_model")

    def scheduler(self, index: int) -> str:
        """Return the name of a scheduler's file."""
        if self.is_trainer:
            return "scheduler.pt"
        return f"scheduler_{index}.bin" if index else "scheduler.bin"

    def random_states(self, processes: int) -> list[str]:
        """Return the names of the files in which each rank looks for its random states."""
        if not self.is_trainer:
            return [random_states_name(rank) for rank in range(processes)]
        return (
            ["rng_state.pth"]
            if processes == 1
            else [f"rng_state_{rank}.pth" for rank in range(processes)]
        )

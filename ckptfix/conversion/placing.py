"""The destination of a migration: whether it may be written, and what it would replace."""

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.deepspeed_files import deepspeed_below, is_deepspeed_file
from ckptfix.checkpoint.filenames import (
    NOT_STATES,
    ModelName,
    Role,
    describe_folder_name,
    parse_file_name,
    parse_folder_name,
)
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.conversion.migration_plan import MigrationPlan, Options, PlannedModel
from ckptfix.conversion.sources import files_read
from ckptfix.conversion.target_names import SUFFIXES, json_object
from ckptfix.errors import ChangedError, UsageError
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.lock import LOCK
from ckptfix.storage.paths import JOURNAL, MANIFEST, listed_files
from ckptfix.wording import list_names

# Which places a path leads through, link by link: all of them must stay for what is at its end to be found.

_MOST_LINKS = 40
"""As many as Linux follows before it takes them for a circle."""

_CONFIG = "adapter_config.json"


def passed_by(path: Path) -> Iterator[Path]:
    """Yield every place that is looked up on the way to a path, each with a parent that has no link in it.

    Those of links come before those that the links lead to; the last is where the path ends.
    """
    waiting = [*reversed(path.absolute().parts[1:])]
    here, links = Path("/"), 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        yield step
        try:
            target = Path(os.readlink(step))
        except OSError:  # no link
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        here = Path("/") if target.is_absolute() else here
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def base_models(root: Path) -> list[Path]:
    """Return where the model may be that the adapter in a folder needs, by its ``adapter_config.json``.

    peft gives the name to ``from_pretrained``, which takes it for a path from the working directory if there is one;
    it may be meant from the adapter's folder as well.
    """
    name = _named(root / _CONFIG)
    if not name or "\0" in name:
        return []
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return []
    return [root / name, Path(os.path.normpath(root.absolute() / name)), Path.cwd() / name]


def _named(path: Path) -> str | None:
    with suppress(OSError):
        _, values = json_object(path) or (b"", {})
        name = values.get("base_model_name_or_path")
        return name if isinstance(name, str) else None
    return None


# What the files of one checkpoint are called: the exact names that libraries write, and which model they
# are of.
#
# A name that only looks like one of them is the user's own.

_BESIDE = frozenset({
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "sentencepiece.bpe.model", "spiece.model", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja", "model_index.json",
    "trainer_state.json", "latest", "zero_to_fp32.py", ".gitattributes", "LICENSE",
})  # fmt: skip
"""What transformers, peft, DeepSpeed and the hub put beside weights. A README.md is often written by hand."""

_DCP_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_DCP = re.compile(rf"(__[0-9]+)?\.metadata(\.tmp)?|{_DCP_DATA.pattern}")
"""The files of a DCP folder, and what a save leaves there that was cut short (torch 2.13, ``filesystem.py``)."""

_DEEPSPEED_ENDS = ("_model_states.pt", "-model_states.pt", "_optim_states.pt")

_OF_TRANSACTIONS = re.compile(
    r"(?:[0-9]{4}|[1-9][0-9]{4,})\.(?:building|pending|done)(?:/(?:plan\.json|literals|steps|steps\.new|after\.json|any-time|"
    r"[0-9]+\.(?:new|kept|trash|tail|part|copy)))?"
)

MODEL = ModelName("model")
"""The model of a checkpoint, as most libraries call it; that of DCP and DeepSpeed folders, too."""

PARTIAL = frozenset({"adapter_model", "diffusion_pytorch_model", "pytorch_lora_weights"})
"""What is not called a model by a library, and is none by another name."""


def family_of(name: str) -> ModelName | None:
    """Return which model a file holds weights of, by its name, or is the index of; None for all else."""
    parsed = parse_file_name(name)
    if parsed is None or is_beside_weights(name):
        return None
    return MODEL if is_of_deepspeed(name) else parsed.model


def needs_a_look(name: str) -> bool:
    """Whether a file is known for weights by its suffix alone, which files of other kinds have as well."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.role is Role.UNKNOWN and not is_of_deepspeed(name)


def is_beside_weights(name: str) -> bool:
    """Whether a library puts a file of this name beside weights."""
    return name in _BESIDE


def is_state(name: str) -> bool:
    """Whether ``save_state`` or the Trainer writes a state under this name: of an optimizer, of generators."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.role not in NOT_STATES


def is_of_dcp(name: str, *, data: bool = False) -> bool:
    """Whether torch.distributed.checkpoint calls a file so; ``data``: one that holds tensors."""
    return (_DCP_DATA if data else _DCP).fullmatch(name) is not None


def is_of_deepspeed(name: str) -> bool:
    """Whether DeepSpeed calls a file so."""
    return is_deepspeed_file(name) and name.endswith(_DEEPSPEED_ENDS)


def is_of_ckptfix(path: PurePosixPath) -> bool:
    """Whether ckptfix writes a file at a path in ``.ckptfix``, relative to that; or a folder, when it is empty."""
    own = (PurePosixPath(MANIFEST).name, LOCK, UNFINISHED, f"{UNFINISHED}.new")
    return str(path) in own or _OF_TRANSACTIONS.fullmatch(str(path)) is not None


# What stands where a new checkpoint is to go: what one checkpoint consists of, and what is of nobody's
# checkpoint.
#
# Only the first may be replaced: files that a library calls so at the top of a checkpoint, and in the
# sub-folders that it has. A folder of checkpoints, another model, a file of the user's and a device are
# never such.


class Standing(NamedTuple):
    """Something at the place, relative to it; a folder that is not looked into ends in "/".

    ``is_ours``: a part of a checkpoint, or a copy of what comes again. ``is_weights``: it holds tensors of a model.
    """

    name: str
    is_ours: bool
    is_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """What the new checkpoint brings. ``copied``: relative path -> the file that it is a copy of.

    ``folders``: those that are made, with all above them. ``families``: the models; None when that is not known yet.
    """

    copied: dict[PurePosixPath, Path]
    folders: frozenset[PurePosixPath]
    families: frozenset[ModelName] | None


NOTHING = Coming(copied={}, folders=frozenset(), families=None)


def tensor_files(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Return which of some files hold tensors, by what is in them. Raises OSError when the folder cannot be listed."""
    found = scan_folder(folder, wanted=lambda name: str(name) in names).components if names else ()
    return frozenset(
        one.path.name
        for one in found
        if isinstance(one.content, SafetensorsFile) or (isinstance(one.content, TorchFile) and one.tensors)
    )


def standing_in(folder: Path, coming: Coming) -> Iterator[Standing]:
    """Yield all that is in a folder, in order; what is no part of a checkpoint is not looked into.

    Raises OSError for what cannot be listed.
    """
    top = sorted(os.scandir(folder), key=lambda entry: entry.name)
    names = [entry.name for entry in top if not entry.is_dir(follow_symlinks=False)]
    tags = {
        path for _, path in deepspeed_below(folder, [PurePosixPath(one.name) for one in top if one.is_dir()])
    }
    families = _families_named(names, coming)
    is_model = MODEL in families
    is_dcp = is_model and any(is_of_dcp(name, data=True) for name in names)
    doubtful = [name for name in names if needs_a_look(name) and family_of(name) in families]
    with_tensors: frozenset[str] | None = None
    for entry in top:
        path = PurePosixPath(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            is_weights = family_of(entry.name) in families
            if is_weights and entry.name in doubtful:
                with_tensors = tensor_files(folder, doubtful) if with_tensors is None else with_tensors
                is_weights = entry.name in with_tensors
            is_data = is_weights and not entry.name.endswith(".json")
            is_data |= is_dcp and is_of_dcp(entry.name, data=True)
            known = is_weights or is_beside_weights(entry.name) or is_state(entry.name)
            known |= is_dcp and is_of_dcp(entry.name)
            is_ours = (known and _leads_to_a_file(entry)) or _is_copied(entry, path, coming)
            yield Standing(entry.name, is_ours, is_ours and is_data)
        elif entry.name == JOURNAL:
            yield from _below_journal(entry.path, path, path)
        else:
            is_part = path in tags or describe_folder_name(entry.name) is not None
            holds_model = not _is_of_optimizer(entry.name)
            yield from _below(
                entry.path,
                path,
                coming,
                is_part=is_part and (is_model or not holds_model),
                is_model=holds_model,
            )


def _families_named(names: Collection[str], coming: Coming) -> frozenset[ModelName]:
    """Return the models that may go: those that come again; while that is not known, the one that is there."""
    if coming.families is not None:
        return coming.families
    found = frozenset(family for name in names if (family := family_of(name)) is not None)
    if not found:
        return frozenset([MODEL])
    return found if len(found) == 1 else frozenset()


def _is_of_optimizer(folder: str) -> bool:
    parsed = parse_folder_name(folder)
    return parsed is not None and parsed.role is Role.OPTIMIZER


def _below(
    folder: str, path: PurePosixPath, coming: Coming, *, is_part: bool, is_model: bool
) -> Iterator[Standing]:
    """Yield what is in a sub-folder; ``is_part``: of a checkpoint; ``is_model``: its weights are there."""
    if not (is_part or path in coming.folders):
        yield Standing(f"{path}/", False)
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        yield Standing(str(path), True)
    for entry in entries:
        inner = path / entry.name
        if entry.is_dir(follow_symlinks=False):
            if is_part and entry.name == JOURNAL:
                yield from _below_journal(entry.path, inner, inner)
            else:
                yield from _below(entry.path, inner, coming, is_part=False, is_model=False)
            continue
        known = is_part and (is_of_dcp(entry.name) or is_of_deepspeed(entry.name)) and _leads_to_a_file(entry)
        is_data = is_model and (is_of_dcp(entry.name, data=True) or is_of_deepspeed(entry.name))
        yield Standing(str(inner), known or _is_copied(entry, inner, coming), known and is_data)


def _below_journal(folder: str, path: PurePosixPath, journal: PurePosixPath) -> Iterator[Standing]:
    """Yield what is in the folder that ckptfix keeps, which may hold more than it wrote."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        yield Standing(str(path), True)
    for entry in entries:
        inner = path / entry.name
        is_own = is_of_ckptfix(inner.relative_to(journal))
        if not entry.is_dir(follow_symlinks=False):
            is_regular = entry.is_file(follow_symlinks=False)
            yield Standing(str(inner), is_own and is_regular)
        elif is_own:
            yield from _below_journal(entry.path, inner, journal)
        else:
            yield Standing(f"{inner}/", False)


def _leads_to_a_file(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file, or a link to one; never a folder, a pipe, a socket or a device, nor a link to nothing."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return False


def _is_copied(entry: "os.DirEntry[str]", path: PurePosixPath, coming: Coming) -> bool:
    """Whether a file holds the same bytes as the one that will be copied to its place, so that nothing is lost."""
    original = coming.copied.get(path)
    if original is None or not _leads_to_a_file(entry):
        return False
    size = os.stat(original).st_size
    if size != entry.stat().st_size:
        return False
    first, second = (os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in (original, entry.path))
    try:
        return not size or first_difference(first, second, [Run(0, 0, size)]) is None
    finally:
        os.close(first)
        os.close(second)


# Whether a new checkpoint may go where it is asked to, and what would go away there.


def check_paths(path: Path, output: Path, options: Options) -> None:
    """Raise UsageError when nothing can be written at ``output``, by what is there now; OSError."""
    source, target = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    if output.name == "..":
        raise UsageError(f"{output}: name the folder itself")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.absolute().parent} is not a folder")
    if source == target or (_is_in(source, target) and _is_in(target, source)):
        raise UsageError(f"{output} is what is to be migrated; name another place")
    if _is_in(target, source):
        raise UsageError(f"{output} lies inside {path}, which is to be migrated")
    if not os.path.lexists(output) or _is_empty_folder(output):
        return
    if _is_special(output):
        raise UsageError(f"{output} is neither a file nor a folder, and never replaced; name another place")
    is_folder = output.is_dir() and not output.is_symlink()
    if not options.overwrite:
        raise UsageError(f"{output} exists; {_other_place(path, output, options, is_folder=is_folder)}")
    if _is_in(source, target):
        raise UsageError(f"{path} lies inside {output}, which would be replaced")
    if is_folder and (Path.cwd().is_relative_to(target) or os.path.ismount(target)):
        raise UsageError(f"{output} is a folder in use, which cannot be replaced")


def _is_special(path: Path) -> bool:
    """Whether a pipe, a socket or a device is at a path, or behind a link there."""
    kinds = [os.lstat(path).st_mode]
    with suppress(OSError):  # a link to nothing
        kinds.append(os.stat(path).st_mode)
    return not all(stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind) for kind in kinds)


def _other_place(path: Path, output: Path, options: Options, *, is_folder: bool) -> str:
    """Return what to do when something is in the way. ``--overwrite`` is named only where nothing else would go."""
    if is_folder and not path.is_dir():
        return f"it is a folder; name a new place in it: {output / (path.stem + _suffix(options))}"
    if is_folder:
        there = list(_until_not_ours(standing_in(output, NOTHING)))
        if not there[-1].is_ours:
            return "it holds more than a checkpoint; name a place where nothing is"
        if not any(one.is_weights for one in there):
            return "it holds no weights of a model; name a place where nothing is"
    elif not output.is_dir() and (path.is_dir() or not _may_go(output, options)):
        return "name a place where nothing is"
    return "name a place where nothing is, or replace it with --overwrite"


def _until_not_ours(there: Iterator[Standing]) -> Iterator[Standing]:
    for one in there:
        yield one
        if not one.is_ours:
            return


def _may_go(output: Path, options: Options) -> bool:
    """Whether a lone file may be replaced: by its name with one of the new format, by its content a tensor file."""
    return output.suffix in SUFFIXES[options.to] and output.name in tensor_files(output.parent, [output.name])


def _suffix(options: Options) -> str:
    return next(iter(SUFFIXES[options.to]), "")


def ensure_apart(plan: MigrationPlan) -> None:
    """Raise UsageError when the new checkpoint would take the place of what belongs to the source, wherever that lies.

    What a link leads to belongs to it, too, and every link on the way: a file at the output or below it, a folder that
    the output would lie in. So does the model that an adapter needs.
    """
    output, root = plan.output.absolute(), plan.source.root
    place = Path(os.path.realpath(output.parent)) / output.name
    is_there = os.path.lexists(place)
    names: dict[str, list[str]] = {}
    for name in {**dict.fromkeys(files_read(plan)), **_listed(plan)}:
        folder, _, last = name.rpartition("/")
        names.setdefault(folder, []).append(last)
    if is_there:
        _ensure_not_at(plan.path, place, output)
        _ensure_no_base(root, place, output)
    for folder, files in names.items():
        real = Path(os.path.realpath(root / folder))
        if plan.source.only is None and _is_in(place, real):
            raise UsageError(
                f"{output} lies inside {root / folder}, which is to be migrated; name another place"
            )
        if not is_there:
            continue
        _ensure_not_at(root / folder, place, output)
        for file in files:
            if real / file == place and not place.is_symlink():
                raise UsageError(f"{output} is a part of what is to be migrated; name another place")
            if (root / folder / file).is_symlink():
                _ensure_not_at(root / folder / file, place, output)


def _ensure_not_at(path: Path, place: Path, output: Path) -> None:
    """Raise UsageError when a path of the source leads to ``place``, into it, or through it to somewhere else."""
    if passed := _passed_at(path, place):
        what = path if passed[-1] == Path(os.path.abspath(path)) else f"{passed[-1]}, which {path} leads to,"
        raise UsageError(f"{output} would be replaced, and {what} is to be migrated; name another place")


def _passed_at(path: Path, place: Path) -> list[Path]:
    """Return what is looked up at a place and below it on the way to a path; the place may have another name there."""
    status = os.lstat(place)
    is_folder = stat.S_ISDIR(status.st_mode)
    found = []
    for step in passed_by(path):
        is_in = step.is_relative_to(place)
        if not is_in and is_folder:
            with suppress(OSError):
                is_in = os.path.samestat(os.lstat(step), status)
        if is_in:
            found.append(step)
    return found


def _ensure_no_base(root: Path, place: Path, output: Path) -> None:
    for base in base_models(root):
        if _passed_at(base, place):
            raise UsageError(
                f"{output} would be replaced, and the adapter_config.json in {root} names it as the model that the "
                "adapter needs; name another place"
            )


def _listed(plan: MigrationPlan) -> dict[str, str | None]:
    """Return the other files of the source, too: it stays as it is."""
    return listed_files(plan.source.root) if plan.source.only is None else {}


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a path is another, or lies below it, also by another name of the same folder, as mounts can give it."""
    if path.is_relative_to(folder):
        return True
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    for parent in (path, *path.parents) if stat.S_ISDIR(status.st_mode) else ():
        with suppress(OSError):
            if os.path.samestat(os.stat(parent), status):
                return True
    return False


def removed_at(plan: MigrationPlan) -> tuple[str, ...]:
    """Return every file that goes away when the new checkpoint takes its place, sorted, "." for a lone one or a link.

    Raises UsageError when among them is one that is no part of one checkpoint and would not be there again with the
    same bytes, when there are no weights among them, or when a file would take the place of a folder or a folder that
    of a file; OSError for what cannot be listed.
    """
    output = plan.output
    if not os.path.lexists(output):
        return ()
    if not output.is_dir():
        if not plan.is_file:
            raise UsageError(
                f"{output} is not a folder, and a folder would take its place; name another place"
            )
        if not _may_go(output, plan.options):
            raise UsageError(
                f"{output} is not a {plan.options.to.value} file that holds tensors; --overwrite does not replace it; "
                "name another place, or remove it yourself"
            )
        return (".",)
    if plan.is_file:
        raise UsageError(f"{output} is a folder, and a file would take its place; name another place")
    there = sorted(standing_in(output, _coming(plan)))
    if lost := [one.name for one in there if not one.is_ours]:
        raise UsageError(
            f"{output} holds what is not part of one checkpoint and would be lost: {list_names(lost)}; --overwrite "
            "does not replace it; name another place, or remove it yourself"
        )
    if there and not any(one.is_weights for one in there):
        raise UsageError(
            f"{output} holds no weights of a model: {list_names([one.name for one in there])}; --overwrite does not "
            "replace it; name another place, or remove it yourself"
        )
    return (".",) if output.is_symlink() else tuple(one.name for one in there)


def _coming(plan: MigrationPlan) -> Coming:
    folders = {parent for path in plan.carried for parent in path.parents}
    folders |= {one for path in plan.empty for one in (path, *path.parents)}
    return Coming(
        copied={path: plan.source.root / path for path in plan.carried},
        folders=frozenset(folders - {PurePosixPath(".")}),
        families=frozenset(family for model in plan.models for family in _families(model)),
    )


def _families(model: PlannedModel) -> set[ModelName]:
    """Return what a new model is: as its files are called, but never a whole model in the name of an adapter."""
    before = family_of(model.before.files[0].name)
    new = {family_of(file.path.name) or MODEL for file in model.files}
    if before is not None and before.stem in PARTIAL:
        return {before if one == MODEL else one for one in new}
    return new


def ensure_as_planned(plan: MigrationPlan) -> None:
    """Raise ChangedError when something came to what is to be replaced, or went, since it was planned."""
    now: tuple[str, ...] | None = None
    with suppress(UsageError):
        now = removed_at(plan)
    if now != plan.removed or (now and _is_special(plan.output)):
        raise ChangedError(f"{plan.output} changed meanwhile; nothing was written there")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)

"""The entries of each role of a folder in order, the files that hold each of them, and entries that
are duplicates.

A group of files holds one state dict: one file, or the shards of a model with their index. The
facts about a complete model are judged per group: the wrapper of its keys, two keys that would
become one, a missing file.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, ProblemKind
from ckptfix.checkpoint.keys import PREPARE_WRAPPERS, common_wrappers
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint
from ckptfix.checkpoint.model_files import ModelFiles, group_files
from ckptfix.checkpoint.pairing import Pairing, equal_entries, first_unequal
from ckptfix.checkpoint.rank_parts import parts_problem
from ckptfix.checkpoint.roles import Role
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath, stat_of
from ckptfix.wording import Brief

Shapes = Mapping[str, tuple[int, ...] | None]
"""Key -> shape; None for a value other than a tensor that can be read without executing code."""


class Entry(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One saved object: its files, its position among its kind, and its record in the manifest.

    ``problem``: why it cannot be read, "" for a readable one. ``path``: the keys that lead to the
    state dict in a pickle. ``shapes``: those of a state dict's keys, empty for other states.
    ``aliases``: each key that the file lacks -> the key with which it shared a storage, by the
    manifest. ``index_words``: the fields of an index other than its map.
    """

    index: int
    members: tuple[Component, ...]
    label: str
    problem: str = ""
    path: tuple[str, ...] = ()
    shapes: Shapes = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    recorded: ManifestEntry | None = None
    index_words: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """The files, relative to the folder."""
        return tuple(str(member.path) for member in self.members)

    @property
    def chain(self) -> tuple[str, ...]:
        """The wrapper chain of all keys."""
        return common_wrappers(self.shapes)


def model_entries(folder: CheckpointFolder, manifest: Manifest | None) -> tuple[Entry, ...]:
    """Return the models that ``load_state`` would look for, one a position; safetensors before
    ``.bin``, as it does.
    """
    found: dict[int, tuple[int, Entry]] = {}
    models = manifest.models if manifest else ()
    # And not in a sub-folder.
    recorded = {entry.index: entry for entry in models if "/" not in entry.file}
    if (
        manifest is not None and not manifest.is_of_a_save
    ):  # seal lists the ties that it saw in files, which proves nothing
        recorded = {index: replace(entry, aliases={}) for index, entry in recorded.items()}
    for group in group_files(folder):
        place = _position(group)
        if place is None or group.is_left_over:
            continue
        index, rank = place
        if index not in found or rank < found[index][0]:
            found[index] = rank, _entry(group, index, recorded.get(index))
    return tuple(entry for _, (_, entry) in sorted(found.items()))


def all_state_dicts(folder: CheckpointFolder, *, of_modules: bool = True) -> tuple[Entry, ...]:
    """Return every state dict of a module in a folder or file, including those inside training
    dicts.

    A dict with state dicts of modules in it is a training dict, even where a tensor lies in it (a
    loss, a state of the generators). ``of_modules`` off: every dict that holds a tensor.
    """
    found: list[Entry] = []
    for group in group_files(folder):
        if group.is_left_over or not (group.members or group.missing):
            continue
        if any(member.role not in (Role.MODEL, Role.UNKNOWN) for member in group.members):
            continue
        alone = group.members[0] if len(group.members) == 1 else None
        if alone is not None and alone.is_unsupported:
            continue  # it contains no readable weights
        if alone is None or alone.problem is not None or _is_one_state_dict(alone):
            found.append(_entry(group, len(found), None))
            continue
        for scope in alone.scopes:
            if scope.kind == "state dict" and (scope.is_model or not of_modules):
                found.append(_inside(alone, scope.path, len(found)))
    return tuple(found)


def _is_one_state_dict(component: Component) -> bool:
    whole = component.whole
    return whole is not None and (
        whole.is_model
        or not any(
            scope.is_model and scope.path
            for scope in component.scopes
            if scope.kind == "state dict"
        )
    )


def believed(manifest: Manifest | None, folder: CheckpointFolder) -> Manifest | None:
    """Return a manifest without its records of files that changed since the save. The manifest
    lists files by name and position, and a repair moves entries up; models are judged one by one,
    by their keys.
    """
    if manifest is None:
        return None
    optimizers = manifest.optimizers if _is_as_saved(manifest, folder, Role.OPTIMIZER) else ()
    schedulers = manifest.schedulers if _is_as_saved(manifest, folder, Role.SCHEDULER) else ()
    if not _is_as_saved(manifest, folder, Role.MODEL):
        optimizers = tuple(replace(entry, models=()) for entry in optimizers)
    if not optimizers:
        schedulers = tuple(replace(entry, optimizer=None) for entry in schedulers)
    custom = manifest.custom if _is_as_saved(manifest, folder, Role.CUSTOM) else ()
    return replace(manifest, optimizers=optimizers, schedulers=schedulers, custom=custom)


def _is_as_saved(manifest: Manifest, folder: CheckpointFolder, role: Role) -> bool:
    """Return whether the files of a role are the listed ones of the manifest, with the listed
    sizes.
    """
    saved = {
        name: size
        for name, size in manifest.files.items()
        if (parsed := parse_file_name(name)) is not None and parsed.role is role
    }
    found = (one for one in folder.components if one.role is role and not one.name.is_of_trainer)
    return saved == {str(one.path): one.size for one in found}


def state_entries(
    folder: CheckpointFolder, role: Role, recorded: Sequence[ManifestEntry]
) -> tuple[Entry, ...]:
    """Return the entries of a role that Accelerate numbers (optimizers, schedulers, custom, ...),
    in order.
    """
    known = {entry.file: entry for entry in recorded}
    return tuple(
        single_entry(component, known.get(str(component.path)))
        for family in folder.entries(role)
        for component in family
    )


def single_entry(component: Component, recorded: ManifestEntry | None = None) -> Entry:
    """Return one file as an entry."""
    return Entry(
        index=component.name.index,
        members=(component,),
        label=str(component.path),
        problem=_problem(component),
        recorded=recorded,
    )


def doubles(root: AnyPath, entries: Sequence[Entry], *, wrapped: bool) -> dict[int, int]:
    """Return (position of a duplicate -> position of its original), proven by reading every byte of
    both.

    ``wrapped``: the keys of the duplicate must carry more of the wrappers that ``prepare`` puts
    around a model; otherwise equal entries are duplicates whatever their keys. Raises OSError when
    a file cannot be read.
    """
    intact = {
        one.members[0].path: number
        for number, one in enumerate(entries)
        if len(one.members) == 1 and not one.problem and not one.path
    }

    def depth(path: PurePosixPath) -> tuple[int, int]:
        return _depth(entries[intact[path]])

    def equality(pairing: Pairing) -> bool | None:
        if wrapped and depth(pairing.other.path) <= depth(pairing.kept.path):
            return None
        return first_unequal(root, pairing, full=True) is None or None

    ordered = [entries[intact[path]].members[0] for path in sorted(intact, key=depth)]
    return {
        intact[entry.path]: intact[original.path]
        for original, entry, _ in equal_entries(ordered, equality)
    }


def changed_files(root: AnyPath, entries: Sequence[Entry]) -> list[str]:
    """Return the files that changed since the scan."""
    known = {member.path: member.fingerprint for entry in entries for member in entry.members}
    changed = []
    for path, before in known.items():
        status = stat_of(root / path)
        if (status.st_size, status.st_mtime_ns, status.st_ino) != tuple(before):
            changed.append(str(path))
    return changed


def model_position(group: ModelFiles) -> int | None:
    """Return the position at which ``load_state`` looks for a model's files, None for files that it
    never reads.
    """
    place = _position(group)
    return place[0] if place is not None and not group.is_left_over else None


def _position(group: ModelFiles) -> tuple[int, int] | None:
    """Return position and rank of preference of a model's files, None for files that ``load_state``
    never reads.
    """
    if group.index_path is not None:
        name = parse_file_name(group.index_path.name)
    else:
        name = group.members[0].name if group.members else None
    return name.load_order if name is not None else None


def _entry(group: ModelFiles, index: int, recorded: ManifestEntry | None) -> Entry:
    several = len(group.members) > 1
    problems = [
        f"{member.path}: {text}" if several else text
        for member in group.members
        if (text := _problem(member))
    ]
    if group.missing:
        are = "is" if len(group.missing) == 1 else "are"
        problems.append(f"{', '.join(group.missing[:3])} {are} missing")
    shapes: dict[str, tuple[int, ...] | None] = {}
    for member in group.members:
        whole = member.whole
        if whole is None and member.problem is None:
            problems.append(f"{member.path} is not a state dict")
        shapes.update(shapes_of(member, ()))
    if group.is_in_parts:
        shapes = {tensor.fqn: tensor.shape for tensor in group.parted_tensors}
        problems += [
            f"{tensor.fqn!r}: {tensor.problem}" for tensor in group.parted_tensors if tensor.problem
        ][:1]
    if not problems and (lost := group.lost):
        problems.append(f"{group.index_path} lists {lost[0]!r}, but no shard holds it")
    label = group.label
    tensors = [tensor for member in group.members for tensor in member.tensors]
    if recorded is not None and not _lists(recorded, label, tensors):
        recorded = None
    aliases = {
        name: source
        for name, source in (recorded.aliases if recorded else {}).items()
        if name not in shapes and source in shapes
    }
    shapes.update({name: shapes[source] for name, source in aliases.items()})
    return Entry(
        index=index,
        members=group.members,
        label=label,
        problem="; ".join(problems),
        shapes=shapes,
        aliases=aliases,
        recorded=recorded,
        index_words=group.index_words,
    )


def _lists(recorded: ManifestEntry, label: str, tensors: Sequence[TensorInfo]) -> bool:
    """Return whether the manifest lists this file unchanged: a repair may have moved or renamed the
    saved file.
    """
    if recorded.file != label:
        return False
    return not recorded.keys or recorded.keys == key_fingerprint(
        (tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors
    )


def _inside(component: Component, path: tuple[str, ...], index: int) -> Entry:
    where = "".join(f"[{step!r}]" for step in path)
    return Entry(
        index=index,
        members=(component,),
        label=f"{component.path}{where}",
        path=path,
        shapes=shapes_of(component, path),
    )


def shapes_of(component: Component, path: tuple[str, ...]) -> dict[str, tuple[int, ...] | None]:
    """Return the names in the state dict at ``path`` of a file, with the shapes of those that are
    tensors.
    """
    names: dict[str, tuple[int, ...] | None] = {}
    for scope in component.scopes:
        if scope.path == path and scope.kind == "state dict":
            names = dict.fromkeys(scope.names)
    if isinstance(component.content, TorchFile):
        for state_dict in component.content.state_dicts:
            if state_dict.path == path:
                names.update({tensor.fqn: tensor.shape for tensor in state_dict.tensors})
    else:
        names.update({tensor.fqn: tensor.shape for tensor in component.tensors})
    return names


def _problem(component: Component) -> str:
    problem = component.problem
    if problem is None:
        return parts_problem(component) if component.name.is_of_parts else ""
    sizes = ""
    if problem.need is not None and str(problem.need) not in problem.message:
        sizes = f" (expected {problem.need} bytes, found {problem.have})"
    kind = "" if problem.kind is ProblemKind.UNREADABLE else f"{problem.kind.value}: "
    return f"{kind}{problem.message}{sizes}"


def _depth(entry: Entry) -> tuple[int, int]:
    """Count the wrappers of ``prepare`` around an entry, without ``torch.compile``: a script may
    compile one of two models.
    """
    chain = [segment for segment in entry.chain if segment in PREPARE_WRAPPERS]
    return len(set(chain)), len(chain)

"""Summary of a checkpoint as a check understood it: models, optimizers, processes, step, libraries.

A person who reads it sees a mistake that no rule knows: another model's config, an optimizer of
half the parameters, a step of yesterday. All of it is from headers that a check reads anyway, the
manifest, and three small JSON files.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, ModelConfig, read_model_config
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.incomplete import IncompleteCheckpoint
from ckptfix.diagnosis.optimizer_kinds import name_of
from ckptfix.diagnosis.unresumable import lost_step
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.reports import Serialized
from ckptfix.wording import Line, count_of, few, human_size, line, series

_MOST_STATES = 16
"""No optimizer keeps as many states for a parameter; a hostile pickle can name a million."""

READ_BY_UNDERSTAND = (CONFIG, ADAPTER)
"""The files that nothing but ``understand`` reads."""


class _Recorded(Serialized):
    """Base of values whose keys are left out where nothing is recorded; 0 and empty lists are
    values.
    """

    __slots__ = ()

    def json_items(self, at: str = "") -> Iterator[tuple[str, object]]:
        """Yield the keys that have a value."""
        return (
            (key, value) for key, value in super().json_items(at) if value not in (None, "", {})
        )


class UnderstoodModel(_Recorded, Struct, frozen=True, kw_only=True):
    """A model, or another file with tensors (``is_model`` off). ``path``: its file, folder, or the
    index of its files.

    ``unread``: how many of its files are missing or damaged, whose tensors are not counted.
    ``ranks``: how many saved it, each its parts of the tensors in files of its own. ``kind``: its
    class, as a config or the manifest records it. ``format``: of a folder. ``nbytes``: of the
    tensors, None where no header has their shapes.
    """

    json_keys: ClassVar = (
        "path is_model files unread ranks class=kind format layers vocabulary rank base tensors "
        "bytes=nbytes dtypes"
    )

    path: PurePosixPath
    is_model: bool = True
    files: int | None = None
    unread: int = 0
    ranks: int | None = None
    kind: str = ""
    format: str = ""
    layers: int | None = None
    vocabulary: int | None = None
    rank: int | None = None
    base: str = ""
    tensors: int = 0
    nbytes: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.path}/" if self.format else str(self.path)
        facts = [
            self.format,
            f"parts of {count_of(self.ranks, 'rank')}" if self.ranks is not None else "",
            self.kind,
            f"rank {self.rank}" if self.rank is not None else "",
            f"of {self.base}" if self.base else "",
            count_of(self.layers, "layer") if self.layers is not None else "",
            f"vocabulary {self.vocabulary}" if self.vocabulary is not None else "",
        ]
        about = ", ".join(filter(None, facts))
        if len(self.dtypes) > 1:
            by_size = sorted(self.dtypes.items(), key=lambda pair: -pair[1])
            dtypes = series([f"{count} {dtype}" for dtype, count in by_size[:3]])
        else:
            dtypes = "".join(self.dtypes)
        numbers = [
            count_of(self.tensors, "tensor"),
            dtypes,
            human_size(self.nbytes) if self.nbytes is not None else "",
            (
                count_of(self.files, "file")
                if self.files is not None and self.files + self.unread > 1
                else ""
            ),
            f"{self.unread} not read" if self.unread else "",
        ]
        return f"{name}{f' ({about})' if about else ''}: {', '.join(filter(None, numbers))}"


class UnderstoodOptimizer(_Recorded, Struct, frozen=True, kw_only=True):
    """An optimizer. ``kind``: its class by the manifest, else by its keys; "" for an unknown one.

    ``key``: the keys that lead to it in a file that holds more. ``states``: the names of what it
    keeps for a parameter.
    """

    json_keys: ClassVar = "path key class=kind format parameters states step"

    path: PurePosixPath
    key: str = ""
    kind: str
    format: str
    parameters: int
    states: tuple[str, ...]
    step: int | None = None

    def __str__(self) -> str:
        name = (
            f"{self.path}/"
            if self.format
            else f"{self.path}: {self.key}"
            if self.key
            else str(self.path)
        )
        states = (
            ""
            if self.kind
            else f"states {', '.join(self.states[:4])}"
            if self.states
            else "no states"
        )
        about = ", ".join(filter(None, (self.format, self.kind or states)))
        step = f", step {self.step}" if self.step is not None else ""
        return f"{name} ({about}): {count_of(self.parameters, 'parameter')}{step}"


class Understood(_Recorded, Struct, frozen=True, kw_only=True):
    """Facts about one folder, as they were understood.

    ``libraries``: name -> version. ``problems``: of small JSON files, and random states that are
    missing, in words. ``config``: the model of a config, where several models may be it.
    """

    json_keys: ClassVar = (
        "models optimizers config processes processes_may_be_more step epoch libraries problems"
    )

    models: tuple[UnderstoodModel, ...] = ()
    optimizers: tuple[UnderstoodOptimizer, ...] = ()
    config: str = ""
    processes: int | None = None
    processes_may_be_more: bool | None = None
    step: int | None = None
    epoch: float | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def joined(self, below: "Understood", folder: PurePosixPath) -> "Understood":
        """Return this with what was understood of a sub-folder, by its paths from here."""
        return replace(
            self,
            models=self.models
            + tuple(replace(one, path=folder / one.path) for one in below.models),
            optimizers=self.optimizers
            + tuple(replace(one, path=folder / one.path) for one in below.optimizers),
            libraries={**below.libraries, **self.libraries},
            problems=self.problems + tuple(f"{folder}/{words}" for words in below.problems),
        )

    def lines(self, *, is_verbose: bool = False) -> Iterator[Line]:
        """Yield a line for each fact; of many models only the first few, unless ``is_verbose``."""
        models = [str(one) for one in self.models if one.is_model]
        others = [str(one) for one in self.models if not one.is_model]
        optimizers = list(map(str, self.optimizers))
        for label, values, many in (
            ("model", models, "models"),
            ("file", others, "files"),
            ("config", [self.config] if self.config else [], ""),
            ("optimizer", optimizers, "optimizers"),
        ):
            texts = [f"  {label:9}  {value}" for value in values]
            yield from map(line, texts) if is_verbose else few(texts, many)
        progress = [f"step {self.step}"] if self.step is not None else []
        progress += [f"epoch {self.epoch:g}"] if self.epoch is not None else []
        if progress:
            yield line(f"  {'run':9}  {', '.join(progress)}")
        least = "at least " if self.processes_may_be_more else ""
        saved_by = (
            [f"{least}{count_of(self.processes, 'process')}"] if self.processes is not None else []
        )
        saved_by += [f"{library} {version}" for library, version in self.libraries.items()]
        if saved_by:
            yield line(f"  {'saved by':9}  {', '.join(saved_by)}")
        yield from (line(f"  {words}", colour="yellow") for words in self.problems)


def understand(case: Case) -> Understood:
    """Return what is known of a diagnosed folder. Reads up to two small JSON files, each once."""
    folder, manifest, progress = case.folder, case.manifest, case.trainer
    names = {path.name for path in folder.strays} if folder.only is None else set()
    configs = {
        name: read_model_config(folder.root, name) for name in (CONFIG, ADAPTER) if name in names
    }
    models = list(_models(case))
    described, config = _described(models, configs)
    libraries = {library: version for one in configs.values() for library, version in one.libraries}
    problems = [words for one in configs.values() for words in one.problems]
    is_told = any(one.path == PurePosixPath(TRAINER_STATE) for one in case.findings)
    if progress.problem and not is_told:
        problems.append(f"{TRAINER_STATE}: {progress.problem}")
    is_incomplete = any(isinstance(finding, IncompleteCheckpoint) for finding in case.findings)
    lost = lost_step(folder) if folder.only is None and not is_incomplete else None
    if lost is not None:
        problems.append(lost)
    # A seal of a stock save names the version of ckptfix that sealed it, and counts no processes.
    saved = manifest if manifest is not None and manifest.is_of_a_save else None
    return Understood(
        models=described,
        optimizers=tuple(_optimizers(case)),
        config=config,
        processes=_processes(folder) if saved is None else saved.world_size,
        # The last ranks may have lost their files.
        processes_may_be_more=True if saved is None and folder.processes else None,
        step=progress.step,
        epoch=progress.epoch,
        libraries={**(saved.versions if saved is not None else {}), **libraries},
        problems=tuple(problems),
    )


def _processes(folder: CheckpointFolder) -> int | None:
    """Return the number of processes that left random states; one process of the Trainer has no
    number.
    """
    is_of_one = any(
        one.role is Role.RNG_STATE and one.name.rank is None for one in folder.components
    )
    return folder.processes or (1 if is_of_one else None)


def _models(case: Case) -> Iterator[UnderstoodModel]:
    """Yield the models whose headers could be read; a finding is about every other one."""
    for group in case.groups:
        members = [one for one in group.members if one.content is not None]
        is_weights = bool(members) and members[0].role in (Role.MODEL, Role.UNKNOWN)
        if is_weights and not group.is_left_over and any(one.tensors for one in members):
            yield _of_files(group, members, case.manifest)
    for state in case.sharded:
        if state.model is not None:
            yield _of_dcp(state, case.manifest)
    for of_ranks in case.deepspeed:
        if of_ranks.tensors:
            files = of_ranks.files or None
            yield UnderstoodModel(
                path=of_ranks.path, format="DeepSpeed", tensors=of_ranks.tensors, files=files
            )


def _of_files(
    group: ModelFiles, members: Sequence[Component], manifest: Manifest | None
) -> UnderstoodModel:
    first = members[0]
    is_indexed = group.index is not None or len(group.members) > 1
    path = (
        group.index_path
        if group.index_path is not None and is_indexed
        else PurePosixPath(group.label)
    )
    own = first.role is Role.MODEL or first.name.is_of_library or first.whole is not None
    files = (*group.members, *([group.index] if group.index is not None else []))
    nbytes, dtypes = 0, Counter[str]()
    if group.is_in_parts:
        for joined in group.parted_tensors:
            dtypes[joined.dtype] += 1
            nbytes += _bytes_of(joined.dtype, joined.shape)
    for member in members if not group.is_in_parts else ():
        # Tied weights are in a torch file under two keys, and their bytes are there once.
        counted: set[tuple[int, int]] = set()
        for tensor in member.tensors:
            dtypes[tensor.dtype] += 1
            if tensor.data_offsets is None or tensor.data_offsets not in counted:
                nbytes += _bytes_of(tensor.dtype, tensor.shape)
            if tensor.data_offsets is not None:
                counted.add(tensor.data_offsets)
    return UnderstoodModel(
        path=path,
        is_model=own,
        files=len(members),
        unread=len(group.members) - len(members) + len(group.missing) - len(group.renamed),
        ranks=len({member.name.rank for member in group.members}) if group.is_in_parts else None,
        kind=_recorded(manifest, str(path), {str(one.path): one.size for one in files}),
        tensors=dtypes.total(),
        nbytes=_bounded(nbytes),
        dtypes=dtypes,
    )


def _of_dcp(state: DcpFolder, manifest: Manifest | None) -> UnderstoodModel:
    assert state.model is not None
    scope = state.model
    keys = {".".join((*scope.path, name)) for name in scope.names}
    tensors = [one for one in state.tensors if one.fqn in keys]
    return UnderstoodModel(
        path=state.path,
        files=len(state.data),
        kind=_recorded(manifest, str(state.path), _sizes(state)),
        format="DCP",
        tensors=len(tensors) or len(scope.names),
        nbytes=(
            _bounded(sum(_bytes_of(one.dtype or "", one.shape) for one in tensors))
            if tensors
            else None
        ),
        dtypes=Counter(one.dtype or one.torch_dtype for one in tensors),
    )


def _bounded(nbytes: int) -> int | None:
    """Return a number of bytes, None for one that shapes of a hostile ``.metadata`` can claim and
    no disk holds.
    """
    return nbytes if nbytes < 1 << 63 else None


def _bytes_of(dtype: str, shape: Iterable[int]) -> int:
    return prod(shape) * DTYPE_BITS.get(dtype, 0) // 8


def _optimizers(case: Case) -> Iterator[UnderstoodOptimizer]:
    in_folders = {state.path: state for state in case.sharded}
    files = {component.path: component.size for component in case.folder.components}
    for saved in case.every_optimizer:
        state = in_folders.get(saved.path)
        sizes = {str(saved.path): files[saved.path]} if saved.path in files else {}
        states = {name: None for own in saved.states.values() for name in own}
        # Before the first step there are only options, and a wrapper such as SAM has those of what
        # it wraps.
        is_shown = bool(states.keys() - {"step"}) or saved.is_plain
        yield UnderstoodOptimizer(
            path=saved.path,
            key=saved.key,
            kind=_recorded(
                case.manifest, str(saved.path), _sizes(state) if state is not None else sizes
            )
            or (name_of(saved.options, states) if is_shown else ""),
            format="DCP" if state is not None else "",
            parameters=len(set(saved.parameters)) or len(saved.states),
            states=tuple(states)[:_MOST_STATES],
            step=saved.step,
        )


def _sizes(state: DcpFolder) -> dict[str, int]:
    return {str(path): file.size for path, file in state.files.items()}


def _recorded(manifest: Manifest | None, label: str, sizes: Mapping[str, int]) -> str:
    """Return the class that a save recorded for an entry, "" where its files are not those that the
    save wrote.
    """
    if (
        manifest is None
        or not sizes
        or any(manifest.files.get(path) != size for path, size in sizes.items())
    ):
        return ""
    entries = (*manifest.models, *manifest.optimizers)
    recorded = next((one.type for one in entries if one.file == label), "")
    return recorded.rpartition(".")[2]


def _described(
    models: list[UnderstoodModel], configs: Mapping[str, ModelConfig]
) -> tuple[tuple[UnderstoodModel, ...], str]:
    """Return the models with the facts of the configs, and in words a config that cannot be matched
    with one.
    """
    left: list[str] = []
    for name, config in configs.items():
        of_name = [
            number
            for number, one in enumerate(models)
            if one.is_model and one.path.name.startswith("adapter_model") == (name == ADAPTER)
        ]
        if len(of_name) == 1:
            number = of_name[0]
            models[number] = replace(
                models[number],
                kind=config.model or models[number].kind,
                layers=config.layers,
                vocabulary=config.vocabulary,
                rank=config.rank,
                base=config.base,
            )
        elif config.model:
            left.append(f"{name} ({config.model})")
    return tuple(models), ", ".join(left)

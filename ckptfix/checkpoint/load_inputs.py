"""Inputs that a folder gives to one call of ``from_pretrained``: configs, tensors, and samples of
their bytes.

A rule about a load takes such a value and no path, so that a test writes one in five lines, without
a file.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.deepspeed_files import deepspeed_below
from ckptfix.checkpoint.filenames import LORA, STEMS_OF_LIBRARIES, TRAINER_STATE, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.loading_order import SAFE, kind_of, loaders_of
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, library_of, read_config
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import TensorInfo
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import open_reader

SAMPLE = 4096
"""Bytes of a sample: a page of the disk."""

SAMPLED = 1 << 20
"""Most bytes of samples of one folder. A request of a store costs more than the bytes that it
brings.
"""

CONFIG_OF_LIBRARY = {"peft": ADAPTER, "transformers": CONFIG, "diffusers": CONFIG}
"""Library -> the config without which its ``from_pretrained`` takes nothing."""

_CONFIGS = (CONFIG, ADAPTER, "quantize_config.json", "hf_quant_config.json")
"""Configs that rules read. The last two are those of GPTQ and of modelopt."""

_STATES = frozenset(Role).difference(NOT_STATES, (Role.TRAINING_ARGUMENTS,))
"""Roles of files from which a run resumes. The Trainer leaves its arguments next to a final model."""

MISSING = "is missing"
"""Fault of an index that is not there."""

Config = Mapping[str, Any]
Sample = Callable[[str, int], bytes | None]
"""Takes a key and a number of bytes, and returns the first ones of its tensor; None once the limit
is reached.
"""


class Load(NamedTuple):
    """The weights of one model, and the configs next to them.

    ``path``: the file with the weights, or the index of their shards. ``files``: those with
    weights. ``library``: ``transformers``, ``diffusers`` or ``peft``. ``configs``: name -> content,
    of those that are readable. ``tensors``: key -> tensor, of all files. ``is_whole``: the header
    of each file was read. ``states_of``: whose states of a training lie next to them,
    ``save_state``, of the Trainer or of a script, "" for none. ``deepspeed``: the folder of
    DeepSpeed next to them, "" for none. ``steps``: of the optimizer, as a counter next to them
    shows. ``size``: the most bytes of a tensor that a rule reads. ``index_fault``: what is wrong
    with the index of its shards, "" where it has none, or nothing is. ``is_lora``: the weights are
    LoRA of a pipeline of diffusers, which reads no config. ``metadata``: the texts in the header of
    its file.
    """

    path: PurePosixPath
    library: str
    configs: Mapping[str, Config]
    tensors: Mapping[str, TensorInfo]
    sample: Sample = lambda key, size: None
    is_whole: bool = True
    states_of: str = ""
    deepspeed: str = ""
    steps: int = 0
    size: int = SAMPLE
    files: tuple[PurePosixPath, ...] = ()
    index_fault: str = ""
    is_lora: bool = False
    metadata: Mapping[str, str] = {}

    @property
    def config(self) -> Config:
        """The config that the library reads first; empty where it could not be read."""
        return self.configs.get(CONFIG_OF_LIBRARY[self.library], {})

    @property
    def turn(self) -> int:
        """The place of this family in the order in which the library looks for one: it loads the
        first that exists.
        """
        name = parse_file_name(self.path.name) if self.index_fault != MISSING else None
        kind = kind_of(name) if name is not None else None
        if name is None or name.model is None or kind is None:
            return sys.maxsize
        order = loaders_of(name.model, 0).get({"peft": "PEFT"}.get(self.library, self.library), ())
        return order.index(kind) if kind in order else sys.maxsize


def loads_of(
    folder: CheckpointFolder,
    groups: Sequence[ModelFiles],
    *,
    libraries: Collection[str] = tuple(CONFIG_OF_LIBRARY),
    data: bool = False,
    as_listed: bool = False,
    has_optimizer: bool = False,
    count_steps: Callable[[], int] = lambda: 0,
) -> Iterator[Load]:
    """Yield each load that the configs of a folder and the names of its weights promise. Reads the
    configs alone.

    ``libraries``: those whose loads are asked for. ``data``: let the rules read tensors as a whole.
    ``as_listed``: of shards those alone that the index lists now, as a loader reads them; without
    it all, as a repair lists them, so that no rule asks for tensors that are there.
    ``has_optimizer``: one is in a file of the folder, under any name. ``count_steps``: returns
    those of the optimizer, as a counter in the folder shows; called where there is a load.

    Weights without the config of their library yield nothing: no ``from_pretrained`` takes them.
    Two families of one model, such as safetensors next to ``.bin``, are two loads, those of an
    adapter one. Variants are loaded by name alone, and yield nothing.
    """
    for library in libraries:
        name = CONFIG_OF_LIBRARY[library]
        families = (
            [group for group in groups if _is_of(group, library, folder.only)]
            if folder.has_file(name)
            else []
        )
        if not families:
            continue
        configs = {
            known: config for known in _CONFIGS if (config := read_config(folder.root, known))
        }
        if library_of(configs.get(name, {})) != library:
            continue
        if library == "peft":
            # PEFT and transformers read the first alone, shards only transformers.
            families.sort(
                key=lambda group: (
                    group.index_path is not None,
                    group.members[0].name.suffix != SAFE,
                )
            )
            del families[1:]
        # Of several adapters PEFT saves each in a folder of its name. Those steps may be of one.
        are_several = library == "peft" and any(
            (folder.root / below / ADAPTER).is_file() for below in folder.plain_subfolders
        )
        steps = 0 if are_several else count_steps()
        folders = (*folder.subfolders, *map(PurePosixPath, folder.unscanned))
        states_of = _states_of(folder, has_optimizer=has_optimizer)
        for group in families:
            yield Load(
                path=group.index_path or group.members[0].path,
                library=library,
                configs=configs,
                tensors={
                    tensor.fqn: tensor
                    for member in (_files_listed(group) if as_listed else group.members)
                    for tensor in member.tensors
                },
                sample=_sampler(
                    folder.root, group, sys.maxsize if data else SAMPLED // len(families)
                ),
                is_whole=group.is_whole,
                states_of=states_of,
                deepspeed=next(
                    (str(path) for _, path in deepspeed_below(folder.root, folders)), ""
                ),
                steps=steps,
                size=sys.maxsize if data else SAMPLE,
                files=tuple(member.path for member in group.members),
                index_fault=_index_fault(group),
            )


def _files_listed(group: ModelFiles) -> tuple[Component, ...]:
    """Return the files of a model without the shards that its index does not list, whose keys stay
    random.

    A shard under another name than the index has for it is a listed one.
    """
    if group.read_index is None:
        return group.members
    listed = set(group.listed.values())
    return tuple(
        member
        for member in group.members
        if group.renamed.get(member.path, str(member.path)) in listed
    )


def _states_of(folder: CheckpointFolder, *, has_optimizer: bool) -> str:
    if folder.is_save_state:
        return "save_state"
    if folder.has_file(TRAINER_STATE):
        return "Trainer"
    has_states = any(component.role in _STATES for component in folder.components)
    return "script" if has_optimizer or has_states else ""


def _index_fault(group: ModelFiles) -> str:
    if group.index_path is None or group.read_index is not None:
        return ""
    return MISSING if group.index is None else "cannot be read"


def adapters_without_config(
    folder: CheckpointFolder, groups: Sequence[ModelFiles], loads: Sequence[Load]
) -> Iterator[Load]:
    """Yield the adapters of PEFT that ``loads_of`` passes over, with no config: a script may load
    them.

    Theirs is missing or unreadable, or their name has a variant, which PEFT does not know. The file
    that PEFT passes over next to the one that it reads is left over, and yields nothing.
    """
    (stem,) = STEMS_OF_LIBRARIES["peft"][SAFE]
    is_read = any(load.library == "peft" for load in loads)
    for group in groups:
        model = group.members[0].name.model if group.members else None
        if (
            model is None
            or model.stem != stem
            or group.is_left_over
            or (is_read and not model.variant)
        ):
            continue
        if folder.only is not None and group.members[0].name.shard is not None:
            continue
        yield Load(
            path=group.index_path or group.members[0].path,
            library="peft",
            configs={},
            tensors={tensor.fqn: tensor for member in group.members for tensor in member.tensors},
            is_whole=group.is_whole,
            files=tuple(member.path for member in group.members),
        )


def lora_of_diffusers(
    folder: CheckpointFolder, groups: Sequence[ModelFiles], *, has_optimizer: bool = False
) -> Iterator[Load]:
    """Yield the files of LoRA that ``load_lora_weights`` of a pipeline finds by their name.

    ``has_optimizer``: one is in a file of the folder, under any name.
    """
    for group in groups:
        model = group.members[0].name.model if group.members else None
        if model is None or model.stem != LORA or group.is_left_over:
            continue
        content = group.members[0].content
        yield Load(
            path=group.index_path or group.members[0].path,
            library="diffusers",
            configs={},
            tensors={tensor.fqn: tensor for member in group.members for tensor in member.tensors},
            is_whole=group.is_whole and group.members[0].name.shard is None,
            states_of=_states_of(folder, has_optimizer=has_optimizer),
            files=tuple(member.path for member in group.members),
            is_lora=True,
            metadata=content.metadata if isinstance(content, SafetensorsFile) else {},
        )


def _is_of(group: ModelFiles, library: str, only: str | None) -> bool:
    """Return whether a library looks for the files of a group by their names, without being told a
    variant.

    ``only``: the one file that was read, if it was one: a shard alone shows nothing.
    """
    if not group.members or group.is_left_over or group.members[0].name.index:
        return False
    name = group.members[0].name
    if only is not None and name.shard is not None:
        return False
    stems = STEMS_OF_LIBRARIES[library].get(name.suffix, ())
    return name.model is not None and name.stem in stems and not name.model.variant


def _sampler(root: AnyPath, group: ModelFiles, left: int) -> Sample:
    """Return what reads the first bytes of tensors. ``left``: the most that it reads in all."""
    places = {
        tensor.fqn: (member.path, tensor.data_offsets)
        for member in group.members
        for tensor in member.tensors
    }

    def sample(key: str, size: int) -> bytes | None:
        nonlocal left
        path, offsets = places[key]
        size = min(size, offsets[1] - offsets[0]) if offsets is not None else 0
        if offsets is None or size > left:
            return None
        left -= size
        with open_reader(root / path) as reader:
            return reader.read(offsets[0], size)

    return sample

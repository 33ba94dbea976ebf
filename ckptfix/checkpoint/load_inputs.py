"""What one call of ``from_pretrained`` is given by a folder: configs, tensors, and samples of their bytes.

A rule about a load takes such a value and no path, so that a test writes one in five lines, without a file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.entries import ModelFiles
from ckptfix.checkpoint.filenames import STEMS_OF_LIBRARIES, TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, read_config
from ckptfix.formats.tensor import TensorInfo
from ckptfix.storage.reading import open_reader

SAMPLE = 4096
"""Bytes of a sample: a page of the disk."""

_SAMPLED = 1 << 20
"""Most bytes of samples of one folder. A request of a store costs more than the bytes that it brings."""

CONFIG_OF_LIBRARY = {"peft": ADAPTER, "transformers": CONFIG, "diffusers": CONFIG}
"""Library -> the config without which its ``from_pretrained`` takes nothing."""

_CONFIGS = (CONFIG, ADAPTER, "quantize_config.json", "hf_quant_config.json")
"""What rules read: the last two are those of GPTQ and of modelopt."""

Config = Mapping[str, Any]
Sample = Callable[[str, int], bytes | None]
"""Takes a key and a number of bytes, and returns the first ones of its tensor; None once the limit is reached."""


class Load(NamedTuple):
    """The weights of one model, and the configs next to them.

    ``path``: the file with the weights, or the index of their shards. ``library``: ``transformers``, ``diffusers`` or
    ``peft``. ``configs``: name -> content, of those that are readable. ``tensors``: key -> tensor, of all files.
    ``is_whole``: the header of each file was read. ``states_of``: whose states of a training lie next to them,
    ``save_state`` or of the Trainer.
    """

    path: PurePosixPath
    library: str
    configs: Mapping[str, Config]
    tensors: Mapping[str, TensorInfo]
    sample: Sample = lambda key, size: None
    is_whole: bool = True
    states_of: str = ""

    @property
    def config(self) -> Config:
        """The config that the library reads first; empty where it could not be read."""
        return self.configs.get(CONFIG_OF_LIBRARY[self.library], {})


def library_of(config: Config) -> str:
    """Return the library whose ``from_pretrained`` a config is for, "" where it does not say."""
    if isinstance(config.get("peft_type"), str):
        return "peft"
    if isinstance(config.get("_class_name"), str):
        return "diffusers"
    return "transformers" if isinstance(config.get("architectures"), list) else ""


def loads_of(folder: CheckpointFolder, groups: Sequence[ModelFiles]) -> Iterator[Load]:
    """Yield each load that the configs of a folder and the names of its weights promise. Reads the configs alone.

    Weights without the config of their library yield nothing: no ``from_pretrained`` takes them. Two families of one
    model, such as safetensors next to ``.bin``, are two loads. Variants are loaded by name alone, and yield nothing.
    """
    for library, name in CONFIG_OF_LIBRARY.items():
        families = [group for group in groups if _is_of(group, library)] if folder.has_file(name) else []
        if not families:
            continue
        configs = {known: config for known in _CONFIGS if (config := read_config(folder.root, known))}
        if library_of(configs.get(name, {})) != library:
            continue
        sample = _sampler(folder.root, families)
        states_of = (
            "save_state" if folder.is_save_state else "Trainer" if folder.has_file(TRAINER_STATE) else ""
        )
        for group in families:
            yield Load(
                path=group.index_path or group.members[0].path,
                library=library,
                configs=configs,
                tensors={tensor.fqn: tensor for member in group.members for tensor in member.tensors},
                sample=sample,
                is_whole=group.is_whole,
                states_of=states_of,
            )


def _is_of(group: ModelFiles, library: str) -> bool:
    """Return whether a library looks for the files of a group by their names, without being told a variant."""
    if not group.members or group.is_left_over or group.members[0].name.index:
        return False
    name = group.members[0].name
    stems = STEMS_OF_LIBRARIES[library].get(name.suffix, ())
    return name.model is not None and name.stem in stems and not name.model.variant


def _sampler(root: Path, groups: Sequence[ModelFiles]) -> Sample:
    """Return what reads the first bytes of tensors, 1 MB of a folder in all."""
    places = {
        tensor.fqn: (member.path, tensor.data_offsets)
        for group in groups
        for member in group.members
        for tensor in member.tensors
    }
    left = _SAMPLED

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

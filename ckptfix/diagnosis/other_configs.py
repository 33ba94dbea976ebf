"""Configs with other settings than those in the checkpoints next to one, whose tensors have the same
shapes: somebody edited the file, or copied it from another run.

A resume loads into the model of the script. ``from_pretrained`` builds what the config says: it
fails, leaves layers random, or scales an adapter in another way without a word. Tensors show some of
these settings, of some classes; the checkpoints of the run show all of them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, library_of, read_config
from ckptfix.checkpoint.neighbours import Neighbours, are_on_both_sides, next_to_it
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.samples import are_equal_by_etags
from ckptfix.diagnosis.findings.config_faults import ChangedConfig, ChangedSetting
from ckptfix.diagnosis.saved_optimizers import Shape
from ckptfix.errors import CkptfixError
from ckptfix.wording import shortened

_SIZES = re.compile(
    r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|layers_per_block"
    r"|(vocab|hidden|(moe_)?intermediate|patch)_size|d_(model|ff|kv)|n_(embd|inner|head)"
    r"|(encoder_|decoder_)?ffn_dim|(num_|n_|encoder_|decoder_)?((attention|key_value)_)?heads"
    r"|(attention_)?head_dim|cross_attention_dim|num_(local_)?experts|norm_num_groups"
    r"|(in|out|block_out)_channels|(down|up)_block_types"
    r"|r|target_modules|modules_to_save|layers_to_transform|fan_in_fan_out|use_dora"
    r"|model_type|tie_word_embeddings"
)
"""Settings that no run changes while its tensors keep their shapes."""

_SCALES = re.compile(
    r"rope_.*|partial_rotary_factor|max_position_embeddings|n_positions|sliding_window"
    r"|layer_types"
    r"|hidden_act|activation_function|act_fn|.*norm_eps(ilon)?|num_experts_per_tok"
    r"|scale_attn_.*|(torch_)?dtype"
    r"|lora_alpha|alpha_pattern|use_rslora"
)
"""Settings that a script can change between two saves, such as for longer texts."""

_POSITIONS = ("max_position_embeddings", "n_positions")
_OF_POSITIONS = re.compile(r"position|\bwpe\b")
_MORE_ROWS = (0, 2)
"""Rows of learned positions beyond the setting: the models of OPT and BART have two more."""

_OF_MODULES = ("target_modules", "modules_to_save")
"""Lists that PEFT saves in any order."""

_MOST_LEVELS = 4
_LONGEST = 60


class _Difference(NamedTuple):
    """A setting of a config, and what it is in the config of a checkpoint next to it."""

    setting: str
    value: str
    expected: str


def other_configs(
    folder: CheckpointFolder, neighbours: Neighbours, below: PurePosixPath | None = None
) -> Iterator[ChangedConfig]:
    """Yield the configs of a folder that differ from those of all checkpoints next to it, which
    agree.

    ``below``: the path of the folder from its checkpoint, where only a hook of the script reads it.
    Between two checkpoints any of the settings is a warning, at an end of the run those are that no
    run changes. Of two checkpoints either config may be the changed one: that is a note about the
    later one.
    """
    for name in (CONFIG, ADAPTER) if folder.only is None else ():
        near = [*_near(folder, name, neighbours, below)] if folder.has_file(name) else []
        if not near or (len(near) == 1 and not near[0][0]):
            continue
        alike = frozenset.intersection(*(differences for _, _, differences in near))
        is_between = are_on_both_sides(is_earlier for is_earlier, _, _ in near)
        if alike:
            sizes = {each for each in alike if _is_size(each, folder)}
            first, *rest = sorted(alike, key=lambda each: (each not in sizes, each))
            _, nearest, _ = near[0]
            is_single = len(near) == 1
            is_wrong = is_between or (sizes and not is_single)
            yield (ChangedConfig if is_wrong else ChangedSetting)(
                path=(below or PurePosixPath()) / name,
                setting=first.setting,
                value=first.value,
                expected=first.expected,
                more=tuple(one.setting for one in rest),
                known_by=nearest if is_single else next_to_it(len(near)),
                nearest=nearest,
                is_of_hook=below is not None,
            )


def _near(
    folder: CheckpointFolder, name: str, neighbours: Neighbours, below: PurePosixPath | None
) -> Iterator[tuple[bool, str, frozenset[_Difference]]]:
    """Yield whether a checkpoint next to one is an earlier one, its name, and the differences of
    its config, up to a checkpoint without any.

    Runs of a sweep differ in such settings. A model that grew has other shapes, too.
    """
    for neighbour in neighbours.nearest():
        if not neighbour.is_of_same_run:
            return
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            there = root / below if below is not None else root
            # Each read of a store costs a request.
            if are_equal_by_etags(folder.root, there, [PurePosixPath(name)]):
                yield neighbour.is_earlier, neighbour.name, frozenset()
                return
            own, config = read_config(folder.root, name), read_config(there, name)
            if not (library_of(own) and library_of(config)):
                continue
            differences = frozenset(_differences(own, config))
            if not differences:
                yield neighbour.is_earlier, neighbour.name, differences
                return
            scan = scan_folder(there, wanted=lambda file: file.is_of_library)
            if _dtypes(folder) != _dtypes(scan):
                # Weights of another precision are told themselves.
                differences = frozenset(one for one in differences if not _is_dtype(one))
            if _shapes(folder) == _shapes(scan):
                yield neighbour.is_earlier, neighbour.name, differences


def _differences(own: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yield the settings that decide what a load gives, and that differ.

    One that a config lacks has the library's default, which its other versions write or leave out.
    """
    have, expected = _settings(own), _settings(there)
    for setting in {**have, **expected}:
        value, wanted = have.get(setting), expected.get(setting)
        if value == wanted or None in (value, wanted):
            continue
        # A pattern can stand for the same modules as a list.
        if {type(value), type(wanted)} != {str, list}:
            texts = (shortened(json.dumps(each), _LONGEST) for each in (value, wanted))
            yield _Difference(setting, *texts)


def _settings(config: Mapping[str, Any], levels: int = _MOST_LEVELS) -> dict[str, Any]:
    """Return the settings that decide what a load gives, by their paths in a config."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if _SIZES.fullmatch(key) or _SCALES.fullmatch(key):
            is_unordered = key in _OF_MODULES and isinstance(value, list)
            settings[key] = sorted(map(str, value)) if is_unordered else value
        elif isinstance(value, dict) and levels:
            inner = _settings(value, levels - 1)
            settings |= {f"{key}.{name}": each for name, each in inner.items()}
    return settings


def _is_size(difference: _Difference, folder: CheckpointFolder) -> bool:
    """Return whether tensors have the expected value as a size: that of positions is one if they
    are learned.
    """
    setting = difference.setting.rpartition(".")[2]
    if setting not in _POSITIONS:
        return _SIZES.fullmatch(setting) is not None
    return any(
        str(tensor.shape[0] - more) == difference.expected
        for component in folder.components
        for tensor in component.tensors
        if tensor.shape and _OF_POSITIONS.search(tensor.fqn)
        for more in _MORE_ROWS
    )


def _is_dtype(difference: _Difference) -> bool:
    return difference.setting.rpartition(".")[2] in ("dtype", "torch_dtype")


def _dtypes(folder: CheckpointFolder) -> set[str]:
    return {
        tensor.dtype
        for component in folder.components
        if component.name.is_of_library
        for tensor in component.tensors
    }


def _shapes(folder: CheckpointFolder) -> Counter[Shape]:
    """Return the shapes of the tensors that a library loads from a folder. A repair can rename
    their keys, and drop models of other numbers.
    """
    return Counter(
        tensor.shape
        for component in folder.components
        if component.name.is_of_library
        and component.name.index == 0
        and component.role is not Role.WEIGHTS_INDEX
        for tensor in component.tensors
    )

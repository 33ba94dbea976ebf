"""Makes the table of transformers' classes: ``python -m tests.architectures [NAME ...]``.

Each class that the auto mappings name is built from its default config on the meta device, and
twice more with other sizes. What changes with an attribute follows it, unless a flag or an id
changes it, too. About an hour of one core; with names, those classes are printed.
"""

import json
import re
import sys
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

from ckptfix.checkpoint.architectures import TABLE, pattern_of

_COUNTS = re.compile(
    r"(?:^|_)(?:n_?)?layers?$|layers$|^n_layer$|experts$|^num_hidden_groups$|^inner_group_num$|^depth$|^num_blocks$|^n_head_layers$"
)
_ROWS = re.compile(r"vocab_?size|positions?$|position_embeddings$|^n_positions$|^n_ctx$")
_OTHERS = re.compile(r"_id$|_idx$|_interval$")
_TIE = "tie_word_embeddings"
_EXPERTS = 16
"""Experts of a layer: 256 in each of 60 layers are 45,000 keys."""
_BLOCK = 16
"""Model types in a block: one each makes the table 360 KB, all in one 210 KB that take 60 ms to
read.
"""
_OFFSETS = (-1, 0, 1, 2, 8)
"""Offsets that the code of a class adds. Others, such as 1,024 of CPM-Ant, follow attributes that
were not changed.
"""
_LARGEST = 10_000
"""Keys of a model beyond which it is built once."""

Attribute = tuple[str, ...]
"""The path of an attribute in a config: ``("text_config", "vocab_size")``."""


class Build(NamedTuple):
    """A model on the meta device. ``keys``: key on disk -> shape. ``inside``: the keys of the
    module itself.
    """

    model: Any
    keys: Mapping[str, tuple[int, ...]]
    inside: Mapping[str, tuple[int, ...]]


def classes() -> dict[str, Any]:
    """Return name -> class, of all that the auto mappings name."""
    names: set[str] = set()
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.endswith("MAPPING_NAMES") and isinstance(mapping, Mapping):
            for value in mapping.values():
                names.update([value] if isinstance(value, str) else value)
    found = {name: getattr(transformers, name, None) for name in sorted(names)}
    return {
        name: cls
        for name, cls in found.items()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    }


def build(cls: Any, config: Any) -> Build:
    """Return a model of a config, without its bytes."""
    with torch.device("meta"), no_init_weights():
        model = cls(config)
    inside = model.state_dict()
    saved = revert_weight_conversion(model, dict(inside))
    return Build(model, _shapes(saved), _shapes(inside))


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items() if hasattr(tensor, "shape")}


def configs_in(config: Any, path: Attribute = ()) -> Iterator[tuple[Attribute, Any]]:
    """Yield a config and those in it, each with its path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and not name.startswith("_"):
            yield from configs_in(value, (*path, name))


def sizes_of(config: Any) -> dict[Attribute, int]:
    """Return the attributes of a config that may count layers or rows, with their values."""
    return {
        (*path, name): value
        for path, part in configs_in(config)
        for name, value in vars(part).items()
        if type(value) is int and value > 0 and (_COUNTS.search(name) or _ROWS.search(name))
    }


def changed(config: Any, values: Mapping[Attribute, int]) -> Any:
    """Return a new config with other values. Lists with an item for each layer are made anew."""
    settings = config.to_dict()
    for path, value in values.items():
        part: Any = settings
        owner: Any = config
        for name in path[:-1]:
            part, owner = part[name], getattr(owner, name)
        before = getattr(owner, path[-1])
        for key in _lists_for(part, path[-1], before):
            part[key] = [*part[key], *[part[key][-1]] * (value - before)]
            if key == "layer_types":
                del part[key]
        part[path[-1]] = value
    settings.pop("transformers_version", None)
    return type(config)(**settings)


def _lists_for(part: Mapping[str, Any], name: str, value: int) -> list[str]:
    """Return the lists of a config that are as long as a count says: one item for each layer, or by
    chance.
    """
    if value < 2 or not _COUNTS.search(name):
        return []
    return [
        key for key, item in part.items() if isinstance(item, list | tuple) and len(item) == value
    ]


def following_lists(cls: Any, config: Any, default: Build) -> set[str]:
    """Return the patterns whose numbers follow a list while the attribute that it is as long as
    stays.

    VITS has as many ``upsample_rates`` as ``prior_encoder_num_wavenet_layers`` by chance.
    """
    before = counts_of(default.keys)
    following = set()
    for path, value in sizes_of(config).items():
        settings = config.to_dict()
        part: Any = settings
        for name in path[:-1]:
            part = part[name]
        lists = [key for key in _lists_for(part, path[-1], value) if key != "layer_types"]
        for key in lists:
            part[key] = [*part[key], part[key][-1]]
        settings.pop("transformers_version", None)
        if lists:
            with suppress(
                Exception
            ):  # Most classes refuse such a config, which is the proof that both belong together.
                after = counts_of(build(cls, type(config)(**settings)).keys)
                following |= {
                    pattern for pattern, count in before.items() if after.get(pattern) != count
                }
    return following


def following_others(cls: Any, config: Any, wanted: Collection[Any]) -> set[Any]:
    """Return those of ``wanted`` that change with a flag or an id while all sizes stay: patterns of
    numbers, and places of rows.

    FSMT has ``pad_token_id`` + 1 more positions than ``max_position_embeddings``, and the last
    layer of BridgeTower is one of ``remove_last_layer``.
    """
    counts = [path for path in sizes_of(config) if _COUNTS.search(path[-1])]
    few = {path: 2 for path in counts if "experts" not in path[-1] and sizes_of(config)[path] > 2}
    with suppress(Exception):
        smaller = changed(config, few)
        build(cls, smaller)
        config = smaller

    def measured(config: Any) -> dict[Any, int]:
        made = build(cls, config)
        return {**counts_of(without_ties(made)), **rows_of({**made.inside, **made.keys})}

    before, sizes, following = measured(config), sizes_of(config), set()
    for path, part in configs_in(config):
        for name, value in vars(part).items():
            is_of_kind = type(value) is bool or (type(value) is int and _OTHERS.search(name))
            if name.startswith("_") or not is_of_kind:
                continue
            with suppress(Exception):
                made = changed(
                    config, {(*path, name): value + 1 if type(value) is int else not value}
                )
                if sizes_of(made) == sizes:
                    after = measured(made)
                    following |= {
                        place
                        for place in wanted
                        if after.get(place, before.get(place)) != before.get(place)
                    }
    return following


def variants(
    cls: Any, config: Any, sizes: Mapping[Attribute, int]
) -> list[tuple[dict[Attribute, int], Build]]:
    """Return builds with other sizes, each with all of its sizes."""
    counts = [path for path in sizes if _COUNTS.search(path[-1])]
    rows = [path for path in sizes if path not in counts]

    def grown(order: int) -> dict[Attribute, int]:
        values = {}
        for paths, step in ((counts, 1), (rows, 10)):
            for at, path in enumerate(paths if order > 0 else paths[::-1]):
                values[path] = sizes[path] + (at + 1 + (order < 0)) * step + (3 if step > 1 else 0)
        return values

    try:
        built = []
        for order in (1, -1):
            values = grown(order)
            made = changed(config, values)
            built.append((sizes_of(made) | {}, build(cls, made)))
        return built
    except Exception:
        pass
    # One at a time: what cannot be changed is not known.
    built = []
    for path in sizes:
        try:
            for order in (1, -1):
                made = changed(config, {path: grown(order)[path]})
                built.append((sizes_of(made), build(cls, made)))
        except Exception:
            continue
    return built


def numbers_of(keys: Iterable[str]) -> dict[str, dict[str, set[int]]]:
    """Return pattern that ends in ``*`` -> what is before it in a key -> the numbers at its
    place.
    """
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        parts = key.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal():
                numbers[pattern_of(".".join(parts[: at + 1]))][".".join(parts[:at])].add(int(part))
    return numbers


def counts_of(keys: Iterable[str]) -> dict[str, int]:
    """Return pattern that ends in ``*`` -> how many numbers it has, where they are 0 to N - 1
    everywhere.
    """
    counts = {}
    for pattern, parents in numbers_of(keys).items():
        numbers = list(parents.values())
        if all(each == set(range(len(numbers[0]))) for each in numbers):
            counts[pattern] = len(numbers[0])
    return counts


def rows_of(keys: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int], int]:
    """Return (pattern, dimension) -> size, where all keys of a pattern agree."""
    sizes: dict[tuple[str, int], set[int]] = defaultdict(set)
    for key, shape in keys.items():
        pattern = pattern_of(key)
        for dimension, size in enumerate(shape):
            sizes[pattern, dimension].add(size)
    return {place: next(iter(each)) for place, each in sizes.items() if len(each) == 1}


def followed(
    values: Sequence[Mapping[Any, int]],
    sizes: Sequence[Mapping[Attribute, int]],
    wanted: Callable[[str], object],
) -> dict[Any, tuple[Attribute, int, int]]:
    """Return place -> (attribute, multiple, offset), for those that exactly one attribute explains
    in every build.
    """
    result = {}
    for place, first in values[0].items():
        if any(place not in each for each in values):
            continue
        if len({each[place] for each in values}) == 1:
            continue
        fitting = []
        for path, start in sizes[0].items():
            if not wanted(path[-1]) or any(path not in each for each in sizes):
                continue
            for multiple in (1, 2):
                offset = first - multiple * start
                if offset in _OFFSETS and all(
                    each[place] == multiple * size[path] + offset
                    for each, size in zip(values, sizes, strict=True)
                ):
                    fitting.append((path, multiple, offset))
        if len(fitting) == 1:
            result[place] = fitting[0]
    return result


def on_disk(build: Build, key: str) -> str:
    """Return the key under which a tensor is saved."""
    if key in build.keys:
        return key
    tensor = torch.empty(build.inside.get(key, (1,)), device="meta")
    try:
        return str(next(iter(revert_weight_conversion(build.model, {key: tensor}))))
    except Exception:
        return key


def ties_of(build: Build) -> dict[Attribute, dict[str, str]]:
    """Return config with a flag -> key -> the key whose values it has, of what this flag alone
    ties.
    """
    flagged = {
        path: part
        for path, part in configs_in(build.model.config)
        if isinstance(getattr(part, _TIE, None), bool)
    }
    before = {path: getattr(part, _TIE) for path, part in flagged.items()}
    ties = {}
    for path in flagged:
        for each, part in flagged.items():
            setattr(part, _TIE, each == path)
        if tied := build.model.get_expanded_tied_weights_keys(all_submodels=True):
            ties[path] = {
                on_disk(build, target): on_disk(build, source) for target, source in tied.items()
            }
    for path, part in flagged.items():
        setattr(part, _TIE, before[path])
    return ties


def keeps_flag(config: Any, path: Attribute) -> bool:
    """Return whether a config has the flag that it is made with: T5 ties always, and VibeVoice
    never.
    """
    for flag in (True, False):
        settings = config.to_dict()
        settings.pop("transformers_version", None)
        part: Any = settings
        for name in path:
            part = part[name]
        part[_TIE] = flag
        if getattr(dict(configs_in(type(config)(**settings)))[path], _TIE) is not flag:
            return False
    return True


def without_ties(build: Build) -> dict[str, tuple[int, ...]]:
    """Return the keys of a file in which nothing is stored twice."""
    tied = {target for ties in ties_of(build).values() for target in ties}
    return {key: shape for key, shape in build.keys.items() if key not in tied}


def described(cls: Any) -> dict[str, Any]:
    """Return what the table says about a class."""
    config = cls.config_class()
    of_class = sizes_of(config)
    experts = {
        path: min(size, _EXPERTS) for path, size in of_class.items() if "experts" in path[-1]
    }
    if any(of_class[path] > _EXPERTS for path in experts):
        with suppress(Exception):
            config = changed(config, experts)
    default = build(cls, config)
    sizes = sizes_of(config)
    others = variants(cls, config, sizes) if sizes and len(default.keys) <= _LARGEST else []
    all_sizes = [sizes, *(each for each, _ in others)]
    builds = [default, *(each for _, each in others)]
    numbers, rows = {}, {}
    if others:
        counts = [{**each.keys, **each.inside} for each in builds]
        numbers = followed([counts_of(each) for each in counts], all_sizes, _COUNTS.search)
        # A load needs all numbers only if each has a tensor of its own.
        untied = [counts_of(without_ties(each)) for each in builds]
        of_file = followed(untied, all_sizes, _COUNTS.search)
        saved = numbers_of(default.keys)
        numbers = {
            pattern: each
            for pattern, each in numbers.items()
            if pattern not in saved or of_file.get(pattern) == each
        }
        if numbers:
            of_lists = following_lists(cls, config, default)
            numbers = {
                pattern: each for pattern, each in numbers.items() if pattern not in of_lists
            }
        rows = followed(
            [rows_of({**each.inside, **each.keys}) for each in builds],
            all_sizes,
            lambda name: _ROWS.search(name) or "experts" in name,
        )
    if numbers or rows:
        elsewhere = following_others(cls, config, [*numbers, *rows])
        numbers = {place: each for place, each in numbers.items() if place not in elsewhere}
        rows = {place: each for place, each in rows.items() if place not in elsewhere}
    paths = sorted({each[0] for each in (*numbers.values(), *rows.values())})
    patterns = {pattern_of(key): None for each in builds for key in each.keys}
    inside = {pattern_of(key): None for each in builds for key in each.inside}
    model = default.model
    parts = dict(configs_in(config))
    ties = ties_of(default)

    def weight_of(getter: str) -> str:
        try:
            weight = getattr(getattr(model, getter)(), "weight", None)
        except Exception:
            return ""
        named = model.named_parameters(remove_duplicate=False)
        return next(
            (pattern_of(on_disk(default, key)) for key, each in named if each is weight), ""
        )

    aliases = {
        path: [old for old, new in type(parts[path[:-1]]).attribute_map.items() if new == path[-1]]
        for path in paths
    }
    record = {
        "type": config.model_type,
        "keys": list(patterns),
        "inside": [key for key in inside if key not in patterns],
        "prefix": model.base_model_prefix,
        "attributes": [[".".join(path), default_of(config, path), aliases[path]] for path in paths],
        "numbers": {
            pattern: [paths.index(path), *rest] for pattern, (path, *rest) in numbers.items()
        },
        "rows": {
            f"{pattern} {dimension}": [paths.index(path), *rest]
            for (pattern, dimension), (path, *rest) in rows.items()
        },
        "parts": {".".join(path): part.model_type for path, part in parts.items() if path},
        "flags": {
            ".".join(path): getattr(type(parts[path])(), _TIE)
            for path in ties
            if keeps_flag(config, path)
        },
        "ties": {
            ".".join(path): {
                pattern_of(target): pattern_of(source) for target, source in tied.items()
            }
            for path, tied in ties.items()
        },
        "missing": sorted(model._keys_to_ignore_on_load_missing or ()),
        "unexpected": sorted(model._keys_to_ignore_on_load_unexpected or ()),
        "unsaved": sorted(
            {pattern_of(on_disk(default, key)) for key in model._keys_to_ignore_on_save or ()}
        ),
        "head": weight_of("get_output_embeddings"),
        "embedding": weight_of("get_input_embeddings"),
    }
    return {key: value for key, value in record.items() if value or key == "keys"}


def default_of(config: PreTrainedConfig, path: Attribute) -> int | None:
    """Return the value of an attribute that a config leaves out, None where it follows others: T5's
    decoder layers.

    A config inside of a config leaves out the defaults of its own class: Mistral 3 has other ones
    for its text.
    """
    part = dict(configs_in(config))[path[:-1]]
    kind, name = type(part), path[-1]
    fresh = kind()
    default = getattr(fresh, name, None)
    for other, value in vars(fresh).items():
        if other != name and type(value) is int and (_COUNTS.search(other) or _ROWS.search(other)):
            with suppress(Exception):
                if getattr(kind(**{other: value + 1}), name, None) != default:
                    return None
    settings: dict[str, Any] = {"model_type": part.model_type}
    for each in path[-2::-1]:
        settings = {each: settings}
    with suppress(Exception):
        made = type(config)(**settings) if path[:-1] else fresh
        of_whole = getattr(dict(configs_in(made))[path[:-1]], name, None)
        return default if type(default) is int and of_whole == default else None
    return None


def packed(records: Mapping[str, dict[str, Any]], version: str) -> bytes:
    """Return the table: a line with the places of its blocks and the model types in each, and the
    blocks.
    """
    classes_of: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, record in records.items():
        classes_of[record["type"]][name] = {
            key: value for key, value in record.items() if key != "type"
        }
    types = sorted(classes_of)
    places, data = [], b""
    for start in range(0, len(types), _BLOCK):
        block = {kind: classes_of[kind] for kind in types[start : start + _BLOCK]}
        compressed = zlib.compress(json.dumps(block, separators=(",", ":")).encode(), 9)
        places.append([len(data), len(compressed), *block])
        data += compressed
    index = {"version": version, "blocks": places}
    return json.dumps(index, separators=(",", ":")).encode() + b"\n" + data


def main(names: list[str]) -> None:
    """Write the table, or print the records of the named classes."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = classes()
    start, failed, records = time.monotonic(), {}, {}
    for name, cls in known.items():
        if names and name not in names:
            continue
        began = time.monotonic()
        try:
            records[name] = described(cls)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        if names:
            print(
                name,
                f"{time.monotonic() - began:.1f} s",
                failed.get(name) or json.dumps(records[name], indent=1),
                flush=True,
            )
        elif (took := time.monotonic() - began) > 5:
            print(name, f"{took:.1f} s", flush=True)
    print(f"{len(records)} of {len(known)} classes, {time.monotonic() - start:.0f} s")
    for name, why in failed.items():
        print(f"  {name}: {why}")
    if not names:
        data = packed(records, transformers.__version__)
        TABLE.write_bytes(data)
        print(f"{TABLE.name}: {len(data)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])

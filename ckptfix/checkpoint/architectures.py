"""Table of the model classes of transformers: their keys, and what follows which attribute of the
config.

``python -m tests.architectures`` makes it, by building each class several times with other sizes on
the meta device. It is read where a ``config.json`` names a class, and speaks for one version of
transformers: ``table_version``.

A key is compared as a pattern: with ``*`` for each segment that is a number.
"""

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.storage.reading import read_start

TABLE = Path(__file__).with_name("architectures.bin")
"""The first line has the version and the places of the blocks; each block has the classes of some
model types.
"""

RENAMED = frozenset(
    (
        "chinese_clip_vision_model",
        "clip_text_model",
        "clip_vision_model",
        "colqwen2",
        "gemma3n_text",
        "gemma4_unified",
        "hyperclovax_vision_v2",
        "paddleocr_vl",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5_text",
        "qwen3_vl_moe",
        "siglip2_vision_model",
        "siglip_vision_model",
        "ultrabert",
    )
)
"""Model types of which a load renames keys that no save writes: files of CLIPTextModel before
transformers 5 have ``text_model.`` before every key. Other types with conversions have ``inside``
keys in the table.
"""

_LARGEST = 1 << 22
_LARGEST_SIZE = 1 << 40
_LONGEST_NAME = 100


class Attribute(NamedTuple):
    """An attribute of a config that sizes follow.

    ``path``: such as ``("text_config", "vocab_size")``. ``default``: of the class, None where it
    follows other attributes. ``aliases``: other names of it.
    """

    path: tuple[str, ...]
    default: int | None
    aliases: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.path)


class Follows(NamedTuple):
    """A size that is ``multiple * attribute + offset``."""

    attribute: Attribute
    multiple: int
    offset: int


class Architecture(NamedTuple):
    """A model class, as the table knows it. All keys are patterns.

    ``keys``: those that a load finds: as ``save_pretrained`` writes them, and as the module has
    them. ``numbers``: pattern that ends in ``*`` -> how many numbers it has, 0 to N - 1. ``rows``:
    (pattern, dimension) -> its size. ``parts``: config inside of the config -> its ``model_type``.
    ``flags``: the config (its path with dots, "" for the whole) with a ``tie_word_embeddings`` that
    ties something, unless its class overrides it -> its default. ``ties``: any config with one ->
    key that is tied (and not saved) -> key that has its values. ``missing``, ``unexpected``:
    regular expressions of keys that a load does not report. ``unsaved``: keys that
    ``save_pretrained`` leaves out. ``head``, ``embedding``: the weights of the output and of the
    input, "" for none. ``prefix``: ``base_model_prefix``. ``is_renamed``: a load may rename keys
    that are not in ``keys``.
    """

    name: str
    model_type: str
    keys: frozenset[str]
    numbers: Mapping[str, Follows]
    rows: Mapping[tuple[str, int], Follows]
    parts: Mapping[str, str]
    flags: Mapping[str, bool]
    ties: Mapping[str, Mapping[str, str]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unsaved: frozenset[str]
    head: str
    embedding: str
    prefix: str
    is_renamed: bool

    def fits(self, key: str) -> bool:
        """Return whether a load finds a key, by its module: flags of a config add a bias to a
        weight, and take it off.

        A model and its base model load each other's keys: one with the prefix, one without.
        """
        pattern = pattern_of(key)
        if pattern in self.keys:
            return True
        names = (pattern, f"{self.prefix}.{pattern}", pattern.removeprefix(f"{self.prefix}."))
        modules = _modules(self.keys)
        return any(name in self.keys or name.rpartition(".")[0] in modules for name in names)

    def size(self, config: Mapping[str, Any], follows: Follows) -> int | None:
        """Return a size by a config, None where the config does not say."""
        value = self.value(config, follows.attribute)
        return None if value is None else follows.multiple * value + follows.offset

    def value(self, config: Mapping[str, Any], attribute: Attribute) -> int | None:
        """Return an attribute of a config, or its default; None where neither is certain."""
        part = self._part(config, ".".join(attribute.path[:-1]))
        # Layers of their own sizes.
        if part is None or part.get("per_layer_config"):
            return None
        names = (attribute.path[-1], *attribute.aliases)
        values = [part[name] for name in names if name in part]
        if not values:
            return attribute.default if knows_defaults(config) else None
        value = values[0]
        is_size = type(value) is int and 0 <= value < _LARGEST_SIZE
        return value if is_size and all(each == value for each in values) else None

    def is_tied(self, config: Mapping[str, Any], flag: str) -> bool | None:
        """Return whether a config ties what ``ties[flag]`` lists, None where neither it nor the
        default says so.
        """
        part = self._part(config, flag)
        # The config of T5 makes a flag that is false true.
        if part is None or flag not in self.flags:
            return None
        value = part.get(
            "tie_word_embeddings", self.flags[flag] if knows_defaults(config) else None
        )
        return value if isinstance(value, bool) else None

    def tied_keys(
        self, config: Mapping[str, Any], absent: Iterable[str], held: Collection[str]
    ) -> frozenset[str]:
        """Return those of the absent keys that a load ties to one of the held keys.

        A flag that a config leaves out has the default of the table: transformers 4 writes all
        other values.
        """
        ties: dict[str, str] = {}
        for flag, tied in self.ties.items():
            is_tied = self.is_tied(config, flag)
            if self.flags.get(flag, True) if is_tied is None else is_tied:
                ties |= tied
        patterns = {pattern_of(key) for key in held}
        return frozenset(
            key
            for key in absent
            if (source := ties.get(pattern_of(key))) is not None and source in patterns
        )

    def has_parts_of(self, config: Mapping[str, Any]) -> bool:
        """Return whether the configs inside of a config are of the types that the table was built
        with.

        A composite, such as ``EncoderDecoderModel``, has the keys of the models that its config
        names.
        """
        return all(
            self._part(config, path) is not None or path not in config for path in self.parts
        )

    def _part(self, config: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
        """Return a config inside of a config; None where it is of another ``model_type``, or is not
        there.
        """
        part: Any = config
        walked: list[str] = []
        for name in path.split(".") if path else ():
            # Configs of CLIP before 4.30 have both, and the first one wins.
            if part.get(f"{name}_dict"):
                return None
            walked.append(name)
            part = part.get(name)
            expected = self.parts.get(".".join(walked))
            if not isinstance(part, Mapping) or part.get("model_type", expected) != expected:
                return None
        return part if isinstance(part, Mapping) else None


class Unknown(NamedTuple):
    """A model that the table does not know. ``reason``: in words."""

    reason: str


# Each rule asks it of each key, and a guarded run of the same keys after each save.
@lru_cache(maxsize=1 << 12)
def pattern_of(key: str) -> str:
    """Return a key with ``*`` for each segment that is a number."""
    return ".".join("*" if part.isdecimal() else part for part in key.split("."))


def architecture_of(config: Mapping[str, Any]) -> Architecture | Unknown:
    """Return what the table knows about the model of a ``config.json``."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    # The name is printed.
    if not isinstance(name, str) or not name.isidentifier() or len(name) > _LONGEST_NAME:
        return Unknown(f"{CONFIG} does not name exactly one model class")
    # A class of the folder's own code, which has any keys it likes.
    if config.get("auto_map"):
        return Unknown(f"{name} is custom code of the model (auto_map)")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return Unknown(f"{CONFIG} has no model_type")
    return _architecture(name, model_type) or Unknown(
        f"transformers {table_version()} has no class {name} for this model_type"
    )


def table_version() -> str:
    """Return the version of transformers that the table speaks for."""
    version: str = _index()["version"]
    return version


def knows_defaults(config: Mapping[str, Any]) -> bool:
    """Return whether an attribute that a config leaves out has the default of the table, by the
    version that wrote it.

    In the same major version: from 4.46 to 5.23 the layers of Gemma 2 changed from 28 to 26, and
    from 4.57 to 5.23 nine of 1,160 defaults did, all of them ``tie_word_embeddings``.
    """
    written, known = _release(config.get("transformers_version")), _release(table_version())
    return written[:1] == known[:1] and written <= known


def _release(version: object) -> tuple[int, ...]:
    """Return major and minor version; () where the text has none."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version) if isinstance(version, str) else None
    return (int(match[1]), int(match[2])) if match else ()


@cache
def _index() -> dict[str, Any]:
    """Return the first line of the table: its version, and the place and the model types of each
    block.
    """
    index: dict[str, Any] = json.loads(_table().partition(b"\n")[0])
    return index


@cache
def _table() -> bytes:
    return read_start(TABLE, _LARGEST) or b""


@lru_cache(maxsize=4)
def _block(start: int, size: int) -> dict[str, dict[str, Any]]:
    """Return model type -> class -> record."""
    block: dict[str, dict[str, Any]] = json.loads(
        zlib.decompress(_table().partition(b"\n")[2][start : start + size])
    )
    return block


@lru_cache(maxsize=8)
def _architecture(name: str, model_type: str) -> Architecture | None:
    place = next((place for place in _index()["blocks"] if model_type in place[2:]), None)
    record = _block(*place[:2])[model_type].get(name) if place else None
    if record is None:
        return None
    attributes = [
        Attribute(tuple(path.split(".")), default, tuple(aliases))
        for path, default, aliases in record.get("attributes", ())
    ]

    def follows(number: int, multiple: int, offset: int) -> Follows:
        return Follows(attributes[number], multiple, offset)

    return Architecture(
        name=name,
        model_type=model_type,
        keys=frozenset((*record["keys"], *record.get("inside", ()))),
        numbers={pattern: follows(*each) for pattern, each in record.get("numbers", {}).items()},
        rows={
            (place.rpartition(" ")[0], int(place.rpartition(" ")[2])): follows(*each)
            for place, each in record.get("rows", {}).items()
        },
        parts=record.get("parts", {}),
        flags=record.get("flags", {}),
        ties=record.get("ties", {}),
        missing=tuple(record.get("missing", ())),
        unexpected=tuple(record.get("unexpected", ())),
        unsaved=frozenset(record.get("unsaved", ())),
        head=record.get("head", ""),
        embedding=record.get("embedding", ""),
        prefix=record.get("prefix", ""),
        is_renamed="inside" in record or model_type in RENAMED,
    )


@lru_cache(maxsize=8)
def _modules(keys: Collection[str]) -> frozenset[str]:
    """Return the modules with parameters of their own. A parameter of the model itself has none."""
    return frozenset(key.rpartition(".")[0] for key in keys if re.search(r"\.(weight|bias)$", key))

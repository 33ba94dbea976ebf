"""Weights for ``from_pretrained`` of transformers, against the table of its classes: prefixes,
sizes and numbers.

Facts from transformers 5.23: a key that the class does not have is dropped, a parameter without a
key is left random, and both are lines of a report. Another shape is a RuntimeError. All of that
needs no more than keys and shapes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptfix.checkpoint.architectures import (
    Architecture,
    Follows,
    Unknown,
    architecture_of,
    pattern_of,
    table_version,
)
from ckptfix.checkpoint.keys import (
    PRIVATE_WRAPPERS,
    WRAPPERS,
    dotted,
    is_computed,
    without_private_wrappers,
)
from ckptfix.checkpoint.load_inputs import Load
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG
from ckptfix.diagnosis.findings.base import Compared, Explained, Finding, Told
from ckptfix.diagnosis.findings.config_faults import (
    ConfigOfState,
    DeadWeights,
    DoubtfulWeights,
    DroppedLayers,
    ForeignWeights,
    ForeignWeightsOfState,
    MismatchedConfig,
    MixedWeights,
    WrappedWeights,
)
from ckptfix.diagnosis.findings.duplicates import NestedPrefix, WrapperPrefix
from ckptfix.wording import count_of, first_few, series

_BASES = (("base_model", "model"), ("base_model",))
"""Segments that PEFT adds: the attributes of ``PeftModel`` and of its tuner, and of a
``PeftModel`` of prompt learning, which has no tuner.
"""

_DEEPER = ".base_layer."
"""Part of the keys of a module that PEFT adapts: its own weights are in there."""

_RESUMES = {
    "save_state": (
        "save_state wrote the folder, and load_state needs these keys if the script wraps its model"
    ),
    "Trainer": (
        "if the script compiles or wraps the model itself, its Trainer needs these keys to resume; "
        "with a bare model, the Trainer resumes with random weights"
    ),
    "script": (
        "training states are next to it, and a script that wraps its model needs these keys to "
        "resume"
    ),
}
"""Whose states of a training lie next to weights behind a prefix -> who loads these keys."""

_FEW = 20
"""One key of so many may be of a class by accident, such as a head next to a wrapped model. Of
4-bit weights of bitsandbytes one of six is.
"""

_REMOVED_BY_LOADS = frozenset(
    (
        "audio_encoder", "backbone", "encoder", "language_model", "new", "text_encoder",
        "text_model", "thinker", "ultrabert", "vision_encoder", "vision_model",
    )
)  # fmt: skip
"""First segments behind which transformers 5.23 finds keys of some class: its conversions take them
off.
"""

_Placed = tuple[str, str, str]
"""A key of the class, its pattern in the table, and the key of the file."""

_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim")
"""Settings with the size of the hidden states, which the input embedding of most other types has.
One that the config has in vain, as of another class, is among them.
"""

_EMBEDDED = {
    "albert": "embedding_size", "convbert": "embedding_size", "electra": "embedding_size",
    "mobilebert": "embedding_size", "opt": "word_embed_proj_dim",
    "rembert": "input_embedding_size", "roformer": "embedding_size",
    "squeezebert": "embedding_size", "xlstm": "embedding_dim",
}  # fmt: skip
"""Model type -> the setting that its input embedding follows in place of the hidden size: those of
transformers 5.23 whose embedding changed with it alone, of 235 types with one config. Some have a
default that is not the hidden size.
"""

_MOST_NUMBERS = 1 << 16
"""Layers or experts beyond which none is missed."""

_LONGEST_KEY = 500
"""Characters of a key beyond which it is not compared: no class has one of 250."""


def judge_pretrained(load: Load) -> Iterator[Told]:
    """Yield the verdict on the weights of a model of transformers."""
    if not load.config:
        return
    yield Compared(CONFIG)
    asks = "; ckptfix check --load asks the library itself"
    if ADAPTER in load.configs:
        yield (
            f"{CONFIG} against the weights: {ADAPTER} is next to it, and from_pretrained adds that "
            "adapter to these weights even if they are already merged with it (transformers 4 "
            f"loads the base that the adapter names){asks}"
        )
        return
    if load.config.get("transformers_weights"):
        yield (
            f"{CONFIG} against the weights: the config itself names the weights file "
            f"(transformers_weights){asks}"
        )
        return
    known = architecture_of(load.config)
    if isinstance(known, Unknown):
        yield f"{CONFIG} against the weights: {known.reason}{asks}"
        return
    if (
        not load.is_whole
        or not load.tensors
        or any(len(key) > _LONGEST_KEY for key in load.tensors)
    ):
        yield f"{CONFIG} against the weights: not all of its keys can be read{asks}"
        return
    names = _Names(load, known)
    placed = [*_placed(known, names.expected)]
    for finding in names.findings():
        yield finding
        if isinstance(finding, DeadWeights):
            for file in load.files:
                yield Explained(NestedPrefix, file)
                yield Explained(WrapperPrefix, file)
    yield from _numbers(load, known, placed)
    yield from _lists(load, known)
    yield from _uncertain(load, known, placed)
    if why := names.unchecked():
        yield f"{CONFIG} against the weights: {why}{asks}"
    compared = ["layers", "experts"]
    if "quantization_config" in load.config:
        yield f"{load.path}: rows of its embeddings, because quantization packs them"
    else:
        yield from _rows(load, known, placed)
        compared.append("embedding rows")
        if columns := _columns(load, known, placed):
            yield from _width(load, known, *columns)
            compared.append("embedding columns")
    yield (
        f"{load.path} against its class beyond prefixes, {series(compared)} "
        f"(keys, shapes, settings){asks}"
    )


class _Names:
    """The keys of a model as they are and as its class has them. ``expected``: key of the class ->
    key of the file.
    """

    def __init__(self, load: Load, known: Architecture) -> None:
        self._load, self._known = load, known
        # Keys of a base model fit with more taken off, and its head with less.
        adapted = [key for key in load.tensors if _BASES[0][0] in key]
        self._base = max(
            _BASES, key=lambda base: sum(known.fits(_bare(key, base)) for key in adapted)
        )
        bare = {key: _bare(key, self._base) for key in load.tensors}
        # Where the file has the key without the prefix, too, a load takes that, and no weight stays
        # random.
        self._dead = {
            key: name
            for key, name in bare.items()
            if name != key and name not in load.tensors and known.fits(name) and not known.fits(key)
        }
        # A model that PEFT adapted has its own weights one level deeper.
        self._deeper = {
            key: expected
            for key, name in bare.items()
            if _DEEPER in name
            and (expected := name.replace(_DEEPER, ".")) not in load.tensors
            and known.fits(expected)
            and not known.fits(key)
        }
        judged = [key for key in load.tensors if not self._is_ignored(key)]
        others = [key for key in judged if key not in self._dead and key not in self._deeper]
        unknown = sum(not known.fits(key) for key in others)
        # Keys that fit neither way, such as of a head of the script's own, must be few, and no
        # other key may fit.
        is_unsure = unknown < len(others) or 10 * unknown > len(load.tensors)
        if unknown and is_unsure and not self._deeper:
            self._dead = {}
        names = self._dead | self._deeper
        self.expected = {names.get(key, key): key for key in load.tensors}
        read = [] if names else judged
        strangers = [key for key in read if not known.fits(key)]
        self._foreign = strangers if _FEW * (len(read) - len(strangers)) < len(read) else []

    def _is_ignored(self, key: str) -> bool:
        """Return whether a load passes over a key, such as of buffers that earlier versions
        saved.
        """
        return is_computed(key) or any(
            re.search(pattern, key) for pattern in self._known.unexpected
        )

    def findings(self) -> Iterator[Finding]:
        """Yield the finding about keys behind a prefix, or about keys of another class."""
        states_of = self._load.states_of
        if self._deeper:
            # Without base_layer a load finds them, and no repair takes it out. A Trainer of a model
            # with an injected adapter resumes with these keys.
            key, expected = next(iter(self._deeper.items()))
            lost = len({**self._dead, **self._deeper})
            yield self._foreign_weights(lost, key, expected, is_state=bool(states_of))
            return
        if self._foreign and not self.unchecked():
            known, key = self._known, self._foreign[0]
            segments = key.split(".")
            ends = (".".join(segments[at:]) for at in range(1, len(segments)))
            expected = next((end for end in ends if pattern_of(end) in known.keys), "")
            expected = expected or (known.embedding or min(known.keys)).replace("*", "0")
            is_state = states_of in ("save_state", "script")
            yield self._foreign_weights(len(self._foreign), key, expected, is_state=is_state)
        if not self._dead:
            return
        chains = Counter(_prefix(key, self._base) for key in self._dead)
        key, expected = next(iter(self._dead.items()))
        facts: dict[str, Any] = {
            "path": self._load.path,
            "tensors": len(self._dead),
            "total": len(self._load.tensors),
            "key": key,
            "expected": expected,
            "remove": chains.most_common(1)[0][0],
            "inner": any(not PRIVATE_WRAPPERS.isdisjoint(key.split(".")) for key in self._dead),
            "model": self._known.name,
            "version": table_version(),
        }
        if len(chains) > 1:
            reason = "its keys begin with different prefixes, and a repair removes only one of them"
            yield MixedWeights(**facts, reason=reason)
        elif states_of:
            # A Trainer whose script compiles the model saves _orig_mod, and resumes exactly. It
            # loads with strict=False: after a rename it began with random weights, and said
            # nothing. One of a model in DistributedDataParallel does the same with module, but
            # that is rare.
            is_wrapped = states_of == "Trainer" and set(chains) != {()}
            kind = WrappedWeights if is_wrapped else DoubtfulWeights
            yield kind(**facts, reason=_RESUMES[states_of])
        else:
            yield DeadWeights(**facts)

    def _foreign_weights(
        self, tensors: int, key: str, expected: str, *, is_state: bool
    ) -> ForeignWeights:
        return (ForeignWeightsOfState if is_state else ForeignWeights)(
            path=self._load.path,
            tensors=tensors,
            total=len(self._load.tensors),
            key=key,
            expected=expected,
            model=self._known.name,
            version=table_version(),
        )

    def unchecked(self) -> str:
        """Return in words why keys of another class are not told, "" where they are or where there
        are none.
        """
        config, known = self._load.config, self._known
        if not self._foreign or self._is_wrapped():
            return ""
        # A load renames keys of these, and finds some that are not in the table.
        if known.is_renamed or "quantization_config" in config or not known.has_parts_of(config):
            tensors = count_of(len(self._foreign), "tensor")
            return f"{tensors} that {known.name} may rename or leave out"
        return ""

    def _is_wrapped(self) -> bool:
        """Return whether one segment, which no load removes, is before the keys of the class."""
        first = {key.partition(".")[0] for key in self._foreign}
        fitting = sum(self._known.fits(key.partition(".")[2]) for key in self._foreign)
        is_foreign = len(first) == 1 and first.isdisjoint(_REMOVED_BY_LOADS)
        return is_foreign and _FEW * (len(self._foreign) - fitting) < len(self._foreign)


def _prefix(key: str, base: tuple[str, ...]) -> tuple[str, ...]:
    """Return the segments before a key that wrappers and PEFT add, without private wrappers.
    ``base``: those of PEFT.
    """
    segments = without_private_wrappers(key).split(".")
    at = 0
    while at < len(segments) - 1:
        if segments[at] in WRAPPERS:
            at += 1
        elif tuple(segments[at : at + len(base)]) == base and at + len(base) < len(segments):
            at += len(base)
        else:
            break
    return tuple(segments[:at])


def _bare(key: str, base: tuple[str, ...]) -> str:
    """Return a key without all that wrappers and PEFT add."""
    bare = without_private_wrappers(key)
    prefix = _prefix(bare, base)
    return bare.removeprefix(dotted(prefix)) if prefix else bare


def _placed(known: Architecture, keys: Mapping[str, str]) -> Iterator[_Placed]:
    """Yield the keys that the table has."""
    prefix = f"{known.prefix}."
    for name, key in keys.items():
        pattern = pattern_of(name)
        if pattern in known.keys:
            yield name, pattern, key
        elif prefix + pattern in known.keys:
            yield prefix + name, prefix + pattern, key
        elif (base := pattern.removeprefix(prefix)) in known.keys:
            yield name.removeprefix(prefix), base, key


def _uncertain(load: Load, known: Architecture, placed: Sequence[_Placed]) -> Iterator[str]:
    """Yield in words the attributes that neither the config nor the default of its class tells."""
    patterns = {pattern for _, pattern, _ in placed}
    sizes = [follows for (pattern, _), follows in known.rows.items() if pattern in patterns]
    sizes += [
        follows
        for group, follows in known.numbers.items()
        if any(each.startswith(f"{group}.") for each in patterns)
    ]
    names = {str(each.attribute): None for each in sizes if known.size(load.config, each) is None}
    if names:
        yield (
            f"{CONFIG} against the weights: {series(list(names))}, which it omits or another "
            "config overrides; ckptfix check --load asks the library itself"
        )


def _rows(load: Load, known: Architecture, placed: Sequence[_Placed]) -> Iterator[Finding]:
    """Yield the findings about embeddings of other sizes than the config says."""
    wrong: dict[Follows, list[tuple[str, int, int]]] = defaultdict(list)
    tied = {
        target
        for flag, ties in known.ties.items()
        if known.is_tied(load.config, flag) is not False
        for target in ties
    }
    for _, pattern, key in placed:
        shape = load.tensors[key].shape
        for dimension, has in enumerate(shape):
            follows = known.rows.get((pattern, dimension))
            # Weights of no elements are not gathered; a tied weight may be that of the other.
            if follows is None or pattern in tied or not all(shape):
                continue
            expected = known.size(load.config, follows)
            if expected is not None and has != expected:
                wrong[follows].append((key, has, expected))
    for follows, places in wrong.items():
        key, has, expected = places[0]
        value = known.value(load.config, follows.attribute)
        assert value is not None
        yield _mismatch(
            load,
            known,
            setting=str(follows.attribute),
            value=value,
            tensors=f"{has} rows in {key}"
            + (f", and {len(places) - 1} more" if places[1:] else ""),
            effect="fails with 'size mismatch'",
        )


def _columns(
    load: Load, known: Architecture, placed: Sequence[_Placed]
) -> tuple[str, dict[str, int]] | None:
    """Return the key of the input embedding, and the settings of which its columns follow one; None
    where the config does not show that.
    """
    # The input of images is no table: its columns are the numbers of a patch.
    is_table = (known.embedding, 0) in known.rows
    embedding = next(
        (key for _, pattern, key in placed if pattern == known.embedding and is_table), ""
    )
    # A model with configs for its parts may pass over the setting of the whole.
    has_parts = any(name.endswith("_config") and value for name, value in load.config.items())
    names = (_EMBEDDED[known.model_type],) if known.model_type in _EMBEDDED else _WIDTHS
    settings = {name: value for name in names if type(value := load.config.get(name)) is int}
    # Weights of no elements are not gathered.
    shape = load.tensors[embedding].shape if embedding else ()
    if not settings or has_parts or not all(shape) or len(shape) != 2:
        return None
    return embedding, settings


def _width(
    load: Load, known: Architecture, embedding: str, settings: Mapping[str, int]
) -> Iterator[Finding]:
    """Yield the finding about an embedding of another size: Qwen3 0.6B and 1.7B have the same
    layers and tokens, and one has in its attention the hidden size of the other.
    """
    columns = load.tensors[embedding].shape[1]
    # DeBERTa has it in place of the hidden size where a config sets it.
    if columns in (*settings.values(), load.config.get("embedding_size")):
        return
    setting, value = next(iter(settings.items()))
    yield _mismatch(
        load,
        known,
        setting=setting,
        value=value,
        tensors=f"{columns} columns in {embedding}",
        effect="fails with 'size mismatch'",
    )


def _mismatch(
    load: Load,
    known: Architecture,
    kind: type[MismatchedConfig] = MismatchedConfig,
    **facts: Any,
) -> MismatchedConfig:
    """Return the finding that a config has other sizes, as a note next to the states of a training."""
    made: dict[str, Any] = {"path": load.path, "model": known.name, "version": table_version()}
    return (ConfigOfState if load.states_of else kind)(**{**made, **facts})


def _numbers(load: Load, known: Architecture, placed: Sequence[_Placed]) -> Iterator[Finding]:
    """Yield the findings about layers, groups and experts that are not as many as the config
    says.
    """
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    groups_of: dict[str, list[tuple[str, int]]] = {}
    for pattern in {pattern for _, pattern, _ in placed}:
        at_patterns = pattern.split(".")
        groups = ((".".join(at_patterns[: at + 1]), at) for at in range(len(at_patterns)))
        groups_of[pattern] = [
            (group, at) for group, at in groups if at_patterns[at] == "*" and group in known.numbers
        ]
    for name, pattern, _ in placed:
        segments = name.split(".")
        for group, at in groups_of[pattern]:
            numbers[group, ".".join(segments[:at])].add(int(segments[at]))
    wrong: dict[Follows, list[tuple[str, set[int]]]] = defaultdict(list)
    surplus: dict[Follows, list[tuple[str, set[int]]]] = defaultdict(list)
    for (group, parent), present in numbers.items():
        follows = known.numbers[group]
        expected = known.size(load.config, follows)
        if expected is None:
            continue
        numbered = range(min(expected, _MOST_NUMBERS))
        if sum(number in numbered for number in present) < len(numbered):
            wrong[follows].append((parent, present))
        elif beyond := {number for number in present if number >= expected}:
            surplus[follows].append((parent, beyond))
    if surplus:
        surplus = _not_expected(load, known, surplus)
    for is_missing, each in ((True, wrong), (False, surplus)):
        for follows, places in each.items():
            value = known.value(load.config, follows.attribute)
            assert value is not None
            parent, told = places[0]
            if is_missing:
                expected = known.size(load.config, follows) or 0
                told = set(range(min(expected, _MOST_NUMBERS))) - told
            kind = MismatchedConfig if is_missing else DroppedLayers
            yield _mismatch(
                load,
                known,
                kind,
                setting=str(follows.attribute),
                value=value,
                tensors=f"{'no ' * is_missing}tensors of {parent}.{_in_words(sorted(told))}"
                + (f", and of {count_of(len(places) - 1, 'other module')}" if places[1:] else ""),
                effect=_effect(parent) if is_missing else "drops them",
                lists=_lists_of(load.config, follows, value),
            )


def _effect(parent: str) -> str:
    """Return what a load makes of the lost tensors of a module."""
    if parent.endswith("experts"):  # transformers 5 joins the experts of a layer
        return "fails with mismatched sizes, transformers 4 leaves them random"
    return "leaves them random"


def _lists_of(config: Any, follows: Follows, value: int) -> tuple[str, ...]:
    """Return the lists of a config that have an item for each layer, by their names."""
    for name in follows.attribute.path[:-1]:
        config = config[name]
    return tuple(
        name
        for name, each in config.items()
        if "layer" in name
        and "layer" in follows.attribute.path[-1]
        and isinstance(each, list)
        and len(each) == value
    )


def _lists(load: Load, known: Architecture) -> Iterator[Finding]:
    """Yield the finding about layer types that are not as many as the layers: transformers 5.23
    refuses the config in each of its 145 classes with both, but cuts a longer list of DeepSeek V4.
    """
    count, types = load.config.get("num_hidden_layers"), load.config.get("layer_types")
    if type(count) is not int or not isinstance(types, list) or len(types) == count:
        return
    if known.model_type != "deepseek_v4" or len(types) < count:
        yield _mismatch(
            load,
            known,
            path=load.path.with_name(CONFIG),
            setting="num_hidden_layers",
            value=count,
            tensors=f"layer_types has {count_of(len(types), 'item')}",
            effect="refuses it",
            lists=("layer_types",),
        )


def _in_words(numbers: list[int]) -> str:
    if numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return first_few(numbers)


def _not_expected(
    load: Load, known: Architecture, surplus: Mapping[Follows, list[tuple[str, set[int]]]]
) -> dict[Follows, list[tuple[str, set[int]]]]:
    """Return the layers beyond the last without those that predict further tokens (MTP), which a
    load leaves out.
    """
    if any(re.search("nextn|mtp", name) for name in load.config):
        return {}
    modules = {
        f"{parent}.{number}"
        for places in surplus.values()
        for parent, beyond in places
        for number in beyond
    }
    depth = max(module.count(".") for module in modules) + 1
    expected: set[str] = set()
    for key in load.tensors:
        segments = key.split(".")[:-1]
        ends = (at for at, segment in enumerate(segments[:depth], start=1) if segment.isdecimal())
        inside = modules.intersection(".".join(segments[:end]) for end in ends)
        if inside - expected and (
            not known.fits(key) or any(re.search(pattern, key) for pattern in known.unexpected)
        ):
            expected |= inside
    left: dict[Follows, list[tuple[str, set[int]]]] = {}
    for follows, places in surplus.items():
        for parent, beyond in places:
            if expected.isdisjoint(f"{parent}.{number}" for number in beyond):
                left.setdefault(follows, []).append((parent, beyond))
    return left

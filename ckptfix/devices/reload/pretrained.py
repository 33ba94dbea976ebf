"""A transformers model as ``from_pretrained`` builds and fills it, and the fate of each tensor. No
remote code.

transformers 5 keeps its table of renamings and merges at the model that it loaded. Without that
table (transformers 4) a tensor has a place where a name differs by the base model's prefix at most.
A checkpoint that transformers refuses is a failure, with its own words. Only where nobody says
which class the weights belong to is there no verdict.
"""

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import find_tied_parameters
from msgspec import Struct, field

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.devices.reload.device_maps import CPU, free_memory, is_out_of_memory
from ckptfix.devices.reload.filling import (
    Filled,
    few,
    holds,
    names_in_words,
    narrowing,
    same_bytes,
    tensors_of,
    untied,
)
from ckptfix.devices.reload.outputs import ANYTHING, in_words, one_line
from ckptfix.devices.reload.stored_weights import Weights
from ckptfix.devices.reload.user_model import Built, made_inputs
from ckptfix.errors import CkptfixError
from ckptfix.wording import count_of, human_size, list_names

_NUMBER = re.compile(r"(?<![0-9A-Za-z_])[0-9]+(?![0-9A-Za-z_])")


class Destinations(Struct, kw_only=True):
    """The places of a file's tensors in a model. Keys of the model -> keys of the file, unless said
    otherwise.

    ``names``: one tensor alone. ``merged``: several that the loader puts together, or one that it
    cuts; ``listed``: those of them that are a list by number, one tensor for each expert.
    ``crowded``: key of the file whose place another tensor of the file took -> that place.
    ``left_out``: keys of the file without a place -> what transformers calls them. ``unknown``:
    keys of the file of which this transformers does not say where they went.
    """

    names: dict[str, str] = field(default_factory=dict)
    merged: dict[str, list[str]] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    crowded: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def misnumbered(self) -> list[str]:
        """Return the places whose tensors, one for each expert, are not numbered from 0 on: each
        expert moves up.
        """
        return [
            place
            for place in self.merged
            if place in self.listed and not _is_numbered(self.merged[place])
        ]


def destinations(model: Any, weights: Weights) -> Destinations:
    """Return the place of every tensor of a file in a model that transformers has loaded."""
    state = tensors_of(model)
    found = _by_prefix(model, state, weights)
    table = getattr(model, "_weight_conversions", None)
    if table is not None:
        # Another transformers has other names for its table.
        with suppress(ImportError, AttributeError, TypeError, ValueError):
            found = _by_table(model, state, weights, table)
    for group in find_tied_parameters(model):
        source = next((found.names[name] for name in group if name in found.names), None)
        if source is not None:
            found.names.update({name: source for name in group if name not in found.names})
    return found


def _by_table(
    model: Any, state: Mapping[str, torch.Tensor], weights: Weights, table: Iterable[Any]
) -> Destinations:
    """Rename each key as transformers did; of two tensors for one place it takes the first in
    natural order.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = list(table)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    found = Destinations()
    for key in sorted(weights.tensors, key=dot_natural_key):
        place, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if place not in state and key in state:
            place, pattern = rename_source_key(key, [], [], prefix, state)
        if place not in state:
            found.left_out[key] = place
        elif pattern is not None:
            found.merged.setdefault(place, []).append(key)
            if ".*." in pattern:
                found.listed.add(place)
        elif place in found.names:
            found.crowded[key] = place
        else:
            found.names[place] = key
    return found


def _by_prefix(model: Any, state: Mapping[str, torch.Tensor], weights: Weights) -> Destinations:
    """Find places by name alone: a base model's file loads into a model with a head, and the other
    way round.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = Destinations()
    for name in weights.tensors:
        tries = (name, prefix + name, name.removeprefix(prefix))
        ours = next((one for one in tries if one in state), None)
        if ours is None:
            found.unknown.append(name)
        elif ours in found.names:
            found.crowded[name] = ours
        else:
            found.names[ours] = name
    return found


def absent_siblings(keys: Iterable[str]) -> list[str]:
    """Return keys that a file lacks where its other numbered parts have them: ``experts.1.w1`` of
    ``experts.0.w1``.

    Only the innermost of several numbers counts: layers may differ from each other, experts of one
    layer may not.
    """
    parts: dict[str, dict[int, set[str]]] = {}
    for key in keys:
        numbers = list(_NUMBER.finditer(key))
        if len(numbers) > 1:
            before, number, after = (
                key[: numbers[-1].start()],
                numbers[-1],
                key[numbers[-1].end() :],
            )
            parts.setdefault(before, {}).setdefault(int(number[0]), set()).add(after)
    absent = []
    for before, by_number in parts.items():
        every = set.union(*by_number.values())
        absent += [
            f"{before}{number}{after}"
            for number in range(max(by_number) + 1)
            for after in sorted(every - by_number.get(number, set()))
        ]
    return absent


def _is_numbered(keys: Iterable[str]) -> bool:
    """Return whether keys that differ in one number have the numbers from 0 on; True where they
    differ otherwise.
    """
    families: dict[tuple[str, ...], set[int]] = {}
    cut = [(_NUMBER.split(key), [int(number) for number in _NUMBER.findall(key)]) for key in keys]
    lengths = {len(numbers) for _, numbers in cut}
    if len(lengths) != 1 or not max(lengths):
        return True
    varying = [
        place for place in range(max(lengths)) if len({numbers[place] for _, numbers in cut}) > 1
    ]
    if len(varying) != 1:
        return True
    for texts, numbers in cut:
        families.setdefault(tuple(texts), set()).add(numbers[varying[0]])
    return all(found == set(range(len(found))) for found in families.values())


_THEN = (
    "; from_pretrained fills the gap with random values and only warns",
    "; from_pretrained ignores them and only warns",
)


def filled_by_loader(model: Any, weights: Weights, info: Mapping[str, Any]) -> Filled:
    """Return what a model got from a file. ``info``: what ``from_pretrained`` says of its
    loading.
    """
    state = tensors_of(model)
    found = destinations(model, weights)
    names = {
        ours: theirs
        for ours, theirs in found.names.items()
        if tuple(state[ours].shape) == weights.tensors[theirs].shape
    }
    converted, narrowed = [], []
    for ours, theirs in list(names.items()):
        held, stored = state[ours].dtype, weights.read(theirs).dtype
        if held != stored and holds(held, stored):
            converted.append(ours)
        elif held != stored:
            narrowed.append(narrowing(ours, stored, held))
            del names[ours]
    for place, keys in found.merged.items():
        dtypes = {key: weights.read(key).dtype for key in keys}
        narrowed += [
            narrowing(key, stored, state[place].dtype)
            for key, stored in dtypes.items()
            if not holds(state[place].dtype, stored)
        ]
    differences = [
        *_of_loading(info, found, weights),
        *_of_places(found, weights, info),
        *few(narrowed, "dtype"),
    ]
    return Filled(
        names=names,
        differences=tuple(differences),
        converted=tuple(converted),
        untied=_untied(model, names, weights),
        unproven=tuple(_unproven(model, found, info)),
    )


def _of_loading(info: Mapping[str, Any], found: Destinations, weights: Weights) -> list[str]:
    """Return in words what ``from_pretrained`` says of its loading, each a failure."""
    missing, unexpected = (
        sorted(info.get(kind, ())) for kind in ("missing_keys", "unexpected_keys")
    )
    problems = names_in_words(missing, unexpected, weights, then=_THEN)
    mismatched = sorted(info.get("mismatched_keys", ()))
    shapes = [
        f"{name!r} has shape {list(have)} {'when merged from' if name in found.merged else 'in'} "
        f"the file, {list(want)} in the model"
        for name, have, want in mismatched
    ]
    if shapes:
        merged = [key for name, *_ in mismatched for key in found.merged.get(name, ())]
        absent = absent_siblings(merged)
        problems += few(shapes, "shape")
        problems.append(
            "from_pretrained refuses the checkpoint: shape mismatch with config.json in "
            f"{count_of(len(shapes), 'tensor')} (with ignore_mismatched_sizes=True it fills the "
            "gap with random values)" + (f"; the file lacks {list_names(absent)}" if absent else "")
        )
    return problems + [str(message) for message in info.get("error_msgs", ())]


def _of_places(found: Destinations, weights: Weights, info: Mapping[str, Any]) -> list[str]:
    """Return in words which tensors ``from_pretrained`` drops or puts into another's place without
    a word.
    """
    crowded = [
        f"{key!r} and {found.names[place]!r} in the file both map to {place!r}: "
        "from_pretrained silently drops one of them"
        for key, place in found.crowded.items()
        if not same_bytes(weights, key, found.names[place])
    ]
    refused = {name for name, *_ in info.get("mismatched_keys", ())}
    moved = [
        f"the file's tensors for {place!r} are not numbered 0, 1, 2 and so on: "
        "from_pretrained silently closes the gap, so later tensors move up; the file lacks "
        f"{list_names(absent_siblings(found.merged[place]))}"
        for place in found.misnumbered()
        if place not in refused
    ]
    return [*few(crowded, "pair"), *few(moved, "place")]


def _untied(model: Any, names: Mapping[str, str], weights: Weights) -> tuple[tuple[str, str], ...]:
    """Return pairs of names that are one tensor by the model's class, and differ in the file.

    transformers 5 leaves them apart and warns, so that the model itself no longer shows the tie.
    """
    ties_of = getattr(model, "get_expanded_tied_weights_keys", None)
    pairs = dict(ties_of(all_submodels=True)) if ties_of is not None else {}
    apart = [
        (names[source], names[target])
        for target, source in pairs.items()
        if source in names and target in names and names[source] != names[target]
    ]
    broken = tuple(pair for pair in apart if not same_bytes(weights, *pair))
    return tuple(dict.fromkeys((*broken, *untied(find_tied_parameters(model), weights))))


def _unproven(model: Any, found: Destinations, info: Mapping[str, Any]) -> list[str]:
    """Return in words which tensors no byte of a tensor of the model, or of the file, can be
    compared with.
    """
    said = []
    kind = type(model).__name__
    if found.merged:
        keys = [key for group in found.merged.values() for key in group]
        said.append(
            f"the loader merges or splits {count_of(len(keys), 'tensor')} of the file "
            f"({list_names(keys)}) into {count_of(len(found.merged), 'tensor')} of the model: "
            "the result was not compared with the file"
        )
    unexpected = set(info.get("unexpected_keys", ()))
    ignored = [key for key, place in found.left_out.items() if not {key, place} & unexpected]
    if ignored:
        said.append(
            f"{count_of(len(ignored), 'tensor')} of the file ({list_names(ignored)}): {kind} "
            "has no such key, and from_pretrained ignores the values without a warning"
        )
    mismatched = {name for name, *_ in info.get("mismatched_keys", ())}
    unknown = [key for key in found.unknown if not {key} & (unexpected | mismatched)]
    if unknown:
        said.append(
            f"where {count_of(len(unknown), 'tensor')} of the file went "
            f"({list_names(unknown)}): this version of transformers does not report what it "
            "renames, merges or leaves out"
        )
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    filled = {*found.names, *found.merged}
    fresh = [
        name
        for name in tensors_of(model)
        if name not in filled and any(re.search(pattern, name) for pattern in patterns)
    ]
    if fresh and not found.unknown:
        said.append(
            f"{count_of(len(fresh), 'tensor')} of the model ({list_names(fresh)}) not in the file: "
            f"{kind} may initialize them itself, and from_pretrained does not warn"
        )
    return said


_UNMERGED = re.compile(
    r"^(?P<why>[^\n]*)\n\s*Error: [^\n]*destined for (?P<place>\S+?)\.? Ckpt", re.MULTILINE
)
"""The reason and the place in transformers' report of tensors that it could not merge."""


class NoModel(Exception):
    """Nothing says which class the weights belong to, or nothing that may be trusted; the message
    says why.
    """


class LoaderRefuses(Exception):
    """``from_pretrained`` raises on this checkpoint; the message quotes it and says what to do."""


def build_from_config(root: Path, found: Sequence[Weights]) -> Built:
    """Build the class that ``config.json`` names, when it is transformers' own, and load the
    weights as it would.

    Raises LoaderRefuses where ``from_pretrained`` raises, NoModel where no class is known or code
    from the folder would be needed, OperationError when a file cannot be read, OSError when
    config.json cannot.
    """
    transformers, given = _read_config(root)
    with _captured_log() as log:
        config = _config(root, given, transformers)
        cls = _model_class(given, transformers)
        (weights,) = _ensure_one_model(given, found)
        _ensure_room(cls, config, weights)
        model, info = _loaded(cls, config, weights, log)
        _ensure_generation(model, root, transformers)
    filled = filled_by_loader(model, weights, info)
    weights.close()  # a file that cannot be mapped lies in memory while it is open
    return Built(
        model=model,
        what=f"{cls.__name__} from config.json",
        weights=weights,
        filled=filled,
        inputs=made_inputs(model),
        beyond=tuple(_beyond(root, given, weights.label)),
    )


def skeleton_from_config(root: Path) -> Any:
    """Return a model of the class that ``config.json`` names, on the meta device; tied parameters
    are one.

    Raises LoaderRefuses where transformers refuses the config, NoModel where no class is known or
    code from the folder would be needed, OSError when config.json cannot be read.
    """
    transformers, given = _read_config(root)
    with _captured_log():
        cls = _model_class(given, transformers)
        try:
            model = _skeleton(cls, _config(root, given, transformers))
        except ANYTHING as error:
            if isinstance(error, LoaderRefuses | NoModel):
                raise
            raise LoaderRefuses(
                f"{cls.__name__}: {in_words(error)}; correct config.json"
            ) from error
        model.tie_weights()
    return model


def _skeleton(cls: Any, config: Any) -> Any:
    own = copy.deepcopy(config)
    own._attn_implementation = "eager"  # a name of kernels would be looked for, and downloaded
    with torch.device("meta"):
        return cls(own)


def _read_config(root: Path) -> tuple[Any, dict[str, Any]]:
    """Return transformers, and the content of a ``config.json`` that is its own."""
    text = _config_text(root)
    try:
        import transformers
    except ImportError:
        raise NoModel(
            "transformers is not installed, so no model can be built from config.json"
        ) from None
    given = _parsed(text)
    _ensure_transformers_config(given, transformers)
    return transformers, given


def _config_text(root: Path) -> str:
    path = root / "config.json"
    if not path.is_file():
        raise NoModel("no --model, and no config.json next to the weights")
    return path.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoaderRefuses(f"config.json is not JSON: {error}; copy or write it again") from None
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise LoaderRefuses(
            f"config.json: expected a JSON object, found a {kind}; copy or write it again"
        )
    return config


def _ensure_transformers_config(config: dict[str, Any], transformers: Any) -> None:
    """Raise NoModel for the ``config.json`` of another library: diffusers, timm, or the user's own
    settings.
    """
    marks = ("architectures", "transformers_version")
    model_type = config.get("model_type")
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and not any(mark in config for mark in marks):
        raise NoModel(
            f"config.json names no transformers class (it has no {' and no '.join(marks)})"
        )


def _config(root: Path, given: dict[str, Any], transformers: Any) -> Any:
    """Return what AutoConfig makes of ``config.json``, where no remote code is needed for it."""
    try:
        return transformers.AutoConfig.from_pretrained(
            str(root), trust_remote_code=False, local_files_only=True
        )
    except ANYTHING as error:
        if "auto_map" in given and given.get("model_type") not in transformers.CONFIG_MAPPING:
            raise NoModel(
                "config.json needs code from the folder (auto_map), which ckptfix never runs"
            ) from error
        step = (
            "correct config.json, or install a transformers version that supports it "
            f"(installed: {transformers.__version__})"
        )
        raise LoaderRefuses(f"{in_words(error)}; {step}") from error


def _model_class(given: dict[str, Any], transformers: Any) -> Any:
    names = given.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise NoModel("no --model, and config.json does not name exactly one architecture")
    cls: Any = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        version = transformers.__version__
        raise NoModel(
            f"config.json names {names[0]!r}, which is not a model class of transformers {version}"
        )
    return cls


def _ensure_one_model(given: dict[str, Any], found: Sequence[Weights]) -> Sequence[Weights]:
    if "quantization_config" in given:
        raise NoModel("config.json asks for quantized weights, which ckptfix does not build")
    if len(found) != 1:
        raise NoModel(
            f"config.json describes one model, but there are {len(found)}; pass the path of "
            "one file"
        )
    return found


def _ensure_room(cls: Any, config: Any, weights: Weights) -> None:
    """Raise where the model does not fit into memory: missing and mismatched tensors are made at
    their full size.

    A config that lacks its sizes describes a model of 7 billion parameters, and the kernel would
    end the process.
    """
    try:
        needs = 2 * sum(parameter.numel() for parameter in _skeleton(cls, config).parameters())
    except ANYTHING:
        return  # the loader itself will say why
    room = int(free_memory().get(CPU, 0))
    if not room or needs < room:
        return
    sizes = f"config.json describes a model of at least {human_size(needs)}"
    if needs > 4 * weights.nbytes:
        raise LoaderRefuses(
            f"{sizes}, but the file holds {human_size(weights.nbytes)}, and this host has too "
            "little memory for the random values that would fill the gap; correct the sizes "
            "in config.json"
        )
    raise NoModel(f"{sizes}, but this host has {human_size(room)} of free memory")


def _loaded(cls: Any, config: Any, weights: Weights, log: "_Log") -> tuple[Any, dict[str, Any]]:
    try:
        # Not from the folder: it could lead to other files, adapters and kernels. The class renames and merges
        # weights by itself; the tensors are read by us. No dtype: the one that every user's call gets. Mismatched
        # sizes are let through here, so that all of them can be named: they are failures in any case.
        model, info = cls.from_pretrained(
            None, config=config, state_dict={name: weights.read(name) for name in weights.tensors},
            output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True,
            trust_remote_code=False, attn_implementation="eager",
        )  # fmt: skip
        model.eval()
    except CkptfixError:
        raise
    except ANYTHING as error:  # a config's values are looked at by the model's own code
        if (
            isinstance(error, MemoryError)
            or is_out_of_memory(error)
            or "allocate memory" in str(error)
        ):
            raise NoModel(
                f"{cls.__name__} does not fit into this host's memory: {in_words(error)}"
            ) from error
        if unmerged := _UNMERGED.search(log.text):
            raise LoaderRefuses(_unmerged(unmerged, weights)) from error
        step = "correct config.json or the weights until both match one model"
        raise LoaderRefuses(f"{cls.__name__}: {in_words(error)}; {step}") from error
    return model, info


def _ensure_generation(model: Any, root: Path, transformers: Any) -> None:
    """Read ``generation_config.json`` as from_pretrained does, which passes over one that is not
    JSON.
    """
    if not model.can_generate() or not (root / "generation_config.json").is_file():
        return
    try:
        with suppress(OSError):
            transformers.GenerationConfig.from_pretrained(str(root), local_files_only=True)
    except ANYTHING as error:
        raise LoaderRefuses(
            f"generation_config.json: {in_words(error)}; correct it, or delete it"
        ) from error


def _unmerged(found: re.Match[str], weights: Weights) -> str:
    absent = absent_siblings(weights.tensors)
    lacks = f"; the file lacks {list_names(absent)}" if absent else ""
    step = "copy the checkpoint again, or save it again from the run"
    return (
        f"the tensors for {found['place']!r} do not fit together: {one_line(found['why'])}{lacks}; "
        f"{step}"
    )


def unfound(root: Path, label: str) -> str:
    """Return why ``from_pretrained`` of the folder does not find the weights ``label``, "" where it
    does.

    The weights are handed to it here, so it never looks for them itself.
    """
    own = (root / "config.json").read_text(encoding="utf-8", errors="replace")
    if _variant(label) is not None or json.loads(own).get("transformers_weights"):
        return ""
    stems = " and ".join(f"{stem}{suffix}" for stem, suffix in _FOUND)
    return f"it looks only for {stems} and their indexes, so it ignores {label}; rename it"


_FOUND = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""The names of weights that ``from_pretrained`` looks for: alone, with a variant, or as an index of
shards.
"""


def _variant(label: str) -> str | None:
    """Return the ``variant=`` with which ``from_pretrained`` finds weights of this name, None where
    none does.
    """
    name = parse_file_name(label)
    if name is None or name.model is None or name.index or name.shard is not None:
        return None
    stem = name.stem.partition(".")[0]
    is_found = any(stem == one and name.suffix.startswith(suffix) for one, suffix in _FOUND)
    return name.model.variant if is_found else None


def _beyond(root: Path, given: dict[str, Any], label: str) -> Iterator[str]:
    """Yield in words what a user's own call of ``from_pretrained`` does, and this one does not."""
    if variant := _variant(label):
        yield f"whether from_pretrained finds {label}: the call must pass variant={variant!r}"
    asked = given.get("attn_implementation") or given.get("_attn_implementation")
    wants = (
        f"config.json asks for {asked!r}"
        if asked
        else "from_pretrained chooses 'sdpa' or a faster one"
    )
    yield f"other attention kernels: the model is built with attn_implementation='eager'; {wants}"
    if (root / "adapter_config.json").is_file():
        yield (
            "adapter_config.json: with PEFT installed, from_pretrained first loads the base "
            "model that it names"
        )
    if given.get("transformers_weights"):
        yield (
            "transformers_weights in config.json: from_pretrained loads "
            f"{given['transformers_weights']!r} instead"
        )


class _Log(logging.Handler):
    """Warnings that transformers writes, kept instead of printed: what they say is in the
    report.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text += f"{record.getMessage()}\n"


@contextmanager
def _captured_log() -> Iterator[_Log]:
    """Keep transformers' bars and load reports off the terminal, and its warnings for the
    report.
    """
    from transformers.utils import logging as own

    logger, log = logging.getLogger("transformers"), _Log()
    level, bars = own.get_verbosity(), own.is_progress_bar_enabled()
    handlers, propagates = list(logger.handlers), logger.propagate
    own.set_verbosity(logging.WARNING)
    logger.handlers, logger.propagate = [log], False
    own.disable_progress_bar()
    try:
        yield log
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        own.set_verbosity(level)
        if bars:
            own.enable_progress_bar()

"""A transformers model as ``from_pretrained`` builds and fills it, and the fate of each tensor. No
remote code.

Names are asked of the library, and values are found by their bytes: no version's renamings and
merges are known here. A checkpoint that transformers refuses is a failure, with its own words. Only
where nobody says which class the weights belong to is there no verdict.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from accelerate.utils import find_tied_parameters
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.load_inputs import Load
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
from ckptfix.devices.reload.oracle import load, on_meta
from ckptfix.devices.reload.outputs import (
    ANYTHING,
    digest_of,
    first_mismatch,
    host_bytes,
    in_words,
    one_line,
)
from ckptfix.devices.reload.stored_weights import Weights
from ckptfix.devices.reload.user_model import Built, made_inputs
from ckptfix.diagnosis.findings.weight_faults import MismatchedConfig
from ckptfix.diagnosis.loads.pretrained_models import judge_pretrained
from ckptfix.errors import CkptfixError
from ckptfix.formats.tensor import TensorInfo
from ckptfix.wording import count_of, human_size, list_names

_THEN = (
    "; from_pretrained fills the gap with random values and only warns",
    "; from_pretrained ignores them and only warns",
)

Feeds = Callable[[Iterable[str]], frozenset[str]]
"""Keys of a file -> keys of the model that a load of these alone fills."""


def filled_by_loader(model: Any, weights: Weights, info: Mapping[str, Any], feeds: Feeds) -> Filled:
    """Return what a model got from a file. ``info``: what ``from_pretrained`` says of its
    loading. ``feeds``: see ``Feeds``; it is asked about tensors whose values the model does not
    have.
    """
    state = tensors_of(model)
    names, left = _held(model, state, weights)
    for group in find_tied_parameters(model):
        source = next((names[name] for name in group if name in names), None)
        if source is not None:
            names.update({name: source for name in group if name not in names})
    converted, narrowed = [], []
    for ours, theirs in list(names.items()):
        held, stored = state[ours].dtype, weights.read(theirs).dtype
        if held != stored and holds(held, stored):
            converted.append(ours)
        elif held != stored:
            narrowed.append(narrowing(ours, stored, held))
            del names[ours]
    differences = [*_of_loading(info, weights), *few(narrowed, "dtype")]
    unproven: list[str] = []
    if not differences:
        differences, unproven = _unsaid(model, weights, names, left, feeds)
    return Filled(
        names=names,
        differences=tuple(differences),
        converted=tuple(converted),
        untied=_untied(model, names, weights),
        unproven=tuple(unproven),
    )


def _held(
    model: Any, state: Mapping[str, torch.Tensor], weights: Weights
) -> tuple[dict[str, str], list[str]]:
    """Return key of the model -> key of the file with the same values, and the keys of the file whose
    values the model does not have.

    The tensor of the same name comes first, up to the prefix of a base model. One that a loader
    renamed is found by its digest.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names: dict[str, str] = {}
    left: dict[str, str | None] = {}
    for key in weights.tensors:
        tries = (key, prefix + key, key.removeprefix(prefix))
        ours = next((name for name in tries if name in state and name not in names), None)
        if ours is not None and _is_same(state[ours], weights.read(key)):
            names[ours] = key
        else:
            left[key] = ours
    filled = {id(state[ours]) for ours in names}
    gaps = [ours for ours, held in state.items() if id(held) not in filled]
    contents: dict[tuple[torch.dtype, torch.Size, bytes], list[str]] = {}
    for key in left:
        value = weights.read(key)
        for dtype in {state[ours].dtype for ours in gaps}:
            if value.dtype == dtype or (value.is_floating_point() and dtype.is_floating_point):
                content = (dtype, value.shape, digest_of(value.to(dtype)))
                contents.setdefault(content, []).append(key)
    for ours in gaps:
        held = state[ours]
        if keys := contents.get((held.dtype, held.shape, digest_of(held))):
            names[ours] = keys[0] if len(keys) == 1 else keys.pop(0)
    for key, own in left.items():
        # A loader may permute the values of a tensor, such as a gate interleaved with another.
        if own is not None and own not in names and not _is_permuted(state[own], weights.read(key)):
            names[own] = key
    sources = set(names.values())
    return names, [key for key in left if key not in sources]


def _is_same(held: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a tensor of a model has the bytes of a value in its dtype."""
    return held.shape == value.shape and (
        first_mismatch(held, host_bytes(value.to(held.dtype))) is None
    )


def _is_permuted(held: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors have the same numbers in another order; True for other shapes."""
    if held.shape != value.shape:
        return True
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(held.element_size(), torch.uint8)
    numbers = (each.detach().reshape(-1).view(bits) for each in (held, value.to(held.dtype)))
    return bool(torch.equal(*(each.sort().values for each in numbers)))


def _of_loading(info: Mapping[str, Any], weights: Weights) -> list[str]:
    """Return in words what ``from_pretrained`` says of its loading, each a failure."""
    missing, unexpected = (
        sorted(info.get(kind, ())) for kind in ("missing_keys", "unexpected_keys")
    )
    problems = names_in_words(missing, unexpected, weights, then=_THEN)
    shapes = [
        f"{name!r} has shape {list(have)} {'in' if name in weights.tensors else 'when loaded from'} "
        f"the file, {list(want)} in the model"
        for name, have, want in sorted(info.get("mismatched_keys", ()))
    ]
    if shapes:
        problems += few(shapes, "shape")
        problems.append(
            "from_pretrained refuses the checkpoint: shape mismatch with config.json in "
            f"{count_of(len(shapes), 'tensor')} (with ignore_mismatched_sizes=True it fills the "
            "gap with random values)"
        )
    return problems + [str(message) for message in info.get("error_msgs", ())]


def _unsaid(
    model: Any, weights: Weights, names: Mapping[str, str], left: Sequence[str], feeds: Feeds
) -> tuple[list[str], list[str]]:
    """Return in words what ``from_pretrained`` changes without a word, and what cannot be compared.

    ``left``: keys of the file whose values the model does not have: they are merged with others,
    dropped or ignored, as a load of them alone shows.
    """
    state, kind = tensors_of(model), type(model).__name__
    fed = feeds(left) if left else frozenset()
    merged = sorted(place for place in fed & state.keys() if place not in names)
    dropped = [
        f"{key!r} and {names[place]!r} in the file both map to {place!r}: from_pretrained "
        "silently drops one of them"
        for place in sorted(fed & names.keys())
        for key in left
        if weights.tensors[key].shape == tuple(state[place].shape)
        and not same_bytes(weights, key, names[place])
        and place in feeds([key])
    ]
    dtypes = {key: weights.read(key).dtype for key in left if merged}
    wide = {
        key: dtype
        for key, dtype in dtypes.items()
        if not any(holds(state[place].dtype, dtype) for place in merged)
    }
    narrowed = [narrowing(key, dtype, state[merged[0]].dtype) for key, dtype in wide.items()]
    if wide and feeds(key for key in left if key not in wide) == fed:
        # No place needs them: they are ignored.
        narrowed = []
    unproven = []
    if merged:
        unproven.append(
            f"the loader merges or splits {count_of(len(left), 'tensor')} of the file "
            f"({list_names(left)}) into {count_of(len(merged), 'tensor')} of the model: "
            "the result was not compared with the file"
        )
    elif left and not dropped:
        unproven.append(
            f"{count_of(len(left), 'tensor')} of the file ({list_names(left)}): {kind} "
            "has no such key, and from_pretrained ignores the values without a warning"
        )
    if fresh := [name for name in state if name not in names and name not in fed]:
        unproven.append(
            f"{count_of(len(fresh), 'tensor')} of the model ({list_names(fresh)}) not in the "
            f"file: {kind} may initialize them itself, and from_pretrained does not warn"
        )
    return [*few(dropped, "pair"), *few(narrowed, "dtype")], unproven


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


def _lacking(given: Mapping[str, Any], weights: Weights) -> list[str]:
    """Return in words the layers and experts that the config has and the file lacks, as ``check``
    finds them.
    """
    load = Load(
        path=PurePosixPath(weights.label),
        library="transformers",
        configs={"config.json": given},
        tensors={
            name: TensorInfo(name, stored.dtype, stored.shape, None)
            for name, stored in weights.tensors.items()
        },
    )
    return [
        f"config.json has {told.setting} {told.value}, but the file has {told.tensors}"
        for told in judge_pretrained(load)
        if isinstance(told, MismatchedConfig) and told.tensors.startswith("no tensors of")
    ]


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
    given = _read_config(root)
    with _captured_log() as log:
        cls, config = _class_of(root, given)
        if "quantization_config" in given:
            raise NoModel("config.json asks for quantized weights, which ckptfix does not build")
        if len(found) != 1:
            raise NoModel(
                f"config.json describes one model, but there are {len(found)}; pass the path of "
                "one file"
            )
        (weights,) = found
        _ensure_room(cls, config, weights)
        model, info = _loaded(cls, config, weights, log)
        _ensure_generation(model, root)
        filled = filled_by_loader(model, weights, info, _feeding(cls, config, weights))
    # from_pretrained numbers the experts of a layer anew, so that a gap may be silent.
    moved = "" if filled.differences else ", and from_pretrained silently closes the gap"
    lacking = tuple(f"{words}{moved}" for words in _lacking(given, weights))
    filled = replace(filled, differences=filled.differences + lacking)
    weights.close()  # a file that cannot be mapped lies in memory while it is open
    return Built(
        model=model,
        what=f"{cls.__name__} from config.json",
        weights=weights,
        filled=filled,
        inputs=made_inputs(model),
        beyond=tuple(_beyond(root, given, weights.label, model)),
    )


def skeleton_from_config(root: Path) -> Any:
    """Return a model of the class that ``config.json`` names, on the meta device; tied parameters
    are one.

    Raises LoaderRefuses where transformers refuses the config, NoModel where no class is known or
    code from the folder would be needed, OSError when config.json cannot be read.
    """
    given = _read_config(root)
    with _captured_log():
        cls, config = _class_of(root, given)
        try:
            model = _skeleton(cls, config)
        except ANYTHING as error:
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


def _read_config(root: Path) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    path = root / "config.json"
    if not path.is_file():
        raise NoModel("no --model, and no config.json next to the weights")
    try:
        config = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise LoaderRefuses(f"config.json is not JSON: {error}; copy or write it again") from None
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise LoaderRefuses(
            f"config.json: expected a JSON object, found a {kind}; copy or write it again"
        )
    return config


def _class_of(root: Path, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return the class that ``config.json`` names, and what AutoConfig makes of it, where no remote
    code is needed for them.
    """
    import transformers

    known, model_type = transformers.CONFIG_MAPPING, given.get("model_type")
    is_known = isinstance(model_type, str) and model_type in known
    marks = ("architectures", "transformers_version")
    if not is_known and not any(mark in given for mark in marks):
        # That of diffusers, timm, or the user's own settings.
        raise NoModel(
            f"config.json names no transformers class (it has no {' and no '.join(marks)})"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(root), trust_remote_code=False, local_files_only=True
        )
    except ANYTHING as error:
        if "auto_map" in given and model_type not in known:
            raise NoModel(
                "config.json needs code from the folder (auto_map), which ckptfix never runs"
            ) from error
        step = (
            "correct config.json, or install a transformers version that supports it "
            f"(installed: {transformers.__version__})"
        )
        raise LoaderRefuses(f"{in_words(error)}; {step}") from error
    names = given.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise NoModel("no --model, and config.json does not name exactly one architecture")
    cls: Any = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        version = transformers.__version__
        raise NoModel(
            f"config.json names {names[0]!r}, which is not a model class of transformers {version}"
        )
    return cls, config


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
        # Not from the folder: it could lead to other files, adapters and kernels. The class renames
        # and merges weights by itself; the tensors are read by us. No dtype: the one that every
        # user's call gets.
        tensors = {name: weights.read(name) for name in weights.tensors}
        model, info = load(cls, copy.deepcopy(config), tensors, attn_implementation="eager")
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
            raise LoaderRefuses(
                f"the tensors for {unmerged['place']!r} do not fit together: "
                f"{one_line(unmerged['why'])}; copy the checkpoint again, or save it again from "
                "the run"
            ) from error
        step = "correct config.json or the weights until both match one model"
        raise LoaderRefuses(f"{cls.__name__}: {in_words(error)}; {step}") from error
    return model, info


def _feeding(cls: Any, config: Any, weights: Weights) -> Feeds:
    """Return the function that asks a class, without a byte, which of its keys some keys of a file
    fill.
    """

    def unfilled(keys: Iterable[str]) -> set[str]:
        tensors = {key: torch.empty_like(weights.read(key), device="meta") for key in keys}
        # Of none at all, the class would look for files.
        tensors = tensors or {"": torch.empty(0, device="meta")}
        settings = copy.deepcopy(config)
        _, info = load(cls, settings, tensors, attn_implementation="eager", **on_meta())
        return set(info["missing_keys"])

    def feeds(keys: Iterable[str]) -> frozenset[str]:
        try:
            return frozenset(unfilled(()) - unfilled(keys))
        except ANYTHING:  # such as a part of what can only be merged as a whole
            return frozenset()

    return feeds


def _ensure_generation(model: Any, root: Path) -> None:
    """Read ``generation_config.json`` as from_pretrained does, which passes over one that is not
    JSON.
    """
    if not model.can_generate() or not (root / "generation_config.json").is_file():
        return
    from transformers import GenerationConfig

    try:
        with suppress(OSError):
            GenerationConfig.from_pretrained(str(root), local_files_only=True)
    except ANYTHING as error:
        raise LoaderRefuses(
            f"generation_config.json: {in_words(error)}; correct it, or delete it"
        ) from error


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


def _beyond(root: Path, given: dict[str, Any], label: str, model: Any) -> Iterator[str]:
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
    if getattr(model.config, "get_text_config", lambda: model.config)() is not model.config:
        yield (
            "parts of the model that tokens do not reach, such as a vision tower; next: pass --model "
            "a factory that returns (model, inputs)"
        )
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
    try:
        from transformers.utils import logging as own
    except ImportError:
        raise NoModel(
            "transformers is not installed, so no model can be built from config.json"
        ) from None

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

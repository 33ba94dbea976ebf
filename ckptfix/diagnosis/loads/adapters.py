"""Adapters of PEFT against their config: which of the tensors a load brings to life.

Facts from PEFT 0.21 (``utils/save_and_load.py``): ``PeftModel.from_pretrained`` makes the adapter
anew from the config, and loads the file with ``strict=False``. A key that no parameter has is
dropped without a word, a parameter without a key stays as it was made, and another shape is a
RuntimeError.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from typing import NamedTuple

from ckptfix.checkpoint.filenames import weights_names
from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import dotted
from ckptfix.checkpoint.load_inputs import Config, Load
from ckptfix.checkpoint.model_configs import ADAPTER
from ckptfix.diagnosis.findings.base import Explained, Finding, Told
from ckptfix.diagnosis.findings.duplicates import NestedPrefix, WrapperPrefix
from ckptfix.diagnosis.findings.load_faults import (
    DeadAdapter,
    DoubtfulParts,
    IncompleteAdapter,
    MismatchedAdapter,
    NewAdapter,
    PassedOver,
    UngatheredParts,
    UnknownBias,
    UnneededParts,
    UntrainedAdapter,
)
from ckptfix.diagnosis.findings.misplaced import EmptyExport, UnknownState, WrongState
from ckptfix.diagnosis.loads.adapter_keys import BASE, PROMPT, PROMPTS, AdapterKeys
from ckptfix.diagnosis.optimizer_values import FEW_STEPS
from ckptfix.wording import count_of, list_names, series, shortened

_MARKS = {"LORA": "lora_", "IA3": "ia3_"}
"""Type of an adapter -> the beginning of the names of its parameters."""

_KEYS = {
    kind: re.compile(pattern)
    for kind, pattern in (
        ("LORA", r"\.lora_([AB]\.weight|embedding_[AB])$"),
        ("ADALORA", r"\.lora_[ABE]$"),
        ("IA3", r"\.ia3_"),
        ("LOHA", r"\.hada_"),
        ("LOKR", r"\.lokr_"),
        ("VERA", r"\.vera_"),
        ("OFT", r"\.oft_"),
        ("BOFT", r"\.boft_"),
        ("HRA", r"\.hra_"),
        ("FOURIERFT", r"\.fourierft_"),
        ("VBLORA", r"\.vblora_"),
        ("LILY", r"\.lily_"),
        ("RANDLORA", r"\.randlora_"),
        ("LN_TUNING", r"\.ln_tuning_"),
        *((kind, f"^{PROMPT}$") for kind in PROMPTS),
    )
}
"""Type of an adapter -> what the keys of its own tensors have in them (PEFT 0.21)."""

_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
"""Alternatives for each module of a LoRA: all parameters of one of them."""

_SETTING_OF = {"lora_magnitude_vector": "use_dora", "lora_B.bias": "lora_bias"}
"""Further parameter of a LoRA -> the setting without which PEFT makes none. With it every module has
one, but embeddings have no biases.
"""

_BIASES = ("none", "all", "lora_only")
"""Values that LoRA takes (PEFT 0.15 to 0.21): with any other its load raises an error."""

_MOST_OF_VALUE = 40
"""Characters of a value in a config that a sentence quotes."""

_RANKS = {"lora_A": 0, "lora_embedding_A": 0, "lora_B": 1, "lora_embedding_B": 1}
"""Parameter of a LoRA -> the dimension that is the rank. Convolutions are judged by ``lora_A``
alone.
"""

_ZERO_AT_START = ("lora_B", "lora_embedding_A")
"""Parameters that PEFT makes of zeros, so that the adapter changes nothing before a step."""

_OF_CLASSES = frozenset({"classifier", "score"})
"""Heads of which PEFT adds both to ``modules_to_save`` for a classification; a model has one."""

_AGAIN = "copy the adapter again from its source, use another checkpoint, or train again"
_OF_TWO_RUNS = (
    "config and weights come from different runs: copy both again from one save, or set this "
    "in adapter_config.json as in the run that trained the weights"
)

_MAX_KEY, _MAX_PATTERNS = 300, 100
"""Length and number of texts of a config beyond which they are not compared: no library writes so
many.
"""

_MAX_MATCHES = 20_000
"""Pairs of a module and a regular expression of a config beyond which ranks are not compared: each
takes up to 60 us.
"""

_MAX_WAYS = 10_000
"""Ways to match a regular expression of a config beyond which it is not compared."""


class _Parameter(NamedTuple):
    """A tensor of an adapter. ``key``: in the file. ``module``: in the base model. ``name``: such
    as ``lora_A``.
    """

    key: str
    module: str
    name: str
    shape: tuple[int, ...]


def judge_adapter(load: Load) -> Iterator[Told]:
    """Yield the verdict on an adapter. Missing tensors are judged under the keys that it should
    have.
    """
    kind = str(load.config["peft_type"])
    names = AdapterKeys(load, kind)
    if load.is_whole and not load.tensors:
        yield _empty(load, "it holds no tensors", "PEFT loads nothing, and only warns")
        yield from (Explained(UnknownState, file) for file in load.files)
        return
    of_names = list(names.findings())
    for finding in of_names:
        yield finding
        if isinstance(finding, DeadAdapter) and (finding.remove or finding.inner):
            for file in load.files:
                yield Explained(NestedPrefix, file)
                yield Explained(WrapperPrefix, file)
    lost = {key: None for key, tensor in load.tensors.items() if tensor.shape == (0,)}
    if lost:
        keys = f"{len(lost)} of {count_of(len(load.tensors), 'key')}"
        lacks = (
            f"empty tensors, like those that ZeRO-3 leaves on each rank, for {keys}, such as "
            f"{next(iter(lost))}"
        )
        yield _empty(load, lacks, "PEFT fails with 'size mismatch'")
        for file in load.files:
            yield Explained(WrongState, file)
            yield Explained(EmptyExport, file)
    parameters = [
        parameter
        for key, expected in names.expected.items()
        if (parameter := _parameter(key, expected, load.tensors[key].shape, kind)) is not None
    ]
    of_others = tuple(_of_another_type(load, kind, names.expected))
    if names.are_several:
        yield f"{load.path}: ranks and missing tensors of its adapters; repair it first"
    elif of_others:
        yield from of_others
    elif kind in PROMPTS:
        yield from _prompts(load, kind, names.expected.values())
    elif kind in _MARKS:
        # Under other names than PEFT looks for, the modules may have others, too.
        place = _place_of(load.config)
        placed = [one for one in parameters if of_names or place(one)]
        if load.is_whole:
            yield from _missing(load, kind, placed, names.expected.values())
        # Without any the targets of a list have been told.
        is_told = not placed and isinstance(load.config.get("target_modules"), list)
        if len(placed) < len(parameters) and not is_told:
            yield _without_place(load, placed, parameters)
        if kind == "LORA":
            bias = load.config.get("bias", "none")
            if bias not in _BIASES:
                yield UnknownBias(path=load.path, value=shortened(json.dumps(bias), _MOST_OF_VALUE))
            yield from _ranks(
                load, [parameter for parameter in parameters if parameter.key not in lost]
            )
            if not lost:
                yield from _zeros(load, parameters)
        if not isinstance(load.config.get("target_modules"), list):
            yield (
                f"{load.path}: whether every module that adapter_config.json targets has tensors: "
                "only the base model shows which modules match"
            )
    else:
        yield f"{load.path}: ranks and missing tensors of an adapter of type {kind}"
    yield f"{load.path} against its base model (modules, shapes); ckptfix check --load asks PEFT"
    # With lora_alpha of another run the adapter loads, and computes something else.
    yield f"{ADAPTER}: settings that no tensor shows, such as lora_alpha"


def judge_halves(load: Load) -> Iterator[Finding]:
    """Yield the verdict on an adapter without a config, as far as its keys tell: PEFT saves both
    matrices of LoRA.
    """
    parameters = [
        parameter
        for key, expected in AdapterKeys(load, "LORA").expected.items()
        if (parameter := _parameter(key, expected, load.tensors[key].shape, "LORA")) is not None
    ]
    if load.is_whole:
        yield from _lone_parts(load, parameters, DoubtfulParts)


def passed_over(load: Load, files: Iterable[Component], trained: int) -> Iterator[PassedOver]:
    """Yield the finding about an adapter next to weights in one file, which the Trainer takes
    without a config, too (``_load_from_checkpoint``, transformers 5.23).

    ``trained``: the number of parameters in its optimizer. Those of the adapter show that the Trainer
    trained that, and no model to which a script added an adapter.
    """
    if load.states_of != "Trainer" or load.deepspeed or trained != len(load.tensors):
        return
    for file in files:
        is_taken = str(file.path) in weights_names("transformers") and bool(file.tensors)
        if is_taken and not any(tensor.fqn.startswith("base_model.") for tensor in file.tensors):
            yield PassedOver(
                path=load.path,
                lacks=f"the Trainer ignores it, because {file.path} exists",
                effect="a resume trains a new adapter, with the optimizer state of this one",
                remedy=(
                    f"move {file.path} to another folder; the adapter is intact, and PEFT loads it"
                ),
            )
            return


def _parameter(key: str, expected: str, shape: tuple[int, ...], kind: str) -> _Parameter | None:
    """Return the parameter of an adapter that a key is of, None for other tensors, such as of
    ``modules_to_save``.
    """
    ending = ".bias" if expected.endswith(".bias") else ""
    module, dot, name = expected.removesuffix(ending or ".weight").rpartition(".")
    if not dot or not name.startswith(_MARKS.get(kind, " ")):
        return None
    return _Parameter(key, module.removeprefix(dotted(BASE)), name + ending, shape)


def _empty(load: Load, lacks: str, effect: str) -> IncompleteAdapter:
    """Return the finding about tensors that were not gathered when they were saved."""
    if not load.deepspeed:
        return IncompleteAdapter(
            path=load.path,
            lacks=lacks,
            effect=effect,
            remedy=(
                "this folder does not contain the weights: look for a global_step folder of "
                "DeepSpeed, or use another checkpoint; for the next save, gather the tensors of "
                "ZeRO-3 (stage3_gather_16bit_weights_on_model_save), and do not pass the "
                "state_dict of a compiled model to save_pretrained"
            ),
        )
    where = "this folder" if load.deepspeed == "." else f"{load.deepspeed}/"
    # The Trainer leaves it so in each checkpoint with ZeRO-3 and
    # stage3_gather_16bit_weights_on_model_save off.
    return UngatheredParts(
        path=load.path,
        lacks=lacks,
        effect=f"{effect}; a resume with DeepSpeed reads {where}",
        remedy=(
            f"the weights are in {where}: merge them with DeepSpeed's zero_to_fp32.py, and keep "
            "the keys with 'lora_' of the result; for the next run, set "
            "stage3_gather_16bit_weights_on_model_save"
        ),
    )


def _of_another_type(load: Load, kind: str, keys: Mapping[str, str]) -> Iterator[IncompleteAdapter]:
    """Yield the finding about an adapter without a key of the type in its config, and with keys of
    another type. ``keys``: key -> the key that PEFT looks for.
    """
    if kind not in _KEYS or any(map(_KEYS[kind].search, keys.values())):
        return
    foreign = [
        key
        for key, expected in keys.items()
        if any(pattern.search(expected) for pattern in _KEYS.values())
    ]
    if foreign:
        yield IncompleteAdapter(
            path=load.path,
            lacks=(
                f"{len(foreign)} of {count_of(len(load.tensors), 'tensor')} are of another type, "
                f"such as {foreign[0]} (expected {kind}, as set by peft_type in adapter_config.json)"
            ),
            effect="PEFT loads none of them",
            remedy="config and weights are of two adapters: copy both again from one save",
        )


def _prompts(load: Load, kind: str, keys: Iterable[str]) -> Iterator[Finding]:
    """Yield the findings about the embeddings of prompts."""
    if PROMPT not in set(keys):
        if load.is_whole:
            yield IncompleteAdapter(
                path=load.path,
                lacks=f"it has no {PROMPT}",
                effect="PEFT fails with KeyError",
                remedy=(
                    "copy the adapter again from its source, or save it again with save_pretrained"
                ),
            )
        return
    shape = load.tensors[PROMPT].shape if PROMPT in load.tensors else ()
    count = load.config.get("num_virtual_tokens")
    # Models with an encoder and a decoder have the tokens twice.
    if type(count) is int and len(shape) == 2 and shape[0] not in (count, 2 * count):
        yield MismatchedAdapter(
            path=load.path,
            modules=1,
            module=PROMPT,
            rank=shape[0],
            expected=count,
            setting="num_virtual_tokens",
        )
    width, layers = load.config.get("token_dim"), load.config.get("num_layers")
    if kind == "PREFIX_TUNING":  # each layer has its keys and its values
        is_plain = type(width) is int and type(layers) is int
        width = 2 * layers * width if is_plain else None  # type: ignore[operator]
    if type(width) is int and len(shape) == 2 and shape[1] != width:
        yield IncompleteAdapter(
            path=load.path,
            lacks=(
                f"{PROMPT} has {count_of(shape[1], 'column')} (expected {width}, from token_dim"
                f"{' and num_layers' if kind == 'PREFIX_TUNING' else ''} in adapter_config.json)"
            ),
            effect="PEFT fails with 'size mismatch'",
            remedy=_OF_TWO_RUNS,
        )


def _lone_parts(
    load: Load,
    parameters: Iterable[_Parameter],
    finding: type[IncompleteAdapter] = IncompleteAdapter,
) -> Iterator[IncompleteAdapter]:
    """Yield the findings about modules with a part of the parameters that they should have."""
    groups: list[tuple[tuple[str, ...], ...]] = [_PAIRS]
    groups += [((name,),) for name, setting in _SETTING_OF.items() if load.config.get(setting)]
    known = {name for group in groups for alternative in group for name in alternative}
    modules: dict[str, set[str]] = {}
    for parameter in parameters:
        if parameter.name in known:
            modules.setdefault(parameter.module, set()).add(parameter.name)
    for group in groups:
        lone = {
            name: having
            for name, having in modules.items()
            if not any(having.issuperset(alternative) for alternative in group)
        }
        if lone:
            name, having = next(iter(lone.items()))
            partly = [alternative for alternative in group if not having.isdisjoint(alternative)]
            absent = " or ".join(
                series([part for part in alternative if part not in having])
                for alternative in partly or group
            )
            expected = f" (expected {series(partly[0])})" if partly else ""
            yield finding(
                path=load.path,
                lacks=(
                    f"{count_of(len(lone), 'module')} without {absent}, such as {name}{expected}"
                ),
                effect=f"PEFT initializes {absent} again, so the training of these modules is lost",
                remedy=_AGAIN,
            )


def _missing(
    load: Load, kind: str, parameters: Sequence[_Parameter], keys: Iterable[str]
) -> Iterator[IncompleteAdapter]:
    """Yield the findings about parts of modules, target modules and trained heads without
    tensors.
    """
    if kind == "LORA":
        yield from _lone_parts(load, parameters)
        yield from _rows(load)
    modules = {parameter.module for parameter in parameters}
    if targets := _texts(load.config.get("target_modules")):
        wanted = {target for target in targets if len(target) <= _MAX_KEY}
        # Nearly all targets are last segments, and those of all modules are few.
        matched = wanted.intersection(module.rpartition(".")[2] for module in modules)
        if matched != wanted:
            matched = {end for module in modules for end in _suffixes(module) if end in wanted}
        unmatched = wanted - matched
        absent = [target for target in targets if target in unmatched]
        if not modules and not load.config.get("trainable_token_indices"):
            yield IncompleteAdapter(
                path=load.path,
                lacks=f"no {kind} tensors for the target modules {list_names(targets)}",
                effect="PEFT initializes the adapter again, and it has no effect",
                remedy=_AGAIN,
            )
        elif absent and not _is_selective(load.config):
            yield UnneededParts(
                path=load.path,
                lacks=(
                    f"no tensors for {list_names(absent)} in target_modules of adapter_config.json"
                ),
                effect="if the base model has such modules, they keep the weights of the base",
                remedy=(
                    "ignore this if the base model has no such modules, as when the list is for "
                    f"several models; otherwise {_AGAIN}"
                ),
            )
    heads = _texts(load.config.get("modules_to_save"))
    if 0 < len(heads) <= _MAX_PATTERNS:
        # The name in memory, lm_head.modules_to_save.weight, PEFT does not look for.
        in_memory = {key for key in keys if ".modules_to_save." in key}
        held = [f".{key.removeprefix(dotted(BASE))}" for key in keys if key not in in_memory]
        absent = [head for head in heads if not any(f"{head}." in key for key in held)]
        if set(heads) >= _OF_CLASSES and not set(absent) >= _OF_CLASSES:
            absent = [head for head in absent if head not in _OF_CLASSES]
        if absent:
            # A base without such a module is no error: some lists are for several models. PEFT adds
            # both heads itself for a classification, and those of BART and T5 have another name.
            are_lost = len(absent) == len(heads) and set(heads) != _OF_CLASSES
            is_doubtful = are_lost or in_memory
            yield (DoubtfulParts if is_doubtful else UnneededParts)(
                path=load.path,
                lacks=(
                    f"no tensors for {list_names(absent)} in modules_to_save of adapter_config.json"
                ),
                effect="PEFT fails with KeyError if the base model has such a module",
                remedy=f"{_AGAIN}; ignore this if the base model has no such module",
            )


def _rows(load: Load) -> Iterator[IncompleteAdapter]:
    """Yield the finding about trained rows of embeddings: their number is that of the config."""
    setting = "trainable_token_indices"
    rows = load.config.get(setting)
    held = {
        key.partition(".token_adapter.")[0]: tensor.shape[:1]
        for key, tensor in load.tensors.items()
        if "trainable_tokens_delta" in key
    }
    remedy, lacks, effect = _OF_TWO_RUNS, "", "PEFT fails with 'size mismatch'"
    if not held:
        if rows:
            lacks, effect = (
                f"no tensors for {setting} in adapter_config.json",
                "PEFT fails with KeyError",
            )
            remedy = _AGAIN
    elif not rows:
        lacks = (
            f"{setting} in adapter_config.json does not cover {len(held)} of "
            f"{count_of(len(load.tensors), 'tensor')}, such as {next(iter(held))}"
        )
        effect = "PEFT drops them silently"
    else:
        for module, count in held.items():
            # One list is for the input embedding, whatever its name is; a dict has a list for each.
            ends = _suffixes(module) if isinstance(rows, dict) else ()
            wanted = next((rows[end] for end in ends if end in rows), rows)
            if isinstance(wanted, list) and count != (len(wanted),):
                lacks = (
                    f"{module} has {series([*map(str, count)])} trained rows (expected "
                    f"{len(wanted)}, from {setting} in adapter_config.json)"
                )
                break
    if lacks:
        yield IncompleteAdapter(path=load.path, lacks=lacks, effect=effect, remedy=remedy)


def _place_of(config: Config) -> Callable[[_Parameter], bool]:
    """Return whether PEFT makes a parameter, as far as the config alone tells; True where it does
    not.

    As ``check_target_module_exists`` of PEFT 0.21.
    """
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    wanted = frozenset(_texts(targets))
    numbers = [layers] if type(layers) is int else layers
    is_plain = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    pattern: re.Pattern[str] | None = None
    if isinstance(targets, str) and targets != "all-linear" and _is_quick(targets):
        with suppress(re.error):
            pattern = re.compile(targets)
    # Tied weights are modules that are no targets.
    is_known = (pattern or wanted) and not config.get("ensure_weight_tying")
    of_parameters = frozenset(
        name.rpartition(".")[0] for name in _texts(config.get("target_parameters"))
    )
    excluded = config.get("exclude_modules") or []
    # The name of a parameter alone can be of any module.
    is_known = is_known and isinstance(excluded, list) and "" not in of_parameters
    without = frozenset(_texts(excluded))
    layers_pattern = config.get("layers_pattern") or []
    patterns = [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern
    is_plain = (
        is_plain
        and isinstance(patterns, list)
        and all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in patterns)
    )

    def has_place(parameter: _Parameter) -> bool:
        setting = _SETTING_OF.get(parameter.name)
        if setting is not None and not config.get(setting):
            return False
        # A convolution in an attention is behind the layer that PEFT wraps.
        module = parameter.module.partition(".base_layer")[0]
        if not is_known or len(module) > _MAX_KEY:
            return True
        ends = {module, *_suffixes(module)} if without or of_parameters else {module}
        if not of_parameters.isdisjoint(ends):
            return True
        if not without.isdisjoint(ends):
            return False
        if module in wanted:
            return True
        if pattern is not None:
            return pattern.fullmatch(module) is not None
        # Nearly all targets are last segments.
        if module.rpartition(".")[2] not in wanted and wanted.isdisjoint(_suffixes(module)):
            return False
        if not numbers or not is_plain:
            return True
        # Of several numbers in a key PEFT takes the first, and did the last.
        segments = module.split(".")
        own = [
            int(number)
            for before, number in zip(("", *segments), segments, strict=False)
            if number.isdecimal() and (not patterns or before in patterns)
        ]
        return own[0] in numbers if len(own) == 1 else bool(own) or not patterns

    return has_place


def _without_place(
    load: Load, placed: Sequence[_Parameter], parameters: Sequence[_Parameter]
) -> IncompleteAdapter:
    """Return the finding about tensors for which the config of an adapter makes no parameters."""
    kept = set(placed)
    lost = [parameter for parameter in parameters if parameter not in kept]
    setting = _SETTING_OF.get(lost[0].name, "target_modules")
    if setting == "target_modules" and load.config.get("layers_to_transform"):
        setting += " and layers_to_transform"
    return (DoubtfulParts if placed else IncompleteAdapter)(
        path=load.path,
        lacks=(
            f"{setting} in adapter_config.json {'do' if ' and ' in setting else 'does'} not cover "
            f"{len(lost)} of {count_of(len(load.tensors), 'tensor')}, such as {lost[0].key}"
        ),
        effect="PEFT drops them silently",
        remedy=_OF_TWO_RUNS,
    )


def _suffixes(module: str) -> Iterator[str]:
    """Yield the entries of ``target_modules`` that are for a module: its path, and each end of it
    after a dot.

    Ends of more than 300 characters are left out: all of a key with 20,000 dots took 615 MiB.
    """
    yield module
    at = module.find(".", max(len(module) - _MAX_KEY - 1, 0))
    while at >= 0:
        yield module[at + 1 :]
        at = module.find(".", at + 1)


def _is_selective(config: Config) -> bool:
    """Return whether other settings take modules out of the targets, as only the base model
    shows.
    """
    return any(map(config.get, ("exclude_modules", "target_parameters", "trainable_token_indices")))


def _ranks(load: Load, parameters: Sequence[_Parameter]) -> Iterator[MismatchedAdapter | str]:
    """Yield the finding about ranks of a LoRA that are not those of the config."""
    config = load.config
    rank, patterns = config.get("r"), config.get("rank_pattern")
    rank = 8 if rank is None else rank
    modules = {parameter.module for parameter in parameters}
    is_plain = isinstance(patterns or {}, dict)
    pattern_of = _matcher(patterns or {}, len(modules)) if is_plain else None
    if type(rank) is not int or pattern_of is None:
        if type(rank) is not int:
            reason = "r in adapter_config.json is not an integer"
        elif not is_plain:
            reason = "rank_pattern in adapter_config.json is not an object"
        else:
            reason = "rank_pattern in adapter_config.json is too complex, or not a valid pattern"
        yield f"{load.path}: ranks of its tensors, because {reason}"
        return
    targets = frozenset(_texts(config.get("target_modules")))
    wrong: dict[str, tuple[int, int]] = {}
    for parameter in parameters:
        dimension = _RANKS.get(parameter.name)
        if dimension is None or len(parameter.shape) <= dimension:
            continue
        # Of a convolution with groups lora_B has fewer columns, and blocks divide the rank.
        if (len(parameter.shape) > 2 and parameter.name != "lora_A") or (
            dimension and config.get("use_bdlora")
        ):
            continue
        # The experts of a layer share one matrix, so that its rank is a multiple. Their modules are
        # no target modules.
        module = parameter.module
        is_of_experts = bool(config.get("target_parameters")) and targets.isdisjoint(
            _suffixes(module)
        )
        if is_of_experts or len(module) > _MAX_KEY:
            continue
        expected = (patterns or {}).get(pattern_of(module), rank)
        if type(expected) is int and parameter.shape[dimension] != expected:
            wrong.setdefault(module, (parameter.shape[dimension], expected))
    if wrong:
        module, (has, expected) = next(iter(wrong.items()))
        yield MismatchedAdapter(
            path=load.path,
            modules=len(wrong),
            module=module,
            rank=has,
            expected=expected,
            setting="r" if expected == rank else "rank_pattern",
        )


def _texts(value: object) -> list[str]:
    """Return the texts of a list in a config, none for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _matcher(patterns: Mapping[str, object], modules: int) -> Callable[[str], str] | None:
    """Return what finds the first pattern for a module, as ``get_pattern_key`` of PEFT does; None
    for a complex one, and for too many of them.

    ``modules``: how many are to be matched.

    A pattern is a regular expression of the user. EVA writes a plain path for each of a thousand
    modules.
    """
    if not patterns:
        return lambda module: module
    plain: dict[str, int] = {}
    compiled: list[tuple[int, re.Pattern[str]]] = []
    for number, pattern in enumerate(patterns):
        if re.fullmatch(r"[\w.-]+", pattern):
            plain[pattern] = number
            continue
        if not _is_quick(pattern) or (len(compiled) + 1) * modules > _MAX_MATCHES:
            return None
        try:
            compiled.append((number, re.compile(rf"(.*\.)?({pattern})$")))
        except re.error:
            return None
    names = list(patterns)

    @cache
    def pattern_of(module: str) -> str:
        numbers = [plain[suffix] for suffix in _suffixes(module) if suffix in plain]
        numbers += [number for number, pattern in compiled if pattern.match(module)]
        return names[min(numbers)] if numbers else module

    return pattern_of


def _is_quick(pattern: str) -> bool:
    """Return whether a regular expression can be searched for in a key in milliseconds, as far as
    its text tells.

    Two repetitions in one can take years, one of a group such as ``(a|a)*`` too, and so can many
    groups of alternatives in a row. Each factor counts the ways to match a part of it.
    """
    repetitions = sum(map(pattern.count, "*+?{"))
    groups: list[str] = re.findall(r"\([^()]*\)", pattern)
    is_nested = not len(groups) == pattern.count("(") == pattern.count(")")
    if len(pattern) > _MAX_KEY or repetitions > 1 or is_nested or re.search(r"\)[*+?{]", pattern):
        return False
    ways = prod(group.count("|") + 1 for group in (*groups, re.sub(r"\([^()]*\)", "", pattern)))
    return ways * (_MAX_KEY if repetitions else 1) <= _MAX_WAYS


def _zeros(load: Load, parameters: Iterable[_Parameter]) -> Iterator[Finding]:
    """Yield the finding about a LoRA whose matrices are as PEFT made them."""
    starting = [parameter for parameter in parameters if parameter.name in _ZERO_AT_START]
    is_sampled = False
    for parameter in starting:
        data = load.sample(parameter.key, load.size)
        # A zero may have a sign. Every number of these bytes is below 1e-5.
        if data is None or data.strip(b"\0\x80"):
            return
        offsets = load.tensors[parameter.key].data_offsets
        is_sampled = is_sampled or (offsets is not None and len(data) < offsets[1] - offsets[0])
    if starting:
        yield (UntrainedAdapter if load.steps > FEW_STEPS else NewAdapter)(
            path=load.path,
            parameter=series(sorted({parameter.name for parameter in starting})),
            modules=len({parameter.module for parameter in starting}),
            steps=load.steps,
            sampled=is_sampled,
        )

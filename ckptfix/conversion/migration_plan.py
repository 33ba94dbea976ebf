"""Plan of a migration: the files to write, to copy and to leave out, decided before anything is
written.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path, PurePosixPath

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    KeyMap,
    collapse,
    collisions,
    common_wrappers,
    is_nested,
    without_private_wrappers,
)
from ckptfix.conversion.streaming import Source
from ckptfix.conversion.target_names import (
    NAME,
    Config,
    LeftOut,
    becomes_file,
    library_stem,
    name_of,
    other_files,
    read_config,
    stems,
    why_one_file,
)
from ckptfix.diagnosis.policy import Keys
from ckptfix.errors import OperationError, UnsupportedFormat, UsageError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.files import AnyPath, stat_of
from ckptfix.storage.reading import Piece
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_dcp import dcp_files
from ckptfix.tensors.new_files import (
    NewTensor,
    OutputFile,
    safetensors_files,
    safetensors_place,
)
from ckptfix.tensors.new_torch_files import torch_files
from ckptfix.tensors.optimizers import OptimizerState, Strategy
from ckptfix.tensors.parameter_sources import Factory
from ckptfix.tensors.single_files import unwritable
from ckptfix.tensors.stored import Format, StoredCheckpoint, StoredTensor, Weights
from ckptfix.wording import Brief, count_of, list_names


def renamed(weights: Weights, keys: Keys | None) -> Weights:
    """Return the weights under the requested keys; ties and the versions of modules follow.

    Raises UsageError when two keys would become one.
    """
    if keys is None:
        return weights
    names = [tensor.fqn for tensor in weights.tensors] + list(weights.ties)
    key_map = _key_map(names, keys)
    if key_map is None:
        return weights
    for first, second, new in collisions(names, key_map):
        raise UsageError(f"{weights.label}: {first!r} and {second!r} would both become {new!r}")
    if key_map.inner and common_wrappers(map(key_map, names)) != key_map.insert:
        raise UsageError(
            f"{weights.label}: without its inner wrappers, every key would still begin with a "
            "wrapper, so it is unclear which wrappers are real; leave --keys out"
        )
    return replace(
        weights,
        tensors=tuple(tensor._replace(fqn=key_map(tensor.fqn)) for tensor in weights.tensors),
        ties={key_map(name): key_map(kept) for name, kept in weights.ties.items()},
        versions={key_map.module(name): version for name, version in weights.versions.items()},
    )


def _key_map(names: list[str], keys: Keys) -> KeyMap | None:
    if keys is Keys.AUTO:
        chain = common_wrappers(names)
        return KeyMap(remove=chain, insert=collapse(chain)) if is_nested(chain) else None
    inner = common_wrappers(map(without_private_wrappers, names))
    return KeyMap(remove=inner, insert=DDP_CHAIN if keys is Keys.DDP else (), inner=True)


TARGETS = (Format.SAFETENSORS, Format.TORCH, Format.DCP)
"""Formats that migrate writes."""

WEIGHTS, ALL = STATES = ("weights", "all")
"""Words of ``--state``: the models, or everything that a run needs to go on."""

FORMATS = {
    Strategy.DDP: Format.SAFETENSORS,
    Strategy.FSDP: Format.DCP,
    Strategy.FSDP_FULL: Format.TORCH,
    **dict.fromkeys(
        (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.UNIVERSAL), Format.DEEPSPEED
    ),
}
"""The format in which each strategy's loader looks for the weights."""

FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"} | {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""Words for ``--dtype`` -> dtype in safetensors' nouns."""

ORIGINAL = "original"
"""Word of ``--dtype`` for DeepSpeed: the weights in the dtype of training, not those of the
optimizer.
"""

CONVERTIBLE = frozenset(FLOATS.values()) | {
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0",
}  # fmt: skip
"""The dtypes that ``--dtype`` converts."""

PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Floating point dtypes that ``--dtype`` does not convert: several numbers share a byte."""

DEFAULT_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in a file of a from_pretrained folder, as ``save_pretrained`` had them until
transformers 5.
"""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


class Options(Struct, frozen=True, kw_only=True):
    """The options of a migration.

    ``strategy``: of whose loader the complete state is written, None for weights alone; ``to`` is
    then the format of its weights. ``processes``: that will load the state, None for as many as
    saved it. ``model``, ``frozen``: as in ``name_optimizers``. ``most``: bytes of tensors in a file
    (None: the default of the kind of folder).

    ``keys``: None leaves keys alone. ``dtype``: of all floating point tensors, in safetensors'
    nouns; None leaves them as they are. ``original``: of DeepSpeed, those in the dtype of training.
    ``drop_opaque``: leave out values that are not tensors. ``verify``: read everything back.
    ``overwrite``: replace a folder that migrate wrote.
    """

    to: Format
    strategy: Strategy | None = None
    processes: int | None = None
    model: str | Factory | None = None
    frozen: str | None = None
    most: int | None = None
    keys: Keys | None = None
    dtype: str | None = None
    original: bool = False
    drop_opaque: bool = False
    verify: bool = True
    overwrite: bool = False

    @property
    def target(self) -> str:
        """The word of ``--to``."""
        return self.to.value if self.strategy is None else self.strategy.value


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB`` (10**9 each, as in save_pretrained), ``500MiB`` or ``1000``.

    Raises UsageError for anything else, and for no bytes.
    """
    match = re.fullmatch(
        r"([0-9]{1,15})(\.[0-9]{1,6})?\s*([KMGT]i?B|B|)", text.strip(), re.IGNORECASE
    )
    size = int(float(match[1] + (match[2] or "")) * _UNITS[match[3].upper()]) if match else 0
    if size < 1:
        raise UsageError(
            f"--max-shard-size {text}: expected a size such as 5GB or 500MiB, or a number of bytes"
        )
    return size


def make_options(
    *,
    to: str | Format | Strategy,
    state: str = WEIGHTS,
    processes: int | None = None,
    model: str | Factory | None = None,
    frozen: str | None = None,
    max_shard_size: int | str | None,
    keys: str | Keys | None,
    dtype: str | None,
    drop_opaque: bool,
    verify: bool,
    overwrite: bool,
) -> Options:
    """Return the options that these words mean. Raises UsageError for an unknown word."""
    if state not in STATES:
        raise UsageError(f"--state {state}: expected one of {', '.join(STATES)}")
    is_all = state == ALL
    targets: Sequence[Format | Strategy] = [*Strategy] if is_all else TARGETS
    words = [target.value for target in targets]
    if (word := to.value if isinstance(to, Format | Strategy) else to) not in words:
        others = [*map(_word, TARGETS if is_all else Strategy)]
        other = (
            f" (--to {word} needs --state {WEIGHTS if is_all else ALL})" if word in others else ""
        )
        raise UsageError(f"--to {word}: expected one of {', '.join(words)}{other}")
    if is_all:
        for name, value in (("max-shard-size", max_shard_size), ("keys", keys)):
            if value is not None:
                raise UsageError(f"--{name} is for --state {WEIGHTS}; leave it out")
        if dtype == ORIGINAL:
            raise UsageError(f"--dtype {ORIGINAL} is for --state {WEIGHTS}; leave it out")
    for name, is_given in (
        () if is_all else (("model", model is not None), ("frozen", frozen is not None))
    ):
        if is_given:
            raise UsageError(
                f"--{name} is for --state {ALL}, which needs the names of parameters; leave it out"
            )
    if processes is not None and (not is_all or processes < 1):
        raise UsageError(
            f"--processes {processes}: expected a number of at least 1, together with --state {ALL}"
        )
    if dtype is not None and dtype not in (*FLOATS, ORIGINAL):
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join((*FLOATS, ORIGINAL))}")
    if keys is not None and keys not in [*Keys, *(one.value for one in Keys)]:
        raise UsageError(f"--keys {keys}: expected one of {', '.join(one.value for one in Keys)}")
    strategy = Strategy(word) if is_all else None
    return Options(
        to=Format(word) if strategy is None else FORMATS[strategy],
        strategy=strategy,
        processes=processes,
        model=model,
        frozen=frozen,
        most=parse_size(str(max_shard_size)) if max_shard_size is not None else None,
        keys=Keys(keys) if keys is not None else None,
        dtype=FLOATS.get(dtype or ""),
        original=dtype == ORIGINAL,
        drop_opaque=drop_opaque,
        verify=verify,
        overwrite=overwrite,
    )


def _word(target: Format | Strategy) -> str:
    return str(target.value)


_SCALE = re.compile(r"(^|[._])(scales?|scale_inv)$")
"""The names of the scales of quantized weights: ``weight_scale_inv``, ``input_scale``."""

_MADE_PLAIN = {
    "quantized": "call dequantize() on such tensors",
    "sparse": "call to_dense() on such tensors",
    "conjugated": "call resolve_conj().resolve_neg() on such tensors",
    "complex32": "convert such tensors to complex64",
    "float4": "view such tensors as uint8",
    "meta device": "load the data of such tensors",
}
_TO_PLAIN = "convert such tensors to plain tensors"

_OF_INDEXES = {"metadata", "total_size", "total_parameters"}
"""Entries that every index has or that follow from the tensors."""

_MOST_BYTES = 1 << 60
"""Largest size of a model: the formats count in 64 bits, and a few bytes can be expanded to any
size.
"""


class PlannedModel(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One planned model: ``before`` as it is stored, ``weights`` under their new keys, and its new
    files.

    ``sources``: new name -> where its bytes come from; ties are not in it. ``parts``: the same for
    the keys of the ``Data`` in its files, where a file does not hold tensors one by one; None where
    the keys are the names. ``modules``: file -> name -> key in ``parts``, of the copies of the
    weights that DeepSpeed's module has.
    """

    label: str
    before: Weights
    weights: Weights
    files: tuple[OutputFile, ...]
    sources: Mapping[str, Source]
    parts: Mapping[str, Source] | None = None
    modules: Mapping[PurePosixPath, Mapping[str, str]] = field(default_factory=dict)

    @property
    def data(self) -> Mapping[str, Source]:
        """The source of the bytes of each ``Data`` in its files."""
        return self.sources if self.parts is None else self.parts

    @property
    def old_files(self) -> tuple[PurePosixPath, ...]:
        """The files that hold it now, relative to the source."""
        return self.weights.files

    @property
    def checksums(self) -> Mapping[Piece, int]:
        """Stretch of its old files -> the CRC-32 that the file has for it."""
        return self.weights.checksums

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors as they are written, each tie once."""
        return sum(source.new.nbytes for source in self.sources.values())


class PlannedState(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One planned optimizer: ``before`` as it is stored, ``state`` as it must be read back, and its
    new files.

    ``data``: key of each ``Data`` in its files -> where its bytes come from.
    """

    label: str
    before: OptimizerState
    state: OptimizerState
    files: tuple[OutputFile, ...]
    data: Mapping[str, Source]

    @property
    def old_files(self) -> tuple[PurePosixPath, ...]:
        """The files that hold it now, relative to the source."""
        return self.before.files

    @property
    def checksums(self) -> Mapping[Piece, int]:
        """Stretch of its old files -> the CRC-32 that the file has for it."""
        return self.before.checksums


class PlannedExtra(Struct, frozen=True, kw_only=True, eq=False):
    """Small new files without tensors. ``old_files``: one that they are like, relative to the
    source.
    """

    files: tuple[OutputFile, ...]
    old_files: tuple[PurePosixPath, ...]
    data: Mapping[str, Source] = field(default_factory=dict)
    checksums: Mapping[Piece, int] = field(default_factory=dict)


Planned = PlannedModel | PlannedState | PlannedExtra
"""A part of a new checkpoint that is written anew."""


class MigrationPlan(Struct, frozen=True, kw_only=True, eq=False):
    """Plan of a migration. ``carried``: files that are copied unchanged, relative to the source's
    folder.

    ``rewritten``: files that are copied with changes, so that they describe the new weights.
    ``empty``: empty folders, which are made again. ``is_file``: the new checkpoint is one file.
    ``removed``: files at the output that go away, relative to it. ``states``: the optimizers that
    are written anew, of ``--state all``; ``extras``: what belongs to no model and no optimizer.
    ``processes``: that will load it. ``warnings``: what is otherwise than the run that saved it had
    it, in words. ``not_checked``: what nothing in the source shows, in words. ``may_lack_keys``:
    readers look for the second key of tied weights, and nothing shows whether there are any.
    """

    source: StoredCheckpoint
    path: AnyPath
    output: Path
    options: Options
    is_file: bool
    models: tuple[PlannedModel, ...]
    carried: tuple[PurePosixPath, ...]
    left_out: tuple[LeftOut, ...]
    rewritten: tuple[OutputFile, ...] = ()
    empty: tuple[PurePosixPath, ...] = ()
    removed: tuple[str, ...] = ()
    states: tuple[PlannedState, ...] = ()
    extras: tuple[PlannedExtra, ...] = ()
    processes: int | None = None
    warnings: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    may_lack_keys: bool = False

    @property
    def planned(self) -> tuple[Planned, ...]:
        """All that is written anew: the models, then the optimizers, then the rest."""
        return (*self.models, *self.states, *self.extras)

    @property
    def old_state_files(self) -> tuple[PurePosixPath, ...]:
        """The files that new optimizers and ``extras`` are made of, relative to the source, each
        once.
        """
        every = [one.old_files for one in self.states] + [one.old_files for one in self.extras]
        return tuple(dict.fromkeys(file for files in every for file in files))

    @property
    def bytes_to_write(self) -> int:
        """The size of all new files and of all copies."""
        new = sum(file.size for one in self.planned for file in one.files)
        new += sum(file.size for file in self.rewritten)
        return new + sum(stat_of(self.source.root / path).st_size for path in self.carried)


def make_plan(
    source: StoredCheckpoint, path: AnyPath, output: Path, options: Options
) -> MigrationPlan:
    """Plan a migration; reads only the sizes of files.

    Raises UsageError for options that do not fit the source, OperationError for what the new format
    cannot hold.
    """
    is_file = becomes_file(source, output, options.to)
    configs = {home: read_config(source, home) for home in {one.home for one in source.weights}}
    known = {home: library_stem(source, home, config) for home, config in configs.items()}
    models = tuple(
        planned_model(
            weights,
            stem,
            options,
            configs[weights.home],
            _most(source, weights, options, is_file=is_file),
            output.suffix if is_file else "",
        )
        for weights, stem in zip(
            source.weights, stems(source, options.to, output, known, is_file=is_file), strict=True
        )
    )
    new = [file.path for model in models for file in model.files]
    if doubled := [path for path, count in Counter(new).items() if count > 1]:
        raise UsageError(
            f"two models would both become {doubled[0]}; name one of them instead of the folder"
        )
    others = other_files(source, frozenset(new))
    rewritten = {
        home / NAME: data
        for home, config in configs.items()
        if options.dtype is not None
        and (data := config.with_dtype(options.dtype)) != config.data
        and home / NAME in others.carried
    }
    return MigrationPlan(
        source=source,
        path=path,
        output=output,
        options=options,
        is_file=is_file,
        models=models,
        carried=tuple(path for path in others.carried if path not in rewritten),
        rewritten=tuple(
            OutputFile(path=path, parts=(Literal(data),)) for path, data in rewritten.items()
        ),
        empty=others.empty,
        left_out=(
            *_not_weights(source.weights),
            *lost_variants(models),
            *_words(models, options.to),
            *others.left_out,
        ),
        may_lack_keys=any(
            not weights.ties
            and looks_for_all_keys(source, weights, options.to, configs[weights.home])
            for weights in source.weights
        ),
    )


def looks_for_all_keys(
    source: StoredCheckpoint, weights: Weights, to: Format, config: Config
) -> bool:
    """Return whether readers of the new format look for keys that a safetensors file may lack.

    ``save_state`` and ``save_pretrained`` leave out tied keys and record nothing; readers of
    ``.bin`` files of the latter tie again.
    """
    if to is Format.SAFETENSORS or weights.format is not Format.SAFETENSORS:
        return False
    is_of_save_state = source.is_save_state and not weights.home.parts
    return is_of_save_state or (to is Format.DCP and bool(config.data))


def _most(
    source: StoredCheckpoint, weights: Weights, options: Options, *, is_file: bool
) -> int | None:
    """Return the most bytes that a file of a model may hold. Raises UsageError where it must be one
    file.
    """
    why = why_one_file(source, weights)
    if options.most is None:
        return None if why or is_file else DEFAULT_SHARD_SIZE
    if options.to is Format.DCP:
        why = ""
    if not why and is_file:
        why = "the output is a single file; name a folder"
    if why:
        raise UsageError(f"--max-shard-size: {why}")
    return options.most


def planned_model(
    weights: Weights, stem: str, options: Options, config: Config, most: int | None, suffix: str
) -> PlannedModel:
    """Plan one model. ``stem``: the new name without suffix; ``most``: bytes of tensors a file
    takes.

    Raises OperationError for what the new format cannot hold, UsageError for options that do not
    fit.
    """
    if weights.unread:
        raise _not_carried(weights)
    if weights.nested:
        raise OperationError(
            f"{weights.label}: {list_names(weights.nested)}: nested dicts of tensors, which the "
            "new model cannot store next to its own tensors; next: load the file with torch, and "
            "save only the model's state dict"
        )
    if weights.opaque and not options.drop_opaque:
        raise OperationError(
            f"{weights.label}: {list_names(weights.opaque)}: pickled objects, not plain tensors; "
            "to copy them would run the pickle; to leave them out: --drop-opaque"
        )
    if options.dtype is not None:
        _ensure_no_codes(weights, config)
    new = renamed(weights, options.keys)
    if config.ties_nothing and options.to is Format.SAFETENSORS:
        new = _with_copies(new)
    sources = {
        tensor.fqn: source_of(tensor, options.dtype, weights.label) for tensor in new.tensors
    }
    if len(sources) != len(new.tensors):
        raise OperationError(f"{weights.label}: a key occurs more than once")
    if (nbytes := sum(source.new.nbytes for source in sources.values())) > _MOST_BYTES:
        raise OperationError(
            f"{weights.label}: its tensors add up to {nbytes} bytes, more than any file can hold"
        )
    try:
        files = _files(
            options.to, stem, [source.new for source in sources.values()], new, most, suffix
        )
    except UnsupportedFormat as error:
        raise OperationError(f"{weights.label}: {error}") from error
    files = tuple(replace(file, path=weights.home / file.path) for file in files)
    return PlannedModel(
        label=weights.label, before=weights, weights=new, files=files, sources=sources
    )


def _not_carried(weights: Weights) -> OperationError:
    """Return the error about tensors that only torch can store: without them, weights would be
    lost.
    """
    kind = next(iter(weights.unread.values()))
    names = [name for name, other in weights.unread.items() if other == kind]
    more = len(weights.unread) - len(names)
    also = f" (and {count_of(more, 'tensor')} of other kinds)" if more else ""
    remedy = next((remedy for word, remedy in _MADE_PLAIN.items() if word in kind), _TO_PLAIN)
    return OperationError(
        f"{weights.label}: {list_names(names)}: {kind}, which only torch can store{also}; next: "
        f"load the file with torch, {remedy}, and save it again"
    )


def _with_copies(weights: Weights) -> Weights:
    """Return weights whose ties are separate tensors, for a reader that looks for every key."""
    held = {tensor.fqn: tensor for tensor in weights.tensors}
    copies = tuple(held[kept]._replace(fqn=name) for name, kept in weights.ties.items())
    return replace(weights, tensors=(*weights.tensors, *copies), ties={})


def _ensure_no_codes(weights: Weights, config: Config) -> None:
    """Raise OperationError for 8-bit weights that need their scales, which no conversion
    applies.
    """
    coded = next((tensor for tensor in weights.tensors if tensor.dtype.startswith("F8_")), None)
    scale = next((tensor.fqn for tensor in weights.tensors if _SCALE.search(tensor.fqn)), None)
    if coded is not None and (scale is not None or config.is_quantized):
        why = (
            f"{scale!r} looks like a scale"
            if scale is not None
            else f"{NAME} has a quantization_config"
        )
        raise OperationError(
            f"{weights.label}: {coded.fqn!r} has dtype {coded.dtype}, and {why}: the numbers are "
            "quantized codes, which --dtype would convert without their scales; leave --dtype out"
        )


def source_of(tensor: StoredTensor, dtype: str | None, label: str) -> Source:
    """Return the source of the bytes of a new tensor.

    ``dtype``: the new one of floating point tensors, None leaves all as they are. Raises
    OperationError for one that is not converted.
    """
    if dtype is not None and tensor.dtype in PACKED:
        raise OperationError(
            f"{label}: {tensor.fqn!r} has dtype {tensor.dtype}, which ckptfix does not convert; "
            "leave --dtype out"
        )
    if dtype in (None, tensor.dtype) or tensor.dtype not in CONVERTIBLE:
        return Source(NewTensor(tensor.fqn, tensor.dtype, tensor.shape, tensor.nbytes), tensor)
    assert dtype is not None
    from ckptfix.tensors.numbers import Counting  # numpy takes 0.1 s

    nbytes = prod(tensor.shape) * DTYPE_BITS[dtype] // 8
    new = NewTensor(tensor.fqn, dtype, tensor.shape, nbytes)
    return Source(new, tensor, Counting(tensor.dtype, dtype))


def as_in_one_file(weights: Weights, dtype: str | None) -> Weights:
    """Return the weights of safetensors files in the order of one such file in the new dtypes.

    Shards, or several dtypes, would look like a model's order on the way back.
    """
    if weights.format is not Format.SAFETENSORS:
        return weights

    def place(tensor: StoredTensor) -> tuple[int, str]:
        return safetensors_place(source_of(tensor, dtype, weights.label).new)

    return replace(weights, tensors=tuple(sorted(weights.tensors, key=place)))


def _files(
    to: Format,
    stem: str,
    tensors: Sequence[NewTensor],
    weights: Weights,
    most: int | None,
    suffix: str,
) -> tuple[OutputFile, ...]:
    if to is Format.SAFETENSORS:
        return safetensors_files(
            stem,
            tensors,
            weights.ties,
            most=most,
            metadata=weights.metadata,
            index_words=weights.index_words,
        )
    if to is Format.TORCH:
        return torch_files(
            stem,
            tensors,
            weights.ties,
            most=most,
            versions=weights.versions,
            suffix=suffix or ".bin",
            index_words=weights.index_words,
        )
    return dcp_files(PurePosixPath(stem), tensors, weights.ties, most=most)


def _not_weights(all_weights: Sequence[Weights]) -> list[LeftOut]:
    """Return the contents of the models' files that are not weights."""
    left = []
    for files, names in {one.files: one.left for one in all_weights}.items():
        if names:
            left.append(LeftOut(f"{files[0]}: {list_names(names)}", "not weights of a model"))
    left += (
        LeftOut(
            f"{one.label}: {list_names(one.opaque)}",
            "pickled objects, left out because of --drop-opaque",
        )
        for one in all_weights
        if one.opaque
    )
    return left


def lost_variants(models: Sequence[PlannedModel]) -> Iterator[LeftOut]:
    """Yield the variants that the names of the new files lack: Accelerate's names have none."""
    for model in models:
        name = name_of(model.before)
        variant = name.model.variant if name is not None and name.model is not None else ""
        if variant and not any(variant in file.path.name.split(".") for file in model.files):
            yield LeftOut(
                f"{model.label}: variant {variant!r}",
                f"the new file names cannot contain it; after converting back, add .{variant} to "
                f"the name, or from_pretrained(variant={variant!r}) does not find the model",
            )


def _words(models: Sequence[PlannedModel], to: Format) -> Iterator[LeftOut]:
    """Yield the metadata of headers and indexes that the new files lack, except "format", which
    names the old one.
    """
    for model in models:
        label, weights = model.label, model.weights
        if weights.views:
            yield LeftOut(
                f"{label}: {list_names(weights.views)}",
                "their shared storage: each tensor gets its own, with the same bytes",
            )
        if weights.disputed:
            yield LeftOut(
                f"{label}: {list_names(weights.disputed)}",
                "metadata that differs from shard to shard",
            )
        if to is Format.SAFETENSORS:
            words = unwritable(weights.metadata, weights.ties, model.sources)
            why = "metadata that would be read as the key of a tied tensor"
        else:
            words = weights.metadata.keys() - {"format"}
            why = "metadata, which only safetensors files can store"
        if words:
            yield LeftOut(f"{label}: {list_names(sorted(words))}", why)
        if not any(file.path.suffix == ".json" for file in model.files):
            metadata = weights.index_words.get("metadata")
            said = {
                *weights.index_words,
                *(metadata if isinstance(metadata, Mapping) else ()),
            } - _OF_INDEXES
            if said:
                yield LeftOut(
                    f"{label}: {list_names(sorted(said))}",
                    "other entries of the index: the new model has no index",
                )

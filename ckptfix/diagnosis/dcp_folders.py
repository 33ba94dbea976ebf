"""Damage in DCP folders: missing files, equal models, damaged items, and keys that do not belong
together.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec.structs import asdict

from ckptfix.checkpoint.dcp import (
    METADATA_UNFINISHED,
    OPTIMIZER_STATE,
    DcpFolder,
    is_metadata_renamed,
    rank_of,
)
from ckptfix.checkpoint.folder import Component, NameScope
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    PRIVATE_WRAPPERS,
    KeyMap,
    collapse,
    inner_wrappers,
    is_flat_name,
    is_nested,
    prepared,
)
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.file_damage import LeftRecord, problem_finding
from ckptfix.diagnosis.findings.base import Finding, Unreadable, as_kind
from ckptfix.diagnosis.findings.damaged import (
    CrcMismatch,
    MalformedFile,
    NotATensorFile,
    TruncatedFile,
    UncheckedFile,
    UnsafePickle,
)
from ckptfix.diagnosis.findings.duplicates import (
    NestedPrefix,
    OwnModules,
    UndecidedPrefix,
    WrapperPrefix,
)
from ckptfix.diagnosis.findings.incomplete import (
    FlatParameters,
    IncompleteTensor,
    MismatchedNames,
    MissingRank,
    UndecidedNames,
)
from ckptfix.diagnosis.findings.interrupted import InterruptedSave
from ckptfix.diagnosis.findings.sharded import MissingShard, StrayShard
from ckptfix.diagnosis.wrapped_keys import STATE_DICT, nested_evidence
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_items import PARAMS_KEY, ItemCheck, dcp_problems
from ckptfix.formats.dcp_metadata import GROUPS_KEY, DcpMetadata
from ckptfix.formats.dcp_stream import Chunk, StoredItem
from ckptfix.formats.safetensors_file import looks_like_safetensors
from ckptfix.formats.sniff import describe_content
from ckptfix.formats.torch_zip import crc_mismatches, read_zip, records_with_crc
from ckptfix.storage.executor import each
from ckptfix.storage.files import AnyPath, FileReader, absolute
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import unreadable
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of, list_names


def diagnose_dcp_folders(case: Case) -> list[Finding]:
    """Find mismatched keys and damaged files in the DCP folders of a checkpoint."""
    states = case.sharded
    # accelerate prepares no FSDP model a second time, and torch takes the wrappers of FSDP and of
    # DistributedDataParallel off its keys (accelerate 1.0 to 1.15, torch 2.13): the rest are
    # modules of the script.
    is_of_fsdp = parse_folder_name(absolute(case.folder.root).name) is not None
    of_fsdp = {
        state.metadata_path
        for state in states
        if state.name or (is_of_fsdp and not state.path.parts)
    }
    wrapped = _wrapped(states, case.folder.processes or _processes(states))
    return [
        *(
            (
                as_kind(OwnModules, one)
                if isinstance(one, UndecidedPrefix) and one.assumed and one.path in of_fsdp
                else one
            )
            for one in wrapped
        ),
        *_files(case.folder.root, states),
    ]


def _files(root: AnyPath, states: Iterable[DcpFolder]) -> list[Finding]:
    """Find the damaged files of each folder: missing, short, truncated or hostile ones."""
    findings: list[Finding] = []
    for state in states:
        findings += [UnsafePickle(path=path, globals=names) for path, names in state.unsafe.items()]
        findings += [MalformedFile(path=path, detail=why) for path, why in state.broken.items()]
        if state.problem is not None:
            findings += problem_finding(state.metadata_path, state.problem)
        elif state.metadata is None:
            findings += _interrupted(root, state)
        else:
            findings += _stored(state, state.metadata)
    return findings


def _interrupted(root: AnyPath, state: DcpFolder) -> list[Finding]:
    if state.own_ranks:
        return []
    ranks = {rank for path in state.data if (rank := rank_of(path)) is not None}
    finding = InterruptedSave(
        path=state.metadata_path,
        files=len(state.data),
        unfinished=state.path / METADATA_UNFINISHED in state.files,
        renamed=is_metadata_renamed(root / state.path),
        over_another=False,
        ranks=tuple(sorted(ranks)),
    )
    return [finding]


def _stored(state: DcpFolder, metadata: DcpMetadata) -> Iterator[Finding]:
    items = {state.path / path: held for path, held in metadata.items_by_file().items()}
    yield from _missing(state, items)
    for path, held in items.items():
        file = state.files.get(path)
        cut = [item for item in held if file is not None and item.offset + item.length > file.size]
        if file is not None and cut:
            need = max(item.offset + item.length for item in cut)
            names = list_names(dict.fromkeys(item.fqn for item in cut))
            detail = (
                f"{count_of(file.size, 'byte')} (expected {need}, as .metadata lists); "
                f"{count_of(len(cut), 'item')} cut off: {names}"
            )
            yield TruncatedFile(path=path, have=file.size, need=need, detail=detail)
        unknown = {
            name: item.fqn
            for item in held
            for name in item.transforms
            if name.partition("/")[0] not in _EXTENSIONS
        }
        for name, fqn in unknown.items():
            detail = (
                f"item {fqn!r:.200} was saved through {name!r:.80}, an extension that torch does "
                "not have"
            )
            yield UncheckedFile(path=path, detail=detail)
    for problem in dcp_problems(metadata):
        yield IncompleteTensor(path=state.metadata_path, tensor=problem.fqn, detail=problem.message)
    yield from (StrayShard(path=path) for path in state.data if path not in items)
    unfinished = state.path / METADATA_UNFINISHED
    if unfinished in state.files:
        yield InterruptedSave(
            path=unfinished, files=len(state.data), unfinished=True, over_another=True, ranks=()
        )


def _missing(state: DcpFolder, items: dict[PurePosixPath, list[StoredItem]]) -> Iterator[Finding]:
    """Yield a finding for each rank without any file, and for each other missing file."""
    tensors = {item.fqn for held in items.values() for item in held if item.offsets is not None}
    of_rank: dict[int | PurePosixPath, list[PurePosixPath]] = {}
    for path in items:
        rank = rank_of(path)
        of_rank.setdefault(path if rank is None else rank, []).append(path)
    for key, paths in of_rank.items():
        absent = [path for path in paths if path not in state.files]
        if isinstance(key, int) and len(absent) == len(paths):
            held = [item for path in absent for item in items[path]]
            names = tuple(dict.fromkeys(item.fqn for item in held))
            elsewhere = len(tensors) - len({item.fqn for item in held if item.offsets is not None})
            yield MissingRank(
                path=absent[0],
                rank=key,
                files=len(absent),
                items=len(held),
                holds=names,
                elsewhere=elsewhere,
            )
            continue
        for path in absent:
            names = tuple(dict.fromkeys(item.fqn for item in items[path]))
            yield MissingShard(
                path=path, named_by=str(state.metadata_path), tensors=len(names), holds=names
            )


_EXTENSIONS = ("stream.zstd",)
"""Extensions that torch registers itself (``distributed/checkpoint/_extension.py`` of 2.13)."""

_ZIP = b"PK\3\4"
_HEAD = 9  # the mark of safetensors: a length of 8 bytes, and a brace after it


_REFUSED = "refused"
"""Beginning of the result of a file that could not be read."""

_LEFT = "left"
"""Beginning of the result about a record whose CRC the caller compares."""


def diagnose_items(case: Case) -> Iterator[Finding | Unreadable]:
    """Find the files whose items are not tensors, and with ``data`` those with a changed byte.

    A tensor begins as a zip archive of ``torch.save``, or as safetensors. All of an item but the
    numbers of its tensor is read, with ``data`` all bytes; of an object in a store the first bytes
    alone.

    ``diagnose_dcp_folders`` reports truncated and missing files.
    """
    root, data, left = case.folder.root, case.data, case.left
    files = [
        (state, path, items)
        for state in case.sharded
        for path, items in _by_file(state).items()
        if path not in state.broken and path not in state.unreadable
    ]

    check = ItemCheck()

    def work(number: int, progress: Progress | None) -> list[list[Any]]:
        state, path, items = files[number]
        try:
            with open_reader(root / path) as reader:
                records: list[list[int]] | None = None if left is None else []
                chunks = _chunks(state)
                results = [
                    _packed(one)
                    for one in _of_file(reader, path, items, chunks, check, data, records, progress)
                ]
                return [*results, *([_LEFT, *one] for one in records or ())]
        except OSError as error:
            return [[_REFUSED, unreadable(root / path, error)]]

    if data:
        # Another .metadata asks for other bytes of the same file: it is a part of each unit.
        units = [
            (root / path, root / state.metadata_path, sum(item.length for item in items))
            for state, path, items in files
        ]
        what = "items" if left is None else "records of items"
        found = each(
            case.executor,
            what,
            units,
            work,
            case.progress,
            is_final=lambda results: not _is_refused(results),
        )
    else:  # a few bytes of each item: every process of a team reads them
        found = [work(number, case.progress) for number in range(len(files))]
    for (_, path, _), results in zip(files, found, strict=True):
        for code, *facts in results:
            if code == _REFUSED:
                yield Unreadable(f"{path}: {facts[0]}")
            elif code == _LEFT:
                assert left is not None
                left.append(LeftRecord(root / path, *facts))
            else:
                yield _unpacked(path, code, facts)


def _is_refused(results: Sequence[Sequence[Any]]) -> bool:
    """Return whether a file could not be read, which another run may be able to."""
    return any(code == _REFUSED for code, *_ in results)


def _packed(finding: Finding) -> list[Any]:
    """Return a finding about items as JSON values, without its path."""
    facts = [value for name, value in asdict(finding).items() if name != "path"]
    return [finding.code, *facts]


def _unpacked(path: PurePosixPath, code: str, facts: Sequence[Any]) -> Finding:
    if code == CrcMismatch.code:
        return CrcMismatch(path=path, record=facts[0], tensors=tuple(facts[1]))
    if code == MalformedFile.code:
        return MalformedFile(path=path, detail=facts[0])
    return NotATensorFile(path=path, content=facts[0])


_Chunks = Mapping[tuple[str, tuple[int, ...] | None], tuple[Chunk, str | None]]
"""Name and first index of a part of a tensor -> the part, and the dtype of the tensor."""


def _chunks(state: DcpFolder) -> _Chunks:
    tensors = state.metadata.tensors if state.metadata is not None else ()
    return {
        (tensor.fqn, chunk.offsets): (chunk, tensor.dtype)
        for tensor in tensors
        for chunk in tensor.chunks
    }


def _by_file(state: DcpFolder) -> Mapping[PurePosixPath, list[StoredItem]]:
    """Return the items in each existing file, by offset."""
    found: dict[PurePosixPath, list[StoredItem]] = {}
    by_file = state.metadata.items_by_file() if state.metadata is not None else {}
    for name, items in by_file.items():
        path = state.path / name
        file = state.files.get(path)
        size = -1 if file is None else file.size
        held = [item for item in items if item.offset + item.length <= size and not item.transforms]
        if held:
            found[path] = sorted(held, key=lambda item: item.offset)
    return found


def _of_file(
    reader: FileReader, path: PurePosixPath, items: list[StoredItem], chunks: _Chunks,
    check: ItemCheck, data: bool, records: list[list[int]] | None, progress: Progress | None,
) -> Iterator[Finding]:  # fmt: skip
    begins: dict[int, bytes] = {}
    for item in items:
        if item.offset not in begins and (data or item.offsets is not None):
            begins[item.offset] = reader.read(item.offset, min(_HEAD, reader.size - item.offset))
    tensors = [item for item in items if item.offsets is not None]
    bad = [item for item in tensors if not _begins_as_one(begins[item.offset])]
    if bad:
        yield _no_tensors(reader, path, tensors, bad)
        return
    # All tensors of one safetensors file have its offset.
    alone = [item for item in items if not looks_like_safetensors(begins.get(item.offset, b""))]
    for item, following in pairwise(alone):
        # `migrate` writes tied weights once, and lists them under each key.
        is_tie = None not in (item.offsets, following.offsets) and (item.offset, item.length) == (
            following.offset,
            following.length,
        )
        if following.offset < item.offset + item.length and not is_tie:
            detail = (
                f"items {item.fqn!r:.200} and {following.fqn!r:.200} overlap at byte "
                f"{following.offset}"
            )
            yield MalformedFile(path=path, detail=detail)
            return
    if reader.fd >= 0:
        wrong = [
            (item, problem)
            for item in items
            if item.offsets is None or begins[item.offset].startswith(_ZIP)
            for problem in (
                check.problem(reader, item, *chunks.get((item.fqn, item.offsets), (None, None))),
            )
            if problem is not None and not (data and problem.record)  # all CRCs follow
        ]
        if wrong:
            item, problem = wrong[0]
            if problem.record:
                yield CrcMismatch(path=path, record=problem.record, tensors=(item.fqn,))
                return
            others = f"; {count_of(len(wrong) - 1, 'other item')} too" if len(wrong) > 1 else ""
            detail = f"item {item.fqn!r:.200} at byte {item.offset}: {problem.detail}{others}"
            yield MalformedFile(path=path, detail=detail)
            return
    else:  # each item would cost a request or two
        reader.leaves_out(len(items))
    if data:
        yield from _changed(reader, path, items, begins, records, progress)


def _begins_as_one(head: bytes) -> bool:
    return head.startswith(_ZIP) or looks_like_safetensors(head)


def _no_tensors(
    reader: FileReader, path: PurePosixPath, items: list[StoredItem], bad: list[StoredItem]
) -> Finding:
    words = describe_content(reader, json=True)
    if len(bad) == len(items) and words is not None and words != "a zip archive":
        return NotATensorFile(path=path, content=words)
    names = list_names(dict.fromkeys(item.fqn for item in bad))
    detail = (
        f"{len(bad)} of {count_of(len(items), 'tensor item')} "
        f"{'does' if len(bad) == 1 else 'do'} not start like anything that torch writes (first at "
        f"byte {bad[0].offset}): {names}"
    )
    return MalformedFile(path=path, detail=detail)


def _changed(
    reader: FileReader,
    path: PurePosixPath,
    items: list[StoredItem],
    begins: Mapping[int, bytes],
    records: list[list[int]] | None,
    progress: Progress | None,
) -> Iterator[Finding]:
    """Check the CRC of every record of every item. Bytes that several items claim are read once.

    ``records``: list the records there, by offset, size and CRC, instead of reading them.
    """
    end = 0
    for item in items:
        if not begins[item.offset].startswith(_ZIP) or item.offset < end:
            continue
        end = item.offset + item.length
        window = reader.window(item.offset, item.length)
        try:
            archive = read_zip(window)
        except FormatError as error:
            detail = f"item {item.fqn!r:.200} at byte {item.offset}: {error}"
            yield MalformedFile(path=path, detail=detail)
            continue
        if records is not None:
            records += (
                [item.offset + one.data_offset, one.size, one.crc]
                for one in records_with_crc(archive)
            )
            continue
        for record in crc_mismatches(archive, window, every_record=True, progress=progress):
            yield CrcMismatch(path=path, record=record.name, tensors=(item.fqn,))


_NO_WRAPPER_HERE = "the optimizer has these keys without a wrapper"
"""The evidence for a repair to keys without any wrapper."""


class _Place(NamedTuple):
    """A place of names in one of the folders; each instance is distinct."""

    state: DcpFolder
    scope: NameScope


def _wrapped(states: Iterable[DcpFolder], processes: int | None) -> list[Finding]:
    """Find nested, single and mismatched wrappers.

    ``processes``: those of the run, if known. A model and the optimizer of the same number are
    judged together: loaded together, they must have the same keys. An optimizer has keys twice, in
    its state and in the lists of its parameter groups.
    """
    units: dict[object, list[_Place]] = {}
    findings: list[Finding] = []
    for state in states:
        flat = tuple(name for scope in state.scopes for name in scope.names if is_flat_name(name))
        if flat:
            findings.append(
                FlatParameters(path=state.metadata_path, tensors=tuple(dict.fromkeys(flat)))
            )
        units.setdefault(unit_of(state), []).extend(
            _Place(state, scope) for scope in state.scopes if scope.names
        )
    judged = [(_reference(unit), unit) for unit in units.values() if unit]
    evident = _evident([place for unit in units.values() for place in unit], processes)
    for reference, unit in judged:
        owners = _own_models(unit, [place for place in unit if place.scope.kind == STATE_DICT])
        optimizers = [
            place for place in unit if place.scope.kind != STATE_DICT and place.scope.chain
        ]
        if any(_is_own_doing(place, reference) and place not in owners for place in optimizers):
            own = frozenset(unit)
            evident = {place: words for place, words in evident.items() if place not in own}
    # All get the same keys: renamed differently, equal models would look like copies afterwards.
    nested = [(reference, unit) for reference, unit in judged if is_nested(reference.scope.chain)]
    to_bare = bool(nested) and all(_has_bare(reference, unit) for reference, unit in nested)
    for reference, unit in judged:
        findings += _judge(reference, unit, to_bare, evident)
    if any(_is_renamed_in_part(unit) for unit in units.values()):
        return findings
    # Without it, nothing distinguishes a second wrapper from a module of the model that is called
    # 'module'.
    kinds: dict[type[Finding], type[Finding]] = {
        NestedPrefix: UndecidedPrefix,
        MismatchedNames: UndecidedNames,
    }
    return [as_kind(kinds[type(one)], one) if type(one) in kinds else one for one in findings]


def _processes(states: Iterable[DcpFolder]) -> int | None:
    """Return the number of processes by the names of the data files, None for one: rank 0 can write
    for all.
    """
    highest = max((rank_of(path) or 0 for state in states for path in state.data), default=0)
    return highest + 1 if highest else None


def _is_renamed_in_part(unit: list[_Place]) -> bool:
    """Return whether an optimizer has other keys in its state than in its groups, but for their
    wrappers.

    Torch writes the same keys into both, and the groups are pickled: an edit of ``.metadata``
    reaches the state alone. So no script reads what is there.
    """
    kept: dict[tuple[PurePosixPath, tuple[str, ...]], list[_Place]] = {}
    listed: dict[tuple[PurePosixPath, tuple[str, ...]], list[_Place]] = {}
    for place in unit:
        path = place.scope.path
        if place.scope.kind == OPTIMIZER_STATE:
            kept.setdefault((place.state.path, path[:-1]), []).append(place)
        elif place.scope.kind == PARAMS_KEY and GROUPS_KEY in path:
            listed.setdefault((place.state.path, path[: path.index(GROUPS_KEY)]), []).append(place)
    for optimizer, groups in listed.items():
        in_groups = {name for place in groups for name in place.scope.names}
        without_wrapper = {name for place in groups for name in _unwrapped(place)}
        for place in kept.get(optimizer, ()):
            is_apart = in_groups.isdisjoint(place.scope.names)
            if is_apart and not without_wrapper.isdisjoint(_unwrapped(place)):
                return True
    return False


def _evident(places: Iterable[_Place], processes: int | None) -> Mapping[_Place, str]:
    """Return the places whose nested wrappers are damage, each with the evidence.

    One process alone wraps nothing: the wrappers are modules of the script's own. The same holds
    for an average of the prepared model, next to a model with the same names in fewer wrappers. In
    one folder the average follows its model.
    """
    evidence = nested_evidence(processes)
    fewest: dict[frozenset[str], int] = {}  # wrappers in other folders
    every = list(places)
    for place in every:
        if place.scope.kind == STATE_DICT and place.scope.is_model:
            names, wrappers = _unwrapped(place), len(prepared(place.scope.chain))
            fewest[names] = min(wrappers, fewest.get(names, wrappers))
    found = {}
    before: dict[
        tuple[PurePosixPath, frozenset[str]], int
    ] = {}  # wrappers of earlier ones in the same folder
    for place in every if evidence else ():
        wrappers, names = len(prepared(place.scope.chain)), _unwrapped(place)
        earlier = before.get((place.state.path, names), wrappers)
        if (
            is_nested(place.scope.chain)
            and not (place.scope.is_model and fewest[names] < wrappers)
            and earlier >= wrappers
        ):
            found[place] = evidence
        if place.scope.kind == STATE_DICT:
            before[place.state.path, names] = min(earlier, wrappers)
    return found


def unit_of(state: DcpFolder) -> Hashable:
    """Return the common identity of a model and its optimizer, which are loaded together."""
    return state.path if state.name is None else state.name.index


def is_flat(state: DcpFolder | Component) -> bool:
    """Return whether names of FSDP's flattened parameters are in a folder or a file."""
    return any(is_flat_name(name) for scope in state.scopes for name in scope.names)


def _reference(unit: list[_Place]) -> _Place:
    """Return the place that the others are compared with: the model's, else the first of an
    optimizer.
    """
    return next((place for place in unit if place.scope.is_model), unit[0])


def _has_bare(reference: _Place, unit: list[_Place]) -> bool:
    known = _unwrapped(reference)
    return any(
        place.scope.kind != STATE_DICT
        and not place.scope.chain
        and known.issuperset(place.scope.names)
        for place in unit
    )


def unwrapped_names(scope: NameScope) -> Iterator[str]:
    """Yield the names of a place without the wrappers that all of them begin with."""
    return map(KeyMap(remove=scope.chain), scope.names)


def _unwrapped(place: _Place) -> frozenset[str]:
    return frozenset(unwrapped_names(place.scope))


def _own_models(unit: list[_Place], models: Iterable[_Place]) -> Mapping[_Place, _Place]:
    """Return for each optimizer the first of these models that has all of its keys, if any."""
    optimizers = [place for place in unit if place.scope.kind != STATE_DICT]
    first_names = {place.scope.names[0] for place in optimizers}
    # Only these can have them: 5,000 models and as many optimizers were compared 25 million times.
    candidates: dict[str, list[tuple[_Place, frozenset[str]]]] = {}
    for model in models:
        names = frozenset(model.scope.names)
        for name in first_names & names:
            candidates.setdefault(name, []).append((model, names))
    owners: dict[_Place, _Place] = {}
    for place in optimizers:
        for model, names in candidates.get(place.scope.names[0], ()):
            if names.issuperset(place.scope.names):
                owners[place] = model
                break
    return owners


def _judge(
    first: _Place, unit: list[_Place], to_bare: bool, evident: Mapping[_Place, str]
) -> Iterator[Finding]:
    models = [
        first,
        *(place for place in unit if place is not first and place.scope.kind == STATE_DICT),
    ]
    names = {id(model): _unwrapped(model) for model in models}
    owners = _own_models(unit, models)
    for place in unit:
        reference = owners.get(place, first)
        chain, known = reference.scope.chain, names[id(reference)]
        target = chain
        if reference in evident or (is_nested(chain) and to_bare):
            is_alike = reference is first or names[id(first)] >= known
            target = () if to_bare and is_alike else collapse(chain)
        path, scope = place.state.metadata_path, place.scope
        belongs = _unwrapped(place) <= known  # the optimizer is that model's
        # Else a model of its own, an average.
        is_follower = place is reference or scope.kind != STATE_DICT
        judge = reference if belongs and is_follower else place
        if (
            belongs
            and is_follower
            and _public(scope.chain) != _public(chain)
            and not _is_own_doing(place, reference)
        ):
            yield MismatchedNames(
                path=path,
                scope=str(scope),
                chain=scope.chain,
                target=target,
                reference=(
                    str(reference.state.metadata_path)
                    if reference.state is not place.state
                    else str(reference.scope)
                ),
                expected=chain,
                names=len(scope.names),
            )
        elif is_nested(scope.chain) and (to_bare or judge in evident):
            yield NestedPrefix(
                path=path,
                scope=str(scope),
                chain=scope.chain,
                target=target if belongs and (is_follower or to_bare) else collapse(scope.chain),
                names=len(scope.names),
                evidence=_NO_WRAPPER_HERE if to_bare else evident[judge],
                assumed=not to_bare,
            )
        elif scope.kind == STATE_DICT and (scope.chain or inner_wrappers(scope.names)):
            yield WrapperPrefix(
                path=path, scope=str(scope), chain=scope.chain, names=len(scope.names)
            )


def _is_own_doing(place: _Place, reference: _Place) -> bool:
    """Return whether a custom script may have saved names with this difference, and reads them
    again.

    ``get_optimizer_state_dict`` takes the ``module.`` of DistributedDataParallel off,
    ``state_dict()`` does not. A ``module.`` that it leaves is a module of the model. Accelerate
    saves the model and the optimizer by functions that agree, and the model under the key
    ``model``: without it only the folder has Accelerate's name.
    """
    is_of_accelerate = reference.state.name is not None and reference.scope.path[:1] == ("model",)
    return not is_of_accelerate and reference.scope.chain == (*DDP_CHAIN, *place.scope.chain)


def _public(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Return names without the parts that torch itself removes from an optimizer's names and not
    from a model's.
    """
    return tuple(segment for segment in chain if segment not in PRIVATE_WRAPPERS)

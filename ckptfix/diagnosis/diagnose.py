"""Diagnosis of a scanned folder. Reads tensor bytes only where two entries agree in keys, dtypes
and shapes.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from ckptfix.checkpoint.dcp import (
    DcpFolder,
    is_empty,
    is_of_checkpoint,
    numbered_folders,
    scan_dcp_folders,
)
from ckptfix.checkpoint.deepspeed_files import BESIDE
from ckptfix.checkpoint.downloads import is_of_client
from ckptfix.checkpoint.entries import ModelFiles, group_files
from ckptfix.checkpoint.filenames import TRAINER_STATE, Role
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, ProblemKind, is_unreadable
from ckptfix.checkpoint.load_inputs import (
    adapters_without_config,
    loads_of,
    lora_of_diffusers,
)
from ckptfix.checkpoint.manifest import REPORT, Manifest, usable_manifest
from ckptfix.checkpoint.model_configs import PIPELINE
from ckptfix.checkpoint.neighbours import Neighbours, Siblings
from ckptfix.checkpoint.pairing import Pairing, first_unequal
from ckptfix.checkpoint.second_prepare import Evidence
from ckptfix.checkpoint.trainer_folders import TrainerProgress, trainer_progress
from ckptfix.diagnosis.bundled_optimizers import bundles_of, unchecked_bundles
from ckptfix.diagnosis.completeness import broken_trainer_state, diagnose_save
from ckptfix.diagnosis.dataloaders import unjudged_loaders, unjudged_scalers
from ckptfix.diagnosis.dcp_folders import diagnose_dcp_folders, diagnose_items, unchecked_dcp
from ckptfix.diagnosis.empty_optimizers import (
    diagnose_empty_bundles,
    diagnose_empty_optimizers,
    diagnose_uncounted_steps,
)
from ckptfix.diagnosis.equal_entries import (
    Numbered,
    Verdict,
    diagnose_gaps,
    diagnose_models,
    diagnose_states,
)
from ckptfix.diagnosis.families import diagnose_families
from ckptfix.diagnosis.file_damage import (
    DeepSpeedState,
    diagnose_deepspeed,
    diagnose_files,
    diagnose_parts,
    diagnose_rank_files,
    diagnose_world_ranks,
    unchecked_parts,
    without_deepspeed,
)
from ckptfix.diagnosis.findings.base import Finding, Severity, as_kind
from ckptfix.diagnosis.findings.damaged import (
    CrcMismatch,
    MalformedFile,
    NotATensorFile,
    TrailingBytes,
    TruncatedFile,
    UncheckedFile,
    UnloadablePickle,
    UnsafePickle,
)
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
)
from ckptfix.diagnosis.findings.incomplete import IncompleteTensor, InterruptedSave, MissingRank
from ckptfix.diagnosis.findings.misplaced import UnknownState, WrongState
from ckptfix.diagnosis.findings.sharded import (
    IndexMismatch,
    LeftoverIndex,
    MissingShard,
    SecondFamily,
    StaleFamily,
    UndecidedIndex,
)
from ckptfix.diagnosis.indexes import diagnose_shards
from ckptfix.diagnosis.loads import JUDGED, diagnose_loads
from ckptfix.diagnosis.optimizer_states import diagnose_optimizers
from ckptfix.diagnosis.optimizer_values import diagnose_optimizer_values, trained_steps
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.diagnosis.schedules import (
    diagnose_empty_schedulers,
    diagnose_other_schedules,
    diagnose_progress,
    diagnose_schedules,
)
from ckptfix.diagnosis.wrapped_keys import diagnose_names
from ckptfix.diagnosis.wrong_states import (
    diagnose_keys,
    diagnose_lora,
    diagnose_meta_tensors,
    diagnose_renamed,
    diagnose_wrong_folders,
    diagnose_wrong_states,
    unchecked_weights,
    unread_weights,
)
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.comparing import Digests
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import AnyPath, StorePath, folder_entries, walk
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, command, unreadable
from ckptfix.storage.reading import FileIdentity, unchanged
from ckptfix.wording import count_of, list_names

_MAX_HOPS = 40
"""Limit of the links that Linux follows for one path (path_resolution(7)); more count as a loop."""


def links_below(root: AnyPath) -> Mapping[PurePosixPath, frozenset[PurePosixPath]]:
    """Return every symbolic link below a folder, with the places in the folder that it leads to or
    through.

    The journal is left out, as are folders behind links and those that cannot be listed.
    """
    if isinstance(root, StorePath):
        return {}
    real = os.path.realpath(root)
    found: dict[PurePosixPath, frozenset[PurePosixPath]] = {}
    for current, folders, files in os.walk(root):
        if JOURNAL in folders:
            folders.remove(JOURNAL)
        for name in (*folders, *files):
            full = os.path.join(current, name)
            if os.path.islink(full):
                path = PurePosixPath(os.path.relpath(full, root))
                found[path] = frozenset(_inside(real, _places(full)))
    return found


def _inside(real: str, places: Iterator[str]) -> Iterator[PurePosixPath]:
    for place in places:
        if place.startswith(real.rstrip("/") + "/"):
            yield PurePosixPath(os.path.relpath(place, real))


def _places(link: str) -> Iterator[str]:
    """Yield the place of each further link on the way, and the end of it."""
    here = link
    for _ in range(_MAX_HOPS):
        try:
            target = os.path.join(os.path.dirname(here), os.readlink(here)).rstrip("/")
        except OSError:
            return  # not a link: the end of the way, or a missing file
        folder, name = os.path.split(target)
        is_step = name in ("", ".", "..")
        here = os.path.realpath(target) if is_step else os.path.join(os.path.realpath(folder), name)
        yield here


_OF_CONTENT = (
    MalformedFile, MissingRank, MissingShard, NotATensorFile, TrailingBytes, TruncatedFile,
    UnknownState, WrongState,
)  # fmt: skip
"""Findings that explain a file that is missing, or has another size than it was saved with."""

_OF_HEADERS = (*_OF_CONTENT, CrcMismatch, IncompleteTensor, IndexMismatch, UncheckedFile)
"""Findings after which the headers of a file do not show what it was saved with: nothing is
compared with them.

A note such as ``identical-states`` must not silence another rule.
"""

_OF_RANK_FILES = (*_OF_HEADERS, UnloadablePickle, UnsafePickle)
"""Findings that explain why the files of all ranks cannot be read together."""

_OF_ENTRIES = (
    DoubledModel, IdenticalModels, IdenticalStates, EntryGap, StaleFamily, SecondFamily,
    LeftoverIndex, UndecidedIndex,
)  # fmt: skip
"""Findings whose repair drops or moves a file."""

Verdicts = Mapping[tuple[PurePosixPath, PurePosixPath], Verdict]
"""(kept file or folder, other one) -> how they compare."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The findings about a folder, most severe first, and in words the omitted checks.

    ``scanned``: the identity of every file when it was scanned; none of them changed until the end
    of the diagnosis.

    ``unfinished``: files that may not be read, each with its path, the reason, and the command that
    helps.

    ``manifest``: that of the save, None without one. ``trainer``: what ``trainer_state.json``
    records. ``digests``: of the bytes that were read to prove a duplicate, by kept file, for the
    journal. ``links``: the symbolic links of a folder with a file that a repair may drop or move,
    and their targets (``links_below``).
    """

    folder: CheckpointFolder
    scanned: Mapping[PurePosixPath, FileIdentity]
    sharded: tuple[DcpFolder, ...]
    deepspeed: tuple[DeepSpeedState, ...]
    groups: tuple[ModelFiles, ...]
    optimizers: tuple[SavedOptimizer, ...]
    manifest: Manifest | None
    trainer: TrainerProgress
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    unfinished: tuple[str, ...]
    verdicts: Verdicts
    digests: Mapping[PurePosixPath, Digests]
    links: Mapping[PurePosixPath, frozenset[PurePosixPath]]

    def entries(self, role: Role) -> tuple[Sequence[Numbered], ...]:
        """Return the lists of numbered entries of a role: one of each family of files, and one of
        DCP folders.
        """
        folders = numbered_folders(self.sharded, role) if self.sharded else ()
        return (*self.folder.entries(role), *([folders] if folders else []))


def diagnose(
    folder: CheckpointFolder,
    *,
    prove: bool = False,
    data: bool = False,
    drops: Iterable[Role] = (),
    known: Verdicts | None = None,
    looked_at: Collection[str] = (),
    neighbours: Neighbours | None = None,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> Diagnosis:
    """Find every kind of damage in a scanned folder.

    By default bytes of look-alikes are sampled. ``prove`` reads and hashes every byte of the files
    to be dropped (``repair``), ``data`` every byte of every look-alike and of every record with a
    CRC (``check --data``). ``drops``: the roles whose equal entries will be dropped. ``known``:
    earlier comparisons that still hold. ``looked_at``: names of files that the caller reads.
    ``neighbours``: those of its source for a copy. ``progress`` is called with byte counts.

    Raises FileChangedError when a file changed since it was scanned, OSError when it can no longer
    be read.
    """
    neighbours = neighbours or Siblings().of(folder.root)
    verdicts: dict[tuple[PurePosixPath, PurePosixPath], Verdict] = {}
    digests: dict[PurePosixPath, Digests] = {}

    def compare(pairing: Pairing, must_prove: bool) -> Verdict:
        pair, full = (pairing.kept.path, pairing.other.path), data or (prove and must_prove)
        verdict = verdicts.get(pair) or (known or {}).get(pair)
        if verdict is None or (full and not verdict.full and verdict.difference is None):
            hashed = digests if prove and full else None
            difference = first_unequal(
                folder.root,
                pairing,
                full=full,
                progress=progress,
                digests=hashed,
                executor=executor,
            )
            verdict = Verdict(difference, full)
        verdicts[pair] = verdict
        return verdict

    drops = frozenset(drops)
    sharded = scan_dcp_folders(folder)
    scanned = {component.path: component.fingerprint for component in folder.components}
    scanned |= {path: file.fingerprint for state in sharded for path, file in state.files.items()}
    with unchanged(folder.root, scanned):
        deepspeed = diagnose_deepspeed(folder, data=data, progress=progress, executor=executor)
        scanned |= {path: was for state in deepspeed for path, was in state.scanned.items()}
        named = without_deepspeed(folder)
        groups = group_files(named)
        existing = {*folder.strays, *(one.path for one in folder.components)}
        findings: list[Finding] = []
        if folder.only is None:
            findings += diagnose_shards(folder, groups, data=data)
        findings += diagnose_parts(groups, is_file=folder.only is not None)
        rebuilt = {
            finding.path
            for finding in findings
            if (isinstance(finding, IndexMismatch) and finding.is_fixable)
            or isinstance(finding, LeftoverIndex)
        }
        findings += diagnose_files(
            folder, data=data, progress=progress, explained=frozenset(rebuilt), executor=executor
        )
        corrupt = frozenset(
            finding.path
            for finding in findings
            if isinstance(finding, (*_OF_CONTENT, CrcMismatch))
            and not isinstance(finding, TrailingBytes)
        )
        evidence = Evidence(named, usable_manifest(folder.root), neighbours)
        findings += diagnose_models(
            evidence, sharded, compare, drops=Role.MODEL in drops, damaged=corrupt
        )
        doubled = frozenset(
            finding.path for finding in findings if isinstance(finding, DoubledModel)
        )
        findings += diagnose_states(evidence, compare, drops, doubled)
        findings += diagnose_gaps(evidence)
        findings += diagnose_names(evidence, groups, doubled)
        findings += (finding for state in deepspeed for finding in state.findings)
        findings += diagnose_rank_files(folder, _paths(findings, _OF_RANK_FILES))
        findings += diagnose_world_ranks(folder)
        refused: dict[PurePosixPath, str] = {}
        if sharded:
            findings += diagnose_dcp_folders(folder.root, sharded, folder.processes)
            of_items, refused = diagnose_items(
                folder.root, sharded, data=data, progress=progress, executor=executor
            )
            findings += of_items
            findings += diagnose_wrong_folders(folder.root, sharded)
        findings += diagnose_wrong_states(folder)
        renamed = list(diagnose_renamed(folder, _paths(findings, _OF_CONTENT)))
        findings += renamed
        findings += diagnose_meta_tensors(folder)
        findings += diagnose_keys(folder)
        findings += diagnose_lora(folder)
        damaged = _paths(findings, _OF_CONTENT)
        optimizers = tuple(saved_optimizers(folder, sharded))
        unreliable = _paths(findings, _OF_HEADERS)
        of_optimizers = diagnose_optimizers(
            folder, sharded, unreliable, optimizers, has_deepspeed=bool(deepspeed)
        )
        findings += of_optimizers.findings
        bundles = list(bundles_of(folder, unreliable))
        findings += (finding for bundle in bundles for finding in bundle.findings)
        findings += diagnose_empty_bundles(folder, bundles)
        every_optimizer = (
            *optimizers,
            *(saved for bundle in bundles for saved in bundle.optimizers),
        )
        of_values = diagnose_optimizer_values(folder.root, every_optimizer, unreliable, data=data)
        findings += of_values.findings
        is_of_trainer = folder.only is None and PurePosixPath(TRAINER_STATE) in folder.strays
        trainer = (
            trainer_progress(folder.root, complete=data) if is_of_trainer else TrainerProgress()
        )
        if folder.only is None:
            findings += diagnose_schedules(folder, optimizers, damaged, neighbours)
            step = trainer.step if not folder.is_save_state else None
            findings += diagnose_progress(folder, optimizers, damaged, neighbours, step)
            findings += diagnose_empty_optimizers(
                folder, sharded, optimizers, damaged, neighbours, step
            )
            findings += diagnose_uncounted_steps(folder, optimizers, damaged, step)
            findings += diagnose_empty_schedulers(folder, neighbours)
            findings += diagnose_other_schedules(folder, damaged, neighbours)
        # After the optimizers: they are compared with intact weights, and both families of a model
        # are.
        if folder.only is None:
            # After a repair, too: by samples alone a difference that it found before would be gone.
            proves = prove or known is not None
            of_families = diagnose_families(
                folder.root,
                groups,
                existing,
                corrupt,
                prove=proves,
                data=data,
                progress=progress,
                executor=executor,
            )
            findings = [*_undecided(findings, of_families.switches), *of_families.findings]

        def count_steps() -> int:
            of_run = trainer if folder.only is None else trainer_progress(folder.root)
            return trained_steps(folder.root, of_run.step, optimizers)

        loads = [
            *loads_of(
                folder,
                groups,
                libraries=JUDGED,
                data=data,
                has_optimizer=bool(every_optimizer),
                count_steps=count_steps,
            )
        ]
        # Those with FSDP, whose weights the Trainer loads in another way, have other names.
        trained = sum(
            len(group)
            for saved in optimizers
            for group in saved.groups
            if saved.path.suffix == ".pt"
        )
        loads += adapters_without_config(folder, groups, loads)
        loads += lora_of_diffusers(folder, groups, has_optimizer=bool(every_optimizer))
        of_loads = diagnose_loads(loads, trained, folder.components)
        of_save = diagnose_save(
            folder, sharded, damaged, has_deepspeed=bool(deepspeed), neighbours=neighbours
        )
        findings += (*of_loads.findings, *of_save.findings, *broken_trainer_state(folder, trainer))
        # To allow the classes of a file that was exchanged would load the wrong state.
        explained = of_loads.explained | {(UnloadablePickle, finding.path) for finding in renamed}
        # A complete shard with an ending of a download gets the name that the download left out.
        shards = (
            shard for one in findings if isinstance(one, MissingShard) for shard in one.renamed
        )
        explained |= {(InterruptedSave, shard.path) for shard in shards}
        findings = [
            one
            for one in findings
            if all((kind, one.path) not in explained for kind in type(one).__mro__)
        ]
    if findings[1:]:
        findings.sort(key=_rank())
    return Diagnosis(
        folder=folder,
        scanned=scanned,
        sharded=sharded,
        deepspeed=deepspeed,
        groups=groups,
        optimizers=every_optimizer,
        manifest=evidence.manifest,
        trainer=trainer,
        findings=tuple(findings),
        not_checked=(
            *(unchecked_parts(groups, folder.processes) if folder.only is None else ()),
            *_not_checked(
                folder, sharded, deepspeed, findings, looked_at, of_loads.compared, data=data
            ),
            *unchecked_bundles(bundles),
            *unjudged_loaders(folder),
            *unjudged_scalers(folder),
            *(_unchecked_of_scripts(folder, findings) if folder.only is None else ()),
            *of_optimizers.unchecked,
            *of_values.unchecked,
            *trainer.unchecked,
            *of_loads.unchecked,
            *of_save.unchecked,
        ),
        unfinished=(*_unfinished(folder, sharded, deepspeed, refused), *of_save.unfinished),
        verdicts=verdicts,
        digests=digests,
        links=(
            links_below(folder.root)
            if any(isinstance(one, _OF_ENTRIES) for one in findings)
            else {}
        ),
    )


def _rank() -> Callable[[Finding], tuple[int, int, str]]:
    """Return the key that sorts findings: errors first, then in the order of the catalogue, then by
    path.
    """
    from ckptfix.diagnosis.findings.catalogue import CODES

    order = {code: place for place, code in enumerate(CODES)}
    severities = list(Severity)
    return lambda finding: (
        severities.index(finding.severity),
        order[finding.code],
        str(finding.path),
    )


def _undecided(
    findings: Iterable[Finding], switches: Mapping[PurePosixPath, Mapping[str, PurePosixPath]]
) -> Iterator[Finding]:
    """Yield findings, with a question for each missing index that would change what a loader
    takes.
    """
    for finding in findings:
        loads = switches.get(finding.path)
        if loads and isinstance(finding, IndexMismatch) and finding.is_fixable and finding.absent:
            yield as_kind(UndecidedIndex, finding, loads=loads)
        else:
            yield finding


_OF_ONE_SAVE = frozenset((Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE))
OF_ONE_SAVE = "whether all files are of one save"
"""Beginning of the sentence about what few files show: most have no number of their save."""


def _paths(
    findings: Iterable[Finding], kinds: tuple[type[Finding], ...]
) -> frozenset[PurePosixPath]:
    """Return the paths of the findings of these kinds."""
    return frozenset(finding.path for finding in findings if isinstance(finding, kinds))


def _unchecked_of_scripts(folder: CheckpointFolder, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield in words what only the script, its model or a class of diffusers shows."""
    told = {finding.path for finding in findings if finding.severity is not Severity.NOTE}
    yield from unread_weights(folder, told)
    yield from unchecked_weights(folder)
    if folder.has_file(PIPELINE):
        yield f"whether the class that {PIPELINE} names takes the components that it lists"


def _why_not(path: AnyPath, kind: str) -> str:
    """Return why nothing in a folder was checked, and the command that checks it, if there is
    one.
    """
    if is_empty(path):
        return "empty"
    is_walked = kind == PLAIN_FOLDER and not path.is_symlink() and _may_hold_checkpoint(path)
    return f"not looked into{'; ckptfix check --recursive looks into it' if is_walked else ''}"


def _may_hold_checkpoint(path: AnyPath) -> bool:
    """Return whether ``check --recursive`` can find a checkpoint at or below a path: files that are
    none and no folder are passed over there, too.
    """
    try:
        _, folders, names = next(walk(path))
    except (OSError, StopIteration):
        return True
    return bool(folders) or any(map(is_of_checkpoint, names))


def _unfinished(
    folder: CheckpointFolder,
    sharded: Iterable[DcpFolder],
    deepspeed: Iterable[DeepSpeedState],
    refused: Mapping[PurePosixPath, str],
) -> Iterator[str]:
    """Yield the files that may not be read, which may be healthy or damaged."""
    of_states = dict(refused)
    for state in sharded:
        of_states |= state.unreadable
        if state.problem is not None and state.problem.kind is ProblemKind.UNREADABLE:
            of_states[state.metadata_path] = state.problem.message
    for component in folder.components:
        if component.problem is not None and is_unreadable(component):
            yield f"{component.path}: {component.problem.message}"
    yield from (f"{path}: {why}" for path, why in of_states.items())
    yield from (words for state in deepspeed for words in state.unfinished)
    for path, kind in folder.subfolders.items():
        try:
            with folder_entries(folder.root / path):
                pass
        except OSError as error:
            if str(path) != "lost+found":  # a folder of the file system's own, closed to everybody
                yield f"{path}/ ({kind}): {unreadable(folder.root / path, error)}"


def _not_checked(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    deepspeed: Sequence[DeepSpeedState],
    findings: list[Finding],
    looked_at: Collection[str],
    compared: Collection[str],
    *,
    data: bool,
) -> tuple[str, ...]:
    checked = {state.path for state in sharded} | {state.path for state in deepspeed}
    checked |= {finding.path for finding in findings}
    words = [
        f"{path}/ ({kind}): {_why_not(folder.root / path, kind)}"
        for path, kind in folder.subfolders.items()
        if path not in checked and not is_of_client(folder.root / path)
    ]
    words += unchecked_dcp(sharded) if sharded else ()
    words += (unread for state in deepspeed for unread in state.unread)
    words += [
        f"{component.path}: {component.problem.message}"
        for component in folder.components
        if component.problem is not None and component.problem.is_only_unchecked
    ]
    of_zeros = ("untrained-adapter", "missing-moments")
    of_pairs = [finding for finding in findings if finding.code not in of_zeros]
    sampled = sum(1 for finding in of_pairs if getattr(finding, "sampled", False))
    if sampled:
        pairs = count_of(sampled, "pair")
        words.append(
            f"{pairs} in full: compared by samples only; ckptfix check --data reads every byte"
        )
    if folder.only is not None:
        compares = f"{command('check', folder.root)} compares them"
        words.append(
            "other files of the folder (duplicates, missing files, moments that fit no weights); "
            f"{compares}"
        )
    words.append("values of tensors (NaN, zeros, flipped bits); ckptfix verify --data reads them")
    if folder.only is None and any(one.role is Role.MODEL for one in folder.components):
        # Names that ``check`` passes: it prints what a config says, and compares none of it.
        configs = [
            path.name
            for path in folder.strays
            if path.name in looked_at and path.name not in compared
        ]
        words += [
            f"{name} against the weights: its sizes are read and not compared" for name in configs
        ]
    files = (one.content for one in folder.components if isinstance(one.content, TorchFile))
    has_checksums = any(isinstance(file.container, TorchZip) for file in files)
    if not data and (has_checksums or any(state.has_checksums for state in deepspeed)):
        words.append(
            "checksums of tensor records in torch zip files; ckptfix check --data checks them"
        )
    if not data and any(state.metadata is not None and state.metadata.stored for state in sharded):
        words.append("checksums of the items in .distcp files; ckptfix check --data checks them")
    has_several = len(_OF_ONE_SAVE & {one.role for one in folder.components}) > 1 or any(
        one.name.shard is not None for one in folder.components
    )
    if folder.only is None and (sharded or deepspeed or has_several):
        manifest = usable_manifest(folder.root)
        # With checksums, another sentence names the command that compares them.
        if manifest is None or not manifest.digests:
            words.append(
                f"{OF_ONE_SAVE}: most saves list no files, so an exchanged file or a missing last "
                "one leaves no trace unless each save is sealed when it is written"
            )
    known = {path for state in sharded for path in state.files} | set(BESIDE if deepspeed else ())
    known |= {PurePosixPath(name) for name in (REPORT, TRAINER_STATE)}
    known |= {one.path for one in findings if isinstance(one, InterruptedSave)}
    known |= {
        shard.path for one in findings if isinstance(one, MissingShard) for shard in one.renamed
    }
    strays = [
        str(path) for path in folder.strays if path not in known and path.name not in looked_at
    ]
    if strays and folder.only is None:
        words.append(f"other files next to it: {list_names(strays)}")
    return tuple(words)

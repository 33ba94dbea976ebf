"""A case: what every rule of a diagnosis is given, and what the rules before it told."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple, TypeAlias

from ckptfix.checkpoint.dcp import DcpFolder, NumberedFolder, numbered_folders, scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.manifest import Manifest, usable_manifest
from ckptfix.checkpoint.model_files import ModelFiles, group_files
from ckptfix.checkpoint.neighbours import Neighbours, Siblings
from ckptfix.checkpoint.pairing import Pairing, first_unequal
from ckptfix.checkpoint.placeholders import files_with_placeholders
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.second_prepare import Evidence
from ckptfix.checkpoint.state_contents import StateProblem
from ckptfix.checkpoint.trainer_folders import TrainerProgress, trainer_progress
from ckptfix.diagnosis.bundled_optimizers import Bundle, bundles_of
from ckptfix.diagnosis.file_damage import (
    HEADERS,
    DeepSpeedState,
    Reading,
    diagnose_deepspeed,
    without_deepspeed,
)
from ckptfix.diagnosis.findings.base import (
    Compared,
    Explained,
    Finding,
    Instead,
    Severity,
    Told,
    Unreadable,
)
from ckptfix.diagnosis.findings.damaged import (
    CrcMismatch,
    MalformedFile,
    NotATensorFile,
    TrailingBytes,
    TruncatedFile,
    UncheckedFile,
)
from ckptfix.diagnosis.findings.incomplete import IncompleteTensor, MissingRank
from ckptfix.diagnosis.findings.misplaced import UnknownState, WrongState
from ckptfix.diagnosis.findings.sharded import IndexMismatch, MissingShard
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.lazy import once
from ckptfix.storage.comparing import Digests
from ckptfix.storage.reading import FileIdentity

Rule: TypeAlias = Callable[["Case"], Iterable[Told]]
"""Function that tells what is wrong with a folder, and what of it nothing shows."""

DAMAGED_CONTENT = (
    MalformedFile, MissingRank, MissingShard, NotATensorFile, TrailingBytes, TruncatedFile,
    UnknownState, WrongState,
)  # fmt: skip
"""Findings that explain a file that is missing, or has another size than it was saved with."""

DAMAGED_HEADERS = (*DAMAGED_CONTENT, CrcMismatch, IncompleteTensor, IndexMismatch, UncheckedFile)
"""Findings after which the headers of a file do not show what it was saved with: nothing is
compared with them.

A note such as ``identical-states`` must not silence another rule.
"""


class Verdict(NamedTuple):
    """Result of a comparison: the first difference of two paired entries, None when they are equal.

    ``full``: every byte was read for it.
    """

    difference: str | None
    full: bool


Verdicts = Mapping[tuple[PurePosixPath, PurePosixPath], Verdict]
"""(kept file or folder, other one) -> how they compare."""


class Case:
    """A scanned folder, what a diagnosis may read of it, and what the rules have told so far.

    By default bytes of look-alikes are sampled. ``prove`` reads and hashes every byte of the files
    to be dropped (``repair``), ``reading`` may read every byte of all look-alikes (``check
    --data``). ``drops``: the roles whose equal entries will be dropped. ``known``: earlier
    comparisons that still hold. ``looked_at``: names of files that the caller reads.
    ``neighbours``: those of its source for a copy.

    ``corrupt``: files that lost bytes. ``damaged``: files with a finding that explains why one is
    missing, or has another size than it was saved with. ``unreliable``: files whose headers do not
    show what they were saved with. Each is complete once the rules about files, or about what they
    hold, have been asked. ``compared``: the configs whose sizes were compared with the weights.
    ``unfinished``: files that may not be read, each with its path, the reason, and the command that
    helps. ``digests``: of the bytes that were read to prove a duplicate, by kept file, for the
    journal.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        reading: Reading = HEADERS,
        *,
        prove: bool = False,
        drops: Iterable[Role] = (),
        known: Verdicts | None = None,
        looked_at: Collection[str] = (),
        neighbours: Neighbours | None = None,
    ) -> None:
        """Store what the rules are given; files are read when a rule asks for what they hold."""
        self.folder = folder
        self.reading = reading
        self.data, self.progress, self.left, self.executor = reading
        self.prove = prove
        self.drops = frozenset(drops)
        self.known = known
        self.looked_at = looked_at
        self.neighbours = neighbours or Siblings().of(folder.root)
        self.findings: list[Finding] = []
        self.not_checked: list[str] = []
        self.unfinished: list[str] = []
        self.explained: set[Explained] = set()
        self.corrupt: frozenset[PurePosixPath] = frozenset()
        self.damaged: frozenset[PurePosixPath] = frozenset()
        self.unreliable: frozenset[PurePosixPath] = frozenset()
        self.compared: set[str] = set()
        self.verdicts: dict[tuple[PurePosixPath, PurePosixPath], Verdict] = {}
        self.digests: dict[PurePosixPath, Digests] = {}

    def ask(self, rules: Iterable[Rule]) -> None:
        """Ask rules in their order; each one sees what those before it told."""
        for rule in rules:
            for told in tuple(rule(self)):
                if isinstance(told, str):
                    self.not_checked.append(told)
                elif isinstance(told, Unreadable):
                    self.unfinished.append(told.words)
                elif isinstance(told, Explained):
                    self.explained.add(told)
                elif isinstance(told, Compared):
                    self.compared.add(told.name)
                elif isinstance(told, Instead):
                    self.findings[self.findings.index(told.former)] = told.finding
                else:
                    self.findings.append(told)

    def close(self) -> None:
        """Drop the findings that others explain, and sort the rest: errors first, then in the order
        of the catalogue, then by path.
        """
        self.findings = [
            finding
            for finding in self.findings
            if all((kind, finding.path) not in self.explained for kind in type(finding).__mro__)
        ]
        if len(self.findings) < 2:
            return
        from ckptfix.diagnosis.findings.catalogue import CODES

        order = {code: place for place, code in enumerate(CODES)}
        severities = list(Severity)
        self.findings.sort(
            key=lambda one: (severities.index(one.severity), order[one.code], str(one.path))
        )

    def paths(self, *kinds: type[Finding]) -> frozenset[PurePosixPath]:
        """Return the paths of the findings of these kinds so far."""
        return frozenset(finding.path for finding in self.findings if isinstance(finding, kinds))

    @property
    def is_file(self) -> bool:
        """True where a file is judged alone, without those next to it."""
        return self.folder.only is not None

    @once
    def sharded(self) -> tuple[DcpFolder, ...]:
        """The DCP folders."""
        return scan_dcp_folders(self.folder)

    @once
    def deepspeed(self) -> tuple[DeepSpeedState, ...]:
        """The checkpoints of DeepSpeed, each with its findings."""
        return diagnose_deepspeed(self.folder, self.reading)

    @once
    def evidence(self) -> Evidence:
        """Evidence of the objects that the script prepared: the folder without the files of
        DeepSpeed, its manifest, and the checkpoints next to it.
        """
        return Evidence(without_deepspeed(self.folder), self.manifest, self.neighbours)

    @once
    def manifest(self) -> Manifest | None:
        """The manifest of the save, None without one that can be used."""
        return usable_manifest(self.folder.root)

    @property
    def is_recorded(self) -> bool:
        """True where the save recorded its files."""
        return self.manifest is not None and self.manifest.is_of_a_save

    @once
    def groups(self) -> tuple[ModelFiles, ...]:
        """The files of each model, without those of DeepSpeed."""
        return group_files(self.evidence.folder)

    @once
    def existing(self) -> frozenset[PurePosixPath]:
        """Every file of the folder, of whatever kind."""
        return frozenset((*self.folder.strays, *(one.path for one in self.folder.components)))

    @once
    def placeholders(self) -> tuple[tuple[Component, str, StateProblem], ...]:
        """Weights of ZeRO-3 without elements, as of ``files_with_placeholders``."""
        return tuple(files_with_placeholders(self.folder))

    @once
    def optimizers(self) -> tuple[SavedOptimizer, ...]:
        """The optimizers in files and DCP folders of their own."""
        return tuple(saved_optimizers(self.folder, self.sharded))

    @once
    def bundles(self) -> tuple[Bundle, ...]:
        """The files of scripts that hold optimizers next to other things."""
        return tuple(bundles_of(self.folder, self.unreliable))

    @once
    def every_optimizer(self) -> tuple[SavedOptimizer, ...]:
        """All optimizers, also those in files of scripts."""
        bundled = (saved for bundle in self.bundles for saved in bundle.optimizers)
        return (*self.optimizers, *bundled)

    @once
    def trainer(self) -> TrainerProgress:
        """The record of ``trainer_state.json``, where it is one of this folder."""
        if self.is_file or PurePosixPath(TRAINER_STATE) not in self.folder.strays:
            return TrainerProgress()
        return trainer_progress(self.folder.root, complete=self.data)

    @property
    def step(self) -> int | None:
        """The step of the Trainer, None in a folder of accelerate's ``save_state``."""
        return self.trainer.step if not self.folder.is_save_state else None

    @once
    def scanned(self) -> dict[PurePosixPath, FileIdentity]:
        """The identity of every file when it was scanned; none of them changes until the end of
        the diagnosis.
        """
        files = {
            path: file.fingerprint for state in self.sharded for path, file in state.files.items()
        }
        return {**{one.path: one.fingerprint for one in self.folder.components}, **files}

    def entries(self, role: Role) -> tuple[Sequence[Component | NumberedFolder], ...]:
        """Return the lists of numbered entries of a role: one of each family of files, and one of
        DCP folders.
        """
        folders = numbered_folders(self.sharded, role)
        return (*self.folder.entries(role), *([folders] if folders else []))

    def compare(self, pairing: Pairing, must_prove: bool) -> Verdict:
        """Compare two paired entries, by samples where no drop depends on the answer.

        ``must_prove``: one does, so that ``prove`` reads every byte. Raises OSError.
        """
        pair = pairing.kept.path, pairing.other.path
        full = self.data or (self.prove and must_prove)
        verdict = self.verdicts.get(pair) or (self.known or {}).get(pair)
        if verdict is None or (full and not verdict.full and verdict.difference is None):
            difference = first_unequal(
                self.folder.root,
                pairing,
                full=full,
                progress=self.progress,
                digests=self.digests if self.prove and full else None,
                executor=self.executor,
            )
            verdict = Verdict(difference, full)
        self.verdicts[pair] = verdict
        return verdict

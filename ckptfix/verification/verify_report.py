"""The report of ``verify``: an item for every file and tensor, findings about values, and what was
not checked.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import ClassVar, Generic, TypeVar

from msgspec import Struct

from ckptfix.diagnosis.check_report import status_of
from ckptfix.diagnosis.findings.base import Finding, Severity, finding_lines, labelled
from ckptfix.diagnosis.values import ADVICE, ValueFinding
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import SIGNED, command
from ckptfix.verification.signatures import OF_UPLOAD, Attestation
from ckptfix.wording import (
    Line,
    Printable,
    count_of,
    few,
    human_size,
    line,
    list_names,
    series,
    unchecked_line,
)

Key = TypeVar("Key", bound=Hashable)


class Outcome(Enum):
    """Results for one file or tensor. "Not checked" is never "match"."""

    MATCH = "match"
    DIFFER = "differ"
    EDITED = "edited"  # a text that users edit is not the one that was downloaded; no damage
    NOT_CHECKED = "not checked"


class Change(Enum):
    """Kinds of difference of a file or tensor."""

    CHANGED = "changed"
    ZERO_TAIL = "zero-tail"
    SWAPPED = "swapped"
    RENAMED = "renamed"  # or, under its own name, in another file or folder now
    MISSING = "missing"
    EXTRA = "extra"


class Judgement(Struct, Generic[Key], frozen=True):
    """The outcome for one key. ``other``: what it is called now, or was swapped with."""

    key: Key
    outcome: Outcome
    change: Change | None = None
    other: Key | None = None


def judge(
    recorded: Mapping[Key, str], found: Mapping[Key, str], *, name_of: Callable[[Key], str] = str
) -> list[Judgement[Key]]:
    """Return an outcome for every key of either. A digest of "" in ``found``: it is there and could
    not be read.

    ``name_of``: what a thing is called wherever it is. What is gone was renamed if something new
    has its digest and its name, or if both are alone with that digest. Two were swapped if each has
    the digest of the other one, and nothing else was recorded with it.
    """
    gone = {key: digest for key, digest in recorded.items() if key not in found}
    extra = {key: digest for key, digest in found.items() if key not in recorded}
    named = {(digest, name_of(key)): key for key, digest in extra.items()}
    now: dict[Key, Key] = {}
    for key, digest in gone.items():
        if (other := named.pop((digest, name_of(key)), None)) is not None:
            now[key] = other
    left: dict[str, list[Key]] = {}
    for (digest, _), key in named.items():
        left.setdefault(digest, []).append(key)
    counts = Counter(recorded.values())
    for key, digest in gone.items():
        if key not in now and counts[digest] == len(left.get(digest, ())) == 1:
            now[key] = left[digest][0]
    owners = {digest: key for key, digest in recorded.items() if counts[digest] == 1}
    judgements: list[Judgement[Key]] = []
    for key, want in recorded.items():
        have = found.get(key, "")
        if key in now:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.RENAMED, now[key]))
        elif key not in found:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.MISSING))
        elif have == want:
            judgements.append(Judgement(key, Outcome.MATCH))
        elif not have:
            judgements.append(Judgement(key, Outcome.NOT_CHECKED))
        elif counts[want] == 1 and have in owners and found.get(owners[have]) == want:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.SWAPPED, owners[have]))
        else:
            judgements.append(Judgement(key, Outcome.DIFFER, Change.CHANGED))
    taken = set(now.values())
    return judgements + [
        Judgement(key, Outcome.DIFFER, Change.EXTRA) for key in extra if key not in taken
    ]


class Kind(Enum):
    """Kinds of item."""

    FILE = "file"
    TENSOR = "tensor"


class Item(Serialized, Struct, frozen=True):
    """The verdict on one file or tensor.

    ``name``: the relative path, or the name of the tensor. ``where``: the file that holds it, or
    held it. ``change``: what happened to it, None where it matches and where nothing is known.
    ``text``: the sentence, "" for a match. ``other``: the file that it is now or was swapped with,
    or that holds what it is now, "" when there is none.
    """

    json_keys: ClassVar = "kind name file=where outcome change message=text other"

    kind: Kind
    name: str
    where: str
    outcome: Outcome
    change: Change | None = None
    text: str = ""
    other: str = ""

    def __str__(self) -> str:
        return (
            f"{self.label}: {after_colon(self.text)}"
            if self.kind is Kind.FILE
            else f"{self.label} {self.text}"
        )

    @property
    def label(self) -> str:
        """The file, or the tensor and its file, in words."""
        return self.name if self.kind is Kind.FILE else f"{self.where}: {self.name!r}"


def after_colon(text: str) -> str:
    """Return the text of an item as a problem: "optimizer.bin: missing", where a sentence has "is
    missing".
    """
    return text.removeprefix("is ").removeprefix("differs: ")


def file_item(name: str, outcome: Outcome, change: Change | None, text: str) -> Item:
    """Return the verdict on a file."""
    return Item(Kind.FILE, name, name, outcome, change, text)


class Downloaded(Serialized, Struct, frozen=True, kw_only=True):
    """The download that a folder was compared with. ``repo``: "" where its name is not recorded.

    ``revisions``: commit -> number of files that were compared with it. ``unvouched``: files
    without a digest. ``gone``: files that were downloaded and are not there. ``again``: the
    commands that download what differs. ``lost_weights``: why no file of weights is that of the
    download, "" where one is. ``seal``: the command that records the folder as it is.
    """

    json_keys: ClassVar = "repo type=kind revisions unvouched gone next=again"

    repo: str
    kind: str
    revisions: Mapping[str, int]
    unvouched: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    lost_weights: str = ""
    seal: str = ""

    @property
    def name(self) -> str:
        """The revisions and the repository in words."""
        commits = [*self.revisions]
        more = [count_of(len(commits) - 3, "more")] if len(commits) > 3 else []
        revisions = (
            f"revision {commits[0]}"
            if len(commits) == 1
            else f"revisions {series([*commits[:3], *more])}"
        )
        return f"{revisions} of {self.repo}" if self.repo else revisions

    @property
    def line(self) -> Line:
        """The revision, and how many files were compared with its records."""
        files = count_of(sum(self.revisions.values()), "file")
        return line(f"compared with the hub client's download records: {files} of {self.name}")

    def advice(self) -> Iterator[Line]:
        """Yield what to do where a file differs."""
        if self.lost_weights:
            yield line(self.lost_weights)
        for again in self.again:
            unknown = " (REPO: the repository; its name was not recorded)" if not self.repo else ""
            yield line(f"next, to download these files again: {again}{unknown}")
        yield line(f"or, if you changed them on purpose: {self.seal}")


class VerifyReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Report of ``verify``.

    ``root``: the folder of ``path``, to which the paths of findings are relative. ``findings``: of
    the structure, as ``check`` has them. ``items``: one for every file and tensor, files first.
    ``values``: what ``--data`` found. ``sealed``: whether there is a manifest. ``crossed``: models
    in each other's place, in words, "" when none do. ``not_checked``: in words. ``unfinished``:
    what could not be read, in words. ``read_values``: how many tensors ``--data`` looked at.
    ``no_digest``: why no digest was compared, and what to type, "" when one was. ``statements``:
    what was compared with instead of the manifest, ``again``: the command that does it again.
    ``notes``: what that passes over, in words. ``hub``: the download that it was compared with
    where there is no manifest.
    """

    json_keys: ClassVar = (
        "path status sealed verified=is_verified no_digest findings items crossed values "
        "not_checked unfinished statements notes hub?"
    )

    path: AnyPath
    root: AnyPath
    nbytes: int
    findings: tuple[Finding, ...]
    items: tuple[Item, ...]
    values: tuple[ValueFinding, ...] = ()
    sealed: bool = False
    crossed: str = ""
    not_checked: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    read_values: int = 0
    no_digest: str = ""
    statements: tuple[Attestation, ...] = ()
    again: str = ""
    notes: tuple[str, ...] = ()
    hub: Downloaded | None = None

    @property
    def is_compared(self) -> bool:
        """Return whether a digest was compared, or something that has one is gone."""
        return any(item.outcome is not Outcome.NOT_CHECKED for item in self.items)

    @property
    def is_verified(self) -> bool:
        """Return whether anything was verified at all: by a digest, or by its values."""
        return self.is_compared or bool(self.read_values)

    @property
    def status(self) -> int:
        """Exit status: 1 for damage, 3 when something could not be read or nothing was compared,
        else 0.

        Damage is what ``check`` has its own status 1 for, too: errors and warnings. Unchecked
        things change nothing while others were verified.
        """
        if self.is_damaged:
            return 1
        return 3 if self.unfinished or not self.is_verified else 0

    @property
    def is_damaged(self) -> bool:
        """Return whether something differs, a signature is wrong, or an error or a warning was
        found.
        """
        return bool(
            any(item.outcome is Outcome.DIFFER for item in self.items)
            or self.crossed
            or any(one.problem for one in self.statements)
            or status_of(self.findings)
            or any(one.severity is not Severity.NOTE for one in self.values)
        )

    def count(self, kind: Kind) -> dict[Outcome, int]:
        """Return how many files or tensors have each outcome. Only texts of a download can be
        edited.
        """
        counter = Counter(item.outcome for item in self.items if item.kind is kind)
        return {
            outcome: counter[outcome]
            for outcome in Outcome
            if outcome is not Outcome.EDITED or counter[outcome]
        }

    @property
    def differences(self) -> list[Item]:
        """The items that differ."""
        return [item for item in self.items if item.outcome is Outcome.DIFFER]

    def lines(self) -> Iterator[Line]:
        """Yield what differs, each by name, then how many match, what was not checked, and how much
        is wrong.
        """
        totals = {kind: sum(self.count(kind).values()) for kind in Kind}
        counts = [
            count_of(number, kind.value)
            for kind, number in totals.items()
            if number
            or kind is Kind.FILE
            or (kind is Kind.TENSOR and not (self.statements or self.hub))
        ]
        if any(one.problem for one in self.statements):
            counts = ["not compared"]
        yield line(f"{self.path}: {', '.join(counts)}, {human_size(self.nbytes)}", bold=True)
        # A problem is the last line.
        yield from (one.line for one in self.statements if not one.problem)
        if self.hub is not None and not self.no_digest:
            yield self.hub.line
        yield from (line(f"note: {words}") for one in self.statements for words in one.notes)
        yield from (line(f"note: {words}") for words in self.notes)
        serious = [one for one in self.findings if one.severity is not Severity.NOTE]
        yield from finding_lines(serious, str(self.path))
        differing = self.differences
        unchecked = [item for item in self.items if item.outcome is Outcome.NOT_CHECKED]
        for kind in Kind:
            yield from differing_lines([item for item in differing if item.kind is kind])
            edited = [
                item for item in self.items if item.outcome is Outcome.EDITED and item.kind is kind
            ]
            yield from few(
                [f" edited {item}" for item in edited], f"{kind.value}s", colour="yellow"
            )
            yield from _unchecked_lines(
                [item for item in unchecked if item.kind is kind], names_all=self.hub is not None
            )
        if self.crossed:
            yield line(f" differ positions of models: {self.crossed}", colour="red")
        yield from (labelled(value.severity, value.code, str(value)) for value in self.values)
        yield from (line(f"could not be read: {words}", colour="red") for words in self.unfinished)
        for kind in Kind:
            known = self.count(kind)
            if known[Outcome.MATCH] or known[Outcome.DIFFER]:
                words = ", ".join(
                    f"{number} {outcome.value}" for outcome, number in known.items() if number
                )
                yield line(
                    f"{kind.value}s: {words}", colour="red" if known[Outcome.DIFFER] else "green"
                )
        if self.read_values:
            tensors = count_of(self.read_values, "tensor")
            words = f"{tensors} read" if self.values else f"no problem in {tensors}"
            yield line(f"values: {words}")
        if self.status == 0 and not self.no_digest:
            texts = sum(item.outcome is Outcome.EDITED for item in self.items)
            but = f" except {count_of(texts, 'edited text')}" if texts else ""
            yield line(f"no difference found in what was checked{but}", colour="green")
        yield from map(unchecked_line, self.not_checked)
        yield from self._advice()
        if wrong := ", ".join(_wrong(self)):
            yield line(f"wrong: {wrong}", colour="red")
        if self.no_digest and self.is_verified:
            words = f"only values were verified; the bytes were not compared: {self.no_digest}"
            yield line(words, colour="yellow")
        elif self.no_digest:
            yield line(f"nothing was verified: {self.no_digest}", colour="red")

    def _advice(self) -> Iterator[Line]:
        """Yield what a difference means, and what to do about it: of what no repair mends, too."""
        if self.unfinished:
            yield line(
                "next: make the unreadable files readable, or copy them again from their source; "
                f"then: {self.again or command('verify', self.path)}"
            )
        if any(finding.is_fixable for finding in self.findings):
            yield line(f"next: {command('repair', self.path)}")
        for code in sorted({one.code for one in self.values if one.severity is not Severity.NOTE}):
            yield line(f"next, for {code}, which no repair can fix: {ADVICE[code]}")
        changed = [item.change for item in self.items if item.outcome is Outcome.DIFFER]
        if not changed:
            return
        if self.statements:
            yield from self._advice_on_statements()
            return
        if self.hub is not None:
            yield from self.hub.advice()
            return
        if set(changed) == {Change.EXTRA}:
            yield line(f"next, if you added this on purpose: {command('seal', self.path)}")
            return
        yield line(
            "the checkpoint differs from its manifest: a copy, the disk or a later save changed it"
        )
        yield line(
            "next: copy the differing files again from their source, then: "
            f"{command('verify', self.path)}; or resume from the newest complete checkpoint, "
            "which ckptfix.latest_checkpoint(PROJECT) finds"
        )
        yield line(
            f"or recover what is intact: {command('salvage', self.path)} NEW_FOLDER; or, if the "
            f"change is intended: {command('seal', self.path, '', '--force')}"
        )

    def _advice_on_statements(self) -> Iterator[Line]:
        yield line(
            "the checkpoint differs from the statement: a repair, a later save or somebody changed "
            "it"
        )
        yield line(f"next: get the differing files again from their source, then: {self.again}")
        kinds = {one.kind for one in self.statements}
        if OF_UPLOAD in kinds:
            yield line(f"or, if the change is intended: {command('seal', self.path)}")
        if "files" in kinds and not self.count(Kind.TENSOR)[Outcome.DIFFER]:
            yield line(
                "or, if a repair or migrate changed the files: compare only the tensors with the "
                f"statement of tensors, such as --signature {SIGNED[1]}"
            )


def _wrong(result: VerifyReport) -> Iterator[str]:
    """Yield in words how much of each kind is why the exit status is not 0."""
    for severity in (Severity.ERROR, Severity.WARNING):
        structure = sum(one.severity is severity for one in result.findings)
        if structure:
            yield f"{count_of(structure, severity.value)} in the structure"
        values = sum(one.severity is severity for one in result.values)
        if values:
            yield f"{count_of(values, severity.value)} about values"
    for kind in Kind:
        if number := result.count(kind)[Outcome.DIFFER]:
            yield f"{count_of(number, kind.value)} that {'differs' if number == 1 else 'differ'}"
    if result.crossed:
        yield "models in different positions"
    if result.unfinished:
        yield f"{count_of(len(result.unfinished), 'item')} that could not be read"


def differing_lines(items: Sequence[Item]) -> Iterator[Line]:
    """Yield items by what happened to them; of many with the same, only the first few. Files go
    before tensors.
    """
    ordered = sorted(items, key=_kind_and_change)
    for _, group in groupby(ordered, key=_kind_and_change):
        same = list(group)
        texts = [f" differ {item}" for item in same]
        yield from few(texts, f"{same[0].kind.value}s", colour="red")


def _kind_and_change(item: Item) -> tuple[str, str]:
    return item.kind.value, str(item.change)


def _unchecked_lines(items: Sequence[Item], *, names_all: bool = False) -> Iterator[Line]:
    """Yield why items were not checked, each reason once. ``names_all``: with their names, as far
    as they fit.
    """
    reasons: dict[str, list[Item]] = {}
    for item in items:
        reasons.setdefault(item.text, []).append(item)
    for reason, same in reasons.items():
        what = same[0].label if len(same) == 1 else count_of(len(same), same[0].kind.value)
        if names_all and len(same) > 1:
            what += f" ({list_names(item.name for item in same)})"
        each = "each " if len(same) > 1 and reason.startswith(("is ", "has ")) else ""
        yield unchecked_line(f"{what}: {each}{reason if each else after_colon(reason)}")

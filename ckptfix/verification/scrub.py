"""``scrub``: look at one checkpoint of a fleet after another, and read a part of their data, over
many nights.

The structure is that of ``check``. The data are the files that a manifest has digests of; each is
in one subset.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from math import ceil
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any, ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.diagnosis.check import check
from ckptfix.diagnosis.check_report import CLEAN, DIFFERENT, UNFINISHED, VERDICTS
from ckptfix.diagnosis.contents import Contents, FileState, Recorded, readable_manifest
from ckptfix.diagnosis.findings.base import Severity, labelled
from ckptfix.diagnosis.run_page import Cell
from ckptfix.diagnosis.target import Target
from ckptfix.errors import ChangedError, CkptfixError, UsageError
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath, absolute, has_gone, objects_of, relative, stat_of, walk
from ckptfix.storage.opened import opened_part
from ckptfix.storage.parallel import Progress, Share, waiting
from ckptfix.storage.paths import JOURNAL, command, listed_files
from ckptfix.tensors.hashing import FileJob, hash_all
from ckptfix.verification.digests import describe_files, file_without_digest
from ckptfix.verification.scrub_state import Look, Reading, State
from ckptfix.verification.verify import verify
from ckptfix.verification.verify_report import Outcome, after_colon, judge
from ckptfix.wording import (
    Line,
    Printable,
    escape,
    human_size,
    line,
    list_names,
    unchecked_line,
)

_FAILED = "failed"
_DAMAGED = VERDICTS[0]
_REMOVED, _NOT_REACHED = "removed", "not reached"
ORDER = (*VERDICTS, _REMOVED, _NOT_REACHED)
_UNREAD = "could not be read: "
_TENSORS = "tensors of all models"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of ``6h``, ``30d`` or ``1h30m``. Raises UsageError for anything else."""
    parts = re.findall(r"(\d+)([dhms])", text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise UsageError(f"{option} {text}: expected a time such as 6h, 30d or 1h30m")
    return float(sum(int(number) * _UNITS[unit] for number, unit in parts))


def parse_subset(text: str, option: str = "--read-data-subset") -> tuple[Share, ...]:
    """Return the subsets to choose from: ``I/N`` is one, ``P%`` any of 100/P, and ``0%`` none.

    Raises UsageError for anything else.
    """
    if "/" in text:
        return (Share.parse(text, option),)
    number = text.removesuffix("%")
    if (
        text == number
        or not re.fullmatch(r"\d{1,3}(\.\d+)?", number)
        or not (0.01 <= float(number) <= 100 or not float(number))
    ):
        raise UsageError(
            f"{option} {text}: expected a percentage such as 5% (0%, or 0.01% to 100%), or a share "
            "I/N such as 0/7"
        )
    total = ceil(100 / float(number)) if float(number) else 0
    return tuple(Share(one, total) for one in range(total))


class Data(Serialized, Struct, frozen=True, kw_only=True):
    """The files of a checkpoint with a digest. ``read``: in this run; ``before``: earlier, as they
    still are.

    The rest was never read as it is. ``oldest``: when the file was read that was read first, 0.0
    for none. ``due``: how many files were left out because the time was over.
    """

    json_keys: ClassVar = (
        "files bytes=nbytes read read_bytes before never due stopped oldest=oldest_text"
    )

    # 0.5.0 stopped within files; scripts may still ask for the key.
    stopped: ClassVar = 0

    files: int = 0
    nbytes: int = 0
    read: int = 0
    read_bytes: int = 0
    before: int = 0
    due: int = 0
    oldest: float = 0.0

    @property
    def never(self) -> int:
        """The number of files that were never read as they are."""
        return self.files - self.read - self.before

    @property
    def oldest_text(self) -> str | None:
        """The time of the oldest reading, None for none."""
        return moment(self.oldest) if self.oldest else None

    def plus(self, other: "Data") -> "Data":
        """Return the sum of two."""
        names = ("files", "nbytes", "read", "read_bytes", "before", "due")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Data(**sums, oldest=min(filter(None, (self.oldest, other.oldest)), default=0.0))

    def __str__(self) -> str:
        if not self.files:
            return "no digests"
        since = f" (since {moment(self.oldest)[:10]})" if self.before else ""
        return (
            f"files with digests: {self.read} of {self.files} read in this run "
            f"({human_size(self.read_bytes)} of {human_size(self.nbytes)}), {self.before} "
            f"earlier{since}, {self.never} never"
        )


class ScrubResult(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Result for one checkpoint. ``structure``: what ``check`` found, as JSON values; ``looked``:
    when, 0.0 for never.

    ``is_kept``: it was found by an earlier run. ``differences``: files -> how they differ from the
    manifest. ``verdict``: in a word. ``data``: None where this run did not reach it.
    """

    json_keys: ClassVar = (
        "path status verdict looked=looked_text kept=is_kept findings differences unfinished "
        "not_checked data"
    )

    path: AnyPath
    verdict: str
    structure: Mapping[str, Any] = field(default_factory=dict)
    looked: float = 0.0
    is_kept: bool = False
    differences: Mapping[str, str] = field(default_factory=dict)
    data: Data | None = None

    @property
    def status(self) -> int:
        """Exit status: 3 for what could not be read, else 1 for damage, else 0."""
        of_data = (3 if words.startswith(_UNREAD) else 1 for words in self.differences.values())
        return max(int(self.structure.get("status", 0)), *of_data, 0)

    @property
    def findings(self) -> list[Mapping[str, str]]:
        """Findings of ``check``, as JSON values."""
        return list(self.structure.get("findings", ()))

    @property
    def unfinished(self) -> list[str]:
        """Files that ``check`` could not read, in words."""
        return list(self.structure.get("unfinished", ()))

    @property
    def not_checked(self) -> list[str]:
        """Checks that were left out, in words; digests are compared here."""
        words = self.structure.get("not_checked", ())
        return [one for one in words if not one.startswith("digests in ")]

    @property
    def looked_text(self) -> str | None:
        """The time of the look, None for none."""
        return moment(self.looked) if self.looked else None

    def lines(self) -> Iterator[Line]:
        """Yield the verdict, what is wrong, and what to do."""
        if self.verdict == _NOT_REACHED:
            return  # they are counted
        if self.verdict == _REMOVED:
            yield line(f"{self.path}: removed during this run")
            return
        when = f" (on {moment(self.looked)[:10]})" if self.is_kept and self.looked else ""
        data = f"data: {self.data}" if self.data is not None else "not reached in this run"
        yield line(f"{self.path}: {self.verdict}{when}; {data}", bold=bool(self.status))
        yield from self.problems(self.path)
        yield from self.unchecked_lines()

    def problems(self, place: AnyPath | str) -> Iterator[Line]:
        """Yield what is wrong with the checkpoint at ``place``, and the next step."""
        serious = [
            one
            for one in self.findings
            if one["severity"] != Severity.NOTE.value or self.verdict == DIFFERENT
        ]
        yield from (
            labelled(Severity(one["severity"]), one["code"], one["message"]) for one in serious
        )
        yield from (
            line(f" differs {name}: {after_colon(words)}", colour="red")
            for name, words in self.differences.items()
        )
        yield from (
            line(f"could not finish: {words}", colour="yellow") for words in self.unfinished
        )
        if serious or self.differences:
            yield line(f"next: {command('verify' if self.differences else 'check', place)}")

    def unchecked_lines(self) -> Iterator[Line]:
        """Yield what ``check`` left out."""
        yield from map(unchecked_line, self.not_checked)


class Scrub(Struct, kw_only=True):
    """One run. ``subset``: the files to read, None for none. ``since``: looks and readings from
    then on count still.

    ``until``: by the clock of ``monotonic``; no checkpoint and no file is begun later, and a file
    that was begun is read to its end. ``total``: the data of all. ``kept``: how many checkpoints an
    earlier run alone has looked at; ``unknown``: how many no run has reached.
    """

    state: State
    scope: str
    subset: Share | None
    since: float
    until: float
    siblings: Siblings
    progress: Progress | None = None
    total: Data = field(default_factory=Data)
    kept: int = 0
    unknown: int = 0
    without_digests: int = 0
    is_late: bool = False
    _lock: Any = field(default_factory=Lock)

    def look(self, path: AnyPath) -> ScrubResult:
        """Look at a checkpoint, or return what an earlier run found. Raises CkptfixError,
        OSError.
        """
        place = escape(str(absolute(path)))
        last = self.state.last(place)
        if self._is_late():
            if last is not None:
                return _kept(path, last)
            with self._lock:
                self.unknown += 1
            return ScrubResult(path=path, verdict=_NOT_REACHED)
        try:
            result, look, readings, gone = self._look(path, place, last)
        # Of those that nobody has foreseen, too: nothing is known of this one.
        except Exception as error:
            if isinstance(error, CkptfixError | OSError) and has_gone(path):
                # A run keeps its last checkpoints only.
                return ScrubResult(path=path, verdict=_REMOVED)
            verdict = {
                "verdict": _FAILED,
                "structure": {"status": 3, "unfinished": [escape(str(error))]},
            }
            self.state.keep(self.scope, Look(place, time(), 0.0, "", verdict), {})
            raise
        self.state.keep(self.scope, look, readings, gone)
        with self._lock:
            if result.data is not None:
                self.total = self.total.plus(result.data)
                self.without_digests += not result.data.files
            self.kept += result.is_kept
        return result

    def _look(
        self, path: AnyPath, place: str, last: Look | None
    ) -> tuple[ScrubResult, Look, Mapping[str, Reading], list[str]]:
        files, fingerprint = _files(path)
        now = time()
        before = self.state.readings(place)
        if (
            last is not None
            and last.fingerprint == fingerprint
            and self._counts(last.looked)
            and not last.verdict["structure"].get("unfinished")  # it may be readable now
            # The verdict on a checkpoint without weights depends on those next to it.
            and not any(one.get("bare") for one in last.verdict["structure"].get("findings", ()))
        ):
            units = _units_again(files, before, last)
            if units is not None and not any(
                self._is_due(place, key, before[key]) for key in units
            ):
                # all is known by the listing and the state: nothing is opened, and nothing made of
                # a listing
                data, _, differences = self._tally(place, units, before, lambda key: "")
                known = last.verdict["differences"]
                differences = {key: known[key] for key in known if key not in before} | differences
                result = _judged(
                    path, last.verdict["structure"], last.looked, differences, data, True
                )
                return result, _look_of(result, place, now, fingerprint), {}, []
        else:
            last = None
        with opened_part(path) as folder:
            found = self._look_into(folder, place, now, files, fingerprint, before, last)
        if not found[0].is_kept and _files(path)[1] != fingerprint:
            raise ChangedError(
                f"{path} changed while it was checked, so it has no verdict; the next run checks "
                "it again"
            )
        return found

    def _look_into(
        self, root: AnyPath, place: str, now: float, files: "_Files", fingerprint: str,
        before: Mapping[str, Reading], last: Look | None,
    ) -> tuple[ScrubResult, Look, Mapping[str, Reading], list[str]]:  # fmt: skip
        """Look at a checkpoint and read what is due. ``last``: the last look, where it counts
        still.
        """
        structure: Mapping[str, Any]
        if last is not None:
            structure, looked = last.verdict["structure"], last.looked
        else:
            report = check(root, siblings=self.siblings, progress=self.progress).alone()
            document, looked = report.as_json(), now
            structure = {
                key: document[key]
                for key in ("verdict", "status", "findings", "not_checked", "unfinished", "counts")
            }
        recorded = Recorded(readable_manifest(root), Target(root, None))
        own = {name: state for name, state in files.items() if not _is_own(name)}
        contents = Contents(
            root=root, files={name: FileState(*state[:2]) for name, state in own.items()}
        )
        differences = {}
        known = _Known(
            contents, recorded, {name: str(state) for name, state in own.items()}, fingerprint
        )
        if recorded.manifest is not None:
            for name in sorted(
                (own.keys() | recorded.sizes.keys() | recorded.sha256.keys()) - known.files
            ):
                item = file_without_digest(name, contents, recorded)
                if item.outcome is Outcome.DIFFER:
                    differences[escape(name)] = item.text
        data, fresh, problems = self._tally(
            place, known.units, before, lambda key: known.read(key, self.progress)
        )
        is_kept = last is not None and not fresh
        result = _judged(root, structure, looked, differences | problems, data, is_kept)
        gone = sorted(before.keys() - known.units.keys())
        unread = {
            key: Reading(mark, 0.0, "")
            for key, (_, mark) in known.units.items()
            if key not in before or before[key].fingerprint != mark
        }
        return result, _look_of(result, place, now, fingerprint), unread | fresh, gone

    def _counts(self, moment: float) -> bool:
        """Return whether a look or a reading counts still. One of a clock that was wrong would
        count for years.
        """
        return self.since <= moment <= time()

    def _is_due(self, place: str, key: str, one: Reading | None) -> bool:
        """Return whether a unit is to be read now."""
        is_old = one is None or not self._counts(one.read) or one.problem.startswith(_UNREAD)
        return is_old and self.subset is not None and self.subset.holds(f"{place}/{key}")

    def _tally(
        self, place: str, units: Mapping[str, tuple[int, str]], before: Mapping[str, Reading],
        read: Callable[[str], str],
    ) -> tuple[Data, dict[str, Reading], dict[str, str]]:  # fmt: skip
        """Read the units that are due, as long as there is time.

        Return their numbers, the readings, and how units differ by all readings.
        """
        fresh: dict[str, Reading] = {}
        problems: dict[str, str] = {}
        data = Data(files=len(units), nbytes=sum(size for size, _ in units.values()))
        for key, (size, mark) in sorted(units.items()):
            one = before.get(key)
            if one is not None and (one.fingerprint != mark or not one.read):
                one = None
            if self._is_due(place, key, one):
                if self._is_late():
                    data = replace(data, due=data.due + 1)
                else:
                    with waiting():  # its threads read and hash
                        problem = read(key)
                    one = fresh[key] = Reading(mark, time(), problem)
                    data = replace(data, read=data.read + 1, read_bytes=data.read_bytes + size)
            if one is not None:
                if key not in fresh:
                    data = replace(data, before=data.before + 1)
                data = replace(data, oldest=min(one.read, data.oldest or one.read))
                if one.problem:
                    problems[key] = one.problem
        return data, fresh, problems

    def _is_late(self) -> bool:
        self.is_late |= monotonic() >= self.until
        return self.is_late


def _kept(path: AnyPath, last: Look) -> ScrubResult:
    """Return what an earlier run found of a checkpoint that this one does not reach."""
    verdict = last.verdict
    is_clean = verdict["verdict"] == CLEAN
    return ScrubResult(
        path=path, verdict=_NOT_REACHED if is_clean else verdict["verdict"],
        structure=verdict["structure"], looked=last.looked, is_kept=True,
        differences=verdict.get("differences", {}),
    )  # fmt: skip


def cell_of(look: Look, begun: float) -> Cell:
    """Return what the page shows of a checkpoint. What was last seen before ``begun`` is of an
    earlier run.
    """
    verdict, structure = look.verdict, look.verdict.get("structure", {})
    result = ScrubResult(
        path=Path(look.place), verdict=verdict["verdict"], structure=structure,
        differences=verdict.get("differences", {}),
    )  # fmt: skip
    data, about = verdict.get("data"), "no digests, so the data cannot be checked"
    if data and data["files"]:
        read = data["files"] - data["never"]
        since = f" since {str(data['oldest'])[:10]}" if read else ""
        about = f"files with digests: {read} of {data['files']} read{since}"
    return Cell(
        look.place, result.verdict, structure.get("counts", {}).get("bytes", 0), about,
        tuple(result.problems(look.place)), is_old=look.seen < begun,
    )  # fmt: skip


def _judged(
    path: AnyPath, structure: Mapping[str, Any], looked: float, differences: Mapping[str, str],
    data: Data, is_kept: bool,
) -> ScrubResult:  # fmt: skip
    verdict = structure["verdict"]
    if any(not words.startswith(_UNREAD) for words in differences.values()):
        verdict = _DAMAGED
    elif differences and not structure["status"]:
        verdict = UNFINISHED
    return ScrubResult(
        path=path, verdict=verdict, structure=structure, looked=looked, differences=differences,
        is_kept=is_kept, data=data,
    )  # fmt: skip


def _look_of(result: ScrubResult, place: str, now: float, fingerprint: str) -> Look:
    """Return what the state keeps of a result."""
    assert result.data is not None
    verdict = {
        "verdict": result.verdict, "structure": result.structure, "differences": result.differences,
        "data": result.data.as_json(),
    }  # fmt: skip
    return Look(place, now, result.looked, fingerprint, verdict)


_Files = Mapping[str, tuple[int, int, str]]
"""Size, time and ETag of each file."""


def _is_own(name: str) -> bool:
    """Return whether a file is one of ckptfix itself."""
    return name.startswith(f"{JOURNAL}/")


def _files(root: AnyPath) -> tuple[_Files, str]:
    """Return size, time and ETag of every file, and a fingerprint of the complete listing."""
    listed = objects_of(root)
    if listed is not None:
        return _files_listed(listed)
    found: dict[str, tuple[int, int, str]] = {}
    names: dict[str, str | None] = listed_files(root)
    own = (folder / name for folder, _, inside in walk(root / JOURNAL) for name in inside)
    names |= dict.fromkeys(sorted(str(relative(path, root)) for path in own))
    for name, why in names.items():
        if why is None:
            try:
                status = stat_of(root / name)
            except OSError as error:
                names[name] = str(error.strerror)
            else:
                found[name] = (status.st_size, status.st_mtime_ns, "")
    return found, _fingerprint((name, why or found[name]) for name, why in names.items())


def _files_listed(listed: Mapping[str, Any]) -> tuple[_Files, str]:
    """Return the same of a folder of a listing: as it would be on this machine."""
    names = sorted(name for name in listed if JOURNAL not in name.split("/")[:-1])
    names += sorted(name for name in listed if _is_own(name))
    found = {
        name: (listed[name].size, listed[name].modified_ns, listed[name].etag) for name in names
    }
    return found, _fingerprint(found.items())


def _fingerprint(states: Iterable[tuple[str, object]]) -> str:
    digest = hashlib.sha256()
    for name, state in states:
        digest.update(f"{escape(name)}\n{state}\n".encode())
    return digest.hexdigest()


def _units_again(
    files: _Files, before: Mapping[str, Reading], last: Look
) -> dict[str, tuple[int, str]] | None:
    """Return the units of an unchanged checkpoint by the state alone, None where it does not know
    all of them.
    """
    data = last.verdict.get("data")
    if not data or data["files"] != len(before):
        return None
    sizes = {escape(name): state[0] for name, state in files.items() if not _is_own(name)}
    total = sum(sizes.values())
    return {key: (sizes.get(key, total), one.fingerprint) for key, one in before.items()}


class _Known:
    """The digests of a checkpoint. ``files``: those that have one and are there; ``units``: key ->
    size and mark, where a key is an escaped name.

    A save that knew the digests of its tensors alone is read as one unit.
    """

    def __init__(
        self, contents: Contents, recorded: Recorded, states: Mapping[str, str], fingerprint: str
    ) -> None:
        self._contents, self._recorded = contents, recorded
        self.files = recorded.sha256.keys() & contents.files.keys()
        self.units = {
            escape(name): (contents.files[name].size, f"{states[name]} {recorded.sha256[name]}")
            for name in self.files
        }
        self._names = {escape(name): name for name in self.files}
        if not recorded.sha256 and any(recorded.tensors.values()):
            self.units[_TENSORS] = (contents.nbytes, fingerprint)

    def read(self, key: str, progress: Progress | None) -> str:
        """Read a unit, and return how it differs from the manifest, "" where it does not."""
        contents, recorded = self._contents, self._recorded
        if key == _TENSORS:
            report = verify(contents.root, progress=progress)
            if report.unfinished or not report.is_verified:
                return f"{_UNREAD}{escape(list_names(report.unfinished) or report.no_digest)}"
            return "; ".join(map(str, report.differences[:3]))
        name = self._names[key]
        size = contents.files[name].size
        scheme = recorded.scheme_of(name, size)
        jobs = scheme.jobs(FileJob(contents.root / name, size))
        found = scheme.joined(list(hash_all(jobs, threads=1, keep_cached=False, progress=progress)))
        if found.problem:
            return f"{_UNREAD}{found.problem}"
        wanted = {name: recorded.sha256[name]}
        judged = judge(wanted, {name: found.digest})
        sizes = {name: (size, recorded.sizes.get(name))}
        return "".join(
            item.text for item in describe_files(judged, wanted, {name: found}, sizes, frozenset())
        )


def moment(seconds: float) -> str:
    """Return a time as ISO 8601 has it, in the zone of this machine."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")

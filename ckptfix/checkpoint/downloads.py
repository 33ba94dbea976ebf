"""Records that the client of the Hugging Face hub leaves next to a download. Nothing is asked of a
network.

``huggingface_hub`` 0.23 to 2.4 writes (``_local_folder.py``, ``file_download.py``,
``_tree_cache.py``):

- into a folder that was named as ``--local-dir``: ``.cache/huggingface/download/FILE.metadata``,
  with the commit, the etag and the time of the download on three lines;
- into its cache: ``models--ORG--NAME/snapshots/COMMIT/FILE``, a link to ``blobs/ETAG`` of the same
  repository, and in ``trees/COMMIT.json`` the digests of all files of the revision (2.x).

An etag of 64 hex digits is the sha256 of a file in LFS or xet, one of 40 is git's id of a blob. A
link in ``blobs/`` can lead on to a file that is named by its xet hash, 64 digits that are not its
sha256: links are followed once.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha1
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.storage.files import (
    AnyPath,
    StorePath,
    absolute,
    folder_entries,
    is_dir,
    is_listed,
    lexists,
    names_in,
    real_path,
    relative,
    stat_of,
    store_of,
    walk,
)
from ckptfix.storage.paths import shell_path
from ckptfix.storage.reading import read_start
from ckptfix.wording import count_of

OF_THE_CLIENT = ".cache/huggingface"
"""Folder of the client in a local folder. It is part of no repository, and no loader reads it."""

_DOWNLOADS = f"{OF_THE_CLIENT}/download"
_MAX_RECORD = 4096
_MAX_TREE = 64 << 20
"""Longest listing of a revision that is read, in bytes; a file takes about 250."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_REPO = re.compile(r"(model|dataset|space|kernel)s--(.+)")
_UNFINISHED = re.compile(r"(?:(?P<name>.+?)\.)?(?P<etag>[^./]+?)(?:\.[0-9a-f]{8})?\.incomplete")
_BLOB = re.compile(r"(?:.*/)?blobs/[0-9a-f]{40,64}")


class HubFile(NamedTuple):
    """The record of one file. ``etag``: its digest. ``time``: when it was downloaded, None where it
    is not recorded.
    """

    etag: str
    commit: str
    time: float | None = None

    @property
    def is_git(self) -> bool:
        """Return whether the digest is git's id of a blob, and not the sha256 of the file."""
        return len(self.etag) == 40


class HubPlace(NamedTuple):
    """The place of a folder in a download.

    ``top``: the folder of the download, or of a snapshot in the cache. ``below``: the path of the
    folder in the repository, "" for its top. ``storage``: the folder of the repository in a cache,
    None for a local folder. ``commit``: the revision of a snapshot. ``repo``: the name of the
    repository, "" where it is not recorded.
    """

    top: AnyPath
    below: str
    storage: AnyPath | None = None
    commit: str = ""
    kind: str = "model"
    repo: str = ""

    def again(self, names: Iterable[str], commit: str, *, force: bool = True) -> str:
        """Return the command that downloads files of the folder alone; all of the revision without
        ``names``.
        """
        words = ["hf", "download", self.repo or "REPO"]
        words += [os.path.join(self.below, name) for name in names]
        words += ["--repo-type", self.kind] if self.kind != "model" else []
        words += ["--revision", commit] if commit else []
        words += ["--force-download"] if force else []
        where = ""
        if self.storage is not None:
            where = f" --cache-dir {shell_path(self.storage.parent)}"
        elif store_of(self.top) is None:
            where = f" --local-dir {shell_path(self.top)}"
        return f"{shlex.join(words)}{where}"


class Download(NamedTuple):
    """The records about a folder. ``files``: path in it -> record. ``unusable``: path -> why it has
    no digest.

    ``copied``: files of a snapshot that are not links: the system has none, or an editor replaced
    one.
    """

    place: HubPlace
    files: Mapping[str, HubFile]
    unusable: Mapping[str, str]
    copied: frozenset[str] = frozenset()


def read_download(root: AnyPath, names: Iterable[str]) -> Download | None:
    """Return the records about a folder, None where the client left none. ``names``: the files that
    are in it.

    The records of a local folder can name files that are gone. One that cannot be read or
    understood gives no digest.
    """
    place = find_place(root)
    if place is None:
        return None
    files: dict[str, HubFile] = {}
    unusable: dict[str, str] = {}
    copied: set[str] = set()
    if place.storage is None:
        for name, path in _records(place):
            try:
                files[name] = _record(path)
            except (OSError, ValueError) as error:
                unusable[name] = f"its download record {path.name} {_reason(error)}"
        return Download(place, files, unusable)
    tree = _tree(place)
    for name in names:
        etag = _linked_blob(root / name, place.storage)
        if etag is None:
            copied.add(name)
            etag = tree.get(os.path.join(place.below, name))
        if etag is None:
            continue
        if _ETAG.fullmatch(etag):
            files[name] = HubFile(etag, place.commit)
        else:
            unusable[name] = (
                f"its blob is named {etag!r}, which is neither a sha256 nor a git object id"
            )
    return Download(place, files, unusable, frozenset(copied & files.keys()))


def find_place(root: AnyPath) -> HubPlace | None:
    """Return the place of a folder in a download, None for a folder that is not part of one."""
    for full in dict.fromkeys((absolute(root), real_path(root))):
        for snapshot in (full, *full.parents):
            storage = snapshot.parent.parent
            repo = _REPO.fullmatch(storage.name)
            if snapshot.parent.name == "snapshots" and repo and _COMMIT.fullmatch(snapshot.name):
                below = str(relative(full, snapshot)) if snapshot != full else ""
                name = repo[2].replace("--", "/")
                return HubPlace(snapshot, below, storage, snapshot.name, repo[1], name)
    here = absolute(root)
    for number, above in enumerate((here, *here.parents)):
        below = str(relative(here, above)) if number else ""
        if is_dir(above / _DOWNLOADS / below):
            if number and not isinstance(root, StorePath):
                above = Path(os.path.normpath(root.joinpath(*[".."] * number)))
            return HubPlace(above if number else root, below)
    return None


def _records(place: HubPlace) -> Iterator[tuple[str, AnyPath]]:
    """Yield every file of a folder that has a record, by its path there, and the record."""
    top = place.top / _DOWNLOADS / place.below
    for folder, _, names in walk(top):
        for name in sorted(names):
            if name.endswith(".metadata"):
                path = folder / name
                yield str(relative(path, top)).removesuffix(".metadata"), path


def _record(path: AnyPath) -> HubFile:
    """Return a record of a local folder. Raises ValueError where it is not three lines with a
    commit and a digest.
    """
    data = read_start(path, _MAX_RECORD + 1)
    if data is None or len(data) > _MAX_RECORD:
        raise ValueError(f"has more than {_MAX_RECORD} bytes" if data else "is not a regular file")
    lines = data.decode("ascii", "replace").splitlines()
    if len(lines) < 3:
        raise ValueError(f"has {count_of(len(lines), 'line')} (expected 3)")
    commit, etag = lines[0].strip(), lines[1].strip()
    if not _COMMIT.fullmatch(commit):
        raise ValueError("has no commit")
    if not _ETAG.fullmatch(etag):
        raise ValueError("has an etag that is neither a sha256 nor a git object id")
    try:
        time = float(lines[2])
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise ValueError("has no timestamp")
    return HubFile(etag, commit, time)


def _reason(error: Exception) -> str:
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


def _linked_blob(path: AnyPath, storage: AnyPath) -> str | None:
    """Return the name of the blob that a file of a snapshot is a link to, None for any other
    file.
    """
    if isinstance(path, StorePath):
        return None
    try:
        target = os.path.join(os.path.realpath(path.parent), os.readlink(path))
    except OSError:
        return None
    folder, name = os.path.split(target)
    is_blob = Path(os.path.realpath(folder)) == real_path(storage / "blobs")
    return name if is_blob else None


def _tree(place: HubPlace) -> dict[str, str]:
    """Return the digests of all files of a revision as the client listed it, {} without a
    listing.
    """
    found: dict[str, str] = {}
    if place.storage is None:
        return found
    with suppress(OSError, ValueError, RecursionError):
        data = read_start(place.storage / "trees" / f"{place.commit}.json", _MAX_TREE + 1)
        document = json.loads(data) if data is not None and len(data) <= _MAX_TREE else None
        if not isinstance(document, dict) or document.get("format_version") != 1:
            return found
        files = document.get("files")
        if not isinstance(files, dict):
            return found
        for name, facts in files.items():
            etag = (
                facts.get("lfs_sha256") or facts.get("blob_id") if isinstance(facts, dict) else None
            )
            if isinstance(etag, str) and _ETAG.fullmatch(etag):
                found[name] = etag
    return found


def is_of_client(folder: AnyPath) -> bool:
    """Return whether a sub-folder holds nothing but the files of the hub's client."""
    if folder.name != OF_THE_CLIENT.partition("/")[0]:
        return False
    try:
        return names_in(folder) == ["huggingface"]
    except OSError:
        return False


def may_be_download(folder: AnyPath, subfolders: Iterable[str]) -> bool:
    """Return whether a folder can be the top of a download, by its names alone."""
    return OF_THE_CLIENT.partition("/")[0] in subfolders or folder.parent.name == "snapshots"


class HalfDownload(NamedTuple):
    """A file whose download did not end, or files of a snapshot whose blobs are missing.

    ``names``: the files, relative to the folder; () where it is not recorded which one it is.
    ``path``: where the bytes are that came, and ``have`` how many; None for links to missing blobs.
    ``again``: the command that downloads it.
    """

    names: tuple[str, ...]
    path: PurePosixPath
    have: int | None
    again: str


def half_downloads(root: AnyPath) -> Iterator[HalfDownload]:
    """Yield the downloads into a folder that did not end, and that no later one completed."""
    with suppress(OSError):
        place = find_place(root)
        if place is not None:
            halves = (
                _half_in_cache(root, place)
                if place.storage is not None
                else _half_local(root, place)
            )
            yield from sorted(halves, key=lambda half: (half.names, half.path))
        lost = tuple(sorted(_dangling(root, deep=place is not None and place.storage is not None)))
        if lost:
            again = ""
            if place is not None and place.storage is not None:
                again = place.again(lost if len(lost) <= 3 else (), place.commit, force=False)
            yield HalfDownload(lost, PurePosixPath(lost[0]), None, again)


def _half_local(root: AnyPath, place: HubPlace) -> Iterator[HalfDownload]:
    top = place.top / _DOWNLOADS / place.below
    walked = [(folder, names) for folder, _, names in walk(top)]
    if not any(name.endswith(".incomplete") for _, names in walked for name in names):
        return
    # Once: read again for each folder, 200 of them took 4 seconds.
    records = _readable(_records(place))
    etags = {record.etag for name, record in records.items() if lexists(root / name)}
    commits = {record.commit for record in records.values()}
    commit = commits.pop() if len(commits) == 1 else ""
    for folder, names in walked:
        unfinished = [name for name in names if name.endswith(".incomplete")]
        if not unfinished:
            continue
        # A lock remains of each file whose download began, so that the hash in the temporary name
        # can be resolved.
        started = {
            name.rpartition(".")[0] for name in names if name.endswith((".lock", ".metadata"))
        }
        hashes = {_short_hash(f"{name}.metadata"): name for name in started}
        largest: dict[str, tuple[int, str]] = {}
        for name in unfinished:
            match = _UNFINISHED.fullmatch(name)
            before, etag = (match["name"] or "", match["etag"]) if match is not None else ("", "")
            called = hashes.get(before, before if before in started else "")
            file = os.path.normpath(relative(folder, top) / called) if called else ""
            is_complete = lexists(root / file) if file else etag in etags
            if not is_complete:
                size = stat_of(folder / name).st_size
                largest[file] = max(largest.get(file, (-1, "")), (size, name))
        for file, (size, name) in largest.items():
            where = relative(folder / name, root)
            files = (file,) if file else ()
            yield HalfDownload(files, where, size, place.again(files, commit, force=False))


def _readable(records: Iterable[tuple[str, AnyPath]]) -> dict[str, HubFile]:
    found = {}
    for name, path in records:
        with suppress(OSError, ValueError):
            found[name] = _record(path)
    return found


def _half_in_cache(root: AnyPath, place: HubPlace) -> Iterator[HalfDownload]:
    if place.storage is None:
        return
    blobs = place.storage / "blobs"
    names = set(names_in(blobs)) if is_listed(blobs) else set[str]()
    unfinished = sorted(name for name in names if name.endswith(".incomplete"))
    if not unfinished:
        return
    files_of: dict[str, list[str]] = {}
    for file, digest in _tree(place).items():
        files_of.setdefault(digest, []).append(file)
    # Clients before 2.0 leave no listing of the revision: its top stands for the folders below it.
    if not files_of and place.below:
        return
    begun = 0 if files_of else _last_change(place)
    largest: dict[str, tuple[int, str]] = {}
    for name in unfinished:
        etag = name.partition(".")[0]
        status = stat_of(blobs / name)
        if etag not in names and status.st_mtime_ns >= begun:
            largest[etag] = max(largest.get(etag, (-1, "")), (status.st_size, name))
    below = f"{place.below}/" if place.below else ""
    for etag, (size, name) in largest.items():
        inside = tuple(
            file.removeprefix(below) for file in files_of.get(etag, ()) if file.startswith(below)
        )
        if files_of and all(lexists(root / file) for file in inside):
            continue  # a file of another revision or folder
        where = relative(blobs / name, real_path(root))
        yield HalfDownload(inside, where, size, place.again(inside, place.commit, force=False))


def _last_change(place: HubPlace) -> float:
    """Return when the last file came to a revision, infinity where one came to another revision
    since.

    A half file that is older is left over from an earlier download. It may be of any file, and no
    file here lacks it.
    """
    with folder_entries(place.top.parent) as listing:
        times = {entry.name: entry.stat().st_mtime_ns for entry in listing if entry.is_dir()}
    own = times.get(place.top.name, 0)
    return own if own >= max(times.values(), default=0) else math.inf


def _dangling(root: AnyPath, *, deep: bool) -> Iterator[str]:
    """Yield the links to blobs that are missing, in a folder, and with ``deep`` in those below
    it.
    """
    if isinstance(root, StorePath):  # a store has no links
        return
    for folder in (walked[0] for walked in os.walk(root)) if deep else (root,):
        with os.scandir(folder) as listing:
            links = [entry.path for entry in listing if entry.is_symlink()]
        for link in links:
            if not os.path.exists(link) and _BLOB.fullmatch(os.readlink(link)):
                yield os.path.relpath(link, root)


def _short_hash(name: str) -> str:
    """Return the hash of a file's name that the client puts into the name of the unfinished
    file.
    """
    from base64 import urlsafe_b64encode  # every check imports this module

    return urlsafe_b64encode(sha1(name.encode(), usedforsecurity=False).digest()).decode()

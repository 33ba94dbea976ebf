"""Digests that the client of the Hugging Face hub recorded of a download, in the place of a
manifest.

A record proves which bytes the hub has, but not that nobody edited them since: a changed file of
weights is damage, and a changed text file, such as ``config.json``, is what users edit. A text with
NUL bytes, or a ``.json`` that cannot be parsed, was not edited by a user. A model that was saved
over its download is not that download any more.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from ckptfix.checkpoint.downloads import OF_THE_CLIENT, Download, read_download
from ckptfix.checkpoint.filenames import names_weights, parse_file_name
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG
from ckptfix.diagnosis.contents import Contents, Recorded
from ckptfix.diagnosis.target import Target
from ckptfix.storage.files import store_of
from ckptfix.storage.paths import command, shell_path
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.hashing import GIT, WHOLE, Scheme
from ckptfix.verification.verify_report import Change, Downloaded, Item, Kind, Outcome, file_item
from ckptfix.wording import list_names, series

_BY_GIT = Scheme(algorithm=GIT)

_EDITABLE = (".json", ".jsonl", ".md", ".py", ".txt")
"""Suffixes of texts that users edit, even where the hub keeps them in LFS, such as a long
``tokenizer.json``.
"""

_LONGEST_EDIT = 64 << 20
"""Bytes of the longest file that counts as edited by a user."""

_UNVOUCHED = "has no digest from the hub, so it cannot be verified"

_CLOCK = 1.0
"""Seconds by which the time of a file may be later than its record; ``huggingface_hub`` allows as
many.
"""


class RecordedByHub(Recorded):
    """The records of the hub's client about a folder, or about a single file in it.

    ``contents``: the folder without the files of the client itself.
    """

    source = "the download records"

    def __init__(
        self, download: Download, contents: Contents, target: Target, weights: frozenset[str]
    ) -> None:
        # Only existing files: users delete some to save space, and such a file is not searched
        # under other names.
        there = {name: file for name, file in download.files.items() if name in contents.files}
        sums = {name: file.etag for name, file in there.items()}
        super().__init__(Manifest(versions={}, world_size=0, step=0, sha256=sums), target)
        self.contents = contents
        self._download = download
        self._there = {name: file for name, file in there.items() if name in self.sha256}
        self._weights = weights
        self._gone = sorted(download.files.keys() - there.keys() - contents.special.keys())
        self._has_times = download.place.storage is None and store_of(target.root) is None

    @property
    def sha256_names(self) -> list[str]:
        """The files whose sha256 is recorded."""
        return [name for name, file in self._there.items() if not file.is_git]

    def scheme_of(self, name: str, size: int) -> Scheme:
        """Return how a file is hashed to be compared: by sha256, or as git does."""
        return _BY_GIT if name in self._there and self._there[name].is_git else WHOLE

    def unlisted(self, name: str) -> tuple[bool, str]:
        """Return that a file without a digest does not count as a difference, and the words
        for it.
        """
        why = self._download.unusable.get(name)
        return False, f"cannot be verified: {why}" if why else _UNVOUCHED

    def judged(self, items: Iterable[Item]) -> tuple[tuple[Item, ...], Downloaded, str]:
        """Return the items of files as a user sees them, the download, and why its records say
        nothing, or "".
        """
        found = [self._judged(item) for item in items if item.kind is Kind.FILE]
        if self.only is None and not (self.contents.weights or self.contents.unreadable):
            found += [
                file_item(name, Outcome.DIFFER, Change.MISSING, "is missing; it was downloaded")
                for name in filter(_is_of_weights, self._gone)
            ]
        differing = {item.name for item in found if item.outcome is Outcome.DIFFER}
        loaded = {str(path) for one in self.contents.weights for path in one.files}
        own = (loaded & self._weights or self._weights) & self._there.keys()
        lost = bool(own) and own <= differing
        edited = {item.name for item in found if item.outcome is Outcome.EDITED}
        saved = self._saved_here(own, differing, edited)
        files = self._there or self._download.files
        downloaded = Downloaded(
            repo=self._download.place.repo,
            kind=self._download.place.kind,
            revisions=dict(Counter(file.commit for file in files.values()).most_common()),
            unvouched=(
                tuple(sorted(self.contents.files.keys() - self._there.keys()))
                if self.only is None
                else ()
            ),
            gone=tuple(self._gone) if self.only is None else (),
            again=tuple(self._again(sorted(differing - saved.keys()))),
            seal=command("seal", self.contents.root, "", "--force"),
        )
        rest = differing - saved.keys()
        if saved and own.isdisjoint(rest) and all(map(self._is_newer, rest)):
            configs = series(sorted({*saved.values()})[:3])
            why = f"a save overwrote the downloaded weights and {configs} of {downloaded.name}"
            return tuple(map(_unchecked, found)), replace(downloaded, lost_weights=why), why
        if lost and len(own) > 1:
            words = (
                f"no weights match {downloaded.name}: a save overwrote them, or all of them are "
                "damaged"
            )
            downloaded = replace(downloaded, lost_weights=words)
        return tuple(found), downloaded, ""

    def _saved_here(
        self, own: Collection[str], differing: Collection[str], edited: Collection[str]
    ) -> dict[str, str]:
        """Return the weights of models that were saved over their download, each with the config
        that shows it.

        A save writes the config anew together with all weights, and neither a disk nor a copy does.
        The config is next to them, or in a folder above, as for the parts of a model of
        sentence-transformers.
        """
        models: dict[tuple[PurePosixPath, str], set[str]] = {}
        for name in own:
            path = PurePosixPath(name)
            parsed = parse_file_name(path.name)
            is_adapter = (
                parsed is not None
                and parsed.model is not None
                and parsed.model.stem == "adapter_model"
            )
            models.setdefault((path.parent, ADAPTER if is_adapter else CONFIG), set()).add(name)
        saved: dict[str, str] = {}
        for (folder, config), names in models.items():
            near = [str(above / config) for above in (folder, *folder.parents)]
            shown = next((path for path in near if path in edited), "")
            if shown and all(name in differing and self._is_newer(name) for name in names):
                saved |= dict.fromkeys(names, shown)
        return saved

    def not_checked(self) -> Iterator[str]:
        """Yield in words what was downloaded and is not there."""
        if self._gone and self.only is None:
            yield f"files deleted since the download: {list_names(self._gone)}"

    def _judged(self, item: Item) -> Item:
        if item.outcome is not Outcome.DIFFER:
            return item
        newer = self._is_newer(item.name)
        if self._is_edit(item.name):
            text = (
                "is newer than its download"
                if newer
                else f"differs from the hub's text: {item.text.removeprefix('differs: ')}"
            )
            return replace(item, outcome=Outcome.EDITED, text=text)
        if not self._has_times:
            return item
        words = (
            "it is newer than its download: it was overwritten or copied"
            if newer
            else (
                "it is not newer than its download: the disk, a copy or the download itself "
                "damaged it"
            )
        )
        return replace(item, text=f"{item.text}; {words}")

    def _is_newer(self, name: str) -> bool:
        """Return whether a file changed after its download, as far as its time tells: copies are
        new files, too.
        """
        record, state = self._there.get(name), self.contents.files.get(name)
        if not self._has_times or record is None or record.time is None or state is None:
            return False
        return state.mtime_ns / 1e9 - _CLOCK > record.time

    def _is_edit(self, name: str) -> bool:
        """Return whether a file that differs is a text that a user edited, as far as its bytes
        tell.
        """
        path = PurePosixPath(name)
        is_text = name in self._there and (self._there[name].is_git or path.suffix in _EDITABLE)
        if name in self._weights or _is_of_weights(name) or not is_text:
            return False
        size = self.contents.files[name].size
        if not 0 < size <= _LONGEST_EDIT:
            return False
        try:
            with open_reader(self.contents.root / name) as reader:
                text = reader.read(0, size).decode()
            if path.suffix == ".json":
                json.loads(text)
        except (OSError, ValueError, RecursionError):
            return False
        return "\0" not in text

    def _again(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the commands that download files again: one for each revision."""
        by_commit: dict[str, list[str]] = {}
        for name in names:
            record = self._download.files[name]
            by_commit.setdefault(record.commit, []).append(name)
        for commit, files in by_commit.items():
            # A forced download replaces the blob, but never a file of a snapshot that is not a
            # link.
            copied = [
                shell_path(self.contents.root / name)
                for name in files
                if name in self._download.copied
            ]
            first = f"rm {' '.join(copied)} && " if copied else ""
            yield f"{first}{self._download.place.again(files, commit)}"


def _unchecked(item: Item) -> Item:
    return replace(item, outcome=Outcome.NOT_CHECKED, change=None, text=_UNVOUCHED)


def _is_of_weights(name: str) -> bool:
    return names_weights(PurePosixPath(name).name)


def without_client(contents: Contents) -> Contents:
    """Return the contents without the files that the hub's client keeps for itself in a local
    folder.
    """
    own = f"{OF_THE_CLIENT}/"
    return replace(
        contents,
        files={name: state for name, state in contents.files.items() if not name.startswith(own)},
        special={name: why for name, why in contents.special.items() if not name.startswith(own)},
    )


def recorded_download(
    contents: Contents, target: Target, uncovered: Iterable[str]
) -> RecordedByHub | None:
    """Return the records about a folder that was downloaded, None without one of a file of weights.

    Records of a config alone would verify a model without a look at any weight. ``uncovered``:
    files that may hold weights, next to those of the models.
    """
    download = read_download(target.root, contents.files)
    if download is None:
        return None
    weights = frozenset(
        {str(path) for one in contents.weights for path in one.files} | {*uncovered}
    )
    weights = frozenset(name for name in weights if Path(name).suffix != ".json")
    recorded = RecordedByHub(download, without_client(contents), target, weights)
    is_known = not weights.isdisjoint(recorded.sha256)
    is_lost = not weights and target.only is None and any(map(_is_of_weights, download.files))
    return recorded if is_known or is_lost else None

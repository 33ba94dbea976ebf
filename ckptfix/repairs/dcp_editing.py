"""From steps about DCP folders to edits.

A rename writes a new ``.metadata``, which one rename puts in the old one's place. An optimizer's names stand in small
items of its ``.distcp`` files, too: those are written to a new file that the new ``.metadata`` points to, and the old
ones stay where they are. So a reader finds the old names or the new ones, and no tensor's byte is touched.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.dcp import DATA_SUFFIX, FLATTENED, ShardedState
from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.checkpoint.pairing import ShardedPairing, pair_sharded
from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.dcp_items import renamed_item
from ckptfix.formats.dcp_metadata import DcpMetadata
from ckptfix.formats.dcp_names import flattened_parts
from ckptfix.formats.dcp_rewrite import Place, Steps, paths_of, rewrite_metadata
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.safetensors_file import looks_like_safetensors
from ckptfix.repairs.steps import DropEntry, Renumber, RewriteNames
from ckptfix.storage.comparing import Run
from ckptfix.storage.edits import Edit, Move, Remove, Replace
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import ABSENT, KEPT, Literal, Range, Recipe, RecipePart

NEW_DATA = "__ckptfix_{}" + DATA_SUFFIX
"""The file for rewritten items; the first number that is free."""

_OWN = re.compile(r"__ckptfix_[0-9]+\.distcp")


class ShardedWriter:
    """Makes the edits of one plan that are about DCP folders."""

    def __init__(self, root: Path, states: Iterable[ShardedState]) -> None:
        """Prepare to edit the folders of the checkpoint ``root``."""
        self._root = root
        self._states = {state.path: state for state in states}
        self._by_metadata = {state.metadata_path: state for state in self._states.values()}
        self._made: dict[PurePosixPath, list[PurePosixPath]] = {}
        self._gone: set[PurePosixPath] = set()

    def has(self, path: PurePosixPath) -> bool:
        """Whether this is a DCP folder, or the metadata of one."""
        return path in self._states or path in self._by_metadata

    def rewrite(self, action: RewriteNames) -> list[Edit]:
        """Return the edits that rename. Raises UnsupportedFormat with the reason when they cannot be made."""
        state = self._by_metadata[action.path]
        metadata = self._metadata(state)
        self._check_no_names_in_data(state, metadata)
        edits: list[Edit] = []
        places: dict[str, Place] = {}
        items = list(self._renamed_items(state, metadata, action.maps))
        if items:
            name = self._free_name(state)
            data = b""
            for item, new in items:
                places[item.fqn] = Place(name.relative_to(state.path), len(data), len(new))
                data += new
            like = self._root / state.path / items[0][0].path
            edits.append(Replace(path=name, content=Recipe.like(like, (Literal(data),)), previous=ABSENT))
            self._made.setdefault(state.path, []).append(name)
        renamed = rewrite_metadata(metadata, new_paths(state, metadata, action.maps), places)
        content = Recipe.like(self._root / action.path, (Literal(renamed.data),))
        edits.append(Replace(path=action.path, content=content, previous=KEPT))
        for path in _superseded(state, metadata, places):
            edits.append(Remove(path=path, previous=KEPT))
            self._gone.add(path)
        return edits

    def drop(self, action: DropEntry) -> list[Edit]:
        """Return the edits that remove every file of a double."""
        dropped, kept = self._states[action.path], self._states[action.kept]
        pairing = pair_sharded(kept, dropped)
        if pairing is None:
            raise FormatError(f"{action.path} no longer has the names of {action.kept}")
        return [
            Remove(path=path, previous=KEPT)
            if file.is_linked or path == dropped.metadata_path or self._is_behind_links(pairing, path)
            else Remove(path=path, previous=self._recipe(pairing, path))
            for path, file in dropped.files.items()
        ]

    def move(self, action: Renumber) -> list[Edit]:
        """Return the edits that move every file of a folder into one that is there, and empty by then."""
        state = self._states[action.source]
        files = [path for path in state.files if path not in self._gone]
        files += self._made.get(action.source, [])
        return [Move(source=path, target=action.target / path.relative_to(action.source)) for path in files]

    def _metadata(self, state: ShardedState) -> DcpMetadata:
        """Return the metadata that was planned with. Raises FormatError when the file is no longer that."""
        assert state.metadata is not None  # else it has no names that could change
        with open_reader(self._root / state.metadata_path) as reader:
            data = reader.read(0, reader.size)
        if data[: state.metadata.tree.end] != state.metadata.tree.data:
            raise FormatError(f"{state.metadata_path} is not what it was when it was read")
        return state.metadata

    def _check_no_names_in_data(self, state: ShardedState, metadata: DcpMetadata) -> None:
        for name, items in metadata.items_by_file().items():
            path = state.path / name
            file, item = state.files.get(path), next((one for one in items if one.offsets is not None), None)
            if file is None or item is None or item.offset + 9 > file.size:
                continue
            with open_reader(self._root / path) as reader:
                if looks_like_safetensors(reader.read(item.offset, 9)):
                    raise UnsupportedFormat(f"{path} holds safetensors, which have the names in them, too")

    def _renamed_items(
        self, state: ShardedState, metadata: DcpMetadata, maps: Mapping[tuple[tuple[str, ...], str], KeyMap]
    ) -> Iterator[tuple[StoredItem, bytes]]:
        """Yield the items whose names change, each with its new bytes."""
        changes: dict[str, dict[int, str]] = {}  # one item can be several places
        for key, place in state.listed.items():
            key_map = maps.get(key)
            if key_map is not None:
                names = {site: key_map(name) for site, name in place.names if key_map(name) != name}
                changes.setdefault(place.fqn, {}).update(names)
        for fqn, names in changes.items():
            item = metadata.stored[fqn, None]
            if names:
                with open_reader(self._root / state.path / item.path) as reader:
                    yield item, renamed_item(reader, item, names)

    def _free_name(self, state: ShardedState) -> PurePosixPath:
        number = 0
        while state.path / NEW_DATA.format(number) in state.files:
            number += 1
        return state.path / NEW_DATA.format(number)

    def _is_behind_links(self, pairing: ShardedPairing, path: PurePosixPath) -> bool:
        """Whether the bytes that stay are elsewhere than in the files of the folder: they may go any time."""
        return pairing.kept.is_linked or any(
            pairing.kept.files[kept].is_linked for kept, other in pairing.runs if other == path
        )

    def _recipe(self, pairing: ShardedPairing, path: PurePosixPath) -> Recipe:
        """Return how a file of the double is made again from ranges of the files that stay."""
        ranges: list[tuple[Run, PurePosixPath]] = [
            (run, kept) for (kept, other), runs in pairing.runs.items() if other == path for run in runs
        ]
        pieces: list[RecipePart] = []
        position = 0
        with open_reader(self._root / path) as reader:
            for run, kept in sorted(ranges, key=lambda one: one[0].offset_b):
                if run.offset_b < position:
                    continue  # two names of one item
                if run.offset_b > position:
                    pieces.append(Literal(reader.read(position, run.offset_b - position)))
                pieces.append(Range(kept, run.offset_a, run.length))
                position = run.offset_b + run.length
            if position < reader.size:
                pieces.append(Literal(reader.read(position, reader.size - position)))
        return Recipe.like(self._root / path, tuple(pieces))


def _superseded(
    state: ShardedState, metadata: DcpMetadata, places: Mapping[str, Place]
) -> Iterator[PurePosixPath]:
    """Yield the files of an earlier repair of which every item has moved to a new one."""
    for name, items in metadata.items_by_file().items():
        path = state.path / name
        is_own = path in state.files and _OWN.fullmatch(path.name)
        if is_own and all(item.offsets is None and item.fqn in places for item in items):
            yield path


def new_paths(
    state: ShardedState, metadata: DcpMetadata, maps: Mapping[tuple[tuple[str, ...], str], KeyMap]
) -> dict[str, Steps]:
    """Return the paths that change: in each place of names one step is a name of a parameter, or holds one.

    Other keys beside the names of a model stay: they are the user's own.
    """
    places = [
        (scope, len(scope.path), _new_steps(scope, maps[scope.path, scope.kind]))
        for scope in state.scopes
        if (scope.path, scope.kind) in maps and (scope.path, scope.kind) not in state.listed
    ]
    found: dict[str, Steps] = {}
    for fqn, path in paths_of(metadata).items():
        for scope, depth, new_step in places:
            step = path[depth] if len(path) > depth else None
            if isinstance(step, str) and tuple(map(str, path[:depth])) == scope.path:
                new = new_step(step)
                if new is not None:
                    if new != step:
                        found[fqn] = (*path[:depth], new, *path[depth + 1 :])
                    break
    return found


def _new_steps(scope: NameScope, key_map: KeyMap) -> Callable[[str], str | None]:
    """Return what gives the new key for one in a place of names; None for a key that is of something else."""
    names = frozenset(scope.names)

    def of_name(step: str) -> str | None:
        return key_map(step) if step in names else None

    def of_flattened(step: str) -> str | None:
        parts = flattened_parts(step, names)
        return None if parts is None else parts[0] + key_map(parts[1]) + parts[2]

    return of_flattened if scope.kind == FLATTENED else of_name

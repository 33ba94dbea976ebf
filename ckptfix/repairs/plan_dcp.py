"""Plan of the renames in DCP folders, and the reasons why some keys stay.

All folders change together or none does: otherwise a model, its optimizer and its copies would not
fit each other. So a rename is refused when anything that stays would still hold an old name, or
cannot be read.

A script can use a text in any way. So a text that may hold an old name counts as one: the name
itself, its wrappers with any separators between them, a module on the way to a parameter, or a name
behind other characters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePosixPath

from ckptfix.checkpoint.dcp import DcpFolder, name_scopes, new_paths, optimizers_in
from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    PRIVATE_WRAPPERS,
    WRAPPERS,
    KeyMap,
    collisions,
    common_wrappers,
    dotted,
    without_private_wrappers,
)
from ckptfix.diagnosis.dcp_folders import is_flat, unit_of, unwrapped_names
from ckptfix.diagnosis.findings.duplicates import NestedPrefix, WrapperPrefix
from ckptfix.diagnosis.findings.incomplete import MismatchedNames
from ckptfix.diagnosis.policy import Keys
from ckptfix.diagnosis.wrapped_keys import STATE_DICT
from ckptfix.formats.dcp_metadata import GROUPS_KEY, STATE_KEY, flattened_keys
from ckptfix.formats.dcp_rewrite import paths_of, with_paths
from ckptfix.repairs.steps import Draft, RewriteNames, Safety
from ckptfix.storage.paths import command
from ckptfix.wording import list_names

_GAP = "[^A-Za-z0-9]{1,4}"
"""Pattern of the separators between two segments: a dot, or those of paths, JSON and regular
expressions.
"""

MAX_SLICES = 1 << 22
"""Limit of the compared parts of one text; a longer text counts as one that may hold an old name.
"""


class OldNames:
    """Names that a rename would remove, and the parts of them that a text can hold."""

    def __init__(self, changes: Iterable[tuple[NameScope, KeyMap]]) -> None:
        """Take the places of the names, each with its key map."""
        self._whole: set[str] = set()
        self._modules: set[str] = set()
        self._new: set[str] = set()
        self._keys: set[str] = {STATE_KEY, GROUPS_KEY}
        self._parts: set[str] = set()
        self._fronts: set[str] = set()
        patterns: dict[str, None] = {}
        wrappers: dict[str, None] = {}
        still: set[str] = set()
        for scope, key_map in changes:
            old = {name: new for name in scope.names if (new := key_map(name)) != name}
            if not old:
                continue
            self._keys.update(scope.path)
            self._fronts.add(dotted(key_map.insert))
            self._whole.update(old)
            self._new.update(old.values())
            for name, new in old.items():
                self._modules.update(_modules_of(name))
                still.update(_modules_of(new))
            patterns |= dict.fromkeys(_patterns(scope, old, key_map))
            if len(scope.chain) == 1 and not any(
                new.startswith(dotted(scope.chain)) for new in old.values()
            ):
                wrappers[f"(?<![A-Za-z0-9]){scope.chain[0]}[.]"] = None
            # Below a nested chain, every part begins with it.
            if len(scope.chain) < 2 or key_map.inner:
                self._parts.update(_plain(name) for name in old)
        self._modules -= still
        self._lengths = sorted({len(name) for name in self._parts})
        self._chains = re.compile("|".join(patterns)) if patterns else None
        # Correct names of another model may begin with it.
        self._one_wrapper = re.compile("|".join(wrappers)) if wrappers else None

    def in_text(self, text: str, *, is_name: bool, is_key: bool) -> str | None:
        """Return the old name, or the part of one, that a text may hold.

        ``is_name``: it is a name in a place of names. ``is_key``: a key of the state dict that was
        saved.
        """
        if text in self._whole:
            return text
        if not text or text in self._new:
            return None
        if text in self._modules and not (is_key and text in self._keys):
            return text
        for pattern in (self._chains,) if is_name else (self._chains, self._one_wrapper):
            if pattern is not None and (match := pattern.search(text)) is not None:
                return self._longest(text, match.start()) or match[0]
        return self._part(_plain(text), is_name=is_name) if self._parts else None

    def is_whole(self, part: str) -> bool:
        """Return whether a text is a complete old name, not only a part of one."""
        return part in self._whole

    def _longest(self, text: str, begin: int) -> str | None:
        """Return the longest old name that begins at a place of a text."""
        lengths = sorted({len(name) for name in self._whole}, reverse=True)
        parts = (text[begin : begin + length] for length in lengths)
        return next((part for part in parts if part in self._whole), None)

    def _part(self, text: str, *, is_name: bool) -> str | None:
        """Return the old name that is a part of a text, from the edge of a word to one."""
        begins = [match.start() for match in _EDGE.finditer(text)]
        if len(begins) * len(self._lengths) > MAX_SLICES:
            return text[:100]
        for begin in begins:
            if not self._may_begin(text, begin, is_name=is_name):
                continue
            for length in self._lengths:
                end = begin + length
                if end > len(text):
                    break
                part = text[begin:end]
                if part not in self._parts or text[end : end + 1].isalnum():
                    continue
                # Some of torch's own words contain names of parameters: "weight_decay".
                if "." in part or "_" not in (text[begin - 1 : begin], text[end : end + 1]):
                    return part
        return None

    def _may_begin(self, text: str, begin: int, *, is_name: bool) -> bool:
        """Return whether a name at this place is neither the end of a new one nor that of another
        name.
        """
        if any(front and text.endswith(front, 0, begin) for front in self._fronts):
            return False
        if not is_name or begin == 0 or text[begin - 1] != ".":
            return True
        return text[:begin].split(".")[-2] in WRAPPERS | {STATE_KEY, GROUPS_KEY}


_EDGE = re.compile(r"(?<![^\W_])[\w.]")


def _modules_of(name: str) -> Iterable[str]:
    """Return the modules that lead to a parameter."""
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def _plain(text: str) -> str:
    """Return a text with a dot for every separator of its words."""
    return re.sub(r"\W+", ".", text)


def _patterns(scope: NameScope, old: dict[str, str], key_map: KeyMap) -> Iterable[str]:
    chain = scope.chain
    if len(chain) > 1 and not all(new.startswith(dotted(chain)) for new in old.values()):
        yield _GAP.join(chain) + "(?![A-Za-z0-9]|_(?!_))"
        yield "_".join(chain) + "_"
    if key_map.inner:
        segments = {segment for name in old for segment in name.split(".")[:-1]}
        yield from sorted(segments & PRIVATE_WRAPPERS)


PlaceMaps = dict[tuple[tuple[str, ...], str], KeyMap]
"""(path, kind) of a place of names -> its key map."""


def objections(
    draft: Draft, kept: Sequence[DcpFolder], maps: Mapping[PurePosixPath, PlaceMaps]
) -> Iterator[str]:
    """Yield why the names of these folders must stay; ``maps``: the planned key maps of each
    folder.
    """
    for state in kept:
        if state.path in maps:
            yield from _of_folder(draft, state)
            yield from _of_names(state, maps[state.path])
            yield from _read_again(state, maps[state.path])
    changing = {unit_of(state) for state in kept if state.path in maps}
    for unit in changing:
        states = [state for state in kept if unit_of(state) == unit]
        for state in states:
            yield from _unread(state)
            yield from _of_other_models(state, maps.get(state.path, {}))
        yield from _unproven(states, maps)
        yield from _left_over(states, maps)
        yield from _parted(states, maps)
        yield from _unclear(states, maps)


def _of_folder(draft: Draft, state: DcpFolder) -> Iterator[str]:
    where = state.metadata_path
    if state.path in draft.doubles:
        yield (
            f"{state.path} is a duplicate of {draft.doubles[state.path]}; remove the duplicate "
            "first"
        )
    if state.is_linked:
        yield f"{state.path} is a symbolic link to a folder: repair that folder"
    if state.siblings:
        parent = draft.folder.root.resolve().parent
        yield (
            f"it is part of the checkpoint {parent}, and the keys of "
            f"{list_names(state.siblings)} would no longer match: {command('repair', parent)}"
        )
    if unsafe := sorted(draft.unsafe.intersection(state.files)):
        yield f"a file with an unsafe pickle is never edited: {unsafe[0]}"
    if is_flat(state):
        yield (
            f"{where} has keys of FSDP's flattened parameters, which only the run itself can "
            "resolve"
        )


def _of_names(state: DcpFolder, maps: PlaceMaps) -> Iterator[str]:
    for scope in state.scopes:
        key_map = maps.get((scope.path, scope.kind))
        if key_map is None:
            continue
        for first, second, new in collisions(scope.names, key_map):
            yield f"{first!r} and {second!r} would both become {new!r}"
        if key_map.inner and common_wrappers(map(key_map, scope.names)) != key_map.insert:
            yield (
                "without the inner wrappers, every key would still start with a wrapper, so it "
                "is unclear which wrappers are real"
            )
        if scope.is_model and (keys := _keys_beside(state, scope, key_map)):
            yield (
                f"keys that do not belong to the model would be renamed with it: {list_names(keys)}"
            )


def _read_again(state: DcpFolder, maps: PlaceMaps) -> Iterator[str]:
    """Yield the names that would be mistaken: "state.w" next to options of a group is read as an
    optimizer's.
    """
    if state.metadata is None:
        return
    for scope in state.scopes:
        new = _mapped(scope, maps)
        if scope.kind != STATE_DICT and new != list(scope.names) and all(map(str.isdecimal, new)):
            yield (
                f"{new[0]!r:.200} in {scope} of {state.metadata_path} would look like the "
                "parameter number of an optimizer"
            )
            return
    listed = state.listed.keys()
    changed = new_paths(state, state.metadata, maps)
    places = [place for place in state.scopes if (place.path, place.kind) not in listed]
    want = {(scope.path, scope.kind): _mapped(scope, maps) for scope in places}
    paths = paths_of(state.metadata)
    if renamed_optimizers := set(optimizers_in(paths.values())) ^ set(
        optimizers_in([changed.get(fqn, path) for fqn, path in paths.items()])
    ):
        where = "".join(f"[{step!r}]" for step in min(renamed_optimizers, key=repr))
        yield (
            f"after the rename, {where or 'all'} of {state.metadata_path} would look like "
            "another kind of state"
        )
        return
    have = {
        (scope.path, scope.kind): list(scope.names)
        for scope in name_scopes(with_paths(state.metadata, changed))
    }
    scopes = {(scope.path, scope.kind): scope for scope in places}
    for place in (*want, *(place for place in have if place not in want)):
        if (old := want.get(place, [])) != (again := have.get(place, [])) or place not in want:
            lost = sorted(set(old) ^ set(again)) or old or again or [str(place[0])]
            where = str(scopes.get(place, "")) or "the model"
            yield (
                f"{lost[0]!r:.200} would no longer be recognized as a key of {where} of "
                f"{state.metadata_path}: next to the other keys it looks like a key of an "
                "optimizer or of a model"
            )
            return


def _mapped(scope: NameScope, maps: PlaceMaps) -> list[str]:
    key_map = maps.get((scope.path, scope.kind))
    return list(scope.names if key_map is None else map(key_map, scope.names))


def _unproven(
    states: Sequence[DcpFolder], maps: Mapping[PurePosixPath, PlaceMaps]
) -> Iterator[str]:
    """Yield a place whose names would get a wrapper without proof that they are names of
    parameters.
    """
    known = frozenset(
        without_private_wrappers(name)
        for state in states
        for scope in state.scopes
        if scope.kind == STATE_DICT
        for name in unwrapped_names(scope)
    )
    for state in states:
        for scope in state.scopes:
            key_map = maps.get(state.path, {}).get((scope.path, scope.kind))
            if key_map is None or scope.chain:
                continue
            words = f"nothing shows that {scope} of {state.metadata_path} holds parameter keys"
            if scope.kind == STATE_DICT and not {STATE_KEY, GROUPS_KEY}.isdisjoint(scope.path):
                yield f"{words}: it is inside an optimizer, and the keys have no wrapper"
            elif scope.kind != STATE_DICT and known:
                stray = next(
                    (name for name in scope.names if without_private_wrappers(name) not in known),
                    None,
                )
                if stray is not None:
                    yield f"{words}: no model has {stray!r:.200}"


def _keys_beside(state: DcpFolder, scope: NameScope, key_map: KeyMap) -> tuple[str, ...]:
    """Return the keys in a model's dict that are not names of the model and that the map would
    change.
    """
    if state.metadata is None:
        return ()
    depth, names = len(scope.path), frozenset(scope.names)
    steps = {
        str(path[depth]): None
        for path in paths_of(state.metadata).values()
        if len(path) > depth and tuple(map(str, path[:depth])) == scope.path
    }
    own = names | flattened_keys(steps)  # the place of the optimizer covers them
    return tuple(step for step in steps if step not in own and key_map(step) != step)


def _unread(state: DcpFolder) -> Iterator[str]:
    where = state.metadata_path
    if state.problem is not None:
        yield f"{where} cannot be read, so its keys would not be renamed: {state.problem.message}"
    elif state.metadata is None:
        yield f"{where} is missing, so the keys in {state.path} would not be renamed"
    for fqn, why in state.unread.items():
        yield f"{fqn!r:.200} of {where} may contain old keys, but cannot be read: {why}"


def _of_other_models(state: DcpFolder, maps: PlaceMaps) -> Iterator[str]:
    """Yield why several state dicts of one folder stay as they are: only the script knows their
    purpose.
    """
    dicts = [scope for scope in state.scopes if scope.kind == STATE_DICT]
    first = next((scope for scope in dicts if scope.is_model), dicts[0] if dicts else None)
    for scope in dicts:
        key_map = maps.get((scope.path, scope.kind))
        lead = maps.get((first.path, first.kind)) if first is not None else None
        if key_map is None or (scope is first and scope.is_model):
            continue
        words = f"{state.metadata_path} holds several state dicts, including {scope}"
        if len(dicts) == 1:
            words = f"{scope} of {state.metadata_path}"
        if not scope.chain:
            yield f"{words}: nothing shows that this is a model, because its keys have no wrapper"
        elif lead is None:
            yield (
                f"{words}, but {first} would not be renamed: it is unclear whether both had the "
                "same wrappers"
            )
        elif lead.insert != key_map.insert:
            yield (
                f"{words}, but {first} would get other wrappers: it is unclear which wrappers "
                "are real"
            )


def _unclear(states: Sequence[DcpFolder], maps: Mapping[PurePosixPath, PlaceMaps]) -> Iterator[str]:
    """Yield the optimizer whose model is unknown: it has the names of none, and would not fit all
    of them.
    """
    places = [(state, scope) for state in states for scope in state.scopes if scope.names]
    models = [(state, scope) for state, scope in places if scope.kind == STATE_DICT]
    for state, scope in places if len(models) > 1 else ():
        if scope.kind == STATE_DICT or (scope.path, scope.kind) not in maps.get(state.path, {}):
            continue
        names = frozenset(unwrapped_names(scope))
        own = [
            (owner, model) for owner, model in models if names <= frozenset(unwrapped_names(model))
        ]
        if any(frozenset(model.names).issuperset(scope.names) for _, model in own):
            continue
        new = frozenset(_renamed(state, scope, maps))
        if len(own) > 1 and not all(
            new <= frozenset(_renamed(owner, model, maps)) for owner, model in own
        ):
            yield (
                f"it is unclear whether {scope} of {state.metadata_path} belongs to {own[0][1]} "
                f"or to {own[1][1]}"
            )


def _left_over(
    states: Sequence[DcpFolder], maps: Mapping[PurePosixPath, PlaceMaps]
) -> Iterator[str]:
    """Yield each old name that would stay in a key, or in an object that is not read."""
    old = OldNames(
        (scope, key_map)
        for state in states
        for scope in state.scopes
        if (key_map := maps.get(state.path, {}).get((scope.path, scope.kind))) is not None
    )
    names = frozenset(name for state in states for scope in state.scopes for name in scope.names)
    for state in states:
        for word, is_key in _words_that_stay(state, maps.get(state.path, {})):
            part = old.in_text(word, is_name=word in names, is_key=is_key)
            if part is None:
                continue
            where = "an item that is not renamed" if word == part else f"{word!r:.200}"
            if old.is_whole(part):
                yield (
                    f"{state.metadata_path} would still contain the old key {part!r:.200}, in "
                    f"{where}"
                )
            else:
                yield (
                    f"{state.metadata_path} may still contain an old key: {part!r:.200} is in "
                    f"{where}"
                )
            return


def _words_that_stay(state: DcpFolder, maps: PlaceMaps) -> Iterator[tuple[str, bool]]:
    """Yield each text that is not renamed, and whether it is a key of the saved state dict."""
    if state.metadata is None:
        return
    words: dict[str, None] = {}
    changed = new_paths(state, state.metadata, maps)
    for fqn, path in paths_of(state.metadata).items():
        new = changed.get(fqn, path)
        words.update(
            (step, None)
            for step, kept in zip(path, new, strict=True)
            if step == kept and type(step) is str
        )
    yield from ((word, True) for word in words)
    for place, item in state.listed.items():
        key_map = maps.get(place, KeyMap(remove=()))
        yield from ((name, False) for _, name in item.names if key_map(name) == name)
    yield from ((word, False) for word in sorted(state.said))


def _parted(states: Sequence[DcpFolder], maps: Mapping[PurePosixPath, PlaceMaps]) -> Iterator[str]:
    """Yield the places where an optimizer has the names of its model now, and would not after the
    renames.
    """
    places = [(state, scope) for state in states for scope in state.scopes if scope.names]
    for state, model in places:
        if model.kind != STATE_DICT:
            continue
        known, renamed = frozenset(model.names), frozenset(_renamed(state, model, maps))
        for optimizer, scope in places:
            if known.issuperset(scope.names) and not renamed.issuperset(
                _renamed(optimizer, scope, maps)
            ):
                yield (
                    f"the keys in {scope} of {optimizer.metadata_path} would no longer match "
                    f"those of {state.metadata_path}"
                )


def _renamed(
    state: DcpFolder, scope: NameScope, maps: Mapping[PurePosixPath, PlaceMaps]
) -> Iterator[str]:
    key_map = maps.get(state.path, {}).get((scope.path, scope.kind))
    return iter(scope.names) if key_map is None else map(key_map, scope.names)


def plan_dcp_names(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan the renames in all DCP folders that stay."""
    kept = [state for state in draft.sharded if state.path not in dropped]
    maps = {state.path: own for state in kept if (own := _key_maps(draft, state))}
    if not maps:
        return
    renamed = [state for state in kept if state.path in maps]
    objection = next(objections(draft, kept, maps), None)
    objection = objection or draft.undecided(state.metadata_path for state in renamed)
    for state in renamed:
        code = _code_of(draft, state)
        if objection is not None:
            draft.stay(code, (state.metadata_path,), objection)
            continue
        changes = list(_changes(state, maps[state.path]))
        action = RewriteNames(
            path=state.metadata_path,
            maps=maps[state.path],
            add_format=False,
            renames=len(changes),
            example=changes[0],
        )
        asked = draft.policy.keys is not Keys.AUTO or code in draft.policy.allow
        safety = Safety.LOSSY if asked else Safety.SAFE
        draft.add(action, code, safety, tuple(state.files), renamed[0].metadata_path)


def _key_maps(draft: Draft, state: DcpFolder) -> PlaceMaps:
    keys = {
        finding.scope: finding
        for finding in draft.findings_of(state.metadata_path)
        if isinstance(finding, NestedPrefix | MismatchedNames)
    }
    maps: PlaceMaps = {}
    for scope in state.scopes:
        key_map = _asked_for(draft, state, scope)
        if key_map is None and (finding := keys.get(str(scope))) is not None:
            key_map = KeyMap(remove=finding.chain, insert=finding.target)
        if key_map is not None and any(key_map(name) != name for name in scope.names):
            maps[scope.path, scope.kind] = key_map
    return maps


def _asked_for(draft: Draft, state: DcpFolder, scope: NameScope) -> KeyMap | None:
    """Return the key map that ``--keys`` or ``--allow wrapper-prefix`` asks for, if any."""
    policy = draft.policy
    if policy.keys is Keys.AUTO and WrapperPrefix.code not in policy.allow:
        return None
    is_damage = (state.metadata_path, str(scope)) in draft.nested
    if not policy.wants(NestedPrefix.code if is_damage else WrapperPrefix.code):
        return None
    inner = common_wrappers(map(without_private_wrappers, scope.names))
    return KeyMap(remove=inner, insert=DDP_CHAIN if policy.keys is Keys.DDP else (), inner=True)


def _changes(state: DcpFolder, maps: PlaceMaps) -> Iterator[tuple[str, str]]:
    for scope in state.scopes:
        key_map = maps.get((scope.path, scope.kind))
        for name in scope.names if key_map is not None else ():
            if key_map is not None and (new := key_map(name)) != name:
                yield name, new


def _code_of(draft: Draft, state: DcpFolder) -> str:
    codes = {finding.code for finding in draft.findings_of(state.metadata_path)}
    order = (NestedPrefix.code, MismatchedNames.code, WrapperPrefix.code)
    return next((code for code in order if code in codes), WrapperPrefix.code)

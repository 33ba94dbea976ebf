"""Where an old name may still be: in any text that stays, whatever stands around the name in it.

Nothing tells what a script does with a text. So one that may hold an old name is one: the name itself, the wrappers
that go with any separators between them, a module on the way to a parameter, or a name with something in front of it.
"""

import re
from collections.abc import Iterable
from itertools import accumulate

from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import PRIVATE_WRAPPERS, WRAPPERS, KeyMap, dotted
from ckptfix.formats.dcp_names import GROUPS_KEY, STATE_KEY

_GAP = "[^A-Za-z0-9]{1,4}"
"""What may stand between two segments: a dot, one of another file's, of JSON, of a regular expression."""

MAX_SLICES = 1 << 22
"""How many parts of one text are looked at; a longer one may hold anything."""


class OldNames:
    """The names that would go, and what of them can be in a text."""

    def __init__(self, changes: Iterable[tuple[NameScope, KeyMap]]) -> None:
        """Take each place of names that change, and how."""
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
            if len(scope.chain) == 1 and not any(new.startswith(dotted(scope.chain)) for new in old.values()):
                wrappers[f"(?<![A-Za-z0-9]){scope.chain[0]}[.]"] = None
            if len(scope.chain) < 2 or key_map.inner:  # else any part of a text begins with the chain
                self._parts.update(_plain(name) for name in old)
        self._modules -= still
        self._lengths = sorted({len(name) for name in self._parts})
        self._chains = re.compile("|".join(patterns)) if patterns else None
        # Another model's names may begin with it and be right.
        self._one_wrapper = re.compile("|".join(wrappers)) if wrappers else None

    def in_text(self, text: str, *, is_name: bool, is_key: bool) -> str | None:
        """Return the old name, or the part of one, that a text may hold.

        ``is_name``: it is a name in a place of names. ``is_key``: a key of the state dict that was saved.
        """
        if text in self._whole:
            return text
        if not text or text in self._new:
            return None
        if text in self._modules and not (is_key and text in self._keys):
            return text
        for pattern in (self._chains,) if is_name else (self._chains, self._one_wrapper):
            if pattern is not None and (found := pattern.search(text)) is not None:
                return self._longest(text, found.start()) or found[0]
        return self._part(_plain(text), is_name=is_name) if self._parts else None

    def is_whole(self, part: str) -> bool:
        """Whether what was found is an old name, not only a part of one."""
        return part in self._whole

    def _longest(self, text: str, begin: int) -> str | None:
        """Return the old name that begins at a place of a text, the longest one."""
        lengths = sorted({len(name) for name in self._whole}, reverse=True)
        parts = (text[begin : begin + length] for length in lengths)
        return next((part for part in parts if part in self._whole), None)

    def _part(self, text: str, *, is_name: bool) -> str | None:
        """Return the old name that is a part of a text, from the edge of a word to one."""
        begins = [found.start() for found in _EDGE.finditer(text)]
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
                # Words of torch's own are made of the names of parameters: "weight_decay".
                if "." in part or "_" not in (text[begin - 1 : begin], text[end : end + 1]):
                    return part
        return None

    def _may_begin(self, text: str, begin: int, *, is_name: bool) -> bool:
        """Whether a name at this place is neither the end of a new one nor that of another name."""
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
    """Return a text with a dot for whatever parts its words."""
    return re.sub(r"\W+", ".", text)


def _patterns(scope: NameScope, old: dict[str, str], key_map: KeyMap) -> Iterable[str]:
    chain = scope.chain
    if len(chain) > 1 and not all(new.startswith(dotted(chain)) for new in old.values()):
        yield _GAP.join(chain) + "(?![A-Za-z0-9]|_(?!_))"
        yield "_".join(chain) + "_"
    if key_map.inner:
        segments = {segment for name in old for segment in name.split(".")[:-1]}
        yield from sorted(segments & PRIVATE_WRAPPERS)

"""Changes to classes and modules of other libraries at run time: rows of a table, which leave no
trace when they are removed.

A replacement takes the place of a method or a function, and calls it. Another library may put its
own in front later, as Unsloth does; removed below that, a replacement only passes calls on.
Nothing heavy is imported here: a table names what it changes, and waits until the script imports
that.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

Method = Callable[..., Any]

_ABSENT: Any = object()


class Patch(NamedTuple):
    """A change. ``where``: "module:Class.method" or "module:function", imported now or later.

    ``around``: takes the original, and returns its replacement. ``everywhere``: a function
    that other modules import by name, so that each of them gets the replacement. ``is_new``: a method
    that the class lacks.
    """

    where: str
    around: Callable[[Method], Method]
    everywhere: bool = False
    is_new: bool = False

    @property
    def module(self) -> str:
        """The module that holds what is changed."""
        return self.where.partition(":")[0]

    def owner(self) -> Any:
        """Return the class or the module that is changed, None before its import.

        Looked up without ``getattr``: transformers imports what it is asked for.
        """
        module = sys.modules.get(self.module)
        kind = self.where.partition(":")[2].rpartition(".")[0]
        return vars(module).get(kind) if module is not None and kind else module

    @property
    def name(self) -> str:
        """The name of the method or the function."""
        return self.where.rpartition(":")[2].rpartition(".")[2]


class _Switch:
    """A flag that all replacements of one installation share: off, they only pass calls on."""

    is_on = True


class _Replacement(NamedTuple):
    """A replacement where it was put. ``original``: what it replaces."""

    owner: Any
    name: str
    original: Any
    itself: Method
    everywhere: bool


class Patches:
    """Changes that are installed and removed together."""

    def __init__(self, *patches: Patch) -> None:
        """Take the table; nothing is changed before ``install``."""
        self._patches = patches
        self._replacements: list[_Replacement] = []
        self._switch: _Switch | None = None
        self._is_watching = False

    @property
    def is_installed(self) -> bool:
        """True between ``install`` and ``remove``."""
        return self._switch is not None

    def install(self) -> None:
        """Put the replacements in place, now or when their modules are imported. Again, it changes
        nothing.
        """
        self._switch = self._switch or _Switch()
        if self._is_watching:
            self._put_all()
            return
        self._is_watching = True
        for module in dict.fromkeys(patch.module for patch in self._patches):
            when_imported(module, self._put_all)

    def remove(self) -> None:
        """Put the originals back. Below those of others, a replacement passes calls on."""
        if self._switch is not None:
            self._switch.is_on = False
        self._switch = None
        for replacement in reversed(self._replacements):
            if vars(replacement.owner).get(replacement.name) is replacement.itself:
                _set(replacement.owner, replacement.name, replacement.original)
            if replacement.everywhere:
                _replace_everywhere(replacement.itself, replacement.original)
        self._replacements.clear()

    def put(
        self,
        owner: Any,
        name: str,
        around: Callable[[Method], Method],
        *,
        everywhere: bool = False,
        is_outermost: bool = False,
    ) -> None:
        """Put one replacement in place of a method or function of ``owner`` itself, or add it.

        ``is_outermost``: in front of what others put there since an earlier call, too.
        """
        ours = [
            each.itself for each in self._replacements if each.owner is owner and each.name == name
        ]
        original = vars(owner).get(name, _ABSENT)
        if original in ours or (ours and not is_outermost):
            return
        switch = self._switch = self._switch or _Switch()
        guarded = around(original)
        replacement = guarded
        if original is not _ABSENT:

            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return (guarded if switch.is_on else original)(*args, **kwargs)

        self._replacements.append(_Replacement(owner, name, original, replacement, everywhere))
        setattr(owner, name, replacement)
        if everywhere:
            _replace_everywhere(original, replacement)

    def _put_all(self) -> None:
        """Change what is there: transformers imports one of its modules after the other."""
        for patch in self._patches if self._switch is not None else ():
            owner = patch.owner()
            # A module that is half imported lacks what it will define.
            if owner is not None and (patch.is_new or patch.name in vars(owner)):
                self.put(owner, patch.name, patch.around, everywhere=patch.everywhere)


@contextmanager
def replaced(thing: Any, **attributes: Any) -> Iterator[None]:
    """Give an object or a module other attributes for a while, whether they are its own or its
    class's.
    """
    before = {name: vars(thing).get(name, _ABSENT) for name in attributes}
    vars(thing).update(attributes)
    try:
        yield
    finally:
        for name, original in before.items():
            if vars(thing).get(name) is attributes[name]:
                _set(thing, name, original)


def _set(owner: Any, name: str, original: Any) -> None:
    if original is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _replace_everywhere(old: Any, new: Any) -> None:
    """Put a function in the place of another in every module that has imported it, under whatever
    name.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Do something as soon as a module has been imported; at once when it is there already."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name not in sys.modules:
        sys.meta_path.insert(0, _Watcher(name, action))
    elif type(spec) in (ModuleSpec, _SpecUnderWay) and getattr(spec, "_initializing", False):
        _SpecUnderWay.follow(spec, action)
    else:
        action()


class _SpecUnderWay(ModuleSpec):
    """Takes the place of a spec's class until its module, which is half imported, is there as a
    whole.

    ``from transformers import Trainer`` imports accelerate from within ``transformers.trainer``.
    """

    @classmethod
    def follow(cls, spec: Any, action: Callable[[], None]) -> None:
        """Have an action follow the end of the import under way."""
        spec.__class__ = cls
        vars(spec).setdefault("_actions", []).append(action)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; python's import sets this one last, whether it has failed or not."""
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            object.__setattr__(self, "__class__", ModuleSpec)
            for action in vars(self).pop("_actions"):
                when_imported(self.name, action)


class _Watcher(MetaPathFinder):
    """Finds one module as the others find it, and has an action follow its import.

    It stays until the import is done: transformers looks for accelerate long before it imports it.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._asking = False

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Follower(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _Follower(Loader):
    """Loads a module with its own loader, and then does something."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()

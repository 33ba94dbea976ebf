"""Opening of what a user names: a path of this machine, or a URL whose prefix is listed.

Nothing of object stores is imported before the first URL comes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptfix.errors import ChangedError, CkptfixError, UsageError
from ckptfix.storage.files import AnyPath, Openable, StorePath, is_url, local_path

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def open_files(
    path: Openable, *, complete: bool = True, lists: bool = False, is_thrifty: bool = False
) -> Iterator[AnyPath]:
    """Yield the path of a folder or file; a URL is listed, and read until the end of the block.

    ``complete``: refuse a prefix with objects that no folder can hold; else ``unheld_below``
    returns them. ``lists``: it may hold thousands of checkpoints; ``opened_part`` opens one of
    them. ``is_thrifty``: as in a block of ``sparing``.

    Raises UsageError where a URL has no object, StoreError; at the end the first failure of the
    store, also one that was caught on its way: what was not read is not ok.
    """
    if isinstance(path, StorePath):
        yield path
        return
    path = local_path(path)
    assert not isinstance(path, StorePath)
    if not is_url(path):
        if not os.fspath(path):  # Path("") would be the current folder
            raise UsageError("the path is empty: name a checkpoint; is a shell variable unset?")
        yield Path(path)
        return
    from ckptfix.storage.store_files import open_prefix

    place = open_prefix(str(path), complete=complete, lists=lists, is_thrifty=is_thrifty)
    with place.files.watched() if not lists else nullcontext():
        try:
            yield place
        finally:
            place.files.close()


def takes_urls(
    *names: str, complete: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a verb take URLs for these parameters, which are its first ones or keywords; lists may
    hold some. It gets them opened by ``open_files``.

    A file in one of these places that is gone when the verb opens it raises ChangedError.
    """

    def decorate(verb: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(verb)
        def opening(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with ExitStack() as stack:
                places: list[Any] = [
                    _placed(given, stack, complete) if at < len(names) else given
                    for at, given in enumerate(args)
                ]
                words: dict[str, Any] = {
                    name: _placed(given, stack, complete) if name in names else given
                    for name, given in kwargs.items()
                }
                try:
                    return verb(*places, **words)
                except FileNotFoundError as error:
                    folders = (*places[: len(names)], *(words.get(name) for name in names))
                    if _is_gone(error.filename, folders):
                        raise ChangedError(
                            f"{error.filename} disappeared: another process changes its folder; "
                            "next: wait until that process has ended, then run the same command "
                            "again"
                        ) from error
                    raise

        return opening

    return decorate


def _placed(given: Any, stack: ExitStack, complete: bool) -> Any:
    """Return what was given with its URLs opened until the end of the stack."""
    if isinstance(given, list | tuple):
        return [_placed(each, stack, complete) for each in given]
    return stack.enter_context(open_files(given, complete=complete)) if is_url(given) else given


def _is_gone(missing: Any, folders: Iterable[Any]) -> bool:
    """Return whether a missing file was in one of these folders. A link to nothing is damage, and a
    file that exists again was renamed meanwhile.
    """
    return (
        isinstance(missing, str | Path)
        and not os.path.islink(missing)
        and any(
            Path(os.path.abspath(missing)).is_relative_to(os.path.abspath(folder))
            for folder in folders
            if isinstance(folder, str | Path)
        )
    )


@contextmanager
def opened_part(path: AnyPath) -> Iterator[AnyPath]:
    """Yield the path of one checkpoint of a listing, to be read in this block; any other path as it
    is. One next to the prefix that was opened is listed first.

    Raises at the end what the store failed to answer in the block.
    """
    if not isinstance(path, StorePath):
        yield path
        return
    if path.key is None:
        with open_files(path.url, complete=False, is_thrifty=path.files.is_thrifty) as place:
            yield place
        return
    if not path.files.lists:
        with path.files.watched():
            yield path
        return
    files = path.files.below(path.key)
    with files.watched():
        try:
            yield StorePath(files, files.url)
        finally:
            files.close()


def with_place(value: Any, old: Path, new: StorePath | str) -> Any:
    """Return a result with another place in all its texts and paths: a verb that works on a copy
    here is asked about a URL.
    """
    if isinstance(value, str):
        return value.replace(str(old), str(new))
    if isinstance(value, Path):
        if not value.is_relative_to(old):
            return value
        below = str(value.relative_to(old))
        if isinstance(new, StorePath):
            return new / below
        return new if below == "." else f"{new}/{below}"
    if isinstance(value, Mapping):
        return {with_place(key, old, new): with_place(of, old, new) for key, of in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_place(part, old, new) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(with_place(part, old, new) for part in value)
    if isinstance(value, Struct):
        parts = asdict(value).items()
        return replace(value, **{name: with_place(of, old, new) for name, of in parts})
    return value


@contextmanager
def errors_with_place(old: Path, new: StorePath | str) -> Iterator[None]:
    """Let errors that pass through name another place, as of ``with_place``."""
    try:
        yield
    except (CkptfixError, OSError) as error:
        error.args = with_place(error.args, old, new)
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = with_place(error.filename, old, new)
        raise

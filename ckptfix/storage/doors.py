"""Doors of the verbs: a URL that comes in becomes the path of its image, and goes out in messages
as a URL again.

Nothing of object stores is imported before the first URL comes.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.paths import existing
from ckptfix.wording import escape, shown

_IMAGES = "ckptfix.storage.images"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def looks_like_url(path: object) -> bool:
    """Return whether a path can be a URL; no checkpoint on this machine is named so."""
    scheme, found, _ = path.partition("://") if isinstance(path, str) else ("", "", "")
    return bool(found) and "/" not in scheme


def local_path(path: Any) -> Any:
    """Return the path that a ``file://`` URL names, and anything else as it is. Raises
    UsageError.
    """
    if not isinstance(path, str) or not path.startswith("file://"):
        return path
    place = path.removeprefix("file://").removeprefix("localhost")
    if not place.startswith("/"):  # never the current folder, or one below it
        raise UsageError(f"{escape(path)} names no file of this machine: expected file:///PATH")
    return place


def takes_urls(
    *names: str, complete: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a verb take URLs for these parameters, which are its first ones or keywords; lists may
    hold some.

    ``complete``: refuse a prefix with objects that no folder can hold; the verb does not report
    them by itself.
    """

    def decorate(verb: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(verb)
        def opening(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: list[Any] = [*args[: len(names)], *(kwargs.get(name) for name in names)]
            if not any(
                looks_like_url(part) for one in given for part in (one if _is_list(one) else [one])
            ):
                return verb(*args, **kwargs)
            with ExitStack() as images:

                def local(one: Any) -> Any:
                    if _is_list(one):
                        return [local(part) for part in one]
                    if not looks_like_url(one):
                        return one
                    return images.enter_context(opened(one, complete=complete))

                places: list[Any] = [
                    local(one) if at < len(names) else one for at, one in enumerate(args)
                ]
                words: dict[str, Any] = {
                    name: local(one) if name in names else one for name, one in kwargs.items()
                }
                return verb(*places, **words)

        return opening

    return decorate


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _images() -> Any:
    """Return the module of images, None before the first URL. One that another thread is importing
    is waited for.
    """
    return import_module(_IMAGES) if _IMAGES in sys.modules else None


@contextmanager
def watched(path: str | Path) -> Iterator[None]:
    """Raise a failure of the store at the end even where it was caught on its way: what was not
    read is not ok.
    """
    images = _images()
    before = images.count_failures(path) if images is not None else 0
    yield
    if images is not None:
        images.raise_failure(path, since=before)


def etag_of(path: Path) -> str:
    """Return the ETag of the object at a path of an image, "" of a file on this machine."""
    images = _images()
    info = images.info_at(path) if images is not None else None
    return info.etag if info is not None else ""


@contextmanager
def made(path: str) -> Iterator[str]:
    """Yield the folder of a path that ``opened`` has listed alone, and remove it at the end; any
    other path as it is.

    The block is ``watched``.
    """
    images = _images()
    if images is None or not path or looks_like_url(path):  # Path("") would be the current folder
        yield path
        return
    with images.made(Path(path)) as place, watched(place):
        yield str(place)


def states_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the facts about every object in and below a folder that ``opened`` has listed alone,
    None for others.
    """
    images = _images()
    return images.states_at(folder) if images is not None else None


def has_gone(folder: Path) -> bool:
    """Return whether nothing is there any more at a path, which may be one that ``opened`` has
    listed alone.
    """
    if states_of(folder) is None:
        return not os.path.lexists(folder)
    try:
        return bool(sys.modules["ckptfix.storage.images"].has_gone(folder))
    except CkptfixError:
        return False


@contextmanager
def opened(path: str, *, complete: bool = True, lists: bool = False) -> Iterator[Path]:
    """Yield the path of the image of a URL, which is removed at the end; any other path as it is.

    An error that passes through names the URL. ``lists``: the objects are listed alone, ``made``
    makes the folders of some of them, and that they can be read is watched there.
    """
    path = local_path(path)
    if not looks_like_url(path):
        yield (
            Path(path) if path else existing(path)
        )  # raises: Path("") would be the current folder
        return
    from ckptfix.storage import images

    place = images.listing_of(path) if lists else images.image_of(path, complete=complete)
    try:
        with nullcontext() if lists else watched(place):
            yield place
    except (CkptfixError, OSError) as error:
        error.args = tuple(shown(one) if isinstance(one, str) else one for one in error.args)
        if isinstance(error, OSError) and isinstance(error.filename, str | Path):
            error.filename = shown(str(error.filename))
        raise
    finally:
        images.release(place)

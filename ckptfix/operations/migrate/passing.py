"""Which places a path leads through, link by link: all of them must stay for what is at its end to be found."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckptfix.operations.migrate.config import json_object

_MOST_LINKS = 40
"""As many as Linux follows before it takes them for a circle."""

_CONFIG = "adapter_config.json"


def passed_by(path: Path) -> Iterator[Path]:
    """Yield every place that is looked up on the way to a path, each with a parent that has no link in it.

    Those of links come before those that the links lead to; the last is where the path ends.
    """
    waiting = [*reversed(path.absolute().parts[1:])]
    here, links = Path("/"), 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        yield step
        try:
            target = Path(os.readlink(step))
        except OSError:  # no link
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        here = Path("/") if target.is_absolute() else here
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def base_models(root: Path) -> list[Path]:
    """Return where the model may be that the adapter in a folder needs, by its ``adapter_config.json``.

    peft gives the name to ``from_pretrained``, which takes it for a path from the working directory if there is one;
    it may be meant from the adapter's folder as well.
    """
    name = _named(root / _CONFIG)
    if not name or "\0" in name:
        return []
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return []
    return [root / name, Path(os.path.normpath(root.absolute() / name)), Path.cwd() / name]


def _named(path: Path) -> str | None:
    with suppress(OSError):
        _, values = json_object(path) or (b"", {})
        name = values.get("base_model_name_or_path")
        return name if isinstance(name, str) else None
    return None

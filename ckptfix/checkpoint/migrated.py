"""The receipt that ``migrate`` writes into a folder, as far as ``check`` needs it."""

import json
from typing import NamedTuple

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import RECEIPT
from ckptfix.storage.reading import read_start

_MOST = 64 << 20
"""Longest receipt that is read, in bytes; a file takes about 100."""


class Migrated(NamedTuple):
    """The gaps that a migration left on purpose.

    ``lacks_random_states``: it left out random states, which are those of other ranks.
    ``may_lack_keys``: safetensors files were migrated, which have one key of tied weights, to files
    of which a loader wants both.
    """

    lacks_random_states: bool = False
    may_lack_keys: bool = False


def read_migrated(folder: AnyPath) -> Migrated:
    """Return what the receipt of a folder says, no gap for a folder without a readable receipt."""
    try:
        data = read_start(folder / RECEIPT, _MOST)
        document = json.loads(data or b"")
    except (OSError, ValueError, RecursionError):
        return Migrated()
    if not isinstance(document, dict):
        return Migrated()
    left_out = document.get("left_out")
    names = left_out if isinstance(left_out, list) else []
    parsed = [parse_file_name(name) for name in names if isinstance(name, str)]
    return Migrated(
        lacks_random_states=any(name and name.role is Role.RNG_STATE for name in parsed),
        may_lack_keys=document.get("may_lack_keys") is True,
    )

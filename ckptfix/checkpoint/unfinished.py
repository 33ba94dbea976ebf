"""Files that a copy or a save left under a name of their own when it was cut short."""

import re

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.sharded import UNFINISHED, belongs

_SAVING = re.compile(r"\.tmp[A-Za-z0-9]{6}")
"""Where ``save_file`` of safetensors writes before it renames."""

_COPYING = re.compile(r"\.(.+)\.[A-Za-z0-9]{6}|(.+)\.(?:part|incomplete|tmp)", re.DOTALL)
"""``.NAME.XXXXXX`` of rsync, and what downloads and atomic writers put behind a name."""


def is_unfinished(name: str) -> bool:
    """Whether a file of this name was to become one of a checkpoint. Not DCP's own ``.metadata.tmp``."""
    if name == UNFINISHED:
        return False
    match = _COPYING.fullmatch(name)
    wanted = (match[1] or match[2]) if match else ""
    return bool(_SAVING.fullmatch(name)) or parse_file_name(wanted) is not None or belongs(wanted)

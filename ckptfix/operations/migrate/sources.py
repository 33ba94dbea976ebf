"""That a source is whole before it is read, and the same afterwards."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import describe_folder_name, parse_file_name, parse_folder_name
from ckptfix.checkpoint.folder import Fingerprint
from ckptfix.checkpoint.latest import mixed
from ckptfix.checkpoint.manifest import MANIFEST, Manifest, is_repaired, missing_files
from ckptfix.errors import ChangedError, OperationError
from ckptfix.operations.migrate.beside import LeftOut
from ckptfix.operations.migrate.planning import MigrationPlan
from ckptfix.storage.listing import listed_files
from ckptfix.storage.paths import command, shell_path
from ckptfix.storage.transaction import State, transactions
from ckptfix.weights.stored import StoredCheckpoint

_CALLED_SO = re.compile(
    r"(.+_)?config\.json|.*token.*\.(json|model)|vocab\.(json|txt)|merges\.txt|spiece\.model|"
    r"(model_)?index\.json|chat_template.*|README\.md|LICENSE.*|\.gitattributes|training_args\.bin|"
    r"trainer_state\.json|(scheduler|optimizer|rng_state.*)\.(pt|pth)|latest|zero_to_fp32\.py|"
    r"(__[0-9]+|\.rank[0-9]+)?\.metadata(\.tmp)?|.+\.distcp"
)
"""How libraries call what they put beside weights, and the files of DCP: rather too much than too little."""


class Watch:
    """What every file at a path was before any of it was read, to be compared at the end.

    Raises OSError when a folder cannot be listed.
    """

    def __init__(self, path: Path) -> None:
        self._is_folder = path.is_dir()
        self._root = path if self._is_folder else path.parent
        self._names = self._listed()
        looks = ((name, _look(self._root / name)) for name in self._names)
        self._before = {name: look for name, look in looks if look is not None}
        self._folders = {PurePosixPath(name).parent for name in self._names} | {PurePosixPath(".")}

    def check(self, files: Iterable[str]) -> None:
        """Raise ChangedError when one of these is no longer what it was: the result would be of neither.

        Or when a file has come, since all were looked at, that a checkpoint consists of: the result would lack it.
        """
        for name in files:
            now = _look(self._root / name)
            if now is None or self._before.setdefault(name, now) != now:
                raise self._changed(f"{self._root / name} changed while it was read")
        for name in self._listed() - self._names if self._is_folder else ():
            if self._belongs(PurePosixPath(name)):
                raise self._changed(f"{self._root / name} came while the others were read")

    def _belongs(self, path: PurePosixPath) -> bool:
        """Whether a file is one of a checkpoint that was looked at; a whole new folder below is another's."""
        is_part = bool(path.parts[:-1]) and describe_folder_name(path.parts[0]) is not None
        return is_part or (path.parent in self._folders and _is_called_as_a_part(path.name))

    def _changed(self, what: str) -> ChangedError:
        return ChangedError(f"{what}; nothing was written; run again when nothing writes to it")

    def _listed(self) -> frozenset[str]:
        if not self._root.is_dir():
            return frozenset()  # whoever opens it says so
        return frozenset(listed_files(self._root) if self._is_folder else os.listdir(self._root))


def _is_called_as_a_part(name: str) -> bool:
    return parse_file_name(name) is not None or _CALLED_SO.fullmatch(name) is not None


def _look(path: str | Path) -> Fingerprint | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Fingerprint(status.st_size, status.st_mtime_ns, status.st_ino)


def files_read(plan: MigrationPlan) -> Iterator[str]:
    """Yield every file that a plan reads, relative to the root of its source."""
    yield from {str(file): None for model in plan.source.weights for file in model.files}
    yield from map(str, plan.carried)
    yield from (str(file.path) for file in plan.rewritten)


def ensure_finished(source: StoredCheckpoint) -> None:
    """Raise OperationError, with what to type, when a repair or a save in the source's folder was interrupted."""
    root = source.root
    for one in transactions(root):
        if one.state is State.PENDING or one.problem:
            raise OperationError(
                f"{root}: a repair was interrupted (transaction {one.number}), its files are partly changed; next: "
                f"{command('undo', root)}"
            )
    if words := mixed(root):
        raise OperationError(f"{words}; next: {command('check', root)}")


def ensure_complete(root: Path, manifest: Manifest) -> tuple[LeftOut, ...]:
    """Raise OperationError when files of the checkpoint that its manifest lists are gone, or have another size.

    Returns the other files that were sealed and are gone: the user's own. A repair by a version that did not keep
    sizes true leaves those of the save: then only names are compared.
    """
    wrong = [] if is_repaired(root) else missing_files(root, manifest)
    gone = [name for name in manifest.sha256 if name not in manifest.files and not (root / name).exists()]
    wrong += [f"{name} is missing" for name in gone if _is_of_a_checkpoint(PurePosixPath(name))]
    if wrong:
        raise OperationError(
            f"{root}: {'; '.join(wrong[:3])}: not what its manifest says; next: {command('verify', root)}, or, if the "
            f"folder is as it should be: rm {shell_path(root / MANIFEST)}"
        )
    return tuple(LeftOut(name, "its manifest lists it, and it is not there") for name in gone)


def _is_of_a_checkpoint(path: PurePosixPath) -> bool:
    """Whether a file is one that a checkpoint consists of, by its name or by that of a folder that it lies in."""
    if parse_file_name(path.name) is not None:
        return True
    return any(parse_folder_name(part) is not None for part in path.parts[:-1])

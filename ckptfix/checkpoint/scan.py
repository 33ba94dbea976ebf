"""Read a checkpoint folder: every header, no tensor bytes, nothing unpickled, and no file that stops the rest."""

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import FileName, Role, describe_folder_name, parse_file_name
from ckptfix.checkpoint.folder import (
    PLAIN_FOLDER,
    CheckpointFolder,
    Component,
    Fingerprint,
    NameScope,
    Problem,
    ProblemKind,
)
from ckptfix.checkpoint.keys import common_wrappers
from ckptfix.errors import BeyondLimits, FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.safetensors_file import (
    MAX_INDEX,
    SafetensorsFile,
    WeightsIndex,
    looks_like_safetensors,
    parse_index,
    read_safetensors,
)
from ckptfix.formats.sniff import describe_content, other_format
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.formats.torch_pickle import name_lists, tensor_infos
from ckptfix.storage.paths import JOURNAL, unreadable
from ckptfix.storage.reading import FileReader, open_reader

Content = SafetensorsFile | TorchFile | WeightsIndex


def scan_folder(
    root: Path, only: str | None = None, *, wanted: Callable[[FileName], bool] = lambda name: True
) -> CheckpointFolder:
    """Scan the folder ``root``, or just the file ``only`` in it.

    ``wanted``: by their names, the files to look at; others are neither opened nor returned. Raises OSError when the
    folder itself cannot be listed; an unreadable file becomes a component with a problem.
    """
    components, strays, subfolders = [], [], {}
    ranks: set[int] = set()
    with os.scandir(root) as listing, paused_gc():
        for entry in sorted(listing, key=lambda entry: entry.name):
            path, name = PurePosixPath(entry.name), parse_file_name(entry.name)
            if name is not None and name.rank is not None:
                ranks.add(name.rank)
            if entry.name == JOURNAL or (only is not None and entry.name != only):
                continue
            if name is not None and not wanted(name):
                continue
            if os.path.isdir(
                entry.path
            ):  # and not entry.is_dir(), which raises for a link that leads to itself
                subfolders[path] = describe_folder_name(entry.name) or PLAIN_FOLDER
            elif name is not None or only is not None:
                components.append(_component(root, path, name or _unknown(entry.name)))
            else:
                strays.append(path)
    return CheckpointFolder(
        root=root,
        only=only,
        components=tuple(components),
        strays=tuple(strays),
        subfolders=subfolders,
        ranks=frozenset(ranks),
    )


def fingerprint(path: Path) -> Fingerprint:
    """Return the facts that tell this file from another version of it. Raises OSError."""
    return _fingerprint(os.stat(path))


def _component(root: Path, path: PurePosixPath, name: FileName) -> Component:
    full = root / path
    content: Content | None = None
    problem: Problem | None = None
    status: os.stat_result | None = None
    is_link = False
    try:
        is_link = full.is_symlink()
        status = os.stat(full)
        content, problem = _read(full, status, name)
    except OSError as error:
        problem = Problem(kind=ProblemKind.UNREADABLE, message=unreadable(full, error))
        if is_link and (isinstance(error, FileNotFoundError) or error.errno == errno.ELOOP):
            to = os.readlink(full)  # as in the cache of the hub
            message = f"a broken link: {to} is not there"
            if error.errno == errno.ELOOP:
                message = "a symbolic link that leads to itself"
            problem = replace(problem, kind=ProblemKind.NOT_A_TENSOR_FILE, message=message)
    tensors, scopes = _names(content)
    return Component(
        path=path,
        name=name,
        size=status.st_size if status else 0,
        fingerprint=_fingerprint(status) if status else Fingerprint(0, 0, 0),
        is_linked=is_link or (status is not None and status.st_nlink > 1),
        content=content,
        tensors=tensors,
        scopes=scopes,
        problem=problem,
    )


def _read(full: Path, status: os.stat_result, name: FileName) -> tuple[Content | None, Problem | None]:
    if not stat.S_ISREG(status.st_mode):
        return None, Problem(kind=ProblemKind.NOT_A_TENSOR_FILE, message="not a regular file")
    with open_reader(full) as reader:
        try:
            return _parser(reader, name)(reader), None
        except TruncatedError as error:
            have, need, in_header = error.have, error.need, error.in_header
            kind = ProblemKind.TRUNCATED
            problem = Problem(kind=kind, message=str(error), have=have, need=need, in_header=in_header)
        except UnsupportedFormat as error:
            is_limit = isinstance(error, BeyondLimits)
            kind = ProblemKind.UNSUPPORTED
            problem = Problem(kind=kind, message=str(error), have=reader.size, is_limit=is_limit)
        except FormatError as error:
            problem = Problem(kind=ProblemKind.MALFORMED, message=str(error), have=reader.size)
        return None, _judged(reader, name, problem)


def _parser(reader: FileReader, name: FileName) -> Callable[[FileReader], Content]:
    if name.role is Role.WEIGHTS_INDEX:
        return _read_index
    return read_safetensors if name.suffix == ".safetensors" else read_torch_file


def _read_index(reader: FileReader) -> WeightsIndex:
    if reader.size > MAX_INDEX:
        raise FormatError(f"the index has {reader.size} bytes, at most {MAX_INDEX} are read")
    return parse_index(reader.read(0, reader.size))


def _judged(reader: FileReader, name: FileName, problem: Problem) -> Problem:
    """Tell a broken file of the right kind from a file of another kind.

    A script may call a file of another program as it likes; under a name that a loader looks for it is damage.
    """
    if problem.kind is ProblemKind.UNSUPPORTED:
        return problem
    head = reader.read(0, min(16, reader.size))
    wants_safetensors = name.suffix == ".safetensors"
    is_scripts_own = name.role is Role.UNKNOWN and not (name.is_of_library or wants_safetensors)
    if is_scripts_own and (words := other_format(reader)) is not None:
        message = f"{words}, not a format that ckptfix reads"
        return replace(problem, kind=ProblemKind.UNSUPPORTED, message=message, is_foreign=True)
    words = describe_content(reader, json=name.role is not Role.WEIGHTS_INDEX)
    if words == "a zip archive":
        words = "a torch zip file" if wants_safetensors else None
    elif looks_like_safetensors(head):
        words = None if wants_safetensors else "a safetensors file"
    elif words is None and wants_safetensors:
        words = f"not a safetensors file: {problem.message}"
    elif words is None and name.role is not Role.WEIGHTS_INDEX and head[:1] != b"\x80":
        words = "not a torch file: it is neither a zip archive nor a pickle"
    return problem if words is None else replace(problem, kind=ProblemKind.NOT_A_TENSOR_FILE, message=words)


def _names(content: Content | None) -> tuple[tuple[TensorInfo, ...], tuple[NameScope, ...]]:
    if isinstance(content, SafetensorsFile):
        names = tuple(tensor.fqn for tensor in content.tensors)
        return content.tensors, (NameScope((), "state dict", names, common_wrappers(names), is_model=True),)
    if isinstance(content, TorchFile):
        scopes = tuple(
            NameScope(names.path, names.kind, fqns, common_wrappers(fqns), names.is_model)
            for names in name_lists(content.tree)
            if names.kind != "metadata"  # belongs to the state dict of the same path and follows it
            for fqns in (tuple(fqn for fqn, _ in names.names),)
        )
        return tensor_infos(content), scopes
    return (), ()


def _unknown(file_name: str) -> FileName:
    return FileName(role=Role.UNKNOWN, stem=file_name, suffix="")


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return Fingerprint(status.st_size, status.st_mtime_ns, status.st_ino)

"""The weights in safetensors files and files of torch.save, alone or as shards."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from ckptfix.checkpoint.entries import Entry
from ckptfix.checkpoint.folder import Component
from ckptfix.errors import OperationError
from ckptfix.formats.pickle_tree import Kind, Node, Text, attribute, child, pairs
from ckptfix.formats.safetensors_file import SafetensorsFile
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import PickledTensor
from ckptfix.storage.pieces import Piece
from ckptfix.weights.layouts import Contiguous, Layout, Strided
from ckptfix.weights.stored import Format, StoredTensor, Weights


def file_weights(root: Path, entry: Entry) -> Weights:
    """Return the weights of a readable entry. Raises OperationError for a tensor whose bytes cannot be found."""
    found: list[StoredTensor] = []
    ties = dict(entry.aliases)
    versions: dict[str, int] = {}
    for member in entry.members:
        if isinstance(member.content, SafetensorsFile):
            ties.update(_recorded_ties(member.content))
            found += (
                StoredTensor(one.fqn, one.dtype, one.shape, _run(root / member.path, one.data_offsets))
                for one in member.content.tensors
            )
        elif isinstance(member.content, TorchFile):
            found += _of_torch(root / member.path, member.content, entry.path, ties)
            versions.update(_versions(member.content, entry.path))
    names = {tensor.fqn for tensor in found}
    is_torch = any(isinstance(member.content, TorchFile) for member in entry.members)
    indexed = entry.label.endswith(".json")
    return Weights(
        label=entry.label,
        format=Format.TORCH if is_torch else Format.SAFETENSORS,
        index=entry.index,
        files=tuple(member.path for member in entry.members)
        + ((entry.members[0].path.with_name(entry.label),) if indexed else ()),
        tensors=tuple(found),
        ties={name: kept for name, kept in ties.items() if kept in names and name not in names},
        opaque=tuple(name for name in entry.shapes if name not in names and name not in ties),
        left=_left(entry.members, entry.path),
        versions=versions,
    )


def _run(path: Path, offsets: tuple[int, int] | None) -> Contiguous:
    assert offsets is not None, "a tensor of safetensors is one run"
    begin, end = offsets
    return Contiguous((Piece(path, begin, end - begin),) if end > begin else ())


def _recorded_ties(file: SafetensorsFile) -> dict[str, str]:
    """Return the ties that ``safetensors.torch.save_model`` records: the name left out -> the name kept."""
    names = {tensor.fqn for tensor in file.tensors}
    return {name: kept for name, kept in file.metadata.items() if kept in names and name not in names}


def _of_torch(
    path: Path, file: TorchFile, at: tuple[str, ...], ties: dict[str, str]
) -> Iterator[StoredTensor]:
    """Yield the tensors of one state dict, and note in ``ties`` the names of those that came before."""
    first: dict[object, str] = {}
    for state_dict in file.state_dicts:
        for one in state_dict.tensors if state_dict.path == at else ():
            place = (one.storage_key, one.storage_offset, one.dtype, one.shape, one.stride)
            if 0 not in one.shape and first.setdefault(place, one.fqn) != one.fqn:
                ties[one.fqn] = first[place]
                continue
            yield StoredTensor(one.fqn, one.dtype, one.shape, torch_layout(path, file, one))


def torch_layout(path: Path, file: TorchFile, tensor: PickledTensor) -> Layout:
    """Return where a tensor of a torch file lies. Raises OperationError for one in a compressed record."""
    storage = file.storage_ranges.get(tensor.storage_key)
    if storage is None:
        raise OperationError(
            f"{path}: the record of {tensor.fqn!r} is compressed, which torch.save never does; next: load it with "
            "torch and save it again"
        )
    offset, length = storage
    if tensor.begin is not None and tensor.end is not None:
        return _run(path, (offset + tensor.begin, offset + tensor.end))
    width = DTYPE_BITS[tensor.dtype] // 8
    return Strided(
        storage=Piece(path, offset, length - length % width),
        first=tensor.storage_offset,
        shape=tensor.shape,
        stride=tensor.stride,
        width=width,
    )


def _versions(file: TorchFile, at: tuple[str, ...]) -> dict[str, int]:
    """Return module -> version out of the ``_metadata`` that torch gives a module's state dict."""
    found = {}
    for name, value in pairs(attribute(_reached(file, at), "_metadata")):
        version = child(value, "version")
        if type(name) is Text and type(version) is int:
            found[name.value] = version
    return found


def _left(members: Sequence[Component], at: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names beside those that lead to the state dict, at the root of its file."""
    if not at or not isinstance(members[0].content, TorchFile):
        return ()
    root = members[0].content.tree.root
    return tuple(key.value for key, _ in pairs(root) if type(key) is Text and key.value != at[0])


def _reached(file: TorchFile, at: tuple[str, ...]) -> object:
    node: object = file.tree.root
    for step in at:
        if type(node) is Node and node.kind is Kind.LIST and step.isdigit():
            node = (node.items or [])[int(step)]
        else:
            node = child(node, step)
    return node


def is_expanded(layout: Layout) -> bool:
    """Whether a tensor claims more bytes than its storage has, as ``expand`` makes it."""
    return isinstance(layout, Strided) and prod(layout.shape) * layout.width > layout.storage.length

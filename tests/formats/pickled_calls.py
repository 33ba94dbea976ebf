"""Pickles with any call in them, in zip files of torch with correct checksums."""

import io
import pickle
import zipfile
from typing import Any, ClassVar, NamedTuple

import torch


class Call(NamedTuple):
    """A call to pickle: the opcode that makes it, the function, its arguments, and the states that
    follow.
    """

    function: Any
    args: Any
    states: tuple[Any, ...] = ()
    opcode: bytes = pickle.REDUCE


class Entries(NamedTuple):
    """A dict to pickle with keys that a dict of Python could not have."""

    pairs: tuple[tuple[Any, Any], ...]


class Storage(NamedTuple):
    """A storage to pickle by the five values of its persistent id."""

    type: Any
    key: Any
    location: Any = "cpu"
    numel: Any = 6


class _Pickler(pickle._Pickler):
    # The stubs of the class in Python leave these out.
    save: Any
    write: Any
    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def _save_call(self, call: Call) -> None:
        self.save(call.function)
        self.save(call.args)
        self.write(call.opcode)
        for state in call.states:
            self.save(state)
            self.write(pickle.BUILD)

    def _save_entries(self, entries: Entries) -> None:
        self.write(pickle.EMPTY_DICT + pickle.MARK)
        for key, value in entries.pairs:
            self.save(key)
            self.save(value)
        self.write(pickle.SETITEMS)

    def _save_storage(self, storage: Storage) -> None:
        self.save(("storage", *storage))
        self.write(pickle.BINPERSID)

    dispatch[Call] = _save_call
    dispatch[Entries] = _save_entries
    dispatch[Storage] = _save_storage


STORAGES = {"0": torch.arange(6.0), "1": torch.arange(6)}
"""Storages that every file has, by their keys."""


def pickled(value: Any) -> bytes:
    """Return the pickle of a value, in the protocol of torch."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def zipped(data: bytes, **records: bytes) -> bytes:
    """Return a zip file of torch around a pickle, every checksum of which is correct."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        parts = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
        parts |= {f"data/{key}": tensor.numpy().tobytes() for key, tensor in STORAGES.items()}
        for name, part in (parts | records).items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), part)
    return stream.getvalue()

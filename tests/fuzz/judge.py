"""The judge of a changed save: what stock readers make of it. It imports torch, so it is a process
of its own.

    python -m tests.fuzz.judge

reads one JSON request a line and answers with one: ``{"verdict": "same" | "other" | "refused",
"why": ...}``. A request names the format, the folder, the folder of the seed, and the files that
differ. "same": all values equal the seed's.

Our own pickles that no ``weights_only`` reads (DeepSpeed's, DCP's metadata, custom objects) are
unpickled with the classes that the seed names, and with no others: a changed name is refused, never
imported.
"""

import functools
import hashlib
import json
import os
import pickle
import re
import resource
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_MEMORY = 12 << 30
"""Most address space of the judge: a changed length must not fill the machine."""

_FULL = ("custom_checkpoint", "sampler", "dl_state_dict")
"""Beginnings of the names of files that accelerate loads with ``weights_only=False``."""


_HARMLESS = ("numpy", "_codecs", "torch", "collections")
"""Packages whose names exchanged files may have: one changed by chance does not exist, or makes an
array.
"""

_BUILTINS = frozenset(("__builtin__", name) for name in ("bytearray", "complex", "set"))
"""Classes of Python, by their names of protocol 2, that torch allows and an edited pickle can name.
"""


_OF_PACKAGES = re.compile(r"(?:npu|mlu|musa|gcu|sdaa|ort)(?::[0-9]+)?")
"""Devices whose storages torch restores with another package."""


class _Pickles:
    """A stand-in for the module ``pickle`` that knows only numpy's names and those which the seeds
    have.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self.is_learning = False
        known = self

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                if known.is_learning:
                    known.names.add((module, name))
                elif not known.allows(module, name):
                    raise pickle.UnpicklingError(f"the name {module}.{name} is not in the seed")
                return super().find_class(module, name)

        def load(file: Any, **options: Any) -> Any:
            return Unpickler(file, **options).load()

        self.module = types.ModuleType("pickle")
        self.module.__dict__.update({**vars(pickle), "Unpickler": Unpickler, "load": load})

    def allows(self, module: str, name: str) -> bool:
        """Return whether a name is in the seeds, or does no harm."""
        is_known = (module, name) in self.names | _BUILTINS
        return is_known or module.partition(".")[0] in _HARMLESS


class Judge:
    """Stock readers, and the digests of the seeds' values."""

    def __init__(self) -> None:
        import numpy
        import torch
        import torch.distributed.checkpoint.filesystem as filesystem
        import torch.distributed.tensor
        from accelerate.utils.other import TORCH_SAFE_GLOBALS

        self._torch = torch
        self._numpy = numpy
        self._pickles = _Pickles()
        self._safe = TORCH_SAFE_GLOBALS
        filesystem.pickle = self._pickles.module
        real = torch.load

        @functools.wraps(real)
        def load(*args: Any, **options: Any) -> Any:
            # DeepSpeed and DCP load objects with weights_only=False.
            return real(
                *args,
                **(
                    options
                    if options.get("weights_only")
                    else {**options, "pickle_module": self._pickles.module}
                ),
            )

        torch.load = load
        torch.set_num_threads(1)
        # torch restores a storage "of npu" once the package of that device is imported, as on the
        # machine of the save.
        torch.serialization.register_package(
            100,
            lambda storage: None,
            lambda storage, place: storage if _OF_PACKAGES.fullmatch(place) else None,
        )

    @functools.cached_property
    def _zero_to_fp32(self) -> Callable[..., Any]:
        from tests.deepspeed_library import FOLDER

        sys.path.append(str(FOLDER))
        from deepspeed.utils import zero_to_fp32

        function: Callable[..., Any] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
        return function

    @functools.cache  # noqa: B019  one judge a process
    def _of_seed(self, kind: str, seed: str, name: str) -> str:
        self._pickles.is_learning = True
        try:
            return _digest(self._units(kind, Path(seed))[name](), self._torch)
        finally:
            self._pickles.is_learning = False

    def verdict(self, kind: str, folder: str, seed: str, files: list[str]) -> tuple[str, str]:
        """Return the verdict on the files that differ from those of the seed, and what is
        refused.
        """
        is_same = True
        units = self._units(kind, Path(folder))
        names = {self._unit_of(kind, name) for name in files}
        for name in sorted(names):
            expected = self._of_seed(kind, seed, name)
            try:
                is_same &= _digest(units[name](), self._torch) == expected
            except BaseException as error:  # as DCP's CheckpointException is one
                # What DCP raises begins with a traceback, and ends with the reason.
                lines = str(error).strip().splitlines() or [""]
                why = lines[-1 if lines[0].startswith("CheckpointException") else 0]
                return "refused", f"{name}: {type(error).__name__}: {why[:1000]}"
        return ("same" if is_same else "other"), ""

    def _unit_of(self, kind: str, name: str) -> str:
        if kind == "DCP":
            return str(Path(name).parent)
        # ``latest`` is read with the states: alone it is a line of text, which is no pickle.
        if kind == "DeepSpeed" and (name == "latest" or name.endswith("_states.pt")):
            return "."
        return "." if kind == "index.json" else name

    def _units(self, kind: str, root: Path) -> dict[str, Callable[[], Any]]:
        """Return what is read as one: each DCP folder, the files of DeepSpeed, an index with its
        shards, or a file.
        """
        files = [path for path in root.rglob("*") if path.is_file()]
        # accelerate allows arrays of numpy in each file that it loads itself (``utils/other.py``),
        # the Trainer in its random states (``trainer_pt_utils.py:safe_globals``).
        is_of_accelerate = kind not in ("Trainer", "FSDP per rank")
        units: dict[str, Callable[[], Any]] = {
            str(path.relative_to(root)): functools.partial(
                self._file,
                path,
                self._safe if is_of_accelerate or path.name.startswith("rng_state") else (),
            )
            for path in files
        }
        if kind == "DCP":
            return {
                str(path.parent.relative_to(root)): functools.partial(self._dcp, path.parent)
                for path in files
            }
        if kind == "DeepSpeed":
            units["."] = functools.partial(self._zero_to_fp32, str(root))
        elif kind == "index.json":
            units["."] = functools.partial(self._sharded, root)
        return units

    def _file(self, path: Path, allowed: Sequence[Any] = ()) -> Any:
        torch = self._torch
        if path.suffix == ".safetensors":
            import safetensors

            with safetensors.safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if path.suffix == ".json":
            return json.loads(path.read_text())
        if path.name.startswith(_FULL):
            return torch.load(path, weights_only=False, map_location="cpu")
        with torch.serialization.safe_globals(list(allowed)):
            # As accelerate loads models and optimizers: on which device a storage was does not
            # matter.
            return torch.load(path, weights_only=True, map_location="cpu")

    def _sharded(self, root: Path) -> Any:
        (path,) = root.glob("*.index.json")
        index = json.loads(path.read_text())
        # As transformers writes into the object (``utils/hub.py`` of 5.23).
        index["metadata"]["weight_map"] = listed = index["weight_map"]
        shards = {name: self._file(root / name) for name in sorted(set(listed.values()))}
        values = {key: tensor for tensors in shards.values() for key, tensor in tensors.items()}
        absent = listed.keys() - values.keys()
        # No loader fails, but each of them leaves the tensors of such keys random. There are none
        # where the shards hold all bytes that the index counts: a tie, an old mask, or a key that
        # no model has.
        tensors = [tensor for shard in shards.values() for tensor in shard.values()]
        is_counted = sum(tensor.nbytes for tensor in tensors) == index["metadata"].get("total_size")
        if absent and not (is_counted and values.keys() <= listed.keys()):
            raise KeyError(min(absent))
        # transformers looks in the listed file for weights that stay on the disk, of safetensors
        # files alone.
        if ".safetensors" in path.name:
            values |= {key: shards[listed[key]][key] for key in listed.keys() - absent}
        return {key: values[key] for key in listed.keys() - absent} | {"": len(tensors)}

    def _dcp(self, folder: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        state: dict[str, Any] = {}
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(folder),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
        return state


def _digest(value: Any, torch: Any) -> str:
    """Return a digest of a value: of the types, shapes and bytes in it."""
    seen = hashlib.blake2b()
    for part in _parts(value, torch, 0):
        seen.update(part)
        seen.update(b"\0")
    return seen.hexdigest()


def _parts(value: Any, torch: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if depth > 30:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _parts(key, torch, depth + 1)
            yield from _parts(item, torch, depth + 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _parts(item, torch, depth + 1)
    elif isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "__dict__"):
        yield from _parts(vars(value), torch, depth + 1)
    else:
        yield repr(value).encode("utf-8", "surrogatepass")


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Warnings of torch and of the libraries would fill the pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    judge = Judge()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print("{}", file=answers)
    for line in sys.stdin:
        try:
            verdict, why = judge.verdict(**json.loads(line))
        except Exception as error:  # the seed itself
            verdict, why = "broken", repr(error)
        print(json.dumps({"verdict": verdict, "why": why}), file=answers)


if __name__ == "__main__":
    main()

"""Interception of copies between two devices: ``aten::copy_`` below autograd, or accelerate's hooks
for an older torch.

``Tensor.to``, ``Module.to``, slices, storages, ``load_state_dict``, ``_foreach_copy_``, compiled
code, backward passes and all threads end in ``aten::copy_`` (measured with torch 2.13). What does
not is in ``NOT_COVERED``: NCCL, CUDA IPC, kernels that read another device's memory, and quantized
tensors, which have a dispatch key of their own.

Where torch does not let it be overridden, accelerate's own moves are staged: the inputs of each
block, the output of the model and the weights of a dispatch pass two functions, which its hooks
look up by name at each call. ``NOT_COVERED_BY_FALLBACK`` lists what stays as it is, and every
reference to staging carries that list.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from ckptfix.devices.patching import Patch, Patches
from ckptfix.devices.torch_devices import device_type
from ckptfix.hardware import Pair

Carry = Callable[[Pair, torch.Tensor, torch.Tensor], bool]
"""(pair, destination, source) -> whether the copy was done; if not, torch's own copy does it."""

NOT_COVERED = (
    "NCCL and other collectives",
    "torch.nn.DataParallel, replicate, comm.broadcast and comm.reduce_add (NCCL)",
    "CUDA IPC (torch.multiprocessing)",
    "kernels that read another device's memory directly",
    "quantized tensors (QuantizedCUDA)",
    "replays of CUDA graphs that were captured earlier",
)
"""Copies from device to device that do not pass ``aten::copy_`` at the accelerator's key."""

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}

_removed: deque[Any] = deque(maxlen=64)
"""Kernels of overrides that were removed.

A model may be collected, and its reference given back, inside of the very copy that the kernel
answers: it must not be freed before that copy has left it.
"""


def can_override() -> bool:
    """Return whether this torch hands out the kernel that an override has to call on."""
    return hasattr(torch.library, "get_kernel")


class Override:
    """``carry`` put in front of every copy between two devices of the current accelerator, until
    ``remove``.
    """

    def __init__(self, carry: Carry) -> None:
        """Install it. Raises RuntimeError without an accelerator, or where ``can_override`` says
        no.
        """
        name = device_type()
        if name is None or not can_override():
            raise RuntimeError(
                f"torch {torch.__version__} with accelerator {name}: aten::copy_ cannot be "
                "overridden"
            )
        key = torch._C._dispatch_key_for_device(name)
        original = torch.library.get_kernel("aten::copy_", key)
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("copy_", _in_front_of(original, carry), key, with_keyset=True)
        self._kernel = torch.library.get_kernel("aten::copy_", key)

    def remove(self) -> bool:
        """Let torch's own kernel answer again, without a trace of this one; return whether that was
        done.

        It is not while other threads run: torch changes its table of kernels without a lock, and a
        copy that looks its kernel up meanwhile ends the process (a segmentation fault, measured
        with torch 2.13). A backward pass counts: the thread that asked for it waits in Python.
        Installing has no such moment, as the old kernel stays valid.
        """
        if len(sys._current_frames()) > 1:
            return False
        _removed.append(self._kernel)
        self._library._destroy()
        return True


class _Thread(threading.local):
    direct: Pair | None = None
    """The pair of the direct copy that this thread is making."""


def _in_front_of(original: Any, carry: Carry) -> Callable[..., Any]:
    copied = original.call_boxed
    thread = _Thread()

    def copy_(keyset: Any, destination: Any, source: Any, non_blocking: bool = False) -> Any:
        # Every copy to, from and on an accelerator comes here; those on one device leave by the
        # shortest way.
        try:
            start, end = source.get_device(), destination.get_device()  # -1 for the host
        except AttributeError:
            # The 0 of `tensor.ne(0)` comes as a number, not as the tensor of C++; the original
            # takes tensors.
            number = torch.scalar_tensor(source, dtype=_DTYPES[type(source)], device="cpu")
            return copied(keyset, destination, number, non_blocking)
        if start == end or start < 0 or end < 0 or source.device.type != destination.device.type:
            return copied(keyset, destination, source, non_blocking)
        pair = (start, end)
        if (
            thread.direct == pair
        ):  # torch gathers a strided copy without P2P, and copies once more from inside
            return copied(keyset, destination, source, non_blocking)
        # Subclasses and modes must not see what carries their bytes; autograd has recorded the copy
        # already.
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            if carry(pair, destination, source):
                return destination
        before, thread.direct = thread.direct, pair
        try:
            return copied(keyset, destination, source, non_blocking)
        finally:
            thread.direct = before

    return copy_


class Decide(Protocol):
    """Decision whether a copy has to go through the host, which also counts it."""

    def __call__(self, pair: Pair, source: torch.Tensor, *, back: bool = False) -> bool:
        """``back``: a gradient will take the same way in the other direction."""


NOT_COVERED_BY_FALLBACK = (
    (
        "everything except the moves of accelerate's hooks: this torch does not allow overriding "
        "aten::copy_"
    ),
    ".to(device) in a model's code, and its backward passes",
    "Module.to, load_state_dict, Tensor.copy_ and storages",
    "slices (a[1:3] = b) and _foreach_copy_",
    "the caches of generate(), which beam search moves from device to device",
    "torch.nn.DataParallel, replicate and torch.cuda.comm",
    "NCCL and other collectives, CUDA IPC, and kernels that read another device's memory",
)


class HookPatch:
    """``accelerate.hooks`` with moves that ask ``decide``, until ``remove``."""

    def __init__(self, decide: Decide) -> None:
        """Install the replacements."""
        self._patches = Patches(
            Patch("accelerate.hooks:send_to_device", partial(_sending, decide=decide)),
            Patch("accelerate.hooks:set_module_tensor_to_device", partial(_setting, decide=decide)),
        )
        self._patches.install()

    def remove(self) -> bool:
        """Put the originals back, and leave in place what others put there since; always done at
        once: True.
        """
        self._patches.remove()
        return True


def _sending(original: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    def send_to_device(
        tensor: Any,
        device: Any,
        non_blocking: bool = False,
        skip_keys: str | Collection[str] | None = None,
    ) -> Any:
        skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
        staged = _to_host(tensor, device, skipped, decide)
        return original(staged, device, non_blocking=non_blocking, skip_keys=skip_keys)

    return send_to_device


def _to_host(things: Any, end: Any, skipped: tuple[str, ...], decide: Decide) -> Any:
    """Return the same structure, with the tensors on the host that must not go to ``end``
    directly.
    """
    if isinstance(things, torch.Tensor):
        return things.to("cpu") if _must_stage(things, end, decide) else things
    if hasattr(things, "to"):  # its own to() moves what it holds, as accelerate does it
        held = vars(things).values() if hasattr(things, "__dict__") else ()
        return (
            things.to("cpu") if any(_holds_staged(thing, end, decide) for thing in held) else things
        )
    if isinstance(things, Mapping):
        return type(things)(  # type: ignore[call-arg]
            {
                key: thing if key in skipped else _to_host(thing, end, skipped, decide)
                for key, thing in things.items()
            }
        )
    if isinstance(things, (tuple, list)):
        from accelerate.utils.operations import honor_type

        return honor_type(things, (_to_host(thing, end, skipped, decide) for thing in things))
    return things


def _holds_staged(thing: Any, end: Any, decide: Decide) -> bool:
    if isinstance(thing, torch.Tensor):
        return _must_stage(thing, end, decide)
    if isinstance(thing, Mapping):
        return any(_holds_staged(inner, end, decide) for inner in thing.values())
    return isinstance(thing, (tuple, list)) and any(
        _holds_staged(inner, end, decide) for inner in thing
    )


def _must_stage(tensor: torch.Tensor, end: Any, decide: Decide) -> bool:
    pair = _pair(tensor, end)
    return pair is not None and decide(
        pair, tensor, back=torch.is_grad_enabled() and tensor.requires_grad
    )


def _pair(tensor: torch.Tensor, end: Any) -> Pair | None:
    where = torch.device(end) if end is not None else tensor.device
    if tensor.device.type in ("cpu", "meta") or where.type != tensor.device.type:
        return None
    index = (
        where.index if where.index is not None else torch.get_device_module(where).current_device()
    )
    return None if index == tensor.device.index else (tensor.device.index, index)


def _setting(original: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    def set_module_tensor_to_device(
        module: torch.nn.Module,
        tensor_name: str,
        device: Any,
        value: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        moving = value if value is not None else _named(module, tensor_name)
        tied = kwargs.get("tied_params_map") or {}
        placed = isinstance(moving, torch.Tensor) and device in tied.get(moving.data_ptr(), ())
        if (
            isinstance(moving, torch.Tensor)
            and not placed
            and _must_stage(moving.detach(), device, decide)
        ):
            value = moving.detach().to("cpu")
        return original(module, tensor_name, device, value, *args, **kwargs)

    return set_module_tensor_to_device


def _named(module: torch.nn.Module, tensor_name: str) -> Any:
    owner, _, name = tensor_name.rpartition(".")
    return getattr(module.get_submodule(owner), name)

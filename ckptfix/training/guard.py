"""Guarded methods of an Accelerator: an object that it holds already is not prepared, nor
registered, again.

Each function guards one method of ``accelerate.Accelerator``. It gets the accelerator, the original
method, already bound, and the call's arguments, so that a subclass and a patch of the class itself
share it.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from msgspec import Struct

from ckptfix.devices.callers import calling_line, warn_caller
from ckptfix.devices.patching import Method
from ckptfix.errors import UsageError
from ckptfix.training.prepared import (
    PreparedObject,
    PreparedObjects,
    as_new,
    innermost,
    level_ids,
    made_here,
    wrapper_of,
)
from ckptfix.training.resuming import positions, run_state
from ckptfix.training.running import as_given

REGISTRIES = ("_models", "_optimizers", "_schedulers", "_dataloaders")


class OnReprepare(Enum):
    """WARN: once a call, and return what the first ``prepare`` gave. RAISE: UsageError. ALLOW: as
    accelerate does.
    """

    WARN = "warn"
    RAISE = "raise"
    ALLOW = "allow"


class Settings(Struct):
    """Settings of a guard.

    ``check_backward``: warn of ``loss.backward()`` where it loses scaling or accumulation.
    ``tensor_digests``: let every save record a sha256 of each tensor in its manifest.
    ``save_together``: every process calls ``save_state``, and all of them save as one.
    ``save_timeout``: seconds that such a save waits for the others, None for the default.
    ``check_saves``: warn of a save that will not load as it should, None for what the environment
    says.
    """

    on_reprepare: OnReprepare = OnReprepare.WARN
    check_backward: bool = True
    tensor_digests: bool = False
    save_together: bool = False
    save_timeout: float | None = None
    check_saves: bool | None = None


class Guard:
    """The guard of one Accelerator: what it holds, and whether one of its methods is running."""

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        self.settings = settings
        self.held = PreparedObjects()
        self.backward = BackwardCheck(accelerator)
        self._running = threading.local()
        self._accelerator = weakref.ref(accelerator)
        self._registered: frozenset[int] | None = None
        run_state.watch(accelerator)

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Yield whether this is the outermost call: what accelerate calls on itself goes through
        untouched.
        """
        depth = getattr(self._running, "depth", 0)  # of this thread: a save may go on in another
        if depth == 0:
            self.follow_the_registries()
        self._running.depth = depth + 1
        try:
            yield depth == 0
        finally:
            self._running.depth = depth

    def add(
        self, things: Sequence[Any], prepared: Any, where: str, *, evaluation: bool = False
    ) -> PreparedObject:
        """Remember what these objects became."""
        self._registered = None
        return self.held.add(things, prepared, where, evaluation=evaluation)

    def follow_the_registries(self) -> None:
        """Forget what was taken out of the registries by hand, as some scripts do to free
        memory.
        """
        accelerator = self._accelerator()
        if accelerator is None or not self.held.entries:
            return
        things = [thing for name in REGISTRIES for thing in getattr(accelerator, name)]
        registered = frozenset(map(id, things))
        if registered != self._registered:
            self._registered = registered
            self.held.keep_only(level_ids(things))


DEFAULTS = Settings()
"""Of every Accelerator that was not given settings of its own."""

GUARDS: "weakref.WeakKeyDictionary[Accelerator, Guard]" = weakref.WeakKeyDictionary()


def guard_of(accelerator: Accelerator, settings: Settings | None = None) -> Guard:
    """Return the guard of an accelerator, made at its first use."""
    guard = GUARDS.get(accelerator)
    if guard is None:
        guard = GUARDS[accelerator] = Guard(accelerator, settings or DEFAULTS)
    return guard


def prepare(
    accelerator: Accelerator, method: Method, *args: Any, device_placement: Any = None
) -> Any:
    """Guard ``Accelerator.prepare``."""
    guard = guard_of(accelerator)
    with guard.entered() as is_outermost, _restored_on_error(accelerator, guard):
        if not is_outermost or _is_left_to_accelerate(accelerator, guard, args, device_placement):
            return method(*args, device_placement=device_placement)
        entries = [_held(accelerator, guard, thing) if _counts(thing) else None for thing in args]
        twins = _twins(args)
        new = [i for i in range(len(args)) if entries[i] is None and twins[i] == i]
        again = [i for i in range(len(args)) if i not in new]
        if again:
            _complain(guard, "prepare", [args[i] for i in again], [entries[i] for i in again])
        given = [as_new(accelerator, args[i]) if _counts(args[i]) else args[i] for i in new]
        placement = None if device_placement is None else [device_placement[i] for i in new]
        if new and again and _wants_its_model(accelerator) and not any(map(_is_model, given)):
            # FSDP2 wants model and optimizer in one call; of a model that is sharded already it
            # needs nothing.
            made: Any = [accelerator._prepare_one(thing, first_pass=True) for thing in given]
            made = tuple(accelerator._prepare_one(thing) for thing in made)
        elif new:
            made = method(*given, device_placement=placement)
            made = made if len(new) > 1 else (made,)
        result = list(args)
        for position, i in enumerate(new):
            result[i] = made[position]
            _remember(guard, args[i], given[position], made[position])
        for i in again:
            entry = entries[i]
            result[i] = result[twins[i]] if entry is None else entry.prepared
        return tuple(result) if len(result) > 1 else result[0]


def prepare_model(
    accelerator: Accelerator,
    method: Method,
    model: Any,
    device_placement: Any = None,
    evaluation_mode: bool = False,
) -> Any:
    """Guard ``Accelerator.prepare_model``."""
    return _prepare_one(
        accelerator, method, model, (device_placement, evaluation_mode), {}, evaluation_mode
    )


def prepare_other(
    accelerator: Accelerator, method: Method, thing: Any, *args: Any, **kwargs: Any
) -> Any:
    """Guard ``prepare_optimizer``, ``prepare_scheduler`` and ``prepare_data_loader``."""
    return _prepare_one(accelerator, method, thing, args, kwargs, False)


def _prepare_one(
    accelerator: Accelerator,
    method: Method,
    thing: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    evaluation: bool,
) -> Any:
    guard = guard_of(accelerator)
    with guard.entered() as is_outermost, _restored_on_error(accelerator, guard):
        if not is_outermost or _is_left_to_accelerate(accelerator, guard, (thing,)):
            return method(thing, *args, **kwargs)
        entry = _held(accelerator, guard, thing, evaluation=evaluation)
        if entry is not None:
            _complain(guard, method.__name__, [thing], [entry])
            return entry.prepared
        given = as_new(accelerator, thing)
        made = method(given, *args, **kwargs)
        _remember(guard, thing, given, made, evaluation=evaluation)
        return made


def register_for_checkpointing(accelerator: Accelerator, method: Method, *objects: Any) -> Any:
    """Guard ``Accelerator.register_for_checkpointing``."""
    guard = guard_of(accelerator)
    with guard.entered() as is_outermost:
        if not is_outermost or guard.settings.on_reprepare is OnReprepare.ALLOW:
            return method(*objects)
        known = {id(thing) for thing in accelerator._custom_objects}
        new: list[Any] = []
        again: list[Any] = []
        for thing in objects:
            (again if id(thing) in known else new).append(thing)
            known.add(id(thing))
        if again:
            _complain(guard, "register_for_checkpointing", again, [])
        return method(*new) if new or not objects else None


def free_memory(accelerator: Accelerator, method: Method, *objects: Any) -> Any:
    """Guard ``Accelerator.free_memory`` and ``clear``: what was let go can be prepared anew."""
    guard = guard_of(accelerator)
    with guard.entered():
        guard.held.clear()
        guard.backward.stop()
        return method(*objects)


def backward(accelerator: Accelerator, method: Method, loss: Any, **kwargs: Any) -> Any:
    """Guard ``Accelerator.backward``: count it."""
    count_backward()
    positions.training_goes_on(accelerator)
    guard_of(accelerator).follow_the_registries()
    return method(loss, **kwargs)


def _is_left_to_accelerate(
    accelerator: Accelerator, guard: Guard, args: Sequence[Any], device_placement: Any = None
) -> bool:
    """Return whether a call goes to accelerate as it is: it refuses the call, or the guard must not
    change it.
    """
    kind = accelerator.distributed_type.value
    one_model = kind == "DEEPSPEED" or getattr(accelerator, "is_fsdp2", False)
    return (
        guard.settings.on_reprepare is OnReprepare.ALLOW
        # It builds models from a configuration, not from what prepare is given.
        or kind == "MEGATRON_LM"
        or (device_placement is not None and len(device_placement) != len(args))
        or (
            one_model
            and len({i for i, thing in zip(_twins(args), args, strict=True) if _is_model(thing)})
            > 1
        )
    )


def _wants_its_model(accelerator: Accelerator) -> bool:
    parallelism = getattr(accelerator, "parallelism_config", None)
    return getattr(accelerator, "is_fsdp2", False) or bool(parallelism and parallelism.tp_enabled)


def _twins(args: Sequence[Any]) -> list[int]:
    """Return for each argument the position of the first that is the same object, wrappers
    aside.
    """
    inside = [level_ids([thing]) if _counts(thing) else set() for thing in args]
    return [next((j for j in range(i) if inside[i] & inside[j]), i) for i in range(len(args))]


def _held(
    accelerator: Accelerator, guard: Guard, thing: Any, *, evaluation: bool = False
) -> PreparedObject | None:
    """Return the entry of an object that this accelerator holds, None for one to be prepared."""
    entry = guard.held.find(thing)
    if entry is None:
        return _prepared_unguarded(accelerator, guard, thing)
    if entry.evaluation and not evaluation:
        # Prepared for evaluation only, it has no gradient synchronisation: this time it is meant.
        mine = set(entry.members)
        accelerator._models[:] = [
            model for model in accelerator._models if mine.isdisjoint(level_ids([model]))
        ]
        guard.held.forget(entry)
        return None
    return entry


def _prepared_unguarded(
    accelerator: Accelerator, guard: Guard, thing: Any
) -> PreparedObject | None:
    """Return an entry for an object that was registered before this accelerator was guarded."""
    mine = level_ids([thing])
    for name in REGISTRIES:
        for known in getattr(accelerator, name):
            if mine.isdisjoint(level_ids([known])):
                continue
            prepared = known
            if name == "_models":  # for DistributedDataParallel the registry holds what is inside
                prepared = wrapper_of(known) if thing is known else thing
            return guard.add(
                (known, thing), prepared, "a line that ran before the guard was enabled"
            )
    return None


@contextmanager
def _restored_on_error(accelerator: Accelerator, guard: Guard) -> Iterator[None]:
    """Take back what a call registered when it fails: the next try would register it again."""
    before = {name: list(getattr(accelerator, name)) for name in REGISTRIES}
    entries = list(guard.held.entries)
    try:
        yield
    except BaseException:
        guard.held.entries = entries
        for name, things in before.items():
            getattr(accelerator, name)[:] = things
        raise


def _remember(guard: Guard, thing: Any, given: Any, made: Any, *, evaluation: bool = False) -> None:
    if made is None or not _counts(thing):
        return
    guard.add((thing, given), made, str(calling_line()), evaluation=evaluation)
    made_here(made)
    if guard.settings.check_backward and isinstance(made, torch.optim.Optimizer):
        guard.backward.watch(innermost(made))


def _is_model(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module)


def _counts(thing: Any) -> bool:
    """Return whether ``prepare`` does anything with an object; it hands numbers and strings
    through.
    """
    from torch.optim.lr_scheduler import LRScheduler

    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, LRScheduler)
    ours = (AcceleratedOptimizer, AcceleratedScheduler)
    return isinstance(thing, (*kinds, *ours)) or type(thing).__name__ in (
        "DummyOptim",
        "DummyScheduler",
    )


def _complain(
    guard: Guard,
    verb: str,
    things: list[Any],
    entries: Sequence[PreparedObject | None],
) -> None:
    names = ", ".join(dict.fromkeys(type(thing).__name__ for thing in things))
    first = next((f" (first at {entry.where})" for entry in entries if entry is not None), "")
    once = verb if verb == "register_for_checkpointing" else "prepare"
    is_raised = guard.settings.on_reprepare is OnReprepare.RAISE
    ending = (
        f"; the object from the first {once}() is returned"
        if once == "prepare" and not is_raised
        else ""
    )
    message = (
        f"{verb}() at {calling_line()} received {names}, which this Accelerator already "
        f"has{first}. Nothing is added{ending}. Without the guard, save_state may write it a "
        "second time under the next number, and a script that "
        f"{'registers' if once != 'prepare' else 'prepares'} it once could not load that "
        f"checkpoint. Pass each object to {once}() only once."
    )
    if is_raised:
        raise UsageError(message)
    warn_caller(message)


_calls = itertools.count(1)
_latest = 0


def count_backward() -> None:
    """Take note that some accelerator's ``backward`` was called."""
    global _latest
    _latest = next(_calls)


class BackwardCheck:
    """Watches the optimizers of one Accelerator for gradients that did not come from
    ``accelerator.backward``.

    It warns once, where that had to scale or divide them. Nothing of torch is patched:
    ``accelerator.backward`` is counted, and a hook of the optimizer looks at the count when it
    steps. The count is one for all accelerators, so that a second one that shares an optimizer
    raises no false alarm.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.warned = False
        self._accelerator = weakref.ref(accelerator)
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def watch(self, optimizer: Any) -> None:
        """Look at the count whenever this optimizer, the one inside accelerate's wrapper, steps."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None or optimizer in self._handles:
            return
        self._handles[optimizer] = register(_hook(weakref.ref(self)))

    def stop(self) -> None:
        """Watch no optimizer any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def goes_on(self) -> None:
        """Take note of a training step, also of one without ``accelerator.backward``."""
        accelerator = self._accelerator()
        if accelerator is not None:
            positions.training_goes_on(accelerator)

    def stepped(self, optimizer: Any) -> None:
        """Warn when gradients are there that need ``accelerator.backward`` and none was called
        since the last step.
        """
        accelerator = self._accelerator()
        if accelerator is None or self.warned:
            return
        reason = _reason(accelerator)
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        if reason is None or all(one.grad is None for one in parameters):
            return
        self.warned = True
        switch = as_given("check_backward=False", "ckptfix run --no-check-backward SCRIPT")
        warn_caller(
            f"{type(optimizer).__name__}.step() at {calling_line()} uses gradients that did "
            f"not come from accelerator.backward(loss): {reason} Call "
            "accelerator.backward(loss) instead of loss.backward(). If this is intentional, "
            f"{switch} silences this warning."
        )


def _hook(check: "weakref.ref[BackwardCheck]") -> Callable[..., None]:
    seen = _latest  # at the optimizer's last step

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        watching = check()
        if watching is not None:
            watching.goes_on()
            if seen == _latest:
                watching.stepped(optimizer)
        seen = _latest

    hook: Callable[..., None] = torch.compiler.disable(before_step)
    return hook


def _reason(accelerator: Accelerator) -> str | None:
    """Return what loss.backward() leaves out here; None when it leaves nothing out."""
    if accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM"):
        return None  # their engines divide and scale, whoever calls them
    if accelerator.scaler is not None and accelerator.scaler.is_enabled():
        return "the loss was not scaled, so dividing by the scale makes the updates vanish."
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        return f"summed over {steps} accumulated batches, they are {steps} times too large."
    return None

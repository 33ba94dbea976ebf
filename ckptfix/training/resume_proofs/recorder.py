"""Recorder of a training run, in the process of the script: digests of every state at every step,
on every rank.

It replaces methods of accelerate, torch and transformers by ones that call them and write down what
they did. Nothing that the script computes changes: no random number is drawn, no tensor is written
to.
"""

import atexit
import gc
import json
import os
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, IterableDataset

from ckptfix.devices.nested_values import fingerprint, leaves
from ckptfix.devices.patching import Method, Patches, when_imported
from ckptfix.training.resume_proofs.recorded_runs import UNPREPARED, Settings
from ckptfix.training.resume_proofs.recorded_values import (
    LEAST,
    SAMPLES,
    WHOLE_LEAF,
    digests_of_generators,
    digests_of_unprepared,
    is_zero,
    local_part,
    name_of_tensor,
    number_of,
    sampled_digest,
    samplers_of,
    text_of,
)

_PATIENCE = 120.0
"""Seconds that a finished recorder waits for the end that its parent gives it."""

_UNRELATED = {"_get_lr_called_within_step", "_is_initial", "verbose", "_schedulers", "lr_lambdas"}
"""Attributes of schedulers that have no part in what a schedule does next."""


def record_process(settings: Settings) -> None:
    """Record what this process does from now on; ``settings.guard`` guards its Accelerators
    first.
    """
    if settings.guard:
        from ckptfix.training.accelerator import patch_accelerate

        patch_accelerate()
    recorder = Recorder(settings, _wait_for_the_end)
    recorder.install()
    atexit.register(recorder.script_ended)


def _wait_for_the_end(settings: Settings) -> None:
    """Wait until the parent kills this process, so that all ranks end at the same place; never
    outlive the parent.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            os.kill(settings.parent, 0)
        except OSError:
            break
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


class _Passing:
    """One pass through a dataloader: its number and its facts once it trained, and whether it has
    ended.
    """

    def __init__(self, loader: Any, facts: Mapping[str, Any]) -> None:
        self.loader = loader
        self.facts = facts
        self.number = -1
        self.has_ended = False


class _ObservedIterator:
    """Iterator of a dataloader that shows every batch to the recorder."""

    def __init__(self, recorder: "Recorder", passing: _Passing, batches: Iterator[Any]) -> None:
        self._recorder = recorder
        self._passing = passing
        self._batches = batches

    def __iter__(self) -> "_ObservedIterator":
        return self

    def __next__(self) -> Any:
        with self._recorder.inside("iter"):
            try:
                batch = next(self._batches)
            except StopIteration:
                self._passing.has_ended = True
                raise
        self._recorder.drawn(self._passing, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __del__(self) -> None:
        self._passing.has_ended = True


class Recorder:
    """Writes the rows of one process. ``rest`` is called when the recording is over, and need not
    return.
    """

    def __init__(self, settings: Settings, rest: Callable[[Settings], None]) -> None:
        self._settings = settings
        self._rest = rest
        self._file: TextIO | None = None
        self._patches = Patches()
        self._handles: list[Any] = []
        self._depth: Counter[str] = Counter()
        self._accelerators: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._schedulers: list[weakref.ref[Any]] = []
        self._trainer: weakref.ref[Any] | None = None
        self._pending: list[tuple[_Passing, dict[str, Any]]] = []
        self._current: _Passing | None = None
        self._passes = 0
        self._epochs_set = 0
        self._steps: Counter[int] = Counter()
        self._rows = 0
        self._batches: list[dict[str, Any]] = []
        self._losses: list[dict[str, Any]] = []
        self._gradients: dict[str, str] = {}
        self._entries = 0
        self._has_losses = False
        self._collected_at = -1
        self._end = ""
        self._notes: set[str] = set()
        self._share = WHOLE_LEAF

    # Hooks.

    def install(self) -> None:
        """Put the recorder in front of the methods that train, save and load."""
        self._put(accelerate.Accelerator, "__init__", self._made_accelerator)
        self._put(torch.optim.Optimizer, "__init__", self._made(self._optimizers))
        for kind in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"):
            if "__init__" in vars(getattr(lr_scheduler, kind)):
                self._put(getattr(lr_scheduler, kind), "__init__", self._made(self._schedulers))
        self._put(accelerate.Accelerator, "backward", self._backward)
        self._put(AcceleratedOptimizer, "step", self._prepared_step)
        self._put(DataLoader, "__iter__", self._iterated)
        for loader in (DataLoaderShard, DataLoaderDispatcher):
            self._put(loader, "set_epoch", self._set_epoch)
        self._go_outside(accelerate.Accelerator)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_raw_step),
            register_optimizer_step_post_hook(self._after_raw_step),
        ]
        when_imported("transformers.trainer", self._install_trainer)

    def remove(self) -> None:
        """Put the methods back, and close the file; where others patched them since, the recorder
        does nothing.
        """
        self._end = "removed"
        for handle in self._handles:
            handle.remove()
        self._patches.remove()
        if self._file is not None:
            self._file.close()
            self._file = None

    def script_ended(self) -> None:
        """Note the end of a script that no exception ended: gloo's threads may still abort the
        process after it.
        """
        if self._file is not None and not self._end and getattr(sys, "last_value", None) is None:
            self._write("end", end="script")

    def _put(self, owner: Any, name: str, make: Callable[[Method], Method]) -> None:
        self._patches.put(owner, name, make, is_outermost=True)

    def _go_outside(self, kind: type[Any]) -> None:
        """Put the recorder in front of patches that came after it, so that it sees what the script
        sees.
        """
        for owner, name, make in (
            (kind, "save_state", self._saving(lambda self, given, result: str(result or given))),
            (kind, "load_state", self._loading),
            (DataLoaderShard, "__iter__", self._iterated),
            (DataLoaderDispatcher, "__iter__", self._iterated),
        ):
            home = next(base for base in owner.__mro__ if name in vars(base))
            self._put(home, name, make)

    def _install_trainer(self) -> None:
        from transformers.trainer import Trainer

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(trainer: Any, *args: Any, **kwargs: Any) -> None:
                original(trainer, *args, **kwargs)
                self._trainer = weakref.ref(trainer)
                for name, make in (
                    ("_save_checkpoint", self._saving(_folder_of_trainer)),
                    ("_load_from_checkpoint", self._loading),
                ):
                    home = next(
                        (base for base in type(trainer).__mro__ if name in vars(base)), None
                    )
                    if home is None:
                        self._note(f"{name} of this version of transformers is not observed")
                    else:
                        self._put(home, name, make)

            return method

        self._put(Trainer, "__init__", made)

    @contextmanager
    def inside(self, name: str) -> Iterator[bool]:
        """Enter a method that may call itself through others; yield whether this is the outermost
        call.
        """
        self._depth[name] += 1
        try:
            yield self._depth[name] == 1
        finally:
            self._depth[name] -= 1

    def _made_accelerator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            original(accelerator, *args, **kwargs)
            self._accelerators.append(weakref.ref(accelerator))
            self._go_outside(type(accelerator))

        return method

    def _made(self, things: list[weakref.ref[Any]]) -> Callable[..., Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(thing: Any, *args: Any, **kwargs: Any) -> None:
                original(thing, *args, **kwargs)
                if all(known() is not thing for known in things):
                    things.append(weakref.ref(thing))

            return method

        return make

    # Batches.

    def _iterated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(loader: Any) -> Any:
            with self.inside("iter") as is_first:
                batches = original(loader)
            if not is_first:
                return batches
            return _ObservedIterator(self, _Passing(loader, self._loader_facts(loader)), batches)

        return method

    def _set_epoch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(loader: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth["iter"]:
                self._epochs_set += 1
            return original(loader, *args, **kwargs)

        return method

    def drawn(self, passing: _Passing, batch: Any) -> None:
        """Note a batch; it counts as one that was trained on when a loss follows before its pass
        ends.
        """
        self._rest_if_due()
        if torch.is_grad_enabled() and not self._end:
            self._pending = [one for one in self._pending if not one[0].has_ended]
            self._pending.append((passing, self._digests_of(batch)))

    def _take_batches(self) -> None:
        """Move the batches that a loss is made of into the step."""
        for passing, digests in self._pending:
            if passing.number < 0:
                passing.number, self._passes = self._passes, self._passes + 1
                facts = {**passing.facts, "set_epoch": self._epochs_set > 0}
                self._write("pass", number=self._number, passing=passing.number, facts=facts)
            self._current = passing
            self._batches.append({**digests, "passing": passing.number})
        self._pending = []

    def _digests_of(self, batch: Any) -> dict[str, Any]:
        held = dict(leaves(batch))
        tensors = [
            value for value in held.values() if isinstance(value, torch.Tensor) and value.ndim
        ]
        size = len(tensors[0]) if tensors else 0
        rows = [one for one in tensors if len(one) == size]
        samples = [fingerprint([one[at] for one in rows])[:12] for at in range(min(size, SAMPLES))]
        return {
            "leaves": {path: self._digest(value, WHOLE_LEAF) for path, value in held.items()},
            "samples": samples,
        }

    def _loader_facts(self, loader: Any) -> dict[str, Any]:
        names = [type(one).__name__ for one in samplers_of(loader)]
        dataset = getattr(loader, "dataset", None)
        is_prepared = isinstance(loader, DataLoaderShard | DataLoaderDispatcher | SkipDataLoader)
        return {
            "prepared": is_prepared,
            "dispatched": isinstance(loader, DataLoaderDispatcher),
            "skips": bool(
                isinstance(loader, SkipDataLoader)
                or "SkipBatchSampler" in names
                or getattr(loader, "skip_batches", 0)
            ),
            "sampler": names[-1] if names else "",
            "seedable": "SeedableRandomSampler" in names,
            "stateful": bool(getattr(loader, "use_stateful_dataloader", False)),
            "workers": int(getattr(loader, "num_workers", 0) or 0),
            "iterable": isinstance(dataset, IterableDataset),
        }

    # Losses and steps.

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside("backward") as is_first:
                if is_first:
                    self._rest_if_due()  # a script without a loader draws no batch after a save
                if is_first and not self._end:
                    self._has_losses = True
                    self._take_batches()
                    self._enter()
                    value = f"{number_of(loss)}" if isinstance(loss, torch.Tensor) else repr(loss)
                    self._losses.append({"value": value, "generators": digests_of_generators()})
                return original(accelerator, loss, *args, **kwargs)

        return method

    def _enter(self) -> None:
        """Write the states with which a loss is met, where the run begins and where it is saved."""
        settings = self._settings
        if not self._entries or (
            settings.entry_at is not None and self._number == settings.entry_at
        ):
            # An optimizer that was replaced is part of a cycle, and lives until the collector comes
            # by: not by chance.
            if self._collected_at != self._number:
                gc.collect()
                self._collected_at = self._number
            states = self._states()
            # Gradients of masters are written anew before each step.
            states["gradients"] = self._gradients_now(
                self._of_models() or None, leave_out_zeros=True
            )
            states[UNPREPARED] = self._unprepared()
            at = {"rows": self._rows, "losses": len(self._losses)}
            self._write("entry", number=self._number, states=states, **at)
            self._entries += 1

    def _prepared_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(prepared: Any, *args: Any, **kwargs: Any) -> Any:
            if not prepared.gradient_state.sync_gradients or not self._is_training():
                return original(prepared, *args, **kwargs)
            with self.inside("step") as is_first:
                if not is_first:
                    return original(prepared, *args, **kwargs)
                self._before_step(prepared.optimizer)
                result = original(prepared, *args, **kwargs)
            self._after_step(prepared.optimizer)
            return result

        return method

    def _before_raw_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(self._depth[name] for name in ("step", "save", "load")):
            self._rest_if_due()
        if not self._depth["step"] and self._is_training():
            self._before_step(optimizer)

    def _after_raw_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._depth["step"] and self._is_training():
            self._after_step(optimizer)

    def _is_training(self) -> bool:
        """Return whether a step is one of the script: torch steps an optimizer itself while it
        saves or loads it.
        """
        return not self._end and not self._depth["save"] and not self._depth["load"]

    def _before_step(self, optimizer: Any) -> None:
        if not self._has_losses:
            self._take_batches()
            self._enter()
        # Those of another optimizer may be left from its last step, and are zeroed before its next.
        own = {id(one) for group in _groups_of(optimizer) for one in group["params"]}
        # One of masters, or of flattened parameters, has none of a model.
        self._gradients = self._gradients_now(own & self._of_models() or None)

    def _after_step(self, optimizer: Any) -> None:
        index = next((at for at, known in enumerate(self._optimizers) if known() is optimizer), -1)
        self._steps[index] += 1
        self._write(
            "step",
            number=self._number,
            optimizer=index,
            batches=self._batches,
            losses=self._losses,
            states={"gradients": self._gradients, **self._states()},
        )
        self._rows += 1
        self._batches, self._losses, self._gradients = [], [], {}

    @property
    def _number(self) -> int:
        return self._settings.base + max(self._steps.values(), default=0)

    # Saves, loads and the end.

    def _saving(
        self, folder_of: Callable[[Any, Any, Any], str]
    ) -> Callable[..., Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(thing: Any, *args: Any, **kwargs: Any) -> Any:
                with self.inside("save") as is_first:
                    marker = Path(self._settings.folder) / f"saving-{_rank()}"
                    marker.touch()
                    try:
                        result = original(thing, *args, **kwargs)
                    finally:
                        if is_first:
                            marker.unlink()
                if is_first and not self._end:
                    given = args[0] if args else kwargs.get("output_dir")
                    self._saved(os.path.abspath(folder_of(thing, given, result)))
                return result

            return method

        return make

    def _saved(self, folder: str) -> None:
        settings = self._settings
        counts = {"rows": self._rows, "batches": len(self._batches), "losses": len(self._losses)}
        self._write("save", number=self._number, folder=folder, **counts, facts=self._save_facts())
        if settings.kill_at is not None and self._number >= max(settings.kill_at, 1):
            (Path(settings.folder) / "saved").write_text(f"{self._number} {len(self._batches)}")
            self._end = "saved"

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(thing: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside("load") as is_first:
                result = original(thing, *args, **kwargs)
            if is_first:
                given = args[0] if args else next(iter(kwargs.values()), "")
                self._write("load", number=self._number, folder=str(given))
            return result

        return method

    def _rest_if_due(self) -> None:
        settings = self._settings
        if self._end == "removed":
            return
        if not self._end:
            if settings.last_step is not None and self._number >= settings.last_step:
                self._end = "last step"
            elif settings.kill_at is not None and self._has_been_saved():
                self._end = "saved"
        if self._end:
            if self._file is not None:
                self._write("end", end=self._end)
                (Path(settings.folder) / f"ended-{_rank()}").touch()
            self._rest(settings)

    def _has_been_saved(self) -> bool:
        """Return whether another rank, perhaps the only one that saves, saved at this place or at
        one before it.
        """
        try:
            text = (Path(self._settings.folder) / "saved").read_text()
        except OSError:
            return False
        place = [int(number) for number in text.split()]
        return len(place) == 2 and [self._number, len(self._batches)] >= place

    # States.

    def _find_prepared(self) -> None:
        """Add what accelerate holds and no constructor of torch made: optimizers and schedulers of
        other classes.
        """
        for _, accelerator in self._living(self._accelerators):
            for things, found in (
                (
                    self._optimizers,
                    [getattr(one, "optimizer", None) for one in accelerator._optimizers],
                ),
                (
                    self._schedulers,
                    [getattr(one, "scheduler", None) for one in accelerator._schedulers],
                ),
            ):
                for one in found:
                    if one is not None and all(known() is not one for known in things):
                        with suppress(TypeError):  # it takes no weak reference
                            things.append(weakref.ref(one))

    def _living(self, things: list[weakref.ref[Any]]) -> list[tuple[int, Any]]:
        return [(at, thing) for at, known in enumerate(things) if (thing := known()) is not None]

    def _models(self) -> list[Any]:
        models = []
        for _, accelerator in self._living(self._accelerators):
            models += [one for one in accelerator._models if isinstance(one, torch.nn.Module)]
        return models

    def _of_models(self) -> set[int]:
        return {id(one) for model in self._models() for one in model.parameters()}

    def _parameters(self) -> dict[int, tuple[str, Any]]:
        """Return the parameters of prepared models and of optimizers by their identity, each with
        its name.
        """
        self._find_prepared()
        found: dict[int, tuple[str, Any]] = {}
        models = self._models()
        for at, model in enumerate(models):
            for name, one in model.named_parameters():
                found.setdefault(
                    id(one), (name_of_tensor(name, at if len(models) > 1 else None), one)
                )
        for at, optimizer in self._living(self._optimizers):
            for group_at, group in enumerate(_groups_of(optimizer)):
                for place, one in enumerate(group["params"]):
                    words = f"parameter {place} of group {group_at} of optimizer {at}"
                    found.setdefault(id(one), (words, one))
        # Weights, gradients and two moments: four tensors a parameter share what is read in a step.
        sizes = [
            4 * local.numel() * local.element_size()
            for local in (local_part(one) for _, one in found.values())
        ]
        limit = self._settings.whole_bytes
        self._share = limit if sum(sizes) <= limit else max(limit // (4 * len(sizes)), LEAST)
        return found

    def _gradients_now(
        self, own: Collection[int] | None = None, *, leave_out_zeros: bool = False
    ) -> dict[str, str]:
        """Return the gradients of these parameters by their identity, by default of all."""
        parameters = self._parameters()
        found = {}
        for name, one in (parameters[key] for key in parameters if own is None or key in own):
            gradient = one.grad
            if gradient is not None and not (leave_out_zeros and is_zero(local_part(gradient))):
                found[name] = self._digest(gradient, self._share)
        return found

    def _states(self) -> dict[str, dict[str, str]]:
        parameters = self._parameters()
        names = {key: name for key, (name, _) in parameters.items()}
        models = self._models()
        states: dict[str, dict[str, str]] = {
            "weights": {name: self._digest(one, self._share) for name, one in parameters.values()},
            "buffers": {
                name_of_tensor(name, at if len(models) > 1 else None): self._digest(
                    one, self._share
                )
                for at, model in enumerate(models)
                for name, one in model.named_buffers()
            },
            "moments": {},
            "learning rate": {},
            "scheduler": {},
        }
        for at, optimizer in self._living(self._optimizers):
            of = f" of optimizer {at}" if len(self._optimizers) > 1 else ""
            for parameter, moments in getattr(optimizer, "state", {}).items():
                for key, value in moments.items() if isinstance(moments, dict) else ():
                    if value is not None:
                        name = names.get(id(parameter), "?")
                        moment = f"{key} of {name}{of if name == '?' else ''}"
                        states["moments"][moment] = self._digest(value, self._share)
            for group_at, group in enumerate(_groups_of(optimizer)):
                for key in ("lr", "momentum", "betas", "weight_decay"):
                    if key in group:
                        states["learning rate"][f"{key} of group {group_at}{of}"] = text_of(
                            group[key]
                        )
        for at, scheduler in self._living(self._schedulers):
            of = f" of {type(scheduler).__name__}{f' {at}' if len(self._schedulers) > 1 else ''}"
            for key, value in scheduler.state_dict().items():
                if key not in _UNRELATED:
                    states["scheduler"][f"{key}{of}"] = text_of(value)
        states |= {"scaler": {}, "counters": {}, "custom objects": {}}
        for _, accelerator in self._living(self._accelerators):
            scaler = accelerator.scaler
            if scaler is not None and hasattr(scaler, "state_dict"):
                states["scaler"] |= {
                    key: text_of(value) for key, value in scaler.state_dict().items()
                }
            cycle = accelerator.gradient_accumulation_steps
            if cycle > 1:
                states["counters"]["accumulation step"] = str(accelerator.step % cycle)
            for at, thing in enumerate(accelerator._custom_objects):
                with suppress(Exception):  # a state_dict of the user's
                    states["custom objects"][f"{type(thing).__name__} {at}"] = fingerprint(
                        thing.state_dict()
                    )
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            states["counters"] |= {"global_step of Trainer": str(trainer.state.global_step)}
        states["generators"] = digests_of_generators()
        return {state: named for state, named in states.items() if named}

    def _unprepared(self) -> dict[str, str]:
        """Return the tensors of models that are in no prepared model, optimizer or custom object."""
        models = self._models()
        things = [
            one
            for _, accelerator in self._living(self._accelerators)
            for one in accelerator._custom_objects
            if isinstance(one, torch.nn.Module)
        ]
        known = set(self._parameters())
        for one in (*models, *things):
            known |= {id(tensor) for tensor in (*one.parameters(), *one.buffers())}
        return digests_of_unprepared(models, known, lambda one: self._digest(one, self._share))

    def _save_facts(self) -> dict[str, Any]:
        saved: set[int] = set()
        for _, accelerator in self._living(self._accelerators):
            for one in (
                *accelerator._schedulers,
                *accelerator._optimizers,
                *accelerator._custom_objects,
            ):
                saved |= {
                    id(one),
                    id(getattr(one, "scheduler", one)),
                    id(getattr(one, "optimizer", one)),
                }
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            saved |= {
                id(getattr(trainer, "lr_scheduler", None)),
                id(getattr(trainer, "optimizer", None)),
            }
        schedulers = self._living(self._schedulers)
        for _, one in schedulers:
            if id(one) in saved:
                saved |= {id(inner) for inner in getattr(one, "_schedulers", ())}
        passing, models = self._current, self._models()
        accelerators = [one for _, one in self._living(self._accelerators)]
        return {
            "trainer": trainer is not None,
            "skips_data": bool(trainer is not None and trainer.args.ignore_data_skip),
            "unsaved_schedulers": [
                type(one).__name__ for _, one in schedulers if id(one) not in saved
            ],
            "unsaved_optimizers": [
                type(one).__name__
                for at, one in self._living(self._optimizers)
                if id(one) not in saved and self._steps[at]
            ],
            "unsaved_buffers": [
                name_of_tensor(name, at if len(models) > 1 else None)
                for at, model in enumerate(models)
                for name in _transient_buffers(model)
            ],
            "is_cut": any(not one.sync_gradients for one in accelerators) or bool(self._losses),
            "accumulation": max(
                (one.gradient_accumulation_steps for one in accelerators), default=1
            ),
            "inside_pass": passing is not None and not passing.has_ended,
            "last_of_pass": (
                passing is not None and bool(getattr(passing.loader, "end_of_dataloader", False))
            ),
            "distributed": (
                str(accelerators[-1].distributed_type).rpartition(".")[2] if accelerators else ""
            ),
        }

    def _digest(self, value: Any, limit: int) -> str:
        """Return a digest of a tensor's bytes, or of any other value; a tensor above ``limit``
        bytes is sampled.
        """
        if not isinstance(value, torch.Tensor):
            return fingerprint(value)[:12]
        local = local_part(value.detach())
        try:
            if local.numel() * local.element_size() <= limit or local.layout is not torch.strided:
                return fingerprint(value)[:12]
            self._note("sampled")
            return sampled_digest(local, limit)
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
        ):  # a class of tensors whose bytes cannot be seen
            self._note(f"tensors of type {type(value).__name__}: their bytes cannot be read")
            return "?"

    # Rows.

    def _note(self, words: str) -> None:
        if words not in self._notes:
            self._notes.add(words)
            self._write("note", words=words)

    def _write(self, row: str, **values: Any) -> None:
        if self._end == "removed":
            return
        if self._file is None:
            folder = Path(self._settings.folder)
            self._file = (folder / f"rank-{_rank()}-{os.getpid()}.jsonl").open(
                "x", encoding="utf-8"
            )
            versions = {"accelerate": accelerate.__version__, "torch": str(torch.__version__)}
            if "transformers" in sys.modules:
                versions["transformers"] = str(
                    getattr(sys.modules["transformers"], "__version__", "?")
                )
            world = int(os.environ.get("WORLD_SIZE", "1"))
            self._write("run", rank=_rank(), world=world, pid=os.getpid(), versions=versions)
        self._file.write(json.dumps({"row": row, **values}) + "\n")
        self._file.flush()


def _folder_of_trainer(trainer: Any, given: Any, result: Any) -> str:
    folder = trainer._get_output_dir(trial=None)
    return os.path.join(folder, f"checkpoint-{trainer.state.global_step}")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _transient_buffers(model: Any) -> Iterator[str]:
    """Yield the names of buffers that no ``state_dict`` holds."""
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def _groups_of(optimizer: Any) -> Sequence[Any]:
    """Return the param groups of an optimizer, none of an object that keeps them elsewhere."""
    groups: Sequence[Any] = getattr(optimizer, "param_groups", ())
    return groups

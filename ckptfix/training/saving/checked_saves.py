"""Checks of what a guarded run has just saved: whether it will load, and whether its weights have
changed.

The findings about loads are those of ``ckptfix check``, from configs and headers. The run knows
more than the files: its optimizers tell the step, and which parameters they train. No save fails
here, and none waits for long.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any, NamedTuple

import torch
from accelerate.state import PartialState
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import FileName
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.keys import adapter_name, without_adapter_name
from ckptfix.checkpoint.load_inputs import (
    CONFIG_OF_LIBRARY,
    Load,
    adapters_without_config,
    loads_of,
    lora_of_diffusers,
)
from ckptfix.checkpoint.model_files import group_files
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.samples import digest_of, is_table, must_change, samples_of, weights_in
from ckptfix.checkpoint.second_prepare import LEAST_RATE
from ckptfix.devices.patching import Method
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.load_faults import (
    DeadAdapter,
    DeadLora,
    UngatheredParts,
    UntrainedAdapter,
)
from ckptfix.diagnosis.findings.stale import StaleSave
from ckptfix.diagnosis.loads import JUDGED, diagnose_loads
from ckptfix.diagnosis.saved_optimizers import bare
from ckptfix.errors import UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.paths import shell_path
from ckptfix.storage.reading import read_start
from ckptfix.storage.staged import is_temporary
from ckptfix.training.guard import DEFAULTS, GUARDS, Settings
from ckptfix.training.prepared import innermost

VARIABLE = "CKPTFIX_CHECK_SAVES"

_SECONDS, _BYTES = 0.05, 1_000_000
"""Most time of a check, and most bytes that it reads."""

_FIRST_SECONDS = 1.0
"""Most time of the first check of a run or a model, which may import the rules of its library."""

_SAMPLES = 1 << 18
"""Bytes of the samples of weights: they are read at every save, and equal ones are rare."""

_BEGINNING = 16
"""Numbers at the beginning of a parameter that every sample has."""

_WEIGHTS = (Role.MODEL, Role.WEIGHTS_INDEX)

_log = logging.getLogger("ckptfix")
_said: set[str] = set()
"""Kinds of what was said in this process."""


class _Last(NamedTuple):
    """The last save whose weights differed from those before. ``repeats``: later ones with equal
    weights.

    ``name``: of its folder. ``steps``: id of an optimizer -> its steps.
    """

    name: str
    digest: str
    steps: Mapping[int, int]
    repeats: int = 0


_last: "weakref.WeakKeyDictionary[Any, _Last]" = weakref.WeakKeyDictionary()
"""An Accelerator, a Trainer or a model, which saves itself again and again -> its last save."""


_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those of them of which a save was checked."""


_too_long: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those of them whose check reached a limit: each later one would cost as much."""


class _Trained(NamedTuple):
    """A parameter that an optimizer trains. ``name``: in its model. ``rate``: the learning rate."""

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    rate: float

    @property
    def step(self) -> int:
        """The steps that the optimizer has made with it."""
        return int(_own(self.optimizer.state[self.parameter]["step"]))

    @property
    def changes_at_the_beginning(self) -> bool:
        """True where the steps change what a sample shows: of an embedding they change the rows
        that were used, and a script may set them back.
        """
        return not is_table(self.parameter.shape) and any(
            isinstance(value, torch.Tensor)
            and value.shape == self.parameter.shape
            and bool(_own(value).flatten()[:_BEGINNING].any())
            for value in self.optimizer.state[self.parameter].values()
        )


def _own(value: Any) -> Any:
    """Return this process's part of a DTensor: any operation on a whole one may wait for all other
    processes.
    """
    return value.to_local() if hasattr(value, "to_local") else value


class _LimitReached(Exception):
    """A check takes more time, or reads more, than a save may wait for."""


class _Budget:
    """Time and bytes that are left to one check."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = perf_counter() + self._seconds
        self._left = _BYTES

    def take(self, size: int = 0) -> None:
        """Take bytes that are about to be read. Raises _LimitReached."""
        self._left -= size
        if self._left < 0:
            raise _LimitReached(f"the check would read more than {_BYTES / 1e6:g} MB")
        if perf_counter() > self._end:
            raise _LimitReached(f"the check took more than {1000 * self._seconds:g} ms")


def checks_saves(given: bool | None) -> bool:
    """Return whether saves are checked: as given, else as the environment says, else True. Raises
    UsageError.
    """
    text = os.environ.get(VARIABLE) or "1"
    if given is None and text not in ("0", "1"):
        raise UsageError(f"{VARIABLE}={text}: expected 0 or 1")
    return text == "1" if given is None else given


def forget() -> None:
    """Forget what was said and saved, as in a new process."""
    _said.clear()
    _last.clear()
    _seen.clear()
    _too_long.clear()


def check_save(
    settings: Settings,
    folder: Path,
    name: Path | str,
    subject: object,
    models: Iterable[Any],
    *,
    step: int | None = None,
    below: Collection[str] | None = None,
    repeats: int = 1,
) -> None:
    """Warn of what a save has left in a folder, once for each kind in this process. Raises nothing.

    ``name``: of the folder for the user, who finds it there. ``subject``: what saves itself,
    ``models``: its models. ``step``: of the training, by default the optimizer's. ``below``: the
    sub-folders that the save wrote, by default all. ``repeats``: the saves after one of equal
    weights that show a fault.
    """
    try:
        if not checks_saves(settings.check_saves) or subject in _too_long:
            return
        # A collection takes 200 ms in a process with transformers, and would count for the limit.
        with paused_gc():
            _check(folder, name, subject, list(models), step, below, repeats)
    except _LimitReached as limit:
        with suppress(TypeError):  # no weak reference to it
            _too_long.add(subject)
        what = f"neither this save nor later saves are checked: {limit}"
        _say("limit", f"{name}: {what}; next: {_command('check', name)}")
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _say(
            "failed",
            f"{name}: the check after the save failed: {what}; next: {_command('check', name)}",
        )


def _check(
    folder: Path,
    name: Path | str,
    subject: object,
    models: Iterable[Any],
    step: int | None,
    below: Collection[str] | None,
    repeats: int,
) -> None:
    budget = _Budget(_SECONDS if subject in _seen else _FIRST_SECONDS)
    with suppress(TypeError):  # no weak reference to it
        _seen.add(subject)
    steps = _steps()
    scans = dict(_scans(folder, below, budget))
    for where, scan in scans.items():
        place = f"{name}/{where}" if where.name else str(name)
        for finding in _findings(scan, max((*steps.values(), step or 0)), budget):
            trained = _trained(models)
            # Another model than that of this save may have made the steps. A Trainer has one.
            if trained or step is not None or not isinstance(finding, UntrainedAdapter):
                own = trained[0].step if trained else _steps_of_engine(models)
                _say(finding.code, _described(finding, place, own if step is None else step))
    last = _same_as_last(Path(name).name, subject, scans, steps, budget) if steps else None
    if last is not None:
        _judge_equal(name, subject, last, steps, scans, models, repeats)


def _scans(
    folder: Path, below: Collection[str] | None, budget: _Budget
) -> Iterator[tuple[PurePosixPath, CheckpointFolder]]:
    """Yield the folder and those of its sub-folders that a library loads a model from, with the
    weights scanned.
    """
    top = _scan(folder, budget)
    yield PurePosixPath(), top
    for where in top.plain_subfolders if below is None else map(PurePosixPath, below):
        if any((folder / where / config).is_file() for config in set(CONFIG_OF_LIBRARY.values())):
            yield where, _scan(folder / where, budget)


def _scan(folder: Path, budget: _Budget) -> CheckpointFolder:
    states: list[str] = []

    def is_wanted(name: FileName) -> bool:
        if not (name.is_of_library or name.role in _WEIGHTS):
            states.append(str(name))
            return False
        budget.take(_header_size(folder / str(name), name))
        return True

    scan = scan_folder(folder, wanted=is_wanted)
    # Of a file of torch the pickle is read before its size is known.
    budget.take(
        sum(
            len(one.content.tree.data)
            for one in scan.components
            if isinstance(one.content, TorchFile)
        )
    )
    return replace(scan, unscanned=tuple(states))


def _header_size(path: Path, name: FileName) -> int:
    if name.role is Role.WEIGHTS_INDEX:
        return path.stat().st_size
    if name.suffix != ".safetensors":
        return 0
    return min(int.from_bytes(read_start(path, 8) or b"", "little"), path.stat().st_size)


def _findings(scan: CheckpointFolder, steps: int, budget: _Budget) -> Iterator[Finding]:
    """Yield the findings about loads that are worth a warning."""
    groups = group_files(scan)
    loads = [*loads_of(scan, groups, libraries=JUDGED, count_steps=lambda: steps)]
    loads += adapters_without_config(scan, groups, loads)
    loads += lora_of_diffusers(scan, groups)
    for told in diagnose_loads([load._replace(sample=_metered(load, budget)) for load in loads]):
        # A resume reads DeepSpeed's own folder, so check gives a note. Who takes the adapter alone
        # has nothing.
        if isinstance(told, Finding) and (
            told.severity is not Severity.NOTE or isinstance(told, UngatheredParts)
        ):
            yield told


def _metered(load: Load, budget: _Budget) -> Callable[[str, int], bytes | None]:
    """Return the samples of a load, taken from the budget."""

    def metered(key: str, size: int) -> bytes | None:
        budget.take(size)
        return load.sample(key, size)

    return metered


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    """Yield the prepared optimizers, but for those of DeepSpeed, which train copies of the
    parameters.
    """
    for accelerator in list(GUARDS):
        for prepared in accelerator._optimizers:
            if isinstance(optimizer := innermost(prepared), torch.optim.Optimizer):
                yield optimizer


def _steps() -> dict[int, int]:
    """Return the steps of each optimizer that counts them, by its id: fp16 skips some, which no
    script counts.
    """
    steps = {}
    for optimizer in _optimizers():
        groups = (
            group for group in optimizer.param_groups if float(group.get("lr", 0.0)) > LEAST_RATE
        )
        states = (
            optimizer.state.get(parameter, {}) for group in groups for parameter in group["params"]
        )
        step = next((one["step"] for one in states if "step" in one), None)
        if step is not None:
            steps[id(optimizer)] = int(_own(step))
    return steps


def _trained(models: Iterable[Any]) -> list[_Trained]:
    """Return the parameters of models that an optimizer trains, at a rate that changes them in
    fp32.
    """
    trained: dict[int, tuple[torch.optim.Optimizer, float]] = {}
    for optimizer in _optimizers():
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 0.0))
            for parameter in group["params"]:
                if (
                    rate > LEAST_RATE
                    and parameter.requires_grad
                    and "step" in optimizer.state.get(parameter, {})
                ):
                    trained[id(parameter)] = optimizer, rate
    return [
        _Trained(name, parameter, *trained[id(parameter)])
        for model in models
        for name, parameter in innermost(model).named_parameters()
        if id(parameter) in trained
    ]


def _steps_of_engine(models: Iterable[Any]) -> int | None:
    """Return the steps of the engine of DeepSpeed around one of the models, None where there is
    none.
    """
    inside = {id(innermost(model)) for model in models}
    for engine in (engine for accelerator in list(GUARDS) for engine in accelerator._models):
        if hasattr(engine, "global_steps") and id(innermost(engine)) in inside:
            return int(engine.global_steps)
    return None


def _same_as_last(
    name: str,
    subject: object,
    scans: Mapping[PurePosixPath, CheckpointFolder],
    steps: Mapping[int, int],
    budget: _Budget,
) -> _Last | None:
    """Return the last save of this subject where the weights equal it in samples of all; remember
    this one.
    """
    digests = []
    has_weights = False
    for where, scan in scans.items():
        weights = weights_in(replace(scan, subfolders={}), ())
        if weights is None:
            return None
        samples = samples_of(weights, _SAMPLES)
        if samples is None:
            return None
        budget.take(sum(piece.length for piece in samples))
        digests.append(f"{where}:{digest_of(scan.root, samples)}")
        has_weights = has_weights or bool(samples)
    if not has_weights:
        return None
    digest, last = " ".join(digests), _last.get(subject)
    if last is not None and last.digest == digest:
        return last
    _last[subject] = _Last(name, digest, steps)
    return None


def _judge_equal(
    name: Path | str,
    subject: object,
    last: _Last,
    steps: Mapping[int, int],
    scans: Mapping[PurePosixPath, CheckpointFolder],
    models: Iterable[Any],
    repeats: int,
) -> None:
    """Warn of weights that equal the last ones, where trained weights are among them and steps were
    made.
    """
    files = [file for scan in scans.values() for file in scan.components]
    # The tensors of ZeRO-3 have no elements, and are equal in each save.
    dtypes = {
        bare(tensor.fqn): tensor.dtype
        for file in files
        for tensor in file.tensors
        if 0 not in tensor.shape
    }
    for one in _trained(models):
        before = last.steps.get(id(one.optimizer))
        saved = [dtypes[key] for key in _keys_of(one.name) if key in dtypes]
        own = TORCH_DTYPES.get(str(one.parameter.dtype).removeprefix("torch."), "")
        if before is None or not saved or not must_change(one.rate, {own, *saved}):
            continue
        if one.step <= before or not one.changes_at_the_beginning:
            continue
        _last[subject] = last._replace(steps=steps, repeats=last.repeats + 1)
        if last.repeats + 1 >= repeats:
            finding = StaleSave(
                path=files[0].path,
                save=last.name,
                state="weights",
                counter=f"the step of {type(one.optimizer).__name__}",
                begin=before,
                end=one.step,
                rate=one.rate,
                sampled=True,
            )
            _say(finding.code, _described(finding, str(name), one.step))
        return


def _keys_of(name: str) -> set[str]:
    """Return the keys under which a parameter is saved: PEFT takes the name of the adapter out."""
    key = bare(name)
    return {key, without_adapter_name(key, adapter_name(key))}


def _described(finding: Finding, place: str, step: int | None) -> str:
    remedy = "; ".join(finding.advice_at(place).splitlines()) or _command("repair", place)
    if isinstance(finding, DeadAdapter) and not isinstance(finding, DeadLora):
        remedy += (
            "; for the next save, call accelerator.unwrap_model(model, "
            "keep_torch_compile=False).save_pretrained(...) without the state_dict of a "
            "wrapper"
        )
    at = f" (step {step})" if step is not None else ""
    return (
        f"{place}{at}: {finding}; next: {remedy}; reported once per run: ckptfix explain "
        f"{finding.code}"
    )


def _command(verb: str, place: Path | str) -> str:
    return f"ckptfix {verb} {shell_path(place)}"


def _say(kind: str, words: str) -> None:
    if kind not in _said:
        _said.add(kind)
        _log.warning("%s", words)


def save_pretrained(
    model: Any, method: Method, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> Any:
    """Guard ``save_pretrained`` of transformers and PEFT: check what one process of each disk has
    written.

    What a guarded save calls is checked with it: its folder has a temporary name.
    """
    result = method(save_directory, *args, **kwargs)
    folder = Path(os.path.abspath(save_directory))
    if (
        folder.is_dir()
        and not any(map(is_temporary, folder.parts))
        and _leads(kwargs.get("is_main_process"))
    ):
        selected = kwargs.get("selected_adapters")
        check_save(
            DEFAULTS,
            folder,
            folder,
            model,
            # Another adapter than the trained one may be saved as a reference.
            [model] if selected is None else [],
            below=[name for name in getattr(model, "peft_config", None) or {} if name != "default"],
            # A script loads its best weights again before the last save.
            repeats=2,
        )
    return result


def _leads(is_main_process: bool | None) -> bool:
    """Return whether this process checks: the first of all, or of a node where the script says that
    it writes.
    """
    if not PartialState._shared_state:
        return is_main_process is not False
    state = PartialState()
    leads = state.is_main_process if is_main_process is None else state.is_local_main_process
    return bool(leads and is_main_process is not False)

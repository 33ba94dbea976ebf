"""The three-way proof: one device, the split with direct copies, the same split with staged copies.

Direct against staged, with one map and the same kernels, judges transfers; staged against one
device judges kernels; staged against itself shows non-determinism. Runs that decide are never
traced: reading tensors back synchronises, and a race does not happen while one looks. So a pair at
fault is found without looking, by letting it alone copy directly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import find_tied_parameters
from msgspec import Struct, field
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckptfix.devices.interception import can_override
from ckptfix.devices.reload.device_maps import CPU, DISK, answers, has_room
from ckptfix.devices.reload.dispatched import Outputs, Trial, on_one_device, run
from ckptfix.devices.reload.filling import size_of
from ckptfix.devices.reload.outputs import (
    ANYTHING,
    Deviation,
    deviation,
    equal_bits,
    holds_nan,
    in_words,
)
from ckptfix.devices.reload.reload_report import Outcome, Proofs, Subject
from ckptfix.devices.reload.user_model import Built, Inputs
from ckptfix.devices.routing import bypassed
from ckptfix.devices.torch_devices import device
from ckptfix.devices.transfers import safe_transfers
from ckptfix.hardware import Pair
from ckptfix.wording import count_of


def alone(run: Callable[[], Outputs], reference: Outputs, pair: Pair, repeats: int) -> int:
    """Return how many of ``repeats`` runs differ from ``reference`` when only this pair copies
    directly.
    """
    wrong = 0
    with safe_transfers("always"):
        for _ in range(repeats):
            try:
                with _OneDirect(pair):
                    wrong += not equal_bits(run(), reference)
            except ANYTHING:  # of what the model makes of wrong bytes, no staged run raises it
                wrong += 1
    return wrong


class _OneDirect(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """Copies of one pair pass the staging; nothing is read back."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pair in _pairs_of(func, args, kwargs):
            with bypassed():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _pairs_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Pair]:
    """Yield a pair for each tensor that an operation moves between accelerators: ``.to``, ``copy_``
    and ``_foreach_copy_``.
    """
    name = func.overloadpacket if hasattr(func, "overloadpacket") else func
    moved: list[tuple[torch.Tensor, torch.device | None]] = []
    if name is torch.ops.aten._to_copy:
        moved = [(args[0], kwargs.get("device"))]
    elif name is torch.ops.aten.copy_:
        moved = [(args[1], args[0].device)]
    elif name is torch.ops.aten._foreach_copy_:
        moved = [(source, into.device) for into, source in zip(args[0], args[1], strict=True)]
    for source, target in moved:
        start = source.device
        if target is None or start.type != target.type or start.type in (CPU, "meta"):
            continue
        end = target.index
        if end is None:
            end = torch.get_device_module(target).current_device()
        if start.index != end:
            yield int(start.index or 0), int(end)


@contextmanager
def _following_calls(model: Any, enter: Callable[[str], None]) -> Iterator[None]:
    """Call ``enter`` with the name of each module before its forward."""
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: enter(name))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unreached_parts(model: Any, inputs: Inputs, where: torch.device) -> tuple[str, ...] | None:
    """Return the outermost modules, or the parameters, that a forward pass does not use; None when
    that is not known.

    A text model's vision tower gets no input, and proves nothing. Runs the model once more: what
    watches it must not take part in a run that is compared.
    """
    watch = _Watch()
    try:
        with _following_calls(model, watch.called.add), watch:
            run(model, inputs, where)
    except ANYTHING:  # a model that does not run while it is watched, as a compiled one may
        return None
    reached = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in watch.used or name.rpartition(".")[0] in watch.called
    }
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    touched = {part for name in reached for part in _around(name)}
    parts = {
        next(part for part in (*_around(name), name) if part not in touched)
        for name in every
        if name not in reached
    }
    return tuple(sorted(parts))


def first_nan(model: Any, run: Callable[[], Outputs]) -> str:
    """Return in words the first module whose output holds NaN in one more run, "" where none does.

    A module ends before the one around it, so the first is the innermost. What computes between two
    modules shows in the input of the second.
    """
    named: list[str] = []
    inputs: dict[str, bool] = {}

    def before(name: str, module: Any, args: Any, kwargs: Any) -> None:
        inputs[name] = not named and holds_nan((args, kwargs))

    def after(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not named and holds_nan(output):
            shown = (
                f"{name!r} ({type(module).__name__})" if name else f"{type(module).__name__} itself"
            )
            named.append(
                f"{shown}, whose input already contains NaN" if inputs.get(name) else shown
            )

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(
                module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
        run()
    except ANYTHING:  # a model that does not run while it is watched, as a compiled one may
        pass
    finally:
        for handle in handles:
            handle.remove()
    return named[0] if named else ""


class _Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """Notes every parameter that a function of torch is given, and every module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.called: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A look at its dtype or device is no use of it.
        if getattr(func, "__name__", "") != "__get__":
            self.used.update(
                id(value)
                for value in tree_leaves((args, kwargs))
                if isinstance(value, torch.nn.Parameter)
            )
        return func(*args, **(kwargs or {}))


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first."""
    steps = name.split(".")
    return [".".join(steps[:depth]) for depth in range(1, len(steps))]


_NOISE = 10.0
"""A direct run that lies this many times farther away than staged runs from each other is not
noise.
"""


class Runs(Struct, kw_only=True):
    """Results of the runs of one split. ``moves``: copies of a forward pass by pair, of those over
    which any went.
    """

    proofs: Proofs = field(default_factory=Proofs)
    moves: Mapping[Pair, int] = field(default_factory=dict)
    alone_runs: int = 0
    alone_wrong: dict[Pair, int] = field(default_factory=dict)


class Deviations(Struct, kw_only=True):
    """Outputs that differ from a first one: how many, the farthest of them, and what a run raised.

    ``has_nan``: one of them holds NaN.
    """

    first: Outputs
    wrong: int = 0
    worst: Deviation = field(default_factory=Deviation)
    raised: str = ""
    has_nan: bool = False

    def count(self, output: Outputs) -> None:
        """Compare one output."""
        if not equal_bits(output, self.first):
            self.wrong += 1
            self.has_nan = self.has_nan or holds_nan(output)
            found = deviation(output, self.first)
            self.worst = (
                found if self.wrong == 1 or found.relative > self.worst.relative else self.worst
            )

    def is_beyond(self, noise: Deviation) -> bool:
        """Return whether they lie farther away than runs lie from each other anyway."""
        return self.worst.relative > _NOISE * noise.relative


class Baseline(Struct, frozen=True, kw_only=True):
    """The model on one device. ``problem``: why it has no output, "" where it has one.

    ``unreached``: the parts of the model that no input reached, None where that is not known.
    ``nan_at``: the first module whose output holds NaN, in words.
    """

    output: Outputs = field(default_factory=dict)
    problem: str = ""
    unreached: tuple[str, ...] | None = ()
    nan_at: str = ""


def baseline(built: Built, where: torch.device, *, seeks_nan: bool) -> Baseline:
    """Run the model on one device, without a copy between accelerators.

    All of the model where it fits, else with its weights brought from host memory block by block.
    ``seeks_nan``: look for NaN in the outputs of its modules although there may be none in its own.
    """
    assert not isinstance(built.inputs, str)
    ways = (True, False) if where.type == CPU or has_room(where, size_of(built.model)) else (False,)
    once = partial(run, built.model, built.inputs, where)
    problem = nan_at = ""
    for whole in ways:
        try:
            with on_one_device(built, where, whole=whole):
                if seeks_nan:  # before the run, which may raise for NaN
                    nan_at = first_nan(built.model, once)
                output = once()
                if not nan_at and holds_nan(output):
                    nan_at = first_nan(built.model, once)
                unreached = unreached_parts(built.model, built.inputs, where) if whole else None
                return Baseline(output=output, unreached=unreached, nan_at=nan_at)
        except ANYTHING as error:  # the model's own forward
            problem = problem or in_words(error)
    return Baseline(problem=problem, nan_at=nan_at)


def _hint(built: Built, trial: Trial) -> str:
    """Return what is known of maps like this one on which a model fails, "" for nothing."""
    if DISK not in trial.device_map.values() or not find_tied_parameters(built.model):
        return ""
    # accelerate keeps tied weights by the address of a tensor that may be freed, and the disk's
    # next one can lie there.
    return (
        "; accelerate can fill a weight offloaded to disk with the values of tied weights: use a "
        "map without disk"
    )


def compare_split(
    built: Built,
    trial: Trial,
    single: Outputs,
    where: torch.device,
    repeats: int,
    hangs: frozenset[Pair],
) -> Runs:
    """Run a dispatched model ``repeats`` times each way and say what the outputs prove.

    ``single``: the output on one device. ``hangs``: pairs whose direct copies do not end. A map
    with one accelerator has one way only, and one without any runs once. What the model raises is
    in the lines; only ``ModelLost`` is not.
    """
    runs = Runs()
    inputs = built.inputs
    accelerators = trial.accelerators
    assert not isinstance(inputs, str)

    def once() -> Outputs:
        return run(built.model, inputs, where)

    try:
        if len(accelerators) < 2:
            many = repeats if accelerators else 1
            is_asked = trial.is_asked or bool(accelerators)
            _compare_repeated(runs, built, once, single, many, f"{where} alone", is_asked=is_asked)
            return runs
        staged = _staged(runs, once, repeats)
    except ANYTHING as error:  # the model's own forward
        text = f"split: the model does not run on this map: {in_words(error)}{_hint(built, trial)}"
        runs.proofs.add(
            Subject.OUTPUTS, Outcome.FAILED if trial.is_asked else Outcome.NOT_EXERCISED, text
        )
        if len(accelerators) > 1:
            text = "direct vs. staged copies: the model does not run"
            runs.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
        return runs
    first, noise = staged
    blocked = sorted(hangs & runs.moves.keys())
    if not runs.moves:
        text = "direct vs. staged copies: the forward pass copies nothing between accelerators"
        runs.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
    elif blocked:
        named = ", ".join(f"{source} -> {destination}" for source, destination in blocked)
        text = (
            f"direct runs of the split: copies {named} hang in the probe, and the split needs them"
        )
        runs.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
    else:
        _compare_direct(runs, trial, once, first, noise, repeats)
    _compare_kernels(runs, built, once, first, single, noise, f"{where} alone")
    return runs


def _nan_of_split(built: Built, once: Callable[[], Outputs], single: Outputs) -> str:
    """Return in words where a split gets NaN that one device does not have."""
    if holds_nan(single):
        return ""
    with safe_transfers("always"):
        where = first_nan(built.model, once)
    return f"; NaN first appears in the output of {where}" if where else ""


def _staged(
    runs: Runs, once: Callable[[], Outputs], repeats: int
) -> tuple[Outputs, Deviation | None]:
    """Return the first staged output, and how far the others lie from it; None when all are equal
    in every bit.
    """
    with safe_transfers("always") as transfers:
        found = Deviations(first=once())
        runs.moves = {
            pair: copies
            for pair, count in transfers.counters().items()
            if (copies := count.staged + count.direct)
        }
        for _ in range(repeats - 1):
            found.count(once())
        if not can_override():
            missed = "; ".join(transfers.not_covered)
            text = (
                "with this torch version, staging covers only accelerate's own copies; "
                f"direct in both runs: {missed}"
            )
            runs.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
    return found.first, found.worst if found.wrong else None


def _compare_direct(
    runs: Runs, trial: Trial, once: Callable[[], Outputs], first: Outputs,
    noise: Deviation | None, repeats: int,
) -> None:  # fmt: skip
    direct = Deviations(first=first)
    for number in range(repeats):
        try:
            with bypassed():
                output = once()
        except (
            ANYTHING
        ) as error:  # wrong bytes make a model raise anything: an index that no table has, a check
            direct.wrong += 1
            direct.raised = direct.raised or f"direct run {number + 1} raised {in_words(error)}"
            if not all(answers(device(index)) for index in trial.accelerators):
                text = (
                    f"transfer fault: {direct.raised}; staged runs did not, and a device no "
                    "longer responds"
                )
                runs.proofs.add(Subject.SPLIT, Outcome.FAILED, text)
                return
            continue
        direct.count(output)
    is_fault = direct.wrong > 0 if noise is None else direct.is_beyond(noise)
    if not direct.raised and not is_fault:
        _add_no_fault(runs, direct, noise, repeats)
        return
    many = count_of(repeats, "run")
    if direct.raised:
        text = (
            f"transfer fault: {direct.raised}; staged runs did not; {direct.wrong} of {many} wrong"
        )
    elif noise is not None:
        text = f"transfer fault beyond the noise: {_noisy(direct, noise)}"
    else:
        text = (
            f"transfer fault: {direct.wrong} of {many} with direct copies differ from the "
            f"staged runs ({direct.worst})"
        )
    if noise is None:
        runs.alone_runs = repeats
        runs.alone_wrong = {pair: alone(once, first, pair, repeats) for pair in runs.moves}
        text += f"; {_in_words([pair for pair, wrong in runs.alone_wrong.items() if wrong])}"
    runs.proofs.add(Subject.SPLIT, Outcome.FAILED, f"{text}; next: ckptfix doctor --peer-copies")


def _in_words(suspects: Sequence[Pair]) -> str:
    if not suspects:
        return "no single pair reproduces it"
    named = ", ".join(f"{source} -> {destination}" for source, destination in suspects)
    return f"wrong when only this pair copies directly: {named}"


def _noisy(direct: Deviations, noise: Deviation) -> str:
    return (
        f"staged runs differ from each other ({noise}), direct runs from staged ones "
        f"({direct.worst})"
    )


def _add_no_fault(runs: Runs, direct: Deviations, noise: Deviation | None, repeats: int) -> None:
    if noise is not None:
        text = f"direct vs. staged copies: non-determinism, {_noisy(direct, noise)}"
        runs.proofs.add(Subject.SPLIT, Outcome.NOT_EXERCISED, text)
        return
    count = sum(runs.moves.values())
    copies = "1 copy" if count == 1 else f"{count} copies"
    text = (
        f"direct split == staged split: {count_of(repeats, 'run')} with {copies} between "
        "accelerators each, equal in every bit"
    )
    runs.proofs.add(Subject.SPLIT, Outcome.PROVEN, text)


def _compare_kernels(
    runs: Runs, built: Built, once: Callable[[], Outputs], output: Outputs, single: Outputs,
    noise: Deviation | None, one: str,
) -> None:  # fmt: skip
    if equal_bits(output, single):
        runs.proofs.add(Subject.OUTPUTS, Outcome.PROVEN, f"split == {one}: equal in every bit")
        return
    found = deviation(output, single)
    if not found.is_within:
        where = _nan_of_split(built, once, single) if holds_nan(output) else ""
        text = (
            f"the split differs from {one} by more than different kernels explain: {found}{where}"
        )
        runs.proofs.add(Subject.OUTPUTS, Outcome.FAILED, text)
        return
    why = "non-determinism" if noise is not None else "different kernels"
    runs.proofs.add(Subject.OUTPUTS, Outcome.TOLERANCE, f"split vs. {one}, {why}: {found}")


def _compare_repeated(
    runs: Runs, built: Built, once: Callable[[], Outputs], single: Outputs, repeats: int, one: str,
    *, is_asked: bool
) -> None:  # fmt: skip
    """Compare a split between one device and the host, memory or disk, with the model on that
    device.

    After an offload that nobody asked for, another output is not a fault of the checkpoint:
    accelerate's offload to disk reads freed memory for some models (MobileBERT's head).
    """
    found = Deviations(first=single)
    for _ in range(repeats):
        found.count(once())
    wrong, worst = found.wrong, found.worst
    many = count_of(repeats, "run")
    if not wrong:
        runs.proofs.add(
            Subject.OUTPUTS, Outcome.PROVEN, f"split == {one}: {many}, equal in every bit"
        )
    elif worst.is_within:
        text = (
            f"split vs. {one}, {wrong} of {many} {'differs' if wrong == 1 else 'differ'}: {worst}"
        )
        runs.proofs.add(Subject.OUTPUTS, Outcome.TOLERANCE, text)
    else:
        where = _nan_of_split(built, once, single) if found.has_nan else ""
        differ = "differs" if wrong == 1 else "differ"
        text = (
            f"{wrong} of {many} of the split {differ} from {one} by more than different "
            f"kernels explain: {worst}{where}"
        )
        if not is_asked:
            text += (
                "; do not use a map with disk for this model: with accelerate's offload it "
                "computes different values"
            )
        runs.proofs.add(
            Subject.OUTPUTS, Outcome.FAILED if is_asked else Outcome.NOT_EXERCISED, text
        )

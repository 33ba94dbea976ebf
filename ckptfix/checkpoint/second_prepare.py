"""Evidence that two entries are equal because a script passed one model to prepare() twice, and for
no other reason.

Part of the evidence is an optimizer's training, read from its pickled ``state_dict()`` (facts from
torch 2.13: ``torch/optim/optimizer.py``, ``adamw.py``, ``sgd.py``, ``adagrad.py``); nothing is
executed. Another part are the checkpoints next to this one: a model that was prepared twice is
equal in all of them, a copy is not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from struct import unpack
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.folder import CheckpointFolder, Component, is_unreadable
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, is_wrapped_again
from ckptfix.checkpoint.manifest import (
    Manifest,
    ManifestEntry,
    key_fingerprint,
    taken_by_repairs,
)
from ckptfix.checkpoint.neighbours import Neighbours, parts_of
from ckptfix.checkpoint.pairing import Pairing, differing_tensors, first_unequal, pair_up
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import CkptfixError, FormatError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.safetensors_file import read_safetensors
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_partial import read_partial
from ckptfix.formats.torch_pickle import is_optimizer, state_dicts
from ckptfix.formats.torch_tensors import PickledTensor, is_tensor, read_tensor, storages
from ckptfix.lazy import once
from ckptfix.storage.files import AnyPath, FileReader
from ckptfix.storage.reading import open_reader

_NUMBER_FORMATS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}

Shape = tuple[int, ...]


class TrainedParameter(NamedTuple):
    """Facts in an optimizer's state about one parameter.

    ``shape``: of its largest moment, None without one. ``rate``: the learning rate that was saved,
    which is that of the next step. ``is_scheduled``: a scheduler sets it. ``step``: None where the
    optimizer counts none. ``moments``: the byte ranges of what gradients leave behind.
    """

    name: str
    shape: Shape | None
    rate: float
    is_scheduled: bool
    step: float | None
    moments: tuple[tuple[int, int], ...]

    def was_updated(self, *, are_rates_shown: bool) -> bool:
        """Return whether a step surely changed an fp32 weight, if its gradient was not 0.

        ``are_rates_shown``: no scheduler can have held the learning rate at 0 in every step that
        was made.
        """
        return (
            self.rate >= LEAST_RATE
            and (self.step is None or self.step > 0)
            and (are_rates_shown or not self.is_scheduled)
        )


LEAST_RATE = 1e-7
"""Adam moves a weight by about the learning rate. fp32 numbers next to 1 are 1.2e-7 apart: less
rounds to nothing.
"""


class OptimizerFacts(Struct, frozen=True, kw_only=True):
    """Facts in an optimizer's state about its training. ``path``: of its file."""

    path: PurePosixPath
    parameters: tuple[TrainedParameter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its ``param_names``, () without any."""
        return tuple(one.name for one in self.parameters if one.name)

    @property
    def shapes(self) -> "Counter[Shape]":
        """The shapes of the parameters that have moments."""
        return Counter(one.shape for one in self.parameters if one.shape is not None)

    @property
    def is_without_states(self) -> bool:
        """Return whether it keeps nothing for any parameter: plain SGD, or an optimizer before its
        first step.
        """
        return not any(one.moments for one in self.parameters)


@paused_gc()
def read_optimizer(
    file: TorchFile, reader: FileReader, path: PurePosixPath
) -> OptimizerFacts | None:
    """Return the facts of a file that holds one optimizer's state, None for any other file.

    Raises FormatError when a tensor does not lie inside its storage, OSError when the file cannot
    be read.
    """
    root = file.tree.root
    if not is_dict_like(root) or not is_optimizer(root):
        return None
    known = storages(file.tree)

    def number(key: str, value: Any) -> float | None:
        """Return a number, or the one in a tensor of one element."""
        if type(value) in (int, float):
            return float(max(min(value, _MOST), -_MOST))
        tensor = read_tensor(Text(key, 0, 0), value, known) if is_tensor(value) else None
        if (
            tensor is None
            or tensor.dtype not in _NUMBER_FORMATS
            or (place := _place(file, tensor)) is None
        ):
            return None
        code, size = _NUMBER_FORMATS[tensor.dtype], 8 if tensor.dtype.endswith("64") else 4
        return (
            float(unpack(code, reader.read(place[0], size))[0])
            if place[1] - place[0] >= size
            else None
        )

    states = {_plain(key): one for key, one in pairs(child(root, "state")) if is_dict_like(one)}
    parameters: list[TrainedParameter] = []
    left = len(file.tree.data)  # a few bytes can refer to one long list again and again
    # Each node once: a hostile pickle can refer to one dict a million times.
    groups = {id(one): one for one in items_of(child(root, "param_groups")) if is_dict_like(one)}
    for group in groups.values():
        rate = number("lr", child(group, "lr")) or 0.0
        is_scheduled = number("initial_lr", child(group, "initial_lr")) is not None
        names = [name.value for name in items_of(child(group, "param_names")) if type(name) is Text]
        members = items_of(child(group, "params"))
        left -= len(members) + len(names)
        if left < 0:
            return None
        for position, member in enumerate(members):
            key = _plain(member)
            state = states.pop(key, None)  # once, however often a hostile list names it
            tensors = {
                word.value: tensor
                for word, value in pairs(state)
                if type(word) is Text
                and is_tensor(value)
                and (tensor := read_tensor(word, value, known))
            }
            moments = [tensor for word, tensor in tensors.items() if word not in _NOT_OF_GRADIENTS]
            name = names[position] if position < len(names) else key if isinstance(key, str) else ""
            parameters.append(
                TrainedParameter(
                    name=name,
                    shape=max(
                        (one.shape for one in moments),
                        key=lambda one: (len(one), one),
                        default=None,
                    ),
                    rate=rate,
                    is_scheduled=is_scheduled,
                    step=number("step", child(state, "step")),
                    moments=tuple(
                        place for one in moments if (place := _place(file, one)) is not None
                    ),
                )
            )
    return OptimizerFacts(path=path, parameters=tuple(parameters))


_MOST = 1e18
"""Bound of numbers in a pickle, which can be longer than any float."""

_NOT_OF_GRADIENTS = ("step", "step_size", "eta", "mu", "ax")
"""States that are not 0 without a gradient either (Rprop, ASGD)."""


def may_have_waited(state: Any) -> bool:
    """Return whether a schedule with a learning rate above 0 can have held it at 0 in every step
    that was made.

    ``state``: of a scheduler. Torch's own (2.13, ``torch/optim/lr_scheduler.py``) begin at
    ``base_lrs`` or at a recorded factor of them, but for LambdaLR. A function leaves nothing there,
    and a ``functools.partial`` or an object without attributes leaves {}, whatever it computes:
    neither proves one of the functions of transformers.
    """
    epochs = child(state, "last_epoch")
    # A hostile list can refer to one dict a million times.
    nested = {id(part): part for part in items_of(child(state, "_schedulers"))}
    if len(nested) > _MOST_NESTED:
        return True
    rate = _MOST
    for part in nested.values() or (state,):
        if not is_dict_like(part):
            return True
        own = {_plain(key) for key, _ in pairs(part)} - KEYS_OF_EVERY_SCHEDULE
        rates = items_of(child(part, "base_lrs"))
        factor = next((child(part, key) for key in _FIRST_FACTORS if key in own), 1)
        numbers = [number for number in (*rates, factor) if type(number) in (int, float)]
        if own not in _KEYS_OF_SCHEDULES or not rates or len(numbers) <= len(rates):
            return True
        if own == _KEYS_OF_FUNCTIONS and epochs != 0:
            return True
        # All schedules of a ChainedScheduler multiply the rate.
        rate = min(rate, *numbers[:-1]) * min(numbers[-1], _MOST)
    # A schedule that has not moved made every step at the rate that was saved.
    return epochs != 0 and rate < LEAST_RATE


_MOST_NESTED = 16

KEYS_OF_EVERY_SCHEDULE = frozenset(
    (
        "base_lrs",
        "last_epoch",
        "_last_lr",
        "_step_count",
        "_get_lr_called_within_step",
        "_is_initial",
        "verbose",
    )
)
"""Keys of every schedule of torch: a class of a script with others has a step of its own."""

_KEYS_OF_FUNCTIONS = frozenset(("lr_lambdas",))

_KEYS_OF_SCHEDULES = {
    _KEYS_OF_FUNCTIONS,
    frozenset(("gamma",)),
    frozenset(("gamma", "step_size")),
    frozenset(("gamma", "milestones")),
    frozenset(("factor", "total_iters")),
    frozenset(("start_factor", "end_factor", "total_iters")),
    frozenset(("power", "total_iters")),
    frozenset(("T_max", "eta_min")),
    frozenset(("T_0", "T_cur", "T_i", "T_mult", "eta_min")),
    frozenset(
        ("_anneal_func_type", "_schedule_phases", "total_steps", "cycle_momentum", "use_beta1")
    ),
}
"""Keys that each of torch's schedules has besides: LambdaLR, and those that are above 0 from the
first step.

A class of a script can hold any rate with the keys of every schedule alone.
"""

_FIRST_FACTORS = ("factor", "start_factor")
"""Keys of the factor of ``base_lrs`` at which ConstantLR and LinearLR begin."""


def _plain(key: Any) -> Any:
    """Return a key of a state: keys of text differ by where each was pushed."""
    return key.value if type(key) is Text else key


def _place(file: TorchFile, tensor: PickledTensor) -> tuple[int, int] | None:
    """Return the bytes of a tensor in the file, None where they are not one range."""
    storage = file.storage_ranges.get(tensor.storage_key)
    if storage is None or tensor.begin is None or tensor.end is None or tensor.end > storage[1]:
        return None
    return storage[0] + tensor.begin, storage[0] + tensor.end


def _parameters_of(model: Component) -> "dict[str, TensorInfo]":
    """Return the tensors of a model that an optimizer can train, without known buffers and second
    names of one tensor.

    The keys are without the wrappers that all of them carry.
    """
    strip = KeyMap(remove=model.chain)
    ranges: set[tuple[int, int]] = set()
    found: dict[str, TensorInfo] = {}
    for tensor in model.tensors:
        place = tensor.data_offsets
        is_known = place is not None and place[0] < place[1] and place in ranges
        if is_known or tensor.fqn.endswith(BUFFERS) or tensor.dtype in ("BOOL", "I32", "I64"):
            continue
        found[strip(tensor.fqn)] = tensor
        if place is not None:
            ranges.add(place)
    return found


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalisations. Others look like parameters."""


_FSDP_STEM = "pytorch_model_fsdp"


class History(NamedTuple):
    """Facts in other checkpoints of the run about two equal entries.

    ``doubt``: why they may be two models, "" for no reason. ``is_moved``: an earlier one has other
    parameters.
    """

    doubt: str = ""
    is_moved: bool = False


class Evidence:
    """Evidence in a folder, its manifest and the checkpoints next to it about the run that saved
    them.
    """

    def __init__(
        self, folder: CheckpointFolder, manifest: Manifest | None, neighbours: Neighbours
    ) -> None:
        """Store the folder without reading files; ``manifest`` counts only when a save wrote it."""
        self.folder = folder
        self.manifest = manifest if manifest is not None and manifest.is_of_a_save else None
        self._neighbours = neighbours
        self._known: dict[PurePosixPath, dict[str, TensorInfo]] = {}

    def doubts(
        self, original: Component, links: Iterable[Component], entry: Component, size: int
    ) -> Iterator[str]:
        """Yield why an entry with the bytes of ``original`` may be the script's own, nothing for a
        second ``prepare``.

        These are independent facts, the cheapest first; each alone is enough to ask. ``links``:
        duplicates of the original that are known already. ``size``: the bytes that were compared. A
        file that may not be read raises no doubt: nothing is repaired before it can be read, and
        the unknown must not soften a verdict.

        Two scripts leave the bytes of a second ``prepare`` and raise no doubt. One has a loss
        wrapper around its model, the other an average that has only copied the model so far. Both
        are rare. A wrong deletion makes load_state fail and can be undone, so that asking everybody
        would cost more. Before a step surely changed the model, any frozen copy equals it: that is
        a reason to ask.
        """
        if entry.name.stem == _FSDP_STEM:
            yield "FSDP adds no wrapper, so the keys do not show a second prepare()"
        if self.folder.processes == 1:
            yield "prepare() does not wrap models in a single process"
        if not any(
            one.name.index < entry.name.index and is_wrapped_again(entry.chain, one.chain)
            for one in (original, *links)
        ):
            yield "a model prepared twice has exactly one more wrapper in its later entry"
        if self.folder.processes is None:
            yield "no file shows how many processes saved them"
        if self._are_two_classes(original, entry):
            yield "the manifest lists different classes for them"
        if size == 0:
            yield "they hold no data to compare"
        if self._entries > MAX_ENTRIES:
            yield (
                f"the folder has more than {MAX_ENTRIES} models and optimizers, too many to match"
            )
            return
        remaining = self._remaining(entry)
        for path, facts in self.optimizers.items():
            if not self._fits(facts, remaining) and self._fits(facts, (*remaining, entry)):
                yield f"{path} has parameters of both models"
        optimizers = [one for entries in self.folder.entries(Role.OPTIMIZER) for one in entries]
        for one in optimizers:
            if one.problem is not None and not is_unreadable(one):
                yield f"the step count of {one.path} cannot be read"
        untrained = (
            "no optimizer proves that the steps moved the model: at a learning rate of 0 they do "
            "not, and a copy or an average stays equal to it"
        )
        is_trained = any(map(is_unreadable, optimizers)) or self._is_trained(original, remaining)
        if is_trained is None:
            yield untrained
        history = self._history(original, entry)
        if history.doubt:
            yield history.doubt
        if not (is_trained or history.is_moved):
            yield untrained

    def parted(self, original: Component, entry: Component) -> tuple[str, str]:
        """Return the names of an earlier and of a later checkpoint of the run in which two equal
        entries differ, "" without such a checkpoint. An earlier one makes later ones meaningless.

        Copies differ once the run trains one of them. Models that differed before may be equal
        because the file of one was copied over that of the other. A checkpoint with another number
        of models with these keys shows no pair.
        """
        later = ""
        pair = [(_twins(self.folder, model), model.path) for model in (original, entry)]
        places = [[twin.path for twin in twins].index(path) for twins, path in pair]
        for neighbour in self._neighbours.spread():
            with suppress(CkptfixError, OSError), neighbour.opened() as root:
                folder = neighbour.scan(Role.MODEL, root=root)
                there = [_twins(folder, model) for model in (original, entry)]
                if list(map(len, there)) != [len(twins) for twins, _ in pair]:
                    continue
                ours, theirs = (twins[place] for twins, place in zip(there, places, strict=True))
                if not _is_equal(root, ours, root, theirs):
                    if neighbour.is_earlier:
                        return neighbour.name, ""
                    later = neighbour.name
        return "", later

    def has_moments(self, path: PurePosixPath) -> bool:
        """Return whether an optimizer has made a step with a gradient that was not 0."""
        facts = self.optimizers.get(path)
        return facts is not None and self._is_moving(
            path, [one for one in facts.parameters if one.step is None or one.step > 0]
        )

    def is_trained_alike(
        self,
        kept: Sequence[Component],
        optimizers: Sequence[Component],
        models: Sequence[Component],
    ) -> bool:
        """Return whether some optimizers train every parameter of models that all of them do.

        Each must fit the models. One that may not be read can, so that it changes no verdict.
        """
        facts = [self.optimizers[one.path] for one in optimizers if one.path in self.optimizers]
        if len(facts) < sum(not is_unreadable(one) for one in optimizers):
            return False
        staying = {one.path for one in kept}
        every = sum((one.shapes for one in facts), Counter[Shape]())
        left = sum((one.shapes for one in facts if one.path in staying), Counter[Shape]())
        wanted = self._shapes(models)
        return all(self._fits(one, models) for one in facts) and wanted & every == wanted & left

    def _remaining(self, entry: Component) -> list[Component]:
        """Return the models in the list of an entry without those that have the keys of an earlier
        one in a wrapper.
        """
        entries = next(one for one in self.folder.entries(Role.MODEL) if entry in one)
        remaining: list[Component] = []
        for model in entries:
            is_again = any(
                is_wrapped_again(model.chain, one.chain)
                and self._parameters(one).keys() == self._parameters(model).keys()
                for one in remaining
            )
            if model is not entry and not is_again:
                remaining.append(model)
        return remaining

    def _is_trained(self, model: Component, remaining: Sequence[Component]) -> bool | None:
        """Return whether steps with gradients changed a model, None where no optimizer can be its
        own.

        An optimizer that fits no other model is its own. Of those that fit several models nothing
        shows which is whose: then all of them must have trained, and there must be one left for
        this model, in the order in which scripts prepare both. So a frozen teacher of the student's
        class has none.
        """
        fitting = {
            facts.path: self._models_of(facts, remaining) for facts in self.optimizers.values()
        }
        own = [self.optimizers[path] for path, models in fitting.items() if model in models]
        alone = [facts for facts in own if fitting[facts.path] == [model]]
        if alone:
            return any(self._moves(facts, model, remaining) for facts in alone)
        taken: list[Component] = []
        for models in fitting.values():
            taken += [one for one in models if one not in taken][:1]
        # Plain SGD keeps nothing, so that neighbours could show the training of a model that is not
        # its own.
        if model not in taken or any(facts.is_without_states for facts in own):
            return None
        return all(self._moves(facts, model, remaining) for facts in own)

    def _models_of(self, facts: OptimizerFacts, remaining: Sequence[Component]) -> list[Component]:
        """Return the models that an optimizer may train: those with exactly its parameters, else
        all that it fits.
        """
        fitting = [
            one
            for one in remaining
            if self._fits(facts, (one,)) or self._own(facts, one, remaining)
        ]
        return [one for one in fitting if self._shapes((one,)) == facts.shapes] or fitting

    def _moves(
        self, facts: OptimizerFacts, model: Component, remaining: Sequence[Component]
    ) -> bool:
        """Return whether an optimizer made a step with a gradient that changed parameters of this
        model.
        """
        parameters = (
            facts.parameters if self._fits(facts, (model,)) else self._own(facts, model, remaining)
        )
        narrow = {
            one.shape for one in self._parameters(model).values() if one.dtype.startswith(_NARROW)
        }
        return self._is_moving(
            facts.path,
            [
                one
                for one in parameters
                if one.shape not in narrow
                and one.was_updated(are_rates_shown=self._are_rates_shown)
            ],
        )

    def _is_moving(self, path: PurePosixPath, parameters: Sequence[TrainedParameter]) -> bool:
        """Return whether a sample of the moments of parameters has a number other than 0."""
        having = [one for one in parameters if one.moments]
        every = max(1, len(having) // _MOST_SAMPLED)
        try:
            with open_reader(self.folder.root / path) as reader:
                return any(
                    _is_nonzero(reader, place)
                    for one in having[::every][:_MOST_SAMPLED]
                    for place in one.moments
                )
        except (FormatError, OSError):
            return False

    @once
    def _are_rates_shown(self) -> bool:
        """True where schedulers are saved, and none of them can have held the learning rate at 0
        until now.
        """
        schedulers = [one for entries in self.folder.entries(Role.SCHEDULER) for one in entries]
        try:
            return bool(schedulers) and not any(
                (
                    may_have_waited(one.content.tree.root)
                    if isinstance(one.content, TorchFile)
                    else not is_unreadable(one)
                )
                for one in schedulers
            )
        except FormatError:
            return False  # its own finding reports the damage

    def _history(self, original: Component, entry: Component) -> History:
        """Compare two equal entries in other checkpoints of the run, by samples.

        By their keys entries are found at any number, so that a repair of this folder changes no
        answer. An average in a wrapper called ``module`` has the keys of a second ``prepare``, too:
        of several such models the two entries with the same place among them are compared. A
        checkpoint with another number of them shows no place. A later one may be that of a
        corrected script, and then other checkpoints decide; an earlier one asks.
        """
        here = _twins(self.folder, entry)
        place = [twin.path for twin in here].index(entry.path)
        unclear = ""
        is_moved = is_shown_equal = False
        for neighbour in self._neighbours.spread():
            # A checkpoint that cannot be read has findings of its own.
            with suppress(CkptfixError, OSError), neighbour.opened() as root:
                folder = neighbour.scan(Role.MODEL, root=root)
                originals, there = _twins(folder, original), _twins(folder, entry)
                apart = _differing(root, folder, original, there) if originals else []
                may_differ = f"they may differ in {neighbour.name}"
                if len(there) == len(here):
                    if there[place] in apart:
                        return History(doubt=f"they differ in {neighbour.name}")
                    is_shown_equal |= bool(originals)
                elif len(apart) > len(_differing(self.folder.root, self.folder, original, here)):
                    return History(doubt=may_differ)
                elif apart and not _has_lost_models(root):
                    unclear = f"{may_differ}, which has a different number of such models"
                    if neighbour.is_earlier:
                        # Next to a hard-updated target the script began an average: checkpoints
                        # with both show the target equal, and this one shows it apart.
                        return History(doubt=unclear)
                is_moved |= (
                    neighbour.is_earlier
                    and bool(originals)
                    and not any(
                        _is_equal(self.folder.root, original, root, one) for one in originals
                    )
                    and all(self._has_other_parameters(original, root, one) for one in originals)
                )
        return History(doubt="" if is_shown_equal else unclear, is_moved=is_moved)

    def _has_other_parameters(self, original: Component, root: AnyPath, earlier: Component) -> bool:
        """Return whether two entries that differ do so in parameters, by samples.

        Running statistics change in every forward pass, at a learning rate of 0, too.
        """
        if not any(tensor.fqn.endswith(BUFFERS) for tensor in original.tensors):
            return True
        parameters = tuple(self._parameters(original).values())
        sampled = parameters[:: max(1, len(parameters) // _MOST_SAMPLED)][:_MOST_SAMPLED]
        pairing = Pairing(kept=replace(original, tensors=sampled), other=earlier, runs=None)
        return any(differing_tensors(self.folder.root, pairing, full=False, other_root=root))

    def foreign(self, entry: Component) -> str:
        """Return why an entry is not from the save that wrote the manifest, "" without such
        evidence.
        """
        if unlisted := self.unlisted(entry.path):
            return unlisted
        recorded = self._recorded(entry)
        if recorded is not None and recorded.keys and recorded.keys != _fingerprint(entry):
            return f"the manifest of the save lists {entry.path} with different keys or shapes"
        return ""

    def is_registered(self, entry: Component) -> bool:
        """Return whether a guarded save recorded an entry with these keys; a second ``prepare``
        registers no entry.
        """
        recorded = self._recorded(entry)
        return recorded is not None and bool(recorded.keys) and recorded.keys == _fingerprint(entry)

    def unlisted(self, path: PurePosixPath) -> str:
        """Return the words for a file missing in the manifest of the save, "" if listed or without
        a manifest.
        """
        if self.manifest is None or str(path) in self.manifest.files:
            return ""
        return f"the manifest of the save does not list {path}"

    def names_left(self, damaged: Component) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a damaged model from the existing part of its header or
        pickle, else {}.
        """
        try:
            with open_reader(self.folder.root / damaged.path) as reader:
                if damaged.name.suffix == ".safetensors":
                    return {
                        one.fqn: one.shape for one in read_safetensors(reader, cut=True).tensors
                    }
                partial = read_partial(reader)
                return {
                    tensor.fqn: tensor.shape
                    for state_dict in state_dicts(partial.tree, partial.storages, {})
                    for tensor in state_dict.tensors
                    if not state_dict.path
                }
        except (FormatError, OSError):
            return {}

    def _fits(self, facts: OptimizerFacts, models: Sequence[Component]) -> bool:
        """Return whether all parameters of an optimizer can belong to these models together, by
        name and shape.
        """
        if names := facts.names:
            keys = {name for model in models for name in self._parameters(model)}
            if not keys.issuperset(map(KeyMap(remove=common_wrappers(names)), names)):
                return False
        shapes = self._shapes(models)
        return not facts.shapes - shapes and len(facts.parameters) <= shapes.total()

    def _own(
        self, facts: OptimizerFacts, model: Component, remaining: Sequence[Component]
    ) -> list[TrainedParameter]:
        """Return the parameters that only this one can have of the models that an optimizer trains
        together.
        """
        others = [one for one in remaining if one is not model]
        if self._fits(facts, others) or not self._fits(facts, (model, *others)):
            return []
        alien = self._shapes(others)
        return [one for one in facts.parameters if one.shape is not None and one.shape not in alien]

    def _shapes(self, models: Iterable[Component]) -> "Counter[Shape]":
        """Return the shapes of the parameters of models."""
        return Counter(
            tensor.shape for model in models for tensor in self._parameters(model).values()
        )

    def _parameters(self, model: Component) -> dict[str, TensorInfo]:
        if model.path not in self._known:
            self._known[model.path] = _parameters_of(model)
        return self._known[model.path]

    @once
    def _entries(self) -> int:
        roles = (Role.MODEL, Role.OPTIMIZER)
        return sum(len(entries) for role in roles for entries in self.folder.entries(role))

    @once
    def optimizers(self) -> dict[PurePosixPath, OptimizerFacts]:
        """The optimizers whose state can be read, in order."""
        found: dict[PurePosixPath, OptimizerFacts] = {}
        for entries in self.folder.entries(Role.OPTIMIZER):
            for component in entries:
                if isinstance(component.content, TorchFile):
                    try:
                        with open_reader(self.folder.root / component.path) as reader:
                            facts = read_optimizer(component.content, reader, component.path)
                    except FormatError:
                        continue  # the optimizer's own finding reports its damage
                    if facts is not None:
                        found[component.path] = facts
        return found

    def _are_two_classes(self, one: Component, other: Component) -> bool:
        classes = {
            recorded.type
            for entry in (one, other)
            if (recorded := self._recorded(entry)) is not None and recorded.type
            if not recorded.keys or recorded.keys == _fingerprint(entry)
        }
        return len(classes) == 2

    def _recorded(self, entry: Component) -> ManifestEntry | None:
        models = self.manifest.models if self.manifest is not None else ()
        return next((recorded for recorded in models if recorded.file == str(entry.path)), None)


MAX_ENTRIES = 128
"""Most models and optimizers that are matched with each other.

Each duplicate matches each optimizer with each model. Twice the entries take 7 times as long: 14 s
for 128 of them, hours for 1,200.
"""

_NARROW = ("BF16", "F16", "F8_", "F6_", "F4")
"""Dtypes in which the steps of a usual learning rate can be lost: bf16 numbers next to 1 are 0.8 %
apart.
"""

_MOST_SAMPLED = 32
"""Parameters of an optimizer whose moments are looked at. The first one decides but for rows of
unused tokens.
"""

_PAGE = 4096


def _is_nonzero(reader: FileReader, place: tuple[int, int]) -> bool:
    """Return whether a sample of a tensor has a number other than 0, whatever its sign."""
    begin, end = place
    step = max(_PAGE, (end - begin) // 4)
    return any(
        reader.read(offset, min(_PAGE, end - offset)).strip(b"\0\x80")
        for offset in range(begin, end, step)
    )


def _twins(folder: CheckpointFolder, model: Component) -> list[Component]:
    """Return the intact models of a folder with the keys of a model, in order."""
    wanted = {(tensor.fqn, tensor.dtype, tensor.shape) for tensor in model.tensors}
    return [
        twin
        for entries in folder.entries(Role.MODEL)
        for twin in entries
        if twin is model
        or (
            twin.problem is None
            and {(tensor.fqn, tensor.dtype, tensor.shape) for tensor in twin.tensors} == wanted
        )
    ]


def _differing(
    root: AnyPath, folder: CheckpointFolder, original: Component, twins: Iterable[Component]
) -> list[Component]:
    """Return the models that equal none with the keys of ``original`` in their folder."""
    originals = _twins(folder, original)
    return [
        twin for twin in twins if not any(_is_equal(root, model, root, twin) for model in originals)
    ]


def _has_lost_models(root: AnyPath) -> bool:
    """Return whether a repair took models away from a checkpoint."""
    taken = taken_by_repairs(root) or ()
    return any(role is Role.MODEL for role, _ in parts_of(map(PurePosixPath, taken)))


def _is_equal(root: AnyPath, one: Component, other_root: AnyPath, other: Component) -> bool:
    """Compare samples of two entries in two folders."""
    pairing = pair_up(one, other)
    return (
        pairing is not None
        and first_unequal(root, pairing, full=False, other_root=other_root) is None
    )


def _fingerprint(model: Component) -> str:
    return key_fingerprint((tensor.fqn, tensor.dtype, tensor.shape) for tensor in model.tensors)

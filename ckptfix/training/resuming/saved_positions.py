"""The position of a data loader at a save, as the run state keeps it."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ckptfix.devices.nested_values import from_plain, plain
from ckptfix.training.resuming.generators import GeneratorStates
from ckptfix.training.resuming.worker_states import WorkerStates


class Moment(Struct, frozen=True):
    """States of the global generators and of those that a loader, its sampler and its dataset
    hold.
    """

    everywhere: GeneratorStates
    held: Mapping[str, Any]

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> "Moment":
        """Return the moment of which ``plain`` made this value."""
        return cls(GeneratorStates.from_plain(value["everywhere"]), from_plain(value["held"]))


class SaveMoment(Struct):
    """The global generators at a save. ``is_reached``: whether a loader has brought the run there
    again.
    """

    generators: GeneratorStates
    is_reached: bool = False


class Position(Struct):
    """A loader at a save.

    ``fetched`` counts batches of the base loader that the script has got in the pass under way,
    None between passes; a dispatcher yields one batch for every ``per_batch`` of them.
    ``is_at_end``: the last batch has been yielded, and the loop has not ended. ``made``: when the
    iterator was made, where that was before the pass. ``problem``: why it is not exact. ``left``:
    the position at which the script left its last pass by ``break``; the next pass may be a new one
    or the rest of that one, and only the resumed script knows. ``left_before``: the script left the
    pass before this one, too, as one that takes a part of the data in every epoch.
    """

    signature: tuple[Any, ...]
    iteration: int
    held: Mapping[str, Any]
    per_batch: int = 1
    fetched: int | None = None
    is_at_end: bool = False
    start: Moment | None = None
    ahead: Moment | None = None
    seed: int | None = None
    stateful: Any = None
    is_fresh: bool = False
    workers: WorkerStates | None = None
    made: Moment | None = None
    problem: str = ""
    save: SaveMoment | None = None
    left: "Position | None" = None
    left_before: bool = False

    @property
    def yielded(self) -> int:
        """The number of batches that the script has got in the pass under way."""
        return (self.fetched or 0) // self.per_batch

    def described(self) -> dict[str, Any]:
        """Return values that ``from_plain`` reads.

        ``save`` is written once for all loaders, but for a position of an earlier save that no pass
        has gone on from yet. A pass that was left (``left``) keeps its own, as ``plain`` writes it.
        """
        is_of_earlier = self.save is not None and not self.save.is_reached
        return {
            name: plain(value)
            for name, value in asdict(self).items()
            if name != "save" or is_of_earlier
        }

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> "Position":
        """Return the position that ``described`` wrote."""
        values = from_plain(value)
        for name in ("start", "ahead", "made"):
            values[name] = None if values[name] is None else Moment.from_plain(values[name])
        workers = values["workers"]
        values["workers"] = None if workers is None else WorkerStates(**workers)
        # Written with a position that was left, or was saved again: it has generators of its own.
        if (save := values.get("save")) is not None:
            values["save"] = SaveMoment(GeneratorStates.from_plain(save["generators"]))
        # Not in run states of 0.5.0.
        if (left := values.get("left")) is not None:
            values["left"] = cls.from_plain(left)
        return cls(**{**values, "signature": tuple(values["signature"])})

"""Tasks for the process that measures, and their results: values, and their JSON. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, to_builtins

from ckptfix.hardware import Pair

if TYPE_CHECKING:
    from ckptfix.devices.probe.payload import Damage


Announce = Callable[[str | None], None]
"""A function to call with words before anything that can hang, and with None after it."""


class Work(Enum):
    """A kind of work."""

    HOST = "host"  # a device's own exchange with the host; the pair is (device, device)
    SECTION = "section"  # one section of the plan over one pair
    TOGETHER = "together"  # all pairs of the task at once
    CHAIN = "chain"  # from pair to pair, one after the other, round to where it began


class Task(Struct, frozen=True, kw_only=True):
    """A piece of work. ``section``: its place in the plan, only for SECTION, as all that follows.

    ``start``: the cases of the section that were done before; ``again``: the number of a repetition
    with other bits. Several pairs, of a section of large copies alone, have no device in common.
    """

    work: Work
    pairs: tuple[Pair, ...]
    plan: str
    seed: int
    section: int = 0
    start: int = 0
    again: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the task as plain values."""
        return dict(to_builtins(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Task:
        """Return the task that ``to_json`` gave."""
        pairs = tuple((int(source), int(destination)) for source, destination in values["pairs"])
        return cls(**{**values, "work": Work(values["work"]), "pairs": pairs})


class Ending(Enum):
    """End of a task. Only after DONE does the absence of failures prove anything."""

    DONE = "done"
    OUT_OF_TIME = "out of time"
    NO_MEMORY = "no memory"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"


BAD_ENDINGS = (Ending.RAISED, Ending.DIED, Ending.HUNG)
"""Endings after which the worker may have lost its devices."""


class Failure(Struct, frozen=True, kw_only=True):
    """One copy that was wrong. ``kind``: see ``damage.Kind``; ``size``: bytes of the payload;
    ``case``: in words.
    """

    pair: Pair
    kind: str
    first_offset: int | None
    wrong_bytes: int
    size: int
    case: str

    @classmethod
    def of(cls, pair: Pair, damage: Damage, size: int, case: str) -> Failure:
        """Return the failure of a pair from the damage that was seen."""
        return cls(
            pair=pair,
            kind=damage.kind.value,
            first_offset=damage.first_offset,
            wrong_bytes=damage.wrong_bytes,
            size=size,
            case=case,
        )


class TaskResult(Struct, frozen=True, kw_only=True):
    """Result of a task.

    ``trials``: copies made and compared, for each pair. ``unusable``: the device whose exchange
    with the host was found wrong, -1 for none. ``stage``: the copy that was under way when it ended
    badly; "" when none was. ``message``: why it ended so. ``left_out``: cases that this machine
    cannot do. ``unpoisoned``: copies by ``to()`` whose memory was not the block that had been
    filled before. ``done``: cases of the section that need not be done again. ``tried``: the trials
    of sections, by ``Case.kind``.
    """

    ending: Ending
    trials: int = 0
    failures: tuple[Failure, ...] = ()
    unusable: int = -1
    stage: str = ""
    message: str = ""
    left_out: tuple[str, ...] = ()
    unpoisoned: int = 0
    done: int = 0
    tried: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return dict(to_builtins(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskResult:
        """Return the outcome that ``to_json`` gave."""
        failures = tuple(
            Failure(**{**item, "pair": (int(item["pair"][0]), int(item["pair"][1]))})
            for item in values["failures"]
        )
        return cls(
            **{
                **values,
                "ending": Ending(values["ending"]),
                "failures": failures,
                "left_out": tuple(values["left_out"]),
            }
        )

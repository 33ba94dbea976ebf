"""A copy was seen to be wrong: is it the pair, or a device's own exchange with the host?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe import host_path
from ckptfix.runtime.devices.probe.damage import Damage, Kind, classify
from ckptfix.runtime.devices.probe.payload import bits, compared, same

REMEMBERED = 1 << 20
"""Bytes of earlier payloads that are kept, to know them when they arrive again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Blocks of bytes around one copy, on their devices and on the host.

    ``source`` on the source device is what the host ``sent`` there. ``block`` is the destination, ``arrived`` what the
    host read of it; ``reference`` on the destination device and ``expected`` on the host are what it should be.
    """

    source: Any
    sent: Any
    block: Any
    arrived: Any
    reference: Any
    expected: Any


def judge(
    pair: Pair,
    evidence: Evidence,
    payload_of: Callable[[Any], Any] = lambda block: block,
    earlier: Sequence[Any] = (),
) -> Damage:
    """Return the damage that the pair did. ``payload_of``: gives the payload's bytes in a block of the destination.

    Raises UnusableDevice when it is a device that lost bytes on their way from or to the host.
    """
    source, destination = pair
    host_path.still_holds(source, evidence.source, evidence.sent)
    host_path.still_holds(destination, evidence.reference, evidence.expected)
    host_path.prove_again(destination, evidence.block.numel())
    arrived, expected = (bits(payload_of(block)) for block in (evidence.arrived, evidence.expected))
    damage = classify(arrived, expected, held=~expected, earlier=earlier)
    if damage is not None:
        return damage
    if not same(evidence.arrived, evidence.expected):
        beside = evidence.arrived != evidence.expected
        return Damage(kind=Kind.OUTSIDE, first_offset=None, wrong_bytes=int(beside.sum()))
    if not bool(compared(evidence.block, evidence.reference)):
        raise host_path.UnusableDevice(destination, "its kernel finds equal bytes unequal")
    return Damage(kind=Kind.LATE, first_offset=None, wrong_bytes=0)

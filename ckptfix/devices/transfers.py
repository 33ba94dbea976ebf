"""Safe transfers: copies between devices whose direct way is not proven go through the host
instead.

Staging is one thing for the whole process: it lasts while anybody holds a reference to it, and what
is staged is all that any of them asked for. While nothing was ever to be staged nothing is
installed, and copies cost what they always cost. What is installed is taken out with the last
reference, or, where other threads ran then, with the next last one: until that it hands every copy
on.

>>> with safe_transfers("always") as transfers:
...     output = model(**batch)
>>> transfers.counters()[0, 1].direct
0
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from ckptfix.devices.callers import warn_caller
from ckptfix.devices.interception import (
    NOT_COVERED,
    NOT_COVERED_BY_FALLBACK,
    HookPatch,
    Override,
    can_override,
)
from ckptfix.devices.routing import ROUTER, Count
from ckptfix.devices.staged_copies import release_slots
from ckptfix.devices.torch_devices import device_count, device_type, ordered_pairs
from ckptfix.errors import UsageError
from ckptfix.hardware import Pair
from ckptfix.wording import Brief, count_of, first_few

if TYPE_CHECKING:
    from ckptfix.devices.probe.probe_report import ProbeReport

VARIABLE = "CKPTFIX_SAFE_TRANSFERS"
"""Environment variable that says what "auto" means: auto, always or never. Code that asks for
another mode gets it.
"""


class Mode(Enum):
    """Choice of the copies that are staged.

    AUTO: those of every ordered pair of devices that is not proven healthy. ALWAYS: those of every
    pair. NEVER: none for the one who asks; what others hold stays on.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Transfers(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One reference to the staging of this process.

    ``pairs``: what this reference has staged. ``holder``: who holds it, in words.
    ``not_covered``: what may still go from device to device, unseen.
    """

    mode: Mode
    pairs: frozenset[Pair] = frozenset()
    holder: str = ""
    not_covered: tuple[str, ...] = ()
    _before: Mapping[Pair, Count] = field(default_factory=dict)

    def counters(self) -> Mapping[Pair, Count]:
        """Return the copies of every ordered pair since this reference was taken, by whomever they
        were made.

        They are counted only while something is staged; all zero on a machine with fewer than two
        devices.
        """
        now = ROUTER.counts.all()
        pairs = sorted({*ordered_pairs(), *now})
        return {pair: now.get(pair, Count()) - self._before.get(pair, Count()) for pair in pairs}


class _Installed(Protocol):
    def remove(self) -> bool:
        """Remove every trace, if that is possible now; return whether it was."""


_lock = threading.Lock()
_references: list[Transfers] = []
_given_back: deque[Transfers] = deque()
_installed: _Installed | None = None
_told: set[object] = set()
"""Pairs, and lists of what is not covered, of which a warning was given."""


@contextmanager
def safe_transfers(mode: Mode | str = Mode.AUTO) -> Iterator[Transfers]:
    """Stage copies between devices while the block runs, in all threads, backward passes and
    compiled code too.

    ``mode`` is a Mode or its value. "auto" measures for up to 30 s when nothing is known of this
    hardware, and reads the environment variable CKPTFIX_SAFE_TRANSFERS first. A machine with fewer
    than two devices gets a reference that stages nothing, in every mode. Raises UsageError for any
    other word.
    """
    reference = acquire(mode, holder="a safe_transfers block")
    try:
        yield reference
    finally:
        release(reference)


def staged_pairs() -> frozenset[Pair]:
    """Return the ordered pairs whose copies are staged now."""
    return ROUTER.staged


def acquire(mode: Mode | str, *, holder: str) -> Transfers:
    """Take a reference for ``release`` to give back; ``holder`` is named when someone asks for
    "never" meanwhile.
    """
    chosen = mode_meant(mode)
    if chosen is Mode.NEVER:
        _say_that_it_stays_on()
        return Transfers(mode=chosen, holder=holder, _before=ROUTER.counts.all())
    reference = Transfers(
        mode=chosen,
        pairs=_wanted(chosen),
        holder=holder,
        not_covered=NOT_COVERED if can_override() else NOT_COVERED_BY_FALLBACK,
        _before=ROUTER.counts.all(),
    )
    if reference.pairs and not can_override() and NOT_COVERED_BY_FALLBACK not in _told:
        _told.add(NOT_COVERED_BY_FALLBACK)
        warn_caller(
            f"some copies between devices are not staged: {'; '.join(NOT_COVERED_BY_FALLBACK)}. "
            "A newer torch covers them: pip install -U torch"
        )
    with _lock:
        _references.append(reference)
        try:
            _settle()
        except BaseException:
            _references.remove(reference)
            raise
    _take_back()
    return reference


def release(reference: Transfers) -> None:
    """Give a reference back; once more does nothing. With the last one that stages anything,
    staging ends.
    """
    _given_back.append(reference)
    _take_back()


def _take_back() -> None:
    # A finalizer may come here in any thread, even inside of what holds the lock: the holder does
    # it when it leaves.
    while _given_back and _lock.acquire(blocking=False):
        try:
            while _given_back:
                reference = _given_back.popleft()
                if reference in _references:
                    _references.remove(reference)
            _settle()
        finally:
            _lock.release()


def _settle() -> None:
    """Install or remove what the references ask for; the caller holds the lock."""
    global _installed
    staged = frozenset[Pair]().union(*(reference.pairs for reference in _references))
    ROUTER.staged = staged
    if staged and _installed is None:
        _installed = Override(ROUTER.carry) if can_override() else HookPatch(ROUTER.takes_host)
    elif not staged and _installed is not None:
        if _installed.remove():
            _installed = None
        release_slots()


def mode_named(word: Mode | str) -> Mode:
    """Return the mode with this value. Raises UsageError for any other word."""
    try:
        return Mode(word)
    except ValueError:
        raise UsageError(f"safe_transfers={word!r}: expected 'auto', 'always' or 'never'") from None


def mode_meant(mode: Mode | str) -> Mode:
    """Return the mode with this value, and for "auto" the one that the environment names, if it
    does.

    Raises UsageError for words that mean nothing.
    """
    chosen = mode_named(mode)
    said = os.environ.get(VARIABLE, "")
    if chosen is not Mode.AUTO or not said:
        return chosen
    try:
        return Mode(said.lower())
    except ValueError:
        raise UsageError(f"{VARIABLE}={said!r}: expected auto, always or never") from None


def _wanted(mode: Mode) -> frozenset[Pair]:
    count = device_count()
    if count < 2:
        return frozenset()
    if mode is Mode.ALWAYS:
        return frozenset(ordered_pairs(count))
    from ckptfix.devices.probe import BUDGET, cached_report, unproven_pairs

    pairs: frozenset[Pair] = unproven_pairs(budget=BUDGET)
    if pairs and pairs not in _told:
        _told.add(pairs)
        warn_caller(_what_is_unproven(pairs, cached_report()))
    return pairs


def _what_is_unproven(pairs: frozenset[Pair], report: "ProbeReport | None") -> str:
    known = {} if report is None else report.pairs
    named = [
        f"{source} -> {destination}"
        + (f" {known[pair].kind or known[pair].verdict.value}" if pair in known else "")
        for pair in sorted(pairs)
        for source, destination in [pair]
    ]
    text = (
        f"{len(named)} of {len(ordered_pairs())} ordered pairs of {device_type()} devices are not "
        f"proven to copy correctly ({first_few(named, 6)}): their copies go through the "
        "host. "
    )
    if any(pair in known and known[pair].verdict.value == "unusable" for pair in pairs):
        text += (
            "An unusable device also fails in copies to and from the host, so staging cannot make "
            "it safe. "
        )
    return text + "To see what is wrong with them: ckptfix doctor --peer-copies"


def _say_that_it_stays_on() -> None:
    holders = [reference.holder for reference in tuple(_references) if reference.pairs]
    if holders:
        more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
        warn_caller(
            f"safe transfers stay on for {count_of(len(staged_pairs()), 'ordered pair')} of "
            f"devices: 'never' does not turn them off while they are in use ({holders[0]}"
            f"{more}). To end those of dispatch_model: ckptfix.devices.remove_safe_transfers(model)"
        )

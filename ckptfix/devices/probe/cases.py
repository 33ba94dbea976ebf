"""Copies that are made over an ordered pair: ways of asking for one, sizes and dtypes, and the
plans of them.

torch has two engines for a copy from device to device. Equal dtypes and dense, equal layouts go as
one memcpy; anything else goes, with peer access, as a kernel that writes into the other device's
memory. Either may be broken alone.
"""

from collections.abc import Iterator
from enum import Enum

from msgspec import Struct

from ckptfix.devices.probe.payload import DTYPES, dtype_of, known
from ckptfix.devices.probe.probe_report import SAMPLED
from ckptfix.wording import human_size


class Route(Enum):
    """A way of asking for a copy; from STRIDED_SOURCE on, one that no memcpy can do. The value is
    for reports.
    """

    TO = "to()"
    COPY = "copy_()"
    NON_BLOCKING = "copy_(non_blocking=True)"
    AFTER_KERNELS = "copy_() queued behind kernels"
    SIDE_STREAMS = "copy_() on side streams"
    STRIDED_SOURCE = "copy_() from a strided tensor"
    STRIDED_DESTINATION = "copy_() into a strided tensor"
    TRANSPOSED = "copy_() from a transposed tensor"
    CONVERTING = "converting copy_()"


class Case(Struct, frozen=True, kw_only=True):
    """One copy. ``count``: elements of ``dtype`` at the destination; ``source_dtype``: "" means the
    same dtype.
    """

    route: Route
    count: int
    dtype: str = "uint8"
    source_dtype: str = ""

    @property
    def size(self) -> int:
        """Bytes at the destination."""
        return self.count * int(dtype_of(self.dtype).itemsize)

    @property
    def kind(self) -> str:
        """The size class and the engine, in words: copies of one kind are counted together.

        Strided and converting copies are written by a kernel into the other device's memory; where
        the driver offers no peer access, torch gathers them first and sends them as it sends dense
        ones.
        """
        size = "small" if self.size < _MEDIUM else "medium" if self.size < LARGE else "large"
        by_kernel = self.route in _BY_KERNEL or self.source_dtype
        return f"{size} strided or converting" if by_kernel else f"{size} dense"

    def __str__(self) -> str:
        dtype = f"{self.source_dtype} to {self.dtype}" if self.source_dtype else self.dtype
        return f"{self.route.value} of {exact_size(self.size)}, {dtype}"


def exact_size(size: int) -> str:
    """Return a size for people that is exact: 64.0 MiB + 13 B."""
    for unit in (1 << 20, 1 << 10):
        whole, rest = divmod(size, unit)
        if whole and rest < 1024:
            return human_size(whole * unit) + (f" + {rest} B" if rest else "")
    return f"{size} B"


class Section(Struct, frozen=True, kw_only=True):
    """Cases that are done together, in this order.

    ``batched``: many are queued before the host waits for one.

    A section's name identifies its cases: the next process does not repeat the cases that one has
    done.
    """

    name: str
    cases: tuple[Case, ...]
    batched: bool = False

    @property
    def is_large(self) -> bool:
        """True if all copies are large: then several pairs without a device in common may make them
        at once.
        """
        return all(case.size >= WINDOWED for case in self.cases)


class Plan(Struct, frozen=True, kw_only=True):
    """Sections in the order of doing; ``rounds`` of all pairs at once; bytes of each copy in a
    chain.

    ``again``: how often large copies are made once more, with other bits, while time is left.
    ``single``: the share of the time in which pairs are finished before what needs several has its
    turn.
    """

    name: str
    sections: tuple[Section, ...]
    rounds: int
    chained: tuple[int, ...]
    again: int = 0
    single: float = 1.0

    @property
    def copies(self) -> int:
        """Copies for each ordered pair, those in chains and at once not counted."""
        return sum(len(section.cases) for section in self.sections)

    @property
    def largest(self) -> int:
        """Bytes of the largest copy."""
        return max(case.size for section in self.sections for case in section.cases)


LARGE = 32 << 20
"""Bytes. Faults are known that start at 32 MB."""

_MEDIUM = 1 << 20

_BY_KERNEL = (Route.STRIDED_SOURCE, Route.STRIDED_DESTINATION, Route.TRANSPOSED, Route.CONVERTING)

WINDOWED = (8 << 20) + 64
"""Bytes. Copies from here on, a little more than those of ``_MEDIUM_SIZES``, are made as ``large``
says.
"""

REPEATS = 200
"""Small copies by each engine. They find a fault of every 150th copy, and one of 1.5 % by chance
with 95 %.
"""

_SMALL_SIZES = (1, 2, 3, 7, 63, 64, 65, 255, 1024, 4095, 4096, 4097)
_MEDIUM_SIZES = (65535, 65536, (1 << 20) + 1, 2 << 20, (8 << 20) + 5)
_REPEATED = (4 * 4096 + 5, 70001)
# More than three pages: in fewer, a fault that loses every second page does no harm, or looks like
# one missing part.

_PROMPT = (Route.COPY, Route.TO, Route.NON_BLOCKING)
_OTHERS = (
    Route.AFTER_KERNELS,
    Route.SIDE_STREAMS,
    Route.STRIDED_SOURCE,
    Route.STRIDED_DESTINATION,
    Route.TRANSPOSED,
)
_CONVERSIONS = (
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "float16"),
    ("float16", "float32"),
    ("float32", "float64"),
    ("float64", "float32"),
    ("int64", "int32"),
    ("int32", "int64"),
    ("uint8", "float32"),
    ("float32", "uint8"),
    ("bool", "float32"),
    ("int64", "bool"),
)


def _first_look() -> Iterator[Case]:
    # The sizes from which a kind of damage can be told for certain come first: a broken pair needs
    # no more.
    for size in (65541, 4 * 4096, (1 << 20) + 1):
        for route in _PROMPT:
            yield Case(route=route, count=size)
        for route in _OTHERS:
            yield Case(route=route, count=size)


def _repeats(dtype: str = "uint8") -> Iterator[Case]:
    for route in (Route.COPY, Route.STRIDED_SOURCE):
        for index in range(REPEATS):
            yield Case(route=route, count=_REPEATED[index % len(_REPEATED)], dtype=dtype)


def _dtypes(count: int) -> Iterator[Case]:
    for name in filter(known, DTYPES):
        for route in (Route.COPY, Route.STRIDED_SOURCE):
            yield Case(route=route, count=count, dtype=name)
    for source, destination in _CONVERSIONS:
        yield Case(route=Route.CONVERTING, count=count, dtype=destination, source_dtype=source)


def _sizes() -> Iterator[Case]:
    for size in (*_SMALL_SIZES, *_MEDIUM_SIZES):
        for route in _PROMPT:
            yield Case(route=route, count=size)
    for size in (8, 65539, 1 << 20):
        for route in _OTHERS:
            yield Case(route=route, count=size)


def _large_floats(*dtypes: str) -> Iterator[Case]:
    # What a split model sends. Other cases of these dtypes are small, and other large ones are
    # bytes.
    for name in dtypes:
        count = WINDOWED // int(dtype_of(name).itemsize) + 3
        for route in (Route.COPY, Route.STRIDED_SOURCE):
            yield Case(route=route, count=count, dtype=name)


def _large(size: int) -> Iterator[Case]:
    yield Case(route=Route.COPY, count=size)
    # The bits stay, the dtype does not: a kernel makes this copy.
    yield Case(route=Route.CONVERTING, count=size, dtype="uint8", source_dtype="int8")


QUICK = Plan(
    name="quick",
    sections=(
        Section(name="first look", cases=tuple(_first_look())),
        Section(name="repeats", cases=tuple(_repeats()), batched=True),
        Section(name="dtypes", cases=(*_dtypes(4099), *_dtypes(16390))),
        Section(
            name="large copies",
            cases=(*_large(LARGE + (1 << 20) + 13), *_large_floats("float32", "bfloat16")),
        ),
    ),
    rounds=1,
    chained=(3 * 4096 + 8,),
    again=4,
)
"""For "auto": the least that finds every kind of fault that is known."""

FULL = Plan(
    name="full",
    sections=(
        *QUICK.sections,
        Section(
            name="repeats of floats",
            cases=(*_repeats("float32"), *_repeats("bfloat16")),
            batched=True,
        ),
        Section(name="more dtypes", cases=tuple(_dtypes(257))),
        Section(name="sizes", cases=tuple(_sizes())),
        Section(
            name="larger copies",
            cases=(
                *_large(2 * LARGE),
                Case(route=Route.TO, count=2 * LARGE + 13),
                *_large_floats("float16"),
            ),
        ),
    ),
    rounds=3,
    chained=(40, 3 * 4096 + 8, 1 << 20),
    again=8,
    single=0.8,
)
"""For a probe that was asked for. It holds the quick plan, whose sections are then done, too."""

SAMPLE = Plan(
    name=SAMPLED,
    sections=(
        QUICK.sections[0],
        Section(
            name="a sample of repeats", cases=tuple(_repeats())[:: REPEATS // 25], batched=True
        ),
        Section(name="a sample of large copies", cases=tuple(_large(LARGE + (1 << 20) + 13))),
    ),
    rounds=0,
    chained=(),
)
"""For pairs that were found healthy a while ago: enough to see that a link has broken since."""

PLANS = {plan.name: plan for plan in (QUICK, FULL, SAMPLE)}

_ENOUGH_FOR_ALL = 10.0
"""Seconds from which the full plan is worth beginning."""


def plan_for(budget: float) -> Plan:
    """Return the plan for a budget in seconds."""
    return FULL if budget >= _ENOUGH_FOR_ALL else QUICK

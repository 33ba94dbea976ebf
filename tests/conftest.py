"""pytest looks for hooks and fixtures of all tests here; the simulated devices' are written beside
the simulator.
"""

import gc
import os
import shutil
import signal
import sys
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import hypothesis
import pytest

from tests import sampling
from tests.simulated import hooks
from tests.simulated.hooks import each_accelerate, pytest_runtest_protocol, simulator

__all__ = [
    "each_accelerate",
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_protocol",
    "pytest_runtest_teardown",
    "pytest_terminal_summary",
    "simulator",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore interrupts, and all that they
    # start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Images of containers set it. Without bytecode each of the hundreds of processes that the tests
    # start compiles the package again, and pytest rewrites the assertions of every test in each of
    # its own processes.
    sys.dont_write_bytecode = False

MEMORY_DISK = Path("/dev/shm")
ROOM = 6 << 30
"""Free bytes that the temporary folders of a whole run need at most."""

WORTH_A_TABLE = 300
"""Seconds of tests from which on a run says where they went."""

SECONDS = "ckptfix/seconds"
"""Where pytest's cache keeps the seconds of a case of each test function, from the last runs."""

QUICK = 0.03
"""Seconds of a case up to which ``--quick`` runs a test: seven in ten of all, in a twentieth of the
time.
"""

COLLECTED = (50_000, 20, 20)
"""Objects made, and collections of each generation, after which the next garbage is collected. With
Python's 700, 10 and 10 half of the time of a save to S3 went to it: botocore reads a description of
each service, a hundred thousand dicts.
"""

MANY = 100
"""Modules that a file's tests import before the garbage collector passes over them."""

_FROZEN = pytest.StashKey[int]()
"""How many modules there were when it last did."""

LONGEST = ("tests/repairs/test_kill.py",)
"""Files that take a minute and more, the longest first: one that begins last keeps a single worker
busy.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ckptfix")
    group.addoption(
        "--quick",
        action="store_true",
        help="leave out what is marked slow, and what took long in the last run here",
    )
    group.addoption(
        "--exhaustive",
        action="store_true",
        help="strike every point of every kill sweep, and draw all examples",
    )
    group.addoption(
        "--eighth",
        type=int,
        choices=range(sampling.PARTS),
        help="the share of the kill sweeps (by default by chance)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Keep the tests of one file in one process: they share processes with devices, and runs of two
    ranks.
    """
    if config.getoption("numprocesses", None) and config.getoption("dist") == "no":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*COLLECTED)
    hooks.pytest_configure(config)
    sampling.choose_share(
        exhaustive=config.getoption("exhaustive"), eighth=config.getoption("eighth")
    )
    if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM:
        # Thousands of small folders with an fsync for each file: in memory, where an fsync costs
        # nothing.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))

    hypothesis.settings.register_profile(
        "ckptfix", max_examples=sampling.examples(100), deadline=None
    )
    hypothesis.settings.load_profile("ckptfix")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector from walking through torch and all tests again and again."""
    _freeze(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep it from what the tests of a file have imported and kept, too: half a million objects of
    torch._dynamo alone.
    """
    is_last = nextitem is None or nextitem.path != item.path
    if is_last or len(sys.modules) > item.config.stash[_FROZEN] + MANY:
        _freeze(item.config)


def _freeze(config: pytest.Config) -> None:
    gc.collect()
    gc.freeze()
    config.stash[_FROZEN] = len(sys.modules)


def pytest_report_header() -> str:
    share = os.environ[sampling.SHARE]
    return (
        "kill sweeps: "
        f"{'all points' if share == 'all' else f'share {share} of 8 (--eighth {share})'}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the storage: its tests fork thousands of times, which is slow once torch has
    filled this process.
    """
    hooks.pytest_collection_modifyitems(items)
    if config.getoption("quick"):
        known = _known_seconds(config)
        quick: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            is_long = (
                item.get_closest_marker("slow") or known.get(_function(item.nodeid), 0) > QUICK
            )
            (left if is_long else quick).append(item)
        items[:] = quick
        config.hook.pytest_deselected(items=left)
    order = {name: place for place, name in enumerate(LONGEST)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        file = item.nodeid.partition("::")[0]
        return not file.startswith("tests/storage/"), order.get(file, len(order))

    items.sort(key=place)


def _function(nodeid: str) -> str:
    """Return the file and name of a test without its case."""
    return nodeid.partition("[")[0]


def _cache(config: pytest.Config) -> pytest.Cache | None:
    """Return pytest's cache, None where its plugin is off: then the attribute is missing."""
    return getattr(config, "cache", None)


def _known_seconds(config: pytest.Config) -> dict[str, float]:
    cache = _cache(config)
    known: dict[str, float] = cache.get(SECONDS, {}) if cache else {}
    return known


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Keep the seconds of each test function for ``--quick``, and say where the time of a long run
    went: those of each folder, and of the longest files.
    """
    cases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    files: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                cases[_function(report.nodeid)][report.nodeid] += report.duration
                files[report.nodeid.partition("::")[0]] += report.duration
    cache = _cache(config)
    if cache and cases:
        means = {name: round(sum(of.values()) / len(of), 3) for name, of in cases.items()}
        cache.set(SECONDS, {**_known_seconds(config), **means})
    if sum(files.values()) < WORTH_A_TABLE:
        return
    folders: dict[str, float] = defaultdict(float)
    for file, seconds in files.items():
        folders[os.path.dirname(file)] += seconds
    terminalreporter.section("seconds, of all processes together")
    for title, table in (("folder", folders), ("file", files)):
        for name, seconds in sorted(table.items(), key=itemgetter(1), reverse=True)[:25]:
            terminalreporter.write_line(f"{seconds:8.0f}  {title} {name}")

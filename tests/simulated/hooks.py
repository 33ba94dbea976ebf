"""What pytest does with tests marked `simulated` or `alone`: those of one module run together in
one process, with devices or without torch.

That process is pytest again, told which tests to run; its reports are repeated here as if they were
made here. So a test has its usual id, its usual fixtures and its usual failure, and no case costs a
process of its own.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import building
from tests.simulated.processes import run_to_end, variables
from tests.simulated.simulator import MEMORY, Simulator, running
from tests.simulated.versions import accelerate_folder

REPORTS = "CKPTFIX_SIMULATED_REPORTS"
"""Environment variable of the process with devices: the file for its reports, one JSON object a
line.
"""

OTHER_ACCELERATE = "1.6.0"
PATIENCE = 420.0
"""Seconds for all tests of one module, unless its marker says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What one process is for: the tests of one file that want the same devices."""

    path: Path
    devices: int = 0
    """0 for a process of its own without simulation."""
    memory: int = MEMORY
    timeout: float
    accelerate: str = "installed"
    """A version, or "installed"."""


@dataclass(slots=True)
class _Results:
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By id of the test."""
    ending: str = ""
    """How the process ended."""
    skipped: str = ""
    """Why there was no process."""


_RESULTS = pytest.StashKey[dict[_World, _Results]]()
_IS_CHILD = pytest.StashKey[bool]()


class _Reporter:
    """In the process with devices: hands each report over at once, for the next test may be the
    last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(report._to_json(), default=str) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "simulated(devices, memory=8 GiB, timeout=420 s): needs simulated CUDA devices; "
        "a module's tests share one process that has them",
    )
    config.addinivalue_line(
        "markers", "accelerate(version): needs this accelerate in place of the installed one"
    )
    config.addinivalue_line(
        "markers",
        "alone(timeout=420 s): forks again and again; a module's tests share one process that has "
        "not imported torch, of which a fork costs a sixth",
    )
    config.stash[_RESULTS] = {}
    reports = os.environ.pop(REPORTS, None)  # not for the processes of this one
    config.stash[_IS_CHILD] = reports is not None
    if reports is not None:
        config.pluginmanager.register(_Reporter(Path(reports)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("simulated") is not None]
    wrong = building.why_not() if marked else ""
    for item in marked:
        if "simulated" not in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid}: its name must say that its devices are simulated"
            )
        item.add_marker(pytest.mark.slow)
        if wrong:
            item.add_marker(pytest.mark.skip(reason=wrong))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Repeat the reports of a marked test from its process, which the first test of its kind
    starts.
    """
    if not _marked(item) or item.config.stash[_IS_CHILD]:
        return None
    if item.get_closest_marker("simulated") and (running() is not None or building.why_not()):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What the last test that ran here has left set up is not of the next one's folder any more.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    world = _world(item)
    results = item.config.stash[_RESULTS]
    if world not in results:
        alike = [other for other in item.session.items if _marked(other) and _world(other) == world]
        results[world] = _run(world, [other.nodeid for other in alike], item)
    made = results[world].reports.get(item.nodeid, [])
    reports = [_report(fields) for fields in made]
    if all(report.when != "teardown" for report in reports):
        # It has not come to its end: this test ended the process, or an earlier one did, or there
        # was none.
        why = results[world].skipped
        reports.append(_skipped(item, why) if why else _failed(item, results[world].ending))
    return reports


def _report(fields: dict[str, Any]) -> pytest.TestReport:
    made = dict(fields)
    for name in ("location", "longrepr"):  # pytest needs tuples, for which JSON has no word
        if isinstance(made[name], list):
            made[name] = tuple(made[name])
    return pytest.TestReport._from_json(made)


def _marked(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, ("simulated", "alone")))


def _world(item: pytest.Item) -> _World:
    alone, simulated = map(item.get_closest_marker, ("alone", "simulated"))
    if alone is not None:
        return _World(path=item.path, timeout=alone.kwargs.get("timeout", PATIENCE))
    version = item.get_closest_marker("accelerate")
    assert simulated is not None
    return _World(
        path=item.path,
        devices=simulated.args[0],
        memory=simulated.kwargs.get("memory", MEMORY),
        timeout=simulated.kwargs.get("timeout", PATIENCE),
        accelerate="installed" if version is None else version.args[0],
    )


def _failed(item: pytest.Item, words: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=words,
        when="call",
    )


def _skipped(item: pytest.Item, words: str) -> pytest.TestReport:
    path, line, _ = item.location
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="skipped",
        longrepr=(path, line or 0, f"Skipped: {words}"), when="setup",
    )  # fmt: skip


def _kept(config: pytest.Config, name: str) -> Path:
    """Return a folder that the next run finds again, or, if pytest is to keep no cache, one for
    this run.
    """
    cache = getattr(config, "cache", None)
    return Path(_temporary(config).mktemp(name) if cache is None else cache.mkdir(name))


def _temporary(config: pytest.Config) -> pytest.TempPathFactory:
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory


def _run(world: _World, names: list[str], item: pytest.Item) -> _Results:
    folder = None
    environment = dict(os.environ)
    try:
        if world.accelerate != "installed":
            folder = accelerate_folder(
                world.accelerate, _kept(item.config, f"accelerate-{world.accelerate}")
            )
        if world.devices:
            environment = variables(world.devices, memory=world.memory, accelerate=folder)
    except pytest.skip.Exception as why:
        return _Results(skipped=str(why))
    except (AssertionError, RuntimeError) as wrong:
        return _Results(ending=str(wrong))
    # One folder for the whole run, below its own: pytest then keeps and removes it with the rest.
    work = _temporary(item.config).mktemp("simulated")
    reports = work / "reports.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={work / 'tmp'}",
    ]
    command += [f"--rootdir={item.config.rootpath}"]
    if item.config.inipath is not None:
        command += [f"--config-file={item.config.inipath}"]
    done, in_time = run_to_end(
        [*command, *names],
        {**environment, REPORTS: str(reports)},
        item.config.rootpath,
        world.timeout,
    )
    ending = (
        f"ended with status {done.returncode}"
        if in_time
        else f"had not ended after {world.timeout:g} s"
    )
    wrote = done.stdout[-6000:] + done.stderr[-6000:]
    results = _Results(ending=f"the process of these tests {ending}:\n{wrote}")
    if reports.exists():
        for line in reports.read_text().splitlines():
            report = json.loads(line)
            results.reports.setdefault(report["nodeid"], []).append(report)
    return results


@pytest.fixture
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    """The devices of this process: healthy, with an empty log and fixed seeds, for each test."""
    import torch

    found = running()
    assert found is not None, f"{request.node.nodeid} is not marked `simulated`"
    found.clear()
    torch.manual_seed(0)
    yield found
    found.clear()


@pytest.fixture(
    params=[
        "installed",
        pytest.param(OTHER_ACCELERATE, marks=pytest.mark.accelerate(OTHER_ACCELERATE)),
    ]
)
def each_accelerate(request: pytest.FixtureRequest) -> str:
    """Run the test with the installed accelerate, and with the oldest that the devices are tested
    on.
    """
    import accelerate

    version: str = request.param
    installed: str = accelerate.__version__
    assert version in ("installed", installed)
    return installed

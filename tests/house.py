"""``python -m tests.house``: how easy the package is to take in, in numbers.

Modules and lines, circles of imports (lazy ones counted), modules with one importer, names with two
meanings, and the modules that one ``ckptfix repair`` runs through. ``tests/test_layers.py`` holds
the numbers to their limits.
"""

import ast
import contextlib
import inspect
import io
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckptfix"
FIXTURE = (
    ROOT / "fixtures" / "accelerate-1.15.0" / "student-teacher-wrapper-safetensors" / "checkpoint"
)
SMALL = 100
"""Lines below which a module with one importer belongs into that importer."""


@cache
def modules() -> Mapping[str, Path]:
    """Return every module of the package: its dotted name and its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's syntax tree; finding them takes longer than what is asked of
    them.
    """
    return tuple(ast.walk(tree(path)))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the dotted name of everything that a file imports, anywhere in it."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def graph() -> Mapping[str, frozenset[str]]:
    """Return which modules of the package each of them imports; the public face, which imports all
    of it, left out.
    """
    known = modules()
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for target in imported(path):
            module = target if target in known else target.rpartition(".")[0]
            if module in known and module not in ("ckptfix", name) and name != "ckptfix":
                edges[name].add(module)
    return {name: frozenset(edges[name]) for name in known}


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    edges = graph()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in edges[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    reach = {name: reached(name) for name in edges}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in edges}
    return sorted(sorted(group) for group in groups if group)


def lines() -> Mapping[str, int]:
    """Return the number of lines of every module."""
    return {name: len(path.read_text().splitlines()) for name, path in modules().items()}


def splinters() -> list[str]:
    """Return the modules under 100 lines with a single importer, but for verbs of the command line
    and interfaces.
    """
    importers = Counter(target for targets in graph().values() for target in targets)
    length = lines()
    return [
        name
        for name, path in modules().items()
        if importers[name] == 1
        and length[name] < SMALL
        and path.stem not in ("__init__", "__main__")
        and not name.startswith("ckptfix.cli.")
    ]


def names_used_twice() -> list[str]:
    """Return the names of modules that several rooms use; a verb of the command line shares that of
    what it runs.
    """
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.stem not in ("__init__", "__main__") and not name.startswith("ckptfix.cli."):
            homes[path.stem].append(name)
    for name, path in modules().items():
        if path.stem == "__init__" and name != "ckptfix":
            homes[name.rpartition(".")[2]].append(name)
    return sorted(name for name, users in homes.items() if len(users) > 1)


def modules_of_a_repair() -> list[str]:
    """Return the modules of the package in which a function runs while ``ckptfix repair`` mends a
    doubled folder.
    """
    from ckptfix.cli import cli

    seen: set[str] = set()
    prefix = str(PACKAGE) + os.sep

    def called(frame: object, event: str, _: object) -> None:
        code = getattr(frame, "f_code")  # noqa: B009 - a frame, which typeshed gives another name in each version
        # Bodies of modules and classes run when they are imported, whatever a repair does: they are
        # not optimized code.
        if (
            event == "call"
            and code.co_flags & inspect.CO_OPTIMIZED
            and code.co_filename.startswith(prefix)
        ):
            seen.add(code.co_filename.removeprefix(prefix))

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = shutil.copytree(FIXTURE, Path(folder) / "checkpoint")
        sys.setprofile(called)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                cli.main(["repair", str(checkpoint)], standalone_mode=False)
        finally:
            sys.setprofile(None)
    return sorted(seen)


def show() -> None:
    """Print all numbers."""
    length = lines()
    repair = modules_of_a_repair()
    print(f"modules                      {len(length):6}")
    print(f"lines                        {sum(length.values()):6}")
    print(
        f"circles of imports           {len(circles()):6}  "
        f"{'; '.join(' <-> '.join(each) for each in circles())}"
    )
    print(f"modules that a repair runs   {len(repair):6}")
    print(
        f"names with two meanings      {len(names_used_twice()):6}  {' '.join(names_used_twice())}"
    )
    print(f"one importer, under {SMALL} lines{len(splinters()):5}  {' '.join(splinters())}")
    print(
        "largest                      ",
        ", ".join(f"{name} {length[name]}" for name in sorted(length, key=length.__getitem__)[-5:]),
    )


if __name__ == "__main__":
    show()

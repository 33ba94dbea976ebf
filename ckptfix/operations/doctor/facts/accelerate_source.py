"""What the installed accelerate says of itself, read off its source by the syntax tree: nothing is imported.

So the names that it exports, its launcher's options and its config's fields are those of the installed version.
"""

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSource:
    """What the installed accelerate says of itself; empty where its source was not found.

    ``names``: what can be imported from it. ``modules``: the same of those of its modules that were asked for, by their
    names below accelerate ("utils.modeling"); "*" among the names: not all of them are known. ``options``: launch's
    options without dashes, with underscores -> whether a value follows. ``config_fields``: what a config may hold.
    ``reads_variable``: it reads ACCELERATE_CONFIG_FILE.
    """

    names: frozenset[str] = frozenset()
    modules: Mapping[str, frozenset[str]] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=dict)
    config_fields: frozenset[str] = frozenset()
    reads_variable: bool = False

    def missing(self, name: str) -> str:
        """Return the first part of a dotted name below accelerate that is not there, "" when all of it may be."""
        parts = name.split(".")
        for depth, part in enumerate(parts):
            names = self.names if depth == 0 else self.modules.get(".".join(parts[:depth]))
            if not names or "*" in names or part.startswith("__"):
                return ""  # what is in a class, or in a module whose source could not be read, is not known
            if part not in names:
                return ".".join(parts[: depth + 1])
        return ""

    def known_beside(self, name: str) -> frozenset[str]:
        """Return the names that stand beside the last part of a dotted name."""
        parent = name.rpartition(".")[0]
        return self.modules.get(parent, frozenset()) if parent else self.names


def read_accelerate(package: Path | None) -> AccelerateSource:
    """Return what accelerate's source under ``package`` says; an empty answer when it is not there."""
    if package is None:
        return AccelerateSource()
    launch, config = package / "commands" / "launch.py", package / "commands" / "config" / "config_args.py"
    return AccelerateSource(
        names=_exported(package / "__init__.py"),
        options=_options(launch),
        config_fields=_fields(config, ("BaseConfig", "ClusterConfig")),
        reads_variable=any('"ACCELERATE_CONFIG_FILE"' in _text(path) for path in (launch, config)),
    )


def read_modules(package: Path | None, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return what can be imported from each module of accelerate's that dotted names lead through."""
    if package is None:
        return {}
    parents = {
        ".".join(parts[:depth])
        for name in names
        for parts in (name.split("."),)
        for depth in range(1, len(parts))
    }
    found = {}
    for parent in sorted(parents):
        folder = package.joinpath(*parent.split("."))
        paths = (folder / "__init__.py", folder.with_suffix(".py"))
        path = next((path for path in paths if path.is_file()), None)
        if path is not None:
            found[parent] = _exported(path) if _tree(path).body else frozenset("*")
    return found


def find_source(name: str) -> Path | None:
    """Return the folder of an installed package, None when it is not there."""
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts == (name, "__init__.py"):
            return Path(str(file.locate())).parent
    # An editable install lists no files: look where an import would, without importing.
    places = (Path(entry or ".") / name for entry in sys.path)
    return next((place for place in places if (place / "__init__.py").is_file()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(_text(path))
    except (SyntaxError, ValueError):  # of another Python than this one
        return ast.Module(body=[], type_ignores=[])


def _exported(path: Path) -> frozenset[str]:
    tree = _tree(path)
    makes_names = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    names: set[str] = {"*"} if makes_names else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if path.name != "__init__.py":
        return frozenset(names)
    return frozenset(names | {file.stem for file in path.parent.glob("*.py")} | {
        folder.name for folder in path.parent.glob("*/") if (folder / "__init__.py").is_file()
    })  # fmt: skip


def _options(path: Path) -> dict[str, bool]:
    options: dict[str, bool] = {}
    for node in ast.walk(_tree(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            action = next((ast.unparse(word.value) for word in node.keywords if word.arg == "action"), "")
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("-"):
                    name = str(argument.value).lstrip("-").replace("-", "_")
                    options[name] = "store_" not in action and "help" not in action
    return options


def _fields(path: Path, classes: tuple[str, ...]) -> frozenset[str]:
    return frozenset(
        statement.target.id
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )

"""What the installed accelerate says of itself, read off its source by the syntax tree: nothing is imported.

So the names that it exports, its launcher's options and its config's fields are those of the installed version.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSource:
    """What the installed accelerate says of itself; empty where its source was not found.

    ``names``: what can be imported from it. ``options``: launch's options without dashes, with underscores -> whether a
    value follows. ``config_fields``: what a config may hold. ``reads_variable``: it reads ACCELERATE_CONFIG_FILE.
    """

    names: frozenset[str] = frozenset()
    options: Mapping[str, bool] = field(default_factory=dict)
    config_fields: frozenset[str] = frozenset()
    reads_variable: bool = False


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
    names: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
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

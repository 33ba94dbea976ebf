"""Installed software: Python, packages, the ``accelerate`` command, and compilers. Nothing is
imported.

Packages are known by their metadata, commands by their first line. The names that accelerate
exports, and its launcher's options are read from the syntax tree of the
installed source, so they fit its version.
"""

import ast
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace


class AccelerateSource(Struct, frozen=True, kw_only=True):
    """Names and options of the installed accelerate; empty where its source was not found.

    ``names``: what can be imported from it. ``modules``: the same of those of its modules that were
    asked for, by their names below accelerate ("utils.modeling"); "*" among the names: not all of
    them are known. ``options``: launch's options without dashes, with underscores -> whether a
    value follows.
    """

    names: frozenset[str] = frozenset()
    modules: Mapping[str, frozenset[str]] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=dict)

    def missing(self, name: str) -> str:
        """Return the first part of a dotted name below accelerate that is not there, "" when all of
        it may be.
        """
        parts = name.split(".")
        for depth, part in enumerate(parts):
            names = self.names if depth == 0 else self.modules.get(".".join(parts[:depth]))
            if not names or "*" in names or part.startswith("__"):
                # What is in a class, or in a module whose source could not be read, is not known.
                return ""
            if part not in names:
                return ".".join(parts[: depth + 1])
        return ""

    def known_beside(self, name: str) -> frozenset[str]:
        """Return the names next to the last part of a dotted name."""
        parent = name.rpartition(".")[0]
        return self.modules.get(parent, frozenset()) if parent else self.names


def read_accelerate(package: Path | None) -> AccelerateSource:
    """Return what accelerate's source under ``package`` says; an empty answer when it is not
    there.
    """
    if package is None:
        return AccelerateSource()
    return AccelerateSource(
        names=_exported(package / "__init__.py"),
        options=_options(package / "commands" / "launch.py"),
    )


def read_modules(package: Path | None, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return what can be imported from each module of accelerate's that dotted names lead
    through.
    """
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
    makes_names = any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body
    )
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
            action = next(
                (ast.unparse(word.value) for word in node.keywords if word.arg == "action"), ""
            )
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("-"):
                    name = str(argument.value).lstrip("-").replace("-", "_")
                    options[name] = "store_" not in action and "help" not in action
    return options


PACKAGES = (
    "ckptfix", "torch", "accelerate", "transformers", "safetensors", "huggingface_hub",
    "tokenizers", "numpy", "peft", "deepspeed", "bitsandbytes", "flash_attn",
)  # fmt: skip
"""The packages whose versions are looked at."""

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "nvcc", "hipcc", "ninja")
Version = tuple[int, ...]


class Package(Struct, frozen=True, kw_only=True):
    """An installed package."""

    name: str
    version: str
    requires_python: str = ""


class Command(Struct, frozen=True, kw_only=True):
    """A command on the PATH. ``interpreter``: the Python that its first line names, "" when it
    names none.

    ``python`` is that Python's version, () when it could not be found out without running it.
    ``is_ours``: it is the Python that this runs in.
    """

    path: str
    interpreter: str = ""
    python: Version = ()
    is_ours: bool = True


class Software(Struct, frozen=True, kw_only=True):
    """Python and its packages.

    ``command``: ``accelerate`` on the PATH. ``next_to_python``: the one in the folder of this
    Python, "" when it has none.
    """

    python: Version
    executable: str
    packages: Mapping[str, Package]
    command: Command | None = None
    next_to_python: str = ""
    accelerate: AccelerateSource = field(default_factory=AccelerateSource)
    compilers: Mapping[str, str] = field(default_factory=dict)
    has_python_headers: bool = True

    def version(self, name: str) -> Version:
        """Return the version of a package as numbers, () when it is not installed."""
        package = self.packages.get(name)
        return release(package.version) if package is not None else ()


def release(text: str) -> Version:
    """Return the numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def read_software(environment: Mapping[str, str]) -> Software:
    """Return what is installed next to ckptfix, and what the PATH holds."""
    search = environment.get("PATH", os.defpath)
    found = {name: path for name in COMPILERS if (path := shutil.which(name, path=search))}
    return Software(
        python=sys.version_info[:3],
        executable=sys.executable,
        packages=_packages(),
        command=find_command("accelerate", search),
        next_to_python=shutil.which("accelerate", path=os.path.dirname(sys.executable)) or "",
        accelerate=read_accelerate(find_source("accelerate")),
        compilers=found,
        has_python_headers=os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
    )


def with_modules(software: Software, names: Iterable[str]) -> Software:
    """Return the software with the modules of accelerate read that dotted names lead through."""
    found = read_modules(find_source("accelerate"), names)
    return replace(software, accelerate=replace(software.accelerate, modules=found))


def find_command(name: str, search: str) -> Command | None:
    """Return the command of this name on the path ``search``, by its file and first line; it is not
    run.
    """
    path = shutil.which(name, path=search)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            first = file.readline(1024).decode("utf-8", "replace").strip()
    except OSError:
        first = ""
    interpreter = first.removeprefix("#!").strip() if first.startswith("#!") else ""
    words = interpreter.split()
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        interpreter = shutil.which(words[-1], path=search) or ""
    elif words:
        interpreter = words[0]
    if "python" not in os.path.basename(interpreter):
        return Command(path=path)  # a wrapper of some kind: which Python it ends in is unknown
    is_ours = _bin(interpreter) == _bin(sys.executable)
    return Command(
        path=path, interpreter=interpreter, python=_python_version(interpreter), is_ours=is_ours
    )


def _packages() -> dict[str, Package]:
    found: dict[str, Package] = {}
    for name in PACKAGES:
        try:
            data = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = Package(
            name=name,
            version=str(data["Version"] or "unknown"),
            requires_python=str(data["Requires-Python"] or ""),
        )
    return found


def _bin(interpreter: str) -> str:
    return os.path.realpath(os.path.dirname(interpreter))


def _python_version(interpreter: str) -> Version:
    """Return an interpreter's version from its environment's ``pyvenv.cfg``, or its own name; ()
    when neither says.
    """
    for line in _text(Path(interpreter).parent.parent / "pyvenv.cfg").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return release(value.strip())
    match = re.search(r"python([0-9]+\.[0-9]+)$", os.path.realpath(interpreter))
    return release(match[1]) if match else ()

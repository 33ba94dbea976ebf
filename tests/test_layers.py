"""The layers, read off the syntax tree: imports point down, and only training/ and devices/ need
torch.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house

PACKAGE = Path(__file__).parents[1] / "ckptfix"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = ("storage", "formats", "checkpoint", "tensors", "diagnosis")
"""Each may import itself and those before it."""

FEATURES = ("repairs", "verification", "conversion", "environment", "devices", "training")
"""Each may import all layers, and no other feature."""

BELOW = {
    **{layer: set(LAYERS[: place + 1]) for place, layer in enumerate(LAYERS)},
    **{feature: {feature, *LAYERS} for feature in FEATURES},
    # Doctor asks torch, in a process of its own.
    "environment": {"environment", "devices", *LAYERS},
    "training": {
        "training",
        "devices",
        *LAYERS,
    },  # the guarded Accelerator turns safe transfers on
    "manual": {"manual"},
    "cli": {"cli", "manual", *FEATURES, *LAYERS},
}
ANYWHERE = {"errors", "reports", "wording", "pages", "hardware", "lazy", "__init__"}
WITH_TORCH = {"training", "devices"}
HEAVY = {"torch", "accelerate", "numpy", "transformers"}
NUMBERS = "tensors"
"""The one layer without torch that looks at numbers; ``check`` must not import numpy (tested
below).
"""

OTHER_WORDS = {"save_model"}
"""Names in the docstrings of packages that are not modules."""

EXECUTES = {"pickle", "marshal", "shelve", "runpy"}


def teardown_module() -> None:
    """Let go of a million nodes, which every later ``gc.collect()`` would walk through."""
    house.nodes.cache_clear()


def test_imports_point_down() -> None:
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    for name in house.imported(path):
        parts = name.split(".") if "." in name else [name, "__init__"]
        if parts[0] == "ckptfix" and layer in BELOW and parts[1] not in ANYWHERE:
            assert parts[1] in BELOW[layer], (
                f"{path}: {layer} may not import {name}: it would know what is above it"
            )
        if layer not in WITH_TORCH:
            is_numbers = layer == NUMBERS and parts[0] == "numpy"
            assert parts[0] not in HEAVY or is_numbers, (
                f"{path}: {name}: torch takes a second to import, and a broken driver must not "
                "stop a repair"
            )
            assert not name.startswith("safetensors.torch"), f"{path}: {name} imports torch"
        assert parts[0] not in EXECUTES, (
            f"{path}: {name} can run what a file says; pickles are read by their opcodes"
        )


def test_the_house_stays_easy_to_take_in() -> None:
    assert not house.circles(), (
        "two modules that import each other cannot be read one after the other"
    )
    assert not house.names_used_twice(), "a name in two rooms leads to the wrong one"
    assert not house.splinters(), "a small module with one importer belongs into it"


def test_packages_name_modules_that_exist() -> None:
    names = {path.stem for path in MODULES} | {path.parent.name for path in MODULES}
    for path in MODULES:
        if path.stem == "__init__" and path.parent.name in (
            "saving",
            "loading",
            "reload",
            "probe",
            "tensors",
        ):
            words = re.findall(r"``([a-z_]+)``", ast.get_docstring(house.tree(path)) or "")
            unknown = {word for word in words if word not in names} - OTHER_WORDS
            assert not unknown, f"{path}: no module is called so: a newcomer reads this first"


def test_modules_stay_small_and_are_named_for_what_they_hold() -> None:
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 800, f"split {path}: a module is one concept"
        assert path.stem not in {"utils", "helpers", "common", "core", "manager"}, path


def test_only_report_prints() -> None:
    for path in MODULES:
        calls = [node.func for node in house.nodes(path) if isinstance(node, ast.Call)]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        assert not prints, f"{path.name} prints"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["-c", "import ckptfix; ckptfix.check"], ["-m", "ckptfix", "check", "fixtures"]]
)
def test_no_torch_is_imported(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert any(name.startswith("ckptfix") for name in loaded)
    assert not loaded & {"torch", "accelerate", "numpy"}


_OPENING = re.compile(
    r"(?<![\w.])open\(|(?<!Image)\.open\(|\.read_(bytes|text)\(|\bos\.(open|pread|preadv|readv)\b|\bsafe_open\("
)
_OF_THIS_MACHINE = {
    "conversion/streaming.py": 3,  # copies of files whose bytes are on this machine
    "tensors/parameter_sources.py": 1,  # the answer of a process
    "tensors/stored.py": 2,  # windows of files that have a descriptor
}
"""Where layers above ``storage`` open a file by themselves, and how often, because it is never one
of a store.
"""


def test_only_storage_opens_files() -> None:
    """The bytes of a checkpoint can lie in an object store: ``storage.reading`` knows where,
    ``open`` does not.
    """
    for path in MODULES:
        where = str(path.relative_to(PACKAGE))
        if where.partition("/")[0] in {*LAYERS[1:], "verification", "conversion", "repairs"}:
            found = [line for line in path.read_text().splitlines() if _OPENING.search(line)]
            assert len(found) == _OF_THIS_MACHINE.get(where, 0), (
                f"{where}: use storage.reading: {found}"
            )


def test_errors_know_nothing_of_the_package() -> None:
    names = list(house.imported(PACKAGE / "errors.py"))
    assert not [name for name in names if name.startswith("ckptfix")], (
        "every layer imports errors: a circle"
    )


def test_nothing_is_evaluated() -> None:
    for path in MODULES:
        called = {
            node.func.id
            for node in house.nodes(path)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {
            "eval",
            "exec",
            "compile",
            "__import__",
        }, f"{path}: text of a file could become code"


def test_values_are_structs() -> None:
    """The dataclasses behind ``check`` took four of ten instructions of its start."""
    kinds = [str(path.relative_to(PACKAGE)) for path in MODULES if _makes_dataclasses(path)]
    assert not [kind for kind in kinds if not kind.startswith(_DATACLASSES)]


_DATACLASSES = (
    "environment/facts/script_scan.py",  # fields that its constructor does not take
    "training/resume_proofs/",
)


def _makes_dataclasses(path: Path) -> bool:
    return "dataclasses.dataclass" in house.imported(path)


def test_no_class_needs_python_3_11() -> None:
    """In 3.10 a NamedTuple has no other base: ``verify``, ``seal`` and ``scrub`` ended there."""
    for path in MODULES:
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                assert "NamedTuple" not in bases or len(bases) == 1, f"{path}: {node.name}"


def test_every_layer_is_known() -> None:
    folders = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders <= set(BELOW), (
        "a new layer needs a place in the order, or its imports go unchecked"
    )

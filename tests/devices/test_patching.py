"""Changes to other libraries at run time: installed, stacked with those of others, and removed without
a trace.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptfix.devices.patching import Method, Patch, Patches, replaced, when_imported

NAME = "library_to_patch"
SOURCE = """
class Kind:
    def method(self, value=1):
        "Its own words."
        return value

def function(value):
    return value
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A function that imports a library."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    (tmp_path / f"importer_of_{NAME}.py").write_text(f"from {NAME} import function as renamed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield lambda: importlib.import_module(NAME)
    sys.meta_path[:] = before
    for name in (NAME, f"importer_of_{NAME}"):
        sys.modules.pop(name, None)


def tenfold(original: Method) -> Method:
    return lambda *args, **kwargs: 10 * original(*args, **kwargs)


def table() -> Patches:
    return Patches(
        Patch(f"{NAME}:Kind.method", tenfold),
        Patch(f"{NAME}:function", tenfold, everywhere=True),
        Patch(f"{NAME}:Kind.added", lambda _: lambda self: "added", is_new=True),
    )


def attributes(module: ModuleType) -> dict[str, Any]:
    kind = vars(module)["Kind"]
    return {**vars(module), **{f"Kind.{name}": value for name, value in vars(kind).items()}}


def test_installed_and_removed_without_a_trace(library: Callable[[], Any]) -> None:
    module, patches = library(), table()
    importer = importlib.import_module(f"importer_of_{NAME}")
    before = attributes(module)
    for _ in range(2):
        patches.install()
        patches.install()
        assert patches.is_installed
        assert (module.Kind().method(), module.Kind().method(value=2)) == (10, 20)
        assert (module.function(3), importer.renamed(3)) == (30, 30)
        assert module.Kind().added() == "added"
        assert module.Kind.method.__doc__ == "Its own words."
        patches.remove()
        patches.remove()
        assert not patches.is_installed
        assert attributes(module) == before
        assert importer.renamed is module.function


def test_a_library_that_is_imported_later(library: Callable[[], Any]) -> None:
    early, late = table(), table()
    early.install()
    early.remove()
    late.install()
    module = library()
    assert module.Kind().method() == 10
    assert importlib.import_module(f"importer_of_{NAME}").renamed(1) == 10
    late.remove()
    assert module.Kind().method() == 1


def test_two_tables_are_removed_in_any_order(library: Callable[[], Any]) -> None:
    module = library()
    before = attributes(module)
    first, second = table(), Patches(Patch(f"{NAME}:Kind.method", tenfold))
    first.install()
    second.install()
    assert module.Kind().method() == 100
    first.remove()
    assert module.Kind().method() == 10, "the first lies below the second, and passes calls on"
    first.install()
    assert module.Kind().method() == 100
    first.remove()
    second.remove()
    assert module.Kind().method() == 1
    assert before.keys() == attributes(module).keys()


def test_the_patch_of_another_stays(library: Callable[[], Any]) -> None:
    module, patches = library(), table()
    patches.install()
    ours = module.Kind.method
    module.Kind.method = theirs = lambda self: 1 + ours(self)
    assert module.Kind().method() == 11
    patches.remove()
    assert module.Kind.method is theirs
    assert module.Kind().method() == 2
    patches.install()
    assert module.Kind().method() == 20, "in front of theirs, and not below it a second time"


def test_what_is_put_again_goes_in_front(library: Callable[[], Any]) -> None:
    module, patches = library(), Patches()
    for _ in range(2):
        patches.put(module.Kind, "method", tenfold, is_outermost=True)
    assert module.Kind().method() == 10
    ours = module.Kind.method
    module.Kind.method = lambda self: 1 + ours(self)
    patches.put(module.Kind, "method", tenfold, is_outermost=True)
    assert module.Kind().method() == 110
    patches.remove()
    assert module.Kind().method() == 2


def test_a_module_that_is_half_imported_is_left_alone(library: Callable[[], Any]) -> None:
    module, patches = library(), table()
    function = vars(module).pop("function")
    patches.install()
    assert "function" not in vars(module)
    module.function = function
    patches.install()
    assert module.function(1) == 10


def test_attributes_are_replaced_for_a_while(library: Callable[[], Any]) -> None:
    module = library()
    thing = module.Kind()
    thing.own = 1
    with replaced(thing, own=2, method=lambda: 3):
        assert (thing.own, thing.method()) == (2, 3)
    assert vars(thing) == {"own": 1}
    with replaced(thing, own=2):
        thing.own = 4
    assert thing.own == 4, "what somebody else set meanwhile stays"
    with replaced(module, function=None):
        assert module.function is None
    assert module.function(1) == 1  # type: ignore[misc]


ATTRIBUTES = """
import gc, inspect, json, sys, warnings
warnings.simplefilter("ignore")
import accelerate, accelerate.big_modeling, accelerate.checkpointing, peft, torch, transformers
import transformers.trainer, transformers.modeling_utils
import ckptfix.training.accelerator as guarded
from torch import nn

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("accelerate", "transformers", "torch", "peft"):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{at}": each for at, each in vars(value).items()})
    return found

def train():
    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    for batch in loader:
        accelerator.backward(net(batch).sum())
        optimizer.step()
    accelerator.save_state(sys.argv[1])
    accelerator.load_state(sys.argv[1])

train()
before = attributes()
guarded.patch_accelerate()
patched = attributes()
train()
gc.collect()
guarded.unpatch_accelerate()
after = attributes()
# Counters of hooks and what torch imports when it is used first change in any run.
functions = {key: value for key, value in before.items() if inspect.isroutine(value)}
names = lambda now: sorted(key for key in functions if now.get(key) is not functions[key])
print(json.dumps({"patched": names(patched), "left": names(after)}))
"""


@pytest.mark.slow
def test_every_attribute_is_as_before(tmp_path: Path) -> None:
    """Four classes of accelerate and torch stayed patched after ``unpatch_accelerate``."""
    (tmp_path / "script.py").write_text(ATTRIBUTES)
    done = subprocess.run(
        [sys.executable, "script.py", "saved"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    assert "accelerate.accelerator.Accelerator.prepare" in names["patched"]
    assert "transformers.trainer.Trainer.train" in names["patched"]
    assert names["left"] == []


def test_an_action_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    seen: list[Any] = []
    when_imported("watched_module", lambda: seen.append(sys.modules["watched_module"].value))
    for _ in range(2):  # as transformers does, to learn whether it is installed
        spec = importlib.util.find_spec("watched_module")
        assert spec is not None
        assert spec.loader is not None
        assert spec.loader.get_filename() == str(tmp_path / "watched_module.py")  # type: ignore[attr-defined]
    assert seen == []
    import watched_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert sys.meta_path == before
    assert type(watched_module.__loader__).__name__ == "SourceFileLoader"
    assert watched_module.__spec__.loader is watched_module.__loader__
    when_imported("watched_module", lambda: seen.append(2))
    assert seen == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_an_action_follows_the_end_of_an_import_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    (tmp_path / "half_imported.py").write_text(
        "import inside_of_it\ninside_of_it.may_fail()\nvalue = 3\n"
    )
    (tmp_path / "inside_of_it.py").write_text("def may_fail(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("half_imported", "inside_of_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    inside = importlib.import_module("inside_of_it")
    seen: list[Any] = []

    def ask() -> None:
        for _ in range(2):
            when_imported("half_imported", lambda: seen.append(sys.modules["half_imported"].value))
        assert not seen
        assert not fails

    monkeypatch.setattr(inside, "may_fail", ask)
    if fails:
        with pytest.raises(AssertionError):
            importlib.import_module("half_imported")
        assert not seen
        monkeypatch.setattr(inside, "may_fail", lambda: None)
    half = importlib.import_module("half_imported")
    assert seen == [3, 3]
    assert type(half.__spec__) is ModuleSpec
    when_imported("half_imported", lambda: seen.append(4))
    assert seen[2:] == [4]


def test_a_module_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    when_imported("no_such_module_at_all", lambda: pytest.fail("not imported"))
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert importlib.util.find_spec("no_such_module_at_all") is None
    sys.meta_path[:] = before

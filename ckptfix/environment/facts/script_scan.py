"""Uses of accelerate and torch in a script, found in its syntax tree.

Names are followed through imports and plain assignments only. What a function does that is called
from elsewhere, or what a name holds after a branch, is not known: the checks say so.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec import field as struct_field

from ckptfix.environment.facts.script_prepares import PrepareScan
from ckptfix.environment.facts.script_uses import (
    Prepared,
    SourceLine,
    Uses,
    asks_first,
    catches,
    constant,
    device_of,
    is_model,
    is_module_class,
    is_optimizer,
    may_be_model,
    suppresses,
    texts,
    variable,
)

Locate: TypeAlias = Callable[[int], SourceLine]

_LAUNCHERS = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")
_ACCELERATORS = frozenset(
    f"{module}.{name}"
    for module in ("accelerate", "accelerate.accelerator", "accelerate.state", "ckptfix")
    for name in ("Accelerator", "AcceleratorState")
)
_STATES = ("accelerate.PartialState", "accelerate.state.PartialState")
_QUERIES = frozenset((
    "is_available", "device_count", "is_initialized", "amp", "Event", "nvtx", "manual_seed",
    "manual_seed_all", "seed", "seed_all", "empty_cache", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "get_arch_list",
))  # fmt: skip
"""Names of ``torch.cuda`` that a script may use without claiming a device for the process.

They wait until CUDA is started, or do without (``torch/cuda/__init__.py``, ``memory.py`` and
``random.py`` of 2.13).
"""

_SEVERAL = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words for maps that may name several devices; transformers makes any other word a map with one
entry.
"""

_BUILDERS = (
    "torch.compile",
    "torch.utils.cpp_extension.load",
    "torch.utils.cpp_extension.load_inline",
)
_OTHER_PARSERS = (
    "HfArgumentParser",
    "absl",
    "fire",
    "tyro",
    "typer",
    "jsonargparse",
    "hydra",
    "simple_parsing",
)

_SCHEDULER = re.compile(
    r"torch\.optim\.lr_scheduler\.\w+|(.*\.)?get_(\w+_)?(scheduler|schedule\w*)"
)
_LOADS = ("load_state", "load_state_tolerant", "load_checkpoint_tolerant")
_READS = re.compile(r"load|load_(?!dataset).*")
_OPTION = re.compile(r"(?!.*(?:wandb|mlflow|comet|[-_]id\b)).*resume.*")
"""Options that resume a training, not the record of a tracker."""


class ResumeScan(Struct):
    """Reader of the saves and loads in one or several trees, and of the schedulers that no
    checkpoint has. ``resolve`` and ``is_accelerator`` are those of ``PrepareScan``.

    A scheduler counts as not prepared only while its variable is used for nothing but its own
    methods: one that is handed to a function may be prepared there. An attribute is not judged
    where ``setattr`` may replace it by its prepared self.
    """

    resolve: Callable[[ast.expr], str]
    is_accelerator: Callable[[ast.expr], bool]
    _places: dict[str, list[SourceLine]] = struct_field(default_factory=dict)
    _made: dict[str, SourceLine] = struct_field(
        default_factory=dict
    )  # scheduler -> where it is made
    _stepped: set[str] = struct_field(default_factory=set)
    _elsewhere: set[str] = struct_field(default_factory=set)  # variables that are handed on
    _words: set[str] = struct_field(default_factory=set)

    def read(self, tree: ast.Module, locate: Callable[[int], SourceLine]) -> None:
        """Add what this tree does."""
        for node, parent in _walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                if _SCHEDULER.fullmatch(self.resolve(node.value.func)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    self._made |= {ast.unparse(one): locate(node.lineno) for one in targets}
            elif isinstance(node, ast.Call):
                self._note_call(node, locate(node.lineno))
            elif isinstance(node, ast.Name | ast.Attribute):
                self._note_name(node, parent)

    def found(self) -> dict[str, Any]:
        """Return what was read so far, by the fields of ``Uses``."""
        is_dynamic = "setattr" in self._words
        schedulers = tuple(
            place
            for name, place in self._made.items()
            if name in self._stepped
            and name not in self._elsewhere
            and not (is_dynamic and "." in name)
        )
        return {
            **{name: tuple(places) for name, places in self._places.items()},
            "schedulers": schedulers,
            "loads_otherwise": any(_READS.fullmatch(word) for word in self._words),
        }

    def _note_call(self, node: ast.Call, place: SourceLine) -> None:
        name = self.resolve(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        self._words.add("" if name in _LOADS else name)
        if name == "save_state" and owner is not None and self.is_accelerator(owner):
            self._add("saves", place)
        elif name in _LOADS:
            self._add("loads", place)
        elif name == "step" and owner is not None:
            self._stepped.add(ast.unparse(owner))
        elif name in ("add_argument", "option") and any(map(_OPTION.fullmatch, texts(node.args))):
            self._add("resume_options", place)

    def _note_name(self, node: ast.Name | ast.Attribute, parent: ast.AST) -> None:
        """Note a variable that is handed on, to ``prepare`` or to anything else."""
        if isinstance(node, ast.Attribute):
            self._words.add(node.attr)
        is_own_method = isinstance(parent, ast.Attribute) and parent.attr not in (
            "state_dict",
            "load_state_dict",
        )
        if isinstance(node.ctx, ast.Load) and not is_own_method:
            self._elsewhere.add(ast.unparse(node))

    def _add(self, kind: str, place: SourceLine) -> None:
        self._places.setdefault(kind, []).append(place)


def _walk(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield every node below, in the order of the text, with the one that it is part of."""
    for child in ast.iter_child_nodes(node):
        yield child, node
        yield from _walk(child)


@dataclass
class Scan(ast.NodeVisitor):
    """Collects ``Uses`` over one or several trees (the cells of a notebook) in their order."""

    found: dict[str, list[SourceLine]] = field(default_factory=dict)
    taken: list[tuple[str, SourceLine]] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    options: set[str] = field(default_factory=set)
    follows_options: bool = True
    _imports: dict[str, str] = field(default_factory=dict)
    _made: dict[str, str] = field(default_factory=dict)  # variable -> what was called to make it
    _modules: set[str] = field(default_factory=set)  # the script's own classes of modules
    _depth: int = 0
    _optional: int = 0  # inside of so many blocks that know what to do without a name
    _roots: set[str] = field(
        default_factory=set
    )  # what "import" alone brought: modules, and nothing that looks like one
    # Variables that hold a CUDA device, or its name.
    _devices: set[str] = field(default_factory=set)
    _single_maps: set[str] = field(default_factory=set)  # variables that hold a map with one entry
    _locate: Locate = field(default=lambda line: SourceLine(order=(0, line), where="", text=""))
    _prepares: PrepareScan = field(init=False)
    _resumes: ResumeScan = field(init=False)

    def __post_init__(self) -> None:
        """Have the readers of models and of resumes know the names that are found here."""
        self._prepares = PrepareScan(
            resolve=self._name, is_accelerator=self._is_accelerator, is_model=self._may_be_model
        )
        self._resumes = ResumeScan(resolve=self._name, is_accelerator=self._is_accelerator)

    def read(self, tree: ast.Module, locate: Locate) -> None:
        """Add what this tree uses; ``locate`` gives the place of a line."""
        self._locate = locate
        self.visit(tree)
        self._prepares.read(tree, locate)
        self._resumes.read(tree, locate)

    def uses(self) -> Uses:
        """Return what was found so far."""
        places: dict[str, Any] = {name: tuple(at) for name, at in self.found.items()}
        return Uses(
            taken=tuple(self.taken),
            prepared=tuple(self.prepared),
            options=frozenset(self.options) if self.follows_options else None,
            twice=tuple(self._prepares.twice),
            wrapped=tuple(self._prepares.wrapped),
            is_guarded=any(maker.startswith("ckptfix.") for maker in self._made.values()),
            **places,
            **self._resumes.found(),
        )

    def visit_Import(self, node: ast.Import) -> None:
        """Remember under which name a module is known."""
        for alias in node.names:
            self._imports[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self._roots.add(alias.asname or alias.name.split(".")[0])
            self._imported(alias.name, node)
            self._take(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remember the meaning of a name, and what is taken from accelerate itself."""
        if node.level or node.module is None:
            return
        self._take(node.module, node)
        for alias in node.names:
            self._imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._imported(f"{node.module}.{alias.name}", node)
            self._roots.discard(alias.asname or alias.name)
            if alias.name != "*":
                self._take(f"{node.module}.{alias.name}", node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note ``accelerate.Name`` and ``accelerate.utils.Name``."""
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in self._roots and isinstance(node.ctx, ast.Load):
            self._take(self._name(node), node)
            return  # of a longer name the shorter ones are a part
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Know what is tried only."""
        is_optional = any(catches(handler) for handler in node.handlers)
        self._optional += is_optional
        for part in (*node.body, *node.handlers):
            self.visit(part)
        self._optional -= is_optional
        for part in (*node.orelse, *node.finalbody):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        """Know what ``suppress(ImportError)`` covers."""
        is_optional = any(suppresses(item.context_expr) for item in node.items)
        self._optional += is_optional
        self.generic_visit(node)
        self._optional -= is_optional

    def visit_If(self, node: ast.If) -> None:
        """Know what depends on a version, or on what is installed."""
        is_optional = asks_first(node.test)
        self._optional += is_optional
        self.generic_visit(node)
        self._optional -= is_optional

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Go inside: what is there runs when the function is called."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Note the script's own modules; a class's body runs at its definition."""
        for base in node.bases:
            name = self._name(base)
            if is_module_class(name, self._modules):
                self._modules.add(node.name)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note what made a variable, after what it is made of: ``model =
        accelerator.prepare(model)``.
        """
        self.generic_visit(node)
        for target in node.targets:
            name = ast.unparse(target)
            if isinstance(node.value, ast.Call):
                self._made[name] = self._name(node.value.func)
            for kept, holds in (
                (self._devices, not self._depth and self._is_cuda(node.value)),
                (self._single_maps, self._is_single_map(node.value)),
            ):
                (kept.add if holds else kept.discard)(name)

    def visit_Call(self, node: ast.Call) -> None:
        """Note the calls that matter."""
        name = self._name(node.func)
        words = {word.arg: word.value for word in node.keywords if word.arg}
        place = self._locate(node.lineno)
        if name in _ACCELERATORS:
            self._add("accelerators", place)
            if not self._depth:
                self._add("made_early", place)
        elif name in _LAUNCHERS:
            processes = words.get("num_processes", node.args[2] if len(node.args) > 2 else None)
            if constant(processes, default=2) != 1:
                self._add("launches", place)
        elif not self._depth and (name in _STATES or self._claims_device(name, words)):
            self._add("touched_early", place)
        if name in _BUILDERS:
            self._add("builds", place)
        if "device_map" in words and not self._is_single_map(words["device_map"]):
            self._add("device_maps", place)
        if isinstance(node.func, ast.Attribute):
            self._note_method(node.func, node, words, place)
        self.generic_visit(node)

    def _note_method(
        self,
        function: ast.Attribute,
        node: ast.Call,
        words: dict[str, ast.expr],
        place: SourceLine,
    ) -> None:
        method = function.attr
        if (
            method == "backward"
            and not node.args
            and words.keys() <= {"retain_graph", "create_graph", "inputs"}
        ):
            self._add("backwards", place)
        elif method == "prepare":
            names = [
                ast.unparse(item)
                for item in node.args
                if isinstance(item, ast.Name | ast.Attribute)
            ]
            makers = {name: self._made.get(name, "") for name in names}
            self.prepared.append(
                Prepared(
                    place=place,
                    accelerator=ast.unparse(function.value),
                    models=tuple(n for n in names if is_model(n, makers[n], self._modules)),
                    optimizers=tuple(n for n in names if is_optimizer(n, makers[n])),
                )
            )
        elif method == "select_deepspeed_plugin":
            self._add("plugin_choices", place)
        elif method in ("add_argument", "option"):
            self.options |= {
                name.lstrip("-").replace("-", "_")
                for name in texts(node.args)
                if name.startswith("-")
            }
        elif not self._depth and self._moves(function, [*node.args, *device_of(words)]):
            self._add("touched_early", place)

    def _moves(self, function: ast.Attribute, arguments: list[ast.expr]) -> bool:
        """Return whether a method puts a tensor or a module on a device."""
        if function.attr == "to":
            return any(self._is_cuda(argument) for argument in arguments)
        return function.attr == "cuda" and self._name(function) != "torch.cuda"

    def _claims_device(self, name: str, words: dict[str, ast.expr]) -> bool:
        if name.startswith("torch.cuda."):
            return name.split(".")[2] not in _QUERIES
        return name != "torch.device" and "device" in words and self._is_cuda(words["device"])

    def _is_cuda(self, node: ast.expr) -> bool:
        """Return whether an expression is a CUDA device or its name, in one of its branches."""
        if isinstance(node, ast.IfExp):
            return self._is_cuda(node.body) or self._is_cuda(node.orelse)
        if isinstance(node, ast.Call) and self._name(node.func) == "torch.device":
            return any(
                self._is_cuda(argument)
                for argument in (*node.args[:1], *(word.value for word in node.keywords))
            )
        if isinstance(node, ast.JoinedStr):
            return bool(node.values) and self._is_cuda(node.values[0])
        text = constant(node)
        return (isinstance(text, str) and text.startswith("cuda")) or variable(
            node
        ) in self._devices

    def _is_single_map(self, node: ast.expr) -> bool:
        """Return whether a device map has one entry at most: ``Accelerator.prepare`` then takes it
        for training.
        """
        if isinstance(node, ast.Dict):
            return len(node.keys) == 1 and node.keys[0] is not None
        if isinstance(node, ast.Constant):
            return node.value not in _SEVERAL
        if isinstance(node, ast.Call):
            return self._name(node.func) == "torch.device"
        return variable(node) in self._single_maps or (
            isinstance(node, ast.Attribute) and node.attr == "device"
        )

    def _take(self, name: str, node: ast.stmt | ast.expr) -> None:
        """Note a name below accelerate, where the script needs it."""
        if name.startswith("accelerate.") and not self._optional:
            self.taken.append((name.removeprefix("accelerate."), self._locate(node.lineno)))

    def _is_accelerator(self, node: ast.expr) -> bool:
        """Return whether an expression is an Accelerator by what made it, or else by its name."""
        text = ast.unparse(node)
        maker = self._made.get(text, "")
        if maker:
            return maker in _ACCELERATORS or maker.rpartition(".")[2].endswith("Accelerator")
        return text not in self._imports and "accel" in text.rpartition(".")[2].lower()

    def _may_be_model(self, variable: str) -> bool:
        return may_be_model(variable, self._made.get(variable, ""), self._modules)

    def _imported(self, name: str, node: ast.stmt) -> None:
        if name.split(".")[0] == "deepspeed" or name.endswith(".DeepSpeedPlugin"):
            self._add("deepspeed", self._locate(node.lineno))
        if any(parser in name.split(".") for parser in _OTHER_PARSERS):
            self.follows_options = False

    def _name(self, node: ast.expr) -> str:
        """Return the full name of a name or an attribute, "" for anything else."""
        if isinstance(node, ast.Name):
            return self._imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def _add(self, kind: str, place: SourceLine) -> None:
        self.found.setdefault(kind, []).append(place)

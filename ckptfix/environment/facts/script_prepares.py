"""Models that a script passes to ``prepare()`` twice, or wraps before: its statements followed in
their order.

A variable holds a model, an optimizer or neither, by what made it and by its name. Two calls count
where one is on every way to the other: calls in two branches, or under two conditions that may
exclude each other, do not. Names are followed through assignments, attributes and wrappers, from
``__init__`` into the other methods of a class, but not into functions that are called.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

_MODEL_NAME = re.compile(
    r"(^|_)(model|net|network|teacher|student|generator|discriminator|actor|critic|unet|vae|policy)(_|\d|$)",
    re.I,
)
_OPTIMIZER_NAME = re.compile(r"(^|_)opt(im(izer)?)?(_|\d|$)", re.I)
_NO_MODEL_NAME = re.compile(
    r"(loader|data|dl|sched|sampler|warmup|batch|tokenizer|processor|iter|lr)", re.I
)
_MODEL_CLASS = re.compile(r"(Model|Net|Network|Module|ForCausalLM|For[A-Z]\w+|LMHeadModel)$")


def is_module_class(name: str, modules: Collection[str]) -> bool:
    """Return whether a class is one of modules. ``modules``: those of the script's own classes that
    are.
    """
    return name in modules or name.startswith("torch.nn.") or bool(_MODEL_CLASS.search(name))


def is_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Return whether a variable holds a model. ``maker``: the full name of the called maker, "" for
    unknown.
    """
    owner, _, last = maker.rpartition(".")
    if is_optimizer(variable, maker) or maker.startswith(("torch.optim.", "torch.utils.data.")):
        return False
    if maker in modules or maker.startswith("torch.nn.") or _MODEL_CLASS.search(last):
        return True
    if last in ("from_pretrained", "from_config"):
        return bool(_MODEL_CLASS.search(owner) or re.search(r"AutoModel", owner))
    return bool(_MODEL_NAME.search(variable.rpartition(".")[2]))


def may_be_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Return whether a variable can hold a model: it does, or nothing says that it holds anything
    else.
    """
    if is_model(variable, maker, modules):
        return True
    is_other = is_optimizer(variable, maker) or maker.startswith(
        ("torch.optim.", "torch.utils.data.")
    )
    return not is_other and not _NO_MODEL_NAME.search(variable.rpartition(".")[2])


def is_optimizer(variable: str, maker: str) -> bool:
    """Return whether a variable holds an optimizer."""
    if maker.startswith("torch.optim.lr_scheduler."):
        return False
    return maker.startswith("torch.optim.") or bool(
        _OPTIMIZER_NAME.search(variable.rpartition(".")[2])
    )


_MISSING = frozenset(
    {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
)
"""Whoever catches one of these, or asks one of the following, knows that a name may not be there.
"""

_ASKS = ("version", "TYPE_CHECKING", "hasattr", "available", "find_spec")


def catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches what a missing name raises."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(error is None or _last_name(error) in _MISSING for error in caught)


def suppresses(context: ast.expr) -> bool:
    """Return whether a ``with`` is one of ``contextlib.suppress`` for what a missing name
    raises.
    """
    if not isinstance(context, ast.Call) or _last_name(context.func) != "suppress":
        return False
    return any(_last_name(error) in _MISSING for error in context.args)


def asks_first(test: ast.expr) -> bool:
    """Return whether an ``if`` asks for a version, or for what is there."""
    return any(word in ast.unparse(test) for word in _ASKS)


def constant(node: ast.expr | None, default: object = None) -> object:
    """Return the value that an expression spells out, ``default`` for any other."""
    return node.value if isinstance(node, ast.Constant) else default


def texts(nodes: Iterable[ast.expr]) -> list[str]:
    """Return the texts among expressions."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def device_of(words: dict[str, ast.expr]) -> list[ast.expr]:
    """Return the argument ``device`` of a call, if it is given by name."""
    return [words["device"]] if "device" in words else []


def variable(node: ast.expr) -> str:
    """Return a variable or an attribute as it is written, "" for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _last_name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


class SourceLine(Struct, frozen=True, kw_only=True):
    """A line of a script. ``order``: sorts places. ``where``: in words. ``text``: the line."""

    order: tuple[int, int]
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class Prepared(Struct, frozen=True, kw_only=True):
    """A call of ``prepare``: the name of the accelerator, and the names of models and optimizers in
    its arguments.
    """

    place: SourceLine
    accelerator: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]


class PreparedTwice(Struct, frozen=True, kw_only=True):
    """A model that is passed to ``prepare`` twice: the name in the second call, and both calls."""

    name: str
    first: SourceLine
    second: SourceLine


class WrappedEarly(Struct, frozen=True, kw_only=True):
    """A model that is wrapped in DDP or DataParallel, and then passed to ``prepare``."""

    name: str
    wrapped: SourceLine
    prepared: SourceLine


class Uses(Struct, frozen=True, kw_only=True):
    """Names and calls that a script uses, each with its places.

    ``taken``: names taken from accelerate. ``made_early`` and ``touched_early``: accelerators and
    devices at module level. ``launches``: ``notebook_launcher`` with more than one process.
    ``backwards``: ``loss.backward()``. ``deepspeed``: that it is used, ``plugin_choices``:
    ``select_deepspeed_plugin``. ``device_maps`` and ``skip_keys``: calls with that argument.
    ``trusting_loads``: ``torch.load(weights_only=False)``. ``builds``: what needs a compiler.
    ``options``: the script's own, without dashes, with underscores; None when it reads its command
    line in a way that is not followed. ``twice`` and ``wrapped``: models that are prepared again,
    or wrapped before. ``is_guarded``: its Accelerator is the one of ckptfix.
    """

    taken: tuple[tuple[str, SourceLine], ...] = ()
    accelerators: tuple[SourceLine, ...] = ()
    made_early: tuple[SourceLine, ...] = ()
    touched_early: tuple[SourceLine, ...] = ()
    launches: tuple[SourceLine, ...] = ()
    backwards: tuple[SourceLine, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    deepspeed: tuple[SourceLine, ...] = ()
    plugin_choices: tuple[SourceLine, ...] = ()
    device_maps: tuple[SourceLine, ...] = ()
    skip_keys: tuple[SourceLine, ...] = ()
    trusting_loads: tuple[SourceLine, ...] = ()
    builds: tuple[SourceLine, ...] = ()
    options: frozenset[str] | None = frozenset()
    twice: tuple[PreparedTwice, ...] = ()
    wrapped: tuple[WrappedEarly, ...] = ()
    is_guarded: bool = False


Path: TypeAlias = tuple[int, ...]
"""The branches around a statement, the outermost first."""

_PREPARES = ("prepare", "prepare_model")
_RESETS = ("free_memory", "clear")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DDP", "DP")
_KEEPERS = ("compile", "unwrap_model", "extract_model_from_parallel")
"""Functions that return their argument, or an object around it."""

_RETURNS_ITSELF = (
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "half",
    "float",
    "bfloat16",
    "requires_grad_",
)
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_EXITS = ("sys.exit", "exit", "quit")


class _Mark(Struct, frozen=True, kw_only=True):
    """Known facts of an object: where it was prepared, by which accelerator; or wrapped, without an
    ``owner``.
    """

    place: SourceLine
    owner: str
    path: Path


_Marks: TypeAlias = dict[str, _Mark]


class PrepareFlow(Struct):
    """Follower of the statements of one or several trees. ``resolve``: the full name of an
    expression.

    ``is_accelerator``: whether an expression is an Accelerator, as far as its text shows.
    ``is_model``: whether a variable may hold a model.
    """

    resolve: Callable[[ast.expr], str]
    is_accelerator: Callable[[ast.expr], bool]
    is_model: Callable[[str], bool]
    twice: list[PreparedTwice] = field(default_factory=list)
    wrapped: list[WrappedEarly] = field(default_factory=list)
    _locate: Callable[[int], SourceLine] = field(
        default=lambda line: SourceLine(order=(0, line), where="", text="")
    )
    _marks: _Marks = field(default_factory=dict)
    _again: Path | None = None  # the path of the loop whose body is gone through a second time

    def read(self, tree: ast.Module, locate: Callable[[int], SourceLine]) -> None:
        """Follow this tree; what a cell of a notebook prepared is known in the next."""
        self._locate = locate
        self._block(tree.body, self._marks, ())

    def _block(self, body: Sequence[ast.stmt], marks: _Marks, path: Path) -> bool:
        """Follow statements, and return whether they leave the block in any case."""
        # Nothing behind a statement that leaves is reached.
        return any(self._statement(statement, marks, path) for statement in body)

    def _statement(self, node: ast.stmt, marks: _Marks, path: Path) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._apart(node.body, {})
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, ast.If):
            self._value(node.test, marks, path)
            return self._branches([node.body, node.orelse], node, marks, path)
        elif isinstance(node, ast.Match):
            return self._branches([case.body for case in node.cases] + [[]], node, marks, path)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self._loop(node, marks, path)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._value(item.context_expr, marks, path)
            return self._block(node.body, marks, path)
        elif isinstance(node, ast.Try):
            return self._try(node, marks, path)
        else:
            return self._simple(node, marks, path)
        return False

    def _simple(self, node: ast.stmt, marks: _Marks, path: Path) -> bool:
        if isinstance(node, ast.Assign):
            results = self._results(node.value, marks, path)
            for target in node.targets:
                self._bind(target, results, marks)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, self._results(node.value, marks, path), marks)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._bind(target, [], marks)
        elif isinstance(node, ast.Expr):
            self._value(node.value, marks, path)
            return isinstance(node.value, ast.Call) and self.resolve(node.value.func) in _EXITS
        elif isinstance(node, ast.Return) and node.value is not None:
            self._value(node.value, marks, path)
        return isinstance(node, _LEAVES)

    def _apart(self, body: Sequence[ast.stmt], marks: _Marks) -> _Marks:
        """Follow a function's body on its own: when it is called is not known."""
        again, self._again = self._again, None
        self._block(body, marks, ())
        self._again = again
        return marks

    def _class(self, node: ast.ClassDef) -> None:
        """Follow the methods: what ``__init__`` prepares in any case is prepared in all others."""
        methods = [
            one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        made: _Marks = {}
        for method in methods:
            if method.name == "__init__":
                marks = self._apart(method.body, {})
                made = {
                    name: mark
                    for name, mark in marks.items()
                    if name.startswith("self.") and not mark.path
                }
        for method in methods:
            if method.name != "__init__":
                self._apart(method.body, dict(made))

    def _branches(
        self, bodies: Sequence[Sequence[ast.stmt]], node: ast.stmt, marks: _Marks, path: Path
    ) -> bool:
        """Follow each branch from the same state, and go on with what those leave that do not
        return.
        """
        before = dict(marks)
        ways = []
        for number, body in enumerate(bodies):
            own = dict(before)
            if not self._block(body, own, (*path, id(node) + number)):
                ways.append(own)
        marks.clear()
        for name in {name for way in ways for name in way}:
            found = [way[name] for way in ways if name in way]
            if name not in before or len(found) == len(ways):
                marks[name] = (
                    replace(found[0], path=path) if len(found) == len(ways) > 1 else found[0]
                )
        for name, mark in before.items():
            if name in marks and all(way.get(name) == mark for way in ways):
                marks[name] = mark
        return not ways

    def _try(self, node: ast.Try, marks: _Marks, path: Path) -> bool:
        before = dict(marks)
        left = self._block([*node.body, *node.orelse], marks, path)
        for number, handler in enumerate(node.handlers):
            own = dict(before)
            if not self._block(handler.body, own, (*path, id(node) + number)) and left:
                marks.clear()
                marks.update(own)
                left = False
        return self._block(node.finalbody, marks, path) or left

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, marks: _Marks, path: Path) -> None:
        """Go through a loop's body twice: what it prepares, and does not make anew, it prepares
        again.
        """
        inside = (*path, id(node))
        if not isinstance(node, ast.While):
            self._value(node.iter, marks, path)
        for turn in range(2):
            if not isinstance(node, ast.While):
                self._bind(node.target, [], marks)
            again, self._again = self._again, inside if turn else self._again
            left = self._block(node.body, marks, inside)
            self._again = again
            if left:
                break
        self._block(node.orelse, marks, path)

    def _results(self, node: ast.expr, marks: _Marks, path: Path) -> list[_Mark | None]:
        """Return the marks of an expression's parts, in the order in which they are unpacked."""
        if isinstance(node, ast.Tuple | ast.List):
            return [self._value(part, marks, path) for part in node.elts]
        if isinstance(node, ast.Call) and self._is_prepare(node):
            return self._prepare(node, marks, path)
        return [self._value(node, marks, path)]

    def _value(self, node: ast.expr, marks: _Marks, path: Path) -> _Mark | None:
        """Follow the calls in an expression, and return the mark of what it gives."""
        if isinstance(node, ast.Name | ast.Attribute):
            inner = (
                node.value if isinstance(node, ast.Attribute) and node.attr == "module" else None
            )
            return marks.get(ast.unparse(node)) or (
                marks.get(ast.unparse(inner)) if inner is not None else None
            )
        if isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            return None
        if not isinstance(node, ast.Call):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self._value(part, marks, path)
            return None
        if self._is_prepare(node):
            found = self._prepare(node, marks, path)
            return found[0] if len(found) == 1 else None
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        of_owner = self._value(owner, marks, path) if owner is not None else None
        given = [
            self._value(part, marks, path)
            for part in (*node.args, *(word.value for word in node.keywords))
        ]
        last = self.resolve(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        if owner is not None and last in _RESETS and self.is_accelerator(owner):
            _forget_owner(marks, ast.unparse(owner))
        elif last in _WRAPPERS and node.args:
            return given[0] or _Mark(place=self._locate(node.lineno), owner="", path=path)
        elif last in _KEEPERS and node.args:
            return given[0]
        elif last in _RETURNS_ITSELF:
            return of_owner
        return None

    def _is_prepare(self, node: ast.Call) -> bool:
        function = node.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr in _PREPARES
            and self.is_accelerator(function.value)
        )

    def _prepare(self, node: ast.Call, marks: _Marks, path: Path) -> list[_Mark | None]:
        """Note what is prepared again, and return the mark of each result."""
        assert isinstance(node.func, ast.Attribute)
        place, owner = self._locate(node.lineno), ast.unparse(node.func.value)
        mark = _Mark(place=place, owner=owner, path=path)
        found: list[_Mark | None] = []
        for part in node.args:
            is_known = isinstance(part, ast.Name | ast.Attribute)
            name = ast.unparse(part) if is_known else ""
            before = self._value(part, marks, path)
            if is_known and not self.is_model(name):
                found.append(None)
                continue
            if before is not None and not before.owner:
                early = WrappedEarly(name=name or "a model", wrapped=before.place, prepared=place)
                self.wrapped += [early] if early not in self.wrapped else []
            elif (
                before is not None and before.owner == owner and self._follows(before, place, path)
            ):
                again = PreparedTwice(name=name or "a model", first=before.place, second=place)
                self.twice += [again] if again not in self.twice else []
            if name:
                marks[name] = mark
            found.append(mark)
        return found

    def _follows(self, before: _Mark, place: SourceLine, path: Path) -> bool:
        """Return whether the earlier call is on every way to this one, or this one on every way
        from the earlier.
        """
        if before.place == place:
            return self._again is None or self._again == path
        if self._again is not None:
            return False
        shared = min(len(before.path), len(path))
        return before.path[:shared] == path[:shared]

    def _bind(self, target: ast.expr, results: Sequence[_Mark | None], marks: _Marks) -> None:
        """Note what a name holds from now on, and forget what it held before."""
        if isinstance(target, ast.Tuple | ast.List):
            fits = len(results) == len(target.elts)
            for number, part in enumerate(target.elts):
                self._bind(part, [results[number]] if fits else [], marks)
            return
        name = ast.unparse(target)
        for known in [known for known in marks if known == name or known.startswith(f"{name}.")]:
            del marks[known]
        _forget_owner(marks, name)
        mark = results[0] if len(results) == 1 else None
        if mark is not None:
            marks[name] = mark


def _forget_owner(marks: _Marks, owner: str) -> None:
    for name in [name for name, mark in marks.items() if mark.owner == owner]:
        del marks[name]

"""Models that a script passes to ``prepare()`` twice, or wraps before, in one block of statements.

A branch or a loop knows what was prepared before it; what it prepares itself counts in it alone.
What a function prepares that is called, or an earlier method, is seen when the script runs
(``ckptfix run``).
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from ckptfix.environment.facts.script_uses import PreparedTwice, SourceLine, WrappedEarly

_PREPARES = ("prepare", "prepare_model")
_RESETS = ("free_memory", "clear")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DDP", "DP")
_KEEPERS = ("compile", "unwrap_model", "extract_model_from_parallel")
"""Functions that return their argument, or an object around it."""

_RETURNS_ITSELF = (
    "to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_",
)  # fmt: skip
_APART = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)


class _Mark(NamedTuple):
    """Place where a model was prepared, with its accelerator; or wrapped, without an ``owner``."""

    place: SourceLine
    owner: str


_Marks: TypeAlias = dict[str, _Mark]


class PrepareScan(Struct):
    """Reader of the statements of one or several trees. ``resolve``: the full name of an
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

    def read(self, tree: ast.Module, locate: Callable[[int], SourceLine]) -> None:
        """Follow this tree; what a cell of a notebook prepared is known in the next."""
        self._locate = locate
        self._block(tree.body, self._marks)

    def _block(self, body: Sequence[ast.stmt], marks: _Marks) -> None:
        for node in body:
            if isinstance(node, _APART):
                self._block(node.body, {})  # when it is called is not known
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._block(node.body, marks)
            elif isinstance(node, _BRANCHES):
                for inner in _bodies(node):
                    own = dict(marks)
                    if isinstance(node, ast.For | ast.AsyncFor):
                        _bind(node.target, [], own)
                    self._block(inner, own)
                self._forget_changed(node, marks)
            else:
                value = getattr(node, "value", None)
                results = self._results(value, marks) if isinstance(value, ast.expr) else []
                for target in getattr(node, "targets", [getattr(node, "target", None)]):
                    if target is not None:
                        _bind(target, results, marks)

    def _forget_changed(self, node: ast.stmt, marks: _Marks) -> None:
        """Forget the names that some branch binds, and what a branch frees."""
        for inner in ast.walk(node):
            if isinstance(getattr(inner, "ctx", None), ast.Store | ast.Del):
                _forget(ast.unparse(inner), marks)
            elif isinstance(inner, ast.Call) and self._is_called(inner, _RESETS):
                _forget(ast.unparse(inner.func.value), marks)  # type: ignore[attr-defined]

    def _results(self, node: ast.expr, marks: _Marks) -> list[_Mark | None]:
        """Return the mark of each value of an expression, and note what it prepares."""
        if isinstance(node, ast.Tuple | ast.List):
            return [self._value(part, marks) for part in node.elts]
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            return [marks.get(text) or marks.get(text.removesuffix(".module"))]
        if not isinstance(node, ast.Call):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._value(child, marks)
            return [None]
        if self._is_called(node, _PREPARES):
            return self._prepare(node, marks)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        of_owner = self._value(owner, marks) if owner is not None else None
        words = (word.value for word in node.keywords)
        given = [self._value(part, marks) for part in (*node.args, *words)]
        last = self.resolve(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        if owner is not None and self._is_called(node, _RESETS):
            _forget(ast.unparse(owner), marks)
        elif last in _WRAPPERS and node.args:
            return [given[0] or _Mark(self._locate(node.lineno), "")]
        elif last in _KEEPERS and node.args:
            return [given[0]]
        elif last in _RETURNS_ITSELF:
            return [of_owner]
        return [None]

    def _value(self, node: ast.expr, marks: _Marks) -> _Mark | None:
        results = self._results(node, marks)
        return results[0] if len(results) == 1 else None

    def _is_called(self, node: ast.Call, methods: Sequence[str]) -> bool:
        """Return whether one of these methods of an Accelerator is called."""
        function = node.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr in methods
            and self.is_accelerator(function.value)
        )

    def _prepare(self, node: ast.Call, marks: _Marks) -> list[_Mark | None]:
        """Note what is prepared again, and return the mark of each result."""
        assert isinstance(node.func, ast.Attribute)
        mark = _Mark(self._locate(node.lineno), ast.unparse(node.func.value))
        found: list[_Mark | None] = []
        for part in node.args:
            name = ast.unparse(part) if isinstance(part, ast.Name | ast.Attribute) else ""
            before = self._value(part, marks)
            if name and not self.is_model(name):
                found.append(None)
                continue
            if before is not None and not before.owner:
                self.wrapped.append(
                    WrappedEarly(name=name or "a model", wrapped=before.place, prepared=mark.place)
                )
            elif before is not None and before.owner == mark.owner:
                self.twice.append(
                    PreparedTwice(name=name or "a model", first=before.place, second=mark.place)
                )
            if name:
                marks[name] = mark
            found.append(mark)
        return found


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement that has branches."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.ExceptHandler | ast.match_case):
            yield part.body
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])


def _bind(target: ast.expr, results: Sequence[_Mark | None], marks: _Marks) -> None:
    """Note what a name holds from now on, and forget what it held before."""
    if isinstance(target, ast.Tuple | ast.List):
        fits = len(results) == len(target.elts)
        for number, part in enumerate(target.elts):
            _bind(part, [results[number]] if fits else [], marks)
        return
    name = ast.unparse(target)
    _forget(name, marks)
    mark = results[0] if len(results) == 1 else None
    if mark is not None:
        marks[name] = mark


def _forget(name: str, marks: _Marks) -> None:
    """Forget what a name held, and what it prepared where it is an accelerator."""
    for known, mark in list(marks.items()):
        if known == name or known.startswith(f"{name}.") or mark.owner == name:
            del marks[known]

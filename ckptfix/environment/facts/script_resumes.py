"""The way a script saves and resumes, as far as its text shows.

A batch loop is an innermost ``for`` with a ``backward`` in it. A scheduler or loader counts as not
prepared only while its variable is used for nothing but its own methods, and loops: one that is
handed to a function may be prepared there. An attribute is not judged where ``setattr`` may replace
it by its prepared self.
"""

import ast
import re
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from ckptfix.environment.facts.script_prepares import SourceLine, constant, texts

_SCHEDULER = re.compile(
    r"torch\.optim\.lr_scheduler\.\w+|(.*\.)?get_(\w+_)?(scheduler|schedule\w*)"
)
_LOADER = "torch.utils.data.DataLoader"
_LOADS = ("load_state", "load_state_tolerant", "load_checkpoint_tolerant")
_READS = re.compile(r"load|load_(?!dataset).*")
_SKIPS = frozenset(
    [
        "skip",
        "skip_first_batches",
        "resume_dataloader",
        "use_stateful_dataloader",
        "StatefulDataLoader",
        "islice",
    ]
)
"""Calls and options with which a script passes over used batches: ``skip`` is that of a streamed
dataset.
"""

_OPTION = re.compile(r"(?!.*(?:wandb|mlflow|comet|[-_]id\b)).*resume.*")
"""Options that resume a training, not the record of a tracker."""

_AROUND = frozenset({"enumerate", "tqdm", "trange", "len", "iter", "zip", "range", "track"})
"""Functions to which a loader may be handed without being prepared there."""

_ACCUMULATION = ("sync_gradients", "accum")
"""Whoever asks for one of these before a save, saves between two accumulation cycles."""


class Resuming(Struct, frozen=True, kw_only=True):
    """Saves and loads of a script, each with its places.

    ``in_epoch``: saves inside a batch loop. ``in_cycle``: those that may cut an accumulation cycle.
    ``loads``: of a whole state. ``schedulers`` and ``loaders``: those that are made and used, and
    never prepared. ``skips``: batches of a cut epoch are passed over in some way.
    ``loads_otherwise``: it reads a checkpoint in another way. ``order``: where it asks for an order
    of the data by epoch (``use_seedable_sampler``, a dataset's own ``set_epoch``). ``sets_epoch``:
    it tells the epoch to some object. ``options``: its own that are about resuming. ``by_main``:
    saves of the main process alone. ``together``: Accelerators of ckptfix that save with all
    processes, none where one of them is made to save alone.
    """

    saves: tuple[SourceLine, ...] = ()
    in_epoch: tuple[SourceLine, ...] = ()
    in_cycle: tuple[SourceLine, ...] = ()
    loads: tuple[SourceLine, ...] = ()
    schedulers: tuple[SourceLine, ...] = ()
    loaders: tuple[SourceLine, ...] = ()
    skips: bool = False
    loads_otherwise: bool = False
    order: tuple[SourceLine, ...] = ()
    sets_epoch: bool = False
    options: tuple[SourceLine, ...] = ()
    by_main: tuple[SourceLine, ...] = ()
    together: tuple[SourceLine, ...] = ()


class ResumeScan(Struct):
    """Reader of one or several trees. ``resolve`` and ``is_accelerator`` are those of
    ``PrepareFlow``.
    """

    resolve: Callable[[ast.expr], str]
    is_accelerator: Callable[[ast.expr], bool]
    _places: dict[str, list[SourceLine]] = field(default_factory=dict)
    # Variable -> its kind, where made.
    _made: dict[str, tuple[str, SourceLine]] = field(default_factory=dict)
    _iterated: set[str] = field(default_factory=set)  # in a batch loop
    _stepped: set[str] = field(default_factory=set)
    _elsewhere: set[str] = field(default_factory=set)  # variables that are handed on
    _words: set[str] = field(default_factory=set)
    _accumulates: bool = False
    _continues: bool = False
    _saves_alone: bool = False

    def read(self, tree: ast.Module, locate: Callable[[int], SourceLine]) -> None:
        """Add what this tree does."""
        for node, parents in _walk(tree, ()):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                self._note_made(node, node.value, locate)
            elif isinstance(node, ast.Call):
                self._note_call(node, parents, locate)
            elif isinstance(node, ast.Name | ast.Attribute):
                self._note_name(node, parents)
            elif isinstance(node, ast.Continue) and any(map(_is_batch_loop, parents)):
                self._continues = True
            elif isinstance(node, ast.For) and _is_batch_loop(node):
                self._iterated |= {
                    ast.unparse(one) for one in ast.walk(node.iter) if isinstance(one, ast.expr)
                }
            elif isinstance(node, ast.ClassDef) and any(
                isinstance(one, ast.FunctionDef) and one.name == "set_epoch" for one in node.body
            ):
                self._add("order", locate(node.lineno))

    def result(self) -> Resuming:
        """Return what was read so far."""
        is_dynamic = "setattr" in self._words
        unprepared = {
            kind: tuple(
                place
                for name, (made, place) in self._made.items()
                if made == kind
                and name in used
                and name not in self._elsewhere
                and not (is_dynamic and "." in name)
            )
            for kind, used in (("schedulers", self._stepped), ("loaders", self._iterated))
        }
        places = {name: tuple(found) for name, found in self._places.items()}
        if not self._accumulates:
            places.pop("in_cycle", None)
        if self._saves_alone:
            places.pop("together", None)
        return Resuming(
            **places,
            **unprepared,
            skips=self._continues or not self._words.isdisjoint(_SKIPS),
            loads_otherwise=any(_READS.fullmatch(word) for word in self._words),
            sets_epoch="set_epoch" in self._words,
        )

    def _note_made(
        self,
        node: ast.Assign | ast.AnnAssign,
        value: ast.Call,
        locate: Callable[[int], SourceLine],
    ) -> None:
        maker = self.resolve(value.func)
        kind = (
            "schedulers" if _SCHEDULER.fullmatch(maker) else "loaders" if maker == _LOADER else ""
        )
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if kind and isinstance(target, ast.Name | ast.Attribute):
                self._made[ast.unparse(target)] = (kind, locate(node.lineno))

    def _note_call(
        self, node: ast.Call, parents: tuple[ast.AST, ...], locate: Callable[[int], SourceLine]
    ) -> None:
        name = self.resolve(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        place = locate(node.lineno)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        self._words.add("" if name in _LOADS else name)
        for word in node.keywords:
            if word.arg == "gradient_accumulation_steps" and constant(word.value) != 1:
                self._accumulates = True
            elif word.arg == "use_seedable_sampler" and constant(word.value) is True:
                self._add("order", place)
            elif word.arg == "use_stateful_dataloader" and constant(word.value) is not False:
                self._words.add(word.arg)
        if self.resolve(node.func) == "ckptfix.Accelerator":
            self._add("together", place)
            # Any other value, and **settings, may be False.
            self._saves_alone |= any(
                word.arg is None
                or (word.arg == "save_together" and constant(word.value) is not True)
                for word in node.keywords
            )
        if name == "save_state" and owner is not None and self.is_accelerator(owner):
            self._add("saves", place)
            if _is_of_main_process(node, parents):
                self._add("by_main", place)
            loop = next((at for at, one in enumerate(parents) if _is_batch_loop(one)), None)
            if loop is not None:
                self._add("in_epoch", place)
                asked = " ".join(
                    ast.unparse(one.test) for one in parents[loop:] if isinstance(one, ast.If)
                )
                if not any(word in asked for word in _ACCUMULATION):
                    self._add("in_cycle", place)
        elif name in _LOADS:
            self._add("loads", place)
        elif name == "step" and owner is not None:
            self._stepped.add(ast.unparse(owner))
        elif name in ("add_argument", "option") and any(map(_OPTION.fullmatch, texts(node.args))):
            self._add("options", place)

    def _note_name(self, node: ast.Name | ast.Attribute, parents: tuple[ast.AST, ...]) -> None:
        """Note a variable that is handed on, to ``prepare`` or to anything else."""
        parent = parents[-1]
        if isinstance(node, ast.Attribute):
            self._words.add(node.attr)
        if isinstance(node.ctx, ast.Store):
            return
        if isinstance(parent, ast.Attribute):
            if parent.attr in ("state_dict", "load_state_dict"):
                self._elsewhere.add(ast.unparse(node))
            return
        if isinstance(parent, ast.For) and parent.iter is node:
            return
        if isinstance(parent, ast.Call) and self.resolve(parent.func).rpartition(".")[2] in _AROUND:
            return
        self._elsewhere.add(ast.unparse(node))

    def _add(self, kind: str, place: SourceLine) -> None:
        self._places.setdefault(kind, []).append(place)


def _walk(
    node: ast.AST, parents: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield every node below, in the order of the text, with those around it, the outermost
    first.
    """
    around = (*parents, node)
    for child in ast.iter_child_nodes(node):
        yield child, around
        yield from _walk(child, around)


_COUNTS = ("num_processes", "distributed_type", "world_size")
"""Words of a condition that may hold for one process alone."""


def _is_of_main_process(node: ast.AST, parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a call is below ``if accelerator.is_main_process``, also with ``and``."""
    for parent, child in zip(parents, (*parents[1:], node), strict=True):
        if isinstance(parent, ast.If) and child in parent.body:
            test = parent.test
            is_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
            parts = test.values if is_all else [test]  # type: ignore[attr-defined]
            names = {getattr(part, "attr", "") for part in parts}
            is_of_one = any(word in ast.unparse(test) for word in _COUNTS)
            if "is_main_process" in names and not is_of_one:
                return True
    return False


def _is_batch_loop(node: ast.AST) -> bool:
    if not isinstance(node, ast.For | ast.AsyncFor):
        return False
    return _has_backward(node) and not any(
        isinstance(one, ast.For | ast.AsyncFor) and _has_backward(one)
        for one in ast.walk(node)
        if one is not node
    )


def _has_backward(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "backward"
        for one in ast.walk(node)
    )

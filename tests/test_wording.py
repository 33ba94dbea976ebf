import ast
import re
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from ckptfix.wording import Brief, collapse_layers, human_size, list_names, series, unchecked_lines
from tests import house


def teardown_module() -> None:
    """Let go of a million nodes, which every later ``gc.collect()`` would walk through."""
    house.nodes.cache_clear()


def test_collapse_layers() -> None:
    names = [f"layers.{index}.w" for index in range(32)] + ["head", "layers.40.w"]
    assert collapse_layers(names) == ["layers.{0...31,40}.w", "head"]


def test_human_size() -> None:
    assert [human_size(size) for size in (0, 1023, 1536, 10 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 TiB",
    ]


def test_list_names_collapses_before_it_counts() -> None:
    names = [f"layers.{i}.{part}" for part in ("a", "b", "c", "d") for i in range(9)]
    assert (
        list_names(names) == "'layers.{0...8}.a', 'layers.{0...8}.b', 'layers.{0...8}.c' and 1 more"
    )
    assert list_names(["head"]) == "'head'"


class Held(Brief, Struct, frozen=True):
    label: str
    names: tuple[str, ...]
    data: bytes


def test_a_whole_checkpoint_is_never_shown() -> None:
    held = Held("model", tuple(f"layers.{index}" for index in range(100_000)), bytes(1 << 20))
    assert repr(held).startswith("Held(label='model', names=('layers.0', 'layers.1', ")
    assert len(repr(held)) < 300


def test_of_large_bytes_the_beginning_alone_is_shown() -> None:
    held = Held("model", (), bytes(20 << 20))
    tracemalloc.start()
    shown = repr(held)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert shown.startswith(r"Held(label='model', names=(), data=b'\x00\x00")
    assert shown.endswith("...)")


_RETIRED = {
    r"the same bytes stay": "delete X (size; duplicate of Y)",
    r"\b(nothing found that will bite)\b": "no problems found",
    r"\b(took|taken|takes?) (\w+ )?back\b": "undo",
    r"(?<!there )\bis no (?!longer\b)[a-z]": "is not a",
    r"(?<!there )\bare no (?!longer\b)[a-z]": "are not",
    r"\bbeside\b": "next to",
    r"\b(stands?|stood)\b": "is, exists",
    r"\bhonest\b": "intentional",
    r"\b(speaks?|tells?) of\b": "lists, refers to",
    r"\bof a rank of its own\b": "per-rank",
    r"\bdoubles (?!from\b)": "duplicate",
    r"\bcarried over\b": "copied unchanged",
    r"\b(is|are|was|were) doubled\b": "has a duplicate, was saved twice",
    r"\bdoubled (?=models?|optimizers?|entr|folders?|checkpoints?|weights)\b": "duplicate",
    r"\b(will|can|may) bite\b": "problems",
    r"\bpeer copies\b": "P2P copies",
    r"\b(is|are|was|were) whole\b": "complete, intact",
}
"""Words that no message, help text or page of the manual uses any more -> what to write instead."""


def _said(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text of a module but its docstrings, an f-string as one text with {} for its
    values.
    """
    silent: set[int] = set()
    for node in house.nodes(path):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr):  # a docstring, of an attribute too
                silent.add(id(statement.value))
        if isinstance(node, ast.JoinedStr):
            silent.update(map(id, node.values))
    for node in house.nodes(path):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in silent
        ):
            yield node.lineno, node.value


SWEPT = (
    "checkpoint",
    "cli",
    "conversion",
    "devices",
    "diagnosis",
    "environment",
    "formats",
    "manual",
    "repairs",
    "storage",
    "tensors",
    "training",
    "verification",
    "reports.py",
    "wording.py",
)
"""Rooms whose docstrings speak as messages do; a room joins when its own have been swept."""


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, its classes, its functions and its constants."""
    for node in house.nodes(path):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, " ".join(str(statement.value.value).split())


def _docstring_of_command(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings that click prints as help."""
    for node in house.nodes(path):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_command"):
            yield node.lineno, ast.get_docstring(node) or ""


def _retired(path: Path, texts: Iterable[tuple[int, str]]) -> list[str]:
    return [
        f"{path}:{line}: {text!r}: write {better!r}"
        for line, text in texts
        if " " in text
        for retired, better in _RETIRED.items()
        if re.search(retired, text)
    ]


def test_no_message_says_a_retired_word() -> None:
    for path in sorted(Path("ckptfix").rglob("*.py")):
        assert _retired(path, [*_said(path), *_docstring_of_command(path)]) == []


def test_no_page_of_the_manual_says_a_retired_word() -> None:
    for path in (*sorted(Path("ckptfix/manual").glob("*.md")), Path("README.md")):
        assert _retired(path, enumerate(path.read_text().splitlines(), 1)) == []


def test_docstrings_begin_with_a_verb_or_a_noun_and_say_no_retired_word() -> None:
    for path in sorted(Path("ckptfix").rglob("*.py")):
        if path.parts[1] in SWEPT:
            texts = list(_docstrings(path))
            assert _retired(path, texts) == []
            assert [
                text for _, text in texts if re.match(r"(What|Which|Whether|Where|How)\b", text)
            ] == [], path


@pytest.mark.parametrize(
    ("sentence", "topic"),
    [
        ("values of tensors (NaN, zeros); ckptfix verify --data reads them", "values of tensors"),
        ("other files next to it: 'a.md', 'b'", "other files next to it"),
        ("optimizers inside 'optimizer (1).bin', by its name", "optimizers inside 'optimizer (1).bin'"),
        ("model.safetensors: whether it is tied; or not", "model.safetensors: whether it is tied"),
        ("checksums of torch's records, and accelerate's; no", "checksums of torch's records"),
    ],
)  # fmt: skip
def test_the_topic_of_what_was_not_checked_says_what_that_is(sentence: str, topic: str) -> None:
    (only,) = unchecked_lines([sentence, "something else"], details="ckptfix check -v")
    assert str(only) == f"not checked: {topic}, something else; for details: ckptfix check -v"


def test_words_are_listed_as_in_a_sentence() -> None:
    lists = [(), ("A",), ("A", "B"), ("A", "B", "C"), ("A", "B", "C", "D")]
    assert [*map(series, lists)] == ["", "A", "A and B", "A, B and C", "A, B, C and D"]

"""Prints every sentence that the package can say, in the order of its files: ``python -m
tests.messages``.

A sentence is a string of three words or more that is no docstring. ``{}`` stands where a value is
put in.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckptfix"
_THREE_WORDS = re.compile(r"[A-Za-z`'(\"]\S* +\S+ +\S")


def sentences(source: str) -> Iterator[str]:
    """Yield the sentences of a module, each in one line."""
    yield from _sentences(ast.parse(source))


def _sentences(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, of a class's attribute, too
    if isinstance(node, ast.Constant | ast.JoinedStr):
        text = " ".join(_text(node).split())
        if _THREE_WORDS.search(text) and not _is_list_of_names(text):
            yield text
    for child in ast.iter_child_nodes(node):
        # The parts of a string with values were read with it, but values may have sentences of
        # their own.
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _sentences(child)


def _is_list_of_names(text: str) -> bool:
    """Return whether a string is one of the names that a package offers."""
    words = text.split()
    return all(map(str.isidentifier, words)) and any(
        re.search("_|[a-z][A-Z]", word) for word in words
    )


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(each) if isinstance(each, ast.Constant) else "{}" for each in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def all_sentences() -> str:
    """Return the sentences of all modules, each module with its name."""
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if said := list(sentences(path.read_text())):
            lines += [f"# {path.relative_to(PACKAGE)}", *said, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(all_sentences())

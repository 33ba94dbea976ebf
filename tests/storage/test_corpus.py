"""Journals that older versions left: each is rolled back, finished or undone to the bytes that the older version gives.

``fixtures.make_journals`` says what is in the corpus and how it was made. It stays as it is: journals of these versions
lie in folders of users. A storage layer that is written anew must do to each of them what the old one did.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.frozen import BYTES, JOURNALS, Tree, bytes_of, frozen, name_of, thaw, timeline
from tests.storage.folders import run_recovery, undo_last

CASES = sorted(JOURNALS.glob("*/*.json"))
TOP = "checkpoint"


def names(case: Path) -> str:
    return f"{case.parent.name}-{case.stem}"


def with_digests(tree: Tree) -> Tree:
    """Return a tree of the corpus as ``frozen`` returns it: each file with the digest of its bytes."""
    return {
        name: entry if entry[0] in ("/", "->") else [name_of(bytes_of(entry[0])), *entry[1:]]
        for name, entry in tree.items()
    }


class Corpus:
    """One case: its states by the calls that led to them, and what the old version made of them."""

    def __init__(self, case: Path) -> None:
        body: dict[str, Any] = json.loads(case.read_text())
        self.given: list[Tree] = [tree for tree, _ in body["settled"]]
        self.settled: list[Tree] = [with_digests(tree) for tree in self.given]
        self.undone: list[int | None] = [undone for _, undone in body["settled"]]
        self.ends: list[int] = [end for _, _, end in body["states"]]
        self.moments: list[str] = [f"{at}: {moment}" for at, (moment, _, _) in enumerate(body["states"])]
        self.states: list[Tree] = [*timeline({}, (change for _, change, _ in body["states"]))]


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_run_that_was_cut_short_ends_as_it_did_then(tmp_path: Path, case: Path) -> None:
    corpus = Corpus(case)
    for number, (moment, tree, end) in enumerate(
        zip(corpus.moments, corpus.states, corpus.ends, strict=True)
    ):
        root = thaw(tree, tmp_path / str(number))
        assert frozen(root, {}) == with_digests(tree), "the corpus is not made again"
        run_recovery(root / TOP)
        assert frozen(root, {}) == corpus.settled[end], moment


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_repair_of_then_is_undone_byte_for_byte(tmp_path: Path, case: Path) -> None:
    corpus = Corpus(case)
    for number, (tree, undone) in enumerate(zip(corpus.settled, corpus.undone, strict=True)):
        done = sorted(Path(name).name for name in tree if name.endswith(".done"))
        assert (undone is None) == (not done)
        if undone is not None:
            root = thaw(corpus.given[number], tmp_path / str(number))
            undo_last(root / TOP, int(done[-1].removesuffix(".done")))
            assert frozen(root, {}) == corpus.settled[undone]


def test_every_byte_of_the_corpus_is_used_and_as_it_was() -> None:
    used = set()
    for case in CASES:
        corpus = Corpus(case)
        for tree in (*corpus.states, *corpus.given):
            used |= {entry[0].partition(":")[0] for entry in tree.values()} - {"/", "->", ""}
    assert {path.name for path in BYTES.iterdir()} == used
    for path in BYTES.iterdir():
        assert name_of(path.read_bytes()) == path.name

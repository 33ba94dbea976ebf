"""Journals that older versions left: each is rolled back, finished or undone to the bytes that the
older version gives.

``fixtures.make_journals`` says what is in the corpus and how it was made. It stays as it is:
journals of these versions lie in folders of users. A storage layer that is written anew must do to
each of them what the old one did.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.frozen import (
    BYTES,
    JOURNALS,
    STORES,
    Tree,
    bytes_of,
    compared,
    frozen,
    frozen_bucket,
    name_of,
    thaw,
    thaw_bucket,
    timeline,
)
from tests.storage.folders import run_recovery, undo_last
from tests.storage.objects import recover, undo
from tests.stores.simulated_s3 import Cloud, cloud, open_simulated

__all__ = ["cloud"]

FOLDERS = sorted(JOURNALS.glob("*/*.json"))
BUCKETS = sorted(STORES.glob("*/*.json"))
TOP = "checkpoint"
URL = "s3://simulated/run/checkpoint_7"


def name_of_case(case: Path) -> str:
    return f"{case.parent.name}-{case.stem}"


def with_digests(tree: Tree) -> Tree:
    """Return a tree of the corpus as ``frozen`` returns it: each file with the digest of its
    bytes.
    """
    return {
        name: entry if entry[0] in ("/", "->") else [name_of(bytes_of(entry[0])), *entry[1:]]
        for name, entry in tree.items()
    }


class Corpus:
    """One case: its states by the calls that led to them, and what the old version made of them."""

    def __init__(self, case: Path) -> None:
        self.body: dict[str, Any] = json.loads(case.read_text())
        self.settled: list[Tree] = [tree for tree, _ in self.body["settled"]]
        self.undone: list[int | None] = [undone for _, undone in self.body["settled"]]
        self.states: list[Tree] = [*timeline({}, (change for _, change, _ in self.body["states"]))]

    def each_state(self) -> Iterator[tuple[str, Tree, Tree]]:
        """Yield the last call, the state that it left, and what the old version's recovery made of
        that.
        """
        for tree, (moment, _, end) in zip(self.states, self.body["states"], strict=True):
            yield moment, tree, self.settled[end]

    def each_repair(self) -> Iterator[tuple[Tree, Tree]]:
        """Yield what an undo begins with, and what the old version's undo made of it."""
        for tree, undone in zip(self.settled, self.undone, strict=True):
            if undone is not None:
                yield tree, self.settled[undone]


@pytest.mark.parametrize("case", FOLDERS, ids=name_of_case)
def test_a_run_that_was_cut_short_ends_as_it_did_then(tmp_path: Path, case: Path) -> None:
    for number, (moment, tree, settled) in enumerate(Corpus(case).each_state()):
        root = thaw(tree, tmp_path / str(number))
        assert frozen(root, {}) == with_digests(tree), "the corpus is not made again as it was"
        run_recovery(root / TOP)
        assert frozen(root, {}) == with_digests(settled), f"{number}: {moment}"


@pytest.mark.parametrize("case", FOLDERS, ids=name_of_case)
def test_a_repair_of_then_is_undone_byte_for_byte(tmp_path: Path, case: Path) -> None:
    for number, (tree, undone) in enumerate(Corpus(case).each_repair()):
        root = thaw(tree, tmp_path / str(number))
        undo_last(
            root / TOP, max(int(path.name[:4]) for path in root.glob(f"{TOP}/.ckptfix/*.done"))
        )
        assert frozen(root, {}) == with_digests(undone)


def ensure_same(cloud: Cloud, wanted: Tree, moment: str) -> None:
    """Every object has the bytes and the metadata that it had then, and no more of a journal is
    left behind.
    """
    made, then = compared(frozen_bucket(cloud, {})), compared(with_digests(wanted))
    assert made == {key: value for key, value in then.items() if value or key in made}, moment
    assert not cloud.uploads, moment


@pytest.mark.parametrize("case", BUCKETS, ids=name_of_case)
def test_a_run_in_a_store_that_was_cut_short_ends_as_it_did_then(cloud: Cloud, case: Path) -> None:
    corpus = Corpus(case)
    for number, (moment, tree, settled) in enumerate(corpus.each_state()):
        cloud = thaw_bucket(tree, corpus.body["bucket"])
        recover(open_simulated(cloud, URL))
        ensure_same(cloud, settled, f"{number}: {moment}")


@pytest.mark.parametrize("case", BUCKETS, ids=name_of_case)
def test_a_repair_in_a_store_is_undone_byte_for_byte(cloud: Cloud, case: Path) -> None:
    corpus = Corpus(case)
    for tree, undone in corpus.each_repair():
        cloud = thaw_bucket(tree, corpus.body["bucket"])
        undo(open_simulated(cloud, URL))
        ensure_same(cloud, undone, "")
        assert cloud.journal() == []


def test_every_byte_of_the_corpus_is_used_and_unchanged() -> None:
    used = set()
    for case in (*FOLDERS, *BUCKETS):
        corpus = Corpus(case)
        for tree in (*corpus.states, *corpus.settled):
            used |= {entry[0].partition(":")[0] for entry in tree.values()} - {"/", "->", ""}
    assert {path.name for path in BYTES.iterdir()} == used
    for path in BYTES.iterdir():
        assert name_of(path.read_bytes()) == path.name

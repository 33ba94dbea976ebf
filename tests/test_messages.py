"""The sentences of the package, for people who read them in a row."""

from tests.messages import PACKAGE, all_sentences, sentences

SOURCE = '''
"""The module of an example says this."""
NAMES = "load_state_tolerant verify_reload probe_peer_copies"
WHY = "the one reason"
"""Why it is so, in words."""
def check(path, first):
    """Say what is wrong with it."""
    raise UsageError(
        f"{path} holds {count_of(2, 'file of no checkpoint')}, "
        "and no save"
    )
'''


def test_sentences_without_docstrings_and_names() -> None:
    assert list(sentences(SOURCE)) == [
        "the one reason",
        "{} holds {}, and no save",
        "file of no checkpoint",
    ]


def test_every_module_that_speaks_is_there() -> None:
    text = all_sentences()
    assert "# diagnosis/findings/damaged.py" in text
    assert len(text.splitlines()) > 1000
    assert all(
        (PACKAGE / line[2:]).is_file()
        for line in text.splitlines()
        if line.startswith("# ") and line.endswith(".py")
    )

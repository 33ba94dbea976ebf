"""What code that is not ours raises: a factory, the module that it is in, a forward pass, accelerate's hooks."""

ANYTHING = (Exception, SystemExit)
"""``sys.exit`` in a script that is imported as a module would end the verification with the script's own status."""


_LONGEST = 400


def in_words(error: BaseException) -> str:
    """Return an error's class and message in one line, of a long message the beginning."""
    return f"{type(error).__name__}: {one_line(str(error))}"


def one_line(text: str) -> str:
    """Return a text without its line breaks, of a long one the beginning."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."

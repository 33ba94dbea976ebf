"""What code that is not ours raises: a factory, the module that it is in, a forward pass, accelerate's hooks."""

ANYTHING = (Exception, SystemExit)
"""``sys.exit`` in a script that is imported as a module would end the verification with the script's own status."""


def in_words(error: BaseException) -> str:
    """Return an error's class and message."""
    return f"{type(error).__name__}: {error}"

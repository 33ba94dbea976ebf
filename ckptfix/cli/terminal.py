"""The terminal: whether it takes colours, and whether a line on it can be drawn again."""

import os
import sys
from collections.abc import Mapping

import click


def wants_colour(variables: Mapping[str, str]) -> bool | None:
    """Return whether the environment asks for colours or against them; None leaves it to what stdout is.

    ``NO_COLOR`` (no-color.org) goes before ``FORCE_COLOR`` and ``CLICOLOR_FORCE``, and those before ``CLICOLOR=0`` and
    ``TERM=dumb``.
    """
    if variables.get("NO_COLOR"):
        return False
    if any(variables.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return False if variables.get("CLICOLOR") == "0" or variables.get("TERM") == "dumb" else None


def can_redraw() -> bool:
    """Return whether stderr is a terminal that can go back to the start of a line, as a progress bar does."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _choose(context: click.Context, parameter: click.Parameter, value: str) -> None:
    # click.echo asks the current context whether to strip colours, so that no caller has to pass them on.
    context.color = wants_colour(os.environ) if value == "auto" else value == "always"


COLOUR = click.Option(
    ["--color"],
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    expose_value=False,
    callback=_choose,
    help="Print colours. auto: on a terminal, unless NO_COLOR is set or TERM is dumb.",
)
"""The option of every verb that reports; it sets the colours of the context, and no verb sees it."""

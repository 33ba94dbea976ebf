"""``ckptfix explain``."""

import click

from ckptfix.cli.report import put_page
from ckptfix.cli.verb_options import AllHelp
from ckptfix.errors import UsageError
from ckptfix.manual import TOPICS, closest, codes, explanation


@click.command("explain", cls=AllHelp)
@click.argument("code")
def explain_command(code: str) -> int:
    """Explain a finding: cause, cost, an example, and what to do.

    CODE: the code that check, verify or doctor prints after the severity, such as doubled-model. In
    their JSON, it is the value of "code".
    """
    text = explanation(code)
    if text is None:
        if code in TOPICS:
            raise UsageError(f"{code} is a topic, not a code; next: ckptfix help {code}")
        raise UsageError(
            f"unknown code {code!r}{closest(code, codes())}; all codes: ckptfix help "
            "codes; ckptfix help verify"
        )
    put_page(text)
    return 0

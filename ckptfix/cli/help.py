"""``ckptfix help``."""

import click

from ckptfix.cli.report import put_page
from ckptfix.cli.verb_options import ALL_OPTIONS, AllHelp
from ckptfix.errors import UsageError
from ckptfix.manual import TOPICS, closest, explanation, page, summary

# Pages of 0.5.0, named in scripts and wikis.
_MOVED = {"findings": "codes"}


@click.command("help", cls=AllHelp)
@click.argument("topic", required=False)
@click.pass_context
def help_command(ctx: click.Context, topic: str | None) -> int:
    """Print a page of the manual, or the list of pages.

    TOPIC: a page, or the name of a verb.
    """
    put_page(_list_of_topics() if topic is None else _text_about(topic, ctx))
    return 0


def _list_of_topics() -> str:
    width = max(map(len, TOPICS))
    rows = (f"  {topic:<{width}}  {summary(topic)}\n" for topic in TOPICS)
    return (
        "Pages of the manual; to read one: ckptfix help TOPIC\n\n"
        + "".join(rows)
        + "\nckptfix help VERB prints the options of a command; ckptfix explain CODE explains a "
        "finding.\n"
    )


def _text_about(topic: str, ctx: click.Context) -> str:
    topic = _MOVED.get(topic, topic)
    if topic in TOPICS:
        return page(topic)
    above = ctx.find_root()
    verbs = above.command
    assert isinstance(verbs, click.Group)
    if (verb := verbs.get_command(above, topic)) is not None:
        with click.Context(verb, above, info_name=topic) as context:
            context.meta[ALL_OPTIONS] = True
            return verb.get_help(context) + "\n"
    if explanation(topic) is not None:
        raise UsageError(f"{topic} is a code, not a topic; next: ckptfix explain {topic}")
    hint = closest(topic, [*TOPICS, *verbs.list_commands(above)])
    raise UsageError(f"the manual has no page {topic!r}{hint}; all topics: ckptfix help")

"""``ckptfix help``."""

import click

from ckptfix.cli.report import put_page
from ckptfix.errors import UsageError
from ckptfix.manual import TOPICS, closest, explanation, page, section, summary, titles

_VERB = "ckptfix "

# Pages of 0.5.0, named in scripts and wikis.
_MOVED = {"findings": "codes"}


@click.command("help")
@click.argument("topic", required=False)
def help_command(topic: str | None) -> int:
    """Print a page of the manual, or the list of pages.

    TOPIC: a page, or the name of a verb.
    """
    put_page(_list_of_topics() if topic is None else _text_about(topic))
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


def _text_about(topic: str) -> str:
    topic = _MOVED.get(topic, topic)
    if topic in TOPICS:
        return page(topic)
    text = section("commands", _VERB + topic)
    if text is not None:
        return text
    if explanation(topic) is not None:
        raise UsageError(f"{topic} is a code, not a topic; next: ckptfix explain {topic}")
    verbs = [title.removeprefix(_VERB) for title in titles("commands") if title.startswith(_VERB)]
    hint = closest(topic, [*TOPICS, *verbs])
    raise UsageError(f"the manual has no page {topic!r}{hint}; all topics: ckptfix help")

"""The manual: one Markdown page a topic, shipped in the wheel, because clusters are often offline."""

import re
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches

TOPICS = (
    "tutorial",
    "troubleshooting",
    "will-it-load",
    "commands",
    "after-repair",
    "evidence",
    "guard",
    "saving",
    "trainer",
    "loading",
    "exact-resume",
    "splits",
    "migrate",
    "verify",
    "signing",
    "diff",
    "salvage",
    "stores",
    "ranks",
    "fleets",
    "safety",
    "limits",
    "json",
    "python",
    "codes",
    "continuous-integration",
    "performance",
    "architecture",
    "contributing",
    "changes",
)
"""Every page, in the order of the list that ``ckptfix help`` prints."""

CATALOGUE = "codes"
"""The page with one section for each code."""

TABLES = (CATALOGUE, "verify")
"""The pages with one row of a table for each code that has no section."""

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_CODE = "[a-z]+(-[a-z0-9]+)*"


def page(topic: str) -> str:
    """Return the text of a page, without the markers of its generated blocks."""
    from importlib.resources import files  # drags in tempfile, random and shutil

    text = (files(__name__) / f"{topic}.md").read_text(encoding="utf-8")
    return _COMMENT.sub("", text)


def summary(topic: str) -> str:
    """Return the line about a page: its title ``# topic: summary`` without the topic."""
    return page(topic).partition("\n")[0].partition(": ")[2]


def section(topic: str, title: str) -> str | None:
    """Return the section ``## title`` of a page; None if the page has none."""
    parts = re.split(r"^(?=## )", page(topic), flags=re.MULTILINE)[1:]
    return next((part for part in parts if part.partition("\n")[0] == f"## {title}"), None)


def titles(topic: str) -> list[str]:
    """Return the titles of the sections of a page."""
    return re.findall(r"^## (.+)$", page(topic), re.MULTILINE)


def codes() -> list[str]:
    """Return every code that has a section or a row."""
    known = [*titles(CATALOGUE), *(code for topic in TABLES for code in rows(topic))]
    return list(dict.fromkeys(code for code in known if re.fullmatch(_CODE, code)))


def rows(topic: str) -> dict[str, str]:
    """Return the rows of the tables of codes on a page, each as a section: code -> text."""
    sections = {}
    heads: list[str] = []
    for line in page(topic).splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("| code |"):
            heads = cells
        elif not line.startswith("|"):
            heads = []
        elif heads and (code := cells[0].strip("`")) and re.fullmatch(_CODE, code):
            items = (
                f"- {head}: {cell}\n"
                for head, cell in zip(heads[1:], cells[1:], strict=True)
                if cell
            )
            sections[code] = (
                f"## {code}\n{''.join(items)}\nAll codes of this kind: ckptfix help {topic}\n"
            )
    return sections


def explanation(code: str) -> str | None:
    """Return the section and the rows about a code; None where it is unknown."""
    text = section(CATALOGUE, code)
    return text or next((known[code] for known in map(rows, TABLES) if code in known), None)


def closest(word: str, known: list[str]) -> str:
    """Return the end of a message about an unknown word: the likeliest known one, or nothing."""
    match = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def wrap(text: str, width: int) -> str:
    """Wrap paragraphs and list items to a width; code and tables stay as they are."""
    return "\n".join(_wrapped(text.splitlines(), width)) + "\n"


def _wrapped(lines: list[str], width: int) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for line in [*lines, ""]:
        is_fence = line.startswith("```")
        is_text = bool(line) and not is_code and not is_fence and not line.startswith(("|", "#"))
        if paragraph and (not is_text or _ITEM.match(line)):
            yield _filled(paragraph, width)
            paragraph = []
        if is_text:
            paragraph.append(line)
        else:
            yield line
        is_code ^= is_fence


def _filled(paragraph: list[str], width: int) -> str:
    item = _ITEM.match(paragraph[0])
    return textwrap.fill(
        " ".join(line.strip() for line in paragraph),
        width,
        subsequent_indent=" " * len(item[0]) if item else "",
        break_long_words=False,
        break_on_hyphens=False,
    )

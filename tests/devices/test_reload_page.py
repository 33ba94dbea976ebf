"""The HTML page: well formed, self-contained, and safe whatever a tensor is called."""

from pathlib import Path

from msgspec.structs import replace

from ckptfix.devices.reload.reload_report import (
    Accelerators,
    Outcome,
    PairFacts,
    Proof,
    ReloadReport,
    Subject,
)
from ckptfix.pages import html_document, html_lines
from tests.html_pages import Page

EVIL = "<script>alert(1)</script>\x1b[31m\u202e\"'&\ud800"


def report() -> ReloadReport:
    return ReloadReport(
        path=Path("folder") / EVIL,
        machine=Accelerators(accelerator="cuda", names=("Card", "Card", "Card")),
        model=f"Model {EVIL}",
        map_source=EVIL,
        device_map={f"layers.{number}": str(number // 2) for number in range(6)} | {EVIL: "cpu"},
        device_bytes={"0": 2048, "1": 1024, "2": 0, "cpu": 12},
        tensors=7,
        nbytes=3084,
        repeats=8,
        proofs=(
            Proof(subject=Subject.FILE_BYTES, outcome=Outcome.PROVEN, text=EVIL),
            Proof(subject=Subject.SPLIT, outcome=Outcome.FAILED, text="transfer fault", is_transfer=True),
            Proof(subject=Subject.OUTPUTS, outcome=Outcome.TOLERANCE, text="3e-6"),
            Proof(subject=Subject.BEYOND, outcome=Outcome.NOT_EXERCISED, text="time"),
        ),
        pairs=(
            PairFacts(pair=(0, 1), probe="wrong", probe_kind="zeros"),
            PairFacts(pair=(1, 0), probe="healthy", moves=2, alone_runs=8),
            PairFacts(pair=(0, 2), probe="inconclusive"),
        ),
    )  # fmt: skip


def html() -> str:
    return html_document(f"ckptfix verify {EVIL}", [html_lines(report().lines())])


def test_it_parses_and_says_what_was_printed() -> None:
    page = Page(html())
    assert page.text.count("<script>alert(1)</script>") == 7, "as text, in every place"
    assert "\\x1b[31m\\u202e" in page.text
    shown = "".join(page.text.split())
    assert all("".join(str(line).split()) in shown for line in report().lines())


def test_nothing_runs_and_nothing_is_loaded() -> None:
    document = html()
    page = Page(document)
    assert {"script", "img", "link", "iframe", "object", "a"}.isdisjoint(page.tags)
    assert {name for name, _ in page.attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "style",
        "class",
    }
    assert not any(
        "url(" in value or ":" in value.split(":", 1)[-1]
        for name, value in page.attributes
        if name == "style" and "url" in value
    )
    assert "default-src 'none'" in document
    assert "http://" not in document
    assert "https://" not in document
    assert document.isprintable() or all(char.isprintable() or char == "\n" for char in document)
    document.encode("utf-8")


def test_colours_are_those_of_the_terminal() -> None:
    assert '<span class="red">       failed  transfer fault</span>' in html()


def test_str_is_what_the_terminal_prints() -> None:
    text = str(replace(report(), path=Path("folder"), model="Net", map_source="auto"))
    assert text.splitlines()[:3] == [
        "folder: 7 tensors, 3.0 KiB; 3 cuda devices (Card)",
        "model: Net; device map: auto",
        "  0: 2.0 KiB: layers.{0...1}",
    ]
    assert "       failed  transfer fault\n" in text
    assert "NOT EXERCISED  time\n" in text
    assert "0          -              zeros          not exercised\n" in text
    assert "\x1b" not in text


def test_repr_is_short() -> None:
    assert (
        repr(replace(report(), path=Path("f")))
        == "<ReloadReport f: 7 tensors, 3.0 KiB; 3 cuda devices (Card); status 1>"
    )

"""The heat map as a page: self-contained, every name escaped, every cell with words."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import diff
from ckptfix.verification.diff_page import _figure, html_page
from tests.html_pages import Page

HOSTILE = '"><script>alert(1)</script>\x1b[31m\u202e'


class Map(Page):
    """Collects cells with their class, tooltip and text."""

    def __init__(self, document: str) -> None:
        self.cells: list[tuple[str, str, str]] = []
        super().__init__(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        found = dict(attrs)
        assert not {"src", "href", "onload", "onerror"} & found.keys()
        if tag == "td":
            self.cells.append((found.get("class") or "", found.get("title") or "", ""))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            css, title, text = self.cells[-1]
            self.cells[-1] = css, title, text + data


def page_of(
    tmp_path: Path, a: "dict[str, torch.Tensor]", b: "dict[str, torch.Tensor]"
) -> "tuple[str, Map]":
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    text = html_page(diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))
    return text, Map(text)


def test_the_map(tmp_path: Path) -> None:
    a = {f"layers.{i}.{kind}.weight": torch.ones(4) for i in range(5) for kind in ("q", "up")}
    a |= {f"layers.0.experts.{i}.w": torch.ones(4) for i in range(3)}
    a["norm"] = torch.ones(4)
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["layers.1.q.weight"] += 0.9e-3
    b["layers.2.q.weight"] *= 3
    b["layers.3.q.weight"] = torch.ones(5)
    b["layers.0.experts.1.w"] += 0.8e-5
    b["layers.4.up.weight"][0] = float("nan")
    del b["layers.4.q.weight"], b["norm"]
    text, page = page_of(tmp_path, a, b)
    by_title = {title.split(": ", 1)[0]: (css, words) for css, title, words in page.cells if title}
    assert by_title["layers.0.q.weight"] == ("eq", "=")
    assert by_title["layers.1.q.weight"] == ("h5", "9e-4")
    assert by_title["layers.2.q.weight"] == ("h8", "2")
    assert by_title["layers.3.q.weight"] == ("no", "≠")
    assert by_title["layers.4.q.weight"] == ("no", "A")
    assert by_title["layers.4.up.weight"] == ("h8", "!")
    assert by_title["norm"] == ("no", "A")
    assert by_title["the worst of 3"] == ("h3", "8e-6")
    assert "experts.*.w" in text
    assert "NaN 0 in A, 1 in B; Inf 0 in A, 0 in B" in text
    assert len(re.findall(r"<tr><th scope=\"row\">\d+</th>", text)) == 5


def test_it_is_self_contained_and_names_are_escaped(tmp_path: Path) -> None:
    names = {
        f"layers.0.{HOSTILE}": torch.ones(2),
        f"{HOSTILE}.1.w": torch.ones(2),
        HOSTILE: torch.ones(2),
    }
    text, page = page_of(tmp_path, names, {name: tensor * 2 for name, tensor in names.items()})
    assert "script" not in page.tags
    assert "default-src 'none'" in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_a_page_of_many_tensors_stays_small(tmp_path: Path) -> None:
    names = {f"w{number}": torch.ones(1) for number in range(2500)}
    text, _ = page_of(tmp_path, names, {name: tensor + 1 for name, tensor in names.items()})
    assert "not shown: 500 tensors" in text
    assert len(text) < 2_000_000


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_both_modes(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    pairs = re.findall(r"background: (#[0-9a-f]{6}); color: (#[0-9a-f]{6})", text)
    assert len(pairs) == 28, "fourteen kinds of cells in two modes"
    for background, colour in pairs:
        light, dark = sorted((luminance(background), luminance(colour)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (
            f"{colour} on {background}: WCAG AA asks for 4.5"
        )


def test_it_fits_a_narrow_window(tmp_path: Path) -> None:
    long = "x" * 500
    text, page = page_of(
        tmp_path, {f"layers.0.{long}": torch.ones(1)}, {f"layers.0.{long}": torch.zeros(1)}
    )
    assert '<meta name="viewport" content="width=device-width' in text
    assert page.tags.count("table") == text.count('<div class="scroll" tabindex="0"><table'), (
        "a wide table scrolls by itself"
    )
    assert f'<th scope="col" title="{long}"><span>{long}</span></th>' in text
    assert "max-height: 18rem; overflow: hidden; text-overflow: ellipsis" in text


def test_the_legend_names_every_kind_of_cell(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    chips = re.findall(r'<li class="(\w+)">([^<]+)</li>', text)
    assert {css for css, _ in chips} == {"eq", "no", *(f"h{level}" for level in range(9))}
    assert ("h1", "up to 1e-7") in chips
    assert ("h7", "up to 1e-1") in chips


@pytest.mark.parametrize(
    ("relative", "words"),
    [
        (0.0, "0"),
        (3.4e-7, "3e-7"),
        (0.02, "2e-2"),
        (0.1234, "0.12"),
        (1.26, "1.3"),
        (31.4, "31"),
        (5e4, "5e4"),
    ],
)
def test_figures_are_short(relative: float, words: str) -> None:
    assert _figure(relative) == words

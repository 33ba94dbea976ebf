"""The manual agrees with the catalogues, the command line and the terminal."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptfix.cli import cli, run
from ckptfix.diagnosis.findings.catalogue import CODES
from ckptfix.diagnosis.values import ADVICE as VALUES
from ckptfix.environment.doctor import CODES as DOCTOR
from ckptfix.manual import TOPICS, codes, explanation, page, section, summary, titles, wrap
from ckptfix.training.resume_proofs.causes import CAUSES
from ckptfix.verification.verify_report import Change
from tests import house
from tests.manual.pages import DOCUMENTS, PAGES, ROOT, generated, matches, not_played

HEADINGS = [
    "What it is",
    "Why it happens",
    "What it costs you",
    "An example",
    "What ckptfix does",
    "What you do",
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_generated_parts_and_transcripts_are_of_today(path: Path) -> None:
    text = path.read_text()
    assert generated(text) == text, "to write them again: .venv/bin/python -m tests.manual.pages"
    if missing := not_played(text):
        pytest.skip(
            f"blocks of {path.name} were not run: they need {', '.join(missing)}, of "
            "ckptfix[signing]"
        )


def test_every_page_is_a_topic_with_a_summary() -> None:
    assert {path.stem for path in PAGES} == set(TOPICS)
    for topic in TOPICS:
        assert page(topic).startswith(f"# {topic}: ")
        assert 20 < len(summary(topic)) < 90


def printed_codes() -> set[str]:
    """Return every code that a verb prints: of the catalogues, and any other that the source gives
    a result.
    """
    codes_found = {*CODES, *DOCTOR, *VALUES, *(cause.code for cause in CAUSES)}
    codes_found |= {f"digest-{change.value}" for change in Change}
    for path in (ROOT / "ckptfix").rglob("*.py"):
        for node in house.nodes(path):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call):
                values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if isinstance(node.func, ast.Name) and node.func.id == "Annotation":
                    values += node.args[3:4]
            elif isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "code" for target in node.targets
            ):
                values = [node.value]
            codes_found |= {str(value.value) for value in values if isinstance(value, ast.Constant)}
    return codes_found


def test_a_code_of_values_is_in_the_catalogue() -> None:
    """The codes that ``judge_values`` and ``judge_moment`` write are those with an advice."""
    text = (ROOT / "ckptfix/diagnosis/values.py").read_text()
    assert set(re.findall(r'(?:code=|yield )"([a-z-]+)"', text)) == set(VALUES)


def test_every_code_of_the_catalogues_has_a_section_and_none_is_extra() -> None:
    sections = [title for title in titles("codes") if " " not in title]
    assert sections == list(dict.fromkeys([*CODES, *VALUES, *DOCTOR]))
    assert set(codes()) == printed_codes()
    assert all(explanation(code) for code in codes())


@pytest.mark.parametrize(
    ("code", "headings"),
    [
        *((code, HEADINGS) for code in (*CODES, *VALUES)),
        # What ckptfix does about them is the same for all: doctor reports, and changes nothing.
        *((code, [*HEADINGS[:4], HEADINGS[5]]) for code in DOCTOR if code not in CODES),
    ],
)
def test_a_section_answers_every_question(code: str, headings: list[str]) -> None:
    text = section("codes", code)
    assert text is not None
    parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    answers = dict(zip(parts[1::2], parts[2::2], strict=True))
    # The first sentence of a topic of doctor can say why it happens, or what it costs.
    optional = HEADINGS[1:3] if code in DOCTOR and code not in CODES else []
    assert list(answers) == [
        heading for heading in headings if heading in answers or heading not in optional
    ]
    assert len(answers) >= len(headings) - 1
    assert all(len(answer.strip()) > 5 for answer in answers.values())
    assert code in answers["An example"], "the example is a message of this code"


def test_the_pages_and_the_readme_mention_no_unknown_topic_or_code() -> None:
    verbs = cli.list_commands(click.Context(cli))
    for path in DOCUMENTS:
        text = path.read_text()
        for topic in re.findall(r"ckptfix help ([a-z-]+)", text):
            assert topic in (*TOPICS, *verbs), f"{path.name}: {topic}"
        for code in re.findall(r"ckptfix explain ([a-z-]+)", text):
            assert explanation(code) is not None, f"{path.name}: {code}"
        for target in re.findall(r"\]\((ckptfix/manual/[^)#]+)", text):
            assert (ROOT / target).is_file(), f"{path.name}: {target}"


def test_every_option_in_a_command_of_the_manual_exists() -> None:
    context = click.Context(cli)
    for path in DOCUMENTS:
        for verb, rest in re.findall(r"\bckptfix ([a-z]+)((?: [^`\n|]*)?)", path.read_text()):
            command = cli.get_command(context, verb)
            if command is None or verb == "run":
                continue
            known = {name for option in command.params for name in option.opts} | {"--help"}
            # Neither a comment nor a quoted command.
            before_comment = re.split(r"[#;,('\"]", rest)[0]
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", before_comment):
                assert option in known, f"{path.name}: ckptfix {verb}{rest}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_help_lists_the_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    said = capsys.readouterr().out
    for topic in TOPICS:
        assert re.search(rf"^  {topic} +{re.escape(summary(topic))}$", said, re.MULTILINE)


@pytest.mark.parametrize("topic", TOPICS)
def test_help_prints_a_page_as_it_is(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", topic]) == 0
    said = capsys.readouterr().out
    assert said == page(topic)
    assert "<!--" not in said


def test_help_prints_every_option_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "repair"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: ckptfix repair [OPTIONS] PATHS...\n")
    assert "--break-lock" in said
    assert run(["repair", "--help", "--all"]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["help", "tutorail"], "did you mean tutorial?"),
        (["help", "repiar"], "did you mean repair?"),
        (["help", "xyzzy"], "all topics: ckptfix help"),
        (["help", "doubled-model"], "ckptfix explain doubled-model"),
        (["explain", "double-model"], "did you mean doubled-model?"),
        (["explain", "pair-not-health"], "did you mean pair-not-healthy?"),
        (["explain", "xyzzy"], "all codes: ckptfix help codes"),
        (["explain", "tutorial"], "ckptfix help tutorial"),
    ],
)
def test_what_is_unknown_leads_on(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_page_that_moved_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "findings"]) == 0
    assert capsys.readouterr().out.startswith("# codes: ")


def test_explain_prints_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "doubled-model"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("## doubled-model\n")
    assert said.count("\n## ") == 0
    assert "<!--" not in said


@pytest.mark.parametrize(
    ("code", "topic", "words"),
    [
        ("digest-swapped", "verify", "- meaning: two files or tensors have each other's bytes"),
        ("order-not-saved", "codes", "- restored by `ckptfix run`: yes"),
    ],
)
def test_a_code_with_a_row_prints_the_row_and_its_page(
    code: str, topic: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", code]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"## {code}\n- ")
    assert words in said
    assert said.endswith(f"ckptfix help {topic}\n")


@pytest.mark.parametrize("code", ["unsafe-pickle", "unloadable-pickle"])
def test_a_code_of_check_and_doctor_prints_the_section_of_check(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", code]) == 0
    said = capsys.readouterr().out
    assert said.count(f"## {code}\n") == 1
    assert "never repaired" in said


def test_wrapping_leaves_code_and_tables() -> None:
    text = (
        "# A title that is long\n\none two three\nfour five\n- six seven eight\n  nine\n\n"
        "```text\na b c d e f g\n```\n| a | b c d e f |\n"
    )
    assert (
        wrap(text, 12)
        == "# A title that is long\n\none two\nthree four\nfive\n- six seven\n  eight nine\n\n"
        "```text\na b c d e f g\n```\n| a | b c d e f |\n\n"
    )


def test_ellipses_match_any_text() -> None:
    assert matches("a\n...\nd\n", "a\nb\nc\nd\n")
    assert matches("took ... s\n", "took 12 s\n")
    assert not matches("a ...\n", "b c\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["help"], ["explain", "doubled-model"]])
def test_the_manual_imports_no_torch(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptfix", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ckptfix.manual" in loaded
    assert not loaded & {"torch", "accelerate", "numpy"}

"""The help of the command line: groups, whole summaries, examples, suggestions, and the completion
of a shell.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import click
import pytest

from ckptfix.cli import VERBS, cli, run
from ckptfix.cli.verb_options import Verb

ROOT = Path(__file__).parents[2]
MODULES = {path.stem for path in (ROOT / "ckptfix" / "cli").glob("*.py")}
SUMMARIES = {verb: summary for group in VERBS.values() for verb, summary in group.items()}


def command(verb: str) -> click.Command:
    module = verb.replace("-", "_")
    found: click.Command = getattr(import_module(f"ckptfix.cli.{module}"), f"{module}_command")
    return found


def help_of(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    columns: int = 80,
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([*arguments, "--help"]) == 0
    return capsys.readouterr().out


def test_verbs_stand_in_groups_with_their_whole_summaries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = help_of(capsys, monkeypatch).splitlines()
    assert "..." not in "".join(line for line in lines if "Usage" not in line)
    # One screen: 24 lines with the prompt.
    assert len(lines) < 24
    assert all(f"ckptfix {verb}" in lines[-1] for verb in VERBS["Manual"])
    for group, verbs in VERBS.items():
        if group == "Manual":
            continue
        at = lines.index(f"{group}:")
        assert [line.split(maxsplit=1) for line in lines[at + 1 : at + 1 + len(verbs)]] == [
            [verb, summary] for verb, summary in verbs.items()
        ]


@pytest.mark.parametrize("verb", SUMMARIES)
def test_the_help_of_a_verb_begins_with_its_summary(verb: str) -> None:
    assert cleandoc(command(verb).help or "").partition("\n\n")[0] == SUMMARIES[verb]


def test_every_verb_is_in_a_group() -> None:
    """But for those of earlier versions, which are hidden."""
    verbs = {
        name.replace("_", "-"): getattr(
            import_module(f"ckptfix.cli.{name}"), f"{name}_command", None
        )
        for name in MODULES
    }
    assert {name for name, verb in verbs.items() if verb and not verb.hidden} == set(SUMMARIES)
    assert {name for name, verb in verbs.items() if verb and verb.hidden} == {"merge"}


@pytest.mark.parametrize("verb", sorted(set(SUMMARIES) - {"run", "help", "explain"}))
def test_every_verb_ends_with_examples_that_its_options_take(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = command(verb)
    assert isinstance(made, Verb)
    assert made.examples
    printed = help_of(capsys, monkeypatch, verb)
    options = {option for param in made.params for option in param.opts}
    for example, meaning in made.examples:
        assert f"\n  {example}\n" in printed
        assert meaning.endswith(".")
        words = example.partition(" | ")[0].split()
        assert words[:2] == ["ckptfix", verb]
        own = words[: words.index("--")] if "--" in words else words
        assert {word for word in own if word.startswith("-")} <= options | {"--nproc_per_node"}


@pytest.mark.parametrize("verb", sorted(set(SUMMARIES) - {"run", "help", "explain"}))
def test_rare_options_are_listed_with_all_and_every_option_once(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = command(verb)
    assert isinstance(made, Verb)
    options = {
        param.opts[0]
        for param in made.params
        if isinstance(param, click.Option) and not param.hidden
    }
    few = help_of(capsys, monkeypatch, verb, columns=110)
    every = help_of(capsys, monkeypatch, verb, "--all", columns=110)
    listed = [
        re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", text, re.MULTILINE) for text in (few, every)
    ]
    assert f"More options: ckptfix {verb} --help --all" in few
    assert "\nMore options:\n" in every
    assert sorted(listed[1]) == sorted({*options, "--help"})
    assert set(listed[1]) - set(listed[0]) == made.rare & options


@pytest.mark.parametrize("verb", ["run", "help", "explain"])
def test_all_is_accepted_where_no_option_is_rare(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = help_of(capsys, monkeypatch, verb)
    assert help_of(capsys, monkeypatch, verb, "--all") == few


def test_all_belongs_to_the_script_behind_it() -> None:
    made = command("prove-resume")
    context = made.make_context(
        "prove-resume", ["--steps", "3", "--", "train.py", "{dir}", "-h", "8", "--all"]
    )
    assert context.params["command"][-3:] == ("-h", "8", "--all")


@pytest.mark.parametrize("columns", [60, 80, 110])
def test_help_is_wrapped_to_the_width_of_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = command("doctor")
    assert isinstance(made, Verb)
    # A command to paste is never broken.
    commands = {f"  {example}" for example, _ in made.examples}
    printed = help_of(capsys, monkeypatch, "doctor", columns=columns)
    widest = max(len(line) for line in printed.splitlines() if line not in commands)
    assert columns - 15 < widest <= columns


def test_help_on_a_very_wide_terminal_stays_readable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(map(len, help_of(capsys, monkeypatch, "doctor", columns=300).splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chekc"], "unknown verb 'chekc'; did you mean 'check'?"),
        (["Verify", "x"], "unknown verb 'Verify'; did you mean 'verify'?"),
        (["repiar", "x"], "did you mean 'repair'?"),
        (["zzz"], "unknown verb 'zzz'\n"),
        (
            ["fixtures"],
            "missing verb: 'fixtures' is a path; next: ckptfix check fixtures\n",
        ),
        (["check", "--josn", "x"], "Did you mean '--json'?"),
        (["repair", "--dryrun", "x"], "Did you mean '--dry-run'?"),
        (["--versoin"], "'--version'"),
    ],
)
def test_what_is_mistyped_is_suggested(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def completed(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setenv("_CKPTFIX_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert run([]) == 0
    return capsys.readouterr().out.split()


def test_a_shell_completes_verbs_options_choices_and_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("ckptfix s", capsys, monkeypatch) == [
        "plain,seal",
        "plain,salvage",
        "plain,scrub",
    ]
    assert completed("ckptfix check --rec", capsys, monkeypatch) == ["plain,--recursive"]
    assert completed("ckptfix repair --keys b", capsys, monkeypatch) == ["plain,bare"]
    assert completed("ckptfix check run", capsys, monkeypatch) == ["file,run"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", "from ckptfix.__main__ import main; main()"],
        env={**os.environ, "_CKPTFIX_COMPLETE": f"{shell}_source"},
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert asked.returncode == 0
    assert f"_CKPTFIX_COMPLETE={shell}_complete" in asked.stdout


@pytest.mark.slow
def test_completing_a_verb_imports_none() -> None:
    environment = {
        **os.environ,
        "_CKPTFIX_COMPLETE": "bash_complete", "COMP_WORDS": "ckptfix ", "COMP_CWORD": "1",
    }  # fmt: skip
    asked = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptfix"],
        env=environment, capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert asked.stdout.split() == [f"plain,{verb}" for verb in SUMMARIES]
    imported = {line.rpartition("|")[2].strip() for line in asked.stderr.splitlines()}
    assert not imported & {f"ckptfix.cli.{verb}" for verb in SUMMARIES}
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert not packages & {
        "torch",
        "numpy",
        "safetensors",
        "tqdm",
        "accelerate",
    }, "a person waits for them"


def test_the_group_is_completed_by_its_own_options() -> None:
    context = click.Context(cli, info_name="ckptfix")
    assert [item.value for item in cli.shell_complete(context, "--v")] == ["--version"]

"""The command that training is started with, given as text and never run."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ckptfix.errors import UsageError

_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_NO_VALUE = frozenset({"h", "help", "q", "quiet", "m", "module"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option as it stands in a command. ``name``: without dashes, with underscores. ``value``: None without one."""

    text: str
    name: str
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command line, split where the training script stands.

    ``launcher``: "accelerate launch", or the program that it starts instead. ``before``: the launcher's options.
    ``unknown``: options before the script that this launcher has not. ``script``: the script or module, "" when there
    is none. ``after``: the options behind it.
    """

    words: tuple[str, ...]
    launcher: str
    before: tuple[Option, ...] = ()
    unknown: tuple[Option, ...] = ()
    script: str = ""
    after: tuple[Option, ...] = ()

    @property
    def is_accelerate(self) -> bool:
        """Whether ``accelerate launch`` starts it."""
        return self.launcher == "accelerate launch"

    def given(self, name: str) -> str | None:
        """Return the value that an option of the launcher was given, "" for one without, None when it is not there."""
        return next((option.value or "" for option in reversed(self.before) if option.name == name), None)


def read_launch(command: str, options: Mapping[str, bool]) -> Launch:
    """Split a command line. ``options``: those of ``accelerate launch`` -> whether a value follows; none: not known.

    Raises UsageError when the text is no command line.
    """
    words = _words(command)
    launcher, rest = _launcher(words)
    if launcher != "accelerate launch" or not options:
        return Launch(words=tuple(words), launcher=launcher, script=next(iter(_scripts(rest)), ""))
    return _split(tuple(words), rest, options)


def script_of(command: str) -> str | None:
    """Return the script that a command line names, if it is there: behind ``-m`` stands a module, and no file.

    Raises UsageError when the text is no command line.
    """
    return next((word for word in _scripts(_words(command)) if os.path.isfile(word)), None)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--launch {command!r}: {error}") from None
    while words and "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]  # variables that are set for this command
    if not words:
        raise UsageError("--launch: give the command that you start training with")
    return words


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    program = os.path.basename(words[0])
    if program == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate launch", words[2:]
    if program == "accelerate-launch":
        return "accelerate launch", words[1:]
    if program.startswith("python") and words[1:2] == ["-m"] and words[2:3] and words[2] in _MODULES:
        return "accelerate launch", words[3:] if words[2] == _MODULES[0] else words[4:]
    return program, words[1:]


def _scripts(words: list[str]) -> list[str]:
    return [word for word in words if word.endswith((".py", ".ipynb")) and not word.startswith("-")]


def _split(words: tuple[str, ...], rest: list[str], options: Mapping[str, bool]) -> Launch:
    """Find the script as the user means it.

    To accelerate launch, what follows an option that it does not know would be the script; the user means its value.
    """
    before: list[Option] = []
    unknown: list[Option] = []
    file = next(iter(_scripts(rest)), "")
    position = 0
    after_unknown = False
    while position < len(rest):
        if not rest[position].startswith("-"):
            if not (after_unknown and file and position < rest.index(file)):
                break
            position, after_unknown = position + 1, False
            continue
        option, width = _option(rest, position, options)
        after_unknown = option.name not in options and option.value is None
        (unknown if option.name not in options else before).append(option)
        position += width
    behind = rest[position + 1 :]
    return Launch(
        words=words,
        launcher="accelerate launch",
        before=tuple(before),
        unknown=tuple(unknown),
        script=rest[position] if position < len(rest) else "",
        after=tuple(_option(behind, place, {})[0] for place, word in enumerate(behind) if _is_option(word)),
    )


def _option(words: list[str], position: int, options: Mapping[str, bool]) -> tuple[Option, int]:
    """Return the option at a position, and how many words it takes."""
    text, equals, value = words[position].partition("=")
    name = text.lstrip("-").replace("-", "_")
    if equals:
        return Option(text=text, name=name, value=value), 1
    takes_value = options.get(name, False) and name not in _NO_VALUE
    if takes_value and position + 1 < len(words):
        return Option(text=text, name=name, value=words[position + 1]), 2
    return Option(text=text, name=name), 1


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit()

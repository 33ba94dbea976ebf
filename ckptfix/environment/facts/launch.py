"""The launch command, environment variables and config files that change what a launch does.
Nothing is run.

Source: ``accelerate/commands/config/config_args.py`` (1.0 to 1.15) for where the config is and what
it may hold.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.errors import UsageError

_WRAPPERS = frozenset((
    "caffeinate", "chrt", "command", "conda", "env", "exec", "hatch", "ionice", "mamba",
    "micromamba", "nice", "nohup", "numactl", "pdm", "pipenv", "poetry", "prlimit", "setsid",
    "srun", "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "unbuffer", "uv", "uvx",
    "xvfb-run",
))  # fmt: skip
"""Programs that start the command which follows their own options."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = re.compile(r"python[0-9.]*t?")
_WITH_VALUE = ("-X", "-W")
"""Options of Python that take the next word; all others are one word, and -c and -m end them."""

_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_PLAIN_STARTERS = ("env", "nohup", "time")
"""Programs that, without options, start a command in the same folder of the same machine."""

_OF_SHELL = frozenset(";&|<>()`$*?{}[]\\!#%^\n")
"""Characters with which a shell may read a command in another way than ``shlex`` does."""

_TORCHRUN = dict.fromkeys((
    "duplicate_stderr_filters", "duplicate_stdout_filters", "event_log_handler", "local_addr",
    "local_ranks_filter", "log_dir", "logs_specs", "master_addr", "master_port", "max_restarts",
    "monitor_interval", "nnodes", "node_rank", "nproc_per_node", "numa_binding", "r",
    "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "redirects", "role",
    "signals_to_handle", "start_method", "t", "tee",
), True) | {"standalone": False}  # fmt: skip
_DEEPSPEED = dict.fromkeys(("master_addr", "master_port", "num_gpus", "num_nodes"), True)
LAUNCHERS = {"torchrun": _TORCHRUN, "deepspeed": _DEEPSPEED}
"""Launcher -> its options in front of a file of this machine -> whether a value follows."""

_NOT_FILES = frozenset({"h", "help", "m", "module", "no_python", "tpu", "tpu_use_cluster"})
"""Options of ``accelerate launch`` in front of something else than a file of this machine."""

_PYTHON_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+|-[XW].+")
_PYTHON_VALUES = (*_WITH_VALUE, "--check-hash-based-pycs")

_NO_VALUE = frozenset({"h", "help", "q", "quiet", "m", "module"})


class Option(Struct, frozen=True, kw_only=True):
    """An option of a command. ``name``: without dashes, with underscores. ``value``: None without
    one.
    """

    text: str
    name: str
    value: str | None = None


class Launch(Struct, frozen=True, kw_only=True):
    """A command line, split at the training script.

    ``launcher``: "accelerate launch", or the program that it starts instead. ``prefix``: the words
    before it, which set variables or start it (``nohup``, ``uv run``); ``variables``: what they
    set. ``before``: the launcher's options. ``unknown``: options before the script that this
    launcher has not. ``script``: the script or module, "" when there is none. ``after``: the
    options behind it. ``is_plain``: its paths are certainly those of this folder and machine.
    ``file``: the file that it certainly starts, "" where that is not certain.
    """

    words: tuple[str, ...]
    launcher: str
    before: tuple[Option, ...] = ()
    unknown: tuple[Option, ...] = ()
    script: str = ""
    after: tuple[Option, ...] = ()
    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    is_plain: bool = False
    file: str = ""

    @property
    def is_accelerate(self) -> bool:
        """Return whether ``accelerate launch`` starts it."""
        return self.launcher == "accelerate launch"

    @property
    def is_python(self) -> bool:
        """Return whether Python itself starts a script, and no module such as
        ``torch.distributed.run``.
        """
        rest = _behind_python(list(self.words[1:]))
        return bool(_PYTHON.fullmatch(self.launcher)) and bool(rest) and not rest[0].startswith("-")

    def given(self, name: str) -> str | None:
        """Return the value of an option of the launcher, "" for one without a value, None for an
        absent option.
        """
        return next(
            (option.value or "" for option in reversed(self.before) if option.name == name), None
        )


def read_launch(command: str, options: Mapping[str, bool]) -> Launch:
    """Split a command line. ``options``: those of ``accelerate launch`` -> whether a value follows;
    none: not known.

    Raises UsageError when the text is not a command line.
    """
    prefix, words = _words(command)
    launcher, rest = _launcher(words)
    variables = _variables(prefix)
    # torchrun takes PET_MODULE=1 for --module.
    is_sure = not any(name.startswith("PET_") for name in (*os.environ, *variables))
    if launcher != "accelerate launch" or not options:
        found = Launch(words=tuple(words), launcher=launcher, script=next(iter(_scripts(rest)), ""))
    else:
        found = _split(tuple(words), rest, options)
    return replace(
        found,
        prefix=tuple(prefix),
        variables=variables,
        is_plain=_is_plain(_joined(command), prefix, words),
        file=_file(launcher, rest, options) if is_sure else "",
    )


def variables_of(command: str) -> dict[str, str]:
    """Return the variables that a command line sets for the command in it.

    Raises UsageError when the text is not a command line.
    """
    return _variables(_words(command)[0])


def script_of(command: str) -> str | None:
    """Return the script that a command line names, if it exists: after ``-m`` comes a module, not a
    file.

    Raises UsageError when the text is not a command line.
    """
    paths = map(expanded, _scripts(_words(command)[1]))
    return next((path for path in paths if os.path.isfile(path)), None)


def expanded(word: str) -> str:
    """Return a word of a command line with its home folder and variables in place, as far as these
    are set here.
    """
    return os.path.expanduser(os.path.expandvars(word))


def missing_script(launch: Launch) -> str:
    """Return the script of a command that Python would not find, "" where it exists or it is not
    certain which file it is.
    """
    file = launch.file
    # ~+ and ~- are folders of a shell.
    is_ours = launch.is_plain and file.endswith(".py") and not re.match("~[^/]", file)
    return file if is_ours and not os.path.exists(expanded(file)) else ""


def _is_plain(command: str, prefix: list[str], words: list[str]) -> bool:
    """Return whether a command's paths are certainly those of this folder and machine: no shell
    expands, redirects or chains anything, and no container or scheduler starts it.
    """
    return (
        _OF_SHELL.isdisjoint(command.strip())
        and _is_launcher(words)
        and (not os.path.dirname(words[0]) or os.path.isfile(expanded(words[0])))
        and all(
            _VARIABLE.match(word) or os.path.basename(word) in _PLAIN_STARTERS for word in prefix
        )
    )


def _file(launcher: str, rest: list[str], options: Mapping[str, bool]) -> str:
    """Return the first word that is not an option or its value, "" after an option that is not
    known, or behind which no file of this machine follows.
    """
    is_python = bool(_PYTHON.fullmatch(launcher))
    known = options if launcher == "accelerate launch" else LAUNCHERS.get(launcher)
    if known is None and not is_python:
        return ""
    place = 0
    while place < len(rest) and rest[place].startswith("-"):
        word = rest[place]
        if is_python:
            if word not in _PYTHON_VALUES and not _PYTHON_FLAGS.fullmatch(word):
                return ""
            place += 2 if word in _PYTHON_VALUES else 1
            continue
        option, width = _option(rest, place, known or {})
        if option.name not in (known or {}) or option.name in _NOT_FILES:
            return ""
        place += width
    return rest[place] if place < len(rest) else ""


def _joined(command: str) -> str:
    """Return a command on one line, where a backslash ends its lines."""
    return re.sub(r"\\\r?\n", "", command)


def _words(command: str) -> tuple[list[str], list[str]]:
    """Return the words before the launcher, and those from it on."""
    try:
        words = shlex.split(_joined(command))
    except ValueError as error:
        raise UsageError(f"--launch {command!r}: {error}") from None
    start = next(
        (place for place, word in enumerate(words) if not _VARIABLE.match(word)), len(words)
    )
    if start == len(words):
        raise UsageError("--launch: expected the command that starts training")
    if os.path.basename(words[start]) in _WRAPPERS:
        behind = (
            place
            for place in range(start + 1, len(words))
            if words[place - 1] not in ("-p", "--python")
        )
        start = next((place for place in behind if _is_launcher(words[place:])), start)
    return words[:start], words[start:]


def _is_launcher(words: list[str]) -> bool:
    program = os.path.basename(words[0])
    if program == "accelerate":
        return words[1:2] == ["launch"]
    return program in ("accelerate-launch", "torchrun", "deepspeed") or bool(
        _PYTHON.fullmatch(program)
    )


def _variables(prefix: list[str]) -> dict[str, str]:
    """Return the assignments that lead a command line, and those behind ``env``."""
    found: dict[str, str] = {}
    counts = True
    for word in prefix:
        is_set = bool(_VARIABLE.match(word))
        counts = (
            (counts and is_set)
            or os.path.basename(word) == "env"
            or (counts and word.startswith("-"))
        )
        if is_set and counts:
            name, _, value = word.partition("=")
            found[name] = value
    return found


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    program = os.path.basename(words[0])
    if program == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate launch", words[2:]
    if program == "accelerate-launch":
        return "accelerate launch", words[1:]
    rest = _behind_python(words[1:]) if _PYTHON.fullmatch(program) else words[1:]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
        return "accelerate launch", rest[2:] if rest[1] == _MODULES[0] else rest[3:]
    return program, words[1:]


def _behind_python(words: list[str]) -> list[str]:
    """Return the words from ``-m`` or the script on, without Python's own options."""
    place = 0
    while (
        place < len(words)
        and words[place].startswith("-")
        and words[place] not in ("-m", "-c", "-")
    ):
        place += 2 if words[place] in _WITH_VALUE else 1
    return words[place:]


def _scripts(words: list[str]) -> list[str]:
    return [word for word in words if word.endswith((".py", ".ipynb")) and not word.startswith("-")]


def _split(words: tuple[str, ...], rest: list[str], options: Mapping[str, bool]) -> Launch:
    """Find the script as the user means it.

    To accelerate launch, what follows an option that it does not know would be the script; the user
    means its value.
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
        after=tuple(
            _option(behind, place, {})[0] for place, word in enumerate(behind) if _is_option(word)
        ),
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


VARIABLES = (
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "HF_HOME",
    "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL",
    "NCCL_IB_DISABLE", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "CC", "CXX", "CUDA_HOME", "CUDA_PATH",
)  # fmt: skip
"""The only variables that are read; their values appear in ``--json``."""

_MAX_FILE = 1 << 20


class AccelerateConfig(Struct, frozen=True, kw_only=True):
    """The config that ``accelerate launch`` would read.

    ``path``: where it looks. ``asked``: the path was given on the command line. ``exists``: a file
    is there. ``problem``: why it could not be read, "" when it could. ``is_broken``: accelerate
    cannot read it either. ``values``: what it holds.
    """

    path: str
    asked: bool = False
    exists: bool = False
    problem: str = ""
    is_broken: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distributed_type(self) -> str:
        """The distributed type in upper case, "" when none is given."""
        return str(self.values.get("distributed_type", "")).upper()


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``VARIABLES`` that are set."""
    return {name: environment[name] for name in VARIABLES if name in environment}


def default_config_path(environment: Mapping[str, str]) -> str:
    """Return the path where accelerate looks for its config by default."""
    cache = environment.get("XDG_CACHE_HOME", os.path.join(environment.get("HOME", "~"), ".cache"))
    home = os.path.expanduser(environment.get("HF_HOME", os.path.join(cache, "huggingface")))
    return os.path.join(home, "accelerate", "default_config.yaml")


def read_config(environment: Mapping[str, str], given: str | None = None) -> AccelerateConfig:
    """Return accelerate's config: the one at ``given``, else the one that it finds by itself."""
    path = expanded(given) if given is not None else default_config_path(environment)
    asked = given is not None
    if not os.path.isfile(path):
        return AccelerateConfig(path=path, asked=asked)
    values, problem, is_broken = _parse(Path(path))
    return AccelerateConfig(
        path=path, asked=asked, exists=True, problem=problem, is_broken=is_broken, values=values
    )


def _parse(path: Path) -> tuple[Mapping[str, Any], str, bool]:
    """Return the settings in a config, why there are none, and whether that is the file's fault."""
    try:
        # Comes with accelerate, which cannot read the file without it either.
        yaml = import_module("yaml")
    except ImportError:
        return {}, "PyYAML is not installed", False
    try:
        if path.stat().st_size > _MAX_FILE:
            why = f"it is too large: {path.stat().st_size} bytes (at most {_MAX_FILE})"
            return {}, why, False
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", True
    if not isinstance(values, dict):
        return {}, "it contains no settings", True
    return {str(key): value for key, value in values.items()}, "", False

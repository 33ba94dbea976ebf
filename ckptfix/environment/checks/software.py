"""Python, packages, commands and compilers."""

import os
from collections.abc import Iterator

from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.installed import Version, release
from ckptfix.storage.paths import shell_path

_COMPILERS = ("c++", "g++", "clang++")


@topic("accelerate-not-installed", "accelerate is not installed in this Python", ERROR)
def not_installed(facts: Facts) -> Iterator[Said]:
    """Yield advice where accelerate is not installed next to ckptfix."""
    if "accelerate" not in facts.software.packages:
        yield say(
            "accelerate is not installed in this Python",
            evidence=(f"{facts.software.executable} has no package with this name",),
            fix=f"{shell_path(facts.software.executable)} -m pip install accelerate",
        )


@topic(
    "accelerate-not-on-path",
    "accelerate is installed, but there is no `accelerate` command on the PATH",
    WARNING,
)
def not_on_path(facts: Facts) -> Iterator[Said]:
    """Installed, but its command cannot be found."""
    if "accelerate" in facts.software.packages and facts.software.command is None:
        yield say(
            "accelerate is installed, but its command is not on the PATH",
            evidence=(
                (
                    f"the command is {facts.software.next_to_python}"
                    if facts.software.next_to_python
                    else "the command is not next to this Python either"
                ),
            ),
            fix=(
                f"{_add(facts)}{shell_path(facts.software.executable)} -m "
                "accelerate.commands.launch SCRIPT"
            ),
        )


@topic(
    "accelerate-of-other-python",
    "the `accelerate` command on the PATH starts a different Python",
    WARNING,
)
def other_python(facts: Facts) -> Iterator[Said]:
    """Two environments: what is installed here is not what the command uses."""
    command = facts.software.command
    if command is not None and not command.is_ours:
        yield say(
            f"the accelerate command on the PATH starts {command.interpreter}, not "
            f"{facts.software.executable}",
            evidence=(f"the first line of {command.path} names {command.interpreter}",),
            fix=f"{shell_path(facts.software.executable)} -m accelerate.commands.launch SCRIPT",
        )


@topic(
    "python-too-old", "a package needs a newer Python (accelerate 1.11.0 and later: 3.10)", ERROR
)
def python_too_old(facts: Facts) -> Iterator[Said]:
    """Compare what each package requires with this Python and that of the command."""
    pythons = [(facts.software.executable, facts.software.python)]
    if facts.software.command is not None and facts.software.command.python:
        pythons.append((facts.software.command.interpreter, facts.software.command.python))
    for path, version in dict.fromkeys(pythons):
        refusing = [
            package
            for package in facts.software.packages.values()
            if version < (least := _least(package.requires_python))
            and version != least[: len(version)]
        ]
        if refusing:
            needs = ", ".join(
                f"{package.name} needs {package.requires_python}" for package in refusing
            )
            yield say(
                f"{path} is Python {_dotted(version)}, but {needs}",
                evidence=tuple(
                    f"{package.name} {package.version} has Requires-Python: "
                    f"{package.requires_python}"
                    for package in refusing
                ),
                fix=(
                    "use a newer Python, or older packages: accelerate 1.10 is the last version "
                    "for Python 3.9"
                ),
            )


@topic(
    "no-compiler",
    "a compiler or Python's headers are missing: extensions cannot be built (DeepSpeed, "
    "torch.compile)",
    WARNING,
    NOTE,
)
def no_compiler(facts: Facts) -> Iterator[Said]:
    """Look for what builds extensions: a C++ compiler and Python's headers, for CUDA nvcc as
    well.
    """
    software = facts.software
    missing = []
    if not any(name in software.compilers for name in _COMPILERS) and "CXX" not in facts.variables:
        missing.append("a C++ compiler (c++, g++ or clang++)")
    if not software.has_python_headers:
        missing.append("Python's headers (Python.h)")
    needs = [name for name in ("deepspeed", "flash_attn") if name in software.packages]
    places = facts.script.uses.builds if facts.script is not None else ()
    home = facts.variables.get("CUDA_HOME") or facts.variables.get("CUDA_PATH")
    is_cuda = facts.torch.count and any(build.startswith("cuda") for build in facts.torch.builds)
    if needs and is_cuda and "nvcc" not in software.compilers and not home:
        missing.append("CUDA's compiler (nvcc)")
    if not missing:
        return
    yield say(
        f"missing: {', '.join(missing)}",
        severity=WARNING if needs or places else NOTE,
        evidence=(
            *(f"{name} is installed and may build its kernels on first use" for name in needs),
            *(str(place) for place in places),
            f"found on the PATH: {', '.join(software.compilers) or 'no compiler'}",
        ),
        fix=(
            "install a compiler: apt-get install build-essential python3-dev, or conda install "
            "-c conda-forge gxx"
        ),
    )


def _add(facts: Facts) -> str:
    folder = os.path.dirname(facts.software.next_to_python)
    return f'export PATH={shell_path(folder)}:"$PATH", or ' if folder else ""


def _least(requires: str) -> Version:
    """Return the least Python that a Requires-Python allows, () when it names none."""
    bounds = [part.strip()[2:] for part in requires.split(",") if part.strip().startswith(">=")]
    return max((release(bound.strip()) for bound in bounds), default=())


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)

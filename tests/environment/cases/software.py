"""Python, packages, commands and compilers."""

from msgspec.structs import replace

from ckptfix.environment.facts.installed import Command, Package
from tests.environment.building import PACKAGES, facts, script, with_software, with_torch
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

DEEPSPEED = {**PACKAGES, "deepspeed": Package(name="deepspeed", version="0.18")}
NEEDS_NVCC = with_software(facts(1), packages=DEEPSPEED)

SOFTWARE = (
    Case("accelerate-not-installed", "missing", with_software(facts(), packages={}), ERROR),
    Case("accelerate-not-installed", "there", facts(), None),
    Case("accelerate-not-on-path", "missing", with_software(facts(), command=None), WARNING),
    Case("accelerate-not-on-path", "there", facts(), None),
    Case(
        "accelerate-not-on-path",
        "not installed either",
        with_software(facts(), command=None, packages={}),
        None,
    ),
    Case(
        "accelerate-of-other-python",
        "other",
        with_software(
            facts(),
            command=Command(
                path="/usr/bin/accelerate", interpreter="/usr/bin/python3", is_ours=False
            ),
        ),
        WARNING,
    ),
    Case("accelerate-of-other-python", "ours", facts(), None),
    Case("python-too-old", "this", with_software(facts(), python=(3, 9, 18)), ERROR),
    Case(
        "python-too-old",
        "the command's",
        with_software(
            facts(),
            command=Command(
                path="/a", interpreter="/usr/bin/python3.8", python=(3, 8), is_ours=False
            ),
        ),
        ERROR,
    ),
    Case("python-too-old", "3.10 is enough", with_software(facts(), python=(3, 10, 0)), None),
    Case("no-compiler", "nothing needs it", with_software(facts(), compilers={}), NOTE),
    Case(
        "no-compiler",
        "deepspeed needs it",
        with_software(
            facts(),
            compilers={},
            packages=DEEPSPEED,
        ),
        WARNING,
    ),
    Case(
        "no-compiler",
        "torch.compile needs it",
        replace(
            with_software(facts(), has_python_headers=False),
            script=script("import torch\ntorch.compile(model)"),
        ),
        WARNING,
    ),
    Case(
        "no-compiler",
        "nvcc for deepspeed",
        with_software(facts(1), packages=DEEPSPEED),
        WARNING,
    ),
    Case("no-compiler", "there", facts(), None),
    Case(
        "no-compiler",
        "CXX",
        replace(with_software(facts(), compilers={}), variables={"CXX": "/opt/g++"}),
        None,
    ),
    Case(
        "python-too-old",
        "the command's is not known",
        with_software(facts(), command=Command(path="/a", interpreter="/b", is_ours=False)),
        None,
    ),
    Case(
        "python-too-old",
        "known by two numbers",
        with_software(
            facts(), command=Command(path="/a", interpreter="/b", python=(3, 10), is_ours=False)
        ),
        None,
    ),
    *(
        Case(
            "no-compiler",
            f"nvcc by {name}",
            replace(NEEDS_NVCC, variables={name: "/usr/local/cuda"}),
            None,
        )
        for name in ("CUDA_HOME", "CUDA_PATH")
    ),
    Case(
        "no-compiler",
        "nvcc on the PATH",
        with_software(NEEDS_NVCC, compilers={"g++": "/g++", "nvcc": "/nvcc"}),
        None,
    ),
    Case("no-compiler", "no nvcc for AMD", with_torch(NEEDS_NVCC, builds=("hip 6.2",)), None),
    Case("no-compiler", "no nvcc without a GPU", with_torch(NEEDS_NVCC, devices=()), None),
    Case("no-compiler", "nothing needs nvcc", with_software(NEEDS_NVCC, packages=PACKAGES), None),
)

"""Building the simulated devices: a library of C++, made once for each torch and kept among the
temporary files.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
OLDEST = (2, 13)
"""The first torch whose C++ has all that the sources use, as far as was tried."""

COMPILERS = ("g++", "c++", "clang++")
PATIENCE = 300.0
"""Seconds for one source file; the whole build takes about 15 on two cores."""


def compiler() -> str | None:
    """Return the C++ compiler: the one that CXX names, else the first of the usual names that is
    there.
    """
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], *COMPILERS):
        found = shutil.which(name)
        if found is not None:
            return found
    return None


def why_not() -> str:
    """Return why CUDA devices cannot be simulated here; empty if they can."""
    import torch

    if torch.backends.cuda.is_built() or torch.version.hip is not None:
        return (
            "the simulator needs a torch that is built for the CPU only: it takes the place of CUDA"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return (
            f"the simulator is written in the C++ of torch {OLDEST[0]}.{OLDEST[1]}, and this is "
            f"{torch.__version__}"
        )
    if compiler() is None:
        return (
            f"no C++ compiler: the simulator needs one of {', '.join(COMPILERS)}, or the "
            "variable CXX"
        )
    return ""


def built() -> Path:
    """Return the library for this torch, this compiler and these sources; build it if nobody has.

    Several processes may ask at once: one builds, the others wait. RuntimeError, with the
    compiler's words, if it cannot be built.
    """
    program = compiler()
    if program is None:
        raise RuntimeError(why_not())
    folder = _private_folder()
    library = folder / f"devices-{_digest(program)}.so"
    if not library.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(program, library)
    return library


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"ckptfix-simulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise RuntimeError(
            f"{folder}: others can write here, and code from it would run; remove it"
        )
    return folder


def _options() -> list[str]:
    import torch

    include = Path(torch.__file__).parent / "include"
    return [
        "-std=c++20", "-O1", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
    ]  # fmt: skip


def _digest(program: str) -> str:
    import torch

    digest = hashlib.sha256()
    for part in (torch.__version__, torch.__file__, program, *_options()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(program: str, library: Path) -> None:
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        work = Path(name)

        def compiled(source: Path) -> str:
            made = str(work / f"{source.stem}.o")
            _run([program, *_options(), "-c", str(source), "-o", made])
            return made

        # The largest first, so that the last to finish is a small one.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            objects = list(workers.map(compiled, sources))
        linked = work / "devices.so"
        where = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
        _run([program, "-shared", "-o", str(linked), *objects, *where])
        linked.replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")

"""Changing the format of a checkpoint, against copying the same bytes, and against the peers that
convert it, too.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.benchmarks.making import measure, names, write_safetensors
from tests.benchmarks.printing import show
from tests.benchmarks.zero import zero

_COPY = "cp {source} {target} && sync {target}"
_PYTHON_SUMS = """
import hashlib, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
"""

_LIMIT = 300e6
"""Bytes of memory above the largest tensor."""

Peer = tuple[str, tuple[str, str], str, str]
"""Its name, what it converts from and to, its imports, and what is measured."""


def migrate(folder: Path, size: int, rounds: int) -> None:
    """Every conversion with and without its proof, each beside the plain copy of its moment; then
    the peers.
    """
    files = _make(folder, size)
    sums = {
        name: _seconds(_sums(name), files["bin"], folder / "copy")
        for name in ("sha256sum", "hashlib")
    }
    # Coreutils may not know the processor's own instructions.
    best = min(sums, key=lambda name: sums[name])
    print(f"{size >> 20} MiB; sums by {best}: {size / sums[best] / 1e9:.2f} GB/s with cp and sync")
    ours: dict[tuple[str, str], float] = {}
    for source in files:
        for to in files:
            ours[source, to] = _pair(folder, files, source, to, _sums(best), size, rounds)
    _converted(folder, files["safetensors"], rounds)
    _peers(folder, files, ours, rounds)
    for path in files.values():
        _remove(path)
    zero(folder, 256 << 20, rounds)


def migrate_mix(folder: Path, size: int) -> None:
    """A folder of many shards, every fourth of them full of numbers and the others holes: memory,
    proof included.
    """
    source = folder / "mix"
    source.mkdir()
    shards = [source / f"model-{number:05}-of-00010.safetensors" for number in range(1, 11)]
    weight_map: dict[str, str] = {}
    for number, path in enumerate(shards):
        prefix = f"part{number}."
        write_safetensors(path, size // len(shards), prefix, sparse=bool(number % 4))
        weight_map |= dict.fromkeys(names(prefix), path.name)
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    )
    for to in ("safetensors", "bin", "dcp"):
        used = _ours(source, folder / "out", to, "max_shard_size='3GB', verify=True")
        peak = used["peak"] - used["start"]
        show(
            f"migrate {size >> 30} GiB of holes and numbers to {to}, memory",
            f"{peak / 1e6:.0f} MB above start-up, {used['seconds']:.0f} s with its proof",
            "< 300 MB",
            peak < _LIMIT,
        )
        _remove(folder / "out")
    _remove(source)


def _make(folder: Path, size: int) -> dict[str, Path]:
    """Write the same bf16 model as safetensors, a torch zip file and a DCP folder."""
    files = {
        "safetensors": folder / "model.safetensors",
        "bin": folder / "model.bin",
        "dcp": folder / "dcp",
    }
    each = size // len(names("")) // 2
    measure(
        "import torch; from safetensors.torch import save_file; import "
        "torch.distributed.checkpoint as dcp\nimport warnings; warnings.simplefilter('ignore')",
        f"block = torch.randint(-2**15, 2**15, ({each},), "
        "dtype=torch.int16).view(torch.bfloat16)\nstate = {name: block.roll(number) for number, "
        f"name in enumerate({names('')!r})}}\nsave_file(state, {str(files['safetensors'])!r}, "
        "metadata={'format': 'pt'})\ntorch.save(state, "
        f"{str(files['bin'])!r})\ndcp.save({{'model': state}}, "
        f"checkpoint_id={str(files['dcp'])!r}, no_dist=True)\nimport os; os.sync()",
    )
    return files


def _pair(
    folder: Path, files: dict[str, Path], source: str, to: str, sums: str, size: int, rounds: int
) -> float:
    """Print both ratios of one conversion, and return its seconds without a proof."""
    target = folder / f"out{files[to].suffix}"
    found: dict[str, list[float]] = {"cp": [], "plain": [], "sums": [], "proved": []}
    peak = 0.0
    for _ in range(rounds):
        for name, command in (("cp", _COPY), ("sums", sums)):
            found[name].append(_seconds(command, files["bin"], folder / "copy"))
            used = _ours(files[source], target, to, f"verify={name == 'sums'}")
            found["proved" if name == "sums" else "plain"].append(used["seconds"])
            peak = max(peak, used["peak"] - used["start"])
            _remove(target)
    seconds = {name: median(times) for name, times in found.items()}
    for name, peer, words in (
        ("plain", "cp", "cp, sync"),
        ("proved", "sums", "cp, sync, sha256 of both"),
    ):
        ratio = seconds[peer] / seconds[name]
        show(
            f"migrate {source} to {to}, against {words}",
            f"{ratio:.2f}x ({size / seconds[name] / 1e9:.2f} GB/s)",
            ">= 0.8x",
            ratio >= 0.8,
        )
    show(
        f"migrate {source} to {to}, memory",
        f"{peak / 1e6:.0f} MB above start-up",
        "< 300 MB",
        peak < _LIMIT,
    )
    return seconds["plain"]


def _converted(folder: Path, path: Path, rounds: int) -> None:
    """To another dtype: twice the bytes are written."""
    copies, times = [], []
    for _ in range(rounds):
        copies.append(_seconds(_COPY, path, folder / "copy"))
        times.append(
            _ours(path, folder / "out.safetensors", "safetensors", "verify=False, dtype='fp32'")[
                "seconds"
            ]
        )
        _remove(folder / "out.safetensors")
    ratio = 2 * median(copies) / median(times)
    show(
        "migrate bf16 to fp32, against cp, sync of as many bytes",
        f"{ratio:.2f}x",
        ">= 0.8x",
        ratio >= 0.8,
    )


def _peers(
    folder: Path, files: dict[str, Path], ours: dict[tuple[str, str], float], rounds: int
) -> None:
    """What others take for the same conversion, to a file that is as durable."""
    out = folder / "peer"
    binary, dcp, safe = (str(files[kind]) for kind in ("bin", "dcp", "safetensors"))
    cases: tuple[Peer, ...] = (
        ("torch.load and save_file", ("bin", "safetensors"), "import torch; from safetensors.torch import save_file",
         f"save_file(torch.load({binary!r}), '{out}/m.safetensors')"),
        ("load_file and torch.save", ("safetensors", "bin"), "import torch; from safetensors.torch import load_file",
         f"torch.save(load_file({safe!r}), '{out}/m.bin')"),
        ("transformers save_pretrained", ("bin", "safetensors"),
         "import torch; from transformers import GPT2Config, GPT2Model",
         "GPT2Model(GPT2Config(n_layer=1, n_embd=12)).save_pretrained("
         f"{str(out)!r}, state_dict=torch.load({binary!r}))"),
        ("accelerate merge-weights", ("dcp", "safetensors"),
         "from accelerate.utils import merge_fsdp_weights", f"merge_fsdp_weights({dcp!r}, {str(out)!r})"),
        ("dcp_to_torch_save", ("dcp", "bin"),
         "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
         f"dcp_to_torch_save({dcp!r}, '{out}/m.bin')"),
        ("torch_save_to_dcp", ("bin", "dcp"),
         "from torch.distributed.checkpoint.format_utils import torch_save_to_dcp",
         f"torch_save_to_dcp({binary!r}, {str(out)!r})"),
    )  # fmt: skip
    against_peers("migrate", cases, ours, out, rounds)


def against_peers(
    verb: str, cases: Sequence[Peer], ours: dict[tuple[str, str], float], out: Path, rounds: int
) -> None:
    """Print what peers take that write into ``out``, against the seconds that ckptfix takes for the
    same pair.
    """
    quiet = "import warnings, logging; warnings.simplefilter('ignore'); logging.disable()"
    sync = (
        "from ckptfix.storage.atomic import sync_tree; import pathlib; "
        f"sync_tree(pathlib.Path({str(out)!r}))"
    )
    for what, pair, imports, body in cases:
        times, peak = [], 0.0
        for _ in range(rounds):
            out.mkdir()
            used = measure(f"{quiet}\n{imports}", f"{body}\n{sync}")
            times.append(used["seconds"])
            peak = max(peak, used["peak"] - used["start"])
            _remove(out)
        ratio = median(times) / ours[pair]
        show(
            f"{verb} {' to '.join(pair)}, against {what}",
            f"{ratio:.2f}x (it takes {peak / 1e6:.0f} MB)",
            "> 1x",
            ratio > 1,
        )


def _ours(source: Path, target: Path, to: str, options: str) -> dict[str, float]:
    return measure(
        "from ckptfix.conversion.migrate import migrate",
        f"migrate({str(source)!r}, {str(target)!r}, to={to!r}, {options})",
    )


def _sums(tool: str) -> str:
    """Return the command that copies and sums up both sides, with coreutils or with python's
    hashlib.
    """
    summed = "sha256sum {source} {target}"
    if tool == "hashlib":
        summed = f"{sys.executable} -c '{_PYTHON_SUMS}' {{source}} {{target}}"
    return f"{_COPY} && {summed}"


def _seconds(command: str, source: Path, target: Path) -> float:
    begin = perf_counter()
    line = command.format(source=source, target=target)
    subprocess.run(["sh", "-c", line], stdout=subprocess.DEVNULL, check=True)
    seconds = perf_counter() - begin
    _remove(target)
    return seconds


def copied_in(source: Path, target: Path, *, with_sums: bool = False) -> float:
    """Return the seconds in which a folder is copied to the disk. ``with_sums``: and both are
    summed up.
    """
    sums = f"{sys.executable} -c '{_PYTHON_SUMS}' $(find {{source}} {{target}} -type f)"
    command = "cp -r {source} {target} && sync $(find {target} -type f)" + f" && {sums}" * with_sums
    return _seconds(command, source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

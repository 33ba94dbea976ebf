"""Renaming against load -> rename -> save of the same file."""

import zipfile
from pathlib import Path
from statistics import median

from tests.benchmarks.making import measure, names, write_safetensors
from tests.benchmarks.printing import show

OURS = ("from ckptfix import repair, undo; import ckptfix.repairs.repair", "repair({path!r})")


def rename(folder: Path, size: int) -> None:
    """Rename a safetensors file and a torch zip file of ``size`` bytes, and the same by loading and
    saving.
    """
    path = folder / "model.safetensors"
    header = write_safetensors(path, size, "module.module.")
    ours = measure(OURS[0], OURS[1].format(path=str(path)))
    naive = measure(
        "import os; from safetensors.torch import load_file, save_file",
        f"tensors = load_file({str(path)!r})\nsave_file({{k.removeprefix('module.'): v for k, v in "
        f"tensors.items()}}, {str(path) + '.new'!r})\nfd = os.open({str(path) + '.new'!r}, "
        f"os.O_RDONLY); os.fsync(fd)\nos.replace({str(path) + '.new'!r}, {str(path)!r})",
    )
    _report("safetensors", size, header, ours, naive)
    path.unlink()
    path = folder / "model.bin"
    _save_zip(path, size)
    with zipfile.ZipFile(path) as archive:
        pickle = archive.getinfo("model/data.pkl").file_size
    ours = measure(OURS[0], OURS[1].format(path=str(path)))
    naive = measure(
        "import os, torch",
        f"tensors = torch.load({str(path)!r}, mmap=True)\ntorch.save({{k.removeprefix('module.'): "
        f"v for k, v in tensors.items()}}, {str(path) + '.new'!r})\nfd = "
        f"os.open({str(path) + '.new'!r}, os.O_RDONLY); "
        f"os.fsync(fd)\nos.replace({str(path) + '.new'!r}, {str(path)!r})",
    )
    _report("torch zip", size, pickle, ours, naive)
    path.unlink()


def sparse(folder: Path) -> None:
    """A sparse file of 1 TB against one of 1 GB with the same tensors."""
    times: dict[int, list[float]] = {1 << 30: [], 1 << 40: []}
    for _ in range(5):
        for size, seconds in times.items():
            path = folder / "model.safetensors"
            write_safetensors(path, size, "module.module.", sparse=True)
            seconds.append(measure(OURS[0], OURS[1].format(path=str(path)))["seconds"])
            path.unlink()
    small, large = median(times[1 << 30]), median(times[1 << 40])
    show(
        "rename, sparse 1 TB against 1 GB",
        f"{large / small:.2f}x ({large * 1e3:.0f} ms)",
        "<= 1.5x",
        large <= 1.5 * small,
    )


def _report(
    kind: str, size: int, metadata: int, ours: dict[str, float], naive: dict[str, float]
) -> None:
    ratio = naive["seconds"] / ours["seconds"]
    label = f"rename {kind} {size / (1 << 30):.0f} GiB"
    show(
        f"{label}, against load and save",
        f"{ratio:.0f}x ({ours['seconds'] * 1e3:.1f} ms)",
        ">= 100x",
        ratio >= 100,
    )
    show(f"{label}, peak memory", f"{ours['peak'] / 1e6:.0f} MB", "< 60 MB", ours["peak"] < 60e6)
    part = ours["written"] / metadata
    show(
        f"{label}, bytes written / metadata",
        f"{part:.2f} ({ours['written']:.0f} B)",
        "< 4",
        part < 4,
    )


def _save_zip(path: Path, size: int) -> None:
    keys = names("module.module.")
    measure(
        "import torch, os",
        f"block = torch.randint(0, 255, ({size // len(keys)},), dtype=torch.uint8)\n"
        f"torch.save({{key: block.clone() for key in {keys!r}}}, {str(path)!r})\n"
        f"fd = os.open({str(path)!r}, os.O_RDONLY); os.fsync(fd)",
    )

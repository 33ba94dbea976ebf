"""Short forms for tests of rules: an Accelerator of a process of its own, settings of a JSON file,
and what a check tells of a folder.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from ckptfix import check


def new_accelerator(**options: Any) -> Accelerator:
    """Return an Accelerator on the CPU, as the first one of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def edit_json(path: Path, *removed: str, **changes: object) -> None:
    """Change settings in a file, and remove some."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: settings[key] for key in settings if key not in removed}))


def told(root: Path | str) -> list[tuple[str, str]]:
    """Return severity and sentence of each finding."""
    return [(finding.severity.value, str(finding)) for finding in check(root).all_findings]


def verdict(root: Path | str) -> list[tuple[str, str]]:
    """Return code and severity of each finding."""
    return [(finding.code, finding.severity.value) for finding in check(root).findings]


def problems(root: Path | str) -> list[str]:
    """Return the sentences of errors and warnings."""
    return [sentence for severity, sentence in told(root) if severity != "note"]


def small_unet(**settings: Any) -> Any:
    """Return a UNet of diffusers with one block on each way."""
    import diffusers

    torch.manual_seed(0)
    kind: Any = diffusers.UNet2DModel
    return kind(**{
        "sample_size": 8, "block_out_channels": (4,), "norm_num_groups": 2, "layers_per_block": 1,
        "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",),
        "add_attention": False, **settings,
    })  # fmt: skip


Change = Callable[[Path], object]
"""A change of a file or folder."""


def as_broken_link(path: Path) -> None:
    """Put a link to a file that does not exist in the place of a file."""
    path.unlink()
    path.symlink_to("../blobs/gone")


def _as_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


NOWHERE: Mapping[str, tuple[Change, str]] = {
    "a broken link": (as_broken_link, "a broken link: ../blobs/gone does not exist"),
    "a link to itself": (_as_link_to_itself, "a symbolic link that leads to itself"),
    "a folder": (_as_folder, "a folder"),
}
"""Ways in which a name can lead to no file, and the words about each."""

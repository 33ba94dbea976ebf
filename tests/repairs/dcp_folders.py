"""DCP folders for tests: copies of the fixtures, changes by torch's own classes, and what torch
loads from them.
"""

import io
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from ckptfix import Keys, Policy
from fixtures.digests import tensor_digests

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp-2.13.0"
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"

ONCE = Policy(allow=frozenset({"nested-prefix"}))
"""The user says that a wrapper was added twice; the files of DCP alone do not show it."""


def renaming(keys: Keys) -> Policy:
    """Return the policy that renames nested keys: to one wrapper with AUTO."""
    return ONCE if keys is Keys.AUTO else Policy(keys=keys)


def copy(tmp_path: Path, name: str, *, keep: tuple[str, ...] = ()) -> Path:
    """Return a copy of a fixture; ``keep``: these folders of it alone."""
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name / "checkpoint", folder)
    for path in folder.iterdir():
        if keep and path.name not in keep:
            shutil.rmtree(path)
    return folder


def change(folder: Path, edit: Callable[[Metadata], object]) -> None:
    """Change the metadata of a DCP folder as torch's own classes."""
    content = pickle.loads((folder / ".metadata").read_bytes())
    edit(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content, 4))


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return contents, modes and times of all files."""
    return {
        str(path.relative_to(root)): (
            path.read_bytes(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def loaded(folder: Path) -> Any:
    """Return all that a DCP folder holds, in the dicts that were saved, as torch's converter gives
    it.
    """
    target = folder.parent / f"{folder.name}.loaded"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, target)
    content = torch.load(io.BytesIO(target.read_bytes()), weights_only=False)
    target.unlink()
    return content


def model_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the tensors that ``dcp.load`` puts into empty ones of the names that
    are there.
    """
    content = loaded(folder)["model"]
    state = {"model": {name: torch.zeros_like(value) for name, value in content.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return tensor_digests(state["model"])


def prefixed(prefix: str, digests: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: digest for name, digest in digests.items()}

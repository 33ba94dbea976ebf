"""``load_checkpoint_tolerant``: the weights of one model, out of whatever file or folder holds them."""

import os
from pathlib import Path
from typing import Any

import torch

from ckptfix.checkpoint.entries import Entry, all_state_dicts
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.runtime.loading.commit import Commit, take_back_on_all
from ckptfix.runtime.loading.draft import Draft, as_load_error, stop_if_failed, warn_of
from ckptfix.runtime.loading.models import plan_models
from ckptfix.runtime.loading.report import LoadError, LoadPolicy, LoadReport, Need
from ckptfix.runtime.loading.targets import model_targets


def load_checkpoint_tolerant(
    model: Any, path: str | os.PathLike[str], *, policy: LoadPolicy | None = None
) -> LoadReport:
    """Load the weights of one model from a file, an index, a folder, or a training dict that holds a state dict.

    All names must be found, and none be left over; wrappers are taken off and put back as the model has them. Of a
    folder the one entry that fits is taken; of several that fit, equal ones count once, others are refused by name.
    Only ``models`` and ``trust`` of the policy count. No rank speaks with another.

    Raises LoadError when nothing fits or can be read; the model is then as it was, unless ``error.modified``.
    """
    policy = policy or LoadPolicy()
    path = Path(path).expanduser()
    draft = Draft(path=path, policy=policy, advice="give the path of one file")
    error: LoadError | None = None
    try:
        entries, folder = _entries(path)
        if policy.models is not Need.IGNORE:
            plan_models(draft, folder.root, entries, model_targets([model]), _device(model))
        stop_if_failed(draft, folder.root)
    except Exception as problem:
        error = as_load_error(problem, draft)
    if error is not None:
        raise error
    commit = Commit(draft, None)
    try:
        commit.run()
    except LoadError as failure:
        raise take_back_on_all(None, commit, failure) from failure.__cause__
    warn_of(draft, is_main=True)
    return draft.report()


def _entries(path: Path) -> tuple[list[Entry], CheckpointFolder]:
    """Return the state dicts at a path. An index brings the shards that it names."""
    if not path.exists():
        raise LoadError(f"{path} does not exist")
    if path.is_dir():
        folder = scan_folder(path)
        return list(all_state_dicts(folder)), folder
    if path.name.endswith(".json"):
        folder = scan_folder(path.parent)
        wanted = [entry for entry in all_state_dicts(folder) if entry.label == path.name]
        return wanted, folder
    folder = scan_folder(path.parent, path.name)
    return list(all_state_dicts(folder)), folder


def _device(model: Any) -> torch.device:
    """Return where the model is: the device of its first parameter that is anywhere."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return torch.device(parameter.device)
    return torch.device("cpu")

"""The parameters of a run's models in a process of its own: built without weights, by a factory or
from config.json.

``tensors.parameter_sources`` starts it, and reads the file into which it writes its answer.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from ckptfix.devices.reload.outputs import ANYTHING, in_words
from ckptfix.devices.reload.pretrained import LoaderRefuses, NoModel, skeleton_from_config
from ckptfix.devices.reload.user_model import Factory, current_folder_on_path, import_factory
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.tensors.parameter_sources import described


def main(answer: str) -> None:
    """Read what is asked for from a file, and write the answer into it: parameters, or why there
    are none.
    """
    path = Path(answer)
    asked = json.loads(path.read_text())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _found(asked["model"], Path(asked["root"]))
    except (CkptfixError, LoaderRefuses, NoModel, OSError) as error:
        found = {"error": str(error)}
    path.write_text(json.dumps(found))


def _found(model: str | None, root: Path) -> dict[str, Any]:
    if model is None:
        return described(skeleton_from_config(root), "config.json")
    factory = import_factory(model)
    return described(_made(factory, model), model)


def _made(factory: Factory, shown: str) -> Any:
    """Return what a factory returns on the meta device, on the CPU where that is not possible.

    ``from_pretrained`` refuses the meta device, and code that looks at values fails there.
    """
    with current_folder_on_path():
        try:
            with torch.device("meta"):
                return factory()
        except ANYTHING:
            pass
        try:
            return factory()
        except ANYTHING as error:
            raise UsageError(f"the factory {shown} raised {in_words(error)}") from error

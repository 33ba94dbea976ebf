"""Training scripts: the guarded Accelerator, complete saves, tolerant loads. All that is here
imports torch.

A save of a guarded run records what ``saving.save_manifest`` lists; ``loading`` restores what a
folder holds.
"""

from typing import TYPE_CHECKING

from ckptfix.lazy import lazily, names_in

if TYPE_CHECKING:
    from ckptfix.training.accelerator import (
        Accelerator as Accelerator,
        patch_accelerate as patch_accelerate,
        unpatch_accelerate as unpatch_accelerate,
    )
    from ckptfix.training.guard import OnReprepare as OnReprepare
    from ckptfix.training.loading.load_report import (
        ComponentReport as ComponentReport,
        LoadError as LoadError,
        LoadPolicy as LoadPolicy,
        LoadReport as LoadReport,
        Requirement as Requirement,
        Part as Part,
        Status as Status,
    )
    from ckptfix.training.loading.load_state import (
        load_checkpoint_tolerant as load_checkpoint_tolerant,
        load_state_tolerant as load_state_tolerant,
    )
    from ckptfix.training.resuming.guarded_load import latest_checkpoint as latest_checkpoint

_MODULES = {
    "accelerator": "Accelerator patch_accelerate unpatch_accelerate",
    "guard": "OnReprepare",
    "loading.load_report": (
        "LoadPolicy Requirement LoadReport ComponentReport Part Status LoadError"
    ),
    "loading.load_state": "load_state_tolerant load_checkpoint_tolerant",
    "resuming.guarded_load": "latest_checkpoint",
}

__all__ = names_in(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)

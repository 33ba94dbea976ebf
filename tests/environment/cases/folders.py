"""What of a folder torch.load refuses."""

from pathlib import PurePosixPath

from ckptfix.diagnosis.findings.damaged import UnloadablePickle, UnsafePickle
from ckptfix.environment.facts.installed import Package
from ckptfix.environment.facts.weights import Folder
from tests.environment.building import PACKAGES, facts, with_software
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

UNLOADABLE = UnloadablePickle(
    path=PurePosixPath("train.pt"),
    globals=("pkg.Settings",),
    remedy="import pkg, torch; torch.serialization.add_safe_globals([pkg.Settings])",
)

UNSAFE = UnsafePickle(path=PurePosixPath("train.pt"), globals=("os.system",))

FOLDERS = (
    Case(
        "unloadable-pickle",
        "torch 2.13",
        facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))),
        WARNING,
    ),
    Case(
        "unloadable-pickle",
        "torch 2.5",
        with_software(
            facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))),
            packages={**PACKAGES, "torch": Package(name="torch", version="2.5.1")},
        ),
        NOTE,
    ),
    Case("unloadable-pickle", "clean", facts(folder=Folder(path="ckpt")), None),
    Case("unsafe-pickle", "os.system", facts(folder=Folder(path="ckpt", refused=(UNSAFE,))), ERROR),
    Case(
        "unsafe-pickle", "a class", facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))), None
    ),
    Case(
        "weights-only-forced",
        "on",
        facts(variables={"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}),
        WARNING,
    ),
    Case(
        "weights-only-forced",
        "off",
        facts(variables={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "true"}),
        WARNING,
    ),
    Case("weights-only-forced", "0", facts(variables={"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}), None),
    Case(
        "unloadable-pickle",
        "torch 2.6",
        with_software(
            facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))),
            packages={**PACKAGES, "torch": Package(name="torch", version="2.6.0")},
        ),
        WARNING,
    ),
    Case(
        "unloadable-pickle",
        "no torch",
        with_software(facts(folder=Folder(path="ckpt", refused=(UNLOADABLE,))), packages={}),
        WARNING,
    ),
)

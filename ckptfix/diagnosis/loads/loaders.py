"""The process in which a library is asked about a load. Nothing here imports torch.

``ckptfix.devices.reload.oracle`` answers there: it gets configs, and the dtype and shape of each
tensor, as JSON.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptfix.checkpoint.filenames import weights_names
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.load_inputs import CONFIG_OF_LIBRARY, Config, Load, loads_of
from ckptfix.checkpoint.model_configs import (
    CONFIG,
    PIPELINE,
    broken_config,
    broken_lists,
    complete_names,
    pipeline_components,
    read_config,
)
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.config_faults import MismatchedConfig, MissingHead
from ckptfix.diagnosis.findings.load_faults import (
    IncompleteAdapter,
    MismatchedAdapter,
    PassedOver,
    UnknownBias,
    UnusedKeys,
)
from ckptfix.diagnosis.findings.misplaced import UnknownState, WrongState
from ckptfix.diagnosis.loads.outcome import LoadOutcome, read_outcome
from ckptfix.hardware import Child, ChildEnded
from ckptfix.storage.files import AnyPath, names_in

PATIENCE = 120.0
"""Seconds for one load: the import of torch and transformers takes 5, a load on the meta device
0.05 to 0.4.
"""

MEMORY = 2 << 30
"""Bytes of memory for the process: torch, transformers, PEFT and diffusers take 0.4 GB."""

_BEGIN = """
import sys
sys.path[:] = sys.argv[1:]
from ckptfix.hardware import end_with_parent
end_with_parent()
from ckptfix.devices.reload.oracle import main
main()
"""

_TOLD_BY_A_LOAD = (
    UnusedKeys, IncompleteAdapter, MismatchedAdapter, MismatchedConfig, MissingHead, UnknownBias,
)  # fmt: skip
"""Findings about keys and shapes, of which the load by the library itself is the better judge."""

_PLACE = re.compile(r"/[^\s'\"]*/ckptfix-\w{8}\b")
"""The temporary folder with the configs, as an error of a library names it."""

_NOBODY = (
    "from_pretrained of transformers, PEFT and diffusers needs weights under the library's own "
    "file name, without a variant, next to the library's config.json or adapter_config.json"
)

_NAMELESS = (
    f"{CONFIG} does not name the model class; add it under architectures, such as "
    '["LlamaForCausalLM"], as model.save_pretrained does'
)


class Asked(NamedTuple):
    """A load that a library is asked about, in plain values.

    ``path``: the file with the weights, or their index. ``tensors``: key -> dtype in safetensors'
    words, and shape. ``home``: the folder from which a relative path in a config begins.
    ``components``: the names in the folder of each component of a pipeline, as far as they can be
    listed.
    """

    library: str
    path: str
    configs: Mapping[str, Config]
    tensors: Mapping[str, tuple[str, Sequence[int]]]
    home: str = ""
    components: Mapping[str, Sequence[str]] = {}


class Loaders:
    """The libraries, asked in a process of their own that ends with the block.

    ``is_of_many``: of all checkpoints below a folder, where one that no library loads is nothing
    that was asked for.
    """

    def __init__(self, *, is_of_many: bool = False) -> None:
        offline = {
            "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1",
        }  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._is_of_many = is_of_many
        self._child = Child(
            (sys.executable, "-c", _BEGIN, *_path_of_imports()),
            PATIENCE,
            {**environment, **offline},
        )

    def __enter__(self) -> "Loaders":
        return self

    def __exit__(self, *error: object) -> None:
        self._child.close()

    def judged(
        self,
        folder: CheckpointFolder,
        groups: Sequence[ModelFiles],
        findings: tuple[Finding, ...],
        *,
        is_asked_below: bool,
    ) -> tuple[tuple[LoadOutcome, ...], tuple[Finding, ...]]:
        """Return the outcome of each load of a folder by a library, and the findings that the loads
        do not contradict.

        ``findings``: of its headers. ``is_asked_below``: the folder has no weights itself, and
        models below have.
        """
        taken: dict[str, Load] = {}
        for load in loads_of(folder, groups, as_listed=True):
            first = taken.setdefault(load.library, load)
            if load.turn < first.turn:
                taken[load.library] = load
        outcomes = [*self._of_pipeline(folder)]
        for load in taken.values():
            of_files = [one for one in findings if one.path in (load.path, *load.files)]
            # The library gets what a file holds, and not the tensors inside of it.
            refused = [str(one) for one in of_files if isinstance(one, WrongState | UnknownState)]
            # read_config takes a byte order mark and UTF-16, with which every library fails.
            config = CONFIG_OF_LIBRARY[load.library]
            if broken := broken_config(folder.root / config):
                refused.insert(0, f"{config}: {broken}")
            outcome = self._outcome(load, next(iter(refused), ""))
            # What a load ignores may be layers that a finding is about, but no head that it lacks.
            wrong = [
                finding
                for finding in of_files
                if not outcome.status
                and (isinstance(finding, MissingHead) or not outcome.unexpected)
                and _is_told_by_a_load(finding)
            ]
            findings = tuple(finding for finding in findings if finding not in wrong)
            words = tuple(f"{finding} [{finding.code}]" for finding in wrong)
            known = next((one.code for one in of_files if isinstance(one, _TOLD_BY_A_LOAD)), "")
            outcomes.append(outcome._replace(contradicts=words, finding=known))
        if not outcomes and not is_asked_below and not self._is_of_many:
            path = str(groups[0].path) if groups else "this folder"
            values = read_config(folder.root, CONFIG)
            is_named = any(group.path.name in weights_names("transformers") for group in groups)
            is_nameless = is_named and "model_type" in values and not values.get("architectures")
            why = _NAMELESS if is_nameless else _NOBODY
            outcomes.append(LoadOutcome(path=path, library="", unchecked=why))
        return tuple(outcomes), findings

    def _outcome(self, load: Load, refused: str) -> LoadOutcome:
        path = str(load.path)
        answer = LoadOutcome(path=path, library=load.library, tensors=len(load.tensors))
        if load.index_fault:
            return answer._replace(refused=f"{load.path.name} {load.index_fault}")
        if refused:
            return answer._replace(refused=refused)
        if not load.is_whole:
            return answer._replace(unchecked="not all headers of its files can be read")
        asked = Asked(
            library=load.library,
            path=load.path.name,
            configs=load.configs,
            tensors={key: (tensor.dtype, tensor.shape) for key, tensor in load.tensors.items()},
            home=os.getcwd(),
        )
        return self._answer(asked, answer)

    def _of_pipeline(self, folder: CheckpointFolder) -> Iterator[LoadOutcome]:
        """Yield whether the class of a pipeline takes the components that it lists."""
        if folder.only is not None or not folder.has_file(PIPELINE):
            return
        answer = LoadOutcome(path=PIPELINE, library="diffusers")
        index = read_config(folder.root, PIPELINE)
        script = ""
        for name, value in index.items():
            source = value[0] if isinstance(value, list) and value else None
            with suppress(OSError, ValueError):  # no file has such a name
                if isinstance(source, str) and (folder.root / name / f"{source}.py").exists():
                    script = f"{name}/{source}.py"
        if not index or broken_config(folder.root / PIPELINE):
            yield answer._replace(refused=f"{PIPELINE} cannot be read")
        elif script:
            yield answer._replace(unchecked=f"{script} is custom code, which ckptfix never runs")
        elif broken := next(broken_lists(folder.root), None):
            yield answer._replace(refused=": ".join(broken))
        else:
            components = dict(_names_of_components(folder.root))
            asked = Asked("diffusers", PIPELINE, {PIPELINE: index}, {}, components=components)
            yield self._answer(asked, answer)

    def _answer(self, asked: Asked, answer: LoadOutcome) -> LoadOutcome:
        try:
            said = json.loads(self._child.ask(json.dumps(asked._asdict()).encode()))
        except (ChildEnded, OSError) as error:
            return answer._replace(unchecked=str(error))
        outcome = read_outcome(said)
        return outcome._replace(
            path=answer.path, refused=_PLACE.sub("this folder", outcome.refused)
        )


def _names_of_components(root: AnyPath) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the components of a pipeline with the complete files in their folders, sorted.

    diffusers loads a component without a folder from that of the pipeline.
    """
    for component in pipeline_components(root):
        with suppress(OSError):
            try:
                names = names_in(root / component)
            except (FileNotFoundError, NotADirectoryError):
                names = names_in(root)
            yield component, tuple(sorted(complete_names(names)))


def _path_of_imports() -> list[str]:
    """Return the folders from which the process imports: none of a model, which may hold a
    ``transformers.py``.

    They are those of this process without the current folder, in which ``python -m`` and an empty
    part of PYTHONPATH look first, and without any that holds a config of a library, as each folder
    does that is asked about.
    """
    configs = {*CONFIG_OF_LIBRARY.values(), PIPELINE}
    folders = [os.path.realpath(folder) for folder in sys.path]
    own = str(Path(__file__).resolve().parents[3])
    return [
        *(
            folder
            for folder in folders
            if folder != os.path.realpath("")
            and not any(os.path.exists(f"{folder}/{name}") for name in configs)
        ),
        own,
    ]


def _is_told_by_a_load(finding: Finding) -> bool:
    """Return whether a finding about headers is one that the load by the library itself judges."""
    return (
        isinstance(finding, _TOLD_BY_A_LOAD)
        and not isinstance(finding, PassedOver)
        and finding.severity is not Severity.NOTE
    )

"""The answer of a library about a load, and the process in which the library is asked. Nothing here
imports torch.

``ckptfix.devices.reload.oracle`` answers there: it gets configs, and the dtype and shape of each
tensor, as JSON.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.checkpoint.entries import ModelFiles
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.load_inputs import CONFIG_OF_LIBRARY, Config, Load, loads_of
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.config_faults import MissingHead
from ckptfix.diagnosis.findings.load_faults import (
    IncompleteAdapter,
    MismatchedAdapter,
    PassedOver,
    UnusedKeys,
)
from ckptfix.diagnosis.findings.weight_faults import MismatchedConfig
from ckptfix.hardware import Child, ChildEnded
from ckptfix.wording import Line, count_of, line, list_names

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

_TOLD_BY_A_LOAD = (UnusedKeys, IncompleteAdapter, MismatchedAdapter, MismatchedConfig, MissingHead)
"""Findings about keys and shapes, of which the load by the library itself is the better judge."""

_NOBODY = (
    "from_pretrained of transformers, PEFT and diffusers needs weights under their names, without "
    "a variant, and a config.json or adapter_config.json of theirs next to them"
)


class Asked(NamedTuple):
    """A load that a library is asked about, in plain values.

    ``path``: the file with the weights, or their index. ``tensors``: key -> dtype in safetensors'
    words, and shape. ``home``: the folder from which a relative path in a config begins.
    """

    library: str
    path: str
    configs: Mapping[str, Config]
    tensors: Mapping[str, tuple[str, Sequence[int]]]
    home: str = ""


class Mismatch(NamedTuple):
    """A tensor of another shape than the model has."""

    key: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]


class LoadOutcome(NamedTuple):
    """The outcome of a load, as the installed library tells it from configs and headers.

    ``path``: the file with the weights, or their index. ``library``: with its version, for which
    alone the answer holds. ``loads``: the class, "" where nothing names one. ``tensors``: of the
    file. ``missing``: keys of the model that stay random. ``unexpected``: keys of the file that are
    ignored. ``dead``: those of an adapter that take no part, ``live``: the number of those that do,
    None for anything else than an adapter. ``refused``: the library's own words where it fails.
    ``unknown``: what no load on the meta device shows. ``unchecked``: why there is no answer.
    ``contradicts``: findings from headers alone that the load shows to be wrong, in words.
    """

    path: str
    library: str
    loads: str = ""
    tensors: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    dead: tuple[str, ...] = ()
    live: int | None = None
    refused: str = ""
    unknown: tuple[str, ...] = ()
    unchecked: str = ""
    contradicts: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """The exit status: 3 without an answer, 1 for a model that is not the one that was
        saved.
        """
        if self.unchecked:
            return 3
        return int(bool(self.refused or self.missing or self.mismatched or self.dead))

    @property
    def headline(self) -> str:
        """The worst of it in a few words, "" for a model that is the one that was saved."""
        if self.unchecked:
            return "load not checked"
        if self.refused or self.mismatched:
            return f"{self.library} fails to load it"
        if self.dead or (self.tensors and self.live == 0):
            return (
                f"{count_of(self.tensors - (self.live or 0), 'tensor')} of the adapter unused "
                "after a load"
            )
        return (
            f"{count_of(len(self.missing), 'tensor')} random after a load" if self.missing else ""
        )

    def lines(self) -> Iterator[Line]:
        """Yield the answer: what loads, and what of it is not as it was saved."""
        if self.unchecked:
            who = f"{self.library}: " if self.library else ""
            yield line(f"  load of {self.path} not checked: {who}{self.unchecked}", colour="yellow")
            return
        used = f"{count_of(self.tensors, 'tensor')}"
        if self.live is not None:
            used = f"{self.live} of {used} of the adapter live"
        is_all = not self.status and self.live in (None, self.tensors)
        end = ", nothing stays random" if is_all else ""
        loads = f"{self.loads} from " if self.loads else ""
        colour = "red" if self.status else None
        yield line(f"  load: {self.library}, {loads}{self.path}: {used}{end}", colour=colour)
        for words, keys in (
            ("random after the load", self.missing), ("unused, though of the adapter", self.dead),
            ("ignored", self.unexpected),
        ):  # fmt: skip
            if keys:
                yield line(f"    {words}: {count_of(len(keys), 'key')}, {list_names(keys)}")
        if self.mismatched:
            key, shape, expected = self.mismatched[0]
            yield line(
                f"    of another shape: {count_of(len(self.mismatched), 'key')}, such as {key!r} "
                f"(expected {list(expected)}, found {list(shape)})"
            )
        if self.refused:
            yield line(f"    it fails: {self.refused}")
        if self.status:
            yield line(
                "    help: copy the config and the weights again from one save, or load them with "
                f"the version of {self.library.partition(' ')[0]} that saved them"
            )
        for words in self.contradicts:
            yield line(f"    by its headers alone: {words}; the answer of {self.library} counts")


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
        for load in loads_of(folder, groups):
            first = taken.setdefault(load.library, load)
            if load.turn < first.turn:
                taken[load.library] = load
        outcomes = []
        for load in taken.values():
            outcome = self._outcome(load)
            # What a load ignores may be layers that a finding is about, but no head that it lacks.
            wrong = [
                finding
                for finding in findings
                if not outcome.status
                and (isinstance(finding, MissingHead) or not outcome.unexpected)
                and _is_about(finding, load)
            ]
            findings = tuple(finding for finding in findings if finding not in wrong)
            words = tuple(f"{finding} [{finding.code}]" for finding in wrong)
            outcomes.append(outcome._replace(contradicts=words))
        if not outcomes and not is_asked_below and not self._is_of_many:
            path = str(groups[0].path) if groups else "this folder"
            outcomes.append(LoadOutcome(path=path, library="", unchecked=_NOBODY))
        return tuple(outcomes), findings

    def _outcome(self, load: Load) -> LoadOutcome:
        path = str(load.path)
        answer = LoadOutcome(path=path, library=load.library, tensors=len(load.tensors))
        if load.index_fault:
            return answer._replace(refused=f"{load.path.name} {load.index_fault}")
        if not load.is_whole:
            return answer._replace(unchecked="not every header of its files can be read")
        asked = Asked(
            library=load.library,
            path=load.path.name,
            configs=load.configs,
            tensors={key: (tensor.dtype, tensor.shape) for key, tensor in load.tensors.items()},
            home=os.getcwd(),
        )
        try:
            said = json.loads(self._child.ask(json.dumps(asked._asdict()).encode()))
        except (ChildEnded, OSError) as error:
            return answer._replace(unchecked=str(error))
        return read_outcome(said)._replace(path=path)


def _path_of_imports() -> list[str]:
    """Return the folders from which the process imports: none of a model, which may hold a
    ``transformers.py``.

    They are those of this process without the current folder, in which ``python -m`` and an empty
    part of PYTHONPATH look first, and without any that holds a config of a library, as each folder
    does that is asked about.
    """
    configs = {*CONFIG_OF_LIBRARY.values(), "model_index.json"}
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


def read_outcome(said: Mapping[str, Any]) -> LoadOutcome:
    """Return an outcome from its JSON values."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
    }
    values["mismatched"] = tuple(
        Mismatch(key, tuple(shape), tuple(expected)) for key, shape, expected in said["mismatched"]
    )
    return LoadOutcome(*(values[name] for name in LoadOutcome._fields))


def _is_about(finding: Finding, load: Load) -> bool:
    """Return whether a finding about headers is one that the load by the library itself judges."""
    is_of_load = finding.path in (load.path, *load.files)
    return (
        is_of_load
        and isinstance(finding, _TOLD_BY_A_LOAD)
        and not isinstance(finding, PassedOver)
        and finding.severity is not Severity.NOTE
    )

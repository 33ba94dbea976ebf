"""Facts of torch and its devices, from a separate process: a broken driver can crash or hang it.

Nothing here imports torch in the process that asks, unless ``in_process`` says so. The answer is
plain values, as it comes out of the other process: as far as that process came, and why it came no
further.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ckptfix.hardware import command_of, run_limited

PATIENCE = 120.0
"""Seconds for importing torch and initialising every device: slow file systems, and drivers that
load firmware.
"""

_MAX_WARNINGS = 20
_DOING = {
    "start": "while Python started",
    "import": "while torch was imported",
    "devices": "while torch looked for its devices",
    "verdicts": "while the probe's verdicts were read",
}
"""Step -> what a process that came no further was doing."""


def look(*, patience: float = PATIENCE, in_process: bool = False) -> dict[str, Any]:
    """Return the facts of torch, as plain values.

    ``version``; ``builds`` (what it was built for); ``kind`` of accelerator; ``devices`` (index,
    name, pci); ``warnings``; ``verdicts`` of the probe for this very hardware, or None. ``stage``:
    what it was doing last, "done" at the end; ``problem``: why it came no further, "" when it did.

    ``patience``: seconds for importing torch and initialising the devices. ``in_process``: ask in
    this process, without any protection.
    """
    said: dict[str, Any] = {"stage": "start", "problem": ""}
    if in_process:
        for part in _answers():
            said.update(part)
    else:
        ended = run_limited(command_of(__name__), patience)
        for part in _parts(ended.out):
            said.update(part)
        if said["stage"] != "done" and not said["problem"]:
            said["problem"] = (
                f"{ended.problem or 'the process ended early'} ({_DOING[said['stage']]})"
            )
    return said


def main() -> None:
    """Answer in the process that ``look`` started: one JSON object a line, so that a crash loses
    only the rest.
    """
    for part in _answers():
        sys.stdout.write(json.dumps(part) + "\n")
        sys.stdout.flush()


def _answers() -> Iterator[dict[str, Any]]:
    """Yield the facts of torch, step by step; an error becomes the problem of the step."""
    stage = "import"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for stage, answer in _steps():
                yield {"stage": stage, **answer}
        except Exception as error:  # torch's own errors for a broken driver share no class
            yield {
                "stage": stage,
                "problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            }
        texts = list(dict.fromkeys(" ".join(str(item.message).split())[:300] for item in caught))
    yield {"warnings": texts[:_MAX_WARNINGS]}


def _steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of the step that comes next, with the answer of the one before."""
    yield "import", {}
    import torch

    version = torch.version
    built_for = {name: getattr(version, name, None) for name in ("cuda", "hip", "xpu")}
    builds = [f"{name} {built}" for name, built in built_for.items() if built]
    yield "devices", {"version": str(torch.__version__), "builds": builds}
    from ckptfix.devices.torch_devices import device_type, this_machine

    machine = this_machine()
    devices = [
        {"index": index, "name": name, "pci": pci}
        for index, (name, pci) in enumerate(zip(machine.names, machine.pci, strict=True))
    ]
    yield "verdicts", {"kind": device_type(), "devices": devices}
    yield "done", {"verdicts": _verdicts() if len(devices) > 1 else None}


def _verdicts() -> list[dict[str, Any]] | None:
    """Return the earlier verdicts of the probe on this very hardware, None if it has not run."""
    from ckptfix.devices.probe import cached_report

    report = cached_report()
    if report is None:
        return None
    return [
        {"pair": list(pair), "verdict": found.verdict.value, "kind": found.kind}
        for pair, found in report.pairs.items()
    ]


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with suppress(ValueError):
            part = json.loads(line)
            if isinstance(part, dict):
                yield part

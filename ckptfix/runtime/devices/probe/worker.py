"""The process that measures: a broken pair can hang or end it, and the one that asked goes on with the others.

It reads one task for each line of its standard input, and answers in lines of JSON: ``{"stage": words}`` before
whatever may hang, ``{"stage": null}`` after it, ``{"outcome": ...}`` at the end of the task. It never outlives whoever
started it.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

from ckptfix.runtime.devices.probe.identity import this_machine
from ckptfix.runtime.devices.probe.running import Runner
from ckptfix.runtime.devices.probe.task import Task


def main() -> None:
    """Do tasks until the input ends."""
    _end_with_the_parent(os.getppid())
    answers = _own_channel()

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    with suppress(BrokenPipeError):
        tell({"ready": this_machine().to_json()})
        runner = Runner(lambda stage: tell({"stage": stage}))
        for line in sys.stdin:
            asked = json.loads(line)
            outcome = runner.run(Task.from_json(asked["task"]), asked["seconds"])
            tell({"outcome": outcome.to_json()})


def _own_channel() -> TextIO:
    """Return the standard output as a channel of our own; what libraries print goes to the standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _end_with_the_parent(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)  # a copy that hangs would keep this process, and the memory of its devices, for ever

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()

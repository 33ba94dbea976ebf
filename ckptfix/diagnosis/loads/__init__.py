"""Verdicts on loads of a folder, from configs and headers: each rule is a function of a ``Load`` alone.

Only what a config or the keys record is judged. Everything else is listed as not checked.
"""

from collections.abc import Iterable

from ckptfix.checkpoint.load_inputs import Load
from ckptfix.diagnosis.loads.verdict import LoadVerdict


def diagnose_loads(loads: Iterable[Load]) -> LoadVerdict:
    """Return the verdict on every load of a folder. The rules of a library are imported where it has one."""
    verdicts: list[LoadVerdict] = []
    for load in loads:
        if load.library == "peft":
            from ckptfix.diagnosis.loads.adapters import judge_adapter, judge_halves

            verdicts.append(judge_adapter(load) if load.config else judge_halves(load))
    return LoadVerdict(
        findings=tuple(finding for verdict in verdicts for finding in verdict.findings),
        unchecked=tuple(words for verdict in verdicts for words in verdict.unchecked),
        explained=frozenset().union(*(verdict.explained for verdict in verdicts)),
    )

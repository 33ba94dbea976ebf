"""Verdicts on loads of a folder, from configs and headers: each rule is a function of a ``Load`` alone.

Only what a config or the keys record is judged. Everything else is listed as not checked.
"""

from collections.abc import Iterable

from ckptfix.checkpoint.load_inputs import Load
from ckptfix.diagnosis.loads.verdict import LoadVerdict


JUDGED = ("peft",)
"""Libraries with rules about their loads."""


def diagnose_loads(loads: Iterable[Load]) -> LoadVerdict:
    """Return the verdict on every load of a judged library. Its rules are imported where a folder has such a load."""
    verdicts: list[LoadVerdict] = []
    for load in loads:
        from ckptfix.diagnosis.loads.adapters import judge_adapter, judge_halves

        verdicts.append(judge_adapter(load) if load.config else judge_halves(load))
    return LoadVerdict(
        findings=tuple(finding for verdict in verdicts for finding in verdict.findings),
        unchecked=tuple(words for verdict in verdicts for words in verdict.unchecked),
        explained=frozenset().union(*(verdict.explained for verdict in verdicts)),
    )

"""From findings to steps. Pure: the same diagnosis and policy give the same plan, and nothing is touched."""

from dataclasses import dataclass

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.operations.diagnose import Diagnosis
from ckptfix.operations.findings import CODES, Action, Finding
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.plan.entries import plan_drops, plan_moves
from ckptfix.operations.plan.files import plan_indexes, plan_trims
from ckptfix.operations.plan.names import plan_names
from ckptfix.operations.plan.sharded import plan_sharded_names
from ckptfix.operations.policy import Policy
from ckptfix.operations.steps import Step, Unplanned


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in the order in which they are applied, and what stays although it could be repaired.

    ``findings``: all that was found before.
    """

    folder: CheckpointFolder
    sharded: tuple[ShardedState, ...]
    steps: tuple[Step, ...]
    unplanned: tuple[Unplanned, ...]
    findings: tuple[Finding, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps


def make_plan(diagnosis: Diagnosis, policy: Policy) -> Plan:
    """Plan the repair of a diagnosed folder.

    Drops come first, so that a dropped file's recipe names the kept file as it was; moves come last, so that
    every other step names files as the user knows them.
    """
    draft = Draft(diagnosis, policy)
    dropped = plan_drops(draft)
    plan_trims(draft, dropped)
    maps = plan_names(draft, dropped)
    plan_sharded_names(draft, dropped)
    plan_indexes(draft, maps)
    plan_moves(draft, dropped)
    _hint_at_options(draft)
    return Plan(
        folder=diagnosis.folder,
        sharded=diagnosis.sharded,
        steps=tuple(draft.steps),
        unplanned=tuple(draft.unplanned),
        findings=diagnosis.findings,
    )


def _hint_at_options(draft: Draft) -> None:
    """Say of what was named with ``--only``, and needs the user's word besides, that it does."""
    done = {code for step in draft.steps for code in step.fixes} | {stay.code for stay in draft.unplanned}
    for code in sorted(draft.policy.only - done):
        paths = [finding.path for finding in draft.findings if finding.code == code]
        if paths and CODES[code].action is Action.ASK:
            draft.stay(code, paths, f"it needs {CODES[code].option}, too")

"""An environment, and what must be said of it."""

from typing import NamedTuple

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.facts import Facts


class Case(NamedTuple):
    """An environment, and the severity of the advice on ``code`` in it: None when there must be
    none.
    """

    code: str
    name: str
    facts: Facts
    severity: Severity | None


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

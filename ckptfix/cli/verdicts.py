"""How ``verify`` prints its verdicts."""

from collections.abc import Sequence
from itertools import groupby

from ckptfix.cli.report import Report
from ckptfix.operations.findings import Severity
from ckptfix.operations.sealing.judging import Outcome
from ckptfix.operations.sealing.report import Item, Kind, VerifyReport
from ckptfix.wording import count_of, human_size


def print_verdicts(report: Report, result: VerifyReport) -> None:
    """Print what differs, each by name, then how many match, and what was not checked."""
    against = f" against {result.against}" if result.against is not None else ""
    counts = [count_of(sum(result.count(kind).values()), kind.value) for kind in Kind]
    report.line(f"{result.path}{against}: {', '.join(counts)}, {human_size(result.nbytes)}", bold=True)
    serious = [one for one in result.findings if one.severity is not Severity.NOTE]
    report.findings(serious, str(result.path))
    for kind in Kind:
        of_kind = [item for item in result.items if item.kind is kind]
        print_differing(report, [item for item in of_kind if item.outcome is Outcome.DIFFER])
        _print_unchecked(report, [item for item in of_kind if item.outcome is Outcome.NOT_CHECKED])
    for value in result.values:
        report.finding(value.severity.value, value.code, str(value))
    for words in result.unfinished:
        report.line(f"could not be read: {words}", colour="red")
    for kind in Kind:
        known = result.count(kind)
        if known[Outcome.MATCH] or known[Outcome.DIFFER]:
            words = ", ".join(f"{number} {outcome.value}" for outcome, number in known.items() if number)
            report.line(f"{kind.value}s: {words}", colour="red" if known[Outcome.DIFFER] else "green")
    if result.status == 0:
        report.line("no difference found in what was checked", colour="green")
    for words in result.not_checked:
        report.line(f"not checked: {words}")


def print_differing(report: Report, items: Sequence[Item]) -> None:
    """Print items by what happened to them; of many with the same, only the first few."""
    ordered = sorted(items, key=lambda item: str(item.change))
    for _, group in groupby(ordered, key=lambda item: item.change):
        same = list(group)
        report.few(
            [f" differ {_named(item)} {item.text}" for item in same], f"{same[0].kind.value}s", colour="red"
        )


def _print_unchecked(report: Report, items: Sequence[Item]) -> None:
    """Print why items were not checked, each reason once."""
    reasons: dict[str, list[Item]] = {}
    for item in items:
        reasons.setdefault(item.text, []).append(item)
    for reason, same in reasons.items():
        what = _named(same[0]).rstrip(":") if len(same) == 1 else count_of(len(same), same[0].kind.value)
        report.line(f"not checked: {what}: {reason}")


def _named(item: Item) -> str:
    return f"{item.name}:" if item.kind is Kind.FILE else f"{item.where}: {item.name!r}"

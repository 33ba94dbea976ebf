"""How ``verify`` prints its verdicts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ckptfix.cli.report import Report
from ckptfix.operations.findings import Severity
from ckptfix.operations.sealing.judging import Change, Outcome
from ckptfix.operations.sealing.report import Item, Kind, VerifyReport
from ckptfix.wording import count_of, human_size

_WHOLE_FILE = (Change.SWAPPED, Change.RENAMED, Change.MOVED)
"""What happens to a file and to all tensors in it at once."""


def print_verdicts(report: Report, result: VerifyReport) -> None:
    """Print what differs, each by name, then how many match, what was not checked, and how much is wrong."""
    against = f" against {result.against}" if result.against is not None else ""
    counts = [count_of(sum(result.count(kind).values()), kind.value) for kind in Kind]
    report.line(f"{result.path}{against}: {', '.join(counts)}, {human_size(result.nbytes)}", bold=True)
    serious = [one for one in result.findings if one.severity is not Severity.NOTE]
    report.findings(serious, str(result.path))
    differing = _together([item for item in result.items if item.outcome is Outcome.DIFFER])
    for kind in Kind:
        print_differing(report, [item for item in differing if item.kind is kind])
        unchecked = [item for item in result.items if item.outcome is Outcome.NOT_CHECKED]
        _print_unchecked(report, [item for item in unchecked if item.kind is kind])
    if result.crossed:
        report.line(f" differ positions of models: {result.crossed}", colour="red")
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
    if result.status:
        report.line(f"wrong: {', '.join(_wrong(result))}", colour="red")


def _wrong(result: VerifyReport) -> Iterator[str]:
    """Yield in words how much of each kind is why the exit status is not 0."""
    for severity in (Severity.ERROR, Severity.WARNING):
        structure = sum(one.severity is severity for one in result.findings)
        if structure:
            yield f"{count_of(structure, severity.value)} of the structure"
        values = sum(one.severity is severity for one in result.values)
        if values:
            yield f"{count_of(values, severity.value)} about values"
    for kind in Kind:
        if number := result.count(kind)[Outcome.DIFFER]:
            yield f"{count_of(number, kind.value)} that {'differs' if number == 1 else 'differ'}"
    if result.crossed:
        yield "positions of models that differ"
    if result.unfinished:
        yield f"{count_of(len(result.unfinished), 'thing')} that could not be read"


def _together(items: Sequence[Item]) -> list[Item]:
    """Return items with two files that were swapped as one, and without the tensors that went with their files."""
    pairs: dict[frozenset[str], list[Item]] = {}
    for item in items:
        if item.kind is Kind.FILE and item.change in _WHOLE_FILE and item.other:
            pairs.setdefault(frozenset((item.name, item.other)), []).append(item)
    followers: dict[frozenset[str], int] = {}
    left = []
    for item in items:
        pair = frozenset((item.where, item.other))
        if item.kind is Kind.TENSOR and item.change in (Change.SWAPPED, Change.MOVED) and pair in pairs:
            followers[pair] = followers.get(pair, 0) + 1
        else:
            left.append(item)
    found = []
    for item in left:
        pair = frozenset((item.name, item.other))
        if item.kind is Kind.FILE and pair in pairs:
            if item is pairs[pair][0]:
                tensors = count_of(followers.get(pair, 0), "tensor")
                more = (
                    f", and so do their {tensors}"
                    if item.change is Change.SWAPPED
                    else f", with its {tensors}"
                )
                found.append(replace(item, text=item.text + more if pair in followers else item.text))
        else:
            found.append(item)
    return found


def print_differing(report: Report, items: Sequence[Item]) -> None:
    """Print items by what happened to them; of many with the same, only the first few. Files go before tensors."""
    ordered = sorted(_together(items), key=_kind_and_change)
    for _, group in groupby(ordered, key=_kind_and_change):
        same = list(group)
        report.few(
            [f" differ {_named(item)} {item.text}" for item in same], f"{same[0].kind.value}s", colour="red"
        )


def _kind_and_change(item: Item) -> tuple[str, str]:
    return item.kind.value, str(item.change)


def _print_unchecked(report: Report, items: Sequence[Item]) -> None:
    """Print why items were not checked, each reason once."""
    reasons: dict[str, list[Item]] = {}
    for item in items:
        reasons.setdefault(item.text, []).append(item)
    for reason, same in reasons.items():
        what = _named(same[0]).rstrip(":") if len(same) == 1 else count_of(len(same), same[0].kind.value)
        each = "each " if len(same) > 1 and reason.startswith(("is ", "has ")) else ""
        report.line(f"not checked: {what}: {each}{reason}")


def _named(item: Item) -> str:
    return f"{item.name}:" if item.kind is Kind.FILE else f"{item.where}: {item.name!r}"

"""Certificate of a resume: the verdict, what was compared, the first difference with its cause; as
text and as a page.

The page has a strip chart: states down, steps across, green where both runs agree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfix.pages import html_document, html_legend, html_list, html_table, html_text
from ckptfix.reports import Serialized
from ckptfix.training.resume_proofs.recorded_runs import STATES, RankRuns
from ckptfix.training.resume_proofs.resume_verdict import Comparison, Difference
from ckptfix.wording import Line, Printable, Span, count_of, line, unchecked_line

_PLURALS = {
    "batch": "batches", "learning rate": "learning rates", "scheduler": "schedulers",
    "generators": "generators", "loss": "losses", "scaler": "gradient scaler",
}  # fmt: skip
_FOLLOWS = ("loss", "gradients", "weights")


@dataclass(frozen=True)
class Certificate(Serialized, Printable):
    """Result of ``prove-resume``.

    ``verdict``: "exact", "not exact" or "not deterministic". ``differences``: those of the first
    step that differs, and later ones that do not follow from them. ``first_steps``: state -> first
    step in which it differs. ``strips``: for each state, whether it agrees in each of ``steps``.
    """

    script: str
    verdict: str
    saved_at: int
    checkpoint: str
    ranks: int
    steps: tuple[int, ...]
    states: tuple[str, ...]
    differences: tuple[Difference, ...]
    first_steps: Mapping[str, int]
    strips: Mapping[str, tuple[bool | None, ...]]
    not_compared: tuple[str, ...]
    versions: Mapping[str, str]
    guarded: bool
    seconds: Mapping[str, float]
    kept: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)

    json_keys = (
        "script verdict saved_at checkpoint ranks steps states differences first_steps "
        "not_compared versions guarded seconds kept commands"
    )

    @property
    def status(self) -> int:
        """Return the exit status: 0 exact, 1 not exact, 2 not deterministic without any resume."""
        return {"exact": 0, "not exact": 1}.get(self.verdict, 2)

    def lines(self) -> Iterator[Line]:
        """Yield the verdict, the difference and its cause, and what was not compared."""
        colour = "green" if self.status == 0 else "red"
        yield Line(
            (Span(self.verdict.upper(), colour, True), Span(f": {self.script}: {self._about()}"))
        )
        named: set[str | None] = set()
        for at, one in enumerate(self.differences):
            rank = f", rank {one.rank}" if self.ranks > 1 else ""
            yield line(
                f"  {'also ' if at else ''}step {one.step}{rank}: {one.state}: {one.words}",
                colour=None if at else "red",
            )
            if one.cause is not None and one.code not in named:
                named.add(one.code)
                yield line(f"    cause: {one.reason}")
                yield line(f"    change: {one.change}")
                if one.is_restored and not self.guarded:
                    yield line(
                        "    or: ckptfix run SCRIPT, which saves and restores this; add "
                        "--guard to prove it"
                    )
        if self.status == 1:
            yield from self._consequences()
            if self.differences and self.differences[0].cause is None:
                yield line(
                    "  cause: unknown; keep both runs with --keep FOLDER and compare them "
                    "with ckptfix diff"
                )
        if self.status == 2:
            yield line(
                "  help: seed every generator (accelerate.utils.set_seed), set PYTHONHASHSEED, and "
                "use deterministic kernels (torch.use_deterministic_algorithms)"
            )
        if self.steps:
            yield line(f"  compared: {self.compared}")
        yield from map(unchecked_line, self.not_compared)

    @property
    def compared(self) -> str:
        """Return what was compared, in words."""
        states = ", ".join(_PLURALS.get(state, state) for state in self.states)
        return f"{_range(self.steps)}, {count_of(self.ranks, 'rank')}: {states}"

    def _about(self) -> str:
        if self.verdict == "exact":
            return f"killed after step {self.saved_at} and resumed, the run continues bit for bit"
        if self.verdict == "not exact":
            return (
                f"killed after step {self.saved_at} and resumed, the run diverges from the "
                "uninterrupted one"
            )
        return "two uninterrupted runs already differ, so nothing can be said about the resume"

    def _consequences(self) -> Iterator[Line]:
        follows = [
            f"{_PLURALS.get(one, one)} from step {self.first_steps[one]}"
            for one in _FOLLOWS
            if one in self.first_steps
        ]
        if follows:
            yield line(f"  also different: {', '.join(follows)}")
        elif self.first_steps:
            yield line(
                "  losses, gradients and weights agree in every compared step, so the "
                "difference has had no effect yet"
            )


def certificate_of(
    script: str,
    comparison: Comparison,
    reference: RankRuns,
    *,
    checkpoint: str,
    guarded: bool,
    stopped: bool,
    **about: Any,
) -> Certificate:
    """Return the certificate of a comparison. ``stopped``: the runs were ended before the script's
    own end.
    """
    is_unsteady = comparison.control is not None
    differences = (
        (comparison.control,) if comparison.control is not None else comparison.differences
    )
    verdict = "not deterministic" if is_unsteady else "not exact" if differences else "exact"
    return Certificate(
        script=script,
        verdict=verdict,
        saved_at=comparison.saved_at,
        checkpoint=checkpoint,
        ranks=comparison.ranks,
        steps=comparison.steps,
        states=tuple(state for state in STATES if state in comparison.strips),
        differences=differences,
        first_steps=comparison.first_steps,
        strips=comparison.strips,
        not_compared=(
            tuple(_not_compared(comparison, reference, stopped)) if not is_unsteady else ()
        ),
        versions=reference[0].versions if reference else {},
        guarded=guarded,
        **about,
    )


def _not_compared(comparison: Comparison, reference: RankRuns, stopped: bool) -> Iterator[str]:
    strips = comparison.strips
    if "batch" not in strips:
        yield "batches: the script uses no dataloader of torch or accelerate"
    if "loss" not in strips:
        yield "losses: the script does not call accelerator.backward"
    yield (
        "objects that the script neither prepares nor registers (an EMA, counters), and attributes "
        "outside state_dict()"
    )
    silent = max((one.world for one in reference), default=1) - len(reference)
    if silent > 0:
        yield f"{count_of(silent, 'rank')}: no optimizer step was recorded"
    for state, name in sorted(comparison.ignored):
        words = {"generators": "the generator of", "custom objects": "the custom object"}
        what = f"{words.get(state, 'the unprepared model')} {name}"
        yield f"{what}: also differs between two uninterrupted runs"
    if stopped and comparison.steps:
        yield f"steps after {comparison.steps[-1]}: --steps ended the runs there"
    if comparison.steps and not comparison.passes_begun and "batch" in strips:
        yield "the order of the next epoch: no epoch begins in the compared steps; raise --steps"
    if any("sampled" in one.notes for one in reference):
        yield (
            "every byte of large tensors: only evenly spaced blocks and the sum of all bits "
            "were compared"
        )
    others = [note for one in reference for note in one.notes if note != "sampled"]
    yield from dict.fromkeys(others)


def _range(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


# The HTML page.

_MOST_STEPS = 2000
_SIGNS = {True: ("eq", "="), False: ("apart", "≠"), None: ("", "")}


def html_page(certificate: Certificate) -> str:
    """Return the certificate as an HTML document."""
    verdict, *rest = map(str, certificate.lines())
    css = "good" if certificate.status == 0 else "bad"
    parts = [
        f'<p><strong class="{css}">{html_text(verdict)}</strong></p>',
        html_list(map(str.strip, rest)),
        *_chart(certificate),
        "<h2>Runs</h2>",
        f"<dl>{''.join(_run(certificate, name) for name in certificate.commands)}</dl>",
    ]
    return html_document(f"ckptfix prove-resume {certificate.script}", parts)


def _run(certificate: Certificate, name: str) -> str:
    command, seconds = certificate.commands[name], certificate.seconds.get(name, 0.0)
    return f"<dt>{html_text(name)} ({seconds:.1f} s)</dt><dd><code>{html_text(command)}</code></dd>"


def _chart(certificate: Certificate) -> Iterator[str]:
    if not certificate.steps:
        return
    steps = certificate.steps[:_MOST_STEPS]
    first = {(one.state, one.step) for one in certificate.differences[:1]}
    yield "<h2>Resumed run vs. uninterrupted run</h2>"
    yield html_legend(
        [("eq", "= equal"), ("apart", "≠ different"), ("apart first", "≠ first difference")]
    )
    heads = ['<th scope="col">step</th>', *(f'<th scope="col">{step}</th>' for step in steps)]
    rows = []
    for state, strip in certificate.strips.items():
        cells = "".join(
            _cell(state, step, strip[at], (state, step) in first) for at, step in enumerate(steps)
        )
        rows.append(f'<th scope="row">{html_text(state)}</th>{cells}')
    yield html_table("map steps", heads, rows)
    if len(certificate.steps) > _MOST_STEPS:
        yield (
            f"<p>not shown: {len(certificate.steps) - _MOST_STEPS} more steps; --json lists all</p>"
        )


def _cell(state: str, step: int, agrees: bool | None, is_first: bool) -> str:
    css, sign = _SIGNS[agrees]
    title = (
        f"{state}, step {step}: "
        f"{'equal' if agrees else 'absent' if agrees is None else 'different'}"
    )
    return f'<td class="{css}{" first" if is_first else ""}" title="{html_text(title)}">{sign}</td>'

"""``verify --device-map``: what it does, and how it prints its proofs."""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

from ckptfix.cli.pages import ensure_writable, write_page
from ckptfix.cli.report import Report
from ckptfix.operations.check import CheckReport, check
from ckptfix.operations.findings import Severity
from ckptfix.storage.paths import shell_path

_DAMAGED = "reload skipped: the checkpoint is damaged"


def reload(
    report: Report, path: str, device_map: str, max_memory: str | None, model: str | None, repeats: int,
    require_transfer_proof: bool, html: str | None,
) -> int:  # fmt: skip
    """Prove a reload, print it, and return the exit status. ``html``: a file for the page, tried before all else."""
    if html is not None:
        ensure_writable(html, (path,))
    checked = check(path)
    document: dict[str, Any] = {"path": path, "findings": [one.as_json(path) for one in checked.findings]}
    # Errors stop it. Warnings are said, and are no word about the reload: a Trainer's folder always has one.
    serious = [one for one in checked.findings if one.severity is not Severity.NOTE]
    report.findings(serious, path)
    if any(one.severity is Severity.ERROR for one in serious):
        next_step = _say_what_to_do(report, path, checked)
        found = [(one.severity.value, one.code, str(one)) for one in serious]
        return _finish(report, {**document, "reload": None}, 1, html, _damage_page, path, next_step, found)
    gc.enable()  # a model is many cycles, and must go before the next one is dispatched
    from ckptfix.runtime.devices.reload import verify_reload
    from ckptfix.runtime.devices.reload.page import html_page

    # Stdout is for the result: a model of the user's that prints must not get into it.
    with report.progress(f"verifying {path}") as progress, redirect_stdout(sys.stderr):
        result = verify_reload(
            path, device_map=device_map, max_memory=max_memory, model=model, repeats=repeats,
            require_transfer_proof=require_transfer_proof, progress=progress,
        )  # fmt: skip
    report.show(result.lines())
    return _finish(report, {**document, "reload": result.as_json()}, result.status, html, html_page, result)


def _finish(
    report: Report, document: dict[str, Any], status: int, html: str | None, make: Callable[..., str], *given: Any
) -> int:  # fmt: skip
    """Write the page, print the JSON object, and return the status: 3 when the page could not be written after all."""
    if html is not None:
        try:
            write_page(html, make(*given))
            report.line(f"report: {html}")
        except OSError as error:
            problem = f"--html {html}: {error.strerror}; no page was written"
            report.message(f"ckptfix: {problem}")
            return report.finish({**document, "error": problem}, 3)
    return report.finish(document, status)


def _damage_page(path: str, next_step: str, found: Sequence[tuple[str, str, str]]) -> str:
    from ckptfix.runtime.devices.reload.page import damage_page

    return damage_page(path, f"{_DAMAGED}; {next_step}", found)


def _say_what_to_do(report: Report, path: str, checked: CheckReport) -> str:
    """Print what to do with a damaged checkpoint, and return it."""
    report.line(_DAMAGED, bold=True)
    verb = "repair" if any(one.is_fixable for one in checked.findings) else "check"
    next_step = f"next: ckptfix {verb} {shell_path(path)}"
    report.line(next_step)
    return next_step

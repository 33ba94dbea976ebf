"""Findings as other programs take them: SARIF 2.1.0, and the commands that a GitHub workflow shows
at a change.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.wording import escape

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_DATA = {"%": "%25"}
"""Characters that a workflow command's message must not hold; ends of lines are escapes already."""

_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


class Annotation(NamedTuple):
    """One finding, with the file that it is about.

    ``code``: "" for what is about the run and not about the checkpoint: a failure, or what was not
    checked.
    """

    severity: Severity
    message: str
    file: AnyPath | None = None
    code: str = ""


def github_line(annotation: Annotation) -> str:
    """Return the workflow command of an annotation; what was not checked is a plain line of the
    log.
    """
    message = escape(annotation.message)
    if not annotation.code and annotation.severity is Severity.NOTE:
        return message
    properties = {"title": f"ckptfix {annotation.code}".strip()}
    if annotation.file is not None:
        properties = {"file": escape(str(annotation.file)), **properties}
    inside = ",".join(f"{name}={_replace(value, _PROPERTY)}" for name, value in properties.items())
    return f"::{_COMMANDS[annotation.severity]} {inside}::{_replace(message, _DATA)}"


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    return "".join(replaced.get(character, character) for character in text)


def sarif(annotations: Iterable[Annotation], status: int) -> dict[str, object]:
    """Return the SARIF log of one run. ``status``: its exit status; from 2 on, the run did not
    finish.

    What is about the run is a notification of the tool, so that a viewer counts findings alone.
    """
    from importlib.metadata import version  # drags in csv, email, sockets and shutil

    every = list(annotations)
    of_code = [annotation for annotation in every if annotation.code]
    codes = sorted({annotation.code for annotation in of_code})
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ckptfix",
                        "version": version("ckptfix"),
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": status < 2,
                        "exitCode": status,
                        "toolExecutionNotifications": [
                            _notification(annotation) for annotation in every if not annotation.code
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": [_result(annotation, codes) for annotation in of_code],
            }
        ],
    }


def _rule(code: str) -> dict[str, object]:
    from ckptfix.diagnosis.findings.catalogue import CODES

    kind = CODES.get(code)
    if kind is None:  # a difference from the manifest, or something about values
        return {"id": code}
    return {
        "id": code,
        "shortDescription": {"text": kind.meaning},
        "defaultConfiguration": {"level": kind.severity.value},
    }


def _result(annotation: Annotation, codes: Sequence[str]) -> dict[str, object]:
    return {
        "ruleId": annotation.code,
        "ruleIndex": codes.index(annotation.code),
        **_notification(annotation),
    }


def _notification(annotation: Annotation) -> dict[str, object]:
    words: dict[str, object] = {
        "level": annotation.severity.value,
        "message": {"text": escape(annotation.message)},
    }
    if annotation.file is not None:
        words["locations"] = [
            {"physicalLocation": {"artifactLocation": {"uri": _uri(annotation.file)}}}
        ]
    return words


def _uri(file: AnyPath) -> str:
    """Return a path as a URI, byte for byte; a relative one stays relative to where the command
    ran.
    """
    if isinstance(file, StorePath):
        scheme, _, rest = str(file).partition("://")
        return f"{scheme}://{quote(rest)}"
    return ("file://" if file.is_absolute() else "") + quote(os.fsencode(file))

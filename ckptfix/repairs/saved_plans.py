"""Saved plans: ``repair --plan-out FILE`` writes one, and ``repair --plan FILE`` applies it
unchanged or refuses.

The steps in a file are never executed. The folder is planned again with the saved policy, and the
two plans must agree: so an edited file can do nothing that a repair would not do.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import asdict

from ckptfix.diagnosis.policy import Policy
from ckptfix.errors import ChangedError, UsageError
from ckptfix.repairs.repair import RepairPlan, plan_repair
from ckptfix.reports import plain
from ckptfix.storage.atomic import create_file, read_file, sync_folder
from ckptfix.storage.files import AnyPath, absolute, is_url, lies_in
from ckptfix.storage.journal import State, is_elsewhere, transactions
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import cause, command, shell_path
from ckptfix.storage.undoable import is_as_left
from ckptfix.wording import count_of

_VERSION = 1


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the file, next to the sha256 over them."""

    plan_version: int
    path: str
    output: str | None
    policy: Policy
    files: dict[str, tuple[int, int]]
    steps: list[Any]
    unplanned: list[Any]


class SavedPlan(Struct, frozen=True, kw_only=True):
    """A plan that was read from ``file``. ``path``, ``output`` and ``policy`` are those of
    ``plan_repair``.

    ``files``: (size, time of the last change) of every file that the plan depends on, by its name
    in the folder. ``steps``: every step, as JSON values with a digest of its details;
    ``unplanned``: the findings that stay.
    """

    file: AnyPath
    path: Path | str
    output: Path | str | None
    policy: Policy
    files: Mapping[str, tuple[int, int]]
    steps: list[Any]
    unplanned: list[Any]

    def plan(
        self, *, recover: bool = False, break_lock: bool = False, progress: Progress | None = None
    ) -> RepairPlan:
        """Plan again and return the plan, which equals the saved one.

        Raises ChangedError when the plan is already applied, or the folder changed since, so that
        the plan may be wrong now, and all that ``plan_repair`` raises.
        """
        plan = plan_repair(
            self.path,
            self.policy,
            output=self.output,
            recover=recover,
            break_lock=break_lock,
            progress=progress,
        )
        if difference := next(self._differences(plan), None):
            done = (
                "an interrupted earlier run was rolled back; nothing else"
                if plan.recovered
                else "nothing"
            )
            if (number := self._applied(plan)) is not None:
                raise ChangedError(
                    f"{self.file}: the plan was already applied: repair {number} of {self.path} "
                    f"carried out its {count_of(len(self.steps), 'step')}, and the files have not "
                    f"changed since; {done} was changed; to undo that repair: "
                    f"{command('undo', plan.path)}"
                )
            raise ChangedError(
                f"{self.file} is out of date: {difference}; {done} was changed; next, with the "
                f"options of that plan: {command('repair', plan.path)} --plan-out NEW_FILE"
            )
        return plan

    def _applied(self, plan: RepairPlan) -> int | None:
        """Return the number of the last repair when it did the steps of this plan, as its journal
        proves, else None.
        """
        root, only = plan.target.root, plan.target.only or ""
        done = [
            transaction
            for transaction in transactions(root)
            if transaction.state is State.DONE
            and transaction.target == only
            and not is_elsewhere(root, transaction)
        ]
        if plan.steps or not self.steps or not done:
            return None
        is_same = done[-1].summary == [step["message"] for step in self.steps]
        return done[-1].number if is_same and is_as_left(root, done[-1].number) else None

    def _differences(self, plan: RepairPlan) -> Iterator[str]:
        root, files = plan.target.root, _files(plan)
        for name in sorted(self.files.keys() | files.keys()):
            if name not in files:
                yield f"{root / name} is missing or has become another kind of file"
            elif name not in self.files:
                yield f"{root / name} is new"
            elif self.files[name][0] != files[name][0]:
                yield (
                    f"{root / name} changed (expected {self.files[name][0]} bytes, found "
                    f"{files[name][0]})"
                )
            elif self.files[name] != files[name]:
                yield f"{root / name} was rewritten (its modification time changed)"
        # The words of a reason may be those of another version.
        reasons = [
            [{**each, "reason": ""} for each in unplanned]
            for unplanned in (self.unplanned, _unplanned(plan))
        ]
        for mine, now in ((self.steps, _steps(plan)), reasons):
            if mine != now:
                number = next(
                    (
                        at
                        for at, pair in enumerate(zip(mine, now, strict=False))
                        if pair[0] != pair[1]
                    ),
                    None,
                )
                which = "number of steps" if number is None else f"step {number + 1}"
                yield f"{plan.path} now needs a different plan ({which} differs)"


def save_plan(plan: RepairPlan, file: str | os.PathLike[str]) -> None:
    """Write a plan to a new file. Raises UsageError when the file exists or cannot be written."""
    path = Path(file)
    if plan.pending:
        pending = plan.pending[0]
        raise UsageError(
            f"{plan.path}: {pending}; {pending.advice_at(str(plan.path))}, then plan again"
        )
    if lies_in(path.resolve(), plan.target.root.resolve()):
        raise UsageError(
            f"{path} is inside {plan.target.root}, so writing the plan would change the "
            "checkpoint; choose another path"
        )
    output = None if plan.output is None else str(plan.output)
    content = to_builtins(
        _Document(
            plan_version=_VERSION,
            path=str(absolute(plan.path)),
            output=output if output is None or is_url(output) else os.path.abspath(output),
            policy=plan.policy,
            files=_files(plan),
            steps=_steps(plan),
            unplanned=_unplanned(plan),
        ),
        order="deterministic",
    )
    document = {**content, "sha256": _digest(content)}
    try:
        create_file(path, json.dumps(document, indent=1).encode() + b"\n")
        sync_folder(path.absolute().parent)
    except FileExistsError:
        raise UsageError(f"{path} exists; choose another path for the plan, or remove it") from None
    except OSError as error:
        raise UsageError(f"{path}: the plan cannot be written: {cause(path, error)}") from error


def read_plan(file: str | os.PathLike[str]) -> SavedPlan:
    """Read a plan. Raises UsageError when the file cannot be read, is not a plan, or was edited."""
    path = Path(file)
    try:
        document = json.loads(read_file(path))
    except OSError as error:
        raise UsageError(f"{path}: the plan cannot be read: {cause(path, error)}") from error
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "plan_version" not in document:
        raise UsageError(
            f"{path} is not a ckptfix plan; to write one: ckptfix repair PATH --plan-out FILE"
        )
    if document["plan_version"] != _VERSION:
        raise UsageError(
            f"{path}: plan_version {document['plan_version']!r} belongs to another version of "
            f"ckptfix (expected {_VERSION}); plan again"
        )
    digest = document.pop("sha256", None)
    if digest != _digest(document):
        raise UsageError(
            f"{path} was changed after ckptfix wrote it, so it is no longer the plan that was "
            "reviewed; next: plan again with --plan-out and a new file"
        )
    try:
        read = convert(document, _Document)
    except ValidationError:
        raise UsageError(
            f"{path} was not written by ckptfix; next: plan again with --plan-out and a new file"
        ) from None
    return SavedPlan(
        file=path,
        path=_place(read.path),
        output=None if read.output is None else _place(read.output),
        policy=read.policy,
        files=read.files,
        steps=read.steps,
        unplanned=read.unplanned,
    )


def _place(path: str) -> Path | str:
    return path if is_url(path) else Path(path)


def apply_command(file: str | os.PathLike[str]) -> str:
    """Return the command that applies a saved plan."""
    return f"ckptfix repair --plan {shell_path(Path(file))}"


def _files(plan: RepairPlan) -> dict[str, tuple[int, int]]:
    # Inodes can change when a file system is mounted again, so they are not compared.
    return {
        str(path): (status.size, status.mtime_ns) for path, status in plan.diagnosis.scanned.items()
    }


def _steps(plan: RepairPlan) -> list[dict[str, Any]]:
    return [{**step.as_json(), "digest": _digest(_details(step.action))} for step in plan.steps]


def _unplanned(plan: RepairPlan) -> list[dict[str, Any]]:
    return [finding.as_json() for finding in plan.unplanned]


def _details(value: object) -> object:
    """Return every field of an action, the key maps too, as JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _details(item) for key, item in value.items()}
    if isinstance(value, Struct):
        return {name: _details(of) for name, of in asdict(value).items()}
    return plain(value)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

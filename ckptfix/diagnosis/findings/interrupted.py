"""Findings about what was cut short: a save, a download, a copy, and what a salvage left."""

import os
from pathlib import Path

from ckptfix.checkpoint.dcp import lost_metadata
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.manifest import Losses
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.incomplete import is_required
from ckptfix.storage.files import is_url
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of, human_size, list_names


class Salvaged(Finding, frozen=True, kw_only=True):
    """A folder that ``ckptfix salvage`` wrote, with losses. ``damaged``: data that was kept
    although it is damaged.
    """

    code = "salvaged"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "`ckptfix salvage` wrote this folder, and `salvage.json` lists what is lost: "
        "it is not a complete checkpoint"
    )
    advice = (
        "do not resume from it as if it were complete: load only its weights, or restore "
        "what is lost and delete salvage.json"
    )

    tensors: int
    files: int
    damaged: int

    def __str__(self) -> str:
        losses = Losses(self.tensors, self.files, self.damaged)
        return f"{self.path}: this checkpoint was salvaged: {losses}"


class StagingFolder(Finding, frozen=True, kw_only=True):
    """The staging folder of a guarded save, or ``of`` another writer.

    ``is_rest``: files of it are already in place in a mixed checkpoint. ``holds_previous``: the
    checkpoint that it was to replace is in it. ``same_machine``: the process was asked for; of
    another machine only the age of the last change is known.
    """

    code = "staging-folder"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "a guarded save, migrate, salvage or repair is running or was killed, and this is its "
        "staging folder: not a checkpoint"
    )

    is_running: bool
    pid: int
    host: str
    same_machine: bool
    is_rest: bool = False
    of: str = "save"
    holds_previous: bool = False

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path.parts else ""
        if self.is_running and not self.same_machine:
            return (
                f"{where}staging folder of a {self.of} on another machine (pid {self.pid} on "
                f"{self.host}); it changed less than a day ago, so it may still be in use"
            )
        if self.is_running:
            return (
                f"{where}a {self.of} is running (pid {self.pid} on {self.host}); this is its "
                "staging folder"
            )
        end = "; safe to delete"
        if self.is_rest:
            end = "; files of that save are already in place, so the checkpoint mixes two saves"
        elif self.holds_previous:
            end = "; it holds the checkpoint that was being replaced"
        return (
            f"{where}abandoned staging folder of a {self.of} that was killed (pid {self.pid} on "
            f"{self.host}){end}"
        )

    @property
    def advice(self) -> str:
        """Advice for a running, an unfinished or an abandoned save, of which the next one deletes
        the rest.
        """
        if self.is_running:
            return f"check the checkpoint when the {self.of} has ended"
        if self.is_rest:
            return (
                "save again, or load a complete checkpoint: ckptfix.latest_checkpoint(PROJECT) "
                "finds the newest"
            )
        if self.holds_previous:
            return "the next ckptfix migrate in the same parent folder restores that checkpoint"
        return f"the next {self.of} deletes it, or you can delete it now"

    def advice_at(self, path: str) -> str:
        """Return the advice with the command that deletes the folder."""
        if self.is_running or self.is_rest or self.holds_previous:
            return self.advice
        if is_url(path):
            return self.advice
        folder = Path(path) / self.path
        # rm refuses to delete "."
        return (
            f"{self.advice}: rm -r "
            f"{shell_path(folder if folder.parts else Path(os.path.abspath(folder)))}"
        )


def _is_needed(name: str) -> bool:
    """Return whether ``load_state`` fails without a file of this name."""
    parsed = parse_file_name(name)
    return (
        parsed is not None
        and parsed.is_state_file
        and not parsed.is_of_trainer
        and is_required(name)
    )


class InterruptedSave(Finding, frozen=True, kw_only=True):
    """Data without the metadata that is written last, or a file that was never moved into place."""

    code = "interrupted-save"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a save, download or copy was interrupted: a file still has its temporary name, DCP's "
        "`.metadata` (written last) is missing, or a numbered checkpoint has no weights"
    )

    files: int = 0
    unfinished: bool = False
    renamed: bool = False
    over_another: bool = False
    ranks: tuple[int, ...] = ()
    leftover: bool = False
    """A file with a temporary name, in a folder of any kind. The other fields are of DCP folders.
    """
    wanted: str = ""
    """The name that such a file was to get, where no file has it."""
    mixed: bool = False
    """Files of a guarded save have taken the place of old ones, and not all of them."""
    upload: str = ""
    """Why an upload to a store, or to a mount of one, is not complete: it has no commit marker."""
    bare: bool = False
    """A numbered folder of a run without files of a checkpoint: the save was killed before it wrote
    them.
    """
    below: tuple[str, ...] = ()
    """Sub-folders of a bare one that hold weights, as hooks of diffusers write them before anything
    else.
    """
    newest: str = ""
    """Name of the newest complete checkpoint next to a bare one, "" where there is none or nobody
    looked.
    """

    @property
    def resume(self) -> Resume:
        """It fails where a state is missing that was being copied."""
        return Resume.FAILS if _is_needed(self.wanted) else Resume.SUCCEEDS

    def __str__(self) -> str:
        if self.bare:
            if self.below:
                return (
                    f"this checkpoint has only {list_names(self.below)}: its save was "
                    "interrupted before the rest was written"
                )
            return "this checkpoint has no weights: its save was interrupted before it wrote them"
        if self.upload:
            return f"{self.path}: this is not a complete checkpoint: {self.upload}"
        if self.mixed:
            return (
                f"{self.path}: the last save was interrupted while moving its files into place; "
                "the other files are older"
            )
        if self.leftover:
            missing = f"; {self.wanted} is missing" if self.wanted else ""
            return f"{self.path}: left over from an interrupted save or copy{missing}"
        data = count_of(self.files, ".distcp file")
        if self.over_another:
            return (
                f"{self.path}: left over next to .metadata and {data}; a save over an older "
                "checkpoint was interrupted"
            )
        state = "is still named .metadata.tmp" if self.unfinished else "is missing"
        ranks = f" of {count_of(len(self.ranks), 'rank')}" if self.ranks else ""
        gap = max(self.ranks, default=-1) + 1 - len(self.ranks)
        have = "has" if gap == 1 else "have"
        lost = f"; {count_of(gap, 'lower-numbered rank')} {have} none" if gap > 0 else ""
        cause, _ = lost_metadata(unfinished=self.unfinished, renamed=self.renamed)
        return f"{self.path} {state} (found {data}{ranks}{lost}): {cause}"

    @property
    def advice(self) -> str:
        """Advice to copy what is missing again, to save again, or to use another checkpoint."""
        if self.bare:
            known = f"{self.newest}, the newest complete one"
            newest = (
                known if self.newest else "a complete checkpoint; to find one: ckptfix check -r RUN"
            )
            return f"scripts that load the newest folder fail on this one; resume from {newest}"
        if self.upload:
            return (
                "if the machine that uploaded it still has the save, upload it again: ckptfix "
                "upload FOLDER URL; otherwise load a complete checkpoint: "
                "ckptfix.latest_checkpoint(PROJECT) finds the newest"
            )
        if self.mixed:
            return (
                "save to this folder again, or load a complete checkpoint: "
                "ckptfix.latest_checkpoint(PROJECT) finds the newest"
            )
        if self.leftover:
            return (
                "copy the complete checkpoint again, or use an older one; delete this file once "
                "the checkpoint is complete"
            )
        if self.over_another:
            return (
                "the files may come from two saves: use another checkpoint, or delete "
                ".metadata.tmp if you know that this one is complete"
            )
        _, advice = lost_metadata(unfinished=self.unfinished, renamed=self.renamed)
        return advice


class LeftoverSave(InterruptedSave, frozen=True):
    """A bare checkpoint that is older than a complete one: nothing resumes from it, so it changes
    no status.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to delete the folder: a resume takes the newer one."""
        return f"nothing to do: {self.newest} is newer and complete"


class HalfDownloaded(InterruptedSave, frozen=True, kw_only=True):
    """A file whose download from the Hugging Face hub did not end, or files of a snapshot whose
    blobs are missing.

    ``names``: the files, () where it is not recorded which one it is. ``have``: the bytes that
    came, None for links. ``again``: the command that downloads the rest, "" where the repository is
    not known.
    """

    names: tuple[str, ...]
    have: int | None
    again: str

    @property
    def resume(self) -> Resume:
        """It fails where one of the files is a state."""
        return Resume.FAILS if any(map(_is_needed, self.names)) else Resume.SUCCEEDS

    def __str__(self) -> str:
        if self.have is None:
            if len(self.names) == 1:
                links = "is a link to a blob that does not exist: the blob was deleted"
            else:
                more = count_of(len(self.names) - 1, "more file")
                links = f"and {more} are links to blobs that do not exist: the blobs were deleted"
            return f"{self.path} {links}, or the snapshot was copied without its blobs/"
        what = self.names[0] if self.names else "a file"
        return (
            f"{what} was not downloaded completely: {self.path} has {human_size(self.have)} of it"
        )

    @property
    def advice(self) -> str:
        """Advice to download the file, or to copy the files behind the links."""
        if not self.again:
            return "copy the snapshot again, following its links: cp -rL or rsync -aL"
        repository = (
            "; replace REPO with the repository, whose name is not recorded"
            if " REPO " in self.again
            else ""
        )
        when = (
            "to download it again"
            if self.have is None
            else "to download the rest, unless a download is running"
        )
        return f"{when}: {self.again}{repository}"


class SpareDownload(HalfDownloaded, frozen=True):
    """A half download next to complete weights, as where the second format of a model was stopped:
    nothing needs it.
    """

    severity = Severity.NOTE

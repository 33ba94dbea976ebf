"""Findings about files and names that a save, a copy or a salvage left out, also in DCP folders."""

import os
from pathlib import Path

from ckptfix.checkpoint.filenames import (
    NOT_STATES,
    TRAINER_STATE,
    Role,
    name_of_trainer,
    parse_file_name,
    parse_folder_name,
)
from ckptfix.checkpoint.keys import dotted
from ckptfix.checkpoint.manifest import Losses
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.storage.files import is_url
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of, human_size, list_names


class MissingFile(Finding, frozen=True, kw_only=True):
    """A file that its manifest lists, and that is missing or has another size. ``have``: its bytes,
    None if missing.
    """

    code = "missing-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "a file listed in the manifest is missing, or has another size; or one that was uploaded "
        "is missing"
    )

    saved: int
    have: int | None

    def __str__(self) -> str:
        there = "is missing" if self.have is None else f"has {count_of(self.have, 'byte')}"
        return f"{self.path} {there}; the save wrote it with {count_of(self.saved, 'byte')}"

    @property
    def advice(self) -> str:
        """Advice to copy the file again, as the manifest holds none of its bytes."""
        return "copy the file again from where the checkpoint came, or use an older checkpoint"


_OF_A_RUN = {"optimizer", "scheduler", "rng"}
"""Beginnings of the Trainer's files that a checkpoint lacks whose states were deleted, or not
saved.
"""


def _is_weights(file_name: str) -> bool:
    parsed = parse_file_name(file_name)
    return parsed is not None and parsed.role in NOT_STATES


def _is_required(name: str) -> bool:
    parsed = parse_file_name(name) or parse_folder_name(name)
    return parsed is not None and parsed.role is not Role.RNG_STATE


class IncompleteCheckpoint(Finding, frozen=True, kw_only=True):
    """Missing states of a save, by its other files or by the checkpoints of the same run.

    ``known_by``: the evidence that they belong here. ``by_rank``: they may be on the disk of
    another node. ``of_trainer``: transformers' Trainer wrote the others. ``problem``: why a file
    that exists cannot be read. ``is_wrong``: the problem is what the file holds, and says what a
    load does. ``misnamed``: a file under another name that may be the missing one.
    ``may_be_dropped``: the script may no longer prepare these objects, as only earlier or only
    later checkpoints have them, and no other file here shows that it does.
    """

    code = "incomplete-checkpoint"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a file of a rank, optimizer, scheduler or model is missing, as the other files of the run "
        "show, or has nearly the right name; or `trainer_state.json` or a config cannot be read"
    )

    missing: tuple[str, ...]
    known_by: str
    by_rank: bool = False
    of_trainer: bool = False
    problem: str = ""
    is_wrong: bool = False
    misnamed: str = ""
    may_be_dropped: bool = False

    @property
    def resume(self) -> Resume:
        """It fails where ``load_state`` needs the files. It takes new random states, and the
        Trainer new states.
        """
        if self.may_be_dropped:
            return Resume.FAILS_IF_NEEDED
        if self.of_trainer or self.problem or self.severity is Severity.NOTE:
            return Resume.SUCCEEDS
        return Resume.FAILS if any(map(_is_required, self.missing)) else Resume.SUCCEEDS

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: {self.problem}"
        are = "is" if len(self.missing) == 1 else "are"
        return f"{', '.join(self.missing[:3])}{self._more} {are} missing: {self.known_by}"

    @property
    def _more(self) -> str:
        return f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""

    @property
    def advice(self) -> str:
        """Advice to copy the files again, unless the setup of the run explains it."""
        if self.misnamed:
            wanted = self.missing[0]
            # A script's own file of that name shows nothing; the checkpoints next to it do.
            is_of_script = name_of_trainer(wanted) == self.misnamed
            unless = (
                f"ignore this if the script no longer prepares its {wanted.partition('.')[0]}"
                if is_of_script
                else f"move {self.misnamed!r} out of the folder if nothing loads {wanted}"
            )
            return (
                f"if {self.misnamed!r} is that file, rename it to {wanted}; else copy {wanted} "
                f"again, or {unless}"
            )
        if self.is_wrong:
            # The problem says what a load does with the value: it need not fail.
            return "copy it again, or resume from a complete checkpoint"
        if self.missing == (ADAPTER,) and not self.of_trainer:
            return (
                "PeftModel.from_pretrained fails without it; copy it again from where the adapter "
                "came"
            )
        if self.missing == (ADAPTER,):
            return (
                "the Trainer resumes without it, and PeftModel.from_pretrained fails; copy it "
                "again, or from another checkpoint of the run"
            )
        if self.missing == (CONFIG,):
            return (
                "from_pretrained fails without it; copy it again, or from another checkpoint of "
                "the run"
            )
        if self.by_rank:
            cost = (
                "go on with new random states"
                if self.of_trainer
                else "cannot restore their random states and their step"
            )
            return (
                f"those processes {cost}; copy the files again, or resume from a complete "
                "checkpoint; where each node saves to a disk of its own, ignore this"
            )
        if self.of_trainer:
            copied = "it" if len(self.missing) == 1 else "them"
            kinds = {name.partition(".")[0].partition("_")[0] for name in self.missing}
            ignore = (
                "; ignore this if you keep it for its weights alone" if kinds == _OF_A_RUN else ""
            )
            return (
                f"{self._cost_for_trainer}; copy {copied} again, or resume from a complete "
                f"checkpoint{ignore}"
            )
        if all(name.startswith("random_states_") for name in self.missing):
            # accelerate catches the error and logs it (checkpointing.py:load_accelerator_state).
            fewer = ", or ignore this if the run now has fewer processes"
            again = f"again{'' if 'random_states_0.pkl' in self.missing else fewer}"
            return (
                f"load_state goes on with new random states and a new step; copy the files {again}"
            )
        what = self._what
        return (
            f"load_state fails without {what}; copy {what} again, or resume from a complete "
            "checkpoint; ignore this if the script has no such object, as load_state then "
            "succeeds"
        )

    @property
    def _what(self) -> str:
        return "this file" if len(self.missing) == 1 else "these files"

    @property
    def _cost_for_trainer(self) -> str:
        """The cost of the missing files. The Trainer loads optimizer and scheduler together, or
        neither.
        """
        copied = "it" if len(self.missing) == 1 else "them"
        if any(map(_is_weights, self.missing)):
            return f"the Trainer cannot resume without {copied}, and no library can load the model"
        others = [name for name in self.missing if name != TRAINER_STATE]
        states = [name for name in others if name.startswith("rng_state")]
        new = ["a new optimizer and learning rate"] if len(states) < len(others) else []
        goes_on = f"goes on with {' and '.join([*new, *['new random states'][: len(states)]])}"
        if not others:
            return "the Trainer cannot resume without it"
        if len(others) == len(self.missing):
            return f"the Trainer {goes_on}, and says nothing"
        return (
            f"the Trainer cannot resume without {TRAINER_STATE}, and without the others {goes_on}"
        )


class NestedCheckpoint(IncompleteCheckpoint, frozen=True, kw_only=True):
    """A checkpoint that is one level too deep: in a folder of its own name, ``outer``, which holds
    nothing else.
    """

    outer: str

    def __str__(self) -> str:
        return (
            f"{self.outer} holds this folder of the same name, and no file of a checkpoint itself"
        )

    @property
    def advice(self) -> str:
        """Advice to move the files, or to name the inner folder."""
        return (
            "load_state, the Trainer and from_pretrained find nothing in the outer folder; load "
            "this one, or move its files up a level"
        )


class UnreadFolder(IncompleteCheckpoint, frozen=True, kw_only=True):
    """A folder of a sharded state without the files of a save. ``inner``: the folder in it that has
    them, "" where it is empty.
    """

    inner: str = ""

    @property
    def resume(self) -> Resume:
        """It fails: torch and DeepSpeed look into the folder itself."""
        return Resume.FAILS

    def __str__(self) -> str:
        return f"{self.path} holds no save: {self.known_by}"

    @property
    def advice(self) -> str:
        """Advice to move the files, or to copy the folder."""
        again = "copy the folder again, or resume from a complete checkpoint"
        if self.inner:
            return f"the load fails: move the files of {self.inner} to {self.path}, or {again}"
        return f"the load fails: {again}"


class FewerRanks(IncompleteCheckpoint, frozen=True):
    """Random states that one neighbour has: a run that resumed with fewer processes has none, so no
    status changes.
    """

    severity = Severity.NOTE


class RandomStatesLeftOut(IncompleteCheckpoint, frozen=True):
    """Random states that ``migrate`` left out on purpose, as its receipt in the folder says."""

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice on the resume, as no copy has random states for these processes."""
        return (
            "nothing to do: the Trainer resumes with new random states, so dropout and other draws "
            "differ from a run that was not interrupted"
        )


class LostPosition(IncompleteCheckpoint, frozen=True):
    """States of dataloaders that the checkpoints next to it have. A run that no longer saves them
    is healthy.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice on the epoch: accelerate loads a state of a dataloader only if its file exists."""
        what = self._what
        return (
            f"load_state succeeds without {what}, and the epoch begins again: samples of it are "
            f"used twice; copy {what} again, or ignore this if the script no longer uses "
            "use_stateful_dataloader"
        )


class UnreadShards(IncompleteCheckpoint, frozen=True):
    """The one file of a model that is there in shards alone. A save hook of the script may have
    written them.
    """

    @property
    def advice(self) -> str:
        """Advice to copy the file, unless a hook reads the shards."""
        (wanted,) = self.missing
        return (
            "load_state fails, unless a load hook of the script reads the shards: then ignore "
            f"this; else copy {wanted} again, or resume from a complete checkpoint"
        )


class LostModelFiles(IncompleteCheckpoint, frozen=True):
    """Weights or configs of a model in a sub-folder, which the checkpoints next to it have: a hook
    saves them.
    """

    @property
    def resume(self) -> Resume:
        """It fails where the script surely saved them. ``from_pretrained`` in its load hook needs a
        config, too.
        """
        if self.may_be_dropped:
            return Resume.FAILS_IF_NEEDED
        return (
            Resume.SUCCEEDS if self.of_trainer or self.severity is Severity.NOTE else Resume.FAILS
        )

    @property
    def advice(self) -> str:
        """Advice to copy the files again."""
        what = self._what
        ignore = (
            "; ignore this if the script no longer saves this model" if self.may_be_dropped else ""
        )
        return (
            f"a load hook that calls from_pretrained fails without {what}; copy {what} again, or "
            f"resume from a complete checkpoint{ignore}"
        )


class LostConfig(LostModelFiles, frozen=True):
    """A config next to weights under the name of diffusers, where no checkpoint shows whether the
    script writes it.
    """

    @property
    def resume(self) -> Resume:
        """It succeeds for a hook that writes the weights itself, and reads them without a
        config.
        """
        return Resume.FAILS_IF_NEW

    @property
    def advice(self) -> str:
        """Advice to copy the config again, unless the hook reads none."""
        return (
            f"from_pretrained in a load hook fails without {self._what}; copy {self._what} again, "
            "or ignore this if the hooks of the script write and read the weights themselves"
        )


class ConfiglessModel(LostConfig, frozen=True):
    """The same where no checkpoint next to this one has a config: the script writes none."""

    severity = Severity.NOTE

    @property
    def resume(self) -> Resume:
        """It succeeds, as from all of them."""
        return Resume.SUCCEEDS


class LaterModel(LostModelFiles, frozen=True):
    """A model that all later checkpoints have, and the oldest one lacks: an average may begin later
    in a run.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to compare with the script."""
        what = self._what
        return f"nothing to do if the script began to save this model later; else copy {what} again"


class LostLora(LostModelFiles, frozen=True):
    """LoRA weights of diffusers, which the checkpoints next to it have, in a folder without other
    weights.
    """

    @property
    def advice(self) -> str:
        """Advice to give the file its name back, or to copy it again."""
        (wanted,) = self.missing
        rename = (
            f"if {self.misnamed!r} is that file, rename it to {wanted}; else "
            if self.misnamed
            else ""
        )
        return (
            f"a load hook that looks for {wanted} fails: {rename}copy {wanted} again, or resume "
            "from a complete checkpoint"
        )


class LostTag(IncompleteCheckpoint, frozen=True, kw_only=True):
    """DeepSpeed's file ``latest`` without the name of a checkpoint. ``tag``: the newest checkpoint
    in the folder.
    """

    tag: str

    @property
    def advice(self) -> str:
        """Advice to write the tag, as the states themselves are intact."""
        return (
            "DeepSpeed, the Trainer and zero_to_fp32 find no checkpoint without it; write the "
            f"name of the folder to load into the file, such as {self.tag}"
        )


class UnreadTag(LostTag, frozen=True):
    """The same in a folder of ``save_state``: ``load_state`` gives DeepSpeed the tag, and never
    reads the file.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to write the tag for exports, as a resume does without."""
        return (
            "load_state does not read it; zero_to_fp32 without a tag fails: write the name of the "
            f"folder to load into the file, such as {self.tag}"
        )


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

    tensors: int
    files: int
    damaged: int

    def __str__(self) -> str:
        losses = Losses(self.tensors, self.files, self.damaged)
        return f"{self.path} says that this was salvaged: {losses}"

    @property
    def advice(self) -> str:
        """Advice not to resume as from a complete checkpoint."""
        return (
            "do not resume from it as if it were complete: load its weights by themselves, or put "
            "back what is lost and delete salvage.json"
        )


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
        "the staging folder of a guarded save, migrate, salvage or repair that is running, or was "
        "killed and left it: not a checkpoint"
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
                f"{self.host}) that changed less than a day ago, so it may be running"
            )
        if self.is_running:
            return (
                f"{where}a {self.of} is running (pid {self.pid} on {self.host}); this is its "
                "staging folder"
            )
        end = "; safe to delete"
        if self.is_rest:
            end = (
                "; files of that save are already in place, so the checkpoint holds files of two "
                "saves"
            )
        elif self.holds_previous:
            end = "; the checkpoint that it was to replace is in it"
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
            return "check the checkpoint when the save has ended"
        if self.is_rest:
            return (
                "save again, or load a complete checkpoint: ckptfix.latest_checkpoint(PROJECT) "
                "finds the newest"
            )
        if self.holds_previous:
            return "the next ckptfix migrate next to it puts that checkpoint back"
        return f"the next {self.of} deletes it, or you do"

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


class MismatchedNames(Finding, frozen=True, kw_only=True):
    """An optimizer whose keys do not match its model's or one another: repaired by hand, or in
    part.
    """

    code = "mismatched-names"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "the keys of an optimizer have other wrappers than its model, or in one place only: "
        "renamed in part"
    )

    scope: str
    chain: tuple[str, ...]
    target: tuple[str, ...]
    reference: str
    expected: tuple[str, ...]
    names: int

    @property
    def resume(self) -> Resume:
        """It succeeds: accelerate loads an optimizer by position, not by its keys."""
        return Resume.SUCCEEDS

    def __str__(self) -> str:
        have = f"begin with '{dotted(self.chain)}'" if self.chain else "have no wrapper"
        want = f"with '{dotted(self.expected)}'" if self.expected else "with none"
        return f"{self.path}: the keys in {self.scope} {have}, those of {self.reference} {want}"


class UndecidedNames(MismatchedNames, frozen=True):
    """An optimizer whose keys agree with one another and not with its model's: the script may save
    and read both so.
    """

    code = "mismatched-names"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--allow mismatched-names"

    @property
    def advice(self) -> str:
        """Advice to keep the keys for the script that wrote them, and to rename after a rename by
        hand.
        """
        return (
            "right for a script that saves both so, such as ddp.state_dict() next to "
            "get_optimizer_state_dict(), which would not find its keys after a rename; if the "
            f"model or the optimizer was renamed by hand: ckptfix repair DIR {self.option}"
        )


def _is_needed(name: str) -> bool:
    """Return whether ``load_state`` fails without a file of this name."""
    parsed = parse_file_name(name)
    return (
        parsed is not None
        and parsed.is_state_file
        and not parsed.is_of_trainer
        and _is_required(name)
    )


class InterruptedSave(Finding, frozen=True, kw_only=True):
    """Data without the metadata that is written last, or a file that was never moved into place."""

    code = "interrupted-save"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a save, a download or a copy was cut short: a file still has its temporary name, DCP's "
        "`.metadata`, written last, is missing, or a numbered checkpoint has no weights"
    )

    files: int = 0
    unfinished: bool = False
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
                    f"this checkpoint has only {list_names(self.below)}: its save was interrupted "
                    "before the rest"
                )
            return "this checkpoint has no weights: its save was interrupted before it wrote them"
        if self.upload:
            return f"{self.path}: this is not a complete checkpoint: {self.upload}"
        if self.mixed:
            return (
                f"{self.path}: the last save was interrupted while its files were put in place; "
                "others are older"
            )
        if self.leftover:
            missing = f", and {self.wanted} is missing" if self.wanted else ""
            return f"{self.path} was left by a save or a copy that was cut short{missing}"
        data = count_of(self.files, ".distcp file")
        if self.over_another:
            return (
                f"{self.path} is left over next to .metadata and {data}: a save over an older one "
                "was cut short"
            )
        state = "was not put in its place (.metadata.tmp)" if self.unfinished else "is missing"
        ranks = f" of {count_of(len(self.ranks), 'rank')}" if self.ranks else ""
        gap = max(self.ranks, default=-1) + 1 - len(self.ranks)
        lost = f"; {count_of(gap, 'rank')} below the highest left none" if gap > 0 else ""
        return f"{self.path} {state}, next to {data}{ranks}{lost}: the save was interrupted"

    @property
    def advice(self) -> str:
        """Advice to save again or use another checkpoint: only the metadata has the places of the
        chunks.
        """
        if self.bare:
            known = f"{self.newest}, the newest complete one"
            newest = (
                known if self.newest else "a complete checkpoint, which ckptfix check -r RUN names"
            )
            return f"scripts that take the newest folder fail here; resume from {newest}"
        if self.upload:
            return (
                "if the machine that uploaded it still has the save: ckptfix upload FOLDER here; "
                "else load a complete checkpoint: ckptfix.latest_checkpoint(PROJECT) finds the "
                "newest"
            )
        if self.mixed:
            return (
                "save here again, or load a complete checkpoint: "
                "ckptfix.latest_checkpoint(PROJECT) finds the newest"
            )
        if self.leftover:
            return (
                "copy the complete checkpoint again, or use an older one; delete the file when all "
                "is there"
            )
        if self.over_another:
            return (
                "the files may be of two saves: use another checkpoint, or delete the "
                ".metadata.tmp when you know that this one is complete"
            )
        return "use an older checkpoint: without .metadata nothing says which chunk is where"


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
            return "copy the snapshot again with the files behind its links: cp -rL, or rsync -aL"
        repository = (
            "; REPO is the repository, whose name is not recorded" if " REPO " in self.again else ""
        )
        when = "to download it again" if self.have is None else "unless a download is running"
        return f"{when}: {self.again}{repository}"


class SpareDownload(HalfDownloaded, frozen=True):
    """A half download next to complete weights, as where the second format of a model was stopped:
    nothing needs it.
    """

    severity = Severity.NOTE


class MissingRank(Finding, frozen=True, kw_only=True):
    """A rank without any file."""

    code = "missing-rank"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "files of a rank are missing, by `.metadata` or by the parts that the other ranks saved: "
        "they are on another node, or were not copied"
    )

    rank: int
    files: int
    items: int
    holds: tuple[str, ...]
    detail: str = ""
    """The evidence where it is not ``.metadata``: the files of other ranks, as with DeepSpeed or
    FSDP without DCP.
    """
    elsewhere: int = 0
    """The number of tensors without a part in this rank."""
    ranks: int = 1
    """The number of ranks without a file, where one reason shows all of them; ``rank`` is the
    first.
    """

    @property
    def is_salvageable(self) -> bool:
        """False where the rank held a part of every tensor, as with FSDP and DeepSpeed."""
        return self.elsewhere > 0

    def __str__(self) -> str:
        if self.ranks > 1:
            more = count_of(self.files - 1, "more file")
            return (
                f"{self.path} and {more} of {count_of(self.ranks, 'rank')} are missing: "
                f"{self.detail}"
            )
        if self.detail:
            return f"{self.path} is missing: {self.detail}"
        what = f"{count_of(self.files, 'file')} of rank {self.rank}"
        lost = f"{count_of(self.items, 'item')}: {list_names(self.holds)}"
        return (
            f"{self.path}: nothing of rank {self.rank} is there; .metadata names {what}, with "
            f"{lost}"
        )

    @property
    def advice(self) -> str:
        """Advice to copy the files from the rank's node: each rank writes to its own where the
        folder is not shared.
        """
        return "copy the files of that rank from the node that it ran on into this folder"


class IncompleteTensor(Finding, frozen=True, kw_only=True):
    """A tensor whose chunks do not add up to it."""

    code = "incomplete-tensor"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the chunks in `.metadata`, or the parts that ranks saved, do not add up to a tensor: a "
        "gap, an overlap, or a chunk that no file stores"
    )

    tensor: str
    detail: str

    @property
    def is_salvageable(self) -> bool:
        """True, as the other tensors are intact."""
        return True

    def __str__(self) -> str:
        return f"{self.path}: {self.tensor!r}: {self.detail}"

    @property
    def advice(self) -> str:
        """Advice to use an older checkpoint: the missing part is in no chunk."""
        if "overlap" in self.detail:
            return (
                "which of the overlapping values a load takes is not certain; use an older "
                "checkpoint"
            )
        return "loading leaves what was in memory there; use an older checkpoint"


class FlatParameters(Finding, frozen=True, kw_only=True):
    """Keys of FSDP's own flattened parameters."""

    code = "flat-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "keys contain `_flat_param`: FSDP's flattened parameters, which load only with the same "
        "wrapping"
    )

    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(len(self.tensors), 'key')} of FSDP's own: "
            f"{list_names(self.tensors)}"
        )

    @property
    def advice(self) -> str:
        """Advice to load the keys with the same wrapping: no file lists the parameters in a flat
        one.
        """
        return (
            "no key is changed: what a flat parameter holds is known to the run alone; load it "
            "with the same wrapping and number of processes, and save again with "
            "SHARDED_STATE_DICT"
        )

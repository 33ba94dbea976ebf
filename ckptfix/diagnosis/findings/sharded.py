"""Findings about shards and their indexes, and about models that a folder holds twice."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.stored_twice import keep_option, loads_in_words
from ckptfix.storage.files import is_url
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of, list_names, series


class RenamedShard(NamedTuple):
    """A file that holds exactly the tensors that an index places in a missing shard, and the name
    of that shard.
    """

    path: PurePosixPath
    name: str
    tensors: int

    @property
    def step(self) -> str:
        """The verb for what ``mv`` does with the file."""
        return "rename" if self.path.parent == PurePosixPath(self.name).parent else "move"


class MissingShard(Finding, frozen=True, kw_only=True):
    """A missing file that the index lists, or that the numbering of the shards implies.

    ``is_other_file``: the index lists a file that exists and is none of weights, such as
    ``config.json``. ``renamed``: the missing shards whose tensors a file of another name, or in a
    sub-folder, holds. ``complete``: the complete sets of another save that hold the listed keys, in
    words. ``is_none_left``: no listed shard exists.
    """

    code = "missing-shard"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "a shard that the index lists, or that the numbering of the shards implies, is missing"
    )

    named_by: str
    tensors: int
    others: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    is_other_file: bool = False
    renamed: tuple[RenamedShard, ...] = ()
    complete: tuple[str, ...] = ()
    is_none_left: bool = False

    @property
    def is_salvageable(self) -> bool:
        """True, as the other shards are intact, unless a new name brings all tensors back.

        A copy in the shards of another save is never taken.
        """
        return not self._is_renamed_alone and not (self.is_none_left and self.complete)

    @property
    def _is_renamed_alone(self) -> bool:
        return len(self.renamed) == 1 + len(self.others)

    def __str__(self) -> str:
        if self.is_other_file:
            return (
                f"{self.path} is not a weights file, but {self.named_by} lists it as a shard, so "
                "loaders fail"
            )
        more = f" and {count_of(len(self.others), 'more shard')} are" if self.others else " is"
        lost = f", with {count_of(self.tensors, 'tensor')}" if self.tensors else ""
        lost += f": {list_names(self.holds)}" if self.holds else ""
        if len(self.renamed) == 1:
            (shard,) = self.renamed
            whose = f"the {count_of(shard.tensors, 'tensor')} of {shard.name}"
            whose = whose if self.others else f"its {count_of(shard.tensors, 'tensor')}"
            lost += f"; {str(shard.path)!r} holds {whose}"
        elif self.renamed:
            many = f"the tensors of {len(self.renamed)} of the shards"
            whose = "them" if self._is_renamed_alone else many
            lost += f"; {list_names(str(shard.path) for shard in self.renamed)} hold {whose}"
        if self.complete:
            hold = "hold" if len(self.complete) == 1 else "each hold"
            lost += f"; {series(self.complete)} of another save {hold} all keys that it lists"
        return f"{self.path}{more} missing; expected by {self.named_by}{lost}"

    @property
    def advice(self) -> str:
        """Advice to copy the shard again: loading without it leaves random weights."""
        if self.is_other_file:
            return f"copy {self.named_by} and the shards again from their source"
        if self.renamed:
            steps = [f"{shard.step} {str(shard.path)!r} to {shard.name}" for shard in self.renamed]
            return "; ".join([*steps, *self._rest])
        if self.complete:
            index = self.named_by
            return (
                f"to load the save of {index}, copy its missing shards again from their source\n"
                f"to load {' or '.join(self.complete)} instead, move {index} and the shards of all "
                "other saves out of the folder, then: ckptfix repair DIR"
            )
        return (
            "copy the shard again from its source; loading without it leaves random weights in "
            "the model"
        )

    @property
    def _rest(self) -> tuple[str, ...]:
        is_all = self._is_renamed_alone
        return () if is_all else ("copy the other shards again from their source",)

    def advice_at(self, path: str) -> str:
        """Return the advice with the commands that rename shards; a store has no such commands."""
        if not self.renamed:
            return super().advice_at(path)
        if is_url(path):
            return self.advice
        folder = Path(path)
        renames = [
            f"mv {shell_path(folder / shard.path)} {shell_path(folder / shard.name)}"
            for shard in self.renamed
        ]
        files = "the files" if len(renames) > 1 else repr(str(self.renamed[0].path))
        step = "move" if any(shard.step == "move" for shard in self.renamed) else "rename"
        return "; ".join([f"{step} {files}: {' && '.join(renames)}", *self._rest])


class IndexMismatch(Finding, frozen=True, kw_only=True):
    """An index that disagrees with the headers about the files of tensors, or that loaders refuse.

    ``unlisted``: the number of tensors in shards that the index does not list.
    ``without_metadata``: it has no object ``metadata``, into which transformers and diffusers
    write. ``unread``: a ``.bin`` file among safetensors files, which transformers reads as
    safetensors. ``copies``: the shards that hold the first of the ``doubled`` tensors.
    ``is_read_in_part``: the tensors that it does not list are in listed shards, and old versions
    pass over them. ``refused``: its paths to files in the folder, such as ``./x``, if diffusers
    refuses them. ``twin``: an index of the same keys whose shards are missing; loaders look for
    that one, and for a missing one of this name none does. ``overwritten``: shards with the tensors
    of the shard ``overwritten_with`` instead of their own.
    """

    code = "index-mismatch"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "the index is missing or unreadable, lacks `metadata`, or disagrees with the shards; a "
        "repair rebuilds the index if the shards are intact and disjoint"
    )

    misplaced: int
    unlisted: int
    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    absent: bool = False
    problem: str | None = None
    rivals: int = 1
    without_metadata: bool = False
    unread: str = ""
    copies: tuple[str, ...] = ()
    is_read_in_part: bool = False
    refused: tuple[str, ...] = ()
    twin: PurePosixPath | None = None
    overwritten_with: str = ""
    overwritten: tuple[str, ...] = ()

    @property
    def is_fixable(self) -> bool:
        """True when the headers alone say what the index should be, so that a plain repair writes
        it.
        """
        unclear = self.lost or self.doubled or self.unread or self.twin or self.overwritten
        return not unclear and self.rivals == 1

    @property
    def is_salvageable(self) -> bool:
        """True, as the tensors in the shards are intact."""
        return bool(self.lost)

    def __str__(self) -> str:
        if self.rivals > 1:
            return (
                f"{self.path} lists none of the {self.rivals} sets of shards that exist, and it "
                "is unclear which set is right"
            )
        hold = "holds" if len(self.overwritten) == 1 else "hold"
        copies = f"{series(self.overwritten)} {hold} the tensors of {self.overwritten_with}"
        if self.absent and self.overwritten:
            return f"{self.path} is missing; {copies}, with equal values"
        if self.absent:
            return f"{self.path} is missing, but its shards exist"
        if self.problem is not None and self.is_fixable:
            return f"{self.path} cannot be read ({self.problem}), but its shards exist"
        if self.lost:
            lost = count_of(len(self.lost), "tensor")
            why = f"; {copies} instead" if self.overwritten else ""
            return f"{self.path} lists {lost} that no shard holds: {list_names(self.lost)}{why}"
        if self.doubled:
            doubled = count_of(len(self.doubled), "tensor")
            are = "is" if len(self.doubled) == 1 else "are"
            which = (
                f"{self.doubled[0]!r} in {series(self.copies)}"
                if self.copies
                else list_names(self.doubled)
            )
            return (
                f"{doubled} of {self.path} {are} in two shards with different values (first "
                f"{which})"
            )
        if self.unread:
            return (
                f"{self.path} lists files of two formats: transformers reads {self.unread} as "
                "safetensors and fails"
            )
        in_part = (
            ": with a device_map, transformers 4.44 leaves unlisted tensors random"
            if self.is_read_in_part
            else ""
        )
        problems = [
            (
                f"names the wrong shard for {count_of(self.misplaced, 'tensor')}"
                if self.misplaced
                else ""
            ),
            (
                f"does not list {count_of(self.unlisted, 'tensor')} of the shards{in_part}"
                if self.unlisted
                else ""
            ),
            (
                'has no "metadata" object, so transformers and diffusers refuse to load the model'
                if self.without_metadata
                else ""
            ),
            (
                f"lists the path {self.refused[0]!r}, but diffusers accepts only plain file names"
                if self.refused
                else ""
            ),
        ]
        return f"{self.path} {' and '.join(filter(None, problems))}"

    @property
    def advice(self) -> str:
        """Advice where the index is not rebuilt, as something would be lost."""
        if self.is_fixable:
            return ""
        if self.rivals > 1:
            return "not rebuilt: move the shards of all saves but one elsewhere, then repair"
        if self.twin:
            return (
                "not written, because no loader looks for this index; if these are the shards "
                f"that {self.twin} lists, rename them accordingly"
            )
        if self.unread:
            return (
                "accelerate.load_checkpoint_in_model reads each file by its extension: load the "
                "model with it, and save it again"
            )
        if self.overwritten and self.absent:
            return (
                "not written: a shard was overwritten with another one, so loading would leave "
                "random weights; copy the index and these shards again from their source"
            )
        if self.overwritten:
            return (
                "not rebuilt: loading would leave random weights; copy "
                f"{series(self.overwritten)} again from the source"
            )
        if self.doubled and not self.lost:
            return (
                "not rebuilt: from_pretrained and load_checkpoint_in_model use the last shard by "
                "name, the Trainer's resume uses either one; copy the shards again from "
                "their source"
            )
        if 0 < len(self.lost) <= self.unlisted:
            return (
                "not rebuilt: either a shard belongs to another model, and loading leaves random "
                "weights without an error, or the index has wrong keys; copy the index and the "
                "shards again from their source"
            )
        return (
            "not rebuilt: loading would leave random weights; copy the shards again from their "
            "source"
        )


class IndexOfOtherShards(IndexMismatch, frozen=True, kw_only=True):
    """An index that lists ``gone`` files, of which none exists, next to ``shards`` shards, a
    complete set of the same tensors. They may be of an older save than the index.
    """

    code = IndexMismatch.code
    action = Action.ASK
    option = f"--allow {code}"
    # Only the user knows which of the two saves is wanted.
    is_fixable = False

    gone: tuple[str, ...]
    shards: int

    def __str__(self) -> str:
        return (
            f"{self.path} belongs to another save: it lists {count_of(len(self.gone), 'file')} "
            f"that {'is' if len(self.gone) == 1 else 'are'} missing (first {self.gone[0]}), but "
            f"{self.shards} intact shards hold all of its {self.misplaced} tensors"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the index and the shards."""
        return (
            f"to load the {self.shards} shards: ckptfix repair DIR {self.option}; to load the save "
            "of the index instead, copy its missing files again from their source"
        )


class PartlyReadIndex(IndexMismatch, frozen=True):
    """An index of which only old versions of transformers leave tensors out: a warning."""

    severity = Severity.WARNING


class UndecidedIndex(IndexMismatch, frozen=True, kw_only=True):
    """A missing index with which a loader would take other weights than now, or fail.

    ``loads``: each of these loaders -> the file or index that it takes now.
    """

    code = IndexMismatch.code
    severity = Severity.WARNING
    action = Action.TELL
    # Only the user knows which of the two is wanted.
    is_fixable = False

    loads: Mapping[str, PurePosixPath]

    def __str__(self) -> str:
        return (
            f"{self.path} is missing, but its shards exist; {loads_in_words(self.loads)} now, "
            "and a rebuilt index would change that"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the two, as only the user knows which one is wanted."""
        return f"ckptfix did not write this index; {keep_option(self.path, *self.loads.values())}"


class OddIndex(Finding, frozen=True, kw_only=True):
    """An index that differs from the headers in a way that changes no load.

    ``computed``: listed keys that no shard holds, of buffers that models compute, or beyond the
    bytes that the index counts. ``tied``: listed keys that no shard holds, each tied to one that a
    shard holds. ``unlisted``: the number of tensors that the listed shards hold besides.
    ``repeated``: keys that the file has twice. ``misplaced``: the number of tensors that it places
    in another of the listed shards. ``copied``: tensors that several shards hold with equal values.
    ``leads_back``: the paths that lead through other folders to a file in this one, such as
    ``/data/model/x``.
    """

    code = IndexMismatch.code
    severity = Severity.NOTE
    action = Action.TELL
    meaning = IndexMismatch.meaning

    computed: tuple[str, ...]
    unlisted: int
    repeated: tuple[str, ...]
    misplaced: int = 0
    copied: tuple[str, ...] = ()
    leads_back: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    def __str__(self) -> str:
        differences = [
            (
                f"names the wrong shard for {count_of(self.misplaced, 'tensor')}, but its "
                "loaders read all shards"
                if self.misplaced
                else ""
            ),
            (
                f"lists shards that share {count_of(len(self.copied), 'tensor')}, with equal "
                f"values: {list_names(self.copied)}"
                if self.copied
                else ""
            ),
            (
                f"lists {count_of(len(self.computed), 'tensor')} that no shard holds, such as tied "
                f"weights or buffers that a model computes: {list_names(self.computed)}"
                if self.computed
                else ""
            ),
            (
                f"lists {count_of(len(self.tied), 'tensor')} that no shard holds and that loaders "
                f"tie to others: {list_names(self.tied)}"
                if self.tied
                else ""
            ),
            (
                f"does not list {count_of(self.unlisted, 'tensor')} of the shards, but loaders "
                "read them anyway"
                if self.unlisted
                else ""
            ),
            (
                f"lists {count_of(len(self.repeated), 'key')} twice (the last entry counts): "
                f"{list_names(self.repeated)}"
                if self.repeated
                else ""
            ),
            (
                f"lists {count_of(len(self.leads_back), 'path')} through other folders (first "
                f"{self.leads_back[0]!r}), so a copy of this folder loads the original files, or "
                "fails"
                if self.leads_back
                else ""
            ),
        ]
        return f"{self.path} {'; it '.join(filter(None, differences))}"

    @property
    def advice(self) -> str:
        """Advice for the one loader that compares the keys of the index with those of the model,
        and for ckptfix.
        """
        advice = [
            (
                f"{self._excuse}ignore this; only transformers.trainer_utils."
                "load_sharded_checkpoint needs strict=False"
                if self.computed or self.tied or self.unlisted
                else ""
            ),
            (
                "all loaders get the same values; ckptfix migrate refuses such shards, and seal "
                "covers them only as files: load the model, and save it again"
                if self.copied
                else ""
            ),
            (
                "before you copy or move the folder, change the paths in the index to plain file "
                "names"
                if self.leads_back
                else ""
            ),
        ]
        return "; ".join(filter(None, advice))

    @property
    def _excuse(self) -> str:
        return "if the model ties these weights or computes these buffers, " * bool(self.computed)


class ForeignIndex(Finding, frozen=True):
    """A file next to shards whose name ends like that of an index, and that is not one of
    weights.
    """

    code = IndexMismatch.code
    severity = Severity.NOTE
    action = Action.TELL
    meaning = IndexMismatch.meaning

    def __str__(self) -> str:
        return (
            f"{self.path}: load_checkpoint_in_model treats every *.index.json as a weights "
            "index: it refuses a folder with two, and loads nothing from one with only this index"
        )

    @property
    def advice(self) -> str:
        """Advice for the one loader that looks at the endings of names."""
        return (
            f"if you load the model with accelerate, move {self.path} to another folder; other "
            "loaders ignore it"
        )


class LeftoverIndex(Finding, frozen=True, kw_only=True):
    """An index whose shards are gone, next to a complete file or index of another save, which its
    loaders take before.

    ``file``: that file or index. ``missing``: listed shards that are gone. ``shards``: those that
    are still there. ``problem``: why the index cannot be read, "" for a readable one.
    ``refused_by``: a loader that refuses the folder, because it has two indexes.
    """

    code = IndexMismatch.code
    severity = Severity.NOTE
    action = Action.TELL
    meaning = IndexMismatch.meaning

    file: PurePosixPath
    missing: tuple[str, ...]
    shards: tuple[PurePosixPath, ...]
    problem: str
    refused_by: str = ""

    def __str__(self) -> str:
        return f"{self._left_over}; loaders use {self.file}{self._refusal}"

    @property
    def _refusal(self) -> str:
        return f"; {self.refused_by} refuses a folder with two indexes" if self.refused_by else ""

    @property
    def _left_over(self) -> str:
        if self.problem:
            return f"{self.path} is left over from another save, and cannot be read: {self.problem}"
        are = "are" if len(self.missing) > 1 else "is"
        gone = f"{count_of(len(self.missing), 'listed shard')} {are} missing"
        return f"{self.path} is left over from another save: {gone} (first {self.missing[0]})"

    @property
    def advice(self) -> str:
        """Advice to set aside what is left over."""
        shards = (
            f" and {count_of(len(self.shards), 'shard')} ({list_names(map(str, self.shards))})"
            if self.shards
            else ""
        )
        return (
            f"if {self.file} is the save that you want, set {self.path}{shards} aside: ckptfix "
            f"repair DIR --keep {self.file}"
        )


class BlockingIndex(LeftoverIndex, frozen=True, kw_only=True):
    """An index whose shards are gone, and that a loader takes before the file of a later save.

    ``loaders``: these loaders. ``holds``: how many keys the index lists, 0 where the file lacks
    some of them. ``is_resumed``: the Trainer takes the file, and resumes.
    """

    code = IndexMismatch.code
    severity = Severity.ERROR

    loaders: tuple[str, ...]
    holds: int
    is_resumed: bool = False

    @property
    def resume(self) -> Resume:
        """It succeeds where the Trainer takes the file before the index; ``from_pretrained`` still
        fails.
        """
        return Resume.SUCCEEDS if self.is_resumed else Resume.FAILS

    def __str__(self) -> str:
        holds = "whose shards hold" if self.file.suffix == ".json" else "which holds"
        held = f" ({holds} its {count_of(self.holds, 'tensor')})" if self.holds else ""
        prefer, fail = ("prefers", "fails") if len(self.loaders) == 1 else ("prefer", "fail")
        taken = f"{series(self.loaders)} {prefer} it to {self.file}{held}, and {fail}"
        resumed = f"; the Trainer resumes from {self.file}" if self.is_resumed else ""
        return f"{self._left_over}; {taken}{resumed}{self._refusal}"


class StrayShard(Finding, frozen=True):
    """A file of data that the metadata does not list."""

    code = "stray-shard"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "the folder has a `.distcp` file that `.metadata` does not list: another save left it, and "
        "loaders ignore it"
    )

    def __str__(self) -> str:
        return f"{self.path} is not listed in .metadata"

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        return "loaders ignore it; delete it if .metadata belongs to the save that you want"


class StaleShard(Finding, frozen=True, kw_only=True):
    """Shards of another save next to a complete model. ``index``: the index or the file of that
    model. ``others``: all of them but the first. ``is_whole``: the model is complete.
    """

    code = "stale-shard"
    severity = Severity.NOTE
    action = Action.ASK
    option = "--keep FILE"
    meaning = (
        "a complete model has an extra shard that no index lists: another save left it, and "
        "loaders that follow the index ignore it. The finding is a warning if torch's "
        "`HuggingFaceStorageReader`, which reads every safetensors file, may load its values"
    )

    index: PurePosixPath
    others: tuple[str, ...] = ()
    is_whole: bool = True

    @property
    def about(self) -> tuple[PurePosixPath, ...]:
        """All of the shards."""
        return self.path, *map(PurePosixPath, self.others)

    def __str__(self) -> str:
        if self.index.suffix != ".json":
            return f"{self._left_over}: transformers, diffusers and accelerate use {self.index}"
        return (
            f"{self._left_over}: loaders that follow the index use {self.index}, which does not "
            f"list {self._them}"
        )

    @property
    def _left_over(self) -> str:
        more = count_of(len(self.others), "more shard")
        shards = f"{self.path} and {more} are" if self.others else f"{self.path} is"
        return f"{shards} left over from another save"

    @property
    def _them(self) -> str:
        return "them" if self.others else "it"

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        shards = "these shards" if self.others else str(self.path)
        if not self.is_whole:
            return f"delete {shards} if {self.index} is the save that you want"
        return (
            f"if {self.index} is the save that you want, set {shards} aside: ckptfix repair DIR "
            f"--keep {self.index}"
        )


class RivalShard(StaleShard, frozen=True, kw_only=True):
    """Left-over safetensors shards with other values than the model that the index lists: a
    warning.

    ``tensors``: the number of their tensors whose values differ. ``difference``: the first of them.
    """

    severity = Severity.WARNING

    tensors: int
    difference: str

    def __str__(self) -> str:
        return (
            f"{self._left_over}, with different values for "
            f"{count_of(self.tensors, 'tensor')} of {self.index} (first {self.difference!r}): "
            f"transformers, diffusers and accelerate ignore {self._them}, but torch's "
            "HuggingFaceStorageReader reads every safetensors file and may load them"
        )


class IncompleteShards(StaleShard, frozen=True, kw_only=True):
    """Shards without their index, of which some are gone, next to a complete model: a warning.

    Loaders pass over them, but nothing shows whether the save that was interrupted is the later
    one. ``others``: all of them but the first.
    """

    severity = Severity.WARNING

    def __str__(self) -> str:
        more = count_of(len(self.others), "more shard")
        others = f" and {more} belong" if self.others else " belongs"
        return (
            f"{self.path}{others} to an incomplete save: other shards and their index are "
            f"missing; loaders use {self.index}"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        return f"{super().advice}\notherwise copy the shards and their index again"

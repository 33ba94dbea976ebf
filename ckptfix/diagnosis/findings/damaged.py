"""Findings about damaged files and indexes, and about pickles that can run code or that ``torch.load`` refuses."""

from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.findings.base import Action, Finding, Severity
from ckptfix.storage.doors import looks_like_url
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of, list_names, series

FOLDER = "a folder"
"""Content of what has the name of a file and is a folder."""

_READERS = {
    "a GGUF model": (".gguf", "llama.cpp or transformers (from_pretrained(FOLDER, gguf_file=NAME))"),
    "an ONNX model": (".onnx", "onnxruntime"),
    "an HDF5 file": (".h5", "h5py or Keras"),
    "a numpy array": (".npy", "numpy.load"),
}
"""Description of a file of another program -> its suffix, and the program that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedFile(Finding):
    """A file that ends before its own header says it does."""

    code = "truncated-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "the file ends too early: an interrupted save or download, or a full disk"

    have: int
    need: int | None
    detail: str
    in_header: bool = False

    @property
    def is_salvageable(self) -> bool:
        """False without a header, as no tensor can be found then."""
        return not self.in_header

    def __str__(self) -> str:
        return f"{self.path} is truncated: {self.detail}"

    @property
    def advice(self) -> str:
        """Advice to copy the file again: the lost bytes are nowhere in the folder."""
        return "copy the file again from where it came, or use an older checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailingBytes(Finding):
    """Bytes after the end of the format."""

    code = "trailing-bytes"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--allow trailing-bytes"
    meaning = "the file goes on after the end of its own content; safetensors refuses such a file, torch beyond 64 KiB"

    end: int
    extra: int

    def __str__(self) -> str:
        return f"{self.path}: the content ends at byte {self.end}, {self.extra} more bytes follow"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotATensorFile(Finding):
    """A file whose content is not of the kind that its name implies."""

    code = "not-a-tensor-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the file is not a tensor file: a git-LFS pointer, an HTML page, zeros, empty, a folder, or another "
        "format"
    )

    content: str

    @property
    def is_salvageable(self) -> bool:
        """True in a DCP folder, as the items in the other files are intact."""
        return self.path.suffix == ".distcp"

    def __str__(self) -> str:
        return f"{self.path} is {self.content}"

    @property
    def advice(self) -> str:
        """Advice for the actual kind of content."""
        if self.content == FOLDER:
            return f"loaders want a file of this name: copy {self.path} again from where it came"
        if "git-LFS" in self.content:
            return "fetch the real file: git lfs pull"
        if self.content in ("a torch zip file", "a safetensors file"):
            return "give the file the suffix of what it is"
        if self.content in _READERS:
            suffix, reader = _READERS[self.content]
            name = self.path.with_suffix(suffix)
            return f"no checkpoint loader reads it: rename it to {name}, and read it with {reader}"
        return "copy the file again from where it came"


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedFile(Finding):
    """The right kind of file with contradictions inside."""

    code = "malformed-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the file contradicts itself: overlapping ranges, duplicate keys, a broken header, index or archive; or torch "
        "lacks a dtype in it"
    )

    detail: str

    @property
    def is_salvageable(self) -> bool:
        """True in a DCP folder, as the other items are intact."""
        return self.path.suffix == ".distcp"

    def __str__(self) -> str:
        return f"{self.path} is malformed: {self.detail}"

    @property
    def advice(self) -> str:
        """Advice to copy the file again: a contradictory file is never edited."""
        return "copy the file again from where it came, or use an older checkpoint"


class RenamedShard(NamedTuple):
    """A file that holds exactly the tensors that an index places in a missing shard, and the name of that shard."""

    path: PurePosixPath
    name: str
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingShard(Finding):
    """A missing file that the index lists, or that the numbering of the shards implies.

    ``is_other_file``: the index lists a file that exists and is none of weights, such as ``config.json``.
    ``renamed``: the missing shards whose tensors a file of another name holds.
    """

    code = "missing-shard"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "a shard that the index lists, or that the numbering of the shards implies, is missing"

    named_by: str
    tensors: int
    others: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    is_other_file: bool = False
    renamed: tuple[RenamedShard, ...] = ()

    @property
    def is_salvageable(self) -> bool:
        """True, as the other shards are intact, unless a new name brings all tensors back."""
        return not self._is_renamed_alone

    @property
    def _is_renamed_alone(self) -> bool:
        return len(self.renamed) == 1 + len(self.others)

    def __str__(self) -> str:
        if self.is_other_file:
            return (
                f"{self.path} is not a file of weights; {self.named_by} lists it as a shard, so loaders fail"
            )
        more = f" and {count_of(len(self.others), 'more shard')} are" if self.others else " is"
        lost = f", with {count_of(self.tensors, 'tensor')}" if self.tensors else ""
        lost += f": {list_names(self.holds)}" if self.holds else ""
        for shard in self.renamed:
            whose = f"the {count_of(shard.tensors, 'tensor')} of {shard.name}"
            whose = whose if self.others else f"its {count_of(shard.tensors, 'tensor')}"
            lost += f"; {str(shard.path)!r} holds {whose}"
        return f"{self.path}{more} missing; {self.named_by} promises {'them' if self.others else 'it'}{lost}"

    @property
    def advice(self) -> str:
        """Advice to copy the shard again: loading without it leaves random weights."""
        if self.is_other_file:
            return f"copy {self.named_by} and the shards again from where they came"
        if self.renamed:
            renames = [f"rename {str(shard.path)!r} to {shard.name}" for shard in self.renamed]
            rest = [] if self._is_renamed_alone else ["copy the other shards again from where they came"]
            return "; ".join([*renames, *rest])
        return (
            "copy the shard again from where it came; loading without it leaves random weights in the model"
        )

    def advice_at(self, path: str) -> str:
        """Return the advice with the commands that rename shards; a store has no such command."""
        if not self._is_renamed_alone or looks_like_url(path):
            return self.advice
        folder = Path(path)
        return "; ".join(
            f"rename {str(shard.path)!r}: mv {shell_path(folder / shard.path)} {shell_path(folder / shard.name)}"
            for shard in self.renamed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMismatch(Finding):
    """An index that disagrees with the headers about the files of tensors, or that loaders refuse.

    ``unlisted``: the number of tensors in shards that the index does not list. ``without_metadata``: it has no object
    ``metadata``, into which transformers and diffusers write. ``unread``: a ``.bin`` file among safetensors files,
    which transformers reads as safetensors. ``copies``: the shards that hold the first of the ``doubled`` tensors.
    ``is_read_in_part``: the tensors that it does not list are in listed shards, and old versions pass over them.
    """

    code = "index-mismatch"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "the index is missing, unreadable, without `metadata`, or disagrees with the shards; rebuilt "
        "when they are intact and disjoint"
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

    @property
    def is_fixable(self) -> bool:
        """True when the headers alone say what the index should be, so that a plain repair writes it."""
        return not (self.lost or self.doubled or self.unread) and self.rivals == 1

    @property
    def is_salvageable(self) -> bool:
        """True, as the tensors in the shards are intact."""
        return bool(self.lost)

    def __str__(self) -> str:
        if self.rivals > 1:
            return f"{self.path} names none of {self.rivals} sets of shards that are there: which is right is not clear"
        if self.absent:
            return f"{self.path} is missing, its shards are there"
        if self.problem is not None and self.is_fixable:
            return f"{self.path} cannot be read, its shards are there: {self.problem}"
        if self.lost:
            lost = count_of(len(self.lost), "tensor")
            return f"{self.path} names {lost} that no shard holds: {list_names(self.lost)}"
        if self.doubled:
            doubled = count_of(len(self.doubled), "tensor")
            are = "is" if len(self.doubled) == 1 else "are"
            which = (
                f"{self.doubled[0]!r} in {series(self.copies)}" if self.copies else list_names(self.doubled)
            )
            return f"{doubled} of {self.path} {are} in two shards with different values (first {which})"
        if self.unread:
            return f"{self.path} lists files of two formats: transformers reads {self.unread} as safetensors and fails"
        in_part = (
            ": transformers 4.44 leaves random with a device_map what the index does not list"
            if self.is_read_in_part
            else ""
        )
        problems = [
            f"names the wrong shard for {count_of(self.misplaced, 'tensor')}" if self.misplaced else "",
            f"does not list {count_of(self.unlisted, 'tensor')} of the shards{in_part}"
            if self.unlisted
            else "",
            'has no object "metadata", so transformers and diffusers refuse to load the model'
            if self.without_metadata
            else "",
        ]
        return f"{self.path} {' and '.join(filter(None, problems))}"

    @property
    def advice(self) -> str:
        """Advice where the index is not rebuilt, as something would be lost."""
        if self.is_fixable:
            return ""
        if self.rivals > 1:
            return "not rebuilt: set the shards of all but one save aside, then repair"
        if self.unread:
            return (
                "accelerate.load_checkpoint_in_model reads each file by its ending: load the model with it, and save "
                "it again"
            )
        if self.doubled and not self.lost:
            return (
                "not rebuilt: from_pretrained and load_checkpoint_in_model take the last shard by name, the Trainer's "
                "resume takes any; copy the shards again from where they came"
            )
        return "not rebuilt: loading would leave random weights; copy the shards again from where they came"


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecidedIndex(IndexMismatch):
    """A missing index with which a loader would take other weights than now, or fail.

    ``loads``: each of these loaders -> the file or index that it takes now.
    """

    code = IndexMismatch.code
    severity = Severity.WARNING
    action = Action.TELL

    loads: Mapping[str, PurePosixPath]

    @property
    def is_fixable(self) -> bool:
        """False, as only the user knows which of the two is wanted."""
        return False

    def __str__(self) -> str:
        return f"{self.path} is missing, its shards are there; {_loads(self.loads)} now, and would not with this index"

    @property
    def advice(self) -> str:
        """Advice to decide between the two, as only the user knows which one is wanted."""
        taken = series(sorted({str(path) for path in self.loads.values()}))
        return (
            f"not written: move what you do not want out of the folder, the shards or {taken}; if the shards stay, "
            "then repair"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OddIndex(Finding):
    """An index that differs from the headers in a way that changes no load.

    ``computed``: listed keys that no shard holds and no load needs. ``unlisted``: the number of tensors that the listed
    shards hold besides. ``repeated``: keys that the file has twice. ``misplaced``: the number of tensors that it places
    in another of the listed shards. ``copied``: tensors that several shards hold with equal values.
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

    def __str__(self) -> str:
        differences = [
            f"names the wrong shard for {count_of(self.misplaced, 'tensor')}, and its loaders read all shards"
            if self.misplaced
            else "",
            f"lists shards that share {count_of(len(self.copied), 'tensor')}, with equal values: "
            f"{list_names(self.copied)}"
            if self.copied
            else "",
            f"lists {count_of(len(self.computed), 'tensor')} that no shard holds and no load needs: "
            f"{list_names(self.computed)}"
            if self.computed
            else "",
            f"does not list {count_of(self.unlisted, 'tensor')} of the shards, which are loaded all the same"
            if self.unlisted
            else "",
            f"has {count_of(len(self.repeated), 'key')} twice, of which the last counts: "
            f"{list_names(self.repeated)}"
            if self.repeated
            else "",
        ]
        return f"{self.path} {' and '.join(filter(None, differences))}"

    @property
    def advice(self) -> str:
        """Advice for the one loader that compares the keys of the index with those of the model, and for ckptfix."""
        advice = [
            "ignore this; transformers.trainer_utils.load_sharded_checkpoint needs strict=False"
            if self.computed or self.unlisted
            else "",
            "loaders take the same values; ckptfix migrate and seal refuse such shards: load the model, and save it"
            if self.copied
            else "",
        ]
        return "; ".join(filter(None, advice))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleShard(Finding):
    """A shard of another save next to a complete sharded model."""

    code = "stale-shard"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "a shard that the index does not list: another save left it, and loaders ignore it"

    index: PurePosixPath

    def __str__(self) -> str:
        return f"{self.path} is left over: {self.index} does not name it"

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        return "loaders go by the index and ignore it; delete the file if the save of the index is the one you want"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleFamily(Finding):
    """A model that is stored twice, as safetensors and as ``.bin`` or in one file and in shards, with other values.

    ``preferred``: the file or index that most loaders take. ``loads``: loader -> the file or index that it takes.
    ``unlisted``: which of the two is an index that is missing, so that no loader finds its shards. ``refused_by``: a
    loader that refuses the folder, as it has two indexes. ``tensors``: the number of keys that both have.
    ``difference``: the first key whose values differ.
    """

    code = "stale-family"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a model is stored in two formats, or in one file and in shards, with different values: loaders differ in "
        "which they take"
    )

    preferred: PurePosixPath
    loads: Mapping[str, PurePosixPath]
    unlisted: tuple[PurePosixPath, ...] = ()
    refused_by: str = ""
    tensors: int
    difference: str

    def __str__(self) -> str:
        path, preferred = _stored(self.path, self.unlisted), _stored(self.preferred, self.unlisted)
        return (
            f"{path}: the same {count_of(self.tensors, 'key')} as in {preferred}, with other values (first "
            f"in {self.difference!r}){_loading(self.loads, self.refused_by)}"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        decide = "they are of two saves: move the one that you do not want out of the folder"
        if self.unlisted:
            return decide
        return f"{decide}; to compare them: ckptfix diff DIR/{self.preferred} DIR/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondFamily(Finding):
    """A model that is stored twice, with equal values, or with other keys, dtypes or shapes.

    ``preferred``, ``loads``, ``unlisted``, ``refused_by``, ``tensors``: as in ``StaleFamily``. ``own``: keys of this
    one alone; ``absent``: those of the preferred one alone; ``changed``: those with another dtype or shape.
    ``uncompared``: the number of tensors whose bytes are scattered over a file. ``sampled``: not every byte of the
    others was compared.
    """

    code = "second-family"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "a model is stored in two formats, or in one file and in shards: with equal values, or with other keys or "
        "dtypes"
    )

    preferred: PurePosixPath
    loads: Mapping[str, PurePosixPath]
    unlisted: tuple[PurePosixPath, ...] = ()
    refused_by: str = ""
    tensors: int
    own: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    uncompared: int = 0
    sampled: bool = False

    @property
    def is_equal(self) -> bool:
        """True where all keys are the same, and all bytes that were compared."""
        return not (self.own or self.absent or self.changed or self.uncompared)

    def __str__(self) -> str:
        path, preferred = _stored(self.path, self.unlisted), _stored(self.preferred, self.unlisted)
        differences = (
            (self.own, f"not in {preferred}"),
            (self.absent, f"in {preferred} alone"),
            (self.changed, "of another dtype or shape"),
        )
        told = [
            f"{count_of(len(keys), 'key')} {what}: {list_names(keys)}" for keys, what in differences if keys
        ]
        if told:
            return (
                f"{path}: {'; '.join(told)}; values were not compared{_loading(self.loads, self.refused_by)}"
            )
        how = "sampled bytes" if self.sampled else "bytes"
        left = f", but for {count_of(self.uncompared, 'tensor')} not compared" if self.uncompared else ""
        return (
            f"{path}: the same model as {preferred} ({count_of(self.tensors, 'key')}, {how} equal{left})"
            f"{_loading(self.loads, self.refused_by)}"
        )

    @property
    def advice(self) -> str:
        """Advice to compare what was not compared here, or to save the space."""
        if self.is_equal:
            return "either file is enough; keep the one that your loader takes"
        if self.unlisted:
            return "make sure that both are of one save"
        return f"make sure that both are of one save: ckptfix diff DIR/{self.preferred} DIR/{self.path}"


def _stored(path: PurePosixPath, unlisted: Collection[PurePosixPath]) -> str:
    """Return a family in words: its file, or its index, which may be missing."""
    return f"the shards without {path}" if path in unlisted else str(path)


def _loading(loads: Mapping[str, PurePosixPath], refused_by: str) -> str:
    """Return which loader takes which file as the last part of a sentence, "" where none takes any."""
    refusal = f"{refused_by} refuses a folder with two indexes" if refused_by else ""
    words = ", ".join(filter(None, [_loads(loads), refusal]))
    return f"; {words}" if words else ""


def _loads(loads: Mapping[str, PurePosixPath]) -> str:
    """Return in words which loader takes which file: "load_state and transformers load model.safetensors"."""
    by_file: dict[PurePosixPath, list[str]] = {}
    for loader, path in loads.items():
        by_file.setdefault(path, []).append(loader)
    return ", ".join(
        f"{series(loaders)} {'loads' if len(loaders) == 1 else 'load'} {path}"
        for path, loaders in by_file.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedFile(Finding):
    """A file of the right kind that was not read."""

    code = "unchecked-file"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "no library writes a file so large, so deeply nested, encrypted or packed: nothing in it was checked"
    )

    detail: str

    def __str__(self) -> str:
        return f"{self.path}: nothing in it was checked: {self.detail}"

    @property
    def advice(self) -> str:
        """Advice to distrust the file: such files are made to stall or deceive readers."""
        return (
            "load it only if you trust where it came from; torch.save writes what torch.load reads of it anew"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedRecord(Finding):
    """A torch zip file of which records are compressed. ``storages``: how many of them hold numbers of tensors."""

    code = "compressed-record"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a record of a torch zip file is compressed, which torch.save never does; `torch.load(mmap=True)` takes its "
        "packed bytes for numbers"
    )

    records: tuple[str, ...]
    storages: int

    def __str__(self) -> str:
        what = f"{self.path}: {count_of(len(self.records), 'record')} compressed: {list_names(self.records)}"
        if self.storages:
            return f"{what}; torch.load(mmap=True) reads packed bytes as numbers, without an error"
        return f"{what}; torch.load unpacks it, and nothing can be renamed in it"

    @property
    def advice(self) -> str:
        """Advice to load the file without mmap, which gives the right values."""
        return "load it without mmap and write it anew: torch.save(torch.load(FILE, weights_only=True), NEW_FILE)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrcMismatch(Finding):
    """A record of a torch zip whose bytes do not have the checksum written with them."""

    code = "crc-mismatch"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "the CRC of a record in a torch zip file does not match its bytes; torch.load never compares it"

    record: str
    tensors: tuple[str, ...]

    @property
    def is_salvageable(self) -> bool:
        """True, as the other tensors are intact."""
        return bool(self.tensors)

    def __str__(self) -> str:
        used = f" (holds {list_names(self.tensors)})" if self.tensors else ""
        return f"{self.path}: record {self.record!r}{used} does not have the CRC it was written with"

    @property
    def advice(self) -> str:
        """Advice to copy the file again: the right bytes are not known."""
        return "bytes have changed since the save; copy the file again, or use an older checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFormatMetadata(Finding):
    """A safetensors header without ``format``."""

    code = "no-format-metadata"
    severity = Severity.NOTE
    action = Action.ASK
    option = "--allow no-format-metadata"
    meaning = "the safetensors header lacks `format`; transformers refuses to load it (safetensors#549)"

    def __str__(self) -> str:
        return f'{self.path}: the header has no "format", which transformers asks for'


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFormat(NoFormatMetadata):
    """A safetensors header with the ``format`` of another framework than torch."""

    code = "no-format-metadata"
    severity = Severity.NOTE
    action = Action.TELL
    option = ""

    format: str

    def __str__(self) -> str:
        return (
            f'{self.path}: the header has the "format" {self.format!r:.40} (expected "pt"): load_checkpoint_in_model '
            "refuses the file, and so may transformers before 5"
        )

    @property
    def advice(self) -> str:
        """Advice to write the file again only with tensors of torch: other frameworks have other keys and layouts."""
        return (
            "weights of another framework have other keys and layouts: convert them; if they are torch's, write the "
            "file again with safetensors.torch.save_file(tensors, FILE, metadata={'format': 'pt'})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRepair(Finding):
    """A repair or an undo that was killed."""

    code = "interrupted-repair"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = "a repair or an undo was killed half way; the next repair or undo rolls it back first"

    transaction: int
    in_store: bool = False

    def __str__(self) -> str:
        what = "some objects may be old and some new" if self.in_store else "files may be half changed"
        return f"{self.path} holds transaction {self.transaction}, which was interrupted; {what}"

    @property
    def advice(self) -> str:
        """Advice to roll back: both commands do that first. In a store both finish first what was begun."""
        if self.in_store:
            return "to finish it: ckptfix repair DIR (or ckptfix undo DIR, which then restores every byte)"
        if len(self.path.parts) > 1:
            return f"to take {self.path.parent} back to what it was: ckptfix undo DIR/{self.path.parent}"
        return "to take the folder back to what it was: ckptfix repair DIR (or ckptfix undo DIR)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsafePickle(Finding):
    """A pickle that names a global that can run code."""

    code = "unsafe-pickle"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "the pickle calls something that can run code (os.system, eval, ...); ckptfix never executes or edits it"

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} calls {', '.join(self.globals[:3])}: loading it can run any code"

    @property
    def advice(self) -> str:
        """Advice not to load the file: nothing legitimate needs these globals."""
        return "do not load it with weights_only=False; find out where it came from"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadablePickle(Finding):
    """A pickle that torch.load refuses by default since torch 2.6."""

    code = "unloadable-pickle"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "the pickle needs a class or an opcode outside torch's weights_only list; torch.load refuses it since 2.6"

    globals: tuple[str, ...]
    remedy: str
    opcodes: tuple[str, ...] = ()
    plain: bool = False
    arrays: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.arrays:
            arrays = [f"{key!r:.80} ({dtype})" for key, dtype in self.arrays.items()]
            more = [f"{len(arrays) - 3} more"] if len(arrays) > 3 else []
            noun = "a numpy array" if len(arrays) == 1 else "numpy arrays"
            loader = "the Trainer" if self.path.suffix == ".pth" else "load_state"
            # load_state catches the error, and logs it at a level that is not shown.
            is_passed = self.path.name.startswith("random_states_")
            outcome = "restores no random states" if is_passed else "refuses the file"
            return (
                f"{self.path} holds {noun}: {series([*arrays[:3], *more])}; "
                f"{loader} loads uint32 alone, and {outcome}"
            )
        needs = ["is a plain pickle, not written by torch.save"] if self.plain else []
        needs += [f"needs {', '.join(self.globals[:3])}"] if self.globals else []
        needs += [f"uses the pickle opcode {self.opcodes[0]}"] if self.opcodes else []
        return f"{self.path} {' and '.join(needs)}: torch.load(weights_only=True) refuses it"

    @property
    def advice(self) -> str:
        """Advice with the exact line that allows the names in the file."""
        if self.remedy:
            trust = f"if you trust the file: {self.remedy}"
            if not self.arrays:
                return trust
            return f"{trust}\nin the script, save the array as a tensor (torch.from_numpy) or as a list"
        how = "pickle.load" if self.plain else "torch.load(weights_only=False)"  # no list of classes helps
        return f"if you trust the file: read it with {how} and save it again with torch.save, without what it needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPickle(Finding):
    """A pickle with classes that the library that wrote it also loads."""

    code = "trainer-pickle"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = "a pickle with classes of transformers' Trainer, which the Trainer loads; plain `torch.load` refuses it"

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} needs {', '.join(self.globals[:3])}: plain torch.load refuses it, the Trainer does not"

    @property
    def advice(self) -> str:
        """Advice to do nothing: the file is as it should be."""
        return "nothing to do; load such files only from where you trust them"

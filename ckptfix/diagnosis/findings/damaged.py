"""Findings about damaged files and indexes, and about pickles that can run code or that
``torch.load`` refuses.
"""

from collections.abc import Mapping

from msgspec import field

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.formats.torch_file import UNTYPED
from ckptfix.wording import count_of, list_names, series

FOLDER = "a folder"
"""Content of what has the name of a file and is a folder."""

_READERS = {
    "a GGUF model": (
        ".gguf",
        "llama.cpp or transformers (from_pretrained(FOLDER, gguf_file=NAME))",
    ),
    "an ONNX model": (".onnx", "onnxruntime"),
    "an HDF5 file": (".h5", "h5py or Keras"),
    "a numpy array": (".npy", "numpy.load"),
    "a TorchScript archive, which contains code as well as state": (".ts", "torch.jit.load"),
    "a tar archive, as torch.save wrote before 0.4": (
        ".tar",
        "torch.load(FILE, weights_only=False), which runs code in the file",
    ),
}
"""Description of a file of another program -> its suffix, and the program that reads it."""


class TruncatedFile(Finding, frozen=True, kw_only=True):
    """A file that ends before its own header says it does."""

    code = "truncated-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "the file ends too early: an interrupted save or download, or a full disk"
    # The lost bytes are nowhere in the folder.
    advice = "copy the file again from its source, or use an older checkpoint"

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


FOUND_BY_TORCH = 69_562
"""Most bytes after a zip archive with which torch 2.13 finds its end. In small files it can miss it
after 4,075.
"""


class TrailingBytes(Finding, frozen=True, kw_only=True):
    """Bytes after the end of the format, with which no loader takes the file: safetensors 0.3 to 0.8
    refuses every surplus, and so do the loaders on top of it.
    """

    code = "trailing-bytes"
    severity = Severity.ERROR
    action = Action.ASK
    option = "--allow trailing-bytes"
    meaning = (
        "the file has extra bytes after the end of its content; safetensors refuses such a file, "
        "torch refuses more than 64 KiB of them"
    )

    end: int
    extra: int

    @property
    def resume(self) -> Resume:
        """It fails, except that accelerate leaves random states out that it cannot load."""
        name = parse_file_name(self.path.name)
        is_needed = name is None or name.role is not Role.RNG_STATE
        return Resume.FAILS if is_needed else Resume.SUCCEEDS

    @property
    def outcome(self) -> str:
        """The outcome of a load, in words."""
        loader = "safetensors" if self.path.suffix == ".safetensors" else "torch.load"
        return f"{loader} refuses the file"

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(self.extra, 'extra byte')} after the end of the content (byte "
            f"{self.end}); {self.outcome}"
        )


class IgnoredBytes(TrailingBytes, frozen=True):
    """Bytes after the end of a torch file, few enough that torch.load finds its end."""

    severity = Severity.WARNING
    # Nothing reads these bytes.
    resume = Resume.SUCCEEDS
    outcome = "torch.load usually ignores them"


class NotATensorFile(Finding, frozen=True, kw_only=True):
    """A file whose content is not of the kind that its name implies."""

    code = "not-a-tensor-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the file is not a tensor file: a git-LFS pointer, an HTML page, zeros, an empty file, "
        "a folder, or another format"
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
            return f"loaders expect a file of this name; copy {self.path} again from its source"
        if "git-LFS" in self.content:
            return "fetch the real file: git lfs pull"
        if self.content in ("a torch zip file", "a safetensors file"):
            return (
                "copy the file again from its source; if two files were swapped, swap their "
                "names; if only the suffix is wrong, rename the file"
            )
        if self.content in _READERS:
            suffix, reader = _READERS[self.content]
            name = self.path.with_suffix(suffix)
            return (
                f"no checkpoint loader reads this format; rename the file to {name}, and read it "
                f"with {reader}"
            )
        return "copy the file again from its source"


class MalformedFile(Finding, frozen=True, kw_only=True):
    """The right kind of file with contradictions inside."""

    code = "malformed-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the file contradicts itself (overlapping ranges, duplicate keys, a broken header, index "
        "or archive), or contains a dtype that torch lacks"
    )
    # A contradictory file is never edited.
    advice = "copy the file again from its source, or use an older checkpoint"

    detail: str

    @property
    def is_salvageable(self) -> bool:
        """True in a DCP folder, as the other items are intact."""
        return self.path.suffix == ".distcp"

    def __str__(self) -> str:
        return f"{self.path} is malformed: {self.detail}"


class UncheckedFile(Finding, frozen=True, kw_only=True):
    """A file of the right kind that was not read."""

    code = "unchecked-file"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "the file was not checked: it is encrypted or packed, or it is larger or more deeply "
        "nested than any file that a library writes"
    )
    # Such files are made to stall or deceive readers.
    advice = (
        "load it only if you trust its source; if torch.load reads it, save it again with "
        "torch.save"
    )

    detail: str

    def __str__(self) -> str:
        return f"{self.path} was not checked: {self.detail}"


class CompressedRecord(Finding, frozen=True, kw_only=True):
    """A torch zip file of which records are compressed. ``storages``: how many of them hold numbers
    of tensors.
    """

    code = "compressed-record"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a record in a torch zip file is compressed, which torch.save never does; "
        "`torch.load(mmap=True)` reads the compressed bytes as numbers"
    )
    advice = (
        "load it without mmap and save it again: torch.save(torch.load(FILE, "
        "weights_only=True), NEW_FILE)"
    )

    records: tuple[str, ...]
    storages: int

    def __str__(self) -> str:
        are, them = ("is", "it") if len(self.records) == 1 else ("are", "them")
        what = (
            f"{self.path}: {count_of(len(self.records), 'record')} {are} compressed "
            f"({list_names(self.records)})"
        )
        if self.storages:
            return (
                f"{what}; torch.load(mmap=True) reads compressed bytes as numbers, without an error"
            )
        return f"{what}; torch.load decompresses {them}, but keys in the file cannot be renamed"


class CrcMismatch(Finding, frozen=True, kw_only=True):
    """A record of a torch zip whose bytes do not have the checksum written with them."""

    code = "crc-mismatch"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the CRC of a record in a torch zip file does not match its bytes; torch.load never "
        "checks it"
    )
    # The right bytes are not known.
    advice = "bytes have changed since the save; copy the file again, or use an older checkpoint"

    record: str
    tensors: tuple[str, ...]

    @property
    def is_salvageable(self) -> bool:
        """True, as the other tensors are intact."""
        return bool(self.tensors)

    def __str__(self) -> str:
        used = f" (holds {list_names(self.tensors)})" if self.tensors else ""
        return f"{self.path}: record {self.record!r}{used} does not match its CRC"


class NoFormatMetadata(Finding, frozen=True):
    """A safetensors header without ``format``."""

    code = "no-format-metadata"
    severity = Severity.NOTE
    action = Action.ASK
    option = "--allow no-format-metadata"
    meaning = (
        "the safetensors header lacks `format`; transformers before 5 refuses it (safetensors#549)"
    )

    def __str__(self) -> str:
        return f'{self.path}: the header has no "format", which transformers before 5 requires'


class OtherFormat(NoFormatMetadata, frozen=True, kw_only=True):
    """A safetensors header with the ``format`` of another framework than torch."""

    code = "no-format-metadata"
    severity = Severity.NOTE
    action = Action.TELL
    option = ""
    # Other frameworks have other keys and layouts.
    advice = (
        "convert weights of another framework: their keys and layouts differ; if the weights "
        "are from torch, write the file again with safetensors.torch.save_file(tensors, FILE, "
        "metadata={'format': 'pt'})"
    )

    format: str

    def __str__(self) -> str:
        return (
            f'{self.path}: the "format" in the header is {self.format!r:.40} (expected "pt"); '
            "load_checkpoint_in_model refuses the file, and transformers before 5 may refuse it"
        )


class InterruptedRepair(Finding, frozen=True, kw_only=True):
    """A repair or an undo that was killed."""

    code = "interrupted-repair"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "a repair or an undo was killed; the next `repair` or `undo` restores the old files, or "
        "finishes a change that was already committed in a store"
    )

    transaction: int
    in_store: bool = False
    elsewhere: bool = False
    """Of the folder that was uploaded, or of the store from which the folder was downloaded."""

    @property
    def is_fixable(self) -> bool:
        """True where it ran: only there it is ended."""
        return not self.elsewhere and super().is_fixable

    def __str__(self) -> str:
        what = (
            "some objects may be old and some new"
            if self.in_store
            else "files may be partly changed"
        )
        whose = ""
        if self.elsewhere:
            whose = (
                " (in the store that the folder was downloaded from)"
                if self.in_store
                else " (in the folder before its upload)"
            )
        return f"{self.path}: transaction {self.transaction}{whose} was interrupted; {what}"

    @property
    def advice(self) -> str:
        """Advice to roll back: both commands do that first. In a store both finish first what was
        begun.
        """
        if self.elsewhere:
            # No "DIR": the command is for another place.
            return (
                "in that store, run ckptfix undo URL, then download the checkpoint again; if the "
                "checkpoint in the store is complete, only run: rm -r DIR/.ckptfix/*.objects"
                if self.in_store
                else "download the checkpoint, run ckptfix undo on the copy, and upload it again"
            )
        if self.in_store:
            return (
                "to finish it: ckptfix repair DIR (or ckptfix undo DIR, which finishes it and then "
                "restores every byte)"
            )
        if len(self.path.parts) > 1:
            return f"to roll back {self.path.parent}: ckptfix undo DIR/{self.path.parent}"
        return "to roll back the folder: ckptfix repair DIR (or ckptfix undo DIR)"


class UnsafePickle(Finding, frozen=True, kw_only=True):
    """A pickle that names a global that can run code."""

    code = "unsafe-pickle"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the pickle calls something that can run code (os.system, eval, ...); ckptfix never "
        "executes or edits it"
    )
    # Nothing legitimate needs these globals.
    advice = "do not load it with weights_only=False; find out where it came from"

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} calls {', '.join(self.globals[:3])}: loading it can run any code"


class UnloadablePickle(Finding, frozen=True, kw_only=True):
    """A pickle that torch.load refuses by default since torch 2.6."""

    code = "unloadable-pickle"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "the pickle needs a class or an opcode outside torch's weights_only list; torch.load "
        "refuses it in torch 2.6 and later"
    )

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
                f"{loader} accepts only uint32 arrays, and {outcome}"
            )
        needs = ["is a plain pickle, not written by torch.save"] if self.plain else []
        needs += [f"needs {', '.join(self.globals[:3])}"] if self.globals else []
        needs += [f"uses the pickle opcode {self.opcodes[0]}"] if self.opcodes else []
        call = "torch.load" if UNTYPED in self.opcodes else "torch.load(weights_only=True)"
        return f"{self.path} {' and '.join(needs)}: {call} refuses it"

    @property
    def advice(self) -> str:
        """Advice with the exact line that allows the names in the file."""
        if self.remedy:
            trust = f"if you trust the file: {self.remedy}"
            if not self.arrays:
                return trust
            return (
                f"{trust}\nin the script, save the array as a tensor (torch.from_numpy) or as a "
                "list"
            )
        if UNTYPED in self.opcodes:
            return "to write its tensors to a new file: ckptfix salvage DIR NEW_DIR"
        # No list of classes helps.
        how = "pickle.load" if self.plain else "torch.load(weights_only=False)"
        return (
            f"if you trust the file: load it with {how} and save it again with torch.save, without "
            "the objects that torch.load refuses"
        )


class ScriptPickle(UnloadablePickle, frozen=True):
    """A plain pickle under a name that no library looks for: the script that wrote it reads it with
    ``pickle.load``.
    """

    severity = Severity.NOTE
    advice = "nothing to do if the script reads it with pickle.load"


class TrainerPickle(Finding, frozen=True, kw_only=True):
    """A pickle with classes that the library that wrote it also loads."""

    code = "trainer-pickle"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "the pickle contains classes of transformers' Trainer; the Trainer loads it, but a plain "
        "`torch.load` refuses it"
    )
    # The file is as it should be.
    advice = "nothing to do; load such files only from sources that you trust"

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path} needs {', '.join(self.globals[:3])}; the Trainer loads it, but a plain "
            "torch.load refuses it"
        )

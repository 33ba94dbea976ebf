"""Findings about duplicates and nested wrappers, the traces of a model that was prepared twice."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import model_file, parse_file_name
from ckptfix.checkpoint.keys import dotted, fitting
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.wording import count_of, human_size


class DoubledModel(Finding, frozen=True, kw_only=True):
    """A duplicate of another entry, with one more wrapper around every key."""

    code = "doubled-model"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "a model was prepared twice and saved twice; the second entry has wrapped keys and equal "
        "bytes"
    )
    # The unchanged script prepares the model twice, and loads both.
    resume = Resume.SUCCEEDS

    original: PurePosixPath
    chain: tuple[str, ...]
    tensors: int
    bytes: int
    sampled: bool
    shifts: bool = False
    """Later models have numbers that are too high, so that a corrected script needs the repair."""

    def __str__(self) -> str:
        how = "sampled bytes equal" if self.sampled else "all bytes equal"
        return (
            f"{self.path}: duplicate of {self.original} ({count_of(self.tensors, 'tensor')}, "
            f"{human_size(self.bytes)}, keys prefixed with '{dotted(self.chain)}', {how}), as "
            "if this model had been passed to prepare() twice"
        )

    @property
    def advice(self) -> str:
        """Who needs the repair, what the unchanged script then lacks, and when the repair would be
        wrong.
        """
        need = (
            "why: a script that prepares the model once would load the wrong file into its later "
            "models"
            if self.shifts
            else "not urgent: a script that prepares the model once can load this folder, too"
        )
        return (
            f"{need}\nbefore you resume: prepare the model once, or start the script with: ckptfix "
            f"run SCRIPT (the unchanged script cannot load the repaired folder)\n{WRONG_IF}; "
            "ckptfix undo DIR undoes a repair"
        )


WRONG_IF = (
    "do not repair if the script prepares an identical model on purpose (a loss wrapper, or an EMA "
    "or target network that is still an exact copy)"
)
"""The case in which the default repair deletes what the script needs: it leaves the bytes of a
second ``prepare``.
"""


class IdenticalModels(Finding, frozen=True, kw_only=True):
    """Two entries with equal keys and equal bytes: one model prepared twice, an intentional copy,
    or modules that share their weights.
    """

    code = "identical-models"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--models N"
    meaning = (
        "two models have the same keys and bytes: one model was prepared twice, one is an "
        "intentional copy (EMA), or both share their weights. The finding is a note if the two "
        "differ in a later checkpoint of the run but in no earlier one, or if a guarded save "
        "recorded both"
    )

    original: PurePosixPath
    tensors: int
    bytes: int
    sampled: bool
    chains: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    doubt: str = ""
    """The first reason why the entry is not certainly the trace of a second ``prepare``."""

    def __str__(self) -> str:
        compared = "sampled bytes" if self.sampled else "bytes"
        size = f"{count_of(self.tensors, 'tensor')}, {human_size(self.bytes)}"
        own, original = (f"'{dotted(chain)}'" if chain else "none" for chain in self.chains)
        but = ""
        if own != original:
            but = f" apart from a wrapper ({self.path}: {own}, {self.original}: {original}),"
        return (
            f"{self.path} has the same keys as {self.original}{but} and the same {compared} "
            f"({size})"
        )

    @property
    def advice(self) -> str:
        """Advice to give the number of models, which only the user knows."""
        because = f"not deleted automatically, because {self.doubt}; " if self.doubt else ""
        return (
            f"{because}if the script has fewer models, say how many: ckptfix repair DIR --models N "
            "(ignore this for an EMA copy, a target network, or modules that share their weights)"
        )


class EqualAtFirst(IdenticalModels, frozen=True, kw_only=True):
    """The same where the two differ in a later checkpoint of the run, ``known_by``, and in no
    earlier one: a copy that the script made before it trained, such as a target network.
    """

    severity = Severity.NOTE
    advice = (
        "ignore this if the script copies one model into the other before it trains (a target "
        "network, an EMA); otherwise one file was copied over the other: use another checkpoint"
    )

    known_by: str

    def __str__(self) -> str:
        return f"{super().__str__()}; they differ in {self.known_by}"


class RecordedCopies(IdenticalModels, frozen=True):
    """The same where a guarded save recorded both as models of the script: the guard registers a
    model that is prepared twice once.
    """

    severity = Severity.NOTE
    action = Action.TELL
    # The record does not show when values became equal.
    advice = (
        "ignore this for a target network, an EMA, or modules that share their weights; "
        "otherwise one file was copied over the other: use another checkpoint"
    )

    def __str__(self) -> str:
        return f"{super().__str__()}; the guarded save recorded both as models of the script"


class ShiftedEntries(Finding, frozen=True, kw_only=True):
    """An entry at a later position than the one where the correct script looks for it."""

    code = "shifted-entries"
    severity = Severity.NOTE
    action = Action.FIX
    meaning = (
        "a duplicate shifted the numbers of later entries: a corrected script loads the wrong "
        "models"
    )

    belongs: PurePosixPath
    positions: int

    def __str__(self) -> str:
        return (
            f"{self.path} should be named {self.belongs}: earlier duplicates raised its number "
            f"by {self.positions}"
        )


class NestedPrefix(Finding, frozen=True, kw_only=True):
    """Keys that all begin with the same wrapper more than once."""

    code = "nested-prefix"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "every key begins with the same wrapper more than once (`module.module.`): the model was "
        "wrapped twice. If one process saved the `save_state` folder, the code is "
        "`wrapper-prefix` (a note)"
    )
    # The script that wrapped the model twice loads it.
    resume = Resume.SUCCEEDS

    scope: str
    chain: tuple[str, ...]
    target: tuple[str, ...]
    names: int
    evidence: str = ""
    """The evidence besides the keys."""
    assumed: bool = False
    """No other file has these names in fewer wrappers: a model with a module called ``module``
    looks the same.

    With ``action`` ASK, the number of processes is the only evidence.
    """

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        correct = f"'{dotted(self.target)}'" if self.target else "no wrapper"
        because = f"; {self.evidence}" if self.evidence else ""
        return (
            f"{self.path}: every key{where} begins with '{dotted(self.chain)}' (expected "
            f"{correct}{because})"
        )

    @property
    def advice(self) -> str:
        """Advice to fix the script first: unchanged, it looks for the nested keys."""
        once = "wrap the model once, or start the script with: ckptfix run SCRIPT"
        if not self.assumed:
            return (
                "the model was wrapped twice; after a repair, the unchanged script no longer "
                f"finds its keys\nbefore you resume: {once}"
            )
        return (
            "this assumes that the script wrapped the model in DistributedDataParallel twice. If a "
            "module of the model is itself called 'module', the keys are correct: do not repair "
            f"them\nbefore you resume: {once}\n"
            f"the repaired checkpoint fits {fitting(self.target)}; for a bare model: ckptfix "
            "repair DIR --keys bare"
        )


class UndecidedPrefix(NestedPrefix, frozen=True):
    """Nested keys where the number of processes is the only evidence: the script may look for
    exactly these.
    """

    code = "nested-prefix"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--keys bare"

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return (
            f"{self.path}: every key{where} begins with '{dotted(self.chain)}' ({self.evidence}): "
            "either the script wrapped the model twice, or a module of the model is itself called "
            "'module'"
        )

    @property
    def advice(self) -> str:
        """Advice to keep the keys for the script that wrote them, with the options for other
        models.
        """
        return (
            "nothing to do for the script that saved these keys: it would not find renamed keys; "
            f"for a bare model: ckptfix repair DIR --keys bare; for {fitting(self.target)}: "
            "ckptfix repair DIR --allow nested-prefix"
        )


class OwnModules(UndecidedPrefix, frozen=True):
    """Nested keys that FSDP saved: no second ``prepare()`` writes them, so that modules of the
    script are so called.
    """

    severity = Severity.NOTE

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return (
            f"{self.path}: every key{where} begins with '{dotted(self.chain)}'; FSDP does not add "
            "such a prefix, so modules of the script are called 'module'"
        )


class WrapperPrefix(Finding, frozen=True, kw_only=True):
    """Keys that all begin with one wrapper, or that have private wrapper segments inside."""

    code = "wrapper-prefix"
    severity = Severity.NOTE
    action = Action.ASK
    option = "--keys bare"
    meaning = (
        "every key begins with a wrapper (`module.`, `_orig_mod.`); only a model wrapped the same "
        "way can load such keys. The finding is a warning for a diffusers model, whose "
        "`from_pretrained` does not find them"
    )

    scope: str
    chain: tuple[str, ...]
    names: int
    is_pretrained: bool = False
    """The folder has the config of transformers, diffusers or PEFT, whose ``from_pretrained`` looks
    for bare keys.
    """

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        if not self.chain:
            return (
                f"{self.path}: keys{where} contain wrapper segments such as _orig_mod in the middle"
            )
        return (
            f"{self.path}: every key{where} begins with '{dotted(self.chain)}'; "
            "only a model wrapped the same way can load it"
        )

    @property
    def advice(self) -> str:
        """Advice to keep the keys for the script that wrote them, and to strip them only for a bare
        model.
        """
        if self.is_pretrained:
            return (
                "from_pretrained does not find these keys: it leaves their weights random or "
                "fails\nto remove the wrapper: ckptfix repair DIR --keys bare; ignore this if "
                "modules of the model itself have these names"
            )
        return (
            "nothing to do for a script that wraps its model the same way; for a bare model: "
            "ckptfix repair DIR --keys bare"
        )


class LostPrefix(WrapperPrefix, frozen=True):
    """The same before every key of a model of diffusers: none of its classes has a module of these
    names.
    """

    severity = Severity.WARNING


class RelatedModels(Finding, frozen=True, kw_only=True):
    """An entry with the keys of another inside a wrapper, and with other values."""

    code = "related-models"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "two entries have the same keys, one of them with a wrapper prefix, but different values: "
        "an EMA or another wrapped model, or files of two saves"
    )

    original: PurePosixPath
    chain: tuple[str, ...]
    tensor: str | None
    damaged: tuple[PurePosixPath, ...] = ()

    def __str__(self) -> str:
        what = f"{self.path} has the keys of {self.original} prefixed with '{dotted(self.chain)}'"
        if len(self.damaged) == 1:
            intact = self.original if self.damaged[0] == self.path else self.path
            return f"{what}; {self.damaged[0]} is damaged, {intact} is not"
        if self.damaged:
            return f"{what}; both are damaged"
        return f"{what}, but {_differing(self.tensor)}"

    @property
    def advice(self) -> str:
        """Advice to compare: an average of the weights is fine, files of two saves in one folder
        are not.
        """
        if len(self.damaged) == 1:
            damaged = self.damaged[0]
            intact = self.original if damaged == self.path else self.path
            name = parse_file_name(damaged.name)
            is_numbered = name is not None and name.role is Role.MODEL and name.is_numbered
            recovered = f"/{model_file('.safetensors', name.index)}" if name and is_numbered else ""
            return (
                f"{intact} is intact: if both are the same model, prepared twice, nothing is "
                f"lost; to compare them, salvage first, then: ckptfix diff DIR/{intact} "
                f"NEW_FOLDER{recovered}"
            )
        if self.damaged:
            return "to see whether they are the same model, compare what salvage recovers of each"
        return (
            "nothing to do for an EMA or another wrapped model; if the script has neither, compare "
            f"them: {self._diff}"
        )

    @property
    def _diff(self) -> str:
        return f"ckptfix diff DIR/{self.original} DIR/{self.path}"


class NearlyEqualModels(RelatedModels, frozen=True, kw_only=True):
    """An entry with the keys of another inside a wrapper, of which a few tensors have other
    values.
    """

    code = "related-models"
    severity = Severity.WARNING

    tensors: int
    differing: int
    sampled: bool

    def __str__(self) -> str:
        how = "in every sampled byte" if self.sampled else "in every byte"
        first = f"differs: {self.tensor!r}"
        if self.differing > 1:
            first = f"differ, first {self.tensor!r}"
        equal = self.tensors - self.differing
        return (
            f"{self.path} has the keys of {self.original} prefixed with '{dotted(self.chain)}': "
            f"{self.differing} of {count_of(self.tensors, 'tensor')} {first}; "
            f"{'the other is' if equal == 1 else 'all others are'} equal {how}"
        )

    @property
    def advice(self) -> str:
        """Advice to compare: a duplicate in which bytes changed, or a copy of a model of which
        little was trained.
        """
        return (
            "nothing to do if this is a copy of a mostly frozen model; if one model was prepared "
            "twice, bytes of one file have changed: load another checkpoint, or compare: "
            f"{self._diff}"
        )


class ConflictingModels(Finding, frozen=True, kw_only=True):
    """An entry with the keys of another inside a wrapper, other values, and proof that one is of
    another save.
    """

    code = "conflicting-models"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "two entries have the same keys, one of them with a wrapper prefix, but different values; "
        "the manifest proves that they belong to two saves"
    )
    # Both models load.
    resume = Resume.SUCCEEDS

    original: PurePosixPath
    chain: tuple[str, ...]
    tensor: str | None
    proof: str

    def __str__(self) -> str:
        return (
            f"{self.path} has the keys of {self.original} prefixed with '{dotted(self.chain)}', "
            f"but {_differing(self.tensor)}; files of two saves are mixed: {self.proof}"
        )

    @property
    def advice(self) -> str:
        """Advice to compare: dropping either model would lose data."""
        return (
            "no repair merges them; compare both, and keep the right one: ckptfix diff "
            f"DIR/{self.original} DIR/{self.path}"
        )


def _few(parts: Iterable[str], most: int = 8) -> str:
    every = list(parts)
    more = f", and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _differing(tensor: str | None) -> str:
    return (
        f"different values (first: {tensor!r})"
        if tensor is not None
        else "a different structure around the tensors"
    )


class IdenticalStates(Finding, frozen=True, kw_only=True):
    """Two optimizer, scheduler or custom entries in equal state.

    ``is_of_own_optimizer``: a scheduler, of which there are no more than optimizers, and no
    optimizer is a duplicate. ``lost_optimizer``: of a scheduler with a number that no optimizer has,
    the file that its optimizer would have.
    """

    code = "identical-states"
    severity = Severity.NOTE
    action = Action.ASK
    option = "--keep ROLE=N"
    meaning = (
        "two optimizers, schedulers or custom objects have equal states: registered twice, or "
        "intentionally equal"
    )

    original: PurePosixPath
    role: Role
    sampled: bool
    is_of_own_optimizer: bool = False
    lost_optimizer: str = ""

    def __str__(self) -> str:
        how = "sampled bytes equal" if self.sampled else "all bytes equal"
        return f"{self.path} holds the same state as {self.original} ({how})"

    @property
    def advice(self) -> str:
        """Advice to give the number of entries: two intentional optimizers are often in equal
        state.
        """
        if self.is_of_own_optimizer:
            # Equal schedules of two optimizers have equal states in every healthy run: they show no
            # second prepare(), and a repair would delete a file that load_state looks for.
            return "nothing to do if the script has two optimizers with the same schedule"
        fewer = f"if the script registers fewer: ckptfix repair DIR --keep {self.role.value}=N"
        if self.lost_optimizer:
            return (
                f"if the script has an optimizer for each scheduler, {self.lost_optimizer} is "
                "missing and load_state fails: copy it from its source, or resume from another "
                f"checkpoint; {fewer}"
            )
        return fewer


class DoubledStates(IdenticalStates, frozen=True):
    """An optimizer or scheduler that was saved twice, like its model, and its original."""

    code = "doubled-states"
    severity = Severity.ERROR
    action = Action.FIX
    option = ""
    meaning = (
        "an optimizer or scheduler was saved twice, next to a duplicate model: a corrected script "
        "loads the duplicate into another model's optimizer or scheduler"
    )
    # The unchanged script prepares the model twice, and loads both.
    resume = Resume.SUCCEEDS
    # A plain repair drops it.
    advice = ""

    def __str__(self) -> str:
        how = "sampled bytes equal" if self.sampled else "all bytes equal"
        return (
            f"{self.path}: duplicate of {self.original} ({how}); the script passed it to prepare() "
            "twice"
        )


class SurplusStates(IdenticalStates, frozen=True, kw_only=True):
    """An optimizer or scheduler that was certainly saved twice, where the script's own one is
    unknown.
    """

    code = "surplus-states"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--keep ROLE=N"
    meaning = (
        "a trained optimizer was saved twice, or a repair would leave more states than models; "
        "`load_state` matches by position and can give one model the state of another"
    )

    loads: tuple[PurePosixPath, ...]
    """Every entry of the role: ``load_state`` gives the first to the script's first object, and so
    on.
    """

    @property
    def order(self) -> str:
        """Return which file stock ``load_state`` loads for which model."""
        noun = self.role.value.removesuffix("s")
        loads = _few(f"{noun} {number} from {path}" for number, path in enumerate(self.loads))
        return f"load_state matches by position and loads {loads}"

    def __str__(self) -> str:
        return (
            f"{self.path} holds the same state as {self.original}, as if the script had passed it "
            f"to prepare() twice; {self.order}"
        )

    @property
    def advice(self) -> str:
        """Advice to give the number of entries, which only the user knows."""
        return (
            f"say how many {self.role.value} the script has: ckptfix repair DIR --keep "
            f"{self.role.value}=N"
        )


class EntryGap(Finding, frozen=True, kw_only=True):
    """A position without a file before a position with one."""

    code = "entry-gap"
    severity = Severity.ERROR
    action = Action.ASK
    option = "--allow entry-gap"
    meaning = (
        "a number is missing in a list of entries; Accelerate expects every number, so it "
        "fails or loads the wrong entries"
    )

    missing: PurePosixPath

    def __str__(self) -> str:
        return (
            f"{self.path} exists, but {self.missing} does not; Accelerate looks for every number "
            "in turn"
        )

    @property
    def advice(self) -> str:
        """Advice to bring the file back: after the repair the script loads a later object in its
        place.
        """
        return (
            f"copy {self.missing} again, or use an older checkpoint\nonly if the script no longer "
            f"has that object: ckptfix repair DIR {self.option}\n  this lowers the numbers of the "
            "later files; a script that still has the object fails, or loads the state of a "
            "different object into it"
        )

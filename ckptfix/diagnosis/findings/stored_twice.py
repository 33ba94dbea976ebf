"""Findings about a model that is stored in two formats, or in one file and in shards."""

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from ckptfix.diagnosis.findings.base import Action, Finding, Severity
from ckptfix.wording import count_of, list_names, series


class StoredTwice(Finding, frozen=True, kw_only=True):
    """A model that is stored twice, as safetensors and as ``.bin`` or in one file and in shards.

    ``preferred``: the file or index that most loaders take. ``loads``: loader -> the file or index
    that it takes. ``unlisted``: which of the two is an index that is missing, so that no loader
    finds its shards. ``refused_by``: a loader that refuses the folder, as it has two indexes.
    ``tensors``: the number of keys that both have.
    """

    action = Action.ASK
    option = "--keep FILE"

    preferred: PurePosixPath
    loads: Mapping[str, PurePosixPath]
    unlisted: tuple[PurePosixPath, ...] = ()
    refused_by: str = ""
    tensors: int

    @property
    def both(self) -> tuple[str, str]:
        """This one and the preferred one, in words."""
        return stored_in(self.path, self.unlisted), stored_in(self.preferred, self.unlisted)


class StaleFamily(StoredTwice, frozen=True, kw_only=True):
    """The same with other values. ``difference``: the first key whose values differ."""

    code = "stale-family"
    severity = Severity.WARNING
    meaning = (
        "a model is stored in two formats, or as one file and as shards, with different values: "
        "which one is loaded depends on the loader"
    )

    difference: str

    def __str__(self) -> str:
        path, preferred = self.both
        return (
            f"{path}: same {count_of(self.tensors, 'key')} as {preferred}, but different values "
            f"(first: {self.difference!r}){_loading(self.loads, self.refused_by)}"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the saves, as only the user knows which one is wanted."""
        compare = f"to compare them: ckptfix diff DIR/{self.preferred} DIR/{self.path}\n"
        return (
            "" if self.unlisted else compare
        ) + f"they come from two saves; {keep_option(self.preferred, self.path)}"


class SecondFamily(StoredTwice, frozen=True, kw_only=True):
    """The same with equal values, or with other keys, dtypes or shapes.

    ``own``: keys of this one alone; ``absent``: those of the preferred one alone; ``changed``:
    those with another dtype or shape. ``uncompared``: the number of tensors whose bytes are
    scattered over a file. ``sampled``: not every byte of the others was compared. ``is_damaged``:
    this one is, so that nothing was compared; another finding says how.
    """

    code = "second-family"
    severity = Severity.NOTE
    meaning = (
        "a model is stored in two formats, or as one file and as shards: with equal values, or "
        "with different keys or dtypes"
    )

    own: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    uncompared: int = 0
    sampled: bool = False
    is_damaged: bool = False

    @property
    def is_equal(self) -> bool:
        """True where all keys are the same, and all bytes that were compared."""
        return not (self.own or self.absent or self.changed or self.uncompared or self.is_damaged)

    def __str__(self) -> str:
        if self.is_damaged:
            loading = _loading(self.loads, self.refused_by)
            return f"{self.path}: damaged, so not compared with {self.preferred}{loading}"
        path, preferred = self.both
        differences = (
            (self.own, f"not in {preferred}"),
            (self.absent, f"only in {preferred}"),
            (self.changed, "with a different dtype or shape"),
        )
        told = [
            f"{count_of(len(keys), 'key')} {what}: {list_names(keys)}"
            for keys, what in differences
            if keys
        ]
        if told:
            return (
                f"{path}: {'; '.join(told)}; values were not "
                f"compared{_loading(self.loads, self.refused_by)}"
            )
        how = "sampled bytes" if self.sampled else "bytes"
        left = f"; {count_of(self.uncompared, 'tensor')} not compared" if self.uncompared else ""
        return (
            f"{path}: the same model as {preferred} ({count_of(self.tensors, 'key')}, {how} "
            f"equal{left}){_loading(self.loads, self.refused_by)}"
        )

    @property
    def advice(self) -> str:
        """Advice to compare what was not compared here, or to save the space."""
        if self.is_equal:
            return f"either is enough; {keep_option(self.preferred, self.path)}"
        if self.is_damaged:
            return (
                f"if {self.preferred} is the save that you want: ckptfix repair DIR --keep "
                f"{self.preferred}"
            )
        if self.unlisted:
            return (
                f"make sure that both come from one save; {keep_option(self.preferred, self.path)}"
            )
        return (
            f"make sure that both come from one save: ckptfix diff DIR/{self.preferred} "
            f"DIR/{self.path}\n{keep_option(self.preferred, self.path)}"
        )


class PartialFamily(SecondFamily, frozen=True, kw_only=True):
    """A model that is stored twice, once without many of its keys. ``partial``: that one, which a
    loader takes.
    """

    code = SecondFamily.code
    severity = Severity.WARNING

    partial: PurePosixPath

    def __str__(self) -> str:
        lost = self.own or self.absent
        complete = self.path if self.partial == self.preferred else self.preferred
        return (
            f"{self.partial} lacks {count_of(len(lost), 'key')} of "
            f"{stored_in(complete, self.unlisted)}: "
            f"{list_names(lost)}{_loading(self.loads, self.refused_by)}; missing weights stay "
            "random, or the load fails"
        )

    @property
    def advice(self) -> str:
        """Advice to decide between the two, as only the user knows which model is wanted."""
        complete = self.path if self.partial == self.preferred else self.preferred
        return (
            f"unless {self.partial} is the model that you want: ckptfix repair DIR --keep "
            f"{complete}"
        )


def stored_in(path: PurePosixPath, unlisted: Collection[PurePosixPath]) -> str:
    """Return a family in words: its file, or its index, which may be missing."""
    return f"the shards of the missing {path}" if path in unlisted else str(path)


def keep_option(*paths: PurePosixPath) -> str:
    """Return the command that keeps one of several families and sets the others aside."""
    return f"to keep one of {series(sorted(set(map(str, paths))))}: ckptfix repair DIR --keep FILE"


def _loading(loads: Mapping[str, PurePosixPath], refused_by: str) -> str:
    """Return which loader takes which file as the last part of a sentence, "" where none takes
    any.
    """
    refusal = f"{refused_by} refuses a folder with two indexes" if refused_by else ""
    words = ", ".join(filter(None, [loads_in_words(loads), refusal]))
    return f"; {words}" if words else ""


def loads_in_words(loads: Mapping[str, PurePosixPath]) -> str:
    """Return in words which loader takes which file: "load_state and transformers load
    model.safetensors".
    """
    by_file: dict[PurePosixPath, list[str]] = {}
    for loader, path in loads.items():
        by_file.setdefault(path, []).append(loader)
    return ", ".join(
        f"{series(loaders)} {'loads' if len(loaders) == 1 else 'load'} {path}"
        for path, loaders in by_file.items()
    )

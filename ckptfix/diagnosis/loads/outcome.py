"""The answer of a library about a load."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptfix.wording import Line, count_of, line, list_names


class Mismatch(NamedTuple):
    """A tensor of another shape than the model has."""

    key: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]


class LoadOutcome(NamedTuple):
    """The outcome of a load, as the installed library tells it from configs and headers.

    ``path``: the file with the weights, or their index. ``library``: with its version, for which
    alone the answer holds. ``loads``: the class, "" where nothing names one. ``tensors``: of the
    file. ``missing``: keys of the model that stay random. ``unexpected``: keys of the file that are
    ignored. ``dead``: those of an adapter that take no part, ``live``: the number of those that do,
    None for anything else than an adapter. ``refused``: the library's own words where it fails.
    ``unknown``: what no load on the meta device shows. ``unchecked``: why there is no answer.
    ``contradicts``: findings from headers alone that the load shows to be wrong, in words.
    ``components``: the number of those that a pipeline takes, None for anything else. ``rounded``:
    the dtype of the file and the narrower one of the model, "" where no value is rounded.
    ``finding``: the code of one about the same file, whose advice is better than that of a load.
    """

    path: str
    library: str
    loads: str = ""
    tensors: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    dead: tuple[str, ...] = ()
    live: int | None = None
    refused: str = ""
    unknown: tuple[str, ...] = ()
    unchecked: str = ""
    contradicts: tuple[str, ...] = ()
    components: int | None = None
    rounded: str = ""
    finding: str = ""

    @property
    def status(self) -> int:
        """The exit status: 3 without an answer, 1 for a model that is not the one that was
        saved.
        """
        if self.unchecked:
            return 3
        return int(bool(self.refused or self.missing or self.mismatched or self.dead))

    @property
    def headline(self) -> str:
        """The worst of it in a few words, "" for a model that is the one that was saved."""
        if self.unchecked:
            return "load not checked"
        if self.refused or self.mismatched:
            return f"{self.library} fails to load it"
        if self.dead or (self.tensors and self.live == 0):
            return (
                f"{count_of(self.tensors - (self.live or 0), 'tensor')} of the adapter unused "
                "after a load"
            )
        return (
            f"{count_of(len(self.missing), 'tensor')} random after a load" if self.missing else ""
        )

    def lines(self) -> Iterator[Line]:
        """Yield the answer: what loads, and what of it is not as it was saved."""
        if self.unchecked:
            who = f"{self.library}: " if self.library else ""
            yield line(f"  load of {self.path} not checked: {who}{self.unchecked}", colour="yellow")
            return
        used = f"{count_of(self.tensors, 'tensor')}"
        if self.live is not None:
            used = f"{self.live} of {used} of the adapter in use"
        is_all = not self.status and self.live in (None, self.tensors)
        end = ", nothing stays random" if is_all else ""
        if self.components is not None:
            used = count_of(self.components, "component")
            end = ", none is missing" if is_all and not self.unknown else ""
        loads = f"{self.loads} from " if self.loads else ""
        colour = "red" if self.status else None
        yield line(f"  load: {self.library}, {loads}{self.path}: {used}{end}", colour=colour)
        for words, keys in (
            ("random after the load", self.missing),
            ("unused, though part of the adapter", self.dead),
            ("ignored", self.unexpected),
        ):  # fmt: skip
            if keys:
                yield line(f"    {words}: {count_of(len(keys), 'key')}, {list_names(keys)}")
        if self.mismatched:
            key, shape, expected = self.mismatched[0]
            yield line(
                f"    wrong shape: {count_of(len(self.mismatched), 'key')}, such as {key!r} "
                f"(expected {list(expected)}, found {list(shape)})"
            )
        if self.rounded:
            yield line(f"    values are rounded: {self.rounded}, the dtype in the config")
        if self.refused:
            yield line(f"    the load fails: {self.refused}")
        if self.status and self.finding:
            yield line(f"    help: {self.finding} above says what to do")
        elif self.status:
            library = self.library.partition(" ")[0]
            base = ", or correct base_model_name_or_path if it names a different model"
            yield line(
                "    help: copy the config and the weights again from one save, or load them with "
                f"the version of {library} that saved them{base if library == 'peft' else ''}"
            )
        for words in self.contradicts:
            yield line(
                f"    the headers alone suggest: {words}; trust the result of {self.library}"
            )


def read_outcome(said: Mapping[str, Any]) -> LoadOutcome:
    """Return an outcome from its JSON values."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
    }
    values["mismatched"] = tuple(
        Mismatch(key, tuple(shape), tuple(expected)) for key, shape, expected in said["mismatched"]
    )
    return LoadOutcome(*(values[name] for name in LoadOutcome._fields))

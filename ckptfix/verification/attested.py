"""Digests that come from statements, or from lists of ``sha256sum``, instead of the manifest of a
checkpoint.

A signature of tensors is over what they hold: dtype, shape and bytes. A signed tensor is there if
the model that it belongs to has a tensor of the same name with this digest. Names are compared
without the wrappers around a model, where that matches more of them; files, shards, formats and the
labels of models do not count. Tied names share one tensor, so one of them suffices. A model that
was signed twice, as a second ``prepare()`` saves it, may be there once.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.latest import digests_of_upload
from ckptfix.checkpoint.manifest import Manifest, NotAsSaved, unexplained
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.diagnosis.contents import (
    Contents,
    FileState,
    Recorded,
    TensorLocation,
    changes_a_load,
)
from ckptfix.diagnosis.target import Target
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    StorePath,
    absolute,
    is_file,
    lexists,
    lies_in,
    real_path,
    relative,
    stat_of,
    walk,
)
from ckptfix.storage.paths import (
    COMMITTED,
    JOURNAL,
    OF_FILES,
    SIGNED,
    command,
    existing,
    shell_path,
)
from ckptfix.tensors.hashing import WHOLE, Hashed, Scheme
from ckptfix.tensors.stored import Format, Weights
from ckptfix.verification.digests import named_results
from ckptfix.verification.matching import crossed, crossing, match_names, pair_models, unwrapping
from ckptfix.verification.sha256sums import read_sums
from ckptfix.verification.signatures import OF_UPLOAD, Attestation, Trust, open_statement
from ckptfix.verification.statements import (
    ALONE,
    FileStatement,
    TensorStatement,
    uncovered_weights,
)
from ckptfix.verification.verify_report import Change, Item, Kind, Outcome
from ckptfix.wording import count_of, list_names, series

_SUMS = "sha256sums"


class Evidence(Struct, frozen=True, kw_only=True):
    """All that a checkpoint is to be compared with instead of its manifest.

    ``files``, ``tensors``: the statements. ``sums``: path -> sha256 of lists. ``attestations``: one
    for each file that was read. ``not_checked``: what of the lists is not about the checkpoint, in
    words. ``options``: of ``verify``, for the command that compares again. ``added``: files that
    came since and change a load.
    """

    files: FileStatement | None = None
    tensors: TensorStatement | None = None
    sums: dict[str, str] = field(default_factory=dict)
    attestations: tuple[Attestation, ...] = ()
    not_checked: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()

    @property
    def problems(self) -> str:
        """Why nothing must be compared, "" where everything can be relied on."""
        return "; ".join(f"{one.path} {one.problem}" for one in self.attestations if one.problem)

    def source(self, kind: str) -> str:
        """Return the file with the digests of a kind, as messages name it."""
        paths = [one.path for one in self.attestations if kind in (one.kind, "")]
        return series([*map(str, paths)])

    def command(self, target: Target) -> str:
        """Return the command that compares again."""
        return command("verify", target.root, target.only or "", *self.options)


def gather(
    target: Target,
    *,
    signatures: Sequence[Openable] = (),
    statements: Sequence[Openable] = (),
    sha256sums: Sequence[Openable] = (),
    trust: Trust | None = None,
) -> Evidence:
    """Read statements and lists. ``signatures``: must be signed by ``trust``; ``statements``: need
    not be signed.

    Raises UsageError for files that do not go together, OperationError for one that is refused,
    OSError.
    """
    if trust is not None and not signatures:
        raise UsageError(
            "a signer was named without a signature; next: ckptfix verify --signature FILE "
            f"{target.path}"
        )
    if signatures and trust is None:
        first = existing(signatures[0])
        raise UsageError(
            f"{first}: name the expected signer: --key PUBLIC_KEY, --certificate-chain CA.pem, or "
            "--identity NAME --identity-provider URL; to compare without verifying the signature: "
            f"{_unsigned(target, first)}"
        )
    if trust is not None:
        trust.material()  # before anything is read: it raises for one that names nobody, or two
    found: dict[type, FileStatement | TensorStatement] = {}
    attestations = []
    for given, whom in (
        *((one, trust) for one in signatures),
        *((one, None) for one in statements),
    ):
        opened = open_statement(_at(given, target), whom)
        attestations.append(opened.attestation)
        if (
            isinstance(opened.statement, TensorStatement)
            and opened.attestation.path.name in OF_FILES
        ):
            raise OperationError(
                f"{given}: refused, and nothing was compared: it lists only tensors but has the "
                "name of a statement of files, so changes in other files would go unnoticed; next: "
                "get the file again from whoever made it"
            )
        if opened.statement is not None and found.setdefault(
            type(opened.statement), opened.statement
        ) is not (opened.statement):
            raise UsageError(
                f"{given} is the second statement of {opened.attestation.kind}; pass only one"
            )
    files, tensors = found.get(FileStatement), found.get(TensorStatement)
    assert not isinstance(files, TensorStatement)
    assert not isinstance(tensors, FileStatement)
    if sha256sums and files is not None:
        raise UsageError("--sha256sums and a statement of files both list files; pass only one")
    sums: dict[str, str] = {}
    told: list[str] = []
    for given in sha256sums:
        path = _at(given, target)
        listed = read_sums(path, target.root)
        for name, digest in listed.digests.items():
            if sums.setdefault(name, digest) != digest:
                raise OperationError(
                    f"{path}: refused: another list has a different checksum of {name!r}"
                )
        told += listed.not_checked(str(path))
        attestations.append(Attestation(path=path, kind=_SUMS))
        if not listed.digests:
            is_inside = lies_in(absolute(path), absolute(target.root))
            move = (
                f"; next, if it was created in {target.root}: mv {shell_path(path)} "
                f"{shell_path(target.root)}"
            )
            raise UsageError(
                f"{path} lists no file in {target.root}: its paths are relative to the list's own "
                f"folder{'' if is_inside else move}"
            )
    return Evidence(
        files=_alone(files, target, attestations) if files is not None else None,
        tensors=tensors,
        sums=sums,
        attestations=tuple(attestations),
        not_checked=tuple(told),
        options=tuple(_options(signatures, statements, sha256sums, trust)),
    )


def from_upload(contents: Contents, manifest: Manifest | None) -> Evidence | None:
    """Return the sha256s in the commit marker of a complete upload, None without one. Raises
    OSError.
    """
    root, sums = contents.root, digests_of_upload(contents.root)
    if not sums:
        return None
    listed = {*sums, *(manifest.files if manifest is not None else ())}
    new = [NotAsSaved(name, 0, 0) for name in contents.files if name not in listed]
    added = (file.name for file in unexplained(root, new, by_manifest=False))
    return Evidence(
        sums=sums,
        attestations=(Attestation(path=root / COMMITTED, kind=OF_UPLOAD),),
        added=frozenset(filter(changes_a_load, added)),
    )


class Attested(Recorded):
    """Records of statements and lists about a checkpoint, in the place of those of its manifest.

    ``crossed``: models in each other's place, in words. ``notes``: what the comparison passes over,
    in words. ``added``: values that are not plain tensors, and came since.
    """

    def __init__(self, evidence: Evidence, contents: Contents, target: Target) -> None:
        files = evidence.files.files if evidence.files is not None else evidence.sums
        super().__init__(Manifest(versions={}, world_size=0, step=0, sha256=files), target)
        self.crossed = ""
        self.notes: list[str] = []
        self.added: tuple[Item, ...] = ()
        self.has_tensors = evidence.tensors is not None
        self.scheme = evidence.files.scheme if evidence.files is not None else WHOLE
        # A statement of files is the only one with any, and lists come last.
        kind = "files" if evidence.files is not None else evidence.attestations[-1].kind
        self.source, self.tensor_source = evidence.source(kind), evidence.source("tensors")
        self._evidence = evidence
        self._contents = contents
        self._own = {_place(one.path) for one in evidence.attestations}
        self._uncovered = frozenset(uncovered_weights(contents))
        self._of_weights = {
            str(path): weights.format for weights in contents.weights for path in weights.files
        }

    def place(self, hashed: Mapping[str | TensorLocation, Hashed]) -> None:
        """Put the digests of the statement under the labels and names that its tensors have
        here.
        """
        if self._evidence.tensors is None:
            return
        placing = _Placing(self._evidence.tensors, self._contents, hashed)
        self.tensors = {**placing.digests}
        self.aliases = {label: set() for label in self.tensors}
        self.crossed = crossing(placing.crossed, "the statement", str(self._contents.root))
        self.notes = placing.notes
        self.added = tuple(
            Item(
                kind=Kind.TENSOR, name=name, where=where, outcome=Outcome.DIFFER, change=Change.EXTRA,
                text=(
                    f"is not in {self.tensor_source} and cannot be compared: it is not a plain "
                    "tensor"
                ),
            )
            for where, name in placing.added
        )  # fmt: skip

    def scheme_of(self, name: str, size: int) -> Scheme:
        """Return how a file is hashed to be compared: as the statement says of all of them."""
        return self.scheme

    def unlisted(self, name: str) -> tuple[bool, str]:
        """Return whether a file that is not listed is a difference, and the words for it."""
        files = self._evidence.files
        if _place(self._contents.root / name) in self._own:
            return False, "is the file that the checkpoint was compared with"
        tensors = self._evidence.tensors
        if files is None and tensors is not None and name in self._uncovered:
            return (
                name not in tensors.uncovered,
                f"may hold weights and is not covered by {self.tensor_source}",
            )
        if files is None:
            if not self._evidence.sums and name in self._of_weights:
                of_masters = self._of_weights[name] is Format.DEEPSPEED
                what = "fp32 weights, not copies with another dtype" if of_masters else "tensors"
                return False, f"{self.tensor_source} covers only its {what}"
            return name in self._evidence.added, f"is not covered by {self.source}"
        if files.leaves_out(name):
            return False, f"is not covered by {self.source}, which excludes it"
        if files.scheme.shard_size is not None and self._contents.files[name].size == 0:
            return (
                False,
                f"is empty and not covered by {self.source}: an empty file has no shards",
            )
        return True, f"is not covered by {self.source}"

    def special(self, name: str, why: str) -> tuple[bool, str]:
        """Return whether what is not a file, and not listed, is a difference: a link may lead
        somewhere tomorrow.
        """
        files = self._evidence.files
        if files is None or files.leaves_out(name):
            return False, why
        return True, f"{why}, not covered by {self.source}"


def _place(path: AnyPath) -> str:
    """Return where a file lies. Another link to the same file is another place: a loader reads it
    by that name.
    """
    return str(real_path(path.parent) / path.name)


def with_own_files(contents: Contents, evidence: Evidence) -> Contents:
    """Return the contents with the files of ckptfix's own folders where one of them is listed.

    Other programs know them as ordinary folders.
    """
    found = {}
    for own in own_folders(contents, evidence, listed=True):
        for folder, _, names in walk(contents.root / own):
            for path in (folder / name for name in names):
                with suppress(OSError):
                    status = stat_of(path)
                    if stat.S_ISREG(status.st_mode):
                        name = str(relative(path, contents.root))
                        found[name] = FileState(status.st_size, status.st_mtime_ns)
    return replace(contents, files={**contents.files, **found}) if found else contents


def own_folders(contents: Contents, evidence: Evidence, *, listed: bool) -> list[str]:
    """Return ckptfix's own folders in which a file is listed, or those in which none is."""
    names = evidence.files.files if evidence.files is not None else evidence.sums
    return [
        own
        for own in ((JOURNAL, *contents.journals) if contents.only is None else ())
        if any(name.startswith(f"{own}/") for name in names) is listed
        and (contents.root / own).is_dir()
    ]


def _at(given: Openable, target: Target) -> AnyPath:
    """Return the path of a file that was named. Raises UsageError, which says where in the
    checkpoint it is.
    """
    if isinstance(given, StorePath):
        return given
    path = Path(given)
    inside = target.root / PurePosixPath(path)
    if not lexists(path) and not path.is_absolute() and is_file(inside):
        raise UsageError(f"{path} does not exist; did you mean {inside}?")
    if existing(given).is_dir():
        raise UsageError(f"{path} is a folder; name the file in it, such as {path / SIGNED[0]}")
    return path


def _alone(
    files: FileStatement, target: Target, attestations: Iterable[Attestation]
) -> FileStatement:
    """Return the statement of a file that was signed without a folder as one about the file that
    was named.
    """
    if ALONE not in files.files:
        return files
    where = next(str(one.path) for one in attestations if one.kind == "files")
    if len(files.files) > 1 or target.only is None:
        raise UsageError(f"{where} is about a single file; name that file instead of {target.root}")
    return replace(files, files={target.only: files.files[ALONE]})


def _unsigned(target: Target, path: AnyPath) -> str:
    return command("verify", target.root, target.only or "", "--oms", str(path))


def _options(
    signatures: Sequence[object],
    statements: Sequence[object],
    sums: Sequence[object],
    trust: Trust | None,
) -> Iterable[str]:
    for option, paths in (
        ("--signature", signatures),
        ("--oms", statements),
        ("--sha256sums", sums),
    ):
        for path in paths:
            yield from (option, str(path))
    if trust is None:
        return
    for option, value in (
        ("--key", trust.key),
        *(("--certificate-chain", one) for one in trust.certificates),
        ("--identity", trust.identity),
        ("--identity-provider", trust.identity_provider),
        ("--trust-config", trust.trust_config),
    ):
        if value is not None:
            yield from (option, str(value))


class _Placing:
    """The models of a statement paired with those that are there, by what they hold where that is
    the same.

    ``digests``: label of a model here -> name -> digest. ``crossed``: pairs that are in another
    order than the statement has. ``notes``: what is passed over, in words. ``added``: file and name
    of values that came since.
    """

    def __init__(
        self,
        statement: TensorStatement,
        contents: Contents,
        hashed: Mapping[str | TensorLocation, Hashed],
    ) -> None:
        self.crossed: list[tuple[Weights, Weights]] = []
        self.notes: list[str] = []
        self.added: list[tuple[str, str]] = []
        self.digests: dict[str, dict[str, str]] = {
            weights.label: {} for weights in contents.weights
        }
        self._statement = statement
        self._is_lone = contents.only is not None
        self._signed = {one.label: _bare(statement.by_name(one)) for one in statement.models}
        here = named_results(contents, hashed)
        self._here = {
            one.label: _bare(
                {name: here[TensorLocation(one.label, name)].digest for name in one.named()}
            )
            for one in contents.weights
        }
        pairs = self._alike(contents.weights)
        paired = {id(one) for pair in pairs for one in pair}
        left = [one for one in contents.weights if id(one) not in paired]
        others = [one for one in statement.models if id(one) not in paired]
        known = [self._signed[signed.label] for signed, _ in pairs]
        copies = []
        for signed in list(others):
            if len(others) > len(left) and self._signed[signed.label] in known:
                others.remove(signed)
                copies.append(signed)
            known.append(self._signed[signed.label])
        rest = list(pair_models(others, left))
        self.crossed += crossed(rest)
        for one, other in (*pairs, *rest):
            self._put(one, other)
        for copy in copies:
            twin = next(
                one
                for one in statement.models
                if self._signed[one.label] == self._signed[copy.label]
            )
            count = count_of(len(copy.tensors), "tensor")
            self.notes.append(
                f"{copy.label}: duplicate of {twin.label} in the statement ({count}), compared "
                "only once"
            )

    def _alike(self, models: Sequence[Weights]) -> list[tuple[Weights, Weights]]:
        """Return the models that hold the same, in the order of the statement as far as that is
        possible.

        A copy that a repair dropped leaves a gap, which changes no order.
        """
        found: list[tuple[Weights, Weights]] = []
        free = sorted(self._statement.models, key=_position)
        homes = {one.home for one in free}
        last: dict[PurePosixPath, tuple[PurePosixPath, int]] = {}
        for there in sorted(models, key=_position):
            same = [one for one in free if self._signed[one.label] == self._here[there.label]]
            same = [one for one in same if one.path == there.path] or same
            same = [one for one in same if one.label == there.label] or same
            if not same or not there.tensors:
                continue
            after = [
                one for one in same if one.position > last.get(one.home, (PurePosixPath(), -1))
            ]
            signed = next(iter(after), same[0])
            free.remove(signed)
            found.append((signed, there))
            if there.path:
                is_crossed = signed.label != there.label and there.label in self._signed
            else:
                is_crossed = not after or (signed.home != there.home and there.home in homes)
                last[signed.home] = signed.position
            if is_crossed:
                self.crossed.append((signed, there))
        return found

    def _put(self, signed: Weights | None, there: Weights | None) -> None:
        if there is not None and there.opaque:
            bare = unwrapping((*there.named(), *there.opaque))
            known = _bare_names(signed) if signed is not None else set()
            where = str(there.files[0]) if len(there.files) == 1 else there.label
            self.added += ((where, name) for name in there.opaque if bare(name) not in known)
        if signed is None:
            return
        own = self._statement.by_name(signed)
        if there is not None:
            found, is_unwrapped, others = _renamed(
                own, signed, there, is_part=self._is_lone and _is_part(signed, there)
            )
            self.digests[there.label] = found
            if others:
                words = "the statement lists these tensors only under other keys"
                self.notes.append(f"{there.label}: {words}: {list_names(others)}")
            if is_unwrapped:
                self.notes.append(f"{there.label}: keys were compared without wrapper prefixes")
        elif not self._is_lone:
            label = (
                signed.label if signed.label not in self.digests else f"{signed.label} as stated"
            )
            self.digests[label] = own


def _position(weights: Weights) -> tuple[PurePosixPath, int]:
    return weights.position


def _bare_names(weights: Weights) -> set[str]:
    """Return all names in a model, without wrappers."""
    names = (*weights.named(), *weights.opaque)
    return set(map(unwrapping(names), names))


def _is_part(signed: Weights, there: Weights) -> bool:
    """Return whether a lone file holds a part of its model, by its name or as one of several that
    were signed.
    """
    (file,) = there.files if len(there.files) == 1 else (None,)
    if file is None:
        return False  # an index, with all files that it names
    name = parse_file_name(file.name)
    return (
        (name is not None and name.shard is not None)
        or parse_rank_file_name(file.name) is not None
        or (file in signed.files and len(signed.files) > 1)
    )


def _bare(own: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of a model by its names without wrappers."""
    bare = unwrapping(own)
    return {bare(name): digest for name, digest in own.items()}


def _renamed(
    digests: Mapping[str, str], signed: Weights, there: Weights, *, is_part: bool
) -> tuple[dict[str, str], bool, list[str]]:
    """Return the digests of a signed model by the names of the model that is there, and whether
    wrappers were removed.

    The list: names that nobody signed, of tensors that were signed by another name. ``is_part``: it
    is one file of several, in which other tensors are not missing.
    """
    matched, removed = match_names(signed.named(), there.named())
    found = {one.b: digests[one.a] for one in matched if one.a is not None and one.b is not None}
    known = {
        signed.ties.get(one.a, one.a) for one in matched if one.a is not None and one.b is not None
    }
    others = []
    kept_here = {there.ties.get(name, name): digest for name, digest in found.items()}
    for one in matched:
        if one.a is None and one.b is not None:
            digest = kept_here.get(there.ties.get(one.b, one.b))
            if digest is not None:  # another name of a tensor that is compared
                found[one.b] = digest
                others.append(one.b)
        elif one.a is None or one.b is not None or is_part:
            continue
        # Else a tied name is there, which suffices.
        elif signed.ties.get(one.a, one.a) not in known:
            found[one.a if one.a not in found else f"{one.a} as stated"] = digests[one.a]
    return found, bool(removed), others

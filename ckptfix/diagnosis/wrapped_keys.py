"""Wrappers in keys: single, nested or inner ones, and the keys that a correct script would have."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.entries import shapes_of
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope
from ckptfix.checkpoint.keys import (
    KeyMap,
    collapse,
    common_wrappers,
    dotted,
    inner_wrappers,
    is_flat_name,
    is_nested,
    prepared,
)
from ckptfix.checkpoint.model_configs import CONFIG, is_pretrained, library_of_names
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.second_prepare import Evidence
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    LostPrefix,
    NestedPrefix,
    UndecidedPrefix,
    WrapperPrefix,
)
from ckptfix.diagnosis.findings.incomplete import FlatParameters
from ckptfix.lazy import once

STATE_DICT = "state dict"
"""The kind of a place with the keys of tensors."""

_OF_WEIGHTS = (Role.MODEL, Role.UNKNOWN, Role.WEIGHTS_INDEX)
"""Roles of files that show which wrappers the keys of a model should have."""

NAMED_ROLES = (Role.MODEL, Role.OPTIMIZER, Role.UNKNOWN)
"""Roles of files whose keys can have wrappers. The states of generators, schedulers and custom
objects cannot.
"""

ScopeKey = tuple[PurePosixPath, tuple[str, ...], str]
"""Identity of a place for keys: the file, the path to the dict in it, the kind."""


def scope_key(component: Component, scope: NameScope) -> ScopeKey:
    """Return the identity of a place of keys in a folder."""
    return (component.path, scope.path, scope.kind)


def nested_evidence(processes: int | None) -> str:
    """Return the evidence that nested wrappers are damage, "" if one process saved them: it adds no
    wrapper.
    """
    if processes is None:
        return "nothing shows how many processes saved it"
    return f"saved by {processes} processes" if processes > 1 else ""


def _is_undecided(processes: int | None) -> bool:
    """Return whether the number of processes, the only evidence for nested wrappers, leaves the
    decision to the user.

    ``save_state`` takes one DistributedDataParallel off. So the script itself wraps its model as
    often as the keys say, and looks for these keys. Without random states another program may have
    saved it, and this does not hold.
    """
    return processes is not None and processes > 1


def diagnose_names(case: Case) -> list[Finding]:
    """Find nested and single wrappers in every file that is neither a duplicate nor left over.

    Only models have wrappers, and optimizers the keys of their models: the classes of custom
    objects, samplers, schedulers and states of generators choose their own names.
    """
    evidence, doubled = case.evidence, case.paths(DoubledModel)
    judged = [
        group
        for group in case.groups
        if group.members
        and not group.is_left_over
        and group.members[0].path not in doubled
        and group.members[0].role in NAMED_ROLES
    ]
    verdicts = _Verdicts(evidence, judged)
    findings: list[Finding] = []
    for group in judged:
        for component in group.members:
            flat = tuple(
                name for scope in component.scopes for name in scope.names if is_flat_name(name)
            )
            if flat:
                findings.append(
                    FlatParameters(path=component.path, tensors=tuple(dict.fromkeys(flat)))
                )
            for scope in component.scopes:
                chain = group.chain(scope)
                verdict = verdicts.of(group, scope) if is_nested(chain) else None
                if verdict is not None:
                    kind = UndecidedPrefix if verdict.is_undecided else NestedPrefix
                    finding = kind(
                        path=component.path,
                        scope=str(scope),
                        chain=chain,
                        target=verdict.target,
                        names=len(scope.names),
                        evidence=verdict.evidence,
                        assumed=verdict.assumed,
                    )
                    findings.append(finding)
                elif scope.kind == STATE_DICT and (chain or inner_wrappers(scope.names)):
                    is_pretrained = component.name.is_of_library and _is_export(evidence.folder)
                    of_diffusers = (
                        is_pretrained
                        and chain
                        and library_of_names(evidence.folder.root / CONFIG) == "diffusers"
                    )
                    findings.append(
                        (LostPrefix if of_diffusers else WrapperPrefix)(
                            path=component.path,
                            scope=str(scope),
                            chain=chain,
                            names=len(scope.names),
                            is_pretrained=is_pretrained,
                        )
                    )
    return findings


def _is_export(folder: CheckpointFolder) -> bool:
    """Return whether ``from_pretrained`` loads the weights of a folder: its script need not wrap
    the model again.
    """
    return not folder.is_save_state and is_pretrained(folder.root)


class _Nested(NamedTuple):
    """The wrappers that the keys of a nested place should begin with, and the evidence."""

    target: tuple[str, ...]
    evidence: str
    assumed: bool
    is_undecided: bool = False
    """The number of processes is the only evidence."""


class _Verdicts:
    """Verdicts about nested wrappers, by the folder's other files, siblings, and the number of
    processes.
    """

    def __init__(self, evidence: Evidence, groups: Sequence[ModelFiles]) -> None:
        self._evidence = evidence
        self._folder = evidence.folder
        self._places = [
            (group, scope)
            for group in groups
            for scope in group.members[0].scopes
            if scope.kind == STATE_DICT
        ]
        self._unwrapped: dict[tuple[ModelFiles, tuple[str, ...], str], frozenset[str]] = {}
        self._bare: dict[object, bool] = {}
        self._proven: set[object] = set()
        """Lists with an entry whose keys another file has in fewer wrappers."""
        for group in groups:
            whole = group.members[0].whole
            if whole is not None and is_nested(group.chain(whole)):
                # All entries of a list get the same keys: renamed differently, equal ones would
                # look like duplicates.
                entries = _list_of(group)
                reference = self._reference(group, whole)
                if reference is not None:
                    self._proven.add(entries)
                has_bare = reference is not None and not reference[1]
                self._bare[entries] = self._bare.get(entries, True) and has_bare

    def of(self, group: ModelFiles, scope: NameScope) -> _Nested | None:
        """Return the verdict about a nested place; None where its wrappers may be modules of the
        script itself.
        """
        if scope.kind == STATE_DICT:
            return self._of_model(group, scope)
        chain, names = group.chain(scope), self._names(group, scope)
        own = [place for place in self._places if place[0] is group] or self._places
        for model, other_scope in own:
            if names <= self._names(model, other_scope):
                # The optimizer follows its model: other keys would not fit.
                return (
                    self._of_model(model, other_scope)
                    if is_nested(model.chain(other_scope))
                    else None
                )
        return self._by_processes(chain)

    def _of_model(self, group: ModelFiles, scope: NameScope) -> _Nested | None:
        chain = group.chain(scope)
        if self._has_sibling(group, scope):
            return None
        if scope.path == () and (reference := self._reference(group, scope)) is not None:
            path, others = reference
            target = () if self._bare.get(_list_of(group), False) else collapse(chain)
            return _Nested(
                target,
                f"{path} has these keys "
                + (f"under '{dotted(others)}'" if others else "without a wrapper"),
                assumed=False,
            )
        if self._evidence.is_registered(group.members[0]):
            return None
        return self._by_processes(chain, is_proven=_list_of(group) in self._proven)

    def _by_processes(self, chain: tuple[str, ...], *, is_proven: bool = False) -> _Nested | None:
        """Return the verdict by the number of processes. ``is_proven``: an entry next to it was
        wrapped twice.
        """
        processes = self._folder.processes
        evidence = nested_evidence(processes)
        if not evidence:
            return None
        undecided = _is_undecided(processes) and not is_proven
        if any(
            name.role in _OF_WEIGHTS
            for name in map(parse_file_name, self._folder.unscanned)
            if name
        ):
            # Another shard, the index, or the model that this one averages.
            evidence, undecided = (
                "the other weights of the folder, which may show why, were not read",
                True,
            )
        return _Nested(collapse(chain), evidence, assumed=True, is_undecided=undecided)

    def _has_sibling(self, group: ModelFiles, scope: NameScope) -> bool:
        """Return whether a model with the same keys and shapes has fewer wrappers: this one may be
        its average.

        In one file the average follows its model.
        """
        chain = group.chain(scope)
        shapes: Mapping[str, object] | None = None
        is_before = True
        # Only these can have the same keys: 4,000 models in one file would be compared 16 million
        # times.
        for other_group, other_scope in self._by_names.get(self._names(group, scope), ()):
            other_chain = other_group.chain(other_scope)
            is_before = is_before and (other_group is not group or other_scope.path != scope.path)
            if _are_of_one_save(group, other_group, is_before) and len(prepared(other_chain)) < len(
                prepared(chain)
            ):
                shapes = shapes or _unwrapped_shapes(group, scope, chain)
                if shapes == _unwrapped_shapes(other_group, other_scope, other_chain):
                    return True
        return False

    def _names(self, group: ModelFiles, scope: NameScope) -> frozenset[str]:
        """Return the keys of a place without their wrappers."""
        key = group, scope.path, scope.kind
        if key not in self._unwrapped:
            self._unwrapped[key] = frozenset(
                map(KeyMap(remove=group.chain(scope)), group.names(scope))
            )
        return self._unwrapped[key]

    @once
    def _by_names(self) -> dict[frozenset[str], list[tuple[ModelFiles, NameScope]]]:
        by_names: dict[frozenset[str], list[tuple[ModelFiles, NameScope]]] = {}
        for group, scope in self._places:
            by_names.setdefault(self._names(group, scope), []).append((group, scope))
        return by_names

    def _reference(
        self, group: ModelFiles, scope: NameScope
    ) -> tuple[PurePosixPath, tuple[str, ...]] | None:
        """Return the index or container that has the keys of a model in fewer wrappers, and these
        wrappers.
        """
        chain = group.chain(scope)
        names = self._names(group, scope)
        candidates = (
            (path, own)
            for path, known in _references(self._folder, group)
            if len(prepared(own := common_wrappers(known))) < len(prepared(chain))
            and not is_nested(own)
            if names.issubset(map(KeyMap(remove=own), known))
        )
        return min(candidates, key=lambda candidate: len(candidate[1]), default=None)


def _are_of_one_save(group: ModelFiles, other_group: ModelFiles, is_before: bool) -> bool:
    """Return whether a place in ``group`` can be the average of a model in ``other_group``.

    ``is_before``: the model comes first. They are in one file, in one list of entries, or in a file
    next to those.
    """
    if group is other_group:
        return is_before
    roles = {group.members[0].role, other_group.members[0].role}
    return _list_of(group) == _list_of(other_group) or roles == {Role.MODEL, Role.UNKNOWN}


def _unwrapped_shapes(
    group: ModelFiles, scope: NameScope, chain: tuple[str, ...]
) -> dict[str, object]:
    strip = KeyMap(remove=chain)
    shapes_of_names: dict[str, object] = {strip(name): None for name in group.names(scope)}
    for member in group.members:
        shapes_of_names |= {
            strip(name): shape for name, shape in shapes_of(member, scope.path).items()
        }
    return shapes_of_names


def _list_of(group: ModelFiles) -> object:
    first = group.members[0]
    return (
        first.path if len(group.members) > 1 else (first.role, first.name.stem, first.name.suffix)
    )


def _references(
    folder: CheckpointFolder, group: ModelFiles
) -> Iterator[tuple[PurePosixPath, Collection[str]]]:
    """Yield the key sets of the same model: its index, and the entries in the other container.

    Their numbers do not count: closing a gap must not change a verdict. Next to what ``save_state``
    wrote, the other container shows nothing. Its keys can be those of an export, by a script whose
    model has two modules called 'module': ``load_state`` takes only the nested keys into that
    model.
    """
    if group.listed and group.index_path is not None:
        yield group.index_path, group.listed.keys()
    name = group.members[0].name
    if name.role is not Role.MODEL or name.shard is not None or folder.processes is not None:
        return
    for component in folder.components:
        if (
            component.role is Role.MODEL
            and component.name.shard is None
            and component.name.suffix != name.suffix
            and component.whole is not None
        ):
            yield component.path, component.whole.names

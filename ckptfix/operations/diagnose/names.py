"""Names: wrappers that are there once, twice, or in the middle, and what the names should be."""

from collections.abc import Container, Iterable, Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope
from ckptfix.checkpoint.groups import ModelFiles
from ckptfix.checkpoint.keys import KeyMap, collapse, inner_wrappers, is_flat_name, is_nested
from ckptfix.operations.findings import Finding, FlatParameters, NestedPrefix, WrapperPrefix

ScopeKey = tuple[PurePosixPath, tuple[str, ...], str]
"""Which place for names is meant: the file, the path to the dict in it, the kind."""


def scope_key(component: Component, scope: NameScope) -> ScopeKey:
    """Return what identifies a place for names in a folder."""
    return (component.path, scope.path, scope.kind)


def diagnose_names(
    folder: CheckpointFolder, groups: Iterable[ModelFiles], doubled: frozenset[PurePosixPath]
) -> list[Finding]:
    """Find nested and single wrappers in every file that is neither a double nor left over."""
    judged = [
        group
        for group in groups
        if group.members and group.stale_of is None and group.members[0].path not in doubled
    ]
    bare = _belongs_bare(folder, judged)
    findings: list[Finding] = []
    for group in judged:
        for component in group.members:
            flat = tuple(name for scope in component.scopes for name in scope.names if is_flat_name(name))
            if flat:
                findings.append(FlatParameters(path=component.path, tensors=tuple(dict.fromkeys(flat))))
            for scope in component.scopes:
                chain = group.chain(scope)
                if is_nested(chain):
                    is_whole_file = scope.path == () and scope.kind == "state dict"
                    to_bare = is_whole_file and bare.get(_list_of(group), False)
                    finding = NestedPrefix(
                        path=component.path,
                        scope=str(scope),
                        chain=chain,
                        target=() if to_bare else collapse(chain),
                        names=len(scope.names),
                    )
                    findings.append(finding)
                elif scope.kind == "state dict" and (chain or inner_wrappers(scope.names)):
                    findings.append(
                        WrapperPrefix(
                            path=component.path, scope=str(scope), chain=chain, names=len(scope.names)
                        )
                    )
    return findings


def _belongs_bare(folder: CheckpointFolder, groups: Iterable[ModelFiles]) -> Mapping[object, bool]:
    """Return for every list of entries whether bare references exist for all that are nested in it.

    One answer for all entries of a list: renamed differently, equal entries would look like doubles afterwards.
    """
    found: dict[object, bool] = {}
    for group in groups:
        whole = group.members[0].whole
        if whole is not None and is_nested(group.chain(whole)):
            entries = _list_of(group)
            found[entries] = found.get(entries, True) and _has_bare_reference(folder, group, whole)
    return found


def _list_of(group: ModelFiles) -> object:
    first = group.members[0]
    return first.path if len(group.members) > 1 else (first.role, first.name.stem, first.name.suffix)


def _has_bare_reference(folder: CheckpointFolder, group: ModelFiles, scope: NameScope) -> bool:
    strip = KeyMap(remove=group.chain(scope))
    names = group.names(scope)
    # Looked up name by name, so that the first name that is not there ends it.
    return any(all(strip(fqn) in known for fqn in names) for known in _references(folder, group))


def _references(folder: CheckpointFolder, group: ModelFiles) -> Iterable[Container[str]]:
    """Yield the key sets that speak of the same model: its index, and the same entry in the other container."""
    if group.listed:
        yield group.listed
    name = group.members[0].name
    if name.role is not Role.MODEL or name.shard is not None:
        return
    for other in folder.components:
        if (
            other.role is Role.MODEL
            and other.name.shard is None
            and other.name.index == name.index
            and other.name.suffix != name.suffix
            and other.whole is not None
        ):
            yield set(other.whole.names)

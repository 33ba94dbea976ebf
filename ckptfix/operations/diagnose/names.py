"""Names: wrappers that are there once, twice, or in the middle, and what the names should be."""

from collections.abc import Container, Iterable, Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope, families
from ckptfix.checkpoint.keys import KeyMap, collapse, inner_wrappers, is_nested, shared_chain
from ckptfix.formats.weights_index import WeightsIndex
from ckptfix.operations.findings import Finding, NestedPrefix, WrapperPrefix

ScopeKey = tuple[PurePosixPath, tuple[str, ...], str]
"""Which place for names is meant: the file, the path to the dict in it, the kind."""


def chains(folder: CheckpointFolder) -> Mapping[ScopeKey, tuple[str, ...]]:
    """Return the wrapper chain of every place where names live.

    Shards of one model are one state dict: a chain counts only if the names of *all* shards carry it, because a
    user's own submodule called ``module`` may fill a shard by itself.
    """
    found: dict[ScopeKey, tuple[str, ...]] = {}
    for members in families(folder.components).values():
        is_sharded = members[0].name.shard is not None
        shared = shared_chain(scope.chain for member in members for scope in member.scopes if scope.names)
        for member in members:
            for scope in member.scopes:
                found[scope_key(member, scope)] = shared if is_sharded else scope.chain
    return found


def scope_key(component: Component, scope: NameScope) -> ScopeKey:
    """Return what identifies a place for names in a folder."""
    return (component.path, scope.path, scope.kind)


def diagnose_names(folder: CheckpointFolder, doubled: frozenset[PurePosixPath]) -> list[Finding]:
    """Find nested and single wrappers in every file that is no double."""
    findings: list[Finding] = []
    found = chains(folder)
    for component in folder.components:
        if component.path in doubled:
            continue
        for scope in component.scopes:
            finding = _diagnose_scope(folder, component, scope, found[scope_key(component, scope)])
            if finding is not None:
                findings.append(finding)
    return findings


def _diagnose_scope(
    folder: CheckpointFolder, component: Component, scope: NameScope, chain: tuple[str, ...]
) -> Finding | None:
    if is_nested(chain):
        return NestedPrefix(
            path=component.path,
            scope=str(scope),
            chain=chain,
            target=_target(folder, component, scope, chain),
            names=len(scope.names),
        )
    if scope.kind == "state dict" and (chain or inner_wrappers(scope.names)):
        return WrapperPrefix(path=component.path, scope=str(scope), chain=chain, names=len(scope.names))
    return None


def _target(
    folder: CheckpointFolder, component: Component, scope: NameScope, chain: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the chain that names should have: none where a bare reference says so, else each wrapper once."""
    if scope.path == () and scope.kind == "state dict":
        strip = KeyMap(remove=chain)
        # Looked up name by name, so that the first name that is not there ends it: an index speaks of all shards.
        if any(all(strip(fqn) in names for fqn in scope.names) for names in _references(folder, component)):
            return ()
    return collapse(chain)


def _references(folder: CheckpointFolder, component: Component) -> Iterable[Container[str]]:
    """Yield the key sets that speak of the same model: its index, and the same entry in the other container."""
    name = component.name
    for other in folder.components:
        if isinstance(other.content, WeightsIndex) and other.name.stem == name.stem:
            if other.name.suffix == f"{name.suffix}.index.json":
                yield other.content.weight_map
        elif (
            name.role is Role.MODEL
            and other.role is Role.MODEL
            and other.name.index == name.index
            and other.name.suffix != name.suffix
            and other.whole is not None
        ):
            yield set(other.whole.names)

"""From findings to steps. Pure: the same diagnosis and policy give the same plan, and nothing is touched."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component, Fingerprint, NameScope
from ckptfix.checkpoint.keys import DDP_CHAIN, KeyMap, collisions, common_wrappers, without_private_wrappers
from ckptfix.formats.safetensors_file import METADATA_KEY, SafetensorsFile
from ckptfix.operations.diagnose import Diagnosis
from ckptfix.operations.diagnose.entries import GAPLESS_ROLES, renumbered
from ckptfix.operations.diagnose.names import ScopeKey, chains, scope_key
from ckptfix.operations.diagnose.shards import shard_groups, weight_map
from ckptfix.operations.findings import (
    DoubledModel,
    EntryGap,
    Finding,
    IdenticalModels,
    IdenticalStates,
    IndexMismatch,
    MissingShard,
    NestedPrefix,
    NoFormatMetadata,
    TrailingBytes,
    UnsafePickle,
    WrapperPrefix,
)
from ckptfix.operations.policy import Keys, Policy
from ckptfix.operations.steps import (
    DropEntry,
    Renumber,
    RewriteNames,
    Safety,
    Step,
    StepAction,
    Trim,
    Unplanned,
    WriteIndex,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in the order in which they are applied, and what stays although it could be repaired."""

    folder: CheckpointFolder
    steps: tuple[Step, ...]
    unplanned: tuple[Unplanned, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps


def make_plan(diagnosis: Diagnosis, policy: Policy) -> Plan:
    """Plan the repair of a diagnosed folder.

    Drops come first, so that a dropped file's recipe names the kept file as it was; moves come last, so that
    every other step names files as the user knows them.
    """
    planner = _Planner(diagnosis, policy)
    dropped = planner.plan_drops()
    planner.plan_trims(dropped)
    maps = planner.plan_names(dropped)
    planner.plan_indexes(maps)
    planner.plan_moves(dropped)
    return Plan(folder=diagnosis.folder, steps=tuple(planner.steps), unplanned=tuple(planner.unplanned))


class _Planner:
    """Collects steps; each method plans one kind of action."""

    def __init__(self, diagnosis: Diagnosis, policy: Policy) -> None:
        self.folder = diagnosis.folder
        self.findings = tuple(finding for finding in diagnosis.findings if policy.wants(finding.code))
        self.unsafe = {finding.path for finding in diagnosis.findings if isinstance(finding, UnsafePickle)}
        self.incomplete = _incomplete_families(diagnosis)
        self.policy = policy
        self.components = {component.path: component for component in self.folder.components}
        self.steps: list[Step] = []
        self.unplanned: list[Unplanned] = []

    def plan_drops(self) -> frozenset[PurePosixPath]:
        dropped: set[PurePosixPath] = set()
        for finding in self.findings:
            if isinstance(finding, DoubledModel) and finding.path in self.unsafe:
                self._stay(finding.code, finding.path, "a file with an unsafe pickle is never edited")
            elif isinstance(finding, DoubledModel) and not finding.sampled:
                self._drop(finding.path, finding.original, finding.code, Safety.SAFE)
                dropped.add(finding.path)
        for role in sorted(self.policy.drops, key=lambda role: role.value):
            families = self.folder.entries(role)
            if not families and role in self.policy.keep:
                self._stay("identical-states", PurePosixPath(role.value), "the folder has no such entries")
            for entries in families:
                for finding in self._surplus(role, entries, dropped):
                    self._drop(finding.path, finding.original, finding.code, Safety.LOSSY)
                    dropped.add(finding.path)
        return frozenset(dropped)

    def _surplus(
        self, role: Role, entries: tuple[Component, ...], dropped: set[PurePosixPath]
    ) -> list[IdenticalModels | IdenticalStates]:
        """Return which equal entries go so that as many as the user said remain."""
        paths = {entry.path for entry in entries}
        copies: list[IdenticalModels | IdenticalStates] = [
            finding
            for finding in self.findings
            if isinstance(finding, IdenticalModels | IdenticalStates)
            and finding.path in paths - self.unsafe
            and not finding.sampled
        ]
        left = len(paths - dropped)
        want = self.policy.keep.get(role)
        if want is None:
            return copies  # --allow: every proven copy
        surplus = left - want
        code = "identical-models" if role is Role.MODEL else "identical-states"
        if surplus <= 0:
            if surplus < 0:
                self._stay(code, entries[0].path, f"{want} {role.value} asked for, the folder has {left}")
            return []
        if surplus > len(copies):
            reason = f"{want} {role.value} asked for, {left} are here and {left - len(copies)} of them differ"
            self._stay(code, entries[-1].path, reason)
            return []
        if surplus < len(copies) and len({finding.original for finding in copies}) > 1:
            reason = (
                f"{len(copies)} copies of different entries, {surplus} would have to go: which is not clear"
            )
            self._stay(code, entries[-1].path, reason)
            return []
        return copies[len(copies) - surplus :]

    def plan_trims(self, dropped: frozenset[PurePosixPath]) -> None:
        if "trailing-bytes" not in self.policy.allow:
            return
        for finding in self.findings:
            if isinstance(finding, TrailingBytes) and finding.path not in dropped:
                action = Trim(path=finding.path, size=finding.end, extra=finding.extra)
                self._add(action, (finding.code,), Safety.LOSSY, (finding.path,))

    def plan_names(self, dropped: frozenset[PurePosixPath]) -> Mapping[ScopeKey, KeyMap]:
        """Plan the renames and return the maps of those that will happen."""
        key_maps = self._key_maps()
        formatless = {
            finding.path
            for finding in self.findings
            if isinstance(finding, NoFormatMetadata) and "no-format-metadata" in self.policy.allow
        }
        happening: dict[ScopeKey, KeyMap] = {}
        for component in self.folder.components:
            if component.path in dropped:
                continue
            own = {key: value for key, value in key_maps.items() if key[0] == component.path}
            if (own or component.path in formatless) and self._rewrite(
                component, own, component.path in formatless
            ):
                happening.update(own)
        return happening

    def _key_maps(self) -> dict[ScopeKey, KeyMap]:
        chain_of = chains(self.folder)
        result: dict[ScopeKey, KeyMap] = {}
        nested = {
            (finding.path, finding.scope): finding
            for finding in self.findings
            if isinstance(finding, NestedPrefix)
        }
        keys = self.policy.keys
        strip_single = "wrapper-prefix" in self.policy.allow and self.policy.wants("wrapper-prefix")
        for component in self.folder.components:
            for scope in component.scopes:
                key = scope_key(component, scope)
                chain = chain_of[key]
                is_state_dict = scope.kind == "state dict"
                finding = nested.get((component.path, str(scope)))
                if is_state_dict and (keys is not Keys.AUTO or strip_single):
                    # Private wrappers go first: what they hid may be a wrapper that every name carries.
                    joint = map(without_private_wrappers, self._joint_names(component, scope))
                    insert = DDP_CHAIN if keys is Keys.DDP else ()
                    key_map = KeyMap(remove=common_wrappers(joint), insert=insert, inner=True)
                elif chain and (keys is not Keys.AUTO or strip_single):
                    key_map = KeyMap(remove=chain, insert=DDP_CHAIN if keys is Keys.DDP else ())
                elif finding is not None:
                    key_map = KeyMap(remove=chain, insert=finding.target)
                else:
                    continue
                if any(key_map(fqn) != fqn for fqn in scope.names):
                    result[key] = key_map
        return result

    def _rewrite(self, component: Component, key_maps: Mapping[ScopeKey, KeyMap], add_format: bool) -> bool:
        code = self._code_of(component, key_maps)
        changes: list[tuple[str, str]] = []
        for scope in component.scopes:
            key_map = key_maps.get(scope_key(component, scope))
            if key_map is None:
                continue
            if objection := _objection(self._joint_names(component, scope), key_map):
                self._stay(code, component.path, objection)
                return False
            changes += [(fqn, key_map(fqn)) for fqn in scope.names if key_map(fqn) != fqn]
        if not changes and not add_format:
            return False
        if changes and component.path in self.unsafe:
            self._stay(code, component.path, "a file with an unsafe pickle is never edited")
            return False
        if changes and _family(component) in self.incomplete:
            self._stay(
                code, component.path, "a shard is missing or unreadable, its names could tell otherwise"
            )
            return False
        is_safetensors = isinstance(component.content, SafetensorsFile)
        action = RewriteNames(
            path=component.path,
            maps={(path, kind): key_map for (_, path, kind), key_map in key_maps.items()},
            add_format=is_safetensors,  # free where the header is rewritten anyway
            renames=len(changes),
            example=changes[0] if changes else None,
        )
        asked = self.policy.keys is not Keys.AUTO or code in self.policy.allow or add_format
        self._add(action, (code,), Safety.LOSSY if asked else Safety.SAFE, (component.path,))
        return True

    def _joint_names(self, component: Component, scope: NameScope) -> tuple[str, ...]:
        """Return the names that must stay distinct: of all shards of a model together, else of the scope alone."""
        family = _family(component)
        if family is None:
            return scope.names
        return tuple(
            fqn
            for other in self.folder.components
            if _family(other) == family
            for place in other.scopes
            if (place.path, place.kind) == (scope.path, scope.kind)
            for fqn in place.names
        )

    def _code_of(self, component: Component, key_maps: Mapping[ScopeKey, KeyMap]) -> str:
        if not key_maps:
            return NoFormatMetadata.code
        kinds = {type(finding) for finding in self.findings if finding.path == component.path}
        return NestedPrefix.code if NestedPrefix in kinds else WrapperPrefix.code

    def plan_indexes(self, maps: Mapping[ScopeKey, KeyMap]) -> None:
        broken = {finding.path: finding for finding in self.findings if isinstance(finding, IndexMismatch)}
        for index_path, shards in shard_groups(self.folder).items():
            finding = broken.get(index_path)
            if finding is not None and not finding.is_fixable:
                self._stay(finding.code, index_path, finding.advice)
            renamed = [key_map for key, key_map in maps.items() if key[0] in {shard.path for shard in shards}]
            follows = renamed and index_path in self.components
            if not follows and (finding is None or not finding.is_fixable):
                continue
            rename = renamed[0] if renamed else KeyMap(remove=())
            total = sum(end - begin for shard in shards for begin, end in _ranges(shard))
            action = WriteIndex(
                path=index_path,
                weight_map={rename(fqn): name for fqn, name in weight_map(shards).items()},
                total_size=total,
                exists=index_path in self.components,
            )
            code = finding.code if finding is not None else NestedPrefix.code
            asked = self.policy.keys is not Keys.AUTO
            reads = tuple(path for path in (index_path, *(shard.path for shard in shards)))
            self._add(action, (code,), Safety.LOSSY if asked else Safety.SAFE, reads)

    def plan_moves(self, dropped: frozenset[PurePosixPath]) -> None:
        close_gaps = "entry-gap" in self.policy.allow and self.policy.wants("entry-gap")
        gaps = {finding.path for finding in self.findings if isinstance(finding, EntryGap)}
        for role in GAPLESS_ROLES + tuple(self.policy.drops - set(GAPLESS_ROLES)):
            for entries in self.folder.entries(role):
                has_gap = close_gaps and any(entry.path in gaps for entry in entries)
                if not has_gap and not any(entry.path in dropped for entry in entries):
                    continue
                positions = renumbered(entries, dropped)
                for number, entry in enumerate(entry for entry in entries if entry.path in positions):
                    position = number if has_gap else positions[entry.path]
                    if position != entry.name.index:
                        target = PurePosixPath(str(entry.name.at(position)))
                        code = "entry-gap" if has_gap else "shifted-entries"
                        safety = Safety.LOSSY if has_gap else Safety.SAFE
                        self._add(Renumber(source=entry.path, target=target), (code,), safety, (entry.path,))

    def _drop(self, path: PurePosixPath, kept: PurePosixPath, code: str, safety: Safety) -> None:
        action = DropEntry(path=path, kept=kept, size=self.components[path].size)
        self._add(action, (code,), safety, (path, kept))

    def _add(
        self, action: StepAction, fixes: tuple[str, ...], safety: Safety, paths: tuple[PurePosixPath, ...]
    ) -> None:
        before: dict[PurePosixPath, Fingerprint] = {
            path: self.components[path].fingerprint for path in paths if path in self.components
        }
        self.steps.append(Step(action=action, fixes=fixes, safety=safety, before=before))

    def _stay(self, code: str, path: PurePosixPath, reason: str) -> None:
        self.unplanned.append(Unplanned(code=code, path=path, reason=reason))


def _objection(names: tuple[str, ...], key_map: KeyMap) -> str | None:
    """Return why these names cannot be mapped, or None when they can."""
    for first, second, new in collisions(names, key_map):
        return f"{first!r} and {second!r} would both become {new!r}"
    renamed = [key_map(fqn) for fqn in names]
    if METADATA_KEY in renamed:
        return f"a name would become {METADATA_KEY!r}"
    if key_map.inner and common_wrappers(renamed) != key_map.insert:
        return "without its inner wrappers every name would begin with a wrapper again: what is real is not clear"
    return None


def _incomplete_families(diagnosis: Diagnosis) -> set[tuple[str, str]]:
    """Return the sharded models of which a shard is missing or unreadable."""
    lost = {finding.path for finding in diagnosis.findings if isinstance(finding, MissingShard)}
    incomplete = {
        _family(component)
        for component in diagnosis.folder.components
        if component.problem is not None and component.name.shard is not None
    }
    for component in diagnosis.folder.components:
        if component.name.shard is not None and any(
            str(path).startswith(component.name.stem + "-") and path.suffix == component.path.suffix
            for path in lost
        ):
            incomplete.add(_family(component))
    return {family for family in incomplete if family is not None}


def _family(component: Component) -> tuple[str, str] | None:
    return (component.name.stem, component.name.suffix) if component.name.shard is not None else None


def _ranges(component: Component) -> list[tuple[int, int]]:
    return [tensor.data_offsets for tensor in component.tensors if tensor.data_offsets is not None]


__all__ = ["Finding", "Plan", "make_plan"]

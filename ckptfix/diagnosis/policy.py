"""Policy of a repair: the options that the user chose."""

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct, field

from ckptfix.checkpoint.filenames import NUMBERED
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Action
from ckptfix.errors import UsageError


class Keys(Enum):
    """Choice of keys.

    AUTO: collapse nested wrappers only. BARE: strip all wrappers. DDP: leave exactly one
    ``module.``.
    """

    AUTO = "auto"
    BARE = "bare"
    DDP = "ddp"


KEEPABLE = {role.value: role for role in NUMBERED}
"""Role names that ``--keep ROLE=N`` accepts."""


class Policy(Struct, frozen=True, kw_only=True):
    """Options that turn a diagnosis into a plan.

    ``keep``: the number of entries of a role in the script. ``only``: codes to repair, empty for
    all. ``allow``: the named codes among those that are repaired only on request. ``atomic``: write
    new files, never patch one in place. ``adapter``: of the adapters in one file, the name of the
    one that it is for. ``families``: of a model that is stored twice, the file or the index to
    keep.
    """

    keep: Mapping[Role, int] = field(default_factory=dict)
    keys: Keys = Keys.AUTO
    only: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    atomic: bool = False
    adapter: str = ""
    families: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.only or self.allow:
            self._check_codes()
        for role, count in self.keep.items():
            if count < 1:
                raise UsageError(f"--keep {role.value}={count}: expected at least 1")

    def _check_codes(self) -> None:
        from ckptfix.diagnosis.findings.catalogue import CODES

        for code in self.only | self.allow:
            if code not in CODES:
                raise UsageError(
                    f"no finding has the code {code!r}; choose from {', '.join(CODES)}"
                )
        for code in self.allow:
            if CODES[code].action is Action.TELL:
                raise UsageError(f"{code} is only reported, never repaired: {CODES[code].meaning}")

    def wants(self, code: str) -> bool:
        """Return whether findings of this code may be repaired."""
        return not self.only or code in self.only

    @property
    def drops(self) -> frozenset[Role]:
        """Roles whose equal entries are dropped, so that their equality must be proven byte for
        byte.
        """
        roles = set(self.keep)
        if "identical-models" in self.allow:
            roles.add(Role.MODEL)
        if "identical-states" in self.allow:
            roles |= set(KEEPABLE.values()) - {Role.MODEL}
        return frozenset(roles)

"""What a load insists on: for every part of a checkpoint whether it is required, and whether its code may run."""

from dataclasses import dataclass, fields
from enum import Enum


class Part(Enum):
    """A part of a checkpoint. The value is the name of its field in ``LoadPolicy``, and the word used in reports."""

    MODELS = "models"
    OPTIMIZERS = "optimizers"
    SCHEDULERS = "schedulers"
    DATALOADERS = "dataloaders"
    SCALER = "scaler"
    RNG = "rng"
    STEP = "step"
    CUSTOM = "custom"


class Need(Enum):
    """REQUIRE: missing or wrong, nothing is loaded at all. WARN: then it is left as it was, with one UserWarning.

    IGNORE: its files are not read and its objects are left as they are.
    """

    REQUIRE = "require"
    WARN = "warn"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """How strict a load is, part by part; strings such as ``"warn"`` are taken as well.

    The defaults require what stock ``load_state`` fails without. ``trust``: a pickle that holds globals outside the
    allow-list is unpickled in full, which can run any code in it; said aloud by a UserWarning. Raises ValueError for a
    word that is no ``Need``.
    """

    models: Need = Need.REQUIRE
    optimizers: Need = Need.REQUIRE
    schedulers: Need = Need.REQUIRE
    dataloaders: Need = Need.WARN
    scaler: Need = Need.REQUIRE
    rng: Need = Need.WARN
    step: Need = Need.WARN
    custom: Need = Need.REQUIRE
    trust: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "trust":
                object.__setattr__(self, field.name, Need(getattr(self, field.name)))

    def need(self, part: Part) -> Need:
        """Return how much a part is needed."""
        value = getattr(self, part.value)
        assert isinstance(value, Need)
        return value

"""What a script uses of accelerate and torch, as values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of a script. ``order``: to tell which of two comes first. ``where``: in words. ``text``: the line."""

    order: tuple[int, int]
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A call of ``prepare``: on which name, and the names of models and optimizers among what it is given."""

    place: Place
    accelerator: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTwice:
    """A model that is given to ``prepare`` again: the name in the second call, and both calls."""

    name: str
    first: Place
    second: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedEarly:
    """A model that is wrapped in DDP or DataParallel, and then given to ``prepare``."""

    name: str
    wrapped: Place
    prepared: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What a script uses, each with its places.

    ``taken``: names taken from accelerate. ``made_early`` and ``touched_early``: accelerators and devices at module
    level. ``launches``: ``notebook_launcher`` with more than one process. ``backwards``: ``loss.backward()``.
    ``deepspeed``: that it is used, ``plugin_choices``: ``select_deepspeed_plugin``. ``device_maps`` and ``skip_keys``:
    calls with that argument. ``trusting_loads``: ``torch.load(weights_only=False)``. ``builds``: what needs a compiler.
    ``options``: the script's own, without dashes, with underscores; None when it reads its command line in a way that
    is not followed. ``twice`` and ``wrapped``: models that are prepared again, or wrapped before. ``is_guarded``: its
    Accelerator is the one of ckptfix.
    """

    taken: tuple[tuple[str, Place], ...] = ()
    accelerators: tuple[Place, ...] = ()
    made_early: tuple[Place, ...] = ()
    touched_early: tuple[Place, ...] = ()
    launches: tuple[Place, ...] = ()
    backwards: tuple[Place, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    deepspeed: tuple[Place, ...] = ()
    plugin_choices: tuple[Place, ...] = ()
    device_maps: tuple[Place, ...] = ()
    skip_keys: tuple[Place, ...] = ()
    trusting_loads: tuple[Place, ...] = ()
    builds: tuple[Place, ...] = ()
    options: frozenset[str] | None = frozenset()
    twice: tuple[PreparedTwice, ...] = ()
    wrapped: tuple[WrappedEarly, ...] = ()
    is_guarded: bool = False

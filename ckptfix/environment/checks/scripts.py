"""Problems of a training script, and of the command that starts it. Their text is read, nothing is
executed.

An option before the script's name belongs to the launcher, one after it to the script.
"""

import difflib
import shlex
from collections import defaultdict
from collections.abc import Iterator

from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.launch import Launch, Option
from ckptfix.environment.facts.script_uses import Prepared, SourceLine, Uses
from ckptfix.storage.paths import shell_path


@topic(
    "prepared-twice",
    "the script passes a model to `prepare()` twice: with several processes, `save_state` writes "
    "it twice",
    WARNING,
    NOTE,
)
def prepared_twice(facts: Facts) -> Iterator[Said]:
    """The damage that ``ckptfix repair`` mends, before it is done. ckptfix's own Accelerator does
    not do it.
    """
    uses = _uses(facts)
    if not uses.twice:
        return
    names = ", ".join(dict.fromkeys(one.name for one in uses.twice))
    guard = "ckptfix's Accelerator returns the model from the first call"
    yield say(
        f"the script passes {names} to prepare() twice: "
        + (guard if facts.is_guarded else "with several processes, save_state saves duplicates"),
        severity=NOTE if facts.is_guarded else WARNING,
        evidence=_shown(
            [place for one in uses.twice for place in dict.fromkeys((one.first, one.second))]
        ),
        fix=(
            "call prepare() once per model and keep what it returns; or start the script with: "
            "ckptfix run SCRIPT"
        ),
    )


@topic(
    "wrapped-before-prepare",
    "a model is wrapped in DDP or DataParallel before `prepare()`, which wraps it again: keys "
    "get a `module.` prefix",
    WARNING,
)
def wrapped_early(facts: Facts) -> Iterator[Said]:
    """``prepare`` does not look whether a model is wrapped already."""
    found = _uses(facts).wrapped
    if found:
        names = ", ".join(dict.fromkeys(one.name for one in found))
        yield say(
            f"prepare() wraps {names} a second time: save_state writes keys that begin with "
            "'module.', and other scripts cannot load them",
            evidence=_shown([place for one in found for place in (one.wrapped, one.prepared)]),
            fix="pass the bare model to prepare(), which wraps it in DDP itself",
        )


@topic(
    "script-not-python",
    "this version of Python cannot parse the script or a notebook cell",
    ERROR,
)
def not_python(facts: Facts) -> Iterator[Said]:
    """Python would end with it before the first line runs."""
    if facts.script is not None and facts.script.problem:
        path = shell_path(facts.script.path)
        # py_compile takes the JSON of a notebook for Python, and finds no fault in it.
        is_notebook = facts.script.path.endswith(".ipynb")
        yield say(
            f"{facts.script.path} cannot be read as Python: {facts.script.problem}",
            evidence=(facts.script.problem,),
            fix=(
                f"open {path} in Jupyter and correct it"
                if is_notebook
                else f"python -m py_compile {path}"
            ),
        )


@topic(
    "unknown-accelerate-name",
    "the script imports a name that accelerate does not have (`PartialSate`): ImportError",
    ERROR,
)
def unknown_name(facts: Facts) -> Iterator[Said]:
    """Compared with the names of the installed accelerate."""
    source = facts.software.accelerate
    places: dict[str, list[SourceLine]] = defaultdict(list)
    for name, place in _uses(facts).taken:
        if (missing := source.missing(name)) and place not in places[missing]:
            places[missing].append(place)
    for name, where in places.items():
        parent, _, last = name.rpartition(".")
        near = difflib.get_close_matches(last, sorted(source.known_beside(name)), n=1, cutoff=0.7)
        instead = f"; did you mean {near[0]}?" if near else ""
        owner = f"accelerate.{parent}" if parent else "accelerate"
        yield say(
            f"{owner} has no {last}{instead}",
            evidence=_shown(where),
            fix=(
                f"use {near[0]}"
                if near
                else f"look for its new location: python -c 'import {owner}; help({owner})'"
            ),
        )


@topic(
    "accelerator-before-notebook-launcher",
    "an Accelerator is created at module level before `notebook_launcher`: ValueError",
    ERROR,
)
def made_early(facts: Facts) -> Iterator[Said]:
    """``notebook_launcher`` refuses when an Accelerator's state is there already
    (``accelerate/launchers.py``).
    """
    early = _before_launch(facts, _uses(facts).made_early)
    if early:
        yield say(
            "an Accelerator is created before notebook_launcher starts its processes: ValueError",
            evidence=_shown(early),
            fix="create the Accelerator inside the launched function, then restart the notebook",
        )


@topic(
    "device-before-notebook-launcher",
    "a device is used at module level before `notebook_launcher`: processes cannot be forked "
    "afterwards",
    WARNING,
)
def touched_early(facts: Facts) -> Iterator[Said]:
    """A process that has used CUDA cannot be forked and use it again."""
    early = _before_launch(facts, _uses(facts).touched_early)
    if early:
        yield say(
            "a device is used before notebook_launcher forks, which then fails with: Cannot "
            "re-initialize CUDA in forked subprocess",
            evidence=_shown(early),
            fix="move that code into the launched function, then restart the notebook",
        )


@topic(
    "plain-backward",
    "the script calls `loss.backward()` instead of `accelerator.backward(loss)`: gradients are "
    "neither scaled nor divided",
    WARNING,
)
def plain_backward(facts: Facts) -> Iterator[Said]:
    """Yield advice for scripts that make an Accelerator."""
    uses = _uses(facts)
    if uses.accelerators and uses.backwards:
        yield say(
            "loss.backward() instead of accelerator.backward(loss): gradients are too large with "
            "accumulation, and updates vanish with fp16; no error is raised",
            evidence=_shown(uses.backwards),
            fix="call accelerator.backward(loss), unless the loss belongs to a model not passed to "
            "prepare(); at run time, ckptfix run SCRIPT warns about it",
        )


@topic(
    "deepspeed-several-models",
    "the script prepares several models or optimizers with one Accelerator under DeepSpeed, which "
    "accepts one of each",
    WARNING,
)
def deepspeed_models(facts: Facts) -> Iterator[Said]:
    """``Accelerator.prepare`` raises AssertionError for two models in one call; of optimizers it
    keeps the last.

    Of models in several calls ``accelerator.backward`` uses the first one only. That is meant where
    the script chooses a plugin for each (``select_deepspeed_plugin``).
    """
    uses, reasons = _uses(facts), _deepspeed(facts)
    if not reasons:
        return
    calls: list[tuple[Prepared, ...]] = [(call,) for call in uses.prepared]
    if not uses.plugin_choices:
        names = dict.fromkeys(call.accelerator for call in uses.prepared)
        calls = [
            tuple(call for call in uses.prepared if call.accelerator == name) for name in names
        ]
    for same in calls:
        models = dict.fromkeys(name for call in same for name in call.models)
        optimizers = dict.fromkeys(name for call in same for name in call.optimizers)
        several = [", ".join(names) for names in (models, optimizers) if len(names) > 1]
        if several:
            yield say(
                f"{same[0].accelerator}.prepare() receives {' and '.join(several)} under "
                "DeepSpeed, which accepts one model and one optimizer per Accelerator",
                evidence=(*_shown([call.place for call in same]), *reasons),
                fix=(
                    "use one Accelerator with its own DeepSpeedPlugin per model (accelerate's "
                    "guide: Using multiple models with DeepSpeed)"
                ),
            )


@topic(
    "device-map-in-training",
    "a model is loaded with `device_map` and prepared for training: ValueError with several "
    "processes",
    WARNING,
)
def map_in_training(facts: Facts) -> Iterator[Said]:
    """``Accelerator.prepare`` raises ValueError on such a model in any distributed mode."""
    uses = _uses(facts)
    if uses.device_maps and uses.prepared:
        yield say(
            "a model is loaded with device_map, and models are prepared for training: ValueError "
            "with several processes",
            evidence=_shown([*uses.device_maps, *(call.place for call in uses.prepared)]),
            fix=(
                "load it without device_map, or start one process: accelerate launch "
                "--num_processes 1 SCRIPT"
            ),
        )


def _uses(facts: Facts) -> Uses:
    return facts.script.uses if facts.script is not None else Uses()


def _before_launch(facts: Facts, places: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """Return the places that come before the last launch, and that launch; () when none does."""
    last = max(_uses(facts).launches, key=lambda place: place.order, default=None)
    if last is None:
        return ()
    before = tuple(place for place in places if place.order < last.order)
    return (*before, last) if before else ()


def _deepspeed(facts: Facts) -> tuple[str, ...]:
    """Return the reasons to believe that DeepSpeed is on, () without one."""
    reasons = [str(place) for place in _uses(facts).deepspeed]
    if facts.config.exists and facts.config.distributed_type == "DEEPSPEED":
        reasons.append(f"{facts.config.path}: distributed_type: DEEPSPEED")
    if facts.launch is not None and facts.launch.given("use_deepspeed") is not None:
        reasons.append("accelerate launch --use_deepspeed")
    if facts.variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true", "yes"):
        reasons.append("ACCELERATE_USE_DEEPSPEED is set")
    return tuple(reasons)


def _shown(places: "list[SourceLine] | tuple[SourceLine, ...]") -> tuple[str, ...]:
    return tuple(str(place) for place in places)


@topic(
    "flags-before-script",
    "options before the script's name go to `accelerate launch`, which uses or rejects them",
    ERROR,
    WARNING,
    NOTE,
)
def before(facts: Facts) -> Iterator[Said]:
    """``accelerate launch`` ends with "unrecognized arguments", or takes what the script has,
    too.
    """
    launch, own = facts.launch, _own_options(facts)
    if launch is not None and launch.unknown:
        names = ", ".join(option.text for option in launch.unknown)
        yield say(
            f"accelerate launch rejects options that it does not have: {names}",
            evidence=(" ".join(launch.words),),
            fix=f"put the script's options after its name: {_reordered(launch, launch.unknown)}",
        )
    if not own:
        return
    if launch is not None:
        taken = tuple(option for option in launch.before if option.name in own)
        if taken:
            names = ", ".join(option.text for option in taken)
            yield say(
                "options before the script's name go to accelerate launch, not to the script: "
                f"{names}",
                severity=WARNING,
                evidence=(" ".join(launch.words), f"the script also defines {names}"),
                fix=f"if meant for the script: {_reordered(launch, taken)}",
            )
        return
    shared = sorted(own & facts.software.accelerate.options.keys())
    if shared:
        names = ", ".join(f"--{name}" for name in shared)
        yield say(
            f"the script and accelerate launch both define {names}: options before the script's "
            "name go to accelerate launch",
            severity=NOTE,
            evidence=(f"{facts.script.path if facts.script else ''} defines {names}",),
            fix="accelerate launch [its options] SCRIPT [the script's options]",
        )


@topic(
    "launch-flags-behind-script",
    "`accelerate launch` options after the script's name go to the script and have no effect",
    WARNING,
)
def behind(facts: Facts) -> Iterator[Said]:
    """Unless the script has the option, too."""
    launch, own = facts.launch, _own_options(facts)
    if launch is None or own is None:
        return
    lost = tuple(
        option
        for option in launch.after
        if len(option.name) > 1
        and option.name in facts.software.accelerate.options
        and option.name not in own
    )
    if lost:
        names = ", ".join(option.text for option in lost)
        yield say(
            f"options after the script's name go to the script, not to accelerate launch: {names}",
            evidence=(" ".join(launch.words), "the script defines no such option"),
            fix=f"write: accelerate launch {names} ... {launch.script}",
        )


@topic(
    "scheduler-not-prepared",
    "a scheduler is never passed to `prepare()`: checkpoints do not contain it, and a resumed run "
    "restarts it",
    WARNING,
)
def scheduler_not_prepared(facts: Facts) -> Iterator[Said]:
    """``save_state`` writes the schedulers that were prepared or registered, and no other."""
    uses = _uses(facts)
    if uses.saves and uses.schedulers:
        yield say(
            "a scheduler is stepped but never prepared: save_state does not save it, so a resume "
            "restarts the learning rate schedule",
            evidence=_shown((*uses.schedulers, *uses.saves)),
            fix=(
                "call scheduler = accelerator.prepare(scheduler), or "
                "accelerator.register_for_checkpointing(scheduler)"
            ),
        )


@topic(
    "resume-never-loads",
    "the script has an option to resume and calls `save_state`, but never `load_state`: a resumed "
    "run starts from scratch",
    WARNING,
)
def resume_never_loads(facts: Facts) -> Iterator[Said]:
    """A script that loads in any other way is not judged."""
    uses = _uses(facts)
    if uses.resume_options and uses.saves and not (uses.loads or uses.loads_otherwise):
        yield say(
            "the script has an option to resume, but no line loads a state: a resumed run starts "
            "from scratch",
            evidence=_shown((*uses.resume_options, *uses.saves)),
            fix="call accelerator.load_state(folder) after prepare()",
        )


def _own_options(facts: Facts) -> frozenset[str] | None:
    """Return the script's own options, None when they are not known."""
    return (
        facts.script.uses.options if facts.script is not None and not facts.script.problem else None
    )


def _reordered(launch: Launch, moved: tuple[Option, ...]) -> str:
    """Return the command with these options, and the value behind each, moved behind the script's
    name.
    """
    words = list(launch.words)
    at = words.index(launch.script) if launch.script in words else len(words)
    front, back = words[:at], words[at:]
    texts = {option.text for option in moved}
    stays: list[str] = []
    goes: list[str] = []
    following = stays
    for word in front:
        if word.startswith("-"):
            following = goes if word.partition("=")[0] in texts else stays
        following.append(word)
    return " ".join(map(_quoted, [*launch.prefix, *stays, *back[:1], *goes, *back[1:]]))


def _quoted(word: str) -> str:
    """Quote a word for the shell; of a variable that is set, quote the value alone: a quoted name
    sets nothing.
    """
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and name.isidentifier() else shlex.quote(word)

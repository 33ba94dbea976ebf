"""Verdicts on loads of a folder, from configs and headers: each rule is a function of a ``Load``
alone.

Only what a config or the keys record is judged. Everything else is listed as not checked.
"""

from collections.abc import Iterable, Iterator, Sequence

from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.load_inputs import Load
from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.diagnosis.findings.base import Compared, Told

JUDGED = ("peft", "transformers", "diffusers")
"""Libraries with rules about their loads. Of diffusers there are rules about LoRA alone: of its models, what is not
checked is listed.
"""


def diagnose_loads(
    loads: Iterable[Load], trained: int = 0, files: Sequence[Component] = ()
) -> Iterator[Told]:
    """Yield the verdict on every load of a judged library. Its rules are imported where a folder has
    such a load.

    ``trained``: the number of parameters in the optimizer of the Trainer next to them. ``files``:
    those of the folder, with and without a config.
    """
    loads = tuple(loads)
    of_models = [load for load in loads if load.library == "transformers"]
    for load in loads:
        if load.library == "transformers":
            continue
        if load.is_lora:
            from ckptfix.diagnosis.loads.lora_of_pipelines import judge_lora

            yield from judge_lora(load)
        elif load.library == "diffusers":
            yield f"{load.path} against {CONFIG}; ckptfix check --load asks diffusers"
            yield Compared(CONFIG)
        else:
            from ckptfix.diagnosis.loads.adapters import judge_adapter, judge_halves, passed_over

            yield from judge_adapter(load) if load.config else judge_halves(load)
            yield from passed_over(load, files, trained)
    if of_models:
        from ckptfix.diagnosis.loads.pretrained_models import judge_pretrained
        from ckptfix.diagnosis.loads.quantized_models import judge_quantized
        from ckptfix.diagnosis.loads.ties import judge_ties

        # Of two families transformers takes one.
        load = min(of_models, key=lambda load: load.turn)
        yield from judge_pretrained(load)
        yield from judge_ties(load)
        yield from judge_quantized(load)

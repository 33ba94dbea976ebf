"""Options before and behind the script's name."""

from ckptfix.environment.facts.script import Script
from ckptfix.environment.facts.script_uses import Uses
from tests.environment.building import facts, launch, script
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

PARSER = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision")
    parser.add_argument("--lr")
    """

LAUNCHING = (
    Case(
        "flags-before-script",
        "refused",
        facts(launch=launch("accelerate launch --lr 1e-3 train.py")),
        ERROR,
    ),
    Case(
        "flags-before-script",
        "taken",
        facts(
            launch=launch("accelerate launch --mixed_precision bf16 train.py"),
            script=script(PARSER),
        ),
        WARNING,
    ),
    Case("flags-before-script", "shared", facts(script=script(PARSER)), NOTE),
    Case(
        "flags-before-script",
        "in order",
        facts(
            launch=launch("accelerate launch --num_processes 2 train.py --lr 1e-3"),
            script=script(PARSER),
        ),
        None,
    ),
    Case("flags-before-script", "torchrun", facts(launch=launch("torchrun --lr 1 train.py")), None),
    Case(
        "launch-flags-behind-script",
        "behind",
        facts(launch=launch("accelerate launch train.py --num-processes 2"), script=script(PARSER)),
        WARNING,
    ),
    Case(
        "launch-flags-behind-script",
        "the script's own",
        facts(
            launch=launch("accelerate launch train.py --mixed_precision bf16"),
            script=script(PARSER),
        ),
        None,
    ),
    Case(
        "launch-flags-behind-script",
        "one letter",
        facts(launch=launch("accelerate launch train.py -m"), script=script(PARSER)),
        None,
    ),
    Case(
        "launch-flags-behind-script",
        "a script that cannot be read",
        facts(
            launch=launch("accelerate launch train.py --num_processes 2"),
            script=Script(path="train.py", uses=Uses(), problem="line 1: invalid syntax"),
        ),
        None,
    ),
    Case(
        "launch-flags-behind-script",
        "options not known",
        facts(
            launch=launch("accelerate launch train.py --num_processes 2"),
            script=script("from transformers import HfArgumentParser"),
        ),
        None,
    ),
)

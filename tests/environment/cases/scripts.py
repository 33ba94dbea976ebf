"""What a script's text shows."""

from msgspec.structs import replace

from ckptfix.environment.facts.script import Script
from ckptfix.environment.facts.script_uses import Uses
from tests.environment.building import config, facts, launch, script, with_software
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

NOTEBOOK = """
    from accelerate import Accelerator, notebook_launcher
    {}
    def train():
        accelerator = Accelerator()
        model.to("cuda:0")
    notebook_launcher(train, num_processes={})
    """

TRAIN = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained("gpt2"{})
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model().loss)
    """

TWO_MODELS = """
    from accelerate import Accelerator
    {}
    accelerator = Accelerator()
    student, teacher = accelerator.prepare(student, teacher)
    """

TWO_CALLS = """
    import deepspeed
    student = accelerator.prepare(student)
    {}
    teacher = accelerator.prepare(teacher)
    """

TWICE = """
    from {} import Accelerator
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    """

WRAPPED = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = {}
    model = accelerator.prepare(model)
    """

SCRIPTS = (
    Case("prepared-twice", "twice", facts(script=script(TWICE.format("accelerate"))), WARNING),
    Case(
        "prepared-twice", "guarded by ckptfix", facts(script=script(TWICE.format("ckptfix"))), NOTE
    ),
    Case(
        "prepared-twice",
        "guarded by ckptfix run",
        facts(
            script=script(TWICE.format("accelerate")),
            launch=launch("accelerate launch -m ckptfix run train.py"),
        ),
        NOTE,
    ),
    Case("prepared-twice", "once", facts(script=script(TRAIN.format(""))), None),
    Case(
        "wrapped-before-prepare",
        "DDP",
        facts(script=script(WRAPPED.format("DDP(model)"))),
        WARNING,
    ),
    Case("wrapped-before-prepare", "bare", facts(script=script(WRAPPED.format("Net()"))), None),
    Case(
        "script-not-python",
        "syntax error",
        facts(script=Script(path="train.py", uses=Uses(), problem="line 3: invalid syntax")),
        ERROR,
    ),
    Case("script-not-python", "good", facts(script=script(TRAIN.format(""))), None),
    Case(
        "unknown-accelerate-name",
        "misspelt",
        facts(script=script("from accelerate import PartialSate")),
        ERROR,
    ),
    Case(
        "unknown-accelerate-name",
        "attribute",
        facts(script=script("import accelerate\naccelerate.PartialStates()")),
        ERROR,
    ),
    *(
        Case("unknown-accelerate-name", text, facts(script=script(text)), ERROR)
        for text in (
            "from accelerate.state import PartialSate",
            "from accelerate.utils import DeepSpeedPlugn",
            "import accelerate.utils.nothing",
            "import accelerate.nothing",
            "from accelerate.nothing import at_all",
            "import accelerate\naccelerate.utils.DeepSpeedPlugn()",
        )
    ),
    *(
        Case("unknown-accelerate-name", text, facts(script=script(text)), None)
        for text in (
            "from accelerate.state import PartialState, __doc__",
            "from accelerate.utils import DeepSpeedPlugin, set_seed",
            "import accelerate.utils.modeling",
            "from accelerate.utils.modeling import of_which_not_all_is_known",
            "from accelerate.Accelerator import inside_of_a_class",
            "try:\n    from accelerate import Anything\nexcept ImportError:\n    Anything = None",
        )
    ),
    Case(
        "unknown-accelerate-name",
        "right",
        facts(script=script("from accelerate import PartialState")),
        None,
    ),
    Case(
        "unknown-accelerate-name",
        "every module has a version",
        facts(script=script("import accelerate\naccelerate.__version__")),
        None,
    ),
    Case(
        "unknown-accelerate-name",
        "accelerate's source is not there",
        with_software(
            facts(script=script("from accelerate import Anything")),
            accelerate=replace(facts().software.accelerate, names=frozenset()),
        ),
        None,
    ),
    Case(
        "accelerator-before-notebook-launcher",
        "before",
        facts(script=script(NOTEBOOK.format("accelerator = Accelerator()", 2))),
        ERROR,
    ),
    Case(
        "accelerator-before-notebook-launcher",
        "inside",
        facts(script=script(NOTEBOOK.format("", 2))),
        None,
    ),
    Case(
        "accelerator-before-notebook-launcher",
        "one process",
        facts(script=script(NOTEBOOK.format("accelerator = Accelerator()", 1))),
        None,
    ),
    Case(
        "accelerator-before-notebook-launcher",
        "no notebook_launcher",
        facts(script=script(TRAIN.format(""))),
        None,
    ),
    Case(
        "device-before-notebook-launcher",
        "before",
        facts(script=script(NOTEBOOK.format("model.cuda()", 2))),
        WARNING,
    ),
    Case(
        "device-before-notebook-launcher",
        "inside",
        facts(script=script(NOTEBOOK.format("", 2))),
        None,
    ),
    Case(
        "plain-backward",
        "plain",
        facts(
            script=script(
                "from accelerate import Accelerator\nAccelerator()\n(loss / 2).backward()"
            )
        ),
        WARNING,
    ),
    Case("plain-backward", "accelerator's", facts(script=script(TRAIN.format(""))), None),
    Case("plain-backward", "no Accelerator", facts(script=script("loss.backward()")), None),
    Case(
        "deepspeed-several-models",
        "config",
        facts(config=config(distributed_type="DEEPSPEED"), script=script(TWO_MODELS.format(""))),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "plugin",
        facts(script=script(TWO_MODELS.format("from accelerate import DeepSpeedPlugin"))),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "command line",
        facts(
            launch=launch("accelerate launch --use_deepspeed train.py"),
            script=script(TWO_MODELS.format("")),
        ),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "another command line",
        facts(
            launch=launch("accelerate launch --multi_gpu train.py"),
            script=script(TWO_MODELS.format("")),
        ),
        None,
    ),
    Case(
        "deepspeed-several-models",
        "variable",
        facts(variables={"ACCELERATE_USE_DEEPSPEED": "true"}, script=script(TWO_MODELS.format(""))),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "in two calls",
        facts(script=script(TWO_CALLS.format(""))),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "in two calls with a plugin each",
        facts(
            script=script(TWO_CALLS.format('accelerator.state.select_deepspeed_plugin("teacher")'))
        ),
        None,
    ),
    Case(
        "deepspeed-several-models",
        "two optimizers",
        facts(
            config=config(distributed_type="DEEPSPEED"),
            script=script("a.prepare(model, opt_1, opt_2)"),
        ),
        WARNING,
    ),
    Case(
        "deepspeed-several-models",
        "two Accelerators",
        facts(
            config=config(distributed_type="DEEPSPEED"),
            script=script("a.prepare(model)\nb.prepare(teacher)"),
        ),
        None,
    ),
    Case(
        "deepspeed-several-models",
        "no DeepSpeed",
        facts(script=script(TWO_MODELS.format(""))),
        None,
    ),
    Case(
        "deepspeed-several-models",
        "one model",
        facts(config=config(distributed_type="DEEPSPEED"), script=script(TRAIN.format(""))),
        None,
    ),
    Case(
        "device-map-in-training",
        "inference",
        facts(script=script("AutoModel.from_pretrained('gpt2', device_map='auto').generate()")),
        None,
    ),
    Case(
        "device-map-in-training",
        "auto",
        facts(script=script(TRAIN.format(', device_map="auto"'))),
        WARNING,
    ),
    Case(
        "device-map-in-training",
        "one entry",
        facts(script=script(TRAIN.format(', device_map={"": PartialState().process_index}'))),
        None,
    ),
    Case(
        "device-map-in-training",
        "none",
        facts(script=script(TRAIN.format(", device_map=None"))),
        None,
    ),
)

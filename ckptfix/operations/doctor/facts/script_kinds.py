"""What a variable of a script holds: a model, an optimizer or neither, by what made it and by its name."""

import re
from collections.abc import Collection

_MODEL_NAME = re.compile(
    r"(^|_)(model|net|network|teacher|student|generator|discriminator|actor|critic|unet|vae|policy)(_|\d|$)",
    re.I,
)
_OPTIMIZER_NAME = re.compile(r"(^|_)opt(im(izer)?)?(_|\d|$)", re.I)
_NO_MODEL_NAME = re.compile(r"(loader|data|dl|sched|sampler|warmup|batch|tokenizer|processor|iter|lr)", re.I)
_MODEL_CLASS = re.compile(r"(Model|Net|Network|Module|ForCausalLM|For[A-Z]\w+|LMHeadModel)$")


def is_module_class(name: str, modules: Collection[str]) -> bool:
    """Whether a class is one of modules. ``modules``: those of the script's own classes that are."""
    return name in modules or name.startswith("torch.nn.") or bool(_MODEL_CLASS.search(name))


def is_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Whether a variable holds a model. ``maker``: the full name of what was called to make it, "" for unknown."""
    owner, _, last = maker.rpartition(".")
    if is_optimizer(variable, maker) or maker.startswith(("torch.optim.", "torch.utils.data.")):
        return False
    if maker in modules or maker.startswith("torch.nn.") or _MODEL_CLASS.search(last):
        return True
    if last in ("from_pretrained", "from_config"):
        return bool(_MODEL_CLASS.search(owner) or re.search(r"AutoModel", owner))
    return bool(_MODEL_NAME.search(variable.rpartition(".")[2]))


def may_be_model(variable: str, maker: str, modules: Collection[str]) -> bool:
    """Whether a variable can hold a model: it does, or nothing says that it holds anything else."""
    if is_model(variable, maker, modules):
        return True
    is_other = is_optimizer(variable, maker) or maker.startswith(("torch.optim.", "torch.utils.data."))
    return not is_other and not _NO_MODEL_NAME.search(variable.rpartition(".")[2])


def is_optimizer(variable: str, maker: str) -> bool:
    """Whether a variable holds an optimizer."""
    if maker.startswith("torch.optim.lr_scheduler."):
        return False
    return maker.startswith("torch.optim.") or bool(_OPTIMIZER_NAME.search(variable.rpartition(".")[2]))

"""Placeholders of parameters: tensors of shape ``[0]`` that a rank of ZeRO-3 has in place of its
partitioned weights.

``module.state_dict()`` of a model under ZeRO-3 has them, unless the parameters are gathered first
(DeepSpeed 0.19). Parameters with fewer elements than ``stage3_param_persistence_threshold`` stay as
they are: most biases and norms. Every loader that compares shapes refuses a placeholder with "size
mismatch".

Healthy modules keep tensors without elements, too: observers (``min_val``), normalisers, and
modules with no features. So only weights count, in modules of which nothing else explains them.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from ckptfix.checkpoint.deepspeed_files import STEP, is_deepspeed_file
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.model_files import group_files
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_contents import Content, StateProblem, is_weights_file
from ckptfix.errors import CkptfixError
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import PickledTensor
from ckptfix.storage.files import folders_next_to, names_in
from ckptfix.wording import count_of

_BIAS_OF = {"weight": "bias", "in_proj_weight": "in_proj_bias"}
"""Name of a weight in torch's modules -> that of its bias."""

_OF_MODULES = frozenset(
    (
        *_BIAS_OF, *_BIAS_OF.values(), "bias_k", "bias_v", "running_mean", "running_var",
        "num_batches_tracked"
    )
)  # fmt: skip
"""Names next to a weight in torch's modules. Other names may be of a weight in another form, such
as ``qweight``.
"""

_NEXT_SAVE = (
    "set stage3_gather_16bit_weights_on_model_save, or save accelerator.get_state_dict(model)"
)
_MAX_FOLDERS = 100


def placeholder_problem(
    tensors: Iterable[TensorInfo | PickledTensor], *, is_short: bool = False
) -> StateProblem | None:
    """Return what is wrong with a state dict that has placeholders for weights, None for any other.

    ``is_short``: the index of its shards counts more bytes than they hold.
    """
    shapes = {tensor.fqn: tensor.shape for tensor in tensors}
    if (0,) not in shapes.values():
        return None
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        module, _, name = key.rpartition(".")
        modules.setdefault(module, {})[name] = shape
    # With its bias a module is a Linear or a norm of no features, which is as empty.
    weights = [
        (f"{module}.{name}" if module else name, of_module.get(bias))
        for module, of_module in modules.items()
        if of_module.keys() <= _OF_MODULES and of_module.get("running_mean") != (0,)
        for name, bias in _BIAS_OF.items()
        if of_module.get(name) == (0,)
    ]
    with_full_bias = [key for key, bias in weights if bias is not None and 0 not in bias]
    without_bias = [key for key, bias in weights if bias is None]
    is_all_empty = all(0 in shape for shape in shapes.values())
    if not (
        (is_short and weights)
        or with_full_bias
        or len(without_bias) > 1
        or (is_all_empty and len(weights) > 1)
    ):
        return None
    count = sum(shape == (0,) for shape in shapes.values())
    example = (with_full_bias or without_bias or [key for key, _ in weights])[0]
    return StateProblem(
        Content.MODEL,
        f"empty tensors, like those that ZeRO-3 leaves on each rank, for {count} of "
        f"{count_of(len(shapes), 'key')}, such as {example!r}",
        Content.PLACEHOLDERS,
        effect="loaders fail with 'size mismatch'",
    )


_MAY_BE_WEIGHTS = (Role.MODEL, Role.UNKNOWN, Role.CUSTOM)


def files_with_placeholders(
    folder: CheckpointFolder,
) -> Iterator[tuple[Component, str, StateProblem]]:
    """Yield the files of weights that have placeholders, with the keys that lead to them in a file
    of a script.
    """
    if not any(
        tensor.shape == (0,) for component in folder.components for tensor in component.tensors
    ):
        return
    # Indexes of older versions count a tied weight twice, so that the size alone shows nothing.
    short = {
        member.path
        for group in group_files(folder)
        if group.stored_size < (group.total_size or 0)
        for member in group.members
    }
    for component in folder.components:
        # DeepSpeed's own files have placeholders next to the partitions.
        if component.role not in _MAY_BE_WEIGHTS or is_deepspeed_file(component.path.name):
            continue
        content = component.content
        if is_weights_file(component.name) or not isinstance(content, TorchFile):
            problem = placeholder_problem(component.tensors, is_short=component.path in short)
            if problem is not None:
                yield component, "", problem
            continue
        for state_dict in content.state_dicts:
            problem = placeholder_problem(state_dict.tensors)
            if problem is not None:
                yield component, ".".join(state_dict.path), problem


def remedy_for_placeholders(folder: CheckpointFolder) -> str:
    """Return where the weights may be that a file has placeholders for, and what the next save
    needs.
    """
    near = deepspeed_next_to(folder)
    merge = (
        f"merge the states in {near}"
        if near
        else "look for a global_step folder of DeepSpeed and merge it"
    )
    return (
        f"this folder does not contain the weights: {merge} with DeepSpeed's zero_to_fp32.py, or "
        f"use another checkpoint; for the next save, {_NEXT_SAVE}"
    )


def deepspeed_next_to(folder: CheckpointFolder) -> str:
    """Return the last DeepSpeed checkpoint in the folders next to a folder, by their names, ""
    without one.
    """
    with suppress(OSError, CkptfixError):
        names = sorted(
            folders_next_to(folder.root), key=lambda name: (len(name), name), reverse=True
        )
        for name in names[:_MAX_FOLDERS]:
            below = sorted(
                names_in(folder.root.parent / name),
                key=lambda name: (len(name), name),
                reverse=True,
            )
            if any(map(is_deepspeed_file, below)):
                return f"../{name}/"
            step = next(filter(STEP.fullmatch, below), "")
            if step:
                return f"../{name}/{step}/"
    return ""

"""Contents of state files: the kind of state that a file holds, against the kind that its name
promises.

Loaders trust the name. ``state_kinds`` knows each kind by its keys, ``training_states`` and
``weights_contents`` know what a load does with a damaged one, and ``bundled_states`` judges states
under the keys of a script.
"""

from ckptfix.checkpoint.filenames import FileName
from ckptfix.checkpoint.generator_states import problem_of_random_states
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.state_kinds import (
    Content,
    StateProblem,
    is_inside,
    is_plain,
    noun_of,
    of_another_kind,
    state_by_keys,
    without_keys,
    wrapper_of,
)
from ckptfix.checkpoint.training_states import (
    lost_count,
    may_be_of_data,
    problem_of_dataloader,
    problem_of_optimizer,
    problem_of_scaler,
    problem_of_scheduler,
    problem_of_step,
)
from ckptfix.checkpoint.weights_contents import is_weights_file, problem_of_model, without_numbers
from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import Text, attribute, is_dict_like, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages

_NESTED = (Content.OPTIMIZER, Content.SCHEDULER)
"""States that classes of scripts wrap in another dict or list. Loaders look for the others at the
root alone.
"""

_GENERATORS = {
    Content.RANDOM_STATES: (
        "random_state",
        "numpy_random_seed",
        "torch_manual_seed",
        "torch_cuda_manual_seed",
    ),
    Content.TRAINER_RANDOM_STATES: ("python", "numpy", "cpu", "cuda"),
}
"""Keys under which random states have those of Python, numpy, and torch on the CPU and on CUDA
devices.
"""

_BY_ROLE = {
    Role.OPTIMIZER: Content.OPTIMIZER,
    Role.SCHEDULER: Content.SCHEDULER,
    Role.GRAD_SCALER: Content.GRAD_SCALER,
    Role.SAMPLER: Content.SAMPLER,
    Role.DATALOADER: Content.DATALOADER,
    Role.RNG_STATE: Content.RANDOM_STATES,
}


def content_of(file: TorchFile) -> Content | None:
    """Return the kind of state at the root of a file, None for anything else."""
    try:
        return _content(file)
    except FormatError:
        # No pickler writes such dicts, and nothing is known of their keys.
        return None


def state_problem(name: FileName, file: TorchFile) -> StateProblem | None:
    """Return what is wrong with the content of a state file, None for a right one or one that
    cannot be judged.
    """
    expected = _BY_ROLE.get(name.role)
    if expected is Content.RANDOM_STATES and name.is_of_trainer:
        expected = Content.TRAINER_RANDOM_STATES
    root = file.tree.root
    try:
        if is_weights_file(name):
            problem = problem_of_model(root)
            return problem or without_numbers(Content.MODEL, file)
        if expected is None:
            return None
        problem = _judged(expected, file)
        if problem is None and expected is Content.OPTIMIZER:
            return without_numbers(expected, file)
        return problem
    except FormatError:
        return None


def may_be_state(name: FileName, file: TorchFile) -> bool:
    """Return whether a file may hold a state of the role that a name has, right or damaged."""
    return content_of(file) is _BY_ROLE.get(name.role, file) or state_problem(name, file) is None


def _judged(expected: Content, file: TorchFile) -> StateProblem | None:
    root = file.tree.root
    content = _content(file)
    if expected is Content.DATALOADER and content in (expected, None):
        return problem_of_dataloader(root)
    if expected is Content.SCHEDULER and content in (expected, None) and (lost := lost_count(root)):
        holds, effect = (
            f"a scheduler's state without {lost!r}",
            f"the load succeeds, but {lost} starts over",
        )
        return StateProblem(expected, holds, None, effect=effect)
    if content is expected:
        problem = ""
        if expected is Content.OPTIMIZER:
            problem = problem_of_optimizer(root)
        elif expected is Content.SCHEDULER:
            problem = problem_of_scheduler(root)
        elif expected is Content.GRAD_SCALER:
            return problem_of_scaler(file.tree)
        elif expected in _GENERATORS:
            problem = problem_of_random_states(file.tree, *_GENERATORS[expected])
        if problem:
            return StateProblem(expected, problem, None)
        return problem_of_step(file.tree) if expected is Content.RANDOM_STATES else None
    if expected in _NESTED and (wrapper := wrapper_of(expected, root)):
        return StateProblem(expected, wrapper, None)
    if expected in _NESTED and is_inside(expected, root):
        return None
    if content is not None:
        return of_another_kind(expected, content, root)
    is_dict = is_dict_like(root)
    keys = [key.value if type(key) is Text else "" for key, _ in pairs(root)]
    is_empty = is_dict and not keys
    if expected is Content.RANDOM_STATES and keys == ["step"]:
        # ``migrate`` gives a process that the saving run did not have the step alone, and no random
        # states.
        return problem_of_step(file.tree)
    if (
        # What an object of a class is, its class alone knows.
        not is_plain(root)
        or expected is Content.SAMPLER
        or (expected is Content.SCHEDULER and is_dict)
        # Lookahead saves "fast_state" and "slow_state" with the groups.
        or (expected is Content.OPTIMIZER and "param_groups" in keys and len(keys) > 1)
        or (expected is Content.GRAD_SCALER and is_empty)
    ):
        return None
    holds = without_keys(expected, root) if is_dict and not is_empty else noun_of(root)
    may_be_of_script = expected is Content.GRAD_SCALER and may_be_of_data(root)
    return StateProblem(expected, holds, None, may_be_of_script=may_be_of_script)


def _content(file: TorchFile) -> Content | None:
    root = file.tree.root
    if (content := state_by_keys(root)) is not None:
        return content
    entries = [(key, value) for key, value in pairs(root)]
    if not entries or any(
        type(key) is not Text or not (is_tensor(value) or key.value.endswith("_extra_state"))
        for key, value in entries
    ):
        return None
    if is_dict_like(attribute(root, "_metadata")):
        # A module's state dict has the versions of its submodules.
        return Content.MODEL
    # A scheduler may keep tensors under such names, too: numbers, or one list. Models have a matrix
    # and more.
    known = storages(file.tree)
    tensors = [read_tensor(key, value, known) for key, value in entries if "." in key.value]
    dimensions = [len(tensor.shape) for tensor in tensors if tensor is not None and tensor.shape]
    return Content.MODEL if len(dimensions) > 1 and max(dimensions) > 1 else None

"""The names of numbered parameters: the right assignment is among those counted, and a single one
is the right one.
"""

import itertools
import random
import re
import time
from collections.abc import Sequence

import pytest

from ckptfix.errors import OperationError, UsageError
from ckptfix.tensors.optimizers import OptimizerState, ParamGroup, StateValue, Strategy
from ckptfix.tensors.parameter_names import (
    Assignments,
    Parameter,
    Shape,
    assignments,
    name_parameters,
    shape_of,
)
from ckptfix.tensors.stored import Contiguous, StoredTensor

Case = tuple[list[Parameter], list[list[int]], list[list[Shape | None]]]
"""A model's parameters, the positions of those in each param group, and the shapes of their
moments.
"""


def moments(shape: Shape) -> dict[str, StateValue]:
    def of(name: str, shape: Shape) -> StoredTensor:
        return StoredTensor(name, "F32", shape, Contiguous(()))

    return {
        "step": of("step", ()),
        "exp_avg": of("exp_avg", shape),
        "exp_avg_sq": of("exp_avg_sq", shape),
    }


def optimizer(groups: Sequence[Sequence[Shape | None]]) -> OptimizerState:
    numbers = map(str, itertools.count())
    named = [[next(numbers) for _ in group] for group in groups]
    return OptimizerState(
        label="optimizer.bin",
        strategy=Strategy.DDP,
        is_named=False,
        groups=tuple(
            ParamGroup(names=tuple(group), options={"lr": 0.1 * place})
            for place, group in enumerate(named)
        ),
        states={
            number: moments(shape)
            for group, shapes in zip(named, groups, strict=True)
            for number, shape in zip(group, shapes, strict=True)
            if shape is not None
        },
    )


def random_case(chance: random.Random) -> Case:
    """Return a random model of at most seven parameters, and a random optimizer of some of them."""
    kinds = [(4, 4), (4,), (8, 4), ()][: chance.randint(1, 4)]
    knows = chance.random() < 0.5
    parameters, groups = [], [[] for _ in range(chance.randint(1, 3))]  # type: ignore[var-annotated]
    for place in range(chance.randint(1, 7)):
        is_trainable = chance.random() < 0.8
        shape = chance.choice(kinds)
        parameters.append(
            Parameter(f"layers.{place}.weight", shape, is_trainable if knows else None)
        )
        is_listed = chance.random() < 0.9 if is_trainable else chance.random() < 0.2
        if is_listed:
            has_moments = is_trainable and chance.random() < 0.85
            chance.choice(groups).append((place, shape if has_moments else None))
    return (
        parameters,
        [[place for place, _ in group] for group in groups],
        [[shape for _, shape in group] for group in groups],
    )


def every_assignment(
    parameters: Sequence[Parameter], groups: Sequence[Sequence[Shape | None]]
) -> list[list[list[int]]]:
    """Return all assignments that agree, by trying all that there are."""
    found = []
    for owners in itertools.product(range(-1, len(groups)), repeat=len(parameters)):
        places: list[list[int]] = [[] for _ in groups]
        for place, owner in enumerate(owners):
            if owner >= 0:
                places[owner].append(place)
        if all(
            len(own) == len(shapes)
            and all(
                shape is None
                or (parameters[place].trainable is not False and shape == parameters[place].shape)
                for place, shape in zip(own, shapes, strict=True)
            )
            for own, shapes in zip(places, groups, strict=True)
        ):
            found.append(places)
    return found


@pytest.mark.parametrize("block", range(8))
def test_every_assignment_is_counted_and_the_right_one_is_among_them(block: int) -> None:
    chance = random.Random(block)
    counts = set()
    for _ in range(60):
        parameters, right, shapes = random_case(chance)
        expected = every_assignment(parameters, shapes)
        found = assignments(shapes, parameters)
        assert right in expected
        assert found.count == len(expected)
        if found.count == 1:
            assert [list(places) for places in found.places] == right
            assert not found.doubtful
        else:
            differing = [
                place
                for place in range(len(parameters))
                if len(
                    {
                        tuple(
                            (group, own.index(place))
                            for group, own in enumerate(one)
                            if place in own
                        )
                        for one in expected
                    }
                )
                > 1
            ]
            assert list(found.doubtful) == differing
        counts.add(found.count)
    assert {1, 2} <= counts


@pytest.mark.parametrize("block", range(4))
def test_names_are_those_of_the_run_or_refused(block: int) -> None:
    chance = random.Random(100 + block)
    named = 0
    refused = []
    for _ in range(80):
        parameters, right, shapes = random_case(chance)
        state = optimizer(shapes)
        is_certain = assignments(shapes, parameters).count == 1
        try:
            found = name_parameters(state, parameters)
        except OperationError as error:
            refused.append(str(error))
            continue
        named += 1
        assert found.is_named
        assert is_certain
        assert [list(group.names) for group in found.groups] == [
            [parameters[place].name for place in own] for own in right
        ]
        for group, own, group_shapes in zip(found.groups, right, shapes, strict=True):
            assert group.options == state.groups[found.groups.index(group)].options
            for place, shape in zip(own, group_shapes, strict=True):
                assert (parameters[place].name in found.states) is (shape is not None)
    assert named > 20
    assert len(refused) == 80 - named
    assert all("help: --" in words for words in refused)


def llama(layers: int, width: int = 64, vocabulary: int = 1000) -> list[Parameter]:
    """Return the parameters of a decoder, in the order of ``named_parameters()``."""
    found = [Parameter("model.embed_tokens.weight", (vocabulary, width))]
    for layer in range(layers):
        found += [
            Parameter(f"model.layers.{layer}.{name}.weight", shape)
            for name, shape in (
                ("self_attn.q_proj", (width, width)),
                ("self_attn.k_proj", (width // 4, width)),
                ("self_attn.v_proj", (width // 4, width)),
                ("self_attn.o_proj", (width, width)),
                ("mlp.gate_proj", (4 * width, width)),
                ("mlp.up_proj", (4 * width, width)),
                ("mlp.down_proj", (width, 4 * width)),
                ("input_layernorm", (width,)),
                ("post_attention_layernorm", (width,)),
            )
        ]
    return [*found, Parameter("model.norm.weight", (width,))]


def decayed(parameters: Sequence[Parameter]) -> list[list[Shape | None]]:
    """Return the groups of the Trainer: matrices with weight decay, the rest without."""
    return [
        [one.shape for one in parameters if len(one.shape) > 1],
        [one.shape for one in parameters if len(one.shape) == 1],
    ]


@pytest.mark.parametrize("layers", [2, 80])
def test_decay_groups_of_a_decoder_have_one_assignment(layers: int) -> None:
    parameters = llama(layers)
    found = assignments(decayed(parameters), parameters)
    assert found.count == 1
    assert [parameters[place].name for place in found.places[1]] == [
        one.name for one in parameters if "norm" in one.name
    ]


def test_a_frozen_norm_is_one_of_all_norms_until_somebody_says_which() -> None:
    parameters = llama(2)
    trained = [one for one in parameters if one.name != "model.layers.1.input_layernorm.weight"]
    state = optimizer(decayed(trained))
    with pytest.raises(OperationError) as caught:
        name_parameters(state, parameters)
    assert (
        str(caught.value)
        == "optimizer.bin: its 19 parameters can be assigned to names by shape in 5 ways "
        "(expected 1); interchangeable: 'model.layers.{0...1}.input_layernorm.weight', "
        "'model.layers.{0...1}.post_attention_layernorm.weight', 'model.norm.weight'; help: "
        "--frozen REGEX that matches the parameter missing from the optimizer, --model "
        "MODULE:FACTORY that freezes them, or --model MODULE:FACTORY with a factory that "
        "returns (model, optimizer)"
    )
    told = name_parameters(state, parameters, re.compile(r"layers\.1\.input_layernorm"))
    assert [name for group in told.groups for name in group.names] == [
        one.name for one in sorted(trained, key=lambda one: len(one.shape) == 1)
    ]
    known = [one._replace(trainable=one in trained) for one in parameters]
    assert name_parameters(state, known) == told


def test_a_frozen_regex_that_matches_nothing_is_a_mistake() -> None:
    parameters = llama(1)
    with pytest.raises(UsageError, match=r"--frozen 'layer.*9' matches no parameter of the model"):
        name_parameters(optimizer(decayed(parameters)), parameters, re.compile(r"layer\.9"))


def test_frozen_parameters_that_the_optimizer_lists_have_no_moments() -> None:
    parameters = llama(2)
    norm = "model.layers.1.input_layernorm.weight"
    groups = [[None if one.name == norm else one.shape for one in parameters]]
    found = name_parameters(optimizer(groups), parameters, re.compile("layers.1.input_layernorm"))
    assert list(found.groups[0].names) == [one.name for one in parameters]
    assert norm not in found.states
    # That one has moments.
    with pytest.raises(OperationError, match="not in the model's order"):
        name_parameters(optimizer(groups), parameters, re.compile("model.norm"))


def test_parameters_without_moments_are_named_by_their_neighbours() -> None:
    parameters = llama(2)
    groups = decayed(parameters)
    groups[0][0] = None  # an embedding that never got a gradient
    found = name_parameters(optimizer(groups), parameters)
    assert found.groups[0].names[0] == "model.embed_tokens.weight"
    assert "model.embed_tokens.weight" not in found.states


def test_groups_of_equal_layers_are_refused_with_what_decides() -> None:
    parameters = llama(24)
    groups: list[list[Shape | None]] = [
        [one.shape for one in parameters if f".{layer}." in one.name] for layer in range(24)
    ]
    outer = [one for one in parameters if "layers" not in one.name]
    state = optimizer([*groups, [one.shape for one in outer]])
    with pytest.raises(
        OperationError, match="help: --model MODULE:FACTORY with a factory that returns"
    ) as caught:
        name_parameters(state, parameters)
    assert "in too many ways to count" in str(caught.value)
    assert "param groups 0 and 1 have the same shapes" in str(caught.value)


def test_an_optimizer_of_another_model_has_no_assignment() -> None:
    parameters = llama(2)
    with pytest.raises(OperationError, match=r"it has 29 parameters, but the model has 20"):
        name_parameters(optimizer(decayed(llama(3))[::-1]), parameters[:20])
    shrunk = [one._replace(shape=one.shape[::-1]) for one in parameters]
    with pytest.raises(
        OperationError,
        match=r"1 of its parameters has moments of shape \[1000, 64\], but the model trains 0",
    ):
        name_parameters(optimizer(decayed(parameters)), shrunk)
    backward = optimizer([[one.shape for one in reversed(parameters)]])
    with pytest.raises(OperationError, match="not in the model's order"):
        name_parameters(backward, parameters)


@pytest.mark.slow
def test_fifteen_thousand_parameters_take_seconds() -> None:
    parameters = llama(1666)
    assert len(parameters) > 14_990
    begin = time.process_time()
    assert assignments(decayed(parameters), parameters).count == 1
    every = [one for one in parameters if one.name != "model.layers.700.input_layernorm.weight"]
    assert assignments(decayed(every), parameters).count == 3333
    adapters = [
        Parameter(
            f"{one.name}.{side}", (8, one.shape[-1]) if side == "lora_A" else (one.shape[0], 8)
        )
        for one in parameters
        if "proj" in one.name
        for side in ("lora_A", "lora_B")
    ]
    mixed = sorted(
        [*parameters, *adapters], key=lambda one: int((re.findall(r"\d+", one.name) or ["0"])[0])
    )
    found = assignments([[one.shape for one in mixed if "lora" in one.name]], mixed)
    assert found.count == 1
    # An optimizer of the upper half of a model: more assignments than anybody counts, in bounded
    # time.
    assert assignments([[one.shape for one in parameters[7500:]]], parameters).count != 1
    assert time.process_time() - begin < 40


def test_counting_ends_at_its_budget() -> None:
    parameters = [Parameter(f"{number}", (4,)) for number in range(400)]
    assert assignments([[(4,)]] * 400, parameters) == Assignments(count=None)
    assert assignments([[(4,)] * 400], parameters).count == 1


@pytest.mark.parametrize(
    ("states", "shape"),
    [
        ({}, None),
        ({"step": ()}, None),
        ({"step": (), "exp_avg": (), "exp_avg_sq": ()}, ()),
        ({"momentum_buffer": (3, 4)}, (3, 4)),
        ({"step": (), "exp_avg_sq_row": (3,), "exp_avg_sq_col": (4,)}, None),
        ({"step": (), "exp_avg": (3, 4), "exp_avg_sq_row": (3,), "exp_avg_sq_col": (4,)}, (3, 4)),
        ({"state1": (3, 4), "absmax1": (1,), "qmap1": (256,)}, (3, 4)),
        ({"exp_avg": (3, 4), "exp_avg_sq": (4, 3)}, None),
    ],
)
def test_the_shape_of_a_parameter_is_that_of_its_moments(
    states: dict[str, Shape], shape: Shape | None
) -> None:
    stored = {name: StoredTensor(name, "F32", of, Contiguous(())) for name, of in states.items()}
    assert shape_of(stored) == shape


def test_a_number_in_two_groups_is_refused() -> None:
    state = optimizer([[(4,)], [(4,)]])
    state = OptimizerState(
        label=state.label,
        strategy=state.strategy,
        is_named=False,
        groups=(state.groups[0], state.groups[0]),
        states=state.states,
    )
    with pytest.raises(OperationError, match="parameter 0 is in two param groups"):
        name_parameters(state, [Parameter("a", (4,)), Parameter("b", (4,))])

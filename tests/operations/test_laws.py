"""Laws over generated checkpoints: repair twice is once, undo takes back, names change by the map, bytes stay."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix import Keys, Policy, repair, undo
from ckptfix.checkpoint.keys import WRAPPERS
from tests.operations.builders import read_safetensors_bytes, snapshot, write_safetensors

WRAPPER = st.sampled_from(sorted(WRAPPERS))
SEGMENT = st.one_of(
    WRAPPER,
    st.sampled_from(
        ["weight", "bias", "layers", "0", "größe", "重み", "a b", 'q"uote', "new\nline", "\x7f", "\\"]
    ),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=4),
)
NAME = st.lists(SEGMENT, min_size=1, max_size=4).map(".".join).filter(lambda name: name != "__metadata__")
CHAIN = st.lists(WRAPPER, max_size=3).map(lambda chain: "".join(f"{segment}." for segment in chain))
TENSORS = st.dictionaries(NAME, st.binary(max_size=40), min_size=1, max_size=6)


def wrapped(tensors: Mapping[str, bytes], chain: str) -> dict[str, bytes]:
    return {chain + name: data for name, data in tensors.items()}


MODELS = st.lists(st.tuples(TENSORS, CHAIN).map(lambda pair: wrapped(*pair)), min_size=1, max_size=3)
POLICY = st.builds(Policy, keys=st.sampled_from(list(Keys)), atomic=st.booleans())


def stripped(name: str) -> tuple[str, ...]:
    """A name without any segment that a wrapper could have made."""
    return tuple(segment for segment in name.split(".") if segment not in WRAPPERS)


@settings(max_examples=150, deadline=None)
@given(models=MODELS, doubled=st.booleans(), chain=CHAIN, policy=POLICY, state=st.booleans())
def test_laws(models: list[dict[str, bytes]], doubled: bool, chain: str, policy: Policy, state: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if doubled:
            models = [models[0], wrapped(models[0], chain), *models[1:]]
        for index, tensors in enumerate(models):
            write_safetensors(folder / f"model{f'_{index}' if index else ''}.safetensors", tensors)
        if state:
            (folder / "random_states_0.pkl").write_bytes(b"\x80\x02}q\x00.")
        before = snapshot(folder)
        receipt = repair(folder, policy=policy)
        after = [read_safetensors_bytes(path) for path in sorted(folder.glob("model*.safetensors"))]
        kept = [sorted((stripped(key), data) for key, data in tensors.items()) for tensors in after]
        given_ones = [sorted((stripped(key), data) for key, data in tensors.items()) for tensors in models]
        assert all(tensors in given_ones for tensors in kept), "a tensor or a name is new"
        assert all(tensors in kept for tensors in given_ones), "a tensor is lost"
        once = snapshot(folder)
        assert repair(folder, policy=policy).steps == ()
        assert snapshot(folder) == once
        if receipt.transaction is not None:
            undo(folder)
        assert snapshot(folder) == before


@settings(max_examples=100, deadline=None)
@given(tensors=TENSORS, chain=CHAIN, policy=POLICY)
def test_a_lone_file_obeys_them_too(tensors: dict[str, bytes], chain: str, policy: Policy) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write_safetensors(Path(name) / "weights.safetensors", wrapped(tensors, chain))
        before = snapshot(path.parent)
        receipt = repair(path, policy=policy)
        assert list(read_safetensors_bytes(path).values()) == list(tensors.values())
        assert repair(path, policy=policy).steps == ()
        if receipt.transaction is not None:
            undo(path)
        assert snapshot(path.parent) == before

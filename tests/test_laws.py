"""The laws of a repair, for folders nobody thought of: twice is once, undo is the identity, bytes
stay.

What a file holds is read back here by ``json`` and by torch, never by the package under test.
"""

import io
import json
import shutil
import struct
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptfix import Keys, Policy, check, repair, undo
from ckptfix.checkpoint.keys import WRAPPERS
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import RolledBackError
from ckptfix.repairs.receipt import RepairReceipt
from tests.repairs.builders import RANDOM_STATES, write_safetensors

Tensors = dict[str, bytes]
Snapshot = dict[str, tuple[object, ...]]

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEGMENTS = st.one_of(
    st.sampled_from(sorted(WRAPPERS)),
    st.sampled_from(
        [
            "fc",
            "0",
            "layers",
            "weight",
            "größe",
            "重み",
            "a b",
            'q"uote',
            "\\",
            "\n",
            "\x00",
            "\x7f",
            "",
            "\u202e",
        ]
    ),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), max_size=4),
)
NAMES = (
    st.lists(SEGMENTS, min_size=1, max_size=4)
    .map(".".join)
    .filter(lambda name: name != "__metadata__")
)
CHAINS = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=4).map(
    lambda chain: "".join(f"{s}." for s in chain)
)
MODELS = st.dictionaries(NAMES, st.binary(max_size=6), max_size=5)
POLICIES = st.builds(
    Policy,
    keys=st.sampled_from(Keys),
    atomic=st.booleans(),
    keep=st.one_of(st.just({}), st.integers(1, 3).map(lambda count: {Role.MODEL: count})),
    allow=st.frozensets(
        st.sampled_from(
            [
                "entry-gap",
                "trailing-bytes",
                "no-format-metadata",
                "wrapper-prefix",
                "identical-models",
            ]
        )
    ),
)


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Tensors]:
    """File name -> tensors: entries that may be doubles of one another, lone files, shards."""
    pool = draw(st.lists(MODELS, min_size=1, max_size=2))
    files: dict[str, Tensors] = {}
    for position in draw(st.lists(st.integers(0, 3), max_size=4, unique=True)):
        chain = draw(CHAINS)
        name = f"model_{position}.safetensors" if position else "model.safetensors"
        files[name] = {chain + fqn: data for fqn, data in draw(st.sampled_from(pool)).items()}
    for name in draw(
        st.lists(st.sampled_from(["ema", "a b", "model-00001-of-00002", "model-00002-of-00002"]))
    ):
        chain = draw(CHAINS)
        files[f"{name}.safetensors"] = {chain + fqn: data for fqn, data in draw(MODELS).items()}
    return files


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder for every example; tmp_path is one for all of them."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(dir=base, prefix="ckptfix-laws-"))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def snapshot(root: Path) -> Snapshot:
    """Everything but the journal: kinds, bytes, link targets and modes."""
    found: Snapshot = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.split("/")[0] == ".ckptfix":
            continue
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mode)
    return found


def read_safetensors(path: Path) -> Tensors:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def repaired(root: Path, policy: Policy) -> RepairReceipt | None:
    """Repair; None where what the user allowed would move a file next to one of another format, and
    is rolled back.
    """
    try:
        return repair(root, policy=policy)
    except RolledBackError as error:
        if "the repair caused a new finding" not in str(error) or not (policy.allow or policy.keep):
            raise
        return None


def bare(name: str) -> str:
    """The name without wrappers anywhere but at its end: what no repair may change."""
    *path, last = name.split(".")
    return ".".join([segment for segment in path if segment not in WRAPPERS] + [last])


def bare_tensors(path: Path) -> Counter[tuple[str, bytes]]:
    return Counter((bare(name), data) for name, data in read_safetensors(path).items())


def write(root: Path, files: Mapping[str, Tensors], *, is_save_state: bool) -> None:
    for name, tensors in files.items():
        write_safetensors(root / name, tensors)
    if is_save_state:
        (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)


@RELAXED
@given(files=folders().filter(bool), policy=POLICIES, is_save_state=st.booleans())
# Without wrappers in the first file, those of the shard that is left alone count as nested.
@example(
    files={
        "model.safetensors": {"fc.a": b"", "fc._orig_mod.b": b""},
        "model-00001-of-00002.safetensors": {
            f"{2 * '_checkpoint_wrapped_module.'}_fsdp_wrapped_module.fc.{name}": b""
            for name in ("a", "_orig_mod.b")
        },
    },
    policy=Policy(keys=Keys.BARE),
    is_save_state=False,
)
def test_laws_of_a_folder(files: dict[str, Tensors], policy: Policy, is_save_state: bool) -> None:
    with scratch() as root:
        write(root, files, is_save_state=is_save_state)
        before = snapshot(root)
        contents = {path.name: bare_tensors(path) for path in root.glob("*.safetensors")}
        dry = repair(root, policy=policy, dry_run=True)
        assert snapshot(root) == before
        assert not (root / ".ckptfix").exists()

        receipt = repaired(root, policy)
        if receipt is None:
            assert snapshot(root) == before
            return
        assert [str(step) for step in receipt.steps] == [str(step) for step in dry.steps]
        after = snapshot(root)
        kept = [bare_tensors(path) for path in root.glob("*.safetensors")]
        # Every file that is left holds exactly the tensors of one that was there; a dropped one,
        # those of one left.
        assert all(tensors in contents.values() for tensors in kept)
        assert all(tensors in kept for tensors in contents.values())
        if not any(type(step.action).__name__ == "DropEntry" for step in receipt.steps):
            assert sorted(map(sorted, kept)) == sorted(map(sorted, contents.values()))

        again = repair(root, policy=policy)
        assert (again.steps, again.transaction) == ((), None)
        assert snapshot(root) == after

        if receipt.transaction is None:
            assert after == before
        else:
            undo(root)
            assert snapshot(root) == before


OWN_NAMES = NAMES.filter(lambda name: not set(name.split(".")) & WRAPPERS)


@RELAXED
@given(
    tensors=st.dictionaries(OWN_NAMES, st.binary(max_size=6), min_size=1, max_size=5),
    chain=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=4),
    keys=st.sampled_from(Keys),
    atomic=st.booleans(),
)
def test_names_change_by_the_wrapper_chain_alone(
    tensors: Tensors, chain: list[str], keys: Keys, atomic: bool
) -> None:
    """What is right is known in advance here: the package under test is not asked what it should
    be.
    """
    once = list(dict.fromkeys(chain))  # auto: each wrapper once, in the order of its first
    expected = {Keys.BARE: [], Keys.DDP: ["module"], Keys.AUTO: once}[keys]
    with scratch() as root:
        path = write_safetensors(
            root / "m.safetensors", {".".join([*chain, n]): d for n, d in tensors.items()}
        )
        receipt = repair(path, policy=Policy(keys=keys, atomic=atomic))
        assert read_safetensors(path) == {
            ".".join([*expected, name]): data for name, data in tensors.items()
        }
        assert list(read_safetensors(path).values()) == list(tensors.values()), (
            "the order of the data"
        )
        assert (receipt.transaction is not None) == (expected != chain)


@st.composite
def state_dicts(draw: st.DrawFn) -> OrderedDict[str, torch.Tensor]:
    """A state dict as modules give it: tied tensors, views, ``_metadata``."""
    chain = draw(CHAINS)
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    base = torch.arange(12, dtype=torch.float32)
    makers = {
        "own": lambda: torch.randn(draw(st.integers(0, 5))),
        "tied": lambda: base,
        "view": lambda: base[draw(st.integers(0, 5)) : 9],
        "strided": lambda: base.reshape(3, 4).t(),
        "scalar": lambda: torch.tensor(7),
        "empty": lambda: torch.empty(0, 3),
    }
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        state[chain + name] = makers[draw(st.sampled_from(sorted(makers)))]()
    modules = {fqn.rpartition(".")[0] for fqn in state} | {""}
    state._metadata = OrderedDict((module, {"version": 1}) for module in sorted(modules))  # type: ignore[attr-defined]
    return state


def saved(value: object, *, legacy: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def equal(left: Any, right: Any) -> bool:
    return bool(
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and torch.equal(left, right)
    )


@RELAXED
@given(
    state=state_dicts(),
    keys=st.sampled_from(Keys),
    atomic=st.booleans(),
    under=st.sampled_from([None, "model", "state_dict", "module"]),
    legacy=st.booleans(),
)
def test_laws_of_a_torch_file(
    state: OrderedDict[str, torch.Tensor],
    keys: Keys,
    atomic: bool,
    under: str | None,
    legacy: bool,
) -> None:
    extra = {"epoch": 3, "module.module.note": "module.module.", "list": [1, "module.module.x"]}
    value = state if under is None else {under: state, **extra}
    with scratch() as root:
        path = root / "train.pt"
        path.write_bytes(saved(value, legacy=legacy))
        original = path.read_bytes()
        policy = Policy(keys=keys, atomic=atomic)
        receipt = repair(path, policy=policy)
        loaded = torch.load(path, weights_only=True)
        if under is not None:
            assert {key: item for key, item in loaded.items() if key != under} == extra, (
                "a value changed"
            )
            loaded = loaded[under]
        assert [bare(name) for name in loaded] == [bare(name) for name in state]
        assert all(
            equal(one, other) for one, other in zip(loaded.values(), state.values(), strict=True)
        )
        pointers = [
            tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor.numel()
        ]
        new = [tensor.untyped_storage().data_ptr() for tensor in loaded.values() if tensor.numel()]
        assert [pointers.index(p) for p in pointers] == [new.index(p) for p in new], "ties changed"
        if receipt.steps:
            assert list(loaded) != list(state)
            again = repair(path, policy=policy)
            assert again.steps == ()
            undo(path)
        assert path.read_bytes() == original


@pytest.fixture(scope="module")
def torch_pool() -> list[OrderedDict[str, torch.Tensor]]:
    """Models to be saved as entries of a folder, wrapped or not."""
    torch.manual_seed(0)
    nets = [
        torch.nn.Linear(3, 2),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
    ]
    return [net.state_dict() for net in nets]


@RELAXED
@given(entries=st.lists(st.tuples(st.sampled_from([0, 1]), CHAINS), max_size=4), policy=POLICIES)
@example(
    entries=[(0, "_fsdp_wrapped_module."), (1, ""), (1, ""), (0, "")],
    policy=Policy(keep={Role.MODEL: 3}, allow=frozenset({"wrapper-prefix"})),
)
@example(
    entries=[(1, "module."), (0, "module."), (1, ""), (0, "_orig_mod."), (1, "")],
    policy=Policy(keep={Role.MODEL: 3}, keys=Keys.BARE),
)
def test_laws_of_a_folder_of_torch_files(
    torch_pool: list[OrderedDict[str, torch.Tensor]],
    entries: list[tuple[int, str]],
    policy: Policy,
) -> None:
    with scratch() as root:
        for position, (number, chain) in enumerate(entries):
            state = OrderedDict(
                (chain + name, tensor) for name, tensor in torch_pool[number].items()
            )
            name = f"pytorch_model_{position}.bin" if position else "pytorch_model.bin"
            (root / name).write_bytes(saved(state, legacy=False))
        (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)
        before = snapshot(root)
        receipt = repair(root, policy=policy)
        after = snapshot(root)
        assert repair(root, policy=policy).steps == ()
        assert snapshot(root) == after
        left = {
            tuple(bare(name) for name in torch.load(path))
            for path in root.glob("pytorch_model*.bin")
        }
        assert left == {tuple(torch_pool[number]) for number, _ in entries}, "a whole model is gone"
        if not receipt.left:
            assert not any(finding.action.value == "fix" for finding in check(root).findings)
        if receipt.transaction is not None:
            undo(root)
        assert snapshot(root) == before


@RELAXED
@given(
    files=folders().filter(bool),
    link=st.sampled_from(["symbolic", "hard"]),
    policy=POLICIES,
    pick=st.integers(0, 10),
)
# Rolled back after a link was moved: its second name in the journal leads nowhere.
@example(
    files={"model_1.safetensors": {}, "model-00001-of-00002.safetensors": {"fc": b"1"}},
    link="symbolic",
    policy=Policy(allow=frozenset(["entry-gap"])),
    pick=1,
)
# Rolled back: the index places the key in one of two shards that hold it, and the proof met the
# other as left over.
@example(
    files={
        "model-00001-of-00002.safetensors": {"fc": b""},
        "model-00002-of-00002.safetensors": {"fc": b""},
    },
    link="symbolic",
    policy=Policy(),
    pick=0,
)
def test_another_name_of_a_file_keeps_its_bytes(
    files: dict[str, Tensors], link: str, policy: Policy, pick: int
) -> None:
    with scratch() as base:
        root = base / "c"
        root.mkdir()
        write(root, files, is_save_state=True)
        name = sorted(files)[pick % len(files)]
        other = base / "blob"
        if link == "symbolic":
            (root / name).rename(other)
            (root / name).symlink_to("../blob")
        else:
            other.hardlink_to(root / name)
        kept, status, before = other.read_bytes(), other.stat(), snapshot(root)
        receipt = repaired(root, policy)
        assert other.read_bytes() == kept
        assert (other.stat().st_ino, other.stat().st_mtime_ns) == (
            status.st_ino,
            status.st_mtime_ns,
        )
        if receipt is not None and receipt.transaction is not None:
            undo(root)
        assert snapshot(root) == before
        assert other.read_bytes() == kept
        assert (root / name).samefile(other)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("keys", [Keys.BARE, Keys.DDP])
def test_names_of_two_shards_that_would_become_one_are_refused(
    tmp_path: Path, keys: Keys, with_index: bool
) -> None:
    """Shards are one state dict: a name in one shard and another in the next must not fall
    together.
    """
    files: dict[str, Tensors] = {
        SHARDS[0]: {"a.fc": b"1", "x": b"2"},
        SHARDS[1]: {"a._orig_mod.fc": b"3"},
    }
    write(tmp_path, files, is_save_state=False)
    if with_index:
        weight_map = {fqn: name for name, tensors in files.items() for fqn in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    repair(tmp_path, policy=Policy(keys=keys))
    names = [fqn for name in SHARDS for fqn in read_safetensors(tmp_path / name)]
    assert len(set(names)) == 3


@pytest.mark.parametrize("keys", Keys)
@pytest.mark.parametrize("sharded", [True, False])
def test_wrappers_below_a_wrapper_need_no_second_repair(
    tmp_path: Path, keys: Keys, sharded: bool
) -> None:
    """With the private wrapper gone all names carry ``module.``, which they did not before."""
    one, two = {"module.fc": b"1"}, {"_checkpoint_wrapped_module.module.out": b"2"}
    if sharded:
        write(tmp_path, {SHARDS[0]: one, SHARDS[1]: two}, is_save_state=False)
    else:
        write(tmp_path, {"m.safetensors": {**one, **two}}, is_save_state=False)
    before = snapshot(tmp_path)
    policy = Policy(keys=keys)
    receipt = repair(tmp_path, policy=policy)
    assert repair(tmp_path, policy=policy).steps == ()
    names = {fqn for path in tmp_path.glob("*.safetensors") for fqn in read_safetensors(path)}
    if keys is not Keys.AUTO:
        prefix = "module." if keys is Keys.DDP else ""
        assert names == {f"{prefix}fc", f"{prefix}out"}
    if receipt.transaction is not None:
        undo(tmp_path)
    assert snapshot(tmp_path) == before


def test_allowing_single_wrappers_takes_nested_ones_off_in_one_repair(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"module.module.fc": b"1"})
    policy = Policy(allow=frozenset({"wrapper-prefix"}))
    assert repair(tmp_path, policy=policy).status == 0
    assert repair(tmp_path, policy=policy).steps == ()
    assert list(read_safetensors(tmp_path / "m.safetensors")) == ["fc"]


def test_shards_without_a_tensor_need_no_index(tmp_path: Path) -> None:
    write(tmp_path, {SHARDS[0]: {}, SHARDS[1]: {}}, is_save_state=False)
    receipt = repair(tmp_path)
    assert repair(tmp_path).steps == ()
    if receipt.transaction is not None:
        undo(tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} - {".ckptfix"} == set(SHARDS)

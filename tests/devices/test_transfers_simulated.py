"""References to staging on simulated devices: what is staged, for how long, what is counted,
refused and said.
"""

import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch

from ckptfix.devices import probe, routing, staged_copies, transfers
from ckptfix.devices.probe.probe_report import PairReport, ProbeReport, Verdict
from ckptfix.devices.routing import ROUTER, Count, TransferError, bypassed
from ckptfix.devices.transfers import (
    Mode,
    Transfers,
    acquire,
    release,
    safe_transfers,
    staged_pairs,
)
from ckptfix.errors import UsageError
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(3)

ALL = frozenset(permutations(range(3), 2))
TORCHS_OWN = "RegisterCompositeExplicitAutograd"


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> Iterator[None]:
    """Nothing is known of these devices, and nothing stays installed."""
    monkeypatch.setattr(probe, "cached_report", lambda: None)
    monkeypatch.delenv(transfers.VARIABLE, raising=False)
    transfers._told.clear()
    yield
    assert staged_pairs() == frozenset()
    assert TORCHS_OWN in kernel()


def kernel() -> str:
    """Return where the kernel comes from that answers copies on a device."""
    return repr(torch.library.get_kernel("aten::copy_", "CUDA"))


def unproven(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[int, int]) -> list[float]:
    """Let "auto" find these pairs; return the budgets it asks with."""
    budgets: list[float] = []

    def found(budget: float = 0.0) -> frozenset[tuple[int, int]]:
        budgets.append(budget)
        return frozenset(pairs)

    monkeypatch.setattr(probe, "unproven_pairs", found)
    return budgets


def move(source: int = 0, destination: int = 1, count: int = 5) -> torch.Tensor:
    return torch.arange(count, device=f"cuda:{source}").to(f"cuda:{destination}").cpu()


# ---- what is staged


def test_always_stages_every_pair(simulator: Simulator) -> None:
    with safe_transfers("always") as held:
        assert staged_pairs() == held.pairs == ALL
        assert held.mode is Mode.ALWAYS
        for pair in ALL:
            assert torch.equal(move(*pair), torch.arange(5))
        assert simulator.count() == 0
    move()
    assert simulator.count() == 1


def test_auto_stages_what_is_not_proven(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = unproven(monkeypatch, (0, 1), (2, 0))
    with pytest.warns(
        UserWarning, match=r"2 of 6 .*0 -> 1, 2 -> 0.*ckptfix doctor --peer-copies"
    ) as said:
        held = acquire("auto", holder="a test")
    assert staged_pairs() == held.pairs == {(0, 1), (2, 0)}
    move(0, 1)
    move(1, 0)
    move(2, 0)
    release(held)
    assert [(pair, len(copies)) for pair, copies in simulator.log().items()] == [((1, 0), 1)]
    assert budgets == [30.0]
    assert said[0].filename == __file__
    with warnings.catch_warnings(), safe_transfers():
        warnings.simplefilter("error")  # it is said once


def test_auto_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = report(_01=Verdict.WRONG, _12=Verdict.UNUSABLE, _02=Verdict.HEALTHY)
    monkeypatch.setattr(probe, "cached_report", lambda: known)
    unproven(monkeypatch, (0, 1), (1, 2))
    with pytest.warns(
        UserWarning, match=r"\(0 -> 1 zeros, 1 -> 2 unusable\): .* staging cannot make it safe"
    ):
        release(acquire("auto", holder="a test"))


def test_auto_on_healthy_devices_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)
    with safe_transfers("auto") as held:
        assert held.pairs == staged_pairs() == frozenset()
        assert TORCHS_OWN in kernel(), "a copy costs what it always costs"
        assert move()[3] == 3


def test_a_machine_with_one_device_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "ckptfix.devices.probe")
    for mode in ("auto", "always"):
        with safe_transfers(mode) as held:
            assert held.pairs == frozenset()
            assert TORCHS_OWN in kernel()
    assert "ckptfix.devices.probe" not in sys.modules


def test_references_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = acquire("always", holder="the first")
    unproven(monkeypatch, (0, 1))
    with pytest.warns(UserWarning, match="not proven"):
        second = acquire(Mode.AUTO, holder="the second")
    assert staged_pairs() == ALL
    release(first)
    assert staged_pairs() == {(0, 1)}
    release(first)
    assert staged_pairs() == {(0, 1)}, "given back once"
    release(second)
    assert staged_pairs() == frozenset()


def test_never_switches_nothing_off_that_others_hold(simulator: Simulator) -> None:
    with safe_transfers("never") as none:
        assert none.pairs == frozenset()
        move()
        assert simulator.count() == 1
    with safe_transfers("always"):
        with pytest.warns(
            UserWarning, match=r"stay on for 6 ordered pairs.*a safe_transfers block"
        ) as said:
            none = acquire("never", holder="a test")
        assert none.pairs == frozenset()
        assert said[0].filename == __file__
        move()
    assert simulator.count() == 1


@pytest.mark.parametrize(
    ("said", "pairs"), [("always", 6), ("ALWAYS", 6), ("never", 0), ("auto", 1), ("", 1)]
)
@pytest.mark.filterwarnings("ignore:1 of 6")
def test_the_environment_says_what_auto_means(
    monkeypatch: pytest.MonkeyPatch, said: str, pairs: int
) -> None:
    unproven(monkeypatch, (0, 1))
    monkeypatch.setenv("CKPTFIX_SAFE_TRANSFERS", said)
    with safe_transfers() as held:
        assert len(held.pairs) == pairs
    with safe_transfers("always") as held:
        assert len(held.pairs) == 6


def test_words_that_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UsageError, match="'sometimes': expected 'auto', 'always' or 'never'"),
        safe_transfers("sometimes"),
    ):
        pass
    monkeypatch.setenv("CKPTFIX_SAFE_TRANSFERS", "yes")
    with (
        pytest.raises(
            UsageError, match="CKPTFIX_SAFE_TRANSFERS='yes': expected auto, always or never"
        ),
        safe_transfers(),
    ):
        pass


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), safe_transfers("always"):
        raise ZeroDivisionError
    assert TORCHS_OWN in kernel()


def test_a_failed_installation_leaves_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(transfers, "Override", fail)
        with pytest.raises(RuntimeError, match="no"), safe_transfers("always"):
            pass
    with safe_transfers("always"):
        move()


def test_it_can_be_installed_as_often_as_one_likes(simulator: Simulator) -> None:
    for _ in range(200):
        with safe_transfers("always"):
            move()
    assert simulator.count() == 0


# ---- threads


def test_bypassed_is_for_one_thread(simulator: Simulator) -> None:
    inside = threading.Event()
    over = threading.Event()

    def bypass() -> None:
        with bypassed(), bypassed():
            inside.set()
            over.wait(20)
            move(0, 1)

    with safe_transfers("always") as held:
        thread = threading.Thread(target=bypass)
        thread.start()
        assert inside.wait(20)
        move(0, 2)
        over.set()
        thread.join()
        move(0, 1)
        counted = held.counters()
    assert set(simulator.log()) == {(0, 1)}
    assert (counted[0, 1].direct, counted[0, 1].staged, counted[0, 2].staged) == (1, 1, 1)


def test_references_come_and_go_while_other_threads_copy(simulator: Simulator) -> None:
    """Taken out of torch's table while a thread looks its kernel up there, it was a segmentation
    fault.
    """
    stop = threading.Event()
    wrong: list[str] = []

    def copy() -> None:
        while not stop.is_set():
            if not torch.equal(move(0, 1, 1000), torch.arange(1000)):
                wrong.append("other numbers")

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with safe_transfers("always"):
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert TORCHS_OWN not in kernel(), "what stays hands every copy on"
    before, direct = ROUTER.counts.all(), len(simulator.log()[0, 1])
    move()
    assert ROUTER.counts.all() == before
    assert len(simulator.log()[0, 1]) == direct + 1
    with safe_transfers("always") as held:
        move()
        assert held.counters()[0, 1] == Count(staged=1, staged_bytes=40)
    assert TORCHS_OWN in kernel(), "it is taken out as soon as nothing else runs"


def test_a_reference_given_back_inside_of_taking_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the collector does it, which may run a model's finalizer anywhere, in this very thread."""
    first = acquire("always", holder="a model that is collected")
    settle = transfers._settle

    def collect() -> None:
        monkeypatch.setattr(transfers, "_settle", settle)
        release(first)
        settle()

    monkeypatch.setattr(transfers, "_settle", collect)
    second = acquire("always", holder="another")
    assert transfers._references == [second]
    assert staged_pairs() == ALL
    release(second)


def test_the_last_reference_given_back_in_the_middle_of_a_large_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the collector does it: the slots of that copy waited for ever for themselves, and must not
    be kept.
    """
    reference = acquire("always", holder="a model that is collected")
    ring = staged_copies._Ring

    def collect() -> staged_copies._Ring:
        release(reference)
        return ring()

    monkeypatch.setattr(staged_copies, "_Ring", collect)
    payload = torch.randint(0, 256, (staged_copies.PIPELINED_FROM + 5,), dtype=torch.uint8)
    arrived: list[torch.Tensor] = []
    source = payload.to("cuda:0")
    thread = threading.Thread(target=lambda: arrived.append(source.to("cuda:1")), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert torch.equal(arrived[0].cpu(), payload)
    assert not staged_copies._rings
    with safe_transfers("always"):  # which takes out what could not be, while that thread ran
        pass


# ---- counting


def test_a_reference_to_nothing_counts_from_its_own_beginning(simulator: Simulator) -> None:
    with safe_transfers("always"):
        move(0, 1, 5)
        with pytest.warns(UserWarning, match="stay on"):
            none = acquire("never", holder="a test")
        assert none.counters()[0, 1] == Count()
        move(0, 1, 7)
        assert none.counters()[0, 1] == Count(staged=1, staged_bytes=56)


def test_copies_that_are_nobody_elses_are_not_counted(simulator: Simulator) -> None:
    with safe_transfers("always") as held:
        with bypassed(counted=False):
            move()
        assert held.counters()[0, 1] == Count()
        move()
        assert held.counters()[0, 1] == Count(staged=1, staged_bytes=40)
    assert simulator.count() == 1


def test_counters(simulator: Simulator) -> None:
    with safe_transfers("always") as held:
        move(0, 1, 5)
        with safe_transfers("always") as inner:
            move(0, 1, 7)
            with bypassed():
                move(2, 1, 1)
        assert inner.counters()[0, 1] == Count(staged=1, staged_bytes=56)
        assert inner.counters()[2, 1] == Count(direct=1, direct_bytes=8)
        assert held.counters()[0, 1] == Count(staged=2, staged_bytes=96)
        assert set(held.counters()) == ALL
        assert held.counters()[1, 2] == Count()
    with safe_transfers("always") as later:
        assert later.counters()[0, 1] == Count()
    assert held.counters()[0, 1].staged == 2, "kept"


def test_a_strided_copy_without_peer_access_is_counted_once(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gathers it on the source device, and sends that by a second `aten::copy_` from inside
    the first.
    """
    simulator.peer_access(0, 1, False)
    unproven(monkeypatch, (1, 0))
    with pytest.warns(UserWarning, match="not proven"):
        held = acquire("auto", holder="a test")
    base = torch.arange(12.0, device="cuda:0").view(3, 4)
    into = torch.zeros(3, 4, device="cuda:1")
    into[:, ::2].copy_(base[:, ::2])
    into.copy_(base.to(torch.float64))
    assert held.counters()[0, 1] == Count(direct=2, direct_bytes=24 + 96)
    assert torch.equal(into.cpu(), base.cpu())
    release(held)


def test_a_capture_on_any_device_in_use_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False
    )
    capturing: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: torch.cuda.current_device() in capturing
    )
    with safe_transfers("always"):
        here = torch.ones(3, device="cuda:0")
        capturing[:] = [2]
        with pytest.raises(TransferError, match="graph capture"):
            here.to("cuda:1")
        assert torch.cuda.current_device() == 0
    with safe_transfers("always"):
        capturing[:] = [1]
        assert here.to("cuda:2").sum() == 3, "a device that is not in use is not touched"


def test_an_objection_of_cuda_to_waiting_in_a_capture_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that is captured and is current nowhere cannot be asked for."""
    said = "CUDA error: operation not permitted when stream is capturing"

    def object_to(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(routing, "staged_copy", object_to)
    with safe_transfers("always"), pytest.raises(TransferError, match="graph capture") as caught:
        torch.ones(3, device="cuda:0").to("cuda:1")
    assert said in str(caught.value.__cause__)


def test_no_staging_inside_of_a_graph_capture(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with safe_transfers("always") as held:
        source = torch.ones(4, device="cuda:0")
        for capturing in (0, 1):
            monkeypatch.setattr(
                torch.cuda,
                "is_current_stream_capturing",
                lambda capturing=capturing: torch.cuda.current_device() == capturing,
            )
            with pytest.raises(TransferError, match="graph capture"):
                source.to("cuda:1")
        assert held.counters()[0, 1] == Count(), "no copy was made"
        monkeypatch.delattr(torch.cuda, "is_current_stream_capturing")
        assert source.to("cuda:1").sum() == 4, "an accelerator that cannot be asked"
        assert torch.cuda.current_device() == 0
    assert simulator.count() == 0


def test_what_is_not_covered_is_said() -> None:
    with safe_transfers("always") as held:
        assert any("NCCL" in words for words in held.not_covered)
        assert any("IPC" in words for words in held.not_covered)
        assert any(
            "DataParallel" in words and "comm.broadcast" in words for words in held.not_covered
        )


# ---- events from device to device


def report(**verdicts: Verdict) -> ProbeReport:
    """Return a report in which what is wrong arrives as zeros; `_01` is the pair from 0 to 1."""
    pairs = {(int(name[1]), int(name[2])): verdict for name, verdict in verdicts.items()}
    reports = {
        pair: PairReport(
            pair=pair, verdict=verdict, seed=1, kind="zeros" if verdict is Verdict.WRONG else ""
        )
        for pair, verdict in pairs.items()
    }
    return ProbeReport(seed=1, pairs=reports)


def test_one_type_for_all_references() -> None:
    with safe_transfers("always") as held:
        assert isinstance(held, Transfers)
    assert not transfers._references

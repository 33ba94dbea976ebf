"""Faults between client and server: a verb gives the right result, or ends with exit status 3 and
what to do next.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import ChangedError, StoreError
from ckptfix.storage import stores
from ckptfix.storage.stores import Patience, open_store
from ckptfix.verification.seal import seal
from tests.commanding import Said, said
from tests.sampling import sampled
from tests.stores.faults import LASTING, PASSING, Proxy, proxied
from tests.stores.servers import Server, bucket, ministack, ministack_process, upload_folder

__all__ = ["bucket", "ministack", "ministack_process", "said"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASE = FIXTURES / "golden" / "doubled-model" / "checkpoint"
CLEAN = FIXTURES / "accelerate-1.15.0" / "clean-single-process" / "checkpoint"
pytestmark = pytest.mark.slow

PATIENT = Patience(attempts=3, first_wait=0.01, longest_wait=0.02, connect=5, answer=5)
HASTY = PATIENT._replace(answer=0.4)
"""For answers that come too late on purpose: on a busy machine the others take half a second, too.
"""


@pytest.fixture
def proxy(ministack: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(ministack.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        monkeypatch.setattr(stores, "PATIENCE", PATIENT)
        yield proxy


@pytest.fixture
def url(bucket: str) -> str:
    upload_folder(CASE, f"{bucket}/run/checkpoint")
    return f"{bucket}/run/checkpoint"


VERBS = {
    "check": ("check", "AT", "--data"),
    "verify": ("verify", "AT", "--data"),
    "diff": ("diff", "AT", CASE),
    "salvage": ("salvage", "AT", "NEW"),
    "migrate": ("migrate", "AT", "NEW", "--to", "bin", "--allow-damage"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_at_any_request_is_survived_or_said(
    verb: str, proxy: Proxy, url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(
        choose: Callable[[int], str | None], patience: Patience = PATIENT
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(stores, "PATIENCE", patience)
        proxy.asked.clear()
        proxy.choose = lambda number, method, path: choose(number)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        words = [
            url if word == "AT" else tmp_path / "new" if word == "NEW" else word
            for word in VERBS[verb]
        ]
        return said(*words)

    good = result(lambda number: None)
    assert good[0] in (0, 1)
    written = _content(tmp_path / "new")
    count = len(proxy.asked)
    assert count >= 3
    for kind, at in sampled([(kind, at) for kind in PASSING for at in range(count)]):
        assert result(at_once(kind, at), HASTY if kind == "late" else PATIENT) == good, (kind, at)
        assert _content(tmp_path / "new") == written
    for kind, at in sampled([(kind, at) for kind in LASTING for at in range(count)]):
        status, out, err = result(from_then_on(kind, at))
        # A fault at a request that nobody makes, or that asks nothing.
        if (status, out, err) != good:
            assert status == 3, (kind, at, out, err)
            assert "s3://" in err, (kind, at, err)
            assert "next: " in err, (kind, at, err)
            assert not (tmp_path / "new").exists(), "a result without all of its source"


def test_a_fault_at_any_request_of_a_scrub_is_survived_or_said(
    proxy: Proxy, bucket: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is clean that was not read, neither in this run nor in the next one, which goes by
    the state.
    """
    monkeypatch.setattr("ckptfix.cli.scrub.threads_for", lambda paths: 1)
    runs = tmp_path / "runs"
    for name in ("run_1", "run_2"):
        assert seal(shutil.copytree(CLEAN, runs / name)).status == 0
    data = bytearray((runs / "run_2" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (runs / "run_2" / "model.safetensors").write_bytes(data)
    url = f"{bucket}/runs"
    upload_folder(runs, url)
    state = tmp_path / "state.sqlite"

    def scrubbed(*options: object) -> tuple[int, dict[str, tuple[Any, ...]], str]:
        """Return the status, of each checkpoint its verdict and what was read, now or before, and
        messages.
        """
        status, out, _ = said("scrub", url, "--state", state, "--format", "jsonl", *options)
        documents = [json.loads(line) for line in out.splitlines()]
        ones = [one for one in documents if "path" in one]
        assert all(one["path"].startswith("s3://") for one in ones)
        return status, {Path(one["path"]).name: _in_short(one) for one in ones}, str(documents)

    def result(
        choose: Callable[[int], str | None], patience: Patience = PATIENT
    ) -> tuple[int, dict[str, tuple[Any, ...]], str]:
        monkeypatch.setattr(stores, "PATIENCE", patience)
        state.unlink(missing_ok=True)
        proxy.asked.clear()
        proxy.choose = lambda number, method, path: choose(number)
        return scrubbed()

    status, good, _ = result(lambda number: None)
    assert (status, [one[0] for one in good.values()]) == (1, ["clean", "damaged"])
    count = len(proxy.asked)
    assert count == 1 + 2 * 4, proxy.asked
    for kind, at in sampled([(kind, at) for kind in PASSING for at in range(count)]):
        patience = HASTY if kind == "late" else PATIENT
        assert result(at_once(kind, at), patience)[:2] == (1, good), (kind, at)
    for kind, at in sampled([(kind, at) for kind in LASTING for at in range(count)]):
        status, found, documents = result(from_then_on(kind, at))
        for name, one in found.items():
            assert one == good[name] or one[0] in ("failed", "not finished"), (kind, at, name)
        if found != good:  # a fault at a request that asks nothing leaves all as it is
            assert status == 3, (kind, at)
            assert "next: " in documents, (kind, at)
        proxy.choose = lambda number, method, path: None
        status, found, _ = scrubbed("--max-age", "1d")
        assert (status, found) == (1, good), (kind, at, "in the next run")


def _in_short(one: dict[str, Any]) -> tuple[Any, ...]:
    if "error" in one:
        return ("failed",)
    data = one["data"]
    return one["verdict"], list(one["differences"]), data["read"] + data["before"], data["files"]


def at_once(kind: str, at: int) -> Callable[[int], str | None]:
    """Choose one request."""
    return lambda number: kind if number == at else None


def from_then_on(kind: str, at: int) -> Callable[[int], str | None]:
    """Choose a request, and all that follow."""
    return lambda number: kind if number >= at else None


def _content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("migrated.json", "manifest.json")
    }


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("expired", "the credential has expired; next: renew it"),
        (
            "denied",
            "this credential is not allowed to do this (ListObjectsV2); next: aws sts get-caller-identity",
        ),
        ("503", "503 SlowDown"),
        ("gone", "the store failed to answer 3 times"),
    ],
)
def test_what_lasts_is_named_with_the_next_step(
    fault: str, words: str, proxy: Proxy, url: str, said: Said
) -> None:
    proxy.choose = lambda number, method, path: fault if number else None
    status, out, err = said("check", url)
    assert (status, out) == (3, "")
    assert words in err
    assert url in err
    assert "not-a-secret" not in err
    proxy.choose = lambda number, method, path: fault
    with pytest.raises(StoreError):
        open_store(url).list()


def test_a_stale_listing_is_noticed(proxy: Proxy, url: str, said: Said) -> None:
    """An object that was written again after it was listed is never read as the old one."""
    real = open_store(url)
    key = "model.safetensors"

    def choose(number: int, method: str, path: str) -> None:
        if key in path and "list-type" not in path and method == "GET" and not replaced:
            real.put(key, b"another object, of another size")
            # Only now: where a busy machine lost the write, the client asks again.
            replaced.append(path)

    replaced: list[str] = []
    proxy.choose = choose
    status, out, err = said("check", url)
    assert (status, out) == (3, "")
    assert f"{url}/{key} changed while it was read: a save may be running" in err


def test_a_write_whose_answer_was_lost_is_not_taken_for_anothers(proxy: Proxy, bucket: str) -> None:
    """The request arrives, its answer does not: what is there then is our own object."""
    store = open_store(f"{bucket}/x")
    lost: list[int] = []
    answer = proxy.server.RequestHandlerClass.answer  # type: ignore[attr-defined]

    def silent(self: object, *arguments: object, **words: object) -> None:
        if lost:
            lost.pop()
            self.close_connection = True  # type: ignore[attr-defined]
            return
        answer(self, *arguments, **words)

    proxy.server.RequestHandlerClass.answer = silent  # type: ignore[attr-defined]
    lost.append(1)
    info = store.put("a", b"ours", expected=stores.ABSENT)
    assert store.read("a", 0, 4, etag=info.etag) == b"ours"
    with pytest.raises(ChangedError):
        store.put("a", b"theirs", expected=stores.ABSENT)


def test_a_file_that_nobody_reads_may_fail(proxy: Proxy, url: str, said: Said) -> None:
    """Only what a verb reads by itself counts: the ends of other files in the folder are read on
    the chance.
    """
    open_store(url).put("events.out.tfevents.1", b"log" * 100)
    good = said("check", url)
    proxy.choose = lambda number, method, path: "denied" if "tfevents" in path else None
    assert said("check", url) == good
    assert good[0] == 1

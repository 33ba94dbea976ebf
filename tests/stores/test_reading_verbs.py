"""Verbs that read: of a URL they find, print and return what they do of the same folder on this
machine.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from ckptfix.storage import stores
from ckptfix.storage.stores import Store
from tests.commanding import Said, said
from tests.sampling import sampled
from tests.stores.servers import QUICK, bucket, ministack, ministack_process, upload_folder

__all__ = ["bucket", "ministack", "ministack_process", "said"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = sorted(path for path in (FIXTURES / "golden").iterdir())
REAL = sorted(
    path for path in FIXTURES.glob("accelerate-1.15.0/*") if (path / "checkpoint").is_dir()
) + sorted(FIXTURES.glob("deepspeed-*/*"))


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new prefix in the memory of this process."""
    monkeypatch.setattr(stores, "PATIENCE", QUICK)
    return f"memory://{os.urandom(6).hex()}"


def prepared(source: Path, folder: Path, url: str) -> Store:
    """Copy a checkpoint to a folder and to a URL, with the same times."""
    shutil.copytree(source, folder)
    store = upload_folder(folder, url)
    for key, info in store.list().items():
        os.utime(folder / key, ns=(info.modified_ns, info.modified_ns))
    return store


SPARED = "local headers of records"


def without_spared(out: str, form: str) -> str:
    """Return a report without the checks that only a store is spared: a request for each record or
    item.
    """
    if form == "text":
        # Of many topics it is the one behind "and 1 more".
        return re.sub(
            rf"(not checked: (structure: )?{SPARED}[^\n]*\n|, {SPARED}[^;]*| and 1 more(?=; for))",
            "",
            out,
        )
    document = json.loads(out)
    for report in [document, *document.get("checkpoints", ())]:
        if "not_checked" in report:
            report["not_checked"] = [
                words for words in report["not_checked"] if SPARED not in str(words)
            ]
        if "counts" in report:
            report["counts"]["not_checked"] = len(report["not_checked"])
    return json.dumps(document)


def same(said: Said, folder: Path, url: str, *arguments: object) -> int:
    """Run a verb on the folder and on the URL, in text and JSON, and compare; return the exit
    status.
    """
    status = 0
    for form in ("text", "json"):
        words = [*arguments, "--format", form]
        status, out, err = said(*(folder if word == "AT" else word for word in words))
        mine = (
            status,
            without_spared(out.replace(str(folder), url), form),
            err.replace(str(folder), url),
        )
        status, out, err = said(*(url if word == "AT" else word for word in words))
        assert (status, without_spared(out, form), err) == mine
    return status


@pytest.mark.parametrize(
    "case", sampled([*GOLDEN, *REAL]), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_a_url_is_as_good_as_a_folder(
    case: Path, tmp_path: Path, in_memory: str, said: Said
) -> None:
    source = case / "checkpoint" if (case / "checkpoint").is_dir() else case
    folder, url = tmp_path / "checkpoint", f"{in_memory}/checkpoint"
    prepared(source, folder, url)
    same(said, folder, url, "check", "AT")
    same(said, folder, url, "check", "--data", "AT")
    same(said, folder, url, "check", "-r", "AT")
    same(said, folder, url, "verify", "--data", "AT")
    shutil.copytree(folder, tmp_path / "other")
    same(said, folder, url, "diff", "AT", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled([*GOLDEN, *REAL]), ids=lambda path: path.name)
def test_an_s3_server_is_as_good_as_a_folder(
    case: Path, tmp_path: Path, bucket: str, said: Said
) -> None:
    source = case / "checkpoint" if (case / "checkpoint").is_dir() else case
    folder, url = tmp_path / "my runs" / "checkpoint", f"{bucket}/my runs/checkpoint"
    prepared(source, folder, url)
    shutil.copytree(folder, tmp_path / "other")
    for words in (["check", "AT"], ["diff", "AT", tmp_path / "other"]):
        same(said, folder, url, *words)


def test_a_copy_among_the_files_of_ranks_in_a_store(
    tmp_path: Path, in_memory: str, said: Said
) -> None:
    source = Path(
        shutil.copytree(FIXTURES / "deepspeed-0.18.2/zero2/checkpoint", tmp_path / "source")
    )
    own = min((source / "pytorch_model").glob("*_optim_states.pt"))
    shutil.copyfile(own, own.with_name(f"Copy of {own.name}"))
    folder, url = tmp_path / "checkpoint", f"{in_memory}/checkpoint"
    prepared(source, folder, url)
    assert same(said, folder, url, "check", "AT") == 0

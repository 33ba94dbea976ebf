"""Print every ratio that the manual promises, from one run: ``python -m tests.benchmarks.run
[--quick]``.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.benchmarks.checking import check
from tests.benchmarks.checking_saves import check_saves
from tests.benchmarks.digesting import digest
from tests.benchmarks.fleets import scrub_fleets
from tests.benchmarks.migrating import migrate, migrate_mix
from tests.benchmarks.migrating_states import migrate_states
from tests.benchmarks.proving import prove
from tests.benchmarks.renaming import rename, sparse
from tests.benchmarks.repairing_objects import repair_objects
from tests.benchmarks.saving import save_against_stock, save_with_digests
from tests.benchmarks.sharing import share
from tests.benchmarks.signing import sign
from tests.benchmarks.storing import store_checks
from tests.benchmarks.tolerant_loading import load_against_stock
from tests.benchmarks.transferring import transfer


def main() -> None:
    """Make the files, measure, print, and delete the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="1 GiB instead of 8 and 4, fewer rounds"
    )
    parser.add_argument(
        "--folder",
        default=".",
        help="where the files go, made if missing; 44 GB are needed, 6 GB with --quick",
    )
    parser.add_argument(
        "--part",
        choices=(
            "check",
            "check-saves",
            "digests",
            "fleets",
            "loads",
            "migrate",
            "mix",
            "states",
            "rename",
            "prove",
            "ranks",
            "saves",
            "sign",
            "stores",
            "object-repairs",
            "transfer",
        ),
        help="one part only",
    )
    options = parser.parse_args()
    if options.part == "transfer":
        transfer()
        return
    if options.part == "stores":
        store_checks(quick=options.quick)
        return
    try:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder {options.folder}: {error.strerror}")
    need = (6 if options.quick else 44) << 30
    if shutil.disk_usage(options.folder).free < need:
        parser.error(f"{options.folder} has less than {need >> 30} GiB free")
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=options.folder) as name:
        folder = Path(name)
        if options.part in (None, "check"):
            check(folder)
        if options.part in (None, "check-saves"):
            check_saves(folder)
        if options.part in (None, "rename"):
            sparse(folder)
            rename(folder, (1 if options.quick else 8) << 30)
        if options.part in (None, "digests"):
            digest(folder, (1 if options.quick else 4) << 29, 7)
        if options.part in (None, "migrate"):
            migrate(folder, (1 if options.quick else 2) << 30, 2 if options.quick else 3)
        if options.part in (None, "mix"):
            migrate_mix(folder, (2 if options.quick else 20) << 30)
        if options.part in (None, "states"):
            migrate_states(folder, (1 if options.quick else 4) << 28, 2 if options.quick else 3)
        if options.part in (None, "ranks"):
            share(folder, (2 if options.quick else 4) << 30, 3 if options.quick else 5)
        if options.part in (None, "prove"):
            prove(folder, (1 if options.quick else 4) << 30, 2 if options.quick else 3)
        if options.part in (None, "sign"):
            sign(folder, 1 << 30, 3)
        if options.part in (None, "saves"):
            save_against_stock(folder)
            save_with_digests(folder, 5 << 27, 5)
        if options.part in (None, "loads"):
            load_against_stock(folder)
        if options.part in (None, "fleets"):
            scrub_fleets(folder, 10_000 if options.quick else 100_000)
        if options.part in (None, "object-repairs"):
            repair_objects(folder, (256 << 20) if options.quick else (2 << 30))
    if options.part is None:
        transfer()
        store_checks(quick=options.quick)


if __name__ == "__main__":
    main()

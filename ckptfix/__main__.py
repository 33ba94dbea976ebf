"""``python -m ckptfix``, and the command ``ckptfix``."""

import os
import signal
import sys


def main() -> None:
    """Run the command line; an interrupt during the imports waits until there is somebody to report
    it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _open_standard_streams()
    from ckptfix.cli import main as run

    run()


def _open_standard_streams() -> None:
    """Open the null device where a standard stream is closed (``>&-``).

    Otherwise the next file that is opened, which may be a checkpoint's, gets that number and what
    is printed to it; and python has no ``sys.stdout`` then.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()

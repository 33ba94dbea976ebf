"""``python -m ckptfix``, and the command ``ckptfix``."""

import signal


def main() -> None:
    """Run the command line; an interrupt during the imports waits until there is somebody to report it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from ckptfix.cli import main as run

    run()


if __name__ == "__main__":
    main()

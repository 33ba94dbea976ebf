"""``python -m ckptfix``."""

from ckptfix.cli import main

main()

"""One line a figure: what, how much, the limit, and whether it holds."""


def show(what: str, figure: str, limit: str, holds: bool) -> None:
    """Print a figure beside its limit. Nothing fails: timings depend on the machine."""
    print(f"{what:58} {figure:58} limit {limit:9} {'holds' if holds else 'MISSED'}", flush=True)

"""All ranks load, or none: what each found is told to the others before anything is modified."""

from typing import Any

from accelerate.utils import gather_object

from ckptfix.runtime.loading.draft import Draft
from ckptfix.runtime.loading.policy import Part
from ckptfix.runtime.loading.report import LoadError

Outline = tuple[tuple[str, str, tuple[str, ...], tuple[int, ...]], ...]

_OF_A_RANK = (Part.RNG, Part.STEP, Part.DATALOADERS)


def agree(accelerator: Any, error: BaseException | None, outline: Outline = ()) -> None:
    """Raise on every rank when any rank failed, or when ranks would load different things.

    Every rank must call it, failed or not. A rank's own error is raised as it is, others see a LoadError that names the
    rank.
    """
    rank = accelerator.process_index
    if accelerator.num_processes > 1:
        own = None if error is None else f"{type(error).__name__}: {error}"
        modified = bool(getattr(error, "modified", False))
        everyone = gather_object([(rank, own, modified, outline)])
        if error is not None:
            raise error
        failed = [(other, text) for other, text, _, _ in everyone if text is not None]
        if failed:
            more = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise LoadError(
                f"rank {failed[0][0]} failed{more}, so rank {rank} stops too: {failed[0][1]}",
                modified=any(flag for _, _, flag, _ in everyone),
            )
        for other, _, _, theirs in everyone:
            if theirs != everyone[0][3]:
                raise LoadError(
                    f"rank {other} would load something else than rank {everyone[0][0]}: "
                    f"{_first_difference(everyone[0][3], theirs)}; do all ranks see the same folder?"
                )
    elif error is not None:
        raise error


def outline(draft: Draft) -> Outline:
    """Return what must be the same on every rank: component, status, files and their sizes in bytes."""
    sizes = {str(member.path): member.size for entry in draft.used for member in entry.members}
    return tuple(
        (report.name, report.status.value, report.files, tuple(sizes.get(name, 0) for name in report.files))
        for report in draft.report().components
        if report.part not in _OF_A_RANK
    )


def _first_difference(one: Outline, other: Outline) -> str:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return f"{left} against {right}"
    return f"{len(one)} components against {len(other)}"

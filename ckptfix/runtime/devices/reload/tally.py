"""Counting what was proven of many tensors, and putting it into one or two lines."""

from dataclasses import dataclass, field

from ckptfix.runtime.devices.reload.report import Outcome, Proof, Subject
from ckptfix.wording import count_of, human_size, list_names

_SHOWN = 3


@dataclass(slots=True, kw_only=True)
class Tally:
    """Tensors that went one way: how many arrived with equal bytes, which did not, and which were not sent, and why.

    ``what``: the way, in words. ``converted``: how many of the right ones are held in a wider dtype than the file's.
    ``wrong``: a sentence for each tensor that failed.
    """

    subject: Subject
    what: str
    is_transfer: bool = False
    right: int = 0
    converted: int = 0
    nbytes: int = 0
    wrong: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def arrived(self, nbytes: int, *, converted: bool = False) -> None:
        """Count a tensor that is equal in every byte, or was converted first and is then equal."""
        self.right += 1
        self.converted += converted
        self.nbytes += nbytes

    def differs(self, name: str, what: object) -> None:
        """Count a tensor that is not."""
        self.wrong.append(f"{name!r}: {what}")

    def skip(self, name: str, reason: str) -> None:
        """Count a tensor that could not be sent."""
        self.skipped.setdefault(reason, []).append(name)

    def proofs(self) -> list[Proof]:
        """Return a line for what failed, or else what arrived, and one for what was not sent."""
        found = []
        total = self.right + len(self.wrong)
        if self.wrong:
            some = "; ".join(self.wrong[:_SHOWN])
            more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
            text = f"{self.what}: {len(self.wrong)} of {count_of(total, 'tensor')} differ: {some}{more}"
            found.append(self._proof(Outcome.FAILED, text))
        elif total:
            text = f"{self.what}: {count_of(total, 'tensor')} ({human_size(self.nbytes)}), {self._how()}"
            found.append(self._proof(Outcome.PROVEN if self.nbytes else Outcome.NOT_EXERCISED, text))
        for reason, names in self.skipped.items():
            text = f"{self.what}: {count_of(len(names), 'tensor')} ({list_names(names)}): {reason}"
            found.append(self._proof(Outcome.NOT_EXERCISED, text))
        return found

    def _how(self) -> str:
        if not self.nbytes:
            return "without an element: no byte could differ"
        if not self.converted:
            return "equal in every byte"
        if self.converted == self.right:
            return "converted to a wider dtype"
        return f"{self.converted} converted to a wider dtype, the others equal in every byte"

    def _proof(self, outcome: Outcome, text: str) -> Proof:
        return Proof(subject=self.subject, outcome=outcome, text=text, is_transfer=self.is_transfer)

"""Models of the process that accelerate does not know: what cannot be listed ends no script."""

import torch

from ckptfix.training.resume_proofs.recorded_values import digests_of_unprepared


class Bare(torch.nn.Module):  # type: ignore[misc]
    """A module whose class does not call ``super().__init__()``."""

    def __init__(self) -> None:
        pass


class Kept(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.later = torch.nn.LazyLinear(2)


def digest(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def test_modules_without_tensors_to_list_are_left_out() -> None:
    alive = [Kept(), Bare(), torch.nn.LazyLinear(2), torch.nn.Module.__new__(Kept)]
    digests = digests_of_unprepared((), set(), digest)
    assert digests["weight of Kept"] == "(2,)"
    assert not [name for name in digests if "later" in name or name.endswith("of Bare")]
    assert len(alive) == 4

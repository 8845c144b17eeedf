"""What the other examples share: they compare what the ranks do together with what one process does."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collective_strategy.collectives import Collective


def near_even(length: int, parts: int) -> list[int]:
    """Lengths that differ by one at most, the longer ones first: 7 in 3 parts is [3, 2, 2]."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def largest_difference(collective: Collective, ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """Of any element of any of the tensors on any rank. All ranks call it."""
    differences = [torch.zeros(1, dtype=torch.float64)]
    for mine, right in zip(ours, theirs, strict=True):
        assert mine is not None, "a gradient is missing"
        assert right is not None, "a gradient is missing"
        assert mine.shape == right.shape, f"shape {list(mine.shape)} instead of {list(right.shape)}"
        differences.append((mine - right).detach().abs().flatten())
    return collective.all_reduce(torch.cat(differences).max(), "max").item()


def report(collective: Collective, title: str, differences: Mapping[str, float], tolerance: float) -> None:
    """Prints the differences on the first rank; ends all ranks with an error if one is too large."""
    if collective.global_rank == 0:
        print(f"{title}: {collective.world_size} ranks and one process, largest difference (allowed {tolerance:.0e})")
        for what, difference in differences.items():
            print(f"  {what:<42} {difference:.1e}")
    if not all(difference <= tolerance for difference in differences.values()):
        raise SystemExit("The ranks together do not do what one process does.")

"""What `verify` found."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from collective_strategy.collectives.errors import CollectiveError

_SHOWN = 20


@dataclass(frozen=True)
class ReplicaDifference:
    """One tensor whose copies differ.

    Attributes:
        name: Qualified name.
        kind: ``"parameter"``, ``"buffer"`` or ``"optimizer state"``.
        axes: The axes along which copies differ.
        reference: Global ranks whose values count as right: the most, then the first ones.
        ranks: Global ranks that hold something else.
        largest: The largest absolute difference; infinite if only one side is finite.
        elements: How many elements differ on the rank where most do.
        shape: Of the tensor.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    reference: tuple[int, ...]
    ranks: tuple[int, ...]
    largest: float
    elements: int
    shape: tuple[int, ...]

    def including(self, rank: int, largest: float, elements: int) -> ReplicaDifference:
        """With one more rank that differs."""
        return replace(
            self,
            ranks=(*self.ranks, rank),
            largest=max(self.largest, largest),
            elements=max(self.elements, elements),
        )

    def __str__(self) -> str:
        what = "buffer " if self.kind == "buffer" else ""
        over = f"over {'axis' if len(self.axes) == 1 else 'axes'} {', '.join(self.axes)}"
        size = f"at most {self.largest:.3g}" if self.largest else "the sign of zero"
        return (
            f"{what}{self.name} differs {over}: {_ranks(self.ranks)} from {_ranks(self.reference)} by {size} in "
            f"{self.elements} of {math.prod(self.shape)} elements"
        )


@dataclass(frozen=True)
class ReplicaReport:
    """The outcome of a comparison, equal on all ranks but for ``not_finite``, ``tensors`` and ``nbytes``.

    Attributes:
        differences: What differed.
        not_finite: Parameters of this rank with NaN or infinities.
        tensors: How many tensors of this rank were compared.
        nbytes: Their size.
        repaired: Whether the differences were mended.
    """

    differences: tuple[ReplicaDifference, ...]
    not_finite: tuple[str, ...]
    tensors: int
    nbytes: int
    repaired: bool

    @property
    def ok(self) -> bool:
        """Whether all copies were equal."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            lines = [f"All copies are equal: {self.tensors} tensors, {self.nbytes:,} bytes."]
        else:
            many = len(self.differences)
            done = ", and now hold the values of the ranks named last:" if self.repaired else ":"
            lines = [f"{many} tensor{'s' if many > 1 else ''} had copies that differ{done}"]
            lines += [f"  {difference}" for difference in self.differences[:_SHOWN]]
            if many > _SHOWN:
                lines.append(f"  ... and {many - _SHOWN} more")
        if self.not_finite:
            shown = ", ".join(self.not_finite[:5]) + (", ..." if len(self.not_finite) > 5 else "")
            lines.append(f"Not all values are finite in: {shown}.")
        return "\n".join(lines)


class ReplicaDriftError(CollectiveError):
    """Copies that must be equal are not. Raised alike on all ranks; ``report`` has the data."""

    def __init__(self, report: ReplicaReport) -> None:
        self.report = report
        super().__init__(
            f"{report}\nTraining with them would go on with several models at once. Something changed them on some "
            "ranks only: a weight written by hand, a mark that is missing or says 'none' where gradients differ "
            "(see audit()), a checkpoint loaded on one rank, or arithmetic that is not deterministic. "
            "verify(repair=True) makes the copies equal again."
        )

    def __reduce__(self) -> tuple[type[ReplicaDriftError], tuple[ReplicaReport]]:
        return type(self), (self.report,)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""What the reducer did."""

from dataclasses import dataclass, field


@dataclass
class ReducerStatistics:
    """What the reducer did, for tests, benchmarks and curious users.

    Attributes:
        reductions: Backward passes whose gradients were reduced.
        all_reduces: All-reduces sent by backwards: one per bucket, and a small one per group for flags. From a change
            of the model on (layers frozen, unfrozen, replaced), a backward has one more, a comparison of the plans that
            the ranks chose, until none of them has taken another plan for 100 backwards.
        agreements: Comparisons of the parameters over all ranks, the one at construction included.
        launched_by: For the last backward: how many gradient hooks had fired when each bucket was launched.
        hooks: For the last backward: how many gradient hooks fired in all.
    """

    reductions: int = 0
    all_reduces: int = 0
    agreements: int = 0
    launched_by: list[int] = field(default_factory=list)
    hooks: int = 0

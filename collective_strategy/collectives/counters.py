"""What was communicated: calls, bytes and waiting time by operation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Count:
    """Totals of one operation on one collective, on this rank.

    ``bytes`` is the size of this rank's input; ``seconds`` the time spent waiting for other ranks.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Counters:
    """Totals by operation name; always on."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = defaultdict(Count)

    def count(self, operation: str, nbytes: int) -> None:
        """Adds a call."""
        entry = self._counts[operation]
        entry.calls += 1
        entry.bytes += nbytes

    def waited(self, operation: str, seconds: float) -> None:
        """Adds waiting time."""
        self._counts[operation].seconds += seconds

    def __getitem__(self, operation: str) -> Count:
        return self._counts.get(operation, Count())

    def as_dict(self) -> dict[str, Count]:
        """A copy, operation to totals."""
        return {name: Count(entry.calls, entry.bytes, entry.seconds) for name, entry in self._counts.items()}

    def reset(self) -> None:
        """Sets everything to zero."""
        self._counts.clear()

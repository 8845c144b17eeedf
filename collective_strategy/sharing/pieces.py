"""Which slice of a whole tensor a piece is: arithmetic only, nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

import torch
from torch import Tensor

Span = tuple[int, int]
"""A run of entries along one dim of the whole: first one and length."""


def even_cut(length: int, pieces: int) -> list[int]:
    """Lengths of nearly equal pieces, the longer ones first, as `torch.tensor_split` cuts.

    Example:
        >>> even_cut(7, 2)
        [4, 3]
    """
    small, longer = divmod(length, pieces)
    return [small + (k < longer) for k in range(pieces)]


def spans_of_pieces(lengths: Sequence[int], parts: Sequence[int] | None = None) -> list[tuple[Span, ...]]:
    """For each piece, the runs of the whole that it is made of, in the order in which the piece holds them.

    Args:
        lengths: The pieces' lengths along the dim that is cut, in rank order; they need not be equal.
        parts: Lengths of parts of the whole that were cut one by one, each nearly evenly; a piece is the join of its
            share of every part.

    Raises:
        ValueError: the shares of the parts do not have the pieces' lengths.

    Example:
        >>> spans_of_pieces([4, 3])
        [((0, 4),), ((4, 3),)]
        >>> spans_of_pieces([4, 4], parts=[4, 4])
        [((0, 2), (4, 2)), ((2, 2), (6, 2))]
    """
    count = len(lengths)
    cuts = [list(lengths)] if parts is None else [even_cut(part, count) for part in parts]
    expected = [sum(cut[k] for cut in cuts) for k in range(count)]
    if expected != list(lengths):
        raise ValueError(
            f"the pieces are {list(lengths)} long, but parts={list(parts or ())} cut into {count} pieces each give"
            f" {expected}"
        )
    starts = [0, *accumulate(sum(cut) for cut in cuts)]
    result: list[tuple[Span, ...]] = []
    for k in range(count):
        runs = [(start + sum(cut[:k]), cut[k]) for start, cut in zip(starts, cuts, strict=False)]
        result.append(tuple(run for run in runs if run[1]))
    return result


@dataclass(frozen=True)
class Place:
    """Where a piece lies in the whole.

    Attributes:
        whole: Shape of the whole.
        spans: The runs by dim, for the dims that are cut. A dim that is not named is there in full.
    """

    whole: tuple[int, ...]
    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(sum(length for _, length in self._runs(dim)) for dim in range(len(self.whole)))

    def _runs(self, dim: int) -> tuple[Span, ...]:
        return self.spans.get(dim, ((0, self.whole[dim]),))

    def overlaps(self, other: Place) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The boxes that this piece and another one of the same whole have in common: slices of this and of that."""
        by_dim = [_common(self._runs(dim), other._runs(dim)) for dim in range(len(self.whole))]
        for box in product(*by_dim):
            yield tuple(mine for mine, _ in box), tuple(theirs for _, theirs in box)


def copy_overlap(source: Tensor, source_place: Place, target: Tensor, target_place: Place) -> int:
    """Copies what two pieces of one whole have in common; returns how many elements that were."""
    count = 0
    with torch.no_grad():
        for mine, theirs in source_place.overlaps(target_place):
            part = source[mine]
            target[theirs] = part
            count += part.numel()
    return count


def _common(runs: Sequence[Span], others: Sequence[Span]) -> list[tuple[slice, slice]]:
    result = []
    here = 0
    for start, length in runs:
        there = 0
        for other_start, other_length in others:
            low, high = max(start, other_start), min(start + length, other_start + other_length)
            if low < high:
                mine, theirs = here + low - start, there + low - other_start
                result.append((slice(mine, mine + high - low), slice(theirs, theirs + high - low)))
            there += other_length
        here += length
    return result

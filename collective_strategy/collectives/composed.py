"""Primitives built from other primitives, for backends that lack them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.collectives.operations import ReduceOp

if TYPE_CHECKING:
    from collective_strategy.collectives.base import CollectiveBase


def composed_reduce_scatter(collective: CollectiveBase, x: Tensor, op: ReduceOp) -> Handle:
    """An all_reduce of which each rank keeps its own entry."""
    return CompletedHandle(collective._all_reduce(x, op).wait()[collective.rank].clone())


def composed_all_to_all(collective: CollectiveBase, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
    """An all_gather of the lengths and one of the pieces, padded to the longest; each rank keeps its own."""
    lengths = torch.tensor(list(out), dtype=torch.int64, device=x.device)
    table = collective._all_gather(lengths).wait().tolist()
    longest = max(sum(row) for row in table)
    padded = x if x.numel() == longest else torch.cat([x, x.new_zeros(longest - x.numel())])
    gathered = collective._all_gather(padded).wait()
    pieces = []
    for rank, row in enumerate(table):
        start = sum(row[: collective.rank])
        pieces.append(gathered[rank, start : start + into[rank]])
    return CompletedHandle(torch.cat(pieces))

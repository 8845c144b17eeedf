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


def composed_permute(collective: CollectiveBase, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Handle:
    """An all_to_all in which a rank has at most one piece to send."""
    rank, n = collective.rank, x.numel()
    target, source = dict(pairs).get(rank), {to: by for by, to in pairs}.get(rank)
    out = [n if peer == target else 0 for peer in range(collective.world_size)]
    into = [n if peer == source else 0 for peer in range(collective.world_size)]
    handle = collective._all_to_all(x[: sum(out)], out, into)
    return handle if source is not None else _Instead(handle, x)


class _Instead(Handle):
    """Zeros like ``x`` when an operation is done that brings nothing."""

    def __init__(self, handle: Handle, x: Tensor) -> None:
        self._handle, self._like = handle, x

    def wait(self) -> Tensor:
        self._handle.wait()
        return torch.zeros_like(self._like)

    def is_completed(self) -> bool:
        return self._handle.is_completed()


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

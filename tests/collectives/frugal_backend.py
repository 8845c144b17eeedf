"""A backend that has the least it may have: three operations, few dtypes, sums and maxima, nothing asynchronous."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from collective_strategy.collectives import (
    Capabilities,
    CompletedHandle,
    Handle,
    ReduceOp,
    TorchDistributedCollective,
)
from collective_strategy.collectives.composed import composed_all_to_all, composed_reduce_scatter

_MOVED = frozenset({torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
_REDUCED = frozenset({torch.int64, torch.float32})


class FrugalCollective(TorchDistributedCollective):
    """Composes reduce_scatter and all_to_all; gathers and folds what it cannot reduce."""

    backend_name = "frugal"
    _all_to_all = composed_all_to_all  # type: ignore[assignment]
    _reduce_scatter = composed_reduce_scatter  # type: ignore[assignment]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            movement_dtypes=_MOVED,
            reduction_dtypes={ReduceOp.SUM: _REDUCED, ReduceOp.MAX: _REDUCED},
            device_types=frozenset({"cpu"}),
            primitives=frozenset({"all_reduce", "broadcast", "all_gather", "barrier"}),
            asynchronous=False,
        )

    def _barrier(self) -> Handle:
        dist.barrier(self._group)
        return CompletedHandle(torch.empty(0))

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        assert x.is_contiguous(), "primitives get contiguous tensors"
        assert x.dtype in self.capabilities.reduction_dtypes[op], f"{op} of {x.dtype} is not declared"
        return CompletedHandle(super()._all_reduce(x, op).wait().clone())

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        assert x.is_contiguous(), "primitives get contiguous tensors"
        assert x.dtype in _MOVED, f"{x.dtype} is not declared"
        assert 0 <= src < self.world_size
        return CompletedHandle(super()._broadcast(x, src).wait().clone())

    def _all_gather(self, x: Tensor) -> Handle:
        assert x.is_contiguous(), "primitives get contiguous tensors"
        assert x.dtype in _MOVED, f"{x.dtype} is not declared"
        before = x.clone()
        gathered = super()._all_gather(x).wait()
        assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(before))
        return CompletedHandle(gathered)

    def _send(self, x: Tensor, dst: int) -> Handle:
        raise AssertionError("send is not declared")

    def _recv(self, x: Tensor, src: int) -> Handle:
        raise AssertionError("recv is not declared")

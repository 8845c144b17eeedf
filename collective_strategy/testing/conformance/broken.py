"""Backends with one fault each, and the check that must find it: the proof that the checks can fail.

Each is torch.distributed with a primitive, or in the end a public method, done wrong in a way that somebody once did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collective_strategy.collectives import (
    Capabilities,
    Collective,
    CompletedHandle,
    Handle,
    ReduceOp,
    TorchDistributedCollective,
)


class SourceIsGlobal(TorchDistributedCollective):
    """Broadcasts from the rank ``src`` of the whole job."""

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        return super()._broadcast(x, self.ranks.index(src) if src in self.ranks else 0)


class SourceIsAlwaysZero(TorchDistributedCollective):
    """Ignores ``src``."""

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        return super()._broadcast(x, 0)


class GroupIsIgnored(TorchDistributedCollective):
    """Reduces over all ranks, whatever the group."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if op is ReduceOp.SUM:
            dist.all_reduce(x)
            return CompletedHandle(x)
        return super()._all_reduce(x, op)


class InputIsOverwritten(TorchDistributedCollective):
    """Uses a tensor that it was to leave alone as its work space."""

    def _all_gather(self, x: Tensor) -> Handle:
        gathered = super()._all_gather(x).wait()
        x.copy_(gathered[0])
        return CompletedHandle(gathered)


class ResultIsTheInput(TorchDistributedCollective):
    """Saves the copy where there is only one rank."""

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        return CompletedHandle(x) if self.world_size == 1 else super()._all_to_all(x, out, into)


class BufferIsReused(TorchDistributedCollective):
    """Gathers into one buffer again and again."""

    def _all_gather(self, x: Tensor) -> Handle:
        gathered = super()._all_gather(x).wait()
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault((gathered.shape, gathered.dtype), gathered)
        return CompletedHandle(buffer.copy_(gathered))


class OrderIsReversed(TorchDistributedCollective):
    """Gathers the last rank first."""

    def _all_gather(self, x: Tensor) -> Handle:
        return CompletedHandle(super()._all_gather(x).wait().flip(0))


class OrderIsOfArrival(TorchDistributedCollective):
    """Gathers whoever comes first first."""

    def _all_gather(self, x: Tensor) -> Handle:
        clock = torch.tensor(time.monotonic(), dtype=torch.float64)
        order = super()._all_gather(clock).wait().argsort(stable=True)
        return CompletedHandle(super()._all_gather(x).wait()[order])


class ReductionIsMissing(TorchDistributedCollective):
    """Returns the own value as the sum of all."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return CompletedHandle(x)


class ReductionIsDoubled(TorchDistributedCollective):
    """Reduces what was reduced already."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return super()._all_reduce(super()._all_reduce(x, op).wait(), op)


class BarrierIsNone(TorchDistributedCollective):
    """Does not wait."""

    def _barrier(self) -> Handle:
        return CompletedHandle(torch.empty(0))


class MemoryOrderIsSent(TorchDistributedCollective):
    """Sends the bytes as they lie in memory, whatever the strides."""

    def all_gather(self, x: Any, dim: int | None = None, **options: Any) -> Any:
        if isinstance(x, Tensor) and not x.is_contiguous() and x.numel() == x.untyped_storage().nbytes() // x.itemsize:
            x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        return super().all_gather(x, dim, **options)


class IntegersAreNarrowed(TorchDistributedCollective):
    """Sends wide integers as floating point numbers."""

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        if x.dtype is not torch.int64:
            return super()._broadcast(x, src)
        return CompletedHandle(super()._broadcast(x.double(), src).wait().long())


class FloatsAreNarrowed(TorchDistributedCollective):
    """Sums in bfloat16, to save bandwidth, without declaring it."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.dtype is not torch.float32 or op is not ReduceOp.SUM:
            return super()._all_reduce(x, op)
        return CompletedHandle(super()._all_reduce(x.bfloat16(), op).wait().float())


class HalfPrecisionIsSummedAsItIs(TorchDistributedCollective):
    """Brings float32, in which float16 is reduced, back to float16 on the wire."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.dtype is not torch.float32 or not torch.equal(x, x.half().float()):
            return super()._all_reduce(x, op)
        return CompletedHandle(super()._all_reduce(x.half(), op).wait().float())


class PaddingIsKept(TorchDistributedCollective):
    """Pads uneven pieces to the longest and leaves it at that."""

    def all_gather(self, x: Any, dim: int | None = None, *, ragged: bool = False, **options: Any) -> Any:
        pieces = super().all_gather(x, dim, ragged=ragged, **options)
        if not ragged or dim is not None or not isinstance(x, Tensor) or x.ndim == 0:
            return pieces
        longest = max(len(piece) for piece in pieces)
        return [torch.cat([piece, piece.new_zeros(longest - len(piece), *piece.shape[1:])]) for piece in pieces]


class ChunksAreEqual(TorchDistributedCollective):
    """Exchanges chunks of one length, whatever lengths are given."""

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        if len({*out, *into}) == 1:
            return super()._all_to_all(x, out, into)
        rolled = torch.roll(x, 1) if x.numel() else x
        return super()._all_to_all(rolled, out, into)


class MeanIsOfTheWorld(TorchDistributedCollective):
    """Divides by the number of all ranks."""

    def reduce(self, x: Any, op: str = "mean", dst: int | None = None, *, to: str | None = None) -> Any:
        if op != "mean" or not isinstance(x, Tensor) or not x.is_floating_point():
            return super().reduce(x, op, dst, to=to)
        return super().reduce(x, "sum", dst, to=to) / self._root.world_size


class EachChunkIsTheFirst(TorchDistributedCollective):
    """Gives every rank the chunk of rank 0."""

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        return CompletedHandle(super()._all_reduce(x, op).wait()[0].clone())


class RanksDisagree(TorchDistributedCollective):
    """Sums in another order on each rank."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if op is not ReduceOp.SUM:
            return super()._all_reduce(x, op)
        stacked = super()._all_gather(x).wait().roll(self.rank, 0)
        total = stacked[0].clone()
        for term in stacked[1:]:
            total += term
        return CompletedHandle(total * (1 + self.rank * 2**-20) if x.is_floating_point() else total)


class NaNIsLost(TorchDistributedCollective):
    """Treats NaN as a missing value."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return super()._all_reduce(x.nan_to_num_() if x.is_floating_point() else x, op)


class TimeoutIsSwallowed(TorchDistributedCollective):
    """Returns what it has when a rank does not come."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return _Patient(super()._all_reduce(x, op), x)


class _Patient(Handle):
    def __init__(self, handle: Handle, result: Tensor) -> None:
        self._handle = handle
        self._result = result

    def wait(self) -> Tensor:
        try:
            return self._handle.wait()
        except RuntimeError:
            return self._result

    def is_completed(self) -> bool:
        return self._handle.is_completed()


class GradientIsLocal(TorchDistributedCollective):
    """Puts the own tensor back into the gathered ones, so that only it has a gradient."""

    def all_gather(self, x: Any, dim: int | None = None, **options: Any) -> Any:
        if dim is not None or not isinstance(x, Tensor) or not x.requires_grad or options.get("ragged"):
            return super().all_gather(x, dim, **options)
        gathered = super().all_gather(x.detach(), **options)
        gathered[self.rank] = x
        return gathered


class GradientIsAveraged(TorchDistributedCollective):
    """Averages in the backward of a gather, which sums."""

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        return CompletedHandle(super()._reduce_scatter(x, op).wait() / self.world_size)


class HandleDoesNotWait(TorchDistributedCollective):
    """Copies the result of an asynchronous reduction before it is there."""

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        early = x.clone()
        super()._all_reduce(x, op).wait()
        return CompletedHandle(early)


class UsableWhenClosed(TorchDistributedCollective):
    """Does not notice that it was torn down."""

    def _require_usable(self, operation: str) -> None:
        if self._state == "new":
            super()._require_usable(operation)


class TooMuchIsDeclared(TorchDistributedCollective):
    """Declares to sum 16-bit integers, which it does not."""

    @property
    def capabilities(self) -> Capabilities:
        known = super().capabilities
        everywhere = {op: dtypes | {torch.int16} for op, dtypes in known.reduction_dtypes.items()}
        return Capabilities(known.movement_dtypes, everywhere, known.device_types)


BROKEN_BACKENDS: tuple[tuple[type[Collective], str, int], ...] = (
    (SourceIsGlobal, "ranks_count_within_the_group", 4),
    (SourceIsAlwaysZero, "broadcast_from_every_source", 2),
    (GroupIsIgnored, "operations_stay_in_the_group", 4),
    (InputIsOverwritten, "inputs_are_left_alone", 2),
    (ResultIsTheInput, "results_share_no_memory_with_the_input", 1),
    (BufferIsReused, "results_share_no_memory_with_each_other", 2),
    (OrderIsReversed, "all_gather_stacks_in_rank_order", 2),
    (OrderIsOfArrival, "order_is_by_rank_whenever_ranks_arrive", 2),
    (ReductionIsMissing, "all_reduce_of_every_op_and_dtype", 2),
    (ReductionIsDoubled, "every_rank_is_counted_once", 2),
    (BarrierIsNone, "a_barrier_waits_without_check_mode", 2),
    (MemoryOrderIsSent, "strides_do_not_matter", 2),
    (IntegersAreNarrowed, "wide_integers_are_exact", 2),
    (FloatsAreNarrowed, "sums_of_floats_keep_their_precision", 2),
    (HalfPrecisionIsSummedAsItIs, "half_precision_is_reduced_in_float32", 2),
    (PaddingIsKept, "uneven_pieces_come_back_exact", 2),
    (ChunksAreEqual, "all_to_all_exchanges_chunks_of_given_sizes", 2),
    (MeanIsOfTheWorld, "a_mean_divides_by_the_size_of_the_group", 4),
    (EachChunkIsTheFirst, "each_rank_gets_its_own_chunk", 2),
    (RanksDisagree, "reductions_are_equal_on_all_ranks", 2),
    (NaNIsLost, "max_and_min_propagate_nan_and_order_zeros", 2),
    (TimeoutIsSwallowed, "a_missing_rank_ends_the_wait_without_check_mode", 2),
    (GradientIsLocal, "without_to_the_copies_gradients_are_summed", 2),
    (GradientIsAveraged, "gradients_are_adjoints", 2),
    (HandleDoesNotWait, "several_operations_may_be_in_flight", 2),
    (UsableWhenClosed, "operations_after_tear_down_say_so", 2),
    (TooMuchIsDeclared, "all_reduce_of_every_op_and_dtype", 2),
)
"""The backend, the check that must find its fault, and with how many ranks."""

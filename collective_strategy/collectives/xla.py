"""XLA: collectives between the replicas of torch_xla, on TPUs (a process per chip) or CPU devices (threads)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.composed import composed_all_to_all, composed_reduce_scatter
from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.rendezvous import join
from collective_strategy.collectives.side_channel import SideChannel
from collective_strategy.collectives.xla_programs import as_torch_xla_sees_it, own_program
from collective_strategy.collectives.xla_runtime import (
    Replica,
    XLAGenerator,
    import_xla,
    join_launcher,
    refuse_other_size,
    refuse_processes_on_cpus,
    replica_environment,
)

_OPS = {ReduceOp.SUM: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PROD: "mul"}
_REDUCED = frozenset(
    {
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
    }
)  # fmt: skip
_MOVED = _REDUCED | {torch.bool}

Groups = tuple[tuple[int, ...], ...]
T = TypeVar("T")


class XLACollective(Collective):
    """A collective of torch_xla's replicas, made from `torch_xla.core.xla_model`'s operations.

    XLA records operations and runs them as one compiled program, which must be the same on all replicas. So each
    operation here cuts the graph before and after itself: what a rank has pending of its own, such as a value to be
    logged on rank 0, cannot end up in the others' program; and values that differ by rank are uploaded as data. All
    reductions that were started and not waited for become one operation on a list.

    Not every combination of operation and dtype exists in XLA; what does not is gathered and reduced on every rank, or
    moved as bytes, see ``capabilities``.
    """

    backend_name: ClassVar[str] = "xla"
    ranks_in_tests: ClassVar[str] = "device"
    _CAPABILITIES = Capabilities(
        movement_dtypes=_MOVED,
        reduction_dtypes=dict.fromkeys(_OPS, _REDUCED),
        device_types=frozenset({"xla"}),
        primitives=frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"}),
        timeout="aborts",
        asynchronous=False,
        compiles=True,
    )
    _replica: Replica

    def _reset(self) -> None:
        super()._reset()
        self._batch: _Batch | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._CAPABILITIES

    @classmethod
    def launch_environment(cls) -> LaunchEnvironment:
        join_launcher()
        refuse_processes_on_cpus()
        return replica_environment()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _open(self, environment: LaunchEnvironment, settings: str) -> SideChannel | None:
        replica = Replica.current()
        refuse_other_size(environment, replica)
        self._replica = replica
        self._device_setting = replica.device
        if self.world_size == 1:
            return None
        store, second = join(environment, self.timeout, f"backend=xla, {settings}")
        return SideChannel(store, second, "side")

    def _close(self) -> None:
        pass

    def _new_group(self, ranks: tuple[int, ...], partition: Partition, scope: str) -> Any:
        """XLA wants to know the groups of all ranks, not only the own one."""
        return _complete_partition([[self.ranks[r] for r in group] for group in partition.groups()], self.global_size)

    def _require_usable(self, operation: str) -> None:
        super()._require_usable(operation)
        self._replica.require_own_thread(operation)

    @property
    def global_size(self) -> int:
        """Number of replicas of the whole job."""
        return self._root.world_size

    # -- primitives ----------------------------------------------------------------------------------------------------

    def _own_program(self) -> AbstractContextManager[None]:
        return own_program(self._replica.cut)

    def _generators(self) -> list[Any]:
        return [XLAGenerator()]  # not the CPU's: replicas may be threads of one process, which share it

    def _barrier(self) -> Handle:
        def meet() -> Tensor:
            met = self._all_reduced("sum", self._replica.upload([1]))
            self._replica.cut()
            return met.cpu()

        return _Deferred(self, meet)

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.numel() == 0:
            return CompletedHandle(x)
        batch = self._batch
        if batch is None or not batch.takes(self, op):
            batch = self._batch = _Batch(self, op)
        return batch.add(x)

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        if x.numel() == 0:
            return CompletedHandle(x)
        if x.dtype.is_floating_point and _is_even(self._groups):
            return _Deferred(self, lambda own: self._scattered_and_gathered(own, self._replica.upload(src)), x)
        here = self._replica.upload(self.rank == src)
        return _Deferred(self, lambda own: self._all_reduced("sum", self._only(here, _as_number(own))).to(x.dtype), x)

    def _all_gather(self, x: Tensor) -> Handle:
        shape = (self.world_size, *x.shape)
        if x.numel() == 0:
            return CompletedHandle(x.new_empty(shape))
        if not _is_even(self._groups):
            here = self._replica.upload([[rank == self.rank] for rank in range(self.world_size)])

            def placed(own: Tensor) -> Tensor:
                rows = _as_number(own).reshape(1, -1).expand(self.world_size, -1)
                return self._all_reduced("sum", self._only(here, rows)).to(x.dtype).reshape(shape)

            return _Deferred(self, placed, x)
        return _Deferred(self, lambda own: self._all_gathered(own.reshape(1, -1)).reshape(shape), x)

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.numel() == 0:
            return CompletedHandle(x.new_empty(x.shape[1:]))
        if not _is_even(self._groups):
            return composed_reduce_scatter(self, x, op)
        _, xm, _ = import_xla()

        def scatter(own: Tensor) -> Tensor:
            scattered = xm.reduce_scatter(
                _OPS[op], own.reshape(self.world_size, -1), scale=1.0, scatter_dim=0, shard_count=self.world_size,
                groups=self._group_lists, pin_layout=False,
            )  # fmt: skip
            return scattered.reshape(x.shape[1:])

        return _Deferred(self, scatter, x)

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        """All pieces have one length in XLA: that of the longest piece of any rank, to which the others are padded."""
        if not _is_even(self._groups):
            return composed_all_to_all(self, x[: sum(out)], out, into)
        own = torch.tensor([max(out), -min(out)])
        extremes = self._all_reduce(own.to(self.device), ReduceOp.MAX).wait()
        longest, shortest = extremes.tolist()
        shortest = -shortest
        if longest == 0:
            return CompletedHandle(x.new_empty(0))
        if longest != shortest or x.numel() != sum(out):
            longest = 1 << (longest - 1).bit_length()
            x = _picked(x, self._replica.upload(_positions(out, longest, x.numel())))
        handle = _Deferred(self, lambda own: self._all_exchanged(own.reshape(self.world_size, longest)).reshape(-1), x)
        if all(length == longest for length in into):
            return handle
        arrived = handle.wait()
        wanted = torch.cat([torch.arange(length, device="cpu") + rank * longest for rank, length in enumerate(into)])
        # a power of two again, so that few programs are compiled; what follows the pieces means nothing
        padding = (1 << max(0, (wanted.numel() - 1).bit_length())) - wanted.numel()
        wanted = torch.nn.functional.pad(wanted, (0, padding))
        return CompletedHandle(arrived.index_select(0, self._replica.upload(wanted)))

    def _permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Handle:
        """XLA's own among all replicas. It waits for all of them, so groups that do other things would hang."""
        if x.numel() == 0:
            return CompletedHandle(x)
        if len(self._groups) > 1:
            return super()._permute(x, pairs)
        _, xm, _ = import_xla()
        replicas = self._groups[0] if self._groups else range(self.world_size)
        between = [[replicas[source], replicas[target]] for source, target in pairs]
        return _Deferred(self, lambda own: xm.collective_permute(own, between), x)

    def _apart(self, make: Callable[..., T], *inputs: Tensor) -> T:
        """One operation on copies of tensors, between two cuts of the graph."""
        # Functionalization may make a view again behind the cut, which the ranks' graphs then have or lack as their
        # tensors came about, and torch_xla overwrites the tensors of a list behind functionalization's back
        # (https://github.com/pytorch/xla/issues/7174). A copy is no view and has no updates pending.
        copies = [tensor.detach().clone() for tensor in inputs]
        self._replica.cut()
        with as_torch_xla_sees_it():
            result = make(*copies)
            self._replica.cut()
        return result

    # -- the operations of torch_xla -----------------------------------------------------------------------------------

    @property
    def _groups(self) -> Groups:
        groups: Groups = self._group or ()
        return groups

    @property
    def _group_lists(self) -> list[list[int]] | None:
        return [list(group) for group in self._groups] or None

    def _all_reduced(self, op: str, x: Tensor) -> Tensor:
        _, xm, _ = import_xla()
        result: Tensor = xm.all_reduce(op, x, groups=self._group_lists, pin_layout=False)
        return result

    def _only(self, here: Tensor, x: Tensor) -> Tensor:
        """``x`` where this rank is meant, zeros elsewhere; a multiplication would let this rank's NaN through."""
        return torch.where(here, x, torch.zeros_like(x))

    def _scattered_and_gathered(self, x: Tensor, src: Tensor) -> Tensor:
        """A broadcast bit by bit: a sum with zeros would lose the sign of -0.0."""
        n, flat = self.world_size, x.reshape(-1)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % n)).reshape(n, -1)
        chunk = self._all_exchanged(rows).index_select(0, src)
        return self._all_gathered(chunk).reshape(-1)[: flat.numel()].reshape(x.shape)

    def _all_exchanged(self, rows: Tensor) -> Tensor:
        _, xm, _ = import_xla()
        result: Tensor = xm.all_to_all(rows, 0, 0, self.world_size, groups=self._group_lists, pin_layout=False)
        return result

    def _all_gathered(self, row: Tensor) -> Tensor:
        _, xm, _ = import_xla()
        result: Tensor = xm.all_gather(row, dim=0, groups=self._group_lists, pin_layout=False)
        return result

    def _list_reduced(self, op: str, copies: list[Tensor]) -> list[Tensor]:
        """One operation for tensors of any shapes and dtypes, which it overwrites."""
        _, xm, _ = import_xla()
        xm.all_reduce(op, copies, groups=self._group_lists, pin_layout=False)
        return copies


class _Deferred(Handle):
    """An operation that is recorded when it is waited for, between two cuts of the graph."""

    def __init__(self, collective: XLACollective, make: Callable[..., Tensor], *inputs: Tensor) -> None:
        self._collective, self._make, self._inputs = collective, make, inputs
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._collective._apart(self._make, *self._inputs)
            self._inputs = ()
        return self._result

    def is_completed(self) -> bool:
        return self._result is not None


class _Batch:
    """Reductions that were started one after the other; the first wait runs all of them as one operation."""

    def __init__(self, collective: XLACollective, op: ReduceOp) -> None:
        self.op = op
        self.done = False
        self._collective = collective
        self._tensors: list[Tensor] = []
        self._results: list[Tensor] = []

    def takes(self, collective: XLACollective, op: ReduceOp) -> bool:
        """Whether a further reduction can be part of it; a part of a collective begins with its parent's batch."""
        return not self.done and self._collective is collective and self.op is op

    def add(self, x: Tensor) -> Handle:
        self._tensors.append(x)
        return _Member(self, len(self._tensors) - 1)

    def result(self, index: int) -> Tensor:
        if not self.done:
            self._results = self._collective._apart(
                lambda *copies: self._collective._list_reduced(_OPS[self.op], list(copies)), *self._tensors
            )
            self.done, self._tensors = True, []
        return self._results[index]


class _Member(Handle):
    def __init__(self, batch: _Batch, index: int) -> None:
        self._batch, self._index = batch, index

    def wait(self) -> Tensor:
        return self._batch.result(self._index)

    def is_completed(self) -> bool:
        return self._batch.done


def _complete_partition(groups: list[list[int]], size: int) -> Groups:
    """With the ranks that no group has, cut alike where that is possible: some operations need groups of one size."""
    known = {rank for group in groups for rank in group}
    rest = [rank for rank in range(size) if rank not in known]
    lengths = {len(group) for group in groups}
    step = lengths.pop() if len(lengths) == 1 else 1
    if len(rest) % step:
        step = 1
    parts = [rest[start : start + step] for start in range(0, len(rest), step)]
    return tuple(tuple(group) for group in [*groups, *parts])


def _is_even(groups: Groups) -> bool:
    return len({len(group) for group in groups}) <= 1


def _as_number(x: Tensor) -> Tensor:
    return x.to(torch.uint8) if x.dtype is torch.bool else x


def _positions(lengths: Sequence[int], longest: int, end: int) -> Tensor:
    """Where each entry of the padded pieces comes from; ``end`` for the padding. On the host."""
    positions = torch.full((len(lengths), longest), end, device="cpu")
    start = 0
    for row, length in zip(positions, lengths, strict=True):
        row[:length] = torch.arange(start, start + length, device="cpu")
        start += length
    return positions.reshape(-1)


def _picked(x: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1)]).index_select(0, positions)

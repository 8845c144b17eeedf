"""In-place operations for library code: one tensor, no comparison with the other ranks, no autograd, handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from collective_strategy.collectives import transport
from collective_strategy.collectives.arguments import rank_argument
from collective_strategy.collectives.base import CollectiveBase
from collective_strategy.collectives.compiling import outside_graphs
from collective_strategy.collectives.handles import CompletedHandle, GuardedHandle, Handle
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.reductions import Reduction, encode_reduction, refuse_reduction
from collective_strategy.collectives.shared_memory import SharedMemory


class _Way(NamedTuple):
    """How tensors of one dtype and device are reduced in place.

    ``wire_op`` is what the backend reduces them with as they are, None if it does not.
    """

    op: ReduceOp
    wire_op: ReduceOp | None
    settings: str


class InPlaceOperations(CollectiveBase):
    """The methods whose names end in an underscore, as in torch.

    The tensors must be contiguous and are overwritten. All ranks give equal shapes and dtypes; this is not checked.
    With ``async_op=True`` a `Handle` is returned at once and the tensors must be left alone until its ``wait()``.
    """

    def _reset(self) -> None:
        super()._reset()
        self._ways: dict[tuple[type, str, torch.dtype, torch.device], _Way] = {}
        self._memory: SharedMemory | None = None

    def _subgroup(self, name: str, axis: Any, partition: Partition, default_to: str | None = None) -> Self:
        sub = super()._subgroup(name, axis, partition, default_to)
        sub._memory = None
        return sub

    def _leave(self, reason: str) -> None:
        super()._leave(reason)
        self._leave_memory()

    def teardown(self) -> None:
        """See `CollectiveBase.teardown`. Also where the collective is broken, nobody waits for this rank after it."""
        if self._root is self:
            self._leave_memory()
        super().teardown()

    def _leave_memory(self) -> None:
        for part in (self, *self._parts):
            memory = getattr(part, "_memory", None)
            if memory is not None:
                memory.leave()

    def share_memory(self) -> bool:
        """Lets `all_reduce_` sum tensors of `shared_empty` in memory that all ranks map. All ranks call it.

        On one host (as the launcher says), under Linux on x86-64, with tensors of the CPU, that costs a fifth of the
        time of a transport through sockets. COLLECTIVE_STRATEGY_SHARED_MEMORY=0 on any rank switches it off.

        Returns:
            Whether memory is shared, alike on all ranks. Where it is not, `shared_empty` returns ordinary tensors.
        """
        if self._memory is None and self.world_size > 1:
            self._memory = SharedMemory.open(self)  # type: ignore[arg-type]
        return self._memory is not None

    def shared_empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor for many `all_reduce_`. Local; all ranks make theirs alike.

        All ranks start the same ones, in one order, before they wait for one; they complete when one is waited for, and
        not before.
        """
        if self._memory is None or device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._memory.empty(numel, dtype)

    @outside_graphs
    def all_reduce_(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Tensor | Handle:
        """Overwrites ``tensor`` with the reduction over all ranks. The mean of integers is refused.

        float16 and bfloat16 are reduced as they are where the backend can, unlike in `all_reduce`.
        """
        known = type(op) is str and isinstance(tensor, Tensor)
        way = self._ways.get((type(self), op, tensor.dtype, tensor.device)) if known else None
        way = way or self._find_way(op, tensor)
        self._begin("all_reduce_", tensor, way.settings)
        reduce_op = way.op
        if way.wire_op is not None:
            wire_op = way.wire_op
            data = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            memory = self._memory

            def start() -> Handle:
                if memory is not None and wire_op is ReduceOp.SUM and memory.owns(data):
                    return memory.sum(data)
                return self._all_reduce(data, wire_op)

            def finish(reduced: Tensor) -> Tensor:
                if not transport.same_memory(reduced, data):
                    data.copy_(reduced)
                else:
                    _overwritten(data)
                if reduce_op is ReduceOp.MEAN:
                    data.div_(self.world_size)
                return tensor

            return self._started(start, finish, async_op)
        code = encode_reduction(tensor.detach(), reduce_op, self.world_size, self.capabilities)
        return self._started(
            lambda: self._reduced(code, self._all_reduce), lambda y: self._copied(tensor, code.finish(y)), async_op
        )

    @outside_graphs
    def broadcast_(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Tensor | Handle:
        """Overwrites ``tensor`` with the value of rank ``src``."""
        self._require_usable("broadcast_")
        root = rank_argument(self, "src", src)
        self._begin("broadcast_", tensor, f"src={root}")
        flat = self._movable(tensor)
        return self._started(lambda: self._broadcast(flat, root), lambda y: self._restored(tensor, flat, y), async_op)

    @outside_graphs
    def all_gather_(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Tensor | Handle:
        """Overwrites ``output``, of shape ``(world_size, *tensor.shape)``, with every rank's tensor."""
        self._begin("all_gather_", output, "")
        if tuple(output.shape) != (self.world_size, *tensor.shape) or output.dtype != tensor.dtype:
            raise ValueError(
                f"all_gather_: output must be {tensor.dtype} of shape {[self.world_size, *tensor.shape]}, got "
                f"{output.dtype} of "
                f"shape {list(output.shape)}."
            )
        flat = self._movable(tensor.contiguous())
        return self._started(lambda: self._all_gather(flat), lambda y: self._restored(output, None, y), async_op)

    @outside_graphs
    def reduce_scatter_(
        self, output: Tensor, tensor: Tensor, op: str = "sum", *, async_op: bool = False
    ) -> Tensor | Handle:
        """Overwrites ``output`` with entry ``rank`` of the reduction of ``tensor``, ``(world_size, *output.shape)``.

        ``tensor`` may be overwritten too.
        """
        reduce_op = ReduceOp.parse(op)
        self._begin("reduce_scatter_", output, f"op={reduce_op.value}")
        refuse_reduction(reduce_op, tensor.dtype, "the tensor", "reduce_scatter_")
        if tuple(tensor.shape) != (self.world_size, *output.shape) or output.dtype != tensor.dtype:
            raise ValueError(
                f"reduce_scatter_: tensor must be {output.dtype} of shape {[self.world_size, *output.shape]}, got "
                f"{tensor.dtype} of "
                f"shape {list(tensor.shape)}."
            )
        code = encode_reduction(tensor.detach().contiguous(), reduce_op, self.world_size, self.capabilities)
        rank = self.rank
        folded = code.wire_op is None  # then every rank has the whole reduction
        return self._started(
            lambda: self._reduced(code, self._reduce_scatter),
            lambda y: self._copied(output, code.finish(y[rank] if folded else y)),
            async_op,
        )

    def _reduced(self, code: Reduction, reduce: Callable[[Tensor, ReduceOp], Handle]) -> Handle:
        """``reduce`` of the buffer; where the backend does not reduce it, gathered and folded on every rank."""
        buffer = code.buffer
        if code.wire_op is not None:
            if self._takes(buffer):
                return reduce(buffer, code.wire_op)
            return transport.Returning(reduce(buffer.to(self.device), code.wire_op), buffer.device)
        handle: Handle = self._all_gather(self._movable(buffer))
        if not self._takes(buffer):
            handle = transport.Returning(handle, buffer.device)

        def fold(gathered: Tensor) -> Tensor:
            return code.fold(gathered.reshape(-1).view(buffer.dtype).reshape(self.world_size, *buffer.shape))

        return GuardedHandle(handle, lambda inner: inner.wait(), fold)

    def _find_way(self, op: str, tensor: Tensor) -> _Way:
        """How ``all_reduce_`` reduces such a tensor; kept for the next one."""
        self._require_usable("all_reduce_")
        self._require_tensor("all_reduce_", tensor)
        reduce_op = ReduceOp.parse(op)
        refuse_reduction(reduce_op, tensor.dtype, "the tensor", "all_reduce_")
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if reduce_op is ReduceOp.MEAN and not floating:
            raise TypeError("all_reduce_: the mean of integers is no integer; use all_reduce, or op='sum'.")
        wire_op = ReduceOp.SUM if reduce_op is ReduceOp.MEAN else reduce_op
        ordered = wire_op in (ReduceOp.MAX, ReduceOp.MIN) and floating
        as_it_is = self._takes(tensor) and self.capabilities.reduces(wire_op, tensor.dtype.to_real()) and not ordered
        way = _Way(reduce_op, wire_op if as_it_is else None, f"op={reduce_op.value}")
        if type(op) is str:
            self._ways[type(self), op, tensor.dtype, tensor.device] = way
        return way

    @staticmethod
    def _require_tensor(operation: str, tensor: object) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation} takes one tensor, got {type(tensor).__name__}.")

    def _begin(self, operation: str, tensor: Tensor, settings: str) -> None:
        self._require_usable(operation)
        self._require_tensor(operation, tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"{operation}: the tensor must be contiguous, its strides are {tensor.stride()}.")
        self._calls += 1
        self._current = f"{operation}({settings})"
        self.counters.count(operation, tensor.numel() * tensor.element_size())

    def _started(
        self, start: Callable[[], Handle], finish: Callable[[Tensor], Tensor], async_op: bool
    ) -> Tensor | Handle:
        if self.world_size == 1:
            result = finish(start().wait())
            return CompletedHandle(result) if async_op else result
        if not async_op:
            return finish(self._guarded(lambda: start().wait()))
        name = self._current

        def wait(inner: Handle) -> Tensor:
            with self._named(name):
                return self._guarded(inner.wait)

        return GuardedHandle(self._guarded(start), wait, finish)

    def _takes(self, tensor: Tensor) -> bool:
        types = self.capabilities.device_types
        return types is None or tensor.device.type in types

    def _movable(self, tensor: Tensor) -> Tensor:
        """Flat, as bytes where needed, sharing memory with ``tensor`` if the backend takes its device."""
        flat = transport._flat(tensor.detach().resolve_conj())
        if tensor.dtype not in self.capabilities.movement_dtypes:
            flat = flat.view(torch.uint8)
        return flat if self._takes(tensor) else flat.to(self.device)

    def _restored(self, target: Tensor, sent: Tensor | None, received: Tensor) -> Tensor:
        if sent is not None and transport.same_memory(received, sent) and self._takes(target):
            _overwritten(target)
            return target
        return self._copied(target, received.to(target.device).reshape(-1).view(target.dtype))

    @staticmethod
    def _copied(target: Tensor, value: Tensor) -> Tensor:
        target.detach().copy_(value.reshape(target.shape))
        return target


def _overwritten(tensor: Tensor) -> None:
    """Tells autograd what the library did behind it: a backward that needs the former values is to refuse."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)

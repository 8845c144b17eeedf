"""Horovod (Gloo on CPU): raw operations that have a name, one counter of names per collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.composed import composed_reduce_scatter
from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.collectives.handles import Handle
from collective_strategy.collectives.horovod_runtime import (
    HorovodRuntime,
    meet_through_mpi,
    start_horovod,
    wait_for,
)
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.rendezvous import join
from collective_strategy.collectives.side_channel import SideChannel

_REDUCED = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})
_MOVED = _REDUCED | {torch.uint8, torch.int8, torch.int16}
_OPS = {ReduceOp.SUM: "Sum", ReduceOp.MIN: "Min", ReduceOp.MAX: "Max", ReduceOp.PROD: "Product"}
_LARGEST_PIECE = 2**31 - 1
_CAPABILITIES = Capabilities(
    movement_dtypes=_MOVED,
    reduction_dtypes=dict.fromkeys(_OPS, _REDUCED),
    device_types=frozenset({"cpu"}),
    primitives=frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"}),
    timeout="raises",
)


class HorovodCollective(Collective):
    """A collective over Horovod.

    Every operation gets a name that its ranks count alike: Horovod names what is not named after a counter of all
    operations of the process, so that one operation more on one rank makes the next ones wait for ever.

    Tensors travel through the CPU, also those on a GPU. Sub-groups are Horovod's process sets, which all collectives
    over the same ranks share.
    """

    backend_name: ClassVar[str] = "horovod"

    def _reset(self) -> None:
        super()._reset()
        self._runtime: HorovodRuntime | None = None
        self._prefix = ""
        self._operations: defaultdict[str, int] = defaultdict(int)  # started, by group; shared with the parts

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        """Where tensors are communicated: the CPU, whichever device the model is on."""
        return torch.device("cpu")

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None and self.is_set_up:
            self.abort(f"rank {self.rank} ended with {getattr(exception[0], '__name__', exception[0])}")
        self.teardown()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _open(self, environment: LaunchEnvironment, settings: str) -> SideChannel | None:
        if environment.source == "mpirun" and environment.master_port == 0 and environment.world_size > 1:
            environment = meet_through_mpi(environment)
        store, second = join(environment, self.timeout, f"backend=horovod, {settings}")
        self._runtime, name = start_horovod(environment, SideChannel(store, None, "horovod"), self.timeout)
        self._prefix = name[:12]
        return SideChannel(store, second, "side") if self.world_size > 1 else None

    def _close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self.broken:
            # as at the end of this process: the others hear at once that they wait in vain
            runtime.end(self.broken)

    def _new_group(self, ranks: tuple[int, ...], partition: Partition, scope: str) -> Any:
        assert self._runtime is not None
        try:
            return self._runtime.sets.get(ranks, self.timeout)
        except TimeoutError as error:
            raise CollectiveError(
                f"rank {self.global_rank} waited {self.timeout.total_seconds():g} s for a group of ranks {list(ranks)}:"
                f" {error}. Horovod makes a group with the help of all ranks; look at the output of the others."
            ) from error

    # -- primitives: flat, because Horovod compares also shapes of equal length, () and (1,) ---------------------------

    def _barrier(self) -> Handle:
        return self._all_reduce(torch.zeros(1), ReduceOp.SUM)

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        hvd = self._horovod()
        shape = x.shape
        return self._start(
            x.view(-1), hvd.allreduce_async_, op=getattr(hvd, _OPS[op]), finish=lambda reduced: reduced.view(shape)
        )

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        shape, root = x.shape, self.ranks[src]
        start = self._horovod().broadcast_async_
        return self._start(x.view(-1), start, root_rank=root, finish=lambda received: received.view(shape))

    def _all_gather(self, x: Tensor) -> Handle:
        shape = (self.world_size, *x.shape)
        start = self._horovod().allgather_async
        return self._start(x.view(1, x.numel()), start, finish=lambda gathered: gathered.view(shape))

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        if op is not ReduceOp.SUM:  # Horovod's has the sum and its mean only
            return composed_reduce_scatter(self, x, op)
        hvd = self._horovod()
        shape = x.shape[1:]
        rows = x.view(self.world_size, shape.numel())
        return self._start(rows, hvd.reducescatter_async, op=hvd.Sum, finish=lambda row: row.view(shape))

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        if max(out) > _LARGEST_PIECE:
            raise ValueError(f"Horovod's all_to_all counts in 32 bits; {max(out)} elements for one rank are too many.")
        splits = torch.tensor(list(out), dtype=torch.int32)
        return self._start(x, self._horovod().alltoall_async, splits=splits, finish=lambda result: result[0])

    def _horovod(self) -> Any:
        assert self._runtime is not None
        self._runtime.check_process()
        return self._runtime.hvd

    def _start(
        self, x: Tensor, start: Callable[..., int], finish: Callable[[Any], Tensor] | None = None, **arguments: Any
    ) -> Handle:
        name = f"{self._prefix}/{self._scope}/{self._operations[self._scope]}"
        group = self._group or self._horovod().global_process_set  # one process has the world and parts equal to it
        with torch.inference_mode(False):  # Horovod's thread resizes the result, which it could not inside
            handle = start(x, name=name, process_set=group, **arguments)
        self._operations[self._scope] += 1
        return _HorovodHandle(self._horovod(), handle, self.timeout.total_seconds(), finish)


class _HorovodHandle(Handle):
    def __init__(self, hvd: Any, handle: int, seconds: float, finish: Callable[[Any], Tensor] | None) -> None:
        self._hvd = hvd
        self._handle = handle
        self._seconds = seconds
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            result = wait_for(self._hvd, self._handle, self._seconds)
            self._result = self._finish(result) if self._finish else result
        return self._result

    def is_completed(self) -> bool:
        return self._result is not None or bool(self._hvd.poll(self._handle))

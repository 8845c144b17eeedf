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
from collective_strategy.collectives.horovod_runtime import HorovodRuntime, wait_for
from collective_strategy.collectives.horovod_start import meet_through_mpi, start_horovod
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
    packed_bytes=32 << 20,  # its thread looks for operations only so often
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
        hvd, shape = self._horovod().hvd, x.shape
        if len(shape) == 1:
            return self._start(hvd.allreduce_async_, x, op=getattr(hvd, _OPS[op]))
        flat = x.view(-1)
        return self._start(hvd.allreduce_async_, flat, lambda reduced: reduced.view(shape), op=getattr(hvd, _OPS[op]))

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        hvd, shape = self._horovod().hvd, x.shape
        root = self.ranks[src]
        return self._start(hvd.broadcast_async_, x.view(-1), lambda received: received.view(shape), root_rank=root)

    def _all_gather(self, x: Tensor) -> Handle:
        hvd, shape = self._horovod().hvd, (self.world_size, *x.shape)
        return self._start(hvd.allgather_async, x.view(1, x.numel()), lambda gathered: gathered.view(shape))

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        if op is not ReduceOp.SUM:  # Horovod's has the sum and its mean only
            return composed_reduce_scatter(self, x, op)
        hvd, shape = self._horovod().hvd, x.shape[1:]
        rows = x.view(self.world_size, shape.numel())
        return self._start(hvd.reducescatter_async, rows, lambda row: row.view(shape), op=hvd.Sum)

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        if max(out) > _LARGEST_PIECE:
            raise ValueError(f"Horovod's all_to_all counts in 32 bits; {max(out)} elements for one rank are too many.")
        expected = list(into)

        def received(result: tuple[Tensor, Tensor]) -> Tensor:
            pieces, lengths = result
            if lengths.tolist() != expected:
                raise RuntimeError(f"the ranks sent {lengths.tolist()} elements, rank by rank, and not {expected}")
            return pieces

        splits = torch.tensor(list(out), dtype=torch.int32)
        return self._start(self._horovod().hvd.alltoall_async, x, received, splits=splits)

    def _horovod(self) -> HorovodRuntime:
        assert self._runtime is not None
        self._runtime.check()
        return self._runtime

    def _start(
        self, start: Callable[..., int], x: Tensor, finish: Callable[[Any], Tensor] | None = None, **arguments: Any
    ) -> Handle:
        """Starts an operation under the next name. `_horovod` was asked just before."""
        runtime = self._runtime
        assert runtime is not None
        arguments["name"] = f"{self._prefix}/{self._scope}/{self._operations[self._scope]}"
        # one process has the world and parts equal to it
        arguments["process_set"] = self._group or runtime.hvd.global_process_set
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # Horovod's thread resizes the result, which it could not inside
                    handle = start(x, **arguments)
            else:
                handle = start(x, **arguments)
        except ValueError as error:
            if "Process set provided does not exist" not in str(error):
                raise
            raise RuntimeError(f"Horovod has been shut down, and its groups with it ({error})") from None
        self._operations[self._scope] += 1
        return _HorovodHandle(runtime, handle, self.timeout.total_seconds(), finish)


class _HorovodHandle(Handle):
    """An operation by its number, which Horovod counts anew after each start."""

    def __init__(
        self, runtime: HorovodRuntime, handle: int, seconds: float, finish: Callable[[Any], Tensor] | None
    ) -> None:
        self._runtime = runtime
        self._handle = handle
        self._seconds = seconds
        self._finish = finish
        self._result: Tensor | None = None
        self._failure: Exception | None = None

    def wait(self) -> Tensor:
        if self._result is not None:
            return self._result
        if self._failure is not None:
            raise self._failure
        self._runtime.check()
        try:
            result = wait_for(self._runtime.hvd, self._handle, self._seconds)
            self._result = self._finish(result) if self._finish else result
        except TimeoutError:  # it may come later
            raise
        except Exception as error:
            self._failure = error
            raise
        return self._result

    def is_completed(self) -> bool:
        if self._result is not None or self._failure is not None or not self._runtime.is_here:
            return True
        return bool(self._runtime.hvd.poll(self._handle))

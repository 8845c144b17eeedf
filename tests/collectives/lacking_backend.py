"""A backend of torch.distributed as foreign devices have them: few operations and dtypes, and no handles."""

import torch
import torch.distributed as dist

from collective_strategy.collectives import TorchDistributedCollective

REDUCED = (torch.float32, torch.int32, torch.int64, torch.uint8)


class LackingGroup(dist.ProcessGroup):
    """Sums and maxima in four dtypes, gathers, broadcasts; each is complete when the call returns, without a handle.

    It has no reduce_scatter, all_to_all, barrier, send and receive, and takes one tensor at a time.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "lacking"

    def allreduce(self, tensors, options=None):
        options = options or dist.distributed_c10d.AllreduceOptions()
        (tensor,) = tensors
        known = options.reduceOp == dist.ReduceOp.SUM or options.reduceOp == dist.ReduceOp.MAX
        if tensor.dtype not in REDUCED or not known:
            raise RuntimeError(f"lacking: no {options.reduceOp} of {tensor.dtype}")
        self._gloo.allreduce(tensors, options).wait()

    def broadcast(self, tensors, options):
        self._gloo.broadcast(tensors, options).wait()

    def _allgather_base(self, output, tensor, options=None):
        self._gloo._allgather_base(output, tensor, dist.distributed_c10d.AllgatherOptions()).wait()

    all_gather_single = _allgather_base  # its name since torch 2.13

    def barrier(self, *_):
        raise RuntimeError("lacking: there is no such operation")

    _reduce_scatter_base = reduce_scatter_single = alltoall_base = all_to_all_single = send = recv = barrier


def register() -> None:
    if not hasattr(dist.Backend, "LACKING"):
        dist.Backend.register_backend("lacking", LackingGroup, devices=["cpu"])


class LackingCollective(TorchDistributedCollective):
    """torch.distributed over it; registering it is what importing the device's package does."""

    def __init__(self, **settings):
        register()
        super().__init__(backend="cpu:lacking", **settings)

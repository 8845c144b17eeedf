"""torch.distributed: gloo, nccl, mpi, ucc, xccl, or any backend registered there."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from collective_strategy.collectives.capabilities import PRIMITIVES, Capabilities
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.composed import composed_all_to_all, composed_reduce_scatter
from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import CollectiveError, CollectiveStateError, RendezvousError
from collective_strategy.collectives.handles import Handle
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.probing import Probed, probe
from collective_strategy.collectives.rendezvous import join
from collective_strategy.collectives.side_channel import SideChannel, second_connection

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_PLAIN = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64})
_COMMON = _PLAIN | {torch.float16, torch.bfloat16}
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
# Renamed in torch 2.13.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_KNOWN = frozenset({"gloo", "nccl", "xccl", "ucc", "mpi", "fake"})


def _libraries(backends: str) -> set[str]:
    """``"cpu:gloo,cuda:nccl"`` -> gloo, nccl."""
    return {part.partition(":")[2] or part for part in backends.split(",")}


def _probed_capabilities(probed: Probed, device_types: frozenset[str]) -> Capabilities:
    own = probed.operations | {"all_reduce", "broadcast", "barrier", "all_gather"}
    return Capabilities(probed.moved, probed.reduced, device_types=device_types, primitives=own)


def _capabilities(backends: str, device_types: frozenset[str]) -> Capabilities:
    """Declared for what the named libraries have in common; what is not declared is composed."""
    names = _libraries(backends)
    dtypes = _COMMON if names <= {"gloo", "nccl", "xccl"} else _PLAIN
    reductions: dict[ReduceOp, frozenset[torch.dtype]] = dict.fromkeys(_ARITHMETIC, dtypes)
    if names <= {"gloo"}:
        reductions.update(dict.fromkeys(_BITWISE, _INTEGERS))
    return Capabilities(
        movement_dtypes=dtypes,
        reduction_dtypes=reductions,
        device_types=device_types,
        primitives=frozenset(PRIMITIVES),
        timeout="aborts" if names & {"nccl", "xccl"} else "raises",
        # Gloo gains little above this, and what is left at the end of backward is short. That of accelerators is not
        # measured here but DistributedDataParallel's default.
        packed_bytes=4 << 20 if names <= {"gloo"} else 25 << 20,
    )


class TorchDistributedCollective(Collective):
    """A collective over torch.distributed's process groups.

    Where the default process group exists already (another library or an earlier Trainer made it), it is adopted after
    a check of rank and size, and left alone at tear-down.
    """

    backend_name: ClassVar[str] = "torch"

    def __init__(self, backend: str | None = None, **settings: Any) -> None:
        """Keeps the settings.

        Args:
            backend: A backend of torch.distributed (``"gloo"``, ``"nccl"``, ``"cpu:gloo,tpu:tpu_dist"``); the default
                one of the device if not given. What one that we do not know can do is tried out at set-up.
            **settings: See `Collective`.
        """
        super().__init__(**settings)
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must name a torch.distributed backend, got {backend!r}.")
        self.process_group_backend = backend

    def _reset(self) -> None:
        super()._reset()
        self._owns_world = False
        self._loopback = False
        self._generation = "own"
        self._known: Capabilities | None = None
        self._has: frozenset[str] = frozenset(PRIMITIVES)

    @property
    def capabilities(self) -> Capabilities:
        if self._known is None:
            self._known = _capabilities(self._backend(), self._device_types())
        return self._known

    def _device_types(self) -> frozenset[str]:
        kinds = {part.partition(":")[0] for part in self._backend().split(",") if ":" in part}
        return frozenset(kinds or {self.device.type})

    @property
    def _is_foreign(self) -> bool:
        return not _libraries(self._backend()) <= _KNOWN

    def _probe(self) -> None:
        """Finds out what a backend that we do not know has; the rest is composed."""
        if self._is_foreign and self.world_size > 1:
            probed = probe(self.device, self.world_size, _all_gather_flat, _reduce_scatter_flat, _OPS)
            self._known, self._has = _probed_capabilities(probed, self._device_types()), probed.operations

    def device_mesh(self) -> DeviceMesh:
        """The mesh's groups as torch's DeviceMesh, for DTensor or FSDP. Every rank calls it.

        An axis of size 1 gets a group of one rank, at the first call.

        Raises:
            CollectiveStateError: there is no mesh, or the collective is not set up.
        """
        self._require_usable("device_mesh")
        if self.mesh is None or self._root is not self:
            raise CollectiveStateError("device_mesh() needs the world's collective with a mesh={...}.")
        names, shape = tuple(self.mesh.axes), tuple(self.mesh.axes.values())
        for name in names:
            sub = self[name]
            if sub._group is None:
                sub._group = self._new_group(sub.ranks, Partition(sub.ranks), sub._scope)
        groups = [self[name]._group for name in names]
        ranks = torch.arange(self.world_size).reshape(shape)
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], self.device.type, mesh=ranks, mesh_dim_names=names
        )

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _backend(self) -> str:
        return self.process_group_backend or dist.get_default_backend_for_device(self.device)

    def _open(self, environment: LaunchEnvironment, settings: str) -> SideChannel | None:
        if not dist.is_available():
            raise CollectiveError("this build of torch has no torch.distributed; install another one, or use 'single'.")
        self._loopback = environment.is_loopback
        if dist.is_initialized():
            return self._adopt(environment)
        backend = self._backend()
        store, second = join(environment, self.timeout, f"backend={backend}, {settings}")
        device: dict[str, Any] = (
            {"device_id": self.device} if self.device.type == "cuda" and self.device.index is not None else {}
        )
        try:
            with self._gloo_settings():
                dist.init_process_group(
                    backend, store=PrefixStore("group", store), rank=self.rank, world_size=self.world_size,
                    timeout=self.timeout, **device,
                )  # fmt: skip
        except Exception as error:
            raise RendezvousError(
                f"rank {self.rank} of {self.world_size} could not open the {backend!r} process group: {error}. All "
                f"ranks joined the "
                "store, so look at the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at the other "
                "ranks' output."
            ) from error
        self._owns_world = True
        self._probe()
        atexit.register(_destroy_at_exit)
        return SideChannel(store, second, "side")

    def _adopt(self, environment: LaunchEnvironment) -> SideChannel | None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if environment.source == "single" and size > 1:  # set up by hand, without the launcher's variables
            self.rank, self.world_size, self.ranks = rank, size, tuple(range(size))
        elif (rank, size) != (environment.rank, environment.world_size):
            raise CollectiveStateError(
                f"torch.distributed is initialised as rank {rank} of {size}, but this job's environment says rank "
                f"{environment.rank} "
                f"of {environment.world_size}. Destroy that process group first, or start the processes alike."
            )
        if self.process_group_backend is None:
            self.process_group_backend = dist.get_backend()
        self._probe()
        store = distributed_c10d._get_default_store()
        generation = _next_generation(store, self.world_size)
        if generation is None:
            return None
        self._generation = f"adopted {generation}"  # an earlier collective of this process may have groups too
        return SideChannel(store, second_connection(store), f"collective_strategy/adopted/{generation}")

    def _close(self) -> None:
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_world = False

    def _new_group(self, ranks: tuple[int, ...], partition: Partition, scope: str) -> Any:
        backend = self._backend()
        with self._gloo_settings():
            if self._groups_by_all:
                groups = self._new_groups(partition)
                return groups[ranks]
            with _group_named(f"collective_strategy/{self._generation}/{scope}"):
                return distributed_c10d.new_group(  # torch_xla replaces dist.new_group when it is imported
                    list(ranks), timeout=self.timeout, backend=backend, use_local_synchronization=True
                )

    @property
    def _groups_by_all(self) -> bool:
        """Whether all ranks of the job must make all groups of a partition; otherwise the members make theirs."""
        return self._backend() == "mpi" or self._is_foreign

    def _new_groups(self, partition: Partition) -> dict[tuple[int, ...], Any]:
        if self._root is not self:
            raise CollectiveError(
                f"{self.name!r} cannot be divided: with the backend {self._backend()!r} all ranks make all groups "
                "together, and those outside are not here. Divide the whole collective, or declare a mesh axis."
            )
        return {
            members: distributed_c10d.new_group(list(members), timeout=self.timeout) for members in _wide(partition)
        }

    def _no_group(self, partition: Partition) -> None:
        if self._groups_by_all and self.world_size > 1:
            with self._gloo_settings():
                self._new_groups(partition)

    @contextlib.contextmanager
    def _gloo_settings(self) -> Iterator[None]:
        """Lets gloo read all addresses in one store operation, and use loopback where all processes meet there.

        Otherwise each rank of a new group asks the store for every other one, so that set-up grows with the number of
        ranks; and gloo resolves the host's name, which on many machines fails. The user's own settings win.
        TORCH_GLOO_LAZY_INIT would do the first too, but a first contact then takes up to five time-outs to fail.
        """
        wanted = {"GLOO_ENABLE_STORE_V2_API": "1"}
        if self._loopback and sys.platform.startswith(("linux", "darwin")):
            wanted["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        wanted = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name in wanted:
                os.environ.pop(name, None)

    # -- primitives ----------------------------------------------------------------------------------------------------

    def _barrier(self) -> Handle:
        if "barrier" not in self._has:
            return self._all_reduce(torch.ones(1, device=self.device), ReduceOp.SUM)
        if self.device.type == "cuda":
            work = dist.barrier(self._group, async_op=True, device_ids=[self.device.index or 0])
        else:
            work = dist.barrier(self._group, async_op=True)
        return _WorkHandle(work, torch.empty(0))

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return _WorkHandle(dist.all_reduce(x, _OPS[op], group=self._group, async_op=True), x)

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        return _WorkHandle(dist.broadcast(x, group_src=src, group=self._group, async_op=True), x)

    def _all_gather(self, x: Tensor) -> Handle:
        output = x.new_empty(self.world_size * x.numel())
        if "all_gather" not in self._has:
            pieces = list(output.view(self.world_size, -1).unbind(0))
            work = dist.all_gather(pieces, x.reshape(-1), group=self._group, async_op=True)
            return _WorkHandle(work, output.view(self.world_size, *x.shape))
        work = _all_gather_flat(output, x.reshape(-1), group=self._group, async_op=True)
        return _WorkHandle(work, output.view(self.world_size, *x.shape))

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        if "reduce_scatter" not in self._has:
            return composed_reduce_scatter(self, x, op)
        output = x.new_empty(x[0].numel())
        work = _reduce_scatter_flat(output, x.reshape(-1), _OPS[op], group=self._group, async_op=True)
        return _WorkHandle(work, output.view(x.shape[1:]))

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        if self._is_foreign:  # pieces of different lengths cannot be counted on
            return composed_all_to_all(self, x, out, into)
        output = x.new_empty(sum(into))
        work = dist.all_to_all_single(output, x, list(into), list(out), group=self._group, async_op=True)
        return _WorkHandle(work, output)

    def _send(self, x: Tensor, dst: int) -> Handle:
        return _WorkHandle(dist.isend(x, group=self._group, group_dst=dst), x)

    def _recv(self, x: Tensor, src: int) -> Handle:
        return _WorkHandle(dist.irecv(x, group=self._group, group_src=src), x)


class _WorkHandle(Handle):
    def __init__(self, work: Any, result: Tensor) -> None:
        self._work = work
        self._result = result

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def _wide(partition: Partition) -> list[tuple[int, ...]]:
    """The groups of more than one rank."""
    return [members for members in partition.groups() if len(members) > 1]


@contextlib.contextmanager
def _group_named(name: str) -> Iterator[None]:
    """Gives the next group of torch.distributed a name that its members agree on.

    torch makes the name of a group that only its members create from the number of groups this process has. Members
    with different numbers, as after a split, then wait for each other for ever.
    """
    original = distributed_c10d._process_group_name
    name_type: Any = getattr(distributed_c10d, "GroupName", str)  # torch 2.9 has none
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name_type(name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


def _next_generation(store: Store, world_size: int) -> int | None:
    """Counts the adoptions of a process group, alike on all ranks."""
    try:
        count = store.add("collective_strategy/adoptions", 1)
    except (RuntimeError, NotImplementedError):
        return None  # a store that only looks like one
    return (count - 1) // world_size


def _destroy_at_exit() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

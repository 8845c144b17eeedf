"""What we need from torch_xla's runtime: this replica's place, its device, and the cut of a graph."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives.environment import LaunchEnvironment, read_environment
from collective_strategy.collectives.errors import CollectiveError, CollectiveStateError
from collective_strategy.collectives.xla_device_module import register_device_module

TOKEN_VARIABLE = "DISABLE_NUMERIC_CC_TOKEN"
_INSTALL = (
    "The backend 'xla' needs torch_xla, which is not installed or does not fit this torch: {error}. Install "
    "collective_strategy[xla] (torch_xla 2.9 with torch 2.9) in an environment of its own."
)


def import_xla() -> tuple[ModuleType, ModuleType, ModuleType]:
    """``torch_xla``, its ``core.xla_model`` and its ``runtime``.

    Raises:
        ImportError: they are not installed.
    """
    # Gathers and exchanges add a token to their input that is made from an earlier result, to keep their order. One NaN
    # there makes all later results NaN. Equal graphs, which we need anyway, keep the order too. The variable is read
    # once, at the first collective of the process.
    os.environ.setdefault(TOKEN_VARIABLE, "1")
    try:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model
    except ImportError as error:
        raise ImportError(_INSTALL.format(error=error)) from error
    register_device_module()
    return torch_xla, xla_model, runtime


@dataclass(frozen=True)
class Replica:
    """One XLA device and the thread or process that drives it.

    Captured once: in any thread but the replica's own (data loading, autograd in some versions) torch_xla answers for
    device 0.
    """

    device: torch.device
    rank: int
    world_size: int
    waits: bool

    @classmethod
    def current(cls) -> Replica:
        """That of the calling thread.

        Raises:
            CollectiveStateError: under SPMD, where one program drives all devices and there are no ranks.
        """
        torch_xla, _, runtime = import_xla()
        if runtime.is_spmd():
            raise CollectiveStateError(
                "the backend 'xla' was asked for while torch_xla is in SPMD mode (xr.use_spmd()), where one program "
                "drives all devices and torch_xla's collectives do nothing. Do not call use_spmd(), or shard with "
                "torch_xla's own SPMD instead of a collective."
            )
        # A CPU's results are there soon, and waiting keeps the threads of a process in step; see xla_threads.
        waits = runtime.device_type() == "CPU"
        return cls(torch_xla.device(), runtime.global_ordinal(), runtime.world_size(), waits)

    def cut(self) -> None:
        """Ends the graph recorded so far: what is pending runs on its own, apart from what comes."""
        torch_xla, xla_model, _ = import_xla()
        torch_xla.sync()
        if self.waits:
            xla_model.wait_device_ops()

    def require_own_thread(self, operation: str) -> None:
        """
        Raises:
            CollectiveStateError: the calling thread would use another replica's device.
        """
        device = import_xla()[0].device()
        if device != self.device:
            raise CollectiveStateError(
                f"{operation} of rank {self.rank}, whose device is {self.device}, was called in a thread whose device "
                f"is {device}: torch_xla gives each thread a device, and threads of yours the first one. Call it in "
                "the thread that runs the rank, and hand over results."
            )

    def upload(self, value: Any) -> Tensor:
        """A value that differs by rank, as data: as a constant it would make the ranks' graphs differ."""
        # a tensor without dims would become a constant all the same
        return torch.atleast_1d(torch.as_tensor(value)).to(self.device)


def replica_environment() -> LaunchEnvironment:
    """This replica's place, from torch_xla's runtime; the meeting point from MASTER_ADDR and MASTER_PORT."""
    _, _, runtime = import_xla()
    replica = Replica.current()
    local = runtime.addressable_device_count() * _local_processes()
    known = read_environment() if "RANK" in os.environ else None
    threads = runtime.addressable_device_count() > 1
    return LaunchEnvironment(
        rank=replica.rank,
        world_size=replica.world_size,
        local_rank=replica.rank % local,
        local_world_size=min(local, replica.world_size),
        node_rank=replica.rank // local,
        master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(os.environ.get("MASTER_PORT", "29500")),
        source="xla" if replica.world_size > 1 else "single",
        job_id="" if known is None else known.job_id,
        attempt=0 if known is None else known.attempt,
        store_is_served=False if known is None else known.store_is_served,
        ranks_are_threads=threads,
    )


def is_replica() -> bool:
    """Whether the calling thread or process is one of the replicas, so that nothing needs to be launched."""
    if _threads.is_replica:
        return True
    if "torch_xla" not in sys.modules or "PJRT_LOCAL_PROCESS_RANK" not in os.environ:
        return False
    return bool(import_xla()[2].addressable_device_count() == 1)


def is_tpu_host() -> bool:
    """Whether torch_xla is installed and finds TPU chips here."""
    if "PJRT_DEVICE" in os.environ:
        return os.environ["PJRT_DEVICE"] == "TPU"
    if importlib.util.find_spec("torch_xla") is None:
        return False
    import_xla()
    from torch_xla._internal import tpu

    return bool(tpu.num_available_chips())


def join_launcher() -> None:
    """Takes this process' chip where torchrun started one process per chip of a TPU host; otherwise nothing."""
    launched = "LOCAL_RANK" in os.environ and "PJRT_LOCAL_PROCESS_RANK" not in os.environ
    if launched and is_tpu_host():
        from torch_xla._internal import pjrt

        pjrt.initialize_multiprocess(int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _ReplicaThreads(threading.local):
    """Whether this thread drives a device of its own, among several of the process."""

    is_replica = False


_threads = _ReplicaThreads()


@contextmanager
def as_replica() -> Iterator[None]:
    """Declares the calling thread a replica."""
    _threads.is_replica = True
    try:
        yield
    finally:
        _threads.is_replica = False


def refuse_other_size(environment: LaunchEnvironment, replica: Replica) -> None:
    """The launcher and XLA must agree.

    Raises:
        CollectiveError: they do not; every replica would work alone, or wait for ever.
    """
    if (environment.rank, environment.world_size) == (replica.rank, replica.world_size):
        return
    raise CollectiveError(
        f"the launcher ({environment.source}) says rank {environment.rank} of {environment.world_size}, but "
        f"torch_xla's runtime says replica {replica.rank} of {replica.world_size}. Start one process per chip with "
        "torch_xla.launch() or torchrun; on CPUs, processes cannot reach each other: use collective_strategy."
        "testing.run_ranks(n, ..., backend='xla') or Trainer(strategy='collective_xla'), which run one thread per "
        "device."
    )


def refuse_processes_on_cpus() -> None:
    """
    Raises:
        CollectiveError: a launcher started several processes, and XLA's devices are CPUs: each would be alone.
    """
    if "RANK" not in os.environ or _threads.is_replica or import_xla()[2].device_type() != "CPU":
        return
    launched = read_environment()
    if launched.world_size > 1:
        raise CollectiveError(
            f"{launched.source} started {launched.world_size} processes, of which this is rank {launched.rank}, but "
            "XLA's CPU devices are reached from their own process only: each would be alone. Start one process: "
            "Trainer(devices=n, strategy='collective_xla') and collective_strategy.testing.run_ranks(n, ..., "
            "backend='xla') run a thread per device in it."
        )


def _local_processes() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT", "1"))


class XLAGenerator:
    """Random numbers of this replica's XLA device, whose state is a number; `torch.manual_seed` leaves it."""

    def draw(self) -> int:
        """A number, after which the generator goes on: by a linear congruential step (Knuth's MMIX)."""
        state = self.state()
        self.restore((state * 6364136223846793005 + 1442695040888963407) % (1 << 31))
        return state

    def seed(self, seed: int) -> None:
        self.restore(seed % (1 << 31))

    def state(self) -> int:
        state: int = import_xla()[1].get_rng_state()
        return state

    def restore(self, state: int) -> None:
        import_xla()[1].set_rng_state(state)

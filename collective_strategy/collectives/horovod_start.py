"""Horovod is started: where its processes meet, with which variables, and once for all collectives of a process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import CollectiveStateError, EnvironmentConfigError, RendezvousError
from collective_strategy.collectives.horovod_runtime import INSTALL, HorovodRuntime, load_horovod, wait_for
from collective_strategy.collectives.key_value import KeyValueServer
from collective_strategy.collectives.side_channel import SideChannel

log = logging.getLogger("collective_strategy")
_LEFT = "left"  # the key under which a rank says that it does not start
_SHORTEST_PATIENCE, _PATIENCE = timedelta(seconds=10), timedelta(seconds=30)  # the second is Horovod's own


class _Process:
    """What this process has: a runtime, and the server through which Horovod's processes meet."""

    def __init__(self) -> None:
        self.runtime: HorovodRuntime | None = None
        self.server: KeyValueServer | None = None
        self._library = ctypes.CDLL(None)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """In a forked process, which has none of Horovod's threads: its end is not to wait for them."""
        if self.runtime is None:
            return
        atexit.unregister(self.runtime.hvd.mpi_ops._basics.shutdown)
        if hasattr(self._library, "on_exit"):  # Horovod's destructors, which join its threads, come after this
            self._library.on_exit(self._library._exit, None)


_process = _Process()


def start_horovod(
    environment: LaunchEnvironment, channel: SideChannel, timeout: timedelta
) -> tuple[HorovodRuntime, str]:
    """This process' runtime: the one that runs if it runs on all ranks, else a new one. All ranks call it.

    Returns:
        The runtime, and a name that all ranks know and no other set-up has.

    Args:
        environment: This process' place.
        channel: Keys of this set-up alone.
        timeout: How long to wait for the others.

    Raises:
        RendezvousError: a rank did not come, or Horovod could not connect the processes.
    """
    meeting = _Meeting(channel, environment, timeout)
    try:
        return _start(load_horovod(), environment, channel, meeting, timeout)
    except BaseException as error:
        meeting.leave(error)
        raise


def _start(
    hvd: Any, environment: LaunchEnvironment, channel: SideChannel, meeting: _Meeting, timeout: timedelta
) -> tuple[HorovodRuntime, str]:
    known = _process.runtime
    if known is not None:
        known = None if known.ended else known
    if known is not None:
        known.check()
    foreign = known is None and hvd.is_initialized()
    places = meeting.exchange(
        "place",
        {
            "runtime": known.name if known else "foreign" if foreign else "",
            "node": environment.node_rank,
            "new": uuid.uuid4().hex,
        },
    )
    new: str = places[0]["new"]
    running = {place["runtime"] for place in places}
    if len(running) == 1 and running != {""} and meeting.agree("alive", _is_alive(hvd, new, timeout)):
        if known is None:
            _check_place(hvd, environment)
            known = _process.runtime = HorovodRuntime(
                hvd, new, channel.scoped("sets"), environment.rank, environment.world_size
            )
        return known, new
    if known is not None:
        known.end("another rank has no connection to it any more")
    elif hvd.is_initialized():
        hvd.shutdown()
    _initialise(hvd, environment, meeting, [place["node"] for place in places], timeout)
    _process.runtime = HorovodRuntime(hvd, new, channel.scoped("sets"), environment.rank, environment.world_size)
    if getattr(importlib.import_module("horovod"), "collective_strategy_revision", 0) < 1 and environment.rank == 0:
        log.warning(
            "This Horovod was not built by '%s'. It aborts all processes when one of them dies while sub-groups exist, "
            "and never reports operations that wait for ever.",
            INSTALL,
        )
    return _process.runtime, new


def meet_through_mpi(environment: LaunchEnvironment) -> LaunchEnvironment:
    """Starts Horovod over MPI, and tells all ranks where rank 0 will serve the store.

    Raises:
        EnvironmentConfigError: this Horovod has no MPI, and nothing says where the processes meet.
    """
    hvd = load_horovod()
    if not hvd.mpi_built():
        raise EnvironmentConfigError(
            f"mpirun started {environment.world_size} processes, but this Horovod was built without MPI and nothing "
            "says where they meet. Set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500), "
            f"or build it with MPI: {INSTALL} --mpi"
        )
    if not hvd.is_initialized():
        with _native_environment({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if environment.world_size > 2 else {}):
            hvd.init()
    _check_place(hvd, environment)
    with socket.socket() as probe:
        probe.bind(("", 0))
        own = (socket.gethostname() if hvd.cross_size() > 1 else "127.0.0.1", probe.getsockname()[1])
    host, port = hvd.broadcast_object(own, 0, name="collective_strategy.store")
    return replace(environment, master_addr=host, master_port=port)


class _Meeting:
    """Values that all ranks exchange through the side channel."""

    def __init__(self, channel: SideChannel, environment: LaunchEnvironment, timeout: timedelta) -> None:
        self._channel = channel
        self._environment = environment
        self._timeout = timeout

    def exchange(self, key: str, value: Any) -> list[Any]:
        rank, size = self._environment.rank, self._environment.world_size
        self._channel.set(f"{key}/{rank}", json.dumps(value))
        keys, cause = [f"{key}/{other}" for other in range(size)], None
        try:
            arrived = self._channel.poll(keys, self._timeout, unless=_LEFT)
            left = None if arrived else self._channel.get(_LEFT)
            if left:
                raise RendezvousError(f"rank {rank} of {size} cannot start Horovod, because {left}")
            if arrived:
                return [json.loads(text) for text in self._channel.collect(keys, self._timeout)]
        except RendezvousError:
            raise
        except RuntimeError as error:
            cause = error
        missing = [other for other in range(size) if not self._has(f"{key}/{other}")]
        raise RendezvousError(
            f"rank {rank} of {size} waited {self._timeout.total_seconds():g} s for ranks {missing} to start "
            "Horovod; they have ended or hang. Look at their output."
        ) from cause

    def leave(self, error: BaseException) -> None:
        """Tells the ranks that wait for this one, or come to it, that it does not start. Waits for nobody."""
        with contextlib.suppress(RuntimeError):  # the store may be gone already
            self._channel.set(_LEFT, f"rank {self._environment.rank} ended with {type(error).__name__}: {error}")

    def agree(self, key: str, flag: bool) -> bool:
        return all(self.exchange(key, flag))

    def _has(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return self._channel.has(key)
        return False


def _is_alive(hvd: Any, name: str, timeout: timedelta) -> bool:
    try:
        handle = hvd.allreduce_async(torch.zeros(1), name=f"alive.{name}", op=hvd.Sum)
        wait_for(hvd, handle, timeout.total_seconds())
    except Exception:
        return False
    return True


def _check_place(hvd: Any, environment: LaunchEnvironment) -> None:
    if (hvd.rank(), hvd.size()) != (environment.rank, environment.world_size):
        raise CollectiveStateError(
            f"Horovod is initialised as rank {hvd.rank()} of {hvd.size()}, but this job's environment says rank "
            f"{environment.rank} of {environment.world_size}. Call hvd.shutdown() first, or start the processes alike."
        )


def _initialise(
    hvd: Any, environment: LaunchEnvironment, meeting: _Meeting, nodes: Sequence[int], timeout: timedelta
) -> None:
    """Starts Horovod with the launcher's variables, or with ours where another launcher started the processes."""
    meets_here = environment.source != "horovod" and environment.world_size > 1
    if environment.rank == 0 and meets_here:
        if _process.server is not None:
            _process.server.close()
        _process.server = KeyValueServer(environment.master_addr)
    address = _process.server and [_process.server.host, _process.server.port]
    server = meeting.exchange("server", address if environment.rank == 0 else None)[0] if meets_here else None
    variables = {} if environment.source == "horovod" else _variables(environment, nodes)
    if "HOROVOD_CACHE_CAPACITY" not in os.environ:
        # it is keyed by name, and our names do not come again: it would fill up, and warn of it
        variables["HOROVOD_CACHE_CAPACITY"] = "0"
    if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
        # how long its thread waits for a process that is stopped; until then no process can end
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(min(max(timeout, _SHORTEST_PATIENCE), _PATIENCE).seconds)
    lasting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": server[0], "HOROVOD_GLOO_RENDEZVOUS_PORT": server[1]} if server else {}
    if environment.world_size > 2:
        variables["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    # Horovod reads these two again when a process set is made
    for name, value in lasting.items():
        os.putenv(name, str(value))
    try:
        with _native_environment(variables):
            hvd.init()
    except ValueError as error:
        raise RendezvousError(
            f"rank {environment.rank} of {environment.world_size} could not start Horovod: {error} All ranks joined "
            "the store, so look at the network interface (HOROVOD_GLOO_IFACE) and at the other ranks' output."
        ) from error
    _check_place(hvd, environment)


def _variables(environment: LaunchEnvironment, nodes: Sequence[int]) -> dict[str, str]:
    """What horovodrun would have set for this place; ``nodes`` lists the node of every rank."""
    here = [rank for rank, node in enumerate(nodes) if node == environment.node_rank]
    local_rank = here.index(environment.rank)
    across = sorted(node for node in set(nodes) if nodes.count(node) > local_rank)
    variables = {
        "HOROVOD_RANK": environment.rank,
        "HOROVOD_SIZE": environment.world_size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": len(here),
        "HOROVOD_CROSS_RANK": across.index(environment.node_rank),
        "HOROVOD_CROSS_SIZE": len(across),
        "HOROVOD_HOSTNAME": f"node{environment.node_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if environment.is_loopback and "HOROVOD_GLOO_IFACE" not in os.environ and os.path.isdir("/sys/class/net/lo"):
        variables["HOROVOD_GLOO_IFACE"] = "lo"
    return {name: str(value) for name, value in variables.items()}


@contextlib.contextmanager
def _native_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for native code alone: to Python, and to the processes it describes, nothing was launched."""
    for name, value in variables.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in variables:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)

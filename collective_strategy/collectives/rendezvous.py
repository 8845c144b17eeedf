"""How the processes of a torch job find each other: one store, joined once, checked for missing and doubled ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import EnvironmentConfigError, RendezvousError
from collective_strategy.collectives.key_value import KeyValueClient
from collective_strategy.collectives.side_channel import second_connection


class _ProcessStores:
    """The stores of this process.

    A port is a resource of the process: the store at it is opened once and kept, so that a second set-up in the same
    processes cannot meet the server of the first while it closes. Generations keep the keys apart.
    """

    def __init__(self) -> None:
        self._stores: dict[tuple[int, str, int], tuple[Store, Store | None]] = {}
        self._generations: dict[tuple[int, str, int, int], int] = {}
        self._lock = threading.Lock()

    def open(self, environment: LaunchEnvironment, timeout: timedelta) -> tuple[Store, Store | None, int]:
        """The store, a second connection to it, and how often this rank has opened it before."""
        key = (os.getpid(), environment.master_addr, environment.master_port)
        own = (*key, environment.rank)
        with self._lock:
            if key not in self._stores:
                self._stores[key] = _connections(environment, timeout)
            self._generations[own] = self._generations.get(own, -1) + 1
            return *self._stores[key], self._generations[own]


_stores = _ProcessStores()


def join(environment: LaunchEnvironment, timeout: timedelta, settings: str) -> tuple[Store, Store | None]:
    """Meets the other processes. Each makes the same few store operations, however many processes there are.

    Args:
        environment: This process' place.
        timeout: How long to wait for the others.
        settings: Must be equal on all ranks.

    Returns:
        Two connections to a store of this generation of this job alone; the second may be None.

    Raises:
        RendezvousError: a rank is missing or doubled, the port is taken, or the settings differ.
    """
    base, second, generation = _stores.open(environment, timeout)
    job = environment.job_id or "job"
    prefix = f"collective_strategy/{job}/{environment.attempt}/{generation}"
    store = PrefixStore(prefix, base)
    rank, world_size = environment.rank, environment.world_size
    where = f"{environment.master_addr}:{environment.master_port}"
    try:
        if store.add(f"arrived/{rank}", 1) > 1:
            store.set("complete", f"doubled:{rank}")
            raise RendezvousError(_doubled(rank, world_size, where))
        first = bytes(store.compare_set("settings", "", settings)).decode()
        if first != settings:
            store.set("complete", f"settings:rank {rank} has [{settings}], another rank has [{first}]")
        elif store.add("joined", 1) == world_size:
            store.set("complete", "yes")
        other = store if second is None else PrefixStore(prefix, second)
        _interruptibly(lambda: store.wait(["complete"], timeout), lambda: other.set("complete", f"left:{rank}"))
        outcome, _, detail = bytes(store.get("complete")).decode().partition(":")
    except RendezvousError:
        raise
    except Exception as error:
        raise RendezvousError(_missing(store, environment, timeout, where)) from error
    if outcome == "doubled":
        raise RendezvousError(_doubled(int(detail), world_size, where))
    if outcome == "left":
        raise RendezvousError(f"rank {detail} of {world_size} was interrupted while the processes met at {where}.")
    if outcome == "settings":
        raise RendezvousError(f"the ranks were set up differently: {detail}. Give all ranks the same arguments.")
    return store, None if second is None else PrefixStore(prefix, second)


def _interruptibly(act: Callable[[], object], release: Callable[[], object]) -> None:
    """Runs ``act``, which waits in native code, where Ctrl-C would be heard only at its end; ``release`` ends it."""
    if threading.current_thread() is not threading.main_thread():
        act()
        return
    errors: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="collective-rendezvous", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        release()
        thread.join(5.0)  # native code must not wait while the interpreter ends
        raise
    if errors:
        raise errors[0]


def _await_listener(host: str, port: int, timeout: timedelta) -> None:
    """Waits, in Python, until somebody listens there, or for ``timeout``."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left, 5.0)):
                return
        except OSError:
            time.sleep(min(left, 0.1))


def _connections(environment: LaunchEnvironment, timeout: timedelta) -> tuple[Store, Store | None]:
    if environment.ranks_are_threads and environment.local_world_size == environment.world_size:
        store = HashStore()  # a wait in it holds up only the thread that waits
        return store, store
    connection = _connect(environment, timeout)
    return connection, second_connection(connection)


def _connect(environment: LaunchEnvironment, timeout: timedelta) -> Store:
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.store_is_served
    if environment.world_size == 1 and port == 0:
        return HashStore()
    if environment.key_value:
        return _connect_through_launcher(environment, timeout)
    if port == 0:
        raise EnvironmentConfigError(
            f"{environment.source} says that this is rank {environment.rank} of {environment.world_size}, but not "
            "where the processes meet. Set MASTER_ADDR and MASTER_PORT, equal on all ranks (mpirun -x MASTER_PORT=...)."
        )
    try:
        if not serves:
            _await_listener(host, port, timeout)
        return TCPStore(host, port, None, serves, timeout, wait_for_workers=False)
    except Exception as error:
        if serves:
            raise RendezvousError(
                f"rank 0 cannot listen at {host}:{port}: {error}. The port is taken by another program, or a second "
                "process claims rank 0. Choose another MASTER_PORT, and see that every process has its own RANK."
            ) from error
        raise RendezvousError(
            f"rank {environment.rank} of {environment.world_size} did not reach rank 0 at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {error}. Start all processes, with the same MASTER_ADDR and MASTER_PORT."
        ) from error


def _connect_through_launcher(environment: LaunchEnvironment, timeout: timedelta) -> Store:
    """Rank 0 listens at a free port and writes it into the launcher's key-value server."""
    server = KeyValueClient(environment.key_value, "collective_strategy")
    rank, seconds = environment.rank, timeout.total_seconds()
    try:
        if rank == 0:
            host = _own_address(environment.master_addr, environment.master_port)
            store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            server.put("store", f"{host} {store.port}")
            return store
        host, _, port = server.wait("store", seconds).partition(" ")
        return TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    except Exception as error:
        raise RendezvousError(
            f"rank {rank} of {environment.world_size} did not meet rank 0 through the launcher's server at "
            f"{environment.key_value} within {seconds:g} s: {error}. Rank 0 has not started or has ended: look at its "
            "output; see that every host reaches the one that the job was launched on."
        ) from error


def _own_address(other: str, port: int) -> str:
    """The address of this host that ``other`` sees; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, port))
        address: str = probe.getsockname()[0]
        return address


def _missing(store: Store, environment: LaunchEnvironment, timeout: timedelta, where: str) -> str:
    world_size = environment.world_size
    try:
        absent = [rank for rank in range(world_size) if not store.check([f"arrived/{rank}"])]
        seen = f"{world_size - len(absent)} of {world_size} processes joined; missing ranks: {absent[:16]}"
    except Exception:
        seen = f"rank {environment.rank} of {world_size} lost the store, whose process (rank 0) probably ended"
    return (
        f"the processes did not all meet at {where} within {timeout.total_seconds():g} s: {seen}. Start the missing "
        "ones, or look at their output; every process needs the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and its "
        "own RANK."
    )


def _doubled(rank: int, world_size: int, where: str) -> str:
    return (
        f"two processes claim rank {rank} of {world_size} at {where}. Every process needs its own RANK, and two jobs "
        "need different MASTER_PORTs."
    )

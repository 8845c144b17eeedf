"""Store operations that each rank makes while a collective with a mesh is set up, by number of ranks.

    python benchmarks/setup_cost.py     # 4, 8 and 16 gloo processes, torch's fake process group at 16,384 ranks

Counted on the client: every call that reaches the store, ours and those of torch's own groups.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MESH = {"data": -1, "model": 2}
UNIONS = {"all": ("data", "model")}


class CountingStore(dist.Store):
    """Hands every call on and counts it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.inner = store
        self.calls: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.calls["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += 1
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.calls["compare_set"] += 1
        return self.inner.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self.calls["wait"] += 1
        self.inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        self.calls["check"] += 1
        return self.inner.check(keys)

    def delete_key(self, key: str) -> bool:
        self.calls["delete_key"] += 1
        return self.inner.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        return self.inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.calls["multi_set"] += 1
        self.inner.multi_set(keys, values)

    def append(self, key: str, value: Any) -> None:
        self.calls["append"] += 1
        self.inner.append(key, value)

    def has_extended_api(self) -> bool:
        return True


def count_on_one_rank(rank: int, world_size: int, port: int) -> None:
    """One process of the measurement; rank 0 prints its counts."""
    from collective_strategy.collectives import LaunchEnvironment, TorchDistributedCollective, rendezvous

    stores: list[CountingStore] = []
    connect = rendezvous._connect

    def counted(*arguments: Any) -> dist.Store:
        stores.append(CountingStore(connect(*arguments)))
        return stores[-1]

    rendezvous._connect = counted
    place = LaunchEnvironment(rank, world_size, rank, world_size, master_port=port, source="standard")

    def measure(**settings: Any) -> tuple[dict[str, int], float]:
        before, began = Counter(stores[0].calls) if stores else Counter(), time.perf_counter()
        with TorchDistributedCollective("gloo", timeout=60, **settings).setup(place):
            took = time.perf_counter() - began
            return dict(stores[0].calls - before), took

    world, world_seconds = measure(check=False)
    meshed, mesh_seconds = measure(mesh=MESH, unions=UNIONS, check=False)
    if rank == world_size - 1:
        print(json.dumps({"world": world, "mesh": meshed, "seconds": [world_seconds, mesh_seconds]}), flush=True)


def on_fake_group(world_size: int) -> None:
    """Set-up time and memory of one rank of a very large job."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from collective_strategy.collectives import LaunchEnvironment, TorchDistributedCollective

    rank = world_size // 2 + 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    mesh = {"data": -1, "ensemble": 4, "model": 8}
    collective = TorchDistributedCollective(mesh=mesh, unions={"batch": ("data", "ensemble")})
    collective.setup(LaunchEnvironment(rank=rank, world_size=world_size, source="standard"))
    seconds = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"fake group, {world_size} ranks, 3 axes and a union: {seconds * 1000:.1f} ms, {grown:.1f} MiB more")


def main() -> None:
    """Starts the processes and prints a table."""
    for world_size in (4, 8, 16):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-W", "ignore", __file__, "rank"]
        processes = [
            subprocess.Popen(
                [*arguments, str(rank), str(world_size), str(port)], stdout=subprocess.PIPE, env=environment
            )
            for rank in range(world_size)
        ]
        lines = [process.communicate(timeout=300)[0].decode() for process in processes]
        report = json.loads(lines[-1])
        world, meshed = report["world"], report["mesh"]
        print(f"{world_size:3d} ranks: world {sum(world.values())} {world}")
        print(f"           world, 2 axes and a union {sum(meshed.values())} {meshed}")
        print(f"           seconds {report['seconds'][0]:.3f} and {report['seconds'][1]:.3f}")
    on_fake_group(16384)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        count_on_one_rank(*(int(value) for value in sys.argv[2:5]))
    else:
        main()

"""What check mode and the counters cost: seconds per call beside the raw torch.distributed call, in one run.

python benchmarks/check_mode.py         # 2 gloo processes on this machine
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def per_call(call: Callable[[], Any], calls: int = 300) -> float:
    """Median microseconds of a call in 7 rounds."""
    rounds = []
    for _ in range(7):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(rounds)


def rank_main() -> None:
    """One process."""
    import collective_strategy

    torch.set_num_threads(1)
    x = torch.ones(1000)
    with collective_strategy.init(timeout=120, check=True) as collective:
        checker = collective._checker

        def unchecked(call: Callable[[], Any]) -> Callable[[], Any]:
            def without() -> Any:
                collective._checker = None
                try:
                    return call()
                finally:
                    collective._checker = checker

            return without

        def counters_off(call: Callable[[], Any]) -> Callable[[], Any]:
            counters = collective.counters

            class Nothing:
                count = waited = staticmethod(lambda *_: None)

            def without() -> Any:
                collective.counters = Nothing()  # type: ignore[assignment]
                try:
                    return unchecked(call)()
                finally:
                    collective.counters = counters

            return without

        calls = {
            "raw all_reduce of a clone": lambda: dist.all_reduce(x.clone()),
            "all_reduce, check on": lambda: collective.all_reduce(x),
            "all_reduce, check off": unchecked(lambda: collective.all_reduce(x)),
            "all_reduce, check and counters off": counters_off(lambda: collective.all_reduce(x)),
            "all_reduce_, in place": lambda: collective.all_reduce_(x, "max"),
        }
        for name, call in calls.items():
            microseconds = per_call(call)
            if collective.rank == 0:
                print(f"{name:38s} {microseconds:7.0f} us per call", flush=True)


def main() -> None:
    """Starts the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}}
        processes.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, "rank"], env=environment))
    if any([process.wait(timeout=600) for process in processes]):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    rank_main() if sys.argv[1:] else main()

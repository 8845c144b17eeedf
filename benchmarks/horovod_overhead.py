"""Time of a step's gradients and of one operation: ours over Horovod's own, in one run, interleaved, medians.

    python benchmarks/horovod_overhead.py   # 2 processes on this machine

Peers: ``hvd.DistributedOptimizer`` with a plain SGD, and the raw named asynchronous call, waited for as ours is and as
Horovod's ``synchronize`` does. Two models: 400 parameters of 64 x 64, and 50 MB of gradients in 12 layers of 1024 x
1024. Both run in the same processes over the same background thread, with Horovod's cache of responses, which only its
own optimizer profits from.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

STEPS, WARM_UP, CALLS = 40, 5, 400


def many_small() -> nn.Module:
    """400 weights of 64 x 64."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(400)])


def large() -> nn.Module:
    """50 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])


def step_of_ours(module: nn.Module, collective: Any, x: torch.Tensor) -> Callable[[], None]:
    """Forward, backward with reduced gradients, SGD."""
    from collective_strategy.gradients import GradientReducer

    reducer = GradientReducer(module, collective)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        with reducer.backward():
            module(x).mean().backward()
        optimizer.step()

    return step


def step_of_horovod(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """The same with Horovod's optimizer."""
    import horovod.torch as hvd

    plain = torch.optim.SGD(module.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=module.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        module(x).mean().backward()
        optimizer.step()

    return step


def medians(steps: Mapping[str, Callable[[], Any]], count: int, meet: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each, taken in turns, in an order that is drawn anew each time, alike on all ranks."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    order, drawn = list(steps), random.Random(0)
    for number in range(WARM_UP + count):
        drawn.shuffle(order)
        for name in order:
            meet()
            began = time.perf_counter()
            steps[name]()
            if number >= WARM_UP:
                seen[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(values) for name, values in seen.items()}


def rank_main() -> None:
    """One process."""
    import horovod.torch as hvd

    import collective_strategy
    from collective_strategy.collectives.horovod_runtime import wait_for

    torch.set_num_threads(1)
    with collective_strategy.init("horovod", timeout=300, check=False) as collective:
        lines = []
        for title, make, width in (("400 small", many_small, 64), ("50 MB", large, 1024)):
            x = torch.randn(8, width)
            steps = {"ours": step_of_ours(make(), collective, x), "DistributedOptimizer": step_of_horovod(make(), x)}
            found = medians(steps, STEPS, collective.barrier)
            lines.append(_line(f"step, {title}", found))
        numbers = itertools.count()
        for size in (1, 250_000):
            x = torch.ones(size)

            def started(x: torch.Tensor = x) -> int:
                handle: int = hvd.allreduce_async_(x, op=hvd.Sum, name=f"raw.{next(numbers)}")
                return handle

            calls: dict[str, Callable[[], Any]] = {
                "ours": lambda x=x: collective.all_reduce_(x),  # type: ignore[misc]
                "raw, waited for alike": lambda started=started: wait_for(hvd, started(), 300),  # type: ignore[misc]
                "raw, synchronize": lambda started=started: hvd.synchronize(started()),  # type: ignore[misc]
            }
            lines.append(_line(f"all_reduce_ of {size}", medians(calls, CALLS, collective.barrier)))
        if collective.rank == 0:
            print("\n".join(lines))


def _line(title: str, found: Mapping[str, float]) -> str:
    ours = found["ours"]
    parts = [f"ours {ours:.2f} ms"]
    parts += [f"{name} {value:.2f} ms ({ours / value:.2f})" for name, value in found.items() if name != "ours"]
    return f"{title:22s} " + ", ".join(parts)


def main() -> int:
    """Starts two processes."""
    if "RANK" in os.environ:
        rank_main()
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared["HOROVOD_CACHE_CAPACITY"] = "1024"
    processes = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())

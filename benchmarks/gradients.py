"""Time and memory of a step's gradients: our reducer over its peers, in one run, interleaved, medians.

    python benchmarks/gradients.py          # 2 gloo processes on this machine

Peers: DistributedDataParallel with gradient_as_bucket_view=True, and one blocking all-reduce per parameter in a hook.
Two models: 400 parameters of 64 x 64, and 50 MB of gradients in 12 layers of 1024 x 1024.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, WARM_UP = 30, 5


def many_small() -> nn.Module:
    """400 weights of 64 x 64."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(400)])


def large() -> nn.Module:
    """50 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()) for _ in range(12)])


def stepper(kind: str, module: nn.Module, collective: Any) -> Callable[[torch.Tensor], None]:
    """One forward and backward with reduced gradients."""
    if kind == "ours":
        from collective_strategy.gradients import GradientReducer

        reducer = GradientReducer(module, collective)

        def step(x: torch.Tensor) -> None:
            module.zero_grad()
            with reducer.backward():
                module(x).sum().backward()

        return step
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

        def step(x: torch.Tensor) -> None:
            module.zero_grad()
            wrapped(x).sum().backward()

        return step
    if kind == "local":

        def step(x: torch.Tensor) -> None:
            module.zero_grad()
            module(x).sum().backward()

        return step

    def blocking(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(blocking)

    def step(x: torch.Tensor) -> None:
        module.zero_grad()
        module(x).sum().backward()

    return step


def measure(collective: Any, make: Callable[[], nn.Module], width: int, kinds: list[str]) -> dict[str, float]:
    """Median seconds of a step by kind, interleaved."""
    steps = {kind: stepper(kind, make(), collective) for kind in kinds}
    x = torch.randn(16, width)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_number in range(STEPS + WARM_UP):
        for kind in kinds if round_number % 2 else reversed(kinds):
            collective.barrier()
            began = time.perf_counter()
            steps[kind](x)
            if round_number >= WARM_UP:
                times[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(values) for kind, values in times.items()}


def memory(collective: Any, kind: str) -> float:
    """MiB that this process grew by, at most, in 5 steps of the large model, gradients and buckets included.

    Memory that both processes map counts half in each.
    """
    module = large()
    collective.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - shared_kilobytes()
    collective.barrier()
    step = stepper(kind, module, collective)
    for _ in range(5):
        step(torch.randn(16, 1024))
    collective.barrier()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - shared_kilobytes() - before
    collective.barrier()
    return grown / 1024


def shared_kilobytes() -> int:
    """What this process maps less its part of it, when memory that n processes map counts 1/n in each."""
    with open("/proc/self/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file.readlines()[1:]}
    return sizes["Rss:"] - sizes["Pss:"]


def rank_main(what: str) -> None:
    """One process."""
    import collective_strategy

    torch.set_num_threads(1)
    with collective_strategy.init(timeout=120) as collective:
        say = print if collective.rank == 0 else lambda *_: None
        if what.startswith("memory"):
            say(f"memory of {what.split('-')[1]:5s}: {memory(collective, what.split('-')[1]):.0f} MiB")
            return
        small = measure(collective, many_small, 64, ["ours", "ddp", "local"])
        # not between the others: it waits so much that the processors have fallen asleep when the next one begins
        blocking = measure(collective, many_small, 64, ["ours", "blocking"])
        big = measure(collective, large, 1024, ["ours", "ddp", "local"])
        for name, result in (("400 of 64x64", small), ("400 of 64x64", blocking), ("50 MB", big)):
            milliseconds = {kind: round(seconds * 1000, 1) for kind, seconds in result.items()}
            ratios = {kind: round(result["ours"] / seconds, 3) for kind, seconds in result.items() if kind != "ours"}
            say(f"{name}: ms {milliseconds}, ours over {ratios}")


def main() -> None:
    """Starts the processes."""
    for what in ("time", "memory-ours", "memory-ddp"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}}
            if what == "time":  # glibc gives freed memory back or not as the heap happens to lie: up to 10 ms a step
                environment |= {"MALLOC_TRIM_THRESHOLD_": str(2**31), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
            processes.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, what], env=environment))
        if any([process.wait(timeout=600) for process in processes]):
            raise SystemExit("a process failed")


if __name__ == "__main__":
    rank_main(sys.argv[1]) if sys.argv[1:] else main()

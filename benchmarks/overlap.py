"""Is communication hidden behind backward? Two network namespaces, a slow link between them, one process in each.

    sudo python benchmarks/overlap.py       # Linux; makes and removes its own namespaces

The link's rate is chosen so that reducing the gradients takes as long as computing them. A step that hides one behind
the other takes about as long as the longer of the two; one that does not takes their sum. Private weights (data
axis) and shared weights (model axis), all layers used and one layer unused on rank 1.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

NAMESPACES = ("collective-a", "collective-b")
ADDRESSES = ("10.201.77.1", "10.201.77.2")
LAYERS, WIDTH, BATCH = 12, 1024, 768


class Net(nn.Module):
    """A stack of layers of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, left_out: int | None) -> torch.Tensor:
        """The sum of the last layer's output."""
        for index, layer in enumerate(self.layers):
            if index != left_out:
                x = torch.tanh(layer(x))
        return x.sum()


def rank_main(case: str, left_out: bool) -> None:
    """One process: prints the medians as JSON on rank 0."""
    import collective_strategy
    from collective_strategy.gradients import GradientReducer

    torch.set_num_threads(1)
    mesh = {"data": 2, "model": 1} if case == "private" else {"data": 1, "model": 2}
    with collective_strategy.init(timeout=120, mesh=mesh) as collective:
        module = Net()
        if case == "shared":
            collective_strategy.shared(module, over="model")
        reducer = GradientReducer(module, collective)
        missing = 3 if left_out and collective.rank == 1 else None
        x = torch.randn(BATCH, WIDTH)
        times: dict[str, list[float]] = {"backward": [], "reduction": [], "step": []}
        for _ in range(8):
            module.zero_grad()
            loss = module(x, missing)
            began = time.perf_counter()
            with reducer.no_sync(), reducer.backward():
                loss.backward()
            times["backward"].append(time.perf_counter() - began)
            collective.barrier()
            began = time.perf_counter()
            reducer.reduce_gradients()
            times["reduction"].append(time.perf_counter() - began)
            module.zero_grad()
            loss = module(x, missing)
            collective.barrier()
            began = time.perf_counter()
            with reducer.backward():
                loss.backward()
            times["step"].append(time.perf_counter() - began)
        medians: dict[str, Any] = {name: statistics.median(values[2:]) for name, values in times.items()}
        statistics_ = reducer.statistics
        launched = collective.all_gather_object((statistics_.launched_by, statistics_.hooks))
        medians["launched"] = launched
        if collective.rank == 0:
            print(json.dumps(medians), flush=True)


def run(command: str) -> None:
    """A command that must succeed."""
    subprocess.run(command.split(), check=True)


def link(rate: str | None) -> None:
    """Joins the namespaces by a veth pair, limited to ``rate`` in each direction."""
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        run(f"ip netns add {name}")
        run(f"ip -n {name} link set lo up")
    run(f"ip link add cs-a netns {NAMESPACES[0]} type veth peer name cs-b netns {NAMESPACES[1]}")
    for name, device, address in zip(NAMESPACES, ("cs-a", "cs-b"), ADDRESSES, strict=True):
        run(f"ip -n {name} addr add {address}/30 dev {device}")
        run(f"ip -n {name} link set {device} up")
        if rate:
            run(f"tc -n {name} qdisc add dev {device} root tbf rate {rate} burst 256kb latency 500ms")


def measure(case: str, left_out: bool) -> dict[str, Any]:
    """Runs one process in each namespace."""
    processes = []
    for rank, (name, device) in enumerate(zip(NAMESPACES, ("cs-a", "cs-b"), strict=True)):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": ADDRESSES[0],
                 "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": 1}  # fmt: skip
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        arguments = ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", __file__, case, str(int(left_out))]
        processes.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE))
    outputs = [process.communicate(timeout=600)[0].decode() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed")
    result: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return result


def main() -> None:
    """Calibrates the link, then measures."""
    try:
        link(None)
        backward = measure("private", False)["backward"]
        gradients = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
        rate = int(gradients * 8 / backward / 1000)  # a ring over two ranks sends each gradient once in each direction
        print(
            f"backward {backward * 1000:.0f} ms, gradients {gradients / 2**20:.0f} MiB, link {rate / 1000:.0f} Mbit/s"
        )
        for case in ("private", "shared"):
            for left_out in (False, True):
                link(f"{rate}kbit")
                result = measure(case, left_out)
                longer = max(result["backward"], result["reduction"])
                text = {name: round(value * 1000) for name, value in result.items() if name != "launched"}
                print(
                    f"{case}, layer left out on rank 1: {left_out}: ms {text}, step over longer "
                    f"{result['step'] / longer:.2f}"
                )
                for rank, (launched, hooks) in enumerate(result["launched"]):
                    print(f"    rank {rank}: {hooks} hooks; buckets were launched after hook {launched}")
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    rank_main(sys.argv[1], sys.argv[2] == "1") if len(sys.argv) > 2 else main()

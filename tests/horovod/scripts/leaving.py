"""Pairs of processes of which one leaves while the other one needs it: ``leaving.py OUT``.

All are forked from this process, which has imported what they need, and write to a file of their own. How each ended is
written to ``OUT/ended.json``: the exit status, or "does not end", and what it said.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import horovod.torch  # noqa: F401
import torch

import collective_strategy

PATIENCE = 25.0  # seconds; Horovod waits for 30 s for a process that is stopped
out = Path(sys.argv[1])
SCENARIOS = ("stopped", "early", "early, check", "in flight", "forked", "forked, check", "stalled", "late operation")


def act(how: str) -> None:
    timeout = 3 if how == "stopped" else 100
    with collective_strategy.init("horovod", timeout=timeout, check=how.endswith("check")) as collective:
        processes = collective.all_gather_object(os.getpid())
        collective.barrier()
        first = collective.rank == 0
        if how.startswith("forked"):
            child = os.fork()
            if child == 0:
                sys.exit(7)  # through the end of the block and of the interpreter
            _, status = os.waitpid(child, 0)
            print(f"the child ended with {os.waitstatus_to_exitcode(status)}, the sum is {collective.all_reduce(1)}")
        elif how == "in flight" and first:
            handles = [collective.all_reduce_(torch.ones(2), async_op=True) for _ in range(3)]
            print(f"left with {len(handles)} operations in flight")
        elif how == "stopped" and not first:
            time.sleep(200)
        elif how == "stalled":
            _ = collective.all_reduce(1) if first else collective.all_gather(1)
        elif how == "late operation":
            import horovod.torch as hvd

            hvd.shutdown()
            collective.all_reduce(1.0)
        elif first:
            if how == "stopped":
                os.kill(processes[1], signal.SIGSTOP)
                print("stopped", flush=True)
            collective.all_reduce(1.0)


def start(how: str, rank: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    with (out / f"{how}.{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if how == "stalled":
        os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2")
    act(how)
    sys.exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def code(process: int, deadline: float) -> int | str:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "does not end"


def pair(how: str) -> list[int]:
    port = free_port()
    return [start(how, rank, port) for rank in range(2)]


if __name__ == "__main__":
    collective_strategy.init("single").all_reduce(1)  # what is imported with the first operation is imported here once
    waiting, stopped = pair("stopped")
    while "stopped" not in (out / "stopped.0").read_text():
        time.sleep(0.05)
    first = code(waiting, time.monotonic() + PATIENCE)
    codes = {"stopped": [first, code(stopped, 0)]}
    # one after the other: Horovod's threads keep the processor busy
    for how in SCENARIOS[1:]:
        deadline = time.monotonic() + 60
        codes[how] = [code(process, deadline) for process in pair(how)]
    texts = {how: [(out / f"{how}.{rank}").read_text() for rank in range(2)] for how in SCENARIOS}
    (out / "ended.json").write_text(json.dumps({how: [codes[how], texts[how]] for how in SCENARIOS}))

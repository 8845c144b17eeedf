"""A process that has imported torch once and forks the workers, so that a new worker costs milliseconds.

``pool.Spawner`` starts it with the control socket's descriptor and the modules to import as arguments. It never runs
a torch operation itself: a process without threads can be forked safely. Requests and answers have a fixed size.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection

REQUEST = struct.Struct("!cq")  # FORK or FORK_DEVICES with descriptors, or WAIT for a process id
ANSWER = struct.Struct("!q")  # the process id, or the exit code (minus the signal)
FORK = b"f"  # one rank
FORK_DEVICES = b"d"  # as many ranks as there are connections, each with a device of its own
WAIT = b"w"
DESCRIPTORS = 2 + 64  # the worker's lifeline, the file for its stacks, a connection for each of its ranks


def main() -> None:
    """Serves fork and wait requests until the parent closes the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        # An import that fails here fails again in the worker, where it can be reported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    from collective_strategy.testing.device_threads import serve_devices
    from collective_strategy.testing.worker import serve

    gc.collect()
    gc.freeze()  # collections in the workers skip everything imported here
    control.sendall(ANSWER.pack(os.getpid()))
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, DESCRIPTORS)
        if not request:
            os._exit(0)
        kind, process = REQUEST.unpack(request)
        if kind == WAIT:
            control.sendall(ANSWER.pack(_exit_code(process)))
            continue
        process = os.fork()
        if process == 0:
            control.close()
            lifeline, stacks, *connections = descriptors
            ranks = [Connection(connection) for connection in connections]
            try:
                if kind == FORK_DEVICES:
                    serve_devices(ranks, lifeline, stacks)
                serve(ranks[0], lifeline, stacks)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(ANSWER.pack(process))


def _exit_code(process: int, patience: float = 2.0) -> int:
    deadline = time.monotonic() + patience
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)

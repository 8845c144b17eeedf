"""The process whose threads are the ranks, each with an XLA:CPU device of its own."""

from __future__ import annotations

import faulthandler
import gc
import threading
from multiprocessing.connection import Connection
from typing import Any

from collective_strategy.testing.worker import Call, OwnProcess, Place, die_with_parent, serve_rank


def serve_devices(connections: list[Connection], lifeline: int, stacks: int) -> None:
    """Serves calls until the parent closes the connections. Never returns."""
    die_with_parent(lifeline)
    faulthandler.enable(file=stacks)
    from collective_strategy.collectives.xla_threads import run_on_cpu_devices

    process = SharedProcess(stacks, len(connections))
    run_on_cpu_devices(len(connections), lambda rank: serve_rank(connections[rank], process))


class SharedProcess(OwnProcess):
    """What a call does to the process, done once for all ranks."""

    def __init__(self, stacks: int, ranks: int) -> None:
        super().__init__(stacks)
        self._calls: list[Call] = []
        self._frozen = False
        self._running = self._ranks = ranks
        self._lock = threading.Lock()
        self._begins = threading.Barrier(ranks, self._begin)
        self._meets = threading.Barrier(ranks)
        self._collects = threading.Barrier(ranks, super().collect_garbage)

    def begin(self, call: Call) -> None:
        self._calls.append(call)
        self._begins.wait()

    def _begin(self) -> None:
        if not self._frozen:
            gc.freeze()  # as the spawner does; XLA was imported after that
            self._frozen = True
        super().begin(self._calls[0])
        self._calls.clear()

    def together(self) -> None:
        self._meets.wait()

    def collect_garbage(self) -> None:
        self._collects.wait()

    def watch(self, seconds: float) -> None:
        with self._lock:
            self._running = self._ranks
            super().watch(seconds)

    def unwatch(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                super().unwatch()

    def place(self, place: Place) -> Any:
        from collective_strategy.collectives.xla_runtime import replica_environment

        return replica_environment()

"""The parent's side of the workers: one spawner, pools of processes, and what became of each of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from collective_strategy.testing.spawner import ANSWER, FORK, FORK_DEVICES, REQUEST, WAIT

START = "from collective_strategy.testing.spawner import main; main()"
# Imported once, before forking; the others only if the parent has them already.
PRELOAD = ("torch", "torch.distributed", "collective_strategy.collectives")
PRELOAD_IF_LOADED = ("numpy", "lightning", "pytorch_lightning")


def worker_environment(extra: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """This process's environment, with what ranks on one machine need, unless it says otherwise itself."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # torch looks up the name of every address that it connects to, the loopback address too; where no name server
        # answers, that takes 5 s each time.
        "RES_OPTIONS": "timeout:1",
    }
    return {**defaults, **os.environ, **dict(extra)}


class Spawner:
    """The process that forks the workers."""

    def __init__(self) -> None:
        self.modules = _modules_to_preload()
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno()), *self.modules],
            env={**worker_environment(), "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent, which then ends the workers
        )
        theirs.close()
        self._answer()

    @property
    def usable(self) -> bool:
        """Whether it still runs and has imported what the parent has."""
        return self._process.poll() is None and self.modules == _modules_to_preload()

    def fork(self, descriptors: list[int], *, devices: bool = False) -> int:
        """Forks a process that owns copies of the descriptors; its process id."""
        socket.send_fds(self._control, [REQUEST.pack(FORK_DEVICES if devices else FORK, 0)], descriptors)
        return self._answer()

    def wait(self, process: int) -> int:
        """Waits for a worker that has ended or is about to; its exit code."""
        self._control.sendall(REQUEST.pack(WAIT, process))
        return self._answer()

    def close(self) -> None:
        """Ends the spawner; workers live on."""
        self._control.close()
        self._process.wait()

    def _answer(self) -> int:
        answer = self._control.recv(ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < ANSWER.size:
            raise RuntimeError(
                f"the process that starts the workers ended with code {self._process.wait()}; see its output above"
            )
        number: int = ANSWER.unpack(answer)[0]
        return number


class WorkerProcess:
    """A process of one rank, or of all ranks as threads, seen from the parent."""

    def __init__(self, spawner: Spawner, ranks: int = 1, *, devices: bool = False) -> None:
        self._spawner = spawner
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        pipes = [Pipe() for _ in range(ranks)]
        self.connections = [ours for ours, _ in pipes]
        self.threads: list[str] = []
        lifeline, self._lifeline = os.pipe()
        theirs = [connection.fileno() for _, connection in pipes]
        try:
            self.process = spawner.fork([lifeline, self._stacks.fileno(), *theirs], devices=devices)
        finally:
            for _, connection in pipes:
                connection.close()
            os.close(lifeline)

    def last_words(self) -> str:
        """What the fault handler wrote: stacks when its time was up, or when a signal ended the process."""
        if self._lifeline >= 0:
            self._words = os.pread(self._stacks.fileno(), 1 << 20, 0).decode(errors="replace")
        return self._words

    def last_stacks(self) -> dict[int, str]:
        """Where the thread of each rank stood."""
        return {rank: "\n".join(_blocks(self.last_words(), thread)[:1]) for rank, thread in enumerate(self.threads)}

    def kill(self) -> int:
        """Ends the process if it still runs; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            if self._lifeline >= 0:
                os.kill(self.process, signal.SIGKILL)
        return self.reap()

    def reap(self) -> int:
        """Waits for the end of the process and frees what belongs to it; its exit code."""
        for connection in self.connections:
            connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self.last_words()
            self._lifeline = -1
            self._exit_code = self._spawner.wait(self.process)
            self._stacks.close()
        return self._exit_code


class Worker:
    """One rank, seen from the parent."""

    def __init__(self, process: WorkerProcess, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.process = process
        self.connection = connection
        try:
            self._thread = f"0x{connection.recv():016x}"
        except EOFError:
            code = process.reap()
            raise RuntimeError(
                f"the process of rank {rank} ended with code {code} before it was ready; see its output above. "
                f"{process.last_words()}"
            ) from None
        process.threads.append(self._thread)

    def stacks(self, patience: float = 5.0) -> str:
        """Where its threads stood when its time was up, its own thread first."""
        text, deadline = "", time.monotonic() + patience
        while time.monotonic() < deadline:
            before, text = text, self.process.last_words()
            if self._thread in text and text == before:  # on a busy machine it comes in pieces
                break
            time.sleep(0.05)
        return self._own_thread_first(text) or "no answer: the process was stopped or had no time to run"

    def last_words(self) -> str:
        """What the fault handler wrote when a signal ended the process, its own thread first."""
        words = self.process.last_words()
        title, _, rest = words.partition("\n\n")
        shared = len(self.process.connections) > 1
        stacks = "\n".join(_blocks(rest, self._thread)[: 1 if shared else None])
        return f"{title}\n\n{stacks}" if stacks else words

    def _own_thread_first(self, text: str) -> str:
        return "\n".join(_blocks(text, self._thread))


def _blocks(text: str, first: str) -> list[str]:
    """The stacks of the threads, that of the thread ``first`` at the front."""
    header = r"(?:Current thread|Thread) 0x"
    blocks = re.split(rf"(?m)^(?={header})", text)
    lifeline = "in _die_with_parent"
    blocks = [block.rstrip() for block in blocks if re.match(header, block) and lifeline not in block]
    return sorted(blocks, key=lambda block: first not in block.partition("\n")[0])


class Pool:
    """One worker per rank, and the port at which they meet.

    Args:
        spawner: Who forks.
        size: How many ranks.
        devices: They are threads of one process, each with an XLA:CPU device.
    """

    def __init__(self, spawner: Spawner, size: int, *, devices: bool = False) -> None:
        self.port = _free_port()
        self.devices = devices
        self.processes: list[WorkerProcess] = []
        self.workers: list[Worker] = []
        try:
            for _ in range(1 if devices else size):
                process = WorkerProcess(spawner, size if devices else 1, devices=devices)
                self.processes.append(process)
                for connection in process.connections:
                    self.workers.append(Worker(process, len(self.workers), connection))
        except BaseException:
            self.close()
            raise

    @property
    def connections(self) -> dict[Connection, Worker]:
        """The workers by their connection."""
        return {worker.connection: worker for worker in self.workers}

    def close(self) -> None:
        """Kills the processes. They hold nothing that needs an orderly end, but rank 0 serves the others' store."""
        for process in reversed(self.processes):
            process.kill()


def _modules_to_preload() -> tuple[str, ...]:
    return (*PRELOAD, *(name for name in PRELOAD_IF_LOADED if name in sys.modules))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

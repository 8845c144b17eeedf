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

from collective_strategy.testing.spawner import ANSWER, FORK, REQUEST, WAIT

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

    def fork(self, descriptors: list[int]) -> int:
        """Forks a worker that owns copies of the descriptors; its process id."""
        socket.send_fds(self._control, [REQUEST.pack(FORK, 0)], descriptors)
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


class Worker:
    """The process of one rank, seen from the parent."""

    def __init__(self, spawner: Spawner, rank: int) -> None:
        self.rank = rank
        self._spawner = spawner
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = spawner.fork([theirs.fileno(), lifeline, self._stacks.fileno()])
        finally:
            theirs.close()
            os.close(lifeline)
        self._main_header = f"0x{self.connection.recv():016x}"

    def stacks(self, patience: float = 5.0) -> str:
        """Where its threads stood when its time was up, the main thread first."""
        text, deadline = "", time.monotonic() + patience
        while time.monotonic() < deadline:
            before, text = text, self.last_words()
            if self._main_header in text and text == before:  # on a busy machine it comes in pieces
                break
            time.sleep(0.05)
        return self._main_thread_first(text) or "no answer: the process was stopped or had no time to run"

    def last_words(self) -> str:
        """What the fault handler wrote: stacks when its time was up, or when a signal ended the process."""
        return os.pread(self._stacks.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> int:
        """Ends the process if it still runs; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        return self.reap()

    def reap(self) -> int:
        """Waits for the end of the process and frees what belongs to it; its exit code."""
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self._stacks.close()
            self._exit_code = self._spawner.wait(self.process)
        return self._exit_code

    def _main_thread_first(self, text: str) -> str:
        header = r"(?:Current thread|Thread) 0x"
        blocks = re.split(rf"(?m)^(?={header})", text)
        lifeline = "in _die_with_parent"
        blocks = [block.rstrip() for block in blocks if re.match(header, block) and lifeline not in block]
        return "\n".join(sorted(blocks, key=lambda block: self._main_header not in block.partition("\n")[0]))


class Pool:
    """One worker per rank, and the port at which they meet."""

    def __init__(self, spawner: Spawner, size: int) -> None:
        self.port = _free_port()
        self.workers: list[Worker] = []
        try:
            for rank in range(size):
                self.workers.append(Worker(spawner, rank))
        except BaseException:
            self.close()
            raise

    @property
    def connections(self) -> dict[Connection, Worker]:
        """The workers by their connection."""
        return {worker.connection: worker for worker in self.workers}

    def close(self) -> None:
        """Kills the workers. They hold nothing that needs an orderly end, but rank 0 serves the others' store."""
        for worker in reversed(self.workers):
            worker.kill()


def _modules_to_preload() -> tuple[str, ...]:
    return (*PRELOAD, *(name for name in PRELOAD_IF_LOADED if name in sys.modules))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Horovod in this process: found, waited for, and ended.

Horovod is one background thread per process. One rank's ``shutdown`` ends it on every rank, so a collective that is
torn down leaves it running for the next one; it ends with the process, or where a rank leaves after an error, which the
others then notice at once.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import time
from typing import Any

import torch

from collective_strategy.collectives.errors import CollectiveStateError, was_forked
from collective_strategy.collectives.horovod_groups import ProcessSets
from collective_strategy.collectives.side_channel import SideChannel

INSTALL = "python -m collective_strategy.install_horovod"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_EAGER = 0.005  # seconds in which most operations are complete


def require_horovod() -> None:
    """Looks whether Horovod is installed; nothing of it is imported.

    Raises:
        ImportError: it is not; the message has the command to run.
    """
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(
            "the backend 'horovod' needs Horovod, which is not installed here. A plain pip install cannot build it for "
            f"this torch; run: {INSTALL}"
        )


def load_horovod() -> Any:
    """The module ``horovod.torch``.

    Raises:
        ImportError: it is not installed, or was built for another torch; the message has the command to run.
    """
    require_horovod()
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ImportError(
            f"Horovod is installed but cannot be loaded with torch {torch.__version__}: {error}. It was built for "
            f"another torch; run: {INSTALL}"
        ) from error


def wait_for(hvd: Any, handle: int, seconds: float) -> Any:
    """The result of an operation that was started.

    Horovod's own ``synchronize`` has no time-out and keeps a core busy while it waits.

    Raises:
        TimeoutError: it is not complete after ``seconds``; it stays started.
        HorovodInternalError: another rank ended, or made another call under this name.
    """
    began, pause = time.monotonic(), _SHORTEST_PAUSE
    while not hvd.poll(handle):
        waited = time.monotonic() - began
        if waited > seconds:
            raise TimeoutError("timed out in Horovod: not all ranks have started this operation")
        if waited < _EAGER:
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    try:
        return hvd.synchronize(handle)
    except RuntimeError as error:
        # of its own kind, without the native stack that torch appends
        raise type(error)(str(error).partition("\nException raised from")[0]) from None


class HorovodRuntime:
    """Horovod's background thread of this process, and its process sets.

    Args:
        hvd: The module.
        name: Equal on all ranks, and no other runtime's.
        channel: Where the ranks agree on process sets; it must live as long as the runtime.
        world_size: Number of ranks.
    """

    def __init__(self, hvd: Any, name: str, channel: SideChannel, rank: int, world_size: int) -> None:
        self.hvd = hvd
        self.name = name
        self.process = os.getpid()
        self.ended: str | None = None
        self.sets = ProcessSets(hvd, channel, rank, world_size)
        atexit.register(self.sets.close)

    @property
    def is_here(self) -> bool:
        """Whether Horovod runs, in this process."""
        return self.ended is None and os.getpid() == self.process

    def check(self) -> None:
        """Refuses to communicate where Horovod does not run.

        Raises:
            CollectiveStateError: this is a child of the process that was set up, which has no background thread and
                would wait for ever; or Horovod has ended here.
        """
        if self.is_here:
            return
        if self.ended is not None:
            raise CollectiveStateError(
                f"Horovod has ended in this process ({self.ended}), and what was in flight is lost. Call setup() "
                "again, on all ranks, and start the operation anew."
            )
        raise was_forked("Horovod", self.process)

    def end(self, reason: str) -> None:
        """Ends Horovod in all processes: this one leaves after an error, and the others are not to wait for it."""
        if self.is_here:
            self.ended = reason
            self.sets.close()
            self.hvd.shutdown()

"""Horovod's process sets, made by the members of a group although Horovod wants all ranks to make them.

``hvd.add_process_set`` is an act of all ranks in one order, members or not; ranks that disagree never get one again.
Here a member writes the ranks of a new set into a list on the side channel, one for all, and a thread of every rank
adds the sets in the order of the list. Operations are matched by name, so collectives over the same ranks share a set.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from collective_strategy.collectives.side_channel import SideChannel

GROUP_THREAD = "process-wide Horovod process sets"
_LONG = timedelta(days=1)


class ProcessSets:
    """The process sets of one runtime, by their ranks.

    Args:
        hvd: The module ``horovod.torch``, initialised.
        channel: Keys for these sets alone.
        rank: Own global rank.
        world_size: Number of ranks; up to two ranks need no sets.
    """

    def __init__(self, hvd: Any, channel: SideChannel, rank: int, world_size: int) -> None:
        self._hvd = hvd
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._sets: dict[tuple[int, ...], Any] = {tuple(range(world_size)): hvd.global_process_set}
        self._failure = ""
        self._changed = threading.Condition()
        self._number = 0  # of the list's next entry
        self._closing = False
        self._thread: threading.Thread | None = None
        if world_size > 2:
            waiting = channel.reconnected()
            self._thread = threading.Thread(target=self._serve, args=(waiting,), name=GROUP_THREAD, daemon=True)
            self._thread.start()

    def get(self, ranks: tuple[int, ...], timeout: timedelta) -> Any:
        """The process set of these global ranks; all of them ask for it.

        Raises:
            TimeoutError: not all ranks of the world have added it in time.
            RuntimeError: Horovod refused it, or has ended.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            if ranks in self._sets:
                return self._sets[ranks]
        if self._channel.add(f"asked/{_text(ranks)}") == 1:
            number = self._channel.add("length") - 1
            self._channel.set_all({f"{number}/{rank}": _text(ranks) for rank in range(self._world_size)})
        with self._changed:
            while ranks not in self._sets:
                if self._failure:
                    raise RuntimeError(f"Horovod made no process set of ranks {list(ranks)}: {self._failure}")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"timed out: not all ranks have added the process set of ranks {list(ranks)}")
            return self._sets[ranks]

    def close(self) -> None:
        """Ends the thread, which must not wait in native code while the interpreter ends. Local, idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        with self._changed:
            self._closing, number = True, self._number
        # rank 0 takes the store along: nobody is to be found waiting there
        ranks = range(self._world_size) if self._rank == 0 else [self._rank]
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it what the thread waits for
            self._channel.set_all({f"{entry}/{rank}": "" for entry in (number, number + 1) for rank in ranks})
            thread.join(timeout=1.0)

    def _serve(self, channel: SideChannel) -> None:
        try:
            while True:
                with self._changed:
                    if self._closing:
                        return
                    key = f"{self._number}/{self._rank}"
                text = channel.collect([key], _LONG)[0]
                if not text:
                    return
                ranks = tuple(int(rank) for rank in text.split(","))
                process_set = self._hvd.add_process_set(list(ranks))
                channel.delete(key)
                with self._changed:
                    self._sets[ranks] = process_set
                    self._number += 1
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._failure = f"{type(error).__name__}: {error}"
                self._changed.notify_all()


def _text(ranks: Sequence[int]) -> str:
    return ",".join(str(rank) for rank in ranks)

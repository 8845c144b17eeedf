"""Who is waiting, and for whom: the call in progress of each collective, published when it takes long.

A process keeps its call in memory, which costs nothing. A monitor thread publishes it on the side channel only after
some seconds of waiting, so that a time-out can name the ranks that did not come.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from collective_strategy.collectives.side_channel import SideChannel

log = logging.getLogger("collective_strategy")


@dataclass
class Watch:
    """One collective's call in progress.

    Args:
        name: The collective's name, for messages.
        rank: Own rank in it.
        ranks: Its global ranks.
        channel: Where calls are published, None where there is no side channel.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    channel: SideChannel | None
    call: tuple[int, str, float] | None = None
    published: int = -1
    logged: int = -1
    monitor_channel: SideChannel | None = field(default=None, repr=False)

    def missing(self, number: int) -> list[str]:
        """The ranks that do not wait in call ``number``, and where they were last seen. Never raises."""
        try:
            return self._missing(number, self.channel)
        except Exception:  # the store's host may be the rank that is gone
            return []

    def publish(self, number: int, text: str, channel: SideChannel | None = None) -> None:
        """Tells the other ranks where this one waits."""
        channel = channel or self.channel
        if channel is not None and self.published != number:
            channel.set(f"waiting/{self.rank}", f"{number}:{text}")
            self.published = number

    def _missing(self, number: int, channel: SideChannel | None) -> list[str]:
        if channel is None:
            return []
        result = []
        for rank in range(len(self.ranks)):
            if rank == self.rank:
                continue
            place = self.ranks[rank]
            who = f"rank {rank}" if place == rank else f"rank {rank} of {self.name!r}, which is global rank {place}"
            seen = channel.get(f"waiting/{rank}")
            where = seen.partition(":") if seen else None
            if where is None:
                result.append(f"{who} (not seen waiting in {self.name!r})")
            elif int(where[0]) != number:
                result.append(f"{who} (last seen waiting in {where[2]}, call {where[0]})")
        return result


class Monitor:
    """The thread that publishes long waits, one per process and root collective.

    Args:
        timeout: The collective's time-out; a third of it, 5 seconds at most, passes before a wait is published.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._after = min(5.0, timeout.total_seconds() / 3)
        self._watches: list[Watch] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Starts watching a collective."""
        self._watches.append(watch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collective-monitor", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._after)

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._after / 2)):
            for watch in list(self._watches):
                call = watch.call
                if call is None or watch.monitor_channel is None:
                    continue
                number, text, began = call
                waited = time.monotonic() - began
                try:
                    if waited > self._after:
                        watch.publish(number, text, watch.monitor_channel)
                    if waited > 2 * self._after and watch.logged != number:
                        watch.logged = number
                        missing = watch._missing(number, watch.monitor_channel)
                        if missing:
                            log.warning(
                                "rank %d has waited %.0f s in %s (call %d of %r) for %s",
                                watch.rank, waited, text, number, watch.name, ", ".join(missing),
                            )  # fmt: skip
                except Exception:
                    watch.monitor_channel = None  # the store is gone; the operation itself will report

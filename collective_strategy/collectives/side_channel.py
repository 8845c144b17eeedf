"""The CPU side channel: a key-value store that outlives a time-out, beside the group that carries the data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from collective_strategy.collectives.errors import CollectiveError


class SideChannel:
    """A `torch.distributed.Store` under a prefix.

    Args:
        store: The connection of the calling thread. A blocking wait holds it.
        twin: A second connection to the same store, for the monitor thread; None if there is no other.
        prefix: Put before every key.
    """

    def __init__(self, store: Store, twin: Store | None = None, prefix: str = "") -> None:
        self._store = PrefixStore(prefix, store) if prefix else store
        self._twin = PrefixStore(prefix, twin) if prefix and twin is not None else twin

    def scoped(self, prefix: str) -> SideChannel:
        """The same connections under a longer prefix."""
        return SideChannel(self._store, self._twin, prefix)

    def for_monitor(self) -> SideChannel | None:
        """The same keys over the second connection."""
        return None if self._twin is None else SideChannel(self._twin)

    def reconnected(self) -> SideChannel:
        """The same keys over a connection of its own, which a thread may keep waiting.

        Raises:
            CollectiveError: the store has no second connection.
        """
        connection = second_connection(self._store)
        if connection is None:
            raise CollectiveError("the store cannot be connected to a second time; update torch.")
        return SideChannel(connection)

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def set_if_absent(self, key: str, value: str) -> None:
        """Writes a value where there is none."""
        self._store.compare_set(key, "", value)

    def set_all(self, values: Mapping[str, str]) -> None:
        """Writes several values in one message."""
        self._store.multi_set(list(values), list(values.values()))  # type: ignore[attr-defined]  # missing in the stubs

    def add(self, key: str) -> int:
        """Counts a key up by one; the new count."""
        return int(self._store.add(key, 1))

    def collect(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        """Waits until all keys exist and reads them.

        Raises:
            RuntimeError: not all appeared in time, or the store's host is gone.
        """
        self._store.wait(list(keys), timeout)
        return [value.decode() for value in self._store.multi_get(list(keys))]

    def poll(self, keys: Sequence[str], timeout: timedelta, unless: str) -> bool:
        """Whether all keys exist in time, and before the key ``unless`` does.

        Hears Ctrl-C, unlike `collect`; costs messages while it waits, so it is for set-up.
        """
        deadline, pause = time.monotonic() + timeout.total_seconds(), 1e-3
        while not self._store.check(list(keys)):
            if time.monotonic() > deadline or self.has(unless):
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return True

    def has(self, key: str) -> bool:
        """Whether a key exists, without waiting."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> str | None:
        """The value, None where there is none yet."""
        return bytes(self._store.get(key)).decode() if self.has(key) else None

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(key)


def second_connection(store: Store) -> Store | None:
    """Another client of the same store, None where the store has no such thing.

    Opening one costs a reverse name look-up in torch, so one is made per process and store.
    """
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return clone

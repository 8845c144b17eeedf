"""The CPU side channel: a key-value store that outlives a time-out, beside the group that carries the data."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store


class SideChannel:
    """A `torch.distributed.Store` under a prefix.

    One client connection serves one thread: a blocking wait holds it. `clone` opens another.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store = PrefixStore(prefix, store) if prefix else store

    def scoped(self, prefix: str) -> SideChannel:
        """The same connection under a longer prefix."""
        return SideChannel(self._store, prefix)

    def clone(self) -> SideChannel | None:
        """The same keys over a connection of its own; None where the store cannot be cloned."""
        try:
            return SideChannel(self._store.clone())  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, NotImplementedError):
            return None

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def collect(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        """Waits until all keys exist and reads them.

        Raises:
            RuntimeError: not all appeared in time, or the store's host is gone.
        """
        self._store.wait(list(keys), timeout)
        return [value.decode() for value in self._store.multi_get(list(keys))]

    def has(self, key: str) -> bool:
        """Whether a key exists, without waiting."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> str | None:
        """The value, None where there is none yet."""
        return bytes(self._store.get(key)).decode() if self.has(key) else None

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(key)

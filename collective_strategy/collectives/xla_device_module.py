"""``torch.xla``: what torch asks of a device's module, which torch_xla does not register.

Without it `torch.utils.checkpoint` and `torch.random.fork_rng` raise on XLA's tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch


def register_device_module() -> None:
    """Registers ``torch.xla``, unless somebody has."""
    with _lock:
        if not hasattr(torch, "xla"):
            torch._register_device_module("xla", _XLAModule("torch.xla"))


_lock = threading.Lock()


class _XLAModule(ModuleType):
    """The state of a device's random numbers is a number, as in torch_xla."""

    _initialized = True  # torch saves and restores random states only if it says so

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._thread = threading.local()

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        """Devices of this process."""
        from torch_xla import runtime

        count: int = runtime.addressable_device_count()
        return count

    def current_device(self) -> int:
        """That of the calling thread."""
        index: int | None = getattr(self._thread, "index", None)
        if index is None:
            import torch_xla

            index = int(torch_xla.device().index)
        return index

    @contextmanager
    def device(self, device: int | torch.device) -> Iterator[None]:
        """Another device for `current_device` and the random states. What makes tensors does not look at it."""
        before = getattr(self._thread, "index", None)
        self._thread.index = _index(device)
        try:
            yield
        finally:
            self._thread.index = before

    def get_rng_state(self, device: int | torch.device | None = None) -> int:
        from torch_xla.core import xla_model

        state: int = xla_model.get_rng_state(self._name(device))
        return state

    def set_rng_state(self, state: int, device: int | torch.device | None = None) -> None:
        from torch_xla.core import xla_model

        xla_model.set_rng_state(state, self._name(device))

    def _name(self, device: int | torch.device | None) -> str:
        index = None if device is None else _index(device)
        return f"xla:{self.current_device() if index is None else index}"


def _index(device: int | torch.device) -> int | None:
    return device if isinstance(device, int) else torch.device(device).index

"""Handles of operations in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from collective_strategy.collectives.compiling import outside_graphs


class Handle(ABC):
    """An operation that was started and may not have finished.

    Every handle must be waited for, by the process that started it. Until then the buffers given to the operation
    must be left alone.
    """

    @abstractmethod
    def wait(self) -> Tensor:
        """Blocks until the operation is complete and returns its result (on CUDA: until the stream may use it).

        Raises:
            CollectiveTimeoutError: a rank did not take part in time.
            CollectiveError: the connection to a rank was lost.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class CompletedHandle(Handle):
    """The handle of an operation that finished while it was started."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result

    def is_completed(self) -> bool:
        return True


class GuardedHandle(Handle):
    """A handle whose waiting is watched and whose errors are translated by the collective that made it."""

    def __init__(self, handle: Handle, wait: Callable[[Handle], Tensor], finish: Callable[[Tensor], Tensor]) -> None:
        self._handle = handle
        self._wait = wait
        self._finish = finish
        self._result: Tensor | None = None

    @outside_graphs
    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._finish(self._wait(self._handle))
        return self._result

    def is_completed(self) -> bool:
        return self._result is not None or self._handle.is_completed()

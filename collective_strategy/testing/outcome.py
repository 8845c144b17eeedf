"""What a rank gives back, and how it travels: a value or an exception that may not be picklable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from collective_strategy.testing.pickling import dumps


@dataclass(frozen=True)
class Outcome:
    """What one rank's call of the function ended with: a value, or an exception and its traceback as text."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    def result(self) -> Any:
        """The value; raises the rank's exception, with the rank's traceback as its cause."""
        if self.error is None:
            return self.value
        raise self.error from RankTraceback(self.rank, self.traceback)


class RankTraceback(Exception):
    """Carries the traceback of another process into this one's."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\non rank {rank}:\n{text}")


class RankTimeoutError(TimeoutError):
    """At least one rank did not come back in time. The message says where each rank stood.

    ``stacks`` maps each unfinished rank to the Python stacks of its threads; ``outcomes`` has what the others gave.
    """

    def __init__(self, message: str, stacks: Mapping[int, str], outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.stacks = dict(stacks)
        self.outcomes = list(outcomes)


class WorkerDiedError(RuntimeError):
    """The process of a rank ended in the middle of the call. ``exit_code`` is minus the signal that killed it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LeakedStateError(AssertionError):
    """The function came back but left state of the whole process changed."""


class RemoteError(RuntimeError):
    """Stands in for an exception that cannot be pickled; names its type and message."""


@dataclass(frozen=True)
class Unpicklable:
    """Stands in for a value that cannot be pickled."""

    description: str
    reason: str


@dataclass(frozen=True)
class Parcel:
    """A pickled value, with a description for the case that it does not survive the journey."""

    payload: bytes | None
    description: str
    reason: str = ""


def pack(value: Any) -> Parcel:
    """Pickles a value; one that cannot be pickled becomes its description."""
    description = _describe(value)
    try:
        payload = dumps(value)
        if isinstance(value, BaseException):
            # Many exception classes can be pickled but not unpickled (constructors with other arguments).
            cloudpickle.loads(payload)
    except Exception as error:
        return Parcel(None, description, _describe(error))
    return Parcel(payload, description)


def unpack(parcel: Parcel) -> Any:
    """The value, or an ``Unpicklable`` in its place."""
    if parcel.payload is None:
        return Unpicklable(parcel.description, parcel.reason)
    try:
        return cloudpickle.loads(parcel.payload)
    except Exception as error:
        return Unpicklable(parcel.description, _describe(error))


def unpack_error(parcel: Parcel) -> BaseException:
    """The exception, or a ``RemoteError`` in its place."""
    error = unpack(parcel)
    return error if isinstance(error, BaseException) else RemoteError(parcel.description)


def _describe(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except Exception as error:
        text = f"<no text: {type(error).__name__}>"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{name}: {text[:2000]}"

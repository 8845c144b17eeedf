"""Check mode: before data moves, the ranks compare what they are about to do.

Each rank writes one line to the side channel and reads all others. All arrived and differ: the same error on all ranks,
and the collective stays usable, because nothing was sent and all have counted the call. Somebody is missing: a time-out
that names them. A rank that refuses its own arguments sends the refusal, so that the others hear of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

from collective_strategy.collectives.errors import CollectiveMismatchError, RankLeftError
from collective_strategy.collectives.side_channel import SideChannel

CheckMode = bool | Literal["auto"]
CHECK_VARIABLE = "COLLECTIVE_STRATEGY_CHECK"
AUTO_LIMIT = 16
_PATIENCE = timedelta(seconds=5)
Verify = Callable[[Sequence[str]], "str | None"]


def check_enabled(check: CheckMode, world_size: int) -> bool:
    """Resolves the argument, the environment variable (which wins) and the size limit of ``"auto"``.

    Raises:
        ValueError: the argument or the variable is none of the known values.
    """
    words: dict[object, CheckMode] = {"1": True, "true": True, "0": False, "false": False, "auto": "auto"}
    value = os.environ.get(CHECK_VARIABLE)
    if value is not None:
        if value.lower() not in words:
            raise ValueError(f"{CHECK_VARIABLE}={value!r} is not one of 0, 1, auto.")
        check = words[value.lower()]
    if check not in (True, False, "auto"):
        raise ValueError(f"check={check!r} is not one of True, False, 'auto'.")
    return world_size <= AUTO_LIMIT if check == "auto" else bool(check)


class Checker:
    """Compares the calls of one collective's ranks.

    Args:
        channel: A side channel of this collective alone.
        rank: Own rank.
        world_size: Number of ranks.
        timeout: How long to wait for the others.
    """

    def __init__(self, channel: SideChannel, rank: int, world_size: int, timeout: timedelta) -> None:
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._read_by_all: list[str] = []

    def compare(self, number: int, call: str, details: str = "", verify: Verify | None = None) -> None:
        """Waits for all ranks' lines of call ``number`` and compares them.

        Args:
            number: The number of the call, counted alike on all ranks.
            call: What must be equal on all ranks.
            details: What may differ by rank (sizes of an exchange).
            verify: Gets all ranks' details in rank order and returns what is wrong with them, or None.

        Raises:
            CollectiveMismatchError: the lines differ, or another rank refused its arguments.
            RuntimeError: from the store, when somebody is missing.
        """
        lines = self._exchange(number, {"call": call, "details": details})
        _raise_if_left(call, number, lines)
        problem = _difference(number, call, lines)
        if problem is None and verify is not None:
            wrong = verify([line["details"] for line in lines])
            problem = wrong and f"{call} (call {number}): {wrong}. Nothing was sent."
        if problem:
            self._until_all_know(number)
            raise CollectiveMismatchError(problem)

    def refuse(self, number: int, operation: str, refusal: Exception) -> None:
        """Tells the other ranks that this one refuses its arguments, and waits until they heard it."""
        lines = self._exchange(number, {"operation": operation, "refused": f"{type(refusal).__name__}: {refusal}"})
        if any("left" in line for line in lines):
            return
        self._until_all_know(number)

    def leave(self, number: int, reason: str) -> None:
        """Tells the other ranks that this one will not make call ``number`` nor a later one. Waits for nobody."""
        line = json.dumps({"left": reason})
        with contextlib.suppress(RuntimeError):  # the store may be gone already
            # Ctrl-C may have come before this rank's line of the call before, for which the others wait
            self._channel.set_if_absent(f"{number - 1}/{self._rank}", line)
            self._channel.set(f"{number}/{self._rank}", line)

    def _until_all_know(self, number: int) -> None:
        """Waits until all ranks have read the lines: this rank's error may end its process, and with it the store."""
        own = f"{number}/{self._rank}/read"
        self._channel.set(own, "")
        self._read_by_all.append(own)
        keys = [f"{number}/{rank}/read" for rank in range(self._world_size)]
        with contextlib.suppress(RuntimeError):  # somebody ended first; the error to come says more
            self._channel.collect(keys, min(self._timeout, _PATIENCE))

    def _exchange(self, number: int, line: dict[str, str]) -> list[dict[str, str]]:
        own = f"{number}/{self._rank}"
        self._channel.set(own, json.dumps(line))
        values = self._channel.collect([f"{number}/{rank}" for rank in range(self._world_size)], self._timeout)
        for key in self._read_by_all:  # all are in this call, so all are done with the one before
            self._channel.delete(key)
        self._read_by_all = [own]
        return [json.loads(value) for value in values]


def _raise_if_left(call: str, number: int, lines: Sequence[dict[str, str]]) -> None:
    left = [f"rank {rank} has left ({line['left']})" for rank, line in enumerate(lines) if "left" in line]
    if left:
        raise RankLeftError(
            f"{call} (call {number}) cannot be made: {'; '.join(left)}. Nothing was sent. What happened on that "
            "rank is the cause; the collective is broken from now on."
        )


def _difference(number: int, call: str, lines: Sequence[dict[str, str]]) -> str | None:
    refusals = [
        f"rank {rank} refused {line['operation']}: {line['refused']}"
        for rank, line in enumerate(lines)
        if "refused" in line
    ]
    if refusals:
        return (
            f"call {number}: {'; '.join(refusals)} (This rank called {call}.) Nothing was sent; correct the arguments "
            "on the refusing rank."
        )
    calls = [line["call"] for line in lines]
    if all(other == call for other in calls):
        return None
    shown = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
    return (
        f"the ranks made different calls (call {number}): {shown}. Nothing was sent. All ranks must make the same "
        f"calls in the same order with equal structure, shape, dtype and requires_grad{_hint(calls)}."
    )


def _hint(calls: Sequence[str]) -> str:
    names = {call.partition("(")[0] for call in calls}
    return "; all_gather(ragged=True) takes tensors of different shapes" if names == {"all_gather"} else ""

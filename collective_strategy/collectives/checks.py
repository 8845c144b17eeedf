"""Check mode: before data moves, the ranks compare what they are about to do.

Each rank writes one line to the side channel and reads all others. All arrived and differ: the same error on all ranks,
and the collective stays usable, because nothing was sent and all have counted the call. Somebody is missing: a time-out
that names them. A rank that refuses its own arguments sends the refusal, so that the others hear of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

from collective_strategy.collectives.errors import CollectiveMismatchError
from collective_strategy.collectives.side_channel import SideChannel

CheckMode = bool | Literal["auto"]
CHECK_VARIABLE = "COLLECTIVE_STRATEGY_CHECK"
AUTO_LIMIT = 16
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
        self._previous: str | None = None

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
        calls = [line.get("call", f"refused its arguments: {line.get('refused')}") for line in lines]
        refusals = [f"rank {rank} refused {line['operation']}: {line['refused']}"
                    for rank, line in enumerate(lines) if "refused" in line]  # fmt: skip
        if refusals:
            raise CollectiveMismatchError(
                f"call {number}: {'; '.join(refusals)}. This rank called {call}. Nothing was sent; correct the "
                f"arguments "
                "on the refusing rank."
            )
        if any(other != call for other in calls):
            shown = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            raise CollectiveMismatchError(
                f"the ranks made different calls (call {number}): {shown}. Nothing was sent. All ranks must make the "
                f"same "
                f"calls in the same order with equal structure, shape and dtype{_hint(calls)}."
            )
        problem = verify([line["details"] for line in lines]) if verify else None
        if problem:
            raise CollectiveMismatchError(f"{call} (call {number}): {problem}. Nothing was sent.")

    def refuse(self, number: int, operation: str, refusal: Exception) -> None:
        """Tells the other ranks that this one refuses its arguments, and waits until they heard it."""
        self._exchange(number, {"operation": operation, "refused": f"{type(refusal).__name__}: {refusal}"})

    def present(self, number: int) -> list[int]:
        """The ranks that have made call ``number``."""
        return [rank for rank in range(self._world_size) if self._channel.has(f"{number}/{rank}")]

    def _exchange(self, number: int, line: dict[str, str]) -> list[dict[str, str]]:
        own = f"{number}/{self._rank}"
        self._channel.set(own, json.dumps(line))
        values = self._channel.collect([f"{number}/{rank}" for rank in range(self._world_size)], self._timeout)
        if self._previous is not None:
            self._channel.delete(self._previous)  # all are in this call, so all have read the one before
        self._previous = own
        return [json.loads(value) for value in values]


def _hint(calls: Sequence[str]) -> str:
    names = {call.partition("(")[0] for call in calls}
    return "; all_gather(ragged=True) takes tensors of different shapes" if names == {"all_gather"} else ""

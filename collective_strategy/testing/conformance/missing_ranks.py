"""A rank that does not come: an error within the time-out that names the operation and the rank, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from collective_strategy.collectives import Collective, CollectiveStateError, CollectiveTimeoutError
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import NotApplicable, check

_TIMEOUT = 1.5


def _wait_alone(collective: Collective, expect: Expect, words: str, act: Callable[[], Any], absent: int) -> None:
    if collective.capabilities.timeout != "raises":
        raise NotApplicable("the backend's runtime cannot be interrupted")
    if collective.rank == absent:
        time.sleep(2 * _TIMEOUT + 0.5)
        return
    began = time.monotonic()
    text = expect.raises(CollectiveTimeoutError, f"{words} timed out", act, "a call that one rank does not make")
    waited = time.monotonic() - began
    expect.true(
        0.7 * _TIMEOUT < waited < _TIMEOUT + 2, f"the error came after {waited:.1f} s, the time-out is {_TIMEOUT} s"
    )
    expect.true(f"rank {absent}" in text or "not known" in text, f"the absent rank is not named: {text}")
    expect.true(collective.broken is not None, "the collective does not say that it is broken")
    expect.raises(
        CollectiveStateError, "broken timed out", lambda: collective.all_reduce(torch.ones(1)), "the next call"
    )


@check("all_gather", world_sizes=(2,), check=True, timeout=_TIMEOUT)
def a_missing_rank_is_named(collective: Collective, expect: Expect) -> None:
    _wait_alone(collective, expect, "all_gather rank 1", lambda: collective.all_gather(torch.ones(1)), 1)


@check("all_reduce", world_sizes=(2,), check=False, timeout=_TIMEOUT)
def a_missing_rank_ends_the_wait_without_check_mode(collective: Collective, expect: Expect) -> None:
    _wait_alone(collective, expect, "all_reduce", lambda: collective.all_reduce(torch.ones(1)), 1)


@check("barrier", world_sizes=(3,), check=True, timeout=_TIMEOUT)
def a_barrier_that_one_rank_misses_is_named(collective: Collective, expect: Expect) -> None:
    _wait_alone(collective, expect, "barrier checkpoint", lambda: collective.barrier("checkpoint"), 0)


@check("all_reduce_", world_sizes=(2,), timeout=_TIMEOUT)
def a_missing_rank_ends_an_operation_in_place(collective: Collective, expect: Expect) -> None:
    _wait_alone(collective, expect, "all_reduce_", lambda: collective.all_reduce_(torch.ones(1)), 1)


@check("all_reduce", world_sizes=(4,), timeout=_TIMEOUT, mesh={"data": -1, "model": 2})
def a_missing_rank_breaks_its_group_only(collective: Collective, expect: Expect) -> None:
    if collective.capabilities.timeout != "raises":
        raise NotApplicable("the backend's runtime cannot be interrupted")
    model = collective["model"]
    if collective.rank == 3:
        time.sleep(2 * _TIMEOUT + 0.5)
    elif collective.rank == 2:
        act = lambda: model.all_reduce(torch.ones(1))  # noqa: E731
        expect.raises(CollectiveTimeoutError, "all_reduce model timed out global rank 3", act, "the second row")
        expect.raises(CollectiveStateError, "broken", act, "its next call")
    else:
        expect.same(model.all_reduce(torch.ones(1)).item(), 2.0, "the first row")
        time.sleep(_TIMEOUT)
        expect.same(model.all_reduce(torch.ones(1)).item(), 2.0, "the first row, later")

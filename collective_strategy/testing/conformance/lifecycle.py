"""Construction, set-up, tear-down and again; copies and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch

from collective_strategy.collectives import (
    OPERATIONS,
    Collective,
    CollectiveStateError,
    LaunchEnvironment,
)
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

# Arguments with which each operation could be called.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "barrier": (),
    "permute": (torch.ones(1), []),
    "halo_exchange": (torch.ones(1), 0, 1),
    "exchange_sizes": (1,),
    "send": (torch.ones(1), 0),
    "recv": (torch.ones(1), 0),
    "all": (True,),
    "any": (True,),
    "split": (0,),
    "scatter_object": ([0],),
    "all_gather_": (torch.ones(1, 1), torch.ones(1)),
    "reduce_scatter_": (torch.ones(1), torch.ones(1, 1)),
}


@check(*(row.name for row in OPERATIONS))
def operations_before_set_up_say_what_to_do(collective: Collective, expect: Expect) -> None:
    fresh = copy.deepcopy(collective)
    for row in OPERATIONS:
        call = getattr(fresh, row.name)
        arguments = _ARGUMENTS.get(row.name, (torch.ones(1),))
        words = f"{row.name} before setup()"
        expect.raises(CollectiveStateError, words, lambda: call(*arguments), row.name)
    expect.same((fresh.is_set_up, fresh.rank, fresh.world_size), (False, -1, 0), "before set-up")
    expect.raises(CollectiveStateError, "setup()", lambda: fresh["data"], "an axis before set-up")
    expect.raises(CollectiveStateError, "teardown()", lambda: collective.setup(), "a second set-up")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, collective.world_size), torch.float32, "the other one")


@check(*(row.name for row in OPERATIONS))
def operations_after_tear_down_say_so(collective: Collective, expect: Expect) -> None:
    collective.all_reduce(torch.ones(1))
    collective.teardown()
    for row in OPERATIONS:
        call = getattr(collective, row.name)
        arguments = _ARGUMENTS.get(row.name, (torch.ones(1),))
        expect.raises(CollectiveStateError, f"{row.name} after teardown()", lambda: call(*arguments), row.name)
    expect.same(collective.is_set_up, False, "is_set_up")
    collective.teardown()


@check("all_reduce", "barrier", world_sizes=(2, 4), mesh={"data": -1, "model": 2})
def set_up_works_again_and_again(collective: Collective, expect: Expect) -> None:
    place = _place(collective)
    for attempt in range(3):
        n = collective.world_size
        expect.same(collective.all_reduce(1).item(), n, f"world, attempt {attempt}")
        model = collective["model"]
        expect.same(model.all_gather_object(collective.rank), list(model.ranks), f"model, attempt {attempt}")
        expect.same(collective.split(0).all_reduce(1).item(), n, f"split, attempt {attempt}")
        collective.barrier()
        collective.teardown()
        collective.teardown()
        expect.raises(CollectiveStateError, "teardown()", collective.barrier, "between two set-ups")
        expect.raises(CollectiveStateError, "", lambda: model.all_reduce(1), "a sub-collective of the past")
        expect.true(collective.setup(place) is collective, "setup() returns the collective")
        collective.counters.reset()
    expect.same(collective.all_reduce(1).item(), collective.world_size, "in the end")


@check("all_reduce")
def copies_and_pickles_come_back_not_set_up(collective: Collective, expect: Expect) -> None:
    place = _place(collective)
    copies = [
        copy.deepcopy(collective),
        pickle.loads(pickle.dumps(collective)),
        copy.deepcopy(copy.deepcopy(collective)),
    ]
    for other in copies:
        expect.same((type(other), other.is_set_up), (type(collective), False), "a copy")
        expect.same(other.timeout, collective.timeout, "its time-out")
    expect.same(collective.all_reduce(1).item(), collective.world_size, "the original")
    collective.barrier()
    collective.teardown()
    with copies[1].setup(place) as other:
        expect.same(other.all_reduce(1).item(), other.world_size, "the unpickled copy, set up")
        other.barrier()
    expect.same(other.is_set_up, False, "after the with block")


@check("all_reduce", "split", world_sizes=(2, 4), mesh={"data": -1, "model": 2})
def parts_are_neither_copied_nor_torn_down(collective: Collective, expect: Expect) -> None:
    part = collective["model"]
    expect.raises(CollectiveStateError, "model", lambda: copy.deepcopy(part), "deepcopy of a part")
    expect.raises(CollectiveStateError, "model", lambda: pickle.dumps(part), "pickle of a part")
    expect.raises(CollectiveStateError, "model", part.teardown, "tear-down of a part")
    expect.same(part.all_reduce(1).item(), 2, "the part")


@check("all_reduce", "barrier")
def an_aborted_collective_says_why(collective: Collective, expect: Expect) -> None:
    collective.barrier()
    collective.abort("the loader failed")
    expect.raises(CollectiveStateError, "loader failed", lambda: collective.all_reduce(1), "all_reduce")
    expect.raises(CollectiveStateError, "loader failed", collective.barrier, "barrier")
    expect.raises(CollectiveStateError, "loader failed", lambda: collective.all_reduce_(torch.ones(1)), "all_reduce_")
    expect.true("loader failed" in (collective.broken or ""), "broken")


def _place(collective: Collective) -> LaunchEnvironment:
    """This rank's place, as the launcher's variables say it."""
    place = collective.launch_environment()
    assert (place.rank, place.world_size) == (collective.rank, collective.world_size)
    return place

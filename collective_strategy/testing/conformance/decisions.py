"""Barriers and decisions."""

from __future__ import annotations

import time

import torch

from collective_strategy.collectives import OPERATIONS, Collective
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check


@check("barrier")
def a_barrier_waits_for_the_last_rank(collective: Collective, expect: Expect) -> None:
    _late_rank_holds_all(collective, expect)


@check("barrier", check=False)
def a_barrier_waits_without_check_mode(collective: Collective, expect: Expect) -> None:
    _late_rank_holds_all(collective, expect)


def _late_rank_holds_all(collective: Collective, expect: Expect) -> None:
    for late in range(collective.world_size):
        collective.barrier()
        if collective.rank == late:
            time.sleep(0.15)
        arrived = time.monotonic()  # one clock for all processes of a host
        collective.barrier("named")
        left = time.monotonic()
        last = max(collective.all_gather_object(arrived))
        expect.true(left >= last - 0.005, f"rank {collective.rank} left {last - left:.3f} s before rank {late} arrived")


@check("all", "any")
def decisions_are_one_bool_on_all_ranks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for only in range(n):
        expect.same(collective.any(rank == only), True, f"any with rank {only} true")
        expect.same(collective.all(rank != only), False, f"all with rank {only} false")
    expect.same(collective.any(False), False, "any of false")
    expect.same(collective.all(True), True, "all of true")
    expect.same(collective.all(torch.tensor([True])), True, "a tensor of one bool")  # type: ignore[arg-type]
    expect.raises(TypeError, "flag shape", lambda: collective.any(torch.ones(2)), "two flags")  # type: ignore[arg-type]
    expect.same(collective.any(True), True, "the next call")


@check("barrier", "all_gather")
def calls_and_bytes_are_counted(collective: Collective, expect: Expect) -> None:
    before = collective.counters["all_gather"].calls, collective.counters["all_gather"].bytes
    for _ in range(3):
        collective.all_gather(torch.ones(5))
    counted = collective.counters["all_gather"]
    expect.same((counted.calls - before[0], counted.bytes - before[1]), (3, 60), "calls and bytes of all_gather")
    expect.true(set(collective.counters.as_dict()) <= {row.name for row in OPERATIONS}, "names of the counters")


@check("barrier")
def place_and_capabilities_are_said(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    places = collective.all_gather_object((collective.rank, collective.global_rank, collective.ranks))
    expect.same(places, [(k, k, tuple(range(n))) for k in range(n)], "rank, global_rank and ranks")
    expect.same((collective.is_set_up, collective.is_member, collective.broken), (True, True, None), "state")
    expect.same((collective.name, collective.mesh, collective.data_axis), ("world", None, None), "name and mesh")
    expect.true(collective.data is collective, "without a mesh, the data axis is all ranks")
    expect.true(collective.capabilities.timeout in ("raises", "aborts"), "capabilities.timeout")
    expect.true(isinstance(collective.device, torch.device), "device")
    expect.true(isinstance(collective.backend_name, str), "backend_name")

"""Sub-collectives: axes of the mesh, unions, splits; ranks and sizes are those of the group."""

from __future__ import annotations

import numpy as np
import torch

from collective_strategy.collectives import Collective, CollectiveStateError
from collective_strategy.testing.conformance.arrays import numbers, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.reductions import expected_reduction
from collective_strategy.testing.conformance.suite import check

# Rows (model): 0 1 | 2 3. Columns (data): 0 2 | 1 3.
MESH = {"data": -1, "model": 2}
CUBE = {"data": -1, "reader": 2, "lane": 1}


@check("broadcast", "scatter", "gather", "reduce", "broadcast_object", "broadcast_", world_sizes=(2, 4), mesh=MESH)
def ranks_count_within_the_group(collective: Collective, expect: Expect) -> None:
    for axis in ("model", "data"):
        group = collective[axis]
        n, rank = group.world_size, group.rank
        expect.same(group.ranks[rank], collective.rank, f"own place in {axis}")
        x = torch.tensor([float(collective.rank)])
        for root in range(n):
            there = float(group.ranks[root])
            with expect.about(f"{axis}, root {root}"):
                expect.bits(group.broadcast(x, root), np.array([there]), torch.float32, "broadcast")
                expect.same(group.broadcast_object(collective.rank, root), group.ranks[root], "broadcast_object")
                chunk = group.scatter(torch.arange(float(n)) + 10 * collective.rank, root)
                expect.bits(chunk, np.array([rank + 10 * there]), torch.float32, "scatter")
                overwritten = x.clone()
                group.broadcast_(overwritten, root)
                expect.bits(overwritten, np.array([there]), torch.float32, "broadcast_")
                gathered = group.gather(x, root)
                reduced = group.reduce(x, "sum", root)
                if rank == root:
                    expect.bits(gathered, np.array([[float(k)] for k in group.ranks]), torch.float32, "gather")
                    expect.bits(reduced, np.array([float(sum(group.ranks))]), torch.float32, "reduce")
                else:
                    expect.same((gathered, reduced), (None, None), "on the other ranks")
        expect.raises(ValueError, f"{axis} rank", lambda: group.broadcast(x, n), "a rank outside the group")


@check("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_gather_object", "any", "shift", "all_reduce_",
       world_sizes=(2, 4), mesh=MESH)  # fmt: skip
def operations_stay_in_the_group(collective: Collective, expect: Expect) -> None:
    for axis in ("model", "data"):
        group = collective[axis]
        n, rank = group.world_size, group.rank
        inputs = [numbers(torch.float32, (2 * n, 3), other) for other in group.ranks]
        arrays, x = [raw(y) for y in inputs], inputs[rank]
        total = expected_reduction("sum", inputs)[0]
        with expect.about(axis):
            expect.close(group.all_reduce(x), total, x.dtype, "sum")
            expect.bits(group.all_gather(x), np.stack(arrays), x.dtype, "all_gather")
            expect.close(group.reduce_scatter(x), np.split(total, n)[rank], x.dtype, "reduce_scatter")
            exchanged = np.concatenate([np.split(array, n)[rank] for array in arrays])
            expect.bits(group.all_to_all(x), exchanged, x.dtype, "all_to_all")
            expect.bits(group.shift(x), arrays[rank - 1], x.dtype, "shift")
            expect.same(group.all_gather_object(collective.rank), list(group.ranks), "all_gather_object")
            expect.same(group.any(collective.rank == 0), 0 in group.ranks, "any")
            group.barrier()
            copy = x.clone()
            group.all_reduce_(copy)
            expect.close(copy, total, x.dtype, "all_reduce_")


@check("reduce", "all_reduce", "reduce_scatter", "all_reduce_", world_sizes=(2, 4), mesh=MESH)
def a_mean_divides_by_the_size_of_the_group(collective: Collective, expect: Expect) -> None:
    for axis in ("model", "data"):
        group = collective[axis]
        mean = np.array([float(np.mean(group.ranks))] * group.world_size)
        x = torch.full((group.world_size,), float(collective.rank))
        expect.bits(group.reduce(x), mean, x.dtype, f"reduce over {axis}")
        expect.bits(group.all_reduce(x, "mean"), mean, x.dtype, f"all_reduce over {axis}")
        expect.bits(group.reduce_scatter(x, "mean"), mean[:1], x.dtype, f"reduce_scatter over {axis}")
        expect.bits(group.reduce(x.long()), mean, x.dtype, f"mean of integers over {axis}")
        group.all_reduce_(x, "mean")
        expect.bits(x, mean, x.dtype, f"all_reduce_ over {axis}")


@check("all_reduce", "split", world_sizes=(4,), mesh=MESH)
def rows_may_use_their_groups_in_different_order(collective: Collective, expect: Expect) -> None:
    x = torch.tensor(2.0**collective.rank)
    wanted = {"model": (3.0, 3.0, 12.0, 12.0), "data": (5.0, 10.0, 5.0, 10.0)}
    order = ("model", "data", "model", "data") if collective.rank < 2 else ("model", "model", "data", "data")
    for axis in order * 3:
        expect.same(collective[axis].all_reduce(x).item(), wanted[axis][collective.rank], axis)
    if collective.rank >= 2:  # a row alone
        expect.same(collective["model"].all_reduce(x).item(), 12.0, "the second row alone")
    expect.same(collective.all_reduce(x).item(), 15.0, "world")


@check(
    "all_reduce",
    "all_gather",
    world_sizes=(4,),
    mesh=CUBE,
    unions={"model": ("reader", "lane"), "all": ("lane", "data")},
)
def unions_of_axes_are_groups_of_their_own(collective: Collective, expect: Expect) -> None:
    rank = collective.rank
    for key in ("model", ("reader", "lane"), ("lane", "reader")):
        group = collective[key]
        expect.same(group.ranks, (0, 1) if rank < 2 else (2, 3), f"ranks of {key}")
        expect.same(group.all_gather_object(rank), list(group.ranks), f"all_gather over {key}")
    group = collective["all"]
    expect.same(group.ranks, (rank % 2, rank % 2 + 2), "ranks of the union of data and lane")
    expect.same(group.all_reduce(rank).item(), 2 * (rank % 2) + 2, "sum over it")
    lane = collective["lane"]
    expect.same((lane.world_size, lane.rank, lane.ranks), (1, 0, (rank,)), "an axis of size 1")
    expect.bits(lane.all_gather(torch.tensor(rank)), np.array([rank]), torch.int64, "all_gather over an axis of size 1")
    expect.same(collective.data.ranks, collective["data"].ranks, "the data axis")
    for unknown in ("heads", ("data", "reader")):
        expect.raises(KeyError, "data reader lane unions", lambda: collective[unknown], f"{unknown}")


@check("split", "all_reduce")
def split_makes_groups_by_color(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    parity = collective.split(rank % 2)
    expect.same(parity.ranks, tuple(range(rank % 2, n, 2)), "ranks by parity")
    expect.same(parity.all_reduce(rank).item(), sum(parity.ranks), "sum by parity")
    by_name = collective.split("all")
    expect.same(by_name.all_gather_object(rank), list(range(n)), "one color")
    alone = collective.split(("own", rank))
    expect.same((alone.world_size, alone.all_reduce(rank).item()), (1, rank), "a color each")
    deeper = parity.split(rank < 2)
    expect.same(
        deeper.all_gather_object(rank), [k for k in parity.ranks if (k < 2) == (rank < 2)], "a split of a split"
    )
    mixed = collective.split(True if rank % 2 else 1)  # equal colors of different types
    expect.same(mixed.all_gather_object(rank), list(range(n)), "equal colors")
    sets = collective.split(frozenset({"a", "b", "c"}))
    expect.same(sets.all_reduce(1).item(), n, "a set as color")
    expect.same(collective.all_reduce(rank).item(), n * (n - 1) // 2, "world after splits")


@check("split", "all_reduce", "barrier", world_sizes=(2, 3, 4))
def ranks_outside_a_group_are_told_so(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    group = collective.split("in" if rank else None)  # without rank 0
    expect.same(group.is_member, rank > 0, "is_member")
    if rank == 0:
        expect.same((group.rank, group.world_size), (-1, 0), "place of an outsider")
        x = torch.tensor([5.0])
        for name, act in (
            ("all_reduce", lambda: group.all_reduce(x)),
            ("all_gather", lambda: group.all_gather(x)),
            ("broadcast", lambda: group.broadcast(x)),
            ("all_gather_object", lambda: group.all_gather_object(1)),
            ("barrier", lambda: group.barrier()),
            ("all_reduce_", lambda: group.all_reduce_(x)),
            ("split", lambda: group.split(1)),
        ):
            expect.raises(CollectiveStateError, f"{name} member", act, f"{name} by an outsider")
    else:
        expect.same(group.ranks, tuple(range(1, n)), "ranks")
        expect.same(group.all_reduce(rank).item(), n * (n - 1) // 2, "sum of the members")
        expect.same(group.broadcast(rank, n - 2).item(), n - 1, "broadcast from the last member")
    expect.same(collective.all_reduce(1).item(), n, "world")


@check("split", "all_gather", "broadcast", "reduce_scatter", "scatter", "all_to_all", world_sizes=(3, 4))
def groups_without_rank_zero_do_everything(collective: Collective, expect: Expect) -> None:
    world = collective.rank
    group = collective.split(world == 0)
    n, rank = group.world_size, group.rank
    inputs = [numbers(torch.int16, (n,), other) for other in group.ranks]
    arrays, x = [raw(y) for y in inputs], inputs[rank]
    expect.bits(group.all_gather(x), np.stack(arrays), x.dtype, "all_gather")
    pieces = group.all_gather(x[:rank], ragged=True)
    expect.same([piece.tolist() for piece in pieces], [array[:k].tolist() for k, array in enumerate(arrays)], "ragged")
    for root in range(n):
        expect.bits(group.broadcast(x, root), arrays[root], x.dtype, f"broadcast from {root}")
        expect.bits(group.scatter(x, root), arrays[root][rank : rank + 1], x.dtype, f"scatter from {root}")
        expect.same(group.broadcast_object(world, root), group.ranks[root], f"broadcast_object from {root}")
    total = np.stack(arrays).sum(0, dtype=np.int16)
    expect.bits(group.reduce_scatter(x), total[rank : rank + 1], x.dtype, "reduce_scatter")
    expect.bits(group.all_to_all(x), np.array([array[rank] for array in arrays]), x.dtype, "all_to_all")

"""Wrong arguments raise TypeError or ValueError on every rank before anything is sent; the next call works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collective_strategy.collectives import OPERATIONS, Collective
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check


@check(*(row.name for row in OPERATIONS), world_sizes=(1,))
def signatures_are_those_of_the_table(collective: Collective, expect: Expect) -> None:
    for row in OPERATIONS:
        signature = inspect.signature(getattr(type(collective), row.name))
        parameters = [p.replace(annotation=inspect.Parameter.empty) for p in list(signature.parameters.values())[1:]]
        expect.same(str(inspect.Signature(parameters)), row.signature, row.name)


@check("broadcast", "scatter", "gather", "reduce", "broadcast_object", "gather_object", "scatter_object", "broadcast_")
def a_rank_outside_the_collective_is_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(n)
    bad: Any
    calls: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("broadcast", lambda rank: collective.broadcast(x, src=rank)),
        ("scatter", lambda rank: collective.scatter(x, src=rank)),
        ("gather", lambda rank: collective.gather(x, dst=rank)),
        ("broadcast_object", lambda rank: collective.broadcast_object("o", src=rank)),
        ("gather_object", lambda rank: collective.gather_object("o", dst=rank)),
        ("scatter_object", lambda rank: collective.scatter_object(["o"] * n, src=rank)),
        ("broadcast_", lambda rank: collective.broadcast_(x, src=rank)),
        ("reduce", lambda rank: collective.reduce(x, dst=rank)),
    )
    for name, call in calls:
        for bad in (n, -1, n + 7):
            expect.raises(ValueError, "rank world", lambda: call(bad), f"{name} with rank {bad}")
        for bad in ([0], None, 0.5, "0", True):
            if name == "reduce" and bad is None:
                continue  # which means every rank
            expect.raises(TypeError, "rank", lambda: call(bad), f"{name} with rank {bad!r}")
        expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, f"the call after {name}")


@check("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "shard")
def a_wrong_dim_is_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(n, n)
    bad: Any
    calls: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("all_gather", lambda dim, y=x: collective.all_gather(y, dim)),
        ("gather", lambda dim, y=x: collective.gather(y, 0, dim)),
        ("reduce_scatter", lambda dim, y=x: collective.reduce_scatter(y, "sum", dim)),
        ("scatter", lambda dim, y=x: collective.scatter(y, 0, dim)),
        ("all_to_all", lambda dim, y=x: collective.all_to_all(y, dim)),
        ("all_to_all", lambda dim, y=x: collective.all_to_all(y, 0, dim)),
        ("shard", lambda dim, y=x: collective.shard(y, dim)),
    )
    for name, call in calls:
        for bad in (2, -3):
            expect.raises(ValueError, "dim 2", lambda: call(bad), f"{name} along dim {bad}")
        for bad in ("0", 0.5, True, [0]):
            expect.raises(TypeError, "dim", lambda: call(bad), f"{name} along dim {bad!r}")
        expect.raises(ValueError, "dim", lambda: call(0, torch.tensor(1.0)), f"{name} of a 0-dim tensor")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_gather", "reduce_scatter", "scatter", "all_to_all", "shard")
def wrong_sizes_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(2 * n, 2)
    fitting = [2] * n
    calls: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("all_gather", lambda sizes: collective.all_gather(x, 0, sizes=sizes)),
        ("reduce_scatter", lambda sizes: collective.reduce_scatter(x, sizes=sizes)),
        ("scatter", lambda sizes: collective.scatter(x, sizes=sizes)),
        ("shard", lambda sizes: collective.shard(x, sizes=sizes)),
        ("all_to_all", lambda sizes: collective.all_to_all(x, sizes=(sizes, fitting))),
    )
    for name, call in calls:
        bads: list[Any] = [[2] * (n + 1), [3] * n, [-1, *fitting[1:]], [2.0] * n]
        for bad in bads:
            expect.raises((ValueError, TypeError), "sizes", lambda: call(bad), f"{name} sizes {bad}")
        for bad in ("22", 2, torch.tensor(fitting)):
            expect.raises(TypeError, "sizes", lambda: call(bad), f"{name} sizes {bad!r}")
    if n > 1:
        uneven = torch.ones(2 * n + 1)
        for name in ("reduce_scatter", "scatter", "all_to_all", "shard"):
            act = lambda: getattr(collective, name)(uneven)  # noqa: E731
            expect.raises(ValueError, f"{2 * n + 1} {n} sizes", act, f"{name} of a length that cannot be shared")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("permute", "shift", "all_gather", "shard", "barrier", "split", "all_reduce", "broadcast", "reduce")
def other_wrong_arguments_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(n)
    bad: Any
    for bad, kind in (
        ([(0, n)], ValueError),
        ([(0, 0), (0, 0)], ValueError),
        ([0], TypeError),
        (3, TypeError),
        ([("0", 0)], TypeError),
    ):
        expect.raises(kind, "", lambda: collective.permute(x, bad), f"permute {bad}")
    for bad in ("1", 1.0, None):
        expect.raises(TypeError, "offset", lambda: collective.shift(x, bad), f"shift by {bad!r}")
    for bad in ("all", "sum", 1):
        expect.raises(ValueError, "replicate invariant", lambda: collective.all_gather(x, to=bad), f"to={bad!r}")
        expect.raises(ValueError, "replicate invariant", lambda: collective.all_reduce(x, to=bad), f"to={bad!r}")
        expect.raises(ValueError, "replicate invariant", lambda: collective.broadcast(x, to=bad), f"to={bad!r}")
        expect.raises(ValueError, "replicate invariant", lambda: collective.reduce(x, to=bad), f"to={bad!r}")
        expect.raises(ValueError, "replicate invariant", lambda: collective.shard(x, of=bad), f"of={bad!r}")
    expect.raises(TypeError, "name", lambda: collective.barrier(3), "barrier(3)")  # type: ignore[arg-type]
    expect.raises(ValueError, "int64", lambda: collective.all_gather(2**64), "an int that does not fit")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")

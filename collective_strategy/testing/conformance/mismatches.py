"""Check mode: ranks that call different things all get the same error, nothing is sent, the collective stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collective_strategy.collectives import Collective, CollectiveMismatchError
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

_SEVERAL = (2, 3, 4)


@check("all_reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "all_to_all", "shift", "permute", "gather",
       "reduce", "barrier", "shard", "replicate", world_sizes=_SEVERAL, check=True)  # fmt: skip
def different_calls_raise_alike_on_all_ranks(collective: Collective, expect: Expect) -> None:
    c, n = collective, collective.world_size
    x = torch.ones(2 * n, 2 * n)
    odd = c.rank == n - 1  # one rank differs
    cases: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("operation", "all_reduce broadcast", lambda: c.broadcast(x) if odd else c.all_reduce(x)),
        ("barrier or data", "barrier all_gather", lambda: c.barrier() if odd else c.all_gather(x)),
        ("name of the barrier", "first second", lambda: c.barrier("first" if odd else "second")),
        ("shape", "[1, ragged=True", lambda: c.all_gather(x[:1] if odd else x)),
        ("number of dims", "all_gather ragged=True", lambda: c.all_gather(x[0] if odd else x)),
        ("dtype", "float32 float64", lambda: c.all_reduce(x.double() if odd else x)),
        ("structure", "list dict", lambda: c.all_reduce([x] if odd else {"a": x})),
        ("length", "list(*, *) list(*)", lambda: c.all_gather([x] * (2 if odd else 1))),
        ("keys", "'a' 'b'", lambda: c.all_gather({"b" if odd else "a": x})),
        ("reduction", "sum max", lambda: c.all_reduce(x, "max" if odd else "sum")),
        ("source", "src=0 src=1", lambda: c.broadcast(x, 1 if odd else 0)),
        ("destination", "dst=0 dst=1", lambda: c.gather(x, 1 if odd else 0)),
        ("rank of the result", "reduce rank 1", lambda: c.reduce(x, dst=1 if odd else 0)),
        ("dim", "dim=0 dim=1", lambda: c.reduce_scatter(x, dim=1 if odd else 0)),
        ("split dim", "split_dim=0 split_dim=1", lambda: c.all_to_all(x, 1 if odd else 0, 0)),
        ("offset", "offset=1 offset=2", lambda: c.shift(x, 2 if odd else 1)),
        ("pairs", "(0, 1) (1, 0)", lambda: c.permute(x, [(1, 0)] if odd else [(0, 1)])),
        ("gradient", "requires grad", lambda: c.all_reduce(x.clone().requires_grad_() if odd else x)),
        ("kind of copies", "invariant replicate", lambda: c.all_reduce(x, to="invariant" if odd else "replicate")),
        ("what is cut", "invariant replicate", lambda: c.shard(x, of="replicate" if odd else "invariant")),
        ("sizes", "sizes", lambda: c.scatter(x, sizes=[0] * (n - 1) + [2 * n] if odd else [2] * n)),
    )
    for name, words, call in cases:
        text = expect.raises(CollectiveMismatchError, f"rank call {words}", call, name)
        texts = collective.all_gather_object(text)
        expect.same(texts, [text] * n, f"{name}: the message on all ranks")
        expect.bits(c.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, f"the call after another {name}")


@check("all_reduce", "broadcast", "all_gather", world_sizes=_SEVERAL, check=True)
def a_refusal_on_one_rank_is_heard_by_all(collective: Collective, expect: Expect) -> None:
    c, n = collective, collective.world_size
    refusing = n - 1
    x = torch.ones(2)
    cases: tuple[tuple[str, type[Exception], Callable[[bool], Any]], ...] = (
        ("broadcast", ValueError, lambda bad: c.broadcast(x, 77 if bad else 0)),
        ("all_reduce", ValueError, lambda bad: c.all_reduce(x, "avgg" if bad else "sum")),
        ("all_gather", TypeError, lambda bad: c.all_gather("text" if bad else x)),
        ("scatter_object", ValueError, lambda bad: c.scatter_object([1] * (n + 1) if bad else None, refusing)),
    )
    for name, kind, call in cases:
        if c.rank == refusing:
            expect.raises(kind, "", lambda: call(True), f"{name} on the refusing rank")
        else:
            words = f"rank {refusing} refused {name}"
            expect.raises(CollectiveMismatchError, words, lambda: call(False), f"{name} on the others")
        expect.bits(c.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, f"the call after {name}")


@check("all_to_all", world_sizes=_SEVERAL, check=True)
def sizes_of_an_exchange_are_compared_pairwise(collective: Collective, expect: Expect) -> None:
    c, n = collective, collective.world_size
    sent, received = [1] * n, [1] * n
    if c.rank == n - 1:
        received[0] = 3
    x = torch.ones(n)
    words = f"all_to_all rank 0 sends 1 rank {n - 1} expects 3"
    expect.raises(CollectiveMismatchError, words, lambda: c.all_to_all(x, sizes=(sent, received)), "sizes")
    expect.bits(c.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_reduce", world_sizes=(4,), check=True, mesh={"data": -1, "model": 2})
def a_mismatch_in_one_group_leaves_the_others_alone(collective: Collective, expect: Expect) -> None:
    model = collective["model"]
    if collective.rank < 2:
        act = lambda: model.all_reduce(torch.ones(1 + collective.rank))  # noqa: E731
        expect.raises(CollectiveMismatchError, "rank", act, "the first row")
    else:
        expect.bits(model.all_reduce(torch.ones(1)), np.full(1, 2), torch.float32, "the second row")
    expect.bits(model.all_reduce(torch.ones(1)), np.full(1, 2), torch.float32, "the next call")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, 4), torch.float32, "world")


@check("all_gather", "all_reduce", "all_to_all", "shift", world_sizes=_SEVERAL, check=False)
def check_mode_changes_no_result(collective: Collective, expect: Expect) -> None:
    c, n = collective, collective.world_size
    x = torch.full((n,), float(c.rank))
    expect.bits(c.all_gather(x), np.arange(float(n))[:, None].repeat(n, 1), x.dtype, "all_gather")
    expect.bits(c.all_reduce(x), np.full(n, n * (n - 1) / 2), x.dtype, "all_reduce")
    expect.bits(c.all_to_all(x), np.arange(float(n)), x.dtype, "all_to_all")
    expect.bits(c.shift(x), np.full(n, float((c.rank - 1) % n)), x.dtype, "shift")
    expect.same(c.all_gather_object(c.rank), list(range(n)), "all_gather_object")
    expect.raises(ValueError, "src", lambda: c.broadcast(x, n), "a refusal on all ranks")
    expect.bits(c.all_reduce(torch.ones(1)), np.full(1, n), x.dtype, "the next call")

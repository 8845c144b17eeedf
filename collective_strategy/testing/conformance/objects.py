"""Objects: any picklable one, of any size; failures reach all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from collective_strategy.collectives import Collective, CollectiveError
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check


class Unpicklable:
    """Raises when it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("this one stays at home")


@check("all_gather_object", "gather_object")
def objects_are_gathered_with_their_types(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for make in (
        lambda k: ([f"p{k}", "q"], {"n": [k, [k]]}),
        lambda k: None if k % 2 else k,
        lambda k: "x" * 10 ** (2 * k),
        lambda k: b"",
        lambda k: {k, "s"},
    ):
        wanted = [make(k) for k in range(n)]
        expect.same(collective.all_gather_object(make(rank)), wanted, "all_gather_object")
        for dst in range(n):
            gathered = collective.gather_object(make(rank), dst)
            expect.same(gathered, wanted if rank == dst else None, f"gather_object to {dst}")
    tensors = collective.all_gather_object({"t": torch.tensor([rank])})
    expect.same([entry["t"].tolist() for entry in tensors], [[k] for k in range(n)], "tensors in objects")


@check("broadcast_object")
def objects_are_broadcast_from_every_source(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for src in range(n):
        for value in ({"r": src}, (src,), None, "s" * 100_000, "", [torch.tensor([src])]):
            received = collective.broadcast_object(value if rank == src else None, src)
            expect.same(str(received), str(value), f"value from {src}")
            expect.same(type(received), type(value), f"type from {src}")


@check("scatter_object")
def objects_are_scattered_from_every_source(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for src in range(n):
        objects = [("x" * 10 ** (target + 1), [src, target]) for target in range(n)]
        received = collective.scatter_object(objects if rank == src else None, src)
        expect.same(received, objects[rank], f"from {src}")


@check("all_gather_object", "gather_object", "broadcast_object", "scatter_object")
def a_failure_to_pickle_raises_on_all_ranks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    bad = Unpicklable() if rank == n - 1 else "fine"
    words = f"rank {n - 1} stays at home"
    for name, act in (
        ("all_gather_object", lambda: collective.all_gather_object(bad)),
        ("gather_object", lambda: collective.gather_object(bad)),
        ("broadcast_object", lambda: collective.broadcast_object(bad, n - 1)),
        ("scatter_object", lambda: collective.scatter_object([bad] * n, n - 1)),
    ):
        expect.raises(CollectiveError, f"{words} {name}", act, name)
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("scatter_object", world_sizes=(1,))
def scatter_object_wants_one_object_per_rank(collective: Collective, expect: Expect) -> None:
    expect.raises(ValueError, "2 objects 1 ranks", lambda: collective.scatter_object([1, 2]), "too many")
    expect.raises(TypeError, "list", lambda: collective.scatter_object("a"), "a string")
    expect.same(collective.scatter_object(["a"]), "a", "the next call")

"""Containers of tensors keep their types, match by key, and refuse what is neither tensor nor number."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import numbers, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

Point = namedtuple("Point", "a b")


@dataclass
class Record:
    """A batch as users write them."""

    a: Tensor
    n: int = 3


@dataclass(frozen=True)
class Frozen:
    """A batch that cannot be assigned to."""

    a: Tensor
    n: int = 3


@check(
    "all_gather", "broadcast", "all_reduce", "shift", "gather", "scatter", "reduce_scatter", "all_to_all", "replicate"
)
def containers_keep_their_types(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    inputs = [numbers(torch.float32, (n,), other) for other in range(n)]
    x, gathered = inputs[rank], np.stack([raw(y) for y in inputs])
    examples: tuple[tuple[Any, Callable[[Any], Tensor]], ...] = (
        ([x, x], lambda y: y[1]),
        ((x,), lambda y: y[0]),
        ({"b": x, "a": x}, lambda y: y["b"]),
        (OrderedDict(b=x, a=x), lambda y: y["b"]),
        (defaultdict(list, b=x), lambda y: y["b"]),
        (Point(x, {"k": [x]}), lambda y: y.b["k"][0]),
        (Record(x), lambda y: y.a),
        (Frozen(x), lambda y: y.a),
        ([{"deep": (Frozen(x),)}], lambda y: y[0]["deep"][0].a),
    )
    for container, find in examples:
        kind = type(container)
        result = collective.all_gather(container)
        expect.same(type(result), kind, f"type after all_gather of {kind.__name__}")
        expect.bits(find(result), gathered, torch.float32, f"all_gather of {kind.__name__}")
        expect.true(find(container) is x, f"{kind.__name__}: the container given was changed")
        moved = collective.broadcast(container, n - 1)
        expect.bits(find(moved), gathered[-1], torch.float32, f"broadcast of {kind.__name__}")
        if isinstance(container, (Record, Frozen)):
            expect.bits(result.n, np.full(n, 3), torch.int64, f"number in {kind.__name__}")
    expect.same(list(collective.all_gather({"b": x, "a": x})), ["b", "a"], "order of keys")
    expect.same(collective.all_gather([]), [], "an empty list")
    expect.same(collective.all_gather({"a": ()}), {"a": ()}, "an empty tuple in a dict")
    total = np.sum(gathered, 0)
    for name, result, wanted in (
        ("all_reduce", collective.all_reduce([x])[0], total),
        ("shift", collective.shift([x])[0], gathered[rank - 1]),
        ("replicate", collective.replicate([x])[0], gathered[rank]),
        ("scatter", collective.scatter([x])[0], gathered[0][rank : rank + 1]),
        ("reduce_scatter", collective.reduce_scatter([x])[0], total[rank : rank + 1]),
        ("all_to_all", collective.all_to_all([x])[0], gathered[:, rank]),
    ):
        expect.close(result, wanted, torch.float32, f"{name} of a list")
    on_first = collective.gather({"a": x})
    expect.same(on_first is None, rank != 0, "gather of a dict on the other ranks")


@check("all_gather", "all_reduce", "broadcast")
def dicts_match_by_key(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    first, second = torch.full((2,), 1.0 + rank), torch.full((2,), 100.0 + rank)
    batch = {"a": first, "b": second} if rank % 2 else {"b": second, "a": first}
    reduced = collective.all_reduce(batch)
    expect.bits(reduced["a"], np.full(2, n + n * (n - 1) / 2), torch.float32, "a")
    expect.bits(reduced["b"], np.full(2, 100 * n + n * (n - 1) / 2), torch.float32, "b")
    expect.bits(collective.broadcast(batch)["b"], np.full(2, 100.0), torch.float32, "broadcast of b")
    mixed = collective.all_gather({1: first, "1": second})
    expect.bits(mixed[1][rank], np.full(2, 1.0 + rank), torch.float32, "key 1 beside key '1'")


@check("all_gather", "all_reduce")
def one_tensor_may_occur_twice(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(2)
    result = collective.all_reduce({"a": x, "b": [x, x]})
    expect.bits(result["b"][1], np.full(2, n), torch.float32, "sum")
    result["a"].add_(5)
    expect.bits(result["b"][0], np.full(2, n), torch.float32, "results are separate")
    expect.bits(x, np.ones(2), torch.float32, "input")


@check("all_gather", "broadcast", "all_reduce", "gather", "scatter", "shift")
def strings_and_none_are_refused_and_the_object_method_named(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    for bad in ("hi", None, {"x": torch.ones(n), "id": None}, [torch.ones(n), "a"], object(), b"bytes", {1, 2}):
        for name in ("all_gather", "broadcast", "gather", "scatter"):
            call: Any = getattr(collective, name)
            expect.raises(TypeError, f"{name} {name}_object", lambda: call(bad), f"{name}({type(bad).__name__})")
        expect.raises(TypeError, "all_reduce tensor", lambda: collective.all_reduce(bad), "all_reduce")
        expect.raises(TypeError, "shift tensor", lambda: collective.shift(bad), "shift")
    words = "x['id'] None"
    bad_leaf = {"x": torch.ones(1), "id": None}
    expect.raises(TypeError, words, lambda: collective.all_gather(bad_leaf), "the place of the leaf is named")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_gather", "all_reduce")
def tensors_without_ordinary_memory_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    for bad, words in (
        (torch.ones(2, 2).to_sparse(), "layout to_dense"),
        (torch.ones(2, device="meta"), "meta"),
    ):
        expect.raises(TypeError, words, lambda: collective.all_gather(bad), "all_gather")
        expect.raises(TypeError, words, lambda: collective.all_reduce([bad]), "all_reduce")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")

"""Value-returning operations leave their input alone and give memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import numbers, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

_OPERATIONS = ("all_gather", "broadcast", "all_reduce", "reduce", "gather", "reduce_scatter", "scatter", "all_to_all",
               "replicate", "shard", "shift", "permute", "halo_exchange")  # fmt: skip


def _calls(collective: Collective) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    n = collective.world_size
    yield "all_gather", collective.all_gather
    yield "all_gather(dim=0)", lambda x: collective.all_gather(x, 0)
    yield "all_gather(ragged)", lambda x: collective.all_gather(x, ragged=True)
    yield "gather", lambda x: collective.gather(x, n - 1)
    for src in range(n):
        yield f"broadcast from {src}", lambda x: collective.broadcast(x, src)
        yield f"scatter from {src}", lambda x: collective.scatter(x, src)
    for op in ("sum", "mean", "max", "min", "prod"):
        yield f"all_reduce {op}", lambda x: collective.all_reduce(x, op)
        yield f"reduce {op}", lambda x: collective.reduce(x, op)
        yield f"reduce {op} to 0", lambda x: collective.reduce(x, op, dst=0)
        yield f"reduce_scatter {op}", lambda x: collective.reduce_scatter(x, op)
    yield "all_to_all", collective.all_to_all
    yield "replicate", collective.replicate
    yield "shard", collective.shard
    yield "shard of replicate", lambda x: collective.shard(x, of="replicate")
    yield "shift", collective.shift
    yield "shift by 0", lambda x: collective.shift(x, 0)
    yield "halo_exchange", lambda x: collective.halo_exchange(x, 0, 1)
    yield "halo_exchange of no width", lambda x: collective.halo_exchange(x, 0, 0)
    yield "permute", lambda x: collective.permute(x, [(k, n - 1 - k) for k in range(n)])


def _inputs(collective: Collective, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    x = numbers(dtype, (2 * collective.world_size, 3), collective.rank)
    yield "contiguous", x
    yield "transposed", x.t().contiguous().t()


@check(*_OPERATIONS)
def inputs_are_left_alone(collective: Collective, expect: Expect) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for layout, x in _inputs(collective, dtype):
            before, strides = raw(x), x.stride()
            for name, call in _calls(collective):
                call(x)
                expect.bits(x, before, dtype, f"{name} changed its {layout} input")
            expect.same(x.stride(), strides, "strides of the input")


@check(*_OPERATIONS)
def results_share_no_memory_with_the_input(collective: Collective, expect: Expect) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for layout, x in _inputs(collective, dtype):
            before = raw(x)
            for name, call in _calls(collective):
                result = call(x)
                for piece in result if isinstance(result, list) else [result]:
                    if piece is not None:
                        piece.zero_()
                expect.bits(x, before, dtype, f"writing into the result of {name} changed the {layout} input")


@check(*_OPERATIONS)
def results_share_no_memory_with_each_other(collective: Collective, expect: Expect) -> None:
    for _, x in _inputs(collective, torch.float32):
        for name, call in _calls(collective):
            first = call(x)
            second = call(x)
            if isinstance(first, Tensor):
                kept = raw(first)
                second.fill_(99)
                expect.bits(first, kept, first.dtype, f"a second {name} changed the result of the first")
    pieces = collective.all_gather(torch.ones(2), ragged=True)
    pieces[0].add_(100)
    for piece in pieces[1:]:
        expect.same(piece.tolist(), [1.0, 1.0], "pieces of a ragged gather")
    stacked = collective.all_gather(torch.ones(2))
    stacked[0].add_(100)
    expect.same(stacked[1:].sum().item(), 2.0 * (collective.world_size - 1), "rows of a gather")


@check(*_OPERATIONS)
def results_are_contiguous(collective: Collective, expect: Expect) -> None:
    for layout, x in _inputs(collective, torch.float32):
        for name, call in _calls(collective):
            result = call(x)
            if isinstance(result, Tensor):
                expect.true(result.is_contiguous(), f"{name} of a {layout} tensor has strides {result.stride()}")


@check("all_reduce", "broadcast", "all_gather")
def parameters_are_plain_data_when_detached(collective: Collective, expect: Expect) -> None:
    for call in (collective.all_reduce, collective.broadcast, collective.all_gather):
        parameter = torch.nn.Parameter(torch.tensor([1.0 + collective.rank]))
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                inside = call(parameter)
            expect.same(inside.requires_grad, False, f"{call.__name__} under {guard.__name__}")
        result = call(parameter.detach())
        expect.same((result.requires_grad, type(result)), (False, Tensor), f"{call.__name__} of a detached parameter")
        expect.same((parameter.item(), parameter.requires_grad), (1.0 + collective.rank, True), "the parameter")

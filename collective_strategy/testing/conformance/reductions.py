"""Reductions: every operation with every dtype for which it has a meaning."""

from __future__ import annotations

from functools import reduce as fold

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import COMPLEX, DTYPES, FLOATS, INTEGERS, numbers, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

_NUMERIC_OPS = ("max", "min", "prod", "sum", "mean")
_BIT_OPS = ("band", "bor", "bxor")


def meaningful_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that a dtype has."""
    if dtype is torch.bool:
        return ("all", "any", "max", "min", "mean")
    if dtype in COMPLEX:
        return ("sum", "mean")
    return _NUMERIC_OPS + (_BIT_OPS if dtype in INTEGERS else ())


def expected_reduction(op: str, inputs: list[Tensor]) -> tuple[np.ndarray, torch.dtype]:
    """By numpy, from all ranks' inputs: values (wide for floats) and the dtype of the result."""
    dtype = inputs[0].dtype
    arrays = [raw(x.to(torch.float64) if dtype in FLOATS else x) for x in inputs]
    stacked = np.stack(arrays)
    if op == "mean":
        floating = dtype in FLOATS or dtype in COMPLEX
        wide = stacked if floating else stacked.astype(np.float64)
        return np.asarray(wide.sum(0) / len(inputs)), dtype if floating else torch.get_default_dtype()
    if op in _BIT_OPS:
        functions = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
        return np.asarray(fold(functions[op], arrays)), dtype
    if op in ("all", "any"):
        return np.asarray(stacked.all(0) if op == "all" else stacked.any(0)), dtype
    if op in ("max", "min"):
        return np.asarray(stacked.max(0) if op == "max" else stacked.min(0)), dtype
    result = stacked.sum(0, dtype=stacked.dtype) if op == "sum" else stacked.prod(0, dtype=stacked.dtype)
    return np.asarray(result), dtype


@check("all_reduce")
def all_reduce_of_every_op_and_dtype(collective: Collective, expect: Expect) -> None:
    for dtype in DTYPES:
        for op in meaningful_ops(dtype):
            for shape in ((2, 3), (), (0,)):
                inputs = [numbers(dtype, shape, rank) for rank in range(collective.world_size)]
                values, result_dtype = expected_reduction(op, inputs)
                rtol = float(torch.finfo(result_dtype).eps) if op == "mean" else 0.0
                reduced = collective.all_reduce(inputs[collective.rank], op)
                expect.close(reduced, values, result_dtype, f"{op} of {dtype} {shape}", rtol)


@check("reduce")
def reduce_to_every_rank_and_to_one(collective: Collective, expect: Expect) -> None:
    for dtype in (torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        inputs = [numbers(dtype, (3,), rank) for rank in range(collective.world_size)]
        x = inputs[collective.rank]
        values, result_dtype = expected_reduction("mean", inputs)
        rtol = float(torch.finfo(result_dtype).eps)
        expect.close(collective.reduce(x), values, result_dtype, f"{dtype}: the mean is the default", rtol)
        for op in meaningful_ops(dtype):
            values, result_dtype = expected_reduction(op, inputs)
            rtol = float(torch.finfo(result_dtype).eps) if op == "mean" else 0.0
            expect.close(collective.reduce(x, op), values, result_dtype, f"{op} of {dtype}", rtol)
            for dst in range(collective.world_size):
                reduced = collective.reduce(x, op, dst=dst)
                if collective.rank == dst:
                    expect.close(reduced, values, result_dtype, f"{op} of {dtype} to {dst}", rtol)
                else:
                    expect.same(reduced, None, f"{op} of {dtype} to {dst}, on another rank")


@check("reduce_scatter")
def reduce_scatter_of_every_op_and_dtype(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        for op in meaningful_ops(dtype):
            for dim, sizes in (
                (0, None),
                (1, None),
                (-1, None),
                (0, [2 * k for k in range(n)]),
                (1, [n, *[0] * (n - 1)]),
            ):
                shape = [2 * n, 2 * n]
                shape[dim] = 2 * n if sizes is None else sum(sizes)
                inputs = [numbers(dtype, tuple(shape), other) for other in range(n)]
                values, result_dtype = expected_reduction(op, inputs)
                ends = np.cumsum([2] * n if sizes is None else sizes)[:-1]
                rtol = float(torch.finfo(result_dtype).eps) if op == "mean" else 0.0
                chunk = collective.reduce_scatter(inputs[rank], op, dim, sizes=sizes)
                wanted = np.split(values, ends, dim)[rank]
                expect.close(chunk, wanted, result_dtype, f"{op} of {dtype}, dim {dim}, sizes {sizes}", rtol)


@check("all_reduce", "reduce_scatter")
def each_rank_gets_its_own_chunk(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    x = torch.arange(n * 2.0)
    expect.bits(collective.reduce_scatter(x), n * raw(x)[2 * rank : 2 * rank + 2], x.dtype, "reduce_scatter")
    expect.bits(collective.all_reduce(x), n * raw(x), x.dtype, "all_reduce")


@check("all_reduce", "reduce_scatter", world_sizes=(2, 3, 4))
def every_rank_is_counted_once(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (torch.int64, torch.float32, torch.float64):
        digits = torch.tensor([10.0**rank] * n).to(dtype)  # the sum shows each rank as one digit
        wanted = np.full(n, sum(10**other for other in range(n)))
        expect.close(collective.all_reduce(digits), wanted, dtype, f"all_reduce {dtype}")
        expect.close(collective.reduce_scatter(digits), wanted[:1], dtype, f"reduce_scatter {dtype}")
        keep = torch.full((2,), 3).to(dtype)
        for op in ("max", "min", "mean"):
            expect.close(collective.all_reduce(keep, op).to(dtype), np.full(2, 3), dtype, f"{op} of equal values")

"""The in-place variants and their handles."""

from __future__ import annotations

import numpy as np
import torch

from collective_strategy.collectives import Collective, Handle
from collective_strategy.testing.conformance.arrays import DTYPES, FLOATS, numbers, patterns, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.reductions import expected_reduction, meaningful_ops
from collective_strategy.testing.conformance.suite import check


def _ops(dtype: torch.dtype) -> list[str]:
    floating = dtype.is_floating_point or dtype.is_complex
    return [op for op in meaningful_ops(dtype) if op != "mean" or floating]


@check("all_reduce_")
def all_reduce_in_place(collective: Collective, expect: Expect) -> None:
    for dtype in DTYPES:
        for op in _ops(dtype):
            for async_op in (False, True):
                inputs = [numbers(dtype, (2, 3), rank) for rank in range(collective.world_size)]
                values, _ = expected_reduction(op, inputs)
                x = inputs[collective.rank]
                result = collective.all_reduce_(x, op, async_op=async_op)
                if isinstance(result, Handle):
                    result = result.wait()
                expect.same(
                    isinstance(result, torch.Tensor) and result.data_ptr() == x.data_ptr(), True, "returns its tensor"
                )
                rtol = float(torch.finfo(dtype).eps) if op == "mean" else 0.0
                expect.close(x, values, dtype, f"{op} of {dtype}, async {async_op}", rtol)


@check("broadcast_", "all_gather_")
def movement_in_place(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        for shape in ((2, 3), (), (0,)):
            for async_op in (False, True):
                inputs = [patterns(dtype, shape, other) for other in range(n)]
                arrays = [raw(x) for x in inputs]
                output = torch.zeros((n, *shape), dtype=dtype)
                result = collective.all_gather_(output, inputs[rank], async_op=async_op)
                if isinstance(result, Handle):
                    result.wait()
                expect.bits(output, np.stack(arrays), dtype, f"all_gather_ {dtype} {shape}, async {async_op}")
                expect.bits(inputs[rank], arrays[rank], dtype, "the input of all_gather_")
                for src in range(n):
                    x = inputs[rank].clone()
                    result = collective.broadcast_(x, src, async_op=async_op)
                    if isinstance(result, Handle):
                        result.wait()
                    expect.bits(x, arrays[src], dtype, f"broadcast_ {dtype} {shape} from {src}, async {async_op}")


@check("reduce_scatter_")
def reduce_scatter_in_place(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16, torch.bfloat16):
        for op in ("sum", "mean", "max") if dtype in FLOATS else ("sum", "max"):
            inputs = [numbers(dtype, (n, 2), other) for other in range(n)]
            values, _ = expected_reduction(op, inputs)
            output = torch.zeros(2, dtype=dtype)
            result = collective.reduce_scatter_(output, inputs[rank].clone(), op, async_op=op == "max")
            if isinstance(result, Handle):
                result.wait()
            rtol = float(torch.finfo(dtype).eps) if op == "mean" else 0.0
            expect.close(output, values[rank], dtype, f"{op} of {dtype}", rtol)


@check("all_reduce_", "broadcast_", "all_gather_")
def several_operations_may_be_in_flight(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    sums = [torch.full((100 * (k + 1),), float(rank + k)) for k in range(4)]
    copies = [torch.full((50,), float(rank + k)) for k in range(4)]
    handles = []
    for total, copy in zip(sums, copies, strict=True):
        handles += [collective.all_reduce_(total, async_op=True), collective.broadcast_(copy, n - 1, async_op=True)]
    for handle in reversed(handles):
        if not isinstance(handle, Handle):
            expect.true(False, f"async_op=True gave a {type(handle).__name__}")
            continue
        handle.wait()
        handle.wait()  # a second time is allowed
        expect.same(handle.is_completed(), True, "is_completed() after wait()")
    for k in range(4):
        expect.bits(sums[k], np.full(100 * (k + 1), n * k + n * (n - 1) / 2), torch.float32, f"sum {k}")
        expect.bits(copies[k], np.full(50, n - 1.0 + k), torch.float32, f"broadcast {k}")


@check("all_reduce_", "broadcast_", "all_gather_", "reduce_scatter_")
def in_place_variants_refuse_what_they_cannot_do(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    strided = torch.ones(4, 2 * n)[:, ::2]
    expect.raises(ValueError, "contiguous", lambda: collective.all_reduce_(strided), "all_reduce_ of a strided tensor")
    expect.raises(ValueError, "contiguous", lambda: collective.broadcast_(strided), "broadcast_ of a strided tensor")
    expect.raises(
        TypeError, "mean", lambda: collective.all_reduce_(torch.ones(1, dtype=torch.int64), "mean"), "mean of ints"
    )
    expect.raises(TypeError, "tensor", lambda: collective.all_reduce_([torch.ones(1)]), "a list")  # type: ignore[arg-type]
    words = "output shape"
    act = lambda: collective.all_gather_(torch.zeros(n + 1, 2), torch.ones(2))  # noqa: E731
    expect.raises(ValueError, words, act, "all_gather_ into a wrong shape")
    act = lambda: collective.all_gather_(torch.zeros(n, 2), torch.ones(2, dtype=torch.int64))  # noqa: E731
    expect.raises(ValueError, words, act, "all_gather_ into a wrong dtype")
    act = lambda: collective.reduce_scatter_(torch.zeros(2), torch.ones(n + 1, 2))  # noqa: E731
    expect.raises(ValueError, "shape", act, "reduce_scatter_ of a wrong shape")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_reduce_", "broadcast_", "all_gather_", "reduce_scatter_")
def in_place_variants_take_parameters(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    parameter = torch.nn.Parameter(torch.full((n, 2), float(rank)))
    version = parameter._version
    collective.broadcast_(parameter, n - 1)
    expect.bits(parameter, np.full((n, 2), n - 1.0), torch.float32, "broadcast_")
    collective.all_reduce_(parameter, "mean")
    expect.close(parameter, np.full((n, 2), n - 1.0), torch.float32, "all_reduce_", 1e-6)
    expect.same((parameter.requires_grad, parameter.grad_fn), (True, None), "the parameter stays a leaf")
    expect.true(parameter._version >= version, "the version counter")


@check("all_reduce_", "broadcast_", "all_gather_", "reduce_scatter_")
def a_backward_over_overwritten_values_is_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    acts = {
        "all_reduce_": lambda y: collective.all_reduce_(y),
        "broadcast_": lambda y: collective.broadcast_(y, n - 1),
        "all_gather_": lambda y: collective.all_gather_(y, torch.ones(2)),
        "reduce_scatter_": lambda y: collective.reduce_scatter_(y, torch.ones(n, *y.shape)),
    }
    for name, overwrite in acts.items():
        y = torch.ones(n, 2, requires_grad=True) * 2
        square = (y * y).sum()  # whose gradient is 2 y, with y as it was
        overwrite(y)
        expect.raises(RuntimeError, "modified by an inplace operation", square.backward, f"backward after {name}")

"""What the numbers of a reduction mean where backends differ: precision, overflow, NaN, integers, Python numbers."""

from __future__ import annotations

import math

import numpy as np
import torch

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import DTYPES, FLOATS, INTEGERS, numbers, raw, real_numbers
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.reductions import meaningful_ops
from collective_strategy.testing.conformance.suite import check

_ALL_OPS = ("sum", "mean", "max", "min", "prod", "band", "bor", "bxor", "all", "any")


@check("all_reduce", "reduce_scatter")
def sums_of_floats_keep_their_precision(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    arrays = [real_numbers((n * 50,), other) for other in range(n)]
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        inputs = [torch.from_numpy(array).to(dtype) for array in arrays]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = sum(x.to(wide).numpy() for x in inputs)
        rtol = 4 * float(torch.finfo(dtype).eps)
        expect.close(collective.all_reduce(inputs[rank]), np.asarray(total), dtype, f"sum of {dtype}", rtol)
        expect.close(
            collective.all_reduce(inputs[rank], "mean"), np.asarray(total) / n, dtype, f"mean of {dtype}", rtol
        )
        chunk = collective.reduce_scatter(inputs[rank])
        expect.close(chunk, np.split(np.asarray(total), n)[rank], dtype, f"reduce_scatter of {dtype}", rtol)


@check("all_reduce", "reduce_scatter")
def half_precision_is_reduced_in_float32(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    large = torch.full((n,), 60000.0, dtype=torch.float16)
    expect.close(
        collective.all_reduce(large, "mean"), np.full(n, 60000.0), torch.float16, "mean of large float16", 1e-3
    )
    expect.close(collective.reduce_scatter(large, "mean"), np.full(1, 60000.0), torch.float16, "reduce_scatter", 1e-3)
    # In bfloat16, 256 + 1 is 256 again and again; in float32 the ones add up.
    for dtype, base in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x = torch.tensor([base if collective.rank == 0 else 1.0], dtype=dtype)
        wanted = torch.tensor([base + n - 1]).to(dtype)
        expect.bits(collective.all_reduce(x), raw(wanted), dtype, f"small terms in {dtype}")


@check("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "all_to_all", "shift")
def wide_integers_are_exact(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    inputs = [torch.tensor([2**53 + 1 + other, -(2**61) - other] * n) for other in range(n)]
    arrays, x = [raw(x) for x in inputs], inputs[rank]
    total = np.stack(arrays).sum(0)
    expect.bits(collective.all_reduce(x), total, torch.int64, "sum")
    expect.bits(collective.reduce(x, "max"), np.stack(arrays).max(0), torch.int64, "max")
    expect.bits(collective.reduce(x, "min"), np.stack(arrays).min(0), torch.int64, "min")
    expect.bits(collective.reduce_scatter(x), np.split(total, n)[rank], torch.int64, "reduce_scatter")
    expect.bits(collective.broadcast(x, n - 1), arrays[-1], torch.int64, "broadcast")
    expect.bits(collective.all_gather(x), np.stack(arrays), torch.int64, "all_gather")
    expect.bits(collective.scatter(x, n - 1), np.split(arrays[-1], n)[rank], torch.int64, "scatter")
    expect.bits(collective.shift(x), arrays[rank - 1], torch.int64, "shift")
    exchanged = np.concatenate([np.split(array, n)[rank] for array in arrays])
    expect.bits(collective.all_to_all(x), exchanged, torch.int64, "all_to_all")
    top = torch.tensor([2**64 - 1 - rank, 2**63 + rank], dtype=torch.uint64)
    wanted = np.array([2**64 - 1, 2**63 + n - 1], dtype=np.uint64)
    expect.bits(collective.all_reduce(top, "max"), wanted, torch.uint64, "max of uint64")


@check("all_reduce", "reduce", "reduce_scatter")
def the_mean_of_integers_is_the_true_mean(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (*INTEGERS, torch.bool):
        inputs = [numbers(dtype, (n,), other) for other in range(n)]
        mean = np.stack([raw(x) for x in inputs]).astype(np.float64).mean(0)
        default = torch.get_default_dtype()
        expect.close(collective.reduce(inputs[rank]), mean, default, f"reduce of {dtype}", 1e-6)
        expect.close(collective.all_reduce(inputs[rank], "mean"), mean, default, f"all_reduce of {dtype}", 1e-6)
        chunk = collective.reduce_scatter(inputs[rank], "mean")
        expect.close(chunk, mean[rank : rank + 1], default, f"reduce_scatter of {dtype}", 1e-6)
        limits = torch.iinfo(dtype) if dtype is not torch.bool else None
        if limits is not None:  # sums of extremes do not fit into any integer
            x = torch.tensor([limits.max, limits.min], dtype=dtype)
            wanted = np.array([float(limits.max), float(limits.min)])
            expect.close(collective.all_reduce(x, "mean"), wanted, default, f"extremes of {dtype}", 1e-6)


@check("all_reduce", "reduce_scatter")
def max_and_min_propagate_nan_and_order_zeros(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in FLOATS:
        # Each rank in turn holds the NaN, an infinity and the other zero.
        for at in range(n):
            here = rank == at
            x = torch.tensor(
                [math.nan if here else 1.0, math.inf if here else -math.inf, 0.0 if here else -0.0], dtype=dtype
            )
            top, low = collective.all_reduce(x, "max"), collective.all_reduce(x, "min")
            expect.true(top[0].isnan() and low[0].isnan(), f"{dtype}: NaN on rank {at} is lost: {top[0]}, {low[0]}")
            expect.same(
                (top[1].item(), low[1].item()), (math.inf, math.inf if n == 1 else -math.inf), f"{dtype} infinities"
            )
            signs = (bool(top[2].signbit()), bool(low[2].signbit()))
            expect.same(signs, (False, n > 1), f"{dtype}: signs of the largest and least zero")
            total = collective.all_reduce(x[:2], "sum")
            expect.true(total[0].isnan(), f"{dtype}: the sum with a NaN is {total[0]}")


@check("all_reduce", "reduce_scatter", "all_gather", world_sizes=(2, 3, 4))
def reductions_are_equal_on_all_ranks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (*FLOATS, torch.complex64):
        x = torch.from_numpy(real_numbers((257,), rank)).to(dtype)
        for op in ("sum", "mean"):
            bits = raw(collective.all_reduce(x, op)).tobytes()
            everyone = collective.all_gather_object(bits)
            expect.true(everyone == [bits] * n, f"{op} of {dtype} differs between ranks")


@check("all_reduce", "reduce", "all_gather", "broadcast", "gather", "shift", "replicate")
def python_numbers_become_tensors(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for value, dtype in (
        (2**53 + 1, torch.int64),
        (0.1, torch.float64),
        (1 + 2j, torch.complex128),
        (True, torch.bool),
    ):
        array = np.asarray(value)
        expect.bits(collective.all_gather(value), np.stack([array] * n), dtype, f"all_gather of {value!r}")
        expect.bits(collective.broadcast(value), array, dtype, f"broadcast of {value!r}")
        expect.bits(collective.shift(value), array, dtype, f"shift of {value!r}")
        expect.bits(collective.replicate(value), array, dtype, f"replicate of {value!r}")
        gathered = collective.gather(value)
        if rank == 0:
            expect.bits(gathered, np.stack([array] * n), dtype, f"gather of {value!r}")
    expect.bits(collective.all_reduce(rank), np.asarray(n * (n - 1) // 2), torch.int64, "sum of ints")
    expect.bits(collective.reduce(1 + rank), np.asarray((n + 1) / 2), torch.float64, "mean of ints")
    expect.close(collective.reduce(0.1), np.asarray(0.1), torch.float64, "mean of floats", 1e-15)
    expect.bits(collective.all_reduce(rank == 0, "any"), np.asarray(True), torch.bool, "any of bools")


@check("all_reduce", "reduce", "reduce_scatter")
def reductions_without_meaning_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    for dtype in DTYPES:
        x = numbers(dtype, (n,), 0)
        for op in _ALL_OPS:
            if op in meaningful_ops(dtype):
                continue
            name = str(dtype).removeprefix("torch.")
            for method in (collective.all_reduce, collective.reduce, collective.reduce_scatter):
                words = f"{op} {name} refused {method.__name__}"
                expect.raises(TypeError, words, lambda: method(x, op), f"{method.__name__} {op} of {dtype}")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_reduce", "reduce", "reduce_scatter", "all_reduce_", "reduce_scatter_")
def operations_are_named_in_any_case(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    x = torch.full((n,), 1.0 + rank)
    mean = np.full(n, (n + 1) / 2)
    for op in ("mean", "avg", "AVG", "Mean"):
        expect.close(collective.all_reduce(x, op), mean, x.dtype, op, 1e-6)
        expect.close(collective.reduce_scatter(x, op), mean[:1], x.dtype, op, 1e-6)
    for method in (collective.all_reduce, collective.reduce, collective.reduce_scatter, collective.all_reduce_):
        words = "avgg sum mean max min prod"
        expect.raises(ValueError, words, lambda: method(x, "avgg"), method.__name__)
        expect.raises(TypeError, "sum mean", lambda: method(x, None), method.__name__)  # type: ignore[arg-type]
    expect.raises(ValueError, "avgg sum", lambda: collective.reduce_scatter_(x[:1], x, "avgg"), "reduce_scatter_")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")

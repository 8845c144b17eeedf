"""Strides, memory formats and devices: the logical values count, whatever lies behind them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import numbers, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

_LAYOUTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("contiguous", lambda x: x),
    ("transposed", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    ("every second column", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    ("expanded", lambda x: x[:, :1].expand_as(x)),
    ("part of a larger tensor", lambda x: torch.cat([x, x, x])[x.shape[0] : 2 * x.shape[0]]),
    ("channels last", lambda x: x.to(memory_format=torch.channels_last)),
)


@check("all_gather", "broadcast", "all_reduce", "reduce", "gather", "reduce_scatter", "scatter", "all_to_all",
       "replicate", "shard", "shift", "permute")  # fmt: skip
def strides_do_not_matter(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for name, lay in _LAYOUTS:
        for dtype in (torch.float32, torch.int16, torch.complex64):
            inputs = [lay(numbers(dtype, (2 * n, n, 2, 2), other)) for other in range(n)]
            _compare_all(collective, expect, inputs[rank], [raw(x) for x in inputs], f"{name} {dtype}")
    mixed = [_LAYOUTS[other % len(_LAYOUTS)][1](numbers(torch.float32, (2 * n, n, 2, 2), other)) for other in range(n)]
    _compare_all(collective, expect, mixed[rank], [raw(x) for x in mixed], "another layout on each rank")


@check("all_gather", "broadcast", "all_reduce")
def lazy_conjugates_and_negatives_are_resolved(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    inputs = [numbers(torch.complex64, (3, 2), other) for other in range(n)]
    conjugate, negative = inputs[rank].conj(), inputs[rank].conj().imag
    arrays = [raw(x).conj() for x in inputs]
    expect.bits(collective.all_gather(conjugate), np.stack(arrays), conjugate.dtype, "all_gather conj")
    expect.bits(collective.broadcast(conjugate, n - 1), arrays[-1], conjugate.dtype, "broadcast conj")
    expect.close(collective.all_reduce(conjugate), np.sum(arrays, 0), conjugate.dtype, "all_reduce conj")
    gathered = collective.all_gather(negative)
    expect.close(gathered, np.stack([array.imag for array in arrays]), negative.dtype, "all_gather negative")


@check(
    "all_gather", "broadcast", "all_reduce", "reduce_scatter", "scatter", "all_to_all", "shift", "gather", "broadcast_"
)
def empty_and_zero_dim_tensors_work(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (torch.float32, torch.int16, torch.bool):
        for shape in ((0,), (0, 3), (n, 0), (2 * n, 0, 3)):
            x = torch.zeros(shape, dtype=dtype)
            expect.bits(collective.all_gather(x), np.zeros((n, *shape)), dtype, f"all_gather {shape}")
            expect.bits(
                collective.all_gather(x, 0), np.zeros((n * shape[0], *shape[1:])), dtype, f"concatenated {shape}"
            )
            expect.bits(collective.broadcast(x), np.zeros(shape), dtype, f"broadcast {shape}")
            expect.bits(collective.all_reduce(x, "max"), np.zeros(shape), dtype, f"all_reduce {shape}")
            expect.bits(collective.shift(x), np.zeros(shape), dtype, f"shift {shape}")
            chunk = np.zeros((shape[0] // n, *shape[1:]))
            expect.bits(collective.reduce_scatter(x, "max"), chunk, dtype, f"reduce_scatter {shape}")
            expect.bits(collective.scatter(x), chunk, dtype, f"scatter {shape}")
            expect.bits(collective.all_to_all(x), np.zeros(shape), dtype, f"all_to_all {shape}")
            if (gathered := collective.gather(x)) is not None:
                expect.bits(gathered, np.zeros((n, *shape)), dtype, f"gather {shape}")
    for dtype in (torch.int16, torch.float32, torch.complex64):  # a dim of length 1 may have any stride
        lone = torch.full((4,), 1 + rank, dtype=dtype).as_strided((1,), (3,))
        expect.bits(collective.all_gather(lone), raw(torch.arange(1, n + 1).to(dtype)[:, None]), dtype, "odd stride")
        expect.bits(collective.broadcast(lone, n - 1), raw(torch.tensor([n], dtype=dtype)), dtype, "odd stride")
        collective.broadcast_(lone, n - 1)
        expect.bits(lone, raw(torch.tensor([n], dtype=dtype)), dtype, "odd stride, in place")
    scalar = torch.tensor(2.0 + rank)
    expect.bits(collective.reduce(scalar), np.asarray(2 + (n - 1) / 2), torch.float32, "mean of a 0-dim tensor")
    expect.bits(collective.all_gather(scalar), np.arange(2.0, 2 + n), torch.float32, "all_gather of a 0-dim tensor")


@check("all_gather", "broadcast", "all_reduce", "all_to_all", "shift", "reduce_scatter", "scatter")
def results_lie_on_the_device_of_the_input(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    for device in {torch.device("cpu"), collective.device}:
        x = torch.ones(n, 2, device=device)
        for name, result in (
            ("all_gather", collective.all_gather(x)),
            ("broadcast", collective.broadcast(x)),
            ("all_reduce", collective.all_reduce(x)),
            ("all_to_all", collective.all_to_all(x)),
            ("shift", collective.shift(x)),
            ("reduce_scatter", collective.reduce_scatter(x)),
            ("scatter", collective.scatter(x)),
        ):
            expect.same(result.device.type, device.type, f"{name} of a tensor on {device}")


def _compare_all(collective: Collective, expect: Expect, x: Tensor, arrays: list[np.ndarray], what: str) -> None:
    n, rank = collective.world_size, collective.rank
    with expect.about(what):
        expect.bits(collective.all_gather(x), np.stack(arrays), x.dtype, "all_gather")
        expect.bits(collective.all_gather(x, 1), np.concatenate(arrays, 1), x.dtype, "all_gather(dim=1)")
        expect.bits(collective.broadcast(x, n - 1), arrays[-1], x.dtype, "broadcast")
        expect.close(collective.all_reduce(x), np.sum(arrays, 0), x.dtype, "all_reduce")
        expect.close(collective.reduce(x, "sum"), np.sum(arrays, 0), x.dtype, "reduce")
        gathered = collective.gather(x, n - 1)
        if rank == n - 1:
            expect.bits(gathered, np.stack(arrays), x.dtype, "gather")
        expect.close(collective.reduce_scatter(x), np.split(np.sum(arrays, 0), n)[rank], x.dtype, "reduce_scatter")
        expect.bits(collective.scatter(x, n - 1), np.split(arrays[-1], n)[rank], x.dtype, "scatter")
        exchanged = np.concatenate([np.split(array, n)[rank] for array in arrays], 1)
        expect.bits(collective.all_to_all(x, 0, 1), exchanged, x.dtype, "all_to_all")
        expect.bits(collective.replicate(x), arrays[rank], x.dtype, "replicate")
        expect.bits(collective.shard(x, 1), np.split(arrays[rank], n, 1)[rank], x.dtype, "shard")
        expect.bits(collective.shift(x), arrays[rank - 1], x.dtype, "shift")
        swapped = [(k, n - 1 - k) for k in range(n)]
        expect.bits(collective.permute(x, swapped), arrays[n - 1 - rank], x.dtype, "permute")

"""Gathers of tensors whose lengths differ: exact pieces, no padding to be seen."""

from __future__ import annotations

import numpy as np
import torch

from collective_strategy.collectives import Collective, CollectiveError
from collective_strategy.testing.conformance.arrays import DTYPES, patterns, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check


def _pieces(expect: Expect, actual: object, wanted: list[np.ndarray], dtype: torch.dtype, what: str) -> None:
    if not isinstance(actual, list) or len(actual) != len(wanted):
        expect.true(False, f"{what}: expected a list of {len(wanted)} pieces, got {type(actual).__name__}")
        return
    for rank, (piece, array) in enumerate(zip(actual, wanted, strict=True)):
        expect.bits(piece, array, dtype, f"{what}, piece {rank}")


@check("all_gather", "gather")
def uneven_pieces_come_back_exact(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    shapes = (
        ("first dim", [(k + 1, 2) for k in range(n)]),
        ("zero on some ranks", [((k % 2) * 3, 2) for k in range(n)]),
        ("zero everywhere", [(0, 2)] * n),
        ("all dims", [(n - k, 8 - 2 * k, 3 + k) for k in range(n)]),
        ("equal", [(2, 2)] * n),
        ("no dims", [()] * n),
    )
    for dtype in DTYPES:
        for name, by_rank in shapes:
            inputs = [patterns(dtype, shape, other) for other, shape in enumerate(by_rank)]
            arrays = [raw(x) for x in inputs]
            what = f"{dtype}, {name}"
            _pieces(expect, collective.all_gather(inputs[rank], ragged=True), arrays, dtype, what)
            for dst in {0, n - 1}:
                gathered = collective.gather(inputs[rank], dst, ragged=True)
                if rank == dst:
                    _pieces(expect, gathered, arrays, dtype, f"{what}, gather to {dst}")
                else:
                    expect.same(gathered, None, f"{what}, gather on another rank")


@check("all_gather", "gather")
def uneven_pieces_are_joined_along_a_dim(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (torch.float32, torch.bool, torch.int16, torch.bfloat16):
        for dim in (0, 1, -1):
            for lengths in ([k + 1 for k in range(n)], [3 * (k % 2) for k in range(n)]):
                shapes = [[2, 3, 2] for _ in range(n)]
                for shape, length in zip(shapes, lengths, strict=True):
                    shape[dim] = length
                inputs = [patterns(dtype, tuple(shape), other) for other, shape in enumerate(shapes)]
                wanted = np.concatenate([raw(x) for x in inputs], dim)
                what = f"{dtype} dim {dim} lengths {lengths}"
                expect.bits(collective.all_gather(inputs[rank], dim, ragged=True), wanted, dtype, what)
                expect.bits(
                    collective.all_gather(inputs[rank], dim, sizes=lengths), wanted, dtype, f"{what}, sizes given"
                )
                gathered = collective.gather(inputs[rank], n - 1, dim, ragged=True)
                if rank == n - 1:
                    expect.bits(gathered, wanted, dtype, f"{what}, gather")


@check("all_gather")
def given_sizes_make_a_list_of_pieces(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    lengths = [k + 1 for k in range(n)]
    inputs = [patterns(torch.float32, (length, 2), other) for other, length in enumerate(lengths)]
    pieces = collective.all_gather(inputs[rank], sizes=lengths)
    _pieces(expect, pieces, [raw(x) for x in inputs], torch.float32, "sizes without dim")


@check("all_gather", world_sizes=(2, 3, 4))
def shapes_that_cannot_be_joined_raise_on_all_ranks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    last = rank == n - 1
    dims = torch.ones([2] * (2 if last else 1))
    expect.raises(
        CollectiveError, "dim rank", lambda: collective.all_gather(dims, ragged=True), "numbers of dims differ"
    )
    dtype = torch.ones(2, dtype=torch.float64 if last else torch.float32)
    words = "float32 float64"
    expect.raises(CollectiveError, words, lambda: collective.all_gather(dtype, ragged=True), "dtypes differ")
    other = torch.ones(2, 3 if last else 2)
    act = lambda: collective.all_gather(other, 0, ragged=True)  # noqa: E731
    expect.raises(CollectiveError, "dim shape", act, "another dim differs")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_gather", check=False, world_sizes=(2, 3, 4))
def uneven_gathers_need_no_check_mode(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    inputs = [patterns(torch.float32, (other, 2), other) for other in range(n)]
    pieces = collective.all_gather(inputs[rank], ragged=True)
    _pieces(expect, pieces, [raw(x) for x in inputs], torch.float32, "without check mode")
    dims = torch.ones([2] * (2 if rank == 0 else 1))
    expect.raises(
        CollectiveError, "dim rank", lambda: collective.all_gather(dims, ragged=True), "numbers of dims differ"
    )
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")

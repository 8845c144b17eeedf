"""Programs of operations drawn at random, the same on all ranks, against numpy on the list of inputs."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from collective_strategy.collectives import Collective
from collective_strategy.testing import run_ranks
from collective_strategy.testing.conformance import Expect
from collective_strategy.testing.conformance.arrays import DTYPES, numbers, raw
from collective_strategy.testing.conformance.reductions import expected_reduction, meaningful_ops


def laid_out(x: torch.Tensor, kind: int) -> torch.Tensor:
    if kind == 1 and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 2 and x.ndim > 0:
        return x.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    if kind == 3 and x.dtype.is_complex:
        return x.conj().resolve_conj().conj()
    return x


def steps(n: int, seed: int, length: int) -> Iterator[tuple[str, dict[str, Any], list[torch.Tensor]]]:
    """Operation, arguments and every rank's input; drawn alike on all ranks."""
    draw = random.Random(seed)
    for index in range(length):
        dtype = draw.choice(DTYPES)
        shape = tuple(draw.choice((0, 1, 2, 3, n, 2 * n)) for _ in range(draw.randrange(4)))
        root, dim = draw.randrange(n), draw.randrange(len(shape)) if shape else None
        sizes = [draw.randrange(4) for _ in range(n)]
        op = draw.choice(meaningful_ops(dtype))
        name = draw.choice(
            ("all_gather", "all_gather_cat", "uneven", "broadcast", "all_reduce", "reduce", "gather", "shift",
             "objects", "reduce_scatter", "scatter", "all_to_all", "all_reduce_", "broadcast_")
        )  # fmt: skip
        if dim is None and name in ("all_gather_cat", "uneven", "reduce_scatter", "scatter", "all_to_all"):
            name = "all_reduce"
        if name in ("reduce_scatter", "scatter"):
            shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        if name == "all_to_all":
            shape = (*shape[:dim], 2 * n, *shape[dim + 1 :])
        shapes = [shape] * n
        if name == "uneven":
            shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        kinds = [draw.randrange(4) for _ in range(n)]
        inputs = [
            laid_out(numbers(dtype, own, rank, f"{seed}/{index}"), kind)
            for rank, (own, kind) in enumerate(zip(shapes, kinds, strict=True))
        ]
        yield name, {"root": root, "dim": dim, "sizes": sizes, "op": op, "offset": draw.randrange(-n, n + 1)}, inputs


def run_program(collective: Collective, seed: int, length: int) -> None:
    expect = Expect()
    n, rank = collective.world_size, collective.rank
    for name, given, inputs in steps(n, seed, length):
        x, arrays, dtype = inputs[rank], [raw(y) for y in inputs], inputs[0].dtype
        op, root, dim, sizes = given["op"], given["root"], given["dim"], given["sizes"]
        what = f"seed {seed}: {name} {given} of {dtype} {[tuple(y.shape) for y in inputs]}"
        before = raw(x)
        ends = np.cumsum(sizes)[:-1]
        if name in ("all_reduce", "reduce", "reduce_scatter", "all_reduce_"):
            values, result_dtype = expected_reduction(op, inputs)
            rtol = float(torch.finfo(result_dtype).eps) if op == "mean" else 0.0
        if name == "all_gather":
            expect.bits(collective.all_gather(x), np.stack(arrays), dtype, what)
        elif name == "all_gather_cat":
            expect.bits(collective.all_gather(x, dim), np.concatenate(arrays, dim), dtype, what)
        elif name == "uneven":
            pieces = collective.all_gather(x, ragged=True)
            for piece, array in zip(pieces, arrays, strict=True):
                expect.bits(piece, array, dtype, what)
            expect.bits(collective.all_gather(x, dim, sizes=sizes), np.concatenate(arrays, dim), dtype, what)
        elif name == "broadcast":
            expect.bits(collective.broadcast({"x": x}, root)["x"], arrays[root], dtype, what)
        elif name == "all_reduce":
            expect.close(collective.all_reduce([x], op)[0], values, result_dtype, what, rtol)
        elif name == "reduce":
            reduced = collective.reduce(x, op, root)
            if rank == root:
                expect.close(reduced, values, result_dtype, what, rtol)
        elif name == "gather":
            gathered = collective.gather(x, root)
            if rank == root:
                expect.bits(gathered, np.stack(arrays), dtype, what)
        elif name == "shift":
            expect.bits(collective.shift(x, given["offset"]), arrays[(rank - given["offset"]) % n], dtype, what)
        elif name == "objects":
            expect.same(collective.all_gather_object((rank, op)), [(k, op) for k in range(n)], what)
        elif name == "reduce_scatter":
            wanted = np.split(values, ends, dim)[rank]
            expect.close(collective.reduce_scatter(x, op, dim, sizes=sizes), wanted, result_dtype, what, rtol)
        elif name == "scatter":
            wanted = np.split(arrays[root], ends, dim)[rank]
            expect.bits(collective.scatter(x, root, dim, sizes=sizes), wanted, dtype, what)
        elif name == "all_to_all":
            wanted = np.concatenate([np.split(array, n, dim)[rank] for array in arrays], 0)
            expect.bits(collective.all_to_all(x, dim, 0), wanted, dtype, what)
        elif name == "all_reduce_" and (op != "mean" or dtype.is_floating_point or dtype.is_complex):
            own = x.clone(memory_format=torch.contiguous_format).resolve_conj()
            collective.all_reduce_(own, op)
            expect.close(own, values, dtype, what, rtol)
        elif name == "broadcast_":
            own = x.clone(memory_format=torch.contiguous_format).resolve_conj()
            collective.broadcast_(own, root)
            expect.bits(own, arrays[root], dtype, what)
        expect.bits(x, before, dtype, f"input of {what}")
    expect.finish()


def in_mode(mode: Callable[[], Any], collective: Collective, seed: int, length: int) -> None:
    with mode():
        run_program(collective, seed, length)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_random_programs_give_what_numpy_gives(n: int, check: bool) -> None:
    for outcome in run_ranks(n, run_program, 100 * n + check, 150, check=check):
        outcome.result()


def test_random_programs_on_the_groups_of_a_mesh() -> None:
    def both_axes(collective: Collective) -> None:
        # The rows draw other programs than each other, and use the column in between.
        for round_ in range(6):
            run_program(collective["model"], 10 * round_ + collective["data"].rank, 15)
            run_program(collective["data"], 1000 * round_ + collective["model"].rank, 15)

    for outcome in run_ranks(4, both_axes, mesh={"data": -1, "model": 2}, timeout=20):
        outcome.result()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_random_programs_under_a_grad_mode(mode: Callable[[], Any]) -> None:
    for outcome in run_ranks(2, lambda c: in_mode(mode, c, 7, 100)):
        outcome.result()


def test_random_programs_under_autocast() -> None:
    for outcome in run_ranks(2, lambda c: in_mode(lambda: torch.autocast("cpu", torch.bfloat16), c, 8, 100)):
        outcome.result()
